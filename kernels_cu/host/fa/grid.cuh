// The CPU meaning of <fa/grid.cuh>: all blocks are there at once, and take turns (host/interleave.hpp).
#pragma once

#include <fa/atomic.cuh>

namespace fa {

__forceinline__ void grid_barrier(int* counter, FA_HOST_HERE) {
    __syncthreads(file, line);
    if (threadIdx.x == 0) {
        const int opening = fa_host_grid_arrive(counter, file, line);
        while (!fa_host_grid_is_open(opening)) fa_host_await_turn(file, line), fa_host_yield(), fa_host_end_await();
    }
    __syncthreads(file, line);
}

}  // namespace fa
