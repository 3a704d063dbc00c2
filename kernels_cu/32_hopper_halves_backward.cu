// /// kernel
// title = "Hopper at head dim 256: clusters of two blocks of 80 keys, each with half of the columns of dQ"
// dtypes = ["float16", "bfloat16"]
// head_dims = [256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = false
// logsumexp_gradient = true
// auto = "head_dim > 192 and seq_kv >= 1024 and works >= 6 * sms"  # hopper_cluster divides fewer works (halves_mixed.txt)
// arithmetic = "p16"
// spill_bytes_allowed = 24  # of the producer and the storers, which have 24 registers; none in a consumer's loop
// runtime = ["SECTION"]
// [tile]
// BLOCK_Q = 64
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask
// LATE = 0  # 1: all of dK before the other block's dS^T is waited for, and no product while dQ is added
// [let]
// COLUMNS = "max(192, round_up(head_dim, 64))"  # of the head over which S and dP are computed; the rest are 0
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count, as in hopper_cluster
// works = "ceil_div(seq_kv, 160) * heads_kv * batch"  # tiles of keys, one a cluster
// [[choice]]
// when = "causal and seq_q > 2048"
// SECTION = 64
// evidence = "experiments/hopper_backward/halves.txt: S4096 1.01 times as fast as 32 MB, S16384 1.02, S1024 0.98"
// [[choice]]
// when = "not causal"
// LATE = 1
// evidence = "experiments/hopper_backward/halves.txt: S16384 1.03 times as fast, S4096 1.06, S2048 1.03, S1024 1.00; causal 0.98 to 0.99"
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
// [tensor_map.q]
// tensor = "Q"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, 80, 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, 80, 1, 1]
// swizzle = 128
// [tensor_map.d_o]
// tensor = "dO"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.stats]
// tensor = "stats"
// dims = ["2 * BLOCK_Q", "ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// strides = ["2 * BLOCK_Q", "2 * round_up(seq_q, BLOCK_Q)", "2 * round_up(seq_q, BLOCK_Q) * heads_q"]
// box = ["BLOCK_Q", 1, 1, 1]
// [tensor_map.dk]
// tensor = "dK"
// box = [64, 80, 1, 1]
// swizzle = 128
// [tensor_map.dv]
// tensor = "dV"
// box = [64, 80, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "prepare"
// grid = ["round_up(seq_q, BLOCK_Q) // 16", "heads_q", "batch"]
// block = 128
// maps = []
// [[launch]]
// entry = "gradients"
// grid = "2 * min(sms // 2, works)"
// block = 384
// overlaps = "few_rows"
// cluster = 2
// shared = "400 * HEAD_DIM + 6 * BLOCK_Q * HEAD_DIM + 480 * BLOCK_Q + 12 * BLOCK_Q + 160"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// grid = ["BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = 256
// maps = []
// ///
//
// Step 32, backward: hopper_cluster's clusters with 160 keys, not 128.
//
// What limits hopper_cluster: dQ of a tile of queries is added once for 128 keys, and each of a block's two consumers reads all of K and V
// from shared memory for half of the queries, where the products are narrow: 24 cycles of reads for 16 of a tensor core.
//
// What changes: 80 keys a block. wgmma has 64 rows, so keys are columns of every product but dQ's: S = Q K^T, dV^T = dO^T P, dK^T = Q^T dS.
// Consumer 0 makes S and P of a tile, consumer 1 dP and dS, 64 queries x 80 keys each: Q and dO are read once for them, at 36 cycles of
// reads for 40. P goes from one to the other through shared memory, where it is an operand of dV in any case. What its rounding left lies in the place of dS.
// While consumer 0 has its exponentials, dP runs, and dV under dS. Each consumer makes 128 columns of dV and dK.
//
// Both blocks send their dS^T to each other, 10 KB, and each makes 128 columns of dQ over all 160 keys, of which a consumer has 64: 32
// registers and not 64. A block needs K of its own keys, and half of the columns of K of the others: 60 KB, where K of all would be 80.
//
//     consumer 0                 consumer 1
//     S                          dP
//     P to shared memory         (its own queries and keys wait for P)
//     -- a barrier: P is there --
//     dV += P dO                 dV += P dO; dS under it, to shared memory
//     -- a barrier: dS is there; consumer 1 starts to copy it to the other block --
//     dQ = dS K, own keys        the same
//     dK += dS Q, 64 columns     the same                          then dO is released
//     dQ += dS K, others' keys   the same                          when the other block's dS is there
//     dK += dS Q, 64 columns     the same                          dQ is added under it
//
// Shared memory holds K, 60 KB, V 40, Q of two tiles 64, dO of one 32, dS^T of both blocks 20, P^T 10. It is full: logsumexp comes with Q,
// delta with dO. That dO of a tile is there says also that both consumers have read P^T of the tile before.
//
// Both blocks walk the same tiles; where none of a block's keys is seen its P is 0. A cluster barrier stands at the beginning and at the
// end, as in hopper_cluster. There are no splits: where works are few, hopper_cluster is faster (not measured).
#include <fa/accumulator.cuh>
#include <fa/cluster.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, HEAD_DIM, WORKSPACE_STATS, WORKSPACE_DQ>;

