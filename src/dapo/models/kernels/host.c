/* The memory-bound parts of a transformer on a CPU, in float32: each reads what it needs once. build.py compiles this
 * file, compiled.py calls it; the same operations in torch (host.py, rollout/local/block_ops.py) are its reference.
 *
 * Rows are independent of one another and added up in one order, whatever else is in the batch. NaN and infinity are
 * passed on, so the compiler must not assume that there are none. */

#include "exponential.h"

/* ------------------------------------------------------------------ parts of a layer */

/* total = x + residual, normed = total / RMS(total) * weight. `total` may be x itself; no residual: total is not
 * written. inverse_rms may be NULL. */
void norm_forward(const float *x, const float *residual, const float *weight, float eps, float *total, float *normed,
                  float *inverse_rms, count n, count width)
{
    for (count row = 0; row < n; row++, x += width, normed += width) {
        const float *from = x;
        if (residual) {
            for (count i = 0; i < width; i++)
                total[i] = x[i] + residual[i];
            from = total;
            residual += width;
            total += width;
        }
        float squares = 0;
        for (count i = 0; i < width; i++)
            squares += from[i] * from[i];
        float inverse = 1 / sqrtf(squares / width + eps);
        for (count i = 0; i < width; i++)
            normed[i] = from[i] * inverse * weight[i];
        if (inverse_rms)
            inverse_rms[row] = inverse;
    }
}

/* With x^ = x / RMS: dx = (g w - x^ mean(g w x^)) / RMS (+ from_sum, which may be NULL), and g x^ added to
 * grad_weight. */
void norm_backward(const float *restrict grad, const float *restrict from_sum, const float *restrict total,
                   const float *restrict weight, const float *restrict inverse_rms, float *restrict grad_x,
                   float *restrict grad_weight, count n, count width)
{
    for (count row = 0; row < n; row++, grad += width, total += width, grad_x += width) {
        float inverse = inverse_rms[row], mean = 0;
        for (count i = 0; i < width; i++) {
            float product = grad[i] * total[i] * inverse;
            grad_weight[i] += product;
            mean += product * weight[i];
        }
        mean /= width;
        for (count i = 0; i < width; i++)
            grad_x[i] = (grad[i] * weight[i] - total[i] * inverse * mean) * inverse;
        if (from_sum) {
            for (count i = 0; i < width; i++)
                grad_x[i] += from_sum[i];
            from_sum += width;
        }
    }
}

