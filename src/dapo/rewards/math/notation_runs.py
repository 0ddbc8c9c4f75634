"""The stretches of notation between words."""

from __future__ import annotations

from dapo.rewards.math.tokens import Token


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
