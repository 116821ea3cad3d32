"""The metrics under published names, by hand and against the scorers of lm-eval and lmms-eval where they are installed.

    pip install --no-deps lm-eval==0.4.13 lmms-eval==0.7.3

is enough: their functions are read from their files, so that nothing else of them is imported.
"""

import ast
import random
import re
import string
from collections.abc import Callable
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein

from experiment_core_utils.tasks.interface import Answer
from experiment_core_utils.tasks.scoring.metrics import METRICS

SCORE_OF = {metric.name: lambda answer, metric=metric: metric.score([answer]).scores[0].value for metric in METRICS}
PAIRS = 2500

BY_HAND: list[tuple[str, str, list[str], float]] = [
    ("chartqa_relaxed", "1,050", ["1000"], 0),  # with its comma it is a text
    ("chartqa_relaxed", "1050", ["1000"], 1),
    ("chartqa_relaxed", "1051", ["1000"], 0),
    ("chartqa_relaxed", "49%", ["50%"], 1),
    ("chartqa_relaxed", "0.5", ["50%"], 1),
    ("chartqa_relaxed", "Blue", ["blue"], 1),
    ("chartqa_relaxed", "0.0", ["0"], 0),  # a target of 0 has no relative change
    ("docvqa_anls", "hallo", ["hello"], 0.8),
    ("docvqa_anls", "  hallo  ", ["hello"], 1 - 1 / 9),  # `anls` strips first
    ("docvqa_anls", "ac", ["ab"], 0.5),
    ("vqa_v2", "Yes.", ["yes"] * 10, 1),
    ("vqa_v2", "cat", ["cat", *["dog"] * 9], 0.3),
    ("vqa_v2", "cat", ["cat"], 0),  # `vqa_score` takes the fraction that matches
    ("mmmu", "The answer is 24.", ["24"], 1),
    ("mmmu", "ionization", ["ion"], 1),
    ("mmmu", "x = 1,234.5", ["1234.5"], 1),
    ("mmmu", "b", ["b"], 1),
    ("mmmu", ".5", ["0.5"], 0),  # periods at both ends go; `mmmu_score` keeps the first
    ("gsm8k_boxed", "so \\boxed{1} or $\\boxed{1{,}200}$", ["12 * 100\n#### 1,200"], 0),  # {,} stays
    ("gsm8k_boxed", "so \\boxed{$1,200.}", ["1200"], 1),
    ("gsm8k_boxed", "1200", ["1200"], 0),
    ("gsm8k_flexible", "3 * 4 = 12. It costs $12.", ["12"], 1),
    ("gsm8k_flexible", "12, not 13", ["12"], 0),
]


@pytest.mark.parametrize(("name", "prediction", "references", "expected"), BY_HAND)
def test_by_hand(name: str, prediction: str, references: list[str], expected: float) -> None:
    assert SCORE_OF[name](Answer(prediction, tuple(references))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "chosen"),
    [("(B)", 1), ("A or B ", 1), ("C.", 2), ("I would say that it is the green one", 1), ("green", None), ("", None)],
)
def test_a_letter_or_in_a_longer_output_a_text_is_the_option_of_mmmu(prediction: str, chosen: int | None) -> None:
    answers = [Answer(prediction, (), ("red", "green", "blue"), right) for right in range(3)]
    assert [SCORE_OF["mmmu"](answer) for answer in answers] == [float(right == chosen) for right in range(3)]


