"""The Molmo models, with three public stages (`encode_image`, `prefill`, `decode_step`) and `generate()`.

The decoder is transformers' own, the vision blocks are its CLIP encoder layers; this module adds the
connector, the placing of features among the tokens, and the two knobs of the decoder (experts per token, active
blocks).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from transformers import DynamicCache, Olmo2Model, OlmoeModel, PreTrainedModel, Qwen2Model, initialization
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, ModelOutput
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionEmbeddings

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig, TextConfig
from experiment_core_utils.primitives.private_apis import share_attention_implementation

PAD_VALUE = -1.0
Decoder: TypeAlias = OlmoeModel | Qwen2Model | Olmo2Model
_DECODERS: dict[str, type[Decoder]] = {
    each.config_class.model_type: each for each in (OlmoeModel, Qwen2Model, Olmo2Model)
}


def new_decoder(config: TextConfig) -> Decoder:
    """A decoder with this very config, which the knobs change."""
    return _DECODERS[config.model_type](config)


@dataclass
class MolmoeImageFeatures(ModelOutput):
    """Encoded pictures: `pooler_output` [B, K * F, H] and, for each feature, its position `image_input_idx` in the
    prompt ([B, K * F], negative where it is dropped)."""

    # Both are always there; `ModelOutput` wants defaults after the first field.
    pooler_output: torch.Tensor
    image_input_idx: torch.Tensor = None  # type: ignore[assignment]


@dataclass
class DecodeState:
    """The state that `decode_step` needs between tokens: the cache, and the knobs of the prefill."""

    past_key_values: Cache
    knobs: EngineKnobs


class MolmoeVisionTower(nn.Module):
    """CLIP's embeddings and blocks without its final norm and head."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.embeddings = CLIPVisionEmbeddings(vision)
        self.pre_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)
        self.layers = nn.ModuleList([CLIPEncoderLayer(vision) for _ in range(vision.num_hidden_layers)])
        depth = vision.num_hidden_layers
        self.feature_blocks = tuple(depth + index for index in config.vision_feature_layers)
        self.blocks_to_run = depth if config.keep_unused_vision_blocks else max(self.feature_blocks) + 1

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Patch states [N, P, D * L] of crops [N, 3, S, S]: L feature blocks side by side, class token dropped.

        A crop whose values are all -1 is padding; its features are zero.
        """
        is_real = (pixel_values != PAD_VALUE).flatten(1).any(dim=1)
        states = self.pre_layernorm(self.embeddings(pixel_values))
        kept = {}
        for index, layer in enumerate(self.layers[: self.blocks_to_run]):
            output = layer(states, attention_mask=None)
            states = output[0] if isinstance(output, tuple) else output
            kept[index] = states
        features = torch.cat([kept[index][:, 1:] for index in self.feature_blocks], dim=-1)
        return features * is_real[:, None, None].to(features.dtype)


class MolmoeConnector(nn.Module):
    """Pools windows of patch features by attention (the query is their mean) and projects them to the text width."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        width = config.vision_config.hidden_size
        stacked = width * len(config.vision_feature_layers)
        self.num_heads = config.vision_config.num_attention_heads
        self.grid_side = config.patches_per_side
        self.window = config.pooling_size
        self.pad_embed = nn.Parameter(torch.zeros(2, stacked))
        self.q_proj = nn.Linear(stacked, width)
        self.k_proj = nn.Linear(stacked, width)
        self.v_proj = nn.Linear(stacked, width)
        self.out_proj = nn.Linear(width, width)
        self.gate_proj = nn.Linear(width, config.projector_hidden_size, bias=False)
        self.up_proj = nn.Linear(width, config.projector_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.projector_hidden_size, config.text_config.hidden_size, bias=False)

    def forward(self, features: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        """Features [N, F, H] of patch states [N, P, D * L] and masks [N, P]."""
        masks = image_masks.to(features.dtype)
        all_padding = (masks == 0).to(features.dtype)[..., None]
        partly_padding = ((masks < 1) & (masks != 0)).to(features.dtype)[..., None]
        return self.project(features + self.pad_embed[0] * all_padding + self.pad_embed[1] * partly_padding)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Features [N, F, H] of patch states [N, P, D * L] whose padding was handled."""
        windows = self._windows(features)
        attended = self._attend(windows.mean(dim=-2, keepdim=True), windows)
        return self.project_attended(attended.view(features.shape[0], -1, attended.shape[-1]))

    def project_attended(self, attended: torch.Tensor) -> torch.Tensor:
        """Features [N, F, H] of [N, F, D] after the attention of each window."""
        pooled = self.out_proj(attended)
        return self.down_proj(nn.functional.silu(self.gate_proj(pooled)) * self.up_proj(pooled))

    def _windows(self, features: torch.Tensor) -> torch.Tensor:
        """Windows [N * F, W * W, C] of [N, P, C], row by row."""
        n, _, channels = features.shape
        cells = self.grid_side // self.window
        grid = features.view(n, cells, self.window, cells, self.window, channels)
        return grid.permute(0, 1, 3, 2, 4, 5).reshape(n * cells * cells, self.window * self.window, channels)

    def _attend(self, query: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        """Attention of queries [M, 1, C] over windows [M, W * W, C] -> [M, 1, D]."""

        def heads(states: torch.Tensor) -> torch.Tensor:
            return states.view(*states.shape[:2], self.num_heads, -1).transpose(1, 2)

        attended = nn.functional.scaled_dot_product_attention(
            heads(self.q_proj(query)), heads(self.k_proj(windows)), heads(self.v_proj(windows))
        )
        return attended.transpose(1, 2).flatten(2)


class MolmoePreTrainedModel(PreTrainedModel):
    """Weights, dtype and attention handling that all Molmo classes have in common."""

    config_class = MolmoeConfig
    config: MolmoeConfig
    base_model_prefix = "model"
    input_modalities: tuple[str, ...] = ("image", "text")
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _no_split_modules: ClassVar[list[str]] = [
        *("OlmoeDecoderLayer", "Qwen2DecoderLayer", "Olmo2DecoderLayer", "CLIPEncoderLayer", "MolmoeConnector")
    ]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.language_model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.base_model.language_model.embed_tokens = value

    def get_decoder(self) -> Decoder:
        """The decoder, as transformers' generic code asks for it."""
        return self.base_model.language_model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set normal weights of `initializer_range`, zero biases, unit norms; CLIP's bare parameters and position
        ids.
        """
        super()._init_weights(module)
        std = self.config.text_config.initializer_range
        if isinstance(module, CLIPVisionEmbeddings):
            initialization.normal_(module.class_embedding, mean=0.0, std=std)
            initialization.normal_(module.position_embedding.weight, mean=0.0, std=std)
            initialization.copy_(module.position_ids, torch.arange(module.num_positions).expand(1, -1))
        elif isinstance(module, MolmoeConnector):
            initialization.zeros_(module.pad_embed)


class MolmoeModel(MolmoePreTrainedModel):
    """Vision tower, connector and decoder without the output head."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        share_attention_implementation(config, config.vision_config)
        self.vision_tower = MolmoeVisionTower(config)
        self.connector = MolmoeConnector(config)
        self.language_model = new_decoder(config.text_config)
        self.post_init()

    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_masks: torch.Tensor,
        image_input_idx: torch.Tensor,
        **kwargs: Any,
    ) -> MolmoeImageFeatures:
        """Features and their places, flattened over crops, of [B, K, 3, S, S], [B, K, P] and [B, K, F]."""
        batch, crops = pixel_values.shape[:2]
        features = self.vision_tower(pixel_values.flatten(0, 1).to(self.dtype))
        features = self.connector(features, image_masks.flatten(0, 1))
        return MolmoeImageFeatures(
            pooler_output=features.view(batch, crops * features.shape[1], features.shape[2]),
            image_input_idx=image_input_idx.flatten(1),
        )

    def embed(self, input_ids: torch.Tensor, features: MolmoeImageFeatures | None) -> torch.Tensor:
        """Token embeddings [B, T, H] of ids [B, T], with the image features *added* at their places."""
        embeddings = self.language_model.embed_tokens(input_ids)
        if features is None:
            return embeddings
        batch, length, width = embeddings.shape
        places = features.image_input_idx
        dropped = torch.full_like(places, length)
        places = torch.where(places < 0, dropped, places)
        offsets = torch.arange(batch, device=places.device)[:, None] * (length + 1)
        roomy = nn.functional.pad(embeddings, (0, 0, 0, 1)).view(batch * (length + 1), width)
        added = features.pooler_output.to(embeddings.dtype).reshape(-1, width)
        roomy = roomy.index_add(0, (places + offsets).flatten(), added)
        return roomy.view(batch, length + 1, width)[:, :length]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_masks: torch.Tensor | None = None,
        image_input_idx: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, MolmoeImageFeatures] | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Last hidden states [B, T, H] for a prompt (with its pictures) or for the next tokens, and the cache."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            features = (mm_encoder_outputs or {}).get("image")
            if (
                features is None
                and pixel_values is not None
                and image_masks is not None
                and image_input_idx is not None
            ):
                features = self.get_image_features(pixel_values, image_masks, image_input_idx)
            assert input_ids is not None
            inputs_embeds = self.embed(input_ids, features)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


