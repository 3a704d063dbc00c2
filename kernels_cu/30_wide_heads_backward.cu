// /// kernel
// title = "Hopper at head dims up to 512: a block of a cluster makes P and dV, the other dS and dK"
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
// logsumexp_gradient = true
// auto = "head_dim > 256"
// arithmetic = "p16"
// [tile]
// SECTION = 32  # MB of the heads that run at the same time, under the causal mask: of Q, dO and dQ, or of K and V
// [let]
// COLUMNS = "max(384, round_up(head_dim, 128))"  # of the head over which S and dP are computed
// group = "heads_q // heads_kv"
// q_tiles = "ceil_div(seq_q, 64)"
// k_tiles = "ceil_div(seq_kv, 64)"
// OF_BATCH = "mask_of_batch"
// OF_HEAD = "mask_of_head"
// lists = "mask * (batch if OF_BATCH else 1) * (heads_q if OF_HEAD else 1)"
// clusters = "max(1, sms // 2)"  # that run at the same time
// seen = "mask * 2 * k_tiles * heads_kv * batch * (group * q_tiles + 2)"  # fa/seen_tiles.cuh
// [workspace.stats]
// dtype = "float32"
// size = "2 * batch * heads_q * round_up(seq_q, 64)"
// init = "none"
// [workspace.seen]
// dtype = "float32"  # integers
// size = "8 * batch * heads_q * q_tiles + seen"
// init = "none"
// [workspace.lists]
// dtype = "float32"  # integers
// size = "lists * (1 + q_tiles * (2 + k_tiles))"
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
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.d_o]
// tensor = "dO"
// box = [64, 64, 1, 1]
// swizzle = 128
// [tensor_map.q_steps]
// tensor = "Q"
// box = [64, 16, 1, 1]
// swizzle = 128
// [tensor_map.k_steps]
// tensor = "K"
// box = [64, 16, 1, 1]
// swizzle = 128
// [tensor_map.d_o_steps]
// tensor = "dO"
// box = [64, 16, 1, 1]
// swizzle = 128
// [tensor_map.stats]
// tensor = "stats"
// dims = [128, "q_tiles", "heads_q", "batch"]
// strides = [128, "128 * q_tiles", "128 * q_tiles * heads_q"]
// box = [128, 1, 1, 1]
// [tensor_map.dq]
// tensor = "dQ"
// box = [64, 16, 1, 1]
// swizzle = 128
// [tensor_map.dk]
// tensor = "dK"
// box = [64, 16, 1, 1]
// swizzle = 128
// [tensor_map.dv]
// tensor = "dV"
// box = [64, 16, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "prepare"
// grid = ["4 * q_tiles", "heads_q", "batch"]
// block = 128
// maps = []
// [[launch]]
// entry = "list"
// when = "mask"
// grid = ["ceil_div(q_tiles, 4)", "lists"]
// block = 128
// maps = []
// [[launch]]
// entry = "of_keys"
// grid = "2 * min(clusters, k_tiles * heads_kv * batch)"
// block = 384
// cluster = 2
// shared = "65536 + 8 * 16384 + 2 * 8192 + 16384 + 2560"
// maps = ["k", "v", "q", "d_o", "q_steps", "d_o_steps", "stats", "dk", "dv"]
// [[launch]]
// entry = "of_queries"
// grid = "2 * min(clusters, q_tiles * heads_q * batch)"
// block = 384
// cluster = 2
// shared = "65536 + 8 * 16384 + 2 * 8192 + 16384 + 2560"
// maps = ["q", "d_o", "k", "v", "k_steps", "dq"]
// [[launch]]
// entry = "dsinks"
// when = "sinks"
// grid = ["heads_q"]
// block = 1024
// maps = []
// ///
//
// Step 30, backward, in the form of its forward pass: 64 rows stay in a block, tiles of 64 rows of others pass by in stages that four
// threads fill, two consumers make half of a tile's scores each, and have 256 columns of a sum of 64 x 512, which leaves through the last
// stages.
//
// What does not fit. dK and dV of 64 keys and 512 columns are 256 KB, all registers of a multiprocessor. So two blocks, a cluster, have the
// same 64 keys, and a role each:
//
//     rank 0   keeps K, streams Q and dO:    S^T = K Q^T     P^T, which it sends to rank 1    dV += P^T dO
//     rank 1   keeps V, streams dO and Q:    dP^T = V dO^T   dS^T = P^T ∘ (dP^T - delta)       dK += dS^T Q
//
// No score is made twice, both have as much to multiply, and shared memory holds what the forward pass holds, but for a stage. P crosses in
// float32, by registers: a thread of rank 0 writes 16 numbers to the place where the same thread of rank 1 reads them (st.async), 16 KB a
// tile.
//
// dQ is a launch of its own, with the roles of queries and keys exchanged: rank 0 keeps Q and sends P, rank 1 keeps dO, streams V and K,
// and makes dQ += dS K. That is S and dP once more, seven products for five. But nothing is added in global memory, where a tile of dQ, 128
// KB, would be added for every 64 keys; nothing has to be set to zero or converted, and the gradients have the same bits every time. In
// this launch rank 1 has two products and rank 0 one. Its works may be short, as with a window: dQ of one leaves while the first dP of the
// next is computed.
//
// The stages, and what is waited for, are the forward pass's: X is what stays, A what is multiplied with it, B what the sum is made of.
//
//     issue                        wait for                    compute, while the rest runs
//     X A(n + 1), four stages      the sum of tile n - 1
//                                  the other's half: barrier 1
//     += P or dS(n) B(n), four     X A(n + 1)
//                                  P of rank 0 (rank 1)         P or dS(n + 1) to the other place; P to rank 1 (rank 0)
//
// A window is a second border beside the causal mask's: both walks end at it, and no launch lists anything. With a mask one launch before
// lists the tiles of queries that see a tile of keys (fa/seen_tiles.cuh), and one the tiles of keys that a tile of queries sees
// (fa/key_lists.cuh). The producers walk, and one tells the consumers of each tile which it is.
#include <fa/accumulator.cuh>
#include <fa/cluster.cuh>
#include <fa/gradient.cuh>
#include <fa/key_lists.cuh>
#include <fa/key_tiles.cuh>
#include <fa/query_tiles.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int THREADS = 384, CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;  // together 504
constexpr int ROWS = 64, OWN_COLUMNS = 32;  // of a tile; of whose scores a consumer computes
constexpr int PIECES_A = COLUMNS / 128, PIECES_B = ROWS / 16, STAGES = 8 - PIECES_A;  // of a tile; STAGES: of the ring of B
constexpr int SLABS = HEAD_DIM / 64, OWN_SLABS = SLABS / 2;  // of 64 columns, 128 bytes: the swizzle's width; of a consumer's sum
constexpr uint32_t SLAB = 64 * 128, STEP_SLAB = 16 * 128, STAGE = 2 * SLAB;  // bytes; a stage is two slabs of A, or eight of B or the sum
constexpr uint32_t STATS = 2 * ROWS * 4;
static_assert(HEAD_DIM == 512 && COLUMNS <= HEAD_DIM, "its registers and shared memory are those of head dim 512");

