"""What to write in place of a name or a header that a kernel cannot have: the constants and functions of C's and CUDA's libraries.

Neither the CPU engine nor NVRTC has headers beside <fa/...>; what softmax kernels take from <cmath> is there without one, or as a word.
"""

from __future__ import annotations

import re

from ..kernel import Kernel
from ..kernel.signature import without_comments

_MATH = "expf, logf, sqrtf, fmaxf and the like need no header, infinity is fa::infinity() of <fa/math.cuh>"
_TYPES = "fa::float16 and fa::bfloat16 of <fa/types.cuh>, with fa::widen and fa::narrow"
#: A name -> what to write.
NAMES = {
    **dict.fromkeys(
        ("INFINITY", "HUGE_VALF", "CUDART_INF_F", "infinity"), "fa::infinity() of <fa/math.cuh>, or __uint_as_float(0x7f800000u) without it"
    ),
    **dict.fromkeys(("FLT_MAX", "numeric_limits"), "fa::infinity() of <fa/math.cuh>, or 3.402823466e38f"),
    **dict.fromkeys(("NAN", "CUDART_NAN_F", "nanf"), "__uint_as_float(0x7fffffffu)"),
    "FLT_EPSILON": "1.1920929e-7f",
    "INT_MAX": "0x7fffffff",
    "M_LOG2E": "fa::log2e of <fa/math.cuh>",
    "M_LN2": "fa::ln2 of <fa/math.cuh>",
    **{name: name for name in ("max", "min", "abs", "isnan", "isinf", "sqrt", "fma")},
    **{"exp": "expf", "log": "logf", "pow": "powf", "tanh": "tanhf", "fmax": "fmaxf", "fmin": "fminf", "floor": "floorf", "ceil": "ceilf"},
    **dict.fromkeys(("exp10f", "__exp10f"), "powf(10.0f, x)"),
    **dict.fromkeys(("ex2", "__exp2f"), "exp2f(x), or fa::exp2_approx(x) of <fa/math.cuh>"),
    "__log2f": "log2f(x)",
    "__powf": "powf",
    "__fsqrt_rn": "sqrtf",
    "__fmaf_rn": "fmaf",
    **dict.fromkeys(("__frcp_rn", "__frcp_rz"), "1.0f / x"),
    **dict.fromkeys(("half", "__half", "__nv_bfloat16", "nv_bfloat16", "__half2float", "__float2half", "__bfloat162float"), _TYPES),
    "nvcuda": "the words of <fa/wmma.cuh>",
    **dict.fromkeys(("uint32_t", "int64_t", "uint16_t", "uint64_t", "int32_t", "uint8_t"), "#include <fa/args.cuh>, which has it"),
}
#: A header -> what to write.
HEADERS = {
    **dict.fromkeys(("cmath", "math.h", "cuda/std/cmath", "math_constants.h", "limits", "cfloat", "float.h", "algorithm"), _MATH),
    **dict.fromkeys(("cstdint", "stdint.h", "cstddef", "stddef.h"), "<fa/args.cuh> has uint32_t and int64_t"),
    **dict.fromkeys(("cuda_fp16.h", "cuda_bf16.h"), _TYPES),
    **dict.fromkeys(("cstdio", "stdio.h", "cassert", "assert.h"), "printf and assert need no header"),
    "mma.h": "the words of <fa/wmma.cuh>",
    **dict.fromkeys(("cuda_runtime.h", "cuda.h", "device_launch_parameters.h"), "threadIdx, __shared__ and the like need no header"),
}
#: How g++, clang++ and NVRTC name what they do not know.
_UNKNOWN = re.compile(
    r"(?:'(?P<g>\w+)' was not declared|'(?P<t>\w+)' does not name a type|use of undeclared identifier '(?P<c>\w+)'"
    r"|unknown type name '(?P<u>\w+)'|identifier \"(?P<n>\w+)\" is undefined|'(?P<m>\w+)' is not a member of 'std'"
    r"|no member named '(?P<k>\w+)' in namespace 'std'|namespace \"std\" has no member \"(?P<s>\w+)\""
    r"|(?:could not|cannot) open source file \"(?P<h>[\w./]+)\""
    r"|#include <(?P<i>[\w./]+)> has no meaning)"
)


def defined_again(kernel: Kernel) -> str:
    """What to do about a macro of the header that the kernel's file also defines; empty where there is none."""
    source = without_comments(kernel.path.read_text(encoding="utf-8-sig", errors="replace"))
    macros = {"HEAD_DIM": "head_dims", "CAUSAL": "causal", "DTYPE": "dtypes", "DETERMINISTIC": "deterministic"}
    macros |= {"HEAD_DIM_V": "head_dims"} if kernel.head_dim_v else {}
    macros |= {"DTYPE_KV": "dtypes_kv"} if kernel.dtypes_kv else {}
    macros |= {name: "[let]" for name in kernel.let if name.isupper()}
    macros |= {name: "[tile]" for name in kernel.tile if name not in kernel.runtime}
    for name, key in macros.items():
        if re.search(rf"\b(?:const|constexpr|int|unsigned|bool|auto)\b[^;(){{}}]*\b{name}\s*=(?!=)", source):
            return f"{name} is a macro, from {key} in the header: remove its definition"
    return ""


def instead(log: str) -> str:
    """What to write for the names and headers that a compiler's log says are not there; empty where none of them is known here."""
    if "too much shared data" in log:
        return "static __shared__ arrays have 48 KB: declare `extern __shared__ float smem[];`, and shared = BYTES below [[launch]] in the header"
    advice: dict[str, str] = {}
    for match in _UNKNOWN.finditer(log.replace("\N{LEFT SINGLE QUOTATION MARK}", "'").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")):
        for group, name in match.groupdict().items():
            if name and (known := (HEADERS if group in "hi" else NAMES).get(name)):
                label = f"<{name}>" if group in "hi" else f"std::{name}" if group in "mks" else name
                advice.setdefault(label, known)
    return "; ".join(f"for {name} write {word}" if name[0] != "<" else f"leave out {name}: {word}" for name, word in advice.items())
