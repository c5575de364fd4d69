// y[M, N] = x[M, K] w[N, K]^T for few rows M, on a share of the SMs (sm_90a).
//
// One block an SM, persistent. The iterations of all tiles (BLOCK_N rows of w, 128 bytes of each) are
// laid end to end and cut into equal runs, one a block (stream-K). A producer thread keeps a ring of
// STAGES tiles of w and x in flight through the bulk tensor copy engine; one or two warpgroups
// multiply them. A tile that is shared by several blocks is summed by the last of them to arrive, in
// the order of K: the result does not depend on who that is. No block ever waits for another, so the
// grid need not be resident as a whole.
//
// The kernel may start before the one in front of it has ended (programmatic dependent launch): it
// reads w at once, and x and everything else when that one is complete.
//
// Grouped by expert, w holds the rows of all experts one behind the other, and x and y have the rows
// that go to an expert next to one another. The list of groups (an expert and up to ROWS rows) is
// read on the device; its tiles are laid end to end as those of one product are. With SPREAD, x has
// the rows of a batch in their order, and a group has a mask of those that go to its expert.
//
// The compiler is given BLOCK_N, ROWS (M rounded up), STAGES, SWAP (w on the 64-row side of the
// product, for small batches), GATED (w = gate and up rows, y = silu(gate) * up), WIDE (y is float32,
// without bias or residual), FP8 (x and w are e4m3, each row of both with a scale), INT4 (w has four
// bits, with a scale and a zero point for so many columns; 0: it does not), HALF (y, and without FP8 x
// and w, are fp16, not bf16), GROUPED (with SWAP), SPREAD (with GROUPED), and `multiply` (one wgmma).
//
// Numbers of four bits lie as the registers of a wgmma want them, so that a thread reads 16 bytes of
// a row of w and has 32 of its numbers. It makes bf16 of them, which the product takes from registers;
// with SWAP, without WIDE, FP8, HALF and GROUPED.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char bytes[128];
};

constexpr int LINE = 128;                               // bytes of a swizzled row
constexpr int BLOCK_K = FP8 || INT4 ? LINE : LINE / 2;  // elements of a row of a tile
constexpr int W_LINE = INT4 ? BLOCK_K / 2 : LINE;       // bytes of a row of w in it
constexpr int W_BYTES = BLOCK_N * W_LINE;
constexpr int X_LINES = INT4 ? 2 : 1;
constexpr int X_BYTES = X_LINES * ROWS * LINE;
constexpr int GROUPS = INT4 ? BLOCK_K / INT4 : 0;    // scales of a row of w in a tile
constexpr int SCALE_BYTES = 4 * GROUPS * BLOCK_N;
constexpr int OUT_N = GATED ? BLOCK_N / 2 : BLOCK_N;  // columns of y in a tile

// Two warpgroups share a tile by rows of x where these are on the 64-row side and more, by rows of w
// in a wide tile.
constexpr int ROW_GROUPS = !SWAP && ROWS > 64 ? 2 : 1;
constexpr int COLUMN_GROUPS = BLOCK_N == 256 || INT4 ? 2 : 1;
constexpr int CONSUMERS = ROW_GROUPS * COLUMN_GROUPS * 128;
constexpr int GROUP_N = BLOCK_N / COLUMN_GROUPS;
constexpr int GROUP_OUT = OUT_N / COLUMN_GROUPS;
constexpr int PARTS = SWAP ? GROUP_N / 64 : 1;  // products that one warpgroup does per 32 bytes of K
constexpr int WIDTH = SWAP ? ROWS : GROUP_N;    // their N
constexpr int ACC = WIDTH / 2;                  // accumulators a thread, of one product
constexpr int BOX = GATED ? GROUP_OUT : BLOCK_N;  // neighbouring rows of w in a tile

struct Shape {
    int m, n;              // n: columns of y
    int iterations, tiles; // of K in one tile; tiles of y, or of one group
    int out_stride;
    int residual;
};

