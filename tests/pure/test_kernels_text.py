"""Every kernel file of the tree has the form that readers and tools need: name, header, essay, words only, a plan for all it promises."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.kernel import INCLUDE, KERNELS, Device, Kernel, catalogue, include_closure, planner
from harness.problem import DTYPE_BYTES, Problem
from harness.verbs.verify.cases import windowed

TREE = catalogue()
each_kernel = pytest.mark.parametrize("kernel", TREE, ids=lambda kernel: kernel.label)

#: The least shared memory a block can have on the architectures we compile for (sm_75), and the most (sm_90).
SMALL, LARGE = Device("cuda", "small", "sm_75", 40, 4 << 20, 65536), Device("cuda", "large", "sm_90")

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__(?:launch_bounds|cluster_dims)__\s*\([^)]*\)\s*)*(\w+)\s*\(([^)]*)\)')
_STATIC_ASSERT = re.compile(r"\bstatic_assert\s*\(([^;]*)\);")
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b(.*)$", re.M)


def code(text: str) -> str:
    """A kernel's text without its comments; the lines stay where they are."""
    return re.sub(r"//.*|/\*.*?\*/", "", text)


def essay(text: str) -> str:
    """The comment between the header's end and the first line of code."""
    after = text.split("// ///\n", 1)[1]
    return "\n".join(line[2:].strip() for line in re.match(r"(?://.*\n)*", after)[0].splitlines())  # type: ignore[index]


def faults(text: str, macros: set[str]) -> set[str]:
    """What in a kernel's text breaks the rules of the tree's kernels, each in a word."""
    body, found = code(text), set()
    for include in re.findall(r"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*$", body, re.M):
        if not (re.fullmatch(r"<fa/\w+\.cuh>", include) and (INCLUDE / include[1:-1]).is_file()):
            found.add("include")
    if re.search(r"\b(?:asm|__asm__)\b", body):
        found.add("asm")
    for condition in _CONDITION.findall(body):
        if not set(re.findall(r"[A-Za-z_]\w*", condition)) <= macros:
            found.add("condition")
    if any('"' not in said for said in _STATIC_ASSERT.findall(body)):
        found.add("static_assert")
    if len([line for line in body.splitlines() if line.strip()]) >= 500:
        found.add("length")
    return found


def macros_of(kernel: Kernel) -> set[str]:
    """The names that come from outside as -D."""
    dtype = "float32" if "float32" in kernel.dtypes else kernel.dtypes[0]
    dim = kernel.head_dims[-1]
    problem = Problem.of(1, 2, 32, dim, dtype=dtype, dim_v=kernel.dim_v(dim))
    return {name for name, _ in planner.plan(kernel, windowed(problem) if kernel.windows_only else problem, LARGE).macros}


@each_kernel
def test_the_file_name_is_the_number_the_name_and_the_pass(kernel: Kernel) -> None:
    """NN_name_pass.cu, so that `ls` is the reading order and a file is one pass; a number belongs to one name."""
    assert re.fullmatch(r"\d\d_[a-z][a-z0-9_]*_(forward|backward)\.cu", kernel.path.name)
    assert {other.name for other in TREE if other.number == kernel.number} == {kernel.name}


def test_no_two_kernels_answer_to_one_name() -> None:
    """Names and aliases, `-` and `_` alike as `--compute` has them: each means one step of the ladder."""
    owners: dict[str, set[str]] = {}
    for kernel in TREE:
        for name in (kernel.name, *kernel.aliases):
            owners.setdefault(name.lower().replace("-", "_"), set()).add(kernel.name)
    assert {name: kernels for name, kernels in owners.items() if len(kernels) > 1} == {}


@each_kernel
def test_it_speaks_words_only_and_stays_short(kernel: Kernel) -> None:
    """Only <fa/...> includes that exist, no inline PTX, no condition but on the header's own macros, under 500 lines of code."""
    assert faults(kernel.path.read_text(), macros_of(kernel)) == set()


