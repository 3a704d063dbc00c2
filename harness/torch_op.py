"""A kernel of the ladder, or any kernel file, as a PyTorch operator with a gradient: ``from fa_cli import attention``.

attention(q, k, v) enqueues a kernel on torch's current stream and on the tensors' own device; on CPU tensors it runs on the CPU engine.
Nothing is copied unless rows are not as <fa/args.cuh> wants them (16-byte aligned, head_dim contiguous), and nothing is allocated but
outputs and workspaces. The operators are fa::forward and fa::backward, made by torch.library.custom_op, so that torch.compile,
checkpointing and CUDA graphs take them as they take torch's own.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch

from . import backends, choose
from .backends.launch import Launcher, View, launcher
from .check.contender import Contender
from .fault import DataFault, Fault, UsageFault
from .kernel.expression import round_up
from .kernel.kernel import Device, Kernel, NoSuchPass, catalogue, is_path
from .problem import DTYPE_BYTES, PASSES, Problem

#: What torch calls where sdpa does not cover a case, kept in case someone puts sdpa in its place.
_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
#: torch.cuda.current_stream(index).cuda_stream without the object around it.
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_WIDEST = max(kernel.head_dims[-1] for kernel in catalogue())
_DTYPES = tuple(getattr(torch, name) for name in DTYPE_BYTES)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
    return_lse: bool = False,
    causal_shift: int | None = None,
) -> Any:
    """softmax(scale * q k^T + mask) v by a kernel of the ladder, like q; with return_lse also logsumexp (batch, heads, rows), float32.

    q: (batch, heads_q, seq_q, head_dim), k and v: (batch, heads_kv, seq_kv, head_dim), of one dtype and device and of any strides;
    heads_kv divides heads_q. scale is 1/sqrt(head_dim) by default. causal is aligned bottom-right: key j is visible to query i where
    j <= i + causal_shift, by default seq_kv - seq_q; torch's is_causal is causal_shift=0. A row that sees no key gives 0 and -inf.

    kernel: a name, number or alias of the ladder, the path of a .cu file, or "auto", the highest step that takes the case (both passes
    where a gradient is wanted; float32 is never rounded to tf32). Where auto takes a lower step than it usually does, it warns once.
    deterministic: the form of a kernel that gives the same bits on every run. Scores beyond the `logits` of a kernel's header are
    not looked for. Gradients flow to q, k and v, once, and not through logsumexp. Under autocast the inputs are cast as torch's are.

    Raises ValueError for what the kernel does not take, RuntimeError where it does not compile or run, with what, why and a hint.
    """
    if causal_shift is not None and not causal:
        raise ValueError("causal_shift is a mask's: without causal=True there is none")
    if torch.is_autocast_enabled(q.device.type):
        lower = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(lower) for t in (q, k, v))
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    o, lse = _FORWARD_OP(q, k, v, causal, scale, str(kernel), deterministic, causal_shift, trains)
    return (o, lse) if return_lse else o


#: The names of the kernels' first home as a torch extension.
attention_naive = partial(attention, kernel="naive")
attention_tiled = partial(attention, kernel="tiled")
attention_flash = partial(attention, kernel="fa2")


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention by our kernels: the same arguments, and its causal mask, aligned top-left.

    What they do not cover (attn_mask, dropout, value dims of another size, broadcasting, more than 256 head dims) goes to torch's
    own, which is said once. kernel and deterministic as for :func:`attention`, which says what is raised.
    """
    why = _uncovered(query, key, value, attn_mask, dropout_p, enable_gqa)
    if why:
        if not torch.compiler.is_compiling():
            _say_once(f"sdpa goes to torch's own: {why}")
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _TORCH_SDPA(query, key, value, **options)
    shape = query.shape
    if query.dim() != 4:  # leading dims are heads of one batch
        query, key, value = (t.reshape(1, -1, *t.shape[-2:]) for t in (query, key, value))
    shift = 0 if is_causal else None
    o = attention(query, key, value, causal=is_causal, scale=scale, kernel=kernel, deterministic=deterministic, causal_shift=shift)
    return o if len(shape) == 4 else o.reshape(shape)


