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
// mask = true
// score = true
// sinks = true
// window = true
// head_dim_v = true
// arithmetic = "p16"
// spill_bytes_allowed = 8  # of the producer of divided works with a score; none in a consumer's loop
// runtime = ["SECTION", "PARTS"]
// [tile]
// BLOCKS = 1    # that a multiprocessor runs at the same time; 2, or 3 at head dim 64: of one consumer each
// CONSUMERS = "1 if BLOCKS > 1 else 3 if HEAD_DIM == 64 else 2"  # warpgroups of 64 queries
// BLOCK_K = "keys_v if slim else keys_3 if three else 64 if narrow else keys"
// STAGES = "2 if HEAD_DIM > 64 else 4 if BLOCKS == 1 else 3"  # tiles of K, and of V, in shared memory
// Q_STAGES = "1 if HEAD_DIM == 256 else 2"
// K_FIRST = "1 if HEAD_DIM == 256 else 0"  # the next tile of queries is loaded behind its first tile of keys
// PINGPONG = 1  # the products of the consumers take turns
// PIN = 1       # the exponentials stay before the wait for O
// SECTION = "16 if HEAD_DIM <= 128 else 32"  # MB of K and V of the heads that run at the same time, under the causal mask
// SPLITS = 1    # parts of the keys that the longest works have, where works are few or those of the last round are
// MERGE = 0     # 1: PARTS of the keys, as many as there is room for, which a launch of its own merges
// PACK = 1      # query heads of a key head that share a tile of queries: a power of two
// MAXIMUM = 0   # 1: a row maximum for every tile
// PARTS = "SPLITS"
// [let]
// COLUMNS = "max(64, round_up(head_dim, step))"  # of the head that the products compute
// COLUMNS_V = "max(64, round_up(head_dim_v, step))"  # of V and O
// step = "16 if HEAD_DIM == 128 else 32"
// columns = "max(COLUMNS, COLUMNS_V)"
// slim = "HEAD_DIM == 256 and COLUMNS_V <= 128"  # half of the accumulators of O, and smaller tiles of V
// keys_v = "96 if COLUMNS > 192 else 112 if mask or window else 128"
// q_rows = "64 // PACK if group % PACK == 0 else 0"  # queries of each head in the 64 rows of a consumer
// group = "heads_q // heads_kv"
// widest = "8 if group % 8 == 0 else 4 if group % 4 == 0 else 2 if group % 2 == 0 else 1"  # the largest PACK
// waves_ns = "query_waves(units, CONSUMERS * q_rows, BLOCK_K, at_once, tile_ns, 600, PACK)"
// tail_ns = "part_waves(units, CONSUMERS * 64, BLOCK_K, at_once, tile_ns, SPLITS, 5000)"  # a part takes 5 us more
// blocks_ns = "query_waves(units, 64, of_block, batch * heads_q, 560 + 35 * of_block // 8, 400)"  # as tails.csv has it
// of_block = "64 if narrow else 128"  # keys
// works_1 = "q_tiles * heads_q * batch"  # of one head each
// at_once = "max(1, SECTION * 262144 // (HEAD_DIM * seq_kv)) * group"  # query heads
// tile_ns = "1600 if HEAD_DIM == 256 else 460 * CONSUMERS if HEAD_DIM == 64 else of_128_ns"  # a tile of keys
// of_128_ns = "1240 if three else 1400"
// bytes_ns = "elements * (1945 if HEAD_DIM == 256 else narrow_ns) // 1000000"  # of Q and O
// narrow_ns = "1070 if HEAD_DIM == 128 else 640"
// percent = "100 if PACK == 1 else 109 if HEAD_DIM == 256 else 106"  # what the prediction has to promise
// elements = "batch * heads_q * seq_q * HEAD_DIM"
// narrow = "BLOCKS == 3 or HEAD_DIM == 256"  # what registers or shared memory hold
// even = "ceil_div(heads_kv * batch, ceil_div(heads_kv * batch, most))"  # key heads of sections that are alike
// most = "max(1, 8388608 // ((COLUMNS + COLUMNS_V) * seq_kv))"  # key heads of 16 MB
// three = "HEAD_DIM == 128 and CONSUMERS == 3"
// pair = "HEAD_DIM == 128 and BLOCKS == 2"  # whose shared memory holds 80 keys
// keys = "80 if pair else keys_2"
// keys_2 = "96 if (mask or window) and HEAD_DIM == 64 else 128"
// keys_3 = "112 if columns == 80 else 96 if columns == 96 else 64"  # for which three have registers
// units = "BLOCKS * sms"  # blocks that run at the same time
// blocks = "units if HEAD_DIM == 64 else sms"  # that read K and V at the speed of memory
// few = "2 * works_2 <= 3 * sms if causal else seq_q > 128 and rounds_2 == rounds_3 <= 3"
// fewer = "128 < seq_q <= 192 or not causal and 3 * rounds_3 < 2 * rounds_2"  # rounds of three consumers
// longer = "rounds_2 > 5 and full_3 if causal else 4 * rounds_3 <= 3 * rounds_2"  # three consumers have rounds to save
// late = "rounds_2 > 8 and full_3"
// full_3 = "15 * ceil_div(seq_q, 192) <= 11 * ceil_div(seq_q, 128)"  # their tiles have at most a tenth more rows
// works_2 = "ceil_div(seq_q, 128) * heads_q * batch"  # of two consumers
// fewest = "min(works_1, works_2)"  # where three consumers are taken, of these
// rounds_2 = "ceil_div(works_2, sms)"  # over the multiprocessors
// rounds_3 = "ceil_div(ceil_div(seq_q, 192) * heads_q * batch, sms)"
// works = "ceil_div(seq_q, q_rows * CONSUMERS) * (heads_q // PACK) * batch"
// divided = "0 if SPLITS == 1 and not MERGE else works if all else works % units"  # of these, the first
// all = "MERGE or works <= units"
// q_bytes = "2 * round_up(columns, 64) * Q_STAGES * 64 * CONSUMERS"  # of shared memory: O lies there in the end
// kv_bytes = "2 * (round_up(COLUMNS, 64) + round_up(COLUMNS_V, 64)) * STAGES * BLOCK_K"
// barriers = "7 * Q_STAGES * CONSUMERS + 4 * STAGES"
// plain = "not (mask or score or window)"  # but for the causal mask
// alike = "not (mask or placed or window)"  # all tiles of keys, but for the causal mask
// tail = "not causal and seq_kv >= 4096 and sms < works_1 <= 16 * sms and half"  # of many works at most half of the last round
// half = "0 < 2 * (works_1 % sms) <= sms"
// listed = "mask or placed"  # the tiles of keys that are seen (fa/key_lists.cuh): one list for all batches, heads, or for each
// OF_BATCH = "mask_of_batch"
// OF_HEAD = "mask_of_head"
// decoding = "(few_rows or some_rows) and plain"  # few works of many keys
// few_rows = "seq_q <= 64 and seq_kv >= 1024 and 3 * packed <= 2 * sms"
// some_rows = "seq_kv >= long and (HEAD_DIM == 64 and rows_64 or HEAD_DIM == 128 and rows_128)"
// long = "2048 if 4 * packed <= sms else 4096"
// rows_64 = "seq_q <= 512 and 3 * packed <= 2 * sms"
// rows_128 = "seq_q <= 128 and 4 * packed <= sms"
// packed = "ceil_div(seq_q * widest, rows) * (heads_q // widest) * batch"  # works of PACK heads
// rows = "128 if HEAD_DIM == 256 else 64"
// lists = "listed * (batch if OF_BATCH else 1) * (heads_q if OF_HEAD else 1)"
// q_tiles = "ceil_div(seq_q, 64 * CONSUMERS)"
// [[choice]]
// when = "decoding"
// BLOCKS = "1 if HEAD_DIM == 256 else 2"
// SPLITS = 1
// MERGE = 1
// PACK = "widest"
// PARTS = "max(2, min(blocks // works, ceil_div(seq_kv, 4 * BLOCK_K)))"
// evidence = "experiments/decode/forms.txt: B1 H32/8 Skv32768 D128 S8 3068 GB/s for 1439, S16 3037 for 1444; D256 S16 2475 for 1129; mixed/worst.txt: D64 S128 2.4, D128 S128 1.28 of SPLITS"
// [[choice]]
// when = "HEAD_DIM == 64 and 0 < window <= 384"
// BLOCKS = 3
// evidence = "experiments/hopper/window.txt: B2 H128 window 127 S2048 1.34 of one block, S4096 1.25, S8192 1.20; of window 1024 0.95; between is not measured"
// [[choice]]
// when = "HEAD_DIM == 64 and few"
// BLOCKS = 2
// evidence = "experiments/hopper/tails.csv: B1 H9/3 S2048 causal 1.25 of three consumers; of two: B1 H14/2 S1024 1.14, B4 H12 S1024 1.04"
// [[choice]]
// when = "HEAD_DIM == 64 and seq_q <= (1024 if causal else 128)"
// BLOCKS = [3, 2]
// cost = "blocks_ns * (100 if BLOCKS == 3 else 110)"  # as much is behind what is predicted at S512
// evidence = "experiments/hopper/tails.csv: causal S512 and S1024 1.08 and 1.05 of two consumers at 16k tokens, S128 1.05 of three; two blocks where their rounds are fewer: B10 H14 S159 Skv512 1.02 in two runs of mixed, 1.21 predicted"
// [[choice]]
// when = "HEAD_DIM == 128 and (seq_q <= 64 or 256 < seq_q <= 320)"
// BLOCKS = 2
// evidence = "experiments/hopper/tails.csv: S264 causal 1.08; 64 queries and fewer are not measured"
// [[choice]]
// when = "HEAD_DIM == 128 and BLOCKS == 1 and 2 * works_2 > sms and fewer"
// CONSUMERS = 3
// evidence = "experiments/hopper/tails.csv: S169 1.23, B1 H12/2 S1536 1.30"
// [[choice]]
// when = "COLUMNS == 80 >= COLUMNS_V and BLOCKS == 1 and longer"
// CONSUMERS = 3
// evidence = "experiments/hopper/between/forward.txt: D72 S18339 1.17 of two, S4096 1.10, S1151 1.01; D80 S2048 1.13, S1500 causal 1.02 and 1.00"
// [[choice]]
// when = "COLUMNS == 96 >= COLUMNS_V and BLOCKS == 1 and causal and late"
// CONSUMERS = 3
// evidence = "experiments/hopper/between/forward.txt: causal B5 H32 S2015 1.05 of two, B2 S2048 0.99; S4096 without a mask 0.97"
// [[choice]]
// when = "HEAD_DIM == 256 and seq_kv > 1024 and plain and not slim"
// BLOCK_K = 80
// evidence = "not measured: no record has 80 keys beside 64"
// [[choice]]
// when = "HEAD_DIM == 64 and score and alike and BLOCKS == 1 and tail"
// SPLITS = 2
// evidence = "experiments/hopper/softcap.txt: B2 H16 S8192 has 10.4 rounds of works, which take 11: 1.03 of undivided, 1.02 later"
// [[choice]]
// when = "HEAD_DIM >= 128 and 2 * fewest <= sms and seq_kv >= 1024 and plain"
// SPLITS = "max(2, min(4, sms // fewest)) if seq_kv > 4 * seq_q else 3 if causal else 2"
// evidence = "experiments/hopper/tails.csv: B1 H4/1 S2048 causal D128 1.43, D256 1.62; S256 Skv2706 4 for 3 (mixed/costs.txt); three consumers S181 Skv3656 1.83, full 1.76 (mixed/worst.txt)"
// [[choice]]
// when = "HEAD_DIM <= 128 and causal and seq_kv >= 8192"
// SECTION = 32
// evidence = "experiments/hopper/history.csv: S16384 D128 674 TFLOP/s for 656, D64 547 for 538; S4096 584 for 592; 8192 not measured"
// [[choice]]
// when = "causal and rounds_2 <= (8 if HEAD_DIM == 64 else 5)"
// SECTION = 64
// evidence = "experiments/hopper/tails.csv: all heads at once, B1 H20 S2048 D128 1.29, B16 H12 S512 D64 1.03"
// [[choice]]
// when = "causal and COLUMNS < HEAD_DIM == 128 > COLUMNS_V"
// SECTION = "ceil_div(even * 512 * seq_kv, 1048576)"
// evidence = "experiments/hopper/between/forward.txt: causal D96 4 x 16 heads 1.13 of 3 x 21 and 1; D80 S1500 34 + 34 + 34 + 26 1.08 of 6 x 21 and 2"
// [[choice]]
// when = "HEAD_DIM == 256 and seq_kv >= 4096"
// SECTION = 64
// evidence = "experiments/hopper/history.csv: causal S4096 611 TFLOP/s for 592, S16384 688 for 669, S1024 422 for 446"
// [[choice]]
// when = "HEAD_DIM <= 128 and BLOCKS == 1 and sms < works_1 <= 6 * sms and plain"
// SPLITS = [1, 4]  # of the works of the last round
// cost = "tail_ns * (100 if SPLITS == 1 else 107)"
// evidence = "experiments/mixed/worst.txt: B1 H14/2 S3574 Skv5723 D64 causal 1.16, H36/4 S1024 Skv5284 D128 causal 1.17, S152 Skv947 0.98 at 1.06 predicted; two parts 0.94 to 1.05 of four"
// [[choice]]
// when = "SPLITS == 1 and not MERGE and widest > 1 and plain"
// PACK = [1, "widest", "min(4, widest)", "min(2, widest)"]  # of equal ones the most heads: D128 S190 8 for 4 1.05
// cost = "(waves_ns + bytes_ns) * percent"
// evidence = "experiments/mixed/worst.txt: D256 S156 1.27 of a head a tile, S524 1.11, D128 S190 1.24 of 8 heads, S277 1.30, D64 S2346 1.09; D256 S469 0.97, D128 S1797 1.00"
// [workspace.counters]
// dtype = "float32"  # two integers
// size = "2"
// init = "zero_once"
// [workspace.arrivals]
// dtype = "float32"  # an integer for each divided work and consumer
// size = "max(1, divided * CONSUMERS)"
// init = "zero_once"
// [workspace.partial]
// dtype = "float32"
// size = "divided * PARTS * CONSUMERS * 64 * (COLUMNS_V + 2)"
// init = "none"
// [workspace.lists]
// dtype = "float32"  # integers
// size = "lists * (1 + q_tiles * (2 + ceil_div(seq_kv, BLOCK_K)))"
// init = "zero_once"
// [tensor_map.q]
// tensor = "Q"
// box = [64, "q_rows", "PACK", 1]
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
// box = [64, "q_rows", "PACK", 1]
// swizzle = 128
// [[launch]]
// entry = "prepare"
// when = "listed"
// grid = ["ceil_div(q_tiles, 4)", "lists"]
// block = 128
// maps = []
// [[launch]]
// entry = "forward"
// grid = "min(BLOCKS * sms, works + divided * (PARTS - 1))"
// block = "128 * (CONSUMERS + 1)"
// shared = "q_bytes + kv_bytes + 8 * barriers + listed * 4 * STAGES"
// [[launch]]
// entry = "merge"
// when = "MERGE"
// overlaps = 1
// grid = ["COLUMNS_V // 8", "works * CONSUMERS"]
// block = 128
// maps = []
// ///
//
// Step 22, read against step 21. The tasks are divided as there. New: storers send O, a consumer stops where its mask ends, and the header
// chooses the form (consumers, blocks, parts of keys). The ideas of steps 18 to 21 are told again here, where all of them meet.
//
//     Producer     one thread starts TMA copies of whole tiles into a ring of stages. It waits until a stage is empty, consumers until it
//                  is full: two mbarriers a stage, no __syncthreads in the loop
//     Consumer     one to three warpgroups of 64 queries. wgmma takes its operands from shared memory and runs on while the warps go on
//     Storer       a thread for each consumer sends O from shared memory by TMA, so that no consumer waits for a store
//
// Persistent blocks. One on each multiprocessor takes tiles of queries, works, from a counter. The number of the next is taken with the
// last tile of keys. Taken a work ahead, as in steps 19 to 21, it keeps a long work waiting behind another: where blocks have two works
// each, that is no balance at all. While the last products of one work run, Q, K and V of the next arrive. Under the causal mask long tiles
// come first, within a section of heads (SECTION): few enough that K and V stay in the L2 cache, enough for two to four tiles a block, or
// blocks stand idle where sections meet. Each consumer's 64 queries are a piece of Q with barriers of its own: the mask ends the first
// consumer earlier, and it goes on alone. Where a head's last tile has too few queries, a consumer that has none of them computes nothing,
// and the others have the tensor cores. At head dim 256 shared memory has room for one tile of queries, through which O leaves too, so the
// next Q waits until O is stored. The next tile's first keys, whose stage is empty earlier, go ahead of it (K_FIRST).
//
// Head dims between. Tiles lie in slabs of 64 columns, and TMA fills those beyond the head with zeros, which cost no traffic but would be
// multiplied. COLUMNS is the head dim rounded up to 16, a step of K: S = Q K^T takes COLUMNS / 16 steps, and O = P V has N = COLUMNS. An
// N of 80 or 96 ends inside the second slab, where the descriptor leads as it does for 128. At head dim 96 that is 3/4 of the products,
// and 48 accumulators for 64. Beyond 128 the step is 32, so that fewer forms are compiled, and at 192 and below there are three slabs.
//
// V's own head dim (DeepSeek's 192 and 128). V and O have COLUMNS_V, Q and K COLUMNS, each with slabs of its own, and HEAD_DIM is the width
// for the larger. At 192 and 128 a consumer has 64 accumulators of O, as at head dim 128, and room for as many keys: tiles of 128.
//
// Masks and scores. A launch before this one lists the tiles of keys that each tile of queries sees (fa/key_lists.cuh), by interval
// arithmetic on the mask: a tile that is not seen is never loaded, one that all queries see is not masked. A score that knows no place, as
// a softcap, needs none. A list begins at the diagonal, so a row's reference is near its largest score also where scores fall with
// distance. Works with the longest lists come first. A score replaces scale * S in registers; those of some pairs of a thread are computed
// under the exponentials of those before. A tile that is partly hidden has a maximum, because some of its rows may have seen no key before.
//
// A softcap, C tanh(s / C), bounds its scores, so in bfloat16 P = 2^score needs no reference, while the bound is not too large. Its tanh is
// a polynomial while the tile's arguments are small. When they are not, P is larger or smaller than it can be else, and a thread's row sums
// tell: they are too large, or so small that a P below the range would count. From that tile on the work has references and a longer
// polynomial, and from one on that is beyond it, too, maxima and the tanh that is right everywhere. Of other scores with a tanh, and of that
// polynomial, the largest square tells, by a row sum that is NaN. MUFU.TANH is not exact enough: a tanh of 11 bits gives logsumexp an error
// of 6.4e-5 at 1024 keys and a cap of 50, and its budget is 5.4e-6; the polynomial's is 1.2e-6.
//
// A window (FA_WINDOW) is no mask but a second border beside the causal one: which tiles a work sees, and where a row begins and ends in a
// tile, is arithmetic, and no launch lists anything. The tiles come from the diagonal down, as in a list. Behind the first query's own tile
// all rows have seen a key, so the tile in which the window begins needs no maximum. The window ends the last consumer's keys earlier, too.
//
// Sinks (--sinks) are nothing to the loop. A sink is one more key of a row, whose V is 0, so it enters where O is divided by the row sum:
// once, behind the merge of parts. Where it is larger than all scores it is the new reference, and what the row sum and O are worth under
// it is a factor below 1, so nothing overflows. A row that sees no key has O = 0 and the sink as its logsumexp.
//
// Few works, short sequences. A tile of 64 queries costs a whole tile of 128 where half of it is empty, and a last round of the
// multiprocessors costs a whole one where it is nearly empty. BLOCKS of one consumer each share a multiprocessor: tiles of 64 queries, each
// with its own K and V. SPLITS parts of the keys: where works are at most half of the multiprocessors all are divided, of more works the
// first, as many as the last round has; each part is as long as the longest work over SPLITS. A part leaves O, the references and the row sums
// in float32 in a workspace; whoever comes last merges all of them in the order of the keys (fa/key_parts.cuh), so the bits do not depend on
// who that is. Of many parts, as few queries and a long cache have (step 29), that would be a chain of loads in one block: there merge, a
// launch of its own (MERGE), has a block for every eight columns.
//
// Grouped heads. A tile of queries has PACK heads of a key head, the same 64 / PACK queries of each one after the other: of 156 queries of 8
// heads 10 tiles of 128 rows where one head a tile has 16, and under the mask a tile ends at its last query, so the early ones see fewer
// keys. TMA fills and sends such a tile as it does one of 64 rows, by a box over queries and heads; a row knows its query and head by its
// place. Whether that is fewer tiles, and how many heads, query_waves tells.
//
// Turns (FlashAttention-3, section 3.1). Consumers issue their products one after the other, round robin: each waits at its named barrier
// (begin_turn) and arrives at the next one's when its products are issued (end_turn). A block of one consumer takes no turns.
//
// Overlap inside a consumer (FlashAttention-3, section 3.2). S(n) is issued before O += P(n - 1) V(n - 1). Products run in the order of
// issue, so S(n) is complete while O's product still runs, and the exponentials hide behind it. What concerns O waits for that product:
// where a reference has grown, O is rescaled then, and P(n) is packed then, because P(n - 1) is an operand until then. The compiler would
// move exponentials behind the wait, where nothing hides them; PIN (fa::schedule_fence) holds them. Time runs downwards, n is a tile of
// keys:
//
//     producer                      consumer (each of two or three)                    tensor cores
//     wait for K's release,         turn: wait for K(n), issue S(n) = Q K(n)^T         S(n)
//       start K(n + STAGES)           wait for V(n - 1), issue O += P(n - 1) V(n - 1)  S(n)
//                                   end of the turn; wait for S(n)                     S(n)
//                                   softmax: P(n), row sum                             O
//     wait for V's release,         wait for O; release V(n - 1)                       the other consumer's products
//       start V(n - 1 + STAGES)     rescale O where needed; release K(n); pack P(n)    the other consumer's products
//     behind the last tile: Q, K,   wait for the last O; O / row sum to Q's place;     the other consumer's products
//       V of the next work            the storer sends it; take the next work
//
// The softmax has no maximum. Online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) needs a reference m with exp2(S - m) in range;
// the row maximum is one, not the only one. bfloat16 and float32 have eight bits of exponent: P of 2^-100 or 2^30 is as exact as P of 1. So
// the first tile's row maximum is the reference of the whole row, and no later tile computes one: a maximum a score, two shuffles a row, a
// multiplication of all of O, and the wait of the first exponential for the last score are gone. The row sum, which is needed anyway, tells
// when the reference has become too small: beyond 2^30, or NaN, the warp computes the tile's scores again (mma.sync, from Q and K, still in
// shared memory), takes their maximum as its new reference and rescales. That is exact for V below 2^90 and rare in inputs of a model. The
// row sum is at least 1, because the first tile has a P of 1: the reference cannot be too large. float16 has five bits of exponent: P ends
// at 65504, so a tile is repeated beyond 2^15, and below 2^-14 P loses bits, as it does under a maximum. At head dim 256 in float16 the
// maximum stays, taken lazily as in step 13. Nothing computes S again then, so K goes back as soon as S is complete.
//
// Energy decides. The H200 runs every attention kernel at its power limit: a settled speed is watts over picojoules a FLOP. What an idea
// is worth: settled speed without it as a part of the kernel's, and pJ/FLOP more, which are known to 2 % (bfloat16, 16k tokens,
// S = 4096, not causal; experiments/hopper/ablations has the causal ones too, docs/notes what was expected; each head's last tile has
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
#include <fa/atomic.cuh>
#include <fa/key_lists.cuh>
#include <fa/key_parts.cuh>
#include <fa/key_tiles.cuh>
#include <fa/overlap.cuh>
#include <fa/sink.cuh>
#include <fa/stage.cuh>
#include <fa/tma.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int THREADS = 128 * (CONSUMERS + 1);
// Of a thread of each warpgroup, all together: what the block is launched with. The producer keeps 32 or more, consumers have the rest,
// in eights: two 232 each, three 160; one, with two others on its multiprocessor, 128.
constexpr int REGISTERS = 512 / BLOCKS / (CONSUMERS + 1) / 8 * 8 * (CONSUMERS + 1);
constexpr int CONSUMER_REGISTERS = (REGISTERS - 32) / CONSUMERS / 8 * 8;
static_assert(CONSUMERS > 1 || BLOCKS > 1, "a block of 256 threads alone has more registers than setmaxnreg gives");
// A tile lies in slabs of 64 columns: 128 bytes, the swizzle's width.
constexpr int SLABS = (COLUMNS + 63) / 64, SLABS_V = (COLUMNS_V + 63) / 64;
constexpr int SLABS_Q = SLABS > SLABS_V ? SLABS : SLABS_V;  // of a piece of Q, where O lies in the end
constexpr int PIECES = Q_STAGES * CONSUMERS;  // of Q: 64 rows, which are loaded, waited for and given back by themselves
constexpr uint32_t Q_SLAB = 64 * 128, K_SLAB = BLOCK_K * 128;  // bytes

