"""The gradient as a C++ node of autograd: what it launches, when it leaves a call to Python, and that nothing is lost without a compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.backends.host import build  # noqa: E402
from harness.backends.host.backend import Host  # noqa: E402
from harness.backends.launch import ARGS, View  # noqa: E402
from harness.backends.protocol import Call, Fill  # noqa: E402
from harness.fault import EnvironmentFault  # noqa: E402
from harness.torch_op import attention, call, explain, native, operator  # noqa: E402


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The node, and no call of another test is kept."""
    assert native.get(), native.why
    operator._KEPT.clear()
    yield


def leaves(rows: int, dtype: Any = torch.float32, device: Any = "cpu") -> list[Any]:
    """q, k and v that want gradients."""
    random = torch.Generator().manual_seed(rows)
    return [torch.randn(1, 2, rows, 64, generator=random).to(device, dtype).requires_grad_() for _ in range(3)]


def gradients(given: list[Any], do: Any, of_lse: bool = False, **options: Any) -> tuple[str, list[Any]]:
    """The class of the node, and dQ, dK, dV of a second call."""
    attention(*given, **options)
    made = attention(*given, return_lse=True, **options)
    out, ways = (made, (do, do.float().sum(-1))) if of_lse else (made[0], do)
    return type(made[0].grad_fn).__name__, list(torch.autograd.grad(out, given, ways))


