// Vector clocks: which accesses of a block come before which, by its barriers alone and whatever the schedule was.
//
// Each thread has a clock that advances when it arrives at a barrier. A thread knows of another's clock up to the last arrival that it is
// ordered behind; a barrier collects what its arrivals know and hands it to those it releases. A barrier that every thread of the block
// takes needs no vectors: behind it all know of all (the floor). An mbarrier counts as a thread whose clock is its phase, so that what TMA
// writes is ordered behind exactly the phase that counts its bytes. Beside what a thread knows stands what it knows to be fenced: visible
// to the asynchronous proxy (TMA and wgmma) by a fence on the way from the writer.
//
// The blocks of a cluster share their clocks: thread t of block r has clock r * threads + t, and mbarriers are numbered through.
#pragma once

#include <stdint.h>
#include <string.h>

#include "block.hpp"

namespace fa_host {

struct Clocks {
    static constexpr int most = max_threads + max_mbarriers;  // the clock of mbarrier i is number max_threads + i
    // Barriers: the named ones of each block of a cluster, the mbarriers, the cluster's own.
    static constexpr int first_mbarrier = max_cluster * named_barriers, whole_cluster = first_mbarrier + max_mbarriers;

    struct Vector {
        uint32_t of[most];
    };
    struct Known {
        uint32_t generation;  // of the floor when it was written: one of an older generation holds nothing above the floor
        Vector seen, fenced;
    };
    struct Joined {  // by a barrier: in the running phase, and up to the last completed one
        bool used;
        Vector seen, fenced, released_seen, released_fenced;
    };

    int threads, mbarriers;
    uint32_t generation;
    bool any_fence;       // in this block
    uint32_t clock[most];
    uint32_t start[most];  // clocks before this block
    Vector floor, fenced_floor;
    Known known[max_threads];
    static constexpr unsigned kept_times = 16;
    uint32_t loaded_at[max_threads][kept_times];  // by turns: the clock of each thread when its loads were complete, before each arrival
    uint32_t told[max_threads];  // its clock when it last arrived
    unsigned times[max_threads];
    Joined joined[whole_cluster + 1];
    Vector warp_seen, warp_fenced;

    // thread_count: of all blocks of the cluster.
    void new_block(int thread_count, int blocks) {
        threads = thread_count;
        mbarriers = 0;
        any_fence = false;
        ++generation;
        for (int i = 0; i < most; ++i) floor.of[i] = start[i] = clock[i]++;
        for (int i = 0; i < blocks * named_barriers; ++i) joined[i].used = false;
        joined[whole_cluster].used = false;
    }

    void new_mbarrier(int i) {
        if (i >= mbarriers) mbarriers = i + 1;
        joined[first_mbarrier + i].used = false;
    }

    // Whether `thread` is behind the access that another, or an mbarrier, made at a time of its clock.
    bool behind(int thread, int other, uint32_t time) const {
        if (floor.of[other] >= time || other == thread) return true;
        const Known& k = known[thread];
        return k.generation == generation && k.seen.of[other] >= time;
    }

    // Whether a fence lies between a write of the generic proxy and this thread.
    bool behind_fence(int thread, int other, uint32_t time) const {
        if (start[other] >= time || fenced_floor.of[other] >= time) return true;
        const Known& k = known[thread];
        return k.generation == generation && k.fenced.of[other] >= time;
    }

    // __syncthreads in a launch without clusters: every thread that is left has arrived.
    void all_arrived() {
        for (int i = 0; i < mbarriers; ++i) {
            uint32_t& time = floor.of[max_threads + i];
            for (int t = 0; t < threads; ++t)
                if (known[t].generation == generation && known[t].seen.of[max_threads + i] > time) time = known[t].seen.of[max_threads + i];
        }
        for (int t = 0; any_fence && t < threads; ++t)
            if (known[t].generation == generation) raise(fenced_floor, known[t].fenced);
        for (int t = 0; t < threads; ++t) floor.of[t] = clock[t]++;
        ++generation;
    }

