// The CPU meaning of <fa/warp.cuh>. A reduction over lanes is one collective here, not log2(WIDTH) shuffles: same result, same order.
#pragma once

#include <fa/math.cuh>

namespace fa {

constexpr uint32_t full_warp = 0xffffffffu;

__forceinline__ int lane_id() { return threadIdx.x % 32; }
__forceinline__ int warp_id() { return threadIdx.x / 32; }
__forceinline__ int opaque_thread_id() { return threadIdx.x; }

template <class T = unsigned char> __forceinline__ T* dynamic_shared() { return reinterpret_cast<T*>(fa_host_self->dynamic_shared); }

namespace host {

template <int WIDTH, int STRIDE, class T, class Combine> inline void reduce(void* const* lanes, unsigned mask) {
    T value[32];
    for (int i = 0; i < 32; ++i) value[i] = mask >> i & 1 ? *static_cast<T*>(lanes[i]) : fa_host::inactive_lane<T>();
    for (int step = WIDTH * STRIDE / 2; step >= STRIDE; step /= 2) {
        T next[32];
        for (int i = 0; i < 32; ++i) next[i] = Combine::of(value[i], value[i ^ step]);
        for (int i = 0; i < 32; ++i) value[i] = next[i];
    }
    for (unsigned rest = mask; rest; rest &= rest - 1) *static_cast<T*>(lanes[__builtin_ctz(rest)]) = value[__builtin_ctz(rest)];
}

struct Max {
    template <class T> static T of(T a, T b) { return max(a, b); }
};
struct Sum {
    template <class T> static T of(T a, T b) { return a + b; }
};

}  // namespace host

template <int WIDTH, int STRIDE = 1, class T> inline T group_max(T x, FA_HOST_HERE) {
    fa_host_warp(full_warp, host::reduce<WIDTH, STRIDE, T, host::Max>, &x, "group_max", file, line);
    return x;
}

template <int WIDTH, int STRIDE = 1, class T> inline T group_sum(T x, FA_HOST_HERE) {
    fa_host_warp(full_warp, host::reduce<WIDTH, STRIDE, T, host::Sum>, &x, "group_sum", file, line);
    return x;
}

}  // namespace fa
