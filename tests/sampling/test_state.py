"""Groups in flight, written into a checkpoint and read again: the same numbers, ticks, responses and verdicts."""

import json

import torch

from dapo.planning.virtual import VirtualJudge
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.sampler import SamplingParams
from dapo.sampling.collect import Collector
from dapo.sampling.state import collector_from_state, collector_to_state, judgement_from_state, judgement_to_state
from dapo.types import Judgement, Problem, Task, Verdict
from tiny_models import tiny_policy

PROBLEMS = {name: Problem(name, "", "7", meta={"pass_rate": 0.5}) for name in ("one", "two", "three")}


class Grades(VirtualJudge):
    """A graded reward with a part, for every response its own."""

    def submit(self, task: Task) -> int:
        ticket = super().submit(task)
        n_words = float(len(task.response.split()))
        self._answers[ticket] = Judgement(Verdict.WRONG, n_words, graded=True, parts={"words": n_words})
        return ticket


def collector() -> Collector:
    policy = tiny_policy(dtype=torch.float64)
    engine = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=6, max_tokens=30)
    return Collector(engine, Grades(), responses_per_prompt=2, max_new_tokens=24, seed=5, delay_ticks=3)


def has_every_kind(running: Collector) -> bool:
    """Some responses are being generated, some wait for their verdict, some have it."""
    answers = [j for group in running.groups.values() for j in group.judgements]
    return bool(running.engine.n_in_flight and running.due and any(answers))


def test_what_is_due_is_due_for_its_own_response():
    before, after = collector(), collector()
    for visit, problem in enumerate(PROBLEMS.values()):
        before.submit(problem, visit, (5, 6, 7))
    for _ in range(100):
        if any(entry.request.key.response_index for entry in before.due):
            break
        before.advance()
    state, tensors = collector_to_state(before)
    collector_from_state(after, json.loads(json.dumps(state)), tensors, PROBLEMS)
    due = [[(entry.tick, entry.request) for entry in one.due] for one in (before, after)]
    assert due[0] == due[1]
    assert any(request.key.response_index for _, request in due[0])


def test_what_is_in_flight_goes_on_with_its_numbers_its_verdicts_and_those_that_are_due():
    before = collector()
    for visit, problem in enumerate(PROBLEMS.values()):
        before.submit(problem, visit, (5, 6, 7)).overtaken = visit
    while not has_every_kind(before):
        before.advance()
    state, tensors = collector_to_state(before)
    after = collector()
    collector_from_state(after, json.loads(json.dumps(state)), tensors, PROBLEMS)
    assert after.n_submitted == before.n_submitted == 3
    assert [group.overtaken for group in after.groups.values()] == [0, 1, 2]
    while not before.is_idle:
        due = [[(entry.tick, entry.request) for entry in one.due] for one in (before, after)]
        assert due[0] == due[1]
        judged = [[group.judgements for group in one.groups.values()] for one in (before, after)]
        assert judged[0] == judged[1]
        before.advance()
        after.advance()
    assert after.is_idle


def test_a_judgement_is_read_with_everything_it_says():
    whole = Judgement(Verdict.CRASH, 0.25, "6", "7", 1.5, "why", graded=True, parts={"words": 3.0})
    assert judgement_from_state(json.loads(json.dumps(judgement_to_state(whole)))) == whole
