"""A kernel of the user's own: a copy of a correct kernel, under a new name, in the user's folder."""

from __future__ import annotations

import re
from pathlib import Path

from ..fault import UsageFault
from ..files import make_folder, write_files
from ..problem import PASSES
from .catalogue import NoSuchPass, catalogue, find
from .kernel import Kernel
from .tree import KERNELS

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_HEADER = re.compile(r"^// /// kernel *\n(?://.*\n)*?// /// *$", re.M)
#: A header key with its value; an array may span lines.
_KEY = r"^//[ ]*{key}[ ]*=[ ]*(?:\[[^\]]*\]|[^\n]*?)[^\n\]]*\n"


def new(name: str, source: str = "fa2", pass_: str = "forward", folder: Path = Path("."), plain: bool = False) -> Path:
    """Write folder/NAME_pass.cu, a copy of the kernel `source` (a name, number, alias or path), and return its path.

    The copy has no number and no aliases, its own title, and an opening paragraph: what to change first, which commands to try. The
    folder is made where it is missing. With plain it is no copy, but a short kernel with plain parameters (kernels_cu/plain).
    Raises UsageFault for a bad or taken name, an unknown source or pass, and a file that exists; DiskFault where it cannot be written.
    """
    _check_name(name)
    try:
        kernel = find(source, pass_)
    except NoSuchPass as fault:
        raise UsageFault(fault.what, fault.why, "fa-cli new NAME --from KERNEL --pass PASS with one that has it: fa-cli list") from None
    path = folder / f"{name}_{pass_}.cu"
    if path.exists() or path.is_symlink():
        raise UsageFault(f"{path} exists", "new never writes over a file", f"choose another name, or move it away: mv {path} {path}.old")
    if plain:
        text = (KERNELS / "plain" / f"plain_{pass_}.cu").read_text(encoding="utf-8")
        end = next(_HEADER.finditer(text)).end() + 1
        text = text[:end] + _plain_opening(name, pass_, path) + text[end:]
    else:
        text = _rename(kernel.path.read_text(encoding="utf-8-sig"), kernel, name, path)
    make_folder(folder)
    write_files(folder, {path.name: text.encode()})
    return path


def dtype_option(kernel: Kernel) -> str:
    """What a command says so that the kernel takes its problem: nothing where it takes float32, the default."""
    return "" if {"float32", "tf32"} & set(kernel.dtypes) else f" --dtype {kernel.dtypes[0]}"


def _plain_opening(name: str, pass_: str, path: Path) -> str:
    """What the parameters are, where they are listed, and the command that tells whether it is right."""
    where, mode = (str(path) if path.is_absolute() else f"./{path}"), " --mode both" if pass_ == "backward" else ""
    lines = [
        f"{name}: plain pointers and sizes, as a kernel of your own may have them. args above lists them in the order of the",
        "parameters. Tensors are contiguous, (batch, heads, seq, head_dim), logsumexp (batch, heads_q, seq_q). Under the causal mask",
        "key k is visible to query q where k <= q + causal_shift. What NVRTC compiles runs on a GPU; the CPU engine",
        "takes no inline PTX and no CUDA header.",
    ]
    lines += [f"Mode both also needs a forward pass: fa-cli new {name} --plain writes one."] * bool(mode)
    lines += ["", f"    fa-cli run --compute {where}{mode}"]
    return "".join(f"// {line}".rstrip() + "\n" for line in ["", *lines])


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        wish = re.sub(r"\W+", "_", re.sub(r"\.cu$", "", Path(name).name)).strip("_0123456789")
        raise UsageFault(
            f"{name!r} cannot name a kernel",
            "a name has letters, digits and _, and starts with a letter",
            f"fa-cli new {wish if _NAME.fullmatch(wish) else 'mine'}",
        )
    for pass_ in PASSES:
        if name == pass_ or name.endswith(f"_{pass_}"):
            short = name.removesuffix(pass_).rstrip("_") or "mine"
            raise UsageFault(f"{name!r} names a pass too", "the pass is added to the name", f"fa-cli new {short} --pass {pass_}")
    for kernel in catalogue():
        if name.lower() in (taken.lower().replace("-", "_") for taken in (kernel.name, *kernel.aliases)):
            raise UsageFault(
                f"{name} is a kernel of the tree", "both would have the same name in tables", f"fa-cli new my_{name} --from {kernel.name}"
            )


def _rename(text: str, kernel: Kernel, name: str, path: Path) -> str:
    """The source under its new name: a header without aliases and no variant's, its own title, an opening paragraph before the source's
    own."""
    end = next(_HEADER.finditer(text)).end()
    head, rest = text[:end].rstrip(" ") + "\n", text[end:].removeprefix("\n")
    head = re.sub(_KEY.format(key="aliases"), "", head, flags=re.M)
    for key in ("variant_of", "when") if kernel.variant_of else ():
        head = re.sub(_KEY.format(key=key), "", head, count=1, flags=re.M)
    head = re.sub(_KEY.format(key="title"), f'// title = "my kernel, from {kernel.name}"\n', head, count=1, flags=re.M)
    return head + _opening(kernel, name, path) + "//\n" + rest.removeprefix("//\n")


def _opening(kernel: Kernel, name: str, path: Path) -> str:
    """What to change first, and the two commands that tell whether it was for the better."""
    where = str(path) if path.is_absolute() else f"./{path}"
    both = any(each.name == kernel.name and each.pass_ != kernel.pass_ for each in catalogue())
    mode = (" --mode both" if both else " --mode backward") if kernel.pass_ == "backward" else ""
    work = f"the work itself: {', '.join(kernel.entries)} below."
    lines = [f"{name}: {kernel.label} as it stands, yours to change."]
    if kernel.tile:
        tiles = ", ".join(kernel.tile)
        lines += [
            f"Begin with the sizes under [tile] above ({tiles}): --tile NAME=VALUE tries one for a single run.",
            f"Then change {work}",
        ]
    else:
        lines += [f"Change {work}"]
    first = f"run --compute {where}{mode}"
    if mode and both:
        lines += [f"Mode both also needs a forward pass: fa-cli new {name} --from {kernel.name} writes one."]
    elif mode:
        first = f"verify {where}{mode}"
        lines += ["The second command reads the outputs of a forward pass of the same problem: run one of another kernel first."]
    dtype = dtype_option(kernel)
    lines += [
        "",
        f"    fa-cli {first}{dtype * (not first.startswith('verify'))}",
        f"    fa-cli run --compute {kernel.name},{where}{mode}{dtype}",
        "",
    ]
    lines += ["The first command says whether it is right, the second whether it is faster than the kernel that it is a copy of."]
    return "".join(f"// {line}".rstrip() + "\n" for line in ["", *lines])
