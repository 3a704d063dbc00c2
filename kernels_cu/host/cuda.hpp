// CUDA C++ for the host compiler: keywords, built-in variables, vector types, arithmetic and warp collectives. Included before every
// kernel file, so that a plain kernel needs no header. It includes no standard header: they take longer to compile than the kernel.
#pragma once

#include "engine.hpp"

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One OS thread runs one block at a time, so its thread-local storage is the block's shared memory.
#define __shared__ static __thread

#define threadIdx (fa_host_self->thread_idx)
#define blockIdx (fa_host_self->block_idx)
#define blockDim (fa_host_self->block_dim)
#define gridDim (fa_host_self->grid_dim)
constexpr int warpSize = 32;

using cudaStream_t = void*;
using size_t = decltype(sizeof(0));  // NVRTC has it without a header too

// As on a GPU, neither needs a header.
#define printf(...) fa_host_printf(__VA_ARGS__)
#define assert(...) ((__VA_ARGS__) ? void() : fa_host_fail("assertion failed: " #__VA_ARGS__, __FILE__, __LINE__))

// -- vectors ----------------------------------------------------------------------------------------------------------

#define FA_HOST_VECTORS(type, name, single)                                                     \
    struct name##1 { type x; };                                                                 \
    struct alignas(sizeof(type) * 2) name##2 { type x, y; };                                    \
    struct name##3 { type x, y, z; };                                                           \
    struct alignas(sizeof(type) * 4 > 16 ? 16 : sizeof(type) * 4) name##4 { type x, y, z, w; }; \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                            \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                 \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
FA_HOST_VECTORS(float, float, 4)
FA_HOST_VECTORS(double, double, 8)
FA_HOST_VECTORS(int, int, 4)
FA_HOST_VECTORS(unsigned, uint, 4)
#undef FA_HOST_VECTORS

// -- arithmetic -------------------------------------------------------------------------------------------------------

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float tanhf(float) noexcept;
float powf(float, float) noexcept;
double exp(double) noexcept;
double exp2(double) noexcept;
double log(double) noexcept;
double log2(double) noexcept;
double tanh(double) noexcept;
double pow(double, double) noexcept;
}

inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline double fabs(double x) { return __builtin_fabs(x); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }

