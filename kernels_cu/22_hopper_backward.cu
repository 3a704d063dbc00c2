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
// logsumexp_gradient = true
// mask = true
// score = true
// sinks = true
// window = true
// head_dim_v = true
// arithmetic = "p16"
// spill_bytes_allowed = 88  # of the producer and the storers, which have 24 registers, or between tiles of keys; none in a consumer's loop
// runtime = ["SPLITS", "SECTION"]
// [tile]
// BLOCK_Q = "128 if HEAD_DIM == 64 else 64"  # or 80 at head dim 128: dQ is transposed; TWIN = 0, no mask, no score
// BLOCK_K = 128  # 64 a consumer
// REGISTERS = 240  # of a consumer's thread; the producer has the rest of 504
// APART = 0  # 1: at head dim 128 two stages of K, one of V, and dV leaves through the place of dS; not with a mask or score
// KV_STAGES = "1 if HEAD_DIM == 128 and not APART else 2"  # 2: the next K and V arrive while the last products run
// AHEAD = "4 if max(COLUMNS, COLUMNS_V) <= 96 else 8"  # eighths of the exponentials that come before dP
// BACKWARDS = 0  # 1: from the last tile of queries to the first
// HEADS_INNER = 0  # 1: through all heads of the group at a tile of queries, then at the next; no mask, not deterministic
// TWIN = 0  # at head dim 128: dQ is transposed, and so many of 8 steps of K (to 5) are in registers; no mask, no score
// EAGER = 0  # 1: with TWIN (to 3) or 80 queries the next S runs behind dK
// SPLITS = 1  # of the queries of a tile of keys, where works are few: each is a work
// SPLIT = "SPLITS > 1"  # a form of its own: dK and dV leave as partial sums
// SECTION = 32  # MB of Q, dO and dQ of the heads that run at the same time, under the causal mask or deterministic
// [let]
// COLUMNS = "max(80 if HEAD_DIM == 128 else 64, round_up(head_dim, 16))"  # of the head that the products compute
// COLUMNS_V = "max(64, round_up(head_dim_v, 16))"  # of V and dO
// wide = "COLUMNS == 128 and COLUMNS_V == 128 and not mask and not score"
// few_rows = "batch * heads_q * seq_q * HEAD_DIM < 16777216"  # as long as launches count: 4M -5 %, 34M +2 % (docs/notes/22_hopper.md)
// works = "ceil_div(seq_kv, BLOCK_K) * heads_kv * batch"  # tiles of keys
// units = "132 if deterministic else sms"  # the splits of --deterministic, and its bits, are the same on every GPU
// ROUND = "sms if SPLIT and not (causal or mask or deterministic) else 0"  # works of a round; those of whole rounds are not divided
// whole = "0 if causal or mask or deterministic else works // units * units"
// divided = "max(1, works - whole)"
// most = "max(1, min(20 * units // divided, max(fives, filled)))"  # splits
// fives = "walk // (10 if causal else 5)"  # of five tiles a part, about
// filled = "min(units // divided, walk // 7)"  # of fewer, until parts fill a round
// walk = "group * ceil_div(min(seq_q, window + BLOCK_K) if window else seq_q, BLOCK_Q)"  # tiles of queries that see the first keys
// one = "max(1, min(parts, units // divided))"  # splits with which the last works are one round; two, and so on
// two = "max(1, min(parts, 2 * units // divided))"
// three = "max(1, min(parts, 3 * units // divided))"
// parts = "min(12, most)"
// group = "heads_q // heads_kv"  # query heads of each
// section = "SECTION * 131072 // (HEAD_DIM * seq_q * min(SPLITS, group))"  # key heads at a time
// recorded = "works >= 15 * units and seq_kv >= 512"  # as many works as its problems have
// brief = "HEAD_DIM == 64 and seq_q <= 1024 or seq_kv > 4 * seq_q"  # a tile of keys walks over few tiles of queries
// tile_ns = "shared_ns + traffic_ns"  # nanoseconds of a tile of the walk
// shared_ns = "2350 if HEAD_DIM == 64 else 2090 if causal else 2440 if BLOCK_Q == 80 else 2040"  # where L2 has its queries
// traffic_ns = "key_traffic(units, BLOCK_K, section, SPLITS, crowd_ns, alone_ns, spread_ns)"  # more, where it has not
// crowd_ns = "80 if HEAD_DIM == 64 else 200"
// alone_ns = "331 if HEAD_DIM == 64 else 1220"
// spread_ns = "0 if HEAD_DIM == 64 else 60 if long_walk else 11"  # 60 is more than is lost, but chooses as the GPU says (inner.txt)
// many_short = "group >= 8 and seq_q <= 1024 and 2 * works > sms"
// long_walk = "causal and group >= 4 and group * seq_q >= 14000"
// work_ns = "1650 if HEAD_DIM == 64 else 4500"  # a work besides
// split_ns = "6720 if HEAD_DIM == 64 else 13800"  # more of a work that is one of several splits
// part_ns = "work_ns + (split_ns if SPLITS > 1 else 0)"  # where all are
// tail_ns = "tail_waves(units, BLOCK_K, BLOCK_Q, SPLITS, tile_ns, work_ns, split_ns)"
// other_ns = "launch_ns + elements * (4160 if HEAD_DIM == 64 else 3370) // 1000000"  # the other launches
// launch_ns = "3610 if HEAD_DIM == 64 else 1500"
// elements = "batch * heads_q * seq_q * HEAD_DIM"  # of Q
// dq_parts = "BLOCK_Q * HEAD_DIM // 4096 * ceil_div(seq_q, BLOCK_Q)"  # of 64 x 64, of a head
// dk_parts = "BLOCK_K * HEAD_DIM // 4096 * ceil_div(seq_kv, BLOCK_K)"
// barriers = "48 * KV_STAGES + 80 + 16 * APART"  # bytes
// kv_tiles = "2 * KV_STAGES - APART"
// turns = "8 * batch * heads_q * ceil_div(seq_q, BLOCK_Q) if deterministic else 4"  # 4 for each consumer's part of a tile of dQ
// listed = "works * (group * ceil_div(seq_q, BLOCK_Q) + 2) if mask else 0"
// lists = "(2 if deterministic else 1) * listed"  # fa/seen_tiles.cuh
// [[choice]]
// when = "wide and (causal or seq_q <= 2048) and not deterministic"
// TWIN = 5
// evidence = "experiments/hopper_backward/d128.txt: causal S2048, S4096 1.02 of TWIN 3, S16384 1.03; full S1024 1.03 of none, S2048 1.01 of 80 queries; twin.txt: TWIN 3 1.05 to 1.12 of none"
// [[choice]]
// when = "wide and causal and not deterministic and seq_q * group <= 1024"
// APART = 1
// evidence = "experiments/hopper_backward/d128.txt, short_128.txt: S1024 1.03 in two runs, S512 1.03 of none, but hopper_atomic is 1.05 of it; S2048 1.01"
// [[choice]]
// when = "wide and not causal and not deterministic and seq_q > 2048"
// BLOCK_Q = 80
// EAGER = 1
// evidence = "experiments/hopper_backward/d128.txt: S4096 1.04 of 64 queries, 1.01 of TWIN 5; S16384 1.04, 1.01"
// [[choice]]
// when = "wide and causal and not deterministic and many_short"
// HEADS_INNER = 1
// evidence = "experiments/hopper_backward/inner.txt: B6 H128/8 S512 1.18, B2 H128/8 S1024 1.11; S2048 1.07, more splits 1.13"
// [[choice]]
// when = "causal and COLUMNS > 96 and not deterministic"  # up to 96 columns 0.95 to 0.97, experiments/hopper/between
// BACKWARDS = 1
// evidence = "experiments/hopper_backward/history.csv: S2048 428 TFLOP/s for 426, S4096 491 for 483, S16384 566 for 549; D64 S16384 489 for 508"
// [[choice]]
// when = "not (causal or mask or deterministic) and (HEAD_DIM == 128 or not recorded)"
// SPLITS = [1, "one", "two", "three"]
// SECTION = 32
// cost = "tail_ns + other_ns"
// evidence = "experiments/mixed/worst.txt: of all works divided S4697 1.04, S2048 0.99; of none S931 1.09, S4881 1.04, D64 S2048 1.15"
// [[choice]]
// when = "recorded and not deterministic"
// SPLITS = 1
// SECTION = "8 if window or causal and brief else 64 if BACKWARDS and seq_q > 2048 else 32"
// evidence = "experiments/mixed/cells.csv: D64 S512 causal 8 MB 1.05 times as fast as 32, S1024 1.04; S192 Skv2048 see hopper_atomic"
// [[choice]]
// when = "not deterministic"
// SPLITS = [1, "min(2, most)", "min(3, most)", "min(4, most)", "min(6, most)", "min(8, most)"]
// SECTION = [64, 8, "1024 if seq_q <= 4608 else 64", 32, "16 if HEAD_DIM == 128 and long_walk else 32"]
// cost = "key_waves(units, BLOCK_K, BLOCK_Q, section, SPLITS, tile_ns, part_ns) + other_ns"
// evidence = "hopper_backward/inner.txt: B1 H64/4 S4049 4 splits 1.15 of 2, B8 H32/4 S1758 2 1.15 of 1; experiments/mixed/costs.txt; D96 S6142 64 MB 1.07 of 1024, D64 S842 6 splits, of four tiles, 0.91 of 4, S466 4 that fill a round 1.23 of 2 (mixed/worst.txt)"
// [[choice]]
// SPLITS = [1, "min(2, most)", "min(3, most)", "min(4, most)", "min(6, most)"]
// SECTION = "16 if seq_q * HEAD_DIM <= 1048576 else 32"
// cost = "key_waves(units, BLOCK_K, BLOCK_Q, section, SPLITS, tile_ns, part_ns) + other_ns"
// evidence = "experiments/hopper_backward/history.csv: D64 S1024 +4.6 %, S4096 +2.5; D128 S1024 +7.6, S4096 0, S16384 -1.5"
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
// size = "batch * heads_q * round_up(seq_q, BLOCK_Q) * COLUMNS"
// init = "none"
// [workspace.partial]
// dtype = "float32"
// size = "2 * divided * SPLITS * BLOCK_K * HEAD_DIM if SPLIT else 4"
// init = "none"
// [workspace.turns]
// dtype = "float32"  # integers
// size = "turns + lists"
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
// grid = "min(sms, whole + (works - whole) * SPLITS)"
// block = 384
// overlaps = "few_rows"
// shared = "2 * HEAD_DIM * (kv_tiles * BLOCK_K + 6 * BLOCK_Q) + 528 * BLOCK_Q + barriers"
// [[launch]]
// entry = "convert"
// overlaps = "few_rows"
// grid = ["max(dq_parts, dk_parts) if SPLIT else dq_parts", "heads_q + (2 * heads_kv if SPLIT else 0)", "batch"]
// block = 256
// maps = []
// [[launch]]
// entry = "dsinks"
// when = "sinks"
// grid = ["heads_q"]
// block = 1024
// maps = []
// ///
//
// Step 22, backward: step 15's mathematics in the form of this step's forward pass. A producer starts TMA copies, two consumers of 64 keys
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
//     23 hopper_atomic    short sequences at head dim 128, no mask at head dim 64: dQ is added from the accumulators
//     25 hopper_keys      head dims over 128: both consumers share 64 keys, and divide queries and columns
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
// head dim 128 it gains nothing (docs/notes).
//
// Registers: at head dim 128 dK and dV are 128, S and dP 64, P 16 of 240. A product that starts from zero names its accumulators as an
// operand all the same, and the compiler would keep the last tile's dP until then, 32 registers that are not there: fa::discard tells it
// that they are dead.
//
// 64 queries x 128 keys at head dim 128 are 2560 cycles of products and, in KB of shared memory, S and dP 128, dV and dK 64, dQ 64, dS 16,
// the copies of Q and dO 32, dQ staged 64. An H200 is at its power limit, where every cycle in which the tensor cores wait is paid for by a
// higher clock, and every byte by a lower one: a byte reduced costs 80 pJ, 18 % of a launch's energy. Launch 3 reorders, scales and rounds.
// Tried, and as fast or slower: dQ before dK, dQ one tile late, consumers that take turns at the products, blocks of a head that begin at
// different queries (notes). They begin at its first: their reductions meet at the same tile, but Q and dO are read once from memory for
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
//   section has few, so that their dQ stays in the L2 cache: with 64 MB for 16, 1024 queries of head dim 64 are a fifth slower (notes).
// - A number is taken at the end of the work before. Taken at its beginning, it would begin behind others that wait for it.
//
// Nobody waits for ever: a block waits only for smaller numbers, which other blocks have taken before and are at, or come to. The smallest
// number that is not done waits for none. By blockIdx a block could wait for one that another kernel keeps from starting. A walk that
// begins at another query in each block and goes round has no such order: it needs all blocks of a head at the same time.
//
// At head dim 128 K and V of one tile have a place, so between two tiles of keys the consumers wait until dK and dV have left and the next K
// and V have come. With APART there are two places for K and one for V. The next K comes early; V's place is empty at the last dP, because
// dV leaves through the place of dS, 32 KB too. The next dS waits until it has left.
//
// With TWIN dQ^T = K^T dS^T, as FlashAttention-4 has it: dS is stored transposed by stmatrix, a quarter of the instructions, and read by rows.
// The logsumexp and delta of a thread's queries are in registers before the waits, and some steps of K are register operands of S: 4 KB of
// shared memory less each. dQ's accumulators are those of P, so the operands of P and dS lie where dP was. Launch 3 transposes dQ back.
//
// Tiles of 80 queries, as FlashAttention-4 has without a mask, read K and V a fifth less often, and have fewer waits. With EAGER the next S runs
// behind dK, while the warps stage dQ.
//
// Under the causal mask blocks take the longest tiles of keys first (the shortest with --deterministic), and mask only at the diagonal.
// Where the second consumer's keys are behind all queries of a tile there, it leaves out all but its half of dQ. Blocks that begin at the
// diagonal are at different queries all the time, as far apart as their keys. With BACKWARDS they walk from the last query to the diagonal:
// those that begin together meet at the same tiles of Q, dO and dQ, as without a mask. At head dim 128 that is 2 to 5 % faster from 4096
// queries on, at 64 it is slower (docs/notes). Where a group has several heads, a block with few tiles comes to the next head early. With
// HEADS_INNER all are at a tile of queries until the group's heads have passed it.
//
// Head dims between 64 and 128: the products are COLUMNS wide, the head dim rounded up to 16, as in the forward pass. Of dQ each consumer
// has a slab of 64 columns, of which the second is narrower: N = 32 at head dim 96. Fewer bytes are staged and reduced, too. With a branch
// around products the compiler waits for each of them, so each consumer then has code of its own.
//
// V's own head dim: V, dO and dV have COLUMNS_V. Where V is the wider one, COLUMNS is 80 at least: of dQ each consumer has a slab.
//
// A model with few key heads has few tiles of keys: 32 for 132 multiprocessors at B1, 2 key heads, S2048. Then SPLITS works share a tile.
// Each walks over a range of its tiles of queries, through all heads of the group, and leaves its dK and dV in float32, straight from the
// accumulators. Launch 3 adds them in the order of the ranges. So their bits do not depend on who is ready first. That costs 128 KB a work
// at head dim 128, written and read, so no tile of keys is divided where there are works enough. A work has its own text without splits.
//
// Without a mask all works take the same time, and of a last round of the multiprocessors most may have nothing to do. Whole rounds are not
// divided then, only what is left: its works begin when the others end, and their sums alone leave as partial ones.
//
// The launches overlap (fa/overlap.cuh). Gradients has made its barriers and asks for K, V and Q while the last blocks of prepare run; it
// waits before it reads what prepare writes, the stats and the turns. dQ, which prepare clears, is added to behind the first stats.
//
// With a mask of the problem's own (fa/score.cuh) launch 1 lists the tiles of queries that see some of a tile of keys, and what they see of
// each consumer's 64: nothing, some, all (fa/seen_tiles.cuh). Producer, consumers and storers walk over that list, so what sees nothing is
// not there for any of them. A tile that sees all needs no test. A consumer whose keys are seen by none leaves out all but its half of dQ,
// as at the diagonal. With --deterministic an entry also has the tile of keys whose turn is next: it need not be the neighbour.
//
// A window (FA_WINDOW) is a second border beside the causal one, and all forms of the causal mask are there: no list, and where a column's
// queries begin and end in a tile is two numbers. A walk ends behind the last query that sees a key; of its last tile the first consumer's
// keys may be seen by none, as the second's at the diagonal. All walks are as long, at different queries: SECTION is small.
//
// With a score of the problem's own P comes from score(scale S), and dS is multiplied by the score's derivative. P times it takes the place
// of P when P is an operand of dV, so it costs no register. A tanh is a polynomial as long as what it is of is small for all pairs of a
// warp. Else the tile runs a text of its own, which spills.
//
// With sinks P comes from a logsumexp that has them, so no product changes, and launch 4 sums their gradient from the stats.
//
// The scale has any sign: it is applied to S as it is, and to dQ and dK at the end. Queries beyond seq_q and those that see no key have a
// logsumexp of +inf, so P = 0; with sinks theirs is finite, and P is 0 by the mask alone. Keys beyond seq_kv are masked: their S is 0, and P
// might be anything.
#include <fa/accumulator.cuh>
#include <fa/query_tiles.cuh>
#include <fa/wgmma_tile.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;
using fa::Work;
using Tiles = fa::QueryTiles<BLOCK_Q, COLUMNS, WORKSPACE_STATS, WORKSPACE_DQ, COLUMNS_V>;

