// The OS threads that run blocks: one worker each, with the stacks and the shared memory of the block it runs. Part of engine.cpp.
#pragma once

namespace fa_host {

constexpr int max_workers = 1024;

// Number 0 is the thread that launches, whichever that is; the others are the pool's.
static Worker& worker(int number) {
    static Worker* workers[max_workers];
    if (workers[number]) return *workers[number];
    auto map = [](size_t bytes) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        return static_cast<char*>(memory);
    };
    Worker& w = *reinterpret_cast<Worker*>(map(sizeof(Worker)));
    w.stack_bytes = __sanitizer_start_switch_fiber ? 512 << 10 : 128 << 10;  // the compiler refuses frames over 96 KB (host.py)
    w.stacks = map(max_threads * w.stack_bytes);
    w.arena = map(arena_bytes);  // page-aligned, so 1024-byte aligned tiles hold
    return *(workers[number] = &w);
}

// The processor's floating-point modes. Kernels run with subnormals flushed to zero, as CuPy's -ftz=true has it.
static void set_modes(unsigned long modes) {
#if defined(__x86_64__)
    _mm_setcsr(unsigned(modes));
#else
    asm volatile("msr fpcr, %0" ::"r"(modes));
#endif
}

static unsigned long flush_subnormals() {
#if defined(__x86_64__)
    unsigned long modes = _mm_getcsr(), flush = 0x8040;
#else
    unsigned long modes, flush = 1 << 24;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
#endif
    set_modes(modes | flush);
    return modes;
}

static void work(int number) {
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
    here = &w;
    unsigned long modes = flush_subnormals();
    while (job->outcome != fault && !stop_asked) {
        uint64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (index >= job->blocks) break;
        run_block(w, index);
    }
    set_modes(modes);
    here = nullptr;
}

struct Pool {  // OS threads kept between launches; the caller of run() works too
    pthread_mutex_t lock;
    pthread_cond_t start, finish;
    int size, wanted, busy;
    uint64_t turn;
};
constexpr Pool no_threads = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0};
static Pool pool = no_threads;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

// In the child of a fork there are no other threads: not the pool's, and not one that launches. What they held is made anew.
static void after_fork() {
    pool = no_threads;
    one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    job = nullptr;
}

static void* pool_thread(void* number) {
    uint64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.turn == seen || reinterpret_cast<intptr_t>(number) >= pool.wanted) {
            seen = pool.turn;
            pthread_cond_wait(&pool.start, &pool.lock);
        }
        seen = pool.turn;
        pthread_mutex_unlock(&pool.lock);
        work(1 + int(reinterpret_cast<intptr_t>(number)));
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.finish);
        pthread_mutex_unlock(&pool.lock);
    }
    return nullptr;
}

static void work_together(int helpers) {
    pthread_mutex_lock(&pool.lock);
    while (pool.size < helpers) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, pool_thread, reinterpret_cast<void*>(intptr_t(pool.size)))) break;
        pthread_detach(thread);
        ++pool.size;
    }
    pool.wanted = pool.busy = helpers < pool.size ? helpers : pool.size;
    ++pool.turn;
    pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.lock);
    work(0);
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.finish, &pool.lock);
    pool.wanted = 0;
    pthread_mutex_unlock(&pool.lock);
}

}  // namespace fa_host
