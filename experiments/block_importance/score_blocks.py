"""Scores the blocks of a model, or chooses block sets, and writes them to a file with its provenance.

knobprof blocks --model_path MODEL --dataset_name text_vqa doc_qa --output scores.json
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.b_model_loader import find_requested_checkpoint
from experiment_core_utils.config.command import reporting_errors
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.block_choice import choice_by_scores, provenance_path
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.meters.host_facts import RECORDED_PACKAGES, command_line, package_version
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.source import CheckpointSource
from experiment_core_utils.planning.plan import knob_request
from experiment_core_utils.primitives.device import available_memory_bytes, choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import IS_CHECKOUT, check_writable, write_json_atomically
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import MOST_TIMES, check_within
from experiment_core_utils.requests.drawing import ids_that_chose, open_tasks, with_task_named
from experiment_core_utils.requests.fitting import refuse_picture_tasks, refuse_unfit_pictures
from experiment_core_utils.tasks.content import digests_of
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.sampling import create_sampled_dataset
from experiments.block_importance.answers import AnswerScorer, DrawnTask, draw_task
from experiments.block_importance.importance import (
    Blocks,
    BlockSetScorer,
    Estimate,
    against_baselines,
    as_json,
    chosen_by,
    comparison_as_json,
    estimate,
    leave_one_out,
    random_sets,
    save_scores,
    save_sets,
    select_block_sets,
)
from experiments.block_importance.proxies import activation_changes

METHODS = ("leave_one_out", "activation_change", "gradient")
MEASURES = ("accuracy", "answer_loss")


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags."""
    parser = OneLineParser(
        prog="score_blocks.py",
        description="Score the blocks of a model, or choose block sets, and write them to a file with its provenance. "
        "Flags that are not this program's own go to the profiler's configuration: --split, --data_dir, --seed, "
        "--device, --precision and so on. Each knob but blocks has the first value that its flags request, without "
        "them the model's own.",
        examples=(
            "knobprof blocks --model_path MODEL --dataset_name text_vqa doc_qa --output scores.json",
            "knobprof blocks --model_path MODEL --select greedy --num_active_blocks 12 --output block_sets.json",
            "knobprof blocks --model_path MODEL --check --held_out 200 --output scores.json",
        ),
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of the scores, or with --select of the block sets",
    )
    parser.add_argument(
        "--dataset_name",
        nargs="+",
        metavar="TASK",
        help="tasks, which all have the same weight (default: as of a profile)",
    )
    parser.add_argument("--num_samples", type=int, default=200, help="samples of each task; see --measure")
    parser.add_argument(
        "--held_out",
        type=int,
        default=0,
        metavar="N",
        help="number of further samples, to compare the choice with the first blocks, random sets and ShortGPT's rule",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not score: compare the scores in --output as --held_out does, by accuracy",
    )
    scoring = parser.add_argument_group("how a block is scored")
    scoring.add_argument(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="leave_one_out: accuracy lost without the block; activation_change: how much the block changes its input; "
        "gradient: first-order change of the loss without it, from a checkout",
    )
    scoring.add_argument(
        "--positions",
        choices=("all", "last"),
        default="all",
        help="prompt positions for activation_change",
    )
    scoring.add_argument(
        "--measure",
        choices=MEASURES,
        default=MEASURES[0],
        help="accuracy: of generated answers (default); answer_loss: likelihood of the expected answers, for the "
        "reference_* tasks and a MolmoE model, from a checkout; --num_samples then counts the questions of all tasks "
        "together",
    )
    choosing = parser.add_argument_group("block sets")
    choosing.add_argument("--select", choices=("greedy", "beam"), help="write block sets instead of scores")
    choosing.add_argument("--beam_width", type=int, default=3, help="width of --select beam")
    choosing.add_argument(
        "--num_active_blocks",
        nargs="+",
        type=int,
        metavar="BLOCKS",
        help="active blocks for --select and --held_out (default: 3/4 of all)",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="samples answered together")
    return parser


