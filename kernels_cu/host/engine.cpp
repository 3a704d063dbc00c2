// The engine of the CPU engine: runs a kernel that was compiled for the CPU, and checks what a GPU leaves unchecked.
//
// Each CUDA thread is a fiber with a 128 KB stack (fiber.hpp). A fiber runs until it must wait: in a barrier, in a warp collective, or
// at its end. It then switches directly to the next ready fiber of the block (scheduler.hpp). All fibers of a block share one OS
// thread, so none of this needs a lock. Blocks are distributed over the OS threads by an atomic counter (workers.hpp), and with a seed
// interleaved on one of them (interleave.hpp).
//
// The engine reports (report.hpp):
//   deadlocks: no fiber is ready; the report lists every waiting thread and where it waits;
//   divergent barriers: threads of one block wait in different __syncthreads, or end while others wait;
//   divergent collectives: lanes of one warp call different functions, or a lane is not in its own mask;
//   mbarriers that are not initialised, have more arrivals than they expect, or bytes that come in another phase (barrier.hpp);
//   accesses to invalid addresses, traps and stack overflow (signals.hpp); fibers and dynamic shared memory lie between
//   inaccessible pages, and the rest of a page beside shared memory must stay as it was;
//   writes to the source or the destination of an asynchronous copy in flight (async.hpp), to registers or operands of a wgmma in flight
//   (wgmma.hpp);
//   with the race check, accesses to shared memory that no barrier orders (race.hpp), and to global memory that nothing orders (global.hpp);
//   in a cluster accesses to blocks that are not there, or have ended (cluster.hpp);
//   turns that are passed by who does not have them or too early, and blocks that wait for one that has not begun (turns.hpp).
// What a kernel prints comes out at the end of the launch, in the order of blocks and threads (printed.hpp).
// Shared memory starts as NaN, and so does the destination of a copy in flight: a read that comes too early shows in the result.
// Without the race check it does not see what its order of blocks and threads hides.
//
// Ctrl-C ends a launch at the next barrier, collective or atomic of any thread, or when a thread ends. A loop without any of these
// cannot be distinguished from a long computation and is not interrupted. Spinning on a variable that another thread of
// the block must set is such a loop, because fibers are not preempted. A second Ctrl-C ends the process.

#include "engine.hpp"

#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "async.hpp"
#include "banks.hpp"
#include "barrier.hpp"
#include "block.hpp"
#include "cluster.hpp"
#include "fiber.hpp"
#include "global.hpp"
#include "hooks.hpp"
#include "interleave.hpp"
#include "overlap.hpp"
#include "printed.hpp"
#include "race.hpp"
#include "report.hpp"
#include "scheduler.hpp"
#include "signals.hpp"
#include "tma.hpp"
#include "turns.hpp"
#include "wgmma.hpp"
#include "workers.hpp"

__thread fa_host::Self* fa_host_self __attribute__((tls_model("initial-exec"))) = nullptr;

namespace fa_host {

// -- a block ----------------------------------------------------------------------------------------------------------

constexpr uint64_t canary = 0xfa57ac4edead57acull;  // the last word of each stack: overwritten by an overflow

static void release_barrier(Worker& w) {
    w.barrier[0].arrived = 0;
    for (int i = 0; i < w.warps; ++i) {
        w.warp[i].ready = w.warp[i].alive;
        if (w.warp[i].alive) w.ready_warps |= 1u << i;
    }
    if (w.banks) w.banks->all_together();
    if (w.race && !w.cluster) w.race->clocks->all_arrived();
    if (w.race && w.cluster) release_in_cluster(w);
}

static void fiber_main() {
    Worker& w = *this_worker;
    if (__sanitizer_finish_switch_fiber) {
        bool first = w.lead->main_stack_bottom == nullptr;
        __sanitizer_finish_switch_fiber(nullptr, first ? &w.lead->main_stack_bottom : nullptr, first ? &w.lead->main_stack_bytes : nullptr);
    }
    w.launch->entry(w.launch->parameters);
    abort_if_interrupted(w);
    if (w.async) w.async->end(w);
    if (w.wgmma && w.current / 128 < unsigned(w.threads / 128)) w.wgmma->end(w, int(w.current));
    leave_cluster(w);
    Fiber& self = w.fiber[w.current];
    self.done = true;
    w.warp[w.current / 32].alive &= ~(1u << w.current % 32);
    if (--w.live == 0 && (!w.cluster || --w.cluster->live == 0)) {
        this_worker = w.lead;
        if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, w.lead->main_stack_bottom, w.lead->main_stack_bytes);
        fa_host_switch(&self.stack_pointer, w.lead->main_stack_pointer);
    }
    if (w.live && w.barrier[0].arrived == unsigned(w.live) &&
        !(w.used_named & 1)) {  // works on some hardware, but is undefined in CUDA C++
        begin_report(w, "divergent barrier: threads ended without reaching a __syncthreads that others wait in");
        print("\n");
        print_waiters(w);
        end_report(w);
    }
    Next next = switch_to_next(w);
    fa_host_switch(next.save, next.load);
    __builtin_unreachable();
}

