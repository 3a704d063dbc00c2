// Two softmaxes of one row over different keys, merged: what a ring (or split keys) does with its partial results.
#pragma once

#include <fa/math.cuh>

namespace fa {

// O = kept * O of the one + added * O of the other; logsumexp is that of all keys together.
struct Merged {
    float logsumexp, kept, added;
};

// From the logsumexp of both. -inf is a row that saw no key: its O has weight 0. Where neither saw one, O = 0 and logsumexp = -inf.
__device__ __forceinline__ Merged merge_rows(float running, float step) {
    const float top = max(running, step);
    if (running == -infinity() && step == -infinity()) return {top, 0.0f, 0.0f};  // -inf - -inf is NaN; top drops a NaN
    const float kept = exp(running - top), added = exp(step - top), sum = kept + added;
    return {top + log(sum), kept / sum, added / sum};
}

}  // namespace fa
