// Runs the kernels of a CUDA C++ source on the CPU: every thread of a block is a fiber, and the
// instructions that the source wraps are acted out as the PTX manual defines them. Copies end late,
// out of order, and spoil their target at once; blocks and threads run in random order. Kernels are
// launched early (programmatic dependent launch): what the kernel in front of them makes must not be
// used by a thread that has not waited for it.

#include "standard.h"

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
struct uint2 { u32 x, y; };
struct int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { u32 x; };

static int2 make_int2(int x, int y) { return {x, y}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __int_as_float(u32 i) { float f; memcpy(&f, &i, 4); return f; }
static int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
static float __uint_as_float(u32 i) { return __int_as_float(i); }
#define __expf exponential
static float exponential(float x) { return std::exp(x); }
static int max(int a, int b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }

// Fibers.

static std::mt19937 dice;
static ucontext_t scheduler;
static std::function<void()> body;
struct Fiber { ucontext_t context; std::vector<char> stack; bool done, waited; };
static std::vector<Fiber> fibers;
static int current;
static Index threadIdx, blockIdx, gridDim;
static const char* fault;  // what went wrong
static u64 spins;

static void yield() { swapcontext(&fibers[current].context, &scheduler); }

static void entry() {
    body();
    fibers[current].done = true;
    yield();
}

struct Meeting { int arrived = 0, generation = 0; };
static Meeting warp_meetings[32], block_meeting;

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

// The kernel in front of this one.

static void let_next_start() {}
static void wait_for_previous() { fibers[current].waited = true; }
static void need_previous() {
    if (!fibers[current].waited) fault = "used before the kernel in front had ended";
}

template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { need_previous(); return *p; }
template <class T> static void __stcg(T* p, T v) { need_previous(); *p = v; }

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

// Shared memory, barriers and copies.

alignas(1024) static char shared_memory[1 << 18];
static u32 shared_address(const void* p) { return (u32)((const char*)p - shared_memory); }

struct Barrier { u32 count = 1, arrivals = 0; int pending = 0; u32 phase = 0; };
struct Copy { u32 barrier; int bytes; std::function<void()> write; };
static std::map<u32, Barrier> barriers_by_address;
static std::vector<Copy> copies;

static void settle(Barrier& b) {
    if (b.arrivals > b.count) fault = "a barrier that nobody had waited for";
    if (b.arrivals != b.count || b.pending) return;
    b.arrivals = 0;
    ++b.phase;
}

static void barrier_init(u32 barrier, u32 count = 1) {
    barriers_by_address[barrier] = Barrier{count};
}
static void barrier_expect(u32 barrier, u32 bytes) {
    Barrier& b = barriers_by_address[barrier];
    ++b.arrivals;
    b.pending += bytes;
    settle(b);
}
static void barrier_arrive(u32 barrier) { barrier_expect(barrier, 0); }

static void start_copy(u32 target, u32 bytes, u32 barrier, std::function<void()> write) {
    memset(shared_memory + target, 0xff, bytes);  // NaN
    copies.push_back({barrier, (int)bytes, write});
}
static void barrier_wait(u32 barrier, u32 parity) {
    while ((barriers_by_address[barrier].phase & 1) == parity) {
        if (!copies.empty() && dice() % 8 == 0) {
            std::swap(copies[dice() % copies.size()], copies.back());
            Copy c = copies.back();
            copies.pop_back();
            c.write();
            Barrier& b = barriers_by_address[c.barrier];
            b.pending -= c.bytes;
            settle(b);
        }
        if (++spins > 2000000000ull) abort();
        yield();
    }
}
// Where the copy engine puts what a line-by-line layout has at this address.
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static u64 evict_first() { return 0; }
static u64 evict_last() { return 0; }

// 16-bit numbers.

template <bool BFLOAT> static float widen(u32 bits) {
    if (BFLOAT) return __int_as_float(bits << 16);
    _Float16 h;
    unsigned short b = bits;
    memcpy(&h, &b, 2);
    return h;
}
template <bool BFLOAT> static u32 narrow(float f) {
    if (BFLOAT) {
        u32 u;
        memcpy(&u, &f, 4);
        return (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
    _Float16 h = f;
    unsigned short b;
    memcpy(&b, &h, 2);
    return b;
}
#ifdef HALF
static float to_float(u32 bits) { return widen<!HALF>(bits); }
static u32 to_pair(float low, float high) { return narrow<!HALF>(low) | narrow<!HALF>(high) << 16; }
#endif

static int count_arrival(int* arrivals) {
    need_previous();
    return (*arrivals)++;
}

static void begin(int seed) {
    dice.seed(seed);
    fault = nullptr;
    spins = 0;
}

static void launch(int grid, int threads, const std::function<void()>& kernel) {
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
        fibers.resize(threads);
        for (Fiber& f : fibers) {
            f.done = f.waited = false;
            f.stack.resize(1 << 17);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, entry, 0);
        }
        bool waited = false;
        for (size_t done = 0; done < fibers.size();) {
            std::swap(order[dice() % order.size()], order[dice() % order.size()]);
            for (int i : order) {
                if (fibers[i].done) continue;
                current = i;
                threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].context);
                done += fibers[i].done;
                waited |= fibers[i].waited;
            }
        }
        if (!waited) fault = "a block did not wait: the next kernel may pass it";
        if (!copies.empty()) fault = "copies were asked for and never waited for";
        copies.clear();
    }
}
