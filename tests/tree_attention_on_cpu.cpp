// kernels/tree_attention/tree_attention.cu as a shared library that runs on the CPU.
#include "cuda_on_cpu.h"

static float number(unsigned word, int half) { return HALF ? on_cpu::f16_half(word, half) : on_cpu::bf16_half(word, half); }
static unsigned pack(float low, float high) {
    const auto round = HALF ? on_cpu::round_f16 : on_cpu::round_bf16;
    return round(low) | round(high) << 16;
}
static unsigned pack_half(float low, float high) { return on_cpu::round_f16(low) | on_cpu::round_f16(high) << 16; }
static float2 unpack_half(unsigned pair) { return {on_cpu::f16_half(pair, 0), on_cpu::f16_half(pair, 1)}; }
static unsigned shared_address(const void* pointer) {
    return unsigned(static_cast<const unsigned char*>(pointer) - on_cpu::shared_base());
}

// Rows 16 w to 16 w + 15 of a product are warp w's, of the group's four. Sums are exact, then rounded once.
static void unpack(float (&a)[16][16], const unsigned (&word)[4], int lane) {
    for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half)
            a[lane / 4 + i % 2 * 8][lane % 4 * 2 + half + i / 2 * 8] = number(word[i], half);
}
static void multiply_warp(unsigned (*in)[12], unsigned (*out)[4]) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const unsigned word[4] = {in[lane][0], in[lane][1], in[lane][2], in[lane][3]};
        unpack(a, word, lane);
        for (int i = 0; i < 4; ++i) b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = number(in[lane][4 + i / 2], i % 2);
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            double sum = on_cpu::as_float(in[lane][6 + i]);
            for (int k = 0; k < 16; ++k) sum += double(a[lane / 4 + i / 2 * 8][k]) * b[k][lane % 4 * 2 + i % 2];
            out[lane][i] = on_cpu::as_bits(float(sum));
        }
}

#if WGMMA
static bool shown[on_cpu::MOST_WARPS * 32];  // whether a thread's copies since the last one are fenced
static void show_copies() { shown[on_cpu::running] = true; }

