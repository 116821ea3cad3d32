"""Build the tokenizer of the embedded reference model: a byte-level BPE of 512 tokens.

Every digit and capital letter is a token of its own, with or without the space before it, so that a label is spelt
out one token a character. Words that the reference task uses are single tokens; all other text is encoded by bytes.

    python scripts/build_reference_tokenizer.py [--output checkpoints/molmoe_tiny]
"""

import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import checkout  # noqa: F401
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.tasks.datasets.reference_scenes import COLOURS, KINDS, plan_scene
from experiment_core_utils.tasks.datasets.reference_task import plural, prompt_of, scene_seed
from experiment_core_utils.tasks.datasets.reference_vqa import DESCRIBE_QUESTION, choose_questions, describe

VOCABULARY_SIZE = 512
END_OF_TEXT, PAD, IMAGE = "<|endoftext|>", "<|pad|>", "<|image|>"
IMAGE_MARKS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>")
SPECIAL_TOKENS = (END_OF_TEXT, PAD, *IMAGE_MARKS, IMAGE)
# Generous, because the reference model's context is bounded by its configuration, not by its tokenizer.
MODEL_MAX_LENGTH = 4096
_SPELT_OUT = string.ascii_uppercase + string.digits
_CORPUS_SCENES = 400
_WORD_REPEATS = 200
# Beside the task's own words: what short questions and answers about pictures often say.
_OTHER_WORDS = (
    "of in to and you it this picture image text word number left right top bottom not under above below color grey "
    "black white big small please read tell me where who one two three four five six seven eight nine ten zero"
).split()


def corpus() -> Iterator[str]:
    """Questions, answers and listings of training scenes, then each word and each spelt-out character many times.

    The repeats make the words single tokens first, whatever the scenes happen to contain.
    """
    for image_index in range(_CORPUS_SCENES):
        rng = random.Random(scene_seed("train", 0, image_index))
        plan = plan_scene(rng)
        yield f"{prompt_of(DESCRIBE_QUESTION)} {describe(plan)}"
        for pair in choose_questions(plan, rng, 8):
            yield f"{prompt_of(pair.question)} {pair.answer}"
    task_words = [*COLOURS, *KINDS, *(plural(kind) for kind in KINDS), "yes", "no"]
    for _ in range(_WORD_REPEATS):
        yield "".join(f" {word}" for word in task_words)
        yield "".join(f" {character}" for character in _SPELT_OUT) * 3
    for _ in range(_WORD_REPEATS // 20):
        yield "".join(f" {word}" for word in _OTHER_WORDS)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same code and library versions give the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[A-Z0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise SystemExit(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY_SIZE}: add words to it"
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[*IMAGE_MARKS, IMAGE],
        padding_side="left",
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _write_portable_config(path: Path) -> None:
    """Name class and special tokens the way that transformers 4 and 5 both read."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("backend", None)
    config.pop("extra_special_tokens", None)
    config["additional_special_tokens"] = [*IMAGE_MARKS, IMAGE]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_text_atomically(json.dumps(config, indent=2, sort_keys=True) + "\n", path)


def main() -> None:
    parser = OneLineParser(description="Build the tokenizer of the embedded reference model.")
    default = Path(__file__).resolve().parents[1] / "checkpoints" / "molmoe_tiny"
    parser.add_argument("--output", type=Path, default=default, help="folder to write to (default: %(default)s)")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(output)
    _write_portable_config(output / "tokenizer_config.json")
    print(f"tokenizer of {VOCABULARY_SIZE} tokens written to {output}")


if __name__ == "__main__":
    sys.exit(run_command(main))
