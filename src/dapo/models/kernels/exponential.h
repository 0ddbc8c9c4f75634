/* e^x for loops that the compiler turns into vectors. Included once by each file. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t count;

/* e^x to about one unit in the last place, without a branch, so that loops over it are made of vectors everywhere.
 * e^x = 2^n e^r with |r| <= ln 2 / 2; the polynomial is that of the Cephes library. 0 below e^-87,
 * infinite above e^88. */
static inline float exponential(float x)
{
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float n = rintf(bounded * 1.44269504f), shifted = n + 0x1.8p23f, power;
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, bounded)); /* as sums these would be taken together */
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * r * r + r + 1.0f;
    uint32_t bits; /* of `shifted`, the lowest nine are n: no conversion, which NaN would not survive */
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + (127u << 23);
    memcpy(&power, &bits, sizeof power);
    float y = sum * power;
    y = x < -87.0f ? 0.0f : y;
    return x > 88.0f ? INFINITY : y;
}
