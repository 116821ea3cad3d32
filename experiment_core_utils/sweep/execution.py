"""How the settings of a run are executed: all in the same way, which is decided before the first is measured.

Times of settings are compared with each other, and a model runs several times faster by engines or CUDA graphs than by
its modules. So no setting may run otherwise than the others.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from accelerate import Accelerator

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.models.interface import MODULES, SERVER, Runnable, Switchable
from experiment_core_utils.primitives.collectives import all_gather
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import EngineRefused, SampleError, SettingError, library_faults_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.progress import announced
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.requests import KnobProof
from experiment_core_utils.sweep.requests import RequestSource


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

    Where engines or graphs that were not requested refuse one of the settings, in any process, the modules run all of
    them, which is reported; requested ones stay, and the setting fails when it is measured. A collective call.
    """
    if set(model.describe()["execution_stages"].values()) in ({MODULES}, {SERVER}):
        all_gather(None, accelerator)
        return {}
    proofs: dict[str, KnobProof] = {}
    refusal: str | None = None
    work = f"preparing kernels or graphs, compiled at the first use, and trying {counted(len(settings), 'setting')}"
    ways = model if isinstance(model, Switchable) else None
    restored = nullcontext() if ways is None else ways.restored_afterwards()
    with announced(work, shown=accelerator.is_main_process), restored:
        for setting in settings:
            try:
                proof = _proof_of(model, requests, setting, sample_ids, max_new_tokens, sample_timeout_s)
            except EngineRefused as error:
                refusal = refusal or f"{setting.key}: {error}"
                if ways is not None and ways.has_next_way:
                    break
            except SettingError:  # not lost: the setting fails with it when it is measured
                continue
            else:
                if proof is not None:
                    proofs[setting.key] = proof
    refusals = [reason for reason in all_gather(refusal, accelerator) if reason is not None]
    if refusals and ways is not None and ways.has_next_way:
        ways.run_next_way(refusals[0])
        proofs.clear()
        if accelerator.is_main_process:
            print(f"warning: the modules run all settings: {refusals[0]}", file=sys.stderr, flush=True)
    if ways is not None:
        ways.fix_execution()
    return proofs


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
