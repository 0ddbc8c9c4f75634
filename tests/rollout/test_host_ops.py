"""The compiled decode step, in parts and as one call, against the one in torch: every family, the draw, what is not
finite."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from compilers import needs_compiler
from dapo.models.kernels import compiled
from dapo.models.policy import Policy
from dapo.rollout.engine import Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.local import decoder, whole_pass
from dapo.rollout.local.block_ops import BlockOps
from dapo.rollout.local.blocks import Blocks
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.host_ops import HostOps
from dapo.rollout.local.rows import BAD, DeviceRows
from dapo.types import Completion
from tiny_models import VOCABULARY, families, tiny_policy

pytestmark = needs_compiler
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["whole", "parts"])
def is_whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a pass is one call, or one for each part."""
    if request.param == "parts":
        monkeypatch.setattr(whole_pass, "WHOLE_NUMBERS", 0)
    return request.param == "whole"


def run(
    policy, wanted: list[Request], ops: str = "auto", rows: int = 32, *, is_whole: bool = True, **changes: object
) -> dict[int, Completion]:
    settings = {"sampling": SamplingParams(), "max_tokens": 256, "page_tokens": 16} | changes
    engine = LocalEngine(policy, max_concurrent=rows, ops=ops, **settings)
    assert type(engine._decoder.ops) is (HostOps if ops == "auto" else BlockOps)
    assert (engine._decoder.whole is not None) is (is_whole and ops == "auto")
    engine.submit(wanted)
    finished: list[Finished] = []
    while engine.n_in_flight or engine.n_waiting:
        finished += engine.advance()
    return {request.id: completion for request, completion in finished}


