// Asynchronous copies: cp.async and TMA's loads and stores, from their start to the wait that retires them. (wgmma.hpp: products.)
//
// On a GPU a copy may complete at any time between its start and the wait that retires its group, or the phase of the mbarrier that counts
// its bytes. In index order it completes here as late as possible, and until then its destination is poisoned with NaN, so that a read
// before the wait shows. For a cp.async the latest moment is the wait of its thread, for a TMA load the moment when no thread can go on
// without it. With a seed each copy completes at a random point: at its start, at a later commit, wait or barrier of its thread, or at the
// last moment. A copy that is never waited for never completes: no correct program reads its destination.
//
// The source is read at the start, of a cp.async by the calling word, so that a bad address is reported at the kernel's line. The source
// must hold the same bytes when the copy completes. The destination must not have been written in between.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "barrier.hpp"
#include "block.hpp"
#include "global.hpp"
#include "race.hpp"
#include "report.hpp"
#include "scheduler.hpp"
#include "tensor_map.hpp"

namespace fa_host {

struct Box {  // what TMA copies
    TensorMap map;
    int at[5];
    int mbarrier;    // counts a load's bytes, in this phase
    unsigned phase;
    unsigned bytes, room;
    bool adds;  // floats, as they lie
    bool read;  // a wait has seen that shared memory was read
    const int* turn;  // of a reduction, that of the thread when it began
    unsigned char* image;  // of shared memory, twice
};

struct Copy {
    unsigned char value[16];  // of a cp.async, or of a store from registers to another block
    char* to;                 // in shared memory; of a store its source
    const void* from;  // of a TMA load null, of a copy from another block of the cluster in that block's shared memory
    void* code;
    const char* file;
    int line, bytes;
    unsigned group;
    bool complete;
    int next;
    int thread, rank;  // of the block of the thread in its cluster, -1 without
    Box* box;  // kept with the record for its next use
};

struct Async {
    static constexpr int max_copies = 1 << 20;  // reserves address space; a page is allocated on first use
    struct Queue {
        int first, last;  // -1: none
        unsigned groups;  // committed so far, which is the number of the open group
    };

    int used, free;
    Queue queue[max_threads];  // cp.async
    Queue store[max_threads];  // TMA to global memory
    Queue loads;               // TMA to shared memory, of all threads: mbarriers count them, not groups
    Copy copy[max_copies];

    static Async* of(Worker& w) {
        if (!w.async) {
            w.async = reinterpret_cast<Async*>(map_memory(sizeof(Async)));
            if (!w.async) {
                out_of_memory("copies in flight", sizeof(Async));
                abort_block(w);
            }
            w.async->new_block();
        }
        return w.async;
    }

    void new_block() {
        used = 0;
        free = -1;
        loads = Queue{-1, -1, 0};
        for (auto& q : queue) q = loads;
        for (auto& q : store) q = loads;
    }

    // Takes a record into a queue.
    Copy& start(Worker& w, Queue& q, const Copy& given) {
        int i = free;
        if (i >= 0) free = copy[i].next;
        else i = used++;
        if (i == max_copies) {
            begin_report(w, "more than a million copies in flight: none is ever waited for");
            print(": thread %d at %s:%d\n", w.current, given.file, given.line);
            end_report(w);
        }
        Copy& c = copy[i];
        Box* kept = c.box;
        c = given;
        c.box = kept;
        c.group = q.groups;
        c.complete = false;
        c.next = -1;
        c.thread = int(this_worker->current);
        c.rank = w.cluster ? this_worker->rank : -1;
        q.first < 0 ? q.first = i : copy[q.last].next = i;
        q.last = i;
        return c;
    }

    // -- cp.async --------------------------------------------------------------------------------------------------------

    void cp_async(Worker& w, const Copy& given) {
        Copy& c = start(w, queue[w.current], given);
        if (w.race) w.race->access(c.to, 16, true, c.code, own_clock(), copy_started);
        memset(c.to, 0xff, 16);
        if (w.random && next_random(w) % 4 == 0) complete(w, c);
    }

    void commit(Worker& w) {
        ++queue[w.current].groups;
        complete_some(w);
    }

    // cp.async.wait_group: completes all but the latest `but` committed groups.
    void wait(Worker& w, unsigned but) {
        Queue& q = queue[w.current];
        complete_some(w);
        while (q.first >= 0 && q.groups - copy[q.first].group > but) {
            Copy& c = copy[q.first];
            if (!c.complete) complete(w, c);
            if (w.race) w.race->access(c.to, 16, true, c.code, own_clock(), copy_waited_for);
            pop_front(q);
        }
    }

