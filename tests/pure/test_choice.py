"""Rows of choice and names of [let] in a header: which values they give, what is refused with its line, and those of the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted import top

from harness.fault import UsageFault
from harness.kernel import Device, Kernel, Plan, catalogue, planner
from harness.kernel.expression import ceil_div
from harness.problem import Problem
from harness.verbs.verify.choices import counts_multiprocessors, known

HEADER = (
    top(title='"a test"', head_dims="[64, 128]", auto='"rounds <= 2"')
    + """\
// [tile]
// WARPS = 4
// BLOCK_Q = "16 * WARPS"
// BLOCK_K = 64
// [let]
// rounds = "ceil_div(tiles, sms)"
// tiles = "ceil_div(seq_q, BLOCK_Q) * heads_q * batch"
// bytes = "4 * HEAD_DIM"
// [[choice]]
// when = "causal and seq_q <= 128"
// WARPS = 2
// BLOCK_K = "2 * BLOCK_Q"
// evidence = "the first"
// [[choice]]
// when = "BLOCK_Q == 64 and rounds <= 3"
// BLOCK_K = 16
// evidence = "the second"
// [[choice]]
// when = "HEAD_DIM == 128"
// WARPS = 8
// BLOCK_K = 32
// evidence = "the third"
// [[launch]]
// entry = "forward"
// grid = "tiles"
// block = "32 * WARPS"
// shared = "bytes * BLOCK_K"
// ///
"""
)


def read(folder: Path, text: str = HEADER) -> Kernel:
    path = folder / "mine_forward.cu"
    path.write_text(text)
    return Kernel.read(path)


def plan(kernel: Kernel, sms: int = 1, heads: int = 1, seq: int = 256, dim: int = 64, causal: bool = False, **tiles: int) -> Plan:
    return planner.plan(kernel, Problem.of(1, heads, seq, dim, causal=causal), Device("cpu", "", sms=sms), tiles)


def tiles_of(made: Plan) -> list[int]:
    return [int(dict(made.macros)[name]) for name in ("WARPS", "BLOCK_Q", "BLOCK_K")]


def rows_of(made: Plan) -> list[str]:
    return [row.evidence.removeprefix("the ") for row in made.choices]


def test_the_first_row_that_holds_gives_a_tile_its_value(tmp_path: Path) -> None:
    """For each name apart: one row may give WARPS and another BLOCK_K. What no row gives is [tile]'s, and sees what rows have given."""
    kernel = read(tmp_path)
    for given, tiles, rows in (
        ({}, [4, 64, 64], []),  # four tiles, one multiprocessor: four rounds
        ({"sms": 2}, [4, 64, 16], ["second"]),
        ({"causal": True}, [4, 64, 64], []),
        ({"seq": 128, "causal": True}, [2, 32, 64], ["first"]),
        ({"seq": 128, "causal": True, "dim": 128}, [2, 32, 64], ["first"]),  # before the third, which holds too
        ({"dim": 128}, [8, 128, 32], ["third"]),
        ({"dim": 128, "WARPS": 4, "sms": 2}, [4, 64, 16], ["second"]),  # its WARPS was given, its BLOCK_K is the second's
        ({"dim": 128, "WARPS": 4}, [4, 64, 32], ["third"]),
        ({"dim": 128, "WARPS": 4, "BLOCK_K": 48}, [4, 64, 48], []),
        ({"seq": 128, "causal": True, "BLOCK_Q": 8}, [2, 8, 16], ["first"]),
    ):
        made = plan(kernel, **given)  # type: ignore[arg-type]
        assert (tiles_of(made), rows_of(made)) == (tiles, rows), given
    assert str(plan(kernel, sms=2).choices[0]) == "when BLOCK_Q == 64 and rounds <= 3: BLOCK_K = 16 (the second)"


def test_a_row_without_when_always_holds(tmp_path: Path) -> None:
    """Those behind it, for the same names, never do."""
    kernel = read(tmp_path, HEADER.replace('// when = "causal and seq_q <= 128"\n', ""))
    made = plan(kernel, sms=2, dim=128)
    assert (tiles_of(made), rows_of(made)) == ([2, 32, 64], ["first"])
    assert str(made.choices[0]) == "always: WARPS = 2, BLOCK_K = 2 * BLOCK_Q (the first)"


