"""The library's RMS norm works in float32 even in a float64 run, whose digits are then the machine's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@contextmanager
def exact_norms() -> Iterator[None]:
    """Llama's norms in the type of what they norm."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        scaled: Tensor = norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return scaled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", forward)
        yield
