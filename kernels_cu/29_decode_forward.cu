// /// kernel
// title = "few queries: the keys divided among blocks, the heads of a group in one tile"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128, 256]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// mask = true
// score = true
// sinks = true
// head_dim_v = true
// paged = true
// dtypes_kv = ["float8_e4m3"]
// arithmetic = "p16"
// auto = "page_size > 0 or sizeof_kv == 1 or rows <= 16 and seq_kv >= 1024"  # else hopper's packed heads (experiments/decode)
// runtime = ["PARTS"]
// [tile]
// WARP_ROWS = "16 if HEAD_DIM == 256 or rows <= 16 else 32"  # a row is a query of one head
// ROW_WARPS = "1 if rows <= WARP_ROWS else 2 if rows <= 32 or WARP_ROWS == 32 or small else 4"
// BLOCK_K = "128 if HEAD_DIM == 64 else 32 if narrow else wide"
// KEY_WARPS = "min(2 if narrow else 4, BLOCK_K // 16, 8 // ROW_WARPS)"  # that divide the keys of a tile
// BLOCKS = "2 if HEAD_DIM <= 128 and ROW_WARPS * WARP_ROWS == 16 and not small else 1"  # on a multiprocessor
// STAGES = "max(2, min(6, (block_bytes - q_bytes) // stage_bytes))"  # tiles of K and V on their way or in use
// PARTS = "even + spare"  # of the keys of a tile of rows; of pages, blocks a sequence
// [let]
// rows = "heads_q // heads_kv * seq_q"  # of a key head
// small = "shared_optin < 163840"
// narrow = "small and (HEAD_DIM == 256 or rows > 32)"
// wide = "64 if small or rows > 16 or HEAD_DIM * sizeof_kv > 128 else 128"
// block_bytes = "(shared_optin + 1024) // BLOCKS - 1024"  # of shared memory; each block takes 1 KB besides
// q_bytes = "ROW_WARPS * WARP_ROWS * (2 * HEAD_DIM + (4 if sizeof_kv == 1 else 0))"
// stage_bytes = "sizeof_kv * BLOCK_K * (HEAD_DIM + HEAD_DIM_V)"
// merge_bytes = "4 * KEY_WARPS * ROW_WARPS * WARP_ROWS * (HEAD_DIM_V + 9)"  # of the warps' O and logsumexps
// even = "max(1, min((sms + works // 3) // works, seq_kv // 256, 66))"  # a block a multiprocessor
// spare = "1 if page_size > 0 and batch > 1 else 0"  # a sequence's last block may have few keys
// works = "ceil_div(rows, ROW_WARPS * WARP_ROWS) * heads_kv * batch"  # tiles of rows
// [workspace.partial]
// dtype = "float32"
// size = "batch * heads_q * seq_q * PARTS * HEAD_DIM_V if PARTS > 1 else 0"
// init = "none"
// [workspace.sums]
// dtype = "float32"
// size = "batch * heads_q * seq_q * PARTS if PARTS > 1 else 0"
// init = "none"
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(rows, ROW_WARPS * WARP_ROWS) * PARTS", "heads_kv", "batch"]
// block = "32 * ROW_WARPS * KEY_WARPS"
// shared = "max(q_bytes + STAGES * stage_bytes, merge_bytes)"
// [[launch]]
// entry = "merge"
// when = "PARTS > 1"
// overlaps = 1
// grid = ["rows", "heads_kv", "batch"]
// block = 256
// shared = "4 * 8 * (HEAD_DIM_V + 9)"
// ///
//
// Step 29, read against step 15. Few queries and a long cache, as in decoding: a token is made from one query a sequence, and all keys are
// read for it. Arithmetic is nothing then, time is bytes of K and V over the speed of memory. What step 15 and hopper do wrong here:
//
//     a block for each query head     Heads of a group read the same K and V, each for itself. Here a tile has the rows of all heads of
//                                     a group (packed GQA): a row is a query of one head, query after query, each with its heads.
//     a tile of 64 or 128 queries     is padding for one query. Here a warp has 16 rows, the least that mma.sync takes; of 8 heads in a
//                                     group and 16 queries 128 rows are two tiles of 64.
//     a block has all keys            One sequence of 8 key heads would be 8 blocks, on 132 multiprocessors. Here the keys are divided
//                                     into PARTS, a block each (FlashDecoding, Dao et al. 2023), as many as the device has room for.
//
// The speed of memory. By Little's law 4.5 TB/s times a latency of some 1 us under load are 4.5 MB on their way at any time, 34 KB a
// multiprocessor. cp.async has them in flight without registers: a ring of STAGES tiles of K and V, all but one of which are on their way,
// fills shared memory, 128 to 160 KB a multiprocessor. mma.sync does, for the arithmetic is small: 64 rows at 4.5 TB/s are 290 TFLOP/s,
// of the 649 it has. So this runs from sm_80 on.
//
//     prologue            copies of the first STAGES - 1 tiles of K and V start; Q passes through registers meanwhile
//     main loop, tile n   1. wait for tile n, synchronise: tile n - 1 has been read by all warps, the copy of tile n + STAGES - 1 starts
//                            into its stage
//                         2. each warp: S = Q K^T of its rows and its keys, online softmax, O += P V
//     epilogue            the O and logsumexps of the warps meet in shared memory, those of the parts in global memory
//
// Warps divide keys. One warp would multiply 16 rows with a whole tile while the others wait. KEY_WARPS warps have 16 or 32 keys of each
// tile instead, and each its own O and row maxima: nothing passes between them in the loop. Where there are more than 16 rows, ROW_WARPS
// warps, or 32 rows a warp, divide the rows too. A fragment of K then serves two products, for shared memory delivers 29 TB/s and each
// row of warps reads the tile anew.
//
// Masks. A mask of the problem's own leaves some tiles of keys. The parts divide what lies between the first and the last of them that some
// row of a tile of rows sees: of a window of 1,000 keys only these are read, by all blocks. A block finds them by itself before its first
// copy, for the formula of a mask tells of a whole tile at once (fa/score.cuh). Tiles between that no row sees are passed over. A sink is no
// key of any part: it is in a row's sum once, when the row is stored.
//
// A cache of 8 bits (e4m3) is half the bytes. cp.async and the ring do not look at them; behind ldmatrix they become float16, which is exact, and
// Q and P are float16 beside them (fa/cache.cuh). What they are worth is the problem's descales: K's comes into the scale, V's into O as it is
// stored. A tile has twice the keys where there is room, so that a warp does as much between two barriers.
//
// Merging. O_i and logsumexp_i over disjoint keys give O = sum w_i O_i with w_i = exp(logsumexp_i - logsumexp), logsumexp that of all
// logsumexp_i. It is the same three times, by merge_row, a row a warp: over the warps of a block, over the parts of a row, and over the
// warps that share those parts. The order is that of the keys, so all runs give the same bits. The parts are merged by a launch of its own,
// which has a block a row and whose blocks wait while the last parts are computed. The last block of a tile to arrive could do it without
// one, but alone, and its loads follow each other: 47.7 us for 42.3 of B1 H32/8 Skv32768 (experiments/decode/forms.txt). A part that sees
// no key has logsumexp -inf, and the weight 0.
#include <fa/barrier.cuh>
#include <fa/cache.cuh>
#include <fa/descale.cuh>
#include <fa/overlap.cuh>
#include <fa/pages.cuh>
#include <fa/row.cuh>
#include <fa/softmax.cuh>

