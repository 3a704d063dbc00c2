// /// kernel
// title = "Hopper at head dim 256: clusters of two blocks that add dQ once for both"
// dtypes = ["float16", "bfloat16"]
// head_dims = [256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = false
// logsumexp_gradient = true
// auto = "head_dim > 128 and (seq_kv > 128 or not causal)"  # hopper_keys skips more: S128 7 % (mixed/costs.txt)
// arithmetic = "p16"
// spill_bytes_allowed = 16  # of the producer and the storers, which have 24 registers; none in a consumer's loop
// runtime = ["SPLITS", "SECTION"]
// [tile]
// BLOCK_Q = 64
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// SPLITS = 1  # of the queries of a tile of keys, where works are few: each is a work
// SPLIT = "SPLITS > 1"  # a form of its own: dK and dV leave as partial sums
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask
// [let]
// COLUMNS = "max(192, round_up(head_dim, 64))"  # of the head over which S and dP are computed; the rest are 0
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count: 4M -5 %, 34M +2 % (docs/notes/22_hopper.md)
// works = "ceil_div(seq_kv, 128) * heads_kv * batch"  # tiles of keys, one a cluster
// units = "max(1, sms // 2)"  # clusters that run at the same time
// most = "max(2 if long_walk else 1, rounds * units // works)"  # splits; more works were not measured
// rounds = "20 if long_walk else 8 if group >= 4 and causal else 4"
// long_walk = "causal and group >= 4 and group * seq_q >= 14000"  # the group's Q, dO and dQ leave L2 while one walk goes through them
// group = "heads_q // heads_kv"  # query heads of each
// section = "SECTION * 131072 // (HEAD_DIM * seq_q * min(SPLITS, group))"  # key heads at a time
// recorded = "works >= 15 * units and seq_kv >= 512 and not long_walk"  # as many works as its problems have
// tile_ns = "shared_ns + key_traffic(units, 128, section, SPLITS, 292, 392, spread_ns)"  # nanoseconds of a tile of the walk
// spread_ns = "60 if long_walk else 12"  # 60 is more than is lost, but chooses nearest to what hopper_backward/traffic.py simulates
// shared_ns = 2620  # where L2 has its queries
// work_ns = "7640 + split_ns"  # a work besides
// split_ns = "9110 if SPLITS > 1 else 0"  # more of a work that is one of several splits
// other_ns = "2590 + elements * 3780 // 1000000"  # the other launches
// elements = "batch * heads_q * seq_q * HEAD_DIM"  # of Q
// dq_parts = "BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)"  # of 64 x 64, of a head
// dk_parts = "HEAD_DIM // 32 * ceil_div(seq_kv, 128)"
// [[choice]]
// when = "recorded"
// SPLITS = 1
// SECTION = "8 if causal and seq_q <= 512 else 32"
// evidence = "experiments/mixed/cells.csv: S512 causal 8 MB 1.02 times as fast as 32, S1024 0.99, S2048 0.96, S8192 1.00"
// [[choice]]
// SPLITS = [1, "min(2, most)", "min(3, most)", "min(4, most)", "min(6, most)", "min(8, most)"]
// SECTION = [64, 8, 1024, "32 if long_walk or works >= 5 * units and seq_q <= 2048 else 64", "16 if long_walk else 64"]
// cost = "key_waves(units, 128, BLOCK_Q, section, SPLITS, tile_ns, work_ns) + other_ns"
// evidence = "experiments/mixed/costs.txt; long walks simulated, not measured: `traffic.py choices hopper_cluster`"
// [workspace.counters]
// dtype = "float32"  # two integers
// size = "2"
// init = "zero_once"
// [workspace.stats]
// dtype = "float32"
// size = "2 * batch * heads_q * round_up(seq_q, BLOCK_Q)"
// init = "none"
// [workspace.dq]
// dtype = "float32"
// size = "batch * heads_q * round_up(seq_q, BLOCK_Q) * HEAD_DIM"
// init = "none"
// [workspace.partial]
// dtype = "float32"
// size = "256 * works * SPLITS * HEAD_DIM if SPLIT else 4"
// init = "none"
// [tensor_map.q]
// tensor = "Q"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.d_o]
// tensor = "dO"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.stats]
// tensor = "stats"
// dims = ["2 * BLOCK_Q", "ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// strides = ["2 * BLOCK_Q", "2 * round_up(seq_q, BLOCK_Q)", "2 * round_up(seq_q, BLOCK_Q) * heads_q"]
// box = ["2 * BLOCK_Q", 1, 1, 1]
// [tensor_map.dk]
// tensor = "dK"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.dv]
// tensor = "dV"
// box = [64, 64, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "prepare"
// grid = ["round_up(seq_q, BLOCK_Q) // 16", "heads_q", "batch"]
// block = 128
// maps = []
// [[launch]]
// entry = "gradients"
// grid = "2 * min(sms // 2, works * SPLITS)"
// block = 384
// overlaps = "few_rows"
// cluster = 2
// shared = "384 * HEAD_DIM + 6 * BLOCK_Q * HEAD_DIM + 512 * BLOCK_Q + 16 * BLOCK_Q + 160"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// grid = ["max(dq_parts, dk_parts) if SPLIT else dq_parts", "heads_q + (2 * heads_kv if SPLIT else 0)", "batch"]
// block = 256
// maps = []
// ///
//
// Step 26, backward: hopper_keys's backward pass at head dim 256, in clusters of two blocks.
//
// What limits hopper_keys: dK and dV of 64 keys are all registers of its two consumers, so a block has 64 keys and not 128, and dQ of a
// tile of queries is added in global memory once for every 64 keys. That is twice as many reductions a FLOP as at head dim 128, and without
// any the kernel is half as fast again.
//
// What changes: two blocks of neighbouring keys form a cluster and stream the same tiles of queries. dQ of a tile is made by one of the
// two, in turn, over the keys of both, and added once: half of the reductions. For that the other sends it its dS^T, 8 KB, through
// distributed shared memory (a bulk copy), and both keep K of all 128 keys: each block loads its 64 for both (TMA multicast).
//
// What stays: the two consumers of a block share its 64 keys. Each makes the scores of half of the queries of a tile, and half of the
// columns of dV, dK and dQ. So P^T and dS^T go through shared memory in any case. A block's own tile is one whose dQ it makes, a sent tile
// one whose dS^T it sends away; they alternate. Tile n, as a consumer runs it; lines with (own) where the tile before was an own one:
//
//     issue                    wait for              compute, while the rest runs
//     S(n), dP(n)              S                     half of P, an exponential a score
//                              dP                    the other half, and dS; P and dS go to shared memory; a barrier: the other
//                                                    consumer's are there. Of a sent tile one thread starts to copy dS to the other block
//     dV += P(n) dO
//     dQ(n - 1) = dS K (own)   the other block's dS  (over 128 keys)
//     dK += dS(n) Q            dV                    the place of dO is empty: the producer may fill it
//                              dQ (own)              dQ(n - 1) added from the accumulators; its dS may be overwritten, in both blocks
//                              dK                    the stage of Q is empty
//
// A tile that needs no mask has a text without one, so its scores are one basic block. Half of a thread's 16 exponentials come before the
// wait for dP. The others come behind it, beside the products and conversions of dS: the special function unit and the FMA pipe work at the
// same time. P and dS are shared at once, with one barrier for both, and dV begins behind it. That is 2 to 3 % faster than P and its
// barrier first, with dV beside dS. A tile with masked scores still has that order. Both consumers choose by the tile's first query,
// because each multiplies what the other has shared, and both must meet at the same barriers.
//
// Shared memory holds K of 128 keys, 64 KB, V 32, Q of two tiles 64, dO of one 32, dS^T of an own tile 16 and of a sent one 8, P^T 8. dO of
// the next tile arrives while dK, dQ and the next S run; a tile's dV comes first for that. That dO is there says also that both consumers
// have read P^T of the tile before.
//
// Each block loads all of Q and dO for itself, as hopper_keys does, so a stage is released within the block. With multicast a block would load
// half of them for both, and L2 would be read half as often, but the four consumers of both blocks would have to release each stage. That
// is 2 to 4 % slower (docs/notes). So what crosses the cluster is dS^T of each tile of queries, and K of each tile of keys.
//
// Where works are few, 128 keys are several works, as in hopper: each cluster walks over a range of their tiles of queries.
//
// Both blocks walk the same tiles: where none of a block's keys is seen, it sends a dS^T of zeros (skip_tile). A cluster barrier stands at
// the beginning: no copy or arrival finds a barrier of the other block that is not initialised. One stands at the end: no block ends while
// the other may reach it.
//
// The two blocks wait for each other's dS^T at every tile. At head dim 256 that costs less than the reductions did. At 128, where hopper
// has 128 keys in a block, such a kernel is slower than hopper (docs/notes). So this step has head dim 256 alone; heads of 129 to 255
// columns run here too, padded by TMA. It has no deterministic form: clusters add to dQ as they come, without the turns of hopper_keys.
#include <fa/accumulator.cuh>
#include <fa/cluster.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, HEAD_DIM, WORKSPACE_STATS, WORKSPACE_DQ>;

