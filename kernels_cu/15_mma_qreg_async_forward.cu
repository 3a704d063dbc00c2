// /// kernel
// title = "cp.async and S one tile ahead of V: both products of an iteration are adjacent"
// dtypes = ["float16", "bfloat16"]
// head_dims = [32, 64, 96, 128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// mask = true
// score = true
// sinks = true
// arithmetic = "p16"
// aliases = ["kernel_mma_qreg_async"]
// spill_bytes_allowed = 8  # of sm_100, before the loop; none elsewhere (tests/device/test_compile_all.py)
// [tile]
// WARP_ROWS = 32  # queries of a warp
// WARPS = 4
// BLOCK_K = "32 if HEAD_DIM > 64 and (score or shared_optin <= 200000) else 64"  # two blocks fit on a multiprocessor; a score takes registers
// BLOCKS = 2      # on a multiprocessor, for the compiler: how many registers a thread may have
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * HEAD_DIM * (WARPS * WARP_ROWS + 4 * BLOCK_K)"
// ///
//
// Step 15, read against step 14. S one tile ahead of V: an iteration multiplies P with V(n) and then Q with K(n + 1). In step 14 both
// products of an iteration are those of the same keys, so P V waits for the softmax of the scores that have just been computed.
//
//     prologue            Q, K(0) are copied; the copies of V(0), K(1) start; S(0) = Q K(0)^T
//     main loop, tile n   1. wait for V(n) and K(n + 1), synchronise: V(n - 1) and K(n) have been read by all warps,
//                            so the copies of V(n + 1) and K(n + 2) start into their stages
//                         2. online softmax of S(n), O += P V(n)
//                         3. S(n + 1) = Q K(n + 1)^T
//     epilogue            O / row sum to the shared memory of Q, and from there to global memory
//
// As in step 14 there is one __syncthreads a tile, and each copy has a whole tile's time (5000 cycles) to arrive. S runs ahead for two
// reasons. The prologue needs only Q and K to start: V(0) and K(1) arrive during the first product. And the two products of an iteration
// are adjacent, 256 mma without a barrier between them. (With S and V of one tile in one iteration the kernel was 1 to 3 % slower, under
// the causal mask 7 %.)
//
// What is a tile ahead is S of the whole tile: one softmax step of 64 keys instead of four of 16. At head dim 128 O takes 128 of 255
// registers and S of 64 keys 64. Q does not fit beside them. It stays in shared memory, which has a place for it again, and is read once
// for 64 keys, not for 32 as in step 12. S in one piece is worth more than that read costs: a step of 16 keys has only 4 accumulators to
// add to, and each mma depends on the one before it. At head dim 64 both fit. Measured and slower (docs/notes): 16 queries a warp with 8
// or 12 warps, 32 keys, the next S beside this softmax.
//
// A mask of the problem's own (fa/score.cuh) leaves out tiles of keys that no query of the block sees, so n counts those that are left. A
// score takes the place of scale * S before the softmax, a sink enters behind the last tile.
//
// The distance to the limit of mma.sync: with nothing around it, mma.sync runs at 649 TFLOP/s on an H200 (`ceiling-mma-bfloat16` of
// `experiment ladder`). This kernel reaches 0.59 of that; ncu, without power limit, sees the tensor pipe busy for 65 % of the cycles. Two
// warps share a tensor core. While both are in their softmax, it idles; two more warps would need the registers of O. Step 16
// begins to change that: wgmma takes operands from shared memory and runs asynchronously.
#include <fa/epilogue.cuh>

using scalar = fa::DTYPE;

constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = BLOCK_K / 8, COLUMNS = HEAD_DIM / 8;
constexpr bool Q_IN_REG = WARP_ROWS * HEAD_DIM <= 2048;  // as fragments: WARP_ROWS * HEAD_DIM / 64 registers
static_assert((BLOCK_K & (BLOCK_K - 1)) == 0, "a tile's stage is a bit of its first key");
constexpr fa::uint32_t TILE = BLOCK_K * HEAD_DIM * 2;  // bytes of a K or V tile

