// A barrier of all blocks of a launch, as cooperative groups' grid.sync(). A [[launch]] of the header that says `cooperative` has all its
// blocks on the GPU at once, or is refused: else a block might wait for one that cannot begin.
#pragma once

#include <fa/atomic.cuh>

namespace fa {

// All threads of all blocks meet here. What any of them has done before, in global memory too, is seen by all behind it; by bulk operations
// behind fence_proxy_async_global. counter: an int of global memory that is 0 when the launch begins (a workspace of init "zero"), the same
// in all calls. Each block adds one each time, so a multiple of their number says that all have come. After seconds it traps.
__device__ __forceinline__ void grid_barrier(int* counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const int blocks = gridDim.x * gridDim.y * gridDim.z;
        const int all = (atomic_add_acq_rel(counter, 1) / blocks + 1) * blocks;
        int come = 0;
        for (uint32_t tries = 0; come < all;) {  // one that is fast may have come the next time already
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(come) : "l"(counter) : "memory");
            if (++tries == 10000000) asm volatile("trap;");
        }
    }
    __syncthreads();
}

}  // namespace fa
