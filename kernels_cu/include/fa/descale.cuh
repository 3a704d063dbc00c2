// What elements of 8 bits are worth: a problem's descales, (batch, heads_kv) each, among the named tensors of fa::Args. The harness defines
// FA_DESCALES, the index of Q's in fa::Args::workspace; a cache of 8 bits (--kv-dtype) has only K's and V's, the next two.
#pragma once

#include <fa/args.cuh>

namespace fa {

// What an element of Q (0), K (1) or V (2) is worth; 1 where there are no descales.
__device__ __forceinline__ float descale_of(const Args& args, int tensor, int batch, int kv_head) {
#ifdef FA_DESCALES
    return static_cast<const float*>(args.workspace[FA_DESCALES + tensor])[batch * args.heads_kv + kv_head];
#else
    return 1.0f;
#endif
}

}  // namespace fa
