"""The tensor maps of a header: planned, held to what TMA takes, packed for each backend, passed to the entries that ask for them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import planted
import pytest

from harness.backends import Backend, Loaded, launch, tensor_map
from harness.backends.launch import View
from harness.backends.tensor_map import HOST, for_cuda, for_host, movable_for_cuda
from harness.fault import KernelFault, UsageFault
from harness.kernel import Device, Kernel, planner
from harness.kernel.plan import TensorMap
from harness.kernel.signature import check_parameters
from harness.problem import Problem

DEVICE = Device("cpu", "a processor")
MAPPED = (
    planted.top(title='"a test"', dtypes='["float32", "float16"]', head_dims="[32, 64]", arch='">=sm_90"')
    + """\
// [workspace.delta]
// dtype = "float32"
// size = "batch * heads_q * round_up(seq_q, 4)"
// init = "none"
// [tensor_map.k]
// tensor = "K"
// box = [32, "16 * sizeof_dtype", 1, 1]
// swizzle = "32 * sizeof_dtype"
// [tensor_map.packed]
// tensor = "Q"
// dims = ["head_dim", 2, "seq_q", "heads_q // 2", "batch"]
// strides = ["head_stride", "row_stride", "2 * head_stride", "batch_stride"]
// box = [32, 2, 8, 1, 1]
// [tensor_map.sums]
// tensor = "delta"
// dims = ["seq_q", "batch * heads_q"]
// strides = ["round_up(seq_q, 4)"]
// box = [32, 1]
// [[launch]]
// entry = "prepare"
// grid = "batch"
// block = 32
// maps = []
// [[launch]]
// entry = "forward"
// grid = ["seq_q", "heads_q", "batch"]
// block = 128
// ///
"""
)


def mapped(folder: Path, text: str = MAPPED) -> Kernel:
    path = folder / "mine_forward.cu"
    path.write_text(text)
    return Kernel.read(path)


def test_tensor_maps_are_planned(tmp_path: Path) -> None:
    """Dims of the tensor itself or as given; strides once the tensor's own are known; and which launch is passed which."""
    plan = planner.plan(mapped(tmp_path), Problem.of(3, 4, 100, 60, dtype="float16", causal=True), DEVICE)
    k, packed, sums = plan.tensor_maps
    assert (k.tensor, k.dtype, k.dims, k.box, k.swizzle) == ("K", "float16", (60, 100, 4, 3), (32, 32, 1, 1), 64)
    assert k.byte_strides(4 * 6400, 6400, 64) == (128, 12800, 51200)
    assert packed.dims == (60, 2, 100, 2, 3) and packed.swizzle == 0
    assert packed.byte_strides(4 * 6400, 6400, 64) == (12800, 128, 25600, 51200)
    assert (sums.dtype, sums.dims, sums.byte_strides(0, 0, 0)) == ("float32", (100, 12), (400,))
    assert [launch.maps for launch in plan.launches] == [(), (0, 1, 2)]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('tensor = "K"', 'tensor = "keys"', "tensor_map.k is of 'keys'; known: K, O"),
        ('tensor = "K"', 'tensor = "dK"', "tensor_map k is of dK, which a forward kernel is not given"),
        ('tensor = "K"\n', 'tensor = "K"\n// pitch = 3\n', "unknown key 'pitch' in tensor_map.k"),
        ('// tensor = "K"\n', "", "lacks the required key 'tensor' in tensor_map.k"),
        ("maps = []", 'maps = ["v"]', "the header has no tensor_map.v"),
        ("[32, 2, 8, 1, 1]", "[32, 2, 8, 1]", "has 4 sizes in box for 5 dims"),
        ("[32, 2, 8, 1, 1]", "[32, 2, 257, 1, 1]", "1 to 256 a side"),
        ("[32, 2, 8, 1, 1]", "[12, 2, 8, 1, 1]", "box rows of 24 bytes, which is no multiple of 16"),
        ("// box = [32, 2, 8, 1, 1]", "// box = [32, 2, 8, 1, 1]\n// swizzle = 32", "box rows of 64 bytes, more than its swizzle of 32"),
        ("32 * sizeof_dtype", "31 * sizeof_dtype", "swizzle 62; it is one of 0, 32, 64, 128 bytes"),
        ('"2 * head_stride"', '"row_stride * head_stride"', "is no sum of multiples of"),
        ('// strides = ["round_up(seq_q, 4)"]\n', "", "of the workspace delta: it needs dims and strides"),
        ('"batch * heads_q"]', '"batch * heads_q", 1]', "has 2 sizes in box for 3 dims"),
        ('"batch * heads_q"]', '"batch * heads_q + 1"]', "sums reaches 1300 elements of the workspace delta, which has 1200"),
        ('dims = ["seq_q", "batch', 'dims = ["seq_q + 1", "batch', "reaches 1201 elements of the workspace delta, which has 1200"),
        ("// maps = []", "// maps = []\n// cluster = [2]", "a grid of .* blocks is no multiple of its clusters of .2, 1, 1."),
    ],
)
def test_wrong_tensor_maps(tmp_path: Path, old: str, new: str, word: str) -> None:
    """What no TMA descriptor holds is refused before any launch."""
    assert old in MAPPED
    with pytest.raises(UsageFault, match=word) as caught:
        planner.plan(mapped(tmp_path, MAPPED.replace(old, new, 1)), Problem.of(3, 4, 100, 60, dtype="float16", causal=True), DEVICE)
    assert caught.value.exit_code == 2 and (str(tmp_path) in caught.value.what or "cluster" in new)


