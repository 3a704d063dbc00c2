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
// spill_bytes_allowed = 40  # where Q is in its ring, read once a tile, O leaves in parts, and what computes scores again
// [tile]
// CONSUMERS = "3 if HEAD_DIM == 64 else 2"  # warpgroups of 64 queries
// BLOCK_K = 128
// STAGES = 2    # tiles of K, and of V^T
// V_STAGES = "1 if HEAD_DIM == 256 else 2"  # tiles of V as it lies
// Q_STAGES = "1 if HEAD_DIM == 256 else 2"  # tiles of Q, through which O leaves
// O_PARTS = 1   # O leaves in parts, each through all of its tile of Q
// PROMOTE = 1   # the sum of a tile's P V is added to O in float32; 0: the tensor cores add all of them
// OVERLAP = "1 if HEAD_DIM == 128 else 0"  # a consumer's softmax runs beside its own product
// TURNS = 1     # the products of the consumers take turns
// V_FIRST = 0   # V is transposed by a launch of its own
// PIECE = "HEAD_DIM if OVERLAP or not PROMOTE else 64"  # columns of O whose sum is promoted at once
// SUMS = "1 if OVERLAP or not PROMOTE else min(2, BLOCK_K // PIECE, pieces)"  # of pieces in flight
// SECTION = 16  # MB of K and V of the heads that run at the same time, under the causal mask
// [let]
// pieces = "HEAD_DIM // PIECE * ceil_div(BLOCK_K, 128)"
// width = "max(HEAD_DIM, 128)"  # bytes of a row of Q, K and V
// q_bytes = "Q_STAGES * CONSUMERS * 64 * max(width, 2 * HEAD_DIM // O_PARTS)"  # of Q, and of O in its place
// k_bytes = "STAGES * width * BLOCK_K"
// v_bytes = "1024 if V_FIRST else V_STAGES * width * BLOCK_K"
// vt_bytes = "STAGES * HEAD_DIM * round_up(BLOCK_K, 128)"
// barriers = "5 * Q_STAGES + 4 * STAGES + 2 * V_STAGES"  # and tasks
// keys = "round_up(seq_kv, BLOCK_K) if V_FIRST else 16"  # of V^T in memory
// group = "heads_q // heads_kv"
// [[choice]]
// when = "HEAD_DIM == 256 and seq_kv >= 8192"
// PIECE = 128
// evidence = "experiments/fp8/forms.txt: S16384 1.09 of 64 columns, causal 1.05; S4096 0.97 and 1.01; 8192 is not measured"
// [[choice]]
// when = "HEAD_DIM == 256 and seq_q <= 4096"  # Q of the next tile is loaded while O leaves
// Q_STAGES = 2
// O_PARTS = 2
// evidence = "experiments/fp8/forms.txt: B4 H8 S1024 1.05 of one stage, causal 1.06; S2048 1.02, 1.07; S4096 1.03, 1.003; 8192 is not measured"
// [[choice]]
// when = "seq_q * group > 1024"  # V is transposed for many queries
// BLOCK_K = "256 if HEAD_DIM == 128 else 128"
// OVERLAP = 0
// V_FIRST = 1
// evidence = "experiments/fp8/forms.txt: S16384 1.01 to 1.08 times as fast as without, S1024 0.86 to 1.01"
// [workspace.counters]
// dtype = "float32"  # two integers
// size = "2"
// init = "zero_once"
// [workspace.transposed]
// dtype = "float8_e4m3"
// size = "keys * HEAD_DIM * heads_kv * batch"
// init = "none"
// [tensor_map.q]
// tensor = "Q"
// box = [128, 64, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [128, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [128, "BLOCK_K", 1, 1]
// swizzle = 128
// [tensor_map.vt]
// tensor = "transposed"
// dims = ["keys", "HEAD_DIM", "heads_kv", "batch"]
// strides = ["keys", "keys * HEAD_DIM", "keys * HEAD_DIM * heads_kv"]
// box = [128, "HEAD_DIM", 1, 1]
// swizzle = 128
// [tensor_map.o]
// tensor = "O"
// box = [64, 16, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "transpose"
// when = "V_FIRST"
// grid = ["ceil_div(seq_kv, BLOCK_K)", "heads_kv", "batch"]
// block = 128
// shared = "BLOCK_K * (width + HEAD_DIM) + 8"
// maps = ["v", "vt"]
// [[launch]]
// entry = "forward"
// overlaps = "V_FIRST"
// grid = "min(sms, ceil_div(seq_q, 64 * CONSUMERS) * heads_q * batch)"
// block = "128 * (CONSUMERS + 1)"
// shared = "q_bytes + k_bytes + v_bytes + vt_bytes + 8 * barriers"
// ///
//
// Step 31, read against steps 21 and 22, whose persistent blocks, turns and overlap are here. Elements of 8 bits (e4m3): the tensor cores
// multiply twice as many a cycle as of 16, and K and V are half the bytes. So the softmax, which has not become cheaper, counts twice.
//
//     V^T       wgmma takes operands of 8 bits K-major only. Three of the producer's warps transpose each tile of V in shared memory
//               (fa/accumulator_float8.cuh), behind its copy and before the consumers see it. With V_FIRST a launch before does it once for
//               all blocks, which begin meanwhile: it costs a pass over V, and saves the loop a third of its traffic in shared memory
//     sums      Hopper keeps 13 bits of a sum of 8 bits (fa/wgmma_float8.cuh). Of 2500 keys whose V does not change its sign a sum that is
//               never promoted loses 4 %, on the CPU engine, one that is promoted after 128 keys 0.1 %. Here the product of a tile begins
//               at 0, and is added to O while the next S = Q K^T runs
//     P         rounded to e4m3, whose numbers end at 448 and have 4 bits from 2^-6 on. Beyond the end it would be cut off without a sign of
//               it; far below, small P would be 0
//
// The softmax has no maximum, as in step 20, but e4m3 has less room than bfloat16. So the first tile of a row decides where P lies: its
// largest is 2^8 where few keys have all the weight, less where many share it, so that the tile's sum is below 2^9. A thread's sum of a
// later tile, 32 keys of 128, is larger than each P of it: up to 448 nothing is cut off, and rows that grow slowly never ask for more. Where
// it is larger, P is still there in float32: the largest gives a new reference, and P, O and the row sum are multiplied. Where P is infinite
// even there, the scores are computed again (mma.sync). Row sums are of P before it is rounded.
//
// Registers. At head dim 128 a consumer holds S, O, its sum that is not yet promoted and P: 208 of 232. At 256 that would be more than there
// are: a consumer's softmax runs beside the other's products only, and P V has 64 columns at a time, one product while the last is added. So
// it is at 128 where queries are many: S of 256 keys, 128 registers, and half as many turns.
// At 64 the exponentials take twice as long as the products: a third consumer keeps them busy.
//
// What an element is worth, the descales of a batch and key head, is the problem's: those of Q and K come into the scale, that of V into
// the last factor. The bytes of a head dim of 64 lie in rows of 128, of which the second half is zeros and not multiplied.
#include <fa/accumulator_float8.cuh>
#include <fa/atomic.cuh>
#include <fa/key_tiles.cuh>
#include <fa/overlap.cuh>
#include <fa/stage.cuh>
#include <fa/wgmma_float8.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
// Of a thread of each warpgroup, all together: what the block is launched with. Consumers have what the producer can spare.
constexpr int REGISTERS = 512 / (CONSUMERS + 1) / 8 * 8 * (CONSUMERS + 1);
constexpr int CONSUMER_REGISTERS = (REGISTERS - 32) / CONSUMERS / 8 * 8;
constexpr int TRANSPOSERS = 3;  // warps
constexpr int SLABS = (HEAD_DIM + 127) / 128;  // a tile lies in slabs of 128 bytes, the swizzle's width: columns of Q and K,
constexpr int KEY_SLABS = (BLOCK_K + 127) / 128;  // keys of V^T,
constexpr int SLABS_O = HEAD_DIM / 64 / O_PARTS;  // and columns of a part of O
static_assert(SLABS_O * O_PARTS * 64 == HEAD_DIM, "a part of O is whole slabs");
constexpr uint32_t Q_SLAB = 64 * 128, K_SLAB = BLOCK_K * 128, VT_SLAB = HEAD_DIM * 128;  // bytes
constexpr int SLABS_Q = SLABS > SLABS_O ? SLABS : SLABS_O;  // of a consumer's piece of Q, where O lies in the end
// What is promoted at once is a piece of P V: PIECE columns of O, and 128 keys.
constexpr int COLUMNS = HEAD_DIM / PIECE, PIECES = COLUMNS * (PROMOTE ? KEY_SLABS : 1);
constexpr float LIMIT = 448;  // the largest e4m3, of a thread's sum of a tile
constexpr int TOP = 6;  // the largest P is 2^TOP where a reference has been raised
static_assert(BLOCK_K >= 64, "the mask of 64 queries ends in the last two tiles");
static_assert(BLOCK_K % 32 == 0 && (!V_FIRST || BLOCK_K % 128 == 0), "V^T is stored and loaded in slabs of 128 keys");
static_assert(HEAD_DIM % PIECE == 0, "O is whole pieces");
static_assert(!OVERLAP || !PROMOTE || PIECES == 1, "beside a product there are registers for one more piece");
static_assert(SUMS <= PIECES && (OVERLAP || !PROMOTE || SUMS * PIECE <= BLOCK_K), "sums have the registers of S");

