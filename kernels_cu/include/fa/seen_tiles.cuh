// The tiles of queries that see a tile of keys, where a problem has a mask: launch 1 of the backward passes from hopper on lists them, and
// the roles of a block of launch 2 walk over the same list. What sees nothing is then nobody's: no copy, no product, no barrier.
//
//     list        of a tile of keys and its key head: the number of entries, the entries, a 0
//     entry       a tile of queries, by its number among those of all heads of the group, and what it sees of each part of 64 keys: 2 bits
//     turn        with DETERMINISTIC beside each entry: the tile of keys that adds to these queries next
//
// A list has its end in front of it and a 0 behind, so that a walk may read the next entry before it knows whether there is one.
#pragma once

#include <fa/score.cuh>
#include <fa/warp.cuh>

namespace fa {

// A walk over a list; the interface is that of fa::Walk.
template <class Lists> struct ListWalk {
    const int* at;
    int entry;

    __device__ __forceinline__ unsigned number() const { return unsigned(entry) >> Lists::bits; }
    template <class Work> __device__ __forceinline__ int queries(const Work& work) const { return number() % unsigned(work.end); }
    template <class Work> __device__ __forceinline__ int query_head(const Work& work) const {
        return work.head + number() / unsigned(work.end);
    }
    // What they see of the keys of a part: Sees.
    __device__ __forceinline__ int sees(int of) const { return entry >> 2 * of & 3; }
    // With DETERMINISTIC: whose turn comes after this one.
    __device__ __forceinline__ int next_turn() const { return at[1]; }
    // Its number among the tiles of all heads.
    template <class Work> __device__ __forceinline__ int number_of(const Args& args, const Work& work) const {
        return (work.batch * args.heads_q + work.head) * work.end + number();
    }
    template <class Work> static __device__ __forceinline__ ListWalk begin(const Work& work) { return {work.list, *work.list}; }
    template <class, class Work> static __device__ __forceinline__ ListWalk numbers(const Args&, const Work& work) { return begin(work); }
    template <class Work> __device__ __forceinline__ void next(const Work&) {
        at += Lists::step;
        entry = *at;
    }
};

// Lists of tiles of BlockQ queries, for tiles of Keys keys. Backwards: the last entry first. LastFirst: in which order tiles of keys take
// turns, the last first. Space: the workspace of the turns; the lists follow them.
template <int BlockQ, int Keys, bool Backwards, bool LastFirst, int Space> struct SeenTiles {
    static constexpr int parts = Keys / 64, bits = 2 * parts, step = DETERMINISTIC ? 2 : 1;

    static __device__ __forceinline__ int of_head(const Args& args) { return (args.seq_q + BlockQ - 1) / BlockQ; }
    static __device__ __forceinline__ int key_tiles(const Args& args) { return (args.seq_kv + Keys - 1) / Keys; }
    static __device__ __forceinline__ int* list(const Args& args, int kv_row, int k_tile) {
        const int64_t turns = DETERMINISTIC ? int64_t(8) * args.batch * args.heads_q * of_head(args) : 4;
        const int64_t length = step * (args.heads_q / args.heads_kv * of_head(args) + 2);
        return static_cast<int*>(args.workspace[Space]) + turns + (int64_t(kv_row) * key_tiles(args) + k_tile) * length;
    }
    // A work, of one of several splits, becomes that of the tiles that are listed.
    template <class Work> static __device__ __forceinline__ void narrow(const Args& args, Work& work, int splits) {
        const int* all = list(args, work.batch * args.heads_kv + work.kv_head, work.k_first / Keys);
        const int begin = *all * work.split / splits;
        work.count = *all * (work.split + 1) / splits - begin;
        work.list = all + step * (begin + 1);
        work.head = work.kv_head * (args.heads_q / args.heads_kv);
        work.end = of_head(args);
    }

    // What a tile of queries sees of 64 keys. A score's text is for positions that exist: of a tile with others it is some of them.
    static __device__ __forceinline__ int sees(const Args& args, int batch, int head, int query, int key) {
        const int found = sees_of(args, batch, head, query, BlockQ, key, 64);
        return has_score && query + BlockQ > args.seq_q ? min(found, int(sees_some)) : found;
    }
    // The same of each part of a tile of keys, as the bits of an entry.
    static __device__ __forceinline__ int sees_parts(const Args& args, int batch, int head, int tile, int k_tile) {
        int found = 0;
        for (int part = 0; part < parts; ++part) found |= sees(args, batch, head, tile * BlockQ, k_tile * Keys + 64 * part) << 2 * part;
        return found;
    }
    // The next tile of keys behind one, in the order of the turns, of which a tile of queries sees something.
    static __device__ __forceinline__ int next_turn(const Args& args, int batch, int head, int tile, int k_tile) {
        do k_tile += LastFirst ? -1 : 1;
        while (k_tile >= 0 && k_tile < key_tiles(args) && !sees_parts(args, batch, head, tile, k_tile));
        return k_tile;
    }
    static __device__ __forceinline__ int first_turn(const Args& args, int batch, int head, int tile) {
        return next_turn(args, batch, head, tile, LastFirst ? key_tiles(args) : -1);
    }

    // Launch 1, by its blocks of 128 threads: each warp makes lists. blockIdx is (x, query head, batch).
    static __device__ __forceinline__ void make(const Args& args) {
        const int group = args.heads_q / args.heads_kv, kv_head = blockIdx.y / group, batch = blockIdx.z, lane = threadIdx.x % 32;
        const int all = group * of_head(args), warps = group * gridDim.x * 4;
        for (int k_tile = (blockIdx.y % group * gridDim.x + blockIdx.x) * 4 + threadIdx.x / 32; k_tile < key_tiles(args); k_tile += warps) {
            int* to = list(args, batch * args.heads_kv + kv_head, k_tile);
            int found = 0;
            for (int first = 0; first < all; first += 32) {
                const int i = Backwards ? all - 1 - first - lane : first + lane, head = kv_head * group + i / of_head(args);
                const int tile = i % of_head(args), seen = first + lane < all ? sees_parts(args, batch, head, tile, k_tile) : 0;
                const unsigned seeing = __ballot_sync(full_warp, seen != 0);
                int* own = to + step * (found + 1 + __popc(seeing & ((1u << lane) - 1)));
                if (seen) own[0] = i << bits | seen;
                if (DETERMINISTIC && seen) own[1] = next_turn(args, batch, head, tile, k_tile);
                found += __popc(seeing);
            }
            if (lane == 0) to[0] = found, to[step * (found + 1)] = 0;
        }
    }
};

}  // namespace fa
