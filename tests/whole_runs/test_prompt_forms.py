"""What a model is asked, from the flags to the plan, the result and the digest of a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import Accelerator
from transformers import AutoTokenizer

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.planning.fingerprint import fingerprint_parts
from experiment_core_utils.planning.plan import requested_run
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.tiny_checkpoints import write_checkpoint

Flags = Callable[..., ProfilingConfig]
# What the chat template of the tiny OLMoE makes of the second row.
FINAL = "<s>USER: Whyyyyy?\nAnswer briefly.\nASSISTANT:"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


@pytest.fixture
def config(chat_model: Path, tmp_path: Path) -> Flags:
    """Two rows of own data, the first without an answer."""
    rows = [{"question": "No?"}, {"question": "Whyyyyy?", "answer": "so"}]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    usual = ["--model_path", str(chat_model), "--data_file", str(path), "--output_dir", str(tmp_path / "results"),
             "--device", "cpu", "--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_repeats", "0",
             "--num_threads", "1", "--max_new_tokens", "2",
             "--top_k_list", "2", "--num_active_blocks_list", "3"]  # fmt: skip
    return lambda *more: parse_config([*usual, *more])


def test_plan_and_result_show_the_first_prompt_as_the_model_gets_it(config: Flags, chat_model: Path) -> None:
    ids = AutoTokenizer.from_pretrained(chat_model)(FINAL, add_special_tokens=False)["input_ids"]
    at = FINAL.index("y") - len("<s>") + 1
    compact = [*ids[:at], [ids[at], 5], *ids[at + 5 :]]
    lines = describe_plan(config("--dry_run")).text.splitlines()
    (shown,) = (at for at, line in enumerate(lines) if line.startswith("prompt of sample"))
    assert lines[shown] == f"prompt of sample 1 (family chat, chat_template applied): {json.dumps(FINAL)}"
    assert lines[shown + 1].split() == ["ids:", *map(str, ids[:at]), f"{ids[at]}x5", *map(str, ids[at + 5 :])]
    (result, *_) = run_profiling(config()).results
    final, form = result.provenance.final_prompt, result.provenance.task.prompt_form
    assert final is not None and (final.sample_id, final.text, final.token_ids) == (1, FINAL, compact)
    assert form is not None and (form["family"], form["open"], form["chat_template"]) == (
        "chat", "{question}\nAnswer briefly.", "applied",
    )  # fmt: skip
    assert result.per_sample_results[0].metadata.prompt == "Whyyyyy?\nAnswer briefly."


@pytest.mark.parametrize(
    ("flags", "text", "kept"),
    [
        (["--prompt_template", "Q {question}"], "<s>USER: Q Whyyyyy?\nASSISTANT:", {"open": "Q {question}"}),
        (["--no_chat_template"], "Question: Whyyyyy?\nAnswer:", {"family": "plain", "chat_template": "off"}),
        (
            ["--system_prompt", "Be kind."],
            "<s>USER: Be kind.\nUSER: Whyyyyy?\nAnswer briefly.\nASSISTANT:",
            {"system_prompt": "Be kind."},
        ),
    ],
)
def test_flags_override_the_form(config: Flags, flags: list[str], text: str, kept: dict[str, str]) -> None:
    (line,) = (
        line for line in describe_plan(config("--dry_run", *flags)).text.splitlines() if line.startswith("prompt of")
    )
    assert line.endswith(f": {json.dumps(text)}")
    form = requested_run(config(*flags)).prompt_form
    assert kept.items() <= form.items()


def test_another_form_is_another_run_and_molmoes_is_the_former_one(config: Flags) -> None:
    def named(found: ProfilingConfig) -> list[object]:
        parts = fingerprint_parts(requested_run(found), Accelerator(cpu=True))
        return [part for part in parts if isinstance(part, tuple) and part[0] == "prompt_form"]

    forms = [named(config(*flags)) for flags in ([], ["--no_chat_template"], ["--system_prompt", "Be kind."])]
    assert [len(found) for found in forms] == [1, 1, 1]
    assert len({repr(found) for found in forms}) == 3
    # With words of one's own the run is known by --prompt_template, as before.
    assert named(config("--prompt_template", "Q {question}")) == []
    assert named(parse_config(["--device", "cpu", "--ids", "1"])) == []


def test_prompts_with_a_date_are_another_run_also_with_words_of_ones_own(
    config: Flags, chat_model: Path, tmp_path: Path
) -> None:
    dated = shutil.copytree(chat_model, tmp_path / "dated")
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}: {{ messages[0]['content'] }}")
    flags = config("--prompt_template", "Q {question}")
    model = flags.model.model_copy(update={"model_path": str(dated)})
    found = requested_run(flags.model_copy(update={"model": model}))
    parts = dict(part for part in fingerprint_parts(found, Accelerator(cpu=True)) if isinstance(part, tuple)
                 and part[0] == "prompt_form")  # fmt: skip
    assert ("date", "2024-07-26") in parts["prompt_form"]


def test_a_system_prompt_and_no_template_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="^--system_prompt is a part of the chat template, and --no_chat"):
        parse_config(["--system_prompt", "Be kind.", "--no_chat_template"])


@pytest.mark.parametrize("flags", [["--system_prompt", "Be kind."], ["--no_chat_template"]])
def test_molmoe_has_no_chat_template(flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=f"^{flags[0]} .* has no chat template; drop it"):
        requested_run(parse_config([*flags, "--ids", "1"]))