constexpr int THREADS = 384, STAGES = 2;
constexpr int SLABS = Tiles::slabs, SLABS_V = Tiles::slabs_v;  // a tile lies in slabs of 64 columns: 128 bytes, the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes; K_SLAB also of dS^T, in slabs of 64 queries
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB, DS_TILE = BLOCK_Q * BLOCK_K * 2, STATS = 2 * BLOCK_Q * 4;
constexpr uint32_t DO_TILE = SLABS_V * Q_SLAB, V_TILE = SLABS_V * K_SLAB;
constexpr int ROW_PARTS = Tiles::row_parts, OWN_PARTS = Tiles::parts / 2,
              PART = Tiles::dq_part;  // dQ of a tile lies in parts of 64 columns
constexpr int LAST_SLAB = (COLUMNS - 1) % 64 + 1;  // columns of the last slab
constexpr int OWN_DQ = OWN_PARTS * PART, OTHER_DQ = BLOCK_Q * COLUMNS - OWN_DQ;  // floats, of the first consumer and of the second
constexpr int STEPS = BLOCK_Q / 16, AHEAD_STEPS = STEPS * AHEAD / 8;  // of 16 queries
static_assert(BLOCK_K == 128, "a consumer has 64 keys");
constexpr bool TRANSPOSED = TWIN || BLOCK_Q == 80;  // dQ
static_assert(!(TRANSPOSED || APART) || (TWIN <= 5 && COLUMNS == 128 && COLUMNS_V == 128 && !fa::has_mask && !fa::has_score),
              "forms of head dim 128, without a mask or score");
