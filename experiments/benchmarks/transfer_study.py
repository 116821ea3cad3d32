"""How far a choice of knobs carries: to another machine, to other questions, to another task, to longer answers.

`python -m experiments.benchmarks.transfer_study [FOLDER]` prints the tables of docs/evidence/study.md, which has the
questions, the rules and what was expected.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.result_files import CONCLUSION_FILE, read_json_object
from experiments.fitting.held_out import drawn_groups, relative_error
from experiments.fitting.intervals import drawn_sums, interval, ratio_intervals
from experiments.fitting.regression import LEAST_SPAN, relative_nonnegative
from experiments.fitting.verdicts import cluster_sums

FOLDER = REPOSITORY / "docs" / "evidence" / "study"
OTHER_MACHINE = REPOSITORY / "docs" / "evidence" / "smollm2_135m"
# The last one is of the model that another machine has measured, too.
TASKS = ("vqa", "reading", "counting", "knowledge", "questions")
# The latter are most tokens of an answer to `questions` where no limit is given.
NUM_HALVES, TASK_LIMIT = 500, 64
# Most points of accuracy that a choice may lose (sums have other digits), and by which two times in percent may differ.
ACCEPTED_LOSS, SAME_RATIO = 5.0 + 1e-9, 3.0
ALL_OTHERS = "all others"


@dataclass(frozen=True)
class TaskTable:
    """S settings of a task, the reference first, on N questions; a time is nan where a question was not timed."""

    name: str  #: of the run
    settings: tuple[str, ...]  #: [S] keys
    pictures: np.ndarray  #: [N], name of each question's picture
    values: np.ndarray  #: [4, S, N]: scores in percent of the best, mean total ms, tokens of prompt and of answer
    answers: np.ndarray  #: [S, N] texts

    def of_questions(self, kept: np.ndarray) -> "TaskTable":
        """The table of the questions at these places, or of which [N] bools are true."""
        values, answers = self.values[:, :, kept], self.answers[:, kept]
        return replace(self, pictures=self.pictures[kept], values=values, answers=answers)

    def of_settings(self, settings: Sequence[str]) -> "TaskTable":
        """The table of these settings."""
        rows = [self.settings.index(key) for key in settings]
        return replace(self, settings=tuple(settings), values=self.values[:, rows], answers=self.answers[rows])

    @property
    def of_timed(self) -> "TaskTable":
        """The table of the questions that have a time at every setting."""
        return self.of_questions(np.isfinite(self.values[1]).all(axis=0))

    @property
    def mean_ms(self) -> np.ndarray:
        """[S], of the timed questions."""
        return np.asarray(self.of_timed.values[1].mean(axis=1))

    @property
    def losses(self) -> np.ndarray:
        """[S], points of accuracy below the reference."""
        return np.asarray((self.values[0, 0] - self.values[0]).mean(axis=1))

    @property
    def upper_losses(self) -> np.ndarray:
        """[S], the upper end of the 95 % bootstrap interval over pictures of each loss."""
        numbers = np.unique(self.pictures, return_inverse=True)[1]
        sums, counts = cluster_sums(self.values[0, 0] - self.values[0], numbers)
        return np.array([high for _, high in ratio_intervals(sums, np.tile(counts, (len(sums), 1)))])

    def halves(self) -> Iterator[tuple["TaskTable", "TaskTable"]]:
        """Two halves of the questions, drawn by picture, for each seed."""
        for seed in range(NUM_HALVES):
            mask = drawn_groups(self.pictures.tolist(), [self.name] * len(self.pictures), 0.5, seed)
            yield self.of_questions(mask), self.of_questions(~mask)

    def lengths(self, at: int) -> np.ndarray:
        """[N, 3] of a setting: 1, tokens of the prompt and tokens of the answer."""
        return np.column_stack([np.ones(len(self.pictures)), *self.values[2:, at]])

    def line(self, at: int) -> np.ndarray:
        """[3] of a setting, fitted: ms of a request, of each token of its prompt, and of each output token."""
        return relative_nonnegative(self.lengths(at), self.values[1, at], scaled=True)


def _csv(folder: Path, kind: str) -> pd.DataFrame:
    path = next(folder.glob(f"*_{kind}.csv"), None)
    if path is None:
        raise ResultsError(f"{folder} has no table of {kind}; give the folder of all runs of the study")
    # An answer may be "NA".
    return pd.read_csv(path, keep_default_na=False, na_values={"T_total_ms": "", "accuracy": ""})


def task_table(folder: Path) -> TaskTable:
    """The table of a run's CSV files, of the questions that have a score at every setting.

    An answer limit of TASK_LIMIT tokens is none: of two settings that are then one, the reference stays.

    Raises:
        ResultsError: the run is not there, or INVALID, so that its times say nothing.
    """
    samples, settings = _csv(folder, "samples"), _csv(folder, "settings")
    for reason in read_json_object(folder / CONCLUSION_FILE)["voided_by"]:
        raise ResultsError(f"{folder} is INVALID: {reason}; measure it again")
    keys: dict[str, str] = {}
    for key in settings.sort_values("is_reference", ascending=False, kind="stable")["setting"]:
        keys.setdefault(key.removesuffix(f"_answer{TASK_LIMIT}"), key)
    columns = ["accuracy", "T_total_ms", "prompt_tokens", "output_tokens", "pred"]
    wide = samples.pivot(index=["sample_id", "image_id"], columns="setting", values=columns)
    *numbers, answers = (wide[column][list(keys.values())].to_numpy().T for column in columns)
    values = np.array(numbers, dtype=float)
    values[0] *= 100 / settings["metric_best"].iloc[0]
    pictures = wide.index.get_level_values("image_id").to_numpy(str)
    table = TaskTable(folder.name, tuple(keys), pictures, values, answers)
    return table.of_questions(np.isfinite(values[0]).all(axis=0))


def machine_frame(first: TaskTable, second: TaskTable) -> pd.DataFrame:
    """Question 1: each setting's mean time in percent of the reference's, on questions that both machines timed, each
    its own picture, by whose name they are matched.
    """
    tables = first.of_timed, second.of_timed
    pictures, *places = np.intersect1d(tables[0].pictures, tables[1].pictures, return_indices=True)
    rows = []
    for setting in [key for key in first.settings[1:] if key in second.settings]:
        one, other = (table.of_settings([setting, table.settings[0]]).of_questions(at)
                      for table, at in zip(tables, places, strict=True))  # fmt: skip
        times = np.concatenate([one.values[1], other.values[1]])
        sums = np.vstack([times.sum(axis=1), drawn_sums(times.T)])
        percents = 100 * sums[:, ::2] / sums[:, 1::2]
        (here, there), (low, high) = percents[0].tolist(), interval(percents[1:, 0] - percents[1:, 1])
        is_same, is_changed = max(-low, high) <= SAME_RATIO, max(low, -high) > SAME_RATIO
        rows.append({
            "setting": f"`{setting}`", "questions": len(pictures), "two CPU cores, %": here, "H200, %": there,
            "difference": here - there, "95 %": f"{low:+.1f} to {high:+.1f}",
            "carries over": "yes" if is_same else "no" if is_changed else "can't tell",
            "same answers": int((one.answers[0] == other.answers[0]).sum()),
        })  # fmt: skip
    return pd.DataFrame(rows)


class Outcome(NamedTuple):
    """What a setting that was chosen elsewhere does."""

    is_reference: bool
    loss: float  #: points of accuracy below the reference
    percent: float  #: mean time in percent of the reference's


def outcome(table: TaskTable, setting: str) -> Outcome:
    """What a setting does on a table's questions."""
    at, times = table.settings.index(setting), table.mean_ms
    return Outcome(at == 0, float(table.losses[at]), float(100 * times[at] / times[0]))


