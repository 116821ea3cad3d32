"""The knobs of a transformers decoder (top-k and active blocks), set in place and restored afterwards.

    knobs = DecoderKnobs(model)
    with knobs.applied(top_k=2, active_blocks=(0, 1, 3)):
        model.generate(...)          # with a cache that is made inside

At construction the decoder runs a few short prompts, which must show that each knob acts. A knob that does not act is
refused with the reason. A cache that was made at one setting cannot be used at another.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, RunningBlocks, blocks_of
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.interface import unsupported_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.models.common.block_modules import BlockStack, block_stacks, text_decoder
from experiment_core_utils.models.common.placement import device_of
from experiment_core_utils.models.common.turned_knobs import KnobAdapter
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.costs.counters import count_flops, has_packed_weights
from experiment_core_utils.models.hf.knobs.active_blocks import ActiveBlocks
from experiment_core_utils.models.hf.knobs.expert_mass import ExpertMassAdapter
from experiment_core_utils.models.hf.knobs.patches import AttributeChanges, hooks_removed
from experiment_core_utils.models.hf.knobs.routers import Counted, Routers, refuse_without_effect
from experiment_core_utils.primitives.errors import first_line


@dataclass(frozen=True)
class FlopsDelta:
    """The FLOPs of the same run before and after a knob is set, one multiply-add as 2."""

    before: int
    applied: int

    @property
    def changed(self) -> bool:
        """Whether the knob changes what is computed; a model that computes all experts does the same at every top-k."""
        return self.before != self.applied


def flops_delta(run: Callable[[], object], applied: AbstractContextManager[object]) -> FlopsDelta:
    """Count the FLOPs of `run`, then again inside `applied`. Never while timing.

    Packed weights have no formula: their products count as nothing, so that nothing moves with them.
    """
    before = count_flops(run)
    with applied:
        return FlopsDelta(before, count_flops(run))


@contextmanager
def _order_of(modules: Iterable[nn.Module]) -> Iterator[list[int]]:
    """A context that notes the places of the modules in the order in which they run."""
    ran: list[int] = []

    def noting(place: int) -> Callable[..., None]:
        return lambda *_: ran.append(place)

    handles = [module.register_forward_hook(noting(place)) for place, module in enumerate(modules)]
    with hooks_removed(handles):
        yield ran


# A number that no width of a model is.
_TRIAL_TOKENS = 7


class DecoderKnobs:
    """The knobs of a transformers decoder: top-k and active blocks.

    Attributes:
        num_total_blocks: blocks of the full model; a decoder without a list of them counts as one.
        num_experts: that a router chooses from; None in a dense model, and where the config does not say.
        default_top_k: the value of top-k of the model as it is; None in a dense model.
        first_top_k: experts for a token in the first block with experts; None in a dense model.
        routed_blocks: indices of the blocks with experts, in the full model.
        adapters: what turns these knobs and those that go with them, by the knob's name.
        untried_reason: why no knob could be tried, on a model without storage (some code needs values); the reasons
            of the adapters then are those that are known without a run. None where the knobs were tried.
        failure: the error of the decoder's first prompt, with its class; None where it ran.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._decoder = text_decoder(model)
        self._blocks = ActiveBlocks(model, self._stack_that_runs())
        text_config = model.config.get_text_config(decoder=True)
        self._routers = Routers(self._blocks.every, text_config)
        self.num_total_blocks = len(self._blocks.every)
        self.adapters: dict[str, KnobAdapter] = {TOP_K.name: self._routers, ACTIVE_BLOCKS.name: self._blocks}
        self.routed_blocks = self._routers.routed_blocks
        self.num_experts = self._routers.num_experts
        self.failure = self._failure(
            lambda: self._blocks.learn(lambda: self._routers.learn(self._prefill, _TRIAL_TOKENS))
        )
        self.untried_reason = self.failure if self._has_no_values else None
        self.default_top_k, self.first_top_k = self._routers.default_top_k, self._routers.first_top_k
        self._routers.unsupported_reason = self._refuse_top_k()
        self._blocks.unsupported_reason = self._blocks.unsupported_reason or self._refuse_blocks()
        adjustable = [self._blocks.every[index] for index in self._routers.adjustable_blocks]
        self.adapters[EXPERT_MASS.name] = ExpertMassAdapter(adjustable, self.top_k_unsupported_reason)

    @property
    def top_k_unsupported_reason(self) -> str | None:
        """The reason why top-k cannot be set; None if it can."""
        return self._routers.unsupported_reason

    @property
    def top_k_limit(self) -> tuple[int, str] | None:
        """The largest top-k, and why it is not the number of experts; None where it is, and where none can be set."""
        return None if self.top_k_unsupported_reason is not None else self._routers.limit

    @property
    def blocks_unsupported_reason(self) -> str | None:
        """The reason why blocks cannot be skipped; None if they can."""
        return self._blocks.unsupported_reason

    @property
    def refused(self) -> dict[str, str]:
        """Why knobs cannot be turned, by their names in the facts of a model."""
        return unsupported_knobs(top_k=self.top_k_unsupported_reason, active_blocks=self.blocks_unsupported_reason)

    @property
    def in_force(self) -> tuple[int | None, tuple[int, ...]]:
        """The setting in force: top-k (None for the model's own) and the active blocks."""
        return self._routers.value, self._blocks.value.indices

    @property
    def every_block(self) -> tuple[nn.Module, ...]:
        """The blocks of the full model, whatever is in force."""
        return tuple(self._blocks.every)

    def validate(self, top_k: int | None, active_blocks: Sequence[int]) -> None:
        """Raises ConfigurationError, with the reason, for a setting that the model cannot run at.

        Args:
            top_k: experts per token in the blocks with experts after the first such block of the full model, which
                keeps its own number; None for the model's own, and for a dense model.
            active_blocks: indices of the blocks that run, ascending.
        """
        self._routers.validate(top_k)
        self._blocks.validate(active_blocks)

    def experts_at(self, setting: Setting) -> dict[int, int | None]:
        """Experts for a token by active block, as `counted` sees them at the setting.

        None for a dense block, and for one that does not show what it chooses. The first block with experts of the full
        model keeps its own number; where it is skipped, no other does.

        Raises:
            ConfigurationError: see `validate`.
        """
        top_k, active_blocks = experts_of(setting), blocks_of(setting)
        self.validate(top_k, active_blocks)
        turned = () if top_k is None or self.top_k_unsupported_reason is not None else self._routers.adjustable_blocks
        return {
            index: self._routers.own_top_k(index)
            if top_k is None or index not in turned
            else self._routers.top_k_at(index, top_k)
            for index in active_blocks
        }

    def apply(self, top_k: int | None, active_blocks: Sequence[int]) -> None:
        """Put a setting in force until the next `apply` or `restore`; see `validate`.

        Raises:
            ConfigurationError: the setting is not possible; what was in force stays so.
        """
        self.validate(top_k, active_blocks)
        self._routers.put(top_k)
        self._blocks.put(RunningBlocks.of(active_blocks))

    def restore(self) -> None:
        """Restore the full model, with the very same lists and modules."""
        self._routers.put(None)
        self._blocks.put(None)

    @contextmanager
    def applied(self, top_k: int | None, active_blocks: Sequence[int]) -> Iterator[None]:
        """A context with `apply`, after which the setting before is in force again, also after an error."""
        before = self.in_force
        self.apply(top_k, active_blocks)
        try:
            yield
        finally:
            self.apply(*before)

    def with_all_blocks(self) -> AbstractContextManager[None]:
        """A context in which all blocks are active, with the experts for a token that are in force."""
        return self.applied(self._routers.value, range(self.num_total_blocks))

    def counted(self) -> AbstractContextManager[Counted]:
        """A context that counts active blocks and the experts that their routers choose, to prove a setting; never
        while timing.

        Indices are those of the full model, whatever is in force.
        """
        return self._routers.counted()

    def refuse_without_effect(self, counted: Counted, scores: Sequence[torch.Tensor]) -> None:
        """Raises KnobDidNotAct where some of the experts that the top-k in force adds to the model's own cannot count.

        Args:
            counted: in a run at the setting in force.
            scores: that its routers chose from, each [T, E].
        """
        top_k, leaves_out = self._routers.value, self.adapters[EXPERT_MASS.name].value != EXPERT_MASS.neutral
        # Dynamic experts have a weight of 0 where they are left out.
        if not leaves_out and top_k is not None and self.default_top_k is not None and top_k > self.default_top_k:
            refuse_without_effect(top_k, counted, scores)

    # --- proofs at construction ---------------------------------------------------------------------------------------

    def _stack_that_runs(self) -> BlockStack | None:
        """The list of blocks: the first of `block_stacks` whose modules a prompt runs through once each, in order.

        Where no prompt runs, the first of them.
        """
        stacks = block_stacks(self._model)
        with ExitStack() as contexts:
            seen = [contexts.enter_context(_order_of(stack.blocks)) for stack in stacks]
            if self._failure(self._prefill) is not None:
                return next(iter(stacks), None)
        in_order = (stack for stack, ran in zip(stacks, seen, strict=True) if ran == list(range(len(stack.blocks))))
        return next(in_order, None)

    def _prefill(self) -> None:
        device = device_of(self._decoder.get_input_embeddings())
        with torch.inference_mode():
            self._decoder(input_ids=torch.ones(1, _TRIAL_TOKENS, dtype=torch.long, device=device))

    @property
    def _has_no_values(self) -> bool:
        return device_of(self._decoder.get_input_embeddings()).type == "meta"

    def _failure(self, run: Callable[[], object]) -> str | None:
        try:
            run()
        except HF_CODE_ERRORS as error:
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def _refuse_untried(self) -> str | None:
        """The reason why no knob can be tried; None where they can, and where only values are missing for it."""
        if self.failure is None or self.untried_reason is not None:
            return None
        return f"its decoder cannot run a prompt by itself ({self.failure})"

    def _refuse_top_k(self) -> str | None:
        if not self.routed_blocks:
            return "the model is dense"
        reason = self._refuse_untried()
        if reason is not None:
            return reason
        if self._routers.blocks_without_top_k:
            return f"in blocks {list(self._routers.blocks_without_top_k)} no module says how many experts a token gets"
        if not self._routers.adjustable_blocks:
            return f"only block {self.routed_blocks[0]} has experts, and the first such block keeps its own number"
        if self.num_experts is None or self.num_experts < 2:
            return f"the number of its experts is {self.num_experts or 'unknown'}"
        return self._refuse_trial(1 if self.default_top_k != 1 else 2) if self.untried_reason is None else None

    def _refuse_trial(self, top_k: int) -> str | None:
        """Set the routers to another number of experts; their choices and the FLOPs must follow."""
        applied = AttributeChanges().in_place(self._routers.changes(top_k))
        try:
            with self.counted() as counted:
                delta = flops_delta(self._prefill, applied)
        except HF_CODE_ERRORS as error:
            return self._failed_trial(f"with top-k {top_k}", error)
        chosen = {counted.experts_per_token.get(index) for index in self._routers.adjustable_blocks}
        if not delta.changed and not has_packed_weights(self._model) and chosen in ({top_k}, {None}):
            return (
                f"it computes all its experts: a prefill of {_TRIAL_TOKENS} tokens has {delta.before} operations with "
                f"top-k {self.default_top_k} and with {top_k}"
            )
        if None in chosen:
            return "its routers do not show how many experts they choose"
        if chosen != {top_k}:
            seen = ", ".join(str(number) for number in sorted(filter(None, chosen)))
            return f"it ignores top-k: set to {top_k}, its routers chose {seen} experts for a token"
        return None

    def _failed_trial(self, setting: str, error: Exception) -> str | None:
        """The reason why a setting is refused whose trial failed; None where values were missing for it."""
        failure = f"{type(error).__name__}: {first_line(error)}"
        if self._has_no_values and "meta" in failure:
            self.untried_reason = failure
            return None
        return f"{setting} its prefill fails ({failure})"

    def _refuse_blocks(self) -> str | None:
        """Leave one block out; exactly the others must run."""
        if self.failure is not None:
            return self._refuse_untried()
        every = range(self.num_total_blocks)
        smaller = (tuple(i for i in every if i != left_out) for left_out in reversed(every))
        active = next((blocks for blocks in smaller if blocks and self._blocks.has_attention(blocks)), None)
        if active is None:
            return None
        try:
            with self.counted() as counted, self.applied(None, active):
                self._prefill()
        except HF_CODE_ERRORS as error:
            return self._failed_trial(f"with blocks {list(active)}", error)
        if tuple(counted.blocks_run) != active:
            return f"with blocks {list(active)} its prefill runs {counted.blocks_run}"
        return None
