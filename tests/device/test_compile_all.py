"""Every kernel of the tree compiles for every architecture it allows, within its header's spill allowance, with NVRTC alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import planted
import pytest

from harness.backends import nvrtc, sass
from harness.fault import EnvironmentFault, UsageFault
from harness.kernel import Device, Kernel, catalogue, find, planner
from harness.problem import Problem
from harness.verbs.compile import CompileRow, _cases, compile_all, compile_kernels


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skip where NVRTC is absent. The dev extra brings it, so `make test` never skips."""
    try:
        nvrtc.version()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))


def architectures(kernel: Kernel) -> list[str]:
    """Those that this NVRTC and the kernel's header allow; without NVRTC all that we know, for tests that are then skipped."""
    try:
        known: Sequence[str] = nvrtc.architectures()
    except EnvironmentFault:
        known = tuple(nvrtc.SHARED_LIMIT)
    return [arch for arch in known if any(nvrtc.admits(kernel, dtype, arch) for dtype in kernel.dtypes)]


def home(kernel: Kernel) -> str:
    """The architecture on which every dtype of a kernel compiles: that of the record, else the kernel's newest."""
    return "sm_90" if "sm_90" in architectures(kernel) else architectures(kernel)[-1]


def compiles(kernel: Kernel) -> list[tuple[str, str]]:
    """What a kernel is compiled for: its home with every dtype at once, "", and each other architecture with one dtype."""
    others = [arch for arch in architectures(kernel) if arch != home(kernel)]
    return [(home(kernel), ""), *((arch, dtype) for arch in others for dtype in kernel.dtypes if nvrtc.admits(kernel, dtype, arch))]


CASES = [
    pytest.param(kernel, *part, id="-".join(filter(None, (kernel.label, *part)))) for kernel in catalogue() for part in compiles(kernel)
]


@pytest.mark.days(28)
@pytest.mark.parametrize(("kernel", "arch", "dtype"), CASES)
def test_the_tree_compiles_everywhere_it_says_without_spills(kernel: Kernel, arch: str, dtype: str) -> None:
    rows = compile_kernels([replace(kernel, dtypes=(dtype,)) if dtype else kernel], arch=arch)
    # Whatever the header allows elsewhere; of sm_90a 64 bytes, which test_order.py keeps out of the main loop. split backward has 255
    # registers at head dim 256, and on sm_80 two more, as its header says.
    a100 = 8 if kernel.label == "split_backward" else 0
    most = {"sm_80": a100, "sm_90": 0, "sm_120": 0, "sm_90a": min(64, kernel.spill_bytes_allowed)}
    spilled = [row for row in rows if row.arch in most and row.spill_bytes is not None and row.spill_bytes > most[row.arch]]
    bad = [f"{row.dtype} D{row.head_dim} {row.arch}: {row.status} {row.message}" for row in rows if not row.passed or row in spilled]
    assert not bad, "\n".join(bad)
    compiled = {row.dtype for row in rows if row.status == "OK"}
    assert arch != home(kernel) or compiled == set(kernel.dtypes), "a dtype is not compiled for the architecture of the record"
    widest = {file.head_dims[-1] for file in kernel.variants or (kernel,)}
    assert {row.head_dim for row in rows} == widest and all(row.causal == kernel.causal for row in rows)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_head_dims_of_deepseek_have_no_spills(pass_: str) -> None:
    """192 of Q and K and 128 of V, in every form: none of the producer either; forward in tiles of 128 keys, as at head dim 128."""
    if "sm_90a" not in nvrtc.architectures():
        pytest.skip("this NVRTC compiles for no Hopper")
    hopper = find("hopper", pass_)
    device = Device("cuda", "", arch="sm_90a", shared_optin=nvrtc.SHARED_LIMIT["sm_90a"])
    for form in (hopper, hopper.made_deterministic()):
        problem = Problem.of(2, 16, 4096, 192, dtype="bfloat16", causal=True, dim_v=128)
        plan = planner.plan(form, problem, device)
        assert nvrtc.resources(planner.variant(form, problem), plan, "sm_90a").spill_bytes == 0
        assert plan.values["BLOCK_K"] == "128" or pass_ == "backward"


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_wide_heads_have_no_spills(pass_: str) -> None:
    """Head dim 512 as Gemma and DeepSeek V4 have it, and 320: grouped heads, windows (the short one has a step of its own), a softcap and
    sinks."""
    if "sm_90a" not in nvrtc.architectures():
        pytest.skip("this NVRTC compiles for no Hopper")
    kernel, device = find("wide_heads", pass_), Device("cuda", "", arch="sm_90a", shared_optin=nvrtc.SHARED_LIMIT["sm_90a"])
    window, softcap = "0 <= q - k < 128", "50.0 * tanh(s / 50.0)"
    for dim, mask, score, sinks in (
        (512, window, None, None),
        (512, "0 <= q - k < 1024", None, None),
        (320, None, softcap, "0.5 - h"),
        (512, window + " or h == 1", softcap, None),
    ):
        problem = Problem.of(2, 16, 4096, dim, 2, dtype="bfloat16", causal=True, mask=mask, score=score, sinks=sinks)
        assert nvrtc.resources(planner.variant(kernel, problem), planner.plan(kernel, problem, device), "sm_90a").spill_bytes == 0


