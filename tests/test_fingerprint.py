"""What a result depends on beside the knobs: how it was executed is part of it, and older results keep theirs."""

from accelerate import Accelerator

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.c_prompt_processing import open_task
from experiment_core_utils.fingerprint import fingerprint_parts
from experiment_core_utils.primitives.config import parse_config


def parts(*flags: str) -> tuple[object, ...]:
    config = parse_config(["--device", "cpu", *flags])
    return fingerprint_parts(config, find_model(config.model_path), open_task(config), [1, 2], Accelerator(cpu=True))


def test_execution_belongs_to_a_result_and_its_default_adds_nothing() -> None:
    assert parts("--execution", "eager") == parts()
    assert parts("--execution", "graph") == (*parts(), ("execution", "graph"))
