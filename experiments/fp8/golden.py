"""A million products of 8 bits by wgmma and by mma.sync, and as many conversions: GPU, CPU engine and a numpy model, bit for bit.

    python experiments/fp8/golden.py

A line a word and format: elements that differ between each two of them, of 1,048,576. Where the GPU's differ, the first of them, and how
many of a part other models give. Exit code 1 where anything differs. Without a GPU: engine and model.

The model is MMA-Sim's (Xie et al., arXiv 2511.10909): terms, the products and C, are aligned to the largest exponent and cut off so many
bits behind the point, added exactly, and so many bits of the sum are kept. wgmma: 32 products at once, 13 and 13 bits. mma.sync: what
ptxas makes for sm_90, two products of float16 (25 and 23 bits), of elements 4 i and 4 i + 1 of K and of the others, and an addition of C.
"""

import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.backends import Backend, pick
from harness.check.tensors import Bound
from harness.fault import Fault
from harness.kernel import Kernel
from harness.problem import Problem

FORMATS: tuple[Any, ...] = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
NAMES = ("e4m3", "e5m2")
LEAST, MOST = (-6, -14), (448.0, 57344.0)
WORDS = ("wgmma, A in shared memory", "wgmma, A in registers", "mma.sync", "conversions")
BLOCKS, STEPS, ROWS, COLUMNS, K = 16, 4, 64, 256, 32
PROBLEM = Problem.of(1, 1, 16384, 64)
FAMILIES = (
    "normal",
    "normal",
    "outliers",
    "wide",
    "wide",
    "bytes",
    "bytes",
    "cancelling",
    "cancelling",
    "subnormal",
    "large C",
    "large C",
    "any C",
    "any C",
    "sparse",
    "infinities and NaN",
)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def drawn(family: str, form: int, draw: np.random.Generator) -> tuple[Any, Any, Any]:
    """A (64, 128), B (256, 128), bytes, and C (4, 64, 256), float32, of one block."""
    shapes = ((ROWS, STEPS * K), (COLUMNS, STEPS * K))
    type_ = FORMATS[form]
    a, b = (draw.standard_normal(shape) for shape in shapes)
    c = draw.standard_normal((STEPS, ROWS, COLUMNS)) * 3
    if family == "outliers":
        a, b = (x * np.where(draw.random(x.shape) < 0.01, 100, 1) for x in (a, b))
    elif family == "wide":
        a, b = (np.ldexp(x, draw.integers(LEAST[form] - 4, 8, x.shape)) * (draw.random(x.shape) < 0.8) for x in (a, b))
        c = np.ldexp(c, draw.integers(-40, 20, c.shape))
    elif family == "cancelling":
        b[:, 1::2] = -b[:, ::2]
        a[:, 1::2] = a[:, ::2] * np.where(draw.random((ROWS, STEPS * K // 2)) < 0.9, 1, 1.1)
        c = c * np.ldexp(1.0, -draw.integers(0, 12, c.shape))
    elif family == "large C":
        c = np.ldexp(c, draw.integers(-4, 24, c.shape))
    elif family == "sparse":
        a = a * (draw.random(a.shape) < 0.05)
    bytes_ = [np.clip(x, -MOST[form], MOST[form]).astype(type_).view(np.uint8) for x in (a, b)]
    if family in ("bytes", "subnormal"):
        bytes_ = [draw.integers(0, 256 if family == "bytes" else 16, shape).astype(np.uint8) for shape in shapes]
        bytes_ = [np.where(draw.random(x.shape) < 0.5, x | 0x80, x) for x in bytes_]
        bytes_ = [np.where(np.isfinite(x.view(type_).astype(np.float32)), x, 0x3A) for x in bytes_]
        c = np.ldexp(c, draw.integers(-160, 0, c.shape)) if family == "subnormal" else c * np.ldexp(1.0, 3 * LEAST[form] + 30)
    c = c.astype(np.float32)
    if family == "any C":
        c = draw.integers(0, 1 << 32, c.shape).astype(np.uint32).view(np.float32)
        c = np.where(np.isfinite(c), c, np.float32(0))
    elif family == "infinities and NaN":
        of_bytes = np.array([0x7F, 0xFF] if form == 0 else [0x7C, 0xFC, 0x7D], np.uint8)
        bytes_ = [np.where(draw.random(x.shape) < 0.01, draw.choice(of_bytes, x.shape), x) for x in bytes_]
        of_c = np.array([np.inf, -np.inf, np.nan], np.float32)
        c = np.where(draw.random(c.shape) < 0.05, draw.choice(of_c, c.shape), c)
    return *(x.astype(np.uint8) for x in bytes_), c  # type: ignore[return-value]


def exponents(x: Any, least: int) -> Any:
    """Of each element; subnormal ones have the smallest normal number's, zeros none."""
    return np.where(x == 0, -400, np.maximum(np.frexp(x)[1] - 1, least))


def fused(a: Any, b: Any, c: Any, least: int, terms: int = 13, kept: int = 13) -> Any:
    """float64 a (M, K), b (N, K), c (M, N) -> the bits of c + a b^T in float32, terms and the sum cut off so many bits behind the point."""
    with np.errstate(all="ignore"):
        plain = a @ b.T + c
        a, b, c = (np.where(np.isfinite(x), x, 0) for x in (a, b, c))
        largest = (exponents(a, least)[:, None] + exponents(b, least)[None]).max(2)
        unit = np.ldexp(1.0, np.maximum(largest, exponents(c, -126)) - terms)
        total = np.trunc(c / unit)
        for k in range(a.shape[1]):
            total += np.trunc(a[:, k, None] * b[None, :, k] / unit)
        total = total * unit + 0.0
        last = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - kept)
        made = np.where(np.isfinite(plain), np.trunc(total / last) * last, plain).astype(np.float32)
        return np.where(np.isnan(made), np.uint32(0x7FFFFFFF), made.view(np.uint32))


def halves(a: Any, b: Any, c: Any) -> Any:
    """What mma.sync of 8 bits is on sm_90."""
    total = np.zeros_like(c)
    for part in (np.arange(K) % 4 < 2, np.arange(K) % 4 > 1):
        total = fused(a[:, part], b[:, part], total, -14, 25, 23).view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        made = c.astype(np.float32) + total.astype(np.float32)
    return np.where(np.isnan(made), np.uint32(0x7FFFFFFF), made.view(np.uint32))


def one_step(inputs: dict[str, Any], form: int, block: int, step: int) -> tuple[Any, Any, Any]:
    """A, B and C of a product, float64."""
    part = slice(K * step, K * step + K)
    a, b = (inputs[name][block][:, part].view(FORMATS[form]).astype(np.float64) for name in "QK")
    return a, b, inputs["V"][block][step].astype(np.float64)


def model(inputs: dict[str, Any], form: int, word: int) -> Any:
    """The bits that a word gives, (1048576,)."""
    if word == 3:
        x = inputs["V"].reshape(-1)
        with np.errstate(invalid="ignore"):
            made = np.clip(x, -MOST[form], MOST[form]).astype(FORMATS[form]).view(np.uint8)
        byte = np.where(np.isnan(x), 0x7F, made).astype(np.uint32)
        half = (np.arange(x.size) % 256).astype(np.uint8).view(FORMATS[form]).astype(np.float16)
        return (
            byte << 8
            | byte.reshape(-1, 2)[:, ::-1].reshape(-1)
            | np.where(np.isnan(half), 0x7FFF, half.view(np.uint16)).astype(np.uint32) << 16
        )
    steps = [one_step(inputs, form, block, step) for block in range(BLOCKS) for step in range(STEPS)]
    return np.concatenate([(halves(*each) if word == 2 else fused(*each, LEAST[form])).reshape(-1) for each in steps])


def answers(backend: Backend, inputs: dict[str, Any], form: int, word: int) -> Any:
    """The bits that a backend gives, (1048576,)."""
    kernel = Kernel.read(Path(__file__).with_name("golden_forward.cu"))
    tensors = {}
    for name in "QKV":
        tensors[name] = np.zeros(PROBLEM.shape(name), np.float32)
        raw = np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8)
        tensors[name].reshape(-1).view(np.uint8)[: raw.size] = raw
    bound = Bound(backend, backend.load(kernel, PROBLEM, {"FORMAT": form, "WORD": word}), PROBLEM, tensors)
    return np.ascontiguousarray(bound.run()["O"]).reshape(-1).view(np.uint32)


def others(inputs: dict[str, Any], form: int, word: int, gpu: Any) -> None:
    """Print which other models give what the GPU gives, of the first block and of that with any C."""
    for block in (0, FAMILIES.index("any C")):
        a, b, c = one_step(inputs, form, block, 0)
        got = gpu.reshape(BLOCKS, STEPS, -1)[block, 0]
        for least in (LEAST[form], -14) if word == 2 else (LEAST[form],):
            for terms, kept in ((12, 13), (13, 13), (14, 13), (13, 14), (13, 23), (14, 14), (25, 23)):
                whole = fused(a, b, c, least, terms, kept).reshape(-1)
                upper = fused(a[:, :16], b[:, :16], c, least, terms, kept).view(np.float32).astype(np.float64)
                split = fused(a[:, 16:], b[:, 16:], upper, least, terms, kept).reshape(-1)
                say(
                    f"    {FAMILIES[block]}: {terms} bits, {kept} of the sum, least exponent {least}: "
                    f"{(whole == got).sum()} of {got.size} at once, {(split == got).sum()} in halves"
                )


def main() -> int:
    """Print a line a word and format; 1 where anything differs."""
    began = time.perf_counter()
    backends = {"engine": pick("cpu")}
    try:
        backends["GPU"] = pick("cuda")
        say(f"GPU: {backends['GPU'].device().name}")
    except Fault:
        say("no GPU: engine and model only")
    differ = False
    for form in range(2):
        draw = np.random.default_rng(form)
        parts = [drawn(family, form, draw) for family in FAMILIES]
        inputs = {name: np.stack([part[i] for part in parts]) for i, name in enumerate("QKV")}
        wanted: dict[int, Any] = {}
        for word in range(4):
            bits = {name: answers(backend, inputs, form, word) for name, backend in backends.items()}
            wanted[word] = bits["model"] = wanted[0] if word == 1 else model(inputs, form, word)
            names = list(bits)
            counts = {(x, y): int((bits[x] != bits[y]).sum()) for i, x in enumerate(names) for y in names[i + 1 :]}
            say(f"{NAMES[form]} {WORDS[word]}: " + ", ".join(f"{x} and {y} differ in {count}" for (x, y), count in counts.items()))
            differ |= any(counts.values())
            for (x, y), count in counts.items():
                for at in np.flatnonzero(bits[x] != bits[y])[:4] if count else ():
                    family = FAMILIES[at // (STEPS * ROWS * COLUMNS)]
                    say(
                        f"    at {at} ({family}): {x} {bits[x][at]:#010x}, {y} {bits[y][at]:#010x}, C or input {inputs['V'].reshape(-1)[at]!r}"
                    )
            if word < 3 and counts.get(("GPU", "model")):
                others(inputs, form, word, bits["GPU"])
    say(f"{time.perf_counter() - began:.0f} s")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
