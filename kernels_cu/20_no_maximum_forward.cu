// /// kernel
// title = "no maximum: the reference of a row is the maximum of its first tile, and the row sum tells when it is too small"
// dtypes = ["bfloat16"]
// head_dims = [64, 128, 256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"
// [tile]
// BLOCK_K = "128 if HEAD_DIM <= 128 else 64"
// STAGES = 2  # tiles of K, and of V, in shared memory
// Q_STAGES = "1 if HEAD_DIM == 256 else 2"  # tiles of Q
// SECTION = 16  # MB of K and V of the heads that run at the same time, under the causal mask
// [workspace.counters]
// dtype = "float32"  # two integers
// size = "2"
// init = "zero_once"
// [tensor_map.q]
// tensor = "Q"
// box = [64, 128, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.o]
// tensor = "O"
// box = [64, 16, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "forward"
// grid = "min(sms, ceil_div(seq_q, 128) * heads_q * batch)"
// block = 384
// shared = "4 * HEAD_DIM * (64 * Q_STAGES + STAGES * BLOCK_K) + 32 * (Q_STAGES + STAGES)"
// ///
//
// Step 20, read against step 19: no maximum. Online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) needs a reference m for which
// exp2(S - m) stays in range. The row maximum is one, not the only one. bfloat16 and float32 have eight bits of exponent: P of 2^-100 or
// 2^30 is as exact as P of 1. So the row maximum of a work's first tile is the reference of the whole row, and no later tile computes one.
// What is gone, of an online softmax that rescales lazily already: a comparison a score, and the wait of the first exponential for the last
// score.
//
// The row sum, which is needed anyway, tells when the reference has become too small. Beyond 2^30 (LIMIT), or NaN, the warp computes the
// tile's scores again: by mma.sync, from Q and K, which still lie in shared memory. It takes their maximum as the new reference, and O and
// the row sum are rescaled. That is rare. So a stage of K is released after this check, not when its product is complete. The row sum is at
// least 1, because the first tile has a P of 1: the reference cannot be too large.
//
//     consumer                                                       step 19
//     wait for both products; release V(n - 1)                       and K(n)
//     P(n) = exp2(S(n) - reference), sum of P(n)                     maximum of S(n), vote, perhaps rescale; exponentials
//     vote on the sum: perhaps S(n) again, a larger reference
//     release K(n); pack P(n)
//
// bfloat16 only. In float16 P ends at 65504 and the limit is 2^15 (hopper has both).
// SOFTMAX.md has the argument, the cost in accuracy, what it gains and how to check it.
//
// The limits that remain. A consumer waits for both of its products before its softmax, which only the other consumer's products hide. At
// head dim 64 those take half as long as the softmax. Step 21 lets a consumer's own second product run on.
#include <fa/accumulator.cuh>
#include <fa/atomic.cuh>
#include <fa/key_tiles.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int CONSUMERS = 2;  // warpgroups
constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes
constexpr float LIMIT = 1073741824;  // 2^30: of a tile's row sum

using Tiles = fa::KeyTiles<BLOCK_Q, BLOCK_K>;
using Work = Tiles::Work;  // tiles: 0 where there is no more work

// The block's shared memory: tiles, and mbarriers for each: a phase of `full` ends when the tile has arrived, a phase of `empty` when all
// warps have read it.
struct Shared {
    unsigned char q[Q_STAGES][SLABS * Q_SLAB];  // each [SLABS][BLOCK_Q][64]; O in the epilogue
    unsigned char k[STAGES][SLABS * K_SLAB], v[STAGES][SLABS * K_SLAB];  // each [SLABS][BLOCK_K][64]
    uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    Work works[Q_STAGES];  // whose Q is there: the producer's divisions are done once
};

// Starts the copies: one thread's task.
struct Producer {
    Shared& shared;
    const fa::TensorMap &q_map, &k_map, &v_map;
    Work work = {};
    int kv_head = 0;
    fa::RingPlace<Q_STAGES> q;
    fa::RingPlace<STAGES> k, v;

