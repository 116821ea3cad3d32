"""Batches are compared with their requests alone; where they are wrong, requests are answered one by one."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.greedy import MOST_POSITIONS, BatchFollower
from experiment_core_utils.finishing.noted_caveats import alone_caveats
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.batches import (
    BatchAnswerer,
    BatchProof,
    Bench,
    PreparedQuestion,
    answer_prepared,
    batch_fault,
    rounded_batch_fault,
)
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.errors import GenerationFailed
from experiment_core_utils.primitives.finite_logits import NOT_FINITE, usable_token
from experiment_core_utils.records.requests import (
    BatchedAnswer,
    FollowedAnswer,
    PreparedRequest,
    RequestShape,
    VisionGeometry,
)
from experiment_core_utils.tasks.interface import Sample
from experiments.core_exp import acc_lat_profiling
from tests.measuring.test_batches import Lenient, Numbers
from tests.models.tiny_checkpoints import UNBATCHABLE_FAMILIES, write_checkpoint
from tests.scripted.scripted_model import EOS, ScriptedModel

SETTING = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1)))
NEW_TOKENS = 8
IsWrong = Callable[[Sequence[int], int], bool]


def followed(tokens: Sequence[int], logits: Any) -> FollowedAnswer:
    return FollowedAnswer(tuple(tokens), torch.tensor(logits))


ALONE = followed((1, 0), [[3.0, 4.0], [4.0, 3.0]])


def test_a_fault_in_float32_is_another_token_or_more_than_rounding() -> None:
    """Differences of 0.03 and 0.05 at norms of 5: 0.6 % and 1 % make 0.8 %; 0.03 and 0.09 make 1.2 %."""
    close = followed((1, 0), [[3.03, 4.0], [4.0, 3.05]])
    assert batch_fault(close, ALONE) is None
    far = followed((1, 0), [[3.03, 4.0], [4.09, 3.0]])
    assert batch_fault(far, ALONE) == "logits differ by 1.2% from those of the request alone"
    other = followed((1, 1), close.logits.tolist())
    assert batch_fault(other, ALONE) == "tokens are others than those of the request alone"


def test_a_fault_in_lower_precision_is_twice_the_error_of_the_request_alone() -> None:
    """The request alone is off by 0.1 and 0.3 of 5, 4 %; a batch may be by 8 %, whatever tokens it chose."""
    exact = followed((1, 0), [[3.1, 4.0], [4.0, 3.3]])
    near = followed((0, 0), [[3.1, 4.4], [4.39, 3.3]])
    norms = (3.1**2 + 4**2) ** 0.5, (4**2 + 3.3**2) ** 0.5
    assert (0.4 / norms[0] + 0.39 / norms[1]) / 2 < 2 * (0.1 / norms[0] + 0.3 / norms[1]) / 2
    assert rounded_batch_fault(near, ALONE, exact, torch.bfloat16) is None
    far = rounded_batch_fault(followed((1, 0), [[3.1, 4.4], [4.5, 3.3]]), ALONE, exact, torch.bfloat16)
    assert far == "logits are off by 0.0877 from the modules in float32, and those of the request alone by 0.0388"
    nan = followed((1, 0), [[3.0, float("nan")], [4.0, 3.0]])
    assert rounded_batch_fault(nan, ALONE, exact, torch.bfloat16) is not None


def test_without_a_judge_a_fault_in_lower_precision_is_more_than_rounding() -> None:
    """0.5 and 0.3 of 5 make 8 %, 0.5 and 0.4 make 9 %; what is no number is no agreement."""
    assert rounded_batch_fault(followed((1, 0), [[3.5, 4.0], [4.0, 2.701]]), ALONE, None, torch.bfloat16) is None
    found = rounded_batch_fault(followed((1, 0), [[3.5, 4.0], [4.0, 2.6]]), ALONE, None, torch.bfloat16)
    assert found == "logits differ by 9.0% from those of the request alone"
    nan = followed((1, 0), [[3.0, float("nan")], [4.0, 3.0]])
    assert rounded_batch_fault(nan, ALONE, None, torch.bfloat16) is not None


def test_answers_are_followed_to_their_own_ends() -> None:
    follower = BatchFollower([(5,), (6, 7, 8)], torch.device("cpu"))
    steps = [torch.eye(10)[[5, 6]], torch.eye(10)[[0, 9]], torch.eye(10)[[0, 8]]]
    assert [follower.follow(logits).tolist() for logits in steps] == [[[5], [6]], [[5], [7]], [[5], [8]]]
    first, second = follower.followed
    assert (first.likeliest, second.likeliest) == ((5,), (6, 9, 8))
    assert torch.equal(first.logits, torch.eye(10)[[5]]) and torch.equal(second.logits, torch.eye(10)[[6, 9, 8]])
    long = BatchFollower([tuple(range(10))], torch.device("cpu"))
    for token in range(10):
        long.follow(torch.eye(10)[[token]])
    (kept,) = long.followed
    assert len(kept.likeliest) == 10 and kept.logits.shape == (MOST_POSITIONS, 10)


@dataclass
class Swayed(ScriptedModel):
    """Gives other tokens, or none, to the rows of a batch that `is_wrong` says; its arguments are lengths and row."""

    is_wrong: IsWrong = lambda lengths, row: False
    wrong: tuple[int, ...] = (3, EOS)

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        super().answer_batch(inputs_list, max_new_tokens)
        scripts = self._scripts(inputs_list)
        return [tuple(map(usable_token, script[:max_new_tokens])) for script in scripts]

    def follow_batch(
        self, inputs_list: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        self.calls.append(f"follow_batch of {len(inputs_list)}")
        found = [
            (*script, *[EOS] * len(answer))[: len(answer)]
            for script, answer in zip(self._scripts(inputs_list), answers, strict=True)
        ]
        return [FollowedAnswer(row, torch.cat([self._logits(token) for token in row])) for row in found]

    def _scripts(self, inputs_list: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
        lengths = [inputs["input_ids"].shape[1] for inputs in inputs_list]
        return [self.wrong if self.is_wrong(lengths, row) else self.script for row in range(len(lengths))]


def padded_from(least: int) -> IsWrong:
    return lambda lengths, row: max(lengths) - lengths[row] >= least


def long_and_padded(least: int) -> IsWrong:
    """As of sparse attention, which is right for prompts that it need not thin out."""
    return lambda lengths, row: least <= lengths[row] < max(lengths)


def request_of(tokens: int, crops: int = 0) -> PreparedRequest:
    geometry = VisionGeometry(crops, (1, crops), (1, 1), crops) if crops else None
    inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
    return PreparedRequest(inputs, RequestShape(geometry, geometry, 0, 0, tokens, 0.0))


def numbers_of(model: ScriptedModel, word: str) -> list[int]:
    return [int(call.split()[-1]) for call in model.calls if call.startswith(word)]


@pytest.mark.parametrize(
    "is_wrong",
    [
        padded_from(1),
        padded_from(5),
        long_and_padded(5),
        lambda lengths, row: len(lengths) > 1 and row == 0,
        lambda lengths, row: len(lengths) > 1 and row == 2,
    ],
)
def test_any_wrong_row_that_can_be_met_is_found(is_wrong: IsWrong) -> None:
    """Prompts of 2, 4, 6 and 7 tokens: the shortest one and that of 6 are answered alone, too."""
    model = Swayed(is_wrong=is_wrong)
    proof = BatchProof(model, 4)
    assert proof.answer([request_of(tokens) for tokens in (2, 4, 6, 7)]) is None
    assert proof.reason == "in a batch of 4 tokens are others than those of the request alone"
    assert proof.answer([request_of(3)]) == [(1, 2, EOS)]
    model.calls.clear()
    assert proof.answer([request_of(3), request_of(3)]) is None and model.calls == []
    assert proof.answer_all([request_of(3), request_of(4)]) == [(1, 2, EOS)] * 2


def test_a_request_that_rounds_otherwise_than_its_batch_is_no_fault_of_the_batch() -> None:
    """Alone every request gives other tokens; the judge says which of the two is right."""

    def alone(lengths: Sequence[int], _row: int) -> bool:
        return len(lengths) == 1

    model = Swayed(is_wrong=alone)
    assert BatchProof(model, 4).answer([request_of(tokens) for tokens in (2, 4, 6)]) == [(1, 2, EOS)] * 3
    model = Swayed(is_wrong=alone)
    model.script, model.wrong = model.wrong, model.script
    model.follow_exactly = lambda inputs, answer: Swayed.follow_batch(model, [inputs], [answer])[0]  # type: ignore[method-assign]
    proof = BatchProof(model, 4)
    assert proof.answer([request_of(tokens) for tokens in (2, 4, 6)]) is None
    assert proof.reason == "in a batch of 3 tokens are others than those of the request alone"


def test_a_batch_beyond_what_was_proven_is_proven_again() -> None:
    model = Swayed(is_wrong=padded_from(4))
    proof = BatchProof(model, 4)
    for batch, is_proven in [
        ([(5, 1), (6, 1), (8, 1)], True),  # the first
        ([(4, 1), (6, 1), (7, 1)], False),
        ([(7, 1), (9, 1)], True),  # a longer prompt is padded
        ([(20, 1), (20, 1)], False),  # none is padded
        ([(6, 1), (8, 4)], True),  # pictures differ by 3 crops
        ([(6, 6), (8, 4)], False),
    ]:
        model.calls.clear()
        assert proof.answer([request_of(*each) for each in batch]) is not None
        assert numbers_of(model, "follow_batch") == ([len(batch), 1, 1] if is_proven else [])
    assert proof.answer([request_of(2), request_of(6)]) is None  # more padding


def test_samples_of_a_wrong_batch_are_answered_one_by_one() -> None:
    """Prompts of 1, 2 and 3 characters; what was answered before it in a right batch stays."""
    model = Swayed(is_wrong=padded_from(2))
    ids, task = (1, 2, 10, 99), Numbers()
    requests = RequestSource(task, model, ids, 0, 0, None, keep_pictures=False)
    answerer = BatchAnswerer(Bench(model, requests, 4, Lenient()), 2, None)
    done = [each for batch in answerer.outcomes(SETTING, ids) for each in batch]
    assert {each.answer for each in done} == {BatchedAnswer((1, 2, EOS), True, 2, 2)}  # type: ignore[union-attr]
    assert alone_caveats(done) == []  # type: ignore[arg-type]
    task.prompt = lambda sample: "x" * {1: 1, 2: 2, 10: 3, 99: 3}[sample.sample_id]  # type: ignore[method-assign]
    answerer = BatchAnswerer(Bench(model, requests, 4, Lenient()), 4, None)
    model.calls.clear()
    done = [each for batch in answerer.outcomes(SETTING, ids) for each in batch]
    reason = "in a batch of 4 tokens are others than those of the request alone"
    assert {each.answer for each in done} == {BatchedAnswer((1, 2, EOS), True, 1, 1, reason)}  # type: ignore[union-attr]
    assert numbers_of(model, "answer_batch") == [4, 1, 1, 1, 1]
    (found,) = alone_caveats(done)  # type: ignore[arg-type]
    assert found.figures == {"num_alone": 4, "num_samples": 4, "reason": reason}
    assert found.sentence.startswith(f"batches: 4 of 4 samples were answered one by one, because {reason}; ")
    # The proof is that of the setting in this process.
    model.calls.clear()
    list(answerer.outcomes(SETTING, ids))
    assert numbers_of(model, "answer_batch") == [1, 1, 1, 1]
    model.calls.clear()
    list(
        answerer.outcomes(
            Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1))), ids
        )
    )
    assert numbers_of(model, "answer_batch") == [4, 1, 1, 1, 1]


def test_a_sample_whose_logits_are_not_finite_is_told_from_its_batch() -> None:
    ids, task = (1, 2, 33), Numbers()
    model = Swayed(is_wrong=lambda lengths, row: lengths[row] == 2, wrong=(1, NOT_FINITE))
    requests = RequestSource(task, model, ids, 0, 0, None, keep_pictures=False)
    with pytest.raises(GenerationFailed, match="^logits are not finite at sample 33 "):
        list(BatchAnswerer(Bench(model, requests, 4, Lenient()), 4, None).outcomes(SETTING, ids))
    model = Swayed(is_wrong=padded_from(1), wrong=(1, NOT_FINITE))
    (_, done) = BatchAnswerer(Bench(model, requests, 4, Lenient()), 4, None).outcomes(SETTING, ids)
    assert {each.answer.alone_reason for each in done} == {"in a batch of 3 logits are not finite"}  # type: ignore


def test_questions_of_a_wrong_group_are_answered_one_by_one() -> None:
    other = Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1)))
    model = Swayed(is_wrong=lambda lengths, row: model.active_setting[0] == 1 and padded_from(1)(lengths, row))
    questions = [PreparedQuestion(request_of(tokens), at) for at in (SETTING, other) for tokens in (4, 2, 3)]
    assert answer_prepared(model, questions, 4, 3) == [(1, 2, EOS)] * 6
    assert numbers_of(model, "answer_batch") == [3, 3, 1, 1, 1]


WORDS = ("No", "Why is it so?", "How many are there, and of which colour are they all?", "What stands in the corner?")


def loaded(family: str, folder: Path, *flags: str) -> tuple[StagedModel, list[PreparedRequest]]:
    try:
        write_checkpoint(family, folder)
    except AttributeError as error:
        pytest.skip(f"this version of transformers lacks it: {error}")
    config = parse_config(["--model_path", str(folder), "--device", "cpu", *flags])
    model = find_model(str(folder)).load(config.model, torch.device("cpu"))
    model.apply(
        Setting.of(
            vision=tier_target("low"),
            top_k=None,
            num_active_blocks=RunningBlocks.of(tuple(range(model.num_total_blocks))),
        )
    )
    crops = tier_target("low").crops
    return model, [model.prepare(Sample(at, "", "", ("a",), None, ""), text, crops) for at, text in enumerate(WORDS)]


@pytest.mark.parametrize("family", [*UNBATCHABLE_FAMILIES, "llama", "olmoe"])
def test_a_family_that_cannot_be_batched_is_found(family: str, tmp_path: Path) -> None:
    model, requests = loaded(family, tmp_path)
    inputs = [model.to_device(each.inputs) for each in requests]
    together = model.answer_batch(inputs, NEW_TOKENS)
    alone = [model.answer_batch([each], NEW_TOKENS)[0] for each in inputs]
    if family not in UNBATCHABLE_FAMILIES:
        assert together == alone and BatchProof(model, NEW_TOKENS).answer(requests) == alone
        return
    if together == alone:
        pytest.skip(f"this version of transformers batches {family} rightly")
    proof = BatchProof(model, NEW_TOKENS)
    assert proof.answer(requests) is None
    # Tokens of the two that are compared may be the same by chance.
    assert str(proof.reason).startswith(("in a batch of 4 tokens are others", "in a batch of 4 logits differ by "))
    assert proof.answer_all(requests) == alone


def test_a_run_of_such_a_family_says_so(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """Two of five samples are measured; the other three have the answers that they have alone."""
    write_checkpoint("doge", tmp_path / "doge")
    argv = ["program", "--model_path", str(tmp_path / "doge"), "--device", "cpu", "--num_samples", "5"]
    argv += ["--max_new_tokens", "6", "--num_threads", "1", "--top_k_list", "2"]
    results = {}
    for measured in ("2", "5"):
        out = tmp_path / measured
        arguments = [*argv, "--output_dir", str(out), "--num_latency_samples", measured]
        monkeypatch.setattr(sys, "argv", arguments)
        assert acc_lat_profiling.main() == 0
        (path,) = (path for path in out.glob("*_topk*.json"))
        results[measured] = json.loads(path.read_text())
    samples, alone = (results[measured]["per_sample_results"] for measured in ("2", "5"))
    assert [each["pred"] for each in samples] == [each["pred"] for each in alone]
    sizes = [(each["accuracy_batch_size"], each["accuracy_batch_limit"]) for each in samples]
    assert sorted(sizes, key=str) == [(1, 1)] * 3 + [(None, None)] * 2
    (found,) = (each for each in results["2"]["provenance"]["caveat_records"] if each["kind"] == "answered_one_by_one")
    assert found["figures"]["num_alone"] == 3
    assert "batches: 3 of 5 samples were answered one by one, because in a batch of 3 " in capfd.readouterr().out
