"""The columns of tables of settings and samples, and the names that stand beside those of knobs in other tables."""

from dataclasses import dataclass

from experiment_core_utils.records.json_record import Record
from experiment_core_utils.records.quantities import compute, energy, latency
from experiment_core_utils.records.quantities.quantity import quantities_of

# Columns of the knobs that have names of their own, in both tables.
KNOB_COLUMNS = ("tier", "vision_tokens_target", "top_k", "num_active_blocks")


@dataclass(frozen=True)
class SampleColumn:
    """A column of the table of samples."""

    name: str  #: with the unit, where it is not a count, a name, a share or a score
    source: str  #: key of `per_sample_results`; dotted for one inside an object; in brackets what is not a key of it
    kind: type[str] | type[int] | type[float] | type[bool]  #: of the values
    meaning: str = ""  #: the content of a cell; "" where `source` says all
    is_everywhere: bool = True  #: whether it is in every table; otherwise where a sample has the key


# Times that people read first, in both tables.
_FIRST_TIMES = ("T_total", "T_vision_total", "T_LLM_prefill", "T_LLM_decode", "T_first_token", "T_decode_per_token")


def _columns_of(*records: type[Record]) -> list[SampleColumn]:
    """The columns of the quantities of these records, those that people read first before the others."""
    tabulated = [quantity for quantity in quantities_of(*records).values() if quantity.in_table]
    return [
        SampleColumn(
            quantity.column, quantity.key, int if quantity.is_whole else float, is_everywhere=quantity.is_everywhere
        )
        for quantity in sorted(tabulated, key=lambda quantity: [*_FIRST_TIMES, quantity.key].index(quantity.key))
    ]


SAMPLE_COLUMNS = (
    SampleColumn("task", "(provenance)", str, "`task.name` of the provenance"),
    SampleColumn("setting", "(knobs)", str, "key of the setting, such as `tier-low_topk8_blocks16`"),
    *(SampleColumn(name, "(top level)", str if name == "tier" else int) for name in KNOB_COLUMNS),
    SampleColumn("sample_id", "sample_id", int),
    SampleColumn("image_id", "metadata.image_id", str),
    SampleColumn("question_type", "question_type", str),
    SampleColumn("question", "metadata.question", str),
    SampleColumn("pred", "pred", str),
    SampleColumn("answers", "metadata.answers", str, "`metadata.answers`, the reference answers, as a JSON list"),
    SampleColumn("accuracy", "accuracy", float),
    SampleColumn("parse_status", "parse_status", str),
    *_columns_of(latency.StageTimes, latency.SampleTimes),
    SampleColumn("num_runs", "runs", int, "how many there are in `runs`"),
    SampleColumn("num_outlier_runs", "outlier_runs", int, "how many there are in `outlier_runs`"),
    *_columns_of(energy.SampleEnergy),
    SampleColumn("energy_source", "energy_source", str),
    SampleColumn("target_crops", "target_crops", int),
    SampleColumn("actual_num_crops", "actual_num_crops", int),
    *_columns_of(latency.RequestTokens, latency.AnswerTokens),
    SampleColumn("output_ended", "output_ended", bool),
    *_columns_of(compute.SampleFlops),
    SampleColumn("accuracy_batch_size", "accuracy_batch_size", int),
    SampleColumn("prompt", "metadata.prompt", str),
)
SETTING_COLUMNS = (
    *KNOB_COLUMNS,
    "num_samples",
    "num_failed_samples",
    "accuracy",
    "accuracy_ci95_low",
    "accuracy_ci95_high",
    "selected_crops_mean",
    "actual_vision_tokens_mean",
)
_SUMMARISED = quantities_of(
    latency.StageTimes,
    latency.SampleTimes,
    latency.AnswerTokens,
    latency.RequestTokens,
    compute.SampleFlops,
    latency.ThinkingPart,
).values()
# Keys of `aggregate_stats`.
STAT_COLUMNS = tuple(f"{quantity.spread}_{figure}" for quantity in _SUMMARISED for figure in quantity.figures or ())
# Of the samples' median runs, beside those of all runs.
TYPICAL_COLUMNS = tuple(
    f"{quantity.spread}_{figure}_typical" for quantity in _SUMMARISED for figure in quantity.typical
)
# At the end of a row, so that the columns before them keep their places.
SCORING_COLUMNS = ("metric", "metric_best", "num_unparsed", "share_unparsed", "share_truncated", "share_failed")
ANSWER_COLUMNS = ("share_empty", "share_one_token")
STEADINESS_COLUMNS = ("share_outlier_runs",)
PROTOCOL_COLUMNS = ("share_discarded_runs", "protocol_version")
LATENCY_COLUMNS = ("num_latency_samples",)
# Keys of `open_loop`.
OPEN_LOOP_COLUMNS = ("request_rate", "achieved_rate", "most_under_way")
UTILISATION_COLUMNS = ("mfu_vision", "mfu_prefill", "mfu_decode", "mbu_decode")
# Columns by the keys of `energy.summary`.
ENERGY_COLUMNS = {
    "energy_vision_j": "vision_j",
    "energy_prefill_j": "prefill_j",
    "energy_decode_j": "decode_j",
    "energy_decode_j_per_token": "decode_j_per_token",
    "energy_end_to_end_j": "end_to_end_j",
    "energy_end_to_end_uncertainty_j": "end_to_end_uncertainty_j",
    "energy_end_to_end_idle_j": "end_to_end_idle_j",
    "energy_end_to_end_net_j": "end_to_end_net_j",
    "energy_j_per_output_token": "j_per_output_token",
    "energy_closure_residual_share": "closure_residual_share",
    "energy_source_ratio": "source_ratio",
}
# The same, or where only passes were measured those of `energy.passes`.
ENERGY_SOURCE_COLUMNS = {"energy_source": "source", "energy_kind": "kind"}
# The same, after all others.
CORRECT_ANSWER_COLUMNS = {
    f"energy_j_per_correct_answer{ending}": f"j_per_correct_answer{ending}"
    for ending in ("", "_ci95_low", "_ci95_high")
}
# Columns by the keys of `energy.passes`.
PASSES_COLUMNS = {
    f"energy_passes_{key}": key
    for key in (
        "j_per_request",
        "j_per_request_ci95_low",
        "j_per_request_ci95_high",
        "net_j_per_request",
        "j_per_output_token",
        "j_per_correct_answer",
        "j_per_correct_answer_ci95_low",
        "j_per_correct_answer_ci95_high",
        "num_passes",
        "num_requests",
    )
}
FIXED_LENGTH_COLUMNS = {"fixed_length_tokens": "num_tokens", "T_fixed_length_mean_ms": "mean"}
REFERENCE_COLUMNS = ("is_reference", "in_grid")

