// The arguments of every kernel: one struct by value, the same for all, so that a launch needs no per-kernel code.
// harness/backends/launch.py mirrors it with one numpy dtype; tests/device/test_plain_words.py compares the two.
#pragma once

namespace fa {

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

// A (batch, heads, rows, columns) tensor: strides in elements, columns contiguous. Rows start 16-byte aligned; the
// elements between the last column and the next row are poison (NaN): they may be loaded, they must not be used.
// logsumexp is (batch, heads, rows) with row stride 1.
struct Tensor {
    void* data;
    int64_t batch, head, row;
};

struct alignas(64) Args {
    Tensor Q, K, V;            // Q: (batch, heads_q, seq_q, head_dim); K: (batch, heads_kv, seq_kv, head_dim); V: … head_dim_v)
    Tensor O, logsumexp;       // O: (batch, heads_q, seq_q, head_dim_v); logsumexp natural, of the scaled scores; read backward
    Tensor dO, dQ, dK, dV;     // each like what it is the gradient of
    Tensor dlogsumexp;         // like logsumexp; data is null where logsumexp has no gradient
    void* workspace[8];        // in the header's order; WORKSPACE_<NAME> is the index; then the tensors of mask and score
    int32_t batch, heads_q, heads_kv, seq_q, seq_kv;
    int32_t head_dim;          // the true one; HEAD_DIM is the compiled width, never less than it and head_dim_v
    int32_t causal_shift;      // key k is visible to query q iff k <= q + causal_shift (used only where CAUSAL)
    int32_t head_dim_v;        // of V, O, dO and dV; read by fa::head_dim_v
    double scale;              // scores are scale * q.k
    int32_t runtime[4];        // in the order of the header's `runtime`; RUNTIME_<NAME> is the index
};

// Whether V, and with it O, dO and dV, has other columns than Q and K.
#ifdef FA_HEAD_DIM_V
constexpr bool own_head_dim_v = true;
#else
constexpr bool own_head_dim_v = false;
#endif

// Columns of V, O, dO and dV. Where they are those of Q and K it is the same number for the compiler too.
__device__ __forceinline__ int head_dim_v(const Args& args) { return own_head_dim_v ? args.head_dim_v : args.head_dim; }

// First element of a row of one head. The base is 64-bit arithmetic; offsets inside a tile may be 32-bit.
template <class T>
__device__ __forceinline__ T* row_pointer(const Tensor& tensor, int batch, int head, int row) {
    return static_cast<T*>(tensor.data) + batch * tensor.batch + head * tensor.head + row * tensor.row;
}

// The gradient of a query's logsumexp, whose derivative by the scores is P: dS = P (dP - delta) + P dlogsumexp, so it comes off delta.
template <class T> __device__ __forceinline__ T dlogsumexp_of(const Args& args, int batch, int head, int query) {
    return args.dlogsumexp.data ? *row_pointer<T>(args.dlogsumexp, batch, head, query) : T(0);
}

// The key head that a query head reads (grouped-query attention; the same head where there is no grouping).
__device__ __forceinline__ int kv_head_of(const Args& args, int head_q) { return head_q / (args.heads_q / args.heads_kv); }

// One past the last key that a query sees. Not positive: the row is fully masked, so O = 0 and logsumexp = -inf.
__device__ __forceinline__ int visible_keys(const Args& args, int query) {
#if CAUSAL
    return min(args.seq_kv, query + args.causal_shift + 1);
#else
    return args.seq_kv;
#endif
}

// The first query that sees a key: the least with key <= query + causal_shift.
__device__ __forceinline__ int first_query(const Args& args, int key) {
#if CAUSAL
    return max(0, key - args.causal_shift);
#else
    return 0;
#endif
}

// A window: under the causal mask a query sees itself and FA_WINDOW keys before it, no more. The harness makes a mask that says so this
// border (the header key `window`).
#ifdef FA_WINDOW
static_assert(CAUSAL, "a window is a border beside the causal one");
constexpr bool has_window = true;
#else
constexpr bool has_window = false;
#endif

// The first key that a query sees by its window; beyond the last where it sees none.
__device__ __forceinline__ int first_key([[maybe_unused]] const Args& args, [[maybe_unused]] int query) {
#ifdef FA_WINDOW
    return max(0, query + args.causal_shift - (FA_WINDOW));
#else
    return 0;
#endif
}

// One past the last query that sees a key by its window.
__device__ __forceinline__ int query_end(const Args& args, [[maybe_unused]] int key) {
#ifdef FA_WINDOW
    return max(0, min(args.seq_q, key - args.causal_shift + (FA_WINDOW) + 1));
#else
    return args.seq_q;
#endif
}

}  // namespace fa
