// The race check: shared-memory accesses that no barrier orders, found whatever the schedule was.
//
// The kernel is compiled with -fsanitize=thread but without its library: the calls the compiler inserts come here instead.
// Every access to shared memory is held against the last write and recent reads of the same two bytes. Two accesses are
// ordered if a __syncthreads lies between them (the epoch moved on) or a chain of __syncwarp does (vector clocks). A shuffle
// orders nothing. Atomics do not race with each other, but with plain accesses. Limits: of the reads of a place, one per parity of warp and lane is remembered; global memory is not watched.
#pragma once

namespace fa_host {

struct Race {
    struct Access {
        uint64_t epoch;
        uint32_t clock;
        int16_t thread;
        uint8_t part;  // 3: both bytes; 1, 2: a one-byte access
        bool atomic;
        bool flying;  // the write of a copy in flight, which nothing orders until it is waited for
        void* code;
    };
    struct Cell {
        Access write, read[4];
    };
    static constexpr int dynamic_cells = arena_bytes / 2, static_cells = 64 << 10;
    static constexpr int most_reports = 8;

    enum Copying { no_copy, in_flight, landed };

    Worker* worker;
    uint64_t epoch, block_epoch;
    uint32_t clock[max_threads];
    uint32_t seen[max_threads][max_threads];  // seen[a][b]: the clock of b up to which a is ordered after b
    uint32_t joined[max_threads];
    Cell cell[dynamic_cells + static_cells];

    static Race* of(Worker& w) {
        if (!w.race_memory) {
            void* memory = mmap(nullptr, sizeof(Race), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) abort();
            w.race_memory = static_cast<Race*>(memory);
            w.race_memory->worker = &w;
            w.race_memory->epoch = 1;  // zeroed cells are of epoch 0, so ordered before everything
            for (auto& c : w.race_memory->clock) c = 1;
        }
        return w.race_memory;
    }

    void new_block() { block_epoch = ++epoch; }
    void barrier() { ++epoch; }

    // The lanes of mask, first thread of the warp given, have all seen what each of them had seen.
    void meet(int first, unsigned mask) {
        int n = worker->threads;
        memset(joined, 0, sizeof(uint32_t) * n);
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            int t = first + __builtin_ctz(rest);
            seen[t][t] = clock[t];
            for (int i = 0; i < n; ++i) joined[i] = joined[i] > seen[t][i] ? joined[i] : seen[t][i];
        }
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            int t = first + __builtin_ctz(rest);
            memcpy(seen[t], joined, sizeof(uint32_t) * n);
            ++clock[t];
        }
    }

    bool ordered(const Access& before, int thread) const {
        if (before.flying && before.epoch >= block_epoch) return false;
        return before.epoch != epoch || before.thread == thread || seen[thread][before.thread] >= before.clock;
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
        uint8_t part = bytes == 1 ? (at & 1 ? 2 : 1) : 3;
        int cells = bytes == 1 ? 1 : int((bytes + (at & 1) + 1) / 2);
        Access now{epoch, clock[thread], int16_t(thread), part, atomic, copying == in_flight, code};
        int slot = (thread / 32 & 1) * 2 + (thread & 1);
        for (int i = 0; i < cells; ++i) {
            Cell& c = cell[first + i];
            bool own_copy = copying == landed && c.write.flying && c.write.thread == thread;
            if (!own_copy && !ordered(c.write, thread) && c.write.part & part && !(c.write.atomic && atomic))
                tell(c.write, true, now, writes, at);
            if (writes) {
                for (auto& read : c.read)
                    if (!ordered(read, thread) && read.part & part) tell(read, false, now, true, at);
                c.write = now;
            } else {
                c.read[slot] = now;
            }
        }
    }

    void tell(const Access& before, bool wrote, const Access& now, bool writes, long long at) {
        static void* told[most_reports][2];
        static int count;
        pthread_mutex_lock(&job->lock);
        if (job->outcome == ok) count = 0;
        bool known = count == most_reports;
        for (int i = 0; i < count && !known; ++i) known = told[i][0] == before.code && told[i][1] == now.code;
        if (!known) {
            told[count][0] = before.code;
            told[count++][1] = now.code;
            Dim3 b = worker->fiber[0].self.block_idx;
            say("race on shared memory byte %lld in block (%u, %u, %u): thread %d %s at pc:%p, thread %d %s at pc:%p, nothing orders them\n",
                at, b.x, b.y, b.z, before.thread,
                before.flying ? "has a copy in flight, begun"
                : wrote       ? "writes"
                              : "reads",
                before.code, now.thread,
                now.flying ? "starts to copy"
                : writes   ? "writes"
                           : "reads",
                now.code);
        }
        if (job->outcome == ok) job->outcome = race;
        pthread_mutex_unlock(&job->lock);
    }
};

static inline void hook(const void* address, size_t bytes, bool writes, void* code) {
    Worker* w = here;
    if (w && w->race) w->race->access(static_cast<const char*>(address), bytes, writes, code, w->current);
}

}  // namespace fa_host

// What the compiler calls for each memory access under -fsanitize=thread.
#define FA_HOST_HOOK(bytes)                                                                                     \
    void __tsan_read##bytes(void* a) { fa_host::hook(a, bytes, false, __builtin_return_address(0)); }           \
    void __tsan_write##bytes(void* a) { fa_host::hook(a, bytes, true, __builtin_return_address(0)); }           \
    void __tsan_unaligned_read##bytes(void* a) { fa_host::hook(a, bytes, false, __builtin_return_address(0)); } \
    void __tsan_unaligned_write##bytes(void* a) { fa_host::hook(a, bytes, true, __builtin_return_address(0)); } \
    void __tsan_volatile_read##bytes(void* a) { fa_host::hook(a, bytes, false, __builtin_return_address(0)); }  \
    void __tsan_volatile_write##bytes(void* a) { fa_host::hook(a, bytes, true, __builtin_return_address(0)); }

extern "C" {
FA_HOST_HOOK(1)
FA_HOST_HOOK(2)
FA_HOST_HOOK(4)
FA_HOST_HOOK(8)
FA_HOST_HOOK(16)
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
    fa_host::hook(from, n, false, __builtin_return_address(0));
    fa_host::hook(to, n, true, __builtin_return_address(0));
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
    fa_host::hook(from, n, false, __builtin_return_address(0));
    fa_host::hook(to, n, true, __builtin_return_address(0));
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
    fa_host::hook(to, n, true, __builtin_return_address(0));
    return memset(to, value, n);
}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_read_range(void* a, unsigned long n) { fa_host::hook(a, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* a, unsigned long n) { fa_host::hook(a, n, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#undef FA_HOST_HOOK
