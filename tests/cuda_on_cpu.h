// Runs a CUDA kernel on the CPU, block by block (or cluster by cluster): every thread is a fiber, warp-level
// instructions and barriers are meeting points. It checks that warps do not diverge at one and that shared memory is
// not overrun; shared memory starts as NaN, asynchronous copies land at the wait, the order of warps can be reversed or mixed to
// expose races, and matrix products are cut as tensor cores cut them.
#pragma once
#define GDN_TREE_ON_CPU
#define CUDA_ON_CPU

#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dimensions {
    int x, y, z;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static Dimensions threadIdx, blockIdx, gridDim;

namespace on_cpu {

constexpr size_t STACK = 128 << 10;
constexpr size_t CANARY = 4096;
enum Status { READY, AT_WARP, AT_BLOCK, AT_CLUSTER, AT_MEETING, SPINNING, DONE };
struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    bool valid;
};
using WarpOperation = void (*)(unsigned (*in)[12], unsigned (*out)[4]);
struct Fiber {
    jmp_buf at;
    ucontext_t start;
    Status status;
    WarpOperation operation;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};
static std::vector<Fiber> fibers;
struct Stacks {  // a page takes memory when it is written first
    char* memory = nullptr;
    size_t size = 0;
    void resize(size_t wanted) {
        if (wanted <= size) return;
        free(memory);
        memory = static_cast<char*>(malloc(size = wanted));
    }
};
static Stacks stacks;
static std::vector<unsigned char> shared;  // of each block of a cluster, shared_stride apart
static size_t shared_stride;
constexpr int MOST_WARPS = 512;  // of a cluster
static unsigned inputs[MOST_WARPS][32][12], outputs[MOST_WARPS][32][4];  // [warp][lane]
static jmp_buf scheduler;
static int running;
static long arrivals;  // at barriers that threads spin for
static long meetings;  // what blocks did for which others wait
static int block_threads, first_block;
static unsigned dice;
inline unsigned roll(unsigned sides) { return ((dice = dice * 1664525u + 1013904223u) >> 16) % sides; }
struct Range {
    const void* address;
    size_t bytes;
};
static std::vector<Range> readable;  // what asynchronous copies may read; anything if empty
static const std::function<void()>* body;

inline void fail(const char* what) {
    fprintf(stderr, "cuda_on_cpu: %s (block %d %d %d, thread %d)\n", what, blockIdx.x, blockIdx.y, blockIdx.z, running);
    abort();
}
inline void give_way(Status status) {
    Fiber& self = fibers[running];
    self.status = status;
    if (!_setjmp(self.at)) _longjmp(scheduler, 1);
}
inline void entry() {
    (*body)();
    fibers[running].status = DONE;
    _longjmp(scheduler, 1);
}
inline void resume(int thread) {
    running = thread;
    threadIdx = {thread % block_threads, 0, 0};
    blockIdx.x = first_block + thread / block_threads;
    Fiber& fiber = fibers[thread];
    if (_setjmp(scheduler)) return;
    if (fiber.operation == nullptr && fiber.status == READY && fiber.start.uc_stack.ss_sp) {
        fiber.start.uc_stack.ss_sp = nullptr;
        setcontext(&fiber.start);
    }
    _longjmp(fiber.at, 1);
}
inline unsigned* meet(WarpOperation operation, std::initializer_list<unsigned> in) {
    const int warp = running / 32, lane = running % 32;
    int i = 0;
    for (unsigned value : in) inputs[warp][lane][i++] = value;
    fibers[running].operation = operation;
    give_way(AT_WARP);
    return outputs[warp][lane];
}

// Of the running thread's block, or of another in its cluster.
inline unsigned char* shared_base(int block) {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(shared.data()) + 1023) / 1024 * 1024) +
           block * shared_stride;
}
inline unsigned char* shared_base() { return shared_base(running / block_threads); }

