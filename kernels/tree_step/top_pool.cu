// The `width` greatest logits of each row, in order, and the row's log-sum-exp, in two launches (see top_pool.py).
//
// A logit's key is its float ordered as an unsigned, above the complement of its token: all keys differ, and of equal
// logits the smaller token is first. A row is cut into 16-byte vectors; group g is the vectors g, g + groups, ...
//   top_pool_groups  one thread a group: its greatest key. One warp: its part of the log-sum-exp.
//   top_pool_pick    one block a row. A bound that at least `width` group keys reach, and hardly more, is found bit by
//                    bit: the `width` greatest keys reach it too, and lie in the groups whose key does. The keys of
//                    these groups that reach it are sorted. Should they be more than CAPACITY, the bound is raised
//                    until they are not.
// Places in shared memory come from atomic counters; what is kept, and the sorted result, do not depend on their order.
//
// Compiled for DTYPE (0 float32, 1 bfloat16, 2 float16), CAPPED (1: logits have a soft cap) and SHARED_BYTES (what
// top_pool.py gives a block of top_pool_pick).
#ifndef CUDA_ON_CPU
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

typedef long long i64;
typedef unsigned long long u64;

struct PoolArguments {
    i64 logits;                 // [rows, vocabulary], rows row_stride elements apart
    i64 keys, sums;             // scratch: u64 [rows, groups], Sum [rows, group_warps]
    i64 values, tokens, total;  // outputs: float [rows, width], i64 [rows, width], float [rows]
    i64 row_stride, vocabulary, width;
    i64 groups, depth;  // groups of a row, vectors of a group
    float scale, cap;
};

#if DTYPE == 0
typedef unsigned Element;
#else
typedef unsigned short Element;
#endif

constexpr int GROUP_THREADS = 128;
constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int KEYS = 16;               // group keys that a thread of top_pool_pick holds,
constexpr int FEW_KEYS = 10;           // and how many are usual
constexpr int CAPACITY = 8 * THREADS;  // keys that can be sorted
constexpr int MAX_CHOSEN = 2304;       // groups whose keys may reach the bound: 9/8 of the greatest width
constexpr int PER_WORD = 4 / sizeof(Element), LANES = 4 * PER_WORD;  // elements of a word, of a vector
constexpr int AHEAD = 4;  // vectors that a thread loads before it looks at the first
static_assert(AHEAD * LANES <= 32, "a bit for each element");
constexpr unsigned FULL = 0xffffffffu;
constexpr unsigned ALL = (1u << LANES) - 1;  // a bit for each element of a vector

struct Sum {
    float most, sum;  // sum of exp(value - shift_of(most))
};

struct Vector {
    unsigned word[4];
    __device__ __forceinline__ Element element(int lane) const {
        return Element(word[lane / PER_WORD] >> lane % PER_WORD * 16);
    }
    // NaN where `lanes` has a bit.
    __device__ __forceinline__ void erase(unsigned lanes) {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) word[lane / PER_WORD] |= unsigned(Element(~0u)) << lane % PER_WORD * 16;
    }
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// __expf without its care for results below 2^-126, three instructions of six.
__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * 1.44269504f); }

__device__ __forceinline__ float float_of(Element bits) {
#if DTYPE == 0
    return __uint_as_float(bits);
#elif DTYPE == 1
    return __uint_as_float(unsigned(bits) << 16);
#else
    // Exponents of float16 start 112 below float32's; the product is exact, subnormal numbers included.
    const unsigned magnitude = bits & 0x7fffu;
    const unsigned finite = __float_as_uint(__uint_as_float(magnitude << 13) * __uint_as_float((112 + 127) << 23));
    const unsigned special = 0x7f800000u | magnitude << 13;
    return __uint_as_float(unsigned(bits & 0x8000u) << 16 | (magnitude < 0x7c00u ? finite : special));
#endif
}

__device__ __forceinline__ float shift_of(float most) { return most == infinity() || most == -infinity() ? 0.f : most; }

__device__ __forceinline__ unsigned order_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.f);  // -0.0 equals 0.0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}
__device__ __forceinline__ u64 key_of(float value, int token) {
    return u64(order_of(value)) << 32 | unsigned(0x7fffffff - token);
}
__device__ __forceinline__ int token_of(u64 key) { return 0x7fffffff - int(unsigned(key)); }

// What reaches a key: greater values, and equal ones down to a token.
struct Bound {
    float value;
    int token;

