// The CPU meaning of <fa/wmma.cuh>. A fragment is cut into 64 chunks of 4 neighbours in a row, distributed over the lanes in a
// scrambled order, which is not a GPU's: a kernel that relies on a certain layout fails.
#pragma once

#include <fa/async.cuh>
#include <fa/collective.cuh>
#include <fa/tensor_core.cuh>

namespace fa {

template <class T> constexpr int wmma_registers = 0;
template <> constexpr int wmma_registers<float16> = 8;
template <> constexpr int wmma_registers<bfloat16> = 4;

template <class T> struct WmmaA {
    uint32_t reg[wmma_registers<T>];
};
template <class T> struct WmmaBRow {
    uint32_t reg[wmma_registers<T>];
};
template <class T> struct WmmaBCol {
    uint32_t reg[wmma_registers<T>];
};
struct WmmaAccumulator {
    float reg[8];
};

namespace host {

// The chunk that a lane holds in its first or second half: row chunk / 4, elements chunk % 4 * 4 and the 3 after it.
constexpr int chunk_of(int lane, int half) { return ((2 * lane + half) * 27 + 5) % 64; }

template <class T> struct WmmaTile {  // one lane's part in moving a fragment from or to memory
    void* reg;
    char* memory;
    int stride;
    const char* file;
    int line;
    void* code;
};

// What nvcc makes of a move: ldmatrix of an operand, for an accumulator four accesses of two neighbours in mma's layout.
template <class T> FA_HOST_COLLECTIVE count_rows(const WmmaTile<T>& tile) {
    const void* at[32];
    for (int part = 0; part < (sizeof(T) == 2 ? 1 : 4); ++part) {
        for (int i = 0; i < 32; ++i) {
            const int row = sizeof(T) == 2 ? i % 16 : i / 4 + part % 2 * 8, column = sizeof(T) == 2 ? i / 16 * 8 : i % 4 * 2 + part / 2 * 8;
            at[i] = tile.memory + (row * int64_t(tile.stride) + column) * int(sizeof(T));
        }
        fa_host_warp_access(at, sizeof(T) == 2 ? 16 : 8, tile.code);
    }
}

template <class T, bool STORES> FA_HOST_COLLECTIVE move_rows(void* const* lanes, unsigned) {
    const auto& first = *static_cast<WmmaTile<T>*>(lanes[0]);
    if (fa_host_self->banks) count_rows(first);
    for (int i = 0; i < 32; ++i) {
        auto& mine = *static_cast<WmmaTile<T>*>(lanes[i]);
        if (mine.memory != first.memory || mine.stride != first.stride)
            fa_host_fail("the lanes of a warp give a wmma word different addresses or strides", mine.file, mine.line);
        for (int half = 0; half < 2; ++half) {
            const int chunk = chunk_of(i, half);
            char* memory = mine.memory + (chunk / 4 * int64_t(mine.stride) + chunk % 4 * 4) * int(sizeof(T));
            char* reg = static_cast<char*>(mine.reg) + half * 4 * sizeof(T);
            __builtin_memcpy(STORES ? memory : reg, STORES ? reg : memory, 4 * sizeof(T));
            if (fa_host_self->race) fa_host_access(i, memory, 4 * sizeof(T), STORES, mine.code);
        }
    }
}

// Checks that 16 rows of 16 are in shared memory and aligned, and synchronises with the other lanes.
template <class T, bool STORES>
__forceinline__ void move_tile(void* reg, const T* smem, int stride, const char* word, const char* file, int line) {
    if (stride < 0 || stride * sizeof(T) % 16) fa_host_fail("the stride of a wmma word is not a multiple of 16 bytes", file, line);
    const uint32_t bytes = uint32_t((15 * stride + 16) * sizeof(T));
    char* memory = shared_at(smem_u32(smem, file, line), bytes, 32, word, file, line);
    collective(file, line);
    WmmaTile<T> mine{reg, memory, stride, file, line, fa_host_self->race || fa_host_self->banks ? fa_host_code() : nullptr};
    fa_host_warp(0xffffffffu, move_rows<T, STORES>, &mine, word, file, line);
}

// float16 fragments hold each element twice, as a GPU's do.
template <class T>
__forceinline__ void load_operand(uint32_t (&reg)[wmma_registers<T>], const T* from_smem, int stride, const char* word, const char* file,
                                  int line) {
    move_tile<T, false>(reg, from_smem, stride, word, file, line);
    for (int i = 4; i < wmma_registers<T>; ++i) reg[i] = reg[i - 4];
}

template <class T, bool B_BY_COLUMNS>
constexpr fa_host::Apply wmma_product = B_BY_COLUMNS ? FA_HOST_PRODUCT(wmma_col_f16) : FA_HOST_PRODUCT(wmma_row_f16);
template <bool B_BY_COLUMNS>
constexpr fa_host::Apply wmma_product<bfloat16, B_BY_COLUMNS> =
    B_BY_COLUMNS ? FA_HOST_PRODUCT(wmma_col_bf16) : FA_HOST_PRODUCT(wmma_row_bf16);

template <class T, bool B_BY_COLUMNS>
__forceinline__ void product(float (&d)[8], const uint32_t* a, const uint32_t* b, const char* file, int line) {
    static_assert(__is_same(T, float16) || __is_same(T, bfloat16));
    Collective& all = collective(file, line);
    const int chunk[2] = {chunk_of(fa_host_self->lane, 0), chunk_of(fa_host_self->lane, 1)};
    for (int half = 0; half < 2; ++half) {
        __builtin_memcpy(&all.wmma_a[chunk[half]], a + 2 * half, 8);
        __builtin_memcpy(&all.wmma_b[chunk[half]], b + 2 * half, 8);
        __builtin_memcpy(all.wmma_d[chunk[half]], d + 4 * half, 16);
    }
    fa_host_warp(0xffffffffu, wmma_product<T, B_BY_COLUMNS>, &all, "wmma_mma", file, line);
    for (int half = 0; half < 2; ++half) __builtin_memcpy(d + 4 * half, all.wmma_d[chunk[half]], 16);
}

}  // namespace host

template <class T> __forceinline__ void wmma_load_a_row(WmmaA<T>& a, const T* from_smem /* [16] rows */, int stride, FA_HOST_HERE) {
    host::load_operand<T>(a.reg, from_smem, stride, "wmma_load_a_row", file, line);
}
template <class T> __forceinline__ void wmma_load_b_row(WmmaBRow<T>& b, const T* from_smem /* [16] rows */, int stride, FA_HOST_HERE) {
    host::load_operand<T>(b.reg, from_smem, stride, "wmma_load_b_row", file, line);
}
template <class T> __forceinline__ void wmma_load_b_col(WmmaBCol<T>& b, const T* from_smem /* [16] columns */, int stride, FA_HOST_HERE) {
    host::load_operand<T>(b.reg, from_smem, stride, "wmma_load_b_col", file, line);
}
__forceinline__ void wmma_load_c_row(WmmaAccumulator& c, const float* from_smem /* [16] rows */, int stride, FA_HOST_HERE) {
    host::move_tile<float, false>(c.reg, from_smem, stride, "wmma_load_c_row", file, line);
}
__forceinline__ void wmma_store_d_row(float* to_smem /* [16] rows */, const WmmaAccumulator& d, int stride, FA_HOST_HERE) {
    host::move_tile<float, true>(const_cast<float*>(d.reg), to_smem, stride, "wmma_store_d_row", file, line);
}

template <class T> __forceinline__ void wmma_mma(WmmaAccumulator& d, const WmmaA<T>& a, const WmmaBRow<T>& b, FA_HOST_HERE) {
    host::product<T, false>(d.reg, a.reg, b.reg, file, line);
}
template <class T> __forceinline__ void wmma_mma(WmmaAccumulator& d, const WmmaA<T>& a, const WmmaBCol<T>& b, FA_HOST_HERE) {
    host::product<T, true>(d.reg, a.reg, b.reg, file, line);
}

}  // namespace fa
