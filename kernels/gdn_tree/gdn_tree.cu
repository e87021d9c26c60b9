// Gated Delta Net on a token tree: one launch a layer verifies, with the previous step's accepted path entering the
// state on the way. docs/gdn.md derives it; tiled.py is the same algorithm in PyTorch.
//
// A block computes SLICE value columns of one value head of one request. U's columns do not depend on each other, so
// each warp owns 8 of them from the state to U, and the triangular solve runs without a barrier. Raw k and q enter the
// tensor cores as they are (bfloat16, exact); their norms are row factors, applied in float32:
//     u'_i = r_i b_i (v_i - r_i (e^{G_i} S k_i + sum_j e^{G_i - G_j} (k_j . k_i) u'_j)),  u'_i = r_i u_i, r_i = 1 / |k_i|
//     o_i  = s_i (e^{G_i} S q_i + sum_j e^{G_i - G_j} (k_j . q_i) u'_j),                  s_i = scale / |q_i|
//     S   <- e^{G_p} S + sum_j e^{G_p - G_j} u'_j k_j^T  over the accepted path that ends at p
// Precision: float32 operands are split. S into three bfloat16 terms for U (two for O), X and U into two tf32 terms
// each for the solve, Y and U into two bfloat16 terms for O, so that U and the state keep float32's accuracy.
//
// Compiled for one shape: GDN_TILES (16 nodes each), GDN_KEY_DIM, GDN_VALUE_DIM, GDN_SLICE, GDN_STATE_BF16,
// GDN_SHARED_LIMIT (bytes a block may use) and GDN_SHARED_BYTES (what dispatch.py computed; checked below).
//
// Fragments (PTX ISA, m16n8): lane l is row = l / 4, pair = l % 4. C holds [row][2 pair, 2 pair + 1] and the same of
// row + 8. B of k16 holds [k = 2 pair, 2 pair + 1, + 8, + 9][n = row]: the transpose of C, 8x8 by 8x8.

#ifndef GDN_TREE_ON_CPU
#include "intrinsics.cuh"
#endif

typedef unsigned short bf16;
typedef long long int64;

constexpr int TILES = GDN_TILES;
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
// Warps that share a tile of output rows, each with its part of the columns.
constexpr int PARTS = TILES * 8 <= WARPS ? 8 : TILES * 4 <= WARPS ? 4 : TILES * 2 <= WARPS ? 2 : 1;
constexpr int PART_COLUMNS = WARPS / PARTS;  // column tiles of 8
constexpr int ROW_GROUPS = WARPS / PARTS;
constexpr int PASSES = (TILES + ROW_GROUPS - 1) / ROW_GROUPS;
static_assert(PARTS == 1 || PASSES == 1, "warps that share a tile of q take one pass");

constexpr int K_BYTES = NODES * KEY_DIM * 2;
constexpr int LOWER_BYTES = TILES * (TILES - 1) / 2 * 1024;  // X below the diagonal, float32, negated
constexpr int X_BYTES = LOWER_BYTES + TILES * 1024;          // and (I + X)^-1 of the diagonal tiles
constexpr int U_BYTES = TILES * WARPS * 512;
constexpr int S_BYTES = K_STEPS * WARPS * 512;
constexpr int Q_BYTES = ROW_GROUPS * 16 * KEY_DIM * 2;
constexpr int PATH_BYTES = 16 * KEY_DIM * 2;
constexpr int VECTOR_BYTES = NODES * 4 * 4 + NODES * WORDS * 4 + TILES * 4;
constexpr int SOLVE_BYTES = X_BYTES > PATH_BYTES ? X_BYTES : PATH_BYTES;
constexpr int OUTPUT_BYTES = U_BYTES + S_BYTES;
// One area serves the commit, then the solve, then the output.
constexpr int AREA_BYTES = SOLVE_BYTES > OUTPUT_BYTES ? SOLVE_BYTES : OUTPUT_BYTES;
constexpr int LATE_AREA_BYTES = SOLVE_BYTES > OUTPUT_BYTES + Q_BYTES ? SOLVE_BYTES : OUTPUT_BYTES + Q_BYTES;
constexpr int EARLY_BYTES = K_BYTES + AREA_BYTES + Q_BYTES + VECTOR_BYTES;
constexpr int LATE_BYTES = K_BYTES + LATE_AREA_BYTES + VECTOR_BYTES;
constexpr bool EARLY_Q = EARLY_BYTES <= GDN_SHARED_LIMIT;  // q has memory of its own, or takes X's after the solve
constexpr int SHARED_BYTES = EARLY_Q ? EARLY_BYTES : LATE_BYTES;
static_assert(SHARED_BYTES == GDN_SHARED_BYTES, "dispatch.py computes another amount of shared memory");
// Blocks that a multiprocessor holds: two where memory and, without spills, registers allow it.
constexpr int BLOCKS = TILES <= 4 && THREADS <= 256 && 2 * (SHARED_BYTES + 1024) <= GDN_SHARED_LIMIT + 1024 ? 2 : 1;
static_assert(VALUE_DIM % SLICE == 0 && KEY_DIM % 64 == 0, "unsupported head dimensions");

