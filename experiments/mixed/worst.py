"""The problems of the sweep `mixed` where ours is furthest behind, settled: every form of ours beside the best peers, and what a brief policy says.

    python experiments/mixed/worst.py --device cuda [--seconds 90] [--only TEXT] [--old FOLDER]

A line a form or peer: the median ms, and the fastest peer's time over it. Of what is chosen and of the peers also by the policy of the
sweep (sampling.MANY), its ratio behind: how much of a low cell the brief policy makes. With --old the chosen file of that folder is a
form, too. Forms are not checked: `fa-cli verify` does that. It stops after so many seconds, between problems.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from costs import KERNELS, Form, drawn, kernels  # noqa: E402

from harness import backends, peers  # noqa: E402
from harness.check.tensors import Bound  # noqa: E402
from harness.dataset.storage import widen  # noqa: E402
from harness.fault import Fault  # noqa: E402
from harness.kernel import Device, Kernel, catalogue, planner  # noqa: E402
from harness.measure.sampling import MANY, POLICY, measure  # noqa: E402
from harness.problem import READS, WRITES, Problem  # noqa: E402

BF, HALF = "bfloat16", "float16"
Tiles = dict[str, int]


def tiles(**several: tuple[int, ...]) -> list[Tiles]:
    """Every combination of values."""
    made: list[Tiles] = [{}]
    for name, each in several.items():
        made = [{**some, name: value} for some in made for value in each]
    return made


def sized(batch: int, heads: int, heads_kv: int, seq: int, seq_kv: int, dim: int, dtype: str, causal: bool) -> Problem:
    """A problem by its sizes."""
    return Problem.of(batch, heads, seq, dim, heads_kv, seq_kv, dtype, causal)


def packs(*several: int) -> list[tuple[str, Tiles]]:
    """Heads in a tile of queries."""
    return [("hopper", {"PACK": value}) for value in several]


def splits(*several: int) -> list[tuple[str, Tiles]]:
    """Works that share a tile of keys."""
    return [("hopper", {"SPLITS": value}) for value in several]


def merged(**tiles: int) -> tuple[str, Tiles]:
    """Parts of the keys that a launch of its own merges, or none, of one head in a tile of queries."""
    return ("hopper", {"SPLITS": 1, "PACK": 1, "BLOCKS": 2, "MERGE": 1} | tiles)


FA3, FA4, BOTH, FLASH, SOURCE = ("fa3",), ("fa4",), ("fa3", "fa4"), ("fa3", "torch-flash"), ("fa3-source",)
#: Passes, problems and their peers, with forms besides those chosen: the kernel's name and tile values.
WORST: list[tuple[str, Problem, tuple[str, ...], list[tuple[str, Tiles]]]] = [
    # Works that fill at most half of a round: keys divided among three consumers' works, queries in parts of fewer than five tiles
    ("forward", sized(1, 36, 4, 181, 3656, 128, HALF, True), BOTH, [*splits(1, 2), ("hopper", {"SPLITS": 1, "CONSUMERS": 2})]),
    ("forward", sized(1, 36, 36, 181, 3656, 128, HALF, False), FA3, splits(1, 2)),
    ("backward", sized(4, 14, 2, 466, 466, 64, BF, True), SOURCE, splits(2, 3, 4)),
    ("backward", sized(2, 14, 2, 466, 466, 64, BF, True), SOURCE, splits(2, 3, 4, 5)),
    ("backward", sized(1, 14, 2, 1024, 1024, 64, BF, True), SOURCE, splits(5, 6, 8)),
    ("backward", sized(9, 14, 2, 210, 210, 64, BF, True), SOURCE, splits(1, 2)),
    ("backward", sized(2, 32, 8, 512, 512, 64, BF, True), SOURCE, splits(1, 2)),
    (
        "backward",
        sized(1, 71, 1, 12730, 12730, 64, BF, True),
        SOURCE,
        [("hopper", t) for t in tiles(SPLITS=(1, 4, 8), SECTION=(16, 32, 64))],
    ),
    # Forward: the works of the last round are divided, under the mask too; few works of 128 queries and more, whose keys are divided
    ("forward", sized(1, 14, 2, 3574, 5723, 64, BF, True), BOTH, splits(1, 2, 3, 4)),
    ("forward", sized(1, 16, 16, 3814, 4096, 64, HALF, False), BOTH, splits(1, 2, 4)),
    ("forward", sized(1, 12, 12, 128, 4096, 64, BF, False), FLASH, [merged(BLOCKS=3, MERGE=0, PARTS=1), merged(PARTS=4), merged(PARTS=11)]),
    ("forward", sized(1, 36, 4, 1024, 5284, 128, HALF, True), BOTH, splits(1, 2, 3, 4)),
    ("forward", sized(1, 12, 12, 128, 4096, 128, BF, False), FLASH, [merged(PARTS=8), merged(PARTS=5)]),
    ("forward", sized(8, 56, 8, 152, 947, 128, HALF, True), BOTH, splits(1, 2)),
    ("forward", sized(1, 12, 12, 300, 4096, 64, BF, True), FLASH, [merged(BLOCKS=2, MERGE=0, PARTS=1), merged(PARTS=2)]),
    ("forward", sized(1, 24, 24, 3582, 3582, 128, BF, False), BOTH, splits(1, 2, 4)),
    ("forward", sized(1, 12, 4, 500, 2048, 64, BF, False), FLASH, [merged(BLOCKS=2, MERGE=0, PARTS=1)]),
    ("forward", sized(2, 25, 25, 2048, 2048, 64, HALF, False), BOTH, splits(1, 2, 4)),
    ("forward", sized(1, 16, 16, 8192, 8192, 72, HALF, False), ("torch-cudnn",), splits(1, 2, 4)),
    ("forward", sized(1, 32, 8, 128, 8192, 128, BF, True), FLASH, [merged(PARTS=3), merged(PACK=4, PARTS=4)]),
    # Ragged tiles of grouped heads, forward: several heads in a tile (PACK)
    ("forward", sized(31, 16, 2, 156, 156, 256, HALF, True), FA4, packs(1, 2, 8)),
    ("forward", sized(14, 8, 4, 524, 524, 256, HALF, False), FA4, packs(1)),
    ("forward", sized(12, 16, 8, 469, 469, 256, BF, True), BOTH, packs(1)),
    ("forward", sized(13, 8, 4, 256, 256, 256, BF, True), BOTH, packs(1)),
    ("forward", sized(7, 16, 2, 1913, 1913, 256, BF, True), BOTH, packs(1, 2, 4)),
    (
        "forward",
        sized(41, 64, 4, 192, 192, 128, BF, True),
        BOTH,
        [*packs(1, 4), ("hopper", {"PACK": 4, "CONSUMERS": 2}), ("hopper", {"PACK": 16, "CONSUMERS": 2})],
    ),
    ("forward", sized(11, 64, 8, 190, 190, 128, BF, True), BOTH, [*packs(1, 2, 8), ("hopper", {"PACK": 8, "CONSUMERS": 2})]),
    (
        "forward",
        sized(23, 64, 4, 277, 277, 128, BF, True),
        FA3,
        [*packs(1, 4), ("hopper", {"PACK": 8, "BLOCKS": 1, "CONSUMERS": 2, "BLOCK_K": 128})],
    ),
    ("forward", sized(4, 48, 8, 1797, 1797, 128, HALF, True), FA4, packs(1)),
    ("forward", sized(1, 16, 2, 1456, 4096, 128, BF, True), BOTH, packs(1, 8)),
    ("forward", sized(14, 32, 8, 202, 202, 128, BF, False), FA3, packs(1, 2)),
    ("forward", sized(3, 32, 4, 493, 2345, 128, HALF, True), FA4, packs(1, 8)),
    ("forward", sized(2, 32, 4, 7366, 7366, 64, HALF, True), FA4, packs(1, 4)),
    ("forward", sized(13, 64, 8, 339, 1037, 64, BF, True), BOTH, [*packs(1, 2), ("hopper", {"PACK": 8, "BLOCKS": 1, "CONSUMERS": 3})]),
    ("forward", sized(2, 32, 4, 2346, 2346, 64, BF, True), FA3, packs(1, 8)),
    ("forward", sized(53, 32, 32, 128, 128, 80, HALF, True), ("torch-cudnn",), []),
    # No mask, backward: only the works of the last round are divided
    ("backward", sized(1, 32, 8, 4697, 4697, 128, HALF, False), FA4, splits(1, 4, 8)),
    ("backward", sized(5, 28, 4, 2048, 2048, 128, HALF, False), FA4, splits(1, 4, 7)),
    ("backward", sized(14, 36, 4, 931, 931, 128, BF, False), FA4, splits(1, 5)),
    ("backward", sized(1, 24, 24, 4881, 4881, 128, BF, False), FA4, [*splits(1, 5), ("hopper", {"BACKWARDS": 1})]),
    ("backward", sized(1, 36, 4, 22201, 22201, 128, BF, False), FA4, splits(1)),
    ("backward", sized(2, 24, 24, 4096, 4096, 128, BF, False), FA4, [*splits(3), ("hopper", {"BACKWARDS": 1})]),
    ("backward", sized(4, 16, 16, 4096, 4096, 128, BF, False), FA4, [*splits(3), ("hopper", {"BACKWARDS": 1})]),
    ("backward", sized(1, 16, 16, 16384, 16384, 128, BF, False), FA4, [*splits(1, 3), ("hopper", {"BACKWARDS": 1})]),
    ("backward", sized(1, 9, 3, 10097, 10097, 64, BF, False), FA4, splits(1, 3)),
    ("backward", sized(1, 12, 12, 2048, 2048, 64, HALF, False), FA4, splits(1, 4)),
    # Sections and splits, backward
    ("backward", sized(4, 48, 8, 1797, 1797, 128, HALF, True), FA4, [("hopper", t) for t in tiles(SPLITS=(1, 2), SECTION=(64, 16))]),
    ("backward", sized(3, 14, 2, 842, 842, 64, BF, True), FA4, [("hopper", t) for t in tiles(SPLITS=(4, 6), SECTION=(64,))]),
    ("backward", sized(1, 32, 32, 6142, 6142, 96, BF, True), FA4, [("hopper", t) for t in tiles(SECTION=(32, 16))]),
]


def chosen(pass_: str, problem: Problem, device: Device) -> Kernel:
    """The file that auto takes, as it runs."""
    for kernel in reversed(catalogue()):
        if kernel.pass_ == pass_ and kernel.name in KERNELS and not kernel.variant_of:
            with suppress(Fault):
                planner.refuse(kernel, problem)
                if planner.for_auto(kernel, problem, device):
                    return planner.variant(kernel, problem)
    raise AssertionError(problem)


def forms(pass_: str, problem: Problem, device: Device, others: list[tuple[str, Tiles]], old: Path | None) -> dict[str, Form]:
    """What is chosen, its old version, then the others."""
    kernel = chosen(pass_, problem, device)
    values = planner.names(kernel, problem, device)
    shown = [n for n in ("BLOCKS", "CONSUMERS", "PACK", "BLOCK_K", "SPLITS", "PARTS", "SECTION", "BACKWARDS") if n in kernel.tile]
    found = {f"chosen {kernel.name} " + " ".join(f"{n}={values[n]}" for n in shown): Form(kernel, {})}
    if old:
        for file in sorted(old.glob(f"[0-9][0-9]_{kernel.name}_{pass_}.cu")):
            found["old"] = Form(planner.variant(Kernel.read(file), problem), {})
    each = {kernel.name: kernel for kernel in kernels(pass_, problem)}
    for name, some in others:
        plans = [planner.plan(f.kernel, problem, device, f.tiles) for f in found.values()]
        if name in each and not any(plan == planner.plan(each[name], problem, device, some) for plan in plans):
            found[f"{name} " + " ".join(f"{n}={v}" for n, v in some.items())] = Form(each[name], some)
    return found


def outputs(bound: Bound) -> dict[str, Any]:
    """What a launch writes."""
    bound.launch()
    xp, tensors = bound.backend.xp, {name: bound.tensors[name] for name in WRITES[bound.pass_]}
    return {name: widen(xp, each.values(), bound.problem.tensor_dtype(name), "float32") for name, each in tensors.items()}


def difference(some: dict[str, Any], others: dict[str, Any]) -> float:
    """The largest difference of two forms' tensors, as a part of the largest value of each."""
    return max(float(abs(some[name] - other).max() / abs(other).max()) for name, other in others.items())


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="", help="part of a problem's words")
    parser.add_argument("--old", type=Path, help="a folder of older versions")
    given = parser.parse_args()
    began, backend = time.monotonic(), backends.pick(given.device)
    device = backend.device()
    policy = replace(MANY, settle=0.08, brief=None, turn=0.03, min_seconds=0.03, max_seconds=0.15, patience=0.2)
    if backend.name == "cpu":
        policy = POLICY["cpu"]
    wanted = [(p, q, names, forms(p, q, device, others, given.old)) for p, q, names, others in WORST if given.only in f"{p} {q.describe()}"]
    loads = {}
    for _, problem, _, every in wanted:
        for form in (*every.values(), Form(next(kernels("forward", problem)), {})):
            loads[form.kernel.path, planner.plan(form.kernel, problem, device, form.tiles).macros] = form, problem

    def load(each: tuple[Form, Problem]) -> None:
        with suppress(Fault):
            backend.load(each[0].kernel, each[1], each[0].tiles)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(load, loads.values()))
    say(f"compiled {len(loads)} after {time.monotonic() - began:.0f} s")
    for pass_, problem, names, every in wanted:
        if time.monotonic() - began > given.seconds:
            say("out of time")
            break
        if backend.name == "cuda":
            backend.xp.get_default_memory_pool().free_all_blocks()
        say(f"{pass_} {problem.describe()}, after {time.monotonic() - began:.0f} s")
        inputs = drawn(backend, problem, ("Q", "K", "V", "dO"))
        if pass_ == "backward":
            forward = next(kernels("forward", problem))
            first = Bound(backend, backend.load(forward, problem), problem, {name: inputs[name] for name in READS["forward"]})
            first.launch()
            inputs |= {name: tensor.values() for name, tensor in first.tensors.items() if name in ("O", "logsumexp")}
        inputs = {name: inputs[name] for name in READS[pass_]}
        ready: dict[str, Any] = {}
        for words, form in every.items():
            try:
                ready[words] = Bound(backend, backend.load(form.kernel, problem, form.tiles), problem, inputs)
            except Fault as fault:
                say(f"  {words}: {fault.what}")
        ours = next(iter(ready))
        results = {words: outputs(bound) for words, bound in ready.items()}
        apart = {words: difference(found, results[ours]) for words, found in results.items()}
        results.clear()
        for name in names:
            peer = peers.find(name)
            if peer and backend.name == "cuda":
                try:
                    ready[name] = peer.prepare(problem, inputs, pass_)
                except Exception as fault:
                    say(f"  {name}: {str(fault)[:90]}")
        settled = {name: timing.median_ms for name, timing in measure(ready, backend, "warm", policy).items()}
        few = {name: each for name, each in ready.items() if name == ours or peers.find(name)}
        brief = {name: t.median_ms for name, t in measure(few, backend, "warm", MANY).items()} if backend.name == "cuda" else {}
        best = min((settled[name] for name in few if name != ours), default=settled[ours])
        best_brief = min((brief[name] for name in brief if name != ours), default=0.0)
        for name, ms in settled.items():
            more = f"   brief {brief[name]:.4f} {best_brief / brief[name]:.3f}" if name in brief else ""
            other = f"   {apart[name]:.4f} apart" if apart.get(name) else ""
            say(f"  {name:60} {ms:.4f} {best / ms:.3f}{more}{other}")
    say(f"done after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
