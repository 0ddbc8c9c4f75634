/* Causal attention of whole sequences and its gradient, in float32. attention.py calls it; torch's SDPA over padded
 * blocks (models/packing.py) is its reference.
 *
 * A block of QUERIES queries is worked on at a time, key by key: numbers that belong to the same key lie side by side,
 * one for each query, so that the softmax runs down the keys and never across a vector. Keys after a block's last
 * query (but for some that fill up a row of tiles) are left out. The keys and values of one head of one sequence stay in
 * the cache meanwhile.
 *
 * A sequence's tokens are wherever `place` says. Sequences that share a prompt follow one another, and only the first
 * works on its queries (`fresh`); the gradients of its keys and values are added up in their order. */

#include "exponential.h"
#include "product.h"

enum { QUERIES = 16 };
typedef int32_t choice __attribute__((vector_size(4 * LANES)));

/* ------------------------------------------------------------------ moving */

/* Rows [n, size] of x, whose tokens are `stride` numbers apart, from their places; rows n to `room` are 0. */
static void gather(const float *x, const count *place, count stride, float *out, count n, count room, count size)
{
    for (count t = 0; t < n; t++)
        memcpy(out + t * size, x + place[t] * stride, size * sizeof *x);
    memset(out + n * size, 0, (room - n) * size * sizeof *x);
}

/* [QUERIES, size] -> [size, QUERIES] */
static void transpose(const float *x, float *out, count size)
{
    for (count i = 0; i < size; i++)
        for (count r = 0; r < QUERIES; r++)
            out[i * QUERIES + r] = x[r * size + i];
}

static inline vector larger(vector a, vector b)
{
    choice is_a = a > b;
    return (vector)((is_a & (choice)a) | (~is_a & (choice)b));
}

/* ------------------------------------------------------------------ attention */

/* Numbers of scratch that sequences of at most `longest` tokens need. */
count attention_scratch(count longest, count size)
{
    return padded(longest) * (4 * size + 2 * QUERIES) + 5 * QUERIES * size;
}

/* q [T, queries, size], k and v [T, heads, size] -> out like q and, for the gradient, the logarithm of each softmax's
 * sum [T, queries]. Task t is head t % heads of the sequences edge[t / heads] to edge[t / heads + 1]; `size` is a
 * multiple of 16. */
void attention_forward(const float *q, const float *k, const float *v, const count *place, const count *start,
                       const count *fresh, const count *edge, float scale, float *out, float *normaliser,
                       float *scratch, count first, count end, count queries, count heads, count size)
{
    count group = queries / heads;
    for (count task = first; task < end; task++)
        for (count s = edge[task / heads]; s < edge[task / heads + 1]; s++) {
            const count *at = place + start[s], h = task % heads;
            count n = start[s + 1] - start[s], room = padded(n);
            float *keys = scratch, *values = keys + room * size, *query = values + room * size,
                  *turned = query + QUERIES * size, *mixed = turned + QUERIES * size, *weight = mixed + QUERIES * size;
            gather(k + h * size, at, heads * size, keys, n, room, size);
            gather(v + h * size, at, heads * size, values, n, room, size);
            for (count head = h * group; head < (h + 1) * group; head++)
                for (count i = fresh[s]; i < n; i += QUERIES) {
                    count rows = n - i < QUERIES ? n - i : QUERIES, seen = i + rows;
                    float best[QUERIES], total[QUERIES] = {0};
                    gather(q + head * size, at + i, queries * size, query, rows, QUERIES, size);
                    transpose(query, turned, size);
                    product(keys, size, 1, turned, QUERIES, weight, QUERIES, padded(seen), size, QUERIES, 0, NULL);
                    for (count j = i + 1; j < seen; j++)
                        for (count r = 0; r < j - i; r++)
                            weight[j * QUERIES + r] = -INFINITY; /* query i + r comes before key j */
                    for (count r = 0; r < QUERIES; r += LANES) {
                        vector most = *(vector *)(weight + r);
                        for (count j = 1; j < seen; j++)
                            most = larger(*(vector *)(weight + j * QUERIES + r), most);
                        *(vector *)(best + r) = most;
                    }
                    for (count j = 0; j < seen; j++)
                        for (count r = 0; r < QUERIES; r++) {
                            float e = exponential((weight[j * QUERIES + r] - best[r]) * scale);
                            weight[j * QUERIES + r] = e;
                            total[r] += e;
                        }
                    product(weight, 1, QUERIES, values, size, mixed, size, QUERIES, seen, size, 0, NULL);
                    for (count r = 0; r < rows; r++) {
                        count cell = at[i + r] * queries + head;
                        normaliser[cell] = best[r] * scale + logf(total[r]);
                        for (count j = 0; j < size; j++)
                            out[cell * size + j] = mixed[r * size + j] / total[r];
                    }
                }
        }
}

