"""FlashAttention-3's backward pass, built from its source by experiments/peers/fa3_backward/build.sh: the wheel has no backward pass.

Shah et al. 2024, arXiv 2407.08608. Masks and windows are aligned bottom-right.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fault import EnvironmentFault, KernelFault, UsageFault
from ..formula import as_softcap, as_window
from ..problem import Problem
from .base import ANY_DIMS
from .on_torch import Step, Tensor, TorchPeer

#: The environment variable with the path of the library.
LIBRARY = "FA_CLI_FA3_BACKWARD"
BUILD = f"bash experiments/peers/fa3_backward/build.sh FOLDER; export {LIBRARY}=FOLDER/fa3_backward.so"
#: Scores that the forward pass of a backward pass has in memory at a time.
SCORES = 2**26

_POINTERS = ("q", "o", "grad_o", "k", "v", "logsumexp", "dq", "dk", "dv")
_INTEGERS = (
    "batch",
    "heads",
    "heads_kv",
    "seq_q",
    "seq_kv",
    "dim",
    "dim_v",
    "bfloat16",
    "causal",
    "left",
    "right",
    "deterministic",
    "device",
)


class Arguments(ctypes.Structure):
    """Fa3Backward of experiments/peers/fa3_backward/fa3_backward.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(frozen=True, kw_only=True)
class Fa3Source(TorchPeer):
    """The library's backward pass on (B, S, H, D) tensors, called as it is, without autograd. O and logsumexp of it are torch's, in float32."""

    heads_first: bool = False
    called: bool = False

    def absent(self, device: str) -> tuple[str, str] | None:
        """As Library.absent, and where the library is not there."""
        if absent := super().absent(device):
            return absent
        path = os.environ.get(LIBRARY)
        if not path:
            return f"FlashAttention-3's backward pass is in no wheel, and {LIBRARY} names no build of its source", BUILD
        return None if Path(path).is_file() else (f"{LIBRARY}={path} is no file", BUILD)

    def refuse(self, problem: Problem, pass_: str) -> None:
        """As TorchPeer.refuse, and what the library says, where there is one."""
        super().refuse(problem, pass_)
        if os.environ.get(LIBRARY) and (why := library().fa3_backward_refuses(ctypes.byref(self._arguments(problem)))):
            raise UsageFault(f"{self.name} does not take {problem.describe()} {pass_}", why.decode(), "leave it out: --peers")

    def start(self, problem: Problem, x: Mapping[str, Tensor], pass_: str) -> Step:
        """The step of the backward pass."""
        import torch

        ours, (q, k, v) = library(), (x[name] for name in ("Q", "K", "V"))
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode(0)  # else torch refuses cuBLAS
        try:
            o, logsumexp = forward(problem, q, k, v)
        finally:
            torch.set_deterministic_debug_mode(mode)
        given = self._arguments(problem)
        given.device = q.device.index or 0
        for name, tensor in {"q": q, "o": o, "grad_o": x["dO"], "k": k, "v": v, "logsumexp": logsumexp}.items():
            setattr(given, name, tensor.data_ptr())
        size = ours.fa3_backward_bytes(ctypes.byref(given))

        def step(kept: tuple[Tensor, ...] = (o, logsumexp)) -> list[Tensor]:  # its pointers are in `given`
            gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
            given.dq, given.dk, given.dv = (tensor.data_ptr() for tensor in gradients)
            workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
            stream = torch.cuda.current_stream().cuda_stream
            if why := ours.fa3_backward(ctypes.byref(given), workspace.data_ptr(), stream):
                raise KernelFault(f"{self.name} failed", why.decode(), "fa-cli doctor shows the GPU and its driver")
            return gradients

        return step

    def ran(self, step: Step, pass_: str) -> str:
        """What the library says it was built of."""
        return f"run_mha_bwd of {library().fa3_backward_source().decode()}"

    def _arguments(self, problem: Problem) -> Arguments:
        """Those that a problem says: all but the pointers and the device."""
        left, right = as_window(problem.mask) or (-1, -1)
        return Arguments(
            batch=problem.batch,
            heads=problem.heads_q,
            heads_kv=problem.heads_kv,
            seq_q=problem.seq_q,
            seq_kv=problem.seq_kv,
            dim=problem.head_dim,
            dim_v=problem.head_dim_v,
            bfloat16=problem.dtype == "bfloat16",
            causal=problem.causal,
            left=left,
            right=right,
            deterministic=self.deterministic,
            scale=problem.scale,
            softcap=as_softcap(problem.score or "") or 0,
        )


def library() -> Any:
    """The library that the environment names. Raises EnvironmentFault where it does not load."""
    path = os.environ.get(LIBRARY, "")
    try:
        return _loaded(path)
    except (OSError, AttributeError) as error:  # AttributeError: another library
        raise EnvironmentFault(f"{LIBRARY}={path} does not load", str(error), BUILD) from error


@functools.cache
def _loaded(path: str) -> ctypes.CDLL:
    found = ctypes.CDLL(path)
    for name in ("fa3_backward_source", "fa3_backward_refuses", "fa3_backward"):
        getattr(found, name).restype = ctypes.c_char_p
    found.fa3_backward_bytes.restype = ctypes.c_int64
    found.fa3_backward.argtypes = [ctypes.c_void_p] * 3
    return found


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O (B, S, H, Dv) in the storage type and logsumexp (B, H, S) of (B, S, H, D) tensors, computed in float32 by blocks of rows.

    A row without a visible key has O = 0 and logsumexp = -inf.
    """
    import torch

    left, right = as_window(problem.mask) or (problem.seq_q + problem.seq_kv,) * 2
    right, cap = 0 if problem.causal else right, as_softcap(problem.score or "")
    o = q.new_empty(problem.batch, problem.seq_q, problem.heads_q, problem.head_dim_v)
    logsumexp = q.new_empty(problem.batch, problem.heads_q, problem.seq_q, dtype=torch.float32)
    rows = max(1, SCORES // (problem.heads_q * problem.seq_kv))
    at_q, at_k = (torch.arange(length, device=q.device) for length in (problem.seq_q, problem.seq_kv))
    for b in range(problem.batch):
        keys, values = (x[b].float().transpose(0, 1)[:, None] for x in (k, v))  # (Hkv, 1, Skv, D)
        for start in range(0, problem.seq_q, rows):
            block = slice(start, start + rows)
            queries = q[b, block].float().transpose(0, 1).unflatten(0, (problem.heads_kv, -1))  # (Hkv, group, rows, D)
            s = queries @ keys.transpose(-1, -2) * problem.scale
            if cap:
                s = cap * torch.tanh(s / cap)
            behind = at_q[block, None] + problem.default_shift - at_k
            s.masked_fill_((behind > left) | (behind < -right), -torch.inf)
            sums = s.logsumexp(-1, keepdim=True)
            p = s.sub_(sums).exp_().nan_to_num_(0)  # -inf - -inf is NaN
            o[b, block] = (p @ values).flatten(0, 1).transpose(0, 1)
            logsumexp[b, :, block] = sums.flatten(0, 1).squeeze(-1)
    return o, logsumexp


PEERS = (
    Fa3Source(
        name="fa3-source",
        device="cuda",
        dtypes=("bfloat16", "float16"),
        passes=("backward",),
        modules=("torch",),
        install="pip install torch",
        row_bytes=16,
        dims_v=ANY_DIMS,
        bottom_right=True,
        forms=("window", "softcap"),
        arch=(90, 90),
    ),
)
