// What gdn_tree.cu is compiled for, its arguments, and the pieces of matrices that a warp holds. The fragments' layout and the
// precision are said at the head of gdn_tree.cu.
#pragma once
#ifndef GDN_TREE_ON_CPU
#include "intrinsics.cuh"
#endif

typedef unsigned short bf16;
typedef long long int64;

constexpr int TILES = GDN_TILES;
constexpr int PANEL = GDN_PANEL;
constexpr int NODES = TILES * 16;
constexpr int KEY_DIM = GDN_KEY_DIM;
constexpr int VALUE_DIM = GDN_VALUE_DIM;
constexpr int SLICE = GDN_SLICE;
constexpr int SLICES = VALUE_DIM / SLICE;
constexpr int WARPS = SLICE / 8;
constexpr int THREADS = WARPS * 32;
constexpr int K_STEPS = KEY_DIM / 16;
constexpr int ROW_CHUNKS = KEY_DIM / 8;  // 16-byte pieces of a k or q row
constexpr int WORDS = (NODES + 31) / 32;
constexpr double LOG2_E = 1.4426950408889634;

constexpr int ROWS_BYTES = NODES * KEY_DIM * 2;                       // k, and the same of q
constexpr int PANEL_TILES = PANEL * TILES - PANEL * (PANEL - 1) / 2;  // tiles (i, j), i >= j, of the last panel
constexpr int ROWS = PANEL > 1 ? 2 : 1;                               // row tiles that a warp works on at a time
// Few tiles: registers hold all of R and O, and the code for them is short.
constexpr bool AT_ONCE = TILES <= 4 && PANEL == TILES;
constexpr int TILE_BYTES = 3 * 512;                                   // of X and Y: two terms and one
constexpr float TILE_SCALE = 4096.0f;  // of X, Y and the inverses: float16 keeps 11 bits of numbers down to 2^-26
constexpr int STATE_SIZE = GDN_STATE_BF16 ? 2 : 4;
constexpr int STATE_BYTES = SLICE * KEY_DIM * STATE_SIZE, VALUE_BYTES = NODES * SLICE * 2, SUMS_BYTES = WORDS * 1024;
constexpr int TILES_BYTES = PANEL_TILES * TILE_BYTES;
constexpr int PATH_U_ROW = SLICE + 4;
constexpr int PATH_BYTES = 16 * KEY_DIM * 2 + 16 * PATH_U_ROW * 4 + 18 * 8;
constexpr int VECTOR_BYTES = NODES * (8 + 3 * 4) + NODES * WORDS * 4 + TILES * 4;
constexpr int OTHER_BYTES = 2 * ROWS_BYTES + PATH_BYTES + VECTOR_BYTES;
// Where memory is short, X and Y take the place of the state, which waits in registers meanwhile, and v stays outside.
constexpr bool OVERLAID = OTHER_BYTES + STATE_BYTES + SUMS_BYTES + VALUE_BYTES + TILES_BYTES > GDN_SHARED_LIMIT;
constexpr int STAGED_BYTES = STATE_BYTES + SUMS_BYTES + (OVERLAID ? 0 : VALUE_BYTES);
constexpr int TILES_AT = 2 * ROWS_BYTES + (OVERLAID ? 0 : STAGED_BYTES);
constexpr int LEFT_OUT = !OVERLAID ? 0 : TILES_BYTES < STAGED_BYTES ? TILES_BYTES : STAGED_BYTES;
constexpr int SHARED_BYTES = OTHER_BYTES + STAGED_BYTES + TILES_BYTES - LEFT_OUT;
static_assert(SHARED_BYTES == GDN_SHARED_BYTES, "cuda_kernel.py computes another amount of shared memory");
// Blocks that a multiprocessor holds: two where memory and, without spills, registers allow it.
constexpr int BLOCKS = TILES <= 4 && THREADS <= 256 && 2 * (SHARED_BYTES + 1024) <= GDN_SHARED_LIMIT + 1024 ? 2 : 1;
// A block may compute all slices of a head where X, Y, k and q stay in shared memory from slice to slice.
constexpr bool WHOLE_HEADS = SLICES > 1 && PANEL == TILES && !AT_ONCE && !OVERLAID;
static_assert(VALUE_DIM % SLICE == 0 && KEY_DIM % 64 == 0 && (KEY_DIM & (KEY_DIM - 1)) == 0 && SLICE <= KEY_DIM,
              "unsupported head dimensions");

