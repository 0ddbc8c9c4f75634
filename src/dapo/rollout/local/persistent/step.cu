/* One decode step of a few rows in one launch: all layers and the head, by persistent thread blocks.

   A step of few rows reads every weight once and does little else, so it is as fast as the memory, unless something
   makes the memory wait: between kernels it always does. Here each warp copies the weights that it will need next,
   whatever product or layer they belong to, while the blocks wait for each other's results.

   A product [rows, K] x [N, K]^T: each block has some of the N outputs, each of its warps some of the K terms; tensor
   cores take 16 outputs x 8 rows at a time, and the block adds its warps' sums in their order. Numbers are rounded
   where the kernels of `kernels.py` round them.

   Written in what C and CUDA have in common, on top of `cuda.h`; with the `cuda.h` of tests/rollout/emulated it runs on
   a CPU. The sizes are macros, set by `step.py`: H hidden, I feed-forward, NQ and NK heads of D, V vocabulary, LAYERS,
   PAGE tokens, ROWS computed (8 or 16), BLOCKS, WARPS of a block, HAS_BIAS (of q, k, v), HAS_NORM (of q, k), EPS,
   SCALE; SPAN units of a piece of weights, STAGES pieces that a warp has under way, DEPTH units of rows that are read
   ahead, TILES of 16 outputs that a block adds up at a time. */

#define THREADS (WARPS * 32)
#define NT (ROWS / 8)
#define G (NQ / NK)
#define QKV ((NQ + 2 * NK) * D)
#define MIXED (NQ * D)
#define UNIT 64 /* terms: a line of memory */
#define UNITS(k) (((k) / UNIT + WARPS - 1) / WARPS) /* a warp's most */
#define DU (D / 32) /* of a head: 32 numbers */
#define VU (D / 64)
#if STAGES < 2 || SPAN * (DEPTH / NT) < 1 || NQ % NK || G > 8 || (D != 64 && D != 128) || PAGE % 16
#error "sizes that this kernel cannot do"
#endif
#define WHOLE(units) (((units) + SPAN - 1) / SPAN * SPAN)
#define KEPT WHOLE(UNITS(H))     /* units of normed rows, which are kept */
#define AHEAD WHOLE(DEPTH / NT) /* units of other rows, which are read ahead of their product */
#define AT_HAND (KEPT > AHEAD ? KEPT : AHEAD)
#define PIECE (SPAN * 2048) /* bytes of 16 outputs x SPAN units */
#define BARRIERS (LAYERS * 5 + 1)
#define NONE (-1e30f)

DEVICE float low_half(unsigned x) { return bits_to_float(x << 16); }
DEVICE float high_half(unsigned x) { return bits_to_float(x & 0xffff0000u); }
DEVICE float rounded(float x) { return to_float(to_bf16(x)); }
DEVICE float larger(float x, float y) { return x > y ? x : y; }
/* Of scores relative to `top`, in terms of the largest of all. */
DEVICE float weight_of(float top, float largest) { return top > NONE ? power_of_2(top - largest) : 0; }
DEVICE float squares_of_two(unsigned x) { return low_half(x) * low_half(x) + high_half(x) * high_half(x); }
DEVICE float squares_of(Four x) {
    return squares_of_two(x.x) + squares_of_two(x.y) + squares_of_two(x.z) + squares_of_two(x.w);
}
DEVICE unsigned scaled_two(unsigned x, float scale, unsigned by) {
    return multiplied(packed(low_half(x) * scale, high_half(x) * scale), by);
}
DEVICE Four scaled(Four x, float scale, Four by) {
    x.x = scaled_two(x.x, scale, by.x), x.y = scaled_two(x.y, scale, by.y);
    x.z = scaled_two(x.z, scale, by.z), x.w = scaled_two(x.w, scale, by.w);
    return x;
}
DEVICE unsigned rotated_two(unsigned x, unsigned c, unsigned other, unsigned s) {
    return packed(low_half(x) * low_half(c) + low_half(other) * low_half(s),
                  high_half(x) * high_half(c) + high_half(other) * high_half(s));
}
DEVICE Four rotated(Four x, Four c, Four other, Four s) {
    x.x = rotated_two(x.x, c.x, other.x, s.x), x.y = rotated_two(x.y, c.y, other.y, s.y);
    x.z = rotated_two(x.z, c.z, other.z, s.z), x.w = rotated_two(x.w, c.w, other.w, s.w);
    return x;
}

typedef struct {
    const bf16 *qkv, *out, *gate_up, *down, *bias, *input_norm, *post_norm, *query_norm, *key_norm;
    bf16 *keys, *values;
} Layer;

typedef struct {
    const Layer *layers;
    const bf16 *embedding, *norm, *head, *cos, *sin;
    const int *token, *table, *length, *stop;
    bf16 *x, *mixed, *gated; /* what products are taken of, [K / 32][ROWS][32] */
    bf16 *qkv;               /* [ROWS][QKV] */
    float *part, *part_max, *part_sum, *logits;
    int *arrived, *barrier; /* barrier: how often a block has come to one, and launches so far; all launches together */
    long long table_stride, page_stride, head_stride, token_stride;
    int rows, splits;
} Args;

