// /// kernel
// title = "FlashAttention-2: loops exchanged, Q tile resident, O in registers"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// WARPS = 4
// BLOCK_Q = 32                     # queries of a tile, divided equally among the warps
// BLOCK_K = "64 if HEAD_DIM == 64 else 32"  # keys of a tile
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + BLOCK_K * (2 * HEAD_DIM + 1))"
// ///
//
// Step 05, read against step 04; the tiles, products and warps of 8 rows are step 03's. FlashAttention-2's forward pass (Dao 2023, arXiv
// 2307.08691, Algorithm 1): the loops are exchanged.
//
//     FlashAttention-1, steps 03 and 04      FlashAttention-2, here
//     for each K/V tile                      each block: one Q tile, resident
//         for each Q tile                        for each K/V tile
//             O, m, l from global memory             O, m, l in registers
//             accumulate the tile                    accumulate the tile
//             O, m, l to global memory           O and logsumexp to global memory, once
//
// Three things follow from the exchange.
//   1. The state of a row belongs to one block from the first key to the last, so it never leaves the registers. Global memory sees
//      Q once and O once; K and V are read again by every Q tile, but from the L2 cache, where a head's K and V fit.
//   2. Blocks no longer share O, so a head can have as many blocks as it has Q tiles. Batch 2, 8 heads, 512 queries: 16 blocks in
//      step 03, 2 * 8 * 512 / 32 = 256 here, for the 132 multiprocessors of an H200.
//   3. O need not be normalised after every tile. It stays the sum of exp(score - m) * V, is rescaled only when the row maximum
//      grows, and is divided by the row sum once, in the epilogue.
//
// The online softmax: with m the row maximum so far, l = sum of exp(score - m) and o = sum of exp(score - m) * V, a tile with a
// larger maximum m_new rescales them to l * exp(m - m_new) and o * exp(m - m_new) before its own terms are added. The factor is 1
// where the maximum stays, and exp(-inf) = 0 at the first tile, so it needs no case of its own. m and l are written as one value,
// logsumexp = m + log(l), which is all that the backward pass needs.
//
// The terms of one tile are summed by themselves and then added to o (fa::add_tile): one float32 sum over all keys, of which there
// may be thousands, would have an error several times as large as that of a sum of sums.
//
// What remains: each thread loads one float at a time, and nothing is computed while the loads are in flight; a lane loads 8 + 2
// elements from shared memory for 16 multiply-adds (at head dim 64); the masked half of a causal tile is computed and discarded.
// Steps 06 and 07 take these up.
#include <fa/row.cuh>

constexpr int LANES = 32, ROWS = BLOCK_Q / WARPS, THREADS = WARPS * LANES;    // a warp shares ROWS queries of the tile
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;             // of a lane: lane, lane + 32, …
constexpr int Q_PITCH = HEAD_DIM, K_PITCH = HEAD_DIM + 1, P_PITCH = BLOCK_K;  // K_PITCH is odd: a column lies in 32 banks

static_assert(BLOCK_Q % WARPS == 0 && BLOCK_K % LANES == 0, "whole rows for each warp, whole keys for each lane");

extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ fa::Args args) {
    float* k_smem = fa::dynamic_shared<float>();  // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;   // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][Q_PITCH]
    float* p_smem = q_smem + BLOCK_Q * Q_PITCH;   // [BLOCK_Q][P_PITCH]

    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int row = fa::warp_id() * ROWS, lane = fa::lane_id();
    const int q_first = blockIdx.x * BLOCK_Q + row;                            // the first query of this warp
    const int q_last = min(q_first - row + BLOCK_Q, args.seq_q) - 1;  // of the block
    float *q_rows = q_smem + row * Q_PITCH, *p_rows = p_smem + row * P_PITCH;  // [ROWS][…], this warp's

    // Prologue: Q, which is resident, and the state of each row: maximum, sum, and O before the division by the sum.
    const float* q = fa::row_pointer<float>(args.Q, batch, head, q_first);  // [ROWS], Q.row apart
    fa::load_rows<ROWS, HEAD_DIM, Q_PITCH, LANES>(q_rows, q, args.Q.row, q_first, args.seq_q, args.head_dim, lane);
    float row_max[ROWS], row_sum[ROWS] = {}, out_reg[ROWS][COLUMNS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row_max[r] = -fa::infinity();

    // Main loop over the K/V tiles that some row of the block sees. The bound is the block's, not the warp's, because of the barriers.
    for (int k_first = 0; k_first < fa::visible_keys(args, q_last); k_first += BLOCK_K) {
        const float* k = fa::row_pointer<float>(args.K, batch, kv_head, k_first);  // [BLOCK_K], K.row apart
        const float* v = fa::row_pointer<float>(args.V, batch, kv_head, k_first);  // [BLOCK_K], V.row apart
        __syncthreads();  // every warp has finished with the previous tile
        fa::load_rows<BLOCK_K, HEAD_DIM, K_PITCH, THREADS>(k_smem, k, args.K.row, k_first, args.seq_kv, args.head_dim);
        fa::load_rows<BLOCK_K, HEAD_DIM, HEAD_DIM, THREADS>(v_smem, v, args.V.row, k_first, args.seq_kv, args.head_dim);
        __syncthreads();  // the tile, and before the first one Q, is complete

        // S = Q K^T: the warp's queries by the lane's keys. All lanes read the same q (a broadcast), each its own k.
        float score_reg[ROWS][KEYS] = {};
        for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                float k_reg = k_smem[lane * K_PITCH + n * LANES * K_PITCH + d];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) score_reg[r][n] += q_rows[r * Q_PITCH + d] * k_reg;
            }
        }

        // Online softmax: P to shared memory, the rescale factors of O to registers.
        float rescale_reg[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int visible = fa::visible_keys(args, q_first + r) - k_first;  // of this tile
            rescale_reg[r] =
                fa::online_softmax<LANES>(row_max[r], row_sum[r], score_reg[r], p_rows + r * P_PITCH, lane, visible, float(args.scale));
        }
        __syncwarp();  // the lanes of a row read each other's P

        // O = rescale * O + P V: the warp's queries by the lane's columns. All lanes read the same p, each its own v.
        float tile_reg[ROWS][COLUMNS] = {};
        for (int key = 0; key < BLOCK_K; ++key) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                float v_reg = v_smem[key * HEAD_DIM + lane + LANES * c];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) tile_reg[r][c] += p_rows[r * P_PITCH + key] * v_reg;
            }
        }
        fa::add_tile(out_reg, rescale_reg, tile_reg);
    }

    // Epilogue: O divided by the row sum, and logsumexp.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (q_first + r >= args.seq_q) break;
        float* o = fa::row_pointer<float>(args.O, batch, head, q_first + r);  // [head_dim]
        const float inverse = row_sum[r] == 0 ? 0.0f : 1 / row_sum[r];  // no visible key: O is 0, and logsumexp -inf
        fa::store_output<float, LANES, 1>(o, out_reg[r], inverse, lane, args.head_dim);
        if (lane == 0) *fa::row_pointer<float>(args.logsumexp, batch, head, q_first + r) = row_max[r] + fa::log(row_sum[r]);
    }
}
