"""The content of a setting's result file, put together from its samples, scores and summary."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiment_core_utils.knobs.active_blocks import blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import VisionTarget, vision_of
from experiment_core_utils.primitives.statistics import Distribution, mean_of
from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.records.compute import ComputePart
from experiment_core_utils.records.energy import Energy
from experiment_core_utils.records.provenance import Provenance
from experiment_core_utils.records.quantities.energy import SampleEnergy
from experiment_core_utils.records.quantities.latency import StageTimes
from experiment_core_utils.records.quantities.readings import published_figures, value_of_run
from experiment_core_utils.records.requests import KnobProof, VisionGeometry
from experiment_core_utils.records.sample_result import (
    QUANTITIES,
    QUANTITIES_BY_NAME,
    ContinuationScore,
    DecoderKnobValues,
    Metadata,
    RunTimes,
    SampleRequest,
    SampleResult,
    SampleScore,
    TheoreticalGeometry,
    times_over_runs,
)
from experiment_core_utils.records.setting_result import (
    PROTOCOL_VERSION,
    SCHEMA_VERSION,
    DecoderPart,
    FixedLengthTime,
    SettingResult,
    SteadinessPart,
    VisionPart,
)
from experiment_core_utils.records.settings import MeasuredSample, MeasuredSetting, SettingSummary
from experiment_core_utils.tasks.interface import Score
from experiment_core_utils.tasks.sampling import SampledDataset


def vision_part(target: VisionTarget, samples: Sequence[MeasuredSample]) -> VisionPart:
    """The vision knob, and crops and tokens of the samples.

    Crops are counted over the pictures that are cut, target tokens over all pictures, actual tokens over all samples; a
    mean over none of them is None.
    """
    geometries = _geometries(samples)
    limits = target.crops if target.crops is not None and target.crops.counts_crops else None
    numbers = [geometry.crops_if_cut for geometry in geometries if geometry.crops_if_cut is not None]
    return VisionPart.of(
        theoretical_part(typical_geometry(samples)),
        tier=target.tier,
        tier_range=None if limits is None else {"min_crops": limits.min_crops, "max_crops": limits.max_crops},
        vision_tokens_target=target.tokens,
        vision_fraction=target.fraction,
        selected_crops_mean=mean_of(numbers),
        selected_crops_distribution={str(number): count for number, count in sorted(Counter(numbers).items())},
        target_vision_tokens_mean=target.tokens
        or mean_of([target for target in map(_target_of, samples) if target is not None]),
        actual_vision_tokens_mean=mean_of(
            [sample.shape.vision_tokens for sample in samples if sample.shape.vision_tokens is not None]
        ),
        max_crops=None if limits is None else limits.max_crops,
    )


def listed(pair: tuple[int, int] | None) -> list[int] | None:
    """A pair as JSON stores it."""
    return None if pair is None else list(pair)


def typical_geometry(samples: Sequence[MeasuredSample]) -> VisionGeometry | None:
    """The geometry that most samples have; of several, the one met first."""
    geometries = _geometries(samples)
    return Counter(geometries).most_common(1)[0][0] if geometries else None


def _target_of(sample: MeasuredSample) -> int | None:
    """The image features that a fraction asks for, else those that the rule gives; None without a picture."""
    theoretical = sample.shape.theoretical
    return sample.shape.target_tokens or (theoretical.pooled_features if theoretical else None)


def _geometries(samples: Sequence[MeasuredSample]) -> list[VisionGeometry]:
    return [sample.shape.theoretical for sample in samples if sample.shape.theoretical is not None]


def theoretical_part(geometry: VisionGeometry | None) -> TheoreticalGeometry:
    """What the rule gives for a picture; all None without one."""
    return TheoreticalGeometry.of(
        theoretical_num_crops=geometry.crops_if_cut if geometry else None,
        theoretical_tiling=listed(geometry.tiling) if geometry else None,
        theoretical_image_size=listed(geometry.image_size) if geometry else None,
        theoretical_vision_tokens=geometry.pooled_features if geometry else None,
    )


def decoder_knobs(setting: Setting) -> DecoderKnobValues:
    """The published knobs of the decoder."""
    fields = setting.published_fields
    return DecoderKnobValues.of(**{name: fields[name] for name in DecoderKnobValues.model_fields})


def request_part(sample: MeasuredSample, setting: Setting) -> SampleRequest:
    """A sample's knobs and crops, requested and actual."""
    theoretical, actual = sample.shape.theoretical, sample.shape.actual
    return SampleRequest.of(
        decoder_knobs(setting),
        sample_id=sample.sample_id,
        target_vision_tokens=vision_of(setting).tokens or _target_of(sample),
        target_crops=theoretical.crops_if_cut if theoretical else None,
        actual_num_crops=actual.crops_if_cut if actual else None,
        actual_tiling=listed(actual.tiling) if actual else None,
        actual_image_size=listed(actual.image_size) if actual else None,
    )


def score_part(score: Score) -> SampleScore:
    """What depends on how a sample's answer is scored."""
    return SampleScore.of(accuracy=score.value, parse_status=score.parse_status, score_details=dict(score.details))


