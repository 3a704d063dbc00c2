// /// kernel
// title = "Hopper at head dim 256: the consumers share 64 keys, and divide queries and columns"
// dtypes = ["float16", "bfloat16"]
// head_dims = [256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = "optional"
// logsumexp_gradient = true
// mask = true
// score = true
// sinks = true
// head_dim_v = true
// auto = false
// variant_of = "hopper"
// when = "max(head_dim, head_dim_v) > 128"
// arithmetic = "p16"
// spill_bytes_allowed = 48  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// runtime = ["SPLITS", "SECTION"]
// [tile]
// BLOCK_Q = 64
// BLOCK_K = 64  # both consumers share them
// REGISTERS = "240 if both > 320 else 216"  # of a consumer's thread; the producer has the rest of 504
// EARLY = 4  # eighths of dQ that are added before the next dP
// SPLITS = 1  # of the queries of a tile of keys, where works are few: each is a work
// SPLIT = "SPLITS > 1"  # a form of its own: dK and dV leave as partial sums
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask or deterministic
// [let]
// COLUMNS = "max(192, round_up(head_dim, 64))"  # of the head over which S is computed; the rest are 0
// COLUMNS_V = "COLUMNS if head_dim == head_dim_v else max(128, round_up(head_dim_v, 64))"  # over which dP is
// WIDTH_K = "HEAD_DIM if head_dim == head_dim_v else COLUMNS"  # of Q, K and their gradients
// WIDTH_V = "HEAD_DIM if head_dim == head_dim_v else COLUMNS_V"  # of V and dO
// both = "WIDTH_K + WIDTH_V"
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count: 4M -5 %, 34M +2 % (docs/notes/22_hopper.md)
// works = "ceil_div(seq_kv, BLOCK_K) * heads_kv * batch"  # tiles of keys
// units = "132 if deterministic else sms"  # the splits of --deterministic, and its bits, are the same on every GPU
// most = "max(1, 4 * units // works)"  # splits; more works were not measured
// group = "heads_q // heads_kv"  # query heads of each
// section = "SECTION * 131072 // (HEAD_DIM * seq_q * min(SPLITS, group))"  # key heads at a time
// tile_ns = "3000 + key_traffic(units, BLOCK_K, section, SPLITS, 276, 2830, 13)"  # nanoseconds of a tile of the walk
// work_ns = "4540 + split_ns"  # a work besides
// split_ns = "9890 if SPLITS > 1 else 0"  # more of a work that is one of several splits
// other_ns = "2930 + elements * 4890 // 1000000"  # the other launches
// elements = "batch * heads_q * seq_q * HEAD_DIM"  # of Q
// dq_parts = "BLOCK_Q * WIDTH_K // 4096 * ceil_div(seq_q, BLOCK_Q)"  # of 64 x 64, of a head
// dk_parts = "BLOCK_K * max(WIDTH_K, WIDTH_V) // 4096 * ceil_div(seq_kv, BLOCK_K)"
// turns = "8 * batch * heads_q * ceil_div(seq_q, BLOCK_Q) if deterministic else 4"  # 4 for each consumer's part of a tile of dQ
// listed = "works * (group * ceil_div(seq_q, BLOCK_Q) + 2) if mask else 0"
// lists = "(2 if deterministic else 1) * listed"  # fa/seen_tiles.cuh
// [[choice]]
// when = "not deterministic"
// SPLITS = [1, "min(2, most)", "min(3, most)", "min(4, most)", "min(6, most)", "min(8, most)"]
// SECTION = [64, 8, 1024, "32 if works >= 5 * units and seq_q <= 2048 else 64"]
// cost = "key_waves(units, BLOCK_K, BLOCK_Q, section, SPLITS, tile_ns, work_ns) + other_ns"
// evidence = "experiments/mixed/costs.txt"
// [[choice]]
// SPLITS = [1, "min(2, most)", "min(3, most)", "min(4, most)", "min(6, most)"]
// SECTION = "16 if seq_q * HEAD_DIM <= 1048576 else 32"
// cost = "key_waves(units, BLOCK_K, BLOCK_Q, section, SPLITS, tile_ns, work_ns) + other_ns"
// evidence = "experiments/hopper_backward/history.csv: head dims 64 and 128 alone (D64 S4096 +2.5 %, D128 0); at 256 not measured"
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
// size = "batch * heads_q * round_up(seq_q, BLOCK_Q) * WIDTH_K"
// init = "none"
// [workspace.partial]
// dtype = "float32"
// size = "works * SPLITS * BLOCK_K * both if SPLIT else 4"
// init = "none"
// [workspace.turns]
// dtype = "float32"  # integers
// size = "turns + lists"
// init = "none"
// [tensor_map.q]
// tensor = "Q"
// box = [64, "BLOCK_Q", 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.d_o]
// tensor = "dO"
// box = [64, "BLOCK_Q", 1, 1]
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
// grid = "min(sms, works * SPLITS)"
// block = 384
// overlaps = "few_rows"
// shared = "(2 * BLOCK_K + 4 * BLOCK_Q) * both + 528 * BLOCK_Q + 128"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// grid = ["max(dq_parts, dk_parts) if SPLIT else dq_parts", "heads_q + (2 * heads_kv if SPLIT else 0)", "batch"]
// block = 256
// maps = []
// [[launch]]
// entry = "dsinks"
// when = "sinks"
// grid = ["heads_q"]
// block = 1024
// maps = []
// ///
//
// Step 25, backward: hopper's backward pass at head dim 256. It runs in hopper's place at head dims over 128.
//
// What limits hopper there: dK and dV of 64 keys and all 256 columns would be all registers of a consumer, and shared memory has no room
// for K and V of 128 keys beside two tiles of Q and dO.
//
// What changes: both consumers share 64 keys. Each makes the scores of half of the queries of a tile, and half of the columns of dV, dK and
// dQ. So each needs the P and dS of the other: P^T too goes through shared memory, and there are two barriers a tile. That is 416 KB of
// shared memory for 64 queries x 64 keys, 3330 cycles for 2560 of products, and twice as many reductions a FLOP as at 128 keys: without
// them it is half as fast again. dQ is added from the accumulators, as in hopper_atomic, for there is no room to stage it.
//
// A tile of queries n, as a consumer runs it. S(n) and dP(n) are in flight when it begins:
//
//     issue               wait for    compute, while the rest runs
//                         S(n)        P(n), which goes to shared memory; a barrier: the other consumer's P is there
//     dV += P(n) dO       dP(n)       dS(n), which goes to shared memory; a barrier: the other consumer's dS is there
//     dK += dS(n) Q
//     dQ(n) = dS(n) K     dV
//     S(n + 1)            dK, dQ      dQ(n) added in global memory (EARLY eighths of it); the stage of Q, dO, P and dS is empty
//     dP(n + 1)                       the rest of dQ(n) added
//
// Where there are few tiles, a tile of keys is divided into several work items, as in hopper.
//
// V's own head dim (DeepSeek's 192 and 128). The head dims have slabs of 64 columns of their own: three and two. The consumers divide whole
// slabs, the first with the larger half of dK, the second with that of dQ: 128 accumulators each, and 128 columns of each product.
//
// With --deterministic the blocks of a head take turns at each tile of queries, in hopper's order. The storer of a consumer takes the
// turn, signals the consumer, and passes the turn after its reductions.
//
// `auto` takes hopper_cluster here, whose clusters of two blocks add dQ once for both, but for 128 keys and fewer under the mask: there its
// blocks walk a tile for nothing. This step has a deterministic form, and that one has none.
#include <fa/accumulator.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, WIDTH_K, WORKSPACE_STATS, WORKSPACE_DQ, WIDTH_V>;
using Lists = fa::SeenTiles<BLOCK_Q, BLOCK_K, false, true, WORKSPACE_TURNS>;  // with a mask, as in hopper
using Walk = fa::WalkOf<false, Lists>;

