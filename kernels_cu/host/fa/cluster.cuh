// The CPU meaning of <fa/cluster.cuh>: cluster.hpp of the engine. The blocks of a cluster run together, and an address of map_shared holds
// the rank of its block.
#pragma once

#include <fa/tma.cuh>

#ifndef CLUSTER
#error "<fa/cluster.cuh> in a kernel without clusters: a [[launch]] of its header needs cluster = 2"
#endif

namespace fa {

namespace host {

// A kernel file may have launches with and without clusters.
__forceinline__ void in_cluster(const char* file, int line) {
    if (fa_host_self->cluster_blocks != CLUSTER) fa_host_fail("a word of clusters in a launch without clusters", file, line);
}

}  // namespace host

// Inlined also at -O1 (the race check), so that a report names the kernel's line.
__forceinline__ void cluster_arrive(FA_HOST_HERE) {
    host::in_cluster(file, line);
    fa_host_cluster_arrive(file, line);
}
__forceinline__ void cluster_wait(FA_HOST_HERE) { fa_host_cluster_wait(file, line); }
__forceinline__ void cluster_sync(FA_HOST_HERE) {
    cluster_arrive(file, line);
    cluster_wait(file, line);
}

__forceinline__ uint32_t map_shared(const void* smem, int rank, FA_HOST_HERE) {
    host::in_cluster(file, line);
    if (uint32_t(rank) >= uint32_t(CLUSTER)) fa_host_fail("map_shared to a block outside the cluster", file, line);
    return smem_u32(smem, file, line) + (uint32_t(rank + 1) << fa_host::rank_shift);
}

__forceinline__ void mbarrier_arrive_remote(uint32_t barrier_cluster, FA_HOST_HERE) {
    fa_host_mbarrier_arrive_remote(barrier_cluster, file, line);
}

__forceinline__ void bulk_copy_to_cluster(uint32_t to_cluster, const void* from_smem, uint32_t bytes, uint32_t barrier_cluster,
                                          FA_HOST_HERE) {
    fa_host_bulk_copy_to_cluster(to_cluster, from_smem, bytes, barrier_cluster, file, line);
}

__forceinline__ void store_remote_16(uint32_t to_cluster, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t barrier_cluster,
                                     FA_HOST_HERE) {
    const uint32_t value[4] = {a, b, c, d};
    fa_host_store_remote(to_cluster, value, barrier_cluster, file, line);
}

__forceinline__ void tma_load_4d_multicast(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, uint32_t blocks, int c0, int c1,
                                           int c2, int c3, FA_HOST_HERE) {
    host::in_cluster(file, line);
    const int at[4] = {c0, c1, c2, c3};
    fa_host_tma_multicast(map, tile_smem, barrier_smem, blocks, at, 4, file, line);
}
__forceinline__ void tma_load_4d_multicast(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, uint32_t blocks, int c0, int c1,
                                           int c2, int c3, uint64_t cache_policy, FA_HOST_HERE) {
    if (cache_policy != evict_first && cache_policy != evict_last)
        fa_host_fail("tma_load_4d_multicast with an unknown cache policy", file, line);
    tma_load_4d_multicast(tile_smem, map, barrier_smem, blocks, c0, c1, c2, c3, file, line);
}

}  // namespace fa
