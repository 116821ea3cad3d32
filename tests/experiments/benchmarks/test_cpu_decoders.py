"""Which numbers the comparison of a CPU's ways refuses."""

import pytest

from experiments.benchmarks.cpu_decoders import main


@pytest.mark.parametrize("flag", ["--tokens", "--blocks", "--rounds"])
def test_nothing_is_measured_with_no_tokens_blocks_or_rounds(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "decode", flag, "0"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} 0 is not possible; give at least 1 and at most ")
