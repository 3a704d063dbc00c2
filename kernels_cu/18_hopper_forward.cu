// /// kernel
// title = "Hopper: TMA, wgmma, specialised warps and a softmax without a maximum"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128, 256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"
// [tile]
// CONSUMERS = "3 if HEAD_DIM == 64 else 2"  # warpgroups of 64 queries
// BLOCK_K = "128 if HEAD_DIM <= 128 else 64"
// STAGES = "4 if HEAD_DIM == 64 else 2"    # tiles of K, and of V, in shared memory
// Q_STAGES = "1 if HEAD_DIM == 256 else 2"
// K_FIRST = "1 if HEAD_DIM == 256 else 0"  # the next tile of queries is loaded behind its first tile of keys
// PINGPONG = 1  # the products of the consumers take turns
// PIN = 1       # the exponentials stay before the wait for O
// SECTION = "16 if HEAD_DIM <= 128 else 32"  # MB of K and V of the heads that run at the same time, under the causal mask
// MAXIMUM = 0   # 1: a row maximum for every tile, also in bfloat16
// [let]
// rounds_2 = "ceil_div(ceil_div(seq_q, 128) * heads_q * batch, sms)"  # of tiles of two consumers over the multiprocessors
// rounds_3 = "ceil_div(ceil_div(seq_q, 192) * heads_q * batch, sms)"
// rows = "Q_STAGES * 64 * CONSUMERS + 2 * STAGES * BLOCK_K"  # of Q, K and V in shared memory
// barriers = "5 * Q_STAGES * CONSUMERS + 4 * STAGES"
// [[choice]]
// when = "HEAD_DIM == 64 and causal and seq_q <= 1024"
// CONSUMERS = 2
// evidence = "NOTES.md, 18 hopper forward: S1024 causal 327 TFLOP/s for 302, S4096 457 for 498; between them not measured"
// [[choice]]
// when = "HEAD_DIM == 64 and not causal and rounds_2 == rounds_3 <= 2"
// CONSUMERS = 2
// evidence = "NOTES.md, 18 hopper forward, Few heads: B4 H8 S1024 1.18 by fa-cli tune; that two rounds are the bound is a sum"
// [[choice]]
// when = "HEAD_DIM == 256 and seq_kv > 1024"
// BLOCK_K = 80
// evidence = "not measured: no record has 80 keys beside 64"
// [[choice]]
// when = "HEAD_DIM <= 128 and causal and seq_kv >= 8192"
// SECTION = 32
// evidence = "NOTES.md, 18 hopper forward: S16384 D128 674 TFLOP/s for 656, D64 547 for 538; S4096 584 for 592; 8192 not measured"
// [[choice]]
// when = "HEAD_DIM == 256 and seq_kv >= 4096"
// SECTION = 64
// evidence = "NOTES.md, 18 hopper forward: causal S4096 611 TFLOP/s for 592, S16384 688 for 669, S1024 422 for 446"
// [workspace.counters]
// dtype = "float32"  # two integers
// size = "2"
// init = "zero_once"
// [tensor_map.q]
// tensor = "Q"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.o]
// tensor = "O"
// box = [64, 64, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "forward"
// grid = "min(sms, ceil_div(seq_q, 64 * CONSUMERS) * heads_q * batch)"
// block = "128 * (CONSUMERS + 1)"
// shared = "2 * HEAD_DIM * rows + 8 * barriers"
// ///
//
// Step 18, read against step 17. The tasks are divided as there, and the consumers take turns. Four things are new: blocks are persistent,
// storers send O, a consumer's softmax runs under its own second product, and the softmax has no maximum.
//
//     producer     one thread starts TMA copies of whole tiles into a ring of stages. It waits until a stage is empty, consumers until it
//                  is full: two mbarriers a stage, no __syncthreads
//     consumers    two or three warpgroups of 64 queries. wgmma takes its operands from shared memory and runs on while the warps go on
//     storers      a thread for each consumer sends O from shared memory by TMA, so that no consumer waits for a store
//
// Blocks are persistent: one on each multiprocessor takes tiles of queries from a counter. While the last products of one tile run, Q, K
// and V of the next arrive. Under the causal mask long tiles come first, within a section of heads (SECTION): few enough that
// K and V stay in the L2 cache, enough for two to four tiles a block, or blocks stand idle where sections meet.
// Each consumer's 64 queries are a piece of Q with barriers of its own: the mask ends the first consumer earlier, and it goes on alone.
// Where a head's last tile has too few queries, a consumer that has none of them computes nothing, and the others have the tensor cores.
//
// At head dim 256 shared memory has room for one tile of queries, through which O leaves too, so the next Q waits until O is stored. The
// next tile's first keys, whose stage is empty earlier, go ahead of it (K_FIRST).
//
// One step of a consumer, over a tile of keys n:
//
//     issue   S(n) = Q K(n)^T             wait for S(n)
//     issue   O += P(n - 1) V(n - 1)      P(n) = exp2(S(n) - reference), row sum      <- under the product
//                                         wait for O; pack P(n)
//
// The products run in the order of issue, so S(n) is complete while O's product still runs, and the exponentials hide behind it. The
// compiler would move them behind the wait, where nothing hides them; PIN (fa::schedule_fence) holds them. PINGPONG hides more: the
// consumers issue in turn, so that one computes exponentials while the other has the tensor cores.
//
// The softmax has no maximum. Online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) needs a reference m with exp2(S - m) in range; the
// row maximum is one, not the only one. bfloat16 and float32 have eight bits of exponent: P of 2^-100 or 2^30 is as exact as P of 1. So
// the first tile's row maximum is the reference of the whole row, and no later tile computes one: a maximum a score, two shuffles a
// row, a multiplication of all of O, and the wait of the first exponential for the last score are gone. The row sum, which is needed
// anyway, tells when the reference has become too small: beyond 2^30, or NaN, the warp computes the tile's scores again (mma.sync, from Q and
// K, still in shared memory), takes their maximum as its new reference and rescales. That is exact for V below 2^90 and rare in inputs of
// a model. The row sum is at least 1, because the first tile has a P of 1: the reference cannot be too large. float16 has five bits of
// exponent, so there the maximum stays, taken lazily as in step 14.
//
// Energy decides. The H200 runs every attention kernel at its power limit: a settled speed is watts over picojoules a FLOP. What an idea
// is worth: settled speed without it as a part of the kernel's, and pJ/FLOP more, which are known to 2 % (bfloat16, 16k tokens,
// S = 4096, not causal; experiments/hopper/ablations has the causal ones too, NOTES.md what was expected; each head's last tile has
// 64 queries at D64, and all three consumers still computed it):
//
//                                                D64             D128            D256
//     as it is: TFLOP/s, pJ/FLOP                 538, 1.298      689, 1.011      700, 1.007
//     a maximum for every tile (MAXIMUM = 1)     0.917, +0.101   0.887, +0.138   0.993, +0.001
//     exponentials not pinned (PIN = 0)          0.996, -0.014   0.929, +0.031   0.994, +0.002
//     no turns (PINGPONG = 0)                    0.996, -0.002   0.981, +0.014   spills
//     half the stages (STAGES)                   0.981, +0.023   0.691, +0.420   spills
//     two consumers for three (CONSUMERS)        0.905, +0.127
//
// SOFTMAX.md is about the first of them alone: why it is right, what it costs in accuracy, how to check it.
#include <fa/accumulator.cuh>
#include <fa/schedule.cuh>
#include <fa/tma.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr int PIECES = Q_STAGES * CONSUMERS;  // of Q: 64 rows, which are loaded, waited for and given back by themselves
constexpr uint32_t Q_SLAB = 64 * 128, K_SLAB = BLOCK_K * 128;  // bytes
constexpr uint32_t Q_PIECE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB;