constexpr int THREADS = 384, STAGES = 2, SLABS = Tiles::slabs;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr int BLOCK_K = 80, KEYS = 2 * BLOCK_K;  // of a block, of the cluster
constexpr int OWN_SLABS = SLABS / 2;  // of dK and dV of a consumer, and of dQ of a block
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of P^T and dS^T, 64 queries wide
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, STATS = BLOCK_Q * 4;
static_assert(HEAD_DIM == 256 && BLOCK_Q == 64, "its registers and shared memory are those of head dim 256 and 64 queries");

// A descriptor that is made where it is needed (fa::descriptor_here), of which an advance changes the lower word alone: hoisted, those of a
// tile of keys would be spilled.
struct Here {
    uint32_t lower, upper;
    __device__ __forceinline__ explicit Here(uint64_t descriptor)
        : lower(uint32_t(fa::descriptor_here(uint32_t(descriptor)))), upper(uint32_t(descriptor >> 32)) {}
};
__device__ __forceinline__ uint64_t descriptor_advance(const Here& here, uint32_t bytes) {
    return uint64_t(here.upper) << 32 | (here.lower + (bytes >> 4));
}

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) { Tiles::prepare<scalar>(args); }

// The 160 keys of a cluster, of one head, and the tiles of queries that see them.
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    return Tiles::work<KEYS>(args, number, args.runtime[RUNTIME_SECTION]);
}
__device__ __forceinline__ int works_of(const fa::Args& args) { return Tiles::works<KEYS>(args, 1); }

// The barriers of a block. `numbers` and number_full: of works, by turns, so that the next one may come while this one is worked on.
struct Barriers {
    uint64_t number_full[2], k_full, v_full, kv_empty, dkv_full[2];  // kv_empty: in both blocks; dkv_full: of a consumer
    uint64_t q_full[STAGES], q_empty[STAGES], do_full, do_empty;  // of Q and logsumexp; of dO and delta
    uint64_t ds_full, ds_empty;  // dS^T of the other block; this block's may be written again: here, and in the other block

    __device__ __forceinline__ void init() {
        fa::mbarrier_init(&k_full, 1), fa::mbarrier_init(&v_full, 1);
        fa::mbarrier_init(&kv_empty, 4);  // two storers of each block
        fa::mbarrier_init(&do_full, 1), fa::mbarrier_init(&do_empty, 8);  // each warp arrives
        fa::mbarrier_init(&ds_full, 1), fa::mbarrier_init(&ds_empty, 16);  // each warp of both blocks
        for (int i = 0; i < 2; ++i) {
            fa::mbarrier_init(number_full + i, 1), fa::mbarrier_init(dkv_full + i, 4);
            fa::mbarrier_init(q_full + i, 1), fa::mbarrier_init(q_empty + i, 8);
        }
        fa::mbarrier_init_fence();
    }
};