    // __syncwarp: the lanes of mask, of the warp whose first thread is given.
    void join_lanes(int first, unsigned mask) {
        Vector& seen = warp_seen;
        Vector& fenced = warp_fenced;
        clear(seen);
        if (any_fence) clear(fenced);
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            const Known& k = own(first + __builtin_ctz(rest));
            raise(seen, k.seen);
            if (any_fence) raise(fenced, k.fenced);
        }
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            int t = first + __builtin_ctz(rest);
            copy(known[t].seen, seen);
            if (any_fence) copy(known[t].fenced, fenced);
            told[t] = clock[t]++;
        }
    }

    void arrive(int barrier, int thread) {
        Joined& j = opened(barrier);
        const Known& k = own(thread);
        raise(j.seen, k.seen);
        raise(j.seen, floor);
        if (any_fence) raise(j.fenced, k.fenced), raise(j.fenced, fenced_floor);
        told[thread] = clock[thread]++;
    }

    void complete(int barrier) {
        Joined& j = opened(barrier);
        if (barrier >= first_mbarrier && barrier < whole_cluster) {
            int i = max_threads + barrier - first_mbarrier;
            j.seen.of[i] = clock[i]++;
        }
        copy(j.released_seen, j.seen);
        if (any_fence) copy(j.released_fenced, j.fenced);
    }

    // This thread goes on behind the last completed phase of a barrier.
    void release(int barrier, int thread) {
        Joined& j = joined[barrier];
        loads_complete(thread);
        if (!j.used) return;  // nobody has arrived: the phase before the first one
        Known& k = own(thread);
        raise(k.seen, j.released_seen);
        if (any_fence) raise(k.fenced, j.released_fenced);
    }

    void fence(int thread) {
        if (!any_fence) {
            any_fence = true;
            for (int t = 0; t < threads; ++t) clear(known[t].fenced);
            for (auto& j : joined)
                if (j.used) clear(j.fenced), clear(j.released_fenced);
            memcpy(fenced_floor.of, start, sizeof start);
        }
        Known& k = own(thread);
        raise(k.fenced, k.seen);
        raise(k.fenced, floor);
        loads_complete(thread);
    }
    // A fence, a wait at a barrier and a store of what was loaded are behind the thread's loads; an arrival is not.
    void loads_complete(int thread) {
        unsigned& last = times[thread];
        if (told[thread] >= loaded_at[thread][last % kept_times]) ++last;
        loaded_at[thread][last % kept_times] = clock[thread]++;
    }

    // Whether a load of `other` at a time was complete at the last of its arrivals that this thread knows of. True also where such times are
    // no longer kept.
    bool was_loaded(int thread, int other, uint32_t time) const {
        if (start[other] >= time) return true;
        const Known& k = known[thread];
        const uint32_t seen = k.generation == generation && k.seen.of[other] > floor.of[other] ? k.seen.of[other] : floor.of[other];
        uint32_t oldest = ~0u;
        for (uint32_t at : loaded_at[other]) {
            if (at >= time && at <= seen) return true;
            if (at < oldest) oldest = at;
        }
        return oldest > time;
    }

    // This thread is behind another's accesses up to a time.
    void learn(int thread, int other, uint32_t time) {
        uint32_t& known_time = own(thread).seen.of[other];
        if (known_time < time) known_time = time;
    }

    // Adds what this thread knows.
    void collect(Vector& into, int thread) {
        raise(into, own(thread).seen);
        raise(into, floor);
    }

    // What this thread knows, with its own clock, ready to be read and written.
    Known& own(int thread) {
        Known& k = known[thread];
        if (k.generation != generation) {
            k.generation = generation;
            clear(k.seen);
            if (any_fence) clear(k.fenced);
        }
        k.seen.of[thread] = clock[thread];
        return k;
    }

  private:
    Joined& opened(int barrier) {
        Joined& j = joined[barrier];
        if (!j.used) {
            j.used = true;
            clear(j.seen), clear(j.released_seen), clear(j.fenced), clear(j.released_fenced);
        }
        return j;
    }

    void copy(Vector& to, const Vector& from) const {
        memcpy(to.of, from.of, sizeof(uint32_t) * threads);
        memcpy(to.of + max_threads, from.of + max_threads, sizeof(uint32_t) * mbarriers);
    }
    void raise(Vector& to, const Vector& from) const {
        for (int i = 0; i < threads; ++i) to.of[i] = to.of[i] > from.of[i] ? to.of[i] : from.of[i];
        for (int i = max_threads; i < max_threads + mbarriers; ++i) to.of[i] = to.of[i] > from.of[i] ? to.of[i] : from.of[i];
    }

  public:
    void clear(Vector& v) const {
        memset(v.of, 0, sizeof(uint32_t) * threads);
        memset(v.of + max_threads, 0, sizeof(uint32_t) * mbarriers);
    }
};

}  // namespace fa_host
