// /// kernel
// title = "row tiles: each fragment of K and V is used for two fragments of queries"
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
// WARPS = 4
// ROW_TILES = 2  # of 16 queries, a warp's
// BLOCK_K = "64 if shared_optin >= 204800 else 32"  # keys of a tile
// [let]
// rows = "16 * ROW_TILES * WARPS + 2 * BLOCK_K"  # of Q, K and V
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, 16 * ROW_TILES * WARPS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * rows * HEAD_DIM + 16 * WARPS * ((4 + 2 * ROW_TILES) * BLOCK_K + 64)"
// ///
//
// Step 10, read against step 09. Row tiles: each fragment of K and V is loaded once and used ROW_TILES times. A warp of step 09 loads
// 512 bytes of K or V for each product of 16 x 16 x 16. The product keeps the tensor core busy for 3 or 4 cycles; shared memory needs 4
// for the bytes, and 32 as long as the 8 rows of a load lie in the same banks. So operand bandwidth is the limit. Here a warp owns
// ROW_TILES fragments of queries, 32 rows instead of 16:
//
//     for each fragment of K:    S[0] += Q[0] K,  S[1] += Q[1] K
//     for each fragment of V:    O[0] += P[0] V,  O[1] += P[1] V
//
// That halves the largest cost. It is the register tile of step 07, made of fragments instead of elements. A block now has 128 queries,
// so the traffic from the L2 cache is halved, too.
//
// The price is register pressure. At head dim 128 O of 32 rows takes 128 registers a thread, S of 32 x 64 another 64, and with the row
// maxima and row sums of 8 rows a thread is at the limit of 255. Three row tiles would not fit. For the same reason the loops over d and
// over keys are not fully unrolled: the compiler would load fragments further ahead than registers allow. Two blocks of four warps fill
// the registers of a multiprocessor, and only the other seven warps are left to hide latency.
//
// Shared memory is short as well, so the row tiles use s_smem one after the other: S of the first 16 rows becomes P and rescales its O
// before S of the other 16 leaves the registers. P of both must be complete for the product with V.
//
// The limit that remains: every score crosses shared memory as float32 and comes back as P, at 4 to 8 times the minimum because of bank
// conflicts. The tensor core produces S in registers and would take P from registers. Only WMMA's unspecified layout is in between:
// step 11.
#include <fa/wmma_tile.cuh>

using scalar = fa::DTYPE;

constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int KEYS = BLOCK_K / 16, COLUMNS = HEAD_DIM / 16;  // fragments

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::RowCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::RowCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const int warp = fa::warp_id();
    scalar* q_smem = fa::dynamic_shared<scalar>();                             // [BLOCK_Q][HEAD_DIM]
    scalar* k_smem = q_smem + BLOCK_Q * HEAD_DIM;                              // [BLOCK_K][HEAD_DIM]
    scalar* v_smem = k_smem + BLOCK_K * HEAD_DIM;                              // [BLOCK_K][HEAD_DIM]
    float* s_smem = reinterpret_cast<float*>(v_smem + BLOCK_K * HEAD_DIM);     // [WARPS][16][BLOCK_K], one row tile at a time
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

    fa::WmmaAccumulator out_reg[ROW_TILES][COLUMNS] = {};  // O, not yet divided by the row sum
    fa::WarpSoftmax<scalar, BLOCK_K> softmax[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) softmax[r].clear();

    // Main loop over tiles of keys
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // all warps have read the tile before
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile, and before the first one Q, has arrived

        // S = Q K^T. K is stored by rows: read by columns it is the transpose.
        fa::WmmaAccumulator score_reg[ROW_TILES][KEYS] = {};
#pragma unroll 2  // not more: fragments loaded ahead take registers
        for (int d = 0; d < COLUMNS; ++d) {
            fa::WmmaA<scalar> q_reg[ROW_TILES];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) fa::wmma_load_a_row(q_reg[r], q_smem + 16 * r * HEAD_DIM + 16 * d, HEAD_DIM);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                fa::WmmaBCol<scalar> k_reg;
                fa::wmma_load_b_col(k_reg, k_smem + 16 * n * HEAD_DIM + 16 * d, HEAD_DIM);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) fa::wmma_mma(score_reg[r][n], q_reg[r], k_reg);
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int n = 0; n < KEYS; ++n) fa::wmma_store_d_row(s_smem + 16 * n, score_reg[r][n], BLOCK_K);
            __syncwarp();
            softmax[r].update(p_smem + 16 * r * BLOCK_K, rescale_smem, s_smem, scale_log2e, args, q_first + warp_row + 16 * r, k_first);
            __syncwarp();  // P is complete, and s_smem has been read
            fa::scale_rows(out_reg[r], rescale_smem);
        }

        // O += P V
#pragma unroll 1
        for (int n = 0; n < KEYS; ++n) {
            fa::WmmaA<scalar> p_reg[ROW_TILES];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) fa::wmma_load_a_row(p_reg[r], p_smem + 16 * r * BLOCK_K + 16 * n, BLOCK_K);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                fa::WmmaBRow<scalar> v_reg;
                fa::wmma_load_b_row(v_reg, v_smem + 16 * n * HEAD_DIM + 16 * c, HEAD_DIM);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) fa::wmma_mma(out_reg[r][c], p_reg[r], v_reg);
            }
        }
    }

    // Epilogue: O / row sum and the logsumexp to global memory
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        const int query = q_first + warp_row + 16 * r, rows = args.seq_q - query;
        __syncwarp();
        softmax[r].finish(rescale_smem, fa::row_pointer<float>(args.logsumexp, batch, head, query), rows, scale);
        __syncwarp();
        fa::scale_rows(out_reg[r], rescale_smem);
        fa::store_rows(fa::row_pointer<scalar>(args.O, batch, head, query), int(args.O.row), rows, args.head_dim, out_reg[r], s_smem);
    }
}
