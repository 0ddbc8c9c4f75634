"""`dapo bench verify`: its workload is realistic, and hostile lines change nothing for the others."""

import random

import pytest

from dapo.bench.verify import MAX_TOKENS, N_PROBLEMS, N_RESPONSES, make_tasks, timed, with_hostile_lines
from dapo.types import StopReason, Verdict


@pytest.mark.slow
def test_a_steps_worth_of_responses_is_judged_and_hostile_ones_change_nothing_for_the_others():
    tasks = make_tasks(random.Random(0))
    assert len(tasks) == N_PROBLEMS * N_RESPONSES == 8_192
    assert max(len(task.response) for task in tasks) > 3 * MAX_TOKENS
    _, judgements = timed(tasks, workers=2)
    counts = {verdict: sum(judgement.verdict is verdict for judgement in judgements) for verdict in Verdict}
    assert counts[Verdict.CORRECT] > 2_000
    assert counts[Verdict.WRONG] > 2_000
    assert counts[Verdict.UNPARSEABLE] > 100
    assert counts[Verdict.CRASH] == counts[Verdict.TIMEOUT] == 0
    assert any(task.stop_reason is StopReason.LENGTH for task in tasks)

    spoiled, hostile_rows = with_hostile_lines(tasks, random.Random(1))
    _, again = timed(spoiled, workers=2)
    assert all(
        a.verdict is b.verdict
        for row, (a, b) in enumerate(zip(judgements, again, strict=True))
        if row not in hostile_rows
    )
    assert not [row for row in hostile_rows if again[row].verdict is Verdict.CORRECT]
