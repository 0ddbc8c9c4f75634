"""Words around a value: those that stand for signs, and those that would change the value and are refused."""

from __future__ import annotations

import itertools
import unicodedata
from fractions import Fraction

from dapo.rewards.math.tokens import NotationError, Token
from dapo.rewards.math.tree import Node
from dapo.rewards.math.vocabulary import (
    ANY_NOUNS,
    COPULAS,
    HEDGES,
    LEADING,
    LEADING_CHINESE,
    MIXED_SCRIPT,
    NO_NOUNS,
    ORDINALS,
    SCALES,
    TRAILING,
    TRAILING_ALONE,
    UNSAFE,
    UNSAFE_CHINESE,
    number_in_words,
)

MAX_PROSE_WORDS = 30


def with_signs_for_words(stream: list[Token]) -> list[Token]:
    """Words that stand for signs become signs: is, and, or, percent, million, negative."""
    changed: list[Token] = []
    for index, token in enumerate(stream):
        if token.kind != "WORD":
            changed.append(token)
            continue
        word = token.text.lower()
        before = _neighbour(stream, index, -1)
        after = _neighbour(stream, index, +1)
        if word in COPULAS and after is not None and after.kind != "WORD":
            if not (changed and changed[-1].kind == "REL"):
                changed.append(Token("REL", "="))
        elif word in ("and", "or", "和", "或") and _is_math(before) and _is_math(after):
            while changed and changed[-1].kind in ("BREAK", "SEP"):
                changed.pop()
            changed.append(Token("SEP", "or" if word in ("or", "或") else "and"))
        elif word in ("percent", "percentage") and before is not None and before.kind == "NUM":
            while changed[-1].kind == "BREAK":
                changed.pop()
            changed.append(Token("OP", "%"))
        elif word in ("negative", "minus", "负") and after is not None and after.kind in ("NUM", "OPEN"):
            changed.append(Token("OP", "-"))
        elif word in SCALES and before is not None and before.kind == "NUM":
            changed += [Token("OP", "*"), Token("NUM", word, value=Fraction(SCALES[word]))]
        else:
            changed.append(token)
    return changed


def _is_math(token: Token | None) -> bool:
    return token is not None and token.kind not in ("WORD",)


def without_spelled_numbers(stream: list[Token]) -> tuple[list[Token], list[Node]]:
    """Take out words that repeat the value: `42 (forty-two)`, `forty-two (42)`."""
    kept: list[Token] = []
    numbers: list[Node] = []
    index = sum(1 for _ in itertools.takewhile(lambda token: token.kind == "WORD", stream))
    leading = number_in_words([part for word in stream[:index] for part in word.text.lower().split("-")])
    if leading is None or index == len(stream) or stream[index].text != "(":
        index = 0
    else:
        numbers.append(Node("num", value=Fraction(leading)))
    while index < len(stream):
        token = stream[index]
        stop = closing(stream, index) if token.kind == "OPEN" and token.text == "(" else index
        inner = stream[index + 1 : stop]
        number = number_in_words([part for word in inner for part in word.text.lower().split("-")])
        if number is not None and all(word.kind == "WORD" for word in inner):
            numbers.append(Node("num", value=Fraction(number)))
            token, index = Token("BREAK", "("), stop
        kept.append(token)
        index += 1
    return kept, numbers


def check_words(words: list[str]) -> bool:
    """Refuse a word that could change the value; say whether one makes it an estimate."""
    if len(words) > MAX_PROSE_WORDS:
        raise NotationError("prose instead of a value")
    lowered = [unicodedata.normalize("NFKC", word).lower() for word in words]
    for word in lowered:
        if word in HEDGES:
            continue
        if MIXED_SCRIPT.search(word):
            raise NotationError(f"{word!r} mixes scripts")
        if word in UNSAFE or any(part in UNSAFE for part in word.split("-")) or UNSAFE_CHINESE.search(word):
            raise NotationError(f"{word!r} may change the value")
        if number_in_words(word.split("-")) is not None or word in SCALES:
            raise NotationError(f"{word!r} is a second value")
    return any(word in HEDGES for word in lowered)


