// /// kernel
// title = "cp.async double buffering: the next K and V arrive while the tensor cores multiply"
// dtypes = ["float16", "bfloat16"]
// head_dims = [32, 64, 128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"
// [tile]
// WARP_ROWS = 32  # queries of a warp
// WARPS = 4
// BLOCK_K = "64 if shared_optin > 163840 or HEAD_DIM <= 64 else 32"  # two blocks are to fit on a multiprocessor
// STEP_K = "64 if HEAD_DIM <= 64 else 16"  # keys of a softmax step: the registers that are left for S
// BLOCKS = 2      # on a multiprocessor, for the compiler: how many registers a thread may have
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * HEAD_DIM * max(WARPS * WARP_ROWS, 4 * BLOCK_K)"
// ///
//
// Step 14, read against step 13. cp.async double buffering: the next tiles of K and V arrive while the tensor cores multiply. In step 13
// a tile comes through registers: a thread loads, stalls, stores and synchronises with the others, and only then do the tensor cores have
// work. cp.async copies 16 bytes from global to shared memory without a register and without a stall. So K and V have two stages each:
// while the block multiplies with one, the other is being filled.
//
//     prologue            Q is copied and goes to registers; the copies of K(0) and V(0) start, into the place of Q
//     main loop, tile n   1. wait for K(n) and V(n), synchronise: K(n - 1) and V(n - 1) have been read by all warps,
//                            so the copies of K(n + 1) and V(n + 1) start into their stages
//                         2. softmax steps of 16 keys, as in step 13
//     epilogue            as in step 13
//
// Why it is faster: in step 13 an instruction takes 5.7 cycles, of which 1.4 are a wait for global memory, the most of all causes (ncu,
// docs/notes). Here a copy has a whole tile's time to arrive. And a tile has one __syncthreads where step 13 has two: the copies overwrite
// the other stage, so that one barrier says both that a tile has arrived and that the one before has been read.
//
// cp.async copies bytes as they are. A negative scale's sign, which step 13 put into Q on the way through registers, goes into the tile in
// shared memory (apply_sign). Rows and columns beyond the tensors become zeros as before: a copy is told how many bytes it may read.
//
// The price is shared memory, 64 KB a block at head dim 128 where step 13 has 32. Two blocks on a multiprocessor take 128 KB, which sm_80
// and sm_90 have. Where a block may have no more than 99 KB (sm_89, sm_120) a tile has 32 keys.
//
// The limits that remain. The first tile is waited for with nothing to multiply. In a softmax step of 16 keys S has only 4 accumulators a
// warp, so each mma depends on the one before it, and P V has to wait for that softmax. Step 15 has S of a whole tile, and a tile ahead.
#include <fa/epilogue.cuh>

using scalar = fa::DTYPE;

constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = STEP_K / 8, COLUMNS = HEAD_DIM / 8;
static_assert(BLOCK_K % STEP_K == 0, "a tile of keys is whole steps of the softmax");
static_assert((BLOCK_K & (BLOCK_K - 1)) == 0, "a tile's stage is a bit of its first key");
constexpr fa::uint32_t TILE = BLOCK_K * HEAD_DIM * 2;  // bytes of a K or V tile

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM]; O in the epilogue
    const fa::uint32_t k_smem = q_smem;                              // [BLOCK_K][HEAD_DIM]: two stages, each K and V
    const fa::uint32_t v_smem = k_smem + BLOCK_K * HEAD_DIM * 2;     // [BLOCK_K][HEAD_DIM]

    // This block's work. Under the causal mask the last query tiles see the most keys: they start first, short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = fa::warp_id() * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);    // what the last query sees is what any query of the block sees
    const int unmasked = fa::visible_keys(args, q_first);  // what every query of the block sees

    // The largest S is the largest logit only where the scale is positive. A negative scale is applied as its absolute
    // value here and its sign in Q, exactly; for a scale of 0 Q is 0.
    const float scale = args.scale == 0 ? 1.0f : fabsf(float(args.scale)), scale_log2e = scale * fa::log2e;

    // The next tile to be copied: two pointers that advance
    const scalar* k_gmem = fa::row_pointer<scalar>(args.K, batch, kv_head, 0);
    const scalar* v_gmem = fa::row_pointer<scalar>(args.V, batch, kv_head, 0);
    const int k_pitch = int(args.K.row), v_pitch = int(args.V.row);

    // Prologue: Q; K(0), V(0)
    QCopy::copy_async(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first, args.head_dim);
    fa::cp_async_commit_group();
    fa::OperandA<HEAD_DIM, M, true> q{fa::lane_of_a<HEAD_DIM>(q_smem, warp_row)};
    // of_a for V too: with .trans a lane reads V as two B operands
    const fa::uint32_t k_lane = fa::lane_of_b<HEAD_DIM>(k_smem), v_lane = fa::lane_of_a<HEAD_DIM>(v_smem);

    float out_reg[M][COLUMNS][4] = {};  // O, not yet divided by the row sum
    fa::Softmax<M> softmax;
    fa::cp_async_wait_group<0>();
    __syncthreads();  // Q has arrived
    QCopy::apply_sign(fa::dynamic_shared<scalar>(), args.scale);
    q.load_registers();
    __syncthreads();  // all warps have read Q: K(0) and V(0) take its place
    if (keys > 0) KCopy::copy_async(k_smem, k_gmem, k_pitch, keys, args.head_dim);
    if (keys > 0) KCopy::copy_async(v_smem, v_gmem, v_pitch, keys, args.head_dim);
    fa::cp_async_commit_group();

    // Main loop over tiles of keys
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        const int next = k_first + BLOCK_K;
        const fa::uint32_t stage = (k_first & BLOCK_K) * (2 * TILE / BLOCK_K);  // of tile n, in bytes: 0 or 2 * TILE
        fa::cp_async_wait_group<0>();
        __syncthreads();  // K(n) and V(n) have arrived; all warps have read K(n - 1) and V(n - 1)
        if (next < keys) {
            k_gmem += BLOCK_K * k_pitch;
            v_gmem += BLOCK_K * v_pitch;
            KCopy::copy_async(k_smem + (stage ^ (2 * TILE)), k_gmem, k_pitch, keys - next, args.head_dim);
            KCopy::copy_async(v_smem + (stage ^ (2 * TILE)), v_gmem, v_pitch, keys - next, args.head_dim);
        }
        fa::cp_async_commit_group();

#pragma unroll 1  // not more: fragments loaded ahead take registers
        for (int step = 0; step < min(BLOCK_K, keys - k_first); step += STEP_K) {
            // S = Q K^T
            float score_reg[M][KEYS][4] = {};
            fa::multiply_abt<scalar>(score_reg, q, k_lane + stage + step * HEAD_DIM * 2);
            if (k_first + step + STEP_K > unmasked)
                fa::mask_scores(score_reg, args, q_first + warp_row + fa::fragment_row(), k_first + step);
            // P = exp(scale * (S - row max)), unnormalised: the online softmax, which rescales O lazily
            softmax.step_lazily(score_reg, out_reg, scale_log2e, SLACK);

            // O += P V, with P in registers
            fa::uint32_t p_reg[KEYS / 2][M][4];
            fa::pack_a<scalar>(p_reg, score_reg);
            fa::multiply_pb<scalar, HEAD_DIM>(out_reg, p_reg, v_lane + stage + step * HEAD_DIM * 2);
        }
    }
    softmax.finish();

    // Epilogue: O / row sum through shared memory and the logsumexp, to global memory
    __syncthreads();  // all warps have read V: O takes its place
    fa::store_output_smem<scalar, HEAD_DIM>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
