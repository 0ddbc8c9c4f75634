"""Compile every Triton kernel for a GPU that need not be there, by calling what launches them; prints their names.

Usage: python compile_kernels.py COMPUTE_CAPABILITY. The interpreter, which tests the kernels' logic, accepts more than
the compiler does. Nothing is launched: `run` stops after compiling.
"""

import sys
from types import SimpleNamespace
from typing import get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dapo.models.kernels import exact_linear, gather, layers, logits, quantized
from dapo.models.quantized import Kind, level_pairs, quantize
from dapo.rollout.local import kernels
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.ops import TritonOps
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.sampler import SamplingParams

HIDDEN, WIDTH, VOCABULARY = 1536, 8960, 151_936  # Qwen2.5-1.5B: 12 query heads over 2 key heads of 128
QUERIES, KEYS, D = 12, 2, 128


def main(capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    stub = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _device: 0
    )
    triton.runtime.driver.set_active(stub)
    compiled: set[str] = set()
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, **options: object) -> object:
        made = run(self, *args, **{**options, "warmup": True})
        assert made.asm["cubin"], "nothing for the card"
        if self.fn.__name__ == "exact_linear_kernel":  # of another kind for one tile: other bits
            assert ("wgmma" in made.asm["ptx"]) == (capability == 90)
            assert made.metadata.shared <= options["num_stages"] * (options["BLOCK_T"] + options["BLOCK_N"]) * 128
        compiled.add(self.fn.__name__)
        return made

    JITFunction.run = compile_only
    decode_step(torch.bfloat16)
    training_step(torch.bfloat16)
    frozen_weights(torch.bfloat16)
    exact_products(torch.bfloat16)
    if capability >= 89:
        float8_rows(torch.bfloat16)
    modules = (kernels, exact_linear, gather, layers, logits, quantized)
    launched = {name for part in modules for name in entry_points(part)}
    launched -= {"float8_kernel"} if capability < 89 else set()
    assert compiled == launched, f"not compiled: {launched - compiled}"
    print(*sorted(compiled))


def entry_points(module: object) -> list[str]:
    """Kernels that are launched; what they call is compiled with them."""
    inner = {"rotated", "stored", "philox_uniform", "_rotate_rows"}
    found = [value.fn.__name__ for value in vars(module).values() if isinstance(value, JITFunction)]
    return [name for name in found if name not in inner]


def decode_step(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    cache = PagedCache(n_layers=1, n_pages=4, page_tokens=64, n_heads=KEYS, head_dim=D, dtype=dtype, device=cpu)
    angles = torch.zeros(256, D, dtype=dtype)
    rows = DeviceRows(32, 4, 8, torch.float32, cpu)
    ops = TritonOps(cache, angles, angles, D**-0.5, QUERIES, n_rows=32, n_tokens=VOCABULARY)
    x, norm, head_norm = torch.zeros(4, HIDDEN, dtype=dtype), torch.zeros(HIDDEN, dtype=dtype), angles[0]
    for y in (x, None):
        ops.add_norm(x, y, norm, 1e-6)
    ops.gate(torch.zeros(4, 2 * WIDTH, dtype=dtype))
    qkv = torch.zeros(4, (QUERIES + 2 * KEYS) * D, dtype=dtype)
    for splits, ops.is_exact in ((1, True), (1, False), (8, False)):
        ops.splits = lambda _n, splits=splits: splits  # type: ignore[method-assign]
        for window in (None, 100):
            for norms in (None, (head_norm, head_norm)):
                ops.mix(qkv, 0, norms, 1e-6, window, rows, 100)
                ops.store(qkv, 0, norms, 1e-6, rows)
    is_end = torch.zeros(VOCABULARY, dtype=torch.bool)
    scores = torch.zeros(4, VOCABULARY)
    for sampling in (
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=20, top_p=0.7, min_p=0.1),
    ):
        for ops.is_exact in (False, True):
            ops.draw(scores, sampling, is_end, rows)


def training_step(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, HIDDEN, dtype=dtype), torch.zeros(HIDDEN, dtype=dtype)
    for other in (x, None):
        total, normed, inverse = layers.norm_forward(x, other, weight, 1e-6)
        layers.norm_backward(normed, other, total, weight, inverse)
    layers.gated_backward(x, x, layers.gated_forward(x, x))
    q, k, angle = (torch.zeros(4, n, D, dtype=dtype) for n in (QUERIES, KEYS, 1))
    for is_backward in (False, True):
        layers.rotate(q, k, angle[:, 0], angle[:, 0], is_backward=is_backward)
    places = torch.zeros(4, dtype=torch.int32)
    for heads in (QUERIES, KEYS):
        gather.sum_taken(torch.zeros(4, heads, D, dtype=dtype), places, places)
    scores, target = torch.zeros(4, VOCABULARY), torch.zeros(4, dtype=torch.int64)
    for with_entropy in (False, True):
        logp, normaliser, _ = logits.logit_scores(scores, target, temperature=0.9, with_entropy=with_entropy)
    logits.logit_gradient(scores, target, normaliser, logp, temperature=0.9, dtype=dtype)


def exact_products(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.zeros(*shape, dtype=dtype) for shape in ((4, HIDDEN), (64, HIDDEN), (64,)))
    for tile in exact_linear.TILES:
        exact_linear.exact_linear(x, weight, bias, tile=tile)
        exact_linear.exact_linear(x, weight, dtype=torch.float32, tile=tile)
        exact_linear.exact_linear(x[:, :100], weight[:, :100], tile=tile)


def float8_rows(dtype: torch.dtype) -> None:
    codes, scales = torch.zeros(4, WIDTH, dtype=torch.float8_e4m3fn), torch.zeros(4)
    for width in (HIDDEN, WIDTH):
        x = torch.zeros(4, width, dtype=dtype)
        kernels.float8_kernel[(4,)](x, codes, scales, width, 1e-12, WIDTH=width, BLOCK=4096, num_warps=8)


def frozen_weights(dtype: torch.dtype) -> None:
    shape, pairs = torch.Size((64, HIDDEN)), level_pairs(torch.device("cpu"))
    for kind in get_args(Kind):
        quantized.dequantize(*quantize(torch.zeros(shape), kind), shape, dtype, pairs)


if __name__ == "__main__":
    main(int(sys.argv[1]))
