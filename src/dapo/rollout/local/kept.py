"""Responses that do not run but go on later: preempted ones, and episodes whose environment is to answer.

Their keys and values stay in their pages as long as there is room, then on the host, and come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.pages import NO_PAGES, PagePool, Pages, Prompt
from dapo.rollout.local.prompts import Prompts
from dapo.rollout.partial import PartialResponse


@dataclass(slots=True, eq=False)
class Kept:
    """Keys and values of a response, except those in shared pages of its prompt: in pages of its own, or on the host.

    While it has pages it counts among the prompt's running responses, so that the shared pages stay too.
    """

    prompt: Prompt
    tokens: NDArray[np.int32]  # prompt and response, as far as they have keys and values
    pages: Pages
    content: Tensor | None = None  # of its pages, on the host


class KeptResponses:
    """By request id, in the order in which they stopped running."""

    def __init__(self, pool: PagePool, prompts: Prompts, cache: PagedCache) -> None:
        self._pool, self._prompts, self._cache = pool, prompts, cache
        self._kept: dict[int, Kept] = {}

    def keep(self, number: int, prompt: Prompt, tokens: NDArray[np.int32], pages: Pages) -> None:
        """Take over these pages from a row."""
        prompt.n_users += 1
        prompt.n_running += 1
        self._kept[number] = Kept(prompt, tokens, pages)

    def swap_out(self, number: int) -> None:
        """Free the pages; what they hold goes to the host."""
        kept = self._kept[number]
        kept.content = self._cache.read(kept.pages)
        kept.prompt.n_running -= 1
        self._pool.give(kept.pages)
        kept.pages = NO_PAGES

    def swap_out_last(self, but: int | None = None) -> bool:
        """Swap out the one that stopped last: it is likely to wait longest."""
        for number, kept in reversed(self._kept.items()):
            if kept.content is None and number != but:
                self.swap_out(number)
                return True
        return False

    def of(self, item: PartialResponse) -> Kept | None:
        """What is kept of a request that is to run; nothing where it does not go on from there."""
        kept = self._kept.get(item.request.id)
        if kept is None:
            return None
        sequence = np.concatenate([np.array(item.request.prompt, np.int32), item.tokens])
        if not np.array_equal(sequence[: len(kept.tokens)], kept.tokens):
            self.drop([item.request.id])
            return None
        return kept

    def hand_over(self, number: int) -> None:
        """A row has taken its pages, or has room for what is on the host."""
        kept = self._kept.pop(number)
        kept.prompt.n_running -= kept.content is None
        self._prompts.leave(kept.prompt)

    def drop(self, numbers: Iterable[int]) -> None:
        """These do not go on, or their keys and values are out of date."""
        for number in self._kept.keys() & set(numbers):
            self._pool.give(self._kept[number].pages)
            self.hand_over(number)

    def clear(self) -> None:
        self.drop(list(self._kept))