/* With P the softmax, dV = P' dO, dS = P (dO V' - dO . O), dQ = scale dS K, dK = scale dS' Q. grad_q is written where
 * the forward pass wrote; grad_k and grad_v are added to. */
void attention_backward(const float *q, const float *k, const float *v, const float *out, const float *normaliser,
                        const float *grad, const count *place, const count *start, const count *fresh,
                        const count *edge, float scale, float *grad_q, float *grad_k, float *grad_v, float *scratch,
                        count first, count end, count queries, count heads, count size)
{
    count group = queries / heads;
    for (count task = first; task < end; task++)
        for (count s = edge[task / heads]; s < edge[task / heads + 1]; s++) {
            const count *at = place + start[s], h = task % heads;
            count n = start[s + 1] - start[s], room = padded(n);
            float *keys = scratch, *values = keys + room * size, *sum_k = values + room * size,
                  *sum_v = sum_k + room * size, *query = sum_v + room * size, *turned = query + QUERIES * size,
                  *above = turned + QUERIES * size, *turned_above = above + QUERIES * size,
                  *mixed = turned_above + QUERIES * size, *weight = mixed + QUERIES * size,
                  *slope = weight + QUERIES * room;
            gather(k + h * size, at, heads * size, keys, n, room, size);
            gather(v + h * size, at, heads * size, values, n, room, size);
            memset(sum_k, 0, 2 * room * size * sizeof *sum_k);
            for (count head = h * group; head < (h + 1) * group; head++)
                for (count i = fresh[s]; i < n; i += QUERIES) {
                    count rows = n - i < QUERIES ? n - i : QUERIES, seen = i + rows, upto = padded(seen);
                    float dot[QUERIES] = {0}, log_total[QUERIES] = {0};
                    gather(q + head * size, at + i, queries * size, query, rows, QUERIES, size);
                    gather(grad + head * size, at + i, queries * size, above, rows, QUERIES, size);
                    transpose(query, turned, size);
                    transpose(above, turned_above, size);
                    for (count r = 0; r < rows; r++) {
                        count cell = at[i + r] * queries + head;
                        log_total[r] = normaliser[cell];
                        for (count j = 0; j < size; j++)
                            dot[r] += out[cell * size + j] * above[r * size + j];
                    }
                    product(keys, size, 1, turned, QUERIES, weight, QUERIES, upto, size, QUERIES, 0, NULL);
                    product(values, size, 1, turned_above, QUERIES, slope, QUERIES, upto, size, QUERIES, 0, NULL);
                    for (count j = 0; j < seen; j++)
                        for (count r = 0; r < QUERIES; r++) {
                            float p = exponential(weight[j * QUERIES + r] * scale - log_total[r]);
                            weight[j * QUERIES + r] = p;
                            slope[j * QUERIES + r] = p * (slope[j * QUERIES + r] - dot[r]) * scale;
                        }
                    for (count j = i + 1; j < upto; j++) /* keys after the query, and rows that only fill up */
                        for (count r = 0; r < QUERIES; r++)
                            if (j >= seen || r < j - i)
                                weight[j * QUERIES + r] = slope[j * QUERIES + r] = 0;
                    product(slope, 1, QUERIES, keys, size, mixed, size, QUERIES, seen, size, 0, NULL);
                    for (count r = 0; r < rows; r++)
                        memcpy(grad_q + (at[i + r] * queries + head) * size, mixed + r * size, size * sizeof *mixed);
                    product(slope, QUERIES, 1, query, size, sum_k, size, upto, QUERIES, size, 1, NULL);
                    product(weight, QUERIES, 1, above, size, sum_v, size, upto, QUERIES, size, 1, NULL);
                }
            for (count t = 0; t < n; t++) {
                float *to_k = grad_k + (at[t] * heads + h) * size, *to_v = grad_v + (at[t] * heads + h) * size;
                for (count j = 0; j < size; j++) {
                    to_k[j] += sum_k[t * size + j];
                    to_v[j] += sum_v[t * size + j];
                }
            }
        }
}
