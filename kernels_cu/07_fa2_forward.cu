// /// kernel
// title = "FlashAttention-2 on CUDA cores: 8 x 8 register tiles, swizzled shared memory, loads hidden behind products"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [32, 64, 96, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// mask = true
// score = true
// sinks = true
// head_dim_v = true
// aliases = ["flash"]
// [tile]
// LANES = "8 if HEAD_DIM <= 64 else 16"  # that share a row
// ASYNC = "HEAD_DIM == 128 and sizeof_dtype == 4 and shared_optin >= 232448"
// BLOCK_K = "128 if ASYNC else 32 if shared_optin < 1000 * HEAD_DIM else 64"
// P_KEYS = "min(BLOCK_K, 64)"  # keys whose P is in shared memory at a time
// PAD = "4 if ASYNC else 0"  # floats behind each row of K and P, in place of the swizzle
// BLOCK_Q = "floor_pow2(max(32, min(128 - LANES // 32 * 96, rows)))"
// PIECE = "32 if LANES == 8 else HEAD_DIM // 2 if BLOCK_Q <= HEAD_DIM // 4 else HEAD_DIM"  # columns of K, V at a time
// UNROLL = "1 if LANES == 8 else 4 if ASYNC else 8"  # steps of four columns of S that the compiler may overlap
// [let]
// rows = "(shared_optin - 8 * BLOCK_K * HEAD_DIM) // (4 * (HEAD_DIM + P_KEYS))"  # of Q and P for which there is room
// padding = "PAD * (BLOCK_K + P_KEYS)"
// [[choice]]
// when = "HEAD_DIM == 64 and batch * heads_q * ceil_div(seq_q, 32) <= 2 * sms"
// LANES = 32
// evidence = "experiments/fp32/variants.txt: Small-1 12.6 us for 22.2 (8 lanes), Small-3 19.1 for 37.7; Edge-NonPowerOf2 37.9 for 23.7"
// [[choice]]
// when = "HEAD_DIM == 128 and seq_kv < 1024 and ceil_div(seq_kv, 64) % 2"
// ASYNC = 0
// evidence = "a sum (docs/notes/07_fa2.md, forward): a last tile half empty costs up to a third, 128 keys give 8 %; not measured"
// [[choice]]
// when = "not ASYNC and LANES >= max(32, seq_kv)"
// BLOCK_K = 32
// evidence = "experiments/fp32/variants.txt: Edge-SmallSeq 8.64 us (lanes_32_keys_32) for 10.14 (lanes_32)"
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "BLOCK_Q // 8 * LANES"
// shared = "4 * (BLOCK_Q * (HEAD_DIM + P_KEYS) + 2 * BLOCK_K * HEAD_DIM + padding)"
// ///
//
// Step 07, read against step 06. FlashAttention-2 on CUDA cores at 8 x 8 register tiles: swizzled shared memory, global loads
// behind the products, 16-bit storage. The algorithm is that of step 05: a Q tile is resident, K and V stream past once, row
// maximum, row sum and O stay in registers until the epilogue. The limit is operand bandwidth. A CUDA core starts one multiply-add
// a cycle and needs two operands for it. Shared memory delivers 32 elements a cycle to a multiprocessor, its 128 cores consume 256.
// So each loaded element must be used eight times or more, from registers.
//
// Geometry, at head dim 64 on a GPU with much shared memory (others follow from [tile] above):
//
//     block    128 queries, 128 threads; K and V are streamed in tiles of 64 keys
//     thread   8 queries, shared with 7 other lanes of its warp
//     S        each lane has 8 of the 64 keys: lane, lane + 8, lane + 16, …   8 x 8 registers
//     O        each lane has 8 of the 64 columns                              8 x 8 registers
//
// For four columns of S a thread loads 8 x 4 elements of Q and 8 x 4 of K, 16 loads of 16 bytes, for 256 multiply-adds: 90 of 100
// instructions are multiply-adds (step 05: 78). In the machine code the loop is 256 FFMA, 16 LDS.128 and a dozen address
// instructions. The two products are fa/tile.cuh's multiply_rows and multiply_scores, which the backward pass uses too. Their
// layouts are free of bank conflicts without padding: tiles are swizzled by an XOR with a few bits of the row.
//
// Even so a 16-byte load of a warp takes four cycles, unless lanes n and n ^ 1, or n and n ^ 2, have the same address for every n:
// then two. Lanes of one row group share Q and P, lanes of different row groups share K and V. So two row groups alternate: lanes
// 2 n and 2 n + 1 are lane n of each. Their K and V are then the same in lanes n and n ^ 1, Q and P in n and n ^ 2.
//
// The main loop, one K/V tile, from the side of a thread:
//   1. S: 8 x 8 sums. Meanwhile V is loaded from global memory into registers, a piece of 32 columns at a time, and stored to
//      shared memory after the product that hides its load. A load takes some 600 cycles, a piece of S thousands.
//   2. Online softmax. The row maximum is reduced over the 8 lanes (three shuffles). The row sum is not: each lane sums its own
//      keys, and the epilogue reduces once. Masking is applied only in tiles that have masked keys.
//   3. P goes through shared memory, since every lane needs the P of all keys for its columns. The lanes of a row are in one warp,
//      so __syncwarp is enough: warps do not wait for each other here. Of 128 keys it goes in two parts, each followed by its 4.
//   4. O = rescale * O + P V. Meanwhile the next K is loaded, as V was: its buffer is free since the end of 1.
// Two __syncthreads a tile: V is complete (and K may be overwritten), K is complete (and V and P may be overwritten).
//
// Head dim 128: 16 lanes share a row, so 64 keys are 8 x 4 scores, and Q is loaded for half as many products. Where a block may have
// 227 KB, float32 takes 128 keys instead (ASYNC): 192 KB for Q, K and V, 32 for the P of 64 keys, 3 for padding. S and O leave no
// registers for loads in flight, and need none: cp.async (sm_80) copies to shared memory itself, a whole tile behind a product. It
// cannot widen, so 16-bit types stay with 64 keys. So does a short sequence whose last tile of 128 would be half empty.
//
// S and O leave none for addresses either. What a loop keeps of an XOR is then missing where a load should stand 30 instructions
// before its multiply-adds, and the warp waits for shared memory at every key. So ASYNC has no swizzle: every address is a register
// and a constant. Rows of K and P are 4 floats longer, 8 keys begin in 8 quads of banks. V and Q are read along their rows and stay
// as they are; only the stores of Q meet in fours, once a block.
//
// V's own head dim: HEAD_DIM is the width for the larger of both, and every tile has it. The narrower one is filled up with zeros.
//
// Details that matter more than they look:
//   - exp((S - max) * scale), not exp(S * scale - max * scale). The second is one instruction, a fused multiply-add, but rounds max
//     * scale: at logits of 10^4 that is an error of 10^-3 in every P. The first is exact where S = max. Hence logits = "any".
//   - The terms of one tile are summed by themselves and then added to O (fa::add_tile). It costs nothing here, because O is
//     multiplied by the rescale factor anyway. 16384 keys are then 256 sums of 64, with the rounding error of a sum of 256, not of
//     16384.
//   - A masked P is set to 0, never multiplied by 0. A row that sees no key ends with row sum 0, and gets O = 0, logsumexp = -inf.
//   - Loaded elements stay raw 32-bit words until they are stored (fa::Staged). Widening float16 on arrival would wait for the
//     load.
//
// Against step 06 nearly every line of the main loop changes: the wide register tile brings its layouts (queries as the fast axis),
// the loads in pieces, the softmax in base 2 and three storage types with it. Prologue, main loop and epilogue keep their places.
//
// Errata, if you follow the paper (Dao 2023, arXiv 2307.08691): line 10 of its Algorithm 1 multiplies the old O by diag(exp(m_old -
// m_new))^-1, and so does the two-block example before it. The inverse is a slip. With o = sum exp(s - m_old) v, what is needed
// after the maximum has grown is sum exp(s - m_new) v = exp(m_old - m_new) * o: a factor of at most 1. Inverted, the first tile
// would divide by exp(-inf - m) = 0. Of the FlashAttention-1 recap in its section 2.3, O2 = diag(l1 / l2)^-1 O1 + …, the same
// holds: O1 is already divided by l1, so its weight is (l1 / l2) * exp(m1 - m2). The algorithms also leave out the softmax scale.
#include <fa/sink.cuh>
#include <fa/tile.cuh>

