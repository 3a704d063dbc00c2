// Asynchronous copies from global to shared memory (cp.async, sm_80). The data never passes through registers: a thread issues the copy
// and continues. It may read the destination only after it has waited for the copy's group; other threads only after a barrier behind
// that wait.
#pragma once

#include <fa/types.cuh>

namespace fa {

// An address in shared memory as the instructions below take it: 32 bits, so that offsets are one 32-bit addition.
__device__ __forceinline__ uint32_t smem_u32(const void* smem) { return uint32_t(__cvta_generic_to_shared(smem)); }

// Starts to copy 16 bytes, both sides 16-byte aligned; zeros where the source is not `there` (its address is then not read).
// .cg: through the L2 cache only, because a block reads a tile once.
__device__ __forceinline__ void cp_async_16(uint32_t to_smem, const void* from, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_smem), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// The same, of which only the first `bytes` (0 to 16) come from global memory; the rest become zero.
__device__ __forceinline__ void cp_async_16_upto(uint32_t to_smem, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_smem), "l"(from), "r"(bytes) : "memory");
}

// Closes the group of copies that this thread has started since the last one. A group may be empty.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest N groups of this thread have arrived.
template <int N> __device__ __forceinline__ void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

}  // namespace fa
