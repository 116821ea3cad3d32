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
from experiment_core_utils.tasks.scoring.em import ARTICLES, em_lenient, folded
from experiment_core_utils.tasks.scoring.replies import (
    IS_WORDS,
    Mention,
    Reply,
    boxed_answer,
    compared_words,
    is_number,
    spoken,
)

# Of a longer reply only its first sentence, its conclusion and what it calls its answer count.
WORD_LIMIT = 40
_CALLED_ANSWER = re.compile(
    r"\b(?:answer|antwort|respuesta|réponse|risposta|resposta|ответ)\b[^.!?\n:]{0,80}?"
    r"(?:\s(?:is|was|would be|ist|es|est|è|é)\b:?|\s?[:=])|答案(?:是|为|為|:)|答えは|정답은",
    re.IGNORECASE,
)
_CONCLUSIONS = frozenset("so therefore thus hence finally overall".split())
_LEADS = IS_WORDS | frozenset("= equals equal makes make gives total totals".split())
_BEFORE_A_MODIFIER = frozenset("after before of for to between than from in with by at on about near".split())
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
_FILLERS = re.compile(
    r"(?:(?:no doubt|without a doubt|well|hmm+|oh|um|so|ok|okay|sorry|i (?:think|believe|guess|would say))\b"
    r"[,.:!]*\s*)*"
)
_YES = re.compile(
    r"(?:yes|yeah|yep|yup|sure|correct|certainly|absolutely|definitely|indeed|of course|affirmative|true|right|"
    r"i think so|i believe so|that(?:'s| is) (?:right|correct|true)|(?:it|there|they|he|she|that|this|these|those)"
    r" (?:is|are|does|do|has|have|can|was|were)(?=[.!]|$)|sí|si|oui|ja|sim|да)(?![\w']| answer| option)|是的|はい|네"
)
_NO = re.compile(
    r"(?:no(?! (?:doubt|problem|one\b))|nope|nah|incorrect|negative|false|not (?:really|at all)|never|"
    r"(?:certainly|absolutely|definitely|of course) not|i don't (?:think|believe) so|"
    r"that(?:'s| is) (?:not |in)(?:right|correct|true)|"
    r"(?:it|there|they|he|she|that|this|these|those|the \w+) "
    r"(?:is|are|does|do|has|have|can|was|were|did|will)(?:n't|not| not)|"
    r"non|nein|não|нет)(?![\w'])|不是|いいえ|아니"
)
_YES_WORD, _NO_WORD = re.compile(r"\byes\b"), re.compile(r"\bno\b")
_POLARITIES = frozenset({"yes", "no"})


@in_either_order
def relaxed(prediction: str, references: Sequence[str]) -> float:
    """1 if the output says a reference as its answer, else 0; what `em_lenient` takes is always 1.

    Both sides are `folded` and compared by whole words: in lower case, without a leading article, with numbers in
    digits (thirty-five is 35, 1,000 is 1000, 3.0 is 3) and units by their sign (5 centimetres is 5 cm, $5 is 5
    dollars). The plural is another word. Thoughts in ``<think>`` and what comes before "no, wait" are left out.

    - Where it is read: in the last ``\\boxed{}`` or ``<answer>``, else behind the last "answer is" or "Answer:", to
      the end of the sentence; else in the first sentence, in a conclusion ("So ..."), and in an output of up to
      WORD_LIMIT words in every other sentence, but not as its subject. A first sentence of one to three words that has
      no verb is the whole answer.
    - What does not count: a reference that is denied ("not X", "it isn't X", "X is wrong", "rather than X"), in a
      question or a reason ("because ..."), part of another word or number, or repeated from a question ("the opposite
      of X is Y", "X + 2 = Y").
    - Several candidates are no answer: "X or Y", "X, Y or Z", "X and Y", "X/Y", "maybe X, maybe Y", unless all are
      references. A pair such as "Paris, France" is one.
    - For "yes" and "no" the first word decides, or a beginning such as "It is not", else the only one of the two words
      that occurs.

    Raises:
        SampleError: there are no references.
    """
    require_references("relaxed", references)
    if em_lenient(prediction, references):
        return 1.0
    text = spoken(prediction)
    text = boxed_answer(text) or text
    if em_lenient(text, references):
        return 1.0
    polarities = {each for each in map(_plain, references) if each in _POLARITIES}
    others = [each for each in references if _plain(each) not in _POLARITIES]
    if polarities and _polarity(_corrected(text)) in polarities:
        return 1.0
    return float(bool(others) and _says(_corrected(text), others))


