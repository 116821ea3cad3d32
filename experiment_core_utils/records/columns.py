"""The columns of tables of settings and samples, and the names that stand beside those of knobs in other tables."""

from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.records.json_record import Record
from experiment_core_utils.records.quantities import compute, energy, latency
from experiment_core_utils.records.quantities.quantity import quantities_of

# Columns of the knobs that have names of their own, in both tables.
KNOB_COLUMNS = ("tier", "vision_tokens_target", "vision_fraction", "top_k", "num_active_blocks")
_COLUMN_KINDS: dict[str, type[str] | type[float]] = {"tier": str, "vision_fraction": float}


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
    *(
        SampleColumn(name, "(top level)", _COLUMN_KINDS.get(name, int), is_everywhere=name != "vision_fraction")
        for name in KNOB_COLUMNS
    ),
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
_SUMMARISED = quantities_of(
    latency.StageTimes,
    latency.SampleTimes,
    latency.AnswerTokens,
    latency.RequestTokens,
    compute.SampleFlops,
    latency.ThinkingPart,
).values()


@dataclass(frozen=True)
class SettingColumn:
    """A column of the table of settings."""

    name: str  #: with the unit of a time or an energy
    source: str = ""  #: dotted key of a result, of several with | between them the first that is there; "" if computed
    kind: type[str] | type[int] | type[float] | type[bool] = float  #: of the values
    meaning: str = ""  #: the content of a cell; "" where `source` says all
    left_out: Literal["never", "if absent", "if 0"] = "if absent"  #: where it is so in every row

    @property
    def origin(self) -> str:
        """Where a cell is from, for the schema page."""
        if self.meaning or self.source != self.name:
            return self.meaning or ", else ".join(f"`{key}`" for key in self.source.split("|"))
        return "the same key" + ("; left out where it is 0 in every row" if self.left_out == "if 0" else "")


def _of(above: str, before: str, *keys: str) -> list[SettingColumn]:
    """Columns of keys of one object of a result, with these letters before each."""
    return [SettingColumn(f"{before}{key}", f"{above}.{key}" if above else key) for key in keys]


def _figure(spread: str) -> SettingColumn:
    """The column of a key of `aggregate_stats`."""
    return SettingColumn(f"{spread}_ms" if spread.startswith("T_") else spread, f"aggregate_stats.{spread}")