def test_let_names_an_expression_for_all_others(tmp_path: Path) -> None:
    """For when, launches and auto, in any order, with what is known by then; it is no macro and no tile."""
    kernel = read(tmp_path)
    made = plan(kernel, heads=3)
    assert made.launches[0].grid == (12, 1, 1) and made.launches[0].shared == 4 * 64 * 64
    assert not {"tiles", "rounds", "bytes"} & dict(made.macros).keys()
    problem = Problem.of(1, 3, 256, 64)
    assert [planner.for_auto(kernel, problem, Device("cpu", "", sms=sms)) for sms in (5, 6)] == [False, True]
    with pytest.raises(UsageFault, match="has no tile value tiles"):
        plan(kernel, tiles=3)
    below = HEADER.replace('"4 * HEAD_DIM"', '"4 - HEAD_DIM"').replace('"bytes * BLOCK_K"', '"max(96, bytes)"')
    assert plan(read(tmp_path, below)).launches[0].shared == 96, "a part may be negative"
    assert counts_multiprocessors(kernel)
    assert not counts_multiprocessors(read(tmp_path, HEADER.replace("ceil_div(tiles, sms)", "tiles").replace('"the third"', '"sms"')))


COSTS = HEADER.replace(
    """// WARPS = 8
// BLOCK_K = 32
// evidence = "the third\"""",
    """// WARPS = [4, 8, 2]
// BLOCK_K = [32, "4 * WARPS"]
// cost = "10 * (query_waves(sms, 16 * WARPS, BLOCK_K, 1, 3 * WARPS, 7) + rest)"
// evidence = "the third\"""",
).replace("// [let]", '// [let]\n// rest = "5 * WARPS"')


def test_a_row_with_a_cost_gives_the_values_that_cost_least(tmp_path: Path) -> None:
    """Of every combination; the first of those that cost the same. All tiles of the row together, with what [let] makes of them."""
    kernel = read(tmp_path, COSTS)
    costs = {}
    for warps in (4, 8, 2):
        for keys in (32, 4 * warps):
            rounds = ceil_div(ceil_div(256, 16 * warps), 3)
            waves = rounds * (ceil_div(256, keys) * 3 * warps + 7)
            costs[f"WARPS = {warps}, BLOCK_K = {keys}"] = 10 * (waves + 5 * warps)
    made = plan(kernel, dim=128, sms=3)
    (row,) = made.choices
    assert dict(row.weighed) == costs and [cost for _, cost in row.weighed] == sorted(costs.values())
    best = min(costs, key=lambda words: costs[words])
    assert row.weighed[0][0] == best == ", ".join(f"{name} = {value}" for name, value in row.values)
    assert tiles_of(made) == [2, 32, 32] and rows_of(made) == ["third"]
    assert str(row).startswith(f"when HEAD_DIM == 128: {best}, {costs[best] / 1e3:.1f} us by its cost; WARPS = ") and str(row).endswith(
        " (the third)"
    )
    equal = read(tmp_path, COSTS.replace('"10 * (query_waves(sms, 16 * WARPS, BLOCK_K, 1, 3 * WARPS, 7) + rest)"', "7"))
    assert tiles_of(plan(equal, dim=128)) == [4, 64, 32]


