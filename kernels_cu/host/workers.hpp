// The workers: OS threads that run blocks. Each has the fiber stacks and the shared memory of the one block that it runs.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "banks.hpp"
#include "block.hpp"
#include "fiber.hpp"
#include "global.hpp"
#include "interleave.hpp"
#include "overlap.hpp"
#include "printed.hpp"
#include "race.hpp"

namespace fa_host {

constexpr int max_workers = 1024;
constexpr size_t signal_stack_bytes = 64 << 10;
// A process may have 65530 mappings. A guard page makes two of one, and Python needs some. Stacks beyond this number have no guard page
// of their own; for them the last word tells of an overflow (engine.cpp), and the page below all stacks ends a deep one.
constexpr int max_guards = 16384;

// Null where there is no address space.
static inline Worker* new_worker() {
    char* room = map_memory(arena_bytes + 2 * fence_bytes);
    auto* w = reinterpret_cast<Worker*>(map_memory(sizeof(Worker)));
    char* signal_stack = map_memory(signal_stack_bytes);
    if (!room || !w || !signal_stack) {
        if (room) munmap(room, arena_bytes + 2 * fence_bytes);
        if (w) munmap(w, sizeof(Worker));
        return nullptr;
    }
    mprotect(room, fence_bytes, PROT_NONE);
    mprotect(room + fence_bytes + arena_bytes, fence_bytes, PROT_NONE);
    w->stack_bytes = __sanitizer_start_switch_fiber ? 512 << 10 : 128 << 10;  // the kernels are compiled with a limit of 96 KB a frame
    w->page_bytes = size_t(sysconf(_SC_PAGESIZE));
    w->signal_stack = signal_stack;
    w->room = room;
    w->arena_holds = ~0u;
    return w;
}

// Worker 0 is the launching thread, whichever that is. The others belong to the pool.
static inline Worker* worker(int number) {
    static Worker* workers[max_workers];
    if (!workers[number]) workers[number] = new_worker();
    return workers[number];
}

// Maps stacks for the threads of a block, as many as a launch has needed so far. False where there is no address space.
static inline bool reserve_stacks(Worker& w) {
    static int guards;
    if (w.stacked >= w.threads) return true;
    size_t each = w.stack_bytes + w.page_bytes;
    if (w.stacks) munmap(w.stacks, size_t(w.stacked) * each);
    w.stacked = 0;
    w.stacks = map_memory(size_t(w.threads) * each);
    if (!w.stacks) return false;
    w.stacked = w.threads;
    for (int t = 0; t < w.stacked && (t == 0 || __atomic_fetch_add(&guards, 1, __ATOMIC_RELAXED) < max_guards); ++t)
        if (mprotect(stack_bottom(w, t) - w.page_bytes, w.page_bytes, PROT_NONE)) break;
    return true;
}

// Sets the pages for this many bytes of dynamic shared memory. They end where the upper fence begins, up to the 1024 bytes to which
// tiles are aligned, so that an access behind them is a fault; the bytes left over are poisoned and compared after the block. Under
// AddressSanitizer they begin where the lower fence ends: it names what lies behind them better than a fault does.
static inline void fit_arena(Worker& w, unsigned bytes) {
    if (w.arena_holds == bytes) return;
    w.arena_holds = bytes;
    char *first = w.room + fence_bytes, *end = first + arena_bytes;
    if (__asan_poison_memory_region) {
        w.arena = w.arena_first = first;
        __asan_unpoison_memory_region(first, bytes);
        __asan_poison_memory_region(first + bytes, arena_bytes - bytes);
        return;
    }
    w.arena = end - (size_t(bytes) + 1023) / 1024 * 1024;
    w.arena_first = first + size_t(w.arena - first) / w.page_bytes * w.page_bytes;
    mprotect(first, size_t(w.arena_first - first), PROT_NONE);
    mprotect(w.arena_first, size_t(end - w.arena_first), PROT_READ | PROT_WRITE);
    memset(w.arena_first, 0xff, size_t(end - w.arena_first));
}

// The processor's floating-point modes. Kernels run with subnormals flushed to zero, as CuPy's -ftz=true does on the GPU.
static inline void set_modes(unsigned long modes) {
#if defined(__x86_64__)
    _mm_setcsr(unsigned(modes));
#else
    asm volatile("msr fpcr, %0" ::"r"(modes));
#endif
}

static inline unsigned long flush_subnormals() {
#if defined(__x86_64__)
    unsigned long modes = _mm_getcsr(), flush = 0x8040;
#else
    unsigned long modes, flush = 1 << 24;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
#endif
    set_modes(modes | flush);
    return modes;
}

// Makes a worker ready for the blocks of a launch. False where there is no address space.
static inline bool prepare(Worker& w, const Launch& launch) {
    w.threads = int(launch.block[0] * launch.block[1] * launch.block[2]);
    w.warps = (w.threads + 31) / 32;
    if (!reserve_stacks(w) || (launch.checks & 1 && !Race::of(w)) || (launch.checks & 2 && !Banks::of(w))) return false;
    w.launch = &launch;
    w.static_shared = launch.static_bytes ? static_cast<char*>(launch.static_shared()) - launch.static_offset : nullptr;
    char* guards[] = {w.static_shared - launch.static_guard, w.static_shared + launch.static_bytes};
    for (char* guard : guards) {
        if (!w.static_shared) break;
        if (__asan_poison_memory_region) __asan_poison_memory_region(guard, size_t(launch.static_guard));
        else memset(guard, 0xff, size_t(launch.static_guard));
    }
    w.race = launch.checks & 1 ? Race::of(w) : nullptr;
    if (w.race && !w.learned && !(w.learned = reinterpret_cast<Learned*>(map_memory(sizeof(Learned))))) return false;
    if (w.race) w.race->watched = 0;
    w.banks = launch.checks & 2 ? Banks::of(w) : nullptr;
    if (w.banks) w.banks->new_launch();
    fit_arena(w, launch.dynamic_bytes);
    w.faulted = false;
    return true;
}

// The same with a worker for each block of a cluster where the launch has clusters. w is the one of rank 0.
static inline bool prepare_cluster(Worker& w, const Launch& launch) {
    Cluster& all = w.own_cluster;
    all.blocks = int(launch.cluster[0] * launch.cluster[1] * launch.cluster[2]);
    all.block[0] = &w;
    w.cluster = nullptr;
    for (int rank = 0; rank < all.blocks; ++rank) {
        if (!all.block[rank]) all.block[rank] = new_worker();
        if (!all.block[rank] || !prepare(*all.block[rank], launch)) return false;
        Worker& b = *all.block[rank];
        b.lead = &w;
        b.rank = rank;
        b.first_clock = rank * b.threads;
        if (b.race) b.race->clocks = &w.race->own_clocks;
        if (all.blocks == 1) continue;
        b.cluster = &all;
        if (size_t(launch.static_bytes) > b.static_room) {
            ::free(b.static_kept);
            b.static_kept = static_cast<char*>(malloc(size_t(launch.static_bytes)));
            b.static_room = b.static_kept ? size_t(launch.static_bytes) : 0;
            if (!b.static_kept) return false;
        }
    }
    return true;
}

static inline bool goes_on() { return job->outcome != fault && job->outcome != no_memory && !interrupt_requested; }

// Adds what the checks of a block, or of the blocks of a cluster, have counted to the launch's.
static inline void add_counts(Worker& w) {
    const Launch& launch = *job->launch;
    pthread_mutex_lock(&job->lock);
    for (int i = 0; i < w.own_cluster.blocks; ++i) {
        Worker& b = *w.own_cluster.block[i];
        if (b.race) *launch.watched += b.race->watched;
        if (b.banks) b.banks->add_to(launch.traffic, launch.traffic_places, launch.traffic_lost);
    }
    pthread_mutex_unlock(&job->lock);
}

// -- an interleaved launch (interleave.hpp) ---------------------------------------------------------------------------------

// The place that goes on: the first that can; until there is what the launch before has written, that of the first block. -1: none.
static inline int first_to_go_on() {
    const Interleaved& all = interleaved;
    int found = -1;
    for (int i = 0; i < all.count; ++i) {
        const Interleaved::Place& p = all.place[all.order[i]];
        if (p.index >= job->blocks || p.waits) continue;
        if (!is_held_back()) return all.order[i];
        if (found < 0 || p.index < all.place[found].index) found = all.order[i];
    }
    return found;
}

// Static shared memory is that of the OS thread: the place that goes on gets its own back.
static inline void change_static(int number) {
    Interleaved& all = interleaved;
    const size_t bytes = size_t(job->launch->static_bytes);
    char* const shared = all.place[number].lead->static_shared;
    if (!bytes || all.static_of == number) return;
    if (all.static_of >= 0 && all.place[all.static_of].runs) memcpy(all.place[all.static_of].static_kept, shared, bytes);
    if (all.place[number].runs) memcpy(shared, all.place[number].static_kept, bytes);
    all.static_of = number;
}

static inline void run_interleaved(const Launch& launch) {
    Interleaved& all = interleaved;
    all = {};
    all.static_of = -1;
    all.random = launch.seed * 0x9e3779b97f4a7c15ull | 1;
    for (int i = 0; i < 8; ++i) all.draw();
    all.odds = 2u << all.draw() % 3 * 2;  // 2, 8 or 32
    for (int i = 0; i < (launch.cooperative ? Interleaved::places : Interleaved::most) && uint64_t(i) < job->blocks; ++i) {
        Worker* w = worker(i);
        char* kept = static_cast<char*>(malloc(size_t(launch.static_bytes) + 1));
        if (!w || !kept || (i && !prepare_cluster(*w, launch))) {  // then with fewer
            ::free(kept);
            break;
        }
        all.place[all.count] = {w, w, job->next++, false, false, kept};
        all.order[all.count] = all.count;
        all.move(all.count, int(all.draw() % unsigned(all.count + 1)));
        ++all.count;
    }
    if (launch.cooperative && uint64_t(all.count) < job->blocks)
        out_of_memory("all blocks of a cooperative launch at once", size_t(job->blocks) * launch.block[0] * (128 << 10));
    all.on = true;
    for (int rounds = 0; goes_on();) {
        const int number = first_to_go_on();
        if (number < 0) {
            bool waits = false;
            for (int i = 0; i < all.count; ++i) waits |= all.place[i].waits, all.place[i].waits = false;
            if (!waits) break;
            all.stuck = ++rounds > 100;  // a block of a cluster may go on while another waits
            continue;
        }
        Interleaved::Place& p = all.place[number];
        change_static(number);
        if (!p.runs) begin_block(*p.lead, p.index), p.at = p.lead;
        p.runs = true;
        all.running = number;
        all.suspended = false;
        go_on(*p.lead, *p.at);
        if (!p.waits) rounds = 0;
        if (all.suspended) continue;
        end_block(*p.lead);
        p.runs = false;
        p.index = job->next++;
        all.move(number, int(all.draw() % unsigned(all.count)));
    }
    all.on = false;
    for (int i = 0; i < all.count; ++i) {
        if (i) add_counts(*all.place[i].lead);
        ::free(all.place[i].static_kept);
    }
}

// -- the workers ------------------------------------------------------------------------------------------------------

// Runs blocks in index order until none is left or the launch ends early.
static inline void run_blocks(int number) {
    const Launch& launch = *job->launch;
    Worker* found = worker(number);
    if (!found || !prepare_cluster(*found, launch)) {
        if (number == 0) out_of_memory("the stacks of a block", size_t(launch.block[0]) * (128 << 10));  // the others do without a helper
        return;
    }
    Worker& w = *found;
    this_worker = &w;
    stack_t before, ours = {};
    ours.ss_sp = w.signal_stack;
    ours.ss_size = signal_stack_bytes;
    if (!__sanitizer_start_switch_fiber) sigaltstack(&ours, &before);
    unsigned long modes = flush_subnormals();
    wait_for_first_block(number);
    while (!launch.interleaves && goes_on()) {
        uint64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (index >= job->blocks) break;
        begin_block(w, index);
        go_on(w, w);
        end_block(w);
    }
    if (launch.interleaves) run_interleaved(launch);
    set_modes(modes);
    add_counts(w);
    if (!__sanitizer_start_switch_fiber) sigaltstack(&before, nullptr);
    this_worker = nullptr;
}

struct Pool {  // OS threads kept between launches, beside the launching thread
    pthread_mutex_t lock;
    pthread_cond_t start, finish;
    int size, wanted, busy;
    uint64_t generation;  // counts launches
};
constexpr Pool empty_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0};
static Pool pool = empty_pool;
static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;  // one launch at a time

