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
// LANES = "8 if HEAD_DIM <= 96 else 16"
// BLOCK_K = "64 if HEAD_DIM <= 64 or (HEAD_DIM == 128 and shared_optin >= 163840) else 32"
// BLOCK_Q = "128 if shared_optin >= 4 * (128 * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM) else 64 if shared_optin >= 4 * (64 * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM) else 32"
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "BLOCK_Q // 8 * LANES"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + BLOCK_K) + 2 * BLOCK_K * HEAD_DIM)"
// ///
#include <fa/copy.cuh>
#include <fa/warp.cuh>

using scalar = fa::DTYPE;

constexpr int VEC = fa::vec_width<scalar>;           // elements of a 16-byte load: 4 of float32, 8 of the others
constexpr int ROWS = 8;                              // query rows a thread owns, in the scores and in the output
constexpr int KEYS = BLOCK_K / LANES;                // keys a thread owns in the scores
constexpr int COLS = HEAD_DIM / LANES;               // columns a thread owns in the output
constexpr int THREADS = BLOCK_Q / ROWS * LANES;
constexpr int KEY_VEC = KEYS < 4 ? KEYS : 4;         // neighbouring keys a thread reads at once
constexpr int ROW_STEP = THREADS / 4;                // a warp's load is 8 rows of 4 * 16 bytes; the block's is ROW_STEP rows
constexpr int COLUMN_STEP = 4 * VEC;
constexpr int PARTS = BLOCK_K / ROW_STEP;
constexpr float LOWEST = -3.402823466e38f;

static_assert(BLOCK_K % 32 == 0 && BLOCK_Q % 32 == 0 && HEAD_DIM % 32 == 0, "swizzles permute whole lines of 32 banks");
static_assert(LANES == 8 || LANES == 16, "a row's lanes are neighbours in one warp");
static_assert(KEYS % KEY_VEC == 0 && COLS % 4 == 0, "tiles divide evenly");

template <int ROWS_OF_TILE> __device__ __forceinline__ int transposed(int column, int row) {
    return column * ROWS_OF_TILE + (row ^ (column / VEC % 4 * 8));
}

__device__ __forceinline__ int v_at(int key, int column) { return key * HEAD_DIM + (column ^ (key % 2 * (VEC == 4 ? 16 : 4))); }

__device__ __forceinline__ int p_at(int key, int row) { return key * BLOCK_Q + (row ^ (key / KEY_VEC % 8 * 4)); }

// A tile of N rows on its way: the part of it that a thread carries.
template <int N> struct Tile {
    static constexpr int steps = N / ROW_STEP;
    static_assert(steps * ROW_STEP == N, "warps divide the tile's rows evenly");
    fa::Vec128<scalar> reg[steps][HEAD_DIM / COLUMN_STEP];

    __device__ __forceinline__ void fetch(const scalar* from, int pitch, int rows, int head_dim) {
        const int row = threadIdx.x / 4, column = threadIdx.x % 4 * VEC;
#pragma unroll
        for (int r = 0; r < steps; ++r)
#pragma unroll
            for (int c = 0; c < HEAD_DIM / COLUMN_STEP; ++c)
                reg[r][c] = fa::load_128_upto(
                    from + (row + r * ROW_STEP) * pitch + column + c * COLUMN_STEP,
                    row + r * ROW_STEP < rows ? head_dim - column - c * COLUMN_STEP : 0);
    }

    __device__ __forceinline__ void store_transposed(float* smem, float factor = 1.0f) const {
        const int row = threadIdx.x / 4, column = threadIdx.x % 4 * VEC;
#pragma unroll
        for (int r = 0; r < steps; ++r) {
            // r * ROW_STEP in multiples of 32 stays outside the swizzle, and so becomes part of the instruction
            float* to = smem + transposed<N>(column, row + r * ROW_STEP % 32) + r * ROW_STEP / 32 * 32;
#pragma unroll
            for (int c = 0; c < HEAD_DIM / COLUMN_STEP; ++c)
#pragma unroll
                for (int e = 0; e < VEC; ++e) to[(c * COLUMN_STEP + e) * N] = fa::widen(reg[r][c][e]) * factor;
        }
    }

    __device__ __forceinline__ void store_rows(float* smem) const {
        const int row = threadIdx.x / 4, column = threadIdx.x % 4 * VEC;
#pragma unroll
        for (int r = 0; r < steps; ++r)
#pragma unroll
            for (int c = 0; c < HEAD_DIM / COLUMN_STEP; ++c)
#pragma unroll
                for (int e = 0; e < VEC; e += 4) {
                    fa::Vec<float, 4> quad;
#pragma unroll
                    for (int i = 0; i < 4; ++i) quad[i] = fa::widen(reg[r][c][e + i]);
                    fa::store_vec(smem + v_at(row, column + (c * COLUMN_STEP + e) % 32) + r * ROW_STEP * HEAD_DIM + (c * COLUMN_STEP + e) / 32 * 32, quad);
                }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();
    float* k_smem = q_smem + HEAD_DIM * BLOCK_Q;
    float* v_smem = k_smem + HEAD_DIM * BLOCK_K;
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;

    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    const int key_pitch = int(args.K.row), value_pitch = int(args.V.row);
    const float scale = float(args.scale), sharpness = (scale < 0 ? -scale : scale) * fa::log2e;

    const int limit = fa::visible_keys(args, q_end - 1);
    const int unmasked = fa::visible_keys(args, q_first);

    {
        Tile<BLOCK_Q> q_next;
        q_next.fetch(fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), args.seq_q - q_first, args.head_dim);
        q_next.store_transposed(q_smem, scale < 0 ? -1.0f : 1.0f);
    }
    Tile<BLOCK_K> next;
    next.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, 0), key_pitch, limit, args.head_dim);
    next.store_transposed(k_smem);
    __syncthreads();

    float out_reg[ROWS][COLS] = {};
    float max_reg[ROWS], sum_reg[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) max_reg[i] = LOWEST;

    for (int k_first = 0; k_first < limit; k_first += BLOCK_K) {
        // 1. scores
        float score_reg[ROWS][KEYS] = {};
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
            const int v_first = k_first + part * ROW_STEP;
            Tile<ROW_STEP> v_next;
            v_next.fetch(fa::row_pointer<scalar>(args.V, batch, kv_head, v_first), value_pitch, limit - v_first, args.head_dim);
#pragma unroll 1
            for (int chunk = part * (HEAD_DIM / PARTS); chunk < (part + 1) * (HEAD_DIM / PARTS); chunk += VEC) {
            const float* q_from = q_smem + transposed<BLOCK_Q>(chunk, row);
            const float* k_from = k_smem + chunk * BLOCK_K;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                fa::Vec<float, 4> q[ROWS / 4];
                fa::Vec<float, KEY_VEC> k[KEYS / KEY_VEC];
#pragma unroll
                for (int h = 0; h < ROWS / 4; ++h) q[h] = fa::load_vec<4>(q_from + e * BLOCK_Q + 4 * h);
#pragma unroll
                for (int c = 0; c < KEYS / KEY_VEC; ++c)
                    k[c] = fa::load_vec<KEY_VEC>(
                        k_from + e * BLOCK_K + ((KEY_VEC * (lane + LANES * c)) ^ (chunk / VEC % 4 * 8)));
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < KEYS; ++j) score_reg[i][j] += q[i / 4][i % 4] * k[j / KEY_VEC][j % KEY_VEC];
            }
        }
            v_next.store_rows(v_smem + part * ROW_STEP * HEAD_DIM);
        }
        __syncthreads();

        // 2. softmax
        const bool masked = k_first + BLOCK_K > unmasked;
        if (masked) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    int key = k_first + KEY_VEC * (lane + LANES * (j / KEY_VEC)) + j % KEY_VEC;
                    if (key >= fa::visible_keys(args, q_first + row + i)) score_reg[i][j] = LOWEST;
                }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float largest = score_reg[i][0];
