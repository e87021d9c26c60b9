// x @ weight.T for few rows of x, where a launch and the way to memory take longer than the products: whatever stands
// before and behind a product in a layer is done by the same launch (row_linear.py says what).
//
// A block makes FEATURES of the product's features for up to ROWS rows. Its warps share the depth, each a run of STEPS
// chunks of CHUNK numbers. A warp's weights go to shared memory by asynchronous copies that all begin at once; a lane
// multiplies what it copied itself, so lanes need not meet. x goes from global memory to the registers in which it is
// multiplied, each number once a block, AHEAD chunks before its turn. Then the warps' sums meet in shared memory, where
// their weights were, and are added in the order of the warps.
//
// NORM: each row of x is to be divided by its root mean square. That is one factor a row, so the sums are multiplied with it,
// and x is not rounded in between. Warps sum the squares of what they read; the epsilon is in the arguments.
// BIAS: a number a feature is added.
// GATED: the first half of the features are gates g of the others u; outputs are silu(g) u. A block makes the same part of
// both halves.
// RESIDUAL: a tensor like out is added. Whatever the ends, an output is rounded once.
//
// With DEPENDENT the kernel may be launched while the one before it on the stream still runs. It keeps the rules that
// fp8_linear.cu states: before wait_for_earlier_kernels only weights and biases are read, which no kernel of the same
// graph writes; every thread waits; x and the residual are read, and out written, behind the wait; later kernels are let in
// behind it. x is read past the L1 cache, which the block may share with what ran before it on the multiprocessor.
//
// The order of depth in a product is free as long as both operands share it. Lane 4 g + t of a warp holds 8 adjacent
// numbers of feature g (and of row g of each 8 rows), from depth 8 t of a chunk on: the first four are its part of the
// chunk's first matrix product, the others of the second.
//
// An output's bits depend on x's row, the weights and WARPS alone: not on the other rows, nor on how features and rows are
// cut into blocks.
//
// Compiled for HALF (0: bfloat16, 1: float16), ROW_GROUPS (of 8 rows: 1, 2, 4 or 8), FEATURE_TILES (of 8 features, gates and
// gated ones counted alike), WARPS, STEPS (the depth is at most WARPS * STEPS * CHUNK), NORM, BIAS, GATED, RESIDUAL,
// DEPENDENT and SHARED_BYTES (what row_linear.py gives a block).
#include "few_rows.cuh"

#ifndef CUDA_ON_CPU
struct alignas(16) Vector {
    unsigned word[4];
};
// 16 bytes from where another kernel wrote; stays in its place among waits.
__device__ __forceinline__ Vector load_vector(const void* from_global) {
    Vector out;
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.word[0]), "=r"(out.word[1]), "=r"(out.word[2]), "=r"(out.word[3])
                 : "l"(from_global)
                 : "memory");
    return out;
}
// The two numbers of x's dtype in a word.
__device__ __forceinline__ float2 numbers_of(unsigned word) {
#if HALF
    float2 out;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(out.x), "=f"(out.y)
        : "r"(word));
    return out;
#else
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
#endif
}
#endif

typedef long long i64;

struct RowLinearArguments {
    i64 x;         // [rows, depth]
    i64 weight;    // [features, depth], as x
    i64 bias;      // [features] as x, with BIAS
    i64 residual;  // [rows, outputs] as x, with RESIDUAL
    i64 out;       // [rows, outputs] as x
    i64 rows, outputs, depth;  // outputs: features, half of them with GATED; it and depth are multiples of 8
    float epsilon;             // with NORM
};  // all addresses are multiples of 16

constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 8 * ROW_GROUPS, ROW_TILES = (ROW_GROUPS + 1) / 2, X_VECTORS = 2 * ROW_TILES;
constexpr int FEATURES = 8 * FEATURE_TILES, OUTPUTS = GATED ? FEATURES / 2 : FEATURES;
constexpr int CHUNK = 32;
constexpr int VECTORS_AHEAD = 16;  // of x in registers
constexpr int AHEAD = STEPS < VECTORS_AHEAD / ROW_GROUPS ? STEPS : VECTORS_AHEAD / ROW_GROUPS;
constexpr int PART_STRIDE = 4 * FEATURE_TILES + (FEATURE_TILES % 2 ? 0 : 4);  // pairs between rows: banks differ
static_assert(OUTPUTS % 8 == 0, "a tile of features is of gates, or of gated ones");

