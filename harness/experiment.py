"""A sweep: kernels x shapes -> rows, an environment record and a picture.

A sweep is a TOML file (experiments/<name>/sweep.toml, or anyone's):

    title = "Time over the sequence length"
    mode = "forward"                  # unless --mode says otherwise
    kernels = ["naive", "fa2"]        # optional: every kernel with the passes and the dtype
    shapes = [{ batch = 4, heads = 8, seq = [128, 256], dim = 64 }]   # a list stands for one shape each; `test` names it
    [cpu]                             # smaller shapes for the host backend
    shapes = [{ batch = 1, heads = 2, seq = [64, 128], dim = 64 }]
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import backends, environment, results, run
from .kernel import KERNELS, catalogue, find
from .problem import PASSES, DataFault, DiskFault, EnvironmentFault, Fault, Problem, UsageFault

if TYPE_CHECKING:
    from .results import Row
    from .run import Yardstick

ROOT = KERNELS.parent
SWEEPS = ROOT / "experiments"
KEYS = {"title", "mode", "kernels", "shapes", "cpu"}
SHAPE_KEYS = {"test", "batch", "heads", "seq", "dim", "heads_kv", "seq_kv", "dtype", "causal", "scale"}
SHORT = {"batch": "B", "heads": "H", "seq": "S", "dim": "D", "dtype": ""}  # in test names
SAMPLES, SEED = 5, 42


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked. shapes and cpu_shapes are (test name, problem)."""

    name: str
    title: str
    mode: str
    kernels: tuple[str, ...]
    shapes: tuple[tuple[str, Problem], ...]
    cpu_shapes: tuple[tuple[str, Problem], ...]


@dataclass(frozen=True)
class Outcome:
    """What a sweep gave: its rows, the files written, and what a reader of the result should know."""

    rows: list[Row]
    files: list[Path]
    notes: list[str]


def sweeps() -> dict[str, str]:
    """The sweeps there are, name -> title."""
    return {path.parent.name: load(path.parent.name).title for path in sorted(SWEEPS.glob("*/sweep.toml"))}


def load(spec: str) -> Sweep:
    """The sweep a name or a .toml path means. Raises UsageFault for an unknown name, DataFault for a file that is no sweep."""
    is_path = spec.endswith(".toml")
    path = Path(spec) if is_path else SWEEPS / spec / "sweep.toml"
    if not is_path and (not path.is_file() or Path(spec).name != spec):
        known = ", ".join(sorted(p.parent.name for p in SWEEPS.glob("*/sweep.toml")))
        raise UsageFault(f"unknown experiment {spec!r}", f"known: {known}", "fa-cli list, or give a file ending in .toml")
    try:
        text = path.read_text(encoding="utf-8")
        return _parse(path, tomllib.loads(text))
    except (OSError, UnicodeDecodeError) as error:
        raise DataFault(f"{path} cannot be read", str(error), "fa-cli list shows the sweeps there are") from None
    except tomllib.TOMLDecodeError as error:
        raise DataFault(f"{path} is not TOML", str(error), "experiments/README.md says what a sweep is") from None


