// x @ (scale * weight).T for few rows of x and FP8 (e4m3) weights, where reading the weights is the time (see
// fp8_linear_cuda.py).
//
// A cluster of CLUSTER blocks makes FEATURES outputs of every row at a time, and goes through the features in strides.
// Its warps share the depth: chunk c, CHUNK numbers of depth, is warp c % (CLUSTER * WARPS)'s. Each warp has a ring of
// STAGES chunks in shared memory, of the weights and of x, which asynchronous copies fill: the memory's latency is
// hidden by what is under way, 80 to 190 KB a block, and copies for the next features are under way while sums of the
// last ones are made. With KEPT_STEPS, x is no part of the ring: a warp's chunks of it are copied once and stay.
//
// With DEPENDENT the kernel may be launched while the one before it on the stream still runs (programmatic dependent
// launch). What that rests on:
//  - Before wait_for_earlier_kernels only weights are read, which no kernel of the same graph writes (the attribute is
//    given inside graphs only; a graph's first kernel starts behind all that came before the graph). x is read, and out
//    written, behind it. Shared memory is a block's own.
//  - The wait ends when the kernel before has ended and what it wrote can be seen. Every thread of every block waits, so
//    when this kernel has ended, so has the one before. Hence, by induction over a chain of such kernels, all earlier
//    ones have ended behind a wait: what any of them wrote can be read, what any of them read can be overwritten (the
//    allocator gives memory of an earlier x to a later out).
//  - A kernel without the attribute (our tree attention, PyTorch's) starts when the one before it has ended, so when all
//    have.
//  - let_later_kernels_start comes behind the wait. So when a kernel of SGLang's with the attribute starts early behind
//    this one, only this one still runs: what others wrote, indices say, it may read before its own wait, as it may behind
//    a kernel without the attribute. And it starts only when every block of this grid runs, so that no later block takes
//    a place that an earlier one needs to end.
//  - One before this that has the attribute and ended without waiting would break the chain, and its own reads.
//
// The order of depth in a product is free as long as both operands share it. Lane 4 g + t of a warp holds 16 adjacent
// bytes of feature g, from depth 16 t of the chunk on; word s of these is its part of step s of four. In a word the pairs
// (0, 2) and (1, 3) of bytes become the two registers of the operand, which costs the fewest instructions; x is paired
// alike. Sums are made in an order that depends on nothing but the shape: warps in order, then blocks in order.
//
// Every code but the two NaN of e4m3 (0x7f, 0xff, which read as 480 here) is multiplied as its exact value.
//
// Compiled for HALF (0: x is bfloat16, 1: float16), ROW_TILES (tiles of 16 rows: 1, 2 or 4), CLUSTER (1, 2 or 4),
// FEATURE_TILES (tiles of 8 features: 4, 8 or 16), STAGES, KEPT_STEPS (0, or a warp's chunks), ROUND (feature tiles whose
// sums of all warps lie in shared memory at a time), DEPENDENT and SHARED_BYTES (what fp8_linear_cuda.py gives a block).
#include "few_rows.cuh"

#ifndef CUDA_ON_CPU
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Has the memory at `pointer` brought to the L2 cache.
__device__ __forceinline__ void ask_for(const float* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

// Both numbers of a pair times those of another; subnormal ones count. (The sum with -0.0 is what every architecture
// from 8.0 on has.)
__device__ __forceinline__ unsigned multiply_pairs(unsigned x, unsigned y) {
    unsigned z;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
#endif
    return z;
}

#if CLUSTER > 1
// Meeting point of a cluster's threads; what they wrote to shared memory before is seen by all behind it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A number at this block's shared address, in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float2 load_of_block(const float2* pointer, int rank) {
    unsigned address;
    float2 value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(address)
                 : "memory");
    return value;
}
#endif
#endif

typedef long long i64;

struct LinearArguments {
    i64 x;       // [rows, depth], rows row_stride elements apart, at 16-byte addresses
    i64 weight;  // e4m3 [features, depth], at a 16-byte address
    i64 scale;   // float [features]
    i64 out;     // [rows, features] as x
    i64 row_stride, rows, features, depth;  // depth is a multiple of 16
};

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * ROW_TILES;
constexpr int FEATURES = 8 * FEATURE_TILES;
constexpr int CHUNK = 64, STEPS = 4;  // depth of a chunk, and its matrix products
// Of 16 bytes, a lane's share of a chunk of x (and FEATURE_TILES of the weights), and of a stage of the ring.
constexpr int X_VECTORS = 4 * ROW_TILES, VECTORS = FEATURE_TILES + (KEPT_STEPS ? 0 : X_VECTORS);
constexpr int ROUND_STRIDE = 8 * ROUND + (ROW_TILES == 1 ? 8 : 0);  // distance of a round's rows
static_assert(FEATURE_TILES % ROUND == 0 && FEATURES <= THREADS, "rounds are whole, and a thread asks for one scale");

