"""The base of the peers on torch tensors: data in, timing, memory, CUDA graphs, data out.

The scope is that of our kernels. Inputs are contiguous in the library's layout, (batch, heads, rows, head_dim) or (batch, rows, heads,
head_dim), before any timing. A forward pass runs without autograd. A backward pass runs alone, on an autograd graph whose forward ran
before: delta and conversions are timed, the forward is not. TF32 is off.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..array import Array, ArrayModule
from ..fault import EnvironmentFault, Fault, KernelFault, UsageFault
from ..problem import Problem
from .base import Library

#: A torch tensor, and a torch device. PyTorch is optional, so mypy does not follow it (pyproject.toml).
Tensor = Any
TorchDevice = Any

#: A differentiable attention of (q, k, v) that returns (O[, logsumexp]), all in the library's layout.
Attention = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]

#: One run: enqueues the pass and returns its outputs, (O[, logsumexp]) or (dQ, dK, dV), in the library's layout.
Step = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class TorchPeer(Library):
    """A peer whose attention is a differentiable function of torch tensors. heads_first: its layout is (B, H, S, D), else (B, S, H, D)."""

    heads_first: bool = True

    # -- of each family -----------------------------------------------------------------------------------------------

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """A function of (q, k, v) that returns (O[, logsumexp]). A mask and the like are made here, before any timing."""
        raise NotImplementedError

    def forced(self) -> contextlib.AbstractContextManager[object]:
        """The context in which it runs: a forced backend."""
        return contextlib.nullcontext()

    def ran(self, step: Step, pass_: str) -> str:
        """The implementation that a step runs; the step may be run to find out. Raises UsageFault where it is not this peer's."""
        raise NotImplementedError

    # -- common to all ------------------------------------------------------------------------------------------------

    def refuse(self, problem: Problem, pass_: str) -> None:
        """As Library.refuse, and for a GPU that it has no code for."""
        super().refuse(problem, pass_)
        if self.device == "cuda" and self.arch != (0, 999) and importlib.util.find_spec("torch"):
            import torch

            if torch.cuda.is_available():
                major, minor = torch.cuda.get_device_capability()
                if not self.arch[0] <= major * 10 + minor <= self.arch[1]:
                    why = f"it has code for compute capability {self.arch[0] / 10} to {self.arch[1] / 10}, this GPU has {major}.{minor}"
                    raise UsageFault(f"{self.name} does not run on this GPU", why, "leave it out: --peers")

    def start(self, problem: Problem, x: Mapping[str, Tensor], pass_: str) -> Step:
        """The step of a pass. The forward of a backward pass runs here, in the current stream."""
        import torch

        attend = self.attention(problem, x["Q"].device)
        leaves = [x[name].detach().requires_grad_(pass_ == "backward") for name in ("Q", "K", "V")]
        if pass_ == "forward":
            return functools.partial(attend, *leaves)
        out = attend(*leaves)[0]
        return lambda: torch.autograd.grad(out, leaves, x["dO"], retain_graph=True)

    def prepare(self, problem: Problem, inputs: Mapping[str, Array], pass_: str) -> TorchPrepared:
        """Put the tensors in place and run once. Raises as base.Peer.prepare."""
        self.refuse(problem, pass_)
        with library_faults(self):
            return TorchPrepared(self, problem, inputs, pass_)


class TorchPrepared:
    """A torch peer, prepared: see base.Prepared."""

    def __init__(self, peer: TorchPeer, problem: Problem, inputs: Mapping[str, Array], pass_: str) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self._peer, self._problem, self._pass, self._torch = peer, problem, pass_, torch
        self.name = peer.name
        self._on_gpu = peer.device == "cuda"
        self._same_bits = peer.deterministic and pass_ == "backward"
        device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        if self._on_gpu:
            torch.cuda.empty_cache()  # returns the cached memory of earlier peers to the driver
        before = torch.cuda.memory_allocated() if self._on_gpu else 0
        names = ("Q", "K", "V") if pass_ == "forward" else ("Q", "K", "V", "dO")
        self._x = {name: self._layout(to_torch(inputs[name], problem.dtype).to(device)) for name in names}
        with self._scope():
            self._step = peer.start(problem, self._x, pass_)
            self._step()  # the first run may compile
            self.ran = peer.ran(self._step, pass_)
        if problem.dtype == "float32" and self._on_gpu:
            self.ran += ", TF32 off"
        self.ran += ", deterministic" * self._same_bits
        self.peak_bytes = self._peak(before) if self._on_gpu else None

    def _layout(self, tensor: Tensor) -> Tensor:
        return (tensor if self._peer.heads_first else tensor.transpose(1, 2)).contiguous()

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with self._torch.set_grad_enabled(self._pass == "backward"), self._peer.forced(), same_bits(self._same_bits):
            yield

    def _peak(self, before: int) -> int:
        cuda = self._torch.cuda
        cuda.reset_peak_memory_stats()
        with self._scope():
            self._step()
        cuda.synchronize()
        return int(cuda.max_memory_allocated() - before)

    def outputs(self, xp: ArrayModule = np) -> dict[str, Array]:
        """Storage arrays of a new run: O[, logsumexp], or dQ, dK, dV. A fully masked row has logsumexp -inf."""
        with library_faults(self._peer), self._scope():
            values = self._step()
        names = ("O", "logsumexp") if self._pass == "forward" else ("dQ", "dK", "dV")
        outputs = {}
        for name, value in zip(names, values, strict=False):
            if name == "logsumexp":  # of a fully masked row FlashAttention-2 and -3 return +inf
                value = value.detach().float().masked_fill(value == float("inf"), float("-inf"))
            elif not self._peer.heads_first:
                value = value.transpose(1, 2)
            dtype = self._problem.tensor_dtype(name)
            outputs[name] = to_host(value, dtype) if xp is np else to_device(xp, value, dtype)
        return outputs

    def enqueue(self) -> Callable[[], float]:
        """Enqueue a run between two events in torch's current stream. The function returned waits and gives its device (or CPU) seconds."""
        if not self._on_gpu:
            seconds = self.call()
            return lambda: seconds
        with library_faults(self._peer), self._scope():
            return self._between_events(self._step)

    def _between_events(self, work: Callable[[], object]) -> Callable[[], float]:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()

        def seconds() -> float:
            with library_faults(self._peer):
                stop.synchronize()
            return float(start.elapsed_time(stop)) * 1e-3

        return seconds

    def call(self) -> float:
        """Host seconds to enqueue one run on an idle device; it waits for the run's end."""
        with library_faults(self._peer), self._scope():
            if self._on_gpu:
                self._torch.cuda.synchronize()
            start = time.perf_counter()
            self._step()
            seconds = time.perf_counter() - start
            if self._on_gpu:
                self._torch.cuda.synchronize()
        return seconds

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        """Capture the run as a CUDA graph. The function returned enqueues a replay, as enqueue does. None where it cannot be captured."""
        if not self._on_gpu:
            return None
        cuda = self._torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        try:
            with cuda.stream(side), self._scope():  # autograd runs a backward in its forward's stream: start again, in this one
                step = self._peer.start(self._problem, self._x, self._pass)
                for _ in range(3):
                    step()
            side.synchronize()
            captured = cuda.CUDAGraph()
            with self._scope(), cuda.graph(captured, stream=side):
                kept = step()
        except Exception:  # any error of a library that allocates, waits or changes the stream in a capture
            cuda.synchronize()
            return None

        def replay(
            kept: Sequence[Tensor] = kept, step: Step = step
        ) -> Callable[[], float]:  # both hold memory that the graph writes and reads
            return self._between_events(captured.replay)

        return replay