def test_static_asserts_say_why() -> None:
    """In kernels and words: a tile value that does not fit is refused by one, and its text is what the user reads."""
    files = [kernel.path for kernel in TREE] + sorted((INCLUDE / "fa").glob("*.cuh"))
    found = {path.name: _STATIC_ASSERT.findall(code(path.read_text())) for path in files}
    assert sum(map(len, found.values())) > 20, "none is found any more"
    assert {name: said for name, all_ in found.items() for said in all_ if '"' not in said} == {}


@each_kernel
def test_it_opens_with_an_essay_that_names_its_step(kernel: Kernel) -> None:
    """At least fifteen lines of prose, `Step NN` first. A backward pass says which pass it is."""
    text = essay(kernel.path.read_text())
    lines = [line for line in text.splitlines() if line]
    assert len(lines) >= 15, f"{kernel.path.name}: {len(lines)} lines of essay"
    opening = lines[0]
    assert re.match(rf"Step {kernel.number:02d}\b", opening), f"{kernel.path.name} opens with {opening!r}"
    assert ("backward" in opening) == (kernel.pass_ == "backward"), opening


@each_kernel
def test_entries_are_those_of_the_header(kernel: Kernel) -> None:
    """Each entry that is launched is there, is launched, and takes the one struct, then the header's tensor maps in their order."""
    found = dict(_ENTRY.findall(code(kernel.path.read_text())))
    assert set(found) == set(kernel.entries)
    assert code(kernel.path.read_text()).count("__global__") == len(found), "a __global__ function that no launch names"
    for entry, parameters in found.items():
        maps = ["fa::TensorMap " + name + "_map" for name in kernel.maps_of(entry)]
        assert re.split(r",\s*", parameters) == [f"const __grid_constant__ {each}" for each in ("fa::Args args", *maps)], entry


@each_kernel
def test_what_the_header_declares_is_used(kernel: Kernel) -> None:
    """Every tile value and workspace stands in the code, in an included word or, a workspace, in a tensor map: else it says nothing."""
    text = code("\n".join(path.read_text() for path in include_closure(kernel.path) if "host" not in path.parts))
    tiles = (f"RUNTIME_{name}" if name in kernel.runtime else name for name in kernel.tile)
    mapped = {table["tensor"] for table in kernel.tensor_map.values()}
    for name in (*tiles, *(f"WORKSPACE_{name.upper()}" for name in kernel.workspace if name not in mapped)):
        assert re.search(rf"\b{name}\b", text), f"{kernel.path.name} never uses {name}"
    if kernel.aliases:
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", alias) for alias in kernel.aliases)


@each_kernel
def test_every_promised_problem_has_a_launch_plan(kernel: Kernel) -> None:
    """Each dtype, each width and one less, each mask: blocks of whole warps, workspaces with a size, of which some may be empty, one set of macros a compile."""
    for dtype in (d for d in kernel.dtypes if d in DTYPE_BYTES):
        for dim in sorted({1, *kernel.head_dims, *(w - 1 for w in kernel.head_dims if w > 1)}):
            for causal in {False, kernel.causal}:
                heads_kv = 1 if kernel.gqa else 3
                for seq_q, seq_kv in {(1, 1), (65, 65), *({(65, 33), (33, 65)} if kernel.cross else set())}:
                    problem = Problem.of(2, 3, seq_q, dim, heads_kv, seq_kv, dtype, causal, dim_v=kernel.dim_v(dim))
                    problem = windowed(problem) if kernel.windows_only else problem
                    plan = planner.plan(kernel, problem, LARGE)
                    macros = dict(plan.macros)
                    assert int(macros["HEAD_DIM"]) == min(w for w in kernel.head_dims if w >= dim)
                    assert (macros["DTYPE"], macros["CAUSAL"]) == (dtype, str(int(causal or kernel.windows_only)))
                    assert plan.launches, problem
                    assert all(launch.block % 32 == 0 for launch in plan.launches)
                    assert all(space.elements >= 0 for space in plan.workspaces)


