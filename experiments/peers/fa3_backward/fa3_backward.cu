// FlashAttention-3's backward pass (hopper/ of github.com/Dao-AILab/flash-attention) behind C functions, without PyTorch.
//
// Sizes, tiles and workspaces are those of mha_bwd in its flash_api.cpp. Where mha_bwd fills tensors with zeros in each call, a memset is
// enqueued here. FlashAttention-3 ends the process where a launch fails, so what can fail on a machine is asked before.
#include "fa3_backward.h"

#include <algorithm>
#include <cstdio>

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "flash.h"

namespace {

using Run = void (*)(Flash_bwd_params&, cudaStream_t);

int round_up(int x, int step) { return (x + step - 1) / step * step; }

/// The window as FlashAttention-3 reads it: sides without a limit are -1, and one that ends at the query itself is the causal mask.
struct Window {
    int left, right;
    bool causal, local;

    explicit Window(const Fa3Backward& p) : left(p.left), right(p.right) {
        if (left >= p.seq_kv - 1) left = -1;
        if (right >= p.seq_q - 1) right = -1;
        if (p.causal) right = 0;
        causal = left < 0 && right == 0;
        local = (left >= 0 || right >= 0) && !causal;
    }
};

/// Rows of a tile of queries and of keys, and the head dim of the code that runs, as the launch templates have them on sm_90.
struct Tile {
    int q, k, dim;

    explicit Tile(const Fa3Backward& p) {
        const Window window(p);
        const int widest = std::max(p.dim, p.dim_v);
        dim = widest <= 64 ? 64 : widest <= 96 ? 96 : widest <= 128 ? 128 : widest <= 192 ? 192 : 256;
        k = dim <= 128 ? 128 : dim == 192 ? 96 : 80;
        q = 64;
        if (dim == 64) q = window.causal && p.softcap > 0 ? 96 : 128;
        if (dim == 128 && !window.causal && !window.local && !(p.softcap > 0)) q = 80;
    }
};

/// The code for a type, a head dim and softcap; none where build.sh left it out. built.inc has a line BUILT(type, dim, softcap) for each.
Run code(const Fa3Backward& p) {
    const int dim = Tile(p).dim;
#define BUILT(type, d, cap)                                                                                                      \
    if ((p.bfloat16 != 0) == cutlass::platform::is_same<type, cutlass::bfloat16_t>::value && dim == d && (p.softcap > 0) == cap) \
        return run_mha_bwd_<90, type, d, cap>;
#include "built.inc"
#undef BUILT
    return nullptr;
}

/// The parts of a workspace. Those from `zeros` on must be zero before a run.
struct Workspace {
    int64_t delta, logsumexp, dq, dq_turn, zeros, dk, dv, dk_turn, dv_turn, bytes = 0;

    explicit Workspace(const Fa3Backward& p) {
        const Tile tile(p);
        const int64_t rows_q = int64_t(p.batch) * p.heads * round_up(p.seq_q, tile.q);
        const int64_t rows_k = p.heads == p.heads_kv ? 0 : int64_t(p.batch) * p.heads_kv * round_up(p.seq_kv, tile.k);
        const int64_t turns = p.deterministic ? rows_k / tile.k : 0;
        delta = part(rows_q);
        logsumexp = part(rows_q);
        dq = part(rows_q * tile.dim);
        dq_turn = part(rows_q / tile.q);
        zeros = bytes;
        dk = part(rows_k * tile.dim);
        dv = part(rows_k * tile.dim);
        dk_turn = part(turns);
        dv_turn = part(turns);
    }

