"""Kernel files: headers read and refused with their line, names resolved, launches planned."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from harness import kernel
from harness.fault import UsageFault
from harness.kernel import Device, Kernel, planner
from harness.kernel.signature import check_parameters
from harness.problem import Problem

HEADER = """\
// /// kernel
// title = "a test"
// dtypes = ["float32", "float16"]
// head_dims = [32, 64, 128]
// arch = ">=sm_70"
// causal = true
// gqa = false
// cross = false
// logits = 100
// deterministic = true
// aliases = ["other-name"]
// [tile]
// BLOCK_Q = 64
// BLOCK_K = "32 if HEAD_DIM == 128 else BLOCK_Q"
// [workspace.delta]
// dtype = "float32"
// size = "batch * heads_q * seq_q"
// init = "none"
// [[launch]]
// entry = "prepare"
// grid = "batch"
// block = 32
// when = "causal"
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]
// block = 128
// shared = "(BLOCK_Q + 2 * BLOCK_K) * HEAD_DIM * sizeof_dtype"
// ///
// The essay.
"""
DEVICE = Device("cpu", "a processor")


def write(folder: Path, name: str = "mine_forward.cu", text: str = HEADER) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_header_is_read(tmp_path: Path) -> None:
    """Every key, and number, name and pass from the file name."""
    found = Kernel.read(write(tmp_path, "41_my_kernel_backward.cu"))
    assert (found.number, found.name, found.pass_, found.label) == (41, "my_kernel", "backward", "my_kernel_backward")
    assert found.dtypes == ("float32", "float16")
    assert found.logits == 100
    assert found.arithmetic == "f32"
    assert list(found.entries) == ["prepare", "forward"]
    assert Kernel.read(write(tmp_path, "mine.cu")).pass_ == "forward"


def test_arithmetic_by_dtype(tmp_path: Path) -> None:
    """float32 files are judged as tf32 where the header promises tf32 instead of float32; other files as the header says."""
    both = HEADER.replace('["float32", "float16"]', '["tf32", "float16"]').replace("// gqa", '// arithmetic = "p16"\n// gqa')
    found = Kernel.read(write(tmp_path, text=both))
    assert [found.arithmetic_for(dtype) for dtype in ("float32", "float16")] == ["tf32", "p16"]
    plain = Kernel.read(write(tmp_path))
    assert [plain.arithmetic_for(dtype) for dtype in ("float32", "float16")] == ["f32", "f32"]


@pytest.mark.parametrize(
    ("old", "new", "line", "word"),
    [
        ("// gqa = false\n", "// gqa = false\n// swizzle = 3\n", 8, "unknown key 'swizzle'"),
        ("// gqa = false\n", "", 1, "lacks the required key 'gqa'"),
        ("// gqa = false\n", "// gqa = 0\n", 7, "gqa must be true or false"),
        ('["float32", "float16"]', '["float32", "int8"]', 3, "dtypes must be"),
        ("[32, 64, 128]", "[64, 32]", 4, "head_dims must be"),
        ("logits = 100", 'logits = "all"', 9, "logits must be"),
        ('arch = ">=sm_70"', 'arch = "newest"', 5, "arch must be"),
        ('arch = ">=sm_70"', 'arch = { float32 = ">=sm_70" }', 5, "arch has no rule for float16"),
        ('init = "none"', 'init = "ones"', 18, "init"),
        ('init = "none"', "init = {}", 18, "init"),
        ('dtype = "float32"', 'dtype = ["float32"]', 16, "dtype"),
        ('// entry = "prepare"\n', "", 19, "lacks the required key 'entry'"),
        ("// block = 32\n", "// block = 32\n// color = 1\n", 23, "unknown key 'color'"),
        ("// cross = false", "// cross = ", 8, "not TOML"),
        ("// gqa = false\n", '// gqa = false\n// runtime = "BLOCK_Q"\n', 8, "runtime must be"),
        ("// gqa = false\n", '// gqa = false\n// runtime = ["BLOCK_M"]\n', 8, "runtime names 'BLOCK_M'; .tile. has BLOCK_Q, BLOCK_K"),
        ("// block = 32\n", '// block = 32\n// args = ["Q", "delta"]\n', 23, "names 'delta', a workspace: only fa::Args .*WORKSPACE_DELTA"),
        ("// block = 32\n", '// block = 32\n// args = ["Q", "P"]\n', 23, "launch names 'P'; known: K, O, Q"),
        ("// gqa = false\n", '// gqa = false\n// runtime = ["BLOCK_Q", "BLOCK_Q"]\n', 8, "at most 4 names, each once"),
        ("// logits = 100", '// logits = 100\n// runtime = ["BLOCK_Q"]', 10, "a launch with args"),
    ],
)
def test_header_faults_name_file_and_line(tmp_path: Path, old: str, new: str, line: int, word: str) -> None:
    """A wrong header is exit 2 and says where: path:line."""
    assert old in HEADER
    text = HEADER.replace(old, new, 1)
    path = write(tmp_path, text=text.replace("// when", '// args = ["Q"]\n// when') if "args" in word else text)
    with pytest.raises(UsageFault, match=word) as caught:
        Kernel.read(path)
    place, _, _ = caught.value.what.partition(": ")
    assert place.startswith(f"{path}:")
    assert abs(int(place.rsplit(":", 1)[1]) - line) <= 1, caught.value.what


def test_files_without_header(tmp_path: Path) -> None:
    """No header, no text, no file: each says so."""
    with pytest.raises(UsageFault, match="no kernel header"):
        Kernel.read(write(tmp_path, text="__global__ void f() {}\n"))
    (tmp_path / "b.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageFault, match="cannot read"):
        Kernel.read(tmp_path / "b.cu")
    with pytest.raises(UsageFault, match="cannot read"):
        Kernel.read(tmp_path / "none.cu")


def test_plan(tmp_path: Path) -> None:
    """The smallest compiled width that holds D; tiles, launches, workspaces and macros with their numbers."""
    found = Kernel.read(write(tmp_path))
    plan = planner.plan(found, Problem.of(3, 4, 100, 65), DEVICE)
    macros = dict(plan.macros)
    assert (macros["HEAD_DIM"], macros["BLOCK_K"], macros["CAUSAL"], macros["WORKSPACE_DELTA"]) == ("128", "32", "0", "0")
    assert [launch.entry for launch in plan.launches] == ["forward"]  # `when` is false
    assert plan.launches[0].grid == (2, 4, 3)
    assert plan.launches[0].shared == (64 + 64) * 128 * 4
    assert plan.workspaces[0].elements == 1200
    causal = planner.plan(found, Problem.of(3, 4, 100, 32, causal=True, dtype="float16"), DEVICE, {"BLOCK_Q": 32})
    assert [launch.entry for launch in causal.launches] == ["prepare", "forward"]
    assert causal.launches[0].grid == (3, 1, 1)
    assert causal.launches[1].shared == 3 * 32 * 32 * 2
    assert plan.macros != causal.macros  # another compile key


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"dim": 129}, "does not take head dim 129"),
        ({"dtype": "bfloat16"}, "does not take bfloat16"),
        ({"heads_kv": 1}, "grouped heads"),
        ({"seq_kv": 5}, "unequal lengths"),
        ({"batch": 70000}, "grid.z would be 70000"),
    ],
)
def test_what_a_header_does_not_promise_is_refused(tmp_path: Path, sizes: dict[str, object], word: str) -> None:
    """Before launch, with exit 2 and a hint; never computed wrongly."""
    found = Kernel.read(write(tmp_path))
    with pytest.raises(UsageFault, match=word) as caught:
        planner.plan(found, Problem.of(**sizes), DEVICE)  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_kernel_that_is_not_told_the_scale(tmp_path: Path) -> None:
    """Plain parameters without scale: another scale than 1/sqrt(dim) is refused, not ignored."""
    plain = HEADER.replace("// block = 128", '// block = 128\n// args = ["Q", "K", "V", "O", "logsumexp"]').replace(
        "// block = 32", '// block = 32\n// args = ["Q"]'
    )
    unlike = Problem.of(dim=64, scale=0.5)
    planner.plan(Kernel.read(write(tmp_path)), unlike, DEVICE)
    planner.plan(Kernel.read(write(tmp_path, text=plain.replace('"Q"]', '"Q", "scale"]'))), unlike, DEVICE)
    found = Kernel.read(write(tmp_path, text=plain))
    planner.plan(found, Problem.of(dim=64), DEVICE)
    with pytest.raises(UsageFault, match="does not support a scale"):
        planner.plan(found, unlike, DEVICE)


def test_who_may_be_given_another_causal_shift(tmp_path: Path) -> None:
    """A kernel that takes unequal lengths and is told the shift: another may have the default written into it."""
    cross = HEADER.replace("// cross = false", "// cross = true")
    plain = cross.replace("// block = 128", '// block = 128\n// args = ["O", "seq_q"]').replace(
        "// block = 32", '// block = 32\n// args = ["O"]'
    )
    told = plain.replace('"seq_q"]', '"causal_shift"]')
    made = Problem.of(dim=64, causal=True)
    for text in (HEADER, cross, plain, told):
        found = Kernel.read(write(tmp_path, text=text))
        planner.plan(found, made.with_(causal_shift=0), DEVICE)  # the default of equal lengths
        if text in (cross, told):
            planner.plan(found, made.with_(causal_shift=3), DEVICE)
            continue
        with pytest.raises(UsageFault, match="does not support a causal_shift but seq_kv - seq_q"):
            planner.plan(found, made.with_(causal_shift=3), DEVICE)


def test_plans_that_do_not_fit(tmp_path: Path) -> None:
    """Too much shared memory, too many threads, an unknown tile name, a wrong expression."""
    problem, ours = Problem.of(dim=128), ("HEAD_DIM", "DTYPE", "CAUSAL", "DETERMINISTIC", "WORKSPACE_DELTA")
    found = Kernel.read(write(tmp_path))
    with pytest.raises(UsageFault, match="does not fit a small GPU") as caught:
        planner.plan(found, problem, Device("cuda", "a small GPU", shared_optin=49152))
    assert "per block, it has 49152" in caught.value.why
    with pytest.raises(UsageFault, match=r"does not fit an H200\n.*per block, an H200, whose limits the CPU engine has, has 49152"):
        planner.plan(found, problem, Device("cpu", "a processor", shared_optin=49152))
    with pytest.raises(UsageFault, match="no tile value BLOCK"):
        planner.plan(found, problem, DEVICE, {"BLOCK": 1})
    with pytest.raises(UsageFault, match="2048 threads"):
        planner.plan(Kernel.read(write(tmp_path, text=HEADER.replace("block = 128", "block = 2048"))), problem, DEVICE)
    for old, new, word in (
        ('"batch * heads_q * seq_q"', '"batch - 99"', "less than 0"),
        *(("BLOCK_Q = 64", f"BLOCK_Q = 64\n// {name} = 2", f"tile {name} is taken") for name in ("seq_q", *ours)),
        ("block = 128\n", 'block = 128\n// when = "batch > 9"\n', "launches nothing"),
    ):
        with pytest.raises(UsageFault, match=word):
            planner.plan(Kernel.read(write(tmp_path, text=HEADER.replace(old, new))), problem, DEVICE)
    with pytest.raises(UsageFault, match="unknown name 'seq'"):
        planner.plan(Kernel.read(write(tmp_path, text=HEADER.replace("ceil_div(seq_q", "ceil_div(seq"))), problem, DEVICE)


def test_a_let_in_capitals_is_a_macro(tmp_path: Path) -> None:
    """It follows from the problem, and --tile does not set it."""
    found = Kernel.read(
        write(tmp_path, text=HEADER.replace("[tile]", '[let]\n// COLUMNS = "round_up(head_dim, 16)"\n// rest = 1\n// [tile]'))
    )
    values = planner.plan(found, Problem.of(dim=72), DEVICE).values
    assert values["COLUMNS"] == "80" and "rest" not in values
    with pytest.raises(UsageFault, match="no tile value COLUMNS"):
        planner.plan(found, Problem.of(dim=72), DEVICE, {"COLUMNS": 64})


def test_find_by_path(tmp_path: Path) -> None:
    """--compute ./mine_forward.cu takes ./mine_backward.cu beside it; one that is not there is exit 2 with a hint to write it."""
    path = write(tmp_path)
    assert kernel.find(str(path), "forward").path == path
    with pytest.raises(UsageFault, match=r"no kernel file .*mine_backward\.cu") as caught:
        kernel.find(str(path), "backward")
    assert "fa-cli new mine --pass backward" in caught.value.hint
    write(tmp_path, "mine_backward.cu")
    assert kernel.find(str(path), "backward").pass_ == "backward"


def test_find_a_pair_with_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of "a+b" each may be a path; both are looked up, whichever pass is asked for. A + in a path makes no pair."""
    path = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for spec in (f"{path}+fa2", "./mine_forward.cu+fa2", "mine_forward.cu+07"):
        assert kernel.is_path(spec) and kernel.find(spec, "forward").path == path and kernel.find(spec, "backward").name == "fa2"
    with pytest.raises(UsageFault, match=r"no kernel file .*nowhere_backward\.cu"):
        kernel.find("fa2+./nowhere_backward.cu", "forward")
    with pytest.raises(UsageFault, match="unknown kernel 'nobody'"):
        kernel.find("mine_forward.cu+nobody", "forward")
    (tmp_path / "c++").mkdir()
    inside = write(tmp_path / "c++")
    assert kernel.find("c++/mine_forward.cu", "forward").path == inside == kernel.find("c++/mine_forward.cu+fa2", "forward").path
    assert not kernel.is_path("fa2+split") and kernel.parts("fa2+split") == ("fa2", "split")