def functions_of(package: str, path: str, *names: str, **known: Any) -> SimpleNamespace:
    """Functions and classes of a file of an installed package, without its decorators and imports."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    tree = ast.parse((Path(found.submodule_search_locations[0]) / path).read_text())
    nodes = [node for node in tree.body if getattr(node, "name", "") in names]
    for node in nodes:
        node.decorator_list = []  # type: ignore[attr-defined]
    space: dict[str, Any] = {"re": re, "np": np, "string": string, "List": list, "Dict": dict, "Any": Any, **known}
    exec(compile(ast.Module([*nodes], []), path, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


PIECES = (
    "a A the b B ( ) (B) (C) C. D 2 3 10 0 -7 -0 2.5 .5 5. 1,000 1,00 12,345.6 1e3 2E-2 50% 49% 5 % $ $3 $1,200.50 "
    "nan inf 1_0 ٤ x = is so answer: final therefore Yes yes No none two ten dont can't red green blue red-green "
    "Red. ion ionization café ß \n \t . , ; : ! ? ' \" - / \\boxed{ \\boxed{12} \\boxed 12 } { $ #### "
    "####"
).split(" ")


def text_of(draw: random.Random, longest: int = 7) -> str:
    return draw.choice(["", " "]).join(draw.choice(PIECES) for _ in range(draw.randint(0, longest)))


def pairs(seed: int, references: int) -> list[tuple[str, list[str]]]:
    """Odd texts and references of the same pieces, every other of them near the text."""
    draw, made = random.Random(seed), []
    for at in range(PAIRS):
        prediction, wanted = text_of(draw), [text_of(draw, 2) for _ in range(references)]
        if at % 2:
            wanted[-1] = draw.choice([prediction, prediction.lower(), prediction.strip(" .!"), *prediction.split()])
        if at % 8 == 1:
            prediction = f"so $\\boxed{{{wanted[-1]}}}$"
        if at % 4 == 1:
            wanted = [draw.choice([*wanted, wanted[-1]]) for _ in wanted]
        made.append((prediction, wanted))
    return made


def check(name: str, reference: Callable[[str, list[str]], float], references: int = 1) -> None:
    hits = 0
    for prediction, wanted in pairs(len(name), references):
        if not prediction.strip():  # empty outputs are 0, also where a reference is empty
            continue
        expected = reference(prediction, wanted)
        assert SCORE_OF[name](Answer(prediction, tuple(wanted))) == pytest.approx(expected), (prediction, wanted)
        hits += expected > 0
    assert hits > PAIRS / 50


def test_chartqa_is_lmms_evals() -> None:
    theirs = functions_of("lmms_eval", "tasks/chartqa/utils.py", "relaxed_correctness")
    check("chartqa_relaxed", lambda text, wanted: float(theirs.relaxed_correctness(text, wanted[0])))


def test_docvqa_is_lmms_evals() -> None:
    theirs = functions_of("lmms_eval", "api/metrics.py", "anls", levenshtein_distance=Levenshtein.distance)
    check("docvqa_anls", lambda text, wanted: theirs.anls(wanted, [text])["anls"], references=3)


def test_vqa_v2_is_lmms_evals() -> None:
    processor = functions_of("lmms_eval", "tasks/_task_utils/vqa_eval_metric.py", "EvalAIAnswerProcessor")
    known = {"EvalAIAnswerProcessor": processor.EvalAIAnswerProcessor, "statistics": __import__("statistics")}
    theirs = functions_of("lmms_eval", "tasks/vqav2/utils.py", "vqav2_process_results", **known)

    def score(text: str, wanted: list[str]) -> float:
        answers = [{"answer": answer, "answer_id": at} for at, answer in enumerate(wanted)]
        value: float = theirs.vqav2_process_results({"answers": answers, "question_id": 1}, [text])["exact_match"]
        return value

    check("vqa_v2", score, references=5)


def test_mmmu_is_lmms_evals_where_nothing_is_drawn() -> None:
    names = "extract_numbers check_is_number normalize_str parse_open_response eval_open".split()
    theirs = functions_of("lmms_eval", "tasks/mmmu/utils.py", *names)
    check("mmmu", lambda text, wanted: float(theirs.eval_open(wanted, theirs.parse_open_response(text))), references=2)
    names = ["get_multi_choice_info", "parse_mmmu_multi_choice_response"]
    undrawn = SimpleNamespace(choice=lambda letters: None)
    theirs = functions_of("lmms_eval", "tasks/_task_utils/mmmu_mcq_utils.py", *names, random=undrawn)
    options = ("red", "green", "ion", "Blue")
    text_by_letter, letters = theirs.get_multi_choice_info(options)
    for text, _ in pairs(1, 1):
        chosen = theirs.parse_mmmu_multi_choice_response(text, letters, text_by_letter)
        scores = [SCORE_OF["mmmu"](Answer(text, (), options, right)) for right in range(4)]
        assert scores == [float(letter == chosen) for letter in letters], text


@pytest.mark.parametrize("name", ["gsm8k_boxed", "gsm8k_flexible"])
def test_gsm8k_is_lm_evals(name: str) -> None:
    boxes = functions_of("lm_eval", "tasks/aime/utils.py", "last_boxed_only_string", "remove_boxed")
    metric = functions_of("lm_eval", "api/metrics.py", "exact_match_hf_evaluate").exact_match_hf_evaluate
    known = {"register_filter": None, "Filter": object, "Iterable": list, "Sequence": list}
    regex = functions_of("lm_eval", "filters/extraction.py", "RegexFilter", **known).RegexFilter
    last_number = regex("(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)

    def score(text: str, wanted: list[str]) -> float:
        answer = last_number.apply([[text]], [{}])[0][0]
        if name == "gsm8k_boxed":
            box = boxes.last_boxed_only_string(text)
            try:
                answer = None if box is None else boxes.remove_boxed(box)
            except AssertionError:  # theirs fails at a box without a brace
                answer = None
        if answer is None:
            return 0.0
        ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
        found = metric([answer], wanted, regexes_to_ignore=ignored, ignore_case=True)["exact_match"]
        assert not isnan(found)
        return float(found)

    check(name, score)
