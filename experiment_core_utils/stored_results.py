"""In: the file of a setting; out: its content, checked before anything is computed from it or named by it.

What is checked is what this project reads; docs/results_schema.md describes all keys. Keys that older files of this
schema do not have may be missing, and further keys are left as they are.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from experiment_core_utils.j_results_saving import SCHEMA_VERSION, TIME_NAMES
from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.primitives.files import FILE_NAME_PART
from experiment_core_utils.primitives.knobs import TIERS
from experiment_core_utils.primitives.result_files import field_fault, read_versioned_object

ADVICE = "remove it or measure the setting again"
# The work may be none; a request takes time.
_MAY_BE_ZERO = ("T_vision_total", "T_preprocess", "T_transfer")
_ABOVE_ZERO = re.compile(
    rf"(?:{'|'.join(name for name in TIME_NAMES.values() if name not in _MAY_BE_ZERO)})_(?:mean|p50|p95|p99|min|max)"
)
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)

Name = Annotated[str, StringConstraints(pattern=f"^{FILE_NAME_PART}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Knob = Annotated[int, Field(ge=1, le=10**6)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Amount = Annotated[float, Field(ge=0, le=1e30)]
Peak = Annotated[float, Field(gt=0, le=1e30)]
Ratio = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
# Milliseconds: of a stage, and of what may take none.
Time = Annotated[float, Field(ge=1e-9, le=1e12)]
Delay = Annotated[float, Field(ge=0, le=1e12)]


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("Input should be a text")
    return value


def _text_or_number(value: Any) -> Any:
    return value if value is None or type(value) is int else _text(value)


# Answers may hold half a surrogate pair, which pydantic's own type refuses.
Text = Annotated[Any, AfterValidator(_text)]


@with_config(_STRICT)
class Task(TypedDict):
    """`provenance.task`; its name is part of file names."""

    name: Name
    split: str
    metric: NotRequired[str]


@with_config(_STRICT)
class Model(TypedDict, total=False):
    """`provenance.model`."""

    name: str
    revision: str | None
    model_class: str
    total_parameters: Count | None
    dtype: str
    attn_implementation: str | None
    experts_implementation: str | None
    execution: str


@with_config(_STRICT)
class Hardware(TypedDict, total=False):
    """`provenance.hardware`."""

    gpu_name: str | None
    cpu: str | None
    torch_threads: Count


@with_config(_STRICT)
class Variables(TypedDict, total=False):
    """`provenance.experimental_variables`."""

    random_weights: bool


@with_config(_STRICT)
class Provenance(TypedDict):
    """How a setting was measured."""

    task: Task
    model: NotRequired[Model]
    hardware: NotRequired[Hardware]
    versions: NotRequired[dict[str, str | None]]
    experimental_variables: NotRequired[Variables]
    caveats: NotRequired[list[str]]
    command: NotRequired[str]
    git_commit: NotRequired[str | None]
    timestamp: NotRequired[str]


@with_config(_STRICT)
class Run(TypedDict):
    """One of a sample's `runs`."""

    T_vision_total: Delay | None
    T_LLM_prefill: Time
    T_LLM_decode: Time | None
    T_total: Time
    T_decode_per_token: Time | None
    T_inter_token: list[Delay]


@with_config(_STRICT)
class Metadata(TypedDict):
    """What a sample's answer is judged against."""

    question: NotRequired[Text]
    answers: list[Text]
    image_id: Annotated[Any, AfterValidator(_text_or_number)]
    options: NotRequired[list[Text]]
    answer_index: NotRequired[Count | None]


@with_config(_STRICT)
class Sample(TypedDict):
    """One of `per_sample_results`."""

    sample_id: Count
    target_crops: Count | None
    actual_num_crops: Count | None
    actual_vision_tokens: Count
    pooled_image_features: Count | None
    image_marker_tokens: Count
    input_text_tokens: Count
    prompt_tokens: Count
    output_tokens: Count
    output_ended: bool | None
    top_k: Knob | None
    num_active_blocks: Knob
    accuracy: Amount | None
    parse_status: NotRequired[str]
    score_details: NotRequired[dict[str, Any]]
    pred: Text
    question_type: Text
    metadata: Metadata
    T_vision_total: Delay | None
    T_LLM_prefill: Time | None
    T_LLM_decode: Time | None
    T_total: Time | None
    T_decode_per_token: Time | None
    T_first_token: Time | None
    T_preprocess: Delay
    T_transfer: Delay | None
    vision_flops: Amount | None
    prefill_flops: Amount | None
    decode_flops_per_token: Amount | None
    energy_j: NotRequired[Amount | None]
    energy_source: NotRequired[str | None]
    outlier_runs: NotRequired[list[Count] | None]
    accuracy_batch_size: NotRequired[Count | None]
    runs: list[Run]


@with_config(_STRICT)
class FailedSample(TypedDict):
    """One of `failed_samples`."""

    sample_id: Count
    error: Text
    reason: Text


@with_config(_STRICT)
class Drift(TypedDict):
    """One of the readings of the control setting."""

    before: Ratio | None
    after: Ratio | None


@with_config(_STRICT)
class Conditions(TypedDict):
    """What else went on while a process measured."""

    sm_clock_mhz: list[Amount | None] | None
    memory_clock_mhz: list[Amount | None] | None
    cpu_frequency_mhz: list[Amount | None] | None
    temperature_c_max: Number | None
    power_w_max: Amount | None
    power_throttled_s: Amount | None
    thermal_throttled_s: Amount | None
    foreign_cpu_share: Amount | None


@with_config(_STRICT)
class Order(TypedDict):
    """The place of a setting in the run."""

    position: Count | None