using Queries = fa::QueryTiles<ROWS, HEAD_DIM, WORKSPACE_STATS, WORKSPACE_STATS>;  // dQ needs no workspace
using Keys = fa::KeyTiles<ROWS, ROWS>;
using Seen = fa::SeenTiles<ROWS, ROWS, false, false, WORKSPACE_SEEN>;
using Lists = fa::KeyLists<ROWS, ROWS, OF_BATCH, OF_HEAD, WORKSPACE_LISTS>;
using ARing = fa::RingPlace<PIECES_A>;
using BRing = fa::RingPlace<STAGES>;

__device__ __forceinline__ int rank() { return blockIdx.x % 2; }

// The 64 rows of a work, its heads, and how many tiles pass by; count is -1 where there is no more work.
struct Rows {
    int first, head, kv_head, batch, count;  // head: of queries, which the keys do not have
};
// A tile that passes by: its number in its head, a query head, and what is seen of it (fa::Sees).
struct Tile {
    int number, head, sees;
};

// Whether a tile of queries sees all of a tile of keys, by the causal mask and its window. A score's text is for queries that exist.
__device__ __forceinline__ bool sees_all(const fa::Args& args, int query, int key) {
    return key + ROWS <= fa::visible_keys(args, query) && key >= fa::first_key(args, query + ROWS - 1) &&
           !(fa::has_score && query + ROWS > args.seq_q);
}

