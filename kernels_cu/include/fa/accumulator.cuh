// What happens to the accumulators of wgmma (fa/wgmma.cuh) between two products: scores become probabilities, probabilities an operand.
//
// A thread holds x[4 j + 2 half + e]: row 16 warp + lane / 4 + 8 half, column 8 j + 2 (lane % 4) + e of 64 x 2 R. So a thread has parts of
// two rows (half = 0, 1), and the four lanes of a quad have a row between them.
#pragma once

#include <fa/fragment.cuh>
#include <fa/score.cuh>
#include <fa/wgmma.cuh>

namespace fa {

// N accumulators from the one of number First on: those of 2 N columns.
template <int N, int First, int R> __device__ __forceinline__ auto part_of(float (&x)[R]) -> float (&)[N] {
    static_assert(First + N <= R, "part of the accumulators");
    return reinterpret_cast<float (&)[N]>(x[First]);
}

// Scores of the columns from `visible[half]` on become `hidden`. `visible` may be negative or beyond the tile. Of the columns 8 j + e a thread
// sees those with j < count: bits of a word, which become predicates eight at a time. A comparison each would be one instruction a score.
template <int R>
__device__ __forceinline__ void mask_columns(float (&x)[R], const int (&visible)[2], float hidden = -infinity()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = max(0, visible[half] - fragment_column());
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t seen = uint32_t((1ull << min(32, (mine + 7 - e) / 8)) - 1);
#pragma unroll
            for (int j = 0; j < R / 4; ++j)
                if (!(seen >> j & 1)) x[4 * j + 2 * half + e] = hidden;
        }
    }
}
// The same for the columns outside of [first[half], end[half]).
template <int R> __device__ __forceinline__ void keep_columns(float (&x)[R], const int (&first)[2], const int (&end)[2], float hidden) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int before = max(0, first[half] - fragment_column()), mine = max(0, end[half] - fragment_column());
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t seen = uint32_t((1ull << min(32, (mine + 7 - e) / 8)) - (1ull << min(32, (before + 7 - e) / 8)));
#pragma unroll
            for (int j = 0; j < R / 4; ++j)
                if (!(seen >> j & 1)) x[4 * j + 2 * half + e] = hidden;
        }
    }
}

// The same for a tile of keys from k_first on and the queries `row` and row + 8: keys that a query does not see.
template <int R> __device__ __forceinline__ void mask_scores(float (&x)[R], const Args& args, int row, int k_first) {
    const int visible[2] = {visible_keys(args, row) - k_first, visible_keys(args, row + 8) - k_first};
    mask_columns(x, visible);
}

// factor * tanh(slope * x) for scores in registers; factor and slope are the same for all. Where |slope * x| is at most `end`, a polynomial
// is right (2e-7 relative; more would be the error of all scores that are alike, and so of their logsumexp): four multiply-adds, no branch.
// Another term would be right to 0.4, and costs a softcap a tenth of its instructions. Whether all of a thread's are is known from the largest square and slope, as integers: one instruction
// compares two squares with the largest. The polynomial has powers of the slope, which must not be so small that they vanish beside those of
// x, nor overflow. WholeTanh is right for every x (8e-7).
struct QuickTanh {
    static constexpr float end = 0.22f, at_end = 0.2165f;             // at_end: tanh of the end
    static constexpr float flattest = 0x1p-24f, steep = 0x1p22f;  // the least slope, and the largest
    int largest = 0, steepest = 0;  // bits of x² and |slope|, which are in the order of these numbers; those of a NaN are the largest

    static __device__ __forceinline__ float near(float slope, float x, float factor) {
        const float first = factor * slope, square = slope * slope, third = first * square, fifth = third * square, x2 = x * x;
        return x * (first * 0.99999982f + x2 * (third * -0.33326423f + x2 * (fifth * 0.12950106f)));
    }
    __device__ __forceinline__ float operator()(float slope, float x, float factor) {
        largest = max(largest, __float_as_int(x * x)), steepest = larger(steepest, slope);
        return near(slope, x, factor);
    }
    // As the compiler leaves it out where it is the same slope again.
    static __device__ __forceinline__ int larger(int steepest, float slope) {
        const int its = __float_as_int(fabsf(slope));
        return its == steepest ? its : max(steepest, its);
    }
    __device__ __forceinline__ bool far() const {
        const float slope = __int_as_float(steepest);
        return !(__int_as_float(largest) * slope * slope <= end * end && (largest == 0 || slope >= flattest) && slope <= steep);
    }
};
// Only asks whether any was: the largest, for what QuickTanh computes would be kept in registers.
struct FarTanh {
    float largest = 0;
    int steepest = 0;

