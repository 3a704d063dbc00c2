"""A kernel is one file: what its header, which is read without compiling, and its name say of it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..fault import UsageFault, clipped
from .header import Choice, Launch, Table, bad, read_header
from .tree import FILE, INCLUDE, KERNELS, include_closure

_TENSOR_PTX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|wmma\.mma)\b|\bnvcuda::wmma\b")


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
    dtypes_kv: tuple[str, ...] = ()  # what K and V may be stored as beside Q of its dtypes (--kv-dtype): DTYPE_KV
    head_dim_v: bool = False  # whether V, and so O, dO and dV, may have a head dim of their own (--dim-v)
    logsumexp_gradient: bool = False  # whether a backward pass takes the gradient of logsumexp, fa::Args::dlogsumexp
    mask: bool = False  # whether it takes --mask, by fa/score.cuh
    paged: bool = False  # whether it takes --page-size, by fa/pages.cuh
    score: bool = False  # whether it takes --score
    sinks: bool = False  # whether it takes --sinks, by fa/sink.cuh
    window: bool = False  # whether a causal window is a second border (FA_WINDOW of fa/args.cuh); without `mask` it takes no other
    spill_bytes_allowed: int = 0
    auto: bool | int | str = True  # whether --compute auto may take it: for which problems
    tile: Mapping[str, int | str] = field(default_factory=dict)
    runtime: tuple[str, ...] = ()  # names of [tile] that are no macros: numbers of fa::Args, so that no value is a compile
    choices: tuple[Choice, ...] = ()
    let: Mapping[str, int | str] = field(default_factory=dict)
    workspace: Mapping[str, Table] = field(default_factory=dict)
    tensor_map: Mapping[str, Table] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    forms: tuple[bool, ...] = (True,)  # the values of deterministic; both where the header says "optional", False the default
    variant_of: str = ""  # the kernel in whose place it runs where `when` holds
    when: int | str = 0
    widest_v: int | None = None  # the widest head dim of V, where it is less than that of Q and K
    variants: tuple[Kernel, ...] = ()  # of the catalogue's kernels: the files that run in this one's place, and this one last

    def __hash__(self) -> int:
        """The hash of path and form, for caches. Equality compares whole headers, so an edited header makes another kernel."""
        return hash((self.path, self.deterministic))

    def __repr__(self) -> str:
        return f"Kernel({self.path.name})"

    @classmethod
    def read(cls, path: Path) -> Kernel:
        """The kernel in a file. Raises UsageFault, with file and line, where its header is missing or wrong."""
        if strange := re.search(r'["\\\x00-\x1f\x7f]', str(path)):
            raise UsageFault(
                f"a kernel's path may not hold {strange[0]!r}", f"compilers are given it in quotes: {clipped(str(path))!r}", "rename it"
            )
        head = read_header(path)
        match = FILE.match(path.stem)
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
            dtypes_kv=tuple(head.get("dtypes_kv", ())),
            head_dim_v=head.get("head_dim_v", False),
            logsumexp_gradient=head.get("logsumexp_gradient", False),
            mask=head.get("mask", False),
            paged=head.get("paged", False),
            score=head.get("score", False),
            sinks=head.get("sinks", False),
            window=head.get("window", False),
            spill_bytes_allowed=head.get("spill_bytes_allowed", 0),
            auto=head.get("auto", True),
            tile=head.get("tile", {}),
            runtime=tuple(head.get("runtime", ())),
            choices=tuple(map(Choice.of, head.get("choice", ()))),
            let=head.get("let", {}),
            workspace=head.get("workspace", {}),
            tensor_map=head.get("tensor_map", {}),
            launches=tuple(Launch.of(item, head.get("tensor_map", {})) for item in head["launch"]),
            forms=(False, True) if head["deterministic"] == "optional" else (head["deterministic"],),
            variant_of=head.get("variant_of", ""),
            when=head.get("when", 0),
            widest_v=head.get("widest_v"),
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
    def windows_only(self) -> bool:
        """Whether windows are all that it takes: it is refused elsewhere, in another kernel's place also where its `when` does not hold."""
        return self.window and not self.mask

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
    def takes_any_width(self) -> bool:
        """Whether it receives the true head_dim: in fa::Args, among its plain parameters, or by a tile value."""
        return self._is_told("head_dim") or bool(re.search(r"\bhead_dim\b", repr(self.tile_expressions)))

    @property
    def takes_dim_v(self) -> bool:
        """Whether V may have a head dim of its own: by its header, and among plain parameters only where args name both."""
        return self.head_dim_v and self._is_told("head_dim") and self._is_told("head_dim_v")

    def dim_v(self, dim: int) -> int | None:
        """The head dim of V beside this one of Q and K, where it must be narrower."""
        return self.widest_v if self.widest_v and self.widest_v < dim else None

    @property
    def tile_expressions(self) -> tuple[int | str, ...]:
        """All that decides its tile values: those of [tile], and the rows of choice with their conditions and costs."""
        return (*self.tile.values(), *(text for row in self.choices for text in row.expressions))

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

    @property
    def files(self) -> tuple[Path, ...]:
        """Its file and those of its variants."""
        return tuple(k.path for k in self.variants) or (self.path,)
