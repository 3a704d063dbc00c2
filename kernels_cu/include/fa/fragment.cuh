// Tiles for tensor cores: 16-bit tiles in shared memory, and products of whole tiles, made of ldmatrix and mma.
//
// A tile has rows of Width numbers, in chunks of 16 bytes (8 numbers). ldmatrix reads 8 rows at one chunk. Shared memory serves 128
// bytes at once, 8 chunks, if they lie in different banks: but rows are 2 * Width bytes apart, so the same chunk of 8 rows lies in the
// same banks where Width is a multiple of 64 (in two places where it is 32 or 96), and the read takes 8 turns (4). The cure costs no
// memory: chunk c of row r stands in the place of chunk c ^ swizzle(r). An XOR with 0 … 7 permutes 8 chunks, and 8 neighbouring rows get
// 8 different places. Writers and readers must only agree.
//
// The XOR would be an instruction for every address, but r % 8 is all that swizzle looks at. In ldmatrix a lane always reads the same
// row of its 8, so its address is made once a tile (lane_of_…), and a step of 16 columns changes it by another XOR with a constant.
#pragma once

#include <fa/async.cuh>
#include <fa/copy.cuh>
#include <fa/mma.cuh>
#include <fa/warp.cuh>

namespace fa {

template <int Width> __device__ __forceinline__ int swizzle(int row) { return Width % 64 == 0 ? row % 8 : row / 2 % 4; }

// Where chunk `chunk` of row `row` stands, in bytes from the tile's beginning (which is 128-byte aligned).
template <int Width, bool Swizzled = true> __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return uint32_t(row * Width * 2 + (Swizzled ? chunk ^ swizzle<Width>(row) : chunk) * 16);
}

// From the address of a chunk to that of the chunk 2 * step further on in its row (16 columns each), first chunk 0 or 1.
template <int Width, bool Swizzled = true> __device__ __forceinline__ uint32_t step_16(uint32_t address, int step) {
    constexpr int line = !Swizzled ? 1 : Width % 64 == 0 ? 8 : 4;  // chunks that a swizzle permutes
    return (address ^ uint32_t(2 * step % line * 16)) + uint32_t(2 * step / line * line * 16);
}

// Bytes from one group of 16 rows to the next.
template <int Width> constexpr uint32_t rows_16 = 16 * Width * 2;

// What this lane tells ldmatrix_x4 about the 16 x 16 numbers at (row, 0) of a tile. row % 8 = 0.
//   of_a: as an A operand (rows of the tile are rows of A)
//   of_b: as two B operands of 8 columns each (rows of the tile are columns of B: the product takes the tile transposed)
//   with ldmatrix_x4_trans, of_a gives the tile itself as two B operands of 8 columns each, and of_b its transposed as an A operand
template <int Width, bool Swizzled = true> __device__ __forceinline__ uint32_t lane_of_a(uint32_t tile_smem, int row = 0) {
    return tile_smem + chunk_at<Width, Swizzled>(row + lane_id() % 16, lane_id() / 16);
}
template <int Width, bool Swizzled = true> __device__ __forceinline__ uint32_t lane_of_b(uint32_t tile_smem, int row = 0) {
    return tile_smem + chunk_at<Width, Swizzled>(row + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
}

// The A operand of M groups of 16 rows, Width columns: in shared memory, read again for every product, or (InRegisters) once and for all in
// registers, which are Width / 16 * M * 4.
template <int Width, int M, bool InRegisters, bool Swizzled = true> struct OperandA {
    uint32_t lane_smem;                          // lane_of_a of the first row
    uint32_t reg[InRegisters ? Width / 16 : 1][M][4];

    __device__ __forceinline__ void read(uint32_t (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], step_16<Width, Swizzled>(lane_smem, k) + m * rows_16<Width>);
    }
    // The tile is there now.
    __device__ __forceinline__ void load_registers() {
        if constexpr (InRegisters) {
#pragma unroll
            for (int k = 0; k < Width / 16; ++k) read(reg[k], k);
        }
    }
    // Columns 16 * k to 16 * k + 15.
    __device__ __forceinline__ void get(uint32_t (&a)[M][4], int k) const {
        if constexpr (InRegisters) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = reg[k][m][i];
        } else read(a, k);
    }
};

// d += A B^T over the whole Width. B: 8 * N rows of Width in shared memory. What comes of B is used M times.
template <class T, int Width, bool Swizzled, int M, int N, bool InRegisters>
__device__ __forceinline__ void multiply_abt(float (&d)[M][N][4], const OperandA<Width, M, InRegisters, Swizzled>& rows,
                                             uint32_t b_smem /* lane_of_b */) {
#pragma unroll
    for (int k = 0; k < Width / 16; ++k) {
        uint32_t a[M][4];
        rows.get(a, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, step_16<Width, Swizzled>(b_smem, k) + n / 2 * rows_16<Width>);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16<T>(d[m][n], a[m], b[0], b[1]);
                mma_m16n8k16<T>(d[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// d += P B. P: 16 * M rows and 16 * K columns, in registers; B: 16 * K rows of Width, of which columns [0, 8 * N) from b_smem's on.
template <class T, int Width, bool Swizzled = true, int M, int N, int K>
__device__ __forceinline__ void multiply_pb(float (&d)[M][N][4], const uint32_t (&p)[K][M][4], uint32_t b_smem /* lane_of_a */) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, step_16<Width, Swizzled>(b_smem, n / 2) + k * rows_16<Width>);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16<T>(d[m][n], p[k][m], b[0], b[1]);
                mma_m16n8k16<T>(d[m][n + 1], p[k][m], b[2], b[3]);
            }
        }
}

