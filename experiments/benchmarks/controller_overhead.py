"""What the controller's two stages cost a request, against plain runs at the very settings that they chose.

python -m experiments.benchmarks.controller_overhead --num_samples 8
python -m experiments.benchmarks.controller_overhead --checkpoint results/controller/checkpoint.pt --device cuda
python -m experiments.benchmarks.controller_overhead --shape molmoe_1b --device cuda --execution graph

Flags that are not this program's own go to the profiler's configuration. Captures and warm-ups come first and are not
counted. With `--shape` weights are random and answers are as long as they may be.

It prints JSON. `device`, `execution` and `execution_reason` say how the model's stages run; the host computes the
networks. `capture_s` is the time of all captures, `num_runs` counts measured pairs, `choices` those of each setting and
pause, `num_parameters` those of all networks. The following have `p50` and `p95` over the runs: `first_stage_ms`,
`second_stage_ms` and their sum `controller_ms`; `new_budget_first_stage_ms`, at budgets that were never requested;
`adaptive_total_ms` (`T_total`, the stages in it), `plain_total_ms` and, run by run, `adaptive_less_plain_ms`.
`controller_share` is the median of `controller_ms` / `adaptive_total_ms`.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.answer_ends import HasEnds
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.pausable import PausableModel, can_pause
from experiment_core_utils.planning.plan import max_new_tokens_of
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MOST_TIMES, check_within
from experiment_core_utils.requests.drawing import draw_samples, open_task
from experiments.benchmarks.molmoe_1b import shape_source
from experiments.controller.knob_choices import published_space, tier_of
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.running.adaptive_generation import AdaptiveModel, AdaptiveRequest, AdaptiveRun, request_of
from experiments.controller.running.deciders import NetworkDecider
from experiments.controller.running.live import prepare_requests
from experiments.controller.running.loaded_molmoe import LoadedModel, load_model

WARM_UPS = 2


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags."""
    parser = OneLineParser(
        prog="controller_overhead.py",
        description="Measure what the controller costs.",
    )
    parser.add_argument("--shape", help="molmoe_1b, or a folder whose config is taken, in place of --model_path")
    parser.add_argument("--checkpoint", type=Path, help="trained networks (default: untrained ones)")
    parser.add_argument("--budgets_ms", type=float, nargs="+", default=[500.0], metavar="MS")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all samples and budgets")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print the results as JSON. Exit code: 0 done, 1 files do not allow it, 2 a flag is wrong."""
    flags, rest = build_parser().parse_known_args(argv)
    print(json.dumps(measured(flags, rest), indent=1))


def measured(flags: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """Medians and 95th percentiles in ms, over every sample at every budget in every round.

    Raises:
        ConfigurationError: flags, model or task do not allow it.
    """
    loaded = load_model(rest, flags.checkpoint) if flags.shape is None else shaped_model(flags.shape, rest)
    check_within("--rounds", flags.rounds, 1, MOST_TIMES)
    networks = loaded.networks(published_space(loaded.source.limits), 0, flags.checkpoint)
    config, task = loaded.config.task, open_task(loaded.config.task)
    sample_ids = draw_samples(task, config).sample_ids
    prepared, _ = prepare_requests(loaded.model, task, sample_ids, networks.space.knobs.tiers)
    own = [request_of(each, max_new_tokens_of(config, task)) for each in prepared]
    requests = [(each, budget_ms / 1000) for each in own for budget_ms in flags.budgets_ms]
    if not requests:
        raise ConfigurationError("no sample and no budget leave nothing to measure; give some of both")
    logits = ActionLogits.for_model(loaded.model, networks)
    adaptive = AdaptiveModel(loaded.model, NetworkDecider(logits, networks.space), loaded.blocks)
    started = time.perf_counter()
    adaptive.warm_up([request for request, _ in requests])
    capture_s = time.perf_counter() - started
    ways = {"adaptive": adaptive, "new_budget": adaptive}
    # Warm-ups come before what counts.
    warm_ups = (requests * WARM_UPS)[:WARM_UPS]
    described = loaded.model.describe()
    return {
        "device": str(loaded.model.device),
        "execution": described["execution"],
        "execution_reason": described["execution_reason"],  # None where stages run as requested
        "capture_s": capture_s,
        "num_parameters": sum(each.numel() for each in networks.parameters()),
        **_summary(*_run_each_way(loaded.model, ways, [*warm_ups, *requests * flags.rounds])),
    }


def shaped_model(shape: str, rest: Sequence[str]) -> LoadedModel:
    """A model with random weights, the embedded model's tokenizer and pictures; answers do not end before their limit.

    Raises:
        ConfigurationError: flags that do not allow it.
    """
    config, source = parse_config(rest).replaced(random_weights=True), shape_source(shape)
    set_cpu_threads(config.machine.num_threads, 1)
    model = source.load(config.model, choose_device(config.machine.device))
    assert isinstance(model, HasEnds)
    model.eos_token_ids = frozenset()
    assert can_pause(model)
    return LoadedModel(config, source, model, BlockChoice())


def _run_each_way(
    model: PausableModel, ways: Mapping[str, AdaptiveModel], requests: Sequence[tuple[AdaptiveRequest, float]]
) -> tuple[dict[str, list[AdaptiveRun]], list[float]]:
    """The runs of each way, one right after the other in an order that is drawn anew each time.

    `new_budget` runs at a budget that was never requested, next to the one that was. Last come seconds of plain runs at
    the settings that `adaptive` chose.
    """
    order = random.Random(0)
    runs: dict[str, list[AdaptiveRun]] = {name: [] for name in ways}
    plain_s = []
    for number, (request, budget_s) in enumerate(requests, 1):
        for name in order.sample(list(ways), len(ways)):
            shift = 1e-6 * number if name == "new_budget" else 0.0
            runs[name].append(ways[name].adaptive_generate(request, budget_s * (1 + shift)))
        chosen = runs["adaptive"][-1]
        inputs = model.to_device(request.prepared[tier_of(chosen.choice)].inputs)
        with model.restored_afterwards():
            model.apply(chosen.setting)
            plain_s.append(run_staged(model, inputs, request.max_new_tokens).total_s)
    return {name: each[WARM_UPS:] for name, each in runs.items()}, plain_s[WARM_UPS:]


def _summary(found: Mapping[str, Sequence[AdaptiveRun]], plain: Sequence[float]) -> dict[str, Any]:
    """The summary of one request or more."""
    runs, plain_s = found["adaptive"], np.array(plain)
    total_s = np.array([run.times.total_s for run in runs])
    controller_s = np.array([run.times.controller_s for run in runs])
    return {
        "num_runs": len(runs),
        "choices": Counter(f"{run.choice.key}_pause{run.pause}" for run in runs),
        **{
            f"{name}_ms": _spread(np.array([1000 * getattr(run.times, f"{name}_s") for run in runs]))
            for name in ("first_stage", "second_stage", "controller")
        },
        "new_budget_first_stage_ms": _spread(np.array([1000 * run.times.first_stage_s for run in found["new_budget"]])),
        "adaptive_total_ms": _spread(1000 * total_s),
        "plain_total_ms": _spread(1000 * plain_s),
        "adaptive_less_plain_ms": _spread(1000 * (total_s - plain_s)),
        "controller_share": float(np.median(controller_s / total_s)),
    }


def _spread(values: np.ndarray) -> Mapping[str, float]:
    return {"p50": float(np.median(values)), "p95": float(np.percentile(values, 95))}


if __name__ == "__main__":
    sys.exit(run_command(main))
