// /// kernel
// title = "ping-pong: one consumer multiplies while the other computes its softmax"
// dtypes = ["float16", "bfloat16"]
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
// grid = ["ceil_div(seq_q, 128)", "heads_q", "batch"]
// block = 384
// shared = "2 * HEAD_DIM * (128 + 2 * STAGES * BLOCK_K) + 8 * (1 + 4 * STAGES)"
// ///
//
// Step 18, read against step 17. Ping-pong: the two consumers take turns with the tensor cores, so that one multiplies while the other
// computes its softmax (FlashAttention-3: Shah et al. 2024, arXiv 2407.08608, section 3.1). In step 17 each issues its products when it
// comes to them. If both come at once, the tensor cores divide themselves between the two, both products end late and together, and then
// both consumers are in their softmax, with no product in flight. For 64 queries and 128 keys at head dim 128 the products take the tensor
// cores 1024 cycles. The exponentials take 512 (8192, at 16 a cycle), the whole softmax perhaps 800. Two of each are 2850 cycles where the
// consumers go in step, and 2050 where they alternate.
//
// A turn is the products of one iteration: O += P(n - 1) V(n - 1) and S(n) = Q K(n)^T. Two named barriers pass it on. A consumer waits at
// its own (bar_sync: 256 threads, its 128 and the other's 128) and arrives at the other's when it has issued its products (bar_arrive does
// not wait). Issued is enough: what is issued first has a head start of at least the hand-over, and the tensor cores have no gap meanwhile.
// (How they divide themselves among products of several warpgroups is not documented; no counter was read.) The epilogue's product has no
// turn. Before the first turn consumer 1 arrives for consumer 0. Time runs downwards:
//
//     consumer 0                         consumer 1                              tensor cores
//     turn: issue O(n - 1), S(n)         softmax: P(n - 1)                       O(n - 1), S(n) of consumer 0
//     wait for both; release             turn: issue O(n - 1), S(n)              O(n - 1), S(n) of consumer 1
//     softmax: P(n)                      wait for both; release
//     turn: issue O(n), S(n + 1)         softmax: P(n)                           O(n), S(n + 1) of consumer 0
//     ...                                ...
//
// The producer is step 17's. It does not know of turns: a stage is empty when both consumers have released it.
//
// The limits that remain. The tensor cores have no gap only where a softmax takes no longer than the other consumer's products. At head dim
// 64 it does: they take half the time, the softmax the same. A consumer's softmax overlaps with the other's products, never with its own.
// And a block ends with an epilogue in which it multiplies nothing, while the next block has not yet loaded anything. The next three steps
// take these up: blocks that stay, and load the next Q, K and V meanwhile (18); a shorter softmax (19); a consumer's softmax under its own
// second product (20).
#include <fa/accumulator.cuh>
#include <fa/key_tiles.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int CONSUMERS = 2;  // warpgroups
constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes
constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8

using Tiles = fa::KeyTiles<BLOCK_Q, BLOCK_K>;
using Work = Tiles::Work;

// The block's shared memory: tiles, and mbarriers for each: a phase of `full` ends when the tile has arrived, a phase of `empty` when all
// warps have read it.
struct Shared {
    unsigned char q[SLABS * Q_SLAB];  // [SLABS][BLOCK_Q][64]; O in the epilogue
    unsigned char k[STAGES][SLABS * K_SLAB], v[STAGES][SLABS * K_SLAB];  // each [SLABS][BLOCK_K][64]
    uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// Starts the copies: one thread's task.
struct Producer {
    Shared& shared;
    const Work& work;
    int kv_head;
    const fa::TensorMap &q_map, &k_map, &v_map;
    fa::RingPlace<STAGES> k, v;

