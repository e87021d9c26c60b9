// kernels/tree_step/tree_build.cu as a shared library that runs on the CPU.
#include "cuda_on_cpu.h"
#include "tree_build.cu"

extern "C" void build_on_cpu(const BuildArguments* arguments, size_t shared_bytes, int requests) {
    for (int x = 0; x < requests; ++x) {
        blockIdx = {x, 0, 0};
        on_cpu::run_block(THREADS, shared_bytes, x % 2, [&] { tree_build(*arguments); });
    }
}
