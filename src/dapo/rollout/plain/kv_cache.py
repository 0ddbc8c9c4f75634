"""Keys and values of the sequences in flight: one dense row per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dapo.errors import EngineError


class KVCache:
    """Keys and values [rows, heads, tokens, head dimension] for every layer."""

    def __init__(
        self,
        *,
        n_layers: int,
        rows: int,
        n_heads: int,
        max_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (n_layers, 2, rows, n_heads, max_tokens, head_dim)
        try:
            # Zeros, not empty: masked values are multiplied by 0, which must not meet NaN or inf.
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except torch.AcceleratorError:  # the GPU has failed; the cache's size is not the cause
            raise
        except RuntimeError as error:  # out of memory has no type of its own on a CPU
            size = 2 * n_layers * rows * n_heads * max_tokens * head_dim * dtype.itemsize / 2**30
            raise EngineError(
                f"rollout.max_concurrent_sequences = {rows}: their KV cache of {max_tokens} tokens each takes "
                f"{size:.1f} GiB, which is not free on the device.",
                remedy="Lower it, or limits.max_response_tokens.",
            ) from error
        self.keys = [layer[0] for layer in self.data]
        self.values = [layer[1] for layer in self.data]

    def move(self, source: Sequence[int], target: Sequence[int], n_tokens: int) -> None:
        """Copy the first tokens of rows onto other rows."""
        self.data[:, :, list(target), :, :n_tokens] = self.data[:, :, list(source), :, :n_tokens]

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows that hold non-finite numbers: the next response there masks by multiplying with 0."""
        self.data[:, :, list(rows)] = 0
