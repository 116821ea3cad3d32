"""What the measuring costs: a marked run against the same run without marks, in turn, as ratios of pairs.

python -m experiments.benchmarks.marks --pairs 40
python -m experiments.benchmarks.marks --generate --pairs 40
python -m experiments.benchmarks.marks --generate --model_path FOLDER --device cuda --precision bfloat16

The stages are run one by one, or with `--generate` by transformers' `generate()`: without `--model_path` of two models
that are built here with random weights, one that encodes a picture and one for text. Answers have their full length, so
that all runs do the same work. Flags that are not this script's own go to the pipeline's configuration.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig, OlmoeConfig

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.engines.answer_ends import NO_ENDS
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.batch import generate_batch
from experiment_core_utils.models.hf.generate import greedy_config
from experiment_core_utils.models.interface import own_setting
from experiment_core_utils.planning.plan import requested_values
from experiment_core_utils.primitives.device import NoMarks, choose_device, choose_dtype, new_marks
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiments.benchmarks.shared import endless_model, first_inputs, paired_ratios, parsed, quartiles, timed

Case = tuple[str, Any, Mapping[str, Any]]
IMAGE_TOKEN, VOCABULARY, TEXT_TOKENS = 3, 1000, 32


def stages(model: Any, inputs: Mapping[str, Any], max_new_tokens: int, is_marked: bool) -> None:
    """Run the stages, as a sample is measured or without a mark."""
    marks = new_marks(model.device) if is_marked else NoMarks()
    generate_greedily(model, inputs, max_new_tokens, marks)
    marks.seconds()


def generate(model: Any, inputs: Mapping[str, Any], max_new_tokens: int, is_marked: bool) -> None:
    """Generate as a sample is measured, and read the marks, or as a user calls it."""
    if not is_marked:
        model.generate(**inputs, max_new_tokens=max_new_tokens)
        return
    marks = new_marks(model.device)
    generate_batch(model, [inputs], NO_ENDS, max_new_tokens, marks)
    marks.seconds()


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


def loaded_cases(config: ProfilingConfig, is_generate: bool) -> Iterator[Case]:
    """A case at each vision target, of the task's first sample; raises ConfigurationError for MolmoE's `generate()`."""
    model = endless_model(config.replaced(execution="eager") if is_generate else config)
    if is_generate and not isinstance(model, TransformersModel):
        raise ConfigurationError(f"{config.model.model_path} is a MolmoE, which runs in stages; drop --generate")
    for target in requested_values(config, find_model(config.model.model_path))[VISION_TOKENS.name].values:
        inputs = first_inputs(model, config.task, target)
        model.apply(own_setting(model).replaced(vision=target))
        name = f"{target.label}, {inputs['input_ids'].shape[1]} tokens"
        yield name, model.model if isinstance(model, TransformersModel) and is_generate else model, inputs


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--max_new_tokens", type=int, default=16)
    own, config = parsed(parser)
    device = choose_device(config.machine.device)
    is_built = own.generate and config.model.model_path == str(EMBEDDED_MODEL)
    dtype = choose_dtype(config.model.precision, device)
    cases = built_cases(device, dtype) if is_built else loaded_cases(config, own.generate)
    run = generate if own.generate else stages
    print("| model, prompt | unmarked ms | marked / unmarked | unmarked / unmarked |")
    print("| --- | --- | --- | --- |")
    for name, model, inputs in cases:
        if own.generate:
            model.generation_config = greedy_config(model)
            model.generation_config.eos_token_id = None

        def seconds(is_marked: bool, model: Any = model, inputs: Mapping[str, Any] = inputs) -> float:
            return timed(model.device, lambda: run(model, inputs, own.max_new_tokens, is_marked))[0]

        marked, plain = partial(seconds, True), partial(seconds, False)
        with torch.inference_mode():
            paired_ratios(marked, plain, 2)
            middle = statistics.median(plain() for _ in range(5))
            found, noise = (paired_ratios(way, plain, own.pairs) for way in (marked, plain))
        print(f"| {name} | {middle * 1e3:.1f} | {quartiles(found)} | {quartiles(noise)} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
