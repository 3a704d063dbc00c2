// wgmma_ss and wgmma_rs of <fa/wgmma.cuh> for operands of 8 bits: D (64 x N) += A (64 x 32) B (32 x N). Both are K-major, slabs of 128
// elements; a step of 32 is 32 bytes further on, as of 16 bits. A's registers are fa/float8.cuh's fragment.
//
// The sum is not a float32's: products are aligned to the largest and cut off 13 bits behind the point there, and so is D
// (arXiv 2511.10909). Sums over many keys are promoted: D of a few steps is added to other registers.
#pragma once

#include <fa/float8.cuh>
#include <fa/wgmma.cuh>

namespace fa {

#define FA_WGMMA_TYPE(N, STORAGE, TYPE, A, B, C, D, E, F)                                                                        \
    template <> struct Wgmma<STORAGE, N, false, false> {                                                                         \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a_smem, uint64_t b_smem, bool accumulate) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                                                 \
                         ", 0;\n"                                                                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE " {" FA_PTX_##N                         \
                         "}, "                                                                                                   \
                         "%" #A ", %" #B ", p, 1, 1;\n}\n"                                                                       \
                         : FA_OUT_##N                                                                                            \
                         : "l"(a_smem), "l"(b_smem), "r"(int(accumulate)));                                                      \
        }                                                                                                                        \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_smem, bool accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F                                                                 \
                         ", 0;\n"                                                                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE " {" FA_PTX_##N                         \
                         "}, "                                                                                                   \
                         "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1;\n}\n"                                          \
                         : FA_OUT_##N                                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_smem), "r"(int(accumulate)));                       \
        }                                                                                                                        \
    };
#define FA_WGMMA(N, ...)                               \
    FA_WGMMA_TYPE(N, float8_e4m3, "e4m3", __VA_ARGS__) \
    FA_WGMMA_TYPE(N, float8_e5m2, "e5m2", __VA_ARGS__)
FA_WGMMA(32, 16, 17, 18, 19, 20, 21)
FA_WGMMA(64, 32, 33, 34, 35, 36, 37)
FA_WGMMA(96, 48, 49, 50, 51, 52, 53)
FA_WGMMA(128, 64, 65, 66, 67, 68, 69)
FA_WGMMA(160, 80, 81, 82, 83, 84, 85)
FA_WGMMA(192, 96, 97, 98, 99, 100, 101)
FA_WGMMA(224, 112, 113, 114, 115, 116, 117)
FA_WGMMA(256, 128, 129, 130, 131, 132, 133)
#undef FA_WGMMA
#undef FA_WGMMA_TYPE

}  // namespace fa
