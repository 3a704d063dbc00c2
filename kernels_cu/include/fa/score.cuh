// Masks and scores of a problem (--mask, --score). The harness defines FA_MASK, FA_SCORE and FA_SCORE_SLOPE for a compile, as C++ of
// the words in fa::formula (harness/formula.py writes it); a problem without them defines none, and every word here is then nothing.
#pragma once

#include <fa/args.cuh>

namespace fa {

#ifdef FA_MASK
constexpr bool has_mask = true;
#else
constexpr bool has_mask = false;
#endif
#ifdef FA_SCORE
constexpr bool has_score = true;
#else
constexpr bool has_score = false;
#endif

// What the text of a mask or score may call. Real numbers are of the type R in which a kernel accumulates.
namespace formula {

__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ double exp(double x) { return ::exp(x); }
__device__ __forceinline__ float exp2(float x) { return ::exp2f(x); }
__device__ __forceinline__ double exp2(double x) { return ::exp2(x); }
__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
__device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
template <class T> __device__ __forceinline__ T magnitude(T x) { return x < T(0) ? -x : x; }
template <class T> __device__ __forceinline__ T least(T a, T b) { return b < a ? b : a; }
template <class T> __device__ __forceinline__ T greatest(T a, T b) { return b > a ? b : a; }
// Rounded down, as Python's // and %. b is not 0: the harness has looked.
__device__ __forceinline__ int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
__device__ __forceinline__ int64_t floor_mod(int64_t a, int64_t b) { return a % b + (a % b != 0 && (a < 0) != (b < 0)) * b; }

// A pair of query and key by the names of the language. q counts as the causal mask does, bottom-right: the last query is at the last
// key. Integers have 64 bits: the harness refuses a text that could exceed them.
struct Pair {
    int64_t b, h, q, k, h_kv, seq_q, seq_kv;

    __device__ __forceinline__ bool sees() const {
#ifdef FA_MASK
        return FA_MASK;
#else
        return true;
#endif
    }

    // What takes the place of the score s = scale * q·k.
    template <class R> __device__ __forceinline__ R score(R s) const {
#ifdef FA_SCORE
        return FA_SCORE;
#else
        return s;
#endif
    }

    // The derivative of score() by s.
    template <class R> __device__ __forceinline__ R slope([[maybe_unused]] R s) const {
#ifdef FA_SCORE_SLOPE
        return FA_SCORE_SLOPE;
#else
        return R(1);
#endif
    }
};

}  // namespace formula

__device__ __forceinline__ formula::Pair pair_of(const Args& args, int batch, int head, int query, int key) {
    return {batch, head, int64_t(query) + args.seq_kv - args.seq_q, key, kv_head_of(args, head), args.seq_q, args.seq_kv};
}

// Whether a query does not see a key by the problem's mask, beside the causal one (visible_keys). Also of rows beyond the tensors where
// there is a mask or a score, whose text is for positions that exist.
__device__ __forceinline__ bool hidden(const Args& args, int batch, int head, int query, int key) {
    if constexpr (has_mask || has_score) return query >= args.seq_q || key >= args.seq_kv || !pair_of(args, batch, head, query, key).sees();
    else return false;
}

// The score of a pair from s = scale * q·k, and its derivative by s, with which dS is multiplied.
template <class R> __device__ __forceinline__ R score_of(const Args& args, int batch, int head, int query, int key, R s) {
    if constexpr (has_score) return pair_of(args, batch, head, query, key).score(s);
    else return s;
}
template <class R> __device__ __forceinline__ R slope_of(const Args& args, int batch, int head, int query, int key, R s) {
    if constexpr (has_score) return pair_of(args, batch, head, query, key).slope(s);
    else return R(1);
}

}  // namespace fa
