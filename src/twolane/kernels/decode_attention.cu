// Paged decode attention for Hopper (sm_90a): one new token a row, bfloat16 or float16.
//
// The bar is bytes in flight. One block an SM; each of its warps is a worker of its own (see
// decode_attention.py for the schedule) with its own ring of STAGES half tiles in shared memory. It
// waits for a half (the keys, then the values of KEYS tokens), moves it into registers, and at once
// refills the place by bulk copies for a half further on, over the borders of runs. No warp ever
// waits for another.
//
// A half is four blocks of KEYS / 4 tokens, each one contiguous bulk copy, put 32 bytes further than
// its place by the block's number. With the tokens given to the rows of the matrix instructions as
// below, all loads from shared memory are 16 bytes wide and free of bank conflicts, and what they
// bring is the operands of the instructions as they stand (keys), or after one byte permutation
// (values):
//
//   scores  S^T [tokens x heads] = K [tokens x dims] Q^T,     m16n8k16, tokens on m
//   output  O^T [dims x heads]  += V^T [dims x tokens] P^T,   m16n8k16, dims on m
//
// Row r of 16 of the j-th product over tokens (g = r % 8, h = r / 8) is the token 4 j + 2 h + g % 2
// of the block (g / 2 + 2 (g % 2)) % 4. The sum over dims is in any order, the same in Q and K.
//
// The compiler is given T_BF16 (else float16), DIM (64, 128), PAGE (16, 32, 64), TILES_N (1: groups
// to 8, 2: to 16), WARPS and STAGES; for measurements PROBE (1: only copy, 2: copy and load) and
// WATCHDOG.

#ifndef PROBE
#define PROBE 0
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int KEYS = 4096 / DIM;        // tokens of a tile
constexpr int BLOCK = KEYS / 4;         // tokens of a bulk copy
constexpr int ROW_BYTES = DIM * 2;
constexpr int BLOCK_BYTES = BLOCK * ROW_BYTES;
constexpr int BLOCK_STRIDE = BLOCK_BYTES + 32;
constexpr int HALF_BYTES = 4 * BLOCK_STRIDE;
constexpr int TILE_PAGES = KEYS > PAGE ? KEYS / PAGE : 1;
constexpr int TOKEN_TILES = KEYS / 16;  // products over tokens
constexpr int DIM_TILES = DIM / 16;     // products over dims
constexpr int CHUNKS = DIM / 64;        // 16-byte pieces of a row that a lane takes of the values
constexpr int LANES = 32;
constexpr u32 ALL = 0xffffffffu;

struct alignas(16) Words { u32 w[4]; };

