"""What a call of the operator needs besides its tensors' addresses: the kernel, its launcher, strides and workspaces. Kept by shapes."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from .. import backends
from ..backends.launch import Fixed, Launcher, View, launcher
from ..check import choose
from ..check.ahead import load_all
from ..check.contender import Contender
from ..check.request import Request
from ..fault import DataFault, Fault, UsageFault
from ..formula import Given
from ..kernel import Device, Kernel, NoSuchPass, catalogue, include_closure, is_path, parts, planner
from ..kernel.expression import round_up
from ..problem import CACHE_DTYPES, DTYPE_BYTES, PASSES, READS, SPELLINGS, WRITES, Problem
from .words import depth_of_caller, in_python, lacks, told

#: torch.cuda.current_stream(index).cuda_stream without the object around it.
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)

#: Whether torch's current stream is captured into a CUDA graph.
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

#: torch.empty_strided(size, stride, dtype) on the CPU and on the current GPU, in half its time: what torch.compile's code allocates by.
_EMPTY = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
_GUARDS = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_ADDRESS = torch.Tensor.data_ptr
_CURRENT = getattr(torch._C, "_cuda_getDevice", lambda: None)


def alike(*tensors: Any) -> Callable[..., bool] | None:
    """Whether other tensors are as these in type, dispatch keys (with the thread's own), dtype, device, requires_grad, shape and strides.

    torch.compile's check, in C++: all that a call asks of its tensors, in a fifth of the time. It answers no where a tensor comes twice.
    None in that case, and in a torch without it.
    """
    if _GUARDS is None or len(set(map(id, tensors))) < len(tensors):
        return None
    check: Callable[..., bool] = _GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def storage(dtype: Any) -> str:
    """What a problem calls a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return SPELLINGS.get(name, name)


def current_stream(index: int | None) -> int | None:
    """The handle of torch's current stream on a GPU; None for the CPU."""
    return None if index is None else _RAW_STREAM(index)


# -- which kernel -----------------------------------------------------------------------------------------------------


_said: set[str] = set()


def say_once(text: str) -> None:
    """Warn, once in a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=depth_of_caller())


@cache
def backend_of(device: Any) -> backends.Backend:
    """The backend of a torch device. Raises UsageFault for another than CPU and CUDA, EnvironmentFault without CuPy or a compiler."""
    if device.type == "cpu":
        return backends.pick("cpu")
    if device.type != "cuda":
        raise UsageFault(f"no kernel runs on {device.type} tensors", "there are two backends, CUDA and the CPU", "move them to cuda or cpu")
    with torch.cuda.device(device):  # torch's current device stays what it is
        return backends.pick(f"cuda:{device.index}")


def kernels_of(spec: str, passes: tuple[str, ...], problem: Problem, device: Device, deterministic: bool) -> Mapping[str, Kernel]:
    """The kernel of a spec for each of the passes, all of which take the problem. Raises UsageFault as choose does."""
    if spec != choose.AUTO:
        return _named(spec, passes, problem, device, deterministic)
    return automatic(passes, problem, device, deterministic).kernels


def warn_of_lower(kernels: Mapping[str, Kernel], problem: Problem, device: Device, deterministic: bool) -> None:
    """Say once where auto takes a lower step than it usually does, and why. Nothing on the CPU engine, where no step is fast."""
    if device.kind == "cpu":
        return
    usual = automatic(tuple(kernels), Problem.of(1, 1, 4096, 64, dtype=problem.dtype), device, deterministic)
    lower = any((kernel.number or 0) < (usual.kernels[each].number or 0) for each, kernel in kernels.items())
    if lower and (why := _refusal(usual, problem, device)):  # else a header leaves small problems to a lower step
        names = " and ".join(dict.fromkeys(kernel.name for kernel in kernels.values()))
        say_once(f"attention is computed by {names}, a lower step than usual: {in_python(why)}")


def _found(spec: str, passes: tuple[str, ...], dtype: str) -> Mapping[str, Kernel]:
    """The kernels of a name or path by pass. Raises UsageFault where there is none, for a peer, and where one has no such pass."""
    try:
        found = choose.contender(spec, _asked(passes))
    except NoSuchPass as fault:
        raise NoSuchPass(fault.what, *lacks(fault, spec, passes, dtype)) from None
    if found.peer:
        raise UsageFault(f"{found.name} is no kernel of ours", "it is a library's attention", "name a kernel: fa-cli list")
    return found.kernels


def _named(spec: str, passes: tuple[str, ...], problem: Problem, device: Device, deterministic: bool) -> Mapping[str, Kernel]:
    """The kernels of a name or path by pass. What they cannot is told now, the backward pass's before the forward pass has run."""
    made = {}
    try:
        found = _found(spec, passes, problem.dtype)
    except NoSuchPass:
        if problem.formulas:  # a mask that its forward pass does not take either is said first
            with suppress(NoSuchPass):
                for kernel in _found(spec, PASSES[:1], problem.dtype).values():
                    planner.plan(kernel, problem, device)
        raise
    for pass_, kernel in found.items():
        if deterministic and True not in kernel.forms:
            raise UsageFault(
                f"{kernel.label} has no deterministic form", "its header says deterministic = false", "use deterministic=False"
            )
        made[pass_] = kernel.made_deterministic() if deterministic else kernel
        planner.plan(made[pass_], problem, device)
    return made


def _asked(passes: tuple[str, ...], problem: Problem | None = None, deterministic: bool = False) -> Request:
    return Request(choose.AUTO, "both" if len(passes) > 1 else passes[0], problem, deterministic=deterministic)


def automatic(passes: tuple[str, ...], problem: Problem, device: Device, deterministic: bool) -> Contender:
    """What auto takes, without a word about what it does not. Raises UsageFault as choose does."""
    if problem.widest > (most := widest(problem.dtype, device)):
        what = f"no kernel of the ladder takes head dim {problem.widest}"
        raise UsageFault(
            what,
            f"the widest is {most} in {problem.dtype} on this device",
            "sdpa leaves wider ones to torch's own; kernel= takes a file of your own",
        )
    return choose.choose(_asked(passes, problem, deterministic), device)[0][0]


@cache
def widest(dtype: str, device: Device) -> int:
    """The widest head dim that a kernel of the ladder takes in a type on a device."""
    able = [each for each in catalogue() if dtype in each.dtypes and (device.kind == "cpu" or each.runs_on(device.arch, dtype))]
    return max((kernel.head_dims[-1] for kernel in able), default=0)


def _refusal(contender: Contender, problem: Problem, device: Device) -> str:
    """Why a contender does not take a problem; empty where it does."""
    try:
        for kernel in contender.kernels.values():
            planner.plan(kernel, problem, device)
    except UsageFault as fault:
        return fault.what
    return ""


#: What has a value for each query: logsumexp, and its gradient, which a call may be without.
_SCORES = ("logsumexp", "dlogsumexp")


def error_of(fault: Fault) -> Exception:
    """A fault as what torch's users expect, in their words; it is the cause."""
    return ValueError(told(fault)) if isinstance(fault, (UsageFault, DataFault)) else RuntimeError(told(fault))


# -- a call -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A launcher for tensors of certain shapes and strides, and all of a call that does not depend on their addresses."""

    launch: Launcher
    fixed: Fixed | None  # the same for these strides; None where they, or a head dim, ask for copies; an address may, too
    given: tuple[str, ...]  # the inputs in the order of a call, without logsumexp
    device: Any
    index: int | None  # the GPU's, None for the CPU
    outputs: Mapping[str, tuple[int, int, int]]  # the strides of the outputs (logsumexp left out) as torch makes them: contiguous
    made: tuple[tuple[tuple[int, ...], tuple[int, ...], Any], ...]  # sizes, strides and dtype of each output, logsumexp last
    scores: tuple[int, int]  # heads and rows of logsumexp
    plain: bool  # its tensors must be contiguous
    mapped: frozenset[str]  # the inputs that the kernel reads through tensor maps
    room: int  # bytes of all workspaces but those that are kept
    spaces: tuple[int, ...]  # where each of them starts; a kept one from the start of what is kept, as its complement
    once: int  # bytes of the workspaces that are zeroed once, and kept
    kept: dict[int, tuple[int, Any]]  # by stream, their address and memory
    allocate: Any  # of _EMPTY
    #: Of a forward pass: backward passes behind it, without and with a gradient of logsumexp; of each, whether tensors are as its were.
    gradients: tuple[list[tuple[Callable[..., bool], Ready]], ...]

    def __call__(self, given: tuple[Any, ...], scores: tuple[Any, ...] = ()) -> list[Any]:
        """Enqueue the pass and return its outputs, contiguous: of the forward pass O and logsumexp, of the backward pass dQ, dK, dV.

        given: its inputs (batch, heads, rows, columns) in order. scores: for a backward pass logsumexp, contiguous, and its gradient
        where there is one. Raises what torch's users expect: see error_of.
        """
        allocate = self.allocator()
        made = list(starmap(allocate, self.made))
        stream = current_stream(self.index)
        try:
            if self.fixed is not None:
                addresses = list(map(_ADDRESS, (*given, *made, *scores)))
                if self.spaces:
                    starts, _held = self.workspaces(stream, allocate)  # memory lives until the pass is enqueued
                    addresses += starts
                if self.fixed(addresses, stream):
                    return made
            self.copying(given, made, scores, stream)
        except BaseException as error:
            self.forget(stream)
            if isinstance(error, Fault):
                raise error_of(error) from error
            raise
        return made

    def allocator(self) -> Any:
        """torch.empty_strided(size, strides, dtype) on this device."""
        if self.allocate and (self.index is None or self.index == _CURRENT()):
            return self.allocate
        return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=self.device)

    def copying(self, given: tuple[Any, ...], made: list[Any], scores: tuple[Any, ...], stream: int | None) -> None:
        """The same, with copies of what no kernel can read or write where it lies."""
        heads, rows = self.scores
        scores = (*made[len(self.outputs) :], *scores)
        views = {name: View(tensor.data_ptr(), heads * rows, rows, 1) for name, tensor in zip(_SCORES, scores, strict=False)}
        held = []  # copies live until the pass is enqueued; torch gives their memory only to what comes later on this stream
        for name, tensor in zip(self.given, given, strict=True):
            view = self.view(tensor, name in self.mapped)
            if view is None:
                held.append(self.rows_like(tensor).copy_(tensor))
                view = View(held[-1].data_ptr(), *held[-1].stride()[:3])
            views[name] = view
        padded = []
        for name, tensor in zip(self.outputs, made, strict=False):
            if self.pitch(tensor) == tensor.shape[3]:
                views[name] = View(tensor.data_ptr(), *self.outputs[name])
            else:
                wide = self.rows_like(tensor)
                padded.append((tensor, wide))
                views[name] = View(wide.data_ptr(), *wide.stride()[:3])
        starts, _held = self.workspaces(stream, self.allocator())
        self.launch(views, starts, stream)
        for tensor, wide in padded:
            tensor.copy_(wide)

    def workspaces(self, stream: int | None, allocate: Any) -> tuple[list[int], Any]:
        """The address of each workspace, and the memory of this call that they are in."""
        space: Any = allocate((self.room,), (1,), torch.uint8) if self.room else None
        start = space.data_ptr() if self.room else 0
        if not self.once:
            return [start + offset for offset in self.spaces], space
        if stream and is_capturing():  # the graph's own: it may be replayed beside calls and other graphs
            kept = torch.zeros(self.once, dtype=torch.uint8, device=self.device)
            first, space = kept.data_ptr(), (space, kept)
        else:
            first = self.kept_for(stream)
        return [start + offset if offset >= 0 else first + ~offset for offset in self.spaces], space

    def kept_for(self, stream: int | None) -> int:
        """The address of the workspaces that are kept for a stream."""
        which = _stream_key(stream)
        if which not in self.kept:
            self.kept[which] = _zeros(self.launch.backend, self.once)
        return self.kept[which][0]

    def forget(self, stream: int | None) -> None:
        """After a pass that died in the middle on the CPU: it left what no other should find. A GPU's process runs nothing more then."""
        if stream is None:
            self.kept.pop(_stream_key(stream), None)

    def view(self, tensor: Any, mapped: bool = False) -> View | None:
        """Where a tensor is; None where its rows are not as a kernel wants them, by a tensor map or by its address."""
        if self.plain:
            return View(tensor.data_ptr(), *tensor.stride()[:3]) if tensor.is_contiguous() else None
        address, (batch, head, row, step), size = tensor.data_ptr(), tensor.stride(), tensor.element_size()
        if step != 1 or (address | (batch | head | row) * size) & 15 or row >= _FAR:
            return None
        if mapped and _overlaps(tensor.shape, tensor.stride()):
            return None
        if (pitch := self.pitch(tensor)) != tensor.shape[3]:  # the last row may end where its memory ends
            last = sum((count - 1) * stride for count, stride in zip(tensor.shape[:3], (batch, head, row), strict=True))
            if (tensor.storage_offset() + last + pitch) * size > tensor.untyped_storage().nbytes():
                return None
        return View(address, batch, head, row)

    def rows_like(self, tensor: Any) -> Any:
        """Memory for a tensor of this shape with rows as a kernel wants them."""
        return tensor.new_empty((*tensor.shape[:3], self.pitch(tensor)))[..., : tensor.shape[3]]

    def pitch(self, tensor: Any) -> int:
        """Elements of a row of a tensor that a kernel may read: its columns, up to the next 16 bytes."""
        return _pitch(int(tensor.shape[3]), tensor.element_size(), self.plain)


