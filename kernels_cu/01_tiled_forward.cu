// /// kernel
// title = "three launches, both products tiled through shared memory"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// TILE = 32                        # rows of a tile of Q, P, K or V
// ROWS = 4                         # queries of a tile that a thread has
// THREADS = 128                    # of a block of the softmax
// [workspace.scores]
// dtype = "float32"
// size = "batch * heads_q * seq_q * seq_kv"
// init = "none"
// [[launch]]
// entry = "scores"                 # a block computes TILE x TILE scores
// grid = ["ceil_div(seq_q, TILE) * ceil_div(seq_kv, TILE)", "heads_q", "batch"]
// block = "TILE * TILE // ROWS"
// [[launch]]
// entry = "softmax"                # a warp normalises one row
// grid = ["ceil_div(seq_q, THREADS // 32)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "output"                 # a block computes TILE rows of O
// grid = ["ceil_div(seq_q, TILE)", "heads_q", "batch"]
// block = "TILE * TILE // ROWS"
// ///
//
// Step 01, read against step 00. Both products, S = Q K^T and O = P V, are tiled through shared memory; the three launches, the
// softmax and the matrix of scores are those of step 00. In step 00 each thread loads both operands of every product from global
// memory, two loads for each multiply-add. But the 32 scores of a query against 32 keys need that query 32 times, and 31 more
// queries need the same 32 keys. The cache answers most of these requests, one by one.
//
// Shared memory is a cache under the program's control. A block of 256 threads
//
//     in `scores`   loads 32 rows of Q and 32 rows of K and computes their 32 x 32 scores: a thread computes four of them, one key
//                   against four queries, a warp those of the 32 keys
//     in `output`   loops over the keys, 32 at a time: loads 32 x 32 elements of P and 32 rows of V, and adds their product to
//                   its 32 rows of O, of which a thread has four, and two columns at head dim 64
//
// At head dim 64 the scores of a block are 65536 multiply-adds from 4096 loaded elements: one load for 16 multiply-adds, where step
// 00 needs 32. And the loads are coalesced: neighbouring threads load neighbouring elements, 128 bytes a warp. Step 00 reads a row
// of K a thread, which is 32 separate sectors for each load of a warp: that launch takes four fifths of its time.
//
// The price is synchronisation. __syncthreads separates writing a tile from reading it and, where tiles follow each other, reading
// it from overwriting it.
//
// Shared memory has 32 banks; element i is in bank i % 32. A warp's 32 elements arrive at once only if they come from 32 banks, or
// if lanes read the same element (a broadcast), as they do of Q and P. In the scores the lanes read 32 keys at one d, a column of
// the tile. With rows of 64 elements that column lies in a single bank: a 32-way bank conflict. Padding each row by one element
// shifts each key by one bank.
//
// Against step 00 both products change and the softmax does not. The shared tiles, their loads and the sums in registers stand
// twice, once for each product: more lines than the 60 that a step should change.
//
// What remains:
//   - Issue slots limit `scores`: a block loads its tiles, uses them once and ends, so addresses, bounds and loads take three of four
//     instructions. Eight blocks on a multiprocessor hide the latency.
//   - The matrix is still written, rewritten and read through global memory, and grows with the square of the length. Step 02
//     removes it.
#include <fa/row.cuh>
#include <fa/warp.cuh>

using scalar = fa::DTYPE;               // storage
using real = fa::accumulate_t<scalar>;  // arithmetic

constexpr int TILE_THREADS = TILE * TILE / ROWS, ROW_STEP = TILE / ROWS;  // a thread's rows: row, row + ROW_STEP, …
constexpr int COLUMNS = HEAD_DIM / TILE, K_PITCH = HEAD_DIM + 1;          // K_PITCH is odd: a column lies in 32 banks

static_assert(HEAD_DIM % TILE == 0 && TILE % ROWS == 0, "the same number of elements for each thread");

