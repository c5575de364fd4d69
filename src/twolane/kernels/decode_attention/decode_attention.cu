// Paged decode attention for Hopper (sm_90a): one new token a row, bfloat16 or float16.
//
// The bar is bytes in flight. One block an SM; each of its warps is a worker of its own (see
// decode_attention.py for the schedule) with its own ring of STAGES half tiles in shared memory. It
// waits for a half (the keys, then the values of KEYS tokens), multiplies it, and refills its place
// by a bulk tensor copy of a half further on, over the borders of runs. No warp ever waits for
// another.
//
// A half is 8 KB: lines of 128 bytes, for each 64 dims one a token, with the 16-byte pieces of a line
// exchanged by the copy engine (128-byte swizzle), so that matrix loads are free of bank conflicts
// and bring the operands of the matrix instructions as they stand. The weights leave the first
// product as the operand of the second.
//
//   scores  S [heads x tokens] = Q K^T            m16n8k16, tokens on n
//   output  O^T [dims x heads] += V^T P^T         m16n8k16, tokens on k
//
// Of a lane, g is lane / 4 and t is lane % 4.
//
// Both kernels may start before the one in front of them has ended (programmatic dependent launch).
// What is read before that are lengths, slots, page tables and tokens that an earlier step wrote:
// not the newest token of a row.
//
// With FP8 the pool is e4m3 and has a power of two for each token of keys and of values: a half has
// twice the tokens, and its keys bring the exponents of both along. Numbers are multiplied in float16,
// which holds e4m3 exactly. A power of two of the values goes into the exponent of the softmax, so
// weights stay small, and is taken out of the sum of the weights again. Matrix loads bring pairs of
// dims where they bring single ones otherwise; so queries are loaded, and results written, in the
// order that follows. Instructions are what limits few SMs then, so tokens are rows of the scores, of
// which none is idle and of which a lane has few:
//
//   scores  S^T [tokens x heads] = K Q^T          m16n8k16, tokens on m
//
// and the weights are transposed on their way into the second product.
//
// The compiler is given T_BF16 (else float16: of queries and results, and of a pool without FP8), FP8,
// DIM (64, 128; with FP8 128), PAGE (16, 32, 64), TILES_N (1: groups to 8, 2: to 16), WARPS, STAGES and
// SINKS (whether each head sees one more token, of value 0); for measurements PROBE (1: only copy, 2: copy and load), TIMELINE and WATCHDOG.

#ifndef PROBE
#define PROBE 0
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int ROW_BYTES = DIM * 2;                 // of a query
constexpr int LINE_BYTES = FP8 ? DIM : ROW_BYTES;  // of a key
constexpr int KEYS = 8192 / LINE_BYTES;            // tokens of a tile
constexpr int BOX = PAGE < KEYS ? PAGE : KEYS;     // tokens of a copy
constexpr int BOXES = KEYS / BOX;                  // copies of a half
constexpr int BOX_BYTES = BOX * LINE_BYTES;
constexpr int HALF_BYTES = BOXES * BOX_BYTES;
constexpr int POWERS = FP8 ? 2 * KEYS : 0;  // bytes of the exponents of a tile, box by box
constexpr int PIECES = LINE_BYTES / 16;     // 16-byte pieces of a token
constexpr int LANES = 32;
constexpr u32 ALL = 0xffffffffu;

#ifndef ON_HOST  // tests run the rest with these instructions acted out by threads of the CPU
__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices, the i-th row of the j-th at the address that lane 8 j + i gives.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 address) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void clear_piece(u32 address) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// For the lanes of the warp, and for the copy engine that writes there next.
__device__ __forceinline__ void clears_done() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ void copy_box(u32 target, const TensorMap& map, int row, u32 barrier,
                                         u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %3, %4}], [%2], %5;"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(row), "r"(0), "l"(policy) : "memory");
}

__device__ __forceinline__ void copy_bytes(u32 target, const signed char* source, int bytes,
                                           u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;"
        ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// A signed byte of shared memory.
__device__ __forceinline__ int load_signed(u32 address) {
    int v;
    asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Four e4m3 numbers as float16: the first two, the last two.
__device__ __forceinline__ void widen(u32 bytes, u32& low, u32& high) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}" : "=r"(low), "=r"(high) : "r"(bytes));
}

__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

