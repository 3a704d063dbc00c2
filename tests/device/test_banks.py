"""The CPU engine's counts of shared-memory wavefronts and global sectors: a GPU's rules, an H200's counters, planted faults."""

from __future__ import annotations

import csv
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from word_kernel import run

from harness.backends.host.backend import Host
from harness.kernel import Kernel, find, planner
from harness.problem import Problem
from harness.verbs.profile.traffic import counted
from harness.verbs.selftest.mutant import edited

ROOT = Path(__file__).resolve().parent.parent.parent
#: What one warp does -> wavefronts, and those without conflicts.
ACCESSES = {
    "all lanes one word": ("x += s[7];", 1, 1),
    "a row": ("x += s[t];", 1, 1),
    "a column of rows of 32": ("x += s[32 * t];", 32, 1),
    "the same, padded": ("x += s[33 * t];", 1, 1),
    "every second bank": ("s[2 * t] = x;", 2, 1),
    "half the lanes": ("if (t % 2) x += s[t + 32];", 1, 1),
    "16 bits, two lanes a word": ("x += reinterpret_cast<fa::float16*>(s)[t].bits;", 1, 1),
    "8 bytes a lane": ("x += fa::load_vec<2>(s + 2 * t)[0];", 2, 2),
    "8 bytes, neighbours share": ("x += fa::load_vec<2>(s + 2 * (t / 2))[0];", 1, 1),
    "16 bytes a lane": ("x += fa::load_vec<4>(s + 4 * t)[0];", 4, 4),
    "16 bytes, all lanes one address": ("x += fa::load_vec<4>(s)[0];", 2, 2),
    "16 bytes, each eighth row of 32": ("x += fa::load_vec<4>(s + 32 * t)[0];", 32, 4),
    "a loop of other lengths for other lanes": ("for (int i = 0; i < t; ++i) x += s[32 * i + t];", 31, 31),
    "ldmatrix of plain rows of 128 bytes": ("fa::ldmatrix_x4(r, fa::smem_u32(s + 32 * t)); x += r[0];", 32, 4),
    "ldmatrix of swizzled rows": ("fa::ldmatrix_x4(r, fa::smem_u32(s + 32 * t + 4 * (t % 8))); x += r[0];", 4, 4),
    "a column of a static array": ("fixed[32 * t] = x;", 32, 1),
    "atomics on one word each": ("atomicAdd(reinterpret_cast<int*>(s) + 32 * t, 1);", 32, 1),
}


#: What one warp does with global memory -> load or store, sectors, and the fewest that would do.
REQUESTS = {
    "all lanes one word": ("x += f[7];", "load", 1, 1),
    "a row": ("x += f[t];", "load", 4, 4),
    "a row, not aligned": ("x += f[t + 1];", "load", 5, 4),
    "a column of rows of 64": ("x += f[64 * t];", "load", 32, 4),
    "every second word": ("x += f[2 * t];", "load", 8, 4),
    "half the lanes": ("if (t % 2) x += f[t];", "load", 4, 2),
    "16 bits": ("x += reinterpret_cast<const fa::float16*>(f)[t].bits;", "load", 2, 2),
    "16 bytes a lane": ("x += fa::load_vec<4>(f + 4 * t)[0];", "load", 16, 16),
    "16 bytes a lane, a row each": ("x += fa::load_vec<4>(f + 64 * t)[0];", "load", 32, 16),
    "through __ldg": ("x += __ldg(f + 8 * t);", "load", 32, 4),
    "a column is written": ("g[64 * t] = x;", "store", 32, 4),
    "cp.async": (
        "fa::cp_async_16(fa::smem_u32(s + 4 * t), f + 64 * t); fa::cp_async_commit_group(); fa::cp_async_wait_group<0>();",
        "load",
        32,
        16,
    ),
    "a loop of other lengths for other lanes": ("for (int i = 0; i < t; ++i) x += f[64 * i + t];", "load", 76, 76),
    "an atomic is not counted": ("atomicAdd(g + 64 * t, 1.0f);", "", 0, 0),
    "nor a constant": ("x += table[t];", "", 0, 0),
    "nor a local array": ("volatile float mine[4] = {x}; x += mine[t % 4];", "", 0, 0),
    "nor shared memory": ("x += s[32 * t];", "", 0, 0),
}


def test_what_a_request_touches(tmp_path: Path) -> None:
    """Each access between two barriers, each on a line of its own. Lanes' bytes in sectors of 32, by hand."""
    lines = [f"    {access} __syncthreads();" for access, *_ in REQUESTS.values()]
    body = "    float *s = fa::dynamic_shared<float>(), x = t, *g = reinterpret_cast<float*>(out);\n    const float* f = reinterpret_cast<const float*>(a);\n"
    body += "\n".join([*lines, "    out[t] = x;"])
    backend = Host(banks=True)
    before = "#include <fa/async.cuh>\n__constant__ float table[32] = {1, 2};"
    run(backend, tmp_path, body, block=32, shared=8192, before=before)
    (file,) = tmp_path.glob("*.cu")
    text = file.read_text().splitlines()
    found = {text[int(each.place.rpartition(":")[2]) - 1].strip(): each for each in backend.traffic if each.kind != "shared"}
    nothing = ("", 0, 0)
    got = {
        name: (f.kind, f.parts, f.ideal) if (f := found.get(line.strip())) else nothing for name, line in zip(REQUESTS, lines, strict=True)
    }
    assert got == {name: (kind, sectors, ideal) for name, (_, kind, sectors, ideal) in REQUESTS.items()}


