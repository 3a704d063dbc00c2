// The backward passes on Hopper that keep the keys of a block and stream tiles of queries (from hopper to hopper_cluster): what surrounds the products.
// There are three launches, and each may begin while the one before ends: what prepare writes is read behind dependency_wait.
//
//     prepare      delta and logsumexp of each tile of queries, side by side, so that one copy brings them; dQ = 0
//     gradients    persistent blocks, or clusters, take works: a tile of keys of one head, and the tiles of queries that see it
//     convert      dQ from the layout of the accumulators to rows, scaled and rounded
//
// Products of launch 2, and how dQ is added, are each kernel's own; hopper_cluster has barriers and a producer of its own, too. dQ of a tile of
// queries is a sum over tiles of keys. It is added in global memory in float32, in the layout of the accumulators of wgmma: parts of 64
// queries x 64 columns, of which each of 128 threads has 4 numbers of every 8 columns. So a warp adds 512 bytes side by side.
#pragma once

#include <fa/gradient.cuh>
#include <fa/overlap.cuh>
#include <fa/schedule.cuh>
#include <fa/seen_tiles.cuh>
#include <fa/sink.cuh>
#include <fa/stage.cuh>
#include <fa/tma.cuh>

namespace fa {

// A tile of keys of one head, and the tiles of queries that see it, or one of several splits of them.
struct Work {
    int k_first, kv_head, batch;
    int first, end, count;  // tiles of queries of each head; over how many of those of all heads of the group it walks
    int head, tile;  // where the walk begins
    int heads_end;  // with HeadsInner: the head behind the last of the walk
    int edge;  // the tile of queries at which the walk may meet the diagonal: its first; Backwards its last
#ifdef FA_WINDOW
    int tiles;  // of each head; without a window `end`
#endif
#ifdef FA_MASK
    int split;  // which of several
    const int* list;  // the tiles that see something (fa/seen_tiles.cuh), from the first of this walk on
#endif
};

// A walk over the tiles of queries of a work, head after head; Backwards from the end of each to the first. HeadsInner: through all its heads
// at a tile, then at the next.
template <bool Backwards, bool HeadsInner = false> struct Walk {
    int head, tile;
    __device__ __forceinline__ int queries(const Work& work) const { return Backwards ? work.end - 1 - tile + work.first : tile; }
    __device__ __forceinline__ int query_head(const Work&) const { return head; }
    __device__ __forceinline__ int sees(int) const { return sees_some; }  // a list knows more
    template <class Tiles> static __device__ __forceinline__ auto numbers(const Args& args, const Work& work) {
        return Tiles::template walk_numbers<Backwards>(args, work);
    }
    static __device__ __forceinline__ Walk begin(const Work& work) { return {work.head, work.tile}; }
    __device__ __forceinline__ void next(const Work& work) {
        if constexpr (HeadsInner) {
            if (++head == work.heads_end) head = work.head, ++tile;
        } else if (++tile == work.end) tile = work.first, ++head;
    }
};

// The same walk by the numbers of the tiles (below), where there are few registers.
template <bool Backwards> struct NumberWalk {
    int number, left;  // left: of the head
    __device__ __forceinline__ int number_of(const Args&, const Work&) const { return number; }
    __device__ __forceinline__ int next_turn() const { return 0; }  // without a list it is that of the next tile of keys
    static __device__ __forceinline__ int of_head(const Work& work) {
#ifdef FA_WINDOW
        return work.tiles;
#else
        return work.end;
#endif
    }
    __device__ __forceinline__ void next(const Work& work) {
        if (--left > 0) number += Backwards ? -1 : 1;
        else left = work.end - work.first, number += Backwards ? of_head(work) + left - 1 : of_head(work) - work.end + work.first + 1;
    }
};

// The walk of a kernel: with a mask over a list of what sees something.
template <bool Listed, bool Backwards, class Lists, bool HeadsInner> struct ChosenWalk {
    using type = Walk<Backwards, HeadsInner>;
};
template <bool Backwards, class Lists> struct ChosenWalk<true, Backwards, Lists, false> {
    using type = ListWalk<Lists>;
};
template <bool Backwards, class Lists, bool HeadsInner = false>
using WalkOf = typename ChosenWalk<has_mask, Backwards, Lists, HeadsInner>::type;

// What a producer copies to shared memory.
struct Maps {
    const TensorMap &q, &k, &v, &d_o, &stats;
};

// The barriers of a block: of KvStages tiles of K and V, of two tiles of Q and dO, of two consumers and their storers.
template <int KvStages> struct Barriers {
    uint64_t k_full[KvStages], v_full[KvStages], kv_empty[KvStages], dkv_full[KvStages][2];  // dkv_full: dK and dV lie there, of a consumer
    uint64_t q_full[2], q_empty[2], do_full[2];  // q_full: Q and the stats; q_empty: dO too
    uint64_t dq_full[2], dq_empty[2];  // of the consumers; what they say is each kernel's own
    int numbers[KvStages];  // the work whose K is there; -1: no more

    __device__ __forceinline__ void init() {
        for (int i = 0; i < KvStages; ++i) {
            mbarrier_init(k_full + i, 1), mbarrier_init(v_full + i, 1);
            mbarrier_init(kv_empty + i, 258);  // each storer arrives, and every thread of the consumers, which has read the number
            mbarrier_init(dkv_full[i], 4), mbarrier_init(dkv_full[i] + 1, 4);  // each warp
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(q_full + i, 1), mbarrier_init(do_full + i, 1);
            mbarrier_init(q_empty + i, 8);  // each warp of both
            mbarrier_init(dq_full + i, 4), mbarrier_init(dq_empty + i, 1);
        }
        mbarrier_init_fence();
    }
};

// Tiles of BlockQ queries (80: dQ is transposed), Width columns wide, and WidthV those of V and dO. Stats and Dq: the numbers of the workspaces
// that hold what belongs to each of them.
template <int BlockQ, int Width, int Stats, int Dq, int WidthV = Width> struct QueryTiles {
    static constexpr int row_parts = BlockQ / 64, slabs = (Width + 63) / 64, parts = row_parts * slabs, part = 64 * 64;
    static constexpr int slabs_v = (WidthV + 63) / 64, dq_part = BlockQ / row_parts * 64;
    static_assert((BlockQ % 64 == 0 || BlockQ == 80) && Width % 16 == 0,
                  "dQ lies in parts of 64 columns, the last slab's as wide as it is");
    static_assert(row_parts == 1 || Width % 64 == 0, "a narrower part has no other behind it");

    static __device__ __forceinline__ int of_head(const Args& args) { return (args.seq_q + BlockQ - 1) / BlockQ; }
    // The number of a tile among those of all heads.
    static __device__ __forceinline__ int number(const Args& args, int batch, int head, int tile) {
        return (batch * args.heads_q + head) * of_head(args) + tile;
    }
    template <bool Backwards> static __device__ __forceinline__ NumberWalk<Backwards> walk_numbers(const Args& args, const Work& work) {
        const Walk<Backwards> at = Walk<Backwards>::begin(work);
        return {number(args, work.batch, at.head, at.queries(work)), work.end - work.tile};
    }
    // log2(e) * logsumexp and delta of a tile: [2][BlockQ].
    static __device__ __forceinline__ float* stats(const Args& args, int number) {
        return static_cast<float*>(args.workspace[Stats]) + int64_t(number) * (2 * BlockQ);
    }
    // dQ of a tile in the layout of the accumulators: [parts][8 groups of 8 columns][128 threads][4]; the parts of a slab come first.
    static __device__ __forceinline__ float* dq(const Args& args, int number) {
        return static_cast<float*>(args.workspace[Dq]) + int64_t(number) * (BlockQ * Width);
    }

    // How many works there are: each tile of Keys keys is `splits` of them. whole: so many tiles, the first, are not divided; -1: all are.
    template <int Keys> static __device__ __forceinline__ int works(const Args& args, int splits = 1, int whole = -1) {
        const int tiles = (args.seq_kv + Keys - 1) / Keys * args.heads_kv * args.batch;
        return whole < 0 ? tiles * splits : whole + (tiles - whole) * splits;
    }
    // Sections of key heads; in a section the tiles that the most queries see first, over all its heads. The query heads that are read at
    // the same time, one of each key head and split, have at most `megabytes` MB of Q, dO and dQ. Blocks that take turns: so that neighbours of
    // one head do not begin at the same time.
    static __device__ __forceinline__ int section(const Args& args, int megabytes, int splits) {
        const int at_once = splits == 1 ? 1 : min(splits, args.heads_q / args.heads_kv);
        return max(1, min(args.heads_kv * args.batch, (megabytes << 20) / (384 * slabs + 128 * slabs_v) / args.seq_q / at_once));
    }
    // The work of a number, a tile of Keys keys. Neighbouring numbers run at the same time, so they share Q and dO, and add to dQ, in the
    // L2 cache. LastFirst: the last tiles of keys, which the fewest queries see, have the first numbers. splits: the tiles of queries of all
    // heads of the group, one after the other, are divided into so many ranges, of a tile more or less; all of one head are in a section.
    // Blocks that take turns: ranges of whole heads. Neighbours of one head would wait for the end of another's range, not for its tile. So
    // with HeadsInner (Walk): works that begin together are at the same queries.
    // Without a mask works are alike, and of a last round of blocks most may be idle. So only the tiles from `whole` on may be divided: the first
    // ranges of all of them, then the second, and so on.
    template <int Keys, bool LastFirst = false, bool Backwards = false, bool HeadsInner = false>
    static __device__ __forceinline__ Work work(const Args& args, int number, int megabytes, int splits = 1, int whole = -1) {
        const int k_tiles = (args.seq_kv + Keys - 1) / Keys, group = args.heads_q / args.heads_kv;
#if CAUSAL || DETERMINISTIC
        const Place place =
            place_in_sections(number, k_tiles, section(args, megabytes, splits) * splits, args.heads_kv * args.batch * splits);
        const int k_tile = LastFirst ? k_tiles - 1 - place.tile : place.tile, row = place.head;
#else
        int row = number / k_tiles, k_tile = number - row * k_tiles;
        if (whole >= 0 && number < whole) splits = 1;
        if (whole >= 0 && number >= whole) {
            const int divided = works<Keys>(args) - whole, split = (number - whole) / divided, tile = number - split * divided;
            k_tile = tile % k_tiles, row = tile / k_tiles * splits + split;
        }
#endif
        Work work;
        work.k_first = k_tile * Keys;
        const int kv_row = row / splits, split = row - kv_row * splits;
        work.batch = kv_row / args.heads_kv;
        work.kv_head = kv_row - work.batch * args.heads_kv;
        work.end = (query_end(args, min(work.k_first + Keys, args.seq_kv) - 1) + BlockQ - 1) / BlockQ;
        work.first = min(work.end, first_query(args, work.k_first) / BlockQ);
#ifdef FA_WINDOW
        work.tiles = of_head(args);
#endif
        const int tiles = work.end - work.first, head = work.kv_head * group;
        if (splits == 1) {
            work.count = tiles * group;
            work.head = head, work.tile = work.edge = work.first;
        } else {
            const int unit = DETERMINISTIC || HeadsInner ? tiles : 1, units = tiles * group / max(1, unit), divisor = max(1, tiles);
            const int begin = units * split / splits * unit, end = units * (split + 1) / splits * unit;
            work.count = end - begin;
            work.head = head + begin / divisor, work.tile = work.first + begin % divisor;
            work.edge = Backwards ? work.end - 1 - (end - 1) % divisor : work.tile;
        }
        if constexpr (HeadsInner) work.heads_end = work.head + work.count / max(1, tiles);
#ifdef FA_MASK
        work.split = split;
#endif
        return work;
    }

    // The number of the first split of a tile of keys; and how far the number of the next split is from it, and so on.
    template <int Keys, bool LastFirst>
    static __device__ __forceinline__ int first_number(const Args& args, int batch, int kv_head, int k_tile, int megabytes, int splits) {
        const int k_tiles = (args.seq_kv + Keys - 1) / Keys, row = (batch * args.heads_kv + kv_head) * splits;
#if CAUSAL || DETERMINISTIC
        const Place place = {LastFirst ? k_tiles - 1 - k_tile : k_tile, row};
        return number_in_sections(place, k_tiles, section(args, megabytes, splits) * splits, args.heads_kv * args.batch * splits);
#else
        return row * k_tiles + k_tile;
#endif
    }
    template <int Keys> static __device__ __forceinline__ int numbers_apart(const Args& args) {
        return CAUSAL || DETERMINISTIC ? 1 : (args.seq_kv + Keys - 1) / Keys;  // all of one head are in a section
    }

    // Where several splits make dK and dV of a tile of Keys keys, each leaves its sums here, in float32, in the order of the works' numbers.
    // As dQ they lie in the layout of the accumulators, dK first: [slabs + slabs_v][Keys / 64] parts. Partial: the number of that workspace.
    template <int Keys> static constexpr int partial_size = Keys * 64 * (slabs + slabs_v);
    template <int Keys, int Partial> static __device__ __forceinline__ float* partial(const Args& args, int number) {
        return static_cast<float*>(args.workspace[Partial]) + int64_t(number) * partial_size<Keys>;
    }
    // 64 rows of dK and dV, a consumer's, to every step-th of the parts from its first on. seen: whether a query sees any of the keys; where
    // none does, the registers hold anything. Two texts: a choice of each number would cost registers in the loop before.
    template <int Keys, int K, int V>
    static __device__ __forceinline__ void store_partials(float* partial, int first, int first_v, int step, const float (&dk)[K],
                                                          const float (&dv)[V], bool seen) {
        const float zeros[K] = {}, zeros_v[V] = {};
        float *dk_to = partial + first * part, *dv_to = partial + Keys * 64 * slabs + first_v * part;
        if (seen) store_parts(dk_to, step, dk), store_parts(dv_to, step, dv);
        else store_parts(dk_to, step, zeros), store_parts(dv_to, step, zeros_v);
    }
    template <int R> static __device__ __forceinline__ void store_parts(float* to, int step, const float (&x)[R]) {
#pragma unroll
        for (int j = 0; j < R / 4; ++j)
            store_vec(to + j / 8 * step * part + j % 8 * 512 + threadIdx.x % 128 * 4,
                      Vec<float, 4>{x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]});
    }

