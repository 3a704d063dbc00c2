// /// kernel
// title = "Hopper at head dims up to 512 with a short window: all keys that 16 queries see are one tile"
// dtypes = ["float16", "bfloat16"]
// head_dims = [512]
// arch = "sm_90a"
// causal = true
// gqa = true
// cross = true
// logits = 4096
// deterministic = true
// window = true
// sinks = true
// variant_of = "wide_heads"
// when = "0 < window <= 177 and heads_q % (8 * heads_kv) == 0"
// auto = false
// arithmetic = "p16"
// [tile]
// KEYS = "max(32, round_up(window + 15, 16))"  # that 16 queries see
// STAGES = "min(8, (232448 - COLUMNS * 257 - 256) // (KEYS * 128))"  # slabs of K or V in shared memory
// [let]
// COLUMNS = "round_up(head_dim, 64)"  # of the head that the products compute
// works = "ceil_div(seq_q, 16) * (heads_q // 8) * batch"
// [tensor_map.q]
// tensor = "Q"
// box = [64, 16, 4, 1]
// swizzle = 128
// [tensor_map.k]
// tensor = "K"
// box = [64, "KEYS", 1, 1]
// swizzle = 128
// [tensor_map.v]
// tensor = "V"
// box = [64, "KEYS", 1, 1]
// swizzle = 128
// [tensor_map.o]
// tensor = "O"
// box = [64, 16, 1, 1]
// swizzle = 128
// [[launch]]
// entry = "forward"
// grid = "min(sms, works)"
// block = 384
// shared = "COLUMNS * 256 + COLUMNS // 2 + STAGES * (KEYS * 128 + 16)"
// ///
//
// Step 34, read against 30 (wide_heads), in whose place it runs where a window is short. DeepSeek V4 has 64 or 128 query heads of 512 columns,
// one key head, and a window of 128 keys.
//
// Step 30 has 64 queries of a head in a block. They see 191 keys, three tiles of 64, of which a third is masked. Each tile has its
// softmax and its barriers between two consumers that share O, which takes 128 registers of each thread.
//
// Here the 64 rows of a consumer are 16 queries of four heads: all heads of a key head read the same keys. 16 queries with a window of 128
// see 143 keys, and 144 are one tile. So the softmax is one pass over a row, as in a
// textbook: no running maximum, no rescaling. Behind it P is complete, in registers, and O needs no accumulator that lives over
// tiles: it is made in slabs of 64 columns, 32 registers each, and a slab leaves while the next one is multiplied. What made wide heads
// hard in step 30 is gone, and both consumers have their own rows; all they share is K and V, whose slabs of 64 columns, first of K, then of
// V, go through one ring. A key tile begins at the first key of its first query: a copy may begin at any row.
//
//     S = Q K^T, eight slabs of K | softmax | O slab 0 | O slab 1, 0 leaves | … | 7 leaves
//
// While one consumer is at its softmax, the other multiplies. O leaves through Q's place, slab by slab, and the next work's Q comes into a
// slab when the store has read it.
//
// Shared memory: Q 128 KB, and five slabs of K or V of 18 KB. A work of 128 rows takes 9216 cycles of the tensor cores, and some 11,000 of
// shared memory: its copies, what the products read, and O. Measured: 351 TFLOP/s of visible pairs in that layer, where step 30 has 191
// (experiments/models).
#include <fa/accumulator.cuh>
#include <fa/sink.cuh>
#include <fa/stage.cuh>

using scalar = fa::DTYPE;
using fa::uint32_t;
using fa::uint64_t;

constexpr int THREADS = 384, CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int QUERIES = 16, HEADS = 8,
              SLABS = COLUMNS / 64;  // QUERIES of HEADS heads are a work; SLABS: of 64 columns, the swizzle's width
constexpr uint32_t SLAB = 64 * 128, STAGE = KEYS * 128;  // bytes: of 64 rows of Q or O, and of K or V
static_assert(STAGES >= 2 && KEYS % 16 == 0, "a slab is given back behind the products of the next one, in steps of 16 keys");
static_assert(fa::has_window && !fa::has_score && FA_WINDOW + QUERIES <= KEYS,
              "it runs in the place of wide_heads where a window is short");

// What a block has in shared memory. A phase of `full` ends when the slab has arrived, one of `empty` when those who read it have.
struct Shared {
    unsigned char q[2][SLABS][SLAB];  // [2][SLABS][64][64]: of each consumer
    unsigned char kv[STAGES][STAGE];
    uint64_t q_full[2][SLABS], q_empty[2][SLABS], kv_full[STAGES], kv_empty[STAGES];
};

