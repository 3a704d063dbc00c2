// /// kernel
// title = "Hopper at head dim 64: half of the exponentials among the arithmetic of dS"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = false
// arithmetic = "p16"
// spill_bytes_allowed = 48  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// [tile]
// BLOCK_Q = 128
// BLOCK_K = 128  # 64 a consumer
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// DQ_STAGED = "causal"
// KV_STAGES = 2
// EARLY = "8 if causal else 4"  # eighths of dQ that are added before the next dP
// BACKWARDS = 0
// AHEAD = 32  # of 64 exponentials of a thread, those before the wait for dP
// SECTION = 32  # MB of heads that run at the same time
// [workspace.counters]
// dtype = "float32"  # two integers
// size = "2"
// init = "zero_once"
// [workspace.stats]
// dtype = "float32"
// size = "2 * batch * heads_q * round_up(seq_q, BLOCK_Q)"
// init = "none"
// [workspace.dq]
// dtype = "float32"
// size = "batch * heads_q * round_up(seq_q, BLOCK_Q) * HEAD_DIM"
// init = "none"
// [workspace.turns]
// dtype = "float32"  # integers: of each warp's part of a tile of dQ
// size = "4"
// init = "none"
// [tensor_map.q]
// tensor = "Q"
// box = [64, "BLOCK_Q", 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.d_o]
// tensor = "dO"
// box = [64, "BLOCK_Q", 1, 1]
// swizzle = 128
// [tensor_map.stats]
// tensor = "stats"
// dims = ["2 * BLOCK_Q", "ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// strides = ["2 * BLOCK_Q", "2 * round_up(seq_q, BLOCK_Q)", "2 * round_up(seq_q, BLOCK_Q) * heads_q"]
// box = ["2 * BLOCK_Q", 1, 1, 1]
// [tensor_map.dk]
// tensor = "dK"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.dv]
// tensor = "dV"
// box = [64, 64, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "prepare"
// grid = ["round_up(seq_q, BLOCK_Q) // 16", "heads_q", "batch"]
// block = 128
// maps = []
// [[launch]]
// entry = "gradients"
// grid = "min(sms, ceil_div(seq_kv, BLOCK_K) * heads_kv * batch)"
// block = 384
// shared = "4 * KV_STAGES * BLOCK_K * HEAD_DIM + (8 + 4 * DQ_STAGED) * BLOCK_Q * HEAD_DIM + 528 * BLOCK_Q + 48 * KV_STAGES + 80"
// [[launch]]
// entry = "convert"
// grid = ["BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = 256
// maps = []
// ///
//
// A variant of step 16 at head dim 64 (kernels_cu/16_hopper_backward.cu at 2734e3b, whose text says what is the same). What differs: a tile
// that needs no mask has a text without one, so that its scores are one basic block. AHEAD of a thread's 64 exponentials come before the
// wait for dP, the others beside the subtractions, products, conversions and stores of dS. Each step of 16 queries is finished before the
// next: P, its operand, dS and its operand never are all there at once, and the loop under the mask needs no local memory.
//
// Where dQ is added from the accumulators, dV's product began before dS and ran beside it. It is two products now: that of the first AHEAD
// exponentials' queries runs beside the others and dS, the second one behind it.
#include <fa/accumulator.cuh>
#include <fa/gradient.cuh>
#include <fa/schedule.cuh>
#include <fa/stage.cuh>
#include <fa/tma.cuh>

using scalar = fa::DTYPE;
using fa::int64_t;
using fa::uint32_t;
using fa::uint64_t;

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif

constexpr int THREADS = 384, STAGES = 2, SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of dS^T, in slabs of 64 queries
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, DS_TILE = BLOCK_Q / 64 * K_SLAB, STATS = 2 * BLOCK_Q * 4;
constexpr int ROW_PARTS = BLOCK_Q / 64, PARTS = ROW_PARTS * SLABS, PART = 64 * 64;  // dQ of a tile lies in parts of 64 x 64

