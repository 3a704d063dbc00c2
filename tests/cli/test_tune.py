"""fa-cli tune on the CPU engine: what is pruned and why, what is wrong, what is timed, and what a GPU would be told."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted as plain
import pytest
from click.testing import Result

from harness import kernel
from harness.backends import nvrtc
from harness.fault import EnvironmentFault, KernelFault, UsageFault
from harness.kernel import Device, Kernel, planner
from harness.measure.sampling import Energy, Timing
from harness.problem import Problem
from harness.terminal.show.report import tuned
from harness.verbs import tune

Run = Callable[..., Result]
SHAPE = ("--batch", 1, "--heads", 1, "--seq", 33, "--dim", 16)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A good kernel with two more tiles: HOW = 3 is wrong, 4 does not compile, 5 wants too much shared memory."""
    text = (kernel.KERNELS / "05_fa2_naive_forward.cu").read_text()
    head, rest = text.split("// [tile]\n")
    rest = rest.replace('// shared = "', '// shared = "(HOW == 5) * 300000 + ', 1).replace(
        "float(args.scale)", "(HOW == 3 ? 0.0f : float(args.scale))"
    )
    assert "HOW == 5" in rest and "HOW == 3" in rest
    path = tmp_path / "mine_forward.cu"
    path.write_text(head + '// [tile]\n// HOW = "1 if causal else 2"\n// MORE = 7\n' + rest + "static_assert(HOW != 4);\n")
    return "./mine_forward.cu"


def rows_of(result: Result) -> dict[int, dict[str, Any]]:
    """The variants by their value of HOW."""
    return {row["tiles"]["HOW"]: row for row in json.loads(result.stdout)["rows"]}


@needs_compiler
def test_pruned_wrong_and_right(fa_cli: Run, planted: str, tmp_path: Path) -> None:
    """A wrong variant is FAIL without a speed and exit 1; what cannot run is PRUNED with the reason; the default is the baseline."""
    result = fa_cli("tune", planted, *SHAPE, "--tile", "HOW=3,4,5,6", "--output-dir", "out", "--json")
    assert result.exit_code == 1, result.output
    rows = rows_of(result)
    assert {how: row["status"] for how, row in rows.items()} == {2: "PASS", 3: "FAIL", 4: "PRUNED", 5: "PRUNED", 6: "PASS"}
    assert (
        [how for how, row in rows.items() if row["default"]] == [2] and [how for how, row in rows.items() if row["ms"]] == [2, 6] or [6, 2]
    )
    assert rows[3]["ms"] is None and rows[3]["tflops"] is None and "O" in rows[3]["why"]
    assert "static" in rows[4]["why"] and "HOW != 4" in rows[4]["why"]
    assert "shared memory" in rows[5]["why"] and "232448" in rows[5]["why"]
    assert all(row["tflops"] is None and row["vs_default"] is None for row in rows.values()), "a CPU's times choose nothing"
    with open(tmp_path / "out" / "tune.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["tiles"], row["status"], row["default"]) for row in table] == [
        (f"HOW={how}", row["status"], str(row["default"]).lower()) for how, row in rows.items()
    ]
    assert json.loads((tmp_path / "out" / "env.json").read_text())["device"] == "cpu"
    assert fa_cli("tune", planted, *SHAPE, "--tile", "HOW=2", "--output-dir", "out", "-q").exit_code == 0
    again = (tmp_path / "out" / "tune.csv").read_text().splitlines()
    assert len(again) == 1 + 5 + 1 and again.count(again[0]) == 1, "a second run is added"


@needs_compiler
def test_a_torn_table_keeps_its_whole_rows(fa_cli: Run, planted: str, tmp_path: Path) -> None:
    """The next run's rows stand behind them, and what was dropped is said; of a torn header nothing is left."""
    words = ("tune", planted, *SHAPE, "--tile", "HOW=2,6", "--output-dir", "out", "-q")
    assert fa_cli(*words).exit_code == 0
    table = tmp_path / "out" / "tune.csv"
    whole = table.read_bytes()
    for torn, kept in ((whole[:-30], 2), (whole[:-40] + bytes(40), 2), (whole + bytes(4096), 3), (whole[:50], 0)):
        table.write_bytes(torn)
        done = fa_cli(*words)
        assert done.exit_code == 0 and "no whole line" in done.stderr, done.stderr
        lines = table.read_text().splitlines(keepends=True)
        assert lines[:kept] == whole.decode().splitlines(keepends=True)[:kept] and len(lines) == max(kept, 1) + 2
        assert all(row["status"] == "PASS" and len(row["source_hash"]) > 8 and None not in row for row in csv.DictReader(lines))


