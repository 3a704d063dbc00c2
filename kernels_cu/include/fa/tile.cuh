// Tiles in shared memory for the wide register tiles of step 07, and the two products that attention on CUDA cores consists of.
//
// A block is Threads threads. Lanes lanes of a warp share 8 resident rows (of the output, and of the scores); its lane among them and
// its first resident row identify a thread. The rows of the other side are streamed, tile after tile. Everything in shared memory
// is float, whatever the storage type T.
//
//   Two layouts:
//     transposed [Width][N]   the resident operand, loaded once: a thread reads its 8 rows of one column in two loads
//     by rows    [N][Width]   the streamed operand: one layout serves both products, which read it along and across
//   and P [streamed][resident], the scores between the lanes that compute them and the lanes that use them.
//
// Banks. Shared memory has 32 banks of 4 bytes; a 16-byte access is served 8 lanes at a time, so 8 lanes must touch the 8
// different quads (4 floats, 4 banks) of a 128-byte line, or the same address. Every layout here is a multiple of 32 floats
// wide, so plain rows would conflict. Each is swizzled: the place in the line is XORed with a few bits of the row. An XOR permutes the
// line and needs no padding, so tiles stay 16-byte aligned and of round size.
//
// An XOR in an address costs instructions, and registers that hold what it gives. With Swizzle = false rows are plain, and every address
// in a product's loop is a register and a constant. Where 8 lanes meet 8 rows at one column, the caller pads the rows by 4 floats.
#pragma once

#include <fa/async.cuh>
#include <fa/row.cuh>

namespace fa {

constexpr int resident_rows = 8;  // of a thread

// The quad of its line that holds a streamed row's first quad. Any 8 neighbouring rows get 8 different ones (multiply_rows reads 8
// rows at one column). A warp writes 8 rows by 4 chunks of 16 bytes of T, two rows every 8 lanes: those two get the two halves
// of the line where a chunk is one quad (float), the odd and the even quads where it is two (16-bit types).
template <class T> __device__ __forceinline__ int spread(int row) { return sizeof(T) == 4 ? row % 2 * 4 + row / 2 % 4 : row % 8; }

// Element (row, column) of a streamed tile.
template <class T, int Width> __device__ __forceinline__ int by_rows(int row, int column) {
    return row * Width + (column ^ (4 * spread<T>(row)));
}

// Element (row, column) of a resident tile of N rows. A warp writes 8 rows by 4 chunks: 4 groups of 8 banks.
template <class T, int N, bool Swizzle = true> __device__ __forceinline__ int transposed(int row, int column) {
    return column * N + (Swizzle ? row ^ (8 * (column / vec_width<T> % 4)) : row);
}

// P of one streamed and one resident row, N resident rows in all. Written 8 streamed rows at a time, 4 resident rows each: 8 quads.
template <int N, bool Swizzle = true> __device__ __forceinline__ int score_at(int streamed, int resident) {
    return streamed * N + (Swizzle ? resident ^ (4 * (streamed % 8)) : resident);
}

// N rows by Columns of a tensor, staged in registers between global and shared memory, into a tile Width columns wide: the part of
// one thread. A warp loads patches of 8 rows by 64 bytes, whole 32-byte sectors of each row. Between fetch and store_… stands a
// product that hides the latency of the load. So fetch must not use what it loads (the thread would stall), and it holds raw 32-bit
// words: 16-bit elements one by one would take twice the registers.
template <class T, int Width, int Threads, int N, int Columns = Width> struct Staged {
    static constexpr int vec = vec_width<T>, in_word = 4 / sizeof(T), row_step = Threads / 4, column_step = 4 * vec;
    static constexpr int row_steps = N / row_step, column_steps = Columns / column_step;
    static_assert(row_steps * row_step == N && column_steps * column_step == Columns, "patches cover the tile exactly");
    Vec<uint32_t, 4> reg[row_steps][column_steps];

    static __device__ __forceinline__ int row() { return threadIdx.x / 4; }
    static __device__ __forceinline__ int column() { return threadIdx.x % 4 * vec; }

    // from: the tile's first row, rows `pitch` elements apart. Zero beyond the tensor (row >= rows, column >= head_dim).
    __device__ __forceinline__ void fetch(const T* from /* [rows][head_dim] */, int pitch, int rows, int head_dim) {
#pragma unroll
        for (int r = 0; r < row_steps; ++r)
#pragma unroll
            for (int c = 0; c < column_steps; ++c) {
                const T* at = from + (row() + r * row_step) * pitch + column() + c * column_step;
                const bool there = row() + r * row_step < rows && column() + c * column_step < head_dim;
                reg[r][c] = there ? load_vec<4>(reinterpret_cast<const uint32_t*>(at)) : Vec<uint32_t, 4>{};
            }
    }

    // Where head_dim does not fill its last 16 bytes, the rest of them is the row's poison: set to zero.
    __device__ __forceinline__ void clear_beyond(int head_dim) {
        if (head_dim % vec == 0) return;
#pragma unroll
        for (int c = 0; c < column_steps; ++c)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int valid = head_dim - column() - c * column_step - w * in_word;  // elements of the word
                const uint32_t mask = valid <= 0 ? 0 : valid < in_word ? 0xffff : 0xffffffff;
#pragma unroll
                for (int r = 0; r < row_steps; ++r) reg[r][c][w] &= mask;
            }
    }

