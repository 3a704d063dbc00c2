// Tensor cores through WMMA (PTX ISA wmma, CUDA's nvcuda::wmma): D (16 x 16) += A (16 x 16) B (16 x 16), by a warp. Which lane holds which
// element of a fragment is unspecified. Fragments can be loaded, multiplied, stored, and treated alike in every element.
#pragma once

#include <fa/async.cuh>

namespace fa {

template <class T> constexpr int wmma_registers = 0;
template <> constexpr int wmma_registers<float16> = 8;  // each element is held twice
template <> constexpr int wmma_registers<bfloat16> = 4;

template <class T> struct WmmaA {  // row-major: element (i, k) at i * stride + k
    uint32_t reg[wmma_registers<T>];
};
template <class T> struct WmmaBRow {  // row-major: element (k, j) at k * stride + j
    uint32_t reg[wmma_registers<T>];
};
template <class T> struct WmmaBCol {  // column-major: element (k, j) at j * stride + k
    uint32_t reg[wmma_registers<T>];
};
struct WmmaAccumulator {
    float reg[8];
};

namespace detail {

#define FA_WMMA_LOAD(name, operand, layout)                                                                                           \
    __device__ __forceinline__ void name(uint32_t (&d)[8], uint32_t from_smem, int stride) {                                          \
        asm volatile("wmma.load." operand ".sync.aligned." layout ".m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;" \
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7])                 \
                     : "r"(from_smem), "r"(stride)                                                                                    \
                     : "memory");                                                                                                     \
    }                                                                                                                                 \
    __device__ __forceinline__ void name(uint32_t (&d)[4], uint32_t from_smem, int stride) {                                          \
        asm volatile("wmma.load." operand ".sync.aligned." layout ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"                \
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                                 \
                     : "r"(from_smem), "r"(stride)                                                                                    \
                     : "memory");                                                                                                     \
    }
FA_WMMA_LOAD(load_a_row, "a", "row")
FA_WMMA_LOAD(load_b_row, "b", "row")
FA_WMMA_LOAD(load_b_col, "b", "col")
#undef FA_WMMA_LOAD

#define FA_WMMA_MMA(name, layout)                                                                                                      \
    __device__ __forceinline__ void name(float (&d)[8], const uint32_t (&a)[8], const uint32_t (&b)[8]) {                              \
        asm("wmma.mma.sync.aligned.row." layout                                                                                        \
            ".m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "                                                                    \
            "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"      \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(b[2]), \
              "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));                                                                  \
    }                                                                                                                                  \
    __device__ __forceinline__ void name(float (&d)[8], const uint32_t (&a)[4], const uint32_t (&b)[4]) {                              \
        asm("wmma.mma.sync.aligned.row." layout                                                                                        \
            ".m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "                                                          \
            "{%8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"                                              \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));                                 \
    }
FA_WMMA_MMA(mma_row_row, "row")
FA_WMMA_MMA(mma_row_col, "col")
#undef FA_WMMA_MMA

}  // namespace detail

// Fragments from shared memory; `stride` in elements, a multiple of 8 (of 4 for floats); addresses 32-byte aligned.
template <class T> __device__ __forceinline__ void wmma_load_a_row(WmmaA<T>& a, const T* from_smem /* [16] rows */, int stride) {
    detail::load_a_row(a.reg, smem_u32(from_smem), stride);
}
template <class T> __device__ __forceinline__ void wmma_load_b_row(WmmaBRow<T>& b, const T* from_smem /* [16] rows */, int stride) {
    detail::load_b_row(b.reg, smem_u32(from_smem), stride);
}
template <class T> __device__ __forceinline__ void wmma_load_b_col(WmmaBCol<T>& b, const T* from_smem /* [16] columns */, int stride) {
    detail::load_b_col(b.reg, smem_u32(from_smem), stride);
}
__device__ __forceinline__ void wmma_load_c_row(WmmaAccumulator& c, const float* from_smem /* [16] rows */, int stride) {
    asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : "=f"(c.reg[0]), "=f"(c.reg[1]), "=f"(c.reg[2]), "=f"(c.reg[3]), "=f"(c.reg[4]), "=f"(c.reg[5]), "=f"(c.reg[6]),
                   "=f"(c.reg[7])
                 : "r"(smem_u32(from_smem)), "r"(stride)
                 : "memory");
}
__device__ __forceinline__ void wmma_store_d_row(float* to_smem /* [16] rows */, const WmmaAccumulator& d, int stride) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(smem_u32(to_smem)),
                 "f"(d.reg[0]), "f"(d.reg[1]), "f"(d.reg[2]), "f"(d.reg[3]), "f"(d.reg[4]), "f"(d.reg[5]), "f"(d.reg[6]), "f"(d.reg[7]),
                 "r"(stride)
                 : "memory");
}

// d += a b.
template <class T> __device__ __forceinline__ void wmma_mma(WmmaAccumulator& d, const WmmaA<T>& a, const WmmaBRow<T>& b) {
    detail::mma_row_row(d.reg, a.reg, b.reg);
}
template <class T> __device__ __forceinline__ void wmma_mma(WmmaAccumulator& d, const WmmaA<T>& a, const WmmaBCol<T>& b) {
    detail::mma_row_col(d.reg, a.reg, b.reg);
}

}  // namespace fa