// Launch 3: keys stay, the tiles of queries that see them pass by, of all heads that read their head.
struct OfKeys {
    static constexpr bool by_queries = false, joined = false;
    using Walk = fa::WalkOf<false, Seen>;
    fa::Work work{};
    Walk walk{};

    static __device__ __forceinline__ int works(const fa::Args& args) { return Queries::works<ROWS>(args); }
    __device__ __forceinline__ Rows begin(const fa::Args& args, int number) {
        work = Queries::work<ROWS>(args, number, SECTION);
        if constexpr (fa::has_mask) Seen::narrow(args, work, 1);
        walk = Walk::begin(work);
        return {work.k_first, 0, work.kv_head, work.batch, work.count};
    }
    __device__ __forceinline__ Tile next(const fa::Args& args) {
        Tile tile = {walk.queries(work), walk.query_head(work), fa::has_mask ? walk.sees(0) : int(fa::sees_all)};
        if (!sees_all(args, tile.number * ROWS, work.k_first)) tile.sees = fa::sees_some;
        walk.next(work);
        return tile;
    }
};
// Launch 4: queries stay, the tiles of keys that they see pass by.
struct OfQueries {
    static constexpr bool by_queries = true, joined = true;
    Keys::Work work{};
    int at = 0;  // of the list, or the tile

    static __device__ __forceinline__ int works(const fa::Args& args) { return Keys::works(args); }
    __device__ __forceinline__ Rows begin(const fa::Args& args, int number) {
        work = Keys::of_number<4 * HEAD_DIM>(args, number, SECTION), at = Keys::first_tile(args, work.q_first);
        if constexpr (fa::has_mask) at = Lists::of_place(args, work.batch, work.head, work.q_first, work.tiles);
        return {work.q_first, work.head, fa::kv_head_of(args, work.head), work.batch, work.tiles};
    }
    __device__ __forceinline__ Tile next(const fa::Args& args) {
        const int entry = fa::has_mask ? Lists::all(args)[at] : at;
        ++at;
        if constexpr (fa::has_mask) return {Lists::tile_of(entry), work.head, Lists::sees_of(entry, 0)};
        return {entry, work.head, sees_all(args, work.q_first, entry * ROWS) ? fa::sees_all : fa::sees_some};
    }
};

// What a block has in shared memory.
struct Shared {
    unsigned char x[SLABS * SLAB];  // [SLABS][64][64]
    unsigned char a[PIECES_A][STAGE], b[STAGES][STAGE];
    unsigned char scores[2][SLAB];  // [64][64], P or dS, by turns
    float sent[2][4][128][4];  // P of rank 0, in rank 1: 16 numbers of each thread of each consumer
    float stats[2][2 * ROWS];  // of tiles of queries, by turns
    uint64_t x_full, x_empty, a_full[PIECES_A], a_empty[PIECES_A], b_full[STAGES], b_empty[STAGES];
    uint64_t sent_full[2], sent_empty[2];  // of each consumer: P has come, in rank 1; it has been read there, in rank 0
    Rows rows;  // which of them X is
    Tile tile;  // which A is
};
static_assert(sizeof(Shared) <= 65536 + 8 * 16384 + 2 * 8192 + 16384 + 2560, "what the header says");

// What the producer of a rank loads, and where its sums go.
struct Maps {
    const fa::TensorMap &x, &a, &b, &stats, &out;
};

