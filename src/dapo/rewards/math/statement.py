"""What an answer line says: one value, several, or none. Prose around a value is allowed where it cannot change it.

The rule for words: a line offers the one value it contains when every other word in it is harmless. Words that negate,
hedge, compare, count or calculate are not harmless, and two different values are never one answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from dapo.rewards.limits import MAX_STATEMENT_CHARS
from dapo.rewards.math import equivalence
from dapo.rewards.math.boxes import in_context
from dapo.rewards.math.notation import parse
from dapo.rewards.math.prose import (
    MAX_PROSE_WORDS,
    check_calls,
    check_lead,
    check_neighbours,
    check_words,
    closing,
    things_counted,
    with_signs_for_words,
    without_spelled_numbers,
)
from dapo.rewards.math.tokens import NotationError, Token, closing_brace, tokens
from dapo.rewards.math.tree import Node
from dapo.rewards.math.typography import BIDIRECTIONAL, plain, trimmed
from dapo.rewards.math.units import Mention, without_units
from dapo.rewards.math.vocabulary import (
    BASES,
    BESIDE_A_BOX,
    CURRENCY,
    SETS_IN_WORDS,
    fraction_in_words,
    number_in_words,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as a tree, with the units that stood beside it and the tokens it was read from."""

    node: Node
    units: tuple[Mention, ...] = ()
    money: frozenset[str] = frozenset()  # by its signs; also inches
    things: frozenset[str] = frozenset()  # what it counts, or its direction: boys, north
    spelled: tuple[str, ...] = ()
    is_hedged: bool = False  # "about", "≈": not a claim of equality
    is_titled: bool = False  # a word stands before the value


_DECORATION = re.compile("[\u2234\U0001f449\u27a1\u2713\u2714\u2705\U0001f389\u25a0\u25a1\u220e\u2705\ufe0f]")
_ELLIPSIS = re.compile(r"[\d,;]\s*(?:\.\.|\u2026|\\l?dots)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(?=[^\s{])")
_CURRENCY = re.compile(r"\\\$|\\(?:text)?[a-z]+|[\u00a2\u00a3\u20ac\u00a5\u20b9]")
_INCHES = re.compile(r"[^\"\u201c\u201d]*\d[\s$}]*[\"\u2033\u201d][^\"\u201c\u201d]*")  # 42", and no quotation
_CODE = re.compile(r"__|(?<![\\A-Za-z])[A-Za-z]{3,}\(['\"]|[A-Za-z]\.[A-Za-z]+\(|\{\s*\"")


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
    money = {CURRENCY[sign] for sign in _CURRENCY.findall(statement) if sign in CURRENCY}
    if ('"' in statement or not statement.isascii()) and _INCHES.fullmatch(statement):
        money.add("in")
    return replace(reading, money=frozenset(money)) if money else reading


def _read_plain(text: str, *, commas: str, letters: str) -> Reading:
    if _CODE.search(text):
        raise NotationError("program text")
    stream = tokens(trimmed(text), commas=commas, letters=letters)
    spelled = tuple(token.text for token in stream if token.kind != "BREAK")
    if not any(token.kind in ("NUM", "SYM", "WORD", "FUNC", "CMD") for token in stream) and spelled != ("\\{", "\\}"):
        raise NotationError("no value in it")
    reading = _sentence(with_signs_for_words(stream))
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
            check_lead([token.text.lower() for token in tokens(lead, letters="words") if token.kind != "BREAK"])
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
    check_calls(stream)
    stream, units = without_units(stream)
    stream, spelled = without_spelled_numbers(stream)
    hedged = check_words([token.text for token in stream if token.kind == "WORD"])
    stream, asides = _without_asides(stream)
    check_neighbours(stream)
    values = []
    for run in runs_of(stream):
        if any(token.kind in ("NUM", "FUNC", "CMD") or token.text in ("pi", "infty") for token in run):
            values.append(parse(run))
    values += [*(aside.node for aside in asides), *spelled]
    if not values:
        raise NotationError("no value in it")
    if values[0].op == "approx":
        values[0], hedged = values[0].args[0], True
    if any(not equivalence.agree(values[0], other) for other in values[1:]):
        raise NotationError("two different values")
    return Reading(values[0], units=tuple(units), things=things_counted(stream), is_hedged=hedged)


def _text(stream: list[Token], words: list[str]) -> Reading:
    """An answer in words: `even`, `Sunday`, `two lines`; or a number in words."""
    if any(token.kind == "CMD" or (token.kind == "OP" and token.text not in "-'+") for token in stream):
        raise NotationError("words among signs")
    if len(words) > MAX_PROSE_WORDS:
        raise NotationError("prose without a value")
    spelled = [token.text.casefold() for token in stream if token.kind in ("WORD", "SYM")]
    parts = [part for word in spelled for part in word.split("-")]
    whole = number_in_words(parts)
    number = fraction_in_words(parts) if whole is None else Fraction(whole)
    if number is not None:
        return Reading(Node("num", value=number))
    significant = [word for word in spelled if word not in ("the", "a", "an")]
    separated = any(token.kind == "SEP" for token in stream)
    items = re.split(
        r" *, *",
        " ".join("," if t.kind == "SEP" else t.text.casefold() for t in stream if t.kind in ("WORD", "SYM", "SEP")),
    )
    if separated and len([item for item in items if item]) > 1:
        return Reading(Node("list", tuple(Node("text", name=item) for item in items if item)))
    phrase = " ".join(significant)
    return Reading(Node("sym", name=SETS_IN_WORDS[phrase]) if phrase in SETS_IN_WORDS else Node("text", name=phrase))


def _without_asides(stream: list[Token]) -> tuple[list[Token], list[Reading]]:
    """Take out brackets that hold words, `42 (square units)`; one that holds a value must agree with the rest."""
    asides: list[Reading] = []
    kept: list[Token] = []
    index = 0
    while index < len(stream):
        token = stream[index]
        if token.kind == "OPEN" and token.text in ("(", "["):
            stop = closing(stream, index)
            inner = stream[index + 1 : stop]
            if any(word.kind == "WORD" for word in inner):
                words = [word.text for word in inner if word.kind == "WORD"]
                check_words(words)
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


# ------------------------------------------------------------------ notation between words


def runs_of(stream: list[Token]) -> list[list[Token]]:
    """Maximal stretches without words; the exponent of a word belongs to it."""
    runs: list[list[Token]] = [[]]
    index = 0
    while index < len(stream):
        if stream[index].kind == "WORD":
            runs.append([])
            index = _after_word(stream, index + 1)
        else:
            runs[-1].append(stream[index])
            index += 1
    return [_trimmed_run(run) for run in runs]


def _after_word(stream: list[Token], index: int) -> int:
    """Skip what belongs to a word: `apples^2`, `pens/box`, `word:`."""
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


def _trimmed_run(run: list[Token]) -> list[Token]:
    while run and (run[0].kind in ("BREAK", "SEP") or run[0].text == ":"):
        run = run[1:]
    while run and (run[-1].kind in ("BREAK", "SEP") or run[-1].text in (":", "-")):
        run = run[:-1]
    return run