def sample_result(
    sample: MeasuredSample, score: Score, setting: Setting, outlier_runs: Sequence[int] | None = None
) -> SampleResult:
    """One sample of a result; its times are the means of its runs, as `times_over_runs` takes them.

    Args:
        outlier_runs: indices of runs that stand out; None where they were not checked.
    """
    answer = sample.answer
    places = sample.round_places or (None,) * len(sample.runs)
    runs = [_run_times(sample, number, place) for number, place in enumerate(places)]
    scores = [ContinuationScore.of(**asdict(score)) for score in sample.scores]
    return SampleResult.of(
        request_part(sample, setting),
        theoretical_part(sample.shape.theoretical),
        score_part(score),
        sample_energy(sample),
        **times_over_runs(runs, sample.thinking_tokens, is_scored=bool(sample.scores)),
        **published_figures(sample),
        **({"continuations": scores} if scores else {}),
        output_ended=None if sample.scores else sample.ended,
        pred=sample.prediction,
        answer=sample.scored_answer,
        question_type=sample.question_type,
        metadata=sample_metadata(sample),
        data_sha256=sample.data_sha256,
        picture_sha256=sample.picture_sha256,
        outputs_identical=sample.outputs_identical,
        outlier_runs=list(outlier_runs) if outlier_runs is not None else None,
        accuracy_batch_size=answer.batch_size if answer else None,
        accuracy_batch_limit=answer.batch_limit if answer else None,
        num_discarded_runs=None if answer else sample.num_discarded_runs,
        disturbances=None if answer else list(sample.disturbances),
        runs=runs,
    )


def _run_times(sample: MeasuredSample, number: int, place: int | None) -> RunTimes:
    """The published times of a sample's run, in milliseconds."""
    stages, run = [QUANTITIES[key] for key in StageTimes.model_fields], sample.runs[number]
    return RunTimes.of(
        **{each.key: each.published(value_of_run(sample, number, each.name)) for each in stages},
        T_inter_token=[milliseconds(gap) for gap in run.inter_token_s],
        place_in_round=place,
        **({} if run.num_requests == 1 else {"batch_output_tokens": run.all_output_tokens}),
    )


def sample_metadata(sample: MeasuredSample) -> Metadata:
    """What the answer is scored against and what the task says; enough to score the answer again.

    What the task says does not replace the former.
    """
    validated = {
        "question": sample.metadata["question"],
        "answers": list(sample.references),
        "image_id": sample.image_id,
    }
    if sample.options:
        validated |= {"options": list(sample.options), "answer_index": sample.answer_index}
    return Metadata.of(**(validated | sample.metadata | validated))


def setting_result(
    setting: Setting,
    num_total_blocks: int | None,
    merged: MeasuredSetting,
    scores: Sequence[Score],
    summary: SettingSummary,
    drawn: SampledDataset[Any],
    compute: ComputePart,
    energy: Energy | None,
    steadiness: SteadinessPart,
    provenance: Provenance,
    *,
    is_reference: bool = False,
    in_grid: bool = True,
) -> SettingResult:
    """The result of a setting, put together from its parts.

    Args:
        scores: one for each of the merged samples, in their order.
        drawn: what was requested, of which `merged` contains those that ran and those that failed.
        is_reference, in_grid: see `SettingResult`.
    """
    decoder = DecoderPart.of(
        decoder_knobs(setting),
        num_total_blocks=num_total_blocks,
        active_block_indices=None if num_total_blocks is None else list(blocks_of(setting)),
    )
    typical = {f"{name}_typical": value for name, value in aggregate_stats(summary.typical).items()}
    stats = aggregate_stats(summary.distributions) | typical
    return SettingResult.of(
        vision_part(vision_of(setting), merged.samples),
        decoder,
        summary.accuracy,
        summary.counts,
        compute,
        steadiness,
        schema_version=SCHEMA_VERSION,
        protocol_version=PROTOCOL_VERSION,
        fingerprint=merged.fingerprint,
        sampling=asdict(drawn.sampling),
        sample_ids=sorted(drawn.sample_ids) if merged.requested_ids is None else list(merged.requested_ids),
        knobs=setting.levels,
        is_reference=is_reference,
        in_grid=in_grid,
        realised=None if merged.proof is None else realised_part(merged.proof),
        energy=energy,
        T_fixed_length=FixedLengthTime.from_stats(stats, provenance.experimental_variables),
        aggregate_stats=stats,
        per_sample_results=[
            sample_result(sample, score, setting, outliers)
            for sample, score, outliers in zip(merged.samples, scores, summary.outlier_runs, strict=True)
        ],
        failed_samples=list(merged.failures),
        provenance=provenance,
    )


def realised_part(proof: KnobProof) -> dict[str, Any]:
    """What was counted inside the model; mappings by knob where there are any, tokens where some were left out."""
    left_out = {name for name in ("knobs_not_seen", "counted") if not getattr(proof, name)}
    if proof.prefill_tokens == proof.prompt_tokens:
        left_out |= {"prefill_tokens", "prompt_tokens", "vision_tokens"}
    return {name: value for name, value in asdict(proof).items() if name not in left_out}


def aggregate_stats(distributions: Mapping[str, Distribution]) -> dict[str, float | int | None]:
    """`<name>_mean`, `_std`, `_p50`, `_p95`, `_p99`, `_min`, `_max`, `_ci95_low`, `_ci95_high`, `_n` of each quantity.

    Times in milliseconds under their published names.
    """
    return {
        f"{quantity.spread}_{figure.replace('ci_', 'ci95_')}": value if figure == "n" else quantity.published(value)
        for name, spread in distributions.items()
        for quantity in (QUANTITIES_BY_NAME[name],)
        for figure, value in asdict(spread).items()
    }


def sample_energy(sample: MeasuredSample) -> SampleEnergy:
    """The energy of a sample's request; all None where none was requested, or nothing ran."""
    energy = sample.energy
    if energy is None:
        return SampleEnergy.of(**dict.fromkeys(SampleEnergy.model_fields.keys() - {"energy_j"}))
    has_figure = energy.joules is not None and energy.origin is not None
    return SampleEnergy.of(
        energy_bound_j=energy.bound_j,
        energy_method=energy.method,
        energy_source=f"{energy.origin.source} ({energy.origin.basis})" if has_figure and energy.origin else None,
        energy_reason=energy.reason,
    )
