"""Whole runs on data and tasks of one's own: failed rows, rescoring, comparing, resuming, and what is refused."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives.errors import ConfigurationError, DataChanged, ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.requests.drawing import open_task, open_tasks
from experiment_core_utils.saved_results.rescoring import compare_folder, rescore
from experiment_core_utils.saved_results.tasks_command import main as tasks_main
from experiment_core_utils.tasks import registry
from experiment_core_utils.tasks.registry import get_metric, list_metrics, list_tasks, load_data_file
from experiments.analyses.sweeps import load_sweep
from experiments.core_exp.acc_lat_profiling import main as driver
from tests.tasks.datasets.layouts import BLUE, GREEN, RED, plain, write_picture

PAGE = (REPOSITORY / "docs" / "datasets.md").read_text(encoding="utf-8")
METRIC = """
from experiment_core_utils.tasks.interface import Score
from experiment_core_utils.tasks.registry import register_metric
from experiment_core_utils.tasks.scoring.metrics import AnswerMetric

register_metric(AnswerMetric("length", lambda answer: Score(min(len(answer.prediction), 10) / 10)))
"""


def block(language: str, place: int = 0) -> str:
    """A block of code of the page on datasets."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[place]


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered_tasks", {})
    monkeypatch.setattr(registry, "_registered_metrics", {})


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    for name, colour in {"red": RED, "blue": BLUE}.items():
        write_picture(tmp_path / f"{name}.png", plain(colour))
    rows = [
        {"image": "red.png", "question": "What colour?", "answer": "red", "type": "colour"},
        {"question": "Two and two?", "answer": 4, "type": "sum"},
        {"image": "green.png", "question": "What colour?", "answer": "green", "type": "colour"},
        {"image": "blue.png", "question": "What colour?", "answer": "blue", "type": "colour"},
    ]
    path = tmp_path / "my.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{torn\n")
    return path


def config_for(checkpoint: Path, output_dir: Path, **more: object) -> ProfilingConfig:
    given = {
        "model_path": str(checkpoint), "output_dir": output_dir, "num_runs_per_sample": 1, "num_warmup_runs": 0,
        "max_repeats": 0, "num_threads": 1, "max_new_tokens": 4, "no_reference": True,
        "tier_list": ("low", "medium"), "top_k_list": (4,), "num_active_blocks_list": (4,),
    }  # fmt: skip
    return ProfilingConfig.of(**(given | more))


def test_a_dry_run_names_broken_rows_and_a_run_warns_of_those_drawn(
    tiny_checkpoint: Path, tmp_path: Path, data_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tiny_checkpoint, tmp_path / "results", data_file=data_file, dry_run=True)
    plan = describe_plan(config)
    assert (plan.num_broken_rows, plan.exit_code) == (2, 3)
    lines = plan.text.splitlines()
    (at,) = (at for at, line in enumerate(lines) if line.startswith("2 of 5 rows of the data file cannot be used"))
    assert lines[at + 1].startswith("  my.jsonl line 3: picture green.png is missing")
    assert lines[at + 2].startswith("  my.jsonl line 5: it is not JSON")
    # Rows that were not drawn count, too.
    flags = [
        "--model_path",
        str(tiny_checkpoint),
        "--output_dir",
        str(tmp_path / "results"),
        "--data_file",
        str(data_file),
    ]
    assert driver([*flags, "--ids", "0", "1", "--dry_run"]) == 3
    with data_file.open("a") as file:
        file.write(5 * "{}\n")
    capsys.readouterr()
    assert driver([*flags, "--dry_run"]) == 3
    lines = capsys.readouterr().out.splitlines()
    (at,) = (at for at, line in enumerate(lines) if line.startswith("7 of 10 rows"))
    assert [line[:2] for line in lines[at + 1 : at + 7]] == 6 * ["  "] and lines[at + 6] == "  and 2 more"
    data_file.write_text("".join(data_file.read_text().splitlines(keepends=True)[:2]))
    assert driver([*flags, "--dry_run"]) == 0
    data_file.write_text("{}\n")
    assert driver([*flags, "--dry_run"]) == 2