@pytest.mark.parametrize(
    ("name", "content", "code", "why"),
    [
        ("tune.csv", "kernel,ms\nmine,1\n", 3, "other columns"),
        ("tune.csv", "notes", 3, "other columns"),
        ("results.csv", "Test,Kernel\n", 2, "holds an experiment"),
        ("speed.csv", "kernel\n", 2, "holds an experiment"),
    ],
)
def test_a_folder_of_others_is_refused(name: str, content: str, code: int, why: str, fa_cli: Run, planted: str, tmp_path: Path) -> None:
    """Before anything is compiled: a table with another header is not replaced, nor is an experiment's env.json."""
    (tmp_path / "out").mkdir()
    for path, text in ((name, content), ("env.json", "{}")):
        (tmp_path / "out" / path).write_text(text)
    result = fa_cli("tune", planted, *SHAPE, "--tile", "NOSUCH=3", "--output-dir", "out")
    assert result.exit_code == code and why in result.stderr and "hint: " in result.stderr and "NOSUCH" not in result.stderr
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {name: content, "env.json": "{}"}


@needs_compiler
def test_the_table_says_whose_times(fa_cli: Run, planted: str) -> None:
    """CPU ms, the note, no header lines to paste; two --tile options are every combination."""
    result = fa_cli("tune", planted, *SHAPE, "--tile", "HOW=2,6", "--tile", "MORE=7,8,9")
    assert result.exit_code == 0 and "CPU ms" in result.stdout and "TFLOP/s" not in result.stdout
    assert "say nothing about a GPU" in result.stderr and "// HOW" not in result.stdout
    assert result.stdout.count(" PASS ") == 6 and "6 of 6 variants are right" in result.stdout


@needs_compiler
def test_backward_and_all_pruned(fa_cli: Run, planted: str) -> None:
    """The other pass runs too; where nothing is left that is said, exit 2."""
    result = fa_cli("tune", "fa2", "--mode", "backward", *SHAPE, "--tile", "RESIDENT=64", "--json")
    assert result.exit_code == 0 and {row["pass"] for row in json.loads(result.stdout)["rows"]} == {"backward"}
    text = Path("mine_forward.cu").read_text().replace("static_assert(HOW != 4)", "static_assert(HOW > 99)")
    Path("mine_forward.cu").write_text(text)
    result = fa_cli("tune", planted, *SHAPE, "--tile", "HOW=2,6")
    assert result.exit_code == 2 and "0 of 2 variants are right, 2 pruned" in result.stdout


@needs_compiler
def test_a_tile_may_be_0(fa_cli: Run) -> None:
    """As in fa2's own header; how many variants there are is told before the first is compiled."""
    result = fa_cli("tune", "fa2", *SHAPE, "--tile", "PAD=0", "--json")
    assert result.exit_code == 0 and [row["tiles"] for row in json.loads(result.stdout)["rows"]] == [{"PAD": 0}]
    assert result.stderr.startswith("note: 1 variant of fa2_forward to compile, check and time; CPU times say nothing about a GPU\n")
    result = fa_cli("run", "--compute", "fa2", *SHAPE, "--tile", "BLOCK_Q=0")
    assert result.exit_code == 2 and "fa2 cannot run with the tile values BLOCK_Q=0" in result.stderr and "divides by zero" in result.stderr