def experiment(
    name: str = "forward",
    *,
    mode: str | None = None,
    computes: Sequence[str] = (),
    device: str = "auto",
    output_dir: Path = Path("experiment_results"),
    record: bool = False,
    full: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """The rows of :func:`run_sweep`, for notebooks."""
    return run_sweep(name, mode, computes, device, output_dir, record, full, progress).rows


def run_sweep(
    name: str,
    mode: str | None,
    computes: Sequence[str],
    device: str,
    output_dir: Path,
    record: bool,
    full: bool,
    progress: Callable[[str], None],
) -> Outcome:
    """Run a sweep and write results.csv (a row at a time), env.json and a picture.

    A kernel that fails its check, does not launch or refuses a shape is a row that says so, and the sweep goes on. On Ctrl-C the
    finished rows stay. Raises UsageFault for an unknown sweep or kernel, EnvironmentFault and DiskFault for what stops every row.
    """
    sweep = load(name)
    mode = mode or sweep.mode
    passes = PASSES if mode == "both" else (mode,)
    backend = backends.pick(device)
    small = backend.name == "cpu" and not full
    shapes = sweep.cpu_shapes if small else sweep.shapes
    kernels = _kernels(computes or sweep.kernels, passes, shapes)
    folder, picture = _place(sweep, output_dir, record, backend.name)
    notes = ["on the CPU the sweep's small [cpu] shapes were run; --full runs the stated ones"] if small else []
    run_id = results.new_run_id()
    record_file, table = folder / "env.json", folder / "results.csv"
    _write_environment(record_file, backend, run_id)
    rows: list[Row] = []
    for number, (test, problem) in enumerate(shapes):
        yardstick: Yardstick | None = None  # the reference of a shape serves every kernel
        for place, kernel in enumerate(kernels, 1):
            progress(f"{number * len(kernels) + place}/{len(shapes) * len(kernels)} {test} {kernel}")
            try:
                yardstick = yardstick or run.yardstick_for(problem, backend, mode, SEED)
                result = run.measure_in_memory(kernel, mode, problem, backend, SEED, SAMPLES, yardstick)
                found = results.rows_of(result, test, run_id)
            except (EnvironmentFault, DiskFault):
                raise  # every other row would meet it too
            except Exception as error:
                status = "REFUSED" if isinstance(error, UsageFault) else "ERROR"
                found = results.rows_without(test, kernel, mode, problem, backend, run_id, SEED, status, str(error))
            for row in found:
                results.append(table, row)
                rows.append(row)
    progress("")
    files = [table, record_file]
    from . import report  # pandas and seaborn take a second to load

    if report.times(rows, sweep.title, picture):
        files.append(picture)
    return Outcome(rows, files, notes)


# -- details ----------------------------------------------------------------------------------------------------------


def _parse(path: Path, data: dict[str, Any]) -> Sweep:
    def wrong(why: str) -> DataFault:
        return DataFault(f"{path} is not a sweep", why, "experiments/README.md says what a sweep is")

    if unknown := set(data) - KEYS | set(data.get("cpu", {})) - {"shapes"}:
        raise wrong(f"unknown key {sorted(unknown)[0]!r}; known: {', '.join(sorted(KEYS))}")
    mode = data.get("mode", "forward")
    if mode not in (*PASSES, "both"):
        raise wrong(f"mode is {mode!r}; known: forward, backward, both")

    def shapes(items: object) -> tuple[tuple[str, Problem], ...]:
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            raise wrong("shapes is a list of tables, as { batch = 4, heads = 8, seq = [128, 256], dim = 64 }")
        return tuple(found for item in items for found in _expand(item, wrong))

    stated = shapes(data.get("shapes"))
    cpu = shapes(data["cpu"].get("shapes")) if "cpu" in data else stated
    name = path.parent.name if path.name == "sweep.toml" else path.stem
    return Sweep(name, data.get("title", name), mode, tuple(data.get("kernels", ())), stated, cpu)


def _expand(item: dict[str, Any], wrong: Callable[[str], DataFault]) -> list[tuple[str, Problem]]:
    """One shape table as (test, problem) pairs, one for each combination of its lists."""
    if unknown := set(item) - SHAPE_KEYS:
        raise wrong(f"unknown key {sorted(unknown)[0]!r} in a shape; known: {', '.join(sorted(SHAPE_KEYS))}")
    lists = {key: value if isinstance(value, list) else [value] for key, value in item.items() if key != "test"}
    found = []
    for values in itertools.product(*lists.values()):
        try:
            problem = Problem.of(**dict(zip(lists, values, strict=True)))
        except (TypeError, Fault) as error:
            raise wrong(f"shape {item}: {error}") from None
        label = item.get("test", "")
        varied = "_".join(f"{SHORT.get(key, key)}{value}" for key, value in zip(lists, values, strict=True) if len(lists[key]) > 1)
        found.append(("-".join(filter(None, (label, varied))) or problem.folder, problem))
    return found


def _kernels(specs: Sequence[str], passes: Sequence[str], shapes: Sequence[tuple[str, Problem]]) -> list[str]:
    """The kernels to run: those asked for, which must have the passes, or all that have them and a shape's dtype."""
    for spec in specs:
        for pass_ in passes:
            find(spec, pass_)
    if specs:
        return list(specs)
    dtypes = {problem.dtype for _, problem in shapes}
    having = [{k.name for k in catalogue() if k.pass_ == pass_ and dtypes & set(k.dtypes)} for pass_ in passes]
    return [name for name in dict.fromkeys(k.name for k in catalogue()) if all(name in names for names in having)]


def _place(sweep: Sweep, output_dir: Path, record: bool, device: str) -> tuple[Path, Path]:
    """The folder of the rows and the path of the picture; both folders are made."""
    if record and not (ROOT / "pyproject.toml").is_file():
        raise UsageFault("--record needs a checkout", "runs of record are committed beside the sources", "use --output-dir DIR")
    folder = SWEEPS / sweep.name if record else output_dir
    picture = ROOT / "plots" / f"{sweep.name}_{device}.png" if record else output_dir / f"{sweep.name}.png"
    for made in (folder, picture.parent):
        try:
            made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskFault(f"cannot make the folder {made}", error.strerror or str(error), "choose another --output-dir") from None
    return folder, picture


def _write_environment(path: Path, backend: backends.Backend, run_id: str) -> None:
    """The record of this run; those of earlier runs into the same table stay, under their run_id."""
    earlier: dict[str, Any] = {}
    if path.exists():
        last = environment.read_env(path)
        earlier = last.pop("earlier", {}) | {str(last.get("run_id")): last}
    facts = {"run_id": run_id, **backend.environment(), **({"earlier": earlier} if earlier else {})}
    environment.write_env(path, environment.environment(**facts))
