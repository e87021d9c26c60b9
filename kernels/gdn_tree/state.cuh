// A request's recurrent state, and the accepted path that is pending there: how both come in, are joined, and go out.
#pragma once
#include "layout.cuh"

// A block's value columns of one head's state are a contiguous [SLICE, KEY_DIM]; in shared memory each row's groups of 8
// keys stand in an order that depends on the row, for reads without bank conflicts.
__device__ __forceinline__ int state_place(int value, int group) {
    return value * KEY_DIM + ((group ^ (value >> 1 & 3)) << 3);
}
__device__ __forceinline__ int64 state_offset(const State& state, int slot, int head, int column) {
    return slot * state.slot_stride + (int64(head) * VALUE_DIM + column) * KEY_DIM;
}
__device__ __forceinline__ void fetch_state(unsigned char* to, const State& state, int64 offset) {
    constexpr int ROW_PIECES = KEY_DIM * STATE_SIZE / 16, GROUP_PIECES = STATE_SIZE / 2;
    const unsigned char* from = static_cast<const unsigned char*>(state.data) + offset * STATE_SIZE;
#pragma unroll
    for (int start = 0; start < STATE_BYTES / 16; start += THREADS) {
        const int i = start + threadIdx.x, value = i / ROW_PIECES, piece = i % ROW_PIECES;
        copy_async_16(to + state_place(value, piece / GROUP_PIECES) * STATE_SIZE + piece % GROUP_PIECES * 16, from + i * 16,
                      true);
    }
}

// A warp's 8 value columns, transposed: [KEY_DIM, 8] as C fragments, one for 16 rows.
typedef float StateColumns[K_STEPS][4];