#ifndef ON_HOST  // tests run the rest with these instructions acted out by threads of the CPU
__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ Words load_shared(u32 address) {
    Words v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
#ifdef WATCHDOG  // tries: a fault instead of a hang
    for (int tries = 0; !done; ++tries) {
        if (tries > WATCHDOG) __trap();
#else
    while (!done) {
#endif
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n"
            "}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

__device__ __forceinline__ void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier,
                                          u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;"
        ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ Words load_query(const char* at) {
    Words v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(at));
    return v;
}

// What a warp has loaded is in its registers: from here on its bulk copies may overwrite it.
__device__ __forceinline__ void loads_done() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
    asm volatile(
#if T_BF16
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two numbers of the operands' type in one word, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
#if T_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#endif
    return d;
}

__device__ __forceinline__ u32 transpose(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
#endif

#define MINUS_INFINITY __int_as_float(0xff800000)

// Over the lanes that hold the same heads.
__device__ __forceinline__ float most(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 16));
}

__device__ __forceinline__ float sum(float x) {
    x += __shfl_xor_sync(ALL, x, 4);
    x += __shfl_xor_sync(ALL, x, 8);
    return x + __shfl_xor_sync(ALL, x, 16);
}

struct Arguments {
    const char* q;
    const char* pool;
    const int* tables;
    const int* slots;
    const int* lengths;
    char* out;
    float* partial;
    int* arrivals;
    int rows, kv_heads, group;
    u32 q_stride, head_stride, table_stride;  // bytes, bytes, entries
    u64 page_stride;                          // bytes
    int window;
    float scale;                              // base 2
};

// Where a worker is in its tiles: the `tile`-th of `count` of head `head` of row `row`.
struct Cursor {
    int row, head, tile, count;

    // Go to the next tile; false at the end of a run.
    __device__ __forceinline__ bool step() { return ++tile < count; }

    __device__ __forceinline__ void next_run(const int* counts, int kv_heads) {
        tile = 0;
        if (++head < kv_heads) return;
        head = 0;
        do ++row; while (counts[row] == 0);  // never called after the last run
        count = counts[row];
    }
};

__device__ __forceinline__ int first_tile(const Arguments& a, int length) {
    return max(length - a.window, 0) / KEYS;
}

// The pages of up to 32 page-table entries from `begin` of the cursor's row on, one a lane.
__device__ __forceinline__ int load_pages(const Arguments& a, const int* row_slots,
                                          const int* row_lengths, int row, int begin, int lane) {
    int page = begin + lane;
    int pages = (row_lengths[row] + PAGE - 1) / PAGE;
    return page < pages ? __ldg(a.tables + (u64)row_slots[row] * a.table_stride + page) : 0;
}

// The 16-byte pieces of this lane's query head that stand against its pieces of the keys.
struct Query {
    Words piece[TILES_N][DIM / 32];

    __device__ __forceinline__ void load(const Arguments& a, int row, int head, int lane) {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            int member = lane / 4 + 8 * n;
            const char* at = a.q + (u64)row * a.q_stride
                             + (u32)(head * a.group + member) * ROW_BYTES + lane % 4 * 16;
#pragma unroll
            for (int i = 0; i < DIM / 32; ++i) {
                piece[n][i] = member < a.group ? load_query(at + i * 64) : Words{0, 0, 0, 0};
            }
        }
    }
};

// Softmax over the tokens so far of one run: base 2, heads 8 n + 2 (lane % 4) + {0, 1}.
struct State {
    float peak[TILES_N][2];
    float weight[TILES_N][2];                 // of this lane's tokens only
    float value[TILES_N][DIM_TILES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            peak[n][0] = peak[n][1] = MINUS_INFINITY;
            weight[n][0] = weight[n][1] = 0;
#pragma unroll
            for (int j = 0; j < DIM_TILES; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) value[n][j][i] = 0;
        }
    }

    // The i-th (of 8) dim of this lane's chunk c, head e of its two.
    __device__ __forceinline__ float& at(int n, int e, int c, int i) {
        return CHUNKS == 2 ? value[n][i][2 * c + e] : value[n][i / 2][2 * (i % 2) + e];
    }
};

// Token of the tile that row g of half h of the j-th product is.
__device__ __forceinline__ int token_of(int g, int h, int j) {
    return ((g / 2 + 2 * (g % 2)) % 4) * BLOCK + 4 * j + 2 * h + g % 2;
}

__device__ __forceinline__ void load_keys(Words (&k)[TOKEN_TILES][2][DIM / 32], u32 half, int lane) {
    int g = lane / 4;
    u32 base = half + (g / 2 + 2 * (g % 2)) % 4 * BLOCK_STRIDE + g % 2 * ROW_BYTES + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < DIM / 32; ++i)
                k[j][h][i] = load_shared(base + (4 * j + 2 * h) * ROW_BYTES + i * 64);
}

// v[j][s]: this lane's tokens of product j: s = 0, 2 of block t, s = 1, 3 of block (t + 2) % 4.
__device__ __forceinline__ void load_values(Words (&v)[TOKEN_TILES][4][CHUNKS], u32 half, int lane) {
    int t = lane % 4;
    u32 even = half + t * BLOCK_STRIDE + lane / 4 * 16;
    u32 odd = half + (t + 2) % 4 * BLOCK_STRIDE + lane / 4 * 16;
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                v[j][s][c] = load_shared((s % 2 ? odd : even) + (4 * j + s) * ROW_BYTES + c * 128);
}