constexpr int QUERIES = BLOCK_Q, OWN_SLABS = SLABS, OWN_PARTS = PARTS / 2, STEPS = QUERIES / 16;
static_assert(HEAD_DIM == 64 && BLOCK_K == 128);

// dQ goes through shared memory, and each tile is finished before the next one begins.
constexpr bool STAGED = DQ_STAGED && !DETERMINISTIC;

constexpr int GROUPS = 8 * OWN_PARTS, EARLY_GROUPS = EARLY * OWN_PARTS;  // of 8 columns, of a consumer's part of dQ

// Descriptors of K and V stay for a tile of keys. Hoisted out of the loop they cost no instructions in it, but registers, and those are
// there only without a mask. Elsewhere they would be spilled, or go back to uniform registers one by one.
constexpr bool DESCRIPTORS_HERE = CAUSAL;

__device__ __forceinline__ int tiles_of_queries(const fa::Args& args) { return (args.seq_q + BLOCK_Q - 1) / BLOCK_Q; }
// The number of a tile of queries among those of all heads.
__device__ __forceinline__ int tile_number(const fa::Args& args, int batch, int head, int tile) {
    return (batch * args.heads_q + head) * tiles_of_queries(args) + tile;
}
// For a tile of queries, log2(e) * logsumexp and delta: [2][BLOCK_Q].
__device__ __forceinline__ float* stats_of(const fa::Args& args, int number) {
    return static_cast<float*>(args.workspace[WORKSPACE_STATS]) + int64_t(number) * (2 * BLOCK_Q);
}
// For a tile of queries, dQ in the layout of the accumulators: [PARTS][8 groups of 8 columns][128 threads][4].
__device__ __forceinline__ float* dq_of(const fa::Args& args, int number) {
    return static_cast<float*>(args.workspace[WORKSPACE_DQ]) + int64_t(number) * (PARTS * PART);
}
// For a tile of queries, whose turn it is to add to the part of each of the 8 warps.
__device__ __forceinline__ int* turns_of(const fa::Args& args, int number) {
    return static_cast<int*>(args.workspace[WORKSPACE_TURNS]) + 8 * number;
}

// Launch 1, 16 queries a block. delta[query] = dO · O, each row split over 8 lanes; logsumexp, with +inf where P must be 0: for a query
// beyond seq_q, or one that sees no key and has -inf; dQ = 0, and the turns.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8, head = blockIdx.y, batch = blockIdx.z;
    const int number = tile_number(args, batch, head, query / BLOCK_Q);
    float* dq = dq_of(args, number) + blockIdx.x * 16 % BLOCK_Q * HEAD_DIM;
    for (int i = 0; i < HEAD_DIM / 32; ++i) fa::store_vec(dq + (i * 128 + threadIdx.x) * 4, fa::Vec<float, 4>{});

    if (DETERMINISTIC && blockIdx.x * 16 % BLOCK_Q == 0 && threadIdx.x < 8) turns_of(args, number)[threadIdx.x] = 0;

    const float delta = fa::delta_of<scalar, HEAD_DIM>(args, batch, head, query, lane);
    if (lane == 0) {
        const float lse = query < args.seq_q ? *fa::row_pointer<float>(args.logsumexp, batch, head, query) : -fa::infinity();
        float* stats = stats_of(args, number) + query % BLOCK_Q;
        stats[0] = lse == -fa::infinity() ? fa::infinity() : lse * fa::log2e;
        stats[BLOCK_Q] = delta;
    }
}

// A tile of keys of one head, and the tiles of queries that see it.
struct Work {
    int k_first, kv_head, batch;
    int first, end, count;  // tiles of queries of each head; of all heads of the group together
};

