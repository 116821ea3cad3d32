"""Models of transformers by a GPU's own kernels, in Triton's interpreter, give what the modules give."""

import json

import pytest

from tests.engines.interpreter import printed_by


@pytest.mark.parametrize("family", ["qwen2", "olmoe", "qwen3_moe", "qwen3_vl_moe"])
def test_prompts_and_steps_at_several_settings(family: str) -> None:
    """Biases and windows; norms over all heads; a dense first block and norms of each head; pictures' positions and
    features that enter behind the first blocks.
    """
    found = json.loads(printed_by("tests.models.hf.interpreted_engines", family))
    assert found == {family: {"vision": "modules", "prefill": "kernel graph", "decode": "kernel graph"}}


def test_a_batch_is_answered_as_its_requests_alone() -> None:
    """Steps run ahead of the tokens that the host reads."""
    found = json.loads(printed_by("tests.models.hf.interpreted_batch"))
    assert (found["decode"], found["steps"]) == ("kernel graph", [3, 3])
    assert found["together"] == found["alone"] and found["alone"][0] != found["alone"][1]


def test_auto_takes_kernels_and_where_one_setting_is_refused_the_next_way_for_all() -> None:
    """A changed weight makes kernels wrong where its block is active; a knob on modules is seen before kernels run."""
    found = json.loads(printed_by("tests.models.hf.interpreted_auto"))
    captured = {
        "decode": ["cuda graph"] * 2,
        "is_proven": True,
        "ways": ["modules", "cuda graph", "cuda graph"],
        "has_kernels": False,
    }
    refusal = found["refused"]["reason"]
    assert refusal.startswith(
        "own kernels do not run it: tier-low_blocks2: the kernel graph engine of the prefill is off by "
    )
    assert "--execution" not in refusal
    assert found == {
        "taken": {
            "decode": ["kernel graph"] * 2,
            "is_proven": True,
            "ways": ["modules", "kernel graph", "kernel graph"],
            "reason": None,
            "num_kernels": 4,
            "has_kernels": True,
        },
        "refused": {**captured, "reason": refusal, "num_kernels": 4},
        "refused prefill": {
            **captured,
            "decode": ["cuda graph"],
            "reason": "own kernels do not run it: tier-low_blocks1: the kernel graph engine of the prefill: "
            "it is too large",
            "num_kernels": 1,
        },
        "refused twice": {
            **captured,
            "decode": ["cuda graph"],
            "reason": f"{refusal}; no graph of a decode step fits all lengths: tier-low_blocks2: it asks the host",
            "num_kernels": 2,
        },
        "on modules": {
            **captured,
            "reason": "own kernels do not run it: tier-low_blocks2_head0.5: head_fraction acts on modules, which "
            "engines do not run",
            "num_kernels": 0,
        },
    }
