"""A kernel is one file: its header (TOML in comments) is read without compiling, its name resolved, its launches planned.

There is no registry: the catalogue is the listing of kernels_cu/, and a path may stand for a name.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..fault import UsageFault, clipped
from ..problem import DTYPE_BYTES, PASSES, Problem
from .choice import Choice, choose, number, refuse_taken
from .header import Launch, Table, bad, read_header
from .plan import Device as Device
from .plan import LaunchPlan as LaunchPlan
from .plan import Plan as Plan
from .plan import Workspace as Workspace
from .plan import cluster_macro
from .tensor_map import tensor_maps

KERNELS = Path(__file__).resolve().parent.parent.parent / "kernels_cu"
INCLUDE = KERNELS / "include"

_TENSOR_PTX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|wmma\.mma)\b|\bnvcuda::wmma\b")
_FILE = re.compile(r"^(?:(?P<number>\d\d)_)?(?P<name>\w+?)(?:_(?P<pass>forward|backward))?$")


class NoSuchPass(UsageFault):
    """A kernel that has no file for a pass."""


@dataclass(frozen=True)
class Kernel:
    """A kernel file's header, and the number, name and pass of its file name."""

    path: Path
    number: int | None
    name: str
    pass_: str
    title: str
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    arch: str | Mapping[str, str]
    causal: bool
    gqa: bool
    cross: bool
    logits: float  # the largest |scale * q.k| that it takes; inf for "any"
    deterministic: bool  # whether this form of the kernel is
    arithmetic: str = "f32"
    aliases: tuple[str, ...] = ()
    float16_products: int | None = None  # of tensor cores, in place of each float32 product
    spill_bytes_allowed: int = 0
    auto: bool | int | str = True  # whether --compute auto may take it: for which problems
    tile: Mapping[str, int | str] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()
    let: Mapping[str, int | str] = field(default_factory=dict)
    workspace: Mapping[str, Table] = field(default_factory=dict)
    tensor_map: Mapping[str, Table] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    forms: tuple[bool, ...] = (True,)  # the values of deterministic; both where the header says "optional", False the default
    variant_of: str = ""  # the kernel in whose place it runs where `when` holds
    when: int | str = 0
    variants: tuple[Kernel, ...] = ()  # of the catalogue's kernels: the files that run in this one's place, and this one last

    def __hash__(self) -> int:
        """The hash of path and form, for caches. Equality compares whole headers, so an edited header makes another kernel."""
        return hash((self.path, self.deterministic))

    def __repr__(self) -> str:
        return f"Kernel({self.path.name})"

    # -- reading ------------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: Path) -> Kernel:
        """The kernel in a file. Raises UsageFault, with file and line, where its header is missing or wrong."""
        if strange := re.search(r'["\\\x00-\x1f\x7f]', str(path)):
            raise UsageFault(
                f"a kernel's path may not hold {strange[0]!r}", f"compilers are given it in quotes: {clipped(str(path))!r}", "rename it"
            )
        head = read_header(path)
        match = _FILE.match(path.stem)
        if not match:
            raise bad(path, 1, "the file name may hold letters, digits and _ (NN_name_pass.cu)")
        return cls(
            path=path,
            number=int(match["number"]) if match["number"] else None,
            name=match["name"],
            pass_=match["pass"] or "forward",
            title=head["title"],
            dtypes=tuple(head["dtypes"]),
            head_dims=tuple(head["head_dims"]),
            arch=head["arch"],
            causal=head["causal"],
            gqa=head["gqa"],
            cross=head["cross"],
            logits=float("inf") if head["logits"] == "any" else float(head["logits"]),
            deterministic=head["deterministic"] is True,
            arithmetic=head.get("arithmetic", "f32"),
            aliases=tuple(head.get("aliases", ())),
            float16_products=head.get("float16_products"),
            spill_bytes_allowed=head.get("spill_bytes_allowed", 0),
            auto=head.get("auto", True),
            tile=head.get("tile", {}),
            choices=tuple(map(Choice.of, head.get("choice", ()))),
            let=head.get("let", {}),
            workspace=head.get("workspace", {}),
            tensor_map=head.get("tensor_map", {}),
            launches=tuple(Launch.of(item, head.get("tensor_map", {})) for item in head["launch"]),
            forms=(False, True) if head["deterministic"] == "optional" else (head["deterministic"],),
            variant_of=head.get("variant_of", ""),
            when=head.get("when", 0),
        )

    @property
    def label(self) -> str:
        """name_pass: the kernel's name in messages."""
        return f"{self.name}_{self.pass_}"

    @property
    def spec(self) -> str:
        """Its text for --compute: the name of a kernel of the tree, the path of any other."""
        return self.name if self.in_tree else str(self.path)

    @property
    def in_tree(self) -> bool:
        """Whether it is of the tree, so that its name finds it: a file elsewhere may have a number too."""
        return self.path.parent == KERNELS

    @property
    def entries(self) -> dict[str, tuple[str, ...]]:
        """Entry name -> its plain parameters' names; empty where the entry takes fa::Args."""
        return {launch.entry: launch.args for launch in self.launches}

    def maps_of(self, entry: str) -> tuple[str, ...]:
        """The names of the tensor maps that an entry is passed, after fa::Args or its plain parameters."""
        return next(launch.maps for launch in reversed(self.launches) if launch.entry == entry)

    @property
    def takes_scale(self) -> bool:
        """Whether the scale is a parameter: it is in fa::Args, and among plain parameters only where args names it."""
        return self._is_told("scale")

    @property
    def takes_shift(self) -> bool:
        """Whether the causal mask may have any causal_shift: a kernel of equal lengths may have key <= query as its mask."""
        return self.cross and self._is_told("causal_shift")

    @property
    def _takes_any_width(self) -> bool:
        """Whether it is told the true head_dim: in fa::Args, among its plain parameters, or by a tile value."""
        return self._is_told("head_dim") or bool(re.search(r"\bhead_dim\b", repr(self.tile_expressions)))

    @property
    def tile_expressions(self) -> tuple[int | str, ...]:
        """All that decides its tile values: those of [tile], and the rows of choice with their conditions."""
        return (*self.tile.values(), *(text for row in self.choices for text in (row.when, *dict(row.values).values())))

    def _is_told(self, name: str) -> bool:
        return any(not launch.args or name in launch.args for launch in self.launches)

    @functools.cached_property
    def source_hash(self) -> str:
        """The first 16 hex digits of the SHA-256 of the file and its include closure: it identifies the compiled source."""
        digest = hashlib.sha256()
        for file in include_closure(self.path):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def tensor_cores(self) -> bool:
        """Whether its products run on tensor cores: it includes fa/mma.cuh, wmma.cuh or wgmma.cuh, or has inline PTX of these."""
        closure = include_closure(self.path)
        words = {INCLUDE / "fa" / f"{name}.cuh" for name in ("mma", "wmma", "wgmma")}
        return not words.isdisjoint(closure) or bool(_TENSOR_PTX.search(self.path.read_text(encoding="utf-8")))

    def arch_for(self, dtype: str) -> str:
        """The header's architecture rule for a dtype: ">=sm_80", or "sm_90a" for exactly that one."""
        return self.arch if isinstance(self.arch, str) else self.arch[dtype if dtype in self.arch else "tf32"]

    def arithmetic_for(self, dtype: str) -> str:
        """The arithmetic class on tensors of a dtype: tf32 on float32 tensors where its header has tf32 and not float32."""
        return "tf32" if dtype == "float32" and dtype not in self.dtypes else self.arithmetic

    def runs_on(self, arch: str, dtype: str) -> bool:
        """Whether the header's architecture rule admits an architecture ("sm_90", or "sm_90a" for what needs the a)."""
        rule = self.arch_for(dtype)
        if rule.startswith(">="):
            return int(re.sub(r"\D", "", arch)) >= int(re.sub(r"\D", "", rule))
        return arch.rstrip("a") == rule.rstrip("a")

    def made_deterministic(self) -> Kernel:
        """The form that gives the same bits on every run (--deterministic). Raises UsageFault where there is none."""
        if True not in self.forms:
            raise UsageFault(
                f"{self.label} has no deterministic form",
                "its header says deterministic = false",
                "leave out --deterministic, or use another kernel: fa-cli list",
            )
        return self if self.forms == (True,) else self._deterministic_form

    @functools.cached_property
    def _deterministic_form(self) -> Kernel:
        """One object: it has read and hashed its source once."""
        return replace(self, deterministic=True, forms=(True,))

    # -- variants -----------------------------------------------------------------------------------------------------

    def with_variants(self, kernels: Iterable[Kernel]) -> Kernel:
        """Itself, with those of the kernels that run in its place for some problems. It then takes what one of them takes."""
        own = tuple(k for k in kernels if (k.variant_of, k.pass_) == (self.name, self.pass_))
        widths = {width for k in (self, *own) for width in k.head_dims}
        return replace(self, variants=(*own, self), head_dims=tuple(sorted(widths))) if own else self

    def on(self, problem: Problem) -> Kernel:
        """The kernel of one file, in this form, that runs a problem: the first variant whose `when` holds, else this file's own."""
        if not self.variants:
            return self
        *forms, own = (k.made_deterministic() if self.deterministic else k for k in self.variants if self.deterministic in k.forms)
        return next((k for k in forms if k._runs_instead(problem)), own)

    def _runs_instead(self, problem: Problem) -> bool:
        fits = problem.head_dim <= self.head_dims[-1]
        return fits and bool(self._number(self.when, self.names(problem, Device("cpu", "")), "when"))

    @property
    def files(self) -> tuple[Path, ...]:
        """Its file and those of its variants."""
        return tuple(k.path for k in self.variants) or (self.path,)

    # -- planning -----------------------------------------------------------------------------------------------------

    def refuse(self, problem: Problem) -> None:
        """Raise UsageFault where the header does not cover a problem: it is refused before launch, never computed wrongly."""
        if problem.dtype not in self.dtypes and not (problem.dtype == "float32" and "tf32" in self.dtypes):
            raise UsageFault(
                f"{self.label} does not take {problem.dtype}",
                f"its header promises {', '.join(self.dtypes)}",
                f"use --dtype {self.dtypes[0]}, or another kernel: fa-cli list",
            )
        if problem.head_dim > self.head_dims[-1]:
            raise UsageFault(
                f"{self.label} does not take head dim {problem.head_dim}",
                f"its widest compiled head dim is {self.head_dims[-1]}",
                "use a smaller --dim, or another kernel: fa-cli list",
            )
        if problem.head_dim not in self.head_dims and not self._takes_any_width:
            raise UsageFault(
                f"{self.label} does not take head dim {problem.head_dim}",
                f"its args name no head_dim, so it computes with a listed width only: {', '.join(map(str, self.head_dims))}",
                f"use --dim {next(w for w in self.head_dims if w >= problem.head_dim)}, or give it the parameter head_dim",
            )
        for wanted, promised, what in (
            (problem.causal, self.causal, "the causal mask (--causal)"),
            (problem.heads_kv != problem.heads_q, self.gqa, "grouped heads (--kv-heads)"),
            (problem.seq_kv != problem.seq_q, self.cross, "unequal lengths (--seq-kv)"),
            # one without the parameter may compute it from the lengths
            (problem.causal_shift != problem.default_shift, self.takes_shift, "a causal_shift but seq_kv - seq_q"),
            (problem.scale != problem.head_dim**-0.5, self.takes_scale, "a scale but 1/sqrt(dim), for its args name none (--scale)"),
        ):
            if wanted and not promised:
                raise UsageFault(f"{self.label} does not support {what}", "its header says so", "use another kernel: fa-cli list")
        if self.variants:
            self.on(problem).refuse(problem)

    def names(self, problem: Problem, device: Device, overrides: Mapping[str, int] | None = None) -> dict[str, int]:
        """Every name of this kernel's expressions, with its value for a problem. Raises UsageFault for an unknown or taken tile name."""
        return self._chosen(problem, device, overrides or {})[0]

    def _chosen(self, problem: Problem, device: Device, overrides: Mapping[str, int]) -> tuple[dict[str, int], tuple[Choice, ...]]:
        """The names, and the rows of choice that gave tiles their values."""
        width = next(w for w in self.head_dims if w >= problem.head_dim)
        names = {
            "batch": problem.batch,
            "heads_q": problem.heads_q,
            "heads_kv": problem.heads_kv,
            "seq_q": problem.seq_q,
            "seq_kv": problem.seq_kv,
            "head_dim": problem.head_dim,
            "HEAD_DIM": width,
            "causal": int(problem.causal),
            "deterministic": int(self.deterministic),
            "sizeof_dtype": DTYPE_BYTES[problem.dtype],
            "sms": device.sms,
            "l2_bytes": device.l2_bytes,
            "shared_optin": device.shared_optin,
        }
        if unknown := set(overrides) - set(self.tile):
            raise UsageFault(
                f"{self.label} has no tile value {', '.join(sorted(unknown))}",
                f"its [tile] has {', '.join(self.tile) or 'nothing'}",
                "--tile takes NAME=VALUE for a name of the header's [tile]",
            )
        macros = {"DTYPE", "CAUSAL", "DETERMINISTIC", *(f"WORKSPACE_{space.upper()}" for space in self.workspace)}
        refuse_taken(self.path, macros | names.keys(), tile=self.tile, let=self.let)
        return names, choose(self.path, self.tile, self.choices, self.let, names, overrides)

    def for_auto(self, problem: Problem, device: Device) -> bool:
        """Whether --compute auto may take it for a problem that it takes."""
        return bool(self._number(self.auto, self.names(problem, device), "auto"))

    def plan(self, problem: Problem, device: Device, overrides: Mapping[str, int] | None = None) -> Plan:
        """Macros, launches and workspaces for a problem on a device. Raises UsageFault where it cannot be launched.

        Plans are cached: the same values give the same object.
        """
        return _kept_plan(self.on(problem), problem, device, tuple(sorted((overrides or {}).items())))

    def _plan(self, problem: Problem, device: Device, overrides: Mapping[str, int]) -> Plan:
        self.refuse(problem)
        names, choices = self._chosen(problem, device, overrides)
        macros: list[tuple[str, str]] = [("HEAD_DIM", str(names["HEAD_DIM"])), ("CAUSAL", str(names["causal"]))]
        macros += [("DTYPE", problem.dtype), ("DETERMINISTIC", str(names["deterministic"]))]
        macros += [(name, str(names[name])) for name in self.tile]
        macros += cluster_macro(self.label, {self._cluster(launch, names) for launch in self.launches if launch.cluster}, dict(macros))
        macros += [(f"WORKSPACE_{name.upper()}", str(i)) for i, name in enumerate(self.workspace)]
        spaces = tuple(
            Workspace(name, space["dtype"], self._number(space["size"], names, f"workspace {name}"), space["init"])
            for name, space in self.workspace.items()
        )
        maps = tensor_maps(self.path, self.tensor_map, names, problem, self.pass_, spaces, self._number)
        launches = [self._launch(launch, names, problem, device) for launch in self.launches if self._number(launch.when, names, "when")]
        if not launches:
            what = f"{self.label} launches nothing on {problem.describe()}"
            raise UsageFault(what, "when is 0 for each launch", "correct when in its header")
        return Plan(tuple(macros), tuple(launches), spaces, maps, choices)

    def _launch(self, launch: Launch, names: Mapping[str, int], problem: Problem, device: Device) -> LaunchPlan:
        grid = [self._number(size, names, "grid") for size in launch.grid] + [1] * (3 - len(launch.grid))
        cluster = self._cluster(launch, names)
        block, shared = self._number(launch.block, names, "block"), self._number(launch.shared, names, "shared")
        maps = tuple(list(self.tensor_map).index(name) for name in launch.maps)
        sizes = (grid[0], grid[1], grid[2]), block, shared
        return LaunchPlan(launch.entry, *sizes, launch.args, maps, cluster).checked(self.label, problem.folder, device)

    def _cluster(self, launch: Launch, names: Mapping[str, int]) -> tuple[int, int, int]:
        x, y, z = [self._number(size, names, "cluster") for size in launch.cluster] + [1] * (3 - len(launch.cluster))
        return x, y, z

    def _number(self, expression: int | str, names: Mapping[str, int], what: str) -> int:
        return number(self.path, expression, names, what)


