"""What only the paged engine does: pages that run out, prompts that are shared, several tokens a tick, Triton."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dapo.errors import EngineError
from dapo.models.kernels.build import library
from dapo.models.load import save_policy
from dapo.models.policy import Policy
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.families import rounded_up
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.pages import NO_PAGES, PagePool, Prompt, pages_for
from dapo.rollout.local.prefixes import Extension, Prefix, prefill, reads, slots_of
from dapo.rollout.local.weights import side_by_side
from dapo.rollout.partial import PartialResponse, from_state, texts_of, to_state
from dapo.rollout.plain.engine import PlainEngine
from dapo.rollout.plain.kv_cache import KVCache
from dapo.types import Completion
from tiny_models import EOS, VOCABULARY, tiny_policy, tiny_tokenizer

MAX_TOKENS = 64


def request(i: int, problem: int, n_prompt: int, max_new_tokens: int = 30) -> Request:
    tokens = np.random.default_rng(problem).integers(3, VOCABULARY, n_prompt)
    return Request(i, tuple(tokens.tolist()), NoiseKey(0, "train", str(problem), 0, i), max_new_tokens, group=problem)


def requests(n_groups: int = 6, per_group: int = 4) -> list[Request]:
    """Prompts below, at and above the ends of pages."""
    lengths = [1, 4, 5, 9, 16, 23]
    return [request(g * per_group + i, g, lengths[g % 6]) for g in range(n_groups) for i in range(per_group)]


def local(policy: Policy, *, rows: int = 8, **changes: object) -> LocalEngine:
    settings = {"sampling": SamplingParams(), "max_concurrent": rows, "max_tokens": MAX_TOKENS, "page_tokens": 4}
    return LocalEngine(policy, **{**settings, **changes})


def drain(engine: LocalEngine | PlainEngine) -> dict[int, Completion]:
    finished: list[Finished] = []
    for _ in range(3_000):
        if not engine.n_in_flight and not engine.n_waiting:
            return {request.id: completion for request, completion in finished}
        finished += engine.advance()
    raise AssertionError("the engine never drained")


def expected(policy: Policy, wanted: list[Request]) -> dict[int, Completion]:
    plain = PlainEngine(policy, sampling=SamplingParams(), max_concurrent=8, max_tokens=MAX_TOKENS)
    plain.submit(wanted)
    return drain(plain)


def assert_same(got: dict[int, Completion], wanted: dict[int, Completion], atol: float = 1e-10) -> None:
    assert got.keys() == wanted.keys()
    for i, completion in got.items():
        assert completion.tokens.tolist() == wanted[i].tokens.tolist(), i
        assert completion.stop_reason is wanted[i].stop_reason
        np.testing.assert_allclose(completion.logp, wanted[i].logp, atol=atol)


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3-tied", "llama-bias"])
@pytest.mark.parametrize(
    ("page_tokens", "tokens_per_tick"),
    [(4, 1), pytest.param(16, 3, marks=pytest.mark.slow), pytest.param(4, 8, marks=pytest.mark.slow)],
)
def test_writes_what_the_plain_engine_writes(family: str, page_tokens: int, tokens_per_tick: int):
    policy = tiny_policy(family)
    engine = local(policy, page_tokens=page_tokens, tokens_per_tick=tokens_per_tick)
    engine.submit(requests())
    assert_same(drain(engine), expected(policy, requests()))
    assert engine._pool.n_free == engine._pool.n_pages, "pages were lost"


@functools.cache
def by_the_plain_engine() -> tuple[Policy, dict[int, Completion]]:
    policy = tiny_policy()
    return policy, expected(policy, requests())


@given(
    kv_tokens=st.integers(68, 400), rows=st.integers(1, 12), tokens_per_tick=st.integers(1, 5), page=st.integers(2, 9)
)
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@pytest.mark.slow
def test_out_of_pages_the_same_tokens_a_little_later(kv_tokens: int, rows: int, tokens_per_tick: int, page: int):
    policy, wanted = by_the_plain_engine()
    engine = local(policy, rows=rows, kv_tokens=kv_tokens, tokens_per_tick=tokens_per_tick, page_tokens=page)
    engine.submit(requests())
    got = drain(engine)
    assert_same(got, wanted)
    assert engine._pool.n_free == engine._pool.n_pages


def test_a_preempted_response_comes_back_bit_for_bit():
    policy = tiny_policy("qwen2", torch.float32)
    roomy, tight = local(policy), local(policy, kv_tokens=120)
    preempted = []
    original = tight._preempt
    tight._preempt = lambda row: (preempted.append(row), original(row))[1]  # type: ignore[method-assign, assignment]
    results = []
    for engine in (roomy, tight):
        engine.submit(requests())
        results.append(drain(engine))
    assert len(preempted) > 3
    for i, completion in results[0].items():
        assert completion.tokens.tobytes() == results[1][i].tokens.tobytes()
        assert completion.logp.tobytes() == results[1][i].logp.tobytes()


def test_weights_that_change_while_responses_are_swapped_out():
    policy = tiny_policy()
    engine, roomy = local(policy, kv_tokens=120), local(policy)
    for other in (engine, roomy):
        other.submit(requests())
    finished: list[dict[int, Completion]] = []
    for other in (engine, roomy):
        done = []
        for version in (1, 2):
            for _ in range(6):
                done += other.advance()
            other.load_weights(policy, version)
        finished.append({request.id: completion for request, completion in done} | drain(other))
    assert_same(finished[0], finished[1])


def test_a_prompt_is_prefilled_once_and_its_pages_are_shared():
    policy = tiny_policy()
    engine = local(policy, rows=16)
    computed: list[int] = []
    prefill = engine._decoder.prefill
    engine._decoder.prefill = lambda ids, slots: (computed.append(int((slots > 0).sum())), prefill(ids, slots))[1]  # type: ignore[method-assign, assignment]
    engine.submit([request(i, 7, n_prompt=23) for i in range(16)])
    engine.advance()
    assert sum(computed) == 22  # all but the last token, once for sixteen responses
    # 5 full pages are shared; 2 tokens in a page of their own; each response has its copy of that page.
    assert engine._pool.n_pages - engine._pool.n_free == 5 + 1 + 16


def test_a_request_larger_than_the_cache_is_refused_by_name():
    engine = local(tiny_policy(), kv_tokens=1, max_tokens=40)
    assert engine._pool.n_pages == 11  # room for one response at its full length, always
    engine.submit([request(0, 1, n_prompt=10, max_new_tokens=30)])
    with pytest.raises(EngineError, match=r"request 1 .*51 tokens|request 1 .*do not fit"):
        engine.submit([request(1, 1, n_prompt=20, max_new_tokens=31)])


def test_joined_weights_are_the_same_parameters_and_can_be_saved(tmp_path):
    policy = tiny_policy("qwen2", torch.float32)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    local(policy)
    local(policy)  # a second engine finds them joined
    layer = policy.backbone.layers[0]
    q, k, v = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    whole = side_by_side([q, k, v])
    with torch.no_grad():
        k.add_(1.0)
    assert torch.equal(whole[len(q) : len(q) + len(k)], k)
    with torch.no_grad():
        k.sub_(1.0)
    save_policy(policy, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(loaded[name], tensor, atol=1e-6, rtol=0)
    shape = (len(q), len(k))
    assert shape == (32, 16)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-bias", "qwen2", "qwen3"])
def test_weights_kept_turned_follow_the_trainers(family: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy(family, torch.float32)
    if not is_whole:
        monkeypatch.setattr("dapo.rollout.local.whole_pass.WHOLE_NUMBERS", 0)
    engine = local(policy)
    assert (engine._decoder.whole is not None) is (is_whole and library() is not None)
    assert (engine._decoder.head_transposed is None) is (engine._decoder.whole is not None)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    engine.load_weights(policy, version=1)
    engine.submit(requests())
    got = drain(engine)
    monkeypatch.setattr("dapo.rollout.local.whole_pass.WHOLE_NUMBERS", 0)
    monkeypatch.setattr("dapo.rollout.local.weights.TRANSPOSED_NUMBERS", 0)
    straight = local(policy)
    assert straight._decoder.whole is None
    assert straight._decoder.head_transposed is None
    straight.submit(requests())
    assert_same(got, drain(straight), atol=1e-5)


def test_an_engine_made_in_inference_mode_takes_new_weights():
    policy = tiny_policy("llama", torch.float32)
    with torch.inference_mode():
        engine = local(policy)
    engine.load_weights(policy, version=1)
    engine.submit(requests())
    assert drain(engine)


def test_an_engine_beside_another_reads_the_weights_as_they_are():
    policy = tiny_policy("qwen2", torch.float32)
    engine = local(policy)
    with torch.no_grad():
        policy.head.weight.mul_(1.5)
    beside = engine.fork_for_eval(SamplingParams())
    beside.submit(requests())
    fresh = local(policy)
    fresh.submit(requests())
    assert_same(drain(beside), drain(fresh), atol=0)


def test_an_engine_beside_another_shares_its_pages_and_leaves_its_responses_alone():
    policy = tiny_policy("qwen2")
    engine = local(policy)
    engine.submit(requests())
    early = [item for _ in range(9) for item in engine.advance()]
    other = engine.fork_for_eval(SamplingParams(temperature=0.0))
    assert other._decoder is engine._decoder
    greedy = PlainEngine(policy, sampling=SamplingParams(temperature=0.0), max_concurrent=8, max_tokens=MAX_TOKENS)
    for each in (other, greedy):
        each.submit(requests(n_groups=3))
    assert_same(drain(other), drain(greedy))
    assert_same({r.id: c for r, c in early} | drain(engine), expected(policy, requests()))
    assert engine._pool.n_free == engine._pool.n_pages


def test_a_cache_too_small_for_one_response_is_refused_by_name():
    per_token = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, head size, bytes
    need = (MAX_TOKENS // 4 + 2) * 4 * per_token / 2**30
    with pytest.raises(EngineError, match=r"rollout.kv_cache_gib = .*64 tokens"):
        local(tiny_policy(), kv_gib=0.99 * need)
    engine = local(tiny_policy(), kv_gib=1.01 * need)
    engine.submit(requests())
    assert_same(drain(engine), expected(tiny_policy(), requests()))


def under_memory_pressure(policy: Policy) -> LocalEngine:
    engine = local(policy, kv_tokens=120)
    engine.submit(requests())
    while not engine._has_memory_pressure:
        assert not engine.advance(), "nothing ends before pages run out"
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("what", ["snapshot", "beside", "load", "restore"])
def test_an_engine_under_memory_pressure_continues(what: str):
    policy = tiny_policy()
    engine = under_memory_pressure(policy)
    if what == "snapshot":
        engine.snapshot()
    elif what == "beside":
        engine.fork_for_eval(SamplingParams())
    elif what == "load":
        engine.load_weights(tiny_policy(), 0)
    else:
        state = engine.snapshot()
        engine = local(policy, kv_tokens=10_000)
        engine.restore(state)
    assert_same(drain(engine), expected(policy, requests()))


@pytest.mark.parametrize(("ops", "tokens_per_tick"), [("auto", 1), ("plain", 4)])
def test_a_prompt_that_is_not_finite_hurts_no_neighbour(ops: str, tokens_per_tick: int):
    """Its padding goes to a page that shorter rows carry behind their mask, where 0 times NaN would be NaN."""
    policy = tiny_policy()
    healthy = [request(i, i, n_prompt=4 + i, max_new_tokens=3) for i in range(6)]
    wanted = expected(policy, healthy)
    met = {token for r in healthy for token in (*r.prompt, *wanted[r.id].tokens.tolist())}
    poison = next(token for token in range(3, VOCABULARY) if token not in met)
    with torch.no_grad():
        policy.backbone.embed_tokens.weight[poison] = float("nan")
    sick = Request(99, (5, poison, 7), NoiseKey(0, "train", "sick", 0, 0), 30, group=99)
    engine = local(policy, rows=16, ops=ops, tokens_per_tick=tokens_per_tick)
    engine.submit([*healthy, sick])
    got = drain(engine)
    assert [fault.request.id for fault in engine.faults] == [99]
    del got[99]
    assert_same(got, wanted)


def test_an_exception_in_the_middle_of_a_tick_leaves_no_wrong_keys():
    policy = tiny_policy()
    engine = local(policy)
    engine.submit(requests())
    prefill, engine._decoder.prefill = engine._decoder.prefill, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        engine.advance()
    engine._decoder.prefill = prefill  # type: ignore[method-assign]
    assert_same(drain(engine), expected(policy, requests()))


def test_long_responses_do_not_depend_on_their_neighbours_to_the_last_bit():
    policy = tiny_policy("llama", torch.float32, max_position_embeddings=2048)
    lengths = [260, 300, 384, 480, 700]
    wanted = [request(i, 50 + i, n_prompt=n, max_new_tokens=40) for i, n in enumerate(lengths)]
    engine = local(policy, max_tokens=1024, page_tokens=16)
    engine.submit(wanted)
    among = drain(engine)
    for each in wanted:
        alone = local(policy, max_tokens=1024, page_tokens=16)
        alone.submit([each])
        completion = drain(alone)[each.id]
        assert completion.tokens.tobytes() == among[each.id].tokens.tobytes()
        assert completion.logp.tobytes() == among[each.id].logp.tobytes()


@pytest.mark.parametrize("engine", [LocalEngine, PlainEngine])
def test_a_cache_that_no_machine_has_is_refused_by_name(engine: type[LocalEngine] | type[PlainEngine]):
    with pytest.raises(EngineError, match=r"max_concurrent_sequences[\s\S]*") as caught:
        engine(tiny_policy("llama"), sampling=SamplingParams(), max_concurrent=10**12, max_tokens=MAX_TOKENS)
    assert "not free on the device" in caught.value.message


def test_a_card_that_fails_is_not_called_full(monkeypatch: pytest.MonkeyPatch):
    def zeros(*_sizes: object, **_options: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch, "zeros", zeros)
    shape = {"n_layers": 2, "n_heads": 2, "head_dim": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        PagedCache(n_pages=4, page_tokens=16, **shape)
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        KVCache(rows=4, max_tokens=64, **shape)


# ------------------------------------------------------------------ borders


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 9])
def test_border_pages_are_enough_and_each_token_has_a_cell_of_its_own(n: int):
    """Pages of four tokens."""
    pool = PagePool(12)
    pages = pool.take(pages_for(n, 4))
    slots = slots_of(pages, n, 4)
    assert len(pages) == sum(1 for t in range(n) if t % 4 == 0)
    assert len(set(slots.tolist())) == n
    assert all(slots >= 4)  # page 0 is nobody's
    prompt = Prompt(tuple(range(n)), 4, pages)
    assert 4 * len(prompt.shared) + (n % 4) == n
    assert len(prompt.tail) == (n % 4 > 0)
    rest = pool.take(pool.n_free)
    assert sorted([*pages.tolist(), *rest.tolist()]) == list(range(1, 12))
    pool.give(rest)
    pool.give(pages)
    assert sorted(pool.take(pool.n_free).tolist()) == list(range(1, 12))


class Prefilled:
    """A decoder that only remembers which token it was given for which cell."""

    is_exact = has_graphs = False

    def __init__(self) -> None:
        self.cache = SimpleNamespace(data=torch.zeros(0))
        self.widths: list[tuple[int, int]] = []
        self.token: dict[int, int] = {}
        self.n_given = 0

    def prefill(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        self.widths.append(tuple(ids.shape))
        for token, slot in zip(ids.flatten().tolist(), slots.flatten().tolist(), strict=True):
            if slot:
                self.token[slot] = token
                self.n_given += 1


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 368, 369])
def test_border_every_prefix_is_computed_once_whatever_a_pass_holds(
    n: int, length: int, monkeypatch: pytest.MonkeyPatch
):
    """Four prefixes a pass, with a longer one and a shorter one among them; beyond 368 tokens widths are not mixed."""
    budget = 4 * rounded_up(length)
    monkeypatch.setattr("dapo.rollout.local.prefixes.PREFILL_TOKENS", budget)
    lengths = [length] * n + ([length + 1, max(1, length - 1)] if n else [])
    starts = np.cumsum([1, *lengths])
    prefixes = [
        Prefix(np.arange(m, dtype=np.int32) + 7 * i, starts[i] + np.arange(m), NO_PAGES) for i, m in enumerate(lengths)
    ]
    decoder = Prefilled()
    prefill(decoder, prefixes)  # type: ignore[arg-type]
    wanted = {int(slot): int(token) for p in prefixes for slot, token in zip(p.slots, p.tokens, strict=True)}
    assert decoder.token == wanted
    assert decoder.n_given == len(wanted)
    assert all(rows == 1 or rows * width <= budget for rows, width in decoder.widths)


@pytest.mark.parametrize("kind", [LocalEngine, PlainEngine])
def test_responses_are_given_up_whatever_their_tokenizer_does(kind: type[LocalEngine] | type[PlainEngine]):
    policy = tiny_policy()
    policy.tokenizer = tiny_tokenizer()
    policy.tokenizer.clean_up_tokenization_spaces = True
    engine = kind(policy, sampling=SamplingParams(), max_concurrent=2, max_tokens=MAX_TOKENS)
    engine.submit([request(0, 0, n_prompt=3, max_new_tokens=9)])
    engine.advance()
    assert engine.abort([]) == []
    assert [one.id for one, _ in engine.abort([0])] == [0]


@pytest.mark.parametrize("kind", [LocalEngine, PlainEngine])
@pytest.mark.parametrize("drafts", [0, 2])
def test_what_is_done_meanwhile_is_done_once_a_tick(kind: type[LocalEngine] | type[PlainEngine], drafts: int):
    """Also by an engine that is empty, paused, or drafts."""
    called: list[int] = []
    for ops in ("auto", "plain") if kind is LocalEngine else ("",):
        more = {"ops": ops} if ops else {}
        drafting = Drafting(tokens=drafts, below_rows=8)
        sizes = {"max_concurrent": 4, "max_tokens": MAX_TOKENS, "drafting": drafting}
        engine = kind(tiny_policy(), sampling=SamplingParams(), **sizes, **more)
        n = len(called)

        def advance(engine: LocalEngine | PlainEngine = engine) -> None:
            engine.advance(lambda: called.append(1))

        advance()
        engine.submit([dataclasses.replace(request(0, 0, n_prompt=3, max_new_tokens=6), prompt=(5, 6, 5, 6, 5, 6))])
        engine.pause()
        advance()
        engine.resume()
        n_ticks = 2
        while engine.n_in_flight or engine.n_waiting:
            advance()
            n_ticks += 1
        assert len(called) == n + n_ticks


def test_new_tokens_of_one_pass_attend_to_each_other(monkeypatch: pytest.MonkeyPatch):
    engine = local(tiny_policy(dtype=torch.float32), ops="triton")
    seen = []
    monkeypatch.setattr(
        "dapo.rollout.local.decoder.through_layers", lambda ops, *_: seen.append((ops.has_drafts, len(_[1])))
    )
    token, length = torch.zeros(3, dtype=torch.int32), torch.arange(1, 4, dtype=torch.int32)
    engine._decoder.read(token, length, torch.ones(3, 2, dtype=torch.int32))
    assert seen == [(True, 3)]


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("is_fast", [False, True])
def test_texts_decoded_together_are_those_of_the_tokenizer(cleans_up: bool, is_fast: bool):
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = cleans_up
    single = tokenizer if is_fast else SimpleNamespace(is_fast=False, batch_decode=tokenizer.batch_decode)
    rows = [np.array(row, np.int32) for row in ([5, 6, EOS], [], [EOS], [7, 0, 1, 8, 9], list(range(VOCABULARY)))]
    decode, calls = single.batch_decode, []
    single.batch_decode = lambda *a, **k: (calls.append(1), decode(*a, **k))[1]
    assert texts_of(rows, single) == decode(rows, skip_special_tokens=True)
    assert len(calls) == (cleans_up or not is_fast), "what the tokenizer does afterwards only it does"
    assert texts_of(rows, None) == [""] * 5
    assert texts_of([], single) == texts_of([], None) == []


@pytest.mark.parametrize(
    ("first", "n", "is_read"),
    [
        (0, 1447, True),  # 2**20 keys
        (0, 1449, False),
        (2**20 - 1, 1, True),
        (2**20, 1, True),
        (2**20 + 1, 1, False),
        (0, 1024, True),  # in the mean 512 each
        (0, 1026, True),
    ],
)
def test_border_new_tokens_go_through_the_kernels_that_generate_while_they_read_few_keys(
    first: int, n: int, is_read: bool
):
    decoder = SimpleNamespace(is_exact=False, has_graphs=True)
    tokens, slots = np.zeros(n, np.int32), np.zeros(n, np.int64)
    assert reads(decoder, [Extension(tokens, first, NO_PAGES, slots)]) == is_read  # type: ignore[arg-type]
    assert not reads(SimpleNamespace(is_exact=False, has_graphs=False), [Prefix(tokens, slots, NO_PAGES)])  # type: ignore[arg-type]
    many = [Prefix(np.zeros(1023, np.int32), np.zeros(1023, np.int64), NO_PAGES)] * 50
    assert reads(decoder, many)  # type: ignore[arg-type]
    assert not reads(decoder, [Prefix(np.zeros(1026, np.int32), slots, NO_PAGES)] * 50)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [LocalEngine, PlainEngine])
@pytest.mark.parametrize("n_tokens", [16, 32, 48])
def test_border_prefills_in_several_passes_change_nothing(
    kind: type[LocalEngine] | type[PlainEngine], n_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    policy, wanted = tiny_policy(), [request(i, i, n_prompt=2 + 8 * (i % 3), max_new_tokens=2) for i in range(9)]
    together = expected(policy, wanted)
    monkeypatch.setattr(f"{kind.__module__.replace('local.engine', 'local.prefixes')}.PREFILL_TOKENS", n_tokens)
    engine = kind(policy, sampling=SamplingParams(), max_concurrent=8, max_tokens=MAX_TOKENS)
    engine.submit(wanted)
    assert_same(drain(engine), together)


@pytest.mark.parametrize(
    ("ops", "kv_tokens", "tokens_per_tick"), [("auto", None, 3), ("auto", 40, 1), ("plain", None, 1), ("plain", 40, 3)]
)
def test_border_prompts_and_limits_around_the_ends_of_pages(ops: str, kv_tokens: int | None, tokens_per_tick: int):
    """Pages of four: prompts of 1 to 9 tokens, each with limits that end before, at and behind a page's end."""
    policy, ends = tiny_policy(), (3, 4, 5, 9, 12)
    wanted = [
        request(i, n_prompt, n_prompt, max_new_tokens=end)
        for i, (n_prompt, end) in enumerate((p, e) for p in (1, 3, 4, 5, 6, 9) for e in ends)
    ]
    engine = local(policy, rows=7, kv_tokens=kv_tokens, tokens_per_tick=tokens_per_tick, max_tokens=21, ops=ops)
    engine.submit(wanted)
    assert_same(drain(engine), expected(policy, wanted))
    assert engine._pool.n_free == engine._pool.n_pages, "pages were lost"


