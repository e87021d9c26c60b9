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

// While the kernel before may still run, a thread asks for weights alone, and none writes.
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
        waited.assign(CLUSTER * THREADS, false);
        const char* out = static_cast<const char*>(out_range.address);
        out_before.assign(out, out + out_range.bytes);
        on_cpu::run_cluster(CLUSTER, THREADS, shared_bytes, reversed, [&] { fp8_linear(*arguments); });
        if (DEPENDENT && std::count(waited.begin(), waited.end(), false)) on_cpu::fail("a thread ends without having waited");
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
