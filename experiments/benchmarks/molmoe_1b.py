"""MolmoE-1B's shape with random weights, for benchmarks: models, a KV cache, device times on a GPU."""

import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import OlmoeForCausalLM, PreTrainedModel

from experiment_core_utils.b_model_loader import ModelSource
from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.requests import HFRequests
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiment_core_utils.models.molmoe.loader import molmoe_limits
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL

if TYPE_CHECKING:  # it needs Triton
    from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers

# Tokens of a prompt, their padded number, the experts of each, and the places of a KV cache.
POSITIONS, ROWS, TOP_K, MAX_SEQ_LEN = 1053, 1088, 8, 1280
# What an H200 attains, of 4.8 TB/s and 989 TFLOP/s (dense bfloat16) on the data sheet.
H200_BYTES_PER_S, H200_FLOPS_PER_S = 4.3e12, 790e12
# Replays of a series.
STEPS = 40


def shape_config(shape: str) -> MolmoeConfig:
    """The config of `--shape`: `molmoe_1b`, or that of a folder."""
    if shape == "molmoe_1b":
        return MolmoeConfig(head_vocab_size=50304)
    if not (Path(shape) / "config.json").is_file():
        raise ConfigurationError(f"--shape is {shape}; give molmoe_1b, or a folder with a config.json")
    return MolmoeConfig.from_pretrained(shape)


def shape_source(shape: str) -> ModelSource:
    """The shape as a checkpoint that was found, with the embedded model's tokenizer and pictures."""
    config = shape_config(shape)
    return ModelSource(shape, EMBEDDED_MODEL, config, molmoe_limits(config), is_published_layout=False, revision=None)


def embedded_processor() -> MolmoeProcessor:
    """The embedded model's tokenizer and image processor."""
    return MolmoeProcessor.from_pretrained(EMBEDDED_MODEL)


def staged_model(model: PreTrainedModel, processor: MolmoeProcessor, mode: ExecutionMode) -> StagedModel:
    """A MolmoE, or its decoder as transformers' own model, as it is measured; answers of the latter do not end."""
    if isinstance(model, MolmoeForConditionalGeneration):
        return MolmoeStagedModel("benchmark", model, processor, mode)
    found = TransformersModel("benchmark", model, HFRequests(processor.tokenizer, model.config, "benchmark"), mode)
    model.generation_config.eos_token_id = None
    found.eos_token_ids = frozenset()
    return found


def random_model(config: MolmoeConfig, device: torch.device, dtype: torch.dtype, is_text: bool) -> PreTrainedModel:
    """A random model made on the device, in evaluation mode; with `is_text` its decoder as transformers' own model."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        own = copy.deepcopy(config)
        with device:
            return (OlmoeForCausalLM(own.text_config) if is_text else MolmoeForConditionalGeneration(own)).eval()
    finally:
        torch.set_default_dtype(before)


def built(blocks: int, vision_blocks: int, dtype: torch.dtype) -> EngineModel:
    """Random weights made on the GPU; norms and biases too, so that nothing is multiplied by one or added as zero."""
    config = MolmoeConfig()
    config.text_config.num_hidden_layers = blocks
    config.vision_config.num_hidden_layers = vision_blocks
    model = random_model(config, torch.device("cuda"), dtype, is_text=False)
    assert isinstance(model, MolmoeForConditionalGeneration)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.02)
    return MolmoeEngineModel(model)


def in_float32(model: EngineModel) -> EngineModel:
    """A copy in float32."""
    return MolmoeEngineModel(copy.deepcopy(model.modules).float())


def crops_of(model: PreTrainedModel, crops: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [K, 3, S, S] and masks [K, P] of random crops."""
    side, patches = model.config.vision_config.image_size, model.config.patches_per_side**2
    masks = torch.ones(crops, patches, device="cuda")
    masks[-1, ::3] = 0.0
    return torch.randn(crops, 3, side, side, device="cuda", dtype=model.dtype), masks


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def milliseconds(run: Callable[[], Any], times: int = 15) -> float:
    """The median device time of one run after the other."""
    for _ in range(2):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for started, ended in events:
        started.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(started.elapsed_time(ended) for started, ended in events)


def microseconds(run: Callable[[], object], kv_cache: KVCache) -> float:
    """Device time of one of many replays in a row, from the same positions each time; the median of three series."""
    series = []
    for _ in range(3):
        kv_cache.set_lengths([POSITIONS] * kv_cache.batch)
        run()
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        for _ in range(STEPS):
            run()
        ended.record()
        ended.synchronize()
        series.append(started.elapsed_time(ended) * 1e3 / STEPS)
    return statistics.median(series)


def filled_kv_cache(decoder: DecoderWeights, batch: int) -> KVCache:
    """A KV cache with random keys and values at every position, and another token for each request."""
    kv_cache = KVCache.allocate(decoder, MAX_SEQ_LEN, batch)
    kv_cache.keys.normal_()
    kv_cache.values.normal_()
    kv_cache.next_tokens.copy_(torch.arange(6, 6 + batch))
    return kv_cache


def launches_of(
    step: "DecodeStep", buffers: "StepBuffers", top_k: int
) -> dict[str, Callable[[BlockWeights, int], None]]:
    """The launch of each kernel of a step, for a block and its place."""
    return {
        "qkv": lambda block, row: step.launch_qkv(block, buffers.stream, embed=False),
        "attention": lambda block, row: step.launch_attention(block, row),
        "output": lambda block, row: step.launch_output(block, buffers.stream, top_k, embed=False),
        "gate_up": lambda block, row: step.launch_gate_up(block, buffers.used.ids[row], top_k),
        "down": lambda block, row: step.launch_down(block, top_k),
        "head": lambda block, row: step.launch_head(),
    }
