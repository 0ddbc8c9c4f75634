/* The memory-bound parts of a layer and of the head on a CPU, in float32: each reads what it needs once. build.py compiles this file,
 * compiled.py calls it; the same operations in torch (host.py, rollout/local/block_ops.py) are its reference.
 *
 * Rows are independent of one another and added up in one order, whatever else is in the batch. NaN and infinity are
 * passed on, so the compiler must not assume that there are none. */

#include "exponential.h"
#include "layer.h"

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

/* x [n, heads, size] turned by the angles [n, size]. */
void rotate(const float *x, const float *cosine, const float *sine, float direction, float *out, count n, count heads,
            count size)
{
    for (count row = 0; row < n; row++, cosine += size, sine += size)
        for (count head = 0; head < heads; head++, x += size, out += size)
            turn(x, cosine, sine, direction, out, size / 2);
}

/* Of each row of logits [n, tokens], times `by`: the log-prob of its target, the logarithm of its softmax's sum, and the
 * entropy unless that is NULL. Sums are doubles: a vocabulary is long. */
void logit_scores(const float *logits, const count *target, float by, float *logp, float *normaliser, float *entropy,
                  count n, count tokens)
{
    for (count row = 0; row < n; row++, logits += tokens) {
        float best = -INFINITY;
        double total = 0, weighted = 0;
        for (count i = 0; i < tokens; i++)
            best = logits[i] > best ? logits[i] : best;
        for (count i = 0; i < tokens; i++) {
            float z = (logits[i] - best) * by, e = exponential(z);
            total += e;
            weighted += e == 0 ? 0 : e * z; /* a token of probability 0 adds nothing */
        }
        float log_total = (float)log(total);
        logp[row] = (logits[target[row]] - best) * by - log_total;
        normaliser[row] = best * by + log_total;
        if (entropy)
            entropy[row] = log_total - (float)(weighted / total);
    }
}

/* The logits give way to their gradient, (1[target] - p) by, times that of the log-prob. */
void logit_gradient(float *logits, const count *target, const float *normaliser, const float *grad, float by, count n,
                    count tokens)
{
    for (count row = 0; row < n; row++, logits += tokens) {
        float scale = grad[row] * by;
        for (count i = 0; i < tokens; i++)
            logits[i] = -scale * exponential(logits[i] * by - normaliser[row]);
        logits[target[row]] += scale;
    }
}
