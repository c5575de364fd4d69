// Runs rule_step.cu on the CPU; see cuda_host.h.

#include "cuda_host.h"

static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static u32 __ballot_sync(u32, bool v) {
    u32 bits = 0;
    auto all = exchange<int>(v);
    for (int i = 0; i < 32; ++i) bits |= (u32)all[i] << i;
    return bits;
}
static char* dynamic_shared() { return shared_memory; }
static void barriers_ready() {}
static void copy_state(u32 target, const float* source, u32 barrier);
static void keep_state(float4* to, const float4& v) {
    need_previous();
    *to = v;
}
static u32 load_number(u64 array, u64 index) {
    need_previous();
    return reinterpret_cast<const unsigned short*>(array)[index];
}

#include SOURCE

static void copy_state(u32 target, const float* source, u32 barrier) {
    if (target % 16 || (u64)source % 16) fault = "a copy out of place";
    start_copy(target, STATE_BYTES, barrier,
               [=] { memcpy(shared_memory + target, source, STATE_BYTES); });
}

extern "C" const char* run(const Arguments* a, int grid, int seed) {
    begin(seed);
    launch(grid, 32 * WARPS, [&] { rule_step(*a); });
    return fault;
}
