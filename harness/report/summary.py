"""Rows -> summary.md: tables of times, means, limits and remarks; a status where there is no time. Needs neither pandas nor matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..fault import printable
from ..files import Json
from ..row import CEILING, Row
from .distribution import COLUMNS, TIMES, Distribution, distributions, line_of, missing
from .views import HOST_TIME, PASS_WORDS, TIMINGS, Key, View, geometric_mean, limiter, picojoules, shape_of, unsettled, views, with_texts

DISTRIBUTION = (
    "The best peer's time over ours: above 1 ours is faster. mean is geometric; 10 % is what a tenth of the problems are below, 50 % the "
    "median. kernel is device time, in a CUDA graph where the host is slower than the device; call is that of a plain call, the longer of "
    "device time and the host's to enqueue it: of ours the PyTorch operator's where it was measured, else that of fa-cli's own launch."
)


def summary(rows: Sequence[Row], env: Json, title: str = "Results") -> str:
    """Markdown: for each view and timing the times by shape, the best in bold; geometric means; what limits; machine; command.

    Before them, of problems that a seed drew: the distribution of ours over the best peer, and the worst.
    """
    parts, rows = [f"# {_markdown(title)}"], with_texts(rows, _markdown)
    if env.get("seed") is not None:
        parts += _distributions(distributions(rows), int(env["seed"]))
    for view in views(rows):
        timings: list[str | None] = [timing for timing in TIMINGS if any(row.timing == timing for row in view.rows)]
        parts += [_section(view, timing) for timing in timings or [view.timing]]
        parts += _energy(view)
        sentences = [text for kernel in view.kernels if (text := limiter(view, kernel))]
        if sentences:
            parts.append("What limits them:\n\n" + "\n".join(f"- {text}" for text in sentences))
        parts += _remarks(view)
    if ceilings := [row for row in rows if row.Kernel.startswith(CEILING)]:
        parts.append("Ceilings measured in the same run: " + "; ".join(ceiling_words(row) for row in ceilings) + ".")
    return "\n\n".join([*parts, _environment(rows, env)]) + "\n"


def commit_of(rows: Sequence[Row], env: Json) -> str:
    """The commits rows were made at, by their run_id, shortened; empty where env.json does not say."""
    records = {str(env.get("run_id")): env, **(env.get("earlier") or {})}
    runs = dict.fromkeys(str(row.run_id) for row in rows)
    commits = (str((records.get(run) or env).get("git_commit") or "") for run in runs)
    return ", ".join(dict.fromkeys(c[:10] + "+" * (c.endswith("+") and len(c) > 10) for c in commits if c))


def dates_of(rows: Sequence[Row]) -> str:
    """The days on which rows were measured, from their run_id: one day, or the first and the last."""
    days = sorted({f"{r[:4]}-{r[4:6]}-{r[6:8]}" for row in rows if (r := row.run_id or "")[:8].isdigit()})
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def heading(view: View, timing: str | None) -> str:
    """What a view holds, in words: pass, dtype, mask, timing."""
    words = (PASS_WORDS[view.type], view.dtype, "causal" if view.causal else "not causal", timing)
    return ", ".join(word for word in words if word)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns but the first are to the right."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in rows])


# -- details ----------------------------------------------------------------------------------------------------------


def _markdown(text: str) -> str:
    """A text that is no HTML in Markdown, and no escape sequence where it is printed."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", printable(text))


def _distributions(distributions: Sequence[Distribution], seed: int) -> list[str]:
    """The table of distributions, and the worst problems of each by GPU time with the commands that run them."""
    if not distributions:
        return [f"Seed {seed}: no problem has a time of ours and of a peer."]
    parts = [
        f"## Ours over the best peer, seed {seed}",
        DISTRIBUTION,
        markdown_table(COLUMNS, list(map(line_of, distributions))),
        missing(distributions),
    ]
    for distribution in distributions:
        if distribution.time == TIMES[0]:
            lines = []
            for one in distribution.worst:
                ours, theirs = one.rates()
                lines.append(
                    f"- {one.ratio:.3f}: {one.ours.Kernel} {ours:.3g} TFLOP/s, {one.best.Kernel} {theirs:.3g}: "
                    + (f"`{one.command.replace('`', '')}`" if one.command else f"{one.ours.Test}")
                )
            parts.append(f"The lowest of {PASS_WORDS[distribution.Type]}, {distribution.dtype}:\n\n" + "\n".join(lines))
    return [part for part in parts if part]


def _section(view: View, timing: str | None) -> str:
    cells = {kernel: view.cells(kernel, timing) for kernel in view.kernels}
    where = f"{HOST_TIME}: {view.device_name}" if view.cpu else view.device_name
    parts = [f"## {heading(view, timing)} — {where}"]
    lines = []
    for shape in view.shapes:
        timed = [row for kernel in view.kernels if (row := cells[kernel].get(shape)) and row.KernelTime_ms]
        best = min(timed, key=lambda row: row.KernelTime_ms or 0, default=None)
        lines.append([view.label(shape), *(_cell(cells[kernel].get(shape), best) for kernel in view.kernels)])
    parts.append(
        "Median time in ms; the best of a row is bold, and what its samples do not tell from it; a word stands where there is no time."
    )
    parts.append(markdown_table(("shape", *view.kernels), lines))
    return "\n\n".join([*parts, *_means(view, cells)])


