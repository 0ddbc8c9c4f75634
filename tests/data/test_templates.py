"""Templates: what two questions share once numbers and names are left out, and what is not left out."""

import pytest

from dapo.data.contamination import EvaluationTexts, find_contamination
from dapo.data.near_duplicates import NAME, NUMBER, PRONOUN, Kinds, Templates, names_among, template

TOM = "Tom has 3 apples and buys 5 more. How many apples does he have?"
ANNA = "Anna has twelve apples and buys 1,250.5 more. How many apples does she have?"


def test_numbers_names_and_pronouns_become_one_token_each():
    kinds = Kinds(names_among([TOM, ANNA]))
    expected = f"{NAME} has {NUMBER} apples and buys {NUMBER} more {NAME} many apples does {PRONOUN} have".split()
    assert template(TOM, kinds) == template(ANNA, kinds) == expected  # "How" is never written small here


def test_a_word_is_a_name_by_how_it_is_written_inside_sentences():
    questions = ["Rose gave a rose to Rose. Does Rose like it?", "What does a rose cost? When does Mark pay?"]
    names = names_among([*questions, "She does what Mark asks and when; he may mark a word."])
    assert {"rose", "mark"} <= names  # twice with a capital inside, twice without; and once each
    assert not {"what", "does", "when", "a"} & names  # a sentence's first word says nothing


def test_capitals_as_a_style_make_no_names():
    shouted = ["HOW MANY APPLES DOES TOM HAVE?", "How Many Pears Has The Old Man Sold Today?"]
    assert not names_among(shouted)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find the sum of the roots of $x^2 - 4x + 3 = 0$.", "Find the sum of the roots of $x^2 - 17x + 10 = 0$."),
        ("In triangle ABC the angle at B is 40 degrees.", "In triangle PQR the angle at Q is 75.5 degrees."),
        ("On Monday New York sold 1st class seats for us.", "On Friday Rome sold 22nd class seats for us."),
        ("Each of the cakes needs 3 1/2 cups of flour.", "Each of the cakes needs 2 cups of flour."),
        ("Each of the cakes needs $\\frac{1}{2}$ cups of flour.", "Each of the cakes needs 3/4 cups of flour."),
        ("Each of the cakes needs twenty-one cups of flour.", "Each of the cakes needs a dozen cups of flour."),
        ("Find the exact value of (3 + 5) * 2 by hand.", "Find the exact value of (14 + 1/2) * 9 by hand."),
        ("小明有3个苹果，又买了5个。", "小明有12个苹果，又买了7个。"),
    ],
)
def test_near_duplicates(one, other):
    assert Templates([one], others=[other]).nearest(other).similarity == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 5?", "What is 4 + 9?"),  # a kind of exercise
        ("Find the sum of 3 and 5 and double it.", "A boat needs 3 hours for 5 miles; how fast is it?"),
        ("How many apples does Tom have after he sells 3 of them?", "How many days does a week have in total?"),
        ("Find the exact value of (3 + 5) * 2 by hand.", "Find the exact value of 3 + 5 * 2 by hand."),
        ("Compute the remainder of $2^5 + 3$ by 7 now.", "Compute the remainder of $2 \\cdot 5 - 3$ by 7 now."),
    ],
)
def test_no_near_duplicates(one, other):
    nearest = Templates([one], others=[other]).nearest(other)
    assert nearest is None or nearest.similarity < 0.7


def test_the_similarity_is_of_the_runs_of_three_words_of_both():
    """Ten words have 8 runs; another last word spoils one: 7 are shared, of 9."""
    words = ["we", "all", "know", "that", "old", "boats", "are", "seldom", "sold", "cheaply"]
    nearest = Templates(["unlike all of the rest here", " ".join(words)], others=[]).nearest(
        " ".join([*words[:-1], "quickly"])
    )
    assert (nearest.at, nearest.similarity) == (1, 7 / 9)


NOUNS = ["Apfel", "Hut", "Ring", "Stein", "Fisch", "Turm", "Wald", "Hafen"]
MANY_GERMAN = [
    f"Ein {one} kostet am Markt 3 Euro und ein {other} im Laden 5 Euro. Wie viel kostet der {one} mit dem {other}?"
    for one in NOUNS
    for other in NOUNS
    if one != other
]
INSTRUCTION = "Solve it step by step and put your final answer into a box at the end of your response."
VERBS = ["sell", "paint", "wash", "count", "lift", "break"]
THINGS = ["boats", "cups", "old doors", "planets", "red letters", "engines"]
MANY_SHORT = [f"We {verb} 4 {thing} and then {verb} some of them. {INSTRUCTION}" for verb in VERBS for thing in THINGS]


def test_capitals_that_a_language_gives_its_nouns_make_no_names():
    assert not names_among(MANY_GERMAN)
    assert "tom" in names_among([TOM, "We saw Tom run and asked him how far he went."] * 30)


@pytest.mark.parametrize("questions", [MANY_GERMAN, MANY_SHORT])
def test_problems_with_nouns_or_instructions_in_common_are_not_dropped(questions):
    found = find_contamination(questions[1:], EvaluationTexts("held", questions[:1])).found
    assert len(found) < len(questions) / 2  # nearly all before


def test_problems_of_one_template_are_found_below_an_instruction():
    questions = [f"Tom has {n} apples and buys {n + 1} more. How many has he now? {INSTRUCTION}" for n in range(40)]
    assert len(find_contamination(questions[1:], EvaluationTexts("held", questions[:1])).found) == 39