    __device__ __forceinline__ void load_q() {
        fa::tma_load_tile<Q_SLAB>(shared.q, q_map, shared.q_full, work.q_first, work.head, work.batch);
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
};

// Attention of 64 queries: a warpgroup's task. A thread has parts of two rows, `row` and row + 8.
struct Consumer {
    Shared& shared;
    const Work& work;
    const fa::Args& args;
    int index, warp_row = fa::warp_id() % 4 * 16;  // index: of the block's consumers
    int first = work.q_first + 64 * index, row = first + warp_row + fa::fragment_row();  // first: of the 64 queries
    unsigned char* q_smem = shared.q + index * 64 * 128;
    // The largest S is the largest logit only where the scale is positive: the sign of a negative one is applied to S.
    float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;
    float score_reg[BLOCK_K / 2], out_reg[HEAD_DIM / 2] = {};
    uint32_t p_reg[BLOCK_K / 16][4];
    fa::RingPlace<STAGES> k, v;
    float reference[2] = {-1e30f, -1e30f}, row_sum[2] = {};  // P = 2^(scale_log2e S - reference)

    // Starts S = Q K^T with the next tile of K.
    __device__ __forceinline__ void issue_scores() {
        const uint64_t q_operand = fa::smem_descriptor_k_major(q_smem);
        const uint64_t k_operand = fa::smem_descriptor_k_major(shared.k[k.stage]);
        fa::mbarrier_wait_parity(&shared.k_full[k.stage], k.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    }
    // Starts O += P V with the next tile of V.
    __device__ __forceinline__ void issue_output() {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.v[v.stage], K_SLAB);
        fa::mbarrier_wait_parity(&shared.v_full[v.stage], v.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_rs<scalar, true>(out_reg, p_reg[step], fa::descriptor_advance(v_operand, step * 2048), true);
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
    // S of tile n becomes P: step 13's online softmax, which rescales lazily.
    __device__ __forceinline__ void softmax(int n) {
        mask(n);
        fa::softmax_lazily(score_reg, out_reg, reference, row_sum, scale_log2e, SLACK);
        fa::pack_operand<scalar>(p_reg, score_reg);
    }
    // O / row sum, through the warp's own rows of Q's shared memory, and the logsumexp.
    __device__ __forceinline__ void store(const fa::TensorMap& o_map) {
        float inverse[2];
        fa::finish_row_sum(row_sum, inverse);
        fa::store_rows<scalar>(q_smem + warp_row * 128, Q_SLAB, out_reg, inverse);
        fa::fence_proxy_async_shared();
        __syncwarp();
        if (fa::lane_id() == 0) {
            fa::tma_store_tile<SLABS, Q_SLAB>(o_map, q_smem + warp_row * 128, first + warp_row, work.head, work.batch);
            fa::bulk_commit(), fa::bulk_wait_read<0>();  // shared memory is the block's until then
        }
        fa::store_logsumexp(args, work.batch, work.head, row, reference, row_sum);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        fa::mbarrier_init(&shared.q_full, 1);  // one thread arrives, and announces bytes
        fa::mbarrier_init_ring(shared.k_full, shared.k_empty, 4 * CONSUMERS);  // each warp of each consumer arrives
        fa::mbarrier_init_ring(shared.v_full, shared.v_empty, 4 * CONSUMERS);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const Work work = Tiles::of_block(args);
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<40>();
        if (threadIdx.x != 0) return;
        Producer producer{shared, work, fa::kv_head_of(args, work.head), q_map, k_map, v_map};
        producer.load_q();
        for (int n = 0; n < work.tiles; ++n) producer.load_k(n), producer.load_v(n);
        return;
    }
    fa::setmaxnreg_inc<232>();
    Consumer consumer{shared, work, args, fa::warpgroup_index() - 1};

    // Prologue: S(0) = Q K(0)^T
    if (consumer.index == 1) consumer.end_turn();  // the first turn is consumer 0's
    fa::mbarrier_wait_parity(&shared.q_full, 0);
    consumer.begin_turn();
    consumer.issue_scores();
    consumer.end_turn();
    consumer.wait_scores();
    consumer.release_k();
    consumer.softmax(0);

    // Main loop over tiles of keys
    for (int n = 1; n < work.tiles; ++n) {
        consumer.begin_turn();
        consumer.issue_output();
        consumer.issue_scores();
        consumer.end_turn();
        consumer.wait_both();
        consumer.release_v(), consumer.release_k();
        consumer.softmax(n);
    }

    // Epilogue: the last product, O / row sum and the logsumexp
    consumer.issue_output();
    consumer.wait_output();
    consumer.store(o_map);
}