@pytest.mark.parametrize("kind", [LocalEngine, PlainEngine])
@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 11, 15, 16, 17, 33])
def test_border_every_request_is_answered_once_by_five_rows_or_sixteen(
    kind: type[LocalEngine] | type[PlainEngine], n: int
):
    """Sixteen is what rows are rounded up to. Requests are answered in the order in which they end."""
    policy = tiny_policy()
    wanted = [request(i, i, n_prompt=2, max_new_tokens=1 + i % 3) for i in range(n)]
    for rows in (5, 16):
        engine = kind(policy, sampling=SamplingParams(), max_concurrent=rows, max_tokens=MAX_TOKENS)
        engine.submit(wanted)
        ended: list[Finished] = []
        while engine.n_in_flight or engine.n_waiting:
            ended += engine.advance()
            assert engine.n_in_flight <= rows
        assert sorted(request.id for request, _ in ended) == list(range(n))
        state = engine.snapshot()
        assert (state.meta["n_running"], state.meta["requests"]) == (0, [])


@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 1, 2], [2, 0, 0, 5, 1]])
def test_border_what_is_in_flight_comes_back_from_a_snapshot(lengths: list[int]):
    items = [
        PartialResponse(
            request(i, i, n_prompt=2),
            10 + i,
            np.arange(n, dtype=np.int32) + 100 * i,
            -np.arange(n, dtype=np.float32),
            np.full(n, i, np.int32),
        )
        for i, n in enumerate(lengths)
    ]
    again = from_state(to_state(items, np.float32, {"tick": 1}))
    assert [(item.request, item.order) for item in again] == [(item.request, item.order) for item in items]
    for name in ("tokens", "logp", "version"):
        assert [getattr(item, name).tolist() for item in again] == [getattr(item, name).tolist() for item in items]