using scalar = fa::DTYPE;
using stored = fa::DTYPE_KV;  // K and V
using operand = fa::Operand<scalar, stored>::type;  // of products
using fa::int64_t;
using fa::uint32_t;

constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
constexpr int ROWS = ROW_WARPS * WARP_ROWS, WARPS = ROW_WARPS * KEY_WARPS, THREADS = 32 * WARPS, MERGE_WARPS = 8;
constexpr int M = WARP_ROWS / 16, WARP_KEYS = BLOCK_K / KEY_WARPS, COLUMNS = HEAD_DIM / 8, COLUMNS_V = HEAD_DIM_V / 8;
constexpr bool SCALES_Q = fa::Operand<scalar, stored>::scales;
constexpr bool Q_IN_REG = WARP_ROWS * HEAD_DIM <= 2048;  // as fragments: WARP_ROWS * HEAD_DIM / 64 registers
constexpr int WIDE = fa::columns_16<stored, HEAD_DIM>, WIDE_V = fa::columns_16<stored, HEAD_DIM_V>;  // of tiles of K and V
constexpr uint32_t K_TILE = BLOCK_K * WIDE * 2, STAGE = K_TILE + BLOCK_K * WIDE_V * 2;  // bytes; a stage is a tile of K and one of V
constexpr int PITCH = HEAD_DIM_V + 8;  // of O in shared memory: the 4 rows that half a warp writes lie in different banks
constexpr int AHEAD = 16;  // parts of a row that are loaded at the same time
constexpr int OWN = HEAD_DIM_V / 32, VEC = fa::output_vec<OWN>;  // columns of a row that a lane merges
constexpr int COPY_ROWS = fa::has_pages && fa::page_size < BLOCK_K ? fa::page_size : BLOCK_K;  // of a tile of keys
static_assert(WARP_KEYS % 16 == 0, "P of 16 keys is an operand");
static_assert(THREADS % COLUMNS == 0 && ROWS * COLUMNS % THREADS == 0, "a thread loads the same 16 bytes of several rows of Q");