@functools.lru_cache(maxsize=1024)
def _kept_plan(kernel: Kernel, problem: Problem, device: Device, tiles: tuple[tuple[str, int], ...]) -> Plan:
    """A plan depends on these values only: the kernel's header is compared, the rest of its file has no effect."""
    return kernel._plan(problem, device, dict(tiles))


# -- the catalogue ----------------------------------------------------------------------------------------------------


@functools.cache
def catalogue() -> tuple[Kernel, ...]:
    """Every kernel of the tree, in ladder order, forward before backward."""
    kernels = [Kernel.read(path) for path in sorted(KERNELS.glob("*.cu"))]
    kernels = [kernel.with_variants(kernels) for kernel in kernels]
    return tuple(sorted(kernels, key=lambda k: (k.number if k.number is not None else 999, k.name, PASSES.index(k.pass_))))


def find(spec: str, pass_: str, deterministic: bool = False) -> Kernel:
    """The kernel of a name, a number, an alias or a path, for a pass; in its deterministic form where asked. Of "a+b" the forward pass is
    a's, the backward pass b's.

    Raises UsageFault, which lists the kernels, where there is none; NoSuchPass where the kernel has no such pass.
    """
    found = _find(spec, pass_)
    return found.made_deterministic() if deterministic else found


def is_path(spec: str) -> bool:
    """Whether a spec is the path of a kernel file, not a name."""
    return spec.endswith(".cu") or "/" in spec