def test_what_a_warp_takes(tmp_path: Path) -> None:
    """Each access between two barriers, each on a line of its own."""
    lines = [f"    {access} __syncthreads();" for access, *_ in ACCESSES.values()]
    body = "    __shared__ float fixed[1024];\n    float *s = fa::dynamic_shared<float>(), x = t;\n    fa::uint32_t r[4];\n"
    body += "\n".join([*lines, "    out[t] = x + fixed[t];"])
    backend = Host(banks=True)
    run(backend, tmp_path, body, block=32, shared=8192, before="#include <fa/mma.cuh>")
    (file,) = tmp_path.glob("*.cu")
    found: dict[str, Counter[str]] = {}
    for each in (each for each in backend.traffic if each.kind == "shared"):
        text = file.read_text().splitlines()[int(each.place.rpartition(":")[2]) - 1]
        found.setdefault(text.strip(), Counter()).update(wavefronts=each.parts, ideal=each.ideal)
    got = {name: tuple(found[line.strip()].values()) for name, line in zip(ACCESSES, lines, strict=True)}
    assert got == {name: (actual, ideal) for name, (_, actual, ideal) in ACCESSES.items()}


@pytest.mark.parametrize(
    "name, pass_", [("mma", "forward"), ("mma_swizzle", "forward"), ("scalar2d_row_tile", "forward"), ("fa2", "backward")]
)
def test_an_h200_counts_the_same(name: str, pass_: str) -> None:
    """Exactly, actual and ideal, of kernels that are those of the record, and where nvcc makes the accesses that the source has.

    A head's count is a s + b s^2 in its length s, since blocks and tiles each grow with it: two short problems give a and b.
    """
    with (ROOT / "experiments/counters/counters.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["kernel"], row["pass"]) == (name, pass_) and float(row["shared_wavefronts"])]
    assert rows
    batch, heads, length, dim, dtype = re.fullmatch(r"B(\d+)_H(\d+)_S(\d+)_D(\d+)_?(\w*)", rows[0]["problem"]).groups()  # type: ignore[union-attr]
    shape = {"dtype": dtype or "float32"}
    large = Problem.of(int(batch), int(heads), int(length), int(dim), **shape)
    kernel = planner.variant(find(name, pass_), large)
    plan = planner.plan(kernel, large, Host().device())
    tiles = {tile: int(value) for tile, value in plan.values.items() if tile in kernel.tile}
    short = 128
    one, two = (
        {row.entry: row.metrics for row in counted(kernel, Problem.of(1, 1, s, int(dim), **shape), 0, tiles, pytest.fail)}
        for s in (short, 2 * short)
    )
    for row in rows:
        for column in ("shared_wavefronts", "shared_wavefronts_ideal"):
            first, second = int(one[row["entry"]][column] or 0), int(two[row["entry"]][column] or 0)
            b = Fraction(second - 2 * first, 2 * short**2)
            a = Fraction(first, short) - b * short
            assert (a * large.seq_q + b * large.seq_q**2) * large.batch * large.heads_q == float(row[column]), (row["entry"], column)


def test_a_broken_swizzle_shows_at_its_line(tmp_path: Path) -> None:
    """V lies in plain rows, and is read from them: the result is right, and takes more wavefronts."""
    text = (ROOT / "kernels_cu/12_mma_swizzle_forward.cu").read_text()
    text = edited(text, ("KCopy::copy_sync(v_smem", "fa::TileCopy<scalar, BLOCK_K, HEAD_DIM, THREADS, false>::copy_sync(v_smem"))
    text = edited(text, ("fa::lane_of_a<HEAD_DIM>(v_smem)", "fa::lane_of_a<HEAD_DIM, false>(v_smem)"))
    text = edited(text, ("multiply_pb<scalar, HEAD_DIM>", "multiply_pb<scalar, HEAD_DIM, false>"))
    (tmp_path / "mine_forward.cu").write_text(text)
    problem = Problem.of(1, 1, 128, 128, dtype="bfloat16")
    (row,) = counted(Kernel.read(tmp_path / "mine_forward.cu"), problem, 0, {}, pytest.fail)
    worst, *others = row.lines
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "multiply_pb<" in each)
    assert worst.place == f"{tmp_path / 'mine_forward.cu'}:{line}" and worst.wavefronts == 8 * worst.ideal
    assert all(each.wavefronts == each.ideal for each in others)


def test_loads_that_are_not_coalesced_show_at_their_line(tmp_path: Path) -> None:
    """P's tile is read by columns, a lane a row of the matrix: the result is right, and a request touches 32 sectors instead of 4."""
    text = (ROOT / "kernels_cu/01_tiled_forward.cu").read_text()
    text = edited(
        text, ("query = q_first + row + ROW_STEP * r, key = k_first + lane;", "query = q_first + lane, key = k_first + row + ROW_STEP * r;")
    )
    text = edited(text, ("p_smem[row + ROW_STEP * r][lane] = there", "p_smem[lane][row + ROW_STEP * r] = there"))
    (tmp_path / "mine_forward.cu").write_text(text)
    *_, row = counted(Kernel.read(tmp_path / "mine_forward.cu"), Problem.of(1, 1, 64, 64), 0, {}, pytest.fail)
    worst, *others = row.global_lines
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "= there" in each)
    assert (worst.place, worst.kind) == (f"{tmp_path / 'mine_forward.cu'}:{line}", "load")
    assert worst.sectors == 32 * worst.requests and worst.ideal == 4 * worst.requests
    assert worst.requests == 64 * 64 // 32 and all(each.sectors == each.ideal for each in others)
    assert row.metrics["sectors_per_load"] == (32 + 4 * 2) / 3  # V has two such tiles for one of P