// The rows of a key head: the queries of all query heads that read it, query after query, each with its heads.
struct Rows {
    const fa::Args& args;  // of the sequence
    int batch, first_slot, kv_head = blockIdx.y, group = args.heads_q / args.heads_kv, count = group * args.seq_q;
    double scale = args.scale * fa::descale_of(args, 1, batch, kv_head);  // of q·k as K is stored

    __device__ __forceinline__ int query(int row) const { return row / group; }
    __device__ __forceinline__ int head(int row) const { return kv_head * group + row % group; }
    __device__ __forceinline__ int visible(int row) const { return fa::visible_keys(args, query(min(row, count - 1))); }
    // What the mask says of tile n of keys for ROWS rows from `first` on, all heads of the group; and the next tile from n on that one may see.
    __device__ __forceinline__ fa::Visible sees(int first, int n) const {
        const int own = query(first), queries = query(min(first + ROWS, count) - 1) - own + 1;
        return fa::visible_in(args, batch, kv_head * group, own, queries, n * BLOCK_K, BLOCK_K, group);
    }
    __device__ __forceinline__ int next(int first, int n, int end) const {
        if constexpr (fa::has_mask)
            while (n < end && !sees(first, n).may) ++n;
        return n;
    }
    // q·k becomes the problem's score, and -inf where its mask hides the key. Of a warp whose rows begin with `first`; key: that of this
    // thread's first score. Rows beyond the last are the last.
    __device__ __forceinline__ void apply_score(float (&s)[M][WARP_KEYS / 8][4], int first, int key) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = min(first + 16 * m + 8 * half + fa::fragment_row(), count - 1), own = query(row), its = head(row);
#pragma unroll
                for (int i = 0; i < WARP_KEYS / 4; ++i) {
                    float& x = s[m][i / 2][2 * half + i % 2];
                    x = fa::score_of(args, batch, its, own, key + i / 2 * 8 + i % 2, x * fabsf(float(scale)));
                }
            }
    }
    __device__ __forceinline__ void hide_scores(float (&s)[M][WARP_KEYS / 8][4], int first, int key) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = min(first + 16 * m + 8 * half + fa::fragment_row(), count - 1), own = query(row), its = head(row);
#pragma unroll
                for (int i = 0; i < WARP_KEYS / 4; ++i)
                    if (fa::hidden(args, batch, its, own, key + i / 2 * 8 + i % 2)) s[m][i / 2][2 * half + i % 2] = -fa::infinity();
            }
    }
    // O and logsumexp of a part: a slot has `count` rows for each key head, and the place is that of row 0.
    __device__ __forceinline__ int64_t place(int part) const { return (int64_t(first_slot + part) * args.heads_kv + kv_head) * count; }
    __device__ __forceinline__ int64_t step() const { return int64_t(args.heads_kv) * count; }  // from a part to the next
    __device__ __forceinline__ float* partial(int part) const {
        return static_cast<float*>(args.workspace[WORKSPACE_PARTIAL]) + place(part) * HEAD_DIM_V;
    }
    __device__ __forceinline__ float* sums(int part) const { return static_cast<float*>(args.workspace[WORKSPACE_SUMS]) + place(part); }
    // O and logsumexp of a row over all its keys, and now its sink.
    __device__ __forceinline__ void store(int row, const float (&out)[OWN], float logsumexp) const {
        float factor = 1;
        if constexpr (fa::has_sinks) {
            float row_sum = logsumexp == -fa::infinity() ? 0.0f : 1.0f;
            factor = fa::add_sink(args, head(row), logsumexp, row_sum) / row_sum;
            logsumexp += fa::log(row_sum);
        }
        factor *= fa::descale_of(args, 2, batch, kv_head);
        fa::store_output<scalar, 32>(fa::row_pointer<scalar>(args.O, batch, head(row), query(row)), out, factor, fa::lane_id(),
                                     fa::head_dim_v(args));
        if (fa::lane_id() == 0) *(fa::row_pointer<float>(args.logsumexp, batch, head(row), 0) + query(row)) = logsumexp;
    }
};