def check_neighbours(stream: list[Token]) -> None:
    """Refuse a number that is part of a phrase with another value: `a factor of 42`, `the 42nd`, `42 lakh`."""
    before: list[str] = []
    for index, token in enumerate(stream):
        if token.kind == "WORD":
            before.append(token.text.lower())
            continue
        if token.kind in ("NUM", "FUNC", "CMD") or token.text == "pi":
            check_lead(before)
            after = _neighbour(stream, index, +1)
            if token.kind == "NUM" and after is not None and after.kind == "WORD":
                word = after.text.lower()
                is_changed = word in TRAILING or word.startswith("的") or word in ORDINALS
                if is_changed or _is_said_of_the_number(stream, index):
                    raise NotationError(f"{word!r} after a number changes it")
        if token.kind not in ("BREAK", "OPEN") and token.text not in ("+", "-"):
            before = []


def _is_said_of_the_number(stream: list[Token], index: int) -> bool:
    """`42 in hex`, `42 negative`, with no noun after it."""
    after = itertools.takewhile(lambda token: token.kind in ("WORD", "BREAK"), stream[index + 1 :])
    words = [token.text.lower() for token in after if token.kind == "WORD"]
    return " ".join(words).removeprefix("unit ").removeprefix("in ") in TRAILING_ALONE


def things_counted(stream: list[Token]) -> frozenset[str]:
    """The words right after the last number, in the singular: `42 red balls`, `42 km north`. Units are left out."""
    solid = [token for token in stream if token.kind != "BREAK"]
    last = max((index for index, token in enumerate(solid) if token.kind == "NUM"), default=len(solid))
    after = itertools.dropwhile(lambda token: token.kind == "OP", solid[last + 1 :])
    words = itertools.takewhile(lambda token: token.kind == "WORD" and token.text.lower() not in NO_NOUNS, after)
    return frozenset(_singular(word.text.lower()) for word in words if word.text != "unit")


def _singular(noun: str) -> str:
    return noun.rstrip("s").removesuffix("e").rstrip("s")


_ANYTHING = frozenset(map(_singular, ANY_NOUNS))


def are_other_things(wanted: frozenset[str], said: frozenset[str]) -> bool:
    """Girls for boys, south for north, blue balls for red balls. `42 balls` may be red, and `42 people` boys."""
    return not (wanted <= said or said <= wanted or (wanted | said) & _ANYTHING)


def check_calls(stream: list[Token]) -> None:
    """Refuse a word called on a number, `square(42)`. After a number it is a unit or a noun: `42 cows(6 \\cdot 7)`."""
    solid = [token for token in stream if token.kind != "BREAK"]
    for index, token in enumerate(solid[:-1]):
        bracket = solid[index + 1]
        if token.kind != "WORD" or not token.text.isascii() or (bracket.kind, bracket.text) != ("OPEN", "("):
            continue
        inner = solid[index + 2 : closing(solid, index + 1)]
        is_called = not bracket.spaced and not (index and solid[index - 1].kind == "NUM")
        if is_called and any(sign.kind == "NUM" for sign in inner):
            raise NotationError(f"{token.text!r} of a number is another")


def check_lead(before: list[str]) -> None:
    """The words right before a value."""
    if not before:
        return
    word = before[-1]
    if (word in LEADING and not (len(before) > 1 and before[-2] in LEADING[word])) or LEADING_CHINESE.search(word):
        raise NotationError(f"{word!r} before a value makes it part of another")


def _neighbour(stream: list[Token], index: int, step: int) -> Token | None:
    index += step
    while 0 <= index < len(stream) and stream[index].kind == "BREAK":
        index += step
    return stream[index] if 0 <= index < len(stream) else None


def closing(stream: list[Token], start: int) -> int:
    level = 0
    for index in range(start, len(stream)):
        level += {"OPEN": 1, "CLOSE": -1}.get(stream[index].kind, 0)
        if level == 0:
            return index
    raise NotationError("a bracket that is not closed")
