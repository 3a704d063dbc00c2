// /// kernel
// title = "FlashAttention-2's gradients on tensor cores: five products a tile, dQ by reductions in global memory"
// dtypes = ["float16", "bfloat16"]
// head_dims = [32, 64, 96, 128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = "optional"
// logsumexp_gradient = true
// mask = true
// score = true
// sinks = true
// arithmetic = "p16"
// aliases = ["kernel_mma_qreg_async"]
// [tile]
// BLOCK_Q = "32 if HEAD_DIM == 128 and small else 128 if HEAD_DIM == 64 and large else 64"
// BLOCK_K = "64 if narrow else 128"
// BLOCKS = "1 if HEAD_DIM % 64 == 0 or not hopper else 2 if HEAD_DIM == 96 else 3"  # per multiprocessor: sets the registers
// DQ_KEYS = 64  # of a tile in the launch that computes dQ alone
// [let]
// small = "shared_optin < 163840"  # less than an A100's
// large = "shared_optin >= 165888"
// hopper = "shared_optin >= 232448"
// narrow = "HEAD_DIM == 32 or HEAD_DIM == 96 and hopper or HEAD_DIM >= 96 and small"
// [workspace.stats]
// dtype = "float32"
// size = "2 * batch * heads_q * round_up(seq_q, BLOCK_Q)"
// init = "none"
// [workspace.dq]
// dtype = "float32"
// size = "4 if deterministic else batch * heads_q * round_up(seq_q, BLOCK_Q) * HEAD_DIM"
// init = "zero"
// [[launch]]
// entry = "prepare"
// grid = ["round_up(seq_q, BLOCK_Q) // 16", "heads_q", "batch"]
// block = 128
// [[launch]]
// entry = "gradients"
// grid = ["ceil_div(seq_kv, BLOCK_K)", "heads_kv", "batch"]
// block = "2 * BLOCK_K"
// shared = "4 * HEAD_DIM * (BLOCK_K + 2 * BLOCK_Q) + 4 * BLOCK_Q * (BLOCK_K + 4)"
// [[launch]]
// entry = "dq"
// when = "deterministic"
// grid = ["ceil_div(seq_q, 128)", "heads_q", "batch"]
// block = 256
// shared = "4 * HEAD_DIM * max(128, 2 * DQ_KEYS)"
// [[launch]]
// entry = "convert"
// when = "not deterministic"
// grid = ["round_up(seq_q, BLOCK_Q) // 16", "heads_q", "batch"]
// block = "HEAD_DIM"
// [[launch]]
// entry = "dsinks"
// when = "sinks"
// grid = ["heads_q"]
// block = 1024
// ///
//
// Step 15, backward, read against step 07's. FlashAttention-2's gradients on tensor cores, with the forward pass's swizzled tiles and
// asynchronous copies. The mathematics is step 07's, whose essay has it. A block keeps BLOCK_K keys resident, K and V in shared memory from
// prologue to epilogue, and streams Q and dO in tiles of BLOCK_Q rows, which cp.async copies during the tile before:
//
//     S^T = K Q^T    P^T = exp(scale * S^T - logsumexp)    dP^T = V dO^T    dS^T = P^T ∘ (dP^T - delta)
//     dV += P^T dO   dK += dS^T Q   dQ += dS K
//
// One thing is new: all five products of a tile are made at once, and dQ, to which every block of keys adds, is summed in global memory.
//
// The limit is operand bandwidth from shared memory. An H200 multiplies a 64 x 64 tile of head dim 128 in about 2,100 cycles a
// multiprocessor, but shared memory delivers only 128 bytes a cycle. So the warp layout minimises shared-memory reads:
//   - Scores are made transposed, 32 keys x 32 queries a warp. As accumulators they then have the layout of an A operand whose rows are
//     keys, as dV and dK need it. A warp's dV and dK are its 32 keys x half of the columns. It computes P and dS of one half of the queries
//     itself; the other half comes from its neighbour warp, through shared memory.
//   - dQ needs dS transposed: ldmatrix reads the same copy transposed, so that nothing is written twice.
// For that tile, in KB: S and dP 64 each, P and dS written and read 32, dV and dK 32 each, dQ 48, the copies of Q and dO 32. 304 KB are
// 2,430 cycles, so shared memory remains the limit, by a small margin. (Scores by queries and all of P and dS through shared memory: 320.
// 16 keys x all queries a warp, with no exchange for dV and dK: 376.)
//
// 64 keys take 4 warps with 255 registers a thread: 128 for dK and dV, 64 for S and dP. So a multiprocessor holds two such blocks, which
// hide each other's latency: while one waits at a barrier or computes exponentials, the other multiplies. Or it holds one block of 128
// keys and 8 warps, in which half as many blocks add to dQ. That was 5 % faster on an H200 (experiments/tune), and is what runs at head
// dims 64 and 128.
//
// dQ in global memory is float32, in the layout of the accumulators: a lane adds its four elements with one request (red.v4, sm_90), a
// warp 512 bytes side by side. Launch 4 reorders, scales and rounds it. Reductions return nothing, so no warp stalls on them, but their
// order changes from run to run, and with it the last bits of dQ. With --deterministic launch 2 leaves dQ out, and launch 3 makes it as
// step 07 does: a block keeps queries resident, streams keys and makes S and dP again, 7 products instead of 5.
//
// Register pressure decides the form of the code. A thread's coordinates never change, so the compiler would hold values derived from them
// in registers through the loop, and spill. Coordinates recomputes them in each part of the loop from an opaque thread id. The copies of
// the next tile start late, between dK and dQ: their branches keep the compiler from hoisting the loads of dQ into the products before,
// where registers are full.
//
// With a mask or score of the problem's own (fa/score.cuh) P and dS of a tile are made together, from its texts, and a tile of queries that
// sees none of the block's keys is left out. With sinks P comes from a logsumexp that has them, and a launch behind all others sums dsinks.
//
// The limits that remain: all warps wait at two barriers a tile, and every operand passes through registers, 128 ldmatrix for 320 mma.
// Hopper's wgmma reads shared memory by itself: the step hopper does.
#include <fa/epilogue.cuh>
#include <fa/gradient.cuh>

