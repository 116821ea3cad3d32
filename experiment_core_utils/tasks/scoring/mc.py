"""Multiple-choice answers: the option that was chosen, scored 0 or 1.

The task is that of P. Lu et al., "Learn to Explain" (ScienceQA), NeurIPS 2022. An output that names no option, or
several without a decision, is unparsed and scores 0; nothing is guessed, so that a model that is broken on purpose
cannot score at chance. The reader is lenient and ours. Like VLMEvalKit (H. Duan et al., arXiv 2407.11691,
`vlmeval/utils/matching_util.py`) it looks for the only letter, then for the only option text, that stands in the
output; unlike it, it knows what is denied, discussed or decided, and needs no other model where several stand there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from types import MappingProxyType

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.em import ARTICLES, folded, molmo_answer
from experiment_core_utils.tasks.scoring.replies import IS_WORDS, Reply, boxed_answer, spoken, without_boxes

UNPARSED = "unparsed"
_ONLY_LETTER = re.compile(r"[(\[\"'*]*([A-Za-z])[)\]\"'*.:]*")
# What a letter is called, and what an answer is called where "is" or a colon comes after it.
_OPTION_WORDS = frozenset(
    "option options choice choices letter alternative alternativa letra lettre lettera opción opção вариант "
    "buchstabe".split()
)
_ANSWER_WORDS = _OPTION_WORDS | frozenset(
    "answer answers ans solution antwort lösung respuesta réponse risposta resposta odpowiedź antwoord svar svaret "
    "cevap jawaban án ответ відповідь الإجابة الجواب उत्तर".split()
)
_ANSWER_CHARACTERS = re.compile(r"(?:答案|答え|解答|回答|正解|应选|故选|选择|選擇|选|選|정답|답)[^。,;]{0,8}$")
_COPULAS = frozenset(
    "= equals makes is are be was were c'est it's that's he's she's would seems ist es est son è é jest är er bir "
    "это є هي هو है 是 为 為 は 은 는".split()
)
# Before a letter or text without weight of their own.
_FILLERS = (
    _OPTION_WORDS
    | ARTICLES
    | frozenset(
        "answer number only therefore thus then hence so most likely just indeed actually also both either to be "
        "probably "
        "la le el il die der das maybe perhaps possibly certainly clearly definitely still but yes no well ok okay "
        "sure hmm finally".split()
    )
)
_DECIDING = frozenset(
    "choose chose chosen choosing pick picked picking select selected selecting say guess think believe vote prefer "
    "mean meant take".split()
)
_DECIDING_PAIRS = frozenset(
    (verb, to)
    for verb in "go going went gone opt settle stick vote voting opting lean leaning".split()
    for to in ("with", "for", "on", "to", "towards", "toward")
)
# A letter may follow one of these; after any other word it belongs to that word ("vitamin C", "point B").
_BEFORE_A_LETTER = (
    _ANSWER_WORDS | _COPULAS | _FILLERS | _DECIDING | IS_WORDS
    | frozenset(
        "with for to towards not nor neither or and than of because since as if while that only out eliminate exclude "
        "reject between from over versus vs except however though consider considered considering mark unlike against "
        "like here it this und oder et ou y o e и или не kein nicht sino sondern mais aber doch cevap".split()
    )
)  # fmt: skip
# After one of these "A" is a letter ("A is right"); before other words it may be the article.
_AFTER_A_LETTER = IS_WORDS | frozenset(
    "because since as and or nor but not over for from with than to on by here if while though fits fit works wins "
    "makes must ist est es rather instead unlike except although as".split()
)
_LOOKING_LIKE = MappingProxyType(dict(zip("АВСЕНΑΒΕΗ", "ABCEHABEH", strict=True)))
_JOINS = re.compile(
    r"(?:[\s,;)\]\"']*(?:\b(?:and/or|or|and|nor|oder|und|ou|et|o|y|или|и)\b|&|/|或者|或|和|、)"
    r"|[\s.?!,;)\]\"']*(?<=[.?!\s])\bor\b)"
    r"(?:\s*\b(?:maybe|perhaps|possibly|even|also|both|either|probably|option|choice|letter|the|an?)\b)*[\s(\[\"']*",
    re.IGNORECASE,
)
_ONLY_MARKS = re.compile(r"[\s()\[\].:,\"'=–—-]*")
_COMMA = re.compile(r"[\s)\]\"']*,[\s(\[\"']*(?:(?:option|choice|the|an?)\s+)?|\s+", re.IGNORECASE)
_CONFIRMED = re.compile(r"(?:yes|yeah|correct|right|indeed|i think so|it is)\b", re.IGNORECASE)
# In a longer reply a mention in passing chooses nothing.
WORD_LIMIT = 50
_ANSWER_IS, _BARE, _DECIDED, _IN_PASSING, _SUBJECT, _ASIDE = 5, 4, 3, 2, 1, 0


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
    found = _ONLY_LETTER.fullmatch(_LOOKING_LIKE.get(text, text))
    if found and found[1].upper() in letters:
        return letters.index(found[1].upper()), "letter"
    same = [index for index, option in enumerate(options) if _flat(option) == _flat(text)]
    return (same[0], "option_text") if len(same) == 1 and _flat(text) else None


@dataclass(frozen=True)
class _Named:
    """An option that is named: by its letter, its text, or both beside each other."""

    option: int
    first: int  #: place of the first word, and behind the last
    behind: int
    is_letter: bool
    is_marked: bool = False  #: a letter in brackets, or before a bracket, a colon, or a period at a sentence's start


@dataclass(frozen=True)
class _Statement:
    """Options that are joined, and how much the reply says that they are the answer."""

    options: frozenset[int]
    strength: int
    first: int
    is_hedged: bool
    status: str


def _decided(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    reply = Reply(_without_repeated_options(text, options))
    groups = _groups(reply, _named(reply, options))
    floors = [0, *(group[-1].behind for group in groups)]
    read = [_statement(reply, group, floor) for group, floor in zip(groups, floors, strict=False)]
    statements = [each for each in read if each is not None]
    for place in reply.corrections():
        after = [each for each in statements if each.first >= place and each.strength >= _IN_PASSING]
        statements = after or statements
    strong = [each for each in statements if each.strength >= _DECIDED]
    if not strong:
        weakest = max((each.strength for each in statements), default=_ASIDE)
        passing = [each for each in statements if each.strength == weakest]
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


def _opening(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """The option that the first line of several is and nothing else, where the lines below discuss others.

    Not where they take it back or state another answer, nor where all are the options as they were listed.
    """
    lines = [re.sub(r"[*_`#]", "", line).strip() for line in spoken(text).splitlines()]
    first, *others = [line for line in lines if line] or [""]
    if not others:
        return None
    at = next((at for at in range(len(options)) if _is_line_of(first, at, options[at])), None)
    chosen = _whole(first, options) if at is None else (at, "leading_letter")
    if chosen is None or Reply("\n".join(lines)).corrections():
        return None
    below = chosen[0] + 1
    if below < len(options) and (
        _is_line_of(others[0], below, options[below]) or (_whole(others[0], options) or chosen)[0] == below
    ):
        return None
    later = _decided("\n".join(others), options)
    return None if later is not None and later[1] == "answer_is" else chosen


def _named(reply: Reply, options: Sequence[str]) -> list[_Named]:
    """The options that are named, in order, a letter and the text beside it as one."""
    letters = ascii_uppercase[: len(options)]
    texts = ["" if folded(option).strip() in letters else option for option in options]
    found = list[_Named]()
    for mention in reply.mentions(texts):
        first, words = mention.first, reply.words
        text = reply.text[words[first].start : words[mention.behind - 1].end]
        if len(text) == 1 and text.isalpha() and text.isascii() and text not in folded(options[mention.candidate]):
            continue
        if first and words[first - 1].text in ARTICLES and reply.between(first, first) == " ":
            first -= 1
        found.append(_Named(mention.candidate, first, mention.behind, is_letter=False))
    taken = {place for each in found for place in range(each.first, each.behind)}
    for place in range(len(reply.words)):
        if place not in taken and (letter := _letter(reply, place, letters)) is not None:
            found.append(letter)
    named = list[_Named]()
    for each in sorted(found, key=lambda each: each.first):
        last = named[-1] if named else None
        if last is not None and last.is_letter != each.is_letter:
            marks = reply.between(last.behind, each.first)
            if _ONLY_MARKS.fullmatch(marks) and ("," not in marks or last.option == each.option):
                if last.option == each.option:
                    is_marked = last.is_marked or each.is_marked
                    named[-1] = _Named(last.option, last.first, each.behind, is_letter=True, is_marked=is_marked)
                    continue
                # The letter is what was asked for.
                if last.is_marked:
                    continue
                if each.is_marked:
                    named.pop()
        named.append(each)
    return named


def _letter(reply: Reply, place: int, letters: str) -> _Named | None:
    """The option whose letter the word at `place` is, if it is one and no other word."""
    word = reply.words[place]
    spelt = reply.text[word.start : word.end]
    before, after = reply.text[: word.start], reply.text[word.end :]
    if before[-1:] == after[:1] == "'" and not before[-2:-1].isalnum():
        before, after = before[:-1], after[1:]
    if len(spelt) != 1 or before[-1:] in ("-", "'", "_", ".") or re.match(r"[-'_]\w|\.\w", after):
        return None
    starts_sentence = not place or reply.words[place - 1].sentence != word.sentence
    is_marked = after[:1] in (")", "]", ":") or (after[:1] == "." and starts_sentence)
    previous = None if starts_sentence else reply.words[place - 1].text
    follows_answer = previous in _COPULAS | _ANSWER_WORDS or before.rstrip()[-1:] in (":", "=")
    following = reply.words[place + 1] if place + 1 < len(reply.words) else None
    ends_clause = following is None or following.clause != word.clause
    if spelt in _LOOKING_LIKE and (is_marked or (follows_answer and ends_clause)):
        spelt = _LOOKING_LIKE[spelt]
    if spelt.upper() not in letters:
        return None
    named = _Named(letters.index(spelt.upper()), place, place + 1, is_letter=True, is_marked=is_marked)
    if is_marked:
        return named
    touches = before[-1:] in ("", " ", "\n", "(", "[", '"', "/", ",", ":", ";") or not before[-1:].isascii()
    stands_after = previous is None or not previous[:1].isascii() or previous.endswith("ly")
    stands_after = stands_after or previous in _BEFORE_A_LETTER or _is_apart(before)
    stands_after = stands_after or (previous is not None and previous.upper() in letters)
    if not touches or not stands_after:
        return None
    if spelt in "Iai":
        return named if previous in _OPTION_WORDS or (follows_answer and ends_clause) else None
    if spelt == "A" and following is not None and after[:1] == " " and not ends_clause:
        is_word = following.text not in _AFTER_A_LETTER
        return None if is_word and reply.text[following.start : following.end].islower() else named
    is_subject = following is not None and following.text in IS_WORDS
    return named if spelt.isupper() or previous is not None or ends_clause or is_subject else None


def _is_apart(before: str) -> bool:
    return before.rstrip(" ")[-1:] in tuple(",;:([\"'/–—=-")


def _groups(reply: Reply, named: Sequence[_Named]) -> list[list[_Named]]:
    """The options that are named, those together that "or", "and", commas and slashes join."""
    groups = list[list[_Named]]()
    commas_alone = True
    for each in named:
        last = groups[-1][-1] if groups else None
        joint = "" if last is None else reply.between(last.behind, each.first)
        if last is not None and _JOINS.fullmatch(joint):
            groups[-1].append(each)
            commas_alone = False
        elif last is not None and _COMMA.fullmatch(joint) and (joint.strip() or last.is_letter == each.is_letter):
            groups[-1].append(each)
        else:
            groups.append([each])
            commas_alone = True
            continue
        # "It is B, A is wrong": a predicate of the last one alone.
        following = reply.words[each.behind].text if each.behind < len(reply.words) else ""
        if commas_alone and following in IS_WORDS:
            groups.append([groups[-1].pop()])
    return groups


def _statement(reply: Reply, group: Sequence[_Named], floor: int) -> _Statement | None:
    """What a reply says of options that are joined; None where that is no reason to choose one of them.

    Args:
        floor: place behind the options that are named before.
    """
    first, behind = group[0].first, group[-1].behind
    options = frozenset(each.option for each in group)
    named = next((each for each in group if each.is_letter), group[0])
    is_aside = reply.is_aside(first)
    if reply.denies(first, behind) or (is_aside and named.is_letter):
        return None
    strength, is_stated = (_ASIDE, False) if is_aside else _strength(reply, first, behind, floor)
    if reply.ends_in_question(first):
        confirmed = _CONFIRMED.match(reply.between(reply.sentence_of(first).stop, len(reply.words)).lstrip("?\"' "))
        if strength < _BARE and not confirmed:
            return None
        strength = _DECIDED if confirmed else _IN_PASSING
    if not named.is_letter:
        sentence = reply.words[first].sentence
        if strength < _DECIDED and len(reply.words) > WORD_LIMIT and sentence not in (0, reply.words[-1].sentence):
            return None
        status = "option_text"
    else:
        status = "answer_is" if is_stated else "leading_letter" if named.is_marked and not first else "last_letter"
    return _Statement(options, strength, first, reply.is_hedged(first), status)


def _strength(reply: Reply, first: int, behind: int, floor: int) -> tuple[int, bool]:
    """How much the words around say that the option between is the answer, and whether by "answer is"."""
    words = reply.words
    sentence, clause = words[first].sentence, words[first].clause
    back = first - 1
    while back >= floor and words[back].sentence == sentence and _is_filler(words[back].text):
        if re.search("[:=]", reply.between(back + 1, back + 1)):
            break
        back -= 1
    inside = back >= floor and words[back].sentence == sentence
    prefix = reply.text[words[first - 8].start if first > 8 else 0 : words[first].start]
    if inside:
        is_copula = words[back].text in _COPULAS or re.search("[:=]|[–—-] ", reply.between(back + 1, back + 1))
        if is_copula or _ANSWER_CHARACTERS.search(prefix.rstrip(": ")):
            near = [word.text for word in words[max(back - 8, floor) : back + 1] if word.sentence == sentence]
            if not _ANSWER_WORDS.isdisjoint(near) or _ANSWER_CHARACTERS.search(prefix.rstrip(": ")):
                return _ANSWER_IS, True
    if reply.verdict(behind):
        return _ANSWER_IS, False
    follows = behind < len(words) and words[behind].clause == clause
    starts = not inside or words[back].clause != clause
    if starts and not follows:
        is_in_brackets = reply.between(first, first).rstrip().endswith("(") and inside
        return (_IN_PASSING if is_in_brackets else _BARE), False
    if first > floor and words[first - 1].text == "only":
        return _DECIDED, False
    if inside and words[back].text in _COPULAS | IS_WORDS:
        return _DECIDED, False
    if inside and (words[back].text in _DECIDING or (words[back - 1].text, words[back].text) in _DECIDING_PAIRS):
        return _DECIDED, False
    return (_SUBJECT if starts else _IN_PASSING), False


def _is_filler(text: str) -> bool:
    return text in _FILLERS or (text.endswith("ly") and len(text) > 4)


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
