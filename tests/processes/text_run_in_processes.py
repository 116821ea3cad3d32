"""A text run of several processes, each forked: writes the pooled results and what an error comes to."""

import json
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.c_prompt_processing import tokenise_prompts
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.e_inference import run_gen_inference
from experiment_core_utils.i_metrics_energy import aggregate_energy_metrics
from experiment_core_utils.k_results_aggregation import pool_inference_results
from experiment_core_utils.meters.tracked_window import EnergySources
from experiment_core_utils.primitives.collectives import all_gather
from experiment_core_utils.primitives.errors import OutOfMemory
from experiment_core_utils.text_run.energy import TextEnergy
from tests.scripted.scripted_codecarbon import scripted_library
from tests.scripted.simulated_energy import device_in_real_time, instruments_of
from tests.tiny_models.tiny_text_model import (
    PROMPTS,
    NumberTokenizer,
    ScriptedTextModel,
    left_padded,
    tiny_text_model,
    tiny_tokenizer,
)


def write_energy(folder: Path, accelerator: Accelerator) -> None:
    """Each process sees one GPU of its own, and 100 W of both are read in the first one."""
    own = f"GPU-{accelerator.process_index}"
    names = (own, "GPU-1") if accelerator.is_main_process else (own,)
    both = instruments_of(*(device_in_real_time(name=name) for name in names), sample_every_s=0.005)
    config = TextConfig(device="cpu", worker_timeout=60.0, country_iso_code="FRA")
    energy = TextEnergy(config, accelerator, EnergySources(scripted_library(), both, 0.0, (own,)))
    energy.measured(lambda: (time.sleep(0.3), ()), "0001", folder)
    metrics = aggregate_energy_metrics("0001", accelerator, folder, energy.reason)
    (folder / f"energy{accelerator.process_index}.json").write_text(json.dumps(metrics))


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    config = TextConfig(device="cpu", worker_timeout=60.0)
    accelerator = setup_distributed(config)
    tokenizer = tiny_tokenizer()
    model = accelerator.prepare(tiny_text_model())
    values = {"max_output_tokens": 12, "batching_options": {"batch_size___fixed_batching": 2}}
    for name, prompts in (("pooled", PROMPTS), ("one_prompt", PROMPTS[:1])):
        own = run_gen_inference(model, tokenizer, tokenise_prompts(prompts, tokenizer), values, accelerator)
        results = all_gather(own, accelerator)
        if accelerator.is_main_process:
            pooled = pool_inference_results(results)
            content = {**pooled, "output_tokens": pooled["output_tokens"].tolist()}
            (folder / f"{name}.json").write_text(json.dumps(content))
    rank = accelerator.process_index
    write_energy(folder, accelerator)
    scripted = ScriptedTextModel({60: (1,), 61: (1,)}, largest_batch=1 - rank)
    try:
        prompts = left_padded([[60], [61, 1]])
        run_gen_inference(scripted, NumberTokenizer(), prompts, {"max_output_tokens": 4}, accelerator)  # type: ignore[arg-type]
    except OutOfMemory as error:
        (folder / f"error{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    return 0
