// /// kernel
// title = "Hopper at head dims up to 512: two warpgroups share O, clusters of two blocks share K and V"
// dtypes = ["float16", "bfloat16"]
// head_dims = [512]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// mask = true
// window = true
// score = true
// sinks = true
// auto = "head_dim > 256"
// arithmetic = "p16"
// [tile]
// HEADS = "2 if group % 2 == 0 and not mask_of_head else 1"  # of a key head, whose queries a cluster has; 1: two tiles of queries of one
// SECTION = 32  # MB of K and V of the heads that run at the same time, under the causal mask
// [let]
// COLUMNS = "max(384, round_up(head_dim, 128))"  # of the head over which S is computed
// group = "heads_q // heads_kv"
// listed = "mask or score"  # the tiles of keys that are seen (fa/key_lists.cuh): one list for all batches, heads, or for each
// OF_BATCH = "mask_of_batch"
// OF_HEAD = "mask_of_head"
// lists = "listed * (batch if OF_BATCH else 1) * (heads_q if OF_HEAD else 1)"
// q_tiles = "ceil_div(seq_q, 128 // HEADS)"
// works = "q_tiles * (heads_q // HEADS) * batch"
// [workspace.lists]
// dtype = "float32"  # integers
// size = "lists * (1 + q_tiles * (2 + ceil_div(seq_kv, 64)))"
// init = "zero_once"
// [tensor_map.q]
// tensor = "Q"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, 16, 1, 1]
// swizzle = 128
// [tensor_map.o]
// tensor = "O"
// box = [64, 16, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "prepare"
// when = "listed"
// grid = ["ceil_div(q_tiles, 4)", "lists"]
// block = 128
// maps = []
// [[launch]]
// entry = "forward"
// grid = "2 * min(max(1, sms // 2), works)"
// block = 384
// cluster = 2
// shared = "65536 + 9 * 16384 + 2 * 8192 + 2048"
// ///
//
// Step 30, forward: head dims beyond 256, as Gemma 4 and DeepSeek V4 have them.
//
// What changes beside step 22. O of 64 queries and 512 columns is 128 KB, half of a multiprocessor's registers. So a block has 64 queries,
// and its two consumers 256 columns of O each: 128 registers a thread. A score is needed by both, and is made once: each computes S of
// half of the tile's 64 keys over the whole head dim. They tell each other their row maxima, so that both have the same references, and
// write P as a 16-bit operand to shared memory. Then each multiplies all of P with its half of V.
//
// What limits it. With 64 queries a block does 64 FLOP for each byte of K and V, half of what step 22 does at head dim 256: L2 would have
// to send 9 TB/s for 600 TFLOP/s. So two blocks form a cluster and read the same keys: each loads half of every stage for both (TMA
// multicast). They have the same queries of two heads of one key head (HEADS = 2), which see the same tiles of keys. Without a group they
// have neighbouring tiles of queries of one head, and a tile that one of them does not see is only passed.
//
// Shared memory: Q 64 KB, P of two tiles 16, and nine stages of 16 KB. A tile of 64 keys is four stages of K, 128 columns each (three at
// head dims to 384), and four of V, 16 keys each: a stage is what both consumers multiply in one go, eight steps of S or one of O, and is
// given back then. K has its own stages, which the next tile takes as S reads this one; V has a ring of the others. Q is loaded in pieces
// of 128 columns: the next work's comes when the last S has read this one's. O leaves through the last tile's stages of V, before they are
// given back: a warp's 16 rows of a consumer's columns are as large as the consumer's half of a stage, which nobody else reads any more. A
// tile:
//
//     issue                        wait for                    compute, while the rest runs
//     S(n + 1), four stages of K   O += P(n - 1) V(n - 1)
//                                  the other's P(n): barrier 1  O is rescaled where a reference has grown
//     O += P(n) V(n), four of V    S(n + 1)
//                                  its maxima: barrier 2        P(n + 1) to the other place of P
//
// At barrier 1 both consumers' products of tile n - 1 are complete too, so the place of P(n - 1) is free. Only at a work's ends is a product
// waited for with none behind it; of two heads a cluster (HEADS = 2) only at its beginning, for the next work's first S is issued behind the
// last product of O, and runs while O leaves. A window of 128 keys has three tiles a work, so its ends are most of it.
//
// Four threads start the copies, one those of Q, one of K, two of V: a tile of V is 16 for each block, for which one thread would take
// 1,850 cycles. A product of S takes 29, and the answer of an mbarrier 90 (experiments/hopper/wide_stalls.txt): so all stages are asked for
// at once.
//
// A window (FA_WINDOW) is a second border beside the causal one, as in step 22. Tiles of keys come from the last one down, under every mask.
//
// S of 32 keys reads 3 KB of shared memory for 16 cycles of the tensor cores, which is 24 cycles; O reads 10 KB for 128 cycles, 80. Both
// together are 2176 cycles of shared memory and 2048 of products, a tile and block. Q from registers would be less, but O has them.
//
// The softmax is step 13's, which rescales lazily, in both types: the maxima of two warpgroups take a barrier, under the product of O. Works
// are taken in the order of their lengths, forwards and backwards by turns, so that both blocks of a cluster know the next without a word.
#include <fa/accumulator.cuh>
#include <fa/cluster.cuh>
#include <fa/key_lists.cuh>
#include <fa/key_tiles.cuh>
#include <fa/sink.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int THREADS = 384, CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;  // together 504
constexpr int BLOCK_Q = 64, BLOCK_K = 64, OWN_KEYS = 32;  // OWN_KEYS: of whose scores a consumer computes
constexpr int PIECES_K = COLUMNS / 128, PIECES_V = BLOCK_K / 16, STAGES = 9 - PIECES_K;  // of a tile; STAGES: of the ring of V
constexpr int SLABS = HEAD_DIM / 64, OWN_SLABS = SLABS / 2;  // of 64 columns, 128 bytes: the swizzle's width; of O of a consumer
constexpr uint32_t SLAB = 64 * 128, V_SLAB = 16 * 128, STAGE = 2 * SLAB;  // bytes; a stage is two slabs of K, or eight of V or O
constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
constexpr bool LISTED = fa::has_mask || fa::has_score;  // the producer says which tiles of keys a consumer reads
constexpr int CLUSTER_Q = BLOCK_Q * 2 / HEADS;  // queries of a cluster's heads
static_assert(HEAD_DIM == 512 && COLUMNS <= HEAD_DIM, "its registers and shared memory are those of head dim 512");