struct Arguments {
    TensorMap w, x, w_groups;  // the last, with INT4: a scale and 128 plus a zero point, as bf16
    unsigned short* out;
    const unsigned short* bias;
    const float *x_scales, *w_scales;  // of each row, with FP8
    float4* scratch;
    int* arrivals;
    Shape shape;
    const int* groups;  // their number, three other numbers, then expert, first row, rows, mask of each
    const char* following;  // the weights that the kernel behind reads, of all experts, or null
    int following_bytes;    // of one expert
    int groups_known;       // before the kernel in front has ended
};

// Where a tile lies: rows of w and of y from here on, the first column of y in its expert's w, and,
// with SPREAD, which rows of x it has.
struct Tile {
    int w_row, first, rows, column;
    u32 mask;
};

#ifndef ON_HOST  // tests run the rest with these instructions acted out by threads of the CPU
// An address that the compiler keeps, not computes again in every loop.
__device__ __forceinline__ u32 shared_address(const void* p) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(p));
    asm volatile("" : "+r"(address));
    return address;
}

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ char memory[];
    return memory;
}

__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void load_tile(u32 target, const TensorMap* map, int k, int row,
                                          u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target), "l"(map), "r"(barrier),
        "r"(k), "r"(row), "l"(policy) : "memory");
}

__device__ __forceinline__ u64 evict_last() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void prefetch(const char* p, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

__device__ __forceinline__ void multiply_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void multiply_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Tells the compiler that a wgmma may change this register now.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ __forceinline__ u32 shared_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ void shared_words(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address) : "memory");
}

// bf16 of 128 plus a number of four bits has the number as its lowest bits.
__device__ __forceinline__ u32 above_128(u32 word) {
    u32 pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;"  // a & b | c
        : "=r"(pair) : "r"(word), "r"(0x000F000F), "r"(0x43004300));
    return pair;
}

// Of two pairs of bf16: differences, products.
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 pair;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ u32 scaled(u32 a, u32 b) {
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}
#endif

// The lower half of the descriptor of a K-major operand with 128-byte swizzle. The upper half is
// constant: 8 rows every 1024 bytes.
__device__ __forceinline__ u32 descriptor(u32 address) {
    return (1 << 16) | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ float silu(float value) { return value / (1.0f + __expf(-value)); }

__device__ __forceinline__ int groups_of(const Arguments& arguments) {
#if GROUPED
    return *static_cast<const volatile int*>(arguments.groups);
#else
    return 1;
#endif
}

__device__ __forceinline__ Tile tile_of(const Arguments& arguments, int tile) {
    const Shape& shape = arguments.shape;
#if GROUPED
    const int* group = arguments.groups + 4 + tile / shape.tiles * 4;
    const int column = tile % shape.tiles * OUT_N;
    return {group[0] * shape.n * (GATED ? 2 : 1) + column, group[1], group[2], column, u32(group[3])};
#else
    return {tile * OUT_N, 0, shape.m, tile * OUT_N, 0};
#endif
}

// The first iteration of block b, and the block whose run holds an iteration.
__device__ __forceinline__ int run_start(u32 block, u32 blocks, u32 total) {
    return block * total / blocks;
}

__device__ __forceinline__ int block_of(u32 iteration, u32 blocks, u32 total) {
    return ((iteration + 1) * blocks - 1) / total;
}

// Where a thread writes COUNT neighbouring columns of y.
#if WIDE
template <int COUNT>
struct Place {
    float* at;  // null outside y

    Place() = default;

    __device__ __forceinline__ Place(unsigned short* out, const Shape& shape, int row, int column) {
        const bool inside = row < shape.m && column < shape.n;
        at = reinterpret_cast<float*>(out) + u64(row) * shape.out_stride + column;
        if (!inside) at = nullptr;
    }

    __device__ __forceinline__ void write(const unsigned short*, int, const float (&value)[COUNT]) {
        if (!at) return;
        if constexpr (COUNT == 4)
            *reinterpret_cast<float4*>(at) = make_float4(value[0], value[1], value[2], value[3]);
        else
            *reinterpret_cast<float2*>(at) = make_float2(value[0], value[1]);
    }
};
#else
template <int COUNT>
struct Place {
    u32* at;  // null outside y
    u32 old[COUNT / 2];

    Place() = default;

    __device__ __forceinline__ Place(unsigned short* out, const Shape& shape, int row, int column) {
        const bool inside = row < shape.m && column < shape.n;
        at = inside ? reinterpret_cast<u32*>(out + u64(row) * shape.out_stride + column) : nullptr;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) old[i] = 0;
        if (!inside || !shape.residual) return;
        if constexpr (COUNT == 4) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            old[0] = v.x, old[1] = v.y;
        } else {
            old[0] = *at;
        }
    }

    __device__ __forceinline__ void write(const unsigned short* bias, int column,
                                          const float (&value)[COUNT]) {
        if (!at) return;
        u32 pairs[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            float a = value[2 * i] + to_float(old[i] & 0xFFFF);
            float b = value[2 * i + 1] + to_float(old[i] >> 16);
            if (bias) {
                const u32 add = *reinterpret_cast<const u32*>(bias + column + 2 * i);
                a += to_float(add & 0xFFFF);
                b += to_float(add >> 16);
            }
            pairs[i] = to_pair(a, b);
        }
        if constexpr (COUNT == 4)
            *reinterpret_cast<uint2*>(at) = make_uint2(pairs[0], pairs[1]);
        else
            *at = pairs[0];
    }
};
#endif

