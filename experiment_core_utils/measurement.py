"""In: one setting and this process's share of the samples; out: the share's journal, brought to its end."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiment_core_utils.c_prompt_processing import RequestMaker
from experiment_core_utils.e_inference import run_staged
from experiment_core_utils.g_metrics_inference import answer_to
from experiment_core_utils.k_results_aggregation import finished_ids
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.device import (
    MemoryWindow,
    out_of_memory_named,
    release_cached_memory,
    synchronize,
)
from experiment_core_utils.primitives.errors import KnobDidNotAct, SampleError, SettingError
from experiment_core_utils.primitives.interruption import StopRequest, time_limit
from experiment_core_utils.primitives.journal import Journal
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import (
    FailedSample,
    FinishedSample,
    JournalHeader,
    KnobProof,
    MeasuredSample,
    RequestShape,
    SettingFailure,
    ShareDone,
)
from experiment_core_utils.progress_bar import Progress
from experiment_core_utils.tasks.interface import Metric, Sample, Task
from experiment_core_utils.torch_profiles import TorchProfiles


class ShareMeasurer:
    """Measures one process's share of the samples, setting by setting.

    Args:
        origin: the header of this process's journals, but for the setting's key.
        stop: looked at before every sample.
        profiles: decides which samples are run once more under a profiler.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        task: Task,
        metric: Metric,
        model: StagedModel,
        max_new_tokens: int,
        origin: JournalHeader,
        journals: Path,
        stop: StopRequest,
        profiles: TorchProfiles,
    ) -> None:
        self.config = config
        self.task = task
        self.metric = metric
        self.model = model
        self.maker = RequestMaker(model, task)
        self.max_new_tokens = max_new_tokens
        self.origin = origin
        self.journals = journals
        self.stop = stop
        self.profiles = profiles
        self._warm_tilings: set[tuple[int, int] | None] = set()

    def measure_share(self, setting: KnobSetting, own_ids: Sequence[int], progress: Progress) -> ShareDone:
        """Bring the journal of the setting to its end, from wherever an earlier run left it.

        Args:
            own_ids: the samples of this process: its share of all, or of a round of a search.

        Raises:
            Stopped, ResultsNotSaved, ResultsError: every sample that was finished is in the journal.
        """
        finished = finished_ids(self.journals, setting.key, self.origin.fingerprint).intersection(own_ids)
        progress.start(setting.key, len(finished))
        with Journal(self.journals, replace(self.origin, key=setting.key)) as journal:
            earlier = journal.before.end if journal.before is not None else None
            if earlier is not None and earlier.failure is None and finished.issuperset(own_ids):
                done = replace(earlier, experiment_id=self.origin.experiment_id)
            else:
                done = self._measure_with_retries(setting, own_ids, journal, finished, progress)
            journal.append(done)
        return done

    def _measure_with_retries(
        self, setting: KnobSetting, own_ids: Sequence[int], journal: Journal, finished: set[int], progress: Progress
    ) -> ShareDone:
        """Every attempt takes up what the ones before did not finish; in the last, samples fail for good."""
        attempts = self.config.max_config_retries + 1
        for attempt in range(1, attempts + 1):
            is_last = attempt == attempts
            try:
                proof, window = self._measure(setting, own_ids, journal, finished, progress, is_last)
            except SettingError as error:
                release_cached_memory(self.model.device)
                if is_last or isinstance(error, KnobDidNotAct):
                    failure = SettingFailure(type(error).__name__, str(error), attempt)
                    return ShareDone(self.origin.experiment_id, None, None, failure)
            else:
                if finished.issuperset(own_ids):
                    break
            self.stop.sleep(self.config.config_retry_delay)
        return ShareDone(self.origin.experiment_id, proof, window.reading, None)

    def _measure(
        self,
        setting: KnobSetting,
        own_ids: Sequence[int],
        journal: Journal,
        finished: set[int],
        progress: Progress,
        is_last_attempt: bool,
    ) -> tuple[KnobProof | None, MemoryWindow]:
        """Warm up and prove the knobs on the first sample that can be read, then run every sample not yet finished."""
        self.model.apply(setting)
        proof: KnobProof | None = None
        with out_of_memory_named(), MemoryWindow(self.model.device) as window:
            for sample_id in own_ids:
                if sample_id in finished and proof is not None:
                    continue
                self.stop.raise_if_asked()
                measured, failed = None, None
                try:
                    with time_limit(self.config.sample_timeout):
                        sample = self.task[sample_id]
                        proof = proof or self._warm_up(setting, sample)
                    if sample_id not in finished:
                        with time_limit(self.config.sample_timeout):
                            measured = self._measure_sample(setting, sample)
                except SampleError as error:
                    failed = FailedSample(sample_id, type(error).__name__, str(error))
                if sample_id in finished or (failed is not None and not is_last_attempt):
                    continue
                journal.append(FinishedSample(measured, failed, window.read()))
                finished.add(sample_id)
                progress.advance()
                if measured is not None and self.profiles.wants(setting.key):
                    self._profile(setting, sample)
        return proof, window

    def _profile(self, setting: KnobSetting, sample: Sample) -> None:
        """One more run of a sample that is on the disk already, outside its time limit."""
        inputs = self.model.to_device(self.maker.make(sample, setting.vision.crops).inputs)
        self.profiles.take(self.model, setting.key, sample.sample_id, inputs, self.max_new_tokens)

    def _warm_up(self, setting: KnobSetting, sample: Sample) -> KnobProof:
        inputs = self.model.to_device(self.maker.make(sample, setting.vision.crops).inputs)
        proof = self.model.prove(setting, inputs)
        check_proof(proof, setting, self.model.default_top_k)
        for _ in range(self.config.num_warmup_runs):
            run_staged(self.model, inputs, self.max_new_tokens)
        return proof

    def _warm_up_shape(self, shape: RequestShape, inputs: Mapping[str, Any]) -> None:
        """One unmeasured run for a tiling that this process meets first: libraries prepare kernels for new shapes."""
        tiling = shape.actual.tiling if shape.actual is not None else None
        if self.config.num_warmup_runs and tiling not in self._warm_tilings:
            run_staged(self.model, inputs, self.max_new_tokens)
        self._warm_tilings.add(tiling)

    def _measure_sample(self, setting: KnobSetting, sample: Sample) -> MeasuredSample:
        # Scored at the merge, with all others; one that no metric could judge is not worth the time of its runs.
        self.metric.score([answer_to(sample, "")])
        request = self.maker.make(sample, setting.vision.crops)
        started = time.perf_counter()
        inputs = self.model.to_device(request.inputs)
        synchronize(self.model.device)
        transfer_s = time.perf_counter() - started
        self._warm_up_shape(request.shape, inputs)
        runs = tuple(
            run_staged(self.model, inputs, self.max_new_tokens) for _ in range(self.config.num_runs_per_sample)
        )
        return MeasuredSample(
            sample_id=sample.sample_id,
            shape=request.shape,
            runs=runs,
            outputs_identical=len({run.token_ids for run in runs}) == 1,
            transfer_s=transfer_s,
            prediction=self.model.decode_text(runs[0].token_ids),
            flops=self.model.count_flops(setting, request.shape, len(runs[0].token_ids)),
            question_type=sample.question_type,
            image_id=sample.image_id,
            references=sample.answers,
            options=sample.options,
            answer_index=sample.answer_index,
            metadata={**sample.metadata, "question": sample.question},
        )


def check_proof(proof: KnobProof, setting: KnobSetting, default_top_k: int) -> None:
    """Raises KnobDidNotAct where what ran is not what was asked for."""
    expected = tuple(default_top_k if block == 0 else setting.top_k for block in setting.active_blocks)
    if proof.blocks_run != setting.active_blocks or proof.blocks_run_decode != setting.active_blocks:
        raise KnobDidNotAct(f"{setting.key}: blocks {proof.blocks_run} ran instead of {setting.active_blocks}")
    if proof.experts_per_token != expected:
        raise KnobDidNotAct(f"{setting.key}: {proof.experts_per_token} experts a token instead of {expected}")
    if proof.cache_layers != setting.num_active_blocks:
        raise KnobDidNotAct(f"{setting.key}: the cache holds {proof.cache_layers} layers")
