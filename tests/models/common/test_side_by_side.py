"""Several models as one: which of them answers, what a context restores, and what each is asked with."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.common.side_by_side import ModelsSideBySide
from experiment_core_utils.models.interface import Inspectable, StagedModel, Stepwise, Switchable
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import EngineRefused, KnobDidNotAct
from experiment_core_utils.records.stages import Component
from tests.scripted.scripted_model import ScriptedModel

OWN = Setting.of(top_k=1, num_active_blocks=None)
HALF = OWN.replaced(number_format="bfloat16")


class Loaded(ScriptedModel):
    """Sends pictures in its own number format, and may refuse every request."""

    dtype = torch.float32
    refusal: EngineRefused | None = None

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append("to device")
        return {"input_ids": inputs["input_ids"], "pixel_values": inputs["pixel_values"].to(self.dtype)}

    def apply(self, setting: Setting) -> Any:
        self.calls.append(f"apply {setting.key}")
        return nullcontext()

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        self.calls.append(f"warm up {inputs['pixel_values'].dtype}")
        if self.refusal is not None:
            raise self.refusal

    def describe(self) -> Mapping[str, Any]:
        return {"dtype": self.dtype}


def two() -> tuple[Loaded, Loaded, ModelsSideBySide]:
    own, half = Loaded(script=(1, 9)), Loaded(script=(2, 9))
    half.dtype = torch.bfloat16
    models: Any = {(): own, (("number_format", "bfloat16"),): half}
    return own, half, ModelsSideBySide(models)


def test_all_that_measuring_asks_of_a_staged_model_is_there() -> None:
    *_, model = two()
    assert isinstance(model, Stepwise) and isinstance(model, Inspectable) and isinstance(model, Switchable)
    interface = {name for each in StagedModel.__mro__ for name in vars(each) if not name.startswith("_")}
    assert {name for name in interface if not hasattr(type(model), name)} == set() and get_args(Component)


def test_the_setting_in_force_says_which_model_answers_and_what_it_is_asked_with() -> None:
    own, half, model = two()
    request = {"input_ids": torch.zeros(1, 3), "pixel_values": torch.ones(2, 5)}
    model.apply(HALF)
    sent = model.to_device(request)
    model.warm_up(sent, 4)
    assert model.generate_timed(sent, 4, NoMarks()).token_ids[0] == 2
    model.apply(OWN)
    model.warm_up(sent, 4)
    assert model.generate_timed(sent, 4, NoMarks()).token_ids[0] == 1
    assert [call for call in half.calls if "warm" in call] == ["warm up torch.bfloat16"]
    assert [call for call in own.calls if "warm" in call] == ["warm up torch.float32"]
    # Each sent the request once, and was told of no knob that loading turns.
    assert own.calls.count("to device") == half.calls.count("to device") == 1
    assert "apply topk1" in half.calls and model.describe()["dtype"] == torch.float32
    assert model.described_at(HALF)["dtype"] == torch.bfloat16


def test_a_context_restores_the_model_that_was_in_force() -> None:
    own, half, model = two()
    with model.apply(HALF):
        assert model.in_force is half
        with model.restored_afterwards():
            model.apply(OWN)
            assert model.in_force is own
        assert model.in_force is half
    assert model.in_force is own


def test_a_model_without_another_way_refuses_its_own_settings_alone() -> None:
    own, half, model = two()
    half.refusal = EngineRefused("no kernels")
    own.has_next_way = True
    request = model.to_device({"input_ids": torch.zeros(1, 3), "pixel_values": torch.ones(2, 5)})
    model.apply(HALF)
    with pytest.raises(KnobDidNotAct, match="no kernels") as refused:
        model.warm_up(request, 4)
    assert not isinstance(refused.value, EngineRefused) and model.has_next_way
    # One that has another way is asked for it, and no other.
    half.has_next_way = True
    with pytest.raises(EngineRefused):
        model.warm_up(request, 4)
    model.run_next_way("no kernels")
    assert own.has_next_way and not half.has_next_way
