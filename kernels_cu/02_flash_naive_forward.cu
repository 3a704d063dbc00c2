// /// kernel
// title = "online softmax, no S in global memory: one block a head, one thread a row"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// ROWS = 32                        # rows of a tile of Q, K or V, and threads of a block
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
// block = "ROWS"
// shared = "4 * ROWS * (3 * HEAD_DIM + ROWS)"
// ///
//
// Step 02, read against step 01. The online softmax replaces the matrix of scores. One launch computes the 32 x 32 scores of a tile
// of queries and a tile of keys in shared memory, uses them there, and discards them. Global memory holds Q, K, V, O, and two
// values a row.
//
// The obstacle is the softmax, which needs the row maximum and the row sum before it can give the first probability, while a row
// now arrives 32 scores at a time. The online softmax takes the maximum so far and rescales when it grows. For the keys seen so far
// let m be the row maximum, l the row sum of exp(score - m), and O the average of V under the softmax over these keys. A tile of
// further keys has a maximum m_new that may be larger. Everything summed so far carries exp(-m) where it should carry exp(-m_new),
// so one rescale factor corrects it, exp(m - m_new), whatever the number of keys:
//
//     l_new = l * exp(m - m_new) + sum over the tile of exp(score - m_new)
//     O_new = (O * l * exp(m - m_new) + sum over the tile of exp(score - m_new) * V) / l_new
//
// After the last tile O is exact, and m + log(l) is the row's logsumexp. This is the whole idea of FlashAttention; the rest of the
// ladder maps it to a GPU.
//
// This step maps it in the way one writes it first: a thread is a row. Thread r copies row r of each tile of K and V. For its query
// it calls step 00's `dot` for each of the 32 keys and step 00's `add_weighted` for each 16 bytes of O. Only the K/V tile is shared
// between threads, so only that has barriers.
//
// Against step 01 nearly every line changes, because three launches become one. The structure of this file, a main loop over the
// K/V tiles with the online softmax inside and an epilogue, is that of all steps from here on.
//
// What is wrong with it, in the order of the damage:
//   - Bank conflicts. The 32 threads read 32 rows of Q, and of P, in the same column. Rows are a multiple of 32 elements long, so
//     that column lies in one bank of shared memory: a 32-way conflict. (Step 01 has the cure.)
//   - No parallelism. A head is one block, and the block is one warp. A multiprocessor has room for 64 warps and hides the latency
//     of one behind the others. Here there is no other one.
//   - Uncoalesced loads. With a row a thread, a warp's load touches 32 rows, 32 sectors in 32 lines, and uses 4 bytes of each. The
//     rest may still be in the cache for the next column, but every column issues 32 requests.
//   - O is read and written again for each K/V tile, in the same access pattern, and divided each time. So are m and l.
// The matrix is gone and nothing is gained: step 01 was not limited by memory traffic.
#include <fa/row.cuh>

constexpr int BLOCK_Q = ROWS, BLOCK_K = ROWS, THREADS = ROWS;             // thread r has row r of every tile
constexpr int Q_PITCH = HEAD_DIM, K_PITCH = HEAD_DIM, P_PITCH = BLOCK_K;  // multiples of 32: a column lies in one bank

// 1: no second block a multiprocessor. Without it the compiler saves registers for one by spilling a few.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* k_smem = fa::dynamic_shared<float>();  // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;   // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][Q_PITCH]
    float* p_smem = q_smem + BLOCK_Q * Q_PITCH;   // [BLOCK_Q][P_PITCH]

    const int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head);
    const int row = threadIdx.x;
    float *q_rows = q_smem + row * Q_PITCH, *p_rows = p_smem + row * P_PITCH;  // this thread's; p_rows: scores, then P
    float* m = fa::head_values<float>(args, WORKSPACE_M, batch, head);         // [seq_q]
    float* l = fa::head_values<float>(args, WORKSPACE_L, batch, head);         // [seq_q]

    // Main loop over the K/V tiles. A tile of one row, loaded by one thread: this one.
    for (int k_first = 0; k_first < args.seq_kv; k_first += BLOCK_K) {
        const float* k = fa::row_pointer<float>(args.K, batch, kv_head, k_first + row);  // this thread's row
        const float* v = fa::row_pointer<float>(args.V, batch, kv_head, k_first + row);
        __syncthreads();  // every thread has finished with the previous tile
        fa::load_rows<1, HEAD_DIM, K_PITCH, 1>(k_smem + row * K_PITCH, k, args.K.row, k_first + row, args.seq_kv, args.head_dim, 0);
        fa::load_rows<1, HEAD_DIM, HEAD_DIM, 1>(v_smem + row * HEAD_DIM, v, args.V.row, k_first + row, args.seq_kv, args.head_dim, 0);
        __syncthreads();  // the tile is complete

        // The Q tiles stream past.
        for (int query = row; query < args.seq_q; query += BLOCK_Q) {
            const int visible = min(fa::visible_keys(args, query) - k_first, BLOCK_K);  // keys of this tile
            // A row that sees nothing of the tile keeps its state. The first tile is never skipped: it initialises O, m and l.
            const bool first_tile = k_first == 0;
            if (!first_tile && visible <= 0) continue;

            fa::load_rows<1, HEAD_DIM, Q_PITCH, 1>(q_rows, fa::row_pointer<float>(args.Q, batch, head, query), args.Q.row, query,
                                                   args.seq_q, args.head_dim, 0);

            // S = Q K^T, one row.
            float old_max = first_tile ? -fa::infinity() : m[query], old_sum = first_tile ? 0.0f : l[query], row_max = old_max;
            for (int key = 0; key < visible; ++key) {
                p_rows[key] = float(args.scale) * fa::dot(q_rows, k_smem + key * K_PITCH, HEAD_DIM);
                row_max = max(row_max, p_rows[key]);
            }

            // Online softmax: the terms of the tile under the new maximum, and what the old sum is worth under it.
            float tile_sum = 0;
            for (int key = 0; key < visible; ++key) {
                p_rows[key] = fa::exp(p_rows[key] - row_max);
                tile_sum += p_rows[key];
            }
            // Before the first visible key both maxima are -inf, and -inf - -inf is NaN; the old sum is 0 then. A NaN stays.
            old_sum = old_sum == 0 ? 0.0f : old_sum * fa::exp(old_max - row_max);
            const float row_sum = old_sum + tile_sum, inverse = row_sum == 0 ? 0.0f : 1 / row_sum;  // no visible key: O is 0
            m[query] = row_max, l[query] = row_sum;

            // O = rescale * O + inverse * P V, to global memory and back, once for each K/V tile.
            float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
            for (int d = 0; d < args.head_dim; d += 4) {
                float tile_reg[4] = {};
                fa::add_weighted(tile_reg, p_rows, 1, v_smem + d, HEAD_DIM, 0, visible);
                for (int i = 0; i < min(4, args.head_dim - d); ++i)
                    o[d + i] = (first_tile ? 0.0f : o[d + i] * old_sum * inverse) + tile_reg[i] * inverse;
            }
        }
    }

    // Epilogue: O is complete already; logsumexp = m + log(l).
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, 0);  // [seq_q]
    for (int query = threadIdx.x; query < args.seq_q; query += THREADS) logsumexp[query] = m[query] + fa::log(l[query]);
}
