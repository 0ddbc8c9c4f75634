"""The rule of the released DAPO run, to the last quirk: for reproducing it, never for judging well.

It looks at the last 300 characters only, deletes unit words anywhere (`4units2` becomes `42`), keeps what follows the
last `=` (`41=42` becomes `42`), drops all commas between digits, and compares strings. `rule` is the project's own.
"""

from __future__ import annotations

import re

from dapo.rewards.decision import Decision
from dapo.types import Verdict

_WINDOW = 300
_STATED = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NOT_STATED = "[INVALID]"

# In this order: a later rule sees what an earlier one left.
_REWRITES = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_DELETED_WORDS = """
    square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples
    """
_DELETED_TEX = (
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_FIRST_MATH = re.compile(r".*?\$(.*?)\$.*")
_UNWRAPPED = tuple(re.compile(rf"\\{macro}\{{(.*?)\}}") for macro in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def normalised(answer: str) -> str:
    """The string both sides are compared as."""
    text = answer.rpartition("=")[2]
    for before, after in _REWRITES:
        text = text.replace(before, after)
    for deleted in (*_DELETED_WORDS.split(), *_DELETED_TEX):
        text = text.replace(deleted, "")
    text = _FIRST_MATH.sub(r"$\1$", text)
    for macro in _UNWRAPPED:
        text = macro.sub(r"\1", text)
    text = _BOX.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def decide(response: str, answer: str) -> Decision:
    """CORRECT or WRONG as the released script scores +1 or −1; UNPARSEABLE where it would compare "[INVALID]"."""
    stated = _STATED.findall(response[-_WINDOW:])
    extracted = normalised(stated[-1] if stated else _NOT_STATED)
    if extracted == normalised(answer):
        return Decision(Verdict.CORRECT, extracted)
    if not stated:
        return Decision(Verdict.UNPARSEABLE, None, f'no "Answer:" in the last {_WINDOW} characters')
    return Decision(Verdict.WRONG, extracted)
