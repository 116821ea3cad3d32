"""What is known of a model behind a server before it is asked."""

from experiment_core_utils.b_model_loader import BACKENDS, find_requested_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.endpoint.source import EndpointSource
from experiment_core_utils.models.molmoe.source import MolmoeCheckpoint


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
