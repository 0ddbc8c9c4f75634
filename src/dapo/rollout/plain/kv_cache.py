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
            # Zeros, not garbage: what lies behind the mask is multiplied by 0, which only finite numbers survive.
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except torch.AcceleratorError:  # the card has failed, of which the cache's size is innocent
            raise
        except RuntimeError as error:  # on a CPU it has no type of its own
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
        """Forget rows that hold non-finite numbers: the next sequence there must not multiply them by 0."""
        self.data[:, :, list(rows)] = 0
