"""Whether a server is on this machine."""

import pytest

from experiment_core_utils.models.endpoint.address import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("192.0.2.1", False)],
)
def test_loopback_addresses_are_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_name_without_an_address_is_not() -> None:
    assert not is_loopback("no-such-host.invalid")
