// /// kernel
// title = "specialised warps: a producer that only copies, two consumers that share K and V"
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
// Step 17, read against step 16. Specialised warps: a producer that only starts copies, and two consumers that only compute. In step 16 the
// threads that compute also start the copies, so all four warps meet at a __syncthreads a tile: none may run ahead of the slowest one, and
// the copies of a tile start only when the last warp has come. Nothing ties a copy to a computation but two facts: the tile has arrived,
// and the stage may be overwritten. Each becomes an mbarrier of the stage:
//
//   full    its phase ends when the tile's bytes have arrived. Consumers wait for it (step 16 has it already)
//   empty   its phase ends when all warps of all consumers have arrived, one lane each: they have read the tile. The producer waits for it
//
// The producer is one thread. It walks through all tiles and runs ahead until the stages are full; it and each consumer have a place in the
// ring of stages of their own, and the parity of its round (fa/stage.cuh). The consumers are two warpgroups of 64
// queries each, which share K and V: a tile is copied once for 128 queries, and half the bytes cross the L2 cache. Neither waits for the
// other, unless it is STAGES tiles ahead. Time runs downwards:
//
//     producer                           consumer (each of two)                                tensor cores
//     start Q                            wait for Q and K(0); issue S(0) = Q K(0)^T            S(0)
//     start K(0), V(0), K(1), V(1)       wait for S(0); release K(0); softmax: P(0)            the other consumer's products, or idle
//     main loop, n = 2, 3, ...           main loop, n = 1, 2, ...
//     wait for K(n - 2)'s release,       wait for V(n - 1); issue O += P(n - 1) V(n - 1)       O
//       start K(n)                       wait for K(n); issue S(n) = Q K(n)^T                  S(n)
//     wait for V(n - 2)'s release,       wait for both products; release V(n - 1), K(n)
//       start V(n)                       softmax: P(n)                                         the other consumer's products, or idle
//                                        epilogue as in step 16
//
// Registers: a launch gives every thread the same number, 168 of 65,536 for 384 threads. The producer needs a few, and a consumer at head
// dim 256 more than 168: O 128, S 32, P 16 and what it computes with. setmaxnreg moves them: the producer's warpgroup keeps 40 a thread,
// each consumer gets 232. It is the whole warpgroup's instruction, which is why the producer takes 128 threads of which one works.
//
// Tiles of keys: a block has the multiprocessor for itself, so K and V have 128 keys a tile at head dim 128, where step 16 had room for 96.
//
// The limits that remain. While both consumers are in their softmax the tensor cores idle; while both multiply, the units of the softmax
// do. Both begin with the same tile at the same time, and nothing but chance makes them alternate. Step 18 makes them take turns. And a
// consumer's softmax still waits for all of its own products: step 21.
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
    fa::mbarrier_wait_parity(&shared.q_full, 0);
    consumer.issue_scores();
    consumer.wait_scores();
    consumer.release_k();
    consumer.softmax(0);

    // Main loop over tiles of keys
    for (int n = 1; n < work.tiles; ++n) {
        consumer.issue_output();
        consumer.issue_scores();
        consumer.wait_both();
        consumer.release_v(), consumer.release_k();
        consumer.softmax(n);
    }

    // Epilogue: the last product, O / row sum and the logsumexp
    consumer.issue_output();
    consumer.wait_output();
    consumer.store(o_map);
}