#: cudaStreamPerThread: one handle, and a stream of each thread.
_PER_THREAD = 2


@cache
def _kept(device: Any, path: Path, source_hash: str, macros: tuple[tuple[str, str], ...], size: int) -> dict[int, tuple[int, Any]]:
    """By stream, the workspaces that are zeroed once, of all calls of one compiled kernel: never on two streams, nor in a CUDA graph.

    A stream runs its passes one after the other, and a kernel leaves there what no answer depends on, so the next finds it as it needs it.
    A thread of the CPU counts as a stream. They are kept until the process ends: a few bytes for each compiled kernel and stream.
    """
    made: dict[int, tuple[int, Any]] = {}
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=made.clear)  # a thread that was not copied may have been in the middle of a pass
    return made


def _stream_key(stream: int | None) -> int:
    """A number of its own for each stream, and for each thread of the CPU."""
    return -threading.get_ident() if stream is None or stream == _PER_THREAD else stream


def _zeros(backend: backends.Backend, size: int) -> tuple[int, Any]:
    """Zeroed memory of a backend and its address, which any stream may use at once. It is none of torch's, which may belong to a pool of CUDA graphs."""
    with backend.current():
        made = backend.memory(size)
        backend.fill(made, 0)
        backend.get(made)  # waits
        return backend.address(made), made


