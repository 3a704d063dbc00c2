// Copies under way (cp.async): what a thread has started and not yet waited for. Part of engine.cpp.
//
// A GPU may let such a copy arrive at any time from its start to the wait that retires its group. In index order it arrives here
// as late as it may, and until then its destination is NaN: what reads too early shows. With a seed each copy arrives at one of
// the points that the draw picks: at once, at a later commit, wait or barrier of its thread, or at the last moment. What the thread
// never waits for never arrives, because nobody may look at it.
//
// Its source is read at the start, by the word itself (so that a bad address is the kernel's, with its line), and must be the
// same when the copy arrives; its destination must not have been written in between.
#pragma once

namespace fa_host {

struct Copy {
    unsigned char value[16];
    char* to;
    const void* from;
    void* code;
    const char* file;
    int line, bytes;
    unsigned group;
    bool arrived;
    int next;
};

struct Async {
    static constexpr int most_copies = 1 << 20;  // address space; memory is used as copies are
    struct Queue {
        int first, last;  // -1: none
        unsigned groups;  // closed so far, so the number of the open one
    };

    int used, free;
    Queue queue[max_threads];
    Copy copy[most_copies];

    static Async* of(Worker& w) {
        if (!w.async) {
            void* memory = mmap(nullptr, sizeof(Async), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) abort();
            w.async = static_cast<Async*>(memory);
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
        if (i == most_copies) {
            begin_report(w, "more than a million copies in flight: none is ever waited for");
            say(": thread %d at %s:%d\n", w.current, given.file, given.line);
            end_report(w);
        }
        Queue& q = queue[w.current];
        Copy& c = copy[i];
        c = given;
        c.group = q.groups;
        c.arrived = false;
        c.next = -1;
        q.first < 0 ? q.first = i : copy[q.last].next = i;
        q.last = i;
        if (w.race) w.race->access(c.to, 16, true, c.code, w.current, Race::in_flight);
        memset(c.to, 0xff, 16);
        if (w.random && draw(w) % 4 == 0) arrive(w, c);
    }

    void commit(Worker& w) {
        ++queue[w.current].groups;
        drift(w);
    }

    // All but the latest `but` closed groups arrive.
    void wait(Worker& w, unsigned but) {
        Queue& q = queue[w.current];
        drift(w);
        while (q.first >= 0 && q.groups - copy[q.first].group > but) {
            Copy& c = copy[q.first];
            if (!c.arrived) arrive(w, c);
            if (w.race) w.race->access(c.to, 16, true, c.code, w.current, Race::landed);
            drop_first(q);
        }
    }

    // With a seed: some of this thread's copies arrive now.
    void drift(Worker& w) {
        if (!w.random) return;
        for (int i = queue[w.current].first; i >= 0; i = copy[i].next)
            if (!copy[i].arrived && draw(w) % 4 == 0) arrive(w, copy[i]);
    }

    // This thread has ended.
    void end(Worker& w) {
        Queue& q = queue[w.current];
        while (q.first >= 0) {
            if (!copy[q.first].arrived) check(w, copy[q.first]);
            drop_first(q);
        }
    }

  private:
    void drop_first(Queue& q) {
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
        // The race check tells who wrote. Another copy of the same data is no harm.
        if (!w.race && memcmp(c.to, poison, 16) && memcmp(c.to, c.value, 16))
            wrong = "shared memory was written, or another copy to it begun, while a copy to it was in flight";
        if (!wrong) return;
        begin_report(w, wrong);
        say(": the copy of thread %d at %s:%d\n", w.current, c.file, c.line);
        end_report(w);
    }

    void arrive(Worker& w, Copy& c) {
        check(w, c);
        memcpy(c.to, c.value, 16);
        c.arrived = true;
    }
};

}  // namespace fa_host
