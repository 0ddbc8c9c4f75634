"""The trainer's forward pass with the engine's bits: `rollout.exact`.

It is the engine's own pass over the trainer's tokens, each of them a row that is the newest token of a sequence. The
numbers of a row do not depend on the other rows: products add in one order (`exact_linear`), norms and gates see one
row, and attention goes over a row's own keys in blocks from the first one. Gradients are those of the ordinary layers
at the same inputs, which are made again as in gradient checkpointing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo.errors import EngineError
from dapo.models.packing import Packed
from dapo.models.policy import Policy
from dapo.rollout.families import Transformer, rounded_up
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.layers import through_layers
from dapo.rollout.local.ops import DRAW_BLOCK, TritonOps, power_of_2
from dapo.rollout.local.pages import default_page_tokens, pages_for
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.local.weights import LayerWeights, layer_weights


def exact_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from dapo.models.kernels.exact_linear import exact_linear

    return exact_linear(hidden, weight, bias, dtype=torch.float32)


def exact_weights(transformer: Transformer) -> list[LayerWeights]:
    from dapo.models.kernels.exact_linear import exact_linear

    weights = [layer_weights(layer, product=exact_linear) for layer in transformer.layers]
    if any(layer.gate_up is None for layer in weights):
        raise EngineError(
            "rollout.exact = true: the model's feed-forward is not silu(gate) · up, for which there is no exact pass.",
            remedy="Set rollout.exact = false.",
        )
    return weights


def rows_of(length: Tensor, table: Tensor) -> DeviceRows:
    """Rows whose newest token is the last of length [n], in pages table [n, pages]."""
    n, n_pages = table.shape
    rows = DeviceRows(rounded_up(n), n_pages, 1, torch.float32, table.device)
    rows.length[:n].copy_(length)
    rows.table[:n].copy_(table)
    return rows


class ExactPass(Transformer):
    """What a policy's forward calls instead of its own layers and head. Implements `ExactForward`."""

    def __init__(self, policy: Policy, *, max_tokens: int, page_tokens: int | None = None) -> None:
        super().__init__(policy, max_tokens=max_tokens)
        self.page_tokens = page_tokens or default_page_tokens(policy.device)
        self.weights = exact_weights(self)

    def hidden(self, packed: Packed) -> Tensor:
        """Last hidden states [T, H], normed."""
        x = self.policy.backbone.embed_tokens(packed.input_ids)
        if torch.is_grad_enabled() and not x.requires_grad:  # so that the layers' gradients are asked for
            x = x.detach().requires_grad_()
        hidden: Tensor = _Hidden.apply(x, packed, self)  # type: ignore[no-untyped-call]
        return hidden

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return exact_logits(hidden, weight, bias)

    def scores(self, logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and log-normalisers of logits before the temperature."""
        from dapo.rollout.local.kernels import score_kernel, weigh_kernel

        (n, vocabulary), device = logits.shape, logits.device
        chunks, inverse = -(-vocabulary // DRAW_BLOCK), 1.0 / temperature
        part_max, part_all = torch.empty(2, n * chunks, device=device)
        logp, normaliser = torch.empty(2, n, device=device)
        if n:
            weigh_kernel[(n, chunks)](
                logits, logits, part_max, part_all, part_all, vocabulary, inverse, logits.stride(0),
                HAS_CUT=False, CHUNKS=chunks, BLOCK=DRAW_BLOCK, num_warps=8,
            )  # fmt: skip
            score_kernel[(n,)](
                logits, part_max, part_all, target.to(torch.int32), logp, normaliser,
                torch.zeros((), dtype=torch.int32, device=device), inverse, logits.stride(0), n,
                CHUNKS=chunks, CHUNKS_UP=power_of_2(chunks), num_warps=1,
            )  # fmt: skip
        return logp, normaliser

    def forward(self, x: Tensor, packed: Packed, inputs: list[Tensor] | None) -> Tensor:
        """The engine's pass over embedded tokens x [T, H]; x is used up. `inputs` gets each layer's and the norm's."""
        ops = PackedOps(self, packed)
        norm = self.policy.backbone.norm
        x, y = through_layers(ops, self.weights, x, ops.rows, 0, inputs=inputs)
        hidden = ops.add_norm(x, y, norm.weight, norm.variance_epsilon)
        if inputs is not None:
            inputs.append(x)
        return hidden


class PackedOps(TritonOps):
    """The kernels over a packed batch: every sequence has pages of its own, which one layer after the other fills."""

    def __init__(self, transformer: ExactPass, packed: Packed) -> None:
        device, page_tokens = packed.input_ids.device, transformer.page_tokens
        lengths = torch.tensor(packed.sequence_lengths)
        pages = -(-lengths // page_tokens)
        first = pages.cumsum(0) - pages  # page of each sequence
        n_layers = len(transformer.layers)
        cache = PagedCache(
            n_layers=1,
            n_pages=int(pages.sum()),
            page_tokens=page_tokens,
            n_heads=transformer.n_heads,
            head_dim=transformer.head_dim,
            dtype=transformer.policy.dtype,
            device=device,
        )
        cache.keys, cache.values = cache.keys * n_layers, cache.values * n_layers
        shared = (cache, transformer.cos, transformer.sin, transformer.scaling, transformer.n_query_heads)
        super().__init__(*shared, n_rows=0, n_tokens=0, is_exact=True)

        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)  # [F] of each cell
        cell = torch.arange(len(sequence), device=device)
        starts = packed.cu_seqlens.long()[sequence]
        slot = first.to(device)[sequence] * page_tokens + cell - starts
        home = cell if packed.shared is None else packed.shared.home  # [T]
        widest = torch.arange(pages_for(packed.max_length, page_tokens), device=device)
        self.rows = rows_of(packed.position_ids + 1, first.to(device)[sequence[home], None] + widest)
        self.copied: tuple[Tensor, Tensor] | None = None
        if packed.shared is not None:  # a shared token is one row; its key is copied to where the others look for it
            origin = home[packed.shared.cells.source]
            borrowed = torch.nonzero(origin != cell)[:, 0]
            self.copied = slot[origin[borrowed]], slot[borrowed]

    def store(self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None, eps: float, rows: DeviceRows) -> None:
        super().store(qkv, layer, norms, eps, rows)
        if self.copied is None:
            return
        (source, target), cache = self.copied, self.cache
        page, token = source // cache.page_tokens, source % cache.page_tokens
        cache.store(layer, cache.keys[layer][page, :, token], cache.values[layer][page, :, token], target)


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed, exact: ExactPass) -> Tensor:
        inputs: list[Tensor] | None = [] if ctx.needs_input_grad[0] else None
        hidden = exact.forward(x.clone(), packed, inputs)
        ctx.packed, ctx.backbone = packed, exact.policy.backbone
        ctx.save_for_backward(*(inputs or ()))
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, backbone = ctx.packed, ctx.backbone
        *inputs, last = ctx.saved_tensors
        positions = backbone.rotary_emb(last[None], packed.position_ids[None])
        grad = _through(backbone.norm, last, grads[0])
        for layer, x in zip(reversed(backbone.layers), reversed(inputs), strict=True):
            # `forward`, not the module: gradient checkpointing would make the layer a third time.
            again = partial(layer.forward, position_embeddings=positions, packed=packed, attention_mask=None)
            grad = _through(lambda x, again=again: again(x[None]).squeeze(0), x, grad)
        return grad, None, None


def _through(part: Any, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x, from that of part(x); those of its weights are added to theirs."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = part(x)
    torch.autograd.backward(y, grad)
    assert x.grad is not None, "every part reads its input"
    return x.grad
