// /// kernel
// title = "Hopper: five products a tile by wgmma, always another in flight; dQ staged, and added by bulk reductions"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = "optional"
// arithmetic = "p16"
// spill_bytes_allowed = 80  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// [tile]
// BLOCK_Q = "128 if HEAD_DIM == 64 else 64"
// BLOCK_K = 128  # 64 a consumer
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// KV_STAGES = "1 if HEAD_DIM == 128 else 2"  # 2: the next K and V arrive while the last products run
// AHEAD = "4 if HEAD_DIM == 64 else 8"  # eighths of the exponentials that come before dP
// BACKWARDS = "1 if causal and HEAD_DIM == 128 and not deterministic else 0"  # from the last tile of queries to the first
// SECTION = "64 if BACKWARDS and seq_q > 2048 else 16 if deterministic and seq_q * HEAD_DIM <= 1048576 else 32"  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask or deterministic
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
// dtype = "float32"  # integers, 4 for each consumer's part of a tile of dQ
// size = "8 * batch * heads_q * ceil_div(seq_q, BLOCK_Q) if deterministic else 4"
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
// shared = "4 * KV_STAGES * BLOCK_K * HEAD_DIM + 12 * BLOCK_Q * HEAD_DIM + 528 * BLOCK_Q + 48 * KV_STAGES + 80"
// [[launch]]
// entry = "convert"
// grid = ["BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = 256
// maps = []
// ///
//
// Step 18, backward: step 14's mathematics in the form of this step's forward pass. A producer starts TMA copies, two consumers of 64 keys
// multiply, storers send dK and dV away, persistent blocks take tiles of keys from a counter. A block keeps K and V of its keys and
// streams Q and dO:
//
//     S^T = K Q^T    P^T = exp(scale * S^T - logsumexp)    dP^T = V dO^T    dS^T = P^T ∘ (dP^T - delta)
//     dV += P^T dO   dK += dS^T Q   dQ += dS K
//
// One swizzled copy of each tile serves all products: wgmma reads it by rows or, transposed, by columns. Scores are made transposed, so
// the packed accumulators of P^T and dS^T are the A operands of dV and dK, in registers. Only dQ needs dS of all keys of the block: dS^T
// goes to shared memory once, and a descriptor reads it transposed. Each consumer makes half of dQ. It puts it into shared memory, and a
// storer adds it in global memory by a bulk reduction.
//
// Two files run in this one's place, each where another way of adding dQ is as fast or faster, or where there is no room for this one:
//
//     19 hopper_atomic    short sequences at head dim 128, no mask at head dim 64: dQ is added from the accumulators
//     21 hopper_keys      head dims over 128: both consumers share 64 keys, and divide queries and columns
//
// A tile of queries n, as a consumer runs it. Two tiles of Q, dO and dS have a place; the producer fills one while the other is read:
//
//     issue               wait for    compute, while the rest runs
//     S(n), dP(n)         S           P, an exponential a score
//                         dP          dS, which goes to shared memory too
//     dV += P dO                      a barrier: the other consumer's dS is there
//     dQ = dS K           dV
//     dK += dS Q          dQ          dQ goes to shared memory, where the storer takes it
//                         dK          the stage of Q and dO is empty: the producer may fill it
//
// A warp that issues products waits until nearly all of them have run: few are ever queued. So while one consumer computes, the products
// that run are the other's.
//
// At head dim 64 (AHEAD) a tile without masked scores has a text of its own, one basic block. Half of its exponentials come behind the
// wait for dP, a step of 16 queries at a time: the special function unit makes them while the FMA pipe multiplies dS. Before the wait that
// pipe has little to do. That is 4 % faster under the causal mask, and P, dS and their operands are never all in registers at once. At
// head dim 128 it gains nothing (NOTES.md).
//
// Registers: at head dim 128 dK and dV are 128, S and dP 64, P 16 of 240. A product that starts from zero names its accumulators as an
// operand all the same, and the compiler would keep the last tile's dP until then, 32 registers that are not there: fa::discard tells it
// that they are dead.
//
// 64 queries x 128 keys at head dim 128 are 2560 cycles of products and, in KB of shared memory, S and dP 128, dV and dK 64, dQ 64, dS 16,
// the copies of Q and dO 32, dQ staged 64. An H200 is at its power limit, where every cycle in which the tensor cores wait is paid for by a
// higher clock, and every byte by a lower one: a byte reduced costs 80 pJ, 18 % of a launch's energy. Launch 3 reorders, scales and rounds.
// Tried, and as fast or slower: dQ before dK, dQ one tile late, consumers that take turns at the products, blocks of a head that begin at
// different queries (NOTES.md). They begin at its first: their reductions meet at the same tile, but Q and dO are read once from memory for
// all of them. A cluster of two blocks that add once would halve the bytes.
//
// The order of the reductions, and with it the last bits of dQ, changes from run to run. With --deterministic the blocks of a head take
// turns at each tile of queries (fa/atomic.cuh). Waiting for a turn and passing it takes as long as a tile. So no consumer does it, and no
// block has to be in step with another:
//
// - The storer of a consumer takes the turn, adds what is staged and passes the turn when the reduction is complete. The consumer is up to
//   a tile ahead. A storer that is behind starts the next reduction first (what it then waits for is the one before), if its turn has come;
//   nothing is held while it waits. So the pace is bounded by a look at the turn, the read of shared memory and a fence, not by the way of
//   a reduction there and of a turn back.
// - The last tile of keys that sees a tile of queries adds first. The numbers that blocks take from the counter begin with the last tiles
//   of keys, and each block walks from its diagonal on. Where all begin at once the block of the keys behind is a tile ahead in the same
//   direction, and few wait; without a mask each begins the time of a turn behind the one before, once. Were the first keys first
//   (BACKWARDS), under the mask all would begin at the same tile, too, and end together.
// - Numbers go round over the heads of a section, without a mask too: blocks that begin at the same time are then of different heads. A
//   section has few, so that their dQ stays in the L2 cache: with 64 MB for 16, 1024 queries of head dim 64 are a fifth slower (NOTES.md).
// - A number is taken at the end of the work before. Taken at its beginning, it would begin behind others that wait for it.
//
// Nobody waits for ever: a block waits only for smaller numbers, which other blocks have taken before and are at, or come to. The smallest
// number that is not done waits for none. By blockIdx a block could wait for one that another kernel keeps from starting. A walk that
// begins at another query in each block and goes round has no such order: it needs all blocks of a head at the same time.
//
// Under the causal mask blocks take the longest tiles of keys first (the shortest with --deterministic), and mask only at the diagonal.
// Where the second consumer's keys are behind all queries of a tile there, it leaves out all but its half of dQ. Blocks that begin at the
// diagonal are at different queries all the time, as far apart as their keys. With BACKWARDS they walk from the last query to the diagonal:
// those that begin together meet at the same tiles of Q, dO and dQ, as without a mask. At head dim 128 that is 2 to 5 % faster from 4096
// queries on, at 64 it is slower (NOTES.md).
//
// The scale has any sign: it is applied to S as it is, and to dQ and dK at the end. Queries beyond seq_q and those that see no key have a
// logsumexp of +inf, so P = 0. Keys beyond seq_kv are masked: their S is 0, and P might be anything.
#include <fa/accumulator.cuh>
#include <fa/query_tiles.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, HEAD_DIM, WORKSPACE_STATS, WORKSPACE_DQ>;
using Walk = fa::Walk<bool(BACKWARDS)>;

