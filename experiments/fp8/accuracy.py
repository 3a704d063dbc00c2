"""What 8 bits cost: RMS and largest error of O against float64 of the tensors that were not quantised, ours and peers, beside bfloat16's.

    python experiments/fp8/accuracy.py [--device cpu|cuda] [--keys 1024,2048]

Q, K and V are drawn in bfloat16, as a model has them: `normal`; `outliers`, N(0, 1) + N(0, 100) with a probability of 0.001 (Shah et al.
2024, arXiv 2407.08608, section 4.3); `sinks`, four first keys whose scores are some 12 above the others' and whose V is small. Contenders:

    float8            ours, quantised by fa_cli.quantize, a descale of each head; `rotated` with its Hadamard rotation
    fa3               FlashAttention-3 in 8 bits, of the same tensors and descales, where it is installed; likewise rotated
    bfloat16          the operator's choice for the tensors as they are

On a GPU queries are as many as keys, and 256 rows of each head are compared, with float64 on the GPU; the median of some 20 launches gives
TFLOP/s. On the CPU engine there are 64 queries and fewer keys: bits are Hopper's, there are no times. Rows go to accuracy.csv, in the place of
those of the same device and problem.
"""

import argparse
import csv
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.problem import Problem
from harness.row import rounded
from harness.torch_op import attention, quantize

FILE = Path(__file__).with_name("accuracy.csv")
INPUTS = ("normal", "outliers", "sinks")
HEADS, QUERIES, ROWS = 4, 64, 256  # queries: of the CPU engine; rows: of a head, that are compared on a GPU
KEYS = {"cpu": (256, 1024, 4096), "cuda": (1024, 4096, 16384, 65536, 131072)}
DIMS = {"cpu": (64, 128), "cuda": (64, 128, 256)}
SEED = 42


def drawn(kind: str, queries: int, keys: int, dim: int, device: Any) -> list[Any]:
    """Q, K and V, bfloat16, (1, HEADS, rows, dim), of the same values on each device."""
    draw = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(1, HEADS, rows, dim, generator=draw) for rows in (queries, keys, keys))
    if kind == "outliers":
        for t in (q, k, v):
            t += 10 * torch.randn(t.shape, generator=draw) * (torch.rand(t.shape, generator=draw) < 0.001)
    if kind == "sinks":
        along = (12 * dim**0.5 / dim) ** 0.5  # of each element: the product of two such rows / sqrt(dim) is 12
        q += along
        k[:, :, :4] = along + 0.1 * k[:, :, :4]
        v[:, :, :4] *= 0.01
    return [t.to(torch.bfloat16).to(device) for t in (q, k, v)]


def flash3() -> Callable[..., Any] | None:
    """FlashAttention-3's function where one of its packages is installed."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return __import__(name).flash_attn_func  # type: ignore[no-any-return]
        except ImportError:
            continue
    return None


def contenders(q: Any, k: Any, v: Any, causal: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call, which gives O."""
    fa3 = flash3() if q.is_cuda else None
    for suffix, rotate in (("", False), (" rotated", True)):
        tensors, descales = quantize(q, k, v, rotate=rotate)
        yield f"float8{suffix}", lambda tensors=tensors, descales=descales: attention(*tensors, causal=causal, **descales)
        if fa3:
            turned = [t.transpose(1, 2).contiguous() for t in tensors]

            def theirs(turned: Any = turned, descales: Any = descales) -> Any:
                made = fa3(*turned, causal=causal, **descales)
                return (made[0] if isinstance(made, tuple) else made).transpose(1, 2)

            yield f"fa3{suffix}", theirs
    yield "bfloat16", lambda: attention(q, k, v, causal=causal)


def exact(q: Any, k: Any, v: Any, rows: Any, causal: bool) -> Any:
    """O of some rows in float64, a head at a time."""
    made = []
    for head in range(HEADS):
        s = q[0, head, rows].double() @ k[0, head].double().T * q.shape[3] ** -0.5
        if causal:
            last = rows + (k.shape[2] - q.shape[2])
            s.masked_fill_(torch.arange(k.shape[2], device=q.device) > last[:, None], -torch.inf)
        made.append(s.softmax(-1) @ v[0, head].double())
    return torch.stack(made)[None]


def tflops(call: Callable[[], Any], problem: Problem) -> float:
    """Of the median of launches in a fifth of a second, 20 at most, after two."""
    times: list[float] = []
    for i in range(22):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end)] * (i >= 2)
        if sum(times) > 200:
            break
    return problem.flops("forward") / (sorted(times)[len(times) // 2] * 1e9)


def measured(q: Any, k: Any, v: Any, kind: str, causal: bool) -> list[dict[str, Any]]:
    """A row of each contender."""
    device, queries, keys, dim = q.device.type, q.shape[2], k.shape[2], q.shape[3]
    rows = torch.linspace(0, queries - 1, min(queries, ROWS), device=device).round().long()
    wanted, problem = exact(q, k, v, rows, causal), Problem.of(1, HEADS, queries, dim, HEADS, keys, "bfloat16", causal)
    made = []
    name = "" if device == "cpu" else torch.cuda.get_device_name()
    for contender, call in contenders(q, k, v, causal):
        error = call()[:, :, rows].double() - wanted
        row = {"device": device, "device_name": name, "inputs": kind, "dim": dim, "causal": str(causal).lower(), "queries": queries}
        row |= {"keys": keys, "contender": contender, "rms": float(error.square().mean().sqrt()), "largest": float(error.abs().max())}
        made.append(row | {"tflops": rounded(tflops(call, problem)) if device != "cpu" else ""})
    of = next(row["rms"] for row in made if row["contender"] == "bfloat16")
    for row in made:
        row |= {"rms": rounded(row["rms"]), "largest": rounded(row["largest"]), "of_bf16": rounded(row["rms"] / of)}
        sys.stdout.write("  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()) + "\n")
        sys.stdout.flush()
    return made


def kept(rows: list[dict[str, Any]]) -> None:
    """Write rows in the place of those of the same device and problem."""
    same = ("device", "inputs", "dim", "causal", "keys")
    new = {tuple(str(row[name]) for name in same) for row in rows}
    before = list(csv.DictReader(FILE.open())) if FILE.exists() else []
    every = [row for row in before if tuple(row[name] for name in same) not in new] + rows
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)


def main() -> None:
    """See the head of this file."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    ask.add_argument("--keys")
    given = ask.parse_args()
    keys = [int(n) for n in given.keys.split(",")] if given.keys else KEYS[given.device]
    for n, dim, kind in itertools.product(keys, DIMS[given.device], INPUTS):
        q, k, v = drawn(kind, QUERIES if given.device == "cpu" else n, n, dim, given.device)
        for causal in (False,) if given.device == "cpu" else (False, True):
            kept(measured(q, k, v, kind, causal))


if __name__ == "__main__":
    main()
