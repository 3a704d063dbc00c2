// Asynchronous products of a warpgroup on tensor cores (wgmma.mma_async, sm_90a): D (64 x N) += A (64 x 16) B (16 x N).
//
// The four warps of a warpgroup issue it together; warp w holds rows 16 w to 16 w + 15 of D, and of A where A is in registers, in the
// fragments of fa/mma.cuh: d[4 * (n / 8) + e] is element e of the accumulator of columns n to n + 7. B, and A otherwise, is read from
// shared memory through a descriptor. The product runs while its warps go on: between issue and wait nobody may touch D or A's registers.
//
//     wgmma_fence(); wgmma...; wgmma...; wgmma_commit();  ...other work...  wgmma_wait<0>(d);
//
// A descriptor names a matrix in shared memory, laid out by TMA with swizzle = 128 in slabs of 64 columns (128 bytes) x all rows, each slab
// 1024-byte aligned. K-major: the rows of the slab are rows of A or columns of B, and the product's K runs along a row (Q, K of Q K^T).
// MN-major: the rows of the slab are the product's K (V of P V). The same tile can be read both ways. 16 steps of K are 32 bytes further
// on in a K-major slab, and 16 rows, 2048 bytes, in an MN-major one: descriptor_advance. (PTX ISA, "Matrix Descriptor Format".)
#pragma once

#include <fa/barrier.cuh>
#include <fa/mma.cuh>

