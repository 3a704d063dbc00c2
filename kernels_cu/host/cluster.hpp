// Clusters: blocks that run together, and what they do to each other's shared memory.
//
// Each block of a cluster has a Worker of its own, all of them on one OS thread: its fibers, its barriers, its shared memory. A fiber that
// must wait switches to a ready one of its block or, where there is none, of another block (scheduler.hpp). The lead, the block of rank 0,
// has the count of the cluster's barrier. A copy to another block stands in that block's queue of copies in flight (async.hpp), with the
// mbarrier that counts it. The race check has one set of clocks for the cluster, and shadow memory for each block.
#pragma once

#include <stdint.h>
#include <string.h>

#include "async.hpp"
#include "barrier.hpp"
#include "block.hpp"
#include "fiber.hpp"
#include "race.hpp"
#include "report.hpp"
#include "scheduler.hpp"
#include "tma.hpp"

namespace fa_host {

// -- the life of a block ----------------------------------------------------------------------------------------------

// A new block. The first one of a cluster is its lead.
static inline void join_cluster(Worker& w) {
    Cluster& all = w.lead->own_cluster;
    w.barrier[cluster_barrier] = Barrier{};
    if (!w.rank) {
        all.live = all.blocks, all.left = 0;
        w.barrier[cluster_barrier].expected = unsigned(all.blocks * w.threads);
    }
    if (!w.cluster) return;
    if (w.launch->static_bytes) memset(w.static_kept, 0xff, size_t(w.launch->static_bytes));
    if (w.race) w.race->new_cluster_block();
}

static inline void complete_cluster_barrier(Worker& lead) {
    Cluster& all = lead.own_cluster;
    Barrier& whole = lead.barrier[cluster_barrier];
    ++whole.phase;
    whole.arrived = 0;
    whole.expected -= all.left;
    all.left = 0;
    if (lead.race) lead.race->clocks->complete(Clocks::whole_cluster);
    for (int rank = 0; rank < all.blocks; ++rank) {
        Worker& b = *all.block[rank];
        for (int i = 0; i < b.warps; ++i) {
            unsigned& waiting = b.barrier[cluster_barrier].waiting[i];
            if (waiting) make_ready(b, i, waiting);
            for (unsigned rest = b.race ? waiting : 0; rest; rest &= rest - 1)
                b.race->clocks->release(Clocks::whole_cluster, b.first_clock + 32 * i + __builtin_ctz(rest));
            waiting = 0;
        }
    }
    lead.idle_peeks = 0;
}

// The running thread ends. The cluster's barrier does without it.
static inline void leave_cluster(Worker& w) {
    Cluster& all = w.lead->own_cluster;
    Barrier& whole = w.lead->barrier[cluster_barrier];
    const Fiber& self = w.fiber[w.current];
    if (self.in_cluster_barrier && self.cluster_phase == whole.phase) ++all.left;
    else if (--whole.expected == whole.arrived && whole.arrived) complete_cluster_barrier(*w.lead);
    if (!w.cluster) return;
    if (w.race) w.race->thread_ended(own_clock());
    for (int rank = 0; w.live == 1 && rank < all.blocks; ++rank) {
        Worker& b = *all.block[rank];
        if (const Copy* c = &b != &w && b.async ? b.async->load_from(w) : nullptr)
            Async::wrong(w, "a block ended while a copy from its shared memory to another block was in flight", *c);
    }
}

// __syncthreads of a block of a cluster, under the race check.
static inline void release_in_cluster(Worker& w) {
    w.race->clocks->complete(clock_of(w, 0));
    for (int t = 0; t < w.threads; ++t)
        if (!w.fiber[t].done) w.race->clocks->release(clock_of(w, 0), w.first_clock + t);
}

// After a failed peek: any ready thread of the cluster.
static inline Next yield_in_cluster(Worker& w) {
    Cluster& all = *w.cluster;
    const unsigned self = w.current, pick = w.lead->idle_peeks * 0x9e3779b9u >> 8;
    Worker* block = nullptr;
    for (unsigned i = 0; i < unsigned(all.blocks) && !block; ++i)
        if (Worker* b = all.block[(pick + i) % unsigned(all.blocks)]; behind_peek(*b)) block = b;
    if (all_peek(w, !block)) return {nullptr, nullptr};
    const unsigned ready = behind_peek(*block);
    const int warp = nth_bit(ready, int(pick / 8 % unsigned(__builtin_popcount(ready))));
    const int lane = nth_bit(block->warp[warp].ready, int(pick / 256 % unsigned(__builtin_popcount(block->warp[warp].ready))));
    block->warp[warp].ready &= ~(1u << lane);
    if (!block->warp[warp].ready) block->ready_warps &= ~(1u << warp);
    make_ready(w, int(self / 32), 1u << self % 32);
    const unsigned next = unsigned(32 * warp + lane);
    return block == &w ? switch_to(w, next) : switch_to_block(w, *block, next);
}

// -- another block's shared memory ------------------------------------------------------------------------------------

struct Place {
    Worker* block;
    char* at;
};

// A block of the cluster whose shared memory is there. Ends the block of the caller where it has ended.
static inline Worker& living_block(Worker& w, unsigned rank, const char* word, const char* file, int line) {
    Worker& b = *w.lead->own_cluster.block[rank];
    if (!b.live) {
        begin_report(w, "an access to the shared memory of a block of the cluster that has ended");
        print(": thread %d in %s at %s:%d, to block %u\n", w.current, word, file, line, rank);
        end_report(w);
    }
    return b;
}

// Where an address of map_shared points, if that many bytes are there and it is aligned.
static inline Place place_of(Worker& w, unsigned address, unsigned bytes, unsigned alignment, const char* word, const char* file,
                             int line) {
    const unsigned rank = (address >> rank_shift) - 1, at = (address & ((1u << rank_shift) - 1)) - shared_base;
    const unsigned size = w.launch->dynamic_bytes;
    if (!(address >> rank_shift))
        tma_fault(w, "an address of the own shared memory in a word that takes one of map_shared", word, file, line);
    if (rank >= unsigned(w.lead->own_cluster.blocks)) tma_fault(w, "an address of a block outside the cluster", word, file, line);
    if (at > size || size - at < bytes || at % alignment) {
        begin_report(w, at % alignment ? "address not aligned" : "address outside shared memory");
        print(": thread %d in %s at %s:%d, %u bytes from byte %d of %u of block %u of the cluster", w.current, word, file, line, bytes,
              int(at), size, rank);
        if (at % alignment) print(", which must be a multiple of %u", alignment);
        print("\n");
        end_report(w);
    }
    Worker& b = living_block(w, rank, word, file, line);
    return {&b, b.arena + at};
}

// Begins a copy to another block whose bytes an mbarrier there counts. given.from: its source in the own shared memory, or null for
// given.value.
static inline void copy_to_block(Worker& w, unsigned to, unsigned bytes, unsigned barrier, const Copy& given, const char* word) {
    const char* file = given.file;
    const int line = given.line;
    const Place there = place_of(w, to, bytes, 16, word, file, line), counted = place_of(w, barrier, 8, 8, word, file, line);
    if (there.block != counted.block)
        tma_fault(w, "a copy to one block of the cluster that an mbarrier of another is to count", word, file, line);
    Worker& b = *there.block;
    const auto* at = reinterpret_cast<const unsigned long long*>(counted.at);
    const int number = counting_mbarrier(b, at, given.code, word, file, line);
    if (w.race && given.from)
        w.race->copy_reads(static_cast<const char*>(given.from), bytes, given.code, own_clock(), b.barrier[number].clock);
    TensorMap rows{};
    rows.base = reinterpret_cast<uint64_t>(given.from), rows.rank = 2, rows.element_bytes = 1, rows.stride[0] = 16;
    rows.dim[0] = rows.box[0] = 16, rows.dim[1] = rows.box[1] = bytes / 16;
    Copy copy = given;
    copy.to = there.at;
    const int first[2] = {0, 0};
    Async::of(b)->load(b, rows, copy.to, first, number, copy);
}

}  // namespace fa_host

