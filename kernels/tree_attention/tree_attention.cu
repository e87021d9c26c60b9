// Tree attention in one launch, for Hopper: heads of 128 or 256, K and V of q's dtype, up to 256 nodes, no sliding window
// (see cuda_kernel.py; dispatch.py has the contract).
//
// A request's keys are one sequence, the committed prefix and then the nodes, in tiles of 64. The rows of a block are (node,
// head) pairs of one kv head. SPLITS blocks have the same rows and share the tiles, as many of them as there are tiles at
// most: which block takes which follows prefix_indptr, read on the device, so one CUDA graph serves all lengths. All wait for
// the slowest, so where whole tiles would give some blocks one more, and an even division none more than 16 keys beyond its
// whole tiles, shares are even to 16 keys; those 16 are the share's rest.
//
// At the end each block leaves the sums, peaks and totals of its rows, its part, in scratch in global memory, and merges a
// part of the rows, in the order of the blocks: the bits do not depend on who comes last. Who waits must not keep from running
// whom it waits for: cuda_kernel.py launches no more blocks than the device runs together, cooperatively. Through shared
// memory of a cluster the same took longer, since clusters of most sizes leave a quarter of the chip idle, and what a block
// reads of another's shared memory comes at some 12 bytes a clock.
//
// There is no barrier: between launches all words of scratch are ABSENT, which no number is, and a warp looks at the words that
// it merges until they are something else, each for itself, and makes them ABSENT again. So a word must be left if and only
// if it is merged: of rows that exist, by blocks that have keys. First a warp looks for its rows' notes, which are written
// last, so that those who wait ask for little. Launches share scratch and must not run at the same time.
//
// Of bfloat16, parts are float16, scaled by a power of two to the greatest of their row: an eighth of the error of the
// result's rounding, for all columns down to 2^-28 of the greatest. Of float16 they are float32.
//
// What is hidden behind what: q's copy behind the reads of prefix_indptr and slots; the whole ring is filled at once, and
// later a tile's slots are read a turn (of a pipeline three) before its keys and values are asked for. Ancestor bits are
// copied once a block, while slots are read, and only where the block has tiles of the tree.
//
// Shared memory holds Q, K and V as rows of 64 numbers (128 bytes), 64 columns of a head after the other, and the 16-byte
// pieces of a row in the order piece ^ row % 8. That is what 128-byte swizzled operands of wgmma are, and ldmatrix meets no
// bank twice in it.
//
// A block has two groups of four warps; a warp has 16 rows, its lanes hold what the operands and results of both m16n8k16
// and wgmma lay down: lane 4 g + t has rows g and g + 8 and columns 2 t and 2 t + 1 of each eight. Of 65 rows on, the groups
// have different rows (ROW_GROUPS 2); to 64 they have the same, and different tiles: one more way to split, whose sums the
// second group gives to the first through shared memory.
//
// With heads of 256 the sums take half of the registers, so q stays in shared memory, where wgmma reads it; the ring has two
// turns, and ROW_GROUPS is always 2.
//
// With WGMMA, which needs sm_90a, products are Hopper's instruction, and the work is a pipeline: four more warps read all
// slots and copy all keys and values. Groups of the same tiles begin their products in turn, those of different tiles go at
// their own pace. The ring then holds units, of keys or of values of a turn, each with a barrier that says that it is full
// and one that says that it is empty. wgmma sees copies behind a fence of those who read, who have no copies under way that
// a fence might wait for. Without WGMMA products are mma.sync, all warps copy, and they meet once a turn.
//
// Compiled for HALF (0: bfloat16, 1: float16), HEAD_DIM (128 or 256), GROUP (query heads of a kv head), ROW_GROUPS (1 or 2),
// SPLITS (1 to 32), STAGES (turns that the ring holds, or units), CAPPED (whether logits are capped), WGMMA, SHARED_BYTES
// and PART_BYTES (what cuda_kernel.py gives a block).
#ifndef CUDA_ON_CPU
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
// 16 bytes of global memory to shared memory.
__device__ __forceinline__ void copy_async_16(void* to_shared, const void* from_global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from_global)
                 : "memory");
}
// 4 bytes.
__device__ __forceinline__ void copy_async_4(void* to_shared, const void* from_global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to_shared)), "l"(from_global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Four matrices of 8 rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrix_x4(unsigned (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Two numbers rounded to q's dtype.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned pair;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
// Two numbers rounded to float16, and back.
__device__ __forceinline__ unsigned pack_half(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 unpack_half(unsigned pair) {
    float2 x;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(pair));
    return x;
}
#if HALF
#define DTYPE "f16"
#else
#define DTYPE "bf16"
#endif
#if WGMMA
#define FOUR(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
// c[64, 64] (+)= a[64, 16] b[64, 16]^T, the keys at `keys`: a group's product, under way until wait_for_products.
__device__ __forceinline__ void multiply_keys_16(float (&c)[8][4], const unsigned (&a)[4], unsigned long long keys,
                                                 bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." DTYPE "." DTYPE
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
                 : FOUR(c[0]), FOUR(c[1]), FOUR(c[2]), FOUR(c[3]), FOUR(c[4]), FOUR(c[5]), FOUR(c[6]), FOUR(c[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(keys), "r"(int(add)));
}
// With a, of 64 rows, at `queries`.
__device__ __forceinline__ void multiply_keys_16(float (&c)[8][4], unsigned long long queries, unsigned long long keys,
                                                 bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." DTYPE "." DTYPE
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : FOUR(c[0]), FOUR(c[1]), FOUR(c[2]), FOUR(c[3]), FOUR(c[4]), FOUR(c[5]), FOUR(c[6]), FOUR(c[7])
                 : "l"(queries), "l"(keys), "r"(int(add)));
}
// c[64, 128] += a[64, 16] b[16, 128], the values at `values`.
__device__ __forceinline__ void multiply_values_16(float (&c)[16][4], const unsigned (&a)[4], unsigned long long values) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." DTYPE "." DTYPE
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "
                 "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, "
                 "%61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : FOUR(c[0]), FOUR(c[1]), FOUR(c[2]), FOUR(c[3]), FOUR(c[4]), FOUR(c[5]), FOUR(c[6]), FOUR(c[7]),
                   FOUR(c[8]), FOUR(c[9]), FOUR(c[10]), FOUR(c[11]), FOUR(c[12]), FOUR(c[13]), FOUR(c[14]), FOUR(c[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values));
}
// c[64, 16] (+)= a[64, 16] b[16, 16]^T, both ways.
__device__ __forceinline__ void multiply_keys_16(float (&c)[2][4], const unsigned (&a)[4], unsigned long long keys,
                                                 bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32." DTYPE "." DTYPE
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, 0;\n}"
                 : FOUR(c[0]), FOUR(c[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(keys), "r"(int(add)));
}
__device__ __forceinline__ void multiply_keys_16(float (&c)[2][4], unsigned long long queries, unsigned long long keys,
                                                 bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32." DTYPE "." DTYPE
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1, 0, 0;\n}"
                 : FOUR(c[0]), FOUR(c[1])
                 : "l"(queries), "l"(keys), "r"(int(add)));
}
// What registers hold is seen by products that start behind this.
__device__ __forceinline__ void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler must not move reads of sums across this (it does not know that products are under way).
template <int N>
__device__ __forceinline__ void hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) asm volatile("" : FOUR(c[n])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(unsigned (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}
// What this thread's copies wrote is seen by wgmma behind the next barrier.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
// c[16, 8] += a[16, 16] b[16, 8], float32 sums.
__device__ __forceinline__ void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." DTYPE "." DTYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
// Where the THREADS that attend meet.
__device__ __forceinline__ void readers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// A group's turn to begin products, which the other gives.
__device__ __forceinline__ void wait_for_turn() {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + int(threadIdx.x) / 128) : "memory");
}
__device__ __forceinline__ void give_turn() {
    asm volatile("bar.arrive %0, 256;" ::"r"(3 - int(threadIdx.x) / 128) : "memory");
}
#if WGMMA
// A barrier in shared memory that `arrivals` threads complete, over and over; those who wait see what was done before.
__device__ __forceinline__ void start_barrier(unsigned long long* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive_at(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// For its completion number 0, 2 and so on where `odd` is 0, else 1, 3 and so on.
__device__ __forceinline__ void wait_at(unsigned long long* barrier, unsigned odd) {
    unsigned done;
    do {
        asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(odd)
                     : "memory");
    } while (!done);
}
// An arrival when all that this thread copies has landed.
__device__ __forceinline__ void arrive_when_copied(unsigned long long* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
template <int MOST>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MOST));
}
template <int MOST>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST));
}
#endif
#if SPLITS > 1
// Words that other blocks read while this one runs.
__device__ __forceinline__ void store_words(uint4* to, uint4 x) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ void store_words(uint2* to, uint2 x) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void load_words(uint4& x, const uint4* from) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
}
__device__ __forceinline__ void load_words(uint2& x, const uint2* from) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
}
__device__ __forceinline__ void look_again() {}
// x, of which the compiler knows nothing.
__device__ __forceinline__ float unknown(float x) {
    asm volatile("" : "+f"(x));
    return x;
}
#endif
#endif

