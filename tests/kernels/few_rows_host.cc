// Runs few_rows.cu on the CPU; see cuda_host.h.

#include "cuda_host.h"

#define fmaxf std::fmax
#define fabsf std::fabs
static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static int __reduce_max_sync(u32, int v) {
    auto all = exchange(v);
    return *std::max_element(all.begin(), all.end());
}
static int __reduce_min_sync(u32, int v) {
    auto all = exchange(v);
    return *std::min_element(all.begin(), all.end());
}
static void atomicOr(u32* p, u32 bits) { *p |= bits; }

static float of_e4m3(u32 bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    return exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
}
static u32 e4m3(float value) {  // the nearest; of two the even one
    float size = std::fabs(value);
    u32 best = 0;
    for (u32 bits = 1; bits < 127; ++bits) {
        float there = std::fabs(of_e4m3(bits) - size), before = std::fabs(of_e4m3(best) - size);
        if (there < before || (there == before && bits % 2 == 0)) best = bits;
    }
    return best | (std::signbit(value) ? 128 : 0);
}
static u32 to_e4m3(float low, float high) { return e4m3(low) | e4m3(high) << 8; }

#include SOURCE

extern "C" const char* run(const Arguments* a, int grid, int seed) {
    begin(seed);
    launch(grid, THREADS, [&] { few_rows(*a); });
    return fault;
}
