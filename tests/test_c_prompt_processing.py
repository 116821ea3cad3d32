"""The draw of samples, its split over processes, requests made from them; texts filtered, sorted, tokenised."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.c_prompt_processing import (
    filter_prompts_by_length,
    fingerprint_of_ids,
    sort_prompts_by_length,
    tokenise_prompts,
)
from experiment_core_utils.config.parts import TaskConfig
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice, ScoredQuestions
from experiment_core_utils.models.common.text_generation import is_surely_longer
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.requests.drawing import draw_other_samples, draw_samples, with_task_named
from experiment_core_utils.requests.fitting import refuse_picture_tasks, refuse_unfit_pictures
from experiment_core_utils.tasks.content import digests_of
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.registry import load_data_file, load_task
from experiment_core_utils.tasks.sampling import Sampling, choose_latency_ids, shard_of_process
from tests.tiny_models.tiny_text_model import PROMPTS, tiny_tokenizer


def test_a_text_is_surely_longer_by_its_first_part_that_has_too_many_tokens() -> None:
    def words(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text.split())}

    # Parts of 80, 160, 320 characters; a part has to have 16 tokens more than allowed.
    assert not is_surely_longer("a " * 40, 10, words)
    assert is_surely_longer("a " * 41, 10, words)
    assert not is_surely_longer("a" * 1000, 10, words)
    assert is_surely_longer("a" * 100 + " b" * 200, 10, words)
    # 26 tokens of the first 80 characters are not yet too many; nor is the text ever looked at as a whole.
    assert not is_surely_longer("a " * 26 + " " * 100, 10, words)
    assert is_surely_longer("a " * 27 + " " * 100, 10, words)


def test_the_flags_choose_the_samples_and_their_ids_ascend() -> None:
    """RandomState(42).choice(2000, 3, replace=False) is 1860, 353, 1333 in its own order."""
    task = load_task("reference_vqa", "validation")
    drawn = draw_samples(task, parse_config(["--num_samples", "3"]).task)
    assert drawn.sample_ids == (353, 1333, 1860)
    assert drawn.sampling == Sampling("random", 42, 3, 2000)
    chosen = draw_samples(task, parse_config(["--ids", "99", "3", "17", "3"]).task)
    assert (chosen.sample_ids, chosen.sampling) == ((3, 17, 99), Sampling("ids", None, 3, 2000))
    by_type = draw_samples(task, parse_config(["--num_samples", "10", "--sample_by", "question_type"]).task)
    assert by_type.sampling == Sampling("question_type", 42, 10, 2000)
    assert {task.question_type(index) for index in by_type.sample_ids} == {
        task.question_type(index) for index in range(len(task))
    }


def test_samples_that_may_end_early_are_shuffled_by_the_seed() -> None:
    task = load_task("reference_vqa", "validation")
    flags = ["--ids", "3", "17", "50", "99", "--seed"]
    # numpy.random.RandomState(0).permutation(4) is [2, 3, 1, 0].
    assert draw_samples(task, parse_config([*flags, "0"]).task, may_stop_early=True).sample_ids == (50, 99, 17, 3)
    assert draw_samples(task, parse_config([*flags, "1"]).task, may_stop_early=True).sample_ids == (99, 50, 3, 17)


def test_ids_outside_the_split_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="sample ids 2000 are outside the split; it has 0 to 1999"):
        draw_samples(load_task("reference_vqa", "validation"), parse_config(["--ids", "3", "2000"]).task)


def chosen_on(task: Task, ids: tuple[int, ...], contents: tuple[str, ...] | None, **other: str) -> BlockChoice:
    source = {**task.source, "path": "elsewhere"} | other
    scored = ScoredQuestions(split=task.split, source=source, scored_ids=ids, scored_sha256=contents)
    return BlockChoice(scores={1: 1.0}, questions={task.name: scored})


def test_questions_that_chose_the_blocks_are_not_drawn() -> None:
    """Without them the draw is 1860, 353, 1333, as above; the next one in its order is 905."""
    task, flags = load_task("reference_vqa", "validation"), parse_config(["--num_samples", "3"]).task
    assert list(np.random.RandomState(42).permutation(2000)[:4]) == [1860, 353, 1333, 905]
    drawn = draw_other_samples(task, flags, chosen_on(task, (9, 353), None))
    assert (drawn.sample_ids, drawn.sampling.num_left_out) == ((905, 1333, 1860), 2)
    # Scenes of another seed or split are other questions.
    other = load_task("reference_vqa", "train")
    for choice in (chosen_on(task, (353,), None, seed="1"), chosen_on(other, (353,), None), BlockChoice()):
        assert draw_other_samples(task, flags, choice).sample_ids == (353, 1333, 1860)
    with pytest.raises(ConfigurationError, match=r"^--ids 9: 2 of these samples of reference_vqa validation chose the"):
        draw_other_samples(task, parse_config(["--ids", "9", "4", "17"]).task, chosen_on(task, (17, 9), None))
    few = load_task("reference_vqa")
    few._length = 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"^all 2 samples of reference_vqa validation chose the blocks"):
        draw_other_samples(few, flags, chosen_on(few, (0, 1), None))


def test_questions_that_chose_the_blocks_are_known_by_their_content_in_another_file(tmp_path: Path) -> None:
    rows = [f'{{"question": "Is {n} even?", "answer": "{"no" if n % 2 else "yes"}"}}\n' for n in range(9)]
    (tmp_path / "one.jsonl").write_text("".join(rows))
    (tmp_path / "two.jsonl").write_text("".join(reversed(rows)))
    one, two = (load_data_file(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    choice = chosen_on(one, (1, 7, 3, 0), tuple((digests_of(one, [1, 7, 3, 0], None) or {}).values()))
    for number, expected in (("9", 5), ("4", 4)):
        drawn = draw_other_samples(two, parse_config(["--num_samples", number]).task, choice)
        numbers = {8 - each for each in drawn.sample_ids}
        assert len(numbers) == expected and numbers <= {2, 4, 5, 6, 8}


class TextTask:
    """Questions without pictures; the first cannot be read."""

    def __getitem__(self, index: int) -> Sample:
        if index == 0:
            raise SampleError("torn")
        return Sample(index, "none", "Why?", ("so",), None, "why")


def test_a_text_model_is_not_asked_about_pictures_without_text_only() -> None:
    pictures, config = load_task("reference_vqa", "validation"), parse_config([]).task
    text_only = parse_config(["--text_only"]).task

    def refuse(task: Task, config: TaskConfig, takes_pictures: bool) -> None:
        refuse_unfit_pictures(task, (1, 2), config, takes_pictures=takes_pictures, model="gpt")

    with pytest.raises(ConfigurationError, match=r"gpt is a text model .* pictures of reference_vqa; .*--text_only"):
        refuse(pictures, config, False)
    refuse(pictures, text_only, False)
    refuse(pictures, config, True)
    refuse(TextTask(), config, False)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="--text_only is for a text model"):
        refuse(pictures, text_only, True)


def test_a_model_with_vision_is_not_asked_about_rows_without_pictures_without_text_only(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"question": "Is 4 even?", "answer": "yes"}\n')
    task, given = load_data_file(tmp_path / "my.jsonl"), ["--data_file", str(tmp_path / "my.jsonl")]
    config, text_only = parse_config(given).task, parse_config([*given, "--text_only"]).task
    with pytest.raises(ConfigurationError, match=r"no picture in any row.*--columns image=COLUMN, or --text_only"):
        refuse_unfit_pictures(task, (0,), config, takes_pictures=True, model="molmo")
    refuse_unfit_pictures(task, (0,), text_only, takes_pictures=True, model="molmo")
    refuse_unfit_pictures(task, (0,), config, takes_pictures=False, model="gpt")


@pytest.mark.parametrize(
    ("flags", "takes_pictures", "name"),
    [
        ([], True, "reference_vqa"),
        ([], False, "reference_questions"),
        (["--dataset_name", "okvqa"], False, "okvqa"),
        (["--data_file", "own.csv"], False, None),
    ],
)
def test_the_default_task_is_one_that_the_model_can_answer(
    flags: list[str], takes_pictures: bool, name: str | None
) -> None:
    assert with_task_named(parse_config(flags).task, takes_pictures=takes_pictures).dataset_name == name


@given(st.lists(st.integers(0, 999), unique=True), st.integers(1, 8))
def test_shards_are_disjoint_complete_and_of_like_size(ids: list[int], processes: int) -> None:
    shares = [shard_of_process(ids, rank, processes) for rank in range(processes)]
    assert sorted(sample_id for share in shares for sample_id in share) == sorted(ids)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_shares_by_hand() -> None:
    assert [shard_of_process((3, 5, 7, 9, 11), rank, 2) for rank in (0, 1)] == [(3, 7, 11), (5, 9)]


def test_fingerprints_distinguish_ids() -> None:
    assert fingerprint_of_ids((1, 23)) == fingerprint_of_ids([1, 23])
    assert len({fingerprint_of_ids(ids) for ids in ((1, 23), (12, 3), (23, 1), (1, 2, 3), ())}) == 5
    assert len(fingerprint_of_ids((1,))) == 16


def test_an_index_outside_the_split_is_no_sample() -> None:
    with pytest.raises(IndexError):
        load_task("reference_vqa", "validation")[2000]


def test_the_measured_samples_are_a_random_part_that_grows() -> None:
    sample_ids = tuple(range(0, 200, 2))
    few, more = (choose_latency_ids(sample_ids, number, 42) for number in (5, 20))
    assert (len(few), len(more)) == (5, 20)
    assert few < more < set(sample_ids)
    assert few == choose_latency_ids(sample_ids[::-1], 5, 42) != choose_latency_ids(sample_ids, 5, 43)
    assert max(more) > 100 > min(more)  # not simply the first ones
    assert choose_latency_ids(sample_ids, None, 1) == choose_latency_ids(sample_ids, 100, 1) == set(sample_ids)
    assert choose_latency_ids(sample_ids, 0, 1) == set()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def test_prompts_are_filtered_by_true_tokens(tokenizer: Any) -> None:
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    limit = sorted(lengths)[3]
    kept = filter_prompts_by_length(PROMPTS, tokenizer, limit)
    assert kept == [prompt for prompt, length in zip(PROMPTS, lengths, strict=True) if length <= limit]
    assert 0 < len(kept) < len(PROMPTS)
    assert filter_prompts_by_length(PROMPTS, tokenizer, 0) == filter_prompts_by_length([], tokenizer, 9) == []


def test_special_tokens_count(tokenizer: Any) -> None:
    class Prefixing:
        """Puts one token in front, as tokenizers with a begin-of-sequence token do."""

        pad_token_id, eos_token_id = 1, None

        def __call__(self, prompts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[0, *tokenizer(prompt)["input_ids"]] for prompt in prompts]}

    length = len(tokenizer("Is it raining?")["input_ids"])
    assert filter_prompts_by_length(["Is it raining?"], tokenizer, length) == ["Is it raining?"]
    assert filter_prompts_by_length(["Is it raining?"], Prefixing(), length) == []
    assert tokenise_prompts([""], Prefixing())["input_ids"].tolist() == [[0]]


def test_prompts_are_sorted_and_ties_keep_their_order(tokenizer: Any) -> None:
    ordered = sort_prompts_by_length(["b", *PROMPTS, "c"], tokenizer)
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in ordered]
    assert lengths == sorted(lengths)
    assert [prompt for prompt in ordered if prompt in ("a", "b", "c")] == ["b", "a", "c"]
    assert sorted(ordered) == sorted(["b", *PROMPTS, "c"])


def test_prompts_are_padded_on_the_left_whatever_the_tokenizer_does() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    tokenised = tokenise_prompts(PROMPTS, tokenizer)
    for prompt, ids, mask in zip(PROMPTS, tokenised["input_ids"], tokenised["attention_mask"], strict=True):
        own = tokenizer(prompt)["input_ids"]
        assert int(mask.sum()) == len(own)
        assert ids[-len(own) :].tolist() == own
        assert mask[-len(own) :].all()
        assert (ids[: -len(own)] == tokenizer.pad_token_id).all()
    assert tokenised["input_ids"].shape[1] == max(map(int, tokenised["attention_mask"].sum(dim=1)))


def test_what_cannot_be_tokenised_is_named() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigurationError, match="no prompt to tokenise"):
        tokenise_prompts([], tokenizer)
    with pytest.raises(ConfigurationError, match=r"prompt 1 \(''\) has no token"):
        tokenise_prompts(["a", ""], tokenizer)
    tokenizer.pad_token = None
    with pytest.raises(ConfigurationError, match="no pad token; set tokenizer.pad_token = tokenizer.eos_token"):
        tokenise_prompts(["a"], tokenizer)


def test_a_text_model_is_refused_published_pictures_before_their_data_are_looked_for() -> None:
    config, both = TaskConfig(dataset_name="text_vqa"), ("reference_questions", "text_vqa")
    advice = "gpt is a text model and cannot see the pictures of text_vqa; give a task without pictures, such as "
    with pytest.raises(ConfigurationError, match=f"{advice}--dataset_name reference_questions, or --text_only to ask"):
        refuse_picture_tasks(both, config, takes_pictures=False, model="gpt")
    refuse_picture_tasks(both, config, takes_pictures=True, model="molmo")
    refuse_picture_tasks(both, config.model_copy(update={"text_only": True}), takes_pictures=False, model="gpt")
    refuse_picture_tasks((None, "reference_questions"), config, takes_pictures=False, model="gpt")