enum Product { OF_QKV, OF_OUT, OF_GATE_UP, OF_DOWN, OF_HEAD, OF_NOTHING };

/* Outputs of a product, terms, and the outputs by which a tile's second half is ahead of its first. */
DEVICE int outputs(int product) {
    return product == OF_QKV ? QKV : product == OF_GATE_UP ? I : product == OF_HEAD ? V : H;
}
DEVICE int terms(int product) { return product == OF_OUT ? MIXED : product == OF_DOWN ? I : H; }
DEVICE int tile_outputs(int product) { return product == OF_GATE_UP ? 8 : 16; }
DEVICE long long second_half(int product) { return product == OF_GATE_UP ? I : 8; }
DEVICE int first_unit(int product, int warp) { return terms(product) / UNIT * warp / WARPS; }

/* This block's outputs of a product. */
typedef struct {
    int first, end, tiles;
} Share;

/* What this warp asks for next: of a unit of 16 outputs each 8 lanes ask for a line, of every fourth output. */
typedef struct {
    const bf16 *at;            /* this lane's 8 numbers of output lane / 8 */
    long long second;          /* from a tile's first half to its second */
    int product, layer, tiles, /* left */ units, left /* of the tile */, output, end;
} Cursor;

typedef struct {
    Cursor next;
    char *ring;          /* this warp's */
    int head;            /* the piece that is multiplied next */
    int put[2], take[2]; /* where this lane puts its bytes of two outputs, and takes those of terms 0 to 31, 32 to 63 */
} Stream;

typedef struct {
    char *ring;
    float *sums;                 /* [TILES][WARPS][NT][16][8] */
    float *squares;              /* [WARPS][ROWS] */
    float *top, *total;          /* [WARPS][8] */
    Four *rows;                  /* [WARPS][2 AT_HAND][NT][32] */
    Layer *layers;
    Share *shares; /* of the products */
    int *flag;
} Shared;

DEVICE Share share_of(int product) {
    Share share;
    int size = tile_outputs(product);
    share.first = (int)((unsigned)outputs(product) * (unsigned)BLOCK / BLOCKS);
    share.end = (int)((unsigned)outputs(product) * (unsigned)(BLOCK + 1) / BLOCKS);
    share.tiles = (share.end - share.first + size - 1) / size;
    return share;
}

DEVICE const bf16 *matrix(int product, const Layer *layer, const Args *a) {
    return product == OF_QKV       ? layer->qkv
           : product == OF_OUT     ? layer->out
           : product == OF_GATE_UP ? layer->gate_up
           : product == OF_DOWN    ? layer->down
                                   : a->head;
}

/* To the next tile that has something in it; OF_NOTHING when all has been asked for. */
DEVICE void advance(Cursor *c, const Shared *shared, const Args *a) {
    int k = terms(c->product);
    c->left = c->units;
    if (--c->tiles > 0) {
        c->at += tile_outputs(c->product) * k - WHOLE(c->units) * UNIT;
        c->output += tile_outputs(c->product);
        return;
    }
    ONE_BY_ONE do {
        if (c->product >= OF_HEAD) {
            c->product = OF_NOTHING;
            return;
        }
        if (c->product < OF_DOWN)
            c->product++;
        else if (++c->layer < LAYERS)
            c->product = OF_QKV;
        else
            c->product = OF_HEAD, c->layer = 0;
        Share share = shared->shares[c->product];
        int unit = first_unit(c->product, WARP);
        k = terms(c->product);
        c->output = share.first + LANE / 8, c->end = share.end, c->tiles = share.tiles;
        c->left = c->units = first_unit(c->product, WARP + 1) - unit;
        c->at = matrix(c->product, &shared->layers[c->layer], a) + (long long)c->output * k + unit * UNIT;
        c->at += LANE % 8 * 8;
        c->second = second_half(c->product) * k;
    } while (c->units == 0 || c->tiles == 0);
}

DEVICE void issue_copies(Stream *s, int piece, const Shared *shared, const Args *a) {
    Cursor *c = &s->next;
    if (c->product != OF_NOTHING) {
        int ahead = c->product == OF_GATE_UP ? 0 : 8, row = 4 * terms(c->product);
        UNROLL for (int u = 0; u < SPAN; u++) {
            char *to = s->ring + piece * PIECE + u * 2048;
            const bf16 *from = c->at + u * UNIT;
            copy_16(to + s->put[0], from, u < c->left && c->output < c->end);
            copy_16(to + s->put[1], from + row, u < c->left && c->output + 4 < c->end);
            copy_16(to + s->put[0] + 1024, from + c->second, u < c->left && c->output + ahead < c->end);
            copy_16(to + s->put[1] + 1024, from + c->second + row, u < c->left && c->output + ahead + 4 < c->end);
        }
        c->at += SPAN * UNIT, c->left -= SPAN;
        if (c->left <= 0) advance(c, shared, a);
    }
    commit_copies();
}

