"""hopper forward under masks and scores beside its own plain causal and full speed, FlashAttention-3 and -4, and flex_attention.

    python experiments/variants/variants.py [--seconds 100] [--output variants.csv] [--seq 8192]

B2 H16 bfloat16, head dims 64 and 128. Rows of two heads are compared with float64. All contenders of a problem are timed in turns of 60 ms
(CUDA events, enqueued without a pause), five of each; a cell is the median turn's TFLOP/s of the visible pairs. A peer that
cannot run is named and left out. Of ours a call is the PyTorch operator's, whose host time is hidden behind the kernels.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402

from harness.torch_op import attention  # noqa: E402

BATCH, HEADS, WINDOW, CAP, PREFIX = 2, 16, 1023, 50.0, 1024
Call = Callable[[], Any]


class Variant:
    """A mask or score: the operator's words, and whether a query sees a key, and its score, as flex_attention and float64 ask."""

    def __init__(self, name: str, seq: int) -> None:
        self.name, self.seq = name, seq
        ends = [seq * part // 8192 for part in (0, 700, 2100, 4500, 5000, 8192)]
        lengths = torch.tensor([b - a for a, b in zip(ends, ends[1:], strict=False)])
        self.documents = torch.tensor(ends, dtype=torch.int32, device="cuda")
        self.of = torch.repeat_interleave(torch.arange(5), lengths).cuda()
        self.words: dict[str, Any] = {
            "full": {},
            "causal": {"causal": True},
            "window": {"window": (WINDOW, 0)},
            "documents": {"documents": self.documents},
            "documents causal": {"documents": self.documents, "causal": True},
            "prefix": {"mask": f"k <= q or k < {PREFIX}"},
            "alibi": {"score": f"s - exp2({-8 / HEADS} * (h + 1)) * abs(q - k)", "causal": True},
            "softcap": {"softcap": CAP, "causal": True},
        }[name]

    def sees(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        """mask_mod."""
        if self.name == "full":
            return (q >= 0) & (k >= 0)
        if self.name == "window":
            return (k <= q) & (q - k <= WINDOW)
        if self.name == "prefix":
            return (k <= q) | (k < PREFIX)
        if self.name.startswith("documents"):
            same = self.of[q] == self.of[k]
            return same & (k <= q) if self.name.endswith("causal") else same
        return k <= q

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        """score_mod."""
        if self.name == "alibi":
            return s - torch.exp2(-8 / HEADS * (h + 1)) * (q - k).abs()
        return CAP * torch.tanh(s / CAP) if self.name == "softcap" else s

    def pairs(self) -> int:
        """Visible pairs of a head."""
        rows = torch.arange(self.seq, device="cuda")
        return sum(int(self.sees(0, 0, part[:, None], rows).sum()) for part in rows.split(1024))


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def error(variant: Variant, q: Any, k: Any, v: Any, o: Any) -> float:
    """The largest error of O among rows of two heads, those at the ends of tiles and documents too."""
    seq, worst = variant.seq, 0.0
    rows = torch.unique(torch.cat([torch.arange(0, seq, 61), torch.arange(62, seq, 64), torch.arange(64, seq, 64)])).cuda()
    keys = torch.arange(seq, device="cuda")
    for b, h in ((0, 3), (BATCH - 1, HEADS - 1)):
        s = q[b, h, rows].double() @ k[b, h].double().T / q.shape[-1] ** 0.5
        s = variant.score(s, b, torch.tensor(h, device="cuda"), rows[:, None], keys)
        s = s.masked_fill(~variant.sees(b, h, rows[:, None], keys), -torch.inf)
        worst = max(worst, float((s.softmax(-1) @ v[b, h].double() - o[b, h, rows].double()).abs().max()))
    return worst


def peers(variant: Variant, q: Any, k: Any, v: Any, compiled: bool) -> dict[str, Call]:
    """Those that have the form: FlashAttention natively, flex_attention where `compiled`."""
    found: dict[str, Call] = {}
    flash: dict[str, Any] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window_size": (WINDOW, 0)},
        "softcap": {"causal": True, "softcap": CAP},
    }
    if variant.name in flash:
        rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        for name, module in (("fa3", "flash_attn_interface"), ("fa3", "fa3_fwd_interface"), ("fa4", "flash_attn.cute")):
            try:
                run = __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
                run(*rows, **flash[variant.name])
                torch.cuda.synchronize()
            except Exception as fault:  # a peer that is not there, or does not take the form
                say(f"{variant.name} {name} ({module}): {str(fault)[:90]!r}")
            else:
                found.setdefault(name, lambda run=run, rows=rows, options=flash[variant.name]: run(*rows, **options))
    if compiled:
        try:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:  # it takes no method
                return variant.sees(b, h, q, k)

            def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
                return variant.score(s, b, h, q, k)

            block = None if variant.name == "full" else create_block_mask(mask_mod, None, None, variant.seq, variant.seq, device="cuda")
            scored = score_mod if variant.name in ("alibi", "softcap") else None
            run_flex = torch.compile(flex_attention, dynamic=False)
            run_flex(q, k, v, score_mod=scored, block_mask=block)
            found["flex"] = lambda: run_flex(q, k, v, score_mod=scored, block_mask=block)
        except Exception as fault:
            say(f"{variant.name} flex: {str(fault)[:90]!r}")
    return found


def turns(calls: dict[str, Call], seconds: float = 0.06, count: int = 5) -> dict[str, float]:
    """Milliseconds of a call of each, the median of turns one after the other."""
    once, found = {}, {name: list[float]() for name in calls}
    for turn in range(count + 1):
        for name, call in calls.items():
            number = 1 if turn == 0 else max(2, round(1000 * seconds / once[name]))
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(number):
                call()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / number
            if turn == 0:
                once[name] = took
            else:
                found[name].append(took)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> int:
    """Check and time; a line a head dim and variant. Exit code 1 where ours is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=100, help="compile no peer of flex_attention after so many")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--only", default="", help="names of variants, with commas")
    parser.add_argument("--file", action="append", default=[], help="NAME=FILE: another text of the kernel, timed beside, at head dim 64")
    parser.add_argument("--output", type=Path, default=Path("variants.csv"))
    given = parser.parse_args()
    begun, wrong = time.perf_counter(), False
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    names = (
        given.only.split(",") if given.only else ["window", "documents", "alibi", "softcap", "prefix", "causal", "documents causal", "full"]
    )
    variants = [Variant(name, given.seq) for name in names]
    inputs = {dim: [torch.randn(BATCH, HEADS, given.seq, dim, device="cuda", dtype=torch.bfloat16) for _ in "qkv"] for dim in (64, 128)}

    kernels = {"hopper": "hopper"} | dict(each.split("=") for each in given.file)

    def ours(variant: Variant, dim: int, kernel: str = "hopper") -> Any:
        return attention(*inputs[dim], kernel=kernels[kernel], **variant.words)

    cells = [(variant, dim) for variant in variants for dim in inputs]
    with ThreadPoolExecutor(8) as pool:
        texts = [(*cell, name) for cell in cells for name in (kernels if cell[1] == 64 else ["hopper"])]
        list(pool.map(lambda each: ours(*each), texts))
    torch.cuda.synchronize()
    say(f"compiled after {time.perf_counter() - begun:.0f} s")
    causal = Variant("causal", given.seq)
    with open(given.output, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("variant", "dim", "contender", "ms", "TFLOPS", "of_own_causal", "error"))
        for compiled in (False, True):  # first without flex_attention, whose compiles take longest
            for variant, dim in cells:
                if compiled and time.perf_counter() - begun > given.seconds:
                    break
                q, k, v = inputs[dim]
                others = peers(variant, q, k, v, compiled)
                if compiled and "flex" not in others:
                    continue
                off = error(variant, q, k, v, ours(variant, dim))
                bad = not off < 0.04  # two roundings of 4 to bfloat16
                wrong |= bad
                calls: dict[str, Call] = {
                    name: lambda variant=variant, dim=dim, name=name: ours(variant, dim, name)
                    for name in (kernels if dim == 64 and not compiled else ["hopper"])
                } | others
                if variant.name != "causal":
                    calls["causal"] = lambda dim=dim: ours(causal, dim)
                found = turns(calls)
                rate = {name: 4 * dim * BATCH * HEADS * variant.pairs() / ms / 1e9 for name, ms in found.items()}
                if "causal" in found:
                    rate["causal"] = 4 * dim * BATCH * HEADS * causal.pairs() / found["causal"] / 1e9
                text = f"{variant.name:17} D{dim:<4} error {off:.4f}{' WRONG' if bad else ''}"
                for name, ms in found.items():
                    of_own = rate[name] / rate.get("causal", rate["hopper"])
                    table.writerow((variant.name, dim, name, f"{ms:.4f}", f"{rate[name]:.1f}", f"{of_own:.3f}", f"{off:.5f}"))
                    text += f"  {name} {rate[name]:.0f} ({ms:.3f} ms)"
                say(text)
                file.flush()
    say(f"ended after {time.perf_counter() - begun:.0f} s")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
