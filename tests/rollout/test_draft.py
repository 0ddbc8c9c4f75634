"""Drafts: what is guessed, what of it counts, and that a response has the same tokens and log-probs with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dapo.models.policy import Policy
from dapo.rollout.draft import Drafter, Drafting, Running, guess, last_counting, n_counting, spread
from dapo.rollout.engine import NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.plain.engine import PlainEngine
from dapo.types import Completion
from tiny_models import VOCABULARY, tiny_policy

MAX_TOKENS = 96
STEADY = {"temperature": 0.3}  # repeats itself, so that guesses are right now and then


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


# ------------------------------------------------------------------ the guess


def test_what_followed_the_last_time_is_guessed():
    assert guess(ints(1, 2, 3, 9, 2), [], 3) == [3, 9, 2]
    assert guess(ints(1, 2, 3, 9, 2), [], 1) == [3]
    assert guess(ints(1, 2, 3), [], 4) == guess(ints(1), [], 4) == guess(ints(1, 1), [], 0) == []


def test_a_response_that_repeats_itself_is_guessed_to_go_on():
    assert guess(ints(7, 7), [], 4) == [7] * 4
    assert guess(ints(1, 2, 3, 1, 2, 3), [], 5) == [1, 2, 3, 1, 2]


def test_the_longest_match_decides_then_the_response_itself_then_the_latest_place():
    sibling = ints(5, 6, 8, 8)
    assert guess(ints(6, 1, 5, 6), [sibling], 2) == [8, 8]  # 5 6 there, only 6 here
    assert guess(ints(5, 6, 1, 5, 6), [sibling], 1) == [1]
    assert guess(ints(6, 1, 6, 2, 6), [], 1) == [2]
    assert guess(ints(4, 6), [ints(6, 1), ints(6, 2)], 1) == [2]


@pytest.mark.parametrize(("length", "expected"), [(3, 8), (4, 9), (5, 9)])
def test_border_a_match_of_more_than_four_tokens_counts_as_four(length: int, expected: int):
    """Two places: the first agrees with the last five tokens, the later one with the last `length`."""
    end = [1, 2, 3, 4, 5]
    later = [*([0] * (5 - length)), *end[5 - length :], 9]
    assert guess(ints(*end, 8, *later, *end), [], 1) == [expected]


def test_a_guess_ends_with_the_text_it_comes_from():
    assert guess(ints(4, 6), [ints(6, 1), ints(2, 3)], 5) == [1]
    assert guess(ints(4, 6), [ints(6), ints(2, 3)], 5) == []


# ------------------------------------------------------------------ what of it counts


def test_what_counts_ends_with_the_first_wrong_guess_or_the_end():
    no = [False] * 4
    assert n_counting([], [5], no) == 1
    assert n_counting([5, 6, 7], [5, 6, 7, 8], no) == 4
    assert n_counting([5, 6, 7], [5, 9, 7, 8], no) == 2
    assert n_counting([5, 6, 7], [9, 6, 7, 8], no) == 1
    assert n_counting([5, 6, 7], [5, 6, 7, 8], [False, True, False, False]) == 2


def test_a_pass_over_several_rows():
    drafts = [[5, 6], [], [7]]
    row, ahead = spread(drafts)
    assert row.tolist() == [0, 0, 0, 1, 2, 2]
    assert ahead.tolist() == [0, 1, 2, 0, 0, 1]
    drawn, is_over = ints(5, 9, 1, 4, 7, 3), np.zeros(6, bool)
    assert last_counting(drafts, drawn, is_over).tolist() == [1, 3, 5]


def test_siblings_are_those_of_the_group_also_after_their_end():
    drafter = Drafter(Drafting(tokens=2, below_rows=2))
    one = Running(group=0, order=0, tokens=ints(1, 2, 3, 4, 5), start=1, room=9)
    other = Running(group=1, order=1, tokens=ints(2), start=1, room=9)
    late = Running(group=0, order=2, tokens=ints(9, 2), start=1, room=9)
    assert drafter.drafts([one, other, late]) == [[], [], [3, 4]]
    drafter.keep([one], groups=[0, 1])
    assert drafter.drafts([other, late]) == [[], [3, 4]]
    assert drafter.drafts([Running(0, 3, ints(4), 1, 9)]) == [[]], "nobody has read the newest token"
    drafter.keep([], groups=[1])
    assert drafter.drafts([late]) == [[]]


def test_border_drafts_are_due_for_at_most_so_many_rows_and_tokens():
    drafter = Drafter(Drafting(tokens=2, below_rows=3))
    assert [drafter.is_due(n) for n in (0, 1, 3, 4)] == [False, True, True, False]
    assert not Drafter(Drafting()).is_due(1)
    same = ints(*[5] * 9)
    assert [len(drafter.drafts([Running(0, 0, same, 1, room)])[0]) for room in (-1, 0, 1, 2, 3)] == [0, 0, 1, 2, 2]


# ------------------------------------------------------------------ the same responses

KINDS = {
    "plain": (PlainEngine, torch.float32, {}),
    "compiled": (LocalEngine, torch.float32, {}),
    "blocks": (LocalEngine, torch.float32, {"ops": "blocks"}),
    "blocks-64": (LocalEngine, torch.float64, {"ops": "blocks"}),
    "pages": (LocalEngine, torch.float64, {"ops": "plain", "tokens_per_tick": 3}),
}


def request(i: int, group: int, max_new_tokens: int = 40) -> Request:
    prompt = np.random.default_rng(group).integers(3, VOCABULARY, 3 + 5 * group).tolist()
    return Request(i, tuple(prompt), NoiseKey(0, "train", str(group), 0, i), max_new_tokens, group=group)


def requests() -> list[Request]:
    """Groups of five that share a prompt, limits at which drafts end."""
    return [request(5 * group + i, group, (40, 1, 2, 30, 37)[i]) for group in range(3) for i in range(5)]


def generated(
    kind: str,
    policy: Policy,
    wanted: list[Request],
    drafting: Drafting | None,
    *,
    sampling: dict[str, float] = STEADY,
    **changes: object,
) -> tuple[dict[int, Completion], PlainEngine | LocalEngine]:
    make, _, options = KINDS[kind]
    sizes = {"max_concurrent": 16, "max_tokens": MAX_TOKENS, **options, **changes}
    engine = make(policy, sampling=SamplingParams(**sampling), drafting=drafting, **sizes)
    engine.submit(wanted)
    finished = []
    while engine.n_in_flight or engine.n_waiting:
        finished += engine.advance()
    return {request.id: completion for request, completion in finished}, engine


def assert_same_bits(got: dict[int, Completion], wanted: dict[int, Completion]) -> None:
    assert got.keys() == wanted.keys()
    for i, completion in got.items():
        assert completion.tokens.tolist() == wanted[i].tokens.tolist(), i
        assert completion.logp.tobytes() == wanted[i].logp.tobytes(), i
        assert completion.stop_reason is wanted[i].stop_reason
        assert len(completion.version) == len(completion.tokens)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [(kind, STEADY) for kind in KINDS]
    + [("compiled", {"temperature": 0.5, "top_p": 0.8}), ("compiled", {"temperature": 0.0})],
    ids=str,
)
def test_drafts_change_no_bit_of_a_response(kind: str, sampling: dict[str, float]):
    policy = tiny_policy("qwen3", KINDS[kind][1])
    calm, without = generated(kind, policy, requests(), None, sampling=sampling)
    drafted, engine = generated(kind, policy, requests(), Drafting(tokens=4, below_rows=15), sampling=sampling)
    assert_same_bits(drafted, calm)
    n_drafted, n_accepted = engine.take_drafted()
    assert 20 < n_accepted < n_drafted
    assert engine.tick < without.tick or kind == "pages"  # there a tick without drafts has three tokens
    assert engine.take_drafted() == without.take_drafted() == (0, 0)


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_every_token_of_a_response_is_drawn_by_a_tick_or_was_accepted(kind: str):
    done, engine = generated(kind, tiny_policy("qwen3"), [request(0, 0)], Drafting(tokens=4))
    n_accepted = engine.take_drafted()[1]
    assert n_accepted > 0
    assert len(done[0].tokens) == engine.tick + n_accepted


@pytest.mark.parametrize("kind", ["plain", "compiled", "pages"])
def test_drafts_change_no_bit_where_a_string_ends_a_response(kind: str):
    """A draft that is right may go beyond the string: what it has there does not count."""
    policy = tiny_policy("qwen3", KINDS[kind][1])
    free, _ = generated(kind, policy, requests(), None)
    for offset in range(2):  # a string of two tokens in the middle of each response
        middle = {i: len(done.tokens) // 2 + offset for i, done in free.items()}
        ends = {i: policy.tokenizer.decode(free[i].tokens[max(at - 2, 0) : at]) for i, at in middle.items()}
        wanted = [replace(one, stop=(("", ends[one.id]),) if ends[one.id] else ()) for one in requests()]
        calm, _ = generated(kind, policy, wanted, None)
        drafted, engine = generated(kind, policy, wanted, Drafting(tokens=4, below_rows=15))
        assert_same_bits(drafted, calm)
        assert engine.take_drafted()[1] > 5
        assert sum(len(calm[i].tokens) < len(free[i].tokens) for i in free) > 4


@pytest.mark.parametrize("family", ["mistral-window", "llama-bias"])
def test_drafts_change_no_bit_with_windows_and_other_families(family: str):
    policy = tiny_policy(family, torch.float32)
    calm, _ = generated("compiled", policy, requests(), None)
    drafted, engine = generated("compiled", policy, requests(), Drafting(tokens=3, below_rows=15))
    assert_same_bits(drafted, calm)
    assert engine.take_drafted()[1] > 5


@pytest.mark.parametrize("kind", ["compiled", "blocks"])
def test_border_drafts_change_no_bit_where_blocks_of_keys_end(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Past 512 tokens: beyond SAME_SUMS the width of a block decides the last bits."""
    policy = tiny_policy("llama", torch.float32)
    policy.eos_ids = ()
    wanted = [replace(request(i, i, 30), prompt=tuple(range(3, 35)) * 15 + (5,) * (10 + i)) for i in range(4)]
    calm, _ = generated(kind, policy, wanted, None, max_tokens=1040)
    drafted, engine = generated(kind, policy, wanted, Drafting(tokens=7, below_rows=4), max_tokens=1040)
    assert_same_bits(drafted, calm)
    assert engine.take_drafted()[1] > 20
    room = engine._decoder.draft_room(ints(1, 31, 32, 33, 511, 512, 513, 1039))
    assert room.tolist() == [31, 1, 0, 31, 1, 0, 511, 1], "a draft does not leave its block"
    asked: list[int] = []
    monkeypatch.setattr(engine.drafter, "drafts", lambda running: [asked.append(one.room) or [] for one in running])
    engine.submit([replace(wanted[0], prompt=(wanted[0].prompt * 2)[:509])])
    for _ in range(3):
        engine.advance()
    assert asked == [3, 2, 1]