using scalar = fa::DTYPE;

constexpr int WARP_K = 32, M = WARP_K / 16;  // keys of a warp
constexpr int HALF = BLOCK_Q / 2, STEPS = HALF / 16;  // queries of a warp
constexpr int WARPS = BLOCK_K / WARP_K * 2, THREADS = 32 * WARPS;
constexpr int COLUMNS = HEAD_DIM / 16;  // groups of 8 columns of a warp in dK and dV: half of all

// The product dQ, BLOCK_Q x HEAD_DIM, is divided among DQ_ROWS x DQ_COLUMNS warps, DQ_M x DQ_N accumulators each.
constexpr int DQ_COLUMNS = HEAD_DIM / 16 % (WARPS / 2) == 0 ? WARPS / 2 : 2, DQ_ROWS = WARPS / DQ_COLUMNS;
constexpr int DQ_M = BLOCK_Q / 16 / DQ_ROWS, DQ_N = HEAD_DIM / 8 / DQ_COLUMNS;

// Shared memory, in bytes: K, V, two stages of Q and dO, P^T and dS^T, two stages of logsumexp and delta.
constexpr fa::uint32_t K_TILE = BLOCK_K * HEAD_DIM * 2, Q_TILE = BLOCK_Q * HEAD_DIM * 2, P_TILE = BLOCK_K * BLOCK_Q * 2;
constexpr fa::uint32_t STATS = 2 * BLOCK_Q * 4;
constexpr fa::uint32_t AT_Q = 2 * K_TILE, AT_P = AT_Q + 4 * Q_TILE, AT_STATS = AT_P + 2 * P_TILE;