def test_all_has_head_dims_of_v() -> None:
    """Those that the kernel's widths hold, of a kernel that takes them; without --all none."""
    for name, dims in (("fa2", {(96, 64), (64, 128)}), ("naive", {(192, 128), (96, 64), (64, 128)}), ("mma", set())):
        found = {everything: _cases(find(name, "forward"), ["sm_90"], everything, False) for everything in (True, False)}
        assert {(case.width, case.width_v) for case in found[True] if case.width_v} == dims
        assert all(case.problem.head_dim_v == (case.width_v or case.width) for case in found[True])
        assert not any(case.width_v for case in found[False])


def test_a_file_for_windows_is_compiled_with_one() -> None:
    """Beside the other forms of the kernel in whose place it runs, and alone where its path is given."""
    cases = _cases(find("wide_heads", "forward"), ["sm_90a"], False, False)
    assert [(case.dtype, case.window) for case in cases] == [(d, w) for d in ("float16", "bfloat16") for w in (None, 127)]
    assert [planner.variant(case.kernel, case.problem).name for case in cases] == ["wide_heads", "wide_window"] * 2
    alone = _cases(find("wide_window", "forward"), ["sm_90a"], False, False)
    assert alone and {case.window for case in alone} == {127} and all(case.tiles["KEYS"] == 144 for case in alone)


def test_all_has_the_caches_of_8_bits() -> None:
    """Each width and type with one, of a kernel that takes it; without --all none."""
    decode = find("decode", "forward")
    found = {everything: _cases(decode, ["sm_80"], everything, False) for everything in (True, False)}
    cached = {(case.dtype, case.width) for case in found[True] if case.dtype_kv}
    assert cached == set(itertools.product(decode.dtypes, decode.head_dims)) and not any(case.dtype_kv for case in found[False])
    assert all(case.problem.dtype_kv == (case.dtype_kv or case.dtype) for case in found[True])


@pytest.mark.parametrize("arch, queries", [("sm_80", 16), ("sm_90a", 1), ("sm_120", 8)])
def test_a_cache_of_8_bits_spills_nowhere(arch: str, queries: int) -> None:
    """Of one row, and of as many as a warp holds, in pages."""
    if arch not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not compile for {arch}")
    device = Device("cuda", "", arch=arch, shared_optin=nvrtc.SHARED_LIMIT[arch])
    problem = Problem.of(4, 32, queries, 128, 8, 4096, "bfloat16", True, page_size=64, dtype_kv="float8_e4m3")
    decode = find("decode", "forward")
    assert nvrtc.resources(decode, planner.plan(decode, problem, device), arch).spill_bytes == 0


def one(kernel: Kernel, arch: str = "sm_80") -> CompileRow:
    (row,) = compile_kernels([kernel], arch=arch)
    return row


def test_a_spill_beyond_the_allowance_does_not_pass(tmp_path: Path) -> None:
    row = one(planted.kernel(tmp_path, planted.SPILLING))
    assert (row.status, row.passed, row.registers) == ("SPILLS", False, 64)
    assert row.spill_bytes is not None and row.spill_bytes > 100
    assert f"spills {row.spill_bytes} bytes" in row.message
    allowed = planted.kernel(tmp_path, planted.SPILLING, deterministic=f"true\n// spill_bytes_allowed = {row.spill_bytes}")
    assert one(allowed).passed
    short = planted.kernel(tmp_path, planted.SPILLING, deterministic=f"true\n// spill_bytes_allowed = {row.spill_bytes - 1}")
    assert not one(short).passed