struct Stash {
    float* u;           // [rows, value heads, nodes, VALUE_DIM]: u' of the last verify
    bf16* k;            // [2, rows, key heads, nodes, KEY_DIM]: raw k; the parity names the one to read
    float* g;           // [2, rows, value heads, nodes]: G
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
    int64 nodes, ancestor_words;
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

__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float low_half(unsigned x) { return from_bits(x << 16); }
__device__ __forceinline__ float high_half(unsigned x) { return from_bits(x & 0xffff0000u); }
__device__ __forceinline__ float read_scalar(const void* data, int64 i, bool is_bf16) {
    return is_bf16 ? from_bits(unsigned(static_cast<const bf16*>(data)[i]) << 16) : static_cast<const float*>(data)[i];
}

// x and y as sums of TERMS packed bfloat16 pairs.
template <int TERMS>
__device__ __forceinline__ void split_bf16(float x, float y, unsigned (&terms)[TERMS]) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        terms[term] = pack_bf16(x, y);
        x -= low_half(terms[term]);
        y -= high_half(terms[term]);
    }
}

// The 8x8 matrix whose C fragment is x, y: returns its transpose's fragment, in float32.
__device__ __forceinline__ void transpose_f32(float& x, float& y) {
    const unsigned a = __float_as_uint(x), b = __float_as_uint(y);
    const unsigned low = transpose_b16(__byte_perm(a, b, 0x5410)), high = transpose_b16(__byte_perm(a, b, 0x7632));
    x = from_bits(__byte_perm(low, high, 0x5410));
    y = from_bits(__byte_perm(low, high, 0x7632));
}

// A [16, 8] by [8, 8] product in three tf32 terms. The k order is a permutation, the same for both operands: k index
// `pair` is column 2 pair and k index `pair + 4` is column 2 pair + 1, so that C fragments serve as operands.
struct Tf32Columns {  // of the right-hand operand: rows 2 pair and 2 pair + 1, column `row`
    unsigned high[2], low[2];
    __device__ __forceinline__ Tf32Columns(float x, float y) {
        high[0] = __float_as_uint(x) & 0xffffe000u;
        high[1] = __float_as_uint(y) & 0xffffe000u;
        low[0] = __float_as_uint(x - from_bits(high[0]));
        low[1] = __float_as_uint(y - from_bits(high[1]));
    }
};
struct Tf32Tile {  // of the left-hand operand, from its C fragments
    unsigned high[4], low[4];
    __device__ __forceinline__ void split(float4 tile) {
        const float in[4] = {tile.x, tile.z, tile.y, tile.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = __float_as_uint(in[i]) & 0xffffe000u;
            low[i] = __float_as_uint(in[i] - from_bits(high[i]));
        }
    }
};
__device__ __forceinline__ void mma_term(float (&c)[4], const Tf32Tile& a, const Tf32Columns& b, int term) {
    if (term == 0) mma_tf32(c, a.low, b.high[0], b.high[1]);
    if (term == 1) mma_tf32(c, a.high, b.low[0], b.low[1]);
    if (term == 2) mma_tf32(c, a.high, b.high[0], b.high[1]);
}

// 16-byte pieces of a row are stored in an order that depends on the row: ldmatrix then has no bank conflict.
__device__ __forceinline__ bf16* row_piece(bf16* rows, int row, int piece) {
    return rows + row * KEY_DIM + ((piece ^ (row & 7)) << 3);
}
// The A fragment of rows 16 tile .. + 15, columns 16 step .. + 15.
__device__ __forceinline__ void load_rows(unsigned (&m)[4], bf16* rows, int tile, int step, const Lane& at) {
    load_matrix_x4(m, row_piece(rows, tile * 16 + (at.lane & 15), step * 2 + (at.lane >> 4)));
}
// The B fragments of the same rows as columns: m[0], m[1] of rows 0..7, m[2], m[3] of rows 8..15.
__device__ __forceinline__ void load_columns(unsigned (&m)[4], bf16* rows, int tile, int step, const Lane& at) {
    load_matrix_x4(m, row_piece(rows, tile * 16 + (at.lane & 7) + (at.lane >> 4) * 8, step * 2 + (at.lane >> 3 & 1)));
}

// --------------------------------------------------------------------------------------------------------- the state
// A warp's 8 value columns of one head's state, transposed: [KEY_DIM, 8] as C fragments, one for 16 rows.
typedef float StateColumns[K_STEPS][4];

