"""The kernels of a GPU, in Triton's interpreter, compute every form of a block that they do not refuse, in float32."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from experiment_core_utils.primitives.files import REPOSITORY
from tests.engines.cpu.block_forms import FORMS

REFUSED = {
    "dense_first_then_shared": "the kernels of a GPU do not compute shared_down, shared_gate_up",
    "gated_shared": "the kernels of a GPU do not compute shared_down, shared_gate, shared_gate_up",
    "norms_behind": "the kernels of a GPU do not compute post_attention_norm, post_ffn_norm",
    "norms_before_and_behind": "the kernels of a GPU do not compute post_attention_norm, post_ffn_norm",
}
# Of sums of up to 192 products, over three blocks; a wrong form is off by a hundredth and more.
MOST_OFF = 5e-6


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails with NumPy 2.4
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.engines.interpreted_forms"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("stage", ["decode", "prefill"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in REFUSED])
def test_every_form_is_computed_as_by_float64(found: Any, form: str, stage: str) -> None:
    errors = found[form][stage]
    assert max(errors["logits"], errors["keys"], errors["values"]) < MOST_OFF
    assert errors["experts"]


def test_other_forms_are_refused_by_name(found: Any) -> None:
    assert {form: reason for form, reason in found.items() if isinstance(reason, str)} == REFUSED


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
