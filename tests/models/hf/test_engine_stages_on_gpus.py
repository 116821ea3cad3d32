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
    assert found == {
        family: {"vision": "modules", "prefill": "kernel graph", "decode": "kernel graph"}
    }
