"""In: the embedded model and held-out pictures; out: how accurate its answers are with sets of blocks."""

from collections.abc import Sequence

from tqdm import tqdm

from experiment_core_utils.blocks.importance import Blocks, Measured, TaskValues
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import KnobSetting, VisionTarget
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.interface import Answer
from experiment_core_utils.tasks.registry import get_metric
from experiments.reference_model.evaluation import answer_pictures


class AnsweredPictureScorer:
    """A `BlockSetScorer` of the embedded model: each greedy answer's score, as a share of the metric's best.

    What `AnswerScorer` gives too, in a fraction of the time on a CPU, because questions about one picture share it.
    Every set must hold block 0.
    """

    measure = "accuracy, as a fraction of the metric's best score"

    def __init__(
        self,
        model: MolmoeForConditionalGeneration,
        processor: MolmoeProcessor,
        tasks: Sequence[GeneratedTask],
        pictures: Sequence[int],
        vision: VisionTarget,
        top_k: int | None,
    ) -> None:
        self._model = model
        self._processor = processor
        self._tasks = tuple(tasks)
        self._pictures = tuple(pictures)
        self._vision = vision
        self._top_k = top_k

    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        """See `BlockSetScorer.measured`; raises ConfigurationError for too few pictures to judge captions."""
        settings = [KnobSetting(self._vision, self._top_k, blocks) for blocks in dict.fromkeys(sets)]
        answers: dict[Blocks, dict[str, list[Answer]]] = {
            each.active_blocks: {task.name: [] for task in self._tasks} for each in settings
        }
        for picture in tqdm(self._pictures, unit="picture", desc=f"{len(settings)} sets of blocks"):
            for each in answer_pictures(self._model, self._processor, self._tasks, [picture], settings):
                answers[each.setting.active_blocks][each.task].append(each.answer)
        return [{task.name: _scored(task, answers[blocks][task.name]) for task in self._tasks} for blocks in sets]


def _scored(task: GeneratedTask, answers: Sequence[Answer]) -> TaskValues:
    metric = get_metric(task.metric)
    values = [score.value for score in metric.score(answers).scores]
    known = tuple(value / metric.best for value in values if value is not None)
    if len(known) < len(values):
        raise ConfigurationError(f"{task.metric} has no score for {len(values)} answers; ask for more --held_out")
    return TaskValues(known, tuple(answer.image_id for answer in answers))
