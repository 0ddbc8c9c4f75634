"""Episodes over the local and the plain engine: log-probs of one forward, the same tokens in any company, limits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo.environments.conversation import Answer, Conversation
from dapo.models.policy import Policy
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import EngineState, NoiseKey, Request, SamplingParams
from dapo.rollout.episodes import EpisodeEngine, seed_of
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.kept import KeptResponses
from dapo.rollout.local.pages import PagePool
from dapo.rollout.partial import PartialResponse
from dapo.rollout.plain.engine import PlainEngine
from dapo.rollout.stops import Stops
from dapo.sampling.collect import VerdictJournal
from dapo.types import Judgement, StopReason, Verdict
from engine_episodes import TURNS, Words, check_logp, episodes_over, logp_gap, prefilled, requests, same
from engine_requests import by_id, drain, request, shaken
from tiny_models import VOCABULARY, families, tiny_policy

ENGINES = {"local": LocalEngine, "plain": PlainEngine}


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Many tokens end a turn, so that turns are short."""
    made = tiny_policy("llama3-rope")
    made.eos_ids = tuple(range(2, 12))
    return made


def engine_of(policy: Policy, kind: str, words: Words, rows: int = 3, **how: Any) -> EpisodeEngine:
    inner = ENGINES[kind](policy, sampling=SamplingParams(), max_concurrent=rows, max_tokens=200, **how)
    return episodes_over(inner, words, policy)


@pytest.fixture(scope="module")
def alone(policy: Policy) -> dict[int, Any]:
    """Twelve episodes, one at a time, on the plain engine."""
    engine = engine_of(policy, "plain", Words(), rows=1)
    engine.submit(requests(12))
    return by_id(drain(engine))


@pytest.mark.parametrize("kind", ENGINES)
def test_the_log_probs_of_an_episode_are_those_of_one_forward(policy: Policy, alone: dict[int, Any], kind: str):
    words = Words()
    engine = engine_of(policy, kind, words, rows=5)
    engine.submit(requests(12))
    finished = drain(engine)
    check_logp(policy, finished)
    found = by_id(finished)
    same(found, alone)
    whole = [c for i, c in found.items() if i % 4 and c.stop_reason is StopReason.EOS]
    assert len(whole) > 4
    for completion in whole:
        assert completion.episode.turns == TURNS
        assert completion.episode.calls == TURNS - 1
        assert completion.episode.judgement.value == 0.5
        assert (completion.logp[~completion.own] == 0).all()
        assert (~completion.own).sum() == 3 * (TURNS - 1)
        assert (
            np.isin(completion.tokens[completion.own], policy.eos_ids).sum() == TURNS
        )  # every turn keeps the end it was drawn with
    assert all(found[i].own is None and found[i].episode is None for i in (0, 4, 8))  # no environment: as ever
    assert sorted(words.ended) == sorted(f"train/{i}/0/{i}" for i in range(12) if i % 4)


@pytest.mark.parametrize("kind", ENGINES)
def test_drafts_change_no_token_of_an_episode(policy: Policy, alone: dict[int, Any], kind: str):
    engine = engine_of(policy, kind, Words(), rows=5, drafting=Drafting(tokens=3, below_rows=5))
    engine.submit(requests(12))
    finished = [item for _ in range(9) for item in engine.advance()]
    state = engine.snapshot()
    engine = engine_of(policy, kind, Words(), rows=5, drafting=Drafting(tokens=3, below_rows=5))
    engine.restore(state)
    finished += drain(engine)
    check_logp(policy, finished)
    same(by_id(finished), alone)
    assert engine.take_drafted()[1] > 0