// O of a row, this lane's columns, and its logsumexp, from `count` parts of its keys in their order. o: of the first part, the next o_step
// floats on; likewise the logsumexps. By a warp, with the loads of Ahead parts in flight. A NaN among the logsumexps is in the sum (max drops
// it).
template <int Ahead>
__device__ __forceinline__ float merge_row(float (&out)[OWN], const float* o /* [HEAD_DIM_V] */, int64_t o_step, const float* sums,
                                           int64_t sum_step, int count) {
    float top = -fa::infinity(), sum = 0;
#pragma unroll 1
    for (int i = fa::lane_id(); i < count; i += 32) top = max(top, sums[i * sum_step]);
    top = fa::group_max<32>(top);
    if (top == -fa::infinity()) top = 0;  // no part saw a key: all weights are 0, and no difference is NaN
    for (float& element : out) element = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += Ahead) {
        fa::Vec<float, VEC> some[Ahead][OWN / VEC];
        float weight[Ahead];
#pragma unroll
        for (int i = 0; i < Ahead; ++i) {
            weight[i] = *sums;
#pragma unroll
            for (int c = 0; c < OWN; c += VEC) some[i][c / VEC] = fa::load_vec<VEC>(o + fa::output_column<OWN, 32>(fa::lane_id(), c));
            if (first + i + 1 < count) o += o_step, sums += sum_step;
        }
        fa::schedule_fence();  // all loads, then their use
#pragma unroll
        for (int i = 0; i < Ahead; ++i) {
            if (first + i >= count) break;
            weight[i] = fa::exp(weight[i] - top);
            sum += weight[i];
#pragma unroll
            for (int c = 0; c < OWN; ++c) out[c] += weight[i] * some[i][c / VEC][c % VEC];
        }
    }
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    for (float& element : out) element *= inverse;
    return sum == 0 ? -fa::infinity() : top + fa::log(sum);
}

// The arguments of a block's sequence: those of the launch, where all have as many keys.
__device__ __forceinline__ decltype(auto) own_args(const fa::Args& args, int batch) {
    if constexpr (fa::has_pages) return fa::of_sequence(args, batch);
    else return (args);
}

struct Tiles {
    int from, to;
};

