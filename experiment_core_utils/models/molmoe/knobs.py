"""What turns each knob in a Molmo."""

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, RunningBlocks
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP
from experiment_core_utils.models.common.turned_knobs import KnobAdapter, RequestKnob
from experiment_core_utils.models.hf.knobs.expert_mass import ExpertMassAdapter
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.visual_token_keep import PlacedTokens

DENSE = "the model is dense"  #: why it has no knobs of experts


class ExpertsPerToken:
    """The `KnobAdapter` of top-k."""

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        self._model = model
        self.unsupported_reason = DENSE if model.num_experts is None else None

    @property
    def value(self) -> int | None:
        return None if self._model.num_experts is None else self._model.active_setting.top_k

    def put(self, value: int | None) -> None:
        """None stands for the model's own number."""
        self._model.set_knobs(value, self._model.active_setting.blocks)


class BlocksOfDecoder:
    """The `KnobAdapter` of active blocks."""

    unsupported_reason: str | None = None  #: see `KnobAdapter.unsupported_reason`

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        self._model = model

    @property
    def value(self) -> RunningBlocks:
        return RunningBlocks.of(self._model.active_setting.blocks)

    def put(self, value: RunningBlocks | None) -> None:
        """None stands for all blocks."""
        self._model.set_knobs(self._model.active_setting.top_k, None if value is None else value.indices)


def adapters_of(model: MolmoeForConditionalGeneration, placed_tokens: PlacedTokens) -> dict[str, KnobAdapter]:
    """The adapters of a model, by the knob's name.

    Args:
        placed_tokens: of the model.
    """
    return {
        VISION_TOKENS.name: RequestKnob(),
        VISUAL_TOKEN_KEEP.name: placed_tokens,
        TOP_K.name: ExpertsPerToken(model),
        EXPERT_MASS.name: ExpertMassAdapter(model.all_blocks[1:], DENSE if model.num_experts is None else None),
        ACTIVE_BLOCKS.name: BlocksOfDecoder(model),
    }
