"""The gradient as a C++ node of torch's autograd (native.cpp), for plain tensors and kernels of the ladder. Python's way is always there.

A backward call through a Python torch.autograd.Function costs the host tens of microseconds for Python itself: torch's thread for
gradients must have the interpreter's lock, and hand it back. The node launches without it. The C++ file is compiled against torch's own
headers by the CPU engine's compiler, once for each torch, into the same cache. That takes half a minute, so it is done in a thread, and
only in a process that has made many calls on a GPU; one that finds it in the cache loads it at its first call of a kind that it had before.
Where there is no compiler, or torch has other headers, nothing is lost but time: `why` says what.

A plan, all that a launch needs, is made by Python when a call of its kind comes the first time. What has no plan, or cannot be launched,
goes through the operator fa::backward.
"""

from __future__ import annotations

import _thread
import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..backends.host import build
from ..fault import Fault
from .call import Ready, is_capturing, ready

#: apply(q, k, v, options, call) of operator.py's _Eager, by the node; None where, or as long as, there is none.
apply: Callable[..., Any] | None = None
#: Why there is none; empty where it is there or was not asked for.
why = ""

_SOURCE = Path(__file__).with_name("native.cpp")
#: Calls with a gradient after which the node is worth a compiler's half minute.
_MANY = 100
_DTYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}  # by c10::ScalarType
_calls = itertools.count(1)
_getting, _numbering = threading.Lock(), threading.Lock()
#: The options of calls, and the number by which a node knows them.
_options: list[tuple[Any, ...]] = []
_numbers: dict[tuple[Any, ...], int] = {}
#: Of the CPU's plans, which Python launches. By entry handle, what keeps a GPU's code loaded: the node's plans have nothing but handles.
_ready_of: list[Ready] = []
_held: dict[int, Any] = {}
_library: Any = None


def wanted() -> None:
    """Note a call that the node would have served. The first one looks for it in the cache, the hundredth compiles it, both in a thread."""
    count = next(_calls)
    if count in (1, _MANY):
        threading.Thread(target=get, args=(count == _MANY,), name="fa node", daemon=True).start()


def said() -> str:
    """What calls a backward pass: the node, or Python and why."""
    if apply is not None:
        return "a C++ node"
    return f"Python: {why.partition(chr(10))[0]}" if why else f"Python; a C++ node from about {_MANY} calls on a GPU on"


def get(compiled: bool = True) -> bool:
    """Have the node, from the cache or, where `compiled`, by compiling it. False, and `why` says the reason, where there is none."""
    global apply, why
    with _getting:
        if apply is None:
            try:
                apply = _loaded(compiled)
            except (Fault, OSError, RuntimeError, AttributeError) as error:
                why = str(error)
    return apply is not None


def _loaded(compiled: bool) -> Callable[..., Any] | None:
    global _library
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    there = Path(torch.__file__).parent
    flags = [abi, f"-I{there / 'include'}", f"-L{there / 'lib'}", "-lc10", "-ltorch_cpu"]
    versions = f"{torch.__version__} {torch.version.git_version} {abi}"
    # Once: torch ends a process that registers an operator twice, and the file in the cache may by now be another process's.
    _library = _library or build.extension(_SOURCE, flags, versions, ["fa_node_begin", "fa_node_plan"], compiled)
    if _library is None:
        return None
    _library.fa_node_options.restype = ctypes.c_int64
    _library.fa_node_plan.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    if torch.version.cuda and torch.cuda.is_available():
        _library.fa_node_driver(_driver())
    _library.fa_node_begin(_LEARN, _ENQUEUE)
    attach = torch.ops.fa.attach.default

    def apply(q: Any, k: Any, v: Any, options: tuple[Any, ...], call: Ready) -> Any:
        number = _numbers.get(options)
        if number is None:
            number = _number(options)
        o, lse = call((q, k, v))
        return attach(q, k, v, o, lse, number)

    return apply


def _driver() -> ctypes.Array[Any]:
    """Driver of native.cpp: functions of the CUDA driver, and torch's that gives the current stream."""
    cuda = ctypes.CDLL("libcuda.so.1")
    names = ("LaunchKernel", "LaunchKernelEx", "MemsetD8Async", "TensorMapReplaceAddress", "CtxGetCurrent", "StreamIsCapturing")
    found = [*(getattr(cuda, f"cu{name}") for name in names), ctypes.CDLL("libtorch_cuda.so").aoti_torch_get_current_cuda_stream]
    return (ctypes.c_void_p * len(found))(*(ctypes.cast(each, ctypes.c_void_p) for each in found))