// Starts the copies of X, of A, or of a half of B: four threads' tasks. HasSum: this rank has B and a sum.
enum class Copies { x, a, b, other_b };
template <class Of, bool HasSum, Copies What> struct Producer {
    Shared& shared;
    const fa::Args& args;
    const Maps maps;
    Of of{};
    Rows rows{};
    uint32_t parity = 1, tiles = 0;  // parity: of X and A; tiles: counted through
    BRing ring;

    __device__ __forceinline__ void load_x() {
        fa::mbarrier_wait_parity(&shared.x_empty, parity);
        parity ^= 1;
        shared.rows = rows;
        if (rows.count <= 0) return fa::mbarrier_arrive(&shared.x_full);
        fa::tma_load_tile<SLAB>(shared.x, maps.x, shared.x_full, rows.first, Of::by_queries ? rows.head : rows.kv_head, rows.batch);
    }
    // The head that a tile belongs to.
    __device__ __forceinline__ int head(const Tile& tile) const { return Of::by_queries ? rows.kv_head : tile.head; }
    // The stats of the tile before last have been read when the scores of the last one are complete.
    __device__ __forceinline__ void load_a(const Tile& tile) {
#pragma unroll 1
        for (int piece = 0; piece < PIECES_A; ++piece) {
            uint64_t& full = shared.a_full[piece];
            fa::mbarrier_wait_parity(&shared.a_empty[piece], parity);
            if (piece == 0) shared.tile = tile;
            fa::mbarrier_arrive_expect_tx(&full, STAGE + (piece == 0 && !Of::by_queries ? STATS : 0));
            if (piece == 0 && !Of::by_queries)
                fa::tma_load_4d(shared.stats[tiles % 2], &maps.stats, &full, 0, tile.number, tile.head, rows.batch);
            for (int slab = 0; slab < 2; ++slab)
                fa::tma_load_4d(shared.a[piece] + slab * SLAB, &maps.a, &full, 128 * piece + 64 * slab, tile.number * ROWS, head(tile),
                                rows.batch);
        }
        parity ^= 1, ++tiles;
    }
    // A half of the columns of each stage. Where there is no B, its stages come empty: zeros leave through them.
    __device__ __forceinline__ void load_b(const Tile& tile, bool empty = false) {
#pragma unroll 1
        for (int piece = 0; piece < PIECES_B; ++piece, ring.next()) {
            uint64_t* full = &shared.b_full[ring.stage];
            fa::mbarrier_wait_parity(&shared.b_empty[ring.stage], ring.parity ^ 1);
            if (empty) {
                fa::mbarrier_arrive(full);
                continue;
            }
            fa::mbarrier_arrive_expect_tx(full, STAGE / 2);
#pragma unroll
            for (int i = 0; i < OWN_SLABS; ++i) {
                const int slab = (What == Copies::b ? 0 : OWN_SLABS) + i;
                fa::tma_load_4d(shared.b[ring.stage] + slab * STEP_SLAB, &maps.b, full, 64 * slab, tile.number * ROWS + 16 * piece,
                                head(tile), rows.batch);
            }
        }
    }
    __device__ __forceinline__ void load_tiles() {
#pragma unroll 1
        for (int n = 0; n < rows.count; ++n) What == Copies::a ? load_a(of.next(args)) : load_b(of.next(args));
        if (What != Copies::a && rows.count == 0) load_b({}, true);
    }
    // All works of the cluster: one of each round of all clusters, whose order turns around every time.
    __device__ __forceinline__ void run() {
        if ((What == Copies::b || What == Copies::other_b) && !HasSum) return;
        const int works = Of::works(args), clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
#pragma unroll 1  // the producer has few registers
        for (int round = 0;; ++round) {
            const int number = round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
            if (number >= works) break;
            rows = of.begin(args, number);
            if constexpr (What == Copies::x) load_x();
            else load_tiles();
        }
        rows.count = -1;
        if constexpr (What == Copies::x) load_x();
    }
};