    __device__ __forceinline__ float element(int r, int c, int e) const {
        const uint32_t word = reg[r][c][e / in_word];
        if constexpr (sizeof(T) == 4) return __uint_as_float(word);
        else return widen(T{uint16_t(word >> (16 * (e % 2)))});
    }

    // In both stores, the part of an address that is a multiple of whole lines stays out of the XOR: it becomes an immediate offset.
    template <bool Swizzle = true>
    __device__ __forceinline__ void store_transposed(float* smem /* [Width][N] */, int head_dim, float factor = 1.0f) {
        clear_beyond(head_dim);
#pragma unroll
        for (int r = 0; r < row_steps; ++r) {
            float* to = smem + transposed<T, N, Swizzle>(row() + r * row_step % 32, column()) + r * row_step / 32 * 32;
#pragma unroll
            for (int c = 0; c < column_steps; ++c)
#pragma unroll
                for (int e = 0; e < vec; ++e) to[(c * column_step + e) * N] = element(r, c, e) * factor;
        }
    }

    __device__ __forceinline__ void store_by_rows(float* smem /* [N][Width] */, int head_dim) {
        clear_beyond(head_dim);
#pragma unroll
        for (int c = 0; c < column_steps; ++c)
#pragma unroll
            for (int e = 0; e < vec; e += 4) {
                const int far = c * column_step + e;
                float* to = smem + by_rows<T, Width>(row(), column() + far % 32) + far / 32 * 32;
#pragma unroll
                for (int r = 0; r < row_steps; ++r)
                    store_vec(to + r * row_step * Width,
                              Vec<float, 4>{element(r, c, e), element(r, c, e + 1), element(r, c, e + 2), element(r, c, e + 3)});
            }
    }
};

// What Staged does, for float and without registers: cp.async (sm_80) brings N rows of Columns from global memory into plain rows. They
// are there after cp_async_wait_group<0>. Zero beyond the tensor (row >= rows, column >= head_dim).
template <int Width, int Threads, int N, int Columns>
__device__ __forceinline__ void copy_by_rows(float* smem /* [N][Width] */, const float* from /* [rows][head_dim] */, int pitch, int rows,
                                             int head_dim) {
    constexpr int in_row = Columns / 4, step = Threads / in_row;  // threads to a row; rows at a time
    static_assert(in_row * step == Threads && N % step == 0, "the copies cover the tile exactly");
    const int row = threadIdx.x / in_row, column = threadIdx.x % in_row * 4;
    const uint32_t to = smem_u32(smem + row * Width + column);
    const float* at = from + row * pitch + column;
    if (rows >= N && head_dim >= Columns) {
#pragma unroll
        for (int r = 0; r < N; r += step, at += step * pitch) cp_async_16(to + 4 * r * Width, at);
    } else {  // the rare path: small code, no predicates kept in registers
        const int bytes = max(0, min(16, 4 * (head_dim - column)));
#pragma unroll 1
        for (int r = 0; r < N; r += step, at += step * pitch) cp_async_16_upto(to + 4 * r * Width, at, row + r < rows ? bytes : 0);
    }
    cp_async_commit_group();
}