_STATS = [f"{quantity.spread}_{figure}" for quantity in _SUMMARISED for figure in quantity.figures or ()]
_FIRST_STATS = ["T_total_mean", "T_total_p95", *(f"{key}_mean" for key in _FIRST_TIMES[1:])]
_TYPICAL = [f"{quantity.spread}_{figure}_typical" for quantity in _SUMMARISED for figure in quantity.typical]
_CORRECT = [f"j_per_correct_answer{ending}" for ending in ("", "_ci95_low", "_ci95_high")]
# Columns that identify a row among rows of other tables.
IDENTITY_COLUMNS = (
    SettingColumn("task", "provenance.task.name", str),
    SettingColumn("setting", "", str, "key of the setting, such as `tier-low_topk8_blocks16`"),
    SettingColumn("model_name", "provenance.model.name", str),
    SettingColumn("precision", "provenance.model.dtype", str),
    SettingColumn("device", "provenance.hardware.gpu_name|provenance.hardware.device", str),
    SettingColumn("execution", "provenance.model.execution", str),
)
# Column of the mean total time over that of the model as it is, on the samples that both have.
SHARE_OF_REFERENCE = "T_total_share_of_reference"
# In the order in which people read them; those of further knobs are before `LAST_COLUMNS`.
SETTING_COLUMNS = (
    *IDENTITY_COLUMNS,
    SettingColumn("tier", "tier", str, left_out="never"),
    SettingColumn("vision_tokens_target", "vision_tokens_target"),
    SettingColumn("vision_fraction", "vision_fraction"),
    *(
        SettingColumn(name, name, left_out="never")
        for name in ("top_k", "num_active_blocks", "num_samples", "num_failed_samples", "accuracy")
    ),
    SettingColumn("accuracy_ci95_low", meaning="first number of `accuracy_ci95`", left_out="never"),
    SettingColumn("accuracy_ci95_high", meaning="second number of `accuracy_ci95`", left_out="never"),
    SettingColumn("metric", "metric", str),
    *map(_figure, _FIRST_STATS),
    SettingColumn(
        "tokens_per_second",
        meaning="output tokens of a batch / mean time of a sample's runs, over the measured samples, one batch at a "
        "time; absent with `--request_rate`",
    ),
    SettingColumn(
        "requests_per_second",
        meaning="`batch_size` x measured samples / mean time of a sample's runs, one batch at a time; absent with "
        "`--request_rate`",
    ),
    *_of("memory", "", *(f"counted_{part}_bytes" for part in ("memory", "weights", "kv_cache", "activation"))),
    *_of("memory", "", "peak_memory_bytes", "process_rss_bytes"),
    *_of("energy.passes", "energy_passes_", "j_per_request"),
    *_of("energy.summary", "energy_", "end_to_end_j", "j_per_output_token"),
    SettingColumn("selected_crops_mean", "selected_crops_mean", left_out="never"),
    SettingColumn("actual_vision_tokens_mean", "actual_vision_tokens_mean", left_out="never"),
    *(_figure(spread) for spread in _STATS if spread not in _FIRST_STATS),
    SettingColumn("fixed_length_tokens", "T_fixed_length.num_tokens", int),
    SettingColumn("T_fixed_length_mean_ms", "T_fixed_length.mean"),
    *_of("", "", "metric_best", "num_unparsed", "share_unparsed", "share_truncated", "share_failed"),
    SettingColumn("share_empty", "share_empty", left_out="if 0"),
    SettingColumn("share_one_token", "share_one_token", left_out="if 0"),
    *_of("", "", "num_latency_samples", "share_outlier_runs"),
    *_of("energy.summary", "energy_", "vision_j", "prefill_j", "decode_j", "decode_j_per_token"),
    *_of("energy.summary", "energy_", *(f"end_to_end_{kind}_j" for kind in ("uncertainty", "idle", "net"))),
    *_of("energy.summary", "energy_", "closure_residual_share", "source_ratio"),
    SettingColumn("energy_source", "energy.summary.source|energy.passes.source", str),
    SettingColumn("energy_kind", "energy.summary.kind|energy.passes.kind", str),
    SettingColumn("energy_sample_j_mean", "aggregate_stats.energy_j_mean"),
    *_of("hardware_utilisation", "", "mfu_vision", "mfu_prefill", "mfu_decode", "mbu_decode"),
    *_of("energy.summary", "energy_", *_CORRECT),
    *_of("energy.passes", "energy_passes_", "j_per_request_ci95_low", "j_per_request_ci95_high", "net_j_per_request"),
    *_of("energy.passes", "energy_passes_", "j_per_output_token", *_CORRECT, "num_passes", "num_requests"),
    SettingColumn("is_reference", "is_reference", bool),
    SettingColumn("in_grid", "in_grid", bool),
    *map(_figure, _TYPICAL),
    SettingColumn("share_discarded_runs", "share_discarded_runs"),
    SettingColumn("protocol_version", "protocol_version", int),
    *_of("open_loop", "", "request_rate", "achieved_rate"),
    SettingColumn("most_under_way", "open_loop.most_under_way", int),
)
LAST_COLUMNS = (
    SettingColumn("vision", meaning="the requested picture: fraction, tier, token target or `own`"),
    *_of("", "", "num_total_blocks", "target_vision_tokens_mean"),
    _figure("pooled_image_features_mean"),
    SettingColumn(
        SHARE_OF_REFERENCE,
        meaning="mean total time over that of the reference setting, on the samples that both have",
    ),
    SettingColumn("experiment_id", "provenance.experiment_id", str),
    SettingColumn("file", "", str, "name of the JSON file of the setting"),
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
        "total ms", "of reference", "p95 ms", "ms/token", "requests/s", "tokens/s", "answered/s", "under way",
        "GFLOP", "MB", "J", "failed",
        "unparsed", "cut", "empty", "one token", "search", "front by mean",
    )
)  # fmt: skip
# All columns of both tables.
TABLE_COLUMNS = frozenset(column.name for column in SAMPLE_COLUMNS).union(
    (column.name for column in (*SETTING_COLUMNS, *LAST_COLUMNS)), _STATS, _TYPICAL
)