// What a block has in shared memory.
struct Shared {
    int rank = blockIdx.x % 2;  // of the block in its cluster
    unsigned char* k = fa::dynamic_shared_1024();  // [SLABS][BLOCK_K][64]; dK in the end
    unsigned char* others_k = k + K_TILE;  // [OWN_SLABS][BLOCK_K][64]: of the other block's keys, the columns of this one's dQ
    unsigned char* v = others_k + OWN_SLABS * K_SLAB;  // [SLABS][BLOCK_K][64]; dV in the end
    unsigned char* q = v + K_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [SLABS][BLOCK_Q][64]
    unsigned char* ds = d_o + Q_TILE;  // [BLOCK_K][64]: dS^T
    unsigned char* others_ds = ds + K_SLAB;  // [BLOCK_K][64]
    unsigned char* p = others_ds + K_SLAB;  // [BLOCK_K][64]: P^T
    unsigned char* lse = p + K_SLAB;  // [STAGES][BLOCK_Q], times log2(e)
    unsigned char* delta = lse + STAGES * STATS;  // [BLOCK_Q]
    int* numbers = reinterpret_cast<int*>(delta + STATS);  // [2][4]: the first of 4 is a work, or there are no more
    Barriers* barriers = reinterpret_cast<Barriers*>(numbers + 8);
    uint32_t other_k = fa::map_shared(k, rank ^ 1);

    __device__ __forceinline__ int* number(const fa::Ring<1>& kv) const { return numbers + kv.position % 2 * 4; }
    // The address in the other block of what lies here in this one.
    __device__ __forceinline__ uint32_t other(const void* smem) const {
        return other_k + uint32_t(static_cast<const unsigned char*>(smem) - k);
    }
};

// One thread: loads K, V and the tiles of queries of this block. That of rank 0 takes the numbers for both.
struct Producer {
    const fa::Args& args;
    const Shared& smem;
    const fa::Maps maps;
    int* counters;
    int next = 0;
    fa::Ring<1> kv{};
    fa::Ring<STAGES> q{};  // of Q and logsumexp

    __device__ __forceinline__ Barriers& at() { return *smem.barriers; }

    __device__ __forceinline__ void fetch_number() {
        if (smem.rank == 0) next = atomicAdd(counters, 1);
    }
    __device__ __forceinline__ void send_number() {
        for (int i = 0; smem.rank == 0 && i < 2; ++i)
            fa::store_remote_16(fa::map_shared(smem.number(kv), i), next, 0, 0, 0, fa::map_shared(at().number_full + kv.position % 2, i));
    }
    // The work whose K and V may come, as a number that has been sent.
    __device__ __forceinline__ int wait_number() {
        fa::mbarrier_wait_parity(&at().kv_empty, kv.parity() ^ 1);
        fa::mbarrier_arrive_expect_tx(at().number_full + kv.position % 2, 16);
        fa::mbarrier_wait_parity(at().number_full + kv.position % 2, kv.position / 2 % 2);
        return *smem.number(kv);
    }
    __device__ __forceinline__ void load_keys(const Work& work) {
        const int k_first = work.k_first + smem.rank * BLOCK_K, others = work.k_first + (smem.rank ^ 1) * BLOCK_K;
        Tiles::load<K_SLAB, SLABS>(smem.k, maps.k, &at().k_full, k_first, work.kv_head, work.batch, OWN_SLABS * K_SLAB);
        for (int slab = 0; slab < OWN_SLABS; ++slab)
            fa::tma_load_4d(smem.others_k + slab * K_SLAB, &maps.k, &at().k_full, 64 * (smem.rank * OWN_SLABS + slab), others, work.kv_head,
                            work.batch);
        Tiles::load<K_SLAB, SLABS>(smem.v, maps.v, &at().v_full, k_first, work.kv_head, work.batch);
        kv.next();
    }
    __device__ __forceinline__ void load_queries(int tile, int head, int batch) {
        fa::mbarrier_wait_parity(at().q_empty + q.stage(), q.parity() ^ 1);
        const int q_first = tile * BLOCK_Q;
        Tiles::load<Q_SLAB, SLABS>(smem.q + q.stage() * Q_TILE, maps.q, at().q_full + q.stage(), q_first, head, batch, STATS);
        fa::dependency_wait();  // for logsumexp and delta
        fa::tma_load_4d(smem.lse + q.stage() * STATS, &maps.stats, at().q_full + q.stage(), 0, tile, head, batch);
        fa::mbarrier_wait_parity(&at().do_empty, q.position % 2 ^ 1);
        Tiles::load<Q_SLAB, SLABS>(smem.d_o, maps.d_o, &at().do_full, q_first, head, batch, STATS);
        fa::tma_load_4d(smem.delta, &maps.stats, &at().do_full, BLOCK_Q, tile, head, batch);
    }
    __device__ __forceinline__ void run() {
        fetch_number();
        send_number();
        while (true) {
            const int number = wait_number();
            if (number >= works_of(args)) break;
            const Work work = work_of(args, number);
            load_keys(work);
            const int heads = args.heads_q / args.heads_kv;
#pragma unroll 1  // the producer has few registers
            for (int head = work.head; head < work.head + heads; ++head)
#pragma unroll 1
                for (int tile = work.first; tile < work.end; ++tile, q.next()) load_queries(tile, head, work.batch);
            fetch_number();  // not before: the next work would wait until this one has ended
            send_number();
        }
        fa::mbarrier_arrive(&at().k_full);
        // The last cluster to finish leaves the counters as it found them, for the next launch.
        if (smem.rank == 0) fa::reset_by_last(counters, gridDim.x / 2);
    }
};

