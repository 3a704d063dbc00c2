// /// kernel
// title = "tensor cores through WMMA, one warp a block"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128]
// arch = { float16 = ">=sm_70", bfloat16 = ">=sm_80" }
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// arithmetic = "p16"
// [tile]
// BLOCK_K = 32  # keys of a tile
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, 16)", "heads_q", "batch"]
// block = 32
// shared = "2 * (16 + 2 * BLOCK_K) * HEAD_DIM + 16 * (6 * BLOCK_K + 64)"
// ///
//
// Step 08, read against step 07. Tensor cores through WMMA: a warp multiplies matrices, D (16 x 16) += A (16 x 16) B (16 x 16), 4096
// multiply-adds issued by 32 threads together. In step 07 a warp's instruction was 32 of them. WMMA is CUDA's interface to the tensor
// cores: a warp loads a fragment of each matrix from shared memory, multiplies, and stores a fragment. Operands are 16-bit elements,
// sums are float32. The algorithm is step 07's online softmax.
//
// WMMA has one restriction: which lane holds which element of a fragment is unspecified. The softmax works on rows, so the scores go
// through shared memory, where each element has an address:
//
//     S = Q K^T      fragments of Q (16 queries) and of K read by columns, HEAD_DIM / 16 products for each 16 keys
//     store S        to shared memory, as float32
//     softmax        8 lanes share a row; P, rounded to 16 bit, goes back to shared memory      (fa/wmma_tile.cuh: WarpSoftmax)
//     O += P V       fragments of P and V; O stays in accumulator fragments in registers
//
// Rescaling O also needs rows: where a row maximum grows, that row of O is multiplied by exp(old - new). O could make the same trip
// through shared memory, 8 KB there and 8 KB back at head dim 128 for every tile. It stays in registers instead, because all accumulators
// have the same unspecified layout. Each row's factor is written 16 times side by side, and that 16 x 16 matrix is loaded as an
// accumulator: register i of a lane then holds the factor of the row whose O is in register i of the same lane (scale_rows).
//
// A block is one warp with 16 queries, the smallest WMMA tile, so __syncthreads is as cheap as __syncwarp here. K and V are streamed in
// tiles of 32 keys. All shared memory of a block is 24 KB, and 9 blocks fit a multiprocessor of an H100. The accuracy is that of all
// tensor-core steps from here on ("p16"): S, row maxima and row sums are float32, and P is rounded once, to the type of V.
//
// The limits that remain, in the order of the steps that remove them:
//   - Each 16 queries load all of K and V for themselves: 2 MB at 4096 keys, 34 GB in all at B4 H16 S4096 D128.             step 09
//   - A fragment of K or V (512 bytes) is loaded for one product. Shared memory needs 4 cycles for the bytes, the tensor core 3 or 4
//     for the product: loading takes as long as multiplying, at best.                                                       step 10
//   - S and P go through shared memory only because WMMA hides the layout of fragments.                                     step 11
//   - Rows are 128 or 256 bytes apart, so 8 rows of a fragment begin in the same banks: each load takes 8 times its time.   step 12
//   - Q is loaded from shared memory again for each tile.                                                                   step 13
//   - While K and V are copied, the warp stalls.                                                                            step 14
//
// More than 60 lines differ from step 07 because both products and the softmax between them change their unit, from a thread's 8 x 8
// elements to a warp's fragments. Step 07's staging of K and V behind the products goes, too: it returns in step 14.
#include <fa/wmma_tile.cuh>

using scalar = fa::DTYPE;

