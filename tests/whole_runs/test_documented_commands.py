"""The documented commands on a dense model that sees, on a text model of one knob, and on a run of a single setting.

`tests/documents/test_how_to.py` runs the same lines on the embedded model, which has experts and all knobs.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoConfig

from experiment_core_utils.primitives.files import REPOSITORY
from experiments.analyses.knobs.grid import load_study
from experiments.analyses.recorded_table import table_of, write_table
from experiments.analyses.sweeps import load_sweep
from experiments.controller.lookup import load
from knob_profiler.__main__ import main as knobprof
from tests.documents.test_how_to import CHEAP, COMMAND_LINES, OTHERS, program_of
from tests.models.tiny_checkpoints import write_checkpoint

# A name -> the family, the knobs that are turned, and how many settings these are.
KINDS = {
    # Three fractions of the vision tokens, the reference among them, at three numbers of blocks.
    "dense": ("smolvlm", ["--num_active_blocks_list", "1", "2", "3"], 9),
    "text": ("llama", ["--num_active_blocks_list", "1", "2", "3"], 3),
    "one setting": ("llama", [], 1),
}
# The full grid of the models: of three blocks, three quarters are all.
COLLECTED = {"dense": ["frac-0.25_blocks3", "frac-0.5_blocks3", "own_blocks3"]}
NO_EXTRAS = ["--num_samples", "8", "--max_new_tokens", "4", "--num_runs_per_sample", "1", "--num_warmup_runs", "0",
             "--max_repeats", "0", "--num_threads", "1"]  # fmt: skip
# What the how-to pages do not name, or only within a sentence.
FURTHER = (
    "knobprof controller lookup build table.json --aggregation_method p95 --output p95.json",
    "knobprof controller lookup build results/mine --aggregation_method stream --output stream.json",
    "knobprof controller lookup predict stream.json --budget_ms 1 1000",
    "knobprof controller evaluate results/mine --baselines --num_budgets 2 --output_dir evaluated",
    "knobprof compare results/before results/after",
    "python experiments/core_exp/collect_table.py collected.json --results_dir results/collected --model_path MODEL "
    "--num_samples 2 --max_new_tokens 2 --max_repeats 0 --num_threads 1",
    "knobprof analyse knobs collected.json --num_draws 100 --output_dir collected",
    "knobprof blocks --model_path MODEL --method activation_change --num_samples 2 --output scores.json",
)


def folder_of(kind: str, root: Path) -> Path:
    """A folder with the model, data and runs that the pages name, of which all runs are the same one."""
    family, knobs, num_settings = KINDS[kind]
    (root / "experiments").symlink_to(REPOSITORY / "experiments")
    mine = root / "results" / "mine"
    model = write_checkpoint(family, root / "MODEL")
    picture = {}
    if AutoConfig.from_pretrained(model).to_dict().get("vision_config"):
        Image.new("RGB", (40, 30), "red").save(root / "red.png")
        picture = {"image": "red.png"}
    (root / "my.jsonl").write_text(json.dumps(picture | {"question": "How many legs has a spider?", "answer": "8"}))
    assert knobprof(["profile", "--model_path", str(model), *knobs, *NO_EXTRAS, "--output_dir", str(mine)]) == 0
    for name in ("before", "after", "float32", "bfloat16", "4bit", "quickstart"):
        shutil.copytree(mine, mine.with_name(name))
    settings = load_sweep(mine).settings
    assert len(settings) == num_settings
    write_table(table_of([each.result for each in settings]), root / "table.json")
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: folder_of(kind, tmp_path_factory.mktemp(KINDS[kind][0])))


def lines() -> Iterator[str]:
    """Each command once, whatever of the equal folders it reads."""
    seen = set()
    for _, line in COMMAND_LINES:
        program = None if line.startswith(OTHERS) else program_of(line)
        if program is not None and (program[0] in CHEAP or "--dry_run" in program[1]):
            same = program[0], *("results/mine" if word.startswith("results/") else word for word in program[1])
            if same not in seen:
                seen.add(same)
                # With more flags it is below.
                if "controller evaluate" not in line:
                    yield line
    yield from FURTHER


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_any_model(
    made: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made(kind))
    keys = [each.key for each in load_sweep(Path("results/mine")).settings]
    for line in lines():
        program = program_of(line)
        assert program is not None
        module, arguments = program
        if "--baseline" in arguments:
            arguments[arguments.index("--baseline") + 1] = keys[0]
        if "--run" in arguments:  # it measures
            arguments[arguments.index("--num_samples") + 1] = "2"
            arguments = ["--repeats", "2", *arguments, *NO_EXTRAS[2:]]
        if "--model_path" not in arguments and "--dry_run" in arguments:
            continue  # of the embedded model
        code = __import__(module, fromlist=["main"]).main(arguments)
        printed = capsys.readouterr()
        assert not code, (shlex.join([module, *arguments]), printed.err)
        assert printed.out or module.endswith("score_blocks"), line
    assert [entry.choice.key for entry in load(Path("p95.json")).entries] == keys
    for table, expected in (("table.json", keys), ("collected.json", COLLECTED.get(kind, ["own_blocks3"]))):
        assert [point.key for point in load_study([Path(table)]).grids[0].points] == expected


@pytest.mark.parametrize("kind", ["text", "one setting"])
def test_analyses_of_a_single_knob_and_of_none(
    made: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made(kind))
    assert knobprof(["analyse", "knobs", "results/mine", "--num_draws", "100", "--output_dir", "knobs"]) == 0
    grid = json.loads(Path("knobs/e2_knob_grid_results.json").read_text())
    (task,) = grid["tasks"]
    latency = task["effects"]["latency_mean"]
    if kind == "text":
        (term,) = latency["terms"]
        assert term["knobs"] == ["num_active_blocks"] and 0 < term["p_value"] <= 1
    else:
        assert (latency["terms"], latency["reason"]) == ([], "one setting has no spread")
        assert knobprof(["analyse", "knobs", "table.json", "--output_dir", "table"]) == 0
        assert knobprof(["analyse", "stages", "results/mine", "--output_dir", "stages"]) == 0


def test_an_estimator_of_a_model_without_experts(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made("dense"))
    assert knobprof(["analyse", "latency", "results/mine", "--output_dir", "latency"]) == 0
    assert "of a setting that was left out of the fit is predicted with an error of" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dense", "text", "one setting"])
def test_what_needs_more_than_a_run_has_is_one_sentence(
    made: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made(kind))
    flags = ["--environment", "replay", "--grid", "results/mine", "--controller_dir", "controller"]
    assert knobprof(["controller", "train", *flags]) == 1
    assert "a two-stage controller chooses tier, top-k and blocks, and these are" in capsys.readouterr().err
    if kind != "dense":
        assert knobprof(["analyse", "latency", "results/mine"]) == 1
        assert "are too few for a latency model; profile at least 7 settings" in capsys.readouterr().err