// An element of a 128-byte swizzled operand, as the PTX manual has its canonical layouts: keys are rows of 64 numbers of
// depth, in groups of eight `stride` apart; values are depth in rows of 64 columns, groups of eight rows `stride` apart
// and 64 columns `leading` apart. The hardware swizzles the address.
static float element(uint64_t operand, bool values, int column, int depth) {
    const unsigned start = (operand & 0x3fff) << 4, leading = (operand >> 16 & 0x3fff) << 4;
    const unsigned stride = (operand >> 32 & 0x3fff) << 4;
    if (operand >> 62 != 1 || operand >> 46 & 0xffff) on_cpu::fail("not an operand of 128-byte swizzled rows");
    unsigned at = values ? start + column / 64 * leading + column % 64 * 2 + depth / 8 * stride + depth % 8 * 128
                         : start + column / 8 * stride + column % 8 * 128 + depth * 2;
    at ^= (at >> 7 & 7) << 4;
    uint16_t bits;
    memcpy(&bits, on_cpu::shared_base() + at, 2);
    return number(bits, 0);
}
// SHARED_ROWS: the first two words are the operand of 64 rows, too.
template <int COLUMNS, bool VALUES, bool SHARED_ROWS>
static void multiply_group(unsigned (*in)[12], unsigned (*)[4]) {
    static float a[16][16], b[16][COLUMNS];
    const uint64_t operand = in[0][4] | uint64_t(in[0][5]) << 32;
    for (int lane = 0; lane < 32; ++lane) {
        const unsigned word[4] = {in[lane][0], in[lane][1], in[lane][2], in[lane][3]};
        if (!SHARED_ROWS) unpack(a, word, lane);
        if (in[lane][4] != in[0][4] || in[lane][5] != in[0][5]) on_cpu::fail("lanes give different operands");
    }
    if (SHARED_ROWS)
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k)
                a[row][k] = element(in[0][0] | uint64_t(in[0][1]) << 32, false, on_cpu::running / 32 % 4 * 16 + row, k);
    for (int k = 0; k < 16; ++k)
        for (int column = 0; column < COLUMNS; ++column) b[k][column] = element(operand, VALUES, column, k);
    for (int lane = 0; lane < 32; ++lane) {
        float(*c)[4] = static_cast<float(*)[4]>(on_cpu::pointer(in[lane][6], in[lane][7]));
        for (int n = 0; n < COLUMNS / 8; ++n)
            for (int i = 0; i < 4; ++i) {
                double sum = in[lane][8] ? c[n][i] : 0.0f;
                for (int k = 0; k < 16; ++k)
                    sum += double(a[lane / 4 + i / 2 * 8][k]) * b[k][n * 8 + lane % 4 * 2 + i % 2];
                c[n][i] = float(sum);
            }
    }
}
template <int N>
static void multiply_by_group(float (&c)[N][4], const unsigned (&a)[4], uint64_t operand, bool add) {
    if (!shown[on_cpu::running]) on_cpu::fail("copies are not shown to wgmma");
    const uint64_t sums = reinterpret_cast<uint64_t>(c);
    on_cpu::meet(multiply_group<N * 8, N == 16, false>, {a[0], a[1], a[2], a[3], unsigned(operand), unsigned(operand >> 32),
                                                  unsigned(sums), unsigned(sums >> 32), unsigned(add)});
}
template <int N>
static void multiply_keys_16(float (&c)[N][4], const unsigned (&a)[4], uint64_t keys, bool add) {
    multiply_by_group(c, a, keys, add);
}
template <int N>
static void multiply_keys_16(float (&c)[N][4], uint64_t queries, uint64_t keys, bool add) {
    if (!shown[on_cpu::running]) on_cpu::fail("copies are not shown to wgmma");
    const uint64_t sums = reinterpret_cast<uint64_t>(c);
    on_cpu::meet(multiply_group<N * 8, false, true>,
                 {unsigned(queries), unsigned(queries >> 32), 0, 0, unsigned(keys), unsigned(keys >> 32), unsigned(sums),
                  unsigned(sums >> 32), unsigned(add)});
}
static void multiply_values_16(float (&c)[16][4], const unsigned (&a)[4], uint64_t values) {
    multiply_by_group(c, a, values, true);
}
static void before_products() {}
static void commit_products() {}
template <int PENDING>
static void wait_for_products() {}
template <class T>
static void hold(T&) {}
// Copies that land here want to be shown again.
template <int PENDING>
static void wait_and_hide() {
    shown[on_cpu::running] = false;
    copy_async_wait<PENDING>();
}
#define copy_async_wait wait_and_hide
static void arrive_when_copied(unsigned long long* barrier) {  // copies land at once: the CPU shows none that is late
    copy_async_commit();
    copy_async_wait<0>();
    arrive_at(barrier);
}
static void wait_hidden(unsigned long long* barrier, unsigned odd) {
    shown[on_cpu::running] = false;
    wait_at(barrier, odd);
}
#define wait_at wait_hidden
template <int>
static void give_registers() {}
template <int>
static void take_registers() {}
#else
static void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_add(c, a, b0, b1, multiply_warp);
}
#endif
static unsigned long long readers[on_cpu::MOST_WARPS];  // a barrier of each block
static void readers_sync() {
    unsigned long long& barrier = readers[on_cpu::running / on_cpu::block_threads];
    if (!barrier) start_barrier(&barrier, 256);
    const unsigned odd = reinterpret_cast<const Barrier&>(barrier).completed & 1;
    arrive_at(&barrier);
    wait_at(&barrier, odd);
}
// Barriers of a block's two groups, each of all 256 threads: 128 wait, 128 come by.
static unsigned long long turns[on_cpu::MOST_WARPS][2];
static unsigned long long* turn_of(int group) {
    unsigned long long& barrier = turns[on_cpu::running / on_cpu::block_threads][group];
    if (!barrier) start_barrier(&barrier, 256);
    return &barrier;
}
static void wait_for_turn() {
    unsigned long long* own = turn_of(threadIdx.x / 128);
    const unsigned odd = reinterpret_cast<const Barrier*>(own)->completed & 1;
    arrive_at(own);
#if WGMMA
    const bool before = shown[on_cpu::running];
    wait_at(own, odd);
    shown[on_cpu::running] = before;
#endif
}
static void give_turn() { arrive_at(turn_of(1 - threadIdx.x / 128)); }
// Numbers of parts are seen late, after threads have looked again some times, though notes are stored behind them.
static std::vector<std::function<void()>> late;
static bool seen_late(const void* to);
template <class Words>
static void store_words(Words* to, Words words) {
    announce();
    if (seen_late(to))
        late.push_back([=] { *to = words; });
    else
        *to = words;
}
static void see_all() {
    for (const auto& store : late) store();
    late.clear();
}
static void see_and_look_again() {
    if (!late.empty()) announce();
    if (on_cpu::roll(200) == 0) see_all();
    look_again();
}
#define look_again see_and_look_again
static float unknown(float x) { return x; }
template <class Words>
static void load_words(Words& words, const Words* from) {
    words = *from;
}
static void copy_whole_16(void* to, const void* from) { copy_async_16(to, from, true); }
#define copy_async_16 copy_whole_16
#include "tree_attention.cu"

static const AttentionArguments* given;
static bool seen_late(const void* to) {
    return (static_cast<const char*>(to) - reinterpret_cast<const char*>(given->parts)) % sizeof(Part) < sizeof(Part::rows);
}

// first, tiles and rest of share_of.
extern "C" void share_on_cpu(int keys, int rank, int* out) {
    const Share share = share_of(keys, rank);
    out[0] = share.first, out[1] = share.tiles, out[2] = share.rest;
}

// order: of those that share their rows, by number, as they run one after another; each are SPLITS blocks together. warps: in
// which order theirs run (run_cluster).
extern "C" void tree_attention_on_cpu(const AttentionArguments* arguments, size_t shared_bytes, const int* grid,
                                      const int* order, const on_cpu::Range* readable, int ranges, int warps) {
    on_cpu::readable.assign(readable, readable + ranges);
    given = arguments;
    gridDim = {grid[0], grid[1], grid[2]};
    const int across = grid[0] / SPLITS;
    for (int i = 0; i < across * grid[1] * grid[2]; ++i) {
        blockIdx = {order[i] % across * SPLITS, order[i] / across % grid[1], order[i] / across / grid[1]};
        memset(turns, 0, sizeof turns);  // the last of a launch is not waited for
        on_cpu::run_cluster(SPLITS, THREADS + 32 * COPIERS, shared_bytes, warps, [&] { tree_attention(*arguments); });
        see_all();
    }
}
