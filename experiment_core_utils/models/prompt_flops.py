"""In: a model and what all processes generated with it; out: the operations of that generation."""

from collections import Counter
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.models.architecture_flops import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.counted_flops import counted_flops
from experiment_core_utils.models.shapes_in_force import architecture_in_force
from experiment_core_utils.records.compute import GenerationFlops
from experiment_core_utils.records.requests import FlopsFigure, RequestSize
from experiment_core_utils.records.text import InferenceResults, QueryRecord

# Of a process that counts an architecture without formulas; it needs several seconds to start.
COUNTING_LIMIT_S = 120.0


def generation_flops(model: nn.Module, results: InferenceResults, limit_s: float = COUNTING_LIMIT_S) -> GenerationFlops:
    """Prefill of every prompt and decode steps of every answer, at the setting that is in force in the model.

    True tokens only: neither padding nor positions after an answer's end, although both are computed. For architectures
    without formulas the operations are counted in a process of their own, see `counted_flops`.

    Args:
        results: of one process, or pooled over all.
        limit_s: for that process.
    """
    sizes = request_sizes(results["queries"])
    figures = _figures(model, sizes, limit_s) if sizes else [FlopsFigure(None, "formula", "nothing was generated")]
    known = [figure.flops for figure in figures if figure.flops is not None]
    source, tokens = figures[0].source, results["total_output_tokens"]
    if len(known) < len(figures):
        return GenerationFlops(
            prefill_flops=None,
            decode_flops=None,
            generation_flops=None,
            generation_flops_per_output_token=None,
            generation_flops_source=source,
            generation_flops_reason=next(figure.reason for figure in figures if figure.flops is None),
        )
    total = sum(flops.total_flops for flops in known)
    return GenerationFlops(
        prefill_flops=sum(flops.stages.prefill_flops for flops in known),
        decode_flops=sum(flops.decode_flops for flops in known),
        generation_flops=total,
        generation_flops_per_output_token=total / tokens if tokens else None,
        generation_flops_source=source,
        generation_flops_reason=None,
    )


def request_sizes(queries: Sequence[QueryRecord]) -> list[RequestSize]:
    """Each size of prompt and answer once, with the number of prompts that have it."""
    found = Counter((query["input_tokens"], query["output_tokens"]) for query in queries)
    return [RequestSize(prompt, output, requests=times) for (prompt, output), times in found.items()]


def _figures(model: nn.Module, sizes: Sequence[RequestSize], limit_s: float) -> list[FlopsFigure]:
    architecture = architecture_in_force(model)
    if not isinstance(architecture, UnknownArchitecture):
        return [FlopsFigure(architecture.request_flops(size), "formula", None) for size in sizes]
    if not isinstance(model, PreTrainedModel) or isinstance(architecture_of(model.config), Architecture):
        # The config alone would not tell what runs.
        return [FlopsFigure(None, "formula", architecture.reason)]
    return counted_flops(model.config, sizes, limit_s)
