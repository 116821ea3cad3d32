"""What each family is asked about a question: the words by task, and the final texts in the families' own formats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from experiment_core_utils.knobs.vision_tokens import TIERS
from experiment_core_utils.models.hf.requests import ChatOptions, prompt_layout_of
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import PromptFamily, Sample, Task
from experiment_core_utils.tasks.prompt_forms import described_form, prompt_for, with_continuations
from experiment_core_utils.tasks.registry import load_data_file, load_task
from tests.tasks.datasets.layouts import RED, plain, write_json, write_picture
from tests.tasks.datasets.test_science_qa import official as science_qa
from tests.tiny_models.chat_families import CHAT_FAMILIES, chat_requests, tokenizer_of

QUESTION = "What color is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One question of VQA v2 and two of ScienceQA, in their official files."""
    made = tmp_path_factory.mktemp("official")
    asked = {"image_id": 42, "question": QUESTION, "question_id": 1}
    answers = [{"answer": "red", "answer_confidence": "yes", "answer_id": place} for place in range(1, 11)]
    about = {
        **asked,
        "answers": answers,
        "answer_type": "other",
        "question_type": "what",
        "multiple_choice_answer": "red",
    }
    for prefix in ("v2_", ""):
        write_json(made / f"{prefix}OpenEnded_mscoco_val2014_questions.json", {"questions": [asked]})
        write_json(made / f"{prefix}mscoco_val2014_annotations.json", {"annotations": [about]})
    write_picture(made / "val2014" / "COCO_val2014_000000000042.jpg", plain(RED))
    science_qa(made)
    return made


def vqa(folder: Path) -> tuple[Task, Sample]:
    task = load_task("coco_2014_vqa", data_dir=folder)
    return task, task[0]


def choice(folder: Path) -> tuple[Task, Sample]:
    """The question with a hint."""
    task = load_task("science_qa_img", data_dir=folder)
    return task, task[1]


# --- the families' final texts ------------------------------------------------------------------------------------