# Columns that identify a row of the CSV of settings among rows of other tables. Names beside what they are from.
IDENTITY_COLUMNS = {
    "task": "`provenance.task.name`",
    "setting": "key of the setting, such as `tier-low_topk8_blocks16`",
    "model_name": "`provenance.model.name`",
    "precision": "`provenance.model.dtype`",
    "device": "`provenance.hardware`: `gpu_name`, on the CPU `device`",
    "execution": "`provenance.model.execution`",
}
ORIGIN_COLUMNS = {
    "experiment_id": "`provenance.experiment_id`",
    "file": "name of the JSON file of the setting",
}
RATE_COLUMNS = {
    "tokens_per_second": "output tokens / mean time of a sample's runs, over the measured samples, one at a time; "
    "absent with `--request_rate`",
    "requests_per_second": "measured samples / mean time of a sample's runs, one request at a time; absent with "
    "`--request_rate`",
    **{
        f"counted_{part}_bytes": f"`memory.counted_{part}_bytes`"
        for part in ("memory", "weights", "kv_cache", "activation")
    },
    "peak_memory_bytes": "`memory.peak_memory_bytes`",
    "process_rss_bytes": "`memory.process_rss_bytes`",
}
# Column of the mean total time over that of the model as it is, on the samples that both have.
SHARE_OF_REFERENCE = "T_total_share_of_reference"
# Columns before the origin, beside what they are from.
FURTHER_COLUMNS = {
    "vision": "the requested picture: tier, token target or `own`",
    "num_total_blocks": "the same key",
    "target_vision_tokens_mean": "the same key",
    "pooled_image_features_mean": "`aggregate_stats`",
    SHARE_OF_REFERENCE: "mean total time over that of the reference setting, on the samples that both have",
}
# Whole numbers, beside counts (`num_…`), bytes and levels of knobs that are.
WHOLE_COLUMNS = ("fixed_length_tokens", "protocol_version", "most_under_way")
# Columns of text, and those of yes and no.
TEXT_COLUMNS = (*IDENTITY_COLUMNS, *ORIGIN_COLUMNS, "tier", "metric", *ENERGY_SOURCE_COLUMNS)
# What people read first; the other columns follow in the order of `settings_frame`, the origin at the end.
READ_FIRST = (
    *IDENTITY_COLUMNS,
    *SETTING_COLUMNS[: SETTING_COLUMNS.index("accuracy_ci95_high") + 1],
    "metric",
    "T_total_mean_ms",
    "T_total_p95_ms",
    *(f"{key}_mean_ms" for key in _FIRST_TIMES[1:]),
    *RATE_COLUMNS,
    "energy_passes_j_per_request",
    "energy_end_to_end_j",
    "energy_j_per_output_token",
)
# Keys beside the levels of knobs in what analyses read and write; of a line also those that begin with SLOPE_KEYS.
ANALYSIS_KEYS = frozenset(
    "key sweep num_score_samples num_energy_samples energy_mean_j flops_mean request_flops pictures crops text_tokens "
    "vision_tokens stage driver r2 residual_std_ms num_points num_clusters x_min x_max reason".split()
)
SLOPE_KEYS = ("slope_ms", "intercept_ms")
# Headings beside the titles of knobs in the table that closes a run.
HEADINGS = frozenset(
    (
        "crops", "tokens", "accuracy [95 %]", "samples", "vision ms", "prefill ms", "first token ms", "decode ms",
        "total ms", "of reference", "p95 ms", "ms/token", "answered/s", "under way", "GFLOP", "MB", "J", "failed",
        "unparsed", "cut", "empty", "one token", "search", "front by mean",
    )
)  # fmt: skip
# All columns of both tables.
TABLE_COLUMNS = frozenset(
    (
        *(column.name for column in SAMPLE_COLUMNS), *SETTING_COLUMNS, *STAT_COLUMNS, *TYPICAL_COLUMNS,
        *(f"{name}_ms" for name in (*STAT_COLUMNS, *TYPICAL_COLUMNS)), *SCORING_COLUMNS, *ANSWER_COLUMNS,
        *STEADINESS_COLUMNS, *PROTOCOL_COLUMNS, *LATENCY_COLUMNS, *OPEN_LOOP_COLUMNS, *UTILISATION_COLUMNS,
        *ENERGY_COLUMNS, *ENERGY_SOURCE_COLUMNS, "energy_sample_j_mean", *CORRECT_ANSWER_COLUMNS, *PASSES_COLUMNS,
        *FIXED_LENGTH_COLUMNS, *REFERENCE_COLUMNS, *FURTHER_COLUMNS, *READ_FIRST, *ORIGIN_COLUMNS,
    )
)  # fmt: skip