typedef long long i64;
typedef unsigned long long u64;

struct AttentionArguments {
    i64 q;              // [requests * nodes, heads, HEAD_DIM], out alike; every row at a 16-byte address
    i64 k_pool, v_pool; // [slots, kv heads, HEAD_DIM], every row at a 16-byte address
    i64 prefix_indptr;  // int [requests + 1]
    i64 prefix_slots;   // int, or int64 where prefix_wide is 1
    i64 node_slots;     // int [requests * nodes], or int64 where node_wide is 1
    i64 ancestors;      // unsigned [requests, nodes, words]
    i64 sinks;          // float [heads], or null
    i64 out;
    i64 q_token, q_head, k_slot, k_head, v_slot, v_head, out_token, out_head;  // bytes apart
    i64 ancestors_request, ancestors_node;                                     // words apart
    i64 nodes, prefix_wide, node_wide;
    double scale;  // of logits, to base 2; where they are capped: of tanh(inner_scale * logits)
    double inner_scale;
    double v_scale;
    i64 parts;  // Part [blocks], all words ABSENT, with SPLITS > 1
};

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // that attend
constexpr int COPIERS = WGMMA ? 4 : 0, COPYING_WARPS = WGMMA ? COPIERS : WARPS;
constexpr int DIM = HEAD_DIM, BLOCKS = DIM / 64, PIECES = DIM / 8;  // of 64 columns and of 16 bytes, of a row
constexpr int LANE_KEYS = 32 / PIECES;                              // that a warp copies at a time
#define QUERIES_KEPT (HEAD_DIM == 128)                              // in registers
constexpr int TILE = 64, KEY_GROUPS = 2 / ROW_GROUPS, TURN = TILE * KEY_GROUPS;  // keys of a tile, and of a block's turn
constexpr int REST = 16;                                                         // keys of a share that is no whole tiles
constexpr int ROWS = 64 * ROW_GROUPS;
constexpr int WORDS = 11;  // of ancestor bits a row, 8 at most: two behind are read, too, and rows are at different banks
constexpr int WARP_KEYS = TURN / COPYING_WARPS;
constexpr float SLACK = 8.0f;  // weights to 2^8, exact as those to 1
constexpr unsigned MINUS_INFINITY = 0xff800000u;
#if WGMMA
static_assert(STAGES >= 4, "a pipeline of two turns at least");
#endif
static_assert(STAGES > 1, "a stage is filled while another is read");
static_assert(DIM == 128 || (DIM == 256 && ROW_GROUPS == 2), "heads of 128, or of 256 with different rows a group");

