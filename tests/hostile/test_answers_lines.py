"""Strangers' answers, line by line: nothing hostile is CORRECT, odd but clear spellings are, and so says the page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import dapo
from dapo.rewards import VerifierPool
from dapo.types import Verdict
from hostile.answers_lines import Line, labelled_lines

LINES = labelled_lines()
PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool("math", workers=1) as pool:
        yield pool


def judged(pool: VerifierPool, lines: list[Line]) -> list[tuple[Line, Verdict]]:
    judgements = pool.judge_all([(line.response, line.reference) for line in lines])
    return [(line, judgement.verdict) for line, judgement in zip(lines, judgements, strict=True)]


def test_hostile_lines_are_refused_by_a_verdict(pool: VerifierPool):
    hostile = [line for line in LINES if line.label == "WRONG"]
    refused = (Verdict.WRONG, Verdict.UNPARSEABLE)
    assert not [found for found in judged(pool, hostile) if found[1] not in refused]
    assert len(hostile) > 700


def test_odd_but_clear_lines_are_accepted(pool: VerifierPool):
    clear = [line for line in LINES if line.label == "CORRECT"]
    assert not [found for found in judged(pool, clear) if found[1] is not Verdict.CORRECT]
    assert len(clear) > 300


def test_the_page_says_what_is_true(pool: VerifierPool):
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| ([A-Z]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [Line(verdict, reference, f"Answer: {said}") for said, reference, verdict in rows]
    assert not [found for found in judged(pool, lines) if found[1] != found[0].label]
    assert len(lines) > 20


@pytest.mark.slow
def test_the_command_line_says_the_same():
    rows = [
        ("Answer: x=1, y=2", "x=2, y=1", "WRONG"),
        ("Answer: 42 cm^2", "42 cm", "WRONG"),
        ("Answer: \\overline{42}", "42", "WRONG"),
        ("<answer>42</answer>", "42", "CORRECT"),
        ("The answer is 42", "42", "CORRECT"),
    ]
    lines = "".join(json.dumps({"response": response, "answer": answer}) + "\n" for response, answer, _ in rows)
    done = dapo("verify", "-", "--workers", "1", stdin=lines)
    assert [json.loads(line)["verdict"] for line in done.stdout.splitlines()] == [verdict for *_, verdict in rows]
