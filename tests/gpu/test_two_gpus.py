"""A model over two GPUs: marks wait for both, and a whole run has the answers of one GPU."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.device import new_marks
from tests.gpu.test_runs import DRIVER, ran, results_in
from tests.models.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="runs on two GPUs")
FEW = ("--num_samples", "3", "--top_k_list", "1", "2", "--num_active_blocks_list", "2", "--max_new_tokens", "4",
       "--precision", "float32", "--execution", "eager")  # fmt: skip


def test_a_mark_is_reached_when_both_have_done_their_work() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    factor = torch.ones(4096, 4096, device=second)
    marks = new_marks(first, second)
    marks.mark()
    for _ in range(50):
        factor = factor @ factor
    marks.mark()
    assert len(marks.seconds()) == 1
    # Reading the marks waits for the newest one, and so for the other GPU.
    assert torch.cuda.current_stream(second).query()


def test_a_run_over_two_gpus_has_the_answers_of_one(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_checkpoint("olmoe", tmp_path / "model")
    for name, more in (("one", ()), ("two", ("--device_map", "auto"))):
        ran(*DRIVER, *FEW, *more, "--model_path", str(folder), "--output_dir", str(tmp_path / name))
    one, two = (results_in(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 3
    for name, result in two.items():
        places = set(result["provenance"]["model"]["device_map"].values())
        assert places == {"cuda:0", "cuda:1"}
        assert [each["pred"] for each in result["per_sample_results"]] == [
            each["pred"] for each in one[name]["per_sample_results"]
        ]