// Blocks blockIdx.x to blockIdx.x + blocks - 1 together; MOST_WARPS at most. order: 0: warps run in order, each until it
// waits; 1: backwards; more: a seed for warps of different speeds that also give way where they need not.
inline void run_cluster(int blocks, int block_size, size_t shared_bytes, int order, const std::function<void()>& kernel) {
    const int threads = blocks * block_size;
    const bool reversed = order == 1, restless = order > 1;
    dice = order * 2654435761u;
    unsigned laziness[MOST_WARPS];
    for (unsigned& lazy : laziness) lazy = roll(2) ? 15 : roll(12);
    if (threads > MOST_WARPS * 32) fail("too many threads for a cluster");
    block_threads = block_size;
    first_block = blockIdx.x;
    body = &kernel;
    shared_stride = (shared_bytes + CANARY + 1023) / 1024 * 1024;
    shared.assign(blocks * shared_stride + 1024, 0xff);
    fibers.resize(threads);
    stacks.resize(threads * STACK);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.status = READY;
        fiber.operation = nullptr;
        fiber.open.clear();
        fiber.groups.clear();
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks.memory + i * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, entry, 0);
    }
    const int warps = block_size / 32;
    // A block runs until it ends or waits for its cluster; the next block, then.
    const auto run_alone = [&](int block) {
        const auto in = [&](Status status) {
            return std::count_if(fibers.begin() + block * block_size, fibers.begin() + (block + 1) * block_size,
                                 [&](const Fiber& fiber) { return fiber.status == status; });
        };
        long before = -1;
        for (;;) {
            for (int i = 0; i < warps; ++i) {
                const int warp = block * warps + (reversed ? warps - 1 - i : i);
                if (restless && roll(16) < laziness[warp]) {
                    const auto spins = [](const Fiber& fiber) { return fiber.status == SPINNING; };
                    if (std::none_of(fibers.begin() + warp * 32, fibers.begin() + warp * 32 + 32, spins)) continue;
                }
                for (bool again = false;;) {
                    int at_warp = 0, spinning = 0;
                    for (int lane = 0; lane < 32; ++lane) {
                        const int thread = warp * 32 + (reversed ? 31 - lane : lane);
                        if (fibers[thread].status == READY || fibers[thread].status == SPINNING) resume(thread);
                        at_warp += fibers[thread].status == AT_WARP;
                        spinning += fibers[thread].status == SPINNING;
                    }
                    if (!at_warp) break;
                    // A lane that completes a barrier goes on at once; the others see it when they look again.
                    if (spinning && (again = !again)) continue;
                    running = warp * 32;
                    if (at_warp != 32) fail("lanes diverge at a warp instruction");
                    for (int lane = 1; lane < 32; ++lane)
                        if (fibers[warp * 32 + lane].operation != fibers[warp * 32].operation)
                            fail("lanes meet at different warp instructions");
                    if (fibers[warp * 32].operation) fibers[warp * 32].operation(inputs[warp], outputs[warp]);
                    for (int lane = 0; lane < 32; ++lane) fibers[warp * 32 + lane].status = READY;
                    if (restless && roll(4) == 0) break;
                }
            }
            if (in(READY)) continue;
            if (in(DONE) == block_size || in(AT_CLUSTER) == block_size) return in(DONE) == block_size;
            if (in(SPINNING) && arrivals == before && !in(AT_MEETING)) fail("threads wait for a barrier that nobody completes");
            if (in(SPINNING) && arrivals != before) {
                before = arrivals;
                continue;
            }
            if (in(AT_MEETING)) return false;
            if (in(AT_BLOCK) != block_size) fail("not every thread reaches the barrier");
            for (int i = 0; i < block_size; ++i) fibers[block * block_size + i].status = READY;
        }
    };
    for (long before = -1;;) {
        int done = 0;
        for (int i = 0; i < blocks; ++i) done += run_alone(reversed ? blocks - 1 - i : i);
        if (done == blocks) break;
        const bool meeting = std::any_of(fibers.begin(), fibers.begin() + threads,
                                         [](const Fiber& fiber) { return fiber.status == AT_MEETING; });
        if (done && !meeting) fail("not every block reaches the cluster's barrier");
        if (meeting && meetings == before) fail("blocks wait for one that does not come");
        before = meetings;
        for (Fiber& fiber : fibers)
            if (fiber.status == AT_CLUSTER || fiber.status == AT_MEETING) fiber.status = READY;
    }
    blockIdx.x = first_block;
    for (int block = 0; block < blocks; ++block)
        for (size_t i = 0; i < CANARY; ++i)
            if (shared_base(block)[shared_bytes + i] != 0xff) fail("shared memory is overrun");
}
inline void run_block(int threads, size_t shared_bytes, int order, const std::function<void()>& kernel) {
    run_cluster(1, threads, shared_bytes, order, kernel);
}