def _find(spec: str, pass_: str) -> Kernel:
    if is_path(spec):
        return _from_path(Path(spec), pass_)
    parts = [_of_name(part) for part in spec.split("+", 1)]  # also of the part that this pass does not need
    same = parts[-1 if pass_ == "backward" else 0]
    if found := next((k for k in same if k.pass_ == pass_), None):
        return found
    other = f"a pair, KERNEL+{same[0].name}" if pass_ == "forward" else "a kernel with both passes"
    hint = f"use --mode {same[0].pass_}, or {other}: fa-cli list"
    raise NoSuchPass(f"{same[0].name} has no {pass_} pass", f"it has: {', '.join(k.pass_ for k in same)}", hint)


def _of_name(spec: str) -> list[Kernel]:
    """The passes of a name, number or alias. Raises UsageFault where there is none."""
    wanted, number = spec.lower().replace("-", "_"), int(spec) if re.fullmatch("[0-9]{1,9}", spec) else -1
    same = [k for k in catalogue() if k.number == number or wanted in (a.lower().replace("-", "_") for a in (k.name, *k.aliases))]
    if not same:
        names = ", ".join(dict.fromkeys(k.name for k in catalogue()))
        raise UsageFault(f"unknown kernel {clipped(spec, 80)!r}", f"known: {names}", "fa-cli list, or give a path ending in .cu")
    return same