template <int KEYS>
struct Tile {
    uint4 block[BLOCKS][KEYS][8];  // of 64 columns
};
struct Turn {
    Tile<TILE> keys[KEY_GROUPS], values[KEY_GROUPS];
};
struct Unit {  // of a pipeline: keys or values of a turn, in turn
    Tile<TILE> tiles[KEY_GROUPS];
};
struct Sums {  // of a key group, as lanes have them; over the ring, when it is done
    float numbers[4][DIM / 2 + 4][32];
};
struct Shared {
    union {
#if WGMMA
        Unit ring[STAGES];
#else
        Turn ring[STAGES];
#endif
        Sums sums;
    };
    Tile<REST> rest_keys, rest_values;
    uint4 queries[BLOCKS][ROWS][8];
    unsigned ancestors[ROWS][WORDS];
#if WGMMA
    unsigned long long full[STAGES], empty[STAGES], rest_full[2];  // one of the two is used: 16 bytes of barriers
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cuda_kernel.py gives a block the source's Shared");
#if HALF
typedef uint4 Four;  // float32
#else
typedef uint2 Four;  // float16
#endif
// What a block has of its rows.
struct Part {
    // Of float16, the columns in turn. Of bfloat16, columns 32 m + 16 i + 2 t, the next, and those 8 on, are at 8 m + 2 t + i: a
    // lane stores 16 bytes at a time.
    Four rows[ROWS][DIM / 4];
    uint4 notes[ROWS];  // floats: the greatest logit, the weights' sum, and what the numbers of `rows` are to be multiplied by
};
static_assert(sizeof(Part) == PART_BYTES, "cuda_kernel.py gives a block the source's Part");

// What all lanes of a warp have; the compiler does not know, and moves operands of wgmma from register to register.
__device__ __forceinline__ int uniform(int x) { return WGMMA ? __shfl_sync(~0u, x, 0) : x; }

// Piece `piece` of row `row`, of N rows.
template <int N>
__device__ __forceinline__ uint4* place(uint4 (&blocks)[BLOCKS][N][8], unsigned row, unsigned piece) {
    return &blocks[piece / 8][row][(piece ^ row) & 7];
}

#if WGMMA
// A wgmma operand of 128-byte swizzled rows that begins at `start`. Of keys (depth along the row), groups of eight rows
// are `stride` bytes apart. Of values (depth along the rows) these are too, and 64 columns `leading` bytes. To add n to an
// operand is to begin 16 n bytes later.
__device__ __forceinline__ u64 operand_at(unsigned start, unsigned leading, unsigned stride) {
    return u64(1) << 62 | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | (start >> 4 & 0x3fff);
}
#endif

// What a block has of the keys: REST of them, where `rest` says so, and behind these, from `first` on, whole tiles.
struct Share {
    int first, tiles;
    bool rest;
};
// Whole tiles, or, where the greatest share would have REST keys more than its whole tiles, such tiles and REST keys at most.
// The first blocks have the greater shares: the last one has the nodes, whose bits take time.
__device__ __forceinline__ Share share_of(unsigned keys, unsigned rank) {
    const unsigned rests = (keys + REST - 1) / REST, tiles = (keys + TILE - 1) / TILE;
    if (tiles < SPLITS) return {int(rank * TILE), rank < tiles, false};
    const bool even = (rests + SPLITS - 1) / SPLITS % (TILE / REST) == 1;
    const unsigned pieces = even ? rests : tiles, size = even ? REST : TILE;
    const unsigned least = pieces / SPLITS, greater = pieces % SPLITS;  // pieces of all, and shares that have one more
    const unsigned first = (rank * least + (rank < greater ? rank : greater)) * size;
    const unsigned own = (least + (rank < greater)) * size;
    return {int(first + own % TILE), int(own / TILE), own % TILE > 0};
}

struct Block {
    const AttentionArguments& arguments;
    Shared& shared;
    int request, head, first_row, nodes, begin, length;
    const char *own_k, *own_v;  // this thread's piece of the head, of slot 0

    __device__ __forceinline__ bool row_exists(int row) const { return first_row + row < nodes * GROUP; }

    // Rows behind the last are copies of it, as are keys: both are finite, and nothing comes of them.
    __device__ __forceinline__ void copy_queries() const {
        const int piece = threadIdx.x % PIECES;
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / THREADS; ++i) {
            const int row = threadIdx.x / PIECES + i * (THREADS / PIECES);
            const char* from = row_of(arguments.q, arguments.q_token, arguments.q_head, row);
            copy_async_16(place(shared.queries, row, piece), from + piece * 16);
        }
    }
    // Of q or out.
    __device__ __forceinline__ char* row_of(i64 base, i64 token_stride, i64 head_stride, int row) const {
        const unsigned at = min(first_row + row, nodes * GROUP - 1), token = request * nodes + at / GROUP;
        return reinterpret_cast<char*>(base) + u64(token) * unsigned(token_stride) +
               u64(head * GROUP + at % GROUP) * unsigned(head_stride);
    }
    __device__ __forceinline__ char* out_row(int row) const {
        return row_of(arguments.out, arguments.out_token, arguments.out_head, row);
    }
    // The logit of a row's sink, base 2.
    __device__ __forceinline__ float sink(int row) const {
        if (!arguments.sinks) return __uint_as_float(MINUS_INFINITY);
        return reinterpret_cast<const float*>(arguments.sinks)[head * GROUP + unsigned(first_row + row) % GROUP] *
               1.4426950408889634f;
    }