// The child of a fork has one thread: the pool's threads and a launch of another thread are gone. Their state is reset.
static inline void after_fork() {
    pool = empty_pool;
    launch_lock = PTHREAD_MUTEX_INITIALIZER;
    job = nullptr;
    print_lock = PTHREAD_MUTEX_INITIALIZER;
    global.lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    interleaved.on = false;
    prints = prints_left_out = 0;
    printed_bytes = 0;
}

static inline void* pool_thread(void* number) {
    uint64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.generation == seen || reinterpret_cast<intptr_t>(number) >= pool.wanted) {
            seen = pool.generation;
            pthread_cond_wait(&pool.start, &pool.lock);
        }
        seen = pool.generation;
        pthread_mutex_unlock(&pool.lock);
        run_blocks(1 + int(reinterpret_cast<intptr_t>(number)));
        __atomic_fetch_sub(&job->working, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.finish);
        pthread_mutex_unlock(&pool.lock);
    }
    return nullptr;
}

// Runs the job on the calling thread and `helpers` threads of the pool.
static inline void run_on_pool(int helpers) {
    pthread_mutex_lock(&pool.lock);
    while (pool.size < helpers) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, pool_thread, reinterpret_cast<void*>(intptr_t(pool.size)))) break;
        pthread_detach(thread);
        ++pool.size;
    }
    pool.wanted = pool.busy = helpers < pool.size ? helpers : pool.size;
    job->working = pool.wanted + 1;
    ++pool.generation;
    pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.lock);
    run_blocks(0);
    __atomic_fetch_sub(&job->working, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.finish, &pool.lock);
    pool.wanted = 0;
    pthread_mutex_unlock(&pool.lock);
}

}  // namespace fa_host
