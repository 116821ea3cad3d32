"""The interface of models: prepare a request, run its three stages under a setting, prove that the knobs acted."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.greedy import GreedyStages
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.requests import (
    FollowedAnswer,
    KnobProof,
    PreparedRequest,
    RequestShape,
    StageFlops,
    TimedBatch,
    TimedTokens,
)
from experiment_core_utils.records.stages import MODULES, SERVER, Component
from experiment_core_utils.tasks.interface import PromptFamily, Sample


class Stages(GreedyStages, Protocol):
    """The three stages by themselves, and what a meter needs to know of them."""

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""

    def components(self) -> Mapping[Component, Sequence[torch.nn.Module]]:
        """The decoder's modules that run under the setting in force, by what they are; {} where that is not known."""


class Runnable(Protocol):
    """What the measuring loop needs of a model: to prepare a request, to run it under a setting, to say what it did.

    What only a `Stepwise`, `Inspectable` or `Switchable` model has is absent from the results of others, with the
    reason.
    """

    name: str

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""

    @property
    def ends(self) -> AnswerEnds:
        """What ends an answer."""

    @property
    def prompt_family(self) -> PromptFamily:
        """How the model is asked."""

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        """A request's tokens and crops on the host; raises SampleError for a picture that cannot be used.

        Args:
            crops: how many crops the picture may be cut into; None takes as many as the model does by itself.
        """

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's tensors on the model's device, pictures in its dtype."""

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        """Put a setting in force; `with model.apply(setting):` puts it in force for a while, see `TurnedKnobs.apply`.

        A setting with a knob that the model does not turn is refused, and never measured as if it were in force; a
        placebo, which acts on nothing, is none.

        Raises:
            ConfigurationError: the model cannot run at it, or turn one of its knobs; what was in force stays so.
        """

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Prepare what a request of this shape needs at the setting in force, before it is timed; never timed itself.

        A cache of fixed length, captures, kernels built for new shapes. For what is ready already it costs next to
        nothing. A state from before it may be lost.

        Raises:
            EngineRefused: the engines or graphs that run the model cannot run this; the modules do not take their
                place, or settings of one run would not be comparable.
        """

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        """The greedy answer to one request as this model is run by its users, with a mark where a stage ends."""

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        """Greedy answers to several requests together, under the setting in force; never timed.

        In float32 the tokens should be those of one request at a time, which `follow_batch` shows: blocks of some
        families of transformers look at the padding, or at the other requests of a batch.

        Raises:
            GenerationFailed: logits are not finite.
        """

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        """Text of generated ids up to their end, special tokens left out but those around thinking."""

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        """Run the request once with counters inside the model; never while timing.

        Raises:
            KnobDidNotAct: something else ran than the setting requests.
            EngineRefused: an engine or a graph computes something else than the modules.
        """

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        """FLOPs of the request at the setting; None for an unknown architecture, and before a proof of a setting whose
        FLOPs are counted there.
        """

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        """From now on answers end at these texts too, or, with `ignore_eos`, at nothing but the limit of tokens."""

    def describe(self) -> Mapping[str, Any]:
        """Effective values for the record: class, sizes, dtype, attention and experts implementation, revision.

        `execution_stages` has the name of what runs each stage, `decoding` what the checkpoint prefers and is kept. All
        keys of `Model` of the record but `execution_stages` may be left out: they are None there.
        """


@runtime_checkable
class Stepwise(Stages, Protocol):
    """A model whose stages run one by one, so that each can be repeated and measured alone."""

    def rewind(self, state: Any, steps: int) -> None:
        """Undo the last so many decode steps of a state."""


@runtime_checkable
class Batched(Protocol):
    """A model that runs several requests together, timed as one."""

    def batch_kind(self, inputs: Mapping[str, Any]) -> Hashable:
        """Equal for requests that can be in one batch."""

    def warm_up_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
        """As `Runnable.warm_up` for a batch of these requests.

        Raises:
            EngineRefused: what runs the model does not take batches, or not this one.
        """

    def generate_batch_timed(
        self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int, marks: Marks
    ) -> TimedBatch:
        """The greedy answers to requests that run together, with a mark where a stage of all of them ends.

        They are those of `answer_batch` where the setting in force has batches of several requests.

        Raises:
            GenerationFailed: logits are not finite.
        """


