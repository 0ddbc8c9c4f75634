"""Templates: what two questions share once numbers and names are left out, and what is not left out."""

import pytest

from dapo.data.templates import NAME, NUMBER, PRONOUN, Kinds, Templates, names_among, template

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
        ("小明有3个苹果，又买了5个。", "小明有12个苹果，又买了7个。"),
    ],
)
def test_twins(one, other):
    assert Templates([one], others=[other]).nearest(other).similarity == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 5?", "What is 4 + 9?"),  # a kind of exercise
        ("Find the sum of 3 and 5 and double it.", "A boat needs 3 hours for 5 miles; how fast is it?"),
        ("How many apples does Tom have after he sells 3 of them?", "How many days does a week have in total?"),
        ("Compute the remainder of $2^5 + 3$ by 7 now.", "Compute the remainder of $2 \\cdot 5 - 3$ by 7 now."),
    ],
)
def test_no_twins(one, other):
    nearest = Templates([one], others=[other]).nearest(other)
    assert nearest is None or nearest.similarity < 0.7


def test_the_similarity_is_of_the_runs_of_three_words_of_both():
    """Ten words have 8 runs; another last word spoils one: 7 are shared, of 9."""
    words = ["we", "all", "know", "that", "old", "boats", "are", "seldom", "sold", "cheaply"]
    nearest = Templates(["unlike all of the rest here", " ".join(words)], others=[]).nearest(
        " ".join([*words[:-1], "quickly"])
    )
    assert (nearest.at, nearest.similarity) == (1, 7 / 9)
