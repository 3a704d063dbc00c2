// 64 rows whose keys several blocks divide among them: each leaves what it has of the rows in global memory, the last to come merges all
// parts. (FlashAttention's split keys, Dao et al. 2023; here without a launch of its own for the merge.)
#pragma once

#include <fa/accumulator.cuh>
#include <fa/barrier.cuh>

namespace fa {

// Floats of a part: O of 64 rows as it lies in the accumulators, in fours of a thread; then the reference and the row sum of each row.
template <int R> constexpr int part_floats = 64 * (2 * R + 2);

// Leaves O, not yet divided by the row sums, the references and the row sums, which are reduced across the quad before. A warpgroup.
template <int R>
__device__ __forceinline__ void store_part(float* part /* [part_floats<R>] */, const float (&out)[R], const float (&reference)[2],
                                           float (&row_sum)[2]) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + fragment_row();
#pragma unroll
    for (int i = 0; i < R; i += 4) store_vec<4>(part + (i * 32 + thread) * 4, Vec<float, 4>{out[i], out[i + 1], out[i + 2], out[i + 3]});
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row_sum[half] = group_sum<4>(row_sum[half]);
        if (lane_id() % 4 == 0) store_vec<2>(part + 128 * R + 2 * (row + 8 * half), Vec<float, 2>{reference[half], row_sum[half]});
    }
}

// Whether this is the last of `count` to arrive: of a warpgroup one thread asks, between two barriers, and then its threads see what all
// others have stored. The arrivals are 0 again behind the last one.
__device__ __forceinline__ bool arrives_last(int* arrivals, int count) {
    __threadfence();
    const bool last = atomicAdd(arrivals, 1) == count - 1;
    if (last) *arrivals = 0;
    __threadfence();
    return last;
}

// O, references and row sums of all keys, from the first `count` parts, at most Parts, in their order. The row sum is whole in the first
// lane of a quad, 0 in the others, as partial sums are. A part with a row sum of 0 saw no key of the row.
template <int Parts, int R>
__device__ __forceinline__ void merge_parts(float (&out)[R], float (&reference)[2], float (&row_sum)[2],
                                            const float* parts /* [count][part_floats<R>] */, int count) {
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + fragment_row();
    Vec<float, 2> stats[Parts][2];
    float sums[2] = {};
    reference[0] = reference[1] = -infinity();
#pragma unroll
    for (int i = 0; i < Parts; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            stats[i][half] = i < count ? load_vec<2>(parts + i * part_floats<R> + 128 * R + 2 * (row + 8 * half)) : Vec<float, 2>{};
#pragma unroll
    for (int i = 0; i < Parts; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (stats[i][half][1] != 0) reference[half] = max(reference[half], stats[i][half][0]);
    for (float& element : out) element = 0;
#pragma unroll
    for (int i = 0; i < Parts; ++i) {
        if (i >= count) break;
        float weight[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weight[half] = stats[i][half][1] == 0 ? 0.0f : exp2_approx(stats[i][half][0] - reference[half]);
            sums[half] += weight[half] * stats[i][half][1];
        }
#pragma unroll
        for (int j = 0; j < R; j += 4) {
            if (j % 64 == 0) schedule_fence();  // not all loads at once: they would spill
            const auto four = load_vec<4>(parts + i * part_floats<R> + (j * 32 + thread) * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) out[j + e] += weight[e / 2] * four[e];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] = lane_id() % 4 == 0 ? sums[half] : 0.0f;
}

// The same of one slice: O[4 slice .. 4 slice + 3] of each thread's accumulators, of any number of parts. 128 threads, with the loads of
// eight parts in flight. All lanes have the whole row sum.
template <int R>
__device__ __forceinline__ void merge_slice(float (&out)[4], float (&reference)[2], float (&row_sum)[2],
                                            const float* parts /* [count][part_floats<R>] */, int count, int slice) {
    constexpr int Ahead = 8;
    const int row = threadIdx.x / 32 * 16 + fragment_row();
    const float* mine = parts + 512 * slice + 4 * threadIdx.x;
    const float* stats = parts + 128 * R + 2 * row;
    for (float& element : out) element = 0;
    for (int half = 0; half < 2; ++half) reference[half] = -infinity(), row_sum[half] = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += Ahead) {
        Vec<float, 4> four[Ahead];
        Vec<float, 2> stat[Ahead][2];
#pragma unroll
        for (int i = 0; i < Ahead; ++i) {
            const int64_t part = int64_t(min(first + i, count - 1)) * part_floats<R>;
            four[i] = load_vec<4>(mine + part);
#pragma unroll
            for (int half = 0; half < 2; ++half) stat[i][half] = load_vec<2>(stats + part + 16 * half);
        }
        schedule_fence();  // all loads, then their use
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = reference[half];
#pragma unroll
            for (int i = 0; i < Ahead; ++i)
                if (stat[i][half][1] != 0) top = max(top, stat[i][half][0]);
            const float kept = row_sum[half] == 0 ? 0.0f : exp2_approx(reference[half] - top);
            reference[half] = top, row_sum[half] *= kept;
            out[2 * half] *= kept, out[2 * half + 1] *= kept;
#pragma unroll
            for (int i = 0; i < Ahead; ++i) {
                const float weight = first + i >= count || stat[i][half][1] == 0 ? 0.0f : exp2_approx(stat[i][half][0] - top);
                row_sum[half] += weight * stat[i][half][1];
#pragma unroll
                for (int e = 0; e < 2; ++e) out[2 * half + e] += weight * four[i][2 * half + e];
            }
        }
    }
}

}  // namespace fa