    __device__ __forceinline__ Bound(u64 key, int vocabulary)
        : value(value_of(unsigned(key >> 32))), token(min(token_of(key), vocabulary)) {
        if (value != value && !(key >> 63)) {  // below the keys of -inf
            value = -infinity();
            token = vocabulary;
        }
    }
};

// One row of logits, read in aligned vectors; the first may begin before it and the last end behind it.
struct Row {
    const Element* logits;
    int vocabulary, before;  // elements of vector 0 that lie before the row
    float scale, cap;

    __device__ __forceinline__ Row(const PoolArguments& arguments, int row)
        : logits(reinterpret_cast<const Element*>(arguments.logits) + row * arguments.row_stride),
          vocabulary(int(arguments.vocabulary)),
          before(int(reinterpret_cast<u64>(logits) % 16 / sizeof(Element))),
          scale(arguments.scale),
          cap(arguments.cap) {}

    __device__ __forceinline__ int first_token(int vector) const { return vector * LANES - before; }

    // Whole, as no 16 aligned bytes straddle an allocation's end; zeros behind the row.
    __device__ __forceinline__ Vector load(int vector) const {
        const int first = first_token(vector);
        if (first >= vocabulary) return {};
        const uint4 words = *reinterpret_cast<const uint4*>(logits + first);
        return {words.x, words.y, words.z, words.w};
    }

    // A bit for each element of the vector from token `first` on: whether it is a token.
    __device__ __forceinline__ unsigned inside(int first) const {
        const int low = max(-first, 0), high = max(first + LANES - vocabulary, 0);
        return low < LANES && high < LANES ? ALL << low & ALL >> high : 0;
    }

    // Both launches must give the same bits, so that no product here may join an addition elsewhere.
    __device__ __forceinline__ float value(Element bits) const {
        float value = __fmul_rn(float_of(bits), scale);
#if CAPPED
        value = __fmul_rn(cap, tanhf(__fdiv_rn(value, cap)));
#endif
        return fmaxf(value, -infinity());  // NaN counts as -inf
    }

    // A bit for each element of the vector from token `first` on: whether its key reaches the bound.
    __device__ __forceinline__ unsigned reaching(const Vector& vector, int first, const Bound& bound) const {
        unsigned above = 0, equal = 0;
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            const float own = value(vector.element(lane));
            above |= unsigned(own > bound.value) << lane;
            equal |= unsigned(own == bound.value) << lane;
        }
        const unsigned ties = first > bound.token ? 0 : ALL >> max(LANES - 1 - (bound.token - first), 0);
        return (above | (equal & ties)) & inside(first);
    }
};

__device__ __forceinline__ Sum merge_in_warp(Sum own) {
    float most = own.most;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, lanes));
    float sum = own.sum * exp_of(own.most - shift_of(most));
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(FULL, sum, lanes);
    return {most, sum};
}

extern "C" __global__ void __launch_bounds__(GROUP_THREADS) top_pool_groups(const PoolArguments arguments) {
    const int group = blockIdx.x * GROUP_THREADS + threadIdx.x;
    const int groups = int(arguments.groups), depth = int(arguments.depth);
    const Row row(arguments, blockIdx.y);

    int token = max(row.first_token(group), 0);
    const bool real = group < groups && token < row.vocabulary;
    Sum own = {-infinity(), 0.f};
    for (int first = 0; real && first < depth; first += AHEAD) {
        Vector vectors[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (first + i < depth) vectors[i] = row.load(group + (first + i) * groups);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= depth) break;
            const int from = row.first_token(group + (first + i) * groups);
            const unsigned inside = row.inside(from);
            if (inside != ALL) vectors[i].erase(~inside);
            float value[LANES], most = own.most;
#pragma unroll
            for (int lane = 0; lane < LANES; ++lane) {
                value[lane] = row.value(vectors[i].element(lane));
                most = fmaxf(most, value[lane]);
            }
            if (most > own.most) {
#pragma unroll
                for (int lane = LANES - 1; lane >= 0; --lane)
                    if (value[lane] == most) token = from + lane;
            }
            const float shift = shift_of(most);
            float sum = own.sum * exp_of(own.most - shift);
#pragma unroll
            for (int lane = 0; lane < LANES; ++lane) sum += exp_of(value[lane] - shift);
            own = {most, sum};
        }
    }

    if (group < groups)
        reinterpret_cast<u64*>(arguments.keys)[i64(blockIdx.y) * groups + group] =
            real ? key_of(own.most, token) : 0;
    own = merge_in_warp(own);
    const int group_warps = (groups + 31) / 32;
    if (group < groups && group % 32 == 0)
        reinterpret_cast<Sum*>(arguments.sums)[i64(blockIdx.y) * group_warps + group / 32] = own;
}

