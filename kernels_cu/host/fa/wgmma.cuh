// The CPU meaning of <fa/wgmma.cuh>, with a tensor core's bits: the last thread of a warpgroup to arrive issues the product for all 128
// (host/wgmma.hpp). D's registers hold NaN until the wait that retires it.
#pragma once

#include <fa/barrier.cuh>
#include <fa/mma.cuh>

namespace fa {

namespace host {

template <class T> constexpr auto* multiply_warpgroup = FA_HOST_PRODUCT(wgmma_f16);
template <> constexpr auto* multiply_warpgroup<bfloat16> = FA_HOST_PRODUCT(wgmma_bf16);

template <class T, bool TransposeA, bool TransposeB, int R>
__forceinline__ void wgmma(float (&d)[R], const uint32_t* a_reg, uint64_t a_smem, uint64_t b_smem, bool accumulate, const char* word,
                           const char* file, int line) {
    static_assert(R % 4 == 0 && R >= 4 && R <= 128, "N, twice the registers of d, is a multiple of 8 up to 256");
    static_assert(sizeof(T) == 2 || (sizeof(T) == 1 && !TransposeA && !TransposeB), "operands of 8 bits are K-major");
    void* code = fa_host_self->race ? fa_host_code() : nullptr;
    const fa_host::Product product{d, a_reg, a_smem, b_smem, R, TransposeA, TransposeB, accumulate, code, multiply_warpgroup<T>};
    fa_host_wgmma(&product, word, file, line);
}

}  // namespace host

__forceinline__ uint64_t smem_descriptor(const void* slab_smem, uint32_t leading_bytes, uint32_t stride_bytes, FA_HOST_HERE) {
    constexpr uint64_t swizzle_128 = 1ull << 62;
    const uint32_t at = smem_u32(slab_smem, file, line);
    return swizzle_128 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16 | (at & 0x3ffff) >> 4;
}
__forceinline__ uint64_t smem_descriptor_k_major(const void* slab_smem, FA_HOST_HERE) {
    return smem_descriptor(slab_smem, 16, 1024, file, line);
}
__forceinline__ uint64_t smem_descriptor_mn_major(const void* slab_smem, uint32_t slab_bytes, FA_HOST_HERE) {
    return smem_descriptor(slab_smem, slab_bytes, 1024, file, line);
}
__forceinline__ uint64_t descriptor_here(uint64_t descriptor) { return descriptor; }
__forceinline__ uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// The host compiler knows that a wait may write what a product was given.
template <class T, int N> __forceinline__ void ready(T (&)[N]) {}
template <int N> __forceinline__ void moved(float (&to)[N], const float (&from)[N], int first) {
    for (int i = first; i < N; ++i) to[i] = from[i];
}
template <int N> __forceinline__ void discard(float (&)[N]) {}
template <int N> using Accumulators = float[N];
template <int N, int R> __forceinline__ Accumulators<N>& first_of(float (&x)[R]) {
    static_assert(N <= R, "part of the accumulators");
    return reinterpret_cast<Accumulators<N>&>(x);
}

__forceinline__ void wgmma_fence() { fa_host_wgmma_fence(); }
__forceinline__ void wgmma_commit() { fa_host_wgmma_commit(); }
template <int PENDING, class... Arrays> __forceinline__ void wgmma_wait(Arrays&...) {
    static_assert(PENDING >= 0);
    fa_host_wgmma_late(PENDING);
    fa_host_wgmma_wait(PENDING);
}

template <class T, bool TransposeB = false, bool TransposeA = false, int R>
__forceinline__ void wgmma_ss(float (&d)[R], uint64_t a_smem, uint64_t b_smem, bool accumulate, FA_HOST_HERE) {
    host::wgmma<T, TransposeA, TransposeB>(d, nullptr, a_smem, b_smem, accumulate, "wgmma_ss", file, line);
}
template <class T, bool TransposeB = false, int R>
__forceinline__ void wgmma_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b_smem, bool accumulate, FA_HOST_HERE) {
    host::wgmma<T, false, TransposeB>(d, a, 0, b_smem, accumulate, "wgmma_rs", file, line);
}

}  // namespace fa
