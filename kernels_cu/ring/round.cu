// /// kernel
// title = "a float32 sum rounded to the storage type"
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
// entry = "to_storage"
// grid = ["ceil_div(seq_q * ceil_div(head_dim * sizeof_dtype, 16), THREADS)", "heads_q", "batch"]
// block = "THREADS"
// ///
//
// The last launch of `fa-cli ring`: O, dQ, dK and dV are summed in float32 over all steps, and rounded here, once. A thread stores 16 bytes.
//
// The tensors in fa::Args:  Q: the sum, (batch, heads, rows, head_dim), float32   O: the same in the storage type
// Rows of both have room for whole vectors of 16 bytes of the storage type.
#include <fa/copy.cuh>

using scalar = fa::DTYPE;

constexpr int vec = fa::vec_width<scalar>;  // elements in 16 bytes of the storage type

extern "C" __global__ void __launch_bounds__(THREADS) to_storage(const __grid_constant__ fa::Args args) {
    const int vectors = (args.head_dim + vec - 1) / vec, i = blockIdx.x * THREADS + threadIdx.x;
    const int row = i / vectors, d = i % vectors * vec, head = blockIdx.y, batch = blockIdx.z;
    if (row >= args.seq_q) return;
    const float* sum = fa::row_pointer<const float>(args.Q, batch, head, row) + d;
    fa::Vec128<scalar> out_reg;
#pragma unroll
    for (int part = 0; part < vec; part += 4) {
        const fa::Vec<float, 4> sum_reg = fa::load_vec<4>(sum + part);
#pragma unroll
        for (int j = 0; j < 4; ++j) out_reg[part + j] = fa::narrow<scalar>(sum_reg[j]);
    }
    fa::store_128(fa::row_pointer<scalar>(args.O, batch, head, row) + d, out_reg);
}