// Prepares a fiber to start in fiber_main.
static void init_fiber(Worker& w, int t, Dim3 block_index, Dim3 block, Dim3 grid) {
    Fiber& f = w.fiber[t];
    unsigned x = t % block.x, y = t / block.x % block.y, z = t / block.x / block.y;
    bool whole_warp = w.threads - t / 32 * 32 >= 32;
    f.self = Self{
        .thread_idx = {x, y, z},
        .block_idx = block_index,
        .block_dim = block,
        .grid_dim = grid,
        .dynamic_shared = w.arena,
        .dynamic_bytes = w.launch->dynamic_bytes,
        .lane = t % 32,
        .race = w.race != nullptr,
        .banks = w.banks != nullptr,
        .cluster_blocks = w.cluster ? w.cluster->blocks : 1,
        .scratch = whole_warp ? w.scratch[t / 32] : nullptr,
    };
    f.done = f.in_cluster_barrier = false;
    f.fake_stack = nullptr;
    char* bottom = stack_bottom(w, t);
    *reinterpret_cast<uint64_t*>(bottom) = canary;
    // Cache colouring: the stack tops are spread over the cache sets. Page-aligned tops would all evict each other from L1.
    char* top = bottom + w.stack_bytes - 64 - size_t(t) * 576 % 4096 / 64 * 64;
#if defined(__x86_64__)
    void** frame = reinterpret_cast<void**>(top) - 1;
    *--frame = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < saved_registers; ++i) *--frame = nullptr;
#else
    void** frame = reinterpret_cast<void**>(top - 160);
    memset(static_cast<void*>(frame), 0, 160);
    frame[11] = reinterpret_cast<void*>(&fiber_main);  // x30, the link register
#endif
    f.stack_pointer = frame;
}

static void init_warp(Worker& w, int i) {
    int lanes = w.threads - i * 32 < 32 ? w.threads - i * 32 : 32;
    w.warp[i].alive = w.warp[i].present = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.warp[i].collectives = 0;
    w.warp[i].ready = 0;
    make_ready(w, i, w.warp[i].alive);
}

// index: in the grid; of a block of a cluster, of the cluster in the grid of clusters.
static void init_block(Worker& w, uint64_t index) {
    const Launch& launch = *w.launch;
    Dim3 grid{launch.grid[0], launch.grid[1], launch.grid[2]}, block{launch.block[0], launch.block[1], launch.block[2]};
    Dim3 at = block_index(launch, index, unsigned(w.rank));
    memset(w.arena, 0xff, launch.dynamic_bytes);  // NaN in every floating-point type
    if (launch.static_bytes) memset(w.static_shared, 0xff, launch.static_bytes);
    if (w.race && !w.rank) w.race->clocks->new_block(w.threads * w.lead->own_cluster.blocks, w.lead->own_cluster.blocks);
    if (global.on && !w.rank) global.new_block(*w.learned, index, w.race->clocks->threads);
    if (w.async) w.async->new_block();
    if (w.wgmma) w.wgmma->new_block(w.threads);
    new_block_barriers(w);
    w.live = w.threads;
    w.idle_peeks = 0;
    new_block_turns(w);
    w.any_parked = false;
    memset(w.parked, 0, sizeof w.parked);
    w.failed = false;
    w.ready_warps = 0;
    w.fast_switch = !launch.seed && !__sanitizer_start_switch_fiber;
    w.random = launch.seed ? (launch.seed * 0x9e3779b97f4a7c15ull ^ (index + 1 + (uint64_t(w.rank) << 40)) * 0xbf58476d1ce4e5b9ull) | 1 : 0;
    const unsigned late = unsigned(w.random >> 40) % (4 * unsigned(w.warps) / 3);
    w.late = w.random && w.warps > 1 && late < unsigned(w.warps) ? 1u << late : 0;
    for (int t = 0; t < w.threads; ++t) init_fiber(w, t, at, block, grid);
    for (int i = 0; i < w.warps; ++i) init_warp(w, i);
    join_cluster(w);
}

