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

__forceinline__ void store_or_add_v4_f32(bool first, float* to /* [4] */, float a, float b, float c, float d, FA_HOST_HERE) {
    if (first) to[0] = a, to[1] = b, to[2] = c, to[3] = d;
    else red_add_v4_f32(to, a, b, c, d, file, line);
}

__forceinline__ void wait_for_turn(const int* turn, int mine, FA_HOST_HERE) { fa_host_wait_for_turn(turn, mine, file, line); }
__forceinline__ void pass_turn(int* turn, int next, FA_HOST_HERE) {
    __syncwarp(full_warp, file, line);
    if (lane_id() == 0) fa_host_pass_turn(turn, next);
}

__forceinline__ bool arrives_last(int* arrivals, int expected, FA_HOST_HERE) {
    int before = 0;
    __syncwarp(full_warp, file, line);
    if (lane_id() == 0) {
        __threadfence();
        before = atomicAdd(arrivals, 1);
        __threadfence();
    }
    __syncwarp(full_warp, file, line);
    return __shfl_sync(full_warp, before, 0, 32, file, line) == expected - 1;
}

}  // namespace fa
