"""A twentieth of the places where a run opens or changes a file, each with a failure or a kill there."""

from pathlib import Path

from tests.processes.fault_injection import inject, smallest_model
from tests.processes.forked_runs import RunServer


def test_a_twentieth_of_all_places_and_faults_leaves_one_line_and_the_same_results(
    run_server: RunServer, tmp_path: Path
) -> None:
    lines: list[str] = []
    bad = inject(tmp_path, run_server, smallest_model(tmp_path), 1, 0.05, lines.append)
    assert not bad, "\n".join(lines)
    assert lines[0].startswith("places: ") and lines[-1].endswith(" are good")