static void check_canaries(Worker& w) {
    for (int t = 0; t < w.threads; ++t)
        if (*reinterpret_cast<uint64_t*>(stack_bottom(w, t)) != canary) {
            pthread_mutex_lock(&job->lock);
            job->outcome = fault;
            print("stack overflow: thread %d has used more than its %zu KB stack (large local arrays?)\n", t, w.stack_bytes >> 10);
            pthread_mutex_unlock(&job->lock);
            return;
        }
}

static void report_write(Worker& w, const char* where, long long byte, long long bytes) {
    pthread_mutex_lock(&job->lock);
    if (job->outcome != fault) {
        job->outcome = fault;
        Dim3 b = w.fiber[0].self.block_idx;
        print("write outside %s in block (%u, %u, %u): byte %lld of %lld\n", where, b.x, b.y, b.z, byte, bytes);
    }
    pthread_mutex_unlock(&job->lock);
}

// The bytes beside the block's dynamic shared memory in its first and last page, where no page can be inaccessible, and the guards of its
// static shared memory, which lies on the heap.
static void check_shared(Worker& w) {
    const Launch& launch = *w.launch;
    char *end = w.arena + launch.dynamic_bytes, *last = w.room + fence_bytes + arena_bytes;
    auto written = [](const char* from, const char* to) -> const char* {
        if (from == to || (*from == char(0xff) && !memcmp(from, from + 1, size_t(to - from - 1)))) return nullptr;
        while (*from == char(0xff)) ++from;
        return from;
    };
    if (__asan_poison_memory_region) return;
    const char* at = written(end, last);
    if (!at) at = written(w.arena_first, w.arena);
    if (at) {
        w.arena_holds = ~0u;  // is filled again
        report_write(w, "shared memory", at - w.arena, launch.dynamic_bytes);
    }
    if (!w.static_shared) return;
    const char* behind = w.static_shared + launch.static_bytes;
    at = written(behind, behind + launch.static_guard);
    if (!at) at = written(w.static_shared - launch.static_guard, w.static_shared);
    if (at) report_write(w, "the static __shared__ arrays", at - w.static_shared, launch.static_bytes);
}

bool deliver_one(Worker& w) {
    if (!w.cluster) return w.async && w.async->deliver_first(w);
    const int blocks = w.cluster->blocks;
    for (int i = 0; i < 2 * blocks; ++i)  // first what some thread waits for
        if (Worker& b = *w.cluster->block[i % blocks]; b.async && b.async->deliver_first(b, i < blocks)) return true;
    return false;
}

void Wgmma::unwritten(Worker& w, const Issued& p, const char* address, int matrix, const char* word) {
    const Copy* load = w.async ? w.async->load_to(address) : nullptr;
    const bool late = load && w.barrier[load->box->mbarrier].phase != load->box->phase;
    begin_report(w, late
                        ? "a wgmma reads what a TMA load in flight is to write: its mbarrier's phase has ended, too few bytes were expected"
                    : load ? "a wgmma reads what a TMA load in flight is to write: no wait for its mbarrier"
                           : "a wgmma reads shared memory that nothing has written, or only a copy still in flight");
    print(": operand %c of %s at %s:%d, byte %td", matrix ? 'B' : 'A', word, p.file, p.line, address - w.arena);
    if (load) print("; the load of thread %d at %s:%d", load->thread, load->file, load->line);
    print("\n");
    end_report(w);
}

void Wgmma::overwritten(Worker& w, const Issued& p, void* code) {
    const Copy* load = nullptr;
    each_chunk(p, [&](int, int, int, uint32_t address) {
        if (!load && w.async) load = w.async->load_to(w.arena + (address - shared_base));
    });
    begin_report(w, "shared memory was written while a wgmma that reads it was in flight");
    print(": issued at %s:%d, retired at pc:%p", p.file, p.line, code);
    if (load) print("; the TMA load of thread %d at %s:%d has begun before that", load->thread, load->file, load->line);
    print("\n");
    end_report(w);
}

void begin_block(Worker& w, uint64_t index) {
    init_block(w, index);
    for (int i = 1; w.cluster && i < w.cluster->blocks; ++i) init_block(*w.cluster->block[i], index);
    w.current = 0;
    w.current = pop_ready(w);
    w.main_stack_bottom = nullptr;
}

void go_on(Worker& lead, Worker& at) {
    this_worker = &at;
    fa_host_self = &at.fiber[at.current].self;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&lead.main_fake_stack, stack_bottom(at, at.current), at.stack_bytes);
    fa_host_switch(&lead.main_stack_pointer, at.fiber[at.current].stack_pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(lead.main_fake_stack, nullptr, nullptr);
    this_worker = &lead;
    fa_host_self = nullptr;
}

