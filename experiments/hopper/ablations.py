"""What each idea of hopper is worth: python experiments/hopper/ablations.py [--dtype float16] [--output-dir DIR]

The kernel as it is and with one idea switched off at a time, in turns in one process, settled, then the energy of each alone: at 16k
tokens, S = 4096, D64, D128 and D256, causal and not, in bfloat16 or the type asked for. Two minutes on an H200. tune.csv has a row a
variant, pruned ones with the reason; table.md the differences. CONSUMERS = 1 is no variant: a block of 256 threads starts with more registers a thread than
setmaxnreg would raise its consumer to. With --device cpu small shapes show that every variant is right; times are then left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.files import make_folder, write_files
from harness.kernel import find, planner
from harness.problem import Problem
from harness.report.summary import markdown_table
from harness.verbs.tune import Tuned, tune

#: What is switched off, by the tile values that do it; STAGES and CONSUMERS are other values of each shape's own.
OFF = {"MAXIMUM": [1], "PIN": [0], "PINGPONG": [0]}
COLUMNS = ("variant", "TF", "of the kernel as it is", "MHz", "W", "pJ/FLOP", "pJ/FLOP above it", "registers")


def variants(problem: Problem, device: backends.Backend) -> dict[str, list[int]]:
    """The values to try on a shape, one at a time."""
    now = planner.names(find("hopper", "forward"), problem, device.device())
    return OFF | {"STAGES": [now["STAGES"] // 2], "CONSUMERS": [5 - now["CONSUMERS"]]}


def lines(tuned: Tuned) -> str:
    """The table of a shape: the kernel as it is, then each variant beside it."""
    base = next(row for row in tuned.rows if row.default)
    found = []
    for row in sorted(tuned.rows, key=lambda row: not row.default):
        changed = [f"{name} = {value}" for name, value in row.tiles.items() if value != base.tiles[name]]
        cells = ["as it is" if row.default else ", ".join(changed)]
        if row.tflops is None:
            cells += [f"{row.status}: {row.why}" if row.status != "PASS" else "right", *[""] * (len(COLUMNS) - 2)]
        else:
            above = row.pj_per_flop - base.pj_per_flop if row.pj_per_flop and base.pj_per_flop else None
            cells += [f"{row.tflops:.0f}", "" if row.vs_default is None else f"{row.vs_default:.3f}"]
            cells += ["" if value is None else f"{value:.{digits}f}" for value, digits in ((row.sm_clock_mhz, 0), (row.power_w, 0))]
            cells += ["" if value is None else f"{value:.3f}" for value in (row.pj_per_flop, above)] + [str(row.registers or "")]
        found.append(cells)
    return f"{tuned.problem.describe()} on {tuned.device_name}\n\n{markdown_table(COLUMNS, found)}\n"


@click.command()
@click.option("--device", default="auto", help="auto, cuda, cuda:N or cpu.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16")
@click.option("--output-dir", type=click.Path(path_type=Path), default=Path(__file__).with_name("ablations"), show_default=False)
def main(device: str, dtype: str, output_dir: Path) -> None:
    """Print a table for each shape; write tune.csv, env.json and table.md. Exit code 1 where a variant is wrong."""
    backend, texts, fine = backends.pick(device), list[str](), True
    tokens, rows = (128, 128) if backend.name == "cpu" else (16384, 4096)
    make_folder(output_dir)
    (output_dir / "tune.csv").unlink(missing_ok=True)
    for dim in (64, 128, 256):
        for causal in (False, True):
            heads = 1 if backend.name == "cpu" else 2048 // dim
            problem = Problem.of(tokens // rows, heads, rows, dim, dtype=dtype, causal=causal)
            tuned = tune(
                "hopper", "forward", problem, tiles=variants(problem, backend), device=device, one_by_one=True, output_dir=output_dir
            )
            fine &= all(row.status in ("PASS", "PRUNED") for row in tuned.rows)
            texts.append(lines(tuned))
            click.echo(texts[-1])
    write_files(output_dir, {"table.md": "\n".join(texts).encode()})
    sys.exit(not fine)


if __name__ == "__main__":
    main()