static_assert(!EAGER || TRANSPOSED, "set TWIN or 80 queries: only there dQ lies in P's registers");
static_assert(!(HEADS_INNER && (DETERMINISTIC || fa::has_mask)), "lists and turns have the order of the heads");
constexpr bool BLENDED = AHEAD < 8;  // some exponentials run among the arithmetic of dS
using Pairs = fa::SeenPairs<BLOCK_Q / 2>;

// Descriptors of K and V stay for a tile of keys. Hoisted out of the loop they cost no instructions in it, but registers, and those are
// there only without a mask, or with EAGER. With one they would be spilled, or go back to uniform registers one by one.
constexpr bool DESCRIPTORS_HERE = (CAUSAL && !EAGER) || fa::has_mask || fa::has_score;

// With DETERMINISTIC, which tile of keys may add to a consumer's part of a tile of queries: from the first or from the last that it sees.
constexpr bool LAST_FIRST = DETERMINISTIC && !BACKWARDS;
__device__ __forceinline__ int* turn_of(const fa::Args& args, int number, int consumer) {
    return static_cast<int*>(args.workspace[WORKSPACE_TURNS]) + 8 * number + 4 * consumer;
}
// With a mask a walk is over the tiles of queries that see something, in the order that it would have without one.
using Lists = fa::SeenTiles<BLOCK_Q, BLOCK_K, bool(BACKWARDS), LAST_FIRST, WORKSPACE_TURNS>;
using Walk = fa::WalkOf<bool(BACKWARDS), Lists, bool(HEADS_INNER)>;

