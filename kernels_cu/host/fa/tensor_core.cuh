// The arithmetic of a tensor core, bit for bit, as MMA-Sim found it by experiments on the hardware (Xie et al., arXiv 2511.10909, sections
// IV and V) and as an H200's answers confirm (tests/device/golden_h200.npz). It is no chain of fused multiply-adds. The products of one
// element of D and its accumulator are aligned to the largest exponent among them, cut off (towards zero) some bits behind the point
// there, added exactly, and the sum is cut off to float32:
//
//   sm_90 and later   25 bits behind the point; the 16 (tf32: 8) products of one mma.sync at once
//   sm_80 to sm_89    24 bits; the first half of them, then the second onto the float32 of the first
//
// The exponent of a product is the sum of its factors' exponents, whatever the product of their mantissas carries. A zero has none: it
// does not hold the others up (MMA-Sim gives it 2^-126's, at which an H200's sums of products below 2^-130 come out otherwise). Any NaN,
// or infinities of both signs, give NaN 0x7fffffff.
#pragma once

#include <fa/collective.cuh>

#ifndef FA_HOST_SM
#define FA_HOST_SM 90
#endif

namespace fa {

namespace host {

typedef int32_t Ints __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(128)));
typedef int64_t Longs __attribute__((vector_size(128)));

constexpr int kept_bits = FA_HOST_SM >= 90 ? 25 : 24;
constexpr int sums_per_mma = FA_HOST_SM >= 90 ? 1 : 2;
constexpr int of_zero = -400;  // below any exponent of a product
constexpr int by_definition = 1000;  // the exponent given to what a vector of float32 does not hold: larger than any sum of two others

// Exponents of some operands of type T that are widened to float32. A subnormal float16 has the smallest normal one's.
template <class T> __forceinline__ Ints exponents(Floats x) {
    constexpr bool narrow = __is_same(T, float16);
    const Ints biased = (Ints)((Words)x >> 23 & 0xff), size = (Ints)((Words)x & 0x7fffffffu);
    const Ints odd = biased == 0xff | (biased == 0 & size != 0);  // infinities, NaN, and float32's subnormals, which this thread flushes
    const Ints least = narrow ? Ints{} + (127 - 14) : Ints{} + 1;
    const Ints exponent = size == 0 ? Ints{} + of_zero : (biased < least ? least : biased) - 127;
    return odd ? Ints{} + by_definition : exponent;
}

struct Number {  // mantissa * 2^(exponent - 23); not flushed where it is subnormal
    double mantissa;
    int exponent;
    bool nan, infinite;
};
template <class T> inline Number number(float x) {
    const uint32_t bits = __float_as_uint(x), fraction = bits & 0x7fffff;
    const int biased = bits >> 23 & 0xff, least = __is_same(T, float16) && bits << 1 ? 127 - 14 : 1;
    int exponent = biased ? biased : 1;
    double mantissa = biased ? fraction | 0x800000 : fraction;
    for (; exponent < least; ++exponent) mantissa *= 0.5;
    return {bits >> 31 ? -mantissa : mantissa, exponent - 127, biased == 0xff && fraction, biased == 0xff && !fraction};
}