using Tiles = fa::KeyTiles<BLOCK_Q, BLOCK_K>;

// A tile of queries and what its numbers are worth. work.tiles: 0 where there is no more work.
struct Task {
    Tiles::Work work;
    float scale, descale;  // of Q K^T; of V
};

// The block's shared memory: tiles, and mbarriers for each: a phase of `full` ends when the tile has arrived, or is transposed, a phase of
// `empty` when all warps have read it.
struct Shared {
    unsigned char q[Q_STAGES][CONSUMERS][SLABS_Q * Q_SLAB];  // each [SLABS][64][128]; O in the end, [SLABS_O][64][64]
    unsigned char k[STAGES][SLABS * K_SLAB];  // each [SLABS][BLOCK_K][128]
    unsigned char vt[STAGES][KEY_SLABS * VT_SLAB];  // each [KEY_SLABS][HEAD_DIM][128]
    unsigned char v[V_STAGES][V_FIRST ? 1024 / V_STAGES : SLABS * K_SLAB];  // as k
    uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[V_STAGES], v_empty[V_STAGES];
    uint64_t vt_full[STAGES], vt_empty[STAGES];
    Task tasks[Q_STAGES];  // whose Q is there
};

// Starts to copy a tile to its slabs, the next of which is `column` columns or `row` rows further on in the tensor.
template <int Slabs>
__device__ __forceinline__ void load_tile(unsigned char* tile_smem, uint32_t slab_bytes, const fa::TensorMap& map, uint64_t& full,
                                          int column, int row, int head, int batch) {
#pragma unroll
    for (int slab = 0; slab < Slabs; ++slab)
        fa::tma_load_4d(tile_smem + slab * slab_bytes, &map, &full, column + 128 * slab, row, head, batch);
}