// Launch 1.
extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    Tiles::prepare<scalar>(args);
    if constexpr (fa::has_mask) Lists::make(args);
    const int tile = blockIdx.x * 16 / BLOCK_Q, last = (tile + 1) * BLOCK_Q - 1;
    if (DETERMINISTIC && blockIdx.x * 16 % BLOCK_Q == 0 && threadIdx.x < 2) {
        int* turn = turn_of(args, Tiles::number(args, blockIdx.z, blockIdx.y, tile), threadIdx.x);
        *turn = fa::has_mask ? Lists::first_turn(args, blockIdx.z, blockIdx.y, tile)
                : LAST_FIRST ? (fa::visible_keys(args, last) - 1) / BLOCK_K
                             : fa::first_key(args, tile * BLOCK_Q) / BLOCK_K;
    }
}

// How many works share a tile of keys. Without SPLIT it is known when this is compiled.
__device__ __forceinline__ int splits_of(const fa::Args& args) { return SPLIT ? args.runtime[RUNTIME_SPLITS] : 1; }
// With TAIL only the tiles of the last round are divided, those from `whole` on.
constexpr bool TAIL = ROUND > 0;
static_assert(!TAIL || !fa::has_mask, "lists have the same number of splits for every tile of keys");
__device__ __forceinline__ int whole_of(const fa::Args& args) {
    if constexpr (TAIL) return Tiles::works<BLOCK_K>(args) / ROUND * ROUND;
    else return -1;
}
__device__ __forceinline__ bool is_divided(const fa::Args& args, int number) { return SPLIT && (!TAIL || number >= whole_of(args)); }
__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    Work work = Tiles::work<BLOCK_K, LAST_FIRST, bool(BACKWARDS), bool(HEADS_INNER)>(args, number, args.runtime[RUNTIME_SECTION],
                                                                                     splits_of(args), whole_of(args));
    if constexpr (fa::has_mask) Lists::narrow(args, work, splits_of(args));
    return work;
}

// What a block has in shared memory.
struct Shared {
    unsigned char* k = fa::dynamic_shared_1024();  // [KV_STAGES][SLABS][BLOCK_K][64]; dK in the end
    unsigned char* v = k + KV_STAGES * K_TILE;  // [KV_STAGES][SLABS_V][BLOCK_K][64]; dV in the end
    unsigned char* q = v + (APART ? 1 : KV_STAGES) * V_TILE;  // [STAGES][SLABS][BLOCK_Q][64]
    unsigned char* d_o = q + STAGES * Q_TILE;  // [STAGES][SLABS_V][BLOCK_Q][64]
    unsigned char* ds = d_o + STAGES * DO_TILE;  // [STAGES][BLOCK_Q / 64][BLOCK_K][64]: dS^T
    unsigned char* stats = ds + STAGES * DS_TILE;  // [STAGES][2][BLOCK_Q]
    float* dq = reinterpret_cast<float*>(stats + STAGES * STATS);  // [2 consumers][8 * OWN_PARTS groups of 8 columns][128 threads][4]
    fa::Barriers<KV_STAGES>* barriers = reinterpret_cast<fa::Barriers<KV_STAGES>*>(dq + 2 * OWN_DQ);
    // With APART. v_empty: the last dP of a tile of keys is complete; ds_empty: dV has left.
    uint64_t *v_empty = reinterpret_cast<uint64_t*>(barriers + 1), *ds_empty = v_empty + 1;
    __device__ __forceinline__ void init_apart() const {
        fa::mbarrier_init(v_empty, 8), fa::mbarrier_init(ds_empty, 2);
        fa::mbarrier_init_fence();
    }
};

// One thread for each consumer: adds the staged dQ, takes and passes the turns, stores dK and dV.
struct Storer {
    const fa::Args& args;
    const Shared& smem;
    const fa::TensorMap &dk_map, &dv_map;
    int consumer;
    fa::Ring<KV_STAGES> kv{};
    uint32_t tile = 0;  // of queries, counted through
    int held = -1;  // the tile of queries whose turn has been taken last, until it is passed

    __device__ __forceinline__ fa::Barriers<KV_STAGES>& at() { return *smem.barriers; }

