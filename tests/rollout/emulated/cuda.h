/* step.cu on a CPU, for its tests: every thread of every block is a fiber, and they take turns where they wait.

   Copies into shared memory are made as late as they may be, or as early (`copies_are_early`), so that a step which
   reads too soon or overwrites too soon shows it. */

#define _GNU_SOURCE
#undef _FORTIFY_SOURCE /* it refuses jumps from stack to stack */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef uint16_t bf16;
typedef struct { unsigned x, y, z, w; } Four;

#define KERNEL static void
#define PARAMETER
#define DEVICE static inline
#define UNROLL
#define ONE_BY_ONE
#define SHARED_MEMORY(name) char *name = here->shared
#define BLOCK (here->block)
#define THREAD (here->thread)
#define WARP (here->thread / 32)
#define LANE (here->thread % 32)
#define MOST_COPIES 64

typedef struct { char *to; const void *from; int is_there, group; } Copy;
typedef struct { int come, round; } Meeting; /* where so many have come, all go on */

typedef struct {
    ucontext_t context; /* its stack */
    jmp_buf at;
    int is_started;
    int block, thread, is_done, group, n_copies;
    char *shared, *stack;
    Meeting *of_warp, *of_block;
    unsigned (*exchanged)[16]; /* [32][16], of the warp */
    Copy copies[MOST_COPIES];
} Fiber;

static Fiber *here;
static jmp_buf scheduler;
static int copies_are_early;

/* Contexts begin a fiber alone: to swap them is two system calls each time. */
static void give_way(void) {
    if (!_setjmp(here->at)) _longjmp(scheduler, 1);
}
static void resume(Fiber *fiber) {
    here = fiber;
    if (_setjmp(scheduler)) return;
    if (fiber->is_started) _longjmp(fiber->at, 1);
    fiber->is_started = 1;
    setcontext(&fiber->context);
}
static void meet(Meeting *at, int n) {
    int round = at->round;
    if (++at->come == n)
        at->come = 0, at->round++;
    else
        while (at->round == round) give_way();
}
static void sync_block(void) { meet(here->of_block, 32 * WARPS); }
static void sync_warp(void) { meet(here->of_warp, 32); }

static float as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned as_bits(float x) { unsigned y; memcpy(&y, &x, 4); return y; }

static float shuffle_xor(float x, int far) {
    here->exchanged[LANE][0] = as_bits(x);
    sync_warp();
    float other = as_float(here->exchanged[LANE ^ far][0]);
    sync_warp();
    return other;
}

static unsigned transposed(unsigned x) {
    here->exchanged[LANE][0] = x;
    sync_warp();
    int shift = LANE / 4 % 2 * 16, column = LANE / 8;
    unsigned low = here->exchanged[LANE % 4 * 2 * 4 + column][0] >> shift & 0xffff;
    unsigned high = here->exchanged[(LANE % 4 * 2 + 1) * 4 + column][0] >> shift & 0xffff;
    sync_warp();
    return low | high << 16;
}

/* ---- memory */

static void make_copy(Copy *c) {
    if (c->is_there) memcpy(c->to, c->from, 16);
    else memset(c->to, 0, 16);
}
static void copy_16(char *to, const void *from, int is_there) {
    Copy copy = {to, from, is_there, here->group};
    if (here->n_copies == MOST_COPIES) abort();
    if (copies_are_early) make_copy(&copy);
    here->copies[here->n_copies++] = copy;
}
static void commit_copies(void) { here->group++; }
static void wait_for_copies(int left) {
    int n = 0, made = 0;
    for (; made < here->n_copies && here->copies[made].group < here->group - left; made++)
        if (!copies_are_early) make_copy(&here->copies[made]);
    for (int i = made; i < here->n_copies; i++) here->copies[n++] = here->copies[i];
    here->n_copies = n;
}
static Four read_fresh(const bf16 *from) { return *(const Four *)from; }
static float fresh_float(const float *from) { return *from; }
static int fresh_count(const int *from) { return *(const volatile int *)from; }
static int arrive_and_count(int *to) { return (*to)++; }
static void pause_spinning(void) { give_way(); }
static void arrive_at(int *to) { ++*to; }
static void prefetch(const void *at) { (void)at; }
#define NOTHING ((Four){0, 0, 0, 0})

/* ---- arithmetic */

static float bits_to_float(unsigned x) { return as_float(x); }
static float to_float(bf16 x) { return as_float((unsigned)x << 16); }
static bf16 to_bf16(float x) {
    unsigned bits = as_bits(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned packed(float low, float high) { return to_bf16(low) | (unsigned)to_bf16(high) << 16; }
static unsigned multiplied(unsigned x, unsigned y) {
    return packed(as_float(x << 16) * as_float(y << 16), as_float(x & 0xffff0000u) * as_float(y & 0xffff0000u));
}
static float exponential(float x) { return expf(x); }
static float power_of_2(float x) { return exp2f(x); }
static float divided(float x, float y) { return x / y; }
static float reciprocal_root(float x) { return 1 / sqrtf(x); }

/* The layout is that of PTX, mma.m16n8k16: lane 4g + t has rows g and g + 8 of a and sums, column g of b. */
static void tensor_core(float sums[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    unsigned mine[] = {a0, a1, a2, a3, b0, b1};
    memcpy(here->exchanged[LANE], mine, sizeof mine);
    sync_warp();
    for (int i = 0; i < 4; i++) {
        int row = LANE / 4 + (i & 2) * 4, column = LANE % 4 * 2 + (i & 1);
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            unsigned a = here->exchanged[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            unsigned b = here->exchanged[column * 4 + k % 8 / 2][4 + k / 8];
            sum += to_float(k % 2 ? a >> 16 : a) * to_float(k % 2 ? b >> 16 : b);
        }
        sums[i] += sum;
    }
    sync_warp();
}
