// /// kernel
// title = "a row tile a block, a square patch a thread"
// dtypes = ["float32"]
// head_dims = [64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [tile]
// BLOCK_Q = 64                     # queries of a block: 16 rows of threads, four queries each
// BLOCK_K = "64 if HEAD_DIM == 64 and shared_optin >= 98304 else 32"  # keys of a tile
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = "16 * (BLOCK_Q // 4)"    # 16 threads share a row of patches
// shared = "4 * (BLOCK_Q * (HEAD_DIM + 4 + BLOCK_K + 4) + BLOCK_K * (2 * HEAD_DIM + 4))"
// ///
//
// Step 06. The loops of step 05: a block owns a tile of queries of a head and meets all the keys, O, m and l stay in registers. What
// changes is the piece of the two products that one thread makes. In step 05 it is a strip, 8 queries x 2 keys. A strip is
// uneconomical. To multiply r queries with n keys at one d takes r + n numbers from shared memory and yields r * n products, so
// for the same work the square wants the least, and the larger the square the better:
//
//     step 04    1 x 4     5 numbers for  4 products          step 05    8 x 2    10 numbers for 16 products
//     here       4 x 4     8 numbers for 16 products          step 07    8 x 8    16 numbers for 64 products
//
// The block is two-dimensional, 16 x 16 threads, over 64 queries x 64 keys. Thread (x, y) makes the patch of queries 4 y … 4 y + 3
// and keys x, x + 16, x + 32, x + 48; then, of the same queries, 4 columns of O. (At head dim 128: 2 keys, 8 columns.)
// Half a warp shares its queries, so a row's maximum and sum are shuffles among 16 lanes, and P passes through shared memory
// within the warp.
//
// The other half of the economy is the width of a load. A thread needs four numbers of each row that lie side by side, so it asks for
// 16 bytes at once: 8 load instructions now feed 64 multiplications where step 05 spends 16 on as many, and an instruction not
// spent on loading is one spent on multiplying. In the scores "side by side" is along d, for Q and K alike. In P V it is along the
// keys for P, and along the columns for V.
//
// 16 bytes a lane are 512 a warp, and shared memory moves 128 a cycle. So such a load is served in four parts, eight lanes each, and
// conflicts are a matter of those eight: they should touch eight different groups of four banks, or the same address. V is read
// along its rows, 32 neighbouring numbers: no conflict. K is read across its rows, at one d of eight neighbouring keys. With
// rows of 64 numbers, a multiple of the 32 banks, all eight would lie in one group, so the rows are four numbers longer: one
// group further from key to key. Of Q and P the eight lanes of a part read one address.
//
// A block of 64 queries rather than 32 also halves how often K and V are brought from the L2 cache, and the instructions that
// bring them. In step 05 those are four for every five multiplications.
//
// What is still bad:
//   - A tile is brought a number at a time, with some 25 instructions each for addresses and edges, and all warps of the block
//     wait until it is there. Only another block on the multiprocessor has something to multiply meanwhile.
//   - 4 x 4 is small: in the machine code of the two loops a sixth and a fifth of the instructions are not multiplications.
//   - The four numbers that pad each row are bought with shared memory, and limit how many blocks fit.
//   - Under the causal mask the tiles on the diagonal are computed whole, and the masking is done in all the tiles, needed or not.
#include <fa/row.cuh>
#include <fa/warp.cuh>

constexpr int width = 16, rows = 4;     // the block is 16 threads wide; rows: a thread's, of the Q tile
constexpr int threads = width * BLOCK_Q / rows;
constexpr int keys = BLOCK_K / width;   // of a tile, a thread's: x, x + 16, ...
constexpr int columns = HEAD_DIM / width;  // of O, a thread's: four neighbours from 4 x, four from 4 x + 64, ...

// Rows are four numbers longer than they need be. 16-byte loads are served eight lanes at a time; eight neighbouring rows then lie
// in eight different groups of four banks.
constexpr int pitch = HEAD_DIM + 4, p_pitch = BLOCK_K + 4;

static_assert(BLOCK_Q % 8 == 0 && BLOCK_K % 16 == 0, "whole warps and whole patches");

