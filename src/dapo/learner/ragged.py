"""Per-token values of rows of different lengths: stored end to end, handed out so, or as padded [B, T]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.models.device import sent


class Ragged:
    """One number per token of every row of a step, on the CPU, without padding.

    What a GPU computed is on its way until somebody reads: the host does not wait for it, and launches what comes next.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, fill: float = 0.0) -> None:
        self.lengths = list(lengths)
        self.start = [0, *np.cumsum(self.lengths).tolist()]
        self._flat = torch.full((self.start[-1],), fill, dtype=dtype)
        self._on_the_way: list[tuple[list[int], Tensor, torch.cuda.Event]] = []

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.float32]], dtype: torch.dtype) -> Ragged:
        made = cls([len(row) for row in rows], dtype)
        if rows:
            made.flat = torch.from_numpy(np.concatenate(rows)).to(dtype)
        return made

    @property
    def flat(self) -> Tensor:
        """All values, end to end."""
        self.arrive()
        return self._flat

    @flat.setter
    def flat(self, values: Tensor) -> None:
        self._flat, self._on_the_way = values, []

    def arrive(self) -> None:
        """Wait for what is on its way."""
        arriving, self._on_the_way = self._on_the_way, []
        for rows, values, event in arriving:
            event.synchronize()
            self._write(rows, values)

    def row(self, index: int) -> Tensor:
        return self.flat[self.start[index] : self.start[index + 1]]

    def put(self, rows: Sequence[int], flat: Tensor) -> None:
        """Store the values of `rows`, given end to end in their order."""
        values = flat.detach().to(self._flat.dtype)
        if not values.is_cuda:
            self.arrive()  # it is older, and must not overwrite this
            return self._write(rows, values)
        home = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        home.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._on_the_way.append((list(rows), home, event))

    def _write(self, rows: Sequence[int], values: Tensor) -> None:
        at = 0
        for index in rows:
            length = self.lengths[index]
            self._flat[self.start[index] : self.start[index + 1]] = values[at : at + length]
            at += length

    def joined(self, rows: Sequence[int], device: torch.device | str) -> Tensor:
        """[N]: the values of the chosen rows, end to end."""
        return sent(torch.cat([self.row(i) for i in rows]), device)

    def padded(self, rows: Sequence[int], device: torch.device | str) -> Tensor:
        """[B, T] of the chosen rows, zeros behind each."""
        return sent(torch.nn.utils.rnn.pad_sequence([self.row(i) for i in rows], batch_first=True), device)


def token_mask(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[B, T], True on the tokens each row has."""
    length = torch.tensor(list(lengths), device=device)
    return torch.arange(int(length.max()) if len(lengths) else 0, device=device)[None] < length[:, None]
