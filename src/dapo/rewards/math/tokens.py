"""An answer split into numbers, symbols, words and signs. Commas group digits only in thousands positions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from dapo.rewards.limits import MAX_DEPTH, MAX_DIGITS, MAX_TOKENS
from dapo.rewards.math.typography import BREAK
from dapo.rewards.math.vocabulary import (
    ACCENTS,
    FUNCTIONS,
    GREEK,
    IGNORED_COMMANDS,
    MATRICES,
    RELATIONS,
    SHORT_WORDS,
    STYLE_MACROS,
    TEXT_MACROS,
    UNIT_CAPITALS,
    UNIT_LETTERS,
)


class NotationError(ValueError):
    """The text is not one mathematical statement that we can read."""


class UnknownNotationError(NotationError):
    """A macro we do not know: another reader may."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # NUM SYM WORD FUNC CMD OP REL OPEN CLOSE SEP BREAK
    text: str
    spaced: bool = False  # white space stood before it
    value: Fraction | None = None


_NUMBER = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)", re.ASCII)
_PLAIN_GROUPS = re.compile(r"\d+(?:,\d+)+", re.ASCII)
_WELL_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+", re.ASCII)
_TEX_GROUPED = re.compile(r"[1-9]\d{0,2}(?:(?:\\[,;: ]|,\\,|~|\u2009|'|\\thinspace )\d{3})+(?!\d)", re.ASCII)
_SPACE_GROUPED = re.compile(r"[1-9]\d{0,2}(?: \d{3})+(?! ?\d)", re.ASCII)
# `1_000`, `1_234_567`; `1_234` may be a 1 to the base 234.
_LINE_GROUPED = re.compile(r"[1-9]\d{0,2}(?:_0\d\d|(?:_\d{3}){2,})(?:_\d{3})*(?![\d_])", re.ASCII)
_GROUPING = (",", "\\", "~", "\u2009", "'", " ", "_")  # what may stand between two groups
_FRACTION = re.compile(r"\.\d+", re.ASCII)
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,6})(?![\dA-Za-z.])", re.ASCII)
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*")
_LETTERS = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_DIFFERENCE = re.compile(r"[A-Za-z](?:-[A-Za-z])+")
_SPACE = re.compile(r"(?:\s|\u2009|~|\\[ ,;:>])+")


def tokens(text: str, *, commas: str = "thousands", letters: str = "symbols") -> list[Token]:
    """Split cleaned text. `commas="list"`: a plain comma groups no digits; `letters="words"`: `ab` is a word."""
    found: list[Token] = []
    _scan(text, found, commas=commas, letters=letters, in_text=False, depth=0)
    return found


