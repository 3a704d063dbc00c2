// Attention sinks of a problem (--sinks; Xiao et al. 2023, arXiv 2309.17453; a logit learnt for each head: gpt-oss): one more key in each
// row's sum, whose V is 0. The harness defines FA_SINKS for a compile, as C++ of the words of fa/score.cuh, and FA_DSINKS, the workspace
// that their gradient goes to.
#pragma once

#include <fa/math.cuh>
#include <fa/score.cuh>
#include <fa/warp.cuh>

namespace fa {

#ifdef FA_SINKS
constexpr bool has_sinks = true;
#else
constexpr bool has_sinks = false;
#define FA_DSINKS 0
#endif

namespace formula {

struct Sink : Pair<FA_INTEGER> {
    using I = FA_INTEGER;

    // The logit of a query head.
    template <class R> __device__ __forceinline__ R logit() const {
#ifdef FA_SINKS
        return FA_SINKS;
#else
        return R(0);
#endif
    }
};

}  // namespace formula

template <class R> __device__ __forceinline__ R sink_of(const Args& args, int head) {
    return formula::Sink{{args, 0, head, 0, 0}}.template logit<R>();
}

// A row's maximum, or another reference, and its sum of exp(score - maximum), with the sink among the scores. Returns what the sums so far
// are worth then. The maximum of a row that sees no key is nothing to compare with: the sink alone is its logsumexp, also where that is -inf.
template <class R> __device__ __forceinline__ R add_sink(const Args& args, int head, R& row_max, R& row_sum) {
    if constexpr (!has_sinks) return R(1);
    const R sink = sink_of<R>(args, head), top = row_sum == R(0) ? sink : max(row_max, sink);
    const R rescale = row_sum == R(0) ? R(0) : exp(row_max - top);
    row_sum = row_sum * rescale + (sink == top ? R(1) : exp(sink - top));
    row_max = top;
    return rescale;
}

// dsink of a head, - sum over batches and rows of P delta, with P = exp(sink - logsumexp) as of a key: by a block, in a fixed order.
// delta: gives that of a batch and query.
template <class R, class Delta> __device__ __forceinline__ void store_dsink(const Args& args, int head, const Delta& delta) {
    __shared__ R sums[32];  // of each warp
    const R sink = sink_of<R>(args, head);
    R sum = 0;
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < int64_t(args.batch) * args.seq_q && sink != -infinity(); row += blockDim.x) {
        const int batch = int(row / args.seq_q), query = int(row - int64_t(batch) * args.seq_q);
        sum -= exp(sink - *row_pointer<R>(args.logsumexp, batch, head, query)) * delta(batch, query);
    }
    sum = group_sum<32>(sum);
    if (lane_id() == 0) sums[warp_id()] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0;
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) sum += sums[warp];
    static_cast<R*>(args.workspace[FA_DSINKS])[head] = sum;
}

}  // namespace fa
