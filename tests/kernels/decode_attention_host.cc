// Runs decode_attention.cu on the CPU; see cuda_host.h. Counts bank conflicts.

#include "cuda_host.h"

static u32 __ballot_sync(u32, bool v) {
    u32 bits = 0;
    auto all = exchange<int>(v);
    for (int i = 0; i < 32; ++i) bits |= (u32)all[i] << i;
    return bits;
}
static bool __any_sync(u32, bool v) { return __ballot_sync(0, v) != 0; }
static u32 __reduce_add_sync(u32, u32 v) {
    u32 total = 0;
    for (u32 x : exchange(v)) total += x;
    return total;
}

static char* dynamic_shared() { return shared_memory; }
static void barriers_ready() { __syncthreads(); }
struct TensorMap {
    const char* pool;
    u64 rows;
};
static void copy_box(u32 target, const TensorMap& map, int row, u32 barrier, u64);
static u64 conflicts;
static std::set<u64> newest;  // rows of the pool that the kernel in front writes

static u32 load_query(const char* at) {
    need_previous();
    u32 v;
    memcpy(&v, at, 4);
    return v;
}
template <bool BF16> static u32 pack(float low, float high) {
    return narrow<BF16>(low) | narrow<BF16>(high) << 16;
}
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 both = a | (u64)b << 32;
    u32 made = 0;
    for (int i = 0; i < 4; ++i) made |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return made;
}
static float e4m3(u32 bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float value = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    if ((bits & 127) == 127) value = NAN;
    return bits >> 7 & 1 ? -value : value;
}
static void widen(u32 bytes, u32& low, u32& high) {
    low = pack<false>(e4m3(bytes & 255), e4m3(bytes >> 8 & 255));
    high = pack<false>(e4m3(bytes >> 16 & 255), e4m3(bytes >> 24));
}
static int load_signed(u32 address) { return (signed char)shared_memory[address]; }
static bool elected() { return current % 32 == 7; }  // any one
static void copy_bytes(u32 target, const signed char* source, int bytes, u32 barrier, u64);
static float power2(float x) { return std::exp2(x); }

struct Operands { u32 a[4], b[2]; };
static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto all = exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    auto element = [](u32 word, int i) { return ::widen<T_BF16 && !FP8>(word >> 16 * i & 0xffff); };
    int g = current % 32 / 4, t = current % 4;
    for (int i = 0; i < 4; ++i) {
        int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 16; ++k)
            d[i] += element(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2)
                    * element(all[column * 4 + k % 8 / 2].b[k / 8], k % 2);
    }
}
static u32 transpose(u32 a) {
    auto all = exchange(a);
    int g = current % 32 / 4, t = current % 4;
    auto element = [&](int row) { return all[row * 4 + g / 2] >> g % 2 * 16 & 0xffff; };
    return element(2 * t) | element(2 * t + 1) << 16;
}

template <bool TRANSPOSED> static void load_matrices(u32 (&d)[4], u32 address) {
    auto all = exchange(address);
    int g = current % 32 / 4, t = current % 4;
    for (int m = 0; m < 4; ++m) {
        u32 banks = 0;
        for (int row = 0; row < 8; ++row) banks |= 1u << all[8 * m + row] / 16 % 8;
        conflicts += banks != 255;
        auto element = [&](int row, int column) {
            unsigned short x;
            memcpy(&x, shared_memory + all[8 * m + row] + 2 * column, 2);
            return (u32)x;
        };
        d[m] = TRANSPOSED ? element(2 * t, g) | element(2 * t + 1, g) << 16
                          : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
    }
    __syncwarp();
}
static void clear_piece(u32 address) { memset(shared_memory + address, 0, 16); }
static void clears_done() { __syncwarp(); }

#include SOURCE

static void copy_box(u32 target, const TensorMap& map, int row, u32 barrier, u64) {
    if (target % 1024 || row < 0 || (u64)row + BOX > map.rows) {
        fault = "a copy out of place";
        row = target = 0;
    }
    if (newest.lower_bound(row) != newest.lower_bound(row + BOX)) need_previous();
    const char* source = map.pool + (u64)row * LINE_BYTES;
    start_copy(target, BOX_BYTES, barrier, [=] {
        // A line of 128 bytes a row at a time.
        for (int part = 0; part < LINE_BYTES / 128; ++part)
            for (int line = 0; line < BOX; ++line)
                for (int piece = 0; piece < 8; ++piece)
                    memcpy(shared_memory + swizzled(target + (part * BOX + line) * 128 + piece * 16),
                           source + line * LINE_BYTES + part * 128 + piece * 16, 16);
    });
}

static const signed char* exponents;

static void copy_bytes(u32 target, const signed char* source, int bytes, u32 barrier, u64) {
    u64 row = source - exponents;
    if (target % 16 || bytes % 16 || row % 16) fault = "a copy out of place";
    if (newest.lower_bound(row) != newest.lower_bound(row + bytes)) need_previous();
    start_copy(target, bytes, barrier, [=] { memcpy(shared_memory + target, source, bytes); });
}

extern "C" const char* run(const char* pool, u64 rows, const Arguments* a, int units, int seed,
                           u64* bank_conflicts) {
    begin(seed);
    conflicts = 0;
    exponents = a->exponents;
    newest.clear();
    for (int row = 0; row < a->rows; ++row) {
        int token = a->lengths[row] - 1;
        if (token < 0) continue;
        u64 page = a->tables[(u64)a->slots[row] * a->table_stride + token / PAGE];
        for (int half = 0; half < 2 * a->kv_heads; ++half)  // keys and values of each head
            newest.insert((page * 2 * a->kv_heads + half) * PAGE + token % PAGE);
    }
    TensorMap map{pool, rows};
    launch(units, WARPS * 32, [&] { decode_attention(map, *a); });
    launch(COMBINERS * units, WARPS * 32, [&] { combine(map, *a); });
    *bank_conflicts = conflicts;
    return fault;
}
