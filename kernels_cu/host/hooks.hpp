// The functions that -fsanitize=thread calls at each memory access: of shared memory for the race check, of all for the count of traffic, of
// registers for those that a wgmma in flight reads or writes.
#pragma once

#include <string.h>

#include "banks.hpp"
#include "block.hpp"
#include "global.hpp"
#include "race.hpp"
#include "wgmma.hpp"

namespace fa_host {

static inline void on_access(const void* address, size_t bytes, bool writes, void* code) {
    Worker* w = this_worker;
    if (!w) return;
    if (w->banks) w->banks->access(w->current, static_cast<const char*>(address), bytes, code, writes ? of_store : of_load);
    if (!w->race) return;
    const int thread = w->first_clock + int(w->current);
    const bool is_shared = w->race->access(static_cast<const char*>(address), bytes, writes, code, thread);
    if (writes && w->cluster && (is_shared || global.watches(address))) w->race->clocks->loads_complete(thread);
    if (is_shared) return;
    if (global.on) global.access(*w, address, bytes, writes, code, thread);
    if (w->wgmma) w->wgmma->touched(*w, static_cast<const char*>(address), bytes, writes, code);
}

}  // namespace fa_host

// The functions that -fsanitize=thread calls at each memory access.
#define FA_HOST_HOOK(bytes)                                                                                          \
    void __tsan_read##bytes(void* a) { fa_host::on_access(a, bytes, false, __builtin_return_address(0)); }           \
    void __tsan_write##bytes(void* a) { fa_host::on_access(a, bytes, true, __builtin_return_address(0)); }           \
    void __tsan_unaligned_read##bytes(void* a) { fa_host::on_access(a, bytes, false, __builtin_return_address(0)); } \
    void __tsan_unaligned_write##bytes(void* a) { fa_host::on_access(a, bytes, true, __builtin_return_address(0)); } \
    void __tsan_volatile_read##bytes(void* a) { fa_host::on_access(a, bytes, false, __builtin_return_address(0)); }  \
    void __tsan_volatile_write##bytes(void* a) { fa_host::on_access(a, bytes, true, __builtin_return_address(0)); }

extern "C" {
FA_HOST_HOOK(1)
FA_HOST_HOOK(2)
FA_HOST_HOOK(4)
FA_HOST_HOOK(8)
FA_HOST_HOOK(16)
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
    fa_host::on_access(from, n, false, __builtin_return_address(0));
    fa_host::on_access(to, n, true, __builtin_return_address(0));
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
    fa_host::on_access(from, n, false, __builtin_return_address(0));
    fa_host::on_access(to, n, true, __builtin_return_address(0));
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
    fa_host::on_access(to, n, true, __builtin_return_address(0));
    return memset(to, value, n);
}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_read_range(void* a, unsigned long n) { fa_host::on_access(a, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* a, unsigned long n) { fa_host::on_access(a, n, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#undef FA_HOST_HOOK