struct Shared {
    u64 key[2][CAPACITY];  // the second is for sorting
    int chosen[MAX_CHOSEN];
    int partial[2][WARPS];
    int counter;
    Sum sums[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "top_pool.py gives another amount of shared memory");

// The sum over a block. `turn` alternates: a call's reads need no barrier before the next call's writes.
__device__ __forceinline__ int sum_of_block(Shared& shared, int value, int& turn) {
    const int sum = __reduce_add_sync(FULL, value);
    turn ^= 1;
    if (threadIdx.x % 32 == 0) shared.partial[turn][threadIdx.x / 32] = sum;
    __syncthreads();
    return __reduce_add_sync(FULL, threadIdx.x % 32 < WARPS ? shared.partial[turn][threadIdx.x % 32] : 0);
}

// A bound that `width` to `limit` keys reach, or all where they are fewer. count(bound) gives a thread's share of the
// keys; `counted` of them reach `known`.
template <class Count>
__device__ __forceinline__ u64
find_bound(Shared& shared, int& turn, int width, int limit, u64 known, int counted, Count count) {
    u64 bound = 0;
    for (int bit = 63; bit >= 0 && counted > limit; --bit) {
        const u64 trial = bound | 1ull << bit;
        if (trial <= known) {
            bound = trial;
            continue;
        }
        const int reached = sum_of_block(shared, count(trial), turn);
        if (reached >= width) {
            bound = trial;
            counted = reached;
        }
    }
    return bound ? bound : 1;  // 0 stands where there is no key
}

// The first of `count` places for a thread.
__device__ __forceinline__ int take_places(Shared& shared, int count) {
    const int lane = threadIdx.x % 32;
    int up_to = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_sync(FULL, up_to, max(lane - step, 0));
        up_to += lane >= step ? before : 0;
    }
    int first = 0;
    if (lane == 31) first = atomicAdd(&shared.counter, up_to);
    return __shfl_sync(FULL, first, 31) + up_to - count;
}