__device__ __forceinline__ u32 load_query(const char* at) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
#if T_BF16 && !FP8
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8x8 matrix of 16-bit numbers, two of a row a lane.
__device__ __forceinline__ u32 transpose(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// Two numbers in one word, the first in the low half.
template <bool BF16>
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}
#endif

#define MINUS_INFINITY __int_as_float(0xff800000)

struct Arguments {
    const char* q;
    const int* tables;
    const int* slots;
    const int* lengths;
    char* out;
    float* partial;
    const signed char* exponents;  // of the lines of the pool
    int2* cuts;  // of each worker: the run that it began and that goes on, and the last worker of it
    const float* sinks;  // of each head, base e
    int rows, kv_heads, group;
    u32 q_stride, table_stride;  // bytes, entries
    int window;
    float scale;                 // base 2, positive
#ifdef TIMELINE
    u64* timeline;               // 4 times of each worker
#endif
};

#ifdef TIMELINE
#define MARK(i)                                                              \
    do {                                                                     \
        u64 now;                                                             \
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");   \
        if (threadIdx.x % LANES == 0)                                        \
            a.timeline[4 * (threadIdx.x / LANES * gridDim.x + blockIdx.x) + i] = now; \
    } while (0)
#else
#define MARK(i)
#endif

// Lengths and slots of all rows, in shared memory.
struct Rows {
    const int* lengths;
    const int* slots;
};

// A place in the order rows, heads, tiles. `tile` counts from the sequence's beginning.
struct Cursor {
    int row, head, tile, first, end, length;  // of the run: tiles [first, end)

    __device__ __forceinline__ void enter(const Arguments& a, const Rows& rows) {
        length = rows.lengths[row];
        first = max(length - a.window, 0) / KEYS;
        end = (length + KEYS - 1) / KEYS;
        tile = first;
    }
    // Not to be called where no run follows.
    __device__ __forceinline__ void next_run(const Arguments& a, const Rows& rows) {
        tile = first;
        if (++head < a.kv_heads) return;
        head = 0;
        do ++row; while (rows.lengths[row] <= 0);
        enter(a, rows);
    }
};

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

// The tile at `position`: rows 32 at a time.
__device__ __forceinline__ Cursor find(const Arguments& a, const Rows& rows, u32 position,
                                       int lane) {
    Cursor at{0, 0, 0, 0, 0, 0};
    u32 before = 0;
    for (int base = 0;; base += LANES) {
        at.row = base + lane;
        if (at.row < a.rows) at.enter(a, rows);
        u32 mine = at.row < a.rows ? (at.end - at.first) * a.kv_heads : 0, upto = mine;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
            u32 other = __shfl_up_sync(ALL, upto, d);
            if (lane >= d) upto += other;
        }
        u32 passed = __ballot_sync(ALL, before + upto <= position);
        if (passed != ALL) {
            int here = __popc(passed);
            u32 offset = position - before - __shfl_sync(ALL, upto - mine, here);
            at.row = base + here;
            at.enter(a, rows);
            at.head = offset / (at.end - at.first);
            at.tile += offset % (at.end - at.first);
            return at;
        }
        before += __shfl_sync(ALL, upto, LANES - 1);
    }
}

// What asks for the halves of a worker's tiles, keys and values in turn, as its ring has places.
// Page-table entries come 32 at a time, one a lane; the next 32, of this run or of the next, are
// asked for when these are taken up.
struct Feed {
    Cursor at, table;  // next tile to ask for; next tile whose entries are to be asked for
    u32 left;          // tiles to ask for
    u32 unlisted;      // tiles whose entries are to be asked for
    u32 ring, full;    // addresses of the halves and of their barriers
    u32 powers;        // address of the exponents of each place
    u32 stage;         // next to fill
    int pages, begin;  // this lane's entry; number of lane 0's
    int covered;       // tiles that the entries still serve
    int next_pages, next_begin;
    int source[BOXES];  // of the tile whose keys were asked for: rows of the pool
    u64 policy;

    __device__ __forceinline__ int tiles_covered(const Cursor& c, int entry) const {
        return min((entry + LANES) * PAGE / KEYS, c.end) - c.tile;
    }