def test_a_run_on_a_file_has_all_that_a_run_on_a_task_has(
    tiny_checkpoint: Path, tmp_path: Path, data_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tiny_checkpoint, tmp_path / "results", data_file=data_file, metric="em")
    report = run_profiling(config)
    assert "warning: 2 of 5 rows of the data file cannot be used, and are failed samples" in capsys.readouterr().err
    assert report.csv_path == tmp_path / "results" / "my_settings.csv" and not report.failed
    assert len(report.results) == 2
    for result in report.results:
        assert [sample.sample_id for sample in result.per_sample_results] == [0, 1, 3]
        assert (result.metric, result.provenance.task.name, result.provenance.task.split) == ("em", "my", "all")
        missing, torn = result.failed_samples
        assert missing.reason.startswith("my.jsonl line 3: picture green.png is missing")
        assert torn.reason.startswith("my.jsonl line 5: it is not JSON")
        assert set(result.accuracy_by_type) == {"colour", "sum"}
        text = result.per_sample_results[1]
        assert (text.actual_vision_tokens, text.T_vision_total) == (0, None)
        assert text.metadata.answers == ["4"]
        assert text.metadata.prompt == " User: vqa2: Two and two? Assistant:"
        form = result.provenance.task.prompt_form
        assert form is not None and form["open"] == " User: {style}: {question} Assistant:"
    assert run_profiling(config).experiment_id is None  # nothing is left
    (compared,) = compare_folder(tmp_path / "results", None)
    assert (compared.task, compared.metric, len(compared.comparisons)) == ("my", "em", 1)
    assert len(rescore(tmp_path / "results", get_metric("em_lenient"), None).after) == 2
    task = open_task(config.task)
    assert [task.question_type(index) for index in range(5)] == ["colour", "sum", "colour", "colour", "all"]


def test_a_vision_model_is_not_asked_without_pictures_unless_it_is_said(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"question": "Two and two?", "answer": 4}\n')
    config = config_for(tiny_checkpoint, tmp_path / "results", data_file=path, tier_list=("low",))
    for refused in (lambda: run_profiling(config), lambda: describe_plan(config.replaced(dry_run=True))):
        with pytest.raises(
            ConfigurationError, match="no picture in any row, and this model takes pictures: .*--text_only"
        ):
            refused()
    assert not (tmp_path / "results").exists()
    (result,) = run_profiling(config.replaced(text_only=True)).results
    assert result.provenance.experimental_variables.text_only is True
    # Of a file with pictures they are left out, which is said.
    write_picture(tmp_path / "red.png", plain(RED))
    path.write_text('{"picture": "red.png", "question": "What colour?", "answer": "red"}\n')
    named = config.replaced(columns={"image": "picture"}, output_dir=tmp_path / "others")
    (seen,) = run_profiling(named).results
    assert seen.provenance.experimental_variables.columns == ["image=picture"]
    assert seen.per_sample_results[0].actual_vision_tokens > 0
    capsys.readouterr()
    (blind,) = run_profiling(named.replaced(text_only=True)).results
    assert "--text_only: the pictures of 1 row are left out" in capsys.readouterr().err
    assert blind.per_sample_results[0].actual_vision_tokens == 0 and blind.fingerprint != seen.fingerprint
    assert "--text_only: the pictures of 1 row are left out" in describe_plan(named.replaced(text_only=True)).text


def test_a_question_about_several_pictures_is_a_failed_sample_of_molmoe(
    tiny_checkpoint: Path, tmp_path: Path, data_file: Path
) -> None:
    both = {"image": ["red.png", "blue.png"], "question": "Which?", "answer": "red"}
    data_file.write_text(data_file.read_text().splitlines()[0] + "\n" + json.dumps(both))
    config = config_for(tiny_checkpoint, tmp_path / "results", data_file=data_file, tier_list=("low",))
    (result,) = run_profiling(config).results
    assert [each.sample_id for each in result.per_sample_results] == [0]
    assert [each.reason for each in result.failed_samples] == ["sample 1 has 2 pictures, and Molmo takes one"]
    assert describe_plan(config.replaced(dry_run=True)).exit_code == 0


def test_flags_of_a_data_file_need_one(data_file: Path) -> None:
    with pytest.raises(ConfigurationError, match="--columns is for the rows of --data_file, which is not given"):
        parse_config(["--columns", "image=img"])
    # Folders and datasets of the hub have splits.
    assert (
        parse_config(["--data_file", "owner/name", "--split", "test", "--dataset_revision", "v1"]).task.split == "test"
    )
    with pytest.raises(ConfigurationError, match="needs --split"):
        open_task(parse_config(["--data_file", "owner/name"]).task)


