"""Metrics under their published names, each equal to the public scorer that its docstring names.

Scores are 0 or 1. What a scorer draws at random is no answer here; the page "Metrics" lists such differences.
"""

import re
from collections.abc import Sequence
from functools import reduce
from string import ascii_uppercase

from experiment_core_utils.tasks.interface import require_references

_LARGEST_RELATIVE_CHANGE = 0.05
_MMMU_LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_MMMU_TRIVIAL = frozenset({":", ",", ".", "!", "?", ";", "'"})
_MMMU_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)
# Options' texts are looked for only in a response of more words.
_MMMU_WORDS_OF_A_LETTER = 5
_GSM8K_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_GSM8K_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")


def chartqa_relaxed(prediction: str, references: Sequence[str]) -> float:
    """Relaxed accuracy of ChartQA (A. Masry et al., ACL Findings 2022, 5.1) as lmms-eval's `relaxed_correctness`.

    1 if the whole output is a number within 5 % of a reference, of which "50%" is 0.5; other texts, and a reference
    of 0, must be equal up to case.

    Raises:
        SampleError: there are no references.
    """
    require_references("chartqa_relaxed", references)
    return float(any(_is_about(prediction, reference) for reference in references))


def _is_about(prediction: str, target: str) -> bool:
    value, wanted = _float_of_chart(prediction), _float_of_chart(target)
    if value is None or not wanted:
        return prediction.lower() == target.lower()
    return abs(value - wanted) / abs(wanted) <= _LARGEST_RELATIVE_CHANGE


def _float_of_chart(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None


def mmmu_open(prediction: str, references: Sequence[str]) -> float:
    """MMMU's open answers (X. Yue et al., CVPR 2024) as lmms-eval's `parse_open_response` and `eval_open`.

    Candidates are the shortest text behind a lead such as "is " in each line, or the whole output, and the numbers in
    them; 1 if one is a reference's number to two decimals, or contains a reference's text.

    Raises:
        SampleError: there are no references.
    """
    require_references("mmmu", references)
    wanted = [form for reference in references for form in _mmmu_forms(reference)]
    return float(
        any(
            any(isinstance(each, str) and each in candidate for each in wanted)
            if isinstance(candidate, str)
            else candidate in wanted
            for candidate in _mmmu_candidates(prediction)
        )
    )


def _mmmu_candidates(prediction: str) -> list[str | float]:
    response = prediction.strip().strip(".").lower()
    lines, found = response.split("\n"), list[str]()
    for at, line in enumerate(lines, 1):
        leads = (*_MMMU_LEADS, "=") if at == len(lines) else _MMMU_LEADS
        behind = [line.rpartition(lead)[2].strip() for lead in leads if lead in line]
        # The script takes a text of any length where the one that it has is empty.
        shortest = reduce(lambda has, text: text if not has or len(text) < len(has) else has, behind, "")
        if shortest and shortest not in _MMMU_TRIVIAL:
            found.append(shortest)
    found = found or [response]
    numbers = [number for text in found for pattern in _MMMU_NUMBERS for number in re.findall(pattern, text)]
    return [form for text in (*found, *numbers) for form in _mmmu_forms(text)]


def _mmmu_forms(text: str) -> list[str | float]:
    """A number to two decimals, else the text in lower case, of which a single character needs a space beside it."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]


def mmmu_option(prediction: str, options: Sequence[str]) -> int | None:
    """The option that lmms-eval's `parse_mmmu_multi_choice_response` finds in an output; None where it draws one.

    The last of the letters in brackets, else before a space, else before a period; in a longer output without any the
    last of the options' texts.
    """
    for mark in (",", ".", "!", "?", ";", ":", "'"):
        prediction = prediction.strip(mark)
    response, letters = f" {prediction} ", ascii_uppercase[: len(options)]
    for form in ("({})", "{} ", "{}."):
        found = [at for at, letter in enumerate(letters) if form.format(letter) in response]
        if found:
            last = "({})" if form == "({})" else " {} "
            return found[0] if len(found) == 1 else max(found, key=lambda at: response.rfind(last.format(letters[at])))
    if len(response.split()) <= _MMMU_WORDS_OF_A_LETTER:
        return None
    lower, texts = response.lower(), [option.lower() for option in options]
    named = [at for at, text in enumerate(texts) if text in lower]
    return max(named, key=lambda at: lower.rfind(texts[at]), default=None)


def gsm8k_boxed(prediction: str, references: Sequence[str]) -> float:
    """1 if the content of the last ``\\boxed{}`` is a reference by lm-eval's rule for GSM8K, else 0.

    The box is that of lm-eval's `last_boxed_only_string`; compared is by its `exact_match` with what GSM8K ignores:
    case, commas, dollar signs, all up to "#### ", and a period at the end.

    Raises:
        SampleError: there are no references.
    """
    require_references("gsm8k_boxed", references)
    answer = last_boxed(prediction)
    return 0.0 if answer is None else _gsm8k_match(answer, references)


def gsm8k_flexible(prediction: str, references: Sequence[str]) -> float:
    """1 if the last number in the output is a reference, as lm-eval's filter `flexible-extract` of GSM8K, else 0.

    Raises:
        SampleError: there are no references.
    """
    require_references("gsm8k_flexible", references)
    numbers = _GSM8K_NUMBER.findall(prediction)
    return _gsm8k_match(numbers[-1] if numbers else "[invalid]", references)


def _gsm8k_match(answer: str, references: Sequence[str]) -> float:
    return float(_gsm8k_compared(answer) in map(_gsm8k_compared, references))


def _gsm8k_compared(text: str) -> str:
    for pattern in _GSM8K_IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()


def last_boxed(text: str) -> str | None:
    """What is in the last ``\\boxed{}``, or behind the last ``\\boxed`` and a space up to a "$"; None without."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    begin, depth = text.rfind("\\boxed"), 0
    if not text.startswith("\\boxed{", begin):
        return None
    for at in range(begin, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if text[at] == "}" and not depth:
            return text[begin + len("\\boxed{") : at]
    return None
