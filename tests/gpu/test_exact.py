"""On CUDA in 16 bits: with `rollout.exact` engine and trainer give the same log-probs to the last bit."""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM

from dapo.config.model_shapes import BENCH_SHAPES
from dapo.learner.optimizer import Optimizer
from dapo.models.fused_layers import fuse_layers
from dapo.models.kernels.exact_linear import TILES, exact_linear
from dapo.models.load import load_policy
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.packing import Packed, pack
from dapo.models.policy import Policy
from dapo.models.random_model import random_model
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.exact import ExactPass, rows_of
from dapo.rollout.local.ops import TritonOps
from dapo.rollout.local.rows import DeviceRows
from dapo.types import Completion
from tiny_models import tiny_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REAL_MODEL = os.environ.get("DAPO_REAL_MODEL", "")
ROWS = (1, 7, 64, 65, 128, 700, 5000)
TEMPERATURE = 0.9


def matrices(name: str) -> list[tuple[str, int, int, bool]]:
    """(name, N, K, bias) of every product of a model."""
    shape = BENCH_SHAPES[name]
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    return [
        (f"{name} qkv", heads, shape.hidden, shape.has_qkv_bias),
        (f"{name} out", shape.hidden, shape.heads * shape.head_size, False),
        (f"{name} gate and up", 2 * shape.feed_forward, shape.hidden, False),
        (f"{name} down", shape.hidden, shape.feed_forward, False),
        (f"{name} head", shape.vocabulary, shape.hidden, False),
    ]


