// Step 07 at head dim 128 with padded rows in place of the swizzle: the kernel of the variants keys_128 and keys_128_ahead.
//
// Shared memory returns 128 bytes a cycle, so a 16-byte load of a warp takes four cycles even where lanes share an address. It takes two
// if lanes n and n ^ 1 have the same address for every n, or lanes n and n ^ 2 (NVIDIA's forum, topic 77228, for sm_70; the counters of
// step 07 on sm_90 fit). A warp has two row groups of 16 lanes. Interleaved, K and V are the same in lanes n and n ^ 1, Q and P in lanes n
// and n ^ 2: every load takes two cycles. S then takes 32 cycles for 256 FFMA of a warp, P V 8 for 64, half of the cycles of the FFMA.
// Q [column][query] needs no padding, since a load has two addresses. Rows of K [key][column] and P [key][query] are 132 floats long, so 8
// keys lie in 8 different quads of banks. All addresses of the products are a register and a constant: no swizzle.
// Q, K and V of 128 keys and P of 64 keys fill the 227 KB of shared memory of sm_90. P goes through it in two halves.
#pragma once

#include <fa/async.cuh>
#include <fa/row.cuh>

constexpr int ROWS = 8, LANES = 16, THREADS = BLOCK_Q * 2;
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;  // of a lane: 8 x KEYS scores, 8 x COLUMNS elements of O
constexpr int P_PARTS = BLOCK_K / P_KEYS, P_COUNT = P_KEYS / LANES;
constexpr int K_PITCH = HEAD_DIM + 4, P_PITCH = BLOCK_Q + 4;
constexpr float LOWEST = -3.402823466e38f;  // a masked score: finite, so that no difference of two is NaN

static_assert(HEAD_DIM == 128 && BLOCK_Q % 32 == 0 && BLOCK_K % P_KEYS == 0 && P_KEYS % P_STEPS == 0);

// Starts the copy of a tile of BLOCK_K rows, a row by a warp; zeros beyond the tensor (row >= rows, column >= head_dim).
template <int Pitch>
__device__ __forceinline__ void copy_tile(float* tile_smem /* [BLOCK_K][Pitch] */, const float* from, int pitch, int rows, int head_dim) {
    constexpr int step = THREADS / 32;
    const int row = threadIdx.x / 32, column = threadIdx.x % 32 * 4;
    const fa::uint32_t to = fa::smem_u32(tile_smem + row * Pitch + column);
    if (rows >= BLOCK_K && head_dim == HEAD_DIM) {
        const float* at = from + fa::int64_t(row) * pitch + column;
#pragma unroll
        for (int i = 0; i < BLOCK_K / step; ++i, at += step * pitch) fa::cp_async_16(to + i * step * Pitch * 4, at);
    } else {
#pragma unroll 1  // the rare path: small code, few registers
        for (int i = 0; i < BLOCK_K / step; ++i) {
            const int bytes = row + i * step < rows ? max(0, min(16, (head_dim - column) * 4)) : 0;
            fa::cp_async_16_upto(to + i * step * Pitch * 4, bytes > 0 ? from + fa::int64_t(row + i * step) * pitch + column : from, bytes);
        }
    }
    fa::cp_async_commit_group();
}

#if AHEAD
#include "products_ahead.cuh"
#else
#include "products.cuh"
#endif

// The online softmax of a tile: P in place of S, the row sums of this lane's keys, and what O so far is worth.
template <bool Masked>
__device__ __forceinline__ void softmax(float (&score_reg)[KEYS][ROWS], float (&row_max)[ROWS], float (&row_sum)[ROWS],
                                        float (&rescale_reg)[ROWS], float scale_log2e, const fa::Args& args, int query, int key) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (Masked) {
            const int visible = fa::visible_keys(args, query + r);
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
                if (key + LANES * j >= visible) score_reg[j][r] = LOWEST;
        }
        float new_max = score_reg[0][r];