    // With a seed: completes some of this thread's copies and some of TMA's loads.
    void complete_some(Worker& w) {
        if (!w.random) return;
        for (int i = queue[w.current].first; i >= 0; i = copy[i].next)
            if (!copy[i].complete && next_random(w) % 4 == 0) complete(w, copy[i]);
        for (int i = loads.first, before = -1; i >= 0;) {
            const int next = copy[i].next;
            if (next_random(w) % 8 == 0) deliver(w, i, before);
            else before = i;
            i = next;
        }
    }

    // This thread has returned.
    void end(Worker& w) {
        Queue& q = queue[w.current];
        while (q.first >= 0) {
            if (!copy[q.first].complete) check(w, copy[q.first]);
            pop_front(q);
        }
        while (store[w.current].first >= 0 && copy[store[w.current].first].box->read) complete_store(store[w.current]);
        const int left = store[w.current].first;
        if (left >= 0) in_flight_at_end(w, "a thread ended with a TMA store in flight that it has not waited for", copy[left]);
        if (w.live > 1) return;
        if (loads.first >= 0)
            in_flight_at_end(w,
                             copy[loads.first].bytes || copy[loads.first].from
                                 ? "a block ended with a copy to its shared memory in flight: no phase of its mbarrier was waited for"
                                 : "a block ended with a TMA load in flight: no phase of its mbarrier was waited for",
                             copy[loads.first]);
    }

    // The copies in flight to this block that read the shared memory of another, which ends: null where there are none.
    const Copy* load_from(const Worker& source) const {
        for (int i = loads.first; i >= 0; i = copy[i].next)
            if (copy[i].from && in_shared_memory(source, copy[i].from, 1)) return &copy[i];
        return nullptr;
    }

    // -- TMA -------------------------------------------------------------------------------------------------------------

    // w: the block to whose shared memory it copies. A copy of given.value has those bytes as its source.
    void load(Worker& w, const TensorMap& map, char* to, const int* at, int mbarrier, const Copy& given) {
        Copy& c = start(w, loads, given);
        Box& box = boxed(w, c, map, at);
        if (c.bytes) box.map.base = reinterpret_cast<uint64_t>(c.value);
        box.mbarrier = mbarrier;
        box.phase = w.barrier[mbarrier].phase;
        box.map.load(at, box.image);
        if (global.on) global.tma_loads(*this_worker, box.map, box.at, c.code, own_clock());
        if (w.race) w.race->tma_started(to, box.bytes, c.code, own_clock(), w.barrier[mbarrier].clock, !c.bytes);
        memset(to, 0xff, box.bytes);
        w.lead->idle_peeks = 0;
        if (this_worker->async) this_worker->async->complete_some(*this_worker);
    }

    // Lets a load arrive: the latest moment for the first one that a waiting thread needs, or else for the first one of all.
    bool deliver_first(Worker& w, bool only_awaited = false) {
        int found = -1, found_before = -1;
        for (int i = loads.first, before = -1; i >= 0; before = i, i = copy[i].next) {
            bool awaited = false;
            for (unsigned waiting : w.barrier[copy[i].box->mbarrier].waiting) awaited |= waiting != 0;
            if ((found < 0 && !only_awaited) || awaited) found = i, found_before = before;
            if (awaited) break;
        }
        if (found >= 0) deliver(w, found, found_before);
        return found >= 0;
    }

    void begin_store(Worker& w, const TensorMap& map, char* from, const int* at, const Copy& given, bool adds = false) {
        Copy& c = start(w, store[w.current], given);
        Box& box = boxed(w, c, map, at);
        box.adds = adds, box.read = false;
        box.turn = w.turns[w.current].at[0];
        memcpy(box.image, from, box.bytes);
        if (w.race) w.race->access(from, box.bytes, false, c.code, own_clock(), read_begun);
        if (global.on) global.bulk_begins(w, box.map, box.at, adds, c.group, c.code, own_clock());
        complete_some(w);
    }

    // bulk_wait and bulk_wait_read: the stores of all but the latest `but` groups have read shared memory, at the latest moment now. A
    // reduction that has only read it is complete when it is waited for, when its thread ends or when eight others are.
    void wait_for_stores(Worker& w, unsigned but, bool only_read) {
        Queue& q = store[w.current];
        if (global.on && !only_read) global.bulk_waited(w, q.groups, but, own_clock());
        unsigned adds = 0;
        for (int i = q.first; i >= 0 && q.groups - copy[i].group > but; i = copy[i].next) {
            Copy& c = copy[i];
            adds += c.box->adds;
            if (c.box->read) continue;
            if (memcmp(c.to, c.box->image, c.box->bytes)) wrong(w, "shared memory was written while a TMA store from it was in flight", c);
            if (w.race) w.race->access(c.to, c.box->bytes, false, c.code, own_clock(), by_async_proxy);
            if (!c.box->adds) c.box->map.store(c.box->at, c.box->image);
            c.box->read = true;
        }
        while (q.first >= 0 && copy[q.first].box->read && q.groups - copy[q.first].group > but) {
            const bool add = copy[q.first].box->adds;
            if (add && only_read && adds <= 8 && !(w.random && next_random(w) % 4 == 0)) break;
            adds -= add;
            complete_store(q);
        }
    }