def _number(options: tuple[Any, ...]) -> int:
    """A number for the options of a call, by which a node knows them."""
    causal, scale, kernel, deterministic, causal_shift = options
    with _numbering:
        if options not in _numbers:
            given = (None if scale is None else ctypes.byref(ctypes.c_double(scale))), kernel.encode()
            shift = None if causal_shift is None else ctypes.byref(ctypes.c_int64(causal_shift))
            number = _library.fa_node_options(int(causal), *given, int(deterministic), shift)
            _options.append(options)
            _numbers[options] = number
        return _numbers[options]


# -- what the node asks Python ----------------------------------------------------------------------------------------


def _learn(signature: Any, count: int, addresses: Any, stream: int | None) -> int:
    """Give the node a plan for tensors of a signature, as native.cpp writes it; or that it is Python's. 0 where it is to ask again."""
    try:
        numbers = signature[:count]
        made = _ready_for(numbers)
        if made is None or made.fixed is None or made.plain:
            return int(_library.fa_node_plan(_packed(_of_any_stream(numbers)), count, 0, None, None, 0))
        keeps = made.index is not None and made.once > 0
        if keeps and stream and is_capturing():
            return 0
        lists, memory, number = _plan(made, made.fixed, keeps, stream or 0, addresses[1])
        own = _packed(numbers if keeps else _of_any_stream(numbers))
        return int(
            _library.fa_node_plan(own, count, number, _packed([n for each in lists for n in (len(each), *each)]), memory, len(memory))
        )
    except Exception:  # the operator says it
        return 0


def _enqueue(number: int, addresses: Any) -> int:
    """Launch a CPU's plan. 0 where it failed: the operator does it again, and says why."""
    made = _ready_of[number]
    try:
        starts, _held = made.workspaces(None, made.allocator())
        assert made.fixed is not None
        return int(made.fixed(addresses[: made.fixed.count - len(starts)] + starts, None))
    except BaseException as error:
        made.forget(None)
        if not isinstance(error, Exception):  # Ctrl-C: a callback of ctypes would drop it
            _thread.interrupt_main()
        return 0


_NUMBERS = ctypes.POINTER(ctypes.c_int64)
_LEARN = ctypes.CFUNCTYPE(ctypes.c_int, _NUMBERS, ctypes.c_int64, _NUMBERS, ctypes.c_void_p)(_learn)
_ENQUEUE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, _NUMBERS)(_enqueue)


def _packed(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _of_any_stream(signature: list[int]) -> list[int]:
    return [signature[0], 0, *signature[2:]]


def _ready_for(signature: list[int]) -> Ready | None:
    """What runs a backward pass for tensors of a signature: dO, q, k, v and O, their sizes and strides."""
    number, _, dtype, index, tensors, *rest = signature
    causal, scale, kernel, deterministic, causal_shift = _options[number]
    pairs = [(tuple(rest[at : at + 4]), tuple(rest[at + 4 : at + 8])) for at in range(0, len(rest), 8)]
    (do, do_strides), (q, q_strides), (k, k_strides), (v, v_strides), (o, o_strides) = pairs
    if not do == o == (*q[:3], v[3]) or dtype not in _DTYPES:
        return None
    device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
    kinds = (q, k, v), (q_strides, k_strides, v_strides, o_strides, do_strides), (_DTYPES[dtype],) * 3, (device,) * 3
    return ready("backward", kernel, (), *kinds, causal, scale, causal_shift, deterministic, True, tensors > 6)


def _plan(made: Ready, fixed: Any, keeps: bool, stream: int, address: int) -> tuple[list[list[int]], bytes, int]:
    """A plan as fa_node_plan of native.cpp takes it: lists of numbers, the parameters, and the number of a plan that Python launches."""
    if made.index is None:
        _ready_of.append(made)
        return [[0, 0, 0], [], [], [], [], [], []], b"", len(_ready_of) - 1
    backend, loaded, layout = made.launch.backend, made.launch.loaded, fixed.layout(address)
    first = made.kept_for(stream) if keeps else 0
    launches: list[int] = []
    places: list[int] = []
    for call, own in layout.calls:
        handle, attribute = backend.handle(loaded, call)
        _held[handle] = loaded
        launches += (handle, *call.grid, call.block, call.shared, attribute, len(places), len(own))
        places += own
    lists = [
        [backend.context(), made.room, keeps],
        [start if start >= 0 else ~(first + ~start) for start in made.spaces],
        layout.at,
        [n for each in layout.maps for n in each],
        [n for each in layout.fills for n in each],
        launches,
        places,
    ]
    return lists, layout.memory, 0
