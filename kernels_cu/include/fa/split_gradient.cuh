// What surrounds the products of split's backward pass: tiles of split operands (fa/split.cuh) in workspaces, and dQ on its way out.
//
//     prepare      splits K and V, Q and dO, as the tiles will lie in shared memory, with scales, norms, delta and logsumexp behind them
//     convert      dQ from the layout of the accumulators to rows; sums of dK and dV
//
// A tile of keys is [K high][K low][V high][V low][info], one of queries [Q high][Q low][dO high][dO low][logsumexp][delta][info].
#pragma once

#include <fa/gradient.cuh>
#include <fa/overlap.cuh>
#include <fa/split_product.cuh>

namespace fa {

// Tiles of BlockQ queries and BlockK keys, Width columns wide. Keys, Queries, Dq: the numbers of the workspaces.
template <int BlockQ, int BlockK, int Width, int Keys, int Queries, int Dq> struct SplitGradient {
    // Bytes. From high parts to low ones, and where the rest begins.
    static constexpr int info_size = 32;  // floats; a multiple of 128 bytes keeps the tiles aligned
    static constexpr uint32_t k_low = BlockK * Width * 2, q_low = BlockQ * Width * 2;
    static constexpr uint32_t k_info = 4 * k_low, q_stats = 4 * q_low, q_info = q_stats + 8 * BlockQ;
    static constexpr uint32_t k_item = k_info + 4 * info_size, q_item = q_info + 4 * info_size;
    static_assert(k_item % 128 == 0 && q_item % 128 == 0, "the swizzle is an XOR of addresses");
    enum { INVERSE, INVERSE_2, NORM, LARGEST_DELTA };  // of info: 1 / scale of K or Q, of V or dO; largest row norm of V or dO

    // P is at most 1, beyond the rounding of large scores; it and dS are brought to 2^15.
    static constexpr float p_scale = 0x1p15f, largest_p = 1.5f;

    static __device__ __forceinline__ int key_tiles(const Args& args) { return (args.seq_kv + BlockK - 1) / BlockK; }
    static __device__ __forceinline__ int query_tiles(const Args& args) { return (args.seq_q + BlockQ - 1) / BlockQ; }
    // Tiles of queries are numbered over all heads: the number of a head's first.
    static __device__ __forceinline__ int first_tile(const Args& args, int batch, int head) {
        return (batch * args.heads_q + head) * query_tiles(args);
    }
    static __device__ __forceinline__ unsigned char* query_item(const Args& args, int tile) {
        return static_cast<unsigned char*>(args.workspace[Queries]) + int64_t(tile) * q_item;
    }
    static __device__ __forceinline__ unsigned char* key_item(const Args& args, int batch, int kv_head, int tile) {
        const int first = (batch * args.heads_kv + kv_head) * key_tiles(args);
        return static_cast<unsigned char*>(args.workspace[Keys]) + int64_t(first + tile) * k_item;
    }
    // For a tile of queries, dQ in the layout of the accumulators: [BlockQ / 16][Width / 8][32 lanes][4].
    static __device__ __forceinline__ float* dq(const Args& args, int tile) {
        return static_cast<float*>(args.workspace[Dq]) + int64_t(tile) * (BlockQ * Width);
    }

    // K and V, split. A block writes a tile of one of them; tiles are numbered over all heads.
    static __device__ __forceinline__ void prepare_keys(const Args& args, int number, bool is_v) {
        const int tiles = key_tiles(args), row = number / tiles, tile = number - row * tiles;
        const int batch = row / args.heads_kv, kv_head = row - batch * args.heads_kv, first = tile * BlockK;
        const Tensor& from = is_v ? args.V : args.K;
        unsigned char* item = key_item(args, batch, kv_head, tile);
        const SplitSizes sizes = split_tile<BlockK, Width>(item + (is_v ? 2 * k_low : 0), row_pointer<float>(from, batch, kv_head, first),
                                                           int(from.row), args.seq_kv - first, args.head_dim, dynamic_shared<float>());
        float* info = reinterpret_cast<float*>(item + k_info);
        const int i = threadIdx.x;
        if (is_v ? i > INVERSE && i < info_size : i == INVERSE) info[i] = i == NORM ? sizes.norm : i <= INVERSE_2 ? sizes.inverse : 0.0f;
    }
    // Q and dO likewise; with dO delta[query] = dO · O - dlogsumexp, each row split over 8 lanes, and logsumexp, with +inf where P must be
    // 0: for a query beyond seq_q, or one that sees no key and has -inf. ZeroDq: dQ = 0, to which launch 2 adds.
    template <bool ZeroDq> static __device__ __forceinline__ void prepare_queries(const Args& args, int number, bool is_do) {
        float* smem = dynamic_shared<float>();  // [24]
        const int tiles = query_tiles(args), row = number / tiles, tile = number - row * tiles;
        const int batch = row / args.heads_q, head = row - batch * args.heads_q, first = tile * BlockQ, i = threadIdx.x;
        const Tensor& from = is_do ? args.dO : args.Q;
        unsigned char* item = query_item(args, number);
        const SplitSizes sizes = split_tile<BlockQ, Width>(item + (is_do ? 2 * q_low : 0), row_pointer<float>(from, batch, head, first),
                                                           int(from.row), args.seq_q - first, args.head_dim, smem);
        float* info = reinterpret_cast<float*>(item + q_info);
        if (!is_do) {
            if (i == 0) info[INVERSE] = sizes.inverse;
            if constexpr (ZeroDq)
                for (int at = 4 * i; at < BlockQ * Width; at += 4 * 256) store_vec(dq(args, number) + at, Vec<float, 4>{});
            return;
        }
        float* stats = reinterpret_cast<float*>(item + q_stats);
        float largest = 0;
#pragma unroll 1
        for (int row = i / 8; row < BlockQ; row += 32) {
            const int query = first + row;
            float sum = 0, lse = -infinity();
            if (query < args.seq_q) {
                const float* o = row_pointer<float>(args.O, batch, head, query);  // [head_dim]
                const float* d_o = row_pointer<float>(args.dO, batch, head, query);  // [head_dim]
                lse = *row_pointer<float>(args.logsumexp, batch, head, query);
                for (int column = i % 8 * 4; column < args.head_dim; column += 32) {
                    Vec<float, 4> o_reg = load_128_upto(o + column, args.head_dim - column);
                    Vec<float, 4> do_reg = load_128_upto(d_o + column, args.head_dim - column);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum += o_reg[e] * do_reg[e];
                }
                if (i % 8 == 0) sum -= dlogsumexp_of<float>(args, batch, head, query);
            }
            sum = group_sum<8>(sum);
            if (fabsf(sum) <= largest_float) largest = max(largest, fabsf(sum));
            if (i % 8 == 0) {
                stats[row] = lse == -infinity() ? infinity() : lse;
                stats[BlockQ + row] = sum;
            }
        }
        largest = block_max(largest, smem + 16);
        if (i > INVERSE && i < info_size)
            info[i] = i == INVERSE_2 ? sizes.inverse : i == NORM ? sizes.norm : i == LARGEST_DELTA ? largest : 0.0f;
    }
    // Launch 1, 256 threads. Two blocks a tile: K or V, Q or dO.
    template <bool ZeroDq> static __device__ __forceinline__ void prepare(const Args& args) {
        launch_dependents();
        const int number = blockIdx.x / 2, keys = args.batch * args.heads_kv * key_tiles(args);
        if (number < keys) prepare_keys(args, number, blockIdx.x % 2);
        else prepare_queries<ZeroDq>(args, number - keys, blockIdx.x % 2);
    }

    // What the products of a tile of queries and a tile of keys are multiplied with.
    struct Factors {
        float score, ds_scale, dp, dv, dk, dq;

        // dS is at most P times the norms of dO and V, and delta: a bound, so that no maximum need be looked for. The products are in an
        // order in which none overflows or vanishes before the result does.
        __device__ __forceinline__ Factors(const float* of_queries, const float* of_keys, float scale) {
            score = of_queries[INVERSE] * of_keys[INVERSE] * scale;
            ds_scale = split_scale(of_queries[NORM] * of_keys[NORM] + of_queries[LARGEST_DELTA]);
            dp = of_queries[INVERSE_2] * ds_scale * of_keys[INVERSE_2];
            dv = of_queries[INVERSE_2] * (1 / p_scale);
            dk = inverse_power(ds_scale) * of_queries[INVERSE];
            dq = inverse_power(ds_scale) * of_keys[INVERSE];
        }
    };
    static __device__ __forceinline__ float probability(float score, float factor, float logsumexp) {
        const float p = exp2_approx((score * factor - logsumexp) * log2e);
        return p > largest_p ? largest_p : p;  // a comparison, since a minimum would drop NaN
    }

    // Where several splits make dK and dV of a tile of keys, each leaves its sums here: rows of dK, then of dV.
    template <int Partial> static __device__ __forceinline__ float* partial(const Args& args, int number) {
        return static_cast<float*>(args.workspace[Partial]) + int64_t(number) * (2 * BlockK * Width);
    }
    // The number of a split of a tile of keys.
    static __device__ __forceinline__ int number_of_split(const Args& args, int batch, int kv_head, int tile, int splits, int split) {
        return ((batch * args.heads_kv + kv_head) * key_tiles(args) + tile) * splits + split;
    }
    // Launch 3 with splits, Width threads and 16 keys a block: their sums, in the order of the splits.
    template <int Partial>
    static __device__ __forceinline__ void add_splits(const Args& args, int kv_head, bool is_dv, int splits) {
        constexpr int columns = Width / 4, rows = 4;  // a thread: 4 columns, and every fourth row
        const int batch = blockIdx.z, column = threadIdx.x % columns * 4;
#pragma unroll
        for (int i = 0; i < 16 / rows; ++i) {
            const int key = blockIdx.x * 16 + i * rows + threadIdx.x / columns;
            if (key >= args.seq_kv) return;
            const float* from = partial<Partial>(args, number_of_split(args, batch, kv_head, key / BlockK, splits, 0)) +
                                (is_dv ? BlockK * Width : 0) + key % BlockK * Width + column;
            Vec<float, 4> sum = load_vec<4>(from);
            for (int split = 1; split < splits; ++split) {
                const Vec<float, 4> next = load_vec<4>(from + split * (2 * BlockK * Width));
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] += next[e];
            }
            store_128_upto(row_pointer<float>(is_dv ? args.dV : args.dK, batch, kv_head, key) + column, sum, args.head_dim - column);
        }
    }

    // Launch 3, Width threads and 16 queries a block: a thread reads the 4 lanes that hold 8 columns of two rows.
    static __device__ __forceinline__ void convert(const Args& args) {
        constexpr int chunks = Width / 8;
        const int q_first = blockIdx.x * 16, row = threadIdx.x / chunks, chunk = threadIdx.x % chunks, head = blockIdx.y,
                  batch = blockIdx.z;
        const float scale = float(args.scale);
        const float* from =
            dq(args, first_tile(args, batch, head) + q_first / BlockQ) + (q_first % BlockQ / 16 * chunks + chunk) * 128 + row * 16;
        Vec<float, 4> rows[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Vec<float, 4> own = load_vec<4>(from + 4 * i);
#pragma unroll
            for (int e = 0; e < 4; ++e) rows[e / 2][i / 2][i % 2 * 2 + e % 2] = own[e] * scale;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = q_first + 8 * half + row;
            if (query >= args.seq_q) continue;
            float* to = row_pointer<float>(args.dQ, batch, head, query) + chunk * 8;
            store_128_upto(to, rows[half][0], args.head_dim - chunk * 8);
            store_128_upto(to + 4, rows[half][1], args.head_dim - chunk * 8 - 4);
        }
    }
};

}  // namespace fa
