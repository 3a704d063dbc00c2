// The engine of the host backend: fibers, the scheduler of a block, barriers, warp collectives, and the reports.
//
// A CUDA thread is a fiber with a 128 KB stack. It runs until it must wait (a barrier, a warp collective, its end) and then
// hands over to the next ready fiber of the block directly: there is no scheduler fiber, and a switch is a dozen
// instructions. Because all fibers of a block share one OS thread, none of this needs a lock; only the block counter is atomic.
//
// What it sees that a GPU does not tell: who waits where when nothing can run (deadlock), threads that meet at different
// __syncthreads (divergent barrier), lanes missing from a collective, shared memory read before it was written (it starts
// as NaN) or before a copy to it has been waited for (async.hpp), accesses to memory that is not there, and, with the race check,
// accesses that no barrier orders (race.hpp). What it cannot see: races on global memory between blocks, the memory model, and a
// missing __syncwarp that no schedule exposes.
//
// Ctrl-C ends a launch at the next barrier, collective or atomic of any thread, or at the end of one. A loop that meets none of
// them cannot be told from a long computation and is never left (a spin lock among the threads of a block is such a loop,
// because threads are not preempted): a second Ctrl-C ends the process.

#include "engine.hpp"

#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "fiber.hpp"

namespace fa_host {

// -- a block ----------------------------------------------------------------------------------------------------------

constexpr int max_threads = 1024, max_warps = 32;
constexpr size_t arena_bytes = 256 << 10;
constexpr uint64_t canary = 0xfa57ac4edead57acull;

struct Wait {
    const char* word;  // what a fiber has last waited in
    const char* file;
    int line;
    unsigned mask;  // the lanes it waits for, 0 for the whole block
};

struct alignas(64) Fiber {
    void* stack_pointer;
    Wait wait;
    void* fake_stack;  // AddressSanitizer's
    bool done;
    Self self;
};

struct Meeting {  // a warp collective under way
    unsigned mask, arrived;
    Apply apply;
    const char* word;
    const char* file;
    int line;
    void* lanes[32];
};

struct Warp {
    unsigned ready, alive, present;  // lanes that can run; that have not ended; that there are
    int meetings;
    Meeting meeting[32];
};

struct Race;   // race.hpp
struct Async;  // async.hpp

struct Worker {
    const Launch* launch;
    char* stacks;
    size_t stack_bytes;
    char* arena;
    char* static_shared;
    int threads, warps, live;
    unsigned current;
    unsigned ready_warps;
    int at_barrier;
    const char* barrier_file;
    int barrier_line;
    uint64_t random;  // 0: index order
    bool in_order;    // that, and no sanitizer to be told of switches
    bool failed, faulted;
    void* home;  // where the worker itself waits while fibers run
    void* home_fake;
    const void* home_bottom;
    size_t home_size;
    Race* race;         // null without the race check
    Race* race_memory;  // its storage, once there has been one
    Async* async;       // copies in flight, once there has been one
    Fiber fiber[max_threads];
    Warp warp[max_warps];
    alignas(64) char scratch[max_warps][scratch_bytes];
};

static __thread Worker* here __attribute__((tls_model("initial-exec"))) = nullptr;

struct Shared {  // one launch, seen by all workers
    const Launch* launch;
    uint64_t blocks, next;
    int outcome, used;
    pthread_mutex_t lock;
};
static Shared* job;
static volatile sig_atomic_t stop_asked;  // Ctrl-C during this launch

static void say(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int room = job->launch->report_bytes - job->used;
    int wrote = vsnprintf(job->launch->report + job->used, room > 0 ? room : 0, format, arguments);
    job->used += wrote < room ? wrote : (room > 0 ? room - 1 : 0);
    va_end(arguments);
}

}  // namespace fa_host

__thread fa_host::Self* fa_host_self __attribute__((tls_model("initial-exec"))) = nullptr;

#include "race.hpp"

