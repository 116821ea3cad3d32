"""The command that writes the table of a full grid."""

from pathlib import Path

import pytest

from experiment_core_utils.knobs.interface import KnobLimits
from experiments.analyses.knobs.grid import load_study
from experiments.analyses.recorded_table import read_table
from experiments.core_exp import collect_table
from tests.models.tiny_checkpoints import write_checkpoint

NO_EXTRAS = ["--max_new_tokens", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",

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
    assert [point.key for point in study.grids[0].points] == ["own_blocks2", "own_blocks3"]
    settings = [point.setting for point in study.grids[0].points]
    assert [(each.level("vision"), each.level("top_k")) for each in settings] == 2 * [("own", None)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        # The embedded model: the published grid.
        (KnobLimits(16, 64, 8), {"--top_k_list": "1 2 4 8", "--num_active_blocks_list": "12 13 14 15 16"}),
        # A number of experts that is no power of 2; three quarters of 30 blocks are 22.5.
        (KnobLimits(30, 60, 6), {"--top_k_list": "1 2 4 6", "--num_active_blocks_list": "23 25 26 28 30"}),
        (KnobLimits(3, None, None, {"top_k": "no experts"}), {"--num_active_blocks_list": "3"}),
        (KnobLimits(3, None, None, {"top_k": "no experts", "num_active_blocks": "one list"}), {}),
        (KnobLimits(16, 64, 8, untried_reason="its code needs values"), {}),
    ],
)
def test_the_full_grid_covers_what_each_knob_can_be(limits: KnobLimits, expected: dict[str, str]) -> None:
    assert {flag: " ".join(values) for flag, values in collect_table.full_grid(limits).items()} == expected


def test_a_wrong_flag_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_table.main([str(tmp_path / "table.json"), "--no_such_flag", "1"]) == 2
    assert "--no_such_flag" in capsys.readouterr().err
