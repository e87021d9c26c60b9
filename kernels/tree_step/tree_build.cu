// The best-first token tree of marginals, one block a request (see tree_build.py): depth by depth, as the marginals of a
// depth do not depend on the parent.
//
// The N = budget - 1 best nodes of the depths so far are kept in their order: higher score, smaller depth, earlier parent,
// smaller rank. What is not among them never is, nor is what descends from it. A depth's nodes are pairs of a place (a kept
// parent's, in its depth) and a rank. Pair (i, r) is the last of its parents 0 to i and of the pairs up to i and up to r,
// so that only pairs with (i + 1)(r + 2) <= N can be kept: each thread has a few of them, for all depths. A depth:
//   1. Pairs that score above the last kept node are listed in tie order (ballots, then the warps' counts).
//   2. Places by counting: a pair's in its depth and among the kept nodes, and a kept node's among the pairs. Both move
//      to where they belong in the other of two arrays.
// Three barriers a depth, and no step waits for a single node. Orders are scores as unsigned that sort alike, 0 for none
// (scores are at most 0: 0x7f800000 - |score|). Compiled for SLOTS, words of 32 nodes that the budget needs.
#ifndef CUDA_ON_CPU
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

typedef long long i64;

struct BuildArguments {
    i64 root, log_probs, tokens, max_depth;                    // inputs
    i64 token, parent, depth, ancestors, node_count, position;  // outputs
    i64 committed;                                             // int64 [R] or 0: positions are committed + depth
    i64 depths, width, budget;
};

static_assert(SLOTS >= 1 && SLOTS <= 8, "256 nodes at most");
constexpr int THREADS = 256, WARPS = THREADS / 32, KEPT = 32 * SLOTS, MOST_WIDTH = 256;

// Ranks that a parent's children may have, if `nodes` are kept. Depth 1, of place 0 alone, has no parent that counts.
__device__ constexpr int ranks_of(int place, int nodes, int width) {
    const int most = place == 0 ? nodes : nodes / (place + 1) - 1;
    return most < width ? most : width;
}
__device__ constexpr int pairs_of(int nodes, int width) {
    int pairs = 0;
    for (int place = 0; place < nodes; ++place) pairs += ranks_of(place, nodes, width);
    return pairs;
}
constexpr int TURNS = (pairs_of(KEPT - 1, MOST_WIDTH) + 31 + THREADS - 1) / THREADS;  // 31: zeros behind the last
constexpr int PAIRS = TURNS * THREADS;
constexpr unsigned NO_PAIR = (KEPT - 1) << 8;  // no parent has this place

__device__ __forceinline__ unsigned order_of(float score) {
    const unsigned magnitude = __float_as_uint(score) & 0x7fffffffu;
    return magnitude < 0x7f800000u ? 0x7f800000u - magnitude : 0u;
}
__device__ __forceinline__ float score_of(unsigned order) { return -__uint_as_float(0x7f800000u - order); }

// How many of orders[from .. to) are greater, read by STEP: zeros lie behind the last. As signs of differences: the compiler
// makes of comparisons a chain of twice as many instructions.
template <int STEP>
__device__ __forceinline__ int greater(const unsigned* orders, int from, int to, unsigned than) {
    unsigned count[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = from; i < to; i += STEP) {
#pragma unroll
        for (int j = 0; j < STEP; j += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(orders + i + j);
            count[0] += (than - four.x) >> 31;
            count[1] += (than - four.y) >> 31;
            count[2] += (than - four.z) >> 31;
            count[3] += (than - four.w) >> 31;
        }
    }
    return count[0] + count[1] + count[2] + count[3];
}

struct Sums {
    int before, all;
};
// Of the warps' numbers, which their last lanes have: those of earlier warps, and all. With a barrier; another has to lie
// between two uses of the same by_warp.
__device__ __forceinline__ Sums sums_of_warps(int* by_warp, int number) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 31) by_warp[warp] = number;
    __syncthreads();
    const int one = lane < WARPS ? by_warp[lane] : 0;
    return {__reduce_add_sync(0xffffffffu, lane < warp ? one : 0), __reduce_add_sync(0xffffffffu, one)};
}
__device__ __forceinline__ Sums sums_of_threads(int* by_warp, int number) {
    const int lane = threadIdx.x % 32;
    int until = number;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, until, apart);
        until += lane < apart ? 0 : other;
    }
    const Sums sums = sums_of_warps(by_warp, until);
    return {sums.before + until - number, sums.all};
}

