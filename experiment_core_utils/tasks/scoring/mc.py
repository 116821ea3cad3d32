"""Multiple-choice answers: the option that was chosen, scored 0 or 1.

The task is that of P. Lu et al., "Learn to Explain" (ScienceQA), NeurIPS 2022. An output that names no option, or
several without a decision, is unparsed and scores 0; nothing is guessed, so that a model that is broken on purpose
cannot score at chance. The reader is lenient and ours. Like VLMEvalKit (H. Duan et al., arXiv 2407.11691,
`vlmeval/utils/matching_util.py`) it looks for the only letter, then for the only option text, that stands in the
output; unlike it, it knows what is denied, discussed or decided, and needs no other model where several stand there.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase
from types import MappingProxyType

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.choices import LOOKING_LIKE, Strength, statements
from experiment_core_utils.tasks.scoring.em import folded, molmo_answer
from experiment_core_utils.tasks.scoring.polarity import polarity
from experiment_core_utils.tasks.scoring.replies import (
    UNITS,
    Reply,
    boxed_answer,
    compared_words,
    corrected,
    is_number,
    spoken,
    without_boxes,
)

UNPARSED = "unparsed"
_MEANS = MappingProxyType({"true": "yes", "yes": "yes", "false": "no", "no": "no"})
_INITIALS = re.compile(r"\b[A-Z]\.\s[A-Z]\.")
_ONLY_LETTER = re.compile(r"[(\[\"'*]*([A-Za-z])[)\]\"'*.:]*")


def select_mc_option(prediction: str, options: Sequence[str]) -> tuple[int | None, str]:
    """Which option an output chooses, and how that was read.

    The text is `folded` first, so that a full-width or circled letter is one. `letter`: the whole output is one letter
    of an option, in either case and with no more than brackets, quotes, * . : around it. `option_text`: the whole
    output is the text of exactly one option (case, white space around words and a period at the end do not matter).
    Of several lines, the first is the answer where it is one option and nothing else and those below discuss the
    options. Otherwise what is in the last ``\\boxed{}`` or ``<answer>``, if that chooses, and else the whole output is
    read as follows.

    - Letters and texts of options are found as whole words; of overlapping texts the longest counts ("dark red"),
      letters inside a text do not count ("vitamin C"), nor the article A, the pronoun I, or a letter that belongs to a
      word before it. Letters count only up to the number of options. Lines that repeat the list of options are left
      out.
    - What is denied does not count ("not A", "A rather than B" denies B, "A is wrong"), nor what gives reasons
      ("because A ..."), nor questions; what comes before "no, wait" and the like does not count if something is chosen
      after it.
    - Options joined by "or", "and", a comma or a slash are one statement that chooses none of them.
    - Of the statements that are left, the strongest kind counts: "answer is B", "Answer: B", "B is correct"; then an
      option that is a clause of its own ("B.", "B, because ...", "So B"); then "it is B", "I choose B"; of several of
      these the last. Without any, the only option that is mentioned, in an output of up to WORD_LIMIT words or in its
      first or last sentence.
    - Where nothing is chosen so: "This is not true." is the option False, and a number alone is the option with it
      where all options have the same unit.

    Returns:
        The option's index and `letter`, `option_text` (also a text inside a sentence), `leading_letter` (as in "B." at
        the beginning), `answer_is`, `last_letter` (any other letter), or (None, "unparsed").

    Raises:
        SampleError: there are no options, or more than letters.
    """
    if not 0 < len(options) <= len(ascii_uppercase):
        raise SampleError(
            f"a multiple-choice question needs 1 to {len(ascii_uppercase)} options, got {len(options)}: check the "
            "sample's `options`"
        )
    for text in filter(None, (boxed_answer(prediction), without_boxes(prediction))):
        chosen = _whole(spoken(text), options) or _opening(text, options) or _decided(text, options)
        chosen = chosen or _by_polarity(text, options) or _by_number(text, options)
        if chosen is not None:
            return chosen
    return None, UNPARSED


def mc(prediction: str, options: Sequence[str], answer_index: int) -> float:
    """1 if `select_mc_option` finds the right option, else 0; 0 too where it finds none.

    Raises:
        SampleError: there are no options, more than letters, or `answer_index` is none of them.
    """
    require_index(options, answer_index)
    return float(select_mc_option(prediction, options)[0] == answer_index)


def mc_molmo(prediction: str, options: Sequence[str], answer_index: int) -> float:
    """The choice as Molmo's evaluation makes it (M. Deitke et al., arXiv 2409.17146), for parity only: 0 or 1.

    The answer in the output (`molmo_answer`), lower-cased, chooses the option whose letter has the smallest edit
    distance from it, the first of equally near ones. So every output chooses: "", "zzz" and a refusal choose the
    first option that the text's letters happen to favour.

    Raises:
        SampleError: there are no options, more than letters, or `answer_index` is none of them.
    """
    require_index(options, answer_index)
    text = molmo_answer(prediction).lower()
    letters = ascii_uppercase[: len(options)].lower()
    # From a text of n characters a single letter is n - 1 edits away if the text has it, else n (from "", 1): the
    # nearest is the first letter that occurs.
    chosen = next((index for index, letter in enumerate(letters) if letter in text), 0)
    return float(chosen == answer_index)


def require_index(options: Sequence[str], answer_index: int) -> None:
    """Raises SampleError where the right answer is none of the options."""
    if not 0 <= answer_index < len(options):
        raise SampleError(
            f"the right answer is option {answer_index} of {len(options)}: check the sample's `answer_index`, which "
            "counts from 0"
        )


def _whole(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    letters = ascii_uppercase[: len(options)]
    found = _ONLY_LETTER.fullmatch(LOOKING_LIKE.get(text, text))
    if found and found[1].upper() in letters:
        return letters.index(found[1].upper()), "letter"
    same = [index for index, option in enumerate(options) if _flat(option) == _flat(text)]
    return (same[0], "option_text") if len(same) == 1 and _flat(text) else None


def _decided(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    reply = _reply(_without_repeated_options(text, options), options)
    read = statements(reply, options)
    for place in reply.corrections():
        read = [each for each in read if each.first >= place and each.strength >= Strength.IN_PASSING] or read
    strong = [each for each in read if each.strength >= Strength.DECIDED]
    if not strong:
        weakest = max((each.strength for each in read), default=Strength.ASIDE)
        # "Zinc protects iron" may mean either.
        passing = [
            each for each in read if each.strength == weakest or (each.strength > Strength.ASIDE and not each.first)
        ]
        mentioned = frozenset[int]().union(*(each.options for each in passing))
        return (min(mentioned), passing[-1].status) if len(mentioned) == 1 else None
    strongest = max(each.strength for each in strong)
    best = [each for each in strong if each.strength == strongest]
    last = best[-1]
    if last.is_hedged:
        sure = [each for each in best if not each.is_hedged]
        if not sure and len({each.options for each in best}) > 1:
            return None
        last = (sure or [last])[-1]
    if len(last.options) > 1:
        later = [each for each in strong if each.first > last.first and len(each.options) == 1]
        last = (later or [last])[-1]
    return (min(last.options), last.status) if len(last.options) == 1 else None


def _reply(text: str, options: Sequence[str]) -> Reply:
    return Reply(text, joins_initials=any(_INITIALS.search(option) for option in options))


def _by_polarity(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """Of true and false, or yes and no, the one that a reply means that names neither ("This is not true.")."""
    flat = tuple(_flat(option) for option in options)
    means = {_MEANS.get(option): index for index, option in enumerate(flat)}
    if set(flat) not in ({"true", "false"}, {"yes", "no"}) or statements(Reply(text), options):
        return None
    index = means.get(polarity(corrected(text)))
    return None if index is None else (index, "option_text")


def _by_number(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """The option whose number a reply gives without the unit that all options share ("10" of $5, $10, $15)."""
    of_options = [compared_words(option) for option in options]
    numbers = [[word for word in words if is_number(word)] for words in of_options]
    units = {tuple(word for word in words if not is_number(word)) for words in of_options}
    if len(units) != 1 or units == {()} or any(len(found) != 1 for found in numbers):
        return None
    if any(word.text in UNITS for word in Reply(text).words):
        return None
    return _decided(text, [found[0] for found in numbers])


def _opening(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """The option that the first line of several is and nothing else, where the lines below discuss others.

    Not where they take it back or state another answer, nor where all are the options as they were listed.
    """
    reply = _reply(text, options)
    first, *others = [line for line in reply.text.splitlines() if line] or [""]
    if not others or reply.corrections():
        return None
    at = next((at for at in range(len(options)) if _is_line_of(first, at, options[at])), None)
    chosen = _whole(first, options) if at is None else (at, "leading_letter")
    if chosen is None:
        return None
    below = chosen[0] + 1
    if below < len(options) and (
        _is_line_of(others[0], below, options[below]) or (_whole(others[0], options) or chosen)[0] == below
    ):
        return None
    later = _decided("\n".join(others), options)
    return None if later is not None and later[1] == "answer_is" else chosen


def _without_repeated_options(text: str, options: Sequence[str]) -> str:
    """The output without the lines that are an option's letter and text, where it contains two or more of them."""
    lines = text.splitlines()
    if len(lines) < 2:
        return text
    repeated = [_is_option_line(line, options) for line in lines]
    if sum(repeated) < 2:
        return text
    return "\n".join(line for line, is_option in zip(lines, repeated, strict=True) if not is_option).strip()


def _is_option_line(line: str, options: Sequence[str]) -> bool:
    return any(_is_line_of(line, at, option) for at, option in enumerate(options))


def _is_line_of(line: str, at: int, option: str) -> bool:
    """Whether a line is an option's letter and text."""
    marks = ("{}:", "{}.", "{})", "({})")
    return any(_flat(line) == _flat(f"{mark.format(ascii_uppercase[at])} {option}") for mark in marks)


def _flat(text: str) -> str:
    return " ".join(folded(text).casefold().split()).rstrip(".").rstrip()