// The 2: as many blocks shall fit a multiprocessor, whose registers are 65536.
extern "C" __global__ void __launch_bounds__(threads, 2) forward(const __grid_constant__ fa::Args args) {
    int x = threadIdx.x % width, y = threadIdx.x / width;
    int head = blockIdx.y, batch = blockIdx.z, kv_head = fa::kv_head_of(args, head);
    int q_first = blockIdx.x * BLOCK_Q, row_first = q_first + y * rows;

    float* q_smem = fa::dynamic_shared<float>();  // [BLOCK_Q][pitch]
    float* k_smem = q_smem + BLOCK_Q * pitch;     // [BLOCK_K][pitch]
    float* v_smem = k_smem + BLOCK_K * pitch;     // [BLOCK_K][HEAD_DIM]
    float* p_smem = v_smem + BLOCK_K * HEAD_DIM;  // [BLOCK_Q][p_pitch]
    const float* q_rows = q_smem + y * rows * pitch;  // [rows][pitch], this thread's
    float* p_rows = p_smem + y * rows * p_pitch;      // [rows][p_pitch], those of the 16 threads of this y

    const float* q = fa::row_pointer<const float>(args.Q, batch, head, q_first);  // [BLOCK_Q], Q.row apart
    fa::load_rows<BLOCK_Q, HEAD_DIM, pitch, threads>(q_smem, q, args.Q.row, q_first, args.seq_q, args.head_dim, threadIdx.x);

    float m_reg[rows], l_reg[rows] = {}, o_reg[rows][columns] = {};
#pragma unroll
    for (int r = 0; r < rows; ++r) m_reg[r] = -fa::infinity();

    // Tiles that no row of the block sees are not visited. The bound is the block's, not the warp's: all meet at the barriers.
    int last_query = min(q_first + BLOCK_Q, args.seq_q) - 1;
    for (int k_first = 0; k_first < fa::visible_keys(args, last_query); k_first += BLOCK_K) {
        const float* k = fa::row_pointer<const float>(args.K, batch, kv_head, k_first);  // [BLOCK_K], K.row apart
        const float* v = fa::row_pointer<const float>(args.V, batch, kv_head, k_first);  // [BLOCK_K], V.row apart
        __syncthreads();  // no warp reads the tile before any more
        fa::load_rows<BLOCK_K, HEAD_DIM, pitch, threads>(k_smem, k, args.K.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        fa::load_rows<BLOCK_K, HEAD_DIM, HEAD_DIM, threads>(v_smem, v, args.V.row, k_first, args.seq_kv, args.head_dim, threadIdx.x);
        __syncthreads();  // the tile, and before the first one q_smem, is there for all

        // A patch of the scores: 4 queries x `keys` keys, four d at a time.
        float s_reg[rows][keys] = {};
#pragma unroll 2
        for (int d = 0; d < HEAD_DIM; d += 4) {
            fa::Vec<float, 4> q_reg[rows];
#pragma unroll
            for (int r = 0; r < rows; ++r) q_reg[r] = fa::load_vec<4>(q_rows + r * pitch + d);
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                fa::Vec<float, 4> k_reg = fa::load_vec<4>(k_smem + (x + width * n) * pitch + d);
#pragma unroll
                for (int r = 0; r < rows; ++r)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s_reg[r][n] += q_reg[r][i] * k_reg[i];
            }
        }

        float factor_reg[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            int visible = fa::visible_keys(args, row_first + r) - k_first;  // of this tile
            float largest = -fa::infinity();
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                s_reg[r][n] = x + width * n < visible ? float(args.scale) * s_reg[r][n] : -fa::infinity();
                largest = max(largest, s_reg[r][n]);
            }
            float m_new = max(m_reg[r], fa::group_max<width>(largest));
            // A row that has seen no key yet has m = -inf, and -inf - -inf is NaN. Against 0 its terms are exp(-inf) = 0.
            float shift = m_new == -fa::infinity() ? 0.0f : m_new;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < keys; ++n) {
                float p = fa::exp(s_reg[r][n] - shift);
                p_rows[r * p_pitch + x + width * n] = p;
                sum += p;
            }
            factor_reg[r] = fa::exp(m_reg[r] - shift);
            l_reg[r] = l_reg[r] * factor_reg[r] + fa::group_sum<width>(sum);
            m_reg[r] = m_new;
        }
        __syncwarp();  // the 16 threads of a y are in one warp; they now read each other's p

        // A patch of the output: 4 queries x `columns` columns, four keys at a time. The tile's terms are summed by themselves and
        // then added to o, as in step 05.
        float tile_reg[rows][columns] = {};
#pragma unroll 1
        for (int key = 0; key < BLOCK_K; key += 4) {
            fa::Vec<float, 4> p_reg[rows];
#pragma unroll
            for (int r = 0; r < rows; ++r) p_reg[r] = fa::load_vec<4>(p_rows + r * p_pitch + key);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < columns; c += 4) {
                    fa::Vec<float, 4> v_reg = fa::load_vec<4>(v_smem + (key + i) * HEAD_DIM + 4 * x + width * c);
#pragma unroll
                    for (int r = 0; r < rows; ++r)
#pragma unroll
                        for (int j = 0; j < 4; ++j) tile_reg[r][c + j] += p_reg[r][i] * v_reg[j];
                }
        }
#pragma unroll
        for (int r = 0; r < rows; ++r)
#pragma unroll
            for (int c = 0; c < columns; ++c) o_reg[r][c] = o_reg[r][c] * factor_reg[r] + tile_reg[r][c];
    }

#pragma unroll
    for (int r = 0; r < rows; ++r) {
        int query = row_first + r;
        if (query >= args.seq_q) break;
        float inverse = l_reg[r] > 0 ? 1 / l_reg[r] : 0.0f;  // no visible key: O is 0, and m + log(l) is -inf
        float* o = fa::row_pointer<float>(args.O, batch, head, query);  // [head_dim]
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            fa::Vec<float, 4> o_out;
#pragma unroll
            for (int j = 0; j < 4; ++j) o_out[j] = o_reg[r][c + j] * inverse;
            fa::store_128_upto(o + 4 * x + width * c, o_out, args.head_dim - 4 * x - width * c);
        }
        if (x == 0) *fa::row_pointer<float>(args.logsumexp, batch, head, query) = m_reg[r] + fa::log(l_reg[r]);
    }
}