  private:
    int64_t part(int64_t words) {
        const int64_t at = bytes;
        bytes += (words * 4 + 255) / 256 * 256;
        return at;
    }
};

const char* failed(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

extern "C" {

const char* fa3_backward_source(void) { return FA3_SOURCE; }

const char* fa3_backward_refuses(const Fa3Backward* p) {
    static thread_local char text[160];
    if (p->dim % 8 || p->dim_v % 8 || std::max(p->dim, p->dim_v) > 256) return "its head dims are multiples of 8 up to 256";
    if (p->heads % p->heads_kv) return "query heads do not share key heads evenly";
    const int dim = Tile(*p).dim;
    if (p->deterministic && dim == 256) return "it has no deterministic backward pass above head dim 192";
    if (code(*p)) return nullptr;
    std::snprintf(text, sizeof text, "this build has no code for %s, head dims up to %d, %s softcap", p->bfloat16 ? "bfloat16" : "float16",
                  dim, p->softcap > 0 ? "with" : "without");
    return text;
}

int64_t fa3_backward_bytes(const Fa3Backward* p) { return Workspace(*p).bytes; }

const char* fa3_backward(const Fa3Backward* p, void* workspace, void* stream) {
    if (const char* why = fa3_backward_refuses(p)) return why;
    int major = 0, multiprocessors = 0;
    if (const char* why = failed(cudaSetDevice(p->device))) return why;
    if (const char* why = failed(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, p->device))) return why;
    if (const char* why = failed(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, p->device))) return why;
    if (major != 9) return "its code is for compute capability 9.0";
    if (const char* why = failed(cudaPeekAtLastError())) return why;

    const Window window(*p);
    const Tile tile(*p);
    const Workspace at(*p);
    auto* const base = static_cast<char*>(workspace);
    Flash_bwd_params x = {};
    x.is_bf16 = p->bfloat16;
    x.b = p->batch;
    x.h = p->heads;
    x.h_k = p->heads_kv;
    x.seqlen_q = p->seq_q;
    x.seqlen_k = p->seq_kv;
    x.seqlen_q_rounded = round_up(p->seq_q, tile.q);
    x.seqlen_k_rounded = round_up(p->seq_kv, tile.k);
    x.total_q = p->batch * p->seq_q;
    x.total_k = p->batch * p->seq_kv;
    x.d = p->dim;
    x.dv = p->dim_v;
    x.d_rounded = x.dv_rounded = tile.dim;
    x.scale_softmax = p->scale;
    x.softcap = p->softcap;
    x.p_dropout = x.rp_dropout = 1;
    x.p_dropout_in_uint8_t = 255;
    x.is_causal = window.causal;
    x.is_local = window.local;
    x.window_size_left = window.left < 0 ? p->seq_kv - 1 : window.left;
    x.window_size_right = window.right < 0 ? p->seq_q - 1 : window.right;
    x.deterministic = p->deterministic;
    x.arch = 90;
    x.num_sm = multiprocessors;

    x.q_ptr = const_cast<void*>(p->q);
    x.k_ptr = const_cast<void*>(p->k);
    x.v_ptr = const_cast<void*>(p->v);
    x.o_ptr = const_cast<void*>(p->o);
    x.do_ptr = const_cast<void*>(p->grad_o);
    x.dq_ptr = p->dq;
    x.dk_ptr = p->dk;
    x.dv_ptr = p->dv;
    x.q_head_stride = x.k_head_stride = x.dq_head_stride = x.dk_head_stride = p->dim;
    x.v_head_stride = x.o_head_stride = x.do_head_stride = x.dv_head_stride = p->dim_v;
    x.q_row_stride = x.dq_row_stride = int64_t(p->heads) * p->dim;
    x.k_row_stride = x.dk_row_stride = int64_t(p->heads_kv) * p->dim;
    x.v_row_stride = x.dv_row_stride = int64_t(p->heads_kv) * p->dim_v;
    x.o_row_stride = x.do_row_stride = int64_t(p->heads) * p->dim_v;
    x.q_batch_stride = x.dq_batch_stride = p->seq_q * x.q_row_stride;
    x.k_batch_stride = x.dk_batch_stride = p->seq_kv * x.k_row_stride;
    x.v_batch_stride = x.dv_batch_stride = p->seq_kv * x.v_row_stride;
    x.o_batch_stride = x.do_batch_stride = p->seq_q * x.o_row_stride;
    x.v_dim_stride = 1;

    x.softmax_lse_ptr = const_cast<void*>(p->logsumexp);
    x.softmax_lse_log2_ptr = base + at.logsumexp;
    x.dsoftmax_sum = base + at.delta;
    x.dq_accum_ptr = base + at.dq;
    x.dq_semaphore = reinterpret_cast<int*>(base + at.dq_turn);
    if (p->heads != p->heads_kv) {
        x.dk_accum_ptr = base + at.dk;
        x.dv_accum_ptr = base + at.dv;
        if (p->deterministic) {
            x.dk_semaphore = reinterpret_cast<int*>(base + at.dk_turn);
            x.dv_semaphore = reinterpret_cast<int*>(base + at.dv_turn);
        }
    }
    const auto queue = static_cast<cudaStream_t>(stream);
    if (at.bytes > at.zeros)
        if (const char* why = failed(cudaMemsetAsync(base + at.zeros, 0, at.bytes - at.zeros, queue))) return why;
    code (*p)(x, queue);
    return failed(cudaPeekAtLastError());
}

}  // extern "C"