// Of a tile's row sum, without a maximum: 2^30, and in float16, whose P ends at 65504, 2^15.
template <class T> constexpr float limit = 1073741824;
template <> constexpr float limit<fa::float16> = 32768;
// At head dim 256 in float16 the maximum stays: in bfloat16 it costs 1 % there, and K goes back earlier with it.
constexpr bool NO_MAXIMUM = !MAXIMUM && (HEAD_DIM < 256 || limit<scalar> > 32768);
constexpr float SLACK = 8;  // of lazy rescaling: P is at most 2^8
// The producer says which tiles of keys a consumer reads. Of a score that knows no place, as a softcap, all tiles are alike.
constexpr bool LISTED = fa::has_mask || fa::score_of_place;
constexpr float REFERENCE_UNIT = fa::has_sinks ? 1.0f : fa::ln2;  // of the reference behind the last tile: with sinks it is in units of e
constexpr float SCALE_UNIT = fa::has_score ? 1.0f : fa::log2e;
constexpr bool DIVIDED = SPLITS > 1 || MERGE;
constexpr bool SOFTCAP = NO_MAXIMUM && fa::capped<scalar>;  // P needs no reference while every tanh is in the quick range
static_assert(!DIVIDED || !(LISTED || fa::has_window), "parts of the keys are of tiles that follow each other");

