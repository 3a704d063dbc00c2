// Barriers: __syncthreads and bar.sync, whose number and threads the kernel names, and mbarriers, 8 bytes of shared memory each.
//
// All are one object (block.hpp): threads arrive, bytes arrive, and when none is missing a phase completes. It releases the fibers that
// wait for it and hands them what its arrivals knew (clocks.hpp). The 8 bytes of an mbarrier hold its number: what was never initialised,
// or was overwritten, is told from an mbarrier.
#pragma once

#include <string.h>

#include "block.hpp"
#include "fiber.hpp"
#include "race.hpp"
#include "report.hpp"
#include "scheduler.hpp"

namespace fa_host {

constexpr unsigned long long mbarrier_token = 0xfaba'77e7'0000'0000ull;
constexpr unsigned most_arrivals = (1 << 20) - 1;
constexpr long long most_bytes = (1 << 20) - 1;

static inline void new_block_barriers(Worker& w) {
    w.mbarriers = 0;
    w.barrier[0].arrived = 0;
    for (unsigned rest = w.used_named; rest; rest &= rest - 1) memset(&w.barrier[__builtin_ctz(rest)], 0, sizeof(Barrier));
    w.used_named = 0;
    for (int i = 0; i < w.threads / 128; ++i) w.warpgroup[i].arrived = 0;
}

// The number of a barrier among those of the race check's clocks.
static inline int clock_of(const Worker& w, int number) {
    if (number < named_barriers) return w.rank * named_barriers + number;
    return number == cluster_barrier ? Clocks::whole_cluster : Clocks::first_mbarrier + w.barrier[number].clock;
}

// The clock of the running thread.
static inline int own_clock() { return this_worker->first_clock + int(this_worker->current); }

// A phase of a barrier is complete: the threads that wait for it are ready.
static inline void complete_phase(Worker& w, int number) {
    Barrier& b = w.barrier[number];
    if (w.race) w.race->clocks->complete(clock_of(w, number));
    ++b.phase;
    b.arrived = 0;
    for (int i = 0; i < w.warps; ++i) {
        if (!b.waiting[i]) continue;
        make_ready(w, i, b.waiting[i]);
        for (unsigned rest = w.race ? b.waiting[i] : 0; rest; rest &= rest - 1)
            w.race->clocks->release(clock_of(w, number), w.first_clock + 32 * i + __builtin_ctz(rest));
        b.waiting[i] = 0;
    }
    w.lead->idle_peeks = 0;
}

static inline void complete_if_whole(Worker& w, int number) {
    Barrier& b = w.barrier[number];
    if (b.arrived == b.expected && !b.pending) complete_phase(w, number);
}

static inline Next wait_at(Worker& w, int number, const char* word, const char* file, int line) {
    w.barrier[number].waiting[w.current / 32] |= 1u << w.current % 32;
    w.fiber[w.current].wait = Wait{word, file, line, 0, number};
    return switch_to_next(w);
}

// -- named barriers -----------------------------------------------------------------------------------------------------

static inline Barrier& named_barrier(Worker& w, int id, int threads, const char* word, const char* file, int line) {
    const char* wrong = nullptr;
    if (id < 0 || id >= named_barriers) wrong = "a named barrier is 0 to 15";
    else if (threads < 32 || threads % 32 || threads > (w.threads + 31) / 32 * 32)
        wrong = "a named barrier takes a multiple of 32 threads, at most those of the block";
    Barrier& b = w.barrier[wrong ? 0 : id];
    if (!wrong && b.arrived && b.expected != unsigned(threads)) wrong = "threads meet at one named barrier with different counts";
    if (wrong) {
        begin_report(w, wrong);
        print(": thread %d in %s(%d, %d) at %s:%d", w.current, word, id, threads, file, line);
        if (id >= 0 && id < named_barriers && b.arrived) print("; %u have arrived of %u", b.arrived, b.expected);
        print("\n");
        end_report(w);
    }
    w.used_named |= 1u << id;
    b.expected = unsigned(threads);
    return b;
}

static inline void arrive_at_named(Worker& w, int id, Barrier& b) {
    if (w.race) w.race->clocks->arrive(clock_of(w, id), own_clock());
    ++b.arrived;
}

// -- mbarriers -----------------------------------------------------------------------------------------------------------

static inline bool in_shared_memory(const Worker& w, const void* address, size_t bytes) {
    auto at = static_cast<const char*>(address);
    return (at >= w.arena && at + bytes <= w.arena + w.launch->dynamic_bytes) ||
           (w.static_shared && at >= w.static_shared && at + bytes <= w.static_shared + w.launch->static_bytes);
}

[[noreturn]] static inline void mbarrier_fault(Worker& w, const char* what, const void* at, const char* word, const char* file, int line) {
    Worker& by = *this_worker;
    begin_report(by, what);
    print(": thread %d in %s at %s:%d, byte %td of shared memory", by.current, word, file, line, static_cast<const char*>(at) - w.arena);
    if (&w != &by) print(" of block %d of the cluster", w.rank);
    print("\n");
    end_report(by);
    __builtin_unreachable();
}

static inline void init_mbarrier(Worker& w, unsigned long long* at, unsigned count, void* code, const char* file, int line) {
    const char* word = "mbarrier_init";
    if (!in_shared_memory(w, at, 8)) mbarrier_fault(w, "mbarrier outside shared memory", at, word, file, line);
    if (reinterpret_cast<uintptr_t>(at) % 8) mbarrier_fault(w, "mbarrier not 8-byte aligned", at, word, file, line);
    if (count < 1 || count > most_arrivals) mbarrier_fault(w, "an mbarrier expects 1 to 2^20 - 1 arrivals", at, word, file, line);
    int i = 0;
    while (i < w.mbarriers && w.barrier[named_barriers + i].at != at) ++i;
    if (i == max_mbarriers) mbarrier_fault(w, "more than 128 mbarriers in a block", at, word, file, line);
    Barrier& b = w.barrier[named_barriers + i];
    const int before = w.mbarriers;
    if (i < before) {
        bool used = b.arrived || b.pending;
        for (unsigned waiting : b.waiting) used |= waiting != 0;
        if (used) mbarrier_fault(w, "an mbarrier in use is initialised again", at, word, file, line);
    } else {
        ++w.mbarriers;
    }
    int clock = i;
    if (w.race) clock = i < before ? b.clock : w.race->clocks->mbarriers;
    if (clock == max_mbarriers) mbarrier_fault(w, "the race check knows 128 mbarriers of a cluster", at, word, file, line);
    b = Barrier{};
    b.expected = count, b.at = at, b.file = file, b.line = line, b.clock = clock;
    if (w.race) {
        w.race->access(reinterpret_cast<char*>(at), 8, true, code, own_clock());
        w.race->clocks->new_mbarrier(clock);
    }
    *at = mbarrier_token | unsigned(i);
}

// The number of the barrier at an address. Ends the block where there is none.
static inline int mbarrier_at(Worker& w, const unsigned long long* at, void* code, const char* word, const char* file, int line) {
    if (!in_shared_memory(w, at, 8) || reinterpret_cast<uintptr_t>(at) % 8)
        mbarrier_fault(w, "no mbarrier: not 8 aligned bytes of shared memory", at, word, file, line);
    unsigned long long token = *at;
    unsigned i = unsigned(token);
    if ((token ^ mbarrier_token) >> 32 || i >= unsigned(w.mbarriers) || w.barrier[named_barriers + i].at != at)
        mbarrier_fault(w, "no mbarrier: never initialised, or overwritten", at, word, file, line);
    if (w.race && code) w.race->access(reinterpret_cast<const char*>(at), 8, false, code, own_clock(), atomically);
    return named_barriers + int(i);
}

static inline void arrive_at_mbarrier(Worker& w, int number, long long bytes, const char* word, const char* file, int line) {
    Barrier& b = w.barrier[number];
    if (b.arrived == b.expected) {
        Worker& by = *this_worker;
        begin_report(by, "an mbarrier has more arrivals in a phase than it expects");
        print(": thread %d in %s at %s:%d; the mbarrier of %s:%d, phase %u, has its %u arrivals and %lld bytes to come\n", by.current, word,
              file, line, b.file, b.line, b.phase, b.expected, b.pending);
        end_report(by);
    }
    b.pending += bytes;
    if (bytes > most_bytes || b.pending > most_bytes)
        mbarrier_fault(w, "more than 2^20 - 1 bytes expected by an mbarrier", b.at, word, file, line);
    if (w.race) w.race->clocks->arrive(clock_of(w, number), own_clock());
    ++b.arrived;
    complete_if_whole(w, number);
}

// Whether the phase of a parity has completed; this thread then goes on behind it.
static inline bool has_completed(Worker& w, int number, unsigned parity) {
    if ((w.barrier[number].phase & 1) == parity) return false;
    if (w.race) w.race->clocks->release(clock_of(w, number), own_clock());
    return true;
}

}  // namespace fa_host
