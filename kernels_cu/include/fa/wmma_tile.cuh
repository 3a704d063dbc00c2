// What the WMMA steps do around their products: copy a tile to shared memory, the online softmax of 16 rows there, the epilogue.
// A warp owns 16 queries, the height of a fragment. Which lane holds which element of a fragment is unspecified, so what depends on the
// row happens in shared memory, where 8 lanes share a row and keep its row maximum and row sum in registers.
#pragma once

#include <fa/copy.cuh>
#include <fa/warp.cuh>
#include <fa/wmma.cuh>

namespace fa {

// Copies rows of a tensor to shared memory as they are, 16 bytes a thread at a time: tensor cores take 16-bit elements. 8 neighbouring
// threads copy a line of 128 bytes.
template <class T, int Rows, int Width, int Threads> struct RowCopy {
    static constexpr int row_step = Threads / 8, columns = Width / 64, row_steps = Rows / row_step;
    // Rows of a batch: 8 loads a thread are in flight at once, because each takes hundreds of cycles.
    static constexpr int batch = row_steps < 8 / columns ? row_steps : 8 / columns;
    static_assert(columns * 64 == Width && row_steps * row_step == Rows && row_steps % batch == 0, "every thread moves as many vectors");

    // What lies beyond row `rows` or element `head_dim` (the row's poison) becomes zero, because a masked P is 0, and 0 times NaN is NaN.
    // `flip` is XORed to the bits: 0x80008000 turns all signs. The barrier is the caller's.
    static __device__ __forceinline__ void copy_sync(T* tile_smem /* [Rows][Width] */, const T* from /* [rows], pitch apart */, int pitch,
                                                     int rows, int head_dim, uint32_t flip = 0) {
        const int thread = threadIdx.x, row = thread / 8, column = thread % 8 * 8;
#pragma unroll 1
        for (int first = row; first < Rows; first += batch * row_step) {
            Vec<uint32_t, 4> reg[batch][columns] = {};
#pragma unroll
            for (int r = 0; r < batch; ++r)
#pragma unroll
                for (int c = 0; c < columns; ++c)
                    if (first + r * row_step < rows && column + 64 * c < head_dim) {
                        const T* at = from + (first + r * row_step) * pitch + column + 64 * c;
                        reg[r][c] = load_vec<4>(reinterpret_cast<const uint32_t*>(at));
                    }
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                const int left = head_dim - column - 64 * c;  // valid elements of this vector
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const uint32_t mask = left > 2 * w + 1 ? 0xffffffff : left > 2 * w ? 0xffff : 0;
#pragma unroll
                    for (int r = 0; r < batch; ++r) reg[r][c][w] = (reg[r][c][w] & mask) ^ flip;
                }
#pragma unroll
                for (int r = 0; r < batch; ++r)
                    store_vec<4>(reinterpret_cast<uint32_t*>(tile_smem + (first + r * row_step) * Width + column + 64 * c), reg[r][c]);
            }
        }
    }
};