// Queries of heads, and the first key of the first of them.
struct Work {
    int q_first, head, batch, key;
};
// All works are of a length. Neighbours have the same keys.
__device__ __forceinline__ int works(const fa::Args& args) {
    return (args.seq_q + QUERIES - 1) / QUERIES * (args.heads_q / HEADS) * args.batch;
}
__device__ __forceinline__ Work of_number(const fa::Args& args, int number) {
    const int groups = args.heads_q / HEADS, tiles = (args.seq_q + QUERIES - 1) / QUERIES, row = number / groups;
    const int q_first = row % tiles * QUERIES;
    return {q_first, number % groups * HEADS, row / tiles, fa::first_key(args, q_first)};
}

// Of one consumer, its Q.
__device__ __forceinline__ void load_q(Shared& shared, const fa::Args& args, const fa::TensorMap& map, int consumer) {
    uint32_t parity = 1;
#pragma unroll 1
    for (int number = blockIdx.x; number < works(args); number += gridDim.x, parity ^= 1) {
        const Work work = of_number(args, number);
#pragma unroll 1
        for (int slab = 0; slab < SLABS; ++slab) {
            uint64_t* full = &shared.q_full[consumer][slab];
            fa::mbarrier_wait_parity(&shared.q_empty[consumer][slab], parity);
            fa::mbarrier_arrive_expect_tx(full, SLAB);
            fa::tma_load_4d(shared.q[consumer][slab], &map, full, 64 * slab, work.q_first, work.head + HEADS / 2 * consumer, work.batch);
        }
    }
}
// The slabs of K, then those of V.
__device__ __forceinline__ void load_kv(Shared& shared, const fa::Args& args, const fa::TensorMap& k_map, const fa::TensorMap& v_map) {
    fa::RingPlace<STAGES> place;
#pragma unroll 1
    for (int number = blockIdx.x; number < works(args); number += gridDim.x) {
        const Work work = of_number(args, number);
        const int kv_head = fa::kv_head_of(args, work.head);
#pragma unroll 1
        for (int i = 0; i < 2 * SLABS; ++i, place.next()) {
            uint64_t* full = &shared.kv_full[place.stage];
            fa::mbarrier_wait_parity(&shared.kv_empty[place.stage], place.parity ^ 1);
            fa::mbarrier_arrive_expect_tx(full, STAGE);
            fa::tma_load_4d(shared.kv[place.stage], i < SLABS ? &k_map : &v_map, full, 64 * (i % SLABS), work.key, kv_head, work.batch);
        }
    }
}

// 16 queries of four heads, a head a warp. A thread has parts of the rows `row` and row + 8.
struct Consumer {
    Shared& shared;
    const fa::Args& args;
    const fa::TensorMap& o_map;
    const int index, warp = fa::warp_id() % 4;
    // A score in units of log2 is S times this. A negative scale is its absolute value, its sign in S.
    const float exponent_scale = (args.scale == 0 ? 1.0f : fabsf(float(args.scale))) * fa::log2e;
    float score_reg[KEYS / 2], out_reg[2][32];
    float reference[2], row_sum[2], inverse[2];  // P = 2^(score - reference)
    uint32_t p_reg[KEYS / 16][4];
    Work work;
    int head, row;  // of the warp, of the thread
    uint32_t q_parity = 0;
    fa::RingPlace<STAGES> place, done;  // done: the next stage that is given back

    __device__ __forceinline__ void wait_stage() { fa::mbarrier_wait_parity(&shared.kv_full[place.stage], place.parity); }
    __device__ __forceinline__ void release_stage() { fa::release_stage(shared.kv_empty, done); }

