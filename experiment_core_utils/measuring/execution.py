"""How the settings of a run are executed: all in the same way, which is decided before the first is measured.

Times of settings are compared with each other, and a model runs several times faster by engines or CUDA graphs than by
its modules. So no setting may run otherwise than the others.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.engines.cuda_graphs import ADVICE
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.models.interface import Runnable, Switchable
from experiment_core_utils.primitives.collectives import all_gather
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import EngineRefused, SampleError, SettingError, library_faults_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.progress import announced
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.requests import KnobProof
from experiment_core_utils.records.stages import CUDA_GRAPH, MODULES, SERVER

_IN_WORDS = {MODULES: "the modules", CUDA_GRAPH: "CUDA graphs of the modules"}


def settle_execution(
    model: Runnable,
    requests: RequestSource,
    settings: Sequence[Setting],
    sample_ids: Sequence[int],
    max_new_tokens: int,
    sample_timeout_s: float | None,
    accelerator: Accelerator,
) -> dict[str, KnobProof]:
    """Try every setting with the first sample that can be read, and return the proofs of those that ran, by key.

    Where a way that was not requested refuses one of the settings, in any process, the next one has to run all of them,
    which is reported, and they are tried again: until none is refused, or the modules run. Requested ways stay, and the
    setting fails when it is measured. A collective call.
    """
    ways = model if isinstance(model, Switchable) else None
    limits = max_new_tokens, sample_timeout_s
    proofs = dict[str, KnobProof]()

    def refusal() -> str | None:
        nonlocal proofs
        proofs, reason = _tried(model, requests, settings, sample_ids, limits, accelerator.is_main_process)
        return reason

    with nullcontext() if ways is None else ways.restored_afterwards():
        settle_way(model, refusal, "settings", accelerator)
    if ways is not None:
        ways.fix_execution()
    # A later setting may have taken a stage from the engine that earlier ones were tried with.
    stages = model.describe()["execution_stages"]
    return {key: proof for key, proof in proofs.items() if proof.execution_stages in (None, stages)}


def settle_way(
    model: Runnable | None, refusal: Callable[[], str | None], what: str, accelerator: Accelerator
) -> None:
    """As long as the way in force is refused in any process, let the next one run everything in all of them, and say
    so. A collective call.

    Args:
        model: of this process; None where it has no ways to choose from.
        refusal: tries the way in force, and gives the reason why it is refused; None where it runs.
        what: runs in one way, for the message.
    """
    ways = model if isinstance(model, Switchable) else None
    while True:
        found = all_gather((refusal(), ways is not None and ways.has_next_way), accelerator)
        reason = next((each for each, _ in found if each is not None), None)
        if reason is None or not any(has_next_way for _, has_next_way in found):
            break
        if ways is not None and ways.has_next_way:
            ways.run_next_way(reason)
        if accelerator.is_main_process and model is not None:
            way = model.describe()["execution_stages"]["decode"]
            print(f"warning: {_IN_WORDS.get(way, way)} run all {what}: {reason}", file=sys.stderr, flush=True)


def _tried(
    model: Runnable,
    requests: RequestSource,
    settings: Sequence[Setting],
    sample_ids: Sequence[int],
    limits: tuple[int, float | None],
    is_shown: bool,
) -> tuple[dict[str, KnobProof], str | None]:
    """The proofs of the settings that ran, by key, and why the first one was refused; nothing where modules run.

    Args:
        limits: new tokens, and seconds for a sample.
    """
    proofs: dict[str, KnobProof] = {}
    if set(model.describe()["execution_stages"].values()) in ({MODULES}, {SERVER}):
        return proofs, None
    has_next_way = isinstance(model, Switchable) and model.has_next_way
    if has_next_way and (refusal := _refusal_without_request(model, settings)) is not None:
        return proofs, refusal
    refusal = None
    work = f"preparing kernels or graphs, compiled at the first use, and trying {counted(len(settings), 'setting')}"
    with announced(work, shown=is_shown):
        for setting in settings:
            try:
                proof = _proof_of(model, requests, setting, sample_ids, *limits)
            except EngineRefused as error:
                refusal = refusal or _named(setting, error)
                if has_next_way:
                    break
            except SettingError:  # not lost: the setting fails with it when it is measured
                continue
            else:
                if proof is not None:
                    proofs[setting.key] = proof
    return proofs, refusal


def _refusal_without_request(model: Any, settings: Sequence[Setting]) -> str | None:
    """Why a setting is refused whatever the request, which shows before any is tried; None where it does not."""
    for setting in settings:
        try:
            model.apply(setting)
            model.refuse_setting()
        except EngineRefused as error:
            return _named(setting, error)
        except SettingError:  # not lost: the setting fails with it when it is measured
            continue
    return None


def _named(setting: Setting, error: EngineRefused) -> str:
    """The refusal of a setting, without the advice to those who requested the way."""
    return f"{setting.key}: {str(error).removesuffix(ADVICE)}"


def _proof_of(
    model: Runnable,
    requests: RequestSource,
    setting: Setting,
    sample_ids: Iterable[int],
    max_new_tokens: int,
    sample_timeout_s: float | None,
) -> KnobProof | None:
    """The proof of a setting on the first sample that can be read and run; None where there is none."""
    model.apply(setting)
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"), out_of_memory_named(), time_limit(sample_timeout_s):
                inputs = model.to_device(requests.take(sample_id, vision_of(setting).bounds)[1].inputs)
                model.warm_up(inputs, max_new_tokens)
                return model.prove(setting, inputs)
        except SampleError:  # not counted: it is recorded among the samples
            continue
    return None