// What lies beyond the last token was perhaps never written, and may be NaN.
__device__ __forceinline__ void clear_unwritten(Words (&v)[TOKEN_TILES][4][CHUNKS], int written,
                                                int lane) {
    int t = lane % 4;
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            int token = (s % 2 ? (t + 2) % 4 : t) * BLOCK + 4 * j + s;
            if (token >= written)
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) v[j][s][c] = Words{0, 0, 0, 0};
        }
}

typedef float Scores[TILES_N][TOKEN_TILES][4];

__device__ __forceinline__ void score(Scores& s, const Words (&k)[TOKEN_TILES][2][DIM / 32],
                                      const Query& query, float scale) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][j][i] = 0;
#pragma unroll
            for (int i = 0; i < DIM / 32; ++i)
#pragma unroll
                for (int p = 0; p < 4; p += 2)
                    multiply(s[n][j], k[j][0][i].w[p], k[j][1][i].w[p], k[j][0][i].w[p + 1],
                             k[j][1][i].w[p + 1], query.piece[n][i].w[p],
                             query.piece[n][i].w[p + 1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][j][i] *= scale;
        }
}

// Tokens outside [low, high) of the tile are not seen.
__device__ __forceinline__ void mask(Scores& s, int low, int high, int lane) {
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int token = token_of(lane / 4, h, j);
            if (token < low || token >= high)
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
                    s[n][j][2 * h] = s[n][j][2 * h + 1] = MINUS_INFINITY;
        }
}

// From scores to weights, as the operand of the product with the values; the state fades.
__device__ __forceinline__ void weigh(u32 (&p)[TILES_N][TOKEN_TILES][2], Scores& s, State& state) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        float fade[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float peak = s[n][0][e];
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j)
                peak = fmaxf(peak, fmaxf(s[n][j][e], s[n][j][2 + e]));
            peak = fmaxf(most(peak), state.peak[n][e]);
            fade[e] = power2(state.peak[n][e] - peak);
            state.peak[n][e] = peak;
            float weight = 0;
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    s[n][j][2 * h + e] = power2(s[n][j][2 * h + e] - peak);
                    weight += s[n][j][2 * h + e];
                }
            state.weight[n][e] = state.weight[n][e] * fade[e] + weight;
        }
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                p[n][j][h] = transpose(pack(s[n][j][2 * h], s[n][j][2 * h + 1]));
#pragma unroll
        for (int j = 0; j < DIM_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) state.value[n][j][i] *= fade[i % 2];
    }
}

// Of two tokens' words, the halves that belong to one dim.
__device__ __forceinline__ u32 pair(u32 first, u32 second, int half) {
    return __byte_perm(first, second, half ? 0x7632 : 0x5410);
}

__device__ __forceinline__ void add_values(State& state, const Words (&v)[TOKEN_TILES][4][CHUNKS],
                                           const u32 (&p)[TILES_N][TOKEN_TILES][2]) {
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
        for (int d = 0; d < DIM_TILES; ++d) {
            // Rows g and g + 8: dim d of both chunks, or dims 2 d and 2 d + 1 of the only one.
            constexpr int LAST = CHUNKS - 1;
            int word = CHUNKS == 2 ? d / 2 : d, low = CHUNKS == 2 ? d % 2 : 0;
            int high = CHUNKS == 2 ? d % 2 : 1;
            u32 a0 = pair(v[j][0][0].w[word], v[j][1][0].w[word], low);
            u32 a1 = pair(v[j][0][LAST].w[word], v[j][1][LAST].w[word], high);
            u32 a2 = pair(v[j][2][0].w[word], v[j][3][0].w[word], low);
            u32 a3 = pair(v[j][2][LAST].w[word], v[j][3][LAST].w[word], high);
#pragma unroll
            for (int n = 0; n < TILES_N; ++n)
                multiply(state.value[n][d], a0, a1, a2, a3, p[n][j][0], p[n][j][1]);
        }
}

