"""What a verdict says of a wrong kernel besides its error: the kernel's own tile, and the layout that its result would be right in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness import backends
from harness.check import layout
from harness.check.contender import rows_of_tiles, run_kernel
from harness.check.oracle import oracle_for
from harness.kernel import Kernel, find, planner
from harness.kernel.new import new
from harness.kernel.plan import Device
from harness.problem import Problem

SHAPES = (Problem.of(2, 4, 33, 32, heads_kv=2), Problem.of(1, 2, 40, 32, seq_kv=50, causal=True))


@pytest.mark.parametrize(
    ("name", "pass_", "dtype", "wanted"),
    [
        ("fa2", "forward", "float32", {"O": "BLOCK_Q", "logsumexp": "BLOCK_Q"}),
        ("mma_qreg_async", "backward", "float16", {"dQ": "BLOCK_Q", "dK": "BLOCK_K", "dV": "BLOCK_K"}),
        ("hopper", "backward", "bfloat16", {"dQ": "BLOCK_Q", "dK": "BLOCK_K", "dV": "BLOCK_K"}),
        ("pingpong", "forward", "float16", {"O": 128, "logsumexp": 128}),
        ("flash_naive", "forward", "float32", {}),  # a block has a whole head
    ],
)
def test_the_tiles_of_the_ladder(name: str, pass_: str, dtype: str, wanted: dict[str, str | int]) -> None:
    """What the grids divide the rows by, else BLOCK_Q and BLOCK_K; nothing where a header does not tell."""
    chosen = find(name, pass_)
    values = planner.plan(chosen, Problem.of(1, 2, 300, 64, dtype=dtype), Device("cpu", "", "sm_90", 132, 50 << 20, 232448)).values
    expected = {tensor: int(values[rows]) if isinstance(rows, str) else rows for tensor, rows in wanted.items()}
    assert rows_of_tiles(chosen, values) == expected


def swapped(path: Path) -> Kernel:
    """The kernel that `new --plain` writes, on tensors of (batch, rows, heads, head_dim)."""
    text = path.read_text(encoding="utf-8")
    row = "const long long row = ((long long)blockIdx.z * heads_q + head) * seq_q + query;"
    keys = "const long long keys = ((long long)blockIdx.z * heads_kv + head / (heads_q / heads_kv)) * seq_kv;  // the first one"
    assert row in text and keys in text
    text = text.replace(row, row + "\n    const long long own = ((long long)blockIdx.z * seq_q + query) * heads_q + head;")
    text = text.replace(keys, "const long long keys = (long long)blockIdx.z * seq_kv * heads_kv + head / (heads_q / heads_kv);")
    for old, new_ in (
        ("Q + row *", "Q + own *"),
        ("O[row *", "O[own *"),
        ("K + (keys + key) *", "K + (keys + (long long)key * heads_kv) *"),
    ):
        assert old in text
        text = text.replace(old, new_)
    text = text.replace("V + (keys + first) * head_dim", "V + (keys + (long long)first * heads_kv) * head_dim")
    text = text.replace("rows[j * head_dim + column]", "rows[j * row_stride + column]").replace(
        "int head_dim, int lane)", "int head_dim, int row_stride, int lane)"
    )
    text = text.replace("visible - first, head_dim, lane)", "visible - first, head_dim, heads_kv * head_dim, lane)")
    path.write_text(text, encoding="utf-8")
    return Kernel.read(path)


def test_another_layout_is_named(tmp_path: Path) -> None:
    """A kernel for (batch, rows, heads, head_dim) is wrong, and its verdict says which tensors it would be right for; another fault is not."""
    backend = backends.pick("cpu")
    path = new("other", folder=tmp_path, plain=True)
    right = Kernel.read(path)
    wrong = swapped(new("swapped", folder=tmp_path, plain=True))
    for problem in SHAPES:
        oracle = oracle_for(problem, backend, "forward", 42)
        assert run_kernel(backend, right, oracle, oracle.inputs_of("forward")).passed
        verdict = run_kernel(backend, wrong, oracle, oracle.inputs_of("forward")).verdicts["O"]
        assert not verdict.passed and verdict.reason.endswith(layout.WORDS), verdict.reason


def test_only_the_output_in_another_layout_is_named_too() -> None:
    """O written as (batch, rows, heads, head_dim); a shuffled O and noise are not taken for it."""
    problem = Problem.of(1, 4, 33, 16)
    oracle = oracle_for(problem, backends.pick("cpu"), "forward", 42)
    exact = oracle.reference["O"].astype(np.float32)
    other = np.ascontiguousarray(exact.swapaxes(1, 2)).reshape(exact.shape)
    for array, told in ((other, True), (exact[:, ::-1].copy(), False), (np.zeros_like(exact), False), (np.full_like(exact, np.nan), False)):
        verdicts = layout.named(oracle, {"O": array}, oracle.judge({"O": array}, "f32"))
        assert not verdicts["O"].passed and verdicts["O"].reason.endswith(layout.WORDS) is told
