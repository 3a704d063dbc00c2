// /// kernel
// title = "FlashAttention-2's gradients on CUDA cores: no S x S memory, no atomics"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [32, 64, 96, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// logsumexp_gradient = true
// mask = true
// score = true
// sinks = true
// head_dim_v = true
// aliases = ["flash"]
// [tile]
// LANES = "8 if HEAD_DIM <= 64 else 16"  # that share a row
// STREAMED = "min(64, 4 * LANES) if ample else 16 if scarce else 32"
// RESIDENT = "floor_pow2(max(32, min(128, 224 - 6 * LANES, rows)))"
// [let]
// ample = "shared_optin >= 163840 or HEAD_DIM <= 64"
// scarce = "shared_optin < 69888 and HEAD_DIM != 96"
// floats = "shared_optin // 4 - 2 * STREAMED * (HEAD_DIM + 1)"  # that the streamed tiles leave
// rows = "floats // (2 * HEAD_DIM + STREAMED)"
// [[choice]]
// when = "HEAD_DIM == 64 and batch * heads_q * ceil_div(seq_q, 32) <= sms"
// LANES = 32
// evidence = "experiments/fp32/variants.txt, BAC: Small-1 30.9 us for 72.9, Small-2 52.6 for 134; more blocks than one each: not measured"
// [workspace.delta]
// dtype = "float32"
// size = "batch * heads_q * seq_q"
// init = "none"
// [[launch]]
// entry = "delta"
// grid = ["ceil_div(seq_q, 16)", "heads_q", "batch"]
// block = 128
// [[launch]]
// entry = "dkdv"
// grid = ["ceil_div(seq_kv, RESIDENT)", "heads_kv", "batch"]
// block = "RESIDENT // 8 * LANES"
// shared = "4 * (2 * RESIDENT * HEAD_DIM + STREAMED * (2 * HEAD_DIM + RESIDENT + 2))"
// [[launch]]
// entry = "dq"
// grid = ["ceil_div(seq_q, RESIDENT)", "heads_q", "batch"]
// block = "RESIDENT // 8 * LANES"
// shared = "4 * (2 * RESIDENT * HEAD_DIM + STREAMED * (2 * HEAD_DIM + RESIDENT))"
// [[launch]]
// entry = "dsinks"
// when = "sinks"
// grid = ["heads_q"]
// block = 32
// ///
//
// Step 07, backward. The gradients of step 00 without S x S memory and without atomics. With S = Q K^T:
//
//     P  = exp(scale * S - logsumexp)            (queries × keys), recomputed, already normalised
//     dV = P^T dO
//     dP = dO V^T
//     dS = P ∘ (dP - delta)                      delta = rowsum(P ∘ dP), one value a query
//     dQ = scale * dS K,  dK = scale * dS^T Q
//
// Step 00 keeps P and dS in global memory. Here they are recomputed tile by tile: logsumexp, one value a query from the forward
// pass, is all that it takes. delta would need a whole row of P and dP, but the order of summation is free: sum over keys of P *
// (dO · V) = dO · (sum over keys of P * V) = dO · O. So launch 1 computes it from O, once.
//
// dK and dV sum over queries, dQ sums over keys. One block cannot accumulate both, and an implementation of FlashAttention-2 must
// choose:
//   - Algorithm 2 of the paper streams queries past a resident block of keys and adds its part of dQ to global memory with atomics:
//     5 products, but the order of the additions, and so the last bits of dQ, differ from run to run.
//   - Or every key block writes its part of dQ apart, and another launch adds the parts in order: 5 products, the same bits every
//     time, but head_dim / RESIDENT as much memory as the S × S matrix that is to be avoided.
//   - Or, as here, dQ gets a launch of its own, which recomputes S and dP: 7 products instead of 5, no atomics, the same bits every
//     time, no memory at all. At best 5/7 of the speed of the first. The simplest of the three, and it shares all its parts.
//
// Launches 2 and 3 are the same kernel seen from two sides. A block has resident rows (keys in dkdv, queries in dq), transposed in
// shared memory, and streams the rows of the other side past them. A thread has 8 resident rows, and 4 streamed rows of them in the
// scores. One tile of dkdv, of which dq leaves out the second product:
//
//     load Q    S^T = K Q^T, P^T    dV += P^T dO    dP^T = V dO^T, dS^T    dK += dS^T Q
//               while dO is loaded                  (P in shared memory, then dS in its place)
//
// dV and dK are 2 x 8 x 8 registers, the sum of one tile 64 and the scores 32. This register pressure leaves no room to prefetch Q;
// up to head dim 64 a second block on the multiprocessor computes meanwhile.
//
// Grouped heads: dK and dV of a key head sum over all query heads that read it. The block of those keys streams the queries of each
// of these heads in turn, so no other block adds to its rows, and nothing is expanded or reduced afterwards.
// Causal mask: a key block starts at the first query that sees its first key, a query block ends with the last key it sees. Masked
// P and dS are set to 0, not multiplied by it: a query that sees nothing has logsumexp = -inf, hence P = exp(+inf).
//
// Errata, if you follow the paper (Dao 2023, arXiv 2307.08691): line 4 of its Algorithm 2 has D = rowsum(dO ∘ O) in R^d. A rowsum
// of an N × d matrix has N elements, and the very next words cut it into blocks of B_r queries. In the chain rule of its section
// 2.2, dK = Q dS^T cannot be multiplied (d columns against N rows); it is dS^T Q, as in Algorithm 2. Neither algorithm has the
// softmax scale: with it, dQ and dK each get the factor once, P contains it, and dV does not.
#include <fa/sink.cuh>
#include <fa/tile.cuh>

