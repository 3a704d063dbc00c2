// /// kernel
// title = "Hopper without a staged dQ: added from the accumulators by red.v4, under the next tile's products"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = false
// logsumexp_gradient = true
// sinks = true
// auto = false
// variant_of = "hopper"
// when = "not mask and not score and not deterministic and HEAD_DIM == 128 and seq_q * heads_q <= (768 if causal else 512) * heads_kv"
// arithmetic = "p16"
// spill_bytes_allowed = 32  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// runtime = ["SPLITS", "SECTION"]
// [tile]
// BLOCK_Q = "128 if HEAD_DIM == 64 else 64"
// BLOCK_K = 128  # 64 a consumer
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// KV_STAGES = 2  # the next K and V arrive while the last products run
// EARLY = 8  # eighths of dQ that are added before the next dP
// SPLITS = 1  # of the queries of a tile of keys, where works are few: each is a work
// SPLIT = "SPLITS > 1"  # a form of its own: dK and dV leave as partial sums
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask
// [let]
// COLUMNS = "max(64, round_up(head_dim, 16))"  # of the head that the products compute
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count: 4M -5 %, 34M +2 % (docs/notes/22_hopper.md)
// works = "ceil_div(seq_kv, BLOCK_K) * heads_kv * batch"  # tiles of keys
// units = "sms"
// most = "max(1, 4 * units // works)"  # splits; more works were not measured
// group = "heads_q // heads_kv"  # query heads of each
// section = "SECTION * 131072 // (HEAD_DIM * seq_q * min(SPLITS, group))"  # key heads at a time
// recorded = "works >= 15 * units and seq_kv >= 512"  # as many works as its problems have
// tile_ns = "shared_ns + traffic_ns"  # nanoseconds of a tile of the walk
// shared_ns = "(2640 if causal else 2570) if HEAD_DIM == 64 else 2350 if causal else 2240"  # where L2 has its queries
// traffic_ns = "key_traffic(units, BLOCK_K, section, SPLITS, crowd_ns, alone_ns, spread_ns)"  # more, where it has not
// crowd_ns = "26 if HEAD_DIM == 64 else 235"
// alone_ns = "181 if HEAD_DIM == 64 else 810"
// spread_ns = "4 if HEAD_DIM == 64 else 9"
// work_ns = "(1400 if HEAD_DIM == 64 else 2140) + split_ns"  # a work besides
// split_ns = "(5240 if HEAD_DIM == 64 else 12400) if SPLITS > 1 else 0"  # more of a work that is one of several splits
// other_ns = "(5460 if HEAD_DIM == 64 else 2490) + elements * 3900 // 1000000"  # the other launches
// elements = "batch * heads_q * seq_q * HEAD_DIM"  # of Q
// dq_parts = "BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)"  # of 64 x 64, of a head
// dk_parts = "BLOCK_K * HEAD_DIM // 4096 * ceil_div(seq_kv, BLOCK_K)"
// barriers = "48 * KV_STAGES + 80"  # bytes
// [[choice]]
// when = "recorded"
// SPLITS = 1
// SECTION = "8 if seq_kv > 4 * seq_q else 32"
// evidence = "experiments/hopper_backward/history.csv: B5 H32 S192 Skv2048, many more keys than queries: 4 MB 0.203 ms, 16 MB 0.206, 32 MB 0.246"
// [[choice]]
// SPLITS = [1, "min(2, most)", "min(3, most)", "min(4, most)", "min(6, most)", "min(8, most)"]
// SECTION = [64, 8, 1024, "32 if works >= 5 * units and seq_q <= 2048 else 64"]
// cost = "key_waves(units, BLOCK_K, BLOCK_Q, section, SPLITS, tile_ns, work_ns) + other_ns"
// evidence = "experiments/mixed/costs.txt"
// [[choice]]
// when = "COLUMNS == 80 or COLUMNS == 96"
// EARLY = 4
// evidence = "experiments/hopper/between/backward.txt: D72 S4096 1.09, D80 S1500 causal 1.03, D96 1.01, causal 1.01 and 0.995"
// [[choice]]
// when = "HEAD_DIM == 64 and not causal"
// EARLY = 4
// evidence = "experiments/hopper_backward/history.csv: D64 S4096 dK first 471 TFLOP/s for 462"
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
// size = "batch * heads_q * round_up(seq_q, BLOCK_Q) * COLUMNS"
// init = "none"
// [workspace.partial]
// dtype = "float32"
// size = "2 * works * SPLITS * BLOCK_K * HEAD_DIM if SPLIT else 4"
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
// shared = "4 * HEAD_DIM * (KV_STAGES * BLOCK_K + 2 * BLOCK_Q) + 528 * BLOCK_Q + barriers"
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
// Step 23, backward: hopper's backward pass with dQ added from the accumulators. It runs in hopper's place where `when` holds.
//
// What limits hopper there: staged, dQ of a tile takes 32 KB of shared memory. At head dim 128 that is the room of the next tile of K and
// V, which then arrives only when the last products have run. A tile of keys of a short sequence has few tiles of queries to pay for it.
// And a consumer finishes each tile before the next one begins.
//
// What changes: dQ is added from the accumulators in their own layout, by a red.v4 a thread for 8 columns of a warp's rows, 512 bytes side
// by side. That takes a warp longer than a store to shared memory, and it is hidden by the next tile, whose S and dP are in flight when it
// begins. K and V have two stages.
//
// A tile of queries n, as a consumer runs it:
//
//     issue               wait for    compute, while the rest runs
//                         S(n)        P(n)
//     dV += P(n) dO       dP(n)       dS(n), which goes to shared memory too
//     dK += dS(n) Q                   a barrier: the other consumer's dS is there
//     dQ(n) = dS(n) K     dV          (P's registers are free for the next)
//     S(n + 1)            dK, dQ      dQ(n) added in global memory (EARLY eighths of it); the stage of Q and dO is empty
//     dP(n + 1)                       the rest of dQ(n) added
//
// What is added after dP(n + 1) has begun leaves dQ's block of registers before (fa::moved), or dQ and the next dP would be one block too
// many.
//
// What stays: everything else, also the splits where there are few tiles. At head dim 64 without a mask both are equally fast, and this
// one leaves registers for descriptors. Half of the exponentials after the wait for dP, as hopper has them at head dim 64, are 7 to 10 %
// slower here: dV, which runs beside dS, would be cut in two, and its second half would begin after dS (notes). It has no deterministic
// form: turns are the storers', and here the consumers add. With turns it was 4 to 16 % slower than hopper's, and 1 to 4 % faster at 1024
// queries and fewer at head dim 128.
#include <fa/accumulator.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, COLUMNS, WORKSPACE_STATS, WORKSPACE_DQ>;
using Walk = fa::Walk<false>;