    __device__ __forceinline__ int slot_of(int any_key) const {
        const int key = min(any_key, length + nodes - 1);
        const bool in_prefix = key < length;
        const int* slots = reinterpret_cast<const int*>(in_prefix ? arguments.prefix_slots : arguments.node_slots);
        const unsigned index = in_prefix ? begin + key : request * nodes + key - length;
        return slots[index << int(in_prefix ? arguments.prefix_wide : arguments.node_wide)];
    }
    // A warp copies WARP_KEYS keys of a turn, LANE_KEYS at a time. The slot of one of them, lane % WARP_KEYS.
    __device__ __forceinline__ int read_slot(int first_key) const {
        return slot_of(first_key + int(threadIdx.x) / 32 % COPYING_WARPS * WARP_KEYS + int(threadIdx.x) % WARP_KEYS);
    }
    // Rows `first` on of a tile, N of them, by a warp; lane i % 32 has the slot of row i.
    template <int N, int KEYS>
    __device__ __forceinline__ void copy_rows(Tile<KEYS>& tile, unsigned first, const char* from, unsigned stride,
                                              int own_slot) const {
        const unsigned lane = threadIdx.x % 32, piece = lane % PIECES;
#pragma unroll 8
        for (int i = 0; i < N / LANE_KEYS; ++i) {
            const unsigned row = first + i * LANE_KEYS + lane / PIECES, slot = __shfl_sync(~0u, own_slot, row % 32);
            copy_async_16(place(tile.block, row, piece), from + u64(slot) * stride);
        }
    }
    // The share's rest, by all that copy: half of them keys, half values.
    __device__ __forceinline__ void copy_rest(int own_slot) const {
        constexpr int OWN = 2 * REST / COPYING_WARPS;
        const unsigned first = threadIdx.x / 32 % COPYING_WARPS * OWN;
        const bool of_values = first >= REST;
        copy_rows<OWN>(of_values ? shared.rest_values : shared.rest_keys, first % REST, of_values ? own_v : own_k,
                       unsigned(of_values ? arguments.v_slot : arguments.k_slot), own_slot);
    }
    __device__ __forceinline__ int read_rest_slot(const Share& share) const {
        return share.rest ? slot_of(share.first - REST + int(threadIdx.x) % REST) : 0;
    }
#if !WGMMA
    __device__ __forceinline__ void copy_turn(Turn& turn, int own_slot) const {
        const unsigned lane = threadIdx.x % 32, piece = lane % PIECES, first = threadIdx.x / 32 * WARP_KEYS;
        const unsigned k_slot = unsigned(arguments.k_slot), v_slot = unsigned(arguments.v_slot);
        Tile<TILE>& keys = turn.keys[first / TILE];
        Tile<TILE>& values = turn.values[first / TILE];
        unsigned slots[WARP_KEYS / LANE_KEYS];
#pragma unroll
        for (int i = 0; i < WARP_KEYS / LANE_KEYS; ++i) {
            const unsigned key = i * LANE_KEYS + lane / PIECES;
            slots[i] = __shfl_sync(~0u, own_slot, key);
            copy_async_16(place(keys.block, first % TILE + key, piece), own_k + u64(slots[i]) * k_slot);
        }
#pragma unroll
        for (int i = 0; i < WARP_KEYS / LANE_KEYS; ++i) {
            const unsigned key = i * LANE_KEYS + lane / PIECES;
            copy_async_16(place(values.block, first % TILE + key, piece), own_v + u64(slots[i]) * v_slot);
        }
    }
#else
    // What COPIERS warps do: units go to their stages as these become empty, slots are read three turns before.
    __device__ __forceinline__ void copy_all(const Share& share) const {
        const int turns = (share.tiles + KEY_GROUPS - 1) / KEY_GROUPS, first = threadIdx.x / 32 % COPIERS * WARP_KEYS;
        const int rest_slot = read_rest_slot(share);
        int slots[3];
#pragma unroll
        for (int turn = 0; turn < 3; ++turn) slots[turn] = read_slot(share.first + turn * TURN);
        if (share.rest) copy_rest(rest_slot);
        arrive_when_copied(&shared.rest_full[0]);
        int unit = 0;
        for (int turn = 0; turn < turns; ++turn) {
            const int slot = slots[0];
            slots[0] = slots[1];
            slots[1] = slots[2];
            slots[2] = read_slot(share.first + (turn + 3) * TURN);
            const bool copies = turn * KEY_GROUPS + first / TILE < share.tiles;
#pragma unroll
            for (int of_values = 0; of_values < 2; ++of_values) {
                const int stage = unit % STAGES;
                if (unit >= STAGES) wait_at(&shared.empty[stage], (unit / STAGES - 1) & 1);
                if (copies)
                    copy_rows<WARP_KEYS>(shared.ring[stage].tiles[first / TILE], first % TILE, of_values ? own_v : own_k,
                                         unsigned(of_values ? arguments.v_slot : arguments.k_slot), slot);
                arrive_when_copied(&shared.full[stage]);
                ++unit;
            }
        }  // what is still under way is waited for by those who read it
    }
    __device__ __forceinline__ void wait_for_unit(int unit) const {
        wait_at(&shared.full[unit % STAGES], unit / STAGES & 1);
        show_copies();
    }
    __device__ __forceinline__ void wait_for_rest() const {
        wait_at(&shared.rest_full[0], 0);
        show_copies();
    }
    __device__ __forceinline__ void free_unit(int unit) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive_at(&shared.empty[unit % STAGES]);
    }
#endif

    // The words that have nodes; what lies behind them in shared memory stays as it was.
    __device__ __forceinline__ void copy_ancestors() const {
        const int row = threadIdx.x % ROWS, node = min(first_row + row, nodes * GROUP - 1) / GROUP;
        const unsigned* bits = reinterpret_cast<const unsigned*>(arguments.ancestors) +
                               request * arguments.ancestors_request + node * arguments.ancestors_node;
        for (int word = threadIdx.x / ROWS; word < (nodes + 31) / 32; word += THREADS / ROWS)
            copy_async_4(&shared.ancestors[row][word], bits + word);
    }
    // Which of a tile's 64 keys a row sees; the first is `first_key`, and at least one is a node.
    __device__ __forceinline__ u64 visible(int row, int first_key) const {
        const unsigned* words = shared.ancestors[row];
        const int node = first_key - length, left = nodes - node;  // keys that are there, one at least
        u64 seen;
        if (node < 0) {
            const int before = -node;  // keys of the prefix, 1 to 63
            seen = (words[0] | u64(words[1]) << 32) << before | ((u64(1) << before) - 1);
        } else {
            const u64 low = words[node / 32] | u64(words[node / 32 + 1]) << 32, next = words[node / 32 + 2];
            seen = low >> node % 32 | (node % 32 ? next << (64 - node % 32) : 0);
        }
        return left < 64 ? seen & ((u64(1) << left) - 1) : seen;
    }
};

