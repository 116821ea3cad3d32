"""All settings of a run are executed in the same way, which is decided before the first is measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from accelerate import Accelerator

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.primitives.errors import EngineRefused, OutOfMemory, SettingError
from experiment_core_utils.records.requests import KnobProof
from experiment_core_utils.sweep.execution import settle_execution
from experiment_core_utils.sweep.requests import RequestSource
from tests.scripted.scripted_model import ScriptedModel
from tests.sweep.test_batches import Numbers

LOW, HIGH = (
    Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
    for top_k, blocks in ((1, (0,)), (2, (0, 1)))
)


@dataclass
class Engines(ScriptedModel):
    """Engines run it, and refuse top-k 2 in this step."""

    refuses: str | None = None
    error: type[SettingError] = EngineRefused
    stages: Mapping[str, str] = field(default_factory=lambda: {"vision": "modules", "decode": "cuda graph"})

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        super().warm_up(inputs, max_new_tokens)
        self._refuse("warm_up")

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        self._refuse("prove")
        return super().prove(setting, inputs)

    def _refuse(self, step: str) -> None:
        if self.refuses == step and self.active_setting[0] == 2 and self.next_way_because is None:
            raise self.error("no such kernel")

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "execution_stages": self.stages}


def settled(model: Engines) -> dict[str, KnobProof]:
    """Sample 5 cannot be read, so that 7 decides."""
    requests = RequestSource(Numbers(), model, (5, 7), 0, 0, None, keep_pictures=False)
    model.active_setting = (1, (0, 1))
    proofs = settle_execution(model, requests, (LOW, HIGH), (5, 7), 4, None, Accelerator(cpu=True))
    assert model.active_setting == (1, (0, 1))
    return proofs


@pytest.mark.parametrize("step", ["warm_up", "prove"])
def test_what_one_setting_cannot_run_is_run_by_none(capsys: pytest.CaptureFixture[str], step: str) -> None:
    """Where it was not requested; the setting before it was tried, and is now run by the modules as well."""
    model = Engines(refuses=step, has_next_way=True)
    assert settled(model) == {}
    reason = f"{HIGH.key}: no such kernel"
    assert (model.next_way_because, model.has_next_way) == (reason, False)
    *_, warning = capsys.readouterr().err.splitlines()
    assert warning == f"warning: the modules run all settings: {reason}"
    assert model.calls[-1] == "fix_execution"


def test_requested_engines_stay_and_the_setting_fails_when_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    model = Engines(refuses="prove")
    assert settled(model).keys() == {LOW.key}
    assert model.next_way_because is None and "warning" not in capsys.readouterr().err
    assert model.calls[-1] == "fix_execution"


def test_proofs_are_those_of_the_first_sample_that_can_be_read() -> None:
    model = Engines(has_next_way=True)
    proofs = settled(model)
    assert [proof.blocks_run for proof in proofs.values()] == [(0,), (0, 1)]
    assert [call for call in model.calls if call.startswith("prepare")] == ["prepare '7' 1-3"] * 2
    assert model.calls.count("warm_up for 4") == 2


def test_other_failures_are_left_to_the_setting() -> None:
    model = Engines(refuses="prove", error=OutOfMemory, has_next_way=True)
    assert settled(model).keys() == {LOW.key}
    assert model.next_way_because is None


def test_modules_alone_have_nothing_to_decide() -> None:
    model = Engines(stages={"vision": "modules", "decode": "modules"}, refuses="prove")
    assert settled(model) == {}
    assert model.calls == []
