"""What marks inside `generate()` cost: a marked run against a plain one of the same model, in turn, as ratios of pairs.

python -m experiments.benchmarks.generate_marks --pairs 40
python -m experiments.benchmarks.generate_marks --model_path FOLDER --device cuda --precision bfloat16

Without `--model_path` two models are built here with random weights, one that encodes a picture and one for text. Flags
that are not this script's own go to the pipeline's configuration.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig, OlmoeConfig

from experiment_core_utils.b_model_loader import find_model, load_staged_model
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.generate import generate_timed, greedy_config
from experiment_core_utils.primitives.device import choose_device, choose_dtype, new_marks, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.sweep.plan import requested_values
from experiments.benchmarks.shared import paired_ratios, quartiles, timed

Case = tuple[str, Any, Mapping[str, Any]]
IMAGE_TOKEN, VOCABULARY, TEXT_TOKENS = 3, 1000, 32


def built_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Two random models of width 256: a LLaVA with 576 vision tokens and 8 blocks of OLMoE (top-4 of 16); its OLMoE."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256}
    text = OlmoeConfig(**sizes, **experts, vocab_size=VOCABULARY, num_hidden_layers=8, max_position_embeddings=2048)
    tower = CLIPVisionConfig(**sizes, intermediate_size=1024, num_hidden_layers=6, image_size=336, patch_size=14)
    whole = LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE_TOKEN)
    torch.manual_seed(0)
    words = torch.randint(10, VOCABULARY, (1, TEXT_TOKENS), device=device)
    with device:
        llava = AutoModelForImageTextToText.from_config(whole, dtype=dtype).eval()
        olmoe = AutoModelForCausalLM.from_config(text, dtype=dtype).eval()
    ids = torch.cat([torch.full((1, 576), IMAGE_TOKEN, device=device), words], dim=1)
    pixels = torch.randn(1, 3, 336, 336, device=device, dtype=dtype)
    yield (
        "llava, 576 + 32 tokens",
        llava,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels},
    )
    yield "olmoe, 32 tokens", olmoe, {"input_ids": words, "attention_mask": torch.ones_like(words)}


def loaded_cases(config: ProfilingConfig, device: torch.device) -> Iterator[Case]:
    """A case at each vision target, of the first drawn sample; raises ConfigurationError for MolmoE."""
    source = find_model(config.model.model_path)
    model = load_staged_model(config.model, source, device)
    if not isinstance(model, TransformersModel):
        raise ConfigurationError(
            f"{config.model.model_path} is a MolmoE, which runs in stages; experiments.benchmarks.marks measures those"
        )
    task = open_task(config.task)
    sample = task[draw_samples(task, config.task).sample_ids[0]]
    for target in requested_values(config.knobs, source).targets:
        request = model.prepare(sample, task.prompt(sample), target.crops)
        model.apply(KnobSetting(target, model.default_top_k, tuple(range(model.num_total_blocks))))
        yield f"{target.label}, {request.shape.prompt_tokens} tokens", model.model, model.to_device(request.inputs)


def marked(model: Any, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
    """Generate as a sample is measured, and read the marks."""
    marks = new_marks(model.device)
    generate_timed(model, inputs, max_new_tokens, marks)
    marks.seconds()


@torch.inference_mode()
def plain(model: Any, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
    """Generate as a user calls it."""
    model.generate(**inputs, max_new_tokens=max_new_tokens)


def seconds(run: Callable[..., None], model: Any, inputs: Mapping[str, Any], max_new_tokens: int) -> float:
    """Seconds of a run, the device idle at both ends."""
    return timed(model.device, lambda: run(model, inputs, max_new_tokens))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", help="folder or hub id of a model of transformers")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--new_tokens", type=int, default=16)
    own, flags = parser.parse_known_args()
    path = ["--model_path", own.model_path] if own.model_path else []
    config = parse_config([*path, "--num_samples", "1", "--execution", "eager", *flags])
    set_cpu_threads(config.machine.num_threads, 1)
    device = choose_device(config.machine.device)
    cases = (
        loaded_cases(config, device)
        if own.model_path
        else built_cases(device, choose_dtype(config.model.precision, device))
    )
    print("| model, prompt | plain ms | marked / plain | plain / plain |")
    print("| --- | --- | --- | --- |")
    for name, model, inputs in cases:
        model.generation_config = greedy_config(model)
        # Always the full number of tokens, so that both runs do the same work.
        model.generation_config.eos_token_id = None
        with_marks, without = (partial(seconds, run, model, inputs, own.new_tokens) for run in (marked, plain))
        paired_ratios(with_marks, without, 2)
        middle = statistics.median(without() for _ in range(5))
        found, noise = (paired_ratios(run, without, own.pairs) for run in (with_marks, without))
        print(f"| {name} | {middle * 1e3:.1f} | {quartiles(found)} | {quartiles(noise)} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