constexpr int THREADS = 384, STAGES = 2, SLABS = Tiles::slabs;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of dS^T, in slabs of 64 queries
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, DS_TILE = BLOCK_Q / 64 * K_SLAB, STATS = 2 * BLOCK_Q * 4;
constexpr int ROW_PARTS = Tiles::row_parts, OWN_PARTS = Tiles::parts / 2, PART = Tiles::part;  // dQ of a tile lies in parts of 64 x 64
constexpr int GROUPS = 8 * OWN_PARTS, EARLY_GROUPS = EARLY * OWN_PARTS;  // of 8 columns, of a consumer's part of dQ
constexpr int LAST_SLAB = (COLUMNS - 1) % 64 + 1;  // columns of the last slab
constexpr int STEPS = BLOCK_Q / 16;  // of 16 queries
static_assert(BLOCK_K == 128, "a consumer has 64 keys");
static_assert(EARLY >= 0 && EARLY <= 8, "EARLY counts eighths of dQ");

// Descriptors of K and V stay for a tile of keys. Hoisted out of the loop they cost no instructions in it, but registers, and those are
// there only without a mask. With one they would be spilled, or go back to uniform registers one by one.
constexpr bool DESCRIPTORS_HERE = CAUSAL;

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) { Tiles::prepare<scalar>(args); }

// How many works share a tile of keys. Without SPLIT it is known when this is compiled.
__device__ __forceinline__ int splits_of(const fa::Args& args) { return SPLIT ? args.runtime[RUNTIME_SPLITS] : 1; }
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    return Tiles::work<BLOCK_K>(args, number, args.runtime[RUNTIME_SECTION], splits_of(args));
}

