"""What a caller in Python is told: a fault in Python's words, and the line a warning points to."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from ..fault import Fault, KernelFault, UsageFault
from ..kernel import NoSuchPass, catalogue, find, is_path, parts
from ..problem import PASSES

# -- faults -----------------------------------------------------------------------------------------------------------

#: What the command line calls it -> what a caller in Python can do.
_IN_PYTHON = (
    (r" \(--[a-z-]+\)", ""),
    (r"use --dtype tf32\b", "use q.float(), k and v too"),
    (r"use --dtype (\w+)", r"use q.to(torch.\1), k and v too"),
    (r"use --dim (\S+)", r"use head dim \1"),
    (r"leave --scale out", "leave scale out"),
    (r"leave out --deterministic, or use", "use deterministic=False, or"),
    (r"--compute (\S+)", r'kernel="\1"'),
    (r"use --device cuda:0, or --device cpu|use --device cpu\b( for the CPU engine)?", "use CPU tensors"),
    (r"use --mode (forward|backward), or ", "use "),
    (r"use true or false", "use True or False"),
    (r"use --([a-z-]+) 1 or more", r"use \1 of 1 or more"),
    (r"--([a-z][a-z-]*)", r"\1"),
)
_COMMAND = re.compile(r"((?:fa-cli|pip|apt|compute-sanitizer) [^;,\n]*)")


def in_python(text: str) -> str:
    """A text of the command line's, for a caller in Python. Commands, which begin with their program, stay."""
    parts = _COMMAND.split(text)
    for index in range(0, len(parts), 2):
        for word, said in _IN_PYTHON:
            parts[index] = re.sub(word, said, parts[index])
    return "".join(parts)


def told(fault: Fault) -> str:
    """What, why and hint of a fault. The reason of one that is no mistake of the caller's is another program's text, and stays."""
    what, why = (in_python(fault.what), in_python(fault.why)) if isinstance(fault, UsageFault) else (fault.what, fault.why)
    return str(KernelFault(what, why, in_python(fault.hint)))


# -- a pass that is not there -----------------------------------------------------------------------------------------


def lacks(fault: NoSuchPass, spec: str, passes: tuple[str, ...], dtype: str) -> tuple[str, str]:
    """Why a kernel or file of a spec has no such pass, and what to do."""
    return (_no_file if is_path(spec) else _no_pass)(fault, spec, passes, dtype)


def _no_pass(fault: NoSuchPass, spec: str, passes: tuple[str, ...], dtype: str) -> tuple[str, str]:
    """Why a kernel of the ladder has no such pass, and what to do where a gradient is wanted."""
    able, pair = _with_both(dtype), ""
    if able and "+" not in spec:
        forward = "forward" in fault.what
        own = find(spec, "backward" if forward else "forward")
        other = ([name for name in able if find(name, "forward").head_dims[0] <= own.head_dims[-1]] or able)[-1]  # with heads as narrow
        pair = f", or {spec}+{other}" if not forward else f", or {other}+{spec}" if dtype in own.dtypes else ""
    if len(passes) == 1:
        return fault.why, f"use a kernel with a forward pass: fa-cli list{pair}"
    return fault.why, f"for a gradient use one of {', '.join(able)}, which have both passes{pair}; without one torch.no_grad()"


def _no_file(fault: NoSuchPass, spec: str, passes: tuple[str, ...], dtype: str) -> tuple[str, str]:
    """Why a file is missing, and what to do: one that was named is written, or the pass is taken of the ladder."""
    if fault.hint.startswith("use "):  # another spelling
        return "there is none of this name", fault.hint
    for path in map(Path, filter(is_path, parts(spec))):
        if path.name in fault.what:
            name, _, pass_ = path.stem.rpartition("_")
            command = f"fa-cli new {name} --from fa2 --pass {pass_}" if name and pass_ in PASSES else "fa-cli new NAME --from fa2"
            return f"it is not in {path.absolute().parent}", f"{command} writes one"
    able, backward = _with_both(dtype), fault.what.endswith("_backward.cu")
    step = "fa2" if "fa2" in able else able[-1] if able else ""
    pair = f', or kernel="{spec}+{step}" takes that of {step}' if step and backward and len(parts(spec)) == 1 else ""
    return fault.why, f"{fault.hint}{pair}{'; without a gradient torch.no_grad()' * backward}"


def _with_both(dtype: str) -> list[str]:
    """The kernels of the ladder with both passes, of which the backward pass has the dtype."""
    backward = [k.name for k in catalogue() if k.pass_ == "backward" and dtype in k.dtypes]
    return [k.name for k in catalogue() if k.pass_ == "forward" and k.name in backward]


# -- warnings ---------------------------------------------------------------------------------------------------------

_NOT_THE_CALLERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


def depth_of_caller() -> int:
    """The stack level, for a warning of the function that asks, of the first line that is neither torch's nor ours."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
        frame, depth = frame.f_back, depth + 1
    return depth
