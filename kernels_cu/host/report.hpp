// Reports: what went wrong, in which block, and which threads wait where. A report ends the block.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "block.hpp"
#include "fiber.hpp"

namespace fa_host {

// Abandons every fiber of the block and returns to the worker's own stack. The fibers' stacks are reused.
static inline void abort_block(Worker& w) {
    Worker& lead = *w.lead;
    lead.failed = true;
    this_worker = &lead;
    void* unused;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, lead.main_stack_bottom, lead.main_stack_bytes);
    fa_host_switch(&unused, lead.main_stack_pointer);
    __builtin_unreachable();
}

static inline void abort_if_interrupted(Worker& w) {
    if (__builtin_expect(interrupt_requested, 0)) abort_block(w);
}

// Appends to the report of the launch. The caller holds the job's lock.
static inline void print(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int room = job->launch->report_bytes - job->report_used;
    int wrote = vsnprintf(job->launch->report + job->report_used, room > 0 ? room : 0, format, arguments);
    job->report_used += wrote < room ? wrote : (room > 0 ? room - 1 : 0);
    va_end(arguments);
}

// Prints "threads 0-63, 96" for the threads that a predicate selects.
template <class Select> static void print_threads(Worker& w, Select select) {
    const char* separator = "";
    for (int t = 0; t < w.threads; ++t) {
        if (!select(t)) continue;
        int last = t;
        while (last + 1 < w.threads && select(last + 1)) ++last;
        last == t ? print("%s%d", separator, t) : print("%s%d-%d", separator, t, last);
        separator = ", ";
        t = last;
    }
}

// Prints what a barrier, or a word of a whole warpgroup, that a thread waits for lacks.
static inline void print_barrier(Worker& w, int thread, int number) {
    if (number == Wait::warpgroup) {
        print(": %d of the 128 threads of warpgroup %d are there", w.warpgroup[thread / 128].arrived, thread / 128);
        return;
    }
    const Barrier& b = w.barrier[number];
    if (number == cluster_barrier) {
        const Barrier& whole = w.lead->barrier[number];
        print(": %u of the %u threads of the cluster have arrived", whole.arrived, whole.expected);
        return;
    }
    if (number < named_barriers) {
        print(" at barrier %d: %u of %u threads have arrived", number, b.arrived, b.expected);
        return;
    }
    print(" for phase %u (parity %u) of the mbarrier at byte %td of shared memory (%s:%d): %u of %u arrivals", b.phase, b.phase & 1,
          reinterpret_cast<char*>(b.at) - w.arena, b.file, b.line, b.arrived, b.expected);
    if (b.pending >= 0) print(", %lld bytes to come", b.pending);
    else print(", %lld bytes more than expected", -b.pending);
}

// Prints the waiting threads, grouped by where they wait. In a deadlock the current thread is one of them.
static inline void print_waiters(Worker& w, bool deadlock = false) {
    bool printed[max_threads] = {};
    auto waits = [&](unsigned t) { return !w.fiber[t].done && (deadlock || t != w.current) && !(w.warp[t / 32].ready >> t % 32 & 1); };
    for (int t = 0; t < w.threads; ++t) {
        Fiber& first = w.fiber[t];
        if (printed[t] || !waits(t)) continue;
        auto same = [&](int i) {
            Wait& a = w.fiber[i].wait;
            return waits(i) && a.word == first.wait.word && a.line == first.wait.line && a.mask == first.wait.mask &&
                   a.barrier == first.wait.barrier && !strcmp(a.file, first.wait.file);
        };
        print("  threads ");
        print_threads(w, same);
        print(" wait in %s at %s:%d", first.wait.word, first.wait.file, first.wait.line);
        if (first.wait.mask) print(" for lanes 0x%08x", first.wait.mask);
        if (first.wait.barrier != Wait::none) print_barrier(w, t, first.wait.barrier);
        print("\n");
        for (int i = t; i < w.threads; ++i) printed[i] |= same(i);
    }
    int ended = 0;
    for (int t = 0; t < w.threads; ++t) ended += w.fiber[t].done;
    if (ended) {
        print("  threads ");
        print_threads(w, [&](int t) { return w.fiber[t].done; });
        print(" have ended\n");
    }
}

// Takes the job's lock and prints the first line. Only the first faulty block of a launch reports; any later one just ends.
static inline void begin_report(Worker& w, const char* what) {
    pthread_mutex_lock(&job->lock);
    if (job->outcome == fault) {
        pthread_mutex_unlock(&job->lock);
        abort_block(w);
    }
    job->outcome = fault;
    Dim3 b = w.fiber[0].self.block_idx;
    print("%s in block (%u, %u, %u)", what, b.x, b.y, b.z);
}

// Ends the launch: there is no memory, or no address space (ulimit -v), for what.
static inline void out_of_memory(const char* what, size_t bytes) {
    pthread_mutex_lock(&job->lock);
    if (job->outcome != fault && job->outcome != no_memory) {
        job->outcome = no_memory;
        print("%s: %zu MB could not be mapped", what, bytes >> 20);
    }
    pthread_mutex_unlock(&job->lock);
}

static inline void end_report(Worker& w) {
    pthread_mutex_unlock(&job->lock);
    abort_block(w);
}

}  // namespace fa_host
