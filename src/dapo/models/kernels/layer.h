/* Parts of a layer that a decode step has too. Included once by each file. */

void norm_forward(const float *x, const float *residual, const float *weight, float eps, float *total, float *normed,
                  float *inverse_rms, count n, count width);

void gated_forward(const float *gate, const float *up, float *out, count n, count width, count stride);

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
