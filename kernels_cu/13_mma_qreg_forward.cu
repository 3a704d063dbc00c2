// /// kernel
// title = "Q in registers, tiles of K and V twice as deep in its place; O is scaled only where a maximum has grown much"
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
// STEP_K = "64 if HEAD_DIM <= 64 else 16"  # keys of a step of softmax: what registers are left for S
// BLOCKS = 2      # on a multiprocessor, for the compiler: how many registers a thread may have
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * HEAD_DIM * max(WARPS * WARP_ROWS, 2 * BLOCK_K)"
// ///
//
// Step 13. Of what a warp of step 12 reads from shared memory a third is Q: the same 32 x 128 numbers for every 32 keys. Shared memory
// needs 192 cycles for what the tensor cores multiply in about 200, and all warps use the one as much as the other, so either waits for
// the other time and again. Three changes, all from moving Q to where it can stay.
//
//   1. Q is read once, as fragments, and kept in registers: 64 of them at head dim 128. Shared memory now needs 128 cycles.
//   2. Nobody needs Q's shared memory after that. K and V take its place, in tiles of 64 keys instead of 32: half as many barriers, and
//      half as many times that a warp waits for memory. (FlashAttention-2's split of the work makes it possible: warps divide the
//      queries among them, not the keys, so no warp ever needs another's Q.)
//   3. At the end the place is free again. O goes through it, so that lanes with neighbouring chunks write 16 bytes each, whole lines of
//      memory. From the fragments a warp's store was 8 rows of 16 bytes, half of each 32-byte sector that memory is written in.
//
// The price is registers. At head dim 128 O and Q of 32 queries take 192 of the 255 that a thread can have, and S of 64 keys would be
// another 64: it would not fit, and what does not fit is spilled to memory and fetched back all the time. So the softmax goes in steps of
// 16 keys, for which S takes 16 registers. (At head dim 64 there is room for 64 keys, and a step is the tile.) In the last tile, and under
// the causal mask, whole steps that nobody sees are left out. But with four times as many steps the running softmax would scale O four
// times as often: 128 multiplications for 64 products on the tensor cores, all waiting for the maximum of a row, which needs two shuffles.
// That cost more than the three changes gained: 264 TFLOP/s after step 12's 287 (B4 H16 S4096 D128).
//
// So O is not scaled. P need not refer to the true maximum. Any number near it does, as long as nothing overflows, since sum and O are
// made of the same P. The maximum stays what it was until some score of the warp is more than 2^8 times (in P) above it; then and only
// then all is done as before. With ordinary data that happens in the first steps and hardly ever again, and what is left of it in the
// loop is one vote. P is at most 256 then, which 16-bit numbers hold with the relative precision that they have for 1.
// (FlashAttention-4 does this.)
//
// What is still bad: the tensor cores rest while a tile comes. A block can only hope that the other block on its multiprocessor has
// something to multiply meanwhile.
#include <fa/epilogue.cuh>

using scalar = fa::DTYPE;

constexpr float SLACK = 8;  // P may be 2^8
constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = STEP_K / 8, COLUMNS = HEAD_DIM / 8;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM], before the first K and V; in the end O
    const fa::uint32_t k_smem = q_smem;                              // [BLOCK_K][HEAD_DIM]
    const fa::uint32_t v_smem = k_smem + BLOCK_K * HEAD_DIM * 2;     // [BLOCK_K][HEAD_DIM]

    // Under the causal mask the last query tiles see the most keys. They start first; short ones fill the end of the launch.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = fa::warp_id() * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);    // what the last query sees is what any query of the block sees
    const int unmasked = fa::visible_keys(args, q_first);  // what every query of the block sees

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one goes into Q, exactly; for a scale
    // of 0 Q is 0.
    const float scale = args.scale == 0 ? 1.0f : fabsf(float(args.scale)), scale_log2e = scale * fa::log2e;

    QCopy::copy_sync(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first,
                     args.scale == 0 ? 0 : args.head_dim, args.scale < 0 ? fa::sign_bits<scalar> : 0);
    __syncthreads();
    fa::OperandA<HEAD_DIM, M, true> q{fa::lane_of_a<HEAD_DIM>(q_smem, warp_row)};
    q.load_registers();
    const fa::uint32_t k_lane = fa::lane_of_b<HEAD_DIM>(k_smem), v_lane = fa::lane_of_a<HEAD_DIM>(v_smem);

    float out_reg[M][COLUMNS][4] = {};  // O, not yet divided by the sum
    fa::Softmax<M> softmax;

    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // nobody reads Q, or the tile before, any more
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile is there for all

#pragma unroll 1  // not more: fragments that wait for their turn take registers
        for (int step = 0; step < min(BLOCK_K, keys - k_first); step += STEP_K) {
            // S = Q K^T
            float score_reg[M][KEYS][4] = {};
            fa::multiply_abt<scalar>(score_reg, q, k_lane + step * HEAD_DIM * 2);
            if (k_first + step + STEP_K > unmasked)
                fa::mask_scores(score_reg, args, q_first + warp_row + fa::fragment_row(), k_first + step);
            // P = exp(scale * (S - max)), unnormalised
            softmax.step_lazily(score_reg, out_reg, scale_log2e, SLACK);

            // O += P V
            fa::uint32_t p_reg[KEYS / 2][M][4];
            fa::pack_a<scalar>(p_reg, score_reg);
            fa::multiply_pb<scalar, HEAD_DIM>(out_reg, p_reg, v_lane + step * HEAD_DIM * 2);
        }
    }
    softmax.finish();

    __syncthreads();  // V has been read: O takes its place
    fa::store_output_smem<scalar, HEAD_DIM>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
