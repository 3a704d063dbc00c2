// What warp-collective words are made of on the CPU: the scratch that the lanes of a warp share, and vectors as the processor has them.
#pragma once

#include <fa/types.cuh>

// For code that runs for all lanes at once: it reports its accesses to the race check lane by lane, not as the compiler sees them.
#define FA_HOST_COLLECTIVE __attribute__((no_sanitize("thread"))) inline void

namespace fa {

namespace host {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// The operands that lanes store before they synchronise and the results that they load after it, each in its own slots. No word's results
// share a slot with another's operands: lanes that continue store the next operands while others have not yet loaded the last results.
struct Collective {
    Words a[8];         // [column or pair of columns][row]
    uint32_t b[8][8];   // [row or pair of rows][column]
    Floats d[8];        // [column][row]
    uint32_t four[32][4];
    const char* row[32];
    void* code[32];
    uint64_t wmma_a[64], wmma_b[64];
    float wmma_d[64][4];
};
static_assert(sizeof(Collective) <= fa_host::scratch_bytes);

__forceinline__ Collective& collective(const char* file, int line) {
    if (!fa_host_self->scratch) fa_host_fail("a warp of fewer than 32 threads in a word that takes all of them", file, line);
    return *static_cast<Collective*>(fa_host_self->scratch);
}

}  // namespace host

}  // namespace fa