struct Stash {
    float* u;           // [rows, value heads, nodes, VALUE_DIM]: u' of the last verify
    bf16* k;            // [2, rows, key heads, nodes, KEY_DIM]: raw k; the parity names the one to read
    double* g;          // [2, rows, value heads, nodes]: G
    const int* row;     // [R] each request's row, or null: no stash, nothing pending
    const int* parity;  // [rows]
    const int* length;  // [rows] nodes of the accepted path that the state does not hold yet
    const int* path;    // [rows, path_stride]
    int64 rows, nodes, path_stride;
    int64 layer_u, layer_k, layer_g;  // elements from one layer to the next (flush)
};

struct Heads {
    int64 key_heads, value_heads, group;  // group: value heads of a key head
};

struct State {
    void* data;        // [slot, value head, VALUE_DIM, KEY_DIM]
    const int* slots;  // [R]; negative: a request to leave out
    int64 slot_stride, layer_stride;
};

struct VerifyArguments {
    const bf16 *q, *k, *v, *a, *b;
    const void *A_log, *dt_bias;
    const int* ancestors;   // [R, nodes, ancestor_words]
    const int* node_count;  // [R] or null: all are real
    bf16* out;              // [R, nodes, value heads, VALUE_DIM]
    State state;
    Stash stash;
    Heads heads;
    int64 nodes, ancestor_words, whole;  // whole: key heads whose value heads' blocks compute all slices, where WHOLE_HEADS
    int64 q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token;
    int64 A_log_is_bf16, dt_bias_is_bf16;
    double scale;
};

struct FlushArguments {
    State state;
    Stash stash;
    Heads heads;
    const int* destination;  // [R] slots to write
    const int* length;       // [R] path nodes to commit, or null: all that are pending
};

struct Lane {
    int warp, lane, row, pair;
    __device__ Lane() : warp(threadIdx.x / 32), lane(threadIdx.x % 32), row(lane / 4), pair(lane % 4) {}
};
// The compiler computes nothing of the lane's before this, to keep it in registers until it is used.
__device__ __forceinline__ void keep(Lane& at) {
    keep(at.warp);
    keep(at.lane);
    keep(at.row);
    keep(at.pair);
}

__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float low_half(unsigned x) { return from_bits(x << 16); }
__device__ __forceinline__ float high_half(unsigned x) { return from_bits(x & 0xffff0000u); }
// A bfloat16 or float32 as it lies in memory, and its value.
__device__ __forceinline__ unsigned load_scalar(const void* data, int64 i, bool is_bf16) {
    return is_bf16 ? load_16(static_cast<const bf16*>(data) + i) : load_32(static_cast<const float*>(data) + i);
}
__device__ __forceinline__ float scalar_value(unsigned bits, bool is_bf16) { return from_bits(is_bf16 ? bits << 16 : bits); }

// The two numbers of 16 bits that tensor cores take: float16 has 11 bits of numbers down to 2^-14, below 65520, bfloat16 has 8.
struct Bf16 {
    __device__ __forceinline__ static unsigned pack(float low, float high) { return pack_bf16(low, high); }
    __device__ __forceinline__ static float low(unsigned x) { return low_half(x); }
    __device__ __forceinline__ static float high(unsigned x) { return high_half(x); }
    __device__ __forceinline__ static void mma(float (&c)[4], const unsigned (&a)[4], const uint2& b) {
        mma_bf16(c, a, b.x, b.y);
    }
};
struct F16 {
    __device__ __forceinline__ static unsigned pack(float low, float high) { return pack_f16(low, high); }
    __device__ __forceinline__ static float low(unsigned x) { return low_f16(x); }
    __device__ __forceinline__ static float high(unsigned x) { return high_f16(x); }
    __device__ __forceinline__ static void mma(float (&c)[4], const unsigned (&a)[4], const uint2& b) {
        mma_f16(c, a, b.x, b.y);
    }
};
// x and y as sums of TERMS packed pairs.
template <class Number, int TERMS>
__device__ __forceinline__ void split(float x, float y, unsigned (&terms)[TERMS]) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        terms[term] = Number::pack(x, y);
        x -= Number::low(terms[term]);
        y -= Number::high(terms[term]);
    }
}

