// Tiles for tensor cores: 16-bit tiles in shared memory, and products of whole tiles, made of ldmatrix and mma.
//
// A tile has rows of Width elements, in chunks of 16 bytes (8 elements). ldmatrix reads one chunk of each of 8 rows. Shared memory
// delivers 128 bytes a cycle, 8 chunks, if they lie in different banks. Rows are 2 * Width bytes apart: where Width is a multiple of 64,
// the same chunk of 8 rows lies in the same banks and the read takes 8 cycles; where Width is 32 or 96, it lies in two groups of banks
// and takes 4. The swizzle removes the conflict without padding: chunk c of row r is stored in place of chunk c ^ swizzle(r). An XOR
// with 0 … 7 permutes 8 chunks, so 8 neighbouring rows use 8 different places. Writers and readers of a tile must use the same layout.
//
// The XOR costs no instruction in the loops. swizzle depends on r % 8 only, and a lane of ldmatrix reads the same row of each 8, so its
// address is computed once a tile (lane_of_…), and a step of 16 columns changes it by an XOR with a constant.
//
// Of float (tf32) a tile of Width is handled as a 16-bit tile twice as wide: ldmatrix moves 32 bits a lane, whatever they mean.
#pragma once

#include <fa/async.cuh>
#include <fa/copy.cuh>
#include <fa/mma.cuh>
#include <fa/warp.cuh>

namespace fa {

// Element e of accumulator n of a lane belongs to row fragment_row() + 8 * (e / 2) and column 8 * n + fragment_column() + e % 2.
__device__ __forceinline__ int fragment_row() { return lane_id() / 4; }
__device__ __forceinline__ int fragment_column() { return lane_id() % 4 * 2; }

// What a chunk's index is XORed with in a row.
template <int Width> __device__ __forceinline__ int swizzle(int row) { return Width % 64 == 0 ? row % 8 : row / 2 % 4; }

// Offset of chunk `chunk` of row `row`, in bytes from the beginning of the tile (which is 128-byte aligned).
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

// The address that this lane gives to ldmatrix_x4 for the 16 x 16 elements at (row, 0) of a tile. row % 8 = 0.
//   of_a: as an A operand (rows of the tile are rows of A)
//   of_b: as two B operands of 8 columns each (rows of the tile are columns of B: the product takes the tile transposed)
//   with ldmatrix_x4_trans, of_a gives the tile itself as two B operands of 8 columns each, and of_b its transpose as an A operand
template <int Width, bool Swizzled = true> __device__ __forceinline__ uint32_t lane_of_a(uint32_t tile_smem, int row = 0) {
    return tile_smem + chunk_at<Width, Swizzled>(row + lane_id() % 16, lane_id() / 16);
}
template <int Width, bool Swizzled = true> __device__ __forceinline__ uint32_t lane_of_b(uint32_t tile_smem, int row = 0) {
    return tile_smem + chunk_at<Width, Swizzled>(row + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
}

// The A operand of M groups of 16 rows, Width columns: loaded from shared memory for every product, or (InRegisters) once by
// load_registers into Width / 16 * M * 4 registers. `bytes` is added behind the XOR of step_16: tiles of one shape share lane addresses,
// and the offset becomes part of the instruction.
template <int Width, int M, bool InRegisters, bool Swizzled = true> struct OperandA {
    uint32_t lane_smem;  // lane_of_a of the first row
    uint32_t bytes = 0;
    uint32_t reg[InRegisters ? Width / 16 : 1][M][4];

    __device__ __forceinline__ void load(uint32_t (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], step_16<Width, Swizzled>(lane_smem, k) + bytes + m * rows_16<Width>);
    }
    // The tile has arrived in shared memory.
    __device__ __forceinline__ void load_registers() {
        if constexpr (InRegisters) {
#pragma unroll
            for (int k = 0; k < Width / 16; ++k) load(reg[k], k);
        }
    }
    // Columns 16 * k to 16 * k + 15.
    __device__ __forceinline__ void get(uint32_t (&a)[M][4], int k) const {
        if constexpr (InRegisters) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = reg[k][m][i];
        } else load(a, k);
    }
};