using scalar = fa::DTYPE;

constexpr int ROWS = fa::resident_rows, THREADS = BLOCK_Q / ROWS * LANES;  // LANES lanes share 8 queries
constexpr int KEYS = BLOCK_K / LANES, COLUMNS = HEAD_DIM / LANES;  // of a lane: 8 x KEYS scores, 8 x COLUMNS elements of O

constexpr int STRIDE = LANES < 32 ? 2 : 1;  // from lane to lane of a row: two row groups of a warp alternate
constexpr int PIECES = HEAD_DIM / PIECE, PARTS = BLOCK_K / P_KEYS;  // of K and V, by columns; of P, by keys
constexpr int K_PITCH = HEAD_DIM + PAD, P_PITCH = BLOCK_Q + PAD;
constexpr bool SWIZZLE = PAD == 0;
constexpr float LOWEST = -3.402823466e38f;  // a masked score: finite, so that no difference of two is NaN

static_assert(BLOCK_Q % 32 == 0, "BLOCK_Q is a multiple of 32, the queries of a warp with LANES = 8");
static_assert(LANES == 8 || LANES == 16 || LANES == 32, "LANES share a row: 8, 16 or 32");
static_assert(KEYS >= 1 && COLUMNS % 2 == 0, "BLOCK_K is at least LANES, and a thread has pairs of columns");
static_assert(PIECES * PIECE == HEAD_DIM && PARTS * P_KEYS == BLOCK_K, "pieces of the head dim and parts of the keys are whole");
static_assert(PARTS == 1 || PIECES == 1, "either the head dim or the keys are divided, not both");
static_assert(PARTS == 1 || ASYNC, "without ASYNC registers hold the next K during one part of the keys only");
static_assert(ASYNC ? PAD > 0 && PAD % 4 == 0 : PAD == 0,
              "ASYNC copies plain rows, which need PAD, a multiple of 4; the others are swizzled");
