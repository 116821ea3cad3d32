"""Relaxed match of an open answer inside a sentence: 0 or 1, for models that answer in sentences.

The final statement of a reply is parsed into a value of the kind that the references are of (a number with its unit,
yes or no, a list, or a text), and values are compared. What toolkits do: OCRBench (Y. Liu et al., arXiv 2305.07895)
takes a reply as right that contains a reference anywhere; MMMU (X. Yue et al., CVPR 2024) takes what comes after "is",
"answer", "so" and the like, and numbers; VLMEvalKit (H. Duan et al., arXiv 2407.11691) reads yes or no where a reply
has only one of the two words. Here words are whole, and what is denied, offered among several or repeated from the
question is no answer.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from experiment_core_utils.tasks.interface import in_either_order, require_references
from experiment_core_utils.tasks.scoring.em import em_lenient
from experiment_core_utils.tasks.scoring.polarity import polarity
from experiment_core_utils.tasks.scoring.replies import (
    REFUSAL,
    Mention,
    Reply,
    Strength,
    boxed_answer,
    called_answer,
    compared,
    corrected,
    mentions,
    spoken,
)
from experiment_core_utils.tasks.scoring.values import Quantity, is_range, plain, quantities

UNREADABLE = "unreadable"
# Of a longer reply only its first sentence and its conclusions count.
WORD_LIMIT = 40
_CONCLUSION = re.compile(
    r"(?i)^\W*(?:so|therefore|thus|hence|finally|overall|in conclusion|also|daher|donc|por lo tanto|así)\b|因此|所以"
    r"|\b(?:in total|altogether|in all|total|so|therefore|thus|hence)\b|[=≈]",
)
_TOTAL = re.compile(r"(?i)\b(?:in total|altogether|in all|total)\b")
_COPULA = re.compile(r"(?i)\b(?:is|are|was|were|equals?|makes?|gives?|costs?|ist|sind|est|sont|es|son)\b|[:=是]")
_OF = re.compile(r"(?i)\b(?:of|after|before)\s$")
_OPERATED = re.compile(r"\s*[×x*+/÷-]\s*\d")
_BEFORE_A_LIST = re.compile(r"(?i):|\b(?:are|were|is|sind|sont|son|ie|namely|include|so)\b,?|是|=\s*(?=\{)|;")
_BOUND = re.compile(
    r"(?i)\b(?:at least|at most|(?:more|less|fewer) than|over|under|up to|past|between|(?:quarter|minutes) to)\s+$"
    r"|\bbetween \S+ and $",
)
_NONE = re.compile(
    r"(?i)^(?:none|zero|nothing)\b|\b(?:(?:is|are|has|have|see|contains?)\s+no\s+(?!idea|doubt|way|clue|need|reason|information)"
    r"|not (?:\w+ )?any\b)|n't (?:\w+ )?any\b",
)
_BULLET = re.compile(r"(?m)^\s*(?:[-*•–]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+")
# What stands before a candidate in a list: "A. ", "(b) ", "1. ", "- ".
_LIST_MARK = re.compile(r"^(?:\(?[A-Za-z]\)|[A-Z][.:]|\d{1,2}[.)]|[-•>])\s+(?=\S)")
_SEPARATORS = re.compile(
    r"[,;、，；/\n|]|\s[-–—]\s|\b(?:and|or|und|oder|et|ou|y|e|as well as|plus)\b|&|和|与|以及|及|と|و(?=ال)|और"
)


def _patterns(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]:
    return tuple((re.compile(before, re.I), re.compile(after, re.I | re.S)) for before, after in pairs)


_TITLES = frozenset("The Sir Dr Mr Mrs Ms Prof Professor Lord Lady Saint King Queen President It Is By Yes".split())
_PREFACE = re.compile(
    r"(?i)(?:sure|certainly|of course|ok(?:ay)?|great|good|nice|thank|hmm|well|i(?:'m| am)|let me|let's|hello|hi|yes|"
    r"no|i see|step|looking|based|surprisingly|in the)\b[^,]{0,40}",
)
_ANY, _BUT = r"", r"\b(?:but|doch|aber|mais|pero)\b"
# What stands before and behind a mention that is no answer.
_NO_ANSWER = _patterns(
    (r"\b(?:than|(?:rival|sister|opposite|plural|wife) of)\s+(?:the |an? )?[\"']?$", _ANY),
    (r"\b(?:used to be|was once|formerly)\s*$", _ANY),
    # "X used to be it, but now it is Y", "It looks like X but is Y"
    (_ANY, rf".*\b(?:used|once|formerly)\b.*{_BUT}|[^,;]*\b(?:spielt)\b.*{_BUT}"),
    (
        r"\b(?:thought|looks?|seem\w*|appears?|might|could|think|say)\b",
        rf".*{_BUT}.*\b(?:is|are|was|it's|that's|ist|est|es)\b",
    ),
)
_NO_ANSWER_IF_WEAK = _patterns(
    # "The opposite of X is Y", "12 + X = Y", "X -> Y"
    (
        r"(?:\b(?:of|after|before|for|to|between|from|with)\s+[\"']?(?:the |an? )?|[+×/=]\s*)$",
        r"\s*[\"']?\s*(?:is|are|was|were|=)\s+\S",
    ),
    (_ANY, r"\s*[\"']?\s*(?:=|becomes?\b)\s*\S"),
    # "the nucleus of X"
    (
        r"^\W*(?:the |an? )?(?!(?:shade|kind|type|piece|cup|sort|bottle|city|total|form)s?\b)\w+ of (?:the |an? )?$",
        _ANY,
    ),
    # "It was the Britannic, a sister of X"
    (r"[,(]\s*(?:the|an?|its|his|her)\b[^,]*(?:\bof|\bto|\bbefore|\bafter|\bby|\bnear|'s) (?:the |an? )?$", _ANY),
    (r"^\W*(?:the |an? )?$", rf".*{_BUT}.*\bit(?:'s| is| was)\s"),
)
# A short sentence that denies nothing says that what was asked is so.
_STATES = re.compile(r"(?!.*\?)(?:\S+ ){0,5}(?:is|are|does|do|did|has|have|can|was|were)\b(?:\W+\w+){0,6}\W*$")
_HEDGES = re.compile(r"(?i)\b(?:maybe|perhaps|possibly)\b")
_NEXT_RIVAL = re.compile(r"(?i)\s*(?:or|maybe|perhaps|alternatively)\b(?:\s*\S+){1,5}\s*$")
_RIVAL_BEFORE = re.compile(r"(?i)\b(?:or|either|oder|ou)\b[^,;]*$|或$|(?:^|\s)(?:an? )?\w+\s+and\s+(?:the |an? )?$")
_RIVAL_AFTER = re.compile(
    r"(?i)(?!\W*\(?\s*or (?:so|more|less|not)\b)(?:.{0,60}\b(?:or|alternatively|could also|might also)\b"
    r"|.*\bbut\b.*\b(?:could|might|may)\b.*\bbe\b|\s*(?:或|か|/\s*\w)"
    r"|\s*(?:and|&)\s+(?!(?:\w+\s+){0,3}(?:is|are|was|were|has|\w+ing)\b)(?!before|after|not|it|they|s?he|the one)\w)",
)
_ITEM = (
    r"(?!(?:it|which|who|that|is|are|was|and|or|but|so|not|in|on|at|for|with|as|by|if|its|their)\b)(?:an? |the )?"
    r"[\w-]+(?: (?!(?:and|or|in|of|is|are|was|with|on|at)\b)[\w-]+){0,2}"
)
_LISTED = re.compile(rf"(?i){_ITEM}(?:, {_ITEM})+,? (?:and|or|und|oder|et|ou|y) {_ITEM}|{_ITEM}(?:, {_ITEM}){{2,}}")


@in_either_order
def relaxed(prediction: str, references: Sequence[str]) -> float:
    """1 if the output's final statement has the value of a reference, else 0; see `read_answer`.

    Raises:
        SampleError: there are no references.
    """
    require_references("relaxed", references)
    return read_answer(prediction, references)[0]


def read_answer(prediction: str, references: Sequence[str]) -> tuple[float, str]:
    """The score of an output, and how it was read: `exact`, `yes_no`, `number`, `list`, `text` or `unreadable`.

    Thoughts, what comes before "no, wait" and a next question that the model asks itself are left out. Read is the last
    ``\\boxed{}``, `<answer>` or JSON field "answer"; else the sentence behind the last "answer is"; else the statement:

    - numbers: the last result of a calculation or conclusion, else the first sentence's, else the last one's; no bounds
      ("at least 20"), ranges and denied ones. Compared is with units in any usual form (3,2 Mrd., 1½, 3 × 10⁹, 50 % and
      0.5); where a side has no unit, any is right;
    - lists, which a reference with commas is: the items in any order, none missing, none more;
    - yes and no: the first word, else what the sentence says;
    - texts: a reference as whole words that is asserted: not denied, in a question or reason, compared with, repeated
      from the question, or one of several. Of more than WORD_LIMIT words the first sentence and conclusions count.

    `unreadable` is a reply without a value of the references' kind, or with several.
    """
    said = spoken(prediction)
    text = boxed_answer(said) or said
    bare = _LIST_MARK.sub("", text) if "\n" not in text else text
    if any(em_lenient(each, references) for each in (said, text, bare)):
        return 1.0, "exact"
    return _by_kind(corrected(text), references, is_corrected=corrected(text) != text)


def _by_kind(final: str, references: Sequence[str], is_corrected: bool) -> tuple[float, str]:
    """What a final statement says, read as a value of the kind of the references."""
    statement = called_answer(final) or final
    if all(len(each.split()) == 1 and polarity(each) for each in references):
        answer = polarity(final) or ("yes" if _STATES.match(final.lower()) and not REFUSAL.search(final) else None)
        return float(answer in map(polarity, references)), UNREADABLE if answer is None else "yes_no"
    numbers = [number for number in map(_number_of, references) if number is not None]
    if len(numbers) == len(references):
        return _says_number(statement, numbers, is_corrected)
    lists = [items for items in map(_items, references) if len(items) > 1]
    return _says_list(statement, lists) if lists and not numbers else _says_text(final, statement, references)


def _number_of(reference: str) -> Quantity | None:
    text = plain(reference)
    found = quantities(text)
    is_whole = len(found) == 1 and not re.search(r"\w", text[: found[0].begin] + text[found[0].end :])
    return found[0] if is_whole else None


def _says_number(statement: str, references: Sequence[Quantity], is_corrected: bool) -> tuple[float, str]:
    reply = Reply(_LIST_MARK.sub("", statement) if "\n" not in statement else statement)
    found = _result(reply, is_corrected)
    if not found:
        is_none = any(number.numbers == {0} for number in references) and _NONE.search(reply.text)
        return (1.0, "number") if is_none else (0.0, UNREADABLE)
    is_several = is_range(reply.text, found) or (len(found) > 1 and not re.search(r"[^\W\d]", reply.text))
    if is_several or any(reply.is_contradicted(Mention(0, each.begin, each.end)) for each in found):
        return 0.0, UNREADABLE
    with_units = [each for each in references if each.dimension]
    # A number with a unit is compared with the references that have one, if there are any.
    pairs = ((each, with_units if each.dimension and with_units else references) for each in found)
    return float(any(each.is_same(wanted) for each, own in pairs for wanted in own)), "number"


def _result(reply: Reply, is_corrected: bool) -> list[Quantity]:
    """The numbers of the last conclusion or calculation, else of the first sentence, else of the last with any."""
    told = [(place, found) for place in reply.sentences if (found := _told(reply, *place))]
    if len(told) > 1 and not re.search(r"[^\W\d]", reply.text[slice(*told[-1][0])]):
        return told[-1][1]
    concluding = [found for place, found in told if _CONCLUSION.search(reply.text[slice(*place)])]
    if concluding or not told:
        return concluding[-1] if concluding else []
    is_first = told[0][0] == reply.sentences[0] and not is_corrected
    return told[0][1] if is_first else told[-1][1]


def _told(reply: Reply, begin: int, end: int) -> list[Quantity]:
    """The numbers that a sentence gives as its result."""
    text, found = reply.text, [each for each in quantities(reply.text) if begin <= each.begin < end]
    if is_range(text, found):
        return _outside_ranges(text, found) or found
    copula = _COPULA.search(text, begin, end)
    asserted = [each for each in found if _is_told(reply, each, text[begin : each.begin], copula)]
    equals = text.rfind("=", begin, end)
    if equals >= 0:
        behind = _behind(asserted, equals)
        return (asserted if not behind or _OPERATED.match(text, behind[0].end) else behind)[:1]
    totals = [each for each in asserted if _TOTAL.search(_clause(reply, each))]
    return totals[-1:] if totals and len(asserted) > 1 else _predicate(text, asserted, copula)


def _outside_ranges(text: str, numbers: Sequence[Quantity]) -> list[Quantity]:
    of_ranges = [each for pair in pairwise(numbers) if is_range(text, pair) for each in pair]
    return [each for each in numbers if each not in of_ranges]


def _predicate(text: str, numbers: list[Quantity], copula: re.Match[str] | None) -> list[Quantity]:
    """The numbers behind "is", up to a colon; without any, all."""
    behind = _behind(numbers, copula.end()) if copula else []
    is_split = bool(behind) and ":" in text[behind[0].end : behind[-1].begin]
    return behind[:1] if is_split else behind or numbers


def _behind(numbers: Sequence[Quantity], place: int) -> list[Quantity]:
    return [each for each in numbers if each.begin >= place]


def _is_told(reply: Reply, number: Quantity, before: str, copula: re.Match[str] | None) -> bool:
    """Whether a number is no bound, not denied, and not of the subject, as in "the author of 1984 is"."""
    is_of_subject = copula is not None and number.end <= copula.start() and _OF.search(before)
    strength = reply.strength(Mention(0, number.begin, number.end))
    return not (is_of_subject or _BOUND.search(before)) and strength > Strength.ASIDE


def _clause(reply: Reply, number: Quantity) -> str:
    begin, end = reply.clause_begin(number.begin), reply.sentence_of(number.begin)[1]
    return reply.text[begin : number.end] + re.split(r"[,;:]\s", reply.text[number.end : end])[0]


def _items(reference: str) -> list[str]:
    """The items of a reference that is a list."""
    items = re.split(r"[,;、]\s+(?:and )?|、|;", reference.strip("[]{}() "))
    items = [piece for item in items for piece in (item.split(" and ") if len(items) > 1 else [item])]
    return [item.strip(" \"'") for item in items if item.strip(" \"'")]


def _says_list(statement: str, lists: Sequence[Sequence[str]]) -> tuple[float, str]:
    text = re.sub(r"(?<=\d),(?=\d)(?!\d{3}(?!\d))", ", ", re.sub(r"±\s?(\S+)", r"\1, -\1", Reply(statement).text))
    found = [_list_said(text, items) for items in lists]
    if REFUSAL.search(text) or (len(text.split()) > WORD_LIMIT and None in found):
        return 0.0, UNREADABLE
    return float(True in found), "list"


def _list_said(text: str, items: Sequence[str]) -> bool | None:
    """Whether the list in a text has all the items and nothing else; None where it names none."""
    if listed := _lines_of_a_list(text):
        heads = (re.split(r"\s?[(:]|\s[-–—]\s", line.strip())[0] for line in listed)
        return _is_list(", ".join(heads), items)
    sentences = [text[slice(*place)] for place in Reply(text).sentences]
    sentence = max(reversed(sentences), key=lambda each: _named(each, items), default="")
    if not _named(sentence, items):
        return None
    # Behind the last of these that all items follow begins the list.
    starts = [found.end() for found in _BEFORE_A_LIST.finditer(sentence)]
    start = max((end for end in starts if _named(sentence[end:], items) == _named(sentence, items)), default=0)
    is_denied = any(Reply(sentence).strength(each) == Strength.DENIED for each in mentions(sentence, items))
    return not is_denied and _is_list(re.sub(r"\([^)]*\)", "", sentence[start:]), items)


def _lines_of_a_list(text: str) -> list[str]:
    """Two or more lines behind bullets, else the short lines of a text that has hardly any others."""
    lines = [line for line in text.splitlines() if line.strip()]
    listed = [_BULLET.sub("", line) for line in lines if _BULLET.match(line)]
    if len(listed) < 2:
        listed = [line for line in lines if len(line.split()) <= 4 and not line.rstrip().endswith((":", "."))]
    return listed if len(listed) >= max(2, len(lines) - 2) else []


def _is_list(text: str, items: Sequence[str]) -> bool:
    parts = [part for part in _SEPARATORS.split(text) if re.search(r"\w", part)]
    return all(any(_has(part, item) for part in parts) for item in items) and all(_named(part, items) for part in parts)


def _named(text: str, items: Sequence[str]) -> int:
    return sum(_has(text, item) for item in items)


def _has(part: str, item: str) -> bool:
    if (number := _number_of(item)) is not None:
        return any(each.numbers & number.numbers and not each.dimension for each in quantities(part))
    return bool(mentions(part, [item]))


def _says_text(final: str, statement: str, references: Sequence[str]) -> tuple[float, str]:
    right = _asserts(statement, references, is_called=True) if statement is not final else None
    right = _asserts(final, references, is_called=False) if right is None else right
    return float(right or False), UNREADABLE if right is None else "text"


def _asserts(text: str, references: Sequence[str], is_called: bool) -> bool | None:
    """Whether a text asserts a reference alone; None where it offers several or refuses."""
    reply = Reply(text)
    found = mentions(reply.text, list({compared(each): each for each in references}.values()))
    if not found and (not reply.sentences or REFUSAL.search(reply.text)):
        return None
    read = [(0, len(reply.text))] if is_called else _sentences_read(reply)
    asserted = [each for each in found if any(begin <= each.begin < end for begin, end in read)]
    asserted = [each for each in asserted if _is_answer(reply, each, is_called, references)]
    if asserted and all(_has_rivals(reply, each, found) or reply.is_contradicted(each) for each in asserted):
        return None
    return bool(asserted)


def _sentences_read(reply: Reply) -> list[tuple[int, int]]:
    """The sentences in which an answer is looked for."""
    texts = [(place, reply.text[slice(*place)]) for place in reply.sentences]
    while len(texts) > 1 and _PREFACE.fullmatch(texts[0][1].strip()):
        texts.pop(0)
    is_long = len(reply.text.split()) > WORD_LIMIT
    return [place for at, (place, text) in enumerate(texts) if not at or not is_long or _CONCLUSION.match(text)]


def _is_answer(reply: Reply, mention: Mention, is_called: bool, references: Sequence[str]) -> bool:
    """Whether a mention is meant as the answer, and not as a part of the question or of what is said of another."""
    strength, (begin, end) = reply.strength(mention), reply.sentence_of(mention.begin)
    before, after = reply.text[begin : mention.begin], reply.text[mention.end : end]
    is_weak = strength < Strength.DECIDED and not is_called
    if is_weak and strength == Strength.SUBJECT and (begin, end) != reply.sentences[0]:
        return False
    patterns = (*_NO_ANSWER, *(_NO_ANSWER_IF_WEAK if is_weak else ()))
    is_other = any(behind.search(before) and ahead.match(after) for behind, ahead in patterns)
    return strength > Strength.ASIDE and not is_other and not _is_namesake(reply, mention, references)


def _is_namesake(reply: Reply, mention: Mention, references: Sequence[str]) -> bool:
    """Whether a name has another first name than in a longer reference: Ian Fleming beside Alexander Fleming."""
    name = reply.text[mention.begin : mention.end].lower()
    first = re.search(r"([A-Z][\w-]+)\s$", reply.text[: mention.begin])
    full = " ".join(each for each in references if each.lower().endswith(" " + name))
    return bool(first and full) and first[1] not in full and first[1] not in _TITLES  # type: ignore[index]


def _has_rivals(reply: Reply, mention: Mention, named: Sequence[Mention]) -> bool:
    """Whether something else than a reference is offered beside a mention."""
    begin, end = reply.sentence_of(mention.begin)
    before, after = reply.text[reply.clause_begin(mention.begin) : mention.begin], reply.text[mention.end : end]
    if len(named) == 1 and any(
        at.start() < mention.end and mention.begin < at.end() for at in _LISTED.finditer(reply.text, begin, end)
    ):
        return True
    if len(_HEDGES.findall(reply.text[begin:end])) > 1 or _NEXT_RIVAL.match(reply.text[end:]):
        return True
    is_first, is_last = named[0] is mention, named[-1] is mention
    return bool((is_last and _RIVAL_AFTER.match(after)) or (is_first and _RIVAL_BEFORE.search(before)))
