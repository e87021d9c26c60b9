// Instructions that fp8_linear.cu and row_linear.cu share. Both are compiled for HALF (0: x is bfloat16, 1: float16) and
// DEPENDENT (launched while the kernel before may still run). Their runs on the CPU define the same names.
#pragma once
#ifndef CUDA_ON_CPU
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
// 16 bytes of global memory to shared memory, or 16 zero bytes where `valid` is false.
__device__ __forceinline__ void copy_async_16(void* to_shared, const void* from_global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
                 "l"(from_global), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], float32 sums.
__device__ __forceinline__ void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Rounded to x's dtype.
__device__ __forceinline__ unsigned short round_to_x(float value) {
    unsigned short bits;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

#if DEPENDENT
__device__ __forceinline__ void let_later_kernels_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif
#endif
