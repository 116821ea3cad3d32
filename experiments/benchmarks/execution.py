"""MolmoE's stages run eagerly, graphed and by transformers' `generate()`, side by side in one process.

    python -m experiments.benchmarks.execution
    python -m experiments.benchmarks.execution --shape molmoe_1b --output execution.json --figure roofline.png
    python -m experiments.benchmarks.execution --shape molmoe_1b --decoder_alone

Without `--shape`: the embedded model on its own task over the grid of quickstart, answers ending where they end. With
it: random weights in memory and one request of `--prompt_tokens` and `--crops`, always `--new_tokens` tokens; with
`--decoder_alone` the shape's decoder runs as transformers' own OLMoE, without pictures (molmoe_1b's is OLMoE-1B-7B's).
Ways take turns in every round; stages are timed inside each run. Captures and warm-ups come before, not counted.
`eager_of_generate` is a decode step of the eager stages over one of plain `generate()`, which takes the same kernels.
Floors are formulas of the shape: on a GPU at `--bytes_per_s` and `--flops_per_s`, which are taken as attainable, not
measured; on the CPU the architecture's products alone, at the median of torch's own rates just before the cases.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experiment_core_utils.b_model_loader import find_requested_checkpoint
from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target, vision_of
from experiment_core_utils.measuring.staged_runs import staged_run
from experiment_core_utils.models.hf.generate import generate_timed, greedy_config
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.planning.plan import plan_for
from experiment_core_utils.primitives.device import choose_device, choose_dtype, new_marks, set_cpu_threads, synchronize
from experiment_core_utils.primitives.errors import ConfigurationError, first_line
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, replaced_whole, write_json_atomically
from experiment_core_utils.records.requests import StagedRun, TimedTokens
from experiment_core_utils.requests.drawing import draw_samples, open_task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiments.analyses.charts.matplotlib_charts import figure_of
from experiments.analyses.charts.style import joined_caption
from experiments.benchmarks.execution_table import (
    EAGER,
    PLAIN,
    Rates,
    Shape,
    Timed,
    Work,
    eager_of_generate,
    entries,
    markdown,
    roofline_chart,
    stages_of_generate,
    totals_of_generate,
    work_of,
)
from experiments.benchmarks.molmoe_1b import (
    H200_BYTES_PER_S,
    H200_FLOPS_PER_S,
    embedded_processor,
    random_model,
    random_request,
    shape_config,
    staged_model,
)
from experiments.benchmarks.shared import median_seconds

# (rows, inner width, columns): a cube that large products come near to, and tall ones as a small tower makes them.
SHAPES = ((1024, 1024, 1024), (6144, 192, 768), (6144, 768, 192))


def product_rate() -> float:
    """Operations per second, one multiply-add as 2, of the fastest shape, the median of five repeats.

    The result's memory is there before. What else the machine does lowers it as it lowers what is measured beside it.
    """
    rates = []
    for rows, inner, columns in SHAPES:
        left, right, out = torch.rand(rows, inner), torch.rand(columns, inner), torch.empty(rows, columns)
        seconds = median_seconds(partial(torch.mm, left, right.t(), out=out), 5)
        rates.append(2 * rows * inner * columns / seconds)
    return max(rates)


QUICKSTART = "--tier_list low medium high --top_k_list 4 8 --num_active_blocks_list 12 16".split()
STATIC, GRAPH = "generate(static)", "graph"
H200 = Rates(H200_BYTES_PER_S, H200_FLOPS_PER_S)


@dataclass(frozen=True)
class Case:
    """A request on its device and the setting that it runs at."""

    name: str
    setting: Setting
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class TwiceStaged:
    """A model that is staged twice over the same weights."""

    model: PreTrainedModel
    staged: Mapping[str, StagedModel]
    config: PreTrainedConfig
    max_new_tokens: int

    def run(self, way: str, case: Case) -> StagedRun:
        """Run a case once and return its stages' times; everything that a run needs is ready."""
        self.staged[EAGER].apply(case.setting)
        synchronize(self.model.device)
        marks = new_marks(self.model.device)
        generated = self._generated(way, case.inputs, marks)
        return staged_run(generated, marks.seconds(), True)

    def _generated(self, way: str, inputs: Mapping[str, Any], marks: Any) -> TimedTokens:
        if way == EAGER:
            return generate_greedily(self.staged[EAGER], inputs, self.max_new_tokens, marks)
        if way in self.staged:
            return self.staged[way].generate_timed(inputs, self.max_new_tokens, marks)
        requested = {"cache_implementation": "static"} if way == STATIC else {}
        return generate_timed(self.model, {**inputs, **requested}, self.max_new_tokens, marks)

    def warm_up(self, case: Case) -> None:
        """Capture the graphs; what `generate()` compiles it compiles in the warm rounds."""
        for staged in self.staged.values():
            staged.apply(case.setting)
            staged.warm_up(case.inputs, self.max_new_tokens)


