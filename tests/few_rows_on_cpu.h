// What kernels/few_rows.cuh gives fp8_linear.cu and row_linear.cu, for their runs on the CPU; and that no thread writes out,
// or lets later kernels start, before it has waited for the kernel before.
#pragma once
#include "cuda_on_cpu.h"

static void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    HALF ? mma_f16(c, a, b0, b1) : mma_bf16(c, a, b0, b1);
}
static unsigned short round_to_x(float value) { return HALF ? on_cpu::round_f16(value) : on_cpu::round_bf16(value); }

static std::vector<bool> waited;
static on_cpu::Range x_range, out_range;
static std::vector<char> out_before;
static void wait_for_earlier_kernels() {
    if (memcmp(out_before.data(), out_range.address, out_range.bytes))
        on_cpu::fail("out is written before all threads have waited");
    waited[on_cpu::running] = true;
}
static void let_later_kernels_start() {
    if (!waited[on_cpu::running]) on_cpu::fail("later kernels may start before the wait");
}
// Around the `threads` of a block or cluster.
static void before_any_waits(int threads) {
    waited.assign(threads, false);
    const char* out = static_cast<const char*>(out_range.address);
    out_before.assign(out, out + out_range.bytes);
}
static void after_all_end() {
    if (DEPENDENT && std::count(waited.begin(), waited.end(), false)) on_cpu::fail("a thread ends without having waited");
}