constexpr int THREADS = 384, STAGES = 2, SLABS = Tiles::slabs;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of dS^T, in slabs of 64 queries
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, DS_TILE = BLOCK_Q / 64 * K_SLAB, STATS = 2 * BLOCK_Q * 4;
constexpr int ROW_PARTS = Tiles::row_parts, PARTS = Tiles::parts, PART = Tiles::part;  // dQ of a tile lies in parts of 64 x 64

constexpr int QUERIES = BLOCK_Q, OWN_SLABS = SLABS, OWN_PARTS = PARTS / 2;  // of a consumer: 64 keys, all queries of a tile and all columns

// Some exponentials run among the arithmetic of dS. In steps of 16 queries:
constexpr bool BLENDED = AHEAD < 8;
constexpr int STEPS = QUERIES / 16, AHEAD_STEPS = STEPS * AHEAD / 8;

constexpr int GROUPS = 8 * OWN_PARTS;  // of 8 columns, of a consumer's part of dQ

// Descriptors of K and V stay for a tile of keys. Hoisted out of the loop they cost no instructions in it, but registers, and those are
// there only without a mask. With one they would be spilled, or go back to uniform registers one by one.
constexpr bool DESCRIPTORS_HERE = CAUSAL;

// With DETERMINISTIC, which tile of keys may add to a consumer's part of a tile of queries: from the first or from the last that it sees.
constexpr bool LAST_FIRST = DETERMINISTIC && !BACKWARDS;
__device__ __forceinline__ int* turn_of(const fa::Args& args, int number, int consumer) {
    return static_cast<int*>(args.workspace[WORKSPACE_TURNS]) + 8 * number + 4 * consumer;
}

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    Tiles::prepare<scalar>(args);
    const int tile = blockIdx.x * 16 / BLOCK_Q, last = (tile + 1) * BLOCK_Q - 1;
    if (DETERMINISTIC && blockIdx.x * 16 % BLOCK_Q == 0 && threadIdx.x < 2)
        *turn_of(args, Tiles::number(args, blockIdx.z, blockIdx.y, tile), threadIdx.x) =
            LAST_FIRST ? (fa::visible_keys(args, last) - 1) / BLOCK_K : 0;
}

