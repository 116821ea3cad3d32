"""What engines gain on a CPU beside a transformers model's modules: prefill, decode steps and vision towers, by several
ways in turns.

    python -m experiments.benchmarks.cpu_decoders [--only prefill decode vision] [--tokens 256] [--rounds 7]

Random weights in float32, one request; a tower encodes one picture, also by OpenVINO where that is installed. Every
round runs each way once, in the order of before turned round, so that a busy machine slows all of them; a row is the
median of the rounds, and the median of the quotients to the modules.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.api import DecodeEngine, PrefillEngine
from experiment_core_utils.engines.cpu.decode import CpuDecode
from experiment_core_utils.engines.cpu.prefill import CpuPrefill
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_proof import relative_distance
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.models.hf.engine_tower import EngineTower
from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config
from experiment_core_utils.primitives.units import MOST_TIMES, check_within
from experiment_core_utils.records.stages import STAGES

STEPS = 8
_SIZES: dict[str, Any] = {"vocab_size": 16000, "num_hidden_layers": 8, "bos_token_id": 1, "eos_token_id": None}
MODELS: dict[str, PreTrainedConfig] = {
    "Llama, 8 blocks of 768": LlamaConfig(
        **_SIZES, hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4, head_dim=64
    ),
    "OLMoE, 8 blocks of 512, 16 experts, top-k 4": OlmoeConfig(
        **_SIZES,
        hidden_size=512,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=16,
        num_experts_per_tok=4,
    ),
}
_TOWER: dict[str, Any] = {"image_size": 336, "patch_size": 14, "num_attention_heads": 16}
TOWERS: dict[str, PreTrainedConfig] = {
    "CLIP ViT-L/14, 577 tokens": CLIPVisionConfig(
        **_TOWER, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24
    ),
    "SigLIP so400m, 576 tokens": SiglipVisionConfig(
        **_TOWER, hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, vision_use_head=False
    ),
}
Ways = dict[str, Callable[[], object]]


def ways_of(model: PreTrainedModel, tokens: int) -> dict[str, Ways]:
    """The ways to run each stage at the model's own setting."""
    decoder, stages = fused_decoder(model), GenerateStages(model)
    knobs = EngineKnobs(decoder.default_top_k, tuple(range(len(decoder.blocks))))
    kv_cache = KVCache.allocate(decoder, tokens + STEPS)
    ids = torch.randint(6, 16000, (1, tokens), generator=torch.Generator().manual_seed(0))
    embeddings = decoder.embedding[ids[0]]
    logits, state = stages.prefill({"input_ids": ids}, None)
    token = logits.argmax(dim=-1, keepdim=True)

    def by_modules() -> None:
        for _ in range(STEPS):
            stages.decode_step(token, state)
        stages.rewind(state, STEPS)

    prefills: dict[str, PrefillEngine] = {"plain torch": ReferencePrefill(decoder), "kernels": CpuPrefill(decoder)}
    decodes: dict[str, DecodeEngine] = {"plain torch": ReferenceDecode(decoder), "kernels": CpuDecode(decoder)}

    def steps(engine: DecodeEngine) -> None:
        kv_cache.set_lengths([tokens])
        for _ in range(STEPS):
            kv_cache.next_tokens.copy_(token[0])
            engine.step(knobs, kv_cache)
            kv_cache.note_step()

    found: dict[str, Ways] = {"prefill": {"modules": lambda: stages.prefill({"input_ids": ids}, None)}}
    for name, prefill in prefills.items():
        prefill.warm_up(knobs, kv_cache, tokens)
        found["prefill"][name] = lambda engine=prefill: engine.prefill(embeddings, knobs, kv_cache)  # type: ignore[misc]
    found["decode"] = {"modules": by_modules}
    for name, decode in decodes.items():
        decode.warm_up(knobs, kv_cache)
        found["decode"][name] = lambda engine=decode: steps(engine)  # type: ignore[misc]
    return found


def ways_of_tower(model: PreTrainedModel) -> Ways:
    """The ways to run a model's tower.

    Raises:
        AssertionError: they do not give the same states.
    """
    tower, kernels = model.model.vision_tower, EngineTower(model)
    pixels = torch.randn(1, 3, 336, 336, generator=torch.Generator().manual_seed(0))

    def by_modules() -> torch.Tensor:
        states: torch.Tensor = tower(pixels).last_hidden_state
        return states

    def by_kernels() -> torch.Tensor:
        with kernels.in_place():
            return by_modules()

    ways: dict[str, Callable[[], torch.Tensor]] = {"modules": by_modules, "kernels": by_kernels}
    if find_spec("openvino") is not None:
        openvino: Any = import_module("openvino")
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        exported = openvino.convert_model(tower, example_input=pixels)
        compiled = openvino.compile_model(exported, "CPU", {**hints, "PERFORMANCE_HINT": "LATENCY"})
        ways[f"OpenVINO {openvino.__version__.split('-')[0]}"] = lambda: torch.from_numpy(compiled(pixels.numpy())[0])
    expected = by_modules()
    for way in ways.values():
        assert relative_distance(way(), expected) < 1e-4
    return dict(ways)


def seconds_in_turns(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one round that does not count."""
    order, seconds = list(ways), {name: list[float]() for name in ways}
    for _ in range(rounds + 1):
        for name in order:
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
        order.reverse()
    return {name: each[1:] for name, each in seconds.items()}


def print_rows(name: str, part: torch.nn.Module, stage: str, ways: Ways, rounds: int, steps: int = 1) -> None:
    """A row for each way; its time is that of one of `steps`."""
    size = sum(weight.numel() for weight in part.parameters()) * 4 // 10**6
    seconds = seconds_in_turns(ways, rounds)
    for way, own in seconds.items():
        quotient = statistics.median(a / b for a, b in zip(own, seconds["modules"], strict=True))
        ms = 1e3 * statistics.median(own) / steps
        print(f"| {name} ({size} MB) | {stage} | {way} | {ms:.2f} | {quotient:.2f} |", flush=True)


@reporting_errors
@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the rows; raises ConfigurationError for a number that is not possible."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="stages to run (default: all)")
    parser.add_argument("--tokens", type=int, default=256, help="length of the prompt (default: 256)")
    parser.add_argument("--blocks", type=int, help="blocks of a vision tower (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    given = parser.parse_args(argv)
    for name in ("tokens", "blocks", "rounds"):
        if (value := getattr(given, name)) is not None:
            check_within(f"--{name}", value, 1, MOST_TIMES)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, a prompt of {given.tokens} tokens\n")
    print("| model | stage | way | ms | of the modules' time |\n| --- | --- | --- | --- | --- |")
    for name, config in TOWERS.items() if "vision" in given.only else ():
        torch.manual_seed(0)
        config.num_hidden_layers = given.blocks or config.num_hidden_layers
        text = LlamaConfig(**_SIZES, hidden_size=64, intermediate_size=64, num_attention_heads=2)
        model = AutoModelForImageTextToText.from_config(LlavaConfig(text_config=text, vision_config=config)).eval()
        print_rows(name, model.model.vision_tower, "vision", ways_of_tower(model), given.rounds)
    for name, config in MODELS.items() if {"prefill", "decode"} & set(given.only) else ():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.generation_config = greedy_config(model)
        for stage, ways in ways_of(model, given.tokens).items():
            if stage in given.only:
                print_rows(name, model, stage, ways, given.rounds, STEPS if stage == "decode" else 1)


if __name__ == "__main__":
    sys.exit(run_command(main))
