// /// kernel
// title = "two-dimensional blocks, coalesced loads: 32 warps a head"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// BLOCK_Q = 32                     # queries of a tile: the block's second dimension. Its first is a warp
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
// block = "32 * BLOCK_Q"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + BLOCK_K * (2 * HEAD_DIM + 1))"
// ///
//
// Step 04. The loops of step 03, K/V outside and Q inside, and its formulas. Another shape of block. In step 03 a head has four
// warps, and a multiprocessor, which holds one head and could hold 64 warps, hears "wait" from all four most of the time. Here the
// block is two-dimensional, 32 x 32 threads, and is laid over each matrix in turn. (x, y) is
//
//     while Q, K and V are loaded    number x, x + 32, … of row y, y + 32, …
//     in S = Q K^T                   key x, x + 32, … of query y
//     in O = P V                     column x, x + 32, … of query y
//
// One rule makes all three fast: x, the index that changes from a thread to its neighbour in the warp, runs along the direction in
// which the matrix lies in memory. Then the 32 threads of a row of the block ask for 128 neighbouring bytes: the load is "coalesced",
// four sectors of 32 bytes, all of them used. Step 02 had it the other way round, its threads side by side in different rows.
// Shared memory is asked in the same manner: 32 neighbours are 32 banks. Only K is read across its rows, in the scores, and its
// rows are one number longer than they need be, so that the same d of 32 keys lies in 32 banks.
//
// CUDA can number threads in two dimensions itself (threadIdx.x and .y). It does so by counting x first, and 32 in a row are a warp:
// what the first two lines of the kernel write out. As a row of the block is a warp, and a query a row of the block,
// a query never leaves its warp. Its maximum and sum are shuffles, and of its row of Q and of P no other warp knows: __syncwarp
// is enough, and __syncthreads is left for the K/V tile alone.
//
// What it costs: step 03's lane made 8 queries x 4 keys and used a number of K eight times when it had fetched it. Here it is
// used once: one number from shared memory for each product, where a multiprocessor gets 32 a cycle and could multiply
// 128. So this step trades one limit, latency, for another, the rate of shared memory. Step 06 has an answer to both.
//
// What is still bad is what was: O, m and l make a round trip through memory for each K/V tile, and a head is one block, whatever the
// GPU could do beside it. Both have one cause, the order of the loops, and step 05 exchanges them.
#include <fa/row.cuh>
#include <fa/warp.cuh>

static_assert(BLOCK_K % 32 == 0, "a thread takes every 32nd key of a tile");

constexpr int threads = 32 * BLOCK_Q;
constexpr int keys = BLOCK_K / 32;      // of a tile, a thread's
constexpr int columns = HEAD_DIM / 32;  // of O, a thread's
constexpr int k_pitch = HEAD_DIM + 1;   // odd, so that 32 lanes reading 32 keys at the same d hit 32 banks

