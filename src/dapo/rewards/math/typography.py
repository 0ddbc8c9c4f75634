"""Spellings that carry no meaning: Unicode look-alikes, Markdown, LaTeX spacing, end-of-text tokens.

Everything here keeps values apart: a space, a delimiter or a markup sign between two digits stays a break between two
numbers, and nothing is ever cut out from between digits.
"""

from __future__ import annotations

import re
import unicodedata

BREAK = "\x1f"  # where a math delimiter or a currency sign stood: never joins what stands left and right of it

# Full-width forms are how East Asian keyboards type ASCII. Digits of other scripts are left alone, and so unread.
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
# Bold, script and double-struck letters and digits are a typeface: U+1D7D2 is a bold 4.
_MATH_TYPEFACE = {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0x1D400, 0x1D800)}
_LOOKALIKES = {
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u3000\t"), " "),
    **dict.fromkeys(map(ord, "\u2009\u202f\u2005\u2006\u2004"), "\u2009"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u2033"), '"'),
    **dict.fromkeys(map(ord, "\u2018\u2019\u2032"), "'"),
    **dict.fromkeys(map(ord, "\u00d7\u22c5\u00b7\u2217\u2219"), " * "),
    ord("\u00f7"): "/",
    ord("\u2044"): "/",
    ord("\u2215"): "/",
    ord("\u2236"): ":",
    ord("\u221a"): "\\sqrt ",
    ord("\u221b"): "\\sqrt[3] ",
    ord("\u221c"): "\\sqrt[4] ",
    ord("\u03c0"): "\\pi ",
    ord("\u221e"): "\\infty ",
    ord("\u2264"): "\\le ",
    ord("\u2265"): "\\ge ",
    ord("\u2260"): "\\ne ",
    ord("\u2248"): "\\approx ",
    ord("\u2243"): "\\approx ",
    ord("\u2245"): "\\approx ",
    ord("\u223c"): "\\approx ",
    ord("\u00b1"): "\\pm ",
    ord("\u222a"): "\\cup ",
    ord("\u2229"): "\\cap ",
    ord("\u2208"): "\\in ",
    ord("\u00b0"): "^\\circ ",
    ord("\u03b8"): "\\theta ",
    ord("\u03b1"): "\\alpha ",
    ord("\u03b2"): "\\beta ",
    ord("\u2192"): "\\to ",
    ord("\u21d2"): "\\Rightarrow ",
    ord("\u211d"): "\\mathbb{R}",
    ord("\u2205"): "\\emptyset ",
    ord("\u3002"): ".",
    ord("\u3001"): ",",
}
_TYPEFACES: dict[int, int | str] = {**_FULL_WIDTH, **_MATH_TYPEFACE}
_INVISIBLE = re.compile("[\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e]+")
_SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUPERSCRIPT_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_SUBSCRIPT_RUN = re.compile("(?<=[\\w)}])(?<![\u2080-\u2089])[\u2080-\u2089]+")
_VULGAR_FRACTION = re.compile("([0-9]?) ?([\u00bc-\u00be\u2150-\u215e])")

# Text that shows in another order than it is stored: what a reader sees is not what we would read.
BIDIRECTIONAL = re.compile("[\u202a-\u202e\u2066-\u2069\u200f\u061c]")

_END_WINDOW = 400
_END_SIGNS = (">", "]")
END_TOKENS = re.compile(
    r"(?:\s|</s>|<eos>|<\|[A-Za-z0-9_]{1,40}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>|<end_of_turn>|</?answer>|</?think>|<pad>|<unk>|<s>|\[(?:EOS|PAD|SEP)\]|\[/?INST\])+\Z"
)

_EMPHASIS = re.compile(
    r"(?<![\w)}\]*])(\*{1,3}|_{1,3}|`{1,3})(?=[^\s*_`])([^*_`\n]{1,400}?)(?<=[^\s*_`])\1(?![\w({\\*])"
)
_HTML = re.compile(r"</?(?:b|i|u|em|strong|p|br|code|span|center|answer)\s*/?>", re.IGNORECASE)
_DELIMITERS = re.compile(r"\$+|\\\(|\\\)|\\\[|\\\]|[€£¥₹¢]")
_CURRENCY = re.compile(r"\\\$|\\(?:pounds|textsterling|euro|texteuro|textdollar|cent|textcent|yen)(?![A-Za-z])")
_SPACING = re.compile(
    r"\\(?:quad|qquad|displaystyle|textstyle|limits|nolimits|hfill|noindent|normalsize|small|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
)
_SIZING = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|middle)(?![A-Za-z])\s*(\.(?!\d))?"
)
_SPACE_ARGUMENT = re.compile(r"\\(?:hspace|vspace|phantom|hphantom|label|tag|color|textcolor)\*?\{[^{}]{0,80}\}")
_REPEATING = re.compile(r"(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\{(\d{1,30})\}")
_ABBREVIATIONS = re.compile(r"(?<![A-Za-z])(?:i\.\s?e\.|e\.\s?g\.|viz\.),?")
_TEMPERATURE = re.compile(
    r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:\\(?:text|mathrm|textrm|rm)\s*\{\s*([CFK])\s*\}|([CFK])(?![A-Za-z]))"
)
_SCALES = {"C": " celsius ", "F": " fahrenheit ", "K": " kelvin "}
_HALF_OF_DAY = re.compile(
    r"(?<=\d)\s*(?:([AaPp])\.\s?[Mm](?:\.|(?![A-Za-z]))|([AP])M(?![A-Za-z]))|(?<=:\d\d)\s*([ap])m(?![A-Za-z])"
)
# `5C2`, `{}_5C_2`, `{}^5C_2`
_COMBINATIONS = re.compile(
    r"(?<![\w.^{}])(\d{1,6})C(\d{1,6})(?![\w.])|(?<![\w}])(?:\{\s*\})?[_^]\{?(\d{1,6})\}?\s*C_\{?(\d{1,6})\}?(?!\w)"
)
_PER_CENT = re.compile(r"\bper[ -]cent\b", re.IGNORECASE)
_HALVES = {"a": " antemeridian ", "p": " postmeridian "}
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_TILDE = re.compile(r"(?<![\w}\\])~(?=\s*[\d.$\x1f])")
_EXTREMUM = re.compile(r"(?<![A-Za-z])([A-Za-z])_\{\s*(?:\\(?:text|mathrm|rm)\b\s*\{?|\\)?\s*(max|min)\s*\}{1,2}")
_SPACE_ENTITY = re.compile(r"&nbsp;|&thinsp;")


