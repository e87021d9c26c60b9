// Gated Delta Net on a token tree: one launch a layer verifies, with the previous step's accepted path entering the
// state on the way. docs/gdn.md derives it; tiled.py is the same algorithm in PyTorch.
//
// A block computes SLICE value columns of one value head of one request, or all of them, SLICE at a time, where there are more
// blocks than run at once. The columns of U and O do not depend on each other, so each warp owns 8 of them from the state to the
// output; warps meet only to make X and Y, the two matrices over pairs of nodes, in panels of row tiles. Raw k and q enter the
// tensor cores as they are (bfloat16, exact); their norms are factors, applied in float32:
//     u_i = b_i (v_i - e^{G_i} r_i S k_i - sum_j e^{G_i - G_j} r_i r_j (k_j . k_i) u_j),  r_i = 1 / |k_i|
//     o_i = scale s_i (e^{G_i} S q_i + sum_j e^{G_i - G_j} r_j (k_j . q_i) u_j),          s_i = 1 / |q_i|
//     S  <- e^{G_p} S + sum_j e^{G_p - G_j} u'_j k_j^T  over the accepted path that ends at p, u'_j = r_j u_j
// Precision: float32 operands are sums of terms. S has three bfloat16 terms for U and two for O. X, the diagonal inverses and U
// have two float16 terms (22 bits) for U; Y, and U for it, one. float16's range is enough: no element of X, Y or the inverses
// is above 1, and U has a bound, so that powers of two bring them where it has all its digits. What U depends on is summed in
// tensor cores over few products only (`add`), but for products of small terms, so that U and the state keep float32's
// accuracy. G is summed in float64 and kept as two floats.
//
// Compiled for one shape: GDN_TILES (16 nodes each), GDN_PANEL (row tiles of X and Y that shared memory holds at a
// time), GDN_KEY_DIM, GDN_VALUE_DIM, GDN_SLICE, GDN_STATE_BF16, GDN_SHARED_LIMIT (bytes a block may use) and
// GDN_SHARED_BYTES (what cuda_kernel.py computed; checked below).
//
// Fragments (PTX ISA, m16n8k16): lane l is row = l / 4, pair = l % 4. C holds [row][2 pair, 2 pair + 1] and the same of
// row + 8. A holds C's elements of two 8-column tiles side by side, packed in pairs. B holds [k = 2 pair, 2 pair + 1, + 8,
// + 9][n = row]: the transpose of C, 8x8 by 8x8.

#include "layout.cuh"
#include "state.cuh"

struct Shared {
    bf16 *k, *q;           // [NODES][KEY_DIM], pieces permuted
    uint4* tiles;          // the panel's, A fragments: [tile][-X great, -X small, Y][lane]; (I + X)^-1 - I for a diagonal's -X
    unsigned char* state;  // the block's columns
    double* sums;          // for each four nodes the sums of g over their subsets, [16]
    bf16* v;               // [NODES][SLICE], pieces permuted; not where OVERLAID
    PathNodes path;
    float2* g;  // log2(e) G as the sum of two floats
    float *beta, *norm, *q_norm;
    unsigned *bits, *row_tiles;  // ancestor bits, and the tiles of a row tile that have any
    __device__ Shared(unsigned char* base) : path(base + SHARED_BYTES - VECTOR_BYTES - PATH_BYTES) {
        k = reinterpret_cast<bf16*>(base);
        q = reinterpret_cast<bf16*>(base + ROWS_BYTES);
        state = base + 2 * ROWS_BYTES;
        tiles = reinterpret_cast<uint4*>(base + TILES_AT);
        sums = reinterpret_cast<double*>(state + STATE_BYTES);
        v = reinterpret_cast<bf16*>(state + STATE_BYTES + SUMS_BYTES);
        g = reinterpret_cast<float2*>(base + SHARED_BYTES - VECTOR_BYTES);
        beta = reinterpret_cast<float*>(g + NODES);
        norm = beta + NODES;
        q_norm = norm + NODES;
        bits = reinterpret_cast<unsigned*>(q_norm + NODES);
        row_tiles = bits + NODES * WORDS;
    }
};

__device__ __forceinline__ float decay_between(const float2& later, const float2& earlier) {
    return exp2_approx((later.x - earlier.x) + (later.y - earlier.y));
}

// All rows of k and q, zero beyond the last node. A loop: the loads before it are not moved behind its copies.
__device__ __forceinline__ void fetch_rows(const Shared& at, const VerifyArguments& in, int64 first_token, int key_head) {
    constexpr int AT_ONCE = THREADS / ROW_CHUNKS;
    const int piece = threadIdx.x % ROW_CHUNKS;
    int node = threadIdx.x / ROW_CHUNKS;
    const bf16* k = in.k + (first_token + node) * in.k_token + key_head * in.k_head + piece * 8;
    const bf16* q = in.q + (first_token + node) * in.q_token + key_head * in.q_head + piece * 8;
    const int swizzled = row_piece(at.k, node, piece) - at.k;
    bf16 *to_k = at.k + swizzled, *to_q = at.q + swizzled;
#pragma unroll 1
    for (; node < NODES; node += AT_ONCE) {
        copy_async_16(to_k, k, node < in.nodes);
        copy_async_16(to_q, q, node < in.nodes);
        k += AT_ONCE * in.k_token;
        q += AT_ONCE * in.q_token;
        to_k += AT_ONCE * KEY_DIM;
        to_q += AT_ONCE * KEY_DIM;
    }
}
// Zero in place of the rows of k and q from `count` on, which this thread has copied.
__device__ __forceinline__ void clear_rows(const Shared& at, int count, int tiles) {
    const int piece = threadIdx.x % ROW_CHUNKS;
#pragma unroll 1
    for (int node = threadIdx.x / ROW_CHUNKS; node < tiles * 16; node += THREADS / ROW_CHUNKS)
        if (node >= count)
            *reinterpret_cast<uint4*>(row_piece(at.k, node, piece)) = *reinterpret_cast<uint4*>(row_piece(at.q, node, piece)) =
                {0, 0, 0, 0};
}

