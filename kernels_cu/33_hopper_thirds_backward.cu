// /// kernel
// title = "Hopper at head dims to 192 with V to 128: 128 keys a block, each consumer one and a half slabs of dQ"
// dtypes = ["float16", "bfloat16"]
// head_dims = [192]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = false
// logsumexp_gradient = true
// head_dim_v = true
// widest_v = 128
// auto = "head_dim > 128 and works >= 4 * sms"  # hopper_keys divides fewer works; where it is ahead is not measured below 15 * sms
// arithmetic = "p16"
// spill_bytes_allowed = 48  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// runtime = ["SECTION"]
// [tile]
// BLOCK_Q = 64
// BLOCK_K = 128  # 64 a consumer
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask
// [let]
// COLUMNS = 192  # of Q, K and their gradients
// COLUMNS_V = 128  # of V, dO and dV
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count, as in hopper
// tiles = "2 * (COLUMNS + COLUMNS_V) * (BLOCK_K + 2 * BLOCK_Q)"  # bytes of K, V, and two of Q and dO
// works = "ceil_div(seq_kv, BLOCK_K) * heads_kv * batch"  # tiles of keys
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
// grid = "min(sms, works)"
// block = 384
// overlaps = "few_rows"
// shared = "tiles + 2 * BLOCK_Q * BLOCK_K + 4 * BLOCK_Q * COLUMNS + 16 * BLOCK_Q + 128"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// grid = ["COLUMNS // 64 * ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = 256
// maps = []
// ///
//
// Step 33, read against 22 (hopper), whose backward pass ends at head dim 128. DeepSeek's models have 192 columns of Q and K and 128 of V. Step 25
// (hopper_keys), which takes them, keeps 64 keys a block: dQ of every tile of queries is added once for 64 keys. Here a block keeps 128, as
// in step 22, 64 a consumer, so dQ is added, and Q and dO are read, half as often.
//
// What does not fit, and what is done about it. dK and dV of 64 keys are 96 + 64 registers of a thread. S and dP of 64 queries, 32 each, do not
// fit beside them: with both whole the compiler waits for every product. So dP is made in two halves of 32 queries, and dS of the first
// half is an operand before dP of the second is issued:
//
//     S, dP first half | P, dS first half | dP second half, dV first | P, dS second half | dV second, dQ slab, dK | dQ middle
//
// dQ has three slabs of 64 columns for two consumers: each makes a slab of its own (accumulators of P's size) and, when that is staged, 32
// columns of the middle one, the thirds of the name. The operand of these is K from the middle of a swizzled row on: a descriptor may begin 64 bytes
// inside a row of 128 where its 32 columns end in it.
//
// Shared memory, in KB: K 48, V 32, two stages of Q 48 and of dO 32, dS 16, dQ 48: 224 of 227. So dS has one place, and a barrier of each
// consumer says that the other has made its dQ of the tile before. dK and dV leave through the places of K and V.
//
// A tile of 64 queries takes 3328 cycles of products and reads and writes 536 KB of shared memory, 4288 cycles; of hopper_keys two tiles of 64 keys
// 3328 and 4608, and twice the reductions. Measured (experiments/hopper_backward/dims_192.txt, experiments/models): 1.35 to 1.45 times as
// fast as hopper_keys, 1.08 to 1.09 times as fast as FlashAttention-4 under the causal mask at S2048.
//
// No mask or score of the problem's own, no sinks, no fixed order of the additions: those stay with hopper_keys.
#include <fa/accumulator.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, COLUMNS, WORKSPACE_STATS, WORKSPACE_DQ, COLUMNS_V>;
using Walk = fa::Walk<false>;

constexpr int THREADS = 384, STAGES = 2;
constexpr int SLABS = Tiles::slabs, SLABS_V = Tiles::slabs_v;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of dS^T
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, STATS = 2 * BLOCK_Q * 4;
constexpr uint32_t DO_TILE = SLABS_V * Q_SLAB, V_TILE = SLABS_V * K_SLAB;
constexpr int OWN_DQ = BLOCK_Q * COLUMNS / 2, GROUP = BLOCK_Q * 8;  // floats of dQ: a consumer's, and of 8 columns
constexpr int STEPS = BLOCK_Q / 16, HALF = BLOCK_Q / 2;  // of 16 queries; queries of half of a tile
static_assert(BLOCK_Q == 64 && BLOCK_K == 128 && SLABS == 3 && SLABS_V == 2,
              "a consumer has 64 keys, and of dQ a slab and half of the middle one");

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) { Tiles::prepare<scalar>(args); }

