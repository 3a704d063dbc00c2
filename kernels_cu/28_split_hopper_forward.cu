// /// kernel
// title = "float32 on Hopper: two float16 for each operand, three wgmma for one product, small ones first"
// dtypes = ["float32"]
// head_dims = [64, 128, 256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// float16_products = 3
// auto = "seq_q > 64 and not (HEAD_DIM == 64 and seq_kv <= 128 and blocks <= sms)"  # else split, or fa2
// [tile]
// CONSUMERS = "3 if HEAD_DIM == 64 else 2"  # warpgroups of 64 queries
// BLOCK_K = "32 if HEAD_DIM == 256 else 96"
// STAGES = "6 if HEAD_DIM == 64 else 3"  # tiles of K or V in shared memory
// PINGPONG = 1   # the products of the consumers take turns
// PIN = 1        # the softmax ends before its consumer waits for its turn
// SECTION = 64  # MB of K and V of the heads that run at the same time, under the causal mask
// [let]
// blocks = "batch * heads_q * ceil_div(seq_q, 32)"  # of step 07
// q_tiles = "heads_q * ceil_div(seq_q, BLOCK_K)"  # of a batch, for prepare
// k_tiles = "heads_kv * ceil_div(seq_kv, BLOCK_K)"
// factors = "4 * STAGES * round_up(BLOCK_K, 32)"  # bytes
// barriers = "4 * CONSUMERS + 2 * STAGES"
// [workspace.q_parts]
// dtype = "float16"
// size = "2 * batch * heads_q * seq_q * HEAD_DIM"
// init = "none"
// [workspace.k_parts]
// dtype = "float16"
// size = "2 * batch * heads_kv * seq_kv * HEAD_DIM"
// init = "none"
// [workspace.v_parts]
// dtype = "float16"
// size = "2 * batch * heads_kv * seq_kv * HEAD_DIM"
// init = "none"
// [workspace.q_factors]
// dtype = "float32"
// size = "batch * heads_q * seq_q"
// init = "none"
// [workspace.k_factors]
// dtype = "float32"
// size = "batch * heads_kv * round_up(seq_kv, 4)"
// init = "none"
// [workspace.v_factors]
// dtype = "float32"
// size = "batch * heads_kv * ceil_div(seq_kv, BLOCK_K)"
// init = "none"
// [workspace.counter]
// dtype = "float32"  # an integer
// size = "1"
// init = "none"
// [tensor_map.q]
// tensor = "q_parts"
// dims = ["HEAD_DIM", "seq_q", 2, "batch * heads_q"]
// strides = ["HEAD_DIM", "seq_q * HEAD_DIM", "2 * seq_q * HEAD_DIM"]
// box = [64, 64, 2, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "k_parts"
// dims = ["HEAD_DIM", "seq_kv", 2, "batch * heads_kv"]
// strides = ["HEAD_DIM", "seq_kv * HEAD_DIM", "2 * seq_kv * HEAD_DIM"]
// box = [64, "BLOCK_K", 2, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "v_parts"
// dims = ["HEAD_DIM", "seq_kv", 2, "batch * heads_kv"]
// strides = ["HEAD_DIM", "seq_kv * HEAD_DIM", "2 * seq_kv * HEAD_DIM"]
// box = [64, "BLOCK_K", 2, 1]
// swizzle = 128
// [tensor_map.factors]
// tensor = "k_factors"
// dims = ["seq_kv", 1, 1, "batch * heads_kv"]
// strides = ["round_up(seq_kv, 4)", "round_up(seq_kv, 4)", "round_up(seq_kv, 4)"]
// box = ["BLOCK_K", 1, 1, 1]
// [[launch]]
// entry = "prepare"
// grid = "batch * (q_tiles + 2 * k_tiles)"
// block = 256
// shared = 32
// maps = []
// [[launch]]
// entry = "forward"
// grid = "min(sms, ceil_div(seq_q, 64 * CONSUMERS) * heads_q * batch)"
// block = "128 * (CONSUMERS + 1)"
// shared = "4 * HEAD_DIM * (64 * CONSUMERS + STAGES * BLOCK_K) + factors + 8 * barriers"
// ///
//
// Step 28, read against split and hopper: the arithmetic of split in the structure of hopper. Each float32 operand is two float16,
// x = 2^e (high + low), and three products of these parts take the place of one. mma.sync multiplies at 649 TFLOP/s on an H200, wgmma at
// 843: a third of that is 281.
//
//     prepare      splits Q, K and V once, into plain matrices of high and low parts with their scales (fa/split.cuh)
//     producer     one thread loads tiles of both parts by TMA
//     consumers    two warpgroups of 64 queries: S = Q K^T and P V by wgmma; softmax and the split of P in registers
//
// Small products first. A tensor core truncates its accumulator with each instruction, by a part of the accumulator's own size. split
// gives the small products of S, low high and high low, accumulators of their own, because it has their operands in registers only once.
// wgmma reads operands from shared memory, so their order is free. While small products are added the accumulator is small, and so is what
// is cut off. A chain of S then counts its large products only, at most 8 as in split (at head dim 256 there are two chains); it saves
// BLOCK_K / 2 registers and an addition a score. P V of a tile likewise: it starts from zero, small products first, and is added to O in
// float32. What truncation takes of S, 2.4 * 2^-24 of it in the mean, the keys' factors times 1 + 2^-23 give back.
//
// No overlap inside a warpgroup. hopper multiplies P V while it computes exponentials. Here that needs S, P, O and the sum of a tile at
// the same time: 192 of 232 registers at head dim 128. But three products take three times as long and the softmax does not, so the
// products of the other consumer hide it. A turn is P V of a tile and S of the next. Time runs downwards:
//
//     producer                   consumer (each of two or three)                    tensor cores
//     wait for a slot,           turn: wait for V(n), issue P V(n), wait for it     P V(n) of this consumer
//       start the next copy      release V(n); wait for K(n + 1), issue S(n + 1)    S(n + 1)
//                                end of the turn; O += P V(n); wait for S(n + 1)    S(n + 1)
//                                scores times their keys' factors; release K(n + 1) the other consumer's products
//                                softmax(n + 1), split                              the other consumer's products
//     behind the last tile: K,   O += the last P V; release Q; O / row sum to       the other consumer's products
//       Q, V of the next work      global memory; take the next work
//
// P V(n) is added to O under S(n + 1). So the loop has one body, and S and P share registers. At head dim 256 P V is made in slices of 64
// columns, each of which is added at once.
//
// K and V pass through one ring of STAGES slots, K(0), V(0), K(1), …, in the order in which a consumer needs them. O goes from registers
// to global memory, where a quad writes a sector, so Q's place in shared memory is empty behind the last S.
//
// The limits, 64 queries x 64 keys at head dim 128: wgmma takes 1536 cycles. Shared memory takes 1408: S 768, because an instruction of 64
// keys reads as much of Q as of K, P V 384, copies 256. A warp issues some 590 instructions.
//
// Inputs that are not finite: as in split.
#include <fa/accumulator.cuh>
#include <fa/key_tiles.cuh>
#include <fa/split.cuh>
#include <fa/stage.cuh>
#include <fa/tma.cuh>

