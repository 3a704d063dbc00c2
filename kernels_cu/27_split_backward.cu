// /// kernel
// title = "float32 gradients on tensor cores: every operand as two float16, three products for one"
// dtypes = ["float32"]
// head_dims = [64, 128, 256]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = "optional"
// logsumexp_gradient = true
// float16_products = 3
// runtime = ["SPLITS"]
// spill_bytes_allowed = 8  # at head dim 256 on sm_80
// [tile]
// BLOCK_Q = "64 if HEAD_DIM == 64 else 32"
// BLOCK_K = "max(least, floor_pow2(shared_optin // 14)) // max(128, HEAD_DIM)"
// WARP_K = "16 if HEAD_DIM == 256 or BLOCK_K == 32 else 32"  # keys of a warp
// DIRECT = 0  # 1: one tile of keys, whose dQ is the whole dQ
// STAGES = "1 if HEAD_DIM == 256 or shared_optin < 163840 else 2"  # of Q and dO
// BLOCKS = 1  # on a multiprocessor, for the compiler: how many registers a thread may have
// FENCE = 1  # groups of columns of dV and dK that the compiler may overlap; with more, registers spill
// SPLITS = 1  # of the queries of a tile of keys, where blocks are few: each is a block
// SPLIT = "SPLITS > 1"  # a form of its own: dK and dV leave as partial sums
// DQ_QUERIES = "32 if HEAD_DIM == 256 and shared_optin < 232448 else 64"  # of a block in the launch that computes dQ alone, 16 a warp
// DQ_KEYS = "16 if HEAD_DIM == 256 or HEAD_DIM == 128 and shared_optin < 163840 else 32"  # of a tile there
// [let]
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as for hopper: as long as launches count; here not measured
// least = "8192 if HEAD_DIM == 64 else 4096"
// key_tiles = "batch * heads_kv * ceil_div(seq_kv, BLOCK_K)"
// query_tiles = "batch * heads_q * ceil_div(seq_q, BLOCK_Q)"
// works = "ceil_div(seq_kv, BLOCK_K) * heads_kv * batch"  # tiles of keys
// units = "132 if deterministic else sms"  # the splits of --deterministic, and its bits, are the same on every GPU
// tiles = "ceil_div(seq_q, BLOCK_Q) * heads_q // heads_kv"  # of queries, for a tile of keys
// half = "ceil_div(works * tiles, 2 * units)"  # a time, in tiles of queries: of a multiprocessor under the causal mask
// alone = "half + tiles if causal else ceil_div(works, units) * (tiles + 1 - DIRECT)"
// uneven_4 = "half + 16 * works // units + ceil_div(tiles, 4)"  # a further split costs some 4 tiles; the last block is waited for
// uneven_16 = "half + 64 * works // units + ceil_div(tiles, 16)"
// in_4 = "uneven_4 if causal else ceil_div(4 * works, units) * (ceil_div(tiles, 4) + 4)"
// even_16 = "ceil_div(16 * works, units) * (ceil_div(tiles, 16) + 4)"
// in_16 = "uneven_16 if causal else even_16"
// splits = "1 if 10 * min(in_4, in_16) > 9 * alone else 4 if in_4 <= in_16 else 16"
// makes_dq = "0 if deterministic or DIRECT else 1"  # gradients, for convert
// dq_parts = "ceil_div(seq_q, 16) * makes_dq"
// dk_parts = "ceil_div(seq_kv, 16) if SPLIT else 0"
// stage = "8 * BLOCK_Q * (HEAD_DIM + 1) + 128"  # bytes of a tile of Q and dO with its scales
// [[choice]]
// when = "HEAD_DIM == 64 and seq_q <= 32"
// BLOCK_Q = 32
// evidence = "experiments/fp32/history.csv: B8 H16 S32 24.7 -> 11.6 us with all three rows; alone, and the bound: not measured"
// [[choice]]
// when = "seq_kv <= 32"
// BLOCK_K = 32
// evidence = "as for 32 queries: alone, and the bound: not measured"
// [[choice]]
// when = "seq_kv <= BLOCK_K"
// DIRECT = 1
// evidence = "experiments/fp32/variants.txt, BAC: Edge-SmallSeq 11.46 us for 13.66 (not_direct), Small-1 20.99 for 22.46"
// [[choice]]
// when = "splits > 1 and not DIRECT"
// SPLITS = "splits"
// evidence = "docs/notes/27_split.md, backward: a sum; not measured yet"
// [workspace.keys]
// dtype = "float32"
// size = "batch * heads_kv * ceil_div(seq_kv, BLOCK_K) * (2 * BLOCK_K * HEAD_DIM + 32)"
// init = "none"
// [workspace.queries]
// dtype = "float32"
// size = "query_tiles * (2 * BLOCK_Q * HEAD_DIM + 2 * BLOCK_Q + 32)"
// init = "none"
// [workspace.dq]
// dtype = "float32"
// size = "4 if deterministic or DIRECT else query_tiles * BLOCK_Q * HEAD_DIM"
// init = "none"
// [workspace.partial]
// dtype = "float32"
// size = "2 * works * SPLITS * BLOCK_K * HEAD_DIM if SPLIT else 4"
// init = "none"
// [[launch]]
// entry = "prepare"
// grid = "2 * (key_tiles + query_tiles)"
// block = 256
// shared = 96
// [[launch]]
// entry = "gradients"
// overlaps = "few_rows"
// grid = ["ceil_div(seq_kv, BLOCK_K) * SPLITS", "heads_kv", "batch"]
// block = "BLOCK_K // WARP_K * 64"
// shared = "8 * BLOCK_K * (HEAD_DIM + BLOCK_Q) + 128 + STAGES * stage"
// [[launch]]
// entry = "dq"
// overlaps = "few_rows"
// when = "deterministic and not DIRECT"
// grid = ["ceil_div(seq_q, DQ_QUERIES)", "heads_q", "batch"]
// block = "2 * DQ_QUERIES"
// shared = "DQ_QUERIES // BLOCK_Q * stage + 2 * (8 * DQ_KEYS * HEAD_DIM + 128)"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// when = "makes_dq or SPLIT"
// grid = ["max(dq_parts, dk_parts)", "heads_q * makes_dq + (2 * heads_kv if SPLIT else 0)", "batch"]
// block = "HEAD_DIM"
// ///
//
// Step 27, backward, read against step 15's. float32 gradients on tensor cores: each operand of the five products of a tile is split into
// two float16, and three products of these parts take the place of one. fa/split_product.cuh has the arithmetic, the forward pass the
// choice of the split. The mathematics is step 07's, the distribution over warps and the two forms of dQ are step 15's:
//
//     S^T = K Q^T    P^T = exp(scale * S^T - logsumexp)    dP^T = V dO^T    dS^T = P^T ∘ (dP^T - delta)
//     dV += P^T dO   dK += dS^T Q   dQ += dS K
//
// Scales. Each operand is multiplied by a power of two that brings its largest element to 2^14. S alone could have one for each row, but
// dK sums over queries and dQ over keys, so a scale must not differ along them: Q, dO, K and V have one for each tile. An element is held
// to 2^-24 of itself or to 2^-40 of the largest of its tile, so a row 2^16 times smaller than its neighbours begins to lose bits.
//
//     P    times 2^15. It is at most 1; scores above 2^22 can make it larger by their rounding, so it is cut off at 1.5.
//     dS   is bounded by P times (the norms of a row of dO and a row of V, plus |delta|): split_scale of the tile's largest bound. prepare
//          computes norms and delta, so a tile needs no maximum over its scores, and no barrier for one. The bound is some 2^4 above the
//          typical dP. At 4096 equal weights dS still keeps 24 bits, at 65,536 20 bits, whose errors have independent signs.
//
// Chains. A tensor core truncates its accumulator, so chains are short. S and dP: small products apart, chains of 64 columns. (The forward
// pass multiplies S by 1 + 2^-23, what truncation takes in the mean. Where products are exact it takes nothing: O does not see that all
// scores of a row are 2^-23 too large, but dV does, where they reach 50.) dV and dK of a tile are summed from zero over 16 or 32 queries,
// scaled and added in float32. dQ is summed from zero over the block's keys, small products apart; the rest is added in global memory, in
// float32.
//
//     prepare             splits K and V, Q and dO, into a workspace, as the tiles will lie in shared memory, with scales, norms, delta and
//                         logsumexp behind them (fa/split_gradient.cuh): a tile is one contiguous cp.async copy
//     gradients           a block keeps K and V of BLOCK_K keys; main loop over tiles of BLOCK_Q queries:
//                           1. wait for the tile; S, P, dP, dS of the warp's keys x half of the queries
//                           2. P and dS are split, from registers to shared memory; dV and dK += the warp's own half
//                           3. barrier; dV and dK += the other half, which the neighbour warp computed
//                           4. the copy of the next tile starts; dQ = dS K, added by reductions
//     convert             dQ from the layout of the accumulators to rows; in the deterministic form dq instead, which makes S and dP
//                         again: 7 products instead of 5
//
// Few key heads make few blocks: 23 for 132 multiprocessors at B1, 71 heads, 1 key head, S2845. Then SPLITS blocks share a tile of keys.
// Each walks over a range of its tiles of queries, through all heads of the group, and leaves its dK and dV in a workspace. Launch 3 adds
// them in the order of the ranges. How many is a sum: the tiles of queries of a multiprocessor's blocks, and four more a block.
//
// Short sequences are bound by launches, of some 3 us each. With few rows each begins while the one before ends, and waits for it
// (fa/overlap.cuh). Where one block has all keys of a head (DIRECT), its dQ is the whole dQ: it is stored at once, and there is no third
// launch in either form. For at most 32 queries or keys the tiles are that short.
//
// The limits, 128 keys x 32 queries at head dim 128: 8 warps with 480 mma each are 6050 cycles of the tensor cores. Shared memory delivers
// 184 ldmatrix a warp, 5890 cycles, and 500 more for P, dS and the copies. 1900 instructions a warp are issued in 3800 cycles. So tensor
// cores and shared memory are both nearly full, and one of them waits at each barrier. Step 15 has the same mma with a third of the
// products: there shared memory is the limit, since an operand of two parts is read twice for three mma.
//
// Shared memory decides the tiles. K and V of 128 keys take 128 KB at head dim 128, two stages of Q and dO 64 KB, P and dS 32 KB: 225 of
// 227 KB. Registers: dK and dV 128, the sum of a tile 32. At head dim 256 a warp has 16 keys, a block 64, Q and dO one stage. Devices with
// 99 KB have no room for head dim 256.
//
// Not finite inputs: results are not finite where float32's are not, but an infinity may become NaN, as in the forward pass.
#include <fa/split_gradient.cuh>

