"""What a box stands in: `-\\boxed{42}` is −42, `x = \\boxed{42}` is 42, and `\\boxed{42} is wrong` no answer.

Only what changes the value counts: signs, factors, fractions, powers, other digits, scales (`million`), bases, and
words that deny it or calculate with it. Delimiters, bullets, names (`x =`), units and prose around a box do not.
"""

from __future__ import annotations

import re

from dapo.rewards.math.typography import BREAK
from dapo.rewards.math.vocabulary import SCALES, TRAILING, UNIT_LETTERS, number_in_words

_REACH = 400  # characters looked at on either side, within the line
_NEAR = 80  # what stands right before it is found among so many
_MARKUP = (
    rf"\\\$|\$|\\[()\[\],;:! ]|{BREAK}|\*\*|__|`|~"
    r"|\\(?:quad|qquad|displaystyle|textstyle|left|right|big[lr]?|Big[lr]?)(?![A-Za-z])"
)
_OPENING = re.compile(rf"(?:\s|{_MARKUP}|\(|\[|\\color\{{[^{{}}]*\}})*\Z")
_CLOSING = re.compile(rf"(?:\s|{_MARKUP}|\)|\])*")
_DENIALS = (
    r"(?:not|never|neither|nor|except|cannot be|can'?t be|(?:is|was|are|ai)n'?t|hardly|barely|minus|negative|neg|plus"
    r"|times|twice|half|double|opposite)"
)
_BEFORE = re.compile(
    r"(?:[+/\u00b7\u00d7\u00f7\u00b1^\u2260]|!=|\\not\s*=|[\d)}]\s*(?<!\*)\*"
    r"|\\(?:cdot|times|div|pm|mp|ast|sqrt(?:\[[^\[\]]*\])?|ne|neq|not|neg|lnot|pi|sin|cos|tan|ln|log|exp)"
    rf"|(?<![A-Za-z\\]){_DENIALS})\Z",
    re.IGNORECASE,
)
# `n > \\boxed{42}` says that n is not 42; no arrow, tag or quotation mark, and no comparison of two values.
_STRICT_BOUND = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z](?:_(?:\w|\{\w+\}))?'?[\s)|}]*(?:(?<![-=<|])>|<|\\(?:gt|lt|gg|ll)(?![A-Za-z]))\Z"
)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>\Z")
# `fewer than \\boxed{42}` too; but no less than 42 is how a least value is given.
_BOUND_IN_WORDS = re.compile(
    r"(?<![A-Za-z])(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower|rather|other)\s+than\Z",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"(?:\bno|not|n't|\bnever|\bnothing)(?:\s+be)?\s+\Z", re.IGNORECASE)
