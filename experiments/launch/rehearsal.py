"""What compiling the oracle's kernels ahead gains: python experiments/launch/rehearsal.py > experiments/launch/rehearsal.txt

While inputs are drawn, harness/check/ahead.py runs the code that judges on a few heads, so that CuPy's kernels are compiled at the same
time and not one after another. Here a first run is timed with that and without; the kernels under test are compiled in threads in both.
Each run is a process of its own with empty caches, and draws its inputs; the two take turns. The record is of commit c8b11b3, where the
kernels of a kernel's trial were compiled ahead, too, in every run: "no trial" is without them, and what is left now.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import time

import click
from first_contact import LARGE, ROOT, empty_caches, timed

RUNS = {
    "fa2, B4_H16_S4096_D128": ("run", *LARGE),
    "hopper --mode both, B1_H16_S16384_D128_bfloat16": (
        *("run", "hopper", "--mode", "both", "--dtype", "bfloat16"),
        *("--batch", "1", "--heads", "16", "--seq", "16384", "--dim", "128"),
    ),
}
WAYS = ("ahead", "not ahead")


def child(way: str, arguments: list[str]) -> None:
    """Run the command line in this process, in one of the ways."""
    sys.path.insert(0, str(ROOT))
    from harness.check import oracle

    if way != WAYS[0]:
        oracle.rehearsal = lambda *given: []
    sys.argv = [str(ROOT / "cli.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


@click.command()
@click.option("--rounds", default=3, help="Turns of each run.")
@click.option("--seconds", default=210.0, help="No turn begins after so many.")
@click.option("--device", default="auto", help="auto, cuda, cuda:N or cpu.")
def main(rounds: int, seconds: float, device: str) -> None:
    """A line for each run: the median seconds of each way, and all of them."""
    began = time.perf_counter()
    click.echo(f"{'seconds, medians':52}" + "".join(f"{way:>10}" for way in WAYS))
    found: dict[str, dict[str, list[float]]] = {what: {way: [] for way in WAYS} for what in RUNS}
    for turn in range(rounds):
        for what, arguments in RUNS.items():
            if time.perf_counter() - began > seconds:
                break
            for way in WAYS[:: 1 - 2 * (turn % 2)]:
                with empty_caches() as folder:
                    command = [sys.executable, __file__, "--child", way, *arguments, "--device", device]
                    found[what][way].append(timed(what, command, folder))
    for what, ways in found.items():
        if all(ways.values()):
            click.echo(f"{what:52}" + "".join(f"{statistics.median(each):10.2f}" for each in ways.values()))
            click.echo(f"{'':52}" + "  ".join(f"{way}: {' '.join(f'{s:.2f}' for s in each)}" for way, each in ways.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
