// Runs skinny_gemm.cu on the CPU; see cuda_host.h. Matrix instructions end when they are issued or
// when they are waited for, as the dice fall.

#include "cuda_host.h"

static char* dynamic_shared() { return shared_memory + 48; }
static bool elected() { return current % 32 == 0; }
static void barriers_ready() {}
static Meeting consumers_meeting;
static void consumers_sync();

// What a thread has issued and not waited for, by groups.
static std::map<int, std::vector<std::vector<std::function<void()>>>> issued;

constexpr int BYTES = FP8 ? 1 : 2;  // of an element

static float e4m3(unsigned char bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float value = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return bits >> 7 ? -value : value;
}
static float element(u32 descriptor, int row, int k) {
    u32 address = (descriptor & 0x3fff) << 4;
    unsigned short bits = 0;
    u32 place = swizzled(address + row / 8 * 1024 + row % 8 * 128 + BYTES * k);
    memcpy(&bits, shared_memory + place, BYTES);
    return FP8 ? e4m3(bits) : to_float(bits);
}
// d [64, 2 COUNT] += a b^T, of 32 bytes of 64 rows and of 2 COUNT rows, by a warpgroup.
template <int COUNT> static void multiply(float (&d)[COUNT], u32 a, u32 b) {
    int thread = current % 128;
    auto work = [&d, a, b, thread] {
        for (int i = 0; i < COUNT; ++i) {
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            for (int k = 0; k < 32 / BYTES; ++k) d[i] += element(a, row, k) * element(b, column, k);
        }
    };
    issued[current].back().push_back(work);
}
// The same with 16 columns of the 64 rows in registers: they are read when the product is done, not
// when it is issued. COUNT is named by whoever calls.
template <int COUNT> static void multiply(float (&d)[COUNT], const u32 (&a)[4], u32 b) {
    std::vector<const u32*> lanes = exchange(static_cast<const u32*>(a));
    int lane = current % 32;
    auto work = [&d, lanes, b, lane] {
        for (int i = 0; i < COUNT; ++i) {
            int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; ++k) {
                u32 pair = lanes[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
                d[i] += widen<true>(pair >> 16 * (k % 2) & 0xffff) * element(b, column, k);
            }
        }
    };
    issued[current].back().push_back(work);
}
static u32 shared_word(u32 address) {
    u32 word;
    memcpy(&word, shared_memory + address, 4);
    return word;
}
static void shared_words(u32 (&words)[4], u32 address) {
    if (address % 16) fault = "a read out of place";
    memcpy(words, shared_memory + address, 16);
}
template <class T> static u32 each_half(u32 a, u32 b, T operation) {
    u32 low = narrow<true>(operation(widen<true>(a & 0xffff), widen<true>(b & 0xffff)));
    return low | narrow<true>(operation(widen<true>(a >> 16), widen<true>(b >> 16))) << 16;
}
static u32 above_128(u32 word) { return word & 0x000F000F | 0x43004300; }
static u32 subtract(u32 a, u32 b) { return each_half(a, b, [](float x, float y) { return x - y; }); }
static u32 scaled(u32 a, u32 b) { return each_half(a, b, [](float x, float y) { return x * y; }); }
static void multiply_begin() { issued[current].emplace_back(); }
static void finish(std::vector<std::function<void()>>& group) {
    for (auto& work : group) work();
    group.clear();
}
static void multiply_commit() {
    auto& groups = issued[current];
    if (dice() % 2)
        for (auto& group : groups) finish(group);
}
template <int LEFT> static void multiply_wait() {
    auto& groups = issued[current];
    while (groups.size() > LEFT) {
        finish(groups.front());
        groups.erase(groups.begin());
    }
    __syncwarp();
}
static void pin(float&) {}
static std::vector<std::pair<const char*, int>> prefetched;
static void prefetch(const char* p, int bytes) {
    if (u64(p) % 16 || bytes % 16 || bytes <= 0) fault = "a prefetch out of place";
    prefetched.emplace_back(p, bytes);
}

struct TensorMap;
static void load_tile(u32 target, const TensorMap* map, int k, int row, u32 barrier, u64);

#include SOURCE

static void consumers_sync() { meet(consumers_meeting, CONSUMERS); }

struct Matrix {  // in the bytes of a map
    const char* at;
    u64 rows, columns, stride, box_rows, line, bytes;
};

static const char* x;

static void load_tile(u32 target, const TensorMap* map, int k, int row, u32 barrier, u64) {
    Matrix m;
    memcpy(&m, map->bytes, sizeof m);
    bool whole = m.line == LINE;
    if (target % (whole ? 1024 : 128)) fault = "a copy out of place";
    if (m.at == x) need_previous();
    start_copy(target, m.box_rows * m.line, barrier, [=] {
        for (u64 line = 0; line < m.box_rows; ++line)
            for (u64 i = 0; i < m.line / m.bytes; ++i) {
                bool inside = row + line < m.rows && k + i < m.columns;
                const char* from = m.at + ((row + line) * m.stride + k + i) * m.bytes;
                u32 place = target + line * m.line + m.bytes * i;
                char* to = shared_memory + (whole ? swizzled(place) : place);
                inside ? memcpy(to, from, m.bytes) : memset(to, 0, m.bytes);
            }
    });
}

// How many bytes of a run were asked to come into the cache, in disjoint parts within these.
extern "C" long brought(const char* from, const char* to) {
    std::sort(prefetched.begin(), prefetched.end());
    long sum = 0;
    for (auto [at, bytes] : prefetched) {
        if (at < from || at + bytes > to) return -1;
        from = at + bytes;
        sum += bytes;
    }
    return sum;
}

extern "C" const char* run(const Arguments* a, int grid, int seed) {
    begin(seed);
    prefetched.clear();
    Matrix m;
    memcpy(&m, a->x.bytes, sizeof m);
    x = m.at;
    launch(grid, CONSUMERS + 32, [&] { skinny_gemm(*a); });
    return fault;
}