// score_reg[j][i] += sum over columns [first, last) of resident row (row + i) * streamed row (lane + Lanes j). Four columns at a
// time: 8 + Count loads of 16 bytes for 32 * Count multiply-adds.
template <class T, int Width, int Lanes, int N, int Count, int Unroll = 1, bool Swizzle = true>
__device__ __forceinline__ void multiply_rows(float (&score_reg)[Count][resident_rows],
                                              const float* resident_smem /* [Width][N] transposed */,
                                              const float* streamed_smem /* [Lanes * Count][Width] by rows */, int row, int lane,
                                              int first = 0, int last = Width) {
    const float* a_from = resident_smem + first * N + row;
    const float* b_from = streamed_smem + lane * Width + first;
#pragma unroll Unroll
    for (int column = first; column < last; column += 4, a_from += 4 * N, b_from += 4) {
        if constexpr (Swizzle) {
            a_from = resident_smem + transposed<T, N>(row, column);
            b_from = streamed_smem + by_rows<T, Width>(lane, column);
        }
        Vec<float, 4> b[Count];
#pragma unroll
        for (int j = 0; j < Count; ++j) b[j] = load_vec<4>(b_from + j * Lanes * Width);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            Vec<float, 4> a[2] = {load_vec<4>(a_from + e * N), load_vec<4>(a_from + e * N + 4)};
#pragma unroll
            for (int j = 0; j < Count; ++j)
#pragma unroll
                for (int i = 0; i < resident_rows; ++i) score_reg[j][i] += a[i / 4][i % 4] * b[j][e];
        }
    }
}

// Writes score_reg[j][i], or one of its Parts, to shared memory for the other lanes of the row: Count / Parts * 2 stores of 16 bytes.
template <int Lanes, int N, int Parts = 1, bool Swizzle = true, int Count>
__device__ __forceinline__ void share_scores(float* score_smem /* [Lanes * Count / Parts][N] */,
                                             const float (&score_reg)[Count][resident_rows], int row, int lane, int part = 0) {
#pragma unroll
    for (int j = 0; j < Count / Parts; ++j)
#pragma unroll
        for (int h = 0; h < resident_rows; h += 4) {
            const float (&of_key)[resident_rows] = score_reg[part * (Count / Parts) + j];
            Vec<float, 4> quad = {of_key[h], of_key[h + 1], of_key[h + 2], of_key[h + 3]};
            store_vec(score_smem + score_at<N, Swizzle>(lane, row + h) + j * Lanes * N, quad);
        }
}

// tile_reg[i][c] += sum over streamed rows of P[streamed][row + i] * tile[streamed][output_column(c)]. The streamed rows are
// taken 0, 8, 16 … then 1, 9, 17 …: in that order both XORs change every Streamed / 8 rows only. [first, last) of these 8 rounds.
template <class T, int Width, int Lanes, int N, int Streamed, bool Swizzle = true>
__device__ __forceinline__ void multiply_scores(float (&tile_reg)[resident_rows][Width / Lanes],
                                                const float* score_smem /* [Streamed][N] */,
                                                const float* streamed_smem /* [Streamed][Width] by rows */, int row, int lane,
                                                int first = 0, int last = 8) {
    constexpr int columns = Width / Lanes, v = output_vec<columns>;
    const float* p_low = score_smem + first * N + row;
    const float* p_high = p_low + 4;
    const float* b_from = streamed_smem + first * Width + output_column<columns, Lanes>(lane, 0);
#pragma unroll 1
    for (int round = first; round < last; ++round, p_low += N, p_high += N, b_from += Width) {
        if constexpr (Swizzle) {
            p_low = score_smem + score_at<N>(round, row);
            p_high = score_smem + score_at<N>(round, row + 4);
            b_from = streamed_smem + by_rows<T, Width>(round, output_column<columns, Lanes>(lane, 0));
        }
#pragma unroll
        for (int m = 0; m < Streamed; m += 8) {
            Vec<float, 4> p[2] = {load_vec<4>(p_low + m * N), load_vec<4>(p_high + m * N)};
            Vec<float, v> b[columns / v];
#pragma unroll
            for (int c = 0; c < columns / v; ++c) b[c] = load_vec<v>(b_from + m * Width + c * v * Lanes);
#pragma unroll
            for (int i = 0; i < resident_rows; ++i)
#pragma unroll
                for (int c = 0; c < columns; ++c) tile_reg[i][c] += p[i / 4][i % 4] * b[c / v][c % v];
        }
    }
}

}  // namespace fa