__device__ __forceinline__ int64 state_offset(const State& state, int slot, int head, int column) {
    return slot * state.slot_stride + (int64(head) * VALUE_DIM + column) * KEY_DIM;
}
__device__ __forceinline__ void load_state(StateColumns& s, const State& state, int64 offset, const Lane& at) {
#pragma unroll
    for (int m = 0; m < K_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s[m][i] = read_scalar(state.data, offset + (2 * at.pair + (i & 1)) * KEY_DIM + m * 16 + at.row + (i >> 1) * 8,
                                  GDN_STATE_BF16);
}
// Writes the columns, and leaves in s what the next reader will see.
__device__ __forceinline__ void store_state(StateColumns& s, const State& state, int64 offset, const Lane& at) {
#pragma unroll
    for (int m = 0; m < K_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64 to = offset + (2 * at.pair + (i & 1)) * KEY_DIM + m * 16 + at.row + (i >> 1) * 8;
            if (GDN_STATE_BF16) {
                const unsigned rounded = pack_bf16(s[m][i], 0.0f);
                static_cast<bf16*>(state.data)[to] = static_cast<bf16>(rounded);
                s[m][i] = low_half(rounded);
            } else {
                static_cast<float*>(state.data)[to] = s[m][i];
            }
        }
}

// What a request's row has pending. The path's first 32 nodes are loaded with the rest, a node a lane.
struct Pending {
    int row, length, parity, first;
    const int* path;
    __device__ __forceinline__ Pending(const Stash& stash, int row, const Lane& at) : row(row), length(0) {
        if (row < 0) return;
        length = stash.length[row];
        parity = stash.parity[row];
        path = stash.path + row * stash.path_stride;
        first = at.lane < stash.path_stride ? path[at.lane] : 0;
    }
    // The path's j-th node, for all lanes of the warp at once; any node beyond the path's end.
    __device__ __forceinline__ int node(int j) const {
        const int node = __shfl_sync(0xffffffffu, first, j & 31);
        return j < 32 ? (j < length ? node : 0) : path[j < length ? j : 0];
    }
};

// Adds the pending path's nodes to a warp's columns. All threads of the block call it.
__device__ __forceinline__ void commit_path(StateColumns& s, const Pending& pending, const Stash& stash, const Heads& heads,
                                            int layer, int head, int column, bf16* path_k, const Lane& at) {
    const int key_head = head / int(heads.group), row = pending.row, length = pending.length;
    const int64 buffer = int64(pending.parity) * stash.rows + row;
    const float* g = stash.g + layer * stash.layer_g + (buffer * heads.value_heads + head) * stash.nodes;
    const bf16* k = stash.k + layer * stash.layer_k + (buffer * heads.key_heads + key_head) * stash.nodes * KEY_DIM;
    const float* u = stash.u + layer * stash.layer_u +
                     (int64(row) * heads.value_heads + head) * stash.nodes * VALUE_DIM + column + at.row;
    const float last = g[pending.node(length - 1)];
    const float decay = __expf(last);
#pragma unroll
    for (int m = 0; m < K_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][i] *= decay;
    for (int start = 0; start < length; start += 16) {
        for (int i = threadIdx.x; i < 16 * ROW_CHUNKS; i += THREADS) {
            const int j = start + i / ROW_CHUNKS, piece = i % ROW_CHUNKS, node = pending.node(j);
            uint4 value = {0, 0, 0, 0};
            if (j < length) value = *reinterpret_cast<const uint4*>(k + int64(node) * KEY_DIM + piece * 8);
            *reinterpret_cast<uint4*>(row_piece(path_k, i / ROW_CHUNKS, piece)) = value;
        }
        float weighted[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = start + 2 * at.pair + (i & 1) + (i >> 1) * 8;
            const int node = pending.node(j);
            weighted[i] = j < length ? __expf(last - g[node]) * u[int64(node) * VALUE_DIM] : 0.0f;
        }
        unsigned first[3], second[3];
        split_bf16(weighted[0], weighted[1], first);
        split_bf16(weighted[2], weighted[3], second);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < K_STEPS; ++m) {
            unsigned keys[4];
            load_matrix_x4_transposed(
                keys, row_piece(path_k, (at.lane & 7) + (at.lane >> 4) * 8, m * 2 + (at.lane >> 3 & 1)));
#pragma unroll
            for (int term = 2; term >= 0; --term) mma_bf16(s[m], keys, first[term], second[term]);
        }
        __syncthreads();
    }
}

