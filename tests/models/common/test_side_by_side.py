"""Several models as one: which of them answers, what a context restores, and what each is asked with."""

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.common.side_by_side import ModelsInTurn, ModelsSideBySide
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


def in_turn() -> tuple[list[str], Callable[[], list[Loaded]], ModelsInTurn]:
    """The loads in order, the models that are alive, and both as one."""
    loads: list[str] = []
    models: list[weakref.ref[Loaded]] = []

    def alive() -> list[Loaded]:
        gc.collect()
        return [model for each in models if (model := each()) is not None]

    def load(loading: Any) -> Any:
        assert not alive(), "the model before it is still there"
        model = Loaded(script=(2, 9) if loading else (1, 9))
        model.dtype, model.has_next_way = torch.bfloat16 if loading else torch.float32, True
        loads.append("half" if loading else "own")
        models.append(weakref.ref(model))
        return model

    return loads, alive, ModelsInTurn(load)


def test_one_model_is_in_memory_at_a_time_and_what_was_decided_of_it_holds_after_its_next_load() -> None:
    loads, alive, model = in_turn()
    request = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "pixel_values": torch.ones(2, 5)}
    model.end_answers_at(("stop",), False)
    sent = model.to_device(request)
    model.apply(HALF)
    assert model.generate_timed(sent, 4, NoMarks()).token_ids[0] == 2 and loads == ["own", "half"]
    model.run_next_way("no kernels")
    model.fix_execution()
    # Both are described, and neither is loaded for it.
    assert model.describe()["dtype"] == torch.float32 and model.described_at(HALF)["dtype"] == torch.bfloat16
    model.apply(OWN)
    assert model.generate_timed(sent, 4, NoMarks()).token_ids[0] == 1
    model.drop()
    assert not alive() and loads == ["own", "half", "own"]
    model.apply(HALF)
    (half,) = alive()
    assert half.calls == ["fix_execution", "apply topk1"] and not half.has_next_way and half.ends.stop == ("stop",)
    del half
    with model.restored_afterwards():
        model.apply(OWN)
    # The setting that was in force before has its model back.
    assert model.warm_up(sent, 4) is None and loads == ["own", "half", "own", "half", "own", "half"]


def test_logits_of_the_model_as_it_is_are_remembered_for_the_proof_of_others() -> None:
    loads, _, model = in_turn()
    own = OWN.replaced(num_active_blocks=RunningBlocks.of((0, 1)))
    half = own.replaced(number_format="bfloat16")
    sent = model.to_device({"input_ids": torch.zeros(1, 3, dtype=torch.long), "pixel_values": torch.ones(2, 5)})
    model.apply(half)
    assert model.prove(half, sent).counted["loading"]["logits_distance"] is None
    model.apply(own)
    assert "loading" not in model.prove(own, sent).counted
    model.apply(half)
    # Logits are 1 at the token of the script: two of these are as far apart as the square root of two.
    assert model.prove(half, sent).counted["loading"]["logits_distance"] == pytest.approx(2**0.5)
    assert loads == ["own", "half", "own", "half"]