@needs_compiler
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("where", ["_prune", "_check", "measure"])
def test_ctrl_c_keeps_what_is_known(where: str, fa_cli: Run, planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pruned, what is wrong and what is right is in tune.csv; a variant that nobody has looked at is not."""
    real, seen = getattr(tune, where), list[object]()

    def stopped(*given: Any, **more: Any) -> Any:
        seen.append(given)
        if where == "measure" or (given[-1] if where == "_prune" else given[0]).tiles["HOW"] == 6:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(tune, where, stopped)
    result = fa_cli("tune", planted, *SHAPE, "--tile", "HOW=3,4,5,6", "--output-dir", "out")
    known = {"_prune": {"4", "5"}, "_check": {"2", "3", "4", "5"}, "measure": {"2", "3", "4", "5", "6"}}[where]
    assert result.exit_code == 130 and f"{len(known)} of 5 variants are in out/tune.csv" in result.stderr, result.output
    with open(tmp_path / "out" / "tune.csv") as file:
        rows = {row["tiles"].removeprefix("HOW="): row for row in csv.DictReader(file)}
    wanted = {"2": "PASS", "3": "FAIL", "4": "PRUNED", "5": "PRUNED", "6": "PASS"}
    assert {how: row["status"] for how, row in rows.items()} == {how: wanted[how] for how in known}
    assert not any(row["ms"] for row in rows.values())


@needs_compiler
def test_a_variant_that_does_not_compile_is_compiled_once(fa_cli: Run, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no NVRTC to ask before, the CPU's compiler is not asked again by the check."""
    loads, load = list[int](), type(tune.pick("cpu")).load

    def counted(self: Any, kernel: Kernel, problem: Problem, tiles: Any = None, *more: Any) -> Any:
        loads.append((tiles or {}).get("HOW"))
        return load(self, kernel, problem, tiles, *more)

    def absent(*_: object) -> None:
        raise EnvironmentFault("no NVRTC", "", "")

    monkeypatch.setattr(nvrtc, "resources", absent)
    monkeypatch.setattr(type(tune.pick("cpu")), "load", counted)
    rows = rows_of(fa_cli("tune", planted, *SHAPE, "--tile", "HOW=4", "--json"))
    assert rows[4]["status"] == "PRUNED" and "HOW != 4" in rows[4]["why"] and loads.count(4) == 1 and loads.count(2) >= 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--tile", "NOSUCH=3"), "no tile value NOSUCH"),
        (("--tile", "HOW=3,x"), "HOW=x"),
        (("--tile", "HOW"), "HOW="),
        (("--dtype", "float16"), "does not take float16"),
        (("--deterministic", "--dim", 300), "head dim 300"),
    ],
)
def test_usage(words: tuple[Any, ...], why: str, fa_cli: Run, planted: str, tmp_path: Path) -> None:
    """Exit 2 before anything is compiled or written."""
    result = fa_cli("tune", planted, *SHAPE, *words, "--output-dir", "out")
    assert result.exit_code == 2 and why in result.stderr, result.output
    assert not (tmp_path / "out").exists()


def test_a_kernel_without_tiles(fa_cli: Run, tmp_path: Path) -> None:
    """There is nothing to tune."""
    plain.kernel(tmp_path)
    result = fa_cli("tune", "./planted_forward.cu")
    assert result.exit_code == 2 and "no tile values" in result.stderr