// 64 rows with half of each tile's scores, and half of the columns of their sum. A thread has parts of the rows `row` and row + 8.
// Rank: 0 makes P, 1 dS. HasSum: the sum of P B or dS B.
template <class Of, int Rank, bool HasSum> struct Consumer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap& out_map;
    const int index, warp = fa::warp_id() % 4;
    const uint32_t other_sent = fa::map_shared(shared.sent[index], Rank ^ 1);
    const uint32_t other_barrier = fa::map_shared(Rank == 0 ? &shared.sent_full[index] : &shared.sent_empty[index], Rank ^ 1);
    const float scale = float(args.scale);
    float score_reg[OWN_COLUMNS / 2], sum_reg[HasSum ? OWN_SLABS * 32 : 4];
    float lse[2], delta[2];  // of the rows, where they are queries: log2(e) * logsumexp
    Rows rows;
    Tile tile;  // whose scores were computed last
    int left;  // tiles whose scores are to be computed
    uint32_t x_parity = 0, a_parity = 0, tiles = 0;
    BRing ring, done;  // done: the next stage of B that is given back

    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(&shared.x_full, x_parity);
        x_parity ^= 1;
        rows = shared.rows, left = rows.count;
        if (left < 0) return false;
        if constexpr (Of::by_queries) {
            const int number = Queries::number(args, rows.batch, rows.head, rows.first / ROWS);
            const float* stats = Queries::stats(args, number) + 16 * warp + fa::fragment_row();
#pragma unroll
            for (int half = 0; half < 2; ++half) lse[half] = stats[8 * half], delta[half] = stats[ROWS + 8 * half];
        }
        return true;
    }
    __device__ __forceinline__ void release_x() {
        __syncwarp();  // all lanes have read which rows they are
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.x_empty);
    }
    __device__ __forceinline__ void give_a(int piece) {
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.a_empty[piece]);
    }
    __device__ __forceinline__ void give_b() { fa::release_stage(shared.b_empty, done); }
    __device__ __forceinline__ void read_tile() {
        tile = shared.tile;
        tile.sees = __shfl_sync(fa::full_warp, tile.sees, 0);  // known to the compiler as the same in the whole warp
        __syncwarp();  // all lanes have read it when the first one gives the stage back
        ++tiles, --left;
    }

    // Starts X A^T of the next tile's 32 columns, a group of products for each piece. First: of a work's first tile.
    template <bool First> __device__ __forceinline__ void issue_scores() {
        const uint64_t x_operand = fa::descriptor_here(fa::smem_descriptor_k_major(shared.x));
        const uint64_t a_operand = fa::descriptor_here(fa::smem_descriptor_k_major(shared.a[0] + index * OWN_COLUMNS * 128));
        const bool arrived = fa::are_full<PIECES_A>(shared.a_full, ARing{0, a_parity});
        if (!First && !arrived) fa::wait_full<PIECES_A>(shared.a_full, ARing{0, a_parity});
        fa::discard(score_reg);
#pragma unroll
        for (int piece = 0; piece < PIECES_A; ++piece) {
            if (First && !arrived) fa::mbarrier_wait_parity(&shared.a_full[piece], a_parity);
            if (piece == 0) fa::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                const int at = (2 * piece + step / 4) * SLAB + step % 4 * 32;
                fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(x_operand, at), fa::descriptor_advance(a_operand, at),
                                     piece > 0 || step > 0);
            }
            fa::wgmma_commit();
        }
        a_parity ^= 1;
        read_tile();
    }
    // Of a later tile. behind: the last step of a sum is in flight; it is complete then, and its stage given back.
    __device__ __forceinline__ void issue_next(bool behind) {
        issue_scores<false>();
        fa::wgmma_wait<PIECES_A>();
        if (behind) give_b();
        if constexpr (PIECES_A == 4) fa::wgmma_wait<3>(), give_a(0);
        fa::wgmma_wait<2>(), give_a(PIECES_A - 3);
    }
    // The scores are complete. Behind the last of them the next rows may come.
    __device__ __forceinline__ void release_scores(int first) {
#pragma unroll
        for (int piece = first; piece < PIECES_A; ++piece) give_a(piece);
        if (left == 0) release_x();
    }
    // Starts the sum's part of the tile of a number; a work's first one begins it.
    __device__ __forceinline__ void issue_sum(uint32_t number, bool accumulate) {
        const uint64_t operand = fa::smem_descriptor_k_major(shared.scores[number % 2]);
        const bool arrived = fa::are_full<PIECES_B>(shared.b_full, ring);
#pragma unroll
        for (int piece = 0; piece < PIECES_B; ++piece, ring.next()) {
            if (!arrived) fa::mbarrier_wait_parity(&shared.b_full[ring.stage], ring.parity);
            const uint64_t b_operand = fa::smem_descriptor_mn_major(shared.b[ring.stage] + index * OWN_SLABS * STEP_SLAB, STEP_SLAB);
            if (piece == 0) fa::wgmma_fence();
            fa::wgmma_ss<scalar, true>(sum_reg, fa::descriptor_advance(operand, piece * 32), b_operand, accumulate || piece > 0);
            fa::wgmma_commit();
        }
    }

    // What both consumers have written before it is there, for wgmma too; the products of the tile before are complete in both.
    __device__ __forceinline__ void meet() { fa::bar_sync(1, 256); }
    // The logsumexp, or delta, of score i.
    __device__ __forceinline__ float stat_of(int i, bool is_delta) const {
        if constexpr (Of::by_queries) return (is_delta ? delta : lse)[i / 2 % 2];
        return shared.stats[(tiles - 1) % 2][is_delta * ROWS + index * OWN_COLUMNS + fa::fragment_column() + i / 4 * 8 + i % 2];
    }
    // S becomes P, of which `share` is the operand; score_reg is P times the derivative of the score, as dS has it.
    template <bool Masked> __device__ __forceinline__ void exponentiate(uint32_t (&operand)[OWN_COLUMNS / 16][4]) {
        const int of_rows = rows.first + 16 * warp + fa::fragment_row();
        const int of_columns = tile.number * ROWS + index * OWN_COLUMNS + fa::fragment_column();
        float p[OWN_COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < OWN_COLUMNS / 2; ++i) {
            const int row = of_rows + i / 2 % 2 * 8, column = of_columns + i / 4 * 8 + i % 2;
            float slope;
            p[i] = fa::pair_probability(args, rows.batch, tile.head, Of::by_queries ? row : column, Of::by_queries ? column : row,
                                        score_reg[i], scale, stat_of(i, false), Masked, slope);
            score_reg[i] = slope;
        }
        if constexpr (HasSum) fa::pack_operand<scalar>(operand, p);
    }
    __device__ __forceinline__ void send() {
        fa::mbarrier_wait_parity(&shared.sent_empty[index], tiles % 2);  // that of the tile before has been read
        const uint32_t to = other_sent + threadIdx.x % 128 * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            fa::store_remote_16(to + i * 2048, __float_as_uint(score_reg[4 * i]), __float_as_uint(score_reg[4 * i + 1]),
                                __float_as_uint(score_reg[4 * i + 2]), __float_as_uint(score_reg[4 * i + 3]), other_barrier);
    }
    __device__ __forceinline__ void receive(float (&p)[OWN_COLUMNS / 2]) {
        if (threadIdx.x % 128 == 0) fa::mbarrier_arrive_expect_tx(&shared.sent_full[index], sizeof(shared.sent[0]));
        fa::mbarrier_wait_parity(&shared.sent_full[index], (tiles - 1) % 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const fa::Vec<float, 4> four = fa::load_vec<4>(shared.sent[index][i][threadIdx.x % 128]);
#pragma unroll
            for (int j = 0; j < 4; ++j) p[4 * i + j] = four[j];
        }
    }
    // P may be overwritten. The loads of it are complete: what was made of them is stored, and a fence lies behind it. An arrival at another
    // block waits for no load that is in flight.
    __device__ __forceinline__ void release_sent() {
        __syncwarp();
        if (fa::lane_id() == 0) fa::mbarrier_arrive_remote(other_barrier);
    }
    // S of the last tile becomes P, or dP dS, in shared memory.
    __device__ __forceinline__ void make_operand() {
        uint32_t operand[OWN_COLUMNS / 16][4];
        if constexpr (Rank == 0) {
            if (tile.sees == fa::sees_all) exponentiate<false>(operand);
            else exponentiate<true>(operand);
            send();
        } else {
            float p[OWN_COLUMNS / 2];
            receive(p);
#pragma unroll
            for (int i = 0; i < OWN_COLUMNS / 2; ++i) score_reg[i] = p[i] * (score_reg[i] - stat_of(i, true));
            fa::pack_operand<scalar>(operand, score_reg);
        }
        if constexpr (HasSum) {
            fa::store_operand(shared.scores[(tiles - 1) % 2] + 16 * warp * 128, SLAB, operand, index * OWN_COLUMNS);
            fa::fence_proxy_async_shared();
        }
        static_assert(Rank == 0 || HasSum, "the fence behind dS is that of the sum's operand");
        if constexpr (Rank == 1) release_sent();
    }
    __device__ __forceinline__ void first_scores() {
        issue_scores<true>();
        fa::wgmma_wait<0>(score_reg);
        release_scores(0);
    }
    // All tiles of the work, with a sum; the scores of the first are complete. The sum's last product is in flight in the end.
    __device__ __forceinline__ void walk() {
        make_operand();
        bool accumulate = false;
        while (left > 0) {
            issue_next(accumulate);
            meet();
            issue_sum(tiles - 2, accumulate);
            fa::wgmma_wait<PIECES_B>(score_reg);
            release_scores(PIECES_A - 2);
            make_operand();
            fa::wgmma_wait<3>(), give_b();
            fa::wgmma_wait<2>(), give_b();
            fa::wgmma_wait<1>(), give_b();
            accumulate = true;
        }
        fa::wgmma_wait<0>(sum_reg);
        if (accumulate) give_b();
        meet();
        issue_sum(tiles - 1, accumulate);
    }
    // The sum of some rows, whose products are complete, leaves through the last stages of B, which are not given back yet: a warp's 16 rows
    // through the consumer's half of the warp's stage, which nobody reads any more when all warps are here.
    __device__ __forceinline__ void store(const Rows& rows) {
        const int end = Of::by_queries ? args.seq_q : args.seq_kv, head = Of::by_queries ? rows.head : rows.kv_head;
        const float factor = rows.count == 0 ? 0.0f : Rank == 1 ? scale : 1.0f, factors[2] = {factor, factor};
        const int stage = done.stage + warp;
        unsigned char* own_smem = shared.b[stage < STAGES ? stage : stage - STAGES] + index * OWN_SLABS * STEP_SLAB;
        fa::bar_sync(2 + index, 128);
#pragma unroll
        for (int two = 0; two < OWN_SLABS; two += 2) {
            float part[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) part[i] = sum_reg[32 * two + i];
            fa::store_rows<scalar>(own_smem + two * STEP_SLAB, STEP_SLAB, part, factors);
        }
        fa::fence_proxy_async_shared();
        __syncwarp();
        if (fa::lane_id() == 0 && rows.first + 16 * warp < end) {
#pragma unroll
            for (int slab = 0; slab < OWN_SLABS; ++slab)
                fa::tma_store_4d(&out_map, own_smem + slab * STEP_SLAB, 64 * (OWN_SLABS * index + slab), rows.first + 16 * warp, head,
                                 rows.batch);
            fa::bulk_commit();
        }
    }
    __device__ __forceinline__ void release_store() {
        fa::bulk_wait_read<0>();
        __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
#pragma unroll
        for (int piece = 0; piece < PIECES_B; ++piece) give_b();
    }
    __device__ __forceinline__ void run() {
        if constexpr (Of::joined && HasSum) return run_joined();
        while (take_work()) {
            if constexpr (HasSum) {
                if (left > 0) {
                    first_scores();
                    walk();
                    fa::wgmma_wait<0>(sum_reg);
                } else {
                    release_x();
                    for (int piece = 0; piece < PIECES_B; ++piece, ring.next())
                        fa::mbarrier_wait_parity(&shared.b_full[ring.stage], ring.parity);
                }
                store(rows), release_store();
            } else
                while (left > 0) first_scores(), make_operand();
        }
    }
    // Works are short, and each has a tile: the scores of the next one's first run while the sum leaves.
    __device__ __forceinline__ void run_joined() {
        Rows before = {};
        while (take_work()) {
            issue_scores<true>();
            fa::wgmma_wait<PIECES_A>(sum_reg);
            if (before.count > 0) store(before);
            fa::wgmma_wait<0>(score_reg);
            release_scores(0);
            if (before.count > 0) release_store();
            walk();
            before = rows;
        }
        fa::wgmma_wait<0>(sum_reg);
        store(before), release_store();
    }
};