using Tiles = fa::KeyTiles<CLUSTER_Q, BLOCK_K, HEADS>;
using Lists = fa::KeyLists<CLUSTER_Q, BLOCK_K, OF_BATCH, OF_HEAD, WORKSPACE_LISTS>;
using Work = Tiles::Work;  // of a cluster. tiles: 0 where there is no more
using KRing = fa::RingPlace<PIECES_K>;
using VRing = fa::RingPlace<STAGES>;

// What a block has in shared memory. A phase of `full` ends when the stage's tile has arrived, one of `empty` when all warps of both
// blocks have read it in theirs.
struct Shared {
    unsigned char q[SLABS * SLAB];  // [SLABS][64][64]
    unsigned char k[PIECES_K][STAGE], v[STAGES][STAGE];
    unsigned char p[2][SLAB];  // [64][64], by turns
    float maxima[2][BLOCK_Q], sums[2][BLOCK_Q];  // of each consumer's scores
    uint64_t q_full[PIECES_K], q_empty[PIECES_K], k_full[PIECES_K], k_empty[PIECES_K], v_full[STAGES], v_empty[STAGES];
    Work work;  // whose first piece of Q is there
    int entry;  // which tile of keys, or its entry in a list, K is
};
static_assert(sizeof(Shared) <= 65536 + 9 * 16384 + 2 * 8192 + 2048, "what the header says");

// The block's rank in its cluster, its queries and head of a work, and the part of a list that is about them.
__device__ __forceinline__ int rank() { return blockIdx.x % 2; }
__device__ __forceinline__ int own_first(const Work& work) { return work.q_first + (HEADS == 1 ? BLOCK_Q * rank() : 0); }
__device__ __forceinline__ int own_head(const Work& work) { return work.head + (HEADS == 2 ? rank() : 0); }
__device__ __forceinline__ int own_part() { return HEADS == 1 ? rank() : 0; }
// The tile of keys of an entry.
__device__ __forceinline__ int tile_of(int entry) { return LISTED ? Lists::tile_of(entry) : entry; }

