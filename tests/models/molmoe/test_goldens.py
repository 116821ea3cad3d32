"""The official implementation's outputs, reproduced within the tolerances that come with them."""

from typing import Any

import pytest
import torch
from transformers import BatchFeature

from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor
from tests.models.molmoe.golden_model import (
    Goldens,
    golden_image,
    golden_model,
    golden_processor,
    golden_tokens,
    load_goldens,
)

CASES = {case["name"]: case for case in load_goldens().spec["cases"]}
IMAGE_CASES = [name for name, case in CASES.items() if case["kind"] == "image"]
RUNS = [(name, run["name"]) for name, case in CASES.items() for run in case["runs"]]


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return load_goldens()


@pytest.fixture(scope="module")
def model() -> MolmoeForConditionalGeneration:
    return golden_model()


def request_for(case: dict[str, Any], goldens: Goldens) -> BatchFeature:
    """The case's prompt (and picture) as model inputs."""
    tokens = goldens.spec["tokens"]
    image_processor = golden_processor(goldens.spec, case.get("max_crops", 1))
    processor = MolmoeProcessor(image_processor, None, golden_tokens(goldens.spec))
    if case["kind"] == "text":
        return processor.assemble(tokens["text_ids"], None)
    return processor.assemble(tokens["prompt_ids"], processor.image_processor.preprocess(golden_image(case)))


def as_patches(pixel_values: torch.Tensor) -> torch.Tensor:
    """[K, 3, 336, 336] -> [K, 576, 588] with (row, column, channel) inside a patch."""
    crops = pixel_values.shape[0]
    grid = pixel_values.view(crops, 3, 24, 14, 24, 14)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(crops, 576, 588)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(actual.to(torch.float64), expected.to(torch.float64), atol=atol, rtol=0.0)


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_preprocessing(name: str, goldens: Goldens) -> None:
    inputs = request_for(CASES[name], goldens)
    assert torch.equal(inputs["input_ids"][0], goldens.expected(name, "input_ids").long())
    assert torch.equal(inputs["image_input_idx"][0], goldens.expected(name, "image_input_idx").long())
    assert inputs["pixel_values"].shape[1] == int(goldens.expected(name, "n_crops"))
    processor = golden_processor(goldens.spec, CASES[name]["max_crops"])
    tiling = processor.tiling_for(CASES[name]["height"], CASES[name]["width"])
    assert list(tiling) == goldens.expected(name, "tiling").tolist()
    assert_close(inputs["image_masks"][0], goldens.expected(name, "image_masks"), goldens.tolerance("image_masks"))
    patches = as_patches(inputs["pixel_values"][0])
    atol = goldens.tolerance("pixel")
    assert_close(patches[:, ::97, ::59], goldens.expected(name, "pixel_samples"), atol)
    assert_close(patches.double().mean(dim=(1, 2)), goldens.expected(name, "pixel_mean"), atol)
    assert_close(patches.double().std(dim=(1, 2), correction=0), goldens.expected(name, "pixel_std"), atol)


@pytest.mark.parametrize("name", IMAGE_CASES)
@torch.no_grad()
def test_vision_features_and_connector(name: str, goldens: Goldens, model: MolmoeForConditionalGeneration) -> None:
    inputs = request_for(CASES[name], goldens)
    check_vision(inputs["pixel_values"][0], inputs["image_masks"][0], name, goldens, model)


def check_vision(
    pixels: torch.Tensor, masks: torch.Tensor, prefix: str, goldens: Goldens, model: MolmoeForConditionalGeneration
) -> None:
    features = model.model.vision_tower(pixels)
    assert_close(features[:, ::29, ::5], goldens.expected(prefix, "vit_features"), goldens.tolerance("vit_features"))
    assert_close(features.double().sum(dim=(1, 2)), goldens.expected(prefix, "vit_sum"), goldens.tolerance("vit_sums"))
    assert_close(
        features.double().abs().sum(dim=(1, 2)), goldens.expected(prefix, "vit_abs_sum"), goldens.tolerance("vit_sums")
    )
    projected = model.model.connector(features, masks)
    atol = goldens.tolerance("connector_sums")
    assert_close(projected[:, ::7, ::5], goldens.expected(prefix, "connector"), goldens.tolerance("connector"))
    assert_close(projected.double().sum(dim=(1, 2)), goldens.expected(prefix, "connector_sum"), atol)
    assert_close(projected.double().abs().sum(dim=(1, 2)), goldens.expected(prefix, "connector_abs_sum"), atol)