using scalar = fa::DTYPE;

constexpr int ROWS = fa::resident_rows, THREADS = RESIDENT / ROWS * LANES;
constexpr int COUNT = STREAMED / LANES;  // streamed rows of a thread: 8 x COUNT scores
constexpr int COLUMNS = HEAD_DIM / LANES;  // columns of a thread: 8 x COLUMNS elements of a gradient
constexpr int PIECE = 32;  // dO and V are loaded in pieces of 32 columns: few registers hold loads in flight

static_assert(RESIDENT % 32 == 0, "RESIDENT is a multiple of 32: the swizzle of transposed tiles");
static_assert(COLUMNS % 2 == 0, "a thread stores pairs of columns: LANES is too large for this head dim");

template <int N, int Columns = HEAD_DIM> using Staged = fa::Staged<scalar, HEAD_DIM, THREADS, N, Columns>;

__device__ __forceinline__ float probability(float score, float logsumexp, float scale) {
    return fa::exp2_approx((score * scale - logsumexp) * fa::log2e);
}

// The probability of a pair by its product q·k, and the derivative of its score, if there is one. Both are 0 for a pair that is hidden.
struct Pair {
    float p, slope = 1.0f;

    __device__ __forceinline__ Pair(const fa::Args& args, int batch, int head, int query, int key, float product, float logsumexp,
                                    float scale) {
        if constexpr (fa::has_score) {
            const float s = product * scale;
            p = probability(fa::score_of(args, batch, head, query, key, s), logsumexp, 1.0f);
            slope = fa::slope_of(args, batch, head, query, key, s);
        } else p = probability(product, logsumexp, scale);
        if (fa::hidden(args, batch, head, query, key)) p = slope = 0.0f;
    }
};

// Launch 1. delta[query] = dO · O - dlogsumexp. 8 lanes share a row.
extern "C" __global__ void __launch_bounds__(128) delta(const __grid_constant__ fa::Args args) {
    constexpr int vec = fa::vec_width<scalar>;
    const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8, head = blockIdx.y, batch = blockIdx.z;
    float sum = 0;
    if (query < args.seq_q) {
        const scalar* o = fa::row_pointer<scalar>(args.O, batch, head, query);  // [head_dim_v]
        const scalar* d_o = fa::row_pointer<scalar>(args.dO, batch, head, query);  // [head_dim_v]
        for (int column = lane * vec; column < fa::head_dim_v(args); column += 8 * vec) {
            fa::Vec128<scalar> o_reg = fa::load_128_upto(o + column, fa::head_dim_v(args) - column);
            fa::Vec128<scalar> do_reg = fa::load_128_upto(d_o + column, fa::head_dim_v(args) - column);
#pragma unroll
            for (int i = 0; i < vec; ++i) sum += fa::widen(o_reg[i]) * fa::widen(do_reg[i]);
        }
    }
    sum = fa::group_sum<8>(sum);
    if (query < args.seq_q && lane == 0)
        fa::head_values<float>(args, WORKSPACE_DELTA, batch, head)[query] = sum - fa::dlogsumexp_of<float>(args, batch, head, query);
}