@runtime_checkable
class Inspectable(Protocol):
    """A model whose blocks are at hand, and which can judge answers that it did not choose."""

    num_total_blocks: int

    @property
    def num_experts(self) -> int | None:
        """The number of experts that a router chooses from; None in a model without experts."""

    @property
    def default_top_k(self) -> int | None:
        """Experts per token that the model was trained with; None without experts."""

    @property
    def decoder_blocks(self) -> Sequence[nn.Module]:
        """Every transformer block of the whole decoder in order, whatever is active, for hooks.

        A block's first argument, or `hidden_states`, is [B, T, H], and so is its output or the output's first item.
        """

    def follow_batch(
        self, inputs_list: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        """What `answer_batch` would choose after each beginning of these answers, one a request; never timed.

        Args:
            answers: ids of at least one token.
        """

    def follow_exactly(self, inputs: Mapping[str, Any], answer: tuple[int, ...]) -> FollowedAnswer:
        """As `follow_batch` of one request, by the modules in higher precision; raises EngineRefused where they do not
        run in it.
        """

    def expected_experts(self, setting: Setting) -> tuple[int | None, ...]:
        """Experts per token of each active block; None for a block without a router."""

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        """Bytes of the weights, and of what a decode step needs of them and of the cache; None as for FLOPs."""


@runtime_checkable
class Switchable(Protocol):
    """A model with several ways to run its stages, one of which runs all settings."""

    def restored_afterwards(self) -> AbstractContextManager[object]:
        """A context after which the setting that was in force before is in force again, also after an error."""

    def refuse_setting(self) -> None:
        """Raises EngineRefused where the way in force cannot run the setting in force, whatever the request is."""

    @property
    def has_next_way(self) -> bool:
        """Whether engines or graphs run that were not requested, so that the next way, at last the modules, may take
        their place.
        """

    def run_next_way(self, reason: str) -> None:
        """Run all settings in the next way from now on; `describe` and each proof give the reason."""

    def fix_execution(self) -> None:
        """From now on a setting that cannot run as those before it is refused, and no longer decides for all."""

    def samples_per_round(self, num_settings: int) -> int:
        """How many samples each setting runs one after the other where so many settings take turns.

        1 where everything that they need stays prepared; more where it has to be prepared again at each turn.
        """

    def release_prepared(self) -> None:
        """Give back all that `warm_up` prepared, of every setting; states are lost, and `warm_up` prepares anew."""


@runtime_checkable
class Spread(Protocol):
    """A model that may compute on several devices."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them, the one that requests are sent to first."""


def devices_of(model: Runnable | Stages) -> tuple[torch.device, ...]:
    """The devices that a model computes on, the one that requests are sent to first."""
    return model.devices if isinstance(model, Spread) else (model.device,)


@runtime_checkable
class Shared(Protocol):
    """A model whose weights are divided among processes, whose devices compute at the same time."""

    @property
    def num_sharing(self) -> int:
        """How many processes they are."""


@runtime_checkable
class Served(Protocol):
    """A model that other processes run."""

    @property
    def server_pids(self) -> Sequence[int]:
        """Those processes that are on this machine and can be seen; their descendants run it, too."""


@runtime_checkable
class Concurrent(Protocol):
    """A model that can be given several requests at a time, each on its own."""

    @property
    def concurrency(self) -> int:
        """How many requests it is given at a time where none is timed."""

    @property
    def request_rate(self) -> float | None:
        """Timed requests that it is given a second, whatever it manages; None where it is given one at a time."""

    @property
    def caveats(self) -> list[Caveat]:
        """What was found at the start of the run."""

    def find_caches(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> Sequence[str]:
        """Look, before anything is timed, whether requests that come again are answered from a cache; from then on
        timed ones are made so that they are not. What was found, a line for each server.

        Args:
            inputs_list: of the first samples.
        """

    @property
    def is_salted(self) -> bool:
        """Whether timed requests differ from those that are scored, which `answer_batch` makes."""

    def while_waiting(self, look: Callable[[float, str], None]) -> None:
        """From now on this is called several times a second while a request waits, with the seconds so far and what it
        waits for; what it raises ends the request.
        """


class StagedModel(Runnable, Stepwise, Batched, Inspectable, Switchable, Protocol):
    """A model in this process, whose vision, prefill and decode can be called one by one; it may have several ways to
    run them.
    """

    ends: AnswerEnds


def own_setting(model: StagedModel) -> Setting:
    """The setting of a loaded model as it is; see `reference_setting`."""
    return reference_setting(KnobLimits(model.num_total_blocks, model.num_experts, model.default_top_k))


def answers_in_batches(engines: Mapping[str, str] | None) -> bool:
    """Whether samples that are not timed are answered together: where modules, or a server, run the timed ones too.

    Args:
        engines: what runs each stage, by name; None where it is not noted.
    """
    return set((engines or {}).values()) <= {MODULES, SERVER}