void end_block(Worker& w) {
    for (int i = 0; !w.failed && i < (w.cluster ? w.cluster->blocks : 1); ++i) {
        Worker& b = w.cluster ? *w.cluster->block[i] : w;
        check_canaries(b);
        check_shared(b);
        if (b.banks) b.banks->all_together();
        if (w.cluster && b.race) b.race->check_remote();
    }
}

}  // namespace fa_host

// -- the functions that words call ------------------------------------------------------------------------------------

using namespace fa_host;

// A lane arrives at a collective. The last lane of the mask executes it for all of them.
static __attribute__((noinline)) Next arrive(unsigned mask, Apply apply, void* mine, const char* word, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    unsigned self = w.current, lane = self % 32;
    Warp& warp = w.warp[self / 32];
    mask &= warp.present;  // in the last warp of a block a full mask means the lanes that exist
    if (__builtin_expect(!(mask >> lane & 1), 0)) {
        begin_report(w, "lane outside its own mask");
        print(": thread %d (lane %d) calls %s with mask 0x%08x at %s:%d\n", self, lane, word, mask, file, line);
        end_report(w);
    }
    Collective *c = warp.collective, *end = c + warp.collectives;
    while (c != end && c->mask != mask) ++c;
    if (c == end) {
        ++warp.collectives;
        c->mask = mask;
        c->arrived = 0;
        c->apply = apply;
        c->word = word;
        c->file = file;
        c->line = line;
    } else if (__builtin_expect(c->apply != apply, 0)) {
        begin_report(w, "divergent collective: lanes of one warp call different functions");
        print(":\n  lane %d is in %s at %s:%d\n  lanes 0x%08x are in %s at %s:%d\n", lane, word, file, line, c->arrived, c->word, c->file,
              c->line);
        end_report(w);
    }
    c->arrived |= 1u << lane;
    c->lanes[lane] = mine;
    w.fiber[self].wait = Wait{word, file, line, mask};
    if (c->arrived == mask) {
        if (w.banks && mask == warp.alive) w.banks->together(int(self / 32));
        if (apply) apply(c->lanes, mask);
        else if (w.race) w.race->clocks->join_lanes(w.first_clock + int(self / 32 * 32), mask);
        if (--warp.collectives && c != end - 1) *c = end[-1];
        if (!w.random) {
            if (unsigned others = mask & ~(1u << lane)) make_ready(w, self / 32, others);
            return {nullptr, nullptr};
        }
        make_ready(w, self / 32, mask);
    }
    return switch_to_next(w);
}

static inline void may_switch_at(Worker& w, const void* address) {
    if (interleaved.on && !in_shared_memory(w, address, 1)) may_switch(w);
}

// Blocks run on several OS threads, so these are atomic instructions. They are not inline: the race check must see them as atomics.
// Whether it is one to global memory that the race check watches.
static bool atomic_access(void* address, int bytes, void* code) {
    abort_if_interrupted(*this_worker);
    may_switch_at(*this_worker, address);
    if (this_worker->banks) this_worker->banks->access(this_worker->current, static_cast<char*>(address), size_t(bytes), code, of_shared);
    if (!this_worker->race) return false;
    return !this_worker->race->access(static_cast<char*>(address), bytes, true, code, own_clock(), atomically) && global.on;
}

// An atomic of integers, by which threads may also tell each other of what they have done.
template <class Act> static inline int atomic_word(int* address, Speech how, void* code, Act act) {
    const int before = atomic_access(address, 4, code) ? global.speaks(*this_worker, address, how, code, own_clock(), act) : act();
    may_switch_at(*this_worker, address);
    return before;
}