def test_the_parameters_of_an_entry_with_tensor_maps(tmp_path: Path) -> None:
    """fa::Args and a parameter for each map."""
    entries = """extern "C" __global__ void prepare(const __grid_constant__ fa::Args args) {}
extern "C" __global__ void forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap k_map,
                                   const __grid_constant__ fa::TensorMap packed_map) {}
"""
    with pytest.raises(UsageFault, match=r"forward has 3 parameters; .* fa::Args, then its tensor maps, 3 \(k, packed, sums\)"):
        check_parameters(mapped(tmp_path, MAPPED + entries))
    whole = entries.replace("packed_map)", "packed_map, const __grid_constant__ fa::TensorMap sums_map)")
    check_parameters(mapped(tmp_path, MAPPED + whole))


MAPS = """true
// [tensor_map.k]
// tensor = "K"
// box = [16, 32, 1, 1]
// swizzle = 64
// [tensor_map.o]
// tensor = "O"
// box = [32, 64, 1, 1]"""


class Keeps:
    """A backend with the CPU's tensor maps, which keeps what is enqueued."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []

    movable_map = Backend.movable_map

    def repeated(self, loaded: Loaded, words: memoryview, fills: Any, calls: Any) -> Any:
        def enqueue(stream: int | None) -> None:
            self.submitted.append(([call._replace(parameters=tuple(bytes(p) for p in call.parameters)) for call in calls], stream))

        return enqueue

    def tensor_map(self, map_: TensorMap, address: int, strides: tuple[int, ...]) -> bytes:
        return for_host(map_, address, strides)


def test_tensor_maps_follow_the_tensors(tmp_path: Path) -> None:
    """After fa::Args, in the header's order, with address and strides of the call's tensors; also where strides are fixed."""
    chosen, backend = planted.kernel(tmp_path, deterministic=MAPS), Keeps()
    problem = Problem.of(2, 6, 70, 60, heads_kv=3, seq_kv=131)
    launcher = launch.prepare(backend, Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)
    names = ["O", "K", "Q", "V", "logsumexp"]
    strides = {name: (65536 + 4 * i, 4096 + 4 * i, 64 + 4 * i) for i, name in enumerate(names)}
    fixed = launcher.fixed(strides)
    for turn in range(1, 4):
        given = {name: View((turn << 40) + 256 * i, *strides[name]) for i, name in enumerate(names)}
        (call,) = launcher.steps(given)
        _, k, o = call.parameters  # type: ignore[union-attr]
        (k_map,), (o_map,) = np.frombuffer(k, HOST), np.frombuffer(o, HOST)
        assert k_map["base"] == given["K"].address and o_map["base"] == given["O"].address
        assert k_map["stride"].tolist() == [4 * 68, 4 * 4100, 4 * 65540, 0] and k_map["dim"].tolist() == [60, 131, 3, 2, 0]
        assert o_map["dim"].tolist() == [60, 70, 6, 2, 0] and o_map["box"].tolist() == [32, 64, 1, 1, 0]
        assert [k_map[name] for name in ("rank", "element_bytes", "swizzle", "type")] == [4, 4, 64, 3]
        fixed([given[name].address for name in names], turn)
        assert backend.submitted[-1] == ([call], turn)
    assert not fixed([given[name].address + 8 * (name == "O") for name in names], 4)  # not 16-byte aligned: nothing is enqueued
    assert fixed([given[name].address for name in names], 5)
    assert [turn for _, turn in backend.submitted] == [1, 2, 3, 5] and backend.submitted[-1] == ([call], 5)


def test_what_tma_cannot_address_is_told(tmp_path: Path) -> None:
    """An address or a stride that is no multiple of 16 bytes; the stride of a dimension of one element does not matter."""
    chosen, backend = planted.kernel(tmp_path, deterministic=MAPS), Keeps()
    problem = Problem.of(1, 2, 70, 60)
    launcher = launch.prepare(backend, Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)
    given = {name: View(1 << 40, 3, 4096, 64) for name in ("Q", "K", "V", "O", "logsumexp")}
    launcher.steps(given)
    with pytest.raises(KernelFault, match="TMA cannot read K through tensor_map k\nits address 0x10000000008 is not 16-byte"):
        launcher.steps(given | {"K": View((1 << 40) + 8, 3, 4096, 64)})
    with pytest.raises(KernelFault, match="a stride of 244 bytes"):
        launcher.steps(given | {"O": View(1 << 40, 3, 4096, 61)})


def test_tensor_maps_are_the_driver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuTensorMapEncodeTiled gets a 64-byte aligned place and what the map says; its refusal is a fault; equal maps are encoded once."""
    calls: list[Any] = []

    def encode(to: Any, *given: Any) -> int:
        calls.append([to.value % 64, *([list(g) if hasattr(g, "_length_") else getattr(g, "value", g) for g in given])])
        ctypes.memset(to, len(calls), 128)
        return 0 if len(calls) == 1 else 1

    monkeypatch.setattr(tensor_map, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    map_ = TensorMap("k", "K", "bfloat16", (59, 100, 4, 3), ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0)), (64, 128, 1, 1), 128)
    for _ in range(2):
        assert for_cuda(map_, 0x7F0000001000, map_.byte_strides(25600, 6400, 64)) == b"\1" * 128
    sizes = [[59, 100, 4, 3], [128, 12800, 51200], [64, 128, 1, 1], [1, 1, 1, 1]]
    assert calls == [[0, 9, 4, 0x7F0000001000, *sizes, 0, 3, 2, 0]]
    with pytest.raises(KernelFault, match="the driver refuses tensor_map k\ncuTensorMapEncodeTiled answers 1"):
        for_cuda(map_, 0x7F0000002000, map_.byte_strides(25600, 6400, 64))