def write_solid(path: Path, colour: tuple[int, int, int]) -> None:
    """A picture whose size in bytes does not depend on its colour."""
    Image.new("RGB", (20, 20), colour).save(path)


def swapped_rows(folder: Path) -> Path:
    folder.mkdir()
    for name in ("a.bmp", "b.bmp"):
        write_solid(folder / name, RED)
    rows = [{"image": name, "question": "What colour?", "answer": "red"} for name in ("a.bmp", "b.bmp")]
    (folder / "my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "my.jsonl"


def test_a_picture_swapped_between_two_commands_is_other_data(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"data_file": swapped_rows(tmp_path / "data"), "tier_list": ("low",)}
    one = config_for(tiny_checkpoint, tmp_path / "results", **given)
    both = config_for(tiny_checkpoint, tmp_path / "results", **given, num_active_blocks_list=(3, 4))
    (first,) = run_profiling(one).results
    content = hashlib.sha256((tmp_path / "data" / "a.bmp").read_bytes()).hexdigest()
    assert [each.picture_sha256 for each in first.per_sample_results] == [content, content]
    write_solid(tmp_path / "data" / "b.bmp", BLUE)
    capsys.readouterr()
    found = run_profiling(both).results
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("warning: 1 of the 2")]
    assert "(the data of 1 sample have changed, the first is sample 1)" in line
    assert len(found) == 2 and len({each.fingerprint for each in found}) == 1 != first.fingerprint
    assert {tuple(each.data_sha256 for each in result.per_sample_results) for result in found} == {
        (first.per_sample_results[0].data_sha256, found[0].per_sample_results[1].data_sha256)
    }
    assert len(load_sweep(tmp_path / "results").settings) == 2
    # Two more data sets, each of a setting of its own.
    write_solid(tmp_path / "data" / "b.bmp", GREEN)
    run_profiling(one.replaced(num_active_blocks_list=(2,)))
    assert "warning: 2 other results in " in capsys.readouterr().err
    with pytest.raises(ResultsError):
        load_sweep(tmp_path / "results")


SWAPPING = """
import shutil
from pathlib import Path
from experiment_core_utils.tasks.interface import Score
from experiment_core_utils.tasks.registry import register_metric
from experiment_core_utils.tasks.scoring.metrics import AnswerMetric

scored = []

def score(answer):
    scored.append(answer)
    if len(scored) == {after}:
        shutil.copy({new!r}, {old!r})
    return Score(1.0)

register_metric(AnswerMetric("swapping", score))
"""