// Starts the copies: one thread's task.
struct Producer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap &q_map, &k_map, &v_map, &vt_map;
    Task task = {};
    int kv_head = 0;
    fa::RingPlace<Q_STAGES> q;
    fa::RingPlace<STAGES> k, vt;
    fa::RingPlace<V_STAGES> v;

    // The task comes with its Q; where there is no more work, alone.
    __device__ __forceinline__ void load_q() {
        fa::mbarrier_wait_parity(&shared.q_empty[q.stage], q.parity ^ 1);
        shared.tasks[q.stage] = task;
        uint64_t& full = shared.q_full[q.stage];
        if (task.work.tiles) {
            fa::mbarrier_arrive_expect_tx(&full, CONSUMERS * SLABS * Q_SLAB);
            for (int i = 0; i < CONSUMERS; ++i)
                load_tile<SLABS>(shared.q[q.stage][i], Q_SLAB, q_map, full, 0, task.work.q_first + 64 * i, task.work.head, task.work.batch);
        } else fa::mbarrier_arrive(&full);
        q.next();
    }
    // The tile before in the stage has been released: for the first STAGES tiles a wait for the phase before the first, which passes.
    __device__ __forceinline__ void load_k(int n) {
        fa::mbarrier_wait_parity(&shared.k_empty[k.stage], k.parity ^ 1);
        fa::mbarrier_arrive_expect_tx(&shared.k_full[k.stage], SLABS * K_SLAB);
        load_tile<SLABS>(shared.k[k.stage], K_SLAB, k_map, shared.k_full[k.stage], 0, n * BLOCK_K, kv_head, task.work.batch);
        k.next();
    }
    __device__ __forceinline__ void load_v(int n) {
        if constexpr (V_FIRST) {
            fa::mbarrier_wait_parity(&shared.vt_empty[vt.stage], vt.parity ^ 1);
            fa::mbarrier_arrive_expect_tx(&shared.vt_full[vt.stage], KEY_SLABS * VT_SLAB);
            load_tile<KEY_SLABS>(shared.vt[vt.stage], VT_SLAB, vt_map, shared.vt_full[vt.stage], n * BLOCK_K, 0, kv_head, task.work.batch);
            vt.next();
        } else {
            fa::mbarrier_wait_parity(&shared.v_empty[v.stage], v.parity ^ 1);
            fa::mbarrier_arrive_expect_tx(&shared.v_full[v.stage], SLABS * K_SLAB);
            load_tile<SLABS>(shared.v[v.stage], K_SLAB, v_map, shared.v_full[v.stage], 0, n * BLOCK_K, kv_head, task.work.batch);
            v.next();
        }
    }
    __device__ __forceinline__ void find(int number) {
        task.work = Tiles::of_number<2 * HEAD_DIM>(args, number, SECTION);
        const int batch = task.work.batch;
        kv_head = fa::kv_head_of(args, task.work.head);
        task.scale = float(args.scale) * (fa::descale_of(args, 0, batch, kv_head) * fa::descale_of(args, 1, batch, kv_head));
        task.descale = fa::descale_of(args, 2, batch, kv_head);
    }
    // All works of the block: its own number first, then what the counter gives. The counter's answer takes a microsecond, in which the
    // last keys are loaded. Where Q has one stage, O leaves through it: the next tile's first keys go ahead of its Q.
    __device__ __forceinline__ void load_works(int* counters) {
        int number = blockIdx.x;
        bool waited = false;
        while (number < Tiles::works(args)) {
            find(number);
            if (Q_STAGES > 1) load_q();
#pragma unroll 1  // the producer has few registers
            for (int n = 0; n < task.work.tiles; ++n) {
                load_k(n);
                if (Q_STAGES == 1 && n == 0) load_q();
                if (n == task.work.tiles - 1) number = gridDim.x + atomicAdd(counters, 1);
                if (V_FIRST && !waited) fa::dependency_wait(), waited = true;
                load_v(n);
            }
        }
        task = {};
        load_q();
        // The last block to finish leaves the counters as it found them, for the next launch.
        fa::reset_by_last(counters, gridDim.x);
    }
};