// The online softmax of a warp's 16 rows. Lane i works on rows i / 8, i / 8 + 4, ... and there on every eighth group of 4 keys: the 8
// lanes of a row read 128 bytes side by side, and reduce with three shuffles.
template <class T, int Keys> struct WarpSoftmax {
    static constexpr int steps = 4;                     // of 4 rows
    static constexpr float lowest = -3.402823466e38f;   // a masked score: finite, so that no difference of two is NaN
    static_assert(Keys % 32 == 0, "8 lanes take 4 keys each");
    float max_reg[steps], sum_reg[steps];  // row maximum; row sum over this lane's keys only

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < steps; ++i) max_reg[i] = lowest, sum_reg[i] = 0;
    }

    // P = exp(scale * (S - row max)) of a tile whose first key is `k_first`. All 16 columns of rescale_smem get, for each row, the factor
    // exp(old - new row max) by which O is to be rescaled.
    __device__ __forceinline__ void update(T* p_smem /* [16][Keys] */, float* rescale_smem /* [16][16] */,
                                           const float* s_smem /* [16][Keys] */, float scale_log2e, const Args& args, int q_first,
                                           int k_first) {
        const int lane = lane_id() % 8;
        const bool masked = k_first + Keys > visible_keys(args, q_first);  // some row does not see every key
#pragma unroll
        for (int i = 0; i < steps; ++i) {
            const int row = lane_id() / 8 + 4 * i;
            Vec<float, 4> s[Keys / 32];
#pragma unroll
            for (int j = 0; j < Keys / 32; ++j) s[j] = load_vec<4>(s_smem + row * Keys + 32 * j + 4 * lane);
            if (masked) {
                const int visible = visible_keys(args, q_first + row) - k_first - 4 * lane;
#pragma unroll
                for (int j = 0; j < Keys / 32; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (32 * j + e >= visible) s[j][e] = lowest;
            }
            float largest = s[0][0];
#pragma unroll
            for (int j = 0; j < Keys / 32; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) largest = max(largest, s[j][e]);
            largest = max(max_reg[i], group_max<8>(largest));
            const float rescale = exp2_approx((max_reg[i] - largest) * scale_log2e);
            float sum = 0;
#pragma unroll
            for (int j = 0; j < Keys / 32; ++j) {
                Vec<T, 4> p;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float x = exp2_approx((s[j][e] - largest) * scale_log2e);
                    if (masked && s[j][e] == lowest) x = 0;  // in a row that has seen no key, lowest is the maximum
                    p[e] = narrow<T>(x);
                    sum += x;
                }
                store_vec<4>(p_smem + row * Keys + 32 * j + 4 * lane, p);
            }
            store_vec<2>(rescale_smem + row * 16 + 2 * lane, Vec<float, 2>{rescale, rescale});
            max_reg[i] = largest;
            sum_reg[i] = rescale * sum_reg[i] + sum;
        }
    }

    // After the last tile: 1 / row sum to the 16 columns of inverse_smem, and the logsumexp of the first `rows` rows to global memory.
    __device__ __forceinline__ void finish(float* inverse_smem /* [16][16] */, float* logsumexp /* [rows] */, int rows, float scale) {
        const int lane = lane_id() % 8;
#pragma unroll
        for (int i = 0; i < steps; ++i) {
            const int row = lane_id() / 8 + 4 * i;
            const float sum = group_sum<8>(sum_reg[i]), inverse = sum == 0 ? 0.0f : 1 / sum;  // NaN stays NaN
            store_vec<2>(inverse_smem + row * 16 + 2 * lane, Vec<float, 2>{inverse, inverse});
            if (lane == 0 && row < rows) logsumexp[row] = sum == 0 ? -infinity() : max_reg[i] * scale + log(sum);
        }
    }
};

// out_reg *= factor, row by row, without knowing which lane holds which row: the factors, 16 times side by side, are loaded as an
// accumulator, so that each register holds the factor of the row whose element is in the same register of out_reg.
template <int Count> __device__ __forceinline__ void scale_rows(WmmaAccumulator (&out_reg)[Count],
                                                                const float* factor_smem /* [16][16] */) {
    WmmaAccumulator factor;
    wmma_load_c_row(factor, factor_smem, 16);
#pragma unroll
    for (int c = 0; c < Count; ++c)
#pragma unroll
        for (int e = 0; e < 8; ++e) out_reg[c].reg[e] *= factor.reg[e];
}

// A warp's 16 rows of O to global memory, 32 columns at a time through staging_smem, where fragments become rows.
template <class T, int Count>
__device__ __forceinline__ void store_rows(T* to /* [rows], stride apart */, int stride, int rows, int head_dim,
                                           const WmmaAccumulator (&out_reg)[Count], float* staging_smem /* [16][32] */) {
#pragma unroll
    for (int c = 0; c < Count; c += 2) {
        wmma_store_d_row(staging_smem, out_reg[c], 32);
        wmma_store_d_row(staging_smem + 16, out_reg[c + 1], 32);
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane_id() / 4 + 8 * half, column = lane_id() % 4 * 8;
            Vec128<T> value;
#pragma unroll
            for (int e = 0; e < 8; ++e) value[e] = narrow<T>(staging_smem[row * 32 + column + e]);
            if (row < rows) store_128_upto(to + row * stride + 16 * c + column, value, head_dim - 16 * c - column);
        }
        __syncwarp();
    }
}

}  // namespace fa
