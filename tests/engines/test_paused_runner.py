"""A paused prefill by engines gives what the modules give; graphed ones are compared with the reference engine."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.cuda_graphs import CudaGraphPool
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.prefill import GraphedPausedPrefill
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.paused_runner import EnginePausedPrefill, PausedPrefillShape, PausedPrefillStages
from experiment_core_utils.engines.reference.decoder import ReferencePausedPrefill, ReferencePrefill
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.eager.paused_stages import EagerPausedPrefill
from experiment_core_utils.models.molmoe.eager.stages import EagerStages
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.primitives.errors import ConfigurationError, SettingError
from tests.conftest import tiny_config

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDTH, STEPS = 32, 5
# Pause, top-k and blocks; behind all four blocks nothing is left to choose in the prefill but top-k of the steps.
CHOICES = [
    (1, 4, (0, 1, 2, 3)),
    (1, 2, (0, 2)),
    (1, 1, (0,)),
    (2, 3, (0, 1, 3)),
    (3, 1, (0, 1, 2, 3)),
    (3, 2, (0, 1, 2)),
    (4, 2, (0, 1, 2, 3)),
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def model_on(device: str) -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    with torch.inference_mode(False):
        return MolmoeForConditionalGeneration(tiny_config()).eval().to(device)


def stages_of(model: MolmoeForConditionalGeneration) -> EngineStages:
    return EngineStages(MolmoeEngineModel(model))


@pytest.fixture(scope="module")
def model() -> MolmoeForConditionalGeneration:
    return model_on("cpu")


def inputs_and_row(tokens: int, seed: int = 0) -> tuple[Mapping[str, Any], torch.Tensor]:
    """A prompt without a picture, and a row ten times as large as an embedding: were it seen, it would show."""
    draws = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(6, 100, (1, tokens), generator=draws)}, 10 * torch.randn(
        1, 1, WIDTH, generator=draws
    )


def answered(
    split: PausedPrefillStages, inputs: Mapping[str, Any], row: torch.Tensor | None, choice: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The states behind the pause, and the logits of the prompt and of STEPS likeliest tokens after it."""
    pause, top_k, blocks = choice
    states = split.begin(inputs, None, pause, row, STEPS + 1).clone()
    logits, state = split.finish(EngineKnobs(top_k, blocks))
    found = [logits.clone()]
    while len(found) <= STEPS:
        found.append(split.decode_step(found[-1].argmax(dim=-1, keepdim=True), state).clone())
    return states, found


