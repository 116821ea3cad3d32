"""Reproduce the model card's numbers: accuracy of the embedded model on held-out samples, by setting of the knobs.

python scripts/evaluate_reference_model.py                  # prints the tables of the card
python scripts/evaluate_reference_model.py --write-card     # and writes them into checkpoints/molmoe_tiny/README.md
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tqdm import tqdm

from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.primitives.config import EMBEDDED_MODEL
from experiment_core_utils.primitives.knobs import KnobSetting, select_active_blocks, tier_target
from experiment_core_utils.tasks.datasets.reference_vqa import chance_levels
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiments.reference_model.card import CardSetting, knob_table, settings_of_card, type_table, write_into_card
from experiments.reference_model.evaluation import ScoredAnswer, accuracy_by_type, accuracy_of, answer_samples


@cache
def load_once(path: Path) -> tuple[MolmoeForConditionalGeneration, MolmoeProcessor]:
    """Model and processor of this process, in float32 on the CPU, one thread."""
    torch.set_num_threads(1)
    model = MolmoeForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    return model, MolmoeProcessor.from_pretrained(path)


def score_setting(path: Path, num_samples: int, plan: CardSetting) -> list[ScoredAnswer]:
    """Every answer at one setting of the card."""
    model, processor = load_once(path)
    task = load_task("reference_vqa", "validation")
    blocks = select_active_blocks(plan.blocks, model.num_total_blocks)
    setting = KnobSetting(tier_target(plan.tier), plan.top_k, blocks)
    return answer_samples(model, processor, task, get_metric(task.metric), range(num_samples), setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--num_samples", type=int, default=500, help="the first so many of the validation split")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="one CPU thread each")
    parser.add_argument("--write-card", action="store_true", help="write the tables into the model's README.md")
    parser.add_argument("--output", type=Path, help="write every figure as JSON")
    arguments = parser.parse_args()
    text = MolmoeConfig.from_pretrained(arguments.model_path).text_config
    plans = settings_of_card(text.num_experts_per_tok, text.num_hidden_layers)
    score = partial(score_setting, arguments.model_path, arguments.num_samples)
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        scored = dict(zip(plans, tqdm(pool.map(score, plans), total=len(plans), unit="setting"), strict=True))
    tables = f"{type_table(scored, chance_levels())}\n\n{knob_table(scored)}\n"
    print(tables)
    if arguments.output is not None:
        content = {
            plan.title: {
                "overall": asdict(accuracy_of(answers)),
                "by_type": {kind: asdict(value) for kind, value in accuracy_by_type(answers).items()},
            }
            for plan, answers in scored.items()
        }
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.write_card:
        write_into_card(arguments.model_path / "README.md", tables)


if __name__ == "__main__":
    main()
