"""All settings of a run are executed in the same way, which is decided before the first is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from accelerate import Accelerator

from experiment_core_utils.engines.cuda_graphs import ADVICE
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.execution import settle_execution
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.primitives.errors import EngineRefused, OutOfMemory, SettingError
from experiment_core_utils.records.requests import KnobProof
from tests.measuring.test_batches import Numbers
from tests.scripted.scripted_model import ScriptedModel

LOW, HIGH = (
    Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
    for top_k, blocks in ((1, (0,)), (2, (0, 1)))
)


KERNELS, CAPTURED, MODULES = ({"vision": "modules", "decode": way} for way in ("kernel graph", "cuda graph", "modules"))


@dataclass
class Engines(ScriptedModel):
    """Engines and graphs that run it one after the other; each refuses top-k 2 in the step that it has here."""

    refuses: list[str | None] = field(default_factory=lambda: [None])
    ways: Sequence[Mapping[str, str]] = (CAPTURED, MODULES)
    error: type[SettingError] = EngineRefused
    reasons: list[str] = field(default_factory=list)

    def refuse_setting(self) -> None:
        self._refuse("refuse_setting")

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        super().warm_up(inputs, max_new_tokens)
        self._refuse("warm_up")

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        self._refuse("prove")
        return replace(super().prove(setting, inputs), execution_stages=self.describe()["execution_stages"])

    def _refuse(self, step: str) -> None:
        if [*self.refuses, None][len(self.reasons)] == step and self.active_setting[0] == 2:
            raise self.error("no such kernel" + ADVICE)

    def run_next_way(self, reason: str) -> None:
        self.reasons.append(reason)
        self.has_next_way = self.describe()["execution_stages"] != MODULES

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "execution_stages": self.ways[len(self.reasons)]}


def settled(model: Engines) -> dict[str, KnobProof]:
    """Sample 5 cannot be read, so that 7 decides."""
    requests = RequestSource(Numbers(), model, (5, 7), 0, 0, None, keep_pictures=False)
    model.active_setting = (1, (0, 1))
    proofs = settle_execution(model, requests, (LOW, HIGH), (5, 7), 4, None, Accelerator(cpu=True))
    assert model.active_setting == (1, (0, 1))
    return proofs


REFUSAL = f"{HIGH.key}: no such kernel"


@pytest.mark.parametrize("step", ["warm_up", "prove"])
def test_what_one_setting_cannot_run_is_run_by_none(capsys: pytest.CaptureFixture[str], step: str) -> None:
    """Where it was not requested; the setting before it was tried, and is now run by the modules as well."""
    model = Engines(refuses=[step], has_next_way=True)
    assert settled(model) == {}
    assert (model.reasons, model.has_next_way) == ([REFUSAL], False)
    *_, warning = capsys.readouterr().err.splitlines()
    assert warning == f"warning: the modules run all settings: {REFUSAL}"
    assert model.calls[-1] == "fix_execution"


@pytest.mark.parametrize("second", [None, "prove"], ids=["taken", "refused"])
def test_ways_are_tried_until_one_runs_all_settings(capsys: pytest.CaptureFixture[str], second: str | None) -> None:
    """Proofs are those of the way that runs in the end."""
    model = Engines(refuses=["prove", second], ways=(KERNELS, CAPTURED, MODULES), has_next_way=True)
    proofs = settled(model)
    refusals = 1 if second is None else 2
    assert model.reasons == [REFUSAL] * refusals
    assert [proof.execution_stages for proof in proofs.values()] == [CAPTURED, CAPTURED][: 4 - 2 * refusals]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    ways = ["CUDA graphs of the modules", "the modules"][:refusals]
    assert warnings == [f"warning: {way} run all settings: {REFUSAL}" for way in ways]


def test_a_refusal_that_needs_no_request_comes_before_any_trial() -> None:
    model = Engines(refuses=["refuse_setting"], ways=(KERNELS, CAPTURED, MODULES), has_next_way=True)
    assert settled(model).keys() == {LOW.key, HIGH.key}
    assert model.reasons == [REFUSAL] and model.calls.count("warm_up for 4") == 2


def test_a_stage_that_a_later_setting_takes_from_an_engine_leaves_no_proof_of_before() -> None:
    class LosesVision(Engines):
        def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
            if setting == HIGH:
                self.ways = ({**CAPTURED, "vision": "modules"},)
            return super().prove(setting, inputs)

    assert settled(LosesVision(ways=({**CAPTURED, "vision": "cuda graph"},))).keys() == {HIGH.key}


def test_requested_engines_stay_and_the_setting_fails_when_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    model = Engines(refuses=["prove"])
    assert settled(model).keys() == {LOW.key}
    assert model.reasons == [] and "warning" not in capsys.readouterr().err
    assert model.calls[-1] == "fix_execution"


def test_proofs_are_those_of_the_first_sample_that_can_be_read() -> None:
    model = Engines(has_next_way=True)
    proofs = settled(model)
    assert [proof.blocks_run for proof in proofs.values()] == [(0,), (0, 1)]
    assert [call for call in model.calls if call.startswith("prepare")] == ["prepare '7' 1-3"] * 2
    assert model.calls.count("warm_up for 4") == 2


def test_other_failures_are_left_to_the_setting() -> None:
    model = Engines(refuses=["prove"], error=OutOfMemory, has_next_way=True)
    assert settled(model).keys() == {LOW.key}
    assert model.reasons == []


def test_modules_alone_have_nothing_to_decide() -> None:
    model = Engines(ways=(MODULES,), refuses=["prove"])
    assert settled(model) == {}
    assert model.calls == ["fix_execution"]
