// dQ in a Hopper kernel whose blocks keep keys. Many blocks add to a tile of it, in float and in the layout of the accumulators:
// [Width / 64][BlockQ / 64] parts of 64 x 64, each [8 chunks of 8 columns][128 threads][4]. The last of them converts it: scales, rounds and
// brings it into rows, while it still lies in L2; a launch behind would read all of it from memory. The converters are warps that the kernel
// has left, of 24 registers each, and nobody waits for them.
#pragma once

#include <fa/barrier.cuh>
#include <fa/gradient.cuh>

namespace fa {

// How many tiles of keys add to dQ of a tile of queries: those whose first key the last of these queries sees, and that is asked of the last
// one of a whole tile, as who walks over tiles from first_query(key) / BlockQ on does it.
template <int BlockQ, int BlockK> __device__ __forceinline__ int tiles_of_keys(const Args& args, int tile) {
    return (max(0, visible_keys(args, tile * BlockQ + BlockQ - 1)) + BlockK - 1) / BlockK;
}

// dQ = 0 of a query below seq_q: by the 8 neighbouring lanes that share the row.
template <class T> __device__ __forceinline__ void store_zero_row(const Args& args, int batch, int head, int query, int lane) {
    if (query >= args.seq_q) return;
    for (int column = lane * vec_width<T>; column < args.head_dim; column += 8 * vec_width<T>)
        store_128_upto(row_pointer<T>(args.dQ, batch, head, query) + column, Vec128<T>{}, args.head_dim - column);
}

// The launch before, for 16 queries a block of 128 threads. Returns the number of their tile, and leaves of it
//
//     stats      [2][BlockQ]: log2(e) * logsumexp, with +inf where P must be 0: for a query beyond seq_q, or one that sees no key and has
//                -inf; delta[query] = dO · O, each row split over 8 lanes
//     dq         [Width * BlockQ] = 0, where Clear; where no tile of keys adds to it, dQ itself
//     arrivals   [2] = 0, of each converter
template <class T, int Width, int BlockQ, int BlockK, bool Clear = true>
__device__ __forceinline__ int prepare_queries(const Args& args, float* stats, float* dq, int* arrivals) {
    const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8, head = blockIdx.y, batch = blockIdx.z;
    const int tiles = (args.seq_q + BlockQ - 1) / BlockQ, number = (batch * args.heads_q + head) * tiles + query / BlockQ;
    dq += int64_t(number) * (Width * BlockQ) + blockIdx.x * 16 % BlockQ * Width;
    for (int i = 0; Clear && i < Width / 32; ++i) store_vec(dq + (i * 128 + threadIdx.x) * 4, Vec<float, 4>{});
    if (tiles_of_keys<BlockQ, BlockK>(args, query / BlockQ) == 0) store_zero_row<T>(args, batch, head, query, lane);
    if (blockIdx.x * 16 % BlockQ == 0 && threadIdx.x < 2) arrivals[2 * number + threadIdx.x] = 0;

    const float delta = delta_of<T, Width>(args, batch, head, query, lane);
    if (lane == 0) {
        const float lse = query < args.seq_q ? *row_pointer<float>(args.logsumexp, batch, head, query) : -infinity();
        stats += int64_t(number) * (2 * BlockQ) + query % BlockQ;
        stats[0] = lse == -infinity() ? infinity() : lse * log2e;
        stats[BlockQ] = delta;
    }
    return number;
}

// 64 rows of dQ from a query on and 64 columns, from the chunk-th 8 on, scaled and rounded: by one warp, from the accumulators of a product
// of 64 x 64, [8 chunks][128 threads][4]. For a warp with 24 registers, which waits for L2 most of the time. A lane reads 64 bytes, 8 columns
// of two rows that are 8 apart, and has room for one row: the other row's come from L1, where the same sectors are by then.
template <class T>
__device__ __forceinline__ void convert_dq(const Args& args, int batch, int head, int query, int chunk, const float* from, float scale) {
    const int lane = opaque_thread_id() % 32;
    chunk += lane % 8, query += lane / 8;
    from += lane % 8 * 512 + lane / 8 * 16;
    auto* to = reinterpret_cast<Vec128<T>*>(row_pointer<T>(args.dQ, batch, head, query)) +
               chunk;  // counted in vectors, or the compiler splits the stores
#pragma unroll 1
    for (int step = 0; step < 16; ++step) {  // rows 0, 8, 4, 12 of 16
        Vec<float, 2> dq[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) dq[i] = load_vec<2>(from + 4 * i);
        Vec<uint32_t, 4> rounded;
#pragma unroll
        for (int i = 0; i < 4; ++i) rounded[i] = pack<T>(dq[i][0] * scale, dq[i][1] * scale);
        const int valid = query < args.seq_q ? args.head_dim - chunk * 8 : 0;
        if (valid >= 8) store_vec(reinterpret_cast<uint32_t*>(to), rounded);
        else
#pragma unroll
            for (int i = 0; i < 7; ++i)
                if (i < valid) reinterpret_cast<uint16_t*>(to)[i] = uint16_t(rounded[i / 2] >> i % 2 * 16);
        from += step % 2 ? 62 : 2;
        const int rows = step % 2 == 0 ? 8 : step % 4 == 1 ? -4 : 4;
        query += rows;
        to = reinterpret_cast<Vec128<T>*>(reinterpret_cast<T*>(to) + rows * args.dQ.row);
    }
}

// The tiles whose dQ a block adds, on the way from its producer to its converters: a ring in shared memory. The producer pushes a tile before it
// loads it, and only where the converters have left a place: so who adds never waits for them. Arrivals: of those who add to what a converter
// converts, each behind its last addition.
template <int Converters, int Arrivals> struct SumQueue {
    static constexpr int depth = 8;
    uint64_t* barriers_smem;  // [Converters][depth] full, [depth] empty, [depth] numbers

    __device__ __forceinline__ uint64_t* full(int converter, uint32_t n) const { return barriers_smem + converter * depth + n % depth; }
    __device__ __forceinline__ uint64_t* empty(uint32_t n) const { return full(Converters, n); }
    __device__ __forceinline__ int* numbers() const { return reinterpret_cast<int*>(empty(0) + depth); }
    __device__ __forceinline__ int* end() const { return numbers() + depth; }

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < Converters * depth; ++i) mbarrier_init(barriers_smem + i, Arrivals);
        for (int i = 0; i < depth; ++i) mbarrier_init(empty(i), Converters);
    }
    // The n-th tile has this number. By the producer.
    __device__ __forceinline__ void push(uint32_t n, int number) const {
        mbarrier_wait_parity(empty(n), n / depth % 2 ^ 1);
        numbers()[n % depth] = number;
    }
    // There is no n-th tile.
    __device__ __forceinline__ void close(uint32_t n) const {
        push(n, -1);
        for (int i = 0; i < Converters * Arrivals; ++i) mbarrier_arrive(full(i / Arrivals, n));
    }
    // The number of the n-th tile, when this block has added to it; -1: there is none. By a converter, a whole warp.
    __device__ __forceinline__ int pop(int converter, uint32_t n) const {
        mbarrier_wait_parity(full(converter, n), n / depth % 2);
        const int number = __shfl_sync(full_warp, numbers()[n % depth], 0);
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(empty(n));
        return number;
    }
    // A converter's whole work, by a warp. arrivals: [tiles][2], dq: [tiles][Width * BlockQ], as prepare_queries leaves them.
    template <class T, int Width, int BlockQ, int BlockK>
    __device__ __forceinline__ void convert(const Args& args, int converter, int* arrivals, const float* dq) const {
        constexpr int parts = Width * BlockQ / 4096, own = parts / Converters, rows = BlockQ / 64;
        for (uint32_t n = 0;; ++n) {
            const int number = pop(converter, n);
            if (number < 0) break;
            const int tiles = (args.seq_q + BlockQ - 1) / BlockQ;
            if (!arrives_last(arrivals + 2 * number + converter, tiles_of_keys<BlockQ, BlockK>(args, number % tiles))) continue;
#pragma unroll 1
            for (int part = converter * own; part < (converter + 1) * own; ++part) {
                const int again = opaque(number), row = again / tiles, tile = again - row * tiles;  // each time: registers are few
                convert_dq<T>(args, row / args.heads_q, row % args.heads_q, tile * BlockQ + part % rows * 64, part / rows * 8,
                              dq + (int64_t(number) * parts + part) * 4096, float(args.scale));
            }
        }
    }
};

}  // namespace fa