    __device__ __forceinline__ void list(const Arguments& a, const Rows& rows, int lane) {
        next_begin = table.tile * KEYS / PAGE;
        int entry = next_begin + lane;
        const int* entries = a.tables + (u64)rows.slots[table.row] * a.table_stride;
        next_pages = entry * PAGE < table.length ? __ldg(entries + entry) : 0;
        u32 count = tiles_covered(table, next_begin);
        unlisted -= min(unlisted, count);
        table.tile += count;
        if (table.tile == table.end && unlisted > 0) table.next_run(a, rows);
    }

    __device__ __forceinline__ void put(const Arguments& a, const TensorMap& pool, int offset) {
        if (elected()) {
            u32 target = ring + stage * HALF_BYTES, barrier = full + stage * 8;
            int boxes = min(BOXES, (at.length - at.tile * KEYS + BOX - 1) / BOX);
            const bool powers_too = FP8 && offset == 0;
            barrier_expect(barrier, boxes * (BOX_BYTES + (powers_too ? 2 * BOX : 0)));
#pragma unroll
            for (int i = 0; i < BOXES; ++i)
                if (i < boxes) {
                    copy_box(target + i * BOX_BYTES, pool, source[i] + offset, barrier, policy);
                    if (powers_too)  // a box is a page: those of the values lie behind
                        copy_bytes(powers + stage * POWERS + i * 2 * BOX, a.exponents + source[i],
                                   2 * BOX, barrier, policy);
                }
        }
        if (++stage == STAGES) stage = 0;
    }

    __device__ __forceinline__ void keys(const Arguments& a, const TensorMap& pool,
                                         const Rows& rows, int lane) {
        if (left == 0) return;
        if (covered == 0) {
            pages = next_pages;
            begin = next_begin;
            covered = tiles_covered(at, begin);
            if (unlisted > 0) list(a, rows, lane);
        }
        --covered;
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            int token = at.tile * KEYS + i * BOX;
            int page = __shfl_sync(ALL, pages, token / PAGE - begin);
            source[i] = (page * a.kv_heads + at.head) * (2 * PAGE) + token % PAGE;
        }
        put(a, pool, 0);
    }

    __device__ __forceinline__ void values(const Arguments& a, const TensorMap& pool,
                                           const Rows& rows) {
        if (left == 0) return;
        put(a, pool, PAGE);
        if (--left > 0 && ++at.tile == at.end) at.next_run(a, rows);
    }
};

// Two numbers of a query in float16, none infinite.
__device__ __forceinline__ u32 narrowed(u32 pair) {
#if T_BF16
    const float largest = 65504.0f;
    float low = __int_as_float(pair << 16), high = __int_as_float(pair & 0xffff0000u);
    return pack<false>(fminf(fmaxf(low, -largest), largest), fminf(fmaxf(high, -largest), largest));
#else
    return pair;
#endif
}

// The operands of one run's queries, loaded word by word into the registers where the instructions
// want them. Beyond the group its last head stands in: rows of the products are independent, and
// nobody reads these.
struct Query {
    u32 piece[DIM / 16][4];

    __device__ __forceinline__ void load(const Arguments& a, const Cursor& at, int lane) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            int member = min(lane / 4 + 8 * n, a.group - 1);
            const char* from = a.q + (u64)at.row * a.q_stride
                               + (u32)(at.head * a.group + member) * ROW_BYTES;
#pragma unroll
            for (int i = 0; i < DIM / 8; ++i)
                piece[i / 2][i % 2 * 2 + n] =
                    FP8 ? narrowed(load_query(from + lane % 4 * 8 + i / 2 * 32 + i % 2 * 4))
                        : load_query(from + lane % 4 * 4 + i * 16);
        }
    }
};

constexpr int OWN = FP8 ? 2 : 1;  // heads of eight that a lane has weights of

// Softmax over the tokens so far of one run, base 2. Of heads g and g + 8, with FP8 of 2 t, 2 t + 1 (and
// 8 on), the peak and the sum of the weights of this lane's tokens; of heads 2 t, 2 t + 1 (and 8 on)
// the weighted sum of values, for each 16 dims: dim g of both heads, dim g + 8 of both; with FP8 dims
// 2 g and 2 g + 1.
struct State {
    float peak[TILES_N][OWN], weight[TILES_N][OWN];
    float value[TILES_N][DIM / 16][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                peak[n][i] = MINUS_INFINITY;
                weight[n][i] = 0;
            }
#pragma unroll
            for (int j = 0; j < DIM / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) value[n][j][i] = 0;
        }
    }
};

