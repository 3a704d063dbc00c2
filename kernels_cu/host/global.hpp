// The race check of global memory: accesses to outputs, workspaces and module globals that the PTX memory model leaves unordered, in any
// schedule.
//
// Shadow memory holds of every four bytes the last write, and the last read or addition of another block; of sixteen that are read at once
// one mark. Within a block, or a cluster, the
// clocks of its barriers order two accesses (clocks.hpp). Between blocks it takes a release and an acquire (PTX ISA, "Memory Consistency
// Model"). A thread releases what it is behind: by a release, or by __threadfence and then an atomic. Another reads that value, or what
// atomics have made of it, and acquires: by an acquire, or by __threadfence behind the read. A relaxed atomic alone orders nothing, nor do
// two fences. Two atomics do not race; in a launch with `ordered_adds`, a deterministic form, two additions of floats must be ordered, too.
// What bulk operations write is unordered until bulk_wait; what is stored in a launch needs fence_proxy_async_global on the way to a bulk
// operation. Launches are ordered; of those that overlap, what is behind dependency_wait.
//
//     release    an event: what its thread knew of each thread of its block (clock), and of the events of others (knows)
//     acquire    the events that a thread has learned of, with its own clock: whoever is behind that clock has learned of them, too
//
// Not seen: all but the last of several reads since a write, and whether atomics have a proxy fence behind them. A fence of the block orders
// nothing here, and a volatile access is a plain one.
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "block.hpp"
#include "race.hpp"
#include "report.hpp"
#include "tensor_map.hpp"

namespace fa_host {

enum Global_kind { plainly, by_atomic, by_addition, in_bulk };  // by_addition: of floats, whose order shows in the sum

// An access in 64 bits; 0 is none.
struct Mark {
    static constexpr uint32_t in_flight = (1 << 18) - 1;
    static constexpr int max_units = 1 << 20, max_codes = 1 << 12;
    uint64_t bits;

    static Mark of(uint32_t unit, int thread, uint32_t clock, int code, Global_kind kind) {
        return {uint64_t(unit) << 44 | uint64_t(thread) << 34 | uint64_t(clock) << 16 | uint64_t(code) << 4 | uint64_t(kind) << 2};
    }
    uint32_t unit() const { return uint32_t(bits >> 44); }  // a block, or a cluster, of some launch
    int thread() const { return int(bits >> 34 & 1023); }
    uint32_t clock() const { return uint32_t(bits >> 16) & in_flight; }  // since its block began
    int code() const { return int(bits >> 4 & (max_codes - 1)); }
    Global_kind kind() const { return Global_kind(bits >> 2 & 3); }
    unsigned halves() const { return bits & 3; }  // of the four bytes
    bool atomic() const { return kind() == by_atomic || kind() == by_addition; }
};

// The number of an event of each releaser; of those beyond `count`, 0.
struct Events {
    int count;
    uint32_t of[];
};
struct Event {
    const Events* knows;
    bool committed;  // it has a number
    uint32_t clock[];
};
struct Releaser {  // a thread that has released
    int thread, next;  // next: of the same unit, -1: none
    uint32_t count, room;
    Event** event;
};
struct Acquired {
    uint32_t clock;
    bool waited;  // for the launch before
    const Events* knows;
    const Acquired* before;
};
struct Flight {  // a bulk operation that has not been waited for
    TensorMap map;
    int at[5];
    unsigned group;
    Mark mark;
    Flight* next;
};
// A word in memory that atomics access: what a thread that reads it may acquire, and each thread's last access since a plain store.
struct Word {
    const int* at;
    const Events* message;
    bool released;  // by any access
    Mark* marks;
    int count, room;
};
struct Speech {
    bool reads, writes, acquires, releases;
};
constexpr Speech relaxed{true, true, false, false}, acq_rel{true, true, true, true}, acquires{true, false, true, false},
    releases{false, true, false, true};
struct Proxy_fence {  // of global memory
    const Event* event;  // what its thread was behind
    Mark mark;
};
struct Spoken {  // an access to a word, for the reports
    const int* at;
    void* code;
    uint32_t unit, clock;
    int thread;
    bool writes, reads, releases;
};

// What the threads of the running block, or cluster, have learned.
struct Learned {
    static constexpr int remembered = 256;
    uint32_t unit;
    int acquirers;
    int16_t acquirer[max_threads];
    const Acquired* acquired[max_threads];  // the last one
    const Events* pending[max_threads];  // read by relaxed atomics: a fence acquires it
    Event* fenced[max_threads];  // the last fence: an atomic releases it
    Flight* flights[max_threads];
    const int* last_word[max_threads];  // that the thread's last atomic was for
    struct {
        uint64_t access;
        int thread;
    } known[remembered];  // to be ordered: it stays so
};

struct Global {
    static constexpr size_t chunk_bytes = 1 << 20;
    static constexpr int max_spoken = 1 << 16, max_reports = 8, places = 2 * Mark::max_codes;

