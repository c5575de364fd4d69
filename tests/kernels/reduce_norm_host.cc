// Runs reduce_norm.cu on the CPU, where every thread of every block of every rank is a thread. Ranks
// launch it several times without waiting for each other, as streams do.

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sched.h>
#include <thread>
#include <vector>

#define ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __trap() abort()

typedef unsigned int u32;
typedef unsigned long long u64;
struct Index { u32 x; };
static thread_local Index threadIdx, blockIdx, gridDim;

class Meeting {
public:
    explicit Meeting(int members) : members_(members) {}
    void operator()() {
        const int generation = generation_;
        if (++arrived_ == members_) {
            arrived_ = 0;
            ++generation_;
        }
        while (generation_ == generation) sched_yield();
    }

private:
    const int members_;
    std::atomic<int> arrived_{0}, generation_{0};
};

struct Block {
    explicit Block(int threads) : all(threads), board(threads), sums(4096) {
        for (int i = 0; i < threads / 32; ++i) warps.push_back(new Meeting(32));
    }
    Meeting all;
    std::vector<Meeting*> warps;
    std::vector<float> board, sums;
};
static thread_local Block* block;

static void __syncthreads() { block->all(); }
static float __shfl_xor_sync(u32, float v, int mask) {
    Meeting& warp = *block->warps[threadIdx.x / 32];
    block->board[threadIdx.x] = v;
    warp();
    const float other = block->board[threadIdx.x ^ mask];
    warp();
    return other;
}
static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static float __uint_as_float(u32 i) { float f; memcpy(&f, &i, 4); return f; }
static u32 __float_as_uint(float f) { u32 i; memcpy(&i, &f, 4); return i; }
static u32 narrow(float f) {
    const u32 i = __float_as_uint(f);
    return (i + 0x7FFF + (i >> 16 & 1)) >> 16;
}
static u32 to_pair(float low, float high) { return narrow(low) | narrow(high) << 16; }
static u64 now() { return 0; }  // a slow machine is no fault
static void let_next_start() {}
static void wait_for_previous() {}
static float* shared_sums() { return block->sums.data(); }

static void dawdle() {  // in the midst of everything that another rank may rely on
    static thread_local std::mt19937 dice(std::random_device{}());
    if (dice() % 16 == 0) sched_yield();
}
struct Vector;
static Vector seen(const Vector* from);
static u32 swapped(u32* word, u32 old, u32 with) {
    dawdle();
    if (!__atomic_compare_exchange_n(word, &old, with, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        sched_yield();
    return old;
}
static u32 swapped_behind(u32* word, u32 old, u32 with) { return swapped(word, old, with); }
static u32 swapped_before(u32* word, u32 old, u32 with) { return swapped(word, old, with); }

#include SOURCE

static Vector seen(const Vector* from) {
    dawdle();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return *(const volatile Vector*)from, *from;
}

// Launches on all ranks; `inputs` is [launches, RANKS, rows, HIDDEN], `outs` alike, `residuals`
// [RANKS, rows, HIDDEN]. Each rank's partial sums are written right before its launch.
extern "C" const char* run(int launches, int rows, int blocks, float eps, const char* inputs,
                           char* residuals, const char* weight, char* outs) {
    const u64 size = (u64)rows * HIDDEN * (FLOAT ? 4 : 2);
    std::vector<std::vector<char>> partials(RANKS), flags(RANKS), results(RANKS);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < RANKS; ++rank) {
        partials[rank].assign(size + 16, 0);
        results[rank].assign(size + 16, 0);
        flags[rank].assign(4 * blocks * RANKS, 0);
    }
    auto aligned = [](std::vector<char>& v) { return ((u64)v.data() + 15) / 16 * 16; };
    for (int rank = 0; rank < RANKS; ++rank) {
        Arguments a;
        for (int i = 0; i < RANKS; ++i) {
            a.partial[i] = aligned(partials[i]);
            a.flags[i] = (u64)flags[i].data();
        }
        a.residual = (u64)residuals + rank * size;
        a.out = aligned(results[rank]);
        a.weight = (u64)weight;
        a.rows = rows, a.rank = rank, a.eps = eps;
        Meeting* grid = new Meeting(blocks * THREADS);
        for (int b = 0; b < blocks; ++b) {
            Block* own = new Block(THREADS);
            for (int t = 0; t < THREADS; ++t)
                threads.emplace_back([=] {
                    threadIdx.x = t, blockIdx.x = b, gridDim.x = blocks, block = own;
                    for (int i = 0; i < launches; ++i) {
                        const u64 place = (i * RANKS + rank) * size;
                        if (!b && !t) memcpy((void*)a.partial[rank], inputs + place, size);
                        (*grid)();
                        reduce_norm(a);
                        (*grid)();
                        if (!b && !t) memcpy(outs + place, (void*)a.out, size);
                    }
                });
        }
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& each : flags)
        for (char c : each)
            if (c) return "a flag is left";
    return "";
}