inline float as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline unsigned as_bits(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
inline unsigned round_bf16(float x) {
    const unsigned bits = as_bits(x);
    if (std::isnan(x)) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void* pointer(unsigned low, unsigned high) {
    return reinterpret_cast<void*>(uint64_t(low) | uint64_t(high) << 32);
}
inline float bf16_half(unsigned word, int half) { return as_float(half ? word & 0xffff0000u : word << 16); }
// To nearest even.
inline unsigned round_f16(float x) {
    const unsigned sign_of_all = std::signbit(x) ? 0x8000u : 0u;
    if (std::isnan(x)) return 0x7fff;
    if (std::fabs(x) >= 65520.0f) return sign_of_all | 0x7c00u;
    int exponent;
    std::frexp(x, &exponent);
    const int unit = x == 0.0f ? -24 : std::max(exponent, -13) - 11;  // the last place is worth 2^unit
    const unsigned magnitude = unsigned(std::nearbyint(std::ldexp(std::fabs(double(x)), -unit)));
    return (std::signbit(x) ? 0x8000u : 0u) | (magnitude + unsigned(unit + 24) * 1024u);
}
inline float f16_half(unsigned word, int half) {
    const unsigned bits = word >> half * 16 & 0xffff, exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                            : exponent == 0 ? std::ldexp(float(fraction), -24)
                                            : std::ldexp(float(1024 + fraction), int(exponent) - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

template <bool TRANSPOSED>
void load_matrices(unsigned (*in)[12], unsigned (*out)[4]) {
    for (int m = 0; m < 4; ++m) {
        uint16_t x[8][8];
        for (int row = 0; row < 8; ++row) {
            const void* from = pointer(in[m * 8 + row][0], in[m * 8 + row][1]);
            if (uint64_t(from) % 16) fail("a matrix row is not aligned to 16 bytes");
            memcpy(x[row], from, 16);
        }
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            out[lane][m] = TRANSPOSED ? x[column][row] | unsigned(x[column + 1][row]) << 16
                                      : x[row][column] | unsigned(x[row][column + 1]) << 16;
        }
    }
}
inline void transpose_matrix(unsigned (*in)[12], unsigned (*out)[4]) {
    uint16_t x[8][8];
    for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) x[lane / 4][lane % 4 * 2 + half] = in[lane][0] >> 16 * half;
    for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        out[lane][0] = x[column][row] | unsigned(x[column + 1][row]) << 16;
    }
}
// As tensor cores add: each term is cut to two bits below the last place of the greatest, and their sum to float32.
inline float cut_sum(const double (&terms)[17]) {
    double greatest = 0.0, sum = 0.0;
    for (double term : terms) greatest = std::fmax(greatest, std::fabs(term));
    int exponent;
    std::frexp(greatest, &exponent);
    const double unit = std::ldexp(1.0, exponent - 26);
    for (double term : terms) sum += greatest > 0.0 && std::isfinite(term) ? std::trunc(term / unit) * unit : term;
    const float rounded = float(sum);
    return std::fabs(double(rounded)) > std::fabs(sum) ? std::nextafterf(rounded, 0.0f) : rounded;
}
template <float (*NUMBER)(unsigned, int)>
void multiply(unsigned (*in)[12], unsigned (*out)[4]) {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, pair = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half) {
                a[row + (i & 1) * 8][2 * pair + half + (i >> 1) * 8] = NUMBER(in[lane][i], half);
                if (i < 2) b[2 * pair + half + i * 8][row] = NUMBER(in[lane][4 + i], half);
            }
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + (i >> 1) * 8, column = lane % 4 * 2 + (i & 1);
            double terms[17] = {as_float(in[lane][6 + i])};
            for (int k = 0; k < 16; ++k) terms[k + 1] = a[row][k] * b[k][column];
            out[lane][i] = as_bits(cut_sum(terms));
        }
}
inline void shuffle(unsigned (*in)[12], unsigned (*out)[4]) {
    for (int lane = 0; lane < 32; ++lane) out[lane][0] = in[in[lane][1]][0];
}
inline void ballot(unsigned (*in)[12], unsigned (*out)[4]) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (in[lane][0] ? 1u : 0u) << lane;
    for (int lane = 0; lane < 32; ++lane) out[lane][0] = bits;
}
inline void match(unsigned (*in)[12], unsigned (*out)[4]) {
    for (int lane = 0; lane < 32; ++lane) {
        out[lane][0] = 0;
        for (int other = 0; other < 32; ++other) out[lane][0] |= (in[other][0] == in[lane][0] ? 1u : 0u) << other;
    }
}
inline void greatest(unsigned (*in)[12], unsigned (*out)[4]) {
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane) most = in[lane][0] > most ? in[lane][0] : most;
    for (int lane = 0; lane < 32; ++lane) out[lane][0] = most;
}
inline void total(unsigned (*in)[12], unsigned (*out)[4]) {
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += in[lane][0];
    for (int lane = 0; lane < 32; ++lane) out[lane][0] = sum;
}

}  // namespace on_cpu

