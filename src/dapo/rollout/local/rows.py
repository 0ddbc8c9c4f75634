"""The batch of running responses, one row each: all of it on the host, what a decode step needs on the device.

A tick begins by sending the host's state to the device and ends by fetching the new tokens, so the two agree whatever
happened in between. Every transfer and every host operation is one call over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.rollout.draft import Running
from dapo.rollout.engine import Request
from dapo.rollout.local.pages import Pages, Prompt
from dapo.rollout.partial import PartialResponse

RUNNING, ENDED, FULL, BAD, EMPTY = 0, 1, 2, 3, 4  # what `stop` says of a row


class DeviceRows:
    """What a decode step reads and writes of each row: newest token, lengths, stop, noise key, page table, output."""

    def __init__(
        self, n_rows: int, n_pages: int, tokens_per_tick: int, logp_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.state = torch.zeros(9, n_rows, dtype=torch.int32, device=device)
        self.token, self.start, self.length, self.limit, self.stop = self.state[:5]
        self.words = self.state[5:]
        self.table = torch.zeros(n_rows, n_pages, dtype=torch.int32, device=device)
        self.out_token = torch.zeros(tokens_per_tick, n_rows, dtype=torch.int32, device=device)
        self.out_logp = torch.zeros(tokens_per_tick, n_rows, dtype=logp_dtype, device=device)
        self.clock = torch.zeros((), dtype=torch.int32, device=device)  # steps done in this tick

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[Any]]:
        """On a CPU: state, out_token and out_logp as numpy reads and writes them."""
        return self.state.numpy(), self.out_token.numpy(), self.out_logp.numpy()

    def position(self, n: int) -> Tensor:
        """Position of the newest token of rows 0..n−1; 0 for dead ones."""
        return torch.where(self.is_alive(n), self.length[:n] - 1, 0).long()

    def is_alive(self, n: int) -> Tensor:
        is_alive: Tensor = self.stop[:n] == RUNNING
        return is_alive


@dataclass(slots=True)
class Pending:
    """What a tick drew and is not yet written: n_new[i] of tokens and log-probs [K, n] to row i, from column[i] on."""

    n_new: NDArray[np.int32]
    column: NDArray[np.int32]
    token: NDArray[np.int32]
    logp: NDArray[Any]
    version: int


class HostRows:
    """State of up to `n_rows` responses. Column t of a row belongs to token t of prompt and response together.

    What a tick drew is written into the rows when somebody reads them, or by `settle`, which can wait until the device
    computes the next tick.
    """

    def __init__(self, n_rows: int, max_tokens: int, n_pages: int, logp_dtype: Any) -> None:
        self._tokens = np.zeros((n_rows, max_tokens), np.int32)
        self._logp = np.zeros((n_rows, max_tokens), logp_dtype)
        self._version = np.zeros((n_rows, max_tokens), np.int32)
        self._pending: Pending | None = None
        self.newest = np.zeros(n_rows, np.int32)  # token
        self.start = np.zeros(n_rows, np.int32)  # tokens of the prompt
        self.length = np.ones(n_rows, np.int32)  # tokens so far, the prompt included
        self.limit = np.zeros(n_rows, np.int32)  # tokens at which the response is truncated
        self.order = np.zeros(n_rows, np.int64)
        self.words = np.zeros((n_rows, 4), np.int32)  # of the noise key; 32 bits, the sign is only a bit
        self.table = np.zeros((n_rows, n_pages), np.int32)
        self.n_pages = np.zeros(n_rows, np.int32)
        self.is_taken = np.zeros(n_rows, bool)
        # Names a response together with its KV: where the KV is recomputed, the number changes too.
        self.serial = np.zeros(n_rows, np.int64)
        self._n_serials = 0
        self.requests: list[Request | None] = [None] * n_rows
        self.prompts: list[Prompt | None] = [None] * n_rows

    def put(self, row: int, item: PartialResponse, prompt: Prompt, pages: Pages) -> None:
        """Give a row to a response, with all its pages, the prompt's included."""
        request = item.request
        self.settle([row])
        start, end = len(request.prompt), len(request.prompt) + len(item.tokens)
        self._tokens[row, :start], self._tokens[row, start:end] = request.prompt, item.tokens
        self._logp[row, start:end], self._version[row, start:end] = item.logp, item.version
        self.start[row], self.length[row], self.limit[row] = start, end, start + request.max_new_tokens
        self.order[row] = item.order
        self.words[row] = np.array(request.key.words(), np.uint32).view(np.int32)
        self.table[row, : len(pages)], self.table[row, len(pages) :] = pages, 0
        self.n_pages[row] = len(pages)
        self.is_taken[row] = True
        self.requests[row], self.prompts[row] = request, prompt
        self.newest[row] = self._tokens[row, end - 1]
        self._n_serials += 1
        self.serial[row] = self._n_serials

    def renew(self, rows: Sequence[int]) -> None:
        """The KV of these rows is recomputed: new serial numbers, so that copies under the old ones are not used."""
        self.settle(rows)
        self.newest[list(rows)] = self._tokens[list(rows), self.length[list(rows)] - 1]
        self.serial[list(rows)] = np.arange(self._n_serials + 1, self._n_serials + 1 + len(rows))
        self._n_serials += len(rows)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} holds no response"
        return request

    def prompt(self, row: int) -> Prompt:
        prompt = self.prompts[row]
        assert prompt is not None, f"row {row} holds no response"
        return prompt

    def own_pages(self, row: int) -> Pages:
        """Pages that are this row's alone."""
        return self.table[row, self.prompt(row).n_shared : self.n_pages[row]].copy()

    def give_up(self, row: int, n_pages: int) -> None:
        """The first own pages of a row are another's from now on."""
        n_shared, end = self.prompt(row).n_shared, int(self.n_pages[row])
        self.table[row, n_shared : end - n_pages] = self.table[row, n_shared + n_pages : end]
        self.n_pages[row] -= n_pages

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[rows, columns], as far as there are any."""
        self.settle()
        return self._tokens

    def read(self, row: int) -> PartialResponse:
        """The response on this row so far."""
        self.settle([row])
        part = slice(int(self.start[row]), int(self.length[row]))
        arrays = (array[row, part].copy() for array in (self._tokens, self._logp, self._version))
        return PartialResponse(self.request(row), int(self.order[row]), *arrays)

    def running(self, row: int) -> Running:
        """The response on this row as a draft needs it; the token behind a draft still has to fit."""
        length, start = int(self.length[row]), int(self.start[row])
        room = int(self.limit[row]) - length - 1
        return Running(self.request(row).group, int(self.order[row]), self.tokens[row, :length], start, room)

    def free(self, row: int) -> None:
        self.is_taken[row], self.n_pages[row], self.length[row] = False, 0, 1
        self.table[row] = 0
        self.requests[row] = self.prompts[row] = None

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Move responses to other rows; the source rows are free afterwards."""
        old, new = list(source), list(target)
        self.settle(old)
        width = int(self.length[old].max())
        for history in (self._tokens, self._logp, self._version):
            history[new, :width] = history[old, :width]
        for array in (
            self.start, self.length, self.limit, self.order, self.words, self.table, self.n_pages, self.is_taken,
            self.serial, self.newest,
        ):  # fmt: skip
            array[new] = array[old]
        for i, j in zip(old, new, strict=True):
            self.requests[j], self.prompts[j] = self.requests[i], self.prompts[i]
            self.free(i)

    def add_pages(self, rows: NDArray[np.int64], counts: NDArray[np.int64], pages: Pages) -> None:
        """Append counts[i] further pages to rows[i]."""
        row = np.repeat(rows, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        column = self.n_pages[row] + (np.arange(len(row)) - first)
        self.table[row, column] = pages
        self.n_pages[rows] += counts.astype(np.int32)

    def state(self, n: int) -> NDArray[np.int32]:
        """[9, n] as `DeviceRows` has it."""
        stop = np.where(self.is_taken[:n], RUNNING, EMPTY)
        parts = [self.newest[:n], self.start[:n], self.length[:n], self.limit[:n], stop, *self.words[:n].T]
        return np.stack(parts).astype(np.int32)

    def append(
        self,
        n: int,
        n_new: NDArray[np.int32],
        token: NDArray[np.int32],
        logp: NDArray[Any],
        version: int,
    ) -> None:
        """Append the first n_new[i] of the tick's tokens [K, n] to row i."""
        self.settle()
        self._pending = Pending(n_new.copy(), self.length[:n].copy(), token.copy(), logp.copy(), version)
        row = np.flatnonzero(n_new)
        self.newest[row] = token[n_new[row] - 1, row]
        self.length[:n] += n_new

    def settle(self, rows: Sequence[int] | None = None) -> None:
        """Write what was drawn last where it belongs: of these rows, or of all."""
        pending = self._pending
        if pending is None:
            return
        if rows is None:
            row, step = np.nonzero(np.arange(len(pending.token))[None, :] < pending.n_new[:, None])
            column = pending.column[row] + step
            self._tokens[row, column] = pending.token[step, row]
            self._logp[row, column] = pending.logp[step, row]
            self._version[row, column] = pending.version
            self._pending = None
            return
        for one in rows:
            if one < len(pending.n_new) and (k := int(pending.n_new[one])):
                part = slice(int(pending.column[one]), int(pending.column[one]) + k)
                self._tokens[one, part], self._logp[one, part] = pending.token[:k, one], pending.logp[:k, one]
                self._version[one, part] = pending.version
                pending.n_new[one] = 0  # the row may soon be another's
