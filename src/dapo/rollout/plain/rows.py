"""The batch of running responses: one row of arrays per response, on the device but for the counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dapo.rollout.draft import Running
from dapo.rollout.engine import Request
from dapo.rollout.partial import PartialResponse


class DenseRows:
    """State of up to `n_rows` responses. Column t of a row belongs to token t of prompt and response together."""

    def __init__(self, n_rows: int, max_tokens: int, logp_dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(n_rows, max_tokens, dtype=torch.int64, device=device)
        self.logp = torch.zeros(n_rows, max_tokens, dtype=logp_dtype, device=device)
        self.version = torch.zeros(n_rows, max_tokens, dtype=torch.int32, device=device)
        self.words = torch.zeros(n_rows, 4, dtype=torch.int64, device=device)
        # On the host, which plans with them: every tick adds one to `length`, so they never have to be read back.
        self.start = np.zeros(n_rows, np.int64)  # tokens of the prompt
        self.length = np.zeros(n_rows, np.int64)  # tokens so far, the prompt included
        self.limit = np.zeros(n_rows, np.int64)  # tokens at which the response is truncated
        self.order = np.zeros(n_rows, np.int64)
        self.requests: list[Request | None] = [None] * n_rows

    def put(self, rows: Sequence[int], items: Sequence[PartialResponse]) -> None:
        """Give rows to responses."""
        if not rows:
            return
        width = max(len(item.request.prompt) + len(item.tokens) for item in items)
        tokens = np.zeros((len(rows), width), np.int64)
        logp = np.zeros((len(rows), width), np.float64)
        version = np.zeros((len(rows), width), np.int32)
        for i, (row, item) in enumerate(zip(rows, items, strict=True)):
            start, end = len(item.request.prompt), len(item.request.prompt) + len(item.tokens)
            tokens[i, :start], tokens[i, start:end] = item.request.prompt, item.tokens
            logp[i, start:end], version[i, start:end] = item.logp, item.version
            self.start[row], self.length[row], self.order[row] = start, end, item.order
            self.limit[row] = start + item.request.max_new_tokens
            self.requests[row] = item.request
        index = torch.tensor(list(rows), device=self.device)
        self.tokens[index, :width] = torch.from_numpy(tokens).to(self.device)
        self.logp[index, :width] = torch.from_numpy(logp).to(self.device, self.logp.dtype)
        self.version[index, :width] = torch.from_numpy(version).to(self.device)
        self.words[index] = torch.tensor([item.request.key.words() for item in items], device=self.device)

    def read(self, rows: Sequence[int]) -> list[PartialResponse]:
        """The responses on these rows so far."""
        if not rows:
            return []
        width = int(self.length[list(rows)].max())
        index = torch.tensor(list(rows), device=self.device)
        tokens, logp, version = (x[index, :width].cpu().numpy() for x in (self.tokens, self.logp, self.version))
        items = []
        for i, row in enumerate(rows):
            request = self.requests[row]
            assert request is not None, f"row {row} holds no response"
            part = slice(int(self.start[row]), int(self.length[row]))
            items.append(
                PartialResponse(
                    request,
                    int(self.order[row]),
                    tokens[i, part].astype(np.int32),
                    logp[i, part].copy(),
                    version[i, part].copy(),
                )
            )
        return items

    def running(self, rows: Sequence[int]) -> list[Running]:
        """The responses on these rows as a draft needs them."""
        found = []
        for row in rows:
            request, length = self.requests[row], int(self.length[row])
            assert request is not None, f"row {row} holds no response"
            tokens = self.tokens[row, :length].cpu().numpy().astype(np.int32)
            room = int(self.limit[row]) - length - 1
            found.append(Running(request.group, int(self.order[row]), tokens, int(self.start[row]), room))
        return found

    def extend(self, row: int, token: Tensor, logp: Tensor, version: int) -> None:
        """Append several tokens to a row. The caller raises `length`."""
        part = slice(int(self.length[row]), int(self.length[row]) + len(token))
        self.tokens[row, part], self.logp[row, part], self.version[row, part] = token, logp, version

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.requests[row] = None

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Move responses to other rows; the source rows are free afterwards."""
        old, new = list(source), list(target)
        for array in (self.tokens, self.logp, self.version, self.words):
            array[new] = array[old]
        for counter in (self.start, self.length, self.limit, self.order):
            counter[new] = counter[old]
        for i, j in zip(old, new, strict=True):
            self.requests[j], self.requests[i] = self.requests[i], None

    def last_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """Token and position [n] of the newest token of rows 0..n−1."""
        position = torch.from_numpy(self.length[:n] - 1).to(self.device)
        return self.tokens[:n].gather(1, position[:, None])[:, 0], position

    def append(self, n: int, position: Tensor, token: Tensor, logp: Tensor, version: int) -> None:
        """Append a token to rows 0..n−1, whose newest is at `position`. The caller raises `length`."""
        column = position[:, None] + 1
        self.tokens[:n].scatter_(1, column, token[:, None])
        self.logp[:n].scatter_(1, column, logp[:, None].to(self.logp.dtype))
        self.version[:n].scatter_(1, column, version)

    def noise_index(self, n: int) -> Tensor:
        """Index in its response of the next token of rows 0..n−1, [n]."""
        return torch.from_numpy(self.length[:n] - self.start[:n]).to(self.device)