__device__ __forceinline__ int value_place(int node, int piece) {
    return node * SLICE + ((piece ^ (node & (min(SLICE / 8, 8) - 1))) << 3);
}
__device__ __forceinline__ void fetch_values(bf16* to, const bf16* from, int64 token_stride, int nodes) {
    const int first = threadIdx.x / (SLICE / 8), piece = threadIdx.x % (SLICE / 8);
    from += first * token_stride + piece * 8;
#pragma unroll
    for (int start = 0; start < NODES; start += 32)
        if (NODES % 32 == 0 || start + first < NODES)
            copy_async_16(to + value_place(start + first, piece), from + start * token_stride, start + first < nodes);
}
// v of a node of row tile `i`, columns 2 pair and 2 pair + 1 of the warp.
__device__ __forceinline__ unsigned load_value(const bf16* from, int i, int half, const Lane& at) {
    return *reinterpret_cast<const unsigned*>(from + value_place(at.row, at.warp) + 2 * at.pair + (i * 16 + half * 8) * SLICE);
}

// What the gates and the tree of a thread's nodes are computed from, on its way.
struct NodeInputs {
    static constexpr int EACH = (WORDS * 32 + THREADS - 1) / THREADS;
    unsigned A_log, dt_bias, a[EACH], b[EACH], bits[EACH][WORDS];
    __device__ __forceinline__ NodeInputs(const VerifyArguments& in, int head) {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int node = n * THREADS + threadIdx.x;
            const int64 token = blockIdx.y * in.nodes + node;
            a[n] = b[n] = 0;
            if (node < in.nodes) {
                a[n] = load_16(in.a + token * in.a_token + head);
                b[n] = load_16(in.b + token * in.b_token + head);
            }
            const int* words = in.ancestors + token * in.ancestor_words;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                bits[n][word] = 0;
                if (node < in.nodes && word * 32 <= node) bits[n][word] = load_32(words + word);
            }
        }
        A_log = load_scalar(in.A_log, head, in.A_log_is_bf16);
        dt_bias = load_scalar(in.dt_bias, head, in.dt_bias_is_bf16);
    }
};

// Gates and ancestor bits; bits beyond the node's own index are dropped, its own is set.
__device__ __forceinline__ void store_nodes(const Shared& to, const NodeInputs& inputs, const VerifyArguments& in, int count,
                                            const Lane& at) {
    const float rate = expf(scalar_value(inputs.A_log, in.A_log_is_bf16));
    const float bias = scalar_value(inputs.dt_bias, in.dt_bias_is_bf16);
#pragma unroll
    for (int n = 0; n < NodeInputs::EACH; ++n) {
        const int node = n * THREADS + threadIdx.x;
        if (node >= WORDS * 32) break;
        const bool real = node < count;
        unsigned seen = 0;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            unsigned bits = real ? inputs.bits[n][word] : 0;
            if (real && node / 32 == word) bits = (bits & ((2u << (node & 31)) - 1)) | (1u << (node & 31));
            seen |= (bits & 0xffffu ? 1u : 0u) << (2 * word) | (bits >> 16 ? 2u : 0u) << (2 * word);
            if (node < NODES) to.bits[node * WORDS + word] = bits;
        }
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, lanes);
        if (node % 16 == 0 && node < NODES) to.row_tiles[node / 16] = seen;
        const float x = low_half(inputs.a[n]) + bias, b = low_half(inputs.b[n]);
        const float softplus = x <= 20.0f ? log1pf(expf(x)) : x;
        const float own = real ? -rate * softplus : 0.0f;
        if (node < NODES) to.beta[node] = real ? 1.0f / (1.0f + expf(-b)) : 0.0f;
        double g[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) g[i] = double(__shfl_sync(0xffffffffu, own, (at.lane & ~3) + i));
        const double upper = (at.lane & 1 ? g[2] : 0.0) + (at.lane & 2 ? g[3] : 0.0);
        double* subsets = to.sums + node * 4;  // of node / 4, from (node % 4) * 4 on
        subsets[0] = upper;
        subsets[1] = upper + g[0];
        subsets[2] = upper + g[1];
        subsets[3] = upper + (g[0] + g[1]);
    }
}

// Sums the decays along each node's path: two lanes a node, each with every other word of its bits.
__device__ __forceinline__ void sum_paths(const Shared& at, int tiles) {
    for (int i = threadIdx.x; i < tiles * 32; i += THREADS) {
        const int node = i / 2;
        double sum = 0.0;
#pragma unroll
        for (int start = 0; start < WORDS; start += 2) {
            const int word = start + (i & 1);
            if (word <= node / 32) {
                const unsigned bits = at.bits[node * WORDS + word];
                double parts[2] = {};
#pragma unroll
                for (int four = 0; four < 8; ++four)
                    parts[four & 1] += at.sums[(word * 8 + four) * 16 + (bits >> (4 * four) & 15)];
                sum += parts[0] + parts[1];
            }
        }
        const float high = float(sum), low = float(sum - double(high));
        const float other_high = __shfl_xor_sync(0xffffffffu, high, 1), other_low = __shfl_xor_sync(0xffffffffu, low, 1);
        if (i & 1) continue;
        sum = ((double(high) + double(low)) + (double(other_high) + double(other_low))) * LOG2_E;
        const float whole = float(sum);
        at.g[node] = {whole, float(sum - double(whole))};
    }
}