def test_an_array_in_local_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexed at run time it spills nothing, and is as slow as global memory; a spill is told once, as a spill."""
    body = planted.GOOD.replace("{\n", "{\n    float kept[64] = {};\n    for (int i = 0; i < args.seq_q; ++i) kept[i * i & 63] += i;\n", 1)
    planted.kernel(tmp_path, body.replace("+= 1.0f", "+= kept[args.seq_kv & 63]"))
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    (row,) = compile_all(["./planted_forward.cu"], arch="sm_80", note=notes.append)
    assert (row.status, row.spill_bytes, row.stack_bytes) == ("OK", 0, 256)
    assert notes[0].startswith("planted forward has 256 bytes of local memory a thread: an array indexed at run time")
    planted.kernel(tmp_path, planted.SPILLING)
    notes.clear()
    (row,) = compile_all(["./planted_forward.cu"], arch="sm_80", note=notes.append)
    assert row.stack_bytes and len(notes) == 2 and not [note for note in notes if "local memory" in note]


def test_a_wrong_kernel_is_a_row_that_names_its_line_and_the_others_go_on(tmp_path: Path) -> None:
    good = planted.kernel(tmp_path)
    (tmp_path / "wrong").mkdir()
    wrong = planted.kernel(tmp_path / "wrong", planted.GOOD.replace("+= 1.0f", "+= one"))
    first, second = compile_kernels([wrong, good], arch="sm_80")
    assert (first.status, first.passed) == ("ERROR", False)
    assert f"{wrong.path}({planted.line_of(wrong.path, '+= one')}): error:" in first.message
    assert second.passed


def test_an_entry_that_is_not_in_the_file_does_not_pass(tmp_path: Path) -> None:
    mangled = planted.kernel(tmp_path, planted.GOOD.replace('extern "C" ', ""))
    row = one(mangled)
    assert (row.status, row.passed) == ("ERROR", False)
    assert "entry forward" in row.message


def test_a_header_that_cannot_be_planned_does_not_pass(tmp_path: Path) -> None:
    row = one(planted.kernel(tmp_path, shared="BLOCK_Z * 4"))
    assert (row.status, row.passed) == ("ERROR", False)
    assert "BLOCK_Z" in row.message


def test_a_kernel_too_big_for_an_architecture_is_not_offered_there(tmp_path: Path) -> None:
    """64 KB on sm_75, 99 on sm_89 and sm_120, 163 on sm_80, 227 on sm_90 and sm_100."""
    rows = {row.arch: row for row in compile_kernels([planted.kernel(tmp_path, shared=100 << 10)])}
    assert {arch for arch, row in rows.items() if row.status == "TOO BIG"} == {"sm_75", "sm_89", "sm_120"} & set(rows)
    assert all(row.passed for row in rows.values())
    assert rows["sm_89"].message == "not offered: 102400 bytes of shared memory a block, sm_89 has 101376"
    assert rows["sm_80"].shared_bytes == 102400


def test_static_shared_memory_counts_too(tmp_path: Path) -> None:
    body = planted.GOOD.replace("{\n", "{\n    __shared__ float kept[8192];\n    kept[threadIdx.x] = 0.5f;\n    __syncthreads();\n", 1)
    body = body.replace("1.0f", "kept[args.seq_q]")
    assert one(planted.kernel(tmp_path, body), "sm_75").shared_bytes == 32768
    row = one(planted.kernel(tmp_path, body, shared=40000), "sm_75")  # 72768 together, 65536 there are
    assert (row.status, row.shared_bytes) == ("TOO BIG", 72768)


def test_everything_adds_the_tiles_of_other_lengths(tmp_path: Path) -> None:
    """A form that only some lengths have is compiled too, each once, and its row says which it is."""
    text = (
        planted.kernel(tmp_path)
        .path.read_text()
        .replace("// [[launch]]", '// [tile]\n// MANY = "1 + (seq_kv > 1024) * 2"\n// [[launch]]', 1)
    )
    (tmp_path / "tiled_forward.cu").write_text(text)
    kernel = Kernel.read(tmp_path / "tiled_forward.cu")
    assert [dict(row.tiles) for row in compile_kernels([kernel], arch="sm_80")] == [{"MANY": 1}]
    assert [dict(row.tiles) for row in compile_kernels([kernel], arch="sm_80", everything=True) if row.causal] == [{"MANY": 1}, {"MANY": 3}]


def test_a_kernel_of_one_architecture_is_compiled_for_it_alone() -> None:
    """wgmma is sm_90a's: no row for another architecture, and none where another is asked for."""
    hopper = [replace(kernel, dtypes=kernel.dtypes[:1]) for kernel in catalogue() if kernel.name == "hopper"]
    assert hopper and {row.arch for row in compile_kernels(hopper)} == {"sm_90a"}
    assert compile_kernels(hopper, arch="sm_90") == [] and compile_kernels(hopper, arch="sm_100") == []


