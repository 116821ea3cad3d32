"""Which requests run together where the batch size is a knob: a sample's own, and those of the samples after it.

At each setting the turn of a sample is a run of its own, so that samples stay paired; each sample is in as many batches
as a batch has requests, and is measured where it comes first. A request that fails alone fails there too, and is in no
other batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.batches import BatchProof
from experiment_core_utils.models.interface import Batched, Runnable
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import KnobDidNotAct, SampleError, SampleTimedOut, library_faults_named
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.requests import PreparedRequest

Inputs = Mapping[str, Any]
# Prepares a sample's request and sends it to the device; raises SampleError for one that cannot be used.
Take = Callable[[int], tuple[PreparedRequest, Inputs]]
# The inputs of the requests that run together, by sample, the sample's own first.
Batch = Mapping[int, Inputs]
T = TypeVar("T")


class RequestBatches:
    """Puts the requests of batches together, and proves that their answers are those of each request alone.

    Args:
        sample_ids: of the samples that are timed here, in order; behind the last comes the first.
    """

    def __init__(self, model: Runnable, max_new_tokens: int, sample_ids: Sequence[int]) -> None:
        self._model, self._max_new_tokens = model, max_new_tokens
        self._ids = tuple(sample_ids)
        self._proofs: dict[str, BatchProof] = {}
        self._failing = set[tuple[str, int]]()  #: settings and samples whose request fails there alone

    def following(self, sample_id: int) -> tuple[int, ...]:
        """The other samples, those after this one first."""
        place = self._ids.index(sample_id) if sample_id in self._ids else -1
        return (*self._ids[place + 1 :], *self._ids[: max(place, 0)])

    def needed(self, sample_ids: Sequence[int], size: int) -> set[int]:
        """The samples of the batches of these ones, where all of them can be read and put together."""
        return {each for own in sample_ids for each in (own, *self.following(own)[: size - 1])}

    def of(self, setting: Setting, sample_id: int, take: Take) -> Batch:
        """A sample's batch; samples that cannot be read, fail alone or cannot be put together with it are left out. The
        setting must be in force.

        Raises:
            SampleError: the sample cannot be read or run, or there are too few others.
            KnobDidNotAct: the model takes no batches, or answers otherwise in this one than alone.
        """
        size, (_, inputs) = batch_size_of(setting), take(sample_id)
        if size == 1:
            return {sample_id: inputs}
        model = self._model
        if not isinstance(model, Batched):
            raise KnobDidNotAct(f"{setting.key}: this model runs one request at a time; drop --batch_size_list")
        batch, kind = {sample_id: inputs}, model.batch_kind(inputs)
        for other in self.following(sample_id):
            if len(batch) == size:
                break
            if (setting.key, other) in self._failing:
                continue
            try:
                found = take(other)
            except SampleError:  # not lost: it fails when its own turn comes
                continue
            if model.batch_kind(found[1]) == kind:
                batch[other] = found[1]
        if len(batch) < size:
            raise SampleError(
                f"sample {sample_id} is in no batch of {size}: of {counted(len(self._ids), 'timed sample')} only "
                f"{len(batch) - 1} can run beside it; give smaller batches"
            )

        def proved(batch: Batch) -> None:
            self._prove(setting, [take(each)[0] for each in batch])

        return self.ran(setting, sample_id, take, batch, proved)[0]

    def ran(
        self, setting: Setting, sample_id: int, take: Take, batch: Batch, work: Callable[[Batch], T]
    ) -> tuple[Batch, T]:
        """What `work` makes of a sample's batch, and that batch. Where a library refuses it, the others are tried
        alone, and it is made anew without those that fail.

        Raises:
            SampleError: the sample fails, or no batch is left for it.
        """
        try:
            with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                return batch, work(batch)
        except SampleTimedOut:
            raise
        except SampleError:
            failing = {(setting.key, other) for other in list(batch)[1:] if self._fails_alone(batch[other])}
            if not failing:
                raise
        self._failing |= failing
        return self.ran(setting, sample_id, take, self.of(setting, sample_id, take), work)

    def _fails_alone(self, inputs: Inputs) -> bool:
        try:
            with library_faults_named("a request of a batch"), out_of_memory_named():
                self._model.answer_batch([inputs], self._max_new_tokens)
        except SampleTimedOut:
            raise
        except SampleError:  # not lost: it fails when its own turn comes
            return True
        return False

    def _prove(self, setting: Setting, requests: Sequence[PreparedRequest]) -> None:
        """Raises KnobDidNotAct where the answers of a batch are not those of each request alone."""
        proof = self._proofs.setdefault(setting.key, BatchProof(self._model, self._max_new_tokens, setting))
        if proof.reason is None and proof.is_new(requests):
            proof.answer(requests)
        if proof.reason is not None:
            raise KnobDidNotAct(f"{setting.key}: requests cannot run together: {proof.reason}; drop --batch_size_list")
