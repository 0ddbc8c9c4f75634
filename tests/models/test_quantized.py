"""int8 and NF4: the nearest code for every weight, and the same numbers for whoever reads a matrix."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dapo.models import quantized
from dapo.models.load import load_policy, save_policy
from dapo.models.packing import pack
from dapo.models.policy import Policy, WithoutAdapter, add_lora
from dapo.models.quantized import (
    BINS,
    BLOCK,
    LEVELS,
    Kind,
    QuantizedLinear,
    bins,
    dequantize,
    fitted_scales,
    level_pairs,
    nearest_levels,
    nf4_codes,
    plain_dequantize,
    quantize,
    squared_error,
)
from dapo.models.triton_support import has_triton, is_interpreted
from tiny_models import families, tiny_policy

KINDS: tuple[Kind, ...] = ("int8", "nf4")
PACKED = pack([[3, 4, 5], [3, 4, 5], [6, 7]], [[8, 9, 2], [10, 11], [12, 2]], "cpu")


def border(n: int) -> tuple[int, ...]:
    return n - 1, n, n + 1, 2 * n + 1


def test_the_levels_are_quantiles_of_a_normal_distribution():
    """Appendix E: 8 quantiles above 0 and 7 below it, evenly spaced in probability, and 0; the largest becomes 1."""
    delta = (1 / 32 + 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(0.5, 1 - delta, 9, dtype=torch.float64))[1:]
    below = -torch.special.ndtri(torch.linspace(0.5, 1 - delta, 8, dtype=torch.float64))[1:]
    expected = torch.cat([below.flip(0), torch.zeros(1, dtype=torch.float64), above]) / above[-1]
    assert_close(torch.tensor(LEVELS, dtype=torch.float64), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "n"), [(kind, n) for kind in KINDS for n in (1, *border(BLOCK[kind]))])
def test_border_every_weight_becomes_the_nearest_its_block_can_hold(n: int, kind: Kind):
    weight = torch.randn(n, generator=torch.Generator().manual_seed(n))
    weight[0] = 0
    codes, scales = quantize(weight, kind)
    got = dequantize(codes, scales, weight.shape, torch.float32)
    for block, found, scale in zip(weight.split(BLOCK[kind]), got.split(BLOCK[kind]), scales.float(), strict=True):
        allowed = scale * torch.tensor(LEVELS) if kind == "nf4" else block.abs().max() * torch.arange(-127, 128) / 127
        nearest = allowed[(block[:, None] - allowed).abs().argmin(1)]
        assert_close(found, nearest, atol=0, rtol=0 if kind == "nf4" else 3e-7)  # int8: the scale is rounded


@pytest.mark.parametrize(
    ("kind", "bits", "values"),
    [("int8", 8.5, torch.tensor([127, -127, 126, -1, 0, 1, 64, -63]) / 128), ("nf4", 4.5, torch.tensor(LEVELS))],
)
def test_what_a_block_can_hold_is_kept_exactly_and_zeros_stay_zero(kind: Kind, bits: float, values: Tensor):
    weight = values.repeat(3, 128 // len(values)) * 0.75
    codes, scales = quantize(weight, kind)
    assert codes.nbytes + scales.nbytes == weight.numel() * bits / 8
    assert torch.equal(dequantize(codes, scales, weight.shape, torch.float32), weight)
    zeros = torch.zeros(3, 50)
    assert torch.equal(dequantize(*quantize(zeros, kind), zeros.shape, torch.float64), zeros.double())


def test_in_eight_bits_no_weight_moves_by_more_than_half_a_scale():
    weight = torch.randn(7, 100) * torch.logspace(-20, 5, 700).view(7, 100)
    codes, scales = quantize(weight, "int8")
    moved = (dequantize(codes, scales, weight.shape, torch.float32) - weight).abs().flatten()
    assert (moved <= scales.repeat_interleave(BLOCK["int8"])[:700] * 0.50001).all()
    assert codes.abs().max() == 127


def test_a_scale_never_has_a_larger_squared_error_than_the_largest_magnitude_and_mostly_a_smaller_one():
    weight = torch.distributions.StudentT(4.0).sample((2000, 32)).bfloat16().float()
    fitted = squared_error(weight, fitted_scales(weight))
    plain = squared_error(weight, weight.abs().amax(1))
    assert (fitted <= plain).all()
    assert (fitted < plain).float().mean() > 0.85
    held = dequantize(*quantize(weight, "nf4"), weight.shape, torch.float32)
    assert_close((held - weight).square().sum(1), fitted)


def test_a_scale_is_close_to_the_best_there_is():
    """Of 100 scales on either side of 0, from half the largest magnitude to 1.5 times."""
    weight = torch.randn(300, 32)
    tried = torch.cat([side * torch.linspace(0.5, 1.5, 100) for side in (1, -1)])
    largest = weight.abs().amax(1)
    least = torch.stack([squared_error(weight, part * largest) for part in tried]).amin(0)
    fitted, plain = (squared_error(weight, s).sum() for s in (fitted_scales(weight), largest))
    assert least.sum() < fitted < least.sum() + 0.15 * (plain - least.sum())


def test_a_scale_below_zero_turns_the_levels_around():
    weight = -0.75 * torch.tensor(LEVELS).repeat(2)
    codes, scales = quantize(weight, "nf4")
    assert scales.tolist() == [-0.75]
    assert torch.equal(dequantize(codes, scales, weight.shape, torch.float32), weight)
    assert 0.3 < (fitted_scales(torch.randn(1000, 32)) < 0).float().mean() < 0.7


def test_what_is_very_small_or_very_large_gets_the_scale_of_its_largest_magnitude():
    """Where squares leave float32. Below 1e-38 a weight may become 0."""
    weight = torch.randn(7, 32) * torch.tensor([1e-43, 1e-38, 1e-30, 1e-24, 1e20, 1e30, 1e36])[:, None]
    codes, scales = quantize(weight, "nf4")
    got = dequantize(codes, scales, weight.shape, torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    assert ((got - weight).abs()[1:] <= 0.16 * largest[1:]).all()  # half of the widest gap between levels
    assert (got[0].abs() <= 2 * largest[0]).all()


@pytest.mark.parametrize("n", border(4))
def test_border_blocks_are_fitted_one_by_one(n: int, monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(n, 32)
    whole = quantize(weight, "nf4")
    monkeypatch.setitem(quantized.CHUNK, "cpu", 4)
    for found, expected in zip(quantize(weight, "nf4"), whole, strict=True):
        assert torch.equal(found, expected)
    alone = [quantize(row, "nf4") for row in weight]
    assert torch.equal(torch.cat([scales for _, scales in alone]), whole[1])


def test_border_the_nearest_level_is_the_lower_one_up_to_the_midpoint():
    levels = torch.tensor(LEVELS)
    middle = (levels[1:] + levels[:-1]) / 2
    edges = torch.arange(-BINS, BINS + 1) / BINS
    near = torch.cat([middle, edges, levels, torch.tensor([-9.0, 0.0, 9.0])])
    near = torch.cat([near, near.nextafter(torch.tensor(9.0)), near.nextafter(torch.tensor(-9.0))])
    found = nearest_levels(near[None], torch.ones(1))
    assert torch.equal(found, torch.bucketize(near[None], middle, out_int32=True))
    assert bins(near.device)[1].isfinite().sum() == len(middle), "two midpoints in one bin"


def test_with_the_largest_magnitude_as_scale_the_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 128)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    blocks = weight.view(-1, 64)
    own = nf4_codes(blocks, blocks.abs().amax(1))
    assert torch.equal(own, codes.flatten())
    held = dequantize(own, state.absmax, weight.shape, torch.float32)
    assert torch.equal(held, functional.dequantize_4bit(codes, state))


@pytest.mark.skipif(not (has_triton() and is_interpreted()), reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (16, 128), (7, 1000)])
def test_the_kernel_makes_the_same_matrix(shape: tuple[int, int], kind: Kind):
    from dapo.models.kernels.quantized import dequantize as by_kernel

    codes, scales = quantize(weight := torch.randn(shape), kind)
    got = by_kernel(codes, scales, weight.shape, torch.float32, level_pairs(codes.device))
    assert torch.equal(got, plain_dequantize(codes, scales, weight.shape, torch.float32))


@pytest.mark.skipif(not (has_triton() and is_interpreted()), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("kind", "n"), [(kind, n) for kind in KINDS for n in border(BLOCK[kind])])
def test_border_the_kernel_writes_no_number_behind_the_matrix(n: int, kind: Kind):
    from dapo.models.kernels import quantized as kernels

    codes, scales = quantize(torch.randn(n), kind)
    whole = torch.full((2 * n,), 7.0)
    if kind == "int8":
        kernels._from_int8[(1,)](codes, scales, whole, n, BYTES=kernels.BYTES, BLOCK=BLOCK[kind])
    else:
        kernels._from_nf4[(1,)](
            codes, scales, level_pairs(codes.device), whole, n, BYTES=kernels.BYTES, BLOCK=BLOCK[kind]
        )
    assert torch.equal(whole[:n], plain_dequantize(codes, scales, torch.Size((n,)), torch.float32))
    assert (whole[n:] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_by_what_its_codes_stand_for_and_keeps_nothing_else(kind: Kind):
    linear = nn.Linear(40, 24, dtype=torch.float64)
    frozen = QuantizedLinear(linear, kind, "cpu")
    x = torch.randn(5, 40, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        y = frozen(x)
    assert not saved
    assert_close(y, x @ frozen.weight.T + linear.bias, atol=1e-14, rtol=0)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert_close(x.grad, grad @ frozen.weight, atol=1e-14, rtol=0)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.fixture
def folder(tmp_path: Path) -> str:
    save_policy(tiny_policy("qwen2-tied", torch.float32), tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_all_matrices_but_the_head_are_quantized(folder: str, kind: Kind):
    policy = load_policy(folder, dtype=torch.float32, device="cpu", quantization=kind)
    plain = load_policy(folder, dtype=torch.float32, device="cpu")
    linears = {name for name, module in plain.base.named_modules() if type(module) is nn.Linear} - {"lm_head"}
    kept = {name for name, module in policy.base.named_modules() if isinstance(module, QuantizedLinear)}
    assert kept == linears
    assert torch.equal(policy.head.weight, plain.head.weight)
    for name in linears:
        own, as_it_was = policy.base.get_submodule(name).weight, plain.base.get_submodule(name).weight
        assert_close(own, dequantize(*quantize(as_it_was, kind), as_it_was.shape, torch.float32), atol=0, rtol=0)


def adapted(path: str, kind: Kind, targets: tuple[str, ...] = ()) -> Policy:
    base = load_policy(path, dtype=torch.float64, device="cpu", quantization=kind)
    policy = add_lora(base, 2, 4.0, target_modules=targets)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return policy


@pytest.mark.parametrize("family", families(("qwen2-tied",)))
@pytest.mark.parametrize(("targets", "kind"), [((), "int8"), ((), "nf4"), (("q_proj", "up_proj"), "nf4")])
def test_an_adapter_over_codes_merges_into_the_weights_that_were_trained(
    family: str, targets: tuple[str, ...], kind: Kind, tmp_path: Path
):
    """The folder that is saved is what the codes stand for + s·BA, not W + s·BA, and no layer of it is quantized."""
    save_policy(tiny_policy(family), tmp_path / "base")
    policy = adapted(str(tmp_path / "base"), kind, targets)
    save_policy(policy, tmp_path / "merged")
    merged = load_policy(str(tmp_path / "merged"), dtype=torch.float64, device="cpu")
    assert_close(merged(PACKED, temperature=1.0)[0], policy(PACKED, temperature=1.0)[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_adapter_a_policy_is_its_base_and_trains_on_all_the_same(folder: str, kind: Kind):
    base = load_policy(folder, dtype=torch.float64, device="cpu", quantization=kind)
    policy = adapted(folder, kind)
    reference = WithoutAdapter(policy)
    logp = policy(PACKED, temperature=1.0)[0]
    with torch.no_grad():
        found = reference(PACKED, temperature=1.0)[0]  # in the middle of a pass, as a KL in the loss asks for it
    assert torch.equal(found, base(PACKED, temperature=1.0)[0])
    assert not torch.equal(found, logp)
    logp.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in policy.named_parameters() if "lora_B" in n)
