"""Tokens of a caption as caption metrics count them: lower-cased, without punctuation.

The conventions are those of the Penn Treebank (M. Marcus et al., "Building a Large Annotated Corpus of English",
Computational Linguistics 1993), in the form that X. Chen et al., "Microsoft COCO Captions", arXiv 1504.00325, chose for
caption metrics: contractions are split, brackets are named, hyphenated words are whole, and after lower-casing the
tokens that are only punctuation are dropped. The rules here were found by watching what the Java tokeniser of that
evaluation gives for written examples; the tests list where the two still differ.
"""

import re
from functools import lru_cache
from types import MappingProxyType

# Dropped from the tokens. Brackets are not among them although they once were meant to be: the evaluation compares
# with "-LRB-" after lower-casing, so "-lrb-" stays a token.
_PUNCTUATION = frozenset({"''", "'", "``", "`", '"', ".", "?", "!", ",", ":", "-", "--", "...", ";"})
_BRACKETS = MappingProxyType(
    {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"},
)
_SPLIT_WORDS = "can|not gon|na wan|na got|ta gim|me lem|me 't|is 't|was".split()
_FUSED_WORDS = MappingProxyType({word.replace("|", ""): tuple(word.split("|")) for word in _SPLIT_WORDS})
# What is written with one character and read as another; spaces make them tokens of their own.
_REWRITTEN = str.maketrans(
    dict.fromkeys("’‘", "'")
    | dict.fromkeys("“”«»‹›", '"')
    | dict.fromkeys("–—", " -- ")
    | dict.fromkeys("€¤", " $ ")
    | {"…": " ... ", "£": " # ", "¢": " cents ", "½": " 1/2 ", "¼": " 1/4 ", "¾": " 3/4 ", "⅓": " 1/3 ", "⅔": " 2/3 "}
)
_ENTITIES = MappingProxyType({"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": " "})
_ENTITY = re.compile("|".join(_ENTITIES))
# Beyond the basic plane (most emoji), and characters without a picture of their own.
_NOT_TEXT = re.compile(r"[\U00010000-\U0010ffff\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]")

# Words that keep the period after them, whatever their case; then those that keep it only when capitalised.
_ABBREVIATIONS = (
    "mr mrs ms dr prof st rd ave blvd sr jr inc ltd co corp vs etc ft mt dept est jan feb mar apr jun jul aug sep sept "
    "oct nov dec mon tue tues wed thu thurs fri gen col sgt lt capt maj gov sen rep rev hon pres tel ext bros cf al "
    "calif fla va ind mich minn wis tenn ala ariz colo conn ga ky md mo mont neb nev okla"
).split()
_CAPITALISED_ABBREVIATIONS = "Tex Mass Pa Wash Ore Ill Miss Del La".split()
# After one of these a lone letter's period ends the sentence ("plan B. The").
_SENTENCE_STARTS = "The This That These There A An In On It He She They We You I And But Two".split()
_LETTER = r"[^\W\d_]"
_TOKEN = re.compile(
    rf"""
      [A-Za-z]+(?!\S)                                        # most words; first, because it is fast
    | </?[A-Za-z][A-Za-z0-9]*\s?/?>                          # <b>
    | (?:https?://|www\.)[^\s<>"]*[\w/]                      # an address, without the period after it
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                           # mail
    | [@\#][A-Za-z]\w*(?:'\w+)*                              # @home, #tag
    | [:;=]['-]?[()DPp](?!\w)                                # :-)
    | [A-Z]+\$                                               # US$ 5
    | [Cc](?:\+\+|\#)
    | '(?:em|till?|cause|n'?|tis|twas|s|m|d|re|ve|ll)(?!\w)
    | '\d\ds?(?!\w|%|[.,:]\d)                                # '90s
    | n't(?!\w) | N'T(?!\w)
    | [Pp]h\.[Dd]\.
    | (?:{_LETTER}\.)+{_LETTER}\.?(?!\w)                     # U.S.A, p.m.
    | (?:(?i:{"|".join(_ABBREVIATIONS)})|{"|".join(_CAPITALISED_ABBREVIATIONS)})\.(?!\w)
    | [Nn]o\.(?=\s?\d)                                       # No. 5
    | {_LETTER}\.(?!\w|\s(?:{"|".join(_SENTENCE_STARTS)})\b)
    | [-+]?\d+(?:[.,:]\d+)+(?:-\w+)*                         # 3.5, 12:30, 4,000-year-old
    | \.\d+
    | [A-Z]+(?:&[A-Z]+)+(?:'\w+)*                            # AT&T
    | {_LETTER}\w*(?:['/-]\w+|[.!?](?={_LETTER})\w+)*        # words, joined as in and/or, at.night, mother-in-law's
    | \w+(?:['/-]\w+)*                                       # 24/7, 3-d, 10x10
    | [-+]\d+
    | \.\.\. | [!?]{{2,}} | \*+ | -+ | << | >>
    | \S
    """,
    re.VERBOSE,
)

_CLITIC = re.compile(r"(.+?)(n't|'(?:s|m|d|re|ve|ll))")
_WHOLE_WITH_APOSTROPHE = re.compile(
    rf"[^\W\d_iy]'{_LETTER}{{2,}}|{_LETTER}*[aeiouy]'[aeiou]{_LETTER}*"  # o'clock, L'Oreal; ma'am
)
_AND_BETWEEN = re.compile(r"(\w+)('n')(\w+)")
_LAST_AND = re.compile(r"(\w+)('n)")
_YEAR_AFTER = re.compile(r"(\d+)('\d\d)")


def ptb_tokenize(text: str) -> list[str]:
    """The tokens of a caption, in order; an empty list where it has none (empty, or only punctuation).

    White space is collapsed first, so that a line feed of any kind inside a caption is a space. Then, in the order of
    the text: n't, 's, 'm, 'd, 're, 've, 'll are split from their word, cannot, gonna, wanna, gotta, gimme, lemme, 'tis
    and 'twas in two; brackets become -lrb-, -rrb-, -lsb-, -rsb-, -lcb-, -rcb- and stay; hyphenated words and words
    joined by an inner slash or period stay whole; abbreviations and lone letters keep their period; currency signs and
    fractions are written out (£ is #, € is $, ½ is 1/2); emoji beyond the basic plane are dropped. Last, everything
    is lower-cased and the tokens ' `` " . ? ! , : - -- ... ; are dropped; runs such as "?!" stay.
    """
    flat = " ".join(text.split())
    if "&" in flat:
        flat = _ENTITY.sub(lambda found: _ENTITIES[found[0]], flat)
    if not flat.isascii():
        flat = _NOT_TEXT.sub(" ", flat).translate(_REWRITTEN)
    tokens: list[str] = []
    for piece in _TOKEN.findall(flat):
        tokens.extend(_read(piece))
    return tokens


@lru_cache(maxsize=1 << 17)
def _read(piece: str) -> tuple[str, ...]:
    """The tokens of one piece of text: none, one or more."""
    word = piece.lower()
    if word in _PUNCTUATION or not word.strip("-"):
        return ()
    if word in _FUSED_WORDS:
        return _FUSED_WORDS[word]
    if "'" in word and word[0] not in ":;=":
        return _split_apostrophes(word)
    if not word.isalnum():
        for bracket, name in _BRACKETS.items():
            word = word.replace(bracket, name)
    return (word,)


def _split_apostrophes(word: str) -> tuple[str, ...]:
    if word.startswith("'") or word == "n't":
        return (word,)
    if found := _CLITIC.fullmatch(word):
        return (*_read(found[1]), found[2])
    for pattern in (_AND_BETWEEN, _LAST_AND, _YEAR_AFTER):
        if found := pattern.fullmatch(word):
            return found.groups()
    if word.startswith("y'"):
        return ("y'", *_read(word[2:]))
    if _WHOLE_WITH_APOSTROPHE.fullmatch(word):
        return (word,)
    return tuple(token for part in word.split("'") if part for token in _read(part))
