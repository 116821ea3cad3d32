"""`--execution auto` of a transformers model by a GPU's own kernels, in Triton's interpreter: a line of JSON with the
ways that ran.

Run with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

import json
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.engines.gpu.triton import prefill_forward
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.registry import load_knob_module
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.execution import settle_execution
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.static_cache_decode import FixedCacheDecode
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.measuring.test_batches import Numbers
from tests.models.hf.interpreted_engines import take_few_programs
from tests.models.hf.test_graphed_stages import read
from tests.models.tiny_checkpoints import write_checkpoint

T = TypeVar("T")
FIRST, BOTH = (
    Setting.of(vision=tier_target("low"), top_k=None, num_active_blocks=RunningBlocks.of(blocks))
    for blocks in ((0,), (0, 1))
)


class Noted(Reruns):
    """Reruns that count work of own kernels, and may refuse the modules' decode step or the kernels' prefill."""

    def __init__(self, refuses_modules: bool = False, refuses_prefill: bool = False) -> None:
        self._refuses_modules, self._refuses_prefill, self.num_kernels = refuses_modules, refuses_prefill, 0

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        self.num_kernels += isinstance(work, partial)
        if self._refuses_modules and isinstance(getattr(work, "__self__", None), FixedCacheDecode):
            raise ConfigurationError("it asks the host")
        if self._refuses_prefill and isinstance(work, partial) and work.func is prefill_forward.last_state:
            raise ConfigurationError("it is too large")
        return super().capture(work)


def settled(folder: Path, settings: Sequence[Setting], capturer: Noted, is_changed: bool = False) -> dict[str, Any]:
    """How the settings of a run are executed.

    Args:
        is_changed: whether block 1 gets another weight once the kernels have theirs.
    """
    plain = read(folder)
    model = TransformersModel(plain.name, plain.model, plain.requests, "auto", capturer)
    if is_changed:
        output = model.decoder_blocks[1].self_attn.o_proj
        output.weight = nn.Parameter(output.weight * 1.01)
    assert model._graphed is not None
    kernels = weakref.ref(model._graphed.parts)
    requests = RequestSource(Numbers(), model, (7,), 0, 0, None, keep_pictures=False)
    proofs = settle_execution(model, requests, settings, (7,), 4, None, Accelerator(cpu=True))
    described = model.describe()
    assert all(proof.execution_reason == described["execution_reason"] for proof in proofs.values())
    return {
        "decode": [(proof.execution_stages or {})["decode"] for proof in proofs.values()],
        "is_proven": all(proof.engine_error is not None for proof in proofs.values()),
        "ways": list(described["execution_stages"].values()),
        "reason": described["execution_reason"],
        "num_kernels": capturer.num_kernels,
        "has_kernels": kernels() is not None,
    }


def main() -> None:
    torch.set_num_threads(1)
    take_few_programs()
    with TemporaryDirectory() as name:
        folder = write_checkpoint("llama", Path(name))
        config = AutoConfig.from_pretrained(folder)
        config.head_dim, config.num_hidden_layers = 16, 2
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        found = {
            "taken": settled(folder, [FIRST, BOTH], Noted()),
            "refused": settled(folder, [FIRST, BOTH], Noted(), is_changed=True),
            "refused prefill": settled(folder, [FIRST], Noted(refuses_prefill=True)),
            "refused twice": settled(folder, [BOTH], Noted(refuses_modules=True), is_changed=True),
        }
        load_knob_module(Path("knob_profiler.head_fraction"))
        found["on modules"] = settled(folder, [FIRST, BOTH.replaced(head_fraction=0.5)], Noted())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