// Transposes each tile of V that has arrived: three warps' task.
struct Transposer {
    Shared& shared;
    int index;  // of the warp
    fa::Ring<Q_STAGES> q;
    uint32_t position = 0;  // of the tile, in both rings

    __device__ __forceinline__ int take_work() {
        fa::mbarrier_wait_parity(&shared.q_full[q.stage()], q.parity());
        const int tiles = shared.tasks[q.stage()].work.tiles;
        __syncwarp();
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.q_empty[q.stage()]);
        q.next();
        return tiles;
    }
    __device__ __forceinline__ void transpose() {
        const fa::Ring<V_STAGES> v{position};
        const fa::Ring<STAGES> vt{position};
        fa::mbarrier_wait_parity(&shared.v_full[v.stage()], v.parity());
        fa::mbarrier_wait_parity(&shared.vt_empty[vt.stage()], vt.parity() ^ 1);
        fa::transpose_keys<BLOCK_K, HEAD_DIM>(shared.vt[vt.stage()], shared.v[v.stage()], index, TRANSPOSERS);
        fa::fence_proxy_async_shared();
        __syncwarp();
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.v_empty[v.stage()]), fa::mbarrier_arrive(&shared.vt_full[vt.stage()]);
        ++position;
    }
};

// Attention of 64 queries of each work: a warpgroup's task. A thread has parts of two rows, row() and row() + 8.
struct Consumer {
    Shared& shared;
    const fa::Args& args;
    int index;  // of the block's consumers
    float score_reg[BLOCK_K / 2], out_reg[HEAD_DIM / 2];
    uint32_t p_reg[BLOCK_K / 32][4];
    float sum_reg[SUMS][PIECE / 2];  // of P V of a tile, not yet promoted
    // P = 2^(scale_log2e S - reference). The largest P is a power of two, which is rounded without an error, where it gave the reference.
    float reference[2], row_sum[2], sum[2];  // sum: of one tile
    float scale_log2e;
    uint32_t end;  // the position in the ring of K behind the last tile
    fa::Ring<Q_STAGES> q;
    fa::Ring<STAGES> k;  // V^T of a tile lies in the same stage