def _plain(text: str) -> str:
    return " ".join(compared_words(text))


def _corrected(text: str) -> str:
    """The text behind the last "no, wait" and the like that something comes before and after."""
    reply = Reply(text)
    places = reply.corrections()
    return reply.text[reply.words[places[-1]].start :] if places else text


def _polarity(text: str) -> str | None:
    """`yes` or `no`, whichever the text says; None where it says neither, or both."""
    called = [found.end() for found in _CALLED_ANSWER.finditer(text)]
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


def _says(text: str, references: Sequence[str]) -> bool:
    # References of the same words are one.
    references = list({compared_words(each): each for each in references}.values())
    called = list(_CALLED_ANSWER.finditer(text))
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
    return not (_is_repeated(reply, mention) or _has_rivals(reply, mention, mentions))


def _is_taken_back(reply: Reply, behind: int, sentence: range) -> bool:
    """Whether a sentence that begins in doubt goes on with "but it is"."""
    texts = [reply.words[place].text for place in sentence]
    at = texts.index("but") if "but" in texts else len(texts)
    doubts = not _DOUBTS.isdisjoint(texts[:at])
    return doubts and sentence[0] + at >= behind and not _SAYS_WHAT_IT_IS.isdisjoint(texts[at : at + 6])


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
    if not leads:
        return False
    if all(is_number(word.text) for word in words[mention.first : behind]):
        after = [w.text for w in words[leads[-1] + 1 :] if w.clause == clause and w.text not in _AROUND_A_NUMBER]
        return bool(after) and is_number(after[0]) and _OPERATORS.isdisjoint(after[1:2])
    before = [word.text for word in words[max(mention.first - 2, 0) : mention.first] if word.clause == clause]
    return not _BEFORE_A_MODIFIER.isdisjoint(before)


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
    left = list(takewhile(lambda each: words[each].text not in _NO_CANDIDATE, reversed(part[:at])))
    right = list(takewhile(lambda each: words[each].text not in _NO_CANDIDATE, part[at + 1 :]))
    if texts[at] == "and":
        is_clause = at + 1 + len(right) < len(part) and texts[at + 1 + len(right)] in IS_WORDS
        bare = [each for each in right if words[each].text not in ARTICLES]
        is_joined = mention.behind == place or bare == list(range(mention.first, mention.behind))
        if is_clause or not is_joined:
            return False
    if mention.first not in (*left, *right):
        return False
    other = right if mention.first in left else left
    return bool(other) and named.isdisjoint(other)


def _is_in_list(reply: Reply, parts: Sequence[Sequence[int]], at: int, mention: Mention, named: set[int]) -> bool:
    """Whether the reference is one of several that commas separate."""
    words = reply.words
    bare = [
        part
        for number, part in enumerate(parts)
        if number != at
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


def _says_none(reply: Reply, references: Sequence[str]) -> bool:
    """Whether a reply without a number says that there is none, where 0 is right."""
    if "0" not in map(_plain, references) or not reply.words:
        return False
    texts = [word.text for word in reply.words if word.sentence == 0]
    return not any(map(is_number, texts)) and any(
        text == "none" or (text == "no" and texts[at - 1] in IS_WORDS) for at, text in enumerate(texts)
    )