typedef u32 Weights[TILES_N][KEYS / 16][2];

// Where a half has the 16-byte piece `piece` (of the dims) of a token: a box at a time, 128 bytes of a
// token at a time, token by token.
__device__ __forceinline__ u32 place(int token, int piece) {
    return token / BOX * BOX_BYTES + piece / 8 * (BOX * 128) + token % BOX * 128
           + (piece % 8 ^ token % 8) * 16;
}

#if FP8
// Of tokens 16 j + g, 16 j + 8 + g and heads 2 t, 2 t + 1 (and 8 on).
typedef float Scores[TILES_N][KEYS / 16][4];

__device__ __forceinline__ void score(Scores& s, u32 half, const Query& query, int lane) {
    // Matrices: the piece 2 i of the tokens 16 j to 16 j + 7, then of the next 8; the piece 2 i + 1.
    u32 base = half + place(lane / 8 % 2 * 8 + lane % 8, lane / 16);
#pragma unroll
    for (int i = 0; i < PIECES / 2; ++i)
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
            u32 k[4];
            load_matrices<false>(k, (base ^ i * 32) + place(16 * j, 0));
#if PROBE == 0
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                u32 wide[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) widen(k[2 * m + h], wide[h], wide[2 + h]);
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
                    multiply(s[n][j], wide, query.piece[2 * i + m][n],
                             query.piece[2 * i + m][2 + n]);
            }
#else
            s[0][j][0] += __int_as_float(k[0] ^ k[1] ^ k[2] ^ k[3]);
#endif
        }
}

// The exponents of this lane's tokens, 8 i + g.
struct Powers {
    int keys[KEYS / 8], values[KEYS / 8];

    __device__ __forceinline__ void load(u32 address, int lane) {
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
            u32 at = address + 8 * i / BOX * 2 * BOX + 8 * i % BOX + lane / 4;
            keys[i] = load_signed(at);
            values[i] = load_signed(at + BOX);
        }
    }
};

// `x` times 2 ** `exponent`, as long as either is a normal number.
__device__ __forceinline__ float raised(float x, int exponent) {
    return __uint_as_float((u32)exponent * (1u << 23) + __float_as_int(x));
}

// From sums of products to scores, base 2, with the powers of keys and values.
__device__ __forceinline__ void raise(Scores& s, const Powers& powers, float scale) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; ++i) {
        const float factor = raised(scale, powers.keys[i]), more = powers.values[i];
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[n][i / 2][i % 2 * 2 + c];
                x = fmaf(x, factor, more);
            }
    }
}

// Tokens outside [low, high) of the tile are not seen; exponents of such were perhaps never written.
__device__ __forceinline__ void mask(Scores& s, Powers& powers, int low, int high, int lane) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; ++i) {
        int token = 8 * i + lane / 4;
        if (token >= low && token < high) continue;
        powers.values[i] = 0;
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
            s[n][i / 2][i % 2 * 2] = s[n][i / 2][i % 2 * 2 + 1] = MINUS_INFINITY;
    }
}

// How far, base 2, scores may be above the peak: only what is further moves it, for all lanes that
// share its heads.
constexpr float SLACK = 8;

// From scores to weights, as the operand of the product with the values; the state fades.
__device__ __forceinline__ void weigh(Weights& p, Scores& s, State& state, const Powers& powers,
                                      int lane) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        float top[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            top[c] = s[n][0][c];
#pragma unroll
            for (int i = 1; i < KEYS / 8; ++i) top[c] = fmaxf(top[c], s[n][i / 2][i % 2 * 2 + c]);
        }
        if (__any_sync(ALL, top[0] > state.peak[n][0] + SLACK || top[1] > state.peak[n][1] + SLACK))
