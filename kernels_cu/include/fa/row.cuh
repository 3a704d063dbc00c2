// Whole rows in memory, as the kernels of step 00 walk them.
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

// The row of a (batch, heads_q, seq_q, seq_kv) matrix in a workspace that belongs to one query: [seq_kv] numbers.
// 64-bit, because batch * heads * seq * seq passes 2^31 at B8 H16 S4096.
template <class T>
__device__ __forceinline__ T* matrix_row(const Args& args, int workspace, int batch, int head, int query) {
    int64_t row = (int64_t(batch) * args.heads_q + head) * args.seq_q + query;
    return static_cast<T*>(args.workspace[workspace]) + row * args.seq_kv;
}

}  // namespace fa