// IEEE maxNum, as in CUDA: of a number and a NaN, the number.
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }
inline double fmax(double a, double b) { return a > b || b != b ? a : b; }
inline double fmin(double a, double b) { return a < b || b != b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline int abs(int x) { return x < 0 ? -x : x; }

template <class To, class From> inline To fa_host_bits(From x) { return __builtin_bit_cast(To, x); }
inline unsigned __float_as_uint(float x) { return fa_host_bits<unsigned>(x); }
inline int __float_as_int(float x) { return fa_host_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return fa_host_bits<float>(x); }
inline float __int_as_float(int x) { return fa_host_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
template <class T> inline T __ldg(const T* address) { return *address; }

// -- synchronisation and warp collectives ------------------------------------------------------------------------------

#define FA_HOST_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(FA_HOST_HERE) { fa_host_syncthreads(file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, FA_HOST_HERE) { fa_host_warp(mask, nullptr, nullptr, "__syncwarp", file, line); }
inline void __threadfence() { fa_host_threadfence(); }
inline void __threadfence_block() {}
__forceinline__ void __trap() { __builtin_trap(); }

namespace fa_host {

template <class T> struct Exchange {
    T value, result;
    int source;  // lane
};

// The result of a shuffle from a lane that does not take part: NaN, or 0xdeaddead for integers.
template <class T> inline T inactive_lane() {
    T x;
    __builtin_memset(&x, 0xff, sizeof x);
    if constexpr (T(0.5) == T(0)) x = T(0xdeaddead);
    return x;
}

template <class T> inline void exchange(void* const* lanes, unsigned mask) {
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        auto& to = *static_cast<Exchange<T>*>(lanes[__builtin_ctz(rest)]);
        if (mask >> (to.source & 31) & 1) to.result = static_cast<Exchange<T>*>(lanes[to.source & 31])->value;
        else to.result = inactive_lane<T>();
    }
}

inline int lane() { return int((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32); }

template <class T> inline T shuffle(unsigned mask, T value, int source, const char* word, const char* file, int line) {
    Exchange<T> e{value, value, source};
    fa_host_warp(mask, exchange<T>, &e, word, file, line);
    return e.result;
}

struct Vote {
    bool predicate;
    unsigned ballot;
};
inline void vote(void* const* lanes, unsigned mask) {
    unsigned all = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1)
        all |= unsigned(static_cast<Vote*>(lanes[__builtin_ctz(rest)])->predicate) << __builtin_ctz(rest);
    for (unsigned rest = mask; rest; rest &= rest - 1) static_cast<Vote*>(lanes[__builtin_ctz(rest)])->ballot = all;
}

}  // namespace fa_host

template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, FA_HOST_HERE) {
    int lane = fa_host::lane();
    return fa_host::shuffle(mask, value, (lane & -width) + (source & width - 1), "__shfl_sync", file, line);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, FA_HOST_HERE) {
    int lane = fa_host::lane(), from = lane ^ bits;
    return fa_host::shuffle(mask, value, (from & -width) <= (lane & -width) ? from : lane, "__shfl_xor_sync", file, line);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FA_HOST_HERE) {
    int lane = fa_host::lane(), from = lane - int(delta);
    return fa_host::shuffle(mask, value, from >= (lane & -width) ? from : lane, "__shfl_up_sync", file, line);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, FA_HOST_HERE) {
    int lane = fa_host::lane(), from = lane + int(delta);
    return fa_host::shuffle(mask, value, from < (lane & -width) + width ? from : lane, "__shfl_down_sync", file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, FA_HOST_HERE) {
    fa_host::Vote v{predicate != 0, 0};
    fa_host_warp(mask, fa_host::vote, &v, "__ballot_sync", file, line);
    return v.ballot;
}
inline int __any_sync(unsigned mask, int predicate, FA_HOST_HERE) { return __ballot_sync(mask, predicate, file, line) != 0; }
// Not `== mask`: in the last warp of a block the mask may name lanes that do not exist and do not vote.
inline int __all_sync(unsigned mask, int predicate, FA_HOST_HERE) { return __ballot_sync(mask, !predicate, file, line) == 0; }

// Inlined even at -O1 (the race check), so that a report names the kernel's line.
__forceinline__ float atomicAdd(float* address, float value) { return fa_host_atomic_add_f32(address, value); }
__forceinline__ double atomicAdd(double* address, double value) { return fa_host_atomic_add_f64(address, value); }
__forceinline__ int atomicAdd(int* address, int value) { return fa_host_atomic_add_i32(address, value); }
__forceinline__ unsigned atomicAdd(unsigned* address, unsigned value) {
    return unsigned(fa_host_atomic_add_i32(reinterpret_cast<int*>(address), int(value)));
}
__forceinline__ int atomicExch(int* address, int value) { return fa_host_atomic_exchange_i32(address, value); }
__forceinline__ int atomicCAS(int* address, int compare, int value) { return fa_host_atomic_compare_exchange_i32(address, compare, value); }
__forceinline__ int atomicMax(int* address, int value) { return fa_host_atomic_max_i32(address, value); }

// -- the call of a kernel by the engine ---------------------------------------------------------------------------------

namespace fa_host {

template <class... P> struct Unpack;
template <class First, class... Rest> struct Unpack<First, Rest...> {
    template <class Kernel, class... Done> static void call(Kernel kernel, void** parameters, Done&... done) {
        Unpack<Rest...>::call(kernel, parameters + 1, done..., *static_cast<First*>(*parameters));
    }
};
template <> struct Unpack<> {
    template <class Kernel, class... Done> static void call(Kernel kernel, void**, Done&... done) { kernel(done...); }
};

// The bytes of a plain scale.
#define FA_HOST_SCALE(dtype) FA_HOST_SCALE_OF(dtype)
#define FA_HOST_SCALE_OF(dtype) FA_HOST_SCALE_##dtype
#define FA_HOST_SCALE_float16 4
#define FA_HOST_SCALE_bfloat16 4
#define FA_HOST_SCALE_float32 4
#define FA_HOST_SCALE_float64 8

// Calls a kernel with an array of pointers to its parameters, as cuLaunchKernel takes them. Bytes: of each.
template <unsigned... Bytes> struct Passed {
    template <class... P> static void call(void (*kernel)(P...), void** parameters) {
        constexpr bool same = sizeof...(P) == sizeof...(Bytes);
        static_assert(same, "the entry has another number of parameters than its launch passes");
        if constexpr (same) {
            static_assert(((sizeof(P) == Bytes) && ...),
                          "a parameter has another size than its launch passes: sizes are int, the scale is float, of float64 double");
            Unpack<P...>::call(kernel, parameters);
        }
    }
};

}  // namespace fa_host