    static __device__ __forceinline__ int warp_row() { return fa::warp_id() % 4 * 16; }
    __device__ __forceinline__ unsigned char* q_smem() const { return shared.q[q.stage()][index]; }
    __device__ __forceinline__ const Task& task() const { return shared.tasks[q.stage()]; }
    // Computed where they are needed: the main loop has no register to spare.
    __device__ __forceinline__ int first() const { return task().work.q_first + 64 * index; }  // of its queries
    __device__ __forceinline__ int row() const { return first() + warp_row() + fa::fragment_row(); }
    __device__ __forceinline__ int tiles() const {  // those of work.tiles that its queries see
        return first() >= args.seq_q ? 0 : min(task().work.tiles, Tiles::seen(args, first() + 64));
    }
    __device__ __forceinline__ fa::Ring<STAGES> before() const { return {k.position - 1}; }  // the tile whose V is next

    // Waits for the next work and its Q; false: there is none. A consumer without queries has no tile of keys.
    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(&shared.q_full[q.stage()], q.parity());
        end = k.position + tiles();
        const float scale = task().scale;
        scale_log2e = (scale == 0 ? 1.0f : fabsf(scale)) * fa::log2e;
        if (scale <= 0) apply_sign(scale);
        return task().work.tiles > 0;
    }
    // The largest S is the largest logit only where the scale is positive: the sign of a negative one is applied to Q.
    __device__ __forceinline__ void apply_sign(float scale) {
        for (int i = threadIdx.x % 128; i < int(SLABS * Q_SLAB / 4); i += 128) {
            uint32_t& four = reinterpret_cast<uint32_t*>(q_smem())[i];
            four = scale < 0 ? four ^ 0x80808080u : 0u;
        }
        fa::fence_proxy_async_shared();
        fa::bar_sync(1 + CONSUMERS + index, 128);
    }

    // Starts S = Q K^T with the next tile of K.
    __device__ __forceinline__ void issue_scores() {
        const uint64_t q_operand = fa::descriptor_here(fa::smem_descriptor_k_major(q_smem()));
        const uint64_t k_operand = fa::smem_descriptor_k_major(shared.k[k.stage()]);
        fa::mbarrier_wait_parity(&shared.k_full[k.stage()], k.parity());
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 32; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    }
    // Starts the product of a piece, added to what is there or not.
    template <int R> __device__ __forceinline__ void issue_product(float (&to)[R], int piece, bool accumulate) {
        const uint64_t v_operand = fa::smem_descriptor_k_major(shared.vt[before().stage()] + piece % COLUMNS * PIECE * 128);
        const int first = piece / COLUMNS * 4, behind = PROMOTE ? min(first + 4, BLOCK_K / 32) : BLOCK_K / 32;  // each of 32 keys
        fa::wgmma_fence();
#pragma unroll
        for (int step = first; step < behind; ++step)
            fa::wgmma_rs<scalar>(to, p_reg[step], fa::descriptor_advance(v_operand, step / 4 * VT_SLAB + step % 4 * 32),
                                 accumulate || step > first);
        fa::wgmma_commit();
    }
    // The tile before: O += P V, or the sum that will be promoted.
    __device__ __forceinline__ void issue_output() {
        fa::mbarrier_wait_parity(&shared.vt_full[before().stage()], before().parity());
        if constexpr (PROMOTE) issue_product(sum_reg[0], 0, false);
        else issue_product(out_reg, 0, true);
    }
    __device__ __forceinline__ void wait_scores() { fa::wgmma_wait<1>(score_reg); }  // O's product still runs
    __device__ __forceinline__ void wait_first_scores() { fa::wgmma_wait<0>(score_reg); }
    __device__ __forceinline__ void wait_output() {
        if constexpr (PROMOTE) fa::wgmma_wait<0>(sum_reg[0], p_reg);
        else fa::wgmma_wait<0>(out_reg, p_reg);
    }
    // O takes the sum of a piece.
    __device__ __forceinline__ void promote(int piece = 0) {
        if constexpr (PROMOTE) {
#pragma unroll
            for (int i = 0; i < PIECE / 2; ++i) out_reg[piece % COLUMNS * (PIECE / 2) + i] += sum_reg[piece % SUMS][i];
        }
    }
    __device__ __forceinline__ void clear_sum() {
        if constexpr (OVERLAP && PROMOTE) {
#pragma unroll
            for (float& element : sum_reg[0]) element = 0;
        }
    }
    // Without overlap, from piece N on: all of O += P V. Then, where NEXT, S.
    template <bool NEXT, int N = 1> __device__ __forceinline__ void output() {
        if constexpr (N == 1) issue_output();
        if constexpr (N >= SUMS) {
            constexpr int piece = N - SUMS, behind = (N < PIECES ? N : PIECES) - piece - 1;
            if constexpr (!PROMOTE) wait_output();
            else if constexpr (piece < PIECES - 1) fa::wgmma_wait<behind>(sum_reg[piece % SUMS]);
            else fa::wgmma_wait<behind>(sum_reg[piece % SUMS], p_reg);
            promote(piece);
        }
        if constexpr (N < PIECES) issue_product(sum_reg[N % SUMS], N, false);
        if constexpr (N < PIECES + SUMS - 1) return output<NEXT, N + 1>();
        release_v(before().stage());
        if constexpr (NEXT) issue_scores();
    }

    // This warp has read the tile. Its products are complete; the producer waits for all warps.
    __device__ __forceinline__ void release_k() {
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.k_empty[k.stage()]);
        k.next();
    }
    __device__ __forceinline__ void release_v(uint32_t stage) {
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.vt_empty[stage]);
    }

    // Consumers issue products in turn: a named barrier each, at which it waits for its turn and the one before passes it on.
    __device__ __forceinline__ void begin_turn() {
        if (TURNS) fa::bar_sync(1 + index, 256);
    }
    __device__ __forceinline__ void end_turn() {
        if (TURNS) fa::bar_arrive(1 + (index + 1) % CONSUMERS, 256);
    }

    // -inf for keys that a query does not see. Of 64 queries that is in the last two tiles.
    __device__ __forceinline__ void mask() {
        const int left = end - k.position;
        if (left > 2) return;
        const int n = tiles() - left;
        if ((n + 1) * BLOCK_K > fa::visible_keys(args, first())) fa::mask_scores(score_reg, args, row(), n * BLOCK_K);
    }
    // The first tile of a work gives the reference of the whole row: its largest P is at most 2^8, and the sum of its P below 2^9.
    __device__ __forceinline__ void first_softmax() {
        mask();
        fa::first_reference(reference, score_reg, scale_log2e);
        fa::exponentiate(score_reg, sum, scale_log2e, reference);
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float lower = reference[half] - min(8, 8 - fa::exponent_of(fa::group_sum<4>(sum[half])));
            factor[half] = fa::exp2_approx(reference[half] - lower);
            reference[half] = lower, row_sum[half] = sum[half] * factor[half];
        }
        fa::scale_rows(score_reg, factor);
