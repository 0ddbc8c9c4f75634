"""`rollout.quantization = "fp8"`: products of a rollout in FP8."""

import copy

import numpy as np
import pytest
import torch
from test_local_engine import drain, request
from torch import Tensor, nn
from transformers import DynamicCache

from dapo.config import load_recipe
from dapo.config.advice import warnings_of
from dapo.config.model_shapes import BENCH_SHAPES
from dapo.errors import ConfigError
from dapo.learner import precision
from dapo.models.policy import Policy, add_lora
from dapo.models.triton_support import has_triton
from dapo.planning.plan import memory_of
from dapo.rollout.engine import SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.float8 import Float8, fits, float8_bytes, float8_rows, from_float8
from dapo.rollout.make import refuse_float8
from tiny_models import families, tiny_policy

MAX_TOKENS = 48


def rounded(x: Tensor) -> Tensor:
    """Each row's largest number is 448; four bits of exponent, three of mantissa."""
    unit = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (x / unit).to(torch.float8_e4m3fn).to(x.dtype) * unit


def float8_engine(policy: Policy, **more: object) -> LocalEngine:
    sizes = {"max_concurrent": 4, "max_tokens": MAX_TOKENS, "page_tokens": 4, "tokens_per_tick": 2}
    return LocalEngine(policy, sampling=SamplingParams(), is_float8=True, **{**sizes, **more})


def log_probs_of_rounded_products(policy: Policy, prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
    """By Hugging Face: a prompt as it is, then every product of a layer with rows and weights rounded."""
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    before, rest = [list(prompt[:-1])], [[prompt[-1], *tokens[:-1]]]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        if before[0]:
            model(torch.tensor(before), past_key_values=cache)
        for layer in model.model.layers:
            for linear in (part for part in layer.modules() if isinstance(part, nn.Linear)):
                linear.weight.copy_(rounded(linear.weight))
                linear.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        logits = model(torch.tensor(rest), past_key_values=cache).logits[0]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


@pytest.mark.parametrize("family", families(("llama-bias", "qwen3-tied")))
def test_log_probs_are_those_of_a_model_whose_products_are_rounded(family: str):
    policy = tiny_policy(family, torch.float32)
    wanted = [request(i, i % 2, n_prompt=1 + 5 * (i % 2), max_new_tokens=7) for i in range(4)]
    engine, ordinary = float8_engine(policy), float8_engine(policy)
    ordinary = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=4, max_tokens=MAX_TOKENS)
    for one in (engine, ordinary):
        one.submit(wanted)
    done, others = drain(engine), drain(ordinary)
    gaps = []
    for one in wanted:
        reference = log_probs_of_rounded_products(policy, one.prompt, done[one.id].tokens.tolist()).numpy()
        np.testing.assert_allclose(done[one.id].logp, reference, atol=2e-4)
        n = min(len(done[one.id].tokens), len(others[one.id].tokens))
        gaps.append(np.abs(done[one.id].logp[:n] - others[one.id].logp[:n]).max())
    assert max(gaps) > 1e-3, "and not those of the model itself"


