// The sum over ranks of few rows, residual and RMS norm in one launch (sm_90a).
//
// Row r belongs to rank r % RANKS. Its owner reads the partial rows of all ranks, adds them up in the
// order of ranks, adds its residual row, normalises, and writes the result to all ranks; so residual
// rows live with their owners alone. A block meets the same block of all other ranks before it reads,
// and again when all that it has to write is written: a rank whose kernel has ended has all rows, and
// nobody reads its partial rows any more.
//
// A flag is a word for a block and a rank: the other rank sets it from 0 to 1 when it has come, and
// the block takes it back. So it is the same in every replay of a graph.
//
// The compiler is given HIDDEN and RANKS; a block has a thread for each 16 bytes of a row.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Arguments {
    u64 partial[RANKS];  // bf16 [rows, HIDDEN] of each rank
    u64 normal[RANKS];   // the same shape: where results go
    u64 flags[RANKS];    // u32 [blocks, RANKS]
    u64 residual;        // bf16 [rows, HIDDEN]
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

__device__ __forceinline__ float over_block(float value) {
    __shared__ float sums[WARPS];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < WARPS; ++i) total += sums[i];
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_norm(const __grid_constant__ Arguments a) {
    const Vector weight = ((const Vector*)a.weight)[threadIdx.x];
    meet(a);
    for (int row = blockIdx.x * RANKS + a.rank; row < a.rows; row += gridDim.x * RANKS) {
        const int place = row * THREADS + threadIdx.x;
        Vector parts[RANKS];
#pragma unroll
        for (int i = 0; i < RANKS; ++i) parts[i] = seen((const Vector*)a.partial[i] + place);
        Vector* residual = (Vector*)a.residual + place;
        const Vector before = *residual;
        Vector after;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x = 0.0f, y = 0.0f;
#pragma unroll
            for (int j = 0; j < RANKS; ++j) {
                x += low(parts[j].pairs[i]);
                y += high(parts[j].pairs[i]);
            }
            const u32 total = packed(x, y);  // as sums by themselves are rounded
            after.pairs[i] = packed(low(before.pairs[i]) + low(total),
                                    high(before.pairs[i]) + high(total));
            squares += low(after.pairs[i]) * low(after.pairs[i]);
            squares += high(after.pairs[i]) * high(after.pairs[i]);
        }
        *residual = after;
        const float factor = rsqrtf(over_block(squares) / HIDDEN + a.eps);
        Vector normal;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            normal.pairs[i] = packed(low(after.pairs[i]) * factor * low(weight.pairs[i]),
                                     high(after.pairs[i]) * factor * high(weight.pairs[i]));
#pragma unroll
        for (int i = 0; i < RANKS; ++i) ((Vector*)a.normal[i])[place] = normal;
    }
    meet(a);
}