# -- details ----------------------------------------------------------------------------------------------------------


def to_torch(array: Array, dtype: str) -> Tensor:
    """A tensor with a copy of a storage array, where that lies: numpy's on the CPU, CuPy's on its GPU. bfloat16 is converted by its bits:
    numpy, CuPy and torch have no such type in common."""
    import torch

    if dtype == "float8_e4m3":
        return to_torch(array.view(np.uint8), "uint8").view(torch.float8_e4m3fn)
    if not isinstance(array, np.ndarray):
        copy = torch.from_dlpack(array.view(np.int16) if dtype == "bfloat16" else array).clone()
        return copy.view(torch.bfloat16) if dtype == "bfloat16" else copy
    array = np.array(array, order="C")
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_host(tensor: Tensor, dtype: str) -> Array:
    """A tensor as a contiguous storage array; the inverse of :func:`to_torch`."""
    import torch

    tensor = tensor.detach().contiguous().cpu()
    if dtype == "bfloat16":
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = tensor.to(getattr(torch, dtype)).numpy()
    return array


def to_device(cupy: Any, tensor: Tensor, dtype: str) -> Array:
    """A copy of a GPU tensor as a contiguous storage array of CuPy; bfloat16 by its bits. It stays in torch's memory."""
    import torch

    tensor = tensor.detach().to(getattr(torch, dtype)).clone(memory_format=torch.contiguous_format)
    array: Array = cupy.from_dlpack(tensor.view(torch.int16) if dtype == "bfloat16" else tensor)
    return array.view(np.uint16) if dtype == "bfloat16" else array


@contextlib.contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Where wanted, torch's deterministic algorithms. What they allocate is not filled first: that would be timed, and changes no bit."""
    if not wanted:
        yield
        return
    import torch

    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms(True) is the same, and imports the compiler for seconds
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def operators(step: Step) -> tuple[str, ...]:
    """The operators (namespace::name) that torch dispatches in a run of a step, each once, in order of first use."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, None] = {}

    class Listener(TorchDispatchMode):  # type: ignore[misc]  # Any where torch is not installed
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func._schema.name] = None
            return func(*args, **(kwargs or {}))

    with Listener():
        step()
    return tuple(seen)


def version(distribution: str) -> str:
    """A distribution's name and version, for Prepared.ran."""
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return distribution


def module(peer: Library, name: str) -> Any:
    """Import a peer's module, which has no types. Raises EnvironmentFault where it is installed and does not import."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library built for another torch or CUDA
        raise EnvironmentFault(f"{peer.name}: {name} does not import", str(error), peer.install) from error


#: What a library's exceptions say where it has no code for a problem.
_REFUSALS = ("No available kernel", "No viable backend", "NotImplementedError", "build does not support")


@contextlib.contextmanager
def library_faults(peer: Library) -> Iterator[None]:
    """Turn a library's exceptions into our faults: UsageFault, with torch's warnings as the reason, for a refusal; else KernelFault."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except Fault:
            raise
        except Exception as error:  # libraries and compilers have exceptions of their own
            text = str(error) or type(error).__name__
            reasons = "; ".join(dict.fromkeys([text, *(str(w.message).split(" (Triggered")[0] for w in said)]))
            if isinstance(error, (AssertionError, NotImplementedError)) or any(words in text for words in _REFUSALS):
                raise UsageFault(f"{peer.name} refuses this problem", reasons, "leave it out: --peers") from error
            hint = "use smaller sizes" if "out of memory" in text.lower() else "fa-cli run -vv shows the traceback"
            raise KernelFault(f"{peer.name} failed", reasons, hint) from error
