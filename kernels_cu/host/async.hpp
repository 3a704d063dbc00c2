// Asynchronous copies (cp.async): the groups that each thread has started and not yet waited for.
//
// On a GPU a copy may complete at any time between its start and the wait that retires its group. In index order it completes here as
// late as possible, and until then its destination is poisoned with NaN, so that a read before the wait shows. With a seed each copy
// completes at a random point: at its start, at a later commit, wait or barrier of its thread, or at the last moment. A copy that is
// never waited for never completes: no correct program reads its destination.
//
// The source is read at the start, by the calling word, so that a bad address is reported at the kernel's line. The source must hold
// the same bytes when the copy completes. The destination must not have been written in between.
#pragma once

#include <string.h>

#include "block.hpp"
#include "race.hpp"
#include "report.hpp"
#include "scheduler.hpp"

namespace fa_host {

struct Copy {
    unsigned char value[16];
    char* to;
    const void* from;
    void* code;
    const char* file;
    int line, bytes;
    unsigned group;
    bool complete;
    int next;
};

struct Async {
    static constexpr int max_copies = 1 << 20;  // reserves address space; a page is allocated on first use
    struct Queue {
        int first, last;  // -1: none
        unsigned groups;  // committed so far, which is the number of the open group
    };

    int used, free;
    Queue queue[max_threads];
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
        for (auto& q : queue) q = Queue{-1, -1, 0};
    }

    void start(Worker& w, const Copy& given) {
        int i = free;
        if (i >= 0) free = copy[i].next;
        else i = used++;
        if (i == max_copies) {
            begin_report(w, "more than a million copies in flight: none is ever waited for");
            print(": thread %d at %s:%d\n", w.current, given.file, given.line);
            end_report(w);
        }
        Queue& q = queue[w.current];
        Copy& c = copy[i];
        c = given;
        c.group = q.groups;
        c.complete = false;
        c.next = -1;
        q.first < 0 ? q.first = i : copy[q.last].next = i;
        q.last = i;
        if (w.race) w.race->access(c.to, 16, true, c.code, w.current, Race::copy_started);
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
            if (w.race) w.race->access(c.to, 16, true, c.code, w.current, Race::copy_waited_for);
            pop_front(q);
        }
    }

    // With a seed: completes some of this thread's copies.
    void complete_some(Worker& w) {
        if (!w.random) return;
        for (int i = queue[w.current].first; i >= 0; i = copy[i].next)
            if (!copy[i].complete && next_random(w) % 4 == 0) complete(w, copy[i]);
    }

    // This thread has returned.
    void end(Worker& w) {
        Queue& q = queue[w.current];
        while (q.first >= 0) {
            if (!copy[q.first].complete) check(w, copy[q.first]);
            pop_front(q);
        }
    }

  private:
    void pop_front(Queue& q) {
        int i = q.first;
        q.first = copy[i].next;
        copy[i].next = free;
        free = i;
    }

    void check(Worker& w, const Copy& c) {
        unsigned char poison[16];
        memset(poison, 0xff, 16);
        const char* wrong = nullptr;
        if (memcmp(c.from, c.value, c.bytes)) wrong = "memory was written while a copy from it was in flight";
        // The race check reports the writer itself. Another copy of the same data is harmless.
        if (!w.race && memcmp(c.to, poison, 16) && memcmp(c.to, c.value, 16))
            wrong = "shared memory was written, or another copy to it begun, while a copy to it was in flight";
        if (!wrong) return;
        begin_report(w, wrong);
        print(": the copy of thread %d at %s:%d\n", w.current, c.file, c.line);
        end_report(w);
    }

    void complete(Worker& w, Copy& c) {
        check(w, c);
        memcpy(c.to, c.value, 16);
        c.complete = true;
    }
};

}  // namespace fa_host
