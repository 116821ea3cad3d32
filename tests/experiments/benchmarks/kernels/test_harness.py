"""The harness from flags to the table, over tiny shapes on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.benchmarks.kernels.__main__ import arguments, main
from experiments.benchmarks.kernels.process import YARDSTICK, answer, attained_rates
from experiments.benchmarks.kernels.protocol import Measured, divergences
from experiments.benchmarks.kernels.shapes import MOLMOE, SOURCES
from experiments.benchmarks.kernels.variants import VARIANTS, refuse_other_devices
from tests.engines.cpu_compiler import needs_compiler

TINY = ["--shape", "tiny", "--num_threads", "1", "--repeats", "2", "--device", "cpu"]
# Errors of float32 are about 1e-6 of logits of about 10: of 1e-5, half of whose square is far below this.
ROUNDING = 1e-8


def answered(folder: Path, model: str, stage: str, *variants: str, more: tuple[str, ...] = ()) -> list[Measured]:
    """What each variant measures in this process, after the yardstick."""
    given = arguments(["--model", model, "--stage", stage, "--variant", *variants, *TINY, *more])
    assert answer(given, YARDSTICK, folder) is None
    found = [answer(given, variant, folder) for variant in variants]
    return [each for each in found if each is not None]


@needs_compiler
def test_reference_against_cpu_kernels_in_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "molmoe_1b", "--stage", "decode", "--variant", "reference", "cpu", "--pairs", "1", *TINY]
    assert main([*flags, "--output", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["variant"] for each in found["processes"]] == ["reference", "cpu"]
    reference, cpu = found["rows"]
    assert (reference["way"], cpu["way"]) == ("reference", "cpu step")
    assert 0 < max(each["kl_max"] for each in found["processes"]) < ROUNDING
    assert all(each["seconds"] > 0 and each["times_limit"] > 0 for each in found["processes"])
    one, other = (each["seconds"] for each in found["processes"])
    assert cpu["ratio"] == pytest.approx(other / one) and cpu["ratio_low"] is None and reference["ratio"] is None
    assert found["asked"]["source"] == "allenai/MolmoE-1B-0924"
    assert (tmp_path / "found.md").read_text() == capsys.readouterr().out


@pytest.mark.parametrize("model", ["llama_3_2_1b", "olmoe_1b_7b", "qwen3_30b_a3b:2"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_text_models_run_by_modules_and_as_their_graphs_would(tmp_path: Path, model: str, stage: str) -> None:
    modules, launched, *generated = answered(tmp_path, model, stage, "modules", "launched", "generate", "static")
    assert (modules.way, launched.way) == ("modules", "launched one by one")
    assert max(modules.kl_max, launched.kl_max) < ROUNDING
    assert all(each.way == "modules" and each.seconds and each.kl_max < ROUNDING for each in generated)
    assert modules.seconds and launched.seconds and modules.bytes_s > 0 and modules.products_s > 0


def test_lower_precision_is_held_against_float32_on_the_same_weights(tmp_path: Path) -> None:
    """Bfloat16 rounds to 1 in 256: of logits of a few that is an error of about 1e-2, and a divergence of 1e-4."""
    (found,) = answered(tmp_path, "llama_3_2_1b", "decode", "modules", more=("--precision", "bfloat16"))
    exact = torch.load(tmp_path / "logits.pt")["exact"]
    assert exact.dtype == torch.float32 and not torch.equal(exact, exact.bfloat16().float())
    assert 1e-6 < found.kl_mean < 1e-2 and "bfloat16" in found.machine
    assert found.kl_bound == pytest.approx(4 * found.kl_mean) and found.seconds is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", ["vision", "prefill", "decode"])
@pytest.mark.parametrize("model", sorted(SOURCES))
def test_graphs_pass_the_gate_on_a_gpu(tmp_path: Path, model: str, stage: str) -> None:
    """In float32: in bfloat16 plain torch has 0.1 to 10 times the modules' divergence at this size, because an expert
    that rounding chose otherwise costs a position ten to a hundred times its own.
    """
    own = ["reference", "no_pdl"] if model == MOLMOE else ["kernels", *["inductor"][: stage == "decode"]]
    if stage == "vision" and model != MOLMOE:
        pytest.skip("a text model")
    variants = ["modules", "launched", "graph", *own]
    flags = ["--model", model, "--stage", stage, "--variant", *variants, *TINY[:-1], "cuda", "--precision", "float32"]
    given = arguments(flags)
    answer(given, YARDSTICK, tmp_path)
    found = [each for variant in variants if (each := answer(given, variant, tmp_path)) is not None]
    passed = [each.variant for each in found if each.seconds]
    assert passed == variants, [(each.variant, each.kl_mean, each.kl_bound) for each in found]


@needs_compiler
def test_pictures_are_encoded_in_each_way(tmp_path: Path) -> None:
    found = answered(tmp_path, "molmoe_1b", "vision", "modules", "reference", "cpu", more=("--top_k", "2"))
    assert [each.way for each in found] == ["modules", "reference", "cpu blocks"]
    assert all(each.kl_max < ROUNDING and each.seconds for each in found)


def test_the_gate_comes_before_the_time(tmp_path: Path) -> None:
    """A yardstick of other logits: those of the model, each position one place further."""
    given = arguments(["--model", "llama_3_2_1b", "--stage", "decode", "--variant", "modules", *TINY])
    answer(given, YARDSTICK, tmp_path)
    exact, bound = torch.load(tmp_path / "logits.pt").values()
    torch.save({"exact": exact.roll(1, dims=-1), "bound": bound}, tmp_path / "logits.pt")
    found = answer(given, "modules", tmp_path)
    assert found is not None and found.seconds is None and found.times_limit is None
    assert found.kl_mean > found.kl_bound == 1e-8
    assert exact.shape == (5, 512) and divergences(exact, exact) == [0.0] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("model", "variant", "reason"),
    [
        ("llama_3_2_1b", "graph", "the decode runs by cpu step .prefill, decode: there are no CUDA graphs on the CPU."),
        ("llama_3_2_1b", "no_pdl", "the decode runs by cpu step"),
        ("molmoe_1b", "launched", "it needs a GPU|cannot be captured"),
        ("llama_3_2_1b", "inductor", "^--execution inductor cannot run benchmark: it needs a GPU; give --exec"),
        ("molmoe_1b", "inductor", "is for models of transformers, and Molmo has own kernels; give --execution auto"),
    ],
)
def test_nothing_is_measured_in_the_place_of_another_variant(
    tmp_path: Path, model: str, variant: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        answered(tmp_path, model, "decode", variant)


def test_rates_are_finite() -> None:
    rates = attained_rates(torch.device("cpu"), torch.float32)
    assert 0 < rates.bytes_per_s < 1e15 and 0 < rates.flops_per_s < 1e15


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--stage", "vision", "--model", "olmoe_1b_7b", "--variant", "graph"], "takes no pictures; give --model"),
        (["--stage", "decode", "--model", "olmoe_1b_7b", "--variant", "graph", "graph"], "has a name twice"),
        (["--stage", "decode", "--model", "olmoe_1b_7b", "--variant", "graph", "--pairs", "0"], "--pairs 0 is not"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        arguments(flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("variants", [("graph",), ("modules", "kernels", "no_pdl"), ("inductor", "cpu")])
def test_variants_for_another_device_are_refused_before_any_process(
    variants: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--stage", "decode", "--model", "olmoe_1b_7b:2", "--variant", *variants, "--shape", "tiny"]) == 2
    lacking = " ".join(each for each in variants if each not in ("modules", "cpu"))
    assert capsys.readouterr().err == (
        f"error: --variant {lacking} cannot run olmoe_1b_7b on cpu; give generate, static, modules, launched, cpu, "
        "reference, or another --device\n"
    )


def test_what_a_device_rules_out_depends_on_the_model_where_kernels_are_launched() -> None:
    refuse_other_devices(["launched", "modules", "cpu", "reference"], "cpu", "llama_3_2_1b")
    with pytest.raises(ConfigurationError, match="^--variant launched cannot run molmoe_1b on cpu; give generate"):
        refuse_other_devices(["launched"], "cpu", MOLMOE)
    refuse_other_devices([each for each in VARIANTS if each != "cpu"], "cuda", MOLMOE)
    with pytest.raises(ConfigurationError, match="^--variant cpu cannot run molmoe_1b on cuda; give generate"):
        refuse_other_devices(["graph", "cpu"], "cuda", MOLMOE)


def test_a_process_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--stage", "decode", "--model", "olmoe_1b_7b", "--variant", "modules", "--top_k", "99", *TINY]
    assert main(flags) == 2
    assert "\rerror: the process of yardstick failed: top-k 99 is not possible; give 1 to 8" in capsys.readouterr().err