__device__ __forceinline__ int column_group() { return COLUMN_GROUPS > 1 ? threadIdx.x / 128 : 0; }

__device__ __forceinline__ int row_group() { return ROW_GROUPS > 1 ? threadIdx.x / 128 : 0; }

__device__ __forceinline__ float result(const float (&acc)[PARTS][ACC], int part, int i) {
#if GATED && SWAP
    return silu(acc[part][i]) * acc[part + PARTS / 2][i];
#elif GATED
    return silu(acc[0][i]) * acc[0][i + ACC / 2];
#else
    return acc[part][i];
#endif
}

#if SWAP
// The row of y, among those of its tile, that a row of x goes to; one outside if there is none.
__device__ __forceinline__ int row_of_y(const Shape& shape, const Tile& place, int row) {
    if (!SPREAD) return row;
    return place.mask >> row & 1 ? __popc(place.mask & ((1u << row) - 1)) : shape.m;
}

// Rows of the product are columns of y: lanes 4 apart hold neighbours. Each trades with one of them,
// so that it has pairs to write.
__device__ __forceinline__ void write_tile(const float (&acc)[PARTS][ACC], unsigned short* out,
                                           const unsigned short* bias, const Shape& shape,
                                           const Tile& place) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int base = place.column + column_group() * GROUP_OUT;
    const bool odd = (lane / 4) % 2;
    const int row = (lane % 4) * 2 + odd;
#pragma unroll
    for (int p = 0; p < GROUP_OUT / 64; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // columns of y 8 apart
            const int column = base + p * 64 + warp * 16 + 8 * h + (lane / 4) - odd;
            Place<2> places[ACC / 4];
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j)
                places[j] = Place<2>(out, shape, row_of_y(shape, place, 8 * j + row), column);
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j) {
                const float a = result(acc, p, 4 * j + 2 * h), b = result(acc, p, 4 * j + 2 * h + 1);
                const float other = __shfl_xor_sync(0xFFFFFFFF, odd ? a : b, 4);
                const float pair[2] = {odd ? other : a, odd ? b : other};
                places[j].write(bias, column, pair);
            }
        }
}
#else
// Each lane holds two columns in every eight; neighbours trade, one takes four of the even eights,
// the other of the odd ones.
__device__ __forceinline__ void write_tile(const float (&acc)[PARTS][ACC], unsigned short* out,
                                           const unsigned short* bias, const Shape& shape,
                                           const Tile& place) {
    constexpr int BATCH = GROUP_OUT < 64 ? GROUP_OUT / 16 : 4;  // reads of the residual in flight
    const int lane = threadIdx.x % 32;
    const bool odd = lane % 2;
    const int column = place.column + column_group() * GROUP_OUT + (odd ? 8 : 0) + (lane % 4 / 2) * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = row_group() * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
        for (int start = 0; start < GROUP_OUT / 16; start += BATCH) {
            Place<4> places[BATCH];
#pragma unroll
            for (int q = 0; q < BATCH; ++q)
                places[q] = Place<4>(out, shape, row, column + 16 * (start + q));
#pragma unroll
            for (int q = 0; q < BATCH; ++q) {
                const int even = 8 * (start + q) + 2 * h;
                const float a = result(acc, 0, even), b = result(acc, 0, even + 1);
                const float c = result(acc, 0, even + 4), d = result(acc, 0, even + 5);
                const float e = __shfl_xor_sync(0xFFFFFFFF, odd ? a : c, 1);
                const float f = __shfl_xor_sync(0xFFFFFFFF, odd ? b : d, 1);
                const float four[4] = {odd ? e : a, odd ? f : b, odd ? c : e, odd ? d : f};
                places[q].write(bias, column + 16 * (start + q), four);
            }
        }
    }
}
#endif