struct Vector {
    unsigned word[4];
};
struct Shared {
    Vector ring[WARPS][STAGES][VECTORS][32];
#if KEPT_STEPS
    Vector kept_x[WARPS][KEPT_STEPS][X_VECTORS][32];
#endif
    float2 part[WARPS][ROWS][ROUND_STRIDE / 2];
#if CLUSTER > 1
    float2 sum[ROWS][FEATURES / 2];
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "fp8_linear_cuda.py gives a block the source's Shared");

// Bytes 1 and 3 of a word (e4m3) as a pair of x's dtype, 2^-120 (bfloat16) or 2^-8 (float16) times their values: sign,
// exponent and fraction stand where the wider number has them, and only its exponent's offset differs.
__device__ __forceinline__ unsigned spread(unsigned word) {
#if HALF
    return (word & 0x80008000u) | (word >> 1 & 0x3f803f80u);
#else
    return (word & 0x80008000u) | (word >> 4 & 0x07f007f0u);
#endif
}
constexpr unsigned OFFSET = HALF ? 0x5c005c00u : 0x7b807b80u;  // 2^8 or 2^120, twice

__device__ __forceinline__ unsigned low_halves(unsigned a, unsigned b) { return (a & 0xffffu) | b << 16; }
__device__ __forceinline__ unsigned high_halves(unsigned a, unsigned b) { return a >> 16 | (b & 0xffff0000u); }

// Where vector `piece` of 8 of a row of x's chunk lies, among the vectors of 4 rows: lanes of a quarter warp, which read
// every second vector of two rows, then meet no bank twice.
__device__ __forceinline__ int place_in_rows(int row, int piece) { return row % 4 * 8 + (piece ^ row % 2); }

struct Position {
    int tile, step;
};

struct Warp {
    const LinearArguments& arguments;
    Shared& shared;
    int lane, warp, first_chunk, tiles, clusters, steps;

    __device__ __forceinline__ void advance(Position& position) const {
        if (++position.step == steps) {
            position.step = 0;
            position.tile += clusters;
        }
    }

    // These begin the copies of a chunk; none behind the last. Chunks behind the depth, features behind the last and
    // rows behind the last are zeros.
    __device__ __forceinline__ void fetch_weights(const Position& position, int stage) const {
        if (position.tile >= tiles) return;
        const int depth = int(arguments.depth);
        const int feature = position.tile * FEATURES + lane / 4, at = chunk_of(position) * CHUNK + lane % 4 * 16;
        const char* weight = reinterpret_cast<const char*>(arguments.weight) + i64(feature) * depth + at;
        const int left = at < depth ? int(arguments.features) - feature : 0;
#pragma unroll
        for (int n = 0; n < FEATURE_TILES; ++n)
            copy_async_16(&shared.ring[warp][stage][n][lane], weight + i64(n) * 8 * depth, n * 8 < left);
    }
    __device__ __forceinline__ void fetch_x(const Position& position, int stage) const {
        if (position.tile >= (KEPT_STEPS ? int(blockIdx.x) / CLUSTER + 1 : tiles)) return;
        const int depth = int(arguments.depth), column = chunk_of(position) * CHUNK + lane % 8 * 8;
        const short* x = reinterpret_cast<const short*>(arguments.x) + lane / 8 * arguments.row_stride + column;
        const int rows = column < depth ? int(arguments.rows) - lane / 8 : 0;
        Vector(*slot)[32] = slot_of_x(stage, position.step);
#pragma unroll
        for (int i = 0; i < X_VECTORS; ++i)
            copy_async_16(&slot[i][place_in_rows(lane / 8, lane % 8)], x + i * 4 * arguments.row_stride, i * 4 < rows);
    }
    __device__ __forceinline__ Vector (*slot_of_x(int stage, int step) const)[32] {
#if KEPT_STEPS
        return shared.kept_x[warp][step];
#else
        return shared.ring[warp][stage] + FEATURE_TILES;
#endif
    }
    __device__ __forceinline__ int chunk_of(const Position& position) const {
        return position.step * CLUSTER * WARPS + first_chunk;
    }

    // Adds a chunk's products.
    __device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][FEATURE_TILES][4], int stage, int step) const {
        const Vector(*weights)[32] = shared.ring[warp][stage];
        const Vector(*rows)[32] = slot_of_x(stage, step);
        unsigned x[ROW_TILES][STEPS][4];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {  // 8 rows each
            const int row = i * 8 + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Vector own = rows[row / 4][place_in_rows(row, lane % 4 * 2 + half)];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    unsigned(&step)[4] = x[i / 2][half * 2 + s];
                    step[i % 2] = low_halves(own.word[2 * s], own.word[2 * s + 1]);
                    step[i % 2 + 2] = high_halves(own.word[2 * s], own.word[2 * s + 1]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < FEATURE_TILES; ++n) {
            const Vector own = weights[n][lane];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const unsigned even = multiply_pairs(spread(own.word[s] << 8), OFFSET);
                const unsigned odd = multiply_pairs(spread(own.word[s]), OFFSET);
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) multiply_tiles(sums[m][n], x[m][s], even, odd);
            }
        }
    }
};

