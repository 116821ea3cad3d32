"""Models that accelerate dispatched: on this machine to the processor, with parts that come from the disk when used."""

from pathlib import Path

import pytest
import torch
from torch import nn

from experiment_core_utils.models.common.placement import (
    computing_devices,
    device_of,
    is_offloaded,
    placement_caveats,
    places_of,
    refuse_device_map,
    refuse_offload,
    spread_over,
    spread_reason,
)
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination, OutOfMemory
from tests.models.dispatched import dispatched
from tests.tiny_models.tiny_language_models import tiny_llama

CPU = torch.device("cpu")


def test_a_model_on_one_device_has_no_places() -> None:
    model = tiny_llama()
    assert (places_of(model), spread_reason(model), is_offloaded(model)) == ({}, None, False)
    assert computing_devices(model) == (CPU,)
    refuse_offload(model, ("disk",), "here")


def test_a_dispatched_model_says_where_it_is_and_where_it_computes(tmp_path: Path) -> None:
    model = dispatched(tiny_llama(), tmp_path, ["model.embed_tokens", "model.layers.1"])
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert device_of(model.get_input_embeddings()) == CPU and computing_devices(model) == (CPU,)
    assert is_offloaded(model) and places_of(model)["model.layers.1"] == "disk"
    assert spread_reason(model) == "its weights are on several devices (cpu, disk)"
    with pytest.raises(OutOfMemory, match=r"does not fit here: 2 of its parts were left, for example model.embed_to"):
        refuse_offload(model, ("disk",), "here")


def test_weights_that_are_copied_for_each_use_are_a_caveat() -> None:
    assert [placement_caveats(places) for places in (None, {"a": "cuda:0", "b": "cuda:1"}, {"": "cpu"})] == [[]] * 3
    (found,) = placement_caveats({"a": "cuda:0", "b": "cuda:1", "c": "cpu"})
    assert found.sentence.startswith("offloaded: 1 of 3 parts of the model are copied to their device for each use")


def test_gpus_are_numbers_in_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr(model, "hf_device_map", {"a": 0, "b": 1, "c": "cpu"}, raising=False)
    assert spread_reason(model) == "its weights are on several devices (cpu, cuda:0, cuda:1)"
    # The third part computes on the device of those before it.
    assert computing_devices(model) == (CPU, torch.device("cuda", 0), torch.device("cuda", 1))


def test_hooks_one_after_the_other_are_looked_through() -> None:
    from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module

    module = add_hook_to_module(nn.Linear(2, 2, device="meta"), ModelHook())
    add_hook_to_module(module, AlignDevicesHook("meta"), append=True)
    assert device_of(module) == torch.device("meta")


def test_only_one_process_with_gpus_spreads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_device_map(None, CPU, "--device_map auto")
    with pytest.raises(ConfigurationError, match="--device_map auto shards .*, and this process has none; drop it"):
        refuse_device_map("auto", CPU, "--device_map auto")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ImpossibleCombination, match="all GPUs to one process, and 2 were launched; launch one"):
        refuse_device_map("auto", torch.device("cuda", 0), "--device_map auto")


def test_a_model_made_on_the_host_is_spread_as_a_loaded_one_is() -> None:
    model = tiny_llama()
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = model(ids).logits
        assert torch.equal(spread_over(model, {"": "cpu"})(ids).logits, before)
    with pytest.raises(OutOfMemory, match="does not fit on the GPUs and the host together"):
        spread_over(model, {"model": "cpu", "lm_head": "disk"})
