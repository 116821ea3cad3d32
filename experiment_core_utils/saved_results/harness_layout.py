"""Results in the layouts of lm-eval and of lmms-eval, so that what reads their files reads these.

Names of files, keys, hashes and standard errors are those of `EvaluationTracker` and `evaluate` in lm-eval 0.4.13 and
lmms-eval 0.7.3. What these have no key for is under `knobprof`.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.records.sample_result import QUANTITIES, SampleResult
from experiment_core_utils.records.setting_result import SettingResult, setting_key
from experiment_core_utils.tasks.answers import scored_text
from experiment_core_utils.tasks.registry import scored_by

Harness = Literal["lm-eval", "lmms-eval"]
OWN_KEY = "knobprof"
# Under it the SHA-256 of the task's file of samples, beside the digest of the result that both are of.
SAMPLES_DIGEST = "samples_sha256"
# What lm-eval and lmms-eval call a metric, where that is not its name here.
_NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("em", "em_lenient"), ("exact_match", "exact_match")),
        **dict.fromkeys(("gsm8k_boxed", "gsm8k_flexible"), ("exact_match", "exact_match")),
        **dict.fromkeys(("mc", "mc_molmo"), ("acc", "exact_match")),
        **dict.fromkeys(("mmmu", "mmmu_score"), ("acc", "mmmu_acc")),
        **dict.fromkeys(("vqa_score", "vqa_score_molmo", "vqa_v2"), ("exact_match", "exact_match")),
        **dict.fromkeys(("docvqa_anls", "ansl_em"), ("anls", "anls")),
        "chartqa_relaxed": ("relaxed_accuracy", "relaxed_overall"),
        "cider_score": ("cider", "coco_CIDEr"),
    }
)
_FILTERS: Mapping[str, str] = MappingProxyType({"gsm8k_flexible": "flexible-extract"})
_NO_FOLDER_NAME = re.compile(r"[\"<>:/|\\?*\[\]]+")
# Figures of `aggregate_stats` that are exported, by their names there.
_FIGURES = ("n", "mean", "std", "p50", "p95", "p99")


def metric_key(metric: str, to: Harness) -> tuple[str, str]:
    """Name and filter of a metric in a harness: (`exact_match`, `none`), which is the key `exact_match,none`.

    One of a task of lm-eval or lmms-eval is called `<task>.<metric>` here.
    """
    name = metric.rpartition(".")[2] if metric.startswith(("lm_eval_", "lmms_eval_")) else metric
    return _NAMES.get(name, (name, name))[to == "lmms-eval"], _FILTERS.get(metric, "none")


def folder_name(model: str, to: Harness) -> str:
    """`sanitize_model_name` of a harness; lmms-eval takes the last two parts of a path."""
    parts = model.split("/")
    return _NO_FOLDER_NAME.sub("__", "/".join(parts[-2:]) if to == "lmms-eval" else model)


def write_setting(results: Sequence[SettingResult], to: Harness, verdict: Mapping[str, Any], output: Path) -> Path:
    """Write a setting's results of one or several tasks into a folder of their own in `output`, which is returned.

    Args:
        verdict: what is known of the whole run, beside each task's own figures.

    Raises:
        ConfigurationError: log-probabilities were scored, which have another layout.
        ResultsNotSaved: the disk does not take a file.
    """
    if scored := sorted({result.metric for result in results if scored_by(result.metric) is not None}):
        raise ConfigurationError(
            f"results of {', '.join(scored)} are of log-probabilities, whose layout in {to} is not written; export "
            "runs of generated answers"
        )
    model = f"{results[0].provenance.model.name}/{setting_key(results[0])}"
    folder = output / folder_name(model, to)
    folder.mkdir(parents=True, exist_ok=True)
    # When the last of them was measured, in UTC and without a zone; now where that is absent.
    stamps = [result.provenance.timestamp for result in results]
    dates = [datetime.fromisoformat(stamp) for stamp in stamps if stamp is not None]
    date = max(dates, default=datetime.now(UTC)).astimezone(UTC).replace(tzinfo=None)
    rows = {result.provenance.task.name: sample_rows(result, to) for result in results}
    samples = {task: "".join(f"{_json(row)}\n" for row in rows_of_task) for task, rows_of_task in rows.items()}
    own = {
        task: {**verdict, **own_content(result), SAMPLES_DIGEST: _sha256(samples[task])}
        for task, result in zip(rows, results, strict=True)
    }
    content = _results_content(results, to, rows, model, date) | {OWN_KEY: own}
    stamp = date.strftime("%Y%m%d_%H%M%S") if to == "lmms-eval" else date.isoformat().replace(":", "-")
    for task, text in samples.items():
        name = f"{stamp}_samples_{task}.jsonl" if to == "lmms-eval" else f"samples_{task}_{stamp}.jsonl"
        write_text_atomically(text, folder / name)
    # Last, so that a folder with it is whole.
    name = f"{stamp}_results.json" if to == "lmms-eval" else f"results_{stamp}.json"
    write_text_atomically(_json(content, indent=2), folder / name)
    return folder


def own_content(result: SettingResult) -> dict[str, Any]:
    """What the harnesses do not measure: the setting, and its stages, joules and FLOPs with their intervals.

    A quantity that was not measured is absent.
    """
    stats = result.aggregate_stats
    quantities = {
        key: {"unit": quantity.unit}
        | {name: stats[f"{quantity.spread}_{name}"] for name in _FIGURES if f"{quantity.spread}_{name}" in stats}
        | {"ci95": [stats.get(f"{quantity.spread}_ci95_{end}") for end in ("low", "high")]}
        for key, quantity in QUANTITIES.items()
        if stats.get(f"{quantity.spread}_mean") is not None
    }
    names = ("knobs", "is_reference", "metric", "metric_best", "accuracy", "accuracy_ci95", "num_failed_samples")
    content = result.content()
    return {
        "setting": setting_key(result),
        **{name: content[name] for name in names},
        "quantities": quantities,
        **{name: content[name] for name in ("energy", "memory", "fingerprint", "digest") if name in content},
        "experiment_id": result.provenance.experiment_id,
        "run_uid": result.provenance.run_uid,
        "caveats": result.provenance.caveats,
    }


def sample_rows(result: SettingResult, to: Harness) -> list[dict[str, Any]]:
    """A row for each sample that ran, as `samples_*.jsonl` has it; the figures of the sample are under `knobprof`."""
    return [_sample_row(result, sample, to) for sample in result.per_sample_results]


def _sample_row(result: SettingResult, sample: SampleResult, to: Harness) -> dict[str, Any]:
    metric, kept_by = metric_key(result.metric, to)
    metadata = sample.metadata
    doc = {
        "question": metadata.question,
        "answers": metadata.answers,
        "options": metadata.options,
        "answer_index": metadata.answer_index,
        "image_id": metadata.image_id,
        "question_type": sample.question_type,
    }
    prompt = metadata.question if metadata.prompt is None else metadata.prompt
    target = metadata.answers[0] if len(metadata.answers) == 1 else str(metadata.answers)
    scored = scored_text(sample.pred, sample.answer)
    row: dict[str, Any] = {"doc_id": sample.sample_id, "target": target, "doc_hash": _sha256(_json(doc, indent=2))}
    figures = {
        OWN_KEY: {key: getattr(sample, key) for key in QUANTITIES}
        | {"parse_status": sample.parse_status, "score_details": sample.score_details}
    }
    if to == "lmms-eval":
        counts = {"input_tokens": sample.prompt_tokens, "output_tokens": sample.output_tokens}
        given_counts = {name: value for name, value in counts.items() if value is not None}
        row |= {"input": prompt, "filtered_resps": scored, "token_counts": [given_counts]}
        return row | ({"resps": [sample.pred]} if scored != sample.pred else {}) | {metric: sample.accuracy} | figures
    return {
        **row,
        "doc": doc,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": _generation_of(result)}},
        "resps": [[sample.pred]],
        "filtered_resps": [scored],
        "filter": kept_by,
        "metrics": [metric],
        "prompt_hash": _sha256(prompt),
        "target_hash": _sha256(target),
        metric: sample.accuracy,
        **figures,
    }


def _generation_of(result: SettingResult) -> dict[str, Any]:
    made = result.provenance
    stops = made.model.decoding.stop if made.model.decoding is not None else None
    limit = made.experimental_variables.max_new_tokens or made.task.max_new_tokens
    return {"until": stops or [], "max_gen_toks": limit, "do_sample": False}


def _figures(result: SettingResult, to: Harness) -> dict[str, Any]:
    """The task's line in `results`; a metric without a value is absent."""
    name, kept_by = metric_key(result.metric, to)
    figures: dict[str, Any] = {"alias": result.provenance.task.name}
    if to == "lm-eval":
        figures["sample_len"] = result.num_samples
    if result.accuracy is not None:
        std = result.accuracy_std
        # `mean_stderr`: the standard deviation by n - 1, over the root of n.
        error = "N/A" if std is None else std / math.sqrt(result.num_samples)
        figures |= {f"{name},{kept_by}": result.accuracy, f"{name}_stderr,{kept_by}": error}
        if to == "lmms-eval":
            figures |= {f"{name}_stderr_clt,{kept_by}": error, f"{name}_stderr_clustered,{kept_by}": "N/A"}
    return figures