// 4 blocks an SM: the windows of a conditional drafter are many requests.
extern "C" __global__ void __launch_bounds__(THREADS, 4) tree_build(const BuildArguments arguments) {
    DYNAMIC_SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const i64 request = blockIdx.x;
    const int depths = arguments.depths, width = arguments.width, budget = arguments.budget, most = budget - 1;

    // A node is depth << 24 | its place in its depth << 16 | its parent's place << 8 | rank.
    unsigned* kept_orders = reinterpret_cast<unsigned*>(memory);                // [2, KEPT]: before a depth and after
    unsigned* kept_nodes = kept_orders + 2 * KEPT;                              // [2, KEPT]
    unsigned* pair_orders = kept_nodes + 2 * KEPT;                              // [PAIRS]
    unsigned short* pair_nodes = reinterpret_cast<unsigned short*>(pair_orders + PAIRS);  // [PAIRS], place << 8 | rank
    float* scores = reinterpret_cast<float*>(pair_nodes + PAIRS);               // of the last depth's nodes, [KEPT]
    int* parent_of = reinterpret_cast<int*>(scores + KEPT);                     // by node, [KEPT]
    int* by_warp = parent_of + KEPT;                                            // [2, WARPS]
    int* count = by_warp + 2 * WARPS;                                           // nodes of each depth, [depths + 1]
    int* first = count + depths + 1;                                            // first node of each depth, [depths + 1]
    float* log_probs = reinterpret_cast<float*>(first + depths + 1);            // [depths * width]

    const i64 root = reinterpret_cast<const i64*>(arguments.root)[request];
    const i64 committed = arguments.committed ? reinterpret_cast<const i64*>(arguments.committed)[request] : 0;
    i64 limit = depths;
    if (arguments.max_depth) limit = reinterpret_cast<const i64*>(arguments.max_depth)[request];
    if (limit > depths) limit = depths;
    if (most == 0) limit = 0;

    const float* given = reinterpret_cast<const float*>(arguments.log_probs) + request * depths * width;
#pragma unroll 4
    for (int i = thread; i < depths * width; i += THREADS) {
        const float value = given[i];
        log_probs[i] = value > 0.f ? 0.f : value == value ? value : -__uint_as_float(0x7f800000u);
    }
    for (int i = thread; i < 2 * KEPT; i += THREADS) kept_orders[i] = 0;
#pragma unroll 1
    for (int i = thread; i <= depths; i += THREADS) count[i] = i == 0;
    if (thread == 0) scores[0] = 0.f;
    const int ranks = thread < most ? ranks_of(thread, most, width) : 0;
    const Sums pairs_before = sums_of_threads(by_warp, ranks);
#pragma unroll 1
    for (int rank = 0; rank < ranks; ++rank) pair_nodes[pairs_before.before + rank] = thread << 8 | rank;
    __syncthreads();
    const int all_pairs = pairs_before.all, turns = (all_pairs + THREADS - 1) / THREADS;
    unsigned own[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int pair = (warp * turns + i) * 32 + lane;
        own[i] = i < turns && pair < all_pairs ? pair_nodes[pair] : NO_PAIR;
    }

    const unsigned lanes_before = (1u << lane) - 1;
    int depth = 1;
    for (; depth <= limit; ++depth) {
        const unsigned* orders = kept_orders + (depth - 1) % 2 * KEPT;
        const unsigned* nodes = kept_nodes + (depth - 1) % 2 * KEPT;
        unsigned* next_orders = kept_orders + depth % 2 * KEPT;
        unsigned* next_nodes = kept_nodes + depth % 2 * KEPT;
        const float* row = log_probs + (depth - 1) * width;
        const int parents = count[depth - 1];
        const float least = score_of(orders[most - 1]);

        float score[TURNS];
        unsigned alive[TURNS];
        int alive_here = 0;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int place = own[i] >> 8;
            score[i] = scores[place] + row[own[i] & 255];
            alive[i] = __ballot_sync(0xffffffffu, place < parents && score[i] > least);
            alive_here += __popc(alive[i]);
        }
        const Sums alive_pairs = sums_of_warps(by_warp, alive_here);
        const int pairs = alive_pairs.all;
        int before = alive_pairs.before;
        if (pairs == 0) break;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            if (alive[i] >> lane & 1) {
                const int at = before + __popc(alive[i] & lanes_before);
                pair_orders[at] = order_of(score[i]);
                pair_nodes[at] = own[i];
            }
            before += __popc(alive[i]);
        }
        if (thread < 31) pair_orders[pairs + thread] = 0;
        __syncthreads();

        if (thread < KEPT && orders[thread]) {
            const int at = thread + greater<32>(pair_orders, 0, pairs, orders[thread]);
            if (at < most) {
                next_orders[at] = orders[thread];
                next_nodes[at] = nodes[thread];
            } else {
                atomicAdd(count + (nodes[thread] >> 24), -1);
            }
        }
        // From the last warp on: the first have the kept nodes.
        for (int block = (WARPS - 1 - warp) * 32; block < pairs; block += THREADS) {
            const int pair = block + lane;
            const unsigned order = pair_orders[pair];
            // Equals come before the pair if they lie before it: in earlier blocks, or in earlier lanes of its own.
            const unsigned equals = __match_any_sync(0xffffffffu, order);
            if (pair >= pairs) break;
            int above = 0;  // kept nodes; the last of `orders` is always 0
#pragma unroll
            for (int i = 15; i < KEPT; i += 16) above += orders[i] >= order ? 16 : 0;
            above += greater<16>(orders, above, above + 16, order - 1);
            const int place = greater<32>(pair_orders, 0, block, order - 1) + greater<32>(pair_orders, block, pairs, order) +
                              __popc(equals & lanes_before);
            const int at = place + above;
            if (at < most) {
                next_orders[at] = order;
                next_nodes[at] = unsigned(depth) << 24 | unsigned(place) << 16 | pair_nodes[pair];
                scores[place] = score_of(order);
                atomicAdd(count + depth, 1);
            }
        }
        __syncthreads();
    }
    const Sums nodes_before = sums_of_threads(by_warp + WARPS, thread <= depths ? count[thread] : 0);
    if (thread <= depths) first[thread] = nodes_before.before;
    const int node_count = nodes_before.all;
    __syncthreads();

    const i64* candidates = reinterpret_cast<const i64*>(arguments.tokens) + request * depths * width;
    i64* token_of = reinterpret_cast<i64*>(arguments.token) + request * budget;
    i64* parent = reinterpret_cast<i64*>(arguments.parent) + request * budget;
    i64* depth_of = reinterpret_cast<i64*>(arguments.depth) + request * budget;
    unsigned* ancestors = reinterpret_cast<unsigned*>(arguments.ancestors) + request * budget * SLOTS;
    i64* position = reinterpret_cast<i64*>(arguments.position) + request * budget;

    if (thread < budget) {
        int node = thread, above = -1, at = 0;
        i64 token = root;
        if (thread > 0 && thread < node_count) {
            const unsigned kept = kept_nodes[(depth - 1) % 2 * KEPT + thread - 1];
            at = kept >> 24;
            node = first[at] + int(kept >> 16 & 255);
            above = first[at - 1] + int(kept >> 8 & 255);
            token = candidates[(at - 1) * width + int(kept & 255)];
        }
        parent_of[node] = above;
        token_of[node] = token;
        parent[node] = above;
        depth_of[node] = at;
        if (arguments.position) position[node] = committed + at;
    }
    if (thread == 0) reinterpret_cast<i64*>(arguments.node_count)[request] = node_count;
    __syncthreads();
    if (thread >= budget) return;
    unsigned bits[SLOTS];
#pragma unroll
    for (int word = 0; word < SLOTS; ++word) bits[word] = 0;
#pragma unroll 1
    for (int at = thread; at >= 0; at = parent_of[at]) {
#pragma unroll
        for (int word = 0; word < SLOTS; ++word) bits[word] |= at / 32 == word ? 1u << at % 32 : 0u;
    }
#pragma unroll
    for (int word = 0; word < SLOTS; ++word) ancestors[thread * SLOTS + word] = bits[word];
}
