"""hopper forward where its tiles fit badly: few rounds of the multiprocessors, short sequences, unequal lengths under the causal mask.

    python experiments/hopper/tails.py --output tails.csv [--only TEXT] [--peers torch-cudnn,fa3,fa4] [--text FILE …]

Every form of the list below that can be launched on a problem is checked like a run of fa-cli, then all of them and the peers are timed in
turns, by device time (short ones from a CUDA graph). A line a problem and contender: milliseconds, TFLOP/s, the part of the fastest
peer's speed, and what counting predicts (`counted_us`: the blocks' works one after the other, each with a cost for the work and one for
each of its tiles of keys). --text: another text of the kernel, which is timed beside as its header chooses. On the CPU the problems are cut to a few
heads, so a run shows that the forms are right, and there are no times.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from harness import backends  # noqa: E402
from harness.check.ahead import load_all  # noqa: E402
from harness.check.choose import choose  # noqa: E402
from harness.check.contender import Contender  # noqa: E402
from harness.check.oracle import oracle_for  # noqa: E402
from harness.check.request import Request  # noqa: E402
from harness.fault import Fault, UsageFault  # noqa: E402
from harness.kernel import Device, Kernel, find, planner  # noqa: E402
from harness.measure.sampling import MANY, POLICY  # noqa: E402
from harness.problem import Problem  # noqa: E402
from harness.verbs import run  # noqa: E402

COLUMNS = ("problem", "contender", "ms", "TFLOPS", "of_best_peer", "of_header", "counted_us")
#: batch, heads, key heads, length, head dim, causal mask: the worst cells of a sweep `mixed`, and models' heads at other lengths.
PROBLEMS = (
    (16, 32, 32, 1024, 64, True),
    (32, 32, 32, 512, 64, True),
    (1, 4, 1, 2048, 256, True),
    (1, 12, 2, 2048, 128, True),
    (1, 4, 1, 2048, 128, True),
    (1, 14, 2, 1024, 64, True),
    (1, 4, 1, 2048, 128, False),
    (1, 4, 1, 2048, 256, False),
    (1, 4, 1, 1024, 128, True),
    (1, 8, 2, 1024, 128, False),
    (2, 8, 4, 1024, 256, True),
    (2, 16, 8, 1024, 256, True),
    (1, 16, 2, 2048, 256, False),
    (1, 9, 3, 2048, 64, True),
    (1, 12, 12, 4096, 64, True),
    (1, 24, 24, 4096, 128, False),
    (2, 71, 1, 2048, 64, True),
    (1, 16, 8, 3655, 128, True),
    (16, 12, 12, 512, 64, True),
    (32, 25, 25, 512, 64, True),
    (1, 8, 4, 8192, 256, True),
    (1, 32, 8, 8192, 128, True),
    (12, 24, 8, 169, 128, False),
    (1, 12, 2, 1536, 128, False),
    (2, 8, 8, 1664, 64, False),
    (4, 12, 12, 1024, 64, False),
    (12, 20, 20, 1500, 64, False),
    (32, 16, 16, 577, 64, False),
    (64, 12, 12, 128, 64, False),
    (6, 40, 8, 330, 128, True),
    (16, 32, 8, 264, 128, True),
    (4, 14, 2, 1000, 64, True),
    (8, 28, 4, 512, 128, True),
    (1, 20, 20, 2048, 128, True),
    (1, 40, 8, 2048, 128, True),
    (1, 8, 4, 4096, 256, True),
)
#: Cells of the record (16k tokens), which no form may make slower: with --cells in place of those.
CELLS = tuple(
    (16384 // seq, heads, heads, seq, dim, causal)
    for dim, heads in ((64, 32), (128, 16), (256, 8))
    for seq in (512, 1024, 2048, 4096, 16384)
    for causal in (True, False)
)
#: Head dims between 64, 128 and 256: with --between in place of those.
BETWEEN = (
    (2, 32, 32, 2048, 96, True),
    (5, 32, 32, 2015, 96, True),
    (4, 32, 32, 1500, 80, True),
    (1, 16, 16, 18339, 72, False),
    (3, 16, 16, 2048, 80, False),
    (3, 16, 16, 1151, 72, False),
    (2, 16, 16, 4096, 96, False),
    (2, 32, 32, 2048, 112, True),
    (2, 16, 16, 4096, 192, True),
    (16, 12, 12, 512, 96, True),
)
#: Their forms, by columns: 128 queries, with more keys too, and 192.
BETWEEN_FORMS: dict[int, tuple[dict[str, int], ...]] = {
    80: ({"CONSUMERS": 2}, {"CONSUMERS": 3}, {"CONSUMERS": 3, "BLOCK_K": 96}),
    96: ({"BLOCK_K": 144}, {"CONSUMERS": 3}, {"BLOCKS": 2}),
}
#: Tile values to try, by head dim; those that a text does not have, or that do not fit, are left out.
FORMS: dict[int, tuple[dict[str, int], ...]] = {
    64: ({"BLOCKS": 1, "CONSUMERS": 2}, {"BLOCKS": 1, "CONSUMERS": 3}, {"BLOCKS": 2}, {"BLOCKS": 3}),
    128: ({"BLOCKS": 1, "CONSUMERS": 2}, {"BLOCKS": 1, "CONSUMERS": 3}, {"BLOCKS": 2}),
    256: ({"BLOCK_K": 64, "SPLITS": 1}, {"BLOCK_K": 80, "SPLITS": 1}),
}
#: Where 128 queries a work make less than two rounds of the multiprocessors.
FEW: dict[int, tuple[dict[str, int], ...]] = {
    64: ({"BLOCKS": 2, "SPLITS": 2}, {"BLOCKS": 3, "SPLITS": 2}, {"BLOCKS": 3, "SPLITS": 4}),
    128: tuple({"BLOCKS": 1, "CONSUMERS": 2, "SPLITS": splits} for splits in (2, 3, 4)),
    256: ({"SPLITS": 2}, {"SPLITS": 3}, {"SPLITS": 4}),
}
#: Under the causal mask also with all heads in one section.
ONE_SECTION = 256
#: Microseconds of a work, and of 2^20 scores of its tiles at head dim 64, by head dim: a line through 512 and 1024 keys (docs/notes/22_hopper.md).
COST = {64: (1.5, 62.0), 128: (2.0, 106.0), 256: (5.6, 192.0)}
#: Microseconds of a part's O to the workspace and back, a guess.
MERGE = 2.0


def problem_of(shape: tuple[int, int, int, int, int, bool], small: bool) -> tuple[str, Problem]:
    """A name and the problem; on the CPU with few heads and at most 400 rows."""
    batch, heads, heads_kv, seq, dim, causal = shape
    name = f"B{batch} H{heads}" + (f"/{heads_kv}" if heads_kv != heads else "") + f" S{seq} D{dim}" + " causal" * causal
    if small:
        batch, heads, heads_kv, seq = min(batch, 2), 2 * heads // heads_kv if heads < 3 * heads_kv else 3, 1, min(seq, 400)
        heads_kv = 2 if heads % 2 == 0 else 1
    return name, Problem.of(batch, heads, seq, dim, heads_kv=heads_kv, dtype="bfloat16", causal=causal)


def forms(kernel: Kernel, label: str, problem: Problem, device: Device, every: bool) -> Iterator[Contender]:
    """The header's own choice, and every other form that can be planned."""
    if not every:
        yield Contender(label, {"forward": kernel})
        return
    seen = set()
    known = planner.names(kernel, problem, device)
    width = known["HEAD_DIM"]
    whole = {"SECTION": ONE_SECTION} if problem.causal else {}
    small = problem.batch * problem.heads_kv * problem.seq_kv * 4 * width < 40 << 20
    some = FORMS[width]
    if -(-problem.seq_q // 128) * problem.heads_q * problem.batch < 2 * device.sms:
        some += FEW[width]
    if known["COLUMNS"] != width:
        whole, some = {}, BETWEEN_FORMS.get(known["COLUMNS"], ())
    for values in ({}, whole, *(tiles | (whole if small else {}) for tiles in some)):
        if set(values) - set(kernel.tile):
            continue
        try:
            plan = planner.plan(kernel, problem, device, values)
        except UsageFault:
            continue
        if plan.macros in seen:
            continue
        seen.add(plan.macros)
        yield Contender(" ".join([label, *(f"{name}={value}" for name, value in values.items())]), {"forward": kernel}, tiles=values)


def counted(kernel: Kernel, tiles: Mapping[str, int], problem: Problem, device: Device) -> float:
    """Microseconds by counting: works, or parts of them, in the order of their numbers, each taken by the block that is free first.

    The text before BLOCKS took a number one work ahead, so a block's second work was fixed before its first.
    """
    names = planner.names(kernel, problem, device, tiles)
    dim, rows, keys = names["HEAD_DIM"], 64 * names["CONSUMERS"], names["BLOCK_K"]
    late = "BLOCKS" in kernel.tile
    blocks, splits = (names["BLOCKS"], names["SPLITS"]) if late else (1, 1)
    q_tiles = -(-problem.seq_q // rows)
    heads = problem.heads_q * problem.batch
    section = heads
    if problem.causal:
        kv_heads = max(1, min(problem.heads_kv * problem.batch, (names["SECTION"] << 20) // (4 * dim * problem.seq_kv)))
        section = kv_heads * (problem.heads_q // problem.heads_kv)
    fixed, score = COST[dim]
    lengths = []
    for first in range(0, heads, section):
        width = min(section, heads - first)
        for tile in reversed(range(q_tiles)) if problem.causal else range(q_tiles):
            seen = min(problem.seq_kv, (tile + 1) * rows) if problem.causal else problem.seq_kv
            lengths += [-(-seen // keys)] * width
    divided = names["divided"] if splits > 1 else 0
    limit = -(-max(lengths) // splits)
    tile, costs = blocks * score * rows * keys / 2**20, []
    for number, length in enumerate(lengths):
        parts = -(-length // limit) if number < divided else 1
        costs += [fixed + tile * length / parts + (MERGE if parts > 1 else 0)] * parts
    slots = min(len(costs), blocks * device.sms)
    free = [(0.0, index) for index in range(slots)]
    heapq.heapify(free)
    if late:
        for cost in costs:
            at, index = heapq.heappop(free)
            heapq.heappush(free, (at + cost, index))
        return max(at for at, _ in free)
    held = dict(enumerate(costs[:slots]))  # the work that a block has, beside the one it does
    waiting = iter(costs[slots:])
    free = [(0.0, index) for index in range(slots)]
    end = 0.0
    while free:
        at, index = heapq.heappop(free)
        end = max(end, at)
        if (cost := held.pop(index, None)) is not None:
            following = next(waiting, None)
            if following is not None:
                held[index] = following
            heapq.heappush(free, (at + cost, index))
    return end


def main(arguments: Sequence[str]) -> int:
    """Check and time every problem; write the table as it grows. Exit code 1 where a form is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="part of a problem's name")
    parser.add_argument("--cells", action="store_true", help="the record's cells instead")
    parser.add_argument("--between", action="store_true", help="head dims between 64, 128 and 256 instead")
    parser.add_argument("--first", type=int, help="the first problems only")
    parser.add_argument("--peers", default="torch-cudnn,fa3,fa4")
    parser.add_argument("--text", action="append", default=[], help="FILE, or FILE@PART for problems with this part in their name")
    parser.add_argument("--chosen", action="store_true", help="only the form that the header chooses")
    parser.add_argument("--sms", type=int)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no problem after so many")
    parser.add_argument("--output", type=Path, default=Path("tails.csv"))
    given = parser.parse_args(arguments)
    begun = time.perf_counter()
    backend = backends.pick(given.device, sms=given.sms)
    device, on_gpu = backend.device(), backend.name == "cuda"
    kernels = {"hopper": (find("hopper", "forward"), "")}
    for file, _, part in (text.partition("@") for text in given.text):
        kernels[Path(file).stem.removesuffix("_forward")] = (Kernel.read(Path(file).resolve()), part)
    wanted = CELLS if given.cells else BETWEEN if given.between else PROBLEMS
    shapes = [problem_of(shape, not on_gpu) for shape in wanted[: given.first]]
    several = {
        name: [
            c
            for label, (k, part) in kernels.items()
            if part in name
            for c in forms(k, label, p, device, label == "hopper" and not given.chosen)
        ]
        for name, p in shapes
        if given.only in name
    }
    problems = dict(shapes)
    if on_gpu:
        load_all(backend, [(each, problems[name]) for name, some in several.items() for each in some], ("forward",))
    sys.stdout.write(f"compiled after {time.perf_counter() - begun:.0f} s\n")
    wrong = False
    with open(given.output, "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for name, some in several.items():
            if time.perf_counter() - begun > given.seconds:
                break
            problem = problems[name]
            oracle = oracle_for(problem, backend, "forward", 42)
            peers = []
            for peer in given.peers.split(",") if on_gpu and given.peers else ():
                try:
                    peers += choose(Request(peer, "forward", problem), device)[0]
                except Fault as fault:
                    sys.stdout.write(f"{name} {peer}: {fault.what}\n")
            good = []
            for each in (*some, *peers):
                try:
                    result = run.check_in_memory(each, "forward", problem, backend, 42, oracle)
                except Fault as fault:
                    sys.stdout.write(f"{name} {each.name}: {fault.what} {fault.why}\n"[:500])
                    wrong |= not each.peer
                    continue
                if not result.passed:
                    sys.stdout.write(f"{name} {each.name} FAILS\n")
                    wrong |= not each.peer
                good.append(result)
            done = run.time_together(good, backend, "warm", MANY if on_gpu else replace(POLICY["cpu"], min_samples=1, max_samples=1))
            times = {each.compute: each.time_ms["forward"] for each in done}
            wrong |= any(bool(each.broken) for each in done)
            best = min((times[peer.name] or 1e9 for peer in peers if peer.name in times), default=None)
            header = times.get("hopper")
            for each in (*some, *peers):
                ms = times.get(each.name)
                about = "" if each.peer else f"{counted(each.kernels['forward'], each.tiles, problem, device):.1f}"
                rates = (f"{ms:.5f}", f"{problem.flops('forward') / ms / 1e9:.1f}") if ms and on_gpu else ("", "")
                ratios = [f"{other / ms:.3f}" if ms and other and on_gpu else "" for other in (best, header)]
                table.writerow(dict(zip(COLUMNS, (name, each.name, *rates, *ratios, about), strict=True)))
                sys.stdout.write(f"{name:32} {each.name:64} {rates[0]:>9} {rates[1]:>7} {ratios[0]:>6} {ratios[1]:>6} {about:>8}\n")
            file.flush()
            sys.stdout.flush()
    sys.stdout.write(f"ended after {time.perf_counter() - begun:.0f} s\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