@pytest.mark.parametrize("kind", ENGINES)
def test_an_episode_goes_on_from_a_snapshot_at_any_tick(policy: Policy, alone: dict[int, Any], kind: str):
    engine, finished, restored = engine_of(policy, kind, Words(), rows=5), [], 0
    engine.submit(requests(12))
    for tick in range(1_000):
        if not engine.n_in_flight and not engine.n_waiting:
            break
        finished += engine.advance()
        if tick % 5 == 0:
            state = engine.snapshot()
            meta = json.loads(json.dumps(state.meta))
            engine = engine_of(policy, kind, Words(), rows=5)
            engine.restore(EngineState(meta, {name: array.copy() for name, array in state.arrays.items()}))
            assert engine.tick == tick + 1
            restored += bool(engine._waiting())
    check_logp(policy, finished)
    same(by_id(finished), alone)
    assert restored > 3


def test_an_answer_takes_effect_exactly_so_many_ticks_later(policy: Policy):
    begun = {}
    for after in (0, 3):
        words = Words(after=after)
        engine = engine_of(policy, "plain", words, rows=2)
        engine.submit(requests(2)[1:])
        while not words.asked:
            engine.advance()
        asked = engine.tick
        engine.pause()
        assert engine.advance() == []
        engine.resume()
        while engine.inner.n_in_flight + engine.inner.n_waiting == 0:
            assert engine.n_in_flight == 1
            assert engine.capacity() == 1  # its place is kept
            engine.advance()
        begun[after] = engine.tick - asked
    assert begun == {0: 1, 3: 4}  # the tick after the answer draws the next token


STOPS = (("", "5w1"), ("w7", "w3"))  # of two tokens; one that ends a turn only after another


def ended_by_hand(policy: Policy, tokens: Any) -> int | None:
    """How many tokens a turn has by its text alone: the fewest that complete a string."""
    for n in range(1, len(tokens) + 1):
        text = policy.tokenizer.decode(tokens[:n])
        if "5w1" in text or ("w7" in text and "w3" in text[text.index("w7") + 2 :]):
            return n
    return None


@pytest.mark.parametrize(
    ("kind", "how"), [("plain", {}), ("local", {}), ("local", {"ops": "plain", "tokens_per_tick": 3})]
)
def test_a_response_ends_with_the_token_that_completes_a_stop(kind: str, how: dict[str, Any]):
    made = tiny_policy("llama3-rope")
    stopped, free = ({}, {})
    for found, stop in (stopped, STOPS), (free, ()):
        engine = ENGINES[kind](made, sampling=SamplingParams(), max_concurrent=5, max_tokens=200, **how)
        engine.submit([replace(request(i, 60), stop=stop if i % 4 else ()) for i in range(24)])
        found |= by_id(drain(engine))
    n_stopped = 0
    for i, completion in free.items():
        n = ended_by_hand(made, completion.tokens) if i % 4 else None
        n_stopped += n is not None
        assert np.array_equal(stopped[i].tokens, completion.tokens[:n])
        assert np.array_equal(stopped[i].logp, completion.logp[:n])
        assert stopped[i].stop_reason is (completion.stop_reason if n is None else StopReason.EOS)
    assert 4 < n_stopped < 18


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "how", "is_stopped"),
    [
        ("local", {}, True),
        pytest.param("local", {}, False, marks=SLOW),
        *(pytest.param("plain", {}, stopped, marks=SLOW) for stopped in (False, True)),
        *(
            pytest.param("local", {"ops": "plain", "tokens_per_tick": 3}, stopped, marks=SLOW)
            for stopped in (False, True)
        ),
    ],
)
def test_turns_that_a_string_ends_are_on_policy_and_go_on_from_a_snapshot(
    kind: str, how: dict[str, Any], is_stopped: bool
):
    made = tiny_policy("llama3-rope")

    def engine_with_stops(kind: str, rows: int, **how: Any) -> EpisodeEngine:
        words = Words(turns=3)
        words.stops = STOPS
        return engine_of(made, kind, words, rows, **how)

    single = engine_with_stops("plain", 1)
    single.submit(requests(10))
    engine, finished = engine_with_stops(kind, 4, **how), []
    counts = prefilled(engine.inner) if kind == "local" else []
    engine.submit(requests(10))
    for tick in range(1_000):
        if not engine.n_in_flight and not engine.n_waiting:
            break
        finished += engine.advance()
        if is_stopped and tick % 5 == 0:
            state = engine.snapshot()
            engine = engine_with_stops(kind, 4, **how)
            engine.restore(EngineState(json.loads(json.dumps(state.meta)), dict(state.arrays)))
    check_logp(made, finished)
    same(by_id(finished), by_id(drain(single)))
    assert max(completion.episode.turns for asked, completion in finished if asked.id % 4) == 3
    if kind == "local":
        assert engine.inner._pool.n_free == engine.inner._pool.n_pages, "pages were lost"
        if not is_stopped:  # a turn costs a prefill of the new tokens only
            said = sum(len(completion.tokens) - completion.n_own for _, completion in finished)
            assert sum(counts) == sum(len(asked.prompt) - 1 for asked, _ in finished) + said