// A block's producer and consumers.
template <class Of, int Rank, bool HasSum> __device__ __forceinline__ void run(Shared& shared, const fa::Args& args, const Maps& maps) {
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) Producer<Of, HasSum, Copies::x>{shared, args, maps}.run();
        if (threadIdx.x == 32) Producer<Of, HasSum, Copies::a>{shared, args, maps}.run();
        if (threadIdx.x == 64) Producer<Of, HasSum, Copies::b>{shared, args, maps}.run();
        if (threadIdx.x == 96) Producer<Of, HasSum, Copies::other_b>{shared, args, maps}.run();
        __syncwarp();
    } else {
        fa::setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer<Of, Rank, HasSum>{shared, args, maps.out, fa::warpgroup_index() - 1}.run();
    }
}
__device__ __forceinline__ Shared& begin() {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        fa::mbarrier_init(&shared.x_full, 1), fa::mbarrier_init(&shared.x_empty, 8);
        fa::mbarrier_init_ring(shared.a_full, shared.a_empty, 8);  // each warp
        fa::mbarrier_init_ring(shared.b_full, shared.b_empty, 8, 2);  // two threads fill it
        for (int i = 0; i < 2; ++i) fa::mbarrier_init(&shared.sent_full[i], 1), fa::mbarrier_init(&shared.sent_empty[i], 4);
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();
    return shared;
}

