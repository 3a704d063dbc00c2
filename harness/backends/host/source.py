"""The translation unit for the C++ compiler: a kernel file, and a launcher for each entry.

A kernel of the tree is included unchanged. In a user's own file, declarations `extern __shared__` are rewritten (dynamic.py), and lines keep
their numbers. Inline PTX and CUDA's headers exist only for a GPU and are refused with their line.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...kernel import KERNELS, Kernel, include_closure
from ...kernel.header import SIZES
from ...kernel.signature import check_parameters, user_files, without_comments
from ..instead import HEADERS
from ..protocol import CompileError
from .dynamic import LEFT, with_dynamic_shared

HOST = KERNELS / "host"
#: The static `__shared__` arrays are thread-local storage, which the loader puts on the heap. Before and behind them lie so many bytes
#: that nothing may write, linked before and behind the unit.
GUARD = 4096
_END = '.section .note.GNU-stack,"",%progbits\n'
GUARDS = {
    "front.s": f""".section .tdata,"awT",%progbits
.p2align 6
.globl fa_host_anchor
.hidden fa_host_anchor
.type fa_host_anchor, %object
fa_host_anchor: .zero {GUARD}
{_END}""",
    "behind.s": f""".section .tbss,"awT",%nobits
.zero {GUARD}
{_END}""",
}

_FOREIGN = re.compile(r"\b(?:asm|__asm__)\b|^[ \t]*#[ \t]*include[ \t]*<(?!fa/)(?P<header>[^>]+)>", re.M)


def translation_unit(kernel: Kernel, shared: int = 0) -> str:
    """C++ source that includes a kernel file and exports fa_host_entry_<entry>(void** parameters) for each of its entries.

    shared: in a debug build the bytes of dynamic shared memory of a block. Raises CompileError for inline PTX and CUDA's headers, in
    the file or in a header of the user's that it includes, and for other forms of `extern __shared__`, UsageFault as check_parameters does.
    """
    check_parameters(kernel)
    for file in include_closure(kernel.path):
        if not file.is_relative_to(KERNELS):
            _refuse_other_languages(kernel, file)
    text = kernel.path.read_text(encoding="utf-8-sig")
    rewritten = with_dynamic_shared(text, shared)
    for file in user_files(kernel.path):
        _refuse_other_declarations(kernel, file, rewritten if file == kernel.path else file.read_text(encoding="utf-8", errors="replace"))
    source = f'#include "{kernel.path}"'
    if rewritten != text:
        source = f'#include <fa/warp.cuh>\n#line 1 "{kernel.path}"\n{rewritten}'
    exported = 'extern "C" __attribute__((visibility("default")))'
    entries = "\n".join(
        f"{exported} void fa_host_entry_{name}(void** p) {{ fa_host::Passed<{_sizes(args, kernel.maps_of(name))}>::call(&{name}, p); }}"
        for name, args in kernel.entries.items()
    )
    return f"""{source}
#line 1 "entries of {kernel.path.name}"
{entries}
extern __thread char fa_host_anchor __attribute__((visibility("hidden")));
{exported} void* fa_host_static_shared() {{ return &fa_host_anchor; }}
"""


def _sizes(args: tuple[str, ...], maps: tuple[str, ...]) -> str:
    """The bytes of each parameter that a launch passes, in C++."""
    own = [str(4 if name in SIZES else "FA_HOST_SCALE(DTYPE)" if name == "scale" else 8) for name in args] or ["sizeof(fa::Args)"]
    return ", ".join([*own, *(["128"] * len(maps))])


def _refuse_other_languages(kernel: Kernel, file: Path) -> None:
    bare = without_comments(file.read_text(encoding="utf-8", errors="replace"))
    if foreign := _FOREIGN.search(bare):
        line = bare.count("\n", 0, foreign.start()) + 1
        what = f"#include <{foreign['header']}>" if foreign["header"] else "inline PTX"
        why = f"{file}:{line}: {what} has no meaning on the CPU engine: there a kernel speaks CUDA C++ and the words of <fa/...>"
        raise CompileError(kernel, (), why if foreign["header"] in HEADERS else f"{why}; on a GPU it runs as it is (--device cuda)")


def _refuse_other_declarations(kernel: Kernel, file: Path, text: str) -> None:
    bare = without_comments(text)
    if left := LEFT.search(bare):
        line = bare.count("\n", 0, left.start()) + 1
        why = "write dynamic shared memory as `extern __shared__ TYPE NAME[];` in the kernel's own file"
        raise CompileError(kernel, (), f"{file}:{line}: {why}; on a GPU this runs as it is (--device cuda)")