@dataclass(frozen=True)
class Job:
    """The loaded and validated model and tasks."""

    own: argparse.Namespace
    config: ProfilingConfig
    source: CheckpointSource
    model: StagedModel
    tasks: tuple[Task, ...]
    setting: Setting  #: at which the blocks are scored, all of them active
    counts: tuple[int, ...]


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Score, or check, and write. Exit code: 0 written, 1 broken off, 2 refused."""
    job = open_job(argv)
    scorers = pictures_of(job) if job.own.measure == "answer_loss" else samples_of(job)
    if job.own.check:
        (path,) = outputs_of(job.own)
        choice = choice_by_scores(job.own.output, flag="--output")
        for task in job.tasks:
            overlap = ids_that_chose(task, choice).intersection(scorers.held_out_ids[task.name])
            if overlap:
                raise ConfigurationError(
                    f"{len(overlap)} of the held-out samples of {task.name} {task.split} made the scores in "
                    f"{job.own.output}, and accuracy would be too good; give another --split, or the --num_samples and "
                    "--seed of the scores"
                )
        chosen = {count: choice.blocks(count, job.model.num_total_blocks) for count in job.counts}
        write_json_atomically({**provenance_of(job, scorers), **held_out_of(job, scorers, chosen)}, path)
        print(f"wrote {path}")
        return 0
    if job.own.select is not None:
        width = job.own.beam_width if job.own.select == "beam" else 1
        sets = select_block_sets(partial(_values, scorers.scored), job.model.num_total_blocks, job.counts, width)
        save_sets(job.own.output, sets, {**provenance_of(job, scorers), **held_out_of(job, scorers, sets)})
    else:
        scores, whole = scores_of(job, scorers)
        extra = {"whole_model": as_json(whole)} if whole is not None else {}
        chosen = chosen_by(scores, job.counts)
        print(least_line(scores))
        save_scores(
            job.own.output, scores, {**provenance_of(job, scorers), **extra, **held_out_of(job, scorers, chosen)}
        )
    print(f"wrote {job.own.output} and {provenance_path(job.own.output)}")
    return 0


# Blocks that are named as those that matter least.
_NAMED_BLOCKS = 5


def least_line(scores: Mapping[int, Estimate]) -> str:
    """The blocks of the lowest scores, the first of equal ones first."""
    lowest = sorted(scores, key=lambda block: scores[block].value)[:_NAMED_BLOCKS]
    each = ", ".join(f"{block} ({scores[block].value:+.3g})" for block in lowest)
    return f"blocks that matter least, of {len(scores)} scored: {each}"


def outputs_of(own: argparse.Namespace) -> tuple[Path, ...]:
    """The files that the flags have written."""
    if own.check:
        return (own.output.with_name(f"{own.output.stem}.held_out.json"),)
    return own.output, provenance_path(own.output)


def open_job(argv: Sequence[str] | None = None) -> Job:
    """Parse and validate the flags, and load.

    Raises:
        ConfigurationError: flags that do not go together, or request what the model or a task does not have.
        OutputRefused: a file of `outputs_of` cannot be written.
    """
    own, flags = build_parser().parse_known_args(argv)
    config = parse_config(flags)
    if own.select is not None and own.method != METHODS[0]:
        raise ConfigurationError(f"--select scores whole sets, and --method {own.method} single blocks; drop one")
    if own.measure == "answer_loss" and own.method != METHODS[0]:
        raise ConfigurationError(f"--measure answer_loss is for leave_one_out and --select, not for {own.method}")
    if own.held_out and own.method != METHODS[0]:
        raise ConfigurationError(f"--held_out compares with --measure, which --method {own.method} does not use")
    given = {"--method": own.method, "--measure": own.measure}
    of_checkout = [f"{flag} {value}" for flag, value in given.items() if value in ("gradient", "answer_loss")]
    if of_checkout and not IS_CHECKOUT:
        raise ConfigurationError(f"{of_checkout[0]} is run from a checkout of the project; drop it here")
    for name in ("num_samples", "beam_width", "batch_size"):
        check_within(f"--{name}", getattr(own, name), 1, MOST_TIMES)
    if own.check and (not own.held_out or own.select is not None):
        raise ConfigurationError("--check compares scores on samples that are held out; give --held_out N, no --select")
    check_within("--held_out", own.held_out, 0, MOST_TIMES)
    if config.model.execution not in ("auto", "eager"):
        found = f"--execution {config.model.execution}"
        raise ConfigurationError(f"{found} calls no modules, and blocks are scored by them; drop it")
    for path in outputs_of(own):
        check_writable(path)
    config = config.replaced(execution="eager")
    source = find_requested_checkpoint(config)
    named = with_task_named(config.task, takes_pictures=source.takes_pictures)
    names = own.dataset_name or ([named.dataset_name] if named.dataset_name is not None else [])
    refuse_picture_tasks(names, config.task, takes_pictures=source.takes_pictures, model=source.name)
    tasks = tuple(
        open_tasks(
            config.task, names, has_chat_template=source.has_chat_template, model_type=source.model_type
        ).values()
    )
    for task in tasks:
        refuse_unfit_pictures(
            task, range(len(task)), config.task, takes_pictures=source.takes_pictures, model=source.name
        )
    # The first requested value of each knob, its own where none is requested; all blocks are active.
    request = knob_request(config, source)
    others = {knob.name: knob.requested(request) for knob in all_knobs() if knob is not ACTIVE_BLOCKS}
    first = {name: found.values[0] for name, found in others.items() if found.is_given and found.values}
    setting = reference_setting(source.limits).replaced(**first)
    set_cpu_threads(config.machine.num_threads, 1)
    model = source.load(config.model, choose_device(config.machine.device))
    counts = tuple(dict.fromkeys(own.num_active_blocks or [-(-3 * model.num_total_blocks // 4)]))
    return Job(own, config, source, model, tasks, setting, counts)


@dataclass(frozen=True)
class Scorers:
    """The scorers of the samples that scores are made of, and of others."""

    scored: BlockSetScorer
    held_out: BlockSetScorer | None  #: None where none are held out
    drawn: tuple[DrawnTask, ...]  #: the scored samples, for the methods that look at each by themselves
    samples: Mapping[str, Mapping[str, int]]  #: of each task, how many are scored and held out
    scored_ids: Mapping[str, tuple[int, ...]]  #: of each task, which are scored
    held_out_ids: Mapping[str, tuple[int, ...]]  #: and which are held out


def samples_of(job: Job) -> Scorers:
    """Samples drawn from each task by the seed, those to score before those held out."""
    budget = int(available_memory_bytes() / 4 / len(job.tasks) / 2)
    parts: list[list[DrawnTask]] = [[], []]
    samples, scored_ids, held_out_ids = {}, {}, {}
    for task in job.tasks:
        ids = create_sampled_dataset(task, job.own.num_samples + job.own.held_out, job.config.task.seed).sample_ids
        if job.own.held_out and len(ids) <= job.own.num_samples:
            raise ConfigurationError(f"{task.name} has {len(ids)} samples, none are left for --held_out; ask for fewer")
        split = ids[: job.own.num_samples], ids[job.own.num_samples :]
        samples[task.name] = {"scored": len(split[0]), "held_out": len(split[1])}
        scored_ids[task.name], held_out_ids[task.name] = (tuple(sorted(part)) for part in split)
        for part, chosen in zip(parts, split, strict=True):
            part.append(draw_task(job.model, task, sorted(chosen), budget))
    scored, held_out = (AnswerScorer(job.model, part, job.setting, job.own.batch_size) for part in parts)
    return Scorers(scored, held_out if job.own.held_out else None, tuple(parts[0]), samples, scored_ids, held_out_ids)


def pictures_of(job: Job) -> Scorers:
    """Pictures drawn by the seed, with all questions of the families about them."""
    # A checkout has these alone.
    from experiments.block_importance.from_checkout.picture_scorers import PackedPictureScorer, is_picture_model

    model = job.model
    tasks = [task for task in job.tasks if isinstance(task, GeneratedTask)]
    if len(tasks) < len(job.tasks) or not is_picture_model(model):
        raise ConfigurationError("--measure answer_loss knows the reference_* tasks and MolmoE models; leave it out")
    questions = sum(task.questions_per_image for task in tasks)
    in_split = min(len(task) // task.questions_per_image for task in tasks)
    scored, held_out = (math.ceil(number / questions) for number in (job.own.num_samples, job.own.held_out))
    if scored + held_out > in_split:
        raise ConfigurationError(f"{scored + held_out} pictures are requested and {in_split} are there; ask for fewer")
    pictures = np.random.RandomState(job.config.task.seed).choice(in_split, scored + held_out, replace=False).tolist()
    model.apply(job.setting)
    parts = [sorted(pictures[:scored]), sorted(pictures[scored:])]
    crops = vision_of(job.setting).crops
    made: list[BlockSetScorer] = [
        PackedPictureScorer(model.model, model.processor, tasks, part, crops) for part in parts
    ]
    samples = {
        task.name: {"scored": scored * task.questions_per_image, "held_out": held_out * task.questions_per_image}
        for task in tasks
    }
    scored_ids, held_out_ids = (
        {task.name: tuple(chain.from_iterable(map(task.about, part))) for task in tasks} for part in parts
    )
    drawn = tuple(draw_task(model, task, scored_ids[task.name], 0) for task in tasks)
    if job.own.check:
        others = [draw_task(model, task, held_out_ids[task.name], 0) for task in tasks]
        made[1] = AnswerScorer(model, others, job.setting, job.own.batch_size)
    return Scorers(made[0], made[1] if held_out else None, drawn, samples, scored_ids, held_out_ids)


def scores_of(job: Job, scorers: Scorers) -> tuple[dict[int, Estimate], Estimate | None]:
    """Each block's score by the requested method, and the score of the whole model, where that was measured."""
    if job.own.method == "leave_one_out":
        return leave_one_out(scorers.scored, job.model.num_total_blocks)
    if job.own.method == "gradient":
        # A checkout has it alone.
        from experiments.block_importance.from_checkout.picture_scorers import gradient_importances

        measured = gradient_importances(job.model, scorers.drawn, job.setting)
    else:
        measured = activation_changes(job.model, scorers.drawn, job.setting, job.own.positions)
    return {block: estimate(values) for block, values in measured.items()}, None