# What lmms-eval asks of every family in these two tasks.
VQA = "What color is it?\nAnswer the question using a single word or phrase."
CHOICE = (
    "Context: Two magnets are placed as shown.\nWill they attract?\nA. attract\nB. repel\n"
    "Answer with the option's letter from the given choices directly."
)
AYA = (
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are Aya Vision, a brilliant, sophisticated, AI-assistant "
    "chatbot trained to assist human users by providing thorough responses. You are a large vision language model "
    "built by the Cohere For AI. You are capable of interpreting images, including describing them, answering "
    "questions about their contents, extracting textual information, and analyzing visual context."
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|><image>"
)
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2024-07-26\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message.<|end|><|start|>user<|message|>"
)
# What the format of each family puts before and after the user's words; sources beside the templates.
GOLDENS = {
    "llava": ("USER: <image>\n", " ASSISTANT:"),
    "llava_next": ("[INST] <image>\n", " [/INST]"),
    "qwen2_5_vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_vl": (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    "smolvlm": ("<|im_start|>User:<image>", "<end_of_utterance>\nAssistant:"),
    "internvl": ("<|im_start|>user\n<IMG_CONTEXT>\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "idefics3": ("<|begin_of_text|>User:<image>", "<end_of_utterance>\nAssistant:"),
    "gemma3": ("<bos><start_of_turn>user\n<start_of_image>", "<end_of_turn>\n<start_of_turn>model\n"),
    "pixtral": ("<s>[INST][IMG]", "[/INST]"),
    "aya_vision": (AYA, "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"),
    "gpt_oss": (HARMONY, "<|end|><|start|>assistant"),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "olmoe": ("<|endoftext|><|user|>\n", "\n<|assistant|>\n"),
}
# PaliGemma has no chat template, but prefixes of its training.
PALIGEMMA = (
    "<image>answer en What color is it?",
    "<image>Question: Will they attract?\nContext: Two magnets are placed as shown.\nOptions: (A) attract (B) repel\n"
    "Answer:",
)
# Families whose begin of sequence stands in the ids: once, whoever of template, tokenizer and processor puts it there.
WITH_BOS = {
    "llava", "llava_next", "smolvlm", "idefics3", "gemma3", "paligemma", "aya_vision", "llama3", "olmoe",
}  # fmt: skip


def final_texts(family: str, folder: Path, made: Path) -> list[str]:
    if family == "pixtral":
        # Its processor needs torchvision.
        layout = prompt_layout_of(tokenizer_of(CHAT_FAMILIES[family]), CHAT_FAMILIES[family].template, "[IMG]", family)
        return [layout.text(prompt_for(*asked(folder), "chat"), True) for asked in (vqa, choice)]
    requests = chat_requests(family, made)
    texts = []
    for task, sample in (vqa(folder), choice(folder)):
        request = requests.make(sample, prompt_for(task, sample, requests.prompt_family), TIERS["low"])
        texts.append(request.text)
        ids, begin = request.inputs["input_ids"][0].tolist(), requests.tokenizer.bos_token_id
        assert ids.count(begin) == (family in WITH_BOS)
        assert (request.shape.vision_tokens > 0) == requests.has_vision
    return texts


@pytest.mark.parametrize("family", GOLDENS)
def test_a_question_and_a_choice_are_asked_in_the_format_of_the_family(
    folder: Path, tmp_path: Path, family: str
) -> None:
    before, after = GOLDENS[family]
    assert final_texts(family, folder, tmp_path) == [f"{before}{VQA}{after}", f"{before}{CHOICE}{after}"]


def test_paligemma_is_asked_by_the_prefixes_of_its_training(folder: Path, tmp_path: Path) -> None:
    assert final_texts("paligemma", folder, tmp_path) == list(PALIGEMMA)
    requests = chat_requests("paligemma", tmp_path)
    task, sample = vqa(folder)
    request = requests.make(sample, prompt_for(task, sample, "paligemma"), TIERS["low"])
    # Its processor puts the begin of sequence behind the picture, and a line break at the end.
    assert requests.tokenizer.decode(request.inputs["input_ids"][0]) == (
        "<image><image><image><image><bos>answer en What color is it?\n"
    )
    assert "labels" not in request.inputs


def test_every_family_is_compared() -> None:
    assert {*GOLDENS, "paligemma"} == set(CHAT_FAMILIES)


# --- the words by task --------------------------------------------------------------------------------------------

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."


def sample_of(task_name: str, **values: Any) -> tuple[Any, Sample]:
    """A sample of one of the project's tasks, of whose rows nothing is needed."""

    class Named:
        name = task_name

        def prompt(self, sample: Sample) -> str:
            return f"Molmo: {sample.question}"

    given = {"question": "What?", "answers": ("a",), "image": None, "question_type": "all", "image_id": "1"}
    return Named(), Sample(sample_id=1, **{**given, **values})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("coco_2014_vqa", f"What?\n{SHORT}"),
        ("text_vqa", f"What?\n{SHORT}"),
        ("doc_qa", f"What?\n{SHORT}"),
        ("st_qa", f"What?\n{SHORT}"),
        ("okvqa", f"What?\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n{SHORT}"),
        ("tally_qa", "What?\nAnswer the question using a single number."),
        ("coco_caption", "What?"),
        ("mmmu", f"What?\n\n{SHORT}"),
        ("reference_vqa", "What?\nAnswer briefly."),
    ],
)
def test_a_published_task_has_the_instruction_by_which_others_measure(name: str, expected: str) -> None:
    task, sample = sample_of(name)
    assert prompt_for(task, sample, "chat") == expected
    assert prompt_for(task, sample, "plain") == "Question: What?\nAnswer:"
    assert prompt_for(task, sample, "molmo") == "Molmo: What?"


def test_options_stand_in_lines_of_their_letters() -> None:
    options = {"options": ("one {x}", "two"), "answer_index": 1}
    mmmu, sample = sample_of("mmmu", **options)
    assert prompt_for(mmmu, sample, "chat") == f"What?\nA. one {{x}}\nB. two\n\n{LETTER}"
    assert prompt_for(mmmu, sample, "plain") == "Question: What?\nA. one {x}\nB. two\nAnswer:"
    assert prompt_for(mmmu, sample, "paligemma") == "Question: What?\nOptions: (A) one {x} (B) two\nAnswer:"


@pytest.mark.parametrize("family", ["chat", "plain", "paligemma"])
def test_more_options_than_letters_are_refused_and_none_is_cut(family: PromptFamily) -> None:
    task, sample = sample_of("mmmu", options=tuple(f"option {number}" for number in range(27)), answer_index=26)
    with pytest.raises(SampleError, match="a question has 27 options, more than the 26 letters: give it fewer"):
        prompt_for(task, sample, family)
    last = replace(sample, options=sample.options[:26])
    assert "Z" in prompt_for(task, last, family) and "option 25" in prompt_for(task, last, family)