using fa::float16;
using fa::uint32_t;
using fa::uint64_t;

constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
using Tiles = fa::KeyTiles<BLOCK_Q, BLOCK_K>;
using Work = Tiles::Work;  // tiles: 0 where there is no more work
constexpr int SLABS = HEAD_DIM / 64;  // a tile lies in slabs of 64 columns, each [high, low][rows][64]
constexpr int SLICE = HEAD_DIM == 256 ? 64 : HEAD_DIM, SLICES = HEAD_DIM / SLICE;  // columns of P V that are summed at a time
constexpr bool LATE = SLICES == 1;  // P V is added to O under the next product
constexpr int CHAIN = 8;  // the longest chain of large products of S: 128 columns
constexpr uint32_t Q_LOW = 64 * 128, LOW = BLOCK_K * 128;  // bytes of the high parts of a slab of Q, and of K or V; the low ones follow
constexpr uint32_t Q_PIECE = SLABS * 2 * Q_LOW, ITEM = SLABS * 2 * LOW;
constexpr int FACTORS = (BLOCK_K + 31) / 32 * 32;  // floats of a slot for the factors of keys: TMA writes at multiples of 128 bytes
static_assert(STAGES >= 2, "K and V of one tile of keys are in the ring at the same time");
constexpr float SCALE_OF_P = 128, LOG2_SCALE_OF_P = 7, SLACK = 8;  // P is at most 2^8 (the lazy maximum), times 2^7 as an operand
// S comes with the scales of Q and K, 2^28 at most; and truncation has taken some 2^-23 of it, which is given back.
constexpr float KEY_FACTOR = 0x1p-14f * (1 + 0x1p-23f), Q_FACTOR = 0x1p14f;