namespace fa_host {

static void leave_block(Worker& w) {  // abandons every fiber; their stacks are reused
    w.failed = true;
    void* unused;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, w.home_bottom, w.home_size);
    fa_host_switch(&unused, w.home);
    __builtin_unreachable();
}

static inline void leave_if_asked(Worker& w) {
    if (__builtin_expect(stop_asked, 0)) leave_block(w);
}

// Prints "threads 0-63, 96" for the threads a predicate picks.
template <class Pick> static void say_threads(Worker& w, Pick pick) {
    const char* separator = "";
    for (int t = 0; t < w.threads; ++t) {
        if (!pick(t)) continue;
        int last = t;
        while (last + 1 < w.threads && pick(last + 1)) ++last;
        last == t ? say("%s%d", separator, t) : say("%s%d-%d", separator, t, last);
        separator = ", ";
        t = last;
    }
}

static void say_waiters(Worker& w, bool deadlock = false) {  // deadlock: the current one waits too
    bool told[max_threads] = {};
    auto waits = [&](unsigned t) { return !w.fiber[t].done && (deadlock || t != w.current) && !(w.warp[t / 32].ready >> t % 32 & 1); };
    for (int t = 0; t < w.threads; ++t) {
        Fiber& first = w.fiber[t];
        if (told[t] || !waits(t)) continue;
        auto same = [&](int i) {
            Wait& a = w.fiber[i].wait;
            return waits(i) && a.word == first.wait.word && a.line == first.wait.line && a.mask == first.wait.mask &&
                   !strcmp(a.file, first.wait.file);
        };
        say("  threads ");
        say_threads(w, same);
        say(" wait in %s at %s:%d", first.wait.word, first.wait.file, first.wait.line);
        if (first.wait.mask) say(" for lanes 0x%08x", first.wait.mask);
        say("\n");
        for (int i = t; i < w.threads; ++i) told[i] |= same(i);
    }
    int ended = 0;
    for (int t = 0; t < w.threads; ++t) ended += w.fiber[t].done;
    if (ended) {
        say("  threads ");
        say_threads(w, [&](int t) { return w.fiber[t].done; });
        say(" have ended\n");
    }
}

static void begin_report(Worker& w, const char* what) {
    pthread_mutex_lock(&job->lock);
    if (job->outcome == fault) {  // another block has already told
        pthread_mutex_unlock(&job->lock);
        leave_block(w);
    }
    job->outcome = fault;
    Dim3 b = w.fiber[0].self.block_idx;
    say("%s in block (%u, %u, %u)", what, b.x, b.y, b.z);
}

static void end_report(Worker& w) {
    pthread_mutex_unlock(&job->lock);
    leave_block(w);
}

static void report_deadlock(Worker& w) {
    begin_report(w, "deadlock: no thread can go on");
    say("\n");
    say_waiters(w, true);
    end_report(w);
}

// -- the scheduler ----------------------------------------------------------------------------------------------------

static inline void make_ready(Worker& w, int warp, unsigned lanes) {
    w.warp[warp].ready |= lanes;
    w.ready_warps |= 1u << warp;
}

static inline uint64_t draw(Worker& w) {  // xorshift64
    w.random ^= w.random << 13;
    w.random ^= w.random >> 7;
    return w.random ^= w.random << 17;
}

static int nth_bit(unsigned bits, int n) {
    while (n--) bits &= bits - 1;
    return __builtin_ctz(bits);
}

