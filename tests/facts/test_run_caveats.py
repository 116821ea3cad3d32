"""Caveats of a whole run."""

import pytest
import torch

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.facts.run_caveats import caveats_of, crowded_cores_caveats, picture_caveats
from experiment_core_utils.tasks.registry import load_task
from tests.test_c_prompt_processing import TextTask

CPU = torch.device("cpu")


def test_data_of_the_hub_whose_commit_is_not_known_is_a_caveat() -> None:
    config = parse_config([])
    for source, caveats in (
        ({"read_from": "generated scenes"}, 0),
        ({"read_from": "hub", "revision": "a" * 40}, 0),
        ({"read_from": "hub", "revision": "unknown"}, 1),
    ):
        assert len(caveats_of(config.model.random_weights, CPU, 1, source)) == caveats
    (found,) = caveats_of(False, CPU, 1, {"left_out": "temperature 0.7"})
    assert found.sentence.startswith("decoding: the task requests temperature 0.7, and decoding is greedy here; do not")


def test_more_threads_than_cores_are_a_caveat_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert crowded_cores_caveats(CPU, 8, 16) == []
    assert crowded_cores_caveats(torch.device("cuda"), 9, 16) == []
    (found,) = crowded_cores_caveats(CPU, 9, 16)
    assert found.sentence == (
        "cores: the run's own 18 threads share 16 CPU cores and slow each other: times are those of a shared machine; "
        "use fewer processes, or fewer threads in each (--num_threads)"
    )


def test_a_text_model_on_a_task_with_pictures_is_a_caveat() -> None:
    pictures = load_task("reference_vqa", "validation")
    (caveat,) = picture_caveats(pictures, (3, 4), takes_pictures=False)
    assert caveat.kind == "pictures_not_shown"
    assert caveat.sentence.startswith("pictures: a text model answered the questions without their pictures")
    assert picture_caveats(pictures, (3, 4), takes_pictures=True) == []
    assert picture_caveats(TextTask(), (0, 1, 2), takes_pictures=False) == []  # type: ignore[arg-type]
    assert picture_caveats(TextTask(), (0,), takes_pictures=False) == []  # type: ignore[arg-type]