#pragma unroll
            for (int c = 0; c < 2; ++c) {
#pragma unroll
                for (int d = 4; d < LANES; d *= 2)
                    top[c] = fmaxf(top[c], __shfl_xor_sync(ALL, top[c], d));
                float peak = fmaxf(top[c], state.peak[n][c]);
                float fade = power2(state.peak[n][c] - peak);
                state.peak[n][c] = peak;
                state.weight[n][c] *= fade;
#pragma unroll
                for (int j = 0; j < DIM / 16; ++j) {
                    state.value[n][j][c] *= fade;
                    state.value[n][j][c + 2] *= fade;
                }
            }
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
            const float inverse = raised(1.0f, -powers.values[i]);
            float* x = &s[n][i / 2][i % 2 * 2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                x[c] = power2(x[c] - state.peak[n][c]);
                state.weight[n][c] = fmaf(x[c], inverse, state.weight[n][c]);
            }
            p[n][i / 2][i % 2] = transpose(pack<false>(x[0], x[1]));
        }
    }
}
#else
// Of heads g, g + 8 and tokens 8 j + 2 t, 8 j + 2 t + 1.
typedef float Scores[KEYS / 8][4];

__device__ __forceinline__ void score(Scores& s, u32 half, const Query& query, int lane) {
    // Matrices: the pieces 4 i to 4 i + 3 of the tokens 8 j to 8 j + 7.
    u32 even = half + place(lane % 8, lane / 8), odd = half + place(lane % 8, lane / 8 + 4);
#pragma unroll
    for (int i = 0; i < PIECES / 4; ++i)
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) {
            u32 k[4];
            load_matrices<false>(k, (i % 2 ? odd : even) + place(8 * j, i / 2 * 8));
#if PROBE == 0
            multiply(s[j], query.piece[2 * i], k[0], k[1]);
            multiply(s[j], query.piece[2 * i + 1], k[2], k[3]);
#else
            s[j][0] += __int_as_float(k[0] ^ k[1] ^ k[2] ^ k[3]);
#endif
        }
}

// Tokens outside [low, high) of the tile are not seen.
__device__ __forceinline__ void mask(Scores& s, int low, int high, int lane) {
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int token = 8 * j + 2 * (lane % 4) + i % 2;
            if (token < low || token >= high) s[j][i] = MINUS_INFINITY;
        }
}

// From scores to weights, as the operand of the product with the values; the state fades.
__device__ __forceinline__ void weigh(Weights& p, Scores& s, State& state, float scale, int lane) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        float peak = s[0][2 * n];
#pragma unroll
        for (int i = 1; i < KEYS / 4; ++i) peak = fmaxf(peak, s[i / 2][2 * n + i % 2]);
        peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
        peak = fmaxf(peak * scale, state.peak[n][0]);
        float weight = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            float& x = s[i / 2][2 * n + i % 2];
            x = power2(fmaf(x, scale, -peak));
            weight += x;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i)
            p[n][i / 2][i % 2] = pack<T_BF16>(s[i][2 * n], s[i][2 * n + 1]);
        if (__any_sync(ALL, peak > state.peak[n][0])) {
            float fade = power2(state.peak[n][0] - peak);
            float fades[2] = {__shfl_sync(ALL, fade, lane % 4 * 8),
                              __shfl_sync(ALL, fade, lane % 4 * 8 + 4)};
            state.weight[n][0] *= fade;
            state.peak[n][0] = peak;
#pragma unroll
            for (int j = 0; j < DIM / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) state.value[n][j][i] *= fades[i % 2];
        }
        state.weight[n][0] += weight;
    }
}
#endif

// What lies beyond the last token, `written`, was perhaps never written, and may be NaN.
__device__ __forceinline__ void clear_unwritten(u32 half, int written, int lane) {
    for (int i = written * PIECES + lane; i < KEYS * PIECES; i += LANES)
        clear_piece(half + place(i / PIECES, i % PIECES));
    clears_done();
}

#if FP8
__device__ __forceinline__ void add_values(State& state, u32 half, const Weights& p, int lane) {
    // Matrices: the piece 2 d of the tokens 16 j to 16 j + 7, then of the next 8; the piece 2 d + 1.
    u32 base = half + place(lane / 8 % 2 * 8 + lane % 8, lane / 16);
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j)
#pragma unroll
        for (int d = 0; d < DIM / 32; ++d) {
            u32 v[4];
            load_matrices<true>(v, (base ^ d * 32) + place(16 * j, 0));
#if PROBE == 0
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                // A lane has dims 2 g and 2 g + 1 of two tokens: to both tokens of either dim.
                u32 wide[4];
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    widen(__byte_perm(v[2 * m + h], 0, 0x3120), wide[2 * h], wide[2 * h + 1]);
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
                    multiply(state.value[n][2 * d + m], wide, p[n][j][0], p[n][j][1]);
            }