def without_end_tokens(text: str) -> str:
    """The text without trailing white space and special tokens such as `<|im_end|>`."""
    stop = len(text.rstrip())
    while text[stop - 1 : stop] in _END_SIGNS and stop > 0:
        tail = text[max(0, stop - _END_WINDOW) : stop]
        n_removed = len(tail) - len(END_TOKENS.sub("", tail))
        if n_removed == 0:
            break
        stop -= n_removed
    return text[:stop]


def plain(text: str) -> str:
    """One spelling for each sign: ASCII digits and signs, no Markdown, no sizing, BREAK for every math delimiter."""
    if text.isascii() and text.isalnum() and "C" not in text:
        return text
    text = _plain_signs(text) if not text.isascii() else text.replace("\t", " ")
    if "C" in text:
        text = _COMBINATIONS.sub(lambda m: f"\\binom{{{m[1] or m[3]}}}{{{m[2] or m[4]}}}", text)
    if "circ" in text:
        text = _TEMPERATURE.sub(lambda m: _SCALES[m[1] or m[2]], text)
    if "m" in text or "M" in text:
        text = _HALF_OF_DAY.sub(lambda m: _HALVES[(m[1] or m[2] or m[3]).lower()], text)
    text = _EXTREMUM.sub(lambda m: f"{m[1]}_{{{'M' if m[2] == 'max' else 'm'}}}", text)
    text = _TIMES_TEN.sub(" * ", text)
    text = _REPEATING.sub(_as_fraction, text)
    text = _ABBREVIATIONS.sub(BREAK, text)
    text = _TILDE.sub(r"\\approx ", text)
    if "ent" in text:
        text = _PER_CENT.sub("percent", text)
    text = _HTML.sub(BREAK, text)
    text = _SPACE_ENTITY.sub("\u2009", text)
    for _ in range(3):  # bold inside italic inside code
        smaller = _EMPHASIS.sub(BREAK + r"\2" + BREAK, text)
        if smaller == text:
            break
        text = smaller
    text = text.replace("\\$", BREAK)
    text = _CURRENCY.sub(BREAK, text)
    text = _DELIMITERS.sub(BREAK, text)
    text = _SPACE_ARGUMENT.sub(" ", text)
    text = _SPACING.sub(" ", text)
    text = _SIZING.sub("", text)
    text = text.replace("\\!", "").replace("{,}", "\\,")
    return text


def _plain_signs(text: str) -> str:
    """ASCII, or a macro, for signs that look like it."""
    text = _INVISIBLE.sub(_seen, text.translate(_TYPEFACES)).translate(_LOOKALIKES)
    text = _VULGAR_FRACTION.sub(lambda m: f"{m[1]} {_fraction(m[2])}" if m[1] else f" {_fraction(m[2])} ", text)
    text = _SUBSCRIPT_RUN.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    return _SUPERSCRIPT_RUN.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)


def _seen(match: re.Match[str]) -> str:
    """Nothing for an invisible sign; between two digits it stays, and no number is read across it."""
    text, (start, stop) = match.string, match.span()
    return match[0] if text[max(0, start - 1) : start].isdigit() and text[stop : stop + 1].isdigit() else ""


def _fraction(sign: str) -> str:
    """The one sign \u215c as 3/8."""
    return unicodedata.normalize("NFKC", sign).replace("\u2044", "/")


def _as_fraction(match: re.Match[str]) -> str:
    """`0.1\\overline{6}` as a fraction: (16 − 1)/90."""
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    top = int(whole + fixed + repeated) - int(whole + fixed)
    return f"\\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def trimmed(text: str) -> str:
    """The text without the signs that may stand around an answer: white space, emphasis, quotes, a final period."""
    previous = None
    while previous != text:
        previous = text
        text = text.strip(" \n\r\v\f" + BREAK + '\u2009`"')
        text = text.lstrip("*_:;,")
        text = text.rstrip("*_.,;:")
        if text.endswith("!") and not _is_factorial(text):
            text = text[:-1]
        if text.endswith("\\"):
            text = text.rstrip("\\")
    return text


def _is_factorial(text: str) -> bool:
    """Whether the final `!` may belong to a value: `5!`, `5!!`, `(2 + 3)!`; not after markup, a box or words alone."""
    value = text.rstrip("! ")
    if text.startswith(" ", len(value)):  # `5 !` exclaims
        return False
    if value.endswith("}"):
        return "\\boxed" not in value and "\\fbox" not in value
    last = value[-1:]
    return last in (")", "]", "|") or (last.isalnum() and not value.strip().isalpha())
