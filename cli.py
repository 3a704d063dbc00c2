"""The command line: each verb parses, calls the harness once, and prints. No mathematics; nothing heavy is imported before a verb runs."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # python cli.py; the installed command starts in __main__.py
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]  # python -I and PYTHONSAFEPATH leave it out
    from harness.terminal import interrupt

    interrupt.at_once()

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING or not __package__:
    import harness
    from harness.terminal import errors, group, help, options
else:  # installed, the same files are the package fa_cli
    from . import harness
    from .harness.terminal import errors, group, help, options

Context = click.Context


@click.group(
    cls=group.FaCli,
    context_settings=group.SETTINGS,
    epilog=f"{help.EXIT_CODES}\n\n"
    + help.examples("fa-cli gen-data --seq 512", "fa-cli run --compute fa2 --mode both", "fa-cli experiment --seqlen"),
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=options.print_version, help="Show the version and exit."
)
def main() -> None:
    """Hand-written CUDA attention kernels: run one .cu file, check it against float64, time it, with or without a GPU."""


@main.command(
    "gen-data",
    epilog=help.examples("fa-cli gen-data --batch 2 --heads 8 --seq 512 --dim 64", "fa-cli gen-data --seq 1024 --dtype bfloat16"),
)
@options.shape
@options.data_root
@click.option("--force", is_flag=True, help="Replace a folder that holds other data.")
@options.printing
@click.pass_context
def gen_data(context: Context, /, output_dir: Path, force: bool, json: bool, **given: options.Value) -> int:
    """Write Q, K, V and dO of a problem into a folder such as data/B2_H8_S512_D64: seeded normal values, raw little-endian."""
    progress = harness.terminal.progress.teller(context.obj["verbosity"])
    written = harness.dataset.write(options.problem_of(given), given["seed"], output_dir, force, progress)
    progress("")
    return harness.terminal.show.results.dataset(written, json, context.obj["verbosity"])


@main.command(
    epilog=f"{help.CAUSAL}\n\n{help.EXIT_CODES}\n\n"
    + help.examples(
        "fa-cli run --compute fa2 --mode both",
        "fa-cli run --compute fa2,fa1,naive --seq 256 --device cpu",
        "fa-cli run --compute ./mine_forward.cu --data data/B2_H8_S512_D64 --causal",
    )
)
@options.computes
@options.mode
@click.option("--data", type=options.folder, help="A folder of gen-data. Without it, the folder of the shape below is made or reused.")
@options.shape
@options.data_root
@options.mask
@options.formulas
@options.device
@options.tile
@options.deterministic
@click.option("--tolerance", type=float, callback=options.parse_tolerance, help="Also fail where an absolute error exceeds this.")
@click.option("--allow-nonfinite", is_flag=True, help="Accept NaN and Inf in the inputs.")
@options.checks_and_sms
@options.samples
@click.option("--no-time", is_flag=True, help="Check only: each kernel is launched once more, and not timed.")
@click.option("--watch", is_flag=True, help="Run again at every save of the kernel, and show what it changed. Ctrl-C ends it: exit code 0.")
@click.option("--debug", is_flag=True, help="Build for a debugger and start gdb (on a GPU cuda-gdb), or print its command. No times.")
@click.option("--no-gpu-reference", is_flag=True, hidden=True, expose_value=False)
@options.printing
@click.pass_context
def run(
    context: Context,
    /,
    compute: list[str],
    mode: str,
    data: Path | None,
    output_dir: Path,
    tile: dict[str, int],
    watch: bool,
    json: bool,
    **given: options.Value,
) -> int:
    """Run kernels (fa2 by default) on a problem and judge every tensor they write against a float64 reference."""
    again = [__file__, *context.obj["arguments"]]
    compute = compute or ["fa2"]
    if given["debug"] and not given["check"]:  # run refuses both
        harness.terminal.debugger.debug(again, compute, mode, given["device"], json, watch)
    if watch and not harness.terminal.watch.watched():
        return harness.terminal.watch.watch(again, compute, mode, json)
    if harness.verbs.run.asan_child_needed(given["check"]):
        return harness.verbs.run.run_under_asan(again)
    if data:
        options.refuse_shape_beside_data(context)
    mask = {"causal": given["causal"], "scale": given["scale"]}  # of a folder's problem too
    problem, progress = options.problem_of(given), harness.terminal.progress.teller(context.obj["verbosity"])
    results = harness.verbs.run.run(
        compute, mode, None if data else problem, data_folder=data, data_root=output_dir, tiles=tile, progress=progress, **mask, **given
    )
    harness.terminal.watch.tell(results)
    return harness.terminal.show.results.results(results, json, context.obj["verbosity"], given["check"])


@main.command(
    epilog=f"{help.EXIT_CODES}\n\n"
    + help.examples(
        "fa-cli experiment --seqlen",
        "fa-cli experiment my_sweep.toml --mode both --compute fa2,fa1 --device cpu",
        "fa-cli experiment mixed --seed 7 --cases 100",
    )
)
@click.argument("name", required=False, metavar="[NAME|FILE.toml]")
@click.option("--seqlen", "--seqlen-experiment", is_flag=True, help="The sweep over sequence lengths.")
@options.sweep_mode
@options.compute
@click.option("--peers", metavar="NAMES", help="Peers to compare with, or none.  [default: all of the device's kind]")
@click.option("--only", multiple=True, metavar="PATTERN", help="Only shapes whose test name matches.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="No shapes whose test name matches.")
@click.option(
    "--axis",
    "axes",
    multiple=True,
    metavar="NAME=VALUE[,VALUE...]",
    help="What every shape has in place of its own: seq=512,1024 or dtype=float16.",
)
@click.option(
    "--output-dir",
    type=options.folder,
    default=Path("experiment_results"),
    show_default=True,
    help="The run goes into SWEEP/ there, a second one into SWEEP-2/.",
)
@options.drawn
@options.sampled
@click.option("--record", is_flag=True, help="Write into experiments/NAME/ and plots/ of the checkout: a run to commit.")
@click.option("--resume", is_flag=True, help="Continue the run that was interrupted; shapes that have all their rows are not run again.")
@click.option("--dry-run", is_flag=True, help="Show what would be run; run and write nothing.")
@options.deterministic
@click.option("--full", is_flag=True, help="On the CPU: run the stated shapes instead of the small ones.")
@click.option("--no-figures", is_flag=True, help="Draw no figures, which takes up to half a minute; fa-cli report draws them later.")
@click.option("--experiment", "--save-results", "--no-stop-on-failure", is_flag=True, hidden=True, expose_value=False)
@click.option("--no-gpu-reference", is_flag=True, hidden=True)
@options.device
@options.printing
@click.pass_context
def experiment(
    context: Context,
    /,
    name: str | None,
    seqlen: bool,
    compute: list[str],
    peers: str | None,
    no_gpu_reference: bool,
    json: bool,
    **given: options.Value,
) -> int:
    """Run a sweep: check kernels and peers on its shapes, time them in turns, write results.csv, samples.jsonl, env.json and figures.

    Without a name it is the sweep forward, or the one that --mode says: backward or both.
    """
    options.refuse_two_sweeps(seqlen, name)
    sweep = "seqlen" if seqlen else name or given["mode"] or "forward"
    if not seqlen and not name:
        errors.note(f"no sweep is named, so this is {sweep}; fa-cli list has the others")
    others = options.names("none" if no_gpu_reference else peers)
    wanted = harness.verbs.experiment.Options(sweep, computes=tuple(compute), peers=others, **given)
    step = harness.terminal.progress.teller(context.obj["verbosity"])
    outcome = harness.verbs.experiment.run_sweep(
        wanted, step, lambda rows, seed: None if json else harness.terminal.show.results.rows(rows, context.obj["verbosity"], seed)
    )
    return harness.terminal.show.results.experiment(outcome, json, context.obj["verbosity"])


@main.command(
    epilog=f"{help.EXIT_CODES}\n\n"
    + help.examples(
        "fa-cli verify fa2 --matrix full", "fa-cli verify --fuzz 300", "fa-cli verify ./mine_forward.cu --device cpu --check race"
    )
)
@options.kernels
@click.option("--mode", default="both", show_default=True, callback=options.parse_mode, metavar="forward|backward|both")
@click.option("--matrix", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="How many cases.")
@click.option(
    "--fuzz",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run N random cases instead of the matrix; of each kernel the first three that fail are made small.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=42,
    show_default=True,
    metavar="S",
    help="Seed of --fuzz; the same seed gives the same cases.",
)
@click.option("--case", metavar="N|TEXT", help="Run only this case: its number, or its text in the command that a failure prints.")
@click.option(
    "--sanitizer",
    type=click.Choice(["memcheck", "racecheck", "initcheck", "synccheck"]),
    help="On a GPU: run under this tool of compute-sanitizer.",
)
@click.option(
    "--repeat",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Launch N more times on the same inputs (CPU engine: each in another schedule); the bits must not change.",
)
@options.deterministic
@options.device
@options.checks
@options.printing
@click.pass_context
def verify(
    context: Context,
    /,
    compute: list[str],
    matrix: str,
    sanitizer: str | None,
    json: bool,
    **given: options.Value,
) -> int:
    """Check kernels (all by default) over a matrix of shapes, dtypes, masks and inputs, or over random cases (--fuzz): errors only."""
    if harness.verbs.run.asan_child_needed(given["check"]):
        return harness.verbs.run.run_under_asan([__file__, *context.obj["arguments"]])
    if sanitizer and harness.verbs.verify.sanitizer_child_needed():
        return harness.verbs.verify.run_under_sanitizer(sanitizer, given["device"], [__file__, *context.obj["arguments"]])
    told = harness.terminal.show.checks.Told(bool(given["count"]), json, context.obj["verbosity"], given["check"])
    return told.all_of(partial(harness.verbs.verify.verify, compute, matrix=matrix, **given))


@main.command("compile", epilog=help.examples("fa-cli compile", "fa-cli compile fa2 --all", "fa-cli compile hopper --order"))
@options.kernels
@click.option("--arch", metavar="sm_90", help="One architecture.  [default: all that the headers and this NVRTC allow]")
@click.option("--all", "every", is_flag=True, help="Compile every head dim, mask and tile shape, not only the widest and causal.")
@click.option(
    "--order",
    is_flag=True,
    help="Also print the order of the main loop (products, exponentials, waits, barriers), and count loads and stores.",
)
@click.option("--sass", type=options.folder, metavar="DIR", help="Also write the machine code there, with the lines of the .cu file.")
@options.printing
@click.pass_context
def compile_(context: Context, compute: list[str], arch: str | None, every: bool, order: bool, sass: Path | None, json: bool) -> int:
    """Compile kernels (all by default) for every architecture with NVRTC: registers, spills, shared memory, occupancy. Needs no GPU."""
    step = harness.terminal.progress.teller(context.obj["verbosity"])
    rows = harness.verbs.compile.compile_all(compute, every, step, arch, errors.note, order, sass)
    return harness.terminal.show.checks.compiled(rows, json, context.obj["verbosity"])


@main.command(epilog=help.examples("fa-cli new mine", "fa-cli new mine --from fa2 --pass backward", "fa-cli new mine --plain"))
@click.argument("name")
@click.option("--from", "source", default="fa2", show_default=True, help="The kernel to start from.")
@click.option("--pass", "pass_", type=click.Choice(["forward", "backward"]), default="forward", show_default=True)
@click.option("--plain", is_flag=True, help="Instead of a copy, write a short kernel with plain pointers and sizes as parameters.")
@click.option("--output-dir", type=options.folder, default=Path("."), show_default=True, help="Where the file is written.")
@click.pass_context
def new(context: Context, name: str, source: str, pass_: str, plain: bool, output_dir: Path) -> int:
    """Write NAME_forward.cu (or _backward.cu), a working kernel to start from."""
    options.refuse_from_beside_plain(context, plain)
    return harness.terminal.show.results.new_kernel(harness.kernel.new.new(name, source, pass_, output_dir, plain))


@main.command(
    epilog=f"{help.EXIT_CODES}\n\n"
    + help.examples("fa-cli tune fa2 --seq 2048", "fa-cli tune fa2 --mode backward --tile STREAMED=32,64 --tile RESIDENT=32,64,128")
)
@click.argument("name", metavar="KERNEL")
@click.option("--mode", "pass_", type=click.Choice(["forward", "backward"]), default="forward", show_default=True)
@options.tile_lists
@click.option("--by", type=click.Choice(["time", "energy"]), default="time", show_default=True, help="What the variants are ranked by.")
@options.shape
@options.mask
@options.device
@options.deterministic
@click.option("--output-dir", type=options.folder, help="Add the variants to tune.csv there.")
@options.printing
@click.pass_context
def tune(context: Context, /, name: str, pass_: str, tile: dict[str, list[int]], json: bool, **given: options.Value) -> int:
    """Try a kernel's tile values: leave out what cannot run well, check and time the rest; on a GPU print the best as a [[choice]] row."""
    problem, progress = options.problem_of(given), harness.terminal.progress.teller(context.obj["verbosity"], seldom=True)
    found = harness.verbs.tune.tune(name, pass_, problem, tiles=tile, note=errors.note, progress=progress, **given)
    return harness.terminal.show.report.tuned(found, json, context.obj["verbosity"])


