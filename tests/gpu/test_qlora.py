"""QLoRA on a GPU: one step of 8 x 8 responses of 1,024 tokens within the memory of a small card.

PYTHONPATH=src python -m pytest -s -m gpu tests/gpu/test_qlora.py
"""

import gc
import time
from itertools import cycle

import pytest
import torch

from dapo.config import load_recipe
from dapo.config.machine import CONTEXT_BYTES, GIB
from dapo.config.model_shapes import BENCH_SHAPES, ModelShape
from dapo.learner.batch import make_batch
from dapo.learner.learner import Learner, make_optimizer
from dapo.learner.update import update_policy
from dapo.models.fused_layers import fuse_layers
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.policy import Policy, add_lora
from dapo.models.quantized import Kind, level_pairs, plain_dequantize, quantize, quantize_linears
from dapo.models.random_model import random_model
from dapo.rollout.engine import Finished, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.noise import NoiseKey
from dapo.types import Group, Judgement, Problem, Verdict
from tiny_models import tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS, RESPONSES, PROMPT_TOKENS = 8, 8, 128
KINDS: tuple[Kind, ...] = ("int8", "nf4")


def qlora_policy(shape: ModelShape, kind: Kind, device: str, dtype: torch.dtype) -> Policy:
    """Random weights: what they take does not depend on what they say."""
    policy = Policy(random_model(shape, dtype=dtype, device=device, attention=PACKED_ATTENTION), tiny_tokenizer())
    quantize_linears(policy.base, policy.head, kind, device)
    fuse_layers(policy.eval().backbone)
    return add_lora(policy, rank=32, alpha=64.0)


def sampled(engine: LocalEngine, n_tokens: int) -> list[Finished]:
    engine.submit(
        [
            Request(
                i,
                tuple(range(3 + i // RESPONSES, 3 + i // RESPONSES + PROMPT_TOKENS)),
                NoiseKey(0, "train", str(i // RESPONSES), 0, i % RESPONSES),
                n_tokens,
                group=i // RESPONSES,
            )
            for i in range(PROMPTS * RESPONSES)
        ]
    )
    done: list[Finished] = []
    while engine.n_in_flight or engine.n_waiting:
        done += engine.advance()
    return sorted(done, key=lambda item: item[0].id)


def grouped(done: list[Finished]) -> list[Group]:
    verdicts = cycle((Judgement(Verdict.WRONG, -1.0), Judgement(Verdict.CORRECT, 1.0)))
    judgements = [next(verdicts) for _ in done]
    return [
        Group(
            Problem(str(at), "", ""),
            0,
            done[at][0].prompt,
            tuple(completion for _, completion in done[at : at + RESPONSES]),
            tuple(judgements[at : at + RESPONSES]),
        )
        for at in range(0, len(done), RESPONSES)
    ]


def one_step(policy: Policy, recipe: str, n_tokens: int, kv_gib: float | None) -> dict[str, float]:
    """Sample, then train on it, with the recipe's sizes; returns the step's metrics and seconds."""
    config = load_recipe(
        recipe,
        [
            f"sampling.prompts_per_step={PROMPTS}", f"sampling.responses_per_prompt={RESPONSES}",
            f"limits.max_response_tokens={n_tokens}", f"limits.max_prompt_tokens={PROMPT_TOKENS}",
            "shaping.overlong_filter=false", "shaping.overlong_penalty=0.0",
            "train.updates_per_step=1", "train.gradient_checkpointing=auto", "train.warmup_steps=0",
        ],
    ).config  # fmt: skip
    learner = Learner(policy, make_optimizer(policy, config.train, has_16bit_weights=policy.dtype.itemsize < 4))
    engine = LocalEngine(  # its KV cache stays while the policy is trained
        policy,
        sampling=SamplingParams(),
        max_concurrent=PROMPTS * RESPONSES,
        max_tokens=PROMPT_TOKENS + n_tokens,
        kv_gib=kv_gib,
    )
    began = time.perf_counter()
    groups = grouped(sampled(engine, n_tokens))
    rolled = time.perf_counter()
    metrics = update_policy(learner, make_batch(groups, config, policy.dtype), config, step=1)
    return metrics | {"rollout_s": rolled - began, "update_s": time.perf_counter() - rolled}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "gib", "recipe", "kv_gib"),
    [("1.5b", 8, "gsm8k-1.5b-qlora-8gb", 1.5), ("7b", 24, "math-7b-qlora-24gb", 4.0)],
)
def test_a_step_fits_a_small_card(size: str, gib: int, recipe: str, kv_gib: float, kind: Kind):
    pytest.importorskip("peft")
    gc.collect()  # graphs and caches of the tests before
    torch.cuda.empty_cache()
    policy = qlora_policy(BENCH_SHAPES[size], kind, "cuda", torch.bfloat16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    for_tensors = gib * GIB - CONTEXT_BYTES  # CUDA itself takes the rest
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, for_tensors / total))
        metrics = one_step(policy, recipe, 1024, kv_gib)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    peak = torch.cuda.max_memory_reserved()
    print(
        f"\n{size} in {kind}: peak {peak / GIB:.1f} of {for_tensors / GIB:.1f} GiB, "
        f"rollout {metrics['rollout_s']:.1f} s, "
        f"update {metrics['update_s']:.1f} s, engine against trainer {metrics['engine/gap_mean']:.2g} nats"
    )
    assert peak <= for_tensors
    assert metrics["updates"] == 1
    assert metrics["policy/skipped_updates"] == 0
    assert metrics["engine/gap_mean"] < 0.1  # random weights in bf16 round to 0.02 (1.5B) and 0.05 (7B)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_makes_the_matrix_of_the_plain_version_and_is_faster(kind: Kind):
    from dapo.models.kernels import quantized as kernel

    weight = torch.randn(18944, 3584, device="cuda", dtype=torch.bfloat16)
    codes, scales = quantize(weight, kind)

    def by_kernel() -> torch.Tensor:
        return kernel.dequantize(codes, scales, weight.shape, weight.dtype, level_pairs(codes.device))

    def plain() -> torch.Tensor:
        return plain_dequantize(codes, scales, weight.shape, weight.dtype)

    assert torch.equal(by_kernel(), plain())
    seconds = {}
    for way in (by_kernel, plain):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            way()
        torch.cuda.synchronize()
        seconds[way] = time.perf_counter() - start
    print(
        f"\n{kind}: {1e3 * seconds[by_kernel] / 10:.2f} ms, plain {1e3 * seconds[plain] / 10:.2f} ms per 68 M weights"
    )
    assert seconds[by_kernel] < seconds[plain]
