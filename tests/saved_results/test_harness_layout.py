"""Results in the layouts of lm-eval and lmms-eval: names, hashes and figures by hand; edited and INVALID ones."""

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.setting_result import SettingResult, read_setting
from experiment_core_utils.saved_results.harness_layout import Harness, folder_name, metric_key, own_content
from experiments.analyses.harness_results import harness_files, read_harness
from experiments.core_exp.export import main
from tests.experiments.hand_made_sweep import FLOPS, PROVENANCE, reference, result, setting, write, write_signed
from tests.hand_made_records import measured_sample, staged_run

STAMPED = {"timestamp": "2026-03-01T13:05:09+01:00"}
SETTING = "own_topk4_blocks4"


def exported(tmp_path: Path, to: Harness, **provenance: Any) -> Path:
    """Three samples, not in order of their ids, with scores 1, 0.5 and 0, at the reference and at another setting."""
    made = [
        measured_sample(7, staged_run(vision_s=0.5), prediction="1.0", flops=FLOPS),
        measured_sample(2, staged_run(vision_s=0.25), prediction="0.5", flops=FLOPS),
        measured_sample(4, staged_run(vision_s=0.75), prediction="0.0", flops=FLOPS),
    ]
    given = STAMPED | provenance
    folder = write(tmp_path / "run", reference(made, **given), result(setting(), made, **given))
    assert main([str(folder), "--to", to, "--output", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_lm_eval_finds_its_files_keys_and_figures(tmp_path: Path) -> None:
    folder = exported(tmp_path, "lm-eval") / f"folder__tiny__{SETTING}"
    assert sorted(each.name for each in folder.iterdir()) == [
        "results_2026-03-01T12-05-09.json",
        "samples_signs_2026-03-01T12-05-09.jsonl",
    ]
    content = json.loads((folder / "results_2026-03-01T12-05-09.json").read_text())
    # The mean of 1, 0.5 and 0; their standard deviation by n - 1 is 0.5, over the root of 3.
    assert content["results"] == {
        "signs": {
            "alias": "signs",
            "sample_len": 3,
            "read_off,none": 0.5,
            "read_off_stderr,none": pytest.approx(0.5 / 3**0.5),
        }
    }
    assert content["n-samples"] == {"signs": {"original": 100, "effective": 3}}
    assert content["higher_is_better"] == {"signs": {"read_off": True}}
    assert content["date"] == 1772366709.0
    assert content["model_name"] == f"folder/tiny/{SETTING}" and content["model_name_sanitized"] == folder.name
    own = content["knobprof"]["signs"]
    assert own["setting"] == SETTING and own["knobs"] == {"vision": "own", "top_k": 4, "num_active_blocks": 4}
    # 250, 500 and 750 ms of vision.
    assert own["quantities"]["T_vision_total"]["mean"] == pytest.approx(500.0)
    assert own["quantities"]["T_vision_total"]["unit"] == "ms"
    low, high = own["quantities"]["T_vision_total"]["ci95"]
    assert low < 500 < high
    assert own["quantities"]["prefill_flops"]["mean"] == 2e9
    assert own["energy"] is None and "energy_j" not in own["quantities"]

    first, second, third = map(
        json.loads, (folder / "samples_signs_2026-03-01T12-05-09.jsonl").read_text().splitlines()
    )
    assert [each["doc_id"] for each in (first, second, third)] == [7, 2, 4]
    assert [each["read_off"] for each in (first, second, third)] == [1.0, 0.5, 0.0]
    doc = {
        "question": "what?",
        "answers": ["stop"],
        "options": [],
        "answer_index": None,
        "image_id": "picture-2",
        "question_type": "reading",
    }
    assert second["doc"] == doc and second["doc_hash"] == sha256(json.dumps(doc, indent=2))
    assert (second["prompt_hash"], second["target_hash"]) == (sha256("what?"), sha256("stop"))
    assert second["arguments"]["gen_args_0"]["arg_0"] == "what?"
    assert (second["resps"], second["filtered_resps"]) == ([["0.5"]], ["0.5"])
    assert (second["target"], second["filter"], second["metrics"]) == ("stop", "none", ["read_off"])
    assert second["knobprof"]["T_vision_total"] == 250.0 and second["knobprof"]["energy_j"] is None
    hashes = "".join(each["doc_hash"] + sha256("what?") + sha256("stop") for each in (first, second, third))
    assert content["task_hashes"] == {"signs": sha256(hashes)}


def test_lmms_eval_finds_its_files_and_rows(tmp_path: Path) -> None:
    folder = exported(tmp_path, "lmms-eval") / f"tiny__{SETTING}"
    content = json.loads((folder / "20260301_120509_results.json").read_text())
    error = pytest.approx(0.5 / 3**0.5)
    errors = {"read_off_stderr,none": error, "read_off_stderr_clt,none": error, "read_off_stderr_clustered,none": "N/A"}
    assert content["results"] == {"signs": {"alias": "signs", "read_off,none": 0.5, **errors}}
    assert content["date"] == "20260301_120509"
    rows = [json.loads(line) for line in (folder / "20260301_120509_samples_signs.jsonl").read_text().splitlines()]
    row = rows[1]
    assert (row["doc_id"], row["input"], row["target"], row["filtered_resps"]) == (2, "what?", "stop", "0.5")
    assert row["token_counts"] == [{"input_tokens": 422, "output_tokens": 3}]
    # Only what differs from the filtered response is kept, and no row of the data.
    assert "resps" not in row and "doc" not in row
    assert content["task_hashes"] == {
        "signs": sha256("".join(f"sample_{place}{each['doc_hash']}" for place, each in enumerate(rows)))
    }


@pytest.mark.parametrize("to", get_args(Harness))
def test_a_setting_has_a_folder_and_its_verdict(
    tmp_path: Path, to: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = {"kind": "throttled", "severity": "warning", "figures": {"fraction": 0.5}, "advice": None}
    busy["figures"] |= {"num_runs": 1, "num_all": 2, "reasons": ["hw_thermal_slowdown"]}
    made = exported(tmp_path, to, caveat_records=[busy])
    folders = sorted(each.name for each in made.iterdir())
    assert [each.partition("tiny__")[2] for each in folders] == [SETTING, "tier-low_topk2_blocks3"]
    (path,) = made.glob(f"*{SETTING}/*results*.json")
    own = json.loads(path.read_text())["knobprof"]["signs"]
    assert own["verdict"] == "INVALID" and len(own["voided_by"]) == 1
    assert capsys.readouterr().out.startswith(f"INVALID: {own['voided_by'][0]}")


def test_edited_results_are_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", reference(run_uid="one"))
    (path,) = folder.glob("*.json")
    path.write_text(path.read_text().replace('"accuracy": 1.0', '"accuracy": 0.75', 1))
    assert main([str(folder), "--to", "lm-eval"]) == 2
    assert "EDITED" in capsys.readouterr().err
    # Also where the digest was made anew, by a figure that is not that of its samples.
    content = reference(run_uid="one")
    content["aggregate_stats"]["T_total_mean"] = 1.0
    write_signed(path, content)
    assert main([str(folder), "--to", "lm-eval"]) == 2
    assert "aggregate_stats.T_total_mean is 1.0" in capsys.readouterr().err
    assert not (folder / "lm-eval").exists()


def test_an_absent_accuracy_has_no_key(tmp_path: Path) -> None:
    made = [measured_sample(0, prediction="none"), measured_sample(1, prediction="none")]
    folder = write(tmp_path / "run", reference(made, **STAMPED))
    assert main([str(folder), "--to", "lm-eval"]) == 0
    (path,) = folder.glob("lm-eval/*/results_*.json")
    assert json.loads(path.read_text())["results"] == {"signs": {"alias": "signs", "sample_len": 2}}


def test_names_of_metrics_and_folders() -> None:
    assert metric_key("em", "lm-eval") == ("exact_match", "none")
    assert metric_key("mc", "lm-eval") == ("acc", "none") and metric_key("mc", "lmms-eval") == ("exact_match", "none")
    assert metric_key("gsm8k_flexible", "lm-eval") == ("exact_match", "flexible-extract")
    assert metric_key("lmms_eval_ai2d.exact_match", "lmms-eval") == ("exact_match", "none")
    assert metric_key("acc_norm", "lm-eval") == ("acc_norm", "none")
    # As `sanitize_model_name` of each.
    assert folder_name("/a/b:c/d", "lm-eval") == "__a__b__c__d" and folder_name("/a/b:c/d", "lmms-eval") == "b__c__d"


@pytest.mark.parametrize("to", get_args(Harness))
def test_an_export_names_its_run_and_its_figures_can_be_made_again(tmp_path: Path, to: Harness) -> None:
    """By what the files have: ids and digests, the mean of the samples' scores, and of their stages."""
    made = [measured_sample(at, staged_run(vision_s=0.5 + at), prediction=f"{at / 4}", flops=FLOPS) for at in (3, 1, 0)]
    folder = write(tmp_path / "run", reference(made, run_uid="one", **STAMPED))
    (stored,) = folder.glob("*.json")
    assert main([str(folder), "--to", to, "--output", str(tmp_path / "out")]) == 0
    (path,), (samples,) = (list((tmp_path / "out").glob(f"*/*{what}*")) for what in ("results", "samples"))
    content = json.loads(path.read_text())
    own, rows = content["knobprof"]["signs"], list(map(json.loads, samples.read_text().splitlines()))
    result_file = json.loads(stored.read_text())
    assert (own["run_uid"], own["experiment_id"], own["digest"]) == ("one", "0001", result_file["digest"])
    assert own["samples_sha256"] == sha256(samples.read_text())
    assert sum(each["read_off"] for each in rows) / 3 == pytest.approx(own["accuracy"]) == pytest.approx(1 / 3)
    assert content["results"]["signs"]["read_off,none"] == pytest.approx(1 / 3)
    for name, quantity in own["quantities"].items():
        values = [each["knobprof"][name] for each in rows if each["knobprof"][name] is not None]
        assert sum(values) / len(values) == pytest.approx(quantity["mean"])
    assert own["quantities"]["T_vision_total"]["mean"] == pytest.approx(1e3 * (0.5 + 4 / 3))
    samples.write_text(samples.read_text().replace("0.75", "1.0", 1))
    with pytest.raises(ResultsRefused, match="was EDITED: its digest is that of another content; export the run again"):
        read_harness(tmp_path / "out", harness_files(tmp_path / "out"))


def test_own_content_keeps_the_files_identity(tmp_path: Path) -> None:
    folder = write(tmp_path, reference(run_uid="one"))
    found: SettingResult = read_setting(next(folder.glob("*.json")))
    content = own_content(found)
    assert (content["run_uid"], content["digest"]) == ("one", found.digest)
    assert PROVENANCE["model"]["name"] == found.provenance.model.name