__device__ __forceinline__ void load_state(StateColumns& s, const unsigned char* from, const Lane& at) {
#pragma unroll
    for (int m = 0; m < K_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = state_place(at.warp * 8 + 2 * at.pair + (i & 1), m * 2 + (i >> 1)) + at.row;
            s[m][i] = GDN_STATE_BF16 ? from_bits(unsigned(reinterpret_cast<const bf16*>(from)[place]) << 16)
                                     : reinterpret_cast<const float*>(from)[place];
        }
}
// Writes the columns, and leaves in s what the next reader will see.
__device__ __forceinline__ void store_state(StateColumns& s, const State& state, int64 offset, const Lane& at) {
    offset += (at.warp * 8 + 2 * at.pair) * KEY_DIM + at.row;
#pragma unroll
    for (int m = 0; m < K_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64 to = offset + (i & 1) * KEY_DIM + m * 16 + (i >> 1) * 8;
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
    __device__ __forceinline__ Pending(const Stash& stash, int row, const Lane& at) : row(row), length(0), parity(0), first(0) {
        if (row < 0) return;
        path = stash.path + row * stash.path_stride;
        length = int(load_32(stash.length + row));
        if (at.lane < stash.path_stride) first = int(load_32(path + at.lane));
        parity = int(load_32(stash.parity + row));
    }
    // The path's j-th node, for all lanes of the warp at once; any node beyond the path's end.
    __device__ __forceinline__ int node(int j) const {
        const int node = __shfl_sync(0xffffffffu, first, j & 31);
        return j < 32 ? (j < length ? node : 0) : path[j < length ? j : 0];
    }
};

// Where a row's last verify left its nodes, for one head and the block's columns.
struct PathSource {
    const bf16* k;
    const float* u;
    const double* g;
    __device__ __forceinline__ PathSource(const Pending& pending, const Stash& stash, const Heads& heads, int layer,
                                          int key_head, int head, int column) {
        const int64 row = pending.row, buffer = pending.parity * stash.rows + row;
        k = stash.k + layer * stash.layer_k + (buffer * heads.key_heads + key_head) * stash.nodes * KEY_DIM;
        u = stash.u + layer * stash.layer_u + (row * heads.value_heads + head) * stash.nodes * VALUE_DIM + column;
        g = stash.g + layer * stash.layer_g + (buffer * heads.value_heads + head) * stash.nodes;
    }
};

// Sixteen nodes of the pending path in shared memory: raw k [16][KEY_DIM] with its pieces permuted, u' [16][PATH_U_ROW] of
// the block's columns, and G, followed by that of the path's end.
struct PathNodes {
    bf16* k;
    float* u;
    double* g;
    __device__ __forceinline__ PathNodes(unsigned char* base)
        : k(reinterpret_cast<bf16*>(base)),
          u(reinterpret_cast<float*>(k + 16 * KEY_DIM)),
          g(reinterpret_cast<double*>(u + 16 * PATH_U_ROW)) {}
    // Asks for the nodes from the path's `start` on; beyond its end they are zero. All threads of the block call it.
    __device__ __forceinline__ void fetch(const Pending& pending, int start, const PathSource& from) const {
        constexpr int U_PIECES = SLICE / 4;
#pragma unroll
        for (int first = 0; first < 16 * ROW_CHUNKS; first += THREADS) {
            const int i = first + threadIdx.x, at = i / ROW_CHUNKS, piece = i % ROW_CHUNKS;
            if (16 * ROW_CHUNKS % THREADS && i >= 16 * ROW_CHUNKS) break;
            copy_async_16(row_piece(k, at, piece), from.k + pending.node(start + at) * KEY_DIM + piece * 8,
                          start + at < pending.length);
        }
#pragma unroll
        for (int first = 0; first < 16 * U_PIECES; first += THREADS) {
            const int i = first + threadIdx.x, at = i / U_PIECES, piece = i % U_PIECES;
            copy_async_16(u + at * PATH_U_ROW + piece * 4, from.u + pending.node(start + at) * VALUE_DIM + piece * 4,
                          start + at < pending.length);
        }
        if (threadIdx.x < 32) {
            const int i = threadIdx.x, j = i == 16 ? pending.length - 1 : start + i, node = pending.node(j);
            if (i <= 16) copy_async_8(g + i, from.g + node, j < pending.length);
        }
        copy_async_commit();
    }
};

// Adds the pending path's nodes to a warp's columns. All threads of the block call it; the first sixteen nodes have been
// asked for, and their copies are the last that were, or, with `more`, those before the last.
__device__ __forceinline__ void commit_path(StateColumns& s, const PathNodes& nodes, const Pending& pending,
                                            const PathSource& from, bool more, const Lane& at) {
#pragma unroll 1
    for (int start = 0; start < pending.length; start += 16) {
        if (start) {
            __syncthreads();
            nodes.fetch(pending, start, from);
        }
        if (more && !start)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncthreads();
        const double last = nodes.g[16];
        if (!start) {
            const float decay = exp2_approx(float(last * LOG2_E));
#pragma unroll
            for (int m = 0; m < K_STEPS; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][i] *= decay;
        }
        float weighted[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int node = 2 * at.pair + (i & 1) + (i >> 1) * 8;
            weighted[i] =
                exp2_approx(float((last - nodes.g[node]) * LOG2_E)) * nodes.u[node * PATH_U_ROW + at.warp * 8 + at.row];
        }
        unsigned first[3], second[3];
        split<Bf16>(weighted[0], weighted[1], first);
        split<Bf16>(weighted[2], weighted[3], second);
#pragma unroll
        for (int m = 0; m < K_STEPS; ++m) {
            unsigned keys[4];
            load_matrix_x4_transposed(
                keys, row_piece(nodes.k, (at.lane & 7) + (at.lane >> 4) * 8, m * 2 + (at.lane >> 3 & 1)));
            float sum[4] = {};
#pragma unroll
            for (int term = 2; term >= 0; --term) mma_bf16(sum, keys, first[term], second[term]);
            add(s[m], sum);
        }
    }
}
