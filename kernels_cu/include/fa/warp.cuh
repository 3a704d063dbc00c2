// Threads, warps and the shared memory they meet in. __syncthreads, __syncwarp, __shfl_*_sync and atomicAdd are CUDA's own.
#pragma once

#include <fa/math.cuh>

namespace fa {

constexpr uint32_t full_warp = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// threadIdx.x, read anew. What is computed from it inside a loop is computed there, a few integer instructions each time, and takes
// no register from one turn to the next, as it would if the compiler knew that it never changes.
__device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// The block's dynamic shared memory, 128-byte aligned; how much there is stands in the header's `shared`.
template <class T = unsigned char> __device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char fa_dynamic_shared[];
    return reinterpret_cast<T*>(fa_dynamic_shared);
}

// The maximum (sum) over each aligned group of WIDTH lanes (2, 4, 8, 16 or 32), returned to all of them.
// A butterfly of log2(WIDTH) shuffles: the order of additions is the same in every lane, so all get the same bits.
template <int WIDTH, class T> __device__ __forceinline__ T group_max(T x) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(full_warp, x, step));
    return x;
}

template <int WIDTH, class T> __device__ __forceinline__ T group_sum(T x) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x += __shfl_xor_sync(full_warp, x, step);
    return x;
}

}  // namespace fa