def _energy(view: View) -> list[str]:
    """The table of energy a FLOP, power and clock, the least energy of a shape in bold; nothing where none was measured."""
    rows = {(shape_of(row), row.Kernel): row for row in view.rows if row.energy_mj}
    kernels = [kernel for kernel in view.kernels if any(of == kernel for _, of in rows)]
    lines = []
    for shape in dict.fromkeys(shape for shape, _ in rows):
        energies = {kernel: picojoules(rows[shape, kernel]) or 0.0 for kernel in kernels if (shape, kernel) in rows}
        least = min(energies.values())
        texts = {}
        for kernel, pj in energies.items():
            of, text = rows[shape, kernel], f"**{pj:.3g}**" if pj == least else f"{pj:.3g}"
            texts[kernel] = f"{text} ({of.power_w or 0:.0f} W, {of.sm_clock_mhz or 0:.0f} MHz)"
        lines.append([view.label(shape), *(texts.get(kernel, "") for kernel in kernels)])
    if not lines:
        return []
    gemms = [f"{row.Kernel.removeprefix(CEILING)} {energy:.3g}" for row in view.ceilings.values() if (energy := picojoules(row))]
    beside = f" Matrix products beside them: {'; '.join(gemms)} pJ/FLOP." if gemms else ""
    said = f"Energy in pJ/FLOP, with power and SM clock: each kernel alone and settled; the least of a row is bold.{beside}"
    return [said, markdown_table(("shape", *kernels), lines)]


def _cell(row: Row | None, best: Row | None) -> str:
    if row is None:
        return ""
    if not row.KernelTime_ms:
        return row.Status
    text = f"{row.KernelTime_ms:.4g}" + "†" * (row.ErrorMessage or "").startswith("THROTTLED")
    return f"**{text}**" if best and (row is best or unsettled(row, best)) else text


def _means(view: View, cells: Mapping[str, Mapping[Key, Row]]) -> list[str]:
    """Geometric means over the shapes in which every kernel that has a time anywhere has one."""
    timed = {kernel: {s: r for s, r in of.items() if r.KernelTime_ms} for kernel, of in cells.items()}
    timed = {kernel: of for kernel, of in timed.items() if of}
    common = [shape for shape in view.shapes if timed and all(shape in of for of in timed.values())]
    if not timed:
        return ["No kernel has a time."]
    if not common:
        return ["No shape has a time of every kernel, so there are no means to compare."]
    over = view.reference
    columns = ["kernel", "ms", *([] if view.cpu else ["TFLOP/s", "GB/s"]), *([f"speed-up over {over}"] if over else [])]
    lines = []
    for kernel, of in timed.items():
        rows = [of[shape] for shape in common]
        values = [[r.KernelTime_ms for r in rows]] + ([] if view.cpu else [[r.TFLOPS for r in rows], [r.Bandwidth_GBps for r in rows]])
        values += [[view.speedup(row) for row in rows]] if over else []
        means = [geometric_mean(v for v in each if v) if all(each) else None for each in values]
        lines.append([kernel, *("" if mean is None else f"{mean:.4g}" for mean in means)])
    return [f"Geometric means over the {len(common)} of {len(view.shapes)} shapes that all of these have:", markdown_table(columns, lines)]


def _remarks(view: View) -> list[str]:
    """What did not pass and why, and rows that passed with a remark: each message once, with how many rows have it."""
    remarks: dict[tuple[str, str, str], list[str]] = {}
    for row in view.rows:
        if row.Status != "PASS" or row.ErrorMessage:
            message = (row.ErrorMessage or "no message").partition("\n")[0]
            remarks.setdefault((row.Kernel, row.Status, message), []).append(view.label(shape_of(row)))
    if not remarks:
        return []
    lines = []
    for (kernel, status, message), shapes in remarks.items():
        names = list(dict.fromkeys(shapes))
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"- {kernel} {status} ({where}): {message}")
    dagger = any((row.ErrorMessage or "").startswith("THROTTLED") for row in view.rows)
    return ["Remarks" + " († the device was held back while it was measured)" * dagger + ":\n\n" + "\n".join(lines)]


def ceiling_words(row: Row) -> str:
    """A measured ceiling: its name and rate."""
    name = row.Kernel.removeprefix(CEILING)
    if row.Bandwidth_GBps and not row.TFLOPS:
        return f"{name} {row.Bandwidth_GBps:,.0f} GB/s"
    return f"{name} {row.TFLOPS:,.4g} {'T exp/s' if name == 'exp' else 'TFLOP/s'}" if row.TFLOPS else f"{name} {row.Status}"


def facts(rows: Sequence[Row], env: Json) -> dict[str, str]:
    """What a run was measured on and with, by name; the command last. Empty where there is no record."""
    versions = env.get("packages") or {}
    texts = {
        "device": env.get("device_name"),
        "driver": env.get("driver") or env.get("cuda_driver"),
        "CUDA": env.get("cuda_runtime"),
        "NVRTC": env.get("nvrtc"),
        "compiler": env.get("compiler"),
        "Python": env.get("python"),
        **{name: versions[name] for name in ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy") if versions.get(name)},
        "commit": commit_of(rows, env),
        "date": dates_of(rows),
        "command": " ".join(map(str, env.get("command") or ())),
    }
    return {name: str(value) for name, value in texts.items() if value}


def _environment(rows: Sequence[Row], env: Json) -> str:
    about = facts(rows, env)
    command = printable(about.pop("command", "")).replace("`", "'")
    text = "; ".join(f"{name} {_markdown(value)}" for name, value in about.items())
    return f"Environment: {text or 'unknown (no env.json)'}." + (f"\n\nCommand: `{command}`" if command else "")
