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
// ROWS = 4                         # of the queries of a tile, a thread's
// THREADS = 128                    # of a block in the softmax
// [workspace.scores]
// dtype = "float32"
// size = "batch * heads_q * seq_q * seq_kv"
// init = "none"
// [[launch]]
// entry = "scores"                 # a block makes TILE x TILE scores
// grid = ["ceil_div(seq_q, TILE) * ceil_div(seq_kv, TILE)", "heads_q", "batch"]
// block = "TILE * TILE // ROWS"
// [[launch]]
// entry = "softmax"                # a warp makes one row
// grid = ["ceil_div(seq_q, THREADS // 32)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "output"                 # a block makes TILE rows of O
// grid = ["ceil_div(seq_q, TILE)", "heads_q", "batch"]
// block = "TILE * TILE // ROWS"
// ///
//
// Step 01. The three launches of step 00, with the same matrix of scores between them. New is how the two products, S = Q K^T and
// O = P V, get at their numbers. In step 00 each thread fetches for itself all that it multiplies, two numbers for each product. But
// the 32 scores of a query against 32 keys want that query 32 times, and 31 more queries want the same 32 keys. A cache answers most
// of these requests, one by one.
//
// Shared memory is a cache that the program fills itself. A block of 256 threads
//
//     in `scores`   brings 32 rows of Q and 32 rows of K, and makes the 32 x 32 scores of these: a thread makes four of them, a key
//                   against four queries, and a warp those of the 32 keys
//     in `output`   walks over the keys, 32 at a time: brings 32 x 32 numbers of P and 32 rows of V, and adds their product to
//                   its 32 rows of O, of which a thread has four, and two columns at head dim 64
//
// At head dim 64 the scores of a block are 65536 products, and 4096 numbers come from memory for them: one for every 16 products,
// where step 00 asks for 32. And they come well. Neighbouring threads bring neighbouring numbers, so a warp fetches 128 bytes in
// a piece. Step 00 reads K a row a thread, which is 32 separate places for each load of a warp: the launch that does so takes four fifths
// of its time.
//
// __syncthreads is the price: nobody may read before all have written, and, where tiles follow each other, nobody may write the next
// one while somebody still reads this one.
//
// Shared memory stands in 32 banks, number i in bank i % 32, and a warp gets its 32 numbers at once only where they come from 32
// banks (or where lanes want the same number, as they do of Q and P). In the scores the lanes read 32 keys at one d, a column of
// the tile. With rows of 64 numbers that column would lie in a single bank, and the lanes would be served one after the other. A row
// one number longer shifts each key by one bank.
//
// What is still bad:
//   - Shared memory gives a multiprocessor 32 numbers a cycle, but 128 products could start in it. A number of K, once fetched, is
//     used for four products, and each of them takes a number of Q too. It comes to half the speed at best.
//   - A block of `scores` brings its tiles, waits for them, uses them once and ends.
//   - The matrix is still written once, read twice and rewritten once, and its memory still grows with the square of the length. To
//     tile the products leaves that as it is. The next step gets rid of it.
#include <fa/row.cuh>
#include <fa/warp.cuh>

constexpr int threads = TILE * TILE / ROWS, row_step = TILE / ROWS;  // a thread's rows: y, y + row_step, ...
constexpr int k_pitch = HEAD_DIM + 1;     // odd, so that 32 lanes reading 32 keys at the same d hit 32 banks
constexpr int columns = HEAD_DIM / TILE;  // of O, a thread's: x, x + TILE, ...

static_assert(HEAD_DIM % TILE == 0 && TILE % ROWS == 0, "a thread makes as many numbers as the next");