    bool on;  // in this launch
    const Launch* launch;
    uint32_t base, chained;  // the first unit of this launch; of the first one that may still run beside it
    uint32_t next = 1;  // the first unit of the next launch
    uint32_t generation = 1;
    bool overlapped;  // the launch before did

    void* code[Mark::max_codes];  // by number; 0 is unknown
    int codes = 1;
    int numbered[places];  // hash table of the numbers

    pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;  // guards what follows
    char* chunk;  // memory of this launch; a chunk's first word is the chunk before
    size_t chunk_used;
    int* first_releaser;  // by unit, -1: none
    Releaser* releaser;
    int releasers, releaser_room;
    Word* word;
    int words, word_room;
    Spoken* spoken;
    int spoken_count;
    Proxy_fence* fence_;
    int fences, fence_room;

    struct Locked {
        pthread_mutex_t& own;
        explicit Locked(pthread_mutex_t& lock) : own(lock) { pthread_mutex_lock(&own); }
        ~Locked() { pthread_mutex_unlock(&own); }
    };

    // -- a launch ------------------------------------------------------------------------------------------------------

    void begin(const Launch& given, uint64_t units) {
        launch = &given;
        on = given.checks & 1 && given.watch_count && units < Mark::max_units - 1;
        if (!on) return;
        if (next + units >= Mark::max_units || codes > Mark::max_codes / 2) {
            ++generation;
            next = base = chained = 1, codes = 1;
            memset(numbered, 0, sizeof numbered);
        }
        for (int i = 0; i < given.watch_count; ++i) {
            Watch& r = *given.watch[i];
            const size_t bytes = (r.bytes + 15) / 16 * 32;
            if (r.generation && r.generation != generation)
                memset(r.writes, 0, bytes), memset(r.others, 0, bytes), memset(r.wide, 0, bytes / 4);
            r.generation = generation;
        }
        const bool overlaps = given.held != nullptr;
        if (!overlaps) chained = next;
        else if (!overlapped) chained = base;
        overlapped = overlaps;
        base = next;
        next += uint32_t(units);
        chunk = nullptr;
        first_releaser = static_cast<int*>(take(sizeof(int) * units));
        for (uint64_t i = 0; i < units; ++i) first_releaser[i] = -1;
        releaser = nullptr, word = nullptr, spoken = nullptr, fence_ = nullptr;
        releasers = releaser_room = words = word_room = spoken_count = fences = fence_room = 0;
    }

    void end() {
        if (!on) return;
        for (int i = 0; i < releasers; ++i) ::free(releaser[i].event);
        for (int i = 0; i < word_room; ++i) ::free(word[i].marks);
        ::free(releaser), ::free(word), ::free(spoken), ::free(fence_);
        while (chunk) {
            char* before = *reinterpret_cast<char**>(chunk);
            ::free(chunk);
            chunk = before;
        }
        on = false;
    }

    // index: of the block, or cluster, in the grid.
    void new_block(Learned& l, uint64_t index, int threads) {
        l.unit = base + uint32_t(index);
        l.acquirers = 0;
        memset(l.acquired, 0, sizeof(void*) * size_t(threads)), memset(l.pending, 0, sizeof(void*) * size_t(threads));
        memset(l.fenced, 0, sizeof(void*) * size_t(threads)), memset(l.flights, 0, sizeof(void*) * size_t(threads));
        memset(l.last_word, 0, sizeof(void*) * size_t(threads));
        memset(l.known, 0, sizeof l.known);
    }