// 1 / |row| of every node's k and q: a row tile's product with itself has the squares on its diagonal. A fragments of 8 rows are
// the B fragments of the same rows as columns.
__device__ __forceinline__ void row_norms(const Shared& at, int tiles, const Lane& lane) {
#pragma unroll 1
    for (int task = lane.warp; task < 2 * tiles; task += WARPS) {
        const int of_q = task & 1, tile = task >> 1;
        const SharedAddress rows_at = tile_rows(of_q ? at.q : at.k, tile, lane);
        float squares[2][4] = {};  // of the upper and the lower 8 rows
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            unsigned rows[4];
            load_step(rows, rows_at, step);
            float upper[4] = {}, lower[4] = {};
            mma_bf16(upper, rows, rows[0], rows[2]);
            mma_bf16(lower, rows, rows[1], rows[3]);
            add(squares[0], upper);
            add(squares[1], lower);
        }
        if (lane.row >> 1 == lane.pair)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = 1e-6f + (lane.row & 1 ? squares[half][half * 2 + 1] : squares[half][half * 2]);
                const float root = rsqrtf(sum);  // and one step of Newton's method
                (of_q ? at.q_norm : at.norm)[tile * 16 + half * 8 + lane.row] = root + 0.5f * root * (1.0f - sum * root * root);
            }
    }
}

// A power of two that takes numbers of at most `most` below 2^`exponent`, and not far.
__device__ __forceinline__ float scale_to(float most, int exponent) {
    const int biased = 253 + exponent - int(__float_as_uint(most) >> 23);
    return from_bits(unsigned(min(max(biased, 4), 227)) << 23);
}
__device__ __forceinline__ float inverse_of_power(float scale) { return from_bits((254u << 23) - __float_as_uint(scale)); }
// The greatest magnitude in the warp.
__device__ __forceinline__ float greatest_of_warp(float magnitude) {
    return from_bits(__reduce_max_sync(0xffffffffu, __float_as_uint(magnitude)));
}

// Tiles (i, j), j <= i, of all row tiles before row tile i.
__device__ __forceinline__ int tiles_before(int i) { return i * (i + 1) / 2; }
// Where the panel of row tiles that begins with `panel` ends: as many as its memory holds, in groups of ROWS.
__device__ __forceinline__ int panel_end(int panel, int tiles) {
    int end = min(panel + ROWS, tiles);
    while (end < tiles && tiles_before(min(end + ROWS, tiles)) - tiles_before(panel) <= PANEL_TILES) end = min(end + ROWS, tiles);
    return end;
}

// Tiles of X = beta e^{G_i - G_j} (k_i . k_j) and Y = e^{G_i - G_j} (q_i . k_j), k and q of norm 1, of a panel's rows: -X and
// Y as A fragments, and X of the diagonal as float32 for `invert_diagonal`. No element is above 1, nor one of (I + X)^-1.
__device__ __forceinline__ void build_panel(const Shared& at, int panel, int end, const Lane& lane) {
    const int before = tiles_before(panel), total = tiles_before(end) - before;
    // A warp's tiles follow each other in a row, whose fragments stay in registers where those are free.
    constexpr int KEPT = TILES <= 4 || OVERLAID ? 0 : K_STEPS;
    // Of warps w and w + 4, which share a part of the multiprocessor, one has the greater share (where OVERLAID that took 1 % longer).
    const int rank = OVERLAID ? lane.warp : lane.warp ^ (lane.warp >> 2 & 1);
    int i = panel, loaded = -1;
    unsigned keys[KEPT + 1][4], queries[KEPT + 1][4];
#pragma unroll 1
    for (int tile = total * rank / WARPS; tile < total * (rank + 1) / WARPS; ++tile) {
        while (tiles_before(i + 1) - before <= tile) ++i;
        const int j = tile + before - tiles_before(i);
        uint4* to = at.tiles + tile * 96 + lane.lane;
        if (!(at.row_tiles[i] >> j & 1)) {  // its neighbour's bits may have it read
            to[0] = to[32] = to[64] = {0, 0, 0, 0};
            continue;
        }
        const SharedAddress rows_at = tile_rows(at.k, i, lane), columns_at = tile_columns(at.k, j, lane);
        if (KEPT && loaded != i) {
            loaded = i;
#pragma unroll
            for (int step = 0; step < KEPT; ++step) load_step(keys[step], rows_at, step);
#pragma unroll
            for (int step = 0; step < KEPT; ++step) load_step(queries[step], rows_at, step, ROWS_BYTES);
        }
        float products[2][2][4] = {};  // k or q, column half
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            unsigned columns[4];
            load_step(columns, columns_at, step);
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                unsigned (&rows)[4] = of ? queries[min(step, KEPT)] : keys[min(step, KEPT)];
                if (step >= KEPT) load_step(rows, rows_at, step, of * ROWS_BYTES);
                mma_bf16(products[of][0], rows, columns[0], columns[1]);
                mma_bf16(products[of][1], rows, columns[2], columns[3]);
            }
        }
        float4 earlier[2];
        float2 norms[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            earlier[n] = *reinterpret_cast<const float4*>(at.g + j * 16 + n * 8 + 2 * lane.pair);
            norms[n] = *reinterpret_cast<const float2*>(at.norm + j * 16 + n * 8 + 2 * lane.pair);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int node = i * 16 + lane.row + half * 8;
            const unsigned bits = at.bits[node * WORDS + (j >> 1)] >> ((j & 1) * 16 + 2 * lane.pair);
            const float2 g = at.g[node];
            const float k_factor = (i == j ? 1.0f : -TILE_SCALE) * at.beta[node] * at.norm[node];
            const float q_factor = TILE_SCALE * at.q_norm[node];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int e = half * 2 + c;
                    const float between =
                        decay_between(g, c ? float2{earlier[n].z, earlier[n].w} : float2{earlier[n].x, earlier[n].y});
                    const float decay = bits >> (n * 8 + c) & 1 ? between * (c ? norms[n].y : norms[n].x) : 0.0f;
                    products[0][n][e] *= k_factor * decay;
                    products[1][n][e] *= q_factor * decay;
                }
        }
        uint4 x[2], y[1];
        as_rows(products[1], y);
        to[64] = y[0];
        if (i == j) {  // strictly below its own diagonal, which `invert_diagonal` does not read
            float* square = reinterpret_cast<float*>(to - lane.lane) + 2 * lane.pair;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                *reinterpret_cast<float2*>(square + lane.row * 16 + n * 8) = {products[0][n][0], products[0][n][1]};
                *reinterpret_cast<float2*>(square + (lane.row + 8) * 16 + n * 8) = {products[0][n][2], products[0][n][3]};
            }
        } else {
            as_rows(products[0], x);
            to[0] = x[0];
            to[32] = x[1];
        }
    }
}