def _uncovered(q: Any, k: Any, v: Any, mask: Any, dropout: float, gqa: bool) -> str:
    """What of a call of scaled_dot_product_attention is not covered; empty where all is."""
    if mask is not None:
        return "attn_mask is not covered"
    if dropout:
        return "dropout is not covered"
    if q.is_nested or k.is_nested or v.is_nested:
        return "nested tensors are not covered"
    if q.device.type not in ("cpu", "cuda"):
        return f"{q.device.type} tensors are not covered"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        return f"{q.dtype}, {k.dtype} and {v.dtype} are not covered"
    if not q.dim() == k.dim() == v.dim() >= 2 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        return "query, key and value of such shapes are not covered"
    if q.shape[-1] > _WIDEST:
        return f"more than {_WIDEST} head dims are not covered"
    same = q.shape[:-2] == k.shape[:-2]
    grouped = gqa and q.dim() == 4 and q.shape[0] == k.shape[0] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    return "" if same or grouped else "heads or batches of different numbers are not covered"


# -- which kernel -----------------------------------------------------------------------------------------------------


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)


@cache
def _backend(device: Any) -> backends.Backend:
    """The backend of a torch device. Raises UsageFault for another than CPU and CUDA, EnvironmentFault without CuPy or a compiler."""
    if device.type == "cpu":
        return backends.pick("cpu")
    if device.type != "cuda":
        raise UsageFault(f"no kernel runs on {device.type} tensors", "there are two backends, CUDA and the CPU", "move them to cuda or cpu")
    with torch.cuda.device(device):  # torch's current device stays what it is
        return backends.pick(f"cuda:{device.index}")


def _kernel(spec: str, pass_: str, passes: tuple[str, ...], problem: Problem, device: Device, deterministic: bool) -> Kernel:
    """The kernel of a spec for a pass, all of whose passes take the problem. Raises UsageFault as choose does."""
    if spec != choose.AUTO:
        try:
            found = choose.contender(spec, passes, deterministic=deterministic)
        except NoSuchPass as fault:
            able = [k.name for k in catalogue() if k.pass_ == "backward" and problem.dtype in k.dtypes]
            hint = f"for a gradient use one of {', '.join(able)}, which have both passes; without one torch.no_grad()"
            raise NoSuchPass(fault.what, fault.why, hint) from None
        if found.peer:
            raise UsageFault(f"{found.name} is no kernel of ours", "it is a library's attention", "name a kernel: fa-cli list")
        return found.kernels[pass_]
    found = _auto(passes, problem, device, deterministic)
    usual = _auto(passes, Problem.of(1, 1, 64, 64, dtype=problem.dtype), device, deterministic)
    if usual.name != found.name:
        _say_once(f"auto takes {found.name}: {_refusal(usual, problem, device)}")
    return found.kernels[pass_]


def _auto(passes: tuple[str, ...], problem: Problem, device: Device, deterministic: bool) -> Contender:
    return choose.choose([choose.AUTO], passes, [problem], device, deterministic=deterministic, tf32=False)[0][0]


def _refusal(contender: Contender, problem: Problem, device: Device) -> str:
    """Why a contender does not take a problem."""
    try:
        for kernel in contender.kernels.values():
            kernel.plan(problem, device)
    except UsageFault as fault:
        return fault.what
    return ""