#: What was compiled for both passes: of each kernel its path, its text's hash and its macros.
_loaded: set[tuple[Any, ...]] = set()


def _load_together(backend: backends.Backend, kernels: tuple[Kernel, ...], problem: Problem) -> None:
    """Compile the kernels of both passes at the same time, in threads, before the first of them runs: else one waits for the other.

    What does not compile says so where it is called.
    """
    plans = [planner.plan(kernel, problem, backend.device()) for kernel in kernels]
    key = (id(backend), *((k.path, k.source_hash, plan.macros) for k, plan in zip(kernels, plans, strict=True)))
    if key not in _loaded:
        of = {kernel.pass_: kernel for kernel in kernels}
        load_all(backend, [(Contender("both", of), problem)], tuple(of))
        _loaded.add(key)


@lru_cache(maxsize=1024)
def ready(
    pass_: str,
    spec: str,
    stamp: tuple[tuple[str, tuple[int, ...]], ...],
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[Any, ...],
    devices: tuple[Any, ...],
    causal: bool,
    scale: float | None,
    causal_shift: int | None,
    deterministic: bool,
    trains: bool,
    dlogsumexp: bool,
    mask: str | None = None,
    score: str | None = None,
    tensors: tuple[Given, ...] = (),
    page_size: int = 0,
    sinks: str | None = None,
) -> Ready | None:
    """What a call needs, from q's, k's and v's shapes, dtypes and devices and the strides of all it reads (logsumexp left out) on.

    None where a tensor is empty and there is nothing to launch. stamp is part of the key only (:func:`edited`): a file that was written is
    read again. page_size: K and V are pools of pages of so many keys, whose strides theirs are, of sequences with at most as many keys as their
    shapes say. Raises ValueError for tensors that do not belong together, UsageFault for what the kernel does not take, and as
    :func:`backends.launch.launcher` does.
    """
    check(shapes, dtypes, devices)
    (batch, heads, seq, dim), (_, heads_kv, seq_kv, _), (*_, dim_v) = shapes
    dtype, passes = storage(dtypes[0]), PASSES if trains or pass_ == "backward" else ("forward",)
    if not all(math.prod(shape) for shape in shapes):
        if spec != choose.AUTO:
            _found(spec, passes, dtype)
        return None
    sizes = (batch, heads, seq, dim, heads_kv, seq_kv)
    problem = Problem.of(
        *sizes, dtype, causal, scale, causal_shift, mask, score, tensors, sinks, dim_v, page_size, dtype_kv=storage(dtypes[1])
    )
    problem = replace(problem, lengths=())  # each call has its own
    backend = backend_of(devices[0])
    kernels = kernels_of(spec, passes, problem, backend.device(), deterministic)
    if spec == choose.AUTO and not problem.has_own_dtype_kv:  # of such a cache there is one step
        warn_of_lower(kernels, problem, backend.device(), deterministic)
    if pass_ == "forward" and trains:
        _load_together(backend, tuple(kernels.values()), problem)
    made = launcher(backend, kernels[pass_], problem)
    if dlogsumexp and not made.loaded.kernel.logsumexp_gradient:
        able = [k.name for k in catalogue() if k.pass_ == "backward" and k.logsumexp_gradient and dtype in k.dtypes and not k.variant_of]
        raise UsageFault(
            f"{made.loaded.kernel.label} takes no gradient of logsumexp",
            "its header does not say logsumexp_gradient = true",
            f"use one of {', '.join(able)}, or detach logsumexp",
        )
    plan, starts, room, once = made.loaded.plan, [], 0, 0
    for space in plan.workspaces:
        if space.init == "zero_once":
            starts.append(~once)
            once += round_up(space.bytes, 256)
        else:
            starts.append(room)
            room += round_up(space.bytes, 256)
    plain = any(made.plain)
    given = tuple(name for name in READS[pass_] if name != "logsumexp")
    outputs = {name: _contiguous(problem.shape(name)) for name in WRITES[pass_] if name != "logsumexp"}
    mapped = frozenset(map_.tensor for map_ in plan.tensor_maps)
    size = {name: DTYPE_BYTES[problem.tensor_dtype(name)] for name in (*given, *outputs)}
    fits = all(_pitch(problem.row_length(name), size[name], plain) == problem.row_length(name) for name in size) and all(
        _fits(problem.shape(name), steps, size[name], plain) and not (name in mapped and _overlaps(problem.shape(name), steps))
        for name, steps in zip(given, strides, strict=True)
    )
    lse = ((batch, heads, seq), (heads * seq, seq, 1), torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    logsumexp = (lse,) if pass_ == "forward" else ()
    written = torch.bfloat16 if problem.is_float8 else dtypes[0]
    every = (
        dict(zip(given, ((steps[0], steps[1], steps[2]) for steps in strides), strict=True))
        | outputs
        | dict.fromkeys(_SCORES[: 1 + dlogsumexp], (heads * seq, seq, 1))
    )
    return Ready(
        launch=made,
        fixed=made.fixed(every) if fits else None,
        given=given,
        device=devices[0],
        index=devices[0].index if devices[0].type == "cuda" else None,
        outputs=outputs,
        made=tuple((problem.shape(name), (*steps, 1), written) for name, steps in outputs.items()) + logsumexp,
        scores=(heads, seq),
        plain=plain,
        mapped=mapped,
        room=room,
        spaces=tuple(starts),
        once=once,
        kept=_kept(devices[0], made.loaded.kernel.path, made.loaded.kernel.source_hash, plan.macros, once),
        allocate=_EMPTY.get(devices[0].type),
        gradients=([], []),
    )


def _pitch(columns: int, size: int, plain: bool) -> int:
    """Elements of a row that a kernel may read, of elements of `size` bytes."""
    return columns if plain else round_up(columns * size, 16) // size


def _contiguous(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The strides of batch, head and row, as torch makes them."""
    return shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]


#: Elements from row to row from which on a tensor is copied: kernels index a tile, of at most 256 rows, with 32 bits.
_FAR = 2**31 // 256


def _fits(shape: tuple[int, ...], strides: tuple[int, ...], size: int, plain: bool) -> bool:
    """Whether a kernel takes these strides as they are: contiguous where its parameters are plain, else rows at multiples of 16 bytes."""
    if plain:
        return all(count == 1 or stride == want for count, stride, want in zip(shape, strides, (*_contiguous(shape), 1), strict=True))
    return strides[3] == 1 and strides[2] < _FAR and not any(stride * size & 15 for stride in strides[:3])


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether rows may share memory, as in an expanded tensor: TMA is told of none that are nearer to each other than a row is long."""
    return any(count > 1 and stride < shape[3] for count, stride in zip(shape[:3], strides[:3], strict=True))


def check(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...], devices: tuple[Any, ...]) -> None:
    """Raise ValueError where q, k and v do not belong together."""
    text = ", ".join(str(tuple(shape)) for shape in shapes)
    if any(len(shape) != 4 for shape in shapes):
        raise _wrong(f"q, k and v have the shapes {text}", f"attention takes {_LAYOUT}", "unsqueeze(0) adds a batch or a head")
    q, k, v = shapes
    if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3]:
        why = "k and v must have one shape but for v's head_dim, and q the batch and head_dim of k"
        raise _wrong(
            f"q, k and v do not belong together: {text}", why, f"attention takes {_LAYOUT}; sdpa leaves other cases to torch's own"
        )
    if v[3] and not q[3]:
        why = f"v has {v[3]} columns, so O would be v's mean, and no kernel has scores of a head_dim of 0"
        raise _wrong(f"q and k have a head_dim of 0: {text}", why, "sdpa leaves it to torch's own")
    if q[1] % k[1] if k[1] else q[1]:
        hint = f"attention takes {_LAYOUT}: of (batch, rows, heads, head_dim) transpose(1, 2) makes it"
        raise _wrong(f"{q[1]} query heads cannot share {k[1]} key heads evenly", "heads_kv must divide heads_q", hint)
    check_kinds(dtypes, devices)
    if storage(dtypes[0]) not in DTYPE_BYTES:
        raise _wrong(f"q, k and v are {dtypes[0]}", f"kernels take {', '.join(DTYPE_BYTES)}", "q.to(torch.bfloat16), k and v too")