@with_config(_STRICT)
class Memory(TypedDict):
    """Memory of a setting."""

    peak_memory_bytes: Amount | None


@with_config(_STRICT)
class Utilisation(TypedDict):
    """Peaks of the device, and how far they were used."""

    mfu_vision: NotRequired[Amount | None]
    mfu_prefill: NotRequired[Amount | None]
    mfu_decode: NotRequired[Amount | None]
    mbu_decode: NotRequired[Amount | None]
    peak_flops_per_s: Peak | None
    peak_bytes_per_s: Peak | None
    utilisation_reason: str | None


@with_config(_STRICT)
class EnergySummary(TypedDict, total=False):
    """The figures of one source."""

    vision_j: Number | None
    prefill_j: Number | None
    decode_j: Number | None
    decode_j_per_token: Number | None
    end_to_end_j: Number | None
    end_to_end_uncertainty_j: Amount | None
    end_to_end_idle_j: Number | None
    end_to_end_net_j: Number | None
    j_per_output_token: Number | None
    closure_residual_share: Number | None
    source_ratio: Number | None
    source: str | None
    kind: str | None


@with_config(_STRICT)
class Energy(TypedDict):
    """Energy of the stages of one request."""

    summary: NotRequired[EnergySummary | None]


@with_config(_STRICT)
class Setting(TypedDict):
    """The top level."""

    fingerprint: str
    tier: Literal[tuple(TIERS)] | None  # type: ignore[valid-type]
    vision_tokens_target: Knob | None
    selected_crops_mean: Amount | None
    actual_vision_tokens_mean: Amount | None
    target_vision_tokens_mean: Amount | None
    max_crops: Count
    top_k: Knob | None
    num_active_blocks: Knob
    num_total_blocks: Knob
    metric: NotRequired[str]
    metric_best: NotRequired[Annotated[float, Field(gt=0, le=1e6)]]
    accuracy: Amount | None
    accuracy_ci95: Annotated[list[Amount], Field(min_length=2, max_length=2)] | None
    num_unparsed: NotRequired[Count]
    share_unparsed: NotRequired[Share | None]
    share_truncated: NotRequired[Share | None]
    share_failed: NotRequired[Share | None]
    share_outlier_runs: NotRequired[Share | None]
    num_samples: Count
    num_failed_samples: Count
    num_latency_samples: NotRequired[Count]
    sample_ids: list[Count]
    setting_order: NotRequired[Order | None]
    drift: NotRequired[list[Drift]]
    conditions: NotRequired[list[Conditions]]
    memory: Memory | None
    hardware_utilisation: NotRequired[Utilisation]
    energy: NotRequired[Energy | None]
    aggregate_stats: dict[str, Number | None]
    per_sample_results: list[Sample]
    failed_samples: list[FailedSample]
    provenance: Provenance


_SETTING: TypeAdapter[Setting] = TypeAdapter(Setting)


def read_setting(path: Path) -> dict[str, Any]:
    """The content of a setting's file, as it is.

    Raises:
        ResultsRefused: not there, not a regular file, torn, of another schema, or a field that is missing or cannot be,
            with the names of the file and the field.
    """
    content = read_versioned_object(path, "result", SCHEMA_VERSION)
    fault = fault_of(content)
    if fault is not None:
        raise ResultsRefused(f"{path} {fault}; {ADVICE}")
    return content


def fault_of(content: Mapping[str, Any]) -> str | None:
    """The first field that is missing or wrong and why, such as `: top_k is 'x': a valid integer`; None for none."""
    try:
        _SETTING.validate_python(content)
    except ValidationError as error:
        return field_fault(error)
    return next(_contradictions(content), None)


def _contradictions(content: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are possible alone, but not together."""
    samples = content["per_sample_results"]
    for name, value in content["aggregate_stats"].items():
        if value is not None and value <= 0 and _ABOVE_ZERO.fullmatch(name):
            yield f"is broken: aggregate_stats.{name} is {value}, and a time is above 0"
    if content["num_samples"] != len(samples):
        yield f"is broken: num_samples is {content['num_samples']}, and per_sample_results holds {len(samples)}"
    twice = [sample_id for sample_id, count in Counter(each["sample_id"] for each in samples).items() if count > 1]
    if twice:
        yield f"is broken: per_sample_results holds sample_id {twice[0]} more than once"
    best = content.get("metric_best", 1.0)
    for place, sample in enumerate(samples):
        if sample["runs"] and all(run["T_total"] != sample["T_total"] for run in sample["runs"]):
            yield f"lacks a run of T_total {sample['T_total']} in per_sample_results[{place}].runs"
        problem = _sample_fault(sample, best)
        if problem is not None:
            yield f"is broken: per_sample_results[{place}].{problem}"


def _sample_fault(sample: Mapping[str, Any], best: float) -> str | None:
    if sample["accuracy"] is not None and sample["accuracy"] > best * (1 + 1e-9):
        return f"accuracy is {sample['accuracy']}, above metric_best, {best:g}"
    if sample["runs"] and sample["T_LLM_prefill"] is None:
        return "T_LLM_prefill is None in a sample that was measured"
    if sample["T_LLM_decode"] is not None and sample["output_tokens"] < 2:
        return f"output_tokens is {sample['output_tokens']}, too few for a decode time"
    metadata = sample["metadata"]
    index, options = metadata.get("answer_index"), metadata.get("options", ())
    if options and "answer_index" not in metadata:
        return "metadata lacks answer_index beside its options"
    if index is not None and index >= len(options):
        return f"metadata.answer_index is {index}, and there are {len(options)} options"
    return None
