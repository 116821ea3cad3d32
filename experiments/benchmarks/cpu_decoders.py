"""What engines gain on a CPU beside a transformers model's modules: prefill and decode steps, by several ways in turns.

    python -m experiments.benchmarks.cpu_decoders [--tokens 256] [--rounds 7]

Random weights in float32, one request. Every round runs each way once, in the order of before turned round, so that a
busy machine slows all of them; a row is the median of the rounds, and the median of the quotients to the modules.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig, PreTrainedConfig, PreTrainedModel

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.api import DecodeEngine, PrefillEngine
from experiment_core_utils.engines.cpu.decode import CpuDecode
from experiment_core_utils.engines.cpu.prefill import CpuPrefill
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config

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


@torch.inference_mode()
def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="length of the prompt (default: 256)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, a prompt of {given.tokens} tokens\n")
    print("| model | stage | way | ms | of the modules' time |\n| --- | --- | --- | --- | --- |")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.generation_config = greedy_config(model)
        size = sum(weight.numel() for weight in model.parameters()) * 4 // 10**6
        for stage, ways in ways_of(model, given.tokens).items():
            seconds = seconds_in_turns(ways, given.rounds)
            for way, own in seconds.items():
                quotient = statistics.median(a / b for a, b in zip(own, seconds["modules"], strict=True))
                ms = 1e3 * statistics.median(own) / (STEPS if stage == "decode" else 1)
                print(f"| {name} ({size} MB) | {stage} | {way} | {ms:.2f} | {quotient:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