constexpr int Q_ROWS = 64 / PACK;  // queries of each head in the 64 rows of a consumer
static_assert(PACK * Q_ROWS == 64, "PACK is a power of two");
static_assert(PACK == 1 || !(LISTED || fa::has_window), "a mask or score may be another for another head, and a window ends by queries");
using Tiles = fa::KeyTiles<CONSUMERS * Q_ROWS, BLOCK_K, PACK>;
using Lists = fa::KeyLists<CONSUMERS * 64, BLOCK_K, OF_BATCH, OF_HEAD, WORKSPACE_LISTS>;
using Work = Tiles::Work;  // tiles: 0 where there is no more work

// Of the keys of a divided work: its tiles from `begin` on. number: of all parts, splits(args) a work. parts: of this work; 1: it is not
// divided. last: whether this consumer has found all other parts done, and so has merged them; the others' O is not sent.
struct Part {
    int begin, parts, number, last;
};
__device__ __forceinline__ int splits(const fa::Args& args) { return MERGE ? args.runtime[RUNTIME_PARTS] : SPLITS; }
// How many parts a work with so many tiles of keys has: each is as long as the longest work over splits(args).
__device__ __forceinline__ int parts_of(const fa::Args& args, int tiles) {
    const int longest = (Tiles::seen(args, args.seq_q) + splits(args) - 1) / splits(args);
    return (tiles + longest - 1) / longest;
}