#pragma unroll
            for (int j = 1; j < KEYS; ++j) largest = max(largest, score_reg[i][j]);
            largest = max(max_reg[i], fa::group_max<LANES>(largest));
            float shrink = fa::exp2_approx((max_reg[i] - largest) * sharpness);
            max_reg[i] = largest;
            sum_reg[i] *= shrink;
#pragma unroll
            for (int c = 0; c < COLS; ++c) out_reg[i][c] *= shrink;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                float p = fa::exp2_approx((score_reg[i][j] - largest) * sharpness);
                if (masked && score_reg[i][j] == LOWEST) p = 0.0f;
                score_reg[i][j] = p;
                sum_reg[i] += p;
            }
        }

        // 3. P to shared
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
            for (int h = 0; h < ROWS; h += 4) {
                fa::Vec<float, 4> quad;
#pragma unroll
                for (int i = 0; i < 4; ++i) quad[i] = score_reg[h + i][j];
                fa::store_vec(p_smem + p_at(KEY_VEC * (lane + LANES * (j / KEY_VEC)) + j % KEY_VEC, row + h), quad);
            }
        __syncwarp();
        next.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, k_first + BLOCK_K), key_pitch, limit - k_first - BLOCK_K, args.head_dim);

        // 4. O += P V
#pragma unroll 1
        for (int key = 0; key < BLOCK_K; key += KEY_VEC) {
#pragma unroll
            for (int e = 0; e < KEY_VEC; ++e) {
                fa::Vec<float, 4> p[ROWS / 4], v[COLS / 4];
#pragma unroll
                for (int h = 0; h < ROWS / 4; ++h)
                    p[h] = fa::load_vec<4>(p_smem + p_at(key, row + 4 * h) + e * BLOCK_Q);
#pragma unroll
                for (int c = 0; c < COLS / 4; ++c)
                    v[c] = fa::load_vec<4>(v_smem + key * HEAD_DIM + v_at(e, 4 * (lane + LANES * c)));
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int c = 0; c < COLS; ++c) out_reg[i][c] += p[i / 4][i % 4] * v[c / 4][c % 4];
            }
        }
        next.store_transposed(k_smem);
        __syncthreads();
    }

    // epilogue
    scalar* out = fa::row_pointer<scalar>(args.O, batch, head, q_first + row);
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, q_first + row);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float sum = fa::group_sum<LANES>(sum_reg[i]);
        if (q_first + row + i >= q_end) continue;
        float inverse = sum > 0 ? 1.0f / sum : 0.0f;
#pragma unroll
        for (int c = 0; c < COLS; c += 4) {
            int column = 4 * lane + LANES * c;
            fa::Vec<scalar, 4> quad;
#pragma unroll
            for (int e = 0; e < 4; ++e) quad[e] = fa::narrow<scalar>(out_reg[i][c + e] * inverse);
            fa::store_vec_upto(out + i * int(args.O.row) + column, quad, args.head_dim - column);
        }
        if (lane == 0) logsumexp[i] = sum > 0 ? max_reg[i] * (scale < 0 ? -scale : scale) + fa::log(sum) : -fa::infinity();
    }
}
