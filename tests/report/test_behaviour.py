"""Emergent behaviour: which responses check, doubt, restart or revise, and which only answer."""

from pathlib import Path

import pytest

from cpu_time import cpu_seconds
from dapo.errors import ConfigError
from dapo.report.behaviour import SHIPPED, is_answer_only, is_revised, load_phrases

PHRASES = load_phrases()


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Let me check this: 3 + 4.", ["check"]),
        ("So 7.\nWait, that cannot be right.", ["doubt"]),
        ("=8Wait\n=7", ["doubt"]),  # a token between others, as small models write it
        ("The waiter brought 3.", []),
        ("Let's try again with x.", ["restart"]),
        ("LET ME VERIFY. Hmm.", ["check", "doubt"]),
        ("let me   verify", ["check"]),
        ("等等，这不对。重新计算。", ["doubt", "restart"]),
        ("Moment mal, das stimmt nicht.", ["doubt"]),
        ("An inhalt of 5", []),
        ("12*7 = 84, so 12*7 = 86.", ["revised"]),
        ("", []),
    ],
)
def test_phrases_of_each_kind_and_language(text: str, kinds: list[str]):
    assert PHRASES.of(text) == kinds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 3. Then x = 4.", True),
        ("x = 3. Then x = 3.", False),
        ("x = 3 and y = 4", False),
        ("12*7 = 84\n12*7 = 84.0", True),  # another spelling counts as a change: the text is not computed with
        ("7+6-8\n=13-8\n=5", False),  # a chain of steps states each value once
        ("Answer: 7\nAnswer: 5", True),
        ("Answer: 1,000. The answer is 1000.", False),
        ("= 3 = 4", False),
    ],
)
def test_a_value_stated_again_and_changed(text: str, expected: bool):
    assert is_revised(text) is expected


@pytest.mark.parametrize(
    ("text", "extracted", "expected"),
    [
        ("Answer: 42", "42", True),
        ("\\boxed{42}", "42", True),
        ("42", "42", True),
        ("=42\nAnswer: 42", "42", True),
        ("6*7 = 42\nAnswer: 42", "42", True),  # two digits of working are within the allowance …
        ("6*7 = 42, and 30 + 12 = 42\nAnswer: 42", "42", False),  # … six are not
        ("no answer", None, False),
    ],
)
def test_nothing_but_the_answer(text: str, extracted: str | None, expected: bool):
    assert is_answer_only(text, extracted) is expected


def test_the_list_can_be_edited(tmp_path: Path):
    own = tmp_path / "phrases.toml"
    own.write_text('[tlh]\ncheck = ["qul"]\n')
    edited = load_phrases(own)
    assert edited.of("qul!") == ["check"]
    assert edited.of("wait") == []
    assert edited.name != PHRASES.name == load_phrases(SHIPPED).name


@pytest.mark.parametrize("text", ["[en]\nchekc = []", "[en", "en = 3", "[en]\ncheck = 3"])
def test_a_list_that_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str):
    own = tmp_path / "phrases.toml"
    own.write_text(text)
    with pytest.raises(ConfigError, match=r"phrases\.toml"):
        load_phrases(own)
    with pytest.raises(ConfigError, match="no such file"):
        load_phrases(tmp_path / "none.toml")


def test_a_long_text_of_near_misses_is_quick():
    assert cpu_seconds(lambda: PHRASES.of("wai " * 50_000 + "1+" * 100_000 + "= " * 50_000)) < 10