def test_only_tokens_that_may_complete_a_string_are_decoded():
    words = tiny_policy().tokenizer
    stops = Stops(words, VOCABULARY)
    asked = replace(request(1), stop=STOPS)
    assert stops.expect(asked)
    assert not stops.expect(asked)  # known already
    assert np.array_equal(stops.may_complete, [bool({*"13"} & {*words.decode([i])}) for i in range(VOCABULARY)])
    accented = Stops(words, VOCABULARY)
    accented.expect(replace(asked, stop=(("", "é"),)))  # of several bytes, which several tokens may bring
    assert not accented.may_complete.any()
    pieces = ["e", "é", "\ufffd", "x\ufffd"]  # the last two end or begin in the middle of a character
    parts = Stops(SimpleNamespace(batch_decode=lambda _: pieces), len(pieces))
    parts.expect(replace(asked, stop=(("", "é"),)))
    assert parts.may_complete.tolist() == [False, True, True, True]
    parts.expect(replace(asked, stop=(("", "e"),)))
    assert parts.may_complete.all()
    spaced = Stops(words, VOCABULARY)
    spaced.expect(replace(asked, stop=(("", ": "),)))
    assert spaced.may_complete.all()


class Sleepy(Words):
    """Its clock is the engine's tick: environment `slow` answers 30 ticks after it was asked, the other at once."""

    SECONDS = 30

    def __init__(self, covered: bool) -> None:
        super().__init__(turns=3)
        self.covered = covered
        self.ready: list[int] = []

    def answer_after_ticks(self, environment: str) -> int:
        return self.SECONDS if environment == "slow" and self.covered else self.after

    def ask(self, conversation: Conversation) -> int:
        self.ready.append(self.engine.tick + self.SECONDS * (conversation.problem.environment == "slow"))
        return super().ask(conversation)

    def wait(self, tickets: Sequence[int]) -> dict[int, Answer]:
        self.waited_s += max([0, *(self.ready[ticket] - self.engine.tick for ticket in tickets)])
        return super().wait(tickets)


def test_nobody_waits_for_a_slow_environment_whose_ticks_cover_it(policy: Policy):
    """One in ten is slow: with its ticks the others draw what they draw without it, tick by tick."""
    drawn, waited = {}, {}
    for name, slow, covered in (("none", "words", True), ("covered", "slow", True), ("default", "slow", False)):
        words = Sleepy(covered)
        engine = engine_of(policy, "local", words, rows=10)
        words.engine = engine
        engine.problems = {
            i: replace(problem, environment=slow if i == "7" else "words") for i, problem in engine.problems.items()
        }
        engine.submit(requests(10))
        drawn[name] = [[] for _ in range(40)]
        for tick in range(40):
            ended = engine.advance()
            others = [(asked.id, c.tokens.tolist()) for asked, c in ended if asked.id != 7]
            others += [(one.request.id, one.tokens.tolist()) for one in engine.under_way() if one.request.id != 7]
            drawn[name][tick] = sorted(others)
        waited[name] = words.waited_s
    assert drawn["covered"] == drawn["none"]
    assert waited["none"] == waited["covered"] == 0
    assert waited["default"] >= Sleepy.SECONDS - 2 * Words().after