    __device__ __forceinline__ float operator()(float slope, float x, float factor) {
        largest = fmaxf(largest, fabsf(x)), steepest = QuickTanh::larger(steepest, slope);
        return QuickTanh::near(slope, x, factor);  // another tanh may be of it
    }
    __device__ __forceinline__ bool far() const {
        const float slope = __int_as_float(steepest);  // 0: there was no tanh
        return beyond(QuickTanh::end) || (slope > 0 && slope < QuickTanh::flattest) || slope > QuickTanh::steep;
    }
    __device__ __forceinline__ bool beyond(float end) const { return largest * __int_as_float(steepest) > end; }
};
// Right where |slope * x| is at most `end`, for twice the quick one's instructions, and of every slope: it has powers of slope * x alone. Its
// error there, 1.7e-7 relative, is that of float32: a larger one would be that of all scores that are alike, and so of their logsumexp.
struct MiddleTanh {
    static constexpr float end = 1;
    int largest = 0;  // bits of (slope * x)²

    __device__ __forceinline__ bool far() const { return !(__int_as_float(largest) <= end * end); }
    __device__ __forceinline__ float operator()(float slope, float x, float factor) {
        const float y = slope * x, y2 = y * y;
        largest = max(largest, __float_as_int(y2));
        const float ninth = factor * 0.020289946f + y2 * (factor * -0.006203347f + y2 * (factor * 0.001041011f));
        const float fifth = factor * 0.13325204f + y2 * (factor * -0.053457014f + y2 * ninth);
        return y * (factor * 0.99999994f + y2 * (factor * -0.3333284f + y2 * fifth));
    }
};
struct WholeTanh {
    __device__ __forceinline__ float operator()(float slope, float x, float factor) const {
        const float y = slope * x, tanh = 1.0f - 2.0f * rcp_approx(exp2_approx(2 * log2e * fabsf(y)) + 1.0f);
        return fabsf(y) > QuickTanh::end ? (y < 0 ? -tanh : tanh) * factor : QuickTanh::near(1.0f, y, factor);
    }
};

// The pair of the i-th score of a thread in a tile of keys from k_first on and the queries `row` and row + 8.
__device__ __forceinline__ auto pair_of_score(const Args& args, int batch, int head, int row, int k_first, int i) {
    return pair_of(args, batch, head, row + i / 2 % 2 * 8, k_first + fragment_column() + i / 4 * 8 + i % 2);
}

// Which tanh is right for all scores of a warp.
enum Reach : int { reach_quick, reach_middle, reach_whole };

// q·k becomes the problem's score, in units of log2; `scale` is the softmax's. Of the queries `row` and row + 8, and the keys from k_first
// on. Which tanh it took.
template <int R>
__device__ __forceinline__ Reach apply_score(float (&x)[R], const Args& args, int batch, int head, int row, int k_first, float scale) {
    const auto score = [&](int i, auto& tanh) { return pair_of_score(args, batch, head, row, k_first, i).score_log2(x[i], scale, tanh); };
    const auto all = [&](auto tanh, int at_once) {
#pragma unroll
        for (int i = 0; i < R; ++i) {
            if (i % at_once == 0) schedule_fence();  // not all at once: they would spill
            x[i] = score(i, tanh);
        }
    };
    FarTanh asked;
#pragma unroll
    for (int i = 0; i < R; ++i) score(i, asked);
    Reach reach = reach_quick;
    if (has_tanh && __any_sync(full_warp, asked.far()))
        reach = __any_sync(full_warp, asked.beyond(MiddleTanh::end)) ? reach_whole : reach_middle;
    if (reach == reach_quick) all(QuickTanh(), 8);
    else if (reach == reach_middle) all(MiddleTanh(), 8);
    else all(WholeTanh(), 8);
    return reach;
}