    // -- accesses ------------------------------------------------------------------------------------------------------

    bool watches(const void* address) const { return on && watched(address); }

    void access(Worker& w, const void* address, size_t bytes, bool writes, void* pc, int thread, Global_kind kind = plainly) {
        const Watch* r = watched(address);
        if (!r) return;
        ++w.race->watched;
        marked(w, *r, address, bytes, writes, mark(w, pc, thread, kind), kind == in_bulk);
    }

    // A TMA load reads when it begins.
    void tma_loads(Worker& w, const TensorMap& map, const int* from, void* pc, int thread) {
        if (!watched(reinterpret_cast<void*>(map.base))) return;
        map.each_row(from, [&](const char* row, uint32_t, uint32_t inside, uint32_t) {
            if (inside) access(w, row, inside, false, pc, thread, in_bulk);
        });
    }

    // A bulk store or reduction. What it writes is unordered until its thread has waited for its group.
    void bulk_begins(Worker& w, const TensorMap& map, const int* to, bool adds, unsigned group, void* pc, int thread) {
        if (!watched(reinterpret_cast<void*>(map.base))) return;
        Mark now = mark(w, pc, thread, adds ? by_addition : in_bulk);
        now.bits |= uint64_t(Mark::in_flight) << 16;
        map.each_row(to, [&](const char* row, uint32_t, uint32_t inside, uint32_t) {
            if (const Watch* r = inside ? watched(row) : nullptr) marked(w, *r, row, inside, true, now, true);
        });
        Locked locked(lock);
        auto* f = static_cast<Flight*>(take(sizeof(Flight)));
        *f = {map, {}, group, now, w.lead->learned->flights[thread]};
        for (unsigned d = 0; d < map.rank; ++d) f->at[d] = to[d];
        w.lead->learned->flights[thread] = f;
    }