// A panel's diagonal tiles: X to the A fragments of (I + X)^-1 - I, in place, by forward substitution, a lane a column: a row that
// is known is taken out of all later ones, which do not wait for each other.
__device__ __forceinline__ void invert_diagonal(const Shared& at, int panel, int end, const Lane& lane) {
    const int column = lane.lane & 15;
    for (int i = panel + lane.warp; i < end; i += WARPS) {
        uint4* terms_at = at.tiles + (tiles_before(i) - tiles_before(panel) + i) * 96;
        float* x = reinterpret_cast<float*>(terms_at);
        float t[16];
#pragma unroll
        for (int row = 0; row < 16; ++row) t[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
        for (int start = 0; start < 16; start += 4)
#pragma unroll
            for (int row = start + 1; row < 16; ++row) {
                const float4 four = *reinterpret_cast<const float4*>(x + row * 16 + start);
                const float coefficients[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (start + j < row) t[row] -= coefficients[j] * t[start + j];
            }
        __syncwarp();
        if (lane.lane < 16)
#pragma unroll
            for (int row = 0; row < 16; ++row) x[row * 16 + column] = row == column ? 0.0f : t[row] * TILE_SCALE;
        __syncwarp();
        float inverse[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) inverse[n][e] = x[(lane.row + (e >> 1) * 8) * 16 + n * 8 + 2 * lane.pair + (e & 1)];
        uint4 terms[2];
        as_rows(inverse, terms);
        __syncwarp();
        terms_at[lane.lane] = terms[0];
        terms_at[32 + lane.lane] = terms[1];
    }
}

// Few tiles: all of R and O in registers, the solve column by column of tiles.

// The warp's columns of S k and S q of all nodes, then r = b (v - e^G S k), the right-hand side of the solve, and
// o = e^G S q, the output's first part, k and q of norm 1. Gives the power of two that r is scaled by for float16.
// `value` gives v of a row tile and half.
template <class Value>
__device__ __forceinline__ float multiply_state_at_once(float (&r)[TILES][4], float (&o)[TILES][4], const StateColumns& s,
                                                        const Shared& at, int count, int tiles, const Lane& lane,
                                                        Value value) {
    constexpr int GROUP = 2;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int x = 0; x < 4; ++x) r[i][x] = o[i][x] = 0.0f;
    const SharedAddress rows_at = tile_rows(at.k, 0, lane);
    uint2 next[3];  // the next step's columns are made during the first group's products
    as_columns<Bf16>(s[0], next);
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        const uint2 columns[3] = {next[0], next[1], next[2]};
        // Groups of tiles keep several products in flight; a group's rows beyond `tiles` are not used.
#pragma unroll
        for (int start = 0; start < TILES; start += GROUP)
            if (start == 0 || start < tiles) {
                uint4 keys[GROUP], queries[GROUP];
                float sums[GROUP][4] = {};
#pragma unroll
                for (int i = 0; i < GROUP; ++i)
                    if (start + i < TILES) {
                        unsigned rows[4];
                        load_step(rows, rows_at, step, (start + i) * 16 * KEY_DIM * 2);
                        keys[i] = {rows[0], rows[1], rows[2], rows[3]};
                        load_step(rows, rows_at, step, (start + i) * 16 * KEY_DIM * 2 + ROWS_BYTES);
                        queries[i] = {rows[0], rows[1], rows[2], rows[3]};
                    }
#pragma unroll
                for (int term = GDN_STATE_BF16 ? 0 : 2; term >= 0; --term)
#pragma unroll
                    for (int i = 0; i < GROUP; ++i)
                        if (start + i < TILES) {
                            mma_rows<Bf16>(sums[i], keys[i], columns[term]);
                            if (term < 2) mma_rows<Bf16>(o[start + i], queries[i], columns[term]);
                        }
#pragma unroll
                for (int i = 0; i < GROUP; ++i)
                    if (start + i < TILES) add(r[start + i], sums[i]);
                if (start == 0 && step + 1 < K_STEPS) as_columns<Bf16>(s[step + 1], next);
            }
    }
    const float2* path_g = at.g + lane.row;
    const float *norms = at.norm + lane.row, *q_norms = at.q_norm + lane.row, *betas = at.beta + lane.row;
    const int rows_left = count - lane.row;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int node = i * 16 + half * 8;  // counted from lane.row
            const unsigned v = node < rows_left ? value(i, half) : 0;
            const float2 g = path_g[node];
            const float decay = exp2_approx(g.x + g.y), factor = norms[node] * decay, beta = betas[node];
            r[i][half * 2] = beta * (low_half(v) - factor * r[i][half * 2]);
            r[i][half * 2 + 1] = beta * (high_half(v) - factor * r[i][half * 2 + 1]);
            most = fmaxf(most, fmaxf(fabsf(r[i][half * 2]), fabsf(r[i][half * 2 + 1])));
            o[i][half * 2] *= q_norms[node] * decay;
            o[i][half * 2 + 1] *= q_norms[node] * decay;
        }
    // |u| is at most the sum of |r| over its path (docs/gdn.md).
    const float scale = scale_to(greatest_of_warp(most), 8);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            r[i][e] *= scale;
            o[i][e] *= scale * TILE_SCALE;
        }
    return scale;
}