_LAYOUT = "(batch, heads, rows, head_dim)"


def _wrong(what: str, why: str, hint: str) -> ValueError:
    return ValueError(str(UsageFault(what, why, hint)))


def check_kinds(dtypes: tuple[Any, ...], devices: tuple[Any, ...]) -> None:
    """Raise ValueError where q, k and v are of more than one dtype, but for a cache of 8 bits, or device."""
    q, k, v = dtypes
    if k != v or (q != k and storage(k) not in CACHE_DTYPES.get(storage(q), ())) or len(set(devices)) > 1:
        kinds = ", ".join(f"{dtype} on {device}" for dtype, device in zip(dtypes, devices, strict=True))
        raise _wrong(f"q, k and v are {kinds}", "they must be of one dtype and on one device", "k.to(q), v.to(q)")


#: By the path of a kernel: the files that it is made of, headers too, each with its :func:`_stamp` when they were looked up.
_made_of: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}


def edited(spec: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The files of a path and their stamps, so that a kernel that is being written is taken as it is now; nothing for a name."""
    if not is_path(spec):
        return ()
    path = os.path.abspath(spec)
    known = _made_of.get(path)
    if known is None or any(_stamp(file) != stamp for file, stamp in known):
        files: dict[str, None] = {}
        for part in map(os.path.abspath, filter(is_path, parts(spec))):
            stem = part.removesuffix(".cu").removesuffix("_forward").removesuffix("_backward")
            files |= dict.fromkeys((part, f"{stem}_forward.cu", f"{stem}_backward.cu"))  # one that is not there yet, too
        there = (str(each) for file in files if os.path.isfile(file) for each in include_closure(Path(file)))
        known = _made_of[path] = tuple((file, _stamp(file)) for file in dict.fromkeys((*files, *there)))
    return known


def _stamp(file: str) -> tuple[int, ...]:
    """What differs after a file was written or replaced; nothing where there is none."""
    try:
        about = os.stat(file)
    except OSError:
        return ()
    return about.st_mtime_ns, about.st_size, about.st_ino
