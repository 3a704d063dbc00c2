"""Turn what a command did into text that can be frozen: exit code, stdout, stderr, the files it wrote; what differs by run is masked.

The masks below are the whole list. A mask keeps that a value is there and, for errors, how it is written: 2.70e-07 becomes #.##e-##.
A JSON document keeps its keys and their order and every value that is not masked.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent

#: Pattern and what it becomes, in this order, in every text.
TEXT = [
    (r"\b\d[\d,]*(?= accesses watched)", "<count>"),  # as the compiler makes them
    (r"(?m)^fa-cli(, a checkout that is not installed| \d\S*)$", "fa-cli <version>"),
    (r"(?m), on (?!cpu$)[^,\n]+$", ", on <hardware>"),
    (r"(not GPU performance: ).+", r"\1<hardware>"),
    (r"(?m)^(Environment: )device [^;\n]*; compiler .*$", r"\1<hardware, compiler, versions, commit, date>"),
    (r"\bsource [0-9a-f]{16}\b", "source <hash>"),
    (r"\bnumpy \d+(\.\d+)+", "numpy <version>"),
    (r"\bNVRTC \d+(\.\d+)+(?=; another| compiles)", "NVRTC <version>"),
    (r"(?ms)^(In file included|[^\n]*: In function).*?(?=^\S+:\d+:\d+: error: )", ""),  # what compilers say before an error
    (r"(?ms)(:\d+:\d+: error: )[^\n]*nosuch.*?(?=^hint: |^     fa-cli |\Z)", r"\1<compiler's text with nosuch>\n"),
    (r"(kernels_cu/\w+\.cu):\d+(?= has | takes )", r"\1:<line>"),  # of a kernel of the tree, whose comments may change
    (r"(the compiler's command: ).*", r"\1<compiler's command>"),
    (r"(?m)^note: .* is not settled: .*\n?", ""),  # of two times of this machine
    (r"(geometric mean of B / A )[\d.]+", r"\1<ratio>"),  # compare's numbers follow committed runs: test_compare.py has them
]
#: Columns of printed tables with errors, and the keys of JSON documents and columns of CSV files with them. A compiler decides them, but
#: not the rest of the machine: test_machines.py has them without a mask.
ERROR_COLUMNS = [(r"(max|mean) \|error\||MSE", "digits"), (r"max relative", "<float>")]
ERROR_KEYS = [
    (r"(rms|bias|slope)(_budget)?", "<float>"),
    (r"max_abs|mean_abs|mse|max_rel|max_errors|MaxError(_\w+)?|MeanError|MSE|MaxRelError", "<float>"),
]
#: Columns of printed tables.
COLUMNS = [
    *ERROR_COLUMNS,
    (r"ms|ms \(median\)|CPU ms|seconds", "<float>"),
    (r"times as fast as .*|vs (?!torch$).*|B / A", "<ratio>"),
    (r"A ms|B ms|95% interval", "<float>"),
    (r"registers", "<int>"),
]
#: Keys of JSON documents and columns of CSV files; the mask is of all that lies below the key. null and empty cells stay.
KEYS = [
    (r"time_ms|tflops|gbps|KernelTime_ms|TorchTime_ms|Speedup|TFLOPS|Bandwidth_GBps", "<float>"),
    (r"a_ms|b_ms|ratio|low|high|geomeans?", "<float>"),  # compare's
    (r"ms|p20_ms|p80_ms|call_ms|samples_ms|seconds|vs_default|vs_low|vs_high", "<float>"),
    *ERROR_KEYS,
    (r"registers|cpus", "<int>"),
    (r"run_id|source_hash|(O|logsumexp|dQ|dK|dV)\.bin", "<hash>"),  # sha256 of what a compiler's code computed, not of inputs
    (r"device_name|platform|compiler|python|versions", "<text>"),
    (r"packages", "<object>"),  # which there are differs too
    (r"detail|hint", "<text>"),  # doctor's: of this machine, as is the status beside them
]
#: Of a peer it is what Python's allocator saw, which varies; of a kernel it is the sum of its buffers.
PEAK = "peak_bytes"
#: Files of which the contents are frozen, not only the name; .bin files have their size.
READ = ("meta.json", "outputs.json", "env.json", "results.csv", "tune.csv", "samples.jsonl", "summary.md")


def masked(text: str, here: Path) -> str:
    """A text with the patterns of TEXT and the two folders replaced."""
    for path, name in ((here, "<tmp>"), (ROOT, "<root>")):
        text = text.replace(str(path), name)
    for pattern, mask in TEXT:
        text = re.sub(pattern, mask, text)
    return text


def document(value: Any, here: Path, mask: str = "") -> Any:
    """A JSON value with the leaves below the keys of KEYS masked."""
    if mask == "<object>":
        return mask
    if isinstance(value, dict):
        if "detail" in value:
            value = value | {"status": "<text>"}
        if value.get("torch_backend"):
            value = value | {PEAK: "<int>"}
        return {key: document(item, here, mask or _mask(key, KEYS)) for key, item in value.items()}
    if isinstance(value, list):
        return [document(item, here, mask) for item in value]
    if value is None or (not mask and isinstance(value, (bool, int))):
        return value
    if mask:
        return mask
    return value if isinstance(value, float) else masked(value, here)


def printed(text: str, here: Path) -> str:
    """What a verb printed: one JSON document, or text with its tables."""
    if text.startswith("{"):
        value = json.loads(text)
        assert text == json.dumps(value, indent=2) + "\n", "JSON is indented by two"
        return json.dumps(document(value, here), indent=2)
    blocks = re.split(r"(\n\n+)", masked(text, here))
    return "".join(_tables(block) for block in blocks)


def contents(path: Path, here: Path) -> str:
    """What is frozen of a file: masked text, a size, or nothing but that it is there."""
    if path.suffix == ".bin":
        return f"{path.stat().st_size} bytes"
    if path.name not in READ:
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.dumps(document(json.loads(text), here), indent=2)
    if path.suffix == ".jsonl":
        return "\n".join(json.dumps(document(json.loads(line), here)) for line in text.splitlines())
    if path.suffix == ".csv":
        return _csv(text, here)
    if "(CPU engine)" in text:  # times of this machine; a run of record has its own, which stay
        text = re.sub(r"(?<=\| )\*{0,2}\d[\d.e+-]*\*{0,2}(?= \|)", "<float>", text)
    return masked(text, here)


def pictures(target: Any, **_options: Any) -> None:
    """Stands for matplotlib's Figure.savefig: figures are frozen by name, and drawing one takes a second."""
    from PIL import Image

    Image.fromarray(np.zeros((1, 1, 3), np.uint8)).save(target, "png")


