"""`fa-cli new`: a copy that is a kernel at once, under its own name, and never over another file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import planted
import pytest

from harness.fault import DiskFault, UsageFault
from harness.kernel import KERNELS, Kernel, catalogue, find, planner
from harness.kernel.new import new
from harness.problem import Problem


@pytest.mark.parametrize("kernel", catalogue(), ids=lambda kernel: kernel.label)
def test_every_kernel_of_the_tree_can_be_started_from(kernel: Kernel, tmp_path: Path) -> None:
    """The copy reads as a kernel with all its source file promises; only title and aliases are its own, it is no variant, and the code is
    untouched."""
    path = new("mine", kernel.name, kernel.pass_, tmp_path)
    kernel = Kernel.read(kernel.path)
    assert path == tmp_path / f"mine_{kernel.pass_}.cu"
    copy = Kernel.read(path)
    assert (copy.number, copy.name, copy.pass_, copy.aliases) == (None, "mine", kernel.pass_, ())
    assert copy.title == f"my kernel, from {kernel.name}" and not copy.variant_of and not copy.when
    for same in ("dtypes", "head_dims", "arch", "causal", "gqa", "cross", "logits", "deterministic", "tile", "workspace", "launches"):
        assert getattr(copy, same) == getattr(kernel, same), same
    body, original = path.read_text().split("// ///\n")[1], kernel.path.read_text().split("// ///\n")[1]
    assert body.endswith(original.removeprefix("//\n"))


def test_it_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--compute ./mine_forward.cu, and ./mine_backward.cu beside it for the other pass."""
    monkeypatch.chdir(tmp_path)
    assert new("mine") == Path("mine_forward.cu")
    new("mine", "naive", "backward")
    assert find("./mine_forward.cu", "forward").label == "mine_forward"
    assert find("./mine_forward.cu", "backward").path == tmp_path / "mine_backward.cu"


