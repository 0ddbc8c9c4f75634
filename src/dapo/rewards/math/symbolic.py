"""math-verify, for notation we do not read ourselves. Imported in workers only."""

from __future__ import annotations

from typing import Any


def same(reference: str, said: str) -> bool:
    """Whether math-verify finds the two equal. Its own time-outs are off: the worker is killed instead."""
    from math_verify import verify

    gold, prediction = parsed(reference), parsed(said)
    return bool(gold and prediction and verify(gold, prediction, timeout_seconds=None, raise_on_error=True))


def parsed(text: str) -> list[Any]:
    """What math-verify reads in an expression; empty when nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    body = text.strip().strip("$").strip()
    for opener, closer in (("\\(", "\\)"), ("\\[", "\\]")):
        if body.startswith(opener) and body.endswith(closer):
            body = body[2:-2]
    found: list[Any] = parse(
        f"${body}$",
        extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
        parsing_timeout=None,
        fallback_mode="no_fallback",
        raise_on_error=False,
    )
    return found


def judged(response: str, answer: str) -> tuple[str | None, bool]:
    """What math-verify by itself extracts from a response, and whether it accepts it."""
    from math_verify import parse, verify

    gold = parsed(answer)
    prediction = parse(response, parsing_timeout=None, raise_on_error=False)
    if not prediction:
        return None, False
    is_same = bool(gold) and bool(verify(gold, prediction, timeout_seconds=None, raise_on_error=False))
    return str(prediction[-1])[:200], is_same