def timed_case(bench: TwiceStaged, case: Case, ways: Sequence[str], warm_rounds: int, rounds: int) -> list[Timed]:
    """The times of each way in every round, the order rotated by one place a round."""
    runs: dict[str, list[StagedRun]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    bench.warm_up(case)
    for turn in range(warm_rounds + rounds):
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            began = time.process_time()
            run = bench.run(way, case)
            if turn >= warm_rounds:
                cpu[way].append(time.process_time() - began)
                runs[way].append(run)
    expected = runs[PLAIN][-1].token_ids
    return [
        Timed(case.name, way, _stages(found), [run.total_s for run in found], cpu[way], found[-1].token_ids, same)
        for way, found in runs.items()
        for same in [all(run.token_ids == expected for run in found)]
    ]


def _stages(runs: Sequence[StagedRun]) -> dict[str, list[float]]:
    return {
        "vision": [run.vision_s for run in runs if run.vision_s is not None],
        "prefill": [run.prefill_s for run in runs if run.prefill_s is not None],
        "decode": [statistics.median(run.inter_token_s) for run in runs if run.inter_token_s],
    }


def embedded_cases(model: StagedModel, num_samples: int) -> Iterator[Case]:
    """The grid of the quickstart; every setting with the same samples."""
    config = parse_config([*QUICKSTART, "--num_samples", str(num_samples)])
    task = open_task(config.task)
    drawn = draw_samples(task, config.task)
    for setting in plan_for(config, find_requested_checkpoint(config)):
        for sample_id in drawn.sample_ids:
            sample = task[sample_id]
            request = model.prepare(sample, prompt_for(task, sample, model.prompt_family), vision_of(setting).bounds)
            yield Case(f"{setting.key} {sample_id}", setting, model.to_device(request.inputs))


def shaped_cases(
    model: StagedModel, config: Any, dtype: torch.dtype, tokens: int, crops: int, top_ks: Sequence[int]
) -> Iterator[Case]:
    """A random request at each top-k with all blocks."""
    inputs = random_request(config, tokens, crops, model.device, dtype)
    setting = own_setting(model).replaced(vision=tier_target("low"))
    for top_k in top_ks:
        yield Case(f"top-k {top_k}", setting.replaced(top_k=top_k), inputs)


def possible_ways(bench: TwiceStaged, case: Case) -> tuple[list[str], dict[str, str]]:
    """The ways that run here, and why another does not."""
    ways, refused = [PLAIN, EAGER, GRAPH], dict[str, str]()
    try:
        bench.run(STATIC, case)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        refused[STATIC] = f"{type(error).__name__}: {first_line(error)}"
    else:
        ways.insert(1, STATIC)
    return ways, refused


def different_requests(inputs: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """The request and others of its size: equal ones would choose the same experts, which would be read once."""
    changed = "pixel_values" if "pixel_values" in inputs else "input_ids"
    return [{**inputs, changed: inputs[changed].roll(places, dims=-1)} for places in range(count)]


def batch_fields(bench: TwiceStaged, case: Case, batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of a decode step of so many requests: answers of n tokens minus answers of 1, over n - 1."""
    found = []
    for batch in batch_sizes:
        requests = different_requests(case.inputs, batch)
        for way, staged in bench.staged.items():
            staged.apply(case.setting)
            seconds = {}
            for tokens in (1, bench.max_new_tokens):
                answer = partial(staged.answer_batch, requests, tokens)
                answer()
                seconds[tokens] = median_seconds(answer, 3, staged.device)
            step_s = (seconds[bench.max_new_tokens] - seconds[1]) / (bench.max_new_tokens - 1)
            found.append({"batch": batch, "way": way, "step_ms": step_s * 1e3, "tokens_per_s": batch / step_s})
    return found


def _made(given: argparse.Namespace, device: torch.device) -> tuple[TwiceStaged, list[Case]]:
    if given.shape is None:
        if given.decoder_alone:
            raise ConfigurationError("--decoder_alone runs the decoder of a shape; give --shape too")
        config = parse_config(["--device", device.type, "--precision", given.precision, "--execution", "eager"])
        eager: Any = find_requested_checkpoint(config).load(config.model, device)
        model, config_of_shape, processor = eager.model, eager.model.config, eager.processor
    else:
        dtype, config_of_shape = choose_dtype(given.precision, device), shape_config(given.shape)
        # The embedded model's processor is required and not used.
        processor = embedded_processor()
        config_of_model = config_of_shape.text_config if given.decoder_alone else config_of_shape
        model = random_model(config_of_model, device, dtype)
    model.generation_config = greedy_config(model)
    if given.shape is not None:
        model.generation_config.eos_token_id = None
    modes: tuple[ExecutionMode, ...] = ("eager", "graph")
    ways = {str(mode): staged_model(model, processor, mode) for mode in modes}
    new_tokens = given.new_tokens or (33 if given.shape else 16)
    crops = 0 if given.decoder_alone else given.crops
    cases = (
        embedded_cases(ways[EAGER], given.samples)
        if given.shape is None
        else shaped_cases(ways[EAGER], config_of_shape, model.dtype, given.prompt_tokens, crops, given.top_k_list)
    )
    return TwiceStaged(model, ways, copy.deepcopy(config_of_shape), new_tokens), list(cases)


def shape_of(staged: StagedModel, case: Case) -> Shape:
    """The shape from which the floors of a case are computed."""
    crops = case.inputs["pixel_values"].shape[1] if "pixel_values" in case.inputs else 0
    experts = tuple(top_k for top_k in staged.expected_experts(case.setting) if top_k is not None)
    return Shape(crops, case.inputs["input_ids"].shape[1], experts)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--shape", help="molmoe_1b, or a folder whose config is taken; weights are random")
    parser.add_argument(
        "--decoder_alone", action="store_true", help="with --shape: its decoder, as transformers' OLMoE"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--num_threads", type=int)
    parser.add_argument("--samples", type=int, default=1, help="samples of the embedded task at each setting")
    parser.add_argument("--prompt_tokens", type=int, default=1053)
    parser.add_argument("--crops", type=int, default=13, help="crops of the picture, 0: no picture")
    parser.add_argument("--top_k_list", nargs="+", type=int, default=[8, 4, 1])
    parser.add_argument("--new_tokens", type=int, help="output tokens (default: 33 with --shape, else at most 16)")
    parser.add_argument("--batch_sizes", nargs="*", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm_rounds", type=int, default=1)
    parser.add_argument(
        "--bytes_per_s", type=float, help=f"memory bandwidth of the GPU (default: {H200.bytes_per_s:.1e})"
    )
    parser.add_argument(
        "--flops_per_s", type=float, help=f"peak of the device (default: {H200.flops_per_s:.1e}; a CPU is measured)"
    )
    parser.add_argument("--output", type=Path, help="JSON file of all figures")
    parser.add_argument("--figure", type=Path, help="roofline picture")
    return parser.parse_args(argv)


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit code: 0 done, 1 other tokens in float32, else that of the error, which is one line."""
    given = _arguments(argv)
    set_cpu_threads(given.num_threads, 1)
    device = choose_device(given.device)
    bench, cases = _made(given, device)
    ways, refused = possible_ways(bench, cases[0])
    times: list[Timed] = []
    products: list[float] = []
    for case in cases:
        if device.type == "cpu" and bench.model.dtype == torch.float32:
            products.append(product_rate())
        times += timed_case(bench, case, ways, given.warm_rounds, given.rounds)
    element_bytes = bench.model.dtype.itemsize
    work: dict[str, dict[str, Work]] = {
        case.name: work_of(bench.config, shape_of(bench.staged[EAGER], case), element_bytes) for case in cases
    }
    rates = _rates(given, device, statistics.median(products) if products else None)
    floors = {} if rates is None else {
        case: {stage: each.floor_s(rates) for stage, each in stages.items()} for case, stages in work.items()
    }  # fmt: skip
    rows = entries(times, floors)
    content = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "execution": dict(bench.staged[GRAPH].describe()),
        "refused": refused,
        "flops_per_s": None if rates is None else rates.flops_per_s,
        "rows": rows,
        "stages_of_generate": stages_of_generate(rows),
        "eager_of_generate": eager_of_generate(rows),
        "sum_of_generate": totals_of_generate(rows),
        "cpu_of_generate": totals_of_generate(rows, "cpu_ms"),
        "batches": batch_fields(bench, cases[0], given.batch_sizes),
    }
    print(markdown(rows))
    print(json.dumps({name: each for name, each in content.items() if name != "rows"}, indent=1))
    if given.output is not None:
        write_json_atomically(content, given.output)
    if given.figure is not None:
        _draw(given, str(content["device"]), rows, work, rates)
    return 0 if all(row["same_tokens"] for row in rows) or bench.model.dtype != torch.float32 else 1


def _draw(
    given: argparse.Namespace,
    device: str,
    rows: Sequence[Mapping[str, Any]],
    work: Mapping[str, Mapping[str, Work]],
    rates: Rates | None,
) -> None:
    if rates is None or math.isinf(rates.bytes_per_s):
        raise ConfigurationError("--figure needs a GPU: bytes per second of a CPU are not known")
    model = Path(given.shape or EMBEDDED_MODEL).name
    caption = joined_caption([device, model, f"n = {given.rounds} rounds of each way"])
    with replaced_whole(given.figure, ending=given.figure.suffix) as temporary:
        figure_of(roofline_chart(rows, work, rates), caption).savefig(temporary, dpi=150)


def _rates(given: argparse.Namespace, device: torch.device, products: float | None) -> Rates | None:
    """The rates of the device; None on a CPU in another number format than float32, unless a rate is given."""
    if device.type == "cuda":
        return Rates(given.bytes_per_s or H200.bytes_per_s, given.flops_per_s or H200.flops_per_s)
    flops_per_s = given.flops_per_s or products
    return Rates(math.inf, flops_per_s) if flops_per_s else None


if __name__ == "__main__":
    sys.exit(run_command(main))
