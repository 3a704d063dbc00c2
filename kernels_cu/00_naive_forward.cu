// /// kernel
// title = "three launches, S and P in global memory"
// dtypes = ["float32", "float16", "bfloat16", "float64"]
// head_dims = [256]                # one compile: the head dim is a run-time value
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
// aliases = ["naive-attn", "vanilla-attn"]
// [tile]
// THREADS = 128
// [workspace.scores]
// dtype = "float32"                # counted in float32; a float64 problem takes two of them for each score
// size = "batch * heads_q * seq_q * seq_kv * max(1, sizeof_dtype // 4)"
// init = "none"
// [[launch]]
// entry = "scores"                 # a thread computes one score
// grid = ["seq_q * ceil_div(seq_kv, THREADS)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "softmax"                # a warp normalises one row
// grid = ["ceil_div(seq_q, THREADS // 32)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "output"                 # a thread computes 16 bytes of a row of O
// grid = ["ceil_div(seq_q * ceil_div(head_dim_v * sizeof_dtype, 16), THREADS)", "heads_q", "batch"]
// block = "THREADS"
// ///
//
// Step 00. Attention as its formula reads, for each batch and head, in three launches:
//
//     S = scale * Q K^T        (queries × keys)      launch 1, scores
//     P = softmax of each row of S                   launch 2, softmax
//     O = P V                  (queries × head_dim_v) launch 3, output
//
// Each launch reads from global memory (HBM) what the one before wrote there, so the matrix of S, later of P, is materialised:
// seq_q × seq_kv elements for every head. The ladder removes it. At 2048 tokens and 128 heads the matrix has half a billion
// elements; Q, K, V and O together have an eighth of that at head dim 64. The matrix is written once, read three times and
// written twice by the softmax, and read by the last launch. Twice the tokens make it four times as large. The arithmetic is the same in every later
// step. What changes is how much of it waits for memory.
//
// The softmax is the safe one: it subtracts the row maximum before the exponential. exp(s - max) is at most 1, so no input
// overflows, and the quotient is unchanged because numerator and denominator carry the same factor. Beside O the kernel writes
// logsumexp = row maximum + log(row sum): one value a row, from which the backward pass recomputes P.
//
// What a first kernel should get right, because it costs nothing:
//   - Coalesced stores. Neighbouring threads write neighbouring addresses (keys in launch 1, columns in launch 3): one transaction
//     for a warp instead of 32. Launch 1 still reads one row of K a thread, D elements apart; only the cache makes that bearable.
//   - A masked score is neither computed nor stored nor read: under the causal mask half the matrix stays untouched. A row that
//     sees no key has an empty sum; its logsumexp is -inf by the same formula and its O is 0.
//   - Accumulation is in float32 whatever the storage type (float64 for float64): a float16 sum over thousands of keys would lose
//     most of its mantissa.
#include <fa/row.cuh>
#include <fa/sink.cuh>
#include <fa/warp.cuh>

using scalar = fa::DTYPE;  // storage
using real = fa::accumulate_t<scalar>;  // arithmetic

constexpr int vec = fa::vec_width<scalar>;  // elements in 16 bytes

// S[query][key] = scale * Q[query] · K[key]. A block computes THREADS neighbouring keys of one query.
extern "C" __global__ void __launch_bounds__(THREADS) scores(const __grid_constant__ fa::Args args) {
    int key_blocks = (args.seq_kv + THREADS - 1) / THREADS;
    int query = blockIdx.x / key_blocks, key = blockIdx.x % key_blocks * THREADS + threadIdx.x;
    int head = blockIdx.y, batch = blockIdx.z;
    if (key >= fa::visible_keys(args, query)) return;

    const scalar* q = fa::row_pointer<scalar>(args.Q, batch, head, query);  // [head_dim]
    const scalar* k = fa::row_pointer<scalar>(args.K, batch, fa::kv_head_of(args, head), key);  // [head_dim]
    real s = fa::score_of(args, batch, head, query, key, real(args.scale) * fa::dot(q, k, args.head_dim));
    if (fa::hidden(args, batch, head, query, key)) s = -fa::infinity();
    fa::matrix_row<real>(args, WORKSPACE_SCORES, batch, head, query)[key] = s;
}

// P[query] = softmax(S[query]) in place, and logsumexp[query]. A warp normalises one row, 32 neighbouring keys at a
// time. A key always belongs to the same lane, so nothing but the two reductions stands between the passes over the row.
extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ fa::Args args) {
    int query = blockIdx.x * (THREADS / 32) + fa::warp_id(), head = blockIdx.y, batch = blockIdx.z;
    if (query >= args.seq_q) return;
    int visible = fa::visible_keys(args, query);
    real* row = fa::matrix_row<real>(args, WORKSPACE_SCORES, batch, head, query);  // [seq_kv]

    real row_max = -fa::infinity();
    for (int key = fa::lane_id(); key < visible; key += 32) row_max = max(row_max, row[key]);
    row_max = fa::group_max<32>(row_max);
    if (fa::has_sinks) row_max = max(row_max, fa::sink_of<real>(args, head));

    real row_sum = 0;
    for (int key = fa::lane_id(); key < visible; key += 32) {
        // Where a mask hides every key row_max is -inf, and -inf - -inf would be NaN.
        row[key] = fa::has_mask && row[key] == -fa::infinity() ? real(0) : fa::exp(row[key] - row_max);
        row_sum += row[key];
    }
    row_sum = fa::group_sum<32>(row_sum);
    if (fa::has_sinks) row_sum += row_max == -fa::infinity() ? real(1) : fa::exp(fa::sink_of<real>(args, head) - row_max);

    for (int key = fa::lane_id(); key < visible; key += 32)
        if (!fa::has_mask || row_sum != 0) row[key] /= row_sum;

    // No visible key: row_max is -inf, row_sum is 0 and its log -inf. Nothing above was divided by that row_sum.
    if (fa::lane_id() == 0) *fa::row_pointer<real>(args.logsumexp, batch, head, query) = row_max + fa::log(row_sum);
}

// O[query] = sum over keys of P[query][key] * V[key]. A thread computes 16 bytes of a row of O, the next thread the next 16.
// 4: blocks a multiprocessor. Left to itself the compiler makes room for more by spilling registers.
extern "C" __global__ void __launch_bounds__(THREADS, 4) output(const __grid_constant__ fa::Args args) {
    int columns = (fa::head_dim_v(args) + vec - 1) / vec;  // of 16 bytes
    int index = blockIdx.x * THREADS + threadIdx.x;
    int query = index / columns, d = index % columns * vec, head = blockIdx.y, batch = blockIdx.z;
    if (query >= args.seq_q) return;
    int visible = fa::visible_keys(args, query);

    const real* p = fa::matrix_row<real>(args, WORKSPACE_SCORES, batch, head, query);  // [seq_kv]
    const scalar* v = fa::row_pointer<scalar>(args.V, batch, fa::kv_head_of(args, head), 0) + d;  // [seq_kv], V.row apart
    // Where head_dim_v does not fill 16 bytes the last elements are the row's poison: accumulated like the others, never stored.
    real out_reg[vec] = {};
    fa::add_weighted(out_reg, p, 1, v, args.V.row, 0, visible);

    fa::Vec128<scalar> o;
#pragma unroll
    for (int i = 0; i < vec; ++i) o[i] = fa::narrow<scalar>(out_reg[i]);
    fa::store_128_upto(fa::row_pointer<scalar>(args.O, batch, head, query) + d, o, fa::head_dim_v(args) - d);
}
