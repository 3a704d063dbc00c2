// The race check: shared-memory accesses that no barrier orders, whatever the schedule was.
//
// The kernel is compiled with -fsanitize=thread but not linked with its library: the calls that the compiler inserts come here.
// Shadow memory holds the last write and recent reads of every two bytes of shared memory. Each access is compared with them. Two
// accesses are ordered (happens-before) if a __syncthreads lies between them, which starts a new epoch, or a chain of __syncwarp,
// which the vector clocks follow. A shuffle orders nothing. Two atomics do not race, an atomic and a plain access do.
// Limits: of the reads of two bytes, one is kept for each parity of warp and lane. Global memory is not checked.
#pragma once

#include <stdint.h>
#include <string.h>

#include "block.hpp"
#include "report.hpp"

namespace fa_host {

struct Race {
    struct Access {
        uint64_t epoch;
        uint32_t clock;
        int16_t thread;
        uint8_t bytes;  // a bit for each of the two bytes
        bool atomic;
        bool in_flight;  // the write of an asynchronous copy: unordered until its thread has waited for it
        void* code;
    };
    struct Shadow {  // of two bytes of shared memory
        Access write, read[4];
    };
    static constexpr int dynamic_cells = arena_bytes / 2, static_cells = 64 << 10;
    static constexpr int max_reports = 8;

    enum Copying { no_copy, copy_started, copy_waited_for };

    Worker* worker;
    uint64_t epoch, block_epoch;
    uint64_t watched;  // accesses to shared memory in this launch
    uint32_t clock[max_threads];
    uint32_t vector_clock[max_threads][max_threads];  // [a][b]: the clock of b up to which a is ordered after b
    uint32_t joined[max_threads];
    Shadow shadow[dynamic_cells + static_cells];

    // Null where there is no address space.
    static Race* of(Worker& w) {
        if (!w.race_memory) {
            w.race_memory = reinterpret_cast<Race*>(map_memory(sizeof(Race)));
            if (!w.race_memory) return nullptr;
            w.race_memory->worker = &w;
            w.race_memory->epoch = 1;  // zeroed shadow memory is of epoch 0, so ordered before every access
            for (auto& c : w.race_memory->clock) c = 1;
        }
        return w.race_memory;
    }

    void new_block() { block_epoch = ++epoch; }
    void barrier() { ++epoch; }

    // A __syncwarp: joins the vector clocks of the lanes of mask. first: the thread of lane 0.
    void join(int first, unsigned mask) {
        int n = worker->threads;
        memset(joined, 0, sizeof(uint32_t) * n);
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            int t = first + __builtin_ctz(rest);
            vector_clock[t][t] = clock[t];
            for (int i = 0; i < n; ++i) joined[i] = joined[i] > vector_clock[t][i] ? joined[i] : vector_clock[t][i];
        }
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            int t = first + __builtin_ctz(rest);
            memcpy(vector_clock[t], joined, sizeof(uint32_t) * n);
            ++clock[t];
        }
    }

    bool ordered(const Access& before, int thread) const {
        if (before.in_flight && before.epoch >= block_epoch) return false;
        return before.epoch != epoch || before.thread == thread || vector_clock[thread][before.thread] >= before.clock;
    }

    void access(const char* address, size_t bytes, bool writes, void* code, int thread, Copying copying = no_copy, bool atomic = false) {
        long long at = address - worker->arena;
        int first;
        if (at >= 0 && at < worker->launch->dynamic_bytes) {
            first = int(at / 2);
        } else {
            at = address - worker->static_shared;
            if (!worker->static_shared || at < 0 || at >= worker->launch->static_bytes || at / 2 + 8 >= static_cells) return;
            first = dynamic_cells + int(at / 2);
        }
        ++watched;
        uint8_t mask = bytes == 1 ? (at & 1 ? 2 : 1) : 3;
        int cells = bytes == 1 ? 1 : int((bytes + (at & 1) + 1) / 2);
        Access now{epoch, clock[thread], int16_t(thread), mask, atomic, copying == copy_started, code};
        int slot = (thread / 32 & 1) * 2 + (thread & 1);
        for (int i = 0; i < cells; ++i) {
            Shadow& c = shadow[first + i];
            bool own_copy = copying == copy_waited_for && c.write.in_flight && c.write.thread == thread;
            if (!own_copy && !ordered(c.write, thread) && c.write.bytes & mask && !(c.write.atomic && atomic))
                report_race(c.write, true, now, writes, at);
            if (writes) {
                for (auto& read : c.read)
                    if (!ordered(read, thread) && read.bytes & mask) report_race(read, false, now, true, at);
                c.write = now;
            } else {
                c.read[slot] = now;
            }
        }
    }

    void report_race(const Access& before, bool wrote, const Access& now, bool writes, long long at) {
        static void* reported[max_reports][2];
        static int count;
        pthread_mutex_lock(&job->lock);
        if (job->outcome == ok) count = 0;
        bool known = count == max_reports;
        for (int i = 0; i < count && !known; ++i) known = reported[i][0] == before.code && reported[i][1] == now.code;
        if (!known) {
            reported[count][0] = before.code;
            reported[count++][1] = now.code;
            Dim3 b = worker->fiber[0].self.block_idx;
            print(
                "race on shared memory byte %lld in block (%u, %u, %u): thread %d %s at pc:%p, thread %d %s at pc:%p, no barrier orders them\n",
                at, b.x, b.y, b.z, before.thread,
                before.in_flight ? "has a copy in flight, begun"
                : wrote          ? "writes"
                                 : "reads",
                before.code, now.thread,
                now.in_flight ? "starts to copy"
                : writes      ? "writes"
                              : "reads",
                now.code);
        }
        if (job->outcome == ok) job->outcome = race;
        pthread_mutex_unlock(&job->lock);
    }
};

static inline void on_access(const void* address, size_t bytes, bool writes, void* code) {
    Worker* w = this_worker;
    if (w && w->race) w->race->access(static_cast<const char*>(address), bytes, writes, code, w->current);
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