def _from_path(path: Path, pass_: str) -> Kernel:
    match = _FILE.match(path.stem)
    if not match:
        raise UsageFault(
            f"{clipped(path.name, 80)} cannot name a kernel", "a file name may hold letters, digits and _", "rename it to NAME_forward.cu"
        )
    stem_pass = match["pass"] or "forward"
    file = path if stem_pass == pass_ else path.with_name(f"{path.stem.removesuffix('_' + stem_pass)}_{pass_}.cu")
    if len(file.name) > 255 or not file.is_file():
        write = f"write it: fa-cli new {clipped(match['name'], 80)} --pass {pass_}"
        hint = write if file != path else "fa-cli list shows the kernels there are"
        raise NoSuchPass(f"no kernel file {clipped(str(file))}", f"--compute {clipped(str(path))} needs it for the {pass_} pass", hint)
    return Kernel.read(file.resolve())


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<(fa/[\w./]+)>|"([^"\n]+)")', re.M)


def include_closure(path: Path) -> list[Path]:
    """The file and the headers of ours that it includes, directly or not, in a fixed order: <fa/...> (of the GPU and the host), "..."."""
    seen: dict[Path, None] = {path: None}
    queue = [path]
    while queue:
        includer = queue.pop()
        for word, beside in _INCLUDE.findall(includer.read_text(encoding="utf-8", errors="replace")):
            for file in (INCLUDE / word, KERNELS / "host" / word) if word else (includer.parent / beside,):
                if file.is_file() and file not in seen:
                    seen[file] = None
                    queue.append(file)
    return [path, *sorted(f for f in seen if f != path)]