@each_kernel
def test_few_compiles_serve_every_length(kernel: Kernel) -> None:
    """The macros are the compile key, so sizes that change from call to call must not be in them but as one of four forms of a width and
    mask, whatever the length, the batch and the heads are: for few blocks or short sequences, and for more, with splits or without. hopper's
    backward pass has six: two are for tiles of 80 queries."""
    most = 6 if kernel.label == "hopper_backward" else 4
    dtype = kernel.dtypes[0] if kernel.dtypes[0] in DTYPE_BYTES else "float32"
    for dim, causal in itertools.product(kernel.head_dims, {False, kernel.causal}):
        forms = set()  # a window of all keys is a shorter one
        for seq in (1, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 512, 513, 1023, 1025, 2047, 2048, 4097, 65537):
            for of in ((1, 1), (3, 5), (64, 16)) if seq > 70 or not kernel.windows_only else ():
                problem = Problem.of(*of, seq, dim, dtype=dtype, causal=causal, dim_v=kernel.dim_v(dim))
                problem = windowed(problem) if kernel.windows_only else problem
                forms.add(planner.plan(kernel, problem, LARGE).macros)
        assert len(forms) <= most, f"{dim}, causal {causal}: {len(forms)} forms"


@each_kernel
def test_notes_say_what_was_predicted_and_what_came_out(kernel: Kernel) -> None:
    """Each kernel file has a section in its step's page of notes, with prediction, outcome and counter; a variant's is that of its kernel."""
    of = next(each for each in TREE if (each.name, each.pass_) == (kernel.variant_of or kernel.name, kernel.pass_))
    page, title = KERNELS.parent / "docs" / "notes" / f"{of.number:02d}_{of.name}.md", f"\n## {of.pass_.capitalize()}\n"
    notes = page.read_text(encoding="utf-8")
    assert notes.count("\n## State\n") == 1 and notes.count(title) == 1, f"{page} needs one section State and one {title.strip()!r}"
    section = notes.split(title)[1].split("\n## ")[0]
    for part in ("**Prediction.**", "**Outcome.**", "**Counter.**"):
        assert section.count(part) == 1, f"{page}, {title.strip()}, lacks {part}"
    assert of is kernel or f"{kernel.number:02d} {kernel.name}" in section


def test_a_small_gpu_can_run_the_first_steps() -> None:
    """A kernel that says >=sm_70 fits the 64 KB of shared memory that sm_75 has, at its narrowest width at least."""
    for kernel in TREE:
        if kernel.runs_on("sm_75", kernel.dtypes[0]):
            assert planner.plan(kernel, Problem.of(1, 1, 64, kernel.head_dims[0], dtype=kernel.dtypes[0]), SMALL).launches


def planted(change: Callable[[str], str]) -> set[str]:
    """The faults of a tree kernel with one thing done to its text."""
    kernel = next(kernel for kernel in TREE if kernel.tile)
    text = kernel.path.read_text()
    changed = change(text)
    assert changed != text
    return faults(changed, macros_of(kernel))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("#include <cuda_fp16.h>", "include"),
        ('#include "mine.cuh"', "include"),
        ("#include <fa/no_such_word.cuh>", "include"),
        ('asm volatile("bar.sync 0;");', "asm"),
        ("#ifdef __CUDA_ARCH__\n#endif", "condition"),
        ("#if CAUSAL && defined(FA_HOST)\n#endif", "condition"),
        ("static_assert(HEAD_DIM % 8 == 0);", "static_assert"),
        ("int a;\n" * 500, "length"),
    ],
)
def test_each_rule_is_seen_when_broken(line: str, fault: str) -> None:
    """The rules above can fail: one bad line, its fault and no other."""
    assert planted(lambda text: f"{text}\n{line}\n") == {fault}


def test_comments_and_the_headers_macros_break_no_rule() -> None:
    """What only talks of asm, or asks for the mask, is right."""
    assert planted(lambda text: text + "// asm, #include <cuda.h>, __CUDA_ARCH__\n#if CAUSAL\nint c;\n#endif\n") == set()


def test_the_parts_are_found_in_a_file_as_small_as_can_be(tmp_path: Path) -> None:
    """essay() and code() on a known text."""
    text = '// /// kernel\n// title = "x"\n// ///\n// Step 00. One.\n//\n// Two.\nint a; // no\n/* b */ int c;\n'
    assert essay(text) == "Step 00. One.\n\nTwo."
    assert code(text).split() == ["int", "a;", "int", "c;"]