struct Shared {
    union {
        Vector weights[STEPS][FEATURE_TILES][32];
        float2 part[ROWS][PART_STRIDE];
    } warp[WARPS];
    float squares[WARPS][ROWS];
    Vector bias[FEATURE_TILES];
    Vector residual[ROWS][OUTPUTS / 8];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "row_linear.py gives a block the source's Shared");

struct Block {
    const RowLinearArguments& arguments;
    Shared& shared;
    int lane, warp, rows, first_row, first_output;  // rows: that there are, of the block's

    // Which feature feature `own` of the block is; false where it is behind the last.
    __device__ __forceinline__ bool feature_of(int own, i64& feature) const {
        const i64 output = first_output + own % OUTPUTS;
        feature = output + own / OUTPUTS * arguments.outputs;
        return output < arguments.outputs;
    }
    __device__ __forceinline__ int column_of(int step) const { return (warp * STEPS + step) * CHUNK + lane % 4 * 8; }

    // A group of copies a step; biases with the first. What is behind the depth or the last feature is zero.
    __device__ __forceinline__ void fetch_weights() const {
        const short* weight = reinterpret_cast<const short*>(arguments.weight);
#if BIAS
        if (threadIdx.x < FEATURE_TILES) {
            i64 feature;
            const bool there = feature_of(threadIdx.x * 8, feature);
            copy_async_16(&shared.bias[threadIdx.x], reinterpret_cast<const short*>(arguments.bias) + feature, there);
        }
#endif
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int column = column_of(step);
#pragma unroll
            for (int n = 0; n < FEATURE_TILES; ++n) {
                i64 feature;
                const bool there = feature_of(n * 8 + lane / 4, feature) && column < arguments.depth;
                copy_async_16(&shared.warp[warp].weights[step][n][lane], weight + feature * arguments.depth + column, there);
            }
            copy_async_commit();
        }
    }
    // One group of copies.
    __device__ __forceinline__ void fetch_residual() const {
#if RESIDUAL
        constexpr int VECTORS = OUTPUTS / 8, TURNS = (ROWS * VECTORS + THREADS - 1) / THREADS;
        const short* residual = reinterpret_cast<const short*>(arguments.residual);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int i = turn * THREADS + threadIdx.x, row = i / VECTORS, output = first_output + i % VECTORS * 8;
            if (i >= ROWS * VECTORS) break;
            copy_async_16(&shared.residual[row][i % VECTORS], residual + (first_row + row) * arguments.outputs + output,
                          row < rows && output < arguments.outputs);
        }
#endif
        copy_async_commit();
    }
    __device__ __forceinline__ void load_x(Vector (&x)[X_VECTORS], int step) const {
        const int column = column_of(step), left = column < arguments.depth ? rows - lane / 4 : 0;
        const short* from =
            reinterpret_cast<const short*>(arguments.x) + (first_row + lane / 4) * arguments.depth + column;
#pragma unroll
        for (int group = 0; group < X_VECTORS; ++group)
            x[group] = group < ROW_GROUPS && group * 8 < left ? load_vector(from + group * 8 * arguments.depth) : Vector{};
        __syncwarp();  // the compiler would move the loads to their use, where they would wait one by one
    }

    // Adds the products, and the squares, of the steps from STEP on.
    template <int STEP>
    __device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][FEATURE_TILES][4], float (&squares)[ROW_GROUPS],
                                             Vector (&ring)[AHEAD][X_VECTORS]) const {
        if constexpr (STEP < STEPS) {
            Vector(&x)[X_VECTORS] = ring[STEP % AHEAD];
            copy_async_wait<STEPS - STEP>();  // behind this step's group are the later ones, and the residual's
#pragma unroll
            for (int n = 0; n < FEATURE_TILES; ++n) {
                const Vector own = shared.warp[warp].weights[STEP][n][lane];
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int m = 0; m < ROW_TILES; ++m) {
                        const unsigned *upper = x[2 * m].word + 2 * half, *lower = x[2 * m + 1].word + 2 * half;
                        const unsigned a[4] = {upper[0], lower[0], upper[1], lower[1]};
                        multiply_tiles(sums[m][n], a, own.word[2 * half], own.word[2 * half + 1]);
                    }
            }
#if NORM
#pragma unroll
            for (int group = 0; group < ROW_GROUPS; ++group)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 value = numbers_of(x[group].word[i]);
                    squares[group] = fmaf(value.y, value.y, fmaf(value.x, value.x, squares[group]));
                }