DEVICE void begin(Stream *s, const Shared *shared, const Args *a) {
    int line = LANE / 8, g = LANE / 4, t = LANE % 4;
    s->ring = shared->ring + WARP * STAGES * PIECE;
    s->head = 0;
    /* Lines of odd outputs have their halves exchanged, so that a tensor core's lanes read different banks. */
    s->put[0] = line * 128 + (LANE % 8 ^ (line % 2 * 4)) * 16, s->put[1] = s->put[0] + 512;
    s->take[0] = g * 128 + (t ^ (g % 2 * 4)) * 16, s->take[1] = g * 128 + ((t + 4) ^ (g % 2 * 4)) * 16;
    s->next.product = OF_DOWN, s->next.layer = -1, s->next.tiles = 0; /* what is before the first layer's first */
    s->next.units = 0, s->next.second = 0, s->next.output = 0, s->next.end = 0, s->next.at = 0;
    advance(&s->next, shared, a);
    ONE_BY_ONE for (int i = 0; i < STAGES - 1; i++) issue_copies(s, i, shared, a);
}

/* sums += this piece's 16 outputs x SPAN units times the rows', of which this lane has its own in `x`. */
DEVICE void multiply(Stream *s, float sums[NT][4], const Four *x, const Shared *shared, const Args *a) {
    const char *piece = s->ring + s->head * PIECE;
    Four first[2 * SPAN], second[2 * SPAN];
    wait_for_copies(STAGES - 2);
    sync_warp();
    UNROLL for (int u = 0; u < 2 * SPAN; u++) {
        first[u] = *(const Four *)(piece + u / 2 * 2048 + s->take[u % 2]);
        second[u] = *(const Four *)(piece + u / 2 * 2048 + s->take[u % 2] + 1024);
    }
    issue_copies(s, s->head == 0 ? STAGES - 1 : s->head - 1, shared, a);
    s->head = s->head == STAGES - 1 ? 0 : s->head + 1;
    UNROLL for (int u = 0; u < 2 * SPAN; u++) {
        UNROLL for (int i = 0; i < NT; i++) {
            Four by = x[(u * NT + i) * 32];
            tensor_core(sums[i], first[u].x, second[u].x, first[u].y, second[u].y, by.x, by.y);
            tensor_core(sums[i], first[u].z, second[u].z, first[u].w, second[u].w, by.z, by.w);
        }
    }
}

/* Where a row's number is in what products are taken of. */
DEVICE int place(int row, int i) { return (i / 32 * ROWS + row) * 32 + i % 32; }

/* This lane's numbers of a unit of its rows, which other blocks wrote; zeros if it is not there. */
DEVICE void read_unit(Four x[2][NT], const bf16 *from, int unit, int is_there, const Args *a) {
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int i = 0; i < NT; i++) {
            int row = i * 8 + LANE / 4;
            x[half][i] = is_there && row < a->rows
                             ? read_fresh(from + place(row, unit * UNIT + half * 32 + LANE % 4 * 8))
                             : NOTHING;
        }
    }
}

/* RMSNorm(x) . weight: this warp's units of all rows, into `mine`. */
DEVICE void keep_normed(
    const bf16 *weight, int unit, int units, Four *mine, const Shared *shared, const Args *a) {
    float square[NT];
    Four x[2 * KEPT][NT], by[2 * KEPT];
    UNROLL for (int u = 0; u < KEPT; u++) read_unit(x + 2 * u, a->x, unit + u, u < units, a);
    UNROLL for (int u = 0; u < 2 * KEPT; u++)
        by[u] = u / 2 < units ? *(const Four *)(weight + unit * UNIT + u * 32 + LANE % 4 * 8) : NOTHING;
    UNROLL for (int i = 0; i < NT; i++) {
        square[i] = 0;
        UNROLL for (int u = 0; u < 2 * KEPT; u++) square[i] += squares_of(x[u][i]);
        square[i] += shuffle_xor(square[i], 1);
        square[i] += shuffle_xor(square[i], 2);
        if (LANE % 4 == 0) shared->squares[WARP * ROWS + i * 8 + LANE / 4] = square[i];
    }
    sync_block();
    UNROLL for (int i = 0; i < NT; i++) {
        float sum = 0;
        UNROLL for (int w = 0; w < WARPS; w++) sum += shared->squares[w * ROWS + i * 8 + LANE / 4];
        square[i] = reciprocal_root(sum / H + EPS);
    }
    UNROLL for (int u = 0; u < 2 * KEPT; u++) {
        UNROLL for (int i = 0; i < NT; i++) mine[(u * NT + i) * 32] = scaled(x[u][i], square[i], by[u]);
    }
}

DEVICE void put_sums(const Shared *shared, int tile, float sums[NT][4]) {
    float *to = shared->sums + ((tile % TILES) * WARPS + WARP) * NT * 128 + LANE * 2;
    UNROLL for (int i = 0; i < NT; i++) {
        to[i * 128] = sums[i][0], to[i * 128 + 1] = sums[i][1];
        to[i * 128 + 64] = sums[i][2], to[i * 128 + 65] = sums[i][3];
    }
}