// The query tile after q_first, of the next head after the last one. The start is computed again: one kept over the loop would be a
// register too many (NVRTC 12.9, sm_120, head dim 128, causal).
__device__ __forceinline__ void next_queries(const fa::Args& args, int k_first, int& q_first, int& head) {
    q_first += STREAMED;
    if (q_first >= args.seq_q) q_first = fa::first_query(args, k_first) / STREAMED * STREAMED, ++head;
}

// Skips tiles of which no query sees a key of the block by the problem's mask.
__device__ __forceinline__ void skip_hidden(const fa::Args& args, int batch, int head_end, int k_first, int& q_first, int& head) {
    while (head < head_end && !fa::visible_in(args, batch, head, q_first, STREAMED, k_first, RESIDENT).may)
        next_queries(args, k_first, q_first, head);
}

// Launch 2. A block has RESIDENT keys and streams every query that sees them, of all heads that read this key head.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dkdv(const __grid_constant__ fa::Args args) {
    float* k_smem = fa::dynamic_shared<float>();  // [HEAD_DIM][RESIDENT] transposed
    float* v_smem = k_smem + HEAD_DIM * RESIDENT;  // [HEAD_DIM][RESIDENT] transposed
    float* q_smem = v_smem + HEAD_DIM * RESIDENT;  // [STREAMED][HEAD_DIM]
    float* do_smem = q_smem + STREAMED * HEAD_DIM;  // [STREAMED][HEAD_DIM]
    float* p_smem = do_smem + STREAMED * HEAD_DIM;  // [STREAMED][RESIDENT]: P, then dS
    float* lse_smem = p_smem + STREAMED * RESIDENT;  // [STREAMED]
    float* delta_smem = lse_smem + STREAMED;  // [STREAMED]

    const int k_first = blockIdx.x * RESIDENT, kv_head = blockIdx.y, batch = blockIdx.z;
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    const int group = args.heads_q / args.heads_kv;
    const float scale = float(args.scale);

    // Prologue: the resident operands.
    {
        Staged<RESIDENT> tile;
        tile.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), args.seq_kv - k_first, args.head_dim);
        tile.store_transposed(k_smem, args.head_dim);
        tile.fetch(fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), args.seq_kv - k_first, fa::head_dim_v(args));
        tile.store_transposed(v_smem, fa::head_dim_v(args));
    }

    // Main loop over the query tiles: for each head of the group, from the first query that sees a key of the block.
    const int head_end = (kv_head + 1) * group;
    int q_first = fa::first_query(args, k_first) / STREAMED * STREAMED, head = q_first < args.seq_q ? kv_head * group : head_end;

    float dk_reg[ROWS][COLUMNS] = {}, dv_reg[ROWS][COLUMNS] = {};
    if constexpr (fa::has_mask) skip_hidden(args, batch, head_end, k_first, q_first, head);
    while (head < head_end) {
        {
            Staged<STREAMED> q;
            q.fetch(fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), args.seq_q - q_first, args.head_dim);
            q.store_by_rows(q_smem, args.head_dim);
        }
        for (int i = threadIdx.x; i < STREAMED; i += THREADS) {
            const bool there = q_first + i < args.seq_q;
            lse_smem[i] = there ? *fa::row_pointer<float>(args.logsumexp, batch, head, q_first + i) : fa::infinity();  // P = 0
            delta_smem[i] = there ? fa::head_values<float>(args, WORKSPACE_DELTA, batch, head)[q_first + i] : 0.0f;
        }
        __syncthreads();  // Q is complete

        // P^T = exp(scale * K Q^T - logsumexp), while dO is loaded
        float score_reg[COUNT][ROWS] = {};
