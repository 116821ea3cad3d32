"""What one fresh process of the harness does: make the float32 yardstick, or measure a variant that is near to it."""

import argparse
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.measuring.staged_runs import staged_run
from experiment_core_utils.meters.host_facts import cpu_name, package_version
from experiment_core_utils.models.common.judging import modules_in
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.primitives.device import choose_device, choose_dtype, new_marks, set_cpu_threads, synchronize
from experiment_core_utils.primitives.finite_logits import refuse_not_finite
from experiments.benchmarks.kernels.protocol import Measured, bound_of, divergences
from experiments.benchmarks.kernels.shapes import config_of, random_weights
from experiments.benchmarks.kernels.variants import staged_variant
from experiments.benchmarks.kernels.work import Rates, Shape, work_of
from experiments.benchmarks.molmoe_1b import random_request

# The name of the process that measures nothing, and runs that no median contains.
YARDSTICK, WARM_UPS = "yardstick", 2


def device_seconds(act: Callable[[], object], device: torch.device, times: int = 15) -> float:
    """The median seconds of one run after the other, on the device's clock."""
    for _ in range(WARM_UPS):
        act()
    synchronize(device)
    marks = new_marks(device)
    marks.mark()
    for _ in range(times):
        act()
        marks.mark()
    return statistics.median(marks.seconds())


def attained_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Bytes per second of a copy, read and written ones together, and FLOP/s of a square matrix product."""
    num_bytes, side = (2**30, 8192) if device.type == "cuda" else (2**26, 512)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    factor = torch.randn(side, side, device=device).to(dtype)
    target, out = torch.empty_like(source), torch.empty_like(factor)
    copy_s = device_seconds(lambda: target.copy_(source), device)
    product_s = device_seconds(lambda: torch.mm(factor, factor, out=out), device)
    return Rates(2 * num_bytes / copy_s, 2 * side**3 / product_s)


@torch.inference_mode()
def logits_along(
    staged: StagedModel, inputs: Mapping[str, Any], steps: int, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [1 + steps, V] after the prompt and after each of the tokens; None takes the likeliest ones.

    Raises:
        GenerationFailed: logits are not finite.
    """
    logits, state = staged.prefill(inputs, staged.encode_image(inputs))
    # What a replay leaves is written over by the next one.
    found = [logits.float().cpu().clone()]
    # The yardstick's modules keep the code that computes in float32.
    with nullcontext() if tokens is None else staged.decoding():
        for step in range(steps):
            token = found[-1].argmax() if tokens is None else tokens[step]
            found.append(staged.decode_step(token.view(1, 1).to(staged.device), state).float().cpu().clone())
    refuse_not_finite(*found)
    return torch.cat(found)


def stage_seconds(staged: StagedModel, inputs: Mapping[str, Any], flags: argparse.Namespace) -> float:
    """The median seconds of the stage over the repeats; of decode, of the median step of each."""
    found = []
    for _ in range(WARM_UPS + flags.repeats):
        marks, tokens = new_marks(staged.device), flags.decode_steps + 1 if flags.stage == "decode" else 1
        run = staged_run(staged.generate_timed(inputs, tokens, marks), marks.seconds(), True)
        spans: dict[str, Any] = {"vision": [run.vision_s], "prefill": [run.prefill_s], "decode": run.inter_token_s}
        found.append(statistics.median(spans[flags.stage]))
    return statistics.median(found[WARM_UPS:])


def answer(flags: argparse.Namespace, variant: str, folder: Path) -> Measured | None:
    """What a variant measures; the yardstick's process, the modules in float32 on the same weights, measures nothing.

    Args:
        flags: of the harness.
        folder: that has the yardstick's logits.
    """
    set_cpu_threads(flags.num_threads, 1)
    device = choose_device(flags.device)
    dtype, config = choose_dtype(flags.precision, device), config_of(flags.model, flags.shape)
    crops, file = flags.crops if flags.stage == "vision" else 0, folder / "logits.pt"
    model = random_weights(config, device, dtype)
    inputs = random_request(config, flags.prompt_tokens, crops, device, dtype)
    if not crops:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    name, room = "modules" if variant == YARDSTICK else variant, flags.prompt_tokens + flags.decode_steps + 1
    staged, way = staged_variant(name, model, flags.stage, room)
    setting = own_setting(staged)
    setting = setting if flags.top_k is None else setting.replaced(top_k=flags.top_k)
    staged.apply(setting)
    if variant == YARDSTICK:
        torch.backends.cudnn.allow_tf32 = False
        with modules_in(model, torch.float32):
            exact = logits_along(staged, inputs, flags.decode_steps)
        own = divergences(exact, logits_along(staged, inputs, flags.decode_steps, exact.argmax(dim=-1)))
        torch.save({"exact": exact, "bound": bound_of(own) if flags.kl_bound is None else flags.kl_bound}, file)
        return None
    staged.warm_up(inputs, flags.decode_steps + 1)
    exact, bound = torch.load(file).values()
    found = divergences(exact, logits_along(staged, inputs, flags.decode_steps, exact.argmax(dim=-1)))
    rates, kl_mean = attained_rates(device, dtype), statistics.mean(found)
    shape = Shape(crops, flags.prompt_tokens, tuple(top_k or 1 for top_k in staged.expected_experts(setting)))
    work = work_of(config, shape, dtype.itemsize)[flags.stage]
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    precision = str(dtype).removeprefix("torch.")
    versions = f"{precision}, torch {torch.__version__}, Triton {package_version('triton') or 'not installed'}"
    return Measured(
        variant=variant,
        way=way,
        machine=f"{card}, {versions}",
        kl_mean=kl_mean,
        kl_max=max(found),
        kl_bound=bound,
        bytes_per_s=rates.bytes_per_s,
        flops_per_s=rates.flops_per_s,
        bytes_s=work.bytes / rates.bytes_per_s,
        products_s=work.flops / rates.flops_per_s,
        seconds=stage_seconds(staged, inputs, flags) if kl_mean <= bound else None,
    )
