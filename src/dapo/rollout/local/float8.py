"""Matrix products of a rollout in FP8: half the bytes read, and twice the rate. `rollout.quantization = "fp8"`.

Numbers are e4m3: four bits of exponent, three of mantissa, at most 448. A row of the activations and a row of the
weights (an output) each have a scale of their own, their largest number over 448, so that an outlier costs its own row
alone. Sums are in float32. Norms, attention, keys and values, the head and sampling stay as they are, and so does the
trainer: what it computes for the same tokens differs, and `algorithm.correction` weighs that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.models.policy import Policy
from dapo.models.triton_support import runs_triton

FLOAT8_CAPABILITY = (8, 9)  # of a GPU that has such products
LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # of a row of zeros
WIDTHS = 16  # what rows and columns of a weight have to be a multiple of
# torch's kernel reads scales in blocks of rows, also beyond the last (pytorch issue 133334): room for them.
SCALE_BLOCK = 256

# Few rows are faster where there are many outputs, which fill the processors; else there has to be much to do.
MANY_OUTPUTS, MUCH_WORK = 2**14, 2**33


class Float8:
    """A matrix [out, in] in e4m3, as of the last `refresh`. Implements `Projection`.

    Numbers and scales stay where they are in memory, because graphs read them there.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.codes, self.scales = to_float8(weight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        codes, scales = to_float8(self.weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return float8_product(x, self.codes, self.scales, self.bias)
        if not is_faster(len(x), *self.weight.shape):
            return F.linear(x, self.weight, self.bias)
        codes, scales = to_float8(x)
        return torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scales[:, None],
            scale_b=self.scales[None],
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )


def float8_bytes(policy: Policy) -> int:
    """What the second copy of its layers' matrices takes."""
    return sum(part.numel() for part in policy.backbone.layers.parameters() if part.dim() == 2)


def is_faster(n: int, outputs: int, inputs: int) -> bool:
    """Whether n rows are faster in FP8 than in 16 bits, as measured on an H200 (docs/log.md)."""
    return outputs >= MANY_OUTPUTS or n * outputs * inputs >= MUCH_WORK


def fits(weight: Tensor) -> bool:
    return not any(size % WIDTHS for size in weight.shape)


def float8_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] times a quantized weight [out, in], in plain torch."""
    y = from_float8(*float8_rows(x)) @ from_float8(codes, scales).t()
    return (y if bias is None else y + bias).to(x.dtype)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, K] as numbers in e4m3 and a scale for each row."""
    if not runs_triton(x.device.type):
        return float8_rows(x)
    from dapo.rollout.local.kernels import float8_kernel

    n, width = x.shape
    codes = torch.empty(n, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(-(-n // SCALE_BLOCK) * SCALE_BLOCK, device=x.device)[:n]
    float8_kernel[(n,)](x, codes, scales, x.stride(0), SMALLEST_SCALE, WIDTH=width, BLOCK=4096, num_warps=8)
    return codes, scales


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`to_float8` in plain torch."""
    wide = x.float()
    scales = (wide.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scales[:, None]).to(torch.float8_e4m3fn), scales


def from_float8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales[:, None]
