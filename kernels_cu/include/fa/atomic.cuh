// Reductions in global memory by many blocks at once (red): nothing is returned, so no warp stalls on them. Their order is any, unless the
// blocks take turns.
#pragma once

#include <fa/warp.cuh>

namespace fa {

// to[0..3] += the four, 16-byte aligned: one request from sm_90 on, four before. Each element is added by itself, in any order.
__device__ __forceinline__ void red_add_v4_f32(float* to /* [4] */, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
    atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

// The same, or, where `first`, a store of the four: without a branch, for products may be in flight.
__device__ __forceinline__ void store_or_add_v4_f32(bool first, float* to /* [4] */, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred first;\n"
        "setp.ne.u32 first, %5, 0;\n"
        "@first st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "@!first red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "}\n" ::"l"(to),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(uint32_t(first))
        : "memory");
#else
    if (first) to[0] = a, to[1] = b, to[2] = c, to[3] = d;
    else red_add_v4_f32(to, a, b, c, d);
#endif
}

// Waits until another block has passed the turn to `mine`, and sees what the warps before it have added. For a whole warp. Who comes before
// must be running or done: a block that waits for one which has not begun may wait for ever. After seconds it traps.
__device__ __forceinline__ void wait_for_turn(const int* turn, int mine) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        ".reg .u32 tries;\n"
        ".reg .s32 now;\n"
        "mov.u32 tries, 0;\n"
        "WAIT:\n"
        "ld.acquire.gpu.global.s32 now, [%0];\n"
        "setp.eq.s32 done, now, %1;\n"
        "vote.sync.all.pred done, done, 0xffffffff;\n"
        "@done bra DONE;\n"
        "add.u32 tries, tries, 1;\n"
        "setp.lt.u32 done, tries, 10000000;\n"
        "@done bra WAIT;\n"
        "trap;\n"
        "DONE:\n"
        "}\n" ::"l"(turn),
        "r"(mine)
        : "memory");
}
// The turn is `next`'s, behind all that this warp has added. One fence: it waits for the reductions that are still on their way.
__device__ __forceinline__ void pass_turn(int* turn, int next) {
    __syncwarp();
    if (lane_id() == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
}

// Counts one arrival of a warp, and says whether it is the last of `expected`: for a whole warp. Who arrives releases all that comes before
// in this warp, and with it what other warps of the block had done when they arrived at a barrier that this warp has waited for. Who is the
// last has acquired what all released: its loads find no older line in L1, as the acquire invalidates them.
__device__ __forceinline__ bool arrives_last(int* arrivals, int expected) {
    int before = 0;
    __syncwarp();
    if (lane_id() == 0) asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    __syncwarp();
    return __shfl_sync(full_warp, before, 0) == expected - 1;
}

}  // namespace fa
