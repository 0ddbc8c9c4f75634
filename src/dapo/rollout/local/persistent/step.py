"""The decode step of a few rows in one launch (`step.cu`): its sizes, its arguments, and which models it can do."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dapo.rollout.families import Layer
from dapo.rollout.local.persistent.driver import Kernel, compiled
from dapo.rollout.local.weights import is_gated, side_by_side

if TYPE_CHECKING:
    from dapo.rollout.local.decoder import PagedDecoder

SOURCE = Path(__file__).with_name("step.cu")
MOST_ROWS = 16
TILE_BYTES = 20_000  # of shared memory, for outputs before the warps' sums are added
MOST_SPLITS = 32  # parts of a row's keys
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

    def fitted(self, shared_bytes: int) -> Sizes:
        """With as many tiles and stages as so much shared memory holds."""
        group = self.NQ // self.NK
        tile = self.WARPS * self.ROWS * 16 * 4
        tiles = max(TILE_BYTES // tile, -(-self.WARPS * group * self.D * 4 // tile))
        whole = Sizes(**{**self.__dict__, "TILES": tiles, "STAGES": 0})
        stages = (shared_bytes - whole.shared_bytes) // (self.WARPS * self.SPAN * 2048)
        return Sizes(**{**whole.__dict__, "STAGES": stages})

    @property
    def shared_bytes(self) -> int:
        units = -(-self.H // 64 // self.WARPS)
        kept = -(-max(units, self.DEPTH * 8 // self.ROWS) // self.SPAN) * self.SPAN
        pieces = self.WARPS * (self.STAGES * self.SPAN * 2048 + kept * self.ROWS * 128)
        floats = self.WARPS * (self.TILES * self.ROWS * 16 + self.ROWS + 128 + 3 * 8)
        return pieces + 4 * floats + self.LAYERS * ctypes.sizeof(LayerPointers) + 80

    @property
    def macros(self) -> list[str]:
        return [f"-D{name}={value!r}{'f' * isinstance(value, float)}" for name, value in self.__dict__.items()]


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


def can_persist(decoder: PagedDecoder) -> bool:
    """Whether `step.cu` knows such a model, on such a device."""
    policy, cache, group = decoder.policy, decoder.cache, decoder.n_query_heads // decoder.cache.n_heads
    config = policy.config
    if policy.device.type != "cuda" or policy.dtype != torch.bfloat16 or decoder.is_exact or not decoder.has_graphs:
        return False
    widths = (config.hidden_size, config.intermediate_size, decoder.n_query_heads * cache.head_dim)
    return (
        torch.cuda.get_device_capability(policy.device) >= (8, 0)
        and all(width % 64 == 0 for width in widths)
        and cache.head_dim in (64, 128)
        and group <= 8
        and cache.page_tokens % 16 == 0
        and getattr(policy.head, "bias", None) is None
        and type(policy.backbone.embed_tokens) is nn.Embedding
        and all(is_plain(layer) for layer in decoder.layers)
    )


def is_plain(layer: Layer) -> bool:
    """Matrices without adapters in their own precision, silu(gate) · up, biases at most of q, k and v, no window."""
    attention, mlp = layer.attention, layer.mlp
    if not is_gated(layer) or layer.window is not None:
        return False
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    biases = [getattr(linear, "bias", None) is not None for linear in linears]
    return all(type(linear) is nn.Linear for linear in linears) and len(set(biases[:3])) == 1 and not any(biases[3:])


class PersistentStep:
    """Logits behind the newest tokens of a few rows, whose keys and values go into the cache."""

    def __init__(self, decoder: PagedDecoder, *, n_blocks: int = 0) -> None:
        """`n_blocks` stay until the end; as many as the GPU has processors, if 0."""
        self.decoder = decoder
        policy, cache, device = decoder.policy, decoder.cache, decoder.policy.device
        n_blocks = n_blocks or torch.cuda.get_device_properties(device).multi_processor_count
        self.held: list[Tensor] = []  # what only this object refers to by its address
        layers, first = decoder.layers, decoder.layers[0]
        pointers = (LayerPointers * len(layers))()
        for i, (to, layer) in enumerate(zip(pointers, layers, strict=True)):
            attention, mlp = layer.attention, layer.mlp
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            to.qkv = self._address(side_by_side([x.weight for x in qkv]))
            to.out, to.down = self._address(attention.o_proj.weight), self._address(mlp.down_proj.weight)
            to.gate_up = self._address(side_by_side([mlp.gate_proj.weight, mlp.up_proj.weight]))
            if qkv[0].bias is not None:
                to.bias = self._address(side_by_side([x.bias for x in qkv]))
            to.input_norm, to.post_norm = self._address(layer.input_norm.weight), self._address(layer.post_norm.weight)
            if layer.query_norm is not None:
                to.query_norm = self._address(layer.query_norm.weight)
                assert layer.key_norm is not None
                to.key_norm = self._address(layer.key_norm.weight)
            to.keys, to.values = self._address(cache.keys[i]), self._address(cache.values[i])
        table = torch.frombuffer(bytearray(bytes(pointers)), dtype=torch.int64).to(device)
        n_heads, group = cache.n_heads, decoder.n_query_heads // cache.n_heads
        hidden, width = len(first.input_norm.weight), len(first.mlp.gate_proj.weight)
        self.sizes = Sizes(
            H=hidden, I=width, NQ=decoder.n_query_heads, NK=n_heads, D=cache.head_dim, V=len(policy.head.weight),
            LAYERS=len(layers), PAGE=cache.page_tokens, ROWS=8, BLOCKS=n_blocks,
            HAS_BIAS=int(first.attention.q_proj.bias is not None), HAS_NORM=int(first.query_norm is not None),
            EPS=float(first.input_norm.variance_epsilon), SCALE=decoder.scaling * LOG2E,
        )  # fmt: skip
        most, like = MOST_ROWS, first.input_norm.weight
        cells = most * n_heads * MOST_SPLITS
        self.x, self.gated = like.new_empty(most, hidden), like.new_empty(most, width)
        self.qkv = like.new_empty(most, (decoder.n_query_heads + 2 * n_heads) * cache.head_dim)
        self.mixed = like.new_empty(most, decoder.n_query_heads * cache.head_dim)
        part = torch.empty(cells, group * cache.head_dim, dtype=torch.float32, device=device)
        part_max, part_sum = torch.empty(2, cells, 8, dtype=torch.float32, device=device)
        self.counts = counts = torch.zeros(most * n_heads + 2, dtype=torch.int32, device=device)
        rows, norm = decoder.rows, policy.backbone.norm
        cos, sin = decoder.cos.contiguous(), decoder.sin.contiguous()
        self.arguments = Arguments(
            layers=self._address(table), norm=self._address(norm.weight), head=self._address(policy.head.weight),
            cos=self._address(cos), sin=self._address(sin), table=self._address(rows.table),
            length=self._address(rows.length), token=self._address(rows.token),
            embedding=self._address(policy.backbone.embed_tokens.weight), x=self._address(self.x),
            stop=self._address(rows.stop), qkv=self._address(self.qkv),
            mixed=self._address(self.mixed), gated=self._address(self.gated), part=self._address(part),
            part_max=self._address(part_max), part_sum=self._address(part_sum), barrier=self._address(counts),
            arrived=self._address(counts[2:]), table_stride=rows.table.stride(0), page_stride=cache.keys[0].stride(0),
            head_stride=cache.keys[0].stride(1), token_stride=cache.keys[0].stride(2),
        )  # fmt: skip
        self.kernels: dict[int, tuple[Kernel, Sizes]] = {}

    def _address(self, tensor: Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()

    def logits(self, n: int) -> Tensor:
        """[n, V] in float32 behind the newest tokens of rows 0..n−1."""
        logits = torch.empty(n, self.sizes.V, dtype=torch.float32, device=self.x.device)
        kernel, sizes = self._kernel(-(-n // 8) * 8)
        arguments = Arguments.from_buffer_copy(self.arguments)
        arguments.logits, arguments.rows = logits.data_ptr(), n
        arguments.splits = splits(n * sizes.NK, sizes.BLOCKS)
        kernel.launch(sizes.BLOCKS, sizes.WARPS * 32, sizes.shared_bytes, arguments)
        return logits

    def _kernel(self, rows: int) -> tuple[Kernel, Sizes]:
        if rows not in self.kernels:
            properties: Any = torch.cuda.get_device_properties(self.decoder.policy.device)
            sizes = Sizes(**{**self.sizes.__dict__, "ROWS": rows}).fitted(properties.shared_memory_per_block_optin)
            kernel = compiled(SOURCE, "decode_step", sizes.macros, sizes.shared_bytes)
            self.kernels[rows] = kernel, sizes
        return self.kernels[rows]


def splits(pairs: int, blocks: int) -> int:
    """Parts of a row's keys, a power of 2, so that so many rows and key heads keep the blocks busy."""
    n = 1
    while 2 * n * pairs <= blocks and 2 * n <= MOST_SPLITS:
        n *= 2
    return n