@pytest.mark.parametrize("kind", ENGINES)
def test_what_runs_over_is_truncated(policy: Policy, kind: str):
    engine = engine_of(policy, kind, Words(turns=99), rows=4)
    engine.submit(requests(8, limit=40))
    for asked, completion in drain(engine):
        if asked.id % 4:
            assert completion.stop_reason is StopReason.LENGTH
            assert completion.episode.judgement is None
            assert len(completion.tokens) == 40 or completion.episode.turns == 8
    engine.max_turns = 2
    engine.submit(requests(8))
    ended = [completion for asked, completion in drain(engine) if asked.id % 4]
    assert max(completion.episode.turns for completion in ended) == 2
    assert all(completion.stop_reason is StopReason.LENGTH for completion in ended)
    talkative = engine_of(policy, kind, Words(words=500), rows=4)
    talkative.submit(requests(4, limit=60))
    ended = by_id(drain(talkative))
    assert all(len(ended[i].tokens) == 60 and ended[i].is_truncated for i in (1, 2, 3))
    assert any(ended[i].n_own < 60 for i in (1, 2, 3))


def test_an_environment_without_an_answer_leaves_the_verdict_to_the_verifier(policy: Policy):
    words = Words()
    words.answer = lambda conversation: Answer("" if len(conversation.said) == 2 else "w7")  # type: ignore[method-assign]
    engine = engine_of(policy, "plain", words)
    engine.submit(requests(2)[1:])
    ((_, completion),) = drain(engine)
    assert completion.stop_reason is StopReason.EOS
    assert completion.episode.judgement is None
    assert completion.answer == words.asked[-1].said[-1]
    assert completion.answer in completion.text != completion.answer


def test_what_is_done_meanwhile_is_done_once_a_tick(policy: Policy):
    engine, called = engine_of(policy, "plain", Words()), []
    engine.submit(requests(2))
    engine.pause()
    engine.advance(lambda: called.append(1))
    engine.resume()
    n_ticks = 1
    while engine.n_in_flight or engine.n_waiting:
        engine.advance(lambda: called.append(1))
        n_ticks += 1
    assert len(called) == n_ticks


def test_an_episode_whose_turn_the_engine_gave_up_is_aborted_and_not_truncated(policy: Policy):
    engine = engine_of(policy, "plain", Words())
    advance = engine.inner.advance
    engine.inner.advance = lambda meanwhile: [  # type: ignore[method-assign, assignment, misc]
        (asked, replace(turn, stop_reason=StopReason.ABORTED)) for asked, turn in advance(meanwhile)
    ]
    engine.submit(requests(2)[1:])
    ((_, completion),) = drain(engine)
    assert completion.stop_reason is StopReason.ABORTED


@pytest.mark.parametrize("kind", ENGINES)
def test_an_episode_that_is_given_up_comes_back_with_what_it_has(policy: Policy, kind: str):
    engine = engine_of(policy, kind, Words(after=5), rows=6)
    engine.submit(requests(6))
    while not engine._waiting() or not engine.inner.n_in_flight:
        engine.advance()
    given_up = engine.abort(range(99))
    assert [asked.id for asked, _ in given_up] == sorted(asked.id for asked, _ in given_up)
    assert all(completion.stop_reason is StopReason.ABORTED for _, completion in given_up)
    assert engine.n_in_flight == engine.n_waiting == 0
    check_logp(policy, [item for item in given_up if len(item[1].tokens)])
    engine.submit(requests(6))  # their ids are free again


