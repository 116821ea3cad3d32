"""The program that scores blocks, from flags to the files that the profiler reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.block_choice import (
    OWN_SCORES_FILE,
    BlockChoice,
    choice_by_scores,
    choice_by_sets,
    provenance_path,
    read_block_sets,
    read_importance,
)
from experiment_core_utils.models.common.checkpoint_files import weights_digest
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiments.block_importance import score_blocks
from experiments.block_importance.importance import Estimate
from experiments.block_importance.score_blocks import least_line, main
from tests.models.tiny_checkpoints import write_checkpoint


def run(checkpoint: Path, output: Path, *more: str) -> dict[str, Any]:
    flags = ["--model_path", str(checkpoint), "--output", str(output), "--device", "cpu", "--num_threads", "1",
             "--vision_tokens_list", "288"]  # fmt: skip
    assert main([*flags, *more]) == 0
    found: dict[str, Any] = json.loads(provenance_path(output).read_text())
    return found


@pytest.mark.parametrize("method", ["leave_one_out", "activation_change", "gradient"])
def test_every_method_scores_every_block(tiny_checkpoint: Path, tmp_path: Path, method: str) -> None:
    output = tmp_path / "scores.json"
    tasks = ("reference_vqa", "reference_choice")
    provenance = run(
        tiny_checkpoint, output, "--dataset_name", *tasks, "--num_samples", "2", "--method", method, "--batch_size", "2"
    )
    scores = read_importance(output)
    assert list(scores) == [0, 1, 2, 3]
    assert provenance["method"] == method
    assert provenance["tasks"].keys() == set(tasks)
    assert provenance["tasks"]["reference_vqa"]["samples"] == {"scored": 2, "held_out": 0}
    # RandomState(42).choice(2000, 2, replace=False).
    questions = choice_by_scores(output).questions
    assert questions is not None and questions["reference_vqa"].scored_ids == (353, 1860)
    for block, score in scores.items():
        recorded = provenance["blocks"][str(block)]
        assert recorded["score"] == score == pytest.approx(sum(recorded["by_task"].values()) / 2)
    if method != "leave_one_out":
        assert min(scores.values()) > 0


def test_scores_by_likelihood_are_compared_on_other_pictures(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.json"
    provenance = run(
        tiny_checkpoint, output, "--dataset_name", "reference_vqa", "reference_counting", "--measure", "answer_loss",
        "--num_samples", "12", "--held_out", "6", "--num_active_blocks", "2", "3",
    )  # fmt: skip
    # Six questions a picture.
    assert provenance["tasks"]["reference_vqa"]["samples"] == {"scored": 8, "held_out": 4}
    ranked = sorted((1, 2, 3), key=read_importance(output).__getitem__, reverse=True)
    held_out = provenance["held_out"]
    assert held_out["2"]["blocks"] == [0, ranked[0]]
    baselines = held_out["3"]["baselines"]
    assert baselines["first"]["sets"] == [[0, 1, 2]] and len(baselines["random"]["sets"]) == 3
    for each in baselines.values():
        gain = held_out["3"]["chosen"]["score"] - each["score"]["score"]
        assert each["gain"]["score"] == pytest.approx(gain)
    assert "the first blocks ([0, 1, 2]): " in capsys.readouterr().out


@pytest.mark.parametrize("measure", ["accuracy", "answer_loss"])
def test_a_check_compares_given_scores_by_accuracy(tiny_checkpoint: Path, tmp_path: Path, measure: str) -> None:
    output = tmp_path / "scores.json"
    output.write_text('{"0": 9, "1": 0.1, "2": 0.3, "3": 0.2}')
    flags = ["--model_path", str(tiny_checkpoint), "--output", str(output), "--device", "cpu", "--num_threads", "1",
             "--vision_tokens_list", "288", "--check", "--dataset_name", "reference_counting", "--num_samples", "2",
             "--held_out", "2", "--num_active_blocks", "2", "3", "--measure", measure]  # fmt: skip
    assert main(flags) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["scores.held_out.json", "scores.json"]
    found = json.loads((tmp_path / "scores.held_out.json").read_text())
    assert found["measure"].startswith("accuracy")
    assert [found["held_out"][count]["blocks"] for count in ("2", "3")] == [[0, 2], [0, 2, 3]]
    influence = tmp_path / "influence.json"
    scored = [*flags[:2], "--output", str(influence), *flags[4:8], "--vision_tokens_list", "288", "--dataset_name",
              "reference_counting", "--num_samples", "2", "--method", "activation_change"]  # fmt: skip
    assert measure == "answer_loss" or main(scored) == 0
    for count, each in found["held_out"].items():
        assert 0 <= each["chosen"]["score"] <= 1
        if measure == "accuracy":  # of the same questions as the scores by activations
            by_influence = BlockChoice(scores=read_importance(influence)).blocks(int(count), 4)
            assert each["baselines"]["block_influence"]["sets"] == [list(by_influence)]


@pytest.mark.parametrize("measure", ["accuracy", "answer_loss"])
def test_a_check_on_samples_that_made_the_scores_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, measure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.json"
    flags = ("--dataset_name", "reference_counting", "--measure", measure)
    run(tiny_checkpoint, output, *flags, "--num_samples", "4")
    given = ["--model_path", str(tiny_checkpoint), "--output", str(output), "--device", "cpu", *flags, "--check"]
    # The first two of the four are scored, so that the others are held out.
    assert main([*given, "--num_samples", "2", "--held_out", "2"]) == 2
    assert "2 of the held-out samples of reference_counting validation made the scores" in capsys.readouterr().err
    assert not (tmp_path / "scores.held_out.json").exists()
    assert main([*given, "--num_samples", "4", "--held_out", "2", "--num_threads", "1"]) == 0


def test_sets_are_written_for_every_count(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "sets.json"
    provenance = run(
        tiny_checkpoint, output, "--dataset_name", "reference_vqa", "--measure", "answer_loss", "--num_samples", "4",
        "--select", "beam", "--beam_width", "2", "--num_active_blocks", "2", "3",
    )  # fmt: skip
    sets = read_block_sets(output)
    assert set(sets) == {2, 3}
    # One picture of RandomState(42).choice(500, 1), with its four questions.
    questions = choice_by_sets(output).questions
    assert questions is not None and questions["reference_vqa"].scored_ids == (1444, 1445, 1446, 1447)
    assert (provenance["method"], provenance["beam_width"]) == ("beam", 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--select", "greedy", "--method", "gradient"], "drop one"),
        (["--measure", "answer_loss", "--method", "gradient"], "not for gradient"),
        (["--held_out", "3", "--method", "gradient"], "--held_out"),
        (["--check"], "give --held_out N"),
        (["--num_samples", "0"], "at least 1"),
        (["--held_out", "-1"], "--held_out -1 is not possible; give at least 0"),
        (["--num_samples", "2000", "--held_out", "5"], "none are left"),
        (["--measure", "answer_loss", "--num_samples", "9000"], "2250 pictures are requested and 500 are there"),
        (["--dataset_name", "imagenet"], "unknown task"),
        (["--execution", "graph"], "--execution graph calls no modules"),
        (["--use_magic"], "unrecognized"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model_path", str(tiny_checkpoint), "--output", str(tmp_path / "x.json"), "--device", "cpu", *flags]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--method", "gradient"], ["--measure", "answer_loss"]])
def test_what_a_checkout_alone_has_is_refused_in_an_installed_package(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(score_blocks, "IS_CHECKOUT", False)
    assert main([*flags, "--output", str(tmp_path / "scores.json")]) == 2
    assert f"{' '.join(flags)} is run from a checkout of the project; drop it here" in capsys.readouterr().err


@pytest.mark.parametrize(("taken", "flags"), [
    ("scores.json", []), ("scores.provenance.json", []), ("scores.held_out.json", ["--check", "--held_out", "2"]),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_looked_for(
    taken: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder has the name of a file that would be written, or a file that of its folder."""
    (tmp_path / taken).mkdir()
    (tmp_path / "file").write_text("")
    more = ["--model_path", str(tmp_path / "no model"), "--device", "cpu", *flags]
    assert main(["--output", str(tmp_path / "scores.json"), *more]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / taken} cannot be written (Is a directory); a folder has this name; move it away or give "
        "another name\n"
    )
    assert main(["--output", str(tmp_path / "file" / "scores.json"), *more]) == 2
    error = capsys.readouterr().err
    assert "cannot be written (Not a directory); a file has the name of a folder that is needed" in error
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["file", taken])