constexpr int M = WARP_K / 16, HALF = BLOCK_Q / 2, STEPS = HALF / 16;  // a warp: WARP_K keys, and half of the queries or columns
constexpr int WARPS = BLOCK_K / WARP_K * 2, THREADS = 32 * WARPS;
constexpr int COLUMNS = HEAD_DIM / 16;  // groups of 8 columns of a warp in dK and dV: half of all

// The product dQ, BLOCK_Q x HEAD_DIM, is divided among DQ_ROWS x DQ_COLUMNS warps, DQ_M x DQ_N accumulators each, in DQ_PARTS parts.
constexpr int DQ_PARTS = HEAD_DIM == 256 && WARPS == 4 ? 2 : 1, DQ_COLUMNS = WARPS / 2, DQ_ROWS = 2;
constexpr int DQ_STRIDE = DQ_COLUMNS * DQ_PARTS, DQ_M = BLOCK_Q / 16 / DQ_ROWS, DQ_N = HEAD_DIM / 8 / DQ_STRIDE;
static_assert(HEAD_DIM / 16 % DQ_STRIDE == 0 && DQ_STRIDE <= 4, "DQ_STRIDE divides the groups of 16 columns of dQ, and is at most 4");
static_assert(STAGES == 1 || STAGES == 2, "one tile of queries, or two in turns");

