"""Dynamic sampling on a virtual clock: what is chosen, what is wasted, when it ends."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.config.schema import SamplingConfig
from dapo.errors import DataError
from dapo.planning.virtual import EndlessSource, VirtualEngine, VirtualJudge, half_mixed, log_normal_lengths
from dapo.rollout.engine import Request
from dapo.sampling.accounting import Accounting, n_tokens
from dapo.sampling.carry import CarryOver, oldest_version
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import AcceptanceRate, GroupSampler, SampledGroups, SamplingState
from dapo.sampling.groups import apply_fill_policy, sample_groups
from dapo.trainer.step_metrics import overtaken_metrics
from dapo.types import Judgement, Problem, Task, Verdict

G, N = 8, 12


def settings_of(**changes: object) -> SamplingConfig:
    return SamplingConfig.model_validate({"prompts_per_step": N, "responses_per_prompt": G, "dynamic": True} | changes)


def collector_of(
    length_of: Callable[[Request], int] | None = None, *, max_concurrent: int = 64, delay: int = 4, limit: int = 400
) -> Collector:
    engine = VirtualEngine(max_concurrent=max_concurrent, length_of=length_of or log_normal_lengths(4.0, 0.9))
    return Collector(engine, VirtualJudge(), responses_per_prompt=G, max_new_tokens=limit, seed=0, delay_ticks=delay)


def sample(
    collector: Collector,
    source: EndlessSource,
    state: SamplingState | None = None,
    *,
    budget: int = 500,
    **changes: object,
) -> SampledGroups:
    return sample_groups(
        collector,
        source,
        settings_of(**changes),
        state or SamplingState(),
        version=0,
        filter_truncated=False,
        max_prompts_tried=budget,
    )


def ids(sampled: SampledGroups) -> list[str]:
    return [group.problem.id for group in sampled.groups]


# ---------------------------------------------------------------- eq. 11, and selection in order


def test_eq11_only_mixed_groups_are_chosen_and_the_step_is_full():
    done = sample(collector_of(), EndlessSource(half_mixed))
    assert len(done.groups) == N
    for group in done.groups:
        assert 0 < group.n_correct < G
        assert len(group.completions) == G


def test_the_choice_is_the_first_mixed_groups_in_submission_order():
    """Whatever the concurrency, the judge's delay or the schedule: the same groups, the same cursor, every step."""
    layouts = [
        ({"max_concurrent": 8}, {}),
        ({"max_concurrent": 64}, {}),
        ({"max_concurrent": 1000}, {}),
        ({"max_concurrent": 64, "delay": 0}, {}),
        ({"max_concurrent": 64, "delay": 50}, {}),
        ({"max_concurrent": 64}, {"schedule": "rounds"}),
        ({"max_concurrent": 256}, {"schedule": "rounds", "generation_multiple": 3}),
    ]
    runs = []
    for engine, changes in layouts:
        collector, source, state = collector_of(**engine), EndlessSource(half_mixed), SamplingState()
        runs.append([(ids(sample(collector, source, state, **changes)), source.at) for _ in range(3)])
    assert all(run == runs[0] for run in runs[1:])


def slow_when_wrong(request: Request) -> int:
    """Hard problems take long: the situation in which taking what finishes first changes what is learnt."""
    return 20 + int(300 * (1 - half_mixed(int(request.key.problem))))


def mean_length(steps: list[SampledGroups]) -> float:
    return float(np.mean([len(c.tokens) for f in steps for g in f.groups for c in g.completions]))


