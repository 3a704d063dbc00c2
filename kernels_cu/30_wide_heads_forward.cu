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
// Shared memory: Q 64 KB, P of two tiles 16, and a ring of nine stages of 16 KB. A tile of 64 keys is four stages of K, 128 columns each,
// and four of V, 16 keys each: a stage is what both consumers multiply in one go, eight steps of S or one of O, and is given back then. So
// seven or eight of the nine may be on their way. O leaves through four stages too, so the next Q is loaded as soon as the last S is
// complete. The order of the ring is that of the products:
//
//     issue                        wait for                    compute, while the rest runs
//     S(n + 1), four stages of K   O += P(n - 1) V(n - 1)
//                                  the other's P(n): barrier 1  O is rescaled where a reference has grown
//     O += P(n) V(n), four of V    S(n + 1)
//                                  its maxima: barrier 2        P(n + 1) to the other place of P
//
// At barrier 1 both consumers' products of tile n - 1 are complete too, so the place of P(n - 1) is free. Products are never waited for
// without others behind them, but at a work's ends. Of two heads a cluster (HEADS = 2) not at its last one either: the next work's first S
// is issued behind the last product of O, and runs while O leaves. A window of 128 keys has three tiles a work, so its ends are most of it.
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
constexpr int BLOCK_Q = 64, BLOCK_K = 64, OWN_KEYS = 32, STAGES = 9;  // OWN_KEYS: of whose scores a consumer computes
constexpr int PIECES_K = COLUMNS / 128, PIECES_V = BLOCK_K / 16, PIECES_O = HEAD_DIM / 128;  // stages of a tile
constexpr int SLABS = HEAD_DIM / 64, OWN_SLABS = SLABS / 2;  // of 64 columns, 128 bytes: the swizzle's width; of O of a consumer
constexpr uint32_t SLAB = 64 * 128, V_SLAB = 16 * 128, STAGE = 2 * SLAB;  // bytes; a stage is two slabs of K or O, or eight of V
constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
constexpr bool LISTED = fa::has_mask || fa::has_score;  // the producer says which tiles of keys a consumer reads
constexpr int CLUSTER_Q = BLOCK_Q * 2 / HEADS;  // queries of a cluster's heads
static_assert(HEAD_DIM == 512 && COLUMNS <= HEAD_DIM, "its registers and shared memory are those of head dim 512");

using Tiles = fa::KeyTiles<CLUSTER_Q, BLOCK_K, HEADS>;
using Lists = fa::KeyLists<CLUSTER_Q, BLOCK_K, OF_BATCH, OF_HEAD, WORKSPACE_LISTS>;
using Work = Tiles::Work;  // of a cluster. tiles: 0 where there is no more
using Ring = fa::RingPlace<STAGES>;

// What a block has in shared memory. A phase of `full` ends when the stage's tile has arrived, one of `empty` when all warps of both
// blocks have read it in theirs.
struct Shared {
    unsigned char q[SLABS * SLAB];  // [SLABS][64][64]
    unsigned char ring[STAGES][STAGE];
    unsigned char p[2][SLAB];  // [64][64], by turns
    float maxima[2][BLOCK_Q], sums[2][BLOCK_Q];  // of each consumer's scores
    uint64_t q_full, q_empty, full[STAGES], empty[STAGES];
    Work work;  // whose Q is there
    int entries[STAGES];  // which tile of keys, or its entry in a list, is in a stage
};
static_assert(sizeof(Shared) <= 65536 + 9 * 16384 + 2 * 8192 + 2048, "what the header says");

// The block's rank in its cluster, its queries and head of a work, and the part of a list that is about them.
__device__ __forceinline__ int rank() { return blockIdx.x % 2; }
__device__ __forceinline__ int own_first(const Work& work) { return work.q_first + (HEADS == 1 ? BLOCK_Q * rank() : 0); }
__device__ __forceinline__ int own_head(const Work& work) { return work.head + (HEADS == 2 ? rank() : 0); }
__device__ __forceinline__ int own_part() { return HEADS == 1 ? rank() : 0; }
// The tile of keys of an entry.
__device__ __forceinline__ int tile_of(int entry) { return LISTED ? Lists::tile_of(entry) : entry; }

