"""How accurately a model answers tasks with any set of its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.batches import BatchAnswerer, Bench
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.interface import Answer, Task, answer_of
from experiment_core_utils.tasks.registry import get_metric
from experiments.block_importance.importance import Blocks, Measured, TaskValues, passed_through


@dataclass(frozen=True)
class DrawnTask:
    """A task with the ids of its drawn samples, and where their requests come from."""

    task: Task
    sample_ids: tuple[int, ...]
    requests: RequestSource


def draw_task(model: StagedModel, task: Task, sample_ids: Sequence[int], budget_bytes: int) -> DrawnTask:
    """The task for this model; requests are kept in memory up to the budget, since every set asks them again."""
    ids = tuple(sample_ids)
    requests = RequestSource(task, model, ids, budget_bytes, 0, None, keep_pictures=False)
    return DrawnTask(task, ids, requests)


class AnswerScorer:
    """A `BlockSetScorer` for any model and task: the score of each greedy answer, as a fraction of the metric's best.

    Samples that cannot be read or used are left out.

    Args:
        setting: of which the blocks are replaced by each set.
        batch_size: most samples answered together, fewer where memory runs out.
    """

    measure = "accuracy, as a fraction of the metric's best score"

    def __init__(self, model: StagedModel, drawn: Sequence[DrawnTask], setting: Setting, batch_size: int) -> None:
        self._model = model
        self._drawn = tuple(drawn)
        self._setting = setting
        self._batch_size = batch_size
        #: of each task, the samples that were left out so far
        self.failed: dict[str, set[int]] = {each.task.name: set() for each in drawn}

    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        """See `BlockSetScorer.measured`.

        Raises:
            ConfigurationError: no sample of a task can be scored.
            OutOfMemory: for a single request.
        """
        found: list[dict[str, TaskValues]] = [{} for _ in sets]
        for drawn in self._drawn:
            answered = [self._answered(drawn, blocks) for blocks in tqdm(sets, desc=drawn.task.name, unit="set")]
            ids = [each for each in drawn.sample_ids if all(each in samples for samples in answered)]
            for place, samples in enumerate(answered):
                found[place][drawn.task.name] = scored(drawn.task, [answer_of(samples[each]) for each in ids])
        return list(found)

    def _answered(self, drawn: DrawnTask, blocks: Blocks) -> dict[int, MeasuredSample]:
        """Samples that could be answered, by id."""
        if 0 not in blocks:
            with passed_through(self._model.decoder_blocks[0]):
                return self._answered(drawn, (0, *blocks))
        setting = self._setting.replaced(**{ACTIVE_BLOCKS.name: RunningBlocks.of(blocks)})
        self._model.apply(setting)
        task = drawn.task
        bench = Bench(self._model, drawn.requests, task.max_new_tokens, get_metric(task.metric))
        answerer = BatchAnswerer(bench, self._batch_size, None)
        answered = {}
        for batch in answerer.outcomes(setting, drawn.sample_ids):
            for outcome in batch:
                if isinstance(outcome, FailedSample):
                    self.failed[task.name].add(outcome.sample_id)
                else:
                    answered[outcome.sample_id] = outcome
        return answered


def scored(task: Task, answers: Sequence[Answer]) -> TaskValues:
    """Scores of the answers as fractions of the metric's best; raises ConfigurationError where one has none."""
    metric = get_metric(task.metric)
    values = [score.value for score in metric.score(answers).scores] if answers else []
    known = [value / metric.best for value in values if value is not None]
    if len(known) < len(values) or not known:
        raise ConfigurationError(
            f"{task.metric} has no score for {counted(len(values), 'sample')} of {task.name}; ask for more "
            "(--num_samples, --held_out)"
        )
    return TaskValues(tuple(known), tuple(answer.image_id for answer in answers))
