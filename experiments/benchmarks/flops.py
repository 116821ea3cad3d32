"""What a FLOPs figure costs: by formula after the first, by torch's counter and by ptflops, side by side in one run.

python -m experiments.benchmarks.flops --repeats 9

The figure is that of one forward pass over one prompt, for the embedded model's language part and for small random
models of known architectures. Times are medians, in milliseconds; the first figure of each kind is not among them, and
the formula, which is over so soon, is repeated a hundred times as often.
"""

import sys
from collections.abc import Iterator

import pandas as pd
import torch
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.text import validated
from experiment_core_utils.models.costs.prompt_flops import FlopMethod, count_prompt_flops
from experiment_core_utils.primitives.device import set_cpu_threads
from experiments.benchmarks.shared import median_seconds

METHODS: tuple[FlopMethod, ...] = ("formula", "counter", "ptflops")
# As many blocks as Llama 3 70B and Qwen3 235B have.
DEEP, DEEP_MIXTURE = {"num_hidden_layers": 80}, {"num_hidden_layers": 94}


def small_configs() -> list[PreTrainedConfig]:
    """A config of each kind of decoder: 4 blocks of width 128; a dense one of 80 blocks, a mixture of 94."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 16, "num_experts_per_tok": 4}
    return [
        LlamaConfig(**sizes),
        OlmoeConfig(**sizes, **experts),
        MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2),
        Qwen2MoeConfig(**sizes, **experts, moe_intermediate_size=64, shared_expert_intermediate_size=64),
        Qwen3MoeConfig(**sizes, **experts, head_dim=32, moe_intermediate_size=64),
        LlamaConfig(**{**sizes, **DEEP}),
        Qwen3MoeConfig(**{**sizes, **DEEP_MIXTURE}, **experts, head_dim=32, moe_intermediate_size=64),
    ]


def models() -> Iterator[tuple[str, nn.Module]]:
    """Models by name, one in memory at a time."""
    model, _ = load_model_tokenizer(validated({"device": "cpu"}))
    yield "embedded model", model
    for config in small_configs():
        torch.manual_seed(0)
        size = "small" if config.num_hidden_layers == 4 else f"{config.num_hidden_layers} blocks"
        yield f"{config.model_type}, {size}", AutoModelForCausalLM.from_config(config).eval()


def median_ms(model: nn.Module, prompt: torch.Tensor, method: FlopMethod, repeats: int) -> tuple[float, float | None]:
    """Median time of a figure after the first, and the figure."""
    figure = count_prompt_flops(model, prompt, None, method).flops
    return 1e3 * median_seconds(lambda: count_prompt_flops(model, prompt, None, method), repeats), figure


def row(name: str, model: nn.Module, prompt: torch.Tensor, repeats: int) -> dict[str, object]:
    """Times, ratios to the formula's time, and figures of one model."""
    times = {"formula": 100 * repeats, "counter": repeats, "ptflops": repeats}
    found = {method: median_ms(model, prompt, method, times[method]) for method in METHODS}
    formula_ms, formula = found["formula"]
    cells: dict[str, object] = {"model": name}
    for method, (took_ms, _) in found.items():
        cells[f"{method} ms"] = f"{took_ms:.3f}"
    for method in METHODS[1:]:
        cells[f"{method} / formula, time"] = f"{found[method][0] / formula_ms:.0f}"
    for method, (_, figure) in found.items():
        cells[f"{method} MFLOP"] = "-" if figure is None else f"{figure / 1e6:.3f}"
    for method in METHODS[1:]:
        figure = found[method][1]
        cells[f"{method} / formula, value"] = "-" if figure is None or not formula else f"{figure / formula:.4f}"
    return cells


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    arguments = parser.parse_args()
    set_cpu_threads(None, 1)
    prompt = torch.full((1, arguments.prompt_tokens), 5)
    rows = [row(name, model, prompt, arguments.repeats) for name, model in tqdm(models(), leave=False)]
    print(pd.DataFrame(rows).set_index("model").T.to_string())


if __name__ == "__main__":
    sys.exit(run_command(main))
