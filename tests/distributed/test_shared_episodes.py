"""Episodes on several ranks, in a world of threads: what one engine writes, each environment on one rank."""

from typing import Any

import pytest
import torch
from thread_world import on_ranks

from dapo.distributed.environments import SharedEnvironments, read_part
from dapo.distributed.world import World
from dapo.environments.conversation import Answer, Conversation
from dapo.errors import EngineError
from dapo.models.policy import Policy
from dapo.rollout.engine import SamplingParams
from dapo.rollout.episodes import EpisodeEngine
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.shared import SharedEngine
from dapo.types import Judgement, Problem, Verdict
from engine_episodes import Words, episodes_over, prefilled, requests
from tiny_models import tiny_policy

SLOTS = 5


def talkative() -> Policy:
    policy = tiny_policy("llama3-rope", torch.float32)
    policy.eos_ids = tuple(range(2, 12))
    return policy


def make(world: World | None, policy: Policy, words: Words) -> EpisodeEngine:
    size = 1 if world is None else world.size
    own = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=-(-SLOTS // size), max_tokens=200)
    if world is None:
        return episodes_over(own, words, policy)
    shared = SharedEngine(own, world, max_concurrent=SLOTS)
    return episodes_over(shared, SharedEnvironments(words, world), policy)  # type: ignore[arg-type]


def written_by(engine: EpisodeEngine) -> list[Any]:
    """(tick, id, tokens, bytes of the log-probs) of what ended, in order; never more than there is room for."""
    wanted, ended = requests(12), []
    while wanted or engine.n_in_flight or engine.n_waiting:
        n = min(engine.capacity(), len(wanted))
        engine.submit(wanted[:n])
        wanted = wanted[n:]
        ended += [(engine.tick, r.id, c.tokens.tolist(), c.logp.tobytes()) for r, c in engine.advance()]
    return ended


@pytest.mark.parametrize("size", [2, 3])
def test_episodes_of_several_ranks_are_those_of_one_tick_by_tick(size: int):
    """To the last bit, in float32: a turn goes to the rank that keeps what was said before it."""
    one = make(None, talkative(), Words())
    alone = prefilled(one.inner)
    expected = written_by(one)
    policies, words, counts = [talkative() for _ in range(size)], [Words() for _ in range(size)], [[]] * size

    def work(world: World) -> Any:
        engine = make(world, policies[world.rank], words[world.rank])
        counts[world.rank] = prefilled(engine.inner.own)
        ended = written_by(engine)
        assert engine.inner.own._pool.n_free == engine.inner.own._pool.n_pages, "pages were lost"
        return ended

    for ended in on_ranks(size, work):
        assert ended == expected
    assert sum(map(sum, counts)) == sum(alone)
    asked = [{conversation.name for conversation in one.asked} for one in words]
    assert all(asked)
    assert sum(map(len, asked)) == len(set.union(*asked)) == 9, "each environment is on one rank"


def test_more_episodes_than_slots_end_on_several_ranks_too():
    policies = [talkative() for _ in range(2)]

    def work(world: World) -> list[int]:
        engine = make(world, policies[world.rank], Words())
        engine.submit(requests(16))
        ended = [request.id for _ in range(300) for request, _ in engine.advance()]
        assert not engine.n_in_flight
        return ended

    one, other = on_ranks(2, work)
    assert sorted(one) == list(range(16))
    assert one == other


ANSWER = Answer("hi", judgement=Judgement(Verdict.WRONG, 0.5, graded=True, parts={"tidy": 2.0}))


class Noisy:
    """An environment pool that has something to say whenever it is waited for."""

    def __init__(self, rank: int) -> None:
        self.rank, self.n_asked = rank, 0

    def ask(self, _conversation: Conversation) -> int:
        self.n_asked += 1
        return self.n_asked

    def wait(self, tickets: list[int]) -> dict[int, Answer]:
        self.on_notice(f"rank {self.rank}")  # type: ignore[attr-defined]
        return dict.fromkeys(tickets, ANSWER)


def test_every_rank_is_told_every_notice_once():
    def work(world: World) -> list[str]:
        shared, heard = SharedEnvironments(Noisy(world.rank), world), []  # type: ignore[arg-type]
        shared.on_notice = heard.append
        for _ in range(2):
            tickets = [
                shared.ask(Conversation(f"p{i}/0/0", Problem(f"p{i}", "q", "a"), 0, ("hello",))) for i in range(5)
            ]
            assert shared.wait(tickets) == dict.fromkeys(tickets, ANSWER)
        return heard

    assert on_ranks(2, work) == [["rank 0", "rank 1"] * 2] * 2


def test_answers_that_nobody_asked_for_are_refused():
    good = {"text": "hi", "role": "user", "called": False, "failed": False, "judgement": None}
    assert read_part(1, {"answers": [[4, good]], "notices": []}, [4])[4].text == "hi"
    for answers in ([], [[5, good]], [[4, good], [4, good]], [[4, {**good, "text": 3}]], [[4, {"text": "hi"}]], None):
        with pytest.raises(EngineError, match="rank 1 sent answers of environments that cannot be true"):
            read_part(1, {"answers": answers, "notices": []}, [4])