// The block's shared memory: tiles, and mbarriers for each: a phase of `full` ends when the tile has arrived, a phase of `empty` when all
// warps have read it.
struct Shared {
    unsigned char q[PIECES][SLABS_Q * Q_SLAB];  // each [SLABS_Q][64][64]; O in the end
    unsigned char k[STAGES][SLABS * K_SLAB], v[STAGES][SLABS_V * K_SLAB];  // each [SLABS or SLABS_V][BLOCK_K][64]
    uint64_t q_full[PIECES], q_empty[PIECES], o_full[PIECES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    Part parts[PIECES];  // of the works' keys
    Work works[PIECES];  // whose Q is there: the producer's divisions are done once
    int entries[LISTED ? STAGES : 1];  // of the list of tiles: which is in a stage of K
};

template <int N> using Ring = fa::RingPlace<N>;  // its stage and its parity are two numbers: the main loop has no instruction to spare

// Starts the copies: one thread's task.
struct Producer {
    Shared& shared;
    const fa::TensorMap &q_map, &k_map, &v_map;
    Work work = {};
    int number = blockIdx.x;  // of the work, or of the part of one
    int kv_head = 0, begin = 0, parts = 1;
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;

    // A piece for each consumer, and the work with it; where there is no more work, that alone.
    __device__ __forceinline__ void load_q() {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            const int piece = q.stage * CONSUMERS + consumer;
            fa::mbarrier_wait_parity(&shared.q_empty[piece], q.parity ^ 1);
            shared.works[piece] = work;
            if (DIVIDED) shared.parts[piece] = {begin, parts, number, !MERGE || parts == 1};
            if (work.tiles)
                fa::tma_load_tile<Q_SLAB>(shared.q[piece], q_map, shared.q_full[piece], work.q_first + Q_ROWS * consumer, work.head,
                                          work.batch);
            else fa::mbarrier_arrive(&shared.q_full[piece]);
        }
        q.next();
    }
    // The tile of keys that is the n-th of the work: with a list (fa/key_lists.cuh) its entry.
    __device__ __forceinline__ int entry(const fa::Args& args, int n) const {
        return LISTED ? Lists::all(args)[begin + n] : fa::has_window ? begin - n : begin + n;
    }
    static __device__ __forceinline__ int tile(int entry) { return LISTED ? Lists::tile_of(entry) : entry; }
    // The tile before in the stage has been released: for the first STAGES tiles a wait for the phase before the first, which passes.
    __device__ __forceinline__ void load_k(int entry) {
        fa::mbarrier_wait_parity(&shared.k_empty[k.stage], k.parity ^ 1);
        if constexpr (LISTED) shared.entries[k.stage] = entry;
        fa::tma_load_tile<K_SLAB>(shared.k[k.stage], k_map, shared.k_full[k.stage], tile(entry) * BLOCK_K, kv_head, work.batch);
        k.next();
    }
    __device__ __forceinline__ void load_v(int entry) {
        fa::mbarrier_wait_parity(&shared.v_empty[v.stage], v.parity ^ 1);
        fa::tma_load_tile<K_SLAB>(shared.v[v.stage], v_map, shared.v_full[v.stage], tile(entry) * BLOCK_K, kv_head, work.batch);
        v.next();
    }
    // Finds the work, or the part of one, that stands behind a number. False: a part that its work is too short for.
    __device__ __forceinline__ bool find(const fa::Args& args, int divided) {
        const int each = splits(args);
        const bool whole = number >= divided * each;
        work = Tiles::of_number<2 * (HEAD_DIM + HEAD_DIM_V)>(args, whole ? number - divided * (each - 1) : number / each,
                                                             args.runtime[RUNTIME_SECTION]);
        kv_head = fa::kv_head_of(args, work.head);
        begin = 0, parts = 1;
        if constexpr (LISTED) begin = Lists::of_place(args, work.batch, work.head, work.q_first, work.tiles);
        if constexpr (fa::has_window) begin = Tiles::seen(args, work.q_first + Tiles::queries) - 1;
        if (!DIVIDED || whole) return true;
        const int tiles = work.tiles, index = number % each;
        parts = parts_of(args, tiles), begin = index * tiles / parts;
        work.tiles = (index + 1) * tiles / parts - begin;
        return index < parts;
    }
    // All works of the block: its own number first, then what the counter gives. The counter's answer takes a microsecond, in which the
    // last keys are loaded.
    __device__ __forceinline__ void load_works(const fa::Args& args, int* counters) {
        const int works = Tiles::works(args), blocks = gridDim.x;
        const int divided = !DIVIDED ? 0 : MERGE || works <= blocks ? works : works % blocks;
        while (number < works + divided * (splits(args) - 1)) {
            if (!find(args, divided)) {
                number = blocks + atomicAdd(counters, 1);
                continue;
            }
            if (!K_FIRST) load_q();
#pragma unroll 1  // the producer has few registers
            for (int n = 0; n < work.tiles; ++n) {
                load_k(entry(args, n));
                if (K_FIRST && n == 0) load_q();
                if (n == work.tiles - 1) number = blocks + atomicAdd(counters, 1);
                load_v(entry(args, n));
            }
        }
        work = {};
        load_q();
        // The last block to finish leaves the counters as it found them, for the next launch.
        fa::reset_by_last(counters, blocks);
    }
};