// What a block has in shared memory.
struct Shared {
    unsigned char* k = fa::dynamic_shared_1024();  // [KV_STAGES][SLABS][BLOCK_K][64]; dK in the end
    unsigned char* v = k + KV_STAGES * K_TILE;  // [KV_STAGES][SLABS][BLOCK_K][64]; dV in the end
    unsigned char* q = v + KV_STAGES * K_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* ds = d_o + STAGES * Q_TILE;  // [STAGES][BLOCK_Q / 64][BLOCK_K][64]: dS^T
    unsigned char* stats = ds + STAGES * DS_TILE;  // [STAGES][2][BLOCK_Q]
    fa::Barriers<KV_STAGES>* barriers = reinterpret_cast<fa::Barriers<KV_STAGES>*>(stats + STAGES * STATS);
};

// One thread for each consumer: stores dK and dV.
struct Storer {
    const fa::Args& args;
    const Shared& smem;
    const fa::TensorMap &dk_map, &dv_map;
    int consumer;
    fa::Ring<KV_STAGES> kv{};

    __device__ __forceinline__ fa::Barriers<KV_STAGES>& at() { return *smem.barriers; }

    // The stage of K and V holds dK and dV in the end, and is empty when the stores have read it.
    __device__ __forceinline__ void store_gradients(const Work& work) {
        fa::mbarrier_wait_parity(at().dkv_full[kv.stage()] + consumer, kv.parity());
        const uint32_t own = kv.stage() * K_TILE + consumer * 64 * 128;
        const int row = work.k_first + 64 * consumer;
        for (int slab = 0; slab < SLABS; ++slab) {
            fa::tma_store_4d(&dk_map, smem.k + own + slab * K_SLAB, 64 * slab, row, work.kv_head, work.batch);
            fa::tma_store_4d(&dv_map, smem.v + own + slab * K_SLAB, 64 * slab, row, work.kv_head, work.batch);
        }
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(at().k_full + kv.stage(), kv.parity());
            const int number = at().numbers[kv.stage()];
            if (number < 0) break;
            if (!SPLIT) store_gradients(work_of(args, number));
            fa::mbarrier_arrive(at().kv_empty + kv.stage());
            kv.next();
        }
    }
};

