"""The stretches of notation between words, and what belongs to a word that is a unit: `cm^2`, `km/h`."""

from __future__ import annotations

from dapo.rewards.tokens import Token
from dapo.rewards.vocabulary import UNIT_POWERS


def runs_of(stream: list[Token]) -> list[tuple[list[Token], list[str]]]:
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


def unit_powers_of(stream: list[Token]) -> frozenset[int]:
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
