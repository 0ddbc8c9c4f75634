"""What an answer line says: one value, several, or none. Prose around a value is allowed where it cannot change it.

The rule for words: a line offers the one value it contains when every other word in it is harmless. Words that negate,
hedge, compare, count or calculate are not harmless, and two different values are never one answer.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

from dapo.rewards import equivalence
from dapo.rewards.boxes import in_context
from dapo.rewards.limits import MAX_STATEMENT_CHARS
from dapo.rewards.notation import parse
from dapo.rewards.tokens import NotationError, Token, closing_brace, tokens
from dapo.rewards.tree import Node
from dapo.rewards.typography import BIDIRECTIONAL, plain, trimmed
from dapo.rewards.vocabulary import (
    BASES,
    BESIDE_A_BOX,
    COPULAS,
    CURRENCY,
    HEDGES,
    LEADING,
    LEADING_CHINESE,
    MIXED_SCRIPT,
    ORDINALS,
    SCALES,
    TRAILING,
    TRAILING_ALONE,
    UNIT_POWERS,
    UNITS,
    UNSAFE,
    UNSAFE_CHINESE,
    number_in_words,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as a tree, with the unit words that stood beside it and the tokens it was read from."""

    node: Node
    units: frozenset[str] = frozenset()
    powers: frozenset[int] = frozenset()  # of units: 2 for square metres
    spelled: tuple[str, ...] = ()
    is_hedged: bool = False  # "about", "≈": not a claim of equality
    is_titled: bool = False  # a word stands before the value


_DECORATION = re.compile("[\u2234\U0001f449\u27a1\u2713\u2714\u2705\U0001f389\u25a0\u25a1\u220e\u2705\ufe0f]")
_ELLIPSIS = re.compile(r"[\d,;]\s*(?:\.\.|\u2026|\\l?dots)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(?=[^\s{])")
_CURRENCY = re.compile(r"\\\$|\\(?:text)?[a-z]+|[\u00a2\u00a3\u20ac\u00a5\u20b9]")
_CODE = re.compile(r"__|(?<![\\A-Za-z])[A-Za-z]{3,}\(['\"]|[A-Za-z]\.[A-Za-z]+\(|\{\s*\"")
MAX_PROSE_WORDS = 30


def read(statement: str, *, commas: str = "thousands", letters: str = "symbols") -> Reading:
    """The value a final answer states. NotationError when it states none, or more than one."""
    if len(statement) > MAX_STATEMENT_CHARS:
        raise NotationError(f"a final answer of more than {MAX_STATEMENT_CHARS} characters")
    if BIDIRECTIONAL.search(statement):
        raise NotationError("text that is shown in another order than it is written")
    if statement.isascii() and statement.isdigit() and len(statement) < 300:
        return Reading(Node("num", value=Fraction(statement)), spelled=(statement,))
    if _ELLIPSIS.search(statement):
        raise NotationError("a list that goes on")
    text = trimmed(plain(_DECORATION.sub(" ", statement)))
    if text[:1] == text[-1:] == "'":
        text = text[1:-1]
    is_boxed = _BOX.search(text) or _BARE_BOX.search(text)
    reading = (_boxed if is_boxed else _read_plain)(text, commas=commas, letters=letters)
    money = {unit for sign in _CURRENCY.findall(statement) for unit in CURRENCY.get(sign, ())}
    return replace(reading, units=reading.units | money) if money else reading


def _read_plain(text: str, *, commas: str, letters: str) -> Reading:
    if _CODE.search(text):
        raise NotationError("program text")
    stream = tokens(trimmed(text), commas=commas, letters=letters)
    if not any(token.kind in ("NUM", "SYM", "WORD", "FUNC", "CMD") for token in stream):
        raise NotationError("no value in it")
    spelled = tuple(token.text for token in stream if token.kind != "BREAK")
    reading = _sentence(_arithmetic_words(stream))
    kinds = [token.kind for token in stream]
    is_titled = "NUM" in kinds and "WORD" in kinds[: kinds.index("NUM")]
    return replace(reading, spelled=spelled, is_titled=is_titled)


