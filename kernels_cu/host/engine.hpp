// The seam between a kernel compiled for the CPU and the engine that runs it: one CUDA thread is one fiber, the fibers of
// a block share one OS thread, and blocks are spread over the cores in index order. Words call these; kernels never do.
#pragma once

namespace fa_host {

struct Dim3 {
    unsigned x, y, z;
};

// What a CUDA thread knows of itself. The engine points fa_host_self at the running fiber's.
struct Self {
    Dim3 thread_idx, block_idx, block_dim, grid_dim;
    char* dynamic_shared;
    unsigned dynamic_bytes;
    int lane;
    bool race;     // the race check is on
    void* scratch; // a place for the words of this warp that take all 32 lanes; null where there are fewer
};

constexpr int scratch_bytes = 4416;

// Where the 32-bit addresses of dynamic shared memory start. Not at 0, nor do a GPU's.
constexpr unsigned shared_base = 1024;

// Executes a warp collective for all lanes at once: lanes[i] is what lane i handed in (on its own stack), for i in mask.
using Apply = void (*)(void* const* lanes, unsigned mask);

struct Launch {
    void (*entry)(void** parameters);
    void** parameters;
    void* (*static_shared)();  // any address inside the calling OS thread's static shared memory; see module_shared
    long long static_offset;   // from the start of the static shared memory to that address
    long long static_bytes;
    unsigned grid[3], block[3];
    unsigned dynamic_bytes;
    unsigned checks;          // 1: race
    unsigned long long seed;  // 0: threads run in index order; else a random order drawn from it
    int workers;
    char* report;  // receives what went wrong, in words
    int report_bytes;
};

enum Outcome { ok = 0, fault = 1, race = 2, interrupted = 3 };

}  // namespace fa_host

extern "C" {

// initial-exec: the variable lives in the engine, so no kernel library needs static TLS of its own for it.
extern __thread fa_host::Self* fa_host_self __attribute__((tls_model("initial-exec")));

// All threads of the block meet (barrier 0).
void fa_host_syncthreads(const char* file, int line);

// The lanes of mask meet; the last to come runs apply over what all of them brought. Without apply it orders memory (__syncwarp).
void fa_host_warp(unsigned mask, fa_host::Apply apply, void* mine, const char* word, const char* file, int line);

float fa_host_atomic_add_f32(float* address, float value);
double fa_host_atomic_add_f64(double* address, double value);
int fa_host_atomic_add_i32(int* address, int value);
int fa_host_atomic_exchange_i32(int* address, int value);
int fa_host_atomic_compare_exchange_i32(int* address, int compare, int value);
int fa_host_atomic_max_i32(int* address, int value);

// Asynchronous copies to shared memory (async.hpp). The first `bytes` of the 16 at `value` have been read `from` memory, the rest are zero.
void fa_host_cp_async(char* to, const void* from, int bytes, const void* value, const char* file, int line);
void fa_host_cp_async_commit();
void fa_host_cp_async_wait(int but);

// For the race check: the address of the caller's code, and an access to shared memory that a word makes for a lane of this warp.
void* fa_host_code();
void fa_host_access(int lane, const void* address, int bytes, int writes, void* code);

// Stops the block: a word's address is outside of dynamic shared memory, or not aligned.
void fa_host_bad_shared(const char* word, unsigned address, unsigned bytes, unsigned alignment, const char* file, int line);

// Stops the block with a message (a word's own check failed).
void fa_host_fail(const char* what, const char* file, int line);

int fa_host_run(const fa_host::Launch* launch);
int fa_host_module_shared(void* (*static_shared)(), long long* offset, long long* bytes);
int fa_host_version();
}