@pytest.mark.parametrize("matrix", [*matrices("0.5b"), *matrices("1.5b"), ("odd", 100, 90, True)], ids=lambda m: m[0])
def test_a_row_has_the_same_bits_for_every_number_of_rows_and_every_tile(matrix: tuple[str, int, int, bool]):
    name, N, K, has_bias = matrix
    dtype = torch.float32 if name.endswith("head") else torch.bfloat16
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in ((ROWS[-1], K), (N, K), (N,))
    )
    weight *= K**-0.5
    added = bias if has_bias else None
    whole = exact_linear(x, weight, added, dtype=dtype)
    close = torch.nn.functional.linear(x[:700].float(), weight.float(), None if added is None else added.float())
    assert_close(whole[:700].float(), close, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    unequal = []
    for n in ROWS:
        first = (ROWS[-1] - n) // 2  # from the middle: another place in its tile
        for tile in (None, *TILES):
            out = exact_linear(x[first : first + n], weight, added, dtype=dtype, tile=tile)
            if not torch.equal(out, whole[first : first + n]):
                unequal.append((n, tile, (out != whole[first : first + n]).float().mean().item()))
    assert not unequal, f"{len(unequal)} of {len(ROWS) * (len(TILES) + 1)}: {unequal[:4]}"


@pytest.mark.parametrize("has_norms", [False, True])
def test_every_other_operation_gives_a_row_the_same_bits_in_any_company(has_norms: bool):
    """Norm, gate, attention and log-probs of 700 rows, and of 1, 64 and 65 of them: where a difference comes from."""
    torch.manual_seed(0)
    policy = tiny_policy("qwen3", torch.bfloat16, hidden_size=896, head_dim=64, num_attention_heads=14,
                         num_key_value_heads=2, intermediate_size=512, vocab_size=151_936).cuda()  # fmt: skip
    exact = ExactPass(policy, max_tokens=1024)
    heads, n, page = 14 + 2 * 2, 700, exact.page_tokens
    cache = PagedCache(
        n_layers=1, n_pages=n * 4, page_tokens=page, n_heads=2, head_dim=64, dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )  # fmt: skip
    cache.data.normal_()
    ops = TritonOps(cache, exact.cos, exact.sin, exact.scaling, 14, n_rows=n, n_tokens=151_936, is_exact=True)
    length = torch.randint(1, 4 * page + 1, (n,), device="cuda")
    table = torch.randperm(n * 4, device="cuda").view(n, 4)
    x, y, qkv, gate_up = (torch.randn(n, width, device="cuda").bfloat16() for width in (896, 896, heads * 64, 9728))
    logits, token = 3 * torch.randn(n, 151_936, device="cuda"), torch.randint(0, 151_936, (n,), device="cuda")
    weight, norm = torch.randn(896, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()
    norms = (norm, norm) if has_norms else None

    def results(of: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = rows_of(length[of], table[of])
        return {
            "norm": ops.add_norm(x[of], y[of], weight, 1e-6),
            "gate": ops.gate(gate_up[of]),
            "attention": ops.mix(qkv[of], 0, norms, 1e-6, None, rows, 0),
            "window": ops.mix(qkv[of], 0, norms, 1e-6, 50, rows, 0),
            "log-probs": exact.scores(logits[of], token[of], TEMPERATURE)[0],
        }

    whole = results(torch.arange(n, device="cuda"))
    for k in (1, 64, 65):
        of = torch.randperm(n, device="cuda")[:k]
        differ = [name for name, result in results(of).items() if not torch.equal(result, whole[name][of])]
        assert not differ, f"{k} rows"
    rows = DeviceRows(n + 4, 4, 1, torch.float32, torch.device("cuda"))
    ops.draw(
        logits, SamplingParams(temperature=TEMPERATURE), torch.zeros(151_936, dtype=torch.bool, device="cuda"), rows
    )
    drawn = exact.scores(logits, rows.out_token[0, :n], TEMPERATURE)[0]
    assert torch.equal(rows.out_logp[0, :n], drawn), "the engine's and the trainer's, of one token"


def requests(n: int, *, per_prompt: int, vocabulary: int, prompt: int, longest: int, seed: int = 0) -> list[Request]:
    """Responses of 1 to `longest` tokens, prompts of 1 to `prompt`."""
    generator = np.random.default_rng(seed)
    prompts = [
        tuple(generator.integers(3, vocabulary, generator.integers(1, prompt + 1)).tolist())
        for _ in range(-(-n // per_prompt))
    ]
    lengths = np.exp(generator.uniform(0, np.log(longest), n)).astype(int)
    lengths[:2] = 1, longest
    return [
        Request(
            i,
            prompts[i // per_prompt],
            NoiseKey(seed, "train", str(i // per_prompt), 0, i),
            int(length),
            i // per_prompt,
        )
        for i, length in enumerate(lengths)
    ]


def generated(engine: LocalEngine, wanted: Sequence[Request], *, snapshots_at: Sequence[int] = ()) -> dict:
    engine.submit(wanted)
    finished: list[Finished] = []
    while engine.n_in_flight or engine.n_waiting:
        finished += engine.advance()
        if engine.tick in snapshots_at:  # all keys and values are computed again
            engine.snapshot()
    return {request.id: completion for request, completion in finished}


def differing(policy: Policy, wanted: Sequence[Request], done: dict[int, Completion], budget: int) -> tuple[int, int]:
    """(tokens whose log-probs are not the same bits, all tokens) in micro-batches of so many tokens."""
    batches: list[list[Request]] = [[]]
    for one in wanted:
        if batches[-1] and sum(len(r.prompt) + r.max_new_tokens for r in (*batches[-1], one)) > budget:
            batches.append([])
        batches[-1].append(one)
    n_different = n_tokens = 0
    for rows in batches:
        packed = pack([r.prompt for r in rows], [done[r.id].tokens for r in rows], "cuda")
        with torch.no_grad():
            logp = policy(packed, temperature=TEMPERATURE)[0].cpu().numpy()
        sampled = np.concatenate([done[r.id].logp for r in rows])
        n_different += int((logp != sampled).sum())
        n_tokens += len(logp)
    return n_different, n_tokens


def with_exact(policy: Policy, max_tokens: int, **settings: object) -> LocalEngine:
    policy.eos_ids = ()
    policy.exact = ExactPass(policy, max_tokens=max_tokens)
    return LocalEngine(
        policy, sampling=SamplingParams(temperature=TEMPERATURE), max_tokens=max_tokens, is_exact=True, **settings
    )


@pytest.fixture(scope="module")
def half_billion() -> Policy:
    policy = Policy(
        random_model(BENCH_SHAPES["0.5b"], dtype=torch.bfloat16, device="cuda", attention=PACKED_ATTENTION), None
    ).eval()
    fuse_layers(policy.backbone)
    with torch.no_grad():  # from nearly even to very uneven distributions
        policy.backbone.norm.weight.uniform_(0.5, 8.0)
        for name, parameter in policy.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return policy


def test_log_probs_of_a_realistic_model_are_the_same_bits(half_billion: Policy):
    """700 rows, up to 1,500 tokens, at least 100,000; twice recomputed on the way; three ways to pack them."""
    policy = half_billion
    engine = with_exact(policy, 1800, max_concurrent=700)
    wanted = requests(700, per_prompt=8, vocabulary=40_000, prompt=290, longest=1500)
    done = generated(engine, wanted, snapshots_at=(10, 60))
    order = np.random.default_rng(1).permutation(len(wanted))
    found = {
        "in order": differing(policy, wanted, done, 16_384),
        "shuffled": differing(policy, [wanted[i] for i in order], done, 5_000),
        "alone": differing(policy, wanted[:40], done, 1),
    }
    print(found)
    assert found["in order"][1] > 100_000
    assert all(n == 0 for n, _ in found.values()), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_also_with_norms_of_heads_with_drafts_and_where_pages_run_out(dtype: torch.dtype):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=5003, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
        initializer_range=0.04, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION).to("cuda", dtype)
    policy = Policy(model, None).eval()
    fuse_layers(policy.backbone)
    engine = with_exact(policy, 700, max_concurrent=40, kv_tokens=6_000, drafting=Drafting(tokens=4, below_rows=8))
    wanted = requests(60, per_prompt=6, vocabulary=40, prompt=100, longest=500, seed=2)
    done = generated(engine, wanted)
    drafted, accepted = engine.take_drafted()
    print(f"drafted {drafted}, accepted {accepted}")
    assert drafted > 20
    assert differing(policy, wanted, done, 8_192)[0] == 0
    assert differing(policy, wanted[::-1], done, 700)[0] == 0


@pytest.mark.parametrize("family", ["qwen2-window", "mistral-window", "llama-bias"])
def test_also_with_windows_and_widths_that_fill_no_tile(family: str):
    policy = tiny_policy(family, torch.bfloat16).cuda()
    engine = with_exact(policy, 250, max_concurrent=20)
    wanted = requests(20, per_prompt=4, vocabulary=40, prompt=70, longest=150)
    done = generated(engine, wanted)
    assert differing(policy, wanted, done, 1_000)[0] == 0


def gradients_with_and_without(policy: Policy, batches: Sequence[tuple[Packed, torch.Tensor]]) -> list[dict]:
    """Of all weights, as an update has them: in float32 masters, over several micro-batches."""
    exact = ExactPass(policy, max_tokens=1800)
    optimizer = Optimizer(policy.named_parameters(), betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    found = []
    for policy.exact in (exact, None):
        optimizer.zero_grad()
        for packed, weight in batches:
            logp, _ = policy(packed, temperature=TEMPERATURE)
            (logp * weight).mean().backward()
        found.append({name: master.grad.clone() for name, master in optimizer.masters.items()})
    return found


def assert_alike(ours: dict, theirs: dict) -> None:
    """Every matrix for itself: a small one that is wrong would hide among the others.

    Vectors, whose gradients may be small beside rounding, are only asked for about their size. With real weights of
    this size a matrix of the ordinary path has a cosine to float32 of 0.989 at least (on a CPU, bfloat16).
    """
    cosines = {
        name: float(torch.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0))
        for name, gradient in theirs.items()
        if gradient.dim() == 2
    }
    ratios = {name: float(ours[name].norm() / gradient.norm()) for name, gradient in theirs.items()}
    worst = min(cosines, key=cosines.__getitem__)
    print(
        f"least cosine {cosines[worst]:.6f}, {worst}; ratios {min(ratios.values()):.4f} to {max(ratios.values()):.4f}"
    )
    assert cosines[worst] > 0.97, worst
    assert all(abs(ratios[name] - 1) < 0.1 for name in cosines)
    assert all(abs(ratio - 1) < 0.3 for ratio in ratios.values())


def test_gradients_are_those_of_the_ordinary_path_within_rounding(half_billion: Policy):
    generator = np.random.default_rng(0)
    batches = []
    for seed in (0, 1):
        prompts = [generator.integers(3, 40_000, 90).tolist()] * 4 + [generator.integers(3, 40_000, 30).tolist()]
        packed = pack(prompts, [generator.integers(3, 40_000, n) for n in (300, 1, 200, 64, 700)], "cuda")
        assert packed.shared is not None
        batches.append((packed, torch.randn(packed.n_targets, generator=torch.Generator().manual_seed(seed)).cuda()))
    assert_alike(*gradients_with_and_without(half_billion, batches))


@pytest.mark.skipif(not REAL_MODEL, reason="DAPO_REAL_MODEL names no folder")
def test_also_with_real_weights_and_their_own_responses():
    """What random weights lack: large numbers in a first token's states, and advantages of either sign."""
    policy = load_policy(REAL_MODEL, dtype=torch.bfloat16, device="cuda")
    texts = [
        f"A box has {n} rows of {n + 3} pens. Tom takes {2 * n}. How many are left? Let us think." for n in range(3, 11)
    ]
    prompts = [tuple(policy.tokenizer(text)["input_ids"]) for text in texts]
    engine = with_exact(policy, 600, max_concurrent=64)
    wanted = [
        Request(i, prompts[i // 8], NoiseKey(0, "train", str(i // 8), 0, i), 300, i // 8)
        for i in range(8 * len(prompts))
    ]
    done = generated(engine, wanted)
    advantage, batches = torch.Generator().manual_seed(0), []
    for first in range(0, len(wanted), 16):
        rows = wanted[first : first + 16]
        packed = pack([r.prompt for r in rows], [done[r.id].tokens for r in rows], "cuda")
        of_row = torch.randn(len(rows), generator=advantage)
        batches.append((packed, torch.repeat_interleave(of_row, torch.tensor(packed.lengths)).cuda()))
    assert_alike(*gradients_with_and_without(policy, batches))