    // bulk_wait for all but the latest `but` of the groups of a thread.
    void bulk_waited(Worker& w, unsigned groups, unsigned but, int thread) {
        Flight** f = &w.lead->learned->flights[thread];
        while (*f) {
            if (groups - (*f)->group <= but) {
                f = &(*f)->next;
                continue;
            }
            const Clocks& c = *w.race->clocks;
            const uint64_t before = (*f)->mark.bits, now = (before & ~(uint64_t(Mark::in_flight) << 16)) | uint64_t(own_time(c, thread))
                                                                                                               << 16;
            (*f)->map.each_row((*f)->at, [&](const char* row, uint32_t, uint32_t inside, uint32_t) {
                const Watch* r = inside ? watched(row) : nullptr;
                if (!r) return;
                for (size_t i = size_t(row - r->address) / 4, end = (size_t(row - r->address) + inside + 3) / 4; i < end; ++i) {
                    uint64_t expected = before | (r->writes[i] & 3);
                    __atomic_compare_exchange_n(&r->writes[i], &expected, now | (expected & 3), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
                }
            });
            *f = (*f)->next;
        }
    }

    // -- synchronisation -----------------------------------------------------------------------------------------------

    // __threadfence: acquires what the thread's atomics have read, and releases by those to come.
    void fence(Worker& w, int thread) {
        Learned& l = *w.lead->learned;
        Clocks& c = *w.race->clocks;
        Locked locked(lock);
        if (l.pending[thread]) learn(l, c, thread, l.pending[thread], false);
        l.pending[thread] = nullptr;
        Event* before = l.fenced[thread];
        l.fenced[thread] = event(l, c, thread, before && !before->committed ? before : nullptr);
    }

    // fence_proxy_async_global: what the thread is behind is visible to bulk operations that are behind it.
    void proxy_fence(Worker& w, int thread) {
        Clocks& c = *w.race->clocks;
        Locked locked(lock);
        if (fences == fence_room) {
            fence_room = fence_room ? 2 * fence_room : 64;
            fence_ = static_cast<Proxy_fence*>(realloc(static_cast<void*>(fence_), sizeof(Proxy_fence) * size_t(fence_room)));
        }
        const Mark now = Mark::of(w.lead->learned->unit, thread, own_time(c, thread), 0, plainly);
        fence_[fences++] = {event(*w.lead->learned, c, thread, nullptr), now};
    }

    // An access to a word by atomics; `act` makes it, and returns what this returns.
    template <class Act> auto speaks(Worker& w, const int* address, Speech how, void* pc, int thread, Act act) {
        Learned& l = *w.lead->learned;
        Clocks& c = *w.race->clocks;
        Locked locked(lock);
        access(w, address, 4, how.writes, pc, thread, by_atomic);
        if (!how.writes && !find(address)) return act();
        Word& at = word_at(address);
        if (how.writes) keep(at, mark(w, pc, thread, by_atomic));
        l.last_word[thread] = how.reads && how.writes ? address : nullptr;
        if (how.reads && at.message && how.acquires) learn(l, c, thread, at.message, false);
        else if (how.reads && at.message) l.pending[thread] = joined(l.pending[thread], at.message);
        Event* released = how.writes ? how.releases ? event(l, c, thread, nullptr) : l.fenced[thread] : nullptr;
        if (released) commit(*released, l.unit, thread), at.released = true;
        if (how.writes && !how.reads) at.message = nullptr;
        if (released) at.message = joined(at.message, released->knows);
        if (!spoken) spoken = static_cast<Spoken*>(malloc(sizeof(Spoken) * max_spoken));
        if (spoken && spoken_count < max_spoken)
            spoken[spoken_count++] = {address, pc, l.unit, own_time(c, thread), thread, how.writes, how.reads, released != nullptr};
        return act();
    }

    // What has been released by a word of atomics, and that a thread acquires it.
    const Events* message_of(const int* at) {
        Locked locked(lock);
        const Word* found = find(at);
        return found ? found->message : nullptr;
    }
    void acquires_all(Worker& w, const Events* message, int thread) {
        Locked locked(lock);
        if (message) learn(*w.lead->learned, *w.race->clocks, thread, message, false);
    }

    // dependency_wait: the thread is behind the launches before.
    void waited_for_launch(Worker& w, int thread) {
        Locked locked(lock);
        learn(*w.lead->learned, *w.race->clocks, thread, nullptr, true);
    }

  private:
    // What is watched at an address; null: nothing.
    const Watch* watched(const void* address) const {
        for (int i = 0; i < launch->watch_count; ++i)
            if (size_t(static_cast<const char*>(address) - launch->watch[i]->address) < launch->watch[i]->bytes) return launch->watch[i];
        return nullptr;
    }

    static uint32_t own_time(const Clocks& c, int thread) {
        const uint32_t time = c.clock[thread] - c.start[thread];
        return time < Mark::in_flight ? time : Mark::in_flight - 1;
    }
    Mark mark(Worker& w, void* pc, int thread, Global_kind kind) {
        return Mark::of(w.lead->learned->unit, thread, own_time(*w.race->clocks, thread), number(pc), kind);
    }

    // The number of a place in the code, 0 where there are too many.
    int number(void* pc) {
        for (unsigned i = unsigned((reinterpret_cast<uintptr_t>(pc) * 0x9e3779b97f4a7c15ull) >> 51);; i = (i + 1) % places) {
            const int found = __atomic_load_n(&numbered[i], __ATOMIC_ACQUIRE);
            if (found && code[found] == pc) return found;
            if (found) continue;
            Locked locked(lock);
            if (numbered[i] && code[numbered[i]] != pc) continue;
            if (numbered[i]) return numbered[i];
            if (codes == Mark::max_codes) return 0;
            code[codes] = pc;
            __atomic_store_n(&numbered[i], codes, __ATOMIC_RELEASE);
            return codes++;
        }
    }

    // bulk: by the asynchronous proxy.
    void marked(Worker& w, const Watch& r, const void* address, size_t bytes, bool writes, Mark now, bool bulk) {
        const size_t first = size_t(static_cast<const char*>(address) - r.address);
        now.bits |= bytes >= 4 ? 3 : first & 2 ? 2 : 1;
        const bool atomic = now.atomic();
        for (size_t i = first / 4; i < (first + bytes + 3) / 4 && i < (r.bytes + 3) / 4; ++i) {
            const size_t quad = i / 4 * 16;
            const bool wide = first <= quad && quad + 16 <= first + bytes;
            unsigned long long& kept = !writes && wide ? r.wide[i / 4] : r.others[i];
            // A writer and a reader at the same time: one of them sees the other.
            Mark write{writes ? __atomic_exchange_n(&r.writes[i], now.bits, __ATOMIC_SEQ_CST) : 0}, other{};
            if (!writes && kept != now.bits) other.bits = __atomic_exchange_n(&kept, now.bits, __ATOMIC_SEQ_CST);
            if (writes || wide) other.bits = __atomic_load_n(&r.others[i], __ATOMIC_SEQ_CST);
            if (!writes) write.bits = __atomic_load_n(&r.writes[i], __ATOMIC_SEQ_CST);
            if (write.halves() & now.halves()) {
                const bool adds = write.kind() == by_addition && now.kind() == by_addition;
                if (!atomic && write.kind() == by_atomic) behind_atomics(w, r, i, write, now, writes);
                else if ((!atomic || !write.atomic() || (adds && launch->ordered_adds)) && !ordered(w, write, now.thread()))
                    report(w, r, 4 * i, write, true, now, writes);
                else if (bulk && write.kind() == plainly && write.unit() >= base && !fenced(w, write, now.thread()))
                    report(w, r, 4 * i, write, true, now, writes, "no fence_proxy_async_global lies between them");
                if (adds && write.unit() != now.unit() && write.unit() >= base) other.bits = r.others[i] = write.bits;
            }
            behind_other(w, r, 4 * i, other, r.others[i], now, writes, writes);
            if (writes) behind_other(w, r, 4 * i, {__atomic_load_n(&r.wide[i / 4], __ATOMIC_SEQ_CST)}, r.wide[i / 4], now, true, wide);
        }
    }
    // An access is behind a read, or an addition of another block, that is kept. forgets: no access is to be compared with it any more.
    void behind_other(Worker& w, const Watch& r, size_t byte, Mark other, unsigned long long& kept, Mark now, bool writes, bool forgets) {
        if (!(other.halves() & now.halves()) || (now.atomic() && other.atomic()) || !(writes || other.kind() == by_addition)) return;
        if (!ordered(w, other, now.thread())) report(w, r, byte, other, other.kind() == by_addition, now, writes);
        else if (forgets) __atomic_compare_exchange_n(&kept, &other.bits, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }

    // Whether a proxy fence lies between a store of this launch and a thread that is behind it.
    bool fenced(Worker& w, Mark store, int thread) {
        Locked locked(lock);
        for (int i = fences - 1; i >= 0; --i) {
            const Mark fence = fence_[i].mark;
            const Event& e = *fence_[i].event;
            const bool behind = fence.unit() == store.unit() && e.clock[store.thread()] >= store.clock();
            if ((behind || (e.knows && told(*e.knows, store))) && ordered(w, fence, thread)) return true;
        }
        return false;
    }

    // A plain access to a word is behind the atomics on it by all threads. That the last atomic of this thread has read what they made of it
    // is enough, for what it says; that an earlier one has is chance.
    void behind_atomics(Worker& w, const Watch& r, size_t i, Mark last, Mark now, bool writes) {
        Locked locked(lock);
        const int* at = reinterpret_cast<const int*>(r.address) + i;
        Word* found = find(at);
        const bool read = w.lead->learned->last_word[now.thread()] == at;
        if (!found && !ordered(w, last, now.thread())) report(w, r, 4 * i, last, true, now, writes);
        for (int n = 0; found && !read && n < found->count; ++n)
            if (!ordered(w, found->marks[n], now.thread())) {
                report(w, r, 4 * i, found->marks[n], true, now, writes);
                break;
            }
        if (found && writes) found->message = nullptr, found->count = 0;
    }

    // Whether a thread of the running block is behind an access.
    bool ordered(Worker& w, Mark before, int thread) {
        Learned& l = *w.lead->learned;
        const Clocks& c = *w.race->clocks;
        if (before.unit() < chained) return true;
        if (before.clock() == Mark::in_flight && before.unit() >= base) return false;
        if (before.unit() == l.unit && c.behind(thread, before.thread(), c.start[before.thread()] + before.clock())) return true;
        auto& known = l.known[(before.bits >> 16 ^ unsigned(thread) * 31) % Learned::remembered];
        const uint64_t access = before.bits >> 16;
        if (known.access == access && known.thread == thread) return true;
        bool found = false;
        Locked locked(lock);
        for (int i = 0; i < l.acquirers && !found; ++i) {
            const Acquired* a = learned(l, c, thread, l.acquirer[i]);
            if (a && before.unit() < base) found = a->waited;
            else if (a && a->knows) found = told(*a->knows, before);
        }
        if (found) known = {access, thread};
        return found;
    }
    // Whether one of some events is behind an access of this launch.
    bool told(const Events& events, Mark before) const {
        for (int k = first_releaser[before.unit() - base]; k >= 0; k = releaser[k].next)
            if (k < events.count && events.of[k] && releaser[k].event[events.of[k] - 1]->clock[before.thread()] >= before.clock())
                return true;
        return false;
    }

    // -- events --------------------------------------------------------------------------------------------------------

    void* take(size_t bytes) {
        bytes = (bytes + 15) / 16 * 16;
        if (!chunk || chunk_used + bytes > chunk_bytes) {
            char* added = static_cast<char*>(malloc(bytes + 16 > chunk_bytes ? bytes + 16 : chunk_bytes));
            *reinterpret_cast<char**>(added) = chunk;
            chunk = added;
            chunk_used = 16;
        }
        void* found = chunk + chunk_used;
        chunk_used += bytes;
        return found;
    }

    Events* nothing(int count) {
        auto* e = static_cast<Events*>(take(sizeof(Events) + sizeof(uint32_t) * size_t(count)));
        e->count = count;
        memset(e->of, 0, sizeof(uint32_t) * size_t(count));
        return e;
    }
    static bool covers(const Events& a, const Events& b) {
        for (int i = 0; i < b.count; ++i)
            if (b.of[i] && (i >= a.count || a.of[i] < b.of[i])) return false;
        return true;
    }
    const Events* joined(const Events* a, const Events* b) {
        if (!a || !b) return a ? a : b;
        if (covers(*a, *b)) return a;
        Events* both = nothing(a->count > b->count ? a->count : b->count);
        for (int i = 0; i < both->count; ++i) {
            const uint32_t ours = i < a->count ? a->of[i] : 0, theirs = i < b->count ? b->of[i] : 0;
            both->of[i] = ours > theirs ? ours : theirs;
        }
        return both;
    }

    // What an acquirer of the block had learned when this thread came behind it; null: nothing.
    static const Acquired* learned(const Learned& l, const Clocks& c, int thread, int acquirer) {
        const Acquired* a = l.acquired[acquirer];
        while (a && acquirer != thread && !c.behind(thread, acquirer, c.start[acquirer] + a->clock)) a = a->before;
        return a;
    }
    void learn(Learned& l, const Clocks& c, int thread, const Events* more, bool waited) {
        const Acquired* a = l.acquired[thread];
        if (a && (!more || (a->knows && covers(*a->knows, *more))) && (a->waited || !waited)) return;
        if (!a) l.acquirer[l.acquirers++] = int16_t(thread);
        auto* b = static_cast<Acquired*>(take(sizeof(Acquired)));
        *b = {own_time(c, thread), waited || (a && a->waited), joined(a ? a->knows : nullptr, more), a};
        l.acquired[thread] = b;
    }

    // What a thread is behind. room: an event that nobody has been told of.
    Event* event(const Learned& l, Clocks& c, int thread, Event* room) {
        if (!room) room = static_cast<Event*>(take(sizeof(Event) + sizeof(uint32_t) * size_t(c.threads)));
        room->committed = false;
        const Clocks::Known& k = c.own(thread);
        for (int i = 0; i < c.threads; ++i) {
            const uint32_t time = k.seen.of[i] > c.floor.of[i] ? k.seen.of[i] : c.floor.of[i];
            room->clock[i] = time > c.start[i] ? time - c.start[i] : 0;
        }
        ++c.clock[thread];  // what comes behind it is not released
        room->knows = nullptr;
        for (int i = 0; i < l.acquirers; ++i)
            if (const Acquired* a = learned(l, c, thread, l.acquirer[i])) room->knows = joined(room->knows, a->knows);
        return room;
    }
    // Gives an event its number.
    void commit(Event& e, uint32_t unit, int thread) {
        if (e.committed) return;
        e.committed = true;
        int k = first_releaser[unit - base];
        while (k >= 0 && releaser[k].thread != thread) k = releaser[k].next;
        if (k < 0) {
            if (releasers == releaser_room) {
                releaser_room = releaser_room ? 2 * releaser_room : 256;
                releaser = static_cast<Releaser*>(realloc(releaser, sizeof(Releaser) * size_t(releaser_room)));
            }
            k = releasers++;
            releaser[k] = {thread, first_releaser[unit - base], 0, 0, nullptr};
            first_releaser[unit - base] = k;
        }
        Releaser& r = releaser[k];
        if (r.count == r.room) {
            r.room = r.room ? 2 * r.room : 4;
            r.event = static_cast<Event**>(realloc(r.event, sizeof(Event*) * r.room));
        }
        r.event[r.count++] = &e;
        const Events* before = e.knows;
        Events* after = nothing(before && before->count > k + 1 ? before->count : k + 1);
        for (int i = 0; before && i < before->count; ++i) after->of[i] = before->of[i];
        after->of[k] = r.count;
        e.knows = after;
    }

    // -- words ---------------------------------------------------------------------------------------------------------

    // The place of a word in the table; null where it is not there.
    Word* find(const int* at) {
        for (size_t i = (reinterpret_cast<uintptr_t>(at) >> 2) * 0x9e3779b97f4a7c15ull >> 20; word_room; ++i) {
            Word& found = word[i % size_t(word_room)];
            if (!found.at) return nullptr;
            if (found.at == at) return &found;
        }
        return nullptr;
    }
    Word& word_at(const int* at) {
        if (Word* found = find(at)) return *found;
        if (2 * ++words > word_room) {
            Word* old = word;
            const int count = word_room;
            word_room = count ? 2 * count : 256;
            word = static_cast<Word*>(calloc(size_t(word_room), sizeof(Word)));
            for (int i = 0; i < count; ++i)
                if (old[i].at) empty_place(old[i].at) = old[i];
            ::free(old);
        }
        Word& made = empty_place(at);
        made.at = at;
        return made;
    }
    Word& empty_place(const int* at) {
        size_t i = (reinterpret_cast<uintptr_t>(at) >> 2) * 0x9e3779b97f4a7c15ull >> 20;
        while (word[i % size_t(word_room)].at) ++i;
        return word[i % size_t(word_room)];
    }
    static void keep(Word& at, Mark now) {
        for (int i = 0; i < at.count; ++i)
            if (at.marks[i].unit() == now.unit() && at.marks[i].thread() == now.thread()) {
                at.marks[i] = now;
                return;
            }
        if (at.count == at.room) {
            at.room = at.room ? 2 * at.room : 8;
            at.marks = static_cast<Mark*>(realloc(static_cast<void*>(at.marks), sizeof(Mark) * size_t(at.room)));
        }
        at.marks[at.count++] = now;
    }

    // -- reports -------------------------------------------------------------------------------------------------------

    void print_agent(Worker& w, Mark m) {
        if (m.unit() < base) {
            print("thread %d of an earlier launch", m.thread() % w.threads);
            return;
        }
        const Dim3 b = block_index(*launch, m.unit() - base, unsigned(m.thread() / w.threads));
        print("thread %d of block (%u, %u, %u)", m.thread() % w.threads, b.x, b.y, b.z);
    }

    void print_element(const Watch& r, long long byte) {
        print("%s[", r.name);
        bool used[Watch::most] = {};
        long long index[Watch::most] = {};
        for (int n = 0; n < r.rank; ++n) {  // the widest stride first
            int widest = -1;
            for (int d = 0; d < r.rank; ++d)
                if (!used[d] && (widest < 0 || r.stride[d] > r.stride[widest])) widest = d;
            used[widest] = true;
            index[widest] = byte / r.stride[widest];
            byte %= r.stride[widest];
        }
        for (int d = 0; d < r.rank; ++d) print(d ? ", %lld" : "%lld", index[d]);
        print("]");
    }

    // The last access by which the running block may have learned of an earlier one of another; words that are never released count where
    // `relaxed`.
    bool between(const Learned& l, Mark before, bool relaxed, const Spoken*& said, const Spoken*& heard) {
        for (int i = spoken_count - 1; i >= 0; --i) {
            heard = spoken + i;
            if (heard->unit != l.unit || !heard->reads || find(heard->at)->released == relaxed) continue;
            for (said = heard - 1; said >= spoken; --said)
                if (said->at == heard->at && said->unit == before.unit() && said->writes) return true;
        }
        return false;
    }

    // What lacks between two blocks.
    void print_missing(Worker& w, Mark before, Mark now) {
        const Learned& l = *w.lead->learned;
        const Clocks& c = *w.race->clocks;
        const Spoken *said, *heard;
        if (between(l, before, false, said, heard)) {
            if (!said->releases) print("no __threadfence lies before the atomic at pc:%p, by which the first would release", said->code);
            else if (l.pending[heard->thread])
                print("no __threadfence lies behind the atomic at pc:%p, by which the second would acquire", heard->code);
            else if (heard->thread != now.thread() && !c.behind(now.thread(), heard->thread, c.start[heard->thread] + heard->clock))
                print("no barrier lies behind the acquire at pc:%p", heard->code);
            else print("the release at pc:%p does not cover the first: it comes before it, or no barrier lies between", said->code);
        } else if (between(l, before, true, said, heard)) {
            print("no release lies between these blocks: the atomic at pc:%p is relaxed, and no __threadfence before it", said->code);
        } else {
            print("no release and acquire order these blocks");
        }
    }

    static const char* verb(Mark m, bool wrote) {
        return !wrote ? "reads" : m.kind() == by_addition ? "adds" : m.kind() == by_atomic ? "updates" : "writes";
    }

    void report(Worker& w, const Watch& r, size_t byte, Mark before, bool wrote, Mark now, bool writes, const char* lacks = nullptr) {
        static uint64_t reported[max_reports];
        static int count;
        Locked locked(lock);
        pthread_mutex_lock(&job->lock);
        if (job->outcome == ok) count = 0;
        const uint64_t pair = uint64_t(before.code()) << 32 | unsigned(now.code());
        bool known = count == max_reports;
        for (int i = 0; i < count && !known; ++i) known = reported[i] == pair;
        if (!known) {
            reported[count++] = pair;
            print("race on global memory ");
            print_element(r, static_cast<long long>(byte + (r.stride[r.rank - 1] == 2 && !(before.halves() & now.halves() & 1) ? 2 : 0)));
            print(": ");
            print_agent(w, before);
            print(" %s at pc:%p, ", verb(before, wrote), code[before.code()]);
            print_agent(w, now);
            print(" %s at pc:%p, ", verb(now, writes), code[now.code()]);
            if (before.kind() == by_addition && now.kind() == by_addition) print("a deterministic form, in which ");
            if (lacks) print("%s", lacks);
            else if (before.unit() < base) print("no dependency_wait lies before the second");
            else if (before.clock() == Mark::in_flight) print("no bulk_wait lies behind the first");
            else if (before.unit() == now.unit()) print("no barrier orders them");
            else print_missing(w, before, now);
            print("\n");
        }
        if (job->outcome == ok) job->outcome = race;
        pthread_mutex_unlock(&job->lock);
    }
};

static Global global;

}  // namespace fa_host