#if FP8
// Multiplies the sums of a tile with the scales of their rows of x and of w.
__device__ __forceinline__ void scale_tile(float (&acc)[PARTS][ACC], const Arguments& a,
                                           const Tile& place) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const float* x_scales = SPREAD ? a.x_scales : a.x_scales + place.first;
    const int x_rows = SPREAD ? a.shape.m : place.rows;
    const float* w_scales = a.w_scales + place.w_row - place.column;
    // The row of w of a row of this warpgroup's part of the tile: gates come before ups.
    auto w_row = [&](int row) {
        const bool up = GATED && row >= GROUP_OUT;
        const int column = place.column + column_group() * GROUP_OUT + (up ? row - GROUP_OUT : row);
        return min(column, a.shape.n - 1) + (up ? a.shape.n : 0);
    };
    auto x_scale = [&](int row) { return __ldcg(x_scales + min(row, x_rows - 1)); };
    auto w_scale = [&](int row) { return __ldcg(w_scales + w_row(row)); };
#if SWAP
#pragma unroll
    for (int j = 0; j < ACC / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float factor = x_scale(8 * j + lane % 4 * 2 + i);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                acc[p][4 * j + i] *= factor;
                acc[p][4 * j + 2 + i] *= factor;
            }
        }
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float factor = w_scale(p * 64 + warp * 16 + 8 * h + lane / 4);
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j) {
                acc[p][4 * j + 2 * h] *= factor;
                acc[p][4 * j + 2 * h + 1] *= factor;
            }
        }
#else
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
        factors[h] = x_scale(row_group() * 64 + warp * 16 + lane / 4 + 8 * h);
#pragma unroll
    for (int j = 0; j < ACC / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float factor = w_scale(8 * j + lane % 4 * 2 + i);
#pragma unroll
            for (int h = 0; h < 2; ++h) acc[0][4 * j + 2 * h + i] *= factors[h] * factor;
        }
#endif
}
#endif

// Whether any accumulator of this warp is a row below m.
__device__ __forceinline__ bool warp_matters(const Shape& shape) {
    return SWAP || row_group() * 64 + int(threadIdx.x % 128 / 32) * 16 < shape.m;
}

__device__ __forceinline__ float4* slot_of(float4* scratch, int block, int second) {
    return scratch + (u64(block) * 2 + second) * (PARTS * ACC / 4) * CONSUMERS + threadIdx.x;
}