def test_find_by_name() -> None:
    """Name, number, alias and the seeds' spellings mean the same file; an unknown one lists what there is."""
    naive = kernel.find("naive", "forward")
    assert naive is kernel.find("0", "forward") is kernel.find("00", "forward") is kernel.find("naive-attn", "forward")
    assert kernel.find("NAIVE", "backward").pass_ == "backward"
    for unknown in ("²", "٠٧", "7" * 5000, "nothing"):
        with pytest.raises(UsageFault, match=f"unknown kernel '{unknown[:80]}") as caught:
            kernel.find(unknown, "forward")
    assert "naive" in caught.value.why
    with pytest.raises(UsageFault, match="unknown kernel 'hoper'") as caught:
        kernel.find("hoper", "forward")
    assert caught.value.hint.startswith("did you mean hopper? fa-cli list")


def test_an_unknown_name_that_is_a_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that lies in the current folder the hint gives the path."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageFault, match="unknown kernel 'mine'") as caught:
        kernel.find("mine", "forward")
    assert caught.value.hint == "use --compute ./mine_forward.cu"


def test_architectures(tmp_path: Path) -> None:
    """>= compares numbers; an exact rule means that architecture only; rules may differ by dtype."""
    found = Kernel.read(write(tmp_path))
    assert found.runs_on("sm_70", "float32") and found.runs_on("sm_120", "float32") and not found.runs_on("sm_60", "float32")
    rule = '{ float32 = ">=sm_80", float16 = "sm_90a" }'
    mixed = Kernel.read(write(tmp_path, text=HEADER.replace('">=sm_70"', rule)))
    assert mixed.runs_on("sm_90", "float16") and not mixed.runs_on("sm_100", "float16") and not mixed.runs_on("sm_75", "float32")


