"""`fa-cli run --watch`: the run again at every save of the kernel's file or of a file it includes, and what changed by it.

Each run is a process of its own. An unfinished kernel may kill its process (a wild pointer on the CPU, a lost context on a GPU), and
the run after the next save must start clean.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..check.choose import kernels
from ..check.request import Request
from ..fault import UsageFault
from ..files import child
from ..kernel import include_closure
from ..problem import WRITES
from ..verbs.compare import ratio_interval, verdict
from . import interrupt
from .printing import line, near, note

if TYPE_CHECKING:
    from ..verbs.run import Result

POLL_SECONDS = 0.2
#: Exit codes that no edit of the kernel changes: at the first run they end the watch.
HOPELESS = (2, 3, 4, 6)


class Told(TypedDict):
    """What a watched run tells of a pass of a kernel that passed."""

    ms: float | None
    seconds: list[float]  # the samples of the time, and how many each turn took
    turns: list[int]
    errors: dict[str, float]  # the largest of each tensor it writes


def watched() -> bool:
    """Whether this process is a run that a watching process started."""
    return interrupt.WATCHED in os.environ


def tell(results: Sequence[Result]) -> None:
    """Tell the watching process, if there is one, the time and the errors of every pass of the kernels that passed."""
    if not watched():
        return
    told: dict[str, Told] = {}
    for result in results:
        for name in result.passes if result.passed else ():
            errors = {tensor: float(v.max_abs) for tensor, v in result.verdicts.items() if tensor in WRITES[name]}
            timing = result.passes[name].timings.get("warm")
            seconds, turns = (list(timing.seconds), list(timing.turns)) if timing and not timing.broken else ([], [])
            told[f"{result.compute} {name}"] = {"ms": result.time_ms[name], "seconds": seconds, "turns": turns, "errors": errors}
    Path(os.environ[interrupt.WATCHED]).write_text(json.dumps(told))


def watch(arguments: Sequence[str], computes: Sequence[str], mode: str, as_json: bool) -> int:
    """Run a command line (a `run`) now and after every save, and print what each save changed. Ends by Ctrl-C, with 0.

    Returns the exit code of the first run where no edit would change it. Raises UsageFault for --json and for an unknown kernel.
    """
    if as_json:
        raise UsageFault("--watch and --json together", "a watch does not end, so it has no single document", "leave out --json or --watch")
    files = kernel_files(computes, mode)
    note(f"watching {', '.join(str(near(path)) for path in files)} and what they include; Ctrl-C ends")
    try:
        return _watch(arguments, files)
    except KeyboardInterrupt:
        interrupt.wanted()
        note("the watch has ended")
        return 0


def _watch(arguments: Sequence[str], files: Sequence[Path]) -> int:
    good: dict[str, Told] = {}
    for number, changed in enumerate(saves(lambda: sources(files), lambda: time.sleep(POLL_SECONDS))):
        if changed:
            line(f"\nsaved    {', '.join(str(near(path)) for path in changed)}")
        code, results = _run(arguments)
        if code in HOPELESS and number == 0:
            return code
        if code < 0:
            line(f"FAIL the run died: {child.signal_name(code)}")
        for name, now in results.items():
            line(change(name, good.get(name), now))
        good |= results
        if code:
            note("still watching")
    raise AssertionError("saves() never ends")


def kernel_files(computes: Sequence[str], mode: str) -> list[Path]:
    """The files of those computes that are kernels of ours. Raises UsageFault where none is."""
    files, faults = dict[Path, None](), []
    for compute in computes:
        try:
            files |= dict.fromkeys(path for kernel in kernels(Request(compute, mode))[0] for path in kernel.files)
        except UsageFault as fault:  # a peer perhaps, which has no file; the run will say if it is nothing at all
            faults.append(fault)
    if not files:
        raise faults[0]
    return list(files)


def sources(kernels: Sequence[Path]) -> list[Path]:
    """The kernels' files and every file they include; of one that is not there (an editor is about to rename), only itself."""
    files = dict.fromkeys(kernels)
    for path in kernels:
        with contextlib.suppress(OSError):
            files |= dict.fromkeys(include_closure(path))
    return list(files)


def saves(files: Callable[[], Sequence[Path]], pause: Callable[[], None]) -> Iterator[list[Path]]:
    """Yield an empty list at once, then, without end, the files that were saved since; between two looks it calls pause.

    What is saved while the caller works is yielded next: the files are looked at before each yield. A save in pieces is yielded
    once, when two looks in a row see the same.
    """
    changed: list[Path] = []
    while True:
        seen = _stamps(files())
        yield changed
        while (now := _stamps(seen)) == seen:
            pause()
        before = None
        while now != before:
            pause()
            before, now = now, _stamps(seen)
        changed = [path for path in seen if now[path] != seen[path]]


def change(name: str, before: Told | None, now: Told) -> str:
    """A pass of a kernel against its last good run, in a line: times in milliseconds with compare's verdict, greatest errors."""
    texts = [_texts(now)] if before is None else [_texts(before), _texts(now)]
    parts = [" -> ".join(dict.fromkeys(both)) for both in zip(*texts, strict=True)]
    if before and before["ms"] and now["ms"]:
        parts[0] += f", {_speed(before, now)}"
    return f"{name}: {'; '.join(parts)}"


# -- details ----------------------------------------------------------------------------------------------------------


def _speed(before: Told, now: Told) -> str:
    """What the samples of two runs say of the speed, by compare's interval and verdict."""
    interval = ratio_interval(now["seconds"], before["seconds"], now["turns"], before["turns"])  # of before / now: times as fast
    if not interval:
        return "too few samples to tell"
    word, bounds = verdict(*interval), f"({interval[0]:.3g} to {interval[1]:.3g} times as fast)"
    if word in ("SAME", "UNSURE"):
        return "same within noise" + f" {bounds}" * (word == "UNSURE")
    return f"{(before['ms'] or 1) / (now['ms'] or 1):.3g} times as fast ({interval[0]:.3g} to {interval[1]:.3g})"


def _texts(run: Told) -> list[str]:
    return [f"{run['ms']:.4g} ms" if run["ms"] else "not timed", *(f"{name} error {error:.2e}" for name, error in run["errors"].items())]


def _stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int, int] | None]:
    """What changes when a file is saved: time, size, inode. None where there is no file."""
    stamps: dict[Path, tuple[int, int, int] | None] = {}
    for path in files:
        try:
            facts = path.stat()
            stamps[path] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        except OSError:
            stamps[path] = None
    return stamps


def _run(arguments: Sequence[str]) -> tuple[int, dict[str, Told]]:
    """Run the command line in a process of its own, on this one's streams: its exit code (negative: the signal), what it told."""
    with tempfile.TemporaryDirectory(prefix="fa_cli_") as folder:
        told = Path(folder) / "results.json"
        code, _ = child.again(arguments, {interrupt.WATCHED: str(told)})
        return code, json.loads(told.read_text()) if told.exists() else {}