# Of each task, samples that Block Influence is a mean over: one prefill each.
INFLUENCE_SAMPLES = 50


def baselines_of(job: Job, scorers: Scorers, counts: Sequence[int]) -> dict[str, dict[int, tuple[Blocks, ...]]]:
    """The sets of blocks, by baseline and number, that a choice must be better than.

    `block_influence` keeps the blocks that turn hidden states most, averaged over positions and scored samples: the
    rule of X. Men et al., "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect", 2024,
    arXiv:2403.03853. Block 0 is kept, since it always runs.
    """
    total = job.model.num_total_blocks
    few = [replace(each, sample_ids=each.sample_ids[:INFLUENCE_SAMPLES]) for each in scorers.drawn]
    changes = activation_changes(job.model, few, job.setting)
    by_influence = chosen_by({block: estimate(values) for block, values in changes.items()}, counts)
    return {
        "first": {count: (tuple(range(count)),) for count in counts},
        "random": {count: random_sets(count, total, job.config.task.seed) for count in counts},
        "block_influence": {count: (by_influence[count],) for count in counts},
    }


_BASELINES = {"first": "the first blocks", "random": "random sets", "block_influence": "ShortGPT's rule"}


def held_out_of(job: Job, scorers: Scorers, chosen: Mapping[int, Blocks]) -> dict[str, Any]:
    """The comparison with the baselines, for the provenance; it is printed too."""
    if scorers.held_out is None:
        return {}
    found = against_baselines(scorers.held_out, chosen, baselines_of(job, scorers, list(chosen)))
    for count, each in found.items():
        print(f"{counted(count, 'block')} {list(each.blocks)}: {each.chosen.value:.4f}")
        for name, one in each.baselines.items():
            sets = f"{len(one.sets)} sets, {min(one.set_scores):.4f} to {max(one.set_scores):.4f}"
            error = one.gain.standard_error
            print(
                f"  {_BASELINES[name]} ({list(one.sets[0]) if len(one.sets) == 1 else sets}): {one.score.value:.4f}, "
                f"gain {one.gain.value:+.4f}" + (f" (standard error {error:.4f})" if error is not None else "")
            )
    return {"held_out": {str(count): comparison_as_json(each) for count, each in found.items()}}


