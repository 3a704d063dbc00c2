// The CPU meaning of <fa/async.cuh>. The data arrives as late as it may (host/async.hpp); until then the destination holds NaN.
#pragma once

#include <fa/types.cuh>

namespace fa {

__forceinline__ uint32_t smem_u32(const void* smem, FA_HOST_HERE) {
    auto at = uint64_t(static_cast<const char*>(smem) - fa_host_self->dynamic_shared);
    if (at > fa_host_self->dynamic_bytes) fa_host_fail("smem_u32 of what is not in the block's dynamic shared memory", file, line);
    return fa_host::shared_base + uint32_t(at);
}

namespace host {

// Where a 32-bit address points, if that many bytes are there and it is aligned.
__forceinline__ char* shared_at(uint32_t address, uint32_t bytes, uint32_t alignment, const char* word, const char* file, int line) {
    const uint32_t at = address - fa_host::shared_base, size = fa_host_self->dynamic_bytes;
    if (at > size || size - at < bytes || at % alignment) fa_host_bad_shared(word, address, bytes, alignment, file, line);
    return fa_host_self->dynamic_shared + at;
}

struct alignas(16) Bytes16 {
    unsigned char byte[16];
};

// The source is read here, in the kernel's code, so that a bad address is reported with the kernel's line.
__forceinline__ void copy_async(uint32_t to_smem, const void* from, int bytes, const char* word, const char* file, int line) {
    char* to = shared_at(to_smem, 16, 16, word, file, line);
    Bytes16 value{};
    if (unsigned(bytes) > 16) fa_host_fail("cp_async_16_upto of less than 0 or more than 16 bytes", file, line);
    if (bytes && reinterpret_cast<uint64_t>(from) % 16) fa_host_fail("cp_async from an address that is not 16-byte aligned", file, line);
    if (bytes == 16) value = *static_cast<const Bytes16*>(from);
    else
        for (int i = 0; i < bytes; ++i) value.byte[i] = static_cast<const unsigned char*>(from)[i];
    fa_host_cp_async(to, from, bytes, &value, file, line);
}

}  // namespace host

__forceinline__ void cp_async_16(uint32_t to_smem, const void* from, bool there = true, FA_HOST_HERE) {
    host::copy_async(to_smem, from, there ? 16 : 0, "cp_async_16", file, line);
}

__forceinline__ void cp_async_16_upto(uint32_t to_smem, const void* from, int bytes, FA_HOST_HERE) {
    host::copy_async(to_smem, from, bytes, "cp_async_16_upto", file, line);
}

__forceinline__ void cp_async_commit_group() { fa_host_cp_async_commit(); }

template <int N> __forceinline__ void cp_async_wait_group() {
    static_assert(N >= 0);
    fa_host_cp_async_wait(N);
}

}  // namespace fa