// One thread for each consumer: stores its columns of dK and dV. K's place holds dK in the end, V's dV; both blocks may then load the next.
struct Storer {
    const fa::Args& args;
    const Shared& smem;
    const fa::TensorMap &dk_map, &dv_map;
    int consumer;
    fa::Ring<1> kv{};

    __device__ __forceinline__ Barriers& at() { return *smem.barriers; }

    __device__ __forceinline__ void store_gradients(const Work& work) {
        const int key = work.k_first + smem.rank * BLOCK_K;
        fa::mbarrier_wait_parity(at().dkv_full + consumer, kv.parity());
        for (int slab = consumer * OWN_SLABS; slab < (consumer + 1) * OWN_SLABS; ++slab) {
            fa::tma_store_4d(&dk_map, smem.k + slab * K_SLAB, 64 * slab, key, work.kv_head, work.batch);
            fa::tma_store_4d(&dv_map, smem.v + slab * K_SLAB, 64 * slab, key, work.kv_head, work.batch);
        }
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(&at().k_full, kv.parity());
            const int number = *smem.number(kv);
            if (number >= works_of(args)) break;
            store_gradients(work_of(args, number));
            fa::mbarrier_arrive(&at().kv_empty);
            fa::mbarrier_arrive_remote(smem.other(&at().kv_empty));
            kv.next();
        }
    }
};

