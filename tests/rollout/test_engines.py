"""Every engine of ours writes what the model says: tokens, log-probs, stop reasons, whatever else is in the batch."""

import copy
import dataclasses
import functools
import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from dapo.errors import EngineError
from dapo.models.packing import pack
from dapo.models.policy import Policy, add_lora
from dapo.models.quantized import Kind, quantize_linears
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import Engine, EngineState, Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.plain.engine import PlainEngine
from dapo.types import Completion, StopReason
from tiny_models import EOS, VOCABULARY, families, tiny_policy

MAX_TOKENS = 64


def prompt(i: int) -> tuple[int, ...]:
    rng = np.random.default_rng(i)
    return tuple(rng.integers(3, VOCABULARY, 1 + i % 9).tolist())


def request(i: int, max_new_tokens: int = 24, problem: int | None = None, **key: object) -> Request:
    problem = i if problem is None else problem
    noise = NoiseKey(**{"seed": 0, "stream": "train", "problem": str(problem), "visit": 0, "response_index": i, **key})
    return Request(i, prompt(problem), noise, max_new_tokens, group=problem)


DRAFTING = Drafting(tokens=3, below_rows=6)
KINDS = {
    "plain": PlainEngine,
    "local": LocalEngine,
    "plain-drafting": functools.partial(PlainEngine, drafting=DRAFTING),
    "local-drafting": functools.partial(LocalEngine, drafting=DRAFTING),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] if "drafting" in kind else []) for kind in KINDS],
    autouse=True,
)
def kind(request: pytest.FixtureRequest) -> str:
    global chosen
    chosen = request.param
    return chosen


def engine(policy: Policy, *, rows: int = 8, greedy: bool = False, **sampling: float) -> PlainEngine | LocalEngine:
    params = SamplingParams(**({"temperature": 0.0} if greedy else sampling))
    return KINDS[chosen](policy, sampling=params, max_concurrent=rows, max_tokens=MAX_TOKENS)


def drain(engine: Engine, ticks: int = 1_000) -> list[Finished]:
    finished: list[Finished] = []
    for _ in range(ticks):
        if not engine.n_in_flight and not engine.n_waiting:
            return finished
        finished += engine.advance()
    raise AssertionError("the engine never drained")


def by_id(finished: Sequence[Finished]) -> dict[int, Completion]:
    assert len({request.id for request, _ in finished}) == len(finished), "a response came back twice"
    return {request.id: completion for request, completion in finished}


def logp_by_training_forward(policy: Policy, item: Finished, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        packed = pack([item[0].prompt], [item[1].tokens], policy.device)
        return policy(packed, temperature=temperature)[0].numpy()


def same(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.tokens, b.tokens) and a.stop_reason is b.stop_reason and a.text == b.text


@pytest.mark.parametrize("family", families())
def test_greedy_tokens_equal_hugging_face_generate(family: str):
    policy = tiny_policy(family)
    local = engine(policy, rows=4, greedy=True)
    local.submit([request(i) for i in range(5)])
    for i, completion in by_id(drain(local)).items():
        ids = torch.tensor([prompt(i)])
        theirs = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=EOS
        )
        assert completion.tokens.tolist() == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", families())
def test_log_probs_equal_the_training_forward(family: str):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        policy = tiny_policy(family, dtype)
        local = engine(policy, rows=5, temperature=0.8)
        local.submit([request(i) for i in range(6)])
        gaps = [np.abs(item[1].logp - logp_by_training_forward(policy, item, 0.8)) for item in drain(local)]
        assert np.concatenate(gaps).mean() < tolerance


def test_log_probs_under_top_p_are_still_of_the_full_distribution():
    policy = tiny_policy()
    local = engine(policy, temperature=0.9, top_p=0.6)
    local.submit([request(i) for i in range(6)])
    for item in drain(local):
        np.testing.assert_allclose(item[1].logp, logp_by_training_forward(policy, item, 0.9), atol=1e-10)


def test_first_tokens_of_many_responses_are_distributed_as_the_model_says():
    policy = tiny_policy(initializer_range=0.1)
    n = 4_000
    local = engine(policy, rows=512)
    local.submit([request(i, max_new_tokens=1, problem=5) for i in range(n)])
    count = np.bincount([c.tokens[0] for _, c in drain(local)], minlength=VOCABULARY)
    with torch.no_grad():
        expected = n * policy.model(torch.tensor([prompt(5)])).logits[0, -1].softmax(-1).numpy()
    assert expected.min() > 5
    chi2 = ((count - expected) ** 2 / expected).sum()
    assert chi2 < (VOCABULARY - 1) + 3.3 * np.sqrt(2 * (VOCABULARY - 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.slow), "mistral-window"])