@torch.no_grad()
def test_a_padding_crop_is_zeroed_and_goes_nowhere(goldens: Goldens, model: MolmoeForConditionalGeneration) -> None:
    inputs = request_for(CASES["small"], goldens)
    padded = {
        name: torch.nn.functional.pad(inputs[name], pad, value=-1)
        for name, pad in (
            ("pixel_values", (0, 0, 0, 0, 0, 0, 0, 1)),
            ("image_masks", (0, 0, 0, 1)),
            ("image_input_idx", (0, 0, 0, 1)),
        )
    }
    check_vision(padded["pixel_values"][0], padded["image_masks"][0], "small/padcrop", goldens, model)
    plain = model(**inputs, logits_to_keep=1).logits
    assert_close(model(input_ids=inputs["input_ids"], **padded, logits_to_keep=1).logits, plain, 1e-5)


@torch.no_grad()
def test_one_value_of_minus_one_does_not_make_a_padding_crop(
    goldens: Goldens, model: MolmoeForConditionalGeneration
) -> None:
    inputs = request_for(CASES["small"], goldens)
    pixels = inputs["pixel_values"][0].clone()
    pixels[0, 0, 0, 0] = -1.0
    check_vision(pixels, inputs["image_masks"][0], "small/oneminus", goldens, model)


@pytest.mark.parametrize(("name", "run_name"), RUNS)
@torch.no_grad()
def test_logits_and_greedy_tokens(
    name: str, run_name: str, goldens: Goldens, model: MolmoeForConditionalGeneration
) -> None:
    run = next(run for run in CASES[name]["runs"] if run["name"] == run_name)
    inputs = request_for(CASES[name], goldens)
    blocks, top_k = run["kept_blocks"], run["top_k"][-1]
    prefix = f"{name}/{run_name}"
    with model.knobs(top_k=top_k, active_blocks=blocks):
        logits = model(**inputs, logits_to_keep=3).logits[0]
    atol = goldens.tolerance("logits")
    ids = goldens.expected(prefix, "top_ids").long()
    assert_close(logits.gather(1, ids), goldens.expected(prefix, "top_values"), atol)
    fixed_ids = torch.from_numpy(goldens.arrays["fixed_ids"]).long()
    assert_close(logits[:, fixed_ids], goldens.expected(prefix, "fixed_values"), atol)

    features = None
    if "pixel_values" in inputs:
        features = model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
    step_logits, state = model.prefill(inputs["input_ids"], features, top_k=top_k, active_blocks=blocks)
    tokens, values, gaps = [], [], []
    for _ in range(run["new_tokens"]):
        best = step_logits[0].topk(2).values
        tokens.append(int(step_logits[0].argmax()))
        values.append(float(best[0]))
        gaps.append(float(best[0] - best[1]))
        step_logits = model.decode_step(torch.tensor([[tokens[-1]]]), state)
    model.reset_knobs()
    assert tokens == goldens.expected(prefix, "tokens").tolist()
    assert_close(torch.tensor(values), goldens.expected(prefix, "token_logits"), atol)
    assert_close(torch.tensor(gaps), goldens.expected(prefix, "token_gaps"), goldens.tolerance("token_gaps"))
    with model.knobs(top_k=top_k, active_blocks=blocks):
        generated = model.generate(**inputs, max_new_tokens=run["new_tokens"], do_sample=False, eos_token_id=None)
    assert generated[0, inputs["input_ids"].shape[1] :].tolist() == tokens