    // Whether a reduction that this thread has begun in a turn may be incomplete.
    bool adds_under(const Worker& w, const int* turn) const {
        for (int i = store[w.current].first; i >= 0; i = copy[i].next)
            if (copy[i].box->adds && copy[i].box->turn == turn) return true;
        return false;
    }

    // The load in flight to an address, for reports; null where there is none.
    const Copy* load_to(const char* address) const {
        for (int i = loads.first; i >= 0; i = copy[i].next)
            if (address >= copy[i].to && address < copy[i].to + copy[i].box->bytes) return &copy[i];
        return nullptr;
    }

    [[noreturn]] static void wrong(Worker& w, const char* what, const Copy& c) {
        begin_report(w, what);
        print(": the copy of thread %d", c.thread);
        if (c.rank >= 0) print(" of block %d of the cluster", c.rank);
        print(" at %s:%d\n", c.file, c.line);
        end_report(w);
        __builtin_unreachable();
    }

  private:
    Box& boxed(Worker& w, Copy& c, const TensorMap& map, const int* at) {
        if (!c.box && (c.box = static_cast<Box*>(aligned_alloc(64, sizeof(Box))))) c.box->room = 0, c.box->image = nullptr;
        const unsigned bytes = map.box_bytes();
        if (c.box && c.box->room < bytes) {
            ::free(c.box->image);
            c.box->image = static_cast<unsigned char*>(malloc(2 * size_t(bytes)));
            c.box->room = c.box->image ? bytes : 0;
        }
        if (!c.box || c.box->room < bytes) {
            out_of_memory("a TMA copy", bytes);
            abort_block(w);
        }
        c.box->map = map;
        c.box->bytes = bytes;
        for (unsigned d = 0; d < 5; ++d) c.box->at[d] = d < map.rank ? at[d] : 0;
        return *c.box;
    }

    // Takes a load out of the queue, behind the one before it, and lets it arrive.
    void deliver(Worker& w, int i, int before) {
        Copy& c = copy[i];
        Box& box = *c.box;
        (before < 0 ? loads.first : copy[before].next) = c.next;
        if (loads.last == i) loads.last = before;
        c.next = free;
        free = i;
        Barrier& b = w.barrier[box.mbarrier];
        if (b.phase != box.phase)
            wrong(w,
                  c.bytes || c.from ? "a copy from another block arrives in another phase of its mbarrier than it began in"
                                    : "a TMA load arrives in another phase of its mbarrier than it began in: too few bytes were expected",
                  c);
        box.map.load(box.at, box.image + box.bytes);
        if (!(w.race && c.from) && memcmp(box.image, box.image + box.bytes, box.bytes))  // the race check names a writer of shared memory
            wrong(w,
                  c.from ? "shared memory was written while a copy from it to another block was in flight"
                         : "global memory was written while a TMA load from it was in flight",
                  c);
        if (!w.race && (*c.to != char(0xff) || memcmp(c.to, c.to + 1, box.bytes - 1)))
            wrong(w, "shared memory was written, or another copy to it begun, while a TMA load to it was in flight", c);
        memcpy(c.to, box.image, box.bytes);
        if (w.race) w.race->tma_arrived(c.to, box.bytes);
        b.pending -= box.bytes;
        complete_if_whole(w, box.mbarrier);
    }

    // The first of a queue, which has read shared memory.
    void complete_store(Queue& q) {
        const Box& box = *copy[q.first].box;
        const float* values = reinterpret_cast<const float*>(box.image);
        float* to = reinterpret_cast<float*>(box.map.base);
        for (unsigned i = 0; box.adds && i < box.bytes / 4; ++i) atomically_added<uint32_t>(to + i, values[i]);
        pop_front(q);
    }

    void pop_front(Queue& q) {
        int i = q.first;
        q.first = copy[i].next;
        copy[i].next = free;
        free = i;
    }

    void in_flight_at_end(Worker& w, const char* what, const Copy& c) { wrong(w, what, c); }

    void check(Worker& w, const Copy& c) {
        unsigned char poison[16];
        memset(poison, 0xff, 16);
        if (memcmp(c.from, c.value, c.bytes)) wrong(w, "memory was written while a copy from it was in flight", c);
        // The race check reports the writer itself. Another copy of the same data is harmless.
        if (!w.race && memcmp(c.to, poison, 16) && memcmp(c.to, c.value, 16))
            wrong(w, "shared memory was written, or another copy to it begun, while a copy to it was in flight", c);
    }

    void complete(Worker& w, Copy& c) {
        check(w, c);
        memcpy(c.to, c.value, 16);
        c.complete = true;
    }
};

}  // namespace fa_host