constexpr int BLOCK_Q = 16, THREADS = 32;
constexpr int KEYS = BLOCK_K / 16, COLUMNS = HEAD_DIM / 16;  // fragments

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ fa::Args args) {
    using QCopy = fa::RowCopy<scalar, BLOCK_Q, HEAD_DIM, THREADS>;
    using KCopy = fa::RowCopy<scalar, BLOCK_K, HEAD_DIM, THREADS>;
    scalar* q_smem = fa::dynamic_shared<scalar>();                             // [BLOCK_Q][HEAD_DIM]
    scalar* k_smem = q_smem + BLOCK_Q * HEAD_DIM;                              // [BLOCK_K][HEAD_DIM]
    scalar* v_smem = k_smem + BLOCK_K * HEAD_DIM;                              // [BLOCK_K][HEAD_DIM]
    float* s_smem = reinterpret_cast<float*>(v_smem + BLOCK_K * HEAD_DIM);     // [16][BLOCK_K]
    float* rescale_smem = s_smem + 16 * BLOCK_K;                               // [16][16]
    scalar* p_smem = reinterpret_cast<scalar*>(rescale_smem + 16 * 16);        // [16][BLOCK_K]

    // This block's work. Under the causal mask the last query tiles see the most keys: they start first, short ones fill the end.
    const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int q_first = q_tile * BLOCK_Q, q_end = min(q_first + BLOCK_Q, args.seq_q);
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    const int keys = fa::visible_keys(args, q_end - 1);  // what the last query sees is what any query of the block sees

    // The largest S is the largest logit only where the scale is positive. The sign of a negative one is applied to Q, exactly.
    const float scale = fabsf(float(args.scale)), scale_log2e = scale * fa::log2e;

    // Prologue: Q
    QCopy::copy_sync(q_smem, fa::row_pointer<scalar>(args.Q, batch, head, q_first), int(args.Q.row), q_end - q_first, args.head_dim,
                     args.scale < 0 ? 0x80008000 : 0);

    fa::WmmaAccumulator out_reg[COLUMNS] = {};  // O, not yet divided by the row sum
    fa::WarpSoftmax<scalar, BLOCK_K> softmax;
    softmax.clear();

    // Main loop over tiles of keys
    for (int k_first = 0; k_first < keys; k_first += BLOCK_K) {
        __syncthreads();  // all warps have read the tile before
        KCopy::copy_sync(k_smem, fa::row_pointer<scalar>(args.K, batch, kv_head, k_first), int(args.K.row), keys - k_first, args.head_dim);
        KCopy::copy_sync(v_smem, fa::row_pointer<scalar>(args.V, batch, kv_head, k_first), int(args.V.row), keys - k_first, args.head_dim);
        __syncthreads();  // the tile, and before the first one Q, has arrived

        // S = Q K^T. K is stored by rows: read by columns it is the transpose.
        fa::WmmaAccumulator score_reg[KEYS] = {};
#pragma unroll 2  // not more: fragments loaded ahead take registers
        for (int d = 0; d < COLUMNS; ++d) {
            fa::WmmaA<scalar> q_reg;
            fa::wmma_load_a_row(q_reg, q_smem + 16 * d, HEAD_DIM);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                fa::WmmaBCol<scalar> k_reg;
                fa::wmma_load_b_col(k_reg, k_smem + 16 * n * HEAD_DIM + 16 * d, HEAD_DIM);
                fa::wmma_mma(score_reg[n], q_reg, k_reg);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS; ++n) fa::wmma_store_d_row(s_smem + 16 * n, score_reg[n], BLOCK_K);
        __syncwarp();

        softmax.update(p_smem, rescale_smem, s_smem, scale_log2e, args, q_first, k_first);
        __syncwarp();

        // O = rescale * O + P V
        fa::scale_rows(out_reg, rescale_smem);
#pragma unroll 1
        for (int n = 0; n < KEYS; ++n) {
            fa::WmmaA<scalar> p_reg;
            fa::wmma_load_a_row(p_reg, p_smem + 16 * n, BLOCK_K);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                fa::WmmaBRow<scalar> v_reg;
                fa::wmma_load_b_row(v_reg, v_smem + 16 * n * HEAD_DIM + 16 * c, HEAD_DIM);
                fa::wmma_mma(out_reg[c], p_reg, v_reg);
            }
        }
    }

    // Epilogue: O / row sum and the logsumexp to global memory
    const int rows = args.seq_q - q_first;
    __syncwarp();
    softmax.finish(rescale_smem, fa::row_pointer<float>(args.logsumexp, batch, head, q_first), rows, scale);
    __syncwarp();
    fa::scale_rows(out_reg, rescale_smem);
    fa::store_rows(fa::row_pointer<scalar>(args.O, batch, head, q_first), int(args.O.row), rows, args.head_dim, out_reg, s_smem);
}