def test_everything_adds_widths_and_both_masks(tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path, head_dims="[32, 64]")
    assert [(row.head_dim, row.causal) for row in compile_kernels([kernel], arch="sm_80")] == [(64, True)]
    rows = compile_kernels([kernel], arch="sm_80", everything=True)
    assert [(row.head_dim, row.causal) for row in rows] == [(32, True), (32, False), (64, True), (64, False)]


def test_everything_adds_the_head_dims_between_that_are_forms_of_their_own(tmp_path: Path) -> None:
    let = 'true\n// [let]\n// COLUMNS = "round_up(head_dim, 32)"\n// part = "head_dim // 16"'
    kernel = planted.kernel(tmp_path, planted.GOOD, head_dims="[64, 128]", deterministic=let)
    rows = compile_kernels([kernel], arch="sm_80", everything=True)
    assert [row.head_dim for row in rows if row.causal] == [32, 64, 96, 128]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_hopper_spills_no_more_at_the_head_dims_between(pass_: str) -> None:
    """The same 64 bytes as at 64 and 128."""
    kernel = find("hopper", pass_)
    device = Device("cuda", "sm_90a", "sm_90a")
    for dim in (80, 96, 112):
        problem = Problem.of(1, 1, 1024, dim, dtype="bfloat16", causal=True)
        file = planner.variant(kernel, problem)
        found = nvrtc.resources(file, planner.plan(kernel, problem, device), "sm_90a")
        assert found.spill_bytes <= min(64, file.spill_bytes_allowed), dim


def test_an_architecture_that_is_not_ours_or_not_this_compilers_is_a_usage_fault(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="unknown architecture 'sm_42'"):
        compile_kernels([planted.kernel(tmp_path)], arch="sm_42")
    for arch in set(nvrtc.SHARED_LIMIT) - set(nvrtc.architectures()):
        with pytest.raises(UsageFault, match=f"this NVRTC has no {arch}"):
            compile_kernels([planted.kernel(tmp_path)], arch=arch)


def test_kernels_are_asked_for_by_name_or_path(tmp_path: Path) -> None:
    said: list[str] = []
    rows = compile_all(["naive", str(planted.kernel(tmp_path).path)], arch="sm_80", progress=said.append)
    kernel_rows = {(row.kernel, row.pass_) for row in rows}
    assert kernel_rows == {("naive", "forward"), ("naive", "backward"), ("planted", "forward")}
    assert said[:2] == [f"0/{len(rows)} compiles", f"1/{len(rows)} naive forward {rows[0].dtype} sm_80"] and said[-1] == ""
    with pytest.raises(UsageFault, match="unknown kernel 'no_such'"):
        compile_all(["no_such"])
    with pytest.raises(UsageFault, match="cannot read the kernel file"):
        compile_all([str(tmp_path / "absent.cu")])


def test_a_name_that_no_asked_architecture_takes_is_a_usage_fault(tmp_path: Path) -> None:
    """It would be 0 of 0 in order, beside others too; a range leaves such kernels out, unless none is left."""
    for computes in (["hopper"], ["naive", "hopper"], [str(find("hopper", "forward").path)], ["22-26"]):
        with pytest.raises(UsageFault, match=r"cannot be compiled as asked\nits header takes sm_90a; asked for: sm_80"):
            compile_all(computes, arch="sm_80")
    assert {row.kernel for row in compile_all(["22-27"], arch="sm_80")} == {"split"}


def test_the_machine_code_is_written(tmp_path: Path) -> None:
    """A file a row, named by what was compiled, with the lines of the source; the order alone writes none."""
    try:
        sass.program()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))
    path = str(planted.kernel(tmp_path).path)
    (row,) = compile_all([path], arch="sm_80", sass_to=tmp_path / "sass")
    (file,) = (tmp_path / "sass").iterdir()
    assert row.passed and file.name.startswith("planted_forward_float32_D64_causal_sm_80") and file.suffix == ".sass"
    text = file.read_text()
    assert f'//## File "{path}", line ' in text and "EXIT" in text
    compile_all([path], arch="sm_80", order=True)
    assert len(list((tmp_path / "sass").iterdir())) == 1
