"""Whether a reply says yes or no."""

import re

from experiment_core_utils.tasks.scoring.em import folded
from experiment_core_utils.tasks.scoring.replies import CALLED_ANSWER

_FILLERS = re.compile(
    r"(?:(?:no doubt|without a doubt|well|hmm+|oh|um|so|ok|okay|sorry|probably|i (?:think|believe|guess|would say))\b"
    r"[,.:!]*\s*)*"
)
_YES = re.compile(
    r"(?:yes|yeah|yep|yup|sure|correct|certainly|absolutely|definitely|indeed|of course|affirmative|true|right|"
    r"i think so|i believe so|that(?:'s| is) (?:right|correct|true)|(?:it|there|they|he|she|that|this|these|those)"
    r" (?:is|are|does|do|has|have|can|was|were)(?=[.!]|$)|sí|si|oui|ja|sim|да)(?![\w']| answer| option)|是的|はい|네"
)
_NO = re.compile(
    r"(?:no(?! (?:doubt|problem|one\b))|nope|nah|incorrect|negative|false|not (?:really|at all)|not(?=[.!]?$)|never|"
    r"(?:certainly|absolutely|definitely|of course) not|i don't (?:think|believe) so|"
    r"that(?:'s| is) (?:not |in)(?:right|correct|true)|"
    r"(?:it|there|they|he|she|that|this|these|those|the \w+) "
    r"(?:is|are|does|do|has|have|can|was|were|did|will)(?:n't|not| not)|"
    r"non|nein|não|нет)(?![\w'])|不是|いいえ|아니"
)
_YES_WORD, _NO_WORD = re.compile(r"\byes\b"), re.compile(r"(?<!\ba )\bno\b(?! (?:parking|entry|smoking|sign)\b)")


def polarity(text: str) -> str | None:
    """`yes` or `no`, whichever the text says; None where it says neither, or both."""
    called = [found.end() for found in CALLED_ANSWER.finditer(text)]
    for part in (text, *(text[end:] for end in called[-1:])):
        flat = re.sub(r"[*_`\"]", "", folded(part)).lower().strip()
        flat = flat[_FILLERS.match(flat).end() :]  # type: ignore[union-attr]
        if re.match(r"(?:yes|no)\s*(?:/|\W(?:or|and)\W)\s*(?:yes|no)\b", flat):
            return None
        if _NO.match(flat):
            return "no"
        if _YES.match(flat):
            return "yes"
    flat = folded(text).lower()
    has_yes, has_no = _YES_WORD.search(flat), _NO_WORD.search(flat)
    return None if bool(has_yes) == bool(has_no) else "yes" if has_yes else "no"
