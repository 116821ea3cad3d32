"""Records with round numbers, for tests of what is computed from them and of how they are stored."""

from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.knobs import KnobSetting, tier_target
from experiment_core_utils.primitives.records import (
    FailedSample,
    KnobProof,
    MeasuredSample,
    MeasuredSetting,
    RequestShape,
    SettingFailure,
    StagedRun,
    StageFlops,
    VisionGeometry,
)

SETTING = KnobSetting(tier_target("low"), 2, (0, 1, 3))
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
    accuracy: float = 1.0,
    question_type: str = "reading",
    geometry: VisionGeometry | None = None,
    has_picture: bool = True,
    flops: StageFlops | None = None,
) -> MeasuredSample:
    """384 vision tokens of 1 x 2 tiles, 28 markers and 10 text tokens, unless something else is asked for."""
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
        transfer_s=0.001,
        prediction="stop",
        accuracy=accuracy,
        flops=flops,
        question_type=question_type,
        metadata={"question": "what?", "answers": ["stop"], "image_id": "a"},
    )


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
) -> MeasuredSetting:
    """One process's part of `SETTING`."""
    return MeasuredSetting(
        key=key,
        fingerprint=fingerprint,
        rank=rank,
        num_processes=num_processes,
        samples=samples,
        failures=failures,
        proof=proof,
        memory=memory,
        failure=failure,
    )
