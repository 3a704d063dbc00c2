// What kernels print (printf): kept until the launch ends, then written to standard error in the order of blocks and, of each, of threads.
// Standard output has the results. As on a GPU, whose buffer has 1 MB, more than that in a launch is left out, and it is said.
#pragma once

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "block.hpp"

namespace fa_host {

struct Printed {
    uint64_t block;
    unsigned thread, number;  // number: of this launch
    int bytes;
    char* text;
};
constexpr size_t most_printed = 1 << 20;
static Printed* printed;
static unsigned prints, room_for_prints, prints_left_out;
static size_t printed_bytes;
static pthread_mutex_t print_lock = PTHREAD_MUTEX_INITIALIZER;

// Keeps a text of the running thread. The text is malloc's, and freed here or where it is written.
static inline void keep_printed(char* text, int bytes) {
    const Self& self = *fa_host_self;
    uint64_t block = self.block_idx.x + uint64_t(self.grid_dim.x) * (self.block_idx.y + uint64_t(self.grid_dim.y) * self.block_idx.z);
    unsigned thread = self.thread_idx.x + self.block_dim.x * (self.thread_idx.y + self.block_dim.y * self.thread_idx.z);
    pthread_mutex_lock(&print_lock);
    if (prints == room_for_prints) {
        unsigned room = room_for_prints ? 2 * room_for_prints : 256;
        if (auto* more = static_cast<Printed*>(realloc(printed, room * sizeof(Printed)))) printed = more, room_for_prints = room;
    }
    bool kept = prints < room_for_prints && printed_bytes + size_t(bytes) <= most_printed;
    if (kept) {
        printed[prints] = Printed{block, thread, prints, bytes, text};
        printed_bytes += size_t(bytes);
        ++prints;
    } else {
        ++prints_left_out;
    }
    pthread_mutex_unlock(&print_lock);
    if (!kept) free(text);
}

// At the end of a launch, when no thread runs.
static inline void write_printed() {
    if (!prints && !prints_left_out) return;
    qsort(printed, prints, sizeof(Printed), [](const void* a, const void* b) {
        auto &one = *static_cast<const Printed*>(a), &other = *static_cast<const Printed*>(b);
        if (one.block != other.block) return one.block < other.block ? -1 : 1;
        if (one.thread != other.thread) return one.thread < other.thread ? -1 : 1;
        return one.number < other.number ? -1 : 1;
    });
    for (unsigned i = 0; i < prints; ++i) {
        fwrite(printed[i].text, 1, size_t(printed[i].bytes), stderr);
        free(printed[i].text);
    }
    if (prints_left_out) fprintf(stderr, "(%u texts more were printed: a launch keeps %zu bytes)\n", prints_left_out, most_printed);
    fflush(stderr);
    prints = prints_left_out = 0;
    printed_bytes = 0;
}

}  // namespace fa_host
