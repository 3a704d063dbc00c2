// The CPU meaning of <fa/atomic.cuh>.
#pragma once

#include <fa/warp.cuh>

namespace fa {

__forceinline__ void red_add_v4_f32(float* to /* [4] */, float a, float b, float c, float d, FA_HOST_HERE) {
    if (reinterpret_cast<uint64_t>(to) % 16) fa_host_fail("red_add_v4_f32 to an address that is not 16-byte aligned", file, line);
    if (uint64_t(reinterpret_cast<char*>(to) - fa_host_self->dynamic_shared) < fa_host_self->dynamic_bytes)
        fa_host_fail("red_add_v4_f32 to shared memory: it adds to global memory only", file, line);
    atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
}

__forceinline__ int atomic_add_acq_rel(int* to, int value) { return fa_host_atomic_add_acq_rel_i32(to, value); }
__forceinline__ void reset_by_last(int* counters /* [2] */, int count) {
    if (atomic_add_acq_rel(counters + 1, 1) == count - 1) counters[0] = 0, counters[1] = 0;
}

// A block takes turns by a thread at a time; the others go on while it waits.
__forceinline__ bool has_turn(const int* turn, int mine) { return fa_host_has_turn(turn, mine); }
__forceinline__ void wait_for_turn(const int* turn, int mine, FA_HOST_HERE) {
    while (!fa_host_has_turn(turn, mine)) fa_host_await_turn(file, line), fa_host_yield(), fa_host_end_await();
}
__forceinline__ void pass_turn(int* turn, int next, FA_HOST_HERE) { fa_host_pass_turn(turn, next, file, line); }

}  // namespace fa