def _boxed(text: str, *, commas: str, letters: str) -> Reading:
    """A line with boxes: all of it where it reads as one (`6 \\cdot 7 = \\boxed{42}`), else what the boxes agree on."""
    text = _BARE_BOX.sub("", text)
    contents, in_place, outside, position = [], [], [], 0
    for match in _BOX.finditer(text):
        if match.start() < position:
            continue  # a box in a box: read with its outer one
        stop = closing_brace(text, match.end())
        outside.append(text[position : match.start()])
        contents.append(text[match.end() + 1 : stop])
        in_place.append(in_context(text, match.start(), stop + 1, contents[-1]))
        position = stop + 1
    outside.append(text[position:])
    try:
        whole = "\x1f".join(part for pair in zip(outside, [*contents, ""], strict=True) for part in pair)
        return _read_plain(_unboxed(whole), commas=commas, letters=letters)
    except NotationError:
        _check_surroundings(" ".join(outside))
        for lead in outside[:-1]:
            _check_lead([token.text.lower() for token in tokens(lead, letters="words") if token.kind != "BREAK"])
    if not contents:
        raise NotationError("a box that holds nothing")
    readings = [_read_plain(_unboxed(content), commas=commas, letters=letters) for content in in_place]
    if any(not equivalence.agree(readings[0].node, other.node) for other in readings[1:]):
        raise NotationError("boxes with different values")
    return readings[0]


def _unboxed(text: str) -> str:
    while match := _BOX.search(text):
        stop = closing_brace(text, match.end())
        text = f"{text[: match.start()]}\x1f{text[match.end() + 1 : stop]}\x1f{text[stop + 1 :]}"
    return text


def _check_surroundings(outside: str) -> None:
    """Prose around a box must not take its value back or offer another."""
    words = [token.text.lower() for token in tokens(outside, letters="words") if token.kind == "WORD"]
    for word in words:
        if word in BESIDE_A_BOX:
            raise NotationError(f"{word!r} beside the box")
    if any(char.isdigit() for char in outside) and len(words) < 3:
        raise NotationError("another number beside the box")


def _arithmetic_words(stream: list[Token]) -> list[Token]:
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
            last = _neighbour(changed, len(changed), -1)
            if last is None or last.kind != "SEP":
                changed.append(Token("SEP", ","))
        elif word in ("percent", "percentage") and before is not None and before.kind == "NUM":
            changed.append(Token("OP", "%"))
        elif word in ("negative", "minus", "负") and after is not None and after.kind in ("NUM", "OPEN"):
            changed.append(Token("OP", "-"))
        elif word in SCALES and before is not None and before.kind == "NUM":
            changed += [Token("OP", "*"), Token("NUM", word, value=Fraction(SCALES[word]))]
        else:
            changed.append(token)
    return changed


def _neighbour(stream: list[Token], index: int, step: int) -> Token | None:
    index += step
    while 0 <= index < len(stream) and stream[index].kind == "BREAK":
        index += step
    return stream[index] if 0 <= index < len(stream) else None


def _is_math(token: Token | None) -> bool:
    return token is not None and token.kind not in ("WORD",)