// Sends the O of one consumer: one thread's task. Q's piece, which holds O by then, is empty when the store has read it.
struct Storer {
    Shared& shared;
    const fa::TensorMap& o_map;
    int index;  // of the consumer
    Ring<Q_STAGES> q;

    __device__ __forceinline__ void store_works() {
        for (;; q.next()) {
            const int piece = q.stage * CONSUMERS + index;
            fa::mbarrier_wait_parity(&shared.q_full[piece], q.parity);
            const Work work = shared.works[piece];
            if (work.tiles == 0) break;
            fa::mbarrier_wait_parity(&shared.o_full[piece], q.parity);
            if (!DIVIDED || shared.parts[piece].last) {
                fa::tma_store_tile<SLABS_V, Q_SLAB>(o_map, shared.q[piece], work.q_first + Q_ROWS * index, work.head, work.batch);
                fa::bulk_commit();
                fa::bulk_wait_read<0>();
            }
            fa::mbarrier_arrive(&shared.q_empty[piece]);
        }
    }
};

// Attention of 64 queries of each work: a warpgroup's task. A thread has parts of two rows, `row` and row + 8.
struct Consumer {
    Shared& shared;
    const fa::Args& args;
    int index, warp_row = fa::warp_id() % 4 * 16;  // index: of the block's consumers
    // The largest S is the largest logit only where the scale is positive: a negative one is applied as its absolute value, and its sign in
    // Q.
    // With a score: the scale alone, for the score is in units of log2.
    float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * SCALE_UNIT;
    float score_reg[BLOCK_K / 2], out_reg[COLUMNS_V / 2];
    uint32_t p_reg[BLOCK_K / 16][4];
    float reference[2], row_sum[2];  // P = 2^(scale_log2e S - reference); reference: 0 of a softcap in its quick range
    float sum[2], factor[2];  // of one tile: the sum of its P, and what O is rescaled with where `grows`
    // Of a score. middle: P of a softcap has a reference. From the place `quick` of the walk on tiles have MiddleTanh, because a tanh was
    // beyond the quick range, and from `whole` on maxima, because keys are hidden or one was beyond MiddleTanh: whole is not before quick.
    bool grows, middle = false;
    int quick = 0, whole = 0;
    Work work;
    int first, row;  // first: of its queries; row: the thread's first: its query, with PACK its place in the 64 rows
    int tiles, begin = 0;  // tiles: those of work.tiles that its queries see, from the tile `begin` on; of a window down from it
    // With lists: tiles is whether they are any queries, begin the entry of the tile whose scores are computed
    int before = 0;  // of a window: tiles of the work that only later queries see
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;

