"""Keys and values of the running responses as a CPU reads them best: dense, responses of similar length together.

Pages hold what is shared, copied or swapped out. When a response is admitted, its keys and values are copied from its
pages into a block, where they stay: a step neither gathers pages nor pads to the longest of all responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.rollout.families import rounded_up
from dapo.rollout.local.cache import PagedCache

Ints = NDArray[np.int64]
NONE: Ints = np.zeros(0, np.int64)
SHORTEST_CLASS = 32  # tokens; every further class is twice as long


class Block:
    """Responses of at most `capacity` tokens, one slot each, the first n of them in use."""

    def __init__(self, capacity: int, like: PagedCache) -> None:
        self.capacity = capacity
        self.serial = NONE
        n_layers = len(like.keys)
        # Zeros, not empty: masked values are multiplied by 0, which must not meet NaN or inf.
        self.data = torch.zeros(
            n_layers, 2, 0, like.n_heads, capacity, like.head_dim, dtype=like.data.dtype, device=like.data.device
        )

        self._lay_out()

    def _lay_out(self) -> None:
        """Views that every step needs of each layer: keys and values [slot, head, token, D], and the same by cell."""
        self.layers = [(layer[0], layer[1]) for layer in self.data]
        self.cells = [(layer[0], layer[1]) for layer in self.data.view(len(self.data), 2, -1, self.data.shape[-1])]

    @property
    def n(self) -> int:
        return len(self.serial)

    def add(self, serial: Ints, content: Tensor) -> None:
        """Give slots to responses with content [layer, 2, k, head, tokens, D]."""
        first, n = self.n, self.n + len(serial)
        if n > self.data.shape[2]:
            n_layers, two, _, *cells = self.data.shape
            room = self.data.new_zeros(n_layers, two, rounded_up(max(n, 2 * first)) - first, *cells)
            self.data = torch.cat((self.data[:, :, :first], room), dim=2)
            self._lay_out()
        self.data[:, :, first:n, :, : content.shape[4]] = content
        self.serial = np.concatenate([self.serial, serial])

    def drop(self, is_dropped: NDArray[np.bool_]) -> None:
        """Free slots; the last responses move into the gaps."""
        n = int((~is_dropped).sum())
        gaps = np.flatnonzero(is_dropped[:n])
        if len(gaps):
            movers = n + np.flatnonzero(~is_dropped[n:])
            self.data[:, :, torch.from_numpy(gaps)] = self.data[:, :, torch.from_numpy(movers)]
            self.serial[gaps] = self.serial[movers]
        self.serial = self.serial[:n]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows first..end−1 of a decode step are the slots 0, 1, … of a block: one row each, or n_rows[slot] of a draft."""

    block: Block
    first: int
    end: int
    n_rows: Ints | None = None

    @property
    def slots(self) -> slice | Tensor:
        """The slot of each row."""
        n = self.end - self.first
        return (
            slice(0, n)
            if self.n_rows is None
            else torch.from_numpy(np.repeat(np.arange(len(self.n_rows)), self.n_rows))
        )


