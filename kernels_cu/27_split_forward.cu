// /// kernel
// title = "float32 on tensor cores: every operand as two float16, three products for one"
// dtypes = ["float32"]
// head_dims = [64, 128, 256]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// float16_products = 3
// auto = "not (HEAD_DIM == 64 and seq_kv <= 128 and blocks <= sms)"  # else step 07: one launch, no split
// [tile]
// WARP_ROWS = "16 if HEAD_DIM == 256 else 32"  # queries of a warp
// WARPS = "8 if HEAD_DIM == 256 and hopper or HEAD_DIM == 128 and a100 else 4"
// BLOCK_K = "16 if HEAD_DIM == 256 and shared_optin < 163840 else 32"
// STAGES = "4 if HEAD_DIM == 64 else 2 if shared_optin < least else 3"
// BLOCKS = "1 if WARPS == 8 else 2"  # on a multiprocessor, for the compiler: how many registers a thread may have
// FENCE = 1  # groups of columns of P V that the compiler may overlap; with more, registers spill
// [let]
// blocks = "batch * heads_q * ceil_div(seq_q, 32)"  # of step 07
// a100 = "163840 <= shared_optin < 200000"
// hopper = "shared_optin > 200000"
// least = "200000 if HEAD_DIM == 128 else 163840"  # for three stages
// tile_floats = "BLOCK_K * HEAD_DIM + max(32, BLOCK_K)"  # of K or V, both parts, with scales
// [[choice]]
// when = "seq_q <= 64"
// WARP_ROWS = 16
// evidence = "experiments/fp32/history.csv: B8 H16 S32 13.4 -> 10.2 us, more loads of Q in flight among it; the bound is not measured"
// [workspace.operands]
// dtype = "float32"
// size = "2 * batch * heads_kv * ceil_div(seq_kv, BLOCK_K) * tile_floats"
// init = "none"
// [[launch]]
// entry = "prepare"
// grid = ["2 * ceil_div(seq_kv, BLOCK_K)", "heads_kv", "batch"]
// block = 256
// shared = 32
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "4 * WARPS * WARP_ROWS * (HEAD_DIM + 1) + 4 * STAGES * tile_floats"
// ///
//
// Step 27, read against step 15. float32 accuracy on tensor cores: each float32 operand is split into two float16, and three products of
// these parts take the place of one. CUDA cores multiply at 51 TFLOP/s on an H200 (cuBLAS), mma.sync at 649 in float16: a third of that is
// still four times as much. The structure is step 15's; what is new are the parts, their scales, and short chains of additions.
//
//     x = 2^e (high + low)      S = (Q_high + Q_low) (K_high + K_low)^T, without Q_low K_low^T      O += P V likewise
//
// fa/split_product.cuh has the arithmetic. high and low have 11 bits each, 22 to 24 together. What is left out is below 2^-22 of a score.
// The largest error of O is 0.5 to 1.2 of step 07's: a tensor core adds 16 products exactly up to one truncation, where a CUDA core rounds
// 16 times.
//
// Which split (errors in budgets of float32, the largest of 13 families of inputs on an emulated tensor core; docs/notes has them all):
//
//     float16 x 3, scaled          0.16     the kernel
//     float16 x 3, not scaled      inf      V of 10^6 overflows
//     float16 x 2 (Q_low left out) 195
//     bfloat16 x 3                 2.7      16 bits are too few
//     bfloat16 x 6                 0.19     three parts, twice the products
//     tf32 x 3                     0.38     half the rate, and no transposed 32-bit operand for P V
//
// Scales. A power of two for each row of Q and of K, and for each tile of V, brings the largest element to 2^14. float16 then holds
// elements down to 2^-40 of it. S is multiplied by the key's power; the query's is part of the softmax scale; V's is applied where the sum
// of a tile is added to O. P is at most 2^8 (lazy rescaling) and is multiplied by 2^7 for the same reason.
//
// Chains. A tensor core truncates the accumulator with each mma, always towards zero. Over 8192 keys in one accumulator O exceeds its
// budget, and S, with all three products in one chain of head dim 256, the limit on its bias. So the small products of S have accumulators
// of their own, a chain of large ones has 128 columns (64 where registers allow), and P V of a tile starts from zero and is added to O in
// float32. A chain of 8 still loses 2.4 * 2^-24 of S in the mean, 0.8 of the limit; the key's power times 1 + 2^-23 gives most of it back,
// for nothing.
//
// prepare splits K and V once, into a workspace, as the tiles will lie in shared memory. Otherwise each of the seq_q / BLOCK_Q blocks would
// convert them again, about 3.5 instructions an element, and cp.async could not be used. It reads and writes 8 bytes an element: 3 % of the
// time at 4096 keys. Q is split in the prologue, where each tile is read once.
//
//     prologue            copies of K(0), V(0) start; Q is read, scaled and split into shared memory
//     main loop, tile n   1. wait for K(n); the copy two items ahead starts; S = Q K(n)^T times the keys' powers
//                         2. online softmax; P is split in registers
//                         3. wait for V(n); the next copy starts; O += P V(n), 32 columns at a time
//     epilogue            O / row sum and the logsumexp to global memory
//
// K and V pass through one ring of STAGES slots, K(0), V(0), K(1), …: three slots of 16 KB beside Q's 64 KB let two blocks share a
// multiprocessor at head dim 128, so that one multiplies while the other is in its softmax.
//
// The limits, a warp's tile of 32 queries x 32 keys at head dim 128: 384 mma of 6.3 cycles each, 2430 cycles on its tensor core; meanwhile
// shared memory delivers 96 ldmatrix for each of 4 warps, 1540 cycles, and the schedulers issue some 1100 instructions. Registers: O takes
// 128 of 255, S and its small products 64, Q's and K's fragments 24. Nothing is left for 64 keys. At head dim 256 a warp has 16 queries, as
// O would not fit otherwise, and shared memory becomes the limit: 160 ldmatrix for 384 mma.
//
// Not finite inputs: an infinity or NaN in Q or K makes the scores of its row infinite or NaN, as in float32. One in V makes its column of
// O NaN, also where float32 would give an infinity: low parts of both signs meet it.
#include <fa/split_product.cuh>

constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = BLOCK_K / 8, COLUMNS = HEAD_DIM / 8;
constexpr fa::uint32_t Q_LOW = BLOCK_Q * HEAD_DIM * 2, LOW = BLOCK_K * HEAD_DIM * 2;  // bytes of a tile of high parts; low ones follow
constexpr int FACTORS = BLOCK_K < 32 ? 32 : BLOCK_K;  // floats behind the low parts of a tile
constexpr fa::uint32_t ITEM = 2 * LOW + 4 * FACTORS;  // bytes of a tile of K or V with all its parts
// S comes with the scales of Q and K, 2^28 at most; and truncation has taken some 2^-23 of it, which is given back.
constexpr float KEY_FACTOR = 0x1p-14f * (1 + 0x1p-23f), Q_FACTOR = 0x1p14f;
static_assert(ITEM % 128 == 0, "the swizzle is an XOR of addresses");

// Where the tiles of a head's keys lie: K(0), V(0), K(1), V(1), …, each [high][low][factors], as they will lie in shared memory. In units
// of 128 bytes, so that an address in the main loop is one register.
__device__ __forceinline__ fa::uint32_t items_of(const fa::Args& args, int batch, int kv_head) {
    const int tiles = (args.seq_kv + BLOCK_K - 1) / BLOCK_K;
    return fa::uint32_t(batch * args.heads_kv + kv_head) * (2 * tiles) * (ITEM / 128);
}
__device__ __forceinline__ unsigned char* item_at(const fa::Args& args, fa::uint32_t unit) {
    return static_cast<unsigned char*>(args.workspace[WORKSPACE_OPERANDS]) + fa::int64_t(unit) * 128;
}

