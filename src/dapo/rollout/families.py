"""The transformer families whose decode forward we have written, as parts taken from the trainer's own modules.

Linear layers, norms and rotary frequencies are the Hugging Face modules themselves, so that biases, adapters and every
rope scaling are right by construction; what is ours is the attention over a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.errors import EngineError
from dapo.models.policy import Policy

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
# Their frequencies depend on the length of the sequence so far, so cached keys would have to be rotated again.
MOVING_ROPES = ("dynamic", "longrope")
# Rows and lengths are rounded up to multiples of this. Matrix products and attention then add in the same order
# however many rows there are (measured: float32 on CPU, one thread, bit for bit), so that a response does not depend
# on its neighbours even in its last digits; and shapes change rarely.
STEP = 16
# Padded tokens of one prefill pass: bounds its memory.
PREFILL_TOKENS = 16384
# Up to so many tokens attention adds in the same order however far a row is padded; beyond, only for equal widths.
SAME_SUMS = 368


KeysAndValues = Iterator[tuple[int, Tensor, Tensor]]  # layer, keys, values
Stored = Callable[[int], tuple[Tensor, Tensor]]  # a layer's keys and values
Attend = Callable[[int, int | None, Tensor, Tensor, Tensor], Tensor]  # layer, window, queries, new keys and values


def rounded_up(n: int, step: int = STEP) -> int:
    return -(-n // step) * step


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


class Transformer:
    """A policy's layers and rotary tables, and the forward over whole prefixes."""

    def __init__(self, policy: Policy, *, max_tokens: int) -> None:
        check_family(policy)
        self.policy = policy
        config = policy.config
        self.n_query_heads: int = config.num_attention_heads
        self.n_heads: int = config.num_key_value_heads
        self.max_tokens = rounded_up(max_tokens)
        self.layers = [_layer(layer, config) for layer in policy.backbone.layers]
        attention = self.layers[0].attention
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.cos, self.sin = self._rotary_table()
        self.place = torch.arange(self.max_tokens, device=policy.device)

    def prefixes(self, ids: Tensor) -> KeysAndValues:
        """Layer by layer, the keys and values [m, L, h, D] of prefixes ids [m, L], which are padded at the end.

        There is no other result: the token after a prefix goes through a decode step, like every later one.
        """
        length = ids.shape[1]
        behind = self.place[:length, None] - self.place[None, :length]

        def attend(_: int, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if window is None or window >= length:
                return self.attention(q, k, v)
            return self.attention(q, k, v, (behind >= 0) & (behind < window))

        return self._by_layer(ids, self.cos[:length, None], self.sin[:length, None], attend)

    def extensions(self, ids: Tensor, first: Tensor, stored: Stored) -> KeysAndValues:
        """`prefixes` of ids [m, L] that stand behind first [m] other tokens.

        `stored` has a layer's keys and values [m, h, W, D] of all of them, in order; also of the new ones, which the
        caller has put there before it asks for the next layer.
        """
        position = (first[:, None] + self.place[: ids.shape[1]]).clamp(max=self.max_tokens - 1)  # [m, L]

        def attend(i: int, window: int | None, q: Tensor, *_new: Tensor) -> Tensor:
            keys, values = (x.transpose(1, 2) for x in stored(i))
            behind = position[:, :, None] - torch.arange(keys.shape[1], device=ids.device)
            is_seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            return self.attention(q, keys, values, is_seen[:, None])

        return self._by_layer(ids, self.cos[position][:, :, None], self.sin[position][:, :, None], attend)

    def _by_layer(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> KeysAndValues:
        x = self.policy.backbone.embed_tokens(ids)  # [m, L, H]
        for i, layer in enumerate(self.layers):
            q, k, v = self.heads(layer, layer.input_norm(x), cos, sin)  # [m, L, h, D]
            yield i, k, v
            if i == len(self.layers) - 1:
                break  # the last layer's output is not needed
            x = x + layer.attention.o_proj(attend(i, layer.window, q, k, v).flatten(2))
            x = x + layer.mlp(layer.post_norm(x))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor | None = None) -> Tensor:
        """Of queries [m, L, heads, D] over keys and values [m, W, h, D] that they see; causal unless that is said."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=is_seen,
            is_causal=is_seen is None,
            scale=self.scaling,
            enable_gqa=self.n_heads != self.n_query_heads,
        )
        return out.transpose(1, 2)

    def heads(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (rotated to their positions) and values [..., heads, D] of x [..., H]."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        attention = layer.attention
        q, k, v = (project(x).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _rotary_table(self) -> tuple[Tensor, Tensor]:
        """cos and sin [max_tokens, D] from the model's own rotary embedding; the first half of sin is negated."""
        place = torch.arange(self.max_tokens, device=self.policy.device)
        like = torch.zeros(1, dtype=self.policy.dtype, device=self.policy.device)
        cos, sin = (table[0].clone() for table in self.policy.backbone.rotary_emb(like, place[None]))
        sin[:, : self.head_dim // 2] *= -1
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + swap(x) sin, where swap exchanges the halves of the head dimension and `sin` carries the sign."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), dim=-1), sin)


def causal_mask(position: Tensor, place: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """[n, 1, 1, L] for queries at position [n] and keys at place [L]: 0 where a query may look, else −inf."""
    behind = position[:, None] - place
    hidden = behind < 0
    if window is not None:
        hidden |= behind >= window
    mask = torch.zeros(behind.shape, dtype=dtype, device=position.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None]


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
