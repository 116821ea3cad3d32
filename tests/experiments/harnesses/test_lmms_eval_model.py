"""lmms-eval's run of the model knobprof and this project's run of lmms-eval's task give the same answers and figures;
runs where the package is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, Features, Value
from datasets import Image as Picture

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.tasks import registry
from experiments.core_exp.compare_runs import main as compare
from tests.tasks.datasets.layouts import BLUE, GREEN, RED, plain, stored

REPOSITORY = Path(__file__).resolve().parents[3]
TASK = """
task: colours
dataset_path: parquet
dataset_kwargs: {{data_files: {{validation: {folder}/colours.parquet}}}}
validation_split: validation
output_type: generate_until
doc_to_visual: !function colours.pictures
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 8, temperature: 0, do_sample: false}}
process_results: !function colours.score
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CODE = """
def pictures(doc):
    return [doc["image"]]

def score(doc, results):
    return {"exact_match": float(results[0].strip().lower() == doc["answer"])}
"""
TEMPLATE = " User: {question} Assistant:"


def run_in(folder: Path, *arguments: object) -> str:
    places = {"LMMS_EVAL_DATASETS_CACHE": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "cache")}
    found = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **places, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return found.stdout


def test_the_same_number_from_lmms_eval_and_from_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lmms_eval", reason="lmms-eval is not installed: pip install lmms-eval")
    monkeypatch.setattr(registry, "_registered_metrics", {})
    monkeypatch.setenv("LMMS_EVAL_DATASETS_CACHE", str(tmp_path / "cache"))
    features = Features({"image": Picture(), "question": Value("string"), "answer": Value("string")})
    colours = [(RED, "red"), (GREEN, "green"), (BLUE, "blue"), (RED, "no answer of this model"), (GREEN, "green")]
    rows = [
        {"image": stored(plain(colour, (64 + 9 * at, 48))), "question": "which colour is the shape?", "answer": name}
        for at, (colour, name) in enumerate(colours)
    ]
    Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "colours.parquet"))
    (tmp_path / "colours.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "colours.py").write_text(CODE)
    arguments = f"pretrained={EMBEDDED_MODEL},top_k=4,output_dir={tmp_path / 'run'},prompt_template={TEMPLATE}"
    given = ["--tasks", "colours", "--include_path", tmp_path, "--log_samples", "--output_path", tmp_path / "theirs"]
    run_in(tmp_path, "experiments.harnesses.lmms_eval_model", "--model", "knobprof", "--model_args", arguments, *given)
    knobs = {"top_k_list": [4], "num_active_blocks_list": [16], "vision_fraction_list": [1.0], "no_reference": True}
    data = {"dataset_name": "lmms_eval:colours", "data_dir": tmp_path, "prompt_template": TEMPLATE}
    run_profiling(ProfilingConfig.of(**knobs, **data, num_runs_per_sample=1, output_dir=tmp_path / "ours"))

    (results,) = (tmp_path / "theirs").glob("*/*_results.json")
    theirs = json.loads(results.read_text())
    (ours,) = (json.loads(path.read_text()) for path in (tmp_path / "ours").glob("*_imgsize*.json"))
    assert theirs["results"]["colours"]["exact_match,none"] == ours["accuracy"]
    assert ours["knobs"]["top_k"] == 4
    (samples,) = (tmp_path / "theirs").glob("*/*_samples_colours.jsonl")
    texts = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert texts == [each["pred"] for each in ours["per_sample_results"]] and len(set(texts)) > 1
    # Times and counts stand beside lmms-eval's own figures.
    tokens = [each["output_tokens"] for each in ours["per_sample_results"]]
    assert theirs["throughput"]["avg_output_tokens"] == sum(tokens) / len(tokens)
    assert theirs["throughput"]["avg_T_vision_total"] > 0 and "avg_energy_j" not in theirs["throughput"]
    assert compare([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert "answers are identical on these 5 samples" in capsys.readouterr().out