def test_source_hash_covers_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing a header that is included by a header changes the hash; changing one that is not included does not."""
    monkeypatch.setattr(kernel.tree, "INCLUDE", tmp_path / "include")
    monkeypatch.setattr(kernel.tree, "KERNELS", tmp_path)
    fa = tmp_path / "include" / "fa"
    fa.mkdir(parents=True)
    (fa / "a.cuh").write_text("#include <fa/b.cuh>\n")
    (fa / "b.cuh").write_text("int b;\n")
    (fa / "c.cuh").write_text("int c;\n")
    path = write(tmp_path, text=HEADER + "#include <fa/a.cuh>\n")
    before = Kernel.read(path).source_hash
    (fa / "c.cuh").write_text("int changed;\n")
    assert Kernel.read(path).source_hash == before
    (fa / "b.cuh").write_text("int changed;\n")
    assert Kernel.read(path).source_hash != before


def test_row_pitch() -> None:
    """Rows start 16-byte aligned."""
    assert Problem.of(dim=59).row_pitch("Q") == 60
    assert Problem.of(dim=59, dtype="bfloat16").row_pitch("dK") == 64
    assert Problem.of(dim=1, dtype="float64").row_pitch("O") == 2
    assert Problem.of(dim=59).row_pitch("logsumexp") == 1


def test_a_plan_is_kept_until_one_of_its_values_changes(tmp_path: Path) -> None:
    """By value: an equal problem and a kernel read again have the same plan; an edited header at the same path has another."""
    problem, chosen = Problem.of(1, 2, 96, 64), Kernel.read(write(tmp_path))
    plan = planner.plan(chosen, problem, DEVICE)
    assert planner.plan(chosen, Problem.of(1, 2, 96, 64), DEVICE, {}) is plan
    assert planner.plan(Kernel.read(write(tmp_path)), problem, DEVICE) is plan
    assert planner.plan(chosen, problem, DEVICE, {"BLOCK_Q": 32}).launches[-1].grid == (3, 2, 1)
    assert planner.plan(chosen, problem.with_(batch=2), DEVICE).launches[-1].grid == (2, 2, 2)
    edited = Kernel.read(write(tmp_path, text=HEADER.replace("BLOCK_Q = 64", "BLOCK_Q = 16")))
    assert planner.plan(edited, problem, DEVICE).launches[-1].grid == (6, 2, 1)
    with pytest.raises(UsageFault, match="does not fit"):
        planner.plan(chosen, problem, Device("cuda", "small", shared_optin=1000))


# -- what no kernel file should be ------------------------------------------------------------------------------------


def test_all_missing_keys_are_told_at_once(tmp_path: Path) -> None:
    """Of the header, of a workspace and of launches."""
    text = HEADER
    for line in ('title = "a test"', "gqa = false", 'dtype = "float32"', 'grid = "batch"', "block = 128"):
        text = text.replace(f"// {line}\n", "")
    with pytest.raises(UsageFault) as caught:
        Kernel.read(write(tmp_path, text=text))
    told = "mine_forward.cu:2: the header lacks the required keys 'title', 'gqa'; 'dtype' in workspace.delta; 'grid', 'block' in launch"
    assert told in caught.value.what


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[32, 64, 128]", f"[0x{'f' * 5000}]", "head_dims has an integer beyond 64 bits"),
        ("[32, 64, 128]", f"[{'9' * 5000}]", "is not TOML: Exceeds the limit"),
        ("block = 128", f"block = 0x{'f' * 5000}", "block has an integer beyond 64 bits"),
        ("logits = 100", f"logits = 1{'0' * 400}", "logits has an integer beyond 64 bits"),
        ("logits = 100", "logits = nan", "logits must be a number of at least 0"),
        ("logits = 100", "logits = 1e999", "logits must be a number of at least 0"),
        ("logits = 100", "logits = -1", "logits must be a number of at least 0"),
        ("title", "t" * 100_000, "unknown key 'ttt"),
        ('"a test"', "x" * 100_000, "is not TOML"),
        ('"a test"', "[" * 5000, "is not TOML"),
        ('">=sm_70"', f'"{"9" * 100_000}"', "arch must be"),
        ('"forward"', f'"{"x" * 100_000}"', "entry in launch must be"),
    ],
)
def test_a_header_of_odd_values_is_a_short_message(old: str, new: str, words: str, tmp_path: Path) -> None:
    """Exit code 2, and never as long as the file."""
    with pytest.raises(UsageFault) as caught:
        Kernel.read(write(tmp_path, text=HEADER.replace(old, new, 1)))
    assert words in caught.value.what and len(str(caught.value)) < 700


def test_an_array_that_is_not_closed_is_named_at_its_bracket(tmp_path: Path) -> None:
    """tomllib names the line after it, or the end."""
    for array in ("head_dims = [32, 64, 128]", 'grid = ["ceil_div(seq_q, BLOCK_Q)", "heads_q", "batch"]'):
        text = HEADER.replace(array, array[:-1])
        line = text.splitlines().index(f"// {array[:-1]}") + 1
        with pytest.raises(UsageFault, match=rf"mine_forward.cu:{line}: the header is not TOML: Unclosed array.*: {re.escape(array[:9])}"):
            Kernel.read(write(tmp_path, text=text))


def test_long_expressions_and_names_are_short_messages(tmp_path: Path) -> None:
    """An expression of 100 KB, deep or with a name of that length; a kernel's name; a path."""
    for block in (f'"{"x" * 100_000}"', f'"{"1 + " * 3000}1"', f'"{"(" * 5000}"', f'"f({"1, " * 9000})"', f'"{"9" * 5000}"'):
        kernel_ = Kernel.read(write(tmp_path, text=HEADER.replace("block = 128", f"block = {block}")))
        with pytest.raises(UsageFault) as caught:
            planner.plan(kernel_, Problem.of(1, 1, 8, 64), DEVICE)
        assert len(str(caught.value)) < 700
    for spec in ("a" * 5000, f"{'a' * 5000}.cu", f"./{'a' * 300}_forward.cu", f"{'-' * 5000}.cu"):
        with pytest.raises(UsageFault) as caught:
            kernel.find(spec, "forward")
        assert len(str(caught.value)) < 1000


