// The forward passes on Hopper, which keep a tile of queries and stream the tiles of keys that it sees (from wgmma_tma to hopper, and split_hopper): whose
// queries.
#pragma once

#include <fa/schedule.cuh>
#include <fa/score.cuh>

namespace fa {

// Tiles of BlockQ queries, of Heads query heads that read one key head, and of BlockK keys.
template <int BlockQ, int BlockK, int Heads = 1> struct KeyTiles {
    static constexpr int queries = BlockQ;
    // A tile of queries of one head, or of Heads from this one on, and how many tiles of keys its queries see.
    struct Work {
        int q_first, head, batch, tiles;
    };

    // Tiles of keys that the queries before q_end see. One where they see none: such a tile is masked whole, and every work has the same
    // course.
    static __device__ __forceinline__ int seen(const Args& args, int q_end) {
        const int keys = visible_keys(args, min(q_end, args.seq_q) - 1);  // what the last query sees
        return max(1, (keys + BlockK - 1) / BlockK);
    }

    // The work of a block of a grid of (tiles of queries, heads, batch). Under the causal mask the last tiles see the most keys: they start
    // first, short ones fill the end.
    static __device__ __forceinline__ Work of_block(const Args& args) {
        const int q_first = int(CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BlockQ;
        return {q_first, int(blockIdx.y), int(blockIdx.z), seen(args, q_first + BlockQ)};
    }

    // The first tile of keys that the queries from q_first on see: without a window the first of all.
    static __device__ __forceinline__ int first_tile(const Args& args, int q_first) { return first_key(args, q_first) / BlockK; }

    static __device__ __forceinline__ int works(const Args& args) {
        return (args.seq_q + BlockQ - 1) / BlockQ * (args.heads_q / Heads) * args.batch;
    }

    // The work of a number from 0 to works(). Neighbouring numbers run at the same time, so they share K and V in the L2 cache. Under the
    // causal mask, and under a problem's own, for most are causal too: sections of heads with at most `section` MB of K and V, KeyBytes a key; in a section the tiles that see the most keys
    // first, over all its heads.
    template <int KeyBytes> static __device__ __forceinline__ Work of_number(const Args& args, int number, int section) {
        const int q_tiles = (args.seq_q + BlockQ - 1) / BlockQ;
        Work work;
#if CAUSAL || defined(FA_MASK)
        const int kv_heads = max(1, min(args.heads_kv * args.batch, int((int64_t(section) << 20) / (int64_t(KeyBytes) * args.seq_kv))));
        const int heads = kv_heads * (args.heads_q / Heads / args.heads_kv);
        const Place place = place_in_sections(number, q_tiles, heads, args.heads_q / Heads * args.batch);
        const int q_tile = q_tiles - 1 - place.tile, row = place.head;
#else
        const int row = number / q_tiles, q_tile = number - row * q_tiles;
#endif
        work.q_first = q_tile * BlockQ;
        work.batch = row / (args.heads_q / Heads);
        work.head = (row - work.batch * (args.heads_q / Heads)) * Heads;
        work.tiles = seen(args, work.q_first + BlockQ) - first_tile(args, work.q_first);
        return work;
    }
};

}  // namespace fa
