"""Records with round numbers, for tests of what is computed from them and of how they are stored."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiment_core_utils.finishing.setting_content import setting_result
from experiment_core_utils.finishing.setting_summary import summarise, summarise_accuracy
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.meters.correct_answers import with_correct_answers
from experiment_core_utils.meters.setting_energy import energy_of
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.records.compute import ComputePart, HardwareUtilisation, Memory
from experiment_core_utils.records.provenance import Provenance, TaskDescription
from experiment_core_utils.records.requests import (
    BatchedAnswer,
    KnobProof,
    RequestShape,
    StagedRun,
    StageFlops,
    VisionGeometry,
)
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.setting_result import SettingResult, SteadinessPart
from experiment_core_utils.records.settings import MeasuredSample, MeasuredSetting, SettingFailure, SettingSummary
from experiment_core_utils.tasks.interface import Answer, Score, Scoring, answer_of
from experiment_core_utils.tasks.sampling import SampledDataset, Sampling

SETTING = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 3)))
PROOF = KnobProof(experts_per_token=(4, 2, 2), blocks_run=(0, 1, 3), blocks_run_decode=(0, 1, 3), cache_layers=3)


def staged_run(
    vision_s: float | None = 0.5,
    prefill_s: float = 0.25,
    inter_token_s: tuple[float, ...] = (0.125, 0.125),
    ended: bool = True,
) -> StagedRun:
    """A run whose decode time and total are the sums of what is given."""
    return StagedRun(
        token_ids=tuple(range(len(inter_token_s) + 1)),
        vision_s=vision_s,
        prefill_s=prefill_s,
        decode_s=sum(inter_token_s) if inter_token_s else None,
        total_s=(vision_s or 0.0) + prefill_s + sum(inter_token_s),
        inter_token_s=inter_token_s,
        ended=ended,
    )


def one_by_two() -> VisionGeometry:
    """1 x 2 tiles: 3 crops with the whole picture, 3 * 144 features."""
    return VisionGeometry(2, (1, 2), (336, 560), 432)


def measured_sample(
    sample_id: int,
    *runs: StagedRun,
    prediction: str = "1.0",
    question_type: str = "reading",
    image_id: str | None = None,
    geometry: VisionGeometry | None = None,
    has_picture: bool = True,
    flops: StageFlops | None = None,
) -> MeasuredSample:
    """384 vision tokens of 1 x 2 crops, 28 markers and 10 text tokens, a picture of its own, unless given otherwise."""
    geometry = (geometry or one_by_two()) if has_picture else None
    shape = (
        RequestShape(geometry, geometry, 384, 28, 10, 0.002)
        if has_picture
        else RequestShape(None, None, 0, 0, 10, 0.002)
    )
    return MeasuredSample(
        sample_id=sample_id,
        shape=shape,
        runs=runs or (staged_run(vision_s=0.5 if has_picture else None),),
        outputs_identical=True,
        host_s={"transfer_s": 0.001},
        prediction=prediction,
        flops=flops,
        question_type=question_type,
        image_id=f"picture-{sample_id}" if image_id is None else image_id,
        references=("stop",),
        options=(),
        answer_index=None,
        metadata={"question": "what?", "family": "signs"},
    )


def answered_sample(sample_id: int, tokens: int = 4, ended: bool = True, prediction: str = "1.0") -> MeasuredSample:
    """As `measured_sample`, but answered in a batch of 3 where 8 are allowed, so without runs."""
    return replace(
        measured_sample(sample_id, prediction=prediction),
        runs=(),
        outputs_identical=None,
        host_s={},
        answer=BatchedAnswer(tuple(range(tokens)), ended, 3, 8),
    )


@dataclass(frozen=True)
class ReadOff:
    """A metric by which each prediction says its own score: "0.5"; "none" for no score; "?" cannot be read."""

    name: str = "read_off"
    best: float = 1.0

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """Half of each score is its detail; the run's detail says how many there were."""
        scores = tuple(self._one(answer.prediction) for answer in answers)
        values = [score.value for score in scores if score.value is not None]
        return Scoring(scores, sum(values) / len(values) if values else None, {"answers": len(answers)})

    def _one(self, prediction: str) -> Score:
        if prediction == "?":
            return Score(0.0, False, "unparsed")
        if prediction == "none":
            return Score(None)
        return Score(float(prediction), details={"half": float(prediction) / 2})


NO_PEAKS = HardwareUtilisation(peak_flops_per_s=None, peak_bytes_per_s=None, utilisation_reason="no known card")


def failed_sample(sample_id: int, reason: str) -> FailedSample:
    return FailedSample(sample_id=sample_id, error="SampleError", reason=reason)


def scores_of(samples: Sequence[MeasuredSample]) -> tuple[Score, ...]:
    """What `ReadOff` gives them."""
    return ReadOff().score([answer_of(sample) for sample in samples]).scores


def summary_of(samples: Sequence[MeasuredSample], num_failed: int = 0, metric: ReadOff | None = None) -> SettingSummary:
    """Scored by `ReadOff` and summarised."""
    by = metric or ReadOff()
    answers = [answer_of(sample) for sample in samples]
    return summarise(samples, summarise_accuracy(answers, by.score(answers), by), num_failed)


def drawn(*sample_ids: int) -> SampledDataset[Any]:
    """Those ids, drawn at random out of 100."""
    return SampledDataset([], sample_ids, Sampling("random", 42, len(sample_ids), 100))


def result_of(
    merged: MeasuredSetting,
    setting: Setting = SETTING,
    task: str = "signs",
    requested: SampledDataset[Any] | None = None,
) -> SettingResult:
    """The result of a setting of a 4-block model, scored by `ReadOff`, as from before steadiness was noted."""
    ids = sorted([each.sample_id for each in merged.samples] + [each.sample_id for each in merged.failures])
    summary = summary_of(merged.samples, len(merged.failures))
    return setting_result(
        setting,
        4,
        merged,
        scores_of(merged.samples),
        summary,
        requested or drawn(*ids),
        ComputePart(
            memory=None if merged.memory is None else Memory(**asdict(merged.memory)),
            compute_utilisation=[],
            memory_timeline=None,
            hardware_utilisation=NO_PEAKS,
        ),
        with_correct_answers(energy_of(merged.energy), summary.accuracy),
        SteadinessPart(),
        Provenance(task=TaskDescription(name=task, split="validation", metric="read_off"), run_uid=None),
    )


def stored_result(merged: MeasuredSetting, setting: Setting = SETTING, task: str = "signs") -> dict[str, Any]:
    """The content of the file of `result_of`."""
    return result_of(merged, setting, task).content()


def part(
    *samples: MeasuredSample,
    rank: int = 0,
    num_processes: int = 1,
    key: str = SETTING.key,
    fingerprint: str = "f00d",
    failures: tuple[FailedSample, ...] = (),
    proof: KnobProof | None = PROOF,
    memory: MemoryReading | None = None,
    failure: SettingFailure | None = None,
    requested_ids: tuple[int, ...] | None = None,
) -> MeasuredSetting:
    """One process's part of `SETTING`."""
    return MeasuredSetting(
        key=key,
        fingerprint=fingerprint,
        rank=rank,
        num_processes=num_processes,
        experiment_ids=("0001",),
        samples=samples,
        failures=failures,
        proof=proof,
        memory=memory,
        failure=failure,
        requested_ids=requested_ids,
    )
