// The CPU meaning of <fa/overlap.cuh>. The launch before has run, but what it wrote is held back from a first block until no thread can go
// on without it (host/overlap.hpp).
#pragma once

#include <fa/types.cuh>

namespace fa {

__forceinline__ void launch_dependents() {}
__forceinline__ void dependency_wait(FA_HOST_HERE) { fa_host_dependency_wait(file, line), fa_host_dependency_over(); }

}  // namespace fa