// The tiles of keys from the first to the last that some of ROWS rows from `first` on sees, in [from, to): where a mask leaves few of them,
// as a window does, these are what the parts divide. By all threads of the block, each of which looks at some tiles.
__device__ __forceinline__ Tiles seen_tiles(const Rows& rows, int first) {
    const int tiles = max(0, (rows.visible(first + ROWS - 1) + BLOCK_K - 1) / BLOCK_K);
    if constexpr (!fa::has_mask) return {0, tiles};
    int* found = fa::dynamic_shared<int>();  // of each warp: how many tiles lie behind its first, and the end
    int behind = 0, to = 0;
    for (int n = threadIdx.x; n < tiles; n += THREADS)
        if (rows.sees(first, n).may) behind = max(behind, tiles - n), to = n + 1;
    behind = fa::group_max<32>(behind), to = fa::group_max<32>(to);
    if (fa::lane_id() == 0) found[2 * fa::warp_id()] = behind, found[2 * fa::warp_id() + 1] = to;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) behind = max(behind, found[2 * warp]), to = max(to, found[2 * warp + 1]);
    __syncthreads();  // all have read; Q comes here
    return {min(tiles - behind, to), to};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using KCopy = fa::TileCopy<stored, COPY_ROWS, HEAD_DIM, THREADS>;
    using VCopy = fa::TileCopy<stored, COPY_ROWS, HEAD_DIM_V, THREADS>;
    const uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [ROWS][HEAD_DIM]
    constexpr uint32_t Q_TILE = ROWS * HEAD_DIM * 2;  // bytes
    const uint32_t ring_smem = q_smem + Q_TILE;  // STAGES stages, each K [BLOCK_K][HEAD_DIM] and V [BLOCK_K][HEAD_DIM_V]
    float* q_scale_smem = reinterpret_cast<float*>(fa::dynamic_shared() + Q_TILE + STAGES * STAGE);  // [ROWS], with SCALES_Q

    // This block's work: some rows of a key head, and a part of the tiles of keys that they see.
    const int slots = args.runtime[RUNTIME_PARTS], slot = blockIdx.z * slots + blockIdx.x % slots;
    const fa::Share share = fa::has_pages ? fa::share_of<BLOCK_K>(args, args.batch * slots, slot) : fa::even_share(slots, slot);
    if (share.batch < 0) return;
    const int part = share.part, parts = share.parts;
    const auto& own = own_args(args, share.batch);
    const Rows rows{own, share.batch, share.first};
    const int first = blockIdx.x / slots * ROWS;
    const auto [from, to] = seen_tiles(rows, first);
    const int begin = from + part * (to - from) / parts, end = from + (part + 1) * (to - from) / parts;
    const int unmasked = rows.visible(first);  // what every row of the block sees
    const int warp_row = fa::warp_id() % ROW_WARPS * WARP_ROWS, key_warp = fa::warp_id() / ROW_WARPS, warp_key = key_warp * WARP_KEYS;

    // Prologue: the copies of all stages but one start, and Q comes while they are on their way
    int ahead = rows.next(first, begin, end);  // the tile to be copied next
    const auto start_copy = [&](uint32_t stage) {
        if (ahead < end) {
#pragma unroll
            for (int row = 0; row < BLOCK_K; row += COPY_ROWS) {  // a piece lies in one page
                const int key = ahead * BLOCK_K + row, left = own.seq_kv - key;
                const auto from = [&](const fa::Tensor& tensor) {
                    return fa::key_row<stored>(tensor, args, rows.batch, rows.kv_head, key, own.seq_kv);
                };
                const uint32_t to = ring_smem + stage;
                KCopy::copy_async(to + row * WIDE * 2, from(args.K), int(args.K.row), left, args.head_dim);
                VCopy::copy_async(to + K_TILE + row * WIDE_V * 2, from(args.V), int(args.V.row), left, fa::head_dim_v(args));
            }
            ahead = rows.next(first, ahead + 1, end);
        }
        fa::cp_async_commit_group();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) start_copy(i * STAGE);
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS / THREADS; ++i) {
        const int row = (threadIdx.x + i * THREADS) / COLUMNS, chunk = threadIdx.x % COLUMNS, its = min(first + row, rows.count - 1);
        const scalar* from = fa::row_pointer<scalar>(args.Q, rows.batch, rows.head(its), rows.query(its)) + chunk * 8;
        const auto some = fa::load_128_upto(from, first + row < rows.count ? args.head_dim - chunk * 8 : 0);
        fa::Vec128<operand> narrowed;
        const float q_scale = fa::narrow_row<stored, COLUMNS>(narrowed, some);
        if (SCALES_Q && chunk == 0) q_scale_smem[row] = q_scale;
        fa::store_operand<stored, HEAD_DIM>(fa::dynamic_shared(), row, chunk, narrowed);
    }

    // The largest S is the largest logit only where the scale is positive. A negative scale is applied as its absolute
    // value here and its sign in Q, exactly; for a scale of 0 Q is 0.
    const float scale = fa::has_score || rows.scale == 0 ? 1.0f : fabsf(float(rows.scale)), scale_log2e = scale * fa::log2e;
    int visible[M][2];  // keys of this thread's rows
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) visible[m][half] = rows.visible(first + warp_row + 16 * m + 8 * half + fa::fragment_row());
    fa::OperandA<HEAD_DIM, M, Q_IN_REG> q{fa::lane_of_a<HEAD_DIM>(q_smem, warp_row)};
    const uint32_t k_lane = fa::lane_of_b<WIDE>(ring_smem, warp_key), v_lane = fa::lane_of_a<WIDE_V>(ring_smem + K_TILE, warp_key);
    float out_reg[M][COLUMNS_V][4] = {};  // O, not yet divided by the row sum
    fa::Softmax<M> softmax;
    __syncthreads();  // Q is there
    fa::TileCopy<operand, ROWS, HEAD_DIM, THREADS>::apply_sign(fa::dynamic_shared<operand>(), rows.scale);
    q.load_registers();
    float q_scale[M][2];  // of this thread's rows
    if constexpr (SCALES_Q) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) q_scale[m][half] = q_scale_smem[warp_row + 16 * m + 8 * half + fa::fragment_row()];
    }

    // Main loop over tiles of keys
    uint32_t stage = 0;  // of tile n, in bytes