constexpr int THREADS = 384, STAGES = 2, SLABS = Tiles::slabs;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr int BLOCK_K = 64, KEYS = 2 * BLOCK_K;  // of a block, of the cluster
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, V_SLAB = BLOCK_K * 128, K_SLAB = KEYS * 128;  // bytes; K_SLAB also of dS^T, 64 queries wide
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, V_TILE = SLABS * V_SLAB, K_TILE = SLABS * K_SLAB, STATS = 2 * BLOCK_Q * 4;
constexpr uint32_t DS_TILE = KEYS * 128, P_TILE = BLOCK_K * 128;  // dS^T of both blocks; P^T or dS^T of one
constexpr int PART = Tiles::part;  // dQ of a tile lies in parts of 64 x 64
constexpr int QUERIES = BLOCK_Q / 2, OWN_SLABS = SLABS / 2, STEPS = QUERIES / 16;  // of a consumer
static_assert(HEAD_DIM == 256 && BLOCK_Q == 64, "its registers and shared memory are those of head dim 256 and 64 queries");

// A descriptor that is made where it is needed (fa::descriptor_here), of which an advance changes the lower word alone. Those of K, V and
// dS stay for a tile of keys: hoisted, they would be spilled.
struct Here {
    uint32_t lower, upper;
    __device__ __forceinline__ explicit Here(uint64_t descriptor)
        : lower(uint32_t(fa::descriptor_here(uint32_t(descriptor)))), upper(uint32_t(descriptor >> 32)) {}
};
__device__ __forceinline__ uint64_t descriptor_advance(const Here& here, uint32_t bytes) {
    return uint64_t(here.upper) << 32 | (here.lower + (bytes >> 4));
}

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) { Tiles::prepare<scalar>(args); }

