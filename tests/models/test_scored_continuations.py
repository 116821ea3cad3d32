"""Log-probabilities of given continuations, against transformers' own forward pass over prompt and continuation."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.likelihood import CONTINUATIONS, ScoredRequest, score_timed
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.meters.stages import StagedRequest
from experiment_core_utils.models.common.continuations import continuation_ids, rolling_windows, unprompted_request
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.generate import GenerateStages
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT
from experiment_core_utils.models.hf.tensor_parallel import _on_host
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import GenerationFailed, SampleError
from experiment_core_utils.tasks.interface import Sample
from tests.models.causal_executions import built
from tests.models.recorded_replays import RecordedReplays
from tests.models.tiny_checkpoints import write_checkpoint

EMBEDDED = Path("checkpoints/molmoe_tiny")
# Of several lengths, in no order; the first one twice, one the beginning of another, one of a single byte.
TEXTS = (" a red one", " no", " a", " a red one", " nobody knows")
# Float32, by another order of sums: 1e-6 of a log-probability below 200.
CLOSE = {"rel": 1e-4, "abs": 2e-3}
Load = Callable[[str, str], StagedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def folder_of(family: str) -> Path:
        return EMBEDDED if family == "molmoe" else write_checkpoint(family, tmp_path_factory.mktemp(family))

    @cache
    def loaded(family: str, execution: str) -> StagedModel:
        way = "eager" if execution == "replayed" else execution
        arguments = ["--model_path", str(folder_of(family)), "--device", "cpu", "--execution", way]
        model = find_model(str(folder_of(family))).load(parse_config(arguments).model, torch.device("cpu"))
        if execution == "replayed":
            assert isinstance(model, TransformersModel)
            return TransformersModel("tiny", model.model, model.requests, "graph", RecordedReplays())
        return model  # type: ignore[return-value]

    return loaded


def sample_of(continuations: tuple[str, ...] | None, size: tuple[int, int] | None = None) -> Sample:
    image = None
    if size is not None:
        pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
    return Sample(0, "picture", "", ("a",), image, "what", continuations=continuations)


def rows_of(inputs: Mapping[str, Any]) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in inputs[CONTINUATIONS].tolist()]


@torch.inference_mode()
def by_forward(model: Any, inputs: Mapping[str, Any], row: Sequence[int]) -> tuple[float, bool]:
    """The sum of log-probabilities and whether greedy decoding gives them, by one pass of the modules."""
    given = {name: value for name, value in inputs.items() if name != CONTINUATIONS}
    more = torch.tensor([row])
    for name in given.keys() & ALONG_THE_PROMPT.keys():
        filling = torch.full_like(more, int(name == "attention_mask"))
        given[name] = torch.cat([given[name], filling], dim=1)
    given["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
    logits = model(**given, use_cache=False).logits[0, -len(row) - 1 : -1].double()
    found = logits.log_softmax(-1).gather(1, more.T).sum()
    return float(found), bool((logits.argmax(-1) == more[0]).all())


CASES = [
    ("llama", "eager", None),
    ("llama", "graph", None),
    ("llama", "replayed", None),
    ("olmoe", "eager", None),
    ("olmoe", "graph", None),
    ("gemma3", "eager", (40, 30)),
    ("qwen2_5_vl", "eager", (60, 40)),
    ("qwen2_5_vl", "replayed", (60, 40)),
    ("smolvlm", "eager", (60, 40)),
    ("llava", "eager", (30, 50)),
    ("molmoe", "eager", (90, 60)),
    ("molmoe", "graph", (90, 60)),
    ("molmoe", "eager", None),
]


@pytest.mark.parametrize(("family", "execution", "size"), CASES)
def test_scores_are_those_of_transformers_forward(
    load: Load, family: str, execution: str, size: tuple[int, int] | None
) -> None:
    model: Any = load(family, execution)
    request = model.prepare(sample_of(TEXTS, size), "What is it?", None)
    assert not request.text[-1].isspace()
    model.apply(own_setting(model))
    inputs = model.to_device(request.inputs)
    assert isinstance(inputs, ScoredRequest) and CONTINUATIONS not in inputs
    timed = model.generate_timed(inputs, 1, NoMarks())
    assert timed.token_ids == () and timed.spans == (("vision", "prefill") if size else ("prefill",))
    rows = rows_of(request.inputs)
    assert [score.num_tokens for score in timed.scores] == [len(row) for row in rows]
    modules = load(family, "eager").model if execution != "replayed" else model.model  # type: ignore[attr-defined]
    for score, row in zip(timed.scores, rows, strict=True):
        logprob, is_greedy = by_forward(modules, request.inputs, row)
        assert (score.logprob, score.is_greedy) == (pytest.approx(logprob, **CLOSE), is_greedy)
    assert timed.scores[0] == timed.scores[3]


@pytest.mark.parametrize(("family", "execution"), [("olmoe", "eager"), ("molmoe", "eager"), ("molmoe", "graph")])
def test_scores_follow_the_knobs_in_force(load: Load, family: str, execution: str) -> None:
    """And what greedy decoding gives at a setting is scored as greedy there, with the sum of its steps."""
    model: Any = load(family, execution)
    inputs = model.to_device(model.prepare(sample_of(TEXTS), "Which?", None).inputs)
    found = []
    for setting in (
        own_setting(model),
        own_setting(model).replaced(top_k=1, num_active_blocks=RunningBlocks.of((0, 2))),
    ):
        model.apply(setting)
        found.append(model.generate_timed(inputs, 1, NoMarks()).scores)
        plain = model.to_device(model.prepare(sample_of(None), "Which?", None).inputs)
        answer = model.generate_timed(plain, 4, NoMarks()).token_ids
        (followed,) = model.follow_batch([plain], [answer])
        given = torch.tensor([answer])
        scored = ScoredRequest(plain, {CONTINUATIONS: given})
        (score,) = model.generate_timed(scored, 1, NoMarks()).scores
        expected = float(followed.logits.log_softmax(-1).gather(1, given.T).sum())
        assert score.is_greedy and score.logprob == pytest.approx(expected, **CLOSE)
    assert all(abs(one.logprob - other.logprob) > 0.01 for one, other in zip(*found, strict=True))
    model.apply(own_setting(model))


def test_a_recurrent_cache_scores_by_steps_and_other_prefills() -> None:
    """It takes one token at a time, and cannot be taken back."""
    model = built("falcon_h1", torch.device("cpu"))
    torch.manual_seed(2)
    inputs = {"input_ids": torch.randint(5, 90, (1, 13)), "attention_mask": torch.ones(1, 13, dtype=torch.long)}
    rows = torch.tensor([[7, 8, 9, 11], [7, 30, -1, -1], [41, 8, 8, -1]])
    found = score_timed(GenerateStages(model), ScoredRequest(inputs, {CONTINUATIONS: rows}), NoMarks()).scores
    for score, row in zip(found, rows_of({CONTINUATIONS: rows}), strict=True):
        logprob, is_greedy = by_forward(model, inputs, row)
        assert (score.logprob, score.is_greedy) == (pytest.approx(logprob, **CLOSE), is_greedy)


@pytest.mark.parametrize(("family", "execution"), [("llama", "eager"), ("olmoe", "graph"), ("molmoe", "eager")])
def test_a_text_longer_than_the_context_is_scored_in_windows(
    load: Load, family: str, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 11 positions over 29 tokens: each token is scored once, with what fits before it."""
    model: Any = load(family, execution)
    config = model.requests._config if isinstance(model, TransformersModel) else model.model.config
    monkeypatch.setattr(config.get_text_config(), "max_position_embeddings", 11)
    text = "The words of 29 odd letters !"
    request = model.prepare(sample_of(()), text, None)
    assert request.shape.prompt_tokens == 1
    model.apply(own_setting(model))
    timed = model.generate_timed(model.to_device(request.inputs), 1, NoMarks())
    prefix, ids = request.inputs["input_ids"].tolist()[0], [token for row in rows_of(request.inputs) for token in row]
    expected, start = [], 0
    modules = load(family, "eager").model  # type: ignore[attr-defined]
    for length in [score.num_tokens for score in timed.scores]:
        before = prefix if start == 0 else ids[start + length - 12 : start]
        inputs = {"input_ids": torch.tensor([before])}
        expected.append(by_forward(modules, inputs, ids[start : start + length])[0])
        start += length
    assert start == len(ids) and len(expected) == -(-len(ids) // 11) > 1
    assert [score.logprob for score in timed.scores] == [pytest.approx(each, **CLOSE) for each in expected]


def test_windows_are_disjoint_and_the_last_sees_as_much_as_fits() -> None:
    """Worked out from the example of lm-eval's `loglikelihood_rolling`: 10 tokens, a context of 4."""
    assert list(rolling_windows(tuple(range(10)), 99, 4)) == [
        ((99,), (0, 1, 2, 3)),
        ((3,), (4, 5, 6, 7)),
        ((5, 6, 7), (8, 9)),
    ]
    assert list(rolling_windows((5,), 99, 4)) == [((99,), (5,))]


def test_white_space_at_the_end_of_a_prompt_belongs_to_the_continuation() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    assert continuation_ids(encode, "Which? \n", (" a", "b")) == [[32, 10, 32, 97], [32, 10, 98]]
    with pytest.raises(SampleError, match="'' has no token of its own behind the prompt"):
        continuation_ids(encode, "Which?", (" a", ""))


def test_without_a_prompt_the_token_before_a_text_stands_for_it(load: Load) -> None:
    model: Any = load("llama", "eager")
    request = model.prepare(sample_of(TEXTS), "", None)
    prefix = request.inputs["input_ids"].tolist()
    assert (request.shape.prompt_tokens, prefix) == (1, [[model.requests._tokenizer.bos_token_id]])
    model.apply(own_setting(model))
    found = model.generate_timed(model.to_device(request.inputs), 1, NoMarks()).scores
    for score, row in zip(found, rows_of(request.inputs), strict=True):
        logprob, is_greedy = by_forward(model.model, {"input_ids": torch.tensor(prefix)}, row)
        assert (score.logprob, score.is_greedy) == (pytest.approx(logprob, **CLOSE), is_greedy)


def test_without_a_prompt_there_must_be_such_a_token() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    assert unprompted_request(encode, ("b", " a"), 1, 0.0).inputs[CONTINUATIONS].tolist() == [[98, -1], [32, 97]]
    with pytest.raises(SampleError, match="the tokenizer has no token to begin a text with"):
        unprompted_request(encode, ("b", "a"), None, 0.0)
    with pytest.raises(SampleError, match="'' has no token"):
        unprompted_request(encode, ("b", ""), 1, 0.0)


def test_what_cannot_be_scored_is_refused(load: Load) -> None:
    model: Any = load("llama", "eager")
    with pytest.raises(SampleError, match="its text cannot be used .*it has no token|sample 0: it has no token"):
        model.prepare(sample_of(()), "", None)
    with pytest.raises(SampleError, match="its prompt of 4103 tokens is longer than the model's context of 4096"):
        model.prepare(sample_of((" " + "a" * 12,)), "b" * 4091, None)
    inputs = model.to_device(model.prepare(sample_of((" ab",)), "Which?", None).inputs)
    head = model.model.get_output_embeddings().weight
    before = head.detach().clone()
    try:
        head.data[3] = torch.nan
        with pytest.raises(GenerationFailed, match="log-probability of a given continuation is nan"):
            model.generate_timed(inputs, 1, NoMarks())
    finally:
        head.data.copy_(before)


def test_a_setting_of_other_vision_tokens_scores_otherwise(load: Load) -> None:
    """Of kept image tokens, too: the continuation follows the shortened prompt."""
    model: Any = load("llava", "eager")
    inputs = model.to_device(model.prepare(sample_of(TEXTS, (60, 40)), "Which?", None).inputs)
    found = []
    for kept in (1.0, 0.5):
        model.apply(Setting({**own_setting(model).values, "visual_token_keep": KeptTokens(kept)}))
        found.append(model.generate_timed(inputs, 1, NoMarks()).scores)
        plain = model.to_device(model.prepare(sample_of(None, (60, 40)), "Which?", None).inputs)
        row = next(iter(inputs.windows)).continuations[4]
        (followed,) = model.follow_batch([plain], [row[:8]])
        (score,) = model.generate_timed(
            ScoredRequest(plain, {CONTINUATIONS: torch.tensor([row[:8]])}), 1, NoMarks()
        ).scores
        expected = float(followed.logits.log_softmax(-1).gather(1, torch.tensor([row[:8]]).T).sum())
        assert score.logprob == pytest.approx(expected, **CLOSE)
    assert all(abs(one.logprob - other.logprob) > 0.01 for one, other in zip(*found, strict=True))


def test_the_energy_of_a_scored_request_is_of_its_prefill_and_the_whole(load: Load) -> None:
    model: Any = load("olmoe", "graph")
    model.apply(own_setting(model))
    inputs = model.to_device(model.prepare(sample_of(TEXTS), "Which?", None).inputs)
    model.warm_up(inputs, 1)
    request = StagedRequest(model, inputs, 1, model.rewind)
    assert request.output_tokens == 0 and list(request.acts) == ["prefill", "end_to_end"]
    given: list[int] = []
    follow = model.follow_tokens
    model.follow_tokens = lambda tokens, state: given.append(tokens.shape[1]) or follow(tokens, state)
    try:
        for act in request.acts.values():
            act()
    finally:
        del model.follow_tokens
    # All but the last token of each different continuation of several, in both acts.
    lengths = [len(row) - 1 for row in inputs.windows[0].continuations]
    assert given == 2 * [length for length in (*lengths[:3], lengths[4]) if length]


def test_a_request_goes_to_other_processes_with_its_continuations(load: Load) -> None:
    model: Any = load("olmoe", "eager")
    prepared = model.prepare(sample_of(TEXTS), "Which?", None).inputs
    sent = _on_host(model.to_device(prepared))
    assert sent.keys() == prepared.keys() and torch.equal(sent[CONTINUATIONS], prepared[CONTINUATIONS])
    assert model.to_device(sent).windows[0].continuations == model.to_device(prepared).windows[0].continuations
