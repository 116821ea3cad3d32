"""In: the embedded model and pictures with all families' questions; out: how likely sets of blocks make the answers.

All questions about a picture is behind it in one pack, each seeing the picture and itself (as in `packing.py`), so
that one pass gives the log-likelihood of every expected answer. Sets that begin with the same blocks share their
states. Together this makes hundreds of answers at dozens of sets a matter of minutes on a CPU.
"""

from collections.abc import Sequence

import torch
from tqdm import tqdm

from experiment_core_utils.blocks.importance import Blocks, Measured, TaskValues
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor
from experiment_core_utils.primitives.knobs import CropRange
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiments.reference_model.packing import make_slot

Found = dict[Blocks, list[tuple[str, float]]]


class PackedPictureScorer:
    """A `BlockSetScorer` of the embedded model: the mean log-likelihood of an expected answer's tokens.

    End-of-sequence counts as a token. The samples are all questions of the tasks about the pictures.

    Args:
        model: all its blocks active.
    """

    measure = "mean log-likelihood of the expected answer's tokens"

    def __init__(
        self,
        model: MolmoeForConditionalGeneration,
        processor: MolmoeProcessor,
        tasks: Sequence[GeneratedTask],
        pictures: Sequence[int],
        crops: CropRange,
    ) -> None:
        self._model = model
        self._processor = processor
        self._tasks = tuple(tasks)
        self._pictures = tuple(pictures)
        self._crops = crops

    @torch.inference_mode()
    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        """See `BlockSetScorer.measured`."""
        values: dict[Blocks, dict[str, list[float]]] = {
            blocks: {task.name: [] for task in self._tasks} for blocks in sets
        }
        images: dict[str, list[str]] = {task.name: [] for task in self._tasks}
        for picture in tqdm(self._pictures, unit="picture", desc=f"{len(values)} sets of blocks"):
            pack = _Pack(self._model, self._processor, self._tasks, picture, self._crops)
            for task_name, image_id in pack.samples:
                images[task_name].append(image_id)
            for blocks, likelihoods in pack.likelihoods(list(values)).items():
                for (task_name, _), value in zip(pack.samples, likelihoods, strict=True):
                    values[blocks][task_name].append(value)
        return [
            {name: TaskValues(tuple(found), tuple(images[name])) for name, found in values[blocks].items()}
            for blocks in sets
        ]


class _Pack:
    """One picture with its questions and expected answers, embedded.

    Attributes:
        samples: task and picture of each question.
    """

    def __init__(
        self,
        model: MolmoeForConditionalGeneration,
        processor: MolmoeProcessor,
        tasks: Sequence[GeneratedTask],
        picture: int,
        crops: CropRange,
    ) -> None:
        self._model = model
        samples = [
            (task, task[index])
            for task in tasks
            for index in range(picture * task.questions_per_image, (picture + 1) * task.questions_per_image)
        ]
        self.samples = [(task.name, sample.image_id) for task, sample in samples]
        inputs = processor("", samples[0][1].image, crops)
        prefix = inputs["input_ids"].shape[1]
        ids, positions, owners = inputs["input_ids"][0].tolist(), list(range(prefix)), [0] * prefix
        self._answers: list[tuple[int, torch.Tensor]] = []
        for owner, (task, sample) in enumerate(samples, start=1):
            slot = make_slot(processor.tokenizer, task.prompt(sample), str(sample.metadata["answer"]))
            row = [*slot.prompt, *slot.answer[:-1]]
            self._answers.append((len(ids) + len(slot.prompt) - 1, torch.tensor(slot.answer)))
            ids += row
            positions += range(prefix, prefix + len(row))
            owners += [owner] * len(row)
        features = model.encode_image(
            inputs["pixel_values"].to(model.dtype), inputs["image_masks"], inputs["image_input_idx"]
        )
        self._states = model.model.embed(torch.tensor([ids]), features)
        self._rotary = model.model.language_model.rotary_emb(self._states, torch.tensor([positions]))
        self._mask = _mask(torch.tensor(owners), self._states.dtype)

    def likelihoods(self, sets: Sequence[Blocks]) -> dict[Blocks, list[float]]:
        """Value of each sample, for each set."""
        found = {}
        done: list[int] = []
        states = [self._states]
        for blocks in sorted(sets):
            shared = next((at for at, pair in enumerate(zip(done, blocks, strict=False)) if pair[0] != pair[1]), None)
            kept = min(len(done), len(blocks)) if shared is None else shared
            del done[kept:], states[kept + 1 :]
            for block in blocks[kept:]:
                states.append(
                    self._model.all_blocks[block](
                        states[-1], attention_mask=self._mask, position_embeddings=self._rotary
                    )
                )
                done.append(block)
            found[blocks] = self._of_answers(states[-1][0])
        return found

    def _of_answers(self, states: torch.Tensor) -> list[float]:
        """[L, H] behind the last block -> mean log-likelihood of each answer's tokens."""
        values = []
        for first, answer in self._answers:
            normed = self._model.model.language_model.norm(states[first : first + len(answer)])
            loss = torch.nn.functional.cross_entropy(self._model.lm_head(normed).float(), answer)
            values.append(-float(loss))
        return values


def _mask(owners: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Owners [L], 0 for the picture -> [1, 1, L, L] to be added: each position sees the picture and its own past."""
    is_seen = (owners[None] == 0) | (owners[None] == owners[:, None])
    is_seen = torch.tril(is_seen)
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)[None, None]