#else
            state.value[0][2 * d][0] += __int_as_float(v[0] ^ v[1] ^ v[2] ^ v[3]);
#endif
        }
}
#else
__device__ __forceinline__ void add_values(State& state, u32 half, const Weights& p, int lane) {
    // Matrices: the pieces 2 d, 2 d + 1 of the tokens 16 j to 16 j + 7, then of the next 8.
    u32 base = half + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j)
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            u32 v[4];
            load_matrices<true>(v, (base ^ d % 4 * 32) + place(16 * j, d / 4 * 8));
#pragma unroll
            for (int n = 0; n < TILES_N; ++n)
#if PROBE == 0
                multiply(state.value[n][d], v, p[n][j][0], p[n][j][1]);
#else
                state.value[n][d][0] += __int_as_float(v[0] ^ v[1] ^ v[2] ^ v[3]);
#endif
        }
}

#endif

// A partial result in the scratch: values of 16 heads, then their peaks and sums of weights.
constexpr int PLACE_FLOATS = 16 * DIM + 32;

// Of heads g and g + 8.
struct Sums {
    float peak[TILES_N], weight[TILES_N];
};

// The sums over all lanes' tokens.
__device__ __forceinline__ Sums summed(const State& state, int lane) {
    Sums sums;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        float peak[OWN], weight[OWN];
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            peak[c] = state.peak[n][c];
            weight[c] = state.weight[n][c];
#pragma unroll
            for (int d = FP8 ? 4 : 1; d < (FP8 ? LANES : 4); d *= 2)
                weight[c] += __shfl_xor_sync(ALL, weight[c], d);
#if FP8  // lane g / 2 has those of head g
            peak[c] = __shfl_sync(ALL, peak[c], lane / 8);
            weight[c] = __shfl_sync(ALL, weight[c], lane / 8);
#endif
        }
        const int mine = FP8 ? lane / 4 % 2 : 0;
        sums.peak[n] = mine ? peak[OWN - 1] : peak[0];
        sums.weight[n] = mine ? weight[OWN - 1] : weight[0];
    }
    return sums;
}

__device__ __forceinline__ void store_partial(const Arguments& a, int place, const State& state,
                                              const Sums& sums, int lane) {
    float* to = a.partial + (u64)place * PLACE_FLOATS;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        if (lane % 4 == 0 && lane / 4 + 8 * n < a.group)
            __stcg(reinterpret_cast<float2*>(to + 16 * DIM + 2 * (lane / 4 + 8 * n)),
                   make_float2(sums.peak[n], sums.weight[n]));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int member = 8 * n + 2 * (lane % 4) + i % 2;
            if (member >= a.group) continue;
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d)
                __stcg(to + member * DIM + 16 * d + (FP8 ? lane / 4 * 2 + i / 2 : i / 2 * 8 + lane / 4),
                       state.value[n][d][i]);
        }
    }
}

// The weight of a sink beside others whose largest is 1.
__device__ __forceinline__ float sink_weight(const Arguments& a, int head, float peak) {
    return SINKS ? power2(fmaf(a.sinks[head], 1.4426950408889634f, -peak)) : 0.0f;
}

__device__ __forceinline__ void store_out(const Arguments& a, const Cursor& at, const State& state,
                                          const Sums& sums, int lane) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        int member = lane / 4 + 8 * n;
        int of_sink = at.head * a.group + min(member, a.group - 1);
        float gain = 1.0f / (sums.weight[n] + sink_weight(a, of_sink, sums.peak[n]));
        float gains[2] = {__shfl_sync(ALL, gain, lane % 4 * 8),
                          __shfl_sync(ALL, gain, lane % 4 * 8 + 4)};
        u64 head = (u64)(at.row * a.kv_heads + at.head) * a.group + member;
        char* to = a.out + head * ROW_BYTES;
        u32 dims[2];
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) {
            const float* x = &state.value[n][i / 2][i % 2 * 2];
            dims[i % 2] = transpose(pack<T_BF16>(x[0] * gains[0], x[1] * gains[1]));
            if (member >= a.group) continue;
            if (!FP8)
                *reinterpret_cast<u32*>(to + lane % 4 * 4 + i * 16) = dims[i % 2];
            else if (i % 2)  // even dims, odd dims
                *reinterpret_cast<uint2*>(to + lane % 4 * 8 + i / 2 * 32) =
                    make_uint2(__byte_perm(dims[0], dims[1], 0x5410),
                               __byte_perm(dims[0], dims[1], 0x7632));
        }
    }
}

