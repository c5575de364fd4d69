// Runs decode_attention.cu on the CPU: every thread of a block is a fiber, and the instructions that
// it wraps are acted out as the PTX manual defines them. Copies end late, out of order, and spoil
// their target at once; blocks and threads run in random order. Counts bank conflicts.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include <ucontext.h>

#define ON_HOST
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)

typedef unsigned int u32;
typedef unsigned long long u64;
struct float2 { float x, y; };
struct int2 { int x, y; };
struct float4 { float x, y, z, w; };
struct Index { u32 x; };

static int2 make_int2(int x, int y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __int_as_float(u32 i) { float f; memcpy(&f, &i, 4); return f; }
static float __uint_as_float(u32 i) { return __int_as_float(i); }
static int max(int a, int b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
static int __popc(u32 x) { return __builtin_popcount(x); }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, T v) { *p = v; }

static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 both = (u64)b << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) d |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return d;
}

// Fibers.

static std::mt19937 dice;
static ucontext_t scheduler;
static std::function<void()> body;
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
static std::vector<Fiber> fibers;
static int current;
static Index threadIdx, blockIdx, gridDim;

static void yield() { swapcontext(&fibers[current].context, &scheduler); }

static void entry() {
    body();
    fibers[current].done = true;
    yield();
}

struct Meeting { int arrived = 0, generation = 0; };
static Meeting warp_meetings[32], block_meeting;
static u64 spins;

static void meet(Meeting& m, int members) {
    int generation = m.generation;
    if (++m.arrived == members) {
        m.arrived = 0;
        ++m.generation;
        return;
    }
    while (m.generation == generation) yield();
}

static void __syncwarp() { meet(warp_meetings[current / 32], 32); }
static void __syncthreads() { meet(block_meeting, fibers.size()); }

// Each lane gives a value, each sees all.
template <class T> static std::vector<T> exchange(const T& mine) {
    static std::map<int, std::vector<T>> boards;
    std::vector<T>& board = boards[current / 32];
    board.resize(32);
    board[current % 32] = mine;
    __syncwarp();
    std::vector<T> all = boards[current / 32];
    __syncwarp();
    return all;
}

template <class T> static T __shfl_sync(u32, T v, int lane) { return exchange(v)[lane & 31]; }
template <class T> static T __shfl_xor_sync(u32, T v, int mask) {
    return exchange(v)[current % 32 ^ mask];
}
template <class T> static T __shfl_up_sync(u32, T v, int d) {
    auto all = exchange(v);
    return all[current % 32 < d ? current % 32 : current % 32 - d];
}
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

// Shared memory, barriers and copies.

alignas(1024) static char shared_memory[1 << 18];
static char* dynamic_shared() { return shared_memory; }
static u32 shared_address(const void* p) { return (u32)((const char*)p - shared_memory); }

struct Barrier { int arrivals = 0, pending = 0; u32 phase = 0; };
struct Copy { u32 target; const char* source; u32 barrier; };
static std::map<u32, Barrier> barriers_by_address;
static std::vector<Copy> copies;
static u64 conflicts;

static void settle(Barrier& b) {
    if (b.arrivals == 1 && b.pending == 0) {
        b.arrivals = 0;
        ++b.phase;
    }
}

static void barrier_init(u32 barrier) { barriers_by_address[barrier] = Barrier{}; }
static void barriers_ready() { __syncthreads(); }
static void barrier_expect(u32 barrier, u32 bytes) {
    Barrier& b = barriers_by_address[barrier];
    if (b.arrivals) abort();  // the half before was never waited for
    b.arrivals = 1;
    b.pending += bytes;
    settle(b);
}
struct TensorMap {
    const char* pool;
    u64 rows;
};
static void copy_box(u32 target, const TensorMap& map, int row, u32 barrier, u64);
static void deliver(const Copy& c);
static void barrier_wait(u32 barrier, u32 parity) {
    while ((barriers_by_address[barrier].phase & 1) == parity) {
        if (!copies.empty() && dice() % 8 == 0) {
            std::swap(copies[dice() % copies.size()], copies.back());
            Copy c = copies.back();
            copies.pop_back();
            deliver(c);
        }
        if (++spins > 2000000000ull) abort();
        yield();
    }
}
static u64 evict_first() { return 0; }

// Arithmetic.

static float widen(u32 bits) {
#if T_BF16
    return __int_as_float(bits << 16);
#else
    _Float16 h;
    unsigned short b = bits;
    memcpy(&h, &b, 2);
    return h;
#endif
}
static u32 narrow(float f) {
#if T_BF16
    u32 u;
    memcpy(&u, &f, 4);
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
#else
    _Float16 h = f;
    unsigned short b;
    memcpy(&b, &h, 2);
    return b;
#endif
}
static u32 load_query(const char* at) {
    u32 v;
    memcpy(&v, at, 4);
    return v;
}
static u32 pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
static float power2(float x) { return std::exp2(x); }

struct Operands { u32 a[4], b[2]; };
static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto all = exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    auto element = [](u32 word, int i) { return widen(word >> 16 * i & 0xffff); };
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
    // A copy must not write over what it did not announce, nor read outside of the pool.
    if (target % 1024 || row < 0 || (u64)row + BOX > map.rows) abort();
    memset(shared_memory + target, 0xff, BOX_BYTES);  // NaN
    copies.push_back({target, map.pool + (u64)row * ROW_BYTES, barrier});
}

static void deliver(const Copy& c) {
    // 64 dims at a time, a line of 128 bytes a row, pieces of 16 bytes exchanged by the line's number.
    for (int part = 0; part < DIM / 64; ++part)
        for (int row = 0; row < BOX; ++row)
            for (int piece = 0; piece < 8; ++piece) {
                u32 to = c.target + (part * BOX + row) * 128 + piece * 16;
                memcpy(shared_memory + (to ^ (to >> 7 & 7) << 4),
                       c.source + row * ROW_BYTES + part * 128 + piece * 16, 16);
            }
    Barrier& b = barriers_by_address[c.barrier];
    b.pending -= BOX_BYTES;
    settle(b);
}

static bool launch(int grid, int threads, const std::function<void()>& kernel) {
    std::vector<int> blocks(grid), order(threads);
    for (int i = 0; i < grid; ++i) blocks[i] = i;
    for (int i = 0; i < threads; ++i) order[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), dice);
    gridDim.x = grid;
    body = kernel;
    for (int block : blocks) {
        blockIdx.x = block;
        memset(shared_memory, 0xff, sizeof shared_memory);
        barriers_by_address.clear();
        fibers.assign(threads, Fiber{});
        for (Fiber& f : fibers) {
            f.stack.resize(1 << 17);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, entry, 0);
        }
        for (size_t done = 0; done < fibers.size();) {
            std::swap(order[dice() % order.size()], order[dice() % order.size()]);
            for (int i : order) {
                if (fibers[i].done) continue;
                current = i;
                threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].context);
                done += fibers[i].done;
            }
        }
        if (!copies.empty()) return false;  // asked for and never waited for
    }
    return true;
}

extern "C" u64 run(const char* pool, u64 rows, const Arguments* a, int units, int seed) {
    dice.seed(seed);
    spins = conflicts = 0;
    TensorMap map{pool, rows};
    if (!launch(units, WARPS * 32, [&] { decode_attention(map, *a); })) return ~0ull;
    if (!launch(units * WARPS, COMBINE_WARPS * 32, [&] { combine(map, *a); })) return ~0ull;
    return conflicts;
}