# -- a call -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ready:
    """A launcher for tensors of certain shapes, and all of a call that does not depend on their addresses."""

    launch: Launcher
    stream: int | None  # the index of the GPU whose current stream is used
    size: int  # bytes of an element
    dim: int
    pitch: int  # elements of a row that a kernel may read: head_dim, up to the next 16 bytes
    plain: bool  # its tensors must be contiguous
    room: int  # bytes of all workspaces
    spaces: tuple[int, ...]  # where each of them starts
    zeroed: bool  # whether one of them is zeroed by whoever allocates it

    def __call__(self, given: Mapping[str, Any], made: Mapping[str, Any], lse: Any) -> None:
        """Enqueue the pass: inputs and outputs (batch, heads, rows, head_dim) by name, and logsumexp, contiguous, of either pass."""
        heads, rows = lse.shape[1:]
        views = {"logsumexp": View(lse.data_ptr(), heads * rows, rows, 1)}
        held = []  # copies live until the pass is enqueued; torch gives their memory only to what comes later on this stream
        for name, tensor in given.items():
            view = self.view(tensor)
            if view is None:
                held.append(self.rows_like(tensor).copy_(tensor))
                view = View(held[-1].data_ptr(), *held[-1].stride()[:3])
            views[name] = view
        padded = {}
        for name, tensor in made.items():
            into = tensor
            if self.pitch != self.dim:
                into = padded[name] = self.rows_like(tensor)
            views[name] = View(into.data_ptr(), *into.stride()[:3])
        addresses: list[int] = []
        if self.room:
            like = made["O"] if "O" in made else made["dQ"]
            space = (torch.zeros if self.zeroed else torch.empty)(self.room, dtype=torch.uint8, device=like.device)
            start = space.data_ptr()
            addresses = [start + offset for offset in self.spaces]
        self.launch(views, addresses, None if self.stream is None else _RAW_STREAM(self.stream))
        for name, rows_ in padded.items():
            made[name].copy_(rows_)

    def view(self, tensor: Any) -> View | None:
        """Where a tensor is; None where its rows are not as a kernel wants them."""
        if self.plain:
            return View(tensor.data_ptr(), *tensor.stride()[:3]) if tensor.is_contiguous() else None
        address, (batch, head, row, step) = tensor.data_ptr(), tensor.stride()
        if step != 1 or (address | (batch | head | row) * self.size) & 15:
            return None
        if self.pitch != self.dim:  # the last row may end where its memory ends
            last = sum((count - 1) * stride for count, stride in zip(tensor.shape[:3], (batch, head, row), strict=True))
            if (tensor.storage_offset() + last + self.pitch) * self.size > tensor.untyped_storage().nbytes():
                return None
        return View(address, batch, head, row)

    def rows_like(self, tensor: Any) -> Any:
        """Memory for a tensor of this shape with rows as a kernel wants them."""
        return tensor.new_empty((*tensor.shape[:3], self.pitch))[..., : self.dim]


@lru_cache(maxsize=1024)
def _ready(
    pass_: str,
    spec: str,
    edited: tuple[int, ...],
    device: Any,
    dtype: Any,
    q: tuple[int, ...],
    k: tuple[int, ...],
    causal: bool,
    scale: float | None,
    causal_shift: int | None,
    deterministic: bool,
    trains: bool,
) -> _Ready:
    """What a call needs, from the shapes of q and k on. edited is part of the key only: a file that was written is read again.

    Raises UsageFault for what the kernel does not take, and as :func:`backends.launch.launcher` does.
    """
    batch, heads, seq, dim = q
    problem = Problem.of(batch, heads, seq, dim, k[1], k[2], str(dtype).removeprefix("torch."), causal, scale, causal_shift)
    backend = _backend(device)
    passes = PASSES if trains or pass_ == "backward" else ("forward",)
    chosen = _kernel(spec, pass_, passes, problem, backend.device(), deterministic)
    made = launcher(backend, chosen, problem)
    size, plain = DTYPE_BYTES[problem.dtype], any(made.plain)
    starts, room = [], 0
    for space in made.loaded.plan.workspaces:
        starts.append(room)
        room += round_up(space.bytes, 256)
    zeroed = any(space.init == "zero_once" for space in made.loaded.plan.workspaces)
    pitch = dim if plain else round_up(dim * size, 16) // size
    index = device.index if device.type == "cuda" else None
    return _Ready(made, index, size, dim, pitch, plain, room, tuple(starts), zeroed)


