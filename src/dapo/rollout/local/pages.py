"""Pages of the KV cache: the pool of free ones, and prompts, whose pages all their responses share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Pages = NDArray[np.int32]
NO_PAGES: Pages = np.zeros(0, np.int32)


class PagePool:
    """Free pages, handed out in a fixed order. Page 0 is never handed out: it takes what padding stores."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages - 1
        self._stack = np.arange(n_pages - 1, 0, -1, dtype=np.int32)
        self.n_free = n_pages - 1

    def take(self, n: int) -> Pages:
        assert n <= self.n_free, f"{n} pages wanted, {self.n_free} free"
        self.n_free -= n
        return self._stack[self.n_free : self.n_free + n][::-1].copy()

    def give(self, pages: Pages) -> None:
        self._stack[self.n_free : self.n_free + len(pages)] = pages[::-1]
        self.n_free += len(pages)


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt without its last token, prefilled once for all responses to it.

    Its full pages are shared. The remaining tokens lie in a page of their own, the tail: each response continues in a
    copy of it (copy-on-write).
    """

    tokens: tuple[int, ...]
    page_tokens: int
    pages: Pages = field(default_factory=lambda: NO_PAGES)  # full ones, then the tail if there is one
    n_users: int = 0  # requests with this prompt, waiting or running
    n_running: int = 0
    is_filled: bool = False  # the pages hold keys and values of the present weights
    is_suspect: bool = False  # a response to it had non-finite logits, which may stem from these pages

    @property
    def n_shared(self) -> int:
        return len(self.tokens) // self.page_tokens

    @property
    def n_pages(self) -> int:
        return pages_for(len(self.tokens), self.page_tokens)

    @property
    def shared(self) -> Pages:
        return self.pages[: self.n_shared]

    @property
    def tail(self) -> Pages:
        """The page of the last few tokens, or nothing."""
        return self.pages[self.n_shared :]


def pages_for(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens)


def default_page_tokens(device: torch.device) -> int:
    return 64 if device.type == "cuda" else 16
