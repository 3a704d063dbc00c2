// /// kernel
// title = "Hopper at head dim 64: 256 keys a block, so dQ of a tile of queries is added half as often"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = false
// logsumexp_gradient = true
// auto = "not causal and seq_q >= 4096 and works >= 6 * sms"  # settled 1.03 to 1.09 of hopper (experiments/hopper_backward); fewer works are not measured
// arithmetic = "p16"
// spill_bytes_allowed = 48  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// [tile]
// BLOCK_Q = 128
// BLOCK_K = 256  # 128 a consumer, in two blocks of 64
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask
// [let]
// works = "ceil_div(seq_kv, BLOCK_K) * heads_kv * batch"  # tiles of keys
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count: 4M -5 %, 34M +2 % (docs/notes/22_hopper.md)
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
// grid = "min(sms, ceil_div(seq_kv, BLOCK_K) * heads_kv * batch)"
// block = 384
// overlaps = "few_rows"
// shared = "4 * HEAD_DIM * (BLOCK_K + 3 * BLOCK_Q) + 2 * BLOCK_Q * (BLOCK_K + 8) + 128"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// grid = ["BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = 256
// maps = []
// ///
//
// Step 24, backward: hopper's backward pass at head dim 64, with 256 keys in a block instead of 128.
//
// What limits hopper there: a tile of 128 queries and 128 keys is 10.5 MFLOP, for which a block reads 32 KB of Q and dO from L2 and adds
// 32 KB of dQ in global memory. An H200 is at its power limit, and these bytes are 29 % of the energy of the tile (docs/notes).
//
// What changes: a block has twice as many keys, so a FLOP costs half as many bytes of Q, dO and dQ. dK and dV of 128 keys are 128
// registers of a consumer. That leaves 112 for a tile's scores, and hopper's S and dP alone are 128. So a consumer takes a tile of 128
// queries in four pieces of 64 keys x 64 queries, two blocks of keys for each half of the queries. S and dP of a piece are 64 registers, P
// and dS as operands 32. There is no room for two pieces, but the products of a piece run while the other consumer computes.
//
// What stays: a producer, two storers and two consumers, persistent blocks that take tiles of keys from a counter, scores made transposed,
// so that P^T and dS^T are operands from registers. dS^T goes to shared memory for dQ alone. dQ of a tile is made once, over all 256 keys,
// by each consumer for 64 queries. It goes through shared memory to a storer, which adds it by a bulk reduction.
//
//     issue               wait for    compute, while the rest runs
//                         S(b)        P(b), an exponential a score
//     dV += P(b) dO       dP(b)       dS(b), which goes to shared memory too
//     dK += dS(b) Q       dV          (P's registers are free for the next)
//     S(b + 1)            dK          (dS's registers are free)
//     dP(b + 1)
//
// and after dK of the last piece of a tile:
//
//     issue               wait for    compute, while the rest runs
//                                     a barrier: the other consumer's dS is there
//     dQ = dS K           dK
//     S(next tile)        dQ          the stage of Q and dO is empty, dS is too; dQ goes to shared memory, where the storer takes it
//     dP(next tile)
//
// dS^T has one stage. So a consumer does not write it before the other's dQ of the tile before has read it: barriers 2 and 3, on which
// each consumer waits in its first piece, and at which the other arrives when its dQ is complete.
//
// Shared memory, in KB: K 32, V 32, Q and dO of two tiles 64, dS^T 64, dQ 32, logsumexp and delta of two tiles 2; together 226 of 227. K
// and V have one stage, so the next tile of keys is loaded only when dK and dV, which take its place, have been stored. That is paid for
// once a tile of keys, and short sequences pay it often. A tail of up to 255 keys costs as much as 256, and the last round of larger tiles
// leaves more multiprocessors idle. `auto` took this step without a mask from 2048 keys on, until works were fetched late (step 22): since
// then hopper is 1 to 7 % ahead there too (docs/notes). It has no deterministic form: storers add to dQ as they come, without the turns of
// hopper, which its storers take.
#include <fa/accumulator.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, HEAD_DIM, WORKSPACE_STATS, WORKSPACE_DQ>;
using Walk = fa::Walk<false>;

constexpr int THREADS = 384, STAGES = 2, BLOCKS = 2, PIECES = 4;  // blocks of 64 keys of a consumer; pieces of 64 x 64 of its scores
constexpr uint32_t Q_TILE = BLOCK_Q * 128, K_TILE = BLOCK_K * 128;  // bytes, in rows of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t DS_HALF = BLOCK_K * 128, STATS = 2 * BLOCK_Q * 4;  // dS^T lies in halves of 64 queries
constexpr int PARTS = Tiles::parts, PART = Tiles::part;  // dQ of a tile lies in parts of 64 queries, one a consumer
static_assert(HEAD_DIM == 64 && PARTS == 2 && BLOCK_K == 2 * 64 * BLOCKS,
              "two consumers, each with blocks of 64 keys: BLOCK_K is a multiple of 128");

