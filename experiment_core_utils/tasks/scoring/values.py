"""Values in a text: numbers of any script, locale and usual form, with their units, as they are compared."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from types import MappingProxyType
from unicodedata import decimal, normalize, numeric

from num2words import num2words

from experiment_core_utils.tasks.scoring.em import folded

# Languages whose words of numbers are read, up to which number; words that mean something else in another are left out.
_LANGUAGES = (("fr", 99), ("es", 99), ("de", 99), ("en", 999))
_OTHER_WORDS = frozenset("once elf un une uno ein eins cero null".split())
_MAGNITUDES = MappingProxyType(
    {
        word: 10**power
        for power, words in {
            2: "hundred",
            3: "thousand tausend mille mil k हज़ार ألف 千",
            4: "万 萬",
            5: "lakh lakhs लाख",
            6: "million millions millionen millones millón mio mn m مليون",
            7: "crore crores करोड़",
            8: "亿 億",
            9: "billion billions bn b milliarde milliarden milliard milliards mrd مليار",
            12: "trillion trillions billionen billones 兆",
        }.items()
        for word in words.split()
    }
)
_PREFIXES = {"k": 3, "c": -2, "m": -3, "d": -1, "µ": -6, "μ": -6, "n": -9, "M": 6, "G": 9, "T": 12}
_LONG_PREFIXES = {
    "kilo": 3,
    "centi": -2,
    "zenti": -2,
    "milli": -3,
    "mili": -3,
    "mega": 6,
    "giga": 9,
    "キロ": 3,
    "千": 3,
}
# A base unit, its symbols that take prefixes, and its words.
_BASES = {
    "m": ("m", "meter meters metre metres mètre mètres metro metros metern メートル 米 مترا متر मीटर"),
    "g": ("g", "gram grams gramme grammes gramm gramo gramos グラム 克"),
    "l": ("l L", "liter liters litre litres litro litros リットル 升"),
    "s": ("s", "second seconds sec sekunde sekunden seconde secondes segundo segundos 秒 ثانية"),
    "W": ("W", "watt watts"),
    "Hz": ("Hz", "hertz"),
    "B": ("B", "byte bytes"),
    "Pa": ("Pa", "pascal"),
    "J": ("J", "joule joules"),
    "V": ("V", "volt volts"),
    "K": ("K", "kelvin"),
}
# Units that take no prefix: how many of which base unit they are.
_OTHERS: dict[str, tuple[str, int | Fraction]] = {
    "h hr hrs hour hours stunde stunden heure heures hora horas 小时 時間 ساعة ساعات": ("s", 3600),
    "min mins minute minutes minuten minuto minutos 分钟 分": ("s", 60),
    "day days tag tage tagen jour jours día días 天 日": ("s", 86400),
    "week weeks woche wochen semaine semaines semana semanas": ("s", 604800),
    "% percent prozent percentage 'per cent' 'pour cent' 'por ciento'": ("%", 1),
    "°C celsius '° C' 'degrees celsius' 'grad celsius' ℃": ("°C", 1),
    "°F fahrenheit '° F' 'degrees fahrenheit'": ("°F", 1),
    "° degree degrees grad": ("°", 1),
    "$ dollar dollars usd us-dollar us-dollars dólares dolares us$": ("$", 1),
    "cent cents": ("$", Fraction(1, 100)),
    "€ euro euros eur 欧元 ユーロ يورو": ("€", 1),
    "£ pound pounds gbp": ("£", 1),
    "¥ yen yuan 元 円 rmb": ("¥", 1),
    "₹ rupee rupees inr रुपये": ("₹", 1),
    "ft foot feet": ("m", Fraction("0.3048")),
    "inch inches": ("m", Fraction("0.0254")),
    "mile miles mi milla millas meile meilen": ("m", Fraction("1609.344")),
    "tonne tonnes": ("g", 10**6),
}


def _units() -> dict[str, tuple[str, Fraction]]:
    units = dict[str, tuple[str, Fraction]]()
    for base, (symbols, words) in _BASES.items():
        for forms, prefixes in ((symbols, _PREFIXES), (words, _LONG_PREFIXES)):
            for form in forms.split():
                units[form] = (base, Fraction(1))
                units |= {prefix + form: (base, Fraction(10) ** power) for prefix, power in prefixes.items()}
    for names, (base, factor) in _OTHERS.items():
        for quoted, bare in re.findall(r"'([^']+)'|(\S+)", names):
            units[quoted or bare] = (base, Fraction(factor))
    return units


_UNITS = _units()
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_LATEX = (
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2 "),
    (r"\\[dt]?frac\s*(\d)\s*(\d)", r" \1/\2 "),
    (r"\\(?:text|mathrm|mathbf|textbf|operatorname)\s*\{([^{}]*)\}", r" \1"),
    (r"\{,\}", ","),
    (r"\\(?:times|cdot)(?![a-z])", "×"),
    (r"\\pm(?![a-z])", "±"),
    (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
    (r"\^\s*\{([^{}]*)\}", r"^\1"),
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;! ()\[\]]", ""),
    (r"\\([%$])", r"\1"),
    (r"\$(?=[^$\n]*[=\\^{×]|[-\d.,/]+\$)([^$\n]+)\$(?!\d)", r"\1"),
    (r"\$\$", ""),
)
_LATEX_PATTERNS = tuple((re.compile(pattern), form) for pattern, form in _LATEX)
_MARKUP = re.compile(r"(?<!\d)\*+|\*+(?!\s*\d)|`+|__+|^#+ |^\s*> ", re.MULTILINE)
_RUN = re.compile(r"[^\W\d_]+(?:(?:-|\s)[^\W\d_]+){0,4}")
_AND_A_HALF = re.compile(r"(?i)\b(\d+) (?:and a |y |et )(half|quarter|medi[ao]|demie?)\b")
_DENOMINATORS = {"half": 2, "halves": 2, "3rd": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fifths": 5, "tenths": 10}
_DENOMINATORS |= {"viertel": 4, "drittel": 3, "quarts": 4, "tiers": 3, "cuartos": 4, "tercios": 3}
_PARTS = re.compile(rf"(?i)\b(\d+)[ -]({'|'.join(_DENOMINATORS)})\b(?! past)")
_INITIALS = re.compile(r"(?<![\w.])(?:(?:[^\W\d_]\.){2,}|(?:[A-Z]\. ){2,}(?=[A-Z][a-z]))(?=\W|$|[A-Z])")
_CHINESE = re.compile(
    r"[零〇一二两三四五六七八九十百千]{2,}|[二两三四五六七八九十](?=[万亿億兆%])|^[一二三四五六七八九十]$"
)
_DIGITS = r"\d{1,3}(?:[,.'  \u202f]\d{3})+(?!\d)(?:[.,]\d+)?|\d{1,2}(?:,\d{2})+,\d{3}|\d+(?:[.,]\d+)?|[.,]\d+"
_NUMBER = re.compile(
    rf"""(?P<currency>us\$|usd|eur|gbp|[$€£¥₹])?\s?
    (?P<sign>(?:(?<![\w)%])|(?<=[$€£]))(?:[-−+]|minus\s|negative\s)\s?)?
    (?<![A-Za-z0-9_.,^])(?:(?P<whole>\d+)\s(?:and\s)?(?=\d+/\d))?(?P<digits>{_DIGITS})(?!\d|st\b|nd\b|rd\b|th\b|(?<=0)s\b)
    (?:\s?/\s?(?P<below>\d+)(?![\d/]))?
    (?:\^\(?(?P<exponent>-?\d+)\)?|[eE](?P<e>[+-]?\d+)(?!\w)|\s*[×x*·]\s*10\s*(?:\^|\*\*)\s*\(?(?P<ten>-?\d+)\)?)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LETTER = r"(?![^\W\d_])"
