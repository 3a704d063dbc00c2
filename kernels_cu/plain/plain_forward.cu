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
// entry = "forward"
// grid = ["ceil_div(seq_q, 4)", "heads_q", "batch"]
// block = 128
// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "causal_shift", "scale"]
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

// O = softmax(scale * Q K^T) V. A warp has one query; 32 keys at a time, a key a lane, by online softmax.
extern "C" __global__ void forward(const float* Q, const float* K, const float* V, float* O, float* logsumexp, int heads_q, int heads_kv,
                                   int seq_q, int seq_kv, int head_dim, int causal_shift, float scale) {
    const int query = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    if (query >= seq_q) return;
    const long long row = ((long long)blockIdx.z * heads_q + head) * seq_q + query;
    const long long keys = ((long long)blockIdx.z * heads_kv + head / (heads_q / heads_kv)) * seq_kv;  // the first one
    const int visible = CAUSAL ? min(seq_kv, query + causal_shift + 1) : seq_kv;

    __shared__ float p_of_warp[4][32];
    float* p_smem = p_of_warp[threadIdx.x / 32];  // [32]
    const float infinity = __uint_as_float(0x7f800000u);
    float row_max = -infinity, row_sum = 0, o_reg[COLUMNS] = {};
    for (int first = 0; first < visible; first += 32) {
        const int key = first + lane;
        const float score = key < visible ? scale * dot(Q + row * head_dim, K + (keys + key) * head_dim, head_dim) : -infinity;
        const float new_max = fmaxf(row_max, warp_max(score));
        const float rescale = expf(row_max - new_max), p = expf(score - new_max);
        row_max = new_max;
        row_sum = row_sum * rescale + warp_sum(p);
        for (int c = 0; c < COLUMNS; ++c) o_reg[c] *= rescale;
        p_smem[lane] = p;
        __syncwarp();
        add_rows(o_reg, p_smem, V + (keys + first) * head_dim, visible - first, head_dim, lane);
        __syncwarp();  // every lane has read p_smem
    }
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = lane + 32 * c;  // a query that sees no key gives 0
        if (column < head_dim) O[row * head_dim + column] = row_sum == 0 ? 0.0f : o_reg[c] / row_sum;
    }
    if (lane == 0) logsumexp[row] = row_max + logf(row_sum);
}