// The substitution over tiles: U_j = (I + X_jj)^-1 r_j, taken out of all later rows at once, and its part of all outputs.
// u_out: the lane's columns, node `row`, in the stash, or null. rows_left: nodes from there on.
__device__ __forceinline__ void solve_at_once(float (&r)[TILES][4], float (&o)[TILES][4], float scale, const Shared& at,
                                              int rows_left, int tiles, float* u_out, const Lane& lane) {
    const unsigned row_tiles = lane.lane < tiles ? at.row_tiles[lane.lane] : 0;
    const float from_scale = inverse_of_power(scale);
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
        if (j < tiles) {
            const unsigned below = __ballot_sync(0xffffffffu, row_tiles >> j & 1);  // bit i: tile (i, j) has bits
            const uint4* tile = reinterpret_cast<const uint4*>(at.tiles) + j * 96 + lane.lane;
            const uint4* diagonal = tile + tiles_before(j) * 96;
            const uint4 inverse[2] = {diagonal[0], diagonal[32]};
            uint2 right[2], u_terms[2];
            as_columns<F16>(r[j], right);
            float u[4] = {}, rest[4] = {};
            mma_two_terms(u, rest, inverse, right);
#pragma unroll
            for (int e = 0; e < 4; ++e) u[e] = r[j][e] + (u[e] + rest[e]) * (1.0f / TILE_SCALE);
            as_columns<F16>(u, u_terms);
            if (u_out) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int node = j * 16 + half * 8;
                    const float factor = from_scale * at.norm[node + lane.row];
                    if (node < rows_left)
                        *reinterpret_cast<float2*>(u_out + node * VALUE_DIM) = {factor * u[half * 2],
                                                                                factor * u[half * 2 + 1]};
                }
            }
            // Rows in pairs, the diagonal's output with the first: several products are in flight.
#pragma unroll
            for (int start = j; start < TILES; start += 2)
                if (below >> start & 3) {
                    uint4 below_x[2][2], below_y[2];
                    float sums[2][4] = {}, rest[2][4] = {};
#pragma unroll
                    for (int i = start; i < start + 2 && i < TILES; ++i) {
#pragma unroll
                        for (int term = 0; term < 2; ++term)
                            if (i > j) below_x[i - start][term] = tile[tiles_before(i) * 96 + term * 32];
                        below_y[i - start] = tile[tiles_before(i) * 96 + 64];
                    }
#pragma unroll
                    for (int i = start; i < start + 2 && i < TILES; ++i) {
                        if (i > j) mma_two_terms(sums[i - start], rest[i - start], below_x[i - start], u_terms);
                        mma_rows<F16>(o[i], below_y[i - start], u_terms[0]);
                    }
#pragma unroll
                    for (int i = start; i < start + 2 && i < TILES; ++i)
                        if (i > j)
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                r[i][e] += (sums[i - start][e] + rest[i - start][e]) * (1.0f / TILE_SCALE);
                }
        }
    }
}

// Through shared memory, in place of q: whole rows of the block's columns leave it at once.
__device__ __forceinline__ void write_output(const VerifyArguments& in, const float (&o)[TILES][4], float factor,
                                             const Shared& at, int count, int head, int column, const Lane& lane) {
    unsigned* own = reinterpret_cast<unsigned*>(at.q + value_place(lane.row, lane.warp)) + lane.pair;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            own[(i * 16 + half * 8) * SLICE / 2] = pack_bf16(factor * o[i][half * 2], factor * o[i][half * 2 + 1]);
    __syncthreads();
    const int64 stride = in.heads.value_heads * VALUE_DIM;
    const int piece = threadIdx.x % (SLICE / 8);
    int node = threadIdx.x / (SLICE / 8);
    bf16* to = in.out + (blockIdx.y * in.nodes + node) * stride + int64(head) * VALUE_DIM + column + piece * 8;
#pragma unroll 2
    for (; node < count; node += 32, to += 32 * stride)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(at.q + value_place(node, piece));
}

// More tiles: a group of rows at a time.

typedef uint2 Columns[2];                 // the B fragments of a tile of U in float16 terms
typedef uint2 StateOperand[K_STEPS][3];   // and of the state in bfloat16 terms
// A group of row tiles of the warp's columns, as C fragments.
typedef float RowTiles[ROWS][4];

// S k and S q of the row tiles `row`.
template <bool SPREAD>
__device__ __forceinline__ void multiply_state(RowTiles& r, RowTiles& o, const StateOperand& state, const Shared& at,
                                               const int (&row)[ROWS], const Lane& lane) {
    RowTiles rest = {};  // what the small terms give to r
    const SolveRows<SPREAD> rows_at[2] = {{at.k, row[0], lane}, {at.k, row[ROWS - 1], lane}};
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) r[i][e] = o[i][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        unsigned keys[ROWS][4], queries[ROWS][4];
        float sums[ROWS][4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            rows_at[i].load(keys[i], step);
            rows_at[i].load(queries[i], step, ROWS_BYTES);
        }
#pragma unroll
        for (int term = GDN_STATE_BF16 ? 0 : 2; term >= 0; --term)
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                Bf16::mma(term ? rest[i] : sums[i], keys[i], state[step][term]);
                if (term < 2) Bf16::mma(o[i], queries[i], state[step][term]);
            }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) add(r[i], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add(r[i], rest[i]);
}