class MolmoeForConditionalGeneration(MolmoePreTrainedModel, GenerationMixin):
    """A Molmo with its head: three public stages with the knobs as arguments, and `generate()`.

    The knobs of the decoder:

    - `top_k`: experts per token in every block after the first; block 0 keeps the model's own number. A dense model
      has no such knob.
    - `active_blocks`: indices of the blocks that run, ascending, block 0 among them. A skipped block is not
      computed and has no cache entry.

    A setting stays in force until the next stage call requests another, or `reset_knobs()`; `knobs()` is the same as
    a context manager for use around `generate()`.
    """

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        self.model = MolmoeModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.head_vocab_size, bias=False)
        self.post_init()
        self._all_blocks = tuple(self.model.language_model.layers)
        self._setting = self.checked_setting(None, None)

    @property
    def num_total_blocks(self) -> int:
        """Blocks of the whole decoder, whatever is active."""
        return len(self._all_blocks)

    @property
    def all_blocks(self) -> tuple[Any, ...]:
        """Every block of the whole decoder in order, whatever is active."""
        return self._all_blocks

    @property
    def num_experts(self) -> int | None:
        """Experts in each block; None in a dense model."""
        return self.config.num_experts

    @property
    def default_top_k(self) -> int | None:
        """Experts per token that the model was trained with; block 0 always uses it. None in a dense model."""
        return self.config.default_top_k

    @property
    def active_setting(self) -> EngineKnobs:
        """The setting in force."""
        return self._setting

    def set_knobs(self, top_k: int | None = None, active_blocks: Sequence[int] | None = None) -> None:
        """Put a setting in force; None means the model's own value. Invalidates caches made under another setting.

        Raises ConfigurationError for more experts or blocks than there are, or a list without block 0.
        """
        wanted = self.checked_setting(top_k, active_blocks)
        if wanted == self._setting:
            return
        decoder = self.model.language_model
        kept = [self._all_blocks[index] for index in wanted.blocks]
        for index, block in enumerate(self._all_blocks):
            if self.num_experts is not None:
                block.mlp.gate.top_k = self.default_top_k if index == 0 else wanted.top_k
        for position, block in enumerate(kept):
            block.self_attn.layer_idx = position
        decoder.layers = nn.ModuleList(kept)
        self.config.text_config.num_hidden_layers = len(kept)
        self._setting = wanted

    def reset_knobs(self) -> None:
        """Restore all blocks and the model's own number of experts."""
        self.set_knobs()

    @contextmanager
    def knobs(self, top_k: int | None = None, active_blocks: Sequence[int] | None = None) -> Iterator[None]:
        """A context with a setting in force: `with model.knobs(top_k=4): model.generate(...)`; what was in force before
        is restored afterwards.
        """
        before = self._setting
        self.set_knobs(top_k, active_blocks)
        try:
            yield
        finally:
            self.set_knobs(*before)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as in transformers; every block is saved, whatever is active."""
        with self.knobs():
            super().save_pretrained(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> "MolmoeForConditionalGeneration":
        """Convert as in torch (`to`, `half`, `cuda`, ...); every block is converted, whatever is active."""
        with self.knobs():
            return super()._apply(*args, **kwargs)

    def encode_image(
        self, pixel_values: torch.Tensor, image_masks: torch.Tensor, image_input_idx: torch.Tensor
    ) -> MolmoeImageFeatures:
        """The vision stage: crops on the device -> projected features. The knob is the number of crops K.

        Args:
            pixel_values: [B, K, 3, S, S] normalised crops; a padding crop is all -1.
            image_masks: [B, K, P] fraction of real pixels of each patch.
            image_input_idx: [B, K, F] position of each feature in the prompt, negative where dropped.
        """
        return self.model.get_image_features(pixel_values, image_masks, image_input_idx)

    def prefill(
        self,
        input_ids: torch.Tensor,
        image_features: MolmoeImageFeatures | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        top_k: int | None = None,
        active_blocks: Sequence[int] | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[torch.Tensor, DecodeState]:
        """The prefill stage: prompt and features -> (logits [B, V] of the last position, state for `decode_step`).

        Args:
            input_ids: [B, T], left-padded where lengths differ (then with `attention_mask` [B, T]).
            past_key_values: an empty cache to fill; None makes a growing one.
        """
        self.set_knobs(top_k, active_blocks)
        cache = past_key_values if past_key_values is not None else DynamicCache(config=self.config.text_config)
        outputs = self.model(
            inputs_embeds=self.model.embed(input_ids, image_features),
            attention_mask=attention_mask,
            position_ids=_positions(attention_mask),
            past_key_values=cache,
            use_cache=True,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -1])
        return logits, DecodeState(cache, self._setting)

    def decode_step(
        self, token_ids: torch.Tensor, state: DecodeState, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The decode stage: the last tokens [B, 1] -> logits [B, V] of the next; the cache in `state` grows by one.

        `attention_mask` [B, T so far + 1] is needed for padded batches only.
        """
        return self.next_logits(token_ids, state, attention_mask)[:, -1]

    def next_logits(
        self, token_ids: torch.Tensor, state: DecodeState, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next k tokens [B, k] -> logits [B, k, V] after each of them; the cache in `state` grows by k."""
        self.set_knobs(*state.knobs)
        positions = _positions(attention_mask)
        outputs = self.model(
            input_ids=token_ids,
            attention_mask=attention_mask,
            position_ids=None if positions is None else positions[:, -token_ids.shape[1] :],
            past_key_values=state.past_key_values,
            use_cache=True,
        )
        return self.lm_head(outputs.last_hidden_state)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_masks: torch.Tensor | None = None,
        image_input_idx: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, MolmoeImageFeatures] | None = None,
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
            pixel_values=pixel_values,
            image_masks=image_masks,
            image_input_idx=image_input_idx,
            mm_encoder_outputs=mm_encoder_outputs,
            use_cache=use_cache,
            **kwargs,
        )
        logits, loss = logits_and_loss(self, outputs.last_hidden_state, labels, logits_to_keep)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: Cache | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Pictures go in with the prompt only, not with the tokens after it."""
        is_prompt = past_key_values is None or past_key_values.get_seq_length() == 0
        inputs = super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values, **kwargs)
        if not is_prompt:
            for name in ("pixel_values", "image_masks", "image_input_idx", "mm_encoder_outputs"):
                inputs.pop(name, None)
        return inputs

    def checked_setting(self, top_k: int | None, active_blocks: Sequence[int] | None) -> EngineKnobs:
        """The setting that `set_knobs` would put in force; raises the errors that it raises."""
        top_k = (self.default_top_k or 1) if top_k is None else top_k
        blocks = tuple(range(self.num_total_blocks)) if active_blocks is None else tuple(active_blocks)
        knobs = EngineKnobs(top_k, blocks)
        knobs.refuse_impossible(self.num_experts or 1, self.num_total_blocks)
        return knobs


def logits_and_loss(
    model: Any, hidden: torch.Tensor, labels: torch.Tensor | None, logits_to_keep: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [B, T', V] of the last `logits_to_keep` positions (0 means all) by the model's head, and the loss."""
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = model.lm_head(hidden[:, kept])
    if labels is None:
        return logits, None
    return logits, model.loss_function(logits=logits, labels=labels, vocab_size=model.config.head_vocab_size)


def _positions(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Positions [B, T] that count real tokens only, from a mask [B, T]; None means no padding."""
    if attention_mask is None:
        return None
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