#pragma unroll
        for (int j = 1; j < KEYS; ++j) new_max = max(new_max, score_reg[j][r]);
        new_max = max(row_max[r], fa::group_max<LANES, 2>(new_max));
        rescale_reg[r] = fa::exp2_approx((row_max[r] - new_max) * scale_log2e);
        row_max[r] = new_max;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            float p = fa::exp2_approx((score_reg[j][r] - new_max) * scale_log2e);
            if (Masked && score_reg[j][r] == LOWEST) p = 0.0f;
            score_reg[j][r] = p;
            sum += p;
        }
        row_sum[r] = rescale_reg[r] * row_sum[r] + sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();  // [HEAD_DIM][BLOCK_Q] transposed
    float* k_smem = q_smem + HEAD_DIM * BLOCK_Q;  // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;  // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;  // [P_KEYS][P_PITCH]

    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // the longest first
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    // Two warps share 32 rows; the two row groups of a warp lie 16 rows apart, so that a store of P meets all banks.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32 / 2;
    const int row = warp / 2 * 32 + threadIdx.x % 2 * 16 + warp % 2 * 8;

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one goes into Q, exactly.
    const float sign = args.scale < 0 ? -1.0f : 1.0f, scale = sign * float(args.scale), scale_log2e = scale * fa::log2e;
    const int keys = fa::visible_keys(args, q_end - 1);  // that some query of the tile sees
    const int unmasked = fa::visible_keys(args, q_first);  // that every query of the tile sees
    const float* k_gmem = fa::row_pointer<float>(args.K, batch, kv_head, 0);
    const float* v_gmem = fa::row_pointer<float>(args.V, batch, kv_head, 0);

    // Prologue: the first K, Q, and the state of each row.
    copy_tile<K_PITCH>(k_smem, k_gmem, int(args.K.row), keys, args.head_dim);
    {
        const float* q_gmem = fa::row_pointer<float>(args.Q, batch, head, q_first);
        const int query = threadIdx.x % BLOCK_Q, half = threadIdx.x / BLOCK_Q * (HEAD_DIM / 2);
#pragma unroll 4
        for (int column = half; column < half + HEAD_DIM / 2; column += 4) {
            const int valid = q_first + query < q_end ? args.head_dim - column : 0;
            const fa::Vec<float, 4> q = fa::load_128_upto(q_gmem + fa::int64_t(query) * args.Q.row + column, valid);
#pragma unroll
            for (int e = 0; e < 4; ++e) q_smem[(column + e) * BLOCK_Q + query] = q[e] * sign;
        }
    }
    float out_reg[ROWS][COLUMNS] = {};  // O before the division by the row sum
    float row_max[ROWS], row_sum[ROWS] = {};  // row_sum: of this lane's keys only
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row_max[r] = LOWEST;
    fa::cp_async_wait_group<0>();
    __syncthreads();

    // Main loop over the K/V tiles.
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        // S = Q K^T, while V is copied
        copy_tile<HEAD_DIM>(v_smem, v_gmem + fa::int64_t(k_first) * args.V.row, int(args.V.row), keys - k_first, args.head_dim);
        float score_reg[KEYS][ROWS] = {};
        multiply_q_k(score_reg, q_smem + row, k_smem + lane * K_PITCH);
        fa::cp_async_wait_group<0>();
        __syncthreads();  // V is complete, and every warp has finished with K

        // Online softmax and O = rescale * O + P V, while the next K is copied
        const int next = k_first + BLOCK_K;
        if (next < keys) copy_tile<K_PITCH>(k_smem, k_gmem + fa::int64_t(next) * args.K.row, int(args.K.row), keys - next, args.head_dim);
        float rescale_reg[ROWS];  // what the sums so far are worth under the new maximum
        if (next > unmasked) softmax<true>(score_reg, row_max, row_sum, rescale_reg, scale_log2e, args, q_first + row, k_first + lane);
        else softmax<false>(score_reg, row_max, row_sum, rescale_reg, scale_log2e, args, q_first + row, k_first + lane);
        float tile_reg[ROWS][COLUMNS] = {};
#pragma unroll
        for (int part = 0; part < P_PARTS; ++part) {
            if (part) __syncwarp();  // the lanes of a row have read the part before
#pragma unroll
            for (int j = 0; j < P_COUNT; ++j)
#pragma unroll
                for (int h = 0; h < ROWS; h += 4) {
                    const float (&p)[ROWS] = score_reg[part * P_COUNT + j];
                    fa::store_vec(p_smem + (lane + j * LANES) * P_PITCH + row + h, fa::Vec<float, 4>{p[h], p[h + 1], p[h + 2], p[h + 3]});
                }
            __syncwarp();  // the lanes of a row, all of one warp, read each other's P
            multiply_p_v(tile_reg, p_smem + row, v_smem + part * P_KEYS * HEAD_DIM + 4 * lane);
        }
        fa::add_tile(out_reg, rescale_reg, tile_reg);
        fa::cp_async_wait_group<0>();
        __syncthreads();  // the next K is complete, and every warp has finished with V and P
    }

    // Epilogue: the row sum over the lanes, O divided by it, and logsumexp.
    float* out = fa::row_pointer<float>(args.O, batch, head, q_first + row);  // [8 rows], O.row apart
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, q_first + row);  // [8]
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = fa::group_sum<LANES, 2>(row_sum[r]);
        if (q_first + row + r >= q_end) continue;
        fa::store_output<float, LANES>(out + r * args.O.row, out_reg[r], sum == 0 ? 0.0f : 1.0f / sum, lane, args.head_dim);
        if (lane == 0) logsumexp[r] = sum == 0 ? -fa::infinity() : row_max[r] * scale + fa::log(sum);  // NaN stays NaN
    }
}