// The scales of two adjacent features, 0 of those behind the last.
__device__ __forceinline__ float2 scales_of(const LinearArguments& arguments, int feature) {
    const float* scale = reinterpret_cast<const float*>(arguments.scale) + feature;
    const int left = int(arguments.features) - feature;
    return {left > 0 ? scale[0] : 0.0f, left > 1 ? scale[1] : 0.0f};
}
// Two adjacent features of a row to where they belong, if they exist.
__device__ __forceinline__ void write(const LinearArguments& arguments, int row, int feature, float2 value, float2 scale) {
    if (row >= int(arguments.rows) || feature >= int(arguments.features)) return;
    unsigned short* out = reinterpret_cast<unsigned short*>(arguments.out) + row * arguments.features + feature;
    out[0] = round_to_x(value.x * scale.x);
    if (feature + 1 < int(arguments.features)) out[1] = round_to_x(value.y * scale.y);
}

// The sums of all warps, added and written, ROUND feature tiles at a time.
__device__ __forceinline__ void reduce(const LinearArguments& arguments, Shared& shared, int tile, int rank,
                                       const float (&sums)[ROW_TILES][FEATURE_TILES][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int first = 0; first < FEATURE_TILES; first += ROUND) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int n = 0; n < ROUND; ++n) {
                const float(&own)[4] = sums[m][first + n];
                shared.part[warp][m * 16 + lane / 4][n * 4 + lane % 4] = {own[0], own[1]};
                shared.part[warp][m * 16 + 8 + lane / 4][n * 4 + lane % 4] = {own[2], own[3]};
            }
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * ROUND * 4; i += THREADS) {
            const int row = i / (ROUND * 4), pair = i % (ROUND * 4);
#if CLUSTER == 1
            const int feature = tile * FEATURES + (first * 4 + pair) * 2;
            const float2 scale = scales_of(arguments, feature);  // under way while the sums are read
#endif
            float2 total = shared.part[0][row][pair];
#pragma unroll
            for (int from = 1; from < WARPS; ++from) {
                const float2 part = shared.part[from][row][pair];
                total.x += part.x;
                total.y += part.y;
            }
#if CLUSTER > 1
            shared.sum[row][first * 4 + pair] = total;
#else
            write(arguments, row, feature, total, scale);
#endif
        }
        __syncthreads();  // the next round, or the next tile, writes `part` again
    }
#if CLUSTER > 1
    cluster_sync();
    for (int i = rank * THREADS + threadIdx.x; i < ROWS * FEATURES / 2; i += CLUSTER * THREADS) {
        const int row = i / (FEATURES / 2), pair = i % (FEATURES / 2);
        const float2 scale = scales_of(arguments, tile * FEATURES + pair * 2);
        float2 total = load_of_block(&shared.sum[row][pair], 0);
#pragma unroll
        for (int from = 1; from < CLUSTER; ++from) {
            const float2 part = load_of_block(&shared.sum[row][pair], from);
            total.x += part.x;
            total.y += part.y;
        }
        write(arguments, row, tile * FEATURES + pair * 2, total, scale);
    }
    cluster_sync();  // the next tile writes `sum` again, and a block that ends takes it away
#endif
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) fp8_linear(const LinearArguments arguments) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER;
    const int chunks = (int(arguments.depth) + CHUNK - 1) / CHUNK;
    const Warp own = {arguments,
                      shared,
                      int(threadIdx.x) % 32,
                      warp,
                      rank * WARPS + warp,
                      (int(arguments.features) + FEATURES - 1) / FEATURES,
                      int(gridDim.x) / CLUSTER,
                      (chunks + CLUSTER * WARPS - 1) / (CLUSTER * WARPS)};

    Position next = {int(blockIdx.x) / CLUSTER, 0};
#if DEPENDENT
    Position next_of_x = next;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        own.fetch_weights(next, stage);
        own.advance(next);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        own.fetch_x(next_of_x, stage);
        own.advance(next_of_x);
        copy_async_commit();
    }
#else
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        own.fetch_weights(next, stage);
        own.fetch_x(next, stage);
        own.advance(next);
        copy_async_commit();
    }
#endif
    int stage = 0;
    for (int tile = blockIdx.x / CLUSTER; tile < own.tiles; tile += own.clusters) {
        const int feature = tile * FEATURES + int(threadIdx.x);  // whose scale is asked for before the sums need it
        if (threadIdx.x < FEATURES && feature < int(arguments.features))
            ask_for(reinterpret_cast<const float*>(arguments.scale) + feature);
        float sums[ROW_TILES][FEATURE_TILES][4] = {};
        for (int step = 0; step < own.steps; ++step) {
            copy_async_wait<STAGES - 1>();
            __syncwarp();  // lanes read what others copied
            own.multiply(sums, stage, step);
            __syncwarp();  // and all have read before it is overwritten
            own.fetch_weights(next, stage);
            own.fetch_x(next, stage);
            own.advance(next);
            copy_async_commit();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        reduce(arguments, shared, tile, rank, sums);
    }
}
