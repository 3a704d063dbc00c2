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

// An addition that releases what this thread has done, and acquires what those have who added before it.
__device__ __forceinline__ int atomic_add_acq_rel(int* to, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
    return before;
}
// One thread of each of `count` blocks comes here when it has done with the first counter; the second counts them. The last leaves both as
// it found them. Its plain store of the first must be behind the others' atomics, and a relaxed addition would order nothing.
__device__ __forceinline__ void reset_by_last(int* counters /* [2] */, int count) {
    if (atomic_add_acq_rel(counters + 1, 1) == count - 1) counters[0] = 0, counters[1] = 0;
}

// Blocks that take turns: one thread of each waits until the turn is `mine`, and so sees what the blocks before it have added; behind a
// barrier the other threads of its block do, too. Who comes before must be running or done, or come to run without this block: one that
// waits for a block which cannot begin waits for ever. After seconds it traps.
__device__ __forceinline__ bool has_turn(const int* turn, int mine) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    return now == mine;
}
__device__ __forceinline__ void wait_for_turn(const int* turn, int mine) {
    for (uint32_t tries = 0; !has_turn(turn, mine);)
        if (++tries == 10000000) asm volatile("trap;");
}
// The turn is `next`'s, behind all that this thread has added, and what others had added when they came to a barrier with it. The fence in
// it waits for reductions that are still on their way. Of bulk reductions (fa/tma.cuh) only those that bulk_wait says are complete.
__device__ __forceinline__ void pass_turn(int* turn, int next) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
}

}  // namespace fa
