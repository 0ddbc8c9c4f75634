"""The decode step of a few rows in one launch (`step.cu`): its sizes, its arguments, and which models it can do."""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dapo.rollout.families import Layer, Transformer
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.persistent.driver import DriverError, Kernel, compiled
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.local.weights import is_gated, side_by_side

SOURCE = Path(__file__).with_name("step.cu")
MOST_ROWS = 16
MOST_SPLITS = 32  # parts of a row's keys
UNIT = 64  # terms of a product: a line of memory
TILE_BYTES = 20_000  # of shared memory, for outputs before the warps' sums are added
LEAST_STAGES = 4
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Sizes:
    """A model's sizes and how the work is cut, as step.cu has them."""

    H: int
    I: int  # noqa: E741
    NQ: int
    NK: int
    D: int
    V: int
    LAYERS: int
    PAGE: int
    ROWS: int
    BLOCKS: int
    HAS_BIAS: int
    HAS_NORM: int
    EPS: float
    SCALE: float
    WARPS: int = 8
    SPAN: int = 1
    DEPTH: int = 4
    STAGES: int = 0
    TILES: int = 0

    def fitted(self, bytes_of_a_block: int) -> Sizes:
        """With as many tiles and stages as so much shared memory holds."""
        tile = self.WARPS * self.ROWS * 16 * 4
        joined = self.WARPS * self.NQ // self.NK * self.D * 4  # attention joins its warps where tiles are
        tiles = replace(self, TILES=max(TILE_BYTES // tile, -(-joined // tile)), STAGES=0)
        return replace(tiles, STAGES=(bytes_of_a_block - tiles.shared_bytes) // (self.WARPS * self.SPAN * UNIT * 32))

    @property
    def shared_bytes(self) -> int:
        units = max(-(-self.H // UNIT // self.WARPS), self.DEPTH * 8 // self.ROWS)
        at_hand = -(-units // self.SPAN) * self.SPAN * self.ROWS
        pieces = self.WARPS * UNIT * 2 * (self.STAGES * self.SPAN * 16 + at_hand)
        floats = self.WARPS * (self.TILES * self.ROWS * 16 + self.ROWS + 2 * 8)
        return pieces + 4 * floats + self.LAYERS * ctypes.sizeof(LayerPointers) + 80

    @property
    def macros(self) -> list[str]:
        return [f"-D{name}={value!r}{'f' * isinstance(value, float)}" for name, value in vars(self).items()]


class LayerPointers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "qkv", "out", "gate_up", "down", "bias", "input_norm", "post_norm", "query_norm", "key_norm", "keys",
            "values",
        )
    ]  # fmt: skip


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "layers", "embedding", "norm", "head", "cos", "sin", "token", "table", "length", "stop", "x", "mixed",
            "gated", "qkv", "part", "part_max", "part_sum", "logits", "arrived", "barrier",
        )),
        *((name, ctypes.c_int64) for name in ("table_stride", "page_stride", "head_stride", "token_stride")),
        ("rows", ctypes.c_int),
        ("splits", ctypes.c_int),
    ]  # fmt: skip


def persistent_step(model: Transformer, cache: PagedCache, rows: DeviceRows) -> PersistentStep | None:
    """Compiled and launched once over no rows; None where it is not known to be worth it, or cannot be had."""
    if not can_persist(model, cache):
        return None
    try:
        few = PersistentStep(model, cache, rows)
        for n in range(8, MOST_ROWS + 1, 8):
            few.launch(few.logits_like, n_computed=n, n=0)
    except DriverError as error:
        warnings.warn(f"A step of few rows takes many launches instead of one: {error}", stacklevel=2)
        return None
    return few


def can_persist(model: Transformer, cache: PagedCache) -> bool:
    """Whether `step.cu` knows such a model and is known to be worth it on such a device."""
    device = model.policy.device
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return is_known(model, cache) and is_worth_it(sizes_of(model, cache, n_processors(device)), shared_memory(device))


def is_known(model: Transformer, cache: PagedCache) -> bool:
    policy, config, group = model.policy, model.policy.config, model.n_query_heads // cache.n_heads
    widths = (config.hidden_size, config.intermediate_size, model.n_query_heads * cache.head_dim)
    return (
        all(width % UNIT == 0 for width in widths)
        and cache.head_dim in (64, 128)
        and group <= 8
        and cache.page_tokens % 16 == 0
        and getattr(policy.head, "bias", None) is None
        and type(policy.head) is nn.Linear
        and type(policy.backbone.embed_tokens) is nn.Embedding
        and all(is_plain(layer) for layer in model.layers)
        and all(is_laid_out(tensor) for tensor in (model.cos, model.sin, *policy.backbone.parameters()))
        and is_laid_out(policy.head.weight)
    )


def is_laid_out(tensor: Tensor) -> bool:
    """As 16 bytes at a time can be read."""
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def is_worth_it(sizes: Sizes, bytes_of_a_block: int) -> bool:
    """Enough weights are under way, and no block reads all rows twice for a product: wider models were not measured."""
    fitted = [replace(sizes, ROWS=rows).fitted(bytes_of_a_block) for rows in range(8, MOST_ROWS + 1, 8)]
    return sizes.H <= 16 * sizes.BLOCKS and all(one.STAGES >= LEAST_STAGES for one in fitted)


def is_plain(layer: Layer) -> bool:
    """Matrices without adapters in their own precision, silu(gate) · up, biases at most of q, k and v, no window."""
    attention, mlp = layer.attention, layer.mlp
    if not is_gated(layer) or layer.window is not None:
        return False
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    biases = [getattr(linear, "bias", None) is not None for linear in linears]
    return all(type(linear) is nn.Linear for linear in linears) and len(set(biases[:3])) == 1 and not any(biases[3:])


def sizes_of(model: Transformer, cache: PagedCache, blocks: int) -> Sizes:
    first, policy = model.layers[0], model.policy
    return Sizes(
        H=policy.config.hidden_size, I=policy.config.intermediate_size, NQ=model.n_query_heads, NK=cache.n_heads,
        D=cache.head_dim, V=len(policy.head.weight), LAYERS=len(model.layers), PAGE=cache.page_tokens, ROWS=8,
        BLOCKS=blocks, HAS_BIAS=int(first.attention.q_proj.bias is not None),
        HAS_NORM=int(first.query_norm is not None), EPS=float(first.input_norm.variance_epsilon),
        SCALE=model.scaling * LOG2E,
    )  # fmt: skip


class PersistentStep:
    """Logits behind the newest tokens of a few rows, whose keys and values go into the cache."""

    def __init__(self, model: Transformer, cache: PagedCache, rows: DeviceRows, *, n_blocks: int = 0) -> None:
        """`n_blocks` stay until the end; as many as the GPU has processors, if 0."""
        policy, device = model.policy, model.policy.device
        self.sizes = sizes = sizes_of(model, cache, n_blocks or n_processors(device))
        self.held: list[Tensor] = []  # what only this object refers to, by its address
        like = model.layers[0].input_norm.weight
        self.logits_like = torch.empty(0, sizes.V, dtype=torch.float32, device=device)
        cells = MOST_ROWS * sizes.NK * MOST_SPLITS
        part = self.logits_like.new_empty(cells, sizes.NQ // sizes.NK * sizes.D)
        part_max, part_sum = self.logits_like.new_empty(2, cells, 8)
        self.counts = torch.zeros(MOST_ROWS * sizes.NK + 2, dtype=torch.int32, device=device)
        at, norm, pages = self.address, policy.backbone.norm, cache.keys[0]
        self.arguments = Arguments(
            layers=at(self.layer_table(model, cache)), embedding=at(policy.backbone.embed_tokens.weight),
            norm=at(norm.weight), head=at(policy.head.weight), cos=at(model.cos.contiguous()),
            sin=at(model.sin.contiguous()), token=at(rows.token), table=at(rows.table), length=at(rows.length),
            stop=at(rows.stop), x=at(like.new_empty(MOST_ROWS, sizes.H)), gated=at(like.new_empty(MOST_ROWS, sizes.I)),
            mixed=at(like.new_empty(MOST_ROWS, sizes.NQ * sizes.D)),
            qkv=at(like.new_empty(MOST_ROWS, (sizes.NQ + 2 * sizes.NK) * sizes.D)), part=at(part),
            part_max=at(part_max), part_sum=at(part_sum), barrier=at(self.counts), arrived=at(self.counts[2:]),
            table_stride=rows.table.stride(0), page_stride=pages.stride(0), head_stride=pages.stride(1),
            token_stride=pages.stride(2),
        )  # fmt: skip
        self.kernels: dict[int, tuple[Kernel, Sizes]] = {}

    def address(self, tensor: Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()

    def layer_table(self, model: Transformer, cache: PagedCache) -> Tensor:
        """Where every layer's weights, keys and values are, on the device."""
        table, at = (LayerPointers * len(model.layers))(), self.address
        for i, (to, layer) in enumerate(zip(table, model.layers, strict=True)):
            attention, mlp = layer.attention, layer.mlp
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            to.qkv = at(side_by_side([linear.weight for linear in qkv]))
            to.gate_up = at(side_by_side([mlp.gate_proj.weight, mlp.up_proj.weight]))
            to.out, to.down = at(attention.o_proj.weight), at(mlp.down_proj.weight)
            to.input_norm, to.post_norm = at(layer.input_norm.weight), at(layer.post_norm.weight)
            to.keys, to.values = at(cache.keys[i]), at(cache.values[i])
            if qkv[0].bias is not None:
                to.bias = at(side_by_side([linear.bias for linear in qkv]))
            if layer.query_norm is not None and layer.key_norm is not None:
                to.query_norm, to.key_norm = at(layer.query_norm.weight), at(layer.key_norm.weight)
        return torch.frombuffer(bytearray(bytes(table)), dtype=torch.int64).to(model.policy.device)

    def logits(self, n: int) -> Tensor:
        """[n, V] in float32 behind the newest tokens of rows 0..n−1."""
        logits = self.logits_like.new_empty(n, self.sizes.V)
        self.launch(logits, n_computed=-(-n // 8) * 8, n=n)
        return logits

    def launch(self, logits: Tensor, *, n_computed: int, n: int) -> None:
        kernel, sizes = self.kernel(n_computed)
        arguments = Arguments.from_buffer_copy(self.arguments)
        arguments.logits, arguments.rows = logits.data_ptr(), n
        arguments.splits = splits(max(n, 1) * sizes.NK, sizes.BLOCKS)
        kernel.launch(sizes.BLOCKS, sizes.WARPS * 32, sizes.shared_bytes, arguments)

    def kernel(self, rows: int) -> tuple[Kernel, Sizes]:
        if rows not in self.kernels:
            sizes = replace(self.sizes, ROWS=rows).fitted(shared_memory(self.logits_like.device))
            self.kernels[rows] = compiled(SOURCE, "decode_step", sizes.macros, sizes.shared_bytes), sizes
        return self.kernels[rows]


def splits(pairs: int, blocks: int) -> int:
    """Parts of a row's keys, so that so many rows and key heads keep the blocks busy."""
    return max(1, min(MOST_SPLITS, blocks // pairs))


def n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes that a block can have at most."""
    properties: Any = torch.cuda.get_device_properties(device)
    most: int = properties.shared_memory_per_block_optin
    return most
