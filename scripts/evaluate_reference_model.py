"""Reproduce the model card's numbers: the embedded model on held-out pictures, by family and setting of the knobs.

python scripts/evaluate_reference_model.py                  # prints the tables of the card
python scripts/evaluate_reference_model.py --write-card     # and writes them into checkpoints/molmoe_tiny/README.md
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import checkout  # noqa: F401
import torch
from tqdm import tqdm

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.parts import only_model_in
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, write_json_atomically
from experiment_core_utils.tasks.datasets.reference_knowledge import ReferenceKnowledge
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.registry import REFERENCE_TASKS, get_metric
from experiments.reference_model.card import (
    knob_table,
    settings_of_card,
    title_of,
    type_table,
    with_interval,
    write_into_card,
)
from experiments.reference_model.evaluation import (
    Answered,
    PictureModel,
    accuracy_by_type,
    accuracy_of,
    answer_pictures,
    is_picture_model,
)


@dataclass(frozen=True)
class EvaluationTask:
    """What every process needs: the saved model, where it runs, the settings, and how many samples of each family."""

    path: Path
    device: str
    settings: Sequence[Setting]
    samples: int
    families: Sequence[type[GeneratedTask]] = REFERENCE_TASKS
    split: str = "validation"

    def tasks_of(self, picture: int) -> list[GeneratedTask]:
        """The families that have not got all their samples from the pictures before this one."""
        left = [family for family in self.families if picture * family.questions_per_image < self.samples]
        return [family(self.split) for family in left]

    @property
    def pictures(self) -> range:
        """The first pictures that all the samples are about."""
        return range(math.ceil(self.samples / min(family.questions_per_image for family in self.families)))


@cache
def load_once(path: Path, device: str) -> PictureModel:
    """The model of this process, in float32 with one thread on a CPU, in bfloat16 on a GPU."""
    torch.set_num_threads(1)
    precision = "float32" if device == "cpu" else "bfloat16"
    config = parse_config(["--model_path", str(path), "--precision", precision, "--execution", "eager"])
    model = find_model(str(path)).load(config.model, torch.device(device))
    assert is_picture_model(model)
    return model


def answer_picture(work: EvaluationTask, picture: int) -> list[Answered]:
    """Every answer about one picture, at every setting."""
    return list(answer_pictures(load_once(work.path, work.device), work.tasks_of(picture), [picture], work.settings))


def answer_all(work: EvaluationTask, processes: int) -> Iterator[Answered]:
    """The answers about the pictures, in order, a process for each of some pictures at a time."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = pool.map(partial(answer_picture, work), work.pictures)
        for answers in tqdm(found, total=len(work.pictures), unit="picture"):
            yield from answers


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model_path", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--samples", type=int, default=500, help="first samples of each family (default: 500)")
    parser.add_argument("--device", default="cpu", help="cpu (float32, the default) or cuda (bfloat16)")
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of processes, with one CPU thread each",
    )
    parser.add_argument("--write-card", action="store_true", help="write the tables into the model's README.md")
    parser.add_argument("--output", type=Path, help="write every figure as JSON")
    arguments = parser.parse_args()
    arguments.model_path = Path(only_model_in(str(arguments.model_path)))
    settings = settings_of_card(find_model(str(arguments.model_path)).limits)
    metrics = {family.name: get_metric(family.metric) for family in REFERENCE_TASKS}
    answers: dict[Setting, dict[str, list[Answered]]] = {each: {name: [] for name in metrics} for each in settings}
    work = EvaluationTask(arguments.model_path, arguments.device, settings, arguments.samples)
    for each in answer_all(work, arguments.processes):
        answers[each.setting][each.task].append(each)
    control = replace(work, settings=settings[:1], families=(ReferenceKnowledge,), split="control")
    unknown = [each.answer for each in answer_all(control, arguments.processes)]
    tables = "\n\n".join(
        [
            knob_table(answers, metrics),
            type_table(answers, metrics),
            f"Prices that no training contains, {title_of(settings[0])}: "
            f"{with_interval(accuracy_of(unknown, metrics[ReferenceKnowledge.name]))} (n = {len(unknown)}).\n",
        ]
    )
    print(tables)
    if arguments.output is not None:
        content = {
            title_of(setting): {
                name: {
                    "overall": asdict(accuracy_of([each.answer for each in answered], metrics[name])),
                    "by_type": {
                        kind: asdict(value)
                        for kind, value in accuracy_by_type([each.answer for each in answered], metrics[name]).items()
                    },
                }
                for name, answered in families.items()
            }
            for setting, families in answers.items()
        }
        write_json_atomically(content, arguments.output)
    if arguments.write_card:
        write_into_card(arguments.model_path / "README.md", tables)


if __name__ == "__main__":
    sys.exit(run_command(main))
