// kernels/fp8_linear.cu as a shared library that runs on the CPU.
#include "cuda_on_cpu.h"

#define CLUSTERED

static void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    HALF ? mma_f16(c, a, b0, b1) : mma_bf16(c, a, b0, b1);
}
static unsigned short round_to_x(float value) { return HALF ? on_cpu::round_f16(value) : on_cpu::round_bf16(value); }
static unsigned multiply_pairs(unsigned x, unsigned y) {
    const auto number = HALF ? on_cpu::f16_half : on_cpu::bf16_half;
    return round_to_x(number(x, 0) * number(y, 0)) | unsigned(round_to_x(number(x, 1) * number(y, 1))) << 16;
}

#include "fp8_linear.cu"

extern "C" void fp8_linear_on_cpu(const LinearArguments* arguments, size_t shared_bytes, int blocks, bool reversed) {
    const size_t x_numbers = (arguments->rows - 1) * arguments->row_stride + arguments->depth;
    on_cpu::readable = {{reinterpret_cast<const void*>(arguments->x), 2 * x_numbers},
                        {reinterpret_cast<const void*>(arguments->weight), size_t(arguments->features * arguments->depth)}};
    gridDim = {blocks, 1, 1};
    for (int x = 0; x < blocks; x += CLUSTER) {
        blockIdx = {x, 0, 0};
        on_cpu::run_cluster(CLUSTER, THREADS, shared_bytes, reversed, [&] { fp8_linear(*arguments); });
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
