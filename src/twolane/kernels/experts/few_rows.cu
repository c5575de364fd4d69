// Normalises up to 16 rows, multiplies them with the router, and deals them out to their experts
// (sm_90a).
//
// A block normalises a row, unless it comes normalised, and each of its warps multiplies it with one
// row of the router. The last
// block to end deals the rows out: a warp chooses the experts of a row, and a mask tells which rows an
// expert has. Rows stay where they are: the product of gate and up finds them by the mask (SPREAD in
// skinny_gemm.cu), and writes those of an expert next to one another.
//
// The kernel may start before the one in front of it has ended (programmatic dependent launch): it
// reads the weights at once, and everything else when that one is complete.
//
// The compiler is given HIDDEN, the fields of `RoutingRule` (EXPERTS to GATED), NORM (rows are normalised and written; without it they come normalised,
// and are written only with FP8), FP8 (rows are written as e4m3, each with a scale) and HALF (the rest
// is fp16, not bf16).

typedef unsigned int u32;

constexpr int MAX_ROWS = 16;
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int PIECES = HIDDEN / 8;                          // of a row, 16 bytes each
constexpr int OWN = (PIECES + THREADS - 1) / THREADS;       // that a thread normalises
constexpr int LOGITS = EXPERTS + GATED;
constexpr int STORED = EXPERTS + SHARED;
constexpr int ENTRIES = CHOSEN + SHARED;                    // of a row
constexpr int COLUMNS = (LOGITS + WARPS - 1) / WARPS;       // blocks that have the same row
constexpr int OF_LANE = (EXPERTS + 31) / 32;                // experts 32 apart
constexpr int OF_THREAD = (STORED + THREADS - 1) / THREADS;  // neighbouring experts

struct Arguments {
    const unsigned short *rows_in, *norm, *router;
    const float* bias;       // [EXPERTS], with BIASED
    const int* marks;        // a row is active where its mark is at least `least`
    unsigned short* logits;  // [rows, LOGITS]
    char* x;                 // [rows, HIDDEN]
    float* x_scales;         // [rows], with FP8
    float* weights;          // [rows, ENTRIES]
    int* positions;          // [rows, ENTRIES]: of each entry among those sorted by expert
    int* groups;  // their number, arrivals, the sum of active experts, 0; of each group its expert,
                  // first entry, number of entries and mask of rows
    int rows, least;
    float eps, scale;
};

#ifndef ON_HOST  // tests run the rest with these instructions acted out by threads of the CPU
__device__ __forceinline__ u32 to_e4m3(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

__device__ __forceinline__ float added(float value) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, apart);
    return value;
}

__device__ __forceinline__ float largest(float value) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, apart));
    return value;
}

struct Piece {
    u32 pairs[4];

    __device__ __forceinline__ void take(const uint4& four) {
        pairs[0] = four.x, pairs[1] = four.y, pairs[2] = four.z, pairs[3] = four.w;
    }

    __device__ __forceinline__ uint4 words() const {
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    __device__ __forceinline__ float at(int i) const {
        return to_float(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xFFFF);
    }
};

// Over all threads of the block: the sum, or the largest.
template <bool SUM>
__device__ __forceinline__ float over_block(float value) {
    __shared__ float each[WARPS];
    value = SUM ? added(value) : largest(value);
    if (threadIdx.x % 32 == 0) each[threadIdx.x / 32] = value;
    __syncthreads();
    value = each[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) value = SUM ? value + each[i] : fmaxf(value, each[i]);
    return value;
}

// Writes normalised numbers, a thread its own pieces.
__device__ __forceinline__ void write(const Arguments& a, int row, const Piece (&normal)[OWN]) {
#if FP8
    float peak = 1e-12f;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int k = 0; k < 8; ++k) peak = fmaxf(peak, fabsf(normal[i].at(k)));
    const float scale = over_block<false>(peak) / 448.0f;
    if (threadIdx.x == 0) a.x_scales[row] = scale;
#endif
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int piece = threadIdx.x + i * THREADS;
        if (piece >= PIECES) continue;
#if FP8
        u32 words[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const Piece& from = normal[i];
            words[k] = to_e4m3(from.at(4 * k) / scale, from.at(4 * k + 1) / scale) |
                       to_e4m3(from.at(4 * k + 2) / scale, from.at(4 * k + 3) / scale) << 16;
        }
        reinterpret_cast<uint2*>(a.x)[row * PIECES + piece] = make_uint2(words[0], words[1]);
#else
        reinterpret_cast<uint4*>(a.x)[row * PIECES + piece] = normal[i].words();
#endif
    }
}

