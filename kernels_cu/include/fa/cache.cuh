// What becomes of a line in the L2 cache, for data of which a launch knows that it is read for the last time.
#pragma once

#include <fa/copy.cuh>
#include <fa/tma.cuh>

namespace fa {

// N neighbouring values, 16 bytes: their line is the first to leave L2, and takes no place in L1.
template <int N, class T> __device__ __forceinline__ Vec<T, N> load_vec_last(const T* from) {
    static_assert(sizeof(T) * N == 16, "a load of 16 bytes");
    uint32_t x[4];
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(from), "l"(evict_first)
                 : "memory");
    Vec<T, N> value;
    memcpy(&value, x, 16);
    return value;
}

// The 128 bytes at `line`, 128-byte aligned, are anything until they are written again: L2 may drop them, and DRAM is not written. Other
// threads that read them have passed a barrier.
__device__ __forceinline__ void discard_line(void* line) { asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory"); }

}  // namespace fa
