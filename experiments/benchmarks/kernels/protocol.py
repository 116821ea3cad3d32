"""How variants are compared: the order of fresh processes, the gate on logits, ratios of pairs and their interval.

The protocol is that of M. Saroufim, "Megakernels vs CUDA Graphs" (github.com/msaroufim/megakernels-vs-cuda-graphs,
llama/docs/PROTOCOL.md): what repeats is a fresh process, not a run inside one; processes of two variants alternate as
AB, BA; a time counts only where the logits are near those of float32, beside what the modules' own precision costs.
Other than there the gate is one bound on the mean KL divergence, the same for all variants, with room for other
rounding, and ratios are drawn over pairs alone, because there is one request.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiment_core_utils.primitives.statistics import RESAMPLES, SEED
from experiments.fitting.intervals import interval, resampled

# Small errors of logits have a divergence of half their variance: four times as much is twice the error. Modules in
# float32 may have none; their rounding, 1e-5 in logits of 10, is far below this.
TIMES_OWN, LEAST_BOUND = 4.0, 1e-8
# Two pairs have too few draws for an interval of 95 %.
FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Measured:
    """What one fresh process found of a variant; rates are those that it attained itself."""

    variant: str
    way: str  #: how the stage ran, as the model says
    machine: str  #: the GPU or the processor, the precision, and the versions of torch and Triton
    kl_mean: float  #: KL divergence of the logits from float32's in nats, over positions
    kl_max: float
    kl_bound: float  #: of the gate, on the mean
    bytes_per_s: float  #: of a copy, read and written ones together
    flops_per_s: float  #: of a matrix product, one multiply-add as 2
    bytes_s: float  #: the least time of the stage by its bytes at that rate
    products_s: float  #: the same by its products
    seconds: float | None  #: median of one run of the stage; None where the gate refused the logits

    @property
    def times_limit(self) -> float | None:
        """The time as a multiple of the slower of bytes and products."""
        return None if self.seconds is None else self.seconds / max(self.bytes_s, self.products_s)


def orders(variants: Sequence[str], pairs: int) -> list[tuple[str, ...]]:
    """The variants of each pair in the order in which their processes run: AB, BA, AB, …"""
    return [tuple(variants)[:: 1 if pair % 2 == 0 else -1] for pair in range(pairs)]


def divergences(reference: torch.Tensor, logits: torch.Tensor) -> list[float]:
    """KL(reference || logits) of each position in nats, of two tensors of logits [P, V].

    The sum of p (log p - log q) over V (S. Kullback and R. Leibler, "On Information and Sufficiency", Annals of
    Mathematical Statistics 22 (1951) 79), in float64.
    """
    expected, found = reference.double().log_softmax(dim=-1), logits.double().log_softmax(dim=-1)
    return [float(each) for each in (expected.exp() * (expected - found)).sum(dim=-1)]


def bound_of(own: Sequence[float]) -> float:
    """The largest mean divergence that the gate lets pass, from those of the modules in the same precision."""
    return max(TIMES_OWN * statistics.mean(own), LEAST_BOUND)


def ratio_of(one: Sequence[float], other: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The geometric mean of `one` over `other`, pair by pair, and the ends of its 95 % interval.

    The interval is the percentile one of the mean log ratio over drawn pairs; None for fewer than three.
    """
    logs = np.log(np.asarray(one) / np.asarray(other))
    ratio = float(np.exp(logs.mean()))
    if len(logs) < FEWEST_PAIRS:
        return ratio, None, None
    drawn = resampled(np.random.default_rng(SEED), len(logs), RESAMPLES) @ logs / len(logs)
    return ratio, *interval(np.exp(drawn))


def rows(measured: Sequence[Measured], variants: Sequence[str]) -> list[dict[str, Any]]:
    """The fields of each variant over its processes, which are in the order of the pairs.

    `ms` and `times_limit` are medians, None where the gate refused a process; the divergence is that of the process
    with the largest mean. `ratio` is to the first variant: None for that one, and where either has no time.
    """
    found = []
    for variant in variants:
        own, peers = ([each for each in measured if each.variant == name] for name in (variant, variants[0]))
        seconds, peer_seconds, limits = (
            [value for value in values if value is not None]
            for values in ([e.seconds for e in own], [e.seconds for e in peers], [e.times_limit for e in own])
        )
        worst, is_refused = max(own, key=lambda each: each.kl_mean), len(seconds) < len(own)
        has_ratio = variant != variants[0] and not is_refused and len(peer_seconds) == len(peers)
        ratio, low, high = ratio_of(seconds, peer_seconds) if has_ratio else (None, None, None)
        found.append(
            {
                "variant": variant,
                "way": own[0].way,
                "kl_mean": worst.kl_mean,
                "kl_max": worst.kl_max,
                "ms": None if is_refused else statistics.median(seconds) * 1e3,
                "times_limit": None if is_refused else statistics.median(limits),
                "limited_by": "bytes" if own[0].bytes_s >= own[0].products_s else "products",
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    return found


def markdown(title: str, measured: Sequence[Measured], variants: Sequence[str]) -> str:
    """The table, below a line that names the machine, its versions and the rates."""
    bound = measured[0].kl_bound
    bytes_per_s, flops_per_s = (
        statistics.median(getattr(each, name) for each in measured) for name in ("bytes_per_s", "flops_per_s")
    )
    lines = [
        f"{title}; {measured[0].machine}; copy {bytes_per_s / 1e12:.3f} TB/s, matrix product "
        f"{flops_per_s / 1e12:.3f} TFLOP/s; {len(measured) // len(variants)} processes each; KL at most {bound:.1e}.",
        "",
        f"| variant | way | KL mean (max), nats | ms | of its limit | of {variants[0]} [95 %] |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows(measured, variants):
        time, limit, ratio = "refused", "", ""
        if row["ms"] is not None:
            time, limit = f"{row['ms']:.3f}", f"{row['times_limit']:.2f} x the {row['limited_by']}' time"
        if row["ratio"] is not None:
            ratio = f"{row['ratio']:.3f}"
        if row["ratio_low"] is not None:
            ratio += f" [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        kl = f"{row['kl_mean']:.1e} ({row['kl_max']:.1e})"
        lines.append(f"| {row['variant']} | {row['way']} | {kl} | {time} | {limit} | {ratio} |")
    return "\n".join(lines)
