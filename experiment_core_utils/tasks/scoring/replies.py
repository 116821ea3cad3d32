"""A reply of a model in words: what stands in it, where its sentences and clauses end, and what it denies.

Both readers of sentences use it, `relaxed` for open questions and `select_mc_option` for choices. The rules are of
English, with the words for "answer", "not" and "or" of some other languages.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from unicodedata import normalize

from experiment_core_utils.tasks.answers import ANSWER_TAGS
from experiment_core_utils.tasks.scoring.em import ARTICLES, NUMBER_WORDS, folded

_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_TENS_OF = MappingProxyType({word: 10 * at for at, word in enumerate(_TENS, start=2)})
_POWER_OF = MappingProxyType({"hundred": 100, "thousand": 1000, "million": 1_000_000, "billion": 1_000_000_000})
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_ENDINGS = ("st", "nd", "rd", *["th"] * 7)
_ORDINAL_OF = MappingProxyType({word: f"{at}{_ENDINGS[at - 1]}" for at, word in enumerate(_ORDINALS, start=1)})
_UNIT_OF = MappingProxyType(
    {
        spelling: unit
        for unit, spellings in {
            "cm": "centimetre centimetres centimeter centimeters",
            "mm": "millimetre millimetres millimeter millimeters",
            "m": "metre metres meter meters",
            "km": "kilometre kilometres kilometer kilometers",
            "g": "gram grams",
            "kg": "kilogram kilograms kilo kilos",
            "l": "litre litres liter liters",
            "h": "hour hours",
            "min": "minute minutes",
            "s": "second seconds",
            "%": "percent",
            "°": "degree degrees",
            "$": "dollar dollars usd",
            "€": "euro euros eur",
            "£": "pound pounds gbp",
        }.items()
        for spelling in spellings.split()
    }
)
UNITS = frozenset(_UNIT_OF.values())
# Scripts without spaces between words: every character is a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_MARKS = "\u0300-\u036f\u064b-\u065f\u0900-\u0dff"
_WORD = re.compile(
    rf"""
      [{_UNSPACED}]
    | \d+(?:st|nd|rd|th|s)\b
    | \d+(?::\d+)+                                                     # 10:10, 2:1
    | (?:(?<![\w)])-)?(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)? | \.\d+
    | [^\W\d_]\.(?:\s?[^\W\d_]\.)+                                    # U.S., p.m., J. K.
    | (?:[^\W\d_](?:(?![{_UNSPACED}])[^\W_]|[{_MARKS}])*)(?:'[^\W\d_]+)*[+\#]*
    | [%$€£°+=/&<>×÷]
    """,
    re.VERBOSE,
)
_WORD_OR_LETTER = re.compile(_WORD.pattern.replace(r"(?:\s?[", "(?:["), re.VERBOSE)
_NUMBER = re.compile(r"-?\d*\.?\d+")
_LATIN_ACCENT = re.compile(r"(?<=[a-z])[\u0300-\u036f]+")
_MARKUP = re.compile(
    r"(?<!\d)\*+|\*+(?!\d)|`+|__+|\$(?!\d)|\\(?:text|mathrm|mathbf|textbf)\b|[{}]|</?[A-Za-z]+>|^#+ ", re.MULTILINE
)
_BOXED = re.compile(rf"\\boxed\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}|{ANSWER_TAGS}", re.DOTALL | re.IGNORECASE)
_ARROW = re.compile(r"(?<![-=])[-=]{1,9}>|[→⇒➔]")
# Where a model that runs on asks itself the next question, behind its answer, and what is no answer yet.
_NEXT_QUESTION = re.compile(
    r"\n[ \t*#]*(?:question|q|user|human|instruction|input)(?: ?\d+)?[*\s]*:"
    r"|(?:(?<=\n)|(?<=[.!]\s))[^.!?\n]+\?\s*(?:answer|assistant|ai|a)\s*:",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"(?:sure|certainly|of course|ok(?:ay)?|here(?:'s| is| are)|let's|let me|great|good|thank|i(?:'ll| will)|"
    r"we (?:need|want)|you (?:ask|want)|the question|to (?:find|answer)|based on|looking at)\b[^\n]*",
    re.IGNORECASE,
)
# What joins a word to its neighbour: a hyphen, or the point or @ of an address.
_JOINED_BEFORE = re.compile(r"[^\W_][-–@]$|[a-z]\.$")
_JOINED_AFTER = re.compile(r"[-–'@][^\W_]|\.[a-z]")
# Abbreviations whose period ends no sentence, and what does end one.
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|ms|dr|prof|st|vs|e\.g|i\.e|approx|fig)\.$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)|[。！？]|\n+")
_CLAUSE_END = re.compile(r"[,;:()\[\]]|(?:^|\s)[-–—]+\s|—")
_CLAUSE_WORDS = frozenset(
    "but however though although because since while whereas so therefore thus hence then if unless when which who "
    "sondern aber sino pero mais mas ma а но".split()
)
# A clause that begins with one of these gives reasons, and no answer.
ASIDE_WORDS = frozenset(
    "because since while whereas although though if unless when which who as unlike having followed compared "
    "ahead".split()
)
_NO_ASIDE = re.compile(
    r"\bwhich (?:(?:is|are) (?:an? )?(?:breed|type|kind|sort|form|species|variety) of (?:an? )?|"
    r"(?:leaves|gives|makes|equals|means)\b.*)$",
    re.IGNORECASE,
)
_DENIALS = frozenset(
    "not never nor neither cannot cant without except excluding exclude excludes unlike than eliminate eliminating "
    "eliminates reject rejecting refuse refusing nicht kein keine keinen pas não non не ни nie".split()
)
# Two words that deny together, and words after "not" that take its force away.
_DENYING_PAIRS = frozenset(
    {("rather", "than"), ("instead", "of"), ("other", "than"), ("apart", "from"), ("rule", "out"), ("rules", "out")}
    | {("ruling", "out"), ("no", "es"), ("no", "era"), ("no", "son")}
)
_ALL = frozenset("all everything anything everyone anyone every any each".split())
_NOT_DENIED_BY = frozenset("only just sure certain but doubt half".split())
_DENYING_CHARACTERS = re.compile(r"不是|不选|不對|不对|并非|並非|而非|不会|除了|没有|不可能")
_DENYING_CHARACTERS_AFTER = re.compile(
    r"\s*(?:不对|不正确|是错|错|不是|では?(?:ない|ありません)|じゃない|[가이]? ?아니|ではなく)"
)
_APPROVING_CHARACTERS_AFTER = re.compile(r"\s*(?:选项)?(?:是|为|が)?(?:正确|对的|對的|正しい)")
IS_WORDS = frozenset(
    "is are was were be been being it's that's there's he's she's isn't aren't wasn't weren't would could should can "
    "will may might must cannot can't won't wouldn't couldn't shouldn't seems seem looks look appears has have does "
    "do did doesn't don't didn't 's".split()
)
RIGHT_WORDS = frozenset(
    "correct right true answer best better fits fit matches works richtig correcta correcto верно".split()
)
_RIGHT_BY_DEGREE = frozenset("likely plausible probable accurate suitable appropriate".split())
WRONG_WORDS = frozenset(
    "wrong incorrect false impossible unlikely excluded eliminated inaccurate invalid mistake trap distractor decoy "
    "irrelevant out close tempting falsch incorrecta неверно".split()
)
# "A: no", "B - correct"
_MARKED = re.compile(
    r"\)?\s*[:–—-]\s*(yes|true|correct|right|no|false|incorrect|wrong)\b(?=[\s,.;!]*(?:[A-Z(]|$))", re.I
)
_CHECKED = re.compile(r"\)?\s*[:–—-]?\s*([✓✔✅☑✗✘❌✖])")
_HEDGES = frozenset("maybe perhaps possibly could might may either vielleicht quizás".split())
# What a reply calls its answer follows one of these.
CALLED_ANSWER = re.compile(
    r"\b(?:answer|antwort|respuesta|réponse|risposta|resposta|ответ)\b[^.!?\n:]{0,80}?"
    r"(?:\s(?:is|was|would be|ist|es|est|è|é)\b:?|\s?[:=])|答案(?:是|为|為|:)|答えは|정답은"
    r"|^[#* ]*(?:final )?answer[* ]*$|(?<=\n)a:|^(?:final )?(?:result|solution|conclusion)\s?[:=]",
    re.IGNORECASE | re.MULTILINE,
)
# After the words before one of these something else is meant than what they say.
_CORRECTION = re.compile(
    r"\b(?:no,? wait|wait,? no|wait|no,? actually|actually,? no|scratch that|correction|on second thoughts?|oops|"
    r"let me correct(?: myself| that)?|just kidding|my mistake|(?:my )?apologies|i misspoke|"
    r"i meant?|or rather|or actually|sorry, (?:it'?s|it is|i mean)|no,)\b,?"
    r"|(?<=[.!?] )actually,|(?<=\.\.)\s*actually\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Word:
    """A word of a reply."""

    text: str  #: as it is compared: lower case, a number in digits, a unit by its sign
    start: int  #: where it begins and ends in `Reply.text`
    end: int
    sentence: int  #: number of its sentence
    clause: int  #: number of its clause, which commas, brackets and words such as "but" begin


@dataclass(frozen=True)
class Mention:
    """Neighbouring words that say a candidate."""

    candidate: int
    first: int  #: place of the first word, and behind the last
    behind: int


class Reply:
    """A reply's text without markup, folded, in words.

    Args:
        joins_initials: whether "J. K." is one word, as in a name, and not two letters of options.
    """

    def __init__(self, prediction: str, joins_initials: bool = True) -> None:
        lines = _ARROW.sub(" = ", _MARKUP.sub("", spoken(prediction))).splitlines()
        self.text = "\n".join(line.strip() for line in lines).strip()
        self.words = tuple(_words(self.text, joins_initials))

    @cached_property
    def sentences(self) -> tuple[range, ...]:
        """The places of each sentence's words."""
        starts = [at for at, word in enumerate(self.words) if not at or word.sentence != self.words[at - 1].sentence]
        return tuple(range(*ends) for ends in pairwise([*starts, len(self.words)]))

    def sentence_of(self, place: int) -> range:
        """The places of the words of the sentence that the word at `place` is in."""
        return self.sentences[self.words[place].sentence]

    def between(self, behind: int, first: int) -> str:
        """The text between two words: behind the word before `behind`, up to the word at `first`."""
        start = self.words[behind - 1].end if behind else 0
        return self.text[start : self.words[first].start if first < len(self.words) else len(self.text)]

    def ends_in_question(self, place: int) -> bool:
        """Whether the sentence of the word at `place` ends with a question mark."""
        behind = self.sentence_of(place).stop
        return self.between(behind, behind).lstrip("\"')] ").startswith("?")

    def mentions(self, candidates: Sequence[str]) -> list[Mention]:
        """Where the candidates are named by whole words, in order; of overlapping ones the longest alone.

        An article in front and accents of Latin letters are left aside, on both sides. Candidates of the same words, or
        of none, are never named.
        """
        by_words: dict[tuple[str, ...], list[int]] = {}
        for index, candidate in enumerate(candidates):
            by_words.setdefault(_without_accents(compared_words(candidate)), []).append(index)
        named, taken = list[Mention](), set[int]()
        texts = _without_accents([word.text for word in self.words])
        for wanted in sorted(by_words, key=len, reverse=True):
            for first in range(len(texts) - len(wanted) + 1) if wanted and len(by_words[wanted]) == 1 else ():
                behind = first + len(wanted)
                if texts[first:behind] != wanted or not taken.isdisjoint(range(first, behind)):
                    continue
                if not self._is_part_of_a_word(first, behind):
                    taken.update(range(first, behind))
                    named.append(Mention(by_words[wanted][0], first, behind))
        return sorted(named, key=lambda each: each.first)

    def _is_part_of_a_word(self, first: int, behind: int) -> bool:
        """Whether a hyphen, or the point of a number, joins words to one of their neighbours."""
        start, end = self.words[first].start, self.words[behind - 1].end
        joins_before = _JOINED_BEFORE.search(self.text[max(start - 2, 0) : start])
        return joins_before is not None or _JOINED_AFTER.match(self.text, end) is not None

    def denies(self, first: int, behind: int) -> bool:
        """Whether the words from `first` to `behind` are denied: "not X", "rather than X", "X is wrong", "X isn't"."""
        return self._denied_before(first) or self.verdict(behind) is False

    def _denied_before(self, first: int) -> bool:
        start = self.clause_start(first)
        if start and self.words[start].text == "but" and self.words[start - 1].text in _ALL:
            return True
        texts = [word.text for word in self.words[start:first]]
        for text, following in pairwise([*texts, self.words[first].text]):
            if (text in _DENIALS or text.endswith("n't")) and following not in _NOT_DENIED_BY:
                return True
            if (text, following) in _DENYING_PAIRS:
                return True
        if texts and texts[-1] == "no":
            return True
        return _DENYING_CHARACTERS.search(self.text[self.words[start].start : self.words[first].start]) is not None

    def verdict(self, behind: int) -> bool | None:
        """What the words after `behind` say of what is before them: right, wrong, or neither (None).

        "X is not ..." says that it is wrong; "X does not ..." only where it goes on with a word such as "fit".
        """
        if _DENYING_CHARACTERS_AFTER.match(self.text, self.words[behind - 1].end):
            return False
        if _APPROVING_CHARACTERS_AFTER.match(self.text, self.words[behind - 1].end):
            return True
        if checked := _CHECKED.match(self.text, self.words[behind - 1].end):
            return checked[1] in "✓✔✅☑"
        if marked := _MARKED.match(self.text, self.words[behind - 1].end):
            return marked[1].lower() in ("yes", "true", "correct", "right")
        following = self.words[behind : behind + 5]
        if not following or re.search(r"[,.;!?]", self.between(behind, behind)):
            return None
        if following[0].text not in IS_WORDS | RIGHT_WORDS | WRONG_WORDS:
            return None
        previous, is_denied, is_of_deed = "", False, following[0].text.startswith(("do", "did", "has", "have"))
        for word in following:
            if word.clause != following[0].clause:
                break
            if word.text in RIGHT_WORDS or (previous in ("more", "most") and word.text in _RIGHT_BY_DEGREE):
                return not is_denied
            if word.text in WRONG_WORDS:
                return is_denied
            is_denied |= word.text in ("not", "never", "cannot") or word.text.endswith("n't")
            previous = word.text
        return False if is_denied and not is_of_deed else None

    def is_hedged(self, place: int) -> bool:
        """Whether the clause of the word at `place` has a word such as "maybe" before it."""
        return any(word.text in _HEDGES for word in self.words[:place] if word.clause == self.words[place].clause)

    def clause_start(self, place: int) -> int:
        """The place of the first word of the clause of the word at `place`."""
        while place and self.words[place - 1].clause == self.words[place].clause:
            place -= 1
        return place

    def is_aside(self, place: int) -> bool:
        """Whether the clause of the word at `place` begins with a word such as "because".

        Not where it says what kind the thing before is ("which is a breed of dog") or what results ("which leaves 3"),
        nor in "Which leaves C.".
        """
        start = self.clause_start(place)
        if self.words[start].text == "which" and start == self.sentence_of(place)[0]:
            return False
        said = self.text[self.words[start].start : self.words[place].start]
        return self.words[start].text in ASIDE_WORDS and not _NO_ASIDE.search(said)

    def corrections(self) -> list[int]:
        """The places of the first words after "no, wait" and the like."""
        ends = [found.end() for found in _CORRECTION.finditer(self.text)]
        places = (next((at for at, word in enumerate(self.words) if word.start >= end), None) for end in ends)
        return [place for place in places if place]


def spoken(prediction: str) -> str:
    """The folded text behind the thoughts of a model that thinks in tags, up to a next question of its own."""
    text = folded(prediction).rpartition("</think>")[2].strip()
    run_on = _NEXT_QUESTION.search(text)
    before = text if run_on is None else text[: run_on.start()].rstrip()
    return text if _PREAMBLE.fullmatch(before) else before


def corrected(text: str) -> str:
    """The text behind the last "no, wait" and the like that something comes before and after."""
    reply = Reply(text)
    places = reply.corrections()
    return reply.text[reply.words[places[-1]].start :] if places else text


def boxed_answer(text: str) -> str | None:
    """What is in the last ``\\boxed{}`` or ``<answer>`` with something in it; None where there is none."""
    boxed = ((found[1] or found[2] or "").strip() for found in _BOXED.finditer(text))
    return next(reversed([content for content in boxed if content]), None)


def without_boxes(text: str) -> str:
    """The text with the content of its boxes in their place."""
    return _BOXED.sub(lambda found: found[1] or found[2] or "", text)


@lru_cache(maxsize=1 << 12)
def compared_words(text: str) -> tuple[str, ...]:
    """The words of a text as they are compared, without an article in front."""
    words = [word.text for word in _words(_MARKUP.sub("", folded(text)))]
    return tuple(words[1:] if len(words) > 1 and words[0] in ARTICLES else words)


def _without_accents(words: Sequence[str]) -> tuple[str, ...]:
    """The words without the accents of Latin letters; those of other scripts make other letters."""
    return tuple(word if word.isascii() else _LATIN_ACCENT.sub("", normalize("NFD", word)) for word in words)


def is_number(text: str) -> bool:
    """Whether a word is a number in digits."""
    return _NUMBER.fullmatch(text) is not None


def _words(text: str, joins_initials: bool = True) -> list[Word]:
    words, sentence, clause, behind = list[Word](), 0, 0, 0
    for found in (_WORD if joins_initials else _WORD_OR_LETTER).finditer(text):
        between, spelt = text[behind : found.start()], found[0].lower()
        if words:
            ended = _ends_sentence(text, behind, found.start())
            sentence += ended
            clause += ended or _CLAUSE_END.search(between) is not None or spelt in _CLAUSE_WORDS
        words.append(Word(_compared(spelt), found.start(), found.end(), sentence, clause))
        behind = found.end()
    return _joined(text, words)


def _ends_sentence(text: str, behind: int, start: int) -> bool:
    found = _SENTENCE_END.search(text, behind, start)
    return found is not None and not _ABBREVIATION.search(text[: found.end()].rstrip()[-8:])


def _compared(spelt: str) -> str:
    if spelt in NUMBER_WORDS or spelt in _ORDINAL_OF:
        return NUMBER_WORDS.get(spelt) or _ORDINAL_OF[spelt]
    if ":" in spelt:
        return spelt.removeprefix("0")
    if spelt[-1:] == "." and not spelt[:1].isdigit():
        return "".join(spelt.replace(".", "").split())
    if _NUMBER.fullmatch(spelt.replace(",", "")):
        plain = spelt.replace(",", "")
        plain = f"0{plain}" if plain.startswith(".") else plain
        return plain.rstrip("0").rstrip(".") if "." in plain else plain
    return "and" if spelt == "&" else spelt


def _joined(source: str, words: Sequence[Word]) -> list[Word]:
    """The words with numbers of several words as one, and units by their sign behind the number."""
    joined = list[Word]()
    for word in words:
        last = joined[-1] if joined and joined[-1].clause == word.clause else None
        text, start = word.text, word.start
        if last is not None and is_number(last.text):
            if text in _POWER_OF:
                text, start = _compared(str(Decimal(last.text) * _POWER_OF[text])), last.start
            elif source[last.start : last.end].isalpha() and _is_last_digit(last.text, text):
                text, start = str(int(last.text) + int(text)), last.start
        elif last is not None and last.text in "$€£" and is_number(text):
            joined[-1] = Word(text, last.start, word.end, word.sentence, word.clause)
            joined.append(Word(last.text, word.end, word.end, word.sentence, word.clause))
            continue
        elif text in _TENS_OF:
            text = str(_TENS_OF[text])
        elif text in _POWER_OF and last is not None and last.text == "a":
            text, start = str(_POWER_OF[text]), last.start
        if last is not None and is_number(last.text) and text in _UNIT_OF:
            text = _UNIT_OF[text]
        if start != word.start:
            joined.pop()
        joined.append(Word(text, start, word.end, word.sentence, word.clause))
    return joined


def _is_last_digit(tens: str, ones: str) -> bool:
    return len(tens) == 2 and tens[1] == "0" and len(ones) == 1 and ones.isdigit() and ones != "0"
