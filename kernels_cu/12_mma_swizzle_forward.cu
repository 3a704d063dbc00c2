// /// kernel
// title = "swizzled tiles: shared memory without bank conflicts"
// dtypes = ["float16", "bfloat16"]
// head_dims = [32, 64, 128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"
// aliases = ["kernel_mma_swizzle"]
// spill_bytes_allowed = 16  # of sm_100; none elsewhere (tests/device/test_compile_all.py)
// [tile]
// WARP_ROWS = 32  # queries of a warp
// WARPS = 4
// BLOCK_K = "64 if HEAD_DIM <= 64 else 32 if shared_optin > 163840 else 16"
// BLOCKS = 2      # on a multiprocessor, for the compiler: how many registers a thread may have
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "2 * HEAD_DIM * (WARPS * WARP_ROWS + 2 * BLOCK_K)"
// ///
//
// Step 12, read against step 11. Swizzled tiles: shared memory without bank conflicts. In step 11 ldmatrix reads 8 rows of a tile at one
// chunk of 16 bytes. Shared memory delivers 128 bytes a cycle, 8 such chunks, if they lie in different banks. The rows of a tile are 256
// bytes apart (head dim 128), twice around the banks, so the 8 chunks lie in the same 4 banks and take 8 cycles. For 32 keys a warp reads
//
//     Q   2 x 8  ldmatrix_x4     (32 queries, 128 columns; again for every tile of keys)
//     K   2 x 8
//     V   2 x 8                  48, each 4 x 8 rows: 192 cycles without conflicts, 1536 with them
//
// and multiplies 128 times 16 x 8 x 16, for which the four tensor cores together take about 200 cycles.
//
// The swizzle: chunk c of row r is stored in place of chunk c ^ (r % 8). Rows keep their place and their length, only the chunks inside
// 128 bytes are permuted, and 8 neighbouring rows get 8 different permutations: the 8 chunks of an ldmatrix lie in 8 different places of
// the line (fa/fragment.cuh). The kernel's text hardly changes: the words that write a tile and those that read it agree on a layout, and
// step 11 asked them for plain rows (Swizzled = false). The swizzle costs next to no instructions. A lane of ldmatrix always reads the
// same row of each 8, so the XOR with its row is done once; from one step of 16 columns to the next the address changes by an XOR with a
// constant. And it costs no memory, as padding the rows would.
//
// The limits that remain, no longer hidden by the conflicts: a third of the shared-memory reads fetch Q, the same elements for every tile
// of keys. O is stored 4 bytes a lane at a time. And in each tile all warps wait until K and V have arrived from global memory.
#include <fa/epilogue.cuh>

using scalar = fa::DTYPE;

constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = BLOCK_K / 8, COLUMNS = HEAD_DIM / 8;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM]
    const fa::uint32_t k_smem = q_smem + BLOCK_Q * HEAD_DIM * 2;     // [BLOCK_K][HEAD_DIM]
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

    // Prologue: Q
    QCopy::copy_sync(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first,
                     args.scale == 0 ? 0 : args.head_dim, args.scale < 0 ? fa::sign_bits<scalar> : 0);
    const fa::OperandA<HEAD_DIM, M, false> q{fa::lane_of_a<HEAD_DIM>(q_smem, warp_row)};
    const fa::uint32_t k_lane = fa::lane_of_b<HEAD_DIM>(k_smem), v_lane = fa::lane_of_a<HEAD_DIM>(v_smem);

    float out_reg[M][COLUMNS][4] = {};  // O, not yet divided by the row sum
    fa::Softmax<M> softmax;

    // Main loop over tiles of keys
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // all warps have read the tile before
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile, and before the first one Q, has arrived

        // S = Q K^T
        float score_reg[M][KEYS][4] = {};
        fa::multiply_abt<scalar>(score_reg, q, k_lane);
        if (k_first + BLOCK_K > unmasked) fa::mask_scores(score_reg, args, q_first + warp_row + fa::fragment_row(), k_first);
        // P = exp(scale * (S - row max)), unnormalised: the online softmax, which rescales O
        softmax.step(score_reg, out_reg, scale_log2e);

        // O += P V, with P in registers
        fa::uint32_t p_reg[KEYS / 2][M][4];
        fa::pack_a<scalar>(p_reg, score_reg);
        fa::multiply_pb<scalar, HEAD_DIM>(out_reg, p_reg, v_lane);
    }
    softmax.finish();

    // Epilogue: O / row sum and the logsumexp, from the fragments to global memory
    fa::store_output<scalar>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