// Starts the copies: one thread's task.
struct Producer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap &q_map, &k_map, &v_map;
    Work work = {};
    int kv_head = 0, begin = 0;  // begin: of the work's list; without one its last tile of keys
    uint32_t q_parity = 1;
    Ring ring;

    __device__ __forceinline__ int entry(int n) const { return LISTED ? Lists::all(args)[begin + n] : begin - n; }
    static __device__ __forceinline__ int key(int entry) { return tile_of(entry) * BLOCK_K; }
    __device__ __forceinline__ void load_q() {
        fa::mbarrier_wait_parity(&shared.q_empty, q_parity);
        q_parity ^= 1;
        shared.work = work;
        if (work.tiles == 0) return fa::mbarrier_arrive(&shared.q_full);
        fa::tma_load_tile<SLAB>(shared.q, q_map, shared.q_full, own_first(work), own_head(work), work.batch);
    }
    // The next stage, when both blocks have read what was in it. This one's barrier expects what both load.
    __device__ __forceinline__ unsigned char* next_stage() {
        fa::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
        return shared.ring[ring.stage];
    }
    __device__ __forceinline__ void load_k(int entry) {
        const int its_key = key(entry);
#pragma unroll 1
        for (int piece = 0; piece < PIECES_K; ++piece, ring.next()) {
            unsigned char* stage = next_stage();
            shared.entries[ring.stage] = entry;
            fa::mbarrier_arrive_expect_tx(&shared.full[ring.stage], STAGE);
            fa::tma_load_4d_multicast(stage + rank() * SLAB, &k_map, &shared.full[ring.stage], 3, 128 * piece + 64 * rank(), its_key,
                                      kv_head, work.batch);
        }
    }
    __device__ __forceinline__ void load_v(int entry) {
        const int its_key = key(entry);
#pragma unroll 1
        for (int piece = 0; piece < PIECES_V; ++piece, ring.next()) {
            unsigned char* stage = next_stage();
            fa::mbarrier_arrive_expect_tx(&shared.full[ring.stage], STAGE);
#pragma unroll 1
            for (int slab = OWN_SLABS * rank(); slab < OWN_SLABS * (rank() + 1); ++slab)
                fa::tma_load_4d_multicast(stage + slab * V_SLAB, &v_map, &shared.full[ring.stage], 3, 64 * slab, its_key + 16 * piece,
                                          kv_head, work.batch);
        }
    }
    // Stages through which O leaves: they come empty.
    __device__ __forceinline__ void reserve() {
        for (int piece = 0; piece < PIECES_O; ++piece, ring.next()) next_stage(), fa::mbarrier_arrive(&shared.full[ring.stage]);
    }
    // All works of the cluster: one of each round of all clusters, whose order turns around every time. Of blocks with the same queries O
    // leaves behind the next work's first tile of K.
    __device__ __forceinline__ void run() {
        const int works = Tiles::works(args), clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
#pragma unroll 1  // the producer has few registers
        for (int round = 0;; ++round) {
            const int number = round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
            if (number >= works) break;
            work = Tiles::of_number<4 * HEAD_DIM>(args, number, SECTION);
            kv_head = fa::kv_head_of(args, work.head);
            if constexpr (LISTED) begin = Lists::of_place(args, work.batch, work.head, work.q_first, work.tiles);
            else begin = Tiles::seen(args, work.q_first + CLUSTER_Q) - 1;
            load_q();
            int its_entry = entry(0);
            load_k(its_entry);
            if (HEADS == 2 && round > 0) reserve();
#pragma unroll 1
            for (int n = 1; n < work.tiles; ++n) {
                const int next = entry(n);
                load_k(next), load_v(its_entry);
                its_entry = next;
            }
            load_v(its_entry);
            if (HEADS == 1) reserve();
        }
        work = {};
        load_q();
        if (HEADS == 2) reserve();
    }
};