def fastest(table: TaskTable, losses: np.ndarray) -> str:
    """The fastest setting of those whose loss, of [S], is accepted."""
    return table.settings[int(np.argmin(np.where(losses <= ACCEPTED_LOSS, table.mean_ms, np.inf)))]


def _summary(outcomes: Sequence[Outcome], rule: str = "") -> dict[str, float]:
    is_reference, losses, percents = np.array(outcomes).T
    fractions = 1 - is_reference.mean(), (losses > ACCEPTED_LOSS).mean()
    figures = *(100 * fraction for fraction in fractions), losses.mean(), percents.mean()
    columns = "another setting, %", "loses over 5 points, %", "mean loss", "time, %"
    return {rule + column: float(figure) for column, figure in zip(columns, figures, strict=True)}


def half_frame(tables: Sequence[TaskTable]) -> pd.DataFrame:
    """Question 2: what was chosen on one half of a task's questions does this on the other, over pairs of halves."""
    outcomes = {
        f"`{table.name}`": [
            (outcome(half, fastest(chooser, chooser.losses)), outcome(half, fastest(chooser, chooser.upper_losses)))
            for chooser, half in table.halves()
        ]
        for table in tables
    }
    outcomes["all"] = [pair for pairs in outcomes.values() for pair in pairs]
    rules = [(name, *zip(*pairs, strict=True)) for name, pairs in outcomes.items()]
    return pd.DataFrame(
        [{"run": name, **_summary(mean, "mean: "), **_summary(limit, "limit: ")} for name, mean, limit in rules]
    )


def by_model(tables: Sequence[TaskTable]) -> Iterator[list[TaskTable]]:
    """The tables of each model, which is known by its reference, with the settings that all of them have."""
    for reference in dict.fromkeys(table.settings[0] for table in tables):
        model = [table for table in tables if table.settings[0] == reference]
        common = [key for key in model[0].settings if all(key in table.settings for table in model)]
        yield [table.of_settings(common) for table in model]


def joined(tables: Sequence[TaskTable]) -> TaskTable:
    """All questions of several tasks with the same settings."""
    pictures = np.array([f"{table.name} {picture}" for table in tables for picture in table.pictures])
    parts = [np.concatenate([getattr(table, part) for table in tables], axis=-1) for part in ("values", "answers")]
    return TaskTable(ALL_OTHERS, tables[0].settings, pictures, *parts)