    // Of the thread's two rows: its query, and its head behind the work's.
    __device__ __forceinline__ int query(int half) const { return PACK == 1 ? row + 8 * half : first + (row + 8 * half) % Q_ROWS; }
    __device__ __forceinline__ int head(int half) const { return PACK == 1 ? 0 : (row + 8 * half) / Q_ROWS; }
    __device__ __forceinline__ int piece() const { return q.stage * CONSUMERS + index; }
    __device__ __forceinline__ unsigned char* q_smem() const { return shared.q[piece()]; }

    // Waits for the next work and its Q; false: there is none. The mask ends the first consumers' keys earlier, and where a head's last
    // tile has too few queries a consumer has none, and no tile of keys.
    __device__ __forceinline__ bool take_work() {
        fa::mbarrier_wait_parity(&shared.q_full[piece()], q.parity);
        work = shared.works[piece()];
        if (work.tiles == 0) return false;
        first = work.q_first + Q_ROWS * index, row = (PACK == 1 ? first : 0) + warp_row + fa::fragment_row();
        tiles = first >= args.seq_q ? 0 : min(work.tiles, Tiles::seen(args, first + Q_ROWS));
        if constexpr (DIVIDED) {
            begin = shared.parts[piece()].begin;
            tiles = first >= args.seq_q ? 0 : max(0, min(work.tiles, Tiles::seen(args, first + Q_ROWS) - begin));
        }
        if constexpr (LISTED) tiles = first < args.seq_q;  // whether it has any
        if constexpr (fa::has_window) {
            const int end = Tiles::seen(args, first + Q_ROWS);
            tiles = first >= args.seq_q ? 0 : end - Tiles::first_tile(args, first);
            before = tiles == 0 ? 0 : Tiles::seen(args, work.q_first + Tiles::queries) - end, begin = end - 1;
        }
        if constexpr (fa::has_score) quick = whole = LISTED ? 0x7fffffff : fa::visible_keys(args, first) / BLOCK_K - (DIVIDED ? begin : 0);
        if (args.scale <= 0) apply_sign();
        return true;
    }
    // The tile of keys in the stage of K, which has arrived.
    __device__ __forceinline__ void read_entry() { begin = shared.entries[k.stage]; }
    __device__ __forceinline__ int entry() const { return begin; }
    __device__ __forceinline__ int sees() const { return Lists::sees_of(entry(), index); }
    // Passes over the tiles before the first of its own; over all where it has none.
    __device__ __forceinline__ void skip_before() {
        for (;;) {
            fa::mbarrier_wait_parity(&shared.k_full[k.stage], k.parity);
            read_entry();
            if (Lists::begins(entry(), index)) break;
            skip_tile();
            if (Lists::ends(entry())) break;
        }
    }
    // Of what the exponential takes: a score has been given the scale.
    __device__ __forceinline__ float exponent_scale() const { return fa::has_score ? 1.0f : scale_log2e; }
    __device__ __forceinline__ void apply_sign() {
        for (int slab = 0; slab < SLABS; ++slab)
            for (int i = threadIdx.x % 128; i < 64 * 32; i += 128) {
                uint32_t& two = reinterpret_cast<uint32_t*>(q_smem() + slab * Q_SLAB)[i];
                two = args.scale < 0 ? two ^ 0x80008000u : 0u;
            }
        fa::fence_proxy_async_shared();
        fa::bar_sync(1 + index, 128);
    }