    // The work comes with its Q; where there is no more work, alone.
    __device__ __forceinline__ void load_q() {
        fa::mbarrier_wait_parity(&shared.q_empty[q.stage], q.parity ^ 1);
        shared.works[q.stage] = work;
        if (work.tiles) fa::tma_load_tile<Q_SLAB>(shared.q[q.stage], q_map, shared.q_full[q.stage], work.q_first, work.head, work.batch);
        else fa::mbarrier_arrive(&shared.q_full[q.stage]);
        q.next();
    }
    // The tile before in the stage has been released: for the first STAGES tiles a wait for the phase before the first, which passes.
    __device__ __forceinline__ void load_k(int n) {
        fa::mbarrier_wait_parity(&shared.k_empty[k.stage], k.parity ^ 1);
        fa::tma_load_tile<K_SLAB>(shared.k[k.stage], k_map, shared.k_full[k.stage], n * BLOCK_K, kv_head, work.batch);
        k.next();
    }
    __device__ __forceinline__ void load_v(int n) {
        fa::mbarrier_wait_parity(&shared.v_empty[v.stage], v.parity ^ 1);
        fa::tma_load_tile<K_SLAB>(shared.v[v.stage], v_map, shared.v_full[v.stage], n * BLOCK_K, kv_head, work.batch);
        v.next();
    }
    // All works of the block: its own number first, then what the counter gives. A number is fetched one work ahead: the counter's answer
    // takes a microsecond.
    __device__ __forceinline__ void load_works(const fa::Args& args, int* counters) {
        int number = blockIdx.x;
        while (number < Tiles::works(args)) {
            work = Tiles::of_number<4 * HEAD_DIM>(args, number, SECTION), kv_head = fa::kv_head_of(args, work.head);
            load_q();
            number = gridDim.x + atomicAdd(counters, 1);
#pragma unroll 1  // the producer has few registers
            for (int n = 0; n < work.tiles; ++n) load_k(n), load_v(n);
        }
        work = {};
        load_q();
        // The last block to finish leaves the counters as it found them, for the next launch.
        fa::reset_by_last(counters, gridDim.x);
    }
};

// Attention of 64 queries of each work: a warpgroup's task. A thread has parts of two rows, `row` and row + 8.
struct Consumer {
    Shared& shared;
    const fa::Args& args;
    int index, warp_row = fa::warp_id() % 4 * 16;  // index: of the block's consumers
    // The largest S is the largest logit only where the scale is positive: the sign of a negative one is applied to S.
    float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;
    float score_reg[BLOCK_K / 2], out_reg[HEAD_DIM / 2];
    uint32_t p_reg[BLOCK_K / 16][4];
    float reference[2], row_sum[2];  // P = 2^(scale_log2e S - reference)
    float sum[2], factor[2];  // of one tile: the sum of its P, and what O is rescaled with where `grows`
    bool grows;
    Work work;
    int first, row;  // first: of the 64 queries
    fa::RingPlace<Q_STAGES> q;
    fa::RingPlace<STAGES> k, v;

    __device__ __forceinline__ unsigned char* q_smem() const { return shared.q[q.stage] + index * 64 * 128; }