template <class T> constexpr bool wide_exponent = false;
template <> constexpr bool wide_exponent<fa::bfloat16> = true;
constexpr bool NO_MAXIMUM = wide_exponent<scalar> && !MAXIMUM;
constexpr float LIMIT = 1073741824;  // 2^30: of a tile's row sum, without a maximum
constexpr float SLACK = 8;  // of the lazy maximum: P is at most 2^8

// A tile of queries of one head. The producer leaves it in shared memory: its divisions are done once.
struct Work {
    int q_first, head, batch, tiles;  // tiles of keys, at least one; 0: there is no more work
};

// Tiles of keys that the queries before q_end see; one where they see none, so that every work has the same course.
__device__ __forceinline__ int key_tiles(const fa::Args& args, int q_end) {
    const int keys = fa::visible_keys(args, min(q_end, args.seq_q) - 1);
    return max(1, (keys + BLOCK_K - 1) / BLOCK_K);
}

// The work of a number. Neighbouring numbers run at the same time, so they share K and V in the L2 cache.
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    const int q_tiles = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q;
    Work work;
#if CAUSAL
    // Sections of heads with at most SECTION MB of K and V; in a section the tiles that see the most keys first, over all its heads.
    const int kv_heads = max(1, min(args.heads_kv * args.batch, int((SECTION << 20) / (4ll * HEAD_DIM * args.seq_kv))));
    const int heads = kv_heads * (args.heads_q / args.heads_kv);
    const fa::Place place = fa::place_in_sections(number, q_tiles, heads, args.heads_q * args.batch);
    const int q_tile = q_tiles - 1 - place.tile, row = place.head;