class Blocks:
    """All running responses by length class. A serial number names a response and its KV (see `HostRows.serial`)."""

    def __init__(self, cache: PagedCache, max_tokens: int) -> None:
        self.cache, self.max_tokens = cache, max_tokens
        self.blocks: dict[int, Block] = {}  # capacity -> block, short ones first
        self.spans: list[Span] = []
        self._serial = self._order = NONE
        self._capacity = NONE  # of the block that holds each response

    def arrange(self, serial: Ints, length: Ints, table: NDArray[np.int32], n_tokens: int | Ints) -> Ints:
        """Make room for the next `n_tokens` of every response. Returns the order of the responses in a decode step.

        Responses with a new serial number are fetched from their pages; those whose number is gone are dropped.
        """
        needed = np.minimum(length + n_tokens - 1, self.max_tokens)
        if np.array_equal(serial, self._serial):
            if (needed <= self._capacity).all():
                return self._order
        else:
            self._forget_all_but(serial)
        wanted = np.minimum(capacity_for(needed), self.max_tokens)
        by_serial = np.argsort(serial)
        self._promote(serial, wanted, by_serial)
        self._fetch(serial, wanted, length, table)
        self.spans, first, order = [], 0, []
        for block in self.blocks.values():
            if block.n:
                order.append(by_serial[np.searchsorted(serial, block.serial, sorter=by_serial)])
                self.spans.append(Span(block, first, first + block.n))
                first += block.n
        self._serial, self._order, self._capacity = serial.copy(), np.concatenate(order), np.empty_like(serial)
        self._capacity[self._order] = np.repeat([s.block.capacity for s in self.spans], [len(rows) for rows in order])
        return self._order

    def spread(self, n_rows: Ints) -> list[Span]:
        """The spans of a step that has so many rows of each response, which are in the order of `arrange`."""
        edges = [0, *np.cumsum(n_rows).tolist()]
        return [Span(s.block, edges[s.first], edges[s.end], n_rows[s.first : s.end]) for s in self.spans]

    def forget(self) -> None:
        """Drop all responses: serial numbers will be given again."""
        for block in self.blocks.values():
            block.serial = NONE
        self.spans, self._serial, self._order, self._capacity = [], NONE, NONE, NONE

    def clear(self, serial: Ints) -> None:
        """Zero responses that hold non-finite numbers: the next one in the slot masks by multiplying with 0."""
        for block in self.blocks.values() if len(serial) else ():
            slots = np.flatnonzero(np.isin(block.serial, serial))
            if len(slots):
                block.data[:, :, torch.from_numpy(slots)] = 0

    def read(self, serial: int, n_tokens: int) -> Tensor:
        """Keys and values [layer, 2, head, tokens, D] of a response."""
        for block in self.blocks.values():
            for slot in np.flatnonzero(block.serial == serial).tolist():
                return block.data[:, :, slot, :, :n_tokens]
        raise AssertionError(f"no block holds response {serial}")

    def _block(self, capacity: int) -> Block:
        if capacity not in self.blocks:
            self.blocks[capacity] = Block(capacity, self.cache)
            self.blocks = dict(sorted(self.blocks.items()))
        return self.blocks[capacity]

    def _forget_all_but(self, serial: Ints) -> None:
        for block in self.blocks.values():
            is_gone = ~np.isin(block.serial, serial)
            if is_gone.any():
                block.drop(is_gone)

    def _promote(self, serial: Ints, wanted: Ints, by_serial: Ints) -> None:
        """Responses that have outgrown their block move to a longer one."""
        for block in list(self.blocks.values()):
            if not block.n:
                continue
            capacity = wanted[by_serial[np.searchsorted(serial, block.serial, sorter=by_serial)]]
            is_long = capacity > block.capacity
            if not is_long.any():
                continue
            for longer in np.unique(capacity[is_long]).tolist():
                slots = np.flatnonzero(capacity == longer)
                self._block(longer).add(block.serial[slots], block.data[:, :, span_of(slots)])
            block.drop(is_long)

    def _fetch(self, serial: Ints, wanted: Ints, length: Ints, table: NDArray[np.int32]) -> None:
        """Copy new responses from their pages."""
        known = [block.serial for block in self.blocks.values()]
        is_new = ~np.isin(serial, np.concatenate(known)) if known else np.ones(len(serial), bool)
        for capacity in np.unique(wanted[is_new]).tolist():
            rows = np.flatnonzero(is_new & (wanted == capacity))
            n_pages = -(-(int(length[rows].max()) - 1) // self.cache.page_tokens)
            self._block(capacity).add(serial[rows], self.cache.dense(table[rows, :n_pages])[..., :capacity, :])


def span_of(slots: Ints) -> slice | Tensor:
    """Slots in a row as a slice, of which nothing has to be copied; others as they are."""
    first, end = int(slots[0]), int(slots[-1]) + 1
    return slice(first, end) if end - first == len(slots) else torch.from_numpy(slots)


def capacity_for(length: Ints) -> Ints:
    """The length class: 32, 64, 128, …"""
    doublings = np.ceil(np.log2(np.maximum(length, SHORTEST_CLASS) / SHORTEST_CLASS))
    return SHORTEST_CLASS << doublings.astype(np.int64)