// Starts the copies of Q, of K, or of a half of V: four threads' tasks.
enum class Copies { q, k, v, other_v };
template <Copies What> struct Producer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap& map;
    Work work = {};
    int kv_head = 0, begin = 0;  // begin: of the work's list; without one its last tile of keys
    uint32_t parity = 1;  // of Q and K
    VRing ring;

    __device__ __forceinline__ int entry(int n) const { return LISTED ? Lists::all(args)[begin + n] : begin - n; }
    // Behind the last work there is one without tiles, and no Q.
    __device__ __forceinline__ void load_q() {
        for (int piece = 0; piece < PIECES_K; ++piece) {
            uint64_t* full = &shared.q_full[piece];
            fa::mbarrier_wait_parity(&shared.q_empty[piece], parity);
            if (piece == 0) shared.work = work;
            if (work.tiles == 0) return fa::mbarrier_arrive(full);
            fa::mbarrier_arrive_expect_tx(full, STAGE);
#pragma unroll
            for (int slab = 2 * piece; slab < 2 * piece + 2; ++slab)
                fa::tma_load_4d(shared.q + slab * SLAB, &map, full, 64 * slab, own_first(work), own_head(work), work.batch);
        }
        parity ^= 1;
    }
    // A stage is loaded when both blocks have read what was in it. This one's barrier expects what both load.
    __device__ __forceinline__ void load_k(int entry) {
        const int key = tile_of(entry) * BLOCK_K;
#pragma unroll 1
        for (int piece = 0; piece < PIECES_K; ++piece) {
            fa::mbarrier_wait_parity(&shared.k_empty[piece], parity);
            if (piece == 0) shared.entry = entry;
            fa::mbarrier_arrive_expect_tx(&shared.k_full[piece], STAGE);
            fa::tma_load_4d_multicast(shared.k[piece] + rank() * SLAB, &map, &shared.k_full[piece], 3, 128 * piece + 64 * rank(), key,
                                      kv_head, work.batch);
        }
        parity ^= 1;
    }
    // A half of the columns of each stage, which expects that of both blocks.
    __device__ __forceinline__ void load_v(int entry) {
        const int key = tile_of(entry) * BLOCK_K;
#pragma unroll 1
        for (int piece = 0; piece < PIECES_V; ++piece, ring.next()) {
            uint64_t* full = &shared.v_full[ring.stage];
            fa::mbarrier_wait_parity(&shared.v_empty[ring.stage], ring.parity ^ 1);
            fa::mbarrier_arrive_expect_tx(full, STAGE / 2);
#pragma unroll
            for (int i = 0; i < OWN_SLABS / 2; ++i) {
                const int slab = OWN_SLABS * rank() + (What == Copies::v ? 0 : OWN_SLABS / 2) + i;
                fa::tma_load_4d_multicast(shared.v[ring.stage] + slab * V_SLAB, &map, full, 3, 64 * slab, key + 16 * piece, kv_head,
                                          work.batch);
            }
        }
    }
    __device__ __forceinline__ void load_tiles() {
#pragma unroll 1
        for (int n = 0; n < work.tiles; ++n) What == Copies::k ? load_k(entry(n)) : load_v(entry(n));
    }
    // All works of the cluster: one of each round of all clusters, whose order turns around every time.
    __device__ __forceinline__ void run() {
        const int works = Tiles::works(args), clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
#pragma unroll 1  // the producer has few registers
        for (int round = 0;; ++round) {
            const int number = round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
            if (number >= works) break;
            work = Tiles::of_number<4 * HEAD_DIM>(args, number, SECTION);
            if constexpr (LISTED) begin = Lists::of_place(args, work.batch, work.head, work.q_first, work.tiles);
            else begin = Tiles::seen(args, work.q_first + CLUSTER_Q) - 1;
            kv_head = fa::kv_head_of(args, work.head);
            if constexpr (What == Copies::q) load_q();
            else load_tiles();
        }
        work = {};
        if constexpr (What == Copies::q) load_q();
    }
};