def test_the_embedded_models_scores_are_of_its_weights() -> None:
    """Else they would choose blocks of a model that is no longer there."""
    path = EMBEDDED_MODEL / OWN_SCORES_FILE
    provenance = json.loads(provenance_path(path).read_text())
    assert provenance["model"]["weights_sha256"] == weights_digest(EMBEDDED_MODEL)
    assert {block: each["score"] for block, each in provenance["blocks"].items()} == json.loads(path.read_text())
    assert list(read_importance(path)) == list(range(16))
    questions = choice_by_scores(path).questions
    assert questions is not None and {each.split for each in questions.values()} == {"train"}
    assert {name: len(each.scored_ids) for name, each in questions.items()} == {
        name: each["samples"]["scored"] for name, each in provenance["tasks"].items()
    }


def test_scored_and_profiled_questions_of_a_file_do_not_overlap(tmp_path: Path) -> None:
    """The two commands of the how-to on a dense text model: 4 of 11 rows choose the blocks, 7 of 7 asked are others."""
    model = write_checkpoint("llama", tmp_path / "model")
    rows = [f'{{"question": "Is {number} even?", "answer": "yes"}}\n' for number in range(11)]
    (tmp_path / "my.jsonl").write_text("".join(rows))
    shared = ["--model_path", str(model), "--data_file", str(tmp_path / "my.jsonl"), "--device", "cpu",
              "--num_threads", "1"]  # fmt: skip
    scores = model / OWN_SCORES_FILE
    flags = ["--method", "activation_change", "--num_samples", "4", "--output", str(scores)]
    assert main([*shared, *flags]) == 0
    scored = json.loads(provenance_path(scores).read_text())["tasks"]["my"]
    assert len(scored["scored_ids"]) == len(set(scored["scored_sha256"])) == 4
    of_run = ["--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",

              "--max_new_tokens", "2", "--num_active_blocks_list", "2"]  # fmt: skip
    (result,) = run_profiling(
        parse_config([*shared, *of_run, "--num_samples", "7", "--output_dir", str(tmp_path / "results")])
    ).results
    assert result.num_samples == 7
    assert {each.data_sha256 for each in result.per_sample_results}.isdisjoint(scored["scored_sha256"])
    assert {each.sample_id for each in result.per_sample_results}.isdisjoint(scored["scored_ids"])
    assert result.sampling is not None and result.sampling["num_left_out"] == 4
    assert not [each for each in result.provenance.caveat_records if "blocks" in each.kind]
    # Scores alone do not say which questions they are of.
    provenance_path(scores).unlink()
    (result,) = run_profiling(
        parse_config([*shared, *of_run, "--num_samples", "2", "--output_dir", str(tmp_path / "unknown")])
    ).results
    (found,) = [each.sentence for each in result.provenance.caveat_records if "blocks" in each.kind]
    assert found.startswith(f"blocks: {scores} does not say which questions chose them")


@pytest.mark.parametrize("family", ["olmoe", "llava", "qwen3_vl_moe"])
def test_models_of_transformers_are_scored_by_one_pass_a_sample(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path / family)
    flags = ["--model_path", str(model), "--device", "cpu", "--num_threads", "1", "--num_samples", "1"]
    assert main([*flags, "--method", "activation_change", "--output", str(tmp_path / "scores.json")]) == 0
    scores = read_importance(tmp_path / "scores.json")
    assert list(scores) == [0, 1, 2] and min(scores.values()) > 0


def test_the_blocks_that_matter_least_are_named_lowest_first() -> None:
    scores = {
        block: Estimate(value, None, {}) for block, value in enumerate((0.5, 0.125, -0.25, 0.125, 0.75, 1.0, 2.0))
    }
    assert least_line(scores) == (
        "blocks that matter least, of 7 scored: 2 (-0.25), 1 (+0.125), 3 (+0.125), 0 (+0.5), 4 (+0.75)"
    )
