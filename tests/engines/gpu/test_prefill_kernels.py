"""The Triton kernels of prefill and vision compute what the modules do, seen in Triton's interpreter."""

from tests.engines.interpreter import printed_by

CHECKED = {"logits", "keys", "values", "norm", "topk_weights", "experts", "features", "states"}


def test_the_kernels_in_tritons_interpreter() -> None:
    errors = [line.rsplit(" ", 1) for line in printed_by("tests.engines.interpreted_kernels").splitlines()]
    assert {name.split()[0] for name, _ in errors} == {*CHECKED, "slots"}
    assert {name: error for name, error in errors if not float(error) < 3e-6} == {}
    # What lies behind a padded prompt belongs to nobody yet.
    assert [float(error) for name, error in errors if name.startswith("slots")] == [0.0, 0.0]
