"""What a box stands in: `-\\boxed{42}` is −42, `x = \\boxed{42}` is 42, and `\\boxed{42} is wrong` no answer.

Only what changes the value counts: signs, factors, fractions, powers, and words that deny it. Delimiters, bullets,
names (`x =`), units and prose around a box do not.
"""

from __future__ import annotations

import re

from dapo.rewards.math.typography import BREAK
from dapo.rewards.math.vocabulary import UNIT_LETTERS

_REACH = 400  # characters looked at on either side, within the line
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
_DISOWNED = re.compile(
    r"[\s,(:;-]*(?:(?:which|that|this|it|but|and)\s+)*"
    r"(?:(?:is|was|seems|looks|would be|must be|(?:is|was)n'?t|ain'?t|can(?:not|'?t) be)\s+)?"
    r"(?:(?:clearly|obviously|definitely|really|also|still|probably)\s+)*"
    r"(?:(?:wrong|incorrect|false|invalid|impossible)\b"
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
    reach = _reach_left(left, is_display=is_display)
    denied = _DISOWNED.match(_CLOSING.sub("", right, count=1))
    if reach is None and denied is None and not _continues(right):
        return content
    reach = len(left) if reach is None else reach
    begin = max((match.end() for match in _START.finditer(left, 0, reach)), default=0)
    group = (
        f"  {content}" if left[-1:].isdigit() and content[:1].isdigit() else f"{{{content}}}"
    )  # 4\\boxed{2}: no product
    if denied is not None:
        return f"{left[begin:]}{group} {denied[0]}"
    skipped = _CLOSING.match(right)
    assert skipped is not None, "the pattern matches nothing as well"
    end = _STOP.search(right, 0 if _is_open(left) else skipped.end())
    return f"{left[begin:]}{group}{right[: end.start() if end else len(right)]}"


def _reach_left(left: str, *, is_display: bool) -> int | None:
    """Where what changes the box's value ends, left of it; None where nothing does."""
    if (macro := _open_macro(left)) is not None:
        return macro
    opening = _OPENING.search(left)
    assert opening is not None, "the pattern matches nothing as well"
    bare, between = left[: opening.start()], opening[0]
    if _BEFORE.search(bare) or (_MINUS.search(bare) and _is_minus(bare, between, is_display=is_display)):
        return len(bare)
    if _STRICT_BOUND.search(bare) and not _TAG.search(bare):
        return len(bare)
    if not between and _GLUED_BEFORE.search(bare):
        return len(bare)
    return len(bare) if between in ("(", "\\left(") and _CALL.search(bare) else None


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


def _continues(right: str) -> bool:
    """Whether a power, an operation or another factor follows."""
    skipped = _CLOSING.match(right)
    assert skipped is not None, "the pattern matches nothing as well"
    between, rest = skipped[0], right[skipped.end() :]
    if rest.startswith("^"):
        return _HARMLESS_POWER.match(rest) is None
    if not between and _GLUED_AFTER.match(rest):
        return True
    operator = _OPERATOR.match(rest)
    operand = _OPERAND.match(rest, operator.end()) if operator else None
    if operator is None or operand is None:
        return False
    if operator["sign"] == "*" or (operator["sign"] in "-\u2212" and operator["gap"] and between.strip()):
        return operator["sign"] == "*" and not between and operand[1] is None
    return not (operator["sign"] == "/" and operand[1] is not None and operand[1] in UNIT_LETTERS | {"d"})
