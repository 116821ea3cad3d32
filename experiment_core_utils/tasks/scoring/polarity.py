"""Whether a reply says yes or no."""

import re

from experiment_core_utils.tasks.scoring.em import folded
from experiment_core_utils.tasks.scoring.replies import CALLED_ANSWER, REFUSAL

_FILLERS = re.compile(
    r"(?:(?:no doubt|without a doubt|well|hmm+|oh|um|so|ok|okay|sorry|probably|"
    r"i (?:think|believe|guess|would say)|(?:it's|it is|that's) (?=true|false|correct|right|wrong))\b"
    r"[,.:!]*\s*)*"
)
_YES = re.compile(
    r"(?:y$|yes|yeah|yep|yup|sure|correct|certainly|absolutely|definitely|indeed|of course|affirmative|true|right|"
    r"i think so|i believe so|that(?:'s| is) (?:right|correct|true)|(?:it|there|they|he|she|that|this|these|those)"
    r" (?:is|are|does|do|has|have|can|was|were)(?=[.!]|$)|ja|jawohl|doch|natürlich|oui|bien sûr|sí|si|sim|да|"
    r"claro|stimmt|richtig|"
    r"हाँ|हां|जी हाँ|نعم|أجل)(?![\w']| answer| option)|是的|是(?=$|[。,，!])|对(?=$|[。,，!])|はい|そうです|네"
)
_NO = re.compile(
    r"(?:no(?! (?:doubt|problem|one\b))|nope|nah|incorrect|negative|false|not (?:really|at all)|not(?=[.!]?$)|never|"
    r"(?:certainly|absolutely|definitely|of course) not|i don't (?:think|believe) so|"
    r"that(?:'s| is) (?:(?:not |in)(?:right|correct|true)|false|wrong|an? (?:common )?(?:myth|misconception))|n$|"
    r"(?:it|there|they|he|she|that|this|these|those|the \w+) "
    r"(?:is|are|does|do|has|have|can|was|were|did|will)(?:n't|not| not)|"
    r"not necessarily|i doubt it|quite the opposite|(?:natürlich|sicher|gar) nicht|bien sûr que non|claro que no|"
    r"non|nein|não|нет|नहीं|لا|كلا|falsch)(?![\w'])|不(?:是|对|对的|可以|能|会|行)?(?=$|[。,，!])|不是|いいえ|아니"
)
# A sentence that says no, or yes, without the word.
_DENIES = re.compile(
    r"\b(?:is|are|does|do|has|have|can|was|were|did|will|could)(?:n't|not| not)\b|\bcan't\b|\bbut not\b|"
    r"\b(?:is|are) (?:false|wrong|untrue|a myth)\b|"
    r"\b(?:hat|ist|sind|kann|gibt) (?:\w+ )?(?:nicht|kein\w*)\b|n'(?:est|a|ont) pas|\bno (?:es|son|hay)\b|不是|没有|ليس"
)
_ASSERTS = re.compile(
    r"\b(?:so|therefore|thus|hence|also),? (?:yes\b|(?:it|they|he|she|the \w+) (?:is|are|can|does|do|was)\b(?! not))"
)
_YES_WORD, _NO_WORD = (
    re.compile(r"\byes\b"),
    re.compile(r"(?<!\ba )\bno\b(?! (?:parking|entry|smoking|sign|doubt|question)\b)"),
)


def polarity(text: str) -> str | None:
    """`yes` or `no`, whichever the text says; None where it says neither, or both."""
    called = [found.end() for found in CALLED_ANSWER.finditer(text)]
    for part in (text, *(text[end:] for end in called[-1:])):
        flat = re.sub(r"[*_`\"#•:-]", "", folded(part)).lower().strip(" \n.«»“”")
        flat = flat[_FILLERS.match(flat).end() :]  # type: ignore[union-attr]
        if re.match(r"(?:yes|no)\s*(?:/|\W(?:or|and)\W)\s*(?:yes|no)\b", flat):
            return None
        if _NO.match(flat):
            return "no"
        if _YES.match(flat):
            return "yes"
    flat = re.sub(r"(?:\bnot|n't) (?:yes|no)\b", "", folded(text).lower())
    has_yes, has_no = _YES_WORD.search(flat), _NO_WORD.search(flat)
    if bool(has_yes) != bool(has_no):
        return "yes" if has_yes else "no"
    if has_yes or has_no or REFUSAL.search(flat):
        return None
    return "no" if _DENIES.search(flat) else "yes" if _ASSERTS.search(flat) else None