#pragma unroll 1
        for (int first = 0; first < HEAD_DIM; first += PIECE) {
            Staged<STREAMED, PIECE> d_o;
            d_o.fetch(fa::row_pointer<scalar>(args.dO, batch, head, q_first) + first, int(args.dO.row), args.seq_q - q_first,
                      fa::head_dim_v(args) - first);
            fa::multiply_rows<scalar, HEAD_DIM, LANES, RESIDENT>(score_reg, k_smem, q_smem, row, lane, first, first + PIECE);
            d_o.store_by_rows(do_smem + first, fa::head_dim_v(args) - first);
        }
        [[maybe_unused]] float slope_reg[fa::has_score ? COUNT : 1][ROWS];
        const bool masked = fa::visible_keys(args, q_first) < k_first + RESIDENT;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const float lse = lse_smem[lane + LANES * j];
            const int query = q_first + lane + LANES * j, visible = fa::visible_keys(args, query) - k_first - row;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const Pair pair(args, batch, head, query, k_first + row + i, score_reg[j][i], lse, scale);
                score_reg[j][i] = masked && i >= visible ? 0.0f : pair.p;
                if constexpr (fa::has_score) slope_reg[j][i] = pair.slope;
            }
        }
        fa::share_scores<LANES, RESIDENT>(p_smem, score_reg, row, lane);
        __syncthreads();  // dO and P are complete

        // dV += P^T dO
        float dv_tile_reg[ROWS][COLUMNS] = {};
        fa::multiply_scores<scalar, HEAD_DIM, LANES, RESIDENT, STREAMED>(dv_tile_reg, p_smem, do_smem, row, lane);
        fa::add_tile(dv_reg, dv_tile_reg);

        // dS^T = P^T ∘ (V dO^T - delta), in the place of P
        float ds_reg[COUNT][ROWS] = {};
        fa::multiply_rows<scalar, HEAD_DIM, LANES, RESIDENT>(ds_reg, v_smem, do_smem, row, lane);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const float mean = delta_smem[lane + LANES * j];
#pragma unroll
            for (int h = 0; h < ROWS; h += 4) {
                fa::Vec<float, 4> p = fa::load_vec<4>(p_smem + fa::score_at<RESIDENT>(lane, row + h) + j * LANES * RESIDENT);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    ds_reg[j][h + i] = p[i] * (ds_reg[j][h + i] - mean);
                    if constexpr (fa::has_score) ds_reg[j][h + i] *= slope_reg[j][h + i];
                }
            }
        }
        __syncwarp();
        fa::share_scores<LANES, RESIDENT>(p_smem, ds_reg, row, lane);
        __syncwarp();

        // dK += dS^T Q
        float dk_tile_reg[ROWS][COLUMNS] = {};
        fa::multiply_scores<scalar, HEAD_DIM, LANES, RESIDENT, STREAMED>(dk_tile_reg, p_smem, q_smem, row, lane);
        fa::add_tile(dk_reg, dk_tile_reg);
        __syncthreads();  // every warp has finished with Q, dO and dS

        next_queries(args, k_first, q_first, head);
        if constexpr (fa::has_mask) skip_hidden(args, batch, head_end, k_first, q_first, head);
    }

    // Epilogue
    scalar* dk = fa::row_pointer<scalar>(args.dK, batch, kv_head, k_first + row);  // [8 rows], dK.row apart
    scalar* dv = fa::row_pointer<scalar>(args.dV, batch, kv_head, k_first + row);  // [8 rows], dV.row apart
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (k_first + row + i >= args.seq_kv) break;
        fa::store_output<scalar, LANES>(dk + i * args.dK.row, dk_reg[i], scale, lane, args.head_dim);
        fa::store_output<scalar, LANES>(dv + i * args.dV.row, dv_reg[i], 1.0f, lane, fa::head_dim_v(args));
    }
}