/* The sum of the warps' sums at a place of a tile, [NT][16][8]. */
DEVICE float added(const Shared *shared, int tile, int place) {
    const float *from = shared->sums + tile * WARPS * NT * 128 + place;
    float sum = 0;
    UNROLL for (int w = 0; w < WARPS; w++) sum += from[w * NT * 128];
    return sum;
}

/* Where element e of a group of tiles belongs: tiles of 16 outputs, or of 8 pairs, x 8 rows. */
typedef struct {
    int tile, place /* in its sums */, row, output, is_there;
} Element;

DEVICE Element element(int e, int product, int begin, int tiles, const Shared *shared, const Args *a) {
    int size = product == OF_GATE_UP ? 64 : 128, within = e % size;
    Element x;
    x.tile = e / NT / size;
    x.place = e / size % NT * 128 + within;
    x.row = e / size % NT * 8 + within % 8;
    x.output = shared->shares[product].first + (begin + x.tile) * (size / 8) + within / 8;
    x.is_there = x.tile < tiles && x.output < shared->shares[product].end && x.row < a->rows;
    return x;
}

/* What is added to an output of a product: a bias, or what the layer began with. */
DEVICE float addend(int product, Element x, const Layer *layer, const Args *a) {
    if (!x.is_there) return 0;
    if (product == OF_OUT || product == OF_DOWN) return to_float(*(volatile bf16 *)(a->x + place(x.row, x.output)));
    return HAS_BIAS && product == OF_QKV ? to_float(layer->bias[x.output]) : 0;
}

/* What becomes of a product's outputs: `tiles` of them from tile `begin` on are in `sums`. `more` is the addend of this
   thread's first element. */
DEVICE void finish(
    int product, const Layer *layer, int begin, int tiles, float more, const Shared *shared, const Args *a) {
    int n = tiles * NT * (product == OF_GATE_UP ? 64 : 128);
    sync_block();
    ONE_BY_ONE for (int e = THREAD; e < n; e += THREADS) {
        Element x = element(e, product, begin, tiles, shared, a);
        if (!x.is_there) continue;
        if (begin || e >= THREADS) more = addend(product, x, layer, a);
        float sum = added(shared, x.tile, x.place);
        if (product == OF_GATE_UP) {
            float gate = rounded(sum), up = rounded(added(shared, x.tile, x.place + 64));
            a->gated[place(x.row, x.output)] = to_bf16(rounded(divided(gate, 1.0f + exponential(-gate))) * up);
        } else if (product == OF_QKV) {
            a->qkv[(long long)x.row * QKV + x.output] = to_bf16(sum + more);
        } else if (product == OF_HEAD) {
            a->logits[(long long)x.row * V + x.output] = sum;
        } else {
            a->x[place(x.row, x.output)] = to_bf16(more + rounded(sum));
        }
    }
}

DEVICE void end_tile(int product, const Layer *layer, int tile, int tiles, float sums[NT][4], float more,
                     const Shared *shared, const Args *a) {
    if (tile && tile % TILES == 0) sync_block(); /* the sums before have been read */
    put_sums(shared, tile, sums);
    if (tile % TILES == TILES - 1 || tile == tiles - 1)
        finish(product, layer, tile / TILES * TILES, tile % TILES + 1, more, shared, a);
}

/* This block's part of a product: with normed rows, which a warp keeps, or with the rows `from`, which it reads again
   for each tile (there are few tiles then). */
DEVICE void multiply_all(int product, const Layer *layer, const bf16 *norm, const bf16 *from, Stream *s,
                         const Shared *shared, const Args *a) {
    int unit = first_unit(product, WARP), units = first_unit(product, WARP + 1) - unit;
    int tiles = shared->shares[product].tiles;
    Four x[2 * AHEAD][NT], *mine = shared->rows + WARP * 2 * AT_HAND * NT * 32 + LANE;
    float more = addend(product, element(THREAD, product, 0, tiles, shared, a), layer, a);
    if (norm)
        keep_normed(norm, unit, units, mine, shared, a);
    else
        UNROLL for (int u = 0; u < AHEAD; u++) read_unit(x + 2 * u, from, unit + u, u < units, a);
    ONE_BY_ONE for (int tile = 0; tile < tiles; tile++) {
        float sums[NT][4] = {{0}};
        ONE_BY_ONE for (int first = 0, n; first < units; first += n) {
            n = norm ? units : units - first < AHEAD ? units - first : AHEAD;
            if (!norm) {
                int next = first + n < units ? first + n : 0;
                UNROLL for (int i = 0; i < 2 * AHEAD * NT; i++) mine[i * 32] = x[i / NT][i % NT];
                if (next || tile < tiles - 1) {
                    UNROLL for (int u = 0; u < AHEAD; u++)
                        read_unit(x + 2 * u, from, unit + next + u, next + u < units, a);
                }
            }
            ONE_BY_ONE for (int u = 0; u < n; u += SPAN) multiply(s, sums, mine + 2 * u * NT * 32, shared, a);
        }
        end_tile(product, layer, tile, tiles, sums, more, shared, a);
    }
}