def test_a_row_is_off_by_a_sixteenth_of_each_number_and_an_outlier_costs_its_own_row_alone():
    x = torch.randn(4, 64)
    x[1, 3], x[2] = 1e6, 0
    near = from_float8(*float8_rows(x))
    smallest = x.abs().amax(1, keepdim=True) / 448 * 2**-10  # half of a subnormal step
    assert ((near - x).abs() <= x.abs() / 16 + smallest + 1e-30).all()
    assert (near[2] == 0).all()
    assert near[1].count_nonzero() < 40, "beside its outlier a row keeps little"
    assert torch.equal(near[0], from_float8(*float8_rows(x[:1]))[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_made_so(bad: float):
    x = torch.randn(3, 16)
    x[1, 5] = bad
    y = Float8(torch.randn(32, 16))(x)
    assert y[[0, 2]].isfinite().all()
    assert y[1].isnan().all()


@pytest.mark.skipif(not has_triton() or torch.cuda.is_available(), reason="Triton's interpreter; a card: tests/gpu")
def test_the_kernel_scales_rows_as_plain_torch_does():
    """Numbers that need no rounding, which is the card's: the interpreter's own loses a carry."""
    from dapo.rollout.local.kernels import float8_kernel

    grid = torch.randint(0, 127, (5, 400), dtype=torch.uint8).view(torch.float8_e4m3fn)
    grid[:, 7] = 448.0
    grid[:, ::3] = -grid[:, ::3].float()
    x = (grid.float() * 2.0 ** torch.arange(-4, 6, 2)[:, None])[:, :200]  # rows do not follow one another
    x[3] = 0
    codes, scales = torch.empty(5, 200, dtype=torch.float8_e4m3fn), torch.empty(5)
    float8_kernel[(5,)](x, codes, scales, x.stride(0), 1e-12, WIDTH=200, BLOCK=64)
    wanted, wanted_scales = float8_rows(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(codes.float(), wanted.float())
    x[1, 199] = float("inf")
    float8_kernel[(5,)](x, codes, scales, x.stride(0), 1e-12, WIDTH=200, BLOCK=64)
    assert scales.isnan().tolist() == [False, True, False, False, False]


def test_new_weights_reach_the_rounded_ones_where_they_are():
    policy = tiny_policy("qwen3", torch.float32)
    engine = float8_engine(policy)
    part = engine._decoder.weights[1].gate_up
    assert isinstance(part, Float8)
    place, before = part.codes.data_ptr(), part.codes.clone()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-1.5)
    engine.load_weights(policy, 1)
    assert part.codes.data_ptr() == place
    assert torch.equal(part.codes.float(), -before.float())
    wanted = [request(0, 0, n_prompt=3, max_new_tokens=5)]
    engine.submit(wanted)
    (done,) = drain(engine).values()
    np.testing.assert_allclose(
        done.logp, log_probs_of_rounded_products(policy, wanted[0].prompt, done.tokens.tolist()).numpy(), atol=2e-4
    )


def test_the_matrices_under_an_adapter_are_rounded_and_the_adapter_is_not():
    policy = tiny_policy("qwen3", torch.float32)
    policy = add_lora(policy, rank=2, alpha=4.0, target_modules=["q_proj"])
    weights = float8_engine(policy)._decoder.weights[0]
    assert isinstance(weights.qkv.base, Float8)  # type: ignore[attr-defined]
    assert weights.qkv.a.dtype == torch.float32  # type: ignore[attr-defined]
    assert isinstance(weights.out, Float8)


def test_a_gpu_without_such_products_is_refused_when_the_run_starts(monkeypatch: pytest.MonkeyPatch):
    config = load_recipe("quickstart", ["rollout.quantization=fp8"]).config
    refuse_float8(config, "cpu", torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    refuse_float8(config, "cuda", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"quantization = fp8: is for bfloat16.* float16 on one of 8.9"):
        refuse_float8(config, "cuda", torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ConfigError, match=r"in bfloat16 on one of 8.6"):
        refuse_float8(config, "cuda", torch.bfloat16)
    refuse_float8(load_recipe("quickstart", []).config, "cuda", torch.float16)


def test_it_goes_with_a_correction_and_not_with_equal_log_probs():
    fp8 = "rollout.quantization=fp8"
    (warning,) = warnings_of(load_recipe("quickstart", [fp8]).config)
    assert "algorithm.correction.cap = 2.0" in warning
    assert not warnings_of(load_recipe("quickstart", [fp8, "algorithm.correction.cap=2.0"]).config)
    assert not warnings_of(load_recipe("quickstart", [fp8, "algorithm.old_logp=bypass"]).config)
    with pytest.raises(ConfigError, match=r"rollout.quantization = fp8: model.lora.quantization = int8"):
        load_recipe("quickstart", [fp8, "model.lora.rank=8", "model.lora.quantization=int8"])
    with pytest.raises(ConfigError, match=r"quantization = fp8: the trainer multiplies in more bits"):
        load_recipe("quickstart", [fp8, "rollout.exact=true"])
    with pytest.raises(ConfigError, match=r"rollout.quantization"):
        load_recipe("quickstart", [fp8, "rollout.engine=plain"])


def test_the_second_copy_counts_as_memory():
    shape = BENCH_SHAPES["7b"]
    plain, fp8 = (
        memory_of(load_recipe("quickstart", keys).config, shape, is_cuda=True, gpus=1)
        for keys in ([], ["rollout.quantization=fp8"])
    )
    second = fp8.parts["engine's second copy of the layers, FP8"]
    assert fp8.fixed - plain.fixed == second == shape.linear_parameters
    policy = tiny_policy("qwen3", torch.float32)
    engine = float8_engine(policy)
    kept = [one for layer in engine._decoder.weights for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert float8_bytes(policy) == sum(one.codes.numel() for one in kept)  # type: ignore[union-attr]


def test_a_matrix_with_a_side_of_another_size_stays_as_it_is():
    assert [fits(torch.zeros(shape)) for shape in ((32, 16), (32, 24), (24, 32))] == [True, False, False]


def test_the_types_are_measured_without_it(monkeypatch: pytest.MonkeyPatch):
    given = []
    monkeypatch.setattr(precision, "make_engine", lambda config, *_: given.append(config.rollout.quantization) or 1 / 0)
    config = load_recipe("quickstart", ["rollout.quantization=fp8", "rollout.max_concurrent_sequences=3"]).config
    with pytest.raises(ZeroDivisionError):
        precision.measure_precision(config, torch.float32, "cpu")
    assert given == ["none"]
    assert config.rollout.quantization == "fp8"
