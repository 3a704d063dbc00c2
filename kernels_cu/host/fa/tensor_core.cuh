// The products of a tensor core, which <fa/mma.cuh>, <fa/wmma.cuh> and <fa/wgmma.cuh> speak of. They are compiled once, not with each
// kernel (host/tensor_core.cpp), for the architecture whose arithmetic they have: FA_HOST_SM, 80 or 90, is a part of their names.
#pragma once

#include <fa/types.cuh>

#ifndef FA_HOST_SM
#define FA_HOST_SM 90
#endif

#define FA_HOST_JOIN(sm, name) fa_host_sm##sm##_##name
#define FA_HOST_NAMED(sm, name) FA_HOST_JOIN(sm, name)
#define FA_HOST_PRODUCT(name) FA_HOST_NAMED(FA_HOST_SM, name)

#pragma GCC visibility push(default)
extern "C" {

// A warp's products on the operands in its Collective (collective.cuh).
void FA_HOST_PRODUCT(mma_f16)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(mma_bf16)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(mma_tf32)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(mma_e4m3)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(mma_e5m2)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(wmma_row_f16)(void* const* lanes, unsigned mask);  // b given by rows, and by columns
void FA_HOST_PRODUCT(wmma_row_bf16)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(wmma_col_f16)(void* const* lanes, unsigned mask);
void FA_HOST_PRODUCT(wmma_col_bf16)(void* const* lanes, unsigned mask);

// A warpgroup's, one step of 32 bytes along K: d[warp][column][16 rows] += a[64][16] b[column][16]. Of 8-bit types each holds two.
void FA_HOST_PRODUCT(wgmma_f16)(float* d, const unsigned short* a, const unsigned short* b, int columns);
void FA_HOST_PRODUCT(wgmma_bf16)(float* d, const unsigned short* a, const unsigned short* b, int columns);
void FA_HOST_PRODUCT(wgmma_e4m3)(float* d, const unsigned short* a, const unsigned short* b, int columns);
void FA_HOST_PRODUCT(wgmma_e5m2)(float* d, const unsigned short* a, const unsigned short* b, int columns);

}  // extern "C"
#pragma GCC visibility pop