def transfer_frames(tables: Sequence[TaskTable]) -> list[pd.DataFrame]:
    """Question 3: what was chosen by the mean on one task, or on all others of the model, does this on another."""
    cells: dict[tuple[str, str], list[str]] = {}
    outcomes: dict[str, list[Outcome]] = {"one other task": [], ALL_OTHERS: []}
    for model in by_model(tables):
        pairs = [(chooser, task) for chooser in model for task in model if chooser is not task]
        if len(model) > 2:
            pairs += [(joined([table for table in model if table is not task]), task) for task in model]
        for chooser, task in pairs:
            setting = fastest(chooser, chooser.losses)
            result = outcome(task, setting)
            outcomes[ALL_OTHERS if chooser.name == ALL_OTHERS else "one other task"].append(result)
            mark = "**" * (result.loss > ACCEPTED_LOSS)
            text = f"{mark}{task.name} {result.loss:+.1f}, {result.percent:.0f} %{mark}"
            cells.setdefault((chooser.name, f"`{setting}`"), []).append(text)
    long = [(*names, "; ".join(texts)) for names, texts in cells.items()]
    short = [{"chosen on": name, "pairs": len(own)} | _summary(own) for name, own in outcomes.items() if own]
    heading = "points lost, time in % of the reference's (bold: over 5 points)"
    return [pd.DataFrame(long, columns=["chosen on", "setting", heading]), pd.DataFrame(short)]


def errors_of(fit: TaskTable, test: TaskTable, at: int) -> tuple[float, float]:
    """Mean relative error in percent, on other questions, of a setting's line and of its mean time."""
    predictions = test.lengths(at) @ fit.line(at), np.full(len(test.pictures), fit.values[1, at].mean())
    line, mean = (100 * relative_error(predicted, test.values[1, at]) for predicted in predictions)
    return line, mean


def break_even(table: TaskTable, at: int) -> float | None:
    """By how many tokens a setting's answer may be longer than the reference's mean one until both take as long, at the
    reference's mean prompt; None where its answers are of too few lengths for a slope.
    """
    tokens, line = table.values[3, at], table.line(at)
    if tokens.max() < LEAST_SPAN * tokens.min() or line[2] == 0:
        return None
    usual = table.lengths(0).mean(axis=0)
    return float((table.line(0) @ usual - line[:2] @ usual[:2]) / line[2] - usual[2])


def line_frames(tables: Sequence[TaskTable]) -> list[pd.DataFrame]:
    """Question 4: errors of lines over pairs of halves; lines of settings whose answers are of several lengths."""
    errors, lines = [], []
    for table in (table.of_timed for table in tables):
        halves, tokens = list(table.halves()), table.values[3].mean(axis=1)
        by_half = [[errors_of(fit, test, at) for at in range(len(table.settings))] for fit, test in halves]
        line, mean = np.mean(by_half, axis=(0, 1))
        errors.append({"run": f"`{table.name}`", "error of the lines, %": line, "of the mean time, %": mean})
        for at, setting in enumerate(table.settings):
            longer = break_even(table, at)
            if longer is None:
                continue
            low, high = interval(np.array([break_even(fit, at) for fit, _ in halves], dtype=float))
            lines.append({
                "setting": f"`{table.name}` `{setting}`", **dict(zip(("a", "b", "c"), table.line(at), strict=True)),
                "mean tokens": tokens[at], "longer by": tokens[at] - tokens[0], "may be longer by": longer,
                "95 % of halves": f"{round(low, 1) + 0.0:+.1f} to {round(high, 1) + 0.0:+.1f}",
            })  # fmt: skip
    return [pd.DataFrame(errors), pd.DataFrame(lines)]


def markdown(frame: pd.DataFrame) -> str:
    """The frame as a table; a number that is not whole has two digits, and is never minus zero."""
    rows = frame.map(lambda cell: f"{round(cell, 2) + 0.0:.2f}" if isinstance(cell, float) else str(cell))
    lines: list[Iterable[str]] = [frame.columns, ["---"] * len(frame.columns), *rows.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def study_tables(folder: Path = FOLDER) -> dict[str, str]:
    """The tables of the study by the names of their blocks on its page; raises as `task_table`."""
    tasks = [task_table(folder / name) for name in TASKS]
    frames = {
        "study_machines": [machine_frame(tasks[-1], task_table(OTHER_MACHINE))],
        "study_halves": [half_frame(tasks)],
        "study_tasks": transfer_frames(tasks),
        "study_lines": line_frames(tasks),
    }
    return {name: "\n\n".join(map(markdown, parts)) for name, parts in frames.items()}


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = OneLineParser(prog="python -m experiments.benchmarks.transfer_study", description="Tables of the study.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="folder of its runs")
    for name, table in study_tables(parser.parse_args(argv).folder).items():
        print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