// 64 queries, with half of each tile's keys their scores, with half of V's columns their O. A thread has parts of the rows `row` and
// row + 8.
struct Consumer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap& o_map;
    const int index, warp = fa::warp_id() % 4;
    const uint32_t other_k = fa::map_shared(shared.k_empty, rank() ^ 1), other_v = fa::map_shared(shared.v_empty, rank() ^ 1);
    // Of what the exponential takes: a score has been given the scale, and is in units of log2. A negative scale is its absolute value, its
    // sign in S.
    const float magnitude = args.scale == 0 ? 1.0f : fabsf(float(args.scale));
    const float exponent_scale = fa::has_score ? 1.0f : magnitude * fa::log2e;
    float score_reg[OWN_KEYS / 2], out_reg[OWN_SLABS * 32];
    float reference[2], row_sum[2], factor[2];  // P = 2^(score - reference); what O is rescaled with where `grows`
    bool grows;
    Work work;
    int first, row;  // first: of the block's queries
    int top, bottom;  // the last and the first tile of keys that they see, where there is no list; top < 0: there are no queries
    int entry, place;  // of the tile of K that was taken last: its entry, which of the work's it is
    uint32_t q_parity = 0, k_parity = 0;
    VRing ring, done;  // done: the next stage that is given back

    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(&shared.q_full[0], q_parity);
        work = shared.work;
        if (work.tiles == 0) return false;
        first = own_first(work), row = first + 16 * warp + fa::fragment_row();
        top = first >= args.seq_q ? -1 : Tiles::seen(args, first + BLOCK_Q) - 1, bottom = Tiles::first_tile(args, first);
        place = -1;
        return true;
    }
    __device__ __forceinline__ bool has_queries() const { return top >= 0; }
    __device__ __forceinline__ bool begins(int its_entry) const { return LISTED ? Lists::begins(its_entry, own_part()) : its_entry == top; }
    __device__ __forceinline__ bool ends(int its_entry) const { return LISTED ? Lists::ends(its_entry, own_part()) : its_entry == bottom; }
    __device__ __forceinline__ void release_q(int piece) {
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.q_empty[piece]);
    }
    // Of a work that is not the block's, or has no queries: its Q is on its way nevertheless.
    __device__ __forceinline__ void pass_q() {
        for (int piece = 0; piece < PIECES_K; ++piece) {
            fa::mbarrier_wait_parity(&shared.q_full[piece], q_parity);
            __syncwarp();
            release_q(piece);
        }
        q_parity ^= 1;
    }
    // Stages are given back to both blocks, those of V in their order.
    __device__ __forceinline__ void give_k(int piece) {
        if (fa::lane_id() > 0) return;
        fa::mbarrier_arrive(&shared.k_empty[piece]);
        fa::mbarrier_arrive_remote(other_k + piece * 8);
    }
    __device__ __forceinline__ void give_v() {
        if (fa::lane_id() == 0) {
            fa::mbarrier_arrive(&shared.v_empty[done.stage]);
            fa::mbarrier_arrive_remote(other_v + done.stage * 8);
        }
        done.next();
    }
    __device__ __forceinline__ void read_entry() {
        entry = __shfl_sync(fa::full_warp, shared.entry, 0);  // known to the compiler as the same in the whole warp
        __syncwarp();  // all lanes have read it when the first one gives the stage back
        ++place;
    }
    // A tile that only the other block needs. No product is in flight.
    __device__ __forceinline__ void pass_tile() {
#pragma unroll 1
        for (int piece = 0; piece < PIECES_K; ++piece) {
            fa::mbarrier_wait_parity(&shared.k_full[piece], k_parity);
            if (piece == 0) read_entry();
            __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
            give_k(piece);
        }
        k_parity ^= 1;
#pragma unroll 1
        for (int piece = 0; piece < PIECES_V; ++piece, ring.next()) {
            fa::mbarrier_wait_parity(&shared.v_full[ring.stage], ring.parity);
            __syncwarp();
            give_v();
        }
    }

    // Starts S = Q K^T of the next tile's 32 keys, a group of products for each piece. First: of a work's first tile.
    template <bool First> __device__ __forceinline__ void issue_scores() {
        const uint64_t q_operand = fa::descriptor_here(fa::smem_descriptor_k_major(shared.q));
        const uint64_t k_operand = fa::descriptor_here(fa::smem_descriptor_k_major(shared.k[0] + index * OWN_KEYS * 128));
        const bool arrived = fa::are_full<PIECES_K>(shared.k_full, KRing{0, k_parity}) &&
                             (!First || fa::are_full<PIECES_K>(shared.q_full, KRing{0, q_parity}));
        if (!First && !arrived) fa::wait_full<PIECES_K>(shared.k_full, KRing{0, k_parity});
        fa::discard(score_reg);
#pragma unroll
        for (int piece = 0; piece < PIECES_K; ++piece) {
            if (First && !arrived) {
                fa::mbarrier_wait_parity(&shared.q_full[piece], q_parity);
                fa::mbarrier_wait_parity(&shared.k_full[piece], k_parity);
            }
            if (piece == 0) fa::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                const int at = (2 * piece + step / 4) * SLAB + step % 4 * 32;
                fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, at), fa::descriptor_advance(k_operand, at),
                                     piece > 0 || step > 0);
            }
            fa::wgmma_commit();
        }
        k_parity ^= 1;
        if (First) q_parity ^= 1;
        read_entry();
    }
    // Of a later tile. behind: the last step of an O is in flight; it is complete then, and its stage given back.
    __device__ __forceinline__ void issue_next(bool behind) {
        issue_scores<false>();
        fa::wgmma_wait<PIECES_K>(out_reg);
        if (behind) give_v();
        if constexpr (PIECES_K == 4) fa::wgmma_wait<3>(), give_scores(0);
        fa::wgmma_wait<2>(), give_scores(PIECES_K - 3);
    }
    // A piece of S is complete. Of the last tile, its piece of the next Q may come. All lanes have read the work: they were at the products.
    __device__ __forceinline__ void give_scores(int piece) {
        give_k(piece);
        if (ends(entry)) release_q(piece);
    }
    // S is complete.
    __device__ __forceinline__ void release_scores(int first) {
#pragma unroll
        for (int piece = first; piece < PIECES_K; ++piece) give_scores(piece);
    }
    // Starts O += P V of the tile before; a work's first one begins O. Behind it S is complete.
    __device__ __forceinline__ void issue_output(int its_place, bool accumulate) {
        const uint64_t p_operand = fa::smem_descriptor_k_major(shared.p[its_place % 2]);
        const bool arrived = fa::are_full<PIECES_V>(shared.v_full, ring);
#pragma unroll
        for (int piece = 0; piece < PIECES_V; ++piece, ring.next()) {
            if (!arrived) fa::mbarrier_wait_parity(&shared.v_full[ring.stage], ring.parity);
            const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.v[ring.stage] + index * OWN_SLABS * V_SLAB, V_SLAB);
            if (piece == 0) fa::wgmma_fence();
            fa::wgmma_ss<scalar, true>(out_reg, fa::descriptor_advance(p_operand, piece * 32), v_operand, accumulate || piece > 0);
            fa::wgmma_commit();
        }
    }

    // What both consumers have written before it is there, for wgmma too.
    __device__ __forceinline__ void meet() { fa::bar_sync(1, 256); }
    // Of the thread's two rows: what the other consumer has of them, beside the own.
    __device__ __forceinline__ void exchange(float (&of_consumers)[2][BLOCK_Q], const float (&own)[2], float (&other)[2]) {
        const int its_row = 16 * warp + fa::fragment_row();
        if (fa::lane_id() % 4 == 0) of_consumers[index][its_row] = own[0], of_consumers[index][its_row + 8] = own[1];
        fa::bar_sync(2, 256);
        other[0] = of_consumers[index ^ 1][its_row], other[1] = of_consumers[index ^ 1][its_row + 8];
    }
    // Scores are those of the problem, and -inf for keys that a query does not see.
    __device__ __forceinline__ void mask() {
        const int key = tile_of(entry) * BLOCK_K + index * OWN_KEYS;
        if (args.scale <= 0) fa::apply_sign(score_reg, args.scale);
        if constexpr (LISTED) {
            if constexpr (fa::has_score) fa::apply_score(score_reg, args, work.batch, own_head(work), row, key, magnitude);
            if (Lists::sees_of(entry, own_part()) == fa::sees_all) return;
            if constexpr (fa::has_mask) fa::hide_scores(score_reg, args, work.batch, own_head(work), row, key);
            fa::mask_scores(score_reg, args, row, key);
        } else if (key + OWN_KEYS > fa::visible_keys(args, first) || key < fa::first_key(args, first + BLOCK_Q - 1)) {
            const int firsts[2] = {fa::first_key(args, row) - key, fa::first_key(args, row + 8) - key};
            const int visible[2] = {fa::visible_keys(args, row) - key, fa::visible_keys(args, row + 8) - key};
            if constexpr (fa::has_window) fa::keep_columns(score_reg, firsts, visible, -fa::infinity());
            else fa::mask_columns(score_reg, visible);
        }
    }
    // S of the last tile becomes P, in shared memory. What it does to O is left to rescale().
    __device__ __forceinline__ void softmax() {
        mask();
        float maximum[2], other[2], sum[2];
        fa::local_row_max(maximum, score_reg);
        maximum[0] = fa::group_max<4>(maximum[0]), maximum[1] = fa::group_max<4>(maximum[1]);
        exchange(shared.maxima, maximum, other);
        maximum[0] = max(maximum[0], other[0]), maximum[1] = max(maximum[1], other[1]);
        grows = max(maximum[0] * exponent_scale - reference[0], maximum[1] * exponent_scale - reference[1]) > SLACK;
        grows = __any_sync(fa::full_warp, grows);
        if (grows) fa::raise_reference(reference, row_sum, factor, maximum, exponent_scale);
        fa::exponentiate(score_reg, sum, exponent_scale, reference);
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        uint32_t operand[OWN_KEYS / 16][4];
        fa::pack_operand<scalar>(operand, score_reg);
        fa::store_operand(shared.p[place % 2] + 16 * warp * 128, SLAB, operand, index * OWN_KEYS);
        fa::fence_proxy_async_shared();
    }
    __device__ __forceinline__ void rescale() {
        if (grows) fa::scale_rows(out_reg, factor);
    }

    // All tiles of keys of the work that the block's queries see, of which S of the first is complete: O and the row sums of this consumer's
    // keys. The last product of O is in flight in the end.
    __device__ __forceinline__ void attend() {
        reference[0] = reference[1] = -1e30f, row_sum[0] = row_sum[1] = 0;
        softmax();
        bool accumulate = false;
        while (!ends(entry)) {
            issue_next(accumulate);
            meet();
            rescale();
            issue_output(place - 1, accumulate);
            fa::wgmma_wait<PIECES_V>(score_reg);
            release_scores(PIECES_K - 2);
            softmax();
            fa::wgmma_wait<3>(), give_v();
            fa::wgmma_wait<2>(), give_v();
            fa::wgmma_wait<1>(), give_v();
            accumulate = true;
        }
        fa::wgmma_wait<0>(out_reg);
        if (accumulate) give_v();
        meet();
        rescale();
        issue_output(place, accumulate);
    }
    // Passes over the tiles before the first of its own. False: there is none.
    __device__ __forceinline__ bool pass_before() {
        if (!has_queries()) return false;
        while (true) {
            fa::mbarrier_wait_parity(&shared.k_full[0], k_parity);
            if (begins(shared.entry)) return true;
            pass_tile();
        }
    }
    // Over those behind its last, or over all.
    __device__ __forceinline__ void pass_behind() {
        while (place < work.tiles - 1) pass_tile();
    }

    // The row sums of both consumers, with the sink; `inverse` of them.
    __device__ __forceinline__ void finish_rows(const Work& work, float (&inverse)[2]) {
        float other[2];
        fa::finish_row_sum(row_sum, inverse);
        exchange(shared.sums, row_sum, other);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            row_sum[half] += other[half];
            float top = reference[half] * fa::ln2, kept = 1;
            if constexpr (fa::has_sinks) kept = fa::add_sink(args, own_head(work), top, row_sum[half]);
            reference[half] = top;
            inverse[half] = row_sum[half] == 0 ? 0.0f : kept / row_sum[half];
        }
    }
    // O / row sum of a work, whose products are complete, leaves through the last stages of V, which were not given back: a warp's 16 rows
    // through the consumer's half of the warp's stage. All have read it: finish_rows() is a barrier.
    __device__ __forceinline__ void store(const Work& work, int first) {
        float inverse[2];
        finish_rows(work, inverse);
        const int stage = done.stage + warp;
        unsigned char* own_smem = shared.v[stage < STAGES ? stage : stage - STAGES] + index * OWN_SLABS * V_SLAB;
#pragma unroll
        for (int two = 0; two < OWN_SLABS; two += 2) {
            float part[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) part[i] = out_reg[32 * two + i];
            fa::store_rows<scalar>(own_smem + two * V_SLAB, V_SLAB, part, inverse);
        }
        fa::fence_proxy_async_shared();
        __syncwarp();
        if (fa::lane_id() == 0 && first + 16 * warp < args.seq_q) {
#pragma unroll
            for (int slab = 0; slab < OWN_SLABS; ++slab)
                fa::tma_store_4d(&o_map, own_smem + slab * V_SLAB, 64 * (OWN_SLABS * index + slab), first + 16 * warp, own_head(work),
                                 work.batch);
            fa::bulk_commit();
        }
        if (index == 0) store_logsumexp(work, first + 16 * warp + fa::fragment_row());
    }
    __device__ __forceinline__ void release_store() {
        fa::bulk_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int piece = 0; piece < PIECES_V; ++piece) give_v();
    }
    __device__ __forceinline__ void store_logsumexp(const Work& work, int row) {
        float* logsumexp = fa::row_pointer<float>(args.logsumexp, work.batch, own_head(work), 0);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (fa::lane_id() % 4 == 0 && row + 8 * half < args.seq_q)
                logsumexp[row + 8 * half] = row_sum[half] == 0 ? -fa::infinity() : reference[half] + fa::log(row_sum[half]);
    }
    // Blocks with the same queries see all tiles of a work. So S of the next work's first tile runs while O leaves.
    __device__ __forceinline__ void run_joined() {
        Work before = {};
        while (take_work()) {
            issue_scores<true>();
            fa::wgmma_wait<PIECES_K>(out_reg);
            if (before.tiles > 0) store(before, own_first(before));
            fa::wgmma_wait<0>(score_reg);
            release_scores(0);
            if (before.tiles > 0) release_store();
            attend();
            before = work;
        }
        fa::wgmma_wait<0>(out_reg);
        store(before, own_first(before)), release_store();
    }
    __device__ __forceinline__ void run_apart() {
        while (take_work()) {
            const bool seen = pass_before();
            if (seen) {
                issue_scores<true>();
                fa::wgmma_wait<0>(score_reg);
                release_scores(0);
                attend();
                fa::wgmma_wait<0>(out_reg);
                store(work, first), release_store();
            } else pass_q();
            pass_behind();
        }
    }
};

extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    if constexpr (LISTED) Lists::make(args);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        fa::mbarrier_init_ring(shared.q_full, shared.q_empty, 8);  // each warp of the block
        fa::mbarrier_init_ring(shared.k_full, shared.k_empty, 16);  // each warp of both blocks
        fa::mbarrier_init_ring(shared.v_full, shared.v_empty, 16, 2);  // two threads fill it
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) Producer<Copies::q>{shared, args, q_map}.run();
        if (threadIdx.x == 32) Producer<Copies::k>{shared, args, k_map}.run();
        if (threadIdx.x == 64) Producer<Copies::v>{shared, args, v_map}.run();
        if (threadIdx.x == 96) Producer<Copies::other_v>{shared, args, v_map}.run();
        __syncwarp();
    } else {
        fa::setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer{shared, args, o_map, fa::warpgroup_index() - 1};
        if constexpr (HEADS == 2) consumer.run_joined();
        else consumer.run_apart();
    }
    fa::cluster_sync();  // the other block arrives at this one's barriers until its end
}