constexpr int THREADS = 384, STAGES = 2, KV_STAGES = 1;
constexpr int SLABS = Tiles::slabs, SLABS_V = Tiles::slabs_v;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of dS^T, in slabs of 64 queries
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, DS_TILE = BLOCK_Q / 64 * K_SLAB, STATS = 2 * BLOCK_Q * 4;
constexpr uint32_t DO_TILE = SLABS_V * Q_SLAB, V_TILE = SLABS_V * K_SLAB;
constexpr int PART = Tiles::part;  // dQ of a tile lies in parts of 64 x 64
static_assert(BLOCK_Q == 64 && BLOCK_K == 64 && EARLY >= 0 && EARLY <= 8,
              "both consumers have the same 64 keys; EARLY counts eighths of dQ");
constexpr int QUERIES = BLOCK_Q / 2, STEPS = QUERIES / 16;  // of a consumer: half of the queries, and of the columns these slabs
constexpr int DK_FIRST = (SLABS + 1) / 2, DQ_FIRST = SLABS / 2, DV_FIRST = (SLABS_V + 1) / 2;  // of the first consumer
constexpr bool EVEN = SLABS % 2 == 0 && SLABS_V % 2 == 0;  // both have as many, and one code

// With DETERMINISTIC, which tile of keys may add to a consumer's part of a tile of queries: from the last that it sees.
__device__ __forceinline__ int* turn_of(const fa::Args& args, int number, int consumer) {
    return static_cast<int*>(args.workspace[WORKSPACE_TURNS]) + 8 * number + 4 * consumer;
}

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    Tiles::prepare<scalar>(args);
    if constexpr (fa::has_mask) Lists::make(args);
    const int tile = blockIdx.x * 16 / BLOCK_Q, last = (tile + 1) * BLOCK_Q - 1;
    if (DETERMINISTIC && blockIdx.x * 16 % BLOCK_Q == 0 && threadIdx.x < 2)
        *turn_of(args, Tiles::number(args, blockIdx.z, blockIdx.y, tile), threadIdx.x) =
            fa::has_mask ? Lists::first_turn(args, blockIdx.z, blockIdx.y, tile) : (fa::visible_keys(args, last) - 1) / BLOCK_K;
}

