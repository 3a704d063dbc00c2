// /// kernel
// title = "several warps a block, sharing K and V"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128]
// arch = { float16 = ">=sm_70", bfloat16 = ">=sm_80" }
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// arithmetic = "p16"
// [tile]
// WARPS = 4  # 16 queries each
// BLOCK_K = "64 if shared_optin >= 204800 else 32"  # keys of a tile
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, 16 * WARPS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * (16 * WARPS + 2 * BLOCK_K) * HEAD_DIM + 16 * WARPS * (6 * BLOCK_K + 64)"
// ///
//
// Step 09, read against step 08. Several warps share K and V: a block is WARPS warps of 16 queries each. In step 08 a block was one warp,
// and each 16 queries loaded all of K and V for themselves. Here four warps copy a tile together, then each multiplies its own queries by
// all of it. A warp's products, its S and P in shared memory and its softmax are the same lines as before.
//
// The block's query tile has 16 * WARPS rows, of which warp w owns rows 16 * w to 16 * w + 15. s_smem, rescale_smem and p_smem have WARPS
// parts, and a warp's part begins at an offset. That is nearly all a comparison of the two files shows.
//
// Gains:
//   - The same bytes serve 64 queries instead of 16: the traffic from the L2 cache falls to a quarter (at B4 H16 S4096 D128 from 34 GB
//     to 9), and so does the number of instructions that a warp spends on copying tiles.
//   - Four warps need the tile in shared memory once. The saved space is spent on tiles of 64 keys instead of 32 where two blocks still
//     fit a multiprocessor: each fragment of Q is loaded for four products instead of two, and O is rescaled half as often.
// Cost: the warps of a block synchronise twice a tile, before it is overwritten and after it has arrived. Within a warp nothing changes:
// S and P belong to one warp, and __syncwarp is enough.
//
// Step 08, with 9 blocks of one warp each on a multiprocessor, had as many warps to hide latency as two blocks have here, so the gain is
// small. Most cycles are spent on loading fragments of K and V from shared memory, at 8 times the minimum because of bank conflicts, and
// each fragment still serves one product only. Step 10 takes that up.
#include <fa/wmma_tile.cuh>

using scalar = fa::DTYPE;

constexpr int WARP_ROWS = 16, BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int KEYS = BLOCK_K / 16, COLUMNS = HEAD_DIM / 16;  // fragments

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::RowCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::RowCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const int warp = fa::warp_id();
    scalar* q_smem = fa::dynamic_shared<scalar>();                             // [BLOCK_Q][HEAD_DIM]
    scalar* k_smem = q_smem + BLOCK_Q * HEAD_DIM;                              // [BLOCK_K][HEAD_DIM]
    scalar* v_smem = k_smem + BLOCK_K * HEAD_DIM;                              // [BLOCK_K][HEAD_DIM]
    float* s_smem = reinterpret_cast<float*>(v_smem + BLOCK_K * HEAD_DIM);     // [WARPS][16][BLOCK_K]
    float* rescale_smem = s_smem + WARPS * 16 * BLOCK_K;                          // [WARPS][16][16]
    scalar* p_smem = reinterpret_cast<scalar*>(rescale_smem + WARPS * 16 * 16);   // [WARPS][WARP_ROWS][BLOCK_K]
    s_smem += warp * 16 * BLOCK_K, rescale_smem += warp * 16 * 16, p_smem += warp * WARP_ROWS * BLOCK_K;  // this warp's

    // This block's work. Under the causal mask the last query tiles see the most keys: they start first, short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = warp * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);  // what the last query sees is what any query of the block sees

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one is applied to Q, exactly.
    const float scale = fabsf(float(args.scale)), scale_log2e = scale * fa::log2e;

    // Prologue: Q
    QCopy::copy_sync(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first, args.head_dim,
                     args.scale < 0 ? 0x80008000 : 0);
    q_smem += warp_row * HEAD_DIM;

    fa::WmmaAccumulator out_reg[COLUMNS] = {};  // O, not yet divided by the row sum
    fa::WarpSoftmax<scalar, BLOCK_K> softmax;
    softmax.clear();

    // Main loop over tiles of keys
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // all warps have read the tile before
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile, and before the first one Q, has arrived

        // S = Q K^T. K is stored by rows: read by columns it is the transpose.
        fa::WmmaAccumulator score_reg[KEYS] = {};
#pragma unroll 2  // not more: fragments loaded ahead take registers
        for (int d = 0; d < COLUMNS; ++d) {
            fa::WmmaA<scalar> q_reg;
            fa::wmma_load_a_row(q_reg, q_smem + 16 * d, HEAD_DIM);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                fa::WmmaBCol<scalar> k_reg;
                fa::wmma_load_b_col(k_reg, k_smem + 16 * n * HEAD_DIM + 16 * d, HEAD_DIM);
                fa::wmma_mma(score_reg[n], q_reg, k_reg);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS; ++n) fa::wmma_store_d_row(s_smem + 16 * n, score_reg[n], BLOCK_K);
        __syncwarp();

        softmax.update(p_smem, rescale_smem, s_smem, scale_log2e, args, q_first + warp_row, k_first);
        __syncwarp();

        // O = rescale * O + P V
        fa::scale_rows(out_reg, rescale_smem);
#pragma unroll 1
        for (int n = 0; n < KEYS; ++n) {
            fa::WmmaA<scalar> p_reg;
            fa::wmma_load_a_row(p_reg, p_smem + 16 * n, BLOCK_K);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                fa::WmmaBRow<scalar> v_reg;
                fa::wmma_load_b_row(v_reg, v_smem + 16 * n * HEAD_DIM + 16 * c, HEAD_DIM);
                fa::wmma_mma(out_reg[c], p_reg, v_reg);
            }
        }
    }

    // Epilogue: O / row sum and the logsumexp to global memory
    const int rows = args.seq_q - q_first - warp_row;
    __syncwarp();
    softmax.finish(rescale_smem, fa::row_pointer<float>(args.logsumexp, batch, head, q_first + warp_row), rows, scale);
    __syncwarp();
    fa::scale_rows(out_reg, rescale_smem);
    fa::store_rows(fa::row_pointer<scalar>(args.O, batch, head, q_first + warp_row), int(args.O.row), rows, args.head_dim, out_reg, s_smem);
}
