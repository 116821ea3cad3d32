"""Dynamic experts in blocks of transformers: slots of a token that its mass needs no more get no expert.

A router gives each token k slots: experts by falling probability, and their weights. A slot that is not used gets the
number of experts as its expert and the weight 0, which is how transformers marks slots of experts on other devices. The
eager loop over experts and `grouped_mm` compute nothing for such a slot. `batched_mm` computes every slot that it is
given, so it is given as many as the token with the most needs: in a decode step of one request exactly those used.
Versions of transformers without that mark get the weight 0 alone: they compute every slot, and FLOPs say so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from experiment_core_utils.knobs.expert_mass import EXPERT_MASS, mass_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.common.turned_knobs import CountingAdapter
from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges, hooks_removed
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.private_apis import SKIPS_SLOTS, computes_experts, experts_implementation
from experiment_core_utils.records.requests import StageFlops

# Routers that give (logits, weights, experts) of a softmax over all experts, whose experts skip slots. Where they do
# not say by `norm_topk_prob` whether the weights of the chosen experts are scaled to a sum of 1, they are.
ROUTERS = frozenset(f"{family}TopKRouter" for family in ("Olmoe", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Qwen3VLMoeText"))
# Decode steps over which experts are counted, after the prefill.
COUNTED_STEPS = 8
_COMPUTES_ALL_GIVEN = "batched_mm"
_IMPLEMENTATIONS = ("eager", "grouped_mm", _COMPUTES_ALL_GIVEN)


@dataclass
class _Seen:
    """What the routers and experts of all blocks were seen to do: one tensor for each of their calls."""

    probabilities: list[torch.Tensor] = field(default_factory=list)  #: [T, E]
    experts: list[torch.Tensor] = field(default_factory=list)  #: [T, k]
    used: list[torch.Tensor] = field(default_factory=list)  #: [T, k], whether a slot is used
    computed: list[tuple[int, int]] = field(default_factory=list)  #: slots that were computed, and T

    def note_router(self, _router: nn.Module, _inputs: Any, output: Any) -> None:
        logits, weights, ids = output
        self.probabilities.append(logits.float().softmax(dim=-1))
        self.experts.append(ids)
        self.used.append((ids < logits.shape[-1]) & (weights > 0))

    def note_experts(self, experts: Any, inputs: Any) -> None:
        _, ids, _ = inputs
        is_all = experts_implementation(experts.config) == _COMPUTES_ALL_GIVEN
        self.computed.append((ids.numel() if is_all else int((ids < experts.num_experts).sum()), len(ids)))

    def figures(self) -> dict[str, float | int | None]:
        """Experts of a token over all calls, and their probabilities."""
        probabilities, ids = torch.cat(self.probabilities), torch.cat(self.experts)
        is_used = torch.cat(self.used)
        counts = is_used.sum(dim=1)
        chosen = probabilities.gather(1, ids.clamp(max=probabilities.shape[1] - 1))
        sums = (chosen * is_used).sum(dim=1)
        smallest = chosen.masked_fill(~is_used, 1.0).amin(dim=1)
        fewer, several = sums[counts < ids.shape[1]], (sums - smallest)[counts > 1]
        return {
            "mean_experts_per_token": float(counts.double().mean()),
            "mean_computed_experts": sum(slots for slots, _ in self.computed) / sum(rows for _, rows in self.computed),
            "fewest_experts": int(counts.min()),
            "most_experts": int(counts.max()),
            "least_mass": float(fewer.min()) if len(fewer) else None,
            "most_mass_without_last": float(several.max()) if len(several) else None,
        }


class ExpertMassAdapter(CountingAdapter):
    """Turns dynamic experts in blocks whose routers are known.

    Args:
        blocks: with experts, after the first of the whole model, which keeps all its top-k experts.
        unsupported_reason: why experts per token cannot be turned at all; None where they can.
    """

    def __init__(self, blocks: Sequence[nn.Module], unsupported_reason: str | None = None) -> None:
        parts = [_parts_of(block) for block in blocks]
        self._parts = [each for each in parts if each is not None]
        self.unsupported_reason = unsupported_reason
        if unsupported_reason is None and len(self._parts) < len(blocks):
            self.unsupported_reason = (
                f"of its routers only {', '.join(sorted(ROUTERS))} are known to choose by a softmax over all experts"
            )
        self._in_force = ExitStack()
        self.value = EXPERT_MASS.neutral
        #: experts computed for a token, by stage, of each setting that was counted; {} where no such block ran
        self._computed: dict[Setting, Mapping[str, float]] = {}

    @property
    def engines_unsupported_reason(self) -> str | None:
        return None if self.value == EXPERT_MASS.neutral else f"expert mass {self.value} is set in the modules only"

    def put(self, value: float) -> None:
        self._in_force.close()
        self.value = EXPERT_MASS.neutral
        if value == EXPERT_MASS.neutral:
            return
        if self.unsupported_reason is not None:
            raise ConfigurationError(f"expert mass {value} cannot be set: {self.unsupported_reason}; give 1.0")
        others = {experts_implementation(experts.config) for _, experts in self._parts}.difference(_IMPLEMENTATIONS)
        if others:
            raise ConfigurationError(
                f"expert mass {value} cannot be set where {', '.join(map(str, others))} computes the experts; give "
                f"--experts_implementation {', '.join(_IMPLEMENTATIONS[:-1])} or {_IMPLEMENTATIONS[-1]}"
            )
        with ExitStack() as changes:
            skips = [AttributeChange(experts, SKIPS_SLOTS, True) for _, experts in self._parts if _skips_slots(experts)]
            changes.enter_context(AttributeChanges().in_place(skips))
            handles = [
                router.register_forward_hook(partial(_left_out, value, _skips_slots(experts)))
                for router, experts in self._parts
            ]
            handles += [experts.register_forward_pre_hook(_given_fewer) for _, experts in self._parts]
            changes.enter_context(hooks_removed(handles))
            self._in_force = changes.pop_all()
        self.value = value

    @torch.inference_mode()
    def counted(self, setting: Setting, stages: Stages, inputs: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """See `CountingAdapter.counted`; over the tokens of a prefill and of decode steps.

        None at the neutral value; {} where no such block runs.
        """
        if mass_of(setting) == EXPERT_MASS.neutral:
            return None
        with self._seen() as in_prefill:
            logits, state = stages.prefill(inputs, stages.encode_image(inputs))
        with self._seen() as in_decode, stages.decoding():
            for _ in range(COUNTED_STEPS):
                logits = stages.decode_step(logits.argmax(dim=-1, keepdim=True), state)
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for stage, seen in (("prefill", in_prefill), ("decode", in_decode)):
            for name, figure in (seen.figures() if seen.experts else {}).items():
                found[name][stage] = figure
        self._computed[setting] = found.get("mean_computed_experts", {})
        return dict(found)

    @contextmanager
    def _seen(self) -> Iterator[_Seen]:
        seen = _Seen()
        handles = [router.register_forward_hook(seen.note_router) for router, _ in self._parts]
        handles += [experts.register_forward_pre_hook(seen.note_experts) for _, experts in self._parts]
        with hooks_removed(handles):
            yield seen

    def flops(self, setting: Setting, flops_at: Callable[[Setting], StageFlops | None]) -> StageFlops | None:
        """See `CountingAdapter.flops`; with the experts that were computed for a token on average when it was counted.

        None for a setting that was not counted.
        """
        if mass_of(setting) == EXPERT_MASS.neutral or self._computed.get(setting) == {}:
            return flops_at(setting)
        one, two = (flops_at(setting.replaced(top_k=top_k)) for top_k in (1, 2))
        if setting not in self._computed or one is None or two is None:
            return None
        # FLOPs grow by the same amount with each expert.
        more = {stage: experts - 1 for stage, experts in self._computed[setting].items()}
        decode = one.decode_flops_per_token
        if decode is not None and two.decode_flops_per_token is not None:
            decode += more["decode"] * (two.decode_flops_per_token - decode)
        prefill = one.prefill_flops + more["prefill"] * (two.prefill_flops - one.prefill_flops)
        return replace(one, prefill_flops=round(prefill), decode_flops_per_token=decode)

    def step_bytes(self, setting: Setting, bytes_at: Callable[[Setting], float | None]) -> float | None:
        if mass_of(setting) == EXPERT_MASS.neutral or self._computed.get(setting) == {}:
            return bytes_at(setting)
        one, two = (bytes_at(setting.replaced(top_k=top_k)) for top_k in (1, 2))
        if setting not in self._computed or one is None or two is None:
            return None
        return one + (self._computed[setting]["decode"] - 1) * (two - one)


def _parts_of(block: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The router and the experts of a block; None where they are not known."""
    router = next((module for module in block.modules() if type(module).__name__ in ROUTERS), None)
    experts = next((module for module in block.modules() if computes_experts(module)), None)
    return None if router is None or experts is None else (router, experts)


def _skips_slots(experts: nn.Module) -> bool:
    """Whether experts compute nothing for a slot that has no expert, in this version of transformers."""
    return hasattr(experts, SKIPS_SLOTS)


def _left_out(mass: float, is_skipped: bool, router: Any, _inputs: Any, output: Any) -> Any:
    """A router's output in which the slots after those that have the mass are left out."""
    logits, weights, ids = output
    chosen = logits.float().softmax(dim=-1).gather(1, ids)
    before = nn.functional.pad(chosen[:, :-1].cumsum(dim=-1), (1, 0))
    is_left_out = before >= mass
    chosen = chosen.masked_fill(is_left_out, 0.0)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return logits, chosen.to(weights.dtype), ids.masked_fill(is_left_out & is_skipped, logits.shape[-1])


def _given_fewer(experts: Any, inputs: Any) -> Any:
    """The inputs of experts without the slots that no token uses, for code that computes all that it is given."""
    if experts_implementation(experts.config) != _COMPUTES_ALL_GIVEN:
        return None
    states, ids, weights = inputs
    most = int((ids < experts.num_experts).sum(dim=1).max())
    return states, ids[:, :most], weights[:, :most]