    // Starts S = Q K(n)^T.
    __device__ __forceinline__ void issue_scores() {
        const uint64_t q_operand = fa::smem_descriptor_k_major(q_smem());
        const uint64_t k_operand = fa::smem_descriptor_k_major(shared.k[k.stage]);
        fa::mbarrier_wait_parity(&shared.k_full[k.stage], k.parity);
        if constexpr (LISTED) read_entry();
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_operand, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    }
    // Starts O += P V(n); a work's first one begins O.
    __device__ __forceinline__ void issue_output(int n) {
        const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.v[v.stage], K_SLAB);
        fa::mbarrier_wait_parity(&shared.v_full[v.stage], v.parity);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_rs<scalar, true>(out_reg, p_reg[step], fa::descriptor_advance(v_operand, step * 2048), n > 0 || step > 0);
        fa::wgmma_commit();
    }
    __device__ __forceinline__ void wait_scores() { fa::wgmma_wait<1>(score_reg); }  // O's product still runs
    __device__ __forceinline__ void wait_first_scores() { fa::wgmma_wait<0>(score_reg); }
    __device__ __forceinline__ void wait_output() { fa::wgmma_wait<0>(out_reg, p_reg); }

    // This warp has read tile n. Its products are complete; the producer waits for all warps.
    __device__ __forceinline__ void release_k() {
        if constexpr (LISTED) __syncwarp();  // all lanes have read the stage's entry
        fa::release_stage(shared.k_empty, k);
    }
    __device__ __forceinline__ void release_v() { fa::release_stage(shared.v_empty, v); }
    // O lies in Q's shared memory. Without tiles it does not, and the storer sends nothing that exists, but gives the piece back.
    __device__ __forceinline__ void release_o() {
        if (fa::lane_id() == 0) fa::mbarrier_arrive(&shared.o_full[piece()]);
    }

    // Consumers issue products in turn: a named barrier each, at which it waits for its turn and the one before passes it on.
    __device__ __forceinline__ void begin_turn() {
        if (PINGPONG && CONSUMERS > 1) fa::bar_sync(4 + index, 256);
    }
    __device__ __forceinline__ void end_turn() {
        if (PINGPONG && CONSUMERS > 1) fa::bar_arrive(4 + (index + 1) % CONSUMERS, 256);
    }

    // Of a window: whether some of its queries do not see all of tile n, and whether it is the first that some of them see.
    __device__ __forceinline__ bool is_cut(int n) const {
        const int key = (begin - n) * BLOCK_K;
        return key + BLOCK_K > fa::visible_keys(args, first) || key < fa::first_key(args, first + Q_ROWS - 1);
    }
    __device__ __forceinline__ bool is_first(int n) const { return (begin - n + 1) * BLOCK_K >= fa::visible_keys(args, first); }

    // Scores are those of the problem, and -inf for keys that a query does not see. Where a tanh was beyond its range, the tiles to come have
    // another one.
    __device__ __forceinline__ void mask(int n) {
        const int key = tile(n) * BLOCK_K;
        if constexpr (fa::has_score) {
            const fa::Reach reach = fa::apply_score(score_reg, args, work.batch, work.head, row, key, scale_log2e);
            if (reach != fa::reach_quick) refer();
            if (reach == fa::reach_whole) whole = 0;
        }
        if constexpr (LISTED) {
            if (sees() == fa::sees_all) return;
            if constexpr (fa::has_mask) fa::hide_scores(score_reg, args, work.batch, work.head, row, key);
            return fa::mask_scores(score_reg, args, row, key);
        }
        if constexpr (fa::has_window) {
            if (!is_cut(n)) return;
            const int begins[2] = {fa::first_key(args, query(0)) - key, fa::first_key(args, query(1)) - key};
            const int ends[2] = {fa::visible_keys(args, query(0)) - key, fa::visible_keys(args, query(1)) - key};
            return fa::keep_columns(score_reg, begins, ends, -fa::infinity());
        }
        if (key + BLOCK_K <= fa::visible_keys(args, first)) return;
        const int visible[2] = {fa::visible_keys(args, query(0)) - key, fa::visible_keys(args, query(1)) - key};
        fa::mask_columns(score_reg, visible);
    }
    // The tile of keys of a place of the walk.
    __device__ __forceinline__ int tile(int n) const {
        return LISTED ? Lists::tile_of(entry()) : fa::has_window ? begin - n : DIVIDED ? n + begin : n;
    }
    // The first tile of a work: its row maximum is the reference.
    __device__ __forceinline__ void first_softmax() {
        reference[0] = reference[1] = 0, row_sum[0] = row_sum[1] = 1, middle = false;
        mask(0);
        if (!SOFTCAP || middle) fa::first_reference<LISTED || fa::has_window>(reference, score_reg, exponent_scale());
        fa::exponentiate(score_reg, row_sum, exponent_scale(), reference);
    }
    // The work has MiddleTanh from here on, and that of a softcap references, which are 0 yet: a row that has seen no key has none.
    __device__ __forceinline__ void refer() {
        if (SOFTCAP && !middle) fa::forget_unseen(reference, row_sum);
        middle = true, quick = 0;
    }
    // Of the tile whose scores are computed. With a window, a mask or a score of the problem's own one whose rows may not have seen a key
    // before has a maximum too, and so have all tiles behind one that a tanh was too large for: computed twice they would cost more. from:
    // `whole`, or `quick` to ask whether a tile has a maximum or MiddleTanh.
    __device__ __forceinline__ bool has_maximum(int n, int from) const {
        if (!NO_MAXIMUM || (fa::has_score && (!LISTED || fa::has_tanh) && n >= from)) return true;
        return LISTED ? sees() != fa::sees_all : fa::has_window && is_first(n);
    }
    // Of a score without a maximum. The row sum is NaN where a tanh is outside of its range.
    template <class Tanh> __device__ __forceinline__ void exponentiate_scores(int n) {
        constexpr bool LATER = HEAD_DIM == 128,  // in smaller groups, summed later: the units wait less for each other
            REFERRED = !SOFTCAP || Tanh::end > fa::QuickTanh::end;
        const bool wrong = fa::exponentiate_scores<LATER ? 4 : 8, LATER, REFERRED, Tanh>(score_reg, sum, args, work.batch, work.head, row,
                                                                                         tile(n) * BLOCK_K, scale_log2e, reference);
        if (REFERRED && wrong) sum[0] = __uint_as_float(0x7fffffffu);
    }
    // S of tile n becomes P, while O's product runs. With a maximum: step 13's online softmax, which rescales lazily.
    __device__ __forceinline__ void softmax(int n) {
        grows = false;
        if (fa::has_score && !has_maximum(n, quick)) exponentiate_scores<fa::QuickTanh>(n);
        else if (fa::has_tanh && !has_maximum(n, whole)) exponentiate_scores<fa::MiddleTanh>(n);
        else {
            mask(n);
            if ((!SOFTCAP || middle) && has_maximum(n, whole)) {
                float maximum[2];
                fa::local_row_max(maximum, score_reg);
                grows = max(maximum[0] * exponent_scale() - reference[0], maximum[1] * exponent_scale() - reference[1]) > SLACK;
                grows = __any_sync(fa::full_warp, grows);
                if (grows) fa::raise_reference(reference, row_sum, factor, maximum, exponent_scale());
            }
            fa::exponentiate(score_reg, sum, exponent_scale(), reference);
        }
        if (PIN) fa::schedule_fence();
    }
    // Without a maximum: where a row sum says that the reference of tile n was too small, or that a tanh was beyond its range, the warp computes
    // the tile's scores again. O is rescaled behind the same branch: a tile jumps once.
    __device__ __forceinline__ void check_sum(int n) {
        if (SOFTCAP && !has_maximum(n, quick)) grows = !fa::all_quick<BLOCK_K / 4>(sum);
        else if (has_maximum(n, whole)) return rescale();
        else grows = !(max(sum[0], sum[1]) <= limit<scalar>) || sum[0] != sum[0] || sum[1] != sum[1];
        grows = __any_sync(fa::full_warp, grows);
        if (!grows) return;
        fa::multiply_abt_again<scalar, SLABS>(score_reg, fa::smem_u32(q_smem()) + warp_row * 128, Q_SLAB, fa::smem_u32(shared.k[k.stage]),
                                              K_SLAB);
        __syncwarp();  // all lanes have read K when the first one releases it
        mask(n);
        if (SOFTCAP) refer();  // also where a sum was small
        fa::raise_to_largest(reference, row_sum, factor, score_reg, exponent_scale());
        fa::exponentiate(score_reg, sum, exponent_scale(), reference);
        fa::scale_rows(out_reg, factor);
    }
    // O's product is complete: O is rescaled where a reference has been raised.
    __device__ __forceinline__ void rescale() {
        if (grows) fa::scale_rows(out_reg, factor);
    }
    __device__ __forceinline__ void add_sum() { row_sum[0] += sum[0], row_sum[1] += sum[1]; }
    __device__ __forceinline__ void pack() { fa::pack_operand<scalar>(p_reg, score_reg); }
    // The sink of each row's head in its sum, which is of all parts of the keys by then.
    __device__ __forceinline__ void add_sinks(float (&inverse)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = reference[half] * fa::ln2;
            const float kept = fa::add_sink(args, work.head + head(half), top, row_sum[half]);
            inverse[half] = row_sum[half] == 0 ? 0.0f : kept / row_sum[half];
            reference[half] = top;
        }
    }
    // O / row sum to the shared memory of Q. The fence waits for stores to global memory too, so the logsumexp's come behind it.
    __device__ __forceinline__ void store() {
        float inverse[2];
        fa::finish_row_sum(row_sum, inverse);
        if constexpr (fa::has_sinks) add_sinks(inverse);
        fa::store_rows<scalar>(q_smem() + warp_row * 128, Q_SLAB, out_reg, inverse);
        fa::fence_proxy_async_shared();
        __syncwarp();
        release_o();
        float* logsumexp = fa::row_pointer<float>(args.logsumexp, work.batch, work.head, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (fa::lane_id() % 4 == 0 && query(half) < args.seq_q)
                logsumexp[query(half) + head(half) * args.logsumexp.head] =
                    row_sum[half] == 0 ? -fa::infinity() : reference[half] * REFERENCE_UNIT + fa::log(row_sum[half]);
    }
    // Of a divided work: O and its row sums go to the workspace. The consumer that comes last merges all parts, where no launch of its own
    // does. False: O is not whole.
    __device__ __forceinline__ bool merge() {
        constexpr int FLOATS = fa::part_floats<COLUMNS_V / 2>;
        const Part part = shared.parts[piece()];
        const int each = splits(args), place = part.number / each * CONSUMERS + index;
        float* parts = static_cast<float*>(args.workspace[WORKSPACE_PARTIAL]) + fa::int64_t(place) * each * FLOATS;
        fa::store_part(parts + part.number % each * FLOATS, out_reg, reference, row_sum);
        if constexpr (MERGE) {
            __syncwarp();  // all lanes have read the part when the first one gives the piece back
            return false;
        }
        fa::bar_sync(1 + index, 128);
        if (threadIdx.x % 128 == 0)
            shared.parts[piece()].last = fa::arrives_last(static_cast<int*>(args.workspace[WORKSPACE_ARRIVALS]) + place, part.parts);
        fa::bar_sync(1 + index, 128);
        const bool last = shared.parts[piece()].last;
        __syncwarp();  // all lanes have read it when the first one gives the piece back
        if (last) fa::merge_parts<SPLITS>(out_reg, reference, row_sum, parts, part.parts);
        return last;
    }
    __device__ __forceinline__ void finish() {
        if (DIVIDED ? first >= args.seq_q : tiles == 0) return release_o();
        if constexpr (DIVIDED)
            if (shared.parts[piece()].parts > 1) {
                if (tiles == 0) {  // it sees none of this part's keys
                    for (float& element : out_reg) element = 0;
                    reference[0] = reference[1] = row_sum[0] = row_sum[1] = 0;
                }
                if (!merge()) return release_o();
            }
        store();
    }
    // A tile that only other consumers need.
    __device__ __forceinline__ void skip_tile() {
        begin_turn();
        end_turn();
        fa::mbarrier_wait_parity(&shared.k_full[k.stage], k.parity);
        if constexpr (LISTED) read_entry();
        __syncwarp();  // a lane that is late would find the stage full of a later tile, and wait for ever
        release_k();
        fa::mbarrier_wait_parity(&shared.v_full[v.stage], v.parity);
        __syncwarp();
        release_v();
    }
};