// From S k and S q: r = b (v - e^G S k), the right-hand side of the solve, and o = e^G S q, the output's first part, k and q
// of norm 1, scaled for float16.
__device__ __forceinline__ void right_hand_side(RowTiles& r, RowTiles& o, const unsigned (&v)[ROWS][2], float scale,
                                                const Shared& at, const int (&row)[ROWS], const Lane& lane) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int node = row[i] * 16 + half * 8 + lane.row;
            const float2 g = at.g[node];
            const float decay = exp2_approx(g.x + g.y), factor = at.norm[node] * decay, beta = scale * at.beta[node];
            const float q_factor = scale * TILE_SCALE * at.q_norm[node] * decay;
            r[i][half * 2] = beta * (low_half(v[i][half]) - factor * r[i][half * 2]);
            r[i][half * 2 + 1] = beta * (high_half(v[i][half]) - factor * r[i][half * 2 + 1]);
            o[i][half * 2] *= q_factor;
            o[i][half * 2 + 1] *= q_factor;
        }
}

// r -= X u and o += Y u for a column of tiles; tile: the lane's place in the tile of each row. rest: what the small terms
// give, one sum over all columns.
template <int COUNT>
__device__ __forceinline__ void take_out(float (*r)[4], float (*rest)[4], float (*o)[4], const uint4* const (&tile)[COUNT],
                                         const Columns& u) {
    uint4 x[COUNT][2], y[COUNT];
    float sums[COUNT][4] = {};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        x[i][0] = tile[i][0];
        x[i][1] = tile[i][32];
        y[i] = tile[i][64];
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        mma_two_terms(sums[i], rest[i], x[i], u);
        mma_rows<F16>(o[i], y[i], u[0]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) r[i][e] += sums[i][e] * (1.0f / TILE_SCALE);
}

// The warp's columns of a panel of row tiles, from the state to the output, a group of row tiles at a time: what the state
// gives, less what the earlier tiles' U gives, then U_i = (I + X_ii)^-1 r_i. Each row tile's U stays in registers, so that
// `u` is indexed by what the compiler knows and the row tiles by a loop: instructions would not stay in their cache if
// both were written out. All threads of the block call it; it waits for the diagonal's inverses.
// value: v of a node counted from lane.row. u_out and out: column 2 pair of the warp's columns, node `row`, in the stash
// (or null) and in the output. rows_left: nodes from there on.
template <bool SPREAD, class Value>
__device__ __forceinline__ void solve_panel(Columns (&u)[TILES], const StateOperand& state, float scale, float output_scale,
                                            const Shared& at, int panel, int end, int rows_left, float* u_out, bf16* out,
                                            int out_stride, const Lane& lane, Value value) {
    const float from_scale = inverse_of_power(scale), output_factor = output_scale * from_scale * (1.0f / TILE_SCALE);
#pragma unroll 1
    for (int first = panel; first < end; first += ROWS) {
        int row[ROWS];  // where the panel ends with one tile it stands for both
        unsigned v[ROWS][2];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            row[i] = min(first + i, end - 1);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                v[i][half] = row[i] * 16 + half * 8 < rows_left ? value(row[i], half) : 0;
        }
        RowTiles r, o, rest = {};
        multiply_state<SPREAD>(r, o, state, at, row, lane);
        right_hand_side(r, o, v, scale, at, row, lane);
        const uint4* tile[ROWS];
        unsigned seen = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            tile[i] = at.tiles + (tiles_before(row[i]) - tiles_before(panel)) * 96 + lane.lane;
            seen |= at.row_tiles[row[i]];
        }
        seen &= (1u << first) - 1;
#pragma unroll
        for (int j = 0; j + 1 < TILES; ++j)
            if (seen >> j & 1) {
                const uint4* of_j[ROWS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) of_j[i] = tile[i] + j * 96;
                take_out<ROWS>(r, rest, o, of_j, u[j]);
            }
        if (first == panel) __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (first + i < end) {
                const uint4* diagonal = tile[i] + (first + i) * 96;
                const uint4 inverse[2] = {diagonal[0], diagonal[32]}, y = diagonal[64];
                Columns right, own;
                float whole[4] = {}, small[4] = {};
#pragma unroll
                for (int e = 0; e < 4; ++e) r[i][e] += rest[i][e] * (1.0f / TILE_SCALE);
                as_columns<F16>(r[i], right);
                mma_two_terms(whole, small, inverse, right);
#pragma unroll
                for (int e = 0; e < 4; ++e) whole[e] = r[i][e] + (whole[e] + small[e]) * (1.0f / TILE_SCALE);
                as_columns<F16>(whole, own);
                if (i + 1 < ROWS) {
                    const uint4* const below[1] = {tile[ROWS - 1] + first * 96};
                    take_out<1>(r + ROWS - 1, rest + ROWS - 1, o + ROWS - 1, below, own);
                }
                mma_rows<F16>(o[i], y, own[0]);
#pragma unroll
                for (int j = i; j + 1 < TILES; j += ROWS)
                    if (j == first + i)
#pragma unroll
                        for (int term = 0; term < 2; ++term) u[j][term] = own[term];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int node = (first + i) * 16 + half * 8;  // counted from lane.row
                    if (node < rows_left) {
                        *reinterpret_cast<unsigned*>(out + node * out_stride) =
                            pack_bf16(output_factor * o[i][half * 2], output_factor * o[i][half * 2 + 1]);
                        const float factor = from_scale * at.norm[node + lane.row];
                        if (u_out)
                            *reinterpret_cast<float2*>(u_out + node * VALUE_DIM) = {factor * whole[half * 2],
                                                                                    factor * whole[half * 2 + 1]};
                    }
                }
            }
    }
}

