// The gated delta rule of one new token a row, and the gate behind it (sm_90a).
//
// A block has a whole head's state, 128 x 128 float32, in its registers: a warp 16 keys, a lane four
// values of each. The copy engine brings the states of the next heads into shared memory, in runs of
// 64 KB, while this one is computed; sums over the keys of a warp stay in a lane, and the warps meet
// once a head. Blocks take heads in turns, of the rows that are active alone.
//
// What a token brings (its query, key, value, gate, decay and rate) is read two heads ahead and laid
// into shared memory one head ahead. Part j of three is read up to the end of head j, and written
// before the warps meet at head j - 1 with what head j needs, when all have ended head j - 3.
//
// The compiler is given KEY_HEADS, VALUE_HEADS and STAGES. Numbers are bf16.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Arguments {
    u64 mixed;          // [rows, WIDTH]: queries and keys of KEY_HEADS, values of VALUE_HEADS
    u64 rates;          // [rows, 2 * VALUE_HEADS]: learning rates, then decays, with a stride
    u64 decay, shift;   // float [VALUE_HEADS]
    u64 states;         // float [slots, VALUE_HEADS, SIZE, SIZE]
    u64 slots, lengths; // int [rows]
    u64 out;            // [rows, VALUE_HEADS * SIZE]
    u64 gates;          // [rows, VALUE_HEADS * SIZE], with a stride
    u64 norm;           // [SIZE]
    int rows, rate_stride, gate_stride;
    float eps;
};

constexpr int SIZE = 128, WARPS = 8, KEYS = SIZE / WARPS, QUADS = SIZE / 4;
constexpr int STATE_BYTES = SIZE * SIZE * 4;
constexpr int WIDTH = (2 * KEY_HEADS + VALUE_HEADS) * SIZE;

struct Token {
    float q[SIZE], k[SIZE], v[SIZE], gate[SIZE];
    float kept, rate;  // of the state, and of the correction
    float room[2];
};

struct Place {
    int row, slot;
};

struct Shared {
    float4 sums[2][WARPS][2][QUADS];  // of what is known, and of what the query reads
    float dots[2][WARPS];             // query times key
    Token tokens[3];
    u64 barriers[STAGES];
    u64 count;  // active rows
    Place places[1];
};

#ifndef ON_HOST  // tests run the rest with these instructions acted out by threads of the CPU
__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy_state(u32 target, const float* source, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(target), "l"(source), "r"(STATE_BYTES), "r"(barrier) : "memory");
}