// -- the functions that words call ------------------------------------------------------------------------------------

extern "C" {

void fa_host_cluster_arrive(const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    Fiber& self = w.fiber[w.current];
    Barrier& whole = w.lead->barrier[cluster_barrier];
    if (self.in_cluster_barrier) tma_fault(w, "a second cluster_arrive without a cluster_wait between", "cluster_arrive", file, line);
    self.in_cluster_barrier = true;
    self.cluster_phase = whole.phase;
    if (w.async) w.async->complete_some(w);
    if (w.race) w.race->clocks->arrive(Clocks::whole_cluster, own_clock());
    if (++whole.arrived == whole.expected) complete_cluster_barrier(*w.lead);
}

fa_host::Next fa_host_cluster_wait_arrive(const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    Fiber& self = w.fiber[w.current];
    if (!self.in_cluster_barrier) tma_fault(w, "a cluster_wait without a cluster_arrive before it", "cluster_wait", file, line);
    self.in_cluster_barrier = false;
    if (self.cluster_phase == w.lead->barrier[cluster_barrier].phase) return wait_at(w, cluster_barrier, "cluster_wait", file, line);
    if (w.race) w.race->clocks->release(Clocks::whole_cluster, own_clock());
    return {nullptr, nullptr};
}

void fa_host_mbarrier_arrive_remote(unsigned at, const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const char* word = "mbarrier_arrive_remote";
    void* code = __builtin_return_address(0);
    const Place place = place_of(w, at, 8, 8, word, file, line);
    Worker& b = *place.block;
    const int number = mbarrier_at(b, reinterpret_cast<unsigned long long*>(place.at), code, word, file, line);
    if (b.race && &b != &w) b.race->accessed_from(own_clock(), code);
    arrive_at_mbarrier(b, number, 0, word, file, line);
    if (w.async) w.async->complete_some(w);
}

void fa_host_bulk_copy_to_cluster(unsigned to, const void* from, unsigned bytes, unsigned barrier, const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const char* word = "bulk_copy_to_cluster";
    if (!bytes || bytes % 16) tma_fault(w, "a copy of no multiple of 16 bytes", word, file, line);
    if (!in_shared_memory(w, from, bytes) || reinterpret_cast<uintptr_t>(from) % 16)
        tma_fault(w, "a copy from no 16-byte aligned place in shared memory", word, file, line);
    copy_to_block(w, to, bytes, barrier, Copy{{}, nullptr, from, __builtin_return_address(0), file, line, 0, 0, false, -1, 0, 0, nullptr},
                  word);
}

void fa_host_store_remote(unsigned to, const void* value, unsigned barrier, const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    Copy copy{{}, nullptr, nullptr, __builtin_return_address(0), file, line, 16, 0, false, -1, 0, 0, nullptr};
    memcpy(copy.value, value, 16);
    copy_to_block(w, to, 16, barrier, copy, "store_remote_16");
}

void fa_host_tma_multicast(const void* given, void* to, unsigned long long* barrier, unsigned blocks, const int* at, int rank,
                           const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const char* word = "tma_load_multicast";
    void* code = __builtin_return_address(0);
    const TensorMap& map = checked_map(w, given, to, rank, word, file, line);
    aligned_column(w, map, at[0], word, file, line);
    if (!blocks || blocks >> w.lead->own_cluster.blocks)
        tma_fault(w, "a multicast to a block outside the cluster, or to none", word, file, line);
    const Copy copy{{}, nullptr, nullptr, code, file, line, 0, 0, false, -1, 0, 0, nullptr};
    for (unsigned rest = blocks; rest; rest &= rest - 1) {
        Worker& b = living_block(w, unsigned(__builtin_ctz(rest)), word, file, line);
        const auto there = [&](void* own) { return b.arena + (static_cast<char*>(own) - w.arena); };
        Copy each = copy;
        each.to = there(to);
        const int number = counting_mbarrier(b, reinterpret_cast<unsigned long long*>(there(barrier)), code, word, file, line);
        Async::of(b)->load(b, map, each.to, at, number, each);
    }
}
}
