"""What a training pass is measured on: rows of random tokens, of one length or of log-normal lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dapo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainLoad:
    """Sequences of one update; `is_checkpointed` recomputes activations on both sides."""

    name: str
    lengths: tuple[int, ...]
    is_checkpointed: bool = False
    is_uneven: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def parse_load(text: str) -> TrainLoad:
    """ "8x1024", "1x16384c" or "lognormal:64:8192"; lengths of the last are the same every time."""
    uneven = re.fullmatch(r"lognormal:(\d+):(\d+)", text)
    if uneven:
        import numpy as np

        from dapo.bench.rollout_workloads import LOG_NORMAL_MU, LOG_NORMAL_SIGMA

        rows, cap = int(uneven[1]), int(uneven[2])
        drawn = np.random.default_rng(0).lognormal(LOG_NORMAL_MU, LOG_NORMAL_SIGMA, rows)
        return TrainLoad(text, tuple(int(n) for n in np.clip(drawn, 2, cap)), is_uneven=True)
    even = re.fullmatch(r"(\d+)x(\d+)(c?)", text)
    if even is None or int(even[2]) < 2 or int(even[1]) < 1:
        raise ConfigError(f"--loads {text}: cannot be read.", remedy="Write 8x1024, 1x16384c or lognormal:64:8192.")
    return TrainLoad(text, (int(even[2]),) * int(even[1]), is_checkpointed=even[3] == "c")


def sequences(load: TrainLoad, vocabulary: int) -> list[list[int]]:
    """Token ids for every row, the same every time."""
    import numpy as np

    generator = np.random.default_rng(1)
    return [generator.integers(3, vocabulary, n).tolist() for n in load.lengths]
