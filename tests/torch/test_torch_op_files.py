"""Kernel files of a user's own as operators: plain parameters, workspaces, a file that is edited, faults in it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from planted import top

torch = pytest.importorskip("torch")
from harness.torch_op import attention, call  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEADER = (
    top(title='"the mean of V, or what a test makes of it"', causal="false", gqa="false", cross="false")
    + """\
{more}// [[launch]]
// entry = "forward"
// grid = ["seq_q", "heads_q", "batch"]
// block = 32
{args}// ///
"""
)
PLAIN = """\
extern "C" __global__ void forward(const float* Q, const float* K, const float* V, float* O, float* logsumexp,
                                   int heads, int seq, int dim) {
    long long head = (long long)blockIdx.z * heads + blockIdx.y, row = head * seq + blockIdx.x;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = 0;
        for (int j = 0; j < seq; ++j) sum += V[(head * seq + j) * dim + d];
        O[row * dim + d] = sum / seq;
    }
    if (threadIdx.x == 0) logsumexp[row] = 0;
}
"""
COUNTS = """\
#include <fa/args.cuh>
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    float* count = static_cast<float*>(args.workspace[WORKSPACE_COUNT]);
    float* o = fa::row_pointer<float>(args.O, blockIdx.z, blockIdx.y, blockIdx.x);
    for (int d = threadIdx.x; d < args.head_dim; d += blockDim.x) o[d] = count[d];
    __syncthreads();
    for (int d = threadIdx.x; d < args.head_dim; d += blockDim.x) count[d] = 1;
}
"""


def write(folder: Path, body: str, more: str = "", args: str = "") -> Path:
    """A kernel file."""
    path = folder / "mine_forward.cu"
    path.write_text(HEADER.format(more=more, args=args) + body)
    return path


def test_plain_parameters_get_contiguous_tensors(device: Any, tmp_path: Path) -> None:
    """A kernel without fa::Args reads tensors without a pitch, at a head dim that is no multiple of 16 bytes and of any strides."""
    named = '// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "head_dim"]\n'
    path = write(tmp_path, PLAIN, args=named)
    q = torch.randn(2, 7, 3, 59, device=device).transpose(1, 2)
    expected = q.mean(2, keepdim=True).expand_as(q)
    assert torch.allclose(attention(q, q, q, kernel=path), expected, atol=1e-6)
    assert torch.allclose(attention(*(q.contiguous(),) * 3, kernel=path), expected, atol=1e-6)


def test_a_kernel_that_is_not_deterministic_is_asked_for_by_word(device: Any, tmp_path: Path) -> None:
    """deterministic=True, the default, never runs a kernel whose header says false."""
    path = write(tmp_path, PLAIN, args='// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "head_dim"]\n')
    path.write_text(path.read_text().replace("deterministic = true", "deterministic = false"))
    q = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(ValueError, match="(?s)no deterministic form.*use deterministic=False"):
        attention(q, q, q, kernel=path)
    assert attention(q, q, q, kernel=path, deterministic=False).shape == q.shape


COUNT = '// [workspace.count]\n// dtype = "float32"\n// size = "64"\n// init = "{}"\n'


def test_workspaces_start_as_zero(device: Any, tmp_path: Path) -> None:
    """One of init zero is zeroed before every pass."""
    path = write(tmp_path, COUNTS, COUNT.format("zero"))
    q = torch.randn(1, 1, 1, 64, device=device)
    for _ in range(3):
        assert not attention(q, q, q, kernel=path).any()


def test_what_is_zeroed_once_is_kept(device: Any, tmp_path: Path) -> None:
    """One of init zero_once is zeroed at the first call of a kernel, whatever the strides; a thread of the CPU has its own."""
    path = write(tmp_path, COUNTS, COUNT.format("zero_once"))
    q = torch.randn(1, 1, 1, 64, device=device)

    def kept(*_: Any) -> bool:
        return bool(attention(q, q, q, kernel=path).any())

    assert [kept() for _ in range(3)] == [False, True, True]
    assert attention(q, q, torch.randn(1, 1, 2, 64, device=device)[:, :, ::2], kernel=path).any()  # the same compiled kernel
    with ThreadPoolExecutor(1) as other:
        assert list(other.map(kept, range(2))) == ([False, True] if device.type == "cpu" else [True, True])


def test_what_a_dead_pass_left_is_not_found(tmp_path: Path) -> None:
    """On the CPU a kernel that faults may have written what is zeroed once: the next call has other memory."""
    fault = "    __syncthreads();\n    if (args.scale > 2) __trap();\n}"
    path = write(tmp_path, COUNTS.rstrip().removesuffix("}") + fault + "\n", COUNT.format("zero_once"))
    q = torch.randn(1, 1, 1, 64)
    assert not attention(q, q, q, kernel=path).any() and attention(q, q, q, kernel=path).any()
    with pytest.raises(RuntimeError):
        attention(q, q, q, kernel=path, scale=3.0)
    assert not attention(q, q, q, kernel=path).any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_after_use(tmp_path: Path) -> None:
    """A child of a process that has called it calls it too: the same values, and nothing of what the parent's passes left."""
    path = write(tmp_path, COUNTS, COUNT.format("zero_once"))
    q = torch.randn(1, 1, 1, 64)
    expected = attention(q, q, q, kernel="naive")
    assert not attention(q, q, q, kernel=path).any()
    child = os.fork()
    if not child:
        try:
            os._exit(attention(q, q, q, kernel=path).any() or not torch.equal(attention(q, q, q, kernel="naive"), expected))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_that_is_edited_is_another_kernel(device: Any, tmp_path: Path) -> None:
    """A kernel that is being written is compiled again where the file has changed, in the same process."""
    source = (ROOT / "kernels_cu" / "00_naive_forward.cu").read_text()
    file = tmp_path / "mine_forward.cu"
    file.write_text(source)
    q = torch.randn(1, 1, 4, 8, device=device)
    mean = q.mean(2, keepdim=True).expand_as(q)
    assert not torch.allclose(attention(q, q, q, kernel=file), mean, atol=1e-3)
    assert "args.scale" in source
    file.write_text(source.replace("args.scale", "0.0f"))
    os.utime(file, ns=(1, 1))  # within the clock's step of the first write
    assert torch.allclose(attention(q, q, q, kernel=file), mean, atol=1e-6)


