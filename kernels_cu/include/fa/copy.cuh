// 16-byte moves between global memory and registers: the widest access of a thread, and what coalescing needs.
#pragma once

#include <fa/types.cuh>

namespace fa {

// N values that move together. Vec<float, 4>, Vec<float16, 8> and Vec<double, 2> are the 16-byte ones.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T data[N];
    __device__ __forceinline__ T& operator[](int i) { return data[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

template <class T> constexpr int vec_width = 16 / sizeof(T);
template <class T> using Vec128 = Vec<T, vec_width<T>>;

template <class T> __device__ __forceinline__ Vec128<T> load_128(const T* from) { return *reinterpret_cast<const Vec128<T>*>(from); }

template <class T> __device__ __forceinline__ void store_128(T* to, const Vec128<T>& value) { *reinterpret_cast<Vec128<T>*>(to) = value; }

// N neighbouring values, N * sizeof(T) being 4, 8 or 16 bytes; `from` and `to` are aligned to that.
template <int N, class T> __device__ __forceinline__ Vec<T, N> load_vec(const T* from) { return *reinterpret_cast<const Vec<T, N>*>(from); }

template <int N, class T> __device__ __forceinline__ void store_vec(T* to, const Vec<T, N>& value) {
    *reinterpret_cast<Vec<T, N>*>(to) = value;
}

// 16 bytes of a row of which the first `valid` elements are used; the rest, the row's poison included, become zero.
template <class T> __device__ __forceinline__ Vec128<T> load_128_upto(const T* from, int valid) {
    Vec128<T> value{};
    if (valid > 0) value = load_128(from);
#pragma unroll
    for (int i = 0; i < vec_width<T>; ++i)
        if (i >= valid) value[i] = T{};
    return value;
}

// The first `valid` of N values, one store each where it is not all of them.
template <int N, class T> __device__ __forceinline__ void store_vec_upto(T* to, const Vec<T, N>& value, int valid) {
    if (valid >= N) {
        store_vec(to, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < valid) to[i] = value[i];
}

template <class T> __device__ __forceinline__ void store_128_upto(T* to, const Vec128<T>& value, int valid) {
    store_vec_upto(to, value, valid);
}

}  // namespace fa
