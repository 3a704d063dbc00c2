// /// kernel
// title = "a partial gradient added to its sum in float32"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [256]                # one compile: the head dim is a run-time value
// arch = ">=sm_70"
// causal = false
// gqa = false
// cross = false
// logits = "any"
// deterministic = true
// [tile]
// THREADS = 128
// [[launch]]
// entry = "add"
// grid = ["ceil_div(seq_q * ceil_div(head_dim * sizeof_dtype, 16), THREADS)", "heads_q", "batch"]
// block = "THREADS"
// ///
//
// Every step of the ring gives dQ over the keys of one shard, and dK and dV of that shard over the queries of one rank. With the
// logsumexp and O of all keys, P and delta are those of the whole problem, so partial gradients are summed and nothing is rescaled.
// A thread has 16 bytes of the storage type. The sum is float32 and is rounded once, after the last step (round.cu).
//
// The tensors in fa::Args:  Q: the step's gradient, (batch, heads, rows, head_dim), storage type   O: its sum, float32
// Rows of both have room for whole vectors of 16 bytes of the storage type.
#include <fa/copy.cuh>

using scalar = fa::DTYPE;

constexpr int vec = fa::vec_width<scalar>;  // elements in 16 bytes of the storage type

extern "C" __global__ void __launch_bounds__(THREADS) add(const __grid_constant__ fa::Args args) {
    const int vectors = (args.head_dim + vec - 1) / vec, i = blockIdx.x * THREADS + threadIdx.x;
    const int row = i / vectors, d = i % vectors * vec, head = blockIdx.y, batch = blockIdx.z;
    if (row >= args.seq_q) return;
    const fa::Vec128<scalar> step_reg = fa::load_128(fa::row_pointer<const scalar>(args.Q, batch, head, row) + d);
    float* sum = fa::row_pointer<float>(args.O, batch, head, row) + d;
#pragma unroll
    for (int part = 0; part < vec; part += 4) {
        fa::Vec<float, 4> sum_reg = fa::load_vec<4>(sum + part);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum_reg[j] += fa::widen(step_reg[part + j]);
        fa::store_vec(sum + part, sum_reg);
    }
}