def test_a_response_does_not_depend_on_its_neighbours(family: str, dtype: torch.dtype):
    policy = tiny_policy(family, dtype)
    wanted = [3, 11, 20]
    alone = {}
    for i in wanted:
        local = engine(policy, rows=1)
        local.submit([request(i)])
        alone |= by_id(drain(local))
    order = np.random.default_rng(0).permutation(21)
    for rows, ids in ((32, range(21)), (7, order.tolist())):
        local = engine(policy, rows=rows)
        local.submit([request(i) for i in ids])
        among = by_id(drain(local))
        assert len(among) == 21
        for i in wanted:
            assert same(alone[i], among[i]), (rows, i)


def test_a_second_visit_explores_anew_and_a_first_one_repeats():
    policy = tiny_policy()
    drawn = []
    for visit in (0, 1, 0):
        local = engine(policy)
        local.submit([request(i, visit=visit) for i in range(4)])
        drawn.append(by_id(drain(local)))
    assert all(same(drawn[0][i], drawn[2][i]) for i in range(4))
    assert not any(same(drawn[0][i], drawn[1][i]) for i in range(4))


@functools.cache
def undisturbed(_kind: str) -> tuple[Policy, dict[int, Completion]]:
    policy = tiny_policy()
    calm = engine(policy, rows=5)
    calm.submit([request(i) for i in range(16)])
    return policy, by_id(drain(calm))


@given(st.data())
@settings(max_examples=4)
def test_aborts_pauses_and_snapshots_of_others_change_nothing(data: st.DataObject):
    """Any mixture of disturbances: the responses that are left to end are those of an undisturbed engine."""
    policy, expected = undisturbed(chosen)
    local = engine(policy, rows=data.draw(st.sampled_from([1, 3, 5, 20])))
    ids = data.draw(st.permutations(range(16)))
    local.submit([request(i) for i in ids])
    finished, aborted = [], []
    for _ in range(data.draw(st.integers(0, 6))):
        for _ in range(data.draw(st.integers(0, 8))):
            finished += local.advance()
        what = data.draw(st.sampled_from(["abort", "pause", "snapshot", "restore", "reload"]))
        if what == "abort":
            aborted += local.abort(data.draw(st.sets(st.integers(0, 15), max_size=4)))
        elif what == "pause":
            local.pause()
            tick = local.tick
            assert local.advance() == []
            assert local.tick == tick
            local.resume()
        elif what == "snapshot":
            local.snapshot()
        elif what == "restore":
            state = local.snapshot()
            local = engine(policy, rows=max(5, state.meta["n_running"]))
            local.restore(state)
        else:
            local.load_weights(policy, version=0)
    finished += drain(local)
    assert sorted([*by_id(finished), *by_id(aborted)]) == list(range(16))
    assert all(same(completion, expected[i]) for i, completion in by_id(finished).items())
    for i, completion in by_id(aborted).items():
        assert completion.stop_reason is StopReason.ABORTED
        n = len(completion.tokens)
        assert n == len(completion.logp) == len(completion.version)
        assert completion.tokens.tolist() == expected[i].tokens[:n].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_going_on_and_being_restored_are_the_same_bits(dtype: torch.dtype):
    policy = tiny_policy("qwen2", dtype)
    local = engine(policy, rows=5)
    local.submit([request(i) for i in range(14)])
    early = [item for _ in range(7) for item in local.advance()]
    local.abort([next(iter(set(range(5)) - set(by_id(early))))])  # leave a gap
    state = local.snapshot()
    stored = EngineState(json.loads(json.dumps(state.meta)), {k: v.copy() for k, v in state.arrays.items()})
    went_on = drain(local)

    other = engine(policy, rows=5)
    other.restore(stored)
    restored = drain(other)
    assert [request for request, _ in went_on] == [request for request, _ in restored]
    for (_, a), (_, b) in zip(went_on, restored, strict=True):
        assert same(a, b)
        assert a.logp.tobytes() == b.logp.tobytes()
        assert a.version.tolist() == b.version.tolist()
    assert local.tick == other.tick


