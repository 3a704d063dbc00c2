// The CPU meaning of <fa/wgmma_float8.cuh>: fa/wgmma.cuh's words with the products of 8 bits.
#pragma once

#include <fa/float8.cuh>
#include <fa/wgmma.cuh>

namespace fa::host {

template <> constexpr auto* multiply_warpgroup<float8_e4m3> = FA_HOST_PRODUCT(wgmma_e4m3);
template <> constexpr auto* multiply_warpgroup<float8_e5m2> = FA_HOST_PRODUCT(wgmma_e5m2);

}  // namespace fa::host