// S[query][key] = scale * Q[query] · K[key]
extern "C" __global__ void __launch_bounds__(threads) scores(const __grid_constant__ fa::Args args) {
    int key_tiles = (args.seq_kv + TILE - 1) / TILE;
    int q_first = blockIdx.x / key_tiles * TILE, k_first = blockIdx.x % key_tiles * TILE;
    int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    // A tile beyond the causal mask is seen by none of its queries. All threads of the block leave, so none waits for another.
    if (k_first >= fa::visible_keys(args, min(q_first + TILE, args.seq_q) - 1)) return;

    __shared__ float q_smem[TILE][HEAD_DIM];
    __shared__ float k_smem[TILE][k_pitch];
    const float* q = fa::row_pointer<const float>(args.Q, batch, head, q_first);   // [TILE], Q.row apart
    const float* k = fa::row_pointer<const float>(args.K, batch, kv_head, k_first);  // [TILE], K.row apart
    fa::load_rows<TILE, HEAD_DIM, HEAD_DIM, threads>(q_smem[0], q, args.Q.row, q_first, args.seq_q, args.head_dim, threadIdx.x);
    fa::load_rows<TILE, HEAD_DIM, k_pitch, threads>(k_smem[0], k, args.K.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
    __syncthreads();  // the tiles are there for all

    int x = threadIdx.x % TILE, y = threadIdx.x / TILE, key = k_first + x;
    float s_reg[ROWS] = {};
    for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) s_reg[r] += q_smem[y + row_step * r][d] * k_smem[x][d];
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int query = q_first + y + row_step * r;
        if (query < args.seq_q && key < fa::visible_keys(args, query))
            fa::matrix_row<float>(args, WORKSPACE_SCORES, batch, head, query)[key] = float(args.scale) * s_reg[r];
    }
}

// P[query] = softmax(S[query]) in place, and logsumexp[query], as in step 00: a warp makes one row, 32 neighbouring keys at a time.
extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ fa::Args args) {
    int query = blockIdx.x * (THREADS / 32) + fa::warp_id(), head = blockIdx.y, batch = blockIdx.z;
    if (query >= args.seq_q) return;
    int visible = fa::visible_keys(args, query);
    float* row = fa::matrix_row<float>(args, WORKSPACE_SCORES, batch, head, query);  // [seq_kv]

    float largest = -fa::infinity();
    for (int key = fa::lane_id(); key < visible; key += 32) largest = max(largest, row[key]);
    largest = fa::group_max<32>(largest);

    float sum = 0;
    for (int key = fa::lane_id(); key < visible; key += 32) {
        row[key] = fa::exp(row[key] - largest);
        sum += row[key];
    }
    sum = fa::group_sum<32>(sum);

    for (int key = fa::lane_id(); key < visible; key += 32) row[key] /= sum;

    // No visible key: largest is -inf and sum is 0, and so is log(sum) = -inf. Nothing above was divided by that sum.
    if (fa::lane_id() == 0) *fa::row_pointer<float>(args.logsumexp, batch, head, query) = largest + fa::log(sum);
}

// O[query] = sum over keys of P[query][key] * V[key]
extern "C" __global__ void __launch_bounds__(threads) output(const __grid_constant__ fa::Args args) {
    int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    int x = threadIdx.x % TILE, y = threadIdx.x / TILE, q_first = blockIdx.x * TILE;

    __shared__ float p_smem[TILE][TILE];      // [query][key]
    __shared__ float v_smem[TILE][HEAD_DIM];  // read along its rows, so that no row need be longer

    float o_reg[ROWS][columns] = {};
    int most = fa::visible_keys(args, min(q_first + TILE, args.seq_q) - 1);  // the last query sees the most
    for (int k_first = 0; k_first < most; k_first += TILE) {
        const float* v = fa::row_pointer<const float>(args.V, batch, kv_head, k_first);  // [TILE], V.row apart
        __syncthreads();  // nobody reads the tiles before any more
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            int query = q_first + y + row_step * r;
            bool there = query < args.seq_q && k_first + x < fa::visible_keys(args, query);  // what is not was never written
            const float* p = fa::matrix_row<float>(args, WORKSPACE_SCORES, batch, head, query);  // [seq_kv]
            p_smem[y + row_step * r][x] = there ? p[k_first + x] : 0.0f;
        }
        fa::load_rows<TILE, HEAD_DIM, HEAD_DIM, threads>(v_smem[0], v, args.V.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        __syncthreads();  // the tiles are there for all

        // A tile's terms by themselves first: one float32 sum over all keys would have several times the error of a sum of sums.
        float tile_reg[ROWS][columns] = {};
        for (int key = 0; key < TILE; ++key) {
#pragma unroll
            for (int c = 0; c < columns; ++c)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) tile_reg[r][c] += p_smem[y + row_step * r][key] * v_smem[key][x + TILE * c];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < columns; ++c) o_reg[r][c] += tile_reg[r][c];
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int query = q_first + y + row_step * r;
        if (query >= args.seq_q) return;
        float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
#pragma unroll
        for (int c = 0; c < columns; ++c)
            if (x + TILE * c < args.head_dim) o[x + TILE * c] = o_reg[r][c];
    }
}
