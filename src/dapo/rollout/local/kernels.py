"""The decode step's Triton kernels; `ops.py` says in plain torch what each of them computes.

None of them is recompiled for another number of rows: a batch size is only a launch grid. Rows whose `stop` is not 0
are dead: they store into page 0, which is never read, and attend to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PAGE_OF_THE_DEAD = tl.constexpr(0)


@triton.jit
def add_norm_kernel(x, y, weight, out, eps, H: tl.constexpr, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    """x += y; out = RMSNorm(x) · weight. One row a program; sums in float32, rounded where Hugging Face rounds."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < H
    value = tl.load(x + row * H + i, mask=mask, other=0.0)
    if HAS_Y:
        value += tl.load(y + row * H + i, mask=mask, other=0.0)
        tl.store(x + row * H + i, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    normed = (wide * scale).to(value.dtype)
    tl.store(out + row * H + i, normed * tl.load(weight + i, mask=mask, other=0.0), mask=mask)


@triton.jit
def gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """silu(gate) · up for gate_up [n, 2·width]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + i, (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up, mask=mask)


@triton.jit
def rotated(source, norm, c, s, d, mask, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads rotated to their positions: x cos + swap(x) sin, where swap exchanges the halves of a head.

    `source` [M, 1] points to heads of D numbers at d [1, DIM]; c and s are the rotary tables there, the sign in s.
    """
    other = (d + D // 2) % D
    x, swapped = tl.load(source + d, mask=mask, other=0.0), tl.load(source + other, mask=mask, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        weight, other_weight = tl.load(norm + d, mask=d < D, other=0.0), tl.load(norm + other, mask=d < D, other=0.0)
        swapped = (swapped.to(tl.float32) * scale).to(x.dtype) * other_weight
        x = (wide * scale).to(x.dtype) * weight
    return (x.to(tl.float32) * c + swapped.to(tl.float32) * s).to(x.dtype)


@triton.jit
def stored(
    base, norm, c, s, d, keys, values, pages, newest, is_alive, head, eps, page_stride, head_stride, token_stride,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The newest key (rotated) and value [1, DIM] of one row and key head, which are put into their page."""
    one = tl.arange(0, 1)[:, None]
    key = rotated(base + (NQ + head + one) * D, norm, c, s, d, d < D, eps, D, HAS_NORM)
    value = tl.load(base + (NQ + NK + head + one) * D + d, mask=d < D, other=0.0)
    home = tl.load(pages + newest // PAGE, mask=is_alive, other=PAGE_OF_THE_DEAD)
    target = home.to(tl.int64) * page_stride + head * head_stride + (newest % PAGE) * token_stride + d
    tl.store(keys + target, key, mask=d < D)
    tl.store(values + target, value, mask=d < D)
    return key, value


# Not specialised: a table of another width is not another program.
@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    qkv, cos, sin, query_norm, key_norm, keys, values, table, length, stop, out, part, part_max, part_sum,
    eps, scale, table_stride, page_stride, head_stride, token_stride,
    NQ: tl.constexpr, NK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, IS_STORED: tl.constexpr,
):  # fmt: skip
    """Rotate, store and attend, for one row's newest token and HEADS key heads, over this split's part of its keys.

    The G queries of a key head are the rows of one small matrix (padded to GROUP, for `tl.dot` takes no fewer than 16).
    Softmax is computed online, with base-2 exponentials. The newest key and value are stored in their page and enter
    the sum from registers, not through memory; unless `store_kernel` has stored them (IS_STORED), after which they are
    keys like the others. With SPLITS = 1 the result is final; otherwise `combine_kernel` joins the parts.
    """
    row, split = (tl.program_id(0) // (NK // HEADS)).to(tl.int64), tl.program_id(1)
    is_alive = tl.load(stop + row) == 0
    newest = tl.where(is_alive, tl.load(length + row), 1) - 1  # its position, which is also the number of older keys
    behind = newest + 1 if IS_STORED else newest
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(newest + 1 - WINDOW, 0)
    first = oldest // BLOCK * BLOCK
    keys_per_split = tl.cdiv(tl.cdiv(behind - first, BLOCK), SPLITS) * BLOCK
    begin = first + split * keys_per_split
    end = tl.minimum(begin + keys_per_split, behind)

    g, d, t = tl.arange(0, GROUP), tl.arange(0, DIM)[None, :], tl.arange(0, BLOCK)
    is_query = (g < G)[:, None] & (d < D)
    c = tl.load(cos + newest.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + newest.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    base = qkv + row * (NQ + 2 * NK) * D
    for i in tl.static_range(HEADS):
        head = tl.program_id(0) % (NK // HEADS) * HEADS + i
        query = rotated(base + (head * G + g)[:, None] * D, query_norm, c, s, d, is_query, eps, D, HAS_NORM)
        top = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        acc = tl.zeros([GROUP, DIM], tl.float32)
        for start in range(begin, end, BLOCK):
            at = start + t
            is_seen = at < end
            if WINDOW > 0:
                is_seen = is_seen & (at >= oldest)
            if PAGE >= BLOCK:
                page = tl.load(table + row * table_stride + start // PAGE).to(tl.int64)
                cell = page * page_stride + head * head_stride + (at % PAGE) * token_stride
            else:
                pages = tl.load(table + row * table_stride + at // PAGE, mask=is_seen, other=0).to(tl.int64)
                cell = pages * page_stride + head * head_stride + (at % PAGE) * token_stride
            is_cell = is_seen[:, None] & (d < D)
            key = tl.load(keys + cell[:, None] + d, mask=is_cell, other=0.0)
            value = tl.load(values + cell[:, None] + d, mask=is_cell, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
            score = tl.where(is_seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            if WINDOW > 0:  # a first block may hold no key at all: −inf − (−inf) would be NaN
                new_top = tl.maximum(new_top, -1e30)
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            top = new_top
        if not IS_STORED and split == SPLITS - 1:
            new_key, new_value = stored(
                base, key_norm, c, s, d, keys, values, table + row * table_stride, newest, is_alive, head, eps,
                page_stride, head_stride, token_stride, NQ, NK, D, PAGE, HAS_NORM,
            )  # fmt: skip
            new_score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * (scale * LOG2E)
            last_top = tl.maximum(top, new_score)
            new_weight, last_shrink = tl.exp2(new_score - last_top), tl.exp2(top - last_top)
            total = total * last_shrink + new_weight
            acc = acc * last_shrink[:, None] + new_weight[:, None] * new_value.to(tl.float32)
            top = last_top

        place = (head * G + g)[:, None] * D + d
        if SPLITS == 1:
            tl.store(out + row * NQ * D + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_query)
        else:
            piece = row * SPLITS + split
            tl.store(part + piece * NQ * D + place, acc, mask=is_query)
            tl.store(part_max + piece * NQ + head * G + g, top, mask=g < G)
            tl.store(part_sum + piece * NQ + head * G + g, total, mask=g < G)


@triton.jit(do_not_specialize=["table_stride"])
def store_kernel(
    qkv, cos, sin, key_norm, keys, values, table, length, stop, eps,
    table_stride, page_stride, head_stride, token_stride,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Store one row's newest key and value, as `attend_kernel` does: for rows that attend to each other's."""
    head, row = tl.program_id(0) % NK, (tl.program_id(0) // NK).to(tl.int64)
    is_alive = tl.load(stop + row) == 0
    newest = tl.where(is_alive, tl.load(length + row), 1) - 1
    d = tl.arange(0, DIM)[None, :]
    c = tl.load(cos + newest.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + newest.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    base = qkv + row * (NQ + 2 * NK) * D
    stored(
        base, key_norm, c, s, d, keys, values, table + row * table_stride, newest, is_alive, head, eps,
        page_stride, head_stride, token_stride, NQ, NK, D, PAGE, HAS_NORM,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    part, part_max, part_sum, out, NQ: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr
):
    """Join the splits of a row's keys: each is weighted by exp2 of its maximum, as online softmax does."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    cell = (row * SPLITS + s) * NQ + head
    top = tl.load(part_max + cell)
    best = tl.max(top, 0)
    weight = tl.where(top > float("-inf"), tl.exp2(top - best), 0.0)
    total = tl.sum(weight * tl.load(part_sum + cell), 0)
    acc = tl.load(part + cell[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * NQ + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def philox_uniform(w0, w1, w2, w3, position):
    """The number in (0, 1) of `rollout.noise.uniform`: Philox-4x32-10, key (w0, w1), counter (position, 0, w2, w3)."""
    x0, x1, x2, x3 = position.to(tl.uint32), tl.zeros_like(position).to(tl.uint32), w2, w3
    a = tl.full([], 0xD2511F53, tl.uint32)
    b = tl.full([], 0xCD9E8D57, tl.uint32)
    k0, k1 = w0, w1
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(x0, a), x0 * a
        high_b, low_b = tl.umulhi(x2, b), x2 * b
        x0, x1, x2, x3 = high_b ^ x1 ^ k0, low_b, high_a ^ x3 ^ k1, low_a
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    bits = ((x0 >> 6).to(tl.int64) << 26) | (x1 >> 6).to(tl.int64)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def cut_kernel(
    logits, cut, V, inverse_temperature, top_k, top_p, min_p, logits_stride,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest scaled logit that top-k, then top-p, then min-p leave in; found by bisection, one program per row.

    After the search `low` keeps enough (k tokens, or the share p of what top-k left) and lies within 1e-7 of the
    largest value that does. Tokens that tie with the last one kept are kept too.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    source = logits + row * logits_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        best = tl.maximum(best, tl.load(source + start + i, mask=start + i < V, other=float("-inf")))
    top = tl.max(best, 0) * inverse_temperature
    found = top - 88.0  # e^-88: what lies below has no weight in float32
    if HAS_TOP_K:
        low, high = found, top
        for _ in range(32):
            middle = 0.5 * (low + high)
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, V, BLOCK):
                z = tl.load(source + start + i, mask=start + i < V, other=float("-inf")) * inverse_temperature
                count += (z >= middle).to(tl.int32)
            is_enough = tl.sum(count, 0) >= top_k
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        found = tl.maximum(found, low)
    if HAS_TOP_P:
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            z = tl.load(source + start + i, mask=start + i < V, other=float("-inf")) * inverse_temperature
            kept += tl.where(z >= found, tl.exp(z - top), 0.0)
        wanted = top_p * tl.sum(kept, 0)
        low, high = found, top
        for _ in range(32):
            middle = 0.5 * (low + high)
            kept = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                z = tl.load(source + start + i, mask=start + i < V, other=float("-inf")) * inverse_temperature
                kept += tl.where(z >= middle, tl.exp(z - top), 0.0)
            is_enough = tl.sum(kept, 0) >= wanted
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        found = tl.maximum(found, low)
    if HAS_MIN_P:
        found = tl.maximum(found, top + tl.log(min_p))
    tl.store(cut + row, found)


@triton.jit(do_not_specialize_on_alignment=["cut", "part_max", "part_all", "part_kept"])
def weigh_kernel(
    logits, cut, part_max, part_all, part_kept, V, inverse_temperature, logits_stride,
    HAS_CUT: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of one block of a row's scaled logits: the only pass over all of them."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * logits_stride + i, mask=i < V, other=float("-inf")) * inverse_temperature
    top = tl.max(z, 0)
    weight = tl.exp(z - tl.where(top == float("-inf"), 0.0, top))
    cell = row * CHUNKS + chunk
    tl.store(part_max + cell, top)
    tl.store(part_all + cell, tl.sum(weight, 0))
    if HAS_CUT:
        tl.store(part_kept + cell, tl.sum(tl.where(z >= tl.load(cut + row), weight, 0.0), 0))


@triton.jit
def draw_kernel(
    logits, cut, part_max, part_all, part_kept, state, is_end, out_token, out_logp, clock,
    V, inverse_temperature, logits_stride, rows,
    HAS_CUT: tl.constexpr, IS_GREEDY: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample one token per row: that at which the cumulative weight passes the noise, in vocabulary order.

    First the block in which it passes, from the blocks' sums; then the token within, from that block alone. `state`
    [9, rows] is as in `rows.py`: token, start, length, limit, stop, and the four words of the noise key.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_UP)
    is_chunk = c < CHUNKS
    maxima = tl.load(part_max + row * CHUNKS + c, mask=is_chunk, other=float("-inf"))
    top = tl.max(maxima, 0)
    shrink = tl.where(maxima > float("-inf"), tl.exp(maxima - top), 0.0)
    sums = tl.load(part_all + row * CHUNKS + c, mask=is_chunk, other=0.0)
    total = tl.sum(tl.where(is_chunk, sums * shrink, 0.0), 0)
    normaliser = top + tl.log(total)

    start, length = tl.load(state + rows + row), tl.load(state + 2 * rows + row)
    if IS_GREEDY:
        chunk = tl.min(tl.where(is_chunk & (maxima == top), c, CHUNKS_UP), 0)
        chunk = tl.minimum(chunk, CHUNKS - 1)
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * logits_stride + i, mask=i < V, other=float("-inf")) * inverse_temperature
        token = tl.min(tl.where(z == top, i, V - 1), 0)
    else:
        if HAS_CUT:
            sums = tl.load(part_kept + row * CHUNKS + c, mask=is_chunk, other=0.0)
        weight = tl.where(is_chunk, sums * shrink, 0.0).to(tl.float64)
        below = tl.cumsum(weight, 0)
        w0 = tl.load(state + 5 * rows + row).to(tl.uint32, bitcast=True)
        w1 = tl.load(state + 6 * rows + row).to(tl.uint32, bitcast=True)
        w2 = tl.load(state + 7 * rows + row).to(tl.uint32, bitcast=True)
        w3 = tl.load(state + 8 * rows + row).to(tl.uint32, bitcast=True)
        mark = philox_uniform(w0, w1, w2, w3, length - start) * tl.sum(weight, 0)
        last_chunk = tl.max(tl.where(weight > 0, c, 0), 0)
        chunk = tl.minimum(tl.sum((below <= mark).to(tl.int32), 0), last_chunk)
        mark -= tl.sum(tl.where(c < chunk, weight, 0.0), 0)
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * logits_stride + i, mask=i < V, other=float("-inf")) * inverse_temperature
        p = tl.exp(z - top)
        if HAS_CUT:
            p = tl.where(z >= tl.load(cut + row), p, 0.0)
        within = tl.cumsum(p.to(tl.float64), 0)
        last = tl.max(tl.where(p > 0, i, 0), 0)
        token = tl.minimum(chunk * BLOCK + tl.sum((within <= mark).to(tl.int32), 0), last)
    logp = tl.load(logits + row * logits_stride + token) * inverse_temperature - normaliser

    is_alive = tl.load(state + 4 * rows + row) == 0
    is_good = (logp == logp) & (tl.abs(logp) < float("inf"))
    tick = tl.load(clock)
    tl.store(out_token + tick * rows + row, token)
    tl.store(out_logp + tick * rows + row, logp)
    is_new = is_alive & is_good
    tl.store(state + row, token, mask=is_new)
    tl.store(state + 2 * rows + row, length + 1, mask=is_new)
    ends = tl.load(is_end + token) != 0
    is_full = length + 1 >= tl.load(state + 3 * rows + row)
    stop = tl.where(is_good, tl.where(ends, 1, tl.where(is_full, 2, 0)), 3)
    tl.store(state + 4 * rows + row, stop, mask=is_alive)


# Compiled once, however the caller's memory is laid out: engine and trainer run the same instructions.
@triton.jit(
    do_not_specialize=["rows", "logits_stride"], do_not_specialize_on_alignment=["part_max", "part_all", "normaliser"]
)
def score_kernel(
    logits, part_max, part_all, token, logp, normaliser, clock, inverse_temperature, logits_stride, rows,
    CHUNKS: tl.constexpr, CHUNKS_UP: tl.constexpr,
):  # fmt: skip
    """Log-prob of one row's token behind `weigh_kernel`, and the normaliser; tokens and log-probs are [ticks, rows]."""
    row, tick = tl.program_id(0).to(tl.int64), tl.load(clock)
    c = tl.arange(0, CHUNKS_UP)
    maxima = tl.load(part_max + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    sums = tl.load(part_all + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    top = tl.max(maxima, 0)
    total = tl.sum(tl.where(maxima > float("-inf"), sums * tl.exp(maxima - top), 0.0), 0)
    log_total = top + tl.log(total)
    place = tick * rows + row
    z = tl.load(logits + row * logits_stride + tl.load(token + place)) * inverse_temperature
    tl.store(normaliser + row, log_total)
    tl.store(logp + place, z - log_total)


LARGEST_FLOAT8 = tl.constexpr(448.0)  # e4m3


@triton.jit
def float8_kernel(x, codes, scales, stride, smallest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: its largest number first, then each number over it. A row that is not finite stays so."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    is_finite = tl.full([BLOCK], 1, tl.int32)
    for start in range(0, WIDTH, BLOCK):
        at = start + k
        value = tl.load(x + row * stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(value))
        is_finite = tl.minimum(is_finite, (tl.abs(value) < float("inf")).to(tl.int32))
    scale = tl.maximum(tl.max(top, 0) / LARGEST_FLOAT8, smallest)
    scale = tl.where(tl.min(is_finite, 0) == 1, scale, float("nan"))
    tl.store(scales + row, scale)
    for start in range(0, WIDTH, BLOCK):
        at = start + k
        value = tl.load(x + row * stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        tl.store(codes + row * WIDTH + at, (value / scale).to(tl.float8e4nv), mask=at < WIDTH)
