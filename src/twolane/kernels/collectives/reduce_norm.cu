// The sum over ranks of few rows, residual and RMS norm in one launch (sm_90a).
//
// RANKS rows that follow one another are a group, and a block has a group. Of each group every rank
// adds up one row: it reads the partial rows of all ranks, adds them in the order of ranks, and writes
// the total over all of them. Then every rank adds the totals to its residual rows and normalises
// these: all ranks have the same. A block meets the same block of all other ranks before it reads
// partial rows and again when its totals are written; so a rank whose kernel has ended has all totals,
// and nobody reads its partial rows any more.
//
// A flag is a word for a block and a rank: the other rank sets it from 0 to 1 when it has come, and
// the block takes it back. So it is the same in every replay of a graph. A block that has waited for
// PATIENCE ends the kernel with an error.
//
// The compiler is given HIDDEN, RANKS, FLOAT (numbers are float32, not bf16) and EARLY (it may start
// before the kernel in front has ended, and the one behind before it has). A block has a thread for
// each 16 bytes of a row.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Arguments {
    u64 partial[RANKS];  // [rows, HIDDEN] of each rank
    u64 flags[RANKS];    // u32 [blocks, RANKS]
    u64 residual, out;   // [rows, HIDDEN]
    u64 weight;          // [HIDDEN]
    int rows, rank;
    float eps;
};

struct alignas(16) Vector {
    u32 words[4];
};

constexpr int PER = FLOAT ? 4 : 8;  // numbers of a vector
constexpr int THREADS = HIDDEN / PER;
constexpr int WARPS = THREADS / 32;
constexpr u64 PATIENCE = 30000000000;  // nanoseconds

#ifndef ON_HOST
__device__ __forceinline__ Vector seen(const Vector* from) {  // what another rank may have written
    Vector v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(from) : "memory");
    return v;
}

// Sets a word from `old` to `with` if it has that value, behind all writes of the block; what it was.
__device__ __forceinline__ u32 swapped_behind(u32* word, u32 old, u32 with) {
    u32 was;
    asm volatile("atom.release.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(was) : "l"(word), "r"(old), "r"(with) : "memory");
    return was;
}

// The same before all reads of the block.
__device__ __forceinline__ u32 swapped_before(u32* word, u32 old, u32 with) {
    u32 was;
    asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(was) : "l"(word), "r"(old), "r"(with) : "memory");
    return was;
}

__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ float* shared_sums() {
    __shared__ float sums[RANKS * WARPS];
    return sums;
}
#endif

struct Numbers {
    float of[PER];
};

__device__ __forceinline__ Numbers widened(const Vector& v) {
    Numbers n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (FLOAT) {
            n.of[i] = __uint_as_float(v.words[i]);
        } else {
            n.of[2 * i % PER] = __uint_as_float(v.words[i] << 16);
            n.of[(2 * i + 1) % PER] = __uint_as_float(v.words[i] & 0xFFFF0000u);
        }
    }
    return n;
}

__device__ __forceinline__ Vector rounded(const Numbers& n) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v.words[i] = FLOAT ? __float_as_uint(n.of[i])
                           : to_pair(n.of[2 * i % PER], n.of[(2 * i + 1) % PER]);
    return v;
}

__device__ __forceinline__ void meet(const Arguments& a) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < RANKS && other != a.rank) {
        u32* theirs = (u32*)a.flags[other] + blockIdx.x * RANKS + a.rank;
        u32* own = (u32*)a.flags[a.rank] + blockIdx.x * RANKS + other;
        const u64 begun = now();
        while (swapped_behind(theirs, 0, 1) != 0)
            if (now() - begun > PATIENCE) __trap();
        while (swapped_before(own, 1, 0) != 1)
            if (now() - begun > PATIENCE) __trap();
    }
    __syncthreads();
}

// Adds up one row of a group, and writes it to all ranks.
__device__ __forceinline__ void sum_up(const Arguments& a, int row) {
    const int place = row * THREADS + threadIdx.x;
    Vector parts[RANKS];
#pragma unroll
    for (int i = 0; i < RANKS; ++i) parts[i] = seen((const Vector*)a.partial[i] + place);
    Numbers total = widened(parts[0]);
#pragma unroll
    for (int i = 1; i < RANKS; ++i) {
        const Numbers part = widened(parts[i]);
#pragma unroll
        for (int j = 0; j < PER; ++j) total.of[j] += part.of[j];
    }
    const Vector made = rounded(total);
#pragma unroll
    for (int i = 0; i < RANKS; ++i) ((Vector*)a.partial[i])[place] = made;
}

// Adds the totals of a group to its residual rows, and normalises these.
__device__ __forceinline__ void add_and_norm(const Arguments& a, int group, const Numbers& weight) {
    float* sums = shared_sums();
    Vector after[RANKS];
#pragma unroll
    for (int j = 0; j < RANKS; ++j) {
        if (group * RANKS + j >= a.rows) continue;
        const int place = (group * RANKS + j) * THREADS + threadIdx.x;
        const Numbers total = widened(seen((const Vector*)a.partial[a.rank] + place));
        Numbers stream = widened(((const Vector*)a.residual)[place]);
#pragma unroll
        for (int i = 0; i < PER; ++i) stream.of[i] += total.of[i];
        after[j] = rounded(stream);
        ((Vector*)a.residual)[place] = after[j];
        stream = widened(after[j]);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; ++i) squares += stream.of[i] * stream.of[i];
        for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
        if (threadIdx.x % 32 == 0) sums[j * WARPS + threadIdx.x / 32] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < RANKS; ++j) {
        if (group * RANKS + j >= a.rows) continue;
        float squares = 0.0f;
        for (int i = 0; i < WARPS; ++i) squares += sums[j * WARPS + i];
        const float factor = rsqrtf(squares / HIDDEN + a.eps);
        Numbers normal = widened(after[j]);
#pragma unroll
        for (int i = 0; i < PER; ++i) normal.of[i] *= factor;
        normal = widened(rounded(normal));
#pragma unroll
        for (int i = 0; i < PER; ++i) normal.of[i] *= weight.of[i];
        ((Vector*)a.out)[(group * RANKS + j) * THREADS + threadIdx.x] = rounded(normal);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_norm(const __grid_constant__ Arguments a) {
    const Numbers weight = widened(((const Vector*)a.weight)[threadIdx.x]);
    if (EARLY) {
        let_next_start();
        wait_for_previous();
    }
    const int groups = (a.rows + RANKS - 1) / RANKS;
    meet(a);
    for (int group = blockIdx.x; group < groups; group += gridDim.x)
        if (group * RANKS + a.rank < a.rows) sum_up(a, group * RANKS + a.rank);
    meet(a);
    for (int group = blockIdx.x; group < groups; group += gridDim.x) add_and_norm(a, group, weight);
}
