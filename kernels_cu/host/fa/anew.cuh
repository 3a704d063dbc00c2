// The CPU meaning of <fa/anew.cuh>: registers are no concern here.
#pragma once

#include <fa/types.cuh>

namespace fa {

__forceinline__ int thread_anew() { return threadIdx.x; }

}  // namespace fa
