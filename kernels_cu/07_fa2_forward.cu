// /// kernel
// title = "FlashAttention-2 on CUDA cores: register tiles, swizzled shared memory, prefetched K and V"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [32, 64, 96, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// aliases = ["flash"]
// [tile]
// LANES = "8 if HEAD_DIM <= 64 else 16"
// BLOCK_K = "64 if HEAD_DIM <= 64 or shared_optin >= (163840 if HEAD_DIM == 128 else 90112) else 32"
// BLOCK_Q = "128 if shared_optin >= 4 * (128 * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM) else 64 if shared_optin >= 4 * (64 * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM) else 32"
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "BLOCK_Q // 8 * LANES"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM)"
// ///
#include <fa/tile.cuh>
#include <fa/warp.cuh>

using scalar = fa::DTYPE;

constexpr int THREADS = BLOCK_Q / fa::owned * LANES;
constexpr int KEYS = BLOCK_K / LANES;       // keys of a thread in the scores: 8 x KEYS numbers
constexpr int COLUMNS = HEAD_DIM / LANES;   // columns of a thread in O: 8 x COLUMNS numbers
constexpr int PIECES = HEAD_DIM / 32;       // K and V travel in pieces of 32 columns: few registers for what is on its way
constexpr float LOWEST = -3.402823466e38f;  // a masked score: finite, so that no difference of two is NaN

static_assert(BLOCK_Q % 32 == 0 && (LANES == 8 || LANES == 16) && KEYS >= 2);

template <int N, int Columns = HEAD_DIM> using Staged = fa::Staged<scalar, HEAD_DIM, THREADS, N, Columns>;

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();    // [HEAD_DIM][BLOCK_Q] transposed
    float* k_smem = q_smem + HEAD_DIM * BLOCK_Q;    // [BLOCK_K][HEAD_DIM]
    float* v_smem = k_smem + BLOCK_K * HEAD_DIM;    // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;    // [BLOCK_K][BLOCK_Q]

    // Under the causal mask the last query tiles see the most keys. They start first, and short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int row = threadIdx.x / LANES * fa::owned, lane = threadIdx.x % LANES;

    // The largest score is only the largest logit where the scale is positive. A negative one goes into Q, exactly.
    const float sign = args.scale < 0 ? -1.0f : 1.0f, scale = sign * float(args.scale), scale_log2e = scale * fa::log2e;

    const int keys = fa::visible_keys(args, q_end - 1);     // what the last query sees is what any query of the tile sees
    const int unmasked = fa::visible_keys(args, q_first);   // what every query of the tile sees

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

    float out_reg[fa::owned][COLUMNS] = {};                 // O, not yet divided by the sum
    float max_reg[fa::owned], sum_reg[fa::owned] = {};      // sum_reg: only of this lane's keys
#pragma unroll
    for (int i = 0; i < fa::owned; ++i) max_reg[i] = LOWEST;

    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        // S = Q K^T
        float score_reg[KEYS][fa::owned] = {};
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const int first = piece * (HEAD_DIM / PIECES), last = first + HEAD_DIM / PIECES;
            Staged<BLOCK_K, HEAD_DIM / PIECES> v;
            v.fetch(fa::row_pointer<scalar>(args.V, batch, kv_head, k_first) + first, int(args.V.row), keys - k_first, args.head_dim - first);
            fa::multiply_rows<scalar, HEAD_DIM, LANES, BLOCK_Q>(score_reg, q_smem, k_smem, row, lane, first, last);
            v.store_by_rows(v_smem + first, args.head_dim - first);
        }
        __syncthreads();  // V is there, and nobody needs K any more

        // P = exp(scale * (S - max)), unnormalised
        float keep_reg[fa::owned];  // what a larger maximum leaves of the sums so far
        const bool masked = k_first + BLOCK_K > unmasked;
        if (masked) {
#pragma unroll
            for (int i = 0; i < fa::owned; ++i) {
                const int visible = fa::visible_keys(args, q_first + row + i);
#pragma unroll
                for (int j = 0; j < KEYS; ++j)
                    if (k_first + lane + LANES * j >= visible) score_reg[j][i] = LOWEST;
            }
        }
#pragma unroll
        for (int i = 0; i < fa::owned; ++i) {
            float largest = score_reg[0][i];
#pragma unroll
            for (int j = 1; j < KEYS; ++j) largest = max(largest, score_reg[j][i]);
            largest = max(max_reg[i], fa::group_max<LANES>(largest));
            keep_reg[i] = fa::exp2_approx((max_reg[i] - largest) * scale_log2e);
            max_reg[i] = largest;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                float p = fa::exp2_approx((score_reg[j][i] - largest) * scale_log2e);
                if (masked && score_reg[j][i] == LOWEST) p = 0.0f;
                score_reg[j][i] = p;
                sum += p;
            }
            sum_reg[i] = keep_reg[i] * sum_reg[i] + sum;
        }
        fa::share_scores<LANES, BLOCK_Q>(p_smem, score_reg, row, lane);
        __syncwarp();  // the lanes of a row are lanes of one warp

        // O = keep * O + P V, while the next K comes
        float tile_reg[fa::owned][COLUMNS] = {};
        const int next = k_first + BLOCK_K;
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const int first = piece * (HEAD_DIM / PIECES);
            Staged<BLOCK_K, HEAD_DIM / PIECES> k;
            k.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, next) + first, int(args.K.row), keys - next, args.head_dim - first);
            fa::multiply_scores<scalar, HEAD_DIM, LANES, BLOCK_Q, BLOCK_K>(
                tile_reg, p_smem, v_smem, row, lane, piece * 8 / PIECES, (piece + 1) * 8 / PIECES);
            k.store_by_rows(k_smem + first, args.head_dim - first);
        }
#pragma unroll
        for (int i = 0; i < fa::owned; ++i)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) out_reg[i][c] = keep_reg[i] * out_reg[i][c] + tile_reg[i][c];
        __syncthreads();  // the next K is there, and nobody needs V or P any more
    }

    scalar* out = fa::row_pointer<scalar>(args.O, batch, head, q_first + row);               // [8 rows], O.row apart
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, q_first + row);  // [8]
#pragma unroll
    for (int i = 0; i < fa::owned; ++i) {
        const float sum = fa::group_sum<LANES>(sum_reg[i]);
        if (q_first + row + i >= q_end) continue;
        fa::store_output<scalar, LANES>(out + i * args.O.row, out_reg[i], sum > 0 ? 1.0f / sum : 0.0f, lane, args.head_dim);
        if (lane == 0) logsumexp[i] = sum > 0 ? max_reg[i] * scale + fa::log(sum) : -fa::infinity();
    }
}