__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    return Tiles::work<BLOCK_K, false, false>(args, number, args.runtime[RUNTIME_SECTION]);
}

// What a block has in shared memory.
struct Shared {
    unsigned char* k = fa::dynamic_shared_1024();  // [SLABS][BLOCK_K][64]; dK in the end
    unsigned char* v = k + K_TILE;  // [SLABS_V][BLOCK_K][64]; dV in the end
    unsigned char* q = v + V_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [STAGES][SLABS_V][BLOCK_Q][64]
    unsigned char* ds = d_o + STAGES * DO_TILE;  // [BLOCK_K][64]: dS^T
    unsigned char* stats = ds + K_SLAB;  // [STAGES][2][BLOCK_Q]
    float* dq = reinterpret_cast<float*>(stats + STAGES * STATS);  // [COLUMNS / 8 groups of 8 columns][128 threads][4]
    fa::Barriers<1>* barriers = reinterpret_cast<fa::Barriers<1>*>(dq + 2 * OWN_DQ);
};

// One thread for each consumer: adds the staged dQ, stores dK and dV.
struct Storer {
    const fa::Args& args;
    const Shared& smem;
    const fa::TensorMap &dk_map, &dv_map;
    int consumer;
    fa::Ring<1> kv{};
    uint32_t tile = 0;  // of queries, counted through

    __device__ __forceinline__ fa::Barriers<1>& at() { return *smem.barriers; }