// Reads a row into `shared`: its RMS norm, rounded where the model rounds, or what comes normalised.
__device__ __forceinline__ void read(const Arguments& a, int row, const Piece (&norm)[OWN],
                                     uint4* shared, bool writes) {
    const uint4* from = reinterpret_cast<const uint4*>(a.rows_in) + row * PIECES;
    Piece x[OWN];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int piece = threadIdx.x + i * THREADS;
        x[i].take(piece < PIECES ? __ldcg(from + piece) : make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int k = 0; k < 8; ++k) squares += x[i].at(k) * x[i].at(k);
    }
#if NORM
    const float inverse = rsqrtf(over_block<true>(squares) / HIDDEN + a.eps);
#else
    __syncthreads();  // all threads are through with the row before, as behind a sum over the block
#endif
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#if NORM
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 pair = to_pair(x[i].at(2 * k) * inverse, x[i].at(2 * k + 1) * inverse);
            x[i].pairs[k] = to_pair(to_float(pair & 0xFFFF) * norm[i].at(2 * k),
                                    to_float(pair >> 16) * norm[i].at(2 * k + 1));
        }
#endif
        const int piece = threadIdx.x + i * THREADS;
        if (piece < PIECES) shared[piece] = x[i].words();
    }
    __syncthreads();
    if (writes && (NORM || FP8)) write(a, row, x);
}

// Integers in the order of the numbers; NaN is 0.
__device__ __forceinline__ int ordered(float value) {
    const int bits = value == value ? __float_as_int(value) : 0;
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

// The entries of a row, by a warp: lane i has the i-th and what it counts. Of equally good experts the
// lower number goes first.
__device__ __forceinline__ int choose(const Arguments& a, const unsigned short* logits, int lane,
                                      float& weight) {
    const float lowest = __int_as_float(0xFF800000);  // minus infinity
    float score[OF_LANE], most = lowest, all = 0.0f;
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const bool known = lane + 32 * i < EXPERTS;
        score[i] = known ? to_float(__ldcg(logits + lane + 32 * i)) : lowest;
        most = fmaxf(most, score[i]);
    }
#if SIGMOID
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) score[i] = 1.0f / (1.0f + __expf(-score[i]));
#else
    most = largest(most);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) all += score[i] = __expf(score[i] - most);
    all = added(all);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) score[i] /= all;
#endif
    constexpr int TAKEN = int(0x80000000);
    int key[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const int expert = lane + 32 * i;
        key[i] = expert < EXPERTS ? ordered(score[i] + (BIASED ? a.bias[expert] : 0.0f)) : TAKEN;
    }
    int chosen = EXPERTS + lane - CHOSEN;  // of those that are shared
    float sum = 0.0f;
#pragma unroll
    for (int rank = 0; rank < CHOSEN; ++rank) {
        int best = key[0];
#pragma unroll
        for (int i = 1; i < OF_LANE; ++i) best = max(best, key[i]);
        best = __reduce_max_sync(0xFFFFFFFF, best);
        int pick = EXPERTS;
#pragma unroll
        for (int i = OF_LANE - 1; i >= 0; --i)
            if (key[i] == best && lane + 32 * i < EXPERTS) pick = lane + 32 * i;
        pick = __reduce_min_sync(0xFFFFFFFF, pick);
        float own = 0.0f;
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            if (lane + 32 * i == pick) key[i] = TAKEN, own = score[i];
        own = added(own);
        sum += own;
        if (lane == rank) chosen = pick, weight = own;
    }
    if (NORMALISED) weight /= sum;
    weight *= a.scale;
    if (SHARED && lane >= CHOSEN)
        weight = GATED ? 1.0f / (1.0f + __expf(-to_float(__ldcg(logits + EXPERTS)))) : 1.0f;
    return chosen;
}

