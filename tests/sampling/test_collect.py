"""Engine and judge as one: what is asked for, when a verdict takes effect, what is given up, what is written down."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo.config.schema import SamplingConfig
from dapo.errors import VerifierError
from dapo.planning.virtual import EndlessSource, VirtualEngine, VirtualJudge
from dapo.rollout.engine import Finished, NoiseKey, Request
from dapo.sampling import collect
from dapo.sampling.collect import MOST_FAILURES, Collector, Spent, VerdictJournal, in_words
from dapo.sampling.dynamic import AcceptanceRate, GroupSampler, SamplingState
from dapo.sampling.in_order import InOrder
from dapo.types import Completion, Judgement, Problem, StopReason, Task, Verdict

G = 3
PROBLEM = Problem("seven", "6 + 1?", "7", "test", meta={"pass_rate": 1.0})


class Says(VirtualJudge):
    """The verdicts it was given, in the order of submission; remembers what it was asked."""

    def __init__(self, *verdicts: Verdict) -> None:
        super().__init__()
        self.verdicts = list(verdicts)
        self.asked: list[tuple[str, str, StopReason | None, Any]] = []

    def submit(self, task: Task) -> int:
        self.asked.append((task.response, task.answer, task.stop_reason, task.meta))
        ticket = super().submit(task)
        if self.verdicts:
            self._answers[ticket] = Judgement(self.verdicts.pop(0), -1.0)
        return ticket


def collector_of(lengths: list[int], judge: VirtualJudge | None = None, **more: Any) -> Collector:
    engine = VirtualEngine(max_concurrent=4 * G, length_of=lambda request: lengths[request.key.response_index])
    how = {"max_new_tokens": 50, "seed": 11, "delay_ticks": 4} | more
    return Collector(engine, judge or VirtualJudge(), responses_per_prompt=G, **how)


def test_a_group_asks_for_its_responses_by_its_number():
    asked: list[Request] = []
    collector = collector_of([1, 2, 3])
    collector.engine.submit = asked.extend  # type: ignore[method-assign]
    for visit in (4, 5):
        collector.submit(PROBLEM, visit, (8, 9))
    assert asked == [
        Request(
            id=G * number + i,
            prompt=(8, 9),
            key=NoiseKey(11, "train", "seven", 4 + number, i),
            max_new_tokens=50,
            group=number,
        )
        for number in range(2)
        for i in range(G)
    ]
    assert [group.number for group in collector.groups.values()] == [0, 1]


def test_a_verdict_takes_effect_its_delay_after_the_response_ended():
    """Ends at ticks 3, 6 and 10, delay 4: known at the first stop at or after 7, 10 and 14."""
    collector = collector_of([3, 6, 10])
    group = collector.submit(PROBLEM, 0, (1,))
    seen = []
    while not collector.is_idle:
        collector.advance()
        seen.append((collector.engine.tick, group.n_verdicts, len(collector.due)))
    assert seen == [(3, 0, 1), (6, 0, 2), (10, 2, 1), (10, 3, 0)]
    assert group.is_resolved
    assert [len(completion.tokens) for completion in group.finished().completions] == [3, 6, 10]
    collector.forget(group)
    assert not collector.groups


@pytest.mark.parametrize("delay", [100, 1])
def test_what_has_ended_is_handed_in_while_the_next_tick_is_computed(delay: int):
    """Unless its verdict is due before one is: what ended at tick 3 with a delay of 1 waits for tick 6 all the same."""
    judge, happened = VirtualJudge(), []
    collector = collector_of([3, 6, 10], judge, delay_ticks=delay)
    advance, submit = collector.engine.advance, judge.submit

    def logged(meanwhile: Callable[[], None]) -> list[Finished]:
        happened.append("[")
        ended = advance(meanwhile)
        happened.append("]")
        return ended

    collector.engine.advance = logged  # type: ignore[method-assign, assignment]
    judge.submit = lambda task: (happened.append(task.response[-1]), submit(task))[1]  # type: ignore[method-assign]
    collector.submit(PROBLEM, 0, (1,))
    while not collector.is_idle:
        collector.advance()
    assert "".join(happened) == "[][0][1]2"


def test_nobody_is_asked_about_what_an_environment_has_judged():
    judge = Says()
    collector = collector_of([3, 6, 10], judge)
    group = collector.submit(PROBLEM, 0, (1,))
    advance, own = collector.engine.advance, Judgement(Verdict.CORRECT, 1.0)
    record = SimpleNamespace(judgement=own, said="")

    def judged(meanwhile: Callable[[], None]) -> list[Finished]:
        return [(request, replace(completion, episode=record)) for request, completion in advance(meanwhile)]

    collector.engine.advance = judged  # type: ignore[method-assign, assignment]
    while not collector.is_idle:
        collector.advance()
    assert judge.asked == []
    assert group.judgements == [own] * G


def test_what_was_handed_in_before_a_failure_is_not_handed_in_again():
    judge = Says()
    collector = collector_of([3, 3, 9], judge)
    collector.submit(PROBLEM, 0, (1,))
    collector.advance()
    submit, judge.submit = judge.submit, lambda task: submit(task) if task.response.endswith("0") else 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        collector.advance()
    judge.submit = submit  # type: ignore[method-assign]
    while not collector.is_idle:
        collector.advance()
    assert [response for response, *_ in judge.asked] == ["seven/0/0", "seven/0/1", "seven/0/2"]


def test_verdicts_that_are_all_that_is_left_are_asked_for_together():
    judge, happened = VirtualJudge(), []
    collector = collector_of([3, 6, 10], judge)
    group = collector.submit(PROBLEM, 0, (1,))
    ended = [one for _ in range(3) for one in collector.engine.advance()]
    submit, wait = judge.submit, judge.wait
    judge.submit = lambda task: (happened.append("ask"), submit(task))[1]  # type: ignore[method-assign]
    judge.wait = lambda tickets: (happened.append("wait"), wait(tickets))[1]  # type: ignore[method-assign]
    for i, (request, completion) in enumerate(ended):
        group.completions[request.key.response_index] = completion
        collector.await_verdict(20 + i, group, request.key.response_index)
    while not collector.is_idle:
        collector.advance()
    assert happened == ["ask"] * 3 + ["wait"] * 3


def test_a_verdict_that_is_due_at_once_is_asked_for_alone():
    """The second response of a tick is due later, and keeps its place beside the next one."""
    judge = Says()
    collector = collector_of([3, 3, 9], judge, delay_ticks=0)
    group = collector.submit(PROBLEM, 0, (1,))
    collector.advance()
    assert group.n_verdicts == len(judge.asked) == 2
    collector.delay_ticks = 5
    collector.engine.advance()
    collector._ended(collector.request_of(group, 2), group.completions[0])  # type: ignore[arg-type]
    collector._apply_due(collector.engine.tick)
    assert len(judge.asked) == 2
    collector._apply_due(collector.engine.tick + 5)
    assert len(judge.asked) == group.n_verdicts == 3


def test_the_judge_gets_the_text_the_answer_and_why_the_response_ended():
    judge = Says()
    collector = collector_of([3, 60, 4], judge)
    collector.submit(PROBLEM, 2, (1,))
    while not collector.is_idle:
        collector.advance()
    meta = {"question": "6 + 1?", "data_source": "test", "pass_rate": 1.0}
    ends = {"seven/2/0": StopReason.EOS, "seven/2/1": StopReason.LENGTH, "seven/2/2": StopReason.EOS}
    assert sorted(judge.asked, key=lambda asked: asked[0]) == [(text, "7", end, meta) for text, end in ends.items()]


def test_what_is_given_up_is_aborted_counted_and_nobody_waits_for_it():
    collector = collector_of([3, 20, 30])
    given_up, kept = collector.submit(PROBLEM, 0, (1,)), collector.submit(PROBLEM, 1, (1,))
    collector.advance()  # tick 3: one response of each has ended, and waits for its verdict
    assert collector.drop([given_up]) == 2 * 3  # tokens the two others had
    assert given_up.is_dropped
    assert not kept.is_dropped
    assert (given_up.n_tokens, given_up.n_verdicts) == (3, 0)
    assert [entry.request.group for entry in collector.due] == [kept.number]
    assert list(collector.groups) == [kept.number]
    while not kept.is_resolved:
        collector.advance()
    assert collector.verifier._answers == {}  # type: ignore[attr-defined]
    collector.forget_all()
    assert collector.is_idle


def test_failures_in_a_row_are_those_of_one_verifier():
    judge = Says(*([Verdict.CRASH] * G + [Verdict.CORRECT] * G) * MOST_FAILURES)
    collector = collector_of([1, 1, 1], judge)

    def judged_by(verifier: str, visit: int) -> None:
        group = collector.submit(replace(PROBLEM, id=f"of {verifier}", verifier=verifier), visit, (1,))
        while not group.is_resolved:
            collector.advance()

    for visit in range((MOST_FAILURES - 1) // G):
        judged_by("mod:broken", visit)
        judged_by("", visit)
    with pytest.raises(VerifierError, match="mod:broken: "):
        judged_by("mod:broken", MOST_FAILURES)


def test_room_is_for_a_whole_group():
    collector = collector_of([5, 5, 5])
    for groups in range(4):
        assert collector.room() == 4 - groups
        collector.submit(PROBLEM, groups, (1,))
    assert collector.room() == 0
    collector.engine.max_concurrent += G - 1  # type: ignore[attr-defined]
    assert collector.room() == 0
    collector.engine.max_concurrent += 1  # type: ignore[attr-defined]
    assert collector.room() == 1


def test_an_idle_engine_with_fewer_slots_than_a_group_gets_one_group_at_a_time():
    collector = collector_of([5, 5, 5])
    collector.engine.max_concurrent = G - 1  # type: ignore[attr-defined]
    assert collector.room() == 1
    collector.submit(PROBLEM, 0, (1,))
    assert collector.room() == 0


class GivesUp(VirtualEngine):
    def _completion(self, request: Request, began: int, length: int, stop: StopReason | None = None) -> Completion:
        gave_up = StopReason.ABORTED if request.key.response_index == 1 else stop
        return super()._completion(request, began, length, gave_up)


def test_a_response_that_the_engine_gave_up_is_a_crash_that_nobody_judges():
    judge = Says(Verdict.CORRECT, Verdict.WRONG)
    engine = GivesUp(max_concurrent=G, length_of=lambda _: 5)
    collector = Collector(engine, judge, responses_per_prompt=G, max_new_tokens=50, seed=0)
    group = collector.submit(PROBLEM, 0, (1,))
    while not group.is_resolved:
        collector.advance()
    assert [judgement.verdict for judgement in group.finished().judgements] == [
        Verdict.CORRECT,
        Verdict.CRASH,
        Verdict.WRONG,
    ]
    assert len(judge.asked) == 2
    assert collector.n_failures[""] == 0
    assert not collector.journal.known


def judged(judge: VirtualJudge, journal: VerdictJournal) -> list[Verdict]:
    collector = collector_of([3, 3, 3], judge, journal=journal)
    group = collector.submit(PROBLEM, 5, (1,))
    while not group.is_resolved:
        collector.advance()
    return [judgement.verdict for judgement in group.finished().judgements]


def test_verdicts_that_depend_on_the_clock_are_repeated_and_others_judged_again():
    written: list[tuple[str, Verdict]] = []
    journal = VerdictJournal(write=lambda key, judgement: written.append((key, judgement.verdict)))
    journal.version = 7
    first = [Verdict.TIMEOUT, Verdict.WRONG, Verdict.CRASH]
    assert judged(Says(*first), journal) == first
    assert written == [("7/seven/5/0", Verdict.TIMEOUT), ("7/seven/5/2", Verdict.CRASH)]
    again = Says(Verdict.CORRECT)
    resumed = VerdictJournal(journal.known)
    resumed.version = 7
    assert judged(again, resumed) == [Verdict.TIMEOUT, Verdict.CORRECT, Verdict.CRASH]
    assert [text for text, *_ in again.asked] == ["seven/5/1"]
    assert len(written) == 2
    resumed.version = 8  # other weights: other responses
    assert judged(Says(*[Verdict.CORRECT] * 3), resumed) == [Verdict.CORRECT] * 3


def test_how_an_environment_failed_is_repeated_by_weights_response_and_turn():
    written: list[tuple[str, Verdict]] = []
    journal = VerdictJournal(write=lambda name, judgement: written.append((name, judgement.verdict)))
    journal.version = 7
    key, failed = NoiseKey(11, "train", "seven", 5, 2), Judgement(Verdict.CRASH, -1.0)
    assert journal.recall_turn(key, 1) is None
    journal.note_turn(key, 1, failed)
    journal.note_turn(key, 1, Judgement(Verdict.TIMEOUT, -1.0))  # the first counts
    assert written == [("7/seven/5/2/turn 1", Verdict.CRASH)]
    assert journal.recall_turn(key, 1) is failed
    assert journal.recall_turn(key, 2) is None
    assert VerdictJournal(journal.known).recall_turn(key, 1) is None  # version 0: other weights


class PartFails(VirtualJudge):
    def wait(self, tickets):  # type: ignore[no-untyped-def]
        message = "rewards.parts.short = 'mine:short': ValueError: no: never"
        return {ticket: Judgement(Verdict.CRASH, -1.0, message=message) for ticket in super().wait(tickets)}


def test_a_part_that_fails_on_everything_is_named_with_its_whole_message():
    collector = collector_of([1, 1, 1], PartFails())
    for visit in range(MOST_FAILURES):
        collector.submit(PROBLEM, visit, (1,))
    with pytest.raises(VerifierError) as stopped:  # noqa: PT012
        while not collector.is_idle:
            collector.advance()
    assert stopped.value.message == (
        f"rewards.parts.short = 'mine:short': {MOST_FAILURES} verdicts in a row were {Verdict.CRASH.value}, "
        "the last: ValueError: no: never"
    )


def test_an_environment_begins_for_the_first_response_of_a_visit():
    begun: list[NoiseKey] = []
    collector = collector_of([1, 1, 1], opening=lambda key, prompt: (begun.append(key), (*prompt, 3))[1])
    group = collector.submit(PROBLEM, 4, (8, 9))
    assert begun == [NoiseKey(11, "train", "seven", 4, 0)]  # one beginning for the group: it shares its prompt
    assert group.prompt == (8, 9, 3)


# ---------------------------------------------------------------- how many groups are begun


def test_the_rate_is_the_share_of_late_with_older_groups_fading():
    acceptance = AcceptanceRate()
    assert acceptance.rate == 1 / 2
    acceptance.observe(True)
    assert acceptance.rate == pytest.approx((0.98 + 1) / (0.98 * 2 + 1))
    acceptance.observe(False)
    assert acceptance.rate == pytest.approx(0.98 * (0.98 + 1) / (0.98 * (0.98 * 2 + 1) + 1))
    for _ in range(1000):
        acceptance.observe(False)
    assert acceptance.rate == 0.02


def in_order(wanted: int, slots: int, accepted: float) -> InOrder:
    engine = VirtualEngine(max_concurrent=slots, length_of=lambda _: 5)
    collector = Collector(engine, VirtualJudge(), responses_per_prompt=G, max_new_tokens=50, seed=0)
    config = SamplingConfig(prompts_per_step=wanted, responses_per_prompt=G, dynamic=True)
    state, source = SamplingState(AcceptanceRate(accepted=accepted, tried=1.0)), EndlessSource(lambda _: 0.5)
    quiet = GroupSampler(collector, source, config, state, max_prompts_tried=100, progress=lambda _known, _wanted: None)
    return InOrder(quiet)


def change(rule: InOrder, **keys: object) -> None:
    rule.sampler.config = rule.sampler.config.model_copy(update=keys)


@pytest.mark.parametrize(
    ("slots", "accepted", "expected"),
    [
        (100 * G, 0.5, 8),  # 4 are missing, half of those begun come out: 4 / 0.5
        (100 * G, 0.3, 14),  # 4 / 0.3, rounded up
        (5 * G + 1, 0.5, 5),  # as many groups as there is room for
        (G - 1, 0.5, 1),  # with room for less than a group, one at a time
    ],
)
def test_as_many_groups_are_begun_as_are_likely_to_be_needed(slots: int, accepted: float, expected: int):
    assert in_order(4, slots, accepted).n_to_stream() == expected


def test_open_groups_count_by_their_chance_and_certain_ones_fully():
    rule = in_order(4, 100 * G, 0.5)
    groups = [rule.sampler.collector.submit(PROBLEM, i, (1,)) for i in range(4)]
    rule.sampler.groups = groups
    right, wrong = Judgement(Verdict.CORRECT, 1.0), Judgement(Verdict.WRONG, -1.0)
    groups[0].add_verdict(0, right)
    groups[0].add_verdict(1, wrong)  # mixed: 1
    groups[1].add_verdict(0, wrong)  # one of three is known: 0.5 · 2/3
    for i in range(G):
        groups[2].add_verdict(i, wrong)  # all equal: 0
    assert [rule.chance(group) for group in groups] == pytest.approx([1, 0.5 * 2 / 3, 0, 0.5])
    missing = 4 - (1 + 1 / 3 + 0 + 1 / 2)
    assert rule.n_to_stream() == int(np.ceil(missing / 0.5))
    groups[3].is_dropped = True
    assert rule.n_to_stream() == int(np.ceil((missing + 0.5) / 0.5))
    change(rule, prompts_per_step=1)
    assert rule.n_to_stream() == 0


def test_rounds_begin_a_multiple_of_the_step_once_everything_is_known():
    rule = in_order(4, 100 * G, 0.5)
    change(rule, schedule="rounds", generation_multiple=3)
    assert rule.n_to_submit() == 12
    rule.sampler.submit(rule.n_to_submit())
    assert (len(rule.sampler.groups), len(rule.sampler.open)) == (12, 12)
    assert rule.n_to_submit() == 0


def test_groups_behind_the_last_one_needed_are_dropped_as_soon_as_it_is_known():
    rule = in_order(2, 100 * G, 0.5)
    rule.sampler.groups = groups = [rule.sampler.collector.submit(PROBLEM, i, (1,)) for i in range(5)]
    right, wrong = Judgement(Verdict.CORRECT, 1.0), Judgement(Verdict.WRONG, -1.0)
    for group in (groups[0], groups[2]):
        rule.observe([])
        assert not any(group.is_dropped for group in groups)
        group.add_verdict(0, right)
        group.add_verdict(1, wrong)
    for i in range(G):
        groups[3].add_verdict(i, wrong)
    change(rule, schedule="rounds")
    rule.observe([])
    assert not any(group.is_dropped for group in groups)  # a round is waited for
    change(rule, schedule="stream")
    rule.observe([])
    assert [group.is_dropped for group in groups] == [False, False, False, True, True]


def test_the_budget_bounds_what_is_tried():
    rule = in_order(4, 100 * G, 0.02)
    rule.sampler.budget = 7
    rule.sampler.submit(rule.n_to_submit())
    assert len(rule.sampler.groups) == 7
    assert rule.sampler.is_exhausted


def test_progress_tells_of_groups_that_are_known_to_be_mixed_and_never_of_more_than_wanted():
    told: list[tuple[int, int]] = []
    rule = in_order(1, 100 * G, 0.5)
    rule.sampler.progress = lambda known, wanted: told.append((known, wanted))
    groups = [rule.sampler.collector.submit(PROBLEM, i, (1,)) for i in range(3)]
    rule.sampler.groups, rule.sampler.open = groups, list(groups)
    rule.sampler.observe(rule)
    for group in groups[:2]:
        group.add_verdict(0, Judgement(Verdict.CORRECT, 1.0))
        group.add_verdict(1, Judgement(Verdict.WRONG, -1.0))
    tried = rule.sampler.state.acceptance.tried
    rule.sampler.observe(rule)
    assert rule.sampler.state.acceptance.tried == pytest.approx(0.98 * (0.98 * tried + 1) + 1)  # each once
    assert rule.sampler.open == groups[2:]
    rule.sampler.observe(rule)
    assert told == [(0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("n", "more"), [(1, ""), (2, " and 1 more"), (3, " and 2 more")])
def test_what_is_waited_for_is_the_first_of_them(n: int, more: str):
    requests = [Request(i, (1,), NoiseKey(0, "train", f"p{i}", 4, 2), 8, group=i) for i in range(n)]
    assert in_words(requests) == f"problem p0, visit 4, response 2{more}"


def test_nothing_is_submitted_to_an_engine_without_room():
    class Full:
        """A sampler, as far as that matters."""

        class collector:
            room = staticmethod(lambda: 0)

    assert InOrder(Full()).n_to_stream() == 0  # type: ignore[arg-type]


def test_seconds_are_told_of_the_last_responses_and_of_late_verdicts(monkeypatch: pytest.MonkeyPatch):
    """Of nine responses eight end at tick 3 and one at tick 10; a tick takes 1 s, a look for verdicts 5 s."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(collect, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    engine = VirtualEngine(max_concurrent=9, length_of=lambda request: 10 if request.id == 0 else 3)
    collector = Collector(engine, VirtualJudge(), responses_per_prompt=G, max_new_tokens=50, seed=11)

    def slow(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            clock.now += seconds
            return call(*arguments)

        return called

    monkeypatch.setattr(engine, "advance", slow(engine.advance, 1.0))
    monkeypatch.setattr(collector.verifier, "wait", slow(collector.verifier.wait, 5.0))
    for visit in range(3):
        collector.submit(PROBLEM, visit, (1,))
    while not collector.is_idle:
        collector.advance()
    assert engine.tick == 10
    assert collector.take_spent() == Spent(tail=1.0, verdicts=10.0, most=9)
    assert collector.take_spent() == Spent()
    collector.submit(PROBLEM, 3, (1,))  # three of three: the most, so no tail
    collector.advance()
    collector.drop(list(collector.groups.values()))
    assert collector.take_spent() == Spent(tail=0.0, verdicts=5.0, most=3)


def test_the_last_responses_of_a_queue_that_fills_every_slot_are_no_tail():
    engine = VirtualEngine(max_concurrent=1, length_of=lambda _request: 3)
    collector = Collector(engine, VirtualJudge(), responses_per_prompt=G, max_new_tokens=50, seed=11)
    for visit in range(3):
        collector.submit(PROBLEM, visit, (1,))
    while not collector.is_idle:
        collector.advance()
    spent = collector.take_spent()
    assert (spent.tail, spent.most) == (0.0, 1)
