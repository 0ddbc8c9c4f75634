/* Products of small matrices in float32, a tile of C in registers at a time. Each number of C is a sum in the order of
 * A's columns, however many rows there are. Included once by each file. */

#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 2 };
#elif defined(__AVX__)
enum { LANES = 8, WIDE = 1 };
#else
enum { LANES = 4, WIDE = 2 };
#endif
enum { ROWS = 8 }; /* of a tile */
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));

/* ROWS x (wide LANES) numbers of C (+)= A B. The rows of A are `row` numbers apart, its columns `column`. Unless `next` is
 * NULL, `step` numbers from there on are asked for with each of B's rows. */
static inline __attribute__((always_inline)) void tile(const float *a, count row, count column, const float *b,
                                                       count b_row, float *c, count c_row, count inner, int adds,
                                                       int wide, const float *next, count step)
{
    vector sum[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < wide; j++)
            sum[i][j] = adds ? *(const vector *)(c + i * c_row + j * LANES) : (vector){0};
    for (count k = 0; k < inner; k++, a += column, b += b_row) {
        vector right[2];
        if (next)
            __builtin_prefetch(next + k * step, 0, 2);
#pragma GCC unroll 2
        for (int j = 0; j < wide; j++)
            right[j] = *(const vector *)(b + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int j = 0; j < wide; j++)
                sum[i][j] += a[i * row] * right[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < wide; j++)
            *(vector *)(c + i * c_row + j * LANES) = sum[i][j];
}

/* C [n, m] (+)= A [n, inner] B [inner, m]; n is a multiple of ROWS, m of 16. What lies at `next`, unless that is NULL, is
 * read soon: as much as B, or as many lines as fit between. */
static inline void product(const float *a, count row, count column, const float *b, count b_row, float *c, count c_row,
                           count n, count inner, count m, int adds, const float *next)
{
    count step = m * ROWS / n < 16 ? m * ROWS / n : 16;
    for (count j = 0; j < m;) {
        int is_wide = WIDE == 2 && m - j >= 2 * LANES;
        for (count i = 0; i < n; i += ROWS)
            if (is_wide)
                tile(a + i * row, row, column, b + j, b_row, c + i * c_row + j, c_row, inner, adds, 2,
                     next ? next + i / ROWS * step * inner : NULL, step);
            else
                tile(a + i * row, row, column, b + j, b_row, c + i * c_row + j, c_row, inner, adds, 1, NULL, 0);
        j += is_wide ? 2 * LANES : LANES;
    }
}

static inline count padded(count n) { return (n + ROWS - 1) / ROWS * ROWS; }
