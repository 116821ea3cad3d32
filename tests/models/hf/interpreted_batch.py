"""Batches of a transformers model by a GPU's own kernels, in Triton's interpreter: a line of JSON with the answers
together and alone.

Run with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.staged_runs import run_batch, run_staged, warm_up_batch
from experiment_core_utils.models.hf.adapter import TransformersModel
from tests.models.hf.interpreted_engines import take_few_programs
from tests.models.hf.test_graphed_stages import read
from tests.models.tiny_checkpoints import write_checkpoint

NEW_TOKENS = 4


def main() -> None:
    torch.set_num_threads(1)
    take_few_programs()
    with TemporaryDirectory() as name:
        folder = write_checkpoint("olmoe", Path(name))
        config = AutoConfig.from_pretrained(folder)
        # The kernels take experts of a multiple of 16.
        config.intermediate_size = 16
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        plain = read(folder)
    model = TransformersModel(plain.name, plain.model, plain.requests, "kernels", Reruns())
    prompts = [{"input_ids": torch.arange(7, 7 + length)[None]} for length in (3, 6)]
    requests = [model.to_device({**each, "attention_mask": torch.ones_like(each["input_ids"])}) for each in prompts]
    setting = Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1)))
    alone = []
    for inputs in requests:
        model.apply(setting)
        model.warm_up(inputs, NEW_TOKENS)
        alone.append(run_staged(model, inputs, NEW_TOKENS).token_ids)
    model.apply(setting.replaced(batch_size=2))
    together, steps = [], []
    for batch in (requests, requests[::-1]):
        warm_up_batch(model, batch, NEW_TOKENS)
        run = run_batch(model, batch, NEW_TOKENS)
        together.append(run.token_ids)
        steps.append(len(run.inter_token_s))
    ways = model.describe()["execution_stages"]
    print(json.dumps({"alone": alone, "together": together, "steps": steps, "decode": ways["decode"]}))


if __name__ == "__main__":
    main()
