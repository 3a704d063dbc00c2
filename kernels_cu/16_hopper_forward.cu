// /// kernel
// title = "Hopper: TMA, wgmma and warp specialisation"
// dtypes = ["float16", "bfloat16"]
// head_dims = [64, 128, 256]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// arithmetic = "p16"
// [tile]
// CONSUMERS = "3 if HEAD_DIM == 64 else 2"  # warpgroups of 64 queries
// BLOCK_K = "80 if HEAD_DIM == 256 else 128"
// STAGES = 2
// Q_STAGES = "1 if HEAD_DIM == 256 else 2"
// PIN = "HEAD_DIM == 64"
// LAZY = 0
// SECTION = "max(1, (32 << 20) // (4 * HEAD_DIM * seq_kv)) * (heads_q // heads_kv)"  # heads whose K and V stay in the L2 cache
// PINGPONG = 0
// [workspace.counters]
// dtype = "float32"
// size = "2"
// init = "zero_once"
// [tensor_map.q]
// tensor = "Q"
// box = [64, "64 * CONSUMERS", 1, 1]
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
// box = [64, 64, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "forward"
// grid = "min(sms, ceil_div(seq_q, 64 * CONSUMERS) * heads_q * batch)"
// block = "128 * (CONSUMERS + 1)"
// shared = "2 * HEAD_DIM * (Q_STAGES * 64 * CONSUMERS + 2 * STAGES * BLOCK_K) + 8 * (Q_STAGES * (3 + CONSUMERS) + 4 * STAGES)"
// ///
#include <fa/fragment.cuh>
#include <fa/tma.cuh>
#include <fa/wgmma.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SLABS = HEAD_DIM / 64;                                // a tile lies in slabs of 64 columns, 128 bytes: the swizzle's width
constexpr uint32_t Q_SLAB = BLOCK_Q * 128, K_SLAB = BLOCK_K * 128;  // bytes
constexpr uint32_t Q_TILE = SLABS * Q_SLAB, K_TILE = SLABS * K_SLAB;
constexpr int SCORES = BLOCK_K / 2, OUTPUTS = HEAD_DIM / 2;  // registers of a thread: 64 x BLOCK_K and 64 x HEAD_DIM over 128 threads
template <class T> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<fa::bfloat16> = true;
constexpr bool NO_MAXIMUM = !LAZY && is_bfloat16<scalar>;
constexpr float LIMIT = 1073741824.0f;  // 2^30
constexpr float SLACK = 8;

// One tile of queries of one head
struct Work {
    int q_first, head, batch, tiles;  // tiles of keys, at least one
};

// How many keys the queries before q_end see, and in how many tiles; at least one
__device__ __forceinline__ int keys_before(const fa::Args& args, int q_end) {
    return max(1, fa::visible_keys(args, min(q_end, args.seq_q) - 1));
}
__device__ __forceinline__ int key_tiles(int keys) { return (keys + BLOCK_K - 1) / BLOCK_K; }

__device__ __forceinline__ Work work_of(const fa::Args& args, int number) {
    const int q_tiles = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q;
    int q_tile, flat;
#if CAUSAL
    const int section = number / (q_tiles * SECTION), inside = number - section * q_tiles * SECTION;
    const int width = min(SECTION, args.heads_q * args.batch - section * SECTION);
    q_tile = q_tiles - 1 - inside / width;
    flat = section * SECTION + inside % width;
#else
    flat = number / q_tiles;
    q_tile = number - flat * q_tiles;
#endif
    Work work;
    work.q_first = q_tile * BLOCK_Q;
    work.batch = flat / args.heads_q;
    work.head = flat - work.batch * args.heads_q;
    work.tiles = key_tiles(keys_before(args, work.q_first + BLOCK_Q));
    return work;
}

