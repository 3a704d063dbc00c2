// The workers: OS threads that run blocks. Each has the fiber stacks and the shared memory of the one block that it runs.
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "block.hpp"
#include "fiber.hpp"
#include "race.hpp"

namespace fa_host {

constexpr int max_workers = 1024;

// Worker 0 is the launching thread, whichever that is. The others belong to the pool.
static inline Worker& worker(int number) {
    static Worker* workers[max_workers];
    if (workers[number]) return *workers[number];
    auto map = [](size_t bytes) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        return static_cast<char*>(memory);
    };
    Worker& w = *reinterpret_cast<Worker*>(map(sizeof(Worker)));
    w.stack_bytes = __sanitizer_start_switch_fiber ? 512 << 10 : 128 << 10;  // the kernels are compiled with a limit of 96 KB a frame
    w.stacks = map(max_threads * w.stack_bytes);
    w.arena = map(arena_bytes);  // page-aligned, so tiles aligned to 1024 bytes are aligned here too
    return *(workers[number] = &w);
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

// Runs blocks in index order until none is left or the launch ends early.
static inline void run_blocks(int number) {
    Worker& w = worker(number);
    const Launch& launch = *job->launch;
    w.launch = &launch;
    w.threads = launch.block[0] * launch.block[1] * launch.block[2];
    w.warps = (w.threads + 31) / 32;
    w.static_shared = launch.static_bytes ? static_cast<char*>(launch.static_shared()) - launch.static_offset : nullptr;
    w.race = launch.checks & 1 ? Race::of(w) : nullptr;
    if (__asan_poison_memory_region) {
        __asan_unpoison_memory_region(w.arena, launch.dynamic_bytes);
        __asan_poison_memory_region(w.arena + launch.dynamic_bytes, arena_bytes - launch.dynamic_bytes);
    }
    w.faulted = false;
    this_worker = &w;
    unsigned long modes = flush_subnormals();
    while (job->outcome != fault && !interrupt_requested) {
        uint64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (index >= job->blocks) break;
        run_block(w, index);
    }
    set_modes(modes);
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
    ++pool.generation;
    pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.lock);
    run_blocks(0);
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.finish, &pool.lock);
    pool.wanted = 0;
    pthread_mutex_unlock(&pool.lock);
}

}  // namespace fa_host
