// Epilogues: accumulators are scaled, rounded and stored to global memory, directly or through shared memory.
//
// A warp holds a row of an accumulator in a quad of lanes, 8 bytes of 16-bit elements at a time. Stored directly, an instruction covers 8
// rows of 16 bytes: half of each 32-byte sector that global memory is written in. Through shared memory a lane stores 16 bytes, and
// neighbouring lanes neighbouring chunks: whole lines.
#pragma once

#include <fa/softmax.cuh>

namespace fa {

// The epilogue of a warp's 16 * M queries of a forward pass, accumulators straight to global memory: O = out_reg / row_sum and logsumexp.
// Queries from q_first + warp_row on; q_end is one past the last. O = 0 and logsumexp = -inf for a row that saw no key.
template <class T, int M, int N>
__device__ __forceinline__ void store_output(const Args& args, int batch, int head, int q_first, int warp_row, int q_end,
                                             const float (&out_reg)[M][N][4], const Softmax<M>& softmax, float scale) {
    float* logsumexp = row_pointer<float>(args.logsumexp, batch, head, 0);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = q_first + warp_row + 16 * m + 8 * half + fragment_row();
            if (query >= q_end) continue;
            const float factor = softmax.inverse_sum(m, half);
            if (lane_id() % 4 == 0) logsumexp[query] = softmax.logsumexp(m, half, scale);
            T* out = row_pointer<T>(args.O, batch, head, query) + fragment_column();
#pragma unroll
            for (int c = 0; c < N; ++c)
                store_vec_upto(out + 8 * c,
                               Vec<T, 2>{narrow<T>(out_reg[m][c][2 * half] * factor), narrow<T>(out_reg[m][c][2 * half + 1] * factor)},
                               args.head_dim - 8 * c - fragment_column());
        }
}

// The same through shared memory, for 16-bit types: the block's dynamic shared memory holds rows of Width, of which the warp uses its own,
// [warp_row, warp_row + 16 * M). No warp reads another's rows, so one __syncwarp suffices. What was there before is overwritten: the
// barrier before is the caller's.
template <class T, int Width, int M, int N>
__device__ __forceinline__ void store_output_smem(const Args& args, int batch, int head, int q_first, int warp_row, int q_end,
                                                  const float (&out_reg)[M][N][4], const Softmax<M>& softmax, float scale) {
    float* logsumexp = row_pointer<float>(args.logsumexp, batch, head, 0);
    unsigned char* out_smem = dynamic_shared();  // [BLOCK_Q][Width]
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * m + 8 * half + fragment_row();
            const float factor = softmax.inverse_sum(m, half);
            if (lane_id() % 4 == 0 && q_first + row < q_end) logsumexp[q_first + row] = softmax.logsumexp(m, half, scale);
#pragma unroll
            for (int c = 0; c < N; ++c)
                *reinterpret_cast<uint32_t*>(out_smem + chunk_at<Width>(row, c) + fragment_column() * 2) =
                    pack<T>(out_reg[m][c][2 * half] * factor, out_reg[m][c][2 * half + 1] * factor);
        }
    __syncwarp();

    T* out = row_pointer<T>(args.O, batch, head, q_first + warp_row);  // [16 * M], O.row apart
    const int rows = min(16 * M, q_end - q_first - warp_row), pitch = int(args.O.row);
    // Two loops: unrolled for a whole tile, short for a ragged one. Bounds in every store made mma_qreg_async 9 % slower at 512 keys.
    const bool whole = rows == 16 * M && args.head_dim == Width;
    if (whole) {
#pragma unroll
        for (int i = 0; i < 16 * M * N / 32; ++i) {
            const int row = (lane_id() + 32 * i) / N, chunk = (lane_id() + 32 * i) % N;
            store_128(out + row * pitch + chunk * 8,
                      load_128(reinterpret_cast<const T*>(out_smem + chunk_at<Width>(warp_row + row, chunk))));
        }
    } else {
#pragma unroll 1
        for (int i = lane_id(); i < rows * N; i += 32) {
            const int row = i / N, chunk = i % N;
            store_128_upto(out + row * pitch + chunk * 8,
                           load_128(reinterpret_cast<const T*>(out_smem + chunk_at<Width>(warp_row + row, chunk))),
                           args.head_dim - chunk * 8);
        }
    }
}

// Writes factor * d, rounded, to a tile in shared memory: rows from `row` on, every Stride-th group of 16 columns from `step` on.
template <class T, int Width, int Stride, int M, int N>
__device__ __forceinline__ void round_to_tile(unsigned char* tile_smem, const float (&d)[M][N][4], float factor, int row, int step) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int chunk = 2 * (step + n / 2 * Stride) + n % 2;
                const uint32_t at = chunk_at<Width>(row + 16 * m + 8 * half + lane_id() / 4, chunk) + lane_id() % 4 * 4;
                *reinterpret_cast<uint32_t*>(tile_smem + at) = pack<T>(d[m][n][2 * half] * factor, d[m][n][2 * half + 1] * factor);
            }
}

// Stores a tile in shared memory to global memory, 16 bytes a thread of the block: the rows and columns that the tensor has.
template <class T, int Rows, int Width, int Threads>
__device__ __forceinline__ void write_tile(T* to /* [rows][head_dim] */, int64_t pitch, int rows, int head_dim,
                                           const unsigned char* tile_smem) {
    for (int i = threadIdx.x; i < Rows * (Width / 8); i += Threads) {
        const int row = i / (Width / 8), chunk = i % (Width / 8);
        if (row >= rows) break;
        const T* from = reinterpret_cast<const T*>(tile_smem + chunk_at<Width>(row, chunk));
        store_128_upto(to + row * pitch + chunk * 8, load_128(from), head_dim - chunk * 8);
    }
}

}  // namespace fa
