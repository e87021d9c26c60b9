// The best-first token tree of marginals, one block a request (see tree_build.py). Its first warp pops the nodes one after
// the other; all SLOTS warps write the tree, a thread a node.
//
// Frontier entries lie in registers, SLOTS a lane. Popping an entry replaces it by its next sibling and opens a new
// entry for its first child: the child of pop t goes to slot t, so a budget of B nodes needs B entries. An entry is
//   order    the path score as an unsigned that sorts alike, 0 for none (scores are at most 0: 0x7f800000 - |score|)
//   key      ~(depth << 16 | parent's place in its depth << 8 | candidate rank): the tie order, greater first
//   above    the parent's score, from which siblings are scored
// A pop depends on the one before, so its latency is the kernel's time: maxima by pairs, what the popped entry's lane
// alone knows computed beside the other lanes' work, selections in the place of branches.
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

struct Entry {
    unsigned order, key;
    float above;
    int slot;
};
__device__ __forceinline__ Entry greater(const Entry& a, const Entry& b) {
    return b.order > a.order || (b.order == a.order && b.key > a.key) ? b : a;
}

extern "C" __global__ void __launch_bounds__(32 * SLOTS) tree_build(const BuildArguments arguments) {
    DYNAMIC_SHARED(memory);
    constexpr int THREADS = 32 * SLOTS;
    const int thread = threadIdx.x, lane = thread % 32;
    const i64 request = blockIdx.x;
    const int depths = arguments.depths, width = arguments.width, budget = arguments.budget;

    float* log_probs = reinterpret_cast<float*>(memory);                     // [depths * width]
    unsigned* popped = reinterpret_cast<unsigned*>(log_probs + depths * width);  // key of each pop, [budget]
    int* place = reinterpret_cast<int*>(popped + budget);                    // of each pop in its depth, [budget]
    int* parent_of = place + budget;                                         // by node, [budget]
    int* count = parent_of + budget;                                         // nodes of each depth, [depths + 1]
    int* first = count + depths + 1;                                         // first node of each depth, [depths + 2]
    int* popped_nodes = first + depths + 2;                                  // and the root

    const float* given = reinterpret_cast<const float*>(arguments.log_probs) + request * depths * width;
    for (int i = thread; i < depths * width; i += THREADS) {
        const float value = given[i];
        log_probs[i] = value > 0.f ? 0.f : value == value ? value : -__uint_as_float(0x7f800000u);
    }
    for (int i = thread; i <= depths; i += THREADS) count[i] = 0;
    __syncthreads();

    if (thread < 32) {
        int limit = depths;
        if (arguments.max_depth) {
            const i64 wanted = reinterpret_cast<const i64*>(arguments.max_depth)[request];
            limit = wanted < depths ? int(wanted) : depths;
        }
        Entry entry[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) entry[i] = {0, 0, 0.f, i};
        if (lane == 0 && limit > 0) {
            entry[0].order = order_of(log_probs[0]);
            entry[0].key = ~(1u << 16);
        }

        int nodes = 1;
        for (; nodes < budget; ++nodes) {
            Entry own[SLOTS];
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) own[i] = entry[i];
#pragma unroll
            for (int apart = 1; apart < SLOTS; apart *= 2)
#pragma unroll
                for (int i = 0; i + apart < SLOTS; i += 2 * apart) own[i] = greater(own[i], own[i + apart]);
            const unsigned best = __reduce_max_sync(0xffffffffu, own[0].order);
            if (best == 0) break;
            // A live entry's key is never 0, and no two are alike.
            const unsigned best_key = __reduce_max_sync(0xffffffffu, own[0].order == best ? own[0].key : 0u);
            const bool mine = own[0].order == best && own[0].key == best_key;

            const int depth = ~best_key >> 16, rank = ~best_key & 255;
            const float* row = log_probs + (depth - 1) * width;
            const bool has_child = depth < limit, has_sibling = rank + 1 < width;
            const float child_score = score_of(best) + row[has_child ? width : 0];
            const float sibling_score = own[0].above + row[has_sibling ? rank + 1 : 0];
            const unsigned child = has_child ? order_of(child_score) : 0u;
            const unsigned sibling = has_sibling ? order_of(sibling_score) : 0u;
            const int index = count[depth];
            const unsigned child_key = ~(unsigned(depth + 1) << 16 | unsigned(index) << 8);
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) {
                const bool replaced = mine && i == own[0].slot, opened = nodes == i * 32 + lane;
                entry[i].order = opened ? child : replaced ? sibling : entry[i].order;
                entry[i].key = opened ? child_key : replaced ? best_key - 1 : entry[i].key;
                entry[i].above = opened ? score_of(best) : entry[i].above;
            }
            __syncwarp();  // every lane has read count
            if (lane == 0) {
                popped[nodes] = ~best_key;
                place[nodes] = index;
                count[depth] = index + 1;
            }
            __syncwarp();
        }
        if (lane == 0) *popped_nodes = nodes;
    }
    __syncthreads();
    const int nodes = *popped_nodes;
    for (int d = 1 + thread; d <= depths + 1; d += THREADS) {
        int before = 1;
        for (int e = 1; e < d; ++e) before += count[e];
        first[d] = before;
    }
    __syncthreads();

    const i64 root = reinterpret_cast<const i64*>(arguments.root)[request];
    const i64* candidates = reinterpret_cast<const i64*>(arguments.tokens) + request * depths * width;
    i64* token = reinterpret_cast<i64*>(arguments.token) + request * budget;
    i64* parent = reinterpret_cast<i64*>(arguments.parent) + request * budget;
    i64* depth = reinterpret_cast<i64*>(arguments.depth) + request * budget;
    unsigned* ancestors = reinterpret_cast<unsigned*>(arguments.ancestors) + request * budget * SLOTS;
    i64* position = reinterpret_cast<i64*>(arguments.position) + request * budget;
    const i64 committed = arguments.committed ? reinterpret_cast<const i64*>(arguments.committed)[request] : 0;

    for (int t = thread; t < budget; t += THREADS) {
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
    if (thread == 0) reinterpret_cast<i64*>(arguments.node_count)[request] = nodes;
    __syncthreads();
    for (int node = thread; node < budget; node += THREADS) {
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
