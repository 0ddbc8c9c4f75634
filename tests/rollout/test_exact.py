"""`rollout.exact`: engine and trainer give the same log-probs to the last bit, whatever else is in the batch.

Under Triton's interpreter on a CPU: in float32, where no rounding hides another order of sums, and in float16 (it knows
no bfloat16). On a card: tests/gpu/test_exact.py.
"""

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import STEPS, apart, groups_of, make_models, our_weights, settings, train_ours, weight_gaps
from test_local_engine import request
from torch.testing import assert_close

from cuda_attention import stand_in
from dapo.config import load_recipe
from dapo.distributed.world import ALONE
from dapo.errors import ConfigError, EngineError
from dapo.learner.learner import make_learner
from dapo.learner.optimizer import Optimizer
from dapo.models.fused_layers import fuse_layers
from dapo.models.kernels.exact_linear import TILES, exact_linear
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.models.triton_support import has_triton
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import Finished, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.exact import ExactPass
from dapo.rollout.local.pages import pages_for
from dapo.rollout.local.prefixes import Extension, Prefix, extend, prefill, slots_of
from dapo.rollout.make import refuse_inexact
from dapo.trainer.assemble import make_policy
from dapo.types import Completion
from tiny_models import VOCABULARY, tiny_policy

pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the kernels are compiled: tests/gpu"),
]
PAGE, MAX_TOKENS, TEMPERATURE = 4, 48, 0.9
SMALL = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one by one. Two blocks of keys, and of the vocabulary, are several."""
    monkeypatch.setattr("dapo.rollout.local.decoder.rounded_up", lambda n: n)
    monkeypatch.setattr("dapo.rollout.local.ops.ATTEND_BLOCK", 16)
    for module in ("ops", "exact"):
        monkeypatch.setattr(f"dapo.rollout.local.{module}.DRAW_BLOCK", 32)


@pytest.fixture(autouse=True)
def products_add_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's instruction does; in NumPy's, the interpreter's, a row depends on the tile's size on some CPUs."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        left, right, total = (np.array(x.data, dtype=d.data.dtype, order="C") for x in (a, b, d))
        for k in range(len(right)):
            total += left[:, k, None] * right[k]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def exact_policy(family: str, dtype: torch.dtype = torch.float32, **shape: int) -> Policy:
    policy = tiny_policy(family, dtype, **shape)
    policy.exact = ExactPass(policy, max_tokens=MAX_TOKENS, page_tokens=PAGE)
    return policy


def exact_engine(policy: Policy, **changes: object) -> LocalEngine:
    settings = {"max_concurrent": 4, "max_tokens": MAX_TOKENS, "page_tokens": PAGE, "tokens_per_tick": 1}
    sampling = SamplingParams(temperature=TEMPERATURE)
    return LocalEngine(policy, sampling=sampling, ops="triton", is_exact=True, **{**settings, **changes})


def drain(engine: LocalEngine) -> dict[int, Completion]:
    finished: list[Finished] = []
    while engine.n_in_flight or engine.n_waiting:
        finished += engine.advance()
    return {one.id: completion for one, completion in finished}


def trainers(policy: Policy, wanted: list[Request], done: dict[int, Completion]) -> dict[int, np.ndarray]:
    """The trainer's log-probs of these responses, packed together."""
    packed = pack([one.prompt for one in wanted], [done[one.id].tokens for one in wanted], "cpu")
    with torch.no_grad():
        logp, _ = policy(packed, temperature=TEMPERATURE, with_entropy=False)
    return {one.id: part.numpy() for one, part in zip(wanted, packed.split(logp), strict=True)}


def assert_same_bits(policy: Policy, wanted: list[Request], done: dict[int, Completion]) -> None:
    """In one micro-batch, whose neighbours share their prompts, and in others of other company."""
    for rows in (wanted, wanted[1:2]):
        for i, logp in trainers(policy, rows, done).items():
            np.testing.assert_array_equal(done[i].logp, logp)


@pytest.mark.parametrize("K", [64, 100])
def test_border_a_product_is_torchs_and_a_row_has_the_same_bits_in_any_company(K: int):
    """Alone, among 64, 65 and 129, for the largest tile, the smallest, and one of 64 rows."""
    x, weight, bias = (torch.randn(*shape).half() for shape in ((129, K), (70, K), (70,)))
    whole = exact_linear(x, weight, bias, dtype=torch.float32)
    assert_close(whole, x.float() @ weight.float().t() + bias.float(), atol=1e-4, rtol=1e-4)
    assert_close(exact_linear(x, weight), x @ weight.t(), atol=2e-2, rtol=2e-3)
    for tile in (TILES[0], TILES[2], TILES[-1]):
        for n in (1, 64, 65):
            assert torch.equal(exact_linear(x[-n:], weight, bias, dtype=torch.float32, tile=tile), whole[-n:])
    assert exact_linear(x[:0], weight).shape == (0, 70)


