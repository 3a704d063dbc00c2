// /// kernel
// title = "my kernel, with plain parameters"
// dtypes = ["float32"]
// head_dims = [32, 64, 96, 128]   # HEAD_DIM is the smallest of these that holds head_dim
// arch = ">=sm_70"
// causal = true                   # CAUSAL is 1 where the mask is asked for
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [[launch]]
// entry = "dq"
// grid = ["ceil_div(seq_q, 4)", "heads_q", "batch"]
// block = 128
// args = ["Q", "K", "V", "O", "logsumexp", "dO", "dQ", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "causal_shift", "scale"]
// [[launch]]
// entry = "dkdv"
// grid = ["ceil_div(seq_kv, 4)", "heads_kv", "batch"]
// block = 128
// args = ["Q", "K", "V", "O", "logsumexp", "dO", "dK", "dV", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "causal_shift", "scale"]
// ///

constexpr unsigned ALL = 0xffffffffu;
constexpr int COLUMNS = HEAD_DIM / 32;  // of a lane: lane, lane + 32, ...

__device__ float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

__device__ float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

__device__ float dot(const float* a, const float* b, int n) {
    float sum = 0;
    for (int d = 0; d < n; ++d) sum += a[d] * b[d];
    return sum;
}

// sum_reg += weight_smem[j] * rows[j] over count rows, at most 32; a lane has COLUMNS of the columns. rows: [count][head_dim].
__device__ void add_rows(float (&sum_reg)[COLUMNS], const float* weight_smem, const float* rows, int count, int head_dim, int lane) {
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = lane + 32 * c;
        float tile = 0;  // the terms of 32 rows by themselves: a sum of sums rounds less than one long sum
        for (int j = 0; j < min(count, 32) && column < head_dim; ++j) tile += weight_smem[j] * rows[j * head_dim + column];
        sum_reg[c] += tile;
    }
}

// With P = exp(scale * S - logsumexp) and delta = rowsum(dO * O): dS = P * (dO V^T - delta), dQ = scale * dS K. A warp has one query.
extern "C" __global__ void dq(const float* Q, const float* K, const float* V, const float* O, const float* logsumexp, const float* dO,
                              float* dQ, int heads_q, int heads_kv, int seq_q, int seq_kv, int head_dim, int causal_shift, float scale) {
    const int query = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    if (query >= seq_q) return;
    const long long row = ((long long)blockIdx.z * heads_q + head) * seq_q + query;
    const long long keys = ((long long)blockIdx.z * heads_kv + head / (heads_q / heads_kv)) * seq_kv;  // the first one
    const int visible = CAUSAL ? min(seq_kv, query + causal_shift + 1) : seq_kv;
    const float* d_o = dO + row * head_dim;
    const float delta = dot(d_o, O + row * head_dim, head_dim);

    __shared__ float ds_of_warp[4][32];
    float* ds_smem = ds_of_warp[threadIdx.x / 32];  // [32]
    float dq_reg[COLUMNS] = {};
    for (int first = 0; first < visible; first += 32) {
        const long long key = keys + first + lane;
        float ds = 0;
        if (first + lane < visible) {
            const float p = expf(scale * dot(Q + row * head_dim, K + key * head_dim, head_dim) - logsumexp[row]);
            ds = p * (dot(d_o, V + key * head_dim, head_dim) - delta);
        }
        ds_smem[lane] = ds;
        __syncwarp();
        add_rows(dq_reg, ds_smem, K + (keys + first) * head_dim, visible - first, head_dim, lane);
        __syncwarp();  // every lane has read ds_smem
    }
    for (int c = 0; c < COLUMNS; ++c) {
        if (lane + 32 * c < head_dim) dQ[row * head_dim + lane + 32 * c] = scale * dq_reg[c];
    }
}

// dV = P^T dO, dK = scale * dS^T Q. A warp has one key, and sums over the queries of every head that reads it.
extern "C" __global__ void dkdv(const float* Q, const float* K, const float* V, const float* O, const float* logsumexp, const float* dO,
                                float* dK, float* dV, int heads_q, int heads_kv, int seq_q, int seq_kv, int head_dim, int causal_shift,
                                float scale) {
    const int key = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y, group = heads_q / heads_kv;
    if (key >= seq_kv) return;
    const long long row = ((long long)blockIdx.z * heads_kv + kv_head) * seq_kv + key;
    const int seen_from = CAUSAL ? max(0, key - causal_shift) : 0;  // the first query that sees the key

    __shared__ float p_of_warp[4][32], ds_of_warp[4][32];
    float *p_smem = p_of_warp[threadIdx.x / 32], *ds_smem = ds_of_warp[threadIdx.x / 32];  // [32]
    float dk_reg[COLUMNS] = {}, dv_reg[COLUMNS] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const long long queries = ((long long)blockIdx.z * heads_q + head) * seq_q;  // the first one
        for (int first = seen_from; first < seq_q; first += 32) {
            const long long query = queries + first + lane;
            float p = 0, ds = 0;
            if (first + lane < seq_q) {
                const float* d_o = dO + query * head_dim;
                p = expf(scale * dot(Q + query * head_dim, K + row * head_dim, head_dim) - logsumexp[query]);
                ds = p * (dot(d_o, V + row * head_dim, head_dim) - dot(d_o, O + query * head_dim, head_dim));
            }
            p_smem[lane] = p, ds_smem[lane] = ds;
            __syncwarp();
            add_rows(dv_reg, p_smem, dO + (queries + first) * head_dim, seq_q - first, head_dim, lane);
            add_rows(dk_reg, ds_smem, Q + (queries + first) * head_dim, seq_q - first, head_dim, lane);
            __syncwarp();  // every lane has read them
        }
    }
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = lane + 32 * c;
        if (column >= head_dim) continue;
        dK[row * head_dim + column] = scale * dk_reg[c];
        dV[row * head_dim + column] = dv_reg[c];
    }
}