// P (Role 0) or dS (1) of each tile of queries with this block's keys, 16 queries a warp; 128 columns of dK and dV, 64 of dQ.
template <int Role> struct Consumer {
    const fa::Args& args;
    const Shared& smem;
    const int lane = fa::lane_id(), warp = fa::warp_id() % 4, row = 16 * warp + lane / 4;  // row: of a tile's queries, the thread's first
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    fa::Ring<1> kv{};
    fa::Ring<STAGES> q{};  // of Q, dO and what comes with them
    Work work{};
    float dk_reg[OWN_SLABS][BLOCK_K / 2], dv_reg[OWN_SLABS][BLOCK_K / 2], score_reg[BLOCK_K / 2], dq_reg[32];

    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block) : args(all), smem(block) {}
    __device__ __forceinline__ Barriers& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }
    __device__ __forceinline__ int own_key() { return work.k_first + smem.rank * BLOCK_K; }
    __device__ __forceinline__ unsigned char* q_tile() { return smem.q + q.stage() * Q_TILE; }
    __device__ __forceinline__ void wait_q() { fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity()); }
    __device__ __forceinline__ void wait_do() { fa::mbarrier_wait_parity(&at().do_full, q.position % 2); }

    // S or dP: rows of Q or dO with those of K or V
    __device__ __forceinline__ void issue_scores(unsigned char* a_smem, unsigned char* b_smem) {
        const Here a(fa::smem_descriptor_k_major(a_smem)), b(fa::smem_descriptor_k_major(b_smem));
        fa::issue_abt<scalar, COLUMNS>(score_reg, a, Q_SLAB, b, K_SLAB);
    }
    // d += dO^T P or Q^T dS, of 64 columns of the head; b_smem: P^T or dS^T
    __device__ __forceinline__ void issue_gradient(float (&d)[BLOCK_K / 2], unsigned char* a_smem, int slab, unsigned char* b_smem) {
        const Here a(fa::smem_descriptor_mn_major(a_smem + (Role * OWN_SLABS + slab) * Q_SLAB, Q_SLAB));
        const Here b(fa::smem_descriptor_k_major(b_smem));
        fa::issue_atbt<scalar, BLOCK_Q, true>(d, a, b, K_SLAB);
    }
    __device__ __forceinline__ void issue_dv() {
        for (int slab = 0; slab < OWN_SLABS; ++slab) issue_gradient(dv_reg[slab], smem.d_o, slab, smem.p);
    }
    __device__ __forceinline__ void issue_dk(int slab) { issue_gradient(dk_reg[slab], q_tile(), slab, smem.ds); }
    // 64 columns of dQ = dS K over the keys of one block; the second adds to the first.
    template <bool Second> __device__ __forceinline__ void issue_dq(unsigned char* ds_smem, unsigned char* k_smem) {
        const Here a(fa::smem_descriptor_mn_major(ds_smem, K_SLAB)), b(fa::smem_descriptor_mn_major(k_smem, K_SLAB));
        fa::issue_atb<scalar, BLOCK_K, Second>(dq_reg, a, b);
    }

    // Behind it both consumers see P^T or dS^T. The two have texts of their own, so not bar.sync.
    __device__ __forceinline__ void meet() { fa::barrier_sync(1, 256); }
    __device__ __forceinline__ void store(unsigned char* to_smem, const uint32_t (&operand)[BLOCK_K / 16][4]) {
        fa::store_operand_transposed(to_smem, warp, operand);
        fa::fence_proxy_async_shared();
    }
    // S, then P of the tile to shared memory; dV is in flight.
    __device__ __forceinline__ void make_p(int tile) {
        wait_q();
        issue_scores(q_tile(), smem.k);
        const float* lse_smem = reinterpret_cast<const float*>(smem.lse + q.stage() * STATS) + row;
        const float lse[2] = {lse_smem[0], lse_smem[8]};
        fa::wgmma_wait<0>(score_reg);
#pragma unroll
        for (int i = 0; i < BLOCK_K / 2; ++i) score_reg[i] = fa::exp2_approx(score_reg[i] * scale_log2e - lse[i / 2 % 2]);
        const int query = tile * BLOCK_Q;
        if (own_key() + BLOCK_K > fa::visible_keys(args, query)) {
            const int visible[2] = {fa::visible_keys(args, query + row) - own_key(), fa::visible_keys(args, query + row + 8) - own_key()};
            fa::mask_columns(score_reg, visible, 0.0f);
        }
        uint32_t operand[BLOCK_K / 16][4];
        fa::pack_operand<scalar>(operand, score_reg);
        uint32_t rest[BLOCK_K / 16][4];  // what rounding P left
#pragma unroll
        for (int i = 0; i < BLOCK_K / 2; ++i) score_reg[i] -= fa::widen(scalar{fa::uint16_t(operand[i / 8][i % 8 / 2] >> i % 2 * 16)});
        fa::pack_operand<scalar>(rest, score_reg);
        wait_do();  // P^T of the tile before has been read
        fa::mbarrier_wait_parity(&at().ds_empty, q.position % 2 ^ 1);
        fa::store_operand_transposed(smem.ds, warp, rest);
        store(smem.p, operand);
        meet();
        issue_dv();
        meet();
    }
    // dP, then dS of the tile to shared memory, under dV, and on its way to the other block.
    __device__ __forceinline__ void make_ds() {
        wait_do();
        issue_scores(smem.d_o, smem.v);
        const float* delta_smem = reinterpret_cast<const float*>(smem.delta) + row;
        const float delta[2] = {delta_smem[0], delta_smem[8]};
        wait_q();
        meet();
        issue_dv();
        fa::wgmma_wait<OWN_SLABS>(score_reg);
        uint32_t operand[BLOCK_K / 16][4];
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step) {
            uint32_t p[1][4], rest[1][4];
            fa::load_operand_transposed(p, smem.p + step * 2048, warp);
            fa::load_operand_transposed(rest, smem.ds + step * 2048, warp);
            float ds[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const auto half = [&](uint32_t two) { return fa::widen(scalar{fa::uint16_t(two >> i % 2 * 16)}); };
                ds[i] = (half(p[0][i / 2]) + half(rest[0][i / 2])) * (score_reg[8 * step + i] - delta[i / 2 % 2]);
            }
            for (int r = 0; r < 4; ++r) operand[step][r] = fa::pack<scalar>(ds[2 * r], ds[2 * r + 1]);
        }
        __syncwarp();
        store(smem.ds, operand);
        meet();
        if (warp == 0 && lane == 0) {
            fa::mbarrier_arrive_expect_tx(&at().ds_full, K_SLAB);  // the other block's
            fa::bulk_copy_to_cluster(smem.other(smem.others_ds), smem.ds, K_SLAB, smem.other(&at().ds_full));
        }
    }
    __device__ __forceinline__ void run_tile(int tile, float* dq) {
        if constexpr (Role == 0) make_p(tile);
        else make_ds();
        issue_dq<false>(smem.ds, smem.k + (smem.rank * OWN_SLABS + Role) * K_SLAB);
        issue_dk(0);
        if constexpr (LATE) issue_dk(1);
        fa::wgmma_wait<2 + LATE>(dv_reg[0], dv_reg[1]);
        release(&at().do_empty);
        fa::mbarrier_wait_parity(&at().ds_full, q.position % 2);
        issue_dq<true>(smem.others_ds, smem.others_k + Role * K_SLAB);
        if constexpr (!LATE) issue_dk(1);
        fa::wgmma_wait<!LATE>(dq_reg);
        if (lane == 0) fa::mbarrier_arrive_remote(smem.other(&at().ds_empty));
        Tiles::add_groups(dq + (smem.rank * OWN_SLABS + Role) * Tiles::part + threadIdx.x % 128 * 4, dq_reg);
        fa::schedule_fence();
        fa::wgmma_wait<0>(dk_reg[0], dk_reg[1]);
        release(&at().ds_empty);
        release(at().q_empty + q.stage());
        q.next();
    }
    // All tiles of queries of the work.
    __device__ __forceinline__ void walk() {
#pragma unroll
        for (int slab = 0; slab < OWN_SLABS; ++slab)
            for (int i = 0; i < BLOCK_K / 2; ++i) dk_reg[slab][i] = dv_reg[slab][i] = 0;
        const int heads = args.heads_q / args.heads_kv;
#pragma unroll 1
        for (int head = work.head; head < work.head + heads; ++head)
#pragma unroll 1
            for (int tile = work.first; tile < work.end; ++tile)
                run_tile(tile, Tiles::dq(args, Tiles::number(args, work.batch, head, tile)));
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them.
    __device__ __forceinline__ void stage_gradients() {
        fa::barrier_sync(1, 256);  // the other consumer's products have read K and V
#pragma unroll
        for (int slab = 0; slab < OWN_SLABS; ++slab) {
            const uint32_t to = (Role * OWN_SLABS + slab) * K_SLAB;
            uint32_t operand[BLOCK_K / 16][4];
            fa::pack_operand<scalar>(operand, dv_reg[slab]);
            store(smem.v + to, operand);
            fa::scale_rows(dk_reg[slab], {scale, scale});
            fa::pack_operand<scalar>(operand, dk_reg[slab]);
            store(smem.k + to, operand);
        }
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(&at().k_full, kv.parity());
            const int number = __shfl_sync(fa::full_warp, *smem.number(kv), 0);  // known to the compiler as the same in the whole warp
            if (number >= works_of(args)) break;
            work = work_of(args, number);
            fa::mbarrier_wait_parity(&at().v_full, kv.parity());
            walk();
            stage_gradients();
            __syncwarp();
            release(at().dkv_full + Role);
            kv.next();
        }
    }
};

