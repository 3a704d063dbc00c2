// /// kernel
// title = "8 bits: e4m3 products, V transposed on the way, sums promoted to float32"
// dtypes = ["float8_e4m3"]
// head_dims = [64, 128, 256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p8"
// [tile]
// BLOCK_K = 128
// STAGES = 2     # tiles of K, of V as it lies, and of V^T
// PROMOTE = 128  # keys after which sums of P V are added to float32; 0: never
// [let]
// width = "max(HEAD_DIM, 128)"  # bytes of a row of Q, K and V
// vt = "HEAD_DIM * STAGES * BLOCK_K"  # bytes of V^T
// [tensor_map.q]
// tensor = "Q"
// box = [128, 128, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [128, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [128, "BLOCK_K", 1, 1]
// swizzle = 128
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, 128)", "heads_q", "batch"]
// block = 384
// shared = "width * (128 + 2 * STAGES * BLOCK_K) + vt + 8 * (1 + 6 * STAGES)"
// ///
//
// Step 31, read against step 17. Elements of 8 bits (e4m3): the tensor cores multiply twice as many a cycle as of 16, and K and V are half
// the bytes. Three things are new.
//
//     V^T       wgmma takes operands of 8 bits K-major only. The producer's warps transpose each tile of V in shared memory
//               (fa/accumulator_float8.cuh), behind its copy and before the consumers see it: the ring has stages for both
//     P         rounded to e4m3, whose numbers end at 448 and have 4 bits from 2^-6 on. P = 2^(scale S - reference + SHIFT) is at most
//               2^(SHIFT + SLACK), 431. Beyond the end it would be cut off without a sign of it; far below, small P would be 0
//     sums      Hopper keeps 13 bits of a sum of 8 bits (fa/wgmma_float8.cuh). Of 2500 keys whose V does not change its sign a sum that is
//               never promoted loses 4 %, on the CPU engine, one that is promoted after 128 keys 0.1 %. Here a product begins at 0 and
//               is added to O after PROMOTE keys. At head dim 256 it has half of the columns at a time, so that registers hold both
//
// What an element is worth, the descales of a batch and key head, is the problem's: those of Q and K come into the scale, that of V into
// the last factor. Row sums are of P before it is rounded. The bytes of a head dim of 64 lie in rows of 128, of which the second half is
// zeros and not multiplied.
//
// The producer waits for a stage of K and of V, then starts the copies of the next tile before it transposes this one, so a copy runs
// beside a transposition.
//
// The limits that remain. A consumer waits for each of its products: only the other consumer's softmax hides them. Steps 18 to 22 have the
// means: turns, persistent blocks, a softmax beside the consumer's own product.
#include <fa/accumulator_float8.cuh>
#include <fa/key_tiles.cuh>
#include <fa/stage.cuh>
#include <fa/wgmma_float8.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int CONSUMERS = 2;  // warpgroups
constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SLABS = (HEAD_DIM + 127) / 128;  // a tile lies in slabs of 128 columns: the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes
constexpr float SHIFT = 8, SLACK = 0.75f;  // P is at most 2^(SHIFT + SLACK)
constexpr float P_SCALE = 256;             // 2^SHIFT
constexpr int PIECE = HEAD_DIM == 256 && PROMOTE > 0 ? 128 : HEAD_DIM;  // columns of O of a product
constexpr int SUM_KEYS = PROMOTE > 0 ? PROMOTE : BLOCK_K;  // keys of a product
static_assert(BLOCK_K == 128, "a row of V^T is the swizzle's width, and each of the producer's warps transposes 32 keys");
static_assert(SUM_KEYS % 32 == 0 && BLOCK_K % SUM_KEYS == 0, "sums are promoted within a tile");

using Tiles = fa::KeyTiles<BLOCK_Q, BLOCK_K>;
using Work = Tiles::Work;

// The block's shared memory: tiles, and mbarriers for each: a phase of `full` ends when the tile has arrived, or is transposed, a phase of
// `empty` when all warps have read it.
struct Shared {
    unsigned char q[SLABS * Q_SLAB];  // [SLABS][BLOCK_Q][128]
    unsigned char k[STAGES][SLABS * K_SLAB], v[STAGES][SLABS * K_SLAB];  // each [SLABS][BLOCK_K][128]
    unsigned char vt[STAGES][HEAD_DIM * BLOCK_K];  // [HEAD_DIM][BLOCK_K]
    uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES], vt_full[STAGES], vt_empty[STAGES];
};