// How many works share a tile of keys. Without SPLIT it is known when this is compiled.
__device__ __forceinline__ int splits_of(const fa::Args& args) { return SPLIT ? args.runtime[RUNTIME_SPLITS] : 1; }
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    Work work = Tiles::work<BLOCK_K, DETERMINISTIC>(args, number, args.runtime[RUNTIME_SECTION], splits_of(args));
    if constexpr (fa::has_mask) Lists::narrow(args, work, splits_of(args));
    return work;
}

// What a block has in shared memory.
struct Shared {
    unsigned char* k = fa::dynamic_shared_1024();  // [SLABS][BLOCK_K][64]; dK in the end
    unsigned char* v = k + K_TILE;  // [SLABS_V][BLOCK_K][64]; dV in the end
    unsigned char* q = v + V_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [STAGES][SLABS_V][BLOCK_Q][64]
    unsigned char* ds = d_o + STAGES * DO_TILE;  // [STAGES][BLOCK_Q / 64][BLOCK_K][64]: dS^T
    unsigned char* p = ds + STAGES * DS_TILE;  // likewise: P^T
    unsigned char* stats = p + STAGES * DS_TILE;  // [STAGES][2][BLOCK_Q]
    fa::Barriers<KV_STAGES>* barriers = reinterpret_cast<fa::Barriers<KV_STAGES>*>(stats + STAGES * STATS);
};

