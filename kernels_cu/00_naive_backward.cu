// /// kernel
// title = "four launches, P and dS in global memory"
// dtypes = ["float32", "float16", "bfloat16", "float64"]
// head_dims = [256]                # one compile: the head dim is a run-time value
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
// aliases = ["naive-attn", "vanilla-attn"]
// [tile]
// THREADS = 128
// [let]
// widest = "max(head_dim, head_dim_v)"
// [workspace.delta]
// dtype = "float32"                # counted in float32; a float64 problem takes two of them for each element
// size = "batch * heads_q * seq_q * max(1, sizeof_dtype // 4)"
// init = "none"
// [workspace.p]
// dtype = "float32"
// size = "batch * heads_q * seq_q * seq_kv * max(1, sizeof_dtype // 4)"
// init = "none"
// [workspace.ds]
// dtype = "float32"
// size = "batch * heads_q * seq_q * seq_kv * max(1, sizeof_dtype // 4)"
// init = "none"
// [[launch]]
// entry = "row_delta"              # a thread computes delta of one row
// grid = ["ceil_div(seq_q, THREADS)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "p_and_ds"               # a thread computes one element of P and of dS
// grid = ["seq_q * ceil_div(seq_kv, THREADS)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "dk_and_dv"              # a thread computes 16 bytes of a row of dK and of dV
// grid = ["ceil_div(seq_kv * ceil_div(widest * sizeof_dtype, 16), THREADS)", "heads_kv", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "dq"                     # a thread computes 16 bytes of a row of dQ
// grid = ["ceil_div(seq_q * ceil_div(head_dim * sizeof_dtype, 16), THREADS)", "heads_q", "batch"]
// block = "THREADS"
// [[launch]]
// entry = "dsinks"                 # a warp computes the gradient of one sink
// when = "sinks"
// grid = ["heads_q"]
// block = 32
// ///
//
// Step 00, backward. The forward pass was S = scale * Q K^T, P = softmax(S), O = P V. Its gradients, for a given dO:
//
//     dV = P^T dO                                   V[key] enters every O[query] with weight P[query][key]
//     dP = dO V^T
//     dS = P * (dP - delta)                         the softmax: a row of P sums to 1, so a part of dP has no effect
//     dQ = scale * dS K      dK = scale * dS^T Q    S is a product of two matrices, and so is each gradient
//
// delta[query] = sum over keys of P * dP looks like one more pass over the matrix. It is not: summed in the other order it is dO ·
// O, one dot product of two rows of head_dim (launch 1).
//
// P is recomputed, not stored by the forward pass, where it would be seq_q × seq_kv elements for each head. P = exp(S - logsumexp)
// needs one value a row; row maximum and row sum are inside the logsumexp (launch 2). Every later backward pass makes this trade:
// one more matrix product instead of the matrix. Here only half of it is made, because P and dS still go through global memory to
// the launches that sum over queries (3) and over keys (4).
//
// Launch 3 is where a backward pass usually needs atomics: dK and dV sum over queries, and with grouped heads over all query heads
// that read this key head. Here one thread accumulates an element of dK over all of them, so the order of the additions is fixed
// and the result has the same bits every time.
//
// A masked pair is skipped, never multiplied by zero: P and dS are not written there, and 0 * NaN is not 0. A row that sees no key
// has logsumexp -inf, which no launch reads; its dQ is an empty sum.
#include <fa/math.cuh>
#include <fa/row.cuh>
#include <fa/sink.cuh>

using scalar = fa::DTYPE;               // storage
using real = fa::accumulate_t<scalar>;  // arithmetic

constexpr int vec = fa::vec_width<scalar>;  // elements in 16 bytes

// delta[query] = dO[query] · O[query] - dlogsumexp[query]
extern "C" __global__ void __launch_bounds__(THREADS) row_delta(const __grid_constant__ fa::Args args) {
    int query = blockIdx.x * THREADS + threadIdx.x, head = blockIdx.y, batch = blockIdx.z;
    if (query >= args.seq_q) return;
    const scalar* o = fa::row_pointer<scalar>(args.O, batch, head, query);     // [head_dim_v]
    const scalar* d_o = fa::row_pointer<scalar>(args.dO, batch, head, query);  // [head_dim_v]
    real* delta = static_cast<real*>(args.workspace[WORKSPACE_DELTA]);         // [batch, heads_q, seq_q]
    delta[(fa::int64_t(batch) * args.heads_q + head) * args.seq_q + query] =
        fa::dot(o, d_o, fa::head_dim_v(args)) - fa::dlogsumexp_of<real>(args, batch, head, query);
}

