// The arguments of FlashAttention-3's backward pass in one C struct; harness/peers/fa3_source.py has the same fields.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct Fa3Backward {
    const void *q, *o, *grad_o;  // (batch, seq_q, heads, dim or dim_v), contiguous as all of them
    const void *k, *v;           // (batch, seq_kv, heads_kv, dim or dim_v)
    const void* logsumexp;       // (batch, heads, seq_q) float32, natural
    void *dq, *dk, *dv;
    int32_t batch, heads, heads_kv, seq_q, seq_kv, dim, dim_v;
    int32_t bfloat16;     // else float16
    int32_t causal;       // aligned bottom-right, as the window
    int32_t left, right;  // keys before and after a query's own that it sees; -1: no limit
    int32_t deterministic;
    int32_t device;
    float scale, softcap;  // softcap 0: none
};

// What the library was built of.
const char* fa3_backward_source(void);

// Why it does not take these sizes and options, or NULL. Pointers are not looked at, and no GPU is needed.
const char* fa3_backward_refuses(const struct Fa3Backward* p);

// The bytes of the workspace of a run that it takes.
int64_t fa3_backward_bytes(const struct Fa3Backward* p);

// Enqueue dQ, dK and dV. workspace: fa3_backward_bytes, aligned to 256, with any contents. Returns an error's text, or NULL.
const char* fa3_backward(const struct Fa3Backward* p, void* workspace, void* stream);

#ifdef __cplusplus
}
#endif
