"""Multiple-choice answers: the option that was chosen, scored 0 or 1.

The task is that of P. Lu et al., "Learn to Explain" (ScienceQA), NeurIPS 2022. An output that names no option, or
several without a decision, is unparsed and scores 0; nothing is guessed, so that a model that is broken on purpose
cannot score at chance. The reader is lenient and ours. Like VLMEvalKit (H. Duan et al., arXiv 2407.11691,
`vlmeval/utils/matching_util.py`) it looks for the only letter, then for the only option text, that stands in the
output; unlike it, it knows what is denied, discussed or decided, and needs no other model where several stand there.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.em import folded, molmo_answer
from experiment_core_utils.tasks.scoring.polarity import polarity
from experiment_core_utils.tasks.scoring.replies import (
    FIRST_WORDS,
    Mention,
    Reply,
    Strength,
    boxed_answer,
    corrected,
    mentions,
    spoken,
    without_boxes,
)
from experiment_core_utils.tasks.scoring.values import plain, quantities

UNPARSED = "unparsed"
# In a longer reply a mention in passing chooses nothing.
WORD_LIMIT = 50
# Characters before a letter that are looked at.
_NEAR = 60
_W = "A-Za-z0-9À-ɏЀ-ӿ_"
_LETTER = re.compile(
    rf"(?<![{_W}.@])(?<![{_W}][-'])(?P<letter>[A-Za-zАВСЕНΑΒΕΗ])(?P<mark>[)\]:]|\.(?![{_W}]))?(?![{_W}+#]|[-'_][{_W}]|\.[{_W}])"
)
_ONLY_LETTER = re.compile(r"[(\[\"'*]*([A-Za-z])[)\]\"'*.:]*")
_LOOKING_LIKE = dict(zip("АВСЕНΑΒΕΗ", "ABCEHABEH", strict=True))
# A letter belongs to any other word before it ("vitamin C", "point B").
_BEFORE_A_LETTER = re.compile(
    rf"(?i)(?:^|[^\w\s]\s*|\n|\b(?:{FIRST_WORDS}|[A-Z]|\w+ly)\s+|[^\x00-\u024f]\s*)[\"'(\[]?$"
)
_NAMED_LETTER = re.compile(
    r"(?i)(?:\b(?:(?P<option>options?|choices?|letter|alternative|letra|lettre|opción)|answer|is|be)|[:=是])\s*[\"'(\[]?$",
)
# After one of these "A" is a letter; before other words in lower case it is the article.
_AFTER_A = re.compile(
    r"\s*(?:$|[^\w\s]|\n|[A-Z\d]|[^\x00-\u024f]|(?:is|are|was|would|because|since|as|and|or|nor|but|not|over|for|from|with|than|to|on|by|here|if|"
    r"while|though|et|y|e|o|ou|und|oder|fits?|works|wins|makes|must|ist|es|est|rather|instead|unlike|except|although|only|says|seems)\b)"
)
_JOIN = re.compile(
    r"(?i)[\s,;)\]\"'.?]*\bor\s+|[\s,;)\]\"']*(?:\b(?:and/or|or|and|then|nor|oder|und|ou|et|o|y|или|и)\b|[&/]|或者|或|和|、|,)"
    r"(?:\s*\b(?:maybe|perhaps|possibly|even|also|both|either|probably|option|choice|letter|the|an?)\b)*[\s(\[\"']*",
)
_FROM, _TO = re.compile(r"(?i)\bfrom\s+(?:the |an? )?$"), re.compile(r"\s+to\s+(?:the |an? )?")
_AGREEMENT = re.compile(r"(?i)\b(?:that's|you're|that is|you are)\s+(?:right|correct|true),")
_COMPARED = re.compile(r"(?i)\b(?:after|before|follows?|precedes?|than)\s+(?:the |an? )?[\"']?$")
_BESIDE = re.compile(r"[\s()\[\].:,\"'=–—-]*")


def select_mc_option(prediction: str, options: Sequence[str]) -> tuple[int | None, str]:
    """Which option an output chooses, and how that was read.

    `letter`: the whole output is one letter of an option, in either case, with no more than brackets, quotes, * . :
    around it. `option_text`: the whole output is the text of one option. Of several lines, the first is the answer
    where it is one option and those below discuss the options. Otherwise what is in the last ``\\boxed{}`` or
    ``<answer>`` is read, if that chooses, and else the whole output:

    - Letters and texts are found as whole words, of overlapping texts the longest; not letters inside a text, the
      article A, the pronoun I, a letter that belongs to a word before it, and lines that repeat the list of options.
    - What is denied, gives reasons, is asked or comes before "no, wait" and the like does not count.
    - Options joined by "or", "and", a comma or a slash, and a letter beside another option's text, choose none.
    - The strongest `Strength` counts, of several of one the last; without any that decides, the only option that is
      mentioned, in more than WORD_LIMIT words in the first or last sentence. Else "This is not true." is the option
      False, and a number alone the option with it.

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
        said = spoken(text)
        chosen = _whole(said, options) or _opening(said, options) or _decided(said, options)
        chosen = chosen or _by_polarity(said, options) or _by_number(said, options)
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
    """The option that the whole text is, as its letter or as the text of that one alone."""
    letters = ascii_uppercase[: len(options)]
    letter = _ONLY_LETTER.fullmatch("".join(_LOOKING_LIKE.get(each, each) for each in text.strip()))
    if letter is not None and letter[1].upper() in letters:
        return letters.index(letter[1].upper()), "letter"
    same = [at for at, option in enumerate(options) if _flat(option) == _flat(text)]
    same = same or [at for at, option in enumerate(options) if _parts(option) == _parts(text)]
    return (same[0], "option_text") if len(same) == 1 else None