def test_a_picture_swapped_while_a_run_is_at_work_ends_it_and_the_former_one_lets_it_resume(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The metric, asked once for the plan and before each sample, swaps the second picture during the first sample."""
    old, new, module = tmp_path / "data" / "b.bmp", tmp_path / "new.bmp", tmp_path / "swapping.py"
    given = {"data_file": swapped_rows(tmp_path / "data"), "tier_list": ("low",), "top_k_list": (2, 4),
             "request_cache_gb": 0.0, "task_module": module, "metric": "swapping"}  # fmt: skip
    write_solid(new, BLUE)
    kept = old.read_bytes()
    module.write_text(SWAPPING.format(after=3, new=str(new), old=str(old)))
    config = config_for(tiny_checkpoint, tmp_path / "results", **given)
    with pytest.raises(DataChanged, match=r"^sample 1 of my \(picture b.bmp\) has changed since this run began: put"):
        run_profiling(config)
    assert not list((tmp_path / "results").glob("*.json"))
    old.write_bytes(kept)
    # The metric swaps it again, after it was read for the last time.
    report = run_profiling(config)
    assert report.exit_code == 0 and len(report.results) == 2
    contents = [[each.data_sha256 for each in result.per_sample_results] for result in report.results]
    assert contents[0] == contents[1] and None not in contents[0]


def test_a_file_without_a_usable_row_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "my.jsonl").write_text("{torn\n")
    config = config_for(tiny_checkpoint, tmp_path / "results", data_file=tmp_path / "my.jsonl")
    with pytest.raises(ConfigurationError, match="has 1 row and none can be used: my.jsonl line 1: it is not JSON"):
        run_profiling(config)
    assert not (tmp_path / "results").exists()


def test_the_rows_of_the_page_can_be_used(tmp_path: Path) -> None:
    rows = block("json")
    assert rows.count("\n") == 4
    for name in set(re.findall(r'"image": "([^"]+)"', rows)):
        write_picture(tmp_path / name, plain(RED))
    (tmp_path / "my.jsonl").write_text(rows)
    task = load_data_file(tmp_path / "my.jsonl")
    assert [task[index].image is None for index in range(4)] == [False] * 3 + [True]
    (tmp_path / "choice.jsonl").write_text(block("json", 1))
    assert load_data_file(tmp_path / "choice.jsonl")[0].answer_index == 1


def test_a_file_is_the_whole_data_set(data_file: Path) -> None:
    for flag, value in {"dataset_name": "text_vqa", "split": "test", "dataset_revision": "v1"}.items():
        with pytest.raises(ConfigurationError, match=f"--data_file is the whole data set: --{flag} cannot act"):
            parse_config(["--data_file", str(data_file), f"--{flag}", value])
    config = parse_config(["--data_file", str(data_file)]).task
    assert list(open_tasks(config, [])) == list(open_tasks(config, ["my", "my"])) == ["my"]
    with pytest.raises(ConfigurationError, match="is the task my, not text_vqa"):
        open_tasks(config, ["my", "text_vqa"])


def test_a_metric_may_be_another_than_the_tasks_own() -> None:
    assert open_task(parse_config(["--metric", "em_lenient"]).task).metric == "em_lenient"
    with pytest.raises(ConfigurationError, match="unknown metric 'bleu'"):
        open_task(parse_config(["--metric", "bleu"]).task)


def test_the_task_of_the_page_is_measured(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(block("python"))
    config = config_for(
        tiny_checkpoint, tmp_path / "results", task_module=tmp_path / "my_tasks.py", dataset_name="sums",
        num_samples=2, tier_list=("low",), sample_by="question_type",
    )  # fmt: skip
    (result,) = run_profiling(config).results
    assert (result.provenance.task.name, result.metric, result.num_samples) == ("sums", "em_lenient", 2)
    assert {sample.question_type for sample in result.per_sample_results} == {"with zero", "without zero"}
    assert "sums" in list_tasks()
    with pytest.raises(ConfigurationError, match="sums has no split 'test'"):
        open_task(config.task.model_copy(update={"split": "test"}))
    first = result.fingerprint
    (tmp_path / "my_tasks.py").write_text(block("python") + "# another\n")
    (result,) = run_profiling(config).results
    assert result.fingerprint != first


def test_a_metric_of_ones_own_scores_stored_answers(
    tiny_checkpoint: Path, tmp_path: Path, data_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_profiling(config_for(tiny_checkpoint, tmp_path / "results", data_file=data_file, tier_list=("low",)))
    (tmp_path / "my_metrics.py").write_text(METRIC)
    arguments = ["rescore", str(tmp_path / "results"), "--metric", "length"]
    assert tasks_main([*arguments, "--task_module", str(tmp_path / "my_metrics.py")]) == 0
    assert "length" in list_metrics()
    (path,) = (tmp_path / "results" / "rescored_length").glob("*.json")
    for sample in json.loads(path.read_text())["per_sample_results"]:
        assert sample["accuracy"] == min(len(sample["pred"]), 10) / 10
    assert "rescored_length" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("import nothing_of_this_name", "cannot be run (ModuleNotFoundError"),
        ("this is no Python", "cannot be run (SyntaxError"),
        ("from experiment_core_utils.tasks.registry import register_task\n"
         "register_task('text_vqa', None, metric='em')", "'text_vqa' is one of the project's own"),
        ("from experiment_core_utils.tasks.registry import register_task\n"
         "register_task('../x', None, metric='em')", "is part of file names"),
        ("from experiment_core_utils.tasks.registry import register_metric, get_metric\n"
         "register_metric(get_metric('em'))", "metric 'em' is one of the project's own"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_used_is_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "my_tasks.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        open_task(parse_config(["--task_module", str(path)]).task)
    assert words in str(caught.value) and "\n" not in str(caught.value)