def test_border_keys_and_values_of_the_last_turn_are_not_kept(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(policy, "plain", Words(), rows=4)
    engine.max_turns, submit, turns = 2, engine.inner.submit, dict[int, list[bool]]()

    def noting(asked: Sequence[Request]) -> None:
        for one in asked:
            turns.setdefault(one.id, []).append(one.may_continue)
        submit(asked)

    monkeypatch.setattr(engine.inner, "submit", noting)
    engine.submit(requests(8))
    drain(engine)
    assert {tuple(kept) for number, kept in turns.items() if number % 4} == {(True, False)}
    assert all(kept == [False] for number, kept in turns.items() if number % 4 == 0)  # without an environment


def test_a_call_that_failed_is_a_call(policy: Policy):
    """Else more calls could fail than there were."""

    class Failing(Words):
        def wait(self, tickets: Sequence[int]) -> dict[int, Answer]:
            return {
                ticket: replace(one, called=False, failed=True) for ticket, one in super().wait(list(tickets)).items()
            }

    engine = engine_of(policy, "plain", Failing(), rows=4)
    engine.submit(requests(4))
    told = [completion.episode for _, completion in drain(engine) if completion.episode is not None]
    assert sum(episode.failures for episode in told) > 0
    assert all(episode.calls == episode.failures for episode in told)


def test_new_weights_in_the_middle_of_an_episode_draw_the_rest(policy: Policy):
    engine = engine_of(policy, "local", Words())
    engine.submit(requests(2)[1:])
    for _ in range(12):
        engine.advance()
    engine.load_weights(policy, 1)
    ((_, completion),) = drain(engine)
    assert sorted(set(completion.version.tolist())) == [0, 1]
    assert (np.diff(completion.version) >= 0).all()
    assert all(completion.version[t] == completion.version[t - 1] for t in np.flatnonzero(~completion.own))


@pytest.mark.parametrize("how", [{}, {"ops": "plain", "tokens_per_tick": 3}])
@pytest.mark.parametrize("page_tokens", [1, 7, 16])
def test_a_turn_costs_a_prefill_of_the_new_tokens_only(
    policy: Policy, alone: dict[int, Any], how: dict[str, Any], page_tokens: int
):
    """The prompt but for its last token, and what the environment said: all others are computed by decode steps."""
    engine = engine_of(policy, "local", Words(), rows=5, page_tokens=page_tokens, **how)
    counts = prefilled(engine.inner)
    engine.submit(requests(12))
    finished = drain(engine)
    check_logp(policy, finished)
    same(by_id(finished), alone)
    said = sum(len(completion.tokens) - completion.n_own for _, completion in finished)
    assert sum(counts) == sum(len(asked.prompt) - 1 for asked, _ in finished) + said
    assert engine.inner._pool.n_free == engine.inner._pool.n_pages, "pages were lost"


@pytest.mark.parametrize("words", [1, 3, 4, 5, 9])
def test_borders_of_what_is_prefilled_at_once(policy: Policy, words: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.rollout.local.prefixes.EXTEND_TOKENS", 4)
    engine = engine_of(policy, "local", Words(turns=3, words=words), rows=4, page_tokens=4)
    counts = prefilled(engine.inner)
    engine.submit(requests(4)[1:])
    finished = drain(engine)
    check_logp(policy, finished)
    said = sum(len(completion.tokens) - completion.n_own for _, completion in finished)
    assert not engine.inner._decoder.cache.data[:, :, 0].any()  # padding goes there: inf times 0 would be NaN
    assert said > 0
    assert sum(counts) == sum(len(asked.prompt) - 1 for asked, _ in finished) + said


@pytest.mark.parametrize("family", families(()))
def test_every_family_goes_on_from_what_is_kept(family: str):
    made = tiny_policy(family)
    made.eos_ids = tuple(range(2, 12))
    engine = engine_of(made, "local", Words(words=9), page_tokens=4)
    engine.submit(requests(5)[1:])
    finished = drain(engine)
    check_logp(made, finished)
    assert max(c.episode.turns for _, c in finished if c.episode) > 2


def test_out_of_pages_an_episode_waits_on_the_host_and_comes_back_bit_for_bit():
    made = tiny_policy("llama3-rope", torch.float32)
    made.eos_ids = tuple(range(2, 12))
    results, swapped = [], []
    for rows, kv_tokens in ((1, None), (6, None), (6, 208)):
        engine = engine_of(made, "local", Words(after=5), rows=rows, page_tokens=4, kv_tokens=kv_tokens)
        kept = engine.inner._kept
        swap_out = kept.swap_out
        kept.swap_out = lambda i, kv=kv_tokens, original=swap_out: (swapped.append((i, kv)), original(i))  # type: ignore[method-assign]
        engine.submit(requests(14))
        results.append(by_id(drain(engine)))
        assert engine.inner._pool.n_free == engine.inner._pool.n_pages, "pages were lost"
    assert {kv for _, kv in swapped} == {208}
    waiting = [i for i, _ in swapped if i % 4]
    assert len(waiting) > 2
    for result in results[1:]:
        same(result, results[0])
        assert all(c.logp.tobytes() == results[0][i].logp.tobytes() for i, c in result.items())


@pytest.mark.slow
def test_long_episodes_do_not_depend_on_their_neighbours_to_the_last_bit():
    made = tiny_policy("llama", torch.float32, max_position_embeddings=2048)
    made.eos_ids = tuple(range(2, 12))
    wanted = [request(i, 150, n_prompt=n) for i, n in ((1, 260), (2, 300), (3, 384), (5, 480), (6, 700), (7, 301))]

    def written(asked: list[Any]) -> dict[int, Any]:
        inner = LocalEngine(made, sampling=SamplingParams(), max_concurrent=8, max_tokens=1024)
        engine = episodes_over(inner, Words(turns=4, words=20), made)
        engine.submit(asked)
        return by_id(drain(engine))

    among = written(wanted)
    assert max(completion.episode.turns for completion in among.values()) == 4
    for each in wanted:
        alone = written([each])[each.id]
        assert alone.tokens.tobytes() == among[each.id].tokens.tobytes()
        assert alone.logp.tobytes() == among[each.id].logp.tobytes()


def test_the_one_that_stopped_last_makes_room_and_never_the_one_that_is_to_run():
    """Whoever is admitted has counted on its pages: given away, they would be another's too."""
    pool, prompt = PagePool(9), SimpleNamespace(n_users=0, n_running=0)
    kept = KeptResponses(pool, SimpleNamespace(), SimpleNamespace(read=torch.from_numpy))  # type: ignore[arg-type]
    for number in (1, 2, 3):
        kept.keep(number, prompt, np.zeros(4, np.int32), pool.take(2))  # type: ignore[arg-type]
    assert (prompt.n_users, prompt.n_running) == (3, 3)
    for gone in ([2], [2, 1]):
        assert kept.swap_out_last(but=3)
        assert [number for number, one in kept._kept.items() if one.content is not None] == sorted(gone)
    assert not kept.swap_out_last(but=3)
    assert kept.swap_out_last()
    assert (prompt.n_users, prompt.n_running, pool.n_free) == (3, 0, pool.n_pages)


def test_what_is_kept_of_other_tokens_is_dropped():
    pool, prompt, left = PagePool(9), SimpleNamespace(n_users=0, n_running=0), []
    kept = KeptResponses(pool, SimpleNamespace(leave=left.append), SimpleNamespace())  # type: ignore[arg-type]
    kept.keep(7, prompt, np.array([5, 6, 9], np.int32), pool.take(2))  # type: ignore[arg-type]
    goes_on = PartialResponse(replace(request(7), prompt=(5, 6)), 0, np.array([9, 8], np.int32))
    assert kept.of(goes_on) is not None
    assert kept.of(replace(goes_on, tokens=np.array([3, 8], np.int32))) is None
    assert kept.of(goes_on) is None
    assert (left, prompt.n_running, pool.n_free) == ([prompt], 0, pool.n_pages)


def test_nothing_of_old_weights_is_kept():
    made = tiny_policy()
    made.eos_ids = tuple(range(2, 12))
    engine = engine_of(made, "local", Words(after=4), rows=6)
    engine.submit(requests(8)[1:])
    early = []
    while len(engine._waiting()) < 3:
        early += engine.advance()
    engine.load_weights(shaken(made), 1)
    mixed = [item for item in drain(engine) if item[1].own is not None and len({*item[1].version.tolist()}) == 2]
    assert len(mixed) > 2
    for item in mixed:
        is_new = item[1].version[item[1].own] == 1
        gap = logp_gap(made, item)
        assert gap[is_new].max() < 1e-10
        assert gap[~is_new].max() > 1e-3


def test_later_turns_go_before_what_has_not_begun(policy: Policy):
    """Else all episodes of an evaluation would be begun before one ends."""
    engine = engine_of(policy, "local", Words(after=1), rows=2)
    engine.submit(requests(16))
    most = 0
    while len(engine.under_way()) > 4:
        engine.advance()
        most = max(most, sum(bool(episode.said) for episode in engine.under_way()))
    assert 2 <= most <= 4


def test_later_turns_have_noise_of_their_own(policy: Policy):
    engine, turns = engine_of(policy, "plain", Words()), []
    submit = engine.inner.submit
    engine.inner.submit = lambda asked: turns.extend(asked) or submit(asked)  # type: ignore[method-assign]
    engine.submit(requests(2)[1:])
    drain(engine)
    assert [turn.key.start for turn in turns] == [len(turn.prompt) - len(turns[0].prompt) for turn in turns]
    assert len(turns) == TURNS
    key = request(1).key
    turns = [replace(key, start=start) for start in (0, 1, 7)]
    assert len({turn.words() for turn in turns}) == 3
    assert turns[0] == key


def test_all_responses_of_a_visit_meet_one_environment_and_another_visit_another():
    key = NoiseKey(0, "train", "p", 0, 0)
    assert seed_of(replace(key, response_index=3)) == seed_of(key)
    others = ({"visit": 1}, {"problem": "q"}, {"stream": "eval"}, {"seed": 1})
    assert len({seed_of(key), *(seed_of(replace(key, **other)) for other in others)}) == 5


def test_a_turn_at_which_an_environment_failed_is_not_asked_again(policy: Policy):
    class Dies(Words):
        def answer(self, conversation: Conversation) -> Answer:
            if len(conversation.said) < 3:
                return super().answer(conversation)
            return Answer(judgement=Judgement(Verdict.TIMEOUT, -1.0))

    known: dict[str, Judgement] = {}
    finished, asked = [], []
    for _ in range(2):
        words = Dies()
        engine = engine_of(policy, "local", words)
        engine.journal = VerdictJournal(known, known.__setitem__)
        engine.submit([request(1, 120)])
        finished.append(drain(engine)[0][1].judgement)
        asked.append(len(words.asked))
    assert asked == [3, 2]
    assert finished[0] == finished[1] is not None


def evaluation(engine: EpisodeEngine) -> EpisodeEngine:
    return engine.fork_for_eval(SamplingParams(temperature=0))


def test_an_evaluation_beside_a_run_has_episodes_of_its_own(policy: Policy, alone: dict[int, Any]):
    engine = engine_of(policy, "local", Words(), rows=5)
    engine.submit(requests(12))
    finished = [item for _ in range(9) for item in engine.advance()]
    engine.journal, engine.parts = VerdictJournal(), ["chatty"]
    fork = evaluation(engine)
    assert (fork.journal, fork.parts) == (None, ())  # verdicts of training are not its own, nor what a reward adds
    engine.journal, engine.parts = None, ()
    fork.submit([request(i, 60, stream="eval") for i in range(4)])
    assert len(drain(fork)) == 4
    same(by_id([*finished, *drain(engine)]), alone)
