"""References as text: what of their spelling does not matter, and when two of them are the same answer."""

from __future__ import annotations

import re

from dapo.data.closed_forms import NoClosedForm, parse

MAX_CHARS = 1000  # of a reference whose spelling is looked at
INTEGER = re.compile(r"[+-]?[0-9]+")
BOLD = re.compile(r"\\(?:mathbf|boldsymbol|textbf)\s*\{([^{}]*)\}")
UNITS = (
    "units|unit|square units|cubic units|inches|inch|feet|foot|ft|yards|miles|cm|mm|km|m|meters|degrees|hours|minutes|"
    "seconds|days|years|dollars|cents|students|people|ways|square inches|square feet|square meters|square cm"
)
UNIT = re.compile(rf"\s*\\(?:text|mbox|mathrm|textrm)\s*\{{\s*(?:{UNITS})\s*\}}(?:\^\{{?[23]\}}?)?\s*$")
DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$|°\s*$")
GROUPED = re.compile(r"-?[0-9]{1,3}(?:(?:\{,\}|,\\!|,)[0-9]{3})+(?:\.[0-9]+)?")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|,)(?=\d{3}(?!\d))")


def plain_answer(answer: str) -> str:
    """The reference without what leaves its value alone: dollar signs, bold, degrees, unit words, thousands commas."""
    if len(answer) > MAX_CHARS:
        return answer
    text = answer.strip().strip("$").strip()
    text = text.removeprefix("\\$").removesuffix(".")
    text = UNIT.sub("", DEGREES.sub("", BOLD.sub(r"\1", text)))
    if "," in text and GROUPED.fullmatch(text):
        text = THOUSANDS.sub("", text)
    return text


def answer_key(answer: str) -> str:
    """Equal for references that are certainly the same answer: by exact value where there is one, else by spelling."""
    text = " ".join(answer.replace("−", "-").split())
    if INTEGER.fullmatch(text):
        digits = text.lstrip("+-").lstrip("0") or "0"
        return f"-{digits}" if text.startswith("-") and digits != "0" else digits
    try:
        value = parse(plain_answer(text))
    except NoClosedForm:
        return text
    number = value.as_rational()
    return str(value.terms) if number is None else str(number)
