"""The decode forward as one reads it: Hugging Face modules, and attention over a dense KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.models.logprobs import head_logits
from dapo.models.policy import Policy
from dapo.rollout.families import Transformer, causal_mask, rounded_up
from dapo.rollout.plain.kv_cache import KVCache


class Decoder(Transformer):
    """Forward passes over a KV cache: whole prefixes, or one token of every running sequence."""

    def __init__(self, policy: Policy, *, rows: int, max_tokens: int) -> None:
        super().__init__(policy, max_tokens=max_tokens)
        self.cache = KVCache(
            n_layers=len(self.layers),
            rows=rounded_up(rows),
            n_heads=self.n_heads,
            max_tokens=self.max_tokens,
            head_dim=self.head_dim,
            dtype=policy.dtype,
            device=policy.device,
        )

    def prefill(self, ids: Tensor, rows: Tensor, prefix: Tensor) -> None:
        """Fill the cache with prefixes: row rows[i] gets the keys and values of ids[prefix[i]].

        ids [m, L] is padded at the end, L to a multiple of STEP; what padding stores stays masked until it is
        overwritten.
        """
        length = ids.shape[1]
        for i, k, v in self.prefixes(ids):
            self.cache.keys[i][rows, :, :length] = k.transpose(1, 2)[prefix]
            self.cache.values[i][rows, :, :length] = v.transpose(1, 2)[prefix]

    def step(self, token: Tensor, position: Tensor, longest: int, rows: Tensor | None = None) -> Tensor:
        """Logits [n, V] after token [n] at position [n] of rows [n] or 0..n−1; `longest` is the largest position + 1.

        Independent of the other rows to the last bit where n is a multiple of STEP. Of several tokens of one row each
        sees those at earlier positions.
        """
        n = len(token)
        length = rounded_up(longest)
        seen = slice(0, n) if rows is None else rows
        rows = torch.arange(n, device=token.device) if rows is None else rows
        cos, sin = self.cos[position, None], self.sin[position, None]  # [n, 1, D]
        x = self.policy.backbone.embed_tokens(token)  # [n, H]
        masks: dict[int | None, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if layer.window not in masks:
                masks[layer.window] = causal_mask(position, self.place[:length], layer.window, x.dtype)
            q, k, v = self.heads(layer, layer.input_norm(x), cos, sin)  # [n, h, D]
            self.cache.keys[i][rows, :, position] = k
            self.cache.values[i][rows, :, position] = v
            # Grouped-query attention: the queries that share a key head are passed as several queries of one head.
            out = F.scaled_dot_product_attention(
                q.view(n, self.n_heads, -1, self.head_dim),
                self.cache.keys[i][seen, :, :length],
                self.cache.values[i][seen, :, :length],
                attn_mask=masks[layer.window],
                scale=self.scaling,
            )
            x = x + layer.attention.o_proj(out.reshape(n, -1))
            x = x + layer.mlp(layer.post_norm(x))
        head = self.policy.head
        return head_logits(self.policy.backbone.norm(x), head.weight, getattr(head, "bias", None))