// How many works share a tile of keys. Without SPLIT it is known when this is compiled.
__device__ __forceinline__ int splits_of(const fa::Args& args) { return SPLIT ? args.runtime[RUNTIME_SPLITS] : 1; }
// The 128 keys of a cluster, of one head, and the tiles of queries that see them.
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    return Tiles::work<KEYS>(args, number, args.runtime[RUNTIME_SECTION], splits_of(args));
}
__device__ __forceinline__ int works_of(const fa::Args& args) { return Tiles::works<KEYS>(args, splits_of(args)); }

// The first tile of queries that sees some of the 64 keys from this one on.
__device__ __forceinline__ int first_tile(const fa::Args& args, const Work& work, int key) {
    return key < args.seq_kv ? min(work.end, fa::first_query(args, key) / BLOCK_Q) : work.end;
}

// The tiles of queries that a work walks over, head after head: of one head from `first` to `end`. All, or with splits `left` from its
// tile on.
struct Range {
    int head, first, end, left;
    __device__ __forceinline__ Range(const Work& work, int group) : head(work.head), first(work.tile), end(work.end), left(group) {
        if (SPLIT) left = work.count, clip();
    }
    __device__ __forceinline__ bool is_left() const { return left > 0; }
    __device__ __forceinline__ void next(const Work& work) {
        left -= SPLIT ? end - first : 1;
        ++head, first = work.first, end = work.end;
        if (SPLIT) clip();
    }
    __device__ __forceinline__ void clip() { end = min(end, first + left); }
};