// --------------------------------------------------------------------------------------------- phases of the verify
struct Shared {
    bf16* k;        // [NODES][KEY_DIM], pieces permuted
    float4* lower;  // -X below the diagonal: tile (i, j) at i (i - 1) / 2 + j, its C fragments as two float4 a lane
    float* inverse; // [TILES][16][16]
    uint4* u;       // B fragments of U: [tile][column tile][lane], two bfloat16 terms
    uint4* s;       // B fragments of S: [step][column tile][lane], two bfloat16 terms
    bf16* q;        // [ROW_GROUPS][16][KEY_DIM], pieces permuted
    float *own_g, *g, *beta, *norm;
    unsigned *bits, *tiles;
    __device__ Shared(unsigned char* base) {
        k = reinterpret_cast<bf16*>(base);
        unsigned char* area = base + K_BYTES;
        lower = reinterpret_cast<float4*>(area);
        inverse = reinterpret_cast<float*>(area + LOWER_BYTES);
        u = reinterpret_cast<uint4*>(area);
        s = reinterpret_cast<uint4*>(area + U_BYTES);
        q = reinterpret_cast<bf16*>(area + (EARLY_Q ? AREA_BYTES : OUTPUT_BYTES));
        own_g = reinterpret_cast<float*>(base + SHARED_BYTES - VECTOR_BYTES);
        g = own_g + NODES;
        beta = g + NODES;
        norm = beta + NODES;
        bits = reinterpret_cast<unsigned*>(norm + NODES);
        tiles = bits + NODES * WORDS;
    }
};

// This warp's tile of output rows in the given pass, or -1. A tile costs as much as its number: of the groups that share
// a scheduler (four apart) one takes a light tile and one a heavy one, and the next pass reverses the order.
__device__ __forceinline__ int output_tile(int pass, int tiles, const Lane& at) {
    const int group = at.warp / PARTS, half = ROW_GROUPS / 2;
    const int order = group < half ? group : ROW_GROUPS + half - 1 - group;
    const int tile = pass * ROW_GROUPS + (pass & 1 ? ROW_GROUPS - 1 - order : order);
    return tile < tiles ? tile : -1;
}

__device__ __forceinline__ void fetch_q(const Shared& to, const VerifyArguments& in, int tile, int count, int key_head,
                                        const Lane& at) {
    if (tile >= 0)
        for (int i = at.warp % PARTS * 32 + at.lane; i < 16 * ROW_CHUNKS; i += 32 * PARTS) {
            const int row = i / ROW_CHUNKS, piece = i % ROW_CHUNKS, node = tile * 16 + row;
            const bool valid = node < count;
            const int64 token = int64(blockIdx.y) * in.nodes + (valid ? node : 0);
            copy_async_16(row_piece(to.q + at.warp / PARTS * 16 * KEY_DIM, row, piece),
                          in.q + token * in.q_token + key_head * in.q_head + piece * 8, valid);
        }
    copy_async_commit();
}

// Gates and ancestor bits of the nodes; bits beyond the node's own index are dropped, its own is set.
__device__ __forceinline__ void load_nodes(const Shared& to, const VerifyArguments& in, int count, int tiles, int head) {
    const float rate = expf(read_scalar(in.A_log, head, in.A_log_is_bf16));
    const float bias = read_scalar(in.dt_bias, head, in.dt_bias_is_bf16);
    for (int node = threadIdx.x; node < (tiles * 16 + 31) / 32 * 32; node += THREADS) {
        const bool real = node < count;
        const int64 token = int64(blockIdx.y) * in.nodes + (real ? node : 0);
        const float x = read_scalar(in.a, token * in.a_token + head, true) + bias;
        const float b = read_scalar(in.b, token * in.b_token + head, true);
        unsigned seen = 0;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            unsigned bits = real && word * 32 <= node ? in.ancestors[token * in.ancestor_words + word] : 0;
            if (real && node / 32 == word) bits = (bits & ((2u << (node & 31)) - 1)) | (1u << (node & 31));
            seen |= (bits & 0xffffu ? 1u : 0u) << (2 * word) | (bits >> 16 ? 2u : 0u) << (2 * word);
            if (node < tiles * 16) to.bits[node * WORDS + word] = bits;
        }
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, lanes);
        if (node >= tiles * 16) continue;
        if (node % 16 == 0) to.tiles[node / 16] = seen;
        const float softplus = x <= 20.0f ? log1pf(expf(x)) : x;
        to.own_g[node] = real ? -rate * softplus : 0.0f;
        to.beta[node] = real ? 1.0f / (1.0f + expf(-b)) : 0.0f;
    }
}

// Sums the decays along each node's path.
__device__ __forceinline__ void sum_paths(const Shared& at, int tiles) {
    for (int node = threadIdx.x; node < tiles * 16; node += THREADS) {
        float sum = 0.0f;
        for (int word = 0; word <= node / 32; ++word)
            for (unsigned bits = at.bits[node * WORDS + word]; bits; bits &= bits - 1)
                sum += at.own_g[word * 32 + __ffs(bits) - 1];
        at.g[node] = sum;
    }
}

