"""The tensor maps of a header, [tensor_map.NAME]: how TMA reads a tensor, evaluated for a problem.

Coordinates and everything in their order are innermost first: (column, row, head, batch).
"""

from __future__ import annotations

from ..problem import DTYPE_BYTES, READS, WRITES, Problem
from .expression import Names
from .header import Table, bad
from .kernel import Kernel
from .plan import TensorMap, Workspace

#: Names of a tensor's strides in elements, which only a launch knows, in expressions of `strides`.
STRIDES = ("batch_stride", "head_stride", "row_stride")
#: The strides of dimensions 1 to 3 where the header gives none.
_OWN = ("row_stride", "head_stride", "batch_stride")
SWIZZLES = (0, 32, 64, 128)


def tensor_maps(kernel: Kernel, problem: Problem, names: Names, spaces: tuple[Workspace, ...]) -> tuple[TensorMap, ...]:
    """The maps of a kernel's header for a problem. spaces: the kernel's workspaces for it.

    Raises UsageFault, naming the file, for what no TMA descriptor can hold (CUDA driver API, cuTensorMapEncodeTiled).
    """
    known = {*READS[kernel.pass_], *WRITES[kernel.pass_], *(space.name for space in spaces)}
    for name, table in kernel.tensor_map.items():
        if table["tensor"] not in known:
            raise bad(kernel.path, 1, f"tensor_map {name} is of {table['tensor']}, which a {kernel.pass_} kernel is not given")
    return tuple(_map(kernel, name, table, problem, names, spaces) for name, table in kernel.tensor_map.items())


def _map(kernel: Kernel, name: str, table: Table, problem: Problem, names: Names, spaces: tuple[Workspace, ...]) -> TensorMap:
    tensor, what = table["tensor"], f"tensor_map {name}"
    space = next((s for s in spaces if s.name == tensor), None)
    dtype = space.dtype if space else problem.tensor_dtype(tensor)
    if space and not {"dims", "strides"} <= table.keys():
        raise bad(kernel.path, 1, f"{what} is of the workspace {tensor}: it needs dims and strides")
    own = tuple(reversed(problem.shape(tensor))) if not space else ()
    dims = tuple(names.number(d, f"{what}: dims") for d in table["dims"]) if "dims" in table else own
    given = table.get("strides", _OWN[-(len(dims) - 1) :] if len(dims) > 1 else ())  # logsumexp has no row stride
    box = tuple(names.number(b, f"{what}: box") for b in table["box"])
    swizzle = names.number(table.get("swizzle", 0), f"{what}: swizzle")
    inner = box[0] * DTYPE_BYTES[dtype]
    for wrong, why in (
        (not 1 <= len(dims) <= 5, f"has {len(dims)} dims; TMA takes 1 to 5"),
        (len(box) != len(dims), f"has {len(box)} sizes in box for {len(dims)} dims"),
        (
            len(given) != len(dims) - 1,
            f"has {len(given)} strides for {len(dims)} dims: one for each but the innermost, which is contiguous",
        ),
        (min(dims) < 1, f"has dims {dims}"),
        (not all(1 <= b <= 256 for b in box), f"has a box of {box} elements; TMA takes 1 to 256 a side"),
        (inner % 16 != 0, f"has box rows of {inner} bytes, which is no multiple of 16"),
        (swizzle not in SWIZZLES, f"has swizzle {swizzle}; it is one of {', '.join(map(str, SWIZZLES))} bytes"),
        (0 < swizzle < inner, f"has box rows of {inner} bytes, more than its swizzle of {swizzle}"),
    ):
        if wrong:
            raise bad(kernel.path, 1, f"{what} {why}")
    strides = []
    for each in given:
        if (stride := names.linear(each, STRIDES, f"{what}: strides")) is None:
            raise bad(kernel.path, 1, f"{what}: the stride {each!r} is no sum of multiples of {', '.join(STRIDES)}")
        strides.append(stride)
    last = dims[0] + sum((dim - 1) * constant for dim, (constant, *_) in zip(dims[1:], strides, strict=True))
    if space and last > space.elements:
        raise bad(kernel.path, 1, f"{what} reaches {last} elements of the workspace {tensor}, which has {space.elements}")
    return TensorMap(name, tensor, dtype, dims, tuple(strides), box, swizzle)
