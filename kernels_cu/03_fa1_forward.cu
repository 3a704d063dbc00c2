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
#include <fa/warp.cuh>

static_assert(BLOCK_K % 32 == 0, "a lane takes every 32nd key of a tile");
static_assert(BLOCK_Q % WARPS == 0, "each warp takes as many queries of a tile");

constexpr int rows = BLOCK_Q / WARPS, threads = 32 * WARPS;  // rows: a warp's, of a Q tile
constexpr int keys = BLOCK_K / 32;      // of a tile, a lane's
constexpr int columns = HEAD_DIM / 32;  // of O, a lane's: lane, lane + 32, ...
constexpr int k_pitch = HEAD_DIM + 1;   // odd, so that 32 lanes reading 32 keys at the same d hit 32 banks

// The 1 gives up on a second block per multiprocessor: without it the compiler, unasked, saves registers by spilling a few.
extern "C" __global__ void __launch_bounds__(threads, 1) forward(const __grid_constant__ fa::Args args) {
    int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head);
    int lane = fa::lane_id(), warp = fa::warp_id();

    float* k_smem = fa::dynamic_shared<float>();                           // [BLOCK_K][k_pitch]
    float* v_smem = k_smem + BLOCK_K * k_pitch;                            // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM + warp * rows * HEAD_DIM;  // [rows][HEAD_DIM], this warp's
    float* p_smem = v_smem + (BLOCK_K + BLOCK_Q) * HEAD_DIM + warp * rows * BLOCK_K;  // [rows][BLOCK_K], this warp's

    fa::int64_t first_row = (fa::int64_t(batch) * args.heads_q + head) * args.seq_q;
    float* m = static_cast<float*>(args.workspace[WORKSPACE_M]) + first_row;  // [seq_q]
    float* l = static_cast<float*>(args.workspace[WORKSPACE_L]) + first_row;  // [seq_q]

    for (int k_first = 0; k_first < args.seq_kv; k_first += BLOCK_K) {
        const float* k = fa::row_pointer<const float>(args.K, batch, kv_head, k_first);  // [BLOCK_K], K.row apart
        const float* v = fa::row_pointer<const float>(args.V, batch, kv_head, k_first);  // [BLOCK_K], V.row apart
        __syncthreads();  // no warp reads the tile before any more
        fa::load_rows<BLOCK_K, HEAD_DIM, k_pitch, threads>(k_smem, k, args.K.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        fa::load_rows<BLOCK_K, HEAD_DIM, HEAD_DIM, threads>(v_smem, v, args.V.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        __syncthreads();  // the tile is there for all

        // A warp's rows are its own in every tile, so it meets the others only at the K/V tile, never inside this loop.
        for (int q_first = warp * rows; q_first < args.seq_q; q_first += BLOCK_Q) {
            // Rows that see nothing of the tile keep what they have. The first tile must go on: it is what O, m, l start from.
            bool first_tile = k_first == 0;
            if (!first_tile && fa::visible_keys(args, q_first + rows - 1) <= k_first) continue;

            const float* q = fa::row_pointer<const float>(args.Q, batch, head, q_first);  // [rows], Q.row apart
            __syncwarp();  // no lane reads the rows and probabilities before any more
            fa::load_rows<rows, HEAD_DIM, HEAD_DIM, 32>(q_smem, q, args.Q.row, q_first, args.seq_q, args.head_dim, lane);
            __syncwarp();

            // Scores of the warp's queries and the lane's keys. Every lane reads the same q (a broadcast) and its own k.
            float s_reg[rows][keys] = {};
            for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
                for (int n = 0; n < keys; ++n) {
                    float k_reg = k_smem[(lane + 32 * n) * k_pitch + d];
#pragma unroll
                    for (int r = 0; r < rows; ++r) s_reg[r][n] += q_smem[r * HEAD_DIM + d] * k_reg;
                }
            }

            float rescale_reg[rows], inverse_reg[rows];  // O_new = rescale * O + inverse * (sum of exp(score - m_new) * V)
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                int query = min(q_first + r, args.seq_q - 1);
                int visible = fa::visible_keys(args, query) - k_first;  // of this tile
                float largest = -fa::infinity();
#pragma unroll
                for (int n = 0; n < keys; ++n) {
                    s_reg[r][n] = lane + 32 * n < visible ? float(args.scale) * s_reg[r][n] : -fa::infinity();
                    largest = max(largest, s_reg[r][n]);
                }
                float m_old = first_tile ? -fa::infinity() : m[query], l_old = first_tile ? 0.0f : l[query];
                float m_new = max(m_old, fa::group_max<32>(largest));
                // A row that has seen no key yet has m = -inf, and -inf - -inf is NaN. Against 0 its terms are exp(-inf) = 0.
                float shift = m_new == -fa::infinity() ? 0.0f : m_new;
                float sum = 0;
#pragma unroll
                for (int n = 0; n < keys; ++n) {
                    float p = fa::exp(s_reg[r][n] - shift);
                    p_smem[r * BLOCK_K + lane + 32 * n] = p;
                    sum += p;
                }
                l_old *= fa::exp(m_old - shift);
                float l_new = l_old + fa::group_sum<32>(sum);
                inverse_reg[r] = l_new > 0 ? 1 / l_new : 0.0f;  // no visible key: O is 0
                rescale_reg[r] = l_old * inverse_reg[r];
                if (lane == 0 && q_first + r < args.seq_q) m[query] = m_new, l[query] = l_new;
            }
            __syncwarp();  // p_smem is this warp's alone; the lanes now read each other's

            float o_reg[rows][columns] = {};
            for (int key = 0; key < BLOCK_K; ++key) {
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    float v_reg = v_smem[key * HEAD_DIM + lane + 32 * c];
#pragma unroll
                    for (int r = 0; r < rows; ++r) o_reg[r][c] += p_smem[r * BLOCK_K + key] * v_reg;
                }
            }

#pragma unroll
            for (int r = 0; r < rows; ++r) {
                if (q_first + r >= args.seq_q) break;
                float* o = fa::row_pointer<float>(args.O, batch, head, q_first + r);  // [head_dim]
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    int d = lane + 32 * c;
                    if (d < args.head_dim) o[d] = (first_tile ? 0.0f : rescale_reg[r] * o[d]) + inverse_reg[r] * o_reg[r][c];
                }
            }
        }
    }

    __syncthreads();  // m and l of all the warps are there
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, 0);  // [seq_q]
    for (int query = threadIdx.x; query < args.seq_q; query += threads) logsumexp[query] = m[query] + fa::log(l[query]);
}
