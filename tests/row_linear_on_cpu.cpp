// kernels/row_linear.cu as a shared library that runs on the CPU.
#include "few_rows_on_cpu.h"

static float2 numbers_of(unsigned word) {
    const auto number = HALF ? on_cpu::f16_half : on_cpu::bf16_half;
    return {number(word, 0), number(word, 1)};
}
struct alignas(16) Vector {
    unsigned word[4];
};

// While the kernel before may still run, a thread asks for weights and biases alone, and none writes.
static on_cpu::Range residual_range;
static bool lies_in(const on_cpu::Range& range, const void* from) {
    const uint64_t first = uint64_t(from) - uint64_t(range.address);
    return first < range.bytes && first + 16 <= range.bytes;
}
static Vector load_vector(const void* from) {
    if (!lies_in(x_range, from) || uint64_t(from) % 16) on_cpu::fail("x is read where it is not");
    if (DEPENDENT && !waited[on_cpu::running]) on_cpu::fail("x is read before the wait");
    return *static_cast<const Vector*>(from);
}
static void copy_in_turn(void* to, const void* from, bool valid) {
    if (DEPENDENT && valid && lies_in(residual_range, from) && !waited[on_cpu::running])
        on_cpu::fail("the residual is read before the wait");
    copy_async_16(to, from, valid);
}
#define copy_async_16 copy_in_turn
#include "row_linear.cu"
#undef copy_async_16

static on_cpu::Range range_of(i64 address, i64 numbers) {
    return {reinterpret_cast<const void*>(address), address ? size_t(2 * numbers) : 0};
}

extern "C" void row_linear_on_cpu(const RowLinearArguments* arguments, size_t shared_bytes, int across, int along, bool reversed) {
    const i64 rows = arguments->rows, outputs = arguments->outputs, features = GATED ? 2 * outputs : outputs;
    x_range = range_of(arguments->x, rows * arguments->depth);
    residual_range = range_of(arguments->residual, rows * outputs);
    out_range = range_of(arguments->out, rows * outputs);
    on_cpu::readable = {range_of(arguments->weight, features * arguments->depth), range_of(arguments->bias, features),
                        residual_range};
    gridDim = {across, along, 1};
    for (int y = 0; y < along; ++y)
        for (int x = 0; x < across; ++x) {
            blockIdx = {x, y, 0};
            before_any_waits(THREADS);
            on_cpu::run_block(THREADS, shared_bytes, reversed, [&] { row_linear(*arguments); });
            after_all_end();
        }
}