@pytest.mark.parametrize("page_tokens", [2, 5])
def test_out_of_pages_drafts_still_change_nothing(page_tokens: int):
    policy = tiny_policy("llama", torch.float64)
    calm, _ = generated("pages", policy, requests(), None)
    small = {"kv_tokens": 80, "page_tokens": page_tokens}
    drafted, engine = generated("pages", policy, requests(), Drafting(tokens=6, below_rows=15), **small)
    assert_same_bits(drafted, calm)
    assert engine._pool.n_free == engine._pool.n_pages, "pages were lost"


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_border_the_token_behind_a_draft_is_the_last_that_fits(kind: str):
    make, dtype, _ = KINDS[kind]
    policy = tiny_policy("llama", dtype)
    policy.eos_ids = ()
    engine = make(policy, sampling=SamplingParams(), max_concurrent=1, max_tokens=MAX_TOKENS)
    engine.submit([request(0, 0, 4)])
    room = []
    for _ in range(3):
        engine.advance()
        room.append((engine._rows.running([0])[0] if kind == "plain" else engine._rows.running(0)).room)
    assert room == [2, 1, 0]


def test_rows_shared_among_threads(monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy("llama", torch.float32)
    calm, _ = generated("compiled", policy, requests(), None)
    monkeypatch.setattr("dapo.models.kernels.compiled.PARALLEL_NUMBERS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    drafted, _ = generated("compiled", policy, requests(), Drafting(tokens=3, below_rows=15))
    assert_same_bits(drafted, calm)


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_going_on_and_being_restored_make_the_same_drafts(kind: str):
    """Siblings that ended are forgotten on both sides; a fork for an evaluation has its own."""
    policy = tiny_policy("qwen3", torch.float32)
    make, _, options = KINDS[kind]
    drafting = Drafting(tokens=3, below_rows=15)

    def empty() -> PlainEngine | LocalEngine:
        sizes = {"max_concurrent": 16, "max_tokens": MAX_TOKENS, **options}
        return make(policy, sampling=SamplingParams(**STEADY), drafting=drafting, **sizes)

    engine, other = empty(), empty()
    engine.submit(requests())
    early = [item for _ in range(4) for item in engine.advance()]
    other.drafter._ended = dict(engine.drafter._ended)
    assert other.drafter._ended
    state = engine.snapshot()
    assert not engine.drafter._ended
    fork = engine.fork_for_eval(SamplingParams(**STEADY))
    other.restore(state)
    assert not other.drafter._ended
    engine.take_drafted()
    results = []
    for one in (engine, other):
        late = []
        while one.n_in_flight or one.n_waiting:
            late += one.advance()
        results.append(({request.id: completion for request, completion in late}, one.tick, one.take_drafted()))
    assert results[0][1:] == results[1][1:]
    assert results[0][2][1] > 0
    assert_same_bits(results[0][0], results[1][0])
    assert len(early) + len(results[0][0]) == len(requests())
    assert not engine.drafter._ended, "no group goes on"
    assert fork.drafter is not engine.drafter
    assert fork.drafter.drafting == drafting
