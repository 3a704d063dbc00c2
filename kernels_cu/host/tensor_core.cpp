// The arithmetic of a tensor core, bit for bit, as MMA-Sim found it by experiments on the hardware (Xie et al., arXiv 2511.10909, sections
// IV and V) and as an H200's answers confirm (tests/device/golden_h200.npz). It is no chain of fused multiply-adds. The products of one
// element of D and its accumulator are aligned to the largest exponent among them, cut off (towards zero) some bits behind the point
// there, added exactly, and the sum is cut off to float32:
//
//   sm_90 and later   25 bits behind the point; the 16 (tf32: 8) products of one mma.sync at once
//   sm_80 to sm_89    24 bits; the first half of them, then the second onto the float32 of the first
//   wgmma of 8 bits   13 bits; its 32 products at once, and of the sum too 13 bits behind the point are kept
//   mma.sync of 8 bits on sm_90: ptxas widens to float16, multiplies elements 4 i and 4 i + 1 of K, then the others onto their sum, and
//                     adds C with an addition of float32
//
// The exponent of a product is the sum of its factors' exponents, whatever the product of their mantissas carries. A zero has none: it
// does not hold the others up (MMA-Sim gives it 2^-126's, at which an H200's sums of products below 2^-130 come out otherwise). Any NaN,
// or infinities of both signs, give NaN 0x7fffffff.
#include <fa/collective.cuh>
#include <fa/float8.cuh>
#include <fa/tensor_core.cuh>

namespace {

using namespace fa;
using namespace fa::host;

// The elements in the lower halves of some words, widened; exact. Infinities and NaN stay such.
template <class T> struct Widen;
template <> struct Widen<float16> {
    static __forceinline__ Floats of(Words bits) {
        const Words size = bits & 0x7fff, sign = (bits & 0x8000) << 16;
        const Floats small = (Floats)((size << 13) + 0x38800000u) - 0x1p-14f;
        const Words normal = (size << 13) + (size >= 0x7c00 ? Words{} + 0x70000000u : Words{} + 0x38000000u);
        return (Floats)((size < 0x400 ? (Words)small : normal) | sign);
    }
};
template <> struct Widen<bfloat16> {
    static __forceinline__ Floats of(Words bits) { return (Floats)(bits << 16); }
};

template <> struct Widen<float8_e4m3> {
    static __forceinline__ Floats of(Words bits) {
        const Words size = bits & 0x7f, sign = (bits & 0x80) << 24;
        const Floats small = (Floats)((size << 20) + 0x3c800000u) - 0x1p-6f;
        const Words normal = size == 0x7f ? Words{} + 0x7fffffffu : (size << 20) + 0x3c000000u;
        return (Floats)((size < 8 ? (Words)small : normal) | sign);
    }
};
template <> struct Widen<float8_e5m2> {
    static __forceinline__ Floats of(Words bits) { return Widen<float16>::of(bits << 8); }
};

typedef int32_t Ints __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(128)));
typedef int64_t Longs __attribute__((vector_size(128)));

// What an instruction keeps behind the point: of the aligned terms, and of the sum.
struct Bits {
    int terms, sum;
};
constexpr Bits bits_of_float32{FA_HOST_SM >= 90 ? 25 : 24, 23}, bits_of_wgmma_8{13, 13};
constexpr int sums_per_mma = FA_HOST_SM >= 90 ? 1 : 2;
constexpr int of_zero = -400;  // below any exponent of a product
constexpr int by_definition = 1000;  // the exponent given to what a vector of float32 does not hold: larger than any sum of two others

// The exponent of the smallest normal number, which subnormal ones have too.
template <class T> constexpr int least_exponent = -126;
template <> constexpr int least_exponent<float16> = -14;
template <> constexpr int least_exponent<float8_e4m3> = -6;
template <> constexpr int least_exponent<float8_e5m2> = -14;

// Exponents of some operands of type T that are widened to float32.
template <class T> __forceinline__ Ints exponents(Floats x) {
    const Ints biased = (Ints)((Words)x >> 23 & 0xff), size = (Ints)((Words)x & 0x7fffffffu);
    const Ints odd = biased == 0xff | (biased == 0 & size != 0);  // infinities, NaN, and float32's subnormals, which this thread flushes
    const Ints least = Ints{} + (127 + least_exponent<T>);
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
    const int biased = bits >> 23 & 0xff, least = bits << 1 ? 127 + least_exponent<T> : 1;
    int exponent = biased ? biased : 1;
    double mantissa = biased ? fraction | 0x800000 : fraction;
    for (; exponent < least; ++exponent) mantissa *= 0.5;
    return {bits >> 31 ? -mantissa : mantissa, exponent - 127, biased == 0xff && fraction, biased == 0xff && !fraction};
}