_FUNCTION_OF = re.compile(
    r"(?<![A-Za-z])(?:(?:square|cube|cubic|fourth)\s+root|square|cube|reciprocal|inverse|factorial|negative|half|logarithm)"
    r"\s+of\Z",
    re.IGNORECASE,
)
_DIGITS_BEFORE = re.compile(r"(?:\d|\A|[\s=(])\.\Z")  # 0.\\boxed{42}
_THOUSANDS_BEFORE = re.compile(r"(?<![\d.])\d{1,3},\Z")
# `1:\\boxed{42}`; no `Step 1:`, and no colon of prose, which has a space after it alone.
_RATIO_BEFORE = re.compile(r"(?:\A|[=$({:]|\b(?:is|are|of))\s*(\d[\d.]*(?:\s+:\s+|:))\Z")
_GLUED_BEFORE = re.compile(r"(?:\d|(?<![A-Za-z\\])[A-Za-z])\Z")
_CALL = re.compile(r"(?:\d|(?<![A-Za-z])(?:[A-Za-z]{2,}|[fghFGHP]))\Z")
_MINUS = re.compile(r"[-\u2212\u2013]\Z")
_WORD = re.compile(r"(?<![A-Za-z\\])[^\W\d_]{2,}[*_\"')]*\Z")
_GROUP = r"(?:\{(?:[^{}]|\{[^{}]*\})*\})"
_MACRO = re.compile(rf"(?:\^|\\(?:[dtc]?frac|sqrt|[dt]?binom|[bx]?cancel|sout)\s*(?:\[[^\[\]]*\])?{_GROUP}?)\s*\Z")
_HARMLESS_POWER = re.compile(
    r"\^\s*\{?\s*(?:\\circ|\\degree|\\prime|\\ast|\*|'|o(?![A-Za-z])|(?:\\(?:text|mathrm|textrm)\s*\{\s*)?(?:st|nd|rd|th)\b)"
)
_OPERATOR = re.compile(
    r"(?P<sign>[-+/\u2212\u00b7\u00d7\u00f7\u00b1*]|\\(?:cdot|times|div|pm|mp)(?![A-Za-z]))(?P<gap>\s*)"
)
_OPERAND = re.compile(r"\(?\s*(?:\.?\d|\\(?:[dt]?frac|sqrt|pi|binom)(?![A-Za-z])|([B-Zb-z])(?![A-Za-z]))")
_GLUED_AFTER = re.compile(r"\.?\d|,\d{3}|[abeiknpqruvwxyz](?![A-Za-z])|\\(?:pi|sqrt|[dt]?frac)(?![A-Za-z])")
_SCALES = "|".join(sorted({*SCALES, *TRAILING} - {"score", "gross", "mil"}))  # nouns as well
_TEXT = r"(?:\\(?:text|mathrm|textrm|textbf)\s*\{\s*)?"
_SCALED = re.compile(rf"{_TEXT}(\\?%|\u2030|(?:{_SCALES}|percent|per\s?cent|per\s?mille)(?![\w-]))", re.IGNORECASE)
_BASED = re.compile(
    rf"(?:_\{{?\s*{_TEXT}(?:base[\s-]*)?|{_TEXT}[(,]?\s*(?:(?:written\s+)?in\s+)?base[\s-]*[{{$_]*)([A-Za-z]+|\d+)"
    rf"|{_TEXT}\(?(?:in\s+)?(hex|hexadecimal|octal|binary)(?=[\s).,;}}]*\Z|[).,;])",
    re.IGNORECASE,
)
_BASES = {"binary": 2, "octal": 8, "hex": 16, "hexadecimal": 16}
_NUMBER = r"[\s$\\({]*\d"
# `\\boxed{42} less than 100`; not `less than 5 brothers`, and not the comparison `\\boxed{42} is less than 100`.
_CALCULATED = re.compile(
    rf"{_TEXT}(?:(?:more|less|fewer|greater|larger|smaller|higher|lower)\s+than{_NUMBER}[\d.,]*(?!\s*[A-Za-z])"
    rf"|(?:plus|minus|times|over|choose|(?:divided|multiplied)\s+by){_NUMBER}"
    rf"|to{_NUMBER}(?!\d*\s*(?:decimal|significant|d\.?p|s\.?f|places|digits))"
    r"|(?:squared|cubed|factorial)(?!\s*[A-Za-z])"
    r"|to\s+the\s+(?:power|\d+(?:st|nd|rd|th)|second|third|fourth|fifth)\b)",
    re.IGNORECASE,
)
_RATIO_AFTER = re.compile(r":(\s*)(?!00(?!\d))\d")  # 2:00 is two o'clock
_BOUND_AFTER = re.compile(r"(?:[<>]|\\(?:lt|gt|ll|gg)(?![A-Za-z]))\s*[A-Za-z](?![A-Za-z>])")
_DISOWNED = re.compile(
    r"[\s,(:;-]*(?:(?:which|that|this|it|but|and)\s+)*"
    r"(?:(?:is|was|seems|looks|would be|must be|(?:is|was)n'?t|ain'?t|can(?:not|'?t) be)\s+)?"
    r"(?:(?:clearly|obviously|definitely|really|also|still|probably)\s+)*"
    r"(?:(?:wrong|incorrect|false|invalid|impossible)\b"
    r"|(?:an?\s+)?(?:extraneous|rejected|discarded|spurious|inadmissible)(?:\s+(?:root|solution|value|answer))?(?=\s*(?:[).,;!]|\Z))"
    r"|(?:(?<=n't )|(?<=nt )|(?<=not be )|(?<=n't be )|(?<=nt be )|not\s+)"
    r"(?:it\b|right\b|correct\b|true\b|possible\b|valid\b|the\s+(?:(?:right|correct|final)\s+)?(?:answer|value|solution)\b))",
    re.IGNORECASE,
)
_START = re.compile(
    r"(?<![!<>])(?<!\\not)=|\\(?:approx|implies|Rightarrow|rightarrow|to|therefore|iff)(?![A-Za-z])|[-=]>|\u2192|\u21d2"
    rf"|\$|\\[()\[\]]|{BREAK}|[:;&]|[.!?]\s|(?<![A-Za-z])(?:is|are|equals|get|have|so|thus)\s"
)
_STOP = re.compile(
    rf"=|\$|\\[()\[\]]|{BREAK}|[,;]|[.!?](?!\d)|\\(?:approx|implies|Rightarrow|to|quad|qquad)(?![A-Za-z])"
)


def in_context(text: str, start: int, stop: int, content: str) -> str:
    """The content of the box at text[start:stop], or the expression it is part of."""
    left = text[max(0, start - _REACH) : start]
    above, newline, line = left.rpartition("\n")
    left = line if newline else left
    right = text[stop : stop + _REACH].partition("\n")[0]
    is_display = above.rstrip().endswith(("\\[", "$$"))
    reach = _reach_left(left, content, is_display=is_display)
    skipped = _CLOSING.match(right)
    assert skipped is not None, "the pattern matches nothing as well"
    between, rest = skipped[0], right[skipped.end() :]
    denied = _DISOWNED.match(rest) if rest else None
    if reach is None and denied is None:
        if not rest or rest in ".!":
            return content
        if (scaled := _scaled(content, rest)) is not None:
            return scaled
        if not _continues(between, rest):
            return content
    reach = len(left) if reach is None else reach
    begin = max((match.end() for match in _START.finditer(left, 0, reach)), default=0)
    group = f"{{{content}}}"
    if left[-1:] in (".", ",") and content.isdigit():  # 0.\\boxed{42}
        group = content
    elif left[-1:].isdigit() and content[:1].isdigit():  # 4\\boxed{2}: no product
        group = f"  {content}"
    if denied is not None:
        return f"{left[begin:]}{group} {denied[0]}"
    end = _STOP.search(right, 0 if _is_open(left) else skipped.end())
    return f"{left[begin:]}{group}{right[: end.start() if end else len(right)]}"


