// The CPU meaning of <fa/cache.cuh>. A discarded line holds NaN: who reads it after all is found out.
#pragma once

#include <fa/copy.cuh>
#include <fa/tma.cuh>

namespace fa {

template <int N, class T> __forceinline__ Vec<T, N> load_vec_last(const T* from, FA_HOST_HERE) {
    static_assert(sizeof(T) * N == 16, "a load of 16 bytes");
    if (reinterpret_cast<uint64_t>(from) % 16) fa_host_fail("load_vec_last from an address that is not 16-byte aligned", file, line);
    return load_vec<N>(from);
}

__forceinline__ void discard_line(void* line_gmem, FA_HOST_HERE) {
    if (reinterpret_cast<uint64_t>(line_gmem) % 128) fa_host_fail("discard_line of an address that is not 128-byte aligned", file, line);
    for (int i = 0; i < 32; ++i) static_cast<uint32_t*>(line_gmem)[i] = 0x7fffffffu;
}

}  // namespace fa