// The sum of what the threads in front of this one have, and in `all` that of all.
__device__ __forceinline__ u32 before(u32 mine, u32& all) {
    __shared__ u32 sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 value = mine;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const u32 other = __shfl_up_sync(0xFFFFFFFF, value, apart);
        if (lane >= apart) value += other;
    }
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    all = 0;
    u32 front = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) front = all;
        all += sums[i];
    }
    return front + value - mine;
}

__device__ __forceinline__ void deal(const Arguments& a) {
    __shared__ u32 masks[STORED];
    __shared__ int firsts[STORED], picks[MAX_ROWS * ENTRIES];
    const int lane = threadIdx.x % 32;
    for (int expert = threadIdx.x; expert < STORED; expert += THREADS) masks[expert] = 0;
    __syncthreads();
    for (int row = threadIdx.x / 32; row < a.rows; row += WARPS) {
        float weight;
        const bool active = a.marks[row] >= a.least;
        const int pick = choose(a, a.logits + row * LOGITS, lane, weight);
        if (lane >= ENTRIES) continue;
        a.weights[row * ENTRIES + lane] = weight;
        picks[row * ENTRIES + lane] = active ? pick : -1;
        if (active) atomicOr(masks + pick, 1u << row);
    }
    __syncthreads();
    u32 mine = 0, all;  // entries in the upper half, active experts in the lower
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const int expert = threadIdx.x * OF_THREAD + i;
        const u32 mask = expert < STORED ? masks[expert] : 0;
        mine += __popc(mask) << 16 | (mask != 0);
    }
    u32 place = before(mine, all);
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const int expert = threadIdx.x * OF_THREAD + i;
        const u32 mask = expert < STORED ? masks[expert] : 0;
        if (!mask) continue;
        const int first = place >> 16, count = __popc(mask);
        firsts[expert] = first;
        reinterpret_cast<int4*>(a.groups)[1 + (place & 0xFFFF)] =
            make_int4(expert, first, count, int(mask));
        place += count << 16 | 1;
    }
    if (threadIdx.x == 0) {
        a.groups[0] = all & 0xFFFF;
        a.groups[1] = 0;  // for the next launch
        a.groups[2] += all & 0xFFFF;
    }
    __syncthreads();
    for (int entry = threadIdx.x; entry < a.rows * ENTRIES; entry += THREADS) {
        const int expert = picks[entry];
        const u32 earlier = (1u << entry / ENTRIES) - 1;
        a.positions[entry] =
            expert < 0 ? -1 : firsts[expert] + __popc(masks[expert] & earlier);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, HIDDEN > 2048 ? 1 : 2)
    few_rows(const __grid_constant__ Arguments a) {
    __shared__ uint4 normal[PIECES];
    __shared__ int last;
    const int lane = threadIdx.x % 32;
    const int column = blockIdx.x % COLUMNS, expert = column * WARPS + threadIdx.x / 32;
    Piece router[PIECES / 32], norm[OWN];
#pragma unroll
    for (int i = 0; i < PIECES / 32; ++i) {
        const int row = min(expert, LOGITS - 1);
        router[i].take(__ldg(reinterpret_cast<const uint4*>(a.router) + row * PIECES + 32 * i + lane));
    }
#pragma unroll
    for (int i = 0; i < OWN * NORM; ++i) {
        const int piece = min(int(threadIdx.x) + i * THREADS, PIECES - 1);
        norm[i].take(__ldg(reinterpret_cast<const uint4*>(a.norm) + piece));
    }
    let_next_start();
    wait_for_previous();
    for (int row = blockIdx.x / COLUMNS; row < a.rows; row += gridDim.x / COLUMNS) {
        read(a, row, norm, normal, column == 0);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECES / 32; ++i) {
            Piece x;
            x.take(normal[32 * i + lane]);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += x.at(k) * router[i].at(k);
        }
        sum = added(sum);
        if (lane == 0 && expert < LOGITS) a.logits[row * LOGITS + expert] = to_pair(sum, 0.0f);
    }
    __syncthreads();
    if (threadIdx.x == 0) last = count_arrival(a.groups + 1) == int(gridDim.x) - 1;
    __syncthreads();
    if (last) deal(a);
}
