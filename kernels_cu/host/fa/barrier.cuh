// The CPU meaning of <fa/barrier.cuh>: barrier.hpp of the engine. A wait switches to another fiber; a phase that cannot end is a report.
#pragma once

#include <fa/async.cuh>
#include <fa/warp.cuh>

namespace fa {

// Inlined also at -O1 (the race check), so that a report names the kernel's line.
__forceinline__ void mbarrier_init(uint64_t* barrier_smem, uint32_t count, FA_HOST_HERE) {
    fa_host_mbarrier_init(barrier_smem, count, file, line);
}
__forceinline__ void mbarrier_init_fence() { fa_host_mbarrier_init_fence(); }

__forceinline__ void mbarrier_arrive(uint64_t* barrier_smem, FA_HOST_HERE) {
    fa_host_mbarrier_arrive(barrier_smem, 0, "mbarrier_arrive", file, line);
}
__forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier_smem, uint32_t bytes, FA_HOST_HERE) {
    fa_host_mbarrier_arrive(barrier_smem, bytes, "mbarrier_arrive_expect_tx", file, line);
}

__forceinline__ void mbarrier_wait_parity(uint64_t* barrier_smem, uint32_t parity, FA_HOST_HERE) {
    if (!fa_host_mbarrier_test(barrier_smem, parity, file, line)) fa_host_mbarrier_wait(barrier_smem, parity, file, line);
}
__forceinline__ bool mbarrier_test_parity(uint64_t* barrier_smem, uint32_t parity, FA_HOST_HERE) {
    if (fa_host_mbarrier_test(barrier_smem, parity, file, line)) return true;
    fa_host_yield();
    return false;
}

__forceinline__ void bar_sync(int id, int threads, FA_HOST_HERE) { fa_host_bar_sync(id, threads, file, line); }
__forceinline__ void barrier_sync(int id, int threads, FA_HOST_HERE) { fa_host_bar_sync(id, threads, file, line); }
__forceinline__ void bar_arrive(int id, int threads, FA_HOST_HERE) { fa_host_bar_arrive(id, threads, file, line); }

__forceinline__ void fence_proxy_async_shared() { fa_host_proxy_fence(); }
__forceinline__ void fence_proxy_async_global() { fa_host_proxy_fence_global(); }

// Registers are not counted here; `fa-cli compile` sees what a GPU does with these.
template <int N> __forceinline__ void setmaxnreg_inc() { static_assert(N >= 24 && N <= 256 && N % 8 == 0); }
template <int N> __forceinline__ void setmaxnreg_dec() { static_assert(N >= 24 && N <= 256 && N % 8 == 0); }

__forceinline__ int warpgroup_index() { return int(threadIdx.x) / 128; }

__forceinline__ void schedule_fence() {}

}  // namespace fa
