"""Policies x budgets: accuracy, latency, violations and overhead, replayed from a full grid or measured live.

knobprof controller evaluate results/grid --num_budgets 8
knobprof controller evaluate results/grid --mode live --num_samples 32 --budgets_ms 400
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.csv_tables import csv_of_rows
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_json_atomically, write_text_atomically
from experiment_core_utils.primitives.statistics import percentiles_over_runs
from experiment_core_utils.primitives.units import LARGEST_SEED, check_above, check_fraction, check_within, milliseconds
from experiment_core_utils.records.caveats import caveat_fields
from experiments.analyses.charts.matplotlib_charts import save_chart
from experiments.analyses.files import add_output_flags, finding_lines
from experiments.analyses.knobs.conclusion import invalid_lines
from experiments.controller.caveats import ControllerCaveat
from experiments.controller.evaluation.figures import NAME, evaluation_chart
from experiments.controller.evaluation.record import (
    BEST_STATIC,
    Budget,
    Evaluation,
    content_of,
    evaluate,
    evaluation_findings,
    rows_of,
    table_lines,
)
from experiments.controller.evaluation.replay import (
    PerSampleOracle,
    best_static,
    meetable,
    possible,
    replay,
    requests_in,
    shares_of_reference,
    spread_budgets,
)
from experiments.controller.lookup import Lookup, load
from experiments.controller.measured_grid import MeasuredGrid, load_grid, split_by_picture
from experiments.controller.policies.baselines import CHOSEN_TABLE
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import Policy, check_budget
from experiments.controller.policies.of_flags import (
    add_policy_flags,
    check_policy_flags,
    further_policies,
    lookup_of,
    margin_of,
    policies_of,
)

FEW_REQUESTS = 100
CALIBRATION_FRACTION = 0.5


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags; with --mode live all others go to the profiler's configuration."""
    parser = OneLineParser(
        prog="evaluate_controller.py",
        description="Evaluate policies that choose the knobs, at latency budgets.",
        examples=(
            "knobprof controller evaluate results/grid",
            "knobprof controller evaluate results/grid --budgets_ms 100 200 --baselines",
            "knobprof controller evaluate results/grid --mode live --budget_shares 0.9 --num_samples 80",
        ),
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS",
                        help="full grid: --output_dir of a run (several: one sweep), or its tables")  # fmt: skip
    parser.add_argument("--mode", choices=("replay", "live"), default="replay",
                        help="replay: look up what the grid measured; live: run the model")  # fmt: skip
    parser.add_argument("--calibration", type=Path, nargs="+", metavar="RESULTS",
                        help="another grid, to build the lookup of (default: a part of the first)")  # fmt: skip
    parser.add_argument("--calibration_share", type=float, metavar="FRACTION",
                        help=f"fraction of the grid's pictures for the lookup, in a replay "
                            f"(default: {CALIBRATION_FRACTION:g})")  # fmt: skip
    budgets = parser.add_argument_group("budgets").add_mutually_exclusive_group()
    budgets.add_argument("--budgets_ms", type=float, nargs="+", metavar="MS", help="latency budgets")
    budgets.add_argument("--budget_shares", type=float, nargs="+", metavar="FRACTION",
                         help="budgets as fractions of the reference's mean latency on the calibration samples "
                              "(without a reference: of the largest setting's)")  # fmt: skip
    budgets.add_argument("--num_budgets", type=int, default=8, metavar="N",
                         help="number of budgets, spread over the calibration samples' latencies")  # fmt: skip
    parser.add_argument("--changing_load", type=float, metavar="SECONDS",
                        help="live: keep all CPU cores busy by other processes in every second period of this length "
                             "(default: no load)")  # fmt: skip
    add_policy_flags(parser.add_argument_group("policies"))
    parser.add_argument(
        "--evaluation_seed",
        type=int,
        default=0,
        help="seed of the split, of the random policy and of the order",
    )
    add_output_flags(parser, "analysis/controller_<mode> in the folder of the first results")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the policies. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parsed, rest = build_parser().parse_known_args(argv)
    _check(parsed, rest)
    done = replayed(parsed) if parsed.mode == "replay" else measured_live(parsed, rest)
    shown = [*invalid_lines(done.voided_by), *(f"caveat: {caveat.sentence}" for caveat in done.caveats)]
    findings = [*shown, *evaluation_findings(done.evaluation)]
    print("\n".join(finding_lines(findings, table_lines(done.evaluation), done.written, parsed.verbose)))