@main.command(
    epilog=f"{help.EXIT_CODES}\n\n"
    + help.examples("fa-cli profile --compute fa2", "fa-cli profile --compute fa2,./mine_forward.cu --mode both --tool nsys")
)
@options.kernels
@click.option("--mode", default="forward", show_default=True, callback=options.parse_mode, metavar="forward|backward|both")
@click.option(
    "--tool", type=click.Choice(["ncu", "nsys"]), default="ncu", show_default=True, help="Nsight Compute (on a CPU: its engine) or Systems."
)
@options.shape
@options.mask
@options.device
@options.tile
@options.deterministic
@click.option("--output-dir", type=options.folder, default=Path("profiles"), show_default=True, help="Where the table and the reports go.")
@options.printing
@click.pass_context
def profile(context: Context, /, compute: list[str], mode: str, tile: dict[str, int], json: bool, **given: options.Value) -> int:
    """Profile kernels (fa2 by default): ncu's counters of each launch, or nsys's times; without a GPU the traffic of shared and global memory."""
    problem, progress = options.problem_of(given), harness.terminal.progress.teller(context.obj["verbosity"])
    wanted = {"tiles": tile, "note": errors.note, "progress": progress, **given}
    rows = harness.verbs.profile.profile(compute or ["fa2"], mode, problem, **wanted)
    return harness.terminal.show.results.counters(rows, given["output_dir"], json, context.obj["verbosity"])


