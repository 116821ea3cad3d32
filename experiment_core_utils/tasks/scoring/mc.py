"""Multiple-choice answers: the option that was chosen, scored 0 or 1.

The task is that of P. Lu et al., "Learn to Explain" (ScienceQA), NeurIPS 2022. An output that names no option is
unparsed and scores 0; nothing is guessed, so that a model that is broken on purpose cannot score at chance.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.em import molmo_answer

UNPARSED = "unparsed"
_ONLY_LETTER = re.compile(r"[(\[\"'*]*([A-Za-z])[)\]\"'*.:]*")
_LEADING_LETTER = re.compile(r"\(?([A-Z])\)?[.:)](?![A-Za-z]\b)")
_ANSWER_IS = re.compile(r"\b(?i:answer)\b(?:\s+(?i:is)\b\s*:?|\s*:)\s*[(\"'*]*([A-Za-z])(?![\w'’])")
_STANDALONE_LETTER = re.compile(r"(?<![\w'’.-])[A-Z](?![\w'’-]|\.\w)")
_SENTENCE_END = ".!?:\n"
# Before one of these "A" and "I" are letters ("A is right"); before other words they may be the article or the pronoun.
_AFTER_A_LETTER = frozenset({"is", "was", "because", "since", "as", "and", "or"})


def select_mc_option(prediction: str, options: Sequence[str]) -> tuple[int | None, str]:
    """Which option an output chooses, by the first of these rules that finds one.

    `letter`: the whole output is one letter of an option, in either case and with no more than brackets, quotes, * . :
    around it. `option_text`: the whole output is the text
    of exactly one option (case, white space around words and a period at the end do not matter). `leading_letter`: it
    begins with a letter as in "B.", "B:", "B)", "(B)". `answer_is`: "answer is B" or "Answer: B", the last such; a
    small letter counts only where it ends the output. `last_letter`: the last upper-case letter that is alone and
    is neither the article A at the start of a sentence nor the pronoun I. Letters count only up to the number of
    options. Lines that repeat the list of options choose nothing: from `leading_letter` on they are left out.

    Returns:
        The option's index and the name of the rule, or (None, "unparsed").

    Raises:
        SampleError: there are no options, or more than letters.
    """
    if not 0 < len(options) <= len(ascii_uppercase):
        raise SampleError(
            f"a multiple-choice question needs 1 to {len(ascii_uppercase)} options, got {len(options)}: check the "
            "sample's `options`"
        )
    letters = ascii_uppercase[: len(options)]
    text = prediction.strip()
    found = _ONLY_LETTER.fullmatch(text)
    if found and found[1].upper() in letters:
        return letters.index(found[1].upper()), "letter"
    same = [index for index, option in enumerate(options) if _flat(option) == _flat(text)]
    if len(same) == 1 and _flat(text):
        return same[0], "option_text"
    text = _without_repeated_options(text, options)
    found = _LEADING_LETTER.match(text)
    if found and found[1] in letters:
        return letters.index(found[1]), "leading_letter"
    stated = [letter for match in _ANSWER_IS.finditer(text) if (letter := _stated_letter(match, letters))]
    if stated:
        return letters.index(stated[-1]), "answer_is"
    alone = [
        match[0]
        for match in _STANDALONE_LETTER.finditer(text)
        if match[0] in letters and not _is_word(text, match.start())
    ]
    if alone:
        return letters.index(alone[-1]), "last_letter"
    return None, UNPARSED


def mc(prediction: str, options: Sequence[str], answer_index: int) -> float:
    """1 if `select_mc_option` finds the right option, else 0; 0 too where it finds none.

    Raises:
        SampleError: there are no options, more than letters, or `answer_index` is none of them.
    """
    _require_index(options, answer_index)
    return float(select_mc_option(prediction, options)[0] == answer_index)


def mc_molmo(prediction: str, options: Sequence[str], answer_index: int) -> float:
    """The choice as Molmo's evaluation makes it (M. Deitke et al., arXiv 2409.17146), for parity only: 0 or 1.

    The answer in the output (`molmo_answer`), lower-cased, chooses the option whose letter has the smallest edit
    distance from it, the first of equally near ones. So every output chooses: "", "zzz" and a refusal choose the
    first option that the text's letters happen to favour.

    Raises:
        SampleError: there are no options, more than letters, or `answer_index` is none of them.
    """
    _require_index(options, answer_index)
    text = molmo_answer(prediction).lower()
    letters = ascii_uppercase[: len(options)].lower()
    # From a text of n characters a single letter is n - 1 edits away if the text has it, else n (from "", 1): the
    # nearest is the first letter that occurs.
    chosen = next((index for index, letter in enumerate(letters) if letter in text), 0)
    return float(chosen == answer_index)


def _require_index(options: Sequence[str], answer_index: int) -> None:
    if not 0 <= answer_index < len(options):
        raise SampleError(
            f"the right answer is option {answer_index} of {len(options)}: check the sample's `answer_index`, which "
            "counts from 0"
        )


def _without_repeated_options(text: str, options: Sequence[str]) -> str:
    """The output without the lines that are an option's letter and text, where it contains two or more of them."""
    lines = text.splitlines()
    repeated = [_is_option_line(line, options) for line in lines]
    if sum(repeated) < 2:
        return text
    return "\n".join(line for line, is_option in zip(lines, repeated, strict=True) if not is_option).strip()


def _is_option_line(line: str, options: Sequence[str]) -> bool:
    marks = ("{}:", "{}.", "{})", "({})")
    return any(
        _flat(line) == _flat(f"{mark.format(letter)} {option}")
        for letter, option in zip(ascii_uppercase, options, strict=False)
        for mark in marks
    )


def _flat(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def _stated_letter(match: re.Match[str], letters: str) -> str | None:
    letter = match[1]
    ends_output = not any(character.isalnum() for character in match.string[match.end() :])
    if letter.upper() in letters and (letter.isupper() or ends_output):
        return letter.upper()
    return None


def _is_word(text: str, at: int) -> bool:
    """Whether the letter at this place is the article A at a sentence's start or the pronoun I."""
    following = text[at + 1 :]
    next_word = following.split(maxsplit=1)[0].lower() if following[:1].isspace() and following.strip() else ""
    if not next_word[:1].isalnum() or next_word.strip(",.") in _AFTER_A_LETTER:
        return False
    before = text[:at].rstrip(" \t\"'(*")
    return text[at] == "I" or (text[at] == "A" and (not before or before[-1] in _SENTENCE_END))