// Tiles of queries are numbered over all heads: the number of a head's first.
__device__ __forceinline__ int first_tile(const fa::Args& args, int batch, int head) {
    return (batch * args.heads_q + head) * ((args.seq_q + BLOCK_Q - 1) / BLOCK_Q);
}

// For a tile of queries, log2(e) * logsumexp and delta: [2][BLOCK_Q].
__device__ __forceinline__ float* stats_of(const fa::Args& args, int tile) {
    return static_cast<float*>(args.workspace[WORKSPACE_STATS]) + fa::int64_t(tile) * (2 * BLOCK_Q);
}

// For a tile of queries, dQ in the layout of the accumulators: [BLOCK_Q / 16][HEAD_DIM / 8][32 lanes][4].
__device__ __forceinline__ float* dq_of(const fa::Args& args, int tile) {
    return static_cast<float*>(args.workspace[WORKSPACE_DQ]) + fa::int64_t(tile) * (BLOCK_Q * HEAD_DIM);
}

// Launch 1. delta[query] = dO · O - dlogsumexp, each row split over 8 lanes; and logsumexp, with +inf where P must be 0: for a query
// beyond seq_q, or one that sees no key and has -inf.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8, head = blockIdx.y, batch = blockIdx.z;
    const float delta = fa::delta_of<scalar, HEAD_DIM>(args, batch, head, query, lane);
    if (lane == 0) {
        float lse = -fa::infinity();
        if (query < args.seq_q) lse = *fa::row_pointer<float>(args.logsumexp, batch, head, query);
        float* stats = stats_of(args, first_tile(args, batch, head) + query / BLOCK_Q) + query % BLOCK_Q;
        stats[0] = lse == -fa::infinity() ? fa::infinity() : lse * fa::log2e;
        stats[BLOCK_Q] = delta;
    }
}

// A thread's coordinates in launch 2, from an opaque thread id: recomputed wherever they are needed, they take no register in between.
struct Coordinates {
    fa::uint32_t lane, warp, side, key;  // side: half of the queries, or of the columns; key: the warp's first

    __device__ __forceinline__ Coordinates() {
        const fa::uint32_t thread = fa::opaque_thread_id();
        lane = thread % 32, warp = thread / 32, side = warp % 2, key = warp / 2 * WARP_K;
    }
    __device__ __forceinline__ int row() const { return lane / 4; }
    __device__ __forceinline__ int pair() const { return lane % 4 * 2; }
};

constexpr bool OWN = fa::has_mask || fa::has_score;  // of the problem

// Skips tiles of which no query sees a key of the block by that mask.
__device__ __forceinline__ void skip_hidden(const fa::Args& args, int batch, int head_end, int k_first, int q_start, int& q_first,
                                            int& head) {
    while (head < head_end && !fa::visible_in(args, batch, head, q_first, BLOCK_Q, k_first, BLOCK_K).may) {
        q_first += BLOCK_Q;
        if (q_first >= args.seq_q) q_first = q_start, ++head;
    }
}
// Whether some query of a tile does not see some key of the block, or is not there.
__device__ __forceinline__ bool sees_some(const fa::Args& args, int batch, int head, int q_first, int k_first) {
    return q_first + BLOCK_Q > args.seq_q || fa::sees_of(args, batch, head, q_first, BLOCK_Q, k_first, BLOCK_K) != fa::sees_all;
}

