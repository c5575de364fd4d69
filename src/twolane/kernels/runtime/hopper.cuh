// Instructions of Hopper (sm_90a) that several kernels use. `nvrtc.with_hopper` puts this text in front
// of theirs.

#ifndef ON_HOST  // tests run kernels with these instructions acted out by threads of the CPU
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned count = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done = 0;
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

// True in one lane of the warp, and the compiler knows that it is one.
__device__ __forceinline__ bool elected() {
    unsigned one;
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xFFFFFFFF;\n"
        "selp.u32 %0, 1, 0, one;\n"
        "}" : "=r"(one));
    return one;
}

__device__ __forceinline__ unsigned long long evict_first() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// How many have arrived before, which have written all that is read behind it.
__device__ __forceinline__ int count_arrival(int* arrivals) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before) : "l"(arrivals) : "memory");
    return before;
}

// Numbers of 16 bits: float16 where HALF is set, bf16 elsewhere.
__device__ __forceinline__ float to_float(unsigned bits) {
#if HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
#else
    return __uint_as_float(bits << 16);
#endif
}

__device__ __forceinline__ unsigned to_pair(float low, float high) {
    unsigned pair;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
#endif

