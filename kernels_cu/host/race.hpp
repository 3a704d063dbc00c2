// The race check: shared-memory accesses that no barrier orders, whatever the schedule was.
//
// The kernel is compiled with -fsanitize=thread but not linked with its library: the calls that the compiler inserts come here.
// Shadow memory holds the last write and recent reads of every two bytes of shared memory. Each access is compared with them. Two
// accesses are ordered (happens-before) by the vector clocks of barriers (clocks.hpp): __syncthreads, named barriers, mbarriers and
// __syncwarp. A shuffle orders nothing. Two atomics do not race, an atomic and a plain access do. What TMA and wgmma read must not only be
// ordered behind a plain write but have a proxy fence between. What a thread does to the shared memory of another block of its cluster must
// be before the end of some thread of that block, and no load of what another block overwrites may be in flight when that block is told.
// Limits: of the reads of two bytes, one is kept for each warp's number modulo 4 and parity of the lane. Global memory: global.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

#include "block.hpp"
#include "clocks.hpp"
#include "report.hpp"

namespace fa_host {

// How an access is made.
enum Access_kind {
    plain,
    atomically,
    copy_started,  // an asynchronous write begins: unordered until it has been waited for
    copy_waited_for,  // this thread has waited for its cp.async
    by_async_proxy,  // of TMA and wgmma, at the wait
    read_begun,  // the same at the issue: compared with the writes before it, not kept
};

struct Race {
    struct Access {
        void* code;
        uint32_t clock;
        int16_t thread;  // or that of an mbarrier's clock
        uint8_t bytes;  // a bit for each of the two bytes
        bool atomic : 1, in_flight : 1, async_proxy : 1;
    };
    struct Shadow {  // of two bytes of shared memory
        Access write;
        uint64_t readers;  // a bit for each read since the last write: what was before that write is before all that is behind it
        Access read[8];
    };
    static constexpr int dynamic_cells = arena_bytes / 2, static_cells = 64 << 10;
    static constexpr int max_reports = 8;

    struct Remote {  // an access by a thread of another block of the cluster
        uint32_t clock;
        void* code;
    };

    Worker* worker;
    Clocks* clocks;  // of the lead of a cluster
    Clocks own_clocks;
    Remote remote[max_threads];  // the last ones, of each thread of the cluster
    Clocks::Vector ended;  // what the threads of this block knew when they ended
    uint64_t watched;  // accesses in this launch
    Shadow shadow[dynamic_cells + static_cells];

    // Null where there is no address space.
    static Race* of(Worker& w) {
        if (!w.race_memory) {
            w.race_memory = reinterpret_cast<Race*>(map_memory(sizeof(Race)));
            if (!w.race_memory) return nullptr;
            w.race_memory->worker = &w;
            for (auto& c : w.race_memory->own_clocks.clock) c = 1;  // zeroed shadow memory is before every access
        }
        return w.race_memory;
    }

    inline __attribute__((always_inline)) bool ordered(const Access& before, int thread) const {
        if (before.in_flight) return before.clock <= clocks->start[before.thread];
        return clocks->behind(thread, before.thread, before.clock);
    }

    // Whether a load by this block may be in flight still when another block writes: an arrival there waits for no load. What wgmma and TMA
    // have read is complete when they have been waited for.
    bool in_flight_at_arrival(const Access& read, int writer) const {
        if (!worker->cluster || read.async_proxy || read.thread >= max_threads || writer >= max_threads) return false;
        if (read.thread / worker->threads != worker->rank || writer / worker->threads == worker->rank) return false;
        return !clocks->was_loaded(writer, read.thread, read.clock);
    }

    struct Cells {
        Shadow* first;
        int count;
        uint8_t bytes;
        long long at;
    };
    // The cells of some bytes of shared memory; none of any other memory.
    inline __attribute__((always_inline)) Cells cells(const void* address, size_t bytes) {
        uint8_t mask = bytes == 1 ? (reinterpret_cast<uintptr_t>(address) & 1 ? 2 : 1) : 3;
        long long at = static_cast<const char*>(address) - worker->arena;
        int count = bytes == 1 ? 1 : int((bytes + (at & 1) + 1) / 2);
        if (at >= 0 && at < worker->launch->dynamic_bytes) return {shadow + at / 2, count, mask, at};
        at = static_cast<const char*>(address) - worker->static_shared;
        if (!worker->static_shared || at < 0 || at >= worker->launch->static_bytes || at / 2 + 8 >= static_cells) return {};
        return {shadow + dynamic_cells + at / 2, count, mask, at};
    }