def test_partial_rollouts_every_token_is_drawn_by_the_weights_of_its_version():
    policy = tiny_policy("qwen3")
    weights = {0: copy.deepcopy(policy)}
    local = engine(policy, rows=4)
    local.submit([request(i, max_new_tokens=30) for i in range(6)])
    finished = []
    for version in (1, 2, 3):
        for _ in range(5):
            finished += local.advance()
        with torch.no_grad():
            for parameter in policy.parameters():  # in place, as the optimizer does
                parameter.add_(0.1 * torch.randn_like(parameter))
        local.load_weights(policy, version)
        weights[version] = copy.deepcopy(policy)
    finished += drain(local)
    assert max(len(set(completion.version.tolist())) for _, completion in finished) >= 3
    for item in finished:
        version = item[1].version
        assert (np.diff(version) >= 0).all()
        by_version = {v: logp_by_training_forward(weights[v], item) for v in set(version.tolist())}
        expected = [by_version[v][t] for t, v in enumerate(version.tolist())]
        np.testing.assert_allclose(item[1].logp, expected, atol=1e-10)


def test_load_weights_takes_another_policy_too():
    old, new = tiny_policy(seed=0), tiny_policy(seed=1)
    local = engine(old)
    local.submit([request(i) for i in range(3)])
    for _ in range(2):
        local.advance()
    local.load_weights(new, version=5)
    for item in drain(local):
        late = item[1].version == 5
        np.testing.assert_allclose(item[1].logp[late], logp_by_training_forward(new, item)[late], atol=1e-10)


def test_stop_reasons():
    policy = tiny_policy()
    long = engine(policy, rows=32)
    long.submit([request(i, max_new_tokens=50) for i in range(32)])
    full = by_id(drain(long))
    ended = {i: c for i, c in full.items() if c.stop_reason is StopReason.EOS}
    assert ended
    assert len(ended) < len(full)
    for i, completion in full.items():
        tokens = completion.tokens.tolist()
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (i in ended)
        assert completion.is_truncated == (i not in ended)
        assert len(tokens) == 50 or i in ended
        assert completion.text == policy.tokenizer.decode([t for t in tokens if t > EOS])
        assert completion.tokens.dtype == completion.version.dtype == np.int32

    # The end token exactly at the limit is an end; one token less is a truncation.
    i, completion = max(ended.items(), key=lambda pair: len(pair[1].tokens))
    n = len(completion.tokens)
    for limit, reason in ((n, StopReason.EOS), (n - 1, StopReason.LENGTH)):
        local = engine(policy)
        local.submit([request(i, max_new_tokens=limit)])
        [(_, cut)] = drain(local)
        assert cut.stop_reason is reason
        assert cut.tokens.tolist() == completion.tokens[:limit].tolist()


def test_a_slot_is_refilled_on_the_next_tick():
    local = engine(tiny_policy(), rows=6)
    local.submit([request(i, max_new_tokens=1 + i % 11) for i in range(40)])
    n_tokens = {}
    finished = []
    while local.n_in_flight or local.n_waiting:
        left = local.n_in_flight + local.n_waiting
        done = local.advance()
        n_tokens[local.tick] = len(done) + local.n_in_flight
        assert n_tokens[local.tick] == min(6, left), "a row stood idle while a request waited"
        finished += done
    _, n_accepted = local.take_drafted()
    assert sum(n_tokens.values()) + n_accepted == sum(len(completion.tokens) for _, completion in finished)


def test_bookkeeping():
    local = engine(tiny_policy(), rows=4)
    assert (local.capacity(), local.n_in_flight, local.n_waiting, local.tick) == (4, 0, 0, 0)
    local.submit([request(i, max_new_tokens=40) for i in range(3)])
    assert (local.capacity(), local.n_in_flight, local.n_waiting) == (1, 0, 3)
    local.advance()
    assert (local.capacity(), local.n_in_flight, local.n_waiting, local.tick) == (1, 3, 0, 1)
    local.submit([request(i, max_new_tokens=40) for i in range(3, 6)])
    assert (local.capacity(), local.n_in_flight, local.n_waiting) == (0, 3, 3)
    assert [r.id for r, _ in local.abort([5, 1, 99])] == [1, 5]
    assert local.abort([1]) == []
    assert (local.n_in_flight, local.n_waiting) == (2, 2)
    drain(local)
    tick = local.tick
    assert local.advance() == []
    assert local.tick == tick + 1