// Launch 3. A block has RESIDENT queries and streams every key they see.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dq(const __grid_constant__ fa::Args args) {
    float* q_smem = fa::dynamic_shared<float>();  // [HEAD_DIM][RESIDENT] transposed
    float* do_smem = q_smem + HEAD_DIM * RESIDENT;  // [HEAD_DIM][RESIDENT] transposed
    float* k_smem = do_smem + HEAD_DIM * RESIDENT;  // [STREAMED][HEAD_DIM]
    float* v_smem = k_smem + STREAMED * HEAD_DIM;  // [STREAMED][HEAD_DIM]
    float* ds_smem = v_smem + STREAMED * HEAD_DIM;  // [STREAMED][RESIDENT]

    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // the longest first
    const int q_first = q_tile * RESIDENT, q_end = min(q_first + RESIDENT, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    const int keys = fa::visible_keys(args, q_end - 1), unmasked = fa::visible_keys(args, q_first);
    const float scale = float(args.scale);

    // Prologue: the resident operands.
    {
        Staged<RESIDENT> tile;
        tile.fetch(fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), args.seq_q - q_first, args.head_dim);
        tile.store_transposed(q_smem, args.head_dim);
        tile.fetch(fa::row_pointer<scalar>(args.dO, batch, head, q_first), int(args.dO.row), args.seq_q - q_first, fa::head_dim_v(args));
        tile.store_transposed(do_smem, fa::head_dim_v(args));
    }
    float lse_reg[ROWS], delta_reg[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool there = q_first + row + i < args.seq_q;
        lse_reg[i] = there ? *fa::row_pointer<float>(args.logsumexp, batch, head, q_first + row + i) : fa::infinity();  // P = 0
        delta_reg[i] = there ? fa::head_values<float>(args, WORKSPACE_DELTA, batch, head)[q_first + row + i] : 0.0f;
    }

    // Main loop over the K/V tiles.
    float dq_reg[ROWS][COLUMNS] = {};
    for (int k_first = fa::next_keys<STREAMED>(args, batch, head, q_first, RESIDENT, 0, keys); k_first < keys;
         k_first = fa::next_keys<STREAMED>(args, batch, head, q_first, RESIDENT, k_first + STREAMED, keys)) {
        {
            Staged<STREAMED> k;
            k.fetch(fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
            k.store_by_rows(k_smem, args.head_dim);
        }
        __syncthreads();  // K is complete

        // P = exp(scale * Q K^T - logsumexp), while V is loaded
        float score_reg[COUNT][ROWS] = {};
#pragma unroll 1
        for (int first = 0; first < HEAD_DIM; first += PIECE) {
            Staged<STREAMED, PIECE> v;
            v.fetch(fa::row_pointer<scalar>(args.V, batch, kv_head, k_first) + first, int(args.V.row), keys - k_first,
                    fa::head_dim_v(args) - first);
            fa::multiply_rows<scalar, HEAD_DIM, LANES, RESIDENT>(score_reg, q_smem, k_smem, row, lane, first, first + PIECE);
            v.store_by_rows(v_smem + first, fa::head_dim_v(args) - first);
        }
        __syncthreads();  // V is complete

        // dS = P ∘ (dO V^T - delta)
        float ds_reg[COUNT][ROWS] = {};
        fa::multiply_rows<scalar, HEAD_DIM, LANES, RESIDENT>(ds_reg, do_smem, v_smem, row, lane);
        const bool masked = k_first + STREAMED > unmasked;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int visible = fa::visible_keys(args, q_first + row + i) - k_first - lane;
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const Pair pair(args, batch, head, q_first + row + i, k_first + lane + LANES * j, score_reg[j][i], lse_reg[i], scale);
                float ds = pair.p * (ds_reg[j][i] - delta_reg[i]);
                if constexpr (fa::has_score) ds *= pair.slope;
                ds_reg[j][i] = masked && LANES * j >= visible ? 0.0f : ds;
            }
        }
        fa::share_scores<LANES, RESIDENT>(ds_smem, ds_reg, row, lane);
        __syncwarp();

        // dQ += dS K
        float dq_tile_reg[ROWS][COLUMNS] = {};
        fa::multiply_scores<scalar, HEAD_DIM, LANES, RESIDENT, STREAMED>(dq_tile_reg, ds_smem, k_smem, row, lane);
        fa::add_tile(dq_reg, dq_tile_reg);
        __syncthreads();  // every warp has finished with K, V and dS
    }

    // Epilogue
    scalar* dq = fa::row_pointer<scalar>(args.dQ, batch, head, q_first + row);  // [8 rows], dQ.row apart
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (q_first + row + i >= q_end) break;
        fa::store_output<scalar, LANES>(dq + i * args.dQ.row, dq_reg[i], scale, lane, args.head_dim);
    }
}

// Launch 4, of a problem with sinks. A warp has a query head.
extern "C" __global__ void __launch_bounds__(32) dsinks(const __grid_constant__ fa::Args args) {
    fa::store_dsink<float>(args, blockIdx.x,
                           [&](int batch, int query) { return fa::head_values<float>(args, WORKSPACE_DELTA, batch, blockIdx.x)[query]; });
}