// The barriers of a block. `numbers` and number_full: of works, by turns, so that the next one may come while this one is worked on.
struct Barriers {
    uint64_t number_full[2], k_full, v_full, kv_empty, dkv_full[2];  // kv_empty: in both blocks; dkv_full: of a consumer
    uint64_t q_full[STAGES], q_empty[STAGES], do_full, do_empty;  // of Q and the stats; of dO
    uint64_t ds_full, ds_empty[2];  // dS^T of both blocks; that here and the other block's have been read

    __device__ __forceinline__ void init() {
        fa::mbarrier_init(&k_full, 1), fa::mbarrier_init(&v_full, 1);
        fa::mbarrier_init(&kv_empty, 4);  // two storers of each block
        fa::mbarrier_init(&ds_full, 8);
        fa::mbarrier_init(&do_full, 1), fa::mbarrier_init(&do_empty, 8);  // each warp arrives
        for (int i = 0; i < 2; ++i) {
            fa::mbarrier_init(number_full + i, 1), fa::mbarrier_init(q_full + i, 1);
            fa::mbarrier_init(q_empty + i, 8);
            fa::mbarrier_init(dkv_full + i, 4), fa::mbarrier_init(ds_empty + i, 8);
        }
        fa::mbarrier_init_fence();
    }
};

// What a block has in shared memory.
struct Shared {
    int rank = blockIdx.x % 2;  // of the block in its cluster
    unsigned char* k = fa::dynamic_shared_1024();  // [SLABS][KEYS][64], of both blocks; dK of this one in the end
    unsigned char* v = k + K_TILE;  // [SLABS][BLOCK_K][64]; dV in the end
    unsigned char* q = v + V_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [SLABS][BLOCK_Q][64]
    unsigned char* ds = d_o + Q_TILE;  // [KEYS][64]: dS^T of an own tile
    unsigned char* sent = ds + DS_TILE;  // [BLOCK_K][64]: dS^T of a sent tile
    unsigned char* p = sent + P_TILE;  // [BLOCK_K][64]: P^T
    unsigned char* stats = p + P_TILE;  // [STAGES][2][BLOCK_Q]
    int* numbers = reinterpret_cast<int*>(stats + STAGES * STATS);  // [2][4]: the first of 4 is a work, or there are no more
    Barriers* barriers = reinterpret_cast<Barriers*>(numbers + 8);
    uint32_t other_k = fa::map_shared(k, rank ^ 1);

    __device__ __forceinline__ int* number(const fa::Ring<1>& kv) const { return numbers + kv.position % 2 * 4; }
    // The address in the other block of what lies here in this one.
    __device__ __forceinline__ uint32_t other(const void* smem) const {
        return other_k + uint32_t(static_cast<const unsigned char*>(smem) - k);
    }
};

// One thread: loads K, V and the tiles of queries of this block. That of rank 0 takes the numbers for both.
struct Producer {
    const fa::Args& args;
    const Shared& smem;
    const fa::Maps maps;
    int* counters;
    int next = 0;
    fa::Ring<1> kv{};
    fa::Ring<STAGES> q{};  // of Q and the stats

    __device__ __forceinline__ Barriers& at() { return *smem.barriers; }

