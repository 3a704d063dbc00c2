// /// kernel
// title = "Step 07 with the lanes of two row groups interleaved"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [32, 64, 96, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// LANES = "32 if HEAD_DIM == 64 and batch * heads_q * ceil_div(seq_q, 32) <= 2 * sms else 8 if HEAD_DIM <= 64 else 16"  # that share a row
// BLOCK_K = "32 if LANES >= max(32, seq_kv) else 64 if HEAD_DIM <= 64 or shared_optin >= (163840 if HEAD_DIM == 128 else 90112) else 32"
// BLOCK_Q = "floor_pow2(max(32, min(128 - LANES // 32 * 96, (shared_optin - 8 * BLOCK_K * HEAD_DIM) // (4 * (HEAD_DIM + BLOCK_K)))))"
// PIECE = "32 if LANES == 8 else HEAD_DIM"  # columns of K and V that are loaded at a time: fewer, and fewer registers hold loads in flight
// UNROLL = "1 if LANES == 8 else 8"  # steps of four columns of S that the compiler may overlap
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "BLOCK_Q // 8 * LANES"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM)"
// ///
//
// Against step 07: lanes 2 n and 2 n + 1 of a warp hold the same keys and columns for two row groups.
#include <fa/tile.cuh>

using scalar = fa::DTYPE;

constexpr int ROWS = fa::resident_rows, THREADS = BLOCK_Q / ROWS * LANES;  // LANES lanes share 8 queries
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;  // of a lane: 8 x KEYS scores, 8 x COLUMNS elements of O

constexpr int PIECES = HEAD_DIM / PIECE;
constexpr float LOWEST = -3.402823466e38f;  // a masked score: finite, so that no difference of two is NaN

static_assert(BLOCK_Q % 32 == 0 && (LANES == 8 || LANES == 16 || LANES == 32) && KEYS >= 1 && COLUMNS % 2 == 0);

constexpr int INTERLEAVED = LANES < 32;  // one row group fills a warp where it has 32 lanes

template <int N, int Columns = HEAD_DIM> using Staged = fa::Staged<scalar, HEAD_DIM, THREADS, N, Columns>;

// The maximum (sum) over the lanes of a row.
__device__ __forceinline__ float row_maximum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(fa::full_warp, x, step << INTERLEAVED));
    return x;
}

__device__ __forceinline__ float row_total(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(fa::full_warp, x, step << INTERLEAVED);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();  // [HEAD_DIM][BLOCK_Q] transposed
    float* k_smem = q_smem + HEAD_DIM * BLOCK_Q;  // [BLOCK_K][HEAD_DIM]
    float* v_smem = k_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_K][BLOCK_Q]

    // Under the causal mask the last query tiles see the most keys. They start first; short ones fill the tail.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    // Lanes 2 n and 2 n + 1 of a pair of row groups have the same keys; the two groups lie 16 rows apart, for the banks of P.
    const int pair = threadIdx.x / (2 * LANES), lane = threadIdx.x % (LANES << INTERLEAVED) >> INTERLEAVED;
    const int row = INTERLEAVED ? pair / 2 * 32 + threadIdx.x % 2 * 16 + pair % 2 * 8 : threadIdx.x / LANES * ROWS;

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one goes into Q, exactly.
    const float sign = args.scale < 0 ? -1.0f : 1.0f, scale = sign * float(args.scale), scale_log2e = scale * fa::log2e;

    const int keys = fa::visible_keys(args, q_end - 1);  // that some query of the tile sees
    const int unmasked = fa::visible_keys(args, q_first);  // that every query of the tile sees

    // Prologue: Q, which is resident, the first K, and the state of each row.
    {
        Staged<BLOCK_Q> q;
        q.fetch(fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), args.seq_q - q_first, args.head_dim);
        q.store_transposed(q_smem, args.head_dim, sign);
    }
    {
        Staged<BLOCK_K> k;
        k.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, 0), int(args.K.row), keys, args.head_dim);
        k.store_by_rows(k_smem, args.head_dim);
    }
    __syncthreads();

    float out_reg[ROWS][COLUMNS] = {};  // O before the division by the row sum
    float row_max[ROWS], row_sum[ROWS] = {};  // row_sum: of this lane's keys only
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row_max[r] = LOWEST;

    // Main loop over the K/V tiles.
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        // S = Q K^T, while V is loaded
        float score_reg[KEYS][ROWS] = {};
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const int first = piece * (HEAD_DIM / PIECES), last = first + HEAD_DIM / PIECES;
            Staged<BLOCK_K, HEAD_DIM / PIECES> v;
            v.fetch(fa::row_pointer<scalar>(args.V, batch, kv_head, k_first) + first, int(args.V.row), keys - k_first,
                    args.head_dim - first);
            fa::multiply_rows<scalar, HEAD_DIM, LANES, BLOCK_Q, KEYS, UNROLL>(score_reg, q_smem, k_smem, row, lane, first, last);
            v.store_by_rows(v_smem + first, args.head_dim - first);
        }
        __syncthreads();  // V is complete, and every warp has finished with K

        // Online softmax: P = exp(scale * (S - row_max)), unnormalised
        float rescale_reg[ROWS];  // what the sums so far are worth under the new maximum
        const bool masked = k_first + BLOCK_K > unmasked;
        if (masked) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int visible = fa::visible_keys(args, q_first + row + r);
