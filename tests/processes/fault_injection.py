"""A run of each command with a failure at one of the places where it opens or changes a file, and the run after it.

python -m tests.processes.fault_injection --seed 1 --fraction 0.05

Commands on two samples: profile, the same resumed, text and report. Good is an error of one line, no half-written
file, and the results of an undisturbed run when the same command runs again. Exit code: 1 where any place is bad.
"""

import gc
import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.files import TRACKERS
from tests.conftest import save_tiny, tiny_config
from tests.processes.faults import FAULTS, READ
from tests.processes.forked_runs import KILLED, Ended, Run, RunServer
from tests.processes.sweep_contents import NOT_COMPARED, contents, without
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

# How many runs are forked at the same time.
LANES = 2
# Endings of one line for users.
ONE_LINE = re.compile(r"(error: |stopped)[^\n]*\n?")


@dataclass(frozen=True)
class Part:
    """A command, the folder that it begins with, and what it comes to.

    Attributes:
        begin: makes the folder as it is before the command.
        compared: what of the folder two runs have in common.
    """

    name: str
    program: str
    arguments: Sequence[str]
    begin: Callable[[Path], None]
    compared: Callable[[Path], Any]


@dataclass(frozen=True)
class Trial:
    """A part with a failure at one of its places."""

    part: Part
    place: int
    kind: str
    path: str
    fault: str


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: `fault`'s own word for it, and what is wrong, if anything is."""

    trial: Trial
    word: str
    wrong: str | None

    def line(self) -> str:
        """One line for a bad one."""
        trial = self.trial
        return f"{trial.part.name}, place {trial.place} ({trial.kind} {trial.path}), {trial.fault}: {self.wrong}"


