"""A decode step's forward pass on a CPU as one call into decode.c.

In a small model the calls of a pass take as long as its work. Matrices are kept a second time, in panels of columns, as
its products read them; these add in one order, so that a row's bits do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from dapo.models.kernels.compiled import at, by_rows, host
from dapo.rollout.families import Layer, Transformer, rounded_up
from dapo.rollout.local.blocks import Span
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.local.weights import is_gated, side_by_side

COLUMNS = 16  # of a matrix come in multiples of so many
ROWS = 8  # of a batch are worked on together
WHOLE_NUMBERS = 2**24  # a larger model is bound by reading its weights, which threads share better by columns


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "norm", "qkv", "qkv_bias", "query_norm", "key_norm", "out", "out_bias", "next_norm", "gate_up",
            "gate_up_bias", "down", "down_bias",
        )),
        ("window", c_int64),
    ]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("layers", "embedding", "cosine", "sine", "norm", "head", "head_bias")),
        *((name, c_int64) for name in ("n_layers", "width", "inner", "tokens", "queries", "heads", "size")),
        *((name, c_float) for name in ("eps", "last_eps", "scale")),
    ]


class _Span(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("data", "rows")),
        *((name, c_int64) for name in ("first", "n", "slots", "capacity")),
    ]


def can_be_whole(transformer: Transformer) -> bool:
    """A small model of plain matrices, whose widths decode.c knows."""
    policy, layers = transformer.policy, transformer.layers
    groups = [group for layer in layers for group in matrices(layer)] + [[policy.head]]
    is_plain = all(type(linear) is nn.Linear for group in groups for linear in group)
    is_known = type(policy.backbone.embed_tokens) is nn.Embedding and all(map(is_gated, layers))
    n_numbers = sum(parameter.numel() for parameter in policy.parameters())
    if not (is_plain and is_known and n_numbers <= WHOLE_NUMBERS):
        return False
    qkv_width = (transformer.n_query_heads + 2 * transformer.n_heads) * transformer.head_dim
    has_columns = policy.head.in_features % COLUMNS == qkv_width % COLUMNS == 0
    return has_columns and all(len({linear.bias is None for linear in group}) == 1 for group in groups)


def matrices(layer: Layer) -> tuple[list[Any], ...]:
    """Those with the same input together: qkv, out, gate and up, down."""
    attention, mlp = layer.attention, layer.mlp
    return (
        [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj], [mlp.down_proj],
    )  # fmt: skip


class WholePass:
    """The formula of `PagedDecoder._logits`, with the weights as of the last `refresh`."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer, self.c = transformer, host()
        self.n_tokens = len(transformer.policy.head.weight)
        self.refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        t, policy = self.transformer, self.transformer.policy
        self.copies: list[Tensor] = []
        layers = [self._layer(layer) for layer in t.layers]
        self.layers = (_Layer * len(layers))(*layers)
        embedding, norm, head = policy.backbone.embed_tokens, policy.backbone.norm, policy.head
        self.model = _Model(
            addressof(self.layers), at(embedding.weight), at(t.cos), at(t.sin), at(norm.weight), *self._matrix([head]),
            len(layers), head.in_features, t.layers[0].mlp.down_proj.in_features, self.n_tokens,
            t.n_query_heads, t.n_heads, t.head_dim,
            t.layers[0].input_norm.variance_epsilon, norm.variance_epsilon, t.scaling,
        )  # fmt: skip

    def _layer(self, layer: Layer) -> _Layer:
        qkv, out, gate_up, down = map(self._matrix, matrices(layer))
        norms = (None if norm is None else at(norm.weight) for norm in (layer.query_norm, layer.key_norm))
        return _Layer(
            at(layer.input_norm.weight), *qkv, *norms, *out, at(layer.post_norm.weight), *gate_up, *down,
            layer.window or 0,
        )  # fmt: skip

    def _matrix(self, linears: Sequence[Any]) -> tuple[int, int | None]:
        """Addresses of copies of the joined matrix, in panels, and of its bias."""
        joined = side_by_side([linear.weight for linear in linears])
        n, inner = joined.shape
        weight = joined.new_empty(rounded_up(n, COLUMNS), inner)
        self.c.panels(at(joined), at(weight), n, inner)
        self.copies.append(weight)
        if linears[0].bias is None:
            return at(weight), None
        bias = with_columns(torch.cat([linear.bias for linear in linears]))
        self.copies.append(bias)
        return at(weight), at(bias)

    def logits(self, rows: DeviceRows, spans: Sequence[Span]) -> Tensor:
        """[n, V] behind the newest token of each row of the spans."""
        n, n_slots = spans[-1].end, sum(span.block.n for span in spans)
        out = torch.empty(n, self.n_tokens)
        n_parts = max(1, n_slots // ROWS)

        def work(a: int, b: int) -> None:
            self._pass(rows, spans, n_slots * a // n_parts, n_slots * b // n_parts, out)

        by_rows(n_parts, len(self.layers) * n * self.model.inner * self.model.width // ROWS, work)
        return out

    def _pass(self, rows: DeviceRows, spans: Sequence[Span], first: int, end: int, out: Tensor) -> None:
        """`logits` of the slots first..end−1 of all spans together."""
        row = n_rows_of(spans, 0, first)
        n = n_rows_of(spans, first, end)
        pieces = [
            _Span(
                span.block.data.data_ptr(), None if span.n_rows is None else span.n_rows[a:].ctypes.data, a, b - a,
                span.block.data.shape[2], span.block.capacity,
            )
            for span, a, b in cut(spans, first, end)
        ]  # fmt: skip
        parts = (_Span * len(pieces))(*pieces)
        longest = max(span.block.capacity for span in spans)
        model = addressof(self.model)
        scratch = torch.empty(self.c.forward_scratch(model, n, longest))
        self.c.forward(
            model, addressof(parts), len(parts), rows.state.data_ptr() + 4 * row,
            rows.state.stride(0), n, at(out, row), at(scratch),
        )  # fmt: skip


def cut(spans: Sequence[Span], first: int, end: int) -> Iterator[tuple[Span, int, int]]:
    """The slots first..end−1 of all spans together, as slots of each span."""
    before = 0
    for span in spans:
        a, b = max(first - before, 0), min(end - before, span.block.n)
        if a < b:
            yield span, a, b
        before += span.block.n


def n_rows_of(spans: Sequence[Span], first: int, end: int) -> int:
    return sum(b - a if span.n_rows is None else int(span.n_rows[a:b].sum()) for span, a, b in cut(spans, first, end))


def with_columns(x: Tensor) -> Tensor:
    """Padded with zeros to a multiple of 16."""
    return torch.cat([x, x.new_zeros(rounded_up(len(x), COLUMNS) - len(x), *x.shape[1:])])
