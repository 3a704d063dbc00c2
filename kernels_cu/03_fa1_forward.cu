// /// kernel
// title = "FlashAttention-1: K/V outside, Q inside"
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
// BLOCK_Q = 32                     # queries of a tile, shared out among the warps
// BLOCK_K = "max(32, min(128, floor_pow2(shared_optin // (16 * HEAD_DIM))))"  # the paper's M / 4d, M in floats
// [workspace.m]
// dtype = "float32"
// size = "batch * heads_q * seq_q"
// init = "none"
// [workspace.l]
// dtype = "float32"
// size = "batch * heads_q * seq_q"
// init = "none"
// [[launch]]
// entry = "forward"
// grid = ["heads_q", "batch"]      # one block for a whole head
// block = "32 * WARPS"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + BLOCK_K * (2 * HEAD_DIM + 1))"
// ///
//
// Step 03. FlashAttention's first form (Dao et al. 2022, arXiv 2205.14135, Algorithm 1): the scores matrix is gone. It is made
// tile by tile in shared memory and used there, and what memory sees is Q, K, V and O only.
//
// What stood in the way was the softmax, which needs the maximum and the sum of a whole row before it can give the first
// probability. The way out is to keep three things for each row over the keys seen so far, the maximum m, the sum
// l = sum of exp(score - m), and O = the average of V under those keys' softmax, and to correct them when a tile adds keys:
//
//     m_new = max(m, largest score of the tile)
//     l_new = l * exp(m - m_new) + sum over the tile of exp(score - m_new)
//     O_new = (l * exp(m - m_new) * O + sum over the tile of exp(score - m_new) * V) / l_new
//
// After the last tile O is exact: nothing was approximated, the sum was only taken in another order, and logsumexp = m + log(l).
//
// The loops, in the paper's order: a tile of K and V is brought to shared memory once and stays while all the Q tiles pass by.
// Each of them takes its O, m and l from memory, puts the tile's keys in, and writes them back. So K and V are read once, and
// Q and O as many times as there are K/V tiles, which is why the paper makes that tile as large as shared memory allows:
// M / 4d rows, the expression in the header.
//
// A warp works on 8 rows by itself. In the scores a lane is a key, so the maximum and the sum of a row are reductions over the
// lanes; in the product with V a lane is a column of O. The probabilities change hands between the two in shared memory.
//
// What is wrong with it, and what step 05 repairs by exchanging the loops:
//   - O goes through memory once for each K/V tile, and is divided by l each time only to be multiplied by it the next.
//   - All Q tiles of a head meet in one K/V tile, so a head is one block. With 16 heads in the batch a GPU of 132
//     multiprocessors leaves 116 idle, however long the sequences are.
#include <fa/row.cuh>

constexpr int LANES = 32, ROWS = BLOCK_Q / WARPS, THREADS = WARPS * LANES;    // a warp shares ROWS queries of the tile
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;             // of a lane: lane, lane + 32, …
constexpr int Q_PITCH = HEAD_DIM, K_PITCH = HEAD_DIM + 1, P_PITCH = BLOCK_K;  // K_PITCH is odd: a column lies in 32 banks

static_assert(BLOCK_Q % WARPS == 0 && BLOCK_K % LANES == 0, "whole rows for each warp, whole keys for each lane");

