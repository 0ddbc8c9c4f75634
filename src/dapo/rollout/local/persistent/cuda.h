/* What step.cu is made of, on a GPU of compute capability 8.0 or more. Compiled at run time, so it includes nothing. */

typedef unsigned short bf16;
typedef struct __align__(16) { unsigned x, y, z, w; } Four; /* 8 numbers of 16 bits */

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define PARAMETER __grid_constant__
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ONE_BY_ONE _Pragma("unroll 1")
#define SHARED_MEMORY(name) extern __shared__ __align__(16) char name[]
#define BLOCK ((int)blockIdx.x)
#define THREAD ((int)threadIdx.x)
#define WARP ((int)threadIdx.x / 32)
#define LANE ((int)threadIdx.x % 32)

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float x, int far) { return __shfl_xor_sync(0xffffffffu, x, far); }
/* Of 8 x 8 numbers lane 4g + t has 2t and 2t + 1 of row g; and of column g then. */
DEVICE unsigned transposed(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* ---- memory */

/* 16 bytes into shared memory, or zeros; past the first cache, and so that the second takes a whole line. */
DEVICE void copy_16(char *to, const void *from, int is_there) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
#define wait_for_copies(left) asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory")

/* What another block has written in this launch: past the first cache. */
DEVICE Four read_fresh(const bf16 *from) {
    Four x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
DEVICE float fresh_float(const float *from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
DEVICE int fresh_count(const int *from) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
/* What this block wrote can be read by whoever finds it counted; the other way round for what others wrote. */
DEVICE int arrive_and_count(int *to) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(to) : "memory");
    return before;
}
DEVICE void pause_spinning() {}
DEVICE void arrive_at(int *to) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(to) : "memory"); }
DEVICE void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

DEVICE Four nothing() {
    Four x = {0, 0, 0, 0};
    return x;
}
#define NOTHING nothing()
/* ---- arithmetic, on one number or on two of 16 bits */

DEVICE float to_float(bf16 x) { return __uint_as_float((unsigned)x << 16); }
DEVICE float bits_to_float(unsigned x) { return __uint_as_float(x); }
DEVICE bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
DEVICE unsigned packed(float low, float high) {
    unsigned x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE unsigned multiplied(unsigned x, unsigned y) {
    unsigned z;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u)); /* plus -0, which adds nothing */
    return z;
}
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float divided(float x, float y) { return __fdividef(x, y); }
DEVICE float reciprocal_root(float x) { return rsqrtf(x); }

/* sums [16, 8] += a [16, 16] . b [16, 8] in the tensor cores' layout. */
DEVICE void tensor_core(float sums[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
