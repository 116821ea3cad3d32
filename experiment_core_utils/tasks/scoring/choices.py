"""What a reply says of the options of a choice: which are named, by letter or text, and how strongly each is chosen.

Whether a letter is an option's and how strong a statement is are decided by two tables, `_LETTER_RULES` and
`_STRENGTHS`: of each the first rule that holds counts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from string import ascii_uppercase
from types import MappingProxyType

from experiment_core_utils.tasks.scoring.em import ARTICLES, folded
from experiment_core_utils.tasks.scoring.replies import IS_WORDS, RIGHT_WORDS, Reply, Word, is_number

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
    "= equals makes make gives is are be was were c'est it's that's he's she's would seems ist es est son è é jest är "
    "er bir это є هي هو है 是 为 為 は 은 는".split()
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
    "mean meant take leave leaves leaving get matches labeled labelled lettered marked".split()
)
_DECIDING_PAIRS = frozenset(
    (verb, to)
    for verb in "go going went gone opt settle stick vote voting opting lean leaning".split()
    for to in ("with", "for", "on", "to", "towards", "toward")
) | frozenset({("left", "with"), ("corresponds", "to"), ("corresponding", "to")})
# A letter may follow one of these; after any other word it belongs to that word ("vitamin C", "point B").
_BEFORE_A_LETTER = (
    _ANSWER_WORDS | _COPULAS | _FILLERS | _DECIDING | IS_WORDS
    | frozenset(
        "with for to towards not nor neither or and than of because since as if while that only out eliminate "
        "eliminates eliminating exclude excluding reject rejecting ruling between from over versus vs except however "
        "though consider considered considering mark unlike against "
        "like here it this und oder et ou y o e и или не kein nicht sino sondern mais aber doch cevap".split()
    )
)  # fmt: skip
# After one of these "A" is a letter ("A is right"); before other words it may be the article.
_AFTER_A_LETTER = IS_WORDS | frozenset(
    "because since as and or nor but not over for from with than to on by here if while though fits fit works wins "
    "makes must ist est es rather instead unlike except although as only".split()
)
LOOKING_LIKE = MappingProxyType(dict(zip("АВСЕНΑΒΕΗ", "ABCEHABEH", strict=True)))
_JOINS = re.compile(
    r"(?:[\s,;)\]\"']*(?:\b(?:and/or|or|and|then|nor|oder|und|ou|et|o|y|или|и)\b|&|/|或者|或|和|、)"
    r"|[\s.?!,;)\]\"']*(?<=[.?!\s])\bor\b)"
    r"(?:\s*\b(?:maybe|perhaps|possibly|even|also|both|either|probably|option|choice|letter|the|an?)\b)*[\s(\[\"']*",
    re.IGNORECASE,
)
_ONLY_MARKS = re.compile(r"[\s()\[\].:,\"'=–—-]*")
_IN_TOTAL = re.compile(r"(?:\s+\w+)?\s+(?:in total|altogether|in all|total\b|left\b|remain)", re.IGNORECASE)
_CONCLUSIONS = frozenset("so therefore thus hence".split())
_COMMA = re.compile(r"[\s)\]\"']*,[\s(\[\"']*(?:(?:option|choice|the|an?)\s+)?|\s+", re.IGNORECASE)
_RANGE = re.compile(r"\s+to\s+", re.IGNORECASE)
_AGREEMENT = re.compile(r"(?:right|correct|true),", re.IGNORECASE)
_CONFIRMED = re.compile(r"(?:yes|yeah|correct|right|indeed|i think so|it is)\b", re.IGNORECASE)

# In a longer reply a mention in passing chooses nothing.
WORD_LIMIT = 50


class Strength(IntEnum):
    """How much a statement says that its option is the answer."""

    ASIDE = 0  #: a reason or a comparison, "because copper conducts", "it comes after Tuesday"
    SUBJECT = 1  #: what a clause is about, "copper conducts"
    IN_PASSING = 2  #: anywhere else
    DECIDED = 3  #: "it is copper", "I choose B"
    BARE = 4  #: a clause of its own, "B.", "So B"
    ANSWER_IS = 5  #: "the answer is B", "B is correct"


@dataclass(frozen=True)
class Statement:
    """Options that are joined, and how much the reply says that they are the answer."""

    options: frozenset[int]
    strength: Strength
    first: int  #: place of the first word
    is_hedged: bool
    status: str  #: how it was read, as `select_mc_option` returns it


@dataclass(frozen=True)
class _Named:
    """An option that is named: by its letter, its text, or both beside each other."""

    option: int
    first: int  #: place of the first word, and behind the last
    behind: int
    is_letter: bool
    is_marked: bool = False  #: a letter in brackets, or before a bracket, a colon, or a period at a sentence's start


def statements(reply: Reply, options: Sequence[str]) -> list[Statement]:
    """What a reply says of options, in order, without what it denies."""
    groups = _groups(reply, _named(reply, options))
    floors = [0, *(group[-1].behind for group in groups)]
    read = [_statement(reply, group, floor) for group, floor in zip(groups, floors, strict=False)]
    return [statement for statement in read if statement is not None]


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
        if first and words[first - 1].text in ("that's", "you're") and _AGREEMENT.match(reply.text, words[first].start):
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


class _Letter:
    """A word of one letter and what stands around it."""

    def __init__(self, reply: Reply, place: int, letters: str) -> None:
        word = reply.words[place]
        self._reply, self._place, self._word, self._letters = reply, place, word, letters
        self.before, self.after = reply.text[: word.start], reply.text[word.end :]
        if self.before[-1:] == self.after[:1] == "'" and not self.before[-2:-1].isalnum():
            self.before, self.after = self.before[:-1], self.after[1:]
        spelt = reply.text[word.start : word.end]
        looks_meant = self.is_marked or (self.follows_answer and self.ends_clause)
        self.spelt = LOOKING_LIKE.get(spelt, spelt) if looks_meant else spelt

    @cached_property
    def starts_sentence(self) -> bool:
        return not self._place or self._reply.words[self._place - 1].sentence != self._word.sentence

    @cached_property
    def previous(self) -> str | None:
        """The word before it in its sentence."""
        return None if self.starts_sentence else self._reply.words[self._place - 1].text

    @cached_property
    def following(self) -> Word | None:
        words = self._reply.words
        return words[self._place + 1] if self._place + 1 < len(words) else None

    @cached_property
    def ends_clause(self) -> bool:
        return self.following is None or self.following.clause != self._word.clause

    @cached_property
    def is_marked(self) -> bool:
        return self.after[:1] in (")", "]", ":") or (self.after[:1] == "." and self.starts_sentence)

    @cached_property
    def follows_answer(self) -> bool:
        return self.previous in _COPULAS | _ANSWER_WORDS or self.before.rstrip()[-1:] in (":", "=")

    def is_part_of_a_word(self) -> bool:
        return self.before[-1:] in ("-", "'", "_", ".") or re.match(r"[-'_]\w|\.\w", self.after) is not None

    def touches_other_marks(self) -> bool:
        last = self.before[-1:]
        return last.isascii() and last not in ("", " ", "\n", "(", "[", '"', "/", ",", ":", ";")

    def belongs_to_the_word_before(self) -> bool:
        """As in "vitamin C" and "point B"."""
        previous = self.previous
        if previous is None or not previous[:1].isascii() or previous.endswith("ly"):
            return False
        return not (previous in _BEFORE_A_LETTER or previous.upper() in self._letters or self.is_apart())

    def is_apart(self) -> bool:
        return self.before.rstrip(" ")[-1:] in tuple(",;:([\"'/–—=-")

    def is_named_as_a_letter(self) -> bool:
        return self.previous in _OPTION_WORDS or (self.follows_answer and self.ends_clause)

    def is_pronoun_or_article(self) -> bool:
        return self.spelt in ("I", "i", "a")

    def is_article_before_a_noun(self) -> bool:
        if self.spelt != "A" or self.following is None or self.after[:1] != " " or self.ends_clause:
            return False
        spelt = self._reply.text[self.following.start : self.following.end]
        return self.following.text not in _AFTER_A_LETTER and spelt.islower()

    def is_capital_or_has_neighbours(self) -> bool:
        is_subject = self.following is not None and self.following.text in IS_WORDS
        return self.spelt.isupper() or self.previous is not None or self.ends_clause or is_subject


# Whether a word of one letter is an option: the first of these that holds decides.
_LETTER_RULES: tuple[tuple[Callable[[_Letter], bool], bool], ...] = (
    (_Letter.is_part_of_a_word, False),
    (lambda letter: letter.is_marked, True),
    (_Letter.touches_other_marks, False),
    (_Letter.belongs_to_the_word_before, False),
    (lambda letter: letter.is_pronoun_or_article() and letter.is_named_as_a_letter(), True),
    (_Letter.is_pronoun_or_article, False),
    (_Letter.is_article_before_a_noun, False),
    (_Letter.is_capital_or_has_neighbours, True),
)


def _letter(reply: Reply, place: int, letters: str) -> _Named | None:
    """The option whose letter the word at `place` is, if it is one and no other word."""
    word = reply.words[place]
    if word.end - word.start != 1:
        return None
    letter = _Letter(reply, place, letters)
    is_option = next((is_option for holds, is_option in _LETTER_RULES if holds(letter)), False)
    if letter.spelt.upper() not in letters or not is_option:
        return None
    return _Named(letters.index(letter.spelt.upper()), place, place + 1, is_letter=True, is_marked=letter.is_marked)


def _groups(reply: Reply, named: Sequence[_Named]) -> list[list[_Named]]:
    """The options that are named, those together that "or", "and", "from ... to", commas and slashes join."""
    groups = list[list[_Named]]()
    for each in named:
        joined_by = _joined_by(reply, groups[-1][-1], each) if groups else None
        # "It is B, A is wrong": a predicate of the last one alone.
        following = reply.words[each.behind].text if each.behind < len(reply.words) else ""
        if joined_by is None or (joined_by == "comma" and following in IS_WORDS | RIGHT_WORDS):
            groups.append([each])
        else:
            groups[-1].append(each)
    return groups


def _joined_by(reply: Reply, last: _Named, following: _Named) -> str | None:
    """Whether a `word` or a `comma` joins two options, or nothing (None)."""
    joint = reply.between(last.behind, following.first)
    is_range = _RANGE.fullmatch(joint) and last.first and reply.words[last.first - 1].text == "from"
    if is_range or _JOINS.fullmatch(joint):
        return "word"
    is_comma = _COMMA.fullmatch(joint) and (joint.strip() or last.is_letter == following.is_letter)
    return "comma" if is_comma else None


class _Surroundings:
    """The words around options that are joined; `floor` is the place behind the options that are named before."""

    def __init__(self, reply: Reply, first: int, behind: int, floor: int) -> None:
        self._reply, self._first, self._behind, self._floor = reply, first, behind, floor
        self._words = words = reply.words
        back = first - 1
        while self._is_inside(back) and _is_filler(words[back].text):
            if re.search("[:=]", reply.between(back + 1, back + 1)):
                break
            back -= 1
        #: Place of the last word before that has a weight of its own, None where its sentence has none.
        self._back = back if self._is_inside(back) else None
        self._starts_clause = self._back is None or words[back].clause != words[first].clause
        ends = behind >= len(words) or words[behind].clause != words[behind - 1].clause
        # "A (Paris) is in France" goes on behind its brackets.
        goes_on = ends and self._is_inside(behind) and words[behind].text in IS_WORDS
        self._ends_clause = ends and not (goes_on and reply.between(behind, behind).strip() == ")")

    def _is_inside(self, place: int) -> bool:
        is_read = self._floor <= place < len(self._words)
        return is_read and self._words[place].sentence == self._words[self._first].sentence

    def is_called_the_answer(self) -> bool:
        """As in "the answer is B", "Answer: B"."""
        back, words = self._back, self._words
        if back is None:
            return False
        prefix = self._reply.text[words[self._first - 8].start if self._first > 8 else 0 : words[self._first].start]
        if _ANSWER_CHARACTERS.search(prefix.rstrip(": ")):
            return True
        if words[back].text not in _COPULAS and not re.search("[:=]|[–—-] ", self._reply.between(back + 1, back + 1)):
            return False
        near = {words[place].text for place in range(max(back - 8, self._floor), back + 1) if self._is_inside(place)}
        return not _ANSWER_WORDS.isdisjoint(near)

    def is_called_right(self) -> bool:
        return self._reply.verdict(self._behind) is True

    def is_in_brackets(self) -> bool:
        """As in "the metal (B)"."""
        opens = self._reply.between(self._first, self._first).rstrip().endswith("(")
        return self._back is not None and opens and self.is_clause()

    def is_clause(self) -> bool:
        return self._starts_clause and self._ends_clause

    def follows_only(self) -> bool:
        return self._first > self._floor and self._words[self._first - 1].text == "only"

    def follows_copula(self) -> bool:
        return self._back is not None and self._words[self._back].text in _COPULAS | IS_WORDS

    def follows_decision(self) -> bool:
        if self._back is None:
            return False
        verb, last = self._words[self._back - 1].text, self._words[self._back].text
        return last in _DECIDING or (verb, last) in _DECIDING_PAIRS

    def is_a_result(self) -> bool:
        """As in "12 in total", "a total of 12" and "so 12 for all"."""
        if not is_number(self._words[self._first].text):
            return False
        around = [word.text for word in self._words[max(self._first - 2, self._floor) : self._first]]
        if around == ["total", "of"] or not _CONCLUSIONS.isdisjoint(around):
            return True
        start = self._words[self._behind - 1].end
        return _IN_TOTAL.match(self._reply.text, start) is not None

    def begins_clause(self) -> bool:
        return self._starts_clause

    def is_compared_with(self) -> bool:
        """As in "it comes after Tuesday", "Of the 15, 6 are red"."""
        if self._back == 0 and self._words[0].text == "of":
            return True
        return self._back is not None and self._words[self._back].text in ("after", "before", "follows", "precedes")


# How strong a statement is: the first of these that holds decides, and without any it is made in passing.
_STRENGTHS: tuple[tuple[Callable[[_Surroundings], bool], Strength], ...] = (
    (_Surroundings.is_called_the_answer, Strength.ANSWER_IS),
    (_Surroundings.is_called_right, Strength.ANSWER_IS),
    (_Surroundings.is_in_brackets, Strength.IN_PASSING),
    (_Surroundings.is_clause, Strength.BARE),
    (_Surroundings.follows_only, Strength.DECIDED),
    (_Surroundings.follows_copula, Strength.DECIDED),
    (_Surroundings.follows_decision, Strength.DECIDED),
    (_Surroundings.is_a_result, Strength.DECIDED),
    (_Surroundings.is_compared_with, Strength.ASIDE),
    (_Surroundings.begins_clause, Strength.SUBJECT),
)


def _is_filler(text: str) -> bool:
    return text in _FILLERS or (text.endswith("ly") and len(text) > 4)


def _statement(reply: Reply, group: Sequence[_Named], floor: int) -> Statement | None:
    """What a reply says of options that are joined; None where that is no reason to choose one of them.

    Args:
        floor: place behind the options that are named before.
    """
    first, behind = group[0].first, group[-1].behind
    named = next((each for each in group if each.is_letter), group[0])
    is_aside = reply.is_aside(first)
    if reply.denies(first, behind) or (is_aside and named.is_letter):
        return None
    around = _Surroundings(reply, first, behind, floor)
    strength = next((strength for holds, strength in _STRENGTHS if holds(around)), Strength.IN_PASSING)
    if is_aside:
        strength = Strength.ASIDE
    is_called_the_answer = not is_aside and around.is_called_the_answer()
    if reply.ends_in_question(first):
        confirmed = _CONFIRMED.match(reply.between(reply.sentence_of(first).stop, len(reply.words)).lstrip("?\"' "))
        if strength < Strength.BARE and not confirmed:
            return None
        strength = Strength.DECIDED if confirmed else Strength.IN_PASSING
    if not named.is_letter:
        sentence = reply.words[first].sentence
        is_weak = strength < Strength.DECIDED
        if is_weak and len(reply.words) > WORD_LIMIT and sentence not in (0, reply.words[-1].sentence):
            return None
        status = "option_text"
    elif is_called_the_answer:
        status = "answer_is"
    else:
        status = "leading_letter" if named.is_marked and not first else "last_letter"
    return Statement(frozenset(each.option for each in group), strength, first, reply.is_hedged(first), status)
