"""The letters in order: from a configuration to one result file for each setting of the knobs, and a CSV of all."""

import hashlib
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import (
    generate_unique_id,
    of_all_processes,
    of_main_process,
    processes_on_this_machine,
    setup_distributed,
)
from experiment_core_utils.b_model_loader import ModelSource, find_model, load_staged_model
from experiment_core_utils.c_prompt_processing import (
    RequestMaker,
    draw_samples,
    fingerprint_of_ids,
    share_of_process,
)
from experiment_core_utils.e_inference import run_staged
from experiment_core_utils.f_experiment_info import environment_stamp, gather_provenance
from experiment_core_utils.g_metrics_inference import answer_of, answer_to, summarise, summarise_accuracy
from experiment_core_utils.j_results_saving import setting_file_name, setting_result, write_json_atomically
from experiment_core_utils.k_results_aggregation import (
    collect_parts,
    finished_ids,
    merge_parts,
    remove_journals,
    tidy_journals,
)
from experiment_core_utils.l_results_csv_cleaning import few_samples_sentence, write_settings_csv
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.device import (
    MemoryWindow,
    choose_device,
    out_of_memory_named,
    release_cached_memory,
    set_cpu_threads,
    synchronize,
)
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    KnobDidNotAct,
    SampleError,
    SettingError,
    WorkerLost,
)
from experiment_core_utils.primitives.interruption import StopRequest, signals_stop, time_limit
from experiment_core_utils.primitives.journal import JOURNAL_VERSION, Journal
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import (
    FailedSample,
    FinishedSample,
    JournalHeader,
    KnobProof,
    MeasuredSample,
    MeasuredSetting,
    RequestShape,
    SettingFailure,
    ShareDone,
)
from experiment_core_utils.primitives.strategies import plan_settings
from experiment_core_utils.progress import Ledger
from experiment_core_utils.progress_bar import Progress, progress_of
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiment_core_utils.tasks.sampling import SampledDataset

PARTS_FOLDER = ".parts"


@dataclass(frozen=True)
class RunReport:
    """What a run leaves behind.

    Attributes:
        experiment_id: None where every setting was done already.
        results: contents of the settings' files, in the order of the plan; settings that failed are not among them.
        failed: settings that could not be run.
        left_out: for each knob of which the strategy measured fewer values than were given, those left out, as text.
        csv_path: the table of all settings; None where every setting failed, and on processes other than the main one.
    """

    experiment_id: str | None
    is_main_process: bool
    results: tuple[Mapping[str, Any], ...]
    failed: Mapping[str, SettingFailure]
    left_out: tuple[str, ...]
    output_dir: Path
    csv_path: Path | None


def run_profiling(config: ProfilingConfig) -> RunReport:
    """Judge what was asked against model and task, load once, then measure and save setting by setting."""
    source = find_model(config.model_path, config.hf_cache_dir)
    settings = plan_for(config, source)
    task = load_task(
        config.dataset_name,
        config.split,
        data_dir=config.data_dir,
        cache_dir=config.hf_cache_dir,
        prompt_template=config.prompt_template,
        revision=config.dataset_revision,
    )
    drawn = draw_samples(task, config)
    make_output_dir(config.output_dir)
    # Processes wait for each other here, until the model is loaded; later they meet in their journals only.
    accelerator = setup_distributed(config)
    fingerprint = agreed_fingerprint(config, source, task, drawn.sample_ids, accelerator)
    ledger = Ledger(config.output_dir, fingerprint)
    due_keys = of_main_process(lambda: due_and_tidy(config.output_dir, settings, ledger, fingerprint), accelerator)
    due = [setting for setting in settings if setting.key in due_keys]
    experiment_id, failed = None, {}
    if due:
        experiment_id = generate_unique_id(accelerator)
        caveats = [caveat] if (caveat := few_samples_sentence(len(settings), len(drawn))) is not None else []
        run = ProfilingRun(config, source, task, accelerator, drawn, fingerprint, ledger, experiment_id, caveats)
        with signals_stop() as run.stop:
            failed = run.measure_all(due)
    if not accelerator.is_main_process:
        return RunReport(experiment_id, False, (), failed, (), config.output_dir, None)
    results = tuple(result for setting in settings if (result := ledger.result(setting.key)) is not None)
    csv_path = config.output_dir / f"{task.name.replace('_', '-')}_settings.csv" if results else None
    if csv_path is not None:
        write_settings_csv(results, csv_path)
    return RunReport(experiment_id, True, results, failed, left_out_by(config, settings), config.output_dir, csv_path)


