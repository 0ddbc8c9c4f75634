/* All blocks of one launch of step.cu, on fibers. */

#include "cuda.h"
#include "step.cu"

#define STACK (96 * 1024)

static const Args *given;

static void fiber(void) {
    decode_step(*given);
    here->is_done = 1;
    while (1) give_way();
}

/* Warps in a random order, each with up to 40 turns before the next: the few orders that a fault needs are among them. */
static int by_chance(Fiber *fibers, int n, unsigned seed) {
    int left = n, rounds = 0;
    for (; left && rounds < 4000000; rounds++) {
        seed = seed * 1664525u + 1013904223u;
        int warp = (seed >> 16) % (n / 32), turns = (seed >> 8) % 4 ? 1 : 40;
        for (int turn = 0; turn < turns; turn++) {
            for (int i = warp * 32; i < warp * 32 + 32; i++) {
                if (fibers[i].is_done) continue;
                resume(&fibers[i]);
                left -= fibers[i].is_done;
            }
        }
    }
    return left;
}

/* Each warp has `turns` turns before the next; below 0 they take turns by chance, of that seed. Returns 0, or 1 if the
   fibers wait for each other for ever. */
int run(const Args *args, int shared_bytes, int early, int turns) {
    int n = BLOCKS * THREADS, left = n, rounds = 0;
    Fiber *fibers = calloc(n, sizeof *fibers);
    Meeting *of_block = calloc(BLOCKS, sizeof *of_block), *of_warp = calloc(n / 32, sizeof *of_warp);
    unsigned(*exchanged)[32][16] = calloc(n / 32, sizeof *exchanged);
    char *shared = malloc((size_t)BLOCKS * shared_bytes), *stacks = malloc((size_t)n * STACK);
    memset(shared, 0xff, (size_t)BLOCKS * shared_bytes); /* NaN, should it be read */
    given = args, copies_are_early = early;
    for (int i = 0; i < n; i++) {
        Fiber *f = &fibers[i];
        f->block = i / THREADS, f->thread = i % THREADS;
        f->shared = shared + (size_t)f->block * shared_bytes;
        f->of_block = &of_block[f->block], f->of_warp = &of_warp[i / 32], f->exchanged = exchanged[i / 32];
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = stacks + (size_t)i * STACK, f->context.uc_stack.ss_size = STACK;
        makecontext(&f->context, fiber, 0);
    }
    if (turns < 0) left = by_chance(fibers, n, -turns);
    for (; turns > 0 && left && rounds < 2000000; rounds++) {
        left = 0;
        for (int warp = 0; warp < n / 32; warp++) {
            for (int turn = 0; turn < turns; turn++) {
                for (int i = warp * 32; i < warp * 32 + 32; i++) {
                    if (!fibers[i].is_done) resume(&fibers[i]);
                    left += turn == turns - 1 && !fibers[i].is_done;
                }
            }
        }
    }
    free(fibers), free(of_block), free(of_warp), free(exchanged), free(shared), free(stacks);
    return left != 0;
}
