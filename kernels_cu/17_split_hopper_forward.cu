// /// kernel
// title = "float32 on Hopper's tensor cores: three wgmma for one, small products first in one chain"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// auto = false  # it has not run on a GPU yet
// [tile]
// CONSUMERS = 2  # warpgroups of 64 queries
// BLOCK_K = "128 if HEAD_DIM == 64 else 64"
// STAGES = 2     # tiles of K, and of V, in shared memory
// Q_STAGES = "2 if HEAD_DIM == 64 else 1"
// PINGPONG = 1   # the products of the consumers take turns
// PIN = 1        # the exponentials stay before the wait for P V
// SECTION = 16   # MB of K and V of the heads that run at the same time, under the causal mask
// [workspace.q_parts]
// dtype = "float16"
// size = "2 * batch * heads_q * seq_q * HEAD_DIM"
// init = "none"
// [workspace.k_parts]
// dtype = "float16"
// size = "2 * batch * heads_kv * seq_kv * HEAD_DIM"
// init = "none"
// [workspace.v_parts]
// dtype = "float16"
// size = "2 * batch * heads_kv * seq_kv * HEAD_DIM"
// init = "none"
// [workspace.q_factors]
// dtype = "float32"
// size = "batch * heads_q * seq_q"
// init = "none"
// [workspace.k_factors]
// dtype = "float32"
// size = "batch * heads_kv * round_up(seq_kv, 4)"
// init = "none"
// [workspace.v_factors]
// dtype = "float32"
// size = "batch * heads_kv * ceil_div(seq_kv, BLOCK_K)"
// init = "none"
// [workspace.counter]
// dtype = "float32"  # an integer
// size = "1"
// init = "none"
// [tensor_map.q]
// tensor = "q_parts"
// dims = ["HEAD_DIM", "seq_q", 2, "batch * heads_q"]
// strides = ["HEAD_DIM", "seq_q * HEAD_DIM", "2 * seq_q * HEAD_DIM"]
// box = [64, 64, 2, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "k_parts"
// dims = ["HEAD_DIM", "seq_kv", 2, "batch * heads_kv"]
// strides = ["HEAD_DIM", "seq_kv * HEAD_DIM", "2 * seq_kv * HEAD_DIM"]
// box = [64, "BLOCK_K", 2, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "v_parts"
// dims = ["HEAD_DIM", "seq_kv", 2, "batch * heads_kv"]
// strides = ["HEAD_DIM", "seq_kv * HEAD_DIM", "2 * seq_kv * HEAD_DIM"]
// box = [64, "BLOCK_K", 2, 1]
// swizzle = 128
// [tensor_map.factors]
// tensor = "k_factors"
// dims = ["seq_kv", 1, 1, "batch * heads_kv"]
// strides = ["round_up(seq_kv, 4)", "round_up(seq_kv, 4)", "round_up(seq_kv, 4)"]
// box = ["BLOCK_K", 1, 1, 1]
// [[launch]]
// entry = "prepare"
// grid = "batch * (heads_q * ceil_div(seq_q, BLOCK_K) + 2 * heads_kv * ceil_div(seq_kv, BLOCK_K))"
// block = 256
// shared = 32
// maps = []
// [[launch]]
// entry = "forward"
// grid = "min(sms, ceil_div(seq_q, 64 * CONSUMERS) * heads_q * batch)"
// block = "128 * (CONSUMERS + 1)"
// shared = "4 * HEAD_DIM * (Q_STAGES * 64 * CONSUMERS + 2 * STAGES * BLOCK_K) + 4 * STAGES * BLOCK_K + 8 * (4 * Q_STAGES * CONSUMERS + 4 * STAGES)"
// ///
//
// ESSAY
#include <fa/accumulator.cuh>
#include <fa/split.cuh>
#include <fa/tma.cuh>

using fa::float16;
using fa::uint32_t;
using fa::uint64_t;

constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns, each [high, low][rows][64]
constexpr int PIECES = Q_STAGES * CONSUMERS;  // of Q: 64 rows, which are loaded, waited for and given back by themselves
constexpr uint32_t Q_LOW = 64 * 128, K_LOW = BLOCK_K * 128;  // bytes of the high parts of a slab; the low ones follow
constexpr uint32_t Q_PIECE = SLABS * 2 * Q_LOW, K_TILE = SLABS * 2 * K_LOW;
constexpr bool K_FIRST = Q_STAGES == 1;  // the next tile of queries is loaded behind its first tile of keys
constexpr float SCALE_OF_P = 128, SLACK = 8;  // P is at most 2^8 (the lazy maximum), times 2^7 as an operand
// Truncation has taken some 2^-23 of S and of P V; it is given back. S comes with the scales of Q and K, 2^28 at most.
constexpr float KEY_FACTOR = 0x1p-14f * (1 + 0x1p-23f), Q_FACTOR = 0x1p14f, V_FACTOR = (1 + 0x1p-23f) / SCALE_OF_P;

__device__ __forceinline__ int tiles_of(int rows) { return (rows + BLOCK_K - 1) / BLOCK_K; }

// Q, K and V, split, to plain matrices [batch * heads][high, low][rows][HEAD_DIM]. A block writes BLOCK_K rows of one of them. Q takes the
// sign of the scale.
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ fa::Args args) {
    using Row = fa::SplitRow<HEAD_DIM>;
    constexpr int step = 8 * Row::rows_of_warp, count = BLOCK_K / step;
    static_assert(count * step == BLOCK_K);
    float* largest_smem = fa::dynamic_shared<float>();  // [8]
    if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<int*>(args.workspace[WORKSPACE_COUNTER]) = 0;

    const int q_blocks = args.batch * args.heads_q * tiles_of(args.seq_q), k_blocks = args.batch * args.heads_kv * tiles_of(args.seq_kv);
    const bool is_q = blockIdx.x < q_blocks, is_v = blockIdx.x >= q_blocks + k_blocks;
    const int block = blockIdx.x - (is_q ? 0 : is_v ? q_blocks + k_blocks : q_blocks);
    const int heads = is_q ? args.heads_q : args.heads_kv, rows = is_q ? args.seq_q : args.seq_kv, tiles = tiles_of(rows);
    const int head = block / tiles, tile = block - head * tiles, first = tile * BLOCK_K;  // head: of all batches
    const fa::Tensor& tensor = is_q ? args.Q : is_v ? args.V : args.K;
    const float* from = fa::row_pointer<float>(tensor, head / heads, head % heads, first);
    void* parts = args.workspace[is_q ? WORKSPACE_Q_PARTS : is_v ? WORKSPACE_V_PARTS : WORKSPACE_K_PARTS];
    const fa::int64_t low_bytes = fa::int64_t(rows) * HEAD_DIM * 2;
    unsigned char* to = static_cast<unsigned char*>(parts) + 2 * head * low_bytes + fa::int64_t(first) * HEAD_DIM * 2;

    const int own = threadIdx.x / Row::lanes;
    Row part[count];
#pragma unroll
    for (int i = 0; i < count; ++i) part[i].load(from + (own + i * step) * tensor.row, args.head_dim, first + own + i * step < rows);
    if (is_v) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < count; ++i) largest = max(largest, part[i].largest_finite());
        const float scale = fa::split_scale(fa::block_max(largest, largest_smem));
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (first + own + i * step < rows) part[i].store_plain(to + (own + i * step) * HEAD_DIM * 2, low_bytes, scale);
        if (threadIdx.x == 0) static_cast<float*>(args.workspace[WORKSPACE_V_FACTORS])[block] = fa::inverse_power(scale) * V_FACTOR;
        return;
    }
    const float sign = !is_q ? 1.0f : args.scale == 0 ? 0.0f : args.scale < 0 ? -1.0f : 1.0f;
    const float times = !is_q ? KEY_FACTOR : args.scale == 0 ? Q_FACTOR : Q_FACTOR * fabsf(float(args.scale));
    const fa::int64_t pitch = is_q ? rows : (rows + 3) / 4 * 4;  // TMA loads the factors of keys: rows of 16 bytes
    float* factors = static_cast<float*>(args.workspace[is_q ? WORKSPACE_Q_FACTORS : WORKSPACE_K_FACTORS]) + head * pitch + first;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float scale;
        part[i].multiply(sign);
        const float factor = part[i].own_scale(scale) * times;
        if (first + own + i * step >= rows) continue;
        part[i].store_plain(to + (own + i * step) * HEAD_DIM * 2, low_bytes, scale);
        if (threadIdx.x % Row::lanes == 0) factors[own + i * step] = factor;
    }
}