def _sentence(stream: list[Token]) -> Reading:
    """Words and values. Without words it is notation; with words every value in it must be the same one."""
    words = [token.text for token in stream if token.kind == "WORD"]
    if not words:
        node = parse(stream)
        if node.op == "approx":
            return Reading(node.args[0], is_hedged=True)
        return Reading(node)
    if not any(token.kind == "NUM" for token in stream):
        try:
            return _text(stream, words)
        except NotationError:
            pass
    if any(token.text == ";" for token in stream):
        raise NotationError("several statements")
    _check_calls(stream)
    stream, spelled = _without_spelled_numbers(stream)
    hedged = _check_words([token.text for token in stream if token.kind == "WORD"])
    stream, asides = _without_asides(stream)
    _check_neighbours(stream)
    values, units, powers = [], set(), _unit_powers(stream)
    for run, run_words in _runs(stream):
        units |= {UNITS[word.lower()] for word in run_words if word.lower() in UNITS}
        if any(token.kind in ("NUM", "FUNC", "CMD") or token.text in ("pi", "infty") for token in run):
            values.append(parse(run))
    values += [*(aside.node for aside in asides), *spelled]
    if not values:
        raise NotationError("no value in it")
    if values[0].op == "approx":
        values[0], hedged = values[0].args[0], True
    if any(not equivalence.agree(values[0], other) for other in values[1:]):
        raise NotationError("two different values")
    return Reading(values[0], units=frozenset(units), powers=powers, is_hedged=hedged)


def _text(stream: list[Token], words: list[str]) -> Reading:
    """An answer in words: `even`, `Sunday`, `two lines`; or a number in words."""
    if any(token.kind == "CMD" or (token.kind == "OP" and token.text not in "-'+") for token in stream):
        raise NotationError("words among signs")
    if len(words) > MAX_PROSE_WORDS:
        raise NotationError("prose without a value")
    spelled = [token.text.casefold() for token in stream if token.kind in ("WORD", "SYM")]
    number = number_in_words([word for spelled_word in spelled for word in spelled_word.split("-")])
    if number is not None:
        return Reading(Node("num", value=Fraction(number)))
    significant = [word for word in spelled if word not in ("the", "a", "an")]
    separated = any(token.kind == "SEP" for token in stream)
    items = re.split(
        r" *, *",
        " ".join("," if t.kind == "SEP" else t.text.casefold() for t in stream if t.kind in ("WORD", "SYM", "SEP")),
    )
    if separated and len([item for item in items if item]) > 1:
        return Reading(Node("list", tuple(Node("text", name=item) for item in items if item)))
    return Reading(Node("text", name=" ".join(significant)))


def _without_spelled_numbers(stream: list[Token]) -> tuple[list[Token], list[Node]]:
    """Take out brackets that repeat the value in words: `42 (forty-two)`."""
    kept: list[Token] = []
    numbers: list[Node] = []
    index = 0
    while index < len(stream):
        token = stream[index]
        stop = _closing(stream, index) if token.kind == "OPEN" and token.text == "(" else index
        inner = stream[index + 1 : stop]
        number = number_in_words([part for word in inner for part in word.text.lower().split("-")])
        if number is not None and all(word.kind == "WORD" for word in inner):
            numbers.append(Node("num", value=Fraction(number)))
            token, index = Token("BREAK", "("), stop
        kept.append(token)
        index += 1
    return kept, numbers


def _without_asides(stream: list[Token]) -> tuple[list[Token], list[Reading]]:
    """Take out brackets that hold words, `42 (square units)`; one that holds a value must agree with the rest."""
    asides: list[Reading] = []
    kept: list[Token] = []
    index = 0
    while index < len(stream):
        token = stream[index]
        if token.kind == "OPEN" and token.text in ("(", "["):
            stop = _closing(stream, index)
            inner = stream[index + 1 : stop]
            if any(word.kind == "WORD" for word in inner):
                words = [word.text for word in inner if word.kind == "WORD"]
                _check_words(words)
                if " ".join(words).lower().removeprefix("in ") in BASES:
                    raise NotationError("a number to another base")
                if any(word.kind == "NUM" for word in inner):
                    asides.append(_sentence(inner))
                kept.append(Token("BREAK", "("))
                index = stop + 1
                continue
        kept.append(token)
        index += 1
    return kept, asides


def _closing(stream: list[Token], start: int) -> int:
    level = 0
    for index in range(start, len(stream)):
        level += {"OPEN": 1, "CLOSE": -1}.get(stream[index].kind, 0)
        if level == 0:
            return index
    raise NotationError("a bracket that is not closed")