def test_options_of_other_tasks_stand_before_the_answer() -> None:
    own, sample = sample_of("reference_choice", options=("one", "two"), answer_index=1)
    assert prompt_for(own, sample, "chat") == "What?\nA. one\nB. two\nAnswer:"


def test_a_caption_of_paligemma_has_a_prefix_of_its_own() -> None:
    assert prompt_for(*sample_of("coco_caption"), "paligemma") == "caption en"


def test_a_hint_of_science_qa_stands_before_the_question_once(folder: Path) -> None:
    task = load_task("science_qa_img", data_dir=folder)
    without_hint = "Which state is farthest north?\nA. Utah\nB. Maine\nC. Ohio\n"
    assert prompt_for(task, task[0], "chat") == without_hint + LETTER
    assert prompt_for(task, task[1], "chat") == CHOICE
    assert prompt_for(task, task[1], "plain") == (
        "Context: Two magnets are placed as shown.\nQuestion: Will they attract?\nA. attract\nB. repel\nAnswer:"
    )


def test_a_column_that_is_called_hint_is_no_hint_of_science_qa(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"question": "What?", "answer": "a", "hint": "h"}))
    task = DataFileTask(path)
    assert prompt_for(task, task[0], "chat") == "What?\nAnswer briefly."


def test_a_task_of_users_has_its_own_words_for_every_family() -> None:
    task, sample = sample_of("mine", options=("a", "b"))
    for family in ("molmo", "chat", "plain", "paligemma"):
        assert prompt_for(task, sample, family) == "Molmo: What?"
    assert described_form(task, "chat", chat_template="applied") == {"family": "own", "chat_template": "applied"}


def test_a_given_template_is_used_for_every_family(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"question": "What?", "answer": "a"}))
    task = load_data_file(path, prompt_template="Q {question} A")
    assert {prompt_for(task, task[0], family) for family in ("molmo", "chat", "plain")} == {"Q What? A"}
    assert described_form(task, "chat", chat_template="off") == {
        "family": "chat", "open": "Q {question} A", "choice": "Q {question} A", "chat_template": "off",
    }  # fmt: skip


def test_the_record_has_the_words_in_force() -> None:
    task, _ = sample_of("text_vqa")
    assert described_form(task, "chat", chat_template="applied", system_prompt="Be brief.") == {
        "family": "chat",
        "open": f"{{question}}\n{SHORT}",
        "choice": f"{{context}}{{question}}\n{{options}}{LETTER}",
        "chat_template": "applied",
        "system_prompt": "Be brief.",
    }
    own = load_task("reference_vqa")
    assert described_form(own, "molmo", chat_template="none") == own.prompt_form  # type: ignore[attr-defined]


# --- system prompts and no template -------------------------------------------------------------------------------

SAYS = "You say one word."
PICTURE = Sample(7, "1", "Why?", ("a",), Image.new("RGB", (32, 24)), "all")
# Where each format puts the system's words, before the user turn as above but without a default system message.
SYSTEM = {
    "llava": f"{SAYS} USER: <image>\nWhy? ASSISTANT:",
    "llava_next": f"<<SYS>>\n{SAYS}\n<</SYS>>\n\n[INST] <image>\nWhy? [/INST]",
    "qwen2_5_vl": f"<|im_start|>system\n{SAYS}<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    "Why?<|im_end|>\n<|im_start|>assistant\n",
    "gemma3": f"<bos><start_of_turn>user\n{SAYS}\n\n<start_of_image>Why?<end_of_turn>\n<start_of_turn>model\n",
    "llama3": f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{SAYS}<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("family", SYSTEM)
def test_a_system_prompt_stands_where_the_template_puts_it(tmp_path: Path, family: str) -> None:
    requests = chat_requests(family, tmp_path, ChatOptions(system_prompt=SAYS))
    assert requests.make(PICTURE, "Why?", TIERS["low"]).text == SYSTEM[family]


def test_a_template_that_takes_the_systems_words_as_a_text_and_the_users_as_parts() -> None:
    family = CHAT_FAMILIES["pixtral"]
    layout = prompt_layout_of(tokenizer_of(family), family.template, "[IMG]", "pixtral", SAYS)
    assert layout.text("Why?", True) == f"<s>[INST]{SAYS}\n\n[IMG]Why?[/INST]"


def test_today_is_the_same_day_in_every_prompt_and_noted() -> None:
    """Also within a macro, where GPT-OSS asks for it."""
    template = "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }}: {{ messages[0]['content'] }}"
    tokenizer = tokenizer_of(CHAT_FAMILIES["olmoe"])
    layout = prompt_layout_of(tokenizer, template, None, "tiny")
    assert (layout.text("Why?", 0), layout.date) == ("26 Jul 2024: Why?", "2024-07-26")
    assert prompt_layout_of(tokenizer, "{{ messages[0]['content'] }}", None, "tiny").date is None
    task, _ = sample_of("text_vqa")
    assert described_form(task, "chat", chat_template="applied", date="2024-07-26")["date"] == "2024-07-26"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1]['content'] }}", "it is left out there"),
        (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            "{{ messages[0]['content'] }}",
            "System role not supported",
        ),
    ],
)
def test_a_template_without_a_place_for_a_system_prompt_refuses_it(template: str, reason: str) -> None:
    tokenizer = tokenizer_of(CHAT_FAMILIES["olmoe"])
    assert prompt_layout_of(tokenizer, template, None, "tiny").text("Why?", False) == "Why?"
    line = f"^--system_prompt has no place in the chat template of tiny \\({reason}\\); drop it, or write it into "
    with pytest.raises(ConfigurationError, match=line):
        prompt_layout_of(tokenizer, template, None, "tiny", SAYS)


