// The tiles of keys that a tile of queries sees, where a problem has a mask or a score of its own: a launch before that of the forward
// pass lists them, and the roles of a block walk over the same list. What sees nothing is then nobody's: no copy, no product, no barrier.
//
//     list     of a tile of queries: how many entries, the entries
//     entry    a tile of keys; for each consumer what its 64 queries see of it (fa::Sees), whether it is their first and whether their last;
//              whether it is the last of all
//     order    the tiles of queries by the length of their lists, the longest first
//
// Entries are in the order of the work: from the tile of the last query's own key down to the first tile, then the rest from the last one
// down. The first tile gives the reference of the softmax. At the diagonal are the largest scores where they fall with distance (ALiBi),
// and most rows see a key there where the mask is a window.
#pragma once

#include <fa/score.cuh>
#include <fa/warp.cuh>

namespace fa {

// Lists for tiles of BlockQ queries and of BlockK keys, in the workspace Space, of at most 8 GB. OfBatch, OfHead: there is one for each
// batch, and for each head.
template <int BlockQ, int BlockK, bool OfBatch, bool OfHead, int Space> struct KeyLists {
    static constexpr int parts = BlockQ / 64, bits = 4 * parts + 1;

    static __device__ __forceinline__ int q_tiles(const Args& args) { return (args.seq_q + BlockQ - 1) / BlockQ; }
    static __device__ __forceinline__ int k_tiles(const Args& args) { return (args.seq_kv + BlockK - 1) / BlockK; }
    static __device__ __forceinline__ int row(const Args& args, int batch, int head) {
        return (OfBatch ? batch : 0) * (OfHead ? args.heads_q : 1) + (OfHead ? head : 0);
    }
    // In the workspace: of each row the blocks that have listed, and the order; then the lists. Numbers of integers of it.
    static __device__ __forceinline__ int* all(const Args& args) { return static_cast<int*>(args.workspace[Space]); }
    static __device__ __forceinline__ uint32_t order(const Args& args, int row) { return uint32_t(row) * uint32_t(1 + q_tiles(args)) + 1; }
    static __device__ __forceinline__ uint32_t list(const Args& args, int row, int q_tile) {
        const int rows = (OfBatch ? args.batch : 1) * (OfHead ? args.heads_q : 1);
        return order(args, rows) - 1 + (uint32_t(row) * uint32_t(q_tiles(args)) + q_tile) * uint32_t(1 + k_tiles(args));
    }
    // The first entry of the list of the tile of queries at a place of the order, how many there are, and the tile's first query. The
    // place is that of the tile which `query` begins: the last tiles have the first places, as under the causal mask.
    static __device__ __forceinline__ uint32_t of_place(const Args& args, int batch, int head, int& query, int& count) {
        const int its_row = row(args, batch, head), q_tile = all(args)[order(args, its_row) + q_tiles(args) - 1 - query / BlockQ];
        const uint32_t its_list = list(args, its_row, q_tile);
        query = q_tile * BlockQ, count = all(args)[its_list];
        return its_list + 1;
    }
    static __device__ __forceinline__ int tile_of(int entry) { return entry >> bits; }
    static __device__ __forceinline__ int sees_of(int entry, int part) { return entry >> 4 * part & 3; }
    static __device__ __forceinline__ bool begins(int entry, int part) { return entry >> 4 * part & 4; }
    static __device__ __forceinline__ bool ends(int entry, int part) { return entry >> 4 * part & 8; }
    static __device__ __forceinline__ bool ends(int entry) { return entry >> 4 * parts & 1; }

    // -- the launch that lists: blocks of 128 threads, a warp for each list; blockIdx is (x, row) -----------------------

    struct Tiles {
        const Args& args;
        int batch, head, query, own, count;

        // The tile at a place of the order.
        __device__ __forceinline__ int at(int place) const { return own < place ? own - place + count : own - place; }
        __device__ __forceinline__ int entry(int place) const {
            if (place >= count) return 0;
            int seen = 0;
#pragma unroll
            for (int part = 0; part < parts; ++part)
                seen |= fa::sees_of(args, batch, head, query + 64 * part, 64, at(place) * BlockK, BlockK) << 4 * part;
            return at(place) << bits | seen;
        }
    };

    static __device__ __forceinline__ void make(const Args& args) {
        const int row = blockIdx.y, heads = OfHead ? args.heads_q : 1, q_tile = blockIdx.x * 4 + threadIdx.x / 32;
        if (q_tile < q_tiles(args)) make_list(args, row, row / heads, row % heads, q_tile);
        __syncthreads();
        __shared__ int listed;
        if (threadIdx.x == 0) {
            __threadfence();
            int* blocks = all(args) + order(args, row) - 1;
            listed = atomicAdd(blocks, 1);
            if (listed == int(gridDim.x) - 1) *blocks = 0;  // for the next launch
            __threadfence();
        }
        __syncthreads();
        if (listed == int(gridDim.x) - 1) sort(args, row);
    }
    static __device__ __forceinline__ void make_list(const Args& args, int row, int batch, int head, int q_tile) {
        const int query = q_tile * BlockQ, end = min(query + BlockQ, args.seq_q), lane = threadIdx.x % 32;
        const int seen = max(1, (visible_keys(args, end - 1) + BlockK - 1) / BlockK);
        const Tiles tiles{args, batch, head, query, min(max(0, end - 1 + args.seq_kv - args.seq_q) / BlockK, seen - 1), seen};
        int* to = all(args) + list(args, row, q_tile);
        int found = 0, first[parts], last[parts];  // numbers of entries
#pragma unroll
        for (int part = 0; part < parts; ++part) first[part] = -1, last[part] = 0;
        for (int place = 0; place < seen; place += 32) {
            const int own = tiles.entry(place + lane);
            const unsigned seeing = __ballot_sync(full_warp, own & ((1 << bits) - 1));
            if (seeing >> lane & 1) to[1 + found + __popc(seeing & ((1u << lane) - 1))] = own;
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                const unsigned its = __ballot_sync(full_warp, sees_of(own, part));
                if (its && first[part] < 0) first[part] = found + __popc(seeing & ((its & -its) - 1));
                if (its) last[part] = found + __popc(seeing & (0xffffffffu >> __clz(int(its)))) - 1;
            }
            found += __popc(seeing);
        }
        __syncwarp();
        if (lane > 0) return;
        // Queries that see no key have one tile, the first, which is masked whole: so every work has the same course.
        if (found == 0) to[1] = tiles.at(0) << bits, found = 1;
        to[0] = found, to[found] |= 1 << 4 * parts;
#pragma unroll
        for (int part = 0; part < parts; ++part)
            if (query + 64 * part < args.seq_q) to[1 + max(0, first[part])] |= 4 << 4 * part, to[1 + last[part]] |= 8 << 4 * part;
    }
    // Of equally long ones the last comes first.
    static __device__ __forceinline__ void sort(const Args& args, int row) {
        const int tiles = q_tiles(args);
        for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
            const int count = all(args)[list(args, row, tile)];
            int before = 0;
            for (int other = 0; other < tiles; ++other) {
                const int its = all(args)[list(args, row, other)];
                before += its > count || (its == count && other > tile);
            }
            all(args)[order(args, row) + before] = tile;
        }
    }
};

}  // namespace fa