static_assert(PIECE % 32 == 0, "the swizzle needs pieces of whole lines, 32 columns");

template <int N, int Columns> using Staged = fa::Staged<scalar, HEAD_DIM, THREADS, N, Columns>;

// Columns of a tile of K or V on their way to shared memory. A product stands between start and finish and hides the load.
template <int Columns, int Pitch> struct Stream {
    Staged<BLOCK_K, Columns> staged;  // unused with ASYNC: then it takes no registers

    // Rows beyond `rows` and columns beyond head_dim become zero.
    __device__ __forceinline__ void start(float* to_smem, const scalar* from, int pitch, int rows, int head_dim) {
        if constexpr (ASYNC) fa::copy_by_rows<Pitch, THREADS, BLOCK_K, Columns>(to_smem, from, pitch, rows, head_dim);
        else staged.fetch(from, pitch, rows, head_dim);
    }

    __device__ __forceinline__ void finish(float* to_smem, int head_dim) {
        if constexpr (ASYNC) fa::cp_async_wait_group<0>();
        else staged.store_by_rows(to_smem, head_dim);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();  // [HEAD_DIM][BLOCK_Q] transposed
    float* k_smem = q_smem + HEAD_DIM * BLOCK_Q;  // [BLOCK_K][K_PITCH]
    float* v_smem = k_smem + BLOCK_K * K_PITCH;  // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;  // [P_KEYS][P_PITCH]

    // Under the causal mask the last query tiles see the most keys. They start first; short ones fill the tail.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    // The rows of lanes 2 n and 2 n + 1 are 16 apart, so that a store of P meets all banks.
    const int group = threadIdx.x / (STRIDE * LANES), lane = threadIdx.x % (STRIDE * LANES) / STRIDE;
    const int row = STRIDE == 1 ? group * ROWS : group / 2 * 32 + threadIdx.x % 2 * 16 + group % 2 * ROWS;

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one goes into Q, exactly.
    const float sign = args.scale < 0 ? -1.0f : 1.0f, scale = sign * float(args.scale);
    const float softmax_scale = fa::has_score ? 1.0f : scale;  // of what score_reg holds: a score has been given the scale
    const float scale_log2e = softmax_scale * fa::log2e;

    const int keys = fa::visible_keys(args, q_end - 1);  // that some query of the tile sees
    const int unmasked = fa::visible_keys(args, q_first);  // that every query of the tile sees
    const int k_start = fa::next_keys<BLOCK_K>(args, batch, head, q_first, BLOCK_Q, 0, keys);  // a mask may hide whole tiles

    // Prologue: Q, which is resident, the first K, and the state of each row.
    {
        Staged<BLOCK_Q, HEAD_DIM> q;
        q.fetch(fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), args.seq_q - q_first, args.head_dim);
        q.template store_transposed<SWIZZLE>(q_smem, args.head_dim, sign);
    }
    {
        Stream<HEAD_DIM, K_PITCH> k;
        k.start(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_start), int(args.K.row), keys - k_start, args.head_dim);
        k.finish(k_smem, args.head_dim);
    }
    __syncthreads();

    float out_reg[ROWS][COLUMNS] = {};  // O before the division by the row sum
    float row_max[ROWS], row_sum[ROWS] = {};  // row_sum: of this lane's keys only
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row_max[r] = LOWEST;

    // Main loop over the K/V tiles.
    for (int k_first = k_start, next; k_first < keys; k_first = next) {
        // S = Q K^T, while V is loaded
        float score_reg[KEYS][ROWS] = {};
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const int first = piece * PIECE, last = first + PIECE;
            Stream<PIECE, HEAD_DIM> v;
            v.start(v_smem + first, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first) + first, int(args.V.row), keys - k_first,
                    fa::head_dim_v(args) - first);
            fa::multiply_rows<scalar, K_PITCH, LANES, BLOCK_Q, KEYS, UNROLL, SWIZZLE>(score_reg, q_smem, k_smem, row, lane, first, last);
            v.finish(v_smem + first, fa::head_dim_v(args) - first);
        }
        __syncthreads();  // V is complete, and every warp has finished with K

        // Online softmax: P = exp(scale * (S - row_max)), unnormalised
        float rescale_reg[ROWS];  // what the sums so far are worth under the new maximum
        if constexpr (fa::has_score) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int j = 0; j < KEYS; ++j)
                    score_reg[j][r] =
                        fa::score_of(args, batch, head, q_first + row + r, k_first + lane + LANES * j, score_reg[j][r] * scale);
        }
        const bool masked = k_first + BLOCK_K > unmasked || !fa::visible_in(args, batch, head, q_first, BLOCK_Q, k_first, BLOCK_K).must;
        if (masked) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int visible = fa::visible_keys(args, q_first + row + r);
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    const int key = k_first + lane + LANES * j;
                    if (key >= visible || fa::hidden(args, batch, head, q_first + row + r, key)) score_reg[j][r] = LOWEST;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float new_max = score_reg[0][r];
