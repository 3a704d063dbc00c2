// /// kernel
// title = "Step 07 at head dim 128 with padded rows in place of the swizzle"
// dtypes = ["float32"]
// head_dims = [128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// BLOCK_Q = 128
// BLOCK_K = 128
// P_KEYS = 64  # keys whose P is in shared memory at a time
// S_STEPS = 4  # steps of four columns of S in the loop's body
// P_STEPS = 8  # keys of P V in the loop's body
// AHEAD = 0  # 1: the first operands of a step are loaded in the step before
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "BLOCK_Q * 2"
// shared = "4 * (BLOCK_Q * HEAD_DIM + BLOCK_K * (HEAD_DIM + 4) + BLOCK_K * HEAD_DIM + P_KEYS * (BLOCK_Q + 4))"
// ///
//
// Against step 07: no swizzle (rows are padded), a softmax for tiles without masked keys, copies of whole tiles without bounds.
#include "keys.cuh"
