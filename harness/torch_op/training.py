"""A small character GPT on this package's own text, and what a training step costs with each attention: `fa-cli experiment training`.

The model calls torch.nn.functional.scaled_dot_product_attention, as models do. Each contender puts its function in that place: our sdpa, or
torch's with one of its backends forced. All else is the same: initial weights, batches, optimizer.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..fault import Fault, UsageFault
from ..kernel import KERNELS
from .context import context_parallel
from .operator import attention

Attend = Callable[..., Any]
TORCH: Attend = functional.scaled_dot_product_attention
#: torch's own by the names of the peers.
THEIRS: Mapping[str, Any] = {
    "torch-math": SDPBackend.MATH,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
}
ON_CPU = ("torch-math", "torch-flash")


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its training."""

    layers: int
    heads: int
    dim: int
    seq: int
    batch: int
    steps: int  # of the training whose losses are recorded
    dtype: str = "float32"  # autocast's type where it is another

    @property
    def width(self) -> int:
        """Channels."""
        return self.heads * self.dim

    @property
    def lower(self) -> Any:
        """autocast's type, None for float32 throughout."""
        return None if self.dtype == "float32" else getattr(torch, self.dtype)

    def describe(self) -> str:
        """The model in words."""
        return f"{self.layers} layers, {self.heads} heads of {self.dim}, context {self.seq}, batch {self.batch}, {self.dtype}"


@dataclass(frozen=True)
class Speed:
    """A contender's training steps: a line of speed.csv. Rates are medians and percentiles of the turns; None is unknown."""

    attention: str
    status: str  # PASS, FAIL (a loss that is not finite, or not below the first), REFUSED or ERROR
    tokens_per_s: float | None = None
    p20: float | None = None
    p80: float | None = None
    step_ms: float | None = None
    step_peak_bytes: int | None = None  # above what was allocated before the step: activations, gradients, workspaces
    loss: float | None = None  # of the last step, nats a character
    steps: int | None = None
    why: str = ""


# -- the model --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):  # type: ignore[misc]
    """Causal self-attention and a perceptron, each behind a norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(size.width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(size.width, 3 * size.width), torch.nn.Linear(size.width, size.width)
        self.up, self.down = torch.nn.Linear(size.width, 4 * size.width), torch.nn.Linear(4 * size.width, size.width)

    def forward(self, x: Any) -> Any:
        """(batch, rows, width) to the same."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(torch.nn.Module):  # type: ignore[misc]
    """Characters in, the logits of the next ones out."""

    def __init__(self, size: Size, characters: int) -> None:
        super().__init__()
        self.token, self.place = torch.nn.Embedding(characters, size.width), torch.nn.Embedding(size.seq, size.width)
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = torch.nn.LayerNorm(size.width), torch.nn.Linear(size.width, characters)

    def forward(self, text: Any, places: Any) -> Any:
        """(batch, rows) characters, and the places (rows) that they have in their text, to (batch, rows, characters)."""
        x = self.token(text) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> tuple[Any, int]:
    """The documents, kernels and programs of this tree as numbers of characters, and how many characters there are."""
    root, kinds = KERNELS.parent, (".md", ".py", ".cu", ".cuh", ".hpp", ".cpp")
    files = [path for folder in ("", "harness/**/", "kernels_cu/**/", "tests/**/") for path in sorted(root.glob(f"{folder}*.*"))]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in files if path.suffix in kinds)
    known = {character: number for number, character in enumerate(sorted(set(whole)))}
    return torch.tensor([known[character] for character in whole]), len(known)


@contextlib.contextmanager
def attention_by(attend: Attend) -> Iterator[None]:
    """Another function where models look for scaled_dot_product_attention."""
    before, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def training(size: Size, device: str, seed: int = 0, group: Any = None) -> Callable[[], Any]:
    """A fresh model and its batches; each call is a training step and returns its loss, on the device.

    group: ranks that share out the rows of each batch, by context_parallel. All return the loss of all rows, and all have the same model.
    """
    torch.manual_seed(seed)
    characters, count = text()
    characters, places = characters.to(device), torch.arange(size.seq + 1)
    model = Gpt(size, count).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3 if size.lower else 3e-3)
    random = torch.Generator().manual_seed(seed)

    def step() -> Any:
        starts = torch.randint(len(characters) - size.seq - 1, (size.batch, 1), generator=random)
        batch = characters[(starts + places).to(device)]
        given, wanted, place = batch[:, :-1], batch[:, 1:], places[:-1].to(device)
        optimizer.zero_grad(set_to_none=True)
        with context_parallel(group, buffers=[given, wanted, place], seq_dims=[1, 1, 0]) if group else contextlib.nullcontext():
            with torch.autocast(device.partition(":")[0], size.lower, enabled=size.lower is not None):
                logits = model(given, place).flatten(0, 1)
                loss = functional.cross_entropy(logits, wanted.flatten(), reduction="sum") / (size.batch * size.seq)
            loss.backward()
        total = loss.detach()
        if group:
            for part in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(part, group=group)
        optimizer.step()
        return total

    return step