@main.command(
    epilog=f"{help.CAUSAL}\n\n{help.EXIT_CODES}\n\n"
    + help.examples(
        "fa-cli ring --gpus 3 --device cpu --seq 256 --causal --mode both",
        "fa-cli ring --gpus 2 --compute mma_qreg_async --heads 16 --seq 32768 --dim 128 --dtype bfloat16 --causal",
        "fa-cli ring --simulate 8 --seq 4096 --causal",
    )
)
@options.compute
@options.ring_mode
@options.ring
@options.ring_shape
@options.mask
@options.device
@options.tile
@options.deterministic
@click.option("--tolerance", type=float, callback=options.parse_tolerance, help="Also fail where an absolute error exceeds this.")
@click.option("--output-dir", type=options.folder, help="Add rows to ring.csv, ring_steps.csv and ring_timeline.csv there.")
@options.printing
@click.pass_context
def ring(
    context: Context,
    /,
    compute: list[str],
    gpus: int | None,
    simulate: int | None,
    output_dir: Path | None,
    tile: dict[str, int],
    bandwidth: float | None,
    json: bool,
    **given: options.Value,
) -> int:
    """Ring attention: divide the sequence over GPUs (or CPU processes), judge the whole problem, and compare with one device."""
    name, problem = options.only(compute or ["fa2"]), options.problem_of(given)
    spec = harness.ring.job.Spec(name, problem=problem, tiles=tile, bandwidth=bandwidth and bandwidth * 1e9, **given)
    step = harness.terminal.progress.teller(context.obj["verbosity"])
    harness.ring.record.refuse(output_dir)
    outcome = harness.ring.start.ring(spec, gpus, simulate, step)
    step("")
    files = harness.ring.record.write(output_dir, outcome) if outcome and output_dir else []
    return harness.terminal.show.ring.ring(outcome, files, json, context.obj["verbosity"])