__device__ __forceinline__ Work work_of(const fa::Args& args, int number) { return Tiles::work<BLOCK_K>(args, number, SECTION); }

// What a block has in shared memory.
struct Shared {
    unsigned char* k = fa::dynamic_shared_1024();  // [BLOCK_K][64]; dK in the end
    unsigned char* v = k + K_TILE;  // [BLOCK_K][64]; dV in the end
    unsigned char* q = v + K_TILE;  // [STAGES][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [STAGES][BLOCK_Q][64]
    unsigned char* ds = d_o + STAGES * Q_TILE;  // [2][BLOCK_K][64]: dS^T
    unsigned char* stats = ds + 2 * DS_HALF;  // [STAGES][2][BLOCK_Q]
    float* dq = reinterpret_cast<float*>(stats + STAGES * STATS);  // [2][8 groups of 8 columns][128 threads][4]
    fa::Barriers<1>* barriers = reinterpret_cast<fa::Barriers<1>*>(dq + PARTS * PART);
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
            fa::bulk_add_f32(Tiles::dq(args, Tiles::number(args, work.batch, walk.head, walk.queries(work))) + consumer * PART,
                             smem.dq + consumer * PART, PART);
            fa::bulk_commit();
            fa::bulk_wait_read<0>();
            fa::mbarrier_arrive(at().dq_empty + consumer);
        }
    }
    // K and V hold dK and dV in the end, and are empty when the stores have read them.
    __device__ __forceinline__ void store_gradients(const Work& work) {
        fa::mbarrier_wait_parity(at().dkv_full[0] + consumer, kv.parity());
        for (int block = 0; block < BLOCKS; ++block) {
            const int row = 64 * (BLOCKS * consumer + block);
            fa::tma_store_4d(&dk_map, smem.k + row * 128, 0, work.k_first + row, work.kv_head, work.batch);
            fa::tma_store_4d(&dv_map, smem.v + row * 128, 0, work.k_first + row, work.kv_head, work.batch);
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

// BLOCKS blocks of 64 keys, 16 of each a warp: their dK and dV, and half of each tile's dQ, 64 queries.
struct Consumer {
    const fa::Args& args;
    const Shared& smem;
    const int consumer, lane = fa::lane_id(), warp = fa::warp_id() % 4, own_keys = 64 * BLOCKS * consumer;
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    fa::Ring<1> kv;
    fa::Ring<STAGES> q;  // of Q, dO and their stats
    Work work{};
    Walk walk{};  // the tile whose scores are at hand
    float dk_reg[BLOCKS][32], dv_reg[BLOCKS][32], p_reg[32], ds_reg[32], dq_reg[32];
    uint32_t p16_reg[4][4], ds16_reg[4][4];

    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block, int number) : args(all), smem(block), consumer(number) {}
    __device__ __forceinline__ fa::Barriers<1>& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }
    // The first row of a piece in a tile of Q or dO.
    __device__ __forceinline__ uint32_t at_queries(int piece) { return q.stage() * Q_TILE + piece / BLOCKS * 64 * 128; }
    // d = A B^T: 64 keys of K or V, 64 queries of a tile of Q or dO
    __device__ __forceinline__ void issue_transposed(float (&d)[32], unsigned char* a_smem, unsigned char* b_smem, int piece) {
        const uint64_t a = fa::descriptor_here(fa::smem_descriptor_k_major(a_smem + (own_keys + 64 * (piece % BLOCKS)) * 128));
        const uint64_t b = fa::smem_descriptor_k_major(b_smem + at_queries(piece));
        fa::issue_abt<scalar, HEAD_DIM>(d, a, K_TILE, b, Q_TILE);
    }
    __device__ __forceinline__ void issue_scores(int piece) {
        if (piece == 0) fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        issue_transposed(p_reg, smem.k, smem.q, piece);
    }
    __device__ __forceinline__ void issue_dp(int piece) {
        if (piece == 0) fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        issue_transposed(ds_reg, smem.v, smem.d_o, piece);
    }
    // d += P^T dO or dS^T Q, of 64 queries
    __device__ __forceinline__ void issue_gradient(float (&d)[32], const uint32_t (&a_reg)[4][4], unsigned char* b_smem, int piece,
                                                   bool accumulate) {
        fa::issue_ab<scalar>(d, a_reg, fa::smem_descriptor_mn_major(b_smem + at_queries(piece), Q_TILE), accumulate);
    }
    // This consumer's part of dQ = dS K: 64 queries
    __device__ __forceinline__ void issue_dq() {
        const uint64_t a = fa::descriptor_here(fa::smem_descriptor_mn_major(smem.ds + consumer * DS_HALF, DS_HALF));
        const uint64_t b = fa::descriptor_here(fa::smem_descriptor_mn_major(smem.k, K_TILE));
        fa::issue_atb<scalar, BLOCK_K>(dq_reg, a, b);
    }

    __device__ __forceinline__ void mask(int piece) {
        const int q_first = walk.queries(work) * BLOCK_Q + piece / BLOCKS * 64, key = work.k_first + own_keys + 64 * (piece % BLOCKS);
        if (key + 64 > fa::visible_keys(args, q_first)) fa::clear_hidden(p_reg, args, q_first, key);
    }
    // A piece whose S and dP are in flight: until its dV and dK are.
    __device__ __forceinline__ void issue_piece(int piece, bool accumulate) {
        const float* stats = reinterpret_cast<const float*>(smem.stats + q.stage() * STATS) + piece / BLOCKS * 64;
        fa::wgmma_wait<1>(p_reg, p16_reg, ds16_reg);
        fa::exponentiate_columns(p_reg, scale_log2e, stats);
        mask(piece);
        fa::pack_operand<scalar>(p16_reg, p_reg);
        issue_gradient(dv_reg[piece % BLOCKS], p16_reg, smem.d_o, piece, accumulate);
        fa::wgmma_wait<1>(ds_reg);
        fa::score_gradient(ds_reg, p_reg, stats + BLOCK_Q);
        fa::pack_operand<scalar>(ds16_reg, ds_reg);
        if (piece == 0) wait_for_place();
        fa::store_operand(smem.ds + piece / BLOCKS * DS_HALF + (own_keys + 64 * (piece % BLOCKS) + warp * 16) * 128, DS_HALF, ds16_reg);
        issue_gradient(dk_reg[piece % BLOCKS], ds16_reg, smem.q, piece, accumulate);
    }
    // dS of the last tile may be overwritten: the other consumer has made its dQ of it, and says so by release_ds.
    __device__ __forceinline__ void wait_for_place() { fa::bar_sync(2 + consumer, 256); }
    __device__ __forceinline__ void release_ds() { fa::bar_arrive(3 - consumer, 256); }
    // Behind it the dS of both consumers is there.
    __device__ __forceinline__ void wait_for_other() {
        fa::fence_proxy_async_shared();
        fa::bar_sync(1, 256);
    }
    // A tile whose first S and dP are in flight: until its last dV and dK and its dQ are.
    __device__ __forceinline__ void issue_tile(bool accumulate) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            issue_piece(piece, accumulate || piece >= BLOCKS);
            if (piece + 1 < PIECES) {
                fa::wgmma_wait<1>(p16_reg);
                issue_scores(piece + 1);
                fa::wgmma_wait<1>(ds16_reg);  // there are no registers for another 16
                issue_dp(piece + 1);
            }
        }
        wait_for_other();
        issue_dq();
        fa::wgmma_wait<1>(p16_reg, ds16_reg);
        q.next();
        walk.next(work);
    }
    __device__ __forceinline__ void release_queries() { release(at().q_empty + (q.stage() ^ 1)); }  // those of the tile before
    // dQ of the tile before is complete, and goes to the storer.
    __device__ __forceinline__ void stage_dq() {
        release_ds();
        fa::mbarrier_wait_parity(at().dq_empty + consumer, q.position % 2);  // that of the tile before has been read
        Tiles::store_parts(smem.dq + consumer * PART, 1, dq_reg);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dq_full + consumer);
    }
    // The next tile's first products begin behind this one's dQ.
    __device__ __forceinline__ void issue_next() {
        issue_scores(0);
        fa::wgmma_wait<1>(dq_reg, p16_reg, ds16_reg);
        release_queries();
        stage_dq();
        fa::schedule_fence();
        issue_dp(0);
        fa::schedule_fence();
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them. seen: whether a query sees any of the keys.
    __device__ __forceinline__ void stage_gradients(bool seen) {
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t own = (own_keys + warp * 16) * 128;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) fa::store_rows<scalar>(smem.v + own + block * 64 * 128, K_TILE, dv_reg[block], one);
        fa::barrier_sync(1, 256);  // the other consumer's dQ has read K
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) fa::store_rows<scalar>(smem.k + own + block * 64 * 128, K_TILE, dk_reg[block], scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dkv_full[0] + consumer);
    }
    __device__ __forceinline__ void run() {
        release_ds();
        while (true) {
            fa::mbarrier_wait_parity(at().k_full, kv.parity());
            const int number = __shfl_sync(fa::full_warp, at().numbers[0], 0);  // known to the compiler as the same in the whole warp
            __syncwarp();
            if (number < 0) break;
            fa::mbarrier_arrive(at().kv_empty);
            work = work_of(args, number);
            walk = Walk::begin(work);
            const bool seen = work.count > 0;
            if (seen) {
                issue_scores(0);
                fa::mbarrier_wait_parity(at().v_full, kv.parity());
                issue_dp(0);
                int n = 0;
                for (bool accumulate = false;; accumulate = true) {
                    issue_tile(accumulate);
                    if (++n == work.count) break;
                    issue_next();
                }
                fa::wgmma_wait<0>(dq_reg, ds16_reg, dk_reg[0], dk_reg[BLOCKS - 1], dv_reg[0], dv_reg[BLOCKS - 1]);
                release_queries();
                stage_dq();
            } else fa::mbarrier_wait_parity(at().v_full, kv.parity());
            stage_gradients(seen);
            kv.next();
        }
    }
};

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) { Tiles::prepare<scalar>(args); }

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
