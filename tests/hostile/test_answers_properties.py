"""What holds for any unit, any decoration, any text: a few examples of each, the same ones every time."""

import functools
from collections.abc import Callable, Iterator

import pytest

from cpu_time import cpu_seconds
from dapo.rewards import VerifierPool, code
from dapo.rewards.math.tokens import tokens
from dapo.rewards.math.vocabulary import UNITS
from dapo.rewards.verifiers import Task, named
from dapo.types import Verdict
from hostile.fuzz_answers import PROPERTIES, drawn, may_be_equal, never_crashes, never_raises, verdict


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_it_holds(check: Callable[..., None]):
    drawn(check, n_examples=50, seed=1)()


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool("math", workers=1) as pool:
        yield pool


@pytest.mark.slow
def test_no_text_is_a_crash(pool: VerifierPool):
    drawn(never_crashes, n_examples=6, seed=1)(pool)


@pytest.mark.parametrize("letters", ["symbols", "words"])
def test_every_unit_is_one_word_where_it_is_written(letters: str):
    products = {"dm", "ms"}
    for word in (word for word in UNITS if len(word) > 1 and not (letters == "symbols" and word in products)):
        assert [token.kind for token in tokens(f"42 {word}", letters=letters)] == ["NUM", "WORD"], word


def test_no_unit_is_taken_for_another():
    """One word of each unit, against every seventh of the others."""
    words = sorted({names: word for word, names in UNITS.items() if "unit" not in names and len(word) > 1}.values())
    pairs = [
        (word, other) for i, word in enumerate(words) for other in words[i % 7 :: 7] if not may_be_equal(word, other)
    ]
    assert not [pair for pair in pairs if verdict(f"Answer: 42 {pair[1]}", f"42 {pair[0]}") is Verdict.CORRECT]
    assert len(pairs) > 1_000


SIGNS = [
    *"`{}$\\7()|,*_[]<>^!'-+=.:;&%#~½答\u200b \n\t",
    "``` ", "```\n", "<answer>", "</answer>", "\\boxed{", "answer is ", "x=1,", "\\overline{", "1_000_",
]  # fmt: skip
VERIFIERS = ("math", "exact", "choice", "dapo-published")


@pytest.mark.parametrize("sign", SIGNS)
def test_four_times_the_length_costs_about_four_times_the_time(sign: str):
    """Quadratic would be sixteen; what takes some milliseconds is not measured."""

    def seconds(n_chars: int) -> float:
        run = sign * (n_chars // len(sign))
        texts = (
            run,
            f"Answer: {run}",
            f"{run}\nAnswer: 42",
            f"\\boxed{{{run}}}",
            f"The answer is {run}",
            f"<answer>{run}",
        )
        calls = [functools.partial(code.program_in, text) for text in texts]
        for name in VERIFIERS:
            calls += [functools.partial(named(name).decide, Task(text, "42")) for text in texts]
        return sum(map(cpu_seconds, calls))

    assert seconds(200_000) < 0.25 + 9 * seconds(50_000)


def test_a_rate_of_a_thing_to_itself_is_not_one_to_another():
    assert verdict("Answer: 3 kmh per kmh", "3 kmh per km") is Verdict.WRONG
    assert verdict("Answer: 3 kmh per km", "3 kmh per km") is Verdict.CORRECT


@pytest.mark.parametrize("text", ["0.⑤", ".²", "1.①2"])
def test_a_numeral_that_is_no_digit_is_no_decimal_part(text: str):
    never_raises(text, "42")
    assert verdict(f"Answer: {text}", "42") is not Verdict.CORRECT
