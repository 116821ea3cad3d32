"""Relaxed match of an open answer inside a sentence: 0 or 1, for models that answer in sentences.

What toolkits do: OCRBench (Y. Liu et al., arXiv 2305.07895), also in VLMEvalKit and lmms-eval, takes a reply as right
that contains a reference anywhere, without regard to case; MMMU (X. Yue et al., CVPR 2024; lmms-eval follows it) takes
what comes after "is", "answer", "so" and the like, and numbers; VLMEvalKit (H. Duan et al., arXiv 2407.11691) matches
an option's text only in a reply of at most twice the length of all options and only if no other option stands there,
and reads yes or no where a reply has only one of the two words. This rule takes containment, the lead before an answer,
the limit of length, the one candidate and the words of yes and no from them. It differs in that words are whole, and in
that what is denied, offered among several or repeated from the question is no answer.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from experiment_core_utils.tasks.interface import in_either_order, require_references
from experiment_core_utils.tasks.scoring.em import ARTICLES, em_lenient
from experiment_core_utils.tasks.scoring.polarity import polarity
from experiment_core_utils.tasks.scoring.replies import (
    CALLED_ANSWER,
    IS_WORDS,
    Mention,
    Reply,
    boxed_answer,
    compared_words,
    corrected,
    is_number,
    spoken,
)

# Of a longer reply only its first sentence, its conclusion and what it calls its answer count.
WORD_LIMIT = 40
# What stands before a candidate in a list: "A. ", "(b) ", "1. ", "- ".
_LIST_MARK = re.compile(r"(?:\(?[A-Za-z]\)|[A-Z][.:]|\d{1,2}[.)]|[-•>])\s+(?=\S)")
_CONCLUSIONS = frozenset("so therefore thus hence finally overall".split())
_LEADS = IS_WORDS | frozenset("= equals equal makes make gives total totals becomes become".split())
_BEFORE_A_MODIFIER = frozenset("after before of for to between than from in with by at on about near".split())
_SHOWN_WITH = frozenset("in with on".split())
# Words that a candidate on its own does not have: operands of "and" with one of these are clauses.
_NO_CANDIDATE = (
    IS_WORDS
    | _BEFORE_A_MODIFIER
    | frozenset(
        "it its they them their he she his her i you we this that these those there which who what when where why how "
        "yes no sure well ok okay hi hello please thanks right correct indeed maybe perhaps as like so very too "
        "also not "
        "if but because since while although though such etc".split()
    )
)
_NO_OPERAND = _NO_CANDIDATE - {"right"}
_HEDGES = frozenset("maybe perhaps possibly alternatively".split())
_DOUBTS = frozenset(
    "thought looks look looked seems seemed appears might may could first think guessed say used once formerly".split()
)
_SAYS_WHAT_IT_IS = frozenset("is it's that's was are".split())
_SYNONYM_OR = frozenset({("or", "so"), ("or", "more"), ("or", "less"), ("or", "not")})
_ALTERNATIVE = re.compile(
    r"^(?:maybe|perhaps|possibly)\b|\b(?:or|alternatively)\b|\b(?:could|might|may) (?:also|as well|instead) be\b",
    re.IGNORECASE,
)
_ALSO_POSSIBLE = re.compile(r"\bbut\b.*\b(?:could|might|may)(?: also| well)? be\b", re.IGNORECASE | re.DOTALL)
_OPERATORS = frozenset("x × * + / - ÷ times plus minus".split())
_AROUND_A_NUMBER = ARTICLES | {"about", "$", "€", "£"}
_MOST_WORDS_OF_A_CANDIDATE = 3
_POLARITIES = frozenset({"yes", "no"})


@in_either_order
def relaxed(prediction: str, references: Sequence[str]) -> float:
    """1 if the output says a reference as its answer, else 0.

    Both sides are `folded` and compared by whole words: in lower case, without a leading article, with numbers in
    digits (thirty-five is 35, 1,000 is 1000, 3.0 is 3) and units by their sign (5 centimetres is 5 cm, $5 is 5
    dollars), without accents of Latin letters. The plural is another word. Thoughts in ``<think>``, what comes before
    "no, wait" and a next question that the model asks itself are left out; `em_lenient` of what is left makes 1.

    - Where it is read: in the last ``\\boxed{}`` or ``<answer>``, else behind the last "answer is" or "Answer:", to
      the end of the sentence; else in the first sentence, in a conclusion ("So ..."), and in an output of up to
      WORD_LIMIT words in every other sentence, but not as its subject. A first sentence of one to three words that has
      no verb is the whole answer.
    - What does not count: a reference that is denied ("not X", "it isn't X", "X is wrong", "rather than X"), in a
      question or a reason ("because ..."), part of another word or number, or repeated from a question ("the opposite
      of X is Y", "X + 2 = Y", "X -> Y"), or a part of a total ("X boys and Y girls, Z in total").
    - Several candidates are no answer: "X or Y", "X, Y or Z", "X and Y", "X/Y", "maybe X, maybe Y", unless all are
      references. A pair such as "Paris, France" is one.
    - For "yes" and "no" the first word decides, or a beginning such as "It is not", else the only one of the two words
      that occurs.

    Raises:
        SampleError: there are no references.
    """
    require_references("relaxed", references)
    text = spoken(prediction)
    text = boxed_answer(text) or text
    bare = _LIST_MARK.sub("", text, count=1) if _LIST_MARK.match(text) and "\n" not in text else text
    if any(em_lenient(each, references) for each in (spoken(prediction), text, bare)):
        return 1.0
    if text[:1].isdigit():
        text = bare
    polarities = {each for each in map(_plain, references) if each in _POLARITIES}
    others = [each for each in references if _plain(each) not in _POLARITIES]
    if polarities and polarity(corrected(text)) in polarities:
        return 1.0
    return float(bool(others) and _says(corrected(text), others))


def _plain(text: str) -> str:
    return " ".join(compared_words(text))


def _says(text: str, references: Sequence[str]) -> bool:
    # References of the same words are one.
    references = list({compared_words(each): each for each in references}.values())
    called = list(CALLED_ANSWER.finditer(text))
    if called and (answer := _first_sentence(text[called[-1].end() :])):
        if em_lenient(answer, references):
            return True
        reply = Reply(answer)
        return any(_is_answer(reply, each, reply.mentions(references)) for each in reply.mentions(references))
    reply = Reply(text)
    mentions = reply.mentions(references)
    if not mentions:
        return _says_none(reply, references)
    read = _sentences_read(reply)
    return any(
        _is_answer(reply, each, mentions)
        and reply.words[each.first].sentence in read
        and (reply.words[each.first].sentence == read[0] or not _is_subject(reply, each))
        for each in mentions
    )


def _first_sentence(text: str) -> str:
    reply = Reply(text)
    if not reply.sentences:
        return text.strip()
    last = reply.sentences[0][-1]
    return reply.text[: reply.words[last].end + 1]


def _sentences_read(reply: Reply) -> list[int]:
    """Numbers of the sentences in which an answer is looked for."""
    numbers = list[int]()
    for at, places in enumerate(reply.sentences):
        texts = [reply.words[place].text for place in places]
        is_start = not numbers
        if is_start and all(text in _NO_CANDIDATE for text in texts) and at + 1 < len(reply.sentences):
            continue
        if is_start or len(reply.words) <= WORD_LIMIT or texts[0] in _CONCLUSIONS:
            numbers.append(reply.words[places[0]].sentence)
        is_bare = len(texts) <= _MOST_WORDS_OF_A_CANDIDATE and IS_WORDS.isdisjoint(texts)
        if is_start and is_bare and not _NO_ANSWER.match(" ".join(texts)) and not reply.ends_in_question(places[0]):
            break
    return numbers


_NO_ANSWER = re.compile(r"(?:let me|let's|good|great|nice|here|thank|i\b|sure|of course|in the|looking|based|hmm|step)")


def _is_answer(reply: Reply, mention: Mention, mentions: Sequence[Mention]) -> bool:
    """Whether a reference that is named is given as the answer, and as the only one."""
    first, behind = mention.first, mention.behind
    sentence = reply.sentence_of(first)
    # "Because it is raining." is an answer, "While X is old, it is Y." is none of X.
    is_whole = reply.clause_start(first) == sentence[0] and len(_parts(reply, sentence)) == 1
    if reply.denies(first, behind) or (reply.is_aside(first) and not is_whole):
        return False
    is_guess = len(sentence) <= _MOST_WORDS_OF_A_CANDIDATE and IS_WORDS.isdisjoint(
        reply.words[place].text for place in sentence
    )
    if (reply.ends_in_question(first) and not is_guess) or _is_taken_back(reply, behind, sentence):
        return False
    if _describes_another(reply, mention, sentence):
        return False
    return not (_is_repeated(reply, mention) or _has_rivals(reply, mention, mentions))


def _is_taken_back(reply: Reply, behind: int, sentence: range) -> bool:
    """Whether a sentence that begins in doubt goes on with "but it is"."""
    texts = [reply.words[place].text for place in sentence]
    at = texts.index("but") if "but" in texts else len(texts)
    doubts = not _DOUBTS.isdisjoint(texts[:at])
    return doubts and sentence[0] + at >= behind and not _SAYS_WHAT_IT_IS.isdisjoint(texts[at : at + 6])


def _describes_another(reply: Reply, mention: Mention, sentence: range) -> bool:
    """Whether the reference stands in what is said of another answer: "It is Y, a rival of X"."""
    words = reply.words
    start = reply.clause_start(mention.first)
    before = [words[place].text for place in range(start, mention.first) if words[place].text not in ARTICLES]
    has_verb = not IS_WORDS.isdisjoint(words[place].text for place in range(sentence[0], start))
    is_in_brackets = reply.between(start, start).rstrip(" \"'").endswith("(")
    if is_in_brackets and before[-1:] == ["of"]:
        return True
    return has_verb and words[start].text in ARTICLES and before[-1:] in (["of"], ["before"], ["after"], ["to"])


def _is_subject(reply: Reply, mention: Mention) -> bool:
    """Whether a sentence begins with the reference and goes on about it."""
    words, first = reply.words, mention.first
    while first and words[first - 1].sentence == words[first].sentence and words[first - 1].text in ARTICLES:
        first -= 1
    begins = not first or words[first - 1].sentence != words[first].sentence
    goes_on = mention.behind < len(words) and words[mention.behind].sentence == words[mention.first].sentence
    return begins and goes_on and not reply.between(mention.behind, mention.behind).strip()


def _is_repeated(reply: Reply, mention: Mention) -> bool:
    """Whether the reference stands before the "is" or "=" of its clause, as what was asked about."""
    words, behind = reply.words, mention.behind
    clause = words[mention.first].clause
    leads = [
        place
        for place in range(behind, len(words) - 1)
        if words[place].clause == clause and words[place].text in _LEADS and words[place + 1].clause == clause
    ]
    if _is_of_a_total(reply, mention) or _is_bound_or_time(reply, mention):
        return True
    if not leads:
        return False
    if words[leads[0]].text in ("=", "becomes", "become") and not is_number(words[mention.first].text):
        return True
    if all(is_number(word.text) for word in words[mention.first : behind]):
        after = [w.text for w in words[leads[-1] + 1 :] if w.clause == clause and w.text not in _AROUND_A_NUMBER]
        is_title = words[mention.first - 1].text == "of" and words[mention.first - 2].text not in (
            "total",
            "sum",
            "number",
        )
        return bool(after) and (is_number(after[0]) or is_title) and _OPERATORS.isdisjoint(after[1:2])
    before = [word.text for word in words[max(mention.first - 2, 0) : mention.first] if word.clause == clause]
    # "The table is made of X and the chair is ..." has two clauses.
    start = reply.clause_start(mention.first)
    has_verb = not IS_WORDS.isdisjoint(words[place].text for place in range(start, mention.first))
    if has_verb and "and" in [words[place].text for place in range(behind, leads[0])]:
        return False
    # "A man in a red shirt is riding ..." tells what is seen.
    if words[leads[0] + 1].text.endswith("ing") and not _SHOWN_WITH.isdisjoint(before):
        return False
    return not _BEFORE_A_MODIFIER.isdisjoint(before)


_BOUND = re.compile(r"\b(?:at least|at most|over|under|up to|past|(?:quarter|minutes) to)\s+$", re.IGNORECASE)
_PAST = re.compile(r"(?:\s+minutes)?\s+past\b", re.IGNORECASE)
_PLURAL_VERBS = frozenset("are were have".split())
_PAIRS = frozenset("opposites antonyms synonyms".split())
_TOTAL = re.compile(r"\b(?:in total|altogether|in all|total of|sum of|total is|makes? a total)\b", re.IGNORECASE)


def _is_bound_or_time(reply: Reply, mention: Mention) -> bool:
    """Whether the reference is a number in "at least 20", "over 100", "ten past three"."""
    if not is_number(reply.words[mention.first].text):
        return False
    before = reply.text[: reply.words[mention.first].start]
    return _BOUND.search(before) is not None or _PAST.match(reply.text, reply.words[mention.behind - 1].end) is not None


def _is_of_a_total(reply: Reply, mention: Mention) -> bool:
    """Whether the reference is a number, and its sentence has a total in another clause, or before a colon."""
    words, sentence = reply.words, reply.sentence_of(mention.first)
    if not is_number(words[mention.first].text):
        return False
    clauses = dict[int, list[int]]()
    for place in sentence:
        clauses.setdefault(words[place].clause, []).append(place)
    own = clauses.pop(words[mention.first].clause)
    with_numbers = [places for places in clauses.values() if any(is_number(words[place].text) for place in places)]
    texts = [reply.text[words[places[0]].start : words[places[-1]].end] for places in with_numbers]
    if not _TOTAL.search(reply.text[words[own[0]].start : words[own[-1]].end]) and any(map(_TOTAL.search, texts)):
        return True
    own_texts = [words[place].text for place in own]
    is_breakdown = ":" in reply.between(own[0], own[0]) and sum(map(is_number, own_texts)) > 1 and "=" not in own_texts
    return is_breakdown and any(places[0] < own[0] for places in with_numbers)


def _has_rivals(reply: Reply, mention: Mention, mentions: Sequence[Mention]) -> bool:
    """Whether other candidates than references stand beside the reference."""
    words = reply.words
    own = reply.sentence_of(mention.first)
    if own.stop < len(words) and _ALTERNATIVE.search(_sentence_text(reply, own.stop)):
        return True
    if _ALSO_POSSIBLE.search(reply.between(mention.behind, own.stop)):
        return True
    named = {place for each in mentions for place in range(each.first, each.behind)}
    hedges = [place for place in own if words[place].text in _HEDGES]
    if len(hedges) > 1 or any(place >= mention.behind and place + 1 < own.stop for place in hedges):
        return True
    parts = _parts(reply, own)
    at = next(number for number, part in enumerate(parts) if mention.first in part)
    for place in parts[at]:
        is_joint = words[place].text in ("or", "/", "and", "或") and place not in named
        if is_joint and _joins_rival(reply, place, parts[at], mention, named):
            return True
    return _is_in_list(reply, parts, at, mention, named)


def _sentence_text(reply: Reply, place: int) -> str:
    last = reply.sentence_of(place)[-1]
    text = reply.text[reply.words[place].start : reply.words[last].end]
    return text if len(text.split()) <= 2 * _MOST_WORDS_OF_A_CANDIDATE else ""


def _parts(reply: Reply, sentence: range) -> list[list[int]]:
    """The places of a sentence's words between its commas and other marks."""
    parts: list[list[int]] = [[]]
    for place in sentence:
        if parts[-1] and re.search(r"[,;:()—]", reply.between(place, place)):
            parts.append([])
        parts[-1].append(place)
    return parts


def _joins_rival(reply: Reply, place: int, part: Sequence[int], mention: Mention, named: set[int]) -> bool:
    """Whether "or", "and" or a slash at `place` joins something else to the reference."""
    words, at = reply.words, part.index(place)
    texts = [words[each].text for each in part]
    if (texts[at], texts[at + 1] if at + 1 < len(texts) else "") in _SYNONYM_OR or "whether" in texts:
        return False
    left = list(takewhile(lambda each: words[each].text not in _NO_OPERAND, reversed(part[:at])))
    right = list(takewhile(lambda each: words[each].text not in _NO_OPERAND, part[at + 1 :]))
    if texts[at] == "and":
        verb = texts[at + 1 + len(right)] if at + 1 + len(right) < len(part) else ""
        is_clause = verb in IS_WORDS and not (verb in _PLURAL_VERBS and len(left) == at and texts[-1] not in _PAIRS)
        bare = [each for each in right if words[each].text not in ARTICLES]
        is_joined = mention.behind == place or bare == list(range(mention.first, mention.behind))
        # "She is eating X and drinking Y."
        is_deed = len(right) > 1 and words[right[0]].text.endswith("ing")
        if is_clause or not is_joined or (is_deed and not words[mention.first].text.endswith("ing")):
            return False
    if mention.first not in (*left, *right):
        return False
    other = right if mention.first in left else left
    return bool(other) and named.isdisjoint(other)


def _is_in_list(reply: Reply, parts: Sequence[Sequence[int]], at: int, mention: Mention, named: set[int]) -> bool:
    """Whether the reference is one of several that commas separate."""
    words = reply.words
    if _begins_a_list_of_subjects(reply, parts, at, mention, named):
        return True
    bare = [
        part
        for number, part in enumerate(parts)
        if number != at
        and not _is_apposition(reply, part, number - at)
        and ":" not in reply.between(max(parts[at][0], part[0]), max(parts[at][0], part[0]))
        and len(part) <= 2 * _MOST_WORDS_OF_A_CANDIDATE
        and named.isdisjoint(part)
        and _NO_CANDIDATE.isdisjoint(words[place].text for place in part)
        and not any(words[place].text.endswith(("ing", "ly")) for place in part)
        and (number > at or _NO_CANDIDATE.isdisjoint(words[place].text for place in parts[at]))
    ]
    if any(words[place].text in ("or", "and") for part in bare for place in part):
        return True
    own = [words[place].text for place in parts[at]]
    if own[0] in ("or", "and") and bare:
        return True
    if len(bare) != 1:
        return len(bare) > 1
    other = reply.text[words[bare[0][0]].start : words[bare[0][-1]].end]
    text = reply.text[words[mention.first].start : words[mention.behind - 1].end]
    if is_number(words[mention.first].text) and is_number(words[bare[0][0]].text):
        return True
    return len(bare[0]) == 1 and other.islower() and text.islower()


_NO_COUNT = tuple([word] for word in "idea doubt way clue need reason longer information".split())


def _is_apposition(reply: Reply, part: Sequence[int], distance: int) -> bool:
    """Whether the part after a candidate describes it: "France's capital and largest city", "the capital and ..."."""
    texts = [reply.words[place].text for place in part]
    describes = texts[0] in ARTICLES | {"its", "their", "his", "her"} or any(text.endswith("'s") for text in texts[:3])
    joints = [at for at, text in enumerate(texts) if text == "and"]
    has_superlative = any(text == "most" or (text.endswith("est") and len(text) > 4) for text in texts)
    lists = any(texts[at + 1 : at + 2] and texts[at + 1] in ARTICLES for at in joints) and not has_superlative
    return distance == 1 and describes and bool(joints) and joints[0] > 0 and not lists


def _begins_a_list_of_subjects(
    reply: Reply, parts: Sequence[Sequence[int]], at: int, mention: Mention, named: set[int]
) -> bool:
    """Whether the reference is the first of several that a sentence is about: "X, Y and Z are cities"."""
    words = reply.words
    if parts[at][-1] != mention.behind - 1 or at + 1 >= len(parts):
        return False
    following = parts[at + 1]
    subjects = list(takewhile(lambda place: words[place].text not in IS_WORDS, following))
    texts = [words[place].text for place in subjects]
    verb = words[following[len(subjects)]].text if len(subjects) < len(following) else ""
    is_several = verb in _PLURAL_VERBS and "and" in texts[1:]
    return is_several and named.isdisjoint(subjects) and _NO_CANDIDATE.isdisjoint(texts)


def _says_none(reply: Reply, references: Sequence[str]) -> bool:
    """Whether a reply without a number says that there is none, where 0 is right."""
    if "0" not in map(_plain, references) or not reply.words:
        return False
    texts = [word.text for word in reply.words if word.sentence == 0]
    return not any(map(is_number, texts)) and any(
        text == "none"
        or (text == "any" and at and (texts[at - 1] == "not" or texts[at - 1].endswith("n't")))
        or (text == "no" and texts[at - 1] in IS_WORDS and texts[at + 1 : at + 2] not in _NO_COUNT)
        for at, text in enumerate(texts)
    )