def test_a_drivers_map_is_encoded_once_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is 64-byte aligned; later addresses are replaced in it; where the driver refuses, it is encoded anew, or a fault."""
    done: list[Any] = []

    def replace(to: int, address: int) -> int:
        done.append((to % 64, address))
        ctypes.memset(to, 9, 128)
        return int(address == 48)

    def encode(to: Any, *given: Any) -> int:
        done.append(given[2].value)
        ctypes.memset(to, 7, 128)
        return 0

    monkeypatch.setattr(tensor_map, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode, cuTensorMapReplaceAddress=replace))
    for_cuda.cache_clear()
    map_ = TensorMap("k", "K", "bfloat16", (59, 100, 4, 3), ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0)), (64, 128, 1, 1), 128)
    room, move = movable_for_cuda(map_, map_.byte_strides(25600, 6400, 64))
    assert room.nbytes == 128
    for address, wrote in (16, 7), (32, 9), (48, 7), (64, 9):
        move(address)
        assert bytes(room) == bytes([wrote]) * 128
    assert done == [16, (0, 32), (0, 48), 48, (0, 64)]
    monkeypatch.setattr(tensor_map, "_driver", lambda: SimpleNamespace(cuTensorMapReplaceAddress=lambda to, address: 1))
    with pytest.raises(KernelFault, match="not 16-byte aligned"):
        move(8)