@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), [("fa2", "float32"), ("split", "float32"), ("hopper", "bfloat16")])
def test_the_same_bits_and_no_operator(
    node: None, device: Any, kernel: str, dtype: str, of_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python's way gives them, without a call of fa::backward."""
    given = leaves(35, getattr(torch, dtype), device)
    do = torch.randn_like(given[0])
    with monkeypatch.context() as without:
        without.setattr(native, "apply", None)
        of, expected = gradients(given, do, of_lse, kernel=kernel, causal=True)
    assert "Eager" in of
    monkeypatch.setattr(operator, "_backward", lambda *_: pytest.fail("fa::backward was called"))
    of, found = gradients(given, do, of_lse, kernel=kernel, causal=True)
    assert "Eager" not in of
    assert all(map(torch.equal, found, expected))
    assert str(explain(*given, kernel=kernel, verbose=True)).endswith("backward is called by a C++ node")


def test_a_failed_launch_is_told_by_the_operator(node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where the node's launch alone fails, the operator's answer is the call's."""
    given = leaves(36)
    do = torch.randn_like(given[0])
    _, expected = gradients(given, do, kernel="fa2")
    fixed = call.Fixed.__call__
    failures: list[int] = []

    def refused(self: Any, addresses: Any, stream: Any = None) -> bool:
        if len(addresses) > 8 and len(failures) < most:
            failures.append(1)
            raise RuntimeError("refused")
        return fixed(self, addresses, stream)

    monkeypatch.setattr(call.Fixed, "__call__", refused)
    most = 1
    assert all(map(torch.equal, gradients(given, do, kernel="fa2")[1], expected)) and len(failures) == 1
    most = 9
    with pytest.raises(RuntimeError, match="refused"):
        gradients(given, do, kernel="fa2")


def test_who_listens_sees_the_operator(node: None) -> None:
    """A profiler sees fa::backward; so does a mode of the dispatcher."""
    given = leaves(38)
    do = torch.randn_like(given[0])
    _, expected = gradients(given, do, kernel="fa2")
    o = attention(*given, kernel="fa2")
    with torch.autograd.profiler.profile() as seen:
        found = torch.autograd.grad(o, given, do, retain_graph=True)
    assert any(event.name == "fa::backward" for event in seen.function_events)
    assert all(map(torch.equal, found, expected))

    class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
            functions.append(str(function))
            return function(*given, **(options or {}))

    functions: list[str] = []
    with Dispatched():
        torch.autograd.grad(o, given, do, retain_graph=True)
    assert "fa.backward.default" in functions
    second = torch.autograd.grad(o, given, do, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        second[0].sum().backward()
    torch.autograd.grad(o, given, do)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, given, do)


class _Recorder:
    """A CUDA driver that notes what it is asked, in native.py's order."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.maps: dict[int, int] = {}  # by a launch's function, how many tensor maps it has
        pointer, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
        kinds: list[tuple[Any, ...]] = [
            (self.launch, pointer, *[number] * 7, pointer, ctypes.POINTER(pointer), pointer),
            (self.launch_ex, ctypes.POINTER(pointer), pointer, ctypes.POINTER(pointer), pointer),
            (self.fill, ctypes.c_uint64, ctypes.c_ubyte, size, pointer),
            (self.move, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64),
            (self.context, ctypes.POINTER(pointer)),
            (self.none, pointer, ctypes.POINTER(ctypes.c_int)),
            (self.none, ctypes.c_int32, ctypes.POINTER(pointer)),
        ]
        self.functions = [ctypes.CFUNCTYPE(ctypes.c_int, *of)(function) for function, *of in kinds]
        self.table = (ctypes.c_void_p * len(kinds))(*(ctypes.cast(each, ctypes.c_void_p) for each in self.functions))

    def launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, parameters, _ = rest
        self.steps.append((function, tuple(sizes[:3]), sizes[3], sizes[6], False, self.read(function, parameters)))
        return 0

    def launch_ex(self, config: Any, function: int, parameters: Any, _: Any) -> int:
        words = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint))
        attribute = ctypes.cast(config[5], ctypes.POINTER(ctypes.c_int))
        assert (attribute[0], attribute[2], words[12]) == (6, 1, 1)
        self.steps.append((function, tuple(words[:3]), words[3], words[6], True, self.read(function, parameters)))
        return 0

    def read(self, function: int, parameters: Any) -> tuple[bytes, ...]:
        return ctypes.string_at(parameters[0], ARGS.itemsize), *(
            ctypes.string_at(parameters[i + 1], 128) for i in range(self.maps[function])
        )

    def fill(self, address: int, value: int, size: int, _: Any) -> int:
        self.steps.append((address, value, size))
        return 0

    def move(self, map_: Any, address: int) -> int:
        assert ctypes.addressof(map_.contents) % 64 == 0
        map_[0] = address  # where the CPU engine's maps have it
        return 0

    def context(self, current: Any) -> int:
        current[0] = 1
        return 0

    def none(self, _: Any, answer: Any) -> int:
        answer[0] = 0
        return 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has the node ask another driver than the GPU's")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("naive", "float32"), ("split", "float32"), ("mma_qreg_async", "bfloat16"), ("hopper", "bfloat16"), ("hopper", "float16")],
)
def test_what_is_launched_on_a_gpu(node: None, kernel: str, dtype: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches, parameters, tensor maps and fills that Launcher.steps says, for the addresses of the call."""
    recorder, made = _Recorder(), []
    native._held[-1 - len(native._held)] = recorder  # a plan outlives this test
    native._library.fa_node_driver(recorder.table)
    ready_for = native._ready_for

    def handle(self: Host, loaded: Any, step: Call) -> tuple[int, int]:
        return 1000 + list(loaded.kernel.entries).index(step.entry), 6 * step.overlaps

    def of_a_gpu(signature: list[int]) -> Any:
        made.append(ready_for(signature))
        loaded = made[0].launch.loaded
        recorder.maps = {1000 + list(loaded.kernel.entries).index(each.entry): len(each.maps) for each in loaded.plan.launches}
        return dataclasses.replace(made[0], index=0)

    monkeypatch.setattr(native, "_ready_for", of_a_gpu)
    monkeypatch.setattr(Host, "context", lambda self: 1)
    monkeypatch.setattr(Host, "handle", handle)
    rows = 70 + len(native._held)  # of no other case
    q, k, v = leaves(rows, getattr(torch, dtype))
    do = torch.randn_like(q)
    options: dict[str, Any] = {"kernel": kernel, "causal": True, "deterministic": deterministic}
    attention(q, k, v, **options)
    o, lse = attention(q, k, v, **options, return_lse=True)
    for _ in range(2):  # one call that learns the plan, and one that knows it
        del recorder.steps[:]
        given = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        assert len(made) == 1
        launcher = made[0].launch
        tensors = {"Q": q, "K": k, "V": v, "O": o, "dO": do} | dict(zip(("dQ", "dK", "dV"), given, strict=True))
        views = {name: View(t.data_ptr(), *t.stride()[:3]) for name, t in tensors.items()}
        views["logsumexp"] = View(lse.data_ptr(), 2 * rows, rows, 1)
        args = next(np.frombuffer(step[-1][0], ARGS)[0] for step in recorder.steps if len(step) > 3)
        spaces = [int(each) for each in args["workspace"][: len(launcher.loaded.plan.workspaces)]]
        assert all(spaces) and len({*spaces}) == len(spaces)
        wanted = [
            (step.address, 0, step.size)
            if isinstance(step, Fill)
            else (handle(Host(), launcher.loaded, step)[0], step.grid, step.block, step.shared, step.overlaps, step.parameters)
            for step in launcher.steps(views, spaces)
        ]
        assert recorder.steps == wanted


def test_it_is_looked_for_at_once_and_compiled_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call looks into the cache, the hundredth compiles; no other call does anything."""
    asked: list[bool] = []
    monkeypatch.setattr(native, "_calls", itertools.count(1))
    monkeypatch.setattr(native, "get", asked.append)
    for count in range(1, 301):
        native.wanted()
        for thread in threading.enumerate():
            if thread.name == "fa node":
                thread.join()
        assert asked == [False, True][: 1 + (count >= 100)]


def test_without_a_compiler_nothing_is_lost(node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's way, and the reason is kept."""

    def none(*_: Any) -> Any:
        raise EnvironmentFault("no C++ compiler", "", "")

    monkeypatch.setattr(native, "apply", None)
    monkeypatch.setattr(build, "extension", none)
    assert native.get(), "it is loaded once: torch ends a process that registers an operator again"
    monkeypatch.setattr(native, "apply", None)
    monkeypatch.setattr(native, "_library", None)
    assert not native.get() and "no C++ compiler" in native.why
    given = leaves(39)
    assert "Eager" in gradients(given, torch.randn_like(given[0]), kernel="naive")[0]
    assert str(explain(*given, kernel="naive", verbose=True)).endswith("backward is called by Python: no C++ compiler")
