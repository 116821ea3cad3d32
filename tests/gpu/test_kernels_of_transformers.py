"""A model of transformers with pictures by own kernels on a GPU: its answers are those of its modules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.gpu.test_runs import DRIVER, ran, results_in
from tests.models.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
GRID = (
    *("--tier_list", "low", "--top_k_list", "1", "3", "--num_active_blocks_list", "2", "3"),
    *("--num_samples", "8", "--num_runs_per_sample", "2", "--max_new_tokens", "6", "--no_reference"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL-MoE whose features enter behind several blocks, of widths that the kernels take."""
    folder = write_checkpoint("qwen3_vl_moe", tmp_path_factory.mktemp("model"))
    config: Any = AutoConfig.from_pretrained(folder)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = 48
    text.head_dim, text.moe_intermediate_size = 16, 16
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [4, 2, 2]}
    torch.manual_seed(5)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def profiled(checkpoint: Path, folder: Path, *more: str) -> dict[str, Any]:
    ran(*DRIVER, "--model_path", str(checkpoint), "--output_dir", str(folder), *GRID, *more)
    return results_in(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_profile_by_own_kernels(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    own = profiled(checkpoint, tmp_path / "kernels", "--execution", "kernels", "--precision", dtype)
    # Nothing was refused, so that `auto` runs the same.
    chosen = profiled(checkpoint, tmp_path / "auto", "--precision", dtype)
    assert own.keys() == chosen.keys() and own
    for result in (*own.values(), *chosen.values()):
        stages = {"vision": "cuda graph", "prefill": "kernel graph", "decode": "kernel graph"}
        assert result["realised"]["execution_stages"] == stages, json.dumps(result["provenance"]["model"])
        assert result["realised"]["execution_reason"] is None
        assert result["realised"]["engine_error"] is not None
    if dtype == "float32":
        modules = profiled(checkpoint, tmp_path / "modules", "--execution", "eager", "--precision", dtype)
        assert own.keys() == modules.keys()
        for name, result in modules.items():
            pairs = zip(own[name]["per_sample_results"], result["per_sample_results"], strict=True)
            assert all(mine["pred"] == theirs["pred"] for mine, theirs in pairs)
