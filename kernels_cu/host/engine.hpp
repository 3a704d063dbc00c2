// The interface between a kernel compiled for the CPU and the engine that runs it. A CUDA thread is a fiber, the fibers of a block
// share one OS thread, and blocks start in index order on all cores. The words call these functions; kernels never do.
#pragma once

namespace fa_host {

struct Dim3 {
    unsigned x, y, z;
};

// The built-in variables of a CUDA thread. The engine points fa_host_self at those of the running fiber.
struct Self {
    Dim3 thread_idx, block_idx, block_dim, grid_dim;
    char* dynamic_shared;
    unsigned dynamic_bytes;
    int lane;
    bool race;           // the race check is on
    bool banks;          // accesses of memory are counted (banks.hpp)
    int cluster_blocks;  // blocks of this block's cluster; 1 without clusters
    void* scratch;       // memory of this warp for words that take all 32 lanes; null in a warp with fewer
};

constexpr int scratch_bytes = 4416;

// The 32-bit address of the first byte of dynamic shared memory. It is not 0, and neither is a GPU's.
constexpr unsigned shared_base = 1024;
// The address of the same byte in the block of a rank of the cluster: rank + 1 stands above the bits of a local address.
constexpr int rank_shift = 24;

// Executes a warp collective for all lanes of the mask. lanes[i] is the argument of lane i, on the stack of that lane.
using Apply = void (*)(void* const* lanes, unsigned mask);

// Memory that a launch which overlaps sees as NaN until it waits for the launch before; `from` has its bytes.
struct Held {
    unsigned char* to;
    const unsigned char* from;
    unsigned long long bytes;
};

// What warps do at a place in the code. of_shared: accesses to shared memory, the wavefronts that they take, and without bank conflicts;
// else requests to global memory, the sectors that they touch, and the fewest that would hold their bytes.
enum Kind { of_shared, of_load, of_store };
struct Traffic {
    void* code;
    Kind kind;
    unsigned long long accesses, parts, ideal;
};
constexpr int max_places = 4096;

// A tensor or a workspace: what is global memory for that count.
struct Span {
    const char* start;
    unsigned long long bytes;
};

// Memory that the race check watches beside shared memory: an output, a workspace or a module global (global.hpp).
struct Watch {
    static constexpr int most = 4;
    const char* name;
    char* address;
    unsigned long long bytes;
    unsigned long long *writes, *others;  // one for every four bytes
    unsigned long long* wide;             // one for every sixteen
    long long stride[most];              // bytes
    int rank;
    unsigned generation;  // of what they hold; 0: nothing yet
};

struct Launch {
    void (*entry)(void** parameters);
    void** parameters;
    void* (*static_shared)();  // any address inside the calling OS thread's static shared memory; see module_shared
    long long static_offset;   // from the start of the static shared memory to that address
    long long static_bytes;
    long long static_guard;    // bytes before and behind it that nothing may write
    unsigned grid[3], block[3], cluster[3];  // grid and cluster in blocks, block in threads
    unsigned dynamic_bytes;
    unsigned checks;          // 1: race, 2: count traffic
    unsigned long long seed;  // 0: round-robin in index order; else the seed of a random schedule
    int workers;
    char* report;  // receives the report, as text
    int report_bytes;
    const Held* held;  // null: the launch does not overlap
    int held_count;
    Watch** watch;  // under the race check
    int watch_count;
    bool interleaves;             // blocks meet at their atomics (interleave.hpp): with a seed, or where the race check needs it
    bool ordered_adds;            // the order of floats' additions must be fixed
    unsigned long long* watched;  // the accesses that the race check has compared are added to it
    Traffic* traffic;             // max_places of them
    int* traffic_places;          // how many are set
    unsigned long long* traffic_lost;  // accesses that were not counted, for want of memory
    const Span* span;             // where traffic is counted
    int spans;
    bool cooperative;             // all blocks are there at once, and may meet
};

// A wgmma as one thread of the warpgroup issues it: d += a b, d = a b where it does not accumulate. D has 64 rows and 2 * registers
// columns; a is in shared memory where registers_a is null. multiply adds the product: d[warp][column][row of 16], a[row][k], b[column][k].
struct Product {
    float* d;
    const unsigned* registers_a;  // 4
    unsigned long long a, b;      // descriptors of shared memory
    int registers;
    bool transposed_a, transposed_b, accumulate;
    void* code;  // for the race check
    void (*multiply)(float* d, const unsigned short* a, const unsigned short* b, int columns);
};

enum Outcome { ok = 0, fault = 1, race = 2, interrupted = 3, no_memory = 4 };

}  // namespace fa_host