def test_an_edited_header_and_another_folder_are_another_kernel(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header beside the file counts as the file does, and a relative path is of the folder that one stands in."""
    source = (ROOT / "kernels_cu" / "00_naive_forward.cu").read_text()
    including = source.replace("args.scale", "FACTOR").replace("#include", '#include "mine.cuh"\n#include', 1)
    q = torch.randn(1, 1, 4, 8, device=device)
    mean = q.mean(2, keepdim=True).expand_as(q)
    for folder, factor in ("a", "1.0f"), ("b", "0.0f"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine_forward.cu").write_text(including)
        (tmp_path / folder / "mine.cuh").write_text(f"#define FACTOR {factor}\n")
        for file in (tmp_path / folder).iterdir():
            os.utime(file, ns=(1, 1))
        monkeypatch.chdir(tmp_path / folder)
        assert torch.allclose(attention(q, q, q, kernel="./mine_forward.cu"), mean, atol=1e-6) == (folder == "b")
    (tmp_path / "b" / "mine.cuh").write_text("#define FACTOR 1.0f\n")
    assert not torch.allclose(attention(q, q, q, kernel="./mine_forward.cu"), mean, atol=1e-3)


def test_a_file_that_does_not_compile_is_an_error_with_its_line(device: Any, tmp_path: Path) -> None:
    """The compiler's log with the file's own line, as a RuntimeError; without a backward pass, what to write."""
    named = '// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "head_dim"]\n'
    path = write(tmp_path, PLAIN.replace("float sum = 0;", "float sum = nothing;"), args=named)
    q = torch.randn(1, 1, 4, 64, device=device)
    with pytest.raises(RuntimeError, match=r"(?s)mine_forward.cu does not compile.*mine_forward.cu.*nothing"):
        attention(q, q, q, kernel=path)
    with pytest.raises(ValueError, match="no kernel file .*mine_backward.cu"):
        attention(q.requires_grad_(), q, q, kernel=path)


def test_both_passes_compile_at_the_same_time(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a gradient is wanted the forward call has the backward pass compiled beside its own, once; else its own alone."""
    for pass_ in ("forward", "backward"):
        text = (ROOT / "kernels_cu" / f"00_naive_{pass_}.cu").read_text()
        (tmp_path / f"mine_{pass_}.cu").write_text(text)
    backend, both, seen = call.backend_of(device), threading.Barrier(2, timeout=60), []
    load = type(backend).load

    def waits(self: Any, kernel: Any, problem: Any, tiles: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            both.wait()  # of one alone it would time out
            seen.append(kernel.pass_)
        return load(self, kernel, problem, tiles)

    monkeypatch.setattr(type(backend), "load", waits)
    q = torch.randn(1, 1, 4, 8, device=device)
    attention(q, q, q, kernel=tmp_path / "mine_forward.cu")
    assert not seen
    for rows in (4, 5):
        q = torch.randn(1, 1, rows, 8, device=device, requires_grad=True)
        attention(q, q, q, kernel=tmp_path / "mine_forward.cu").sum().backward()
    assert sorted(seen) == ["backward", "forward"]


def test_a_header_that_is_wrong_is_an_error_with_its_line(device: Any, tmp_path: Path) -> None:
    """A key nobody knows: file and line, as on the command line."""
    path = write(tmp_path, PLAIN, more="// colour = 3\n")
    q = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(ValueError, match=r"mine_forward.cu:\d+.*colour"):
        attention(q, q, q, kernel=path)


def test_a_path_in_a_compiled_model(device: Any) -> None:
    """torch.compile takes a path as it takes a name."""
    path = str(ROOT / "kernels_cu" / "07_fa2_forward.cu")
    compiled = torch.compile(lambda q: attention(q, q, q, kernel=path), fullgraph=True, backend="eager")
    q = torch.randn(1, 1, 9, 8, device=device)
    assert torch.equal(compiled(q), attention(q, q, q, kernel="fa2"))
