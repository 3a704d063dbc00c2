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
#include <fa/warp.cuh>

// The 1 gives up on further blocks per multiprocessor: without it the compiler, unasked, saves registers by spilling a few.
extern "C" __global__ void __launch_bounds__(ROWS, 1) forward(const __grid_constant__ fa::Args args) {
    int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head), row = threadIdx.x;

    float* k_smem = fa::dynamic_shared<float>();                           // [ROWS][HEAD_DIM]
    float* v_smem = k_smem + ROWS * HEAD_DIM;                              // [ROWS][HEAD_DIM]
    float* q_smem = v_smem + ROWS * HEAD_DIM + row * HEAD_DIM;             // [HEAD_DIM], this thread's row
    float* p_smem = v_smem + 2 * ROWS * HEAD_DIM + row * ROWS;             // [ROWS], this thread's: first scores, then exp of them

    fa::int64_t first_row = (fa::int64_t(batch) * args.heads_q + head) * args.seq_q;
    float* m = static_cast<float*>(args.workspace[WORKSPACE_M]) + first_row;  // [seq_q]
    float* l = static_cast<float*>(args.workspace[WORKSPACE_L]) + first_row;  // [seq_q]

    for (int k_first = 0; k_first < args.seq_kv; k_first += ROWS) {
        const float* k = fa::row_pointer<const float>(args.K, batch, kv_head, k_first + row);  // [head_dim]
        const float* v = fa::row_pointer<const float>(args.V, batch, kv_head, k_first + row);  // [head_dim]
        __syncthreads();  // nobody reads the tile before any more
        // A tile of one row, loaded by one thread: this one.
        fa::load_rows<1, HEAD_DIM, HEAD_DIM, 1>(k_smem + row * HEAD_DIM, k, 0, k_first + row, args.seq_kv, args.head_dim, 0);
        fa::load_rows<1, HEAD_DIM, HEAD_DIM, 1>(v_smem + row * HEAD_DIM, v, 0, k_first + row, args.seq_kv, args.head_dim, 0);
        __syncthreads();  // the tile is there for all

        for (int query = row; query < args.seq_q; query += ROWS) {
            int visible = min(fa::visible_keys(args, query) - k_first, ROWS);  // keys of this tile that the query sees
            // A row that sees nothing of the tile keeps what it has. The first tile must go on: it is what O, m and l start from.
            bool first_tile = k_first == 0;
            if (!first_tile && visible <= 0) continue;

            const float* q = fa::row_pointer<const float>(args.Q, batch, head, query);  // [head_dim]
            fa::load_rows<1, HEAD_DIM, HEAD_DIM, 1>(q_smem, q, 0, query, args.seq_q, args.head_dim, 0);

            float m_old = first_tile ? -fa::infinity() : m[query], l_old = first_tile ? 0.0f : l[query], m_new = m_old;
            for (int key = 0; key < visible; ++key) {
                p_smem[key] = float(args.scale) * fa::dot(q_smem, k_smem + key * HEAD_DIM, HEAD_DIM);
                m_new = max(m_new, p_smem[key]);
            }
            float sum = 0;
            for (int key = 0; key < visible; ++key) {
                p_smem[key] = fa::exp(p_smem[key] - m_new);
                sum += p_smem[key];
            }
            // Before the first visible key both maxima are -inf, and -inf - -inf is NaN; there is nothing to keep then.
            l_old = l_old > 0 ? l_old * fa::exp(m_old - m_new) : 0.0f;
            float l_new = l_old + sum, inverse = l_new > 0 ? 1 / l_new : 0.0f;  // no visible key: O is 0
            m[query] = m_new, l[query] = l_new;

            float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
            for (int d = 0; d < args.head_dim; d += 4) {
                float tile_reg[4] = {};
                fa::add_weighted(tile_reg, p_smem, 1, v_smem + d, HEAD_DIM, 0, visible);
                for (int i = 0; i < min(4, args.head_dim - d); ++i)
                    o[d + i] = (first_tile ? 0.0f : o[d + i] * l_old * inverse) + tile_reg[i] * inverse;
            }
        }
    }

    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, 0);  // [seq_q]
    for (int query = row; query < args.seq_q; query += ROWS) logsumexp[query] = m[query] + fa::log(l[query]);
}