    __device__ __forceinline__ void fetch_number() {
        if (smem.rank == 0) next = atomicAdd(counters, 1);
    }
    __device__ __forceinline__ void send_number() {
        for (int i = 0; smem.rank == 0 && i < 2; ++i)
            fa::store_remote_16(fa::map_shared(smem.number(kv), i), next, 0, 0, 0, fa::map_shared(at().number_full + kv.position % 2, i));
    }
    // The work whose K and V may come, as a number that has been sent.
    __device__ __forceinline__ int wait_number() {
        fa::mbarrier_wait_parity(&at().kv_empty, kv.parity() ^ 1);
        fa::mbarrier_arrive_expect_tx(at().number_full + kv.position % 2, 16);
        fa::mbarrier_wait_parity(at().number_full + kv.position % 2, kv.position / 2 % 2);
        return *smem.number(kv);
    }
    // Each block loads K of its 64 keys for both.
    __device__ __forceinline__ void load_keys(const Work& work) {
        const int k_first = work.k_first + smem.rank * BLOCK_K;
        fa::mbarrier_arrive_expect_tx(&at().k_full, K_TILE);
        for (int slab = 0; slab < SLABS; ++slab)
            fa::tma_load_4d_multicast(smem.k + slab * K_SLAB + smem.rank * V_SLAB, &maps.k, &at().k_full, 3, 64 * slab, k_first,
                                      work.kv_head, work.batch);
        Tiles::load<V_SLAB, SLABS>(smem.v, maps.v, &at().v_full, k_first, work.kv_head, work.batch);
        kv.next();
    }
    __device__ __forceinline__ void load_queries(int tile, int head, int batch) {
        fa::mbarrier_wait_parity(at().q_empty + q.stage(), q.parity() ^ 1);
        const int q_first = tile * BLOCK_Q;
        Tiles::load<Q_SLAB, SLABS>(smem.q + q.stage() * Q_TILE, maps.q, at().q_full + q.stage(), q_first, head, batch, STATS);
        fa::dependency_wait();  // for the stats
        fa::tma_load_4d(smem.stats + q.stage() * STATS, &maps.stats, at().q_full + q.stage(), 0, tile, head, batch);
        fa::mbarrier_wait_parity(&at().do_empty, q.position % 2 ^ 1);
        Tiles::load<Q_SLAB, SLABS>(smem.d_o, maps.d_o, &at().do_full, q_first, head, batch);
    }
    __device__ __forceinline__ void run() {
        fetch_number();
        send_number();
        while (true) {
            const int number = wait_number();
            if (number >= works_of(args)) break;
            const Work work = work_of(args, number);
            load_keys(work);
#pragma unroll 1  // the producer has few registers
            for (Range range(work, args.heads_q / args.heads_kv); range.is_left(); range.next(work))
#pragma unroll 1
                for (int tile = range.first, head = range.head; tile < range.end; ++tile, q.next()) load_queries(tile, head, work.batch);
            fetch_number();  // not before: the next work would wait until this one has ended
            send_number();
        }
        fa::mbarrier_arrive(&at().k_full);
        // The last cluster to finish leaves the counters as it found them, for the next launch.
        if (smem.rank == 0) fa::reset_by_last(counters, gridDim.x / 2);
    }
};

// One thread for each consumer: stores its columns of dK and dV. K's place holds dK in the end, V's dV; both blocks may then load the next.
struct Storer {
    const fa::Args& args;
    const Shared& smem;
    const fa::TensorMap &dk_map, &dv_map;
    int consumer;
    fa::Ring<1> kv{};

    __device__ __forceinline__ Barriers& at() { return *smem.barriers; }

    __device__ __forceinline__ void store_gradients(const Work& work) {
        const int key = smem.rank * BLOCK_K;
        fa::mbarrier_wait_parity(at().dkv_full + consumer, kv.parity());
        for (int slab = consumer * OWN_SLABS; !SPLIT && slab < (consumer + 1) * OWN_SLABS; ++slab) {
            fa::tma_store_4d(&dk_map, smem.k + slab * K_SLAB + key * 128, 64 * slab, work.k_first + key, work.kv_head, work.batch);
            fa::tma_store_4d(&dv_map, smem.v + slab * V_SLAB, 64 * slab, work.k_first + key, work.kv_head, work.batch);
        }
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(&at().k_full, kv.parity());
            const int number = *smem.number(kv);
            if (number >= works_of(args)) break;
            store_gradients(work_of(args, number));
            fa::mbarrier_arrive(&at().kv_empty);
            fa::mbarrier_arrive_remote(smem.other(&at().kv_empty));
            kv.next();
        }
    }
};