    __device__ __forceinline__ bool is_staged() { return fa::mbarrier_test_parity(at().dq_full + consumer, tile % 2); }
    __device__ __forceinline__ void wait_staged() { fa::mbarrier_wait_parity(at().dq_full + consumer, tile % 2); }
    // Behind it the reduction has read what is staged. `number`: the tile of queries.
    __device__ __forceinline__ void add_dq(int number) {
        const int floats = consumer == 0 ? OWN_DQ : OTHER_DQ;
        fa::bulk_add_f32(Tiles::dq(args, number) + consumer * OWN_DQ, smem.dq + consumer * OWN_DQ, floats);
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    // Behind all reductions of the tile whose turn is held; `later`: those of one tile more have begun.
    __device__ __forceinline__ void pass_turn(int mine, int after, bool later) {
        if (held < 0) return;
        if (later) fa::bulk_wait<1>();
        else fa::bulk_wait<0>();
        fa::pass_turn(turn_of(args, held, consumer), fa::has_mask ? after : LAST_FIRST ? mine - 1 : mine + 1);
        held = -1;
    }
    __device__ __forceinline__ void add_in_turns(const Work& work) {
        const int mine = work.k_first / BLOCK_K;
        int after = 0;  // with a mask: whose turn comes behind that which is held
        auto walk = Walk::numbers<Tiles>(args, work);
#pragma unroll 1
        for (int n = work.count; n > 0; --n, walk.next(work), ++tile) {
            const int number = walk.number_of(args, work);
            const int* turn = turn_of(args, number, consumer);
            if (!is_staged() || !fa::has_turn(turn, mine))
                pass_turn(mine, after, false), fa::wait_for_turn(turn, mine);  // nothing is held meanwhile
            fa::fence_proxy_async_global();
            wait_staged();
            add_dq(number);
            fa::mbarrier_arrive(at().dq_empty + consumer);
            pass_turn(mine, after, true);
            held = number;
            if constexpr (fa::has_mask) after = walk.next_turn();
        }
        pass_turn(mine, after, false);
    }
    __device__ __forceinline__ void add_at_once(const Work& work) {
        Walk walk = Walk::begin(work);
#pragma unroll 1
        for (int n = 0; n < work.count; ++n, walk.next(work), ++tile) {
            wait_staged();
            const int head = walk.query_head(work);
            add_dq(Tiles::number(args, work.batch, head, walk.queries(work)));
            fa::mbarrier_arrive(at().dq_empty + consumer);
        }
    }
    // The stage of K and V holds dK and dV in the end, and is empty when the stores have read it.
    __device__ __forceinline__ void store_gradients(const Work& work) {
        fa::mbarrier_wait_parity(at().dkv_full[kv.stage()] + consumer, kv.parity());
        const uint32_t own = consumer * 64 * 128, dk = kv.stage() * K_TILE + own;
        const unsigned char* dv_smem = (APART ? smem.ds : smem.v + kv.stage() * V_TILE) + own;
        const int row = work.k_first + 64 * consumer;
        for (int slab = 0; slab < max(SLABS, SLABS_V); ++slab) {
            if (slab < SLABS) fa::tma_store_4d(&dk_map, smem.k + dk + slab * K_SLAB, 64 * slab, row, work.kv_head, work.batch);
            if (slab < SLABS_V) fa::tma_store_4d(&dv_map, dv_smem + slab * K_SLAB, 64 * slab, row, work.kv_head, work.batch);
        }
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
    __device__ __forceinline__ void run() {
        if (DETERMINISTIC || fa::has_mask) fa::dependency_wait();  // for the turns and lists
        while (true) {
            fa::mbarrier_wait_parity(at().k_full + kv.stage(), kv.parity());
            const int number = at().numbers[kv.stage()];
            if (number < 0) break;
            Work work = work_of(args, number);
            if constexpr (DETERMINISTIC) {
                add_in_turns(work);
                work = work_of(args, at().numbers[kv.stage()]);  // again: in the loop there is no register for it
            } else add_at_once(work);
            if (!is_divided(args, number)) store_gradients(work);
            if (APART) fa::mbarrier_arrive(smem.ds_empty);
            fa::mbarrier_arrive(at().kv_empty + kv.stage());
            kv.next();
        }
    }
};

// 64 keys of the block, 16 a warp: their dK and dV, and half of each tile's dQ.
struct Consumer {
    const fa::Args& args;
    const Shared& smem;
    const int consumer, lane = fa::lane_id(), warp = fa::warp_id() % 4, own_keys = 64 * consumer;
    const float scale = float(args.scale), scale_log2e = scale * fa::log2e;
    fa::Ring<KV_STAGES> kv;
    fa::Ring<STAGES> q;  // of Q, dO, their stats, and dS
    Work work{};
    Walk walk{};  // the first tile whose dQ has not been staged
    bool is_first = true, is_last = true;  // with APART, of the tiles of queries of a tile of keys
    uint32_t k_reg[TWIN + !TWIN][4];  // of 16 columns of K each: operands of S
    fa::Vec<float, 2> stats_reg[BLOCK_Q / 8];  // of the columns of a thread
    float dk_reg[COLUMNS / 2], dv_reg[COLUMNS_V / 2], p_reg[BLOCK_Q / 2], ds_reg[BLOCK_Q / 2], dq_reg[OWN_DQ / 128];
    uint32_t p16_reg[STEPS][4], ds16_reg[STEPS][4];

    // Transposed dQ lies where P was: P's operand and dS's then lie where dP was, and nothing is moved.
    __device__ __forceinline__ auto& dq_place() {
        if constexpr (TRANSPOSED) return p_reg;
        else return dq_reg;
    }
    __device__ __forceinline__ Consumer(const fa::Args& all, const Shared& block, int number) : args(all), smem(block), consumer(number) {}
    __device__ __forceinline__ fa::Barriers<KV_STAGES>& at() { return *smem.barriers; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) fa::mbarrier_arrive(barrier);
    }

    // d = A B^T: keys of K or V, queries of a tile of Q or dO
    template <int Columns, uint32_t ATile, uint32_t BTile>
    __device__ __forceinline__ void issue_transposed(float (&d)[BLOCK_Q / 2], unsigned char* a_smem, unsigned char* b_smem) {
        const int stage = APART && a_smem == smem.v ? 0 : kv.stage();
        uint64_t a = fa::smem_descriptor_k_major(a_smem + stage * ATile + own_keys * 128);
        if (DESCRIPTORS_HERE) a = fa::descriptor_here(a);
        const uint64_t b = fa::smem_descriptor_k_major(b_smem + q.stage() * BTile);
        fa::issue_abt<scalar, Columns>(d, a, K_SLAB, b, Q_SLAB);
    }
    __device__ __forceinline__ void issue_scores() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        if constexpr (TWIN) {
            uint64_t a = fa::smem_descriptor_k_major(smem.k + kv.stage() * K_TILE + own_keys * 128);
            if (DESCRIPTORS_HERE) a = fa::descriptor_here(a);
            const uint64_t b = fa::smem_descriptor_k_major(smem.q + q.stage() * Q_TILE);
            fa::issue_abt<scalar, COLUMNS>(p_reg, k_reg, a, K_SLAB, b, Q_SLAB);
            if constexpr (TWIN) load_stats(0);
        } else issue_transposed<COLUMNS, K_TILE, Q_TILE>(p_reg, smem.k, smem.q);
    }
    __device__ __forceinline__ void load_keys() {
        const uint32_t from = fa::lane_of_a<64>(fa::smem_u32(smem.k + kv.stage() * K_TILE + own_keys * 128), 16 * warp);
#pragma unroll
        for (int step = 0; step < TWIN; ++step) fa::ldmatrix_x4(k_reg[step], fa::step_16<64>(from, step % 4) + step / 4 * K_SLAB);
    }
    // The logsumexp (0) or delta (1) of a thread's queries, long before they are used.
    __device__ __forceinline__ void load_stats(int which) {
        fa::load_columns(stats_reg, reinterpret_cast<const float*>(smem.stats + q.stage() * STATS) + which * BLOCK_Q);
    }
    __device__ __forceinline__ void issue_dp() {
        fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        issue_transposed<COLUMNS_V, V_TILE, DO_TILE>(ds_reg, smem.v, smem.d_o);
    }
    // d += P^T dO or dS^T Q
    template <uint32_t Tile, int R>
    __device__ __forceinline__ void issue_gradient(float (&d)[R], const uint32_t (&a_reg)[STEPS][4], unsigned char* b_smem,
                                                   bool accumulate) {
        const uint64_t b = fa::smem_descriptor_mn_major(b_smem + q.stage() * Tile, Q_SLAB);
        fa::issue_ab<scalar>(d, a_reg, b, accumulate);
    }
    __device__ __forceinline__ void issue_dv(bool accumulate) { issue_gradient<DO_TILE>(dv_reg, p16_reg, smem.d_o, accumulate); }
    __device__ __forceinline__ void issue_dk(bool accumulate) { issue_gradient<Q_TILE>(dk_reg, ds16_reg, smem.q, accumulate); }
    // This consumer's part of dQ = dS K: a slab of it at head dim 128, of which the second may be narrower.
    __device__ __forceinline__ void issue_dq() {
        if constexpr (TRANSPOSED) {  // dQ^T = K^T dS^T
            const uint64_t a = fa::smem_descriptor_mn_major(smem.k + kv.stage() * K_TILE + consumer * K_SLAB, K_SLAB);
            const uint64_t b = fa::smem_descriptor_k_major(smem.ds + q.stage() * DS_TILE);
            return fa::issue_atbt<scalar, BLOCK_K, false, true>(dq_place(), a, b, Q_SLAB);
        }
        const uint64_t a = fa::smem_descriptor_mn_major(smem.ds + q.stage() * DS_TILE + consumer % ROW_PARTS * K_SLAB, K_SLAB);
        const uint64_t b = fa::smem_descriptor_mn_major(smem.k + kv.stage() * K_TILE + consumer / ROW_PARTS * OWN_PARTS * K_SLAB, K_SLAB);
        if (COLUMNS % 64 == 0 || consumer == 0) fa::issue_atb<scalar, BLOCK_K>(dq_place(), a, b);
        else fa::issue_atb<scalar, BLOCK_K>(fa::first_of<LAST_SLAB / 2>(dq_place()), a, b);
    }