@pytest.mark.parametrize("with_row", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tokens", [1, 12])
def test_states_and_logits_are_those_of_the_modules(
    model: MolmoeForConditionalGeneration, tokens: int, choice: Any, with_row: bool
) -> None:
    inputs, row = inputs_and_row(tokens)
    stages = stages_of(model)
    reference = EnginePausedPrefill(stages)
    reference.warm_up([PausedPrefillShape(tokens, None, STEPS + 1, ((choice[0], EngineKnobs(*choice[1:])),))])
    # What lies in slots that nobody filled is never read.
    stages.kv_cache.keys.fill_(float("nan"))
    stages.kv_cache.values.fill_(float("nan"))
    found = answered(reference, inputs, row if with_row else None, choice)
    expected = answered(EagerPausedPrefill(model, EagerStages(model)), inputs, row if with_row else None, choice)
    assert found[0].shape == expected[0].shape == (2 if with_row else 1, WIDTH)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert int(ours.argmax()) == int(theirs.argmax())


def test_requests_follow_each_other_in_the_same_slots(model: MolmoeForConditionalGeneration) -> None:
    eager, reference = (
        EagerPausedPrefill(model, EagerStages(model)),
        EnginePausedPrefill(stages_of(model)),
    )
    for seed, (tokens, choice) in enumerate(zip((30, 4, 600, 9), CHOICES, strict=False)):
        inputs, row = inputs_and_row(tokens, seed)
        ours, theirs = answered(reference, inputs, row, choice), answered(eager, inputs, row, choice)
        assert [int(each.argmax()) for each in ours[1]] == [int(each.argmax()) for each in theirs[1]]


def test_the_longest_request_makes_the_room_for_all(model: MolmoeForConditionalGeneration) -> None:
    """Stores come in steps of 512 slots: 505 tokens and 7 of an answer just fit into one, 506 do not."""
    stages = stages_of(model)
    split, choices = EnginePausedPrefill(stages), ((1, EngineKnobs(4, (0, 1))),)
    split.warm_up([PausedPrefillShape(tokens, None, 7, choices) for tokens in (30, 505, 9)])
    kv_cache = stages.kv_cache
    for tokens in (505, 30):
        split.begin(inputs_and_row(tokens)[0], None, 1, inputs_and_row(tokens)[1], 7)
        split.finish(EngineKnobs(4, (0, 1)))
    assert kv_cache.max_seq_len == 512 and stages.kv_cache is kv_cache
    split.begin(inputs_and_row(506)[0], None, 1, None, 7)
    assert stages.kv_cache.max_seq_len == 1024


def test_a_state_is_lost_with_the_next_beginning(model: MolmoeForConditionalGeneration) -> None:
    split = EnginePausedPrefill(stages_of(model))
    inputs, row = inputs_and_row(5)
    split.begin(inputs, None, 1, row, STEPS)
    logits, state = split.finish(EngineKnobs(4, (0, 1)))
    split.begin(inputs, None, 1, row, STEPS)
    with pytest.raises(SettingError, match="is used by another request"):
        split.decode_step(logits.argmax(dim=-1, keepdim=True), state)


@pytest.mark.parametrize("between", ["prefill", "warm_up", "reserve", "finish", "nothing_begun", "release_unused"])
def test_a_beginning_whose_place_something_else_has_is_not_finished(
    model: MolmoeForConditionalGeneration, between: str
) -> None:
    """What the first blocks left in the slots is overwritten then, and logits would be of two requests."""
    stages = stages_of(model)
    split, knobs = EnginePausedPrefill(stages), EngineKnobs(4, (0, 1))
    inputs, row = inputs_and_row(9)
    other, _ = inputs_and_row(9, seed=1)
    if between != "nothing_begun":
        split.begin(inputs, None, 1, row, STEPS)
    {
        "prefill": lambda: stages.prefill(knobs, other, None),
        "warm_up": lambda: stages.warm_up(knobs, other, STEPS),
        "reserve": lambda: stages.reserve(5),
        "finish": lambda: split.finish(EngineKnobs(4, (0, 1))),
        "nothing_begun": lambda: None,
        "release_unused": stages.release_unused,
    }[between]()
    with pytest.raises(SettingError, match="the KV cache has no paused prefill: another request came"):
        split.finish(EngineKnobs(4, (0, 1)))
    expected = answered(EagerPausedPrefill(model, EagerStages(model)), inputs, row, (1, 4, (0, 1)))
    found = answered(split, inputs, row, (1, 4, (0, 1)))
    torch.testing.assert_close(torch.cat(found[1]), torch.cat(expected[1]), rtol=1e-4, atol=1e-4)


def test_a_setting_that_is_refused_can_be_chosen_anew(model: MolmoeForConditionalGeneration) -> None:
    split = EnginePausedPrefill(stages_of(model))
    inputs, row = inputs_and_row(5)
    split.begin(inputs, None, 2, row, STEPS)
    with pytest.raises(ConfigurationError, match="leave out one of the first 2"):
        split.finish(EngineKnobs(4, (0, 2)))
    split.finish(EngineKnobs(4, (0, 1)))


def test_modules_finish_what_was_started_whatever_ran_in_between_and_once(
    model: MolmoeForConditionalGeneration,
) -> None:
    """Their cache is the request's own."""
    stages = EagerStages(model)
    split = EagerPausedPrefill(model, stages)
    inputs, row = inputs_and_row(9)
    expected = answered(split, inputs, row, (1, 2, (0, 1)))[1][0]
    split.begin(inputs, None, 1, row, STEPS)
    stages.prefill(EngineKnobs(4, (0, 1, 2, 3)), inputs_and_row(9, seed=1)[0], None)
    torch.testing.assert_close(split.finish(EngineKnobs(2, (0, 1)))[0], expected)
    with pytest.raises(SettingError, match="no prefill was started, or it was finished; start it again"):
        split.finish(EngineKnobs(2, (0, 1)))
    model.reset_knobs()


def test_a_whole_prefill_and_one_with_a_pause_are_not_taken_for_each_other(
    model: MolmoeForConditionalGeneration,
) -> None:
    """The same prompt and knobs; block 1 ran with 1 expert in the whole one, with the model's 4 before the pause."""
    stages = stages_of(model)
    split, knobs = EnginePausedPrefill(stages), EngineKnobs(1, (0, 1, 2))
    inputs, row = inputs_and_row(5)
    logits, whole = stages.prefill(knobs, inputs, None)
    token, whole_keys = logits.argmax(dim=-1, keepdim=True), stages.kv_cache.keys[:3, :, :, :5].clone()
    split.begin(inputs, None, 2, row, STEPS)
    _, paused = split.finish(knobs)
    assert not torch.allclose(stages.kv_cache.keys[:3, :, :, :5], whole_keys)
    for refused in (lambda: stages.decode_step(token, whole), lambda: stages.rewind(whole, 0)):
        with pytest.raises(SettingError, match="is used by another request"):
            refused()
    stages.decode_step(token, paused)
    stages.prefill(knobs, inputs, None)
    stages.decode_step(token, whole)
    with pytest.raises(SettingError, match="is used by another request"):
        stages.rewind(paused, 1)


def test_what_cannot_be_is_refused(model: MolmoeForConditionalGeneration) -> None:
    inputs, row = inputs_and_row(5)
    for split in (
        EagerPausedPrefill(model, EagerStages(model)),
        EnginePausedPrefill(stages_of(model)),
    ):
        with pytest.raises(ConfigurationError, match="a pause after 5 blocks is not possible; give 1 to 4"):
            split.begin(inputs, None, 5, row, STEPS)
        split.begin(inputs, None, 2, row, STEPS)
        with pytest.raises(ConfigurationError, match="leave out one of the first 2"):
            split.finish(EngineKnobs(4, (0, 2)))
        split.begin(inputs, None, 2, row, STEPS)
        with pytest.raises(ConfigurationError, match="top_k 9 is not possible"):
            split.finish(EngineKnobs(9, (0, 1)))
    model.reset_knobs()


@needs_a_gpu
@pytest.mark.parametrize("with_row", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tokens", [1, 63, 64, 70])
def test_graphed_parts_are_the_reference_ones(tokens: int, choice: Any, with_row: bool) -> None:
    pause, knobs = choice[0], EngineKnobs(*choice[1:])
    decoder = fuse_decoder_weights(model_on("cuda"))
    graphed, reference = (
        GraphedPausedPrefill(decoder, CudaGraphPool(8)),
        ReferencePausedPrefill(decoder, ReferencePrefill(decoder)),
    )
    ours, theirs = KVCache.allocate(decoder, 100), KVCache.allocate(decoder, 100)
    graphed.warm_up(pause, knobs, ours, tokens)
    for seed in range(2):
        inputs, row = inputs_and_row(tokens, seed)
        given = decoder.embedding[inputs["input_ids"][0].cuda()], row[0, 0].cuda() if with_row else None
        states = graphed.begin(*given, pause, ours).clone()
        torch.testing.assert_close(states, reference.begin(*given, pause, theirs), rtol=1e-4, atol=1e-4)
        logits, wanted = graphed.finish(knobs, ours), reference.finish(knobs, theirs)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert ours.next_tokens.tolist() == [int(wanted.argmax())]
        for mine, yours in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(mine[:, :, :, :tokens], yours[:, :, :, :tokens], rtol=1e-4, atol=1e-4)


@needs_a_gpu
def test_graphed_answers_are_those_of_the_modules_at_every_choice() -> None:
    """Graphs of many shapes and choices in turn, in memory that they share."""
    model = model_on("cuda")
    graphed, eager = (
        EnginePausedPrefill(stages_of(model)),
        EagerPausedPrefill(model, EagerStages(model)),
    )
    choices = tuple((pause, EngineKnobs(top_k, blocks)) for pause, top_k, blocks in CHOICES)
    graphed.warm_up([PausedPrefillShape(tokens, None, STEPS + 1, choices) for tokens in (130, 5, 64)])
    for seed, tokens in enumerate((5, 130, 64, 5)):
        for choice in CHOICES:
            inputs, row = inputs_and_row(tokens, seed)
            inputs = {"input_ids": inputs["input_ids"].cuda()}
            ours, theirs = (answered(split, inputs, row.cuda(), choice) for split in (graphed, eager))
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-3)
            for mine, yours in zip(ours[1], theirs[1], strict=True):
                torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-3)


@needs_a_gpu
def test_a_prompt_without_room_for_a_row_is_refused() -> None:
    decoder = fuse_decoder_weights(model_on("cuda"))
    engine = GraphedPausedPrefill(decoder, CudaGraphPool(2))
    with pytest.raises(ConfigurationError, match="80 tokens and one row do not fit into a KV cache of 80"):
        engine.warm_up(1, EngineKnobs(4, (0, 1)), KVCache.allocate(decoder, 80), 80)