def test_without_its_template_a_chat_model_gets_a_text_to_continue(tmp_path: Path) -> None:
    requests = chat_requests("qwen3_vl", tmp_path, ChatOptions(no_chat_template=True))
    assert (requests.prompt_family, requests.chat_template, requests.chat_template_use) == ("plain", None, "off")
    assert requests.make(PICTURE, "Why?", TIERS["low"]).text == "<|image_pad|>\nWhy?"


@pytest.mark.parametrize(
    ("chat", "line"),
    [
        (ChatOptions(system_prompt=SAYS), "--system_prompt has no place: paligemma has no chat template"),
        (
            ChatOptions(no_chat_template=True),
            "--no_chat_template does nothing for paligemma, which has no chat template",
        ),
    ],
)
def test_a_model_without_a_template_refuses_what_is_about_it(tmp_path: Path, chat: ChatOptions, line: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{line}; drop it"):
        chat_requests("paligemma", tmp_path, chat)


@pytest.mark.parametrize(
    ("template", "family", "prompt", "continuations", "scored"),
    [
        (None, "plain", "Question: Which?\nAnswer:", (" a cat", " dogs"), "options"),
        (None, "chat", "Which?\nAnswer briefly.", ("a cat", "dogs"), "options"),
        (None, "molmo", " User: vqa2: Which? Assistant:", (" a cat", " dogs"), "options"),
        ("{question}|", "plain", "Which?|", (" a cat", " dogs"), "options"),
        ("{question}\n{options}>", "plain", "Which?\nA: a cat\nB: dogs\n>", (" A", " B"), "letters"),
    ],
)
def test_options_that_are_scored_follow_the_prompt_of_an_open_question(
    template: str | None, family: PromptFamily, prompt: str, continuations: tuple[str, ...], scored: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "Which?", "options": ["a cat", "dogs"], "answer": "dogs"}\n')
    task = load_data_file(file, "acc_norm", prompt_template=template)
    asked = with_continuations(task, task[0], family)
    assert (prompt_for(task, task[0], family), asked.continuations) == (prompt, continuations)
    assert described_form(task, family, chat_template="none")["scored"] == scored
    task.target_delimiter = "\n"  # type: ignore[attr-defined]
    found = with_continuations(task, task[0], family).continuations or ()
    assert [each.strip(" ") for each in continuations] == [each.removeprefix("\n") for each in found]
    assert [each[0] == "\n" for each in found] == [family != "chat"] * 2
    task.metric = "mc"
    assert with_continuations(task, task[0], family).continuations is None


def test_a_text_that_is_scored_is_the_whole_prompt(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "Once {upon} a time "}\n')
    task = load_data_file(file, "perplexity")
    assert prompt_for(task, task[0], "chat") == "Once {upon} a time "
    assert with_continuations(task, task[0], "chat").continuations == ()
    file.write_text('{"question": "Which?", "answer": "this"}\n')
    asked = load_data_file(file, "perplexity", columns={"question": "question", "answer": "answer"})
    with pytest.raises(SampleError, match="^perplexity scores a text, and this is a question with an answer"):
        with_continuations(asked, asked[0], "plain")
