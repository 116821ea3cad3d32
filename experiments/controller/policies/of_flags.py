"""The policies that an evaluation's flags request; all of them choose before the model runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.controller.lookup import LOOKUP_FLAGS, Lookup, add_lookup_flags, built_by_flags, load
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.baselines import baselines
from experiments.controller.policies.guarded_lookup import GuardedLookup
from experiments.controller.policies.interface import Policy, RandomPolicy, StaticPolicy

DEFAULT_MARGIN = 0.0


def add_policy_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the policies."""
    parser.add_argument("--static", nargs="+", metavar="SETTING",
                        help="settings as policies of their own, such as tier-low_topk8_blocks16 (default: the grid's "
                        "smallest and largest, and the reference)")  # fmt: skip
    parser.add_argument("--lookup", type=Path, metavar="FILE",
                        help="table of `knobprof controller lookup build` (default: built here)")  # fmt: skip
    add_lookup_flags(parser, "of a lookup that is built here: ")
    parser.add_argument("--baselines", action="store_true",
                        help="lookups by every method, single knobs and a regression too (default: off)")  # fmt: skip
    parser.add_argument("--estimator", type=Path, metavar="FILE",
                        help="e3_latency_estimator.json; adds the policy lookup_guardrail")  # fmt: skip
    parser.add_argument("--margin", type=float, metavar="FRACTION",
                        help=f"fraction of a predicted time that the guardrail keeps free "
                            f"(default: {DEFAULT_MARGIN})")  # fmt: skip
    parser.add_argument("--learned", type=Path, metavar="CHECKPOINT",
                        help="checkpoint of `knobprof controller train`; adds the policy two_stage")  # fmt: skip
    parser.add_argument("--states", type=Path, metavar="FILE",
                        help="recorded states of --learned, in a replay (default: states.pt beside it)")  # fmt: skip


def check_policy_flags(flags: argparse.Namespace) -> None:
    """Raises ConfigurationError for a flag that has no effect beside another one."""
    for name in LOOKUP_FLAGS:
        if flags.lookup is not None and getattr(flags, name) is not None:
            raise ConfigurationError(f"--{name} is of a lookup that is built here; drop it, or --lookup {flags.lookup}")
    if flags.margin is not None and flags.estimator is None:
        raise ConfigurationError(
            f"--margin {flags.margin:g} is of the guardrail, which needs --estimator FILE; give one, or drop it"
        )
    if flags.states is not None and flags.learned is None:
        raise ConfigurationError(f"--states {flags.states} is for --learned CHECKPOINT; give one, or drop it")


def lookup_of(flags: argparse.Namespace, calibration: MeasuredGrid) -> Lookup:
    """The lookup in the file, else one of the calibration samples."""
    return built_by_flags(flags, calibration) if flags.lookup is None else load(flags.lookup)


def margin_of(flags: argparse.Namespace) -> float | None:
    """The margin of the guardrail; None without an estimator, which leaves it out."""
    if flags.estimator is None:
        return None
    return DEFAULT_MARGIN if flags.margin is None else float(flags.margin)


def policies_of(flags: argparse.Namespace, grid: MeasuredGrid, lookup: Lookup, seed: int) -> list[Policy]:
    """The policies: static settings, random, lookup, and the lookup with a guardrail where there is an estimator.

    Raises:
        ConfigurationError: a static setting that is not among the grid's.
    """
    by_key = {choice.key: choice for choice in grid.choices}
    keys = flags.static if flags.static is not None else [choice.key for choice in grid.landmarks]
    unknown = [key for key in keys if key not in by_key]
    if unknown:
        raise ConfigurationError(f"--static {unknown[0]} is not measured; choose among {', '.join(by_key)}")
    policies: list[Policy] = [StaticPolicy(by_key[key]) for key in dict.fromkeys(keys)]
    policies += [RandomPolicy(grid.choices, seed), lookup]
    margin = margin_of(flags)
    if margin is not None:
        policies.append(GuardedLookup(lookup, LatencyEstimator.load(flags.estimator), margin))
    return policies


def further_policies(
    flags: argparse.Namespace, calibration: MeasuredGrid, lookup: Lookup, budgets_s: Sequence[float]
) -> list[Policy]:
    """The baselines of --baselines, made of the calibration samples; without the lookup that is there anyway."""
    if not flags.baselines:
        return []
    return [each for each in baselines(calibration, budgets_s) if each.name != lookup.name]