def _config_of(result: SettingResult, to: Harness) -> dict[str, Any]:
    made, (metric, _) = result.provenance, metric_key(result.metric, to)
    return {
        "task": made.task.name,
        "test_split": made.task.split,
        "output_type": "generate_until",
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": _generation_of(result),
        "repeats": 1,
        "num_fewshot": 0,
        "metadata": {"source": made.task.source, "prompt_form": made.task.prompt_form},
    }


def _results_content(
    results: Sequence[SettingResult],
    to: Harness,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    model: str,
    date: datetime,
) -> dict[str, Any]:
    by_task = {result.provenance.task.name: result for result in results}
    made, source = results[0].provenance, results[0].provenance.task.source or {}
    system, decoding = made.experimental_variables.system_prompt, made.model.decoding
    knobs = (f"{name}={value}" for name, value in results[0].knobs.items())
    return {
        "results": {task: _figures(result, to) for task, result in by_task.items()},
        "group_subtasks": {task: [] for task in by_task},
        "configs": {task: _config_of(result, to) for task, result in by_task.items()},
        "versions": {task: source.get("revision") or "N/A" for task in by_task},
        "n-shot": dict.fromkeys(by_task, 0),
        "higher_is_better": {task: {metric_key(result.metric, to)[0]: True} for task, result in by_task.items()},
        "n-samples": {
            task: {"original": (result.sampling or {}).get("num_in_split"), "effective": result.num_samples}
            for task, result in by_task.items()
        },
        "config": {
            "model": OWN_KEY,
            "model_args": ",".join([f"pretrained={made.model.name}", *knobs]),
            "model_num_parameters": made.model.total_parameters,
            "model_dtype": made.model.dtype,
            "model_revision": made.model.revision,
            "batch_size": results[0].knobs.get("batch_size", 1),
            "device": made.hardware.device,
            "gen_kwargs": None,
        },
        "git_hash": made.git_commit,
        "date": date.strftime("%Y%m%d_%H%M%S") if to == "lmms-eval" else date.replace(tzinfo=UTC).timestamp(),
        "transformers_version": made.versions.get("transformers"),
        "task_hashes": {task: _task_hash(rows_of_task, to) for task, rows_of_task in rows.items()},
        "model_source": OWN_KEY,
        "model_name": model,
        "model_name_sanitized": folder_name(model, to),
        "system_instruction": system,
        "system_instruction_sha": None if system is None else _sha256(system),
        "fewshot_as_multiturn": False,
        "chat_template": None,
        "chat_template_sha": None if decoding is None else decoding.chat_template_sha256,
        "total_evaluation_time_seconds": None,
    }


def _task_hash(rows: Sequence[Mapping[str, Any]], to: Harness) -> str:
    if to == "lmms-eval":
        return _sha256("".join(f"sample_{place}{row['doc_hash']}" for place, row in enumerate(rows)))
    return _sha256("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))


def _json(content: Any, indent: int | None = None) -> str:
    return json.dumps(content, indent=indent, ensure_ascii=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
