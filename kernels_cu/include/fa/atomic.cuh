// Reductions in global memory by many blocks at once (red): nothing is returned, so no warp stalls on them.
#pragma once

#include <fa/types.cuh>

namespace fa {

// to[0..3] += the four, 16-byte aligned: one request from sm_90 on, four before. Each element is added by itself, in any order.
__device__ __forceinline__ void red_add_v4_f32(float* to /* [4] */, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
    atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

}  // namespace fa
