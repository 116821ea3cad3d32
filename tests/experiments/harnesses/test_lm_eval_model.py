"""lm-eval's own run, its run of the model knobprof and a run of this project give the same answers, log-probabilities
and figures, and lm-eval reads what is exported.
"""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from datasets import load_dataset
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_file_datetime, get_file_task_name, get_results_filenames, make_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import experiments.harnesses.lm_eval_model  # noqa: F401
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.pipeline import run_profiling
from experiments.core_exp.compare_runs import main as compare
from experiments.core_exp.export import export
from tests.models.tiny_checkpoints import write_checkpoint

TASK = """
task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}]
metadata: {{version: 1.0}}
"""
# Prompts of odd lengths, one with white space at its end; unequal options, with letters of two bytes; and texts, one of
# them longer than the context.
CONTEXT = 256
LONG = "Über " + "den Wolken " * 30
CHOICES = (
    {"q": "Which is a colour?", "options": ["red", "seventeen", "a dog that runs"], "right": 2, "text": "A  text."},
    {"q": "The sea is", "options": ["dry", "wet"], "right": 1, "text": "x"},
    {"q": "2 + 2 equals ", "options": ["four", "five and a half", "three"], "right": 0, "text": LONG},
    {"q": "Zürich liegt in", "options": ["Österreich", "der Schweiz"], "right": 1, "text": "ends\n"},
    {"q": "Salt is", "options": ["sweet", "salty", "a number", "old"], "right": 3, "text": "grenzenlos"},
)
SCORED = {
    "choices": """
output_type: multiple_choice
doc_to_text: q
doc_to_choice: options
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean, \
higher_is_better: true}, {metric: acc_bytes, aggregation: mean, higher_is_better: true}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}, {metric: \
byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}, {metric: bits_per_byte, aggregation: \
bits_per_byte, higher_is_better: false}]
""",
}
EXAMPLES = "num_fewshot: 2\nfewshot_split: test\ndescription: Choose.\ntarget_delimiter: ': '\n"
SCORED["shown"] = SCORED["choices"] + EXAMPLES
# Options that follow nothing.
SCORED["unprompted"] = SCORED["choices"].replace("doc_to_text: q", 'doc_to_text: ""')
# Float32: another order of sums changes a log-probability below 2000 by 1e-6 of it.
CLOSE = {"rel": 1e-4, "abs": 2e-3}
SUBJECTS = "the sky,a lamp,Rome,two plus two,a spider's legs,salt,the first month,gold,snow,a prime,rain,the sea".split(
    ","
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and questions whose answers are its own where they are plain text, so that it is right in some."""
    folder = tmp_path_factory.mktemp("lm_eval")
    model_path = write_checkpoint("llama", folder / "llama")
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), AutoModelForCausalLM.from_pretrained(model_path)
    rows = []
    for subject in SUBJECTS:
        question = f"what is {subject}"
        ids = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt")
        with torch.no_grad():
            found = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
        text = tokenizer.decode(found, skip_special_tokens=True).partition("\n")[0]
        is_plain = text.isprintable() and text and " ".join(text.split()) == text
        rows.append({"question": question, "answer": text if is_plain else "something else"})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "questions.yaml").write_text(TASK.format(rows=folder / "rows.jsonl", cache=folder / "cache"))
    return folder


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """What lm-eval finds by its own model and by knobprof, each also written as lm-eval writes it."""
    given = f"pretrained={folder / 'llama'}"
    found = {}
    for model, arguments in (("hf", "dtype=float32"), ("knobprof", f"precision=float32,output_dir={folder / 'run'}")):
        tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
        evaluate = partial(lm_eval.simple_evaluate, tasks=["questions"], task_manager=tasks, device="cpu")
        found[model] = evaluate(model=model, model_args=f"{given},{arguments}")
        tracker = EvaluationTracker(output_path=str(folder / model))
        tracker.general_config_tracker.log_experiment_args(model, given, None, None, False)
        written = {**found[model]}
        samples = written.pop("samples")
        tracker.save_results_aggregated(results=written, samples=samples)
        tracker.save_results_samples(task_name="questions", samples=[dict(each) for each in samples["questions"]])
    return found


@pytest.fixture(scope="module")
def ours(folder: Path) -> Path:
    """A run of this project of the same rows, model, prompt and limit."""
    given = {"model_path": str(folder / "llama"), "data_file": folder / "rows.jsonl", "num_active_blocks_list": [2, 3]}
    ends = {"stop": ["\n"], "max_new_tokens": 4, "metric": "em", "precision": "float32"}
    run_profiling(ProfilingConfig.of(**given, **ends, output_dir=folder / "ours", num_runs_per_sample=1))
    return folder / "ours"


def test_the_same_number_from_lm_eval_and_from_here(
    folder: Path, evaluated: Mapping[str, Mapping[str, Any]], ours: Path
) -> None:
    figures = evaluated["hf"]["results"]["questions"]
    assert 0 < figures["exact_match,none"] < 1
    assert evaluated["knobprof"]["results"]["questions"] == figures
    (path,) = export(ours, "lm-eval", folder / "exported")[0][-1].glob("results_*.json")
    exported = json.loads(path.read_text())
    assert exported["results"]["rows"]["exact_match,none"] == figures["exact_match,none"]
    assert exported["results"]["rows"]["exact_match_stderr,none"] == pytest.approx(figures["exact_match_stderr,none"])
    answers = [[each["resps"] for each in evaluated[model]["samples"]["questions"]] for model in ("hf", "knobprof")]
    assert answers[0] == answers[1]
    measured = evaluated["knobprof"]["config"]["knobprof"]["lm_eval_questions"]
    assert measured["quantities"]["T_total"]["n"] == len(SUBJECTS) and measured["verdict"] in ("VALID", "INVALID")


@pytest.fixture(scope="module")
def scored(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """What lm-eval finds of options and texts by its own model and by knobprof, with a short context."""
    config = shutil.copytree(folder / "llama", folder / "short") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    (folder / "choices.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in CHOICES))
    (folder / "scored").mkdir()
    for name, text in SCORED.items():
        rows, cache = folder / "choices.jsonl", folder / "cache"
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        data = f"dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}\n"
        (folder / "scored" / f"{name}.yaml").write_text(head + data + text)
    tasks = TaskManager(include_path=str(folder / "scored"), include_defaults=False)
    given = f"pretrained={folder / 'short'}"
    return {
        model: lm_eval.simple_evaluate(
            model=model, model_args=f"{given},{more}", tasks=list(SCORED), task_manager=tasks, device="cpu"
        )
        for model, more in (("hf", "dtype=float32"), ("knobprof", f"precision=float32,output_dir={folder / 'scores'}"))
    }


def logprobs_in(found: Mapping[str, Any], name: str) -> list[list[float]]:
    """Of each document of a task, the log-probabilities that lm-eval was given."""
    samples = sorted(found["samples"][name], key=lambda each: each["doc_id"])
    of_text = name == "texts"
    return [[each[0] if of_text else each[0][0] for each in sample["resps"]] for sample in samples]


@pytest.mark.parametrize("name", list(SCORED))
def test_the_same_log_probabilities_from_lm_eval_and_from_here(
    folder: Path, scored: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    expected, figures = logprobs_in(scored["hf"], name), scored["hf"]["results"][name]
    by_knobprof = scored["knobprof"]["results"][name]
    given = {"dataset_name": f"lm_eval:{name}", "data_dir": folder / "scored", "model_path": str(folder / "short")}
    few = {"num_runs_per_sample": 1, "num_active_blocks_list": [2, 3], "precision": "float32", "device": "cpu"}
    report = run_profiling(ProfilingConfig.of(**given, **few, output_dir=folder / f"ours_{name}"))
    (ours,) = [each for each in report.results if each.is_reference]
    samples = sorted(ours.per_sample_results, key=lambda each: each.sample_id)
    found = [[each.logprob for each in sample.continuations or ()] for sample in samples]
    if name == "texts":
        found = [[sum(each)] for each in found]
    for each in (logprobs_in(scored["knobprof"], name), found):
        assert each == [pytest.approx(row, **CLOSE) for row in expected]
    # Standard errors of perplexities are of samples that lm-eval draws.
    keys = [key for key in figures if key.endswith(",none") and not (name == "texts" and "_stderr" in key)]
    assert len(keys) == (3 if name == "texts" else 6)
    assert [by_knobprof[key] for key in keys] == [pytest.approx(figures[key], rel=1e-4) for key in keys]
    for key in keys:
        if "_stderr" not in key:
            assert ours.metric_details[key.removesuffix(",none")] == pytest.approx(figures[key], rel=1e-4)
    if name != "texts":
        assert ours.accuracy == figures["acc,none"]
    measured = scored["knobprof"]["config"]["knobprof"][f"lm_eval_{name}"]
    assert measured["quantities"]["T_LLM_prefill"]["n"] == len(CHOICES) and measured["accuracy"] is None


def test_a_knob_changes_log_probabilities(folder: Path, scored: Mapping[str, Mapping[str, Any]]) -> None:
    tasks = TaskManager(include_path=str(folder / "scored"), include_defaults=False)
    given = f"pretrained={folder / 'short'},precision=float32,num_active_blocks=2,output_dir={folder / 'fewer'}"
    fewer = lm_eval.simple_evaluate(
        model="knobprof", model_args=given, tasks=["choices"], task_manager=tasks, device="cpu"
    )
    assert fewer["config"]["knobprof"]["lm_eval_choices"]["knobs"]["num_active_blocks"] == 2
    pairs = zip(logprobs_in(fewer, "choices"), logprobs_in(scored["hf"], "choices"), strict=True)
    assert all(abs(one - other) > 0.01 for ones, others in pairs for one, other in zip(ones, others, strict=True))


def test_lm_eval_reads_what_is_exported(folder: Path, evaluated: Mapping[str, Mapping[str, Any]], ours: Path) -> None:
    made = export(ours, "lm-eval", folder / "read")[0][-1]
    (results,) = get_results_filenames([str(each) for each in made.iterdir()])
    content = json.loads(Path(results).read_text())
    table = make_table(content)
    assert f"|exact_match|↑  |{content['results']['rows']['exact_match,none']:.4f}|±  |" in table
    (samples,) = made.glob("samples_*")
    assert get_file_task_name(samples.name) == "rows"
    assert get_file_datetime(samples.name) == Path(results).stem.removeprefix("results_")
    assert load_dataset("json", data_files=str(samples), split="train", cache_dir=str(folder / "cache")).num_rows == 12
    # No key of its own files is missing, but those of its environment and tokenizer.
    (own,) = (folder / "hf").glob("*/results_*.json")
    lacking = json.loads(own.read_text()).keys() - content.keys()
    around = {"pretty_env_info", "lm_eval_version", "upper_git_hash", "max_length", "eot_token_id"}
    assert {each for each in lacking if not each.startswith("tokenizer_")} == around
    (own,) = (folder / "hf").glob("*/samples_*.jsonl")
    first, theirs = (json.loads(each.read_text().splitlines()[0]) for each in (samples, own))
    assert theirs.keys() <= first.keys()


def test_a_run_is_compared_with_lm_evals_own_files(
    folder: Path, evaluated: Mapping[str, Mapping[str, Any]], ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare([str(ours), str(folder / "hf")]) == 0
    out = capsys.readouterr().out
    assert "answers are identical on these 12 samples (own_blocks3)" in out.splitlines()[0]
    assert "12 questions of the run, 12 of lm-eval's questions, and the 12 that are in both" in out
    assert compare([str(folder / "knobprof"), str(folder / "hf")]) == 0
    assert "answers are identical on these 12 samples" in capsys.readouterr().out
