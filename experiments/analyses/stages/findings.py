"""What E1 finds in sentences."""

from collections.abc import Iterator

from experiment_core_utils.models.interface import STAGES
from experiments.analyses.charts.chart import milliseconds
from experiments.analyses.stages.analysis import StageAnalysis
from experiments.analyses.stages.fractions import grouped, regimes, tokens_until_decode_is_half


def longest_stage(found: StageAnalysis) -> str:
    """In how many settings each stage takes longest."""
    total = len(found.by_setting)
    counts = {stage: sum(each.dominant == stage for each in found.by_setting) for stage in STAGES}
    parts = [f"{stage} in {'all' if count == total else count}" for stage, count in counts.items() if count]
    return f"The stage that takes longest is {', '.join(parts)} of the {total} settings."


def decode_sentences(found: StageAnalysis, task: str) -> Iterator[str]:
    """From how many output tokens on decode takes at least half of a request."""
    lengths: dict[int | None, list[str]] = {}
    groups = grouped((each for each in found.generations if each.task == task), lambda each: each.vision)
    for vision, own in groups.items():
        lengths.setdefault(tokens_until_decode_is_half(own), []).append(vision)
    if lengths:
        parts = [
            ("never" if length is None else f"from {length} output tokens on") + f" ({', '.join(visions)})"
            for length, visions in lengths.items()
        ]
        yield f"Decode takes at least half of the time: {'; '.join(parts)}."


def stage_findings(found: StageAnalysis) -> list[str]:
    """What the command prints: the longest stage, decode, and the stages' fractions by task and vision knob."""
    lines = [longest_stage(found)]
    tasks = dict.fromkeys(each.task for each in found.generations)
    for task in tasks:
        lines += [f"{task}: {each}" if len(tasks) > 1 else each for each in decode_sentences(found, task)]
    for each in regimes(found.generations, [None]):
        parts = ", ".join(f"{stage} {part.share:.0%}" for stage, part in each.stages.items())
        lines.append(f"{each.task}, vision {each.vision}: {milliseconds(each.total_ms)} a request, {parts}")
    return lines