// A partial result in the scratch: 16 heads' values in the order of the lanes that hold them, then
// maxima and sums. Every lane reads back what the lane of its number wrote.
constexpr int PLACE_FLOATS = 16 * DIM + 32;

__device__ __forceinline__ void store_partial(const Arguments& a, int place, State& state,
                                              int lane) {
    float* at = a.partial + (u64)place * PLACE_FLOATS;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int member = 8 * n + 2 * (lane % 4) + e;
            if (member >= a.group) continue;
#pragma unroll
            for (int i = 0; i < 2 * CHUNKS; ++i)
                __stcg(reinterpret_cast<float4*>(at + member * DIM + lane / 4 * 8 + i / 2 * 64
                                                 + i % 2 * 4),
                       make_float4(state.at(n, e, i / 2, i % 2 * 4 + 0),
                                   state.at(n, e, i / 2, i % 2 * 4 + 1),
                                   state.at(n, e, i / 2, i % 2 * 4 + 2),
                                   state.at(n, e, i / 2, i % 2 * 4 + 3)));
            if (lane / 4 == 0)
                __stcg(reinterpret_cast<float2*>(at + 16 * DIM + 2 * member),
                       make_float2(state.peak[n][e], state.weight[n][e]));
        }
}

__device__ __forceinline__ void add_partial(const Arguments& a, int place, State& state, int lane) {
    const float* at = a.partial + (u64)place * PLACE_FLOATS;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int member = 8 * n + 2 * (lane % 4) + e;
            if (member >= a.group) continue;
            float2 part = __ldcg(reinterpret_cast<const float2*>(at + 16 * DIM + 2 * member));
            float peak = fmaxf(state.peak[n][e], part.x);
            float fade = power2(state.peak[n][e] - peak), gain = power2(part.x - peak);
            state.peak[n][e] = peak;
            state.weight[n][e] = state.weight[n][e] * fade + part.y * gain;
#pragma unroll
            for (int i = 0; i < 2 * CHUNKS; ++i) {
                float4 x = __ldcg(reinterpret_cast<const float4*>(
                    at + member * DIM + lane / 4 * 8 + i / 2 * 64 + i % 2 * 4));
                float part_value[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float& value = state.at(n, e, i / 2, i % 2 * 4 + k);
                    value = value * fade + part_value[k] * gain;
                }
            }
        }
}

__device__ __forceinline__ void store_out(const Arguments& a, int row, int head, State& state,
                                          int lane) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int member = 8 * n + 2 * (lane % 4) + e;
            if (member >= a.group) continue;
            float gain = 1.0f / state.weight[n][e];
            u64 place = ((u64)(row * a.kv_heads + head) * a.group + member) * ROW_BYTES;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                Words x;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x.w[i] = pack(state.at(n, e, c, 2 * i) * gain,
                                  state.at(n, e, c, 2 * i + 1) * gain);
                *reinterpret_cast<Words*>(a.out + place + lane / 4 * 16 + c * 128) = x;
            }
        }
}

// Worker w has the tiles [w * total / workers, (w + 1) * total / workers), rounded down: at least one.
struct Share {
    u32 total, workers;

    __device__ __forceinline__ u32 begin(u32 worker) const {
        return (u32)((u64)worker * total / workers);
    }
    __device__ __forceinline__ u32 owner(u32 position) const {
        return (u32)((((u64)position + 1) * workers - 1) / total);
    }
};

// The end of a run, or of this worker's part of it, [begin, end) being the whole.
__device__ __forceinline__ void finish(const Arguments& a, const Share& share, const Cursor& at,
                                       u32 begin, u32 worker, State& state, int lane) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) state.weight[n][e] = sum(state.weight[n][e]);
    u32 first = share.owner(begin), last = share.owner(begin + at.count - 1);
    if (first != last) {
        u32 own_begin = share.begin(worker);
        store_partial(a, 2 * worker + (begin > own_begin), state, lane);
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane == 0) before = atomicAdd(a.arrivals + first, 1);
        if (__shfl_sync(ALL, before, 0) != (int)(last - first)) return;
        // The last to arrive combines all parts, in their order.
        __threadfence();
        if (lane == 0) a.arrivals[first] = 0;
        state.clear();
        for (u32 part = first; part <= last; ++part)
            add_partial(a, 2 * part + (part == first && begin > share.begin(first)), state, lane);
    }
    store_out(a, at.row, at.head, state, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES, 1)