#pragma unroll
        for (float& element : out_reg) element = 0;
        clear_sum();
    }
    // S of a later tile becomes P.
    __device__ __forceinline__ void softmax() {
        mask();
        fa::exponentiate(score_reg, sum, scale_log2e, reference);
        fa::schedule_fence();  // the exponentials stay before the wait for O
    }
    // A thread's sum of a tile is larger than each P of it. Beyond the end of e4m3 the largest P, or where it is infinite the largest score,
    // computed again, tells whether a reference is too small. O and all sums are complete.
    __device__ __forceinline__ void check_sum() {
        if (!__any_sync(fa::full_warp, max(sum[0], sum[1]) > LIMIT)) return;
        const bool infinite = __any_sync(fa::full_warp, max(sum[0], sum[1]) == fa::infinity());
        if constexpr (OVERLAP) promote();
        if (infinite) {
            fa::multiply_abt_again<scalar, SLABS>(score_reg, fa::smem_u32(q_smem()) + warp_row() * 128, Q_SLAB,
                                                  fa::smem_u32(shared.k[k.stage()]), K_SLAB);
            __syncwarp();  // all lanes have read K when the first one releases it
            mask();
        }
        float maximum[2], factor[2];
        fa::local_row_max(maximum, score_reg);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float largest = fa::group_max<4>(maximum[half]), old = reference[half];
            if (infinite) reference[half] = max(old, largest * scale_log2e - TOP);
            else if (largest > LIMIT) reference[half] = old + fa::log(largest) * fa::log2e - TOP;
            factor[half] = fa::exp2_approx(old - reference[half]);
        }
        if (infinite) fa::exponentiate(score_reg, sum, scale_log2e, reference);
        else fa::scale_rows(score_reg, factor), sum[0] *= factor[0], sum[1] *= factor[1];
        row_sum[0] *= factor[0], row_sum[1] *= factor[1];
        fa::scale_rows(out_reg, factor);
        clear_sum();
    }
    __device__ __forceinline__ void pack() {
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        fa::pack_operand_8<scalar>(p_reg, score_reg);
    }
    // O / row sum, through the warp's own rows of Q's shared memory, whose stage is empty when the store has read it; and the logsumexp.
    __device__ __forceinline__ void store(const fa::TensorMap& o_map) {
        float inverse[2];
        fa::finish_row_sum(row_sum, inverse);
        inverse[0] *= task().descale, inverse[1] *= task().descale;
        unsigned char* rows_smem = q_smem() + warp_row() * 128;
        const Tiles::Work& work = task().work;
#pragma unroll
        for (int part = 0; part < O_PARTS; ++part) {
            constexpr int R = HEAD_DIM / 2 / O_PARTS;
            fa::store_rows_8<fa::bfloat16>(rows_smem, Q_SLAB, reinterpret_cast<const float (&)[R]>(out_reg[part * R]), inverse);
            fa::fence_proxy_async_shared();
            __syncwarp();
            if (fa::lane_id() == 0) {
#pragma unroll
                for (int slab = 0; slab < SLABS_O; ++slab)
                    fa::tma_store_4d(&o_map, rows_smem + slab * Q_SLAB, 64 * (part * SLABS_O + slab),
                                     work.q_first + 64 * index + warp_row(), work.head, work.batch);
                fa::bulk_commit(), fa::bulk_wait_read<0>();
            }
            if (part + 1 < O_PARTS) __syncwarp();
        }
        // Of the row sum's mantissa alone, which is near 1: a logarithm of 2^9 and a reference of -9 would round by that much.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int exponent = fa::exponent_of(row_sum[half]);
            if (row_sum[half] > 0) reference[half] += exponent, row_sum[half] *= fa::power_of_two(-exponent);
        }
        fa::store_logsumexp(args, work.batch, work.head, row(), reference, row_sum);
    }
    __device__ __forceinline__ void finish(const fa::TensorMap& o_map) {
        if (tiles() > 0) store(o_map);
        __syncwarp();  // all lanes have read the task
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.q_empty[q.stage()]);
        q.next();
    }
    // A tile that only other consumers need.
    __device__ __forceinline__ void skip_tile() {
        begin_turn();
        end_turn();
        fa::mbarrier_wait_parity(&shared.k_full[k.stage()], k.parity());
        fa::mbarrier_wait_parity(&shared.vt_full[k.stage()], k.parity());
        __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
        release_v(k.stage());
        release_k();
    }
};

