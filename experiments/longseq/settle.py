"""How long must a kernel have run alone before its speed has settled? python experiments/longseq/settle.py > experiments/longseq/settle.txt

Each contender rests a second, runs unrecorded for the settling time, then is recorded for 60 ms. At its power limit a GPU is faster in
its first milliseconds than it stays: speeds of attention kernels depend on it by up to a tenth.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.check.choose import AUTO, choose
from harness.check.oracle import oracle_for
from harness.check.request import Request
from harness.problem import Problem

SETTLE = (0.0, 0.03, 0.12, 0.5, 2.0)
NAMES = ("fa3", "fa4", "torch-cudnn", "torch-flash", AUTO)


def main() -> None:
    """One line a contender: TFLOP/s and the clock behind each settling time."""
    backend = backends.pick("cuda")
    problem = Problem.of(4, 16, 4096, 128, dtype="bfloat16")
    oracle = oracle_for(problem, backend, "forward")
    click.echo(f"{problem.folder} forward on {backend.device().name}: TFLOP/s (MHz at the end) after settling for … seconds")
    click.echo(f"{'':16}" + "".join(f"{seconds:>14}" for seconds in SETTLE))
    for one in choose(Request(NAMES, "forward", problem), backend.device())[0]:
        if one.peer and one.peer.absent("cuda"):
            click.echo(f"{one.name:16}absent")
            continue
        timed = one.run(backend, oracle, "forward").timed
        cells = []
        for settle in SETTLE:
            time.sleep(1.0)
            bursts = []
            for wanted in (settle, 0.06):
                waiting = [timed.enqueue() for _ in range(round(wanted / 1e-3))]
                bursts.append([finish() for finish in waiting])
            clock = backend.state().get("sm_clock_mhz")
            cells.append(f"{problem.flops('forward') / statistics.median(bursts[1]) / 1e12:.0f} ({clock})")
        click.echo(f"{one.name:16}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
