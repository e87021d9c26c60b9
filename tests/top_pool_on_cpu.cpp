// kernels/tree_step/top_pool.cu as a shared library that runs on the CPU.
#include "cuda_on_cpu.h"
#include "top_pool.cu"

extern "C" void pool_on_cpu(const PoolArguments* arguments, size_t shared_bytes, int rows, bool reversed) {
    const int blocks = (int(arguments->groups) + GROUP_THREADS - 1) / GROUP_THREADS;
    for (int y = 0; y < rows; ++y) {
        for (int x = 0; x < blocks; ++x) {
            blockIdx = {x, y, 0};
            on_cpu::run_block(GROUP_THREADS, 0, reversed, [&] { top_pool_groups(*arguments); });
        }
        blockIdx = {y, 0, 0};
        on_cpu::run_block(THREADS, shared_bytes, reversed, [&] { top_pool_pick(*arguments); });
    }
}
