"""Decode steps take the experts' kernels that `generate()` takes, and what ran is what is reported.

The switch looks at the type of the device alone, so that a model which says that it is elsewhere makes it on the CPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.answer_ends import NO_ENDS
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.meters.stages import StagedRequest
from experiment_core_utils.models.common.decode_kernels import DecodeKernels, ExecutedExperts, experts_in_force
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.eager.stages import EagerStages
from experiment_core_utils.primitives.device import NoMarks
from tests.conftest import tiny_config
from tests.models.hf.test_generate import NEW_TOKENS, AloneStages, prompt_of, ready
from tests.models.knob_families import TEXT_FAMILIES

ELSEWHERE = torch.device("meta")
EVERY = EngineKnobs(4, (0, 1, 2, 3))


class AloneEager(EagerStages):
    """At one setting, with what a generation asks for beside the stages."""

    device = torch.device("cpu")
    ends = NO_ENDS

    def prefill(self, *given: Any) -> Any:
        return super().prefill(EVERY, *given[-2:])


@pytest.fixture
def olmoe(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = ready(TEXT_FAMILIES["olmoe"])
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(type(model), "device", ELSEWHERE)
    return model


@pytest.fixture
def molmoe(monkeypatch: pytest.MonkeyPatch) -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    model.model.language_model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(MolmoeForConditionalGeneration, "device", ELSEWHERE)
    return model


def stages_of(model: Any) -> Any:
    return AloneEager(model) if isinstance(model, MolmoeForConditionalGeneration) else AloneStages(model)


@pytest.fixture(params=["olmoe", "molmoe"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def inputs_of(model: Any) -> Mapping[str, torch.Tensor]:
    prompt = prompt_of()
    return {"input_ids": prompt["input_ids"]} if isinstance(model, MolmoeForConditionalGeneration) else prompt


@contextmanager
def switches(model: Any) -> Iterator[list[Any]]:
    """What the model's experts are set to inside."""
    plain, found = model.set_experts_implementation, []

    def noted(implementation: Any) -> None:
        found.append(implementation)
        plain(implementation)

    model.set_experts_implementation = noted
    try:
        yield found
    finally:
        del model.set_experts_implementation


def test_stages_take_the_kernels_of_generate(model: Any) -> None:
    stages, inputs = stages_of(model), inputs_of(model)
    with torch.inference_mode():
        with ExecutedExperts(model) as prefilled:
            logits, state = stages.prefill(inputs, None)
        token = logits.argmax(dim=-1, keepdim=True)
        with ExecutedExperts(model) as alone:
            stages.decode_step(token, state)
        with ExecutedExperts(model) as in_a_row, stages.decoding(), stages.decoding():
            stages.decode_step(token, state)
    assert (prefilled.names, alone.names, in_a_row.names) == ("grouped_mm", "batched_mm", "batched_mm")
    assert experts_in_force(model) == "grouped_mm"


def test_the_switch_is_made_once_for_an_answer_of_any_length(model: Any) -> None:
    stages, inputs = stages_of(model), inputs_of(model)
    request = StagedRequest(stages, inputs, NEW_TOKENS, stages.rewind)
    answers = [request.decode, lambda: generate_greedily(stages, inputs, NEW_TOKENS, NoMarks())]
    if isinstance(model, MolmoeForConditionalGeneration):
        knobs = EngineKnobs(*model.active_setting)
        answers.append(lambda: EagerStages(model).answer_batch(knobs, [inputs], NEW_TOKENS, NO_ENDS))
    for answer in answers:
        with switches(model) as made, ExecutedExperts(model) as ran:
            answer()
        # There and back, whatever the number of tokens.
        assert len(made) == 2
        assert str(ran.names).endswith("batched_mm")


def test_an_error_inside_takes_the_switch_back(model: Any) -> None:
    kernels = DecodeKernels(model)
    with torch.inference_mode(), pytest.raises(KeyError), kernels.switched():
        raise KeyError
    assert experts_in_force(model) == "grouped_mm"
    with torch.inference_mode():
        assert kernels.needs_switch


def test_with_gradients_nothing_is_switched(model: Any) -> None:
    with switches(model) as made, DecodeKernels(model).switched():
        assert experts_in_force(model) == "grouped_mm"
    assert made == []


def test_what_was_chosen_stays(model: Any) -> None:
    model.get_decoder().set_experts_implementation("eager")
    with torch.inference_mode(), DecodeKernels(model).switched():
        assert experts_in_force(model) == "eager"


def test_a_model_without_experts() -> None:
    llama = ready(TEXT_FAMILIES["llama"])
    assert experts_in_force(llama) is experts_in_force(torch.nn.Linear(2, 2)) is None
    with torch.inference_mode(), DecodeKernels(llama).switched(), ExecutedExperts(llama) as ran:
        llama(**prompt_of())
    assert ran.names is None


def test_the_proof_of_a_setting_tells_what_ran(molmoe: MolmoeForConditionalGeneration) -> None:
    proof = EagerStages(molmoe).prove(EVERY, inputs_of(molmoe))
    assert (proof.experts_implementation, proof.experts_implementation_decode) == ("grouped_mm", "batched_mm")
