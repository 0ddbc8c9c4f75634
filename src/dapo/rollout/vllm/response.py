"""A response while vLLM generates it, and the seed of its noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dapo.rollout.engine import Request
from dapo.rollout.partial import PartialResponse

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
SEED_BITS = 63


@dataclass(slots=True)
class Response:
    """A request and the tokens generated so far. `tag` is its request id inside vLLM, while it is there."""

    request: Request
    order: int  # of submission
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    tag: str | None = None

    @classmethod
    def of(cls, item: PartialResponse) -> Response:
        return cls(item.request, item.order, item.tokens.tolist(), item.logp.tolist(), item.version.tolist())

    def partial(self) -> PartialResponse:
        tokens, version = np.array(self.tokens, np.int32), np.array(self.version, np.int32)
        return PartialResponse(self.request, self.order, tokens, np.array(self.logp, np.float32), version)

    def keep(self, n_tokens: int) -> None:
        """Its first tokens; it has left vLLM."""
        del self.tokens[n_tokens:], self.logp[n_tokens:], self.version[n_tokens:]
        self.tag = None

    @property
    def seed(self) -> int:
        """Of vLLM's noise from here on: a function of the key and of the number of tokens so far.

        A partial response that is sent again must not see the noise of its first tokens twice.
        """
        a, b, _, _ = self.request.key.words()
        return ((a | b << 32) ^ (len(self.tokens) * GOLDEN_GAMMA)) & ((1 << SEED_BITS) - 1)