    // Waits for the next work and its Q; false: there is none.
    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(&shared.q_full[q.stage], q.parity);
        work = shared.works[q.stage];
        first = work.q_first + 64 * index, row = first + warp_row + fa::fragment_row();
        return work.tiles > 0;
    }

    // Starts S = Q K^T with the next tile of K.
    __device__ __forceinline__ void issue_scores() {
        const uint64_t q_operand = fa::smem_descriptor_k_major(q_smem());
        const uint64_t k_operand = fa::smem_descriptor_k_major(shared.k[k.stage]);
        fa::mbarrier_wait_parity(&shared.k_full[k.stage], k.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    }
    // Starts O += P V with tile n of V; a work's first one begins O.
    __device__ __forceinline__ void issue_output(int n) {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.v[v.stage], K_SLAB);
        fa::mbarrier_wait_parity(&shared.v_full[v.stage], v.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_rs<scalar, true>(out_reg, p_reg[step], fa::descriptor_advance(v_operand, step * 2048), n > 0 || step > 0);
        fa::wgmma_commit();
    }
    __device__ __forceinline__ void wait_scores() { fa::wgmma_wait<0>(score_reg); }
    __device__ __forceinline__ void wait_both() { fa::wgmma_wait<0>(score_reg, out_reg, p_reg); }
    __device__ __forceinline__ void wait_output() { fa::wgmma_wait<0>(out_reg, p_reg); }

    // This warp has read the tile. Its products are complete; the producer waits for all warps.
    __device__ __forceinline__ void release_k() { fa::release_stage(shared.k_empty, k); }
    __device__ __forceinline__ void release_v() { fa::release_stage(shared.v_empty, v); }

    // Consumers issue products in turn: a named barrier each, at which it waits for its turn and the other passes it on.
    __device__ __forceinline__ void begin_turn() { fa::bar_sync(1 + index, 256); }
    __device__ __forceinline__ void end_turn() { fa::bar_arrive(1 + (index + 1) % CONSUMERS, 256); }

    // The sign of the scale, and -inf for keys that a query does not see.
    __device__ __forceinline__ void mask(int n) {
        fa::apply_sign(score_reg, args.scale);
        if ((n + 1) * BLOCK_K > fa::visible_keys(args, first)) fa::mask_scores(score_reg, args, row, n * BLOCK_K);
    }
    // The first tile of a work: its row maximum is the reference of the whole row.
    __device__ __forceinline__ void first_softmax() {
        mask(0);
        fa::first_reference(reference, score_reg, scale_log2e);
        fa::exponentiate(score_reg, row_sum, scale_log2e, reference);
    }
    // S of tile n becomes P.
    __device__ __forceinline__ void softmax(int n) {
        mask(n);
        fa::exponentiate(score_reg, sum, scale_log2e, reference);
    }
    // Where a row sum says that the reference of tile n was too small, the warp computes the tile's scores again.
    __device__ __forceinline__ void check_sum(int n) {
        grows = __any_sync(fa::full_warp, !(max(sum[0], sum[1]) <= LIMIT) || sum[0] != sum[0] || sum[1] != sum[1]);
        if (!grows) return;
        fa::multiply_abt_again<scalar, SLABS>(score_reg, fa::smem_u32(q_smem()) + warp_row * 128, Q_SLAB, fa::smem_u32(shared.k[k.stage]),
                                              K_SLAB);
        __syncwarp();  // all lanes have read K when the first one releases it
        float maximum[2];
        mask(n);
        fa::local_row_max(maximum, score_reg);
        fa::raise_reference(reference, row_sum, factor, maximum, scale_log2e);
        fa::exponentiate(score_reg, sum, scale_log2e, reference);
    }
    // O is rescaled where a reference has been raised.
    __device__ __forceinline__ void rescale() {
        if (grows) fa::scale_rows(out_reg, factor);
        row_sum[0] += sum[0], row_sum[1] += sum[1];
    }
    __device__ __forceinline__ void pack() { fa::pack_operand<scalar>(p_reg, score_reg); }
    // O / row sum, through the warp's own rows of Q's shared memory, whose stage is empty when the store has read it; and the logsumexp.
    __device__ __forceinline__ void store(const fa::TensorMap& o_map) {
        float inverse[2];
        fa::finish_row_sum(row_sum, inverse);
        fa::store_rows<scalar>(q_smem() + warp_row * 128, Q_SLAB, out_reg, inverse);
        fa::fence_proxy_async_shared();
        __syncwarp();
        if (fa::lane_id() == 0) {
            fa::tma_store_tile<SLABS, Q_SLAB>(o_map, q_smem() + warp_row * 128, first + warp_row, work.head, work.batch);
            fa::bulk_commit(), fa::bulk_wait_read<0>();
        }
        fa::mbarrier_arrive(&shared.q_empty[q.stage]);  // every thread: each has read for itself whose Q it is
        q.next();
        fa::store_logsumexp(args, work.batch, work.head, row, reference, row_sum);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        fa::mbarrier_init_ring(shared.q_full, shared.q_empty, 128 * CONSUMERS);
        fa::mbarrier_init_ring(shared.k_full, shared.k_empty, 4 * CONSUMERS);  // each warp of each consumer arrives
        fa::mbarrier_init_ring(shared.v_full, shared.v_empty, 4 * CONSUMERS);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<40>();
        if (threadIdx.x != 0) return;
        Producer producer{shared, q_map, k_map, v_map};
        producer.load_works(args, static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]));
        return;
    }
    fa::setmaxnreg_inc<232>();
    Consumer consumer{shared, args, fa::warpgroup_index() - 1};

    if (consumer.index == 1) consumer.end_turn();  // the first turn is consumer 0's
    while (consumer.take_work()) {
        // Prologue: S(0) = Q K(0)^T
        consumer.begin_turn();
        consumer.issue_scores();
        consumer.end_turn();
        consumer.wait_scores();
        consumer.first_softmax();
        consumer.release_k();
        consumer.pack();

        // Main loop over tiles of keys
        for (int n = 1; n < consumer.work.tiles; ++n) {
            consumer.begin_turn();
            consumer.issue_output(n - 1);
            consumer.issue_scores();
            consumer.end_turn();
            consumer.wait_both();
            consumer.release_v();
            consumer.softmax(n);
            consumer.check_sum(n);
            consumer.rescale();
            consumer.release_k();
            consumer.pack();
        }

        // Epilogue: the last product, O / row sum and the logsumexp
        consumer.issue_output(consumer.work.tiles - 1);
        consumer.wait_output();
        consumer.release_v();
        consumer.store(o_map);
    }
}