using Tiles = fa::SplitGradient<BLOCK_Q, BLOCK_K, HEAD_DIM, WORKSPACE_KEYS, WORKSPACE_QUERIES, WORKSPACE_DQ>;
constexpr fa::uint32_t K_LOW = Tiles::k_low, Q_LOW = Tiles::q_low, K_INFO = Tiles::k_info, K_ITEM = Tiles::k_item;  // bytes
constexpr fa::uint32_t Q_STATS = Tiles::q_stats, Q_INFO = Tiles::q_info, Q_ITEM = Tiles::q_item;

// Shared memory of launch 2: keys, STAGES tiles of queries, P^T and dS^T [BLOCK_K][BLOCK_Q], high and low parts each.
constexpr fa::uint32_t P_LOW = BLOCK_K * BLOCK_Q * 2, AT_Q = K_ITEM, AT_P = AT_Q + STAGES * Q_ITEM;

// Launch 1.
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ fa::Args args) {
    Tiles::prepare<!DETERMINISTIC && !DIRECT>(args);
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

// P^T and dS^T of a warp as A operands, and to shared memory for the other warps.
__device__ __forceinline__ void split_and_share(fa::uint32_t (&high)[STEPS][M][4], fa::uint32_t (&low)[STEPS][M][4],
                                                const float (&d)[M][HALF / 8][4], unsigned char* tile) {
    fa::split_a(high, low, d);
    const Coordinates at;
    const fa::uint32_t share_lane = fa::lane_of_share<BLOCK_Q>(at.key, at.side * (HALF / 8), at.lane);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        fa::share_step<BLOCK_Q>(tile, high[k], share_lane, k);
        fa::share_step<BLOCK_Q>(tile + P_LOW, low[k], share_lane, k);
    }
}

