"""Exact match of an answer: 0 or 1.

Strict as in the evaluation of M. Deitke et al., "Molmo and PixMo", arXiv 2409.17146; exact match as a metric goes back
to P. Rajpurkar et al., "SQuAD", EMNLP 2016, whose dropping of articles and punctuation the lenient variant follows.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.tasks.interface import in_either_order, require_references

_MARKER = "Answer:"


def molmo_answer(prediction: str) -> str:
    """The short answer in an output: after the first "Answer:", then the most frequent line.

    What follows the first "Answer:" (to the next one, if there is another) is taken where the output has one. Of
    several lines, the most frequent counts, of equally frequent ones the first; empty lines do not count. White space
    is collapsed and stripped. An output without any text gives "".
    """
    _, marker, after = prediction.partition(_MARKER)
    text = after.partition(_MARKER)[0] if marker else prediction
    lines = [" ".join(line.split()) for line in text.split("\n")]
    counts = Counter(line for line in lines if line)
    return counts.most_common(1)[0][0] if counts else ""


_WORDS_OF_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
NUMBER_WORDS = MappingProxyType({word: str(value) for value, word in enumerate(_WORDS_OF_NUMBERS)})
ARTICLES = frozenset({"a", "an", "the"})
_AROUND = " \"'“”‘’`()[]{}"
_AFTER = ".,;:!?"
_GROUPED = re.compile(r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DRAWN_ALIKE = str.maketrans(dict.fromkeys("‘’‚‛′´", "'") | dict.fromkeys("“”„‟″", '"') | {"−": "-"})
_WHOLE_NUMBER_WITH_ZEROS = re.compile(r"([+-]?\d+)\.0+")


@in_either_order
def em(prediction: str, references: Sequence[str]) -> float:
    """Strict exact match: 1 if the answer in the output, lower-cased, equals a reference lower-cased, else 0.

    The answer in the output is `molmo_answer`'s; references are taken as they are. "3." and "three" do not match
    "3".

    Raises:
        SampleError: there are no references.
    """
    require_references("em", references)
    answer = molmo_answer(prediction).lower()
    return float(any(answer == reference.lower() for reference in references))


@in_either_order
def em_lenient(prediction: str, references: Sequence[str]) -> float:
    """Exact match after `normalize_leniently` on both sides, the prediction's answer by `molmo_answer` first.

    At least as high as `em` on every answer. A number inside a sentence still does not match ("there are two dogs"
    against "2").

    Raises:
        SampleError: there are no references.
    """
    require_references("em", references)
    answer = normalize_leniently(molmo_answer(prediction))
    return float(any(answer == normalize_leniently(reference) for reference in references))


def folded(text: str) -> str:
    """The text with one form for what looks alike.

    Unicode's NFKC, which composes accents and makes full-width and circled characters plain; straight quotes; no
    characters without width.
    """
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFKC", text.translate(_DRAWN_ALIKE))
    return "".join(each for each in composed if unicodedata.category(each) != "Cf")


def normalize_leniently(text: str) -> str:
    """What `em_lenient` compares.

    In this order: lower case, `folded`, and single spaces; quotes and brackets around the text, the marks . , ; : ! ?
    after it and a leading article a, an, the where something follows are dropped, as long as there are any; commas that
    group digits by three are dropped (1,000 is 1000); the words zero to twenty become digits; a number of nothing but
    zeros after its point becomes whole (3.0 is 3). Signs, units and "about" stay.
    """
    flat = " ".join(folded(text.lower()).lower().split())
    while (bare := _without_article(flat.strip(_AROUND).rstrip(_AFTER))) != flat:
        flat = bare
    words = _GROUPED.sub(lambda found: found[1].replace(",", ""), flat).split()
    digits = [NUMBER_WORDS.get(word, word) for word in words]
    return " ".join(
        found[1] if (found := _WHOLE_NUMBER_WITH_ZEROS.fullmatch(word)) is not None else word for word in digits
    )


def _without_article(text: str) -> str:
    first, _, rest = text.partition(" ")
    return rest if rest and first in ARTICLES else text
