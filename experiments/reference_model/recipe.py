"""In: nothing; out: the size of the embedded reference model and the curriculum that it is trained with."""

from dataclasses import dataclass

from transformers import CLIPVisionConfig, OlmoeConfig, PreTrainedTokenizerBase

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.primitives.knobs import TIERS, CropRange


def reference_config(tokenizer: PreTrainedTokenizerBase) -> MolmoeConfig:
    """MolmoE's structure at about 15 M parameters: 16 blocks, 16 experts of width 64 (top-8), 5 vision blocks."""
    ids = tokenizer.convert_tokens_to_ids
    text = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=6,
        num_experts=16,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=6,
        image_size=336,
        patch_size=14,
        hidden_act="quick_gelu",
    )
    return MolmoeConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layers=(-1, -3),
        projector_hidden_size=384,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        image_start_token_id=ids("<im_start>"),
        image_end_token_id=ids("<im_end>"),
        image_patch_token_id=ids("<im_patch>"),
        image_column_token_id=ids("<im_col>"),
    )


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum.

    Attributes:
        until: share of the whole training time at which the stage ends.
        tiers: weight of each vision tier among the batches; "single" is one tile on a small canvas.
        items: most items in a scene at the stage's start and end (it grows linearly).
        readable_share: share of batches whose text is large enough for their tier; the rest draws text as the task.
        describe_share: share of batches that also list every item.
    """

    until: float
    tiers: dict[str, float]
    items: tuple[int, int]
    readable_share: float
    describe_share: float


CURRICULUM = (
    Stage(0.19, {"single": 1.0}, items=(1, 5), readable_share=1.0, describe_share=1.0),
    Stage(
        0.30,
        {"single": 0.3, "low": 0.25, "medium": 0.3, "high": 0.15},
        items=(4, 7),
        readable_share=0.9,
        describe_share=0.8,
    ),
    Stage(1.00, {"low": 0.2, "medium": 0.3, "high": 0.5}, items=(7, 7), readable_share=0.6, describe_share=0.6),
)

READABLE_PX = (6.5, 26.0)  # cap height in pixels as the vision tower sees it
SCENES_PER_BATCH = {"single": 160, "low": 96, "medium": 64, "high": 40}
QUESTIONS_PER_SCENE = 10
SINGLE_CROPS = CropRange(1, 1)


def crops_of(tier: str) -> CropRange:
    """The range of tiles that a training tier stands for."""
    return SINGLE_CROPS if tier == "single" else TIERS[tier]


@dataclass(frozen=True)
class OptimiserRecipe:
    """Muon for the matrices inside the blocks, AdamW for the rest; warm-up, then a cosine over the training time.

    Attributes:
        matrix_learning_rate: Muon's, the spectral norm of a step.
        learning_rate: AdamW's.
        final_share: what is left of both at the end.
        tags_weight: of the tags' loss against the answers'.
        block_dropout_share: share of batches in which one to four blocks are left out, either the last or any after
            the first, so that the block knob costs accuracy gradually; larger shares make the knob free.
        expert_dropout_share: share of batches with fewer experts a token, for the same reason.
    """

    matrix_learning_rate: float = 0.01
    matrix_weight_decay: float = 0.1
    matrix_momentum: float = 0.95
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    final_share: float = 0.02
    warmup_steps: int = 100
    max_grad_norm: float = 1.0
    load_balancing_weight: float = 0.01
    router_z_weight: float = 1e-4
    describe_weight: float = 0.4
    tags_weight: float = 1.0
    block_dropout_share: float = 0.06
    expert_dropout_share: float = 0.04
    seed: int = 20261121