extern "C" {

Next fa_host_block_arrive(const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    if (w.async) w.async->complete_some(w);
    Barrier& b = w.barrier[0];
    if (__builtin_expect(w.used_named & 1, 0)) return fa_host_named_arrive(0, w.threads, file, line);
    if (b.arrived && (b.line != line || (b.file != file && strcmp(b.file, file)))) {
        begin_report(w, "divergent barrier: threads of one block wait in different __syncthreads");
        print("\n  thread %d is at %s:%d\n", w.current, file, line);
        print_waiters(w);
        end_report(w);
    }
    w.fiber[w.current].wait = Wait{"__syncthreads", file, line, 0};
    if (w.race && w.cluster) w.race->clocks->arrive(clock_of(w, 0), own_clock());
    if (++b.arrived == unsigned(w.live)) {
        release_barrier(w);
        if (!w.random) {  // the last thread to arrive continues
            Warp& own = w.warp[w.current / 32];
            own.ready &= ~(1u << w.current % 32);
            if (!own.ready) w.ready_warps &= ~(1u << w.current / 32);
            return {nullptr, nullptr};
        }
    } else {
        b.file = file;
        b.line = line;
    }
    return switch_to_next(w);
}

Next fa_host_warp_arrive(unsigned mask, Apply apply, void* mine, const char* word, const char* file, int line) {
    Worker& w = *this_worker;
    unsigned self = w.current, bit = 1u << self % 32;
    Warp& warp = w.warp[self / 32];
    Collective& c = warp.collective[0];
    // The fast path, taken 30 times of 32: the warp has one collective, this lane is not the last to arrive, the next lane is ready.
    unsigned later = warp.ready & (~0u << self % 32);
    if (warp.collectives == 1 && c.mask == mask && c.apply == apply && (c.arrived | bit) != mask && mask & bit && later && w.fast_switch) {
        c.arrived |= bit;
        c.lanes[self % 32] = mine;
        unsigned next = self / 32 * 32 + __builtin_ctz(later);
        if (!(warp.ready &= ~(later & -later))) w.ready_warps &= ~(1u << self / 32);
        Fiber &from = w.fiber[self], &to = w.fiber[next];
        from.wait = Wait{word, file, line, mask};
        w.current = next;
        fa_host_self = &to.self;
        return {&from.stack_pointer, to.stack_pointer};
    }
    return arrive(mask, apply, mine, word, file, line);
}

void fa_host_cp_async(char* to, const void* from, int bytes, const void* value, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    Copy copy{{}, to, from, __builtin_return_address(0), file, line, bytes, 0, false, -1, 0, 0, nullptr};
    memcpy(copy.value, value, 16);
    if (w.banks) {
        w.banks->access(w.current, to, 16, copy.code, of_shared);
        if (bytes) w.banks->access(w.current, static_cast<const char*>(from), size_t(bytes), copy.code, of_load);
    }
    Async::of(w)->cp_async(w, copy);
}

void fa_host_cp_async_commit() { Async::of(*this_worker)->commit(*this_worker); }

void fa_host_cp_async_wait(int but) {
    abort_if_interrupted(*this_worker);
    Async::of(*this_worker)->wait(*this_worker, unsigned(but));
}

// -- barriers ---------------------------------------------------------------------------------------------------------

Next fa_host_named_arrive(int id, int threads, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    if (w.async) w.async->complete_some(w);
    Barrier& b = named_barrier(w, id, threads, "bar_sync", file, line);
    arrive_at_named(w, id, b);
    b.waiting[w.current / 32] |= 1u << w.current % 32;
    w.fiber[w.current].wait = Wait{"bar_sync", file, line, 0, id};
    complete_if_whole(w, id);
    if (!b.arrived && !w.random) {  // the last thread to arrive continues
        Warp& own = w.warp[w.current / 32];
        own.ready &= ~(1u << w.current % 32);
        if (!own.ready) w.ready_warps &= ~(1u << w.current / 32);
        return {nullptr, nullptr};
    }
    return switch_to_next(w);
}

void fa_host_bar_arrive(int id, int threads, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    arrive_at_named(w, id, named_barrier(w, id, threads, "bar_arrive", file, line));
    complete_if_whole(w, id);
}

void fa_host_mbarrier_init(unsigned long long* at, unsigned count, const char* file, int line) {
    init_mbarrier(*this_worker, at, count, __builtin_return_address(0), file, line);
}

void fa_host_mbarrier_init_fence() {
    Worker& w = *this_worker;
    for (int i = 0; i < w.mbarriers; ++i) w.barrier[named_barriers + i].fenced = true;
}

void fa_host_mbarrier_arrive(unsigned long long* at, unsigned bytes, const char* word, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    arrive_at_mbarrier(w, mbarrier_at(w, at, __builtin_return_address(0), word, file, line), bytes, word, file, line);
    if (w.async) w.async->complete_some(w);
}

Next fa_host_mbarrier_arrive_wait(unsigned long long* at, unsigned parity, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    if (w.async) w.async->complete_some(w);
    const char* word = "mbarrier_wait_parity";
    const int number = mbarrier_at(w, at, nullptr, word, file, line);
    if (has_completed(w, number, parity)) return {nullptr, nullptr};
    return wait_at(w, number, word, file, line);
}

int fa_host_mbarrier_test(unsigned long long* at, unsigned parity, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const int number = mbarrier_at(w, at, __builtin_return_address(0), "mbarrier_test_parity", file, line);
    if (parity > 1) mbarrier_fault(w, "a parity is 0 or 1", at, "mbarrier_test_parity", file, line);
    return has_completed(w, number, parity);
}

// After a failed peek: others run first. A loop of peeks that nothing can end is a deadlock.
Next fa_host_yield_arrive() {
    Worker& w = *this_worker;
    const unsigned self = w.current;
    w.fiber[self].wait = Wait{"mbarrier_test_parity", "a loop that peeks", 0, 0};
    ++w.lead->idle_peeks;
    if (w.cluster) return yield_in_cluster(w);
    const unsigned ready = behind_peek(w);
    if (all_peek(w, !ready)) return {nullptr, nullptr};
    // Any of the ready ones: a fixed order could let some threads peek for ever while the one they wait for never runs.
    const unsigned pick = w.idle_peeks * 0x9e3779b9u >> 8;
    const int warp = nth_bit(ready, int(pick % unsigned(__builtin_popcount(ready))));
    const int lane = nth_bit(w.warp[warp].ready, int(pick / 32 % unsigned(__builtin_popcount(w.warp[warp].ready))));
    w.warp[warp].ready &= ~(1u << lane);
    if (!w.warp[warp].ready) w.ready_warps &= ~(1u << warp);
    make_ready(w, int(self / 32), 1u << self % 32);
    return switch_to(w, unsigned(32 * warp + lane));
}

// -- TMA and wgmma ----------------------------------------------------------------------------------------------------

void fa_host_proxy_fence() {
    Worker& w = *this_worker;
    if (w.race) w.race->clocks->fence(own_clock());
}

void fa_host_tma_load(const void* given, void* to, unsigned long long* barrier, const int* at, int rank, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    void* code = __builtin_return_address(0);
    const TensorMap& map = checked_map(w, given, to, rank, "tma_load", file, line);
    aligned_column(w, map, at[0], "tma_load", file, line);
    const int number = counting_mbarrier(w, barrier, code, "tma_load", file, line);
    const Copy copy{{}, static_cast<char*>(to), nullptr, code, file, line, 0, 0, false, -1, 0, 0, nullptr};
    Async::of(w)->load(w, map, copy.to, at, number, copy);
}

void fa_host_tma_store(const void* given, const void* from, const int* at, int rank, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const TensorMap& map = checked_map(w, given, from, rank, "tma_store", file, line);
    aligned_column(w, map, at[0], "tma_store", file, line);
    for (unsigned i = 0; i < map.rank; ++i)
        if (at[i] < 0)
            tma_fault(w, "a store at a negative coordinate, at which an H200 stops with an illegal instruction", "tma_store", file, line);
    char* smem = const_cast<char*>(static_cast<const char*>(from));
    const Copy copy{{}, smem, nullptr, __builtin_return_address(0), file, line, 0, 0, false, -1, 0, 0, nullptr};
    Async::of(w)->begin_store(w, map, smem, at, copy);
}

// Like a store through a map of `count` floats, each of which is added.
void fa_host_bulk_add_f32(float* to, const float* from, int count, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    char* smem = reinterpret_cast<char*>(const_cast<float*>(from));
    if (reinterpret_cast<uintptr_t>(to) % 16 || count < 4 || count % 4)
        tma_fault(w, "a bulk operation to an address that is not 16-byte aligned, or of no multiple of 4 floats", "bulk_add_f32", file,
                  line);
    if (!in_shared_memory(w, smem, 4 * size_t(count)) || reinterpret_cast<uintptr_t>(smem) % 16)
        tma_fault(w, "a bulk operation from no 16-byte aligned place in shared memory", "bulk_add_f32", file, line);
    if (!w.turns[w.current].fenced)
        tma_fault(w, "a bulk operation behind a turn without fence_proxy_async_global between them", "bulk_add_f32", file, line);
    TensorMap map{};
    map.base = reinterpret_cast<uint64_t>(to), map.rank = 1, map.element_bytes = 4, map.dim[0] = map.box[0] = uint32_t(count);
    const int at[1] = {0};
    const Copy copy{{}, smem, nullptr, __builtin_return_address(0), file, line, 0, 0, false, -1, 0, 0, nullptr};
    Async::of(w)->begin_store(w, map, smem, at, copy, true);
}

void fa_host_bulk_commit() { ++Async::of(*this_worker)->store[this_worker->current].groups; }

void fa_host_bulk_wait(int but, bool read) { Async::of(*this_worker)->wait_for_stores(*this_worker, unsigned(but), read); }

// A thread arrives at a product; the last of its warpgroup issues it for all of them.
Next fa_host_wgmma_arrive(const Product* mine, const char* word, const char* file, int line) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const unsigned self = w.current, group = self / 128;
    if (int(group) >= w.threads / 128)
        tma_fault(w, "a warpgroup of fewer than 128 threads in a word that takes all of them", word, file, line);
    Warpgroup& all = w.warpgroup[group];
    if (all.arrived && (all.line != line || (all.word != word && strcmp(all.word, word)) || (all.file != file && strcmp(all.file, file)))) {
        begin_report(w, "divergent collective: threads of one warpgroup call different functions");
        print(":\n  thread %d is in %s at %s:%d\n  %d threads are in %s at %s:%d\n", self, word, file, line, all.arrived, all.word,
              all.file, all.line);
        end_report(w);
    }
    all.word = word, all.file = file, all.line = line;
    all.lanes[self % 128] = mine;
    w.fiber[self].wait = Wait{word, file, line, 0, Wait::warpgroup};
    if (++all.arrived < 128) return switch_to_next(w);
    all.arrived = 0;
    if (w.async) w.async->complete_some(w);
    Wgmma::of(w)->issue(w, int(group), reinterpret_cast<const Product* const*>(all.lanes), mine->code, word, file, line);
    for (unsigned i = 4 * group; i < 4 * group + 4; ++i) {
        const unsigned others = i == self / 32 ? ~(1u << self % 32) : ~0u;
        make_ready(w, int(i), w.random ? ~0u : others);
    }
    return w.random ? switch_to_next(w) : Next{nullptr, nullptr};
}

