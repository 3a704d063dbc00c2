"""ring_attention and context_parallel by processes on the CPU: values and gradients, each form, wrong calls, a rank that dies."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
from rooms import ROOT
from torch_devices import found

torch = pytest.importorskip("torch")
if "cpu" not in found() or not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no C++ compiler, or a torch without gloo", allow_module_level=True)
import ring_jobs  # noqa: E402
import world  # noqa: E402
from ring_jobs import Case, apart, expected  # noqa: E402

from harness.kernel import KERNELS  # noqa: E402
from harness.partition import shards  # noqa: E402
from harness.torch_op import context_parallel, ring, ring_attention  # noqa: E402

CASES = [
    Case((3, 4)),
    Case((4, 4), 4, 2, form="ring"),
    Case((4, 4), 4, 2, form="all_to_all"),
    Case((5, 2), causal=False, form="ring", partition="contiguous", scale=-0.3),
    Case((3, 3, 3)),
    Case((5, 0, 3), 4, 2, form="ring", partition="contiguous"),
    Case((1, 0, 1), 4, 2, form="ring"),
    Case((1, 6, 2), 2, 1, partition="contiguous"),
    Case((1, 6, 2), 6, 3, partition="contiguous", form="all_to_all", rows_first=True),
    Case((2, 5, 4), 3, 3, causal=False, form="all_to_all"),
    Case((0, 0, 1), 2, 1),
    Case((3, 3, 3), 6, 3, form="ring", kernel="fa2", dtype="float32", dim=32),
    Case((4, 4, 4, 4), 4, 4, form="all_to_all"),
    Case((4, 4, 4, 4), 4, 2),  # two teams of two
    Case((4, 4, 4, 4), 4, 2, kernel="fa2", dtype="float32", dim=32),
    Case((5, 1, 0, 4), 2, 2, partition="contiguous", rows_first=True),  # the same, uneven
    Case((3, 3, 2, 2), 2, 2, rows_first=True),
    Case((0, 0, 3, 2), 2, 2, partition="contiguous"),
    Case((5, 1, 0, 4), 2, 2, causal=False),
    Case((4, 3, 4, 4), 3, 1, form="ring", rows_first=True),
    Case((9, 9), 2, 1, causal=False, form="ring", window=(3, 2)),
    Case((9, 8), 2, 2, form="ring", window=(5, 1), documents=(0, 7, 7, 17)),
    Case((9, 8), 2, 2, form="all_to_all", window=(5, 1), documents=(0, 7, 17), softcap=0.8),
    Case((5, 0, 7), 2, 1, partition="contiguous", form="ring", documents=(0, 4, 9, 12), softcap=0.5),
    Case((6, 6, 6), 2, 1, form="ring", softcap=0.5),
    Case((40, 40, 40), 2, 1, form="ring", kernel="fa2", dtype="float32", dim=32, window=(50, 0), documents=(0, 70, 120)),
    Case((6, 6, 6, 6), 4, 2, window=(4, 0), documents=(0, 11, 24)),
    Case((9, 8, 8, 8), 2, 1, kernel="auto", dtype="bfloat16", dim=32),
    Case((20, 20), 4, 2, form="ring", kernel="auto", dtype="bfloat16", dim=32, rows_first=True),
    Case((17, 16, 16), 4, 2, form="ring", kernel="auto", dtype="bfloat16", dim=32),
]


#: How far a value may be from float64's (apart): a few units of the last place of the dtype.
MOST = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 4e-2}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Any]]:
    """What each rank has of each case; all cases of as many ranks in one world."""
    found: dict[Case, list[Any]] = {}
    for count in (2, 3, 4):
        cases = [case for case in CASES if len(case.lengths) == count]
        ranks = world.run(count, ring_jobs.attend, tmp_path_factory.mktemp("world"), cases)
        assert all(isinstance(each, list) for each in ranks), ranks
        found |= {case: [each[index] for each in ranks] for index, case in enumerate(cases)}
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(outcomes: dict[Case, list[Any]], case: Case) -> None:
    """O and all gradients; the same bits in both runs."""
    assert apart(case, outcomes[case]) < MOST[case.dtype]
    for made in outcomes[case]:
        assert made["same"] and made["dtypes"] == {f"torch.{case.dtype}"}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_values_by_copies(tmp_path: Path, count: int) -> None:
    """The same with K and V as they lie, in slots of the plan's room; what is received is NaN until it is waited for."""
    cases = [case for case in CASES if len(case.lengths) == count and case.form != "all_to_all" and case.kernel == "naive"]
    cases += [replace(case, rows_first=not case.rows_first) for case in cases]
    ranks = world.run(count, ring_jobs.attend_by_copies, tmp_path, cases)
    for index, case in enumerate(cases):
        assert apart(case, [each[index] for each in ranks]) < MOST[case.dtype], case
        assert all(each[index]["same"] for each in ranks)