// 64 queries, with half of each tile's keys their scores, with half of V's columns their O. A thread has parts of the rows `row` and
// row + 8.
struct Consumer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap& o_map;
    const int index, warp = fa::warp_id() % 4;
    const uint32_t other_empty = fa::map_shared(shared.empty, rank() ^ 1);
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
    int entry, place, last;  // of the tile of K that was taken last: its entry, which of the work's it is; last: of those that are seen
    uint32_t q_parity = 0;
    Ring ring, done;  // done: the next stage that is given back

    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(&shared.q_full, q_parity);
        q_parity ^= 1;
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
    // All lanes have read the work before the producer writes the next: that waits for stages of this one too, which they give back together.
    __device__ __forceinline__ void release_q() {
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.q_empty);
    }
    // Waits for the next stage of the ring. Stages are given back in their order, to both blocks.
    __device__ __forceinline__ unsigned char* take() {
        fa::mbarrier_wait_parity(&shared.full[ring.stage], ring.parity);
        return shared.ring[ring.stage];
    }
    __device__ __forceinline__ void give() {
        if (fa::lane_id() == 0) {
            fa::mbarrier_arrive(&shared.empty[done.stage]);
            fa::mbarrier_arrive_remote(other_empty + done.stage * 8);
        }
        done.next();
    }
    __device__ __forceinline__ void read_entry() {
        entry = __shfl_sync(fa::full_warp, shared.entries[ring.stage], 0);  // known to the compiler as the same in the whole warp
        __syncwarp();  // all lanes have read it when the first one gives the stage back
        ++place;
    }
    // A tile of K, or of V, that only the other block needs. No product is in flight.
    template <int Pieces, bool IsK> __device__ __forceinline__ void pass() {
#pragma unroll 1
        for (int piece = 0; piece < Pieces; ++piece, ring.next()) {
            take();
            if (IsK && piece == 0) read_entry();
            __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
            give();
        }
    }

    // Starts S = Q K^T of the next tile's 32 keys, which takes the stage of each piece; then(piece) follows each.
    template <class Then> __device__ __forceinline__ void issue_scores(Then then) {
        const uint64_t q_operand = fa::descriptor_here(fa::smem_descriptor_k_major(shared.q));
        fa::discard(score_reg);
#pragma unroll
        for (int piece = 0; piece < PIECES_K; ++piece, ring.next()) {
            const uint64_t k_operand = fa::smem_descriptor_k_major(take() + index * OWN_KEYS * 128);
            if (piece == 0) read_entry();
            fa::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 8; ++step)
                fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, (2 * piece + step / 4) * SLAB + step % 4 * 32),
                                     fa::descriptor_advance(k_operand, step / 4 * SLAB + step % 4 * 32), piece > 0 || step > 0);
            fa::wgmma_commit();
            then(piece);
        }
    }
    // Of a work's first tile: nothing is given back yet.
    __device__ __forceinline__ void issue_first() {
        issue_scores([](int) {});
    }
    // Of a later tile. behind: the last step of an O is in flight; it is complete then, and its stage given back.
    __device__ __forceinline__ void issue_next(bool behind) {
        issue_scores([&](int piece) {
            if (piece == 0) fa::wgmma_wait<1>(out_reg);
            else fa::wgmma_wait<1>();
            if (piece > 0 || behind) give();
        });
    }
    // S is complete. Behind the last one the next Q may come.
    __device__ __forceinline__ void release_scores(int pieces) {
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) give();
        if (ends(entry)) release_q();
    }
    // Starts O += P V of the tile before; a work's first one begins O. Behind it S is complete.
    __device__ __forceinline__ void issue_output(int its_place, bool accumulate) {
        const uint64_t p_operand = fa::smem_descriptor_k_major(shared.p[its_place % 2]);
#pragma unroll
        for (int piece = 0; piece < PIECES_V; ++piece, ring.next()) {
            const uint64_t v_operand = fa::smem_descriptor_mn_major(take() + index * OWN_SLABS * V_SLAB, V_SLAB);
            fa::wgmma_fence();
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
            release_scores(1);
            softmax();
            fa::wgmma_wait<3>(), give();
            fa::wgmma_wait<2>(), give();
            fa::wgmma_wait<1>(), give();
            accumulate = true;
        }
        fa::wgmma_wait<0>(out_reg);
        if (accumulate) give();
        meet();
        rescale();
        last = place;
        if (HEADS == 1 && last < work.tiles - 1) pass<PIECES_K, true>();
        issue_output(last, accumulate);
    }
    __device__ __forceinline__ void release_output() {
#pragma unroll
        for (int piece = 0; piece < PIECES_V; ++piece) give();
    }
    // Passes over the tiles before the first of its own. False: there is none.
    __device__ __forceinline__ bool pass_before() {
        if (!has_queries()) return false;
        while (true) {
            take();
            if (begins(shared.entries[ring.stage])) return true;
            pass<PIECES_K, true>();
            if (place > 0) pass<PIECES_V, false>();
        }
    }
    // Over those behind its last, of which the first K is passed; or over all.
    __device__ __forceinline__ void pass_behind(bool seen) {
        if (seen && last == work.tiles - 1) return;
        if (!seen) pass<PIECES_K, true>();
        while (place < work.tiles - 1) {
            pass<PIECES_K, true>();
            pass<PIECES_V, false>();
        }
        pass<PIECES_V, false>();
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
    // The stages of O that the other consumer fills. Given back with the own: products may be in flight whose stages come before them.
    __device__ __forceinline__ void take_others() {
#pragma unroll 1
        for (int piece = 0; piece < PIECES_O / 2; ++piece, ring.next()) take();
    }
    // O / row sum of a work leaves through two stages of each consumer, 128 columns in each; a warp sends its own 16 rows.
    __device__ __forceinline__ void store(const Work& work, int first) {
        float inverse[2];
        finish_rows(work, inverse);
        if (index == 1) take_others();
#pragma unroll
        for (int piece = 0; piece < PIECES_O / 2; ++piece, ring.next()) {
            unsigned char* own_smem = take() + 16 * warp * 128;
            float part[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) part[i] = out_reg[64 * piece + i];
            fa::store_rows<scalar>(own_smem, SLAB, part, inverse);
            fa::fence_proxy_async_shared();
            __syncwarp();
            if (fa::lane_id() == 0 && first + 16 * warp < args.seq_q) {
                const int column = 128 * (PIECES_O / 2 * index + piece);
                fa::tma_store_4d(&o_map, own_smem, column, first + 16 * warp, own_head(work), work.batch);
                fa::tma_store_4d(&o_map, own_smem + SLAB, column + 64, first + 16 * warp, own_head(work), work.batch);
                fa::bulk_commit();
            }
        }
        if (index == 0) store_logsumexp(work, first + 16 * warp + fa::fragment_row()), take_others();
    }
    __device__ __forceinline__ void release_store() {
        fa::bulk_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int piece = 0; piece < PIECES_O; ++piece) give();
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
            issue_first();
            fa::wgmma_wait<PIECES_K>(out_reg);
            if (before.tiles > 0) release_output(), store(before, own_first(before));
            fa::wgmma_wait<0>(score_reg);
            release_scores(PIECES_K);
            if (before.tiles > 0) release_store();
            attend();
            before = work;
        }
        fa::wgmma_wait<0>(out_reg);
        release_output();
        store(before, own_first(before)), release_store();
    }
    __device__ __forceinline__ void run_apart() {
        while (take_work()) {
            const bool seen = pass_before();
            if (seen) {
                issue_first();
                fa::wgmma_wait<0>(score_reg);
                release_scores(PIECES_K);
                if (place > 0) pass<PIECES_V, false>();
                attend();
                fa::wgmma_wait<0>(out_reg);
                release_output();
            } else release_q();
            pass_behind(seen);
            if (seen) store(work, first), release_store();
            else pass<PIECES_O, false>();
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
        fa::mbarrier_init(&shared.q_full, 1), fa::mbarrier_init(&shared.q_empty, 8);
        fa::mbarrier_init_ring(shared.full, shared.empty, 16);  // each warp of both blocks
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) Producer{shared, args, q_map, k_map, v_map}.run();
        __syncwarp();
    } else {
        fa::setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer{shared, args, o_map, fa::warpgroup_index() - 1};
        if constexpr (HEADS == 2) consumer.run_joined();
        else consumer.run_apart();
    }
    fa::cluster_sync();  // the other block arrives at this one's barriers until its end
}
