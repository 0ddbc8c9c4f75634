"""The released run's rule, quirks included: what it accepts and rejects is pinned, wrong or not."""

import pytest

from dapo import rewards
from dapo.rewards.published import normalised
from dapo.types import Verdict

# From the table of fifteen cases, column of the recipe's rule.
TABLE = [
    ("Answer: 42", "42", True),
    ("Answer: 42.", "42", False),
    ("**Answer:** 42", "42", False),
    ("Answer: \\(42\\)", "42", False),
    ("The result is $\\boxed{42}$.", "42", False),
    ("Answer: -1,234", "-1234", False),
    ("Answer: −5", "-5", False),
    ("Answer: 042", "42", False),
    ("Answer: \\frac{84}{2}", "42", False),
    ("Answer: 7\nAnswer: 42", "42", True),
    ("Answer: 42 and 43", "42", False),
    ("Answer: $41$ or $42$", "41", True),
    ("Answer: 1,2,3,4", "1234", True),
    ("Answer: 41=42", "42", True),
    ("Answer: 9**9**9**9", "42", False),
]
QUIRKS = [
    ("Answer: 4units2", "42", True),  # unit words go anywhere
    ("ANSWER : \n 42", "42", True),  # any case, white space with newlines
    ("myanswer:42", "42", True),  # no word boundary
    ("Answer: 42" + " " * 300, "42", False),  # the last 300 characters only
    ("Answer: \\boxed{42}", "42", True),
    ("Answer: $42.$", "42", True),
    ("Answer: \\frac12", "\\frac{1}{2}", True),
    ("Answer: \\sqrt2", "\\sqrt{2}", True),
    ("Answer: 42\\text{ and }43", "42,43", True),
    ("Answer: 42 \\mbox{ cm}", "42", True),
    ("Answer: \\text{}42", "42", True),
    ("Answer: an apple", "apple", True),
    ("Answer: \\boxed{a{b}c}d}", "a{b}cd", False),
    ("Answer: 42^\\circ", "42", True),
    ("Answer: $Answer", "$Answer", True),
    ("Answer：42", "42", False),  # ASCII colon only
]


@pytest.mark.parametrize(("response", "answer", "accepted"), [*TABLE, *QUIRKS])
def test_accepts_what_the_released_rule_accepts(response: str, answer: str, accepted: bool):
    verdict = rewards.judge(response, answer, verifier="dapo-published").verdict
    assert (verdict is Verdict.CORRECT) == accepted


def test_nothing_stated_is_unparseable():
    assert rewards.judge("42", "42", verifier="dapo-published").verdict is Verdict.UNPARSEABLE


def test_normalisation_order():
    assert normalised("x = 1,000 cm") == "1000"  # after the last `=`, without units, then without commas
    assert normalised("1,000") == "1000"
    assert normalised("(1,000)") == "(1,000)"