__device__ __forceinline__ void keep_state(float4* to, const float4& v) {
    asm volatile("st.global.L1::evict_first.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// What the kernel in front has made.
__device__ __forceinline__ u32 load_number(u64 array, u64 index) {
    unsigned short bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(array + 2 * index) : "memory");
    return bits;
}
#endif

// A thread's part of what a token brings.
struct Brought {
    u32 pair[2];                      // a number of queries or keys, and of values or gates
    float rate, raw, shift, decay;    // of the first thread
};

__device__ __forceinline__ Brought bring(const Arguments& given, const Place& at, int head) {
    const int i = threadIdx.x % SIZE, keyed = head / (VALUE_HEADS / KEY_HEADS) * SIZE + i;
    const bool second = threadIdx.x >= SIZE;
    const u64 row = (u64)at.row * WIDTH, valued = head * SIZE + i;
    Brought b;
    b.pair[0] = load_number(given.mixed, row + (second ? KEY_HEADS * SIZE : 0) + keyed);
    b.pair[1] = second ? load_number(given.gates, (u64)at.row * given.gate_stride + valued)
                       : load_number(given.mixed, row + 2 * KEY_HEADS * SIZE + valued);
    if (threadIdx.x == 0) {
        const u64 rated = (u64)at.row * given.rate_stride + head;
        b.rate = to_float(load_number(given.rates, rated));
        b.raw = to_float(load_number(given.rates, rated + VALUE_HEADS));
        b.shift = reinterpret_cast<const float*>(given.shift)[head];
        b.decay = reinterpret_cast<const float*>(given.decay)[head];
    }
    return b;
}

__device__ __forceinline__ void lay(Token& token, const Brought& b) {
    const int i = threadIdx.x % SIZE;
    const bool second = threadIdx.x >= SIZE;
    (second ? token.k : token.q)[i] = to_float(b.pair[0]);
    (second ? token.gate : token.v)[i] = to_float(b.pair[1]);
    if (threadIdx.x == 0) {
        const float moved = b.raw + b.shift;
        const float soft = moved > 20.0f ? moved : logf(1.0f + __expf(moved));
        token.kept = __expf(b.decay * soft);
        token.rate = 1.0f / (1.0f + __expf(-b.rate));
    }
}

__device__ __forceinline__ float4 added(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void add_times(float4& total, const float4& a, float f) {
    total.x += a.x * f, total.y += a.y * f, total.z += a.z * f, total.w += a.w * f;
}

__device__ __forceinline__ float rounded(float f) { return to_float(to_pair(f, 0.0f) & 0xffff); }

// Normalises four values of a head in each lane and multiplies them with SiLU of their gates.
__device__ __forceinline__ void write_gated(
    const Arguments& given, const Token& token, float4 read, u64 at, int lane) {
    float values[4] = {rounded(read.x), rounded(read.y), rounded(read.z), rounded(read.w)};
    float squares = 0.0f;
    for (int i = 0; i < 4; ++i) squares += values[i] * values[i];
    for (int mask = 16; mask; mask /= 2) squares += __shfl_xor_sync(0xffffffff, squares, mask);
    const float inverse = rsqrtf(squares / SIZE + given.eps);
    for (int i = 0; i < 4; ++i) {
        const u32 weight = reinterpret_cast<const unsigned short*>(given.norm)[4 * lane + i];
        const float z = token.gate[4 * lane + i];
        const float normal = rounded(rounded(values[i] * inverse) * to_float(weight));
        values[i] = normal * (z / (1.0f + __expf(-z)));
    }
    *reinterpret_cast<uint2*>(given.out + 2 * (at + 4 * lane)) =
        make_uint2(to_pair(values[0], values[1]), to_pair(values[2], values[3]));
}

// Lists the active rows; of the first warp.
__device__ __forceinline__ void list_rows(const Arguments& given, Shared& shared, int lane) {
    int count = 0;
    for (int first = 0; first < given.rows; first += 32) {
        const int row = first + lane;
        const bool active =
            row < given.rows && reinterpret_cast<const int*>(given.lengths)[row] > 0;
        const u32 all = __ballot_sync(0xffffffff, active);
        if (active)
            shared.places[count + __popc(all & ((1u << lane) - 1))] =
                {row, reinterpret_cast<const int*>(given.slots)[row]};
        count += __popc(all);
    }
    if (lane == 0) shared.count = count;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rule_step(const __grid_constant__ Arguments given) {
    char* memory = dynamic_shared();
    Shared& shared = *reinterpret_cast<Shared*>(memory + STAGES * STATE_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_start();
    if (warp == 0) list_rows(given, shared, lane);
    if (threadIdx.x == 0)
        for (int s = 0; s < STAGES; ++s) barrier_init(shared_address(&shared.barriers[s]));
    barriers_ready();
    __syncthreads();
    const int total = (int)shared.count * VALUE_HEADS, step = gridDim.x;
    const auto place = [&](int item) { return shared.places[item / VALUE_HEADS]; };
    const auto state = [&](int item) {
        return reinterpret_cast<float*>(given.states)
            + ((u64)place(item).slot * VALUE_HEADS + item % VALUE_HEADS) * (SIZE * SIZE);
    };
    const auto fetch = [&](int item, int stage) {
        const u32 barrier = shared_address(&shared.barriers[stage]);
        barrier_expect(barrier, STATE_BYTES);
        copy_state(shared_address(memory) + stage * STATE_BYTES, state(item), barrier);
    };
    int item = blockIdx.x;
    if (threadIdx.x == 0)
        for (int s = 0; s < STAGES && item + s * step < total; ++s) fetch(item + s * step, s);
    wait_for_previous();
    Brought next;
    if (item < total) {
        lay(shared.tokens[0], bring(given, place(item), item % VALUE_HEADS));
        if (item + step < total)
            next = bring(given, place(item + step), (item + step) % VALUE_HEADS);
    }
    __syncthreads();
    for (int j = 0; item < total; ++j, item += step) {
        const int stage = j % STAGES, two = item + 2 * step;
        Token& token = shared.tokens[j % 3];
        if (item + step < total) lay(shared.tokens[(j + 1) % 3], next);
        if (two < total) next = bring(given, place(two), two % VALUE_HEADS);
        barrier_wait(shared_address(&shared.barriers[stage]), j / STAGES & 1);
        const float4* lines =
            reinterpret_cast<const float4*>(memory + stage * STATE_BYTES) + warp * KEYS * QUADS + lane;
        float4 own[KEYS], known = make_float4(0, 0, 0, 0), seen = make_float4(0, 0, 0, 0);
        float dot = 0.0f;
#pragma unroll
        for (int r = 0; r < KEYS; ++r) {
            const float q = token.q[warp * KEYS + r], k = token.k[warp * KEYS + r];
            own[r] = lines[r * QUADS];
            add_times(known, own[r], k);
            add_times(seen, own[r], q);
            dot += q * k;
        }
        auto& sums = shared.sums[j & 1];
        sums[warp][0][lane] = known;
        sums[warp][1][lane] = seen;
        if (lane == 0) shared.dots[j & 1][warp] = dot;
        __syncthreads();
        // All have read the state: its place is free.
        if (threadIdx.x == 0 && item + STAGES * step < total) fetch(item + STAGES * step, stage);
        known = sums[0][0][lane];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) known = added(known, sums[w][0][lane]);
        const float kept = token.kept, rate = token.rate;
        const float4 v = reinterpret_cast<const float4*>(token.v)[lane];
        const float4 corrected =
            make_float4((v.x - kept * known.x) * rate, (v.y - kept * known.y) * rate,
                        (v.z - kept * known.z) * rate, (v.w - kept * known.w) * rate);
        float4* to = reinterpret_cast<float4*>(state(item)) + warp * KEYS * QUADS + lane;
#pragma unroll
        for (int r = 0; r < KEYS; ++r) {
            const float k = token.k[warp * KEYS + r];
            float4 after = make_float4(own[r].x * kept, own[r].y * kept, own[r].z * kept,
                                       own[r].w * kept);
            add_times(after, corrected, k);
            keep_state(to + r * QUADS, after);
        }
        if (warp != j % WARPS) continue;
        seen = make_float4(0, 0, 0, 0), dot = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            add_times(seen, sums[w][1][lane], kept);
            dot += shared.dots[j & 1][w];
        }
        add_times(seen, corrected, dot);
        const u64 at = (u64)place(item).row * VALUE_HEADS * SIZE + item % VALUE_HEADS * SIZE;
        write_gated(given, token, seen, at, lane);
    }
}