// One element by the definition, at any exponents: n products a[i] * b[i] and the accumulator c.
template <class T, Bits KEPT> inline float fused_sum_of_one(int n, const float* a, const float* b, float c) {
    Number terms[33] = {number<float>(c)};
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
    for (int i = 0; i <= n; ++i) sum += __builtin_trunc(__builtin_ldexp(terms[i].mantissa, KEPT.terms + terms[i].exponent - largest));
    int exponent;
    __builtin_frexp(sum, &exponent);  // |sum| < 2^exponent
    exponent += largest - KEPT.terms - 1;
    if (exponent > 127) return __uint_as_float(sum < 0 ? 0xff800000u : 0x7f800000u);
    const int last = (exponent < -126 ? -126 : exponent) - KEPT.sum;
    const uint32_t fraction = uint32_t(__builtin_trunc(__builtin_ldexp(sum < 0 ? -sum : sum, largest - KEPT.terms - last)))
                              << (23 - KEPT.sum);
    const uint32_t bits = fraction < 0x800000 ? fraction : (fraction & 0x7fffff) | uint32_t(exponent + 127) << 23;
    return __uint_as_float(bits | (sum < 0 ? 0x80000000u : 0));
}

__forceinline__ bool any(Ints lanes) {
    uint64_t words[8], all = 0;
    __builtin_memcpy(words, &lanes, 64);
    for (const uint64_t each : words) all |= each;
    return all != 0;
}

// Those of 16 elements that fused_sum cannot give: where float32 does not hold the products or the scale. Rare.
template <class T, Bits KEPT, int N>
__attribute__((noinline, cold)) void odd_sums(Floats& d, Ints odd, Ints largest, const Floats* a, const float* b, Floats c) {
    Words bits = (Words)c << 1;
    for (int i = 0; i < N; ++i) bits |= (Words)a[i] << 1 & (__float_as_uint(b[i]) << 1 ? ~0u : 0u);
    for (int lane = 0; lane < 16; ++lane) {
        if (!odd[lane]) continue;
        float one[N];
        for (int i = 0; i < N; ++i) one[i] = a[i][lane];
        d[lane] = bits[lane] || largest[lane] > 124 ? fused_sum_of_one<T, KEPT>(N, one, b, c[lane]) : 0.0f;
    }
}

// 16 elements at once: N products of a vector and a number each, and the accumulators c. largest: the exponents they are aligned to.
template <Bits KEPT, int N>
__attribute__((noinline)) Floats fused_sum(const Floats* a, const Ints* a_exponent, const float* b, const int* b_exponent, Floats c,
                                           Ints& largest) {
    largest = exponents<float>(c);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        const Ints exponent = a_exponent[i] + b_exponent[i];
        largest = largest < exponent ? exponent : largest;
    }
    // Numbers scale to less than 2^27 (a product of two mantissas is below 4), and eight of them fit 32 bits; c scales to 2^26. With 13
    // bits kept they scale to 2^15, and any number here fits.
    static_assert(N <= 16 || KEPT.terms < 16);
    const Floats scale = (Floats)(Words)((KEPT.terms + 127 - largest) << 23);
    Ints low = __builtin_convertvector(c * scale, Ints), high{};
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) (i < N / 2 ? high : low) += __builtin_convertvector(a[i] * b[i] * scale, Ints);
    const Doubles sum = __builtin_convertvector(low, Doubles) + __builtin_convertvector(high, Doubles);
    const Doubles cut = (Doubles)((Longs)sum & ~((int64_t(1) << (52 - KEPT.sum)) - 1));  // of a double's 52 bits behind the point
    const Longs unit = __builtin_convertvector(largest + (1023 - KEPT.terms), Longs) << 52;
    return __builtin_convertvector(cut * (Doubles)unit, Floats);
}

// c + a b for 16 elements of D, in sums of N products.
template <class T, int K, Bits KEPT = bits_of_float32, int N = K / sums_per_mma>
__forceinline__ Floats tensor_core(const Floats* a, const Ints* a_exponent, const float* b, const int* b_exponent, Floats c) {
    for (int i = 0; i < K; i += N) {
        Ints largest;
        Floats d = fused_sum<KEPT, N>(a + i, a_exponent + i, b + i, b_exponent + i, c, largest);
        const Ints odd = largest > 124 | largest < -100;
        if (any(odd)) [[unlikely]]
            odd_sums<T, KEPT, N>(d, odd, largest, a + i, b + i, c);
        c = d;
    }
    return c;
}

