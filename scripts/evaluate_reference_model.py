"""Reproduce the model card's numbers: the embedded model on held-out pictures, by family and setting of the knobs.

python scripts/evaluate_reference_model.py                  # prints the tables of the card
python scripts/evaluate_reference_model.py --write-card     # and writes them into checkpoints/molmoe_tiny/README.md
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import checkout  # noqa: F401
import torch
from tqdm import tqdm

from experiment_core_utils.config.command import run_command
from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, write_json_atomically
from experiment_core_utils.primitives.knobs import KnobSetting, select_active_blocks, tier_target
from experiment_core_utils.tasks.registry import REFERENCE_TASKS, get_metric
from experiments.reference_model.card import CardSetting, knob_table, settings_of_card, type_table, write_into_card
from experiments.reference_model.evaluation import Answered, accuracy_by_type, accuracy_of, answer_pictures


@cache
def load_once(path: Path) -> tuple[MolmoeForConditionalGeneration, MolmoeProcessor]:
    """Model and processor of this process, in float32 on the CPU, one thread."""
    torch.set_num_threads(1)
    model = MolmoeForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    return model, MolmoeProcessor.from_pretrained(path)


def answer_picture(path: Path, settings: Sequence[KnobSetting], picture: int) -> list[Answered]:
    """Every answer about one picture, at every setting."""
    model, processor = load_once(path)
    tasks = [family("validation") for family in REFERENCE_TASKS]
    return list(answer_pictures(model, processor, tasks, [picture], settings))


def answer_all(
    path: Path, plans: Sequence[CardSetting], total_blocks: int, pictures: int, processes: int
) -> Iterator[Answered]:
    """The answers about the first pictures, in order, a process for each of some pictures at a time."""
    settings = [
        KnobSetting(tier_target(plan.tier), plan.top_k, select_active_blocks(plan.blocks, total_blocks))
        for plan in plans
    ]
    work = partial(answer_picture, path, settings)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for answers in tqdm(pool.map(work, range(pictures)), total=pictures, unit="picture"):
            yield from answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--pictures", type=int, default=125, help="number of first samples of the validation split")
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of processes, with one CPU thread each",
    )
    parser.add_argument("--write-card", action="store_true", help="write the tables into the model's README.md")
    parser.add_argument("--output", type=Path, help="write every figure as JSON")
    arguments = parser.parse_args()
    text = MolmoeConfig.from_pretrained(arguments.model_path).text_config
    plans = settings_of_card(text.num_experts_per_tok, text.num_hidden_layers)
    metrics = {family.name: get_metric(family.metric) for family in REFERENCE_TASKS}
    answers: dict[CardSetting, dict[str, list[Answered]]] = {plan: {name: [] for name in metrics} for plan in plans}
    for each in answer_all(
        arguments.model_path, plans, text.num_hidden_layers, arguments.pictures, arguments.processes
    ):
        setting = each.setting
        plan = CardSetting(str(setting.vision.tier), setting.top_k, setting.num_active_blocks)
        answers[plan][each.task].append(each)
    tables = f"{knob_table(answers, metrics)}\n\n{type_table(answers, metrics)}\n"
    print(tables)
    if arguments.output is not None:
        content = {
            plan.title: {
                name: {
                    "overall": asdict(accuracy_of([each.answer for each in answered], metrics[name])),
                    "by_type": {
                        kind: asdict(value)
                        for kind, value in accuracy_by_type([each.answer for each in answered], metrics[name]).items()
                    },
                }
                for name, answered in families.items()
            }
            for plan, families in answers.items()
        }
        write_json_atomically(content, arguments.output)
    if arguments.write_card:
        write_into_card(arguments.model_path / "README.md", tables)


if __name__ == "__main__":
    sys.exit(run_command(main))
