// The sum over ranks of few rows, residual and RMS norm in one launch (sm_90a).
//
// RANKS rows that follow one another are a group, and a block has a group. Of each group every rank
// adds up one row: it reads the partial rows of all ranks, adds them in the order of ranks, and writes
// the total to all ranks. Then every rank adds the totals to its residual rows and normalises these:
// all ranks have the same. A block meets the same block of all other ranks before it reads partial
// rows and again when its totals are written; so a rank whose kernel has ended has all totals, and
// nobody reads its partial rows any more.
//
// A flag is a word for a block and a rank: the other rank sets it from 0 to 1 when it has come, and
// the block takes it back. So it is the same in every replay of a graph.
//
// The compiler is given HIDDEN, RANKS and EARLY (it may start before the kernel in front has ended,
// and the one behind before it has); a block has a thread for each 16 bytes of a row.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Arguments {
    u64 partial[RANKS];  // bf16 [rows, HIDDEN] of each rank
    u64 total[RANKS];    // the same shape: where totals go
    u64 flags[RANKS];    // u32 [blocks, RANKS]
    u64 residual, out;   // bf16 [rows, HIDDEN]
    u64 weight;          // bf16 [HIDDEN]
    int rows, rank;
    float eps;
};

struct alignas(16) Vector {
    u32 pairs[4];
};

__device__ __forceinline__ Vector seen(const Vector* from) {
    Vector v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.pairs[0]), "=r"(v.pairs[1]), "=r"(v.pairs[2]), "=r"(v.pairs[3])
                 : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 swapped_behind(u32* word, u32 old, u32 with) {
    u32 was;
    asm volatile("atom.release.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(was) : "l"(word), "r"(old), "r"(with) : "memory");
    return was;
}

__device__ __forceinline__ u32 swapped_before(u32* word, u32 old, u32 with) {
    u32 was;
    asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(was) : "l"(word), "r"(old), "r"(with) : "memory");
    return was;
}

__device__ __forceinline__ void meet(const Arguments& a) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < RANKS && other != a.rank) {
        u32* theirs = (u32*)a.flags[other] + blockIdx.x * RANKS + a.rank;
        u32* own = (u32*)a.flags[a.rank] + blockIdx.x * RANKS + other;
        u64 tries = 0;
        while (swapped_behind(theirs, 0, 1) != 0)
            if (++tries > 1u << 22) __trap();
        while (swapped_before(own, 1, 0) != 1)
            if (++tries > 1u << 22) __trap();
    }
    __syncthreads();
}

constexpr int THREADS = HIDDEN / 8;
constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_norm(const __grid_constant__ Arguments a) {
    __shared__ float sums[RANKS][WARPS];
    const Vector weight = ((const Vector*)a.weight)[threadIdx.x];
#if EARLY
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    meet(a);
    const int groups = (a.rows + RANKS - 1) / RANKS;
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const int row = group * RANKS + a.rank;
        if (row >= a.rows) continue;
        const int place = row * THREADS + threadIdx.x;
        Vector parts[RANKS], total;
#pragma unroll
        for (int i = 0; i < RANKS; ++i) parts[i] = seen((const Vector*)a.partial[i] + place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x = 0.0f, y = 0.0f;
#pragma unroll
            for (int j = 0; j < RANKS; ++j) {
                x += low(parts[j].pairs[i]);
                y += high(parts[j].pairs[i]);
            }
            total.pairs[i] = packed(x, y);
        }
#pragma unroll
        for (int i = 0; i < RANKS; ++i) ((Vector*)a.total[i])[place] = total;
    }
    meet(a);
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        Vector after[RANKS];
        float squares[RANKS];
#pragma unroll
        for (int j = 0; j < RANKS; ++j) {
            const int place = (group * RANKS + j) * THREADS + threadIdx.x;
            squares[j] = 0.0f;
            if (group * RANKS + j >= a.rows) continue;
            const Vector total = seen((const Vector*)a.total[a.rank] + place);
            const Vector before = ((const Vector*)a.residual)[place];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                after[j].pairs[i] = packed(low(before.pairs[i]) + low(total.pairs[i]),
                                           high(before.pairs[i]) + high(total.pairs[i]));
                squares[j] += low(after[j].pairs[i]) * low(after[j].pairs[i]);
                squares[j] += high(after[j].pairs[i]) * high(after[j].pairs[i]);
            }
            ((Vector*)a.residual)[place] = after[j];
            for (int step = 16; step; step /= 2)
                squares[j] += __shfl_xor_sync(0xFFFFFFFFu, squares[j], step);
            if (threadIdx.x % 32 == 0) sums[j][threadIdx.x / 32] = squares[j];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < RANKS; ++j) {
            const int place = (group * RANKS + j) * THREADS + threadIdx.x;
            if (group * RANKS + j >= a.rows) continue;
            float total = 0.0f;
            for (int i = 0; i < WARPS; ++i) total += sums[j][i];
            const float factor = rsqrtf(total / HIDDEN + a.eps);
            Vector normal;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 unit = packed(low(after[j].pairs[i]) * factor,
                                        high(after[j].pairs[i]) * factor);
                normal.pairs[i] = packed(low(unit) * low(weight.pairs[i]),
                                         high(unit) * high(weight.pairs[i]));
            }
            ((Vector*)a.out)[place] = normal;
        }
        __syncthreads();
    }
}