// 1 / |k| of every node, four lanes a row.
__device__ __forceinline__ void key_norms(const Shared& at, int tiles, const Lane& lane) {
    for (int node = threadIdx.x / 4; node < tiles * 16; node += THREADS / 4) {
        float sum = 0.0f;
#pragma unroll
        for (int piece = 0; piece < ROW_CHUNKS / 4; ++piece) {
            const uint4 x = *reinterpret_cast<const uint4*>(row_piece(at.k, node, piece * 4 + lane.pair));
            const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum += low_half(words[i]) * low_half(words[i]);
                sum += high_half(words[i]) * high_half(words[i]);
            }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane.pair == 0) at.norm[node] = 1.0f / sqrtf(sum + 1e-6f);
    }
}

__device__ __forceinline__ bool has_bits(const Shared& at, int i, int j) { return at.tiles[i] >> j & 1; }

// Row i's 16 bits for the columns of tile j.
__device__ __forceinline__ unsigned tile_bits(const Shared& at, int node, int j) {
    return at.bits[node * WORDS + (j >> 1)] >> ((j & 1) * 16);
}

// Tile (i, j) of k k^T or q k^T, masked to ancestors and decayed: c[n] are the C fragments of its column halves.
template <bool STRICT>
__device__ __forceinline__ void decayed_product(float (&c)[2][4], const unsigned (&rows)[K_STEPS][4], const Shared& at,
                                                int i, int j, const Lane& lane) {
    float parts[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        unsigned columns[4];
        load_columns(columns, at.k, j, step, lane);
        mma_bf16(parts[step & 1][0], rows[step], columns[0], columns[1]);
        mma_bf16(parts[step & 1][1], rows[step], columns[2], columns[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int node = i * 16 + lane.row + half * 8;
        unsigned bits = tile_bits(at, node, j);
        if (STRICT && i == j) bits &= ~(1u << (node & 15));
        const float g = at.g[node];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int column = n * 8 + 2 * lane.pair + x;
                const float value = parts[0][n][half * 2 + x] + parts[1][n][half * 2 + x];
                const float decay = __expf(g - at.g[j * 16 + column]);
                c[n][half * 2 + x] = bits >> column & 1 ? value * decay : 0.0f;
            }
    }
}

// X = beta r^2 e^{G_i - G_j} (k_i . k_j), tile by tile: -X below the diagonal, X on it.
__device__ __forceinline__ void build_x(const Shared& at, int tiles, const Lane& lane) {
    const int total = tiles * (tiles + 1) / 2;
    int i = 0, first = 0, loaded = -1;  // tiles are numbered row by row; `first` is row i's first
    unsigned rows[K_STEPS][4];
    for (int number = total * lane.warp / WARPS; number < total * (lane.warp + 1) / WARPS; ++number) {
        while (first + i + 1 <= number) first += ++i;
        const int j = number - first;
        if (!has_bits(at, i, j)) {  // its neighbour's bits may have the solve read it
#pragma unroll
            for (int n = 0; n < 2; ++n) at.lower[((i * (i - 1) / 2 + j) * 2 + n) * 32 + lane.lane] = {0.0f, 0.0f, 0.0f, 0.0f};
            continue;
        }
        if (loaded != i) {
            loaded = i;
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) load_rows(rows[step], at.k, i, step, lane);
        }
        float c[2][4];
        decayed_product<true>(c, rows, at, i, j, lane);
        const int upper = i * 16 + lane.row, under = upper + 8;
        const float f0 = at.beta[upper] * at.norm[upper] * at.norm[upper];
        const float f1 = at.beta[under] * at.norm[under] * at.norm[under];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (i == j) {
                float* tile = at.inverse + i * 256 + n * 8 + 2 * lane.pair;
                *reinterpret_cast<float2*>(tile + lane.row * 16) = {f0 * c[n][0], f0 * c[n][1]};
                *reinterpret_cast<float2*>(tile + (lane.row + 8) * 16) = {f1 * c[n][2], f1 * c[n][3]};
            } else {
                at.lower[((i * (i - 1) / 2 + j) * 2 + n) * 32 + lane.lane] = {-f0 * c[n][0], -f0 * c[n][1],
                                                                              -f1 * c[n][2], -f1 * c[n][3]};
            }
        }
    }
}

// Diagonal tiles: X to (I + X)^-1 in place, by forward substitution, a lane a column.
__device__ __forceinline__ void invert_diagonal(const Shared& at, int tiles, const Lane& lane) {
    const int column = lane.lane & 15;
    for (int i = lane.warp; i < tiles; i += WARPS) {
        float* x = at.inverse + i * 256;
        float t[16];
#pragma unroll
        for (int row = 0; row < 16; ++row) {
            float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < row; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(x + row * 16 + j);
                const float coefficients[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (j + n < row) sum -= coefficients[n] * t[j + n];
            }
            t[row] = sum;
        }
        __syncwarp();
        if (lane.lane < 16)
#pragma unroll
            for (int row = 0; row < 16; ++row) x[row * 16 + column] = t[row];
    }
}