__device__ __forceinline__ int tiles_of(int rows) { return (rows + BLOCK_K - 1) / BLOCK_K; }

// Q, K and V, split, to plain matrices [batch * heads][high, low][rows][HEAD_DIM]. A block writes BLOCK_K rows of one of them. Q takes the
// sign of the scale.
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ fa::Args args) {
    using Row = fa::SplitRow<HEAD_DIM>;
    constexpr int step = 8 * Row::rows_of_warp, count = BLOCK_K / step;
    static_assert(count * step == BLOCK_K, "the loads of a tile are whole: BLOCK_K is a multiple of their rows");
    float* largest_smem = fa::dynamic_shared<float>();  // [8]
    if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<int*>(args.workspace[WORKSPACE_COUNTER]) = 0;

    const int q_blocks = args.batch * args.heads_q * tiles_of(args.seq_q), k_blocks = args.batch * args.heads_kv * tiles_of(args.seq_kv);
    const bool is_q = blockIdx.x < q_blocks, is_v = blockIdx.x >= q_blocks + k_blocks;
    const int block = blockIdx.x - (is_q ? 0 : is_v ? q_blocks + k_blocks : q_blocks);
    const int heads = is_q ? args.heads_q : args.heads_kv, rows = is_q ? args.seq_q : args.seq_kv, tiles = tiles_of(rows);
    const int head = block / tiles, tile = block - head * tiles, first = tile * BLOCK_K;  // head: of all batches
    const fa::Tensor& tensor = is_q ? args.Q : is_v ? args.V : args.K;
    const float* from = fa::row_pointer<float>(tensor, head / heads, head % heads, first);
    void* parts = args.workspace[is_q ? WORKSPACE_Q_PARTS : is_v ? WORKSPACE_V_PARTS : WORKSPACE_K_PARTS];
    const fa::int64_t low_bytes = fa::int64_t(rows) * HEAD_DIM * 2;
    unsigned char* to = static_cast<unsigned char*>(parts) + 2 * head * low_bytes + fa::int64_t(first) * HEAD_DIM * 2;

    const int own = threadIdx.x / Row::lanes;
    Row part[count];
#pragma unroll
    for (int i = 0; i < count; ++i) part[i].load(from + (own + i * step) * tensor.row, args.head_dim, first + own + i * step < rows);
    if (is_v) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < count; ++i) largest = max(largest, part[i].largest_finite());
        const float scale = fa::split_scale(fa::block_max(largest, largest_smem));
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (first + own + i * step < rows) part[i].store_plain(to + (own + i * step) * HEAD_DIM * 2, low_bytes, scale);
        if (threadIdx.x == 0) static_cast<float*>(args.workspace[WORKSPACE_V_FACTORS])[block] = fa::inverse_power(scale) / SCALE_OF_P;
        return;
    }
    const float sign = !is_q ? 1.0f : args.scale == 0 ? 0.0f : args.scale < 0 ? -1.0f : 1.0f;
    const float times = !is_q ? KEY_FACTOR : args.scale == 0 ? Q_FACTOR : Q_FACTOR * fabsf(float(args.scale));
    const fa::int64_t pitch = is_q ? rows : (rows + 3) / 4 * 4;  // TMA loads the factors of keys: rows of 16 bytes
    float* factors = static_cast<float*>(args.workspace[is_q ? WORKSPACE_Q_FACTORS : WORKSPACE_K_FACTORS]) + head * pitch + first;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float scale;
        part[i].multiply(sign);
        const float factor = part[i].own_scale(scale) * times;
        if (first + own + i * step >= rows) continue;
        part[i].store_plain(to + (own + i * step) * HEAD_DIM * 2, low_bytes, scale);
        if (threadIdx.x % Row::lanes == 0) factors[own + i * step] = factor;
    }
}