def test_thousands_of_first_lines_take_no_time(tmp_path: Path) -> None:
    """Reading is linear: of 10,000 headers begun and none ended, half a minute was spent."""
    before = time.process_time()
    with pytest.raises(UsageFault, match="of line 1 is not closed"):
        Kernel.read(write(tmp_path, text="// /// kernel\n" * 10_000))
    with pytest.raises(UsageFault, match="of line 1 is not closed"):
        Kernel.read(write(tmp_path, text="// /// kernel\ncode\n" * 10_000))
    assert time.process_time() - before < 2
    assert Kernel.read(write(tmp_path, text="// /// kernel\nint x;\n" + HEADER)).title == "a test"


def test_a_byte_order_mark_is_no_part_of_a_header(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    assert Kernel.read(write(tmp_path, text="\ufeff" + HEADER)).title == "a test"


@pytest.mark.parametrize("folder", ['qu"ote', "new\nline", "back\\slash"])
def test_a_path_that_quotes_cannot_hold_is_refused(folder: str, tmp_path: Path) -> None:
    """It stands in #include and #line."""
    (tmp_path / folder).mkdir()
    with pytest.raises(UsageFault, match="path may not hold"):
        Kernel.read(write(tmp_path / folder))


# -- parameters -------------------------------------------------------------------------------------------------------

PLAIN = """extern "C" __global__ void prepare(const __grid_constant__ fa::Args args);
template <class T, int N> struct Both {};
// __global__ void forward(int of, int a, int comment);
extern "C" __global__ void __launch_bounds__(128, 2) forward(const float* Q, float* O,  // rows, columns
                                                             Both<float, 2> scale) {}
"""


def test_a_parameter_list_of_another_length_is_refused(tmp_path: Path) -> None:
    """With the line of the entry, for plain parameters and for fa::Args; what only the preprocessor knows is left to a compiler."""
    args = HEADER.replace("// block = 128\n", '// block = 128\n// args = ["Q", "O", "scale"]\n')
    check_parameters(Kernel.read(write(tmp_path, text=args + PLAIN)))
    line = args.count("\n") + 4
    for text, words in (
        (args.replace('"O", ', "") + PLAIN, f"mine_forward.cu:{line}: forward has 3 parameters; args passes 2 (Q, scale)"),
        (HEADER + PLAIN, f"mine_forward.cu:{line - 1}: forward has 3 parameters; without args a launch passes one, fa::Args"),
        (args + PLAIN.replace("const float* Q, float* O,", "float* O,"), f":{line}: forward has 2 parameters; args passes 3"),
        (args + PLAIN.replace("const __grid_constant__ fa::Args args", ""), f":{line - 3}: prepare has 0 parameters; without args"),
    ):
        with pytest.raises(UsageFault) as caught:
            check_parameters(Kernel.read(write(tmp_path, text=text)))
        assert words in caught.value.what and caught.value.exit_code == 2
    for list_ in ("PARAMETERS", "const float* Q,\n#if CAUSAL\n float* O\n#endif\n"):
        check_parameters(Kernel.read(write(tmp_path, text=args + PLAIN.replace("const float* Q, float* O,", f"{list_}) {{}} //"))))


def test_every_kernel_of_the_tree_passes_what_it_takes() -> None:
    """No false alarm."""
    for each in kernel.catalogue():
        check_parameters(each)


def test_a_width_that_the_kernel_is_not_told_is_refused(tmp_path: Path) -> None:
    """head_dims = [64] serves --dim 48 only where the kernel knows of 48: by fa::Args, by the parameter head_dim, or by a tile value."""
    problem = Problem.of(1, 1, 8, 48)
    args = HEADER.replace("[32, 64, 128]", "[64]").replace("// block", '// args = ["Q", "O"]\n// block')
    with pytest.raises(UsageFault, match="does not take head dim 48") as caught:
        planner.plan(Kernel.read(write(tmp_path, text=args)), problem, DEVICE)
    assert "a listed width only: 64" in caught.value.why and "--dim 64" in caught.value.hint
    assert planner.plan(Kernel.read(write(tmp_path, text=args)), problem.with_(head_dim=64, scale=0.125), DEVICE)
    for text in (args.replace('"O"]', '"O", "head_dim"]'), args.replace("BLOCK_Q = 64", 'BLOCK_Q = 64\n// D = "head_dim"')):
        planner.names(Kernel.read(write(tmp_path, text=text)), problem, DEVICE)
        assert Kernel.read(write(tmp_path, text=text)).takes_any_width
    assert planner.plan(Kernel.read(write(tmp_path)), problem, DEVICE)
