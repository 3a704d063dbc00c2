// The tensor memory accelerator (TMA, sm_90): one thread starts the copy of a box of a tensor of up to five dimensions, between global and
// shared memory. Addresses, bounds and the swizzle come from a tensor map that the host has encoded (the header's [tensor_map.NAME]).
// What lies outside the tensor is zero on the way in and left out on the way out, so ragged tiles need no code.
//
// With swizzle = 128 a box is at most 128 bytes wide and its place in shared memory 1024-byte aligned: chunk c (16 bytes) of row r lies in
// place of chunk c ^ r % 8, as fa/fragment.cuh has it for tiles of width 64.
#pragma once

#include <fa/barrier.cuh>

namespace fa {

// An encoded tensor map, a parameter by value: `const __grid_constant__ fa::TensorMap k_map`.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// The block's dynamic shared memory, aligned as swizzled tiles need it.
__device__ __forceinline__ unsigned char* dynamic_shared_1024() {
    extern __shared__ __align__(1024) unsigned char fa_dynamic_shared_1024[];
    return fa_dynamic_shared_1024;
}

// What becomes of a line in the L2 cache: kept least or kept longest.
constexpr uint64_t evict_first = 0x12f0000000000000ull, evict_last = 0x14f0000000000000ull;

// Starts to copy the box at (c0, c1, c2, c3), innermost coordinate first, to tile_smem. c0 is a multiple of 16 bytes: the ISA does not say
// so, but at any other an H200 stops with an illegal instruction. The box's bytes, those outside the tensor counted, are taken off what the
// barrier expects. One thread issues it.
__device__ __forceinline__ void tma_load_4d(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                     smem_u32(tile_smem)),
                 "l"(map), "r"(smem_u32(barrier_smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
__device__ __forceinline__ void tma_load_4d(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, int c0, int c1, int c2, int c3,
                                            uint64_t cache_policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], "
        "%7;" ::"r"(smem_u32(tile_smem)),
        "l"(map), "r"(smem_u32(barrier_smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(cache_policy)
        : "memory");
}

// Starts to copy the box at tile_smem to the tensor. The writers of tile_smem have passed fence_proxy_async_shared and a barrier before.
// No coordinate is negative: a load may be, but at such a store an H200 stops.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* tile_smem, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(smem_u32(tile_smem)),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// Starts to add floats at from_smem to global memory, both 16-byte aligned, without a map. Like a store, but each float is added by itself.
__device__ __forceinline__ void bulk_add_f32(float* to, const float* from_smem, int count) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(smem_u32(from_smem)),
                 "r"(count * 4)
                 : "memory");
}

// Stores in groups, as cp.async's: bulk_commit closes one; _read waits until all but the latest N groups have read shared memory,
// which may then be overwritten; the other until they are complete.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> __device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

}  // namespace fa
