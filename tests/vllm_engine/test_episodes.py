"""Episodes over vLLM: log-probs of one forward, tokens that are never re-encoded, and a prefill of new tokens only."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dapo.models.policy import Policy
from dapo.rollout.engine import EngineState, Request, SamplingParams
from dapo.rollout.episodes import EpisodeEngine
from dapo.rollout.vllm.core import CPU_BLOCK_TOKENS
from dapo.rollout.vllm.engine import VllmEngine
from dapo.rollout.vllm.response import Response
from dapo.types import StopReason
from engine_episodes import TURNS, Words, check_logp, episodes_over, logp_gap, requests
from engine_requests import by_id, drain, request, shaken, small_policy

TOLERANCE = 1e-4
Make = Callable[..., EpisodeEngine]


@pytest.fixture
def policy() -> Policy:
    """Many tokens end a turn, so that turns are short."""
    made = small_policy()
    made.eos_ids = tuple(range(2, 12))
    return made


@pytest.fixture
def engine(policy: Policy) -> Iterator[Make]:
    opened: list[VllmEngine] = []

    def make(words: Words, rows: int = 5) -> EpisodeEngine:
        opened.append(VllmEngine(policy, sampling=SamplingParams(), max_concurrent=rows, max_tokens=200))
        return episodes_over(opened[-1], words, policy)

    yield make
    for each in opened:
        each.close()


def turns_of(engine: EpisodeEngine) -> list[Request]:
    """Every turn that the engine below is asked for, as it is asked."""
    turns: list[Request] = []
    submit = engine.inner.submit
    engine.inner.submit = lambda asked: turns.extend(asked) or submit(asked)  # type: ignore[method-assign]
    return turns


def check_whole(found: dict[int, Any], at_least: int) -> None:
    """Enough episodes of five turns, each with its environment's words masked."""
    whole = [c for c in found.values() if c.own is not None and c.stop_reason is StopReason.EOS]
    assert len(whole) >= at_least
    for completion in whole:
        assert completion.episode.turns == TURNS
        assert (completion.logp[~completion.own] == 0).all()
        assert (~completion.own).sum() == 3 * (TURNS - 1)


def test_the_log_probs_of_an_episode_are_those_of_one_forward(policy: Policy, engine: Make):
    ours = engine(Words())
    turns = turns_of(ours)
    ours.submit(requests(12))
    finished = drain(ours)
    check_logp(policy, finished, TOLERANCE)
    found = by_id(finished)
    check_whole(found, 5)
    for turn in turns:  # what a turn begins with are the tokens that were drawn and said, as they were
        whole = (*request(turn.id).prompt, *found[turn.id].tokens.tolist())
        assert turn.prompt == whole[: len(turn.prompt)]


def test_an_episode_goes_on_after_a_pause_a_snapshot_and_an_evaluation(policy: Policy, engine: Make):
    ours, finished, restored = engine(Words()), [], 0
    ours.submit(requests(12))
    for tick in range(1_000):
        if not ours.n_in_flight and not ours.n_waiting:
            break
        finished += ours.advance()
        if tick % 4 == 0:
            ours.pause()
            assert ours.advance() == []
            ours.resume()
        if tick % 11 == 5:
            state = ours.snapshot()
            meta = json.loads(json.dumps(state.meta))
            ours.restore(EngineState(meta, {name: array.copy() for name, array in state.arrays.items()}))
            restored += bool(ours._waiting())
        if tick == 9:
            fork = ours.fork_for_eval(SamplingParams(temperature=0))
            fork.submit([request(i, 60, stream="eval") for i in range(4)])
            check_logp(policy, drain(fork), TOLERANCE)
    check_logp(policy, finished, TOLERANCE)
    check_whole(by_id(finished), 5)
    assert restored > 1


def test_a_turn_costs_a_prefill_of_the_new_tokens_only(engine: Make):
    """By the prefix cache, which knows whole blocks: those of all that was computed before the turn."""
    ours = engine(Words())
    turns, cached = turns_in_vllm(ours.inner)
    ours.submit([request(i, 120, n_prompt=45) for i in (1, 2, 3, 5)])
    found = by_id(drain(ours))
    assert len(turns) > 12
    for i in found:
        first, *later = [tag for tag, turn in turns.items() if turn.id == i]
        assert cached[first] == 0
        for tag in later:
            n_computed = len(turns[tag].prompt) - 3 - 1  # all but what was said now, and the end token, only drawn
            assert cached[tag] == n_computed // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS


def turns_in_vllm(engine: VllmEngine) -> tuple[dict[str, Request], dict[str, int]]:
    """By tag, in order: the turns that vLLM is sent, and of how many of their tokens it has keys and values."""
    turns: dict[str, Request] = {}
    cached: dict[str, int] = {}
    add, step = engine.core.add, engine.core._engine.step

    def noted_add(item: Response, *how: Any) -> str:
        tag = add(item, *how)
        turns[tag] = item.request
        return tag

    def noted_step() -> Any:
        outputs = step()
        for output in outputs:
            cached.setdefault(output.request_id, output.num_cached_tokens)
        return outputs

    engine.core.add, engine.core._engine.step = noted_add, noted_step  # type: ignore[method-assign]
    return turns, cached


def test_new_weights_in_the_middle_of_an_episode_draw_the_rest(policy: Policy, engine: Make):
    """Nothing of the old weights is left in the prefix cache: the rest is drawn as if all were prefilled again."""
    ours = engine(Words())
    ours.submit([request(i, 120, n_prompt=45) for i in (1, 2, 3)])
    for _ in range(20):
        ours.advance()
    ours.load_weights(shaken(policy), 1)
    mixed = [item for item in drain(ours) if set(item[1].version.tolist()) == {0, 1}]
    assert mixed
    for item in mixed:
        gap, is_new = logp_gap(policy, item), item[1].version[item[1].own] == 1
        assert gap[is_new].max() < TOLERANCE
        assert gap[~is_new].max() > 0.1