    // Whether it is one to shared memory.
    bool access(const char* address, size_t bytes, bool writes, void* code, int thread, Access_kind kind = plain) {
        const Cells found = cells(address, bytes);
        if (!found.count) return false;
        ++watched;
        const uint8_t mask = found.bytes;
        const bool atomic = kind == atomically;
        Access now{code, clocks->clock[thread], int16_t(thread), mask, atomic, kind == copy_started, kind == by_async_proxy};
        int slot = (thread / 32 & 3) * 2 + (thread & 1);
        for (int i = 0; i < found.count; ++i) {
            Shadow& c = found.first[i];
            if (!writes && kind == plain && (!c.write.bytes || ordered(c.write, thread))) {  // nearly always
                c.read[slot] = now;
                c.readers |= 1u << slot;
                continue;
            }
            bool own_copy = kind == copy_waited_for && c.write.in_flight && c.write.thread == thread;
            if (c.write.bytes & mask && !own_copy && !(c.write.atomic && atomic)) {
                if (!ordered(c.write, thread)) report_race(c.write, true, now, writes, found, "no barrier orders them");
                else if (kind >= by_async_proxy && !c.write.async_proxy && !clocks->behind_fence(thread, c.write.thread, c.write.clock))
                    report_race(c.write, true, now, writes, found, "no fence_proxy_async_shared lies between them");
            }
            if (writes) {
                for (uint64_t rest = c.readers; rest; rest &= rest - 1) {
                    const Access& read = c.read[__builtin_ctzll(rest)];
                    if (!(read.bytes & mask) || (read.atomic && atomic)) continue;
                    if (!ordered(read, thread)) report_race(read, false, now, true, found, "no barrier orders them");
                    else if (kind == copy_started && in_flight_at_arrival(read, thread))
                        report_race(read, false, now, true, found,
                                    "the read may be in flight when its thread arrives at the other block: no fence or wait lies between");
                }
                if (mask == 3) c.readers = 0;
                c.write = now;
            } else if (kind != read_begun) {
                c.read[slot] = now;
                c.readers |= 1u << slot;
            }
        }
        return true;
    }

    // TMA begins to write: nobody may touch the bytes until they have arrived, and then only behind that phase of the mbarrier.
    // What registers write from another block (async_proxy: false) needs a fence before wgmma reads it.
    void tma_started(const char* address, size_t bytes, void* code, int thread, int mbarrier, bool async_proxy) {
        access(address, bytes, true, code, thread, copy_started);
        const Cells found = cells(address, bytes);
        const int agent = max_threads + mbarrier;
        for (int i = 0; i < found.count; ++i)
            found.first[i].write = {code, clocks->clock[agent], int16_t(agent), 3, false, true, async_proxy};
    }

    // A copy to another block begins to read: nobody may write the bytes but behind the phase of that block's mbarrier.
    void copy_reads(const char* address, size_t bytes, void* code, int thread, int mbarrier) {
        access(address, bytes, false, code, thread, read_begun);
        const Cells found = cells(address, bytes);
        const int agent = max_threads + mbarrier, slot = mbarrier & 7;
        for (int i = 0; i < found.count; ++i) {
            found.first[i].read[slot] = {code, clocks->clock[agent], int16_t(agent), 3, false, false, true};
            found.first[i].readers |= 1u << slot;
        }
    }

    // -- the end of a block of a cluster ---------------------------------------------------------------------------------

    void new_cluster_block() {
        memset(remote, 0, sizeof(Remote) * clocks->threads);
        memset(&ended, 0, sizeof ended);
    }
    void accessed_from(int thread, void* code) { remote[thread] = {clocks->clock[thread], code}; }
    void thread_ended(int thread) { clocks->collect(ended, thread); }

    // All blocks have ended.
    void check_remote() {
        for (int t = 0; t < clocks->threads; ++t) {
            if (!remote[t].clock || ended.of[t] >= remote[t].clock) continue;
            pthread_mutex_lock(&job->lock);
            if (job->outcome == ok) {
                job->outcome = race;
                Dim3 b = worker->fiber[0].self.block_idx;
                print(
                    "an access to the shared memory of block (%u, %u, %u), which may have ended: thread %d of block %d at pc:%p, no "
                    "cluster barrier or mbarrier lies between it and the end of that block\n",
                    b.x, b.y, b.z, t % worker->threads, t / worker->threads, remote[t].code);
            }
            pthread_mutex_unlock(&job->lock);
            return;
        }
    }

    // -- reports ---------------------------------------------------------------------------------------------------------

    void print_agent(int thread) {
        if (thread >= max_threads) print("TMA");
        else if (worker->cluster) print("thread %d of block %d", thread % worker->threads, thread / worker->threads);
        else print("thread %d", thread);
    }

    void tma_arrived(const char* address, size_t bytes) {
        const Cells found = cells(address, bytes);
        for (int i = 0; i < found.count; ++i) found.first[i].write.in_flight = false;
    }

    void report_race(const Access& before, bool wrote, const Access& now, bool writes, const Cells& found, const char* why) {
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
            print("race on shared memory byte %lld%s in block (%u, %u, %u): ", found.at,
                  found.first < shadow + dynamic_cells ? "" : " of the static arrays", b.x, b.y, b.z);  // which have names: shared.py
            print_agent(before.thread);
            print(" %s at pc:%p, ", before.in_flight ? "has a copy in flight, begun" : wrote ? "writes" : "reads", before.code);
            print_agent(now.thread);
            print(" %s at pc:%p, %s\n", now.in_flight ? "starts to copy" : writes ? "writes" : "reads", now.code, why);
        }
        if (job->outcome == ok) job->outcome = race;
        pthread_mutex_unlock(&job->lock);
    }
};

}  // namespace fa_host