def provenance_of(job: Job, scorers: Scorers) -> dict[str, Any]:
    """The provenance of the file: how it was made."""
    is_measured = job.own.method == METHODS[0]
    validate = scorers.held_out if job.own.check and scorers.held_out is not None else scorers.scored
    return {
        "method": "check" if job.own.check else job.own.select or job.own.method,
        "beam_width": job.own.beam_width if job.own.select == "beam" else None,
        "measure": validate.measure if is_measured else None,
        "positions": job.own.positions if job.own.method == "activation_change" else None,
        "tasks": {
            task.name: {
                "split": task.split,
                "metric": task.metric,
                "samples": dict(scorers.samples[task.name]),
                "source": dict(task.source),
                **_questions(task, scorers.scored_ids[task.name]),
            }
            for task in job.tasks
        },
        "seed": job.config.task.seed,
        "vision_target": vision_of(job.setting).label,
        "top_k": experts_of(job.setting),
        "knobs": job.setting.levels,
        "model": {
            "name": job.source.name,
            "revision": job.source.revision,
            "weights_sha256": job.source.weights_sha256,
            **job.model.describe(),
        },
        "versions": {package: package_version(package) for package in RECORDED_PACKAGES},
        "command": command_line(),
    }


def _questions(task: Task, scored_ids: Sequence[int]) -> dict[str, Any]:
    """Which samples were scored: their ids and, unless they are generated, the content of those that can be read."""
    digests = digests_of(task, scored_ids, None)
    return {"scored_ids": list(scored_ids), "scored_sha256": None if digests is None else sorted(digests.values())}


def _values(scorer: BlockSetScorer, sets: Sequence[Blocks]) -> list[float]:
    return [estimate(measured).value for measured in scorer.measured(sets)]