// V^T of a tile of a head, in memory.
extern "C" __global__ void __launch_bounds__(128)
    transpose(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap v_map,
              const __grid_constant__ fa::TensorMap vt_map) {
    if constexpr (!V_FIRST) return;
    unsigned char* v_smem = fa::dynamic_shared_1024();
    unsigned char* vt_smem = v_smem + SLABS * K_SLAB;
    uint64_t& full = *reinterpret_cast<uint64_t*>(vt_smem + KEY_SLABS * VT_SLAB);
    const int key = blockIdx.x * BLOCK_K;
    fa::launch_dependents();
    if (threadIdx.x == 0) {
        fa::mbarrier_init(&full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(&full, SLABS * K_SLAB);
        load_tile<SLABS>(v_smem, K_SLAB, v_map, full, 0, key, blockIdx.y, blockIdx.z);
    }
    __syncthreads();
    fa::mbarrier_wait_parity(&full, 0);
    fa::transpose_keys<BLOCK_K, HEAD_DIM>(vt_smem, v_smem, fa::warp_id(), 4);
    fa::fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int slab = 0; slab < KEY_SLABS; ++slab)
            fa::tma_store_4d(&vt_map, vt_smem + slab * VT_SLAB, key + 128 * slab, 0, blockIdx.y, blockIdx.z);
        fa::bulk_commit(), fa::bulk_wait<0>();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap vt_map,
            const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        const int readers = 4 * CONSUMERS;  // each warp of each consumer arrives
        fa::mbarrier_init_ring(shared.q_full, shared.q_empty, V_FIRST ? readers : readers + TRANSPOSERS);
        fa::mbarrier_init_ring(shared.k_full, shared.k_empty, readers);
        fa::mbarrier_init_ring(shared.v_full, shared.v_empty, TRANSPOSERS);
        for (int i = 0; i < STAGES; ++i)
            fa::mbarrier_init(&shared.vt_full[i], V_FIRST ? 1 : TRANSPOSERS), fa::mbarrier_init(&shared.vt_empty[i], readers);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<REGISTERS - CONSUMERS * CONSUMER_REGISTERS>();
        if (threadIdx.x == 0) {
            Producer producer{shared, args, q_map, k_map, v_map, vt_map};
            producer.load_works(static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]));
        }
        if (V_FIRST || threadIdx.x < 32) return;
        Transposer transposer{shared, fa::warp_id() - 1};
        for (int tiles = transposer.take_work(); tiles > 0; tiles = transposer.take_work())
            for (; tiles > 0; --tiles) transposer.transpose();
        return;
    }
    fa::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer consumer{shared, args, fa::warpgroup_index() - 1};

    if (consumer.index == CONSUMERS - 1) consumer.end_turn();  // the first turn is consumer 0's
    while (consumer.take_work()) {
        if (consumer.k.position != consumer.end) {
            // Prologue: S(0) = Q K(0)^T
            consumer.begin_turn();
            consumer.issue_scores();
            consumer.end_turn();
            consumer.wait_first_scores();
            consumer.first_softmax();
            consumer.release_k();
            fa::pack_operand_8<scalar>(consumer.p_reg, consumer.score_reg);

            // Main loop over tiles of keys
            while (consumer.k.position != consumer.end) {
                consumer.begin_turn();
                if constexpr (OVERLAP) {
                    consumer.issue_scores();
                    if constexpr (PROMOTE) fa::ready(consumer.sum_reg[0]);  // it is added while S runs, not before
                    consumer.promote();
                    consumer.issue_output();
                    consumer.end_turn();
                    consumer.wait_scores();
                    consumer.softmax();
                    consumer.wait_output();
                    consumer.release_v(consumer.before().stage());
                } else {
                    consumer.output<true>();
                    consumer.end_turn();
                    consumer.wait_first_scores();
                    consumer.softmax();
                }
                consumer.check_sum();
                consumer.release_k();
                consumer.pack();
            }

            // Epilogue: the last product
            if constexpr (OVERLAP) consumer.promote();
            consumer.output<false>();
        }
        for (int n = consumer.tiles(); n < consumer.task().work.tiles; ++n) consumer.skip_tile();
        consumer.finish(o_map);
    }
}