// P[query][key] and dS[query][key]. A block computes THREADS neighbouring keys of one query.
extern "C" __global__ void __launch_bounds__(THREADS) p_and_ds(const __grid_constant__ fa::Args args) {
    int key_blocks = (args.seq_kv + THREADS - 1) / THREADS;
    int query = blockIdx.x / key_blocks, key = blockIdx.x % key_blocks * THREADS + threadIdx.x;
    int head = blockIdx.y, batch = blockIdx.z;
    if (key >= fa::visible_keys(args, query)) return;

    const scalar* q = fa::row_pointer<scalar>(args.Q, batch, head, query);                      // [head_dim]
    const scalar* k = fa::row_pointer<scalar>(args.K, batch, fa::kv_head_of(args, head), key);  // [head_dim]
    const scalar* v = fa::row_pointer<scalar>(args.V, batch, fa::kv_head_of(args, head), key);  // [head_dim_v]
    const scalar* d_o = fa::row_pointer<scalar>(args.dO, batch, head, query);                   // [head_dim_v]
    const real* delta = static_cast<const real*>(args.workspace[WORKSPACE_DELTA]);              // [batch, heads_q, seq_q]

    real s = real(args.scale) * fa::dot(q, k, args.head_dim);
    real p = fa::exp(fa::score_of(args, batch, head, query, key, s) - *fa::row_pointer<real>(args.logsumexp, batch, head, query));
    real dp = fa::dot(d_o, v, fa::head_dim_v(args));
    real slope = fa::slope_of(args, batch, head, query, key, s);  // 1 without a score
    if (fa::hidden(args, batch, head, query, key)) p = slope = 0;
    fa::matrix_row<real>(args, WORKSPACE_P, batch, head, query)[key] = p;
    real ds = p * (dp - delta[(fa::int64_t(batch) * args.heads_q + head) * args.seq_q + query]);
    if (fa::has_score) ds *= slope;
    fa::matrix_row<real>(args, WORKSPACE_DS, batch, head, query)[key] = ds;
}

// dV[key] = sum over queries of P[query][key] * dO[query], dK[key] = scale * the same of dS and Q.
// 4: blocks a multiprocessor. Left to itself the compiler makes room for more by spilling registers.
extern "C" __global__ void __launch_bounds__(THREADS, 4) dk_and_dv(const __grid_constant__ fa::Args args) {
    int columns = (max(args.head_dim, fa::head_dim_v(args)) + vec - 1) / vec;  // of 16 bytes
    int index = blockIdx.x * THREADS + threadIdx.x;
    int key = index / columns, d = index % columns * vec, kv_head = blockIdx.y, batch = blockIdx.z;
    if (key >= args.seq_kv) return;

    // Where head_dim does not fill 16 bytes the last elements are the row's poison: accumulated like the others, never stored.
    real dk_reg[vec] = {}, dv_reg[vec] = {};
    // With a head dim of V's own the narrower row may have ended.
    const bool of_k = !fa::own_head_dim_v || d < args.head_dim, of_v = !fa::own_head_dim_v || d < args.head_dim_v;
    int group = args.heads_q / args.heads_kv;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const real* p = fa::matrix_row<real>(args, WORKSPACE_P, batch, head, 0) + key;    // [seq_q], seq_kv apart
        const real* ds = fa::matrix_row<real>(args, WORKSPACE_DS, batch, head, 0) + key;  // [seq_q], seq_kv apart
        const scalar* q = fa::row_pointer<scalar>(args.Q, batch, head, 0) + d;            // [seq_q], Q.row apart
        const scalar* d_o = fa::row_pointer<scalar>(args.dO, batch, head, 0) + d;         // [seq_q], dO.row apart
        if (of_k) fa::add_weighted(dk_reg, ds, args.seq_kv, q, args.Q.row, fa::first_query(args, key), args.seq_q);
        if (of_v) fa::add_weighted(dv_reg, p, args.seq_kv, d_o, args.dO.row, fa::first_query(args, key), args.seq_q);
    }

    fa::Vec128<scalar> dk, dv;
#pragma unroll
    for (int i = 0; i < vec; ++i) {
        dk[i] = fa::narrow<scalar>(real(args.scale) * dk_reg[i]);
        dv[i] = fa::narrow<scalar>(dv_reg[i]);
    }
    fa::store_128_upto(fa::row_pointer<scalar>(args.dK, batch, kv_head, key) + d, dk, args.head_dim - d);
    fa::store_128_upto(fa::row_pointer<scalar>(args.dV, batch, kv_head, key) + d, dv, fa::head_dim_v(args) - d);
}

// dQ[query] = scale * sum over keys of dS[query][key] * K[key]
extern "C" __global__ void __launch_bounds__(THREADS, 4) dq(const __grid_constant__ fa::Args args) {
    int columns = (args.head_dim + vec - 1) / vec;  // of 16 bytes
    int index = blockIdx.x * THREADS + threadIdx.x;
    int query = index / columns, d = index % columns * vec, head = blockIdx.y, batch = blockIdx.z;
    if (query >= args.seq_q) return;
    int visible = fa::visible_keys(args, query);

    const real* ds = fa::matrix_row<real>(args, WORKSPACE_DS, batch, head, query);                // [seq_kv]
    const scalar* k = fa::row_pointer<scalar>(args.K, batch, fa::kv_head_of(args, head), 0) + d;  // [seq_kv], K.row apart
    real dq_reg[vec] = {};
    fa::add_weighted(dq_reg, ds, 1, k, args.K.row, 0, visible);

    fa::Vec128<scalar> dq_out;
#pragma unroll
    for (int i = 0; i < vec; ++i) dq_out[i] = fa::narrow<scalar>(real(args.scale) * dq_reg[i]);
    fa::store_128_upto(fa::row_pointer<scalar>(args.dQ, batch, head, query) + d, dq_out, args.head_dim - d);
}

// dsink of each head, by delta as of any key.
extern "C" __global__ void __launch_bounds__(32) dsinks(const __grid_constant__ fa::Args args) {
    fa::store_dsink<real>(args, blockIdx.x,
                          [&](int batch, int query) { return fa::head_values<real>(args, WORKSPACE_DELTA, batch, blockIdx.x)[query]; });
}
