// Warp-level instructions of gdn_tree.cu. tests/cuda_on_cpu.h defines the same names for a run on the CPU.
#pragma once

#ifndef GDN_TREE_ON_CPU

#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

typedef unsigned SharedAddress;  // of a byte in shared memory
__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes of global memory to shared memory, or 16 zero bytes where `valid` is false.
__device__ __forceinline__ void copy_async_16(void* to_shared, const void* from_global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from_global),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_async_8(void* to_shared, const void* from_global, bool valid) {
    const int bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to_shared)), "l"(from_global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads of what no thread writes meanwhile. They stay where they stand: moved to their use, they would wait one by one.
__device__ __forceinline__ unsigned load_32(const void* from_global) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from_global));
    return x;
}
__device__ __forceinline__ unsigned load_16(const void* from_global) {
    unsigned short x;
    asm volatile("ld.relaxed.gpu.global.b16 %0, [%1];" : "=h"(x) : "l"(from_global));
    return x;
}

__device__ __forceinline__ uint4 load_128(const void* from_global) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from_global));
    return x;
}

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(unsigned (&m)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row));
}
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}
// The transpose of an 8x8 matrix of 16-bit values held by the warp.
__device__ __forceinline__ unsigned transpose_b16(unsigned m) {
    unsigned out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(m));
    return out;
}

// c[16, 8] += a[16, 16] b[16, 8], bfloat16 in, float32 sums.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of float16.
__device__ __forceinline__ void mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The compiler knows nothing of x from here on.
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }
// 2^x, to two units in the last place.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Two floats rounded to bfloat16, `low` in the low half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    unsigned out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// Of float16, and back.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
    unsigned out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ __forceinline__ float low_f16(unsigned x) {
    float y;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ float high_f16(unsigned x) {
    float y;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(y) : "r"(x));
    return y;
}

#endif