    // S = Q K^T, a group of products for each slab. A slab of K is given back when the group behind it has been started.
    __device__ __forceinline__ void multiply_scores() {
        const uint64_t q_operand = fa::descriptor_here(fa::smem_descriptor_k_major(shared.q[index][0]));
        fa::discard(score_reg);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            fa::mbarrier_wait_parity(&shared.q_full[index][slab], q_parity);
            wait_stage();
            const uint64_t k_operand = fa::smem_descriptor_k_major(shared.kv[place.stage]);
            if (slab == 0) fa::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                fa::wgmma_ss<scalar>(score_reg, fa::descriptor_advance(q_operand, slab * SLAB + step * 32),
                                     fa::descriptor_advance(k_operand, step * 32), slab > 0 || step > 0);
            fa::wgmma_commit();
            place.next();
            if (slab > 0) fa::wgmma_wait<1>(), release_stage();
        }
        fa::wgmma_wait<0>(score_reg);
        release_stage();
        q_parity ^= 1;
    }
    // S becomes P, an operand. Row sums with the sink, and `inverse` of them.
    __device__ __forceinline__ void softmax() {
        if (args.scale <= 0) fa::apply_sign(score_reg, args.scale);
        const int firsts[2] = {fa::first_key(args, row) - work.key, fa::first_key(args, row + 8) - work.key};
        const int ends[2] = {fa::visible_keys(args, row) - work.key, fa::visible_keys(args, row + 8) - work.key};
        fa::keep_columns(score_reg, firsts, ends, -fa::infinity());
        fa::first_reference(reference, score_reg, exponent_scale);
        fa::exponentiate(score_reg, row_sum, exponent_scale, reference);
        fa::pack_operand<scalar>(p_reg, score_reg);
        fa::finish_row_sum(row_sum, inverse);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            reference[half] *= fa::ln2;
            if constexpr (fa::has_sinks) {
                const float kept = fa::add_sink(args, head, reference[half], row_sum[half]);
                inverse[half] = row_sum[half] == 0 ? 0.0f : kept / row_sum[half];
            }
        }
    }
    __device__ __forceinline__ void store_logsumexp() {
        float* logsumexp = fa::row_pointer<float>(args.logsumexp, work.batch, head, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (fa::lane_id() % 4 == 0 && row + 8 * half < args.seq_q)
                logsumexp[row + 8 * half] = row_sum[half] == 0 ? -fa::infinity() : reference[half] + fa::log(row_sum[half]);
    }
    // A slab of O leaves through that of Q, which goes back when the store before has read its own.
    __device__ __forceinline__ void store(int slab) {
        unsigned char* own_smem = shared.q[index][slab] + 16 * warp * 128;
        fa::store_rows<scalar>(own_smem, SLAB, out_reg[slab % 2], inverse);
        fa::fence_proxy_async_shared();
        __syncwarp();
        if (fa::lane_id() > 0) return;
        fa::tma_store_4d(&o_map, own_smem, 64 * slab, work.q_first, head, work.batch);
        fa::bulk_commit();
        if (slab == 0) return;
        fa::bulk_wait_read<1>();
        fa::mbarrier_arrive(&shared.q_empty[index][slab - 1]);
    }
    // O = P V, a slab after the other: a slab leaves while the next one is multiplied.
    __device__ __forceinline__ void multiply_output() {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            wait_stage();
            const uint64_t v_operand = fa::smem_descriptor_mn_major(shared.kv[place.stage], STAGE);
            fa::discard(out_reg[slab % 2]);
            fa::wgmma_fence();
#pragma unroll
            for (int step = 0; step < KEYS / 16; ++step)
                fa::wgmma_rs<scalar, true>(out_reg[slab % 2], p_reg[step], fa::descriptor_advance(v_operand, step * 2048), step > 0);
            fa::wgmma_commit();
            place.next();
            if (slab == 0) continue;
            fa::wgmma_wait<1>(out_reg[(slab - 1) % 2]);
            release_stage();
            store(slab - 1);
        }
        fa::wgmma_wait<0>(out_reg[(SLABS - 1) % 2]);
        release_stage();
        store(SLABS - 1);
    }
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (int number = blockIdx.x; number < works(args); number += gridDim.x) {
            work = of_number(args, number);
            head = work.head + HEADS / 2 * index + warp, row = work.q_first + fa::fragment_row();
            multiply_scores();
            softmax();
            fa::bar_sync(1 + index, 128);  // no warp's products read Q any more
            multiply_output();
            store_logsumexp();
            if (fa::lane_id() == 0) {
                fa::bulk_wait_read<0>();
                fa::mbarrier_arrive(&shared.q_empty[index][SLABS - 1]);
            }
            __syncwarp();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    if (threadIdx.x == 0) {
        for (int consumer = 0; consumer < 2; ++consumer) fa::mbarrier_init_ring(shared.q_full[consumer], shared.q_empty[consumer], 4);
        fa::mbarrier_init_ring(shared.kv_full, shared.kv_empty, 8);  // each warp of both consumers
        fa::mbarrier_init_fence();
    }
    __syncthreads();
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) load_kv(shared, args, k_map, v_map);
        if (threadIdx.x == 32) load_q(shared, args, q_map, 0);
        if (threadIdx.x == 64) load_q(shared, args, q_map, 1);
    } else {
        fa::setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer{shared, args, o_map, fa::warpgroup_index() - 1}.run();
    }
}
