"""What kind of reference a text is, for the table of `dapo data check`."""

from __future__ import annotations

import re

from dapo.data.closed_forms import NoClosedForm, parse
from dapo.data.references import plain_answer

MAX_ANSWER_CHARS = 1000
INTEGER = re.compile(r"[+-]?\d+")
DECIMAL = re.compile(r"[+-]?\d*\.\d+")
CHOICE = re.compile(r"\(?[A-E]\)?|\\text(?:bf)?\{\(?[A-E]\)?\}")
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|textrm)\b")
NOT_TEXT = re.compile(r"[^A-Za-z一-鿿 ,.'{}()-]|\b[A-Za-z]\b")
COMMA = re.compile(r"[+-]?\d+,(?!\d{3}$)\d+")
LIST = re.compile(r",|\\cup|\\cap|\\infty|\\begin\{.?matrix\}|\\pm")


def may_be_decimal(answer: str) -> bool:
    """12,5: a list of two numbers, or 12.5 as much of Europe writes it; 12,500 is a number with a separator."""
    return COMMA.fullmatch(plain_answer(answer)) is not None


def answer_type(answer: str) -> str:
    """integer, decimal, fraction, closed form (roots, π), choice, list (tuple, interval), text, expression, long."""
    text = plain_answer(answer)
    if len(text) > MAX_ANSWER_CHARS:
        return "long"
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
        return "expression" if NOT_TEXT.search(TEXT_COMMAND.sub("", text)) else "text"
    if value is None:
        return "closed form"
    return "integer" if value.denominator == 1 else "fraction"