void fa_host_wgmma_fence() { Wgmma::of(*this_worker)->fence(int(this_worker->current)); }
void fa_host_wgmma_commit() { Wgmma::of(*this_worker)->commit(int(this_worker->current)); }
// In index order every wait for a product ends at the latest moment, with a seed every second one.
Next fa_host_wgmma_late_arrive(int but) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    const unsigned self = w.current;
    const Wgmma::Issued* product = Wgmma::of(w)->awaited(int(self), unsigned(but));
    if (!product || (w.random && next_random(w) % 2)) return {nullptr, nullptr};
    w.parked[self / 32] |= 1u << self % 32;
    w.any_parked = true;
    w.fiber[self].wait = Wait{"wgmma_wait for the product", product->file, product->line, 0};
    return switch_to_next(w);
}

void fa_host_wgmma_wait(int but) {
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    Wgmma::of(w)->wait(w, int(w.current), unsigned(but), __builtin_return_address(0));
}

void* fa_host_code() { return __builtin_return_address(0); }

void fa_host_access(int lane, const void* address, int bytes, int writes, void* code) {
    if (this_worker->race)
        this_worker->race->access(static_cast<const char*>(address), bytes, writes, code,
                                  this_worker->first_clock + int(this_worker->current) / 32 * 32 + lane);
}

