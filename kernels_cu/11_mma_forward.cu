// /// kernel
// title = "mma.sync by hand: scores, P and O never leave the registers"
// dtypes = ["float16", "bfloat16", "tf32"]
// head_dims = [32, 64, 128]
// arch = ">=sm_80"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"  # float32 files: tf32
// aliases = ["kernel_mma"]
// spill_bytes_allowed = 60  # of sm_100; none elsewhere (tests/device/test_compile_all.py)
// [tile]
// WARP_ROWS = 32  # queries of a warp
// WARPS = 4
// BLOCK_K = "64 if HEAD_DIM <= 64 else 32"
// BLOCKS = 2      # on a multiprocessor, for the compiler: how many registers a thread may have
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, WARPS * WARP_ROWS)", "heads_q", "batch"]
// block = "32 * WARPS"
// shared = "sizeof_dtype * HEAD_DIM * (WARPS * WARP_ROWS + 2 * BLOCK_K)"
// ///
//
// Step 11, read against step 10. mma.sync instead of WMMA: scores, P and O never leave the registers. WMMA leaves the layout of fragments
// unspecified, so in step 10 every score goes through shared memory: to find its row maximum, and to become an operand again. PTX
// specifies it. mma.sync is the instruction that WMMA is made of, a product of 16 x 16 by 16 x 8 elements, and with group = lane / 4,
// pair = 2 * (lane % 4) a lane holds
//
//     of S, an accumulator   rows group and group + 8, columns pair and pair + 1
//     of P, an operand       the same, of two accumulators side by side, two 16-bit elements a register
//
// Everything follows from this layout:
//   - A row of S is split over the 4 lanes of a quad. Its row maximum takes two shuffles, and a lane keeps row maximum and row sum in a
//     register for each of its rows (fa/softmax.cuh).
//   - The accumulators of S = Q K^T, rounded and packed, are the A operand of O += P V: no data moves between lanes.
//   - O is rescaled in the registers where it is. (Step 10 had to load a matrix of factors.)
// Shared memory holds Q, K and V only, and a tile needs two barriers, for K and V. The warps share the block's K and V, never its queries,
// so they exchange nothing else. Tiles are those of step 10: a warp owns 32 queries, two fragments, and uses each fragment of K and V
// twice. Operands come by ldmatrix: 8 rows of 16 bytes an instruction, distributed over the lanes as mma wants them; with .trans the
// transposed matrix, which makes V an operand without a copy of it.
//
// float32 files are multiplied as tf32: 8 bits of exponent, a mantissa of 10 bits, at half the rate of 16-bit operands. The error is that
// of float16 without its short range. Two things differ: a row's 16 bytes are 4 elements instead of 8, and ldmatrix cannot transpose
// 32-bit elements, so V comes by plain loads (fa/tf32.cuh).
//
// The limits that remain: the rows of a tile are 256 bytes apart, a multiple of 128, so the 8 rows that ldmatrix reads lie in the same 4
// banks of shared memory and take 8 cycles instead of 1, for every operand. The tensor cores stall seven eighths of the time. Q is loaded
// from shared memory again for each tile of keys. All warps wait until K and V have arrived. And O is stored 4 bytes a lane at a time.
//
// More than 60 lines differ from step 10, and more than twice as many of them are removed as added: the WMMA loops, the trip of S and P
// through shared memory and the matrix of factors become calls of fa/fragment.cuh, fa/softmax.cuh and fa/epilogue.cuh, whose text the
// steps from here on share.
#include <fa/epilogue.cuh>
#include <fa/tf32.cuh>

using scalar = fa::DTYPE;

constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = BLOCK_K / 8, COLUMNS = HEAD_DIM / 8;
constexpr int WIDTH = HEAD_DIM * int(sizeof(scalar)) / 2;  // of a tile in 16-bit elements, ldmatrix's unit

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS, false>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS, false>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM]
    const fa::uint32_t k_smem = q_smem + BLOCK_Q * WIDTH * 2;     // [BLOCK_K][HEAD_DIM]
    const fa::uint32_t v_smem = k_smem + BLOCK_K * WIDTH * 2;     // [BLOCK_K][HEAD_DIM]

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
    const fa::OperandA<WIDTH, M, false, false> q{fa::lane_of_a<WIDTH, false>(q_smem, warp_row)};
    const fa::uint32_t k_lane = fa::lane_of_b<WIDTH, false>(k_smem);

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
        fa::multiply_pv<scalar, HEAD_DIM>(out_reg, score_reg, v_smem);
    }
    softmax.finish();

    // Epilogue: O / row sum and the logsumexp, from the fragments to global memory
    fa::store_output<scalar>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
