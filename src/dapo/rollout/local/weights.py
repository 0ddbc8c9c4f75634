"""The trainer's own weights as few, large matrices: q, k, v and gate, up are laid side by side in memory.

Nothing is copied for good: the parameters become views of the joined matrix, so that the optimizer, which writes in
place, updates both at once. Kept a second time are adapters, whose float32 a decode step would round again for every
token, matrices in FP8 where that is asked for, and on a CPU a small model, transposed: products of few rows are then
faster by a quarter, those of 16 rows twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.models.adapter import adapter_of, is_adapted
from dapo.models.policy import Policy
from dapo.rollout.families import Layer
from dapo.rollout.local.float8 import Float8, fits

Projection = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias
TRANSPOSED_NUMBERS = 2**28  # 1 GiB in float32: a larger model is not kept twice
# A transposed matrix of more columns adds in another order from 192 rows on (measured as STEP in families.py).
TRANSPOSED_COLUMNS = 768


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer as a decode step uses it."""

    qkv: Projection  # [n, H] -> [n, (NQ + 2 NK) D]
    out: Projection
    gate_up: Projection | None  # None: the feed-forward is not silu(gate) · up, and `mlp` is called instead
    down: Projection
    mlp: Projection
    input_norm: Tensor
    post_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    eps: float
    window: int | None


class Transposed:
    """A matrix [out, in] kept as [in, out], as of the last `refresh`. Implements `Projection`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        self.copy = self.weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.copy) if self.bias is None else torch.addmm(self.bias, x, self.copy)


class Adapted:
    """Matrices with the same input, some with an adapter, as of the last `refresh`: Wx + BAx. Implements `Projection`.

    A has the adapters' A one below the other, B their s·B as blocks of its diagonal: two narrow products, however many
    matrices there are. Both stay where they are in memory, because graphs read them there.
    """

    def __init__(self, linears: Sequence[Any], transposed: bool, is_float8: bool = False) -> None:
        self.linears = linears
        bases = [linear.base_layer if is_adapted(linear) else linear for linear in linears]
        self.base = joined(bases, transposed, is_float8=is_float8)  # frozen: copies of it stay as they are
        rank = sum(len(adapter_of(linear)[0]) for linear in linears if is_adapted(linear))
        like, n_out = bases[0].weight, sum(base.out_features for base in bases)
        self.a, self.b = like.new_zeros(rank, like.shape[1]), like.new_zeros(n_out, rank)
        self.refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        row = column = 0
        for linear in self.linears:
            if is_adapted(linear):
                a, b, scale = adapter_of(linear)
                self.a[column : column + len(a)] = a
                self.b[row : row + len(b), column : column + len(a)] = b * scale
                column += len(a)
            row += linear.out_features

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x).addmm_(x @ self.a.t(), self.b.t())


def keeps_transposed(policy: Policy) -> bool:
    n_numbers = sum(parameter.numel() for parameter in policy.parameters())
    return policy.device.type == "cpu" and policy.dtype == torch.float32 and n_numbers <= TRANSPOSED_NUMBERS


def layer_weights(
    layer: Layer, *, transposed: bool = False, is_float8: bool = False, product: Product = F.linear
) -> LayerWeights:
    """`product` multiplies plain matrices."""
    made = partial(joined, transposed=transposed, is_float8=is_float8, product=product)
    attention, mlp = layer.attention, layer.mlp
    norms = None
    if layer.query_norm is not None and layer.key_norm is not None:
        norms = (layer.query_norm.weight, layer.key_norm.weight)
    return LayerWeights(
        qkv=made([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=made([attention.o_proj]),
        gate_up=made([mlp.gate_proj, mlp.up_proj]) if is_gated(layer) else None,
        down=made([mlp.down_proj]),
        mlp=mlp,
        input_norm=layer.input_norm.weight,
        post_norm=layer.post_norm.weight,
        head_norms=norms,
        eps=layer.input_norm.variance_epsilon,
        window=layer.window,
    )


def is_gated(layer: Layer) -> bool:
    """The feed-forward is silu(gate) · up."""
    return isinstance(layer.mlp.act_fn, nn.SiLU) or type(layer.mlp.act_fn).__name__ == "SiLUActivation"


def joined(
    linears: Sequence[Any], transposed: bool, product: Product = F.linear, *, is_float8: bool = False
) -> Projection:
    """One projection for several with the same input. Quantized and other layers are called one by one."""
    if any(map(is_adapted, linears)):
        return Adapted(linears, transposed, is_float8)
    if any(type(linear) is not nn.Linear for linear in linears):
        if len(linears) == 1:
            alone: Projection = linears[0]
            return alone
        return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
    weight = side_by_side([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) and not all(bias is None for bias in biases):
        return lambda x: torch.cat([product(x, linear.weight, linear.bias) for linear in linears], dim=-1)
    bias = None if biases[0] is None else side_by_side(biases)
    if is_float8 and fits(weight):
        return Float8(weight, bias)
    if transposed and weight.shape[1] <= TRANSPOSED_COLUMNS:
        return Transposed(weight, bias)
    return lambda x: product(x, weight, bias)


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The parameters as one tensor, first dimension by first dimension; they are views of it from now on."""
    if not _are_adjacent(parameters):
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    first = parameters[0].detach()
    return first.as_strided((sum(len(p) for p in parameters), *first.shape[1:]), first.stride())


def _are_adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    """Do they lie end to end in one storage? They do once an engine on these weights has joined them."""
    end = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            return False
        if parameter.untyped_storage().data_ptr() != parameters[0].untyped_storage().data_ptr():
            return False
        end += parameter.numel() * parameter.element_size()
    return True
