// The order of blocks in a launch with a seed, and in a race check of one whose blocks share counters: where one that is early takes all
// work, no two of them have to be ordered. A few of them, or of its clusters, are there at a time, of a cooperative launch all, on one OS
// thread. One runs until it comes to an atomic or a fence where the seed lets another go on, until it waits for others, or to its end. So
// blocks meet where they talk to each other, and the same seed gives the same run on every machine.
//
// Which block goes on follows PCT (Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010):
// each has a priority, the first that can go on runs, and at a change point the running one becomes the last. PCT draws a given number of
// change points over a known length of the run. Here each atomic is one with the same probability, which the seed draws, too.
#pragma once

#include <stdint.h>

#include "block.hpp"
#include "fiber.hpp"

namespace fa_host {

struct Interleaved {
    static constexpr int most = 8, places = 1024;  // blocks at a time; of a cooperative launch all
    struct Place {
        Worker *lead, *at;  // at: the block of a cluster that goes on
        uint64_t index;  // of the block or cluster
        bool runs, waits;  // waits: for another's turn, and nobody has come to an atomic since
        char* static_kept;  // static shared memory, while another place has the one of this OS thread
    };

    bool on;  // in this launch
    int count, running;
    Place place[places];
    int order[places];  // places, by priority
    int static_of;  // the place whose static shared memory is there; -1: none
    bool suspended;  // the running block is, and has not ended
    bool stuck;  // all blocks wait, for a turn or for each other
    uint64_t random;
    unsigned odds;  // one of so many atomics is a change point
    unsigned awaits;  // of turns, while others of the block were ready

    uint64_t draw() {  // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        return random ^= random << 17;
    }
    void move(int number, int to) {  // in the order
        int i = 0;
        while (order[i] != number) ++i;
        for (; i < to; ++i) order[i] = order[i + 1];
        for (; i > to; --i) order[i] = order[i - 1];
        order[to] = number;
    }
};
static Interleaved interleaved;

// The running block stops here until it is the first again that can go on.
static inline void suspend(Worker& w) {
    Worker& lead = *w.lead;
    Fiber& self = w.fiber[w.current];
    interleaved.place[interleaved.running].at = &w;
    interleaved.suspended = true;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&self.fake_stack, lead.main_stack_bottom, lead.main_stack_bytes);
    fa_host_switch(&self.stack_pointer, lead.main_stack_pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr);
}

// Before and behind an atomic on global memory or a turn that is passed, and at a fence.
static inline void may_switch(Worker& w) {
    Interleaved& all = interleaved;
    if (__builtin_expect(!all.on, 1)) return;
    for (int i = 0; i < all.count; ++i) all.place[i].waits = false;
    if (all.draw() % all.odds) return;
    all.move(all.running, all.count - 1);
    suspend(w);
}

// A thread waits for a turn, and its block has nothing else to do, or nothing that helps.
static inline void wait_for_others(Worker& w) {
    interleaved.place[interleaved.running].waits = true;
    suspend(w);
}

}  // namespace fa_host