// 32 queries of a tile with this block's 64 keys, 16 a warp, and half of the columns of dK, dV and each own tile's dQ.
struct Consumer {
    const fa::Args& args;
    const Shared& smem;
    const int consumer, lane = fa::lane_id(), warp = fa::warp_id() % 4;
    const int own_keys = smem.rank * BLOCK_K, own_queries = consumer * QUERIES;  // the first: of the cluster's keys, of a tile's queries
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    fa::Ring<1> kv;
    fa::Ring<STAGES> q;  // of Q, dO and their stats. A tile is this block's own where its stage is the rank
    Work work{};
    float dk_reg[OWN_SLABS * 32], dv_reg[OWN_SLABS * 32], p_reg[QUERIES / 2], ds_reg[QUERIES / 2], dq_reg[OWN_SLABS * 32];

    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block, int number) : args(all), smem(block), consumer(number) {}
    __device__ __forceinline__ Barriers& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }
    __device__ __forceinline__ bool is_own() const { return int(q.stage()) == smem.rank; }
    __device__ __forceinline__ unsigned char* own_ds() { return is_own() ? smem.ds + smem.rank * P_TILE : smem.sent; }
    __device__ __forceinline__ unsigned char* q_tile() { return smem.q + q.stage() * Q_TILE; }

    // d = A B^T: the block's keys of K or V, this consumer's queries of a tile of Q or dO
    __device__ __forceinline__ void issue_transposed(float (&d)[QUERIES / 2], unsigned char* a_smem, uint32_t a_slab,
                                                     unsigned char* b_smem) {
        const Here a(fa::smem_descriptor_k_major(a_smem)), b(fa::smem_descriptor_k_major(b_smem + own_queries * 128));
        fa::issue_abt<scalar, COLUMNS>(d, a, a_slab, b, Q_SLAB);
    }
    __device__ __forceinline__ void issue_scores() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        issue_transposed(p_reg, smem.k + own_keys * 128, K_SLAB, q_tile());
    }
    __device__ __forceinline__ void issue_dp() {
        fa::mbarrier_wait_parity(&at().do_full, q.position % 2);
        issue_transposed(ds_reg, smem.v, V_SLAB, smem.d_o);
    }
    // d += P^T dO or dS^T Q: this consumer's columns
    __device__ __forceinline__ void issue_gradient(float (&d)[OWN_SLABS * 32], unsigned char* a_smem, unsigned char* b_smem,
                                                   bool accumulate) {
        const Here a(fa::smem_descriptor_k_major(a_smem));
        const Here b(fa::smem_descriptor_mn_major(b_smem + consumer * OWN_SLABS * Q_SLAB, Q_SLAB));
        fa::issue_ab<scalar, BLOCK_Q / 16>(d, a, b, accumulate);
    }
    __device__ __forceinline__ void issue_dv(bool accumulate) { issue_gradient(dv_reg, smem.p, smem.d_o, accumulate); }
    __device__ __forceinline__ void issue_dk(bool accumulate) { issue_gradient(dk_reg, own_ds(), q_tile(), accumulate); }
    // This consumer's part of dQ = dS K of the tile before, an own one. Its dS^T of the other block may still be on its way.
    __device__ __forceinline__ void issue_dq() {
        fa::mbarrier_wait_parity(&at().ds_full, (q.position - 1) / 2 % 2);
        const Here a(fa::smem_descriptor_mn_major(smem.ds, DS_TILE));
        const Here b(fa::smem_descriptor_mn_major(smem.k + consumer * OWN_SLABS * K_SLAB, K_SLAB));
        fa::issue_atb<scalar, KEYS>(dq_reg, a, b);
    }
    // That dQ is complete, and is added; dS^T has been read. `to`: its tile.
    __device__ __forceinline__ void add_dq(float* to) {
        release(at().ds_empty);
        if (lane == 0) fa::mbarrier_arrive_remote(smem.other(at().ds_empty + 1));
        float* dq = to + consumer * OWN_SLABS * PART + threadIdx.x % 128 * 4;
        Tiles::add_groups(dq, dq_reg);
    }
    __device__ __forceinline__ void make_dq(float* to) {
        issue_dq();
        fa::wgmma_wait<0>(dq_reg);
        add_dq(to);
    }

    // Whether all queries of the tile see all keys of this block.
    __device__ __forceinline__ bool sees_all(int tile) { return work.k_first + own_keys + 64 <= fa::visible_keys(args, tile * BLOCK_Q); }
    __device__ __forceinline__ void mask(int tile) {
        const int q_first = tile * BLOCK_Q + own_queries, key = work.k_first + own_keys;
        fa::clear_hidden(p_reg, args, q_first, key);
    }
    __device__ __forceinline__ void store(unsigned char* tile_smem, const uint32_t (&operand)[STEPS][4]) {
        fa::store_operand(tile_smem + warp * 16 * 128, P_TILE, operand, own_queries);
    }
    __device__ __forceinline__ void pack_and_store(unsigned char* tile_smem, const float (&x)[QUERIES / 2]) {
        uint32_t operand[STEPS][4];
        fa::pack_operand<scalar>(operand, x);
        store(tile_smem, operand);
    }
    // Behind it what both consumers have shared is there.
    __device__ __forceinline__ void wait_for_other() {
        fa::fence_proxy_async_shared();
        fa::bar_sync(1, 256);
    }
    // The dS^T that was here has been read.
    __device__ __forceinline__ void wait_for_place() { fa::mbarrier_wait_parity(at().ds_empty + (is_own() ? 0 : 1), q.parity() ^ 1); }
    // dS^T is in shared memory, and of a sent tile goes from there to the other block.
    __device__ __forceinline__ void share_ds() {
        wait_for_other();
        if (is_own()) {
            if (lane == 0) fa::mbarrier_arrive_expect_tx(&at().ds_full, P_TILE / 8);  // and as many bytes as there are here
        } else if (consumer == 0 && warp == 0 && lane == 0) {
            fa::bulk_copy_to_cluster(smem.other(smem.ds + smem.rank * P_TILE), smem.sent, P_TILE, smem.other(&at().ds_full));
        }
    }
    // S and dP are in flight: until P and dS are shared, and dV is in flight. Masked: P first, so that dV runs under dS.
    template <bool Masked> __device__ __forceinline__ void softmax(int tile, bool accumulate) {
        constexpr int ahead = Masked ? STEPS : STEPS / 2;  // steps of 16 queries, whose exponentials come before dP
        const float* stats = reinterpret_cast<const float*>(smem.stats + q.stage() * STATS) + own_queries;
        fa::wgmma_wait<1>(p_reg);
        fa::exponentiate_columns(p_reg, scale_log2e, stats, 0, ahead);
        if constexpr (Masked) {
            mask(tile);
            pack_and_store(smem.p, p_reg);
            wait_for_other();
            issue_dv(accumulate);
        }
        wait_for_place();
        fa::schedule_fence();
        fa::wgmma_wait<Masked>(ds_reg);
        fa::exponentiate_columns(p_reg, scale_log2e, stats, ahead, STEPS);
        fa::score_gradient(ds_reg, p_reg, stats + BLOCK_Q);
        // The stores come last: the compiler moves no load of logsumexp or delta before one.
        if constexpr (!Masked) pack_and_store(smem.p, p_reg);
        pack_and_store(own_ds(), ds_reg);
        share_ds();
        if constexpr (!Masked) issue_dv(accumulate);
    }
    // late: where dQ of the tile before is to be added; null: none is to be made.
    __device__ __forceinline__ void full_tile(int tile, float* late, bool accumulate) {
        issue_scores();
        issue_dp();
        if (sees_all(tile)) softmax<false>(tile, accumulate);
        else softmax<true>(tile, accumulate);
        if (late) {
            issue_dq();
            fa::wgmma_wait<1>(dv_reg);
            release(&at().do_empty);
            issue_dk(accumulate);
            fa::wgmma_wait<1>(dq_reg);
            add_dq(late);
            fa::schedule_fence();
            fa::wgmma_wait<0>(dk_reg);
        } else {
            issue_dk(accumulate);
            fa::wgmma_wait<1>(dv_reg);
            release(&at().do_empty);
            fa::wgmma_wait<0>(dk_reg);
        }
        release(at().q_empty + q.stage());
        q.next();
    }
    // A tile that sees none of the block's keys.
    __device__ __forceinline__ void skip_tile(float* late) {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        fa::mbarrier_wait_parity(&at().do_full, q.position % 2);
        const uint32_t zeros[STEPS][4] = {};
        wait_for_place();
        store(own_ds(), zeros);
        share_ds();
        release(at().q_empty + q.stage()), release(&at().do_empty);
        if (late) make_dq(late);
        q.next();
    }
    // All tiles of queries of the work. Whether any of them sees any of the block's keys.
    __device__ __forceinline__ bool walk() {
        const int own_first = first_tile(args, work, work.k_first + own_keys);
        const uint32_t begin = q.position;
        float* before = nullptr;  // dQ of the tile before
        // That, where it is an own tile of this work.
        const auto late = [&]() { return !is_own() && q.position != begin ? before : nullptr; };
        bool seen = false;
#pragma unroll 1
        for (Range range(work, args.heads_q / args.heads_kv); range.is_left(); range.next(work)) {
            int tile = range.first;
            const auto here = [&]() { return Tiles::dq(args, Tiles::number(args, work.batch, range.head, tile)); };
            const int skipped = SPLIT ? min(range.end, own_first) : own_first;
#pragma unroll 1
            for (; tile < skipped; ++tile) skip_tile(late()), before = here();
#pragma unroll 1
            for (; tile < range.end; ++tile, seen = true) full_tile(tile, late(), seen), before = here();
        }
        if (late()) make_dq(before);  // the last tile was an own one
        return seen;
    }
    // dK and dV of one of several splits to its workspace; launch 3 adds them.
    __device__ __forceinline__ void store_partials(bool seen) {
        const int first = consumer * OWN_SLABS * 2 + smem.rank;
        float* partial = Tiles::partial<KEYS, WORKSPACE_PARTIAL>(args, *smem.number(kv));
        Tiles::store_partials<KEYS>(partial, first, first, 2, dk_reg, dv_reg, seen);
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them. seen: whether a query sees any of the keys.
    __device__ __forceinline__ void stage_gradients(bool seen) {
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const int slab = consumer * OWN_SLABS;
        fa::barrier_sync(1, 256);  // the other consumer's products have read K and V
        fa::store_rows<scalar>(smem.v + slab * V_SLAB + 16 * warp * 128, V_SLAB, dv_reg, one);
        fa::store_rows<scalar>(smem.k + slab * K_SLAB + (own_keys + 16 * warp) * 128, K_SLAB, dk_reg, scales);
        fa::fence_proxy_async_shared();
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(&at().k_full, kv.parity());
            const int number = __shfl_sync(fa::full_warp, *smem.number(kv), 0);  // known to the compiler as the same in the whole warp
            if (number >= works_of(args)) break;
            work = work_of(args, number);
            fa::mbarrier_wait_parity(&at().v_full, kv.parity());
            const bool seen = walk();
            if constexpr (SPLIT) store_partials(seen);
            else stage_gradients(seen);
            __syncwarp();
            release(at().dkv_full + consumer);
            kv.next();
        }
    }
};

