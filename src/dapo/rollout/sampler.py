"""One token per row from logits and a uniform number, by inverting the cumulative distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn: temperature divides the logits, then the `top_k` likeliest, then the `top_p` nucleus, then
    what has at least `min_p` of the likeliest token's probability.

    Temperature 0 takes the likeliest token; its log-prob is that at temperature 1. top_k = 0 takes all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        assert self.temperature >= 0, f"temperature {self.temperature} is negative"
        assert 0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]"
        assert self.top_k >= 0, f"top_k {self.top_k} is negative"
        assert 0 <= self.min_p <= 1, f"min_p {self.min_p} is not in [0, 1]"


def sample(logits: Tensor, noise: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """logits [B, V], noise [B] in (0, 1) -> (token [B], logp [B]).

    `logp` is the token's log-prob under the *whole* distribution at the sampling temperature, also where top-p or top-k
    cut it. Token i is drawn where cdf(i − 1) ≤ noise < cdf(i), tokens in vocabulary order, so that a row's token
    depends on that row alone. Where a row's logits are not finite its logp is not finite either, and its token is any.
    """
    logp = torch.log_softmax(logits / (params.temperature or 1.0), dim=-1)  # [B, V]
    if params.temperature == 0:
        token = logits.argmax(-1)
    else:
        weight = logp.exp()
        if params.top_k or params.top_p < 1:
            weight = _nucleus(weight, params)
        if params.min_p:
            weight = weight.where(weight >= params.min_p * weight.amax(-1, keepdim=True), 0)
        cdf = weight.cumsum(-1, dtype=torch.float64)
        total = cdf[:, -1]
        # Below the total, so that the first cdf above it exists and belongs to a token of positive probability.
        mark = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cdf, mark[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None])[:, 0]


def _nucleus(weight: Tensor, params: SamplingParams) -> Tensor:
    """Zero outside the `top_k` likeliest tokens and, of these, outside the smallest set that holds `top_p`.

    Equal probabilities are ranked in vocabulary order.
    """
    ranked, order = weight.sort(dim=-1, descending=True, stable=True)
    if params.top_k:
        ranked[:, params.top_k :] = 0
    cumulative = ranked.cumsum(-1, dtype=torch.float64)
    before = cumulative - ranked
    ranked.masked_fill_(before >= params.top_p * cumulative[:, -1:], 0)
    return torch.zeros_like(weight).scatter_(-1, order, ranked)