// The work of a number. Neighbouring numbers run at the same time, so they share Q and dO, and add to dQ, in the L2 cache.
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    const int k_tiles = (args.seq_kv + BLOCK_K - 1) / BLOCK_K, group = args.heads_q / args.heads_kv;
#if CAUSAL
    // Sections of heads with at most SECTION MB; in a section the tiles that the most queries see first, over all its heads.
    const int heads = max(1, min(args.heads_kv * args.batch, (SECTION << 20) / (8 * HEAD_DIM) / args.seq_q / group));
    const fa::Place place = fa::place_in_sections(number, k_tiles, heads, args.heads_kv * args.batch);
    const int k_tile = place.tile, row = place.head;
#else
    const int row = number / k_tiles, k_tile = number - row * k_tiles;
#endif
    Work work;
    work.k_first = k_tile * BLOCK_K;
    work.batch = row / args.heads_kv;
    work.kv_head = row - work.batch * args.heads_kv;
    work.end = tiles_of_queries(args);
    work.first = min(work.end, fa::first_query(args, work.k_first) / BLOCK_Q);
    work.count = (work.end - work.first) * group;
    return work;
}

// A walk over the tiles of queries of a work, head after head; with BACKWARDS from the end of each to the first.
struct Walk {
    int head, tile;
    __device__ __forceinline__ int queries(const Work& work) const { return BACKWARDS ? work.end - 1 - tile + work.first : tile; }
    static __device__ __forceinline__ Walk begin(const fa::Args& args, const Work& work) {
        return {work.kv_head * (args.heads_q / args.heads_kv), work.first};
    }
    __device__ __forceinline__ void next(const Work& work) {
        if (++tile == work.end) tile = work.first, ++head;
    }
};

// A consumer's part of a tile of keys, and of dK and dV: an offset in bytes.
__device__ __forceinline__ uint32_t own_part(int consumer) { return consumer * 64 * 128; }

// Loads the slabs of a tile; the barrier expects `more` bytes beside.
template <uint32_t Slab>
__device__ __forceinline__ void load_tile(unsigned char* tile_smem, const fa::TensorMap& map, uint64_t* full, int row, int head, int batch,
                                          uint32_t more = 0) {
    fa::mbarrier_arrive_expect_tx(full, SLABS * Slab + more);
    for (int slab = 0; slab < SLABS; ++slab) fa::tma_load_4d(tile_smem + slab * Slab, &map, full, 64 * slab, row, head, batch);
}

// Which of the two texts of a tile: with the mask's instructions, or without.
template <bool Value> struct Masked {
    static constexpr bool value = Value;
};