// Tensor cores cut each sum to float32 instead of rounding it, towards zero: what must keep float32's accuracy is summed in
// them from zero over few products, and added here.
__device__ __forceinline__ void add(float (&c)[4], const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += x[i];
}
template <class Number>
__device__ __forceinline__ void mma_rows(float (&c)[4], const uint4& x, const uint2& b) {
    const unsigned rows[4] = {x.x, x.y, x.z, x.w};
    Number::mma(c, rows, b);
}
// A [16, 16] by [16, 8] product of two sums of two float16 terms each, without that of the two small ones: the great
// ones' product, and the others', which may be one sum over many tiles.
__device__ __forceinline__ void mma_two_terms(float (&great)[4], float (&small)[4], const uint4 (&a)[2], const uint2 (&b)[2]) {
    mma_rows<F16>(great, a[0], b[0]);
    mma_rows<F16>(small, a[1], b[0]);
    mma_rows<F16>(small, a[0], b[1]);
}
// The B fragments of a C tile [16, 8], in terms.
template <class Number, int TERMS>
__device__ __forceinline__ void as_columns(const float (&c)[4], uint2 (&b)[TERMS]) {
    unsigned first[TERMS], second[TERMS];
    split<Number>(c[0], c[1], first);
    split<Number>(c[2], c[3], second);
#pragma unroll
    for (int term = 0; term < TERMS; ++term) b[term] = {transpose_b16(first[term]), transpose_b16(second[term])};
}
// The A fragments of a [16, 16] tile, of which c[n] are the C fragments of the column halves, in float16 terms.
template <int TERMS>
__device__ __forceinline__ void as_rows(const float (&c)[2][4], uint4 (&a)[TERMS]) {
    unsigned parts[4][TERMS];
#pragma unroll
    for (int x = 0; x < 4; ++x) split<F16>(c[x >> 1][(x & 1) * 2], c[x >> 1][(x & 1) * 2 + 1], parts[x]);
#pragma unroll
    for (int term = 0; term < TERMS; ++term) a[term] = {parts[0][term], parts[1][term], parts[2][term], parts[3][term]};
}

// 16-byte pieces of a row are stored in an order that depends on the row: ldmatrix then has no bank conflict.
__device__ __forceinline__ bf16* row_piece(bf16* rows, int row, int piece) {
    return rows + row * KEY_DIM + ((piece ^ (row & 7)) << 3);
}
// Where a lane reads of a tile of 16 rows, for the A fragments (a row's first 16 columns), and for the B fragments of the rows as
// columns: m[0], m[1] of rows 0..7, m[2], m[3] of rows 8..15.
__device__ __forceinline__ SharedAddress tile_rows(bf16* rows, int tile, const Lane& at) {
    return shared_address(row_piece(rows, tile * 16 + (at.lane & 15), at.lane >> 4));
}
__device__ __forceinline__ SharedAddress tile_columns(bf16* rows, int tile, const Lane& at) {
    return shared_address(row_piece(rows, tile * 16 + (at.lane & 7) + (at.lane >> 4) * 8, at.lane >> 3 & 1));
}
// The fragments of columns 16 step .. + 15, `bytes` (whole rows) further on: a row's size is a power of two, and it begins at a
// multiple of it, so one operation gives the place of a piece from that of the first.
__device__ __forceinline__ void load_step(unsigned (&m)[4], SharedAddress tile, int step, int bytes = 0) {
    load_matrix_x4(m, (tile ^ (step * 32u)) + bytes);
}
// The rows for a solve. SPREAD: each address from the start, a few instructions more that the compiler puts between the products.
// By what an H200 needs: for one slice of 128 nodes 6 % less time so, for whole heads 2 % more.
template <bool SPREAD>
struct SolveRows {
    SharedAddress row;
    int order, first;
    __device__ __forceinline__ SolveRows(bf16* rows, int tile, const Lane& at)
        : row(SPREAD ? shared_address(rows + (tile * 16 + (at.lane & 15)) * KEY_DIM) : tile_rows(rows, tile, at)),
          order(at.lane & 7),
          first(at.lane >> 4) {}
    __device__ __forceinline__ void load(unsigned (&m)[4], int step, int bytes = 0) const {
        if (SPREAD)
            load_matrix_x4(m, row + (((step * 2 + first) ^ order) << 4) + bytes);
        else
            load_step(m, row, step, bytes);
    }
};
