"""Requests of real processors, written and read offline: what they hold, how the tiers turn it, that models take it."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange, token_target
from experiment_core_utils.models.hf import requests as hf_requests
from experiment_core_utils.models.hf.knobs.patches import fields_in_force
from experiment_core_utils.models.hf.processor import load_hf_processor
from experiment_core_utils.models.hf.requests import HFRequests
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, SampleTimedOut
from experiment_core_utils.records.requests import VisionGeometry
from experiment_core_utils.tasks.interface import Sample
from tests.models.tiny_checkpoints import TEXT_FAMILIES, VISION_FAMILIES, bounded_pictures, write_checkpoint
from tests.processes.deadline import ends_within
from tests.same_floats import assert_same_floats

LOW = TIERS["low"]


def sample(width: int | None = 60, height: int = 40) -> Sample:
    image = None
    if width is not None:
        pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
    return Sample(7, "picture", "What is it?", ("a cat",), image, "what")


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    requests: HFRequests
    model: Any


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    @cache
    def made(family: str) -> Checkpoint:
        try:
            folder = write_checkpoint(family, tmp_path_factory.mktemp(family))
        except ImportError as error:
            # In older versions of transformers the processors of these two need torchvision.
            if family not in ("smolvlm", "idefics3"):
                raise
            pytest.skip(str(error).strip().splitlines()[0])
        kind = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
        requests = HFRequests(load_hf_processor(folder), AutoConfig.from_pretrained(folder), family)
        return Checkpoint(folder, requests, kind.from_pretrained(folder).eval())

    return made


Made = Callable[[str], Checkpoint]


# --- counts -------------------------------------------------------------------------------------------------------

# For a picture of 60 x 40 pixels. The tiles are those of tiny_checkpoints; what the grids follow from is in
# test_vision_options.
REALISED = {
    # The canvas of 24 x 48 holds it as 24 x 36 pixels, 4 columns of 8 pixels of the 6; 3 rows with an end each, and the
    # whole of 3 * 3.
    ("llava_next", "low"): (2, (1, 2), 4 * 3 + 3 + 9),
    # The canvas of 48 x 72 has its aspect, 6 rows of 9 columns with an end each, and the whole.
    ("llava_next", "medium"): (6, (2, 3), 6 * 9 + 6 + 9),
    # 72 x 72 is the smallest that holds it of 9 to 15 tiles, as 48 x 72 pixels: 6 of 9 rows and one more, since as many
    # are dropped above as below.
    ("llava_next", "high"): (9, (3, 3), 7 * 9 + 7 + 9),
    # Aspect 3:2: 2:1 and 1:1 are both off by 1/2, and 1024 pixels are not too many for the second.
    ("internvl", "low"): (2, (1, 2), 3 * 4),
    ("internvl", "medium"): (6, (2, 3), 7 * 4),
    # 5:3 and 4:3 are off by 1/6 each in real numbers, by less in 5:3 in floating point.
    ("internvl", "high"): (15, (3, 5), 16 * 4),
    # 64 x 43 would be 2 * 2 tiles.
    ("idefics3", "low"): (0, None, 4),
    # 96 x 64 -> 2 * 3; 128 x 86 -> 3 * 4.
    ("idefics3", "medium"): (6, (2, 3), 7 * 4),
    ("idefics3", "high"): (12, (3, 4), 13 * 4),
    ("smolvlm", "low"): (0, None, 4),
    ("smolvlm", "medium"): (6, (2, 3), 7 * 4),
    ("smolvlm", "high"): (12, (3, 4), 13 * 4),
    # It fits each canvas: the smallest of each range, without the whole.
    ("aria", "low"): (1, (1, 1), 128),
    ("aria", "medium"): (4, (2, 2), 512),
    ("aria", "high"): (9, (3, 3), 1152),
    # 5 * 7.5 tokens of 8 pixels, 37.5 in all. sqrt(288 / 37.5) = 2.771: ceil(13.86) * ceil(20.78).
    ("qwen2_5_vl", "low"): (0, None, 14 * 21),
    # sqrt(720 / 37.5) = 4.382: ceil(21.91) * ceil(32.86); sqrt(1440 / 37.5) = 6.197: ceil(30.98) * ceil(46.48).
    ("qwen2_5_vl", "medium"): (0, None, 22 * 33),
    ("qwen2_5_vl", "high"): (0, None, 31 * 47),
    ("qwen3_vl_moe", "low"): (0, None, 14 * 21),
    ("qwen3_vl_moe", "medium"): (0, None, 22 * 33),
    ("qwen3_vl_moe", "high"): (0, None, 31 * 47),
    ("glm4v_moe", "low"): (0, None, 14 * 21),
    ("glm4v_moe", "medium"): (0, None, 22 * 33),
    ("glm4v_moe", "high"): (0, None, 31 * 47),
}


@pytest.mark.parametrize(("family", "tier"), REALISED)
def test_a_tier_changes_the_realised_count(checkpoint_of: Made, family: str, tier: str) -> None:
    num_crops, tiling, tokens = REALISED[family, tier]
    requests = checkpoint_of(family).requests
    assert requests.vision_knob_unsupported_reason is None
    request = requests.make(sample(), "What is it?", TIERS[tier])
    actual = request.shape.actual
    assert actual is not None
    assert (actual.num_crops, actual.tiling, request.shape.vision_tokens) == (num_crops, tiling, tokens)
    assert actual.pooled_features == tokens
    assert request.shape.prompt_tokens == request.inputs["input_ids"].shape[1]
    crops_there = 0 if actual.patches else int(np.prod(request.inputs["pixel_values"].shape[:-3]))
    assert actual.total_crops == crops_there
    if actual.patches:
        assert actual.patches == request.inputs["pixel_values"].shape[0] == 4 * tokens
        assert [1, *(actual.patch_grid or ())] == request.inputs["image_grid_thw"][0].tolist()
        assert request.shape.size(2).grids == (actual.patch_grid,)


# --- the model's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 40), (40, 150), (33, 33)])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_without_bounds_a_request_is_the_processors_own(
    checkpoint_of: Made, family: str, size: tuple[int, int]
) -> None:
    """Ids and pictures are those of the checkpoint's processor called with nothing but the conversation, as lmms-eval's
    wrappers call it at default bounds.
    """
    made, given = checkpoint_of(family), sample(*size)
    processor: Any = load_hf_processor(made.folder)
    turn = [{"type": "image", "image": given.image}, {"type": "text", "text": "What is it?"}]
    conversation: Any = [{"role": "user", "content": turn}]
    options: Any = {"add_generation_prompt": True, "chat_template": processor.chat_template}
    if processor.chat_template is None:
        expected = processor(images=[given.image], text=["<image>\nWhat is it?"], return_tensors="pt")
    elif family == "smolvlm":
        # Its own method wants a processor of videos, which this checkpoint lacks. The template begins with the mark.
        text = processor.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        expected = processor(images=[given.image], text=[text], return_tensors="pt", add_special_tokens=False)
    else:
        expected = processor.apply_chat_template(
            [conversation], tokenize=True, return_dict=True, return_tensors="pt", **options
        )
    # Requests with bounds before it leave nothing behind.
    made.requests.make(given, "What is it?", TIERS["high"])
    request = made.requests.make(given, "What is it?", None)
    expected = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert request.inputs.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(request.inputs[name], value), name
    shape = request.shape
    assert shape.theoretical is not None and shape.actual is not None
    # LLaVA-NeXT drops rows and columns of padding, and adds ends of rows.
    counted = replace(shape.theoretical, pooled_features=shape.actual.pooled_features)
    assert shape.actual == (counted if family == "llava_next" else shape.theoretical)
    with torch.inference_mode():
        made.model(**request.inputs)


def test_a_checkpoint_with_bounds_is_measured_within_them(checkpoint_of: Made, tmp_path: Path) -> None:
    """Qwen2-VL with at most 256 tokens of 8 x 8 pixels, and the same number as a target."""
    folder = shutil.copytree(checkpoint_of("qwen2_5_vl").folder, tmp_path / "bounded")
    bounded_pictures(folder, 256, 16384)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace("qwen2_5_vl", "qwen2_vl").replace("Qwen2_5_VL", "Qwen2VL"))
    processor: Any = load_hf_processor(folder)
    assert type(processor).__name__ == "Qwen2VLProcessor"
    requests = HFRequests(processor, AutoConfig.from_pretrained(folder), "bounded")
    target = token_target(256, requests.token_unit)
    # 24 * 16 pixels are 6 tokens; of 640 * 480 pixels 80 * 60 are too many: sqrt(4800 / 256) = 4.3301.
    for size, own, requested in (((24, 16), 6, 13 * 19), ((640, 480), 13 * 18, 13 * 18)):
        alone = requests.make(sample(*size), "Why?", None)
        assert alone.shape.vision_tokens == own
        turn = [{"type": "image", "image": sample(*size).image}, {"type": "text", "text": "Why?"}]
        expected = processor.apply_chat_template(
            [[{"role": "user", "content": turn}]], add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt",
        )  # fmt: skip
        assert torch.equal(alone.inputs["input_ids"], expected["input_ids"])
        assert torch.equal(alone.inputs["pixel_values"], expected["pixel_values"])
        shape = requests.make(sample(*size), "Why?", target.crops).shape
        assert shape.vision_tokens == requested
        assert shape.theoretical == shape.actual


def test_a_fixed_number_of_tokens_is_refused(checkpoint_of: Made) -> None:
    requests = checkpoint_of("llava").requests
    assert (
        requests.vision_knob_unsupported_reason is not None
        and "CLIPImageProcessor" in requests.vision_knob_unsupported_reason
    )
    shapes = [requests.make(sample(), "q", TIERS[tier]).shape for tier in TIERS]
    # 24 x 24 pixels in patches of 8.
    assert {shape.vision_tokens for shape in shapes} == {9}
    assert shapes[0].actual == VisionGeometry(0, None, (24, 24), 9)


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tier"), [*((family, "low") for family in VISION_FAMILIES), ("llava_next", "high")])
def test_the_model_takes_the_request(checkpoint_of: Made, family: str, tier: str) -> None:
    made = checkpoint_of(family)
    request = made.requests.make(sample(), "What is it?", TIERS[tier])
    # Where placeholders and features differ in number, transformers raises.
    with torch.inference_mode(), fields_in_force(made.model.config, made.requests.config_for(TIERS[tier])):
        ids = made.model.generate(**request.inputs, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert ids.shape[1] == request.shape.prompt_tokens + 2


def test_without_its_config_llava_next_refuses_other_tiles(checkpoint_of: Made) -> None:
    made = checkpoint_of("llava_next")
    request = made.requests.make(sample(), "What is it?", TIERS["high"])
    with torch.inference_mode(), pytest.raises((ValueError, RuntimeError)):
        made.model(**request.inputs)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_text_model_gets_requests_without_the_picture(checkpoint_of: Made, family: str) -> None:
    made = checkpoint_of(family)
    assert not made.requests.has_vision
    assert made.requests.vision_knob_unsupported_reason is not None
    request = made.requests.make(sample(), "Why?", LOW)
    assert set(request.inputs) == {"input_ids", "attention_mask"}
    assert (request.shape.actual, request.shape.vision_tokens) == (None, 0)
    with torch.inference_mode():
        ids = made.model.generate(**request.inputs, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert ids.shape[1] == request.shape.text_tokens + 2


# --- prompts ------------------------------------------------------------------------------------------------------


def text_of(made: Checkpoint, given_sample: Sample) -> str:
    tokenizer: Any = made.requests.make(given_sample, "Why?", LOW).inputs["input_ids"][0]
    processor: Any = load_hf_processor(made.folder)
    text: str = getattr(processor, "tokenizer", processor).decode(tokenizer)
    return text


def test_prompts_go_through_the_chat_template(checkpoint_of: Made) -> None:
    seen = "<|vision_start|>" + 294 * "<|image_pad|>" + "<|vision_end|>"
    assert text_of(checkpoint_of("qwen2_5_vl"), sample()) == f"<s><|im_start|>user\n{seen}Why?<|im_end|>\n"
    assert text_of(checkpoint_of("qwen2_5_vl"), sample(None)) == "<s><|im_start|>user\nWhy?<|im_end|>\n"
    assert text_of(checkpoint_of("olmoe"), sample()) == "<s>USER: Why?\nASSISTANT:"


def test_without_a_template_the_placeholder_stands_in_front(checkpoint_of: Made) -> None:
    assert text_of(checkpoint_of("llava"), sample()) == 9 * "<image>" + "\nWhy?"
    assert text_of(checkpoint_of("llava"), sample(None)) == "Why?"
    assert text_of(checkpoint_of("llama"), sample()) == "Why?"


def test_marks_around_the_picture_are_counted_apart(checkpoint_of: Made) -> None:
    # Start and end.
    assert checkpoint_of("qwen2_5_vl").requests.make(sample(), "Why?", LOW).shape.image_marker_tokens == 2
    # One and one place before each of 6 tiles, one and one before the whole, one after it.
    shape = checkpoint_of("idefics3").requests.make(sample(), "Why?", TIERS["medium"]).shape
    assert shape.image_marker_tokens == 6 * 2 + 2 + 1


def test_a_template_that_takes_text_gets_the_placeholder_in_it(checkpoint_of: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_of("llava_next").folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{{ 'Q: ' + messages[0]['content'] }}{{ ' A:' }}")
    processor: Any = load_hf_processor(folder)
    requests = HFRequests(processor, AutoConfig.from_pretrained(folder), "copy")
    ids = requests.make(sample(), "Why?", LOW).inputs["input_ids"][0]
    assert processor.tokenizer.decode(ids) == "Q: " + 24 * "<image>" + "\nWhy? A:"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "nothing of it", "{{ messages[0]['content'] }"])
def test_a_template_that_cannot_be_used_is_refused_at_once(checkpoint_of: Made, tmp_path: Path, template: str) -> None:
    folder = shutil.copytree(checkpoint_of("qwen3_vl_moe").folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template)
    processor = load_hf_processor(folder)
    with pytest.raises(ConfigurationError, match="chat template of copy cannot be used"):
        HFRequests(processor, AutoConfig.from_pretrained(folder), "copy")


# jinja lets a range have at most 100,000 numbers.
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("always", [True, False])
def test_a_template_that_loops_is_left_after_a_while(
    checkpoint_of: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """At once, or for one prompt: that is one failed sample."""
    monkeypatch.setattr(hf_requests, "RENDERING_S", 0.3)
    folder = shutil.copytree(checkpoint_of("llava_next").folder, tmp_path / "copy")
    loop = LOOP if always else f"{{% if 'loop' in messages[0]['content'] %}}{LOOP}{{% endif %}}"
    (folder / "chat_template.jinja").write_text(loop + "{{ messages[0]['content'] }}")
    processor, config = load_hf_processor(folder), AutoConfig.from_pretrained(folder)
    line = r"the chat template was not done after 0\.3 s; correct or remove it$"
    with ends_within(30.0):
        if always:
            with pytest.raises(ConfigurationError, match=f"^copy: {line}"):
                HFRequests(processor, config, "copy")
            return
        requests = HFRequests(processor, config, "copy")
        with pytest.raises(SampleTimedOut, match=f"^sample 7: {line}"):
            requests.make(sample(), "loop", LOW)
        assert requests.make(sample(), "Why?", LOW).shape.prompt_tokens > 0


def test_generated_ids_become_text(checkpoint_of: Made) -> None:
    requests = checkpoint_of("olmoe").requests
    ids = requests.make(sample(), "Why?", LOW).inputs["input_ids"][0].tolist()
    assert requests.decode_text(ids) == "USER: Why?\nASSISTANT:"


# --- what cannot be used ------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused(checkpoint_of: Made) -> None:
    with pytest.raises(SampleError, match="sample 7: its prompt of 4097 tokens is longer than .* 4096"):
        checkpoint_of("llama").requests.make(sample(), "x" * 4097, LOW)
    assert checkpoint_of("llama").requests.make(sample(), "x" * 4096, LOW).shape.text_tokens == 4096


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(checkpoint_of: Made) -> None:
    made = checkpoint_of("llama")
    tokenised: list[int] = []

    class Counting:
        """The tokenizer, which notes how long the texts are that it is given."""

        def __getattr__(self, name: str) -> Any:
            return getattr(made.requests._tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            tokenised.append(len(text))
            return made.requests._tokenizer(text, **options)

    requests = copy.copy(made.requests)
    requests._tokenizer = Counting()
    with pytest.raises(SampleError, match="sample 7: its prompt of 30000000 characters is longer than .* 4096 tokens$"):
        requests.make(sample(), "x y" * 10_000_000, LOW)
    assert tokenised == [8 * 4096]


def test_a_prompt_without_tokens_is_refused(checkpoint_of: Made) -> None:
    with pytest.raises(SampleError, match="sample 7: its prompt has no token"):
        checkpoint_of("llama").requests.make(sample(), "", LOW)


@pytest.mark.parametrize("has_picture", [True, False])
def test_a_prompt_with_a_placeholder_in_it_is_refused(checkpoint_of: Made, has_picture: bool) -> None:
    with pytest.raises(SampleError, match="sample 7: the prompt has the picture's placeholder <image> in it"):
        checkpoint_of("llava").requests.make(sample(60 if has_picture else None), "what is <image>?", LOW)


@pytest.mark.parametrize("family", [family for family in VISION_FAMILIES if family != "aria"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(1, 1)
@example(1, 200)
@example(201, 1)
@example(3, 601)
@example(333, 7)
@example(3, 100)
@example(100, 3)
@example(1, 3)
@given(st.integers(1, 700), st.integers(1, 700))
def test_every_picture_gives_a_request_or_a_sample_error(
    checkpoint_of: Made, family: str, width: int, height: int
) -> None:
    requests = checkpoint_of(family).requests
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(SampleError, match=f"sample 7: its picture of {width} x {height} pixels cannot be used"):
            requests.make(sample(width, height), "Why?", CropRange(2, 5))
        return
    shape = requests.make(sample(width, height), "Why?", CropRange(2, 5)).shape
    assert shape.theoretical is not None and shape.actual is not None
    # The processor cut the picture as its rule was understood.
    assert (shape.actual.num_crops, shape.actual.tiling) == (shape.theoretical.num_crops, shape.theoretical.tiling)
    if family != "llava_next":
        assert shape.vision_tokens == shape.theoretical.pooled_features
    if shape.actual.patches is None and family != "llava":
        assert shape.actual.num_crops <= 5
    else:
        assert shape.vision_tokens <= 6 * 144


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 200), (600, 3), (990, 1010)])
def test_aria_cuts_odd_pictures_as_expected(checkpoint_of: Made, width: int, height: int) -> None:
    shape = checkpoint_of("aria").requests.make(sample(width, height), "Why?", LOW).shape
    assert shape.actual == shape.theoretical
    assert shape.vision_tokens == 128 * (shape.actual.num_crops if shape.actual else 0)


# --- loading and passing on ---------------------------------------------------------------------------------------


def test_the_processor_is_left_as_it_was(checkpoint_of: Made) -> None:
    processor: Any = load_hf_processor(checkpoint_of("llava_next").folder)
    before = processor.image_processor.to_dict()
    requests = HFRequests(processor, AutoConfig.from_pretrained(checkpoint_of("llava_next").folder), "x")
    first = requests.make(sample(), "Why?", LOW)
    requests.make(sample(), "Why?", TIERS["high"])
    assert processor.image_processor.to_dict() == before
    assert requests.make(sample(), "Why?", LOW).shape.vision_tokens == first.shape.vision_tokens


@pytest.mark.parametrize("family", ["olmoe", "qwen2_5_vl", "llava_next"])
def test_another_process_can_make_the_same_requests(checkpoint_of: Made, family: str) -> None:
    requests = checkpoint_of(family).requests
    copied: HFRequests = pickle.loads(pickle.dumps(requests))
    here, there = (each.make(sample(), "Why?", LOW).inputs for each in (requests, copied))
    assert here.keys() == there.keys()
    for name, mine in here.items():
        if mine.is_floating_point():
            assert_same_floats(there[name], mine)
        else:
            assert torch.equal(there[name], mine)


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("llama", "config.json"),
        ("llama", "tokenizer.json"),
        ("llava", "tokenizer.json"),
        ("qwen2_5_vl", "tokenizer.json"),
    ],
)
def test_a_folder_without_its_files_is_refused_in_one_line(
    checkpoint_of: Made, tmp_path: Path, family: str, lost: str
) -> None:
    folder = shutil.copytree(checkpoint_of(family).folder, tmp_path / "copy")
    (folder / lost).unlink()
    with pytest.raises(ConfigurationError) as raised:
        load_hf_processor(folder)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


def test_a_folder_with_vision_and_no_image_processor_is_refused(checkpoint_of: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_of("llava").folder, tmp_path / "copy")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_hf_processor(folder)


def test_a_config_without_a_placeholder_is_refused(checkpoint_of: Made) -> None:
    processor: Any = load_hf_processor(checkpoint_of("llava").folder)
    del processor.image_token_id
    with pytest.raises(ConfigurationError, match="names no picture token"):
        HFRequests(processor, AutoConfig.from_pretrained(checkpoint_of("llama").folder), "x")


def test_a_processor_without_patch_size_is_refused(checkpoint_of: Made) -> None:
    folder = checkpoint_of("llava").folder
    processor: Any = load_hf_processor(folder)
    processor.patch_size = None
    with pytest.raises(ConfigurationError, match="a LlavaProcessor, has no patch_size"):
        HFRequests(processor, AutoConfig.from_pretrained(folder), "x")


def test_an_unknown_image_processor_still_makes_requests(checkpoint_of: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_of("llava").folder, tmp_path / "copy")
    file = folder / "preprocessor_config.json"
    named = json.loads(file.read_text()) | {"image_processor_type": "SiglipImageProcessor"}
    file.write_text(json.dumps(named | {"size": {"height": 24, "width": 24}}))
    requests = HFRequests(load_hf_processor(folder), AutoConfig.from_pretrained(folder), "copy")
    assert (
        requests.vision_knob_unsupported_reason is not None
        and "SiglipImageProcessor" in requests.vision_knob_unsupported_reason
    )
    assert requests.make(sample(), "Why?", LOW).shape.vision_tokens == 9
