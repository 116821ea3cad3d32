"""The stages called one by one, and the marks inside `generate()`, against what `generate()` itself gives."""

from typing import Any

import pytest
import torch

from experiment_core_utils.engines.answer_ends import NO_ENDS
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.models.hf.batch import generate_batch
from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config
from experiment_core_utils.primitives.device import HostMarks, NoMarks
from tests.models.knob_families import PHI4_MULTIMODAL, TEXT_FAMILIES, VISION_FAMILIES
from tests.models.tiny_families import VOCABULARY
from tests.same_floats import assert_same_floats

NEW_TOKENS = 6


class AloneStages(GenerateStages):
    """With what `generate_greedily` asks for beside the stages."""

    device = torch.device("cpu")
    ends = NO_ENDS


def prompt_of(tokens: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ready(family: Any) -> Any:
    model = family.built()
    model.generation_config = greedy_config(model)
    return model


def plain(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, ...]:
    rows = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    return tuple(rows[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_text_stages_and_marks_give_the_tokens_of_generate(name: str) -> None:
    model, inputs = ready(TEXT_FAMILIES[name]), prompt_of()
    expected = plain(model, inputs)
    staged = generate_greedily(AloneStages(model), inputs, NEW_TOKENS, NoMarks())
    marks = HostMarks()
    marked = generate_batch(model, [inputs], NO_ENDS, NEW_TOKENS, marks).first
    assert staged.token_ids == marked.token_ids == expected
    assert marked.spans == ("prefill",) + ("decode",) * (NEW_TOKENS - 1)
    assert len(marks.seconds()) == len(marked.spans)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_picture_stages_and_marks_give_the_tokens_of_generate(name: str) -> None:
    family = VISION_FAMILIES[name]
    model, inputs = ready(family), family.picture()
    expected = plain(model, inputs)
    stages = AloneStages(model)
    staged = generate_greedily(stages, inputs, NEW_TOKENS, NoMarks())
    marks = HostMarks()
    marked = generate_batch(model, [inputs], NO_ENDS, NEW_TOKENS, marks).first
    assert staged.token_ids == marked.token_ids == expected
    assert staged.spans[:2] == ("vision", "prefill")
    assert marked.spans == ("prefill", "vision", "prefill") + ("decode",) * (NEW_TOKENS - 1)
    assert len(marks.seconds()) == len(marked.spans)
    # Without the picture's features the answer would be another: what was encoded before is what the prefill uses.
    features = stages.encode_image(inputs)
    with torch.inference_mode():
        with_features, _ = stages.prefill(inputs, features)
        darker = stages.encode_image({**inputs, "pixel_values": inputs["pixel_values"] * 0.5})
        with_others, _ = stages.prefill(inputs, darker)
    assert not torch.allclose(with_features, with_others)


def test_pictures_that_are_encoded_inside_the_prefill_are_told_apart() -> None:
    """The marks are around the module that needs them, in no step behind the prompt."""
    model, inputs = ready(PHI4_MULTIMODAL), PHI4_MULTIMODAL.picture()  # type: ignore[misc]
    stages = AloneStages(model)
    assert not stages.can_encode_alone and stages.encode_image(inputs) is None
    marked = generate_batch(model, [inputs], NO_ENDS, NEW_TOKENS, NoMarks()).first
    staged = generate_greedily(stages, inputs, NEW_TOKENS, NoMarks())
    assert staged.token_ids == marked.token_ids == plain(model, inputs)
    assert marked.spans == ("prefill", "vision", "prefill") + ("decode",) * (NEW_TOKENS - 1)
    darker = {**inputs, "image_pixel_values": inputs["image_pixel_values"] * 0.5}
    with torch.inference_mode():
        assert not torch.allclose(stages.prefill(inputs, None)[0], stages.prefill(darker, None)[0])
    text = generate_batch(model, [prompt_of()], NO_ENDS, 2, NoMarks()).first
    assert text.spans == ("prefill", "decode")


def test_nothing_is_left_behind_by_the_marks() -> None:
    family = next(iter(VISION_FAMILIES.values()))
    model, inputs = ready(family), family.picture()
    generate_batch(model, [inputs], NO_ENDS, 2, NoMarks())
    assert "get_image_features" not in vars(model.base_model)


def test_a_state_that_is_rewound_continues_as_before() -> None:
    model, inputs = ready(TEXT_FAMILIES["olmoe"]), prompt_of()
    stages = GenerateStages(model)
    with torch.inference_mode():
        logits, state = stages.prefill(inputs, None)
        first = logits.argmax(dim=-1, keepdim=True)
        once = [stages.decode_step(first, state) for _ in range(3)]
        stages.rewind(state, 3)
        again = [stages.decode_step(first, state) for _ in range(3)]
    for one, other in zip(once, again, strict=True):
        assert_same_floats(one, other)


def test_the_checkpoints_options_for_sampling_are_dropped_and_its_special_tokens_kept() -> None:
    model = TEXT_FAMILIES["llama"].built()
    model.generation_config.update(do_sample=True, temperature=0.1, repetition_penalty=2.0, eos_token_id=[7, 8])
    greedy = greedy_config(model)
    assert (greedy.do_sample, greedy.num_beams, greedy.eos_token_id, greedy.pad_token_id) == (False, 1, [7, 8], 0)
    assert greedy.repetition_penalty in (None, 1.0)
