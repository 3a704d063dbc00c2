// /// kernel
// title = "wgmma and TMA: tensor cores read shared memory by themselves, one thread copies whole tiles"
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
// BLOCK_K = "128 if HEAD_DIM == 64 else 96 if HEAD_DIM == 128 else 32"  # as many as leave room for two blocks on a multiprocessor
// STAGES = 2  # tiles of K, and of V, in shared memory
// [tensor_map.q]
// tensor = "Q"
// box = [64, 64, 1, 1]
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
// grid = ["ceil_div(seq_q, 64)", "heads_q", "batch"]
// block = 128
// shared = "2 * HEAD_DIM * (64 + 2 * STAGES * BLOCK_K) + 8 * (1 + 2 * STAGES)"
// ///
//
// Step 16, read against step 15. wgmma instead of mma.sync, and TMA instead of cp.async: on Hopper (sm_90) the tensor cores read operands
// from shared memory by themselves, and one thread copies whole tiles. In step 15 every operand passes through registers: for the 256 mma
// of a tile a warp issues 80 ldmatrix, computes their addresses, holds the fragments, and stands still while mma.sync multiplies. And its
// 128 threads copy a tile in chunks of 16 bytes, each with an address and a comparison with the tensor's end.
//
//   - wgmma is one product of 64 x N x 16 by the four warps of a warpgroup. B, and A unless it is in registers, is named by a descriptor:
//     a number that says where a tile begins (fa/wgmma.cuh). The product is asynchronous: issued, committed, waited for.
//     S = Q K^T takes both operands from shared memory. O += P V takes P from registers: as in step 11 the accumulators of S, packed, are
//     an A operand as they lie.
//   - TMA copies a box of a tensor. The tensor map, which the host has encoded, has addresses, strides, bounds and the swizzle (step 12's,
//     which wgmma knows too), so one thread starts a tile with HEAD_DIM / 64 instructions. What lies outside the tensor arrives as zeros,
//     and is left out when O leaves in the same way.
//   - An mbarrier in shared memory says that a tile has arrived. The producer announces its bytes and the copy counts them down. Who waits
//     names the parity of the phase whose end it waits for; it flips each time the stage is filled again.
//
// The schedule is step 15's, with S one tile ahead of V. A wgmma has 64 rows, so a warpgroup has 64 queries: at head dim 128 a thread holds
// O in 64 registers, not 128, and S of 96 keys in 48. Time runs downwards, n is a tile of keys:
//
//     thread 0                           all four warps                                        tensor cores
//     start Q, K(0), V(0), K(1), V(1)    wait for Q and K(0); issue S(0) = Q K(0)^T            S(0)
//                                        wait for S(0); __syncthreads
//     start K(2)                         softmax: P(0)                                         idle
//     main loop, n = 1, 2, ...
//                                        wait for V(n - 1); issue O += P(n - 1) V(n - 1)       O
//                                        wait for K(n); issue S(n) = Q K(n)^T                  S(n)
//                                        wait for both products; __syncthreads
//     start V(n + 1), K(n + 2)           softmax: P(n)                                         idle
//     epilogue                           the last O += P V; O / row sum through the shared memory of Q, by TMA
//
// A warpgroup leaves the tensor cores idle during its softmax. A multiprocessor has two blocks, and while one is in its softmax the other
// may multiply. Nothing arranges that they take turns.
//
// The limits that remain. A block copies K and V for 64 queries, in step 15 for 128: the L2 cache delivers twice the bytes, and each costs
// energy. All warps meet at a __syncthreads a tile, because thread 0 may not overwrite a stage that another warp still reads. And the
// warps that compute the softmax also start the copies. Step 17 gives each task warps of its own.
#include <fa/accumulator.cuh>
#include <fa/key_tiles.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int BLOCK_Q = 64, THREADS = 128;
constexpr int SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes
constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8

using Tiles = fa::KeyTiles<BLOCK_Q, BLOCK_K>;
using Work = Tiles::Work;

// The block's shared memory: tiles, and for each an mbarrier whose phase ends when the tile has arrived.
struct Shared {
    unsigned char q[SLABS * Q_SLAB];  // [SLABS][BLOCK_Q][64]; O in the epilogue
    unsigned char k[STAGES][SLABS * K_SLAB], v[STAGES][SLABS * K_SLAB];  // each [SLABS][BLOCK_K][64]
    uint64_t q_full, k_full[STAGES], v_full[STAGES];
};

// Tile n of K or V lies in a stage of the ring, and its arrival ends a phase of this parity.
__device__ __forceinline__ uint32_t stage_of(int n) { return uint32_t(n) % STAGES; }
__device__ __forceinline__ uint32_t parity_of(int n) { return uint32_t(n) / STAGES % 2; }

