// /// kernel
// title = "Q in registers, tiles of K and V twice as deep in its place; lazy rescaling of O"
// dtypes = ["float16", "bfloat16"]
// head_dims = [32, 64, 128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"
// aliases = ["kernel_mma_qreg"]
// [tile]
// WARP_ROWS = 32  # queries of a warp
// WARPS = 4
// BLOCK_K = 64
// STEP_K = "64 if HEAD_DIM <= 64 else 16"  # keys of a softmax step: the registers that are left for S
// BLOCKS = 2      # on a multiprocessor, for the compiler: how many registers a thread may have
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * HEAD_DIM * max(WARPS * WARP_ROWS, 2 * BLOCK_K)"
// ///
//
// Step 13, read against step 12. Q in registers. In step 12 a third of each warp's shared-memory reads fetch the same 32 x 128 elements of
// Q again for every 32 keys. The work of a warp on 32 keys takes 192 cycles of the multiprocessor's shared memory and about 200 of its
// tensor cores: neither pipe is saturated, and each waits for the other in turn. Moving Q brings three gains:
//
//   1. Q is loaded once, as fragments, into registers: 64 of them at head dim 128. Shared memory now needs 128 cycles.
//   2. The shared memory of Q is reused for K and V, so BLOCK_K doubles to 64: half the barriers per key, and half as many waits for
//      global memory. (FlashAttention-2's work partition makes it possible: warps divide the queries among them, not the keys, so no warp
//      reads another's Q.)
//   3. In the epilogue the same memory is free again. O goes through it, so that neighbouring lanes store 16 bytes each, whole lines of
//      global memory. Stored directly from the fragments, as in step 12, each store of a warp writes 16 bytes in each of 8 rows: half
//      a sector.
//
// The price is register pressure. At head dim 128 O and Q of 32 queries take 192 of the 255 registers of a thread, and S of 64 keys would
// be another 64: it would not fit, and what does not fit is spilled to local memory. So the main loop divides a tile into softmax steps of
// 16 keys (STEP_K), for which S takes 16 registers. (At head dim 64 there is room for 64 keys, and a step is the tile.) In the last tile,
// and under the causal mask, steps in which every key is masked are skipped.
//
// Lazy rescaling makes the short steps affordable. With four times as many steps the online softmax would rescale O four times as often:
// 128 multiplications a thread for 64 mma instructions a warp, all dependent on a row maximum that takes two shuffles. That cost more than
// the three gains: 261 TFLOP/s where step 12 had 288, when this was tried in earlier forms of both (B4 H16 S4096 D128). But the softmax is
// correct whatever value is subtracted from the scores, not only for the row maximum, as long as exp does not overflow, because row sum
// and O are made of the same P. The value stays what it was until some P of the warp would exceed 2^8; only then row maximum, row sum and
// O are updated as before. With ordinary data that happens in the first steps and hardly ever again. Every other step costs one
// `__any_sync` instead. P is at most 256, which 16-bit types hold with the same relative precision as 1. (FlashAttention-4 does this.)
//
// The limit that remains: the tensor cores idle while a tile is copied, unless the other block on the multiprocessor multiplies meanwhile.
#include <fa/epilogue.cuh>

using scalar = fa::DTYPE;

constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = STEP_K / 8, COLUMNS = HEAD_DIM / 8;
static_assert(BLOCK_K % STEP_K == 0, "a tile of keys is whole steps of the softmax");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM]; O in the epilogue
    const fa::uint32_t k_smem = q_smem;                              // [BLOCK_K][HEAD_DIM], when Q has been read
    const fa::uint32_t v_smem = k_smem + BLOCK_K * HEAD_DIM * 2;     // [BLOCK_K][HEAD_DIM]

    // This block's work. Under the causal mask the last query tiles see the most keys: they start first, short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = fa::warp_id() * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);    // what the last query sees is what any query of the block sees
    const int unmasked = fa::visible_keys(args, q_first);  // what every query of the block sees

    // The largest S is the largest logit only where the scale is positive. A negative scale is applied as its absolute
    // value here and its sign in Q, exactly; for a scale of 0 Q is 0.
    const float scale = args.scale == 0 ? 1.0f : fabsf(float(args.scale)), scale_log2e = scale * fa::log2e;

    // Prologue: Q
    QCopy::copy_sync(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first,
                     args.scale == 0 ? 0 : args.head_dim, args.scale < 0 ? fa::sign_bits<scalar> : 0);
    fa::OperandA<HEAD_DIM, M, true> q{fa::lane_of_a<HEAD_DIM>(q_smem, warp_row)};
    // of_a for V too: with .trans a lane reads V as two B operands
    const fa::uint32_t k_lane = fa::lane_of_b<HEAD_DIM>(k_smem), v_lane = fa::lane_of_a<HEAD_DIM>(v_smem);

    float out_reg[M][COLUMNS][4] = {};  // O, not yet divided by the row sum
    fa::Softmax<M> softmax;
    __syncthreads();  // Q has arrived
    q.load_registers();

    // Main loop over tiles of keys
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // all warps have read Q, or the tile before
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile has arrived

#pragma unroll 1  // not more: fragments loaded ahead take registers
        for (int step = 0; step < min(BLOCK_K, keys - k_first); step += STEP_K) {
            // S = Q K^T
            float score_reg[M][KEYS][4] = {};
            fa::multiply_abt<scalar>(score_reg, q, k_lane + step * HEAD_DIM * 2);
            if (k_first + step + STEP_K > unmasked)
                fa::mask_scores(score_reg, args, q_first + warp_row + fa::fragment_row(), k_first + step);
            // P = exp(scale * (S - row max)), unnormalised: the online softmax, which rescales O lazily
            softmax.step_lazily(score_reg, out_reg, scale_log2e, SLACK);

            // O += P V, with P in registers
            fa::uint32_t p_reg[KEYS / 2][M][4];
            fa::pack_a<scalar>(p_reg, score_reg);
            fa::multiply_pb<scalar, HEAD_DIM>(out_reg, p_reg, v_lane + step * HEAD_DIM * 2);
        }
    }
    softmax.finish();

    // Epilogue: O / row sum through shared memory and the logsumexp, to global memory
    __syncthreads();  // all warps have read V: O takes its place
    fa::store_output_smem<scalar, HEAD_DIM>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
