// /// kernel
// title = "FlashAttention-2's loop order, plainly written"
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
// BLOCK_K = "64 if HEAD_DIM == 64 else 32"  # keys of a tile
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + BLOCK_K * (2 * HEAD_DIM + 1))"
// ///
//
// Step 05. FlashAttention-2's forward pass (Dao 2023, arXiv 2307.08691, Algorithm 1), with nothing added. Hold it beside step
// 03: the tiles, the products and the way threads share them are the same lines. What moved is the loops.
//
//     FlashAttention-1, step 03              FlashAttention-2, here
//     for each K/V tile                      each block: one Q tile
//         for each Q tile                        for each K/V tile
//             O, m, l from memory                    O, m, l are registers
//             one more tile into them                one more tile into them
//             O, m, l back to memory             O and logsumexp to memory, once
//
// Three things follow from the exchange.
//   1. A row's running numbers belong to one block from the first key to the last, so they never leave its registers. Memory
//      sees Q once and O once; K and V are read again by every Q tile, but from the L2 cache, where a head's K and V fit.
//   2. Blocks no longer meet in O, so a head can have as many blocks as it has Q tiles. Two sequences of 512 tokens with eight
//      heads are 16 blocks in step 03 and 256 here, on a GPU of a hundred multiprocessors and more.
//   3. O need not be right after every tile, because nobody looks. It stays the sum of exp(score - m) * V, rescaled only when
//      the maximum m moves, and is divided by l once at the end: the division of every step is gone.
//
// The running softmax itself: with m the largest score so far, l = sum of exp(score - m) and o = sum of exp(score - m) * V, a tile
// with a larger maximum m_new turns them into l * exp(m - m_new) and o * exp(m - m_new) before its own terms are added. The factor
// is 1 where the maximum stays, and exp(-inf) = 0 at the first tile, so it needs no case of its own. m and l then
// leave as one number, logsumexp = m + log(l), which is all that the backward pass wants.
//
// What is still plain: tiles are loaded one float a thread while nobody computes; a lane takes 8 + 2 numbers from shared memory
// for 16 products (at head dim 64); the masked half of a causal tile is computed and thrown away. Step 07 takes these up.
#include <fa/row.cuh>
#include <fa/warp.cuh>

static_assert(BLOCK_K % 32 == 0, "a lane takes every 32nd key of a tile");
static_assert(BLOCK_Q % WARPS == 0, "each warp takes as many queries of a tile");

constexpr int rows = BLOCK_Q / WARPS, threads = 32 * WARPS;  // rows: a warp's, of a Q tile
constexpr int keys = BLOCK_K / 32;      // of a tile, a lane's
constexpr int columns = HEAD_DIM / 32;  // of O, a lane's: lane, lane + 32, ...
constexpr int k_pitch = HEAD_DIM + 1;   // odd, so that 32 lanes reading 32 keys at the same d hit 32 banks

extern "C" __global__ void __launch_bounds__(threads) forward(const __grid_constant__ fa::Args args) {
    int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    int lane = fa::lane_id(), warp = fa::warp_id();
    int q_first = blockIdx.x * BLOCK_Q, row_first = q_first + warp * rows;

    float* k_smem = fa::dynamic_shared<float>();                          // [BLOCK_K][k_pitch]
    float* v_smem = k_smem + BLOCK_K * k_pitch;                           // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM + warp * rows * HEAD_DIM;  // [rows][HEAD_DIM], this warp's
    float* p_smem = v_smem + (BLOCK_K + BLOCK_Q) * HEAD_DIM + warp * rows * BLOCK_K;  // [rows][BLOCK_K], this warp's

    const float* q = fa::row_pointer<const float>(args.Q, batch, head, row_first);  // [rows], Q.row apart
    fa::load_rows<rows, HEAD_DIM, HEAD_DIM, 32>(q_smem, q, args.Q.row, row_first, args.seq_q, args.head_dim, lane);

    float m_reg[rows], l_reg[rows], o_reg[rows][columns];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
        m_reg[r] = -fa::infinity(), l_reg[r] = 0;
#pragma unroll
        for (int c = 0; c < columns; ++c) o_reg[r][c] = 0;
    }

    // Tiles that no row of the block sees are not visited. The bound is the block's, not the warp's: all meet at the barriers.
    int last_query = min(q_first + BLOCK_Q, args.seq_q) - 1;
    for (int k_first = 0; k_first < fa::visible_keys(args, last_query); k_first += BLOCK_K) {
        const float* k = fa::row_pointer<const float>(args.K, batch, kv_head, k_first);  // [BLOCK_K], K.row apart
        const float* v = fa::row_pointer<const float>(args.V, batch, kv_head, k_first);  // [BLOCK_K], V.row apart
        __syncthreads();  // no warp reads the tile before any more
        fa::load_rows<BLOCK_K, HEAD_DIM, k_pitch, threads>(k_smem, k, args.K.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        fa::load_rows<BLOCK_K, HEAD_DIM, HEAD_DIM, threads>(v_smem, v, args.V.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        __syncthreads();  // the tile, and before the first one q_smem, is there for all

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

        float factor_reg[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            int visible = fa::visible_keys(args, row_first + r) - k_first;  // of this tile
            float largest = -fa::infinity();
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                s_reg[r][n] = lane + 32 * n < visible ? float(args.scale) * s_reg[r][n] : -fa::infinity();
                largest = max(largest, s_reg[r][n]);
            }
            float m_new = max(m_reg[r], fa::group_max<32>(largest));
            // A row that has seen no key yet has m = -inf, and -inf - -inf is NaN. Against 0 its terms are exp(-inf) = 0.
            float shift = m_new == -fa::infinity() ? 0.0f : m_new;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                float p = fa::exp(s_reg[r][n] - shift);
                p_smem[r * BLOCK_K + lane + 32 * n] = p;
                sum += p;
            }
            factor_reg[r] = fa::exp(m_reg[r] - shift);
            l_reg[r] = l_reg[r] * factor_reg[r] + fa::group_sum<32>(sum);
            m_reg[r] = m_new;
        }
        __syncwarp();  // p_smem is this warp's alone; the lanes now read each other's

        // The tile's terms are summed by themselves and then added to o: one float32 sum over all keys, of which there may be
        // thousands, would have an error several times as large as that of a sum of sums.
        float tile_reg[rows][columns] = {};
        for (int key = 0; key < BLOCK_K; ++key) {
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                float v_reg = v_smem[key * HEAD_DIM + lane + 32 * c];
#pragma unroll
                for (int r = 0; r < rows; ++r) tile_reg[r][c] += p_smem[r * BLOCK_K + key] * v_reg;
            }
        }
#pragma unroll
        for (int r = 0; r < rows; ++r)
#pragma unroll
            for (int c = 0; c < columns; ++c) o_reg[r][c] = o_reg[r][c] * factor_reg[r] + tile_reg[r][c];
    }

#pragma unroll
    for (int r = 0; r < rows; ++r) {
        int query = row_first + r;
        if (query >= args.seq_q) break;
        float inverse = l_reg[r] > 0 ? 1 / l_reg[r] : 0.0f;  // no visible key: O is 0, and m + log(l) is -inf
        float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
#pragma unroll
        for (int c = 0; c < columns; ++c)
            if (lane + 32 * c < args.head_dim) o[lane + 32 * c] = o_reg[r][c] * inverse;
        if (lane == 0) *fa::row_pointer<float>(args.logsumexp, batch, head, query) = m_reg[r] + fa::log(l_reg[r]);
    }
}
