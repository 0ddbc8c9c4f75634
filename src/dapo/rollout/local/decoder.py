"""Our own decode forward for the families we know, on the trainer's own modules: no copy of any weight.

Linear layers, norms and rotary frequencies are the Hugging Face modules themselves, so that biases, adapters and every
rope scaling are right by construction; what is ours is the attention over the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.errors import EngineError
from dapo.models.logprobs import head_logits
from dapo.models.policy import Policy
from dapo.rollout.local.kv_cache import KVCache

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
# Their frequencies depend on the length of the sequence so far, so that cached keys would have to be turned again.
MOVING_ROPES = ("dynamic", "longrope")
# Rows and lengths are rounded up to multiples of this. Matrix products and attention then add in the same order
# however many rows there are (measured: float32 on CPU, one thread, bit for bit), so that a response does not depend
# on its neighbours even in its last digits; and shapes change rarely.
STEP = 16


def rounded_up(n: int) -> int:
    return -(-n // STEP) * STEP


@dataclass(frozen=True)
class Layer:
    """The parts of a decoder layer."""

    attention: Any
    mlp: Any
    input_norm: Any
    post_norm: Any
    query_norm: Any | None  # Qwen3 normalises queries and keys per head
    key_norm: Any | None
    window: int | None  # keys a query may look back on, itself included


class Decoder:
    """Forward passes over a KV cache: whole prefixes, or one token of every running sequence."""

    def __init__(self, policy: Policy, *, rows: int, max_tokens: int) -> None:
        self.policy = policy
        config = policy.config
        check_family(policy)
        self.n_query_heads: int = config.num_attention_heads
        self.n_heads: int = config.num_key_value_heads
        self.max_tokens = rounded_up(max_tokens)
        self.layers = [_layer(layer, config) for layer in policy.backbone.layers]
        attention = self.layers[0].attention
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.cache = KVCache(
            n_layers=len(self.layers),
            rows=rounded_up(rows),
            n_heads=self.n_heads,
            max_tokens=self.max_tokens,
            head_dim=self.head_dim,
            dtype=policy.dtype,
            device=policy.device,
        )
        self.cos, self.sin = self._rotary_table()
        self.place = torch.arange(self.max_tokens, device=policy.device)

    def prefill(self, ids: Tensor, rows: Tensor, prefix: Tensor) -> None:
        """Fill the cache with prefixes: row rows[i] gets the keys and values of ids[prefix[i]].

        ids [m, L] is padded at the end, L to a multiple of STEP; what padding writes lies behind every mask until it is
        overwritten. There is no result: the token after a prefix goes through `step`, like every later one.
        """
        m, length = ids.shape
        cos, sin = self.cos[:length, None], self.sin[:length, None]  # [L, 1, D]
        x = self.policy.backbone.embed_tokens(ids)  # [m, L, H]
        behind = self.place[:length, None] - self.place[None, :length]
        for i, layer in enumerate(self.layers):
            q, k, v = (
                part.transpose(1, 2) for part in self._heads(layer, layer.input_norm(x), cos, sin)
            )  # [m, h, L, D]
            self.cache.keys[i][rows, :, :length] = k[prefix]
            self.cache.values[i][rows, :, :length] = v[prefix]
            if i == len(self.layers) - 1:
                break  # nobody reads the last layer's output
            window = layer.window if layer.window is not None and layer.window < length else None
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if window is None else (behind >= 0) & (behind < window),
                is_causal=window is None,
                scale=self.scaling,
                enable_gqa=self.n_heads != self.n_query_heads,
            )
            x = x + layer.attention.o_proj(out.transpose(1, 2).reshape(m, length, -1))
            x = x + layer.mlp(layer.post_norm(x))

    def step(self, token: Tensor, position: Tensor, longest: int) -> Tensor:
        """Logits [n, V] after token [n] at position [n] of rows 0..n−1; `longest` is the largest position + 1.

        Independent of the other rows to the last bit where n is a multiple of STEP.
        """
        n = len(token)
        length = rounded_up(longest)
        rows = torch.arange(n, device=token.device)
        cos, sin = self.cos[position, None], self.sin[position, None]  # [n, 1, D]
        x = self.policy.backbone.embed_tokens(token)  # [n, H]
        masks: dict[int | None, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if layer.window not in masks:
                masks[layer.window] = self._mask(position, length, layer.window, x.dtype)
            q, k, v = self._heads(layer, layer.input_norm(x), cos, sin)  # [n, h, D]
            self.cache.keys[i][rows, :, position] = k
            self.cache.values[i][rows, :, position] = v
            # The queries that share a key head stand as if they were several queries of one head.
            out = F.scaled_dot_product_attention(
                q.view(n, self.n_heads, -1, self.head_dim),
                self.cache.keys[i][:n, :, :length],
                self.cache.values[i][:n, :, :length],
                attn_mask=masks[layer.window],
                scale=self.scaling,
            )
            x = x + layer.attention.o_proj(out.reshape(n, -1))
            x = x + layer.mlp(layer.post_norm(x))
        head = self.policy.head
        return head_logits(self.policy.backbone.norm(x), head.weight, getattr(head, "bias", None))

    def _heads(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, D] of x [..., H], normalised where the family does, and rotated."""
        attention = layer.attention
        q = attention.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = attention.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = attention.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _mask(self, position: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, L]: 0 where a row may look, −inf where it may not."""
        behind = position[:, None] - self.place[None, :length]
        hidden = behind < 0
        if window is not None:
            hidden |= behind >= window
        mask = torch.zeros(behind.shape, dtype=dtype, device=position.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _rotary_table(self) -> tuple[Tensor, Tensor]:
        """cos and sin [max_tokens, D] from the model's own rotary embedding; the first half of sin is negated."""
        place = torch.arange(self.max_tokens, device=self.policy.device)
        like = torch.zeros(1, dtype=self.policy.dtype, device=self.policy.device)
        cos, sin = (table[0].clone() for table in self.policy.backbone.rotary_emb(like, place[None]))
        sin[:, : self.head_dim // 2] *= -1
        return cos, sin


def check_family(policy: Policy) -> None:
    """Refuse an architecture or a rope whose decode forward we have not written."""
    kind = policy.config.model_type
    remedy = 'Set rollout.engine="vllm", which knows more of them.'
    if kind not in FAMILIES:
        raise EngineError(f"rollout.engine = local: it knows {', '.join(FAMILIES)}, not {kind!r}.", remedy=remedy)
    rope = (getattr(policy.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in MOVING_ROPES:
        raise EngineError(
            f"rollout.engine = local: rope type {rope!r} changes with the length, which a KV cache cannot follow.",
            remedy=remedy,
        )


def _layer(layer: Any, config: Any) -> Layer:
    attention = layer.self_attn
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return Layer(
        attention=attention,
        mlp=layer.mlp,
        input_norm=layer.input_layernorm,
        post_norm=layer.post_attention_layernorm,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        window=window,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + swap(x) sin, where swap exchanges the halves of the head dimension and `sin` carries the sign."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), dim=-1), sin)
