"""The size of the embedded reference model and the curriculum that it is trained with."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from transformers import CLIPVisionConfig, OlmoeConfig, PreTrainedTokenizerBase

from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.tasks.datasets.reference_captions import ReferenceCaptions
from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice
from experiment_core_utils.tasks.datasets.reference_counting import ReferenceCounting
from experiment_core_utils.tasks.datasets.reference_knowledge import ReferenceKnowledge
from experiment_core_utils.tasks.datasets.reference_reading import ReferenceReading
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA


def reference_config(tokenizer: PreTrainedTokenizerBase) -> MolmoeConfig:
    """MolmoE's structure at about 15 M parameters: 16 blocks, 16 experts of width 64 (top-8), 5 vision blocks."""
    ids = tokenizer.convert_tokens_to_ids
    shared = {"hidden_size": 192, "num_attention_heads": 6}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = OlmoeConfig(
        **shared,
        **ends,
        vocab_size=len(tokenizer),
        intermediate_size=64,
        num_hidden_layers=16,
        num_experts=16,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        max_position_embeddings=4096,
    )
    tower = {"intermediate_size": 768, "num_hidden_layers": 5, "image_size": 336, "patch_size": 14}
    vision = CLIPVisionConfig(**shared, **tower, hidden_act="quick_gelu")
    return MolmoeConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layers=(-1, -3),
        projector_hidden_size=384,
        bos_token_id=tokenizer.eos_token_id,
        **ends,
        image_start_token_id=ids("<im_start>"),
        image_end_token_id=ids("<im_end>"),
        image_patch_token_id=ids("<im_patch>"),
        image_column_token_id=ids("<im_col>"),
    )


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum."""

    until: float  #: fraction of the whole training time at which the stage ends
    tiers: dict[str, float]  #: weight of each vision tier among the batches; "single" is one crop on a small canvas
    items: tuple[int, int]  #: most items in a scene at the stage's start and end (it grows linearly)
    #: fraction of batches whose text is large enough for their tier; the rest draws text as the task
    readable_share: float
    #: whether the decoder learns to answer; if not, the tags alone train the vision tower and the connector
    answers: bool = True
    drills: bool = True  #: whether prices are drilled
    scenes: float = 1.0  #: size of the batches, relative to `SCENES_PER_BATCH`


CURRICULUM = (
    Stage(0.054, {"single": 1.0}, items=(1, 5), readable_share=1.0, answers=False, drills=False, scenes=0.6),
    Stage(0.18, {"single": 1.0}, items=(1, 5), readable_share=1.0, drills=False),
    Stage(0.40, {"single": 0.35, "low": 0.2, "medium": 0.25, "high": 0.2}, items=(5, 7), readable_share=0.9),
    Stage(1.00, {"single": 0.05, "low": 0.2, "medium": 0.25, "high": 0.5}, items=(7, 7), readable_share=0.6),
)

READABLE_PX = (6.5, 26.0)  # cap height in pixels as the vision tower sees it
SCENES_PER_BATCH = {"single": 160, "low": 96, "medium": 64, "high": 40}

# For each family: questions about a scene, and the weight of their answers' tokens (a letter is one, a caption fifty).
QUESTIONS_PER_SCENE: Mapping[type[GeneratedTask], tuple[int, float]] = MappingProxyType(
    {
        ReferenceVQA: (4, 1.0),
        ReferenceReading: (1, 0.5),
        ReferenceCounting: (3, 2.0),
        ReferenceChoice: (2, 2.0),
        ReferenceCaptions: (1, 0.35),
        ReferenceKnowledge: (4, 1.0),
    }
)
# Fraction of the batches whose labels are codes; only these have questions about prices.
CODED_SHARE = 0.4
# Questions per picture about the price of a code that the text contains.
RECALLS_PER_SCENE = 4
SINGLE_CROPS = CropRange(1, 1)


def crops_of(tier: str) -> CropRange:
    """The range of crops of a training tier."""
    return SINGLE_CROPS if tier == "single" else TIERS[tier]


@dataclass(frozen=True)
class OptimiserRecipe:
    """The optimiser: Muon for the matrices inside the blocks, AdamW for the rest; warm-up, then a cosine over time."""

    matrix_learning_rate: float = 0.01  #: Muon's, the spectral norm of a step
    matrix_weight_decay: float = 0.1
    matrix_momentum: float = 0.95
    learning_rate: float = 1.5e-3  #: AdamW's
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    final_share: float = 0.02  #: what is left of both at the end
    warmup_steps: int = 100
    max_grad_norm: float = 1.0
    load_balancing_weight: float = 0.01
    router_z_weight: float = 1e-4
    #: of a bonus for the entropy of each token's routing weights, so that all of its experts carry the answer and
    #: dropping some of them costs
    router_entropy_weight: float = 0.05
    #: fraction of the recalled prices that half the experts may recall, too: while they recall more, the weight above
    #: grows by `entropy_growth` at each log line up to `most_entropy_weight`, else it shrinks to its first value
    half_experts_recall: float = 0.85
    steering_recall: float = 0.7  #: of the prices; below it, what half the experts recall says little, the weight stays
    entropy_growth: float = 1.5
    most_entropy_weight: float = 0.6
    facts_weight: float = 1.0  #: of the drills' loss, relative to that of the answers about pictures
    fact_tokens: int = 115_000  #: tokens of the drills in each step
    first_facts: int = 12_000  #: prices that are drilled at first
    facts_growth: float = 1.2  #: factor by which they become more whenever `facts_recall` of them are right
    facts_recall: float = 0.85
    facts_until: float = 0.88  #: fraction of the training after which they stay as many
    #: recall after the longest context so far at which drills get the next longer one of `CONTEXTS`
    context_recall: float = 0.4
    tags_weight: float = 1.0  #: of the tags' loss against the answers'
    #: fraction of batches in which one to four blocks are left out, either the last or any after the first, so that the
    #: block knob costs accuracy gradually; larger fractions make the knob free
    block_dropout_share: float = 0.03
    #: fraction of batches with fewer experts a token; 0, because with as little as 4 % the model learned to do without
    #: half of them
    expert_dropout_share: float = 0.0
    seed: int = 20261121
