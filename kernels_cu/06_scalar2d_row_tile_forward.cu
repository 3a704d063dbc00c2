// /// kernel
// title = "square register tiles, 16-byte loads from shared memory"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// BLOCK_Q = 64                     # queries of a block: 16 rows of threads, four queries each
// BLOCK_K = "64 if HEAD_DIM == 64 and shared_optin >= 98304 else 32"  # keys of a tile
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "16 * (BLOCK_Q // 4)"    # 16 lanes share four queries
// shared = "4 * (BLOCK_Q * (HEAD_DIM + 4 + BLOCK_K + 4) + BLOCK_K * (2 * HEAD_DIM + 4))"
// ///
//
// Step 06, read against step 05. Square register tiles and 16-byte loads from shared memory. The loops are those of step 05: a
// block has a resident Q tile and streams K and V, O and the row state stay in registers. What changes is the register tile of a
// thread in the two products. In step 05 it is a strip, 8 queries x 2 keys. To multiply r queries by n keys at one d takes r + n
// elements from shared memory for r * n multiply-adds, so a square needs the fewest loads, and the larger the better:
//
//     step 04    1 x 4     5 elements for  4 multiply-adds      step 05    8 x 2    10 elements for 16 multiply-adds
//     here       4 x 4     8 elements for 16 multiply-adds      step 07    8 x 8    16 elements for 64 multiply-adds
//
// The block is two-dimensional, 16 x 16 threads, over 64 queries x 64 keys. A thread has 4 neighbouring queries, in the scores keys
// lane, lane + 16, lane + 32, lane + 48, then 4 columns of O for the same queries. (At head dim 128: 2 keys, 8 columns.) Half a
// warp shares its queries, so row maximum and row sum are shuffles among 16 lanes, and P passes through shared memory within the
// warp.
//
// The second gain is the width of a load. A thread needs four neighbouring elements of each row, so it loads 16 bytes at once: 8
// load instructions now feed 64 multiply-adds where step 05 spends 16 on as many, and an issue slot not spent on a load is free for
// a multiply-add. The four are neighbours along d in the scores, for Q and K alike; in P V along the keys for P, and along the
// columns for V.
//
// 16 bytes a lane are 512 a warp, and shared memory moves 128 a cycle. Such a load is served in four phases of eight lanes each,
// and bank conflicts arise within a phase: the eight lanes must touch eight different groups of four banks, or the same address. V
// is read along its rows, 32 neighbouring elements: no conflict. K is read across its rows, at one d of eight neighbouring keys.
// With rows of 64 elements, a multiple of the 32 banks, all eight would lie in one group, so rows are padded by four elements: one
// group further from key to key. Of Q and P the eight lanes of a phase read one address, a broadcast.
//
// A block of 64 queries rather than 32 also halves how often K and V are loaded from the L2 cache, and the instructions of these
// loads. In step 05 those are four for every five multiply-adds.
//
// What remains:
//   - A tile is loaded one element a thread, with some 25 instructions each for addresses and bounds, and all warps of the block
//     wait for it. Only another block of the multiprocessor has multiply-adds to issue meanwhile.
//   - 4 x 4 is small: in the machine code of the two loops a sixth and a fifth of the instructions are not multiply-adds.
//   - The padding costs shared memory, and limits how many blocks fit.
//   - Under the causal mask the tiles on the diagonal are computed whole, and every tile is masked, needed or not.
#include <fa/row.cuh>

constexpr int LANES = 16, ROWS = 4, THREADS = LANES * BLOCK_Q / ROWS;  // 16 lanes share 4 queries
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;      // of a lane: keys lane, lane + 16, …; columns four by four
// 16-byte loads are served eight lanes at a time: rows padded by 4 put eight neighbouring rows into eight different groups of 4 banks.
constexpr int Q_PITCH = HEAD_DIM + 4, K_PITCH = HEAD_DIM + 4, P_PITCH = BLOCK_K + 4;

static_assert(BLOCK_Q % 8 == 0 && BLOCK_K % LANES == 0, "whole warps, whole keys for each lane");

// 2 blocks a multiprocessor, which has 65536 registers.
extern "C" __global__ void __launch_bounds__(THREADS, 2) forward(const __grid_constant__ fa::Args args) {
    float* k_smem = fa::dynamic_shared<float>();  // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;   // [BLOCK_K][HEAD_DIM]
    float* q_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][Q_PITCH]
    float* p_smem = q_smem + BLOCK_Q * Q_PITCH;   // [BLOCK_Q][P_PITCH]

    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    const int q_first = blockIdx.x * BLOCK_Q + row;                            // the first query of this thread
    const int q_last = min(q_first - row + BLOCK_Q, args.seq_q) - 1;  // of the block
    float *q_rows = q_smem + row * Q_PITCH, *p_rows = p_smem + row * P_PITCH;  // [ROWS][…], those of this thread's 16 lanes

    // Prologue: Q, which is resident, and the state of each row: maximum, sum, and O before the division by the sum.
    const float* q = fa::row_pointer<float>(args.Q, batch, head, q_first - row);  // [BLOCK_Q], Q.row apart
    fa::load_rows<BLOCK_Q, HEAD_DIM, Q_PITCH, THREADS>(q_smem, q, args.Q.row, q_first - row, args.seq_q, args.head_dim);
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

        // S = Q K^T: 4 queries by KEYS keys, four elements of d at a time.
        float score_reg[ROWS][KEYS] = {};
#pragma unroll 2
        for (int d = 0; d < HEAD_DIM; d += 4) {
            fa::Vec<float, 4> q_reg[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) q_reg[r] = fa::load_vec<4>(q_rows + r * Q_PITCH + d);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                fa::Vec<float, 4> k_reg = fa::load_vec<4>(k_smem + (lane + LANES * n) * K_PITCH + d);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int i = 0; i < 4; ++i) score_reg[r][n] += q_reg[r][i] * k_reg[i];
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

        // O = rescale * O + P V: 4 queries by COLUMNS columns, four keys at a time.
        float tile_reg[ROWS][COLUMNS] = {};
#pragma unroll 1
        for (int key = 0; key < BLOCK_K; key += 4) {
            fa::Vec<float, 4> p_reg[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) p_reg[r] = fa::load_vec<4>(p_rows + r * P_PITCH + key);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < COLUMNS; c += 4) {
                    fa::Vec<float, 4> v_reg = fa::load_vec<4>(v_smem + (key + i) * HEAD_DIM + 4 * lane + LANES * c);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int j = 0; j < 4; ++j) tile_reg[r][c + j] += p_reg[r][i] * v_reg[j];
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
        fa::store_output<float, LANES>(o, out_reg[r], inverse, lane, args.head_dim);
        if (lane == 0) *fa::row_pointer<float>(args.logsumexp, batch, head, q_first + r) = row_max[r] + fa::log(row_sum[r]);
    }
}