def test_the_default_sweep(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile's own value, half and double, in every combination, the default first; never 0. Of many, one value is changed at a time."""
    found, problem = Kernel.read(tmp_path / "mine_forward.cu"), Problem.of(1, 1, 33, 16, causal=True)
    backend = tune.pick("cpu")
    monkeypatch.setattr(tune, "MANY", 10**6)
    default, swept, left = tune._swept(found, problem, backend, {})
    assert left == 0
    assert default["HOW"] == 1 and default == swept[0] and len(swept) == 2 * 3 ** (len(found.tile) - 1)
    assert {each["HOW"] for each in swept} == {1, 2} and {each["MORE"] for each in swept} == {3, 7, 14}
    assert len({tuple(each.items()) for each in swept}) == len(swept)
    monkeypatch.setattr(tune, "MANY", len(swept) - 1)
    _, some, left = tune._swept(found, problem, backend, {})
    assert left == len(swept) and some[0] == default and len(some) < len(swept)
    assert all(sum(each[name] != default[name] for name in default) == 1 for each in some[1:])
    assert [tuple(each.values()) for each in tune._swept(found, problem, backend, {"HOW": [1, 2], "MORE": [3, 7]})[1]] == [
        (1, 7), (1, 3), (2, 3), (2, 7)
    ], "lists that are given: every combination"  # fmt: skip
    assert [tuple(each.values()) for each in tune._swept(found, problem, backend, {"HOW": [1, 2], "MORE": [3, 14]}, one_by_one=True)[1]] == [
        (1, 7), (2, 7), (1, 3), (1, 14)
    ], "or one value at a time"  # fmt: skip


def test_registers_and_spills_prune(planted: str, tmp_path: Path) -> None:
    """By what the compiler says of the variant, before it is run."""
    found = Kernel.read(tmp_path / "mine_forward.cu")
    plan = planner.plan(found, Problem.of(1, 1, 33, 16), tune.pick("cpu").device())
    row = tune.Variant("mine", "forward", "", "cuda", {}, True)

    def said(**usage: int) -> str:
        compiled = nvrtc.Compiled("sm_90", "13.0", {entry: nvrtc.Usage(**usage) for entry in found.entries}, "", 0.0)
        return tune._too_much(found, plan, compiled, 200_000, tune._with_resources(row, plan, compiled))

    assert said(registers=64) == ""
    assert said(registers=64, spill_stores=8) == "spills 8 bytes a thread"
    assert "200000" in said(registers=64, shared_bytes=200_000)
    many = 65536 // plan.launches[0].block + 1
    assert f"{many} registers x {plan.launches[0].block} threads" in said(registers=many)


def on_a_gpu(found: Kernel, times: Sequence[float]) -> tune.Tuned:
    """What tune gives on a GPU where the variants HOW = 2 (the default), 3, ... take so many milliseconds."""
    problem = Problem.of(4, 16, 4096, 128)
    base = Timing("warm", (times[0] * 1e-3,) * 20, (1e-5,))
    rows = [
        tune._timed(
            tune.Variant("mine", "forward", problem.folder, "cuda", {"HOW": 2 + i, "MORE": 7}, i == 0),
            Timing("warm", (ms * 1e-3,) * 20, (1e-5,)),
            base,
            problem,
        )
        for i, ms in enumerate(times)
    ]
    rows.append(replace(rows[0], status="PRUNED", ms=None, default=False))
    return tune.Tuned(found, problem, "cuda", "NVIDIA H200", sorted(rows, key=lambda row: tune._order(row, "time")))


def test_what_a_gpu_prints(planted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best first with TFLOP/s and the speed-up over the default, and a row of choice to paste before those that are there."""
    found = on_a_gpu(Kernel.read(tmp_path / "mine_forward.cu"), [4.0, 5.0, 2.0])
    assert [row.tiles["HOW"] for row in found.rows[:3]] == [4, 2, 3] and found.rows[3].status == "PRUNED"
    best = found.rows[0]
    assert best.tflops == pytest.approx(found.problem.flops("forward") / 2e9) and best.vs_default == pytest.approx(2.0)
    assert tuned(found, False, 0) == 0
    out = capsys.readouterr().out
    lines = "".join(line + "\n" for line in out.splitlines() if line.startswith("// "))
    gain = f"{best.vs_default:.3g} ({best.vs_low:.3g} to {best.vs_high:.3g}) times as fast"
    assert lines == (
        '// [[choice]]\n// when = "HEAD_DIM == 128 and seq_q == seq_kv == 4096 and not causal"\n// HOW = 4\n// MORE = 7\n'
        f'// evidence = "fa-cli tune: {gain}, B4_H16_S4096_D128 on NVIDIA H200"\n'
    )
    (tmp_path / "mine_forward.cu").write_text((tmp_path / "mine_forward.cu").read_text().replace("// [[launch]]", f"{lines}// [[launch]]"))
    pasted, device = Kernel.read(tmp_path / "mine_forward.cu"), Device("cuda", "NVIDIA H200")
    assert planner.names(pasted, found.problem, device)["HOW"] == 4, "what is printed can be pasted"
    assert planner.names(pasted, found.problem.with_(causal=True), device)["HOW"] == 1, "and holds for what was tuned alone"
    assert replace(found, rows=[row for row in found.rows if row.default]).header_lines == [], "the default is there already"


def test_ranked_by_energy(planted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The least energy first, whatever its time; a variant whose counter stood still comes behind, one that broke a rule is wrong."""
    by_time = on_a_gpu(Kernel.read(tmp_path / "mine_forward.cu"), [4.0, 5.0, 2.0, 3.0])
    taken = {2: Energy(1000.0, 500.0, 1700.0), 3: Energy(900.0, 600.0, 1500.0), 4: None, 5: Energy(1200.0, 690.0, 1500.0)}
    rows = [
        tune._metered(row, Timing("energy", (), (), energy=taken[row.tiles["HOW"]]), by_time.problem) if row.ms else row
        for row in by_time.rows
    ]
    found = replace(by_time, rows=sorted(rows, key=lambda row: tune._order(row, "energy")), by="energy")
    assert [row.tiles["HOW"] for row in found.rows if row.status == "PASS"] == [3, 2, 5, 4] and by_time.rows[0].tiles["HOW"] == 4
    assert found.best and found.best.pj_per_flop == pytest.approx(900e-3 / found.problem.flops("forward") * 1e12)
    assert tuned(found, False, 0) == 0
    out = capsys.readouterr().out
    assert (
        "takes the least energy" in out
        and "pJ/FLOP" in out
        and "// HOW = 3\n" in out
        and "fa-cli tune: 900 mJ for 1000, " in out
        and " 690 " in out
    )
    assert tuned(by_time, False, 0) == 0 and "pJ/FLOP" not in capsys.readouterr().out, "no counter, no columns"
    wrong = tune._metered(rows[0], Timing("energy", (), (), broken="it writes V"), found.problem)
    assert (wrong.status, wrong.why, wrong.ms, wrong.tflops) == ("FAIL", "it writes V", None, None)
    assert replace(found, rows=[replace(row, energy_mj=None) for row in rows]).best is None, "nothing to rank by"


@needs_compiler
def test_energy_is_read_of_what_passed(fa_cli: Run, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By energy of all that is right, by time of the fastest; a device that does not count energy cannot be asked for it: exit 4."""
    result = fa_cli("tune", planted, *SHAPE, "--by", "energy")
    assert result.exit_code == 4 and "does not report its energy" in result.stderr and "--by time" in result.stderr
    asked: list[int] = []

    def energy(contenders: Any, *_: Any) -> dict[str, Timing]:
        asked.append(len(contenders))
        return {name: Timing("energy", (), (), energy=Energy(10.0 - int(name), 300.0, 1500.0)) for name in contenders}

    monkeypatch.setattr(tune.alone, "energy", energy)
    monkeypatch.setattr(type(tune.pick("cpu")), "meter", lambda self: (0, 0))
    monkeypatch.setattr(tune, "FASTEST", 2)
    tiles = ("--tile", "HOW=2,3,6,7", "--json")  # 3 is wrong
    rows = json.loads(fa_cli("tune", planted, *SHAPE, "--by", "energy", *tiles).stdout)["rows"]
    assert [row["tiles"]["HOW"] for row in rows] == [7, 6, 2, 3] and rows[0]["energy_mj"] == 7.0 and rows[0]["power_w"] == 300.0
    assert rows[0]["pj_per_flop"] > 0 and rows[-1]["energy_mj"] is None
    rows = json.loads(fa_cli("tune", planted, *SHAPE, *tiles).stdout)["rows"]
    assert asked == [3, 2] and [row["energy_mj"] is None for row in rows] == [False, False, True, True]


def test_a_lost_context_names_the_variant() -> None:
    """The GPU is gone for this process: the values that did it are told."""
    row = tune.Variant("mine", "forward", "", "cuda", {"HOW": 3}, False)

    def run(tiles: Any) -> Any:
        raise tune.ContextLost("illegal address", "why")

    with pytest.raises(KernelFault, match="with HOW=3"):
        tune._check(row, run)

    def refused(tiles: Any) -> Any:
        raise UsageFault("no", "reason")

    assert tune._check(row, refused)[0].status == "ERROR"


@needs_compiler
def test_without_nvrtc(fa_cli: Run, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers are not known, and what does not compile is pruned by the compiler that there is."""

    def none(*_: object) -> Any:
        raise EnvironmentFault("no NVRTC")

    monkeypatch.setattr(nvrtc, "resources", none)
    rows = rows_of(fa_cli("tune", planted, *SHAPE, "--tile", "HOW=2,4", "--json"))
    assert (rows[2]["status"], rows[2]["registers"], rows[4]["status"]) == ("PASS", None, "PRUNED")
    assert rows[2]["shared_bytes"] and "static" in rows[4]["why"]