// K and V, split. A block writes a tile; rows behind the last key are zero.
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ fa::Args args) {
    using Row = fa::SplitRow<HEAD_DIM>;
    constexpr int step = 8 * Row::rows_of_warp, count = BLOCK_K / step;
    static_assert(count * step == BLOCK_K, "the loads of a tile are whole: BLOCK_K is a multiple of their rows");
    float* largest_smem = fa::dynamic_shared<float>();  // [8]
    const bool is_v = blockIdx.x % 2;
    const int first = blockIdx.x / 2 * BLOCK_K, kv_head = blockIdx.y, batch = blockIdx.z;
    unsigned char* item = item_at(args, items_of(args, batch, kv_head) + blockIdx.x * (ITEM / 128));
    float* factors = reinterpret_cast<float*>(item + 2 * LOW);
    const float* from = fa::row_pointer<float>(is_v ? args.V : args.K, batch, kv_head, first);
    const int pitch = int(is_v ? args.V.row : args.K.row), own = threadIdx.x / Row::lanes;

    Row rows[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int row = own + i * step;
        rows[i].load(from + row * pitch, args.head_dim, first + row < args.seq_kv);
    }
    if (!is_v) {
        float of_rows[count];
        fa::store_scaled(rows, of_rows, item, LOW, own, step);
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (threadIdx.x % Row::lanes == 0) factors[own + i * step] = of_rows[i] * KEY_FACTOR;
        return;
    }
    float largest = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) largest = max(largest, rows[i].largest_finite());
    const float scale = fa::split_scale(fa::block_max(largest, largest_smem));