// Launch 2. A cluster keeps 160 keys, each of its blocks 80; the queries that see them are streamed, of all heads that read this key head.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gradients(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
              const __grid_constant__ fa::TensorMap k_map, const __grid_constant__ fa::TensorMap v_map,
              const __grid_constant__ fa::TensorMap d_o_map, const __grid_constant__ fa::TensorMap stats_map,
              const __grid_constant__ fa::TensorMap dk_map, const __grid_constant__ fa::TensorMap dv_map) {
    fa::launch_dependents();
    const Shared smem;
    if (threadIdx.x == 0) smem.barriers->init();
    fa::cluster_sync();
    const int warpgroup = fa::warpgroup_index();
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<504 - 2 * REGISTERS>();
        int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
        if (threadIdx.x == 0) Producer{args, smem, {q_map, k_map, v_map, d_o_map, stats_map}, counters}.run();
        else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) Storer{args, smem, dk_map, dv_map, int(threadIdx.x / 32) - 1}.run();
        __syncwarp();
    } else {
        fa::setmaxnreg_inc<REGISTERS>();
        if (warpgroup == 1) Consumer<0>(args, smem).run();
        else Consumer<1>(args, smem).run();
    }
    fa::cluster_sync();  // the other block arrives at this one's barriers until its end
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) { Tiles::convert<scalar>(args); }
