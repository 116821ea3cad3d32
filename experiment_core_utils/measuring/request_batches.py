"""Which requests run together where the batch size is a knob: a sample's own, and those of the samples after it.

At each setting the turn of a sample is a run of its own, so that samples stay paired; each sample is in as many batches
as a batch has requests, and is measured where it comes first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.batches import BatchProof
from experiment_core_utils.models.interface import Batched, Runnable
from experiment_core_utils.primitives.errors import KnobDidNotAct, SampleError
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.requests import PreparedRequest

Inputs = Mapping[str, Any]
# Prepares a sample's request and sends it to the device; raises SampleError for one that cannot be used.
Take = Callable[[int], tuple[PreparedRequest, Inputs]]


class RequestBatches:
    """Puts the requests of batches together, and proves that their answers are those of each request alone.

    Args:
        sample_ids: of the samples that are timed here, in order; behind the last comes the first.
    """

    def __init__(self, model: Runnable, max_new_tokens: int, sample_ids: Sequence[int]) -> None:
        self._model, self._max_new_tokens = model, max_new_tokens
        self._ids = tuple(sample_ids)
        self._proofs: dict[str, BatchProof] = {}

    def following(self, sample_id: int) -> tuple[int, ...]:
        """The other samples, those after this one first."""
        place = self._ids.index(sample_id) if sample_id in self._ids else -1
        return (*self._ids[place + 1 :], *self._ids[: max(place, 0)])

    def needed(self, sample_ids: Sequence[int], size: int) -> set[int]:
        """The samples of the batches of these ones, where all of them can be read and put together."""
        return {each for own in sample_ids for each in (own, *self.following(own)[: size - 1])}

    def of(self, setting: Setting, sample_id: int, take: Take) -> tuple[Inputs, ...]:
        """The inputs of a sample's batch, its own first; samples that cannot be read or put together with it are left
        out. The setting must be in force.

        Raises:
            SampleError: the sample cannot be read, or there are too few others.
            KnobDidNotAct: the model takes no batches, or answers otherwise in this one than alone.
        """
        size, (request, inputs) = batch_size_of(setting), take(sample_id)
        if size == 1:
            return (inputs,)
        model = self._model
        if not isinstance(model, Batched):
            raise KnobDidNotAct(f"{setting.key}: this model runs one request at a time; drop --batch_size_list")
        batch, kind = [(request, inputs)], model.batch_kind(inputs)
        for other in self.following(sample_id):
            if len(batch) == size:
                break
            try:
                found = take(other)
            except SampleError:  # not lost: it fails when its own turn comes
                continue
            if model.batch_kind(found[1]) == kind:
                batch.append(found)
        if len(batch) < size:
            raise SampleError(
                f"sample {sample_id} is in no batch of {size}: its tensors fit those of {len(batch) - 1} of the "
                f"{counted(len(self._ids), 'timed sample')}; give smaller batches"
            )
        self._prove(setting, [each for each, _ in batch])
        return tuple(each for _, each in batch)

    def _prove(self, setting: Setting, requests: Sequence[PreparedRequest]) -> None:
        """Raises KnobDidNotAct where the answers of a batch are not those of each request alone."""
        proof = self._proofs.setdefault(setting.key, BatchProof(self._model, self._max_new_tokens, setting))
        if proof.reason is None and proof.is_new(requests):
            proof.answer(requests)
        if proof.reason is not None:
            raise KnobDidNotAct(f"{setting.key}: requests cannot run together: {proof.reason}; drop --batch_size_list")