#endif
            if (STEP + AHEAD < STEPS) load_x(x, STEP + AHEAD);
            multiply<STEP + 1>(sums, squares, ring);
        }
    }

    // Leaves the warp's sums, and sums of squares, to all.
    __device__ __forceinline__ void hand_over(const float (&sums)[ROW_TILES][FEATURE_TILES][4],
                                              float (&squares)[ROW_GROUPS]) const {
        float2(&part)[ROWS][PART_STRIDE] = shared.warp[warp].part;
        __syncwarp();  // no lane still reads the weights that lie there
#pragma unroll
        for (int group = 0; group < ROW_GROUPS; ++group) {
            const int row = group * 8 + lane / 4, half = group % 2 * 2;
#pragma unroll
            for (int n = 0; n < FEATURE_TILES; ++n)
                part[row][n * 4 + lane % 4] = {sums[group / 2][n][half], sums[group / 2][n][half + 1]};
#if NORM
            squares[group] += __shfl_xor_sync(0xffffffffu, squares[group], 1);
            squares[group] += __shfl_xor_sync(0xffffffffu, squares[group], 2);
            if (lane % 4 == 0) shared.squares[warp][row] = squares[group];
#endif
        }
    }

    // What row `row` is multiplied with: one over x's root mean square, or one.
    __device__ __forceinline__ float factor_of(int row) const {
#if NORM
        float sum = shared.squares[0][row];
#pragma unroll
        for (int from = 1; from < WARPS; ++from) sum += shared.squares[from][row];
        return rsqrtf(sum / float(arguments.depth) + arguments.epsilon);
#else
        return 1.0f;
#endif
    }
    // Two adjacent features of a row: sums over the whole depth, times the row's factor, plus the bias.
    __device__ __forceinline__ float2 features_of(int row, int pair, float factor) const {
        float2 total = shared.warp[0].part[row][pair];
#pragma unroll
        for (int from = 1; from < WARPS; ++from) {
            const float2 part = shared.warp[from].part[row][pair];
            total.x += part.x;
            total.y += part.y;
        }
#if BIAS
        const float2 bias = numbers_of(shared.bias[pair / 4].word[pair % 4]);
        return {fmaf(total.x, factor, bias.x), fmaf(total.y, factor, bias.y)};
#else
        return {total.x * factor, total.y * factor};
#endif
    }
    __device__ __forceinline__ void write_outputs() const {
        constexpr int PAIRS = OUTPUTS / 2, TURNS = (ROWS * PAIRS + THREADS - 1) / THREADS;
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int i = turn * THREADS + threadIdx.x, row = i / PAIRS, pair = i % PAIRS;
            const i64 output = first_output + pair * 2;
            if (row >= rows) break;
            if (output >= arguments.outputs) continue;
            const float factor = factor_of(row);
            float2 value = features_of(row, pair, factor);
#if GATED
            const float2 other = features_of(row, pair + PAIRS, factor);
            value = {value.x / (1.0f + __expf(-value.x)) * other.x, value.y / (1.0f + __expf(-value.y)) * other.y};
#endif
#if RESIDUAL
            const float2 residual = numbers_of(shared.residual[row][pair / 4].word[pair % 4]);
            value.x += residual.x;
            value.y += residual.y;
#endif
            unsigned* out = reinterpret_cast<unsigned*>(arguments.out) + ((first_row + row) * arguments.outputs + output) / 2;
            *out = round_to_x(value.x) | unsigned(round_to_x(value.y)) << 16;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) row_linear(const RowLinearArguments arguments) {
    DYNAMIC_SHARED(memory);
    const int first_row = blockIdx.y * ROWS;
    const Block own = {arguments,
                       *reinterpret_cast<Shared*>(memory),
                       int(threadIdx.x) % 32,
                       int(threadIdx.x) / 32,
                       min(int(arguments.rows) - first_row, ROWS),
                       first_row,
                       int(blockIdx.x) * OUTPUTS};
    own.fetch_weights();
#if DEPENDENT
    wait_for_earlier_kernels();
    let_later_kernels_start();
#endif
    Vector ring[AHEAD][X_VECTORS];
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) own.load_x(ring[step], step);
    own.fetch_residual();
    float sums[ROW_TILES][FEATURE_TILES][4] = {}, squares[ROW_GROUPS] = {};
    own.multiply<0>(sums, squares, ring);
    own.hand_over(sums, squares);
    copy_async_wait<0>();
    __syncthreads();
    own.write_outputs();
}
