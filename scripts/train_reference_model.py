"""Train the embedded reference model (checkpoints/molmoe_tiny) on generated scenes; on a GPU it takes minutes.

A training of several legs goes on from --state:

    python scripts/train_reference_model.py --planned-minutes 25 --leg-minutes 9 --state /tmp/molmoe_tiny.pt
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from experiment_core_utils.models.molmoe import (  # noqa: E402
    MolmoeForConditionalGeneration,
    MolmoeImageProcessor,
    MolmoeProcessor,
)
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens  # noqa: E402
from experiments.reference_model.batches import BatchSource  # noqa: E402
from experiments.reference_model.recipe import OptimiserRecipe, reference_config  # noqa: E402
from experiments.reference_model.trainer import Clock, Trainer, run_leg  # noqa: E402
from experiments.reference_model.validation import draw_validation, quick_scores  # noqa: E402

CHECKPOINT = Path(__file__).resolve().parents[1] / "checkpoints" / "molmoe_tiny"
SAVE_EVERY_S = 120.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planned-minutes", type=float, default=25.0, help="training time of all legs together")
    parser.add_argument("--leg-minutes", type=float, default=25.0, help="training time of this leg")
    parser.add_argument("--state", type=Path, required=True, help="file that the state is kept in between legs")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model in bfloat16")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--scale", type=float, default=1.0, help="size of the batches against the recipe's")
    parser.add_argument("--learning-rate", type=float, default=OptimiserRecipe.learning_rate)
    parser.add_argument("--validation-pictures", type=int, default=100)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--knob-table", action="store_true", help="end with scores over top-k and blocks")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    recipe = replace(OptimiserRecipe(), learning_rate=arguments.learning_rate)
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    config = reference_config(tokenizer)
    model = MolmoeForConditionalGeneration(config).to(device)
    processor = MolmoeImageProcessor()
    trainer = Trainer(model, processor, recipe, compile_blocks=not arguments.no_compile)
    clock = Clock(planned_s=60 * arguments.planned_minutes)
    if arguments.state.exists():
        clock.spent_s = clock.planned_s * trainer.load_state(torch.load(arguments.state, map_location=device))
        print(f"going on from step {trainer.step}, progress {clock.progress:.3f}", flush=True)
    source = BatchSource(tokenizer, processor, replace(recipe, seed=recipe.seed + trainer.step), arguments.scale)
    source.progress.value = clock.progress
    loader = torch.utils.data.DataLoader(
        source, batch_size=None, num_workers=arguments.workers, prefetch_factor=2, pin_memory=device == "cuda"
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    batches = iter(loader)
    clock.restart()
    left = 60 * arguments.leg_minutes
    while left > 0 and clock.progress < 1.0:
        part = min(left, SAVE_EVERY_S)
        run_leg(trainer, batches, clock, part, source.progress, arguments.output / "training_log.jsonl")
        torch.save(trainer.state(clock), arguments.state)
        left -= part
    model.eval()
    drawn = draw_validation(tokenizer, arguments.validation_pictures)
    plain = Trainer(model, processor, recipe, compile_blocks=False)
    for tier in ("low", "medium", "high"):
        print(tier, quick_scores(plain, drawn, tier), flush=True)
    if arguments.knob_table:
        print_knob_table(plain, drawn, arguments.output)
    model.to(torch.bfloat16).save_pretrained(arguments.output, max_shard_size="14MB")
    MolmoeProcessor(processor, tokenizer, ImageTokens.from_config(config)).save_pretrained(arguments.output)
    print(f"saved to {arguments.output}")


def print_knob_table(trainer: Trainer, drawn: list, output: Path) -> None:
    """Leave-one-out importance of the blocks, then scores over top-k and block counts."""
    total = trainer.model.num_total_blocks
    whole = quick_scores(trainer, drawn, "high").overall
    importance = {"0": 1.0}
    for block in range(1, total):
        kept = [index for index in range(total) if index != block]
        importance[str(block)] = round(whole - quick_scores(trainer, drawn, "high", None, kept).overall, 4)
    (output / "importance_scores.json").write_text(json.dumps(importance, indent=1))
    print("importance", importance)
    ranked = sorted(range(1, total), key=lambda block: (-importance[str(block)], block))
    for count in range(total, total - 5, -1):
        for top_k in (8, 6, 4):
            chosen = [0, *sorted(ranked[: count - 1])]
            first = quick_scores(trainer, drawn, "high", top_k, range(count))
            by_importance = quick_scores(trainer, drawn, "high", top_k, chosen)
            print(f"blocks {count} top_k {top_k}: first {first.overall} important {by_importance}", flush=True)


if __name__ == "__main__":
    main()
