"""What turns each knob in a transformers model."""

from experiment_core_utils.knobs.thinking_budget import THINKING_BUDGET
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, VisionTarget
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP
from experiment_core_utils.models.common.turned_knobs import KnobAdapter
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges
from experiment_core_utils.models.hf.requests import HFRequests
from experiment_core_utils.models.hf.thinking import ThinkingCloser
from experiment_core_utils.models.hf.visual_token_keep import VisualTokens


class VisionFields:
    """The `KnobAdapter` of vision tokens: fields of the model's config that follow the crops of its requests.

    Args:
        config: of the model.
        requests: of the same checkpoint.
    """

    def __init__(self, config: object, requests: HFRequests) -> None:
        self._config, self._requests = config, requests
        self._fields = AttributeChanges()
        self.value: VisionTarget | None = None

    @property
    def unsupported_reason(self) -> str | None:
        return self._requests.vision_knob_unsupported_reason

    def put(self, value: VisionTarget | None) -> None:
        """None stands for the fields of the checkpoint."""
        fields = self._requests.config_for(None if value is None else value.bounds)
        self._fields.put_back()
        self.value = None
        self._fields.put([AttributeChange(self._config, name, field) for name, field in fields.items()])
        self.value = value


def adapters_of(
    config: object,
    requests: HFRequests,
    visual_tokens: VisualTokens,
    knobs: DecoderKnobs,
    thinking: ThinkingCloser | None = None,
) -> dict[str, KnobAdapter]:
    """The adapters of a model, by the knob's name.

    Args:
        config: of the model.
        requests: of the same checkpoint.
        visual_tokens: of the model.
        knobs: of its decoder.
        thinking: what closes its thoughts; None for one that closes none.
    """
    vision: KnobAdapter = VisionFields(config, requests)
    closer: KnobAdapter = ThinkingCloser(requests) if thinking is None else thinking
    others = {VISUAL_TOKEN_KEEP.name: visual_tokens, THINKING_BUDGET.name: closer}
    return {VISION_TOKENS.name: vision, **others, **knobs.adapters}