@main.command(
    epilog=f"{help.VERDICTS}\n\n"
    + help.examples("fa-cli compare before/ after/", "fa-cli compare experiments/seqlen experiment_results/seqlen --fail-if slower:5%")
)
@click.argument("a", type=options.folder)
@click.argument("b", type=options.folder)
@click.option("--fail-if", metavar="slower:PERCENT%", help="Exit code 1 where a row is SLOWER by more, or passed in A and not in B.")
@click.option("--ignore-device", is_flag=True, help="Compare even if the runs are of two devices.")
@options.printing
@click.pass_context
def compare(context: Context, /, a: Path, b: Path, fail_if: str | None, ignore_device: bool, json: bool) -> int:
    """Compare two runs row by row: is B the SAME as A, FASTER or SLOWER? A and B are folders or results.csv files."""
    found = harness.verbs.compare.compare(a, b, fail_if=fail_if, ignore_device=ignore_device)
    return harness.terminal.show.report.comparison(found, json, context.obj["verbosity"])


@main.command(epilog=help.examples("fa-cli report experiment_results/seqlen", "fa-cli report experiments/seqlen --output-dir figures"))
@click.argument("folder", type=options.folder, metavar="DIR")
@click.option("--output-dir", type=options.folder, help="Where figures and summary go.  [default: DIR]")
@click.option("--title", default="", help="Title of the figures.  [default: the sweep's, else DIR's name]")
@options.printing
@click.pass_context
def report(context: Context, /, folder: Path, output_dir: Path | None, title: str, json: bool) -> int:
    """Draw the figures of a run again and write summary.md, from its results.csv and env.json, on any machine. Also write index.html, one
    page for a browser that needs no network: bars of ours and of every peer, the figures, and a table that sorts."""
    name, step = folder.resolve().name, harness.terminal.progress.teller(context.obj["verbosity"])
    drawn = harness.report.redraw(folder, output_dir, name, title, with_page=True, progress=step)
    step("")
    return harness.terminal.show.report.redrawn(drawn, json, context.obj["verbosity"])


