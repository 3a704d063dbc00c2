// /// kernel
// title = "Step 07 at head dim 128: 8 x 8 scores in tiles of 128 keys, lanes of two row groups interleaved"
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
// INTERLEAVED = 1  # 1: lane 2 n + g of a warp is lane n of row group g; 0: lane 16 g + n
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
// Against step 07: 8 x 8 scores of 128 keys, no swizzle (rows are padded), cp.async, P in two halves, interleaved lanes.
#include "keys.cuh"
