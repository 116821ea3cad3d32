"""In: a model and inputs, or a device; out: floating-point operations, memory and utilisation.

The figures of a staged run come from formulas in the model's own folder (`count_flops`), because they must move with
every knob at no cost. What stands here counts any model by running it once, and is what the formulas are tested with.
"""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from experiment_core_utils.primitives.records import ComputeUtilisation, GpuMemory

# Counting pictures of these operators, which torch's counter does not know; rows are routed token-expert pairs.
_GROUPED_PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _grouped_mm_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """[S, in] x [E, in, out]: each row meets one expert, so 2 * S * in * out."""
    return int(2 * rows[0] * rows[1] * weights[-1])


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def extra_flop_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for `FlopCounterMode(custom_mapping=...)`: grouped expert products and the CPU's fused attention.

    Without them the experts of a mixture count as nothing and the figure does not depend on top-k. An operator that
    this version of torch or transformers does not have is left out.
    """
    formulas: dict[str, Callable[..., int]] = dict.fromkeys(_GROUPED_PRODUCTS, _grouped_mm_flops)
    formulas[_CPU_ATTENTION] = _attention_flops
    found = {}
    for name, formula in formulas.items():
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found[packet] = formula
    return found


def count_flops(run: Callable[[], object]) -> int:
    """Operations of everything that `run` computes, one multiply-add as 2; attention as the full rectangle.

    Operators without a formula (elementwise work, norms, look-ups) count as nothing. Never use it while timing.
    """
    with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=extra_flop_formulas()) as counter:
        run()
    return int(counter.get_total_flops())


def get_memory(device: torch.device) -> GpuMemory | None:
    """torch's allocator on `device`, in bytes; None on the CPU, where it keeps no such figures."""
    if device.type != "cuda":
        return None
    return GpuMemory(
        gpu_current_memory_allocated_bytes=torch.cuda.memory_allocated(device),
        gpu_max_memory_allocated_bytes=torch.cuda.max_memory_allocated(device),
        gpu_current_memory_reserved_bytes=torch.cuda.memory_reserved(device),
        gpu_max_memory_reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def get_gpu_cpu_utilisation(device: torch.device) -> ComputeUtilisation:
    """Utilisation now: of the GPU over the driver's last sampling period, of the CPU since the previous call.

    `gpu_utilization_percent` is empty on the CPU.
    """
    percent = [float(torch.cuda.utilization(device))] if device.type == "cuda" else []
    return ComputeUtilisation(
        gpu_utilization_percent=percent,
        cpu_usage_percent=psutil.cpu_percent(interval=None),
        cpu_memory_usage_bytes=psutil.Process().memory_info().rss,
    )