def test_results_come_in_order_of_submission():
    local = engine(tiny_policy(), rows=8)
    local.submit([request(i, max_new_tokens=1) for i in (5, 2, 7, 1)])
    assert [r.id for r, _ in local.advance()] == [5, 2, 7, 1]


def test_non_finite_logits_abort_that_response_and_no_other():
    poison = 39
    policy = tiny_policy()
    clean = engine(policy)
    clean.submit([request(i) for i in range(12)])
    expected = by_id(drain(clean))

    with torch.no_grad():
        policy.backbone.embed_tokens.weight[poison] = float("nan")
    local = engine(policy, rows=3)  # rows are reused after the fault
    bad = dataclasses.replace(request(100), prompt=(5, poison, 6, 7, 8, 9, 10, 11, 12))
    local.submit([bad, *(request(i) for i in range(12))])
    finished = by_id(drain(local))
    assert finished[100].stop_reason is StopReason.ABORTED
    assert len(finished[100].tokens) == 0
    assert bad in [fault.request for fault in local.faults]
    assert local.faults[0].reason == "logits are not finite"
    n_untouched = 0
    for i in range(12):
        if poison in prompt(i):
            continue
        if poison in expected[i].tokens[:-1].tolist():  # it walks into the poison later, by itself
            assert finished[i].stop_reason is StopReason.ABORTED
        else:
            assert same(finished[i], expected[i])
            n_untouched += 1
    assert n_untouched >= 3


def test_requests_that_cannot_fit_are_refused_by_name_and_nothing_is_queued():
    local = engine(tiny_policy())
    too_long = dataclasses.replace(request(8), prompt=(5,) * MAX_TOKENS)
    for bad, words in (
        (too_long, "request 8 .*'8'.*64 tokens"),
        (dataclasses.replace(request(8), prompt=()), "empty"),
        (dataclasses.replace(request(8), max_new_tokens=0), "max_new_tokens = 0"),
        (request(1), "in flight already"),
    ):
        with pytest.raises(EngineError, match=words):
            local.submit([request(1), bad])
        assert local.n_waiting == 0


def test_unknown_architecture_and_moving_ropes_are_refused_with_a_way_out():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(EngineError, match=r"llama, qwen2, qwen3, mistral, not 'gpt2'\.\n.*vllm"):
        engine(Policy(gpt2, None))
    dynamic = tiny_policy(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(EngineError, match="dynamic"):
        engine(dynamic)


def test_the_engine_holds_no_copy_of_the_weights():
    policy = tiny_policy()
    local = engine(policy, greedy=True)
    local.submit([request(0)])
    before = drain(local)
    with torch.no_grad():
        policy.head.weight.neg_()
    local.load_weights(policy, 1)
    local.submit([request(0)])
    after = drain(local)
    assert not same(before[0][1], after[0][1])
    np.testing.assert_allclose(after[0][1].logp, logp_by_training_forward(policy, after[0]), atol=1e-10)


def test_training_mode_and_gradients_are_left_alone():
    policy = tiny_policy().train()
    local = engine(policy)
    local.submit([request(0)])
    drain(local)
    assert policy.training
    policy(pack([[3, 4]], [[5, 6]], "cpu"), temperature=1.0)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


@pytest.mark.parametrize("quantization", [None, "int8", "nf4"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "up_proj")])
def test_an_adapter_is_part_of_what_the_engine_decodes(targets: tuple[str, ...], quantization: Kind | None):
    policy = tiny_policy("qwen2")
    if quantization is not None:
        quantize_linears(policy.base, policy.head, quantization, "cpu")
    add_lora(policy, rank=2, alpha=4.0, target_modules=targets)
    local = engine(policy)
    for version in (1, 2):
        with torch.no_grad():  # the first time from an adapter that does nothing, as a run begins
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
        local.load_weights(policy, version)
        local.submit([request(10 * version + i) for i in range(4)])
        for item in drain(local):
            np.testing.assert_allclose(item[1].logp, logp_by_training_forward(policy, item), atol=1e-10)


def test_an_adapter_stays_where_a_graph_reads_it():
    policy = add_lora(tiny_policy("qwen2"), rank=2, alpha=4.0)
    local = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=4, max_tokens=MAX_TOKENS)
    layers = [part for layer in local._decoder.weights for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    before = [(part.a.data_ptr(), part.b.data_ptr()) for part in layers]
    local.load_weights(policy, 1)
    assert [(part.a.data_ptr(), part.b.data_ptr()) for part in layers] == before