/* A head's numbers as tensor cores take them: of each 32 this lane has 8, and those at half a head's distance too. */
DEVICE void read_head(Four x[DU], const bf16 *from, int is_there) {
    UNROLL for (int j = 0; j < DU; j++) x[j] = is_there ? read_fresh(from + j * 32 + LANE % 4 * 8) : NOTHING;
}

/* Normed, where the family does that, and rotated by the cosines and sines of a position. */
DEVICE void rotate_head(Four x[DU], const bf16 *norm, const Four c[DU], const Four s[DU]) {
    Four raw[DU];
    UNROLL for (int j = 0; j < DU; j++) raw[j] = x[j];
    if (HAS_NORM) {
        float square = 0;
        UNROLL for (int j = 0; j < DU; j++) square += squares_of(raw[j]);
        square += shuffle_xor(square, 1);
        square += shuffle_xor(square, 2);
        square = reciprocal_root(square / D + EPS);
        UNROLL for (int j = 0; j < DU; j++)
            raw[j] = scaled(raw[j], square, *(const Four *)(norm + j * 32 + LANE % 4 * 8));
    }
    UNROLL for (int j = 0; j < DU; j++) x[j] = rotated(raw[j], c[j], raw[(j + DU / 2) % DU], s[j]);
}

/* What lane 4g + t of a warp knows of the keys it has seen: of queries 2t and 2t + 1 their largest score, its share of
   the weights, and the weighted values in numbers 64j + 8g to 64j + 8g + 7. */
typedef struct {
    float top[2], total[2], acc[VU][4][4];
} Softmax;

/* 16 keys and values as tensor cores take them: keys g and g + 8, values 2t, 2t + 1, 2t + 8 and 2t + 9. */
typedef struct {
    Four keys[DU][2], values[VU][4];
} Sixteen;

