"""Keys and values in pages of a few tokens, shared by all sequences."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.errors import EngineError


class PagedCache:
    """Keys and values of every layer as [page, head, token in page, D]. Page 0 belongs to nobody: rubbish goes there.

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
            # Zeros, not garbage: what lies behind a mask is multiplied by 0, which only finite numbers survive.
            self.data = torch.zeros(n_layers, 2, n_pages, *page, head_dim, dtype=dtype, device=device)
        except torch.cuda.OutOfMemoryError as error:
            size = 2 * n_layers * n_pages * page_tokens * n_heads * head_dim * dtype.itemsize / 2**30
            raise EngineError(
                f"rollout.kv_cache_gib: a KV cache of {size:.1f} GiB is not free on the device.",
                remedy="Set rollout.kv_cache_gib lower; responses then wait for pages instead.",
            ) from error
        self._is_token_first = device.type != "cuda"
        logical = self.data.transpose(3, 4) if self._is_token_first else self.data
        self.keys = [layer[0] for layer in logical]  # [page, head, token, D]
        self.values = [layer[1] for layer in logical]

    @property
    def page_bytes(self) -> int:
        return self.data[:, :, 0].numel() * self.data.element_size()

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
        """Forget pages that hold non-finite numbers: the next sequence there must not multiply them by 0."""
        self.data[:, :, self._index(pages)] = 0

    def _index(self, pages: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self.data.device)