// S, which is q·k, becomes P = 2^(score - reference), and `sum` the sum of P over this thread's columns: apply_score and exponentiate in one,
// with a Tanh that is not asked before. True where one was beyond its range: then P is wrong. The scores of Ahead elements are computed
// under the exponentials of the Ahead before them, which another unit makes. Later: those are summed under the exponentials behind them.
// Referred: false of a softcap whose P is 2^score.
template <int Ahead = 8, bool Later = false, bool Referred = true, class Tanh = QuickTanh, int R>
__device__ __forceinline__ bool exponentiate_scores(float (&x)[R], float (&sum)[2], const Args& args, int batch, int head, int row,
                                                    int k_first, float scale, const float (&reference)[2]) {
    Tanh tanh;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int first = -(1 + Later) * Ahead; first < R; first += Ahead) {
        schedule_fence();
#pragma unroll
        for (int i = first; i < first + Ahead; ++i) {
            const int e = i + Later * Ahead, s = e + Ahead;  // the exponential and the score that are computed beside this sum
            if (s < R)
                x[s] = pair_of_score(args, batch, head, row, k_first, s).score_log2(x[s], scale, tanh) -
                       (Referred ? reference[s / 2 % 2] : 0.0f);
            if (e >= 0 && e < R) x[e] = exp2_approx(x[e]);
            if (i >= 0 && i < R) sum[i / 2 % 2] += x[i];
        }
    }
    return tanh.far();
}

// Scores of pairs that the problem's mask hides become -inf. Of the same queries and keys. Bits as in mask_columns: a loop that asks four
// at a time needs few registers.
template <int R>
__device__ __forceinline__ void hide_scores(float (&x)[R], const Args& args, int batch, int head, int row, int k_first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = k_first + fragment_column() + i % 2;
        uint32_t seen = 0;
#pragma unroll 4
        for (int j = 0; j < R / 4; ++j) seen |= uint32_t(pair_of(args, batch, head, row + i / 2 * 8, key + 8 * j).sees()) << j;
#pragma unroll
        for (int j = 0; j < R / 4; ++j)
            if (!(seen >> j & 1)) x[4 * j + i] = -infinity();
    }
}

// The rows are multiplied by their factor.
template <int R> __device__ __forceinline__ void scale_rows(float (&x)[R], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] *= factor[i / 2 % 2];
}

// Scores take the sign of the scale, where it was not in Q: the largest of them is the largest logit then. For a scale of 0 they are 0.
template <int R> __device__ __forceinline__ void apply_sign(float (&x)[R], double scale) {
    const float sign = scale < 0 ? -1.0f : 0.0f;
    if (scale <= 0) scale_rows(x, {sign, sign});
}

// The maximum of each row over this thread's columns.
template <int R> __device__ __forceinline__ void local_row_max(float (&maximum)[2], const float (&x)[R]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        maximum[half] = max(x[2 * half], x[2 * half + 1]);
#pragma unroll
        for (int j = 1; j < R / 4; ++j) maximum[half] = max(maximum[half], max(x[4 * j + 2 * half], x[4 * j + 2 * half + 1]));
    }
}

// S becomes P = 2^(scale S - reference), and `sum` the sum of P over this thread's columns: a multiply-add, an exp2 and an add a score.
template <int R>
__device__ __forceinline__ void exponentiate(float (&x)[R], float (&sum)[2], float scale_log2e, const float (&reference)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float s = 0;
#pragma unroll
        for (int j = 0; j < R / 4; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = x[4 * j + 2 * half + e];
                score = exp2_approx(score * scale_log2e - reference[half]);
                s += score;
            }
        sum[half] = s;
    }
}

// The row maxima of the first tile as references. 0 for a row that sees no key, so that no difference is NaN; Later: it may see one in a
// tile to come, and then every score is larger than its reference.
template <bool Later = false, int R>
__device__ __forceinline__ void first_reference(float (&reference)[2], const float (&x)[R], float scale_log2e) {
    float maximum[2];
    local_row_max(maximum, x);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float largest = group_max<4>(maximum[half]) * scale_log2e;
        reference[half] = largest == -infinity() ? (Later ? -1e30f : 0.0f) : largest;
    }
}