// dV or dK += factor * P^T dO (dS^T Q) over half of the queries, whose part of P is in registers.
__device__ __forceinline__ void multiply_half(float (&d)[M][COLUMNS][4], const fa::uint32_t (&high)[STEPS][M][4],
                                              const fa::uint32_t (&low)[STEPS][M][4], fa::uint32_t tile_smem, bool own, float factor) {
    const Coordinates at;
    const fa::uint32_t half = own ? at.side : 1 - at.side;
    const fa::uint32_t lane_smem = fa::lane_of_a_at<HEAD_DIM>(tile_smem, half * HALF, at.side, at.lane);
    fa::split_multiply_ab<HEAD_DIM, FENCE, 2>(d, high, low, lane_smem, Q_LOW, factor);
}

// The same over the other half, whose part of P the neighbour warp has computed.
__device__ __forceinline__ void multiply_other(float (&d)[M][COLUMNS][4], fa::uint32_t p_smem, fa::uint32_t tile_smem, float factor) {
    fa::uint32_t high[STEPS][M][4], low[STEPS][M][4];
    const Coordinates at;
    const fa::uint32_t p_lane = fa::lane_of_a_at<BLOCK_Q>(p_smem, at.key, (1 - at.side) * STEPS, at.lane);
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int m = 0; m < M; ++m) {
            fa::ldmatrix_x4(high[k][m], fa::step_16<BLOCK_Q>(p_lane, k) + m * fa::rows_16<BLOCK_Q>);
            fa::ldmatrix_x4(low[k][m], fa::step_16<BLOCK_Q>(p_lane, k) + m * fa::rows_16<BLOCK_Q> + P_LOW);
        }
    multiply_half(d, high, low, tile_smem, false, factor);
}

// dQ of a tile from accumulators to rows. A quad writes a sector. All coordinates are computed here: none takes a register in the products.
__device__ __forceinline__ void store_dq(const fa::Args& args, const float (&d)[DQ_M][DQ_N][4], int tile, int part, float factor) {
    fa::schedule_fence();
    const Coordinates at;
    const int tiles = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q, batch = blockIdx.z, head = tile / tiles % args.heads_q;
    const int row = tile % tiles * BLOCK_Q + at.warp / DQ_COLUMNS * DQ_M * 16 + at.row();
    const int column = 16 * (at.warp % DQ_COLUMNS + part * DQ_COLUMNS) + at.pair();
#pragma unroll
    for (int m = 0; m < DQ_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = row + 16 * m + 8 * half;
            if (query >= args.seq_q) continue;
            const float times = fa::visible_keys(args, query) > 0 ? factor * float(args.scale) : 0.0f;
            float* to = fa::row_pointer<float>(args.dQ, batch, head, query) + column;
#pragma unroll
            for (int n = 0; n < DQ_N; ++n) {
                const int far = (n / 2 * 2 * DQ_STRIDE + n % 2) * 8;
                fa::store_vec_upto(to + far, fa::Vec<float, 2>{d[m][n][2 * half] * times, d[m][n][2 * half + 1] * times},
                                   args.head_dim - column - far);
            }
        }
}

