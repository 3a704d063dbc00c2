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
// The running O and logsumexp are float32 and normalised after every step, so their magnitude is that of an attention output. O is
// rounded to the storage type once, after the last step (round.cu). The limit is global memory: 10 bytes an element in 16 bit. Where the
// running logsumexp is -inf, nothing was summed before: the running O is not read, and need not be cleared, which leaves 6 bytes.
//
// The tensors in fa::Args:  Q: O of the step, (batch, heads, rows, head_dim), storage type   K: its logsumexp, float32
//                           O: running O, float32                                            logsumexp: running logsumexp
// Rows of all of them have room for whole vectors of 16 bytes of the storage type.
#include <fa/copy.cuh>
#include <fa/merge.cuh>
#include <fa/warp.cuh>

using scalar = fa::DTYPE;

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
    float* out = fa::row_pointer<float>(args.O, batch, head, row);                 // [head_dim]
    for (int d = lane * vec; d < args.head_dim; d += LANES * vec) {
        const fa::Vec128<scalar> step_reg = fa::load_128(step + d);
#pragma unroll
        for (int part = 0; part < vec; part += 4) {
            fa::Vec<float, 4> out_reg{};
            if (!first) out_reg = fa::load_vec<4>(out + d + part);
#pragma unroll
            for (int i = 0; i < 4; ++i) out_reg[i] = merged.kept * out_reg[i] + merged.added * fa::widen(step_reg[part + i]);
            fa::store_vec(out + d + part, out_reg);
        }
    }
}
