"""What a caller in Python is told: an argument that no kernel could take, a fault in Python's words, and the line a warning points to."""

from __future__ import annotations

import difflib
import inspect
import numbers
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..fault import Fault, KernelFault, UsageFault
from ..kernel import NoSuchPass, catalogue, find, is_path, parts
from ..problem import PASSES

# -- arguments --------------------------------------------------------------------------------------------------------


def usual(q: Any, k: Any, v: Any, kernel: Any) -> None:
    """Raise TypeError or ValueError for what is not three dense tensors and the name or path of a kernel."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            hint = "torch.from_numpy(array), or torch.as_tensor(values)"
            raise TypeError(str(Fault(f"{name} is a {type(tensor).__name__}", "attention takes torch tensors", hint)))
        if tensor.is_nested:
            hint = f"{name}.to_padded_tensor(0.0), or a call for each sequence; sdpa leaves nested tensors to torch's own"
            raise ValueError(str(Fault(f"{name} is a nested tensor", "kernels take dense ones, with rows of equal number", hint)))
        if tensor.layout is not torch.strided:
            raise ValueError(str(Fault(f"{name} is a tensor of {tensor.layout}", "kernels take dense ones", f"{name}.to_dense()")))
    if isinstance(kernel, tuple | list):
        hint = "kernel='./mine_forward.cu+fa2' has the forward pass of one and the backward pass of another"
        raise TypeError(str(Fault(f"kernel is a {type(kernel).__name__}", "it is a name, a number or a path", hint)))


def number(scale: Any) -> Any:
    """A scale as Python has numbers, also of a tensor of no dimensions. Raises ValueError for what is none."""
    hint = "scale=0.125, say, or leave it out for 1/sqrt(head_dim)"
    if isinstance(scale, torch.Tensor):
        if scale.dim():
            raise ValueError(str(Fault(f"scale has the shape {tuple(scale.shape)}", "it is one number for all scores", hint)))
        if scale.requires_grad and torch.is_grad_enabled():
            hint = "attention(q * scale, k, v, scale=1.0) has a gradient of it, or scale.detach()"
            raise ValueError(str(Fault("scale wants a gradient", "gradients flow to q, k and v alone", hint)))
        return scale.item()
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | torch.SymFloat | torch.SymInt):
        raise ValueError(str(Fault(f"scale is {scale!r:.40}", f"it is a number, not a {type(scale).__name__}", hint)))
    return scale


#: What to do where a derivative is not there.
BY_AUTOGRAD = "use .backward() or torch.autograd.grad"


def untransformed(*tensors: Any) -> None:
    """Raise RuntimeError for a tensor that torch.func differentiates: grad, vjp, jacrev."""
    functorch = torch._C._functorch
    for tensor in tensors:
        while functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_gradtrackingtensor(tensor):
                why = "its gradient is torch.autograd's, in reverse mode, once"
                raise RuntimeError(str(Fault("attention has no derivative for torch.func", why, BY_AUTOGRAD)))
            tensor = functorch.get_unwrapped(tensor)


#: By function: the arguments of the other one, with why it is none and what to do.
_OTHERS = {
    "attention": {
        "is_causal": ("attention calls it causal, and aligns it bottom-right", "causal=True, or sdpa(q, k, v, is_causal=True), which is torch's mask"),
        "enable_gqa": ("attention takes k and v with fewer heads as they are", "leave it out"),
        "attn_mask": ("attention has masks as texts", 'mask="q - k < 1024", or sdpa, which takes it as torch does'),
        "dropout_p": ("no kernel has it", "sdpa takes it, and leaves the call to torch's own"),
    },
    "sdpa": {
        "causal": ("sdpa has torch's names", "is_causal=True, which is aligned top-left"),
        "causal_shift": ("sdpa's mask is torch's, aligned top-left", "attention(q, k, v, causal=True, causal_shift=...)"),
        "return_lse": ("sdpa returns what torch's own does", "attention(q, k, v, return_lse=True)"),
    },
}  # fmt: skip


def unexpected(function: Callable[..., Any], name: str) -> TypeError:
    """The error of an argument that a function has not."""
    known = [each.name for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    near = difflib.get_close_matches(name, known, 1)
    why, hint = _OTHERS.get(function.__name__, {}).get(name, ("", f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"))
    return TypeError(str(Fault(f"{function.__name__}() got an unexpected keyword argument {name!r}", why, hint)))


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
    able = _with_both(dtype)
    lone = able and "+" not in spec
    if lone and "forward" in fault.what:
        pair = f", or {able[-1]}+{spec}" if dtype in find(spec, "backward").dtypes else ""
    else:
        pair = f", or {spec}+{able[-1]}" if lone else ""
    if len(passes) == 1:
        return fault.why, f"use a kernel with a forward pass: fa-cli list{pair}"
    return fault.why, f"for a gradient use one of {', '.join(able)}, which have both passes{pair}; without one torch.no_grad()"


def _no_file(fault: NoSuchPass, spec: str, passes: tuple[str, ...], dtype: str) -> tuple[str, str]:
    """Why a file is missing, and what to do: one that was named is written, or the pass is taken of the ladder."""
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