// A tile of queries of one head. The producer leaves it in shared memory: its divisions are done once.
struct Work {
    int q_first, head, batch, tiles;  // tiles of keys, at least one; 0: there is no more work
};

// Tiles of keys that the queries before q_end see; one where they see none, so that every work has the same course.
__device__ __forceinline__ int key_tiles(const fa::Args& args, int q_end) {
    return max(1, tiles_of(fa::visible_keys(args, min(q_end, args.seq_q) - 1)));
}

// The work of a number. Neighbouring numbers run at the same time, so they share K and V in the L2 cache.
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    const int q_tiles = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q;
    Work work;
#if CAUSAL
    // Sections of heads with at most SECTION MB of K and V; in a section the tiles that see the most keys first, over all its heads.
    const int kv_heads = max(1, int((SECTION << 20) / (8ll * HEAD_DIM * args.seq_kv)));
    const int heads = kv_heads * (args.heads_q / args.heads_kv);
    const int section = number / (q_tiles * heads), inside = number - section * q_tiles * heads;
    const int width = min(heads, args.heads_q * args.batch - section * heads);  // the last section may have fewer
    const int q_tile = q_tiles - 1 - inside / width, row = section * heads + inside % width;
#else
    const int row = number / q_tiles, q_tile = number - row * q_tiles;
#endif
    work.q_first = q_tile * BLOCK_Q;
    work.batch = row / args.heads_q;
    work.head = row - work.batch * args.heads_q;
    work.tiles = key_tiles(args, work.q_first + BLOCK_Q);
    return work;
}

// A position in a ring of N stages, and the parity of its round.
template <int N> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// Loads a tile of both parts, slab by slab. more: bytes that other copies bring to the same barrier.
template <uint32_t Low>
__device__ __forceinline__ void load_tile(unsigned char* tile_smem, const fa::TensorMap& map, uint64_t* full, int row, int head, int more) {
    fa::mbarrier_arrive_expect_tx(full, SLABS * 2 * Low + more);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) fa::tma_load_4d(tile_smem + slab * 2 * Low, &map, full, 64 * slab, row, 0, head);
}

// The scores times the factors of their keys.
__device__ __forceinline__ void multiply_columns(float (&x)[BLOCK_K / 2], const float* factors_smem /* [BLOCK_K] */) {
#pragma unroll
    for (int j = 0; j < BLOCK_K / 8; ++j) {
        const fa::Vec<float, 2> factor = fa::load_vec<2>(factors_smem + 8 * j + fa::fragment_column());
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * j + i] *= factor[i % 2];
    }
}