// Leaves this block's share of a tile in scratch; true for the last block to do so, with the sum in
// `acc`.
__device__ __forceinline__ bool combine(float (&acc)[PARTS][ACC], float4* scratch, int* arrivals,
                                        const Shape& shape, int tile, u32 blocks, u32 total,
                                        int* flag) {
    const int begin = tile * shape.iterations;
    const int first = block_of(begin, blocks, total);
    const int last = block_of(begin + shape.iterations - 1, blocks, total);
    auto slot = [&](int block) {
        const int start = run_start(block, blocks, total);
        return slot_of(scratch, block, start / shape.iterations != tile);
    };
    if (warp_matters(shape)) {
        float4* mine = slot(blockIdx.x);
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j)
                __stcg(mine + (p * (ACC / 4) + j) * CONSUMERS,
                       make_float4(acc[p][4 * j], acc[p][4 * j + 1], acc[p][4 * j + 2],
                                   acc[p][4 * j + 3]));
    }
    consumers_sync();
    if (threadIdx.x == 0) {
        const int before = count_arrival(arrivals + tile);
        if (before == last - first) arrivals[tile] = 0;  // for the next launch
        *flag = before == last - first;
    }
    consumers_sync();
    if (!*reinterpret_cast<volatile int*>(flag)) return false;
    if (!warp_matters(shape)) return true;
    auto add = [&](int block) {
        const float4* theirs = slot(block);
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j) {
                const float4 v = __ldcg(theirs + (p * (ACC / 4) + j) * CONSUMERS);
                acc[p][4 * j] += v.x;
                acc[p][4 * j + 1] += v.y;
                acc[p][4 * j + 2] += v.z;
                acc[p][4 * j + 3] += v.w;
            }
    };
    if (last == first + 1) {  // a sum of two is the same in either order
        add(first + last - blockIdx.x);
        return true;
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int j = 0; j < ACC; ++j) acc[p][j] = 0.0f;
    for (int block = first; block <= last; ++block) add(block);
    return true;
}

__device__ __forceinline__ void produce(const Arguments& arguments, u32 ring_w, u32 ring_x, u32 full,
                                        u32 empty, int start, int end) {
    const TensorMap *w = &arguments.w, *x = &arguments.x;
    const Shape& shape = arguments.shape;
    const u64 once = evict_first(), kept = evict_last();
    // Iterations are counted, not divided: the loop must not take longer than its loads.
    struct Cursor {
        int tile, k;
        Tile place;
    };
    const int deep = shape.iterations * BLOCK_K;
    auto advance = [&](Cursor& at) {
        if ((at.k += BLOCK_K) < deep) return;
        at.k = 0;
#if GROUPED
        ++at.tile;
        if (at.tile * shape.iterations < end) at.place = tile_of(arguments, at.tile);
#else
        at.place.w_row += OUT_N;
#endif
    };
    auto load_w = [&](const Cursor& at, int s) {
        const u32 barrier = full + 8 * s, target = ring_w + s * W_BYTES;
        barrier_expect(barrier, W_BYTES + X_BYTES + SCALE_BYTES);
#if INT4
        const u32 scales = ring_w + STAGES * W_BYTES + s * SCALE_BYTES;
#pragma unroll
        for (int box = 0; box < BLOCK_N / BOX; ++box) {
            const int first = GATED ? box % 2 * shape.n + box / 2 * BOX : 0;
            const int row = at.place.w_row + first;
            load_tile(target + box * BOX * W_LINE, w, at.k / 2, row, barrier, once);
            load_tile(scales + box * BOX * GROUPS * 4, &arguments.w_groups, row, at.k / INT4, barrier,
                      once);
        }
#elif GATED
#pragma unroll
        for (int g = 0; g < COLUMN_GROUPS; ++g)
#pragma unroll
            for (int up = 0; up < 2; ++up)
                load_tile(target + (2 * g + up) * GROUP_OUT * LINE, w, at.k,
                          up * shape.n + at.place.w_row + g * GROUP_OUT, barrier, once);
#else
        load_tile(target, w, at.k, at.place.w_row, barrier, once);
#endif
    };
    auto load_x = [&](const Cursor& at, int s) {
#pragma unroll
        for (int line = 0; line < X_LINES; ++line)
            load_tile(ring_x + s * X_BYTES + line * ROWS * LINE, x, at.k + line * 64,
                      SPREAD ? 0 : at.place.first, full + 8 * s, kept);
    };
    const int tile = start / shape.iterations;
    const Cursor begin = {tile, start % shape.iterations * BLOCK_K, tile_of(arguments, tile)};
    const int ahead = min(end - start, STAGES);
    // The weights do not depend on the kernel before this one; x does.
    Cursor at = begin;
    for (int i = 0; i < ahead; ++i, advance(at)) load_w(at, i);
    wait_for_previous();
    at = begin;
    for (int i = 0; i < ahead; ++i, advance(at)) load_x(at, i);
    int s = 0;
    u32 parity = 0;
    for (int i = start + ahead; i < end; ++i, advance(at)) {
        barrier_wait(empty + 8 * s, parity);
        load_w(at, s);
        load_x(at, s);
        if (++s == STAGES) s = 0, parity ^= 1;
    }
}

