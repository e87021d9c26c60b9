// kernels/gdn_tree/gdn_tree.cu as a shared library that runs on the CPU.
#include "cuda_on_cpu.h"

// What intrinsics.cuh has beside the runner's.
typedef uint64_t SharedAddress;
inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<SharedAddress>(pointer); }
inline void load_matrix_x4(unsigned (&m)[4], SharedAddress row) { load_matrix_x4(m, reinterpret_cast<const void*>(row)); }
inline void keep(int&) {}

#include "gdn_tree.cu"

template <class Arguments>
static void run(void (*kernel)(Arguments), const Arguments& arguments, size_t shared_bytes, const int* grid, int order) {
    gridDim = {grid[0], grid[1], grid[2]};
    for (int z = 0; z < grid[2]; ++z)
        for (int y = 0; y < grid[1]; ++y)
            for (int x = 0; x < grid[0]; ++x) {
                blockIdx = {x, y, z};
                on_cpu::run_block(THREADS, shared_bytes, order, [&] { kernel(arguments); });
            }
}

extern "C" void verify_on_cpu(const VerifyArguments* arguments, size_t shared_bytes, const int* grid, int order) {
    run(WHOLE_HEADS && arguments->whole ? gdn_tree_verify_heads : gdn_tree_verify, *arguments, shared_bytes, grid, order);
}
extern "C" void flush_on_cpu(const FlushArguments* arguments, size_t shared_bytes, const int* grid, int order) {
    run(gdn_tree_flush, *arguments, shared_bytes, grid, order);
}