// S becomes SCALE_OF_P times P = 2^(scale (S - row_max)), and its sum over this thread's columns is added to `sum`. The difference is exact
// where it matters, at any size of the scores. The scale of P is part of the multiply-add, whose rounding is that of exp2_approx, 2^-22.
__device__ __forceinline__ void exponentiate(float (&x)[BLOCK_K / 2], float (&sum)[2], const float (&scale_log2e)[2],
                                             const float (&row_max)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float s = 0;
#pragma unroll
        for (int j = 0; j < BLOCK_K / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = x[4 * j + 2 * half + e];
                score = fa::exp2_approx((score - row_max[half]) * scale_log2e[half] + LOG2_SCALE_OF_P);
                s += score;
            }
        sum[half] += s;
    }
}

// The block's shared memory: tiles, and mbarriers for each: a phase of `full` ends when the tile has arrived, a phase of `empty` when all
// that read it have.
struct Shared {
    unsigned char* q = fa::dynamic_shared_1024();  // [CONSUMERS][SLABS][high, low][64][64]
    unsigned char* ring = q + CONSUMERS * Q_PIECE;  // [STAGES][SLABS][high, low][BLOCK_K][64]: K(0), V(0), K(1), V(1), …
    float* factors = reinterpret_cast<float*>(ring + STAGES * ITEM);  // [STAGES][FACTORS]: of the keys of a K
    uint64_t* q_full = reinterpret_cast<uint64_t*>(factors + STAGES * FACTORS);  // [CONSUMERS]
    uint64_t *q_empty = q_full + CONSUMERS, *full = q_empty + CONSUMERS, *empty = full + STAGES;  // full, empty: [STAGES]
    Work* works = reinterpret_cast<Work*>(empty + STAGES);  // [CONSUMERS]: whose Q is there
};

// Starts the copies: one thread's task.
struct Producer {
    const Shared& shared;
    const fa::Args& args;
    const fa::TensorMap &q_map, &k_map, &v_map, &factors_map;
    fa::RingPlace<STAGES> item;
    uint32_t q_parity = 0;

    // A tile of both parts, slab by slab. more: bytes that other copies bring to the same barrier.
    template <uint32_t Low>
    __device__ __forceinline__ void load(unsigned char* tile_smem, const fa::TensorMap& map, uint64_t* full, int row, int head, int more) {
        fa::mbarrier_arrive_expect_tx(full, SLABS * 2 * Low + more);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) fa::tma_load_4d(tile_smem + slab * 2 * Low, &map, full, 64 * slab, row, 0, head);
    }
    // Each consumer's part of Q comes by itself, when that consumer has read the last one. tiles = 0: there is no more work.
    __device__ __forceinline__ void load_q(const Work& work) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            const int row = work.q_first + 64 * consumer, head = work.batch * args.heads_q + work.head;
            fa::mbarrier_wait_parity(shared.q_empty + consumer, q_parity ^ 1);
            shared.works[consumer] = work;
            if (work.tiles) load<Q_LOW>(shared.q + consumer * Q_PIECE, q_map, shared.q_full + consumer, row, head, 0);
            else fa::mbarrier_arrive(shared.q_full + consumer);
        }
        q_parity ^= 1;
    }
    // The tile before in the stage has been released: for the first STAGES tiles a wait for the phase before the first, which passes.
    __device__ __forceinline__ void load_k(int n, int kv_head) {
        uint64_t* full = shared.full + item.stage;
        fa::mbarrier_wait_parity(shared.empty + item.stage, item.parity ^ 1);
        load<LOW>(shared.ring + item.stage * ITEM, k_map, full, n * BLOCK_K, kv_head, 4 * BLOCK_K);
        fa::tma_load_4d(shared.factors + item.stage * FACTORS, &factors_map, full, n * BLOCK_K, 0, 0, kv_head);
        item.next();
    }
    __device__ __forceinline__ void load_v(int n, int kv_head) {
        fa::mbarrier_wait_parity(shared.empty + item.stage, item.parity ^ 1);
        load<LOW>(shared.ring + item.stage * ITEM, v_map, shared.full + item.stage, n * BLOCK_K, kv_head, 0);
        item.next();
    }
    // All works of the block. A number is fetched one work ahead: the counter's answer takes a microsecond.
    __device__ __forceinline__ void load_works(int* counter) {
        const int works = Tiles::works(args);
        int number = blockIdx.x;
        while (number < works) {
            const Work work = Tiles::of_number<8 * HEAD_DIM>(args, number, SECTION);
            const int kv_head = work.batch * args.heads_kv + fa::kv_head_of(args, work.head);
            number = gridDim.x + atomicAdd(counter, 1);
            for (int n = 0; n < work.tiles; ++n) {
                load_k(n, kv_head);
                if (n == 0) load_q(work);  // the first keys go ahead: their place is empty earlier
                load_v(n, kv_head);
            }
        }
        load_q(Work{});
    }
};