// The warp's columns of r b (v - r e^G S k): the right-hand side of the solve.
__device__ __forceinline__ void right_hand_side(float (&r)[TILES][4], const StateColumns& s, const unsigned (&v)[TILES][2],
                                                uint4 (&state_terms)[K_STEPS], const Shared& at, int tiles,
                                                const Lane& lane) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int x = 0; x < 4; ++x) r[i][x] = 0.0f;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        unsigned first[3], second[3];
        split_bf16(s[step][0], s[step][1], first);
        split_bf16(s[step][2], s[step][3], second);
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            first[term] = transpose_b16(first[term]);
            second[term] = transpose_b16(second[term]);
        }
        state_terms[step] = {first[0], second[0], first[1], second[1]};
        // Groups of tiles keep several products in flight; a group's rows beyond `tiles` are not used.
#pragma unroll
        for (int start = 0; start < TILES; start += 4)
            if (start < tiles) {
                unsigned rows[4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (start + i < TILES) load_rows(rows[i], at.k, start + i, step, lane);
#pragma unroll
                for (int term = GDN_STATE_BF16 ? 0 : 2; term >= 0; --term)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (start + i < TILES) mma_bf16(r[start + i], rows[i], first[term], second[term]);
            }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        if (i < tiles)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int node = i * 16 + lane.row + half * 8;
                const float norm = at.norm[node], factor = norm * __expf(at.g[node]), beta = norm * at.beta[node];
                r[i][half * 2] = beta * (low_half(v[i][half]) - factor * r[i][half * 2]);
                r[i][half * 2 + 1] = beta * (high_half(v[i][half]) - factor * r[i][half * 2 + 1]);
            }
}

// The warp's columns of U by forward substitution over tiles, each result taken out of all later rows at once.
// u_out: column 2 pair of the warp's columns, node 0, in the stash, or null.
__device__ __forceinline__ void solve(uint4 (&u_terms)[TILES], float (&r)[TILES][4], const Shared& at, int count, int tiles,
                                      float* u_out, const Lane& lane) {
    const unsigned row_tiles = lane.lane < tiles ? at.tiles[lane.lane] : 0;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
        if (j < tiles) {
            const unsigned below = __ballot_sync(0xffffffffu, row_tiles >> j & 1);  // bit i: tile (i, j) has bits
            float parts[2][4] = {};
            Tf32Tile inverse[2];
            float x[2][2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float* tile = at.inverse + j * 256 + n * 8 + 2 * lane.pair;
                const float2 top = *reinterpret_cast<const float2*>(tile + lane.row * 16);
                const float2 bottom = *reinterpret_cast<const float2*>(tile + (lane.row + 8) * 16);
                inverse[n].split(make_float4(top.x, top.y, bottom.x, bottom.y));
                x[n][0] = r[j][n * 2];
                x[n][1] = r[j][n * 2 + 1];
                transpose_f32(x[n][0], x[n][1]);
            }
            const Tf32Columns right[2] = {{x[0][0], x[0][1]}, {x[1][0], x[1][1]}};
#pragma unroll
            for (int term = 0; term < 3; ++term)
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_term(parts[n], inverse[n], right[n], term);
            float u[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) u[i] = parts[0][i] + parts[1][i];
            if (u_out) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int node = j * 16 + lane.row + half * 8;
                    if (node < count)
                        *reinterpret_cast<float2*>(u_out + int64(node) * VALUE_DIM) = {u[half * 2], u[half * 2 + 1]};
                }
            }
            transpose_f32(u[0], u[1]);
            transpose_f32(u[2], u[3]);
            unsigned first[2], second[2];
            split_bf16(u[0], u[1], first);
            split_bf16(u[2], u[3], second);
            u_terms[j] = {first[0], second[0], first[1], second[1]};
            const Tf32Columns columns[2] = {{u[0], u[1]}, {u[2], u[3]}};
            // Pairs of rows, and a sum of their own for the second halves, keep several products in flight.
#pragma unroll
            for (int start = j + 1; start < TILES; start += 2)
                if (below >> start & 3) {
                    float sums[2][4] = {};
                    Tf32Tile tiles_of[2][2];
#pragma unroll
                    for (int i = start; i < start + 2 && i < TILES; ++i)
#pragma unroll
                        for (int n = 0; n < 2; ++n)
                            tiles_of[i - start][n].split(at.lower[((i * (i - 1) / 2 + j) * 2 + n) * 32 + lane.lane]);
#pragma unroll
                    for (int term = 0; term < 3; ++term)
#pragma unroll
                        for (int i = start; i < start + 2 && i < TILES; ++i) {
                            mma_term(r[i], tiles_of[i - start][0], columns[0], term);
                            mma_term(sums[i - start], tiles_of[i - start][1], columns[1], term);
                        }
#pragma unroll
                    for (int i = start; i < start + 2 && i < TILES; ++i)
#pragma unroll
                        for (int x = 0; x < 4; ++x) r[i][x] += sums[i - start][x];
                }
        }
}