    // What the queries of the tile see of a consumer's keys, by its list: fa::Sees. Known to the compiler as the same in the whole warp.
    __device__ __forceinline__ int sees() {
        return fa::has_mask ? __shfl_sync(fa::full_warp, walk.sees(consumer), 0) : walk.sees(consumer);
    }
    // Whether all queries of the tile see all of a consumer's keys.
    __device__ __forceinline__ bool sees_all() {
        if constexpr (fa::has_mask) return sees() == fa::sees_all;
        if (fa::has_score && walk.queries(work) * BLOCK_Q + BLOCK_Q > args.seq_q) return false;  // its text is for positions that exist
        return work.k_first + own_keys + 64 <= fa::visible_keys(args, walk.queries(work) * BLOCK_Q) && !passes_window();
    }
    // Whether the last query of the tile no longer sees a consumer's first key, because of a window.
    __device__ __forceinline__ bool passes_window() {
        return fa::has_window && fa::first_key(args, walk.queries(work) * BLOCK_Q + BLOCK_Q - 1) > work.k_first + own_keys;
    }
    // On the diagonal of the causal mask the second 64 keys may be seen by no query of a tile: then only the other's dS counts.
    __device__ __forceinline__ bool sees_nothing() {
        return CAUSAL && fa::visible_keys(args, (work.edge + 1) * BLOCK_Q - 1) <= work.k_first + own_keys;
    }
    // The same of the first 64 keys at the other end of a window. One of several splits may end before.
    __device__ __forceinline__ bool sees_no_more() {
        return fa::has_window && !SPLIT && fa::query_end(args, work.k_first + own_keys + 63) <= (work.end - 1) * BLOCK_Q;
    }
    __device__ __forceinline__ fa::TilePlace place() {
        return {args, work.batch, walk.query_head(work), walk.queries(work) * BLOCK_Q, work.k_first + own_keys};
    }
    __device__ __forceinline__ void mask() {
        const int q_first = walk.queries(work) * BLOCK_Q, key = work.k_first + own_keys;
        if (!BLENDED && key + 64 <= fa::visible_keys(args, q_first) && !passes_window()) return;
        fa::clear_hidden(p_reg, args, q_first, key);
    }
    // Some steps of 16 queries: S becomes P, dP becomes dS and an operand.
    __device__ __forceinline__ void exponentiate(int first, int end) {
        if constexpr (TWIN) fa::exponentiate_columns(p_reg, scale_log2e, stats_reg), load_stats(1);
        else fa::exponentiate_columns(p_reg, scale_log2e, reinterpret_cast<const float*>(smem.stats + q.stage() * STATS), first, end);
    }
    // The same with a mask or score of the problem's own: a step becomes P, an operand, and P times the derivative of the score.
    template <class Tanh, bool Masked> __device__ __forceinline__ void exponentiate_pairs(const fa::TilePlace& place, const Pairs& pairs,
                                                                                          int step) {
        const float* stats = reinterpret_cast<const float*>(smem.stats + q.stage() * STATS);
        fa::exponentiate_pairs<scalar, Tanh, Masked>(p_reg, p16_reg[step], place, pairs, scale, stats, step);
    }
    template <class Tanh, bool Masked> __device__ __forceinline__ void softmax_of_pairs(const fa::TilePlace& place, const Pairs& pairs) {
#pragma unroll
        for (int step = 0; step < AHEAD_STEPS; ++step) exponentiate_pairs<Tanh, Masked>(place, pairs, step);
        if (BLENDED) fa::schedule_fence();
        fa::wgmma_wait<0>(ds_reg);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step >= AHEAD_STEPS) exponentiate_pairs<Tanh, Masked>(place, pairs, step);
            make_ds(step, step + 1);
        }
        share_ds(ds16_reg);
    }
    template <bool Masked> __device__ __forceinline__ void softmax_of_pairs() {
        const fa::TilePlace at = place();
        Pairs pairs;
        if (Masked) pairs.find(at);
        fa::wgmma_wait<1>(p_reg);
        if (fa::needs_whole_tanh(p_reg, at, scale)) softmax_of_pairs<fa::WholeTanh, Masked>(at, pairs);
        else softmax_of_pairs<fa::QuickTanh, Masked>(at, pairs);
    }
    __device__ __forceinline__ void make_ds(int first, int end) {
        const float* stats = reinterpret_cast<const float*>(smem.stats + q.stage() * STATS);
        if constexpr (TWIN) fa::score_gradient(ds_reg, p_reg, stats_reg);
        else fa::score_gradient(ds_reg, p_reg, stats + BLOCK_Q, first, end);
        fa::pack_operand<scalar>(ds16_reg, ds_reg, first, end);
    }
    // The first dS of a tile of keys lies where dV of the tile before was; where there is none, so does dV.
    __device__ __forceinline__ void wait_for_ds() {
        if (APART && is_first) fa::mbarrier_wait_parity(smem.ds_empty, kv.position % 2 ^ 1);
        is_first = false;
    }
    __device__ __forceinline__ void share_ds(const uint32_t (&operand)[STEPS][4]) {
        wait_for_ds();
        if constexpr (TRANSPOSED) fa::store_operand_transposed(smem.ds + q.stage() * DS_TILE + consumer * Q_SLAB, warp, operand);
        else fa::store_operand(smem.ds + q.stage() * DS_TILE + own_keys * 128 + warp * 16 * 128, K_SLAB, operand);
    }
    // Behind it the dS of both consumers is there, and both have read the other stage. One may come from a tile that the other skips.
    __device__ __forceinline__ void wait_for_other() {
        fa::fence_proxy_async_shared();
        fa::barrier_sync(1, 256);
    }
    // The last dP is complete: the next V may come.
    __device__ __forceinline__ void release_v() {
        if (APART && is_last) release(smem.v_empty);
    }
    // S and dP are in flight: until dS is shared. Of a tile without masked scores the last exponentials come behind the wait for dP.
    template <bool Masked> __device__ __forceinline__ void softmax() {
        constexpr int ahead = Masked ? STEPS : AHEAD_STEPS;
        fa::wgmma_wait<1>(p_reg);
        exponentiate(0, ahead);
        if constexpr (Masked) mask();
        fa::pack_operand<scalar>(p16_reg, p_reg, 0, ahead);
        if (BLENDED) fa::schedule_fence();
        fa::wgmma_wait<0>(ds_reg);
        release_v();
        if constexpr (BLENDED) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step >= ahead) exponentiate(step, step + 1), fa::pack_operand<scalar>(p16_reg, p_reg, step, step + 1);
                make_ds(step, step + 1);
            }
        } else make_ds(0, STEPS);
        share_ds(ds16_reg);
    }
    // The products are complete, and dQ goes to the storer.
    __device__ __forceinline__ void stage_dq() {
        fa::mbarrier_wait_parity(at().dq_empty + consumer, q.position % 2);  // that of the tile before has been read
        if (COLUMNS % 64 == 0 || consumer == 0) Tiles::store_parts(smem.dq + consumer * OWN_DQ, 1, dq_place());
        else Tiles::store_parts(smem.dq + consumer * OWN_DQ, 1, fa::first_of<LAST_SLAB / 2>(dq_place()));
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dq_full + consumer);
        walk.next(work);
    }
    __device__ __forceinline__ void release_queries() { release(at().q_empty + (q.stage() ^ 1)); }  // those of the tile before

    __device__ __forceinline__ void full_tile(bool accumulate) {
        if constexpr (!EAGER) issue_scores();
        issue_dp();
        if constexpr (fa::has_mask || fa::has_score) {
            if (sees_all()) softmax_of_pairs<false>();
            else softmax_of_pairs<true>();
        } else if (BLENDED && sees_all()) softmax<false>();
        else softmax<true>();
        issue_dv(accumulate);
        wait_for_other();
        issue_dq();
        fa::wgmma_wait<1>(p16_reg);
        issue_dk(accumulate);
        fa::wgmma_wait<1>(dq_place());
        q.next();
        stage_dq();
        if constexpr (!EAGER) end_tile<0>();
    }
    // Later: products of the next tile that are in flight.
    template <int Later> __device__ __forceinline__ void end_tile() {
        fa::schedule_fence();
        fa::wgmma_wait<Later>(ds16_reg, dk_reg, dv_reg);
        release_queries();
    }
    __device__ __forceinline__ void skip_tile() {
        fa::mbarrier_wait_parity(at().q_full + q.stage(), q.parity());
        fa::mbarrier_wait_parity(at().do_full + q.stage(), q.parity());
        const uint32_t zeros[STEPS][4] = {};
        share_ds(zeros);
        wait_for_other();
        issue_dq();
        q.next();
        fa::wgmma_wait<0>(dq_place());
        release_queries();
        stage_dq();
    }
    // dK and dV of one of several splits to its workspace; launch 3 adds them.
    __device__ __forceinline__ void store_partials(bool seen) {
        float* partial = Tiles::partial<BLOCK_K, WORKSPACE_PARTIAL>(args, at().numbers[kv.stage()] - max(0, whole_of(args)));
        Tiles::store_partials<BLOCK_K>(partial, consumer, consumer, BLOCK_K / 64, dk_reg, dv_reg, seen);
        fa::mbarrier_arrive(at().kv_empty + kv.stage());
    }
    // dV and dK to the shared memory of V and K, from where the storer takes them. seen: whether a query sees any of the keys.
    __device__ __forceinline__ void stage_gradients(bool seen) {
        const float factor = seen ? 1.0f : 0.0f, one[2] = {factor, factor}, scales[2] = {scale * factor, scale * factor};
        const uint32_t dk = kv.stage() * K_TILE + consumer * 64 * 128 + warp * 16 * 128;
        const uint32_t dv = (APART ? 0 : kv.stage() * V_TILE) + consumer * 64 * 128 + warp * 16 * 128;
        if (!APART) fa::store_rows<scalar>(smem.v + dv, K_SLAB, dv_reg, one);
        fa::barrier_sync(1, 256);  // the other consumer's dQ has read K and dS
        wait_for_ds();
        if (APART) fa::store_rows<scalar>(smem.ds + dv, K_SLAB, dv_reg, one);
        fa::store_rows<scalar>(smem.k + dk, K_SLAB, dk_reg, scales);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(at().dkv_full[kv.stage()] + consumer);
        fa::mbarrier_arrive(at().kv_empty + kv.stage());  // the storers arrive later; this is for racecheck, which asks it of every reader
    }
    __device__ __forceinline__ void run() {
        while (true) {
            fa::mbarrier_wait_parity(at().k_full + kv.stage(), kv.parity());
            const int number =
                __shfl_sync(fa::full_warp, at().numbers[kv.stage()], 0);  // known to the compiler as the same in the whole warp
            if (number < 0) break;
            work = work_of(args, number);
            walk = Walk::begin(work);
            if constexpr (TWIN) load_keys();
            if constexpr (fa::has_mask) {
                fa::mbarrier_wait_parity(at().v_full + kv.stage(), kv.parity());
                for (float& element : dk_reg) element = 0;  // which tile is the first, if any, were a register more
                for (float& element : dv_reg) element = 0;
                for (int n = work.count; n > 0; --n)
                    if (sees() == fa::sees_none) skip_tile();
                    else full_tile(true);
                if constexpr (SPLIT) store_partials(true);
                else stage_gradients(true);
                kv.next();
                continue;
            }
            is_first = true;
            const int unseen = work.count > 0 && sees_nothing(), no_more = work.count > 0 && sees_no_more();
            const int end = work.count - (BACKWARDS ? unseen : no_more);
            int n = BACKWARDS ? no_more : unseen;
            if (n > 0) skip_tile();
            const bool seen = n < end;
            if (seen) {  // with EAGER the next S runs behind dK, while dK's end is waited for
                if constexpr (EAGER) issue_scores();
                fa::mbarrier_wait_parity(at().v_full + kv.stage(), kv.parity());
                bool accumulate = false;
                for (; n < end - EAGER; ++n, accumulate = true) {
                    if constexpr (APART) is_last = n + 1 == end;
                    full_tile(accumulate);
                    if constexpr (EAGER) issue_scores(), end_tile<1>();
                }
                if constexpr (EAGER) is_last = true, full_tile(accumulate), end_tile<0>();
            } else {
                fa::mbarrier_wait_parity(at().v_full + kv.stage(), kv.parity());
                is_last = true, release_v();
            }
            if (end < work.count) skip_tile();
            if (is_divided(args, at().numbers[kv.stage()])) store_partials(seen);
            else stage_gradients(seen);
            kv.next();
        }
    }
};

