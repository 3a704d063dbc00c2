// Barriers between some of a block's threads (sm_90), and what belongs to specialised warps.
//
// An mbarrier is 8 bytes of shared memory: a count of arrivals that are still to come, a count of bytes that are still to come, and the
// phase, one bit that flips when both are zero. A wait names the parity of the phase whose end it waits for; a wait for the phase before
// the current one passes at once. So the consumers of a ring of stages begin with parity 0 and its producer with parity 1, and both flip
// whenever the ring wraps. (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".)
#pragma once

#include <fa/async.cuh>
#include <fa/warp.cuh>

namespace fa {

// `count` threads arrive in each phase. One thread initialises; then mbarrier_init_fence and a __syncthreads, before the first use.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier_smem, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(barrier_smem)), "r"(count) : "memory");
}
// Makes the initialisation visible to asynchronous copies, which complete barriers through another path than this thread's stores.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier_smem) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(barrier_smem)) : "memory");
}
// Arrives and adds `bytes` to those that asynchronous copies still have to deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier_smem, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(barrier_smem)), "r"(bytes) : "memory");
}

// Waits for the end of the phase of a parity. try_wait suspends the thread for a time that the hardware limits, so the loop hardly polls.
// After some ten seconds without success it traps: a deadlock is an error, not a hang. They are counted by the upper half of globaltimer, in
// 2^32 ns: under compute-sanitizer a million tries take no time. The loop and its trap are one asm: a branch in C++ between an asynchronous
// product and its wait makes the compiler spill accumulators.
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t* barrier_smem, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        ".reg .u32 began, now;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@done bra DONE;\n"
        "mov.u32 began, %%globaltimer_hi;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@done bra DONE;\n"
        "mov.u32 now, %%globaltimer_hi;\n"
        "sub.u32 now, now, began;\n"
        "setp.lt.u32 done, now, 3;\n"
        "@done bra WAIT;\n"
        "trap;\n"
        "DONE:\n"
        "}\n" ::"r"(smem_u32(barrier_smem)),
        "r"(parity)
        : "memory");
}
// Whether the phase of a parity has ended, without a wait.
__device__ __forceinline__ bool mbarrier_test_parity(uint64_t* barrier_smem, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(smem_u32(barrier_smem)), "r"(parity)
        : "memory");
    return done;
}

// The named barriers 1 to 15 (0 is __syncthreads). `threads`: all that arrive or wait, a multiple of 32. sync arrives and waits; arrive
// only arrives. All that wait at bar_sync wait at one instruction (PTX ISA: barrier.sync.aligned). Where they may come by different ways,
// of which the compiler makes a copy each, barrier_sync is for that; it costs an instruction more.
__device__ __forceinline__ void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Makes this thread's ordinary stores to shared memory visible to the asynchronous proxy: to wgmma operands and TMA stores. A barrier with
// the thread that issues those comes behind it.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory: between stores and the TMA loads of the same launch, and between a turn that this thread has waited for
// (fa/atomic.cuh) and its bulk reductions. None is needed before it passes the turn: a bulk operation that is complete is as if it were
// behind one. One instruction, where that for all memory is a fence of the GPU too.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Registers move between warpgroups: a producer, which only issues copies, gives back what it does not need, and consumers take it. N is a
// multiple of 8 from 24 to 256, for every thread of the warpgroup; inc waits until there are that many.
template <int N> __device__ __forceinline__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// The warpgroup (128 threads) of this thread, as a value that the compiler knows to be the same in the whole warp: what depends on it stays
// in uniform registers.
__device__ __forceinline__ int warpgroup_index() { return __shfl_sync(full_warp, int(threadIdx.x) / 128, 0); }

// The compiler moves no instruction across it. It costs one issue slot (pmevent triggers a performance monitor nobody listens to).
__device__ __forceinline__ void schedule_fence() { asm volatile("pmevent 0;" ::: "memory"); }

}  // namespace fa