// Launch 2. BLOCK_K keys are resident; every query that sees them is streamed, of all heads that read this key head.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const __grid_constant__ fa::Args args) {
    fa::launch_dependents();
    unsigned char* smem = fa::dynamic_shared();
    const fa::uint32_t k_smem = fa::smem_u32(smem), p_smem = k_smem + AT_P;
    const int splits = SPLIT ? args.runtime[RUNTIME_SPLITS] : 1, k_tile = int(blockIdx.x) / splits, k_first = k_tile * BLOCK_K,
              kv_head = blockIdx.y, batch = blockIdx.z;
    const int group = args.heads_q / args.heads_kv;
    const float scale = float(args.scale);

    // The streamed tiles of queries: for each head of the group, from the first query that sees a key of the block.
    // Their items lie side by side, so that one number counts them.
    // DIRECT: all queries, since those that see no key get their 0 here. Computed again each time: a register less.
    const auto q_start = [&] { return DIRECT ? 0 : fa::first_query(args, k_first) / BLOCK_Q * BLOCK_Q; };
    int tile_end = Tiles::first_tile(args, batch, (kv_head + 1) * group);
    int q_first = q_start();
    int tile = q_first < args.seq_q ? Tiles::first_tile(args, batch, kv_head * group) + q_first / BLOCK_Q : tile_end;
    if constexpr (SPLIT) {
        // One of the ranges into which the tiles of all heads of the group are divided, a tile more or less
        const int split = int(blockIdx.x) % splits, of_head = Tiles::query_tiles(args), seen = of_head - q_first / BLOCK_Q;
        const int begin = seen * group * split / splits, last = seen * group * (split + 1) / splits - 1, from = tile;
        if (last >= begin) {
            tile = from + begin / seen * of_head + begin % seen;
            tile_end = from + last / seen * of_head + last % seen + 1;
            q_first += begin % seen * BLOCK_Q;
        } else tile = tile_end;
    }

    const auto fetch = [&](int tile, fa::uint32_t stage) {  // starts the copy of a tile
        fa::copy_bytes<Q_ITEM, THREADS>(k_smem + AT_Q + stage * Q_ITEM, Tiles::query_item(args, tile));
    };
    fa::dependency_wait();
    if (tile < tile_end) {
        fa::copy_bytes<K_ITEM, THREADS>(k_smem, Tiles::key_item(args, batch, kv_head, k_tile));
        fetch(tile, 0);
    }
    fa::cp_async_commit_group();

    float dk_reg[M][COLUMNS][4] = {}, dv_reg[M][COLUMNS][4] = {};
    // Main loop over the streamed tiles
    fa::uint32_t stage = 0;
    while (tile < tile_end) {
        fa::cp_async_wait_group<0>();
        __syncthreads();  // the tile has arrived; all warps have read the other stage, P and dS

        const fa::uint32_t q_at = AT_Q + stage * Q_ITEM, q_smem = k_smem + q_at;
        const Tiles::Factors factors(reinterpret_cast<const float*>(smem + q_at + Q_INFO), reinterpret_cast<const float*>(smem + K_INFO),
                                     scale);
        fa::uint32_t high_reg[STEPS][M][4], low_reg[STEPS][M][4];
        float p_reg[M][HALF / 8][4] = {}, ds_reg[M][HALF / 8][4] = {};
        {
            // P^T = exp(scale * K Q^T - logsumexp)
            const Coordinates at;
            const fa::uint32_t k_lane = fa::lane_of_a_at<HEAD_DIM>(k_smem, at.key, 0, at.lane);
            const fa::uint32_t q_lane = fa::lane_of_b_at<HEAD_DIM>(q_smem, at.side * HALF, 0, at.lane);
            const float* stats = reinterpret_cast<const float*>(smem + q_at + Q_STATS) + at.side * HALF + at.pair();
            fa::split_multiply_rows<HEAD_DIM>(p_reg, k_lane, K_LOW, q_lane, Q_LOW);
#pragma unroll
            for (int n = 0; n < HALF / 8; ++n) {
                const fa::Vec<float, 2> lse = fa::load_vec<2>(stats + 8 * n);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) p_reg[m][n][i] = Tiles::probability(p_reg[m][n][i], factors.score, lse[i % 2]);
            }
            // dP^T = V dO^T
            fa::split_multiply_rows<HEAD_DIM>(ds_reg, k_lane + 2 * K_LOW, K_LOW, q_lane + 2 * Q_LOW, Q_LOW);
        }
        if (fa::visible_keys(args, q_first) < k_first + BLOCK_K) {
            const Coordinates at;
            fa::clear_hidden(p_reg, args, q_first + int(at.side) * HALF + at.pair(), k_first + int(at.key) + at.row());
        }
        {
            // dS^T = P^T ∘ (dP^T - delta), times its scale
            const Coordinates at;
            const float* delta_smem = reinterpret_cast<const float*>(smem + q_at + Q_STATS) + BLOCK_Q + at.side * HALF + at.pair();
#pragma unroll
            for (int n = 0; n < HALF / 8; ++n) {
                const fa::Vec<float, 2> delta = fa::load_vec<2>(delta_smem + 8 * n);
                const float scaled[2] = {delta[0] * factors.ds_scale, delta[1] * factors.ds_scale};
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        ds_reg[m][n][i] = p_reg[m][n][i] * (ds_reg[m][n][i] * factors.dp - scaled[i % 2]);
                        p_reg[m][n][i] *= Tiles::p_scale;
                    }
            }
        }
        // The half of the queries that this warp has computed, from registers
        split_and_share(high_reg, low_reg, p_reg, smem + AT_P);
        multiply_half(dv_reg, high_reg, low_reg, q_smem + 2 * Q_LOW, true, factors.dv);
        split_and_share(high_reg, low_reg, ds_reg, smem + AT_P + 2 * P_LOW);
        multiply_half(dk_reg, high_reg, low_reg, q_smem, true, factors.dk);
        __syncthreads();  // P and dS are complete
        multiply_other(dv_reg, p_smem, q_smem + 2 * Q_LOW, factors.dv);
        multiply_other(dk_reg, p_smem + 2 * P_LOW, q_smem, factors.dk);

        // The next tile: the other stage is free since the first barrier.
        q_first += BLOCK_Q;
        int next = tile + 1;
        if (q_first >= args.seq_q) q_first = q_start(), next += q_first / BLOCK_Q;
        if constexpr (STAGES == 1) __syncthreads();  // all warps have read Q, dO and what belongs to them
        if constexpr (STAGES == 2) stage ^= 1;
        if (next < tile_end) fetch(next, stage);
        fa::cp_async_commit_group();

        if constexpr (DIRECT || !DETERMINISTIC) {
#pragma unroll
            for (int part = 0; part < DQ_PARTS; ++part) {
                float dq_reg[DQ_M][DQ_N][4] = {};
                const Coordinates at;
                const fa::uint32_t ds_lane = fa::lane_of_b_at<BLOCK_Q>(p_smem + 2 * P_LOW, 0, at.warp / DQ_COLUMNS * DQ_M, at.lane);
                const fa::uint32_t kt_lane = fa::lane_of_a_at<HEAD_DIM>(k_smem, 0, at.warp % DQ_COLUMNS + part * DQ_COLUMNS, at.lane);
                fa::split_multiply_atb<BLOCK_K / 16, BLOCK_Q, HEAD_DIM, DQ_STRIDE>(dq_reg, ds_lane, P_LOW, kt_lane, K_LOW);
                const int column = 2 * (at.warp % DQ_COLUMNS + part * DQ_COLUMNS);  // in groups of 8
                if constexpr (DIRECT) {
                    store_dq(args, dq_reg, tile, part, factors.dq);
                    continue;
                }
                const int dq_lane = (at.warp / DQ_COLUMNS * DQ_M * (HEAD_DIM / 8) + column) * 128 + at.lane * 4;
                float* dq = Tiles::dq(args, tile) + dq_lane;
#pragma unroll
                for (int m = 0; m < DQ_M; ++m)
#pragma unroll
                    for (int n = 0; n < DQ_N; ++n) {
                        float (&d)[4] = dq_reg[m][n];
#pragma unroll
                        for (int e = 0; e < 4; ++e) d[e] *= factors.dq;
                        fa::red_add_v4_f32(dq + (m * (HEAD_DIM / 8) + n / 2 * 2 * DQ_STRIDE + n % 2) * 128, d[0], d[1], d[2], d[3]);
                    }
            }
        }
        tile = next;
    }

    // Epilogue: dK and dV from registers to global memory; a quad writes a sector.
    const Coordinates at;
    float* partial = SPLIT ? Tiles::partial<WORKSPACE_PARTIAL>(
                                 args, Tiles::number_of_split(args, batch, kv_head, k_tile, splits, int(blockIdx.x) % splits))
                           : nullptr;
    const int columns = SPLIT ? HEAD_DIM : args.head_dim;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = k_first + int(at.key) + 16 * m + 8 * half + at.row();
            if (key >= args.seq_kv) continue;
            float* dk = SPLIT ? partial + (key - k_first) * HEAD_DIM : fa::row_pointer<float>(args.dK, batch, kv_head, key);
            float* dv = SPLIT ? dk + BLOCK_K * HEAD_DIM : fa::row_pointer<float>(args.dV, batch, kv_head, key);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                const int column = (n / 2 * 2 + int(at.side)) * 16 + n % 2 * 8 + at.pair();
                const float (&k)[4] = dk_reg[m][n], (&v)[4] = dv_reg[m][n];
                fa::store_vec_upto(dk + column, fa::Vec<float, 2>{k[2 * half] * scale, k[2 * half + 1] * scale}, columns - column);
                fa::store_vec_upto(dv + column, fa::Vec<float, 2>{v[2 * half], v[2 * half + 1]}, columns - column);
            }
        }
}