// A warp's 16 rows: sums of weighted values, the peak (the greatest logit, base 2 and scaled, or up to SLACK less: it grows,
// and all is scaled to it, only where a row of the warp exceeds it by more) and the lane's share of the weights' sum, each of
// rows lane / 4 and lane / 4 + 8.
struct Rows {
    unsigned weights[TILE / 16][4];
    float sums[DIM / 128][16][4] = {};
    float peak[2], total[2] = {};

#if QUERIES_KEPT
    unsigned queries[DIM / 16][4];
#else
    Shared* shared;
    int first_row;
#endif
    __device__ __forceinline__ void load_queries(Shared& from, int first) {
#if QUERIES_KEPT
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) load_queries_16(queries[step], from, first, step);
#else
        shared = &from;
        first_row = first;
#endif
    }
    __device__ __forceinline__ static void load_queries_16(unsigned (&a)[4], Shared& from, int first, int step) {
        const int lane = threadIdx.x % 32;
        load_matrix_x4(a, place(from.queries, first + lane % 16, step * 2 + lane / 16));
    }

    // logits = queries keys^T. By wgmma this and add_values only begin; wait_for_products ends them, in turn.
    template <int KEYS>
    __device__ __forceinline__ void multiply_keys(float (&logits)[KEYS / 8][4], Tile<KEYS>& keys) {
#if WGMMA
        const u64 operand = operand_at(shared_address(&keys), 16, 1024);
        hold(logits);
        before_products();
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
#if !QUERIES_KEPT
            const u64 own = operand_at(shared_address(shared->queries[step / 4][first_row / 64 * 64]), 16, 1024) + step % 4 * 2;
#else
            const unsigned(&own)[4] = queries[step];
#endif
            multiply_keys_16(logits, own, operand + (step / 4 * (KEYS * 128) + step % 4 * 32) / 16, step > 0);
        }
        commit_products();
#else
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) logits[n][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
#if !QUERIES_KEPT
            unsigned own[4];
            load_queries_16(own, *shared, first_row, step);
#else
            const unsigned(&own)[4] = queries[step];
#endif
#pragma unroll
            for (int n = 0; n < KEYS / 8; n += 2) {
                unsigned b[4];
                load_matrix_x4(b, place(keys.block, n * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                multiply_tiles(logits[n], own, b[0], b[1]);
                multiply_tiles(logits[n + 1], own, b[2], b[3]);
            }
        }
#endif
    }

    // Columns whose bit in `seen` (of each row) is 0 do not count.
    template <int N>
    __device__ __forceinline__ void mask(float (&logits)[N][4], const u64 (&seen)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const unsigned bits = unsigned(seen[i] >> n / 4 * 32) >> threadIdx.x % 4 * 2 >> n % 4 * 8;
                if (!(bits & 1)) logits[n][i * 2] = __uint_as_float(MINUS_INFINITY);
                if (!(bits & 2)) logits[n][i * 2 + 1] = __uint_as_float(MINUS_INFINITY);
            }
    }
    template <int N>
    __device__ __forceinline__ void cap(float (&logits)[N][4], float inner_scale) {
#if CAPPED
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) logits[n][i] = tanhf(logits[n][i] * inner_scale);
#endif
    }
    // Logits become weights; where `grown` says so, `decay` is by what `sums` must be scaled to the new peak.
    template <int N>
    __device__ __forceinline__ void weigh(float (&logits)[N][4], float (&decay)[2], bool& grown, float scale) {
        const float minus_infinity = __uint_as_float(MINUS_INFINITY);
        float most[2] = {minus_infinity, minus_infinity};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) most[i / 2] = fmaxf(most[i / 2], logits[n][i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2)) * scale;
        }
        grown = __ballot_sync(~0u, most[0] > peak[0] + SLACK || most[1] > peak[1] + SLACK);
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float before = peak[i];
            if (grown) peak[i] = fmaxf(before, most[i]);
            base[i] = peak[i] == minus_infinity ? 0.0f : peak[i];  // a row that sees nothing has weights of 0
            if (grown) {
                decay[i] = exp2_approx(before - base[i]);
                total[i] *= decay[i];
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                logits[n][i] = exp2_approx(fmaf(logits[n][i], scale, -base[i / 2]));
                total[i / 2] += logits[n][i];
            }
    }
    // Weights to operands, and sums to the weights' peak.
    template <int N>
    __device__ __forceinline__ void take_weights(const float (&logits)[N][4], const float (&decay)[2], bool grown) {
#pragma unroll
        for (int step = 0; step < N / 2; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[step][i] = pack(logits[step * 2 + i / 2][i % 2 * 2], logits[step * 2 + i / 2][i % 2 * 2 + 1]);
        if (!grown) return;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n / 16][n % 16][i] *= decay[i / 2];
    }

    // sums += weights values.
    template <int KEYS>
    __device__ __forceinline__ void add_values(Tile<KEYS>& values) {
#if WGMMA
        const u64 operand = operand_at(shared_address(&values), KEYS * 128, 1024);
        hold(weights);
        hold_sums();
        before_products();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
            for (int part = 0; part < DIM / 128; ++part)
                multiply_values_16(sums[part], weights[step], operand + (part * 2 * KEYS + step * 16) * 128 / 16);
        commit_products();
#else
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
            for (int n = 0; n < DIM / 8; n += 2) {
                unsigned b[4];
                load_matrix_x4_transposed(b, place(values.block, step * 16 + lane % 16, n + lane / 16));
                multiply_tiles(sums[n / 16][n % 16], weights[step], b[0], b[1]);
                multiply_tiles(sums[n / 16][n % 16 + 1], weights[step], b[2], b[3]);
            }
#endif
    }

    // A tile by itself, or a share's rest.
    template <int KEYS, class Seen>
    __device__ __forceinline__ void attend(Tile<KEYS>& keys, Tile<KEYS>& values, const Seen& see, float scale,
                                           float inner_scale) {
        float logits[KEYS / 8][4], decay[2];
        bool grown;
        u64 seen[2];
        multiply_keys<KEYS>(logits, keys);
#if WGMMA
        wait_for_products<0>();
        hold(logits);
#endif
        cap(logits, inner_scale);
        if (see(seen)) mask(logits, seen);
        weigh(logits, decay, grown, scale);
        take_weights(logits, decay, grown);
        add_values(values);
#if WGMMA
        wait_for_products<0>();
        hold(weights);
        hold_sums();
#endif
    }