def test_a_given_tile_is_not_weighed(tmp_path: Path) -> None:
    """--tile overrides a row with a cost as any other; the row's other tiles are the cheapest beside it."""
    kernel = read(tmp_path, COSTS)
    for given, tiles in (
        ({"WARPS": 3}, [3, 48, 32]),
        ({"BLOCK_K": 100}, [2, 32, 100]),
        ({"WARPS": 5, "BLOCK_K": 9}, [5, 80, 9]),
        ({"BLOCK_Q": 9}, [2, 9, 32]),
    ):
        assert tiles_of(plan(kernel, dim=128, sms=3, **given)) == tiles, given


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('// BLOCK_K = 16\n// evidence = "the second"', "// BLOCK_K = 16", 25, "the header lacks the required key 'evidence' in choice"),
        ('evidence = "the second"', 'evidence = " "', 28, "evidence in choice must be a text"),
        ("BLOCK_K = 32", "BLOCKS = 32", 32, "unknown key 'BLOCKS' in choice; known: evidence, when, cost, WARPS, BLOCK_Q, BLOCK_K"),
        (
            "BLOCK_K = 32",
            "BLOCK_K = []\n// cost = 3",
            32,
            "BLOCK_K in choice must be an integer or an expression, or a list of them; is []",
        ),
        ("BLOCK_K = 32", "BLOCK_K = [32, '4 <']\n// cost = 3", 32, "BLOCK_K in choice: '4 <' is not an expression"),
        ("BLOCK_K = 32", "BLOCK_K = [32]\n// cost = '3 <'", 33, "cost in choice: '3 <' is not an expression"),
        ("BLOCK_K = 32", "BLOCK_K = [32]", 32, "BLOCK_K in choice must be an integer or an expression"),
        ('"HEAD_DIM == 128"', '"HEAD_DIM = 128"', 30, "when in choice: 'HEAD_DIM = 128' is not an expression"),
        ("BLOCK_K = 32", 'BLOCK_K = "32 +"', 32, "BLOCK_K in choice: '32 +' is not an expression"),
        ("// BLOCK_K = 16\n", "", 25, "a choice gives a value to a name of [tile]: WARPS, BLOCK_Q, BLOCK_K"),
        ("bytes = ", "BLOCK_Q = ", 14, "BLOCK_Q is in [tile] and in [let]"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(old: str, new: str, line: int, words: str, tmp_path: Path) -> None:
    """When the file is read, whatever the problem: the row's own line, not the first that has such a key."""
    assert old in HEADER
    with pytest.raises(UsageFault) as caught:
        read(tmp_path, HEADER.replace(old, new, 1))
    assert caught.value.what.startswith(f"{tmp_path / 'mine_forward.cu'}:{line}: {words}"), caught.value.what


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('"HEAD_DIM == 128"', '"BLOCK_Q == 128"', 30, "when: unknown name 'BLOCK_Q'"),  # WARPS is asked first, and BLOCK_Q needs it
        ('"causal and seq_q <= 128"', '"seq <= 128"', 21, "when: unknown name 'seq'"),
        ("BLOCK_K = 32", 'BLOCK_K = "32 - seq_q"', 32, "choice BLOCK_K: '32 - seq_q' is -224, less than 0"),
        ('"4 * HEAD_DIM"', '"4 * HEAD"', 19, "let bytes: unknown name 'HEAD'"),
        ('"4 * HEAD_DIM"', '"4 *"', 19, "let bytes: '4 *' is not an expression"),
        ('"4 * HEAD_DIM"', '"4 * bytes"', 19, "let bytes: unknown name 'bytes'"),
    ],
)
def test_a_wrong_expression_of_them_has_its_line(old: str, new: str, line: int, words: str, tmp_path: Path) -> None:
    assert old in HEADER
    with pytest.raises(UsageFault) as caught:
        plan(read(tmp_path, HEADER.replace(old, new, 1)), dim=128)
    assert caught.value.what.startswith(f"{tmp_path / 'mine_forward.cu'}:{line}: {words}"), caught.value.what


def test_a_name_of_the_harness_is_taken(tmp_path: Path) -> None:
    for name in ("seq_q", "DTYPE"):
        with pytest.raises(UsageFault, match=f"let {name} is taken"):
            plan(read(tmp_path, HEADER.replace("// bytes =", f"// {name} =")))


# -- the tree ---------------------------------------------------------------------------------------------------------


def expressions(kernel: Kernel) -> Iterator[str]:
    """Every expression of a header."""
    values: list[object] = [kernel.auto, *kernel.let.values(), *kernel.tile_expressions]
    values += [space["size"] for space in kernel.workspace.values()]
    values += [value for table in kernel.tensor_map.values() for key in ("box", "dims", "strides") for value in table.get(key, ())]
    for launch in kernel.launches:
        values += [*launch.grid, *launch.cluster, launch.block, launch.shared, launch.when, launch.overlaps]
    return (value for value in values if isinstance(value, str))


TREE = catalogue()
each_kernel = pytest.mark.parametrize("kernel", TREE, ids=lambda kernel: kernel.label)


@each_kernel
def test_an_expression_is_short(kernel: Kernel) -> None:
    """80 characters; what is longer gets names in [let], what is policy becomes rows."""
    assert not [text for text in expressions(kernel) if len(text) > 80]


@each_kernel
def test_policy_stands_in_rows(kernel: Kernel) -> None:
    """[tile] depends on width, type and device alone: lengths, heads and masks are thresholds, and those have evidence."""
    policy = re.compile(r"\b(batch|heads_q|heads_kv|seq_q|seq_kv|causal|deterministic|sms)\b")
    assert not [name for name, value in kernel.tile.items() if policy.search(str(value))]


@each_kernel
def test_every_row_of_choice_is_met(kernel: Kernel) -> None:
    """By a problem of those that verify adds to its matrix (test_cases.py has the matrix itself)."""
    rows = {("choice", row.name) for row in kernel.choices}
    assert len(rows) == len(kernel.choices) and rows <= known(kernel)


def test_evidence_names_a_file_or_says_that_there_is_none() -> None:
    """A figure with its file, or the words that it was not measured."""
    root = Path(__file__).parents[2]
    rows = [(kernel.label, row) for kernel in TREE for row in kernel.choices]
    assert len(rows) >= 10
    for label, row in rows:
        files = re.findall(r"(?:experiments|kernels_cu|docs)/[\w/.]*\w|\b\w+\.md\b", row.evidence)
        assert files or "not measured" in row.evidence, (label, row.evidence)
        assert all((root / file).is_file() or (root / "kernels_cu" / file).is_file() for file in files), (label, files)
