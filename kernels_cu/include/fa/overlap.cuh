// Launches that overlap: programmatic dependent launch (griddepcontrol, sm_90). A [[launch]] of the header that says `overlaps` may begin
// before the launch before it has ended, and wait for it itself. Before sm_90 launches run one after another, and the words do nothing.
#pragma once

#include <fa/types.cuh>

namespace fa {

// The next launch, where it overlaps, may begin when every block of this one has come here or has ended. Nothing is said of what this
// launch has written. Without it the next begins when all blocks have ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the launch before has ended, and all that it has written can be read. What is read or overwritten of it comes behind this
// wait, by this thread or by others that are told of it through a barrier. Some thread of each launch that overlaps must wait: else it may
// end before the launch before has, and so may all launches behind it.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fa
