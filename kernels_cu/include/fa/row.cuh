// Rows of a head as the plain kernels take them: two of them multiplied (step 00), a tile of them brought to shared memory.
#pragma once

#include <fa/copy.cuh>

namespace fa {

// a · b for two rows of a tensor, n elements each, both 16-byte aligned. One sum for each element of 16 bytes: the additions
// of a single sum would have to wait for each other.
template <class T>
__device__ __forceinline__ accumulate_t<T> dot(const T* a /* [n] */, const T* b /* [n] */, int n) {
    constexpr int width = vec_width<T>;
    accumulate_t<T> part[width] = {}, sum = 0;
    int i = 0;
    for (; i + width <= n; i += width) {
        Vec128<T> a_reg = load_128(a + i), b_reg = load_128(b + i);
#pragma unroll
        for (int j = 0; j < width; ++j) part[j] += widen(a_reg[j]) * widen(b_reg[j]);
    }
    for (; i < n; ++i) sum += widen(a[i]) * widen(b[i]);
#pragma unroll
    for (int j = 0; j < width; ++j) sum += part[j];
    return sum;
}

// sum[i] += weights[r * weight_step] * rows[r * row_step + i] for r from first to end: 16 bytes' worth of elements i. In runs with
// a sum of their own: one float32 sum over thousands of rows has an error several times as large as that of a sum of sums.
template <class T>
__device__ __forceinline__ void add_weighted(accumulate_t<T> (&sum)[vec_width<T>], const accumulate_t<T>* weights, int64_t weight_step,
                                             const T* rows /* row_step apart */, int64_t row_step, int first, int end) {
    constexpr int width = vec_width<T>, run = 128;
    for (; first < end; first += run) {
        accumulate_t<T> part[width] = {};
        for (int64_t r = first; r < min(first + run, end); ++r) {
            accumulate_t<T> weight = weights[r * weight_step];
            Vec128<T> row_reg = load_128(rows + r * row_step);
#pragma unroll
            for (int i = 0; i < width; ++i) part[i] += weight * widen(row_reg[i]);
        }
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] += part[i];
    }
}

// The row of a (batch, heads_q, seq_q, seq_kv) matrix in a workspace that belongs to one query: [seq_kv] numbers.
// 64-bit, because batch * heads * seq * seq passes 2^31 at B8 H16 S4096.
template <class T>
__device__ __forceinline__ T* matrix_row(const Args& args, int workspace, int batch, int head, int query) {
    int64_t row = (int64_t(batch) * args.heads_q + head) * args.seq_q + query;
    return static_cast<T*>(args.workspace[workspace]) + row * args.seq_kv;
}

// Rows first, first + 1, ... of one head to shared memory: `rows` of them, `width` elements each, `pitch` elements apart. What
// lies beyond row `end` or element `head_dim` (the row's poison) becomes zero. `threads` threads do it together, this one being
// `thread`: neighbouring threads take neighbouring elements, so a warp's loads coalesce. The barrier is the caller's.
template <int rows, int width, int pitch, int threads, class T>
__device__ __forceinline__ void load_rows(T* to_smem /* [rows][pitch] */, const T* from /* [rows], stride apart */, int64_t stride,
                                          int first, int end, int head_dim, int thread) {
#pragma unroll 4
    for (int i = thread; i < rows * width; i += threads) {
        int row = i / width, d = i % width;
        to_smem[row * pitch + d] = first + row < end && d < head_dim ? from[row * stride + d] : T{};
    }
}

}  // namespace fa
