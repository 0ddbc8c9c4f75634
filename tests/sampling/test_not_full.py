"""A step that is not full says why; an environment's failure is repeated when a run is resumed."""

import pytest

from dapo.config.schema import SamplingConfig
from dapo.rollout.engine import NoiseKey
from dapo.sampling.accounting import Accounting
from dapo.sampling.collect import VerdictJournal
from dapo.sampling.dynamic import SamplingState
from dapo.sampling.groups import apply_fill_policy
from dapo.types import Judgement, Verdict


@pytest.mark.parametrize(
    ("easy", "hard", "equal", "remedy"),
    [
        (3, 2, 6, "grades more finely"),
        (3, 2, 5, "harder problems"),
        (2, 3, 5, "easier problems"),
        (2, 2, 0, "harder problems"),
        (1, 2, 2, "easier problems"),
        (2, 1, 2, "harder problems"),
    ],
)
def test_the_remedy_is_for_what_most_groups_were(easy: int, hard: int, equal: int, remedy: str):
    accounting = Accounting()
    accounting.groups_all_correct, accounting.groups_all_wrong, accounting.groups_all_equal = easy, hard, equal
    events: list[str] = []
    apply_fill_policy(
        SamplingConfig(prompts_per_step=8, responses_per_prompt=4, dynamic=True),
        SamplingState(),
        [],
        accounting,
        events,
    )
    assert remedy in events[0]


def test_a_turn_that_failed_is_noted_once_and_recalled_for_that_turn_alone():
    written = []
    journal = VerdictJournal(write=lambda key, judgement: written.append((key, judgement)))
    key, first = NoiseKey(0, "train", "p", 1, 2), Judgement(Verdict.TIMEOUT, -1.0)
    journal.note_turn(key, 3, first)
    journal.note_turn(key, 3, Judgement(Verdict.CRASH, -1.0))
    assert journal.recall_turn(key, 3) is first
    assert journal.recall_turn(key, 2) is None
    assert written == [("0/p/1/2/turn 3", first)]
    silent = VerdictJournal()
    silent.note_turn(key, 0, first)
    assert silent.recall_turn(key, 0) is first
