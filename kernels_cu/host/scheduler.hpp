// The scheduler of a block: cooperative, with a ready queue of one bit per lane and one bit per warp.
//
// There is no scheduler fiber: a fiber that must wait switches directly to the next ready one. The default order is round-robin by thread
// index and prefers the warp of the running fiber. With a seed, each decision is random, and in most blocks one warp is late: it runs when
// no other can, not even behind a copy that has yet to arrive. So a thread that misses a phase of an mbarrier, because the next one has
// ended too, is found where it is the late one (Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees, 2010: few threads
// that have the least priority find most faults of order).
#pragma once

#include "block.hpp"
#include "fiber.hpp"
#include "report.hpp"

namespace fa_host {

static inline void make_ready(Worker& w, int warp, unsigned lanes) {
    w.warp[warp].ready |= lanes;
    w.ready_warps |= 1u << warp;
}

static inline uint64_t next_random(Worker& w) {  // xorshift64
    w.random ^= w.random << 13;
    w.random ^= w.random >> 7;
    return w.random ^= w.random << 17;
}

static inline int nth_bit(unsigned bits, int n) {
    while (n--) bits &= bits - 1;
    return __builtin_ctz(bits);
}

// The warps with a ready lane that are not late.
static inline unsigned in_time(const Worker& w) { return w.ready_warps & ~w.late; }

// Takes the next fiber out of the ready queue; -1 where the queue is empty.
static inline __attribute__((always_inline)) int pop_ready(Worker& w) {
    if (!w.ready_warps) return -1;
    unsigned warp, lane;
    if (__builtin_expect(w.random != 0, 0)) {
        const unsigned ready = in_time(w) ? in_time(w) : w.ready_warps;
        warp = nth_bit(ready, next_random(w) % __builtin_popcount(ready));
        lane = nth_bit(w.warp[warp].ready, next_random(w) % __builtin_popcount(w.warp[warp].ready));
    } else {  // round-robin: the next lane of this warp, then the next warp, wrapping around
        warp = w.current / 32;
        unsigned after = w.ready_warps & (~0u << warp);
        warp = __builtin_ctz(after ? after : w.ready_warps);
        unsigned ready = w.warp[warp].ready;
        unsigned later = warp == w.current / 32 ? ready & (~0u << (w.current % 32)) : ready;
        lane = __builtin_ctz(later ? later : ready);
    }
    Warp& of = w.warp[warp];
    of.ready &= ~(1u << lane);
    if (!of.ready) w.ready_warps &= ~(1u << warp);
    return warp * 32 + lane;
}

// The latest moment for waits that end when they must: no thread is ready. False where there are none.
static inline bool unpark(Worker& w) {
    bool others = false;
    for (int i = 1; w.cluster && &w == w.lead && i < w.cluster->blocks; ++i) others |= unpark(*w.cluster->block[i]);
    if (!w.any_parked) return others;
    w.any_parked = false;
    for (int i = 0; i < w.warps; ++i) {
        if (w.parked[i]) make_ready(w, i, w.parked[i]);
        w.parked[i] = 0;
    }
    return true;
}

// Lets one asynchronous copy arrive that an mbarrier counts: the latest moment is when no thread can go on. False where there is none.
bool deliver_one(Worker& w) __attribute__((visibility("hidden")));

// Where only late warps are ready: waits and copies end until another is.
static inline void overtake_late(Worker& w) {
    while (w.ready_warps && !in_time(w) && (unpark(w) || deliver_one(w))) {}
}

static inline void report_deadlock(Worker& w) {
    begin_report(w, "deadlock: no thread can go on");
    print("\n");
    for (int i = 0; w.cluster && i < w.cluster->blocks; ++i) {
        print("  block %d of the cluster:\n", i);
        print_waiters(*w.cluster->block[i], true);
    }
    if (!w.cluster) print_waiters(w, true);
    end_report(w);
}

// Switches to a fiber that was taken out of the ready queue.
static inline __attribute__((always_inline)) Next switch_to(Worker& w, unsigned next) {
    Fiber &from = w.fiber[w.current], &to = w.fiber[next];
    w.current = next;
    fa_host_self = &to.self;
    if (__builtin_expect(__sanitizer_start_switch_fiber != nullptr, 0)) {
        __sanitizer_start_switch_fiber(from.done ? nullptr : &from.fake_stack, stack_bottom(w, next), w.stack_bytes);
        fa_host_switch(&from.stack_pointer, to.stack_pointer);
        __sanitizer_finish_switch_fiber(this_worker->fiber[this_worker->current].fake_stack, nullptr, nullptr);
        return {nullptr, nullptr};
    }
    return {&from.stack_pointer, to.stack_pointer};
}

// Switches to a fiber of another block of the cluster. Static shared memory has one place for all of them.
static inline Next switch_to_block(Worker& w, Worker& other, unsigned next) {
    Fiber &from = w.fiber[w.current], &to = other.fiber[next];
    if (size_t bytes = size_t(w.launch->static_bytes)) {
        memcpy(w.static_kept, w.static_shared, bytes);
        memcpy(other.static_shared, other.static_kept, bytes);
    }
    this_worker = &other;
    other.current = next;
    fa_host_self = &to.self;
    if (__builtin_expect(__sanitizer_start_switch_fiber != nullptr, 0)) {
        __sanitizer_start_switch_fiber(from.done ? nullptr : &from.fake_stack, stack_bottom(other, next), other.stack_bytes);
        fa_host_switch(&from.stack_pointer, to.stack_pointer);
        __sanitizer_finish_switch_fiber(this_worker->fiber[this_worker->current].fake_stack, nullptr, nullptr);
        return {nullptr, nullptr};
    }
    return {&from.stack_pointer, to.stack_pointer};
}

// A block of the cluster with a ready thread, one that is not late before all others: in index order the running one as long as it has any,
// with a seed any of them.
static inline Worker* ready_block(Worker& w) {
    Cluster& all = *w.cluster;
    const unsigned first = w.random ? unsigned(next_random(w) % unsigned(all.blocks)) : unsigned(w.rank);
    while (true) {
        Worker* late = nullptr;
        for (unsigned i = 0; i < unsigned(all.blocks); ++i) {
            Worker* b = all.block[(first + i) % unsigned(all.blocks)];
            if (in_time(*b)) return b;
            if (b->ready_warps) late = b;
        }
        if (!late || !(unpark(*w.lead) || deliver_one(*w.lead))) return late;
    }
}

static inline __attribute__((noinline)) Next switch_in_cluster(Worker& w) {
    const unsigned self = w.current;
    Worker* block = ready_block(w);
    while (!block) {
        if (!unpark(*w.lead) && !deliver_one(*w.lead)) report_deadlock(w);
        block = ready_block(w);
    }
    const unsigned next = unsigned(pop_ready(*block));
    if (block != &w) return switch_to_block(w, *block, next);
    return next == self ? Next{nullptr, nullptr} : switch_to(w, next);
}

// How many failed peeks are a round of all threads, at least.
static inline unsigned many_peeks(const Worker& w) { return 16u * unsigned(w.threads * w.lead->own_cluster.blocks); }

// The warps of a block that may run behind a failed peek: late ones when there was a round without progress.
static inline unsigned behind_peek(const Worker& w) { return w.lead->idle_peeks < many_peeks(w) ? in_time(w) : w.ready_warps; }

// Whether a thread of the block or its cluster waits for another block's turn: turns.hpp knows when that is a deadlock.
static inline bool awaits_turn(const Worker& w) {
    const Cluster& all = w.lead->own_cluster;
    bool some = false;
    for (int i = 0; i < all.blocks; ++i) some |= all.block[i]->await_turn > 0;
    return some;
}

// After a failed peek at an mbarrier. Where no other thread is ready, or all that are have peeked many times, it is the latest moment for a
// parked wait or a copy; where there is none of these either, a deadlock. True: the running thread goes on, for it is alone.
static inline bool all_peek(Worker& w, bool alone) {
    const unsigned peeks = w.lead->idle_peeks;
    if (!alone && peeks % many_peeks(w)) return false;
    if (unpark(*w.lead) || deliver_one(*w.lead) || peeks <= (alone ? 100000u : 2000000u) || awaits_turn(w)) return alone;
    for (int i = 0; i < w.lead->own_cluster.blocks; ++i)  // none of these can go on
        for (Warp& warp : w.lead->own_cluster.block[i]->warp) warp.ready = 0;
    report_deadlock(w);
    return alone;
}

// The running fiber must wait: selects the fiber to switch to. Null, null: the running fiber itself was the next.
static inline Next switch_to_next(Worker& w) {
    if (__builtin_expect(stack_pointer() < stack_bottom(w, w.current) + 2048, 0)) {
        begin_report(w, "stack overflow");
        print(": thread %d has used its %zu KB stack (large local arrays?)\n", w.current, w.stack_bytes >> 10);
        end_report(w);
    }
    if (__builtin_expect(w.cluster != nullptr, 0)) return switch_in_cluster(w);
    unsigned self = w.current;
    if (__builtin_expect(w.late != 0, 0)) overtake_late(w);
    int next = pop_ready(w);
    while (__builtin_expect(next < 0, 0)) {
        if (!unpark(w) && !deliver_one(w)) report_deadlock(w);
        next = pop_ready(w);
    }
    if (unsigned(next) == self) return {nullptr, nullptr};
    return switch_to(w, next);
}

}  // namespace fa_host