// The next fiber to run, taken out of the ready set; -1 where there is none.
static inline __attribute__((always_inline)) int pick(Worker& w) {
    if (!w.ready_warps) return -1;
    unsigned warp, lane;
    if (__builtin_expect(w.random != 0, 0)) {
        warp = nth_bit(w.ready_warps, draw(w) % __builtin_popcount(w.ready_warps));
        lane = nth_bit(w.warp[warp].ready, draw(w) % __builtin_popcount(w.warp[warp].ready));
    } else {  // stay in the warp, then the next warp: index order, wrapping around
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

// The running fiber cannot go on: the next one, until it is made ready and picked again.
static inline Next go_on_with_another(Worker& w) {
    char* bottom = w.stacks + size_t(w.current) * w.stack_bytes;
    if (__builtin_expect(stack_pointer() < bottom + 2048, 0)) {
        begin_report(w, "stack overflow");
        say(": thread %d has used its %zu KB stack (large local arrays?)\n", w.current, w.stack_bytes >> 10);
        end_report(w);
    }
    unsigned self = w.current;
    int next = pick(w);
    if (__builtin_expect(next < 0, 0)) report_deadlock(w);
    if (unsigned(next) == self) return {nullptr, nullptr};
    Fiber &from = w.fiber[self], &to = w.fiber[next];
    w.current = next;
    fa_host_self = &to.self;
    if (__builtin_expect(__sanitizer_start_switch_fiber != nullptr, 0)) {
        __sanitizer_start_switch_fiber(from.done ? nullptr : &from.fake_stack, w.stacks + size_t(next) * w.stack_bytes, w.stack_bytes);
        fa_host_switch(&from.stack_pointer, to.stack_pointer);
        __sanitizer_finish_switch_fiber(here->fiber[here->current].fake_stack, nullptr, nullptr);
        return {nullptr, nullptr};
    }
    return {&from.stack_pointer, to.stack_pointer};
}

}  // namespace fa_host

#include "async.hpp"

namespace fa_host {

static void release_barrier(Worker& w) {
    w.at_barrier = 0;
    for (int i = 0; i < w.warps; ++i) {
        w.warp[i].ready = w.warp[i].alive;
        if (w.warp[i].alive) w.ready_warps |= 1u << i;
    }
    if (w.race) w.race->barrier();
}

static void fiber_main() {
    Worker& w = *here;
    if (__sanitizer_finish_switch_fiber) {
        bool first = w.home_bottom == nullptr;
        __sanitizer_finish_switch_fiber(nullptr, first ? &w.home_bottom : nullptr, first ? &w.home_size : nullptr);
    }
    w.launch->entry(w.launch->parameters);
    leave_if_asked(w);
    if (w.async) w.async->end(w);
    Fiber& self = w.fiber[w.current];
    self.done = true;
    w.warp[w.current / 32].alive &= ~(1u << w.current % 32);
    if (--w.live == 0) {
        if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, w.home_bottom, w.home_size);
        fa_host_switch(&self.stack_pointer, w.home);
    }
    if (w.at_barrier == w.live) {  // legal on some hardware, undefined in CUDA C++: the others must not wait for the ended
        begin_report(w, "divergent barrier: threads ended without reaching a __syncthreads that others wait in");
        say("\n");
        say_waiters(w);
        end_report(w);
    }
    Next next = go_on_with_another(w);
    fa_host_switch(next.save, next.load);
    __builtin_unreachable();
}

static void run_block(Worker& w, uint64_t index) {
    const Launch& launch = *w.launch;
    Dim3 grid{launch.grid[0], launch.grid[1], launch.grid[2]}, block{launch.block[0], launch.block[1], launch.block[2]};
    Dim3 at{unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
    memset(w.arena, 0xff, launch.dynamic_bytes);  // NaN in every type: what nobody wrote shows
    if (launch.static_bytes) memset(w.static_shared, 0xff, launch.static_bytes);
    if (w.race) w.race->new_block();
    if (w.async) w.async->new_block();
    w.live = w.threads;
    w.at_barrier = 0;
    w.failed = false;
    w.ready_warps = 0;
    w.in_order = !launch.seed && !__sanitizer_start_switch_fiber;
    w.random = launch.seed ? (launch.seed * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xbf58476d1ce4e5b9ull) | 1 : 0;
    for (int t = 0; t < w.threads; ++t) {
        Fiber& f = w.fiber[t];
        unsigned x = t % block.x, y = t / block.x % block.y, z = t / block.x / block.y;
        f.self = Self{{x, y, z},
                      at,
                      block,
                      grid,
                      w.arena,
                      launch.dynamic_bytes,
                      t % 32,
                      w.race != nullptr,
                      w.threads - t / 32 * 32 < 32 ? nullptr : w.scratch[t / 32]};
        f.done = false;
        f.fake_stack = nullptr;
        char* bottom = w.stacks + size_t(t) * w.stack_bytes;
        *reinterpret_cast<uint64_t*>(bottom) = canary;
        // Stack tops are spread over the cache sets (coloured): page-aligned ones would all evict each other from L1.
        char* top = bottom + w.stack_bytes - 64 - size_t(t) * 576 % 4096 / 64 * 64;
#if defined(__x86_64__)
        void** frame = reinterpret_cast<void**>(top) - 1;
        *--frame = reinterpret_cast<void*>(&fiber_main);
        for (int i = 0; i < saved_words; ++i) *--frame = nullptr;
#else
        void** frame = reinterpret_cast<void**>(top - 160);
        memset(static_cast<void*>(frame), 0, 160);
        frame[11] = reinterpret_cast<void*>(&fiber_main);  // x30, where ret goes
#endif
        f.stack_pointer = frame;
    }
    for (int i = 0; i < w.warps; ++i) {
        int lanes = w.threads - i * 32 < 32 ? w.threads - i * 32 : 32;
        w.warp[i].alive = w.warp[i].present = lanes == 32 ? ~0u : (1u << lanes) - 1;
        w.warp[i].meetings = 0;
        w.warp[i].ready = 0;
        make_ready(w, i, w.warp[i].alive);
    }
    w.current = 0;
    w.current = pick(w);
    fa_host_self = &w.fiber[w.current].self;
    if (__sanitizer_start_switch_fiber) {
        w.home_bottom = nullptr;
        __sanitizer_start_switch_fiber(&w.home_fake, w.stacks + size_t(w.current) * w.stack_bytes, w.stack_bytes);
    }
    fa_host_switch(&w.home, w.fiber[w.current].stack_pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(w.home_fake, nullptr, nullptr);
    fa_host_self = nullptr;
    for (int t = 0; t < w.threads && !w.failed; ++t)
        if (*reinterpret_cast<uint64_t*>(w.stacks + size_t(t) * w.stack_bytes) != canary) {
            pthread_mutex_lock(&job->lock);
            job->outcome = fault;
            say("stack overflow: thread %d has used more than its %zu KB stack (large local arrays?)\n", t, w.stack_bytes >> 10);
            pthread_mutex_unlock(&job->lock);
            return;
        }
}

}  // namespace fa_host

#include "workers.hpp"
#include "signals.hpp"

// -- what words call --------------------------------------------------------------------------------------------------

using namespace fa_host;

static __attribute__((noinline)) Next meet(unsigned mask, Apply apply, void* mine, const char* word, const char* file, int line) {
    Worker& w = *here;
    leave_if_asked(w);
    unsigned self = w.current, lane = self % 32;
    Warp& warp = w.warp[self / 32];
    mask &= warp.present;  // a full mask in a block that is no multiple of 32 means the lanes there are
    if (__builtin_expect(!(mask >> lane & 1), 0)) {
        begin_report(w, "lane outside its own mask");
        say(": thread %d (lane %d) calls %s with mask 0x%08x at %s:%d\n", self, lane, word, mask, file, line);
        end_report(w);
    }
    Meeting *m = warp.meeting, *end = m + warp.meetings;
    while (m != end && m->mask != mask) ++m;
    if (m == end) {
        ++warp.meetings;
        m->mask = mask;
        m->arrived = 0;
        m->apply = apply;
        m->word = word;
        m->file = file;
        m->line = line;
    } else if (__builtin_expect(m->apply != apply, 0)) {
        begin_report(w, "lanes of one warp meet in different words");
        say(":\n  lane %d is in %s at %s:%d\n  lanes 0x%08x are in %s at %s:%d\n", lane, word, file, line, m->arrived, m->word, m->file,
            m->line);
        end_report(w);
    }
    m->arrived |= 1u << lane;
    m->lanes[lane] = mine;
    w.fiber[self].wait = Wait{word, file, line, mask};
    if (m->arrived == mask) {
        if (apply) apply(m->lanes, mask);
        else if (w.race) w.race->meet(self / 32 * 32, mask);
        if (--warp.meetings && m != end - 1) *m = end[-1];
        if (!w.random) {
            if (unsigned others = mask & ~(1u << lane)) make_ready(w, self / 32, others);
            return {nullptr, nullptr};
        }
        make_ready(w, self / 32, mask);
    }
    return go_on_with_another(w);
}

extern "C" {

Next fa_host_block_meet(const char* file, int line) {
    Worker& w = *here;
    leave_if_asked(w);
    if (w.async) w.async->drift(w);
    if (w.at_barrier && (w.barrier_line != line || (w.barrier_file != file && strcmp(w.barrier_file, file)))) {
        begin_report(w, "divergent barrier: threads of one block meet at different __syncthreads");
        say("\n  thread %d has come to %s:%d\n", w.current, file, line);
        say_waiters(w);
        end_report(w);
    }
    w.fiber[w.current].wait = Wait{"__syncthreads", file, line, 0};
    if (++w.at_barrier == w.live) {
        release_barrier(w);
        if (!w.random) {  // the last to come goes on
            Warp& own = w.warp[w.current / 32];
            own.ready &= ~(1u << w.current % 32);
            if (!own.ready) w.ready_warps &= ~(1u << w.current / 32);
            return {nullptr, nullptr};
        }
    } else {
        w.barrier_file = file;
        w.barrier_line = line;
    }
    return go_on_with_another(w);
}

Next fa_host_warp_meet(unsigned mask, Apply apply, void* mine, const char* word, const char* file, int line) {
    Worker& w = *here;
    unsigned self = w.current, bit = 1u << self % 32;
    Warp& warp = w.warp[self / 32];
    Meeting& m = warp.meeting[0];
    // What is so 30 times of 32: the lane comes to its warp's only meeting, is not the last, and the next lane is ready.
    unsigned later = warp.ready & (~0u << self % 32);
    if (warp.meetings == 1 && m.mask == mask && m.apply == apply && (m.arrived | bit) != mask && mask & bit && later && w.in_order) {
        m.arrived |= bit;
        m.lanes[self % 32] = mine;
        unsigned next = self / 32 * 32 + __builtin_ctz(later);
        if (!(warp.ready &= ~(later & -later))) w.ready_warps &= ~(1u << self / 32);
        Fiber &from = w.fiber[self], &to = w.fiber[next];
        from.wait = Wait{word, file, line, mask};
        w.current = next;
        fa_host_self = &to.self;
        return {&from.stack_pointer, to.stack_pointer};
    }
    return meet(mask, apply, mine, word, file, line);
}

void fa_host_cp_async(char* to, const void* from, int bytes, const void* value, const char* file, int line) {
    Worker& w = *here;
    leave_if_asked(w);
    Copy copy{{}, to, from, __builtin_return_address(0), file, line, bytes, 0, false, -1};
    memcpy(copy.value, value, 16);
    Async::of(w)->start(w, copy);
}

void fa_host_cp_async_commit() { Async::of(*here)->commit(*here); }

void fa_host_cp_async_wait(int but) {
    leave_if_asked(*here);
    Async::of(*here)->wait(*here, unsigned(but));
}

void* fa_host_code() { return __builtin_return_address(0); }

void fa_host_access(int lane, const void* address, int bytes, int writes, void* code) {
    if (here->race) here->race->access(static_cast<const char*>(address), bytes, writes, code, here->current / 32 * 32 + lane);
}

void fa_host_bad_shared(const char* word, unsigned address, unsigned bytes, unsigned alignment, const char* file, int line) {
    Worker& w = *here;
    unsigned size = w.launch->dynamic_bytes, at = address - shared_base;
    bool outside = at > size || size - at < bytes;
    begin_report(w, outside ? "address outside shared memory" : "address not aligned");
    say(": thread %d in %s at %s:%d, %u bytes from byte %d of %u", w.current, word, file, line, bytes, int(at), size);
    if (!outside) say(", which must be a multiple of %u", alignment);
    say("\n");
    end_report(w);
}

void fa_host_fail(const char* what, const char* file, int line) {
    Worker& w = *here;
    begin_report(w, what);
    say(": thread %d at %s:%d\n", w.current, file, line);
    end_report(w);
}

// Blocks run on several OS threads, so these must be atomic. They are here, not inline, for the race check's sake.
static void atomic_access(void* address, int bytes, void* code) {
    leave_if_asked(*here);
    if (here->race) here->race->access(static_cast<char*>(address), bytes, true, code, here->current, Race::no_copy, true);
}

float fa_host_atomic_add_f32(float* address, float value) {
    atomic_access(address, 4, __builtin_return_address(0));
    auto bits = reinterpret_cast<uint32_t*>(address);
    uint32_t old = __atomic_load_n(bits, __ATOMIC_RELAXED), now;
    float before;
    do {
        memcpy(&before, &old, 4);
        float after = before + value;
        memcpy(&now, &after, 4);
    } while (!__atomic_compare_exchange_n(bits, &old, now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

double fa_host_atomic_add_f64(double* address, double value) {
    atomic_access(address, 8, __builtin_return_address(0));
    auto bits = reinterpret_cast<uint64_t*>(address);
    uint64_t old = __atomic_load_n(bits, __ATOMIC_RELAXED), now;
    double before;
    do {
        memcpy(&before, &old, 8);
        double after = before + value;
        memcpy(&now, &after, 8);
    } while (!__atomic_compare_exchange_n(bits, &old, now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

int fa_host_atomic_add_i32(int* address, int value) {
    atomic_access(address, 4, __builtin_return_address(0));
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

int fa_host_atomic_exchange_i32(int* address, int value) {
    atomic_access(address, 4, __builtin_return_address(0));
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}

int fa_host_atomic_compare_exchange_i32(int* address, int compare, int value) {
    atomic_access(address, 4, __builtin_return_address(0));
    __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return compare;
}

int fa_host_atomic_max_i32(int* address, int value) {
    atomic_access(address, 4, __builtin_return_address(0));
    int old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}

int fa_host_run(const Launch* launch) {
    Shared shared{launch, uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2], 0, ok, 0, PTHREAD_MUTEX_INITIALIZER};
    static bool fork_is_watched;
    pthread_mutex_lock(&one_at_a_time);
    if (!fork_is_watched) fork_is_watched = !pthread_atfork(nullptr, nullptr, after_fork);
    job = &shared;
    launch->report[0] = 0;
    int workers = launch->workers < 1 ? 1 : launch->workers;
    if (workers > max_workers) workers = max_workers;
    if (uint64_t(workers) > shared.blocks) workers = int(shared.blocks);
    watch_signals();
    work_together(workers - 1);
    leave_signals();
    if (stop_asked) shared.outcome = interrupted;
    job = nullptr;
    pthread_mutex_unlock(&one_at_a_time);
    return shared.outcome;
}

// Static __shared__ arrays of a kernel library are its thread-local storage, one copy an OS thread, so one a running block.
// Finds where that storage starts, relative to an address inside it, and its size.
int fa_host_module_shared(void* (*static_shared)(), long long* offset, long long* bytes) {
    struct Search {
        char* inside;
        long long offset, bytes;
    } search{static_cast<char*>(static_shared()), -1, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto& s = *static_cast<Search*>(data);
            auto start = static_cast<char*>(info->dlpi_tls_data);
            for (int i = 0; start && i < info->dlpi_phnum; ++i) {
                const auto& header = info->dlpi_phdr[i];
                if (header.p_type != PT_TLS || s.inside < start || s.inside >= start + header.p_memsz) continue;
                s.offset = s.inside - start;
                s.bytes = (long long)header.p_memsz;
                return 1;
            }
            return 0;
        },
        &search);
    *offset = search.offset;
    *bytes = search.bytes;
    return search.offset >= 0;
}

int fa_host_version() { return 1; }
}