// Attention of 64 queries of each work: a warpgroup's task. A thread has parts of two rows, `row` and row + 8.
struct Consumer {
    const Shared& shared;
    const fa::Args& args;
    int index, lane = fa::lane_id(), warp = fa::warp_id() % 4;  // index: of the block's consumers
    float score_reg[BLOCK_K / 2], sum_reg[SLICE / 2], out_reg[HEAD_DIM / 2];  // sum_reg: P V of a tile, the last slice
    float more_reg[BLOCK_K / 2];  // a second chain of S, at head dim 256
    uint32_t high_reg[BLOCK_K / 16][4], low_reg[BLOCK_K / 16][4];  // P
    float q_factor[2], row_max[2], row_sum[2];  // P = 2^(q_factor log2(e) (S - row_max))
    float v_factor;  // of the P V in sum_reg, or of the next
    int v_first;  // the number of this work's first tile of V among those of all heads
    Work work;
    int row, tiles;  // tiles: those of work.tiles that its queries see
    fa::RingPlace<STAGES> item;
    uint32_t q_parity = 0;

    // Waits for the next work and its Q; false: there is none.
    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(shared.q_full + index, q_parity);
        work = shared.works[index];
        if (__any_sync(fa::full_warp, work.tiles == 0)) return false;  // a vote: the compiler sees that the warp stays together
        row = work.q_first + 64 * index + 16 * warp + lane / 4;
        tiles = min(work.tiles, Tiles::seen(args, work.q_first + 64 * index + 64));
        const int kv_head = work.batch * args.heads_kv + fa::kv_head_of(args, work.head);
        v_first = kv_head * tiles_of(args.seq_kv);
        const float* q_factors = static_cast<const float*>(args.workspace[WORKSPACE_Q_FACTORS]);
        const fa::int64_t at = fa::int64_t(work.batch * args.heads_q + work.head) * args.seq_q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            q_factor[half] = q_factors[at + min(row + 8 * half, args.seq_q - 1)];
            row_max[half] = -fa::largest_float, row_sum[half] = 0;  // finite from the start, so that no difference is NaN
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) out_reg[i] = 0;
#pragma unroll
        for (int i = 0; i < SLICE / 2; ++i) sum_reg[i] = 0;
        v_factor = 0;
        return true;
    }
    __device__ __forceinline__ void release_q() {
        fa::mbarrier_arrive(shared.q_empty + index);  // every thread: each has read for itself whose Q it is
        q_parity ^= 1;
    }
    // This warp has read the tile of K or V; the producer waits for all warps.
    __device__ __forceinline__ void release_item() {
        if (lane == 0) fa::mbarrier_arrive(shared.empty + item.stage);
        item.next();
    }
    // Consumers issue products in turn: a named barrier each, at which it waits for its turn and the one before passes it on.
    __device__ __forceinline__ void begin_turn() {
        if (PINGPONG) fa::bar_sync(4 + index, 256);
    }
    __device__ __forceinline__ void end_turn() {
        if (PINGPONG) fa::bar_arrive(4 + (index + 1) % CONSUMERS, 256);
    }

    // Columns from 16 first up to 16 last of one of the three products of S.
    __device__ __forceinline__ void multiply_scores(float (&to)[BLOCK_K / 2], uint64_t q_operand, uint64_t k_operand, int first, int last,
                                                    bool accumulate) {
        q_operand = fa::descriptor_here(q_operand), k_operand = fa::descriptor_here(k_operand);
#pragma unroll
        for (int step = first; step < last; ++step)
            fa::wgmma_ss<float16>(to, fa::descriptor_advance(q_operand, step / 4 * 2 * Q_LOW + step % 4 * 32),
                                  fa::descriptor_advance(k_operand, step / 4 * 2 * LOW + step % 4 * 32), accumulate || step > first);
    }
    // Starts S = Q K^T, small products first.
    __device__ __forceinline__ void issue_scores() {
        const uint64_t q_high = fa::smem_descriptor_k_major(shared.q + index * Q_PIECE), q_low = fa::descriptor_advance(q_high, Q_LOW);
        const uint64_t k_high = fa::smem_descriptor_k_major(shared.ring + item.stage * ITEM), k_low = fa::descriptor_advance(k_high, LOW);
        fa::discard(score_reg);
        fa::mbarrier_wait_parity(shared.full + item.stage, item.parity);
        fa::wgmma_fence();
        multiply_scores(score_reg, q_low, k_high, 0, HEAD_DIM / 16, false);
        multiply_scores(score_reg, q_high, k_low, 0, HEAD_DIM / 16, true);
        multiply_scores(score_reg, q_high, k_high, 0, min(CHAIN, HEAD_DIM / 16), true);
        if constexpr (HEAD_DIM / 16 > CHAIN) multiply_scores(more_reg, q_high, k_high, CHAIN, HEAD_DIM / 16, false);
        fa::wgmma_commit();
    }
    __device__ __forceinline__ void wait_scores() {
        if constexpr (HEAD_DIM / 16 > CHAIN) {
            fa::wgmma_wait<0>(score_reg, more_reg);
#pragma unroll
            for (int i = 0; i < BLOCK_K / 2; ++i) score_reg[i] += more_reg[i];
        } else {
            fa::wgmma_wait<0>(score_reg);
        }
    }
    // The scores times the factors of their keys. Then K is read.
    __device__ __forceinline__ void multiply_columns() {
#pragma unroll
        for (int j = 0; j < BLOCK_K / 8; ++j) {
            const fa::Vec<float, 2> factor = fa::load_vec<2>(shared.factors + item.stage * FACTORS + 8 * j + fa::fragment_column());
#pragma unroll
            for (int i = 0; i < 4; ++i) score_reg[4 * j + i] *= factor[i % 2];
        }
        __syncwarp();  // all lanes have read the factors when the first one releases them
    }
    // P V of a slice: from zero, small products first.
    __device__ __forceinline__ void multiply_values(int slice) {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.ring + item.stage * ITEM, 2 * LOW);
        fa::discard(sum_reg);
        fa::wgmma_fence();