def _edited(spec: str) -> tuple[int, ...]:
    """When the files of a path were written, so that a kernel that is being written is taken as it is now; nothing for a name."""
    if not is_path(spec):
        return ()
    stem = spec.removesuffix(".cu").removesuffix("_forward").removesuffix("_backward")
    files = dict.fromkeys((spec, f"{stem}_forward.cu", f"{stem}_backward.cu"))
    return tuple(os.stat(file).st_mtime_ns for file in files if os.path.isfile(file))


# -- the operators ----------------------------------------------------------------------------------------------------


def _outputs(q: Any) -> tuple[Any, Any]:
    """O and logsumexp of a call, not filled: contiguous whatever the strides of q, in torch's tracing as in a real call."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError where the tensors do not belong together."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention takes (batch, heads, rows, head_dim), not {q.dim()}, {k.dim()} and {v.dim()} dims")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"q, k and v do not belong together: {shapes}; k is like v, and batch and head_dim are those of q")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise ValueError(f"q, k and v are {kinds}: they must be of one dtype and on one device")


def _error(fault: Fault) -> Exception:
    """A fault as what torch's users expect; its text is kept, and it is the cause."""
    return ValueError(str(fault)) if isinstance(fault, (UsageFault, DataFault)) else RuntimeError(str(fault))


def _forward(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    scale: float | None,
    kernel: str,
    deterministic: bool,
    causal_shift: int | None,
    trains: bool,
) -> tuple[Any, Any]:
    _check(q, k, v)
    o, lse = _outputs(q)
    if not o.numel() or not k.numel():
        return o.zero_(), lse.fill_(math.nan if k.shape[2] else -math.inf)
    try:
        options = (causal, scale, causal_shift, deterministic, trains)
        ready = _ready("forward", kernel, _edited(kernel), q.device, q.dtype, q.shape, k.shape, *options)
        ready({"Q": q, "K": k, "V": v}, {"O": o}, lse)
    except Fault as fault:
        raise _error(fault) from fault
    return o, lse


def _backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    causal: bool,
    scale: float | None,
    kernel: str,
    deterministic: bool,
    causal_shift: int | None,
) -> tuple[Any, Any, Any]:
    _check(q, k, v)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    try:
        options = (causal, scale, causal_shift, deterministic, True)
        ready = _ready("backward", kernel, _edited(kernel), q.device, q.dtype, q.shape, k.shape, *options)
        given = {"Q": q, "K": k, "V": v, "O": o, "dO": do.to(q.dtype)}
        ready(given, {"dQ": dq, "dK": dk, "dV": dv}, lse.contiguous())
    except Fault as fault:
        raise _error(fault) from fault
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = options[:-1]


def _gradients(ctx: Any, do: Any, _: Any) -> tuple[Any, ...]:
    causal, scale, kernel, deterministic, shift = ctx.options
    made = _BACKWARD_OP(do, *ctx.saved_tensors, causal, scale, kernel, deterministic, shift)
    return (*(d if wanted else None for d, wanted in zip(made, ctx.needs_input_grad, strict=False)), None, None, None, None, None, None)


_OPTIONS = "bool causal, float? scale, str kernel, bool deterministic, SymInt? causal_shift"
_FORWARD = torch.library.custom_op(
    "fa::forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool trains) -> (Tensor, Tensor)",
)
_BACKWARD = torch.library.custom_op(
    "fa::backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dO, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
_FORWARD.register_fake(lambda q, *_: _outputs(q))
_BACKWARD.register_fake(lambda do, q, k, v, *_: tuple(t.new_empty(t.shape) for t in (q, k, v)))
_FORWARD.register_autograd(_gradients, setup_context=_save)
_FORWARD_OP, _BACKWARD_OP = torch.ops.fa.forward.default, torch.ops.fa.backward.default
