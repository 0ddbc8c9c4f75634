"""Episodes over the local and the plain engine: log-probs of one forward, the same tokens in any company, limits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from dapo.environments.conversation import Answer, Conversation
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, Finished, SamplingParams
from dapo.rollout.episodes import EpisodeEngine
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.plain.engine import PlainEngine
from dapo.rollout.turn_marks import TurnMarks
from dapo.types import Judgement, Problem, StopReason, Verdict
from engine_requests import by_id, drain, request
from tiny_models import tiny_policy

TURNS = 5
ENGINES = {"local": LocalEngine, "plain": PlainEngine}


class Words:
    """In this process: answers by what was said, five turns long, then a score."""

    def __init__(self, turns: int = TURNS, after: int = 2, words: int = 3) -> None:
        self.turns, self.after, self.words = turns, after, words
        self.waited_s = 0.0
        self.asked: list[Conversation] = []
        self.ended: list[str] = []

    def answer_after_ticks(self, environment: str) -> int:  # noqa: ARG002
        return self.after

    def opening(self, problem: Problem, seed: int) -> str:  # noqa: ARG002
        return ""

    def ask(self, conversation: Conversation) -> int:
        self.asked.append(conversation)
        return len(self.asked) - 1

    def wait(self, tickets: Sequence[int]) -> dict[int, Answer]:
        return {ticket: self.answer(self.asked[ticket]) for ticket in tickets}

    def answer(self, conversation: Conversation) -> Answer:
        if len(conversation.said) == self.turns:
            return Answer("bye", judgement=Judgement(Verdict.CORRECT, 0.5, graded=True))
        said = len(conversation.said[-1]) + conversation.seed
        return Answer(" ".join(f"w{3 + (said + i) % 30}" for i in range(self.words)), called=True)

    def end(self, name: str) -> None:
        self.ended.append(name)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Many tokens end a turn, so that turns are short."""
    made = tiny_policy("llama3-rope")
    made.eos_ids = tuple(range(2, 12))
    return made


def engine_of(policy: Policy, kind: str, words: Words, rows: int = 3, **how: Any) -> EpisodeEngine:
    inner = ENGINES[kind](policy, sampling=SamplingParams(), max_concurrent=rows, max_tokens=200, **how)
    marks = TurnMarks(policy.tokenizer, chat=False, eos_ids=policy.eos_ids)
    problems = {str(i): Problem(str(i), "", "", environment="words" if i % 4 else "") for i in range(40)}
    return EpisodeEngine(inner, words, marks, problems, max_turns=8)


def requests(n: int, limit: int = 120) -> list[Any]:
    return [request(i, limit) for i in range(n)]


def check_logp(policy: Policy, finished: Sequence[Finished]) -> None:
    """Of the tokens that the model drew, by one forward over everything that was said."""
    for asked, completion in finished:
        packed = pack([asked.prompt], [completion.tokens], policy.device, own=[completion.own])
        with torch.no_grad():
            expected, _ = policy(packed, temperature=1.0)
        own = completion.logp if completion.own is None else completion.logp[completion.own]
        assert_close(torch.from_numpy(own), expected, rtol=0, atol=1e-10)


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for i, completion in one.items():
        assert np.array_equal(completion.tokens, other[i].tokens), i
        assert np.array_equal(completion.own, other[i].own), i
        assert completion.stop_reason is other[i].stop_reason
        assert completion.episode == other[i].episode


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


def evaluation(engine: Engine) -> Engine:
    return engine.fork_for_eval(SamplingParams(temperature=0))


def test_an_evaluation_beside_a_run_has_episodes_of_its_own(policy: Policy, alone: dict[int, Any]):
    engine = engine_of(policy, "local", Words(), rows=5)
    engine.submit(requests(12))
    finished = [item for _ in range(9) for item in engine.advance()]
    fork = evaluation(engine)
    fork.submit([request(i, 60, stream="eval") for i in range(4)])
    assert len(drain(fork)) == 4
    same(by_id([*finished, *drain(engine)]), alone)