// What the warp's columns are scaled by for float16: |u| is at most the sum of |v| + |S k| over its path (docs/gdn.md), which
// is at most 512 times the greatest of both.
__device__ __forceinline__ float scale_of(const StateColumns& s, float greatest_value) {
    float most = 0.0f;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(s[step][i]));
    most *= KEY_DIM == 64 ? 8.0f : 12.0f;  // |S k| of a k of norm 1
    return scale_to(greatest_of_warp(fmaxf(most, greatest_value)), 5);
}
// The lane's part of the greatest |v| of the warp's columns. Where v stays in global memory it is asked for early; few nodes need
// it not at all.
struct ValuePieces {
    static constexpr int EACH = (NODES + 31) / 32;
    static constexpr bool EARLY = OVERLAID && !AT_ONCE;
    uint4 pieces[EARLY ? EACH : 1];
    __device__ __forceinline__ ValuePieces(const bf16* values, int64 token_stride, int nodes, const Lane& at) {
        if constexpr (EARLY)
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                pieces[i] = i * 32 + at.lane < nodes
                                ? load_128(values + (i * 32 + at.lane) * token_stride + at.warp * 8)
                                : uint4{0, 0, 0, 0};
    }
    __device__ __forceinline__ float greatest(const Shared& shared, int count, const Lane& at) const {
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int node = i * 32 + at.lane;
            if (node >= count) break;
            const uint4 x = EARLY ? pieces[EARLY ? i : 0]
                                  : *reinterpret_cast<const uint4*>(shared.v + value_place(node, at.warp));
            const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) most = max_of(most, max_of(words[n] << 16 & 0x7fffffffu, words[n] & 0x7fff0000u));
        }
        return from_bits(most);
    }
    __device__ __forceinline__ static unsigned max_of(unsigned x, unsigned y) { return x > y ? x : y; }
};

// What a block computes: slices from `slice` to `end` of a value head.
struct Work {
    int request, key_head, head, slice, end;
    __device__ __forceinline__ Work(const VerifyArguments& in, int whole) : request(blockIdx.y) {
        const int rest = int(blockIdx.z) - whole;
        key_head = rest < 0 ? int(blockIdx.z) : whole + rest / SLICES;
        slice = rest < 0 ? 0 : rest % SLICES;
        end = rest < 0 ? SLICES : slice + 1;
        head = key_head * int(in.heads.group) + blockIdx.x;
    }
};

// Rows of padding, and of requests left out, are zero.
__device__ __forceinline__ void write_zeros(const VerifyArguments& in, int from, const Work& work) {
    for (int slice = work.slice; slice < work.end; ++slice)
#pragma unroll 1
        for (int i = threadIdx.x; i < (int(in.nodes) - from) * (SLICE / 2); i += THREADS) {
            const int64 token = int64(blockIdx.y) * in.nodes + from + i / (SLICE / 2);
            bf16* row = in.out + (token * in.heads.value_heads + work.head) * VALUE_DIM + slice * SLICE;
            reinterpret_cast<unsigned*>(row)[i % (SLICE / 2)] = 0;
        }
}

// The stash's part that a block writes with a slice: G with the first, and its share of the raw k, which all slices of all value
// heads of a key head have in common.
__device__ __forceinline__ void stash_nodes(const Shared& at, const VerifyArguments& in, const Work& work, const Pending& pending,
                                            int slice, int count) {
    const Stash& stash = in.stash;
    const int64 buffer = int64(1 - pending.parity) * stash.rows + pending.row;
    if (slice == 0)
#pragma unroll 1
        for (int node = threadIdx.x; node < count; node += THREADS)
            stash.g[(buffer * in.heads.value_heads + work.head) * stash.nodes + node] =
                (double(at.g[node].x) + double(at.g[node].y)) * (1.0 / LOG2_E);
    bf16* to = stash.k + (buffer * in.heads.key_heads + work.key_head) * stash.nodes * KEY_DIM;
    const int parts = int(gridDim.x) * SLICES;
#pragma unroll 1
    for (int i = (blockIdx.x * SLICES + slice) * THREADS + threadIdx.x; i < count * ROW_CHUNKS; i += parts * THREADS)
        reinterpret_cast<uint4*>(to)[i] = *reinterpret_cast<const uint4*>(row_piece(at.k, i / ROW_CHUNKS, i % ROW_CHUNKS));
}

