"""Keys and values in pages of a few tokens, shared by all sequences."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.errors import EngineError
from dapo.models.device import device_memory
from dapo.models.policy import Policy
from dapo.rollout.local.pages import pages_for

# The cache takes at most this share of the memory that is free when the engine is made; the rest is the trainer's.
MEMORY_FRACTION = 0.4


class PagedCache:
    """Keys and values of every layer as [page, head, token in page, D]. Page 0 has no owner: padding goes there.

    In memory a page is [head, token, D] on CUDA, where one program streams one head, and [token, head, D] on the CPU,
    where pages are gathered into one block.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        n_pages: int,
        page_tokens: int,
        n_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n_pages, self.page_tokens, self.n_heads, self.head_dim = n_pages, page_tokens, n_heads, head_dim
        page = (n_heads, page_tokens) if device.type == "cuda" else (page_tokens, n_heads)
        try:
            # Zeros, not empty: masked values are multiplied by 0, which must not meet NaN or inf.
            self.data = torch.zeros(n_layers, 2, n_pages, *page, head_dim, dtype=dtype, device=device)
        except torch.AcceleratorError:  # the GPU has failed; the cache's size is not the cause
            raise
        except RuntimeError as error:  # out of memory has no type of its own on a CPU
            size = 2 * n_layers * n_pages * page_tokens * n_heads * head_dim * dtype.itemsize / 2**30
            raise EngineError(
                f"rollout.kv_cache_gib: a KV cache of {size:,.1f} GiB is not free on the device.",
                remedy="Set rollout.kv_cache_gib lower; responses then wait for pages instead. Or generate fewer "
                "at the same time: rollout.max_concurrent_sequences, --concurrent.",
            ) from error
        self._is_token_first = device.type != "cuda"
        logical = self.data.transpose(3, 4) if self._is_token_first else self.data
        self.keys = [layer[0] for layer in logical]  # [page, head, token, D]
        self.values = [layer[1] for layer in logical]

    def store(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put keys and values [m, L, head, D] at slots [m, L] (page · page_tokens + token in page)."""
        page, token = slots // self.page_tokens, slots % self.page_tokens
        self.keys[layer][page, :, token] = keys
        self.values[layer][page, :, token] = values

    def gathered(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, head, L, D] of rows whose pages are table [n, L / page_tokens]; a copy."""
        n, n_pages = table.shape
        blocks = []
        for cells in (self.keys[layer], self.values[layer]):
            pages = cells.transpose(1, 2)[table]  # [n, pages, token, head, D]
            blocks.append(pages.reshape(n, n_pages * self.page_tokens, self.n_heads, self.head_dim).transpose(1, 2))
        return blocks[0], blocks[1]

    def dense(self, table: NDArray[np.int32]) -> Tensor:
        """Contents [layer, 2, n, head, tokens, D] of rows whose pages are table [n, pages]; a copy."""
        n, n_pages = table.shape
        logical = self.data.transpose(3, 4) if self._is_token_first else self.data
        pages = logical[:, :, self._index(table.ravel())]  # [layer, 2, n · pages, head, token, D]
        pages = pages.view(*pages.shape[:2], n, n_pages, *pages.shape[3:]).transpose(3, 4)
        return pages.reshape(*pages.shape[:4], n_pages * self.page_tokens, self.head_dim)

    def store_dense(self, pages: NDArray[np.int32], first: int, content: Tensor) -> None:
        """Put tokens of one row [layer, 2, head, tokens, D] into its pages, beginning with token `first` of them."""
        place = torch.arange(first, first + content.shape[3], device=self.data.device)
        logical = self.data.transpose(3, 4) if self._is_token_first else self.data
        page = self._index(pages)[place // self.page_tokens]
        logical[:, :, page, :, place % self.page_tokens] = content.permute(3, 0, 1, 2, 4)

    def copy(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        self.data[:, :, self._index(target)] = self.data[:, :, self._index(source)]

    def read(self, pages: NDArray[np.int32]) -> Tensor:
        """The contents of pages, on the host."""
        return self.data[:, :, self._index(pages)].cpu()

    def write(self, pages: NDArray[np.int32], content: Tensor) -> None:
        self.data[:, :, self._index(pages)] = content.to(self.data.device)

    def clear(self, pages: NDArray[np.int32]) -> None:
        """Zero pages that hold non-finite numbers: the next response there masks by multiplying with 0."""
        self.data[:, :, self._index(pages)] = 0

    def _index(self, pages: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self.data.device)


def affordable_pages(
    policy: Policy,
    *,
    max_concurrent: int,
    max_tokens: int,
    page_tokens: int,
    kv_gib: float | None = None,
    kv_tokens: int | None = None,
    set_aside: int = 0,
) -> int:
    """Pages of the cache: what was asked for, or enough for all responses, as far as memory allows.

    `set_aside`: bytes that something else will take.
    """
    per_response = pages_for(max_tokens, page_tokens) + 1
    if kv_tokens is not None:
        return max(pages_for(kv_tokens, page_tokens), per_response)
    enough = max_concurrent * per_response
    config = policy.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * policy.dtype.itemsize
    if kv_gib is not None:
        asked = int(kv_gib * 2**30 / (per_token * page_tokens)) - 1
        if asked < per_response:
            raise EngineError(
                f"rollout.kv_cache_gib = {kv_gib}: one response of {max_tokens:,} tokens, prompt "
                f"included, needs {(per_response + 1) * page_tokens * per_token / 2**30:.3g}.",
                remedy="Raise it, or lower limits.max_response_tokens.",
            )
        return asked
    if policy.device.type != "cuda":
        return enough
    free, _ = device_memory(policy.device)
    affordable = int(MEMORY_FRACTION * max(0, free - set_aside) / (per_token * page_tokens))
    return max(min(enough, affordable), per_response)