# -- details ----------------------------------------------------------------------------------------------------------


def _mask(name: str, masks: list[tuple[str, str]]) -> str:
    return next((mask for pattern, mask in masks if re.fullmatch(pattern, name)), "")


def _csv(text: str, here: Path) -> str:
    header, *rows = csv.reader(io.StringIO(text))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        named = dict(zip(header, row, strict=True))
        cells = {name: (_mask(name, KEYS) if cell else "") or masked(cell, here) for name, cell in named.items()}
        writer.writerow((cells | ({PEAK: "<int>"} if named.get("torch_backend") else {})).values())
    return out.getvalue()


def _words(line: str) -> list[re.Match[str]]:
    """The cells of a line of a table: what stands between two or more spaces."""
    return list(re.finditer(r"\S+(?: \S+)*", line))


def _tables(block: str) -> str:
    """Mask the cells below a header with a name of COLUMNS, to the end of the block; their lines keep no alignment."""
    header: list[re.Match[str]] = []
    lines = []
    for line in block.split("\n"):
        words = _words(line)
        if not header and len(words) > 1 and any(_mask(word[0], COLUMNS) for word in words):
            header = words
            lines.append("  ".join(word[0] for word in words))
        elif header and len(words) > 1:
            lines.append("  ".join(_in_column(word, header) for word in words))
        else:
            lines.append(line)
    return "\n".join(lines)


def _in_column(word: re.Match[str], header: list[re.Match[str]]) -> str:
    """A cell, masked as its column's name wants it: a cell starts or ends where its column's name does."""
    name = next((top[0] for top in header if word.start() == top.start() or word.end() == top.end()), "")
    mask = _mask(name, COLUMNS)
    if not mask or word[0] == "-":
        return word[0]
    return re.sub(r"\d", "#", word[0]) if mask == "digits" else mask