class Injection:
    """Makes the folders, finds the places and tries them.

    Args:
        folder: for all files; empty.
        server: forks the runs.
    """

    def __init__(self, folder: Path, server: RunServer, model: Path) -> None:
        self._folder = folder
        self._server = server
        self._inputs = folder / "inputs"
        text_model = save_checkpoint(tiny_llama(), self._inputs / "text_model")
        prompts, grid = self._inputs / "prompts.txt", self._inputs / "grid.yaml"
        prompts.write_text("one question\nand another one\n")
        grid.write_text(
            f"model_name: {text_model}\nprompts: {{path: {prompts}}}\nmax_output_tokens: 2\n"
            "device: cpu\nnum_threads: 1\ntrack_energy: false\nnum_warmup_batches: 0\nsave_outputs: true\n"
        )
        profile = (
            "--model_path", str(model), "--tier_list", "low", "--top_k_list", "2", "--num_active_blocks_list", "2",
            "--num_samples", "2", "--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_warmup_runs", "1",
            "--max_repeats", "0", "--no_reference",
            "--max_new_tokens", "2", "--num_threads", "1", "--config_retry_delay", "0",
            "--device", "cpu",
        )  # fmt: skip
        self.parts = [
            Part("profile", "acc_lat_profiling.py", profile, _nothing, sweep_of),
            Part("text", "run_text_generation.py", ("--config", str(grid)), _nothing, texts_of),
        ]
        self.undisturbed: dict[str, Any] = {}
        self.places: dict[str, list[tuple[str, str]]] = {}
        self.count(self.parts[0])
        finished, begun = folder / "finished", folder / "begun"
        self._folder_of(0).rename(finished)
        # Killed after its first sample was written.
        journal = next(at for at, (kind, path) in enumerate(self.places["profile"]) if _is_journal(kind, path))
        self._run(0, self.parts[0], fail_at=journal + 4)
        shutil.copytree(self._folder_of(0), begun)
        self.parts.insert(1, Part("resume", "acc_lat_profiling.py", profile, _copy_of(begun), sweep_of))
        self.parts.append(Part("report", "report.py", (), _copy_of(finished), page_of))
        for part in self.parts[1:]:
            self.count(part)

    def _folder_of(self, lane: int) -> Path:
        return self._folder / f"results{lane}"

    def _log_of(self, lane: int) -> Path:
        return self._folder / f"log{lane}"

    def _prepared(self, lane: int, part: Part, fail_at: int | None, fault: str, begin: bool = True) -> Run:
        folder = self._folder_of(lane)
        if begin:
            shutil.rmtree(folder, ignore_errors=True)
            part.begin(folder)
        arguments = [str(folder)] if part.program == "report.py" else [*part.arguments, "--output_dir", str(folder)]
        return Run(
            arguments,
            str(self._log_of(lane)),
            program=part.program,
            watched=[str(each) for each in (folder, self._inputs, TRACKERS)],
            fail_at=fail_at,
            fault=fault,
            places_file=f"{self._log_of(lane)}.places",
        )

    def _run(self, lane: int, part: Part, fail_at: int | None = None, fault: str = "kill") -> Ended:
        return self._server.run(self._prepared(lane, part, fail_at, fault))[0]

    def count(self, part: Part) -> None:
        """Run a part undisturbed: its places, and what it comes to."""
        ended = self._run(0, part)
        if ended.code != 0:
            raise RuntimeError(f"{part.name} fails by itself:\n{self._log_of(0).read_text()}")
        self.places[part.name] = [tuple(each) for each in json.loads(Path(f"{self._log_of(0)}.places").read_text())]
        self.undisturbed[part.name] = part.compared(self._folder_of(0))

    def trials(self) -> list[Trial]:
        """Every fault at every place; a file that is opened to be read cannot be refused for want of room."""
        return [
            Trial(part, at, kind, path, fault)
            for part in self.parts
            for at, (kind, path) in enumerate(self.places[part.name])
            for fault in FAULTS
            if (kind, fault) != (READ, "ENOSPC")
        ]

    def tried(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """The outcomes, in order; some run at the same time."""
        for first in range(0, len(trials), LANES):
            together = trials[first : first + LANES]
            ended = self._server.run(
                *(self._prepared(lane, each.part, each.place, each.fault) for lane, each in enumerate(together))
            )
            found = [self._after_fault(lane, *pair) for lane, pair in enumerate(zip(together, ended, strict=True))]
            again = self._server.run(
                *(self._prepared(lane, each.part, None, "kill", begin=False) for lane, each in enumerate(together))
            )
            for lane, (trial, (word, wrong), ending) in enumerate(zip(together, found, again, strict=True)):
                yield Outcome(trial, word, wrong or self._after_rerun(lane, trial.part, ending))

    def _after_fault(self, lane: int, trial: Trial, ended: Ended) -> tuple[str, str | None]:
        folder, log = self._folder_of(lane), self._log_of(lane).read_text()
        torn = torn_files(folder)
        if torn:
            return "torn", f"{torn} is half written"
        if ended.code == KILLED:
            return "killed", None if trial.fault == "kill" else "it was killed"
        if "Traceback" in log:
            return "traceback", f"it ends in a traceback: {log.strip().splitlines()[-1]}"
        if ended.code == 0:
            # The call was one that can fail: nothing is missing.
            return "did without", self._difference(folder, trial.part)
        last = log.strip().splitlines()[-1] if log.strip() else ""
        if not ONE_LINE.fullmatch(last):
            return "no line", f"it ends with {ended.code} and without a line: {last!r}"
        return f"exit {ended.code} with a line", None

    def _after_rerun(self, lane: int, part: Part, ended: Ended) -> str | None:
        folder = self._folder_of(lane)
        if ended.code != 0:
            log = self._log_of(lane).read_text().strip().splitlines() or [""]
            return f"the same command again ends with {ended.code}: {log[-1]}"
        left = [str(path) for path in folder.rglob(".*.tmp")]
        return f"{left} is left over" if left else self._difference(folder, part)

    def _difference(self, folder: Path, part: Part) -> str | None:
        try:
            found = part.compared(folder)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            return f"its results cannot be compared ({type(error).__name__}: {error})"
        expected = self.undisturbed[part.name]
        if found == expected:
            return None
        if isinstance(found, dict) and found.keys() == expected.keys():
            other = [name for name in found if found[name] != expected[name]]
            return f"other results than undisturbed in {other}"
        return "other results than undisturbed"


def _nothing(_folder: Path) -> None:
    return None


def _copy_of(folder: Path) -> Callable[[Path], None]:
    return lambda other: shutil.copytree(folder, other) and None


def _is_journal(kind: str, path: str) -> bool:
    return kind == "fsync" and path.endswith(".jsonl")


def sweep_of(folder: Path) -> Any:
    """What two sweeps have in common, wherever they lie, and whatever is committed meanwhile."""
    return contents(folder, NOT_COMPARED | {"command", "git_commit"})


def page_of(folder: Path) -> Any:
    """The page, which depends on the results alone, and what it is made from."""
    return {"page": (folder / "report.html").read_text(), "names": sorted(path.name for path in folder.iterdir())}


def texts_of(folder: Path) -> Any:
    """Answers and counts of the experiments in the results file, and the names of the files that each has."""
    saved = json.loads((folder / "text_generation_results.json").read_text())
    columns, *rows = (folder / "text_generation_results.csv").read_text().splitlines()
    files = {}
    for name in saved:
        number = name.removeprefix("experiment_")
        own = sorted((folder / "raw_results" / number).iterdir())
        files[name] = [path.name.replace(number, "ID") for path in own]
        files[f"{name} says"] = [path.read_text() for path in own if "_output" in path.name]
    return {
        "experiments": [_without_floats(without(each, {*NOT_COMPARED, "command"})) for each in saved.values()],
        "columns": columns,
        "rows": len(rows),
        "files": list(files.values()),
    }


def _without_floats(content: Any) -> Any:
    """Without times, and what is computed from them; without ids and moments in texts."""
    if isinstance(content, dict):
        kept = {key: _without_floats(value) for key, value in content.items()}
        return {key: value for key, value in kept.items() if not re.search("bytes|time|date|percent|memory|^git", key)}
    if isinstance(content, list):
        return [_without_floats(each) for each in content if not isinstance(each, float)]
    return None if isinstance(content, float) else content


def torn_files(folder: Path) -> list[str]:
    """Files with a final name that are not whole."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and path.name[0] != "." and not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    text = path.read_text()
    if path.suffix == ".json":
        try:
            json.loads(text)
        except ValueError:
            return False
    if path.suffix == ".html":
        return text.rstrip().endswith("</html>")
    return path.suffix != ".csv" or text.endswith("\n")


def smallest_model(folder: Path) -> Path:
    """The folder of a model as small as a run allows."""
    return save_tiny(tiny_config(num_hidden_layers=2, num_vision_layers=1), folder / "inputs" / "model")


def inject(
    folder: Path,
    server: RunServer,
    model: Path,
    seed: int,
    fraction: float,
    say: Callable[[str], None],
    only: str | None = None,
) -> int:
    """Try a random fraction of all places and faults; returns how many are bad.

    Args:
        folder: for all files of it.
        model: of `smallest_model`.
        say: takes the lines: how many places there are and how many are tried, the bad ones, the outcomes.
        only: the part, all where it is None.
    """
    injection = Injection(folder, server, model)
    own = [trial for trial in injection.trials() if only in (None, trial.part.name)]
    number = max(round(fraction * len(own)), 1)
    chosen = sorted(random.Random(seed).sample(range(len(own)), number))
    counts = ", ".join(f"{len(places)} of {name}" for name, places in injection.places.items())
    say(f"places: {counts}; with the faults {', '.join(FAULTS)} {len(own)} trials, of which {number} are tried")
    outcomes = []
    for outcome in injection.tried([own[at] for at in chosen]):
        outcomes.append(outcome)
        if outcome.wrong is not None:
            say(outcome.line())
    for (name, word), count in sorted(Counter((each.trial.part.name, each.word) for each in outcomes).items()):
        say(f"{name}: {count} {word}")
    bad = sum(each.wrong is not None for each in outcomes)
    say(f"{len(outcomes) - bad} of {len(outcomes)} are good")
    return bad


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fraction", type=float, default=0.05, help="of all places and faults")
    parser.add_argument("--part", choices=("profile", "resume", "text", "report"), help="one command alone")
    given = parser.parse_args()
    # The tests' own start switches it off.
    gc.enable()
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = smallest_model(folder)
        with RunServer(model) as server:
            say = partial(print, flush=True)
            return 1 if inject(folder, server, model, given.seed, given.fraction, say, given.part) else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
