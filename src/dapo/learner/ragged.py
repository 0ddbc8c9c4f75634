"""Per-token values of rows of different lengths: stored end to end, handed out so, or as padded [B, T]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ragged:
    """One number per token of every row of a step, on the CPU, without padding."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, fill: float = 0.0) -> None:
        self.lengths = list(lengths)
        self.start = [0, *np.cumsum(self.lengths).tolist()]
        self.flat = torch.full((self.start[-1],), fill, dtype=dtype)

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.float32]], dtype: torch.dtype) -> Ragged:
        made = cls([len(row) for row in rows], dtype)
        if rows:
            made.flat = torch.from_numpy(np.concatenate(rows)).to(dtype)
        return made

    def row(self, index: int) -> Tensor:
        return self.flat[self.start[index] : self.start[index + 1]]

    def put(self, rows: Sequence[int], flat: Tensor) -> None:
        """Store the values of `rows`, given end to end in their order."""
        values = flat.detach().to("cpu", self.flat.dtype)
        at = 0
        for index in rows:
            length = self.lengths[index]
            self.row(index).copy_(values[at : at + length])
            at += length

    def joined(self, rows: Sequence[int], device: torch.device | str) -> Tensor:
        """[N]: the values of the chosen rows, end to end."""
        return torch.cat([self.row(i) for i in rows]).to(device)

    def padded(self, rows: Sequence[int], device: torch.device | str) -> Tensor:
        """[B, T] of the chosen rows, zeros behind each."""
        return torch.nn.utils.rnn.pad_sequence([self.row(i) for i in rows], batch_first=True).to(device)


def token_mask(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[B, T], True on the tokens each row has."""
    length = torch.tensor(list(lengths), device=device)
    return torch.arange(int(length.max()) if len(lengths) else 0, device=device)[None] < length[:, None]