def _check(parsed: argparse.Namespace, rest: Sequence[str]) -> None:
    if parsed.mode == "replay" and rest:
        raise ConfigurationError(f"unknown flag {rest[0]}; flags of the profiler go with --mode live only")
    if parsed.calibration_share is not None:
        own_flag = f"--calibration_share {parsed.calibration_share:g}"
        check_fraction("--calibration_share", parsed.calibration_share)
        for flag, has in (("--mode live", parsed.mode == "live"), ("--calibration", parsed.calibration is not None),
                          ("--lookup", parsed.lookup is not None)):  # fmt: skip
            if has:
                raise ConfigurationError(
                    f"{own_flag} splits the grid of a replay, and {flag} leaves nothing to split; drop one"
                )
    check_within("--evaluation_seed", parsed.evaluation_seed, 0, LARGEST_SEED)
    check_policy_flags(parsed)
    if parsed.mode == "live":
        _check_live(parsed, rest)
    elif parsed.changing_load is not None:
        raise ConfigurationError(
            f"--changing_load {parsed.changing_load:g} slows a running model; drop it, or give --mode live"
        )


def _check_live(parsed: argparse.Namespace, rest: Sequence[str]) -> None:
    if parsed.states is not None:
        raise ConfigurationError(
            f"--states {parsed.states} is for a replay: with --mode live two_stage sees the states of the running "
            "model; drop one of the two"
        )
    if parsed.changing_load is not None:
        check_above("--changing_load", parsed.changing_load, 0.0)
    parser = OneLineParser(add_help=False)
    parser.add_argument("--dataset_name", nargs="+", action="extend", default=[])
    tasks = parser.parse_known_args(rest)[0].dataset_name
    if len(tasks) > 1:
        raise ConfigurationError(
            f"--mode live measures one task, and --dataset_name names {len(tasks)} ({', '.join(tasks)}); give one, "
            f"and a run of its own to each of the others"
        )


def parts_of(parsed: argparse.Namespace) -> tuple[MeasuredGrid, MeasuredGrid]:
    """The calibration samples, and those that are evaluated in a replay."""
    grid = load_grid(parsed.results)
    if parsed.calibration is not None:
        return load_grid(parsed.calibration), grid
    if parsed.lookup is not None:
        lookup_keys = load(parsed.lookup).keys
        lookup_pictures = {picture for key, picture in zip(grid.keys, grid.pictures, strict=True) if key in lookup_keys}
        mask = np.array([picture in lookup_pictures for picture in grid.pictures])
        # The pictures that it was made of, and the rest; the whole grid for both where one would be empty.
        return (grid.take(mask), grid.take(~mask)) if mask.any() and not mask.all() else (grid, grid)
    fraction = CALIBRATION_FRACTION if parsed.calibration_share is None else parsed.calibration_share
    return split_by_picture(grid, fraction, parsed.evaluation_seed)


