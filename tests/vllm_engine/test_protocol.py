"""What the streaming protocol promises, asked of the local engine and of vLLM alike."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dapo.errors import EngineError
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.stops import is_complete
from dapo.rollout.vllm.engine import VllmEngine
from dapo.types import StopReason
from engine_requests import (
    by_id,
    drain,
    gap,
    logp_by_training_forward,
    prompt,
    request,
    same,
    shaken,
    small_policy,
)
from tiny_models import EOS

MAX_TOKENS = 96
Make = Callable[..., Engine]


@pytest.fixture(params=["local", "vllm"])
def engine(request: pytest.FixtureRequest) -> Iterator[Make]:
    opened: list[VllmEngine] = []

    def make(policy: Policy, *, rows: int = 8, **sampling: float) -> Engine:
        sizes = {"sampling": SamplingParams(**sampling), "max_concurrent": rows, "max_tokens": MAX_TOKENS}
        if request.param == "local":
            return LocalEngine(policy, **sizes)
        opened.append(VllmEngine(policy, **sizes))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("family", ["llama-tied", "llama-bias", "qwen2-tied", "qwen3", "mistral"])
def test_greedy_tokens_equal_hugging_face_generate(engine: Make, family: str):
    policy = small_policy(family)
    ours = engine(policy, rows=4, temperature=0.0)
    ours.submit([request(i) for i in range(10)])
    for i, completion in by_id(drain(ours)).items():
        ids = torch.tensor([prompt(i)])
        theirs = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=EOS
        )
        assert completion.tokens.tolist() == theirs[0, ids.shape[1] :].tolist()


def test_a_response_ends_with_the_token_that_completes_a_stop(engine: Make):
    policy = small_policy("qwen2")
    stop = (("", "5w1"), ("w7", "w3"))
    ours = engine(policy, rows=4, temperature=0.0)
    ours.submit([request(i) for i in range(10)])
    free = by_id(drain(ours))
    ours.submit([dataclasses.replace(request(i), stop=stop) for i in range(10)])
    for i, completion in by_id(drain(ours)).items():
        n = next(
            (n for n in range(25) if any(is_complete(policy.tokenizer.decode(free[i].tokens[:n]), *s) for s in stop)),
            None,
        )
        assert np.array_equal(completion.tokens, free[i].tokens[:n])
        assert completion.stop_reason is (free[i].stop_reason if n is None else StopReason.EOS)
    assert ours.n_in_flight == ours.n_waiting == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
def test_log_probs_are_those_of_the_whole_vocabulary_at_the_sampling_temperature(engine: Make, temperature: float):
    policy = small_policy("qwen2")
    ours = engine(policy, rows=5, temperature=temperature)
    ours.submit([request(i) for i in range(12)])
    finished = drain(ours)
    assert gap(policy, finished, temperature or 1.0) < 1e-5
    if temperature not in (0.0, 1.0):
        assert gap(policy, finished, 1.0) > 1e-2


def test_first_tokens_of_many_responses_are_distributed_as_the_model_says(engine: Make):
    policy = small_policy(initializer_range=0.05)
    n = 2_000
    ours = engine(policy, rows=256)
    ours.submit([dataclasses.replace(request(i, max_new_tokens=1), prompt=prompt(5)) for i in range(n)])
    drawn = [completion.tokens[0] for _, completion in drain(ours)]
    with torch.no_grad():
        expected = n * policy.model(torch.tensor([prompt(5)])).logits[0, -1].softmax(-1).numpy()
    assert expected.min() > 5
    chi2 = ((np.bincount(drawn, minlength=len(expected)) - expected) ** 2 / expected).sum()
    assert chi2 < (len(expected) - 1) + 3.3 * np.sqrt(2 * (len(expected) - 1))


def test_a_second_visit_explores_anew_and_a_first_one_repeats(engine: Make):
    policy = small_policy()
    drawn = []
    ours = engine(policy)
    for visit in (0, 1, 0):
        ours.submit([request(i, visit=visit) for i in range(4)])
        drawn.append(by_id(drain(ours)))
    assert all(same(drawn[0][i], drawn[2][i]) for i in range(4))
    assert not any(same(drawn[0][i], drawn[1][i]) for i in range(4))


def test_stop_reasons(engine: Make):
    policy = small_policy()
    ours = engine(policy, rows=32)
    ours.submit([request(i, max_new_tokens=50) for i in range(32)])
    full = by_id(drain(ours))
    ended = {i: c for i, c in full.items() if c.stop_reason is StopReason.EOS}
    assert 0 < len(ended) < len(full)
    for i, completion in full.items():
        tokens = completion.tokens.tolist()
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (i in ended)
        assert completion.stop_reason is (StopReason.EOS if i in ended else StopReason.LENGTH)
        assert len(tokens) == 50 or i in ended
        assert completion.text == policy.tokenizer.decode([t for t in tokens if t > EOS])
        assert completion.tokens.dtype == completion.version.dtype == np.int32
        assert completion.logp.dtype == np.float32


def test_a_slot_is_refilled_on_the_next_tick(engine: Make):
    ours = engine(small_policy(), rows=6)
    ours.submit([request(i, max_new_tokens=1 + i % 11) for i in range(40)])
    written, n_finished = 0, 0
    while ours.n_in_flight or ours.n_waiting:
        left = ours.n_in_flight + ours.n_waiting
        done = ours.advance()
        assert len(done) + ours.n_in_flight == min(6, left), "a row stood idle while a request waited"
        written += sum(len(completion.tokens) for _, completion in done)
        n_finished += len(done)
    assert n_finished == 40
    assert written <= 6 * ours.tick


def test_bookkeeping(engine: Make):
    ours = engine(small_policy(), rows=4)
    assert (ours.capacity(), ours.n_in_flight, ours.n_waiting, ours.tick) == (4, 0, 0, 0)
    ours.submit([request(i, max_new_tokens=40, n_prompt=5) for i in range(3)])
    assert (ours.capacity(), ours.n_in_flight, ours.n_waiting) == (1, 0, 3)
    ours.advance()
    assert (ours.capacity(), ours.n_in_flight, ours.n_waiting, ours.tick) == (1, 3, 0, 1)
    ours.submit([request(i, max_new_tokens=40) for i in range(3, 6)])
    assert (ours.capacity(), ours.n_in_flight, ours.n_waiting) == (0, 3, 3)
    aborted = ours.abort([5, 1, 99])
    assert [r.id for r, _ in aborted] == [1, 5]
    assert [len(completion.tokens) for _, completion in aborted] == [1, 0]
    assert {completion.stop_reason for _, completion in aborted} == {StopReason.ABORTED}
    assert ours.abort([1]) == []
    assert (ours.n_in_flight, ours.n_waiting) == (2, 2)
    drain(ours)
    tick = ours.tick
    assert ours.advance() == []
    assert ours.tick == tick + 1


def test_results_come_in_order_of_submission(engine: Make):
    ours = engine(small_policy(), rows=8)
    ours.submit([request(i, max_new_tokens=1) for i in (5, 2, 7, 1)])
    assert [r.id for r, _ in ours.advance()] == [5, 2, 7, 1]


def test_a_pause_stops_the_clock_and_changes_nothing(engine: Make):
    policy = small_policy()
    drawn = []
    ours = engine(policy)
    for is_paused in (False, True):
        ours.submit([request(i) for i in range(4)])
        finished = [item for _ in range(3) for item in ours.advance()]
        if is_paused:
            ours.pause()
            tick = ours.tick
            assert ours.advance() == []
            assert ours.tick == tick
            ours.resume()
        drawn.append(by_id(finished + drain(ours)))
    assert all(same(drawn[0][i], drawn[1][i]) for i in range(4))


def test_aborting_one_leaves_the_rest_to_end(engine: Make):
    policy = small_policy()
    ours = engine(policy, rows=3)
    ours.submit([request(i) for i in range(8)])
    finished = [item for _ in range(4) for item in ours.advance()]
    running = [i for i in range(3) if i not in by_id(finished)]
    aborted = ours.abort([running[0], 7])
    assert sorted(by_id(aborted)) == [running[0], 7]
    finished += drain(ours)
    assert sorted([*by_id(finished), *by_id(aborted)]) == list(range(8))
    assert gap(policy, [item for item in [*finished, *aborted] if len(item[1].tokens)]) < 1e-5


def test_going_on_and_being_restored_are_the_same_bits(engine: Make):
    policy = small_policy("qwen2")
    ours = engine(policy, rows=5)
    ours.submit([request(i, n_prompt=40) for i in range(14)])
    early = [item for _ in range(7) for item in ours.advance()]
    ours.abort([next(iter(set(range(5)) - set(by_id(early))))])
    state = ours.snapshot()
    stored = EngineState(json.loads(json.dumps(state.meta)), {k: v.copy() for k, v in state.arrays.items()})
    went_on = drain(ours)

    other = engine(policy, rows=5)
    other.restore(stored)
    restored = drain(other)
    assert [request for request, _ in went_on] == [request for request, _ in restored]
    for (_, a), (_, b) in zip(went_on, restored, strict=True):
        assert same(a, b)
        assert a.logp.tobytes() == b.logp.tobytes()
        assert a.version.tolist() == b.version.tolist()
    assert ours.tick == other.tick
    assert gap(policy, went_on) < 1e-5


def test_a_snapshot_with_more_in_flight_than_there_is_room_for_is_refused(engine: Make):
    policy = small_policy()
    ours = engine(policy, rows=5)
    ours.submit([request(i) for i in range(5)])
    ours.advance()
    with pytest.raises(EngineError, match=r"max_concurrent_sequences = 2: (?s:.*)at least as many"):
        engine(policy, rows=2).restore(ours.snapshot())


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-tied", "qwen3"])
def test_every_token_is_drawn_by_the_weights_of_its_version(engine: Make, family: str):
    policy = small_policy(family)
    weights = {0: copy.deepcopy(policy)}
    ours = engine(policy, rows=4)
    ours.submit([request(i, max_new_tokens=30, n_prompt=40) for i in range(6)])
    finished = []
    for version in (1, 2, 3):
        for _ in range(5):
            finished += ours.advance()
        shaken(policy, seed=version)
        ours.load_weights(policy, version)
        weights[version] = copy.deepcopy(policy)
    finished += drain(ours)
    assert max(len(set(completion.version.tolist())) for _, completion in finished) >= 3
    for item in finished:
        version = item[1].version
        assert (np.diff(version) >= 0).all()
        by_version = {v: logp_by_training_forward(weights[v], item) for v in weights}
        expected = [by_version[v][t] for t, v in enumerate(version.tolist())]
        np.testing.assert_allclose(item[1].logp, expected, atol=1e-4)
        if len(version) > 5:  # and by no other
            assert np.abs(item[1].logp - by_version[0])[5:].mean() > 1e-2


def test_load_weights_takes_another_policy_too(engine: Make):
    old, new = small_policy(seed=0), small_policy(seed=1)
    ours = engine(old)
    ours.submit([request(i) for i in range(3)])
    ours.advance()
    ours.load_weights(new, version=5)
    for item in drain(ours):
        late = item[1].version == 5
        np.testing.assert_allclose(item[1].logp[late], logp_by_training_forward(new, item)[late], atol=1e-4)


def test_requests_that_cannot_fit_are_refused_by_name_and_nothing_is_queued(engine: Make):
    ours = engine(small_policy())
    for bad, words in (
        (request(8, n_prompt=MAX_TOKENS), "request 8 .*'8'.*96 tokens"),
        (dataclasses.replace(request(8), prompt=()), "empty"),
        (dataclasses.replace(request(8), max_new_tokens=0), "max_new_tokens = 0"),
        (request(1), "in flight already"),
    ):
        with pytest.raises(EngineError, match=words):
            ours.submit([request(1), bad])
        assert ours.n_waiting == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_abort_that_response_and_no_other(engine: Make, temperature: float):
    poison = 39
    policy = small_policy()
    with torch.no_grad():
        policy.backbone.embed_tokens.weight[poison] = float("nan")
        policy.head.weight[poison] = 0  # drawn about as often as any other token
    ours = engine(policy, rows=3, temperature=temperature)
    bad = dataclasses.replace(request(100), prompt=(5, poison, 6, 7, 8))
    ours.submit([bad, *(request(i) for i in range(12))])
    finished = drain(ours)
    completions = by_id(finished)
    assert completions[100].stop_reason is StopReason.ABORTED
    assert len(completions[100].tokens) == 0
    assert ours.faults[0].request == bad
    assert (ours.faults[0].position, ours.faults[0].reason) == (0, "logits are not finite")
    faulty = {fault.request.id for fault in ours.faults}
    healthy = [item for item in finished if item[0].id not in faulty]
    for i in set(completions) - {100}:
        met = poison in (*prompt(i), *completions[i].tokens.tolist())
        assert (i in faulty) <= met, "a response fell ill without having met the poison"
    assert len(healthy) >= 3
    assert gap(policy, healthy) < 1e-5


def test_training_mode_and_gradients_are_left_alone(engine: Make):
    policy = small_policy().train()
    ours = engine(policy)
    ours.submit([request(0)])
    drain(ours)
    assert policy.training
    policy(pack([[3, 4]], [[5, 6]], "cpu"), temperature=1.0)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