def _scan(text: str, found: list[Token], *, commas: str, letters: str, in_text: bool, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise NotationError("nested too deeply")
    position, n_open, spaced, end = 0, 0, False, len(text)

    def add(kind: str, value_text: str, value: Fraction | None = None) -> None:
        if len(found) >= MAX_TOKENS:
            raise NotationError("too many signs for an answer")
        found.append(Token(kind, value_text, spaced, value))

    while position < end:
        if space := _SPACE.match(text, position):
            spaced, position = True, space.end()
            continue
        char = text[position]
        if char.isascii() and (char.isdigit() or (char == "." and _FRACTION.match(text, position))):
            number, position = _number(text, position, grouped=commas == "thousands" and n_open == 0)
            add("NUM", number[0], number[1])
        elif char == BREAK:
            add("BREAK", char)
            position += 1
        elif char == "\\":
            command = _COMMAND.match(text, position)
            if command is None:
                position = _escaped(text, position, add)
                n_open += {"\\{": 1, "\\}": -1}.get(found[-1].text, 0) if found else 0
            elif command[1] in TEXT_MACROS or command[1] in STYLE_MACROS:
                inner, position = _argument(text, command.end())
                add("BREAK", BREAK)
                as_text = command[1] in TEXT_MACROS
                _scan(
                    inner,
                    found,
                    commas=commas,
                    letters="words" if as_text else letters,
                    in_text=as_text,
                    depth=depth + 1,
                )
                add("BREAK", BREAK)
            elif command[1] in ("begin", "end"):
                environment, position = _argument(text, command.end())
                if environment not in MATRICES:
                    raise UnknownNotationError(f"\\begin{{{environment}}} is not read")
                add("CMD", f"{command[1]} determinant" if environment == "vmatrix" else command[1])
            else:
                position = command.end()
                _command(command[1], add)
        elif match := _LETTERS.match(text, position):
            run = match[0]
            if not run.isascii() and any(_is_variant(sign) for sign in run):
                raise NotationError(f"{run!r} is not part of an answer's notation")
            if _DIFFERENCE.fullmatch(run):
                run = run[0]
            position += len(run)
            follows = text[position : position + 2]
            units = _unit_letters(found) if in_text else frozenset()
            _letters(run, follows, add, letters="words" if in_text else letters, units=units)
        elif text.startswith("**", position):
            add("OP", "^")
            position += 2
        elif text[position : position + 2] in RELATIONS:
            add("REL", RELATIONS[text[position : position + 2]])
            position += 2
        else:
            n_open += {"(": 1, "[": 1, ")": -1, "]": -1}.get(char, 0)
            _sign(char, add)
            position += 1
        spaced = False


def _unit_letters(found: list[Token]) -> frozenset[str]:
    """Letters that are units where they are set as text; after a number these are more."""
    before = next((token for token in reversed(found) if token.kind != "BREAK"), None)
    return UNIT_LETTERS | UNIT_CAPITALS if before is not None and before.kind == "NUM" else UNIT_LETTERS


def _is_variant(sign: str) -> bool:
    """A numeral that is no digit, or a letter set as another: circled, raised, lowered, Roman."""
    return unicodedata.category(sign) in ("No", "Nl") or unicodedata.decomposition(sign).startswith("<")


def _number(text: str, start: int, *, grouped: bool) -> tuple[tuple[str, Fraction], int]:
    """A number token: grouped digits only in thousands positions, then a decimal part, then a power of ten."""
    match = _NUMBER.match(text, start)
    assert match is not None, "called on a digit"
    digits, stop = match[0], match.end()
    if text[stop : stop + 1] in _GROUPING and (grouping := _grouped(text, start, with_commas=grouped)):
        digits, stop = re.sub(r"\D", "", grouping[0]), grouping.end()
        if text[stop : stop + 1] == "." and (fraction := _FRACTION.match(text, stop)):
            digits, stop = digits + fraction[0], fraction.end()
    exponent = 0
    if match := _EXPONENT.match(text, stop):
        exponent, stop = int(match[1]), match.end()
    spelled = text[start:stop] if exponent else digits
    if len(digits) > MAX_DIGITS or abs(exponent) > MAX_DIGITS:
        raise NotationError(f"a number of more than {MAX_DIGITS} digits")
    return (spelled, Fraction(digits) * Fraction(10) ** exponent), stop


def _grouped(text: str, start: int, *, with_commas: bool) -> re.Match[str] | None:
    """Digits in groups of three, if they are; by commas only where these separate nothing else."""
    for pattern in (_TEX_GROUPED, _SPACE_GROUPED, _LINE_GROUPED):
        if match := pattern.match(text, start):
            return match
    run = _PLAIN_GROUPS.match(text, start) if with_commas else None
    return run if run is not None and _WELL_GROUPED.fullmatch(run[0]) else None


def _argument(text: str, start: int) -> tuple[str, int]:
    """The `{...}` that follows a macro, or the one sign or number; with the position after it."""
    while start < len(text) and text[start] in " \n":
        start += 1
    if start < len(text) and text[start] == "{":
        stop = closing_brace(text, start)
        return text[start + 1 : stop], stop + 1
    if match := re.compile(r"[\d.]+|\\[A-Za-z]+|.").match(text, start):
        return match[0], match.end()
    raise NotationError("a macro without its argument")


def closing_brace(text: str, start: int) -> int:
    """Position of the brace that closes the one at `start`; escaped braces do not count."""
    level, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == "{":
            level += 1
        elif char == "}":
            level -= 1
            if level == 0:
                return position
        position += 1
    raise NotationError("a brace that is not closed")


Add = Callable[..., None]


def _escaped(text: str, position: int, add: Add) -> int:
    pair = text[position : position + 2]
    if pair in ("\\{", "\\}"):
        add("OPEN" if pair == "\\{" else "CLOSE", pair)
    elif pair == "\\%":
        add("OP", "%")
    elif pair == "\\\\":
        add("SEP", "\\\\")
    elif pair == "\\|":
        add("OP", "|")
    elif pair in ("\\#", "\\&", "\\_"):
        add("WORD", pair)
    else:
        raise NotationError("a lone backslash")
    return position + 2


def _command(name: str, add: Add) -> None:
    if name in IGNORED_COMMANDS:
        return
    if name in ("ldots", "cdots", "dots"):
        add("CMD", "dots")
    elif name in ("cdot", "times", "ast"):
        add("OP", "*")
    elif name == "div":
        add("OP", "/")
    elif name in FUNCTIONS:
        add("FUNC", name)
    elif name in GREEK or name in ("pi", "infty", "emptyset", "varnothing"):
        add("SYM", {"varnothing": "emptyset", "varphi": "phi", "varepsilon": "epsilon"}.get(name, name))
    elif name in RELATIONS:
        add("REL", RELATIONS[name])
    elif name in ("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"):
        add("CMD", "frac")
    elif name in ACCENTS:
        add("CMD", f"accent {name}")
    elif name in ("dbinom", "tbinom"):
        add("CMD", "binom")
    elif name in ("lbrace", "lbrack", "langle", "lceil", "lfloor", "lvert"):
        add("OPEN", {"lbrace": "\\{", "lbrack": "[", "lvert": "|"}.get(name, name))
    elif name in ("rbrace", "rbrack", "rangle", "rceil", "rfloor", "rvert"):
        add("CLOSE", {"rbrace": "\\}", "rbrack": "]", "rvert": "|"}.get(name, name))
    elif name == "vert":
        add("OP", "|")
    elif name in ("degree", "circ", "prime"):
        add("OP", "deg" if name != "prime" else "'")
    elif name in ("land", "wedge"):
        add("WORD", "and")
    elif name in ("lor", "vee"):
        add("WORD", "or")
    elif name in ("neg", "lnot", "not"):
        add("WORD", "not")
    elif name in ("therefore", "because"):
        add("WORD", name)
    else:
        add("CMD", name)


def _letters(run: str, follows: str, add: Add, *, letters: str, units: frozenset[str]) -> None:
    """A word, a function's name, or a product of one-letter symbols; `units` are capitals and letters that are none."""
    lower = run.lower()
    is_word = run in ("min", "max") or (run == "sec" and (letters == "words" or not follows.strip(" .")))  # 42 sec
    if run in FUNCTIONS and len(run) > 1 and not (is_word and not follows.startswith("(")):
        add("FUNC", run)
    elif run in ("pi", "Pi", "PI"):
        add("SYM", "pi")
    elif lower in ("infinity", "infty"):
        add("SYM", "infty")
    elif run in GREEK and letters == "symbols":
        add("SYM", run)
    elif 2 <= len(run) <= 3 and run.isascii() and run.isupper() and lower not in SHORT_WORDS:
        add("WORD" if run in units else "SYM", run)  # a segment or triangle: AB = 9
    elif len(run) == 1 and run.isascii():
        article = run in "aAI" and follows[:1] == " " and follows[1:].isalpha()
        add("WORD" if article or run in units else "SYM", run)
    elif letters == "symbols" and run.isascii() and len(run) <= 3 and run.islower() and lower not in SHORT_WORDS:
        for letter in run:
            add("SYM", letter)
    else:
        add("WORD", run)


def _sign(char: str, add: Add) -> None:
    if char in "+-*/^!%|_':":
        add("OP", char)
    elif char == "=":
        add("REL", "=")
    elif char in "<>~":
        add("REL", RELATIONS[char])
    elif char in "([{":
        add("OPEN", char)
    elif char in ")]}":
        add("CLOSE", char)
    elif char in ",;":
        add("SEP", char)
    elif char == "&":
        add("SEP", "&")
    elif char in '."':
        add("BREAK", char)
    else:
        raise NotationError(f"{char!r} is not part of an answer's notation")