// S becomes SCALE_OF_P times P = 2^(scale (S - reference)), and `sum` the sum of P over this thread's columns. The difference is exact where
// it matters, at any size of the scores.
__device__ __forceinline__ void exponentiate(float (&x)[BLOCK_K / 2], float (&sum)[2], const float (&scale_log2e)[2],
                                             const float (&reference)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float s = 0;
#pragma unroll
        for (int j = 0; j < BLOCK_K / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = x[4 * j + 2 * half + e];
                const float p = fa::exp2_approx((score - reference[half]) * scale_log2e[half]);
                s += p;
                score = SCALE_OF_P * p;
            }
        sum[half] = s;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap factors_map) {
    unsigned char* q_smem = fa::dynamic_shared_1024();  // [Q_STAGES][CONSUMERS][SLABS][high, low][64][64]
    unsigned char* k_smem = q_smem + PIECES * Q_PIECE;  // [STAGES][SLABS][high, low][BLOCK_K][64]
    unsigned char* v_smem = k_smem + STAGES * K_TILE;  // the same
    float* factors_smem = reinterpret_cast<float*>(v_smem + STAGES * K_TILE);  // [STAGES][BLOCK_K]: of keys
    uint64_t* q_full = reinterpret_cast<uint64_t*>(factors_smem + STAGES * BLOCK_K);
    uint64_t* q_empty = q_full + PIECES;
    uint64_t* k_full = q_empty + PIECES;
    uint64_t* k_empty = k_full + STAGES;
    uint64_t* v_full = k_empty + STAGES;
    uint64_t* v_empty = v_full + STAGES;
    Work* works_smem = reinterpret_cast<Work*>(v_empty + STAGES);  // [PIECES]: whose Q is there

    if (threadIdx.x == 0) {
        for (int i = 0; i < PIECES; ++i) fa::mbarrier_init(q_full + i, 1), fa::mbarrier_init(q_empty + i, 4);  // each warp arrives
        for (int i = 0; i < STAGES; ++i) {
            fa::mbarrier_init(k_full + i, 1), fa::mbarrier_init(k_empty + i, 4 * CONSUMERS);
            fa::mbarrier_init(v_full + i, 1), fa::mbarrier_init(v_empty + i, 4 * CONSUMERS);
        }
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const int warpgroup = fa::warpgroup_index();
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<CONSUMERS == 2 ? 40 : 32>();
        if (threadIdx.x == 0) {
            // The producer. A number is fetched one work ahead: the counter's answer takes a microsecond.
            int* counter = static_cast<int*>(args.workspace[WORKSPACE_COUNTER]);
            const int works = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q * args.heads_q * args.batch;
            auto hand_over = [&](const Work& work) {
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    const int piece = q.stage * CONSUMERS + consumer, row = work.q_first + 64 * consumer;
                    fa::mbarrier_wait_parity(q_empty + piece, q.parity ^ 1);
                    works_smem[piece] = work;
                    if (work.tiles)
                        load_tile<Q_LOW>(q_smem + piece * Q_PIECE, q_map, q_full + piece, row, work.batch * args.heads_q + work.head, 0);
                    else fa::mbarrier_arrive(q_full + piece);
                }
                q.next();
            };
            int number = blockIdx.x;
            while (number < works) {
                const Work work = work_of(args, number);
                const int kv_head = work.batch * args.heads_kv + fa::kv_head_of(args, work.head);
                if (!K_FIRST) hand_over(work);
                number = gridDim.x + atomicAdd(counter, 1);
                for (int n = 0; n < work.tiles; ++n) {
                    uint64_t* full = k_full + k.stage;
                    fa::mbarrier_wait_parity(k_empty + k.stage, k.parity ^ 1);
                    load_tile<K_LOW>(k_smem + k.stage * K_TILE, k_map, full, n * BLOCK_K, kv_head, 4 * BLOCK_K);
                    fa::tma_load_4d(factors_smem + k.stage * BLOCK_K, &factors_map, full, n * BLOCK_K, 0, 0, kv_head);
                    k.next();
                    if (K_FIRST && n == 0) hand_over(work);
                    fa::mbarrier_wait_parity(v_empty + v.stage, v.parity ^ 1);
                    load_tile<K_LOW>(v_smem + v.stage * K_TILE, v_map, v_full + v.stage, n * BLOCK_K, kv_head, 0);
                    v.next();
                }
            }
            hand_over(Work{});
        }
        return;
    }

    // A consumer
    fa::setmaxnreg_inc<CONSUMERS == 2 ? 232 : 160>();
    const int consumer = warpgroup - 1, lane = fa::lane_id(), warp = fa::warp_id() % 4;
    float score_reg[BLOCK_K / 2], sum_reg[HEAD_DIM / 2], out_reg[HEAD_DIM / 2];  // sum_reg: P V of a tile
    uint32_t high_reg[BLOCK_K / 16][4], low_reg[BLOCK_K / 16][4];  // P
    float q_factor[2], reference[2], row_sum[2];  // of this thread's two rows: P = 2^(q_factor log2(e) (S - reference))
    const float* v_factors;  // of this work's tiles
    Work work;
    int row, tiles;  // this thread's first row, the other is 8 further on; the tiles of keys that its warpgroup needs, at most work.tiles

    auto piece = [&]() { return q.stage * CONSUMERS + consumer; };
    auto release = [&](uint64_t* empty) {
        if (lane == 0) fa::mbarrier_arrive(empty);
    };
    auto take_work = [&]() {
        fa::mbarrier_wait_parity(q_full + piece(), q.parity);
        work = works_smem[piece()];
        if (work.tiles == 0) return false;
        row = work.q_first + 64 * consumer + 16 * warp + lane / 4;
        tiles = min(work.tiles, key_tiles(args, work.q_first + 64 * consumer + 64));
        const int kv_head = work.batch * args.heads_kv + fa::kv_head_of(args, work.head);
        v_factors = static_cast<const float*>(args.workspace[WORKSPACE_V_FACTORS]) + kv_head * tiles_of(args.seq_kv);
        const float* q_factors = static_cast<const float*>(args.workspace[WORKSPACE_Q_FACTORS]);
        const fa::int64_t at = fa::int64_t(work.batch * args.heads_q + work.head) * args.seq_q + row;
#pragma unroll
        for (int half = 0; half < 2; ++half) q_factor[half] = row + 8 * half < args.seq_q ? q_factors[at + 8 * half] : 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) out_reg[i] = 0;
        return true;
    };
    auto begin_turn = [&]() {
        if (PINGPONG) fa::bar_sync(4 + consumer, 256);
    };
    auto end_turn = [&]() {
        if (PINGPONG) fa::bar_arrive(4 + (consumer + 1) % CONSUMERS, 256);
    };
    auto issue_scores = [&]() {
        const uint64_t q_operand = fa::smem_descriptor_k_major(q_smem + piece() * Q_PIECE);
        const uint64_t k_operand = fa::smem_descriptor_k_major(k_smem + k.stage * K_TILE);
        fa::discard(score_reg);
        fa::mbarrier_wait_parity(k_full + k.stage, k.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int product = 0; product < 3; ++product)  // low high, high low, high high
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; ++step)
                fa::wgmma_ss<float16>(
                    score_reg, fa::descriptor_advance(q_operand, (step / 4 * 2 + (product == 0)) * Q_LOW + step % 4 * 32),
                    fa::descriptor_advance(k_operand, (step / 4 * 2 + (product == 1)) * K_LOW + step % 4 * 32), product + step > 0);
        fa::wgmma_commit();
    };
    auto issue_output = [&]() {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(v_smem + v.stage * K_TILE, 2 * K_LOW);
        fa::discard(sum_reg);
        fa::mbarrier_wait_parity(v_full + v.stage, v.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int product = 0; product < 3; ++product)
#pragma unroll
            for (int step = 0; step < BLOCK_K / 16; ++step)
                fa::wgmma_rs<float16, true>(sum_reg, product == 0 ? low_reg[step] : high_reg[step],
                                            fa::descriptor_advance(v_operand, (product == 1) * K_LOW + step * 2048), product + step > 0);
        fa::wgmma_commit();
    };
    auto finish_output = [&](float factor) {  // O += the sum of a tile, in float32
        fa::wgmma_wait<0>(sum_reg, high_reg, low_reg);
        release(v_empty + v.stage);
        v.next();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) out_reg[i] += factor * sum_reg[i];
    };
    auto finish_scores = [&](int n) {
        multiply_columns(score_reg, factors_smem + k.stage * BLOCK_K);
        __syncwarp();  // all lanes have read the factors when the first one releases them
        release(k_empty + k.stage);
        k.next();
        if ((n + 1) * BLOCK_K <= fa::visible_keys(args, work.q_first + 64 * consumer)) return;
        const int visible[2] = {fa::visible_keys(args, row) - n * BLOCK_K, fa::visible_keys(args, row + 8) - n * BLOCK_K};
        fa::mask_columns(score_reg, visible);
    };
    auto split_probabilities = [&]() {
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                fa::split_pair(high_reg[step][r], low_reg[step][r], score_reg[8 * step + 2 * r], score_reg[8 * step + 2 * r + 1]);
    };
    auto first_tile = [&]() {
        begin_turn();
        issue_scores();
        end_turn();
        fa::wgmma_wait<0>(score_reg);
        finish_scores(0);
        float maximum[2];
        fa::local_row_max(maximum, score_reg);
        // Finite where no score is larger, so that no difference is NaN.
#pragma unroll
        for (int half = 0; half < 2; ++half) reference[half] = max(-fa::largest_float, fa::group_max<4>(maximum[half]));
        const float scale_log2e[2] = {q_factor[0] * fa::log2e, q_factor[1] * fa::log2e};
        exponentiate(score_reg, row_sum, scale_log2e, reference);
        split_probabilities();
    };
    auto next_tile = [&](int n) {
        const float v_factor = v_factors[n - 1];
        begin_turn();
        issue_scores();
        issue_output();
        end_turn();
        fa::wgmma_wait<1>(score_reg);
        finish_scores(n);
        const float scale_log2e[2] = {q_factor[0] * fa::log2e, q_factor[1] * fa::log2e};
        float sum[2], maximum[2], factor[2];
        fa::local_row_max(maximum, score_reg);
        bool grows = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) grows |= (maximum[half] - reference[half]) * scale_log2e[half] > SLACK;
        grows = __any_sync(fa::full_warp, grows);
        if (grows) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float larger = max(reference[half], fa::group_max<4>(maximum[half]));
                factor[half] = fa::exp2_approx((reference[half] - larger) * scale_log2e[half]);
                reference[half] = larger;
                row_sum[half] *= factor[half];
            }
        }
        exponentiate(score_reg, sum, scale_log2e, reference);
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        if (PIN) fa::schedule_fence();
        finish_output(v_factor);
        if (grows) fa::scale_rows(out_reg, factor);
        split_probabilities();
    };

    if (PINGPONG && consumer == CONSUMERS - 1) end_turn();  // the first turn is the first consumer's
    while (take_work()) {
        first_tile();
        for (int n = 1; n < tiles; ++n) next_tile(n);
        release(q_empty + piece());
        q.next();
        const float v_factor = v_factors[tiles - 1];
        issue_output();
        finish_output(v_factor);
        for (int n = tiles; n < work.tiles; ++n) {  // what only the other consumers need
            begin_turn();
            end_turn();
            fa::mbarrier_wait_parity(k_full + k.stage, k.parity);
            release(k_empty + k.stage);
            k.next();
            fa::mbarrier_wait_parity(v_full + v.stage, v.parity);
            release(v_empty + v.stage);
            v.next();
        }

        // Epilogue: O / row sum and the logsumexp, straight to global memory: a quad writes a sector.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = row + 8 * half;
            const float sum = fa::group_sum<4>(row_sum[half]), inverse = 1.0f / sum;
            if (query >= args.seq_q) continue;
            const bool empty = fa::visible_keys(args, query) <= 0;
            if (lane % 4 == 0)
                *fa::row_pointer<float>(args.logsumexp, work.batch, work.head, query) =
                    empty ? -fa::infinity() : reference[half] * q_factor[half] + fa::log(sum);
            float* out = fa::row_pointer<float>(args.O, work.batch, work.head, query) + fa::fragment_column();
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j) {
                const float one = out_reg[4 * j + 2 * half] * inverse, other = out_reg[4 * j + 2 * half + 1] * inverse;
                const fa::Vec<float, 2> two = {empty ? 0.0f : one, empty ? 0.0f : other};
                fa::store_vec_upto(out + 8 * j, two, args.head_dim - 8 * j - fa::fragment_column());
            }
        }
    }
}