// Output rows of one tile: e^G S q + Y U, in the way of flash attention (Y's tile never leaves the registers).
__device__ __forceinline__ void write_tile(const VerifyArguments& in, const Shared& at, const unsigned (&q)[K_STEPS][4],
                                           int i, int count, int head, int column, const Lane& lane) {
    const int part = lane.warp % PARTS * PART_COLUMNS;
    float out[PART_COLUMNS][4] = {};
    float squares[2] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            squares[x & 1] += low_half(q[step][x]) * low_half(q[step][x]);
            squares[x & 1] += high_half(q[step][x]) * high_half(q[step][x]);
        }
        uint4 s[PART_COLUMNS];
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n) s[n] = at.s[(step * WARPS + part + n) * 32 + lane.lane];
        if (!GDN_STATE_BF16)
#pragma unroll
            for (int n = 0; n < PART_COLUMNS; ++n) mma_bf16(out[n], q[step], s[n].z, s[n].w);
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n) mma_bf16(out[n], q[step], s[n].x, s[n].y);
    }
    const float decay[2] = {__expf(at.g[i * 16 + lane.row]), __expf(at.g[i * 16 + lane.row + 8])};
#pragma unroll
    for (int n = 0; n < PART_COLUMNS; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) out[n][x] *= decay[x >> 1];
    for (unsigned left = at.tiles[i]; left; left &= left - 1) {
        const int j = __ffs(left) - 1;
        float c[2][4];
        decayed_product<false>(c, q, at, i, j, lane);
        unsigned high[4], low[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            unsigned terms[2];
            split_bf16(c[x >> 1][(x & 1) * 2], c[x >> 1][(x & 1) * 2 + 1], terms);
            high[x] = terms[0];
            low[x] = terms[1];
        }
        uint4 u[PART_COLUMNS];
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n) u[n] = at.u[(j * WARPS + part + n) * 32 + lane.lane];
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n) mma_bf16(out[n], low, u[n].x, u[n].y);
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n) mma_bf16(out[n], high, u[n].z, u[n].w);
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n) mma_bf16(out[n], high, u[n].x, u[n].y);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = squares[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float factor = float(in.scale) / sqrtf(sum + 1e-6f);
        const int node = i * 16 + lane.row + half * 8;
        if (node >= count) continue;
        bf16* to = in.out + ((int64(blockIdx.y) * in.nodes + node) * in.heads.value_heads + head) * VALUE_DIM + column;
#pragma unroll
        for (int n = 0; n < PART_COLUMNS; ++n)
            *reinterpret_cast<unsigned*>(to + (part + n) * 8 + 2 * lane.pair) =
                pack_bf16(factor * out[n][half * 2], factor * out[n][half * 2 + 1]);
    }
}

// Rows of padding, and of requests left out, are zero.
__device__ __forceinline__ void write_zeros(const VerifyArguments& in, int from, int head, int column) {
    for (int i = threadIdx.x; i < (int(in.nodes) - from) * (SLICE / 2); i += THREADS) {
        const int64 token = int64(blockIdx.y) * in.nodes + from + i / (SLICE / 2);
        reinterpret_cast<unsigned*>(in.out + (token * in.heads.value_heads + head) * VALUE_DIM + column)[i % (SLICE / 2)] = 0;
    }
}