// The end of a run, or of this worker's part of it. A part that goes on is put at the second place
// of the worker, one that ends at the first.
__device__ __forceinline__ void finish(const Arguments& a, const Cursor& at, bool began_here,
                                       u32 worker, State& state, int lane) {
    const Sums sums = summed(state, lane);
    bool goes_on = at.tile < at.end;
    if (began_here && !goes_on)
        store_out(a, at, state, sums, lane);
    else
        store_partial(a, 2 * worker + goes_on, state, sums, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES, 1)
decode_attention(const __grid_constant__ TensorMap pool, const __grid_constant__ Arguments a) {
    MARK(0);
    let_next_start();
    char* memory = dynamic_shared();
    __shared__ u64 barriers[WARPS * STAGES];
    __shared__ u32 warp_tiles[WARPS];
    char* all_powers = memory + WARPS * STAGES * HALF_BYTES;
    int* lengths = reinterpret_cast<int*>(all_powers + WARPS * STAGES * POWERS);
    int* slots = lengths + a.rows;
    Rows rows{lengths, slots};
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;

    u32 tiles = 0;
    for (int row = threadIdx.x; row < a.rows; row += WARPS * LANES) {
        int length = max(a.lengths[row], 0);
        lengths[row] = length;
        slots[row] = a.slots[row];
        tiles += (length + KEYS - 1) / KEYS - max(length - a.window, 0) / KEYS;
    }
    tiles = __reduce_add_sync(ALL, tiles);
    if (lane == 0) warp_tiles[warp] = tiles;
    if (threadIdx.x < WARPS * STAGES) barrier_init(shared_address(barriers + threadIdx.x));
    barriers_ready();
    Share share{0, 0};
    for (int i = 0; i < WARPS; ++i) share.total += warp_tiles[i] * a.kv_heads;
    share.workers = min(share.total, gridDim.x * WARPS);
    u32 worker = warp * gridDim.x + blockIdx.x;  // few tiles are spread over all blocks
    if (worker >= share.workers) {
        wait_for_previous();
        if (lane == 0) a.cuts[worker] = make_int2(-1, 0);
        return;
    }
    u32 position = share.begin(worker), stop = share.begin(worker + 1);

    Cursor at = find(a, rows, position, lane);
    u32 ring = shared_address(memory) + warp * STAGES * HALF_BYTES;
    u32 full = shared_address(barriers + warp * STAGES);
    u32 powers_at = shared_address(all_powers) + warp * STAGES * POWERS;
    Feed feed{at, at, stop - position, stop - position, ring, full, powers_at};
    feed.stage = feed.covered = 0;
    feed.policy = evict_first();
    feed.list(a, rows, lane);
    auto refill = [&](bool values) {
        __syncwarp();  // all lanes have used what was there
        values ? feed.values(a, pool, rows) : feed.keys(a, pool, rows, lane);
    };
    if (at.end - at.tile <= (STAGES + 1) / 2) wait_for_previous();  // for the newest token
#pragma unroll
    for (int i = 0; i < STAGES; ++i) refill(i % 2);
    wait_for_previous();
    if (lane == 0) a.cuts[worker] = make_int2(-1, 0);

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
    query.load(a, at, lane);
    state.clear();
    bool began_here = at.tile == at.first;
    MARK(1);
    for (;; ++position) {
        int low = at.length - a.window - at.tile * KEYS, high = at.length - at.tile * KEYS;
        const bool edge = low > 0 || high < KEYS;
        Scores s{};
        Weights p{};
#if FP8
        Powers powers;
        u32 here = powers_at + stage * POWERS, half = arrive();
        powers.load(here, lane);
#else
        u32 half = arrive();
#endif
        if (PROBE != 1) score(s, half, query, lane);
        refill(STAGES % 2);
#if PROBE != 0
        const float(*each)[4] = reinterpret_cast<const float(*)[4]>(&s);
#pragma unroll
        for (int j = 0; j < sizeof(s) / sizeof(*each); ++j) state.weight[0][0] += each[j][0];
#elif FP8
        raise(s, powers, a.scale);
        if (edge) mask(s, powers, low, high, lane);
        weigh(p, s, state, powers, lane);
#else
        if (edge) mask(s, low, high, lane);
        weigh(p, s, state, a.scale, lane);
#endif
        half = arrive();
        if (high < KEYS) clear_unwritten(half, high, lane);
        if (PROBE != 1) add_values(state, half, p, lane);
        refill(STAGES % 2 == 0);
        bool more = position + 1 < stop;
        if (++at.tile < at.end && more) continue;
        if (!more) MARK(2);
        finish(a, at, began_here, worker, state, lane);
        if (!more) break;
        at.next_run(a, rows);
        began_here = true;
        query.load(a, at, lane);
        state.clear();
    }
    if (lane == 0 && began_here && at.tile < at.end) {
        u32 last = share.owner(position + at.end - at.tile);
        a.cuts[worker] = make_int2(at.row * a.kv_heads + at.head, last);
    }
    MARK(3);
}

constexpr int COMBINERS = 4;

// The parts of each run that was cut, in the workers' order. COMBINERS blocks have the runs that WARPS
// workers began and did not end; warps share them out, and then the members of a run, so that a warp
// waits for memory as few times in a row as can be. Few registers and no
// shared memory: all blocks can stand by while attention runs, so that the kernel behind can, too.
extern "C" __global__ void __launch_bounds__(WARPS * LANES, 40 / WARPS)
combine(const __grid_constant__ TensorMap, const __grid_constant__ Arguments a) {
    constexpr int TEAM = DIM / 4;  // lanes that share a member, four dims each
    let_next_start();
    wait_for_previous();
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int2 cut = make_int2(-1, 0);
    const int block = blockIdx.x / COMBINERS, part_of_it = blockIdx.x % COMBINERS;
    if (lane < WARPS) cut = __ldcg(a.cuts + block * WARPS + lane);
    u32 begun = __ballot_sync(ALL, cut.x >= 0);
    int runs = __popc(begun);
    if (runs == 0) return;
    int mine = warp % runs, share = warp / runs * COMBINERS + part_of_it;
    int shares = ((WARPS - 1 - mine) / runs + 1) * COMBINERS;
    for (int i = 0; i < mine; ++i) begun &= begun - 1;
    int owner = __ffs(begun) - 1;
    int run = __shfl_sync(ALL, cut.x, owner), last = __shfl_sync(ALL, cut.y, owner);
    int first = block * WARPS + owner;
    auto part_at = [&](int part) {
        return a.partial + (u64)(2 * part + (part < last)) * PLACE_FLOATS;
    };
    for (int base = share * LANES; base < a.group * TEAM; base += shares * LANES) {
        int quad = base + lane, member = min(quad / TEAM, a.group - 1);
        auto totals = [&](int part) {  // peak and sum of weights
            return __ldcg(reinterpret_cast<const float2*>(part_at(part) + 16 * DIM + 2 * member));
        };
        float peak = MINUS_INFINITY, weight = 0;
        for (int part = first + lane % TEAM; part <= last; part += TEAM)
            peak = fmaxf(peak, totals(part).x);
#pragma unroll
        for (int d = TEAM / 2; d; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, d));
        for (int part = first + lane % TEAM; part <= last; part += TEAM) {
            float2 t = totals(part);
            weight += t.y * power2(t.x - peak);
        }
#pragma unroll
        for (int d = TEAM / 2; d; d /= 2) weight += __shfl_xor_sync(ALL, weight, d);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int part = first; part <= last; ++part) {
            float4 x = __ldcg(reinterpret_cast<const float4*>(part_at(part)) + quad);
            float gain = power2(totals(part).x - peak);
            sum.x += x.x * gain;
            sum.y += x.y * gain;
            sum.z += x.z * gain;
            sum.w += x.w * gain;
        }
        if (quad >= a.group * TEAM) continue;
        float gain = 1.0f / (weight + sink_weight(a, run % a.kv_heads * a.group + member, peak));
        u32* out = reinterpret_cast<u32*>(a.out + (u64)run * a.group * ROW_BYTES) + 2 * quad;
        out[0] = pack<T_BF16>(sum.x * gain, sum.y * gain);
        out[1] = pack<T_BF16>(sum.z * gain, sum.w * gain);
    }
}