_WORDS = sorted((each for each in _MAGNITUDES if each[1:] and each.isascii()), key=len, reverse=True)
_MAGNITUDE = re.compile(
    rf"(?i)\s?(?P<word>{'|'.join(_WORDS)})\b\.?"
    rf"|(?P<sign>[kmb])(?=\b)(?!\^)|\s?(?P<other>{'|'.join(w for w in _MAGNITUDES if not w.isascii())})",
)
_UNIT = re.compile(
    r"(?P<square>square |cubic |quadrat|kubik)?(?P<name>"
    + "|".join(
        re.escape(name) + (r"(?![^\W\d_])" if name[-1].isalpha() and name[-1] < "ͻ" else "")
        for name in sorted(_UNITS, key=len, reverse=True)
    )
    + r")(?:\^(?P<power>-?\d)|(?P<digit>[23])(?!\d))?"
)
_PER = re.compile(r"\s?(?:/|per\b|pro\b|par\b|por\b|a\b|an\b)\s?")
_CLOCK = re.compile(
    r"(?<![\d:])(\d{1,2})(?:[:.](\d{2}))?\s?(?P<part>a|p)\.?m\b\.?|(?<![\d:])(\d{1,2})(?::|\s?h\s?)(\d{2})(?![\d:]|\s?min)",
    re.I,
)
_MONTHS = (
    "jan|ene feb|fév|fev mar|mär apr|avr|abr may|mai jun|juin jul|juil aug|aoû|ago sep oct|okt nov dec|dez|déc|dic"
).split()
_MONTH = "(?P<name>" + "|".join(_MONTHS) + r")[^\W\d_]*\.?"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th|\.|er)?\s(?:of |de )?{_MONTH},?\s?(?:de )?(?P<year>\d{{3,4}})\b",
        rf"\b{_MONTH}\s(?P<day>\d{{1,2}})(?:st|nd|rd|th)?,?\s(?P<year>\d{{3,4}})\b",
        r"(?<!\d)(?P<year>\d{4})[-/年.](?P<month>\d{1,2})[-/月.](?P<day>\d{1,2})(?!\d)日?",
        r"(?<![\d.])(?P<day>\d{1,2})\.\s?(?P<month>\d{1,2})\.\s?(?P<year>\d{4})(?!\d)",
    )
)
_PAST = re.compile(
    r"(?i)(half|quarter|\d+(?: minutes?)?) (past|to) (\d+)(?: (?:in the )?(morning|afternoon|evening)| o'clock)?"
)
_RANGE = re.compile(r"(?i)\s?(?:-|–|—|to|or|bis|à|oder|ou|and|～|~)\s?")

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Quantity:
    """A number with its unit, and where it stands."""

    #: the number without its unit; two where a point or comma may be of thousands or of decimals
    numbers: frozenset[Fraction]
    factor: Fraction  #: of its unit, in base units
    dimension: Dimension  #: base units and their powers; () without a unit that is known
    begin: int
    end: int
    decimals: int = 0  #: digits behind the point

    def is_same(self, other: "Quantity") -> bool:
        """Whether both are one value; a missing unit is any unit."""
        if self.dimension and other.dimension:
            if self.dimension != other.dimension and not _are_degrees(self.dimension, other.dimension):
                return False
            return any(_equal(a * self.factor, b * other.factor, 0) for a in self.numbers for b in other.numbers)
        percent = {Fraction(1), *(Fraction(1, 100) for each in (self, other) if each.dimension == (("%", 1),))}
        places = max(self.decimals, other.decimals)
        sides = (self, other) if self.dimension else (other, self)
        if sides[0].dimension == (("date", 1),):
            return any(date // 10**4 in sides[1].numbers for date in sides[0].numbers)
        return any(
            _equal(a * share, b, places) for a in sides[0].numbers for b in sides[1].numbers for share in percent
        )


def _are_degrees(*dimensions: Dimension) -> bool:
    names = {dimension[0][0] for dimension in dimensions}
    return "°" in names and all(name.startswith("°") for name in names)


def _equal(first: Fraction, second: Fraction, decimals: int) -> bool:
    """Whether both are equal, or one is the other rounded to two or more decimals."""
    if first == second:
        return True
    least = min(_places(first), _places(second))
    return 2 <= least <= decimals and round(first, least) == round(second, least)


def _places(number: Fraction) -> int:
    return next((places for places in range(12) if (number * 10**places).denominator == 1), 12)


def with_powers(text: str) -> str:
    """The `folded` text, where raised digits are powers and fractions of one character stand apart."""
    text = _SUPERSCRIPTS.sub(lambda found: "^" + normalize("NFKC", found[0]), text)
    return folded(re.sub("[¼-¾⅐-⅞]", lambda found: " " + normalize("NFKC", found[0]), text))


@lru_cache(maxsize=1 << 12)
def plain(text: str) -> str:
    """The text in one form: NFKC, plain digits, no markup, LaTeX in signs, words of numbers in digits; case is kept."""
    text = re.sub(r"</?(?:ul|ol|li|p|br|tr|div)\s?/?>", "\n", re.sub(r"</?(?:b|i|u|em|strong|span)>", "", text))
    text = with_powers(text).translate({0x2044: "/", 0x66B: ".", 0x66C: "", 0x60C: ",", 0x2212: "-"})
    text = "".join(each if each.isascii() else str(decimal(each, each)) for each in text)
    for pattern, form in _LATEX_PATTERNS:
        text = pattern.sub(form, text)
    text = re.sub(r"[{}]", "", _MARKUP.sub("", text)) if '"' not in text else _MARKUP.sub("", text)
    text = _CHINESE.sub(lambda found: str(_of_characters(found[0])), text)
    text = re.sub(r"\b(mr|mrs|ms|dr|prof|st|vs)\.", r"\1", text, flags=re.IGNORECASE)
    text = _RUN.sub(_with_digits, text)
    text = _AND_A_HALF.sub(lambda found: found[1] + (".25" if found[2].lower().startswith("q") else ".5"), text)
    text = _PARTS.sub(lambda found: f"{found[1]}/{_DENOMINATORS[found[2].lower()]}", text)
    return _INITIALS.sub(lambda found: re.sub(r"[.\s]", "", found[0]) + " ", text).strip()


def _of_characters(text: str) -> int:
    total, digit = 0, 0
    for each in text:
        value = 2 if each == "两" else int(numeric(each))
        total, digit = (total + (digit or 1) * value, 0) if value >= 10 else (total, digit * 10 + value)
    return total + digit


@cache
def _number_words() -> dict[str, str]:
    found = dict[str, int]()
    for language, last in _LANGUAGES:
        for number in range(last + 1):
            word = str(num2words(number, lang=language)).replace("-", " ").lower()
            found |= {word: number, word.replace(" and ", " "): number} if word not in _OTHER_WORDS else {}
    ordinals = ((num2words(at, to="ordinal"), num2words(at, to="ordinal_num")) for at in range(1, 32) if at != 2)
    return {word: str(number) for word, number in found.items()} | dict(ordinals)


def _with_digits(found: re.Match[str]) -> str:
    """The run of words with those of numbers in digits, of several the longest."""
    words, known, out = re.split(r"([-\s])", found[0]), _number_words(), list[str]()
    at = 0
    while at < len(words):
        for end in range(len(words), at, -2):
            number = known.get("".join(words[at:end]).replace("-", " ").lower())
            if number is not None:
                out.append(number)
                break
        else:
            end = at + 1
            out.append(words[at])
        out += words[end : end + 1]
        at = end + 1
    return "".join(out)


@lru_cache(maxsize=256)
def quantities(text: str) -> tuple[Quantity, ...]:
    """The numbers in a `plain` text, in order; those of one length such as "1 h 30 min" as one."""
    found = [*_clocks(text), *_dates(text)]
    taken = [(each.begin, each.end) for each in found]
    for match in _NUMBER.finditer(text):
        if not any(begin < match.end() and match.start("digits") < end for begin, end in taken):
            found.append(_quantity(text, match))
    joined = list[Quantity]()
    for each in sorted(found, key=lambda each: each.begin):
        last = joined[-1] if joined else each
        is_more = () != last.dimension == each.dimension and last.factor > each.factor
        if is_more and re.fullmatch(r"\s?(?:and |et |und |y )?", text[last.end : each.begin]):
            number = max(last.numbers) * last.factor + max(each.numbers) * each.factor
            joined[-1] = Quantity(frozenset({number}), Fraction(1), last.dimension, last.begin, each.end)
        else:
            joined.append(each)
    return tuple(joined)


def _clocks(text: str) -> Iterator[Quantity]:
    for found in _CLOCK.finditer(text):
        hours, minutes = int(found[1] or found[4]), int(found[2] or found[5] or 0)
        yield _time(hours, minutes, (found["part"] or "").lower(), found)
    for found in _PAST.finditer(text):
        minutes = {"half": 30, "quarter": 15}.get(found[1].lower()) or int(found[1].split()[0])
        part = {"morning": "a", None: ""}.get(found[4], "p")
        past = found[2].lower() == "past"
        yield _time(int(found[3]) - (not past), minutes if past else 60 - minutes, part, found)


def _dates(text: str) -> Iterator[Quantity]:
    for found in (match for pattern in _DATES for match in pattern.finditer(text)):
        names = found.groupdict()
        months = [at for at, forms in enumerate(_MONTHS, 1) if (names.get("name") or "-").lower() in forms.split("|")]
        number = Fraction(
            10**4 * int(found["year"]) + 100 * (months or [int(names.get("month") or 0)])[0] + int(found["day"])
        )
        yield Quantity(frozenset({number}), Fraction(1), (("date", 1),), *found.span())


def _time(hours: int, minutes: int, part: str, found: re.Match[str]) -> Quantity:
    of_day = [hours % 12 + 12 * (part == "p")] if part else [hours] if hours > 12 else [hours, hours + 12]
    numbers = frozenset(Fraction(60 * each + minutes) for each in of_day)
    return Quantity(numbers, Fraction(1), (("clock", 1),), found.start(), found.end())


def _quantity(text: str, found: re.Match[str]) -> Quantity:
    numbers = {_raised(number, found) for number in _readings(found["digits"])}
    scale, end = _scale(text, found.end(), bool(found["currency"]))
    if re.match("[-−]|minus|neg", (found["sign"] or "").lower()):
        scale = -scale
    factor, dimension, end = _unit(text, end)
    if found["currency"]:
        factor, dimension = Fraction(1), ((_UNITS[found["currency"].lower()][0], 1),)
    begin = min(found.start(group) for group in ("currency", "sign", "whole", "digits") if found[group])
    decimals = len(re.split("[.,]", found["digits"])[-1]) if re.search("[.,]", found["digits"]) else 0
    return Quantity(frozenset(number * scale for number in numbers), factor, dimension, begin, end, decimals)


def _raised(number: Fraction, found: re.Match[str]) -> Fraction:
    """The number with its fraction and powers; powers beyond any float are left out."""
    number = number / int(found["below"]) if int(found["below"] or 0) else number
    number += int(found["whole"] or 0)
    ten, exponent = int(found["e"] or found["ten"] or 0), int(found["exponent"] or 1)
    number *= Fraction(10) ** ten if abs(ten) < 400 else 1
    return number**exponent if number and abs(exponent) < 100 else number


def _scale(text: str, at: int, is_money: bool) -> tuple[int, int]:
    """What the magnitudes at a place multiply by, and where they end; "M" and "B" are some only of money."""
    scale = 1
    while found := _MAGNITUDE.match(text, at):
        word = (found["word"] or found["sign"] or found["other"]).lower()
        if found["sign"] and word != "k" and not is_money:
            break
        scale, at = scale * _MAGNITUDES[word], found.end()
    return scale, at


def _unit(text: str, at: int) -> tuple[Fraction, Dimension, int]:
    factor, powers, sign, end = Fraction(1), dict[str, int](), 1, at
    opening = re.compile(r"[\s-]?").match(text, at)
    at = opening.end() if opening else at
    for first in (True, False, False):
        found = _UNIT.match(text, at) or _UNIT.match(text.lower(), at)
        if found is None:
            break
        base, size = _UNITS[found["name"]]
        square = (found["square"] or "").strip()
        power = int(found["power"] or found["digit"] or {"": 1, "square": 2, "quadrat": 2}.get(square, 3))
        factor *= size ** (sign * power)
        powers[base] = powers.get(base, 0) + sign * power
        end = found.end()
        per = _PER.match(text, end)
        if per is None or not first:
            break
        at, sign = per.end(), -1
    return factor, tuple(sorted(powers.items())), end


def _readings(digits: str) -> set[Fraction]:
    """The numbers that digits with separators may be: "1.200" is 1200 or 1.2, "3,125" 3125 or 3.125, "3,5" 3.5."""
    digits = re.sub(r"['\s  \u202f]", "", digits)
    marks = re.sub(r"\d", "", digits)
    last = marks[-1:]
    if len(set(marks)) > 1:
        return {Fraction(digits.replace("," if last == "." else ".", "").replace(last, "."))}
    if len(marks) > 1:
        return {Fraction(digits.replace(last, ""))}
    if not last:
        return {Fraction(digits)}
    whole, _, behind = digits.partition(last)
    readings = {Fraction(f"{whole or 0}.{behind}")}
    if len(behind) == 3 and whole.strip("0"):
        grouped = Fraction(whole + behind)
        return {grouped} if last == "," and behind.endswith("0") else {grouped, *readings}
    return readings


def is_range(text: str, found: Sequence[Quantity]) -> bool:
    """Whether two of the numbers are the ends of a range or alternatives, as in "10–20", "3 or 4", "2 to 3"."""
    return any(_RANGE.fullmatch(text[first.end : second.begin]) is not None for first, second in pairwise(found))