#else
    const int row = number / q_tiles, q_tile = number - row * q_tiles;
#endif
    work.q_first = q_tile * BLOCK_Q;
    work.batch = row / args.heads_q;
    work.head = row - work.batch * args.heads_q;
    work.tiles = key_tiles(args, work.q_first + BLOCK_Q);
    return work;
}

// A position in a ring of N stages, and the parity of its round.
template <int N> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// Loads a tile of Rows rows, slab by slab.
template <uint32_t Slab>
__device__ __forceinline__ void load_tile(unsigned char* tile_smem, const fa::TensorMap& map, uint64_t* full, int row, int head,
                                          int batch) {
    fa::mbarrier_arrive_expect_tx(full, SLABS * Slab);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) fa::tma_load_4d(tile_smem + slab * Slab, &map, full, 64 * slab, row, head, batch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    unsigned char* q_smem = fa::dynamic_shared_1024();  // [Q_STAGES][CONSUMERS][SLABS][64][64]; O in the end
    unsigned char* k_smem = q_smem + PIECES * Q_PIECE;  // [STAGES][SLABS][BLOCK_K][64]
    unsigned char* v_smem = k_smem + STAGES * K_TILE;  // [STAGES][SLABS][BLOCK_K][64]
    uint64_t* q_full = reinterpret_cast<uint64_t*>(v_smem + STAGES * K_TILE);
    uint64_t* q_empty = q_full + PIECES;
    uint64_t* o_full = q_empty + PIECES;
    uint64_t* k_full = o_full + PIECES;
    uint64_t* k_empty = k_full + STAGES;
    uint64_t* v_full = k_empty + STAGES;
    uint64_t* v_empty = v_full + STAGES;
    Work* works_smem = reinterpret_cast<Work*>(v_empty + STAGES);  // [PIECES]: whose Q is there

    if (threadIdx.x == 0) {
        for (int i = 0; i < PIECES; ++i) {
            fa::mbarrier_init(q_full + i, 1), fa::mbarrier_init(o_full + i, 4);
            fa::mbarrier_init(q_empty + i, 1);
        }
        for (int i = 0; i < STAGES; ++i) {
            fa::mbarrier_init(k_full + i, 1), fa::mbarrier_init(k_empty + i, 4 * CONSUMERS);  // each warp arrives
            fa::mbarrier_init(v_full + i, 1), fa::mbarrier_init(v_empty + i, 4 * CONSUMERS);
        }
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const int warpgroup = fa::warpgroup_index();
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<CONSUMERS == 2 ? 40 : 32>();
        if (threadIdx.x == 0) {
            // The producer. A number is fetched one work ahead: the counter's answer takes a microsecond.
            int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
            const int works = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q * args.heads_q * args.batch;
            auto hand_over = [&](const Work& work) {
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    const int piece = q.stage * CONSUMERS + consumer, row = work.q_first + 64 * consumer;
                    fa::mbarrier_wait_parity(q_empty + piece, q.parity ^ 1);
                    works_smem[piece] = work;
                    if (work.tiles) load_tile<Q_SLAB>(q_smem + piece * Q_PIECE, q_map, q_full + piece, row, work.head, work.batch);
                    else fa::mbarrier_arrive(q_full + piece);
                }
                q.next();
            };
            int number = blockIdx.x;
            while (number < works) {
                const Work work = work_of(args, number);
                const int kv_head = fa::kv_head_of(args, work.head);
                if (!K_FIRST) hand_over(work);
                number = gridDim.x + atomicAdd(counters, 1);
                for (int n = 0; n < work.tiles; ++n) {
                    fa::mbarrier_wait_parity(k_empty + k.stage, k.parity ^ 1);
                    load_tile<K_SLAB>(k_smem + k.stage * K_TILE, k_map, k_full + k.stage, n * BLOCK_K, kv_head, work.batch);
                    k.next();
                    if (K_FIRST && n == 0) hand_over(work);
                    fa::mbarrier_wait_parity(v_empty + v.stage, v.parity ^ 1);
                    load_tile<K_SLAB>(v_smem + v.stage * K_TILE, v_map, v_full + v.stage, n * BLOCK_K, kv_head, work.batch);
                    v.next();
                }
            }
            hand_over(Work{});
            // The last block to finish leaves the counters as it found them, for the next launch.
            if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = 0, counters[1] = 0;
        } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= CONSUMERS) {
            // A storer. Q's stage, which holds O by then, is empty when the store has read it.
            const int consumer = threadIdx.x / 32 - 1;
            while (true) {
                const int piece = q.stage * CONSUMERS + consumer;
                fa::mbarrier_wait_parity(q_full + piece, q.parity);
                const Work work = works_smem[piece];
                if (work.tiles == 0) break;
                fa::mbarrier_wait_parity(o_full + piece, q.parity);
                const unsigned char* out_smem = q_smem + piece * Q_PIECE;
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    fa::tma_store_4d(&o_map, out_smem + slab * Q_SLAB, 64 * slab, work.q_first + 64 * consumer, work.head, work.batch);
                fa::bulk_commit();
                fa::bulk_wait_read<0>();
                fa::mbarrier_arrive(q_empty + piece);
                q.next();
            }
        }
        return;
    }

    // A consumer
    fa::setmaxnreg_inc<CONSUMERS == 2 ? 232 : 160>();
    const int consumer = warpgroup - 1, lane = fa::lane_id(), warp = fa::warp_id() % 4;
    // The largest S is the largest logit only where the scale is positive: a negative one is applied as its absolute value, and its sign in Q.
    const float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;
    float score_reg[BLOCK_K / 2], out_reg[HEAD_DIM / 2];
    uint32_t p_reg[BLOCK_K / 16][4];
    float reference[2], row_sum[2];  // of this thread's two rows: P = 2^(scale_log2e S - reference)
    Work work;
    int row, tiles;  // this thread's first row, the other is 8 further on; the tiles of keys its warpgroup needs, 0 to work.tiles

    auto piece = [&]() { return q.stage * CONSUMERS + consumer; };
    auto own_q = [&]() { return q_smem + piece() * Q_PIECE; };
    auto release = [&](uint64_t* empty) {
        if (lane == 0) fa::mbarrier_arrive(empty);
    };
    auto take_work = [&]() {
        fa::mbarrier_wait_parity(q_full + piece(), q.parity);
        work = works_smem[piece()];
        if (work.tiles == 0) return false;
        row = work.q_first + 64 * consumer + 16 * warp + lane / 4;
        tiles = min(work.tiles, key_tiles(args, work.q_first + 64 * consumer + 64));
        if (work.q_first + 64 * consumer >= args.seq_q) tiles = 0;  // it has no queries
        if (args.scale <= 0) {
            for (int slab = 0; slab < SLABS; ++slab)
                for (int i = threadIdx.x % 128; i < 64 * 32; i += 128) {
                    uint32_t& two = reinterpret_cast<uint32_t*>(own_q() + slab * Q_SLAB)[i];
                    two = args.scale < 0 ? two ^ 0x80008000u : 0u;
                }
            fa::fence_proxy_async_shared();
            fa::bar_sync(1 + consumer, 128);
        }
        return true;
    };
    auto begin_turn = [&]() {
        if (PINGPONG) fa::bar_sync(4 + consumer, 256);
    };
    auto end_turn = [&]() {
        if (PINGPONG) fa::bar_arrive(4 + (consumer + 1) % CONSUMERS, 256);
    };
    auto issue_scores = [&]() {
        const uint64_t q_operand = fa::smem_descriptor_k_major(own_q());
        const uint64_t k_operand = fa::smem_descriptor_k_major(k_smem + k.stage * K_TILE);
        fa::mbarrier_wait_parity(k_full + k.stage, k.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    };
    auto issue_output = [&](bool accumulate) {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(v_smem + v.stage * K_TILE, K_SLAB);
        fa::mbarrier_wait_parity(v_full + v.stage, v.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_rs<scalar, true>(out_reg, p_reg[step], fa::descriptor_advance(v_operand, step * 2048), accumulate || step > 0);
        fa::wgmma_commit();
    };
    auto mask = [&](int n) {
        if ((n + 1) * BLOCK_K <= fa::visible_keys(args, work.q_first + 64 * consumer)) return;
        const int visible[2] = {fa::visible_keys(args, row) - n * BLOCK_K, fa::visible_keys(args, row + 8) - n * BLOCK_K};
        fa::mask_columns(score_reg, visible);
    };
    // Raises the references to the row maxima of the tile, where those are larger.
    auto raise = [&](float (&factor)[2], const float (&maximum)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float larger = max(reference[half], fa::group_max<4>(maximum[half]) * scale_log2e);
            factor[half] = fa::exp2_approx(reference[half] - larger);
            reference[half] = larger;
            row_sum[half] *= factor[half];
        }
    };
    auto first_tile = [&]() {
        begin_turn();
        issue_scores();
        end_turn();
        fa::wgmma_wait<0>(score_reg);
        mask(0);
        float maximum[2];
        fa::local_row_max(maximum, score_reg);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float largest = fa::group_max<4>(maximum[half]) * scale_log2e;
            reference[half] = largest == -fa::infinity() ? 0.0f : largest;  // a row that sees no key
        }
        fa::exponentiate(score_reg, row_sum, scale_log2e, reference);
        release(k_empty + k.stage);
        k.next();
        fa::pack_operand<scalar>(p_reg, score_reg);
    };
    auto next_tile = [&](int n) {
        begin_turn();
        issue_scores();
        issue_output(n > 1);
        end_turn();
        fa::wgmma_wait<1>(score_reg);
        mask(n);
        float sum[2], maximum[2], factor[2];
        bool grows = false;
        if constexpr (!NO_MAXIMUM) {
            fa::local_row_max(maximum, score_reg);
            grows = max(maximum[0] * scale_log2e - reference[0], maximum[1] * scale_log2e - reference[1]) > SLACK;
            grows = __any_sync(fa::full_warp, grows);
            if (grows) raise(factor, maximum);
        }
        fa::exponentiate(score_reg, sum, scale_log2e, reference);
        if (PIN) fa::schedule_fence();
        fa::wgmma_wait<0>(out_reg, p_reg);
        release(v_empty + v.stage);
        v.next();
        if constexpr (NO_MAXIMUM) {
            grows = __any_sync(fa::full_warp, !(max(sum[0], sum[1]) <= LIMIT) || sum[0] != sum[0] || sum[1] != sum[1]);
            if (grows) {
                fa::multiply_abt_again<scalar, SLABS>(score_reg, fa::smem_u32(own_q()) + warp * 16 * 128, Q_SLAB,
                                                      fa::smem_u32(k_smem + k.stage * K_TILE), K_SLAB);
                __syncwarp();  // all lanes have read K when the first one releases it
                mask(n);
                fa::local_row_max(maximum, score_reg);
                raise(factor, maximum);
                fa::exponentiate(score_reg, sum, scale_log2e, reference);
            }
        }
        if (grows) fa::scale_rows(out_reg, factor);
        release(k_empty + k.stage);
        k.next();
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        fa::pack_operand<scalar>(p_reg, score_reg);
    };

    auto all_tiles = [&]() {
        first_tile();
        for (int n = 1; n < tiles; ++n) next_tile(n);
        issue_output(tiles > 1);
        fa::wgmma_wait<0>(out_reg, p_reg);
        release(v_empty + v.stage);
        v.next();
    };
    auto skip_tile = [&]() {  // that only other consumers need
        begin_turn();
        end_turn();
        fa::mbarrier_wait_parity(k_full + k.stage, k.parity);
        __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
        release(k_empty + k.stage);
        k.next();
        fa::mbarrier_wait_parity(v_full + v.stage, v.parity);
        __syncwarp();
        release(v_empty + v.stage);
        v.next();
    };
    // O / row sum goes to the shared memory of Q. The fence waits for stores to global memory too, so the logsumexp's come behind it.
    auto epilogue = [&]() {
        float sum[2], inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] = fa::group_sum<4>(row_sum[half]);
            inverse[half] = sum[half] == 0 ? 0.0f : 1.0f / sum[half];
        }
        fa::store_rows<scalar>(own_q() + warp * 16 * 128, Q_SLAB, out_reg, inverse);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(o_full + piece());
        float* logsumexp = fa::row_pointer<float>(args.logsumexp, work.batch, work.head, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (lane % 4 == 0 && row + 8 * half < args.seq_q)
                logsumexp[row + 8 * half] = sum[half] == 0 ? -fa::infinity() : reference[half] * fa::ln2 + fa::log(sum[half]);
    };

    if (PINGPONG && consumer == CONSUMERS - 1) end_turn();  // the first turn is the first consumer's
    while (take_work()) {
        if (tiles > 0) all_tiles();
        for (int n = tiles; n < work.tiles; ++n) skip_tile();
        if (tiles > 0) epilogue();
        else release(o_full + piece());  // the storer still gives Q's stage back
        q.next();
    }
}
