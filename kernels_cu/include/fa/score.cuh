// Masks and scores of a problem (--mask, --score). The harness defines FA_MASK, FA_SCORE and FA_SCORE_SLOPE for a compile, as C++ of
// the words in fa::formula (harness/formula/cpp.py writes it); a problem without them defines none, and every word here is then nothing.
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
#ifdef FA_SCORE_TANH
constexpr bool has_tanh = true;
#else
constexpr bool has_tanh = false;
#endif
#ifdef FA_SCORE_OF_PLACE
constexpr bool score_of_place = true;  // it is another for another batch, head, query or key, not of s alone
#else
constexpr bool score_of_place = false;
#endif
#ifdef FA_SCORE_SOFTCAP
// Of a score that is a number times tanh of a multiple of s: the number's size, in units of log2.
constexpr float softcap_log2 = FA_SCORE_SOFTCAP;
#else
constexpr float softcap_log2 = 0;  // it is none
#endif
#ifdef FA_TENSORS
constexpr bool has_tensors = true;
#else
constexpr bool has_tensors = false;
#endif
#ifndef FA_INTEGER
#define FA_INTEGER int64_t
#endif

// What a mask says of the pairs of a tile: whether some may be visible, and whether all must be.
struct Visible {
    bool may, must;
};

// What the queries of a tile see of its keys by all masks, the causal one too: nothing, some pairs, all of them.
enum Sees : int { sees_none = 0, sees_some = 1, sees_all = 2 };

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
template <class T> __device__ __forceinline__ T choose(bool test, T a, T b) { return test ? a : b; }
// An integer as a real number. FA_SCORE_NEAR: none of a score is 2^22 or more. Then it becomes the last bits of a float32 between 2^23 and
// 2^24: an addition each of integers and of real numbers, where the conversion is an instruction of the unit that makes exponentials.
template <class R, class I> __device__ __forceinline__ R real_of(I x) {
#ifdef FA_SCORE_NEAR
    if constexpr (sizeof(R) == 4) return __uint_as_float(0x4b400000u + uint32_t(x)) - 12582912.0f;
#endif
    return R(x);
}
// Rounded down, as Python's // and %. b is not 0: the harness has looked.
template <class T> __device__ __forceinline__ T floor_div(T a, T b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
template <class T> __device__ __forceinline__ T floor_mod(T a, T b) { return a % b + (a % b != 0 && (a < 0) != (b < 0)) * b; }

// The same words for all pairs of a tile at once, by interval arithmetic: an integer is one of [low, high], a truth value a Visible.
struct Range {
    FA_INTEGER low, high;

    __device__ __forceinline__ explicit Range(FA_INTEGER value) : low(value), high(value) {}
    __device__ __forceinline__ Range(FA_INTEGER low, FA_INTEGER high) : low(low), high(high) {}
};

__device__ __forceinline__ Visible operator&&(Visible a, Visible b) { return {a.may && b.may, a.must && b.must}; }
__device__ __forceinline__ Visible operator||(Visible a, Visible b) { return {a.may || b.may, a.must || b.must}; }
__device__ __forceinline__ Visible operator!(Visible a) { return {!a.must, !a.may}; }
__device__ __forceinline__ Visible operator<(Range a, Range b) { return {a.low < b.high, a.high < b.low}; }
__device__ __forceinline__ Visible operator>(Range a, Range b) { return b < a; }
__device__ __forceinline__ Visible operator<=(Range a, Range b) { return !(b < a); }
__device__ __forceinline__ Visible operator>=(Range a, Range b) { return !(a < b); }
__device__ __forceinline__ Visible operator==(Range a, Range b) {
    return {a.low <= b.high && b.low <= a.high, a.low == a.high && b.low == b.high && a.low == b.low};
}
__device__ __forceinline__ Visible operator!=(Range a, Range b) { return !(a == b); }
__device__ __forceinline__ Range operator-(Range a) { return {-a.high, -a.low}; }
__device__ __forceinline__ Range operator+(Range a, Range b) { return {a.low + b.low, a.high + b.high}; }
__device__ __forceinline__ Range operator-(Range a, Range b) { return {a.low - b.high, a.high - b.low}; }
__device__ __forceinline__ Range least(Range a, Range b) { return {least(a.low, b.low), least(a.high, b.high)}; }
__device__ __forceinline__ Range greatest(Range a, Range b) { return {greatest(a.low, b.low), greatest(a.high, b.high)}; }
__device__ __forceinline__ Range hull(Range a, Range b) { return {least(a.low, b.low), greatest(a.high, b.high)}; }
__device__ __forceinline__ Range operator*(Range a, Range b) {
    return hull({least(a.low * b.low, a.low * b.high), greatest(a.low * b.low, a.low * b.high)},
                {least(a.high * b.low, a.high * b.high), greatest(a.high * b.low, a.high * b.high)});
}
__device__ __forceinline__ Range magnitude(Range a) {
    const FA_INTEGER most = greatest(-a.low, a.high);
    return {a.low > 0 ? a.low : a.high < 0 ? -a.high : 0, most};
}
// b is one number: the harness takes no other divisor.
__device__ __forceinline__ Range floor_div(Range a, Range b) {
    const FA_INTEGER first = floor_div(a.low, b.low), last = floor_div(a.high, b.low);
    return {least(first, last), greatest(first, last)};
}
__device__ __forceinline__ Range floor_mod(Range a, Range b) {
    if (floor_div(a.low, b.low) == floor_div(a.high, b.low)) return {floor_mod(a.low, b.low), floor_mod(a.high, b.low)};
    return b.low > 0 ? Range(0, b.low - 1) : Range(b.low + 1, 0);
}
__device__ __forceinline__ Range choose(Visible test, Range a, Range b) { return test.must ? a : test.may ? hull(a, b) : b; }
__device__ __forceinline__ Visible choose(Visible test, Visible a, Visible b) { return (test && a) || (!test && b); }

// A named tensor. Sorted: its rows never fall.
template <int Index, bool Sorted> struct Table {
    static constexpr int index = Index;  // in fa::Args::workspace
};

// A pair of query and key by the names of the language, or with I = Range all pairs of a tile. q counts as the causal mask does,
// bottom-right: the last query is at the last key. The harness chooses an FA_INTEGER that no text of the compile exceeds.
template <class I> struct Pair {
    const Args& args;
    I b, h, q_row, k;
    I q = q_row + I(args.seq_kv - args.seq_q), h_kv = kv_head(), seq_q = I(args.seq_q), seq_kv = I(args.seq_kv);
    I batch = I(args.batch), heads_q = I(args.heads_q), heads_kv = I(args.heads_kv);

    __device__ __forceinline__ I kv_head() const { return floor_div(h, I(args.heads_q / args.heads_kv)); }

    // An element of a named tensor of rows of `size`.
    template <class T> __device__ __forceinline__ T at(int index, int64_t row, int64_t column, int64_t size) const {
        return static_cast<const T*>(args.workspace[index])[row * size + column];
    }
    template <class R, int Index, bool Sorted, class J>
    __device__ __forceinline__ R real(Table<Index, Sorted> table, J row, J column, J size) const {
        return R(at<float>(table.index, row, column, size));
    }
    template <int Index, bool Sorted, class J> __device__ __forceinline__ J integer(Table<Index, Sorted> table, J row, J column,
                                                                                    J size) const {
        return at<int32_t>(table.index, row, column, size);
    }
    template <int Index, bool Sorted>
    __device__ __forceinline__ Range integer(Table<Index, Sorted> table, Range row, Range column, Range size) const {
        if (row.low != row.high || !(Sorted || column.low == column.high)) return {-0x7fffffff, 0x7fffffff};
        return {at<int32_t>(table.index, row.low, column.low, size.low), at<int32_t>(table.index, row.low, column.high, size.low)};
    }

    __device__ __forceinline__ auto sees() const {
#ifdef FA_MASK
        return FA_MASK;
#else
        return I(0) == I(0);
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

    // The same in units of log2, from q·k, which `scale` makes s. tanh: what takes the place of tanh(slope * x) times a factor.
    template <class R, class Tanh> __device__ __forceinline__ R score_log2(R s, [[maybe_unused]] R scale,
                                                                           [[maybe_unused]] Tanh& tanh) const {
#ifdef FA_SCORE_LOG2
        return FA_SCORE_LOG2;
#else
        return s * (scale * R(1.4426950408889634));
#endif
    }

    // The derivative of score() by s, from q·k. tanh: that of score_log2, so that both have it once.
    template <class R, class Tanh>
    __device__ __forceinline__ R slope_unscaled([[maybe_unused]] R s, [[maybe_unused]] R scale, [[maybe_unused]] Tanh& tanh) const {
#ifdef FA_SCORE_SLOPE_UNSCALED
        return FA_SCORE_SLOPE_UNSCALED;
#else
        return R(1);
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

// Positions beyond the tensors are those of the last query and key where an element of a named tensor is read.
__device__ __forceinline__ formula::Pair<FA_INTEGER> pair_of(const Args& args, int batch, int head, int query, int key) {
    if constexpr (has_tensors) query = min(query, args.seq_q - 1), key = min(key, args.seq_kv - 1);
    return {args, batch, head, query, key};
}

// Whether a query does not see a key by the problem's mask, beside the causal one (visible_keys). Also of rows beyond the tensors where
// there is a mask or a score, whose text is for positions that exist.
__device__ __forceinline__ bool hidden(const Args& args, int batch, int head, int query, int key) {
    if constexpr (has_mask || has_score) return query >= args.seq_q || key >= args.seq_kv || !pair_of(args, batch, head, query, key).sees();
    else return false;
}

// What the mask says of a tile: `queries` from `query` on, and `keys` from `key` on, those that exist; of `heads` heads.
__device__ __forceinline__ Visible visible_in(const Args& args, int batch, int head, int query, int queries, int key, int keys,
                                              int heads = 1) {
    if constexpr (has_mask) {
        using formula::Range;
        return formula::Pair<Range>{args, Range(batch), Range(head, head + heads - 1), Range(query, min(query + queries, args.seq_q) - 1),
                                    Range(key, min(key + keys, args.seq_kv) - 1)}
            .sees();
    } else return {true, true};
}

// What `queries` queries from `query` on, those that exist, see of `keys` keys from `key` on: Sees.
__device__ __forceinline__ int sees_of(const Args& args, int batch, int head, int query, int queries, int key, int keys) {
    const int end = min(query + queries, args.seq_q);
    if (query >= end || key >= visible_keys(args, end - 1)) return sees_none;
    const Visible visible = visible_in(args, batch, head, query, queries, key, keys);
    return !visible.may ? sees_none : visible.must && key + keys <= visible_keys(args, query) ? sees_all : sees_some;
}

// The first tile of Keys keys, from that of `key` on, of which some query of a tile may see a key; `end` or beyond where there is none.
template <int Keys>
__device__ __forceinline__ int next_keys(const Args& args, int batch, int head, int query, int queries, int key, int end) {
    if constexpr (has_mask)
        while (key < end && !visible_in(args, batch, head, query, queries, key, Keys).may) key += Keys;
    return key;
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