// Accumulators rounded to 16 bit, as the A operand of the next product: nothing moves between lanes.
template <class T, int M, int N> __device__ __forceinline__ void pack_a(uint32_t (&a)[N / 2][M][4], const float (&d)[M][N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k)
#pragma unroll
        for (int m = 0; m < M; ++m) {
            a[k][m][0] = pack<T>(d[m][2 * k][0], d[m][2 * k][1]);
            a[k][m][1] = pack<T>(d[m][2 * k][2], d[m][2 * k][3]);
            a[k][m][2] = pack<T>(d[m][2 * k + 1][0], d[m][2 * k + 1][1]);
            a[k][m][3] = pack<T>(d[m][2 * k + 1][2], d[m][2 * k + 1][3]);
        }
}

// The signs of the numbers in 32 bits.
template <class T> constexpr uint32_t sign_bits = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

// The part of a Rows x Width tile that one of Threads threads brings: 16 bytes of every row_step-th row. Of float (tf32) a tile of
// Width stands as one of 16-bit numbers twice as wide.
template <class T, int Rows, int Width, int Threads, bool Swizzled = true> struct TileCopy {
    static constexpr int vec = vec_width<T>, chunks = Width / vec, row_step = Threads / chunks;
    static constexpr int wide = Width * int(sizeof(T)) / 2;  // in 16-bit numbers
    // Where row_step is no multiple of 8 (Width 96), the place in the line differs from row to row.
    static constexpr bool even = Threads % chunks == 0 && row_step % 8 == 0 && Rows % row_step == 0;
    static constexpr int count = (Rows * chunks + Threads - 1) / Threads;

    static __device__ __forceinline__ int row(int i) {
        return even ? threadIdx.x / chunks + i * row_step : (threadIdx.x + i * Threads) / chunks;
    }
    static __device__ __forceinline__ int chunk(int i) { return even ? threadIdx.x % chunks : (threadIdx.x + i * Threads) % chunks; }
    static __device__ __forceinline__ uint32_t place(int i) {
        if constexpr (even) return chunk_at<wide, Swizzled>(row(0), chunk(0)) + i * row_step * wide * 2;
        else return chunk_at<wide, Swizzled>(row(i), chunk(i));
    }

    // Starts the copy. What is not there (row >= rows, column >= head_dim) becomes zero: a product of P = 0 must not meet a NaN.
    static __device__ __forceinline__ void copy_async(uint32_t tile_smem, const T* from /* [rows][head_dim] */, int pitch, int rows,
                                                      int head_dim) {
        if (even && rows >= Rows && head_dim == Width) {
            const T* at = from + int64_t(row(0)) * pitch + chunk(0) * vec;
#pragma unroll
            for (int i = 0; i < count; ++i, at += row_step * pitch) cp_async_16(tile_smem + place(i), at);
        } else {
#pragma unroll 1  // seldom: small code, few registers
            for (int i = 0; i < count; ++i) {
                if (Rows * chunks % Threads != 0 && row(i) >= Rows) break;
                const int bytes = row(i) < rows ? max(0, min(16, (head_dim - chunk(i) * vec) * int(sizeof(T)))) : 0;
                const T* at = bytes > 0 ? from + int64_t(row(i)) * pitch + chunk(i) * vec : from;
                cp_async_16_upto(tile_smem + place(i), at, bytes);
            }
        }
    }

    // The same through registers, where the thread waits for its loads (all of them at once): how it was before cp.async. `flip` is
    // XORed to all that is there.
    static __device__ __forceinline__ void copy_sync(uint32_t tile_smem, const T* from /* [rows][head_dim] */, int pitch, int rows,
                                                     int head_dim, uint32_t flip = 0) {
        unsigned char* tile = dynamic_shared() + (tile_smem - smem_u32(dynamic_shared()));
        if (even && rows >= Rows && head_dim == Width) {
            Vec<uint32_t, 4> reg[count];
            const T* at = from + int64_t(row(0)) * pitch + chunk(0) * vec;
#pragma unroll
            for (int i = 0; i < count; ++i, at += row_step * pitch) reg[i] = load_vec<4>(reinterpret_cast<const uint32_t*>(at));
#pragma unroll
            for (int i = 0; i < count; ++i) {
#pragma unroll
                for (int w = 0; w < 4; ++w) reg[i][w] ^= flip;
                store_vec(reinterpret_cast<uint32_t*>(tile + place(i)), reg[i]);
            }
            return;
        }
#pragma unroll 1  // seldom: small code, few registers
        for (int i = 0; i < count; ++i) {
            if (Rows * chunks % Threads != 0 && row(i) >= Rows) break;
            Vec<uint32_t, 4> some = {};
            const int bytes = (head_dim - chunk(i) * vec) * int(sizeof(T));  // that count; behind them is the row's poison
            if (row(i) < rows && bytes > 0)
                some = load_vec<4>(reinterpret_cast<const uint32_t*>(from + int64_t(row(i)) * pitch + chunk(i) * vec));
#pragma unroll
            for (int w = 0; w < 4; ++w) some[w] = ((bytes <= 4 * w ? 0 : bytes < 4 * w + 4 ? 0xffff : 0xffffffff) & some[w]) ^ flip;
            store_vec(reinterpret_cast<uint32_t*>(tile + place(i)), some);
        }
    }
};

}  // namespace fa
