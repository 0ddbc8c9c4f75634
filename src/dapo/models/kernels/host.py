"""The fused layer's parts for a CPU, in torch: fewer passes over the activations than autograd makes of them."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, its RMS norm, 1 / RMS [T, 1]) of x [T, H]."""
    total = x if residual is None else x + residual
    norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
    inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return total, (total * inverse_rms).mul_(weight), inverse_rms


def norm_backward(
    grad: Tensor, from_sum: Tensor | None, total: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight. With x̂ = x / RMS: dx = (g w − x̂ mean(g w x̂)) / RMS and dw = Σ g x̂."""
    scaled = total * inverse_rms
    product = grad * scaled
    mean = torch.mv(product, weight).div_(total.shape[-1])[:, None]
    grad_x = (grad * weight).addcmul_(scaled, mean, value=-1).mul_(inverse_rms)
    return grad_x if from_sum is None else grad_x.add_(from_sum), product.sum(0)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, heads, D] rotated by their angles [T, D]; the gradient is rotated back."""
    half = cos.shape[-1] // 2
    signs = torch.ones(cos.shape[-1], dtype=sin.dtype)
    signs[half:] = -1
    signed = (sin * (signs if is_backward else -signs))[:, None]
    rotated = [(x * cos[:, None]).addcmul_(torch.cat((x[..., half:], x[..., :half]), dim=-1), signed) for x in (q, k)]
    return rotated[0], rotated[1]
