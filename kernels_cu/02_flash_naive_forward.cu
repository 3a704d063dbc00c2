// /// kernel
// title = "FlashAttention as a first try: a block a head, a thread a row"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// ROWS = 32                        # of a tile of Q, K or V; threads of a block
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
// Step 02. The matrix of scores is gone. One launch takes a tile of queries and a tile of keys at a time, makes their 32 x 32
// scores in shared memory, uses them there, and forgets them. Memory holds Q, K, V, O, and two numbers a row.
//
// The obstacle is the softmax, which wants the maximum and the sum of a whole row before it gives out the first probability, while
// here a row comes 32 scores at a time. The answer is to give out probabilities too early and to correct them later.
// Say that a row has seen some keys: m is the largest score among them, l the sum of their exp(score - m), and O the average of their
// V under the softmax over just them. Now a tile brings more keys, and a maximum m_new that may be larger. All that was summed so far
// had exp(-m) in it and should have had exp(-m_new), so one factor repairs it, exp(m - m_new), whatever the number of keys:
//
//     l_new = l * exp(m - m_new) + sum over the tile of exp(score - m_new)
//     O_new = (O * l * exp(m - m_new) + sum over the tile of exp(score - m_new) * V) / l_new
//
// After the last tile O is attention, exactly, and m + log(l) the row's logsumexp. That is all of FlashAttention's idea; what
// follows in this ladder is how to let a GPU do it well.
//
// This step does not. It is the program one writes down first: a thread is a row. To fill a tile of K and V, thread r copies row r.
// To use it, thread r takes query r of a tile, calls step 00's `dot` for each of the 32 keys, step 00's `add_weighted` for each
// 16 bytes of O, and needs nobody else on the way. The only barriers are around the K/V tile, the only thing that threads share.
//
// What is wrong with it, in the order of the damage:
//   - Bank conflicts. The 32 threads read 32 rows of Q, and of P, in the same column. Rows are a multiple of 32 numbers long, so
//     that column lies in one bank of shared memory and each of the threads waits for the 31 others. (Step 01 has the cure.)
//   - A head is one block, and the block is one warp. A multiprocessor has room for 64 warps, and needs many, because a warp that
//     waits for memory costs nothing as long as another one can go on. Here there is no other one.
//   - Uncoalesced loads. With a row a thread, a warp's load touches 32 rows, 32 sectors in 32 lines, and uses 4 bytes of each.
//     The rest may still be in the cache when the next column wants it, but every column asks 32 times.
//   - O is read and written again for each K/V tile, in the same bad pattern, and divided each time. So are m and l.
// So the matrix is gone, and nothing is won: less traffic is worth little to a program that does not wait for traffic.
#include <fa/row.cuh>

constexpr int BLOCK_Q = ROWS, BLOCK_K = ROWS, THREADS = ROWS;             // thread r has row r of every tile
constexpr int Q_PITCH = HEAD_DIM, K_PITCH = HEAD_DIM, P_PITCH = BLOCK_K;  // multiples of 32: a column lies in one bank

// 1: no second block a multiprocessor. Without it the compiler saves registers for one by spilling a few.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();  // [BLOCK_Q][Q_PITCH]
    float* k_smem = q_smem + BLOCK_Q * Q_PITCH;   // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;   // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][P_PITCH]

    const int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head);
    const int row = threadIdx.x;
    float *q_row = q_smem + row * Q_PITCH, *p_row = p_smem + row * P_PITCH;  // this thread's; p_row: scores, then P
    float* m = fa::head_values<float>(args, WORKSPACE_M, batch, head);  // [seq_q]
    float* l = fa::head_values<float>(args, WORKSPACE_L, batch, head);  // [seq_q]

    // Main loop over the K/V tiles. A tile of one row, loaded by one thread: this one.
    for (int k_first = 0; k_first < args.seq_kv; k_first += BLOCK_K) {
        __syncthreads();  // every thread has finished with the previous tile
        fa::load_rows<1, HEAD_DIM, K_PITCH, 1>(k_smem + row * K_PITCH, args.K, batch, kv_head, k_first + row, args.seq_kv, args.head_dim,
                                               0);
        fa::load_rows<1, HEAD_DIM, HEAD_DIM, 1>(v_smem + row * HEAD_DIM, args.V, batch, kv_head, k_first + row, args.seq_kv, args.head_dim,
                                                0);
        __syncthreads();  // the tile is complete

        // The Q tiles stream past.
        for (int q_first = 0; q_first + row < args.seq_q; q_first += BLOCK_Q) {
            const int query = q_first + row, visible = min(fa::visible_keys(args, query) - k_first, BLOCK_K);  // keys of this tile
            // A row that sees nothing of the tile keeps its state. The first tile is never skipped: it initialises O, m and l.
            const bool first_tile = k_first == 0;
            if (!first_tile && visible <= 0) continue;

            fa::load_rows<1, HEAD_DIM, Q_PITCH, 1>(q_row, args.Q, batch, head, query, args.seq_q, args.head_dim, 0);

            // S = Q K^T, one row.
            float old_max = first_tile ? -fa::infinity() : m[query], old_sum = first_tile ? 0.0f : l[query], row_max = old_max;
            for (int key = 0; key < visible; ++key) {
                p_row[key] = float(args.scale) * fa::dot(q_row, k_smem + key * K_PITCH, HEAD_DIM);
                row_max = max(row_max, p_row[key]);
            }

            // Online softmax: the terms of the tile under the new maximum, and what the old sum is worth under it.
            float tile_sum = 0;
            for (int key = 0; key < visible; ++key) {
                p_row[key] = fa::exp(p_row[key] - row_max);
                tile_sum += p_row[key];
            }
            // Before the first visible key both maxima are -inf, and -inf - -inf is NaN; the old sum is 0 then.
            old_sum = old_sum > 0 ? old_sum * fa::exp(old_max - row_max) : 0.0f;
            const float row_sum = old_sum + tile_sum, inverse = row_sum > 0 ? 1 / row_sum : 0.0f;  // no visible key: O is 0
            m[query] = row_max, l[query] = row_sum;

            // O = rescale * O + inverse * P V, to global memory and back, once for each K/V tile.
            float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
            for (int d = 0; d < args.head_dim; d += 4) {
                float tile_reg[4] = {};
                fa::add_weighted(tile_reg, p_row, 1, v_smem + d, HEAD_DIM, 0, visible);
                for (int i = 0; i < min(4, args.head_dim - d); ++i)
                    o[d + i] = (first_tile ? 0.0f : o[d + i] * old_sum * inverse) + tile_reg[i] * inverse;
            }
        }
    }

    // Epilogue: O is complete already; logsumexp = m + log(l).
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, 0);  // [seq_q]
    for (int query = row; query < args.seq_q; query += ROWS) logsumexp[query] = m[query] + fa::log(l[query]);
}