__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    return Tiles::work<BLOCK_K, SECTION, LAST_FIRST>(args, number);
}

// A consumer's part of a tile of keys, and of dK and dV: an offset in bytes.
__device__ __forceinline__ uint32_t own_part(int consumer) { return consumer * 64 * 128; }

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
    float* dq_smem = reinterpret_cast<float*>(stats_smem + STAGES * STATS);  // [2][GROUPS][128 threads][4]
    uint64_t* k_full = reinterpret_cast<uint64_t*>(dq_smem + PARTS * PART);
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
            fa::mbarrier_init(k_full + i, 1), fa::mbarrier_init(v_full + i, 1);
            fa::mbarrier_init(kv_empty + i, 258);  // each storer arrives, and every thread of the consumers, which has read the number
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
            // The producer. A number is fetched a work ahead: the counter's answer takes a microsecond. With DETERMINISTIC, when the last
            // copies of a work are on their way: works shall begin in the order of their numbers.
            int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
            const int works = (args.seq_kv + BLOCK_K - 1) / BLOCK_K * args.heads_kv * args.batch;
            int number = DETERMINISTIC ? atomicAdd(counters, 1) : int(blockIdx.x);
            while (true) {
                fa::mbarrier_wait_parity(kv_empty + kv.stage(), kv.parity() ^ 1);
                numbers[kv.stage()] = number < works ? number : -1;
                if (number >= works) break;
                const Work work = work_of(args, number);
                Tiles::load<K_SLAB>(k_smem + kv.stage() * K_TILE, k_map, k_full + kv.stage(), work.k_first, work.kv_head, work.batch);
                if (!DETERMINISTIC) number = gridDim.x + atomicAdd(counters, 1);
                Tiles::load<K_SLAB>(v_smem + kv.stage() * K_TILE, v_map, v_full + kv.stage(), work.k_first, work.kv_head, work.batch);
                kv.next();
                Walk at = Walk::begin(args, work);
#pragma unroll 1  // the producer has few registers
                for (int n = 0; n < work.count; ++n, at.next(work)) {
                    const int tile = at.queries(work), q_first = tile * BLOCK_Q;
                    fa::mbarrier_wait_parity(q_empty + q.stage(), q.parity() ^ 1);
                    Tiles::load<Q_SLAB>(q_smem + q.stage() * Q_TILE, q_map, q_full + q.stage(), q_first, at.head, work.batch, STATS);
                    fa::tma_load_4d(stats_smem + q.stage() * STATS, &stats_map, q_full + q.stage(), 0, tile, at.head, work.batch);
                    Tiles::load<Q_SLAB>(do_smem + q.stage() * Q_TILE, d_o_map, do_full + q.stage(), q_first, at.head, work.batch);
                    q.next();
                }
                if (DETERMINISTIC) number = atomicAdd(counters, 1);
            }
            fa::mbarrier_arrive(k_full + kv.stage());
            // The last block to finish leaves the counters as it found them, for the next launch.
            if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = 0, counters[1] = 0;
        } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) {
            // A storer, one a consumer. It adds the staged dQ, and takes and passes the turns. The stage of K and V holds dK and dV in the
            // end, and is empty when the stores have read it.
            const int consumer = threadIdx.x / 32 - 1;
            int held = -1;  // the tile of queries whose turn has been taken last, until it is passed
            while (true) {
                fa::mbarrier_wait_parity(k_full + kv.stage(), kv.parity());
                const int number = numbers[kv.stage()];
                if (number < 0) break;
                Work work = work_of(args, number);
                if constexpr (DETERMINISTIC) {
                    const int mine = work.k_first / BLOCK_K;
                    // Behind all reductions of the tile whose turn is held; `later`: those of one tile more have begun.
                    auto pass = [&](bool later) {
                        if (held < 0) return;
                        if (later) fa::bulk_wait<1>();
                        else fa::bulk_wait<0>();
                        fa::pass_turn(turn_of(args, held, consumer), LAST_FIRST ? mine - 1 : mine + 1);
                        held = -1;
                    };
                    auto at = Tiles::walk_numbers<bool(BACKWARDS)>(args, work);
#pragma unroll 1
                    for (int n = work.count; n > 0; --n, at.next(work), q.next()) {
                        const int* turn = turn_of(args, at.number, consumer);
                        // Nothing is held while it waits for long.
                        if (!fa::mbarrier_test_parity(dq_full + consumer, q.position % 2) || !fa::has_turn(turn, mine))
                            pass(false), fa::wait_for_turn(turn, mine);
                        fa::fence_proxy_async_global();
                        fa::mbarrier_wait_parity(dq_full + consumer, q.position % 2);
                        fa::bulk_add_f32(Tiles::dq(args, at.number) + consumer * OWN_PARTS * PART, dq_smem + consumer * OWN_PARTS * PART,
                                         OWN_PARTS * PART);
                        fa::bulk_commit();
                        fa::bulk_wait_read<0>();
                        fa::mbarrier_arrive(dq_empty + consumer);
                        pass(true);
                        held = at.number;
                    }
                    pass(false);
                    work = work_of(args, numbers[kv.stage()]);  // again: in the loop there is no register for it
                }
                Walk at = Walk::begin(args, work);
#pragma unroll 1
                for (int n = 0; !DETERMINISTIC && n < work.count; ++n, at.next(work), q.next()) {
                    fa::mbarrier_wait_parity(dq_full + consumer, q.position % 2);
                    fa::bulk_add_f32(
                        Tiles::dq(args, Tiles::number(args, work.batch, at.head, at.queries(work))) + consumer * OWN_PARTS * PART,
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
    float dq_reg[OWN_PARTS * 32];
    uint32_t p16_reg[QUERIES / 16][4], ds16_reg[QUERIES / 16][4];
    Work work{};
    Walk at{};  // the first tile whose dQ has not been staged

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
    // d += P^T dO or dS^T Q
    auto issue_gradient = [&](float (&d)[OWN_SLABS* 32], const uint32_t (&a_reg)[QUERIES / 16][4], unsigned char* b_smem, bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(b_smem + q.stage() * Q_TILE, Q_SLAB);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_Q / 16; ++step)
            fa::wgmma_rs<scalar, true>(d, a_reg[step], fa::descriptor_advance(b, step * 2048), accumulate || step > 0);
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
    // Whether all of a consumer's queries of the tile see all of its keys.
    auto sees_all = [&]() { return work.k_first + own_keys + 64 <= fa::visible_keys(args, at.queries(work) * BLOCK_Q); };
    auto mask = [&]() {
        const int q_first = at.queries(work) * BLOCK_Q, key = work.k_first + own_keys;
        if (!BLENDED && key + 64 <= fa::visible_keys(args, q_first)) return;
        int first[2];
        for (int half = 0; half < 2; ++half) {
            const int own_key = key + 16 * warp + lane / 4 + 8 * half;
            first[half] = own_key < args.seq_kv ? fa::first_query(args, own_key) - q_first : QUERIES;
        }
        fa::clear_columns(p_reg, first);
    };
    auto share = [&](unsigned char* tiles_smem, const uint32_t (&operand)[QUERIES / 16][4]) {
        fa::store_operand(tiles_smem + q.stage() * DS_TILE + own_keys * 128 + warp * 16 * 128, K_SLAB, operand);
    };
    // Behind it what both consumers have shared is there, and both have read the other stage. One may come from a tile that the other skips.
    auto wait_for_other = [&]() {
        fa::fence_proxy_async_shared();
        fa::barrier_sync(1, 256);
    };
    auto issue_dp = [&]() {
        fa::mbarrier_wait_parity(do_full + q.stage(), q.parity());
        issue_transposed(ds_reg, v_smem, do_smem);
    };
    // A tile of queries whose S and dP are in flight: until dK alone is.
    auto issue_tile = [&](bool accumulate) {
        const float* stats = reinterpret_cast<const float*>(stats_smem + q.stage() * STATS);
        auto exponentiate = [&](int first, int end) { fa::exponentiate_columns(p_reg, scale_log2e, stats, first, end); };
        auto gradient = [&](int first, int end) {
            fa::score_gradient(ds_reg, p_reg, stats + BLOCK_Q, first, end);
            fa::pack_operand<scalar>(ds16_reg, ds_reg, first, end);
        };
        auto blend = [&](auto masked) {
            constexpr int ahead = masked.value ? STEPS : AHEAD_STEPS;
            fa::wgmma_wait<1>(p_reg);
            exponentiate(0, ahead);
            if constexpr (masked.value) mask();
            fa::pack_operand<scalar>(p16_reg, p_reg, 0, ahead);
            fa::schedule_fence();
            fa::wgmma_wait<0>(ds_reg);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step >= ahead) exponentiate(step, step + 1), fa::pack_operand<scalar>(p16_reg, p_reg, step, step + 1);
                gradient(step, step + 1);
            }
            share(ds_smem, ds16_reg);
        };
        if constexpr (BLENDED) {
            if (sees_all()) blend(fa::Masked<false>{});
            else blend(fa::Masked<true>{});
        } else {
            fa::wgmma_wait<1>(p_reg);
            exponentiate(0, STEPS);
            mask();
            fa::pack_operand<scalar>(p16_reg, p_reg);
            fa::wgmma_wait<0>(ds_reg);
            gradient(0, STEPS);
            share(ds_smem, ds16_reg);
        }
        issue_gradient(dv_reg, p16_reg, do_smem, accumulate);
        wait_for_other();
        issue_dq();
        fa::wgmma_wait<1>(p16_reg);
        issue_gradient(dk_reg, ds16_reg, q_smem, accumulate);
        fa::wgmma_wait<1>(dq_reg);
        q.next();
    };
    // On the diagonal of the causal mask the second 64 keys may be seen by no query of a tile: then only the other's dS counts.
    auto sees_nothing = [&]() { return CAUSAL && fa::visible_keys(args, (work.first + 1) * BLOCK_Q - 1) <= work.k_first + own_keys; };
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
    auto skip_tile = [&]() {
        fa::mbarrier_wait_parity(q_full + q.stage(), q.parity());
        fa::mbarrier_wait_parity(do_full + q.stage(), q.parity());
        const uint32_t zeros[QUERIES / 16][4] = {};
        share(ds_smem, zeros);
        wait_for_other();
        issue_dq();
        q.next();
        fa::wgmma_wait<0>(dq_reg);
        release(q_empty + (q.stage() ^ 1));
        stage_dq();
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
        } else fa::mbarrier_wait_parity(v_full + kv.stage(), kv.parity());
        if (end < work.count) skip_tile();

        // Epilogue: dV and dK to the shared memory of V and K
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t own = kv.stage() * K_TILE + own_part(consumer) + warp * 16 * 128;
        fa::store_rows<scalar>(v_smem + own, K_SLAB, dv_reg, one);
        fa::bar_sync(1, 256);  // the other consumer's dQ has read K
        fa::store_rows<scalar>(k_smem + own, K_SLAB, dk_reg, scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(dkv_full + 2 * kv.stage() + consumer);
        fa::mbarrier_arrive(kv_empty + kv.stage());  // the storers arrive later; this is for racecheck, which asks it of every reader
        kv.next();
    }
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) { Tiles::convert<scalar>(args); }