// How far a pointer goes over so many rows: from a tile to the next in 32 bits, over all those that a mask hides in 64.
__device__ __forceinline__ auto rows_of(int rows, int pitch) {
    if constexpr (fa::has_mask) return fa::int64_t(rows) * pitch;
    else return rows * pitch;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM]; O in the epilogue
    const fa::uint32_t k_smem = q_smem + BLOCK_Q * HEAD_DIM * 2;  // [BLOCK_K][HEAD_DIM]: two stages, each K and V
    const fa::uint32_t v_smem = k_smem + BLOCK_K * HEAD_DIM * 2;  // [BLOCK_K][HEAD_DIM]

    // This block's work. Under the causal mask the last query tiles see the most keys: they start first, short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = fa::warp_id() * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);  // what the last query sees is what any query of the block sees
    const int unmasked = fa::visible_keys(args, q_first);  // what every query of the block sees

    // The largest S is the largest logit only where the scale is positive. A negative scale is applied as its absolute
    // value here and its sign in Q, exactly; for a scale of 0 Q is 0.
    const float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;

    // The first tile of keys from `key` on of which some query sees a key: a mask of the problem's own may hide whole ones.
    const auto seen_from = [&](int key) { return fa::next_keys<BLOCK_K>(args, batch, head, q_first, BLOCK_Q, key, keys); };
    const int k_start = seen_from(0), second = seen_from(k_start + BLOCK_K);

    // The next tile to be copied. Two pointers that advance, not indices: the loop has no register for a product of 64 bits.
    const scalar* k_gmem = fa::row_pointer<scalar>(args.K, batch, kv_head, k_start);
    const scalar* v_gmem = fa::row_pointer<scalar>(args.V, batch, kv_head, k_start);
    const int k_pitch = int(args.K.row), v_pitch = int(args.V.row);

    // Prologue: Q, K(0); V(0), K(1); S(0) = Q K(0)^T
    QCopy::copy_async(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first, args.head_dim);
    if (keys > k_start) KCopy::copy_async(k_smem, k_gmem, k_pitch, keys - k_start, args.head_dim);
    fa::cp_async_commit_group();
    if (keys > k_start) KCopy::copy_async(v_smem, v_gmem, v_pitch, keys - k_start, args.head_dim);
    k_gmem += rows_of(second - k_start, k_pitch);
    if (keys > second) KCopy::copy_async(k_smem + 2 * TILE, k_gmem, k_pitch, keys - second, args.head_dim);
    fa::cp_async_commit_group();

    fa::OperandA<HEAD_DIM, M, Q_IN_REG> q{fa::lane_of_a<HEAD_DIM>(q_smem, warp_row)};
    const fa::uint32_t k_lane = fa::lane_of_b<HEAD_DIM>(k_smem), v_lane = fa::lane_of_a<HEAD_DIM>(v_smem);
    float out_reg[M][COLUMNS][4] = {};  // O, not yet divided by the row sum
    fa::Softmax<M> softmax;
    fa::cp_async_wait_group<1>();
    __syncthreads();  // Q and K(0) have arrived
    QCopy::apply_sign(fa::dynamic_shared<scalar>(), args.scale);
    q.load_registers();
    float score_reg[M][KEYS][4] = {};
    if (keys > k_start) fa::multiply_abt<scalar>(score_reg, q, k_lane);

    // Main loop over tiles of keys
    [[maybe_unused]] fa::uint32_t turn = 0;
    for (int k_first = k_start, next; k_first < keys; k_first = next, turn ^= 2 * TILE) {
        next = seen_from(k_first + BLOCK_K);
        // Of tile n, in bytes: 0 or 2 * TILE. Where no tile is left out its number says which.
        const fa::uint32_t stage = fa::has_mask ? turn : (k_first & BLOCK_K) * (2 * TILE / BLOCK_K);
        fa::cp_async_wait_group<0>();
        __syncthreads();  // V(n) and K(n + 1) have arrived; all warps have read V(n - 1) and K(n)
        if (next < keys) {
            v_gmem += rows_of(next - k_first, v_pitch);
            KCopy::copy_async(v_smem + (stage ^ (2 * TILE)), v_gmem, v_pitch, keys - next, args.head_dim);
            const int step = seen_from(next + BLOCK_K) - next;
            if (next + step < keys) {
                k_gmem += rows_of(step, k_pitch);
                KCopy::copy_async(k_smem + stage, k_gmem, k_pitch, keys - next - step, args.head_dim);
            }
        }
        fa::cp_async_commit_group();

        const int row = q_first + warp_row + fa::fragment_row();
        if constexpr (fa::has_score) fa::apply_score(score_reg, args, batch, head, row, k_first, fabsf(float(args.scale)));
        if (k_first + BLOCK_K > unmasked) fa::mask_scores(score_reg, args, row, k_first);
        if (fa::has_mask && !fa::visible_in(args, batch, head, q_first, BLOCK_Q, k_first, BLOCK_K).must)
            fa::hide_scores(score_reg, args, batch, head, row, k_first);
        // P = exp(scale * (S - row max)), unnormalised: the online softmax, which rescales O lazily
        softmax.step_lazily(score_reg, out_reg, fa::has_score ? fa::log2e : scale_log2e, SLACK);

        // O += P V, with P in registers; then the next S
        fa::uint32_t p_reg[KEYS / 2][M][4];
        fa::pack_a<scalar>(p_reg, score_reg);
        fa::multiply_pb<scalar, HEAD_DIM>(out_reg, p_reg, v_lane + stage);
        if (next < keys) {
            fa::clear(score_reg);
            fa::multiply_abt<scalar>(score_reg, q, k_lane + (stage ^ (2 * TILE)));
        }
    }
    softmax.finish();
    // The scale of the logsumexp is recomputed from scale_log2e: the main loop has no register for it.
    float scale = fa::has_score ? 1.0f : scale_log2e * fa::ln2;
    if constexpr (fa::has_sinks) softmax.add_sink(args, head, out_reg, scale);

    // Epilogue: O / row sum through the shared memory of Q and the logsumexp, to global memory
    fa::cp_async_wait_group<0>();  // a block without keys has not waited for Q yet
    __syncthreads();
    fa::store_output_smem<scalar, HEAD_DIM>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