#pragma unroll
            for (int j = 1; j < KEYS; ++j) new_max = max(new_max, score_reg[j][r]);
            new_max = max(row_max[r], fa::group_max<LANES, STRIDE>(new_max));
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

        // O = rescale * O + P V, while the next K is loaded
        float tile_reg[ROWS][COLUMNS] = {};
        next = fa::next_keys<BLOCK_K>(args, batch, head, q_first, BLOCK_Q, k_first + BLOCK_K, keys);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (part > 0) __syncwarp();  // every lane has read the part before
            fa::share_scores<LANES, P_PITCH, PARTS, SWIZZLE>(p_smem, score_reg, row, lane, part);
            __syncwarp();  // the lanes of a row, all of one warp, read each other's P
#pragma unroll 1
            for (int piece = 0; piece < PIECES; ++piece) {
                const int first = piece * PIECE;
                Stream<PIECE, K_PITCH> k;
                if (part == 0)
                    k.start(k_smem + first, fa::row_pointer<scalar>(args.K, batch, kv_head, next) + first, int(args.K.row), keys - next,
                            args.head_dim - first);
                fa::multiply_scores<scalar, HEAD_DIM, LANES, P_PITCH, P_KEYS, SWIZZLE>(
                    tile_reg, p_smem, v_smem + part * P_KEYS * HEAD_DIM, row, lane, piece * 8 / PIECES, (piece + 1) * 8 / PIECES);
                if (part == PARTS - 1) k.finish(k_smem + first, args.head_dim - first);
            }
        }
        fa::add_tile(out_reg, rescale_reg, tile_reg);
        __syncthreads();  // the next K is complete, and every warp has finished with V and P
    }

    // Epilogue: the row sum over the lanes, O divided by it, and logsumexp.
    scalar* out = fa::row_pointer<scalar>(args.O, batch, head, q_first + row);  // [8 rows], O.row apart
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, q_first + row);  // [8]
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float sum = fa::group_sum<LANES, STRIDE>(row_sum[r]), top = row_max[r] * softmax_scale;
        const float kept = fa::add_sink(args, head, top, sum);  // of O; 1 without sinks
        if (q_first + row + r >= q_end) continue;
        fa::store_output<scalar, LANES>(out + r * args.O.row, out_reg[r], sum == 0 ? 0.0f : kept / sum, lane, fa::head_dim_v(args));
        if (lane == 0) logsumexp[r] = sum == 0 ? -fa::infinity() : top + fa::log(sum);  // NaN stays NaN
    }
}
