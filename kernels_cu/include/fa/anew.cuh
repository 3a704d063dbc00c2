// A number that the compiler must not remember.
#pragma once

#include <fa/types.cuh>

namespace fa {

// threadIdx.x, read anew. What is computed from it inside a loop is computed there, a few integer instructions each time, and takes
// no register from one turn to the next, as it would if the compiler knew that it never changes.
__device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

}  // namespace fa
