"""What a reply states: without thoughts, questions of its own and what it takes back, in sentences and clauses.

Both readers of sentences use it, `relaxed` for open questions and `select_mc_option` for choices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from unicodedata import normalize

from experiment_core_utils.tasks.answers import ANSWER_TAGS
from experiment_core_utils.tasks.scoring.values import plain, with_powers

_BOXED = re.compile(rf"\\boxed\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}|{ANSWER_TAGS}", re.DOTALL | re.IGNORECASE)
_JSON_ANSWER = re.compile(
    r"(?i)\"(?:final_?)?(?:answer|result|response|value)\"\s*:\s*(\"[^\"]*\"|\[[^\]]*\]|[^,}\s]+)"
)
# Where a model that runs on asks itself the next question, behind its answer, and what is no answer yet.
_NEXT_QUESTION = re.compile(
    r"(?i)\n[ \t*#]*(?:question|q|user|human|instruction|input)(?: ?\d+)?[*\s]*:"
    r"|(?:(?<=\n)|(?<=[.!]\s))[^.!?\n]+\?\s*(?:answer|assistant|ai|a)\s*:",
)
_PREAMBLE = re.compile(
    r"(?i)(?:sure|certainly|of course|ok(?:ay)?|here(?:'s| is| are)|let's|let me|great|good|thank|i(?:'ll| will)|"
    r"we (?:need|want)|you (?:ask|want)|the question|to (?:find|answer)|based on|looking at)\b[^\n]*",
)
# What a reply calls its answer follows one of these.
CALLED_ANSWER = re.compile(
    r"\b(?:answer|antwort|lösung|respuesta|réponse|risposta|resposta|ответ|الإجابة|उत्तर)\b[^.!?\n:]{0,80}?"
    r"(?:\s(?:is|was|would be|ist|lautet|es|est|è|é|هي|هو)\b:?|\s?[:=])|答案(?:是|为|為|:)?|答えは|정답은"
    r"|^[#* ]*(?:final |the )?answer[* ]*$|(?<=\n)a:|^(?:final )?(?:result|solution|conclusion)\s?[:=]",
    re.IGNORECASE | re.MULTILINE,
)
# After the words before one of these something else is meant than what they say.
_CORRECTION = re.compile(
    r"(?i)\b(?:no,? wait|wait,? no|wait|hold on|hmm+,? no|no,? actually|actually,? no|scratch that|correction|"
    r"on second thoughts?|oops|let me (?:correct|recount|re-?check|recheck)\b[^.,;:]*|just kidding|my mistake|"
    r"(?:my )?apologies|i misspoke|i meant?|or rather|or actually|sorry,?(?: it'?s| it is| i mean| that'?s wrong| no)?|"
    r"no, (?!it|that|the|there|this|they|he|she|i |a |an |not|no)|no, pardon|non,? pardon|pardon|moment,? nein|nein,? "
    r"doch|halt|quatsch|perdón|espera|no, espera|mejor dicho|ou plutôt|attends|besser gesagt)\b[,.!:…]*"
    r"|(?<=[.!?…] )actually,|(?<=\.\.)\s*actually\b|不对[,。，]|等等[,，]|いや[、,]",
)
_SENTENCE_END = re.compile(r"(?i)[.!?…]+[\"')\]»”]*(?=\s|$)|[。！？।؟]|\n+")
_CLAUSE = re.compile(
    r"(?i)[,;:()\[\]、،؛]|\s[-–—]+\s|—|\b(?=(?:but|however|though|although|because|since|while|whereas|so|therefore|thus|"
    r"hence|then|if|unless|when|which|who|sondern|aber|weil|sino|pero|porque|mais|parce|doch|بل|لكن)\b)",
)
_NOT_FORCED = r"(?!\s+(?:only|just|sure|certain|but|doubt|half)\b)"
_DENIED_BEFORE = re.compile(
    rf"(?i)(?:\b(?:not|never|nor|neither|cannot|cant|without|except(?: for)?|excluding|excludes?|unlike|rather than|"
    rf"instead of|other than|apart from|eliminat\w+|reject\w*|rul\w+ out|refus\w+|far from|"
    rf"nicht|kein\w*|statt|außer|pas|no es|no son|no era|en vez de|ni|não|non è|не|ليس\w*|لا)\b|n't\b){_NOT_FORCED}"
    r"|(?:\bno|\bnon) (?:the |an? |el |la )?$|不是|不选|并非|並非|而非|不会|除了|没有",
)
_IS = (
    r"(?:is|are|was|were|be|been|would be|could be|should be|must be|will be|has|have|it's|that's|he's|she's|c'est|ist|"
    r"sind|es|son|est|sont|era|è|é|jest|är|هو|هي|है|हैं)"
)
_WRONG = (
    r"(?:(?:wrong|incorrect|false|impossible|unlikely|excluded|eliminated|inaccurate|invalid|"
    r"(?:a |the )?(?:mistake|trap|distractor|decoy)|irrelevant|out|close|tempting|merely|falsch|incorrect[ao]|faux)\b)"
)
_RIGHT = (
    r"(?:correct|right|true|(?:the )?(?:best|correct|right)?\s?(?:answer|choice|option)"
    r"|best|better|(?:the )?better (?:choice|option|answer)|richtig|correct[ao]|juste|正确|对的|正しい)"
)
_ALL_BUT = re.compile(r"(?i)\b(?:all|every\w*|any\w*) but (?:the |an? )?[\"'(]?$")
_DENIED_AFTER = re.compile(
    rf"(?i)[\"')\]]*\s+(?:{_IS})\s+(?:only|merely|just|nur|seulement)\s|[\"')\]]*\s+(?:{_IS}\s+)?(?:also\s+|clearly\s+)?(?:not\b|n't|nicht|pas\b|never\b|{_WRONG})(?!\s+(?:only|just))"
    r"|[\"')\]]*\s+(?:is|are|was|were|ca|could|would)n't\b(?!\s+only)"
    r"|[\"')\]]*\s+(?:do|does|did|has|have)(?:n't| not)\s+(?:\w+\s+)?(?:fit|match|work|make|seem|belong|apply)"
    r"|\)?\s*[:–—-]\s*(?:no|false|incorrect|wrong)\b|\)?\s*[:–—-]?\s*[✗✘❌✖]"
    r"|\s*(?:不对|不正确|是错|错|都?不是|では?(?:ない|ありません)|じゃない|ではなく|[가이]? ?아니|नहीं|no es\b)",
)
_RIGHT_AFTER = re.compile(
    rf"(?i)[\"')\]]*\s+(?:{_IS}\s+|fits |works |seems )(?:clearly |(?:the )?most |more )?(?:likely\b|{_RIGHT})"
    rf"|[\"')\]]*\s+(?:fits|matches|works)\b|\)?\s*[:–—-]\s*(?:yes|true|correct|right)\b|\)?\s*[:–—-]?\s*[✓✔✅☑]|\s*(?:选项)?(?:是|为|が)?(?:正确|对的|正しい)",
)
_ASIDE = re.compile(
    r"(?i)\s*(?:because|since|while|whereas|although|though|if|unless|when|who|as|like|unlike|having|followed|compared|ahead|"
    r"next to|weil|obwohl|während|porque|aunque|parce que|bien que)\b"
    r"|\s*which (?!(?:is|are) (?:an? )?(?:breed|type|kind|sort|form|species|variety)|leaves|gives|makes|equals|means)",
)
_FILLERS = (
    r"(?:\s|[\"'«“(\[*]|\b(?:the|an?|answer|option|choice|letter|number|only|therefore|thus|then|hence|so|most|likely|just|"
    r"indeed|actually|also|both|either|to|be|probably|maybe|perhaps|possibly|certainly|clearly|definitely|still|but|yes|"
    r"well|okay?|sure|hmm|finally|surely|la|le|el|il|die|der|das|los|las|les|\w{3,}ly)\b)*"
)
_DECIDING = (
    r"(?:choos\w*|chose\w*|pick\w*|select\w*|say|guess|think|believe|vote|prefer|means?|take|leaves?|leaving|get|"
    r"label+ed|marked|(?:go|going|went|opt|settle|stick|vot\w+|lean\w*)\s(?:with|for|on|towards?)|left with|"
    r"corresponds to|"
    r"called|named|by|equals?|makes?|gives?|becomes?|=|是|为|為|は|여|wähle|elijo|choisis)"
)
# Words that a letter of an option may follow.
FIRST_WORDS = (
    rf"{_IS}|{_DECIDING}|options?|choices?|letters?|answers?|alternative|lettre|letra|antwort|réponse|respuesta|opción|only|therefore|"
    r"thus|hence|then|so|cevap|jawaban|svar|odpowiedź|lösung|solution|risposta|resposta|ответ|number|most|likely|just|both|either|neither|nor|not|or|and|than|of|because|since|as|if|while|that|with|for|to|"
    r"on|out|eliminat\w+|exclud\w+|reject\w*|ruling|between|from|over|versus|vs|except|however|though|consider\w*|mark|unlike|"
    r"against|like|here|it|this|und|oder|et|ou|y|o|e|или|не|kein|nicht|sino|sondern|mais|aber|the|la|le|el|die|der|yes|no|"
    r"maybe|perhaps|possibly|but|well|ok|still|also|be"
)
_AFTER_VERB = re.compile(rf"(?i)(?:\b(?:{_IS}|{_DECIDING})|[=是为為は])(?:{_FILLERS})$|\bonly (?:the |an? )?[\"'(]?$")
_ONLY_FILLERS = re.compile(_FILLERS, re.IGNORECASE)
_HEDGE = re.compile(r"(?i)\b(?:maybe|perhaps|possibly|could|might|may|either|vielleicht|quizás)\b")
_CONFIRMED = re.compile(r"(?i)[\"')\]?\s]*(?:yes|yeah|correct|right|indeed|i think so|it is)\b")


REFUSAL = re.compile(
    r"(?i)\b(?:don't|do not|cannot|can't|unable to|no) (?:have )?(?:\w+ )?(?:know|tell|see|answer|determine|say|"
    r"idea|information|enough|help|sure)\b|\bit depends\b|\b(?:not|n't|un)\s?(?:sure|certain|clear)\b|"
    r"weiß (?:es |ich )?nicht|ne sais pas|no lo sé|no sé\b|不知道|无法|لا أعرف|わかりません",
)


_TOTAL_AFTER = re.compile(r"(?i)(?:\s+\w+)?\s+(?:in total|altogether|in all|total\b|left\b|remain)")
_SO = re.compile(r"(?i)\b(?:so|therefore|thus|hence|total of),?\s+$")


class Strength(IntEnum):
    """How much a reply says that what it names is the answer."""

    DENIED = 0  #: "not copper", "A is wrong"
    ASIDE = 1  #: a reason, a question or a comparison: "because copper conducts", "it comes after Tuesday"
    SUBJECT = 2  #: what a clause is about, "copper conducts"
    IN_PASSING = 3  #: anywhere else
    DECIDED = 4  #: "it is copper", "I choose B"
    BARE = 5  #: a clause of its own, "B.", "So B"
    ANSWER_IS = 6  #: "the answer is B", "B is correct"


@dataclass(frozen=True)
class Mention:
    """A candidate that is named, and where."""

    candidate: int
    begin: int
    end: int
    is_letter: bool = False
    is_marked: bool = False  #: a letter in brackets, or before a bracket, a colon, or a period at a sentence's start


# Characters of a reply, and of a clause, that are read.
_LONGEST_BEGINNING, _LONGEST_END, _LONGEST_CLAUSE = 1000, 2000, 300


class Reply:
    """A `plain` text in sentences and clauses, of a long one its beginning and its end."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST_BEGINNING + _LONGEST_END:
            text = f"{text[:_LONGEST_BEGINNING]}\n{text[-_LONGEST_END:]}"
        self.text = re.sub(r"(?<![-=])[-=]{1,9}>|[→⇒➔]", " = ", plain(text))

    @cached_property
    def sentences(self) -> tuple[tuple[int, int], ...]:
        """Where sentences begin and end, their marks included."""
        ends = [found.end() for found in _SENTENCE_END.finditer(self.text)]
        places = zip([0, *ends], [*ends, len(self.text)], strict=True)
        return tuple((begin, end) for begin, end in places if re.search(r"[\w%]", self.text[begin:end]))

    def sentence_of(self, place: int) -> tuple[int, int]:
        """The sentence around a place."""
        return next((each for each in self.sentences if each[0] <= place < each[1]), (0, len(self.text)))

    def clause_begin(self, place: int) -> int:
        """Where the clause around a place begins."""
        begin = max(self.sentence_of(place)[0], place - _LONGEST_CLAUSE)
        return begin + max((found.end() for found in _CLAUSE.finditer(self.text[begin:place])), default=0)

    def clause_ends_at(self, place: int) -> bool:
        """Whether a clause or sentence ends at a place, but for quotes and brackets."""
        after = self.text[place : self.sentence_of(place - 1)[1]].lstrip("\"')]*»”") or "\n"
        return re.match(r"\s*(?:$|[.!?…。])|\s*\n", after) is not None or _CLAUSE.match(after.lstrip(" ")) is not None

    def is_question(self, place: int) -> bool:
        """Whether the sentence around a place is a question that the reply does not say yes to."""
        begin, end = self.sentence_of(place)
        words = self.text[begin:end].split()
        if (
            len(words) <= 3
            and end >= len(self.text.rstrip())
            and not re.search(rf"\b{_IS}\b", self.text[begin:end], re.IGNORECASE)
        ):
            return False
        return self.text[:end].rstrip("\"') \n*").endswith(("?", "？", "؟")) and not _CONFIRMED.match(self.text[end:])

    def strength(self, mention: Mention, floor: int = 0) -> Strength:
        """How a mention is meant.

        Args:
            floor: where what was named before ends.
        """
        begin, end = mention.begin, mention.end
        clause, sentence = self.clause_begin(begin), self.sentence_of(begin)
        said, after = self.text[clause:begin], self.text[end : self.sentence_of(end - 1)[1]]
        before = self.text[max(clause, floor if floor < begin else 0) : begin]
        is_first = _ONLY_FILLERS.fullmatch(before) is not None
        is_result = re.match(r"[-$€£]?\d", self.text[begin:end]) and (_TOTAL_AFTER.match(after) or _SO.search(said))
        rules = (
            (
                _ALL_BUT.search(self.text[max(begin - 30, 0) : begin])
                or _DENIED_BEFORE.search(said)
                or _DENIED_AFTER.match(after),
                Strength.DENIED,
            ),
            (self.is_question(begin) or (_ASIDE.match(said) and not self._is_all(clause, sentence)), Strength.ASIDE),
            (self.is_called_answer(mention) or _RIGHT_AFTER.match(after), Strength.ANSWER_IS),
            (
                is_first and self.clause_ends_at(end) and not self.text[:begin].rstrip(" \"'").endswith("("),
                Strength.BARE,
            ),
            (_AFTER_VERB.search(before) or is_result, Strength.DECIDED),
            (is_first, Strength.SUBJECT),
        )
        return next((strength for holds, strength in rules if holds), Strength.IN_PASSING)

    def is_called_answer(self, mention: Mention) -> bool:
        """Whether a mention follows "the answer is" or "Answer:"."""
        called = max((end for end in self._called if end <= mention.begin), default=None)
        return (
            called is not None and _ONLY_FILLERS.fullmatch(self.text[called : mention.begin].strip(": \n")) is not None
        )

    @cached_property
    def _called(self) -> list[int]:
        return [found.end() for found in CALLED_ANSWER.finditer(self.text)]

    def _is_all(self, clause: int, sentence: tuple[int, int]) -> bool:
        """Whether the clause that begins at a place is a whole sentence, as in "Because it is raining."."""
        begin, text = clause - sentence[0], self.text[slice(*sentence)]
        return not text[:begin].strip() and not re.search(r"[,;:]", text[begin:])

    def is_contradicted(self, mention: Mention) -> bool:
        """Whether another sentence begins with the same words and goes on otherwise, with a number or name too."""
        begin, _ = self.sentence_of(mention.begin)
        before = self.text[begin : mention.begin].strip()
        starts = [self.text[slice(*place)].strip() for place in self.sentences if place[0] != begin]
        others = [text[len(before) :].strip() for text in starts if text.startswith(before + " ")]
        same = self.text[mention.begin : mention.end]
        return len(before.split()) > 1 and any(
            other[0].isdigit() == same[0].isdigit()
            and other[0].isupper() == same[0].isupper()
            and not same[0].islower()
            for other in others
            if other and not other.startswith(same)
        )

    def is_hedged(self, mention: Mention) -> bool:
        """Whether the clause has a word such as "maybe" before a mention."""
        return _HEDGE.search(self.text[self.clause_begin(mention.begin) : mention.begin]) is not None