// Which logits of the chosen groups reach the bound, AHEAD vectors of a group at a time: take(bits, first) has a bit
// for each logit, and the first vector's first token. Every thread of a warp takes or none.
template <class Take>
__device__ __forceinline__ void
read_chosen(const Shared& shared, const PoolArguments& arguments, const Row& row, int chosen, u64 key, Take take) {
    const int groups = int(arguments.groups), depth = int(arguments.depth);
    const Bound bound(key, row.vocabulary);
    for (int warp = threadIdx.x / 32 * 32; warp < chosen; warp += THREADS) {
        const int index = warp + threadIdx.x % 32;
        const int vectors = index < chosen ? depth : 0, group = index < chosen ? shared.chosen[index] : 0;
        for (int slice = 0; slice < depth; slice += AHEAD) {
            Vector loaded[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (slice + i < vectors) loaded[i] = row.load(group + (slice + i) * groups);
            unsigned bits = 0;
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (slice + i < vectors)
                    bits |= row.reaching(loaded[i], row.first_token(group + (slice + i) * groups), bound) << i * LANES;
            take(bits, row.first_token(group + slice * groups));
        }
    }
}

// Puts the chosen groups' keys that reach the bound into shared memory, CAPACITY at most; returns how many there are.
__device__ __forceinline__ int
collect(Shared& shared, const PoolArguments& arguments, const Row& row, int chosen, u64 bound) {
    __syncthreads();
    if (threadIdx.x == 0) shared.counter = 0;
    __syncthreads();
    const int step = int(arguments.groups) * LANES;
    read_chosen(shared, arguments, row, chosen, bound, [&](unsigned bits, int first) {
        int place = take_places(shared, __popc(bits));
        for (; bits && place < CAPACITY; ++place, bits &= bits - 1) {
            const int at = __ffs(bits) - 1, token = first + at / LANES * step + at % LANES;
            shared.key[0][place] = key_of(row.value(row.logits[token]), token);
        }
    });
    __syncthreads();
    return shared.counter;
}

__device__ __forceinline__ u64 key_of_lane(u64 key, int lanes) {
    return u64(__shfl_xor_sync(FULL, unsigned(key >> 32), lanes)) << 32 | __shfl_xor_sync(FULL, unsigned(key), lanes);
}

// Sorts `count` keys, EACH * THREADS at most, in descending order (bitonic), and writes the first `width`. A thread's
// key i stands at 32 (EACH warp + i) + lane.
template <int EACH>
__device__ __forceinline__ void sort_and_write(Shared& shared, const PoolArguments& arguments, int count) {
    const int first = threadIdx.x / 32 * 32 * EACH + threadIdx.x % 32;
    u64 key[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) key[i] = first + i * 32 < count ? shared.key[0][first + i * 32] : 0;
    int half = 0;
    for (int span = 2; span < 2 * count; span *= 2) {
        for (int stride = span / 2; stride; stride /= 2) {
            u64 other[EACH];
            if (stride >= 32 * EACH) {
                half ^= 1;
#pragma unroll
                for (int i = 0; i < EACH; ++i) shared.key[half][first + i * 32] = key[i];
                __syncthreads();
#pragma unroll
                for (int i = 0; i < EACH; ++i) other[i] = shared.key[half][(first + i * 32) ^ stride];
            } else if (stride < 32) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) other[i] = key_of_lane(key[i], stride);
            } else {
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    other[i] = stride == 32   ? key[i ^ (1 & (EACH - 1))]
                               : stride == 64 ? key[i ^ (2 & (EACH - 1))]
                                              : key[i ^ (4 & (EACH - 1))];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int position = first + i * 32;
                const bool greater = ((position & stride) == 0) == ((position & span) == 0);
                if (greater == (other[i] > key[i])) key[i] = other[i];
            }
        }
    }
    const int width = int(arguments.width);
    float* values = reinterpret_cast<float*>(arguments.values) + i64(blockIdx.x) * width;
    i64* tokens = reinterpret_cast<i64*>(arguments.tokens) + i64(blockIdx.x) * width;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int position = first + i * 32;
        if (position >= width) continue;
        values[position] = value_of(unsigned(key[i] >> 32));
        tokens[position] = token_of(key[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) top_pool_pick(const PoolArguments arguments) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int thread = threadIdx.x, groups = int(arguments.groups), width = int(arguments.width);
    const int group_warps = (groups + 31) / 32;
    const Row row(arguments, blockIdx.x);

    const u64* keys = reinterpret_cast<const u64*>(arguments.keys) + i64(blockIdx.x) * groups;
    u64 own[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        const int group = i * THREADS + thread;
        own[i] = group < groups ? keys[group] : 0;
    }
    Sum sum = {-infinity(), 0.f};
    if (thread < group_warps)
        sum = reinterpret_cast<const Sum*>(arguments.sums)[i64(blockIdx.x) * group_warps + thread];
    sum = merge_in_warp(sum);
    if (thread % 32 == 0) shared.sums[thread / 32] = sum;
    if (thread == 0) shared.counter = 0;
    __syncthreads();
    if (thread < 32) {
        sum = merge_in_warp(thread < WARPS ? shared.sums[thread] : Sum{-infinity(), 0.f});
        if (thread == 0) reinterpret_cast<float*>(arguments.total)[blockIdx.x] = shift_of(sum.most) + logf(sum.sum);
    }

    int turn = 0;
    u64 bound = find_bound(shared, turn, width, width + width / 8, 0, groups, [&](u64 trial) {
        int reached = 0;
#pragma unroll
        for (int i = 0; i < FEW_KEYS; ++i) reached += own[i] >= trial;
        if (groups > FEW_KEYS * THREADS) {
#pragma unroll
            for (int i = FEW_KEYS; i < KEYS; ++i) reached += own[i] >= trial;
        }
        return reached;
    });
    int taken = 0;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) taken += own[i] >= bound;
    int place = take_places(shared, taken);
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        if (own[i] >= bound) shared.chosen[place++] = i * THREADS + thread;
    __syncthreads();
    const int chosen = shared.counter;

    int count = 0;
    for (bool raised = false;; raised = true) {
        count = collect(shared, arguments, row, chosen, bound);
        if (count <= CAPACITY || raised) break;
        bound = find_bound(shared, turn, width, CAPACITY, bound, count, [&](u64 trial) {
            int reached = 0;
            read_chosen(shared, arguments, row, chosen, trial, [&](unsigned bits, int) { reached += __popc(bits); });
            return reached;
        });
    }

    count = min(count, CAPACITY);
    if (count <= THREADS)
        sort_and_write<1>(shared, arguments, count);
    else if (count <= 2 * THREADS)
        sort_and_write<2>(shared, arguments, count);
    else if (count <= 4 * THREADS)
        sort_and_write<4>(shared, arguments, count);
    else
        sort_and_write<8>(shared, arguments, count);
}