// Launch 2. A cluster keeps 128 keys, each of its blocks 64; the queries that see them are streamed, of all heads that read this key head.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gradients(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
              const __grid_constant__ fa::TensorMap k_map, const __grid_constant__ fa::TensorMap v_map,
              const __grid_constant__ fa::TensorMap d_o_map, const __grid_constant__ fa::TensorMap stats_map,
              const __grid_constant__ fa::TensorMap dk_map, const __grid_constant__ fa::TensorMap dv_map) {
    fa::launch_dependents();
    const Shared smem;
    if (threadIdx.x == 0) smem.barriers->init();
    fa::cluster_sync();
    const int warpgroup = fa::warpgroup_index();
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<504 - 2 * REGISTERS>();
        int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
        if (threadIdx.x == 0) Producer{args, smem, {q_map, k_map, v_map, d_o_map, stats_map}, counters}.run();
        else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) Storer{args, smem, dk_map, dv_map, int(threadIdx.x / 32) - 1}.run();
        __syncwarp();
    } else {
        fa::setmaxnreg_inc<REGISTERS>();
        Consumer(args, smem, warpgroup - 1).run();
    }
    fa::cluster_sync();  // the other block arrives at this one's barriers until its end
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) {
    Tiles::convert<scalar, KEYS, false, SPLIT, WORKSPACE_PARTIAL>(args, args.runtime[RUNTIME_SECTION], splits_of(args));
}