#define DYNAMIC_SHARED(name) unsigned char* name = on_cpu::shared_base()

// Barriers in shared memory (mbarrier): how often it was completed, who is still to arrive, and of how many.
struct Barrier {
    unsigned completed;
    uint16_t missing, all;
};
inline void start_barrier(unsigned long long* at, int threads) {
    *reinterpret_cast<Barrier*>(at) = {0, uint16_t(threads), uint16_t(threads)};
}
inline void arrive_at(unsigned long long* at) {
    Barrier& barrier = *reinterpret_cast<Barrier*>(at);
    if (barrier.all == 0xffff) on_cpu::fail("a barrier is used before it is there");
    ++on_cpu::arrivals;
    if (--barrier.missing) return;
    ++barrier.completed;
    barrier.missing = barrier.all;
}
inline void wait_at(const unsigned long long* at, unsigned odd) {
    const Barrier& barrier = *reinterpret_cast<const Barrier*>(at);
    if (barrier.all == 0xffff) on_cpu::fail("a barrier is used before it is there");
    while ((barrier.completed & 1) == odd) on_cpu::give_way(on_cpu::SPINNING);
}
inline void __syncthreads() { on_cpu::give_way(on_cpu::AT_BLOCK); }
inline void cluster_sync() { on_cpu::give_way(on_cpu::AT_CLUSTER); }
// What another block of the cluster has at this block's address.
template <class T>
T load_of_block(const T* pointer, int block) {
    const size_t offset = reinterpret_cast<const unsigned char*>(pointer) - on_cpu::shared_base();
    return *reinterpret_cast<const T*>(on_cpu::shared_base(block) + offset);
}
// A thread looks for what threads of other blocks do, which announce it, until it is done.
inline void announce() { ++on_cpu::meetings; }
inline void look_again() { on_cpu::give_way(on_cpu::AT_MEETING); }
inline void __syncwarp() { on_cpu::meet(nullptr, {}); }
inline float __uint_as_float(unsigned x) { return on_cpu::as_float(x); }
inline unsigned __float_as_uint(float x) { return on_cpu::as_bits(x); }
inline float __expf(float x) { return expf(x); }
inline float exp2_approx(float x) { return exp2f(x); }
inline unsigned load_32(const void* from) { return *static_cast<const unsigned*>(from); }
inline unsigned load_16(const void* from) { return *static_cast<const uint16_t*>(from); }
inline uint4 load_128(const void* from) { return *static_cast<const uint4*>(from); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int atomicAdd(int* sum, int x) {  // no fiber gives way inside
    const int before = *sum;
    *sum += x;
    return before;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    bits = on_cpu::meet(on_cpu::shuffle, {bits, unsigned(lane)})[0];
    memcpy(&x, &bits, 4);
    return x;
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int lanes) {
    const int lane = on_cpu::running % 32;
    return __shfl_sync(mask, x, lane < lanes ? lane : lane - lanes);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) {
    return __shfl_sync(mask, x, on_cpu::running % 32 ^ lanes);
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) { return on_cpu::meet(on_cpu::greatest, {x})[0]; }
inline int __reduce_add_sync(unsigned, int x) { return int(on_cpu::meet(on_cpu::total, {unsigned(x)})[0]); }
inline unsigned __match_any_sync(unsigned, unsigned x) { return on_cpu::meet(on_cpu::match, {x})[0]; }
inline unsigned __ballot_sync(unsigned, int x) { return on_cpu::meet(on_cpu::ballot, {unsigned(x)})[0]; }

template <size_t BYTES>
void copy_async(void* to, const void* from, bool valid) {
    if ((uint64_t(to) | uint64_t(from)) % BYTES) on_cpu::fail("an asynchronous copy is not aligned to its size");
    const auto holds = [&](const on_cpu::Range& range) {
        const uint64_t first = uint64_t(from) - uint64_t(range.address);
        return first < range.bytes && first + BYTES <= range.bytes;
    };
    const auto& readable = on_cpu::readable;
    if (valid && !readable.empty() && std::none_of(readable.begin(), readable.end(), holds))
        on_cpu::fail("an asynchronous copy reads what it may not");
    on_cpu::fibers[on_cpu::running].open.push_back({to, from, BYTES, valid});
}
inline void copy_async_16(void* to, const void* from, bool valid) { copy_async<16>(to, from, valid); }
inline void copy_async_8(void* to, const void* from, bool valid) { copy_async<8>(to, from, valid); }
inline void copy_async_4(void* to, const void* from) { copy_async<4>(to, from, true); }
inline void copy_async_commit() {
    on_cpu::Fiber& self = on_cpu::fibers[on_cpu::running];
    self.groups.push_back(std::move(self.open));
    self.open.clear();
}
template <int PENDING>
void copy_async_wait() {
    auto& groups = on_cpu::fibers[on_cpu::running].groups;
    while (groups.size() > PENDING) {
        for (const on_cpu::Copy& copy : groups.front())
            copy.valid ? memcpy(copy.to, copy.from, copy.bytes) : memset(copy.to, 0, copy.bytes);
        groups.erase(groups.begin());
    }
}
inline void load_rows_of_four(unsigned (&m)[4], const void* row, on_cpu::WarpOperation operation) {
    const uint64_t at = reinterpret_cast<uint64_t>(row);
    memcpy(m, on_cpu::meet(operation, {unsigned(at), unsigned(at >> 32)}), 16);
}
inline void load_matrix_x4(unsigned (&m)[4], const void* row) { load_rows_of_four(m, row, on_cpu::load_matrices<false>); }
inline void load_matrix_x4_transposed(unsigned (&m)[4], const void* row) {
    load_rows_of_four(m, row, on_cpu::load_matrices<true>);
}
inline unsigned transpose_b16(unsigned m) { return on_cpu::meet(on_cpu::transpose_matrix, {m})[0]; }
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, on_cpu::WarpOperation operation) {
    const unsigned* out = on_cpu::meet(operation, {a[0], a[1], a[2], a[3], b0, b1, on_cpu::as_bits(c[0]),
                                                   on_cpu::as_bits(c[1]), on_cpu::as_bits(c[2]), on_cpu::as_bits(c[3])});
    memcpy(c, out, 16);
}
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_add(c, a, b0, b1, on_cpu::multiply<on_cpu::bf16_half>);
}
inline void mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_add(c, a, b0, b1, on_cpu::multiply<on_cpu::f16_half>);
}
inline unsigned pack_bf16(float low, float high) { return on_cpu::round_bf16(low) | on_cpu::round_bf16(high) << 16; }
inline unsigned pack_f16(float low, float high) { return on_cpu::round_f16(low) | on_cpu::round_f16(high) << 16; }
inline float low_f16(unsigned x) { return on_cpu::f16_half(x, 0); }
inline float high_f16(unsigned x) { return on_cpu::f16_half(x, 1); }