#if GROUPED
// Brings the first bytes that this block reads in the next kernel into the cache, while the last
// tiles of this one are summed and that one starts.
__device__ __forceinline__ void prefetch_following(const Arguments& arguments, u32 blocks) {
    constexpr u64 MOST = 192 << 10, PART = 16 << 10;
    const u64 each = arguments.following_bytes, total = groups_of(arguments) * each;
    u64 at = total * blockIdx.x / blocks & ~u64(127);
    u64 end = blockIdx.x + 1 < blocks ? total * (blockIdx.x + 1) / blocks & ~u64(127) : total;
    if (end > at + MOST) end = at + MOST;
    while (at < end) {
        const u64 group = at / each, offset = at - group * each;
        u64 bytes = end - at < PART ? end - at : PART;
        if (each - offset < bytes) bytes = each - offset;
        prefetch(arguments.following + arguments.groups[4 + 4 * group] * each + offset, int(bytes));
        at += bytes;
    }
}
#endif

#if INT4
// What a thread has of a tile of w.
struct Words {
    u32 numbers[PARTS][2][4];  // of rows 8 apart, each word of 32 columns of K
    u32 scales[PARTS][2][GROUPS];

    __device__ __forceinline__ void read(u32 tile_w, u32 tile_scales, int row) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int place = row + p * 64 + h * 8, first = place / BOX * GROUPS;
                shared_words(numbers[p][h], tile_w + place * W_LINE + threadIdx.x % 4 * 16);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    scales[p][h][g] =
                        shared_word(tile_scales + 4 * ((first + g) * BOX + place % BOX));
            }
    }

    // The fragments of two products, of 16 columns each, from word j.
    __device__ __forceinline__ void widen(u32 (&out)[PARTS][2][4], int j) const {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 both = scales[p][h][j * 32 / INT4];
                const u32 scale = both << 16 | (both & 0xFFFF), zero = both >> 16 | (both & 0xFFFF0000);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    out[p][i / 2][i % 2 * 2 + h] =
                        scaled(subtract(above_128(numbers[p][h][j] >> (4 * i)), zero), scale);
            }
    }
};
#endif

__device__ __forceinline__ void consume(const Arguments& a, u32 ring_w, u32 ring_x, u32 full,
                                        u32 empty, int start, int end, u32 blocks, u32 total,
                                        int* flag) {
    const Shape& shape = a.shape;
    const bool speaks = threadIdx.x % 32 == 0;
#if INT4
    const int row = column_group() * GROUP_N + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    u32 fragments[2][PARTS][2][4];
#else
    const u32 base_w = descriptor(ring_w + column_group() * GROUP_N * LINE);
#endif
    const u32 base_x = descriptor(ring_x + row_group() * 8192);
    float acc[PARTS][ACC];
    auto pin_all = [&] {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int j = 0; j < ACC; ++j) pin(acc[p][j]);
    };
    int s = 0, previous = 0;
    u32 parity = 0;
    for (int i = start; i < end;) {
        const int tile = i / shape.iterations, begin = tile * shape.iterations;
        const int stop = min(end, begin + shape.iterations), from = i;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int j = 0; j < ACC; ++j) acc[p][j] = 0.0f;
        for (; i < stop; ++i) {
            barrier_wait(full + 8 * s, parity);
            const u32 dx = base_x + s * (X_BYTES >> 4);
#if INT4
            Words words;
            words.read(ring_w + s * W_BYTES, ring_w + STAGES * W_BYTES + s * SCALE_BYTES, row);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words.widen(fragments[j % 2], j);
                pin_all();
                multiply_begin();
#pragma unroll
                for (int kk = 0; kk < 2; ++kk)
#pragma unroll
                    for (int p = 0; p < PARTS; ++p)
                        multiply(acc[p], fragments[j % 2][p][kk],
                                 dx + j / 2 * (ROWS * LINE >> 4) + (j % 2 * 2 + kk) * 2);
                multiply_commit();
                pin_all();
                multiply_wait<1>();  // the other fragments may change
                if (j == 0 && i > from && speaks) barrier_arrive(empty + 8 * previous);
            }
