// The state of a block under execution: a fiber for each thread, a record for each warp and warpgroup, the barriers, and the worker
// that runs the block.
// The headers of the engine are compiled once, into engine.cpp: what they define is static.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "engine.hpp"

namespace fa_host {

constexpr int max_threads = 1024, max_warps = 32, max_warpgroups = 8;
constexpr int named_barriers = 16, max_mbarriers = 128, cluster_barrier = named_barriers + max_mbarriers,
              max_barriers = cluster_barrier + 1;
constexpr int max_cluster = 8;  // blocks
constexpr size_t arena_bytes = 256 << 10;  // the most dynamic shared memory of one block
constexpr size_t fence_bytes = 4 << 20;    // inaccessible pages on each side of it

struct Wait {
    const char* word;  // the function that the fiber last waited in
    const char* file;
    int line;
    unsigned mask;       // the lanes it waits for in a warp collective, else 0
    int barrier = none;  // the barrier it waits at

    static constexpr int none = -1, warpgroup = -2;
};

struct alignas(64) Fiber {
    void* stack_pointer;
    Wait wait;
    void* fake_stack;  // AddressSanitizer's
    bool done;
    bool in_cluster_barrier;  // it has arrived at the cluster's barrier and not yet waited
    unsigned cluster_phase;   // the phase at which it has arrived
    Self self;
};

struct Collective {  // a warp collective in progress: some lanes of the mask have arrived
    unsigned mask, arrived;
    Apply apply;
    const char* word;
    const char* file;
    int line;
    void* lanes[32];
};

struct Warp {
    unsigned ready;    // lanes in the ready queue
    unsigned alive;    // lanes that have not returned
    unsigned present;  // lanes that exist: the last warp of a block may have fewer than 32
    int collectives;   // in progress, one for each mask
    Collective collective[32];
};

// A barrier of the block: of __syncthreads and bar.sync (0 to 15), then the mbarriers, then the block's part of the cluster's. A phase completes when `expected` threads have
// arrived and as many bytes as were announced. The vector clocks that it joins are the race check's (race.hpp).
struct Barrier {
    unsigned expected, arrived;
    unsigned phase;     // how many have completed; the parity of the running one is its last bit
    long long pending;  // bytes announced by expect_tx and not yet there; below 0 where they are there before they are announced
    unsigned long long* at;  // an mbarrier's place in shared memory
    bool fenced;        // its initialisation is visible to the asynchronous proxy
    const char* file;   // an mbarrier's initialisation; of a __syncthreads the line where its threads wait
    int line;
    int clock;          // an mbarrier's number among those of the cluster (clocks.hpp)
    unsigned waiting[max_warps];  // lanes
};

// The 128 threads of a warpgroup that arrive at a word of all of them.
struct Warpgroup {
    int arrived;
    const char* word;
    const char* file;
    int line;
    const void* lanes[128];
};

// The turns that a thread has taken last and not passed on, and whether it has passed a proxy fence since.
struct Turns {
    const int* at[2];
    bool fenced;
};

struct Race;   // race.hpp
struct Learned;  // global.hpp
struct Events;   // global.hpp
struct Banks;  // banks.hpp
struct Async;  // async.hpp
struct Wgmma;  // wgmma.hpp
struct Worker;

// The blocks of a cluster. They share an OS thread, and each has a Worker of its own for its fibers and its shared memory.
struct Cluster {
    int blocks, live;  // live: blocks that have not ended
    unsigned left;     // threads that have ended behind their arrival in the running phase of its barrier
    Worker* block[max_cluster];
};

// One OS thread, and the block it runs; of a cluster's other blocks, the block alone.
struct Worker {
    const Launch* launch;
    char* stacks;  // for `stacked` fibers, each of an inaccessible page and stack_bytes above it
    size_t stack_bytes, page_bytes;
    int stacked;
    char* signal_stack;
    char* room;            // fence, arena_bytes, fence
    char* arena;           // the block's dynamic shared memory: the last bytes of the room between the fences
    char* arena_first;     // from here to the upper fence pages are accessible
    unsigned arena_holds;  // the bytes of dynamic shared memory that the pages are set for
    char* static_shared;
    int threads, warps, live;
    unsigned current;      // the running fiber
    unsigned ready_warps;  // warps with a ready lane
    int mbarriers;         // in use, behind the named barriers
    unsigned used_named;   // named barriers that threads have met in this block
    unsigned parked[max_warps];  // lanes whose wait ends at the latest moment: when no thread is ready
    bool any_parked;
    unsigned idle_peeks;   // failed peeks at mbarriers since a thread last ran on
    int await_turn;        // threads that wait for another block's turn
    int only_turns;        // the times that nothing else was to be done; 0: there was
    uint64_t random;   // the state of the random schedule, 0 in index order
    unsigned late;     // warps that run when no other can, of a random schedule
    bool fast_switch;  // index order, and no sanitizer that must be told of stack switches
    bool failed, faulted;
    Cluster* cluster;     // null in a launch without clusters
    Worker* lead;         // the block of rank 0, which has the OS thread's own stack: this one without clusters
    int rank;             // in the cluster
    int first_clock;      // the clock of thread 0 (clocks.hpp)
    Cluster own_cluster;  // of a lead; its blocks are kept between launches
    char* static_kept;    // the block's static shared memory while another block of the cluster runs
    size_t static_room;
    void* main_stack_pointer;  // the worker's own stack, suspended while fibers run
    void* main_fake_stack;
    const void* main_stack_bottom;
    size_t main_stack_bytes;
    Race* race;         // null without the race check
    Race* race_memory;  // its storage, allocated by the first launch that needs it
    Learned* learned;   // of the block, or cluster, of a lead, for the race check of global memory; allocated by its first launch
    Banks* banks;       // null where traffic is not counted
    Banks* banks_memory;
    Async* async;       // copies in flight, allocated by the first copy
    Wgmma* wgmma;       // products in flight, allocated by the first wgmma
    Barrier barrier[max_barriers];
    Warpgroup warpgroup[max_warpgroups];
    Fiber fiber[max_threads];
    Turns turns[max_threads];
    Warp warp[max_warps];
    alignas(64) char scratch[max_warps][scratch_bytes];
};

// The barrier of all blocks (fa/grid.cuh): its counter, the blocks that wait there, how often it has opened, and what was released by then.
struct Meeting {
    const int* at;
    long long come, opened;
    const Events* told;
};

// One launch, shared by all workers.
struct Job {
    const Launch* launch;
    uint64_t blocks, next;  // next: the first block that no worker has taken
    int outcome;
    int report_used;
    pthread_mutex_t lock;  // guards outcome and report
    int working, waiting;  // workers that have not run out of blocks, and of these such as wait for another block's turn
    int held_back;         // what the launch before has written is not there yet (overlap.hpp)
    Meeting meeting;
};

static __thread Worker* this_worker __attribute__((tls_model("initial-exec"))) = nullptr;
static Job* job;
static volatile sig_atomic_t interrupt_requested;  // Ctrl-C during this launch

// The lowest byte of a fiber's stack.
static inline char* stack_bottom(const Worker& w, int thread) {
    return w.stacks + size_t(thread) * (w.stack_bytes + w.page_bytes) + w.page_bytes;
}

// Zeroed memory, of which a page is allocated on first use; null where there is no address space.
static inline char* map_memory(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

// Where a block lies in the grid. index: of its cluster in the grid of clusters.
static inline Dim3 block_index(const Launch& launch, uint64_t index, unsigned rank) {
    const unsigned *size = launch.cluster, x = launch.grid[0] / size[0], y = launch.grid[1] / size[1];
    return {unsigned(index % x) * size[0] + rank % size[0], unsigned(index / x % y) * size[1] + rank / size[0] % size[1],
            unsigned(index / x / y) * size[2] + rank / size[0] / size[1]};
}

// Adds to a float in memory, whatever other OS threads add; returns what it was.
template <class Bits, class Real> static inline Real atomically_added(Real* address, Real value) {
    auto bits = reinterpret_cast<Bits*>(address);
    Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED), now;
    Real before;
    do {
        memcpy(&before, &old, sizeof old);
        const Real after = before + value;
        memcpy(&now, &after, sizeof now);
    } while (!__atomic_compare_exchange_n(bits, &old, now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

// One block, or all blocks of a cluster: begins, goes on with the running thread of one of them until it is suspended (interleave.hpp), has
// ended or fails, and ends.
#pragma GCC visibility push(hidden)
void begin_block(Worker& w, uint64_t index);
void go_on(Worker& lead, Worker& at);
void end_block(Worker& w);
#pragma GCC visibility pop

}  // namespace fa_host
