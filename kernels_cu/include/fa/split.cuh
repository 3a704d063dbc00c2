// A float32 matrix as two of float16, for products on tensor cores (fa/split_product.cuh): x = scale * (high + low).
//
// high = float16(x / scale) has 11 bits, low = float16(x / scale - high) the next 11. What is lost is at most 2^-24 of x, as in float32.
//
// The scale, a power of two, is chosen so that the largest element of a row (or a tile) lies in [2^14, 2^15). float16 has few exponents:
// 2^-24 is its smallest number. Without a scale, inputs of 10^-3 would lose half of their low part, and V of 2^16 would overflow.
// With it, an element is held to 2^-24 of itself or to 2^-40 of the largest element of its row, whichever is more.
#pragma once

#include <fa/async.cuh>
#include <fa/fragment.cuh>

namespace fa {

constexpr float largest_float = 3.402823466e38f;

// The power of two that brings `largest` (finite, not negative) to [2^14, 2^15); at most 2^112, so that 2^-14 / it is a normal number.
__device__ __forceinline__ float split_scale(float largest) {
    return __uint_as_float(uint32_t(min(268 - int(__float_as_uint(largest) >> 23), 239)) << 23);
}

// 1 / a power of two, exactly.
__device__ __forceinline__ float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Two numbers as high and low parts, packed as operands are. Beyond float16's range the high part is infinite.
__device__ __forceinline__ void split_pair(uint32_t& high, uint32_t& low, float first, float second) {
    high = cvt_rn_f16x2_f32(second, first);
    const float16 one{uint16_t(high & 0xffff)}, other{uint16_t(high >> 16)};
    low = cvt_rn_f16x2_f32(second - cvt_f32_f16(other), first - cvt_f32_f16(one));
}

// A row of Width floats, in the registers of `lanes` neighbouring lanes: 16 bytes a lane, or 32 where Width is 256.
template <int Width> struct SplitRow {
    static constexpr int lanes = Width / 4 < 32 ? Width / 4 : 32, count = Width / 4 / lanes, rows_of_warp = 32 / lanes;
    static_assert(Width % 64 == 0, "a power of two of lanes shares a row");
    Vec<float, 4> x[count];

    // Zero beyond head_dim, and all of it where the row is not `there`.
    __device__ __forceinline__ void load(const float* row /* [head_dim] */, int head_dim, bool there) {
#pragma unroll
        for (int c = 0; c < count; ++c) {
            const int column = 4 * (lane_id() % lanes + c * lanes);
            x[c] = load_128_upto(row + column, there ? head_dim - column : 0);
        }
    }

    __device__ __forceinline__ void multiply(float factor) {
#pragma unroll
        for (int c = 0; c < count; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[c][e] *= factor;
    }

    // The largest size of this lane's elements; not finite ones count as infinity.
    __device__ __forceinline__ float largest() const {
        float size = 0;
#pragma unroll
        for (int c = 0; c < count; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) size = fabsf(x[c][e]) <= largest_float ? max(size, fabsf(x[c][e])) : infinity();
        return size;
    }

    // The same, where not finite elements do not count.
    __device__ __forceinline__ float largest_finite() const {
        float size = 0;
#pragma unroll
        for (int c = 0; c < count; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) size = max(size, fabsf(x[c][e]) <= largest_float ? fabsf(x[c][e]) : 0.0f);
        return size;
    }

    // The sum of the squares of this lane's finite elements, each times `scale`.
    __device__ __forceinline__ float squares(float scale) const {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < count; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float scaled = fabsf(x[c][e]) <= largest_float ? x[c][e] * scale : 0.0f;
                sum += scaled * scaled;
            }
        return sum;
    }

    // The row times `scale` to row `row` of two swizzled tiles of Width, the low parts `low_bytes` behind the high ones.
    __device__ __forceinline__ void store(unsigned char* tile, uint32_t low_bytes, int row, float scale) const {
#pragma unroll
        for (int c = 0; c < count; ++c) {
            const int part = lane_id() % lanes + c * lanes;
            store_parts(tile + chunk_at<Width>(row, part / 2) + part % 2 * 8, low_bytes, c, scale);
        }
    }

    // The same to two plain matrices in global memory: the row's high parts to `to`, the low ones `low_bytes` behind.
    __device__ __forceinline__ void store_plain(unsigned char* to, int64_t low_bytes, float scale) const {
#pragma unroll
        for (int c = 0; c < count; ++c) store_parts(to + (lane_id() % lanes + c * lanes) * 8, low_bytes, c, scale);
    }

    __device__ __forceinline__ void store_parts(unsigned char* to, int64_t low_bytes, int c, float scale) const {
        Vec<uint32_t, 2> high, low;
#pragma unroll
        for (int e = 0; e < 2; ++e) split_pair(high[e], low[e], x[c][2 * e] * scale, x[c][2 * e + 1] * scale);
        store_vec(reinterpret_cast<uint32_t*>(to), high);
        store_vec(reinterpret_cast<uint32_t*>(to + low_bytes), low);
    }

    // The scale of the row by its own largest element. Returns what products with the row are to be multiplied with.
    // A row with an infinity becomes 1 and -1 in the places of the infinities, its factor is infinity: products are then infinite,
    // or NaN where the other factor is 0. With a NaN the factor is NaN. For all lanes of a warp, several rows at a time.
    __device__ __forceinline__ float own_scale(float& scale) {
        float size = largest(), factor = infinity();
        scale = 1.0f;
        if (__any_sync(full_warp, size > largest_float)) {
            float odd = 0;  // 1: an infinity, 2: NaN
#pragma unroll
            for (int c = 0; c < count; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) odd = max(odd, fabsf(x[c][e]) <= largest_float ? 0.0f : x[c][e] == x[c][e] ? 1.0f : 2.0f);
            odd = group_max<lanes>(odd);
            if (odd == 2) factor = __uint_as_float(0x7fffffffu);
            if (odd != 0) {
#pragma unroll
                for (int c = 0; c < count; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[c][e] = fabsf(x[c][e]) != infinity() ? 0.0f : x[c][e] > 0 ? 1.0f : -1.0f;
            }
            size = odd != 0 ? infinity() : size;
        }
        size = group_max<lanes>(size);
        if (size <= largest_float) {
            scale = split_scale(size);
            factor = inverse_power(scale);
        }
        return factor;
    }
};

// Rows first, first + step, … to two tiles as above, each scaled by its own largest element. Products with them are to be multiplied with
// factors. The maxima are reduced side by side: row after row, the latencies of the shuffles would add up. For all lanes of a warp.
template <int Width, int Count>
__device__ __forceinline__ void store_scaled(SplitRow<Width> (&rows)[Count], float (&factors)[Count], unsigned char* tile,
                                             uint32_t low_bytes, int first, int step) {
    float scales[Count];
    bool odd = false;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        scales[i] = rows[i].largest();
        odd |= scales[i] > largest_float;
    }
    if (__any_sync(full_warp, odd)) {
#pragma unroll
        for (int i = 0; i < Count; ++i) factors[i] = rows[i].own_scale(scales[i]);
    } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            scales[i] = split_scale(group_max<SplitRow<Width>::lanes>(scales[i]));
            factors[i] = inverse_power(scales[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) rows[i].store(tile, low_bytes, first + i * step, scales[i]);
}

// The maximum over the 256 threads of a block, of numbers that are not negative. One barrier.
__device__ __forceinline__ float block_max(float x, float* warps_smem /* [8] */) {
    x = group_max<32>(x);
    if (lane_id() == 0) warps_smem[warp_id()] = x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) x = max(x, warps_smem[i]);
    return x;
}

// A tile of Rows x Width with one scale to `to`, the low parts behind the high ones; rows behind the last are zero. For 256 threads.
struct SplitSizes {
    float inverse, norm;  // 1 / scale; the largest norm of a row, of its finite elements
};
template <int Rows, int Width>
__device__ __forceinline__ SplitSizes split_tile(unsigned char* to, const float* from /* [rows][head_dim] */, int pitch, int rows,
                                                 int head_dim, float* smem /* [16] */) {
    using Row = SplitRow<Width>;
    constexpr int step = 8 * Row::rows_of_warp, count = Rows / step;
    static_assert(count * step == Rows, "the loads of a tile are whole: its rows are a multiple of theirs");
    const int own = threadIdx.x / Row::lanes;
    Row part[count];
    float largest = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int row = own + i * step;
        part[i].load(from + row * pitch, head_dim, row < rows);
        largest = max(largest, part[i].largest_finite());
    }
    const float scale = split_scale(block_max(largest, smem));
#pragma unroll
    for (int i = 0; i < count; ++i) {
        part[i].store(to, Rows * Width * 2, own + i * step, scale);
        squares = max(squares, group_sum<Row::lanes>(part[i].squares(scale)));
    }
    return {inverse_power(scale), sqrtf(block_max(squares, smem + 8)) * inverse_power(scale)};
}

// Starts to copy `Bytes` bytes from global to shared memory, 16-byte aligned; Threads threads share them.
template <int Bytes, int Threads> __device__ __forceinline__ void copy_bytes(uint32_t to_smem, const unsigned char* from) {
    constexpr int chunks = Bytes / 16, rest = chunks % Threads;
    const uint32_t thread = opaque_thread_id();
    to_smem += thread * 16;
    from += thread * 16;
#pragma unroll
    for (int i = 0; i < chunks / Threads; ++i) cp_async_16(to_smem + i * Threads * 16, from + i * Threads * 16);
    if (thread < rest) cp_async_16(to_smem + (chunks - rest) * 16, from + (chunks - rest) * 16);
}

}  // namespace fa