#else
            const u32 dw = base_w + s * (W_BYTES >> 4);
            pin_all();
            multiply_begin();
#pragma unroll
            for (int kk = 0; kk < LINE / 32; ++kk)
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
#if SWAP
                    multiply(acc[p], dw + p * (8192 >> 4) + kk * 2, dx + kk * 2);
#else
                    multiply(acc[p], dx + kk * 2, dw + kk * 2);
#endif
                }
            multiply_commit();
            pin_all();
            multiply_wait<1>();
            if (i > from && speaks) barrier_arrive(empty + 8 * previous);
#endif
            previous = s;
            if (++s == STAGES) s = 0, parity ^= 1;
        }
        multiply_wait<0>();
        pin_all();
        if (speaks) barrier_arrive(empty + 8 * previous);
        const bool whole = from == begin && stop == begin + shape.iterations;
        if (whole || combine(acc, a.scratch, a.arrivals, shape, tile, blocks, total, flag)) {
            const Tile place = tile_of(a, tile);
            Shape rows = shape;
            rows.m = place.rows;
            if (warp_matters(shape)) {
#if FP8
                scale_tile(acc, a, place);
#endif
                write_tile(acc, a.out + u64(place.first) * shape.out_stride, a.bias, rows, place);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    skinny_gemm(const __grid_constant__ Arguments arguments) {
    const Shape& shape = arguments.shape;
    // Barriers and the flag, then x before w: with fewer than 64 rows the product reads past the rows
    // of x, into what follows, and the rows that this makes are never used.
    char* memory = dynamic_shared();
    memory += -shared_address(memory) & 1023;
    int* flag = reinterpret_cast<int*>(memory + 16 * STAGES);
    const u32 full = shared_address(memory), empty = full + 8 * STAGES;
    const u32 ring_x = full + 1024, ring_w = ring_x + STAGES * X_BYTES;
    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32);
        }
        barriers_ready();
    }
    __syncthreads();
#if GROUPED
    if (!arguments.groups_known) wait_for_previous();  // which made the list
    let_next_start();  // the next one knows the list
    const u32 tiles = groups_of(arguments) * shape.tiles, total = tiles * shape.iterations;
    // Whole tiles need not be summed; where these keep most SMs busy, that is the faster way.
    const u32 blocks = tiles <= gridDim.x && 3 * tiles >= 2 * gridDim.x ? tiles
                                                                        : min(gridDim.x, total);
#else
    let_next_start();
    const u32 total = shape.tiles * shape.iterations;
    const u32 blocks = min(gridDim.x, total);  // every run has an iteration
#endif
    if (blockIdx.x >= blocks) {
        wait_for_previous();
        return;
    }
    const int start = run_start(blockIdx.x, blocks, total);
    const int end = run_start(blockIdx.x + 1, blocks, total);
    if (threadIdx.x >= CONSUMERS) {
        if (elected()) {
            produce(arguments, ring_w, ring_x, full, empty, start, end);
#if GROUPED
            if (arguments.following) prefetch_following(arguments, blocks);
#endif
        }
    } else {
        wait_for_previous();
        consume(arguments, ring_w, ring_x, full, empty, start, end, blocks, total, flag);
    }
}