// Launch 2. BLOCK_K keys are resident; every query that sees them is streamed, of all heads that read this key head.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const __grid_constant__ fa::Args args) {
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    unsigned char* smem = fa::dynamic_shared();
    const fa::uint32_t k_smem = fa::smem_u32(smem), p_smem = k_smem + AT_P;

    const int k_first = blockIdx.x * BLOCK_K, kv_head = blockIdx.y, batch = blockIdx.z;
    const int group = args.heads_q / args.heads_kv;
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;

    // The streamed tiles of queries: for each head of the group, from the first query that sees a key of the block.
    const int q_start = fa::first_query(args, k_first) / BLOCK_Q * BLOCK_Q, head_end = (kv_head + 1) * group;
    int head = q_start < args.seq_q ? kv_head * group : head_end, q_first = q_start;
    if constexpr (fa::has_mask) skip_hidden(args, batch, head_end, k_first, q_start, q_first, head);

    const auto fetch = [&](int head, int q_first, fa::uint32_t stage) {  // starts the copies of a tile
        const fa::uint32_t to = k_smem + AT_Q + stage * (2 * Q_TILE);
        QCopy::copy_async(to, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), args.seq_q - q_first, args.head_dim);
        QCopy::copy_async(to + Q_TILE, fa::row_pointer<scalar>(args.dO, batch, head, q_first), int(args.dO.row), args.seq_q - q_first,
                          args.head_dim);
        const fa::uint32_t thread = fa::opaque_thread_id();
        if (thread < STATS / 16)
            fa::cp_async_16(k_smem + AT_STATS + stage * STATS + thread * 16,
                            stats_of(args, first_tile(args, batch, head) + q_first / BLOCK_Q) + thread * 4);
    };

    KCopy::copy_async(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), args.seq_kv - k_first,
                      args.head_dim);
    KCopy::copy_async(k_smem + K_TILE, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), args.seq_kv - k_first,
                      args.head_dim);
    if (head < head_end) fetch(head, q_first, 0);
    fa::cp_async_commit_group();

    float dk_reg[M][COLUMNS][4] = {}, dv_reg[M][COLUMNS][4] = {};
    // Main loop over the streamed tiles
    fa::uint32_t stage = 0;
    while (head < head_end) {
        fa::cp_async_wait_group<0>();
        __syncthreads();  // the tile has arrived; all warps have read the other stage, P and dS

        const fa::uint32_t q_at = k_smem + AT_Q + stage * (2 * Q_TILE);
        const Coordinates at;
        const fa::uint32_t k_lane = fa::lane_of_a_at<HEAD_DIM>(k_smem, at.key, 0, at.lane);
        const fa::uint32_t q_lane = fa::lane_of_b_at<HEAD_DIM>(q_at, at.side * HALF, 0, at.lane);
        const float* stats = reinterpret_cast<const float*>(smem + AT_STATS + stage * STATS) + at.side * HALF + at.pair();

        // P^T = exp(scale * K Q^T - logsumexp); V dO^T is multiplied during the exponentials
        float p_reg[M][HALF / 8][4] = {}, ds_reg[M][HALF / 8][4] = {};
        fa::multiply_abt<scalar>(p_reg, fa::OperandA<HEAD_DIM, M, false>{k_lane}, q_lane);
        fa::multiply_abt<scalar>(ds_reg, fa::OperandA<HEAD_DIM, M, false>{k_lane, K_TILE}, q_lane, Q_TILE);

        if constexpr (OWN) {
            const Coordinates at;
            fa::pair_gradients(p_reg, ds_reg, args, batch, head, q_first + int(at.side) * HALF + at.pair(),
                               k_first + int(at.key) + at.row(), scale, stats, BLOCK_Q, sees_some(args, batch, head, q_first, k_first));
        } else {
#pragma unroll
            for (int n = 0; n < HALF / 8; ++n) {
                const fa::Vec<float, 2> lse = fa::load_vec<2>(stats + 8 * n);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) p_reg[m][n][i] = fa::exp2_approx(p_reg[m][n][i] * scale_log2e - lse[i % 2]);
            }
            if (fa::visible_keys(args, q_first) < k_first + BLOCK_K) {
                const Coordinates recomputed;
                fa::clear_hidden(p_reg, args, q_first + int(recomputed.side) * HALF + recomputed.pair(),
                                 k_first + int(recomputed.key) + recomputed.row());
            }
        }

        // dS^T = P^T ∘ (V dO^T - delta), 16 queries at a time. Both go to shared memory; this warp's part is multiplied from registers.
        const Coordinates recomputed;
        const fa::uint32_t share_lane = fa::lane_of_share<BLOCK_Q>(recomputed.key, recomputed.side * (HALF / 8), recomputed.lane);
        const fa::uint32_t own_lane = fa::lane_of_a_at<HEAD_DIM>(q_at, recomputed.side * HALF, recomputed.side, recomputed.lane);
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
#pragma unroll
            for (int n = 2 * k; n < 2 * k + 2 && !OWN; ++n) {
                const fa::Vec<float, 2> delta = fa::load_vec<2>(stats + BLOCK_Q + 8 * n);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) ds_reg[m][n][i] = p_reg[m][n][i] * (ds_reg[m][n][i] - delta[i % 2]);
            }
            fa::uint32_t p16_reg[M][4], ds16_reg[M][4];
            fa::pack_step<scalar>(p16_reg, p_reg, k);
            fa::pack_step<scalar>(ds16_reg, ds_reg, k);
            fa::share_step<BLOCK_Q>(smem + AT_P, p16_reg, share_lane, k);
            fa::share_step<BLOCK_Q>(smem + AT_P + P_TILE, ds16_reg, share_lane, k);
            fa::multiply_strided<scalar, HEAD_DIM, 2>(dv_reg, p16_reg, own_lane, Q_TILE + k * fa::rows_16<HEAD_DIM>);
            fa::multiply_strided<scalar, HEAD_DIM, 2>(dk_reg, ds16_reg, own_lane, k * fa::rows_16<HEAD_DIM>);
        }
        __syncthreads();  // P and dS are complete
        {
            const Coordinates at;
            const fa::uint32_t other_lane =
                fa::lane_of_a_at<HEAD_DIM>(k_smem + AT_Q + stage * (2 * Q_TILE), (1 - at.side) * HALF, at.side, at.lane);
            const fa::uint32_t p_lane = fa::lane_of_a_at<BLOCK_Q>(p_smem, at.key, (1 - at.side) * STEPS, at.lane);
            fa::multiply_ab<scalar, STEPS, BLOCK_Q, HEAD_DIM, 2>(dv_reg, p_lane, 0, other_lane, Q_TILE);
            fa::multiply_ab<scalar, STEPS, BLOCK_Q, HEAD_DIM, 2>(dk_reg, p_lane, P_TILE, other_lane, 0);
        }

        // The other stage is free since the first barrier; here registers are free, and the branches stop the hoisting of dQ's loads.
        int next_head = head, next = q_first + BLOCK_Q;
        if (next >= args.seq_q) next = q_start, ++next_head;
        if constexpr (fa::has_mask) skip_hidden(args, batch, head_end, k_first, q_start, next, next_head);
        if (next_head < head_end) fetch(next_head, next, stage ^ 1);
        fa::cp_async_commit_group();

        if constexpr (!DETERMINISTIC) {
            const Coordinates at;
            const fa::uint32_t ds_lane = fa::lane_of_b_at<BLOCK_Q>(p_smem + P_TILE, 0, at.warp / DQ_COLUMNS * DQ_M, at.lane);
            const fa::uint32_t kt_lane = fa::lane_of_a_at<HEAD_DIM>(k_smem, 0, at.warp % DQ_COLUMNS, at.lane);
            const int dq_lane = (at.warp / DQ_COLUMNS * DQ_M * (HEAD_DIM / 8) + at.warp % DQ_COLUMNS * 2) * 128 + at.lane * 4;
            float dq_reg[DQ_M][DQ_N][4] = {};
            fa::multiply_atb<scalar, BLOCK_K / 16, BLOCK_Q, HEAD_DIM, DQ_COLUMNS>(dq_reg, ds_lane, kt_lane);
            float* dq = dq_of(args, first_tile(args, batch, head) + q_first / BLOCK_Q) + dq_lane;
#pragma unroll
            for (int m = 0; m < DQ_M; ++m)
#pragma unroll
                for (int n = 0; n < DQ_N; ++n) {
                    const float (&d)[4] = dq_reg[m][n];
                    fa::red_add_v4_f32(dq + (m * (HEAD_DIM / 8) + n / 2 * 2 * DQ_COLUMNS + n % 2) * 128, d[0], d[1], d[2], d[3]);
                }
        }
        head = next_head, q_first = next, stage ^= 1;
    }

    fa::cp_async_wait_group<0>();
    __syncthreads();  // epilogue: all warps have read K and V; dK and dV take their place
    const int side = fa::warp_id() % 2, key = fa::warp_id() / 2 * WARP_K;
    fa::round_to_tile<scalar, HEAD_DIM, 2>(smem, dk_reg, scale, key, side);
    fa::round_to_tile<scalar, HEAD_DIM, 2>(smem + K_TILE, dv_reg, 1.0f, key, side);
    __syncthreads();
    fa::write_tile<scalar, BLOCK_K, HEAD_DIM, THREADS>(fa::row_pointer<scalar>(args.dK, batch, kv_head, k_first), args.dK.row,
                                                       args.seq_kv - k_first, args.head_dim, smem);
    fa::write_tile<scalar, BLOCK_K, HEAD_DIM, THREADS>(fa::row_pointer<scalar>(args.dV, batch, kv_head, k_first), args.dV.row,
                                                       args.seq_kv - k_first, args.head_dim, smem + K_TILE);
}