@main.command("list", epilog=help.examples("fa-cli list", "fa-cli list --json"))
@options.printing
@click.pass_context
def list_(context: Context, json: bool) -> int:
    """List the kernels and the sweeps."""
    return harness.terminal.show.results.catalogue(harness.kernel.catalogue(), harness.verbs.sweep.sweeps(), json, context.obj["verbosity"])


@main.command(epilog=help.examples("fa-cli doctor", "fa-cli doctor --json", "fa-cli doctor --ring --gpus 2"))
@click.option("--ring", is_flag=True, help="Try a ring: ranks, a sum, bytes once round, bandwidth. Also under mpiexec.")
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="With --ring: start N ranks here.  [default: 2]")
@options.device
@options.printing
@click.pass_context
def doctor(context: Context, ring: bool, gpus: int | None, device: str, json: bool) -> int:
    """Say what works on this machine, what does not, and why. Exit code 4 if something needed fails."""
    found = harness.verbs.doctor.ring(device, gpus) if ring else (harness.verbs.doctor.doctor(device, gpus), "kernels run here")
    return 0 if found is None else harness.terminal.show.results.doctor(*found, json, context.obj["verbosity"])


@main.command(epilog=help.examples("fa-cli selftest --quick", "fa-cli selftest --device cpu", "fa-cli selftest --only '*barrier*'"))
@click.option("--quick", is_flag=True, help="One fault per kind and check: under a minute.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Only faults whose name matches.")
@options.device
@options.printing
@click.pass_context
def selftest(context: Context, /, quick: bool, only: tuple[str, ...], device: str, json: bool) -> int:
    """Plant faults in the kernels of the tree and see whether the checks catch them. Exit code 1 if one is not caught."""
    step = harness.terminal.progress.teller(context.obj["verbosity"])
    trials = harness.verbs.selftest.selftest(device, quick, only, step)
    return harness.terminal.show.results.selftest(trials, json, context.obj["verbosity"])


if __name__ == "__main__":
    interrupt.command(main)