#if WGMMA
    // The group's tiles, `turns` of them. A tile's logits are multiplied, and then the values of the one before: their product
    // is under way while the logits become weights. Two groups begin their products in turn: where both did at once, both would
    // weigh at once, too, while the tensor cores have nothing to do.
    template <class Ring, class Seen>
    __device__ __forceinline__ void attend_all(const Block& block, int turns, const Ring& ring, const Seen& seen_at, float scale,
                                               float inner_scale) {
        const bool in_turn = ROW_GROUPS == 2 && block.row_exists(64);  // both groups have the same tiles
        if (in_turn && threadIdx.x >= THREADS / 2) give_turn();
        if (turns <= 0) return;
        float logits[TILE / 8][4];
        block.wait_for_unit(0);
        multiply_keys<TILE>(logits, ring(0));
        wait_for_products<0>();
        take_tile(block, 0, logits, seen_at, scale, inner_scale, false);
        for (int turn = 1; turn < turns; ++turn) {
            block.wait_for_unit(turn * 2);
            block.wait_for_unit(turn * 2 - 1);
            if (in_turn) wait_for_turn();
            multiply_keys<TILE>(logits, ring(turn * 2));
            add_values(ring(turn * 2 - 1));
            if (in_turn) give_turn();
            wait_for_products<1>();
            take_tile(block, turn, logits, seen_at, scale, inner_scale, true);
        }
        block.wait_for_unit(turns * 2 - 1);
        add_values(ring(turns * 2 - 1));
        wait_for_products<0>();
        hold_sums();
        block.free_unit(turns * 2 - 1);
    }
    // A tile's logits to weights; behind `values` of the tile before, which are done with then.
    template <class Seen>
    __device__ __forceinline__ void take_tile(const Block& block, int turn, float (&logits)[TILE / 8][4], const Seen& seen_at,
                                              float scale, float inner_scale, bool values) {
        float decay[2];
        bool grown = false;
        u64 seen[2];
        hold(logits);
        block.free_unit(turn * 2);
        cap(logits, inner_scale);
        if (seen_at(turn, seen)) mask(logits, seen);
        if (block.nodes > 0) weigh(logits, decay, grown, scale);  // always: ptxas would put it behind the wait, but for a branch
        if (values) {
            wait_for_products<0>();
            hold(weights);
            hold_sums();
            block.free_unit(turn * 2 - 1);
        }
        take_weights(logits, decay, grown);
    }
#endif
    __device__ __forceinline__ void hold_sums() {
#if WGMMA
#pragma unroll
        for (int part = 0; part < DIM / 128; ++part) hold(sums[part]);
#endif
    }

    // Sums of other keys, of the group that has the same rows: through shared memory.
    __device__ __forceinline__ void give(float (*numbers)[32]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[n * 4 + i][lane] = sums[n / 16][n % 16][i];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            numbers[DIM / 2 + i][lane] = peak[i];
            numbers[DIM / 2 + 2 + i][lane] = total[i];
        }
    }
    __device__ __forceinline__ void add(const float (*numbers)[32]) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float other = numbers[DIM / 2 + i][lane], most = fmaxf(peak[i], other);
            const float base = most == __uint_as_float(MINUS_INFINITY) ? 0.0f : most;
            const float share = exp2_approx(peak[i] - base), others = exp2_approx(other - base);
            peak[i] = most;
            total[i] = total[i] * share + numbers[DIM / 2 + 2 + i][lane] * others;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& sum = sums[n / 16][n % 16][i * 2 + c];
                    sum = sum * share + numbers[n * 4 + i * 2 + c][lane] * others;
                }
        }
    }
    // Of row lane / 4 + 8 i, the sum of weights that lanes share.
    __device__ __forceinline__ float whole(int i) const {
        const float half = total[i] + __shfl_xor_sync(~0u, total[i], 1);
        return half + __shfl_xor_sync(~0u, half, 2);
    }
#if SPLITS > 1
    // To scratch, for the merge.
    __device__ __forceinline__ void leave(const Block& block, Part& part, int first) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + lane / 4 + i * 8;
            const float own = whole(i);
            float unit = unknown(1.0f);  // A product gives the one NaN; and ptxas would place sums for the stores, and move them for wgmma.
#if !HALF
            float most = 0.0f;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                most = fmaxf(most, fmaxf(fabsf(sums[n / 16][n % 16][i * 2]), fabsf(sums[n / 16][n % 16][i * 2 + 1])));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // Numbers are below 2^15; exponents have float32's bias of 127, the least makes `unit` normal.
            constexpr unsigned HALFS_EXPONENT = 14;
            const unsigned exponent = max(__float_as_uint(most) >> 23, HALFS_EXPONENT + 1);
            const float scale = __uint_as_float((127 + HALFS_EXPONENT + 127 - exponent) << 23);
            unit = __uint_as_float((exponent - HALFS_EXPONENT) << 23);
#endif
            if (!block.row_exists(row)) continue;
#if HALF
            uint2* to = reinterpret_cast<uint2*>(part.rows[row]) + lane % 4;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) {
                const float(&own)[4] = sums[n / 16][n % 16];
                store_words(&to[n * 4], uint2{__float_as_uint(own[i * 2] * unit), __float_as_uint(own[i * 2 + 1] * unit)});
            }
#else
            uint4* to = reinterpret_cast<uint4*>(part.rows[row]) + lane % 4;
#pragma unroll
            for (int n = 0; n < DIM / 8; n += 4) {
                unsigned pairs[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float(&own)[4] = sums[n / 16][n % 16 + m];
                    pairs[m] = pack_half(own[i * 2] * scale, own[i * 2 + 1] * scale);
                }
                store_words(&to[n], uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
            }
#endif
            if (lane % 4 == 0)
                store_words(&part.notes[row], uint4{__float_as_uint(peak[i]), __float_as_uint(own), __float_as_uint(unit), 0});
        }
    }
#endif
    // To out, where no other block has keys.
    __device__ __forceinline__ void finish(const Block& block, int first) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + lane / 4 + i * 8;
            const float sink = block.sink(row), own = whole(i), most = fmaxf(peak[i], sink);
            const float base = most == __uint_as_float(MINUS_INFINITY) ? 0.0f : most, share = exp2_approx(peak[i] - base);
            const float sum = own * share + exp2_approx(sink - base);
            const float factor = sum > 0.0f ? share * float(block.arguments.v_scale) / sum : 0.0f;
            if (!block.row_exists(row)) continue;
            unsigned* out = reinterpret_cast<unsigned*>(block.out_row(row));
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                out[n * 4 + lane % 4] = pack(sums[n / 16][n % 16][i * 2] * factor, sums[n / 16][n % 16][i * 2 + 1] * factor);
        }
    }
};