def test_length_bias_none_in_order_and_plain_under_first_finished():
    wide = 50 * G  # many more groups at once than the step needs, so that there is something to choose from
    collector = collector_of(slow_when_wrong, max_concurrent=wide)
    source, state = EndlessSource(half_mixed), SamplingState()
    prefix = [sample(collector, source, state) for _ in range(4)]
    # What an unbiased choice has: every mixed problem the cursor has passed, none left out.
    reference = collector_of(slow_when_wrong, max_concurrent=10**6)
    every = sample(reference, EndlessSource(half_mixed), schedule="rounds", generation_multiple=20, budget=source.at)
    wanted = [g for g in every.groups if int(g.problem.id) < source.at]
    assert mean_length(prefix[:1]) == pytest.approx(mean_length([SampledGroups(wanted, Accounting())]), rel=1e-9)

    # The control takes the first finished groups and throws the rest away: it must show the bias.
    collector = collector_of(slow_when_wrong, max_concurrent=wide)
    source = EndlessSource(half_mixed)
    config = settings_of(partial_rollouts=True)
    first_finished = []
    for _ in range(4):
        left = SamplingState()
        first_finished.append(
            sample_groups(collector, source, config, left, version=0, filter_truncated=False, max_prompts_tried=500)
        )
        collector.drop(left.pending)
    assert mean_length(first_finished) < 0.9 * mean_length(prefix)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(8, 200))
def test_every_generated_token_is_trained_on_or_wasted_once(seed: int, concurrent: int):
    written = 0

    class Counting(VirtualEngine):
        def _completion(self, *arguments: object) -> object:  # type: ignore[override]
            nonlocal written
            completion = super()._completion(*arguments)  # type: ignore[arg-type]
            written += len(completion.tokens)
            return completion

    engine = Counting(max_concurrent=concurrent, length_of=log_normal_lengths(3.0, 0.9, seed))
    collector = Collector(engine, VirtualJudge(seed), responses_per_prompt=G, max_new_tokens=200, seed=seed)
    source, state = EndlessSource(lambda p: half_mixed(p, seed)), SamplingState()
    accounts = [sample(collector, source, state).accounting for _ in range(2)]
    assert sum(account.generated_tokens for account in accounts) == written
    assert collector.is_idle


def test_a_group_counts_as_soon_as_one_right_and_one_wrong_are_known():
    collector = collector_of(lambda request: 10 if request.key.response_index < 4 else 300)
    source = EndlessSource(lambda _: 0.5)
    known: list[int] = []
    sample_groups(
        collector,
        source,
        settings_of(),
        SamplingState(),
        version=0,
        filter_truncated=False,
        max_prompts_tried=500,
        progress=lambda n, _: known.append(n),
    )
    assert known.index(known[-1]) < len(known) - 1  # certain before the last response came in
    assert source.at <= N + 2  # so hardly anything was submitted beyond what was needed