// d += A B^T over the whole Width. B: 8 * N rows of Width in shared memory. Each fragment of B is used M times. Floats are rounded to
// tf32 in registers, and 32 bytes of a row are 8 elements instead of 16 (Width counts 16-bit elements).
template <class T, int Width, bool Swizzled, int M, int N, bool InRegisters>
__device__ __forceinline__ void multiply_abt(float (&d)[M][N][4], const OperandA<Width, M, InRegisters, Swizzled>& rows,
                                             uint32_t b_smem /* lane_of_b */, uint32_t b_bytes = 0) {
#pragma unroll
    for (int k = 0; k < Width / 16; ++k) {
        uint32_t a[M][4];
        rows.get(a, k);
#pragma unroll
        for (int m = 0; m < M; ++m) round_operand<T>(a[m]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, step_16<Width, Swizzled>(b_smem, k) + b_bytes + n / 2 * rows_16<Width>);
            round_operand<T>(b);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8<T>(d[m][n], a[m], b[0], b[1]);
                mma_m16n8<T>(d[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// d += A B for 16 columns of A. B: 16 rows of Width in shared memory, of which every Stride-th group of 16 columns: N / 2 of them.
template <class T, int Width, int Stride, bool Swizzled = true, int M, int N>
__device__ __forceinline__ void multiply_strided(float (&d)[M][N][4], const uint32_t (&a)[M][4], uint32_t b_smem /* lane_of_a */,
                                                 uint32_t b_bytes) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, step_16<Width, Swizzled>(b_smem, n / 2 * Stride) + b_bytes);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            mma_m16n8<T>(d[m][n], a[m], b[0], b[1]);
            mma_m16n8<T>(d[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// d += P B. P: 16 * M rows and 16 * K columns, in registers; B: 16 * K rows of Width, of which columns [0, 8 * N) from b_smem's on.
template <class T, int Width, bool Swizzled = true, int M, int N, int K>
__device__ __forceinline__ void multiply_pb(float (&d)[M][N][4], const uint32_t (&p)[K][M][4], uint32_t b_smem /* lane_of_a */) {
#pragma unroll
    for (int k = 0; k < K; ++k) multiply_strided<T, Width, 1, Swizzled>(d, p[k], b_smem, k * rows_16<Width>);
}

// Columns 16 * k to 16 * k + 15 of accumulators, rounded to 16 bit, as the A operand of the next product: no data moves between lanes.
template <class T, int M, int N> __device__ __forceinline__ void pack_step(uint32_t (&a)[M][4], const float (&d)[M][N][4], int k) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = pack<T>(d[m][2 * k + i / 2][i % 2 * 2], d[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// The same of all columns.
template <class T, int M, int N> __device__ __forceinline__ void pack_a(uint32_t (&a)[N / 2][M][4], const float (&d)[M][N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) pack_step<T>(a[k], d, k);
}

template <int M, int N> __device__ __forceinline__ void clear(float (&d)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[m][n][e] = 0;
}

// The sign bits of the elements in 32 bits.
template <class T> constexpr uint32_t sign_bits = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

// The part of a Rows x Width tile that one of Threads threads copies: 16 bytes of every row_step-th row.
template <class T, int Rows, int Width, int Threads, bool Swizzled = true> struct TileCopy {
    static constexpr int vec = vec_width<T>, chunks = Width / vec, row_step = Threads / chunks;
    static constexpr int wide = Width * int(sizeof(T)) / 2;  // in 16-bit elements
    // Where row_step is no multiple of 8 (Width 96), a thread's place in the line differs from row to row; a multiple of 4 has two places.
    static constexpr bool two_places = Swizzled && wide % 64 == 0 && row_step % 8 == 4;
    static constexpr bool even = Threads % chunks == 0 && (row_step % 8 == 0 || two_places) && Rows % row_step == 0;
    static constexpr int count = (Rows * chunks + Threads - 1) / Threads;

    static __device__ __forceinline__ int row(int i) {
        return even ? threadIdx.x / chunks + i * row_step : (threadIdx.x + i * Threads) / chunks;
    }
    static __device__ __forceinline__ int chunk(int i) { return even ? threadIdx.x % chunks : (threadIdx.x + i * Threads) % chunks; }
    static __device__ __forceinline__ uint32_t offset(int i) {
        if constexpr (even) return (chunk_at<wide, Swizzled>(row(0), chunk(0)) ^ (two_places ? i % 2 * 64 : 0)) + i * row_step * wide * 2;
        else return chunk_at<wide, Swizzled>(row(i), chunk(i));
    }

    // Starts cp.async copies; commit and wait are the caller's. Elements beyond the tensor (row >= rows, column >= head_dim) become
    // zero: P = 0 times NaN would be NaN.
    static __device__ __forceinline__ void copy_async(uint32_t tile_smem, const T* from /* [rows][head_dim] */, int pitch, int rows,
                                                      int head_dim) {
        if (even && rows >= Rows && head_dim == Width) {
            const T* at = from + int64_t(row(0)) * pitch + chunk(0) * vec;
#pragma unroll
            for (int i = 0; i < count; ++i, at += row_step * pitch) cp_async_16(tile_smem + offset(i), at);
        } else {
#pragma unroll 1  // the rare path: small code, few registers
            for (int i = 0; i < count; ++i) {
                if (Rows * chunks % Threads != 0 && row(i) >= Rows) break;
                const int bytes = row(i) < rows ? max(0, min(16, (head_dim - chunk(i) * vec) * int(sizeof(T)))) : 0;
                const T* at = bytes > 0 ? from + int64_t(row(i)) * pitch + chunk(i) * vec : from;
                cp_async_16_upto(tile_smem + offset(i), at, bytes);
            }
        }
    }

    // The same synchronously, through registers: all loads are issued, then the thread stalls until they arrive, then it stores. `flip`
    // is XORed to every 32 bits. The barrier is the caller's.
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
                store_vec(reinterpret_cast<uint32_t*>(tile + offset(i)), reg[i]);
            }
            return;
        }
#pragma unroll 1  // the rare path: small code, few registers
        for (int i = 0; i < count; ++i) {
            if (Rows * chunks % Threads != 0 && row(i) >= Rows) break;
            Vec<uint32_t, 4> reg = {};
            const int bytes = (head_dim - chunk(i) * vec) * int(sizeof(T));  // valid ones; behind them is the row's poison
            if (row(i) < rows && bytes > 0)
                reg = load_vec<4>(reinterpret_cast<const uint32_t*>(from + int64_t(row(i)) * pitch + chunk(i) * vec));
#pragma unroll
            for (int w = 0; w < 4; ++w) reg[w] = ((bytes <= 4 * w ? 0 : bytes < 4 * w + 4 ? 0xffff : 0xffffffff) & reg[w]) ^ flip;
            store_vec(reinterpret_cast<uint32_t*>(tile + offset(i)), reg);
        }
    }

    // The tile times the sign of `scale`, in place and exact: negated where scale < 0, zero where it is 0. For all threads of the block,
    // after a barrier; ends with one where it changed the tile.
    static __device__ __forceinline__ void apply_sign(T* tile_smem, double scale) {
        if (scale <= 0) {
#pragma unroll 1
            for (int i = threadIdx.x; i < Rows * wide / 2; i += Threads) {
                uint32_t& word = reinterpret_cast<uint32_t*>(tile_smem)[i];
                word = scale == 0 ? 0 : word ^ sign_bits<T>;
            }
            __syncthreads();
        }
    }
};

}  // namespace fa