// Starts the copies: one thread's task.
struct Producer {
    Shared& shared;
    const Work& work;
    int kv_head;
    const fa::TensorMap &q_map, &k_map, &v_map;

    __device__ __forceinline__ void load_q() {
        fa::tma_load_tile<Q_SLAB>(shared.q, q_map, shared.q_full, work.q_first, work.head, work.batch);
    }
    __device__ __forceinline__ void load_k(int n) {
        if (n < work.tiles)
            fa::tma_load_tile<K_SLAB>(shared.k[stage_of(n)], k_map, shared.k_full[stage_of(n)], n * BLOCK_K, kv_head, work.batch);
    }
    __device__ __forceinline__ void load_v(int n) {
        if (n < work.tiles)
            fa::tma_load_tile<K_SLAB>(shared.v[stage_of(n)], v_map, shared.v_full[stage_of(n)], n * BLOCK_K, kv_head, work.batch);
    }
};

// Attention of 64 queries: a warpgroup's task. A thread has parts of two rows, `row` and row + 8.
struct Consumer {
    Shared& shared;
    const Work& work;
    const fa::Args& args;
    int warp_row = fa::warp_id() * 16;
    int first = work.q_first, row = first + warp_row + fa::fragment_row();  // first: of the 64 queries
    unsigned char* q_smem = shared.q;
    // The largest S is the largest logit only where the scale is positive: the sign of a negative one is applied to S.
    float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;
    float score_reg[BLOCK_K / 2], out_reg[HEAD_DIM / 2] = {};
    uint32_t p_reg[BLOCK_K / 16][4];
    float reference[2] = {-1e30f, -1e30f}, row_sum[2] = {};  // P = 2^(scale_log2e S - reference)

    // Starts S = Q K(n)^T.
    __device__ __forceinline__ void issue_scores(int n) {
        const uint64_t q_operand = fa::smem_descriptor_k_major(q_smem);
        const uint64_t k_operand = fa::smem_descriptor_k_major(shared.k[stage_of(n)]);
        fa::mbarrier_wait_parity(&shared.k_full[stage_of(n)], parity_of(n));
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    }
    // Starts O += P V(n).
    __device__ __forceinline__ void issue_output(int n) {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.v[stage_of(n)], K_SLAB);
        fa::mbarrier_wait_parity(&shared.v_full[stage_of(n)], parity_of(n));
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_rs<scalar, true>(out_reg, p_reg[step], fa::descriptor_advance(v_operand, step * 2048), true);
        fa::wgmma_commit();
    }
    __device__ __forceinline__ void wait_scores() { fa::wgmma_wait<0>(score_reg); }
    __device__ __forceinline__ void wait_both() { fa::wgmma_wait<0>(score_reg, out_reg, p_reg); }
    __device__ __forceinline__ void wait_output() { fa::wgmma_wait<0>(out_reg, p_reg); }

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

extern "C" __global__ void __launch_bounds__(THREADS)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        fa::mbarrier_init(&shared.q_full, 1);  // one thread arrives, and announces bytes
        for (int i = 0; i < STAGES; ++i) fa::mbarrier_init(&shared.k_full[i], 1), fa::mbarrier_init(&shared.v_full[i], 1);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const Work work = Tiles::of_block(args);
    Producer producer{shared, work, fa::kv_head_of(args, work.head), q_map, k_map, v_map};
    Consumer consumer{shared, work, args};

    // Prologue: the copies of Q and of the first tiles; S(0) = Q K(0)^T
    if (threadIdx.x == 0) {
        producer.load_q();
        for (int n = 0; n < STAGES; ++n) producer.load_k(n), producer.load_v(n);
    }
    fa::mbarrier_wait_parity(&shared.q_full, 0);
    consumer.issue_scores(0);
    consumer.wait_scores();
    __syncthreads();  // all warps have read K(0)
    if (threadIdx.x == 0) producer.load_k(STAGES);
    consumer.softmax(0);

    // Main loop over tiles of keys
    for (int n = 1; n < work.tiles; ++n) {
        consumer.issue_output(n - 1);
        consumer.issue_scores(n);
        consumer.wait_both();
        __syncthreads();  // all warps have read V(n - 1) and K(n)
        if (threadIdx.x == 0) producer.load_v(n - 1 + STAGES), producer.load_k(n + STAGES);
        consumer.softmax(n);
    }

    // Epilogue: the last product, O / row sum and the logsumexp
    consumer.issue_output(work.tiles - 1);
    consumer.wait_output();
    consumer.store(o_map);
}
