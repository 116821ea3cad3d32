"""The kernels of a GPU, in Triton's interpreter, compute every form of a block that they do not refuse, in float32."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.prefill import GraphedPrefill
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.files import REPOSITORY
from tests.engines.cpu import block_forms
from tests.engines.cpu.block_forms import FORMS, decoder_of_form, in_float64
from tests.engines.interpreter import printed_by
from tests.same_floats import assert_same_floats

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")

REFUSED = {
    "norms_before_and_behind": "the kernels of a GPU compute norms behind a block's parts where dense blocks have no "
    "others"
}
# Of sums of up to 192 products, over three blocks; a wrong form is off by a hundredth and more.
MOST_OFF = 5e-6


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads(printed_by("tests.engines.interpreted_forms"))


@pytest.mark.parametrize("stage", ["decode", "prefill"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in REFUSED])
def test_every_form_is_computed_as_by_float64(found: Any, form: str, stage: str) -> None:
    errors = found[form][stage]
    assert max(errors["logits"], errors["keys"], errors["values"]) < MOST_OFF
    assert errors["experts"]


def test_other_forms_are_refused_by_name(found: Any) -> None:
    assert {form: reason for form, reason in found.items() if isinstance(reason, str)} == REFUSED


@pytest.mark.parametrize("stage", ["decode", "prefill"])
@pytest.mark.parametrize(
    "shape",
    [
        "5_heads_of_80",
        "14_heads_of_112",
        "3_heads_of_208",
        "heads_of_18",
        "rows_of_5120",
        "heads_of_4160_in_all",
        "260_experts",
    ],
)
def test_odd_sizes_are_computed_as_by_float64(found: Any, shape: str, stage: str) -> None:
    errors = found[shape][stage]
    assert max(errors["logits"], errors["keys"], errors["values"]) < MOST_OFF
    assert errors["experts"]


@pytest.mark.parametrize("form", ["dense", "norms_of_each_head"])
def test_positions_that_repeat_and_states_that_are_added(found: Any, form: str) -> None:
    """Beside plain torch: the prompt's last state, keys, and steps whose positions are 3 less than their places."""
    assert max(found[f"{form} with pictures"].values()) < MOST_OFF


@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_form_is_built_for_a_gpu(capability: str) -> None:
    """By Triton and ptxas, which need none: no program wants more shared memory than there is."""
    pytest.importorskip("triton", minversion="3.7")
    command = [sys.executable, "-m", "tests.engines.compiled_forms", capability]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["forms"].keys() == FORMS.keys() - REFUSED.keys()
    for kernels in found["forms"].values():
        assert {"attention_kernel", "down_kernel", "apply_rope_and_store_kernel"} <= {one["kernel"] for one in kernels}
        assert all(one["shared"] <= found["memory"] for one in kernels)
    assert "gated_kernel" in {one["kernel"] for one in found["forms"]["dense"]}


def on_gpu(decoder: DecoderWeights) -> DecoderWeights:
    def moved(part: Any, names: Iterable[str]) -> Any:
        return replace(part, **{name: getattr(part, name).to("cuda") for name in names})

    blocks = tuple(moved(block, block.tensors) for block in decoder.blocks)
    return replace(moved(decoder, ("embedding", "final_norm", "head", "inverse_frequencies")), blocks=blocks)


@needs_gpu
@pytest.mark.parametrize("form", [form for form in FORMS if form not in REFUSED])
@torch.inference_mode()
def test_every_form_on_a_gpu(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps from an empty cache, then a prompt; a block is left out."""
    monkeypatch.setattr(block_forms, "WIDTH", 80)
    monkeypatch.setattr(block_forms, "INNER", 48)
    host = decoder_of_form(form)
    decoder, knobs, steps = on_gpu(host), EngineKnobs(2, (0, 2)), 9
    kv_cache, decode = KVCache.allocate(decoder, 128, blocks=2), GraphedDecode(decoder)
    kv_cache.set_lengths([0])
    tokens, logits = [], []
    for _ in range(steps):
        tokens.append(kv_cache.next_tokens.cpu())
        logits.append(decode.step(knobs, kv_cache).cpu())
        kv_cache.note_step()
    expected = in_float64(host, host.embedding[torch.cat(tokens)], knobs)
    assert_same_floats(torch.cat(logits), expected.logits)
    assert_same_floats(kv_cache.keys[:, 0, :, :steps].cpu(), expected.keys)
    rows = torch.randn(70, host.width, generator=torch.Generator().manual_seed(5))
    found = GraphedPrefill(decoder).prefill(rows.to("cuda"), knobs, kv_cache).cpu()
    expected = in_float64(host, rows, knobs)
    assert_same_floats(found[0], expected.logits[-1])
    assert_same_floats(kv_cache.values[:, 0, :, :70].cpu(), expected.values)
