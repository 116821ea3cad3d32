"""MMMU scoring of multiple-choice and open answers: 0 or 1.

X. Yue et al., "MMMU: A Massive Multi-discipline Multimodal Understanding and Reasoning Benchmark", CVPR 2024.
Multiple choice is `mc` (the benchmark's own script draws a random option where it finds none; nothing is random here);
open answers follow the benchmark's rule as Molmo's evaluation applies it.
"""

import re
from collections.abc import Sequence

from experiment_core_utils.tasks.interface import in_either_order, require_references

# What comes before an answer in a sentence; the equals sign only in the last sentence.
_LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_LEAD_AT_THE_END = "="
_NO_ANSWER = frozenset({":", ",", ".", "!", "?", ";", "'"})
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:e[+-]?\d+)?")
_DECIMALS = 2


@in_either_order
def mmmu_open_score(prediction: str, references: Sequence[str]) -> float:
    """1 if a candidate in the output fits a reference, else 0.

    Candidates are, per line of the lower-cased output without the periods at its end, the shortest text after a lead
    such as "is " or "therefore " ("=" too in the last line), or the whole output where no line has a lead; and every
    number in them. A number fits a reference that is the same number to two decimals (1,234 is 1234); a text
    candidate fits a reference text that it contains, also inside a word ("ionization" fits "ion", as in the benchmark's
    own script). A reference of one character must be beside a space, or be the whole candidate.

    Raises:
        SampleError: there are no references.
    """
    require_references("mmmu_score", references)
    texts, numbers = _candidates(prediction)
    for reference in references:
        number = _as_number(reference)
        if number is not None:
            if number in numbers:
                return 1.0
            continue
        wanted = reference.strip().lower()
        if any(_contains(text, wanted) for text in texts):
            return 1.0
    return 0.0


def _candidates(prediction: str) -> tuple[list[str], set[float]]:
    lines = prediction.strip().rstrip(".").lower().split("\n")
    found = []
    for position, line in enumerate(lines):
        leads = (*_LEADS, _LEAD_AT_THE_END) if position == len(lines) - 1 else _LEADS
        after = [line.rpartition(lead)[2].strip() for lead in leads if lead in line]
        if after and (shortest := min(after, key=len)) not in _NO_ANSWER:
            found.append(shortest)
    found = found or ["\n".join(lines)]
    numbers = {_as_number(match[0]) for text in found for match in _NUMBER.finditer(text) if match[0]}
    texts = [text for text in found if _as_number(text) is None]
    whole = {_as_number(text) for text in found}
    return texts, {number for number in numbers | whole if number is not None}


def _as_number(text: str) -> float | None:
    """The number that the whole text is, to two decimals; None for any other text."""
    stripped = text.strip()
    if not _NUMBER.fullmatch(stripped.lower()):
        return None
    return round(float(stripped.replace(",", "")), _DECIMALS)


def _contains(text: str, wanted: str) -> bool:
    if len(wanted) == 1:
        return text == wanted or f" {wanted}" in text or f"{wanted} " in text
    return bool(wanted) and wanted in text
