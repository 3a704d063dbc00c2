"""Problems that a seed draws: the same on every machine, within the ranges of the sweep, every model among them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from harness.fault import DataFault, UsageFault
from harness.verbs.sweep import load

SWEEP = """
peers = ["numpy"]
[draw]
cases = 12
models = [{ name = "a", heads = 6, heads_kv = 2, dim = 80 }, { name = "b", heads = 4, dim = 64, causal = false }, { name = "c", heads = 1, dim = 8 }]
[[draw.part]]
share = 3
dtype = ["bfloat16", "half"]
tokens = [64, 500]
seq = [5, 700]
causal = 0.5
longer = 0.25
kernels = ["auto"]
peers = []
[[draw.part]]
share = 1
dtype = ["float32"]
tokens = [7, 7]
seq = [9, 9]
causal = 1.0
longer = 0.0
"""


@pytest.fixture
def sweep(tmp_path: Path) -> str:
    (tmp_path / "s.toml").write_text(SWEEP)
    return str(tmp_path / "s.toml")


def test_a_seed_draws_the_same_problems_everywhere() -> None:
    """Pinned: a record's problems can be drawn again years later. More cases do not change those before them; another seed does."""
    few, many = load("mixed", 11, 3), load("mixed", 11, 40)
    assert [test for test, _ in few.shapes] == [
        "seed11-000-GPT-2-large-B5_H20_S499_D64_bfloat16-causal",
        "seed11-001-Llama-3.2-1B-B1_H32_S8192_D64_Hkv8_bfloat16-causal",
        "seed11-002-Llama-2-7B-B45_H32_S209_D128_bfloat16-causal",
    ]
    assert many.shapes[:3] == few.shapes and (few.seed, len(many.shapes)) == (11, 40)
    other = load("mixed", 12, 40).shapes
    assert len({problem for _, problem in other} & {problem for _, problem in many.shapes}) < 4  # a short one by chance


def test_ranges(sweep: str) -> None:
    """Whatever the seed: lengths, tokens, masks and types are those that the part allows, and its kernels and peers are the tests'."""
    for seed in range(30):
        drawn = load(sweep, seed, 80)
        for number, (test, p) in enumerate(drawn.shapes):
            own = number % 4 == 3  # of the second part: one of four
            name = test.split("-")[2]
            assert test.startswith(f"seed{seed}-{number:03}-") and p.folder in test and p.dtype in test and ("causal" in test) == p.causal
            assert (p.heads_q, p.heads_kv, p.head_dim) == {"a": (6, 2, 80), "b": (4, 4, 64), "c": (1, 1, 8)}[name]
            assert not (p.causal and name == "b") and p.scale == p.head_dim**-0.5
            if own:
                assert (p.dtype, p.batch, p.seq_q, p.seq_kv) == ("float32", 1, 9, 9) and p.causal == (name != "b")
            else:
                assert p.dtype in ("bfloat16", "float16") and 5 <= p.seq_q <= p.seq_kv <= 700
                assert p.batch * p.seq_kv <= 500 or (p.batch == 1 and p.seq_kv <= 1000)
            assert (drawn.names("kernels", test), drawn.names("peers", test)) == ((None, ("numpy",)) if own else (("auto",), ()))
        first = [test.split("-")[2] for number, (test, _) in enumerate(drawn.shapes) if number % 4 != 3]
        rounds = [tuple(first[at : at + 3]) for at in range(0, len(first), 3)]
        assert all(sorted(each) == ["a", "b", "c"] for each in rounds) and len(set(rounds)) > 1  # each once before any comes again
    assert len(load(sweep).shapes) == 12 and load(sweep).seed == 42


def test_the_mixed_sweep_is_mixed() -> None:
    """What its comments promise of any seed, 200 cases each: every model, three of four causal, powers of two, 128 to 32k, 16 bit mostly."""
    for seed in (1, 2, 3):
        shapes = load("mixed", seed).shapes
        assert len(shapes) == 200 and len({test for test, _ in shapes}) == 200
        models = Counter(test.split("-", 2)[2].rpartition("-B")[0] for test, p in shapes if p.dtype != "float32")
        assert len(models) == 49 and max(models.values()) - min(models.values()) <= 1
        types = Counter(p.dtype for _, p in shapes)
        assert types["float32"] == 33 and 1.5 < types["bfloat16"] / types["float16"] < 6
        assert 0.65 < sum(p.causal for _, p in shapes) / 200 < 0.85
        assert 0.35 < sum(p.seq_kv & (p.seq_kv - 1) == 0 for _, p in shapes) / 200 < 0.65
        assert 0.02 < sum(p.seq_kv > p.seq_q for _, p in shapes) / 200 < 0.2
        assert min(p.seq_q for _, p in shapes) < 256 and 8192 < max(p.seq_q for _, p in shapes) <= 32768
        octaves = Counter(p.seq_kv.bit_length() for _, p in shapes)
        assert all(octaves[bits] >= 8 for bits in range(8, 14))
        assert max(p.flops("forward") for _, p in load("mixed", seed).cpu_shapes) < 1e8  # on the CPU too it ends in seconds


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("cases = 12", "cases = 0", "cases is 0; it is from 1 to 10000"),
        ("cases = 12", "cases = true", "cases is True"),
        ("cases = 12", "", "a draw has cases, models, part"),
        ("cases = 12", "case = 12", "a draw has cases, models, part"),
        ('name = "c"', 'name = "a"', "two models of a draw have one name"),
        ('name = "c"', 'name = ""', "the name of a model"),
        ("heads_kv = 2", "heads_kv = 4", "6 query heads cannot share 4"),
        ("heads_kv = 2", "groups = 2", "a model has name, heads"),
        ("heads = 1", "heads = 0", "model c: heads is 0"),
        ("share = 3", "share = 0", "share is 0; it is from 1 to 100"),
        ('"half"', '"int8"', "unknown dtype 'int8'"),
        ('["float32"]', "[]", "it is a list of types"),
        ("tokens = [64, 500]", "tokens = [500, 64]", "tokens is .500, 64.; it is the least and the most"),
        ("seq = [9, 9]", "seq = 9", "seq is 9; it is the least and the most"),
        ("causal = 0.5", "causal = 1.5", "each is a share from 0 to 1"),
        ("longer = 0.25", "longer = nan", "each is a share from 0 to 1"),
        ("longer = 0.25", "shorter = 0.25", "a part of a draw has share"),
        ("peers = []", "peers = 5", "peers is a name"),
        ("[draw]", "shapes = [{ seq = 5 }]\n[draw]", "it has shapes and draw"),
    ],
)
def test_what_is_no_draw(sweep: str, old: str, new: str, why: str) -> None:
    """Named with the file; nothing of it is drawn."""
    assert old in SWEEP
    Path(sweep).write_text(SWEEP.replace(old, new, 1))
    with pytest.raises(DataFault, match="is not a sweep") as fault:
        load(sweep)
    assert re.search(why, fault.value.why)


@pytest.mark.parametrize(
    ("spec", "seed", "cases", "what"),
    [
        ("forward", 1, None, "forward takes no --seed"),
        ("forward", None, 1, "forward takes no --cases"),
        ("mixed", -1, None, "--seed -1"),
        ("mixed", 2**32, None, "--seed 4294967296"),
        ("mixed", None, 0, "--cases 0"),
        ("mixed", None, 10_001, "--cases 10001"),
    ],
)
def test_a_seed_that_draws_nothing(spec: str, seed: int | None, cases: int | None, what: str) -> None:
    """From Python too."""
    with pytest.raises(UsageFault, match=what):
        load(spec, seed, cases)