    // Adds a thread's numbers of some groups of 8 columns to dQ. to: where its first ones lie.
    template <int R> static __device__ __forceinline__ void add_groups(float* to, const float (&x)[R], int first = 0, int end = R / 4) {
#pragma unroll
        for (int j = first; j < end; ++j) red_add_v4_f32(to + j * 512, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }

    // Starts to copy a tile of Q, dO, K or V, whose slabs of 64 columns have Slab bytes; the barrier expects `more` bytes beside.
    template <uint32_t Slab, int Slabs>
    static __device__ __forceinline__ void load(unsigned char* tile_smem, const TensorMap& map, uint64_t* full, int row, int head,
                                                int batch, uint32_t more = 0) {
        mbarrier_arrive_expect_tx(full, Slabs * Slab + more);
        for (int slab = 0; slab < Slabs; ++slab) tma_load_4d(tile_smem + slab * Slab, &map, full, 64 * slab, row, head, batch);
    }

    // The producer, one thread of launch 2: takes works of Keys keys from two counters, copies their K and V, and the tiles of queries that
    // see them. smem: where to, [stages][slabs][rows][64], and the barriers. The next number is fetched when the last copies of a work are
    // on their way. The counter's answer takes a microsecond, in which the consumers have two tiles left. A block that took it with the
    // work's first tile would keep the next work waiting behind a long one. With DETERMINISTIC works begin in the order of their numbers.
    // OneV: there is one place for V, and a barrier that says when it is empty.
    template <int Keys, class Walk, int KvStages, bool OneV = false, class Shared, class WorkOf>
    static __device__ __forceinline__ void produce(const Args& args, const Maps& maps, const Shared& smem, int* counters, WorkOf work_of,
                                                   int splits = 1, int whole = -1) {
        constexpr uint32_t k_slab = Keys * 128, k_tile = slabs * k_slab, q_slab = BlockQ * 128, q_tile = slabs * q_slab;
        constexpr uint32_t v_tile = slabs_v * k_slab, do_tile = slabs_v * q_slab;
        Barriers<KvStages>& at = *smem.barriers;
        Ring<KvStages> kv;
        Ring<2> q;
        const int works = QueryTiles::works<Keys>(args, splits, whole);
        int number = DETERMINISTIC ? atomicAdd(counters, 1) : int(blockIdx.x);
        while (true) {
            mbarrier_wait_parity(at.kv_empty + kv.stage(), kv.parity() ^ 1);
            at.numbers[kv.stage()] = number < works ? number : -1;
            if (number >= works) break;
            const Work work = work_of(args, number);
            load<k_slab, slabs>(smem.k + kv.stage() * k_tile, maps.k, at.k_full + kv.stage(), work.k_first, work.kv_head, work.batch);
            if constexpr (OneV) mbarrier_wait_parity(smem.v_empty, kv.position % 2 ^ 1);
            load<k_slab, slabs_v>(smem.v + (OneV ? 0 : kv.stage()) * v_tile, maps.v, at.v_full + kv.stage(), work.k_first, work.kv_head,
                                  work.batch);
            kv.next();
            Walk walk = Walk::begin(work);
#pragma unroll 1  // the producer has few registers
            for (int n = 0; n < work.count; ++n, walk.next(work)) {
                const int tile = walk.queries(work), q_first = tile * BlockQ;
                mbarrier_wait_parity(at.q_empty + q.stage(), q.parity() ^ 1);
                load<q_slab, slabs>(smem.q + q.stage() * q_tile, maps.q, at.q_full + q.stage(), q_first, walk.query_head(work), work.batch,
                                    2 * BlockQ * 4);
                dependency_wait();  // for the stats. What others do with dQ comes behind them
                tma_load_4d(smem.stats + q.stage() * (2 * BlockQ * 4), &maps.stats, at.q_full + q.stage(), 0, tile, walk.query_head(work),
                            work.batch);
                load<q_slab, slabs_v>(smem.d_o + q.stage() * do_tile, maps.d_o, at.do_full + q.stage(), q_first, walk.query_head(work),
                                      work.batch);
                q.next();
            }
            number = (DETERMINISTIC ? 0 : int(gridDim.x)) + atomicAdd(counters, 1);
        }
        mbarrier_arrive(at.k_full + kv.stage());
        // The last block to finish leaves the counters as it found them, for the next launch.
        reset_by_last(counters, gridDim.x);
    }

    // Launch 1, 128 threads and 16 queries a block. delta[query] = dO · O - dlogsumexp, each row split over 8 lanes; logsumexp, with +inf
    // where P must be 0: for a query beyond seq_q, or one that sees no key and has -inf; dQ = 0.
    template <class T> static __device__ __forceinline__ void prepare(const Args& args) {
        launch_dependents();
        const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8, head = blockIdx.y, batch = blockIdx.z;
        const int tile = number(args, batch, head, query / BlockQ);
        float* zero = dq(args, tile) + blockIdx.x * 16 % BlockQ * Width;
        for (int i = 0; i < Width / 32; ++i) store_vec(zero + (i * 128 + threadIdx.x) * 4, Vec<float, 4>{});
        if (Width % 32 && threadIdx.x < 64) store_vec(zero + (Width / 32 * 128 + threadIdx.x) * 4, Vec<float, 4>{});

        const float delta = delta_of<T, WidthV>(args, batch, head, query, lane);
        if (lane == 0) {
            const float lse = query < args.seq_q ? *row_pointer<float>(args.logsumexp, batch, head, query) : -infinity();
            float* to = stats(args, tile) + query % BlockQ;
            to[0] = lse == -infinity() ? infinity() : lse * log2e;
            to[BlockQ] = delta;
        }
    }

    // The launch of a problem with sinks, behind all others. A block has a query head.
    static __device__ __forceinline__ void dsinks(const Args& args) {
        const int head = blockIdx.x;
        if constexpr (has_sinks)
            store_dsink<float>(args, head, [&](int batch, int query) {
                return stats(args, number(args, batch, head, query / BlockQ))[BlockQ + query % BlockQ];
            });
    }

    // Launch 3, 256 threads and a part of dQ a block: a thread reads the 4 lanes that hold 8 columns of two rows.
    template <class T> static __device__ __forceinline__ void convert(const Args& args) {
        dependency_wait();
        const int tile = blockIdx.x / parts, own = blockIdx.x % parts, head = blockIdx.y, batch = blockIdx.z;
        const int query = tile * BlockQ + own % row_parts * 64 + row_of_part(), chunk = own / row_parts * 8 + threadIdx.x % 8;
        if (Width % 64 && 8 * chunk >= Width) return;
        const float* from = dq(args, number(args, batch, head, tile)) + own * part + place_in_part();
        store_gradient_rows<T>(args.dQ, args.seq_q, args.head_dim, batch, head, query, chunk, from, float(args.scale));
    }
    // The same where dQ is transposed: the rows of a part are 64 columns of dQ.
    template <class T> static __device__ __forceinline__ void convert_transposed(const Args& args) {
        static_assert(row_parts == 1 && Width % 64 == 0, "a part is 64 columns of all queries of a tile");
        __shared__ float part_smem[BlockQ][64 + 4];  // without bank conflicts: 4 lanes have 8 rows, the others columns
        dependency_wait();
        const int tile = blockIdx.x / parts, own = blockIdx.x % parts, head = blockIdx.y, batch = blockIdx.z;
        const float* from = dq(args, number(args, batch, head, tile)) + own * dq_part;
        for (int i = threadIdx.x; i < dq_part / 4; i += 256) {
            const Vec<float, 4> four = load_vec<4>(from + 4 * i);
            const int query = i / 128 * 8 + i % 4 * 2, column = i / 32 % 4 * 16 + i % 32 / 4;
            for (int e = 0; e < 4; ++e) part_smem[query + e % 2][column + e / 2 * 8] = four[e];
        }
        __syncthreads();
        const int chunk = threadIdx.x % 8;
        for (int row = threadIdx.x / 8; row < min(BlockQ, args.seq_q - tile * BlockQ); row += 32) {
            Vec128<T> eight;
            for (int i = 0; i < 8; ++i) eight[i] = narrow<T>(part_smem[row][8 * chunk + i] * float(args.scale));
            auto* to = reinterpret_cast<Vec128<T>*>(row_pointer<T>(args.dQ, batch, head, tile * BlockQ + row)) + own * 8 + chunk;
            store_128_upto(reinterpret_cast<T*>(to), eight, args.head_dim - own * 64 - chunk * 8);
        }
    }
    // The same with splits. Behind dQ of all heads stand dK and dV of each key head, whose splits are added in their order; those of the first
    // `whole` tiles are there.
    template <class T, int Keys, bool LastFirst, bool Split, int Partial, bool Transposed = false>
    static __device__ __forceinline__ void convert(const Args& args, int megabytes, int splits, int whole = -1) {
        if constexpr (Split) {
            const int other = int(blockIdx.y) - args.heads_q;
            if (other >= 0) return add_splits<T, Keys, LastFirst, Partial>(args, other / 2, other % 2, megabytes, splits, whole);
            if (int(blockIdx.x) >= of_head(args) * parts) return;  // there are more keys
        }
        if constexpr (Transposed) convert_transposed<T>(args);
        else convert<T>(args);
    }
    template <class T, int Keys, bool LastFirst, int Partial>
    static __device__ __forceinline__ void add_splits(const Args& args, int kv_head, bool is_dv, int megabytes, int splits, int whole) {
        dependency_wait();
        constexpr int key_parts = Keys / 64, all = key_parts * slabs;
        const int its = slabs == slabs_v || !is_dv ? all : key_parts * slabs_v;  // parts of a tile
        const int tile = blockIdx.x / its, own = blockIdx.x % its, batch = blockIdx.z;
        const int key = tile * Keys + own % key_parts * 64 + row_of_part(), chunk = own / key_parts * 8 + threadIdx.x % 8;
        if (key >= args.seq_kv || ((Width % 64 || WidthV % 64) && 8 * chunk >= (is_dv ? WidthV : Width))) return;
        const int number = whole < 0 ? first_number<Keys, LastFirst>(args, batch, kv_head, tile, megabytes, splits)
                                     : (batch * args.heads_kv + kv_head) * ((args.seq_kv + Keys - 1) / Keys) + tile - whole;
        if (whole >= 0 && number < 0) return;  // it is not divided
        const int apart = whole < 0 ? numbers_apart<Keys>(args) : works<Keys>(args) - whole;
        const float* from = partial<Keys, Partial>(args, number) + ((is_dv ? all : 0) + own) * part + place_in_part();
        store_gradient_rows<T>(is_dv ? args.dV : args.dK, args.seq_kv, is_dv ? head_dim_v(args) : args.head_dim, batch, kv_head, key, chunk,
                               from, is_dv ? 1.0f : float(args.scale), splits, int64_t(apart) * partial_size<Keys>);
    }
    // The first row of a thread of launch 3 in a part; where its numbers begin there.
    static __device__ __forceinline__ int row_of_part() { return threadIdx.x / 64 * 16 + threadIdx.x / 8 % 8; }
    static __device__ __forceinline__ int place_in_part() {
        return (threadIdx.x % 8 * 128 + threadIdx.x / 64 * 32 + threadIdx.x / 8 % 8 * 4) * 4;
    }
};

}  // namespace fa