template <int Bytes>
__device__ __forceinline__ void load_tile(unsigned char (&tile_smem)[Bytes], const fa::TensorMap& map, uint64_t& full, int row, int head,
                                          int batch) {
    fa::mbarrier_arrive_expect_tx(&full, Bytes);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) fa::tma_load_4d(tile_smem + slab * (Bytes / SLABS), &map, &full, 128 * slab, row, head, batch);
}

// Copies, one thread's task, and the transposition, the warpgroup's.
struct Producer {
    Shared& shared;
    const Work& work;
    int kv_head;
    const fa::TensorMap &q_map, &k_map, &v_map;
    fa::RingPlace<STAGES> k, v, read, vt;  // read: of V, by the warps that transpose

    __device__ __forceinline__ void load_q() { load_tile(shared.q, q_map, shared.q_full, work.q_first, work.head, work.batch); }
    // The tile before in the stage has been released: for the first STAGES tiles a wait for the phase before the first, which passes.
    __device__ __forceinline__ void load(int n) {
        fa::mbarrier_wait_parity(&shared.k_empty[k.stage], k.parity ^ 1);
        load_tile(shared.k[k.stage], k_map, shared.k_full[k.stage], n * BLOCK_K, kv_head, work.batch);
        fa::mbarrier_wait_parity(&shared.v_empty[v.stage], v.parity ^ 1);
        load_tile(shared.v[v.stage], v_map, shared.v_full[v.stage], n * BLOCK_K, kv_head, work.batch);
        k.next(), v.next();
    }
    __device__ __forceinline__ void transpose() {
        fa::mbarrier_wait_parity(&shared.v_full[read.stage], read.parity);
        fa::mbarrier_wait_parity(&shared.vt_empty[vt.stage], vt.parity ^ 1);
        fa::transpose_keys<BLOCK_K, HEAD_DIM>(shared.vt[vt.stage], shared.v[read.stage], 32 * fa::warp_id());
        fa::fence_proxy_async_shared();
        __syncwarp();
        fa::release_stage(shared.v_empty, read);
        fa::release_stage(shared.vt_full, vt);
    }
};

// Attention of 64 queries: a warpgroup's task. A thread has parts of two rows, `row` and row + 8.
struct Consumer {
    Shared& shared;
    const Work& work;
    const fa::Args& args;
    int index, warp_row = fa::warp_id() % 4 * 16;  // index: of the block's consumers
    int first = work.q_first + 64 * index, row = first + warp_row + fa::fragment_row();  // first: of the 64 queries
    int kv_head = fa::kv_head_of(args, work.head);
    // The largest S is the largest logit only where the scale is positive: the sign of a negative one is applied to S.
    float scale = float(args.scale) * (fa::descale_of(args, 0, work.batch, kv_head) * fa::descale_of(args, 1, work.batch, kv_head));
    float scale_log2e = (scale == 0 ? 1.0f : fabsf(scale)) * fa::log2e;
    float score_reg[BLOCK_K / 2], out_reg[HEAD_DIM / 2] = {};
    uint32_t p_reg[BLOCK_K / 32][4];
    fa::RingPlace<STAGES> k, vt;
    float sum_reg[PIECE / 2];  // of P V, not yet promoted
    float reference[2] = {-1e30f, -1e30f}, row_sum[2] = {};  // P = 2^(scale_log2e S - reference + SHIFT)

