"""The house keeps its shape: imports run one way, files stay small, heavy packages load late, one name is installed."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
import warnings
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pages
import pytest
from rooms import INNER, MODULES, ROOMS, ROOT, floor, imports, ours, room

SOURCES = [ROOT / "cli.py", ROOT / "__init__.py", *MODULES.values()]
HEAVY = ("cupy", "torch", "pandas", "matplotlib", "numpy", "rich", "ml_dtypes")


@pytest.mark.parametrize("module", INNER)
def test_imports_run_one_way(module: str) -> None:
    """A module imports its own room and lower floors; problem.py imports no other room but fault and formula, which import none."""
    for other in ours(module):
        below = room(other) == room(module) or floor(room(other)) > floor(room(module))
        assert below, f"{module} imports {other}, which is not below it"
    allowed = {"problem": {"fault", "formula"}, "fault": set[str](), "formula": {"formula"}}
    assert {room(other) for other in ours(module)} <= allowed.get(room(module), set(ROOMS))


def test_imports_have_no_circle() -> None:
    """No module reaches itself, whatever imports are read, those for types and those inside functions among them."""
    TopologicalSorter({module: ours(module) for module in INNER}).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("package", "home"),
    [
        ("cupy", {"harness/backends/cuda.py", *(f"harness/ring/{name}.py" for name in ("nccl", "peer", "probe"))}),
        ("mpi4py", {"harness/ring/mpi.py"}),
        (
            "subprocess",
            {
                "harness/backends/host/backend.py",
                "harness/backends/host/cache.py",
                "harness/backends/host/report.py",
                "harness/backends/sass.py",
                "harness/files/child.py",
                "harness/files/environment.py",
                "harness/verbs/doctor.py",
                "harness/verbs/profile/nsight.py",
                "harness/ring/start.py",
            },
        ),
        ("pandas", {"harness/report/compose.py"}),
        ("seaborn", {"harness/report/style.py"}),
        ("matplotlib", {f"harness/report/{name}.py" for name in ("ladder", "picture", "ratios", "style", "figures", "training")}),
        ("click", {"cli.py", *(f"harness/terminal/{name}.py" for name in ("complete", "errors", "group", "options", "streams"))}),
        ("rich", {f"harness/terminal/{name}.py" for name in ("printing", "progress", "tables")}),
        (
            "torch",
            {
                *(
                    f"harness/torch_op/{name}.py"
                    for name in (
                        *(
                            "arguments",
                            "call",
                            "context",
                            "copies",
                            "explain",
                            "masked",
                            "native",
                            "operator",
                            "float8",
                            "paged",
                            "ranks",
                            "ring",
                            "sdpa",
                            "sums",
                            "traced",
                            "training",
                            "words",
                        ),
                    )
                ),
                "harness/measure/ceilings.py",
                "harness/peers/fa3_source.py",
                "harness/peers/flashinfer.py",
                "harness/peers/flex.py",
                "harness/peers/on_torch.py",
                "harness/peers/sdpa.py",
                "harness/peers/triton_kernels.py",
                "harness/ring/place.py",
            },
        ),
    ],
)
def test_packages_have_one_home(package: str, home: set[str]) -> None:
    """Only cuda.py and the ring between GPUs import CuPy, only host/ starts a compiler, pandas is report.py's, matplotlib the figures'."""
    users = {path.relative_to(ROOT).as_posix() for path in SOURCES if package in imports(path)}
    assert users <= home
    assert users, f"nothing imports {package}: the rule, or this test, is out of date"


#: The functions with more than eight parameters, and why.
WIDE = {
    "of of harness/problem.py": "it makes the value that others are given whole",
    "sdpa of harness/torch_op/sdpa.py": "the signature of torch's scaled_dot_product_attention, and two more",
    "attention of harness/torch_op/operator.py": "the public operator: its tensors, the mask, and what a caller chooses",
    "explain of harness/torch_op/explain.py": "what attention takes, and how much is printed",
    "ring_attention of harness/torch_op/ring.py": "the same, over the ranks of a group",
    "ready of harness/torch_op/call.py": "the key of its cache is all of a call",
    **{f"{name} of harness/peers/triton_kernels.py": "a kernel of a GPU" for name in ("forward_kernel", "dq_kernel", "dk_dv_kernel")},
}


def test_no_function_of_a_door_has_more_than_eight_parameters() -> None:
    """What a room gives others: functions and methods without an underscore. self does not count, nor * and **."""
    wide = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(set(names) - {"self", "cls"}) > 8:
                    wide.add(f"{node.name} of {path.relative_to(ROOT).as_posix()}")
    assert wide <= WIDE.keys(), f"more than eight parameters: {', '.join(sorted(wide - WIDE.keys()))}"


@pytest.mark.filterwarnings("default")
def test_what_has_grown_large_is_told() -> None:
    """A warning, not a law: a .py over 500 lines, a function over 60 from its first statement, a .cu over 300 lines of code.

    Is it one subject? A file is cut where its subject is cut.
    """
    large: dict[str, int] = {}
    for path in (*SOURCES, *ROOT.glob("tests/**/*.py")):
        text = path.read_text()
        if text.count("\n") > 500:
            large[path.name] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (lines := (node.end_lineno or 0) - node.body[0].lineno + 1) > 60:
                large[f"{node.name} of {path.name}"] = lines
    for path in ROOT.glob("kernels_cu/*.cu"):
        code = [line for line in path.read_text().splitlines() if line.strip() and not line.strip().startswith("//")]
        if len(code) > 300:
            large[path.name] = len(code)
    for name, lines in sorted(large.items()):
        warnings.warn(f"{name} has {lines} lines", stacklevel=1)


def test_kernels_speak_words_only() -> None:
    """The tree's kernels include only <fa/...> and hold no inline PTX and no backend #ifdef."""
    for path in (*ROOT.glob("kernels_cu/*.cu"), *ROOT.glob("kernels_cu/ring/*.cu")):
        code = re.sub(r"//.*", "", path.read_text())
        assert set(re.findall(r"#\s*include\s*(\S)(\w+)", code)) <= {("<", "fa")}, path.name
        assert not re.search(r"\basm\b|__CUDA_ARCH__|__CUDACC|FA_HOST", code), path.name