namespace fa {

// slab_bytes: from one slab of 64 columns to the next, where N is more than 64.
__device__ __forceinline__ uint64_t smem_descriptor(const void* slab_smem, uint32_t leading_bytes, uint32_t stride_bytes) {
    constexpr uint64_t swizzle_128 = 1ull << 62;
    return swizzle_128 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16 | (smem_u32(slab_smem) & 0x3ffff) >> 4;
}
__device__ __forceinline__ uint64_t smem_descriptor_k_major(const void* slab_smem) { return smem_descriptor(slab_smem, 16, 1024); }
__device__ __forceinline__ uint64_t smem_descriptor_mn_major(const void* slab_smem, uint32_t slab_bytes) {
    return smem_descriptor(slab_smem, slab_bytes, 1024);
}
// The same, opaque to the compiler: the descriptors that follow from it are made where they are needed. Those of a tile that stays are
// loop-invariant; hoisted, they would take registers through the whole loop, or be spilled, and go back to uniform registers one by one.
__device__ __forceinline__ uint64_t descriptor_here(uint64_t descriptor) {
    asm volatile("" : "+l"(descriptor));
    return descriptor;
}
__device__ __forceinline__ uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// Before the first product, and whenever other instructions have written D or A's registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of products issued since the last one.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The compiler orders nothing that uses x before this point.
template <int N> __device__ __forceinline__ void ready(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> __device__ __forceinline__ void ready(uint32_t (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int M, int N> __device__ __forceinline__ void ready(uint32_t (&x)[M][N]) {
#pragma unroll
    for (int i = 0; i < M; ++i) ready(x[i]);
}
// The first N accumulators, of a product of 2 N columns.
template <int N> using Accumulators = float[N];
template <int N, int R> __device__ __forceinline__ Accumulators<N>& first_of(float (&x)[R]) {
    static_assert(N <= R, "part of the accumulators");
    return reinterpret_cast<Accumulators<N>&>(x);
}
// The values of x are needed no more: a product with accumulate = 0 comes next. Without it the compiler keeps them until then, because the
// instruction names D as an operand either way.
template <int N> __device__ __forceinline__ void discard(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(x[i]));
}
// to[first..] = from[first..], in other registers. A plain copy would not do: the compiler lets both have the same, and a product's
// accumulators are one block. An instruction that computes, a permutation of bytes, is out of its sight.
template <int N> __device__ __forceinline__ void moved(float (&to)[N], const float (&from)[N], int first) {
#pragma unroll
    for (int i = first; i < N; ++i) asm volatile("prmt.b32 %0, %1, %1, 0x7610;" : "=f"(to[i]) : "f"(from[i]));
}
// Waits until all but the latest PENDING groups are complete: `readable` are the accumulators, and the registers of A, that may be used
// after it.
template <int PENDING, class... Arrays> __device__ __forceinline__ void wgmma_wait(Arrays&... readable) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (ready(readable), ...);
}

// One instruction for each N. Operands of inline PTX are numbered: D's N / 2 registers come first.
template <class T, int N, bool TransposeB, bool TransposeA> struct Wgmma;

#define FA_P0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FA_P8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FA_P16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FA_P24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FA_P32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FA_P40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FA_P48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FA_P56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FA_P64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FA_P72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FA_P80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FA_P88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FA_P96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FA_P104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FA_P112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FA_P120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FA_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_PTX_16 FA_P0
#define FA_OUT_16 FA_D8(0)
#define FA_PTX_32 FA_PTX_16 ", " FA_P8
#define FA_OUT_32 FA_OUT_16, FA_D8(8)
#define FA_PTX_48 FA_PTX_32 ", " FA_P16
#define FA_OUT_48 FA_OUT_32, FA_D8(16)
#define FA_PTX_64 FA_PTX_48 ", " FA_P24
#define FA_OUT_64 FA_OUT_48, FA_D8(24)
#define FA_PTX_80 FA_PTX_64 ", " FA_P32
#define FA_OUT_80 FA_OUT_64, FA_D8(32)
#define FA_PTX_96 FA_PTX_80 ", " FA_P40
#define FA_OUT_96 FA_OUT_80, FA_D8(40)
#define FA_PTX_112 FA_PTX_96 ", " FA_P48
#define FA_OUT_112 FA_OUT_96, FA_D8(48)
#define FA_PTX_128 FA_PTX_112 ", " FA_P56
#define FA_OUT_128 FA_OUT_112, FA_D8(56)
#define FA_PTX_144 FA_PTX_128 ", " FA_P64
#define FA_OUT_144 FA_OUT_128, FA_D8(64)
#define FA_PTX_160 FA_PTX_144 ", " FA_P72
#define FA_OUT_160 FA_OUT_144, FA_D8(72)
#define FA_PTX_176 FA_PTX_160 ", " FA_P80
#define FA_OUT_176 FA_OUT_160, FA_D8(80)
#define FA_PTX_192 FA_PTX_176 ", " FA_P88
#define FA_OUT_192 FA_OUT_176, FA_D8(88)
#define FA_PTX_208 FA_PTX_192 ", " FA_P96
#define FA_OUT_208 FA_OUT_192, FA_D8(96)
#define FA_PTX_224 FA_PTX_208 ", " FA_P104
#define FA_OUT_224 FA_OUT_208, FA_D8(104)
#define FA_PTX_240 FA_PTX_224 ", " FA_P112
#define FA_OUT_240 FA_OUT_224, FA_D8(112)
#define FA_PTX_256 FA_PTX_240 ", " FA_P120
#define FA_OUT_256 FA_OUT_240, FA_D8(120)

// A to G: the numbers of the operands behind D.
#define FA_WGMMA_TYPE(N, STORAGE, TYPE, A, B, C, D, E, F, G)                                                                     \
    template <bool TransposeB, bool TransposeA> struct Wgmma<STORAGE, N, TransposeB, TransposeA> {                               \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a_smem, uint64_t b_smem, bool accumulate) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                                                 \
                         ", 0;\n"                                                                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_PTX_##N                         \
                         "}, "                                                                                                   \
                         "%" #A ", %" #B ", p, 1, 1, %" #E ", %" #D ";\n}\n"                                                     \
                         : FA_OUT_##N                                                                                            \
                         : "l"(a_smem), "l"(b_smem), "r"(int(accumulate)), "n"(int(TransposeB)), "n"(int(TransposeA)));          \
        }                                                                                                                        \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_smem, bool accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F                                                                 \
                         ", 0;\n"                                                                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_PTX_##N                         \
                         "}, "                                                                                                   \
                         "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1, %" #G ";\n}\n"                                 \
                         : FA_OUT_##N                                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_smem), "r"(int(accumulate)), "n"(int(TransposeB))); \
        }                                                                                                                        \
    };
#define FA_WGMMA(N, ...)                          \
    FA_WGMMA_TYPE(N, float16, "f16", __VA_ARGS__) \
    FA_WGMMA_TYPE(N, bfloat16, "bf16", __VA_ARGS__)
FA_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
FA_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
FA_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
FA_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
FA_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
FA_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
FA_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
FA_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
FA_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
FA_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
FA_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
FA_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
FA_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
FA_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
FA_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
FA_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef FA_WGMMA
#undef FA_WGMMA_TYPE

// D += A B with A from shared memory (ss) or registers (rs), D = A B where accumulate is 0. N is twice the length of d; T is the type of the
// operands. TransposeB, TransposeA: the descriptor is MN-major, its rows are the product's K.
template <class T, bool TransposeB = false, bool TransposeA = false, int R>
__device__ __forceinline__ void wgmma_ss(float (&d)[R], uint64_t a_smem, uint64_t b_smem, bool accumulate) {
    Wgmma<T, 2 * R, TransposeB, TransposeA>::ss(d, a_smem, b_smem, accumulate);
}
template <class T, bool TransposeB = false, int R>
__device__ __forceinline__ void wgmma_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b_smem, bool accumulate) {
    Wgmma<T, 2 * R, TransposeB, false>::rs(d, a, b_smem, accumulate);
}

}  // namespace fa