def test_the_engine_never_drains_while_work_is_wanted():
    collector = collector_of(max_concurrent=40)
    idle: list[tuple[int, int]] = []
    source = EndlessSource(half_mixed)

    def progress(known: int, wanted: int) -> None:
        idle.append((collector.engine.capacity(), wanted - known))

    sample_groups(
        collector,
        source,
        settings_of(),
        SamplingState(),
        version=0,
        filter_truncated=False,
        max_prompts_tried=500,
        progress=progress,
    )
    # While more than a few groups are missing, less than two groups' worth of slots stand empty at each event.
    assert all(room < 2 * G for room, missing in idle if missing > N // 2)


# ---------------------------------------------------------------- budget and policies


@pytest.mark.parametrize(("rate", "word"), [(1.0, "harder problems"), (0.0, "easier problems")])
def test_a_set_without_mixed_groups_ends_within_its_budget(rate: float, word: str):
    source = EndlessSource(lambda _: rate)
    done = sample(collector_of(lambda _: 20), source, budget=30)
    assert done.groups == []
    assert done.accounting.prompts_tried == 30
    assert word in done.events[0]
    with pytest.raises(DataError, match=word):
        sample(collector_of(lambda _: 20), EndlessSource(lambda _: rate), budget=30, fill_policy="error")


def one_in_ten(problem: int) -> float:
    return 0.5 if problem % 10 == 0 else 0.0


class GradesAllAlike(VirtualJudge):
    def wait(self, tickets):  # type: ignore[no-untyped-def]
        return {ticket: Judgement(Verdict.WRONG, 1.0, graded=True) for ticket in super().wait(tickets)}


def test_a_graded_reward_that_never_differs_is_told_as_such():
    collector = collector_of()
    collector.verifier = GradesAllAlike()
    done = sample(collector, EndlessSource(half_mixed), budget=40)
    assert done.groups == []
    assert done.accounting.wasted_tokens["all_equal"] == done.accounting.generated_tokens > 0
    assert "0 all correct, 0 all wrong, 40 all equal" in done.events[0]
    assert "grades more finely" in done.events[0]


@pytest.mark.parametrize(
    ("easy", "hard", "equal", "word"),
    [
        (2, 2, 0, "harder problems"), (1, 2, 0, "easier problems"), (2, 1, 0, "harder problems"),
        (2, 1, 3, "harder problems"), (2, 1, 4, "grades more finely"), (0, 3, 3, "easier problems"),
    ],
)  # fmt: skip
def test_border_the_remedy_is_for_what_is_most(easy: int, hard: int, equal: int, word: str):
    counts = Accounting(groups_all_correct=easy, groups_all_wrong=hard, groups_all_equal=equal)
    with pytest.raises(DataError) as error:
        apply_fill_policy(settings_of(fill_policy="error"), SamplingState(), [], counts, [])
    assert word in str(error.value.remedy)


def test_train_partial_trains_on_what_there_is():
    done = sample(collector_of(), EndlessSource(one_in_ten), budget=40)
    assert ids(done) == ["0", "10", "20", "30"]
    assert "only 4 of 12" in done.events[0]
    assert done.accounting.trained_tokens == sum(n_tokens(group) for group in done.groups)


def test_skip_holds_accepted_groups_for_the_next_step_and_loses_none():
    source, collector, state = EndlessSource(one_in_ten), collector_of(), SamplingState()
    steps = [sample(collector, source, state, budget=40, fill_policy="skip") for _ in range(3)]
    assert [len(step.groups) for step in steps] == [0, 0, N]
    assert ids(steps[2]) == [str(10 * i) for i in range(N)]


def test_without_dynamic_sampling_every_group_is_trained_on():
    done = sample(collector_of(), EndlessSource(half_mixed), dynamic=False)
    assert ids(done) == [str(i) for i in range(N)]
    assert any(group.n_correct in (0, G) for group in done.groups)


class Few(EndlessSource):
    """A set of five problems; each comes once a step."""

    def next(self):  # type: ignore[no-untyped-def]
        return super().next() if self.at - self.start < 5 else None


def test_fewer_slots_than_a_group_has_responses_still_finds_all_its_groups():
    done = sample(collector_of(lambda _: 20, max_concurrent=G // 2), EndlessSource(half_mixed))
    assert len(done.groups) == N


def test_a_round_is_waited_for_and_what_it_has_too_many_is_surplus():
    done = sample(collector_of(), EndlessSource(half_mixed), schedule="rounds", generation_multiple=3)
    assert len(done.groups) == N
    assert done.accounting.wasted_tokens["aborted"] == 0 < done.accounting.wasted_tokens["surplus"]


def test_each_step_counts_its_own_ticks():
    collector, source, state = collector_of(), EndlessSource(half_mixed), SamplingState()
    ends = [0]
    for _ in range(3):
        done = sample(collector, source, state)
        ends.append(collector.engine.tick)
        assert done.accounting.ticks == ends[-1] - ends[-2] > 0


def test_groups_not_mixed_are_reported_too_for_those_who_learn_from_them():
    done = sample(collector_of(lambda _: 20), EndlessSource(half_mixed))
    assert len(done.resolved) == done.accounting.prompts_tried
    assert {group.n_correct for group in done.resolved} >= {0, G}


def test_carry_over_without_partial_rollouts_waits_for_what_it_began():
    source, collector, state = EndlessSource(half_mixed), collector_of(slow_when_wrong), SamplingState()
    for step in range(3):
        done = carry(collector, source, state, step, partial_rollouts=False)
        assert len(done.groups) == N
        assert not state.pending
        assert done.accounting.wasted_tokens["aborted"] == 0


def test_a_set_smaller_than_the_step_ends_when_all_were_tried():
    for dynamic in (True, False):
        done = sample(collector_of(), Few(lambda _: 0.5), dynamic=dynamic)
        assert len(done.groups) == 5
        assert len(done.events) == 1  # nobody has to count the groups to notice
        assert "step not full" in done.events[0]
    assert "sampling.prompts_per_step = 12" in done.events[0]
    assert "only 5 problems" in done.events[0]
    assert not sample(collector_of(), EndlessSource(half_mixed), dynamic=False).events


# ---------------------------------------------------------------- carry-over and partial rollouts


def carry(
    collector: Collector, source: EndlessSource, state: SamplingState, version: int, **changes: object
) -> SampledGroups:
    config = settings_of(**({"carry_over": True, "partial_rollouts": True, "max_staleness_updates": 4} | changes))
    collector.engine.load_weights(None, version)  # type: ignore[arg-type]
    return sample_groups(
        collector, source, config, state, version=version, filter_truncated=False, max_prompts_tried=500
    )


def carrying(
    collector: Collector,
    source: EndlessSource,
    config: SamplingConfig,
    state: SamplingState | None = None,
    version: int = 0,
) -> CarryOver:
    """A step that has just begun, under its rule."""
    quiet = GroupSampler(
        collector,
        source,
        config,
        state or SamplingState(),
        max_prompts_tried=500,
        progress=lambda _known, _wanted: None,
    )
    return CarryOver(quiet, version)


def test_carry_over_wastes_nothing_but_groups_not_mixed_and_respects_the_bound():
    source, collector, state = EndlessSource(half_mixed), collector_of(), SamplingState()
    for step in range(6):
        done = carry(collector, source, state, 2 * step)
        assert len(done.groups) == N
        assert all(2 * step - oldest_version(group) <= 4 for group in done.groups)
        wasted = done.accounting.wasted_tokens
        assert wasted["surplus"] == wasted["aborted"] == 0
    assert state.pending  # the engine goes on writing across the update


def test_no_group_is_trained_on_twice_and_none_is_lost():
    source, collector, state = EndlessSource(lambda _: 0.5), collector_of(), SamplingState()
    trained = [group.problem.id for step in range(5) for group in carry(collector, source, state, step).groups]
    assert len(trained) == len(set(trained)) == 5 * N
    left = {group.problem.id for group in state.carried} | {pending.problem.id for pending in state.pending}
    not_mixed = source.at - len(trained) - len(left)
    assert not_mixed <= 2  # p = 0.5 and 8 responses: all equal once in 128 groups


def with_surplus() -> tuple[Collector, SamplingState]:
    """After one step at version 0: more groups ended together than were needed; the rest is carried."""
    collector, state = collector_of(lambda _: 50, max_concurrent=50 * G), SamplingState()
    carry(collector, EndlessSource(lambda _: 0.5), state, 0, partial_rollouts=False)
    assert len(state.carried) >= N
    return collector, state


def test_too_old_groups_are_dropped():
    collector, state = with_surplus()
    stale = carry(collector, Few(lambda _: 0.0), state, 5)
    assert stale.groups == []
    assert stale.accounting.wasted_tokens["stale"] > 0


def test_relax_raises_the_staleness_bound_only_when_the_budget_is_spent():
    collector, state = with_surplus()
    relaxed = carry(collector, Few(lambda _: 0.0), state, 5, fill_policy="relax")
    assert len(relaxed.groups) == N
    assert all(oldest_version(group) == 0 for group in relaxed.groups)


@pytest.mark.parametrize(("bound", "version", "n_used"), [(4, 4, N), (4, 5, 0), (None, 500, N)])
def test_border_a_group_may_be_as_old_as_the_bound_and_not_older(bound: int | None, version: int, n_used: int):
    collector, state = with_surplus()
    n_carried = len(state.carried)
    done = carry(collector, Few(lambda _: 0.0), state, version, max_staleness_updates=bound)
    assert len(done.groups) == n_used
    assert len(state.carried) == (n_carried - N if n_used else 0)
    stale = done.accounting.wasted_tokens["stale"]
    assert stale == (0 if n_used else n_carried * G * 50)
    assert sum(entry.fate == "stale" for entry in done.entries) == (0 if n_used else n_carried)
    assert done.accounting.trained_tokens == n_used * G * 50


@pytest.mark.parametrize(("version", "is_kept"), [(4, True), (5, False)])
def test_border_a_group_on_its_way_is_given_up_once_a_response_is_too_old(version: int, is_kept: bool):
    """One response of each group ended at version 0, the others go on: by tick 100 they have written 90 tokens more."""
    collector, state = collector_of(lambda r: 10 if r.key.response_index == 0 else 10**6, limit=10**6), SamplingState()
    collector.engine.load_weights(None, 0)  # type: ignore[arg-type]
    state.pending = [collector.submit(Problem(str(i), "", "", meta={"pass_rate": 0.5}), 0, (0,)) for i in range(2)]
    collector.advance()
    assert [[c is not None for c in group.completions].count(True) for group in state.pending] == [1, 1]
    collector.engine.tick = 100
    config = settings_of(partial_rollouts=True, max_staleness_updates=4)
    sampler = carrying(collector, Nothing(lambda _: 0.0), config, state, version).sampler
    assert len(state.pending) == len(collector.groups) == (2 if is_kept else 0)
    assert sampler.accounting.wasted_tokens["stale"] == (0 if is_kept else 2 * (10 + (G - 1) * 100))
    assert sampler.accounting.wasted_tokens["aborted"] == 0
    assert sampler.accounting.overtaken_tokens == sampler.accounting.wasted_tokens["stale"]
    assert sampler.accounting.overtaken_responses == (0 if is_kept else 2 * G)


def test_relax_takes_the_youngest_of_the_stale_and_no_more_than_are_missing():
    collector, state = with_surplus()
    every = state.carried[:6]
    aged = [
        replace(group, completions=tuple(replace(c, version=c.version + age) for c in group.completions))
        for group, age in zip(every, (1, 3, 0, 2, 3, 7), strict=True)
    ]
    state.carried = aged
    done = carry(collector, Few(lambda _: 0.0), state, 9, fill_policy="relax", prompts_per_step=3)
    assert ids(done) == [aged[i].problem.id for i in (5, 1, 4)]  # the last is within the bound of 4 updates
    assert done.accounting.wasted_tokens["stale"] == sum(n_tokens(aged[i]) for i in (0, 2, 3))


def test_without_partial_rollouts_only_what_is_likely_to_be_needed_is_begun():
    collector = collector_of(max_concurrent=50 * G)
    state = SamplingState(acceptance=AcceptanceRate(accepted=0.25, tried=1.0))
    state.carried = with_surplus()[1].carried[:3]
    policy = carrying(collector, EndlessSource(lambda _: 0.5), settings_of(carry_over=True), state, 0)
    assert policy.n_to_submit() == 36  # 3 + 36 / 4 = 12
    policy.sampler.submit(35)
    assert policy.n_to_submit() == 1
    policy.sampler.submit(1)
    assert policy.n_to_submit() == 0
    policy.sampler.config = settings_of(carry_over=True, partial_rollouts=True)
    assert policy.n_to_submit() == 50 - 36  # as many as there is room for


def test_with_waiting_for_what_was_overtaken_no_more_is_begun_than_can_be_used_in_time():
    config = settings_of(carry_over=True, partial_rollouts=True, finish_overtaken=True, max_staleness_updates=2)
    state = SamplingState(acceptance=AcceptanceRate(accepted=0.5, tried=1.0))
    policy = carrying(collector_of(max_concurrent=500 * G), EndlessSource(lambda _: 0.5), config, state)
    assert policy.usable_steps == 2
    assert policy.n_to_submit() == 3 * N / 0.5  # this step's groups, and those of two more
    policy.sampler.config = config.model_copy(update={"carry_over": False})
    assert policy.n_to_submit() == N / 0.5
    policy.sampler.config = config.model_copy(update={"partial_rollouts": False})
    assert policy.n_to_submit() == N / 0.5


def test_without_partial_rollouts_too_no_more_is_begun_than_there_is_room_for():
    policy = carrying(collector_of(max_concurrent=5 * G), EndlessSource(lambda _: 0.5), settings_of(carry_over=True))
    assert policy.n_to_submit() == 5


def test_with_carry_over_too_the_budget_bounds_what_is_tried():
    config = settings_of(carry_over=True, partial_rollouts=True)
    collector, source = collector_of(lambda _: 20), EndlessSource(lambda _: 0.0)
    done = sample_groups(
        collector, source, config, SamplingState(), version=0, filter_truncated=False, max_prompts_tried=9
    )
    assert done.accounting.prompts_tried == source.at == len(done.resolved) == 9


def test_a_group_is_as_old_as_its_oldest_token():
    group = with_surplus()[1].carried[0]
    assert oldest_version(group) == 0
    later = [replace(c, version=c.version + 5 + i) for i, c in enumerate(group.completions)]
    assert oldest_version(replace(group, completions=tuple(later))) == 5
    empty = replace(later[0], version=later[0].version[:0])
    assert oldest_version(replace(group, completions=(empty, *later[1:]))) == 6
    assert oldest_version(replace(group, completions=(empty,))) == 0


def test_without_carry_over_what_is_ready_and_not_used_is_surplus():
    collector, state = collector_of(lambda _: 50, max_concurrent=50 * G), SamplingState()
    done = carry(collector, EndlessSource(lambda _: 0.5), state, 0, carry_over=False)
    assert not state.carried
    resolved = sum(n_tokens(group) for group in done.resolved)
    wasted = done.accounting.wasted_tokens
    assert (
        wasted["surplus"] == resolved - done.accounting.trained_tokens - wasted["all_correct"] - wasted["all_wrong"] > 0
    )
    before = collector.engine.tick
    assert done.accounting.ticks == before
    again = carry(collector, EndlessSource(lambda _: 0.5), state, 0, carry_over=False)
    assert again.accounting.ticks == collector.engine.tick - before > 0


# ---------------------------------------------------------------- borders


class EvenIsMixed(VirtualJudge):
    """Even problems have one right response, the first; odd ones have none."""

    def submit(self, task: Task) -> int:
        assert {"question", "data_source"} <= task.meta.keys()  # a reward function may ask for them
        problem, _, index = task.response.split("/")
        is_right = int(problem) % 2 == 0 and index == "0"
        return super().submit(replace(task, meta={**task.meta, "pass_rate": float(is_right)}))


@pytest.mark.parametrize("schedule", ["stream", "rounds"])
@pytest.mark.parametrize("n_mixed", [0, 1, N - 1, N, N + 1, 2 * N + 1])
def test_border_a_step_takes_the_first_mixed_groups_up_to_its_size(n_mixed: int, schedule: str):
    """Two problems a piece, of which one is mixed, are all that may be tried."""
    collector, source, state = collector_of(lambda _: 20), EndlessSource(lambda _: 0.0), SamplingState()
    collector.verifier = EvenIsMixed()
    done = sample(collector, source, state, budget=2 * n_mixed, schedule=schedule)
    assert ids(done) == [str(2 * i) for i in range(min(n_mixed, N))]
    assert source.at == (2 * N - 1 if n_mixed >= N else 2 * n_mixed)  # just behind the last one used
    assert len(done.resolved) == source.at


class Nothing(EndlessSource):
    def next(self):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.parametrize("n_carried", [0, 1, N - 1, N, N + 1, 2 * N + 1])
def test_border_every_carried_group_is_trained_on_once_in_its_order(n_carried: int):
    collector, source, state = (
        collector_of(lambda _: 20, max_concurrent=G * 100),
        EndlessSource(lambda _: 0.0),
        SamplingState(),
    )
    collector.verifier = EvenIsMixed()
    every = sample(collector, source, prompts_per_step=4 * N, budget=8 * N).groups
    state.carried = every[:n_carried]
    trained = []
    for _ in range(3):
        done = carry(collector, Nothing(lambda _: 0.0), state, 0)
        assert len(done.groups) <= N
        trained += ids(done)
    assert trained == [group.problem.id for group in every[:n_carried]]
    assert not state.carried


def test_long_groups_are_waited_for_before_they_are_too_old():
    """One problem in eight is ten times as long: unless a step waits for them, they are dropped as too old."""
    kept = {}
    for is_finished in (False, True):
        engine = VirtualEngine(
            max_concurrent=8 * G, length_of=lambda request: 400 if int(request.key.problem) % 8 == 0 else 40
        )
        collector = Collector(
            engine, VirtualJudge(), responses_per_prompt=G, max_new_tokens=1000, seed=0, delay_ticks=0
        )
        source, state = EndlessSource(lambda _: 0.5), SamplingState(AcceptanceRate(50, 50))
        config = SamplingConfig(
            prompts_per_step=N, responses_per_prompt=G, dynamic=True, carry_over=True, partial_rollouts=True,
            max_staleness_updates=1, finish_overtaken=is_finished,
        )  # fmt: skip
        lengths, stale = [], 0
        for step in range(12):
            engine.load_weights(None, step)  # type: ignore[arg-type]
            done = sample_groups(
                collector, source, config, state, version=step, filter_truncated=False, max_prompts_tried=500
            )
            assert len(done.groups) == N
            assert done.accounting.groups_overtaken == len(state.pending)
            assert all(group.overtaken >= 1 for group in state.pending)
            lengths += [len(group.completions[0].tokens) for group in done.groups]
            stale += done.accounting.groups_stale
            if is_finished:
                assert {group.overtaken for group in state.pending} <= {1}
        kept[is_finished] = (sum(length > 40 for length in lengths) / len(lengths), stale)
    (share_without, stale_without), (share, stale) = kept[False], kept[True]
    assert stale_without > 0
    assert stale == 0
    assert share_without < 0.5 * share
    assert 0.06 < share < 0.2  # of one in eight


@pytest.mark.parametrize(
    ("bound", "updates", "steps"), [(16, 16, 1), (16, 15, 1), (15, 16, 1), (16, 8, 2), (33, 16, 2)]
)
def test_border_a_group_is_usable_for_as_many_steps_as_its_age_allows(bound: int, updates: int, steps: int):
    config = SamplingConfig(prompts_per_step=N, responses_per_prompt=G, carry_over=True, max_staleness_updates=bound)
    sampler = GroupSampler(
        collector_of(),
        EndlessSource(half_mixed),
        config,
        SamplingState(),
        max_prompts_tried=9,
        progress=lambda _a, _b: None,
    )
    assert CarryOver(sampler, 0, updates).usable_steps == steps


def test_lengths_of_groups_trained_on_are_logged_against_those_left_behind():
    collector, state = collector_of(lambda request: 20 + 40 * (int(request.key.problem) % 4)), SamplingState()
    source, seen = EndlessSource(lambda _: 0.5), []
    for step in range(6):
        behind = {group.problem.id for group in state.pending}
        done = carry(collector, source, state, step)
        made = overtaken_metrics(done)
        assert made["sampling/groups_overtaken"] == len(state.pending)
        kept = np.mean([len(c.tokens) for group in done.groups for c in group.completions])
        assert made["sampling/length_kept"] == pytest.approx(kept)
        late = [group for group in done.resolved if group.problem.id in behind and group.is_mixed]
        if late:
            overtaken = np.mean([len(c.tokens) for group in late for c in group.completions])
            assert made["sampling/length_overtaken"] == pytest.approx(overtaken)
            assert made["sampling/length_ratio"] == pytest.approx(kept / overtaken)
            seen.append(made["sampling/length_ratio"])
    assert seen
    assert min(seen) < 1  # short groups go first
    plain = sample_groups(
        collector_of(), EndlessSource(half_mixed), SamplingConfig(prompts_per_step=N, responses_per_prompt=G),
        SamplingState(), version=0, filter_truncated=False, max_prompts_tried=500,
    )  # fmt: skip
    assert overtaken_metrics(plain) == {}
    accounting = Accounting()
    accounting.overtaken(30, 3)  # of an earlier step, while this one leaves none behind
    assert overtaken_metrics(SampledGroups([], accounting))["sampling/length_overtaken"] == 10