// Launch 2. BLOCK_K keys stay; the queries that see them are streamed, of all heads that read this key head.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradients(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
              const __grid_constant__ fa::TensorMap k_map, const __grid_constant__ fa::TensorMap v_map,
              const __grid_constant__ fa::TensorMap d_o_map, const __grid_constant__ fa::TensorMap stats_map,
              const __grid_constant__ fa::TensorMap dk_map, const __grid_constant__ fa::TensorMap dv_map) {
    unsigned char* k_smem = fa::dynamic_shared_1024();  // [KV_STAGES][SLABS][BLOCK_K][64]; dK in the end
    unsigned char* v_smem = k_smem + KV_STAGES * K_TILE;  // [KV_STAGES][SLABS][BLOCK_K][64]; dV in the end
    unsigned char* q_smem = v_smem + KV_STAGES * K_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* do_smem = q_smem + STAGES * Q_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* ds_smem = do_smem + STAGES * Q_TILE;  // [STAGES][BLOCK_Q / 64][BLOCK_K][64]: dS^T
    unsigned char* stats_smem = ds_smem + STAGES * DS_TILE;  // [STAGES][2][BLOCK_Q]
    float* dq_smem = reinterpret_cast<float*>(stats_smem + STAGES * STATS);  // with DQ_STAGED: [2][GROUPS][128 threads][4]
    uint64_t* k_full = reinterpret_cast<uint64_t*>(dq_smem + (DQ_STAGED ? PARTS * PART : 0));
    uint64_t* v_full = k_full + KV_STAGES;
    uint64_t* kv_empty = v_full + KV_STAGES;
    uint64_t* dkv_full = kv_empty + KV_STAGES;  // [KV_STAGES][2]
    uint64_t* q_full = dkv_full + 2 * KV_STAGES;
    uint64_t* q_empty = q_full + STAGES;  // and dO's and the stats'
    uint64_t* do_full = q_empty + STAGES;
    uint64_t *dq_full = do_full + STAGES, *dq_empty = dq_full + 2;  // [2] each, of the consumers
    int* numbers = reinterpret_cast<int*>(dq_empty + 2);  // [KV_STAGES]: the work whose K is there; -1: no more

    if (threadIdx.x == 0) {
        for (int i = 0; i < KV_STAGES; ++i) {
            fa::mbarrier_init(k_full + i, 1), fa::mbarrier_init(v_full + i, 1), fa::mbarrier_init(kv_empty + i, 2);
            fa::mbarrier_init(dkv_full + 2 * i, 4), fa::mbarrier_init(dkv_full + 2 * i + 1, 4);
        }
        for (int i = 0; i < STAGES; ++i) {
            fa::mbarrier_init(q_full + i, 1), fa::mbarrier_init(do_full + i, 1);
            fa::mbarrier_init(q_empty + i, 8);  // each warp arrives
            fa::mbarrier_init(dq_full + i, 4), fa::mbarrier_init(dq_empty + i, 1);  // of each consumer
        }
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const int warpgroup = fa::warpgroup_index();
    fa::Ring<KV_STAGES> kv;
    fa::Ring<STAGES> q;  // of Q, dO, their stats, and dS
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<504 - 2 * REGISTERS>();
        if (threadIdx.x == 0) {
            // The producer. A number is fetched a work ahead: the counter's answer takes a microsecond.
            int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
            const int works = (args.seq_kv + BLOCK_K - 1) / BLOCK_K * args.heads_kv * args.batch;
            int number = DETERMINISTIC ? atomicAdd(counters, 1) : int(blockIdx.x);
            while (true) {
                fa::mbarrier_wait_parity(kv_empty + kv.stage(), kv.parity() ^ 1);
                numbers[kv.stage()] = number < works ? number : -1;
                if (number >= works) break;
                const Work work = work_of(args, number);
                load_tile<K_SLAB>(k_smem + kv.stage() * K_TILE, k_map, k_full + kv.stage(), work.k_first, work.kv_head, work.batch);
                number = (DETERMINISTIC ? 0 : gridDim.x) + atomicAdd(counters, 1);
                load_tile<K_SLAB>(v_smem + kv.stage() * K_TILE, v_map, v_full + kv.stage(), work.k_first, work.kv_head, work.batch);
                kv.next();
                Walk at = Walk::begin(args, work);
#pragma unroll 1  // the producer has few registers
                for (int n = 0; n < work.count; ++n, at.next(work)) {
                    const int tile = at.queries(work), q_first = tile * BLOCK_Q;
                    fa::mbarrier_wait_parity(q_empty + q.stage(), q.parity() ^ 1);
                    load_tile<Q_SLAB>(q_smem + q.stage() * Q_TILE, q_map, q_full + q.stage(), q_first, at.head, work.batch, STATS);
                    fa::tma_load_4d(stats_smem + q.stage() * STATS, &stats_map, q_full + q.stage(), 0, tile, at.head, work.batch);
                    load_tile<Q_SLAB>(do_smem + q.stage() * Q_TILE, d_o_map, do_full + q.stage(), q_first, at.head, work.batch);
                    q.next();
                }
            }
            fa::mbarrier_arrive(k_full + kv.stage());
            // The last block to finish leaves the counters as it found them, for the next launch.
            if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = 0, counters[1] = 0;
        } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) {
            // A storer, one a consumer. It adds the staged dQ. The stage of K and V holds dK and dV in the end, and is empty when the
            // stores have read it.
            const int consumer = threadIdx.x / 32 - 1;
            while (true) {
                fa::mbarrier_wait_parity(k_full + kv.stage(), kv.parity());
                const int number = numbers[kv.stage()];
                if (number < 0) break;
                const Work work = work_of(args, number);
                Walk at = Walk::begin(args, work);
#pragma unroll 1
                for (int n = 0; STAGED && n < work.count; ++n, at.next(work), q.next()) {
                    fa::mbarrier_wait_parity(dq_full + consumer, q.position % 2);
                    fa::bulk_add_f32(dq_of(args, tile_number(args, work.batch, at.head, at.queries(work))) + consumer * OWN_PARTS * PART,
                                     dq_smem + consumer * OWN_PARTS * PART, OWN_PARTS * PART);
                    fa::bulk_commit();
                    fa::bulk_wait_read<0>();
                    fa::mbarrier_arrive(dq_empty + consumer);
                }
                fa::mbarrier_wait_parity(dkv_full + 2 * kv.stage() + consumer, kv.parity());
                const uint32_t own = kv.stage() * K_TILE + own_part(consumer);
                const int row = work.k_first + 64 * consumer;
                for (int slab = 0; slab < OWN_SLABS; ++slab) {
                    fa::tma_store_4d(&dk_map, k_smem + own + slab * K_SLAB, 64 * slab, row, work.kv_head, work.batch);
                    fa::tma_store_4d(&dv_map, v_smem + own + slab * K_SLAB, 64 * slab, row, work.kv_head, work.batch);
                }
                fa::bulk_commit();
                fa::bulk_wait_read<0>();
                fa::mbarrier_arrive(kv_empty + kv.stage());
                kv.next();
            }
        }
        return;
    }

    // A consumer: 64 keys, 16 a warp.
    fa::setmaxnreg_inc<REGISTERS>();
    const int consumer = warpgroup - 1, lane = fa::lane_id(), warp = fa::warp_id() % 4;
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    const int own_keys = 64 * consumer;
    float dk_reg[OWN_SLABS * 32], dv_reg[OWN_SLABS * 32], p_reg[QUERIES / 2], ds_reg[QUERIES / 2];
    float dq_reg[OWN_PARTS * 32], late_reg[OWN_PARTS * 32];  // late: what is added behind the next product
    uint32_t p16_reg[QUERIES / 16][4], ds16_reg[QUERIES / 16][4];
    Work work{};
    Walk at{};  // the first tile whose dQ has not been added or staged

    auto release = [&](uint64_t* empty) {
        if (lane == 0) fa::mbarrier_arrive(empty);
    };
    // d = A B^T: keys of K or V, queries of a tile of Q or dO
    auto issue_transposed = [&](float (&d)[QUERIES / 2], unsigned char* a_smem, unsigned char* b_smem) {
        uint64_t a = fa::smem_descriptor_k_major(a_smem + kv.stage() * K_TILE + own_keys * 128);
        if (DESCRIPTORS_HERE) a = fa::descriptor_here(a);
        const uint64_t b = fa::smem_descriptor_k_major(b_smem + q.stage() * Q_TILE);
        fa::discard(d);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            fa::wgmma_ss<scalar>(d, fa::descriptor_advance(a, step / 4 * K_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(b, step / 4 * Q_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    };
    auto issue_scores = [&]() {
        fa::mbarrier_wait_parity(q_full + q.stage(), q.parity());
        issue_transposed(p_reg, k_smem, q_smem);
    };
    // d += P^T dO or dS^T Q, over some steps of 16 queries
    auto issue_gradient = [&](float (&d)[OWN_SLABS* 32], const uint32_t (&a_reg)[QUERIES / 16][4], unsigned char* b_smem, int first,
                              int end, bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(b_smem + q.stage() * Q_TILE, Q_SLAB);
        fa::wgmma_fence();
#pragma unroll
        for (int step = first; step < end; ++step)
            fa::wgmma_rs<scalar, true>(d, a_reg[step], fa::descriptor_advance(b, step * 2048), accumulate || step > first);
        fa::wgmma_commit();
    };
    // This consumer's part of dQ = dS K
    auto issue_dq = [&]() {
        const uint64_t a = fa::smem_descriptor_mn_major(ds_smem + q.stage() * DS_TILE + consumer % ROW_PARTS * K_SLAB, K_SLAB);
        const uint64_t b = fa::smem_descriptor_mn_major(k_smem + kv.stage() * K_TILE + consumer / ROW_PARTS * OWN_PARTS * K_SLAB, K_SLAB);
        fa::discard(dq_reg);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_ss<scalar, true, true>(dq_reg, fa::descriptor_advance(a, step * 2048), fa::descriptor_advance(b, step * 2048),
                                             step > 0);
        fa::wgmma_commit();
    };
    // Whether every query of the tile sees all keys of this consumer.
    auto sees_all = [&]() { return work.k_first + own_keys + 64 <= fa::visible_keys(args, at.queries(work) * BLOCK_Q); };
    auto mask = [&]() {
        const int q_first = at.queries(work) * BLOCK_Q, key = work.k_first + own_keys;
        int first[2];
        for (int half = 0; half < 2; ++half) {
            const int own_key = key + 16 * warp + lane / 4 + 8 * half;
            first[half] = own_key < args.seq_kv ? fa::first_query(args, own_key) - q_first : QUERIES;
        }
        fa::clear_columns(p_reg, first);
    };
    int last_number = -1;  // of the tile of queries to whose dQ this warp has added last
    auto pass_turn = [&]() {
        if (DETERMINISTIC && last_number >= 0) fa::pass_turn(turns_of(args, last_number) + 4 * consumer + warp, work.k_first / BLOCK_K + 1);
    };
    auto share = [&](unsigned char* tiles_smem, const uint32_t (&operand)[QUERIES / 16][4]) {
        fa::store_operand(tiles_smem + q.stage() * DS_TILE + own_keys * 128 + warp * 16 * 128, K_SLAB, operand);
    };
    // Behind it what both consumers have shared is there, and both have read the other stage.
    auto wait_for_other = [&]() {
        fa::fence_proxy_async_shared();
        fa::bar_sync(1, 256);
    };
    auto issue_dp = [&]() {
        fa::mbarrier_wait_parity(do_full + q.stage(), q.parity());
        issue_transposed(ds_reg, v_smem, do_smem);
    };
    // A tile of queries whose S and dP are in flight: until all its products are; with STAGED until dK alone is.
    auto issue_tile = [&](bool accumulate) {
        const float* stats = reinterpret_cast<const float*>(stats_smem + q.stage() * STATS);
        // P of some steps of 16 queries, and its operand.
        auto exponentiate = [&](int first, int end) {
#pragma unroll
            for (int j = 2 * first; j < 2 * end; ++j) {
                const fa::Vec<float, 2> reference = fa::load_vec<2>(stats + 8 * j + fa::fragment_column());
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; ++i) p_reg[i] = fa::exp2_approx(p_reg[i] * scale_log2e - reference[i % 2]);
            }
        };
        auto pack = [&](uint32_t (&operand)[QUERIES / 16][4], const float (&x)[QUERIES / 2], int first, int end) {
#pragma unroll
            for (int step = first; step < end; ++step)
#pragma unroll
                for (int r = 0; r < 4; ++r) operand[step][r] = fa::pack<scalar>(x[8 * step + 2 * r], x[8 * step + 2 * r + 1]);
        };
        // dS of some steps, and its operand.
        auto gradient = [&](int first, int end) {
#pragma unroll
            for (int j = 2 * first; j < 2 * end; ++j) {
                const fa::Vec<float, 2> delta = fa::load_vec<2>(stats + BLOCK_Q + 8 * j + fa::fragment_column());
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; ++i) ds_reg[i] = p_reg[i] * (ds_reg[i] - delta[i % 2]);
            }
            pack(ds16_reg, ds_reg, first, end);
        };
        // AHEAD of the exponentials come before the wait for dP, the others among the arithmetic of dS.
        auto score = [&](auto masked) {
            constexpr int ahead = masked.value ? STEPS : AHEAD / 8;
            fa::wgmma_wait<1>(p_reg);
            exponentiate(0, ahead);
            if constexpr (masked.value) mask();
            pack(p16_reg, p_reg, 0, ahead);
            if constexpr (!STAGED) issue_gradient(dv_reg, p16_reg, do_smem, 0, ahead, accumulate);
            fa::schedule_fence();
            fa::wgmma_wait<STAGED ? 0 : 1>(ds_reg);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step >= ahead) exponentiate(step, step + 1), pack(p16_reg, p_reg, step, step + 1);
                gradient(step, step + 1);
            }
            share(ds_smem, ds16_reg);
            if constexpr (!STAGED && ahead < STEPS) issue_gradient(dv_reg, p16_reg, do_smem, ahead, STEPS, true);
        };
        if (sees_all()) score(Masked<false>{});
        else score(Masked<true>{});
        if constexpr (STAGED) {
            issue_gradient(dv_reg, p16_reg, do_smem, 0, STEPS, accumulate);
            wait_for_other();
            issue_dq();
            fa::wgmma_wait<1>(p16_reg);
            issue_gradient(dk_reg, ds16_reg, q_smem, 0, STEPS, accumulate);
            fa::wgmma_wait<1>(dq_reg);
        } else {
            issue_gradient(dk_reg, ds16_reg, q_smem, 0, STEPS, accumulate);
            wait_for_other();
            issue_dq();
            fa::wgmma_wait<2>(p16_reg);  // P's registers are free
        }
        q.next();
    };
    // On the diagonal of the causal mask the second 64 keys may be seen by no query of a tile: then only the other's dS counts.
    auto sees_nothing = [&]() {
        return CAUSAL && !(BACKWARDS && !STAGED) && fa::visible_keys(args, (work.first + 1) * BLOCK_Q - 1) <= work.k_first + own_keys;
    };
    // dQ of a tile is complete, and goes to the storer.
    auto stage_dq = [&]() {
        fa::mbarrier_wait_parity(dq_empty + consumer, q.position % 2);  // that of the tile before has been read
        float* dq = dq_smem + consumer * OWN_PARTS * PART + threadIdx.x % 128 * 4;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            fa::store_vec(dq + j * 512, fa::Vec<float, 4>{dq_reg[4 * j], dq_reg[4 * j + 1], dq_reg[4 * j + 2], dq_reg[4 * j + 3]});
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(dq_full + consumer);
        at.next(work);
    };
    // All products of a tile are complete, and its stage is empty. Where the first group of 8 columns of its dQ is added:
    auto begin_sum = [&]() {
        release(q_empty + (q.stage() ^ 1));
        const int number = tile_number(args, work.batch, at.head, at.queries(work));
        if (DETERMINISTIC) {
            pass_turn();  // of the tile before: what it added has arrived by now
            last_number = number;
            fa::wait_for_turn(turns_of(args, number) + 4 * consumer + warp, work.k_first / BLOCK_K);
        }
        at.next(work);
        return dq_of(args, number) + consumer * OWN_PARTS * PART + threadIdx.x % 128 * 4;
    };
    // Adds some of its groups.
    auto add = [&](float* dq, int first, int end, auto& values) {
#pragma unroll
        for (int j = first; j < end; ++j)
            fa::red_add_v4_f32(dq + j * 512, values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]);
    };

    auto skip_tile = [&]() {
        fa::mbarrier_wait_parity(q_full + q.stage(), q.parity());
        fa::mbarrier_wait_parity(do_full + q.stage(), q.parity());
        const uint32_t zeros[QUERIES / 16][4] = {};
        share(ds_smem, zeros);
        wait_for_other();
        issue_dq();
        q.next();
        fa::wgmma_wait<0>(dq_reg);
        if constexpr (STAGED) release(q_empty + (q.stage() ^ 1)), stage_dq();
        else add(begin_sum(), 0, GROUPS, dq_reg);
    };

    while (true) {
        fa::mbarrier_wait_parity(k_full + kv.stage(), kv.parity());
        const int number = __shfl_sync(fa::full_warp, numbers[kv.stage()], 0);  // known to the compiler as the same in the whole warp
        if (number < 0) break;
        work = work_of(args, number);
        at = Walk::begin(args, work);
        const int unseen = work.count > 0 && sees_nothing(), end = BACKWARDS ? work.count - unseen : work.count;
        int n = BACKWARDS ? 0 : unseen;
        if (n > 0) skip_tile();
        const bool seen = n < end;
        if (seen) {
            if constexpr (STAGED) {
                fa::mbarrier_wait_parity(v_full + kv.stage(), kv.parity());
                for (bool accumulate = false; n < end; ++n, accumulate = true) {
                    issue_scores();
                    issue_dp();
                    issue_tile(accumulate);
                    stage_dq();
                    fa::schedule_fence();
                    fa::wgmma_wait<0>(ds16_reg, dk_reg, dv_reg);
                    release(q_empty + (q.stage() ^ 1));
                }
            } else {
                issue_scores();
                fa::mbarrier_wait_parity(v_full + kv.stage(), kv.parity());
                issue_dp();
                for (bool accumulate = false;; accumulate = true) {
                    issue_tile(accumulate);
                    if (++n == end) break;
                    issue_scores();
                    fa::wgmma_wait<1>(dq_reg, ds16_reg);
                    float* dq = begin_sum();
                    add(dq, 0, EARLY_GROUPS, dq_reg);
                    fa::schedule_fence();
                    fa::moved(late_reg, dq_reg, 4 * EARLY_GROUPS);
                    issue_dp();
                    fa::schedule_fence();
                    add(dq, EARLY_GROUPS, GROUPS, late_reg);
                }
                fa::wgmma_wait<0>(dq_reg, ds16_reg, dk_reg, dv_reg);
                add(begin_sum(), 0, GROUPS, dq_reg);
            }
        } else fa::mbarrier_wait_parity(v_full + kv.stage(), kv.parity());
        if (end < work.count) skip_tile();
        pass_turn();
        last_number = -1;

        // Epilogue: dV and dK to the shared memory of V and K
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t own = kv.stage() * K_TILE + own_part(consumer) + warp * 16 * 128;
        fa::store_rows<scalar>(v_smem + own, K_SLAB, dv_reg, one);
        fa::bar_sync(1, 256);  // the other consumer's dQ has read K
        fa::store_rows<scalar>(k_smem + own, K_SLAB, dk_reg, scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(dkv_full + 2 * kv.stage() + consumer);
        kv.next();
    }
}

// Launch 3. dQ from the layout of the accumulators to rows: a thread reads the 4 lanes that hold 8 columns of two rows.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) {
    const int group = threadIdx.x % 8, row = threadIdx.x / 8 % 8, warp = threadIdx.x / 64;
    const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS, head = blockIdx.y, batch = blockIdx.z;
    const int query = tile * BLOCK_Q + part % ROW_PARTS * 64 + warp * 16 + row;
    const float* from = dq_of(args, tile_number(args, batch, head, tile)) + part * PART + (group * 128 + warp * 32 + row * 4) * 4;
    fa::store_dq_rows<scalar>(args, batch, head, query, part / ROW_PARTS * 8 + group, from, float(args.scale));
}