// D's 16 rows lie in the lanes of a vector, so that a is one and an element of b a number: [column][k].
template <class T, int K> __forceinline__ void mma_all(Collective& all, const Floats (&a)[K], const float (&b)[8][K]) {
    Ints a_exponent[K];
    int b_exponent[8][K];
    for (int k = 0; k < K; ++k) a_exponent[k] = exponents<T>(a[k]);
    for (int i = 0; i < 8 * K; i += 16) {
        Floats some;
        __builtin_memcpy(&some, &b[0][0] + i, 64);
        const Ints exponent = exponents<T>(some);
        __builtin_memcpy(&b_exponent[0][0] + i, &exponent, 64);
    }
    for (int j = 0; j < 8; ++j) all.d[j] = tensor_core<T, K>(a, a_exponent, b[j], b_exponent[j], all.d[j]);
}

template <class T> void mma_pairs(void* const* lanes) {
    auto& all = *static_cast<Collective*>(lanes[0]);
    Floats a[16];
    float b[8][16];
    for (int k = 0; k < 8; ++k) a[2 * k] = Widen<T>::of(all.a[k] & 0xffff), a[2 * k + 1] = Widen<T>::of(all.a[k] >> 16);
    for (int i = 0; i < 4; ++i) {
        Words pairs;
        __builtin_memcpy(&pairs, all.b[2 * i], 64);
        const Floats first = Widen<T>::of(pairs & 0xffff), second = Widen<T>::of(pairs >> 16);
        for (int lane = 0; lane < 16; ++lane) {
            const int k = 2 * (2 * i + lane / 8);
            b[lane % 8][k] = first[lane], b[lane % 8][k + 1] = second[lane];
        }
    }
    mma_all<T>(all, a, b);
}

// The 13 lowest bits of a float are ignored.
void mma_tf32(void* const* lanes) {
    auto& all = *static_cast<Collective*>(lanes[0]);
    Floats a[8];
    float b[8][8];
    for (int k = 0; k < 8; ++k) {
        a[k] = (Floats)(all.a[k] & 0xffffe000u);
        for (int j = 0; j < 8; ++j) b[j][k] = __uint_as_float(all.b[k][j] & 0xffffe000u);
    }
    mma_all<float>(all, a, b);
}

// C + a product of 8 bits in float32, rounded to nearest. C may be subnormal, which this thread flushes and FADD does not. A product that is
// not 0 is so much larger that it makes no difference.
Floats add_product(Floats c, Floats product) {
    const Floats sum = c + product;
    const Words bits = ((Words)product << 1) == 0 & ((Words)c << 1) != 0 ? (Words)c : (Words)sum;
    return (Floats)(sum != sum ? Words{} + 0x7fffffffu : bits);
}

// Each register of a fragment is two of float16's: of its lower and of its upper half.
template <class T> void mma_bytes(void* const* lanes) {
    auto& all = *static_cast<Collective*>(lanes[0]);
    Floats c[8];
    for (int j = 0; j < 8; ++j) c[j] = all.d[j], all.d[j] = Floats{};
    for (int upper = 0; upper < 2; ++upper) {
        Floats a[16];
        float b[8][16];
        for (int k = 0; k < 16; ++k) {
            const int shift = 16 * upper + k % 2 * 8;
            a[k] = Widen<T>::of(all.a[k / 2] >> shift & 0xff);
            Words bits{};
            for (int j = 0; j < 8; ++j) bits[j] = all.b[k / 2][j] >> shift & 0xff;
            const Floats wide = Widen<T>::of(bits);
            for (int j = 0; j < 8; ++j) b[j][k] = wide[j];
        }
        mma_all<float16>(all, a, b);
    }
    for (int j = 0; j < 8; ++j) all.d[j] = add_product(c[j], all.d[j]);
}

template <class T> __forceinline__ void widen_fragment(Floats (&rows)[16], const uint64_t (&chunks)[64]) {
    for (int i = 0; i < 16; ++i) {
        uint16_t bits[16];
        __builtin_memcpy(bits, &chunks[4 * i], 32);
        Words words;
        for (int j = 0; j < 16; ++j) words[j] = bits[j];
        rows[i] = Widen<T>::of(words);
    }
}

template <class T, bool B_BY_COLUMNS> void wmma_product(void* const* lanes) {
    auto& all = *static_cast<Collective*>(lanes[0]);
    Floats a[16], b[16], d[16];
    widen_fragment<T>(a, all.wmma_a);
    widen_fragment<T>(b, all.wmma_b);
    if constexpr (B_BY_COLUMNS) {
        Floats columns[16];
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 16; ++j) columns[k][j] = b[j][k];
        for (int k = 0; k < 16; ++k) b[k] = columns[k];
    }
    __builtin_memcpy(d, all.wmma_d, sizeof d);
    Ints b_exponent[16];
    for (int k = 0; k < 16; ++k) b_exponent[k] = exponents<T>(b[k]);
    for (int i = 0; i < 16; ++i) {  // D's columns lie in the lanes of a vector here: b is one, an element of a is a number
        const Ints a_exponent = exponents<T>(a[i]);
        d[i] = tensor_core<T, 16>(b, b_exponent, (const float*)&a[i], (const int*)&a_exponent, d[i]);
    }
    __builtin_memcpy(all.wmma_d, d, sizeof d);
}