// A ring of stages
template <int N> struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == N) stage = 0, phase ^= 1;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    unsigned char* q_smem = fa::dynamic_shared_1024();           // [Q_STAGES][SLABS][BLOCK_Q][64]
    unsigned char* k_smem = q_smem + Q_STAGES * Q_TILE;          // [STAGES][SLABS][BLOCK_K][64]
    unsigned char* v_smem = k_smem + STAGES * K_TILE;            // [STAGES][SLABS][BLOCK_K][64]
    uint64_t* q_full = reinterpret_cast<uint64_t*>(v_smem + STAGES * K_TILE);
    uint64_t *q_empty = q_full + Q_STAGES, *k_full = q_empty + Q_STAGES, *k_empty = k_full + STAGES, *v_full = k_empty + STAGES,
             *v_empty = v_full + STAGES;
    uint64_t* o_full = v_empty + STAGES;  // [Q_STAGES][CONSUMERS]
    int* numbers = reinterpret_cast<int*>(o_full + Q_STAGES * CONSUMERS);  // of the work whose Q is in a stage; -1: none is left

    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; ++i) fa::mbarrier_init(q_full + i, 1), fa::mbarrier_init(q_empty + i, CONSUMERS);
        for (int i = 0; i < STAGES; ++i) {
            fa::mbarrier_init(k_full + i, 1), fa::mbarrier_init(k_empty + i, 4 * CONSUMERS);
            fa::mbarrier_init(v_full + i, 1), fa::mbarrier_init(v_empty + i, 4 * CONSUMERS);
        }
        for (int i = 0; i < Q_STAGES * CONSUMERS; ++i) fa::mbarrier_init(o_full + i, 4);
        fa::mbarrier_init_fence();
    }
    __syncthreads();

    const int warpgroup = fa::warpgroup_index();
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;
    if (warpgroup == 0) {
        fa::setmaxnreg_dec<CONSUMERS == 2 ? 40 : 32>();
        if (threadIdx.x == 0) {
            int* counters = static_cast<int*>(args.workspace[WORKSPACE_COUNTERS]);
            const int all = (args.seq_q + BLOCK_Q - 1) / BLOCK_Q * args.heads_q * args.batch;
            int number = blockIdx.x;
            while (true) {
                fa::mbarrier_wait_parity(q_empty + q.stage, q.phase ^ 1);
                numbers[q.stage] = number < all ? number : -1;
                if (number >= all) break;
                fa::mbarrier_arrive_expect_tx(q_full + q.stage, Q_TILE);
                const Work work = work_of(args, number);
                const int kv_head = fa::kv_head_of(args, work.head);
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    fa::tma_load_4d(q_smem + q.stage * Q_TILE + slab * Q_SLAB, &q_map, q_full + q.stage, 64 * slab, work.q_first, work.head,
                                    work.batch);
                q.next();
                number = gridDim.x + atomicAdd(counters, 1);
                for (int n = 0; n < work.tiles; ++n) {
                    fa::mbarrier_wait_parity(k_empty + k.stage, k.phase ^ 1);
                    fa::mbarrier_arrive_expect_tx(k_full + k.stage, K_TILE);
#pragma unroll
                    for (int slab = 0; slab < SLABS; ++slab)
                        fa::tma_load_4d(k_smem + k.stage * K_TILE + slab * K_SLAB, &k_map, k_full + k.stage, 64 * slab, n * BLOCK_K, kv_head,
                                        work.batch);
                    k.next();
                    fa::mbarrier_wait_parity(v_empty + v.stage, v.phase ^ 1);
                    fa::mbarrier_arrive_expect_tx(v_full + v.stage, K_TILE);
#pragma unroll
                    for (int slab = 0; slab < SLABS; ++slab)
                        fa::tma_load_4d(v_smem + v.stage * K_TILE + slab * K_SLAB, &v_map, v_full + v.stage, 64 * slab, n * BLOCK_K, kv_head,
                                        work.batch);
                    v.next();
                }
            }
            fa::mbarrier_arrive(q_full + q.stage);
            // The last block to finish leaves the counters as it found them
            if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = 0, counters[1] = 0;
        } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= CONSUMERS) {
            // Stores O for a consumer, which need not wait until its tile is free again
            const int consumer = threadIdx.x / 32 - 1;
            while (true) {
                fa::mbarrier_wait_parity(q_full + q.stage, q.phase);
                const int number = numbers[q.stage];
                if (number < 0) break;
                const Work work = work_of(args, number);
                fa::mbarrier_wait_parity(o_full + q.stage * CONSUMERS + consumer, q.phase);
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    fa::tma_store_4d(&o_map, q_smem + q.stage * Q_TILE + slab * Q_SLAB + consumer * 64 * 128, 64 * slab,
                                     work.q_first + 64 * consumer, work.head, work.batch);
                fa::bulk_commit();
                fa::bulk_wait_read<0>();
                fa::mbarrier_arrive(q_empty + q.stage);
                q.next();
            }
        }
        return;
    }

    // A consumer
    fa::setmaxnreg_inc<CONSUMERS == 2 ? 232 : 160>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float scale_log2e = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;
    float score_reg[SCORES], out_reg[OUTPUTS];
    uint32_t p_reg[BLOCK_K / 16][4];
    float row_max[2], row_sum[2];  // row_max: scaled, in powers of two
    Work work;
    int row, my_tiles;  // row: of this thread; it has row + 8 too

    auto release = [&](uint64_t* empty) {
        if (lane == 0) fa::mbarrier_arrive(empty);
    };
    auto my_q = [&]() { return q_smem + q.stage * Q_TILE + consumer * 64 * 128; };
    auto take = [&]() {
        fa::mbarrier_wait_parity(q_full + q.stage, q.phase);
        const int number = numbers[q.stage];
        if (number < 0) return false;
        work = work_of(args, number);
        row = work.q_first + 64 * consumer + 16 * warp + lane / 4;
        my_tiles = key_tiles(keys_before(args, work.q_first + 64 * consumer + 64));
        if (args.scale <= 0) {
            for (int slab = 0; slab < SLABS; ++slab)
                for (int at = threadIdx.x % 128; at < 64 * 32; at += 128) {
                    uint32_t& pair = reinterpret_cast<uint32_t*>(my_q() + slab * Q_SLAB)[at];
                    pair = args.scale < 0 ? pair ^ 0x80008000u : 0u;
                }
            fa::fence_proxy_async_shared();
            fa::bar_sync(1 + consumer, 128);
        }
        return true;
    };
    auto multiply_qk = [&]() {
        const uint64_t q_desc = fa::smem_descriptor_k_major(my_q());
        const uint64_t k_desc = fa::smem_descriptor_k_major(k_smem + k.stage * K_TILE);
        fa::mbarrier_wait_parity(k_full + k.stage, k.phase);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_desc, step / 4 * Q_SLAB + step % 4 * 32),
                                 fa::descriptor_advance(k_desc, step / 4 * K_SLAB + step % 4 * 32), step > 0);
        fa::wgmma_commit();
    };
    auto multiply_pv = [&](bool accumulate) {
        const uint64_t v_desc = fa::smem_descriptor_mn_major(v_smem + v.stage * K_TILE, K_SLAB);
        fa::mbarrier_wait_parity(v_full + v.stage, v.phase);
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            fa::wgmma_rs<scalar, true>(out_reg, p_reg[step], fa::descriptor_advance(v_desc, step * 2048), accumulate || step > 0);
        fa::wgmma_commit();
    };
    auto mask = [&](int n) {
        const int k_first = n * BLOCK_K;
        if (k_first + BLOCK_K <= fa::visible_keys(args, work.q_first + 64 * consumer)) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Of columns 8 j + e the thread sees j < count[e]: bits of a word, which one instruction turns into predicates
            const int visible = max(0, fa::visible_keys(args, row + 8 * half) - k_first - lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t seen = uint32_t((1ull << min(32, (visible + 7 - e) / 8)) - 1);
#pragma unroll
                for (int j = 0; j < BLOCK_K / 8; ++j)
                    if (!(seen >> j & 1)) score_reg[4 * j + 2 * half + e] = -fa::infinity();
            }
        }
    };
    // The row maximum of the tile
    auto tile_max = [&](float (&maximum)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            maximum[half] = max(score_reg[2 * half], score_reg[2 * half + 1]);
#pragma unroll
            for (int j = 1; j < BLOCK_K / 8; ++j)
                maximum[half] = max(maximum[half], max(score_reg[4 * j + 2 * half], score_reg[4 * j + 2 * half + 1]));
        }
    };
    auto exponentiate = [&](float (&sum)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float s = 0;
#pragma unroll
            for (int j = 0; j < BLOCK_K / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = score_reg[4 * j + 2 * half + e];
                    x = fa::exp2_approx(x * scale_log2e - row_max[half]);
                    s += x;
                }
            sum[half] = s;
        }
    };
    auto pack = [&]() {
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
#pragma unroll
            for (int r = 0; r < 4; ++r) p_reg[step][r] = fa::pack<scalar>(score_reg[8 * step + 2 * r], score_reg[8 * step + 2 * r + 1]);
    };
    // The first tile of keys fixes the reference of the exponentials
    auto first_softmax = [&]() {
        mask(0);
        float maximum[2];
        tile_max(maximum);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float m = fa::group_max<4>(maximum[half]) * scale_log2e;
            row_max[half] = m == -fa::infinity() ? 0.0f : m;
        }
        exponentiate(row_sum);
    };
    auto raise = [&](float (&factor)[2], const float (&maximum)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float m = max(row_max[half], fa::group_max<4>(maximum[half]) * scale_log2e);
            factor[half] = fa::exp2_approx(row_max[half] - m);
            row_max[half] = m;
            row_sum[half] *= factor[half];
        }
    };
    auto recompute = [&]() {
        const uint32_t q_lane = fa::lane_of_a<64>(fa::smem_u32(my_q()), 16 * warp);
        const uint32_t k_lane = fa::lane_of_b<64>(fa::smem_u32(k_smem + k.stage * K_TILE));
        float s[BLOCK_K / 8][4] = {};
#pragma unroll 1
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll 1
            for (int step = 0; step < 4; ++step) {
                uint32_t a[4], b[4];
                fa::ldmatrix_x4(a, fa::step_16<64>(q_lane, step) + slab * Q_SLAB);
#pragma unroll
                for (int j = 0; j < BLOCK_K / 16; ++j) {
                    fa::ldmatrix_x4(b, fa::step_16<64>(k_lane, step) + slab * K_SLAB + j * 2048);
                    fa::mma_m16n8<scalar>(s[2 * j], a, b[0], b[1]);
                    fa::mma_m16n8<scalar>(s[2 * j + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
        for (int j = 0; j < BLOCK_K / 2; ++j) score_reg[j] = s[j / 4][j % 4];
    };
    auto rescale = [&](const float (&factor)[2]) {
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j) out_reg[j] *= factor[j / 2 % 2];
    };
    // Ping-pong: the products of the warpgroups take turns
    auto turn_begin = [&]() {
        if (PINGPONG) fa::bar_sync(4 + consumer, 256);
    };
    auto turn_end = [&]() {
        if (PINGPONG) fa::bar_arrive(4 + (consumer + 1) % CONSUMERS, 256);
    };

    // Tile n: its scores, beside them the product of the tile before; its probabilities
    auto advance = [&](int n) {
        turn_begin();
        multiply_qk();
        multiply_pv(n > 1);
        turn_end();
        fa::wgmma_wait<1>(score_reg);
        mask(n);
        float sum[2], maximum[2], factor[2] = {1, 1};
        if constexpr (NO_MAXIMUM) {
            exponentiate(sum);
            if (PIN) fa::schedule_fence();
            fa::wgmma_wait<0>(out_reg, p_reg);
            release(v_empty + v.stage);
            if (__builtin_expect(__any_sync(fa::full_warp, !(max(sum[0], sum[1]) <= LIMIT)), 0)) {  // the reference was too small
                recompute();
                mask(n);
                tile_max(maximum);
                raise(factor, maximum);
                exponentiate(sum);
                rescale(factor);
            }
        } else {
            tile_max(maximum);
            bool grows = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) grows |= maximum[half] * scale_log2e - row_max[half] > SLACK;
            grows = __any_sync(fa::full_warp, grows);
            if (grows) raise(factor, maximum);
            exponentiate(sum);
            if (PIN) fa::schedule_fence();
            fa::wgmma_wait<0>(out_reg, p_reg);
            release(v_empty + v.stage);
            if (grows) rescale(factor);
        }
        v.next();
        release(k_empty + k.stage);
        k.next();
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        pack();
    };

    if (PINGPONG && consumer == CONSUMERS - 1) turn_end();
    while (take()) {
        turn_begin();
        multiply_qk();
        turn_end();
        fa::wgmma_wait<0>(score_reg);
        first_softmax();
        release(k_empty + k.stage);
        k.next();
        pack();
        for (int n = 1; n < my_tiles; ++n) advance(n);
        multiply_pv(my_tiles > 1);
        fa::wgmma_wait<0>(out_reg, p_reg);
        release(v_empty + v.stage);
        v.next();
        for (int n = my_tiles; n < work.tiles; ++n) {  // tiles that only later warpgroups need
            turn_begin();
            turn_end();
            fa::mbarrier_wait_parity(k_full + k.stage, k.phase);
            release(k_empty + k.stage);
            k.next();
            fa::mbarrier_wait_parity(v_full + v.stage, v.phase);
            release(v_empty + v.stage);
            v.next();
        }

        // Epilogue
        float* logsumexp = fa::row_pointer<float>(args.logsumexp, work.batch, work.head, 0);
        unsigned char* out_smem = my_q();
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = fa::group_sum<4>(row_sum[half]);
            inverse[half] = sum == 0 ? 0.0f : 1.0f / sum;
            if (lane % 4 == 0 && row + 8 * half < args.seq_q)
                logsumexp[row + 8 * half] = sum == 0 ? -fa::infinity() : row_max[half] * fa::ln2 + fa::log(sum);
        }
#pragma unroll
        for (int j = 0; j < OUTPUTS / 4; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t at = j / 8 * Q_SLAB + fa::chunk_at<64>(16 * warp + 8 * half + lane / 4, j % 8) + lane % 4 * 4;
                *reinterpret_cast<uint32_t*>(out_smem + at) =
                    fa::pack<scalar>(out_reg[4 * j + 2 * half] * inverse[half], out_reg[4 * j + 2 * half + 1] * inverse[half]);
            }
        fa::fence_proxy_async_shared();
        __syncwarp();
        release(o_full + q.stage * CONSUMERS + consumer);
        q.next();
    }
}
