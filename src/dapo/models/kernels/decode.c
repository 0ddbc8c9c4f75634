/* A decode step on a CPU, in float32: one token of every response. rollout/local/host_ops.py and whole_pass.py call it;
 * the same operations in torch (rollout/local/block_ops.py, decoder.py) are its reference.
 *
 * A row does not depend on the others, not in its last bit either. NaN and infinity are passed on. */

#include "exponential.h"
#include "layer.h"
#include "product.h"

enum { PANEL = 32 };

/* ------------------------------------------------------------------ attention */

/* One query over the tokens first..end-1 of its head. `size` is a constant where this is inlined. The next head's keys
 * and values, `ahead` numbers further on, are asked for meanwhile. */
static inline void attend_one(const float *restrict q, const float *restrict keys, const float *restrict values,
                              float scale, float *restrict score, float *restrict out, count first, count end,
                              count ahead, count size)
{
    float best = -INFINITY, total = 0;
    for (count t = first; t < end; t++) {
        const float *key = keys + t * size;
        for (count i = 0; i < size; i += 16) {
            __builtin_prefetch(key + ahead + i, 0, 2);
            __builtin_prefetch(values + t * size + ahead + i, 0, 2);
        }
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
                   count first, count end, count ahead, count size)
{
    switch (size) {
    case 32: attend_one(q, keys, values, scale, score, out, first, end, ahead, 32); break;
    case 64: attend_one(q, keys, values, scale, score, out, first, end, ahead, 64); break;
    case 128: attend_one(q, keys, values, scale, score, out, first, end, ahead, 128); break;
    default: attend_one(q, keys, values, scale, score, out, first, end, ahead, size);
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
                attend(ready, keys, values, scale, score, out, first, at + 1, capacity * size, size);
            }
        }
        if (--left) { /* the next row is of this slot too */
            keys -= heads * capacity * size;
            values -= heads * capacity * size;
        } else if (++slot < n)
            left = rows ? rows[slot] : 1;
    }
}

/* ------------------------------------------------------------------ from tokens to logits */

/* Matrices are in panels; a bias or a norm of heads may be NULL. */
typedef struct {
    const float *norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias, *next_norm, *gate_up, *gate_up_bias,
        *down, *down_bias;
    count window; /* 0 looks back over everything */
} layer;

typedef struct {
    const layer *layers;
    const float *embedding, *cosine, *sine, *norm, *head, *head_bias;
    count n_layers, width, inner, tokens, queries, heads, size;
    float eps, last_eps, scale;
} model;

/* n slots of a block [n_layers, 2, slots, heads, capacity, size] of keys and values, with as many rows each as `rows`
 * says, or one if that is NULL. */
typedef struct {
    float *data;
    const count *rows;
    count first, n, slots, capacity;
} span;

static inline count columns(count n) { return (n + 15) / 16 * 16; }

static inline count panel_width(count left) { return left < PANEL ? left : PANEL; }

/* A matrix [n, inner] as products read it: [inner, PANEL] for every PANEL of their columns, padded with zeros. */
void panels(const float *weight, float *out, count n, count inner)
{
    for (count i = 0, width; i < columns(n); i += PANEL) {
        width = panel_width(columns(n) - i);
        for (count k = 0; k < inner; k++)
            for (count j = 0; j < width; j++, out++)
                *out = i + j < n ? weight[(i + j) * inner + k] : 0;
    }
}

/* C [n, m] (+)= A [n, inner] B + bias, with n a multiple of ROWS, m of 16 and B in panels. */
static void project(const float *a, const float *panel, const float *bias, float *c, count n, count inner, count m,
                    int adds)
{
    for (count row = 0; bias && row < n; row++)
        for (count i = 0; i < m; i++)
            c[row * m + i] = bias[i] + (adds ? c[row * m + i] : 0);
    for (count i = 0; i < m; i += PANEL) {
        count width = panel_width(m - i);
        product(a, inner, 1, panel + i * inner, width, c + i, m, n, inner, width, adds || bias,
                panel + (i + PANEL) * inner);
    }
}

/* Numbers of scratch that n rows need, none of them longer than `longest` tokens. */
count forward_scratch(const model *m, count n, count longest)
{
    count attended = m->queries * m->size, keys = m->heads * m->size;
    return padded(n) * (2 + 2 * m->width + 2 * attended + 2 * keys + columns(2 * m->inner) + m->inner +
                        columns(m->tokens)) + longest + m->size;
}

/* Logits [n, tokens] behind the newest token of n rows, which are those of the spans in their order. Of `state` [9,
 * stride] the first row has their tokens, the third their lengths, the fifth is 0 where they run. */
void forward(const model *m, const span *spans, count n_spans, const int32_t *state, count stride, count n, float *logits,
          float *scratch)
{
    count width = m->width, inner = m->inner, room = padded(n), attended = m->queries * m->size,
          qkv_width = attended + 2 * m->heads * m->size, gate_up_width = columns(2 * inner);
    count *position = (count *)scratch;
    float *x = scratch + 2 * room, *normed = x + room * width, *qkv = normed + room * width,
          *mixed = qkv + room * qkv_width, *gate_up = mixed + room * attended, *gated = gate_up + room * gate_up_width,
          *wide = gated + room * inner, *more = wide + room * columns(m->tokens);
    memset(x, 0, room * width * sizeof *x);
    memset(mixed + n * attended, 0, (room - n) * attended * sizeof *mixed);
    for (count row = 0; row < n; row++) {
        position[row] = state[4 * stride + row] ? 0 : state[2 * stride + row] - 1;
        memcpy(x + row * width, m->embedding + state[row] * width, width * sizeof *x);
    }
    for (count l = 0; l < m->n_layers; l++) {
        const layer *at = m->layers + l;
        norm_forward(x, NULL, at->norm, m->eps, NULL, normed, NULL, room, width);
        project(normed, at->qkv, at->qkv_bias, qkv, room, width, qkv_width, 0);
        for (count i = 0, row = 0; i < n_spans; i++) {
            const span *s = spans + i;
            count slot = m->heads * s->capacity * m->size, n_rows = s->rows ? 0 : s->n;
            for (count j = 0; s->rows && j < s->n; j++)
                n_rows += s->rows[j];
            float *keys = s->data + (2 * l * s->slots + s->first) * slot, *values = keys + s->slots * slot;
            mix(qkv + row * qkv_width, position + row, s->rows, m->cosine, m->sine, at->query_norm, at->key_norm,
                m->eps, m->scale, keys, values, more, mixed + row * attended, s->n, m->queries, m->heads, m->size,
                s->capacity, at->window);
            row += n_rows;
        }
        project(mixed, at->out, at->out_bias, x, room, attended, width, 1);
        norm_forward(x, NULL, at->next_norm, m->eps, NULL, normed, NULL, room, width);
        project(normed, at->gate_up, at->gate_up_bias, gate_up, room, width, gate_up_width, 0);
        gated_forward(gate_up, gate_up + inner, gated, room, inner, gate_up_width);
        project(gated, at->down, at->down_bias, x, room, inner, width, 1);
    }
    norm_forward(x, NULL, m->norm, m->last_eps, NULL, normed, NULL, room, width);
    project(normed, m->head, m->head_bias, wide, room, width, columns(m->tokens), 0);
    for (count row = 0; row < n; row++)
        memcpy(logits + row * m->tokens, wide + row * columns(m->tokens), m->tokens * sizeof *logits);
}

/* ------------------------------------------------------------------ a token for each row */

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
