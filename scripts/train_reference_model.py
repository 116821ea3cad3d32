"""Train the embedded reference model (checkpoints/molmoe_tiny) on generated scenes; 67 minutes on a GPU by default.

A training of several legs resumes from --state; the same command is each leg:

    python scripts/train_reference_model.py --leg-minutes 9 --state /tmp/molmoe_tiny.pt --output /tmp/molmoe_tiny
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import checkout  # noqa: F401
import torch
from transformers import AutoTokenizer

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiments.reference_model.batches import BatchSource
from experiments.reference_model.facts import FORMS, FactTable
from experiments.reference_model.recipe import OptimiserRecipe
from experiments.reference_model.trainer import Trainer, TrainingClock, new_model, run_leg, save_model
from experiments.reference_model.validation import draw_validation, quick_scores

CHECKPOINT = Path(__file__).resolve().parents[1] / "checkpoints" / "molmoe_tiny"
SAVE_EVERY_S = 90.0
HEAD_ONLY_STEPS = 250


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--planned-minutes", type=float, default=67.0, help="training time of all legs together (default: 67)"
    )
    parser.add_argument("--leg-minutes", type=float, default=67.0, help="training time of this leg (default: 67)")
    parser.add_argument("--state", type=Path, required=True, help="file for the training state between legs")
    parser.add_argument("--init-from", type=Path, help="saved model to start from if there is no state")
    parser.add_argument(
        "--start-progress", type=float, default=0.0, help="fraction of the planned training that --init-from has had"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the model in bfloat16")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="processes that draw batches"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="size of the batches, relative to the recipe's")
    parser.add_argument(
        "--first-facts", type=int, default=OptimiserRecipe.first_facts, help="prices to drill at first (default: 12000)"
    )
    parser.add_argument(
        "--validation-pictures",
        type=int,
        default=100,
        help="held-out pictures for the scores at the end (default: 100)",
    )
    parser.add_argument("--no-compile", action="store_true", help="run the blocks as they are written")
    parser.add_argument("--knob-table", action="store_true", help="print scores over top-k and blocks at the end")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new length
    recipe = OptimiserRecipe()
    recipe = replace(
        recipe,
        first_facts=arguments.first_facts,
        fact_tokens=round(recipe.fact_tokens * arguments.scale),
    )
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model, processor = new_model(tokenizer, device)
    is_tuned = arguments.init_from is not None and not arguments.state.exists()
    head_only_steps = HEAD_ONLY_STEPS if is_tuned else 0
    facts = [FactTable.of(tokenizer, torch.device(device), form) for form in FORMS]
    trainer = Trainer(model, processor, recipe, not arguments.no_compile, head_only_steps, facts)
    clock = TrainingClock(planned_s=60 * arguments.planned_minutes)
    if arguments.state.exists():
        clock.spent_s = clock.planned_s * trainer.load_state(torch.load(arguments.state, map_location=device))
        print(f"going on from step {trainer.step}, progress {clock.progress:.3f}", flush=True)
    elif is_tuned:
        model.load_state_dict(type(model).from_pretrained(arguments.init_from).state_dict())
        clock.spent_s = clock.planned_s * arguments.start_progress
    source = BatchSource(tokenizer, processor, replace(recipe, seed=recipe.seed + trainer.step), arguments.scale)
    source.progress.value, source.facts.value = clock.progress, trainer.known_facts
    loader = torch.utils.data.DataLoader(
        source, batch_size=None, num_workers=arguments.workers, prefetch_factor=2, pin_memory=device == "cuda"
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    batches = iter(loader)
    next(batches)
    clock.restart()
    left = 60 * arguments.leg_minutes
    while left > 0 and clock.progress < 1.0:
        part = min(left, SAVE_EVERY_S)
        run_leg(trainer, batches, clock, part, source, arguments.output / "training_log.jsonl")
        torch.save(trainer.state(clock), arguments.state)
        save_model(trainer, tokenizer, arguments.output)
        left -= part
    if device == "cuda":
        print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    print(f"{trainer.step} steps, prices of {trainer.known_facts} codes", flush=True)
    model.eval()
    drawn = draw_validation(tokenizer, arguments.validation_pictures)
    plain = Trainer(model, processor, recipe, compile_blocks=False)
    for tier in ("low", "medium", "high"):
        print(tier, quick_scores(plain, drawn, tier), flush=True)
    if arguments.knob_table:
        print_knob_table(plain, drawn)


def print_knob_table(trainer: Trainer, drawn: list) -> None:
    """Scores by family over top-k with all blocks, then over the first blocks with every expert."""
    total, most = trainer.model.num_total_blocks, trainer.model.default_top_k
    settings = [(total, top_k) for top_k in (most, most - 2, most // 2, most // 4, 1)]
    settings += [(count, most) for count in range(total - 1, total - 5, -1)]
    for count, top_k in settings:
        with trainer.model.knobs(top_k, range(count)):
            scores = quick_scores(trainer, drawn, "high")
        print(f"blocks {count} top_k {top_k}: {scores.overall} {scores.by_family}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
