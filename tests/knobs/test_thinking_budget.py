"""The budget of thinking: its values, its names, and the models that have none."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.thinking_budget import THINKING_BUDGET
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.loader import molmoe_limits
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import RequestShape


def asked(limits: KnobLimits, *values: int) -> KnobRequest:
    return KnobRequest(SimpleNamespace(thinking_tokens_list=values or None), limits, "m", Path("m"), False)


def test_values_are_named_and_0_is_one() -> None:
    limits = KnobLimits(4, None, None)
    assert THINKING_BUDGET.requested(asked(limits, 256, 0)).values == (256, 0)
    assert THINKING_BUDGET.requested(asked(limits)).values == ("free",)
    assert Setting.named("think0").levels == {"thinking_budget": 0} and Setting.of(thinking_budget="free").key == ""
    assert sorted(("free", 1024, 0), key=THINKING_BUDGET.order) == [0, 1024, "free"]
    assert THINKING_BUDGET.parsed("think00") is None


def test_the_model_of_the_project_has_none() -> None:
    with pytest.raises(ConfigurationError, match="--thinking_tokens_list 0 cannot be set in m: its tokenizer has no"):
        THINKING_BUDGET.requested(asked(molmoe_limits(MolmoeConfig()), 0))


def test_an_empty_thought_in_the_prompt_is_a_part_of_it() -> None:
    shape = RequestShape(None, None, 7, 2, 11, 0.0, closed_thought_tokens=4)
    sizes = [Setting.of(thinking_budget=value).shape(shape).prompt_tokens for value in (0, 5, "free")]
    assert sizes == [24, 20, 20]
