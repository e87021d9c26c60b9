// The best-first token tree of marginals, one warp a request (see tree_build.py).
//
// Frontier entries lie in registers, SLOTS a lane. Popping an entry replaces it by its next sibling and opens a new
// entry for its first child: the child of pop t goes to slot t, so a budget of B nodes needs B entries. An entry is
//   order    the path score as an unsigned that sorts alike, 0 for none (scores are at most 0: 0x7f800000 - |score|)
//   key      depth << 16 | parent's place in its depth << 8 | candidate rank: the tie order, smaller first
//   above    the parent's score, from which siblings are scored
// Compiled for SLOTS, words of 32 nodes that the budget needs.
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

__device__ __forceinline__ unsigned order_of(float score) {
    const unsigned magnitude = __float_as_uint(score) & 0x7fffffffu;
    return magnitude < 0x7f800000u ? 0x7f800000u - magnitude : 0u;
}
__device__ __forceinline__ float score_of(unsigned order) { return -__uint_as_float(0x7f800000u - order); }

extern "C" __global__ void __launch_bounds__(32) tree_build(const BuildArguments arguments) {
    DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x;
    const i64 request = blockIdx.x;
    const int depths = arguments.depths, width = arguments.width, budget = arguments.budget;

    float* log_probs = reinterpret_cast<float*>(memory);                     // [depths * width]
    unsigned* popped = reinterpret_cast<unsigned*>(log_probs + depths * width);  // key of each pop, [budget]
    int* place = reinterpret_cast<int*>(popped + budget);                    // of each pop in its depth, [budget]
    int* parent_of = place + budget;                                         // by node, [budget]
    int* count = parent_of + budget;                                         // nodes of each depth, [depths + 1]
    int* first = count + depths + 1;                                         // first node of each depth, [depths + 2]

    const float* given = reinterpret_cast<const float*>(arguments.log_probs) + request * depths * width;
    for (int i = lane; i < depths * width; i += 32) {
        const float value = given[i];
        log_probs[i] = value > 0.f ? 0.f : value == value ? value : -__uint_as_float(0x7f800000u);
    }
    for (int i = lane; i <= depths; i += 32) count[i] = 0;
    int limit = depths;
    if (arguments.max_depth) {
        const i64 wanted = reinterpret_cast<const i64*>(arguments.max_depth)[request];
        limit = wanted < depths ? int(wanted) : depths;
    }
    __syncwarp();

    unsigned order[SLOTS], key[SLOTS];
    float above[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        order[i] = 0;
        key[i] = 0;
        above[i] = 0.f;
    }
    if (lane == 0 && limit > 0) {
        order[0] = order_of(log_probs[0]);
        key[0] = 1u << 16;
    }

    int nodes = 1;
    for (; nodes < budget; ++nodes) {
        // Inverted keys, so that the greatest is the first in tie order; a live entry's is never 0.
        unsigned own_order = 0, own_key = 0;
        int own_slot = 0;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const bool better = order[i] > own_order || (order[i] == own_order && ~key[i] > own_key);
            if (better) {
                own_order = order[i];
                own_key = ~key[i];
                own_slot = i;
            }
        }
        const unsigned best = __reduce_max_sync(0xffffffffu, own_order);
        if (best == 0) break;
        const unsigned best_key = ~__reduce_max_sync(0xffffffffu, own_order == best ? own_key : 0u);
        const bool mine = own_order == best && own_key == ~best_key;

        const int depth = best_key >> 16, rank = best_key & 255;
        const int index = count[depth];
        __syncwarp();
        if (lane == 0) {
            popped[nodes] = best_key;
            place[nodes] = index;
            count[depth] = index + 1;
        }
        __syncwarp();

        const float* row = log_probs + (depth - 1) * width;
        const unsigned child = depth < limit ? order_of(score_of(best) + row[width]) : 0u;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            if (mine && i == own_slot) {
                order[i] = rank + 1 < width ? order_of(above[i] + row[rank + 1]) : 0u;
                key[i] = best_key + 1;
            }
            if (nodes == i * 32 + lane) {
                order[i] = child;
                key[i] = unsigned(depth + 1) << 16 | unsigned(index) << 8;
                above[i] = score_of(best);
            }
        }
    }

    if (lane == 0) {
        first[1] = 1;
        for (int d = 1; d <= depths; ++d) first[d + 1] = first[d] + count[d];
    }
    __syncwarp();

    const i64 root = reinterpret_cast<const i64*>(arguments.root)[request];
    const i64* candidates = reinterpret_cast<const i64*>(arguments.tokens) + request * depths * width;
    i64* token = reinterpret_cast<i64*>(arguments.token) + request * budget;
    i64* parent = reinterpret_cast<i64*>(arguments.parent) + request * budget;
    i64* depth = reinterpret_cast<i64*>(arguments.depth) + request * budget;
    unsigned* ancestors = reinterpret_cast<unsigned*>(arguments.ancestors) + request * budget * SLOTS;
    i64* position = reinterpret_cast<i64*>(arguments.position) + request * budget;
    const i64 committed = arguments.committed ? reinterpret_cast<const i64*>(arguments.committed)[request] : 0;

    for (int t = lane; t < budget; t += 32) {
        int node = t, above_node = -1, at = 0;
        i64 value = root;
        if (t > 0 && t < nodes) {
            at = popped[t] >> 16;
            node = first[at] + place[t];
            above_node = at == 1 ? 0 : first[at - 1] + int(popped[t] >> 8 & 255);
            value = candidates[(at - 1) * width + int(popped[t] & 255)];
        }
        parent_of[node] = above_node;
        token[node] = value;
        parent[node] = above_node;
        depth[node] = at;
        if (arguments.position) position[node] = committed + at;
    }
    if (lane == 0) reinterpret_cast<i64*>(arguments.node_count)[request] = nodes;
    __syncwarp();
    for (int node = lane; node < budget; node += 32) {
        unsigned bits[SLOTS];
#pragma unroll
        for (int word = 0; word < SLOTS; ++word) bits[word] = 0;
        for (int at = node; at >= 0; at = parent_of[at]) {
#pragma unroll
            for (int word = 0; word < SLOTS; ++word) bits[word] |= at / 32 == word ? 1u << at % 32 : 0u;
        }
#pragma unroll
        for (int word = 0; word < SLOTS; ++word) ancestors[node * SLOTS + word] = bits[word];
    }
}
