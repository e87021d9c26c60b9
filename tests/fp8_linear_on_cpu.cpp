// kernels/fp8_linear.cu as a shared library that runs on the CPU.
#include "few_rows_on_cpu.h"

#define CLUSTERED

static unsigned multiply_pairs(unsigned x, unsigned y) {
    const auto number = HALF ? on_cpu::f16_half : on_cpu::bf16_half;
    return round_to_x(number(x, 0) * number(y, 0)) | unsigned(round_to_x(number(x, 1) * number(y, 1))) << 16;
}

// While the kernel before may still run, a thread asks for weights alone, and none writes.
static void ask_for(const float*) {}
static void copy_in_turn(void* to, const void* from, bool valid) {
    const bool of_x = uint64_t(from) - uint64_t(x_range.address) < x_range.bytes;
    if (DEPENDENT && valid && of_x && !waited[on_cpu::running]) on_cpu::fail("x is read before the wait");
    copy_async_16(to, from, valid);
}
#define copy_async_16 copy_in_turn
#include "fp8_linear.cu"
#undef copy_async_16

extern "C" void fp8_linear_on_cpu(const LinearArguments* arguments, size_t shared_bytes, int blocks, bool reversed) {
    x_range = {reinterpret_cast<const void*>(arguments->x),
               size_t(2 * ((arguments->rows - 1) * arguments->row_stride + arguments->depth))};
    out_range = {reinterpret_cast<const void*>(arguments->out), size_t(2 * arguments->rows * arguments->features)};
    on_cpu::readable = {x_range,
                        {reinterpret_cast<const void*>(arguments->weight), size_t(arguments->features * arguments->depth)}};
    gridDim = {blocks, 1, 1};
    for (int x = 0; x < blocks; x += CLUSTER) {
        blockIdx = {x, 0, 0};
        before_any_waits(CLUSTER * THREADS);
        on_cpu::run_cluster(CLUSTER, THREADS, shared_bytes, reversed, [&] { fp8_linear(*arguments); });
        after_all_end();
    }
}
// A word's four FP8 codes as the kernel multiplies them, floats in the order of its bytes.
extern "C" void convert_on_cpu(unsigned word, float* out) {
    const auto number = HALF ? on_cpu::f16_half : on_cpu::bf16_half;
    const unsigned even = multiply_pairs(spread(word << 8), OFFSET), odd = multiply_pairs(spread(word), OFFSET);
    for (int i = 0; i < 2; ++i) {
        out[2 * i] = number(even, i);
        out[2 * i + 1] = number(odd, i);
    }
}
