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
// Step 11. WMMA does not say which lane holds what of a fragment, so in step 10 every score goes through shared memory: to learn its
// row's maximum, and to become an operand again. PTX does say. mma.sync is the instruction that WMMA is made of, a product of 16 x 16 by
// 16 x 8 numbers, and with group = lane / 4, pair = 2 * (lane % 4) a lane holds
//
//     of S, an accumulator   rows group and group + 8, columns pair and pair + 1
//     of P, an operand       the same, of two accumulators side by side, two numbers of 16 bit a register
//
// Everything follows from this:
//   - A row of S belongs to 4 lanes of one warp. Its maximum is two shuffles away, and a lane keeps it and the sum in a register for
//     each of its rows (fa/softmax.cuh).
//   - What comes out of S = Q K^T goes into O += P V where it lies: rounded and packed, nothing moves between lanes.
//   - O is scaled by its row's factor in the registers where it is. (Step 10 had to load a matrix of factors to hit the right ones.)
// No score ever sees shared memory; it holds Q, K and V only, and two barriers a tile are for K and V. The warps share the block's K and
// V, never its queries, so they have nothing else to tell each other. Tiles are those of step 10: a warp owns 32 queries, two fragments,
// and uses each fragment of K and V twice. Their operands come by ldmatrix: 8 rows of 16 bytes an instruction, spread over the lanes
// as mma wants them; with .trans the transposed, which is what makes V an operand without a copy of it.
//
// float32 files are multiplied as tf32: 8 bits of exponent, 10 behind the point, which tensor cores take at half the rate. The error is
// that of float16 without its short range. fa/tf32.cuh has the two products. They differ from the others in two places: a row's 16 bytes
// are 4 numbers instead of 8, and there is no ldmatrix that transposes 32-bit numbers, so V comes by plain loads.
//
// What is still bad: the rows of a tile are 256 bytes apart, a multiple of 128, so the 8 rows that ldmatrix reads lie in the same 4
// banks of shared memory and come one after the other: 8 cycles instead of 1, for every operand. The tensor cores wait seven eighths of
// the time. Q is read again for each tile of keys. All warps wait until K and V are there. And O leaves 4 bytes a lane at a time.
#include <fa/epilogue.cuh>
#include <fa/tf32.cuh>

using scalar = fa::DTYPE;

constexpr int BLOCK_Q = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, KEYS = BLOCK_K / 8, COLUMNS = HEAD_DIM / 8;
constexpr int WIDTH = HEAD_DIM * int(sizeof(scalar)) / 2;  // of a tile, in 16-bit numbers: ldmatrix knows no others

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::TileCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS, false>;
    using KCopy = fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS, false>;
    const fa::uint32_t q_smem = fa::smem_u32(fa::dynamic_shared());  // [BLOCK_Q][HEAD_DIM]
    const fa::uint32_t k_smem = q_smem + BLOCK_Q * WIDTH * 2;     // [BLOCK_K][HEAD_DIM]
    const fa::uint32_t v_smem = k_smem + BLOCK_K * WIDTH * 2;     // [BLOCK_K][HEAD_DIM]

    // Under the causal mask the last query tiles see the most keys. They start first; short ones fill the end of the launch.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int warp_row = fa::warp_id() * WARP_ROWS;
    const int keys = fa::visible_keys(args, q_end - 1);    // what the last query sees is what any query of the block sees
    const int unmasked = fa::visible_keys(args, q_first);  // what every query of the block sees

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one goes into Q, exactly; for a scale
    // of 0 Q is 0.
    const float scale = args.scale == 0 ? 1.0f : fabsf(float(args.scale)), scale_log2e = scale * fa::log2e;

    QCopy::copy_sync(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first,
                     args.scale == 0 ? 0 : args.head_dim, args.scale < 0 ? fa::sign_bits<scalar> : 0);
    const fa::OperandA<WIDTH, M, false, false> q{fa::lane_of_a<WIDTH, false>(q_smem, warp_row)};
    const fa::uint32_t k_lane = fa::lane_of_b<WIDTH, false>(k_smem);

    float out_reg[M][COLUMNS][4] = {};  // O, not yet divided by the sum
    fa::Softmax<M> softmax;

    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // nobody reads the tile before any more
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile, and before the first one Q, is there for all

        // S = Q K^T
        float score_reg[M][KEYS][4] = {};
        fa::multiply_abt<scalar>(score_reg, q, k_lane);
        if (k_first + BLOCK_K > unmasked) fa::mask_scores(score_reg, args, q_first + warp_row + fa::fragment_row(), k_first);
        // P = exp(scale * (S - max)), unnormalised
        softmax.step(score_reg, out_reg, scale_log2e);

        // O += P V
        fa::multiply_pv<scalar, HEAD_DIM>(out_reg, score_reg, v_smem);
    }
    softmax.finish();
    fa::store_output<scalar>(args, batch, head, q_first, warp_row, q_end, out_reg, softmax, scale);
}
