// /// kernel
// title = "a partial O and logsumexp merged into the running ones, in float32"
// dtypes = ["float32", "float16", "bfloat16"]
// head_dims = [256]                # one compile: the head dim is a run-time value
// arch = ">=sm_70"
// causal = false
// gqa = false
// cross = false
// logits = "any"
// deterministic = true
// [tile]
// FLOAT_BEFORE = 1                 # whether the running O before is float32, not the storage type,
// FLOAT_AFTER = 1                  # and the one behind
// LANES = 16                       # lanes that share a row, all of one warp
// THREADS = 128
// [[launch]]
// entry = "merge"
// grid = ["ceil_div(seq_q, THREADS // LANES)", "heads_q", "batch"]
// block = "THREADS"
// ///
//
// A step of the ring gives O over the keys of one shard. Its weight beside what was summed before follows from the two logsumexps:
//
//     logsumexp = log(exp(running) + exp(step))      O = exp(running - logsumexp) * O + exp(step - logsumexp) * O of the step
//
// The running O and logsumexp are normalised after every step, so their magnitude is that of an attention output. O is float32 between
// steps and rounded once (here, or in round.cu). The limit is global memory: 10 bytes an element in 16 bit. Where the running logsumexp is -inf,
// nothing was summed before: the running O is not read, and need not be cleared, which leaves 6 bytes. A first O as its step gave it
// (FLOAT_BEFORE = 0) and a last one that is rounded here (FLOAT_AFTER = 0) cost 6 together.
//
// The tensors in fa::Args:  Q: O of the step, (batch, heads, rows, head_dim), storage type   K: its logsumexp, float32
//                           V: running O before   O: running O behind, V itself or another   logsumexp: running logsumexp
// Rows of all of them have room for whole vectors of 16 bytes of the storage type.
#include <fa/merge.cuh>
#include <fa/warp.cuh>

using scalar = fa::DTYPE;
using before_t = typename fa::Partial<FLOAT_BEFORE, scalar>::type;
using after_t = typename fa::Partial<FLOAT_AFTER, scalar>::type;

constexpr int vec = fa::vec_width<scalar>;  // elements in 16 bytes of the storage type

extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ fa::Args args) {
    const int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int head = blockIdx.y, batch = blockIdx.z;
    const bool there = row < args.seq_q;
    float* running = fa::row_pointer<float>(args.logsumexp, batch, head, row);
    const float before = there ? *running : 0.0f;  // rows beyond the end must not read what others write
    const bool first = before == -fa::infinity();
    const fa::Merged merged = fa::merge_rows(before, there ? *fa::row_pointer<const float>(args.K, batch, head, row) : 0.0f);
    __syncwarp();  // every lane of the row has read the running logsumexp
    if (!there) return;
    if (lane == 0) *running = merged.logsumexp;
    const scalar* step = fa::row_pointer<const scalar>(args.Q, batch, head, row);  // [head_dim]
    const before_t* before_out = fa::row_pointer<const before_t>(args.V, batch, head, row);
    after_t* out = fa::row_pointer<after_t>(args.O, batch, head, row);
#pragma unroll 1
    for (int d = lane * vec; d < args.head_dim; d += LANES * vec) {
        const fa::Vec128<scalar> step_reg = fa::load_128(step + d);
        fa::Vec<float, vec> out_reg{};
        if (!first) out_reg = fa::load_wide<vec>(before_out + d);
#pragma unroll
        for (int i = 0; i < vec; ++i) out_reg[i] = merged.kept * out_reg[i] + merged.added * fa::widen(step_reg[i]);
        fa::store_rounded(out + d, out_reg);
    }
}
