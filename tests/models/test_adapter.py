"""W x + s·BA x and its gradients: in the precision of W, beside peft's and beside the formula in float64."""

import copy
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dapo.models.adapter import adapted_forward, compact, product_in
from dapo.models.dropout import AdapterDropout, Draw, dropping
from dapo.models.packing import pack
from dapo.models.policy import Policy, WithoutAdapter, add_lora
from dapo.models.quantized import QuantizedLinear
from tiny_models import tiny_policy

SCALE, N_IN, N_OUT, RANK = 3.0, 24, 40, 4


class Adapted(nn.Module):
    """What `adapted_forward` reads of a layer of peft's."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = True, quantized: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            linear = nn.Linear(N_IN, N_OUT, bias=bias, dtype=dtype).requires_grad_(False)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            a, b = nn.Linear(N_IN, RANK, bias=False, dtype=wide), nn.Linear(RANK, N_OUT, bias=False, dtype=wide)
        self.base_layer: nn.Module = QuantizedLinear(linear, "int8", "cpu") if quantized else linear
        self.lora_A, self.lora_B = nn.ModuleDict({"default": a}), nn.ModuleDict({"default": b})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.scaling, self.active_adapters, self.disable_adapters, self.merged = (
            {"default": SCALE},
            ["default"],
            False,
            False,
        )
        self.forward = MethodType(adapted_forward, self)

    def formula(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + SCALE * self.lora_B["default"](
            self.lora_A["default"](self.lora_dropout["default"](x))
        )


def results(layer: Adapted, x: Tensor, *, by_formula: bool = False) -> list[Tensor]:
    """What the layer gives, and the gradients of x, A and B."""
    layer = copy.deepcopy(layer)
    x = x.detach().clone().requires_grad_()
    y = layer.formula(x) if by_formula else layer(x)
    (y.double() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    grads = [x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("shape", [(7, N_IN), (1, 7, N_IN), (2, 3, N_IN)])
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"quantized": True}], ids=str)
def test_it_is_the_formula_with_its_gradients(shape: tuple[int, ...], settings: dict[str, bool]):
    layer, x = Adapted(torch.float64, **settings), torch.randn(shape, dtype=torch.float64)
    for got, expected in zip(results(layer, x), results(layer, x, by_formula=True), strict=True):
        assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_dropout_comes_before_the_adapter_and_not_before_the_matrix():
    layer, draw = Adapted(torch.float64), Draw()
    layer.lora_dropout["default"] = AdapterDropout(0.5, "q", draw)
    x = torch.randn(7, N_IN, dtype=torch.float64)
    with dropping(draw, seed=0, update=0):
        draw.tokens = torch.arange(7), torch.arange(7)
        got, expected = results(layer, x), results(layer, x, by_formula=True)
    for mine, formula in zip(got, expected, strict=True):
        assert_close(mine, formula, atol=1e-12, rtol=1e-12)
    assert not torch.equal(got[0], results(layer, x)[0])


def test_in_16_bits_products_are_narrow_and_gradients_of_the_adapter_wide():
    layer, x = Adapted(torch.bfloat16), torch.randn(64, N_IN, dtype=torch.bfloat16)
    exact = results(copy.deepcopy(layer).double(), x.double(), by_formula=True)
    got = results(layer, x)
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for mine, expected in zip(got, exact, strict=True):
        assert float((mine.double() - expected).norm() / expected.norm()) < 8e-3  # some roundings of 2⁻⁹ each
    for grad in got[2:]:
        assert not torch.equal(grad, grad.bfloat16().float())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.requires_grad_())
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in kept)  # x itself, not a copy


def test_without_its_adapter_it_is_the_matrix():
    layer, x = Adapted(torch.float64), torch.randn(7, N_IN, dtype=torch.float64)
    layer.disable_adapters = True
    assert torch.equal(layer(x), layer.base_layer(x))


def test_a_product_is_summed_in_the_wider_type():
    ones = torch.ones(1, 1001, dtype=torch.bfloat16)
    product = product_in(torch.float32, ones, ones.t())
    assert product.dtype == torch.float32
    assert float(product) == 1001  # which bfloat16 does not have


def test_only_layers_with_an_adapter_are_replaced():
    other, layer = nn.Linear(2, 2), SimpleNamespace(lora_A={})
    compact(SimpleNamespace(modules=lambda: [other, layer]))  # type: ignore[arg-type]
    assert layer.forward.__func__ is adapted_forward
    assert "forward" not in vars(other)


def test_a_whole_model_is_that_of_peft_and_in_16_bits_about_as_exact():
    packed = pack([[3, 4, 5]], [[5, 6, 7, 8]], "cpu")

    def learned(policy: Policy) -> dict[str, Tensor]:
        policy = copy.deepcopy(policy)
        logp = policy(packed, temperature=1.0)[0]
        logp.sum().backward()
        grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        return grads | {"logp": logp.detach(), "base": WithoutAdapter(policy)(packed, temperature=1.0)[0].detach()}

    def error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
        return sum(float((got[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact) / len(exact)

    ours = add_lora(tiny_policy("qwen2", torch.bfloat16), 4, 8.0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    theirs = copy.deepcopy(ours)
    replaced = [layer for layer in theirs.modules() if "forward" in vars(layer) and hasattr(layer, "lora_A")]
    assert len(replaced) == 7 * len(ours.backbone.layers)
    for layer in replaced:
        del layer.forward  # peft's own again
    exact = learned(copy.deepcopy(theirs).double())
    assert len(exact) == 2 * len(replaced) + 2
    assert error(learned(copy.deepcopy(ours).double()), exact) < 1e-12
    assert {grad.dtype for name, grad in learned(ours).items() if "lora" in name} == {torch.float32}
    assert error(learned(ours), exact) < 1.5 * error(learned(theirs), exact)
