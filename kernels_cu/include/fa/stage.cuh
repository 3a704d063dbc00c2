// The stages of a ring in shared memory that asynchronous copies fill and a kernel empties, and the tiles that lie in them.
#pragma once

#include <fa/tma.cuh>

namespace fa {

// A position in a ring of N stages, and the parity of its round. One number, where a producer has few registers.
template <int N> struct Ring {
    uint32_t position = 0;
    __device__ __forceinline__ uint32_t stage() const { return position % N; }
    __device__ __forceinline__ uint32_t parity() const { return position / N % 2; }
    __device__ __forceinline__ void next() { ++position; }
};

// The same in two numbers, where a main loop has no instruction to spare.
template <int N> struct RingPlace {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// The mbarriers of a ring's stages: a thread arrives and announces the bytes of a tile, or `writers` do, of a part each; `readers` give its
// stage back. No phase may end before every thread that waits for the one before has seen it: it would wait for ever.
template <int N>
__device__ __forceinline__ void mbarrier_init_ring(uint64_t (&full)[N], uint64_t (&empty)[N], uint32_t readers, uint32_t writers = 1) {
    for (int i = 0; i < N; ++i) mbarrier_init(&full[i], writers), mbarrier_init(&empty[i], readers);
}

// Whether the next stages are all full: asked at once, for each answer takes some 90 cycles. And until they are.
template <int Stages, int N> __device__ __forceinline__ bool are_full(uint64_t (&full)[N], RingPlace<N> place) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < Stages; ++i, place.next()) all &= mbarrier_test_parity(&full[place.stage], place.parity);
    return __all_sync(full_warp, all);
}
template <int Stages, int N> __device__ __forceinline__ void wait_full(uint64_t (&full)[N], RingPlace<N> place) {
    for (int i = 0; i < Stages; ++i, place.next()) mbarrier_wait_parity(&full[place.stage], place.parity);
}

// This warp has read the tile of a stage: one lane gives the stage back for all 32, and the place moves on.
template <int N> __device__ __forceinline__ void release_stage(uint64_t (&empty)[N], RingPlace<N>& place) {
    if (lane_id() == 0) mbarrier_arrive(&empty[place.stage]);
    place.next();
}

// Starts to copy a tile to its slabs of 64 columns, SlabBytes each. Its barrier is told how many bytes are to come, before they do.
template <uint32_t SlabBytes, int Bytes>
__device__ __forceinline__ void tma_load_tile(unsigned char (&tile_smem)[Bytes], const TensorMap& map, uint64_t& full, int row, int head,
                                              int batch) {
    mbarrier_arrive_expect_tx(&full, Bytes);
#pragma unroll
    for (int slab = 0; slab < Bytes / int(SlabBytes); ++slab)
        tma_load_4d(tile_smem + slab * SlabBytes, &map, &full, 64 * slab, row, head, batch);
}
// Starts to copy rows of such a tile to the tensor, as many as the map's box has.
template <int Slabs, uint32_t SlabBytes>
__device__ __forceinline__ void tma_store_tile(const TensorMap& map, const unsigned char* rows_smem, int row, int head, int batch) {
#pragma unroll
    for (int slab = 0; slab < Slabs; ++slab) tma_store_4d(&map, rows_smem + slab * SlabBytes, 64 * slab, row, head, batch);
}

}  // namespace fa