constexpr int DQ_THREADS = 2 * DQ_QUERIES;

// Launch 3, deterministic form. DQ_QUERIES queries are resident, 16 a warp; every key they see is streamed, DQ_KEYS at a time.
extern "C" __global__ void __launch_bounds__(DQ_THREADS, 1) dq(const __grid_constant__ fa::Args args) {
    constexpr int items = DQ_QUERIES / BLOCK_Q;
    constexpr fa::uint32_t low = DQ_KEYS * HEAD_DIM * 2, stage_bytes = 4 * low + 4 * Tiles::info_size;
    unsigned char* smem = fa::dynamic_shared();  // the items of queries, two stages of [K high][K low][V high][V low][info]
    const fa::uint32_t q_smem = fa::smem_u32(smem);
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // the longest start first
    const int q_first = q_tile * DQ_QUERIES, q_end = min(q_first + DQ_QUERIES, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int keys = fa::visible_keys(args, q_end - 1);
    const float scale = float(args.scale);

    fa::launch_dependents();
    fa::dependency_wait();
    const auto fetch = [&](int k_first, fa::uint32_t to) {
        const unsigned char* item = Tiles::key_item(args, batch, kv_head, k_first / BLOCK_K);
#pragma unroll
        for (int part = 0; part < 4; ++part)
            fa::copy_bytes<low, DQ_THREADS>(q_smem + to + part * low, item + part * K_LOW + k_first % BLOCK_K * (HEAD_DIM * 2));
        fa::copy_bytes<4 * Tiles::info_size, DQ_THREADS>(q_smem + to + 4 * low, item + K_INFO);
    };
#pragma unroll
    for (int i = 0; i < items; ++i)
        if (keys > 0 && q_first + i * BLOCK_Q < q_end)
            fa::copy_bytes<Q_ITEM, DQ_THREADS>(q_smem + i * Q_ITEM,
                                               Tiles::query_item(args, Tiles::first_tile(args, batch, head) + q_first / BLOCK_Q + i));
    fa::uint32_t stage = items * Q_ITEM;
    if (keys > 0) fetch(0, stage);
    fa::cp_async_commit_group();

    float dq_reg[1][HEAD_DIM / 8][4] = {};
    // Main loop over the streamed tiles
    for (int k_first = 0; k_first < keys; k_first += DQ_KEYS) {
        fa::cp_async_wait_group<0>();
        __syncthreads();  // the tile has arrived; all warps have read the other stage
        const fa::uint32_t other = 2 * items * Q_ITEM + stage_bytes - stage;
        if (k_first + DQ_KEYS < keys) fetch(k_first + DQ_KEYS, other);
        fa::cp_async_commit_group();

        // This lane's rows and addresses, from an opaque thread index: they take no register through the loop.
        const fa::uint32_t thread = fa::opaque_thread_id(), lane = thread % 32, row = thread / 32 * 16;
        const fa::uint32_t item = row / BLOCK_Q * Q_ITEM;
        const Tiles::Factors factors(reinterpret_cast<const float*>(smem + item + Q_INFO),
                                     reinterpret_cast<const float*>(smem + stage + 4 * low), scale);
        const fa::uint32_t q_lane = fa::lane_of_a_at<HEAD_DIM>(q_smem + item, row % BLOCK_Q, 0, lane);
        const fa::uint32_t k_lane = fa::lane_of_b_at<HEAD_DIM>(q_smem + stage, 0, 0, lane);
        float p_reg[1][DQ_KEYS / 8][4] = {}, ds_reg[1][DQ_KEYS / 8][4] = {};
        fa::split_multiply_rows<HEAD_DIM>(p_reg, q_lane, Q_LOW, k_lane, low);
        fa::split_multiply_rows<HEAD_DIM>(ds_reg, q_lane + 2 * Q_LOW, Q_LOW, k_lane + 2 * low, low);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = int(row + lane / 4) + 8 * half;
            const float* stats = reinterpret_cast<const float*>(smem + item + Q_STATS) + own % BLOCK_Q;
            const float lse = stats[0], delta = stats[BLOCK_Q] * factors.ds_scale;
#pragma unroll
            for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& ds = ds_reg[0][n][2 * half + e];
                    ds = Tiles::probability(p_reg[0][n][2 * half + e], factors.score, lse) * (ds * factors.dp - delta);
                }
        }
        if (k_first + DQ_KEYS > fa::visible_keys(args, q_first + int(row))) {
            const fa::uint32_t again = fa::opaque_thread_id();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = q_first + int(again / 32 * 16 + again % 32 / 4) + 8 * half;
                const int visible = fa::visible_keys(args, query) - k_first - int(again % 4 * 2);
#pragma unroll
                for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (8 * n + e >= visible) ds_reg[0][n][2 * half + e] = 0;
            }
        }
        fa::uint32_t high_reg[DQ_KEYS / 16][1][4], low_reg[DQ_KEYS / 16][1][4];
        fa::split_a(high_reg, low_reg, ds_reg);
        fa::split_multiply_ab<HEAD_DIM, FENCE>(dq_reg, high_reg, low_reg, fa::lane_of_a_at<HEAD_DIM>(q_smem + stage, 0, 0, lane), low,
                                               factors.dq);
        stage = other;
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = q_first + fa::warp_id() * 16 + fa::fragment_row() + 8 * half;
        if (query >= q_end) continue;
        float* to = fa::row_pointer<float>(args.dQ, batch, head, query) + fa::fragment_column();
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 8; ++c) {
            const float (&d)[4] = dq_reg[0][c];
            fa::store_vec_upto(to + 8 * c, fa::Vec<float, 2>{d[2 * half] * scale, d[2 * half + 1] * scale},
                               args.head_dim - 8 * c - fa::fragment_column());
        }
    }
}

// Launch 3, the other form.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) convert(const __grid_constant__ fa::Args args) {
    constexpr bool makes_dq = !DETERMINISTIC && !DIRECT;
    fa::dependency_wait();
    if constexpr (SPLIT) {  // behind dQ of all heads stand dK and dV of each key head
        const int other = int(blockIdx.y) - (makes_dq ? args.heads_q : 0);
        if (other >= 0) return Tiles::add_splits<WORKSPACE_PARTIAL>(args, other / 2, other % 2, args.runtime[RUNTIME_SPLITS]);
        if (int(blockIdx.x) * 16 >= args.seq_q) return;  // there are more keys
    }
    if constexpr (makes_dq) Tiles::convert(args);
}