// The references of a thread's two rows become the row maxima of a tile, where those are larger. maximum: over this thread's columns.
// factor: what refers to the old references is multiplied by it; row_sum is, O is left to scale_rows.
__device__ __forceinline__ void raise_reference(float (&reference)[2], float (&row_sum)[2], float (&factor)[2], const float (&maximum)[2],
                                                float scale_log2e) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float larger = max(reference[half], group_max<4>(maximum[half]) * scale_log2e);
        factor[half] = exp2_approx(reference[half] - larger);
        reference[half] = larger;
        row_sum[half] *= factor[half];
    }
}
// The same of the scores of a tile.
template <int R>
__device__ __forceinline__ void raise_to_largest(float (&reference)[2], float (&row_sum)[2], float (&factor)[2], const float (&x)[R],
                                                 float scale_log2e) {
    float maximum[2];
    local_row_max(maximum, x);
    raise_reference(reference, row_sum, factor, maximum, scale_log2e);
}
// Rows that have seen no key have no reference: the next maximum is larger.
__device__ __forceinline__ void forget_unseen(float (&reference)[2], const float (&row_sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (group_max<4>(row_sum[half]) == 0) reference[half] = -1e30f;
}

// One tile of online softmax that rescales lazily, as fa::Softmax::step_lazily: S becomes P = 2^(scale S - reference), P at most 2^slack.
template <int R, int C>
__device__ __forceinline__ void softmax_lazily(float (&x)[R], float (&out)[C], float (&reference)[2], float (&row_sum)[2],
                                               float scale_log2e, float slack) {
    float maximum[2], sum[2];
    local_row_max(maximum, x);
    const bool grows = max(maximum[0] * scale_log2e - reference[0], maximum[1] * scale_log2e - reference[1]) > slack;
    if (__any_sync(full_warp, grows)) {
        float factor[2];
        raise_reference(reference, row_sum, factor, maximum, scale_log2e);
        scale_rows(out, factor);
    }
    exponentiate(x, sum, scale_log2e, reference);
    row_sum[0] += sum[0], row_sum[1] += sum[1];
}

// After the last tile: row_sum becomes that of the whole row, and `inverse` what O is multiplied by: 0 for a row that saw no key.
__device__ __forceinline__ void finish_row_sum(float (&row_sum)[2], float (&inverse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row_sum[half] = group_sum<4>(row_sum[half]);
        inverse[half] = row_sum[half] == 0 ? 0.0f : 1.0f / row_sum[half];
    }
}

// The natural logsumexp of the scaled scores, of the queries `row` and row + 8, after finish_row_sum: -inf for a row that saw no key.
__device__ __forceinline__ void store_logsumexp(const Args& args, int batch, int head, int row, const float (&reference)[2],
                                                const float (&row_sum)[2]) {
    float* logsumexp = row_pointer<float>(args.logsumexp, batch, head, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (lane_id() % 4 == 0 && row + 8 * half < args.seq_q)
            logsumexp[row + 8 * half] = row_sum[half] == 0 ? -infinity() : reference[half] * ln2 + log(row_sum[half]);
}

// Rounded and packed: accumulators of 16 columns are an A operand as they lie (fa/mma.cuh), so no value changes its thread. first, end: of
// the steps of 16 columns, those that are packed.
template <class T, int R>
__device__ __forceinline__ void pack_operand(uint32_t (&operand)[R / 8][4], const float (&x)[R], int first = 0, int end = R / 8) {
#pragma unroll
    for (int step = first; step < end; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r) operand[step][r] = pack<T>(x[8 * step + 2 * r], x[8 * step + 2 * r + 1]);
}

// Whether P = 2^score of a softcap needs no reference while every tanh is in QuickTanh's range. The range has to be wide enough for a row
// sum, and narrow enough for products with V, as large as those of other P (2^30). In float16 P has no room below the range: a row that
// begins at its low end and goes on far below it would lose all but its first keys.
constexpr float quick_log2 = QuickTanh::at_end * softcap_log2;
template <class T> constexpr bool capped = quick_log2 >= 8 && quick_log2 < 26;
template <> constexpr bool capped<float16> = false;

// Whether every tanh of such a softcap was in the range, or what was not is nothing beside the rest, seen in this thread's row sums, each of N
// P. At the ends of the range P is 2^quick_log2 and its inverse, and beyond them it goes on to rise or fall, so a sum of at most the one has
// no P above the range. A P below it is wrong by 1.9e-5 of the other (caps of 25 and more; less of larger ones), so in a sum whose mean is 32
// times that, all of them are wrong by 6e-7 of the sum together, and O by as much of the largest |V|: more of O itself only where V is
// nothing (1e-4) beside what the keys have whose P are so small. `most`: what is nearer to 1. Of slopes FarTanh has told.
template <int N> __device__ __forceinline__ bool all_quick(const float (&sum)[2]) {
    constexpr float most = float(1ull << int(quick_log2 < 26 ? quick_log2 : 0)), least = 32 * N / most;
    bool quick = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) quick &= sum[half] >= least && sum[half] <= most;
    return quick;
}

// A warp's 16 rows of A B^T once more, with mma.sync: no other warp is needed. A (from its first row on) and B lie in swizzled slabs of 64
// columns, a_slab and b_slab bytes apart.
template <class T, int Slabs, int R>
__device__ __forceinline__ void multiply_abt_again(float (&x)[R], uint32_t a_smem, uint32_t a_slab, uint32_t b_smem, uint32_t b_slab) {
    float s[R / 4][4] = {};
#pragma unroll 1
    for (int slab = 0; slab < Slabs; ++slab)
#pragma unroll 1
        for (int step = 0; step < 4; ++step) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, step_16<64>(lane_of_a<64>(a_smem + slab * a_slab), step));
#pragma unroll
            for (int j = 0; j < R / 8; ++j) {
                ldmatrix_x4(b, step_16<64>(lane_of_b<64>(b_smem + slab * b_slab), step) + j * rows_16<64>);
                mma_m16n8<T>(s[2 * j], a, b[0], b[1]);
                mma_m16n8<T>(s[2 * j + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] = s[i / 4][i % 4];
}

// Rounded to a tile in swizzled slabs of 64 columns, slab_bytes apart. tile_smem: the first of the warp's 16 rows. A row whose factor is 0
// becomes 0, whatever it holds.
template <class T, int R>
__device__ __forceinline__ void store_rows(unsigned char* tile_smem, uint32_t slab_bytes, const float (&x)[R], const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool empty = factor[half] == 0;
#pragma unroll
        for (int j = 0; j < R / 4; ++j) {
            const uint32_t at = j / 8 * slab_bytes + chunk_at<64>(8 * half + lane_id() / 4, j % 8) + fragment_column() * 2;
            const uint32_t two = pack<T>(x[4 * j + 2 * half] * factor[half], x[4 * j + 2 * half + 1] * factor[half]);
            *reinterpret_cast<uint32_t*>(tile_smem + at) = empty ? 0u : two;
        }
    }
}

// -- of transposed scores, 64 keys x 2 R queries: what belongs to a query belongs to a column ---------------------------

// S^T becomes P^T = 2^(scale S^T - reference of the column). reference_smem: [2 R]. first, end: of the steps of 16 queries, some.
template <int R>
__device__ __forceinline__ void exponentiate_columns(float (&x)[R], float scale_log2e, const float* reference_smem, int first = 0,
                                                     int end = R / 8) {
#pragma unroll
    for (int j = 2 * first; j < 2 * end; ++j) {
        const Vec<float, 2> reference = load_vec<2>(reference_smem + 8 * j + fragment_column());
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * j + i] = exp2_approx(x[4 * j + i] * scale_log2e - reference[i % 2]);
    }
}

