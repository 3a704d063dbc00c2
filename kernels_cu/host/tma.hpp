// What a word of TMA is given is checked here before a copy begins (async.hpp).
#pragma once

#include "async.hpp"
#include "block.hpp"
#include "report.hpp"
#include "tensor_map.hpp"

namespace fa_host {

[[noreturn]] static inline void tma_fault(Worker& w, const char* what, const char* word, const char* file, int line) {
    begin_report(w, what);
    print(": thread %d in %s at %s:%d\n", w.current, word, file, line);
    end_report(w);
    __builtin_unreachable();
}

static inline const TensorMap& checked_map(Worker& w, const void* given, const void* smem, int rank, const char* word, const char* file,
                                           int line) {
    auto& map = *static_cast<const TensorMap*>(given);
    if (map.magic != TensorMap::written) tma_fault(w, "no tensor map: the header's [tensor_map.NAME] makes one", word, file, line);
    if (int(map.rank) != rank) tma_fault(w, "a tensor map of another rank than the word", word, file, line);
    const char* at = static_cast<const char*>(smem);
    const long long byte = at - w.arena;
    if (byte < 0 || byte + map.box_bytes() > w.launch->dynamic_bytes) tma_fault(w, "a box outside dynamic shared memory", word, file, line);
    if (byte % (map.swizzle ? 8 * map.swizzle : 128)) {
        begin_report(w, "a box not aligned in shared memory");
        print(": thread %d in %s at %s:%d, byte %lld is no multiple of %u\n", w.current, word, file, line, byte,
              map.swizzle ? 8 * map.swizzle : 128);
        end_report(w);
    }
    if (map.swizzle && map.row_bytes() != map.swizzle)
        tma_fault(w, "a swizzled box whose rows are shorter than the swizzle: the CPU engine has no meaning for it", word, file, line);
    return map;
}

// The ISA knows no such rule; an H200 stops at such a load or store with an illegal instruction.
static inline void aligned_column(Worker& w, const TensorMap& map, int column, const char* word, const char* file, int line) {
    if (column * int(map.element_bytes) % 16)
        tma_fault(w, "an innermost coordinate that is no multiple of 16 bytes, at which an H200 stops with an illegal instruction", word,
                  file, line);
}

// The mbarrier of a block that is to count a copy's bytes: its number.
static inline int counting_mbarrier(Worker& w, const unsigned long long* at, void* code, const char* word, const char* file, int line) {
    const int number = mbarrier_at(w, at, code, word, file, line);
    if (!w.barrier[number].fenced)
        mbarrier_fault(w, "an mbarrier without mbarrier_init_fence after its initialisation", at, word, file, line);
    return number;
}

}  // namespace fa_host
