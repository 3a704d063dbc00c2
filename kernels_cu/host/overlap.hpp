// Launches that overlap (fa/overlap.cuh). Here the launch before has run. What it may have written is held back from the first block, or
// the first cluster: those bytes are NaN until its threads wait for the launch before and none can go on without it. So a read that comes
// too early finds NaN, as on a GPU it finds anything. The other blocks begin after that moment.
#pragma once

#include <stdint.h>
#include <unistd.h>

#include "barrier.hpp"
#include "block.hpp"
#include "engine.hpp"
#include "global.hpp"
#include "report.hpp"
#include "scheduler.hpp"

namespace fa_host {

static inline bool is_held_back() { return __atomic_load_n(&job->held_back, __ATOMIC_ACQUIRE); }

// What the first block has written meanwhile stays.
static inline void give_back() {
    for (int i = 0; i < job->launch->held_count; ++i) {
        const Held& held = job->launch->held[i];
        for (unsigned long long at = 0; at < held.bytes; ++at)
            if (held.to[at] == 0xff) held.to[at] = held.from[at];
    }
    __atomic_store_n(&job->held_back, 0, __ATOMIC_RELEASE);
}

// All workers but one begin with their blocks after that. The one runs all blocks of a launch that never waits.
static inline void wait_for_first_block(int number) {
    while (number && is_held_back() && job->outcome == ok && __atomic_load_n(&job->next, __ATOMIC_RELAXED) < job->blocks &&
           !interrupt_requested)
        usleep(50);
}

// The launch has ended, and nobody has waited: the launches behind it may read what the one before has not written yet.
static inline void check_overlap() {
    if (!is_held_back()) return;
    give_back();
    if (job->outcome != ok || interrupt_requested) return;
    job->outcome = fault;
    print(
        "the launch overlaps the one before and no thread has come to dependency_wait: what is behind it may run before either has ended\n");
}

}  // namespace fa_host

// -- the functions that words call ------------------------------------------------------------------------------------

extern "C" {

fa_host::Next fa_host_dependency_arrive(const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    if (!is_held_back()) return {nullptr, nullptr};
    const unsigned self = w.current;
    w.parked[self / 32] |= 1u << self % 32;
    w.any_parked = true;
    w.fiber[self].wait = Wait{"dependency_wait", file, line, 0};
    return switch_to_next(w);
}

void fa_host_dependency_over() {
    using namespace fa_host;
    if (global.on) global.waited_for_launch(*this_worker, own_clock());
    if (fa_host::is_held_back()) fa_host::give_back();
}

}  // extern "C"