def mentions(text: str, candidates: Sequence[str]) -> list[Mention]:
    """Where a `plain` text names candidates by whole words, in order; of overlapping ones the longest alone.

    Case, an article in front and accents of Latin letters are left aside. Candidates of the same words, or of none, are
    never named.
    """
    words = [compared(candidate) for candidate in candidates]
    lower, found, taken = without_accents(text), list[Mention](), list[tuple[int, int]]()
    for wanted in sorted({each for each in words if each and words.count(each) == 1}, key=len, reverse=True):
        for match in re.finditer(_whole_words(wanted), lower):
            if not any(begin < match.end() and match.start() < end for begin, end in taken):
                taken.append(match.span())
                found.append(Mention(words.index(wanted), *match.span()))
    return sorted(found, key=lambda each: each.begin)


def _whole_words(wanted: str) -> str:
    joined = r"[\s-]+(?:[a-z]\.?\s)?".join(re.escape(word) for word in wanted.split())
    before = r"(?<![^\W_])(?<![\w][-–@.])" if re.match(r"[^\W_]", wanted) and wanted[0] < "ก" else ""
    after = r"(?![^\W_]|[-–'@][^\W_]|\.[a-z\d]|[+#])" if re.search(r"[^\W_]$", wanted) and wanted[-1] < "ก" else ""
    return before + joined + after


