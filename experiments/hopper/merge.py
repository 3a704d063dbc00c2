"""One run of record of several that shared a sweep's shapes: python experiments/hopper/merge.py SWEEP FOLDER…

Each FOLDER holds the run of some tests of the sweep (`fa-cli experiment SWEEP --only … --output-dir …`), of one kind of GPU and one
commit. All contenders of a test were timed in turn in one of them, so their ratios are those of one GPU. The rows go to experiments/SWEEP
under one run_id, with the ceilings of the part that measured them and the env.json of the first; figures and summary.md are drawn, and
table.py's table.md is written.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import table

from harness import report
from harness.files import json_bytes, make_folder, write_files
from harness.row import CEILING, Row, encoded, read_rows
from harness.verbs import results
from harness.verbs.sweep import SWEEPS, load

#: What must be the same in the runs.
SAME = ("device_name", "git_commit", "driver", "cuda_runtime", "packages", "power_limit_w")


@click.command()
@click.argument("sweep")
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--figures/--no-figures", default=True)
def main(sweep: str, folders: tuple[Path, ...], figures: bool) -> None:
    """Write experiments/SWEEP, and figures into plots/."""
    envs = [json.loads((folder / "env.json").read_text()) for folder in folders]
    first, run_id = envs[0], envs[0]["run_id"]
    for env, folder in zip(envs, folders, strict=True):
        if differ := [name for name in SAME if env.get(name) != first.get(name)]:
            raise click.UsageError(f"{folder} is of another {', '.join(differ)} than {folders[0]}")
    rows: list[Row] = []
    ceilings: list[Row] = []
    samples = b""
    for folder in folders:
        whole = [replace(row, run_id=run_id) for row in read_rows(folder / "results.csv")]
        found = [row for row in whole if not row.Kernel.startswith(CEILING)]
        if twice := {row.Test for row in found} & {row.Test for row in rows}:
            raise click.UsageError(f"{folder} has tests that another folder has: {', '.join(sorted(map(str, twice)))}")
        rows += found
        ceilings = ceilings or [row for row in whole if row.Kernel.startswith(CEILING)]
        for line in (folder / "samples.jsonl").read_text().splitlines():
            samples += json.dumps(json.loads(line) | {"run_id": run_id}).encode() + b"\n"
    rows = [*ceilings, *results.with_peak(rows, ceilings)]
    target = SWEEPS / sweep
    make_folder(target)
    env = first | {"sweep": sweep, "parts": [{"command": env["command"], "run_id": env["run_id"]} for env in envs]}
    contents = {"results.csv": encoded(target / "results.csv", rows, anew=True), "samples.jsonl": samples, "env.json": json_bytes(env)}
    write_files(target, contents | {"table.md": table.table(rows, table.ours_of(rows)).encode()})
    if figures:
        report.redraw(target, SWEEPS.parent / "plots", sweep, load(sweep).title, texts=target)
    click.echo(f"{len(rows)} rows of {len(folders)} runs in {target}")


if __name__ == "__main__":
    main()