void fa_host_warp_access(const void* const* lanes, int bytes, void* code) {
    Banks& banks = *this_worker->banks;
    Banks::Access a{~0u, unsigned(bytes), {}};
    for (int i = 0; i < 32; ++i) a.at[i] = unsigned(banks.offset(static_cast<const char*>(lanes[i])));
    banks.count(a, code, of_shared);
}

void fa_host_bad_shared(const char* word, unsigned address, unsigned bytes, unsigned alignment, const char* file, int line) {
    Worker& w = *this_worker;
    if (address >> rank_shift) tma_fault(w, "an address of map_shared in a word that takes one of the own shared memory", word, file, line);
    unsigned size = w.launch->dynamic_bytes, at = address - shared_base;
    bool outside = at > size || size - at < bytes;
    begin_report(w, outside ? "address outside shared memory" : "address not aligned");
    print(": thread %d in %s at %s:%d, %u bytes from byte %d of %u", w.current, word, file, line, bytes, int(at), size);
    if (!outside) print(", which must be a multiple of %u", alignment);
    print("\n");
    end_report(w);
}

void fa_host_fail(const char* what, const char* file, int line) {
    Worker& w = *this_worker;
    begin_report(w, what);
    print(": thread %d at %s:%d\n", w.current, file, line);
    end_report(w);
}

float fa_host_atomic_add_f32(float* address, float value) {
    void* code = __builtin_return_address(0);
    if (atomic_access(address, 4, code)) global.access(*this_worker, address, 4, true, code, own_clock(), by_addition);
    return atomically_added<uint32_t>(address, value);
}