def _opening(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """The option that the first line of several is and nothing else, where the lines below discuss others."""
    first, *others = [line for line in text.splitlines() if line.strip()] or [""]
    if not others or corrected(text) != text or len(_repeated(text, options)) > 1:
        return None
    if (chosen := _whole(first, options)) and (_whole(others[0], options) or chosen)[0] == chosen[0] + 1:
        return None
    at = next((at for at, option in enumerate(options) if _is_line_of(first, at, option)), None)
    chosen = _whole(first, options) if at is None else (at, "leading_letter")
    later = _decided("\n".join(others), options)
    return None if later is not None and later[1] == "answer_is" else chosen


def _decided(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """The option of the last of the strongest statements."""
    repeated = _repeated(text, options)
    if len(repeated) > 1:
        text = "\n".join(line for at, line in enumerate(text.splitlines()) if at not in repeated).strip()
    behind = corrected(text)
    chosen = _strongest(behind, options) if behind != text else None
    return chosen or _strongest(text, options)


def _strongest(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    reply = Reply(text)
    said = _statements(reply, options)
    most = max((strength for strength, _ in said), default=Strength.DENIED)
    best = [group for strength, group in said if strength == most]
    if most < Strength.DECIDED:
        # The only one that is mentioned in passing, of a long reply in its first or last sentence.
        if len(reply.text.split()) > WORD_LIMIT and reply.sentences:
            ends = (reply.sentences[0], reply.sentences[-1])
            best = [group for group in best if any(begin <= group[0].begin < end for begin, end in ends)]
        return _chosen(reply, best[-1]) if _is_one(best) else None
    sure = [group for group in best if not reply.is_hedged(group[0])]
    if not sure and not _is_one(best):
        return None
    last = (sure or best)[-1]
    if not _is_one([last]):
        later = [group for strength, group in said if strength >= Strength.DECIDED and group[0].begin > last[0].begin]
        last = [last, *filter(lambda group: len(group) == 1, later)][-1]
    return _chosen(reply, last)


def _is_one(groups: Sequence[Sequence[Mention]]) -> bool:
    """Whether all mentions are of one option."""
    return len({each.candidate for group in groups for each in group}) == 1


def _statements(reply: Reply, options: Sequence[str]) -> list[tuple[Strength, list[Mention]]]:
    """The options that are named, those together that are joined, with how much they are said to be the answer."""
    said, floor = list[tuple[Strength, list[Mention]]](), 0
    for group in _groups(reply, _named(reply, options)):
        first, last = (reply.strength(each, floor) for each in (group[0], group[-1]))
        strength = first if first == Strength.DENIED else max(first, last)
        if strength <= Strength.DECIDED and _COMPARED.search(reply.text[: group[0].begin]):
            strength = min(strength, Strength.ASIDE)
        floor = group[-1].end
        if strength > Strength.ASIDE or (strength == Strength.ASIDE and not group[0].is_letter):
            said.append((strength, group))
    return said


def _chosen(reply: Reply, group: Sequence[Mention]) -> tuple[int, str] | None:
    if not _is_one([group]) or group[0].candidate < 0:
        return None
    named = next((each for each in group if each.is_letter), group[0])
    if not named.is_letter:
        return named.candidate, "option_text"
    if reply.is_called_answer(group[0]):
        return named.candidate, "answer_is"
    is_first = not reply.text[: named.begin].strip("([*\"' ")
    return named.candidate, "leading_letter" if named.is_marked and is_first else "last_letter"


def _named(reply: Reply, options: Sequence[str]) -> list[Mention]:
    """The options that are named, in order; of a letter and a text beside each other the letter."""
    letters = ascii_uppercase[: len(options)]
    texts = mentions(reply.text, ["" if folded(option).strip() in letters else option for option in options])
    texts = [each for each in texts if _is_text(reply, each, options)]
    found = (_letter(reply, match, letters) for match in _LETTER.finditer(reply.text))
    kept = (each for each in found if each and not any(text.begin <= each.begin < text.end for text in texts))
    named = list[Mention]()
    for each in sorted((*texts, *kept), key=lambda each: each.begin):
        both = _as_one(reply, named[-1], each, options) if named else None
        named[-1 if both else len(named) :] = [both or each]
    return named


def _is_text(reply: Reply, mention: Mention, options: Sequence[str]) -> bool:
    """Whether an option's text is meant: "a" is no option "A", and "That's right, ..." none of "right"."""
    text = reply.text[mention.begin : mention.end]
    is_agreement = any(at.start() < mention.begin < at.end() for at in _AGREEMENT.finditer(reply.text))
    return not is_agreement and (len(text) > 1 or not text.islower() or text in options)


def _as_one(reply: Reply, last: Mention, each: Mention, options: Sequence[str]) -> Mention | None:
    """A letter and a text beside each other as one mention, of no option where they are of two; None where apart."""
    marks = re.sub(r"\b(?:the|an?)\b", "", reply.text[last.end : each.begin])
    is_same = last.candidate == each.candidate
    if last.is_letter == each.is_letter or not _BESIDE.fullmatch(marks) or ("," in marks and not is_same):
        return None
    letter = last if last.is_letter else each
    if not is_same and re.search(r"\b(?:all|both|none|neither)\b", options[letter.candidate], re.IGNORECASE):
        return letter
    return Mention(each.candidate if is_same else -1, last.begin, each.end, is_letter=True, is_marked=letter.is_marked)


def _letter(reply: Reply, match: re.Match[str], letters: str) -> Mention | None:
    """The option whose letter this is, if it is no article, no pronoun, and does not belong to the word before it."""
    begin, end = match.span("letter")
    near = reply.text, max(begin - _NEAR, 0), begin
    starts = not reply.text[reply.sentence_of(begin)[0] : begin].strip(" \n([*\"'")
    is_marked = match["mark"] in (")", "]", ":") or (match["mark"] == "." and starts)
    named = _NAMED_LETTER.search(*near)
    is_sure = is_marked or (named is not None and (bool(named["option"]) or reply.clause_ends_at(end)))
    spelt = _LOOKING_LIKE.get(match["letter"], match["letter"]) if is_sure else match["letter"]
    if spelt.upper() not in letters or not (is_sure or _is_letter(spelt, reply.text[end:], near)):
        return None
    return Mention(letters.index(spelt.upper()), begin, end, is_letter=True, is_marked=is_marked)


def _is_letter(spelt: str, after: str, near: tuple[str, int, int]) -> bool:
    if spelt in ("a", "i", "I") or _BEFORE_A_LETTER.search(*near) is None:
        return False
    if spelt == "A":
        return _AFTER_A.match(after) is not None
    return spelt.isupper() or re.match(r"\s*(?:$|[^\w\s]|is\b)", after) is not None


def _groups(reply: Reply, named: Sequence[Mention]) -> list[list[Mention]]:
    """The options that are named, those together that "or", "and", "from ... to", commas, spaces and slashes join."""
    groups = list[list[Mention]]()
    for each in named:
        last = groups[-1][-1] if groups else None
        between = reply.text[last.end : each.begin] if last is not None else ""
        is_range = _TO.fullmatch(between) is not None and _FROM.search(reply.text[: groups[-1][-1].begin]) is not None
        is_joined = is_range or _JOIN.fullmatch(between) is not None or not between.strip()
        is_apart = (
            "," in between
            and re.match(r"\)?\s+(?:is|are|was|fits|does|do|has|have|can|will)\b", reply.text[each.end :]) is not None
        )
        if last is not None and is_joined and not is_apart:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _by_polarity(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """Of true and false, or yes and no, the one that a reply means that names neither ("This is not true.")."""
    means = {polarity(option): at for at, option in enumerate(options)}
    if set(means) != {"yes", "no"} or len({each.candidate for each in mentions(plain(text), options)}) > 1:
        return None
    at = means.get(polarity(corrected(text)))
    return None if at is None else (at, "option_text")


def _by_number(text: str, options: Sequence[str]) -> tuple[int, str] | None:
    """The option whose number a reply gives in another form, or without the unit that all options share."""
    values = [quantities(plain(option)) for option in options]
    found = quantities(plain(corrected(text)))
    if any(len(each) != 1 for each in values) or not found:
        return None
    same = {at for at, (value,) in enumerate(values) for each in found if each.is_same(value)}
    return (same.pop(), "option_text") if len(same) == 1 and len(found) == 1 else None


def _repeated(text: str, options: Sequence[str]) -> set[int]:
    """The lines that are an option's letter and text."""
    lines = enumerate(text.splitlines())
    return {number for number, line in lines if any(_is_line_of(line, at, option) for at, option in enumerate(options))}


def _is_line_of(line: str, at: int, option: str) -> bool:
    marks = ("{}:", "{}.", "{})", "({})")
    return any(_flat(line) == _flat(f"{mark.format(ascii_uppercase[at])} {option}") for mark in marks)


def _parts(text: str) -> list[str]:
    """The operands of "and" in any order."""
    return sorted(_flat(text).split(" and "))


def _flat(text: str) -> str:
    return " ".join(folded(re.sub(r"[*`]", "", text)).casefold().split()).rstrip(".").rstrip()
