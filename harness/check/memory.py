"""How much host memory judging a problem on the CPU engine takes, before anything is allocated.

The tensors are the least of it. The reference widens the inputs to float64 and works on copies of the keys and values of a tile; each
kernel has its tensors in device memory, which is host memory here, with copies of its inputs to compare with; the baselines are float32.
:func:`need` adds up what is alive at the peak of each of these phases. tests/device/test_memory.py measures it: never less than
the resident memory that a run reaches, and at most 1.5 times that where it is more than 100 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dataset.memory import available_memory
from ..fault import UsageFault
from ..problem import DTYPE_BYTES, READS, WRITES, Problem
from . import baselines, reference, rounded

#: What numpy's and BLAS's own temporaries and the allocator add, measured: a share of it all, and bytes in any case.
SLACK, FIXED = 1.2, 16 << 20


def need(problem: Problem, passes: Sequence[str], workspaces: Sequence[int] = (0,)) -> int:
    """The bytes of host memory that the passes need at their peak.

    workspaces: for each kernel that is run side by side, the bytes of its workspaces; its tensors stay until the last one is timed.
    """
    p, backward = problem, "backward" in passes
    q, k = p.batch * p.heads_q * p.seq_q * p.widest, p.batch * p.heads_kv * p.seq_kv * p.widest  # of the larger head dim
    loaded = (2 * q if backward else q) + 2 * k
    tensors = {name: _device(p, name) for name in (*READS["backward"], *WRITES["backward"])}
    inputs = DTYPE_BYTES[p.dtype] * (loaded - 2 * k) + DTYPE_BYTES[p.dtype_kv] * 2 * k
    held = 8 * (2 * q + 2 * k if backward else q)  # the reference
    # The reference: inputs in float64, outputs, and of a tile what its noise takes: squares of keys and values, and of P.
    heads, scores = _tile(p, p.heads_q // p.heads_kv, reference.TILE_CPU)
    widest = 8 * (loaded + q + 2 * heads * p.seq_kv * p.widest + 4 * scores)
    if backward:
        widest = max(widest, 8 * (loaded + 2 * q + 9 * k + 4 * scores))
    # The kernels: each with its tensors, outputs on the host, and copies of the inputs of the pass that runs.
    kept = sum(tensors[name] for pass_ in passes for name in (*READS[pass_], *WRITES[pass_], *WRITES[pass_]))
    devices = kept * len(workspaces) + sum(workspaces)
    originals = max(sum(tensors[name] for name in READS[pass_]) for pass_ in passes)
    # The judge: the inputs, O of each way and a tile in float32 with its operands in float64, or what compares a tensor in float64.
    found = 4 * (2 * q + (4 * (q + 2 * k) if backward else 0))
    heads, scores = _tile(p, 1, baselines.TILE_CPU, rounded.CHUNK if backward else 1)
    ways = 4 * (loaded + 2 * heads * p.seq_kv * p.widest + 9 * scores + (6 * q + 2 * k if backward else 2 * q))
    compared = 8 * 15 * max(q, k if backward else 0)  # with the moments: errors of the kernel and of three baselines, and their weights
    return int(SLACK * (inputs + max(widest, held + devices + max(originals, found + max(ways, compared))))) + FIXED


def check(problem: Problem, passes: Sequence[str], workspaces: Sequence[int] = (0,)) -> None:
    """Raise UsageFault where the passes need more than 90 % of the free memory."""
    needed, free = need(problem, passes, workspaces), available_memory()
    if needed > 0.9 * free:
        why = f"checking it on the CPU takes {needed / 1e9:.3g} GB, 90 % of the memory is {0.9 * free / 1e9:.3g} GB"
        raise UsageFault(f"{problem.folder} is too large for this machine", why, "use a smaller --batch, --heads or --seq")


def _tile(p: Problem, group: int, limit: int, multiple: int = 1) -> tuple[int, int]:
    """The key heads of a tile and its scores: see reference.Grouped.tiles."""
    step = min(p.seq_q, max(multiple, limit // (group * p.seq_kv)))
    heads = max(1, min(p.batch * p.heads_kv, limit // (group * p.seq_kv * step)))
    return heads, heads * group * step * p.seq_kv


def _device(p: Problem, tensor: str) -> int:
    """Bytes of a tensor in device memory, where its rows are padded."""
    size = p.tensor_bytes(tensor)
    return size if tensor == "logsumexp" else size // p.row_length(tensor) * p.row_pitch(tensor)