// Grid [value heads * SLICES, R].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_tree_verify(const VerifyArguments in) {
    DYNAMIC_SHARED(memory);
    const Shared at(memory);
    const Lane lane;
    const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, request = blockIdx.y;
    const int group = int(in.heads.group), key_head = head / group;
    const int column = slice * SLICE, warp_column = column + lane.warp * 8;
    const int64 first_token = int64(request) * in.nodes;

    const int slot = in.state.slots[request], row = in.stash.row ? in.stash.row[request] : -1;
    const int count = min(in.node_count ? in.node_count[request] : int(in.nodes), int(in.nodes));
    write_zeros(in, slot < 0 ? 0 : count, head, column);
    if (slot < 0 || count <= 0) return;
    const int tiles = (count + 15) / 16;

    // Everything that global memory must deliver is asked for before anything waits.
    for (int i = threadIdx.x; i < tiles * 16 * ROW_CHUNKS; i += THREADS) {
        const int node = i / ROW_CHUNKS, piece = i % ROW_CHUNKS;
        const bool valid = node < count;
        copy_async_16(row_piece(at.k, node, piece),
                      in.k + (first_token + (valid ? node : 0)) * in.k_token + key_head * in.k_head + piece * 8, valid);
    }
    copy_async_commit();
    if (EARLY_Q) fetch_q(at, in, output_tile(0, tiles, lane), count, key_head, lane);
    const Pending pending(in.stash, row, lane);
    StateColumns s;
    const int64 offset = state_offset(in.state, slot, head, warp_column);
    load_state(s, in.state, offset, lane);
    unsigned v[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int node = i * 16 + lane.row + half * 8;
            v[i][half] = 0;
            if (node < count)
                v[i][half] = *reinterpret_cast<const unsigned*>(in.v + (first_token + node) * in.v_token +
                                                                head * in.v_head + warp_column + 2 * lane.pair);
        }
    load_nodes(at, in, count, tiles, head);
    if (pending.length > 0) {
        commit_path(s, pending, in.stash, in.heads, 0, head, warp_column, reinterpret_cast<bf16*>(at.lower), lane);
        store_state(s, in.state, offset, lane);
    }
    copy_async_wait<EARLY_Q ? 1 : 0>();
    __syncthreads();
    sum_paths(at, tiles);
    key_norms(at, tiles, lane);
    __syncthreads();

    build_x(at, tiles, lane);
    float* u_out = nullptr;
    if (row >= 0) {
        const Stash& stash = in.stash;
        const int64 buffer = int64(1 - pending.parity) * stash.rows + row;
        u_out = stash.u + (int64(row) * in.heads.value_heads + head) * stash.nodes * VALUE_DIM + warp_column + 2 * lane.pair;
        if (slice == 0)
            for (int node = threadIdx.x; node < count; node += THREADS)
                stash.g[(buffer * in.heads.value_heads + head) * stash.nodes + node] = at.g[node];
        if (slice == 0 && head % group == 0) {
            bf16* to = stash.k + (buffer * in.heads.key_heads + key_head) * stash.nodes * KEY_DIM;
            for (int i = threadIdx.x; i < count * ROW_CHUNKS; i += THREADS)
                reinterpret_cast<uint4*>(to)[i] =
                    *reinterpret_cast<const uint4*>(row_piece(at.k, i / ROW_CHUNKS, i % ROW_CHUNKS));
        }
    }
    __syncthreads();
    invert_diagonal(at, tiles, lane);
    float r[TILES][4];
    uint4 state_terms[K_STEPS], u_terms[TILES];
    right_hand_side(r, s, v, state_terms, at, tiles, lane);
    __syncthreads();
    solve(u_terms, r, at, count, tiles, u_out, lane);
    __syncthreads();

    if (!EARLY_Q) fetch_q(at, in, output_tile(0, tiles, lane), count, key_head, lane);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        if (i < tiles) at.u[(i * WARPS + lane.warp) * 32 + lane.lane] = u_terms[i];
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) at.s[(step * WARPS + lane.warp) * 32 + lane.lane] = state_terms[step];
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        const int tile = output_tile(pass, tiles, lane);
        unsigned q[K_STEPS][4];
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) load_rows(q[step], at.q + lane.warp / PARTS * 16 * KEY_DIM, 0, step, lane);
        __syncwarp();  // with several passes a warp has its q to itself
        if (pass + 1 < PASSES) fetch_q(at, in, output_tile(pass + 1, tiles, lane), count, key_head, lane);
        if (tile >= 0) write_tile(in, at, q, tile, count, head, column, lane);
        copy_async_wait<0>();
        __syncwarp();
    }
}

// Grid [value heads * SLICES, R, layers]: the accepted path's nodes into the state of `destination`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn_tree_flush(const FlushArguments in) {
    DYNAMIC_SHARED(memory);
    const Lane lane;
    const int head = blockIdx.x / SLICES, request = blockIdx.y, layer = blockIdx.z;
    const int column = blockIdx.x % SLICES * SLICE + lane.warp * 8;
    const int slot = in.state.slots[request], destination = in.destination[request], row = in.stash.row[request];
    if (slot < 0 || destination < 0 || row < 0) return;
    Pending pending(in.stash, row, lane);
    if (in.length) pending.length = min(pending.length, in.length[request]);
    if (pending.length <= 0 && slot == destination) return;
    State state = in.state;
    const int64 bytes = GDN_STATE_BF16 ? 2 : 4;
    state.data = static_cast<unsigned char*>(state.data) + layer * state.layer_stride * bytes;
    StateColumns s;
    load_state(s, state, state_offset(state, slot, head, column), lane);
    if (pending.length > 0)
        commit_path(s, pending, in.stash, in.heads, layer, head, column, reinterpret_cast<bf16*>(memory), lane);
    store_state(s, state, state_offset(state, destination, head, column), lane);
}
