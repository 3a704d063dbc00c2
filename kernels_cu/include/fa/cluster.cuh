// Thread-block clusters (sm_90): blocks of one grid that run at the same time on neighbouring multiprocessors and reach each other's shared
// memory (distributed shared memory). The header's [[launch]] has `cluster = 2`, the entry `__cluster_dims__(CLUSTER, 1, 1)`. A block's
// rank in its cluster is then blockIdx.x % CLUSTER.
//
// A word takes the place of another block as an address of map_shared: that of the same place in that block. A block's shared memory is
// there from the cluster barrier at its beginning until it ends, so a kernel has one behind its mbarrier_init, and a block must not end
// before the last access that another makes to it. (PTX ISA: "barrier.cluster", "mapa", "cp.async.bulk", "mbarrier.arrive".)
#pragma once

#include <fa/tma.cuh>

#ifndef CLUSTER
#error "<fa/cluster.cuh> in a kernel without clusters: a [[launch]] of its header needs cluster = 2"
#endif

namespace fa {

// The barrier of all threads of the cluster that have not ended, in two halves: each thread arrives, then waits. What a thread wrote before
// it arrives is visible to every thread that has waited. It waits for the thread's stores and reductions: not for a main loop.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The shared::cluster address of a place of this block's shared memory in the block of a rank. Words of the own shared memory do not take
// it; an offset in bytes may be added.
__device__ __forceinline__ uint32_t map_shared(const void* smem, int rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(smem_u32(smem)), "r"(rank));
    return mapped;
}

// Arrives at an mbarrier of another block: a stage of it that this thread has read, or a copy has left, may be written again. Data goes by
// the words below, whose bytes the receiver's mbarrier counts. To release plain stores at the scope of the cluster would cost a
// MEMBAR.GPU, which waits for every store and reduction of the thread. The arrival waits for nothing, not even for this thread's loads:
// ptxas issues it while they are in flight. So between loads of what the other block then overwrites and the arrival lies a
// fence_proxy_async_shared of each reader, a MEMBAR.CTA, or a wait. What wgmma or TMA has read is complete behind its wait.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier_cluster) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_cluster) : "memory");
}

// Starts to copy bytes of this block's shared memory, a multiple of 16 and 16-byte aligned, to a block of the cluster. They are taken off
// what an mbarrier of that block expects (its own thread calls mbarrier_arrive_expect_tx). One thread issues it, behind a
// fence_proxy_async_shared of the writers and a barrier. Only that mbarrier tells when from_smem may be written again: the receiver says so
// by mbarrier_arrive_remote.
__device__ __forceinline__ void bulk_copy_to_cluster(uint32_t to_cluster, const void* from_smem, uint32_t bytes, uint32_t barrier_cluster) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to_cluster),
                 "r"(smem_u32(from_smem)), "r"(bytes), "r"(barrier_cluster)
                 : "memory");
}

// tma_load_4d for several blocks at once: L2 is read once, and the box lands at tile_smem in every block whose bit is set in `blocks`. In
// each of them its bytes are taken off what the mbarrier at barrier_smem expects.
__device__ __forceinline__ void tma_load_4d_multicast(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, uint32_t blocks,
                                                      int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], "
        "%3;" ::"r"(smem_u32(tile_smem)),
        "l"(map), "r"(smem_u32(barrier_smem)), "h"(uint16_t(blocks)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
__device__ __forceinline__ void tma_load_4d_multicast(void* tile_smem, const TensorMap* map, uint64_t* barrier_smem, uint32_t blocks,
                                                      int c0, int c1, int c2, int c3, uint64_t cache_policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, "
        "%6, %7}], [%2], %3, %8;" ::"r"(smem_u32(tile_smem)),
        "l"(map), "r"(smem_u32(barrier_smem)), "h"(uint16_t(blocks)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(cache_policy)
        : "memory");
}

// Starts to write 16 bytes from registers, aligned, to another block's shared memory. They are taken off what an mbarrier of that block
// expects. What wgmma or TMA reads of them needs a fence_proxy_async_shared of the reader behind its wait.
__device__ __forceinline__ void store_remote_16(uint32_t to_cluster, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                                uint32_t barrier_cluster) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to_cluster),
                 "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier_cluster)
                 : "memory");
}

}  // namespace fa