def requests(n: int, lengths: tuple[int, ...] = (1, 5, 16, 40)) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, VOCABULARY, lengths[i % len(lengths)]).tolist()) for i in range(n)]
    return [Request(i, p, NoiseKey(0, "train", str(i), 0, i), 20 + i, group=i) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
@pytest.mark.parametrize("family", families())
def test_responses_are_those_of_the_step_in_torch(family: str, sampling: SamplingParams, is_whole: bool):
    policy = tiny_policy(family, torch.float32, intermediate_size=37)  # columns that fill no panel
    got = run(policy, requests(24), sampling=sampling, is_whole=is_whole)
    wanted = run(policy, requests(24), "blocks", sampling=sampling)
    for i, completion in wanted.items():
        n = len(completion.tokens)
        assert got[i].tokens.tolist() == completion.tokens.tolist(), i  # no tie among so few
        np.testing.assert_allclose(got[i].logp[:n], completion.logp, atol=2e-5)
        assert got[i].stop_reason is completion.stop_reason


def test_a_response_is_the_same_to_the_last_bit_alone_and_among_others(is_whole: bool, monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy("qwen3", torch.float32)
    among = run(policy, requests(24), is_whole=is_whole)
    for i in (0, 3, 7, 23):
        alone = run(policy, [requests(24)[i]], is_whole=is_whole)[i]
        assert alone.tokens.tobytes() == among[i].tokens.tobytes()
        assert alone.logp.tobytes() == among[i].logp.tobytes()
    monkeypatch.setattr(compiled, "PARALLEL_NUMBERS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = run(policy, requests(24), is_whole=is_whole)
    assert all(shared[i].logp.tobytes() == among[i].logp.tobytes() for i in among)


def test_float64_and_a_machine_without_a_compiler_take_torch(monkeypatch: pytest.MonkeyPatch):
    for policy, has_library in ((tiny_policy(), True), (tiny_policy("llama", torch.float32), False)):
        if not has_library:
            monkeypatch.setattr(decoder, "library", lambda: None)
        engine = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=4, max_tokens=64)
        assert type(engine._decoder.ops) is BlockOps


def test_a_pass_is_one_call_for_small_models_of_plain_matrices_only(monkeypatch: pytest.MonkeyPatch):
    def is_whole(policy: Policy) -> bool:
        return (
            LocalEngine(policy, sampling=SamplingParams(), max_concurrent=4, max_tokens=64)._decoder.whole is not None
        )

    assert is_whole(tiny_policy("qwen2", torch.float32))
    odd = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    assert not is_whole(tiny_policy("llama", torch.float32, **odd))  # its width fills no columns
    narrow = {"num_key_value_heads": 1, "head_dim": 4}
    assert not is_whole(tiny_policy("llama", torch.float32, **narrow))  # nor do its queries, keys and values
    adapted = tiny_policy("llama", torch.float32)
    adapted.backbone.layers[1].mlp.down_proj = torch.nn.Sequential(adapted.backbone.layers[1].mlp.down_proj)
    assert not is_whole(adapted)
    policy = tiny_policy("llama", torch.float32)
    n = sum(parameter.numel() for parameter in policy.parameters())
    for limit, wanted in ((n - 1, False), (n, True)):
        monkeypatch.setattr(whole_pass, "WHOLE_NUMBERS", limit)
        assert is_whole(policy) is wanted


@pytest.mark.parametrize(("n", "inner"), [(1, 3), (15, 1), (16, 2), (17, 5), (31, 4), (32, 3), (33, 2), (65, 7)])
def test_border_panels_have_every_column_once(n: int, inner: int):
    weight = torch.arange(1.0, n * inner + 1).view(n, inner)
    columns = -(-n // 16) * 16
    got = torch.full((columns * inner,), NAN)
    compiled.host().panels(compiled.at(weight), compiled.at(got), n, inner)
    padded = torch.cat([weight, torch.zeros(columns - n, inner)])
    assert torch.equal(got, torch.cat([panel.t().reshape(-1) for panel in padded.split(32)]))


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (2, 3), (0, 3), (1, 7), (3, 7), (6, 7), (0, 7)])
def test_border_slots_of_several_blocks_are_cut_once(first: int, end: int):
    cache = PagedCache(
        n_layers=1, n_pages=8, page_tokens=4, n_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
    )
    blocks = Blocks(cache, 256)
    serial, length = np.arange(7), np.array([5, 5, 5, 40, 40, 40, 40])
    blocks.arrange(serial, length, np.zeros((7, 16), np.int32), 1)
    drafted = np.array([1, 2, 1, 3, 1, 1, 2])
    for spans, rows in ((blocks.spans, np.ones(7, int)), (blocks.spread(drafted), drafted)):
        pieces = list(whole_pass.cut(spans, first, end))
        offsets = {id(span.block): before for span, before in zip(spans, (0, 3), strict=True)}
        assert [offsets[id(s.block)] + i for s, a, b in pieces for i in range(a, b)] == list(range(first, end))
        assert whole_pass.n_rows_of(spans, first, end) == rows[first:end].sum()


# ------------------------------------------------------------------ the draw


def drawn(logits: torch.Tensor, sampling: SamplingParams, kind: type[BlockOps]) -> DeviceRows:
    """Rows after one draw; row i has noise key i and is at token i % 50 of its response."""
    n, n_tokens = logits.shape
    rows = DeviceRows(n, 1, 2, torch.float32, torch.device("cpu"))
    rows.start[:], rows.limit[:] = 3, 60
    rows.length[:] = 3 + torch.arange(n) % 50
    for i in range(n):
        words = np.array(NoiseKey(0, "train", str(i), 0, i).words(), np.uint32).view(np.int32)
        rows.words[:, i] = torch.from_numpy(words)
    rows.clock += 1
    cache = PagedCache(
        n_layers=1, n_pages=1, page_tokens=4, n_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
    )
    ops = kind(cache, torch.zeros(4, 4), torch.zeros(4, 4), 1.0, 1)
    is_end = torch.zeros(n_tokens, dtype=torch.bool)
    is_end[1] = True
    ops.draw(logits, sampling, is_end, rows)
    return rows


@pytest.mark.parametrize("n_tokens", [2, 51, 128, 129, 1_000, 30_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_tokens_and_log_probs_are_those_of_the_sampler(n_tokens: int, temperature: float):
    n = 400 if n_tokens < 5_000 else 20
    logits = 3 * torch.randn(n, n_tokens, generator=torch.Generator().manual_seed(n_tokens))
    ours, plain = (drawn(logits.clone(), SamplingParams(temperature), kind) for kind in (HostOps, BlockOps))
    same = ours.out_token[1] == plain.out_token[1]
    assert same.float().mean() > 0.99  # a border between two tokens may lie a rounding error further
    assert_close(ours.out_logp[1][same], plain.out_logp[1][same], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.state[:, same], plain.state[:, same])


def test_frequencies_are_the_probabilities():
    """20,000 draws of 8 tokens: chi-square with 7 degrees of freedom is below 24.3 but for one time in a thousand."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 0.5, -0.2])
    rows = drawn(logits.repeat(20_000, 1), SamplingParams(), HostOps)
    count = torch.bincount(rows.out_token[1].long(), minlength=8)
    wanted = 20_000 * logits.softmax(0)
    assert float(((count - wanted) ** 2 / wanted).sum()) < 24.3


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.5]])
    rows = drawn(logits, SamplingParams(temperature=0), HostOps)
    assert rows.out_token[1].tolist() == [1, 0]
    assert_close(rows.out_logp[1], logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[NAN, 0.0, 0.0], [INF, 0.0, 0.0], [INF, INF, 0.0], [-INF] * 3, [0.0, 0.0, NAN], [NAN] * 3]
)
def test_logits_that_are_not_finite_stop_their_row_alone(bad: list[float], temperature: float):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad, [2.0, 1.0, 0.0]])
    rows = drawn(logits, SamplingParams(temperature), HostOps)
    assert [stop == BAD for stop in rows.stop.tolist()] == [False, True, False]
    assert rows.length.tolist() == [4, 4, 6]  # row 1 has not grown


def test_what_is_forbidden_is_never_drawn():
    logits = torch.zeros(5_000, 300)
    logits[:, ::2] = -INF
    tokens = drawn(logits, SamplingParams(), HostOps).out_token[1]
    assert (tokens % 2 == 1).all()
    only = torch.full((50, 300), -INF)
    only[:, 299] = -1e4
    assert (drawn(only, SamplingParams(), HostOps).out_token[1] == 299).all()


def test_rows_that_have_stopped_stay_as_they_are():
    logits = torch.zeros(3, 5)
    rows = DeviceRows(3, 1, 1, torch.float32, torch.device("cpu"))
    rows.stop[1] = 1
    before = rows.state[:, 1].clone()
    cache = PagedCache(
        n_layers=1, n_pages=1, page_tokens=4, n_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
    )
    HostOps(cache, torch.zeros(4, 4), torch.zeros(4, 4), 1.0, 1).draw(
        logits, SamplingParams(), torch.zeros(5, dtype=torch.bool), rows
    )
    assert torch.equal(rows.state[:, 1], before)


def test_spans_of_several_blocks_and_idle_rows():
    """Rows in two length classes and three rows that only fill the batch up."""
    policy = tiny_policy("llama", torch.float32)
    wanted = requests(13, lengths=(3, 60))
    got, plain = run(policy, wanted), run(policy, wanted, "blocks")
    assert {i: c.tokens.tolist() for i, c in got.items()} == {i: c.tokens.tolist() for i, c in plain.items()}
