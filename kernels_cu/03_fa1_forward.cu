// /// kernel
// title = "FlashAttention-1: K/V tiles resident, Q tiles streamed; warps of 8 rows"
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
// BLOCK_Q = 32                     # queries of a tile, as many for each warp
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
// Step 03, read against step 02. FlashAttention-1 (Dao et al. 2022, arXiv 2205.14135, Algorithm 1): the loops and the online
// softmax of step 02, with the work of a block laid out for warps. The state of a row is the same, the row maximum m, the row sum
// l, and O divided by l; for each tile
//
//     m_new = max(m, largest score of the tile)
//     l_new = l * exp(m - m_new) + sum over the tile of exp(score - m_new)
//     O_new = (l * exp(m - m_new) * O + sum over the tile of exp(score - m_new) * V) / l_new
//
// After the last tile O is exact: nothing is approximated, the sum is taken in another order, and logsumexp = m + log(l).
//
// The loops are in the paper's order: a K/V tile is resident in shared memory and all Q tiles stream past it. Each Q tile reads its
// O, m and l from global memory, accumulates the keys of the tile, and writes them back. K and V are read once, Q and O as many
// times as there are K/V tiles, which is why the paper makes that tile as large as shared memory allows: M / 4d rows, the
// expression in the header.
//
// What changes is the work of a thread. In step 02 it has a whole row. Here a warp has 8 rows:
//   - in S = Q K^T a lane has every 32nd key, so row maximum and row sum are reductions over the lanes (fa::online_softmax);
//   - in P V a lane has every 32nd column of O; P changes lanes between the two products through shared memory;
//   - in both, an element of K or V, once in a register, is used for 8 rows;
//   - neighbouring lanes load neighbouring elements, so loads are coalesced, and a row of K is padded by one element, so that a
//     column lies in 32 banks (step 01).
// Both products, the state of 8 rows and the stores of O get new lines for this, more than the 60 that a step should change.
//
// What is wrong with it, and what step 05 repairs by exchanging the loops:
//   - O crosses global memory once for each K/V tile, and is divided by l each time only to be multiplied by it the next.
//   - All Q tiles of a head need the same resident K/V tile, so a head is one block. With 16 heads in the batch a GPU of 132
//     multiprocessors leaves 116 idle, however long the sequences are.
#include <fa/row.cuh>

constexpr int LANES = 32, ROWS = BLOCK_Q / WARPS, THREADS = WARPS * LANES;    // a warp shares ROWS queries of the tile
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;             // of a lane: lane, lane + 32, …
constexpr int Q_PITCH = HEAD_DIM, K_PITCH = HEAD_DIM + 1, P_PITCH = BLOCK_K;  // K_PITCH is odd: a column lies in 32 banks

static_assert(BLOCK_Q % WARPS == 0 && BLOCK_K % LANES == 0, "whole rows for each warp, whole keys for each lane");

// 1: no second block a multiprocessor. Without it the compiler saves registers for one by spilling a few.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* k_smem = fa::dynamic_shared<float>();  // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;   // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][Q_PITCH]
    float* p_smem = q_smem + BLOCK_Q * Q_PITCH;   // [BLOCK_Q][P_PITCH]

    const int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head);
    const int row = fa::warp_id() * ROWS, lane = fa::lane_id();
    float *q_rows = q_smem + row * Q_PITCH, *p_rows = p_smem + row * P_PITCH;  // [ROWS][…], this warp's
    const fa::int64_t first_row = (fa::int64_t(batch) * args.heads_q + head) * args.seq_q;  // of this head; one sum for both pointers
    float* m = static_cast<float*>(args.workspace[WORKSPACE_M]) + first_row;                // [seq_q]
    float* l = static_cast<float*>(args.workspace[WORKSPACE_L]) + first_row;                // [seq_q]

    // Main loop over the K/V tiles.
    for (int k_first = 0; k_first < args.seq_kv; k_first += BLOCK_K) {
        const float* k = fa::row_pointer<float>(args.K, batch, kv_head, k_first);  // [BLOCK_K], K.row apart
        const float* v = fa::row_pointer<float>(args.V, batch, kv_head, k_first);  // [BLOCK_K], V.row apart
        __syncthreads();  // every warp has finished with the previous tile
        fa::load_rows<BLOCK_K, HEAD_DIM, K_PITCH, THREADS>(k_smem, k, args.K.row, k_first, args.seq_kv, args.head_dim);
        fa::load_rows<BLOCK_K, HEAD_DIM, HEAD_DIM, THREADS>(v_smem, v, args.V.row, k_first, args.seq_kv, args.head_dim);
        __syncthreads();  // the tile is complete

        // The Q tiles stream past; q_first is the first query of this warp. It has the same rows of every tile: no barrier of the block.
        for (int q_first = row; q_first < args.seq_q; q_first += BLOCK_Q) {
            // Rows that see nothing of the tile keep their state. The first tile is never skipped: it initialises O, m and l.
            const bool first_tile = k_first == 0;
            if (!first_tile && fa::visible_keys(args, q_first + ROWS - 1) <= k_first) continue;

            const float* q = fa::row_pointer<float>(args.Q, batch, head, q_first);  // [ROWS], Q.row apart
            __syncwarp();  // every lane has finished with the previous rows of Q and P
            fa::load_rows<ROWS, HEAD_DIM, Q_PITCH, LANES>(q_rows, q, args.Q.row, q_first, args.seq_q, args.head_dim, lane);
            __syncwarp();

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

            // Online softmax: P to shared memory, m and l to global memory. O = rescale * O + inverse * P V.
            float m_reg[ROWS], l_reg[ROWS], rescale_reg[ROWS], inverse_reg[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int query = min(q_first + r, args.seq_q - 1), visible = fa::visible_keys(args, query) - k_first;
                m_reg[r] = first_tile ? -fa::infinity() : m[query], l_reg[r] = first_tile ? 0.0f : l[query];
                const float old_sum = l_reg[r];
                rescale_reg[r] =
                    fa::online_softmax<LANES>(m_reg[r], l_reg[r], score_reg[r], p_rows + r * P_PITCH, lane, visible, float(args.scale));
                inverse_reg[r] = l_reg[r] == 0 ? 0.0f : 1 / l_reg[r];  // no visible key: O is 0
                rescale_reg[r] = rescale_reg[r] * old_sum * inverse_reg[r];
            }
            __syncwarp();  // the lanes of a row read each other's P, and have read m and l
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (lane == 0 && q_first + r < args.seq_q) m[q_first + r] = m_reg[r], l[q_first + r] = l_reg[r];

            // P V: the warp's queries by the lane's columns. All lanes read the same p, each its own v.
            float tile_reg[ROWS][COLUMNS] = {};
            for (int key = 0; key < BLOCK_K; ++key) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    float v_reg = v_smem[key * HEAD_DIM + lane + LANES * c];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) tile_reg[r][c] += p_rows[r * P_PITCH + key] * v_reg;
                }
            }

            // O to global memory and back, once for each K/V tile.
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (q_first + r >= args.seq_q) break;
                float* o = fa::row_pointer<float>(args.O, batch, head, q_first + r);  // [head_dim]
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