extern "C" __global__ void __launch_bounds__(128) prepare(const __grid_constant__ fa::Args args) {
    if constexpr (LISTED) Lists::make(args);
}

// O and logsumexp of 64 rows of a work, eight columns a block, from the parts of its keys that `forward` has left.
extern "C" __global__ void __launch_bounds__(128) merge(const __grid_constant__ fa::Args args) {
    if (!MERGE) return;
    constexpr int FLOATS = fa::part_floats<COLUMNS_V / 2>;
    const int index = blockIdx.y % CONSUMERS, slice = blockIdx.x, each = splits(args);
    const Work work = Tiles::of_number<2 * (HEAD_DIM + HEAD_DIM_V)>(args, blockIdx.y / CONSUMERS, args.runtime[RUNTIME_SECTION]);
    const int first = work.q_first + Q_ROWS * index, parts = parts_of(args, work.tiles);
    fa::dependency_wait();
    if (parts == 1 || first >= args.seq_q) return;
    float out[4], reference[2], row_sum[2];
    const float* all = static_cast<const float*>(args.workspace[WORKSPACE_PARTIAL]) + fa::int64_t(blockIdx.y) * each * FLOATS;
    fa::merge_slice<COLUMNS_V / 2>(out, reference, row_sum, all, parts, slice);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x / 32 * 16 + fa::fragment_row() + 8 * half, query = first + row % Q_ROWS,
                  head = work.head + row / Q_ROWS;
        if (query >= args.seq_q) continue;
        float top = reference[half] * fa::ln2;
        const float kept = fa::add_sink(args, head, top, row_sum[half]), inverse = row_sum[half] == 0 ? 0.0f : 1.0f / row_sum[half] * kept;
        if (slice == 0 && fa::lane_id() % 4 == 0)
            *(fa::row_pointer<float>(args.logsumexp, work.batch, head, 0) + query) =
                row_sum[half] == 0 ? -fa::infinity() : top + fa::log(row_sum[half]);
        const int column = 8 * slice + fa::fragment_column();
        if (column >= fa::head_dim_v(args)) continue;
        scalar* to = fa::row_pointer<scalar>(args.O, work.batch, head, query) + column;
        fa::store_vec<2>(to,
                         fa::Vec<scalar, 2>{fa::narrow<scalar>(out[2 * half] * inverse), fa::narrow<scalar>(out[2 * half + 1] * inverse)});
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        for (int i = 0; i < PIECES; ++i)
            fa::mbarrier_init(&shared.q_full[i], 1), fa::mbarrier_init(&shared.o_full[i], 4), fa::mbarrier_init(&shared.q_empty[i], 1);
        for (int i = 0; i < STAGES; ++i) fa::mbarrier_init(&shared.k_full[i], 1), fa::mbarrier_init(&shared.v_full[i], 1);
        for (int i = 0; i < STAGES; ++i)  // each warp of each consumer arrives
            fa::mbarrier_init(&shared.k_empty[i], 4 * CONSUMERS), fa::mbarrier_init(&shared.v_empty[i], 4 * CONSUMERS);
        fa::mbarrier_init_fence();
    }
    __syncthreads();
    if (MERGE) fa::launch_dependents();  // merge's blocks begin where there is room, and wait

    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<REGISTERS - CONSUMERS * CONSUMER_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) {
            Producer producer{shared, q_map, k_map, v_map};
            producer.load_works(args, static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]));
        } else if (threadIdx.x % 32 == 0 && warp <= CONSUMERS) {
            Storer storer{shared, o_map, warp - 1};
            storer.store_works();
        }
        return;
    }
    fa::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer consumer{shared, args, fa::warpgroup_index() - 1};

    if (consumer.index == CONSUMERS - 1) consumer.end_turn();  // the first turn is consumer 0's
    while (consumer.take_work()) {
        if constexpr (LISTED) consumer.skip_before();
        for (int n = 0; n < consumer.before; ++n) consumer.skip_tile();
        if (consumer.tiles > 0) {
            // Prologue: S(0) = Q K(0)^T
            consumer.begin_turn();
            consumer.issue_scores();
            consumer.end_turn();
            consumer.wait_first_scores();
            consumer.first_softmax();
            consumer.release_k();
            consumer.pack();

            // Main loop over tiles of keys
            int n = 1;  // tiles whose scores are computed
            for (; LISTED ? !Lists::ends(consumer.entry(), consumer.index) : n < consumer.tiles; ++n) {
                consumer.begin_turn();
                consumer.issue_scores();
                consumer.issue_output(n - 1);
                consumer.end_turn();
                consumer.wait_scores();
                if constexpr (!NO_MAXIMUM) consumer.release_k();
                consumer.softmax(n);
                consumer.wait_output();
                consumer.release_v();
                consumer.check_sum(n);
                consumer.add_sum();
                if constexpr (NO_MAXIMUM) consumer.release_k();  // check_sum may have computed S again
                consumer.pack();
            }

            // Epilogue: the last product, O / row sum and the logsumexp
            consumer.issue_output(LISTED ? n - 1 : consumer.tiles - 1);
            consumer.wait_output();
            consumer.release_v();
        }
        for (int n = consumer.before + consumer.tiles; LISTED ? !Lists::ends(consumer.entry()) : n < consumer.work.tiles; ++n)
            consumer.skip_tile();
        consumer.finish();
        consumer.q.next();
    }
}
