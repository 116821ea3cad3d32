"""The table of samples: a flat row for each sample that ran, columns in fixed order."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from experiment_core_utils.primitives.csv_cells import Cell, csv_of_rows
from experiment_core_utils.setting_result import SampleResult, SettingResult


@dataclass(frozen=True)
class SampleColumn:
    """A column of the table of samples.

    Attributes:
        name: with the unit, where it is not a count, a name, a share or a score.
        source: key of `per_sample_results`; dotted for one inside an object; in brackets what is no key of it.
        kind: of the values.
        meaning: what stands in a cell; "" where `source` says all.
    """

    name: str
    source: str
    kind: type[str] | type[int] | type[float] | type[bool]
    meaning: str = ""


SAMPLE_COLUMNS = (
    SampleColumn("task", "(provenance)", str, "`task.name` of the provenance"),
    SampleColumn("setting", "(knobs)", str, "key of the setting, such as `tier-low_topk8_blocks16`"),
    SampleColumn("tier", "(top level)", str),
    SampleColumn("vision_tokens_target", "(top level)", int),
    SampleColumn("top_k", "top_k", int),
    SampleColumn("num_active_blocks", "num_active_blocks", int),
    SampleColumn("sample_id", "sample_id", int),
    SampleColumn("image_id", "metadata.image_id", str),
    SampleColumn("question_type", "question_type", str),
    SampleColumn("target_crops", "target_crops", int),
    SampleColumn("actual_num_crops", "actual_num_crops", int),
    SampleColumn("pooled_image_features", "pooled_image_features", int),
    SampleColumn("actual_vision_tokens", "actual_vision_tokens", int),
    SampleColumn("image_marker_tokens", "image_marker_tokens", int),
    SampleColumn("input_text_tokens", "input_text_tokens", int),
    SampleColumn("prompt_tokens", "prompt_tokens", int),
    SampleColumn("output_tokens", "output_tokens", int),
    SampleColumn("output_ended", "output_ended", bool),
    SampleColumn("accuracy", "accuracy", float),
    SampleColumn("parse_status", "parse_status", str),
    SampleColumn("T_vision_total_ms", "T_vision_total", float),
    SampleColumn("T_LLM_prefill_ms", "T_LLM_prefill", float),
    SampleColumn("T_LLM_decode_ms", "T_LLM_decode", float),
    SampleColumn("T_total_ms", "T_total", float),
    SampleColumn("T_decode_per_token_ms", "T_decode_per_token", float),
    SampleColumn("T_first_token_ms", "T_first_token", float),
    SampleColumn("T_preprocess_ms", "T_preprocess", float),
    SampleColumn("T_transfer_ms", "T_transfer", float),
    SampleColumn("num_runs", "runs", int, "how many there are in `runs`"),
    SampleColumn("num_outlier_runs", "outlier_runs", int, "how many there are in `outlier_runs`"),
    SampleColumn("vision_flops", "vision_flops", float),
    SampleColumn("prefill_flops", "prefill_flops", float),
    SampleColumn("decode_flops_per_token", "decode_flops_per_token", float),
    SampleColumn("energy_j", "energy_j", float),
    SampleColumn("energy_source", "energy_source", str),
    SampleColumn("accuracy_batch_size", "accuracy_batch_size", int),
    SampleColumn("question", "metadata.question", str),
    SampleColumn("pred", "pred", str),
)


_IN_NO_CSV = re.compile("[\0\ud800-\udfff]")


def sample_rows(result: SettingResult, setting_key: str) -> Iterator[dict[str, Cell]]:
    """The rows of one setting's result, by column; absent is None."""
    of_setting = {
        "task": result.provenance.task.name,
        "setting": setting_key,
        "tier": result.tier,
        "vision_tokens_target": result.vision_tokens_target,
    }
    for sample in result.per_sample_results:
        yield of_setting | {each.name: _value(sample, each) for each in SAMPLE_COLUMNS if each.name not in of_setting}


def samples_csv_text(rows: Iterable[Mapping[str, Cell]]) -> str:
    """The CSV of these rows; a character that no CSV file can hold becomes U+FFFD.

    Raises:
        ResultsError: a number that is not finite.
    """
    names = [column.name for column in SAMPLE_COLUMNS]
    return csv_of_rows(({name: _writable(row[name]) for name in names} for row in rows), names)


def _value(sample: SampleResult, column: SampleColumn) -> Cell:
    value: Any = attrgetter(column.source)(sample)
    return len(value) if isinstance(value, list) else value


def _writable(cell: Cell) -> Cell:
    return _IN_NO_CSV.sub("\ufffd", cell) if isinstance(cell, str) else cell