// One thread for each consumer: takes and passes the turns, stores dK and dV.
struct Storer {
    const fa::Args& args;
    const Shared& smem;
    const fa::TensorMap &dk_map, &dv_map;
    int consumer;
    fa::Ring<KV_STAGES> kv{};
    uint32_t tile = 0;  // of queries, counted through
    int held = -1;  // the tile of queries whose turn has been taken last, until it is passed

    __device__ __forceinline__ fa::Barriers<KV_STAGES>& at() { return *smem.barriers; }

    __device__ __forceinline__ void pass_turn(int mine, int after) {
        if (held < 0) return;
        fa::pass_turn(turn_of(args, held, consumer), fa::has_mask ? after : mine - 1);
        held = -1;
    }
    // The consumer adds in the turns that this thread takes for it. Nothing is held while it waits for one.
    __device__ __forceinline__ void take_turns(const Work& work) {
        const int mine = work.k_first / BLOCK_K;
        int after = 0;  // with a mask: whose turn comes behind that which is held
        auto walk = Walk::numbers<Tiles>(args, work);
#pragma unroll 1
        for (int n = work.count; n > 0; --n, walk.next(work), ++tile) {
            const int number = walk.number_of(args, work);
            const int* turn = turn_of(args, number, consumer);
            if (!fa::has_turn(turn, mine)) pass_turn(mine, after), fa::wait_for_turn(turn, mine);
            fa::mbarrier_arrive(at().dq_empty + consumer);
            pass_turn(mine, after);
            fa::mbarrier_wait_parity(at().dq_full + consumer, tile % 2);  // it has added
            held = number;
            if constexpr (fa::has_mask) after = walk.next_turn();
        }
        pass_turn(mine, after);
    }
    // K and V hold dK and dV in the end, and are empty when the stores have read them.
    __device__ __forceinline__ void store_gradients(const Work& work) {
        fa::mbarrier_wait_parity(at().dkv_full[0] + consumer, kv.parity());
        const int dk = consumer * DK_FIRST, dk_end = EVEN ? dk + DK_FIRST : consumer == 0 ? DK_FIRST : SLABS;
        const int dv = consumer * DV_FIRST, dv_end = EVEN ? dv + DV_FIRST : consumer == 0 ? DV_FIRST : SLABS_V;
        for (int slab = 0; slab < max(DK_FIRST, DV_FIRST); ++slab) {
            if (dk + slab < dk_end)
                fa::tma_store_4d(&dk_map, smem.k + (dk + slab) * K_SLAB, 64 * (dk + slab), work.k_first, work.kv_head, work.batch);
            if (dv + slab < dv_end)
                fa::tma_store_4d(&dv_map, smem.v + (dv + slab) * K_SLAB, 64 * (dv + slab), work.k_first, work.kv_head, work.batch);
        }
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    __device__ __forceinline__ void run() {
        if (DETERMINISTIC || fa::has_mask) fa::dependency_wait();  // for the turns and lists
        while (true) {
            fa::mbarrier_wait_parity(at().k_full, kv.parity());
            const int number = at().numbers[0];
            if (number < 0) break;
            Work work = work_of(args, number);
            if constexpr (DETERMINISTIC) {
                take_turns(work);
                work = work_of(args, at().numbers[0]);  // again: in the loop there is no register for it
            }
            if (!SPLIT) store_gradients(work);
            fa::mbarrier_arrive(at().kv_empty);
            kv.next();
        }
    }
};

// Half of the queries of a tile with all 64 keys, 16 a warp, and of the columns of dK, dV and each tile's dQ so many slabs.
template <int DkSlabs, int DvSlabs, int DqSlabs> struct Consumer {
    static constexpr int GROUPS = 8 * DqSlabs, EARLY_GROUPS = EARLY * DqSlabs;  // of 8 columns, of its part of dQ

    const fa::Args& args;
    const Shared& smem;
    const int consumer, lane = fa::lane_id(), warp = fa::warp_id() % 4, own_queries = QUERIES * consumer;
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    fa::Ring<KV_STAGES> kv;
    fa::Ring<STAGES> q;  // of Q, dO, their stats, P and dS
    Work work{};
    Walk walk{};  // the first tile whose dQ has not been added
    float dk_reg[DkSlabs * 32], dv_reg[DvSlabs * 32], p_reg[QUERIES / 2], ds_reg[QUERIES / 2], dq_reg[DqSlabs * 32];
    uint32_t p16_reg[STEPS][4], ds16_reg[STEPS][4];

    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block, int number) : args(all), smem(block), consumer(number) {}
    __device__ __forceinline__ fa::Barriers<KV_STAGES>& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }

    // d = A B^T: the keys of K or V, this consumer's queries of a tile of Q or dO
    template <int Columns, uint32_t Tile>
    __device__ __forceinline__ void issue_transposed(float (&d)[QUERIES / 2], unsigned char* a_smem, unsigned char* b_smem) {
        const uint64_t a = fa::descriptor_here(fa::smem_descriptor_k_major(a_smem));  // hoisted out of the loop it would be spilled
        const uint64_t b = fa::smem_descriptor_k_major(b_smem + q.stage() * Tile + own_queries * 128);
        fa::issue_abt<scalar, Columns>(d, a, K_SLAB, b, Q_SLAB);
    }
    __device__ __forceinline__ void issue_scores() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        issue_transposed<COLUMNS, Q_TILE>(p_reg, smem.k, smem.q);
    }
    __device__ __forceinline__ void issue_dp() {
        fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        issue_transposed<COLUMNS_V, DO_TILE>(ds_reg, smem.v, smem.d_o);
    }
    // d += P^T dO or dS^T Q: this consumer's columns, behind First slabs of the other's
    template <uint32_t Tile, int First, int R>
    __device__ __forceinline__ void issue_gradient(float (&d)[R], unsigned char* a_smem, unsigned char* b_smem, bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(b_smem + q.stage() * Tile + consumer * First * Q_SLAB, Q_SLAB);
        const uint64_t a = fa::smem_descriptor_k_major(a_smem + q.stage() * DS_TILE);
        fa::issue_ab<scalar, BLOCK_Q / 16>(d, a, b, accumulate);
    }
    __device__ __forceinline__ void issue_dv(bool accumulate) { issue_gradient<DO_TILE, DV_FIRST>(dv_reg, smem.p, smem.d_o, accumulate); }
    __device__ __forceinline__ void issue_dk(bool accumulate) { issue_gradient<Q_TILE, DK_FIRST>(dk_reg, smem.ds, smem.q, accumulate); }
    // This consumer's part of dQ = dS K
    __device__ __forceinline__ void issue_dq() {
        const uint64_t a = fa::smem_descriptor_mn_major(smem.ds + q.stage() * DS_TILE, K_SLAB);
        const uint64_t b = fa::smem_descriptor_mn_major(smem.k + consumer * DQ_FIRST * K_SLAB, K_SLAB);
        fa::issue_atb<scalar, BLOCK_K>(dq_reg, a, b);
    }

    __device__ __forceinline__ fa::TilePlace place() {
        return {args, work.batch, walk.query_head(work), walk.queries(work) * BLOCK_Q + own_queries, work.k_first};
    }
    // Whether all queries of the tile exist and see all keys, for a mask or score of the problem's own.
    __device__ __forceinline__ bool sees_all(const fa::TilePlace& place) {
        if constexpr (fa::has_mask) return __shfl_sync(fa::full_warp, walk.sees(0), 0) == fa::sees_all;
        return place.query + QUERIES <= args.seq_q && place.key + 64 <= fa::visible_keys(args, place.query);
    }
    __device__ __forceinline__ void mask() {
        const int q_first = walk.queries(work) * BLOCK_Q + own_queries, key = work.k_first;
        if (key + 64 <= fa::visible_keys(args, q_first)) return;
        fa::clear_hidden(p_reg, args, q_first, key);
    }
    __device__ __forceinline__ void share(unsigned char* tiles_smem, const uint32_t (&operand)[STEPS][4]) {
        fa::store_operand(tiles_smem + q.stage() * DS_TILE + warp * 16 * 128, K_SLAB, operand, own_queries);
    }
    // Behind it what both consumers have shared is there, and both have read the other stage.
    __device__ __forceinline__ void wait_for_other() {
        fa::fence_proxy_async_shared();
        fa::barrier_sync(1, 256);
    }
    __device__ __forceinline__ const float* stats() { return reinterpret_cast<const float*>(smem.stats + q.stage() * STATS) + own_queries; }
    // Waits for S; it becomes P, in shared memory.
    __device__ __forceinline__ void softmax() {
        if constexpr (fa::has_mask || fa::has_score) {
            const fa::TilePlace at = place();
            fa::SeenPairs<QUERIES / 2> pairs{{~0u}};
            if (!sees_all(at)) pairs.find(at);
            fa::wgmma_wait<1>(p_reg);
            fa::exponentiate_tile<scalar>(p_reg, p16_reg, at, pairs, scale, stats());
        } else {
            fa::wgmma_wait<1>(p_reg);
            fa::exponentiate_columns(p_reg, scale_log2e, stats());
            mask();
            fa::pack_operand<scalar>(p16_reg, p_reg);
        }
        share(smem.p, p16_reg);
    }
    // Waits for dP; it becomes dS, in shared memory.
    __device__ __forceinline__ void make_ds() {
        fa::wgmma_wait<1>(ds_reg);
        fa::score_gradient(ds_reg, p_reg, stats() + BLOCK_Q);
        fa::pack_operand<scalar>(ds16_reg, ds_reg);
        share(smem.ds, ds16_reg);
    }
    // A tile of queries whose S and dP are in flight: until all its products are.
    __device__ __forceinline__ void issue_tile(bool accumulate) {
        softmax();
        wait_for_other();
        issue_dv(accumulate);
        make_ds();
        wait_for_other();
        issue_dk(accumulate);
        issue_dq();
        fa::wgmma_wait<2>();
        q.next();
    }
    // All products of a tile are complete, and its stage is empty. Where the first group of 8 columns of its dQ is added:
    __device__ __forceinline__ float* begin_sum() {
        release(at().q_empty + (q.stage() ^ 1));
        const int number = Tiles::number(args, work.batch, walk.query_head(work), walk.queries(work));
        if (DETERMINISTIC) fa::mbarrier_wait_parity(at().dq_empty + consumer, q.position % 2 ^ 1);  // the storer has this tile's turn
        walk.next(work);
        return Tiles::dq(args, number) + consumer * DQ_FIRST * PART + threadIdx.x % 128 * 4;
    }
    // Adds some of its groups; behind the last ones the storer may pass the turn.
    __device__ __forceinline__ void add_dq(float* dq, int first, int end) {
        Tiles::add_groups(dq, dq_reg, first, end);
        if (DETERMINISTIC && end == GROUPS) __syncwarp(), release(at().dq_full + consumer);
    }
    // The rest of a tile's products and its dQ, behind the next tile's.
    __device__ __forceinline__ void issue_next() {
        issue_scores();
        fa::wgmma_wait<1>(dq_reg);
        float* dq = begin_sum();
        add_dq(dq, 0, EARLY_GROUPS);
        fa::schedule_fence();
        issue_dp();
        fa::schedule_fence();
        add_dq(dq, EARLY_GROUPS, GROUPS);
    }
    // dK and dV of one of several splits to its workspace; launch 3 adds them.
    __device__ __forceinline__ void store_partials(bool seen) {
        float* partial = Tiles::partial<BLOCK_K, WORKSPACE_PARTIAL>(args, at().numbers[0]);
        Tiles::store_partials<BLOCK_K>(partial, consumer * DK_FIRST, consumer * DV_FIRST, 1, dk_reg, dv_reg, seen);
        fa::mbarrier_arrive(at().kv_empty);
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them. seen: whether a query sees any of the keys.
    __device__ __forceinline__ void stage_gradients(bool seen) {
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t dk = consumer * DK_FIRST * K_SLAB + warp * 16 * 128, dv = consumer * DV_FIRST * K_SLAB + warp * 16 * 128;
        fa::store_rows<scalar>(smem.v + dv, K_SLAB, dv_reg, one);
        fa::barrier_sync(1, 256);  // the other consumer's dQ has read K
        fa::store_rows<scalar>(smem.k + dk, K_SLAB, dk_reg, scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dkv_full[0] + consumer);
        fa::mbarrier_arrive(at().kv_empty);  // the storers arrive later; this is for racecheck, which asks it of every reader
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(at().k_full, kv.parity());
            const int number = __shfl_sync(fa::full_warp, at().numbers[0], 0);  // known to the compiler as the same in the whole warp
            if (number < 0) break;
            work = work_of(args, number);
            walk = Walk::begin(work);
            const bool seen = work.count > 0;
            if (seen) {
                issue_scores();
                fa::mbarrier_wait_parity(at().v_full, kv.parity());
                issue_dp();
                int n = 0;
                for (bool accumulate = false;; accumulate = true) {
                    issue_tile(accumulate);
                    if (++n == work.count) break;
                    issue_next();
                }
                fa::wgmma_wait<0>(dq_reg, ds16_reg, dk_reg, dv_reg);
                add_dq(begin_sum(), 0, GROUPS);
            } else fa::mbarrier_wait_parity(at().v_full, kv.parity());
            if constexpr (SPLIT) store_partials(seen);
            else stage_gradients(seen);
            kv.next();
        }
    }
};

