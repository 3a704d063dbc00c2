// Tiles of rows brought into shared memory, as the float32 kernels of the ladder's first half do it: one element a thread.
#pragma once

#include <fa/types.cuh>

namespace fa {

// Rows first, first + 1, ... of one head to shared memory: `rows` of them, `width` elements each, `pitch` elements apart. What
// lies beyond row `end` or element `head_dim` (the row's poison) becomes zero. `threads` threads do it together, this one being
// `thread`: neighbouring threads take neighbouring elements, so a warp's loads coalesce. The barrier is the caller's.
template <int rows, int width, int pitch, int threads, class T>
__device__ __forceinline__ void load_rows(T* to_smem /* [rows][pitch] */, const T* from /* [rows], stride apart */, int64_t stride,
                                          int first, int end, int head_dim, int thread) {
#pragma unroll 4
    for (int i = thread; i < rows * width; i += threads) {
        int row = i / width, d = i % width;
        to_smem[row * pitch + d] = first + row < end && d < head_dim ? from[row * stride + d] : T{};
    }
}

}  // namespace fa
