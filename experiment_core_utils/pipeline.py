"""The letters in order: from a configuration to one result file for each setting of the knobs, and a CSV of all."""

import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import generate_unique_id, processes_on_this_machine, setup_distributed
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
from experiment_core_utils.k_results_aggregation import collect_parts, merge_parts, remove_part, save_part
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
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct, SampleError, SettingError
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import (
    FailedSample,
    KnobProof,
    MeasuredSample,
    MeasuredSetting,
    RequestShape,
    SettingFailure,
)
from experiment_core_utils.primitives.strategies import plan_settings
from experiment_core_utils.progress import Ledger
from experiment_core_utils.progress_bar import ProgressBar
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiment_core_utils.tasks.sampling import SampledDataset

PARTS_FOLDER = ".parts"
WORKER_TIMEOUT_S = 3600.0


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
    accelerator = setup_distributed(config)
    fingerprint = fingerprint_of(config, source, task, drawn.sample_ids, accelerator)
    ledger = Ledger(config.output_dir, fingerprint)
    due = [setting for setting in settings if ledger.result(setting.key) is None]
    for setting in due:
        remove_part(config.output_dir / PARTS_FOLDER, setting.key, accelerator.process_index)
    accelerator.wait_for_everyone()
    experiment_id, failed = None, {}
    if due:
        experiment_id = generate_unique_id(accelerator)
        caveats = [caveat] if (caveat := few_samples_sentence(len(settings), len(drawn))) is not None else []
        run = ProfilingRun(config, source, task, accelerator, drawn, fingerprint, ledger, experiment_id, caveats)
        failed = run.measure_all(due)
    if not accelerator.is_main_process:
        return RunReport(experiment_id, False, (), failed, (), config.output_dir, None)
    results = tuple(result for setting in settings if (result := ledger.result(setting.key)) is not None)
    csv_path = config.output_dir / f"{task.name.replace('_', '-')}_settings.csv" if results else None
    if csv_path is not None:
        write_settings_csv(results, csv_path)
    return RunReport(experiment_id, True, results, failed, left_out_by(config, settings), config.output_dir, csv_path)


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
        accelerator.num_processes,
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
        device = choose_device(config.device, accelerator.local_process_index)
        set_cpu_threads(config.num_threads, processes_on_this_machine())
        self.model = load_staged_model(config, source, device)
        self.maker = RequestMaker(self.model, task)
        self.own_ids = share_of_process(drawn.sample_ids, accelerator.process_index, accelerator.num_processes)
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
        """Measure, merge and save each setting before the next; returns those that failed."""
        failed = {}
        with ProgressBar(len(settings), len(self.own_ids), shown=self.accelerator.is_main_process) as bar:
            for setting in settings:
                bar.start(setting.key)
                part = self._measure_with_retries(setting, bar)
                save_part(part, self.config.output_dir / PARTS_FOLDER)
                if self.accelerator.is_main_process:
                    part = self._merge_and_save(setting)
                if part.failure is not None:
                    failed[setting.key] = part.failure
                if self.config.enable_memory_optimization:
                    release_cached_memory(self.model.device)
        return failed

    def _measure_with_retries(self, setting: KnobSetting, bar: ProgressBar) -> MeasuredSetting:
        attempts = self.config.max_config_retries + 1
        failure = None
        for attempt in range(1, attempts + 1):
            try:
                return self._measure(setting, bar)
            except KnobDidNotAct as error:
                failure = SettingFailure(type(error).__name__, str(error), attempt)
                break
            except SettingError as error:
                failure = SettingFailure(type(error).__name__, str(error), attempt)
                release_cached_memory(self.model.device)
                if attempt < attempts:
                    time.sleep(self.config.config_retry_delay)
        return self._part(setting, (), (), None, None, failure)

    def _measure(self, setting: KnobSetting, bar: ProgressBar) -> MeasuredSetting:
        """Warm up and prove the knobs on the first sample that can be read, then run every sample."""
        self.model.apply(setting)
        samples: list[MeasuredSample] = []
        failures: list[FailedSample] = []
        proof: KnobProof | None = None
        with out_of_memory_named(), MemoryWindow(self.model.device) as window:
            for sample_id in self.own_ids:
                try:
                    sample = self.task[sample_id]
                    if proof is None:
                        proof = self._warm_up(setting, sample)
                    samples.append(self._measure_sample(setting, sample))
                except SampleError as error:
                    failures.append(FailedSample(sample_id, type(error).__name__, str(error)))
                bar.advance()
        return self._part(setting, tuple(samples), tuple(failures), proof, window, None)

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

    def _part(
        self,
        setting: KnobSetting,
        samples: tuple[MeasuredSample, ...],
        failures: tuple[FailedSample, ...],
        proof: KnobProof | None,
        window: MemoryWindow | None,
        failure: SettingFailure | None,
    ) -> MeasuredSetting:
        return MeasuredSetting(
            key=setting.key,
            fingerprint=self.fingerprint,
            rank=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
            samples=samples,
            failures=failures,
            proof=proof,
            memory=window.reading if window is not None else None,
            failure=failure,
        )

    def _merge_and_save(self, setting: KnobSetting) -> MeasuredSetting:
        """Main process only: wait for all parts, pool them, score and compute, save, remember."""
        folder = self.config.output_dir / PARTS_FOLDER
        processes = self.accelerator.num_processes
        parts = collect_parts(folder, setting.key, self.fingerprint, processes, WORKER_TIMEOUT_S)
        merged = failed_where_no_sample_ran(merge_parts(parts, self.drawn.sample_ids))
        if merged.failure is not None:
            self.ledger.mark_failed(setting.key, merged.failure)
        else:
            result = self._result(setting, merged)
            name = setting_file_name(self.task.name, setting, merged.samples)
            write_json_atomically(result, self.config.output_dir / name)
            self.ledger.mark_done(setting.key, name)
        for rank in range(processes):
            remove_part(folder, setting.key, rank)
        return merged

    def _result(self, setting: KnobSetting, merged: MeasuredSetting) -> dict[str, Any]:
        """Score the whole run, then everything that follows from it."""
        answers = [answer_of(sample) for sample in merged.samples]
        scoring = self.metric.score(answers)
        accuracy = summarise_accuracy(answers, scoring, self.metric)
        summary = summarise(merged.samples, accuracy, len(merged.failures))
        blocks = self.model.num_total_blocks
        return setting_result(setting, blocks, merged, scoring.scores, summary, self.drawn, self.provenance)

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
        processes = processes_on_this_machine()
        if self.model.device.type == "cuda" and processes > torch.cuda.device_count():
            caveats.append(
                f"{processes} processes share {torch.cuda.device_count()} GPUs: latencies are not of one alone"
            )
        if self.model.device.type == "cpu" and self.accelerator.num_processes > 1:
            caveats.append(
                f"{self.accelerator.num_processes} processes share the CPU cores: latencies are not those of one alone"
            )
        return caveats


def failed_where_no_sample_ran(merged: MeasuredSetting) -> MeasuredSetting:
    """A setting of which every sample failed is a failed setting, not a result without numbers."""
    if merged.samples or not merged.failures:
        return merged
    first = merged.failures[0]
    reason = f"all {len(merged.failures)} samples failed, the first with: {first.reason}"
    return replace(merged, failure=SettingFailure(first.error, reason, attempts=1))


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