#pragma unroll
        for (int product = 0; product < 3; ++product)
#pragma unroll
            for (int step = 0; step < BLOCK_K / 16; ++step)
                fa::wgmma_rs<float16, true>(sum_reg, product == 0 ? low_reg[step] : high_reg[step],
                                            fa::descriptor_advance(v_operand, (2 * slice + (product == 1)) * LOW + step * 2048),
                                            product + step > 0);
        fa::wgmma_commit();
        fa::wgmma_wait<0>(sum_reg, high_reg, low_reg);
    }
    __device__ __forceinline__ void load_v_factor(int n) {
        v_factor = static_cast<const float*>(args.workspace[WORKSPACE_V_FACTORS])[v_first + n];
    }
    __device__ __forceinline__ void add_slice(int slice) {
#pragma unroll
        for (int i = 0; i < SLICE / 2; ++i) out_reg[slice * SLICE / 2 + i] += v_factor * sum_reg[i];
    }
    // P V of the tile, and where there are slices their sum with O.
    __device__ __forceinline__ void make_output() {
        fa::mbarrier_wait_parity(shared.full + item.stage, item.parity);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            multiply_values(slice);
            if (LATE) continue;
            add_slice(slice);
            fa::schedule_fence();
        }
    }

    // -inf for keys that a query does not see.
    __device__ __forceinline__ void mask(int n) {
        if ((n + 1) * BLOCK_K <= fa::visible_keys(args, work.q_first + 64 * index)) return;
        const int visible[2] = {fa::visible_keys(args, row) - n * BLOCK_K, fa::visible_keys(args, row + 8) - n * BLOCK_K};
        fa::mask_columns(score_reg, visible);
    }
    // Raises the row maxima to those of the tile, where they are larger, and rescales what refers to them.
    __device__ __forceinline__ void rescale(const float (&maximum)[2], const float (&scale_log2e)[2]) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float larger = max(row_max[half], fa::group_max<4>(maximum[half]));
            factor[half] = fa::exp2_approx((row_max[half] - larger) * scale_log2e[half]);
            row_max[half] = larger;
            row_sum[half] *= factor[half];
        }
        fa::scale_rows(out_reg, factor);
    }
    // S of tile n becomes SCALE_OF_P times P. Rescaling is lazy.
    __device__ __forceinline__ void softmax(int n) {
        mask(n);
        const float scale_log2e[2] = {q_factor[0] * fa::log2e, q_factor[1] * fa::log2e};
        float maximum[2];
        fa::local_row_max(maximum, score_reg);
        bool grows = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) grows |= (maximum[half] - row_max[half]) * scale_log2e[half] > SLACK;
        if (__any_sync(fa::full_warp, grows)) rescale(maximum, scale_log2e);
        exponentiate(score_reg, row_sum, scale_log2e, row_max);
    }
    __device__ __forceinline__ void split() {
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                fa::split_pair(high_reg[step][r], low_reg[step][r], score_reg[8 * step + 2 * r], score_reg[8 * step + 2 * r + 1]);
    }
    // K and V of a tile that only other consumers need.
    __device__ __forceinline__ void skip_tile() {
        begin_turn();
        end_turn();
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            fa::mbarrier_wait_parity(shared.full + item.stage, item.parity);
            __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
            release_item();
        }
    }
    // O / row sum and the logsumexp, straight to global memory: a quad writes a sector.
    __device__ __forceinline__ void store() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = row + 8 * half;
            const float sum = fa::group_sum<4>(row_sum[half]) * (1 / SCALE_OF_P), inverse = 1.0f / sum;
            if (query >= args.seq_q) continue;
            const bool empty = fa::visible_keys(args, query) <= 0;
            if (lane % 4 == 0)
                *fa::row_pointer<float>(args.logsumexp, work.batch, work.head, query) =
                    empty ? -fa::infinity() : row_max[half] * q_factor[half] + fa::log(sum);
            float* out = fa::row_pointer<float>(args.O, work.batch, work.head, query) + fa::fragment_column();
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j) {
                const float one = out_reg[4 * j + 2 * half] * inverse, other = out_reg[4 * j + 2 * half + 1] * inverse;
                const fa::Vec<float, 2> two = {empty ? 0.0f : one, empty ? 0.0f : other};
                fa::store_vec_upto(out + 8 * j, two, args.head_dim - 8 * j - fa::fragment_column());
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap factors_map) {
    const Shared shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < CONSUMERS; ++i) fa::mbarrier_init(shared.q_full + i, 1), fa::mbarrier_init(shared.q_empty + i, 128);
        for (int i = 0; i < STAGES; ++i) fa::mbarrier_init(shared.full + i, 1), fa::mbarrier_init(shared.empty + i, 4 * CONSUMERS);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const int warpgroup = fa::warpgroup_index();
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<CONSUMERS == 2 ? 40 : 32>();
        if (threadIdx.x != 0) return;
        Producer{shared, args, q_map, k_map, v_map, factors_map}.load_works(static_cast<int*>(args.workspace[WORKSPACE_COUNTER]));
        return;
    }
    fa::setmaxnreg_inc<CONSUMERS == 2 ? 232 : 160>();
    Consumer consumer{shared, args, warpgroup - 1};

    if (consumer.index == CONSUMERS - 1) consumer.end_turn();  // the first turn is consumer 0's
    while (consumer.take_work()) {
        consumer.begin_turn();
        // Main loop over tiles of keys
        for (int n = 0; n < consumer.tiles; ++n) {
            consumer.issue_scores();
            consumer.end_turn();
            if (PIN) fa::schedule_fence();
            if (LATE) consumer.add_slice(0);  // P V of the tile before, under S
            consumer.load_v_factor(n);
            consumer.wait_scores();
            consumer.multiply_columns();
            consumer.release_item();
            consumer.softmax(n);
            consumer.split();
            if (PIN) fa::schedule_fence();
            consumer.begin_turn();
            consumer.make_output();
            consumer.release_item();
        }
        consumer.end_turn();
        if (LATE) consumer.add_slice(0);
        consumer.release_q();
#pragma unroll 1
        for (int n = consumer.tiles; n < consumer.work.tiles; ++n) consumer.skip_tile();
        consumer.store();
    }
}
