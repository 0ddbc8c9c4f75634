"""What kind of reference a text is, for the table of `dapo data check`."""

from __future__ import annotations

import re

from dapo.data.closed_forms import NoClosedForm, parse
from dapo.data.integer_answers import plain_answer

INTEGER = re.compile(r"[+-]?\d+")
DECIMAL = re.compile(r"[+-]?\d*\.\d+")
CHOICE = re.compile(r"\(?[A-E]\)?|\\text(?:bf)?\{\(?[A-E]\)?\}")
TEXT = re.compile(r"(?:\\(?:text|mbox|textbf|textrm)\s*\{[^{}]*\}|[A-Za-z]{2,}[A-Za-z ,.'-]*|[一-鿿]+)+")
LIST = re.compile(r",|\\cup|\\cap|\\infty|\\begin\{.?matrix\}|\\pm")


def answer_type(answer: str) -> str:
    """integer, decimal, fraction, closed form (roots, π), choice, list (tuple, interval, set), text or expression."""
    text = plain_answer(answer)
    if INTEGER.fullmatch(text):
        return "integer"
    if DECIMAL.fullmatch(text):
        return "decimal"
    if CHOICE.fullmatch(text):
        return "choice"
    try:
        value = parse(text).as_rational()
    except NoClosedForm:
        if LIST.search(text):
            return "list"
        return "text" if TEXT.fullmatch(text) else "expression"
    if value is None:
        return "closed form"
    return "integer" if value.denominator == 1 else "fraction"