def losses(size: Size, device: str, attend: Attend, group: Any = None) -> list[float]:
    """The losses of a whole training; with a group by :func:`context_parallel` over its ranks, which is in attend's place."""
    step = training(size, device, group=group)
    with attention_by(attend):
        return [float(loss) for loss in [step() for _ in range(size.steps)]]


# -- speed ------------------------------------------------------------------------------------------------------------


def _ours(kernel: str, deterministic: bool, q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
    """sdpa, but that it leaves nothing to torch's own."""
    return attention(q, k, v, causal=is_causal, kernel=kernel, deterministic=deterministic)


def contenders(device: str, kernels: Mapping[str, str], peers: Sequence[str] | None, deterministic: bool) -> dict[str, Attend]:
    """Our kernels in both forms (or in the deterministic one), and torch's backends, forced. Raises UsageFault for another peer.

    kernels: the spec of each, by what it is called.
    """

    def forced(backend: Any, *given: Any, **options: Any) -> Any:
        with sdpa_kernel(backend):
            return TORCH(*given, **options)

    named = peers if peers is not None else tuple(THEIRS) if device != "cpu" else ON_CPU
    if unknown := [name for name in named if name not in THEIRS]:
        raise UsageFault(f"{unknown[0]} is no attention of a training", f"known: {', '.join(THEIRS)}", "use --peers none, or some of these")
    ours = {name: partial(_ours, spec, False) for name, spec in kernels.items() if not deterministic}
    ours |= {f"{name} deterministic": partial(_ours, spec, True) for name, spec in kernels.items()}
    return ours | {name: partial(forced, THEIRS[name]) for name in named}


def refusal(attend: Attend, size: Size, device: str) -> Speed | None:
    """What an attention that does not take the model's shapes and type says, forward and backward; None where it takes them.

    torch's backends raise RuntimeError, with its reasons as warnings.
    """
    q = torch.zeros(1, size.heads, size.seq, size.dim, device=device, dtype=size.lower or torch.float32, requires_grad=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            attend(q, q, q, is_causal=True).sum().backward()
        except (RuntimeError, ValueError) as error:
            kind = "REFUSED" if isinstance(error, ValueError) or not isinstance(error.__cause__, Fault) else "ERROR"
            reasons = [str(warning.message).partition("(Triggered")[0].strip() for warning in told]
            return Speed("", kind, why=" ".join([str(error).partition("\n")[0], *reasons]))
    return None


def speeds(
    size: Size,
    device: str,
    ways: Mapping[str, Attend],
    turns: int = 9,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Speed]:
    """A Speed for each contender, measured in turns of some training steps; the first turn, which compiles, is not counted.

    steps: 20 by default, on a CPU 2.
    """
    steps = steps or (2 if device == "cpu" else 20)
    refused = {name: refusal(attend, size, device) for name, attend in ways.items()}
    every = {name: (attend, training(size, device)) for name, attend in ways.items() if not refused[name]}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    seen: dict[str, list[float]] = {name: [] for name in every}
    peaks = dict.fromkeys(every, 0)
    for turn in range(turns + 1):
        for number, (name, (attend, step)) in enumerate(every.items()):
            progress(f"{turn * len(every) + number}/{(turns + 1) * len(every)} trains by {name}")
            with attention_by(attend):
                took, peak, losses = _turn(step, steps, device)
            seconds[name].append(took / steps)
            seen[name] += losses
            peaks[name] = max(peaks[name], peak if len(seconds[name]) > 1 else 0)
    return [
        Speed(name, no.status, why=no.why) if (no := refused[name]) else _speed(name, size, seconds[name][1:], seen[name], peaks[name])
        for name in ways
    ]


def _speed(name: str, size: Size, times: Sequence[float], curve: Sequence[float], peak: int) -> Speed:
    """The line of one contender: seconds of a step by turns, the losses of all steps."""
    tokens, middle, fifths = size.batch * size.seq, statistics.median(times), statistics.quantiles(times, n=5)
    rate, low, high = (round(tokens / seconds) for seconds in (middle, fifths[3], fifths[0]))
    fine = all(map(math.isfinite, curve)) and curve[-1] < curve[0]
    why = "" if fine else f"its loss went from {curve[0]:.3g} to {curve[-1]:.3g}"
    loss = round(curve[-1], 6) if math.isfinite(curve[-1]) else None
    return Speed(name, "PASS" if fine else "FAIL", rate, low, high, round(middle * 1e3, 4), peak or None, loss, len(curve), why)


def table(found: Sequence[Speed]) -> bytes:
    """speed.csv."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Speed)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, found))
    return text.getvalue().encode()


def _turn(step: Callable[[], Any], steps: int, device: str) -> tuple[float, int, list[float]]:
    """Seconds of some steps, the most memory they held above what was there before, and their losses."""
    gpu = device != "cpu"
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before, began = torch.cuda.memory_allocated(device) if gpu else 0, time.perf_counter()
    losses = [step() for _ in range(steps)]
    if gpu:
        torch.cuda.synchronize(device)
    took = time.perf_counter() - began
    return took, torch.cuda.max_memory_allocated(device) - before if gpu else 0, [float(loss) for loss in losses]
