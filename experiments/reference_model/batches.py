"""Training batches along the curriculum, drawn on the CPU, endless and seeded."""

import math
import multiprocessing as mp
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from experiment_core_utils.models.hf.tilings import Tiling
from experiment_core_utils.tasks.datasets.reference_knowledge import ReferenceKnowledge, prices, question_about
from experiment_core_utils.tasks.datasets.reference_scenes import (
    DEFAULT_H_REL,
    Scene,
    SceneOptions,
    draw_scene,
    item_codes,
)
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask, QuestionAnswer, prompt_of
from experiments.reference_model.packing import PackedSlots, Slot, make_slot, pack_slots
from experiments.reference_model.recipe import (
    CODED_SHARE,
    CURRICULUM,
    QUESTIONS_PER_SCENE,
    READABLE_PX,
    RECALLS_PER_SCENE,
    SCENES_PER_BATCH,
    OptimiserRecipe,
    Stage,
    crops_of,
)
from experiments.reference_model.tags import CropCutter, ItemTags, item_tags

LARGEST_TEXT_HEIGHT = 0.12
RECALL = "recall/after_a_picture"
QUESTION_NAMES = (*(f"{task.name}/{kind}" for task in QUESTIONS_PER_SCENE for kind in task.question_types), RECALL)


@dataclass(frozen=True)
class TrainingBatch:
    """B pictures of one size, cut the same way, with their questions."""

    tier: str
    images: torch.Tensor  #: [B, H, W, 3] uint8
    tiling: Tiling
    slots: PackedSlots  #: no slot where only the tags are trained
    types: torch.Tensor  #: [B, N] each slot's family and question type as an index into `QUESTION_NAMES`
    tags: ItemTags | None  #: the items, where the batch is for training

    def pin_memory(self) -> "TrainingBatch":
        """The batch in page-locked memory, from where it goes to a GPU without waiting (the data loader calls this)."""
        return replace(
            self,
            images=self.images.pin_memory(),
            slots=self.slots.pin_memory(),
            tags=None if self.tags is None else self.tags.pin_memory(),
        )


def stage_at(progress: float) -> tuple[Stage, float]:
    """The stage of the curriculum at `progress` in [0, 1], and how much of that stage is done."""
    start = 0.0
    for stage in CURRICULUM:
        if progress < stage.until or stage is CURRICULUM[-1]:
            return stage, min((progress - start) / (stage.until - start), 1.0)
        start = stage.until
    raise AssertionError("the last stage ends at 1")