#if SPLITS > 1
static_assert(SPLITS <= 32, "a lane has one part");
constexpr unsigned ABSENT = 0xffffffffu;  // no number, nor two: the device makes but one NaN, 0x7fff or 0x7fffffff
__device__ __forceinline__ float4 numbers_of(uint2 four) {
    const float2 low = unpack_half(four.x), high = unpack_half(four.y);
    return {low.x, low.y, high.x, high.y};
}
__device__ __forceinline__ float4 numbers_of(uint4 four) {
    return {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z), __uint_as_float(four.w)};
}
__device__ __forceinline__ void clear(uint2& x) { x = {ABSENT, ABSENT}; }
__device__ __forceinline__ void clear(uint4& x) { x = {ABSENT, ABSENT, ABSENT, ABSENT}; }
// Whether no word is ABSENT, the greatest there is.
__device__ __forceinline__ unsigned greatest(uint2 x) { return max(x.x, x.y); }
__device__ __forceinline__ unsigned greatest(uint4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
__device__ __forceinline__ bool all_there(unsigned greatest) { return !__ballot_sync(~0u, greatest == ABSENT); }

constexpr int MOST_FOURS = HALF ? 16 : WGMMA ? 32 : 8;  // of a lane, under way at a time
// By what a lane's part of each row is to be multiplied, and the rows' sums.
template <int LANES, int N>
__device__ __forceinline__ void weigh_parts(const Block& block, const uint4 (&notes)[N], const int (&rows)[N],
                                            float (&shares)[N], float (&factors)[N]) {
    const float minus_infinity = __uint_as_float(MINUS_INFINITY);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float sink = block.sink(rows[i]), own_peak = __uint_as_float(notes[i].x);
        float peak = fmaxf(own_peak, sink);
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, apart));
        if (peak == minus_infinity) peak = 0.0f;
        const float weight = exp2_approx(own_peak - peak);
        float total = __uint_as_float(notes[i].y) * weight;
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);
        total += exp2_approx(sink - peak);
        shares[i] = weight * __uint_as_float(notes[i].z);
        factors[i] = total > 0.0f ? float(block.arguments.v_scale) / total : 0.0f;
    }
}
// Adds up the parts of rows `first`, first + step and so on, AT_ONCE of them, by a warp: lane p has part p's note of a row, and
// each lane four columns of each 128. In place of a row that does not exist it takes the first again.
template <int AT_ONCE>
__device__ __forceinline__ void merge_rows(const Block& block, Part* parts, int blocks, int first, int step) {
    constexpr int LANES = SPLITS > 16 ? 32 : SPLITS > 8 ? 16 : SPLITS > 4 ? 8 : 4;  // with a note each; those behind have the same
    constexpr int PARTS = SPLITS < MOST_FOURS ? SPLITS : MOST_FOURS;                // at a time
    const int lane = threadIdx.x % 32, own_part = lane % LANES;
    int rows[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int row = first + i * step;
        rows[i] = row < ROWS && block.row_exists(row) ? row : first;
    }
    uint4 notes[AT_ONCE], absent_note;
    for (bool looked = false;; looked = true) {
        if (looked) look_again();
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            notes[i] = {MINUS_INFINITY, 0, 0, 0};
            if (own_part < blocks) load_words(notes[i], &parts[own_part].notes[rows[i]]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) most = max(most, greatest(notes[i]));
        if (all_there(most)) break;
    }
    float shares[AT_ONCE], factors[AT_ONCE];
#pragma unroll 1
    for (int column = 0; column < DIM / 128; ++column) {
        float4 mixed[AT_ONCE] = {};
#pragma unroll 1
        for (int first_part = 0; first_part < SPLITS; first_part += PARTS) {
            const auto four_of = [&](int i, int part) {
                return &parts[first_part + part].rows[rows[i]][column * 32 + lane];
            };
            Four fours[AT_ONCE][PARTS] = {}, absent;
            for (bool looked = false;; looked = true) {
                if (looked) look_again();
                unsigned most = 0;
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    if (first_part + part < blocks)
#pragma unroll
                        for (int i = 0; i < AT_ONCE; ++i) load_words(fours[i][part], four_of(i, part));
                if (column == 0 && first_part == 0) weigh_parts<LANES>(block, notes, rows, shares, factors);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) most = max(most, greatest(fours[i][part]));
                if (all_there(most)) break;
            }
            clear(absent);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const float own_share = __shfl_sync(~0u, shares[i], first_part + part);
                    const float4 own = numbers_of(fours[i][part]);
                    mixed[i].x = fmaf(own_share, own.x, mixed[i].x);
                    mixed[i].y = fmaf(own_share, own.y, mixed[i].y);
                    mixed[i].z = fmaf(own_share, own.z, mixed[i].z);
                    mixed[i].w = fmaf(own_share, own.w, mixed[i].w);
                }
                if (first_part + part < blocks)
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) store_words(four_of(i, part), absent);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            unsigned* out = reinterpret_cast<unsigned*>(block.out_row(rows[i])) + column * 64;
            const int pair = HALF ? lane * 2 : lane / 8 * 16 + lane % 2 * 8 + lane / 2 % 4;
            out[pair] = pack(mixed[i].x * factors[i], mixed[i].y * factors[i]);
            out[pair + (HALF ? 1 : 4)] = pack(mixed[i].z * factors[i], mixed[i].w * factors[i]);
        }
    }
    clear(absent_note);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
        if (lane < blocks) store_words(&parts[lane].notes[rows[i]], absent_note);
}
// The block's rows, of which block `rank` has every SPLITS-th, and a warp every WARPS-th of these.
__device__ __forceinline__ void merge(const Block& block, Part* parts, int blocks, int rank, int warp) {
    constexpr int STEP = SPLITS * WARPS, OWN = (ROWS + STEP - 1) / STEP;                  // a warp's rows
    constexpr int ROOM = SPLITS < MOST_FOURS ? MOST_FOURS / SPLITS : 1;
    constexpr int AT_ONCE = OWN < ROOM ? OWN : ROOM;
    for (int row = rank + SPLITS * warp; row < ROWS && block.row_exists(row); row += STEP * AT_ONCE)
        merge_rows<AT_ONCE>(block, parts, blocks, row, STEP);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32 * COPIERS, 1) tree_attention(const AttentionArguments arguments) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = uniform(threadIdx.x / 32), rank = blockIdx.x % SPLITS;
    const int row_group = ROW_GROUPS == 2 ? warp / 4 : 0, key_group = KEY_GROUPS == 2 ? warp / 4 : 0;
    const int own_row = row_group * 64 + warp % 4 * 16;
    Block block = {arguments, shared, int(blockIdx.z), int(blockIdx.y), int(blockIdx.x) / SPLITS * ROWS,
                   int(arguments.nodes), 0, 0, nullptr, nullptr};
    const unsigned piece = threadIdx.x % PIECES * 16;
    block.own_k = reinterpret_cast<const char*>(arguments.k_pool) + block.head * arguments.k_head + piece;
    block.own_v = reinterpret_cast<const char*>(arguments.v_pool) + block.head * arguments.v_head + piece;
    const int* bounds = reinterpret_cast<const int*>(arguments.prefix_indptr) + block.request;
    const int begin = bounds[0], end = bounds[1];
    if (warp < WARPS) block.copy_queries();