def due_and_tidy(
    output_dir: Path, settings: Sequence[KnobSetting], ledger: Ledger, fingerprint: str
) -> tuple[str, ...]:
    """Keys of the settings that have no result yet, once the journals in the folder are put in order."""
    tidy_journals(output_dir / PARTS_FOLDER, fingerprint, lambda key: ledger.result(key) is not None)
    return tuple(setting.key for setting in settings if ledger.result(setting.key) is None)


def make_output_dir(folder: Path) -> None:
    """Make the folder of the results; raises ConfigurationError where that, or writing into it, is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--output_dir {folder} cannot be written to ({error.strerror}); give another folder"
        ) from error


def plan_for(config: ProfilingConfig, source: ModelSource) -> tuple[KnobSetting, ...]:
    """The settings asked for, judged against the model's config before any weight is read.

    Raises:
        ConfigurationError: more experts or blocks than the model has, or importance scores without a block.
    """
    top_k_values = config.top_k_list or _half_and_whole(source.default_top_k)
    block_counts = config.num_active_blocks_list or _unique(
        -(-3 * source.num_total_blocks // 4), source.num_total_blocks
    )
    for top_k in top_k_values:
        if top_k > source.num_experts:
            raise ConfigurationError(
                f"--top_k_list {top_k} is more than the {source.num_experts} experts of {source.name}; "
                f"give 1 to {source.num_experts}"
            )
    return plan_settings(
        config.sampling_strategy,
        config.vision_targets,
        top_k_values,
        block_counts,
        source.num_total_blocks,
        config.importance_scores,
    )


def left_out_by(config: ProfilingConfig, settings: Sequence[KnobSetting]) -> tuple[str, ...]:
    """What was asked for and is in no setting: `balanced` thins longer lists."""
    knobs = (
        ("vision targets", [each.label for each in config.vision_targets], {each.vision.label for each in settings}),
        ("top-k", config.top_k_list or (), {each.top_k for each in settings}),
        ("block counts", config.num_active_blocks_list or (), {each.num_active_blocks for each in settings}),
    )
    missing = [(name, [value for value in given if value not in used]) for name, given, used in knobs]
    return tuple(f"{name} {', '.join(map(str, values))}" for name, values in missing if values)


def agreed_fingerprint(
    config: ProfilingConfig, source: ModelSource, task: Task, sample_ids: Sequence[int], accelerator: Accelerator
) -> str:
    """`fingerprint_of`, which must be the same in all processes.

    Raises:
        WorkerLost: (in all of them) it is not.
    """
    found = of_all_processes(fingerprint_of(config, source, task, sample_ids, accelerator), accelerator)
    others = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if others:
        raise WorkerLost(
            f"processes {', '.join(map(str, others))} would measure something else than process 0: all need the same "
            "arguments, model files, data, versions and kind of device"
        )
    return found[0]


def processes_per_device(accelerator: Accelerator) -> int:
    """How many processes share a GPU, or the cores of a CPU: 1 where each has its own."""
    here = processes_on_this_machine(accelerator)
    return here if accelerator.device.type == "cpu" else math.ceil(here / torch.cuda.device_count())


def fingerprint_of(
    config: ProfilingConfig, source: ModelSource, task: Task, sample_ids: Sequence[int], accelerator: Accelerator
) -> str:
    """Digest of what a result depends on beside the knobs: model, samples, how it was measured, device, versions.

    A change of code or of the machine's load is not seen; the provenance in each file records the commit.
    """
    parts = (
        str(source.folder.resolve()),
        source.revision,
        config.random_weights,
        config.dataset_name,
        config.split,
        config.dataset_revision,
        config.prompt_template,
        task.metric,
        sorted(task.source.items()),
        fingerprint_of_ids(sample_ids),
        max_new_tokens_of(config, task),
        config.num_runs_per_sample,
        config.num_warmup_runs,
        config.device,
        config.num_threads,
        config.precision,
        config.experts_implementation,
        config.attn_implementation,
        sorted((config.importance_scores or {}).items()),
        source.weights_stamp,
        str(config.data_dir),
        processes_per_device(accelerator),
        environment_stamp(accelerator.device),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def max_new_tokens_of(config: ProfilingConfig, task: Task) -> int:
    """The limit that was asked for, else the task's own."""
    return task.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens


class ProfilingRun:
    """One process's work on a run: its share of the samples, at every setting that is due."""

    def __init__(
        self,
        config: ProfilingConfig,
        source: ModelSource,
        task: Task,
        accelerator: Accelerator,
        drawn: SampledDataset[Sample],
        fingerprint: str,
        ledger: Ledger,
        experiment_id: str,
        caveats: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.task = task
        self.accelerator = accelerator
        self.drawn = drawn
        self.max_new_tokens = max_new_tokens_of(config, task)
        self.fingerprint = fingerprint
        self.ledger = ledger
        self.metric = get_metric(task.metric)
        self._warm_tilings: set[tuple[int, int] | None] = set()
        self.stop = StopRequest()
        self.processes_here = processes_on_this_machine(accelerator)
        device = choose_device(config.device, accelerator.local_process_index)
        set_cpu_threads(config.num_threads, self.processes_here)
        self.model = load_staged_model(config, source, device)
        self.maker = RequestMaker(self.model, task)
        self.shares = {
            rank: share_of_process(drawn.sample_ids, rank, accelerator.num_processes)
            for rank in range(accelerator.num_processes)
        }
        self.own_ids = self.shares[accelerator.process_index]
        self.journals = config.output_dir / PARTS_FOLDER
        self.experiment_id = experiment_id
        self.provenance = {
            **gather_provenance(accelerator, device, experiment_id),
            "model": {"name": source.name, "revision": source.revision, **self.model.describe()},
            "task": {
                "name": task.name,
                "split": task.split,
                "metric": task.metric,
                "max_new_tokens": task.max_new_tokens,
                "source": dict(task.source),
            },
            "experimental_variables": self._variables(),
            "caveats": [*self._caveats(), *caveats],
        }

    def measure_all(self, settings: Sequence[KnobSetting]) -> dict[str, SettingFailure]:
        """Measure, merge and save each setting before the next; returns those that failed.

        Raises:
            Stopped, WorkerLost, ResultsNotSaved: with everything that was finished on the disk.
        """
        failed = {}
        with progress_of(len(settings), len(self.own_ids), shown=self.accelerator.is_main_process) as progress:
            for setting in settings:
                self.stop.raise_if_asked()
                done = self._measure_share(setting, progress)
                failure = self._merge_and_save(setting) if self.accelerator.is_main_process else done.failure
                if failure is not None:
                    failed[setting.key] = failure
                if self.config.enable_memory_optimization:
                    release_cached_memory(self.model.device)
        return failed

    def _measure_share(self, setting: KnobSetting, progress: Progress) -> ShareDone:
        """Bring this process's journal of the setting to its end, from wherever an earlier run left it."""
        header = JournalHeader(
            schema_version=JOURNAL_VERSION,
            key=setting.key,
            fingerprint=self.fingerprint,
            rank=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
            experiment_id=self.experiment_id,
            sample_ids=self.own_ids,
        )
        finished = finished_ids(self.journals, setting.key, self.fingerprint).intersection(self.own_ids)
        progress.start(setting.key, len(finished))
        with Journal(self.journals, header) as journal:
            earlier = journal.before.end if journal.before is not None else None
            if earlier is not None and earlier.failure is None and finished.issuperset(self.own_ids):
                done = replace(earlier, experiment_id=self.experiment_id)
            else:
                done = self._measure_with_retries(setting, journal, finished, progress)
            journal.append(done)
        return done

    def _measure_with_retries(
        self, setting: KnobSetting, journal: Journal, finished: set[int], progress: Progress
    ) -> ShareDone:
        """Every attempt takes up what the ones before did not finish; in the last, samples fail for good."""
        attempts = self.config.max_config_retries + 1
        for attempt in range(1, attempts + 1):
            is_last = attempt == attempts
            try:
                proof, window = self._measure(setting, journal, finished, progress, is_last)
            except SettingError as error:
                release_cached_memory(self.model.device)
                if is_last or isinstance(error, KnobDidNotAct):
                    failure = SettingFailure(type(error).__name__, str(error), attempt)
                    return ShareDone(self.experiment_id, None, None, failure)
                self.stop.sleep(self.config.config_retry_delay)
                continue
            if finished.issuperset(self.own_ids):
                break
        return ShareDone(self.experiment_id, proof, window.reading, None)

    def _measure(
        self, setting: KnobSetting, journal: Journal, finished: set[int], progress: Progress, is_last_attempt: bool
    ) -> tuple[KnobProof | None, MemoryWindow]:
        """Warm up and prove the knobs on the first sample that can be read, then run every sample not yet finished."""
        self.model.apply(setting)
        proof: KnobProof | None = None
        with out_of_memory_named(), MemoryWindow(self.model.device) as window:
            for sample_id in self.own_ids:
                if sample_id in finished and proof is not None:
                    continue
                self.stop.raise_if_asked()
                try:
                    with time_limit(self.config.sample_timeout):
                        sample = self.task[sample_id]
                        if proof is None:
                            proof = self._warm_up(setting, sample)
                        measured = self._measure_sample(setting, sample) if sample_id not in finished else None
                    failed = None
                except SampleError as error:
                    measured, failed = None, FailedSample(sample_id, type(error).__name__, str(error))
                if sample_id in finished or (failed is not None and not is_last_attempt):
                    continue
                journal.append(FinishedSample(measured, failed, window.read()))
                finished.add(sample_id)
                progress.advance()
        return proof, window

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

    def _merge_and_save(self, setting: KnobSetting) -> SettingFailure | None:
        """Main process only: wait for all shares, pool them, score and compute, save, remember."""
        parts = collect_parts(
            self.journals,
            setting.key,
            self.fingerprint,
            self.experiment_id,
            self.shares,
            self.config.worker_timeout,
            self.stop,
        )
        merged = merge_parts(parts, self.drawn.sample_ids)
        if merged.failure is not None:
            # Its journals stay: tried again by a later run, it goes on behind the samples that did run.
            self.ledger.mark_failed(setting.key, merged.failure)
            return merged.failure
        failure = failure_where_no_sample_ran(merged, self.config.max_config_retries + 1)
        if failure is not None:
            self.ledger.mark_failed(setting.key, failure)
        else:
            result = self._result(setting, merged)
            name = setting_file_name(self.task.name, setting, merged.samples)
            write_json_atomically(result, self.config.output_dir / name)
            self.ledger.mark_done(setting.key, name)
        remove_journals(self.journals, setting.key)
        return failure

    def _result(self, setting: KnobSetting, merged: MeasuredSetting) -> dict[str, Any]:
        """Score the whole run, then everything that follows from it."""
        answers = [answer_of(sample) for sample in merged.samples]
        scoring = self.metric.score(answers)
        accuracy = summarise_accuracy(answers, scoring, self.metric)
        summary = summarise(merged.samples, accuracy, len(merged.failures))
        blocks = self.model.num_total_blocks
        provenance = {**self.provenance, "experiment_ids": list(merged.experiment_ids)}
        return setting_result(setting, blocks, merged, scoring.scores, summary, self.drawn, provenance)

    def _variables(self) -> dict[str, Any]:
        """The experimental parameters as asked for; `max_new_tokens` as it came out."""
        config = self.config
        return {
            "num_samples": config.num_samples,
            "sample_by": config.sample_by,
            "seed": config.seed,
            "ids": list(config.ids) if config.ids is not None else None,
            "prompt_template": config.prompt_template,
            "dataset_revision": config.dataset_revision,
            "max_new_tokens": self.max_new_tokens,
            "num_runs_per_sample": config.num_runs_per_sample,
            "num_warmup_runs": config.num_warmup_runs,
            "precision": config.precision,
            "num_threads": config.num_threads,
            "batch_size": 1,
            "decoding": "greedy",
            "sampling_strategy": config.sampling_strategy,
            "importance_scores_file": str(config.importance_scores_file) if config.importance_scores_file else None,
            "random_weights": config.random_weights,
            "enable_memory_optimization": config.enable_memory_optimization,
            "first_block_top_k_rule": "block 0 keeps the model's own top-k",
        }

    def _caveats(self) -> list[str]:
        """What a reader must know before quoting the numbers."""
        caveats = []
        if self.config.random_weights:
            caveats.append("random weights: accuracy means nothing, routing may be more even than a trained model's")
        processes = self.processes_here
        if self.model.device.type == "cuda" and processes > torch.cuda.device_count():
            caveats.append(
                f"{processes} processes share {torch.cuda.device_count()} GPUs: latencies are not of one alone"
            )
        if self.model.device.type == "cpu" and processes > 1:
            caveats.append(f"{processes} processes share the CPU cores: latencies are not those of one alone")
        return caveats


def failure_where_no_sample_ran(merged: MeasuredSetting, attempts: int) -> SettingFailure | None:
    """A setting of which every sample failed is a failed setting, not a result without numbers."""
    if merged.samples or not merged.failures:
        return None
    first = merged.failures[0]
    reason = f"all {len(merged.failures)} samples failed, the first with: {first.reason}"
    return SettingFailure(first.error, reason, attempts)


def check_proof(proof: KnobProof, setting: KnobSetting, default_top_k: int) -> None:
    """Raises KnobDidNotAct where what ran is not what was asked for."""
    expected = tuple(default_top_k if block == 0 else setting.top_k for block in setting.active_blocks)
    if proof.blocks_run != setting.active_blocks or proof.blocks_run_decode != setting.active_blocks:
        raise KnobDidNotAct(f"{setting.key}: blocks {proof.blocks_run} ran instead of {setting.active_blocks}")
    if proof.experts_per_token != expected:
        raise KnobDidNotAct(f"{setting.key}: {proof.experts_per_token} experts a token instead of {expected}")
    if proof.cache_layers != setting.num_active_blocks:
        raise KnobDidNotAct(f"{setting.key}: the cache holds {proof.cache_layers} layers")


def _half_and_whole(top_k: int) -> tuple[int, ...]:
    return _unique(max(top_k // 2, 1), top_k)


def _unique(*values: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