class BatchSource(torch.utils.data.IterableDataset[TrainingBatch]):
    """Endless batches; `progress`, which the trainer advances from 0 to 1, and `facts`, the number of codes whose
    prices are trained, are shared with it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: CropCutter,
        recipe: OptimiserRecipe,
        scale: float = 1.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.seed = recipe.seed
        self.scale = scale
        self.progress = mp.get_context("fork").Value("d", 0.0)
        self.facts = mp.get_context("fork").Value("i", recipe.first_facts)

    def __iter__(self) -> Iterator[TrainingBatch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        torch.set_num_threads(1)
        while True:
            yield self.draw(rng, self.progress.value)

    def draw(self, rng: random.Random, progress: float) -> TrainingBatch:
        """A batch for this point of the curriculum."""
        stage, within = stage_at(progress)
        (tier,) = rng.choices(list(stage.tiers), list(stage.tiers.values()))
        canvas = _draw_canvas(rng, tier)
        tiling = self.processor.tiling_for(canvas[1], canvas[0], crops_of(tier))
        readable = rng.random() < stage.readable_share
        is_coded = rng.random() < CODED_SHARE
        as_the_task = ReferenceKnowledge.h_rel if is_coded else DEFAULT_H_REL
        most = round(stage.items[0] + within * (stage.items[1] - stage.items[0]))
        options = SceneOptions(
            min_items=min(3, most) if tier != "single" else 1,
            max_items=most,
            canvas=canvas,
            h_rel=self._readable_heights(canvas, tiling, tier) if readable else as_the_task,
            codes=range(self.facts.value) if is_coded else None,
        )
        count = max(2, round(SCENES_PER_BATCH[tier] * stage.scenes * self.scale))
        scenes = [draw_scene(random.Random(rng.getrandbits(47)), options) for _ in range(count)]
        slots: list[list[Slot]] = []
        types: list[list[int]] = []
        tasks = [task for task in QUESTIONS_PER_SCENE if is_coded or task is not ReferenceKnowledge]
        recalls = RECALLS_PER_SCENE if stage.drills else 0
        for scene in scenes:
            questions = [q for task in tasks for q in _questions(task, scene, rng)] if stage.answers else []
            types.append([name_index(task, item) for task, item, _ in questions])
            slots.append([slot_of(self.tokenizer, item, weight) for _, item, weight in questions])
            types[-1] += [QUESTION_NAMES.index(RECALL)] * recalls
            slots[-1] += [self._recall(rng, scene) for _ in range(recalls)]
        images = torch.from_numpy(np.stack([np.asarray(scene.image) for scene in scenes]))
        packed_slots = pack_slots(slots, self.tokenizer.pad_token_id)
        return TrainingBatch(
            tier, images, tiling, packed_slots, torch.tensor(types, dtype=torch.int64), item_tags(scenes)
        )

    def _recall(self, rng: random.Random, scene: Scene) -> Slot:
        """A question whose text contains the code, in the question or at the start of the answer, after a picture."""
        code = item_codes()[rng.randrange(self.facts.value)]
        item = rng.choice(scene.items)
        answered = prompt_of(question_about(f"{item.colour} {item.kind}")) + f" {code}"
        prompt = answered if rng.random() < 0.5 else prompt_of(f"what is the price of {code}?")
        return make_slot(self.tokenizer, prompt, prices()[code])

    def _readable_heights(self, canvas: tuple[int, int], tiling: Tiling, tier: str) -> tuple[float, float]:
        """Relative text heights that are `READABLE_PX` after the resize to the tiling's canvas."""
        target = self.processor.canvas_size(tiling)
        scale = min(target[0] / canvas[1], target[1] / canvas[0])
        seen_side = math.sqrt(canvas[0] * canvas[1]) * scale
        top = LARGEST_TEXT_HEIGHT if tier == "single" else DEFAULT_H_REL[1]
        low = min(max(READABLE_PX[0] / seen_side, DEFAULT_H_REL[0]), top * 0.9)
        return low, min(max(READABLE_PX[1] / seen_side, low * 1.2), top)


def _questions(
    task: type[GeneratedTask], scene: Scene, rng: random.Random
) -> list[tuple[type[GeneratedTask], QuestionAnswer, float]]:
    """Questions of a family, as many as the recipe requests; a scene that offers fewer repeats its own."""
    count, weight = QUESTIONS_PER_SCENE[task]
    drawn = task.draw_questions(scene, rng, count)
    return [(task, item, weight) for item in (drawn * count)[:count]]


def name_index(task: type[GeneratedTask], pair: QuestionAnswer) -> int:
    """The place of a question's family and type in `QUESTION_NAMES`."""
    return QUESTION_NAMES.index(f"{task.name}/{pair.question_type}")


def slot_of(tokenizer: PreTrainedTokenizerBase, pair: QuestionAnswer, weight: float = 1.0) -> Slot:
    """The slot of a question, with the prompt of its task."""
    return make_slot(tokenizer, prompt_of(pair.question, pair.options), pair.answer, weight)


def _draw_canvas(rng: random.Random, tier: str) -> tuple[int, int]:
    """A canvas (width, height): near one crop for "single", else as large and as long as the task's pictures."""
    if tier == "single":
        side, aspect = rng.uniform(300, 480), math.exp(rng.uniform(-0.25, 0.25))
    else:
        side, aspect = rng.uniform(480, 1150), math.exp(rng.uniform(-math.log(3), math.log(3)))
    width, height = round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect))
    return min(max(width, 300), 1400), min(max(height, 300), 1400)