def test_a_layout_that_changes_on_one_rank_alone(tmp_path: Path) -> None:
    """Nobody waits for a rank that has agreed before: what is agreed on does not depend on it."""
    assert world.run(2, ring_jobs.layouts, tmp_path, None) == [[True] * 3] * 2


def test_inputs_of_8_bits(tmp_path: Path) -> None:
    """They exchange heads; a ring says that it does not take them, before the first message."""
    for heads, ring_ in world.run(2, ring_jobs.in_8_bits, tmp_path, None):
        assert heads == "torch.bfloat16 True" and ring_.startswith("a ring of float8 inputs is not there")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("by", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_values_and_gradients_on_gpus(tmp_path: Path, by: str, transport: str) -> None:
    """The same over copy engines and over NCCL, a GPU each; also where shards are empty in the first message of a group."""
    count = min(4, torch.cuda.device_count())
    cases = [
        Case((0,) * (count - 1) + (1,), form="ring"),
        Case(tuple(range(70, 70 + count)), 4, 2, form="ring", partition="contiguous", kernel="auto", dtype="bfloat16", dim=64),
        Case((71,) + (70,) * (count - 1), 4, 2, form="ring", kernel="auto", dtype="bfloat16", dim=64),
        Case((128,) * count, 8, 4, form="all_to_all", kernel="auto", dtype="bfloat16", dim=128),
        Case((96,) * count, 4, 2, causal=False, kernel="fa2", dtype="float32", dim=64),
        Case((96,) * count, 4, 2, form="ring", kernel="fa2", dtype="float32", dim=64, rows_first=True),
        Case((71,) + (70,) * (count - 1), 6, 3, form="ring", kernel="auto", dtype="bfloat16", dim=64, rows_first=True),
    ]
    ranks = world.run(count, ring_jobs.attend, tmp_path, cases, by=by, transport=transport)
    for index, case in enumerate(cases):
        assert apart(case, [each[index] for each in ranks]) < MOST[case.dtype], case
        assert all(each[index]["same"] for each in ranks)


def test_a_kernel_of_square_problems(tmp_path: Path) -> None:
    """Even runs of rows are launches of as many keys as queries in both passes, so such a kernel is taken."""
    for pass_ in ("forward", "backward"):
        text = (KERNELS / f"00_naive_{pass_}.cu").read_text()
        assert text.count("// cross = true") == 1
        (tmp_path / f"square_{pass_}.cu").write_text(text.replace("// cross = true", "// cross = false"))
    case = Case((4, 4), form="ring", partition="contiguous", kernel=str(tmp_path / "square_forward.cu"))
    told = world.run(2, ring_jobs.attend, tmp_path, [case])
    assert apart(case, [each[0] for each in told]) < MOST["float64"]


@pytest.mark.parametrize("case", [case for case in CASES if len(set(case.lengths)) == 1], ids=str)
def test_a_rank_sends_the_bytes_of_the_docstring(outcomes: dict[Case, list[Any]], case: Case) -> None:
    """Forward and backward pass together; a team's zigzag rows are even where each rank's are."""
    ranks, size = len(case.lengths), getattr(torch, case.dtype).itemsize
    width = {"ring": 1, "all_to_all": ranks}.get(case.form) or ring._width("auto", ranks, case.heads, case.heads_kv, size)
    each = ring.sent(width, ranks, case.heads, case.heads_kv, size) * 2 * case.lengths[0] * case.dim
    teams, bytes_ = ranks // width, [made["bytes"] for made in outcomes[case]]
    saved = 0
    if case.causal and case.partition == "zigzag" and not (case.window or case.documents or case.softcap):
        # nobody but the first team sees the second half of its keys, which have no gradient before it is home
        saved = (teams - 1) * width * 2 * 2 * case.heads_kv * (case.lengths[0] // 2) * case.dim * (size if teams == 2 else max(4, size))
    assert sum(bytes_) == each * ranks - saved and max(bytes_) <= each


@pytest.mark.parametrize(
    ("ranks", "heads", "heads_kv", "width"),
    [(4, 4, 4, 4), (4, 4, 2, 2), (4, 8, 1, 1), (6, 6, 3, 3), (8, 32, 8, 8), (2, 32, 8, 1), (2, 12, 12, 1), (4, 32, 8, 2)],
)
def test_auto_sends_the_fewest_bytes(ranks: int, heads: int, heads_kv: int, width: int) -> None:
    """Exchange where heads suffice and the ring sends more; the ring for two ranks; both where a key head has four query heads."""
    assert ring._width("auto", ranks, heads, heads_kv, 2) == width


def test_wrong_calls_are_told_on_every_rank(tmp_path: Path) -> None:
    """What, why and hint, on all ranks and without a message; the group works afterwards."""
    told = world.run(3, ring_jobs.mistakes, tmp_path)
    assert all(isinstance(each, dict) for each in told), told
    for each in told:
        assert 'differ in dtype: "float64" on rank 0 and 1, "float32" on rank 2' in each["dtype"] and "hint: " in each["dtype"]
        assert "differ in heads_q: 2 on rank 0 and 1, 4 on rank 2" in each["heads"]
        assert "differ in causal" in each["causal"]
        assert "differ in requires_grad" in each["gradient"]
        assert "q, k and v do not belong together: (1, 2, 4, 4), (1, 2, 3, 4)" in each["one rank's shapes"]
        assert "q, k and v have the shapes (2, 4, 4)" in each["dimensions"] and "(batch, heads, rows, head_dim)" in each["dimensions"]
        assert "unknown partition 'striped'\nknown: contiguous, zigzag\nhint: leave it out for zigzag" in each["partition"]
        assert "unknown form 'ulysses'\nknown: auto, ring, all_to_all\nhint: did you mean all_to_all?" in each["form"]
        assert "of one head_dim" in each["values of another size"]
        assert "q is a ndarray" in each["no tensor"] and "hint: " in each["no tensor"]
        assert "causal is 'yes'" in each["flag"] and "window is -1, -1" in each["window"]
        assert "documents are [0, 5], for 12 rows" in each["borders"]
        assert 'differ in documents: "3 borders, checksum' in each["other borders"]
        assert "ranks with 2, 4, 4 rows have no zigzag partition" in each["uneven window"]
        assert "ranks with 2, 4, 4 rows have no zigzag partition" in each["uneven zigzag"]
        assert "2 key heads cannot be shared out evenly to 3 ranks" in each["too few heads"]
        assert "fa2_forward does not take float64" in each["kernel"]
        assert "unknown kernel 'nobody'" in each["no kernel"]
        assert "scale" in each["scale"]
        assert "this process is not in the group" in each["another group"]
        assert "group is 'world'" in each.pop("no group")
        assert all(text.startswith("ValueError: ") for name, text in each.items() if "rows" not in name and "without" not in name), each
    assert [each["rows that differ"] for each in told] == [f"returned (1, 2, {rank}, 4)" for rank in range(3)]
    assert [each["uneven without a mask"] for each in told] == [f"returned (1, 2, {rows}, 4)" for rows in (2, 4, 4)]
    assert [each["no rows"] for each in told] == ["returned (1, 2, 0, 4)"] * 3
    assert "rank 2: q, k and v do not belong" in told[0]["one rank's shapes"]


def test_the_page_cuts_as_the_operator_expects() -> None:
    """docs/pytorch.md's lines give each rank the rows that zigzag takes its local rows for, whatever the length."""
    page = (ROOT / "docs" / "pytorch.md").read_text()
    lines = re.findall(r"^(?:chunks|mine) = .*$", page, re.M)
    assert len(lines) == 2
    for n, length in itertools.product((1, 2, 3, 5), range(40)):
        found = []
        for r in range(n):
            names = {"torch": torch, "x": torch.arange(length).view(1, 1, length, 1), "n": n, "r": r}
            exec("\n".join(lines), names)
            found.append(names["mine"].flatten().tolist())
        expected = shards([len(rows) for rows in found], "zigzag")
        assert found == [[row for chunk in chunks for row in range(*chunk)] for chunks in expected]
        assert max(map(len, found)) - min(map(len, found)) <= 1, (n, length)


def test_in_a_part_of_the_world_and_in_a_mesh(tmp_path: Path) -> None:
    """Ranks are counted in the group; a mesh of one dimension is one; autocast's type is the result's, the gradients are the inputs'."""
    cases = {"some": Case((3, 4), form="ring"), "mesh": Case((9, 8, 8), kernel="auto", dtype="float32", dim=32)}
    told = world.run(3, ring_jobs.in_groups, tmp_path, cases)
    assert all(isinstance(each, dict) for each in told), told
    assert apart(cases["some"], [each["some"] for each in told[1:]]) < MOST["float64"]
    assert 1e-5 < apart(cases["mesh"], [each["mesh"] for each in told]) < MOST["bfloat16"]
    assert all(each["mesh"]["dtypes"] == {"torch.bfloat16", "torch.float32"} for each in told)


def test_a_step_is_left_out_only_where_nothing_is_seen() -> None:
    """By every pair of rows."""
    for kind, causal, window in itertools.product(("zigzag", "contiguous"), (False, True), (None, (0, 0), (3, 0), (1, 4), (9, 2))):
        options = ring.Options(causal, None, kind, "ring", "naive", True, window)
        for mine, theirs in itertools.product(shards([6, 5, 6, 6], kind), repeat=2):
            distances = [q - k for q in itertools.chain(*starmap(range, mine)) for k in itertools.chain(*starmap(range, theirs))]
            left, right = window or (99, 99)
            seen = any(max(-right, 0 if causal else -99) <= distance <= left for distance in distances)
            assert ring._sees(options, mine, theirs) == seen, (options, mine, theirs)


def test_names_of_other_functions() -> None:
    """What a call has not is told before a message is sent."""
    q = torch.ones(1, 1, 4, 4)
    for options, said in (
        ({"mask": "q < 3"}, "window, softcap and documents"),
        ({"softmax_scale": 1.0}, "called scale"),
        ({"cusal": True}, "causal"),
    ):
        with pytest.raises(TypeError, match=f"(?s)ring_attention.*{said}"):
            ring_attention(q, q, q, **options)
    with pytest.raises(TypeError, match="name it: group"):
        ring_attention(q, q, q, None)


@pytest.mark.parametrize("call", [lambda q: ring_attention(q, q, q), lambda q: context_parallel(buffers=[q], seq_dims=[2]).__enter__()])
def test_without_a_process_group(call: Any) -> None:
    """It says what to call."""
    with pytest.raises(RuntimeError, match=r"there is no process group\n.*\nhint: call torch.distributed.init_process_group"):
        call(torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("when", ["forward", "backward", "silent"])
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, when: str) -> None:
    """By the closed connection, or by the group's timeout where the rank is there and does not answer."""
    began = time.monotonic()
    told = world.run(3, ring_jobs.dies, tmp_path, when)
    assert told[2] == ("silent" if when == "silent" else None)
    for rank, text in enumerate(told[:2]):
        assert text.startswith(f"ring_attention cannot go on: rank {rank} of 3 has lost another rank\na rank ended, or did not"), told
        assert "hint: read what the other ranks have printed" in text
    assert time.monotonic() - began < 30


def test_a_context_shards_buffers_and_attention(tmp_path: Path) -> None:
    """Zigzag rows in place, rows of all ranks attended to by both names, everything as it was afterwards; mistakes on every rank."""
    length = 11
    told = world.run(3, ring_jobs.in_context, tmp_path, length)
    assert all(isinstance(each, dict) for each in told), told
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, length, 4, generator=random, dtype=torch.float64) for heads in (2, 1, 1))
    masked, plain = (expected(q[:, :heads], k, v, q[:, :heads], causal, None)[0] for causal, heads in ((True, 2), (False, 1)))
    assert [each["places"] for each in told] == [[0, 1, 10], [2, 3, 8, 9], [4, 5, 6, 7]]
    for each in told:
        rows = each["places"]
        assert each["rows"] == [len(rows)] * 8
        assert each["table"] == [[2 * row, 2 * row + 1] for row in rows]
        assert each["views"] == [[[first + row for row in rows] for first in (start, start + length + 1)] for start in (0, 1)]
        for name in ("by torch's name", "by ours"):
            assert abs(each[name] - masked[:, :, rows].numpy()).max() < 1e-13
        assert abs(each["of three dimensions"] - plain[:, 0, rows].numpy()).max() < 1e-13
        assert "attn_mask is not covered inside context_parallel" in each["mask"]
        assert f"ValueError: q has {length + 1} rows" in each["other rows"] and f"has {len(rows)}\n" in each["other rows"]
        assert "modified by an inplace operation" in each["backward too late"]
        assert each["restored"] and each["after an error"] and each["dropped"] == (len(rows),)
        assert each["without buffers"] == 2
        for name, text in {
            "seq_dims": "2 buffers and the seq_dims [2]: each buffer has one, an integer\nhint: seq_dims=[1, 1]",
            "no seq_dims": "the seq_dims [2.5]",
            "no buffer": "a buffer is a list\nhint: ",
            "twice": "a buffer is there twice",
            "no_restore": "no_restore_buffers has a tensor that buffers has not",
            "gradient": "a buffer wants a gradient",
            "dimensions": "a buffer has fewer dimensions",
            "lengths": "buffers of 11 and 12 rows",
            "length": "differ in length: 11 on rank 0, 12 on rank 1, 13 on rank 2",
            "partition": "unknown partition 'striped'",
        }.items():
            assert text in each["wrong"][name] and each["wrong"][name].startswith("ValueError: "), each["wrong"]