double fa_host_atomic_add_f64(double* address, double value) {
    void* code = __builtin_return_address(0);
    if (atomic_access(address, 8, code)) global.access(*this_worker, address, 8, true, code, own_clock(), by_addition);
    return atomically_added<uint64_t>(address, value);
}

int fa_host_atomic_add_i32(int* address, int value) {
    return atomic_word(address, relaxed, __builtin_return_address(0), [&] { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); });
}

int fa_host_atomic_add_acq_rel_i32(int* address, int value) {
    return atomic_word(address, acq_rel, __builtin_return_address(0), [&] { return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL); });
}

// What all who come have released is told to those who wait, and nothing that one of them releases later, whenever it reads the counter.
int fa_host_grid_arrive(int* counter, const char* file, int line) {
    const Launch& launch = *job->launch;
    if (!launch.cooperative)
        fa_host_fail("grid_barrier in a launch without `cooperative` in the header: its blocks may never all run at once", file, line);
    Meeting& m = job->meeting;
    if (m.at && m.at != counter) fa_host_fail("grid_barrier: at another counter than before in this launch", file, line);
    m.at = counter;
    const long long blocks = (long long)launch.grid[0] * launch.grid[1] * launch.grid[2];
    int opening = 0;
    bool right = true;
    atomic_word(counter, acq_rel, __builtin_return_address(0), [&] {
        const int before = __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
        right = before == m.opened * blocks + m.come;
        opening = int(m.opened) + 1;
        if (++m.come == blocks) m.come = 0, ++m.opened, m.told = global.on ? global.message_of(counter) : nullptr;
        return before;
    });
    if (!right) fa_host_fail("grid_barrier: its counter did not begin at 0, or something else writes it", file, line);
    return opening;
}

int fa_host_grid_is_open(int opening) {
    if (job->meeting.opened < opening) return 0;
    if (global.on) global.acquires_all(*this_worker, job->meeting.told, own_clock());
    return 1;
}

int fa_host_atomic_exchange_i32(int* address, int value) {
    return atomic_word(address, relaxed, __builtin_return_address(0),
                       [&] { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); });
}

int fa_host_atomic_compare_exchange_i32(int* address, int compare, int value) {
    return atomic_word(address, relaxed, __builtin_return_address(0), [&] {
        __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        return compare;
    });
}

int fa_host_atomic_max_i32(int* address, int value) {
    return atomic_word(address, relaxed, __builtin_return_address(0), [&] {
        int old = __atomic_load_n(address, __ATOMIC_RELAXED);
        while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        return old;
    });
}

void fa_host_threadfence() {
    may_switch(*this_worker);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (global.on) global.fence(*this_worker, own_clock());
}

int fa_host_printf(const char* format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int bytes = vsnprintf(nullptr, 0, format, arguments);
    char* text = bytes < 0 ? nullptr : static_cast<char*>(malloc(size_t(bytes) + 1));
    if (text) {
        vsnprintf(text, size_t(bytes) + 1, format, again);
        keep_printed(text, bytes);
    }
    va_end(again);
    va_end(arguments);
    return bytes;
}

int fa_host_run(const Launch* launch) {
    const unsigned in_cluster = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
    Job launched{launch,
                 uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2] / in_cluster,
                 0,
                 ok,
                 0,
                 PTHREAD_MUTEX_INITIALIZER,
                 0,
                 0,
                 launch->held != nullptr};
    static bool fork_is_handled;
    pthread_mutex_lock(&launch_lock);
    if (!fork_is_handled) fork_is_handled = !pthread_atfork(nullptr, nullptr, after_fork);
    job = &launched;
    launch->report[0] = 0;
    int workers = launch->workers < 1 || launch->interleaves ? 1 : launch->workers;
    if (workers > max_workers) workers = max_workers;
    if (uint64_t(workers) > launched.blocks) workers = int(launched.blocks);
    install_handlers();
    global.begin(*launch, launched.blocks);
    run_on_pool(workers - 1);
    global.end();
    check_overlap();
    write_printed();
    restore_handlers();
    if (interrupt_requested) launched.outcome = interrupted;
    job = nullptr;
    pthread_mutex_unlock(&launch_lock);
    return launched.outcome;
}

// The OS threads that the engine keeps between launches.
int fa_host_pool_size() { return pool.size; }

// Static __shared__ arrays are the thread-local storage of a kernel library: one copy for each OS thread, so one for each running block.
// Finds the size of that storage, and the offset of a given address in it.
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