DEVICE unsigned word(Four x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
DEVICE unsigned low_halves(unsigned x, unsigned y) { return (x & 0xffffu) | y << 16; }
DEVICE unsigned high_halves(unsigned x, unsigned y) { return x >> 16 | (y & 0xffff0000u); }

DEVICE void multiply_keys(float score[4], const Sixteen *x, const Four query[DU]) {
    UNROLL for (int j = 0; j < DU; j++) {
        tensor_core(score, x->keys[j][0].x, x->keys[j][1].x, x->keys[j][0].y, x->keys[j][1].y, query[j].x, query[j].y);
        tensor_core(score, x->keys[j][0].z, x->keys[j][1].z, x->keys[j][0].w, x->keys[j][1].w, query[j].z, query[j].w);
    }
}

/* Values of 16 keys, of which those below `behind` count, by their scores. */
DEVICE void multiply_values(Softmax *seen, const float score[4], const Sixteen *x, int behind) {
    float less[2], low[2], high[2];
    int g = LANE / 4;
    UNROLL for (int q = 0; q < 2; q++) {
        low[q] = g < behind ? score[q] * SCALE : NONE, high[q] = g + 8 < behind ? score[q + 2] * SCALE : NONE;
        float top = larger(low[q], high[q]);
        UNROLL for (int far = 4; far < 32; far *= 2) {
            top = larger(top, shuffle_xor(top, far));
        }
        top = larger(seen->top[q], top);
        less[q] = power_of_2(seen->top[q] - top);
        low[q] = g < behind ? power_of_2(low[q] - top) : 0, high[q] = g + 8 < behind ? power_of_2(high[q] - top) : 0;
        seen->total[q] = seen->total[q] * less[q] + low[q] + high[q];
        seen->top[q] = top;
    }
    unsigned first = transposed(packed(low[0], low[1])), second = transposed(packed(high[0], high[1]));
    UNROLL for (int j = 0; j < VU; j++) {
        UNROLL for (int i = 0; i < 4; i++) { /* numbers 2i and 2i + 1 of the 8: rows g and g + 8 */
            unsigned value[4];
            UNROLL for (int k = 0; k < 4; k++) value[k] = word(x->values[j][k], i);
            UNROLL for (int k = 0; k < 4; k++) seen->acc[j][i][k] *= less[k % 2];
            tensor_core(seen->acc[j][i], low_halves(value[0], value[1]), high_halves(value[0], value[1]),
                        low_halves(value[2], value[3]), high_halves(value[2], value[3]), first, second);
        }
    }
}

/* Where a warp puts number e of a query, so that its lanes write to different banks: pairs of numbers are exchanged. */
DEVICE int joined_place(int query, int e) {
    int swap = e / 32 % 2 + query / 2 % 2 * 2;
    return query * D + (e ^ swap * 2);
}

/* A part of the keys of one row and key head, which one block sees to, 16 at a time and the newest by itself. */
typedef struct {
    int row, head, split, splits, is_alive, newest, first, pieces;
    int page[2];    /* of this warp's first and second piece */
    long long home; /* of the newest token */
} Part;

DEVICE int page_of(const Part *part, int token, const Args *a) {
    return part->is_alive ? a->table[part->row * a->table_stride + token / PAGE] : 0;
}
DEVICE long long cell(const Part *part, int page, int token, const Args *a) {
    return page * a->page_stride + part->head * a->head_stride + token % PAGE * a->token_stride;
}
DEVICE int page_of_piece(const Part *part, int piece, const Args *a) {
    int at = (part->first + piece) * 16; /* the newest token's piece begins where it may have no page */
    return piece < part->pieces && at < part->newest ? page_of(part, at, a) : 0;
}

/* A row has as many parts as keep all warps busy, if there are so many blocks. */
DEVICE Part part_of(int unit, const Args *a) {
    Part part;
    int pair = unit / a->splits, blocks, each, end;
    part.split = unit % a->splits, part.row = pair / NK, part.head = pair % NK;
    part.is_alive = a->stop[part.row] == 0;
    part.newest = part.is_alive ? a->length[part.row] - 1 : 0;
    blocks = (part.newest + 15) / 16;
    part.splits = (blocks + WARPS - 1) / WARPS;
    part.splits = part.splits > a->splits ? a->splits : part.splits < 1 ? 1 : part.splits;
    each = (blocks + part.splits - 1) / part.splits;
    part.splits = each ? (blocks + each - 1) / each : 1; /* rounding up may leave none for the last ones */
    part.first = part.split * each;
    end = part.first + each < blocks ? part.first + each : blocks;
    part.pieces = part.split >= part.splits ? 0 : end > part.first ? end - part.first : 0;
    part.pieces += part.split == part.splits - 1;
    part.page[0] = page_of_piece(&part, WARP, a), part.page[1] = page_of_piece(&part, WARP + WARPS, a);
    part.home = cell(&part, page_of(&part, part.newest, a), part.newest, a);
    return part;
}

DEVICE int is_newest(const Part *part, int piece) {
    return part->split == part->splits - 1 && piece == part->pieces - 1;
}

/* How many keys of a piece belong to earlier tokens. */
DEVICE int earlier(const Part *part, int piece) {
    return piece < part->pieces && !is_newest(part, piece) ? part->newest - (part->first + piece) * 16 : 0;
}

/* Keys, and values, of earlier tokens; nothing in this launch decides them. */
DEVICE void read_keys(Sixteen *x, const Part *part, int piece, int page, const Layer *layer, const Args *a) {
    int behind = earlier(part, piece), g = LANE / 4;
    const bf16 *from = layer->keys + cell(part, page, (part->first + piece) * 16 + g, a) + LANE % 4 * 8;
    UNROLL for (int j = 0; j < DU; j++) {
        x->keys[j][0] = g < behind ? *(const Four *)(from + j * 32) : NOTHING;
        x->keys[j][1] = g + 8 < behind ? *(const Four *)(from + 8 * a->token_stride + j * 32) : NOTHING;
    }
}
DEVICE void read_values(Sixteen *x, const Part *part, int piece, int page, const Layer *layer, const Args *a) {
    int behind = earlier(part, piece), first = LANE % 4 * 2;
    const bf16 *from = layer->values + cell(part, page, (part->first + piece) * 16 + first, a) + LANE / 4 * 8;
    UNROLL for (int i = 0; i < VU * 4; i++) {
        int token = i % 2 + i / 2 % 2 * 8;
        x->values[i / 4][i % 4] =
            first + token < behind ? *(const Four *)(from + token * a->token_stride + i / 4 * 64) : NOTHING;
    }
}

/* Attention of one row's newest token with one key head over a part of its keys. `x` has this warp's first 16 of them
   if `is_read`. */
DEVICE void attend(const Part *part, Sixteen *x, int is_read, const Layer *layer, const Shared *shared, const Args *a) {
    int g = LANE / 4, t = LANE % 4, pair = part->row * NK + part->head, row = part->row, head = part->head;
    const bf16 *qkv = a->qkv + (long long)row * QKV, *new_value = qkv + (NQ + NK + head) * D;
    int has_newest = part->split == part->splits - 1 && (part->pieces - 1) % WARPS == WARP, page = part->page[1];
    Four query[DU], key[DU], value[VU], c[DU], s[DU];
    Softmax seen;
    read_head(query, qkv + (head * G + (g < G ? g : 0)) * D, g < G);
    read_head(key, qkv + (NQ + head) * D, has_newest);
    UNROLL for (int j = 0; j < VU; j++) value[j] = has_newest && t == 0 ? read_fresh(new_value + j * 64 + g * 8) : NOTHING;
    UNROLL for (int j = 0; j < DU; j++) {
        c[j] = *(const Four *)(a->cos + (long long)part->newest * D + j * 32 + t * 8);
        s[j] = *(const Four *)(a->sin + (long long)part->newest * D + j * 32 + t * 8);
    }
    if (!is_read) read_keys(x, part, WARP, part->page[0], layer, a), read_values(x, part, WARP, part->page[0], layer, a);
    UNROLL for (int q = 0; q < 2; q++) seen.top[q] = NONE, seen.total[q] = 0;
    UNROLL for (int i = 0; i < VU * 16; i++) seen.acc[i / 16][i / 4 % 4][i % 4] = 0;
    rotate_head(query, layer->query_norm, c, s);
    if (has_newest) {
        rotate_head(key, layer->key_norm, c, s);
        UNROLL for (int j = 0; j < DU; j++) {
            if (g == 0) *(Four *)(layer->keys + part->home + j * 32 + t * 8) = key[j];
        }
        UNROLL for (int j = 0; j < VU; j++) {
            if (t == 0) *(Four *)(layer->values + part->home + j * 64 + g * 8) = value[j];
        }
    }
    ONE_BY_ONE for (int piece = WARP; piece < part->pieces; piece += WARPS) {
        int is_last = has_newest && piece == part->pieces - 1, next = piece + WARPS;
        float score[4] = {0};
        if (is_last) { /* one key; those of the fifteen others do not count */
            UNROLL for (int j = 0; j < DU; j++) x->keys[j][0] = key[j], x->keys[j][1] = NOTHING;
            UNROLL for (int i = 0; i < VU * 4; i++) x->values[i / 4][i % 4] = i % 4 ? NOTHING : value[i / 4];
        }
        multiply_keys(score, x, query);
        read_keys(x, part, next, page, layer, a);
        multiply_values(&seen, score, x, is_last ? 1 : part->newest - (part->first + piece) * 16);
        read_values(x, part, next, page, layer, a);
        page = page_of_piece(part, next + WARPS, a);
    }

    /* Join the warps. */
    UNROLL for (int q = 0; q < 2; q++) {
        UNROLL for (int far = 4; far < 32; far *= 2) seen.total[q] += shuffle_xor(seen.total[q], far);
        if (g == 0) {
            shared->top[WARP * 8 + 2 * t + q] = seen.top[q];
            shared->total[WARP * 8 + 2 * t + q] = seen.total[q];
        }
        if (2 * t + q >= G) continue;
        UNROLL for (int i = 0; i < VU * 4; i++) {
            float *to = shared->sums + WARP * G * D + joined_place(2 * t + q, i / 4 * 64 + g * 8 + i % 4 * 2);
            to[0] = seen.acc[i / 4][i % 4][q], to[1] = seen.acc[i / 4][i % 4][q + 2];
        }
    }
    sync_block();
    UNROLL for (int at = 0; at < G * D; at += THREADS) {
        int e = at + THREAD, q = e / D;
        float top = NONE, total = 0, sum = 0;
        if (e >= G * D) continue;
        UNROLL for (int w = 0; w < WARPS; w++) top = larger(top, shared->top[w * 8 + q]);
        UNROLL for (int w = 0; w < WARPS; w++) {
            float weight = weight_of(shared->top[w * 8 + q], top);
            total += weight * shared->total[w * 8 + q];
            sum += weight * shared->sums[w * G * D + joined_place(q, e % D)];
        }
        if (part->splits == 1) {
            a->mixed[place(row, head * G * D + e)] = to_bf16(divided(sum, total));
        } else {
            long long at_part = pair * a->splits + part->split;
            a->part[at_part * G * D + e] = sum;
            if (e % D == 0) a->part_max[at_part * 8 + q] = top, a->part_sum[at_part * 8 + q] = total;
        }
    }
    if (part->splits == 1) return;

    /* Whoever comes last joins the parts, 4 numbers a thread and 8 parts at a time. */
    sync_block();
    if (THREAD == 0) {
        *shared->flag = arrive_and_count(&a->arrived[pair]) == part->splits - 1;
    }
    sync_block();
    if (!*shared->flag) return;
    UNROLL for (int at = 0; at < G * D; at += 4 * THREADS) {
        int e = at + 4 * THREAD, q = e / D;
        float top = NONE, total = 0, sum[4] = {0};
        if (e >= G * D) continue;
        ONE_BY_ONE for (int begin = 0; begin < part->splits; begin += 8) {
            Four sums[8];
            float tops[8], totals[8], before = top;
            UNROLL for (int i = 0; i < 8; i++) {
                long long other = pair * a->splits + begin + i;
                int is_part = begin + i < part->splits;
                tops[i] = is_part ? fresh_float(&a->part_max[other * 8 + q]) : NONE;
                totals[i] = is_part ? fresh_float(&a->part_sum[other * 8 + q]) : 0;
                sums[i] = is_part ? read_fresh((const bf16 *)&a->part[other * G * D + e]) : NOTHING;
            }
            UNROLL for (int i = 0; i < 8; i++) top = larger(top, tops[i]);
            total *= weight_of(before, top);
            UNROLL for (int k = 0; k < 4; k++) sum[k] *= weight_of(before, top);
            UNROLL for (int i = 0; i < 8; i++) {
                float weight = weight_of(tops[i], top);
                total += weight * totals[i];
                UNROLL for (int k = 0; k < 4; k++) sum[k] += weight * bits_to_float(word(sums[i], k));
            }
        }
        unsigned *to = (unsigned *)(a->mixed + place(row, head * G * D + e));
        to[0] = packed(divided(sum[0], total), divided(sum[1], total));
        to[1] = packed(divided(sum[2], total), divided(sum[3], total));
    }
    if (THREAD == 0) a->arrived[pair] = 0;
}

/* Its row's rotation, and the keys and values of earlier tokens that this warp will see: from memory to the cache. Where
   a warp has more than one piece that only keeps others waiting. */
DEVICE void prefetch_keys(const Part *part, const Layer *layer, const Args *a) {
    int at = (part->first + WARP) * 16 + LANE / 2;
    if (WARP >= part->pieces) return;
    if (LANE < 2 * D / 64) prefetch((LANE % 2 ? a->cos : a->sin) + (long long)part->newest * D + LANE / 2 * 64);
    if (part->pieces > WARPS || at >= part->newest) return;
    long long from = cell(part, part->page[0], at, a) + LANE % 2 * (D / 2);
    prefetch(layer->keys + from), prefetch(layer->values + from);
}

/* A vector that all blocks read. */
DEVICE void prefetch_vector(const bf16 *vector, int n) {
    for (int i = THREAD * 64; i < n; i += THREADS * 64) prefetch(vector + i);
}

/* A barrier in two halves: what this block wrote is there for all; what all blocks wrote can be read. */
DEVICE void arrive(int *target, const Args *a) {
    sync_block();
    *target = (int)((unsigned)*target + BLOCKS);
    if (THREAD == 0) arrive_at(a->barrier);
}
DEVICE void await_others(int target, const Args *a) {
    if (THREAD == 0) {
        while ((int)((unsigned)fresh_count(a->barrier) - (unsigned)target) < 0) pause_spinning();
    }
    sync_block();
}

KERNEL decode_step(const PARAMETER Args arguments) {
    const Args *a = &arguments;
    SHARED_MEMORY(memory);
    Shared held, *shared = &held;
    Stream stream;
    int is_any_alive = 0;
    UNROLL for (int row = 0; row < ROWS; row++) is_any_alive |= row < a->rows && a->stop[row] == 0;
    if (!is_any_alive) return; /* the rest of a tick in which all rows have ended */
    int target = (int)((unsigned)a->barrier[1] * (BARRIERS * (unsigned)BLOCKS));
    shared->ring = memory;
    shared->rows = (Four *)(memory + WARPS * STAGES * PIECE);
    shared->sums = (float *)(shared->rows + WARPS * 2 * AT_HAND * NT * 32);
    shared->squares = shared->sums + TILES * WARPS * NT * 128;
    shared->top = shared->squares + WARPS * ROWS;
    shared->total = shared->top + WARPS * 8;
    shared->layers = (Layer *)(shared->total + WARPS * 8);
    shared->shares = (Share *)(shared->layers + LAYERS);
    shared->flag = (int *)(shared->shares + OF_NOTHING);
    if (THREAD < OF_NOTHING) shared->shares[THREAD] = share_of(THREAD);
    for (int i = THREAD; i < (int)(LAYERS * sizeof(Layer) / 8); i += THREADS)
        ((long long *)shared->layers)[i] = ((const long long *)a->layers)[i];
    sync_block();
    begin(&stream, shared, a);

    int units = a->rows * NK * a->splits;
    Part part;
    if (BLOCK < units)
        part = part_of(BLOCK, a);
    else
        part.pieces = 0;
    Share share = shared->shares[OF_OUT];
    for (int e = THREAD; e < (share.end - share.first) * a->rows; e += THREADS) {
        int row = e / (share.end - share.first), output = share.first + e % (share.end - share.first);
        a->x[place(row, output)] = a->embedding[(long long)a->token[row] * H + output];
    }
    arrive(&target, a);
    await_others(target, a);

    ONE_BY_ONE for (int step = 0; step <= LAYERS * 4; step++) { /* four products a layer, then the head */
        int product = step == LAYERS * 4 ? OF_HEAD : step % 4;
        const Layer *layer = &shared->layers[product == OF_HEAD ? 0 : step / 4];
        const bf16 *norm = product == OF_QKV       ? layer->input_norm
                           : product == OF_GATE_UP ? layer->post_norm
                           : product == OF_HEAD    ? a->norm
                                                   : 0;
        if (product == OF_QKV) prefetch_keys(&part, layer, a);
        multiply_all(product, layer, norm, product == OF_OUT ? a->mixed : a->gated, &stream, shared, a);
        if (product == OF_QKV) {
            int is_read = WARP < part.pieces && !is_newest(&part, WARP);
            Sixteen x;
            arrive(&target, a);
            if (is_read) {
                read_keys(&x, &part, WARP, part.page[0], layer, a);
                read_values(&x, &part, WARP, part.page[0], layer, a);
            }
            prefetch_vector(layer->post_norm, H);
            await_others(target, a);
            ONE_BY_ONE for (int unit = BLOCK; unit < units; unit += BLOCKS) {
                Part now = part;
                if (unit != BLOCK) {
                    now = part_of(unit, a), is_read = 0;
                    sync_block();
                }
                if (now.pieces) attend(&now, &x, is_read, layer, shared, a);
            }
        }
        if (product == OF_GATE_UP && step < LAYERS * 4 - 4) prefetch_vector(layer[1].input_norm, H);
        if (product == OF_HEAD) break;
        arrive(&target, a);
        await_others(target, a);
    }
    wait_for_copies(0);
    if (BLOCK == 0 && THREAD == 0) a->barrier[1]++;
}