// Launch 1, 16 queries a block: delta and logsumexp of each tile of queries, side by side. logsumexp is +inf where P must be 0: for a query
// beyond seq_q, or one that sees no key and has -inf.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    if constexpr (fa::has_mask) Seen::make(args);
    const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8, head = blockIdx.y, batch = blockIdx.z;
    const float delta = fa::delta_of<scalar, HEAD_DIM>(args, batch, head, query, lane);
    if (lane > 0) return;
    const float lse = query < args.seq_q ? *fa::row_pointer<float>(args.logsumexp, batch, head, query) : -fa::infinity();
    float* to = Queries::stats(args, Queries::number(args, batch, head, query / ROWS)) + query % ROWS;
    to[0] = lse == -fa::infinity() ? fa::infinity() : lse * fa::log2e;
    to[ROWS] = delta;
}

// Launch 2.
extern "C" __global__ void __launch_bounds__(128) list(const __grid_constant__ fa::Args args) {
    if constexpr (fa::has_mask) Lists::make(args);
}

// Launch 3: dV and dK.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    of_keys(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap k_map, const __grid_constant__ fa::TensorMap v_map,
            const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap d_o_map,
            const __grid_constant__ fa::TensorMap q_steps_map, const __grid_constant__ fa::TensorMap d_o_steps_map,
            const __grid_constant__ fa::TensorMap stats_map, const __grid_constant__ fa::TensorMap dk_map,
            const __grid_constant__ fa::TensorMap dv_map) {
    Shared& shared = begin();
    if (rank() == 0) run<OfKeys, 0, true>(shared, args, {k_map, q_map, d_o_steps_map, stats_map, dv_map});
    else run<OfKeys, 1, true>(shared, args, {v_map, d_o_map, q_steps_map, stats_map, dk_map});
    fa::cluster_sync();  // the other block arrives at this one's barriers until its end
}

// Launch 4: dQ.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    of_queries(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
               const __grid_constant__ fa::TensorMap d_o_map, const __grid_constant__ fa::TensorMap k_map,
               const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap k_steps_map,
               const __grid_constant__ fa::TensorMap dq_map) {
    Shared& shared = begin();
    if (rank() == 0) run<OfQueries, 0, false>(shared, args, {q_map, k_map, k_map, k_map, dq_map});
    else run<OfQueries, 1, true>(shared, args, {d_o_map, v_map, k_steps_map, k_map, dq_map});
    fa::cluster_sync();
}

// Launch 5.
extern "C" __global__ void __launch_bounds__(1024) dsinks(const __grid_constant__ fa::Args args) { Queries::dsinks(args); }