#pragma unroll
                for (int j = 0; j < KEYS; ++j)
                    if (k_first + lane + LANES * j >= visible) score_reg[j][r] = LOWEST;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float new_max = score_reg[0][r];
#pragma unroll
            for (int j = 1; j < KEYS; ++j) new_max = max(new_max, score_reg[j][r]);
            new_max = max(row_max[r], row_maximum(new_max));
            rescale_reg[r] = fa::exp2_approx((row_max[r] - new_max) * scale_log2e);
            row_max[r] = new_max;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                float p = fa::exp2_approx((score_reg[j][r] - new_max) * scale_log2e);
                if (masked && score_reg[j][r] == LOWEST) p = 0.0f;
                score_reg[j][r] = p;
                sum += p;
            }
            row_sum[r] = rescale_reg[r] * row_sum[r] + sum;
        }
        fa::share_scores<LANES, BLOCK_Q>(p_smem, score_reg, row, lane);
        __syncwarp();  // the lanes of a row, all of one warp, read each other's P

        // O = rescale * O + P V, while the next K is loaded
        float tile_reg[ROWS][COLUMNS] = {};
        const int next = k_first + BLOCK_K;
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const int first = piece * (HEAD_DIM / PIECES);
            Staged<BLOCK_K, HEAD_DIM / PIECES> k;
            k.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, next) + first, int(args.K.row), keys - next, args.head_dim - first);
            fa::multiply_scores<scalar, HEAD_DIM, LANES, BLOCK_Q, BLOCK_K>(tile_reg, p_smem, v_smem, row, lane, piece * 8 / PIECES,
                                                                           (piece + 1) * 8 / PIECES);
            k.store_by_rows(k_smem + first, args.head_dim - first);
        }
        fa::add_tile(out_reg, rescale_reg, tile_reg);
        __syncthreads();  // the next K is complete, and every warp has finished with V and P
    }

    // Epilogue: the row sum over the lanes, O divided by it, and logsumexp.
    scalar* out = fa::row_pointer<scalar>(args.O, batch, head, q_first + row);  // [8 rows], O.row apart
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, q_first + row);  // [8]
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = row_total(row_sum[r]);
        if (q_first + row + r >= q_end) continue;
        fa::store_output<scalar, LANES>(out + r * args.O.row, out_reg[r], sum == 0 ? 0.0f : 1.0f / sum, lane, args.head_dim);
        if (lane == 0) logsumexp[r] = sum == 0 ? -fa::infinity() : row_max[r] * scale + fa::log(sum);  // NaN stays NaN
    }
}
