"""Batches decoded together by engines: what is given back where memory is short."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.interface import own_setting
from experiment_core_utils.primitives.errors import EngineRefused
from tests.models.tiny_checkpoints import write_checkpoint

NEW_TOKENS = 4


def test_kv_caches_of_other_sizes_make_room_before_a_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One KV cache of at most three requests fits beside that of single ones."""
    folder = write_checkpoint("llama", tmp_path)
    config = parse_config(["--model_path", str(folder), "--device", "cpu"])
    model = find_model(str(folder)).load(config.model, torch.device("cpu"))
    assert isinstance(model, TransformersModel)
    held: list[Any] = []
    allocate = KVCache.allocate

    def short_of_memory(decoder: Any, max_seq_len: int, batch: int = 1, blocks: int | None = None) -> KVCache:
        if batch > 3 or (batch > 1 and any(each() is not None for each in held)):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        made = allocate(decoder, max_seq_len, batch, blocks)
        held.extend([weakref.ref(made)] if batch > 1 else [])
        return made

    monkeypatch.setattr(KVCache, "allocate", short_of_memory)
    model.apply(own_setting(model).replaced(batch_size=4))
    prompts = [torch.arange(7, 7 + length)[None] for length in (5, 2, 9, 3)]
    requests = [model.to_device({"input_ids": ids, "attention_mask": torch.ones_like(ids)}) for ids in prompts]
    for number in (2, 3, 2):
        model.warm_up_batch(requests[:number], NEW_TOKENS)
        assert len(model.answer_batch(requests[:number], NEW_TOKENS)) == number
    assert len(held) == 3
    with pytest.raises(EngineRefused, match="batches of 4: the device has no memory left"):
        model.warm_up_batch(requests, NEW_TOKENS)
