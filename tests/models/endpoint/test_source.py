"""What is known of a model behind a server before it is asked."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.b_model_loader import BACKENDS, find_requested_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.knobs.registry import load_knob_module, register_knob, unregister_knob
from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.endpoint.source import EndpointSource
from experiment_core_utils.models.molmoe.source import MolmoeCheckpoint
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Part
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA


def source_of(*flags: str) -> EndpointSource:
    found = find_requested_model(parse_config(flags))
    assert isinstance(found, EndpointSource)
    return found


def test_the_backend_that_recognises_a_request_serves_it() -> None:
    """Without an address, the embedded model is one of MolmoE."""
    assert isinstance(find_requested_model(parse_config([])), MolmoeCheckpoint)
    found = source_of("--endpoint", "http://localhost:1/v1", "--model", "a/b")
    assert (found.name, found.revision, found.model_type, found.place) == ("a/b", None, "endpoint", "localhost:1")
    assert len(BACKENDS) == 3


def test_it_is_known_again_by_names_addresses_and_models_in_their_order() -> None:
    one, other = "x=http://localhost:1/v1", "y=http://localhost:2/v1"
    given = ((one, other), (other, one), (one,))
    found = [source_of("--endpoint", *each, "--model", "m").digest() for each in given]
    assert len(set(found)) == 3 and found[0] == source_of("--endpoint", *given[0], "--model", "m").digest()


def test_energy_is_out_of_reach_on_another_machine() -> None:
    reason = source_of("--endpoint", "http://192.0.2.1:1/v1", "--model", "m").no_energy_reason
    assert reason == "the server at 192.0.2.1 is on another machine, whose energy is out of reach"


class BudgetFlags(Part):
    budget_list: tuple[int, ...] | None = None


class Budget(ServerKnob):
    """A knob of one's own, in the requests' field `budget`, of which 64 and above are the same."""

    name, title, plural, flags, flag, prefix, at_rest = "b", "budget", "budgets", BudgetFlags, "budget_list", "b", "own"
    neutral: Level = at_rest

    def request_fields(self, value: Level) -> Mapping[str, Any]:
        return {} if value == self.at_rest else {"budget": min(int(value), 64)}


class Forgotten(Budget):
    """The same without a field."""

    request_fields = ServerKnob.request_fields  # type: ignore[assignment]


@pytest.fixture
def task() -> ReferenceVQA:
    return ReferenceVQA()


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    register_knob(request.param)
    yield
    unregister_knob(request.param.name)


def refuse(task: ReferenceVQA, *settings: Setting) -> None:
    source_of("--endpoint", "http://localhost:1/v1", "--model", "m").refuse_settings(settings, task, range(3), 8)


@pytest.mark.parametrize("registered", [Budget()], indirect=True)
def test_each_value_of_a_knob_changes_the_request(task: ReferenceVQA, registered: None) -> None:
    own, some = Setting({}), Setting.of(b=16)
    refuse(task, own, some, Setting.of(b=64), Setting.of(placebo="again"), Setting.of(picture_side=20))
    for equal in (Setting.of(b=99), Setting.of(b=64, picture_side=100_000), Setting.of(b=64, answer_limit=8)):
        with pytest.raises(ConfigurationError, match="b64 and .* send equal requests in every sample"):
            refuse(task, own, some, Setting.of(b=64), equal)


@pytest.mark.parametrize("registered", [Forgotten()], indirect=True)
def test_a_knob_that_no_request_has_is_refused(task: ReferenceVQA, registered: None) -> None:
    with pytest.raises(ConfigurationError, match="budget 16 cannot be set at a server: a request has nothing of it"):
        refuse(task, Setting({}), Setting.of(b=16))


def test_a_knob_of_modules_is_refused(task: ReferenceVQA) -> None:
    load_knob_module(Path("knob_profiler/head_fraction.py"))
    try:
        with pytest.raises(ConfigurationError, match=r"head 0\.5 cannot be set at a server"):
            refuse(task, Setting({}), Setting.of(head_fraction=0.5))
    finally:
        unregister_knob("head_fraction")