@pytest.mark.parametrize("verb", ["--help", "run --help", "list", "list --json"])
def test_help_and_list_load_nothing_heavy(verb: str) -> None:
    """They import neither cupy, torch, pandas, matplotlib nor numpy; help not rich either, which list prints its table with."""
    code = f"import sys, cli\ntry: cli.main({verb.split()})\nexcept SystemExit: pass\n"
    code += f"sys.stderr.write(' '.join(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("Usage: fa-cli" if "--help" in verb else "fa2") in done.stdout
    assert done.stderr == ("rich" if verb.startswith("list") else "")


def test_help_is_quick() -> None:
    """`fa-cli --help` takes under 150 ms more than Python alone; where importing click alone takes a quarter of that, four times click.

    Processor time, the least of five, in turn: other tests run beside it, and machines that run tests are slow and busy.
    """
    commands = [("-c", "pass"), ("-c", "import click"), ("cli.py", "--help")]
    times: list[list[float]] = [[], [], []]
    for _ in range(5):
        for mine, words in zip(times, commands, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            mine.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    bare, click, help_ = (min(each) for each in times)
    assert help_ - bare < max(0.15, 4 * (click - bare)), (bare, click, help_)


def test_wheel_holds_one_name(wheel: zipfile.ZipFile) -> None:
    """A wheel installs the package fa_cli and nothing else: `data`, `cli` and `harness` stay the user's."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fa_cli"}


def test_the_distribution_is_fa_harness(wheel: zipfile.ZipFile) -> None:
    """The index has another project under fa-cli: ours has another name, and no text tells anyone to install that one."""
    assert any(name.startswith("fa_harness-") for name in wheel.namelist())
    command = re.compile(r"""pip install (-\S+ )*['"]?fa[-_](cli|harness)(?!-\d)""")
    texts = [*SOURCES, *pages.documents(), ROOT / "Makefile", *(ROOT / "experiments").rglob("*.md")]
    assert not [path for path in texts if command.search(path.read_text())]


def test_wheel_is_complete(wheel: zipfile.ZipFile) -> None:
    """Every module, kernel, header and sweep of the checkout is in the wheel; tests, data and plots are not."""
    names = {name.removeprefix("fa_cli/") for name in wheel.namelist() if name.startswith("fa_cli/")}
    wanted = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    for pattern in (
        "kernels_cu/*.cu",
        "kernels_cu/*.md",
        "kernels_cu/plain/*.cu",
        "kernels_cu/ring/*.cu",
        "kernels_cu/include/**/*.cuh",
        "kernels_cu/host/**/*.*",
        "experiments/*/sweep.toml",
        "harness/torch_op/native.cpp",
        "harness/verbs/selftest/faults.toml",
        "py.typed",
    ):
        found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert found, pattern
        wanted |= found
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert not [name for name in names if name.startswith(("tests", "data/", "plots", ".")) or name.endswith((".bin", ".png"))]


def test_editable_install_is_live() -> None:
    """Where this checkout is installed in editable form, fa_cli's files are these files, and an edit needs no new install."""
    code = "import fa_cli.cli, fa_cli.harness.problem as p; print(fa_cli.cli.__file__); print(p.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("fa-cli is not installed in this environment")
    found = Path(done.stdout.splitlines()[0])
    if found.parent != ROOT and (found.parent / "pyproject.toml").is_file():
        pytest.skip(f"the checkout installed in this environment is another one: {found.parent}")
    assert done.stdout.splitlines() == [str(ROOT / "cli.py"), str(ROOT / "harness" / "problem.py")]


def test_generated_documents_are_up_to_date() -> None:
    """Tables and --help blocks of documents and .clangd are what `make docs` would write."""
    done = subprocess.run([sys.executable, "tests/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