// Rows of one head to shared memory, y taking the rows and x the columns. What is not there becomes zero.
__device__ __forceinline__ void load_tile(float* to_smem /* [rows][pitch] */, int pitch, const float* from /* [rows][head_dim] */,
                                          fa::int64_t stride, int rows, int there, int head_dim, int x, int y) {
    for (int row = y; row < rows; row += BLOCK_Q)
#pragma unroll
        for (int d = x; d < HEAD_DIM; d += 32) to_smem[row * pitch + d] = row < there && d < head_dim ? from[row * stride + d] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(threads, 1) forward(const __grid_constant__ fa::Args args) {
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    int head = blockIdx.x, batch = blockIdx.y, kv_head = fa::kv_head_of(args, head);

    float* k_smem = fa::dynamic_shared<float>();                               // [BLOCK_K][k_pitch]
    float* v_smem = k_smem + BLOCK_K * k_pitch;                                // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM + y * HEAD_DIM;                // [HEAD_DIM], this warp's row
    float* p_smem = v_smem + (BLOCK_K + BLOCK_Q) * HEAD_DIM + y * BLOCK_K;     // [BLOCK_K], this warp's row

    fa::int64_t first_row = (fa::int64_t(batch) * args.heads_q + head) * args.seq_q;
    float* m = static_cast<float*>(args.workspace[WORKSPACE_M]) + first_row;  // [seq_q]
    float* l = static_cast<float*>(args.workspace[WORKSPACE_L]) + first_row;  // [seq_q]

    for (int k_first = 0; k_first < args.seq_kv; k_first += BLOCK_K) {
        const float* k = fa::row_pointer<const float>(args.K, batch, kv_head, k_first);  // [BLOCK_K], K.row apart
        const float* v = fa::row_pointer<const float>(args.V, batch, kv_head, k_first);  // [BLOCK_K], V.row apart
        __syncthreads();  // no warp reads the tile before any more
        load_tile(k_smem, k_pitch, k, args.K.row, BLOCK_K, args.seq_kv - k_first, args.head_dim, x, y);
        load_tile(v_smem, HEAD_DIM, v, args.V.row, BLOCK_K, args.seq_kv - k_first, args.head_dim, x, y);
        __syncthreads();  // the tile is there for all

        for (int query = y; query < args.seq_q; query += BLOCK_Q) {
            int visible = fa::visible_keys(args, query) - k_first;  // of this tile
            // A row that sees nothing of the tile keeps what it has. The first tile must go on: it is what O, m, l start from.
            bool first_tile = k_first == 0;
            if (!first_tile && visible <= 0) continue;

            const float* q = fa::row_pointer<const float>(args.Q, batch, head, query);  // [head_dim]
            __syncwarp();  // no lane reads the rows of Q and P before any more
#pragma unroll
            for (int d = x; d < HEAD_DIM; d += 32) q_smem[d] = d < args.head_dim ? q[d] : 0.0f;
            __syncwarp();

            // Every lane reads the same q (a broadcast) and its own k.
            float s_reg[keys] = {};
            for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
                for (int n = 0; n < keys; ++n) s_reg[n] += q_smem[d] * k_smem[(x + 32 * n) * k_pitch + d];
            }

            float largest = -fa::infinity();
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                s_reg[n] = x + 32 * n < visible ? float(args.scale) * s_reg[n] : -fa::infinity();
                largest = max(largest, s_reg[n]);
            }
            float m_old = first_tile ? -fa::infinity() : m[query], l_old = first_tile ? 0.0f : l[query];
            float m_new = max(m_old, fa::group_max<32>(largest));
            // A row that has seen no key yet has m = -inf, and -inf - -inf is NaN. Against 0 its terms are exp(-inf) = 0.
            float shift = m_new == -fa::infinity() ? 0.0f : m_new;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                float p = fa::exp(s_reg[n] - shift);
                p_smem[x + 32 * n] = p;
                sum += p;
            }
            l_old *= fa::exp(m_old - shift);
            float l_new = l_old + fa::group_sum<32>(sum);
            float inverse = l_new > 0 ? 1 / l_new : 0.0f;  // no visible key: O is 0
            float rescale = l_old * inverse;
            if (x == 0) m[query] = m_new, l[query] = l_new;
            __syncwarp();  // the lanes now read each other's p

            // Every lane reads the same p and its own columns of v.
            float o_reg[columns] = {};
            for (int key = 0; key < BLOCK_K; ++key) {
#pragma unroll
                for (int c = 0; c < columns; ++c) o_reg[c] += p_smem[key] * v_smem[key * HEAD_DIM + x + 32 * c];
            }

            float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                int d = x + 32 * c;
                if (d < args.head_dim) o[d] = (first_tile ? 0.0f : rescale * o[d]) + inverse * o_reg[c];
            }
        }
    }

    __syncthreads();  // m and l of all the warps are there
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, 0);  // [seq_q]
    for (int query = threadIdx.x; query < args.seq_q; query += threads) logsumexp[query] = m[query] + fa::log(l[query]);
}