// Launch 3, deterministic form. 128 queries are resident, 16 a warp, with Q and dO in registers; every key they see is streamed.
extern "C" __global__ void __launch_bounds__(256, 1) dq(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, 128, HEAD_DIM, 256>;
    using KCopy = fa::TileCopy<scalar, DQ_KEYS, HEAD_DIM, 256>;
    constexpr fa::uint32_t tile = DQ_KEYS * HEAD_DIM * 2;  // bytes of a K or V tile
    const fa::uint32_t smem = fa::smem_u32(fa::dynamic_shared());  // Q, dO [128][HEAD_DIM]; then two stages of K and V [DQ_KEYS][HEAD_DIM]

    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // the longest start first
    const int q_first = q_tile * 128, q_end = min(q_first + 128, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int row = fa::warp_id() * 16, query = q_first + row + fa::fragment_row();
    const int keys = fa::visible_keys(args, q_end - 1), unmasked = fa::visible_keys(args, q_first);
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;

    QCopy::copy_async(smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first, args.head_dim);
    QCopy::copy_async(smem + 256 * HEAD_DIM, fa::row_pointer<scalar>(args.dO, batch, head, q_first), int(args.dO.row), q_end - q_first,
                      args.head_dim);
    fa::cp_async_commit_group();
    fa::cp_async_wait_group<0>();
    __syncthreads();
    fa::OperandA<HEAD_DIM, 1, true> q{fa::lane_of_a<HEAD_DIM>(smem, row)}, d_o{fa::lane_of_a<HEAD_DIM>(smem + 256 * HEAD_DIM, row)};
    q.load_registers();
    d_o.load_registers();
    __syncthreads();  // all warps have loaded theirs: K and V take the place

    const auto fetch = [&](int k_first, fa::uint32_t to) {
        KCopy::copy_async(to, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_async(to + tile, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first,
                          args.head_dim);
    };
    const auto seen_from = [&](int key) { return fa::next_keys<DQ_KEYS>(args, batch, head, q_first, 128, key, keys); };
    const int k_start = seen_from(0);
    if (keys > k_start) fetch(k_start, smem);
    fa::cp_async_commit_group();

    float lse_reg[2], delta_reg[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = query + 8 * half;
        const float* stats = stats_of(args, first_tile(args, batch, head) + at / BLOCK_Q) + at % BLOCK_Q;
        lse_reg[half] = at < q_end ? stats[0] : fa::infinity();
        delta_reg[half] = at < q_end ? stats[BLOCK_Q] : 0.0f;
    }
    const fa::uint32_t k_lane = fa::lane_of_b<HEAD_DIM>(smem), kt_lane = fa::lane_of_a<HEAD_DIM>(smem);

    float dq_reg[1][HEAD_DIM / 8][4] = {};
    // Main loop over the streamed tiles
    fa::uint32_t stage = 0;
    for (int k_first = k_start, next; k_first < keys; k_first = next) {
        next = seen_from(k_first + DQ_KEYS);
        fa::cp_async_wait_group<0>();
        __syncthreads();  // K and V have arrived; all warps have read the other stage
        if (next < keys) fetch(next, smem + (stage ^ (2 * tile)));
        fa::cp_async_commit_group();

        float p_reg[1][DQ_KEYS / 8][4] = {}, ds_reg[1][DQ_KEYS / 8][4] = {};
        fa::multiply_abt<scalar>(p_reg, q, k_lane + stage);
        fa::multiply_abt<scalar>(ds_reg, d_o, k_lane + stage + tile);
#pragma unroll
        for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float p;
                if constexpr (OWN)
                    fa::pair_probability(args, batch, head, query + i / 2 * 8, k_first + fa::fragment_column() + 8 * n + i % 2,
                                         p_reg[0][n][i], scale, lse_reg[i / 2], true, p);
                else p = fa::exp2_approx(p_reg[0][n][i] * scale_log2e - lse_reg[i / 2]);
                ds_reg[0][n][i] = p * (ds_reg[0][n][i] - delta_reg[i / 2]);
            }
        if (!OWN && k_first + DQ_KEYS > unmasked) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int visible = fa::visible_keys(args, query + 8 * half) - k_first - fa::fragment_column();
#pragma unroll
                for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (8 * n + e >= visible) ds_reg[0][n][2 * half + e] = 0;
            }
        }
        fa::uint32_t ds16_reg[DQ_KEYS / 16][1][4];
        fa::pack_a<scalar>(ds16_reg, ds_reg);
        fa::multiply_pb<scalar, HEAD_DIM>(dq_reg, ds16_reg, kt_lane + stage);
        stage ^= 2 * tile;
    }

    __syncthreads();  // epilogue: all warps have read K and V; dQ takes their place
    fa::round_to_tile<scalar, HEAD_DIM, 1>(fa::dynamic_shared(), dq_reg, scale, row, 0);
    __syncthreads();
    fa::write_tile<scalar, 128, HEAD_DIM, 256>(fa::row_pointer<scalar>(args.dQ, batch, head, q_first), args.dQ.row, q_end - q_first,
                                               args.head_dim, fa::dynamic_shared());
}

// Launch 4, the other form. dQ from the layout of the accumulators to rows: a thread reads the 4 lanes that hold 8 columns of two rows.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) convert(const __grid_constant__ fa::Args args) {
    constexpr int chunks = HEAD_DIM / 8;
    const int q_first = blockIdx.x * 16, row = threadIdx.x / chunks, chunk = threadIdx.x % chunks, head = blockIdx.y, batch = blockIdx.z;
    const float* from =
        dq_of(args, first_tile(args, batch, head) + q_first / BLOCK_Q) + (q_first % BLOCK_Q / 16 * chunks + chunk) * 128 + row * 16;
    fa::store_gradient_rows<scalar>(args.dQ, args.seq_q, args.head_dim, batch, head, q_first + row, chunk, from, float(args.scale));
}

// Launch 5, of a problem with sinks. A block has a query head.
extern "C" __global__ void __launch_bounds__(1024) dsinks(const __grid_constant__ fa::Args args) {
    const int head = blockIdx.x;
    if constexpr (fa::has_sinks)
        fa::store_dsink<float>(args, head, [&](int batch, int query) {
            return stats_of(args, first_tile(args, batch, head) + query / BLOCK_Q)[BLOCK_Q + query % BLOCK_Q];
        });
}