def budgets_of(parsed: argparse.Namespace, calibration: MeasuredGrid) -> tuple[float, ...]:
    """Budgets in seconds, ascending."""
    if parsed.budget_shares is not None:
        return shares_of_reference(calibration, parsed.budget_shares)
    if parsed.budgets_ms is None:
        return spread_budgets(calibration.complete(), parsed.num_budgets)
    for budget_ms in parsed.budgets_ms:
        check_budget(budget_ms / 1000)
    return tuple(sorted({budget_ms / 1000 for budget_ms in parsed.budgets_ms}))


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that was written."""

    evaluation: Evaluation
    caveats: list[ControllerCaveat]  #: what a reader must know
    voided_by: list[str]  #: why a run that it is based on is INVALID, a sentence each
    written: list[Path]


def replayed(parsed: argparse.Namespace) -> Evaluated:
    """Replay everything from the grid, and write it.

    Raises:
        ConfigurationError, ResultsError: flags or files do not allow it.
    """
    calibration, evaluated = parts_of(parsed)
    grid, seed = evaluated.complete(), parsed.evaluation_seed
    learned: list[Policy] = []
    num_without_states = 0
    notes = [ControllerCaveat.of("overhead_apart")]
    if parsed.learned is not None:
        # torch takes seconds to import; the other policies do not need it.
        from experiments.controller.policies.learned import learned_replay

        found = learned_replay(parsed.learned, parsed.states, calibration, grid)
        grid, learned, notes = found.grid, [found.policy], [*notes, *found.caveats]
        num_without_states = found.num_without_states
    lookup = lookup_of(parsed, calibration)
    seconds = budgets_of(parsed, calibration)
    further = further_policies(parsed, calibration, lookup, seconds)
    policies: list[Policy] = [
        *policies_of(parsed, grid, lookup, seed), *further, *learned, PerSampleOracle(grid)
    ]  # fmt: skip
    outcomes = [best_static(grid, seconds), *(replay(policy, grid, seconds) for policy in policies)]
    could, can = possible(grid, seconds), meetable(grid, seconds)
    whole_s = calibration.reference_mean_s
    budgets = [Budget(s, can[at], float(could[at].mean()), _share(s, whole_s)) for at, s in enumerate(seconds)]
    names = (lookup.name, *[CHOSEN_TABLE] * (CHOSEN_TABLE in [each.name for each in further]), BEST_STATIC)
    evaluation = evaluate("replay", outcomes, requests_in(grid), budgets, could, names)
    caveats = [*reference_caveats(parsed, calibration), *caveats_of(grid, lookup), *notes]
    written = write(parsed, evaluation, grid, grid.caption, {
        **shared_content(parsed, grid, lookup, calibration), "num_dropped": len(evaluated) - len(grid),
        "num_without_states": num_without_states, **caveat_fields(caveats),
    }, further)  # fmt: skip
    said = [*reference_caveats(parsed, calibration), *_seen(lookup, grid.keys)]
    return Evaluated(evaluation, said, voiding(grid, calibration, lookup), written)


def measured_live(parsed: argparse.Namespace, flags: Sequence[str]) -> Evaluated:
    """Measure live and write; the grid is used for the lookup and the static settings of the figure only.

    Raises:
        ConfigurationError, ResultsError: flags, files or the model do not allow it.
    """
    # torch and transformers take seconds to import; a replay needs neither.
    from experiments.controller.evaluation.live import (
        controllers_of,
        grouped_accuracy,
        live_caveats,
        open_live,
    )
    from experiments.controller.provenance import task_caveats
    from experiments.controller.running.changing_load import changing_load
    from experiments.controller.running.live import run_live
    from experiments.controller.training.run import load_networks

    if parsed.learned is not None:
        # Read for use after the model's warm-up; a file that is not a checkpoint is refused before anything slow.
        load_networks(parsed.learned)
    whole, seed = load_grid(parsed.results), parsed.evaluation_seed
    grid = whole.with_all_knobs()
    calibration = grid if parsed.calibration is None else load_grid(parsed.calibration).with_all_knobs()
    lookup = lookup_of(parsed, calibration)
    seconds = budgets_of(parsed, calibration)
    further = further_policies(parsed, calibration, lookup, seconds)
    policies = [*policies_of(parsed, grid, lookup, seed), FeedbackPolicy(lookup, lookup.typical_s), *further]
    job = open_live(flags, policies, grid, parsed.learned)
    controllers = controllers_of(job, parsed.learned)
    with changing_load(parsed.changing_load):
        outcomes = run_live(controllers, job.model, job.metric, job.measured, seconds, seed)
    can = meetable(grid.complete(), seconds)
    whole_s = calibration.reference_mean_s
    budgets = [Budget(s, can[at], None, _share(s, whole_s)) for at, s in enumerate(seconds)]
    evaluation = evaluate("live", outcomes, job.evaluated, budgets, None, (lookup.name,))
    keys = [(request.features.task, request.features.sample_id) for request in job.measured]
    dots = grid.complete()
    notes = reference_caveats(parsed, calibration)
    notes += [each for each in whole.unchosen if each not in notes]
    written = write(parsed, evaluation, dots, f"{job.caption}\nstatic settings: {dots.caption}", {
        **shared_content(parsed, grid, lookup, calibration),
        "source": job.source,
        "metrics": {job.task.name: job.metric.name},
        "changing_load_s": parsed.changing_load,
        "num_dropped": len(job.failed),
        "accuracy_grouped": grouped_accuracy(job, seconds),
        **caveat_fields([
            *notes, *_few(len(keys)), *_seen(lookup, keys),
            *task_caveats(grid, job.task.name, job.task.split), *live_caveats(job, parsed.learned),
        ]),
    }, further)  # fmt: skip
    return Evaluated(evaluation, [*notes, *_seen(lookup, keys)], voiding(grid, calibration, lookup), written)


def _share(budget_s: float, whole_s: float | None) -> float | None:
    return None if whole_s is None else budget_s / whole_s


def reference_caveats(parsed: argparse.Namespace, calibration: MeasuredGrid) -> list[ControllerCaveat]:
    """That the fractions of --budget_shares are not of the model as it is, and what --learned cannot choose."""
    caveats = []
    if calibration.reference is None and parsed.budget_shares is not None:
        caveats.append(ControllerCaveat.of("reference_not_measured", setting=calibration.largest.key))
    return caveats if parsed.learned is None else [*caveats, *calibration.unchosen]


def voiding(*based_on: MeasuredGrid | Lookup) -> list[str]:
    """Why grids and a lookup are of an INVALID run, each sentence once."""
    return list(dict.fromkeys(sentence for each in based_on for sentence in each.voided_by))


def shared_content(
    parsed: argparse.Namespace, grid: MeasuredGrid, lookup: Lookup, calibration: MeasuredGrid
) -> dict[str, Any]:
    """The fields that both modes write about their inputs."""
    return {
        "source": grid.source,
        "metrics": dict(grid.metrics),
        "settings_left_out": list(grid.left_out),
        "num_calibration_requests": len(calibration),
        "reference": None
        if calibration.reference is None
        else {
            "setting": calibration.reference.key,
            "latency_mean_ms": milliseconds(calibration.reference_mean_s),
        },
        "lookup": asdict(lookup.options),
        "margin": margin_of(parsed),
        "evaluation_seed": parsed.evaluation_seed,
        "voided_by": voiding(grid, calibration, lookup),
    }


def caveats_of(grid: MeasuredGrid, lookup: Lookup) -> list[ControllerCaveat]:
    """Caveats that a reader of a replay must know."""
    together = [task for task, metric in grid.metrics.items() if metric == "cider_score"]
    notes = [ControllerCaveat.of("cider_of_a_part", task=task) for task in together]
    return [*_few(len(grid)), *_seen(lookup, grid.keys), *notes]


def _few(number: int) -> list[ControllerCaveat]:
    return [ControllerCaveat.of("few_requests", num_requests=number)] * (number < FEW_REQUESTS)


def _seen(lookup: Lookup, keys: Sequence[tuple[str, int]]) -> list[ControllerCaveat]:
    seen = sum(key in lookup.keys for key in keys)
    return [ControllerCaveat.of("lookup_of_the_same", num_seen=seen, num_requests=len(keys))] * (seen > 0)


def write(
    parsed: argparse.Namespace,
    evaluation: Evaluation,
    grid: MeasuredGrid,
    caption: str,
    shared: Mapping[str, Any],
    further: Sequence[Policy],
) -> list[Path]:
    """Write the JSON, the CSV and the figure, whose static settings are those of the grid; returns their paths.

    Of the further policies only the chosen table is drawn, so that lines can be distinguished.
    """
    left_out = [each.name for each in further if each.name != CHOSEN_TABLE]
    first = parsed.results[0]
    source = first.parent if first.is_file() else first
    folder = parsed.output_dir or source / "analysis" / f"controller_{parsed.mode}"
    latency_s, accuracy = grid.total_s.mean(axis=1), grid.shares.mean(axis=1)
    statics = [
        {
            "setting": choice.key,
            "is_reference": choice == grid.reference,
            "accuracy": float(accuracy[row]),
            "latency_mean_ms": 1000 * float(latency_s[row]),
            "latency_p95_ms": 1000 * percentiles_over_runs(grid.times_s[:, row], (95,))[0],
        }
        for row, choice in enumerate(grid.choices)
    ]
    write_json_atomically({**content_of(evaluation), **shared, "static_settings": statics}, folder / f"{NAME}.json")
    rows = rows_of(evaluation)
    write_text_atomically(csv_of_rows(rows, list(rows[0])), folder / f"{NAME}.csv")
    own = None if grid.reference not in grid.choices else grid.choices.index(grid.reference)
    figures = save_chart(evaluation_chart(evaluation, latency_s, accuracy, left_out, own), caption, folder)
    return [folder / f"{NAME}.json", folder / f"{NAME}.csv", *figures]


if __name__ == "__main__":
    sys.exit(run_command(main))