// The same, and score_gradient below, with a thread's numbers of the columns in registers.
template <int R, int N>
__device__ __forceinline__ void exponentiate_columns(float (&x)[R], float scale_log2e, const Vec<float, 2> (&reference)[N]) {
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] = exp2_approx(x[i] * scale_log2e - reference[i / 4][i % 2]);
}
template <int R, int N>
__device__ __forceinline__ void score_gradient(float (&x)[R], const float (&p)[R], const Vec<float, 2> (&delta)[N]) {
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] = p[i] * (x[i] - delta[i / 4][i % 2]);
}
template <int N> __device__ __forceinline__ void load_columns(Vec<float, 2> (&x)[N], const float* columns_smem) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = load_vec<2>(columns_smem + 8 * j + fragment_column());
}

// Columns before `first[half]` become 0, whatever they hold. `first` may be negative or beyond the tile. Bits as in mask_columns.
template <int R> __device__ __forceinline__ void clear_columns(float (&x)[R], const int (&first)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = max(0, first[half] - fragment_column());
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t hidden = uint32_t((1ull << min(32, (mine + 7 - e) / 8)) - 1);
#pragma unroll
            for (int j = 0; j < R / 4; ++j)
                if (hidden >> j & 1) x[4 * j + 2 * half + e] = 0;
        }
    }
}

