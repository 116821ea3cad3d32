"""E1 of a sweep: where the time goes, with the sentences of its command and the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import pandas as pd

from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.primitives.statistics import fraction_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import time_text
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import FixedLengthTime
from experiment_core_utils.records.stages import STAGES
from experiment_core_utils.saved_results.terminal import fixed_length_line
from experiments.analyses.stages import operations
from experiments.analyses.stages.fractions import (
    Generation,
    Regime,
    display_lengths,
    grouped,
    regimes,
    settings_fractions,
    tokens_until_decode_is_half,
)
from experiments.analyses.stages.operations import StagePoint
from experiments.analyses.stages.profiles import ProfiledRequest, load_profiles
from experiments.analyses.stages.scaling import LineFit, StageLine, stage_lines
from experiments.analyses.sweeps import StoredSetting, Sweep, knob_columns, vision_label

NO_PICTURE = "no picture"


def generations_of(sweep: Sweep) -> list[Generation]:
    """Every sample that was measured; samples answered in batches have no times and are left out, as are those of a
    server, which shows no stages.
    """
    found = []
    columns = knob_columns([each.setting for each in sweep.settings])
    for at, setting in enumerate(sweep.settings):
        levels = {name: level for name, column in columns.items() if (level := column[at]) is not None}
        for sample in setting.result.per_sample_results:
            if sample.runs and sample.T_LLM_prefill is not None:
                found.append(_generation(setting, levels, sample, sample.T_LLM_prefill))
    return found


def _generation(
    setting: StoredSetting, levels: Mapping[str, Level], sample: SampleResult, prefill_ms: float
) -> Generation:
    assert sample.prompt_tokens is not None
    gaps = zip_longest(*(run.T_inter_token for run in sample.runs), fillvalue=0.0)
    return Generation(
        task=setting.task,
        setting=setting.key,
        vision=vision_label(setting.result) if sample.T_vision_total is not None else NO_PICTURE,
        levels=levels,
        picture=(setting.task, sample.metadata.image_id),
        image_features=sample.pooled_image_features,
        prompt_tokens=sample.prompt_tokens,
        sample_id=sample.sample_id,
        vision_ms=sample.T_vision_total,
        prefill_ms=prefill_ms,
        inter_token_ms=tuple(sum(each) / len(each) for each in gaps),
    )


@dataclass(frozen=True)
class StageAnalysis:
    """What E1 finds."""

    generations: Sequence[Generation]
    #: by_regime, by_setting: fractions of the stages by picture and answer length, and of each setting
    by_regime: Sequence[Regime]
    by_setting: Sequence[Regime]
    lines: Sequence[StageLine]  #: each stage's time over what drives it
    #: points, flops_lines: each stage's operations and time in each setting, and lines through all samples
    points: Sequence[StagePoint]
    flops_lines: Mapping[str, tuple[LineFit | None, str | None]]
    fixed_lengths: Mapping[tuple[str, str], FixedLengthTime]  #: by task and setting, of settings that have one
    profiles: Sequence[ProfiledRequest]
    profiles_reason: str | None  #: why there are no profiles; None where there are
    #: task -> the setting that is the model as it is; without tasks whose results have none with times
    references: Mapping[str, str]

    def share_of_reference(self, regime: Regime) -> float | None:
        """The time of a regime over that of the reference, of the samples that it has; None where there is none, or for
        part of an answer."""
        if regime.output_tokens is not None or regime.task not in self.references:
            return None
        of_task = [each for each in self.generations if each.task == regime.task]
        key = self.references[regime.task]
        reference = {each.sample_id: each.total_ms for each in of_task if each.setting == key}
        both = [
            (each.total_ms, reference[each.sample_id])
            for each in of_task
            if each.sample_id in reference
            and (each.vision == regime.vision if regime.setting is None else each.setting == regime.setting)
        ]
        return fraction_of(sum(total for total, _ in both), sum(other for _, other in both))


def analyse_stages(sweep: Sweep, samples: pd.DataFrame) -> StageAnalysis | None:
    """E1 of a sweep, whose frame of samples is given; None where no sample has stages: all were answered in batches, or
    by a server.

    Raises:
        ResultsError: a file or a profile beside it is broken.
    """
    generations = generations_of(sweep)
    if not generations:
        return None
    found = [load_profiles(folder) for folder in dict.fromkeys(each.path.parent for each in sweep.settings)]
    profiles = [profile for each, _ in found for profile in each]
    return StageAnalysis(
        generations=generations,
        by_regime=regimes(generations, display_lengths(generations)),
        by_setting=settings_fractions(generations),
        lines=stage_lines(generations),
        points=operations.stage_points(samples, sweep.provenance.peak_flops_per_s),
        flops_lines=operations.stage_lines(samples),
        fixed_lengths={
            (each.task, each.key): time for each in sweep.settings if (time := each.result.T_fixed_length) is not None
        },
        profiles=profiles,
        profiles_reason=None if profiles else found[0][1],
        references={
            setting.task: setting.key
            for setting in sweep.settings
            if setting.result.is_reference and any(sample.runs for sample in setting.result.per_sample_results)
        },
    )


def longest_stage(found: StageAnalysis) -> str:
    """In how many settings each stage takes longest."""
    total = len(found.by_setting)
    counts = {stage: sum(setting.dominant == stage for setting in found.by_setting) for stage in STAGES}
    parts = [f"{stage} in {'all' if count == total else count}" for stage, count in counts.items() if count]
    return f"The stage that takes longest is {', '.join(parts)} of the {counted(total, 'setting')}."


def decode_sentences(found: StageAnalysis, task: str) -> Iterator[str]:
    """From how many output tokens on decode takes at least half of a request."""
    lengths: dict[int | None, list[str]] = {}
    groups = grouped((each for each in found.generations if each.task == task), lambda each: each.vision)
    for vision, own in groups.items():
        lengths.setdefault(tokens_until_decode_is_half(own), []).append(vision)
    if lengths:
        of = {length: "" if set(groups) == {NO_PICTURE} else f" ({', '.join(own)})" for length, own in lengths.items()}
        parts = [f"{'never' if n is None else f'from {n} output tokens on'}{visions}" for n, visions in of.items()]
        yield f"Decode takes at least half of the time: {'; '.join(parts)}."


def stage_findings(found: StageAnalysis) -> list[str]:
    """What the command prints: the longest stage, decode, and the stages' fractions by task and vision knob."""
    lines = [longest_stage(found)]
    tasks = dict.fromkeys(each.task for each in found.generations)
    for task in tasks:
        fixed = fixed_length_line({key: time for (own, key), time in found.fixed_lengths.items() if own == task})
        sentences = [*decode_sentences(found, task), *([] if fixed is None else [fixed])]
        lines += [f"{task}: {each}" if len(tasks) > 1 else each for each in sentences]
    for each in regimes(found.generations, [None]):
        seen = [stage for stage in STAGES if stage != "vision" or each.vision != NO_PICTURE]
        parts = ", ".join(f"{stage} {each.stages[stage].share:.0%}" for stage in seen)
        share = found.share_of_reference(each)
        of = "" if share is None else f" ({100 * share:.0f} % of {found.references[each.task]}, the reference)"
        vision = "" if {each.vision for each in found.generations} == {NO_PICTURE} else f", vision {each.vision}"
        lines.append(f"{each.task}{vision}: {time_text(each.total_ms)} a request{of}, {parts}")
    return lines