// 1: no second block a multiprocessor. Without it the compiler saves registers for one by spilling a few.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();  // [BLOCK_Q][Q_PITCH]
    float* k_smem = q_smem + BLOCK_Q * Q_PITCH;   // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;   // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][P_PITCH]

    const int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head);
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    float* m = fa::head_values<float>(args, WORKSPACE_M, batch, head);  // [seq_q]
    float* l = fa::head_values<float>(args, WORKSPACE_L, batch, head);  // [seq_q]

    // Main loop over the K/V tiles.
    for (int k_first = 0; k_first < args.seq_kv; k_first += BLOCK_K) {
        __syncthreads();  // every warp has finished with the previous tile
        fa::load_rows<BLOCK_K, HEAD_DIM, K_PITCH, THREADS>(k_smem, args.K, batch, kv_head, k_first, args.seq_kv, args.head_dim,
                                                           threadIdx.x);
        fa::load_rows<BLOCK_K, HEAD_DIM, HEAD_DIM, THREADS>(v_smem, args.V, batch, kv_head, k_first, args.seq_kv, args.head_dim,
                                                            threadIdx.x);
        __syncthreads();  // the tile is complete

        // The Q tiles stream past. A warp has the same rows of every tile, so no block-wide barrier is needed in here.
        for (int q_first = 0; q_first + row < args.seq_q; q_first += BLOCK_Q) {
            // Rows that see nothing of the tile keep their state. The first tile is never skipped: it initialises O, m and l.
            const bool first_tile = k_first == 0;
            if (!first_tile && fa::visible_keys(args, q_first + row + ROWS - 1) <= k_first) continue;

            __syncwarp();  // every lane has finished with the previous rows of Q and P
            fa::load_rows<ROWS, HEAD_DIM, Q_PITCH, LANES>(q_smem + row * Q_PITCH, args.Q, batch, head, q_first + row, args.seq_q,
                                                          args.head_dim, lane);
            __syncwarp();

            // S = Q K^T: the warp's queries by the lane's keys. All lanes read the same q (a broadcast), each its own k.
            float score_reg[ROWS][KEYS] = {};
            for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
                for (int n = 0; n < KEYS; ++n) {
                    float k_reg = k_smem[(lane + LANES * n) * K_PITCH + d];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) score_reg[r][n] += q_smem[(row + r) * Q_PITCH + d] * k_reg;
                }
            }

            // Online softmax: P to shared memory, m and l to global memory. O = rescale * O + inverse * P V.
            float rescale_reg[ROWS], inverse_reg[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int query = min(q_first + row + r, args.seq_q - 1), visible = fa::visible_keys(args, query) - k_first;
                float row_max = first_tile ? -fa::infinity() : m[query], row_sum = first_tile ? 0.0f : l[query], old_sum = row_sum;
                rescale_reg[r] = fa::online_softmax<LANES>(row_max, row_sum, score_reg[r], p_smem + (row + r) * P_PITCH, lane, visible,
                                                           float(args.scale));
                inverse_reg[r] = row_sum > 0 ? 1 / row_sum : 0.0f;  // no visible key: O is 0
                rescale_reg[r] *= old_sum * inverse_reg[r];
                if (lane == 0 && q_first + row + r < args.seq_q) m[query] = row_max, l[query] = row_sum;
            }
            __syncwarp();  // the lanes of a row read each other's P

            // P V: the warp's queries by the lane's columns. All lanes read the same p, each its own v.
            float tile_reg[ROWS][COLUMNS] = {};
            for (int key = 0; key < BLOCK_K; ++key) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    float v_reg = v_smem[key * HEAD_DIM + lane + LANES * c];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) tile_reg[r][c] += p_smem[(row + r) * P_PITCH + key] * v_reg;
                }
            }

            // O to global memory and back, once for each K/V tile.
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (q_first + row + r >= args.seq_q) break;
                float* o = fa::row_pointer<float>(args.O, batch, head, q_first + row + r);  // [head_dim]
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const int d = lane + LANES * c;
                    if (d < args.head_dim) o[d] = (first_tile ? 0.0f : rescale_reg[r] * o[d]) + inverse_reg[r] * tile_reg[r][c];
                }
            }
        }
    }

    // Epilogue: O is complete already; logsumexp = m + log(l).
    __syncthreads();  // m and l of all warps are written
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, 0);  // [seq_q]
    for (int query = threadIdx.x; query < args.seq_q; query += THREADS) logsumexp[query] = m[query] + fa::log(l[query]);
}