// Operands: E, unsigned of an element's bits; a step of K is 32 bytes of them.
template <class T, Bits KEPT, class E, int K = 32 / sizeof(E)>
void multiply_warpgroup(float* d, const uint16_t* a_bytes, const uint16_t* b_bytes, int columns) {
    auto *a = reinterpret_cast<const E*>(a_bytes), *b = reinterpret_cast<const E*>(b_bytes);
    float b_wide[256][K];
    int b_exponent[256][K];
    auto widened = [](const E* from, int stride) {
        Words bits;
        for (int i = 0; i < 16; ++i) bits[i] = from[i * stride];
        return Widen<T>::of(bits);
    };
    for (int n = 0; n < columns; ++n)
        for (int k = 0; k < K; k += 16) {
            const Floats row = widened(b + K * n + k, 1);
            const Ints exponent = exponents<T>(row);
            __builtin_memcpy(&b_wide[n][k], &row, 64);
            __builtin_memcpy(&b_exponent[n][k], &exponent, 64);
        }
    for (int warp = 0; warp < 4; ++warp) {
        Floats column[K];
        Ints exponent[K];
        for (int k = 0; k < K; ++k) column[k] = widened(a + 16 * K * warp + k, K), exponent[k] = exponents<T>(column[k]);
        for (int n = 0; n < columns; ++n) {
            float* to = d + 16 * (256 * warp + n);
            Floats sums;
            __builtin_memcpy(&sums, to, 64);
            if constexpr (K == 32) sums = tensor_core<T, K, KEPT, K>(column, exponent, b_wide[n], b_exponent[n], sums);
            else sums = tensor_core<T, K, KEPT>(column, exponent, b_wide[n], b_exponent[n], sums);
            __builtin_memcpy(to, &sums, 64);
        }
    }
}

}  // namespace

extern "C" {

void FA_HOST_PRODUCT(mma_f16)(void* const* lanes, unsigned) { mma_pairs<float16>(lanes); }
void FA_HOST_PRODUCT(mma_bf16)(void* const* lanes, unsigned) { mma_pairs<bfloat16>(lanes); }
void FA_HOST_PRODUCT(mma_tf32)(void* const* lanes, unsigned) { mma_tf32(lanes); }
void FA_HOST_PRODUCT(mma_e4m3)(void* const* lanes, unsigned) { mma_bytes<float8_e4m3>(lanes); }
void FA_HOST_PRODUCT(mma_e5m2)(void* const* lanes, unsigned) { mma_bytes<float8_e5m2>(lanes); }
void FA_HOST_PRODUCT(wmma_row_f16)(void* const* lanes, unsigned) { wmma_product<float16, false>(lanes); }
void FA_HOST_PRODUCT(wmma_row_bf16)(void* const* lanes, unsigned) { wmma_product<bfloat16, false>(lanes); }
void FA_HOST_PRODUCT(wmma_col_f16)(void* const* lanes, unsigned) { wmma_product<float16, true>(lanes); }
void FA_HOST_PRODUCT(wmma_col_bf16)(void* const* lanes, unsigned) { wmma_product<bfloat16, true>(lanes); }
void FA_HOST_PRODUCT(wgmma_f16)(float* d, const unsigned short* a, const unsigned short* b, int columns) {
    multiply_warpgroup<float16, bits_of_float32, uint16_t>(d, a, b, columns);
}
void FA_HOST_PRODUCT(wgmma_bf16)(float* d, const unsigned short* a, const unsigned short* b, int columns) {
    multiply_warpgroup<bfloat16, bits_of_float32, uint16_t>(d, a, b, columns);
}
void FA_HOST_PRODUCT(wgmma_e4m3)(float* d, const unsigned short* a, const unsigned short* b, int columns) {
    multiply_warpgroup<float8_e4m3, bits_of_wgmma_8, uint8_t>(d, a, b, columns);
}
void FA_HOST_PRODUCT(wgmma_e5m2)(float* d, const unsigned short* a, const unsigned short* b, int columns) {
    multiply_warpgroup<float8_e5m2, bits_of_wgmma_8, uint8_t>(d, a, b, columns);
}

}  // extern "C"
