# mypy: ignore-errors
# (a kernel is not Python: its decorators, its parameters and tl.constexpr have no types a checker could follow)
"""FlashAttention-2 (Dao 2023, arXiv 2307.08691), forward and backward, in Triton. Imported only where triton is installed.

Tensors are contiguous (B, H, S, D), logsumexp and delta (B, H, S) float32. One program computes one tile of one head; the tiles of a head
have consecutive program ids. WIDTH is D rounded up to a power of two; the columns beyond D are zero. EVEN: all tiles are full, so loads
and stores need no mask. The causal mask is bottom-right: key k is visible to query row r iff k <= r + seq_kv - seq_q. Scores are
multiplied by log2(e), since the hardware's exponential is exp2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load(base, rows, count, D: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a (count, D) matrix as a (rows, WIDTH) tile, zero outside the matrix."""
    columns = tl.arange(0, WIDTH)
    at = base + rows[:, None] * D + columns[None, :]
    if EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(rows[:, None] < count) & (columns[None, :] < D), other=0.0)
    return tile


@triton.jit
def store(base, rows, count, tile, D: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Store a tile in a (count, D) matrix, rounded to the matrix's type."""
    columns = tl.arange(0, WIDTH)
    at = base + rows[:, None] * D + columns[None, :]
    if EVEN:
        tl.store(at, tile.to(base.dtype.element_ty))
    else:
        tl.store(at, tile.to(base.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < D))


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    scale,
    seq_q,
    seq_kv,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """O and logsumexp of a tile of BLOCK_Q query rows: online softmax over tiles of BLOCK_K keys (Algorithm 1)."""
    tiles = tl.cdiv(seq_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    q_base, kv_base = head * seq_q * D, head // group * seq_kv * D
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    shift = seq_kv - seq_q
    end = seq_kv
    if CAUSAL:
        end = tl.minimum(seq_kv, (tile + 1) * BLOCK_Q + shift)

    q = load(Q + q_base, rows, seq_q, D, WIDTH, EVEN)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for first in range(0, end, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        k = load(K + kv_base, keys, seq_kv, D, WIDTH, EVEN)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        if CAUSAL:
            s = tl.where((keys[None, :] <= rows[:, None] + shift) & (keys[None, :] < seq_kv), s, float("-inf"))
        elif not EVEN:
            s = tl.where(keys[None, :] < seq_kv, s, float("-inf"))
        row_max_new = tl.maximum(row_max, tl.max(s, 1))
        base = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)  # a row that is fully masked so far
        p = tl.exp2(s - base[:, None])
        factor = tl.exp2(row_max - base)
        row_sum = row_sum * factor + tl.sum(p, 1)
        v = load(V + kv_base, keys, seq_kv, D, WIDTH, EVEN)
        out = tl.dot(p.to(v.dtype), v, out * factor[:, None], input_precision="ieee")
        row_max = row_max_new

    empty = row_sum == 0.0
    out = out / tl.where(empty, 1.0, row_sum)[:, None]
    store(Out + q_base, rows, seq_q, out, D, WIDTH, EVEN)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * LN2)
    tl.store(Lse + head * seq_q + rows, lse, mask=rows < seq_q)


@triton.jit
def delta_kernel(Out, dO, Delta, rows_in_all, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """delta = rowsum(O * dO)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o = load(Out, rows, rows_in_all, D, WIDTH, False).to(tl.float32)
    do = load(dO, rows, rows_in_all, D, WIDTH, False).to(tl.float32)
    tl.store(Delta + rows, tl.sum(o * do, 1), mask=rows < rows_in_all)


@triton.jit
def dk_dv_kernel(
    Q,
    K,
    V,
    dO,
    Lse,
    Delta,
    dK,
    dV,
    scale,
    seq_q,
    seq_kv,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dK and dV of a tile of BLOCK_K keys: streams tiles of BLOCK_Q rows of Q and dO, of every query head of the group. S is transposed."""
    tiles = tl.cdiv(seq_kv, BLOCK_K)
    tile = tl.program_id(0) % tiles
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)
    kv_base = kv_head * seq_kv * D
    keys = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    shift = seq_kv - seq_q
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, tile * BLOCK_K - shift) // BLOCK_Q * BLOCK_Q

    k = load(K + kv_base, keys, seq_kv, D, WIDTH, EVEN)
    v = load(V + kv_base, keys, seq_kv, D, WIDTH, EVEN)
    dk = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        q_base, row_base = head * seq_q * D, head * seq_q
        for first in range(begin, seq_q, BLOCK_Q):
            rows = first + tl.arange(0, BLOCK_Q)
            q = load(Q + q_base, rows, seq_q, D, WIDTH, EVEN)
            do = load(dO + q_base, rows, seq_q, D, WIDTH, EVEN)
            lse = tl.load(Lse + row_base + rows, mask=rows < seq_q, other=0.0)
            delta = tl.load(Delta + row_base + rows, mask=rows < seq_q, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
            p = tl.exp2(s - lse[None, :] * LOG2E)
            if CAUSAL:
                seen = (keys[:, None] <= rows[None, :] + shift) & (keys[:, None] < seq_kv) & (rows[None, :] < seq_q)
                p = tl.where(seen, p, 0.0)
            elif not EVEN:
                p = tl.where((keys[:, None] < seq_kv) & (rows[None, :] < seq_q), p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    store(dK + kv_base, keys, seq_kv, dk * scale, D, WIDTH, EVEN)
    store(dV + kv_base, keys, seq_kv, dv, D, WIDTH, EVEN)


@triton.jit
def dq_kernel(
    Q,
    K,
    V,
    dO,
    Lse,
    Delta,
    dQ,
    scale,
    seq_q,
    seq_kv,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dQ of a tile of BLOCK_Q query rows: streams tiles of BLOCK_K rows of K and V."""
    tiles = tl.cdiv(seq_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    q_base, kv_base = head * seq_q * D, head // group * seq_kv * D
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    shift = seq_kv - seq_q
    end = seq_kv
    if CAUSAL:
        end = tl.minimum(seq_kv, (tile + 1) * BLOCK_Q + shift)

    q = load(Q + q_base, rows, seq_q, D, WIDTH, EVEN)
    do = load(dO + q_base, rows, seq_q, D, WIDTH, EVEN)
    lse = tl.load(Lse + head * seq_q + rows, mask=rows < seq_q, other=0.0)
    delta = tl.load(Delta + head * seq_q + rows, mask=rows < seq_q, other=0.0)
    dq = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for first in range(0, end, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        k = load(K + kv_base, keys, seq_kv, D, WIDTH, EVEN)
        v = load(V + kv_base, keys, seq_kv, D, WIDTH, EVEN)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.exp2(s - lse[:, None] * LOG2E)
        if CAUSAL:
            p = tl.where((keys[None, :] <= rows[:, None] + shift) & (keys[None, :] < seq_kv), p, 0.0)
        elif not EVEN:
            p = tl.where(keys[None, :] < seq_kv, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store(dQ + q_base, rows, seq_q, dq * scale, D, WIDTH, EVEN)


def step(problem, x, pass_):
    """A function that enqueues a pass and returns its outputs. x: Q, K, V[, dO] on the GPU. For a backward pass the forward runs here."""
    q, k, v = x["Q"], x["K"], x["V"]
    # Consumer cards have 99 KB of shared memory a block. (Triton's interpreter, on CPU tensors, has no such limit.)
    small = q.is_cuda and torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin < 160 << 10
    single = q.dtype == torch.float32
    width = max(16, triton.next_power_of_2(problem.head_dim))
    shape = (problem.scale, problem.seq_q, problem.seq_kv, problem.heads_q // problem.heads_kv)

    def launch(kernel, tensors, over_keys, block_q, block_k, warps, stages):
        even = problem.seq_q % block_q == 0 and problem.seq_kv % block_k == 0 and width == problem.head_dim
        heads, rows, block = (problem.heads_kv, problem.seq_kv, block_k) if over_keys else (problem.heads_q, problem.seq_q, block_q)
        kernel[(problem.batch * heads * triton.cdiv(rows, block),)](
            *tensors,
            *shape,
            D=problem.head_dim,
            WIDTH=width,
            CAUSAL=problem.causal,
            EVEN=even,
            BLOCK_Q=block_q,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
        )

    out, lse = torch.empty_like(q), torch.empty(problem.shape("logsumexp"), dtype=torch.float32, device=q.device)

    def forward():
        blocks = (128, 64, 8 if width > 64 else 4, 2 if small else 3)
        if single:  # on CUDA cores: tiles that do not spill registers
            blocks = (32, 32, 8, 1) if width > 64 else (64, 32, 8, 2)
        launch(forward_kernel, (q, k, v, out, lse), False, *blocks)
        return out, lse

    if pass_ == "forward":
        return forward
    forward()
    do, delta = x["dO"], torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def backward():
        rows = delta.numel()
        delta_kernel[(triton.cdiv(rows, 64),)](out, do, delta, rows, D=problem.head_dim, WIDTH=width, BLOCK=64)
        tall, flat, warps, stages = (64, 16, 8, 1) if single else (64, 32, 4, 2) if small else (128, 64, 8, 2)
        launch(dk_dv_kernel, (q, k, v, do, lse, delta, dk, dv), True, flat, tall, warps, stages)
        launch(dq_kernel, (q, k, v, do, lse, delta, dq), False, tall, flat, warps, stages)
        return dq, dk, dv

    return backward