// P^T becomes 0 where the query does not see the key, and for keys beyond seq_kv. query: the first of 2 R; key: the first of the 64.
template <int R> __device__ __forceinline__ void clear_hidden(float (&x)[R], const Args& args, int query, int key) {
    int first[2], end[2];
    for (int half = 0; half < 2; ++half) {
        const int own_key = key + 16 * (warp_id() % 4) + lane_id() / 4 + 8 * half;
        first[half] = own_key < args.seq_kv ? first_query(args, own_key) - query : 2 * R;
        end[half] = query_end(args, own_key) - query;
    }
    if constexpr (has_window) keep_columns(x, first, end, 0);
    else clear_columns(x, first);
}

// Where a transposed tile is among a problem's pairs. query: its first; key: the first of the 64.
struct TilePlace {
    const Args& args;
    int batch, head, query, key;

    // Of the first pair of a thread, x[0].
    __device__ __forceinline__ TilePlace of_thread(int thread) const {
        return {args, batch, head, query + thread % 4 * 2, key + thread / 32 % 4 * 16 + thread % 32 / 4};
    }
    // Whether a query sees a key, by all masks.
    __device__ __forceinline__ bool sees(int query, int key) const {
        return key < visible_keys(args, query) && !hidden(args, batch, head, query, key);
    }
};

// Which pairs of a transposed tile are seen: of x[i] bit i % 32 of word i / 32. A mask needs no scores, so this runs under their product, and
// is two registers until they are there.
template <int R> struct SeenPairs {
    uint32_t words[(R + 31) / 32];

    __device__ __forceinline__ bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
    __device__ __forceinline__ void find(const TilePlace& place) {
        const TilePlace own = place.of_thread(threadIdx.x);
        constexpr int groups = R < 32 ? R / 4 : 8;  // of 4 pairs, of a word
#pragma unroll
        for (int w = 0; w < (R + 31) / 32; ++w) {
            uint32_t word = 0;
#pragma unroll 2
            for (int j = 0; j < groups; ++j) {
                uint32_t four = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) four |= uint32_t(own.sees(own.query + 8 * (groups * w + j) + i % 2, own.key + i / 2 * 8)) << i;
                word = word >> 4 | four << 28;
            }
            words[w] = word >> (32 - 4 * groups);
        }
        ready(words);
    }
};

// Whether a tanh of the problem's score is outside of its quick range for a pair of the warp. x: q·k of a transposed tile.
template <int R> __device__ __forceinline__ bool needs_whole_tanh(float (&x)[R], const TilePlace& place, float scale) {
    if constexpr (!has_tanh) return false;
    FarTanh asked;
    const TilePlace own = place.of_thread(threadIdx.x);
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const int query = own.query + i / 4 * 8 + i % 2, key = own.key + i / 2 % 2 * 8;
        pair_of(own.args, own.batch, own.head, query, key).score_log2(x[i], scale, asked);
    }
    ready(x);  // what a tanh is of is computed again: kept, it would be spilled
    return __any_sync(full_warp, asked.far());
}

// A tanh whose factor comes behind it, so that a score and its derivative have it once.
template <class Tanh> struct SharedTanh {
    __device__ __forceinline__ float operator()(float slope, float x, float factor) const { return Tanh()(slope, x, 1.0f) * factor; }
};

// exponentiate_columns and pack_operand of a step of 16 queries, with the problem's mask and score: S^T becomes P^T, which is rounded and
// packed, and then P^T times the derivative of the score, as dS^T has it. Masked: 0 where the query does not see the key.
template <class T, class Tanh, bool Masked, int R>
__device__ __forceinline__ void exponentiate_pairs(float (&x)[R], uint32_t (&operand)[4], const TilePlace& place, const SeenPairs<R>& pairs,
                                                   float scale, const float* reference_smem, int step) {
    const TilePlace own = place.of_thread(threadIdx.x);
    const float* own_reference_smem = reference_smem + 16 * step + fragment_column();
    const Vec<float, 2> reference[2] = {load_vec<2>(own_reference_smem), load_vec<2>(own_reference_smem + 8)};
    float p[8];
    SharedTanh<Tanh> tanh;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int query = own.query + 16 * step + i / 4 * 8 + i % 2, key = own.key + i / 2 % 2 * 8;
        const auto pair = pair_of(own.args, own.batch, own.head, query, key);
        float& s = x[8 * step + i];
        const float slope = pair.slope_unscaled(s, scale, tanh);
        p[i] = exp2_approx(pair.score_log2(s, scale, tanh) - reference[i / 4][i % 2]);
        const bool seen = !Masked || pairs.has(8 * step + i);
        p[i] = seen ? p[i] : 0.0f;
        s = seen ? p[i] * slope : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) operand[r] = pack<T>(p[2 * r], p[2 * r + 1]);
}

