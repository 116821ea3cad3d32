"""A Molmo's language model without pictures: the decoder with its head, as a causal language model.

Its parameters have the same names as in the whole model, so it loads from the same files; the tensors of the vision
tower and the connector are never read.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoePreTrainedModel, logits_and_loss, new_decoder


class MolmoeTextModel(MolmoePreTrainedModel):
    """The decoder under the name that it has in the whole model."""

    input_modalities = ("text",)

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        self.language_model = new_decoder(config.text_config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """The last hidden states [B, T, H] and the cache, as from the decoder of transformers."""
        return self.language_model(input_ids=input_ids, **kwargs)


class MolmoeForCausalLM(MolmoePreTrainedModel, GenerationMixin):
    """A Molmo without pictures: `generate(input_ids, attention_mask=...)`, also for left-padded batches."""

    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^model\.vision_tower\.", r"^model\.connector\."]

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        self.model = MolmoeTextModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.head_vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T', V] for the last `logits_to_keep` positions (0 means all), and the loss with `labels`."""
        kwargs.pop("return_dict", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits, loss = logits_and_loss(self, outputs.last_hidden_state, labels, logits_to_keep)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


AutoModelForCausalLM.register(MolmoeConfig, MolmoeForCausalLM, exist_ok=True)