// Launch 2. BLOCK_K keys stay; the queries that see them are streamed, of all heads that read this key head.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradients(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
              const __grid_constant__ fa::TensorMap k_map, const __grid_constant__ fa::TensorMap v_map,
              const __grid_constant__ fa::TensorMap d_o_map, const __grid_constant__ fa::TensorMap stats_map,
              const __grid_constant__ fa::TensorMap dk_map, const __grid_constant__ fa::TensorMap dv_map) {
    fa::launch_dependents();
    const Shared smem;
    if (threadIdx.x == 0) smem.barriers->init();
    if (APART && threadIdx.x == 0) smem.init_apart();
    __syncthreads();
    const int warpgroup = fa::warpgroup_index();
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<504 - 2 * REGISTERS>();
        int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
        if (fa::has_mask && threadIdx.x == 0) fa::dependency_wait();  // for the lists
        if (threadIdx.x == 0)
            Tiles::produce<BLOCK_K, Walk, KV_STAGES, APART>(args, {q_map, k_map, v_map, d_o_map, stats_map}, smem, counters, work_of,
                                                            splits_of(args), whole_of(args));
        else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) Storer{args, smem, dk_map, dv_map, int(threadIdx.x / 32) - 1}.run();
    } else {
        fa::setmaxnreg_inc<REGISTERS>();
        if (fa::has_mask) fa::dependency_wait();  // for the lists
        if (COLUMNS % 64 == 0) Consumer(args, smem, warpgroup - 1).run();
        else if (warpgroup == 1) Consumer(args, smem, 0).run();  // code of their own: the products for dQ differ in width
        else Consumer(args, smem, 1).run();
    }
}

// Launch 3.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ fa::Args args) {
    Tiles::convert<scalar, BLOCK_K, LAST_FIRST, SPLIT, WORKSPACE_PARTIAL, TRANSPOSED>(args, args.runtime[RUNTIME_SECTION], splits_of(args),
                                                                                      whole_of(args));
}

// Launch 4, of a problem with sinks.
extern "C" __global__ void __launch_bounds__(1024) dsinks(const __grid_constant__ fa::Args args) { Tiles::dsinks(args); }