decode_attention(const __grid_constant__ Arguments a) {
    char* memory = dynamic_shared();
    __shared__ u64 barriers[WARPS * STAGES];
    __shared__ u32 warp_totals[WARPS];
    int* counts = reinterpret_cast<int*>(memory + WARPS * STAGES * HALF_BYTES);
    int* row_lengths = counts + a.rows;
    int* row_slots = row_lengths + a.rows;
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;

    // Tiles of each row, and of all.
    u32 tiles = 0;
    for (int row = threadIdx.x; row < a.rows; row += WARPS * LANES) {
        int length = a.lengths[row];
        row_lengths[row] = length;
        row_slots[row] = a.slots[row];
        counts[row] = (length + KEYS - 1) / KEYS - first_tile(a, length);
        tiles += counts[row];
    }
    tiles = __reduce_add_sync(ALL, tiles);
    if (lane == 0) warp_totals[warp] = tiles;
    if (threadIdx.x < WARPS * STAGES) barrier_init(shared_address(barriers + threadIdx.x));
    barriers_ready();
    Share share{0, 0};
    for (int i = 0; i < WARPS; ++i) share.total += warp_totals[i] * a.kv_heads;
    share.workers = min(share.total, gridDim.x * WARPS);
    u32 worker = warp * gridDim.x + blockIdx.x;  // few tiles are spread over all blocks
    if (worker >= share.workers) return;
    u32 position = share.begin(worker), stop = share.begin(worker + 1);

    // The first tile: rows 32 at a time.
    Cursor at{0, 0, 0, 0};
    u32 before = 0;
    for (int base = 0;; base += LANES) {
        u32 mine = base + lane < a.rows ? counts[base + lane] * a.kv_heads : 0, upto = mine;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
            u32 other = __shfl_up_sync(ALL, upto, d);
            if (lane >= d) upto += other;
        }
        u32 passed = __ballot_sync(ALL, before + upto <= position);
        if (passed != ALL) {
            int here = __popc(passed);
            at.row = base + here;
            at.count = counts[at.row];
            u32 offset = position - before - __shfl_sync(ALL, upto - mine, here);
            at.head = offset / at.count;
            at.tile = offset % at.count;
            break;
        }
        before += __shfl_sync(ALL, upto, LANES - 1);
    }

    u64 policy = evict_first();
    u32 ring = shared_address(memory) + warp * STAGES * HALF_BYTES;
    u32 full = shared_address(barriers + warp * STAGES);

    // The issuing side runs STAGES halves ahead. Page-table entries come 32 at a time, one a lane,
    // and the next 32 (of this run, or of the next) are asked for when these are taken up.
    Cursor ahead = at;
    u32 left = 2 * (stop - position);  // halves to ask for
    u32 tiles_left = stop - position;  // as far as page-table entries were asked for
    int first_of_row = first_tile(a, row_lengths[ahead.row]);
    int begin = 0, pages = 0, next_begin, next_pages;
    Cursor table = ahead;
    auto ask_pages = [&]() {
        // `table` is at a tile whose pages nobody has asked for.
        int tile = first_tile(a, row_lengths[table.row]) + table.tile;
        next_begin = tile * KEYS / PAGE;
        next_pages = load_pages(a, row_slots, row_lengths, table.row, next_begin, lane);
        // Tiles that these 32 entries cover.
        int covered = ((next_begin + LANES) * PAGE) / KEYS - tile;
        covered = min(covered, table.count - table.tile);
        table.tile += covered;
        tiles_left = tiles_left > covered ? tiles_left - covered : 0;
        if (table.tile == table.count && tiles_left > 0) table.next_run(counts, a.kv_heads);
    };
    ask_pages();
    int window_left = 0;  // tiles that `pages` still covers
    u32 put_stage = 0;
    bool put_values = false;
    u32 source_page[TILE_PAGES];
    auto issue = [&]() {
        if (left == 0) return;
        --left;
        int tile = first_of_row + ahead.tile;
        if (!put_values) {
            if (window_left == 0) {
                begin = next_begin;
                pages = next_pages;
                window_left = min((begin + LANES) * PAGE / KEYS - tile, ahead.count - ahead.tile);
                if (tiles_left > 0) ask_pages();
            }
            --window_left;
#pragma unroll
            for (int i = 0; i < TILE_PAGES; ++i)
                source_page[i] = __shfl_sync(ALL, pages, tile * KEYS / PAGE + i - begin);
        }
        int written = row_lengths[ahead.row] - tile * KEYS;
        int blocks = min(4, (written + BLOCK - 1) / BLOCK);
        if (lane == 0) {
            u32 target = ring + put_stage * HALF_BYTES, barrier = full + put_stage * 8;
            u32 inside = ahead.head * a.head_stride + put_values * (PAGE * ROW_BYTES)
                         + tile * KEYS % PAGE * ROW_BYTES;
            barrier_expect(barrier, blocks * BLOCK_BYTES);
#pragma unroll
            for (int b = 0; b < 4; ++b)
                if (b < blocks) {
                    const char* source = a.pool + source_page[b * BLOCK / PAGE] * a.page_stride
                                         + (inside + b * BLOCK % PAGE * ROW_BYTES);
                    bulk_copy(target + b * BLOCK_STRIDE, source, BLOCK_BYTES, barrier, policy);
                }
        }
        if (++put_stage == STAGES) put_stage = 0;
        if (put_values && !ahead.step() && left > 0) {
            ahead.next_run(counts, a.kv_heads);
            first_of_row = first_tile(a, row_lengths[ahead.row]);
        }
        put_values = !put_values;
    };
    for (int i = 0; i < STAGES; ++i) issue();

    u32 stage = 0, parity = 0;
    auto arrive = [&]() {  // the address of the next half, when it is there
        u32 half = ring + stage * HALF_BYTES;
        barrier_wait(full + stage * 8, parity);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        return half;
    };

    Query query;
    State state;
    query.load(a, at.row, at.head, lane);
    state.clear();
    int length = row_lengths[at.row], first = first_tile(a, length);
    u32 run_begin = position - at.tile;
    for (;; ++position) {
        Words k[TOKEN_TILES][2][DIM / 32];
        u32 half = arrive();
#if PROBE != 1
        load_keys(k, half, lane);
#endif
        loads_done();
        issue();
#if PROBE == 0
        int token = (first + at.tile) * KEYS;
        int low = length - a.window - token, high = length - token;
        Scores s;
        u32 p[TILES_N][TOKEN_TILES][2];
        score(s, k, query, a.scale);
        if (low > 0 || high < KEYS) mask(s, low, high, lane);
        weigh(p, s, state);
#endif
        Words v[TOKEN_TILES][4][CHUNKS];
        half = arrive();
#if PROBE != 1
        load_values(v, half, lane);
#endif
        loads_done();
        issue();
#if PROBE == 0
        if (high < KEYS) clear_unwritten(v, high, lane);
        add_values(state, v, p);
#elif PROBE == 2
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
            for (int c = 0; c < DIM / 16; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    state.weight[0][0] += __uint_as_float(
                        k[j][c / (DIM / 32)][c % (DIM / 32)].w[i] ^ v[j][c / CHUNKS][c % CHUNKS].w[i]);
#endif
        bool more = position + 1 < stop;
        if (at.step() && more) continue;
        finish(a, share, at, run_begin, worker, state, lane);
        if (!more) return;
        at.next_run(counts, a.kv_heads);
        run_begin = position + 1;
        query.load(a, at.row, at.head, lane);
        state.clear();
        length = row_lengths[at.row];
        first = first_tile(a, length);
    }
}