// 64 keys of the block, 16 a warp: their dK and dV, and half of each tile's dQ.
struct Consumer {
    const fa::Args& args;
    const Shared& smem;
    const int consumer, lane = fa::lane_id(), warp = fa::warp_id() % 4, own_keys = 64 * consumer;
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    fa::Ring<KV_STAGES> kv;
    fa::Ring<STAGES> q;  // of Q, dO, their stats, and dS
    Work work{};
    Walk walk{};  // the first tile whose dQ has not been added
    float dk_reg[COLUMNS / 2], dv_reg[COLUMNS / 2], p_reg[BLOCK_Q / 2], ds_reg[BLOCK_Q / 2];
    float dq_reg[OWN_PARTS * 32], late_reg[OWN_PARTS * 32];  // late: what is added behind the next product
    uint32_t p16_reg[STEPS][4], ds16_reg[STEPS][4];

    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block, int number) : args(all), smem(block), consumer(number) {}
    __device__ __forceinline__ fa::Barriers<KV_STAGES>& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }

    // d = A B^T: keys of K or V, queries of a tile of Q or dO
    __device__ __forceinline__ void issue_transposed(float (&d)[BLOCK_Q / 2], unsigned char* a_smem, unsigned char* b_smem) {
        uint64_t a = fa::smem_descriptor_k_major(a_smem + kv.stage() * K_TILE + own_keys * 128);
        if (DESCRIPTORS_HERE) a = fa::descriptor_here(a);
        const uint64_t b = fa::smem_descriptor_k_major(b_smem + q.stage() * Q_TILE);
        fa::issue_abt<scalar, COLUMNS>(d, a, K_SLAB, b, Q_SLAB);
    }
    __device__ __forceinline__ void issue_scores() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        issue_transposed(p_reg, smem.k, smem.q);
    }
    __device__ __forceinline__ void issue_dp() {
        fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        issue_transposed(ds_reg, smem.v, smem.d_o);
    }
    // d += P^T dO or dS^T Q
    __device__ __forceinline__ void issue_gradient(float (&d)[COLUMNS / 2], const uint32_t (&a_reg)[STEPS][4], unsigned char* b_smem,
                                                   bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(b_smem + q.stage() * Q_TILE, Q_SLAB);
        fa::issue_ab<scalar>(d, a_reg, b, accumulate);
    }
    __device__ __forceinline__ void issue_dv(bool accumulate) { issue_gradient(dv_reg, p16_reg, smem.d_o, accumulate); }
    __device__ __forceinline__ void issue_dk(bool accumulate) { issue_gradient(dk_reg, ds16_reg, smem.q, accumulate); }
    // This consumer's part of dQ = dS K: a slab of it at head dim 128, of which the second may be narrower.
    __device__ __forceinline__ void issue_dq() {
        const uint64_t a = fa::smem_descriptor_mn_major(smem.ds + q.stage() * DS_TILE + consumer % ROW_PARTS * K_SLAB, K_SLAB);
        const uint64_t b = fa::smem_descriptor_mn_major(smem.k + kv.stage() * K_TILE + consumer / ROW_PARTS * OWN_PARTS * K_SLAB, K_SLAB);
        if (COLUMNS % 64 == 0 || consumer == 0) fa::issue_atb<scalar, BLOCK_K>(dq_reg, a, b);
        else fa::issue_atb<scalar, BLOCK_K>(fa::first_of<LAST_SLAB / 2>(dq_reg), a, b);
    }

    // On the diagonal of the causal mask the second 64 keys may be seen by no query of a tile: then only the other's dS counts.
    __device__ __forceinline__ bool sees_nothing() {
        return CAUSAL && fa::visible_keys(args, (work.edge + 1) * BLOCK_Q - 1) <= work.k_first + own_keys;
    }
    __device__ __forceinline__ void mask() {
        const int q_first = walk.queries(work) * BLOCK_Q, key = work.k_first + own_keys;
        if (key + 64 <= fa::visible_keys(args, q_first)) return;
        fa::clear_hidden(p_reg, args, q_first, key);
    }
    __device__ __forceinline__ void share_ds(const uint32_t (&operand)[STEPS][4]) {
        fa::store_operand(smem.ds + q.stage() * DS_TILE + own_keys * 128 + warp * 16 * 128, K_SLAB, operand);
    }
    // Behind it the dS of both consumers is there, and both have read the other stage. One may come from a tile that the other skips.
    __device__ __forceinline__ void wait_for_other() {
        fa::fence_proxy_async_shared();
        fa::barrier_sync(1, 256);
    }
    __device__ __forceinline__ const float* stats() { return reinterpret_cast<const float*>(smem.stats + q.stage() * STATS); }
    // Waits for S; it becomes P and an operand.
    __device__ __forceinline__ void softmax() {
        fa::wgmma_wait<1>(p_reg);
        fa::exponentiate_columns(p_reg, scale_log2e, stats());
        mask();
        fa::pack_operand<scalar>(p16_reg, p_reg);
    }
    // Waits for dP; it becomes dS, an operand and, for dQ, a tile in shared memory.
    __device__ __forceinline__ void make_ds() {
        fa::wgmma_wait<1>(ds_reg);
        fa::score_gradient(ds_reg, p_reg, stats() + BLOCK_Q);
        fa::pack_operand<scalar>(ds16_reg, ds_reg);
        share_ds(ds16_reg);
    }
    // A tile of queries whose S and dP are in flight: until all its products are.
    __device__ __forceinline__ void issue_tile(bool accumulate) {
        softmax();
        issue_dv(accumulate);
        make_ds();
        issue_dk(accumulate);
        wait_for_other();
        issue_dq();
        fa::wgmma_wait<2>(p16_reg);  // P's registers are free
        q.next();
    }
    // All products of a tile are complete, and its stage is empty. Where the first group of 8 columns of its dQ is added:
    __device__ __forceinline__ float* begin_sum() {
        release(at().q_empty + (q.stage() ^ 1));
        const int number = Tiles::number(args, work.batch, walk.head, walk.queries(work));
        walk.next(work);
        return Tiles::dq(args, number) + consumer * OWN_PARTS * PART + threadIdx.x % 128 * 4;
    }
    // Adds some of its groups.
    __device__ __forceinline__ void add_dq(float* dq, int first, int end, float (&values)[OWN_PARTS * 32]) {
        if (COLUMNS % 64 == 0 || consumer == 0) Tiles::add_groups(dq, values, first, end);
        else Tiles::add_groups(dq, values, first, min(end, LAST_SLAB / 8));
    }
    // The rest of a tile's products and its dQ, behind the next tile's.
    __device__ __forceinline__ void issue_next() {
        issue_scores();
        fa::wgmma_wait<1>(dq_reg, ds16_reg);
        float* dq = begin_sum();
        add_dq(dq, 0, EARLY_GROUPS, dq_reg);
        fa::schedule_fence();
        fa::moved(late_reg, dq_reg, 4 * EARLY_GROUPS);
        issue_dp();
        fa::schedule_fence();
        add_dq(dq, EARLY_GROUPS, GROUPS, late_reg);
    }
    __device__ __forceinline__ void skip_tile() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        const uint32_t zeros[STEPS][4] = {};
        share_ds(zeros);
        wait_for_other();
        issue_dq();
        q.next();
        fa::wgmma_wait<0>(dq_reg);
        add_dq(begin_sum(), 0, GROUPS, dq_reg);
    }
    // dK and dV of one of several splits to its workspace; launch 3 adds them.
    __device__ __forceinline__ void store_partials(bool seen) {
        float* partial = Tiles::partial<BLOCK_K, WORKSPACE_PARTIAL>(args, at().numbers[kv.stage()]);
        Tiles::store_partials<BLOCK_K>(partial, consumer, consumer, BLOCK_K / 64, dk_reg, dv_reg, seen);
        fa::mbarrier_arrive(at().kv_empty + kv.stage());
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them. seen: whether a query sees any of the keys.
    __device__ __forceinline__ void stage_gradients(bool seen) {
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t own = kv.stage() * K_TILE + consumer * 64 * 128 + warp * 16 * 128;
        fa::store_rows<scalar>(smem.v + own, K_SLAB, dv_reg, one);
        fa::barrier_sync(1, 256);  // the other consumer's dQ has read K
        fa::store_rows<scalar>(smem.k + own, K_SLAB, dk_reg, scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dkv_full[kv.stage()] + consumer);
        fa::mbarrier_arrive(at().kv_empty + kv.stage());  // the storers arrive later; this is for racecheck, which asks it of every reader
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(at().k_full + kv.stage(), kv.parity());
            const int number =
                __shfl_sync(fa::full_warp, at().numbers[kv.stage()], 0);  // known to the compiler as the same in the whole warp
            if (number < 0) break;
            work = work_of(args, number);
            walk = Walk::begin(work);
            int n = work.count > 0 && sees_nothing();
            if (n > 0) skip_tile();
            const bool seen = n < work.count;
            if (seen) {
                issue_scores();
                fa::mbarrier_wait_parity(at().v_full + kv.stage(), kv.parity());
                issue_dp();
                for (bool accumulate = false;; accumulate = true) {
                    issue_tile(accumulate);
                    if (++n == work.count) break;
                    issue_next();
                }
                fa::wgmma_wait<0>(dq_reg, ds16_reg, dk_reg, dv_reg);
                add_dq(begin_sum(), 0, GROUPS, dq_reg);
            } else fa::mbarrier_wait_parity(at().v_full + kv.stage(), kv.parity());
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
        if (threadIdx.x == 0)
            Tiles::produce<BLOCK_K, Walk, KV_STAGES>(args, {q_map, k_map, v_map, d_o_map, stats_map}, smem, counters, work_of,
                                                     splits_of(args));
        else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) Storer{args, smem, dk_map, dv_map, int(threadIdx.x / 32) - 1}.run();
    } else {
        fa::setmaxnreg_inc<REGISTERS>();
        if (COLUMNS % 64 == 0) Consumer(args, smem, warpgroup - 1).run();
        else if (warpgroup == 1) Consumer(args, smem, 0).run();  // code of their own: the products for dQ differ in width
        else Consumer(args, smem, 1).run();
    }
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) {
    Tiles::convert<scalar, BLOCK_K, false, SPLIT, WORKSPACE_PARTIAL>(args, args.runtime[RUNTIME_SECTION], splits_of(args));
}

// Launch 4, of a problem with sinks.
extern "C" __global__ void __launch_bounds__(1024) dsinks(const __grid_constant__ fa::Args args) { Tiles::dsinks(args); }
