"""The configuration of a Molmo: text decoder, vision tower (CLIP) and the connector between them."""

from typing import Any, ClassVar, TypeAlias

from transformers import AutoConfig, CLIPVisionConfig, Olmo2Config, OlmoeConfig, PreTrainedConfig, Qwen2Config

TextConfig: TypeAlias = OlmoeConfig | Qwen2Config | Olmo2Config
_TEXT_CONFIGS: dict[str, type[TextConfig]] = {
    config.model_type: config for config in (OlmoeConfig, Qwen2Config, Olmo2Config)
}


class MolmoeConfig(PreTrainedConfig):
    """Configuration of a Molmo model (Deitke et al. 2024, arXiv 2409.17146): MolmoE and the dense ones.

    A Molmo joins a decoder to a CLIP vision tower by a pooling and a gated projection. MolmoE-1B has the decoder of
    OLMoE (Muennighoff et al. 2024, arXiv 2409.02060), Molmo-7B-D and 72B that of Qwen2, and Molmo-7B-O that of OLMo 2.

    Args:
        text_config: the decoder's config, or its dict, whose `model_type` is `olmoe` (also where it names none),
            `qwen2` or `olmo2`. `vocab_size` there counts the rows of the embedding table.
        vision_config: `CLIPVisionConfig` or its dict; `image_size` is the side of a crop in pixels.
        head_vocab_size: rows of the output head; None takes the embedding's. MolmoE-1B has 50304 against 50432.
        vision_feature_layers: which hidden states of the tower are laid side by side, as negative indices into its
            blocks' outputs (-1 is the last block). MolmoE-1B: (-2, -9).
        pooling_size: side of the square window that is pooled into one feature.
        projector_hidden_size: width of the gated projector; None takes that of the experts, or of a dense MLP.
        keep_unused_vision_blocks: run the blocks after the last one whose output is used. It changes no output;
            it exists so that latency can be compared with implementations that run them.
        bos_token_id, image_start_token_id, image_end_token_id, image_patch_token_id, image_column_token_id: the
            ids around and inside the image part of a prompt.
    """

    model_type = "molmoe"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig, "vision_config": CLIPVisionConfig}

    def __init__(
        self,
        text_config: TextConfig | dict[str, Any] | None = None,
        vision_config: CLIPVisionConfig | dict[str, Any] | None = None,
        head_vocab_size: int | None = None,
        vision_feature_layers: tuple[int, ...] = (-2, -9),
        pooling_size: int = 2,
        projector_hidden_size: int | None = None,
        keep_unused_vision_blocks: bool = False,
        image_start_token_id: int = 50280,
        image_end_token_id: int = 50281,
        image_patch_token_id: int = 50282,
        image_column_token_id: int = 50283,
        bos_token_id: int = 50279,
        eos_token_id: int = 50279,
        pad_token_id: int = 1,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        if text_config is None:
            text_config = molmoe_1b_text_config()
        if vision_config is None:
            vision_config = molmoe_1b_vision_config()
        self.text_config = _text_config(text_config) if isinstance(text_config, dict) else text_config
        self.vision_config = CLIPVisionConfig(**vision_config) if isinstance(vision_config, dict) else vision_config
        self.head_vocab_size = head_vocab_size if head_vocab_size is not None else self.text_config.vocab_size
        self.vision_feature_layers = tuple(vision_feature_layers)
        self.pooling_size = pooling_size
        self.projector_hidden_size = (
            projector_hidden_size if projector_hidden_size is not None else self.text_config.intermediate_size
        )
        self.keep_unused_vision_blocks = keep_unused_vision_blocks
        self.image_start_token_id = image_start_token_id
        self.image_end_token_id = image_end_token_id
        self.image_patch_token_id = image_patch_token_id
        self.image_column_token_id = image_column_token_id
        self._check(bos_token_id)
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def _check(self, bos_token_id: int) -> None:
        """Raises ValueError for values that a model would fail at later or misread."""
        ids = {
            "bos_token_id": bos_token_id,
            "image_start_token_id": self.image_start_token_id,
            "image_end_token_id": self.image_end_token_id,
            "image_patch_token_id": self.image_patch_token_id,
            "image_column_token_id": self.image_column_token_id,
        }
        for name, value in ids.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}; give the id of a token")
        if type(self.pooling_size) is not int or self.pooling_size < 1:
            raise ValueError(f"pooling_size is {self.pooling_size!r}; give a whole number of at least 1")
        if not all(type(layer) is int for layer in self.vision_feature_layers):
            raise ValueError(f"vision_feature_layers is {self.vision_feature_layers!r}; give numbers of blocks")

    @property
    def num_experts(self) -> int | None:
        """Experts in each block; None in a dense model."""
        return getattr(self.text_config, "num_experts", None)

    @property
    def default_top_k(self) -> int | None:
        """Experts per token that the model was trained with; None in a dense one."""
        return getattr(self.text_config, "num_experts_per_tok", None)

    @property
    def patches_per_side(self) -> int:
        """Patches along one side of a crop (24 for 336 pixels and patches of 14)."""
        return self.vision_config.image_size // self.vision_config.patch_size

    @property
    def features_per_crop(self) -> int:
        """Pooled features of one crop (144 for MolmoE)."""
        return (self.patches_per_side // self.pooling_size) ** 2


def _text_config(fields: dict[str, Any]) -> TextConfig:
    """Raises ValueError for another decoder than those of Molmo models."""
    model_type = fields.get("model_type", OlmoeConfig.model_type)
    if model_type not in _TEXT_CONFIGS:
        raise ValueError(f"its text_config is of a {model_type}; give one of {', '.join(_TEXT_CONFIGS)}")
    return _TEXT_CONFIGS[model_type](**fields)


def molmoe_1b_text_config() -> OlmoeConfig:
    """OLMoE decoder of MolmoE-1B: 16 blocks, 64 experts of width 1024, top-8, 50304 + 128 embedding rows."""
    return OlmoeConfig(
        vocab_size=50304 + 128,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        eos_token_id=50279,
        pad_token_id=1,
    )


def molmoe_1b_vision_config() -> CLIPVisionConfig:
    """CLIP ViT-L/14 at 336 pixels with 23 blocks, as MolmoE-1B keeps it."""
    return CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=23,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        hidden_act="quick_gelu",
        layer_norm_eps=1e-5,
    )
