// Products of whole tiles by wgmma, as the backward passes from hopper to hopper_cluster issue them. Operands lie in swizzled slabs of 64
// columns (fa/wgmma.cuh): `a` and `b` are descriptors of their first rows. Each product is a committed group, which runs until its wait.
#pragma once

#include <fa/wgmma.cuh>

namespace fa {

// d = A B^T over Width columns, which the slabs of A and of B, a_slab and b_slab bytes apart, have together: rows of A, rows of B.
template <class T, int Width, class A, class B, int R>
__device__ __forceinline__ void issue_abt(float (&d)[R], A a, uint32_t a_slab, B b, uint32_t b_slab) {
    discard(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Width / 16; ++step)
        wgmma_ss<T>(d, descriptor_advance(a, step / 4 * a_slab + step % 4 * 32), descriptor_advance(b, step / 4 * b_slab + step % 4 * 32),
                    step > 0);
    wgmma_commit();
}

// The same, with the first Steps times 16 columns of A in registers.
template <class T, int Width, int Steps, class A, class B, int R>
__device__ __forceinline__ void issue_abt(float (&d)[R], const uint32_t (&a_reg)[Steps][4], A a, uint32_t a_slab, B b, uint32_t b_slab) {
    discard(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Width / 16; ++step) {
        const B b_step = descriptor_advance(b, step / 4 * b_slab + step % 4 * 32);
        if (step < Steps) wgmma_rs<T>(d, a_reg[step < Steps ? step : 0], b_step, step > 0);
        else wgmma_ss<T>(d, descriptor_advance(a, step / 4 * a_slab + step % 4 * 32), b_step, step > 0);
    }
    wgmma_commit();
}

// d += A B over Steps times 16 rows of B. A: in registers.
template <class T, int Steps, class B, int R>
__device__ __forceinline__ void issue_ab(float (&d)[R], const uint32_t (&a_reg)[Steps][4], B b, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Steps; ++step) wgmma_rs<T, true>(d, a_reg[step], descriptor_advance(b, step * 2048), accumulate || step > 0);
    wgmma_commit();
}
// The same with A in a slab of shared memory.
template <class T, int Steps, class A, class B, int R>
__device__ __forceinline__ void issue_ab(float (&d)[R], A a, B b, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Steps; ++step)
        wgmma_ss<T, true>(d, descriptor_advance(a, step * 32), descriptor_advance(b, step * 2048), accumulate || step > 0);
    wgmma_commit();
}

// d = A^T B over Rows rows of both; with Add, d += it.
template <class T, int Rows, bool Add = false, class A, class B, int R>
__device__ __forceinline__ void issue_atb(float (&d)[R], A a, B b) {
    if constexpr (!Add) discard(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Rows / 16; ++step)
        wgmma_ss<T, true, true>(d, descriptor_advance(a, step * 2048), descriptor_advance(b, step * 2048), Add || step > 0);
    wgmma_commit();
}

// d = A^T B^T over Rows rows of A, which are columns of B's slabs, b_slab bytes apart; with Add, d += it. Kept: what d held is not discarded,
// so the compiler lets it lie in d's registers until then, and not in others.
template <class T, int Rows, bool Add = false, bool Kept = false, class A, class B, int R>
__device__ __forceinline__ void issue_atbt(float (&d)[R], A a, B b, uint32_t b_slab) {
    if constexpr (!Add && !Kept) discard(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Rows / 16; ++step)
        wgmma_ss<T, false, true>(d, descriptor_advance(a, step * 2048), descriptor_advance(b, step / 4 * b_slab + step % 4 * 32),
                                 Add || step > 0);
    wgmma_commit();
}

}  // namespace fa
