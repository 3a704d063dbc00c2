"""What the cases of `fa-cli experiment mixed` cost: seconds of compiling, references, checks and timing, for the options given.

    python experiments/mixed/cost.py --seed 11 --cases 40 --mode forward --output-dir /tmp/out [--policy settle=0.12,turn=0.1]

--policy: fields of sampling.Policy in place of those of sampling.MANY. Seconds are of all processes together (--jobs), but for those of
rounds, in which the processes measure one after another, and the total. The last line is the device memory that a problem took when it
had been checked, in bytes for an element of Q or K, whichever has more.
"""

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from cli import main  # noqa: E402
from harness.measure import judged, sampling  # noqa: E402
from harness.verbs import experiment, run, workers  # noqa: E402

spent: dict[str, list[float]] = {}
memory: list[tuple[float, int]] = []
begun: list[float] = []  # when, and when each round had ended
WORK = experiment._work


def timed(owner: Any, name: str, what: Callable[..., str]) -> None:
    """Count the seconds of a function of a module or class, under what(its arguments)."""
    function = getattr(owner, name)

    def counted(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            spent.setdefault(what(*given), []).append(time.perf_counter() - start)

    setattr(owner, name, counted)


def room(results: Any, backend: Any, *given: Any) -> str:
    """Note the device memory of a problem."""
    if results and backend.name == "cuda":
        import torch

        problem = results[0].problem
        elements = max(math.prod(problem.shape(name)) for name in ("Q", "K"))
        taken = backend.xp.get_default_memory_pool().total_bytes() + torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        memory.append((taken / elements, taken))
    return "measures"


def watch() -> None:
    """Count the seconds of this process."""
    timed(experiment, "load_all", lambda *given: "compiles")
    timed(experiment, "oracle_for", lambda *given: "references")
    timed(run, "check_in_memory", lambda contender, *given: f"checks {contender.name}")
    timed(run, "time_together", room)
    timed(sampling, "sample", lambda good, *given: "warm-ups and turns of a pass")
    timed(judged.Watch, "close", lambda watch, *given: "judges after the last turn" if watch.contender else "no judge")
    timed(workers.Share, "_round", lambda *given: begun.append(time.perf_counter()) or "rounds")


def work(device: str, pipe: Any) -> None:
    """A worker, its seconds counted."""
    watch()
    try:
        WORK(device, pipe)
    finally:
        (Path(os.environ["COSTS"]) / str(os.getpid())).write_text(json.dumps([spent, memory]))


def measured(arguments: list[str]) -> None:
    """Run the experiment, and say what it took."""
    if "--policy" in arguments:
        at = arguments.index("--policy")
        _, text = arguments.pop(at), arguments.pop(at)
        values = {name: float(value) for name, value in (each.split("=") for each in text.split(","))}
        experiment.MANY = replace(sampling.MANY, **values)
    import cost  # this file, as workers find it

    with tempfile.TemporaryDirectory() as folder:
        os.environ["COSTS"] = folder
        experiment._work = cost.work
        watch()
        begun.append(time.perf_counter())
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # what was measured until then is counted
            main(["experiment", "mixed", *arguments], standalone_mode=False)
        lines = [f"{time.perf_counter() - begun[0]:.1f} s in all; rounds ended at {' '.join(f'{at - begun[0]:.0f}' for at in begun[1:])} s"]
        for path in Path(folder).iterdir():
            seconds_of, taken = json.loads(path.read_text())
            memory.extend(taken)
            for name, seconds in seconds_of.items():
                spent.setdefault(name, []).extend(seconds)
    for name, seconds in sorted(spent.items(), key=lambda item: -sum(item[1])):
        each = f"most {max(seconds):6.2f}  median {statistics.median(seconds):6.2f}"
        lines.append(f"{sum(seconds):8.1f} s  {len(seconds):4} x  {each}  {name}")
    of = sorted(memory)
    lines += [f"{of[len(of) // 2][0]:.0f} bytes, most {of[-1][0]:.0f}; at most {max(b for _, b in of) / 1e9:.1f} GB"] if of else []
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    measured(sys.argv[1:])