extern "C" {

// initial-exec: the variable lives in the engine, so no kernel library needs static TLS of its own for it.
extern __thread fa_host::Self* fa_host_self __attribute__((tls_model("initial-exec")));

// __syncthreads: barrier 0 of the block.
void fa_host_syncthreads(const char* file, int line);

// A warp collective: the last lane of mask to arrive executes apply over the arguments of all. apply is null for __syncwarp, which
// orders memory instead.
void fa_host_warp(unsigned mask, fa_host::Apply apply, void* mine, const char* word, const char* file, int line);

float fa_host_atomic_add_f32(float* address, float value);
double fa_host_atomic_add_f64(double* address, double value);
int fa_host_atomic_add_i32(int* address, int value);
int fa_host_atomic_add_acq_rel_i32(int* address, int value);
int fa_host_atomic_exchange_i32(int* address, int value);
int fa_host_atomic_compare_exchange_i32(int* address, int compare, int value);
int fa_host_atomic_max_i32(int* address, int value);
void fa_host_threadfence();
// Blocks that take turns: whether another has passed the turn to this thread; before a thread that waits for it lets others run, and after.
int fa_host_has_turn(const int* turn, int mine);
void fa_host_await_turn(const char* file, int line);
void fa_host_end_await();
void fa_host_pass_turn(int* turn, int next, const char* file, int line);
// The barrier of all blocks: a thread of each comes, and is told which opening it waits for; whether that has been.
int fa_host_grid_arrive(int* counter, const char* file, int line);
int fa_host_grid_is_open(int opening);

// Asynchronous copies to shared memory (async.hpp). Of the 16 bytes at `value` the first `bytes` were read at `from`; the rest are zero.
void fa_host_cp_async(char* to, const void* from, int bytes, const void* value, const char* file, int line);
void fa_host_cp_async_commit();
void fa_host_cp_async_wait(int but);

// Named barriers of the block, 0 to 15, and mbarriers in shared memory (barrier.hpp).
void fa_host_bar_sync(int id, int threads, const char* file, int line);
void fa_host_bar_arrive(int id, int threads, const char* file, int line);
void fa_host_mbarrier_init(unsigned long long* at, unsigned count, const char* file, int line);
void fa_host_mbarrier_init_fence();
void fa_host_mbarrier_arrive(unsigned long long* at, unsigned bytes, const char* word, const char* file, int line);
int fa_host_mbarrier_test(unsigned long long* at, unsigned parity, const char* file, int line);
void fa_host_mbarrier_wait(unsigned long long* at, unsigned parity, const char* file, int line);  // after a test that failed
void fa_host_yield();

// What this thread has written, or knows to be written, to shared memory becomes visible to the asynchronous proxy (TMA, wgmma).
void fa_host_proxy_fence();
void fa_host_proxy_fence_global();

// Launches that overlap (overlap.hpp): the wait for the one before, and what comes behind it.
void fa_host_dependency_wait(const char* file, int line);
void fa_host_dependency_over();

// TMA (tma.hpp): a box of a tensor to shared memory, whose bytes an mbarrier counts; and back, in groups as cp.async's.
void fa_host_tma_load(const void* map, void* to, unsigned long long* barrier, const int* at, int rank, const char* file, int line);
void fa_host_tma_store(const void* map, const void* from, const int* at, int rank, const char* file, int line);
void fa_host_bulk_add_f32(float* to, const float* from, int count, const char* file, int line);
void fa_host_bulk_commit();
void fa_host_bulk_wait(int but, bool read);

// Clusters (cluster.hpp). Addresses are those of map_shared. In fa_host_tma_multicast `blocks` has a bit for each rank that is sent the box.
void fa_host_cluster_arrive(const char* file, int line);
void fa_host_cluster_wait(const char* file, int line);
void fa_host_mbarrier_arrive_remote(unsigned at, const char* file, int line);
void fa_host_bulk_copy_to_cluster(unsigned to, const void* from, unsigned bytes, unsigned barrier, const char* file, int line);
void fa_host_store_remote(unsigned to, const void* value, unsigned barrier, const char* file, int line);  // of 16 bytes
void fa_host_tma_multicast(const void* map, void* to, unsigned long long* barrier, unsigned blocks, const int* at, int rank,
                           const char* file, int line);

// wgmma (wgmma.hpp): 128 threads issue a product together. Its registers are back at the wait that retires its group.
void fa_host_wgmma(const fa_host::Product* product, const char* word, const char* file, int line);
void fa_host_wgmma_fence();
void fa_host_wgmma_commit();
void fa_host_wgmma_late(int but);  // before a wait: the products run for as long as they may
void fa_host_wgmma_wait(int but);

// For the race check: the caller's code address, and an access to shared memory that a word makes on behalf of a lane of this warp.
void* fa_host_code();
void fa_host_access(int lane, const void* address, int bytes, int writes, void* code);

// For the count of traffic: an access of the running warp's 32 lanes, at an address each.
void fa_host_warp_access(const void* const* lanes, int bytes, void* code);

// Ends the block with a report: the address given to a word is outside dynamic shared memory, or not aligned.
void fa_host_bad_shared(const char* word, unsigned address, unsigned bytes, unsigned alignment, const char* file, int line);

// Ends the block with a report: a check of a word failed.
void fa_host_fail(const char* what, const char* file, int line);

// printf of a kernel (printed.hpp). Returns the bytes, as C's does.
int fa_host_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));

int fa_host_run(const fa_host::Launch* launch);
int fa_host_module_shared(void* (*static_shared)(), long long* offset, long long* bytes);
int fa_host_version();
}