#pragma unroll 1
    for (int n = rows.next(first, begin, end); n < end; n = rows.next(first, n + 1, end)) {
        fa::cp_async_wait_group<STAGES - 2>();
        __syncthreads();  // tile n has arrived; all warps have read the one before
        start_copy(stage == 0 ? (STAGES - 1) * STAGE : stage - STAGE);

        float score_reg[M][WARP_KEYS / 8][4] = {};
        fa::multiply_keys<operand, stored>(score_reg, q, k_lane + stage);
        if constexpr (SCALES_Q) fa::scale_rows(score_reg, q_scale);
        const int key = n * BLOCK_K + warp_key + fa::fragment_column();  // of the first score
        if constexpr (fa::has_score) rows.apply_score(score_reg, first + warp_row, key);
        if ((n + 1) * BLOCK_K > unmasked) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < WARP_KEYS / 8; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (key + 8 * i + e % 2 >= visible[m][e / 2]) score_reg[m][i][e] = -fa::infinity();
        }
        if (fa::has_mask && !rows.sees(first, n).must) rows.hide_scores(score_reg, first + warp_row, key);
        // P = exp(scale * (S - row max)), unnormalised: the online softmax, which rescales O lazily
        softmax.step_lazily(score_reg, out_reg, scale_log2e, SLACK);
        uint32_t p_reg[WARP_KEYS / 16][M][4];
        fa::pack_a<operand>(p_reg, score_reg);
        fa::multiply_values<operand, stored, HEAD_DIM_V>(out_reg, p_reg, v_lane + stage);
        stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
    }

    fa::launch_dependents();  // merge's blocks begin, and wait

    // Epilogue: O and logsumexp of the warps over their keys, which take the place of Q and of the ring
    softmax.finish();
    __syncthreads();  // all warps have read the last tile, and no copy is on its way
    float* warps_o = fa::dynamic_shared<float>();  // [KEY_WARPS][ROWS][PITCH]
    float* warps_sums = warps_o + KEY_WARPS * ROWS * PITCH;  // [ROWS][KEY_WARPS]
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * m + 8 * half + fa::fragment_row();
            if (first + row >= rows.count) continue;
            const float factor = softmax.inverse_sum(m, half);
            if (fa::lane_id() % 4 == 0) warps_sums[row * KEY_WARPS + key_warp] = softmax.logsumexp(m, half, scale);
            fa::store_columns<stored>(warps_o + (key_warp * ROWS + row) * PITCH, out_reg[m], half, factor);
        }
    __syncthreads();
    const int count = min(ROWS, rows.count - first);
    for (int row = fa::warp_id(); row < count; row += WARPS) {
        float out[OWN];
        const float sum = merge_row<KEY_WARPS>(out, warps_o + row * PITCH, ROWS * PITCH, warps_sums + row * KEY_WARPS, 1, KEY_WARPS);
        if (parts == 1) {
            rows.store(first + row, out, sum);
            continue;
        }
        fa::store_output<float, 32>(rows.partial(part) + int64_t(first + row) * HEAD_DIM_V, out, 1.0f, fa::lane_id(), HEAD_DIM_V);
        if (fa::lane_id() == 0) rows.sums(part)[first + row] = sum;
    }
}

// A block merges the parts of a row, which its warps divide among them.
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS) merge(const __grid_constant__ fa::Args args) {
    float* warps_o = fa::dynamic_shared<float>();  // [MERGE_WARPS][PITCH]
    float* warps_sums = warps_o + MERGE_WARPS * PITCH;  // [MERGE_WARPS]
    const int slots = args.runtime[RUNTIME_PARTS], row = blockIdx.x, warp = fa::warp_id();
    const fa::Share share =
        fa::has_pages ? fa::share_of<BLOCK_K>(args, args.batch * slots, blockIdx.z, false) : fa::even_share(slots, blockIdx.z * slots);
    const int parts = share.parts;
    const auto& own = own_args(args, share.batch);
    const Rows rows{own, share.batch, share.first};
    const int begin = warp * parts / MERGE_WARPS, end = (warp + 1) * parts / MERGE_WARPS;
    fa::dependency_wait();
    if (fa::has_pages && parts == 1) return;  // its block has stored the row
    float out[OWN];
    float sum = merge_row<AHEAD>(out, rows.partial(begin) + int64_t(row) * HEAD_DIM_V, rows.step() * HEAD_DIM_V, rows.sums(begin) + row,
                                 rows.step(), end - begin);
    fa::store_output<float, 32>(warps_o + warp * PITCH, out, 1.0f, fa::lane_id(), HEAD_DIM_V);
    if (fa::lane_id() == 0) warps_sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = merge_row<MERGE_WARPS>(out, warps_o, PITCH, warps_sums, 1, MERGE_WARPS);
    rows.store(row, out, sum);
}