#pragma unroll
    for (int i = 0; i < count; ++i) rows[i].store(item, LOW, own + i * step, scale);
    if (threadIdx.x < FACTORS) factors[threadIdx.x] = fa::inverse_power(scale) * (1 / fa::SplitSoftmax<M>::scale_of_p);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    unsigned char* smem = fa::dynamic_shared();  // [BLOCK_Q][HEAD_DIM] high parts of Q, and low parts
    const fa::uint32_t q_smem = fa::smem_u32(smem), ring_smem = q_smem + 2 * Q_LOW;  // STAGES items
    float* q_factors = reinterpret_cast<float*>(smem + 2 * Q_LOW + STAGES * ITEM);  // [BLOCK_Q]

    // This block's work. Under the causal mask the last query tiles see the most keys: they start first, short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = fa::warp_id() * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);  // what the last query sees is what any query of the block sees
    const int unmasked = CAUSAL ? keys - (BLOCK_Q - 1) : keys;  // every query of the block sees at least so many: one register less

    // Prologue: the first copies start; each warp splits some rows of Q. Item 2 n is K(n), item 2 n + 1 is V(n).
    fa::uint32_t next_unit = items_of(args, batch, kv_head);  // the next item to be copied
    const auto start_copy = [&](fa::uint32_t slot, bool there) {
        if (there) fa::copy_bytes<ITEM, THREADS>(ring_smem + slot, item_at(args, next_unit));
        fa::cp_async_commit_group();
        next_unit += ITEM / 128;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) start_copy(i * ITEM, i / 2 * BLOCK_K < keys);

    const float scale = args.scale == 0 ? 1.0f : fabsf(float(args.scale));  // its sign, and 0, go into Q
    const float sign = args.scale == 0 ? 0.0f : args.scale < 0 ? -1.0f : 1.0f;
    {
        using Row = fa::SplitRow<HEAD_DIM>;
        constexpr int step = Row::rows_of_warp, most = 16 / Row::count;  // loads in flight: 64 registers
        constexpr int at_once = WARP_ROWS / step < most ? WARP_ROWS / step : most;
        const float* q_gmem = fa::row_pointer<float>(args.Q, batch, head, q_first);
#pragma unroll 1
        for (int first = 0; first < WARP_ROWS; first += at_once * step) {
            const int row = warp_row + first + fa::lane_id() / Row::lanes;
            Row rows[at_once];
            float factors[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int own = row + i * step;
                rows[i].load(q_gmem + fa::int64_t(own) * args.Q.row, args.head_dim, q_first + own < q_end);
                rows[i].multiply(sign);
            }
            fa::store_scaled(rows, factors, smem, Q_LOW, row, step);
#pragma unroll
            for (int i = 0; i < at_once; ++i)
                if (fa::lane_id() % Row::lanes == 0) q_factors[row + i * step] = factors[i] * Q_FACTOR * scale;
        }
    }  // read behind the barrier of the first item
    fa::SplitSoftmax<M> softmax;
    float out_reg[M][COLUMNS][4] = {};

    // Main loop over tiles of keys
    fa::uint32_t slot = 0;  // of the item that is multiplied with
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        // The next item arrives. All warps have read the one before, whose slot is filled again: STAGES - 1 items ahead.
        const auto arrive = [&](int ahead) {
            fa::cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            start_copy(slot == 0 ? (STAGES - 1) * ITEM : slot - ITEM, k_first + ahead / 2 * BLOCK_K < keys);
        };
        const auto release = [&] { slot = slot == (STAGES - 1) * ITEM ? 0 : slot + ITEM; };

        // This lane's addresses, from an opaque thread index: the compiler would keep each XOR of them in a register through the loop.
        const fa::uint32_t lane = fa::opaque_thread_id() % 32u, warp_row = fa::opaque_thread_id() / 32u * WARP_ROWS;
        const fa::uint32_t of_a = fa::chunk_at<HEAD_DIM>(lane % 16, lane / 16);
        const fa::uint32_t of_b = fa::chunk_at<HEAD_DIM>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        const fa::uint32_t q_lane = q_smem + warp_row * (HEAD_DIM * 2) + of_a;

        // S = Q K^T, times the power of two of each key
        arrive(STAGES - 1);
        float score_reg[M][KEYS][4] = {}, small_reg[M][KEYS][4] = {};
        const auto multiply = [&](float (&large_reg)[M][KEYS][4], int first) {  // over 64 columns
            const fa::uint32_t k_lane = ring_smem + slot + of_b;
            fa::split_multiply_abt<HEAD_DIM>(large_reg, small_reg, q_lane + 2 * first, Q_LOW, k_lane + 2 * first, LOW);
        };
        multiply(score_reg, 0);
        if constexpr (HEAD_DIM == 128) multiply(score_reg, 64);
        if constexpr (HEAD_DIM == 256) {  // shorter chains: there are registers for another
#pragma unroll
            for (int first = 64; first < HEAD_DIM; first += 64) {
                float more_reg[M][KEYS][4] = {};
                multiply(more_reg, first);
                fa::add(score_reg, more_reg);
            }
        }
        fa::add(score_reg, small_reg);
        const float* factors = reinterpret_cast<const float*>(smem + 2 * Q_LOW + slot + 2 * LOW);
        fa::multiply_columns(score_reg, factors);
        release();

        if (k_first + BLOCK_K > unmasked) {
            fa::schedule_fence();  // a branch, and no selection for each score of every tile
            fa::mask_scores(score_reg, args, q_first + warp_row + lane / 4, k_first);
        }
        softmax.step(score_reg, out_reg, q_factors + warp_row + lane / 4);  // S becomes P, unnormalised
        fa::uint32_t high_reg[KEYS / 2][M][4], low_reg[KEYS / 2][M][4];
        fa::split_a(high_reg, low_reg, score_reg);

        // O += P V
        arrive(STAGES);
        const float factor = *reinterpret_cast<const float*>(smem + 2 * Q_LOW + slot + 2 * LOW);
        fa::split_multiply_ab<HEAD_DIM, FENCE>(out_reg, high_reg, low_reg, ring_smem + slot + of_a, LOW, factor);
        release();
    }
    softmax.finish();

    // Epilogue: O / row sum and the logsumexp, straight to global memory: a quad writes a sector.
    float* logsumexp = fa::row_pointer<float>(args.logsumexp, batch, head, q_first);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const fa::uint32_t thread = fa::opaque_thread_id();
            const int row = thread / 32 * WARP_ROWS + 16 * m + 8 * half + thread % 32 / 4;
            if (q_first + row >= q_end) continue;
            const bool empty = fa::visible_keys(args, q_first + row) <= 0;
            const float sum = softmax.row_sum[m][half], inverse = 1.0f / sum;
            if (fa::lane_id() % 4 == 0) logsumexp[row] = empty ? -fa::infinity() : softmax.row_max[m][half] * q_factors[row] + fa::log(sum);
            float* out = fa::row_pointer<float>(args.O, batch, head, q_first + row) + fa::fragment_column();
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const fa::Vec<float, 2> two = {empty ? 0.0f : out_reg[m][c][2 * half] * inverse,
                                               empty ? 0.0f : out_reg[m][c][2 * half + 1] * inverse};
                fa::store_vec_upto(out + 8 * c, two, args.head_dim - 8 * c - fa::fragment_column());
            }
        }
}
