"""The decode step over paged keys and values, a few tokens a call: on CUDA one graph replay per token.

A graph is captured the first time a batch size of the ladder is needed. It reads the rows' state at fixed addresses on
the device, so that the host only replays it until the tick is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.models.kernels.build import library
from dapo.models.logprobs import head_logits
from dapo.models.policy import Policy
from dapo.rollout.draft import last_counting, spread
from dapo.rollout.families import Transformer, rounded_up
from dapo.rollout.local.block_ops import BlockOps
from dapo.rollout.local.blocks import Span, capacity_for
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.exact import exact_logits, exact_weights, rows_of
from dapo.rollout.local.float8 import Float8
from dapo.rollout.local.host_ops import HostOps
from dapo.rollout.local.layers import through_layers
from dapo.rollout.local.ops import Ops, PlainOps, TritonOps
from dapo.rollout.local.persistent.step import MOST_ROWS, persistent_step
from dapo.rollout.local.rows import BAD, EMPTY, RUNNING, DeviceRows
from dapo.rollout.local.weights import TRANSPOSED_COLUMNS, Adapted, Transposed, keeps_transposed, layer_weights
from dapo.rollout.local.whole_pass import WholePass, can_be_whole
from dapo.rollout.sampler import SamplingParams

# Numbers of tokens read in one pass that have a graph: prompts of few responses, and what an episode heard.
READ_SIZES = (64, 128, 256, 512, 1024)
# A row that pads the batch: no token, length 1, stopped.
DEAD = np.array([0, 0, 1, 0, 1, 0, 0, 0, 0], np.int32)
Drawn = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[Any]]  # length, stop, tokens, log-probs
OpsKind = Literal["auto", "plain", "blocks", "triton"]


class PagedDecoder(Transformer):
    """Prefills prefixes into pages; then generates, tick by tick, a few tokens of every row."""

    def __init__(
        self,
        policy: Policy,
        *,
        n_rows: int,
        max_tokens: int,
        n_pages: int,
        page_tokens: int,
        tokens_per_tick: int,
        ops: OpsKind = "auto",
        is_exact: bool = False,
        is_float8: bool = False,
    ) -> None:
        super().__init__(policy, max_tokens=max_tokens)
        device, dtype = policy.device, policy.dtype
        self.is_exact = is_exact
        self.n_rows = n_rows
        self.cache = PagedCache(
            n_layers=len(self.layers),
            n_pages=n_pages,
            page_tokens=page_tokens,
            n_heads=self.n_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
        )
        logp_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        table_pages = -(-self.max_tokens // page_tokens)
        self.rows = DeviceRows(n_rows, table_pages, tokens_per_tick, logp_dtype, device)
        is_half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.has_graphs = is_half_on_cuda and ops != "plain"
        assert not is_exact or ops == "triton" or self.has_graphs, "exact passes are made of Triton kernels"
        shared = (self.cache, self.cos, self.sin, self.scaling, self.n_query_heads)
        self.ops: Ops = (
            TritonOps(*shared, n_rows=n_rows, n_tokens=len(policy.head.weight), is_exact=is_exact)
            if ops == "triton" or self.has_graphs
            else HostOps(*shared)
            if ops == "auto" and device.type == "cpu" and dtype == torch.float32 and library() is not None
            else BlockOps(*shared)
            if ops in ("auto", "blocks") and device.type == "cpu"
            else PlainOps(*shared)
        )
        can_be_one = isinstance(self.ops, HostOps) and not is_float8 and can_be_whole(self)
        self.whole = WholePass(self) if can_be_one else None
        transposed = self.whole is None and not is_exact and keeps_transposed(policy)
        self.weights = (
            exact_weights(self)
            if is_exact
            else [layer_weights(x, transposed=transposed, is_float8=is_float8) for x in self.layers]
        )
        # Looked up once: each of these names is a search through modules.
        self.embed, self.norm = policy.backbone.embed_tokens, policy.backbone.norm
        self.head = head = policy.head
        transposes_head = transposed and head.weight.shape[1] <= TRANSPOSED_COLUMNS
        self.head_transposed = Transposed(head.weight, getattr(head, "bias", None)) if transposes_head else None
        # A few rows go through all layers and the head in one launch.
        self.few = persistent_step(self, self.cache, self.rows) if self.has_graphs and not is_exact else None
        self.is_end = torch.zeros(head.weight.shape[0], dtype=torch.bool, device=device)
        self.is_end[list(policy.eos_ids)] = True
        self.graphs: dict[tuple[int, SamplingParams, bool], torch.cuda.CUDAGraph] = {}
        self._read_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        read_rows = READ_SIZES[-1] if self.has_graphs else 0
        self._read_rows = DeviceRows(read_rows, table_pages, 1, logp_dtype, device)
        self._pool: Any = None

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        """Keys and values of prefixes ids [m, L] into the cells slots [m, L]; padding has its slot on page 0."""
        for i, keys, values in self.prefixes(ids):
            self.cache.store(i, keys, values, slots)

    def extend(self, ids: Tensor, slots: Tensor, first: Tensor, table: Tensor) -> None:
        """`prefill` behind first [m] tokens whose keys and values are in the pages table [m, pages] already."""
        for i, keys, values in self.extensions(ids, first, lambda layer: self.cache.gathered(layer, table)):
            self.cache.store(i, keys, values, slots)

    def read(self, token: Tensor, length: Tensor, table: Tensor) -> None:
        """Keys and values of tokens [n] of any rows, by the step that generates: each is the last of so many, in pages
        table [n, pages]. Those before it are there already or among the n.
        """
        if isinstance(self.ops, TritonOps):
            self.ops.has_drafts = True  # they attend to each other
        size = next((size for size in READ_SIZES if size >= len(token)), 0) if self.has_graphs else 0
        if size and not self.is_exact:
            self._reads(size, token, length, table).replay()
        else:
            through_layers(self.ops, self.weights, self.embed(token), rows_of(length, table), 0)

    def tick(
        self,
        state: NDArray[np.int32],
        table: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        n_steps: int,
        longest: int,
        serial: NDArray[np.int64],
        meanwhile: Callable[[], None],
    ) -> Drawn:
        """Generate n_steps tokens of each row. Returns length [n], stop [n], tokens and log-probs [n_steps, n].

        state [9, n] and table [n, pages] describe the first rows; `longest` is the largest length among them. A row
        whose keys and values are not those of the last tick has another `serial` number. `meanwhile` is called once the
        device has something to do.
        """
        if isinstance(self.ops, BlockOps):
            meanwhile()
            order = self.ops.blocks.arrange(serial, state[2].astype(np.int64), table, n_steps)
            drawn = self._tick_in_blocks(self.ops, self.ops.blocks.spans, order, state, sampling, n_steps)
            self.ops.blocks.clear(serial[drawn[1] == BAD])
            return drawn
        return self._tick_in_pages(state, table, sampling, n_steps, longest, meanwhile=meanwhile)

    def verify(
        self,
        state: NDArray[np.int32],
        table: NDArray[np.int32],
        sampling: SamplingParams,
        drafts: Sequence[Sequence[int]],
        *,
        longest: int,
        serial: NDArray[np.int64],
        meanwhile: Callable[[], None],
    ) -> Drawn:
        """One pass over the newest token of each row and the draft behind it, which is spread over as many rows.

        Returns what `tick` does: the tokens drawn as far as they count, and where that leaves each row.
        """
        row, ahead = spread(drafts)
        state, first = state[:, row], np.flatnonzero(ahead == 0)
        state[0, ahead > 0] = [token for draft in drafts for token in draft]
        state[2] += ahead.astype(np.int32)
        if isinstance(self.ops, BlockOps):
            meanwhile()
            n_rows = np.bincount(row)
            of = self.ops.blocks.arrange(serial, state[2, first].astype(np.int64), table, n_rows)
            spans = self.ops.blocks.spread(n_rows[of])
            order = np.concatenate([np.arange(first[i], first[i] + n_rows[i]) for i in of])
            drawn = self._tick_in_blocks(self.ops, spans, order, state, sampling, 1)
        else:
            longest += int(ahead.max())
            drawn = self._tick_in_pages(state, table[row], sampling, 1, longest, has_drafts=True, meanwhile=meanwhile)
        length, stop, token, logp = drawn
        last = last_counting(drafts, token[0], stop != RUNNING)
        if isinstance(self.ops, BlockOps):
            self.ops.blocks.clear(serial[stop[last] == BAD])
        shape = (int(ahead.max()) + 1, len(drafts))
        tokens, logps = np.zeros(shape, token.dtype), np.zeros(shape, logp.dtype)
        tokens[ahead, row], logps[ahead, row] = token[0], logp[0]
        return length[last], stop[last], tokens, logps

    @property
    def has_drafts(self) -> bool:
        """Several rows of a step are tokens of one response."""
        return isinstance(self.ops, TritonOps) and self.ops.has_drafts

    def draft_room(self, length: NDArray[np.int32]) -> NDArray[np.int64]:
        """How many tokens may be drafted behind so many.

        A draft does not leave its block: the width of a block decides the last bits of a long row (`SAME_SUMS`), so it
        must follow from the row's own length.
        """
        wide = length.astype(np.int64)
        ends = capacity_for(wide) if isinstance(self.ops, BlockOps) else np.full_like(wide, self.max_tokens)
        return np.minimum(ends, self.max_tokens) - wide

    def _tick_in_pages(
        self,
        state: NDArray[np.int32],
        table: NDArray[np.int32],
        sampling: SamplingParams,
        n_steps: int,
        longest: int,
        *,
        has_drafts: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Drawn:
        n, rows = state.shape[1], self.rows
        size = self.batch_size(n)
        rows.state[:, :n].copy_(torch.from_numpy(state))
        if size > n:
            rows.stop[n:size] = 1  # dead
            rows.length[n:size] = 1
        rows.table[:n, : table.shape[1]].copy_(torch.from_numpy(table))
        rows.clock.zero_()
        if isinstance(self.ops, TritonOps):
            self.ops.has_drafts = has_drafts
        if self.has_graphs:
            graph = self._graph(size, sampling, state, longest, has_drafts)
            for _ in range(n_steps):
                graph.replay()
        else:
            for i in range(n_steps):
                self.step(size, sampling, longest + i)
        meanwhile()
        result = [rows.length[:n], rows.stop[:n], rows.out_token[:n_steps, :n], rows.out_logp[:n_steps, :n]]
        length, stop, token, logp = (part.cpu().numpy() for part in result)
        return length, stop, token, logp

    def _tick_in_blocks(
        self,
        ops: BlockOps,
        spans: list[Span],
        order: NDArray[np.int64],
        state: NDArray[np.int32],
        sampling: SamplingParams,
        n_steps: int,
    ) -> Drawn:
        """With the rows in the order of their blocks, and back."""
        n, rows = state.shape[1], self.rows
        size = rounded_up(n)
        held, tokens, logps = rows.arrays
        ops.spans = spans
        held[:, :n], held[:, n:size] = state[:, order], DEAD[:, None]
        rows.clock.zero_()
        for _ in range(n_steps):
            self.step(size, sampling, 0)
        inverse = np.empty(n, np.int64)
        inverse[order] = np.arange(n)
        return held[2, inverse], held[4, inverse], tokens[:n_steps, inverse], logps[:n_steps, inverse]

    def _reads(self, size: int, token: Tensor, length: Tensor, table: Tensor) -> torch.cuda.CUDAGraph:
        """The graph that reads up to `size` tokens, with these in its rows; the others are dead."""
        rows, (n, width) = self._read_rows, table.shape
        rows.token[:n], rows.length[:n], rows.stop[:n], rows.table[:n, :width] = token, length, RUNNING, table
        rows.length[n:size], rows.stop[n:size] = 1, EMPTY

        def read() -> None:
            through_layers(self.ops, self.weights, self.embed(rows.token[:size]), rows, 0)

        if size not in self._read_graphs:
            self._read_graphs[size] = self._captured(read)
        return self._read_graphs[size]

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of `work`, which runs once before: that compiles kernels and chooses matrix algorithms."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph

    def refresh(self) -> None:
        """The weights have changed: copy them again, where a copy is kept in another order or precision."""
        if self.whole is not None:
            self.whole.refresh()
        layers = (part for layer in self.weights for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
        for part in (*layers, self.head_transposed):
            if isinstance(part, Transposed | Adapted | Float8):
                part.refresh()

    def forget(self) -> None:
        """All rows are free, and serial numbers will be given again."""
        if isinstance(self.ops, BlockOps):
            self.ops.blocks.forget()

    def write_back(self, serial: int, pages: NDArray[np.int32], tokens: slice) -> None:
        """Copy the KV of these tokens into the pages, where the response runs in a block."""
        if isinstance(self.ops, BlockOps):
            content = self.ops.blocks.read(serial, tokens.stop)[:, :, :, tokens.start :]
            self.cache.store_dense(pages, 0, content)

    def step(self, n: int, sampling: SamplingParams, longest: int) -> None:
        """One token of rows 0..n−1: forward pass, sampling, bookkeeping."""
        ops, rows = self.ops, self.rows
        if self.whole is not None and isinstance(ops, HostOps):
            logits = self.whole.logits(rows, ops.spans)
        else:
            logits = self._logits(n, longest)
        ops.draw(logits, sampling, self.is_end, rows)
        rows.clock += 1

    def _logits(self, n: int, longest: int) -> Tensor:
        """[n, V] behind the newest tokens, part by part."""
        if self.few is not None and n <= MOST_ROWS and not self.has_drafts:
            return self.few.logits(n)
        norm, head = self.norm, self.head
        x, y = through_layers(self.ops, self.weights, self.embed(self.rows.token[:n]), self.rows, longest)
        h = self.ops.add_norm(x, y, norm.weight, norm.variance_epsilon)
        if self.head_transposed is not None:
            return self.head_transposed(h)
        logits = exact_logits if self.is_exact else head_logits
        return logits(h, head.weight, getattr(head, "bias", None))

    def batch_size(self, n: int) -> int:
        """Rows computed for n rows: the next rung of the ladder on CUDA, else the next multiple of STEP."""
        if not self.has_graphs:
            return rounded_up(n)
        return min(self.n_rows, next(size for size in ladder() if size >= n))

    def _graph(
        self, n: int, sampling: SamplingParams, state: NDArray[np.int32], longest: int, has_drafts: bool
    ) -> torch.cuda.CUDAGraph:
        """The graph of one step of n rows. Capturing it runs a step, after which the rows are sent again."""
        key = (n, sampling, has_drafts)
        if key not in self.graphs:
            self.graphs[key] = self._captured(lambda: self.step(n, sampling, longest))
            self.rows.state[:, : state.shape[1]].copy_(torch.from_numpy(state))
            self.rows.clock.zero_()
        return self.graphs[key]


def ladder() -> Iterator[int]:
    """Batch sizes that have a graph of their own. Products take 128 rows at a time: what is between costs as much."""
    yield from (1, 2, 4, 8, 16, 24, 32, 48)
    size = 64
    while True:
        yield size
        size += 32 if size < 256 else max(128, size // 8 // 128 * 128)