def test_sampled_and_trained_log_probs_are_the_same_bits():
    """Uneven lengths, two prompts of two responses each, fewer rows than responses."""
    policy = exact_policy("qwen2", **SMALL)
    wanted = [request(i, i // 2, n_prompt=(15, 3)[i // 2], max_new_tokens=(2, 4, 4, 2)[i]) for i in range(4)]
    engine = exact_engine(policy, max_concurrent=3)
    assert engine._decoder.head_transposed is None, "its products are torch's"
    engine.submit(wanted)
    done = drain(engine)
    assert_same_bits(policy, wanted, done)
    policy.exact = None
    ordinary = LocalEngine(policy, sampling=SamplingParams(temperature=TEMPERATURE), max_concurrent=4, max_tokens=48)
    ordinary.submit(wanted)
    for i, completion in drain(ordinary).items():
        np.testing.assert_array_equal(completion.tokens, done[i].tokens, err_msg="they draw the same tokens")


def test_also_behind_a_recomputed_prefix_and_behind_drafts():
    """After two tokens all keys and values are dropped: the prompt and what was written so far are read again."""
    policy = exact_policy("qwen3", **SMALL)
    same = (5, 6, 7) * 5
    wanted = [dataclasses.replace(request(i, 0, n_prompt=1, max_new_tokens=5), prompt=same) for i in range(2)]
    engine = exact_engine(policy, drafting=Drafting(tokens=2, below_rows=2))
    engine.submit(wanted)
    early: list[Finished] = [*engine.advance(), *engine.advance()]
    engine.snapshot()
    done = drain(engine) | {one.id: completion for one, completion in early}
    assert engine.take_drafted()[0] > 1
    assert_same_bits(policy, wanted, done)


class Reads:
    """A decoder that only remembers what it was given: (token, its length, the page it goes to)."""

    is_exact = True

    def __init__(self) -> None:
        self.cache = SimpleNamespace(data=torch.zeros(0), page_tokens=PAGE)
        self.rows = SimpleNamespace(table=torch.zeros(1, 5))
        self.given: list[tuple[int, int, int]] = []
        self.passes: list[int] = []

    def read(self, token: torch.Tensor, length: torch.Tensor, table: torch.Tensor) -> None:
        self.passes.append(len(token))
        page = table[torch.arange(len(token)), (length - 1) // PAGE]
        self.given += zip(token.tolist(), length.tolist(), page.tolist(), strict=True)


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 15])
def test_border_every_prefix_is_read_once_in_order_whatever_a_pass_holds(n: int, monkeypatch: pytest.MonkeyPatch):
    """Passes of 7 tokens. A prompt of n, a response behind it that shares its full pages, a turn behind 6 tokens."""
    monkeypatch.setattr("dapo.rollout.local.prefixes.PREFILL_TOKENS", 7)
    pages = np.array([3, 8, 1, 6, 2], np.int32)
    tokens = np.arange(100, 100 + n, dtype=np.int32)
    slots, n_shared = slots_of(pages, n + 2, PAGE), n // PAGE * PAGE
    prompt = Prefix(tokens, slots[:n], pages[: pages_for(n, PAGE)])
    response = Prefix(np.arange(100, 102 + n, dtype=np.int32), slots * (np.arange(n + 2) >= n_shared), pages)
    turn = Extension(np.arange(3, dtype=np.int32), 6, pages, slots_of(pages, 9, PAGE)[6:])
    decoder = Reads()
    prefill(decoder, [prompt, response])  # type: ignore[arg-type]
    wanted = [(100 + i, i + 1, pages[i // PAGE]) for i in [*range(n), *range(n_shared, n + 2)]]
    assert decoder.given == wanted
    assert all(size == 7 for size in decoder.passes[:-1])
    extend(decoder, [turn])  # type: ignore[arg-type]
    assert decoder.given[len(wanted) :] == [(i, 7 + i, pages[(6 + i) // PAGE]) for i in range(3)]


def test_gradients_are_those_of_the_ordinary_path_within_rounding():
    policy = exact_policy("qwen3-tied", torch.float16, num_key_value_heads=1)
    rng = np.random.default_rng(0)
    packed = pack([[5, 6, 7, 8, 9, 3]] * 2, [rng.integers(3, VOCABULARY, n) for n in (3, 6)], "cpu")
    assert packed.shared is not None
    found = []
    for exact in (policy.exact, None):
        policy.exact = exact
        policy.zero_grad()
        logp, entropy = policy(packed, temperature=TEMPERATURE)
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        gradients = {name: p.grad.float().clone() for name, p in policy.named_parameters()}
        found.append((logp.detach(), entropy, gradients))
    (logp, entropy, ours), (plain_logp, plain_entropy, theirs) = found
    assert_close(logp, plain_logp, atol=2e-2, rtol=0)
    assert_close(entropy, plain_entropy, atol=2e-2, rtol=0)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < 0.02 * gradient.norm(), name


@pytest.mark.slow
def test_gradients_go_to_the_masters_as_on_the_ordinary_path_over_micro_batches_of_whole_layers(
    monkeypatch: pytest.MonkeyPatch,
):
    """As in an update of a card: weights of 16 bits with float32 masters, layers that are one operation."""
    stand_in(monkeypatch)
    for module in ("fused_layers", "packing", "logprobs"):
        monkeypatch.setattr(f"dapo.models.{module}.runs_triton", lambda _: True)
    policy = exact_policy("qwen2-tied", torch.float16, initializer_range=0.1, **SMALL)
    fuse_layers(policy.backbone)
    optimizer = Optimizer(policy.named_parameters(), betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    rng = np.random.default_rng(0)
    micros = [
        pack([[5, 6, 7, 8, 9, 3]] * 2, [rng.integers(3, VOCABULARY, n) for n in (3, 12)], "cpu"),
        pack([[7, 8], [4]], [rng.integers(3, VOCABULARY, n) for n in (6, 2)], "cpu"),
    ]
    assert micros[0].shared is not None
    found = []
    for exact in (policy.exact, None):
        policy.exact = exact
        optimizer.zero_grad()
        for packed in micros:
            logp, _ = policy(packed, temperature=TEMPERATURE)
            (logp * torch.linspace(-1, 1.4, len(logp))).sum().backward()
        found.append({name: master.grad.clone() for name, master in optimizer.masters.items()})
    ours, theirs = found
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < 0.01 * gradient.norm(), name


@pytest.mark.slow
def test_whole_steps_of_training_are_those_without_it(tmp_path: Path):
    """Two steps of DAPO, eight updates on packed groups: ratios, clipping, masks, the optimizer; then the weights."""
    folder = make_models(tmp_path)
    config = settings(
        folder,
        {"model.dtype": "float32", "model.kernels": "fused", "train.tokens_per_microbatch": 40, "train.lr": 2e-3},
    )
    found = []
    for is_exact in (True, False):
        policy = make_policy(config, str(folder / "policy"), torch.float32, "cpu")
        policy.exact = ExactPass(policy, max_tokens=24, page_tokens=PAGE) if is_exact else None
        learner = make_learner(config, policy, str(folder / "policy"), None, torch.float32, "cpu", ALONE)
        start = our_weights(learner)
        done = train_ours(learner, config, [(number, groups_of(number, 4, 4)) for number in STEPS])
        found.append((done, our_weights(learner)))
    (ours, weights), (theirs, expected) = found
    assert weight_gaps(start, weights, expected)["policy weights"] < 1e-4
    for one, other in zip(ours, theirs, strict=True):
        assert other.metrics["clip/high"] > 0.01
        for name, value in other.metrics.items():
            if not name.startswith("timing."):
                assert one.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        for gradient, wanted in zip(one.policy_gradients, other.policy_gradients, strict=True):
            for name in wanted:
                assert apart(gradient[name], wanted[name]) < 1e-4, name


def test_a_policy_in_training_keeps_no_more_than_each_layers_input():
    from dapo.learner.activations import checkpoint_layers

    policy = exact_policy("qwen2")
    assert checkpoint_layers(policy) == 0, "the exact pass makes its layers again by itself"


def test_a_device_without_these_kernels_is_refused_when_the_run_starts(monkeypatch: pytest.MonkeyPatch):
    config = load_recipe("quickstart", ["rollout.exact=true"]).config
    refuse_inexact(config, "cpu", torch.float32)  # the interpreter, as in these tests
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refuse_inexact(config, "cuda", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"rollout.exact = true: is for CUDA in 16 bits.* float32 on cpu"):
        refuse_inexact(config, "cpu", torch.float32)
    with pytest.raises(ConfigError, match=r"float32 on cuda") as refused:
        refuse_inexact(config, "cuda", torch.float32)
    assert 'model.dtype = "auto"' in str(refused.value)
    refuse_inexact(load_recipe("quickstart", []).config, "cpu", torch.float32)


def test_a_feed_forward_of_another_kind_is_refused():
    policy = copy.deepcopy(tiny_policy("llama", torch.float16))
    for layer in policy.backbone.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    with pytest.raises(EngineError, match=r"rollout.exact = true: .*silu"):
        ExactPass(policy, max_tokens=MAX_TOKENS)