/* silu(gate) * up; the rows of gate and up are `stride` apart. */
void gated_forward(const float *restrict gate, const float *restrict up, float *restrict out, count n, count width,
                   count stride)
{
    for (count row = 0; row < n; row++, gate += stride, up += stride, out += width)
        for (count i = 0; i < width; i++)
            out[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
}

/* Gradients of gate and up, and the product again. */
void gated_backward(const float *restrict grad, const float *restrict gate, const float *restrict up,
                    float *restrict grad_gate, float *restrict grad_up, float *restrict product, count n)
{
    for (count i = 0; i < n; i++) {
        float sigmoid = 1 / (1 + exponential(-gate[i])), silu = gate[i] * sigmoid;
        grad_gate[i] = grad[i] * up[i] * (sigmoid + silu * (1 - sigmoid));
        grad_up[i] = grad[i] * silu;
        product[i] = silu * up[i];
    }
}

/* A head turned by the angles of its position, or back (direction -1). Both halves of the tables say the same but for
 * a sign that some carry in the first, so the second is read. */
static inline void turn(const float *restrict x, const float *restrict cosine, const float *restrict sine,
                        float direction, float *restrict out, count half)
{
    for (count i = 0; i < half; i++) {
        float c = cosine[half + i], s = sine[half + i] * direction;
        out[i] = x[i] * c - x[half + i] * s;
        out[half + i] = x[half + i] * c + x[i] * s;
    }
}

/* x [n, heads, size] turned by the angles [n, size]. */
void rotate(const float *x, const float *cosine, const float *sine, float direction, float *out, count n, count heads,
            count size)
{
    for (count row = 0; row < n; row++, cosine += size, sine += size)
        for (count head = 0; head < heads; head++, x += size, out += size)
            turn(x, cosine, sine, direction, out, size / 2);
}

/* ------------------------------------------------------------------ a decode step */

/* One query over the tokens first..end-1 of its head. `size` is a constant where this is inlined. */
static inline void attend_one(const float *restrict q, const float *restrict keys, const float *restrict values,
                              float scale, float *restrict score, float *restrict out, count first, count end,
                              count size)
{
    float best = -INFINITY, total = 0;
    for (count t = first; t < end; t++) {
        const float *key = keys + t * size;
        float sum = 0;
        for (count i = 0; i < size; i++)
            sum += q[i] * key[i];
        score[t] = sum * scale;
    }
    for (count t = first; t < end; t++)
        best = score[t] > best ? score[t] : best;
    for (count t = first; t < end; t++) {
        score[t] = exponential(score[t] - best);
        total += score[t];
    }
    for (count i = 0; i < size; i++)
        out[i] = 0;
    for (count t = first; t < end; t++) {
        const float *value = values + t * size, weight = score[t];
        for (count i = 0; i < size; i++)
            out[i] += weight * value[i];
    }
    for (count i = 0; i < size; i++)
        out[i] /= total;
}

static void attend(const float *q, const float *keys, const float *values, float scale, float *score, float *out,
                   count first, count end, count size)
{
    switch (size) {
    case 32: attend_one(q, keys, values, scale, score, out, first, end, 32); break;
    case 64: attend_one(q, keys, values, scale, score, out, first, end, 64); break;
    case 128: attend_one(q, keys, values, scale, score, out, first, end, 128); break;
    default: attend_one(q, keys, values, scale, score, out, first, end, size);
    }
}

/* The newest tokens' qkv [rows, (queries + 2 heads) size] -> out [rows, queries size]. Row r stands at position[r]. Keys
 * and values are those of n slots [n, heads, capacity, size], where the new ones are stored. Each slot has one row, or
 * rows[slot] of them, a draft, in the order of their positions. Head norms may be NULL, window 0 looks back over
 * everything; scratch has room for `capacity + size` numbers. */
void mix(const float *qkv, const count *position, const count *rows, const float *cosine, const float *sine,
         const float *query_norm, const float *key_norm, float eps, float scale, float *keys, float *values,
         float *scratch, float *out, count n, count queries, count heads, count size, count capacity, count window)
{
    count group = queries / heads, slot = 0, left = rows ? rows[0] : 1;
    float *score = scratch, *turned = scratch + capacity;
    for (; slot < n; qkv += (queries + 2 * heads) * size, position++) {
        count at = *position, first = window && at + 1 > window ? at + 1 - window : 0;
        const float *c = cosine + at * size, *s = sine + at * size;
        for (count head = 0; head < heads; head++, keys += capacity * size, values += capacity * size) {
            const float *key = qkv + (queries + head) * size, *value = key + heads * size;
            if (key_norm) {
                norm_forward(key, NULL, key_norm, eps, NULL, turned, NULL, 1, size);
                key = turned;
            }
            turn(key, c, s, 1, keys + at * size, size / 2);
            memcpy(values + at * size, value, size * sizeof *value);
            for (count i = 0; i < group; i++, out += size) {
                const float *query = qkv + (head * group + i) * size;
                if (query_norm) {
                    norm_forward(query, NULL, query_norm, eps, NULL, out, NULL, 1, size);
                    query = out;
                }
                float *ready = turned; /* not `out`, which `attend` writes */
                turn(query, c, s, 1, ready, size / 2);
                attend(ready, keys, values, scale, score, out, first, at + 1, size);
            }
        }
        if (--left) { /* the next row is of this slot too */
            keys -= heads * capacity * size;
            values -= heads * capacity * size;
        } else if (++slot < n)
            left = rows ? rows[slot] : 1;
    }
}

/* The uniform number in (0, 1) of a noise key at a position: Philox-4x32-10 as in rollout/noise.py. */
static double uniform(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t position)
{
    uint32_t x0 = position, x1 = 0, x2 = c, x3 = d;
    for (int round = 0; round < 10; round++, a += 0x9E3779B9u, b += 0xBB67AE85u) {
        uint64_t p = (uint64_t)x0 * 0xD2511F53u, q = (uint64_t)x2 * 0xCD9E8D57u;
        x0 = (uint32_t)(q >> 32) ^ x1 ^ a;
        x1 = (uint32_t)q;
        x2 = (uint32_t)(p >> 32) ^ x3 ^ b;
        x3 = (uint32_t)p;
    }
    return ((double)(((uint64_t)(x0 >> 6) << 26) | (x1 >> 6)) + 0.5) * 0x1p-52;
}

/* The token whose share of the weights the noise falls into; of weights that are not numbers, any. Sums go by blocks,
 * so that two passes are enough. */
static count drawn(const float *weight, double total, double noise, count tokens)
{
    enum { BLOCK = 128 };
    double before = 0, mark = noise * total;
    count last = 0;
    for (count block = 0; block < tokens; block += BLOCK) {
        count end = block + BLOCK < tokens ? block + BLOCK : tokens;
        double inside = 0;
        for (count i = block; i < end; i++)
            inside += weight[i];
        if (before + inside > mark)
            for (count i = block; i < end; i++) {
                before += weight[i];
                if (before > mark)
                    return i;
            }
        else
            before += inside;
    }
    for (count i = 0; i < tokens; i++) /* rounding took the last share */
        last = weight[i] > 0 ? i : last;
    return last;
}

enum { RUNNING, ENDED, FULL, BAD }; /* rollout/local/rows.py */

/* One token for each running row of logits [n, tokens], noted in out_token, out_logp and the columns of state [9,
 * stride]: newest token, start, length, limit, stop, four words of the noise key. Temperature 0 takes the likeliest.
 * `weight` has room for `tokens` numbers. */
void draw(const float *logits, float temperature, const uint8_t *is_end, int32_t *state, int32_t *out_token,
          float *out_logp, float *weight, count n, count tokens, count stride)
{
    float by = temperature > 0 ? 1 / temperature : 1;
    for (count row = 0; row < n; row++, logits += tokens) {
        int32_t *newest = state + row, *start = newest + stride, *length = start + stride, *limit = length + stride,
                *stop = limit + stride;
        const uint32_t *words = (const uint32_t *)(stop + stride);
        if (*stop != RUNNING)
            continue;
        float best = -INFINITY;
        double total = 0; /* a vocabulary is long */
        for (count i = 0; i < tokens; i++)
            best = logits[i] > best ? logits[i] : best;
        for (count i = 0; i < tokens; i++)
            weight[i] = exponential((logits[i] - best) * by);
        for (count i = 0; i < tokens; i++)
            total += weight[i];
        count token = 0;
        if (temperature > 0)
            token = drawn(weight, total, uniform(words[0], words[stride], words[2 * stride], words[3 * stride],
                                                 (uint32_t)(*length - *start)), tokens);
        else
            while (token < tokens - 1 && logits[token] != best)
                token++;
        out_token[row] = (int32_t)token;
        out_logp[row] = (float)((logits[token] - best) * by - log(total));
        if (!isfinite(out_logp[row])) {
            *stop = BAD;
            continue;
        }
        *newest = (int32_t)token;
        *length += 1;
        *stop = is_end[token] ? ENDED : *length >= *limit ? FULL : RUNNING;
    }
}