    // S = Q K^T with the next tile of K.
    __device__ __forceinline__ void scores() {
        const uint64_t q_operand = fa::smem_descriptor_k_major(shared.q + index * 64 * 128);
        const uint64_t k_operand = fa::smem_descriptor_k_major(shared.k[k.stage]);
        fa::mbarrier_wait_parity(&shared.k_full[k.stage], k.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 32; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
        fa::wgmma_wait<0>(score_reg);
        fa::release_stage(shared.k_empty, k);
    }
    // Of SUM_KEYS keys, from step on, and the columns of a piece.
    template <int R> __device__ __forceinline__ void multiply(float (&to)[R], int piece, int first_step, bool accumulate) {
        const uint64_t v_operand = fa::smem_descriptor_k_major(shared.vt[vt.stage] + piece * PIECE * BLOCK_K);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < SUM_KEYS / 32; ++step)
            fa::wgmma_rs<scalar>(to, p_reg[first_step + step], fa::descriptor_advance(v_operand, (first_step + step) * 32),
                                 accumulate || step > 0);
        fa::wgmma_commit();
        fa::wgmma_wait<0>(to, p_reg);
    }
    // O += P V with the next tile of V^T.
    __device__ __forceinline__ void output() {
        fa::mbarrier_wait_parity(&shared.vt_full[vt.stage], vt.parity);
        if constexpr (PROMOTE == 0) multiply(out_reg, 0, 0, true);
        else {
#pragma unroll
            for (int piece = 0; piece < HEAD_DIM / PIECE; ++piece)
#pragma unroll
                for (int step = 0; step < BLOCK_K / 32; step += SUM_KEYS / 32) {
                    multiply(sum_reg, piece, step, false);
#pragma unroll
                    for (int i = 0; i < PIECE / 2; ++i) out_reg[piece * (PIECE / 2) + i] += sum_reg[i];
                }
        }
        fa::release_stage(shared.vt_empty, vt);
    }
    // S of tile n becomes P: the sign of the scale, -inf for keys that a query does not see, then an online softmax that rescales lazily.
    __device__ __forceinline__ void softmax(int n) {
        fa::apply_sign(score_reg, scale);
        if ((n + 1) * BLOCK_K > fa::visible_keys(args, first)) fa::mask_scores(score_reg, args, row, n * BLOCK_K);
        float maximum[2], sum[2];
        fa::local_row_max(maximum, score_reg);
        const bool grows = max(maximum[0] * scale_log2e - reference[0], maximum[1] * scale_log2e - reference[1]) > SLACK;
        if (__any_sync(fa::full_warp, grows)) {
            float factor[2];
            fa::raise_reference(reference, row_sum, factor, maximum, scale_log2e);
            fa::scale_rows(out_reg, factor);
        }
        const float lower[2] = {reference[0] - SHIFT, reference[1] - SHIFT};
        fa::exponentiate(score_reg, sum, scale_log2e, lower);
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        fa::pack_operand_8<scalar>(p_reg, score_reg);
    }
    // O / row sum, straight to global memory, and the logsumexp.
    __device__ __forceinline__ void store() {
        float inverse[2];
        fa::finish_row_sum(row_sum, inverse);
        const float descale = fa::descale_of(args, 2, work.batch, kv_head);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = row + 8 * half;
            if (query >= args.seq_q) continue;
            const float factor = inverse[half] * descale;
            fa::bfloat16* out = fa::row_pointer<fa::bfloat16>(args.O, work.batch, work.head, query) + fa::fragment_column();
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j)
                fa::store_vec_upto(out + 8 * j,
                                   fa::Vec<fa::bfloat16, 2>{fa::narrow<fa::bfloat16>(out_reg[4 * j + 2 * half] * factor),
                                                            fa::narrow<fa::bfloat16>(out_reg[4 * j + 2 * half + 1] * factor)},
                                   args.head_dim - 8 * j - fa::fragment_column());
        }
        // Exact: reference - SHIFT would round, and so would the logarithm of a sum 2^SHIFT as large.
        const float unshifted[2] = {row_sum[0] / P_SCALE, row_sum[1] / P_SCALE};
        fa::store_logsumexp(args, work.batch, work.head, row, reference, unshifted);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        fa::mbarrier_init(&shared.q_full, 1);  // one thread arrives, and announces bytes
        fa::mbarrier_init_ring(shared.k_full, shared.k_empty, 4 * CONSUMERS);  // each warp of each consumer arrives
        fa::mbarrier_init_ring(shared.v_full, shared.v_empty, 4);  // each warp of the producer
        for (int i = 0; i < STAGES; ++i) fa::mbarrier_init(&shared.vt_full[i], 4), fa::mbarrier_init(&shared.vt_empty[i], 4 * CONSUMERS);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const Work work = Tiles::of_block(args);
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<56>();
        Producer producer{shared, work, fa::kv_head_of(args, work.head), q_map, k_map, v_map};
        if (threadIdx.x == 0) producer.load_q(), producer.load(0);
        for (int n = 0; n < work.tiles; ++n) {
            if (threadIdx.x == 0 && n + 1 < work.tiles) producer.load(n + 1);
            __syncwarp();
            producer.transpose();
        }
        return;
    }
    fa::setmaxnreg_inc<224>();
    Consumer consumer{shared, work, args, fa::warpgroup_index() - 1};
    fa::mbarrier_wait_parity(&shared.q_full, 0);
    for (int n = 0; n < work.tiles; ++n) {
        consumer.scores();
        consumer.softmax(n);
        consumer.output();
    }
    consumer.store();
}