    __device__ __forceinline__ void add_dq(const Work& work) {
        Walk walk = Walk::begin(work);
#pragma unroll 1
        for (int n = 0; n < work.count; ++n, walk.next(work), ++tile) {
            fa::mbarrier_wait_parity(at().dq_full + consumer, tile % 2);
            const int number = Tiles::number(args, work.batch, walk.query_head(work), walk.queries(work));
            fa::bulk_add_f32(Tiles::dq(args, number) + consumer * OWN_DQ, smem.dq + consumer * OWN_DQ, OWN_DQ);
            fa::bulk_commit();
            fa::bulk_wait_read<0>();
            fa::mbarrier_arrive(at().dq_empty + consumer);
        }
    }
    // K and V hold dK and dV in the end, and are empty when the stores have read them.
    __device__ __forceinline__ void store_gradients(const Work& work) {
        fa::mbarrier_wait_parity(at().dkv_full[0] + consumer, kv.parity());
        const int row = 64 * consumer;
        for (int slab = 0; slab < SLABS; ++slab) {
            const uint32_t from = slab * K_SLAB + row * 128;
            fa::tma_store_4d(&dk_map, smem.k + from, 64 * slab, work.k_first + row, work.kv_head, work.batch);
            if (slab < SLABS_V) fa::tma_store_4d(&dv_map, smem.v + from, 64 * slab, work.k_first + row, work.kv_head, work.batch);
        }
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(at().k_full, kv.parity());
            const int number = at().numbers[0];
            if (number < 0) break;
            const Work work = work_of(args, number);
            add_dq(work);
            store_gradients(work);
            fa::mbarrier_arrive(at().kv_empty);
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
    fa::Ring<1> kv;
    fa::Ring<STAGES> q;  // of Q, dO and their stats
    Work work{};
    Walk walk{};  // the first tile whose dQ has not been staged
    float dk_reg[COLUMNS / 2], dv_reg[COLUMNS_V / 2], p_reg[BLOCK_Q / 2], ds_reg[HALF / 2];  // dS: of half of the queries
    float dq_reg[32], middle_reg[16];  // its slab of dQ, and its half of the middle one
    uint32_t p16_reg[2][STEPS / 2][4], ds16_reg[2][STEPS / 2][4];  // of each half

    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block, int number) : args(all), smem(block), consumer(number) {}
    __device__ __forceinline__ fa::Barriers<1>& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }
    __device__ __forceinline__ const float* stats() { return reinterpret_cast<const float*>(smem.stats + q.stage() * STATS); }

    // d = A B^T: keys of K or V, queries of a tile of Q or dO from b_smem on
    template <int Columns, int R> __device__ __forceinline__ void issue_transposed(float (&d)[R], unsigned char* a_smem,
                                                                                   unsigned char* b_smem) {
        const uint64_t a = fa::descriptor_here(fa::smem_descriptor_k_major(a_smem + own_keys * 128));  // hoisted it would be spilled
        fa::issue_abt<scalar, Columns>(d, a, K_SLAB, fa::smem_descriptor_k_major(b_smem), Q_SLAB);
    }
    __device__ __forceinline__ void issue_scores() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        issue_transposed<COLUMNS>(p_reg, smem.k, smem.q + q.stage() * Q_TILE);
    }
    // Of the first or the second half of the queries.
    __device__ __forceinline__ void issue_dp(int half) {
        if (half == 0) fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        issue_transposed<COLUMNS_V>(ds_reg, smem.v, smem.d_o + q.stage() * DO_TILE + half * HALF * 128);
    }
    __device__ __forceinline__ void issue_dv(int half, bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(smem.d_o + q.stage() * DO_TILE + half * HALF * 128, Q_SLAB);
        fa::issue_ab<scalar>(dv_reg, p16_reg[half], b, accumulate);
    }
    __device__ __forceinline__ void issue_dk(bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(smem.q + q.stage() * Q_TILE, Q_SLAB);
        fa::issue_ab<scalar>(dk_reg, ds16_reg[0], b, accumulate);
        fa::issue_ab<scalar>(dk_reg, ds16_reg[1], fa::descriptor_advance(b, HALF * 128), true);
    }
    // Columns of dQ = dS K, from a place in a slab of K on.
    template <int R> __device__ __forceinline__ void issue_dq(float (&d)[R], uint32_t place) {
        const uint64_t a = fa::descriptor_here(fa::smem_descriptor_mn_major(smem.ds, K_SLAB));
        const uint64_t b = fa::descriptor_here(fa::smem_descriptor_mn_major(smem.k + place, K_SLAB));
        fa::issue_atb<scalar, BLOCK_K>(d, a, b);
    }
    __device__ __forceinline__ void issue_slab() { issue_dq(dq_reg, consumer * 2 * K_SLAB); }
    __device__ __forceinline__ void issue_middle() { issue_dq(middle_reg, K_SLAB + consumer * 64); }

    // On the diagonal of the causal mask the second 64 keys may be seen by no query of a tile: then only the other's dS counts.
    __device__ __forceinline__ bool sees_nothing() {
        return CAUSAL && fa::visible_keys(args, (work.edge + 1) * BLOCK_Q - 1) <= work.k_first + own_keys;
    }
    template <int Half> __device__ __forceinline__ void make_p() {
        fa::exponentiate_columns(p_reg, scale_log2e, stats(), Half * STEPS / 2, (Half + 1) * STEPS / 2);
        const int q_first = walk.queries(work) * BLOCK_Q + Half * HALF, key = work.k_first + own_keys;
        if (key + 64 > fa::visible_keys(args, q_first)) fa::clear_hidden(fa::part_of<HALF / 2, Half * HALF / 2>(p_reg), args, q_first, key);
    }
    template <int Half> __device__ __forceinline__ void make_ds() {
        fa::score_gradient(ds_reg, fa::part_of<HALF / 2, Half * HALF / 2>(p_reg), stats() + BLOCK_Q + Half * HALF);
        fa::pack_operand<scalar>(ds16_reg[Half], ds_reg);
        fa::pack_operand<scalar>(p16_reg[Half], fa::part_of<HALF / 2, Half * HALF / 2>(p_reg));
    }
    __device__ __forceinline__ void share_ds(int half, const uint32_t (&operand)[STEPS / 2][4]) {
        fa::store_operand(smem.ds + (own_keys + warp * 16) * 128, K_SLAB, operand, half * HALF);
    }
    // dS of the tile before may be overwritten: the other consumer has made its dQ of it, and said so by release_ds.
    __device__ __forceinline__ void wait_for_place() { fa::bar_sync(2 + consumer, 256); }
    __device__ __forceinline__ void release_ds() { fa::bar_arrive(3 - consumer, 256); }
    // Behind it the dS of both consumers is there. One may come from a tile that the other skips.
    __device__ __forceinline__ void wait_for_other() {
        fa::fence_proxy_async_shared();
        fa::barrier_sync(1, 256);
    }
    __device__ __forceinline__ void release_queries() { release(at().q_empty + (q.stage() ^ 1)); }  // those of the tile before

    __device__ __forceinline__ void full_tile(bool accumulate) {
        issue_scores();
        issue_dp(0);
        fa::wgmma_wait<1>(p_reg);
        make_p<0>();
        fa::wgmma_wait<0>(ds_reg);
        make_ds<0>();
        fa::schedule_fence();
        issue_dp(1);
        issue_dv(0, accumulate);
        wait_for_place();
        share_ds(0, ds16_reg[0]);
        make_p<1>();
        fa::schedule_fence();
        fa::wgmma_wait<0>(ds_reg, p16_reg[0]);
        make_ds<1>();
        fa::schedule_fence();
        issue_dv(1, true);
        share_ds(1, ds16_reg[1]);
        wait_for_other();
        fa::wgmma_wait<0>(p16_reg[1]);
        issue_slab();
        issue_dk(accumulate);
        q.next();
        fa::wgmma_wait<2>(dq_reg);
        stage_slab();
        fa::schedule_fence();
        issue_middle();
        fa::wgmma_wait<0>(middle_reg, ds16_reg[0], ds16_reg[1], dk_reg, dv_reg);
        release_queries();
        release_ds();
        stage_middle();
        fa::schedule_fence();
    }
    // dQ goes to the storer.
    __device__ __forceinline__ void stage_slab() {
        fa::mbarrier_wait_parity(at().dq_empty + consumer, q.position % 2);  // that of the tile before has been read
        Tiles::store_parts(smem.dq + consumer * (OWN_DQ + 4 * GROUP), 1, dq_reg);
    }
    __device__ __forceinline__ void stage_middle() {
        Tiles::store_parts(smem.dq + consumer * OWN_DQ + (1 - consumer) * 8 * GROUP, 1, middle_reg);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dq_full + consumer);
        walk.next(work);
    }
    __device__ __forceinline__ void skip_tile() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        const uint32_t zeros[STEPS / 2][4] = {};
        wait_for_place();
        share_ds(0, zeros), share_ds(1, zeros);
        wait_for_other();
        issue_slab();
        issue_middle();
        q.next();
        fa::wgmma_wait<0>(dq_reg, middle_reg);
        release_queries();
        release_ds();
        stage_slab();
        stage_middle();
    }
    // Slab by slab: packed all at once, they would be more registers than there are.
    template <int R> __device__ __forceinline__ void store_slabs(unsigned char* to, float (&x)[R], const float (&factor)[2]) {
        fa::store_rows<scalar>(to, K_SLAB, fa::part_of<32, 0>(x), factor);
        fa::schedule_fence();
        fa::store_rows<scalar>(to + K_SLAB, K_SLAB, fa::part_of<32, 32>(x), factor);
        fa::schedule_fence();
        if constexpr (R > 64) fa::store_rows<scalar>(to + 2 * K_SLAB, K_SLAB, fa::part_of<32, 64>(x), factor);
        fa::schedule_fence();
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them. seen: whether a query sees any of the keys.
    __device__ __forceinline__ void stage_gradients(bool seen) {
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t own = (own_keys + warp * 16) * 128;
        store_slabs(smem.v + own, dv_reg, one);
        fa::barrier_sync(1, 256);  // the other consumer's dQ has read K
        store_slabs(smem.k + own, dk_reg, scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dkv_full[0] + consumer);
        fa::mbarrier_arrive(at().kv_empty);  // the storers arrive later; this is for racecheck, which asks it of every reader
    }
    __device__ __forceinline__ void run() {
        release_ds();
        while (true) {
            fa::mbarrier_wait_parity(at().k_full, kv.parity());
            const int number = __shfl_sync(fa::full_warp, at().numbers[0], 0);  // known to the compiler as the same in the whole warp
            if (number < 0) break;
            work = work_of(args, number);
            walk = Walk::begin(work);
            fa::mbarrier_wait_parity(at().v_full, kv.parity());
            const int unseen = work.count > 0 && sees_nothing();
            if (unseen) skip_tile();
            for (int n = unseen; n < work.count; ++n) full_tile(n > unseen);
            stage_gradients(unseen < work.count);
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
        if (threadIdx.x == 0) Tiles::produce<BLOCK_K, Walk, 1>(args, {q_map, k_map, v_map, d_o_map, stats_map}, smem, counters, work_of);
        else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) Storer{args, smem, dk_map, dv_map, int(threadIdx.x / 32) - 1}.run();
    } else {
        fa::setmaxnreg_inc<REGISTERS>();
        Consumer(args, smem, warpgroup - 1).run();
    }
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) { Tiles::convert<scalar>(args); }
