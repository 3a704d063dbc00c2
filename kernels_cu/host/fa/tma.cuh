// The CPU meaning of <fa/tma.cuh>. The box arrives as late as it may (host/async.hpp); until then its place holds NaN.
#pragma once

#include <fa/barrier.cuh>

namespace fa {

// host/tensor_map.hpp has its fields.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

__forceinline__ unsigned char* dynamic_shared_1024() { return reinterpret_cast<unsigned char*>(fa_host_self->dynamic_shared); }

constexpr uint64_t evict_first = 0x12f0000000000000ull, evict_last = 0x14f0000000000000ull;

__forceinline__ void tma_load_4d(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, int c0, int c1, int c2, int c3,
                                 FA_HOST_HERE) {
    const int at[4] = {c0, c1, c2, c3};
    fa_host_tma_load(map, tile_smem, barrier_smem, at, 4, file, line);
}
__forceinline__ void tma_load_4d(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, int c0, int c1, int c2, int c3,
                                 uint64_t cache_policy, FA_HOST_HERE) {
    if (cache_policy != evict_first && cache_policy != evict_last) fa_host_fail("tma_load_4d with an unknown cache policy", file, line);
    tma_load_4d(tile_smem, map, barrier_smem, c0, c1, c2, c3, file, line);
}

__forceinline__ void tma_store_4d(const TensorMap* map, const void* tile_smem, int c0, int c1, int c2, int c3, FA_HOST_HERE) {
    const int at[4] = {c0, c1, c2, c3};
    fa_host_tma_store(map, tile_smem, at, 4, file, line);
}

__forceinline__ void bulk_add_f32(float* to, const float* from_smem, int count, FA_HOST_HERE) {
    fa_host_bulk_add_f32(to, from_smem, count, file, line);
}

// A store writes global memory when it has read shared memory, a reduction later.
__forceinline__ void bulk_commit() { fa_host_bulk_commit(); }
template <int N> __forceinline__ void bulk_wait_read() { fa_host_bulk_wait(N, true); }
template <int N> __forceinline__ void bulk_wait() { fa_host_bulk_wait(N, false); }

}  // namespace fa
