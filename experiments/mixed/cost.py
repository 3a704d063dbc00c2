"""What the cases of `fa-cli experiment mixed` cost: seconds of compiling, references, checks and timing, for the options given.

    python experiments/mixed/cost.py --seed 11 --cases 40 --mode forward --output-dir /tmp/out [--usual]

--usual: with the samples of other sweeps instead of sampling.MANY.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from cli import main  # noqa: E402
from harness.measure import sampling  # noqa: E402
from harness.verbs import experiment, run  # noqa: E402

spent: dict[str, list[float]] = {}


def timed(module: Any, name: str, what: Callable[..., str]) -> None:
    """Count the seconds of a function of a module, under what(its arguments)."""
    function = getattr(module, name)

    def counted(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            spent.setdefault(what(*given), []).append(time.perf_counter() - start)

    setattr(module, name, counted)


if "--usual" in sys.argv:
    sys.argv.remove("--usual")
    experiment.MANY = sampling.POLICY["cuda"]
timed(experiment, "load_all", lambda *given: "compiles")
timed(experiment, "oracle_for", lambda *given: "references")
timed(run, "check_in_memory", lambda contender, *given: f"checks {contender.name}")
timed(run, "time_together", lambda good, *given: "times " + ", ".join(each.compute for each in good))
begun = time.perf_counter()
with contextlib.suppress(KeyboardInterrupt, SystemExit):  # what was measured until then is counted
    main(["experiment", "mixed", *sys.argv[1:]], standalone_mode=False)
lines = [f"{time.perf_counter() - begun:.1f} s in all"]
for name, seconds in sorted(spent.items(), key=lambda item: -sum(item[1])):
    each = f"most {max(seconds):6.2f}  median {statistics.median(seconds):6.2f}"
    lines.append(f"{sum(seconds):8.1f} s  {len(seconds):4} x  {each}  {name}")
sys.stdout.write("\n".join([*lines, ""]))
