"""VQA accuracy of an answer, in [0, 1].

The rule is that of the VQA benchmark: S. Antol et al., "VQA: Visual Question Answering", ICCV 2015, with the
evaluation protocol kept by Y. Goyal et al., "Making the V in VQA Matter", CVPR 2017. An answer counts as right to
the degree that human annotators gave it, min(agreeing annotators / 3, 1), averaged over every way of setting one
annotator aside. Both sides are normalised first (see `vqa_normalize`).
"""

import re
from collections.abc import Sequence
from types import MappingProxyType

from experiment_core_utils.tasks.interface import in_either_order, require_references
from experiment_core_utils.tasks.scoring.em import ARTICLES, NUMBER_WORDS

ANNOTATORS_FOR_FULL_CREDIT = 3
_NUMBER_WORDS = MappingProxyType(
    {"none": "0"} | {word: digits for word, digits in NUMBER_WORDS.items() if int(digits) <= 10}
)
# Marks that are dropped or become a space; `: . ' & % $ * # ~` are kept (the period has a rule of its own).
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_COMMA_DIGIT = re.compile(r"\d,\d")
_LOOSE_PERIOD = re.compile(r"\.(?!\d)")
# The reference script removes at most this many periods from one string; kept so that scores agree with it.
_MAX_PERIODS_REMOVED = 32

# Correct spellings. Each is also recognised with any one of its apostrophes left out ("dont", "couldnt've").
_CONTRACTIONS = """
    ain't aren't can't couldn't could've couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd
    he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've
    needn't not've o'clock oughtn't 'ow's'at shan't she'd've shouldn't should've shouldn't've somebody'd've
    somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
    that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've
    we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's
    who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've
    you'll you're you've
""".split()


# Each spelling without one of its apostrophes. The benchmark's own table turns "somebody'd" around; kept so that scores
# agree with it.
_CONTRACTION_OF = MappingProxyType(
    {word[:at] + word[at + 1 :]: word for word in _CONTRACTIONS for at, sign in enumerate(word) if sign == "'"}
    | {"somebody'd": "somebodyd"}
)


def vqa_normalize(text: str) -> str:
    """Normalise an answer the way the VQA benchmark does before comparing.

    In this order: newline and tab become spaces and the ends are stripped; each punctuation mark is deleted if it
    touches a space somewhere in the text or if the text has a digit-comma-digit, else it becomes a space; a period
    that no digit follows is deleted (at most 32 of them); lower case; number words none, zero to ten become digits;
    the articles a, an, the are dropped; contractions get their apostrophe; single spaces. Accents, curly quotes and
    emoji are left as they are.
    """
    original = text.replace("\n", " ").replace("\t", " ").strip()
    has_grouped_digits = _DIGIT_COMMA_DIGIT.search(original) is not None
    cleaned = original
    for mark in _PUNCTUATION:
        touches_space = f"{mark} " in original or f" {mark}" in original
        cleaned = cleaned.replace(mark, "" if touches_space or has_grouped_digits else " ")
    cleaned = _LOOSE_PERIOD.sub("", cleaned, count=_MAX_PERIODS_REMOVED)
    words = (_NUMBER_WORDS.get(word, word) for word in cleaned.lower().split())
    return " ".join(_CONTRACTION_OF.get(word, word) for word in words if word not in ARTICLES)


@in_either_order
def vqa_score(prediction: str, references: Sequence[str]) -> float:
    """VQA accuracy: the mean over references of min(matches among the *other* references / 3, 1).

    A reference is set aside by its position, so equal answers of different annotators count separately. With ten
    references 1, 2, 3, 4 matches give 0.3, 0.6, 0.9, 1. With fewer than four no answer reaches 1, and with a single
    one the score is 0 by construction; the metric of this name then gives `matching_fraction`.
    Prediction and references are always normalised, also where all references agree (the benchmark's script skips
    it there, which scores "Yes" against ten times "yes" as 0). Both orders of the arguments are taken, as the published
    `vqa_score(answers, pred_text)` has the other one: the text is the prediction.

    Raises:
        SampleError: there are no references, or not a text and a list of texts.
    """
    matches = _matches(prediction, references)
    count = len(references)
    # Setting aside a matching reference leaves matches - 1; there are `matches` such ways and count - matches others.
    with_match_aside = min((matches - 1) / ANNOTATORS_FOR_FULL_CREDIT, 1.0) if matches else 0.0
    with_other_aside = min(matches / ANNOTATORS_FOR_FULL_CREDIT, 1.0)
    return (matches * with_match_aside + (count - matches) * with_other_aside) / count


@in_either_order
def vqa_score_molmo(prediction: str, references: Sequence[str]) -> float:
    """The simplified VQA accuracy used by Molmo's evaluation: min(matches / 3, 1) over all references.

    Normalises as `vqa_score` does; with ten references the two differ by at most 0.1. With fewer than three no answer
    reaches 1; the metric of this name then gives `matching_fraction`.

    Raises:
        SampleError: there are no references.
    """
    return min(_matches(prediction, references) / ANNOTATORS_FOR_FULL_CREDIT, 1.0)


def matching_fraction(prediction: str, references: Sequence[str]) -> float:
    """The fraction of references that the prediction matches.

    With n < 4 references this is `vqa_score` over the most that n references can give, (n - 1) / 3, and with n < 3
    `vqa_score_molmo` over n / 3, so that a perfect answer has 1.

    Raises:
        SampleError: there are no references.
    """
    return _matches(prediction, references) / len(references)


def _matches(prediction: str, references: Sequence[str]) -> int:
    require_references("vqa_score", references)
    wanted = vqa_normalize(prediction)
    return sum(vqa_normalize(reference) == wanted for reference in references)
