// Two softmaxes of one row over different keys, merged: what a ring (or split keys) does with its partial results.
#pragma once

#include <fa/copy.cuh>
#include <fa/math.cuh>

namespace fa {

// O = kept * O of the one + added * O of the other; logsumexp is that of all keys together.
struct Merged {
    float logsumexp, kept, added;
};

// From the logsumexp of both. -inf is a row that saw no key: its O has weight 0. Where neither saw one, O = 0 and logsumexp = -inf.
__device__ __forceinline__ Merged merge_rows(float running, float step) {
    const float top = max(running, step);
    if (running == -infinity() && step == -infinity()) return {top, 0.0f, 0.0f};  // -inf - -inf is NaN; top drops a NaN
    const float kept = exp(running - top), added = exp(step - top), sum = kept + added;
    return {top + log(sum), kept / sum, added / sum};
}

// What a tensor of partial results is stored in: float32, or the storage type T.
template <bool Float, class T> struct Partial {
    using type = T;
};
template <class T> struct Partial<true, T> {
    using type = float;
};

// N neighbouring values as float32, from a multiple of 16 bytes on, and back: N a multiple of those in 16 bytes.
template <int N, class T> __device__ __forceinline__ Vec<float, N> load_wide(const T* from) {
    Vec<float, N> wide;
#pragma unroll
    for (int i = 0; i < N; i += vec_width<T>) {
        const Vec128<T> part = load_128(from + i);
#pragma unroll
        for (int j = 0; j < vec_width<T>; ++j) wide[i + j] = widen(part[j]);
    }
    return wide;
}

template <int N, class T> __device__ __forceinline__ void store_rounded(T* to, const Vec<float, N>& wide) {
#pragma unroll
    for (int i = 0; i < N; i += vec_width<T>) {
        Vec128<T> part;
#pragma unroll
        for (int j = 0; j < vec_width<T>; ++j) part[j] = narrow<T>(wide[i + j]);
        store_128(to + i, part);
    }
}

}  // namespace fa
