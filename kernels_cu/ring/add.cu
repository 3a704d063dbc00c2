// /// kernel
// title = "a partial gradient added to its sum, in float32"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [256]                # one compile: the head dim is a run-time value
// arch = ">=sm_70"
// causal = false
// gqa = false
// cross = false
// logits = "any"
// deterministic = true
// [tile]
// FLOAT_PART = 0                   # whether these are float32, not the storage type: the part that is added,
// FLOAT_BEFORE = 1                 # the sum before,
// FLOAT_AFTER = 1                  # and the sum behind
// THREADS = 128
// [[launch]]
// entry = "add"
// grid = ["ceil_div(seq_q * ceil_div(head_dim * sizeof_dtype, 16), THREADS)", "heads_q", "batch"]
// block = "THREADS"
// ///
//
// Every step of the ring gives dQ over the keys of one shard, and dK and dV of that shard over the queries of one rank. With the
// logsumexp and O of all keys, P and delta are those of the whole problem, so partial gradients are summed and nothing is rescaled.
// A thread has 16 bytes of the storage type. A sum is rounded once: in between it is float32. The limit is global memory, so a sum of two
// parts is none: FLOAT_BEFORE and FLOAT_AFTER = 0 add a part to the first one, 6 bytes an element in 16 bit, where a float32 sum that is
// cleared, added to twice and rounded (round.cu) has 30.
//
// The tensors in fa::Args, (batch, heads, rows, head_dim):  Q: the part   V: the sum before   O: the sum behind, Q or V itself or another
// Rows of all have room for whole vectors of 16 bytes of the storage type.
#include <fa/merge.cuh>

using scalar = fa::DTYPE;
using part_t = typename fa::Partial<FLOAT_PART, scalar>::type;
using before_t = typename fa::Partial<FLOAT_BEFORE, scalar>::type;
using after_t = typename fa::Partial<FLOAT_AFTER, scalar>::type;

constexpr int vec = fa::vec_width<scalar>;  // elements in 16 bytes of the storage type

extern "C" __global__ void __launch_bounds__(THREADS) add(const __grid_constant__ fa::Args args) {
    const int vectors = (args.head_dim + vec - 1) / vec, i = blockIdx.x * THREADS + threadIdx.x;
    const int row = i / vectors, d = i % vectors * vec, head = blockIdx.y, batch = blockIdx.z;
    if (row >= args.seq_q) return;
    const fa::Vec<float, vec> part_reg = fa::load_wide<vec>(fa::row_pointer<const part_t>(args.Q, batch, head, row) + d);
    fa::Vec<float, vec> sum_reg = fa::load_wide<vec>(fa::row_pointer<const before_t>(args.V, batch, head, row) + d);
#pragma unroll
    for (int j = 0; j < vec; ++j) sum_reg[j] += part_reg[j];
    fa::store_rounded(fa::row_pointer<after_t>(args.O, batch, head, row) + d, sum_reg);
}