// S[query][key] = scale * Q[query] · K[key]. A block makes TILE x TILE scores.
extern "C" __global__ void __launch_bounds__(TILE_THREADS) scores(const __grid_constant__ fa::Args args) {
    __shared__ real q_smem[TILE][HEAD_DIM], k_smem[TILE][K_PITCH];
    int key_blocks = (args.seq_kv + TILE - 1) / TILE;
    int q_first = blockIdx.x / key_blocks * TILE, k_first = blockIdx.x % key_blocks * TILE;
    int head = blockIdx.y, batch = blockIdx.z;
    int row = threadIdx.x / TILE, lane = threadIdx.x % TILE, key = k_first + lane;
    // A tile beyond the causal mask is seen by none of its queries. All threads of the block leave, so none waits for another.
    if (k_first >= fa::visible_keys(args, min(q_first + TILE, args.seq_q) - 1)) return;

    const scalar* q = fa::row_pointer<scalar>(args.Q, batch, head, q_first);                         // [TILE], Q.row apart
    const scalar* k = fa::row_pointer<scalar>(args.K, batch, fa::kv_head_of(args, head), k_first);  // [TILE], K.row apart
    fa::load_rows<TILE, HEAD_DIM, HEAD_DIM, TILE_THREADS>(q_smem[0], q, args.Q.row, q_first, args.seq_q, args.head_dim);
    fa::load_rows<TILE, HEAD_DIM, K_PITCH, TILE_THREADS>(k_smem[0], k, args.K.row, k_first, args.seq_kv, args.head_dim);
    __syncthreads();  // both tiles are complete

    real score_reg[ROWS] = {};
    for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) score_reg[r] += q_smem[row + ROW_STEP * r][d] * k_smem[lane][d];
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int query = q_first + row + ROW_STEP * r;
        if (query < args.seq_q && key < fa::visible_keys(args, query))
            fa::matrix_row<real>(args, WORKSPACE_SCORES, batch, head, query)[key] = real(args.scale) * score_reg[r];
    }
}

// P[query] = softmax(S[query]) in place, and logsumexp[query], as in step 00. A warp normalises one row, 32 neighbouring keys at a
// time. A key always belongs to the same lane, so nothing but the two reductions stands between the passes over the row.
extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ fa::Args args) {
    int query = blockIdx.x * (THREADS / 32) + fa::warp_id(), head = blockIdx.y, batch = blockIdx.z;
    if (query >= args.seq_q) return;
    int visible = fa::visible_keys(args, query);
    real* row = fa::matrix_row<real>(args, WORKSPACE_SCORES, batch, head, query);  // [seq_kv]

    real row_max = -fa::infinity();
    for (int key = fa::lane_id(); key < visible; key += 32) row_max = max(row_max, row[key]);
    row_max = fa::group_max<32>(row_max);

    real row_sum = 0;
    for (int key = fa::lane_id(); key < visible; key += 32) {
        row[key] = fa::exp(row[key] - row_max);
        row_sum += row[key];
    }
    row_sum = fa::group_sum<32>(row_sum);

    for (int key = fa::lane_id(); key < visible; key += 32) row[key] /= row_sum;

    // No visible key: row_max is -inf, row_sum is 0 and its log -inf. Nothing above was divided by that row_sum.
    if (fa::lane_id() == 0) *fa::row_pointer<real>(args.logsumexp, batch, head, query) = row_max + fa::log(row_sum);
}

// O[query] = sum over keys of P[query][key] * V[key]. A block makes TILE rows of O.
extern "C" __global__ void __launch_bounds__(TILE_THREADS) output(const __grid_constant__ fa::Args args) {
    __shared__ real p_smem[TILE][TILE], v_smem[TILE][HEAD_DIM];  // V is read along its rows: no padding
    int q_first = blockIdx.x * TILE, q_end = min(q_first + TILE, args.seq_q), head = blockIdx.y, batch = blockIdx.z;
    int row = threadIdx.x / TILE, lane = threadIdx.x % TILE;

    // Main loop over the tiles of P and V
    real out_reg[ROWS][COLUMNS] = {};
    for (int k_first = 0; k_first < fa::visible_keys(args, q_end - 1); k_first += TILE) {
        const scalar* v = fa::row_pointer<scalar>(args.V, batch, fa::kv_head_of(args, head), k_first);  // [TILE], V.row apart
        __syncthreads();  // every thread has finished with the previous tiles
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            int query = q_first + row + ROW_STEP * r, key = k_first + lane;
            bool there = query < args.seq_q && key < fa::visible_keys(args, query);  // the rest was never written
            p_smem[row + ROW_STEP * r][lane] = there ? fa::matrix_row<real>(args, WORKSPACE_SCORES, batch, head, query)[key] : 0.0f;
        }
        fa::load_rows<TILE, HEAD_DIM, HEAD_DIM, TILE_THREADS>(v_smem[0], v, args.V.row, k_first, args.seq_kv, args.head_dim);
        __syncthreads();  // both tiles are complete

        // A tile is summed by itself first (fa::add_tile says why).
        real tile_reg[ROWS][COLUMNS] = {};
        for (int key = 0; key < TILE; ++key) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) tile_reg[r][c] += p_smem[row + ROW_STEP * r][key] * v_smem[key][lane + TILE * c];
        }
        fa::add_tile(out_reg, tile_reg);
    }

    // Epilogue
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int query = q_first + row + ROW_STEP * r;
        if (query >= q_end) break;
        fa::store_output<scalar, TILE, 1>(fa::row_pointer<scalar>(args.O, batch, head, query), out_reg[r], 1.0f, lane, args.head_dim);
    }
}
