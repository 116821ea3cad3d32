"""The overhead's table of one measured request, by modules and by engines, on a tiny shape of five blocks."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks.controller_overhead import main
from experiments.controller.knob_choices import KnobSpace
from tests.conftest import tiny_config
from tests.experiments.controller.hand_made_checkpoints import checkpoint

TIMES = (
    "first_stage_ms",
    "second_stage_ms",
    "controller_ms",
    "adaptive_total_ms",
    "plain_total_ms",
    "adaptive_less_plain_ms",
)


@pytest.mark.parametrize(("execution", "runs_as"), [("eager", "eager"), ("graph", "cpu")])
def test_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str], execution: str, runs_as: str) -> None:
    tiny_config(num_hidden_layers=5).save_pretrained(tmp_path)
    flags = ["--shape", str(tmp_path), "--rounds", "1", "--num_samples", "1", "--dataset_name", "reference_vqa"]
    assert main([*flags, "--device", "cpu", "--num_threads", "1", "--execution", execution]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["execution"]) == ("cpu", runs_as)
    assert found["num_runs"] == 1 and found["capture_s"] > 0
    ((choice, number),) = found["choices"].items()
    assert choice.startswith("tier-") and "_pause" in choice and number == 1
    # Of one run the median is the run.
    at = {name: found[name]["p50"] for name in TIMES}
    assert at["controller_ms"] == pytest.approx(at["first_stage_ms"] + at["second_stage_ms"])
    assert at["adaptive_less_plain_ms"] == pytest.approx(at["adaptive_total_ms"] - at["plain_total_ms"])
    assert 0 < found["new_budget_first_stage_ms"]["p50"] < at["adaptive_total_ms"]
    assert found["controller_share"] == pytest.approx(at["controller_ms"] / at["adaptive_total_ms"])
    assert 0 < at["controller_ms"] < at["adaptive_total_ms"]


@pytest.mark.parametrize(("blocks", "code", "output"), [(5, 0, '"num_runs": 1'), (6, 2, "blocks 5 in place of 6")])
def test_trained_networks_run_on_random_weights_that_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocks: int, code: int, output: str
) -> None:
    """Of a shape there are no weights to compare; the checkpoint is of some others, of five blocks."""
    knobs = KnobSpace(("low", "medium"), (4,), (4, 5), num_total_blocks=5, first_top_k=4)
    made = checkpoint(tmp_path, knobs, name="folder/trained", weights_sha256="0" * 64)
    tiny_config(num_hidden_layers=blocks).save_pretrained(tmp_path)
    flags = ["--shape", str(tmp_path), "--rounds", "1", "--num_samples", "1", "--checkpoint", str(made)]
    assert main([*flags, "--device", "cpu", "--num_threads", "1", "--max_new_tokens", "2"]) == code
    found = capsys.readouterr()
    assert output in (found.err if code else found.out)


def test_no_rounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config(num_hidden_layers=5).save_pretrained(tmp_path)
    assert main(["--shape", str(tmp_path), "--rounds", "0", "--num_samples", "1", "--device", "cpu"]) == 2
    assert "--rounds 0 is not possible; give at least 1" in capsys.readouterr().err