// Launch 2. BLOCK_K keys stay; the queries that see them are streamed, of all heads that read this key head.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradients(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
              const __grid_constant__ fa::TensorMap k_map, const __grid_constant__ fa::TensorMap v_map,
              const __grid_constant__ fa::TensorMap d_o_map, const __grid_constant__ fa::TensorMap stats_map,
              const __grid_constant__ fa::TensorMap dk_map, const __grid_constant__ fa::TensorMap dv_map) {
    fa::launch_dependents();
    const Shared smem;
    if (threadIdx.x == 0) smem.barriers->init();
    __syncthreads();
    const int warpgroup = fa::warpgroup_index();
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<504 - 2 * REGISTERS>();
        int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
        if (fa::has_mask && threadIdx.x == 0) fa::dependency_wait();  // for the lists
        if (threadIdx.x == 0)
            Tiles::produce<BLOCK_K, Walk, KV_STAGES>(args, {q_map, k_map, v_map, d_o_map, stats_map}, smem, counters, work_of,
                                                     splits_of(args));
        else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) Storer{args, smem, dk_map, dv_map, int(threadIdx.x / 32) - 1}.run();
    } else {
        fa::setmaxnreg_inc<REGISTERS>();
        if (fa::has_mask) fa::dependency_wait();  // for the lists
        if constexpr (EVEN) Consumer<DK_FIRST, DV_FIRST, DQ_FIRST>(args, smem, warpgroup - 1).run();
        else if (warpgroup == 1) Consumer<DK_FIRST, DV_FIRST, DQ_FIRST>(args, smem, 0).run();
        else Consumer<SLABS - DK_FIRST, SLABS_V - DV_FIRST, SLABS - DQ_FIRST>(args, smem, 1).run();
    }
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) {
    Tiles::convert<scalar, BLOCK_K, DETERMINISTIC, SPLIT, WORKSPACE_PARTIAL>(args, args.runtime[RUNTIME_SECTION], splits_of(args));
}

// Launch 4, of a problem with sinks.
extern "C" __global__ void __launch_bounds__(1024) dsinks(const __grid_constant__ fa::Args args) { Tiles::dsinks(args); }
