"""Dynamic experts in blocks of transformers: slots of a token that its mass needs no more get no expert.

A router gives each token k slots: experts, and their weights. What the weights are made of, a softmax or sigmoids, is
tried with a copy of the router that has random weights. A slot that is not used gets the number of experts as its
expert and the weight 0, which is how transformers marks slots of experts on other devices. The eager loop over experts
and `grouped_mm` compute nothing for such a slot. `batched_mm` computes every slot that it is given, so it is given as
many as the token with the most needs: in a decode step of one request exactly those used. Versions of transformers
without that mark get the weight 0 alone: they compute every slot, and FLOPs say so.
"""

import copy
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
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges, hooks_removed
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.errors import ConfigurationError, first_line
from experiment_core_utils.primitives.private_apis import SKIPS_SLOTS, computes_experts, experts_implementation
from experiment_core_utils.records.requests import StageFlops

# Decode steps over which experts are counted, after the prefill.
COUNTED_STEPS = 8
_COMPUTES_ALL_GIVEN = "batched_mm"
_IMPLEMENTATIONS = ("eager", "grouped_mm", _COMPUTES_ALL_GIVEN)


_TRIED_TOKENS = 16
# Attributes that accelerate gives a module of a model that is spread over devices.
_SPREAD_BY = ("_hf_hook", "_old_forward", "forward")
# Relative differences of weights that are computed twice, in float32.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class RouterScores:
    """What a router's weights are made of."""

    is_sigmoid: bool  #: whether its scores are sigmoids of the logits, not their softmax over all experts
    is_scaled: bool  #: whether the weights of a token's experts sum to the same for every token

    def masses(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The mass [T, k] of each expert, from logits [T, E]; see `knobs.expert_mass`."""
        if not self.is_sigmoid:
            return logits.float().softmax(dim=-1).gather(1, ids)
        scores = logits.float().sigmoid().gather(1, ids)
        return scores / scores.sum(dim=-1, keepdim=True)


def _scores_of(router: nn.Module) -> RouterScores | None:
    """What the weights of a router are made of, tried with random weights and rows; None where that is not known."""
    # What spreads a model over devices refers to all of its weights, which are not copied.
    spread = {id(each): each for name, each in vars(router).items() if name in _SPREAD_BY}
    tried = copy.deepcopy(router, spread).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*tried.parameters(), *tried.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0.0, 0.3, generator=generator)
    width = max(each.shape[-1] for each in tried.parameters())
    # Of one expert a weight says nothing, where it is scaled.
    vars(tried)["top_k"] = max(int(vars(tried)["top_k"]), 2)
    with torch.inference_mode():
        output = type(tried).forward(tried, torch.randn(_TRIED_TOKENS, width, generator=generator))
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(each, torch.Tensor) for each in output):
        return None
    logits, weights, ids = output
    if ids.is_floating_point() or ids.shape != weights.shape or logits.shape[:-1] != ids.shape[:-1] or ids.dim() != 2:
        return None
    sums = weights.sum(dim=-1)
    for is_sigmoid, scores in ((False, logits.softmax(dim=-1)), (True, logits.sigmoid())):
        factors = weights / scores.gather(1, ids)
        if _are_alike(factors.T):
            is_scaled = _are_alike(sums)
            return RouterScores(is_sigmoid, is_scaled) if is_scaled or _are_alike(factors.flatten()) else None
    return None


def _are_alike(numbers: torch.Tensor) -> bool:
    """Whether numbers [N, ...] are the same along the first axis but for rounding."""
    return torch.allclose(numbers, numbers[:1].expand_as(numbers), rtol=_ROUNDING, atol=0.0)


@dataclass
class _Seen:
    """What the routers and experts of all blocks were seen to do: one tensor for each of their calls."""

    masses: list[torch.Tensor] = field(default_factory=list)  #: [T, k] of what was chosen, falling
    used: list[torch.Tensor] = field(default_factory=list)  #: [T], how many slots are used
    computed: list[tuple[int, int]] = field(default_factory=list)  #: slots that were computed, and T

    def note_choice(self, scores: RouterScores, _router: nn.Module, _inputs: Any, output: Any) -> None:
        logits, _, ids = output
        self.masses.append(scores.masses(logits, ids).sort(dim=-1, descending=True).values)

    def note_used(self, _router: nn.Module, _inputs: Any, output: Any) -> None:
        logits, weights, ids = output
        self.used.append(((ids < logits.shape[-1]) & (weights > 0)).sum(dim=-1))

    def note_experts(self, experts: Any, inputs: Any) -> None:
        _, ids, _ = inputs
        is_all = experts_implementation(experts.config) == _COMPUTES_ALL_GIVEN
        self.computed.append((ids.numel() if is_all else int((ids < experts.num_experts).sum()), len(ids)))

    def figures(self) -> dict[str, float | int | None]:
        """Experts of a token over all calls, and their probabilities."""
        masses, counts = torch.cat(self.masses), torch.cat(self.used)
        sums = masses.cumsum(dim=-1)
        had = sums.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        before = sums.gather(1, (counts - 2).clamp(min=0)[:, None])[:, 0]
        fewer, several = had[counts < masses.shape[1]], before[counts > 1]
        return {
            "mean_experts_per_token": float(counts.double().mean()),
            "mean_computed_experts": sum(slots for slots, _ in self.computed) / sum(rows for _, rows in self.computed),
            "fewest_experts": int(counts.min()),
            "most_experts": int(counts.max()),
            "least_mass": float(fewer.min()) if len(fewer) else None,
            "most_mass_without_last": float(several.max()) if len(several) else None,
        }


class ExpertMassAdapter(CountingAdapter):
    """Turns dynamic experts in blocks whose routers show what they choose by.

    Args:
        blocks: with experts, after the first of the whole model, which keeps all its top-k experts.
        unsupported_reason: why experts per token cannot be turned at all; None where they can.
    """

    def __init__(self, blocks: Sequence[nn.Module], unsupported_reason: str | None = None) -> None:
        tried: dict[type[nn.Module], RouterScores | None] = {}
        parts = [] if unsupported_reason is not None else [_parts_of(block, tried) for block in blocks]
        self._parts = [each for each in parts if not isinstance(each, str)]
        self.unsupported_reason = next((each for each in parts if isinstance(each, str)), unsupported_reason)
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
        others = {experts_implementation(experts.config) for _, experts, _ in self._parts}.difference(_IMPLEMENTATIONS)
        if others:
            raise ConfigurationError(
                f"expert mass {value} cannot be set where {', '.join(map(str, others))} computes the experts; give "
                f"--experts_implementation {', '.join(_IMPLEMENTATIONS[:-1])} or {_IMPLEMENTATIONS[-1]}"
            )
        with ExitStack() as changes:
            skips = [
                AttributeChange(experts, SKIPS_SLOTS, True) for _, experts, _ in self._parts if _skips_slots(experts)
            ]
            changes.enter_context(AttributeChanges().in_place(skips))
            handles = [
                router.register_forward_hook(partial(_left_out, value, scores, _skips_slots(experts)))
                for router, experts, scores in self._parts
            ]
            handles += [experts.register_forward_pre_hook(_given_fewer) for _, experts, _ in self._parts]
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
            for name, figure in (seen.figures() if seen.used else {}).items():
                found[name][stage] = figure
        self._computed[setting] = found.get("mean_computed_experts", {})
        return dict(found)

    @contextmanager
    def _seen(self) -> Iterator[_Seen]:
        seen = _Seen()
        handles = []
        for router, experts, scores in self._parts:
            # Before slots are left out, and behind that.
            handles.append(router.register_forward_hook(partial(seen.note_choice, scores), prepend=True))
            handles.append(router.register_forward_hook(seen.note_used))
            handles.append(experts.register_forward_pre_hook(seen.note_experts))
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


def _parts_of(
    block: nn.Module, tried: dict[type[nn.Module], RouterScores | None]
) -> tuple[nn.Module, nn.Module, RouterScores] | str:
    """The router and the experts of a block, and what weights are made of; the reason where that is not known.

    Args:
        tried: what is known of classes of routers, to which what is tried here is added.
    """
    experts = next((module for module in block.modules() if computes_experts(module)), None)
    if experts is None:
        return "its experts do not compute slots of tokens one by one"
    routers = [
        module
        for module in block.modules()
        if "top_k" in vars(module) and experts not in module.modules() and len(list(module.parameters()))
    ]
    for router in routers:
        try:
            if type(router) not in tried:
                tried[type(router)] = _scores_of(router)
        except HF_CODE_ERRORS as error:
            return f"its router, a {type(router).__name__}, cannot be tried by itself ({first_line(error)})"
        if (scores := tried[type(router)]) is not None:
            return router, experts, scores
    names = ", ".join(type(router).__name__ for router in routers) or "none that has a top-k by itself"
    return f"the weights of its router ({names}) are neither those of a softmax nor of sigmoids of its logits"


def _skips_slots(experts: nn.Module) -> bool:
    """Whether experts compute nothing for a slot that has no expert, in this version of transformers."""
    return hasattr(experts, SKIPS_SLOTS)


def _left_out(mass: float, scores: RouterScores, is_skipped: bool, _router: Any, _inputs: Any, output: Any) -> Any:
    """A router's output by falling mass, in which the slots after those that have the mass are left out."""
    logits, weights, ids = output
    masses, order = scores.masses(logits, ids).sort(dim=-1, descending=True)
    weights, ids = weights.gather(1, order), ids.gather(1, order)
    before = nn.functional.pad(masses[:, :-1].cumsum(dim=-1), (1, 0))
    is_left_out = before >= mass
    rest = weights.float().masked_fill(is_left_out, 0.0)
    if scores.is_scaled:
        rest = rest * (weights.float().sum(dim=-1, keepdim=True) / rest.sum(dim=-1, keepdim=True))
    return logits, rest.to(weights.dtype), ids.masked_fill(is_left_out & is_skipped, logits.shape[-1])


def _given_fewer(experts: Any, inputs: Any) -> Any:
    """The inputs of experts without the slots that no token uses, for code that computes all that it is given."""
    if experts_implementation(experts.config) != _COMPUTES_ALL_GIVEN:
        return None
    states, ids, weights = inputs
    most = int((ids < experts.num_experts).sum(dim=1).max())
    return states, ids[:, :most], weights[:, :most]
