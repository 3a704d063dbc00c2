// The stages of a ring in shared memory that asynchronous copies fill and a kernel empties (fa/barrier.cuh has the mbarriers).
#pragma once

#include <fa/types.cuh>

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

}  // namespace fa
