"""The command that writes the table of a full grid."""

from pathlib import Path

import pytest

from experiments.analyses.knobs.grid import load_study
from experiments.analyses.recorded_table import read_table
from experiments.core_exp import collect_table
from tests.models.tiny_checkpoints import write_checkpoint

NO_EXTRAS = ["--max_new_tokens", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
"--drift_check_every", "0",
             "--num_threads", "1"]  # fmt: skip


def test_flags_that_are_not_its_own_go_to_the_pipeline(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "new" / "table.json"
    flags = ["--tier_list", "low", "--top_k_list", "2", "4", "--num_active_blocks_list", "3", "--model_path",
             str(tiny_checkpoint), *NO_EXTRAS]  # fmt: skip
    assert collect_table.main([str(table), "--results_dir", str(tmp_path / "run"), "--num_samples", "2", *flags]) == 0
    assert "2 settings x 2 samples" in capsys.readouterr().out
    assert read_table(table).settings == ("tier-low_topk2_blocks3", "tier-low_topk4_blocks3")


def test_a_model_without_experts_has_a_table_that_is_read(tmp_path: Path) -> None:
    model, table = write_checkpoint("llama", tmp_path / "model"), tmp_path / "table.json"
    flags = [f"--model_path={model}", "--num_active_blocks_list", "2", "3", "--num_samples", "2", *NO_EXTRAS]
    assert collect_table.main([str(table), "--results_dir", str(tmp_path / "run"), *flags]) == 0
    study = load_study([table])
    assert [point.key for point in study.grids[0].points] == ["own_topknone_blocks2", "own_topknone_blocks3"]
    assert [(point.vision, point.top_k) for point in study.grids[0].points] == 2 * [("own", None)]


def test_a_wrong_flag_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_table.main([str(tmp_path / "table.json"), "--no_such_flag", "1"]) == 2
    assert "--no_such_flag" in capsys.readouterr().err
