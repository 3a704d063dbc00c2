// A paged cache (--page-size): rows of K and V lie in pages of FA_PAGE_SIZE keys, anywhere in a pool (PagedAttention, Kwon et al. 2023). K and
// V are then (pages, heads_kv, FA_PAGE_SIZE, head_dim), so that the batch stride goes from page to page. block_table, (batch, pages of the
// longest), has the pages of each sequence in order, and cache_seqlens, (batch), its keys: int32 each, and seq_kv of fa::Args is the most that a
// sequence may have. The harness defines FA_PAGE_SIZE, FA_BLOCK_TABLE and FA_CACHE_SEQLENS, the indices of both in fa::Args::workspace;
// without pages every word here is that of a cache in one piece.
#pragma once

#include <fa/warp.cuh>

namespace fa {

#ifdef FA_PAGE_SIZE
constexpr bool has_pages = true;
constexpr int page_size = FA_PAGE_SIZE;
#else
constexpr bool has_pages = false;
constexpr int page_size = 0;
#define FA_BLOCK_TABLE 0
#define FA_CACHE_SEQLENS 0
#endif

// The keys of a sequence, at most seq_kv.
__device__ __forceinline__ int keys_of(const Args& args, int batch) {
    if constexpr (has_pages) return max(0, min(static_cast<const int*>(args.workspace[FA_CACHE_SEQLENS])[batch], args.seq_kv));
    else return args.seq_kv;
}

// The arguments with seq_kv and causal_shift of one sequence, for all words that speak of keys: its last query is at its last key.
__device__ __forceinline__ Args of_sequence(const Args& args, int batch) {
    Args own = args;
    if constexpr (has_pages) {
        own.seq_kv = keys_of(args, batch);
        own.causal_shift = args.causal_shift + own.seq_kv - args.seq_kv;
    }
    return own;
}

// The row of `key` of a sequence's K or V, from which the rest of its page follows, `row` elements each. args: of all sequences. The table is
// read only where the sequence has the key.
template <class T>
__device__ __forceinline__ const T* key_row(const Tensor& tensor, const Args& args, int batch, int head, int key, int seq_kv) {
    if constexpr (has_pages) {
        constexpr int size = has_pages ? page_size : 1;  // an editor compiles this branch without pages too
        const int columns = (args.seq_kv + size - 1) / size;
        const int* pages = static_cast<const int*>(args.workspace[FA_BLOCK_TABLE]) + int64_t(batch) * columns;
        return row_pointer<const T>(tensor, key < seq_kv ? pages[key / size] : 0, head, key % size);
    } else return row_pointer<const T>(tensor, batch, head, key);
}

// Which keys a block has, where `slots` blocks divide those of all sequences: part `part` of `parts` of a sequence's, and the slot of its
// first part. batch is -1: none.
struct Share {
    int batch, part, parts, first;
};

// Slots for each sequence, as many for one as for another: where they have as many keys.
__device__ __forceinline__ Share even_share(int slots_each, int slot) {
    return {slot / slots_each, slot % slots_each, slots_each, slot / slots_each * slots_each};
}

// The slots go to sequences by their keys: a part has at most so many tiles of Keys keys that all parts have a slot, and each sequence has one
// at least. slots >= batch; `slot` is that of the block, or with of_slot = false a sequence, whose first part it is then. By whole warps, each
// of which reads all lengths. A launch does not depend on them, so they may change between replays of a graph.
template <int Keys> __device__ __forceinline__ Share share_of(const Args& args, int slots, int slot, bool of_slot = true) {
    const auto beyond_first = [&](int batch) { return batch < args.batch ? max(0, (keys_of(args, batch) - 1) / Keys) : 0; };  // tiles
    int all = 0;
#pragma unroll 1
    for (int batch = lane_id(); batch < args.batch; batch += 32) all += beyond_first(batch);
    const int most = group_sum<32>(all) / (slots - args.batch + 1) + 1;  // sum of floor(beyond_first / most) <= slots - batch
    int before = 0;  // parts of the sequences before
#pragma unroll 1
    for (int batch = lane_id(); batch - lane_id() < args.batch; batch += 32) {
        const int parts = batch < args.batch ? beyond_first(batch) / most + 1 : 0;
        int end = parts;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int lower = __shfl_up_sync(full_warp, end, step);
            if (lane_id() >= step) end += lower;
        }
        const bool found = parts > 0 && (of_slot ? slot < before + end : slot == batch);
        if (const unsigned lanes = __ballot_sync(full_warp, found)) {
            const int lane = __ffs(int(lanes)) - 1;
            const int its = __shfl_sync(full_warp, parts, lane), first = before + __shfl_sync(full_warp, end, lane) - its;
            return {batch - lane_id() + lane, of_slot ? slot - first : 0, its, first};
        }
        before += __shfl_sync(full_warp, end, 31);
    }
    return {-1, 0, 0, 0};
}

}  // namespace fa