// The same of a whole tile.
template <class T, class Tanh, int R>
__device__ __forceinline__ void exponentiate_steps(float (&x)[R], uint32_t (&operand)[R / 8][4], const TilePlace& place,
                                                   const SeenPairs<R>& pairs, float scale, const float* reference_smem) {
#pragma unroll
    for (int step = 0; step < R / 8; ++step) exponentiate_pairs<T, Tanh, true>(x, operand[step], place, pairs, scale, reference_smem, step);
}
template <class T, int R>
__device__ __forceinline__ void exponentiate_tile(float (&x)[R], uint32_t (&operand)[R / 8][4], const TilePlace& place,
                                                  const SeenPairs<R>& pairs, float scale, const float* reference_smem) {
    if (needs_whole_tanh(x, place, scale)) exponentiate_steps<T, WholeTanh>(x, operand, place, pairs, scale, reference_smem);
    else exponentiate_steps<T, QuickTanh>(x, operand, place, pairs, scale, reference_smem);
}

// dP^T becomes dS^T = P^T (dP^T - delta of the column), in such steps. delta_smem: [2 R].
template <int R>
__device__ __forceinline__ void score_gradient(float (&x)[R], const float (&p)[R], const float* delta_smem, int first = 0,
                                               int end = R / 8) {
#pragma unroll
    for (int j = 2 * first; j < 2 * end; ++j) {
        const Vec<float, 2> delta = load_vec<2>(delta_smem + 8 * j + fragment_column());
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * j + i] = p[4 * j + i] * (x[4 * j + i] - delta[i % 2]);
    }
}

// Where a lane of the words below begins in a swizzled slab of 64 columns. warp: whose 16 columns.
__device__ __forceinline__ uint32_t lane_of_transposed(const unsigned char* slab_smem, int warp) {
    const uint32_t lane = opaque_thread_id() % 32;  // opaque: the address is not made again for each tile
    return smem_u32(slab_smem) + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}
// An operand, 16 rows of a warp, transposed to such a slab: each step is 16 rows there.
template <int Steps>
__device__ __forceinline__ void store_operand_transposed(unsigned char* slab_smem, int warp, const uint32_t (&operand)[Steps][4]) {
    const uint32_t own = lane_of_transposed(slab_smem, warp);
#pragma unroll
    for (int step = 0; step < Steps; ++step) stmatrix_x4_trans(own + step * 2048, operand[step]);
}

// The same operand from there.
template <int Steps>
__device__ __forceinline__ void load_operand_transposed(uint32_t (&operand)[Steps][4], const unsigned char* slab_smem, int warp) {
    const uint32_t own = lane_of_transposed(slab_smem, warp);
#pragma unroll
    for (int step = 0; step < Steps; ++step) ldmatrix_x4_trans(operand[step], own + step * 2048);
}

// An operand to a tile in swizzled slabs of 64 columns, slab_bytes apart. tile_smem: the first of the warp's 16 rows; column: the first,
// where the operand lies within a slab. A quad writes 16 bytes of a row, 8 rows lie in 8 places of the line: no bank conflicts.
template <int Steps>
__device__ __forceinline__ void store_operand(unsigned char* tile_smem, uint32_t slab_bytes, const uint32_t (&operand)[Steps][4],
                                              int column = 0) {
    const uint32_t lane = opaque_thread_id() % 32, own = (chunk_at<64>(lane / 4, 0) + lane % 4 * 4) ^ uint32_t(column * 2);
#pragma unroll
    for (int step = 0; step < Steps; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const uint32_t at = step / 4 * slab_bytes + (own ^ (step % 4 * 32 + r / 2 * 16)) + r % 2 * 1024;
            *reinterpret_cast<uint32_t*>(tile_smem + at) = operand[step][r];
        }
}

}  // namespace fa
