"""Units beside a value, `cm^2`, `km/h`, `square feet`, `\\$`: what they are, and when two of them are the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from dapo.rewards.math.rationals import exact_or_none
from dapo.rewards.math.tokens import NotationError, Token, tokens
from dapo.rewards.math.tree import Node
from dapo.rewards.math.typography import plain
from dapo.rewards.math.vocabulary import (
    CURRENCIES,
    DERIVED_UNITS,
    LENGTHS,
    SI_PREFIXES,
    SI_SYMBOLS,
    UNIT_LETTERS,
    UNIT_POWERS,
    UNITS,
)

Unit = frozenset[tuple[str, int]]  # km/h is {("km", 1), ("h", -1)}
Mention = frozenset[Unit]  # what one spelling may mean: a pound is money or a weight

_PREFIXED = re.compile(f"({'|'.join(SI_PREFIXES)})({'|'.join(SI_SYMBOLS)})")
_TEMPERATURES = {name[:size]: name for name in ("celsius", "fahrenheit", "kelvin") for size in (1, len(name))}


def unit(name: str, power: int = 1) -> Unit:
    """A unit by its own name; those that are defined by others as these: mph is mi/h."""
    return frozenset((part, power * its_power) for part, its_power in DERIVED_UNITS.get(name, ((name, 1),)))


def mention(name: str) -> Mention:
    return frozenset({unit(name)})


NOUN = mention("noun")  # 42 apples, 42 ways


def without_units(stream: list[Token]) -> tuple[list[Token], list[Mention]]:
    """The tokens with one word for every unit right after a value, and those units; else units named elsewhere."""
    kept: list[Token] = []
    attached: list[Mention] = []
    elsewhere: set[Unit] = set()
    counted: list[Mention] = []
    index = 0
    while index < len(stream):
        token = stream[index]
        found = _unit_at(stream, index) if token.kind in ("WORD", "OP") else None
        before = next((sign for sign in reversed(kept) if sign.kind != "BREAK"), None)
        if found is not None and before is not None and before.kind in ("NUM", "SYM", "CLOSE", "OP"):
            attached.append(found[0])
            kept.append(Token("WORD", "unit", token.spaced))
            index = found[1]
            continue
        if found is not None and token.kind == "WORD" and len(token.text) > 1:
            elsewhere |= found[0]
        elif token.kind == "WORD" and before is not None and before.kind == "NUM":
            counted.append(NOUN)
        kept.append(token)
        index += 1
    return kept, attached or ([frozenset(elsewhere)] if elsewhere else counted)


def unit_after(text: str) -> list[Mention]:
    """The unit a text starts with: what stands right after a box."""
    try:
        stream = tokens(plain(text), letters="words")
    except NotationError:
        return []
    words = [Token("WORD", token.text) if token.text in UNIT_LETTERS else token for token in stream]
    start = _solid(words, 0)
    signs = [token.text for token in words[start : start + 3]]
    if signs[:1] == ["%"]:
        return [mention("percent")]
    if signs[:1] == ["deg"] or (signs[:1] == ["^"] and "deg" in signs):
        return [mention("degree")]
    found = _unit_at(words, start) if start < len(words) else None
    return [] if found is None else [found[0]]


def _unit_at(stream: list[Token], start: int) -> tuple[Mention, int] | None:
    """The unit that starts there, and where it ends: `square feet`, `m/s^2`, `km h^{-1}`, `per hour`."""
    factors: list[tuple[Mention, int]] = []
    index, sign = start, 1
    if _divides(stream[start]):
        index, sign = start + 1, -1
    while (found := _factor(stream, index, is_first=not factors)) is not None:
        meant, power, index = found
        factors.append((meant, sign * power))
        following = _solid(stream, index)
        if following < len(stream) and _divides(stream[following]):
            if _factor(stream, following + 1, is_first=False) is None:
                break
            index, sign = following + 1, -1
        elif following < len(stream) and stream[following].text in ("*", "-"):
            if _factor(stream, following + 1, is_first=False) is None:
                break
            index = following + 1
        elif following >= len(stream) or stream[following].kind != "SYM":
            break
    if not factors:
        return None
    choices = itertools.product(*(meant for meant, _ in factors))
    return frozenset(_product(zip(chosen, (power for _, power in factors), strict=True)) for chosen in choices), index


def _factor(stream: list[Token], start: int, *, is_first: bool) -> tuple[Mention, int, int] | None:
    """One unit with its power: `cm^2`, `square feet`, `seconds squared`."""
    index = _solid(stream, start)
    if index >= len(stream):
        return None
    power = UNIT_POWERS.get(stream[index].text.lower(), 1) if stream[index].kind == "WORD" else 1
    if power > 1:
        index = _solid(stream, index + 1)
    if stream[index : index + 1] and stream[index].text.lower() in ("degree", "degrees", "deg"):
        after = _solid(stream, index + 1)
        if after < len(stream) and stream[after].text.lower() in _TEMPERATURES:
            return mention(_TEMPERATURES[stream[after].text.lower()]), 1, after + 1
    meant = _named(stream, index, is_first=is_first and power == 1)
    if meant is None:
        return None
    index += 1
    after = _solid(stream, index)
    if after < len(stream) and stream[after].text.lower() in ("squared", "cubed"):
        return meant, 2 if stream[after].text.lower() == "squared" else 3, after + 1
    exponent, index = _exponent(stream, index)
    return meant, power * exponent, index


def _named(stream: list[Token], index: int, *, is_first: bool) -> Mention | None:
    if index >= len(stream):
        return None
    token = stream[index]
    if token.kind == "SYM":  # right after a number it may be a variable
        return None if is_first or token.text not in UNIT_LETTERS else _meant(token.text)
    if token.kind != "WORD":
        return None
    after = _solid(stream, index + 1)
    follows = stream[after] if after < len(stream) else None
    if token.text == "in" and follows is not None and follows.kind in ("WORD", "NUM") and not _divides(follows):
        return None  # 42 in total
    return _meant(token.text)


def _meant(word: str) -> Mention | None:
    """The unit in any case, `KM`, unless the case makes it another one: `Mg` is a megagram, `mHz` a millihertz."""
    names = UNITS.get(word)
    if names is None and (prefixed := _PREFIXED.fullmatch(word)):
        names = (SI_PREFIXES[prefixed[1]] + SI_SYMBOLS[prefixed[2]],)
    elif names is None and len(word) > 1:
        names = UNITS.get(word.lower())
    return None if names is None else frozenset(unit(name) for name in names)


def _exponent(stream: list[Token], start: int) -> tuple[int, int]:
    index = _solid(stream, start)
    texts = [token.text for token in stream[index : index + 5]]
    if texts[:1] != ["^"]:
        return 1, start
    for pattern, sign, length in ((["{", "-"], -1, 5), (["-"], -1, 3), (["{"], 1, 4), ([], 1, 2)):
        n_before = len(pattern) + 1
        if texts[1:n_before] == pattern and texts[n_before : n_before + 1] in (["1"], ["2"], ["3"]):
            return sign * int(texts[n_before]), index + length
    return 1, start


def _divides(token: Token) -> bool:
    return (token.kind, token.text) == ("OP", "/") or (token.kind, token.text.lower()) == ("WORD", "per")


def _solid(stream: list[Token], index: int) -> int:
    while index < len(stream) and stream[index].kind == "BREAK":
        index += 1
    return index


def _product(factors: Iterable[tuple[Unit, int]]) -> Unit:
    powers: dict[str, int] = {}
    for factor, exponent in factors:
        for name, power in factor:
            powers[name] = powers.get(name, 0) + power * exponent
    return frozenset((name, power) for name, power in powers.items() if power)


def with_signs(mentions: list[Mention], signs: Iterable[str]) -> list[Mention]:
    """Units with what a sign of money, percent or degrees says: `\\$12 per hour` is dollars per hour."""
    sign = frozenset(unit(name) for name in signs)
    if not sign:
        return mentions
    is_rate = [all(power < 0 for rate in alternatives for _, power in rate) for alternatives in mentions]
    rates = [
        frozenset(_product([(one, 1), (rate, 1)]) for one in sign for rate in alternatives)
        for alternatives, is_one in zip(mentions, is_rate, strict=True)
        if is_one
    ]
    others = [alternatives for alternatives, is_one in zip(mentions, is_rate, strict=True) if not is_one]
    return [*others, *(rates or [sign])]


def agree(wanted: Mention, said: Mention) -> bool:
    """Whether a unit may stand for the one wanted. A noun may, `42 in all`; where one is wanted, no other unit may."""
    if said == NOUN or (wanted == NOUN and said == mention("unit")):
        return True
    return any(_same(one, other) for one in wanted for other in said)


def _same(one: Unit, other: Unit) -> bool:
    """Equal; `square units` for square metres; a price or a percentage with and without what it is for."""
    if one == other:
        return True
    for general, special in ((one, other), (other, one)):
        if len(general) == len(special) == 1:
            ((name, power),), ((length, its_power),) = general, special
            if name == "unit" and length in LENGTHS and power == its_power:
                return True
        paid = frozenset(part for part in special if part[1] > 0)
        if paid and general == paid and all(name in CURRENCIES or name == "percent" for name, _ in paid):
            return True
    return False


def split_letters(node: Node) -> tuple[Node, Unit]:
    """`42 m/s^2` as 42 and its unit, where letters stand as units."""
    factors: list[tuple[Unit, int]] = []
    if node.op == "neg":
        core, letters = split_letters(node.args[0])
        return Node("neg", (core,)), letters
    while node.op in ("mul", "div"):
        power, factor = 1, node.args[1]
        if factor.op == "pow" and (exponent := exact_or_none(factor.args[1])) in (-3, -2, -1, 2, 3):
            power, factor = int(exponent or 1), factor.args[0]
        if factor.op != "sym" or factor.name not in UNIT_LETTERS:
            break
        factors += [(named, power if node.op == "mul" else -power) for named in _meant(factor.name) or ()]
        node = node.args[0]
    return node, _product(factors)