#if WGMMA
    if (threadIdx.x == THREADS) {
        start_barrier(&shared.rest_full[0], 32 * COPIERS);
        for (int stage = 0; stage < STAGES; ++stage) {
            start_barrier(&shared.full[stage], 32 * COPIERS);
            start_barrier(&shared.empty[stage], ROW_GROUPS == 2 && !block.row_exists(64) ? WARPS / 2 : WARPS);
        }
    }
    __syncthreads();  // barriers are there
#endif
    block.begin = begin;
    block.length = uniform(end - begin);
    const int keys = block.length + block.nodes, blocks = min((keys + TILE - 1) / TILE, SPLITS);
    if (blocks == 1 && rank > 0) return;
    const Share share = share_of(keys, rank);
#if WGMMA
    if (warp >= WARPS) {
        give_registers<56>();
        block.copy_all(share);
        return;
    }
    take_registers<224>();
#endif
    if (share.first + share.tiles * TILE > block.length) block.copy_ancestors();
#if !WGMMA
    const int turns = (share.tiles + KEY_GROUPS - 1) / KEY_GROUPS;
    const int copied = share.tiles - (KEY_GROUPS == 2 ? warp / 4 : 0);  // of which this warp copies keys

    const int rest_slot = block.read_rest_slot(share);
    int slots[STAGES + 1];
#pragma unroll
    for (int turn = 0; turn <= STAGES; ++turn) slots[turn] = block.read_slot(share.first + turn * TURN);
    if (share.rest) block.copy_rest(rest_slot);
    copy_async_commit();
#pragma unroll
    for (int turn = 0; turn < STAGES; ++turn) {
        if (turn * KEY_GROUPS < copied) block.copy_turn(shared.ring[turn], slots[turn]);
        copy_async_commit();
    }
    int next_slot = slots[STAGES];
#endif

    Rows rows;
    rows.peak[0] = rows.peak[1] = __uint_as_float(MINUS_INFINITY);
    const bool has_rows = block.row_exists(WGMMA ? row_group * 64 : own_row);
    const float scale = float(arguments.scale), inner_scale = float(arguments.inner_scale);
#if WGMMA
    copy_async_commit();
    copy_async_wait<0>();
    show_copies();
#else
    int stage = 0, free_stage = 0;
    copy_async_wait<STAGES>();
#endif
    readers_sync();
    rows.load_queries(shared, own_row);
    // Whether any of `keys` keys is a node; then, which of them the thread's two rows see.
    const auto seen_of = [&](int first, int keys, u64(&seen)[2]) {
        const bool masked = first + keys > block.length;
        if (masked) {
            const int row = own_row + threadIdx.x % 32 / 4;
            seen[0] = block.visible(row, first);
            seen[1] = block.visible(row + 8, first);
        }
        return masked;
    };
    if (share.rest && has_rows && (KEY_GROUPS == 1 || key_group == share.tiles % 2)) {  // the group that has fewer tiles
#if WGMMA
        block.wait_for_rest();
#endif
        rows.attend(shared.rest_keys, shared.rest_values,
                    [&](u64(&seen)[2]) { return seen_of(share.first - REST, REST, seen); }, scale, inner_scale);
    }
#if WGMMA
    rows.attend_all(
        block, has_rows ? (share.tiles - key_group + KEY_GROUPS - 1) / KEY_GROUPS : 0,
        [&](int unit) -> Tile<TILE>& { return shared.ring[unit % STAGES].tiles[key_group]; },
        [&](int turn, u64(&seen)[2]) {
            return seen_of(share.first + (turn * KEY_GROUPS + key_group) * TILE, TILE, seen);
        },
        scale, inner_scale);
#else
    for (int turn = 0; turn < turns; ++turn) {
        if (turn == 0)
            copy_async_wait<STAGES - 1>();
        else
            copy_async_wait<STAGES - 2>();
        __syncthreads();  // all see the copies, and are done with the stage that is filled next
        if (turn > 0) {
            const int next = turn - 1 + STAGES;
            if (next * KEY_GROUPS < copied) block.copy_turn(shared.ring[free_stage], next_slot);
            copy_async_commit();
            if ((next + 1) * KEY_GROUPS < copied) next_slot = block.read_slot(share.first + (next + 1) * TURN);
            free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
        }
        const int tile = turn * KEY_GROUPS + key_group;
        if (has_rows && tile < share.tiles)
            rows.attend(shared.ring[stage].keys[key_group], shared.ring[stage].values[key_group],
                        [&](u64(&seen)[2]) { return seen_of(share.first + tile * TILE, TILE, seen); }, scale, inner_scale);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
#endif
    if (KEY_GROUPS == 2) {
        float(*numbers)[32] = shared.sums.numbers[warp % 4];
        readers_sync();  // all are done with the ring
        if (key_group == 1) rows.give(numbers);
        readers_sync();
        if (key_group == 0) rows.add(numbers);
    }
    const bool leaves = key_group == 0 && has_rows;
#if SPLITS > 1
    if (blocks > 1) {
        const unsigned of_rows = (blockIdx.z * gridDim.y + blockIdx.y) * (gridDim.x / SPLITS) + blockIdx.x / SPLITS;
        Part* parts = reinterpret_cast<Part*>(arguments.parts) + of_rows * SPLITS;
        if (leaves && rank < blocks) rows.leave(block, parts[rank], own_row);
        merge(block, parts, blocks, rank, warp);
        return;
    }
#endif
    if (leaves) rows.finish(block, own_row);
}