def _check_words(words: list[str]) -> bool:
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


def _check_neighbours(stream: list[Token]) -> None:
    """Refuse a number that is part of a phrase with another value: `a factor of 42`, `the 42nd`, `42 lakh`."""
    before: list[str] = []
    for index, token in enumerate(stream):
        if token.kind == "WORD":
            before.append(token.text.lower())
            continue
        if token.kind in ("NUM", "FUNC", "CMD") or token.text == "pi":
            _check_lead(before)
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
    return " ".join(words).removeprefix("in ") in TRAILING_ALONE


def _check_calls(stream: list[Token]) -> None:
    """Refuse a word called on a number, `square(42)`. After a number it is a unit or a noun: `42 cows(6 \\cdot 7)`."""
    solid = [token for token in stream if token.kind != "BREAK"]
    for index, token in enumerate(solid[:-1]):
        bracket = solid[index + 1]
        if token.kind != "WORD" or not token.text.isascii() or (bracket.kind, bracket.text) != ("OPEN", "("):
            continue
        inner = solid[index + 2 : _closing(solid, index + 1)]
        is_called = not bracket.spaced and not (index and solid[index - 1].kind == "NUM")
        if is_called and any(sign.kind == "NUM" for sign in inner):
            raise NotationError(f"{token.text!r} of a number is another")


def _check_lead(before: list[str]) -> None:
    """The words right before a value."""
    if not before:
        return
    word = before[-1]
    if (word in LEADING and not (len(before) > 1 and before[-2] in LEADING[word])) or LEADING_CHINESE.search(word):
        raise NotationError(f"{word!r} before a value makes it part of another")


def _runs(stream: list[Token]) -> list[tuple[list[Token], list[str]]]:
    """Maximal stretches without words, each with the words that follow it; a unit's exponent belongs to its word."""
    runs: list[tuple[list[Token], list[str]]] = [([], [])]
    index = 0
    while index < len(stream):
        token = stream[index]
        if token.kind == "WORD":
            runs[-1][1].append(token.text)
            index = _after_unit(stream, index + 1)
            continue
        if runs[-1][1]:
            runs.append(([], []))
        runs[-1][0].append(token)
        index += 1
    return [(_trimmed_run(run), words) for run, words in runs]


def _after_unit(stream: list[Token], index: int) -> int:
    """Skip what belongs to a unit: `cm^2`, `\\text{cm}^3`, `km/h`, `word:`."""
    start = index
    while index < len(stream) and stream[index].kind == "BREAK":
        index += 1
    ahead = [token.text for token in stream[index : index + 4]]
    if ahead[:1] == ["^"] and ahead[1:2] and ahead[1] in ("2", "3"):
        return index + 2
    if ahead[:2] == ["^", "{"] and len(ahead) == 4 and ahead[2] in ("2", "3") and ahead[3] == "}":
        return index + 4
    if ahead[:1] == ["/"] and len(ahead) > 1 and stream[index + 1].kind in ("WORD", "SYM"):
        return index + 1 if stream[index + 1].kind == "WORD" else index + 2
    if ahead[:1] == [":"]:
        return index + 1
    return start


def _unit_powers(stream: list[Token]) -> frozenset[int]:
    """The 2 of `cm^2` and of `square feet`."""
    powers = set()
    for index, token in enumerate(stream):
        if token.kind == "WORD":
            powers |= {UNIT_POWERS[word] for word in (token.text.lower(),) if word in UNIT_POWERS}
            belongs = stream[index + 1 : _after_unit(stream, index + 1)]
            powers |= {int(sign.text) for sign in belongs if sign.text in ("2", "3")}
    return frozenset(powers)


def _trimmed_run(run: list[Token]) -> list[Token]:
    while run and (run[0].kind in ("BREAK", "SEP") or run[0].text == ":"):
        run = run[1:]
    while run and (run[-1].kind in ("BREAK", "SEP") or run[-1].text in (":", "-")):
        run = run[:-1]
    return run