def test_the_opening_says_what_to_change_and_which_commands_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile names, entries, and the two commands as they are typed in the folder where `new` was."""
    monkeypatch.chdir(tmp_path)
    forward = new("mine", "fa2_naive").read_text().split("// ///\n")[1]
    assert forward.startswith("//\n// mine: fa2_naive_forward as it stands")
    assert "(WARPS, BLOCK_Q, BLOCK_K)" in forward and "forward below" in forward
    assert "//     fa-cli run --compute ./mine_forward.cu\n" in forward
    assert "//     fa-cli run --compute fa2_naive,./mine_forward.cu\n" in forward
    backward = new("mine", "naive", "backward", Path("sub")).read_text()
    assert "//     fa-cli run --compute ./sub/mine_backward.cu --mode both\n" in backward
    assert "fa-cli new mine --from naive writes" in backward
    assert "row_delta, p_and_ds, dk_and_dv, dq, dsinks below" in backward


def test_a_kernel_without_a_forward_pass_is_tried_backward(tmp_path: Path) -> None:
    """Of hopper_cluster there is no forward pass to write beside the copy, and none to time it with."""
    text = new("mine", "26", "backward", tmp_path).read_text()
    assert f"//     fa-cli verify {tmp_path}/mine_backward.cu --mode backward\n" in text and "run one of another kernel first" in text
    assert f"//     fa-cli run --compute hopper_cluster,{tmp_path}/mine_backward.cu --mode backward --dtype float16\n" in text
    assert "Mode both" not in text and "--mode both" not in text.split("// ///\n")[1]


def test_a_source_by_number_alias_or_path(tmp_path: Path) -> None:
    """--from takes what --compute takes."""
    assert Kernel.read(new("by_number", "0", folder=tmp_path)).title == "my kernel, from naive"
    assert Kernel.read(new("by_alias", "naive-attn", folder=tmp_path)).title == "my kernel, from naive"
    first = new("by_path", "fa1", folder=tmp_path)
    second = Kernel.read(new("second", str(first), folder=tmp_path / "new" / "folder"))
    assert (second.title, second.path.parent) == ("my kernel, from by_path", tmp_path / "new" / "folder")


def test_headers_of_any_layout(tmp_path: Path) -> None:
    """Aliases over several lines, a bracket in the title and a comment behind it; a kernel without [tile]."""
    source = planted.kernel(tmp_path).path
    text = source.read_text()
    text = text.replace(
        '// title = "planted for a test"\n',
        '// title = "rows [i] of O"  # a [note]\n// aliases = [\n//     "one",  # first\n//     "two",\n// ]\n',
    )
    source.write_text(text)
    assert Kernel.read(source).aliases == ("one", "two")
    spaced = source.read_text().replace("// ///\n", "// ///  \n").replace("// /// kernel\n", "// ///\n\n// /// kernel \n")
    for number, layout in enumerate((source.read_text(), spaced, "\ufeff" + spaced.replace("\n", "\r\n"), spaced.split("  \n")[0])):
        source.write_text(layout)
        path = new(f"mine{number}", str(source), folder=tmp_path)
        copy = Kernel.read(path)
        assert (copy.title, copy.aliases, copy.dtypes) == ("my kernel, from planted", (), ("float32",))
        assert "\n// ///\n//\n// mine" in path.read_text() and "[tile]" not in path.read_text()
        assert "Change the work itself: forward below." in path.read_text()


def test_it_never_writes_over_a_file(tmp_path: Path) -> None:
    """Neither over a file nor through a link that leads nowhere."""
    path = new("mine", folder=tmp_path)
    path.write_text("my work")
    with pytest.raises(UsageFault, match=r"mine_forward\.cu exists") as caught:
        new("mine", folder=tmp_path)
    assert caught.value.exit_code == 2 and f"mv {path}" in caught.value.hint
    assert path.read_text() == "my work" and list(tmp_path.iterdir()) == [path]
    (tmp_path / "other_forward.cu").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageFault, match="exists"):
        new("other", folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("", "cannot name", "fa-cli new mine"),
        ("my-kernel", "cannot name", "fa-cli new my_kernel"),
        ("2fast", "cannot name", "fa-cli new fast"),
        ("../up", "cannot name", "fa-cli new up"),
        ("mine.cu", "cannot name", "fa-cli new mine"),
        ("mine\n", "cannot name", "fa-cli new mine"),
        ("größe", "cannot name", "fa-cli new mine"),
        ("mine_backward", "names a pass", "fa-cli new mine --pass backward"),
        ("forward", "names a pass", "fa-cli new mine --pass forward"),
        ("naive", "is a kernel of the tree", "fa-cli new my_naive --from naive"),
        ("NAIVE_ATTN", "is a kernel of the tree", "fa-cli new my_NAIVE_ATTN --from naive"),
    ],
)
def test_bad_and_taken_names_are_refused(name: str, what: str, hint: str, tmp_path: Path) -> None:
    """Each with a name that would do, and nothing written."""
    with pytest.raises(UsageFault, match=what) as caught:
        new(name, folder=tmp_path)
    assert caught.value.hint == hint
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_started_from_is_refused(tmp_path: Path) -> None:
    """A kernel that is not there, and a pass that a kernel does not have."""
    with pytest.raises(UsageFault, match="unknown kernel 'nothing'"):
        new("mine", "nothing", folder=tmp_path)
    with pytest.raises(UsageFault, match="fa1 has no backward pass"):
        new("mine", "fa1", "backward", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_disk_fault(tmp_path: Path) -> None:
    """A file in the folder's place; for users other than root also a folder without the right to write."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFault):
        new("mine", folder=tmp_path / "file")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(DiskFault):
            new("mine", folder=tmp_path / "closed")


def test_the_copy_plans_like_its_source(tmp_path: Path) -> None:
    """What the copy would launch is what its source launches."""
    from harness.kernel import Device

    problem, device = Problem.of(1, 2, 65, 40), Device("cpu", "test")
    assert planner.plan(Kernel.read(new("mine", "fa1", folder=tmp_path)), problem, device) == planner.plan(
        find("fa1", "forward"), problem, device
    )


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_plain_kernel(pass_: str, tmp_path: Path) -> None:
    """The tree's file with an opening: plain parameters, no header of ours; it promises masks, groups and unequal lengths."""
    path = new("mine", pass_=pass_, folder=tmp_path, plain=True)
    kernel, text = Kernel.read(path), path.read_text()
    header, code = (KERNELS / "plain" / f"plain_{pass_}.cu").read_text().split("// ///\n")
    opening = text.removeprefix(f"{header}// ///\n").removesuffix(code)
    assert opening.startswith("//\n// mine: plain pointers") and all(line.startswith("//") for line in opening.splitlines())
    assert text == f"{header}// ///\n{opening}{code}"
    assert kernel.causal and kernel.gqa and kernel.cross and kernel.head_dims == (32, 64, 96, 128)
    assert all(launch.args[:5] == ("Q", "K", "V", "O", "logsumexp") for launch in kernel.launches)
    assert "#include" not in text and "fa::" not in text and max(map(len, text.splitlines())) <= 140
    if clang_format := shutil.which("clang-format", path=str(Path(sys.executable).parent)):
        style = f"--style=file:{Path(__file__).resolve().parent.parent.parent / '.clang-format'}"
        done = subprocess.run([clang_format, style, "--dry-run", "-Werror", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