// WHOLE: some blocks compute all slices of a head.
template <bool WHOLE>
__device__ __forceinline__ void verify(const VerifyArguments& in, unsigned char* memory) {
    const Shared at(memory);
    Lane lane;
    const Work work(in, WHOLE ? int(in.whole) : 0);
    const int request = work.request, key_head = work.key_head, head = work.head, nodes = int(in.nodes);
    int column = work.slice * SLICE;
    const int64 first_token = request * in.nodes;

    // What depends on no other load is asked for first, and nothing waits before all of it is.
    const int slot = int(load_32(in.state.slots + request));
    const int row = in.stash.row ? int(load_32(in.stash.row + request)) : -1;
    const int given = in.node_count ? int(load_32(in.node_count + request)) : nodes;
    const NodeInputs inputs(in, head);
    fetch_rows(at, in, first_token, key_head);
    copy_async_commit();
    const bf16* values = in.v + first_token * in.v_token + head * in.v_head + column;
    if constexpr (!OVERLAID) fetch_values(at.v, values, in.v_token, nodes);
    const ValuePieces pieces(values, in.v_token, nodes, lane);

    const int count = max(0, min(given, nodes)), tiles = (count + 15) / 16;
    if (slot < 0 || count <= 0) {
        write_zeros(in, 0, work);
        copy_async_wait<0>();
        return;
    }
    const Pending pending(in.stash, row, lane);
    int64 offset = state_offset(in.state, slot, head, column);
    fetch_state(at.state, in.state, offset);
    copy_async_commit();
    store_nodes(at, inputs, in, count, lane);
    float greatest_value = ValuePieces::EARLY ? pieces.greatest(at, count, lane) : 0.0f;
    copy_async_wait<1>();
    if (count < nodes) {
        clear_rows(at, count, tiles);
        write_zeros(in, count, work);
    }
    __syncthreads();
    sum_paths(at, tiles);
    row_norms(at, tiles, lane);
    PathSource from(pending, in.stash, in.heads, 0, key_head, head, column);
    if (pending.length > 0) {
        at.path.fetch(pending, 0, from);
        copy_async_wait<1>();
    } else {
        copy_async_wait<0>();
    }
    __syncthreads();
    StateColumns s;
    if constexpr (OVERLAID) {
        load_state(s, at.state, lane);
        __syncthreads();
    }

    int end = PANEL == TILES ? tiles : panel_end(0, tiles);
    build_panel(at, 0, end, lane);
    const int own_column = lane.warp * 8 + 2 * lane.pair, rows_left = count - lane.row;
#pragma unroll 1
    for (int slice = work.slice;;) {
        if constexpr (AT_ONCE || WHOLE || OVERLAID) keep(lane);  // 3 to 10 % less time on an H200; otherwise 1 % more
        float* u_out = nullptr;
        if (row >= 0) {
            stash_nodes(at, in, work, pending, slice, count);
            u_out = in.stash.u + (int64(row) * in.heads.value_heads + head) * in.stash.nodes * VALUE_DIM +
                    lane.row * VALUE_DIM + column + own_column;
        }
        if constexpr (!OVERLAID) load_state(s, at.state, lane);
        if (pending.length > 0) {
            commit_path(s, at.path, pending, from, slice > work.slice, lane);
            store_state(s, in.state, offset, lane);
        } else {
            __syncthreads();
        }
        if (!WHOLE || slice == work.slice) {
            invert_diagonal(at, 0, end, lane);
        } else {
            copy_async_wait<0>();
            __syncthreads();
        }
        const bf16* own_values = values + lane.row * in.v_token + own_column;
        const auto value = [&](int i, int half) {
            return OVERLAID ? *reinterpret_cast<const unsigned*>(own_values + (i * 16 + half * 8) * in.v_token)
                            : load_value(at.v, i, half, lane);
        };
        if constexpr (AT_ONCE) {
            float r[TILES][4], o[TILES][4];
            const float scale = multiply_state_at_once(r, o, s, at, count, tiles, lane, value);
            __syncthreads();
            solve_at_once(r, o, scale, at, rows_left, tiles, u_out, lane);
            const float factor = float(in.scale) * inverse_of_power(scale) * (1.0f / TILE_SCALE);
            write_output(in, o, factor, at, count, head, column, lane);
        } else {
            StateOperand state;
            Columns u[TILES];
            if (!ValuePieces::EARLY) greatest_value = pieces.greatest(at, count, lane);
            const float scale = scale_of(s, greatest_value);
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) as_columns<Bf16>(s[step], state[step]);
            if (WHOLE && slice + 1 < work.end) {  // what the next slice begins with
                column += SLICE;
                offset += SLICE * KEY_DIM;
                from.u += SLICE;
                __syncthreads();
                fetch_state(at.state, in.state, offset);
                copy_async_commit();
                if (pending.length > 0) at.path.fetch(pending, 0, from);
            }
            const int out_stride = int(in.heads.value_heads) * VALUE_DIM;
            bf16* out = in.out + (first_token + lane.row) * int64(out_stride) + int64(head) * VALUE_DIM + slice * SLICE + own_column;
#pragma unroll 1
            for (int panel = 0;;) {
                solve_panel<!WHOLE>(u, state, scale, float(in.scale), at, panel, end, rows_left, u_out, out, out_stride, lane,
                                    value);
                if (PANEL == TILES || end == tiles) break;
                panel = end;
                end = panel_end(panel, tiles);
                __syncthreads();
                build_panel(at, panel, end, lane);
                __syncthreads();
                invert_diagonal(at, panel, end, lane);
            }
        }
        if (!WHOLE || ++slice == work.end) break;
        copy_async_wait<0>();
        __syncthreads();
        values += SLICE;
        fetch_values(at.v, values, in.v_token, nodes);
        copy_async_commit();
    }
}

// Grid [value heads of a key head, R, key heads * SLICES].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_tree_verify(const VerifyArguments in) {
    DYNAMIC_SHARED(memory);
    verify<false>(in, memory);
}

// Grid [value heads of a key head, R, in.whole + (key heads - in.whole) * SLICES]; where WHOLE_HEADS.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_tree_verify_heads(const VerifyArguments in) {
    DYNAMIC_SHARED(memory);
    if constexpr (WHOLE_HEADS) verify<true>(in, memory);
}

// Grid [value heads * SLICES, R, layers]: the accepted path's nodes into the state of `destination`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn_tree_flush(const FlushArguments in) {
    DYNAMIC_SHARED(memory);
    const Lane lane;
    const int head = blockIdx.x / SLICES, request = blockIdx.y, layer = blockIdx.z;
    const int column = blockIdx.x % SLICES * SLICE;
    const int slot = in.state.slots[request], destination = in.destination[request], row = in.stash.row[request];
    if (slot < 0 || destination < 0 || row < 0) return;
    Pending pending(in.stash, row, lane);
    if (in.length) pending.length = min(pending.length, in.length[request]);
    if (pending.length <= 0 && slot == destination) return;
    State state = in.state;
    state.data = static_cast<unsigned char*>(state.data) + layer * state.layer_stride * STATE_SIZE;
    const PathNodes path(memory + STATE_BYTES);
    fetch_state(memory, state, state_offset(state, slot, head, column));
    copy_async_commit();
    const PathSource from(pending, in.stash, in.heads, layer, head / int(in.heads.group), head, column);
    if (pending.length > 0) path.fetch(pending, 0, from);
    copy_async_wait<0>();
    __syncthreads();
    StateColumns s;
    load_state(s, memory, lane);
    commit_path(s, path, pending, from, false, lane);
    store_state(s, state, state_offset(state, destination, head, column), lane);
}