def _scaled(content: str, rest: str) -> str | None:
    """`\\boxed{42} million`, `\\boxed{42}%`, `\\boxed{42}_8`, with that and nothing of the prose that follows."""
    if scale := _SCALED.match(rest):
        return f"{content} {scale[1]}"
    based = _BASED.match(rest)
    if based is None:
        return None
    base = (based[1] or based[2]).lower()
    number = int(base) if base.isdigit() else _BASES.get(base) or number_in_words([base])
    if number is None and based[0][0] != "_":
        return None  # base of a triangle
    return content if number == 10 else f"{content}_{{{base if number is None else number}}}"


def _reach_left(left: str, content: str, *, is_display: bool) -> int | None:
    """Where what changes the box's value ends, left of it; None where nothing does."""
    if (macro := _open_macro(left)) is not None:
        return macro
    opening = _OPENING.search(left)
    assert opening is not None, "the pattern matches nothing as well"
    bare, between = left[: opening.start()], opening[0]
    near = max(0, len(bare) - _NEAR)
    if _BEFORE.search(bare, near) or (_MINUS.search(bare) and _is_minus(bare, between, is_display=is_display)):
        return len(bare)
    if _STRICT_BOUND.search(bare, near) and not _TAG.search(bare):
        return len(bare)
    if _is_other_in_words(bare):
        return len(bare)
    if ":" in left[-3:] and (ratio := _RATIO_BEFORE.search(left)):
        return ratio.start(1)
    if not between and (_GLUED_BEFORE.search(bare) or _ends_in_digits(bare, content)):
        return len(bare)
    return len(bare) if between in ("(", "\\left(") and _CALL.search(bare) else None


def _is_other_in_words(bare: str) -> bool:
    """`more than \\boxed{42}`, `the square of \\boxed{42}`."""
    if bare.endswith("of"):
        return _FUNCTION_OF.search(bare) is not None
    bound = _BOUND_IN_WORDS.search(bare) if bare.endswith("than") else None
    return bound is not None and _NEGATION.search(bare[max(0, bound.start() - 12) : bound.start()]) is None


def _ends_in_digits(bare: str, content: str) -> bool:
    """`0.\\boxed{42}`, `1,\\boxed{042}`."""
    if bare.endswith("."):
        return _DIGITS_BEFORE.search(bare) is not None
    return bare.endswith(",") and len(content) == 3 and content.isdigit() and bool(_THOUSANDS_BEFORE.search(bare))


def _is_minus(bare: str, between: str, *, is_display: bool) -> bool:
    """A sign, and neither a bullet nor a dash in prose."""
    before, is_spaced = bare[:-1], between[:1].isspace()
    if not before.strip(" \t>*"):
        return is_display or not is_spaced
    if before.endswith("-"):
        return False
    return not (_WORD.search(before.rstrip()) and before[-1:].isspace() == is_spaced)


def _open_macro(left: str) -> int | None:
    """Where a fraction, root, power or crossing-out starts whose braces hold the box."""
    level = 0
    for index in range(len(left) - 1, -1, -1):
        if left[index] in "{}" and left[index - 1 : index] != "\\":
            level += 1 if left[index] == "}" else -1
            if level < 0:
                level = 0
                if macro := _MACRO.search(left, 0, index):
                    return macro.start()
    return None


def _is_open(left: str) -> bool:
    return left.count("{") > left.count("}")


def _continues(between: str, rest: str) -> bool:
    """Whether a power, an operation, a bound or another factor follows."""
    if rest.startswith("^"):
        return _HARMLESS_POWER.match(rest) is None
    if not between and _GLUED_AFTER.match(rest):
        return True
    if _CALCULATED.match(rest) or _BOUND_AFTER.match(rest):
        return True
    if ratio := _RATIO_AFTER.match(rest):  # a colon of prose has a space after it alone
        return not ratio[1] or between[-1:].isspace()
    operator = _OPERATOR.match(rest)
    operand = _OPERAND.match(rest, operator.end()) if operator else None
    if operator is None or operand is None:
        return False
    if operator["sign"] == "*" or (operator["sign"] in "-\u2212" and operator["gap"] and between.strip()):
        return operator["sign"] == "*" and not between and operand[1] is None
    return not (operator["sign"] == "/" and operand[1] is not None and operand[1] in UNIT_LETTERS | {"d"})