// One element by the definition, at any exponents: n products a[i] * b[i] and the accumulator c.
template <class T> inline float fused_sum_of_one(int n, const float* a, const float* b, float c) {
    Number terms[17] = {number<float>(c)};
    bool nan = terms[0].nan, infinite[2] = {};
    if (terms[0].infinite) infinite[c < 0] = true;
    int largest = terms[0].mantissa ? terms[0].exponent : of_zero;
    terms[0].mantissa *= 0x1p-23;
    for (int i = 0; i < n; ++i) {
        const Number x = number<T>(a[i]), y = number<T>(b[i]);
        nan |= x.nan | y.nan | (x.infinite & (y.mantissa == 0)) | (y.infinite & (x.mantissa == 0));
        if (x.infinite | y.infinite) infinite[x.mantissa * y.mantissa < 0] = true;
        terms[1 + i] = {x.mantissa * y.mantissa * 0x1p-46, x.exponent + y.exponent, false, false};
        if (terms[1 + i].mantissa && largest < terms[1 + i].exponent) largest = terms[1 + i].exponent;
    }
    if (nan | (infinite[0] & infinite[1])) return __uint_as_float(0x7fffffffu);
    if (infinite[0] | infinite[1]) return __uint_as_float(infinite[1] ? 0xff800000u : 0x7f800000u);
    double sum = 0;
    for (int i = 0; i <= n; ++i) sum += __builtin_trunc(__builtin_ldexp(terms[i].mantissa, kept_bits + terms[i].exponent - largest));
    int exponent;
    __builtin_frexp(sum, &exponent);  // |sum| < 2^exponent
    exponent += largest - kept_bits - 1;
    if (exponent > 127) return __uint_as_float(sum < 0 ? 0xff800000u : 0x7f800000u);
    const int last = (exponent < -126 ? -126 : exponent) - 23;
    const uint32_t fraction = uint32_t(__builtin_trunc(__builtin_ldexp(sum < 0 ? -sum : sum, largest - kept_bits - last)));
    const uint32_t bits = fraction < 0x800000 ? fraction : (fraction & 0x7fffff) | uint32_t(exponent + 127) << 23;
    return __uint_as_float(bits | (sum < 0 ? 0x80000000u : 0));
}

__forceinline__ bool any(Ints lanes) {
    uint64_t words[8], all = 0;
    __builtin_memcpy(words, &lanes, 64);
    for (const uint64_t each : words) all |= each;
    return all != 0;
}

// 16 elements at once: N products of a vector and a number each, and the accumulators c.
template <class T, int N>
__forceinline__ Floats fused_sum(const Floats* a, const Ints* a_exponent, const float* b, const int* b_exponent, Floats c) {
    Ints largest = exponents<float>(c);
    for (int i = 0; i < N; ++i) {
        const Ints exponent = a_exponent[i] + b_exponent[i];
        largest = largest < exponent ? exponent : largest;
    }
    // Numbers scale to less than 2^27 (a product of two mantissas is below 4), and eight of them fit 32 bits; c scales to 2^26.
    const Floats scale = (Floats)(Words)((kept_bits + 127 - largest) << 23);
    Ints low = __builtin_convertvector(c * scale, Ints), high{};
    for (int i = 0; i < N; ++i) (i < N / 2 ? high : low) += __builtin_convertvector(a[i] * b[i] * scale, Ints);
    const Doubles sum = __builtin_convertvector(low, Doubles) + __builtin_convertvector(high, Doubles);
    const Doubles cut = (Doubles)((Longs)sum & ~((int64_t(1) << 29) - 1));  // 24 of a double's 53 bits
    const Longs unit = __builtin_convertvector(largest + (1023 - kept_bits), Longs) << 52;
    Floats d = __builtin_convertvector(cut * (Doubles)unit, Floats);

    const Ints odd = largest > 124 | largest < -100;  // where float32 does not hold the products or the scale
    if (!any(odd)) [[likely]]
        return d;
    Words bits = (Words)c << 1;
    for (int i = 0; i < N; ++i) bits |= (Words)a[i] << 1 & (__float_as_uint(b[i]) << 1 ? ~0u : 0u);
    for (int lane = 0; lane < 16; ++lane) {
        if (!odd[lane]) continue;
        float one[N];
        for (int i = 0; i < N; ++i) one[i] = a[i][lane];
        d[lane] = bits[lane] || largest[lane] > 124 ? fused_sum_of_one<T>(N, one, b, c[lane]) : 0.0f;
    }
    return d;
}

// c + a b for 16 elements of D, as one mma.sync computes it.
template <class T, int K>
__forceinline__ Floats tensor_core(const Floats* a, const Ints* a_exponent, const float* b, const int* b_exponent, Floats c) {
    constexpr int n = K / sums_per_mma;
    for (int i = 0; i < K; i += n) c = fused_sum<T, n>(a + i, a_exponent + i, b + i, b_exponent + i, c);
    return c;
}

}  // namespace host

}  // namespace fa