def compared(text: str) -> str:
    """The words of a text as they are compared: `plain`, in lower case, without accents, article and outer marks."""
    bare = re.sub(r"[\"«»“”()\[\]-]|(?<!\w)'|'(?!\w)|[.!?,;:。]+$", " ", without_accents(plain(text)))
    flat = " ".join(bare.split())
    return re.sub(r"^(?:the|an?|der|die|das|la|le|les|el|los|il) (?=\S)", "", flat)


def without_accents(text: str) -> str:
    """In lower case and without the accents of Latin letters, of the same length."""
    lower = "".join(low if len(low := each.lower()) == 1 else each for each in text)
    bare = (normalize("NFD", each)[0] if "\u00c0" <= each <= "\u024f" else each for each in lower)
    return "".join(bare)


def spoken(prediction: str) -> str:
    """The folded text behind the thoughts of a model that thinks in tags, up to a next question of its own."""
    text = with_powers(prediction).rpartition("</think>")[2].strip()
    run_on = _NEXT_QUESTION.search(text)
    before = text if run_on is None else text[: run_on.start()].rstrip()
    return text if _PREAMBLE.fullmatch(before) else before


def corrected(text: str) -> str:
    """The text behind the last "no, wait" and the like that something comes before and after."""
    ends = [
        found.end() for found in _CORRECTION.finditer(text) if found.start() and re.search(r"\w", text[found.end() :])
    ]
    return text[ends[-1] :].lstrip(" ,.:;!…") if ends else text


def boxed_answer(text: str) -> str | None:
    """What is in the last ``\\boxed{}``, `<answer>` or JSON field "answer" with something in it; None without one."""
    boxed = [(found[1] or found[2] or "").strip() for found in _BOXED.finditer(text)]
    fields = [found[1].strip('"') for found in _JSON_ANSWER.finditer(text)]
    return next(reversed([content for content in boxed or fields if content]), None)


def without_boxes(text: str) -> str:
    """The text with the content of its boxes in their place."""
    return _BOXED.sub(lambda found: found[1] or found[2] or "", text)


def called_answer(text: str) -> str | None:
    """The sentence behind the last "the answer is"; None without one, or where it is empty."""
    ends = [found.end() for found in CALLED_ANSWER.finditer(text)]
    reply = Reply(text[ends[-1] :]) if ends else None
    return None if reply is None or not reply.sentences else reply.text[slice(*reply.sentences[0])].strip()
