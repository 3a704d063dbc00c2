// Threads, warps and the block's shared memory. __syncthreads, __syncwarp, __shfl_*_sync and atomicAdd are CUDA's own.
#pragma once

#include <fa/math.cuh>

namespace fa {

constexpr uint32_t full_warp = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// threadIdx.x as a value that is opaque to the compiler. What is computed from threadIdx.x itself is loop-invariant, so the compiler
// hoists it and holds a register through the whole loop, or spills. What is computed from an opaque value is recomputed at each use:
// a few integer instructions for a register.
__device__ __forceinline__ int opaque_thread_id() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// The block's dynamic shared memory, 128-byte aligned; its size is the header's `shared`.
template <class T = unsigned char> __device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char fa_dynamic_shared[];
    return reinterpret_cast<T*>(fa_dynamic_shared);
}

// The maximum (sum) over each aligned group of WIDTH lanes (2, 4, 8, 16 or 32), returned to all of them. With a STRIDE of 2, groups
// alternate: lanes 0, 2, 4 … are one, lanes 1, 3, 5 … the next.
// A butterfly of log2(WIDTH) shuffles: the order of additions is the same in every lane, so all get the same bits.
template <int WIDTH, int STRIDE = 1, class T> __device__ __forceinline__ T group_max(T x) {
#pragma unroll
    for (int step = WIDTH * STRIDE / 2; step >= STRIDE; step /= 2) x = max(x, __shfl_xor_sync(full_warp, x, step));
    return x;
}

template <int WIDTH, int STRIDE = 1, class T> __device__ __forceinline__ T group_sum(T x) {
#pragma unroll
    for (int step = WIDTH * STRIDE / 2; step >= STRIDE; step /= 2) x += __shfl_xor_sync(full_warp, x, step);
    return x;
}

}  // namespace fa
