"""What scoring costs: captions of COCO's size, tokenised and scored by CIDEr-D, and the other metrics for each answer.

python -m experiments.benchmarks.scoring
"""

import random
import statistics
import sys
from collections.abc import Sequence
from itertools import accumulate

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.tasks.interface import Answer
from experiment_core_utils.tasks.registry import get_metric, list_metrics
from experiment_core_utils.tasks.scoring.ptb_tokenizer import ptb_tokenize
from experiments.benchmarks.shared import median_seconds

# COCO's 2014 validation split.
IMAGES = 40_504
REFERENCES = 5
# Its captions have about 10.5 words, few below 8, and a long tail; its vocabulary is near 20,000 words of which the
# commonest make most of the text.
VOCABULARY = 20_000
SHORTEST, MEAN_MORE, LONGEST = 7, 3.5, 40
WORDS_OF_AN_IMAGE = 14
LINKING_WORDS = "a the on in of with and is at to an are by his near it for next two up".split()
TEXT_METRICS_OPTIONS = 4


def synthetic_vocabulary(size: int, random_source: random.Random) -> list[str]:
    """Made-up words, the commonest first; one in fifty is hyphenated, one in a hundred has a clitic."""
    syllables = [first + vowel for first in "bcdfghjklmnprstvwz" for vowel in ("a", "e", "i", "o", "u", "an", "er")]
    words = []
    for rank in range(size):
        word = "".join(random_source.choices(syllables, k=2 + (rank > size // 20)))
        words.append(f"{word}-{word[:4]}" if rank % 50 == 49 else f"{word}'s" if rank % 100 == 10 else word)
    return words


def synthetic_captions(images: int, random_source: random.Random) -> tuple[list[str], list[tuple[str, ...]]]:
    """One prediction and five references for each image, all made of the image's own few words and linking words."""
    vocabulary = synthetic_vocabulary(VOCABULARY, random_source)
    # Zipf's law: the word of rank r has a weight of 1 / r.
    cumulated = list(accumulate(1 / rank for rank in range(1, len(vocabulary) + 1)))
    predictions, references = [], []
    for _ in range(images):
        own = random_source.choices(vocabulary, cum_weights=cumulated, k=WORDS_OF_AN_IMAGE)
        captions = [_caption(own, random_source) for _ in range(1 + REFERENCES)]
        predictions.append(captions[0])
        references.append(tuple(captions[1:]))
    return predictions, references


def _caption(own: Sequence[str], random_source: random.Random) -> str:
    length = min(SHORTEST + int(random_source.expovariate(1 / MEAN_MORE)), LONGEST)
    words = [random_source.choice(LINKING_WORDS if at % 2 == 0 else own) for at in range(length)]
    comma = "," if random_source.random() < 0.08 else ""
    period = "." if random_source.random() < 0.8 else ""
    return f"{words[0].capitalize()} {words[1]}{comma} {' '.join(words[2:])}{period}"


def answers_for(metric: str, predictions: Sequence[str], references: Sequence[tuple[str, ...]]) -> list[Answer]:
    """Answers of the kind that the metric scores: captions, choices, or short texts with ten references."""
    if metric == "cider_score":
        return [
            Answer(prediction, answers, image_id=str(number))
            for number, (prediction, answers) in enumerate(zip(predictions, references, strict=True))
        ]
    short = [" ".join(prediction.split()[:3]) for prediction in predictions]
    if metric in ("mc", "mc_molmo"):
        outputs = [f"The answer is {'ABCD'[number % TEXT_METRICS_OPTIONS]}." for number in range(len(short))]
        return [
            Answer(output, (), options=answers[:TEXT_METRICS_OPTIONS], answer_index=number % TEXT_METRICS_OPTIONS)
            for number, (output, answers) in enumerate(zip(outputs, references, strict=True))
        ]
    return [
        Answer(prediction, tuple(" ".join(answer.split()[:3]) for answer in answers) * 2)
        for prediction, answers in zip(short, references, strict=True)
    ]


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    predictions, references = synthetic_captions(arguments.images, random.Random(arguments.seed))
    texts = [*predictions, *(text for captions in references for text in captions)]
    words = statistics.mean(len(text.split()) for text in texts)
    print(f"{arguments.images} images, {len(texts)} captions of {words:.1f} words on average")

    tokenising = median_seconds(lambda: [ptb_tokenize(text) for text in texts], arguments.repeats)
    print(f"tokenise: {tokenising:.2f} s, {1e6 * tokenising / len(texts):.1f} us for each caption", flush=True)
    for name in list_metrics():
        metric = get_metric(name)
        answers = answers_for(name, predictions, references)
        seconds = median_seconds(lambda: metric.score(answers), arguments.repeats)  # noqa: B023
        print(
            f"{name}: {seconds:.2f} s, {1e6 * seconds / len(answers):.1f} us for each answer, "
            f"{seconds / tokenising:.2f} of the time to tokenise the captions",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
