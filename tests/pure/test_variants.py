"""Variants: files that run in a kernel's place for some problems, under its name (variant_of and when of a header)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest

from harness.backends.host.backend import Host
from harness.check import choose
from harness.check.contender import run_kernel
from harness.check.oracle import Oracle
from harness.dataset import generate
from harness.fault import UsageFault
from harness.kernel import Device, Kernel, find, planner
from harness.kernel.catalogue import with_variants
from harness.kernel.header import Choice
from harness.problem import Problem
from harness.terminal import debugger

HOPPER = find("hopper", "backward")
DEVICE = Device("cpu", "")


@pytest.mark.parametrize(
    ("dim", "seq", "causal", "fast", "deterministic"),
    [
        (64, 4096, False, "hopper", "hopper"),
        (64, 512, True, "hopper", "hopper"),
        (65, 33, False, "hopper_atomic", "hopper"),
        (128, 128, False, "hopper_atomic", "hopper"),
        (128, 512, False, "hopper_atomic", "hopper"),
        (128, 1025, False, "hopper", "hopper"),
        (65, 33, True, "hopper_atomic", "hopper"),
        (128, 2048, True, "hopper", "hopper"),
        (129, 2048, True, "hopper_keys", "hopper_keys"),
        (256, 17, False, "hopper_keys", "hopper_keys"),
    ],
)
def test_the_file_that_runs(dim: int, seq: int, causal: bool, fast: str, deterministic: str) -> None:
    """By head dim, length, mask and form; its plan is the kernel's, and it stands for no other."""
    problem = Problem.of(1, 1, seq, dim, dtype="bfloat16", causal=causal)
    for form, name in ((HOPPER, fast), (HOPPER.made_deterministic(), deterministic)):
        runs = planner.variant(form, problem)
        assert (runs.name, runs.deterministic, runs.variants) == (name, form.deterministic, ())
        assert planner.plan(form, problem, DEVICE) is planner.plan(runs, problem, DEVICE) and planner.variant(runs, problem) is runs


@pytest.mark.parametrize(
    ("dim", "dim_v", "name"),
    [(192, 128, "hopper_keys"), (64, 200, "hopper_keys"), (96, 64, "hopper"), (40, 111, "hopper"), (64, 32, "hopper")],
)
def test_the_file_that_runs_with_a_head_dim_of_v(dim: int, dim_v: int, name: str) -> None:
    """By the larger one; hopper_atomic takes none."""
    for seq, causal in ((33, False), (2048, True)):
        problem = Problem.of(1, 1, seq, dim, dtype="bfloat16", causal=causal, dim_v=dim_v)
        for form in (HOPPER, HOPPER.made_deterministic()):
            assert planner.variant(form, problem).name == name
            macros = dict(planner.plan(form, problem, DEVICE).macros)
            width, width_v = (next(w for w in HOPPER.head_dims if w >= size) for size in (max(dim, dim_v), dim_v))
            assert (macros["HEAD_DIM"], macros["FA_HEAD_DIM_V"]) == (str(width), "1")
            assert macros["HEAD_DIM_V"] == str(256 if name == "hopper_keys" else width_v)
    plain = dict(planner.plan(HOPPER, problem.with_(head_dim_v=None), DEVICE).macros)
    assert "FA_HEAD_DIM_V" not in plain and plain["HEAD_DIM_V"] == plain["HEAD_DIM"]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_window_is_a_border(pass_: str) -> None:
    """hopper takes a causal window as a second border: no text, no list. Beside a score, or with keys behind the query, it stays a mask."""

    def macros(**more: Any) -> tuple[dict[str, str], list[str]]:
        problem = Problem.of(1, 2, 300, 64, dtype="bfloat16", **more)
        plan = planner.plan(find("hopper", pass_), problem, Device("cpu", ""))
        return dict(plan.macros), [launch.entry for launch in plan.launches]

    causal, launches = macros(causal=True, sinks="1.0 - h")
    found, own = macros(mask="0 <= q - k <= 40", sinks="1.0 - h")
    assert found["FA_WINDOW"] == "40" and "FA_MASK" not in found and found["FA_SINKS"] == causal["FA_SINKS"] and own == launches
    assert macros(mask="-9 <= q - k <= 40", causal=True)[0]["FA_WINDOW"] == macros(mask="q - k < 41", causal=True)[0]["FA_WINDOW"] == "40"
    assert macros(mask=f"0 <= q - k <= {2**40}")[0]["FA_WINDOW"] == "300", "no number beyond 32 bits"
    for more in ({"mask": "-9 <= q - k <= 40"}, {"mask": "q - k <= 40"}, {"mask": "0 <= q - k <= 40", "score": "2.0 * s"}):
        made, _ = macros(**more)
        assert "FA_WINDOW" not in made and "FA_MASK" in made and made["CAUSAL"] == "0"


def test_a_head_dim_of_v_that_is_not_promised() -> None:
    """It is refused before launch, whatever its width; a V that is too wide, with the option for it."""
    problem = Problem.of(1, 1, 64, 64, dtype="bfloat16", dim_v=32)
    for name, pass_ in (("mma_qreg_async", "forward"), ("hopper_cluster", "backward"), ("overlap", "forward")):
        with pytest.raises(UsageFault, match=f"{name}_{pass_} does not support another head dim of V than of Q and K") as caught:
            planner.refuse(find(name, pass_), problem)
        assert caught.value.exit_code == 2
    with pytest.raises(UsageFault, match="fa2_forward does not take head dim 129\n.*\n.*use a smaller --dim-v"):
        planner.refuse(find("fa2", "forward"), problem.with_(head_dim_v=129))
    with pytest.raises(UsageFault, match="hopper_thirds_backward does not take head dim 129 of V\n.*promises is 128"):
        planner.refuse(find("hopper_thirds", "backward"), problem.with_(head_dim=192, head_dim_v=129))


def test_a_kernel_takes_what_its_variants_take() -> None:
    """Its name has all their head dims and files; a path is one file. What none of them takes is refused in its name."""
    assert HOPPER.head_dims == (64, 128, 256) and [path.name[:2] for path in HOPPER.files] == ["23", "25", "22"]
    wide = Problem.of(1, 1, 64, 256, dtype="bfloat16")
    planner.refuse(HOPPER, wide)
    with pytest.raises(UsageFault, match="hopper_backward does not take head dim 256\nits widest compiled head dim is 128"):
        planner.refuse(Kernel.read(HOPPER.path), wide)
    with pytest.raises(UsageFault, match="hopper_backward does not take head dim 257\nits widest compiled head dim is 256"):
        planner.refuse(HOPPER, Problem.of(1, 1, 64, 257, dtype="bfloat16"))
    with pytest.raises(UsageFault, match="hopper_backward does not take float32"):
        planner.refuse(HOPPER, Problem.of(1, 1, 64, 64))


def test_the_first_whose_when_holds(tmp_path: Path) -> None:
    """In the order of the catalogue, of the same pass; tile names are known to it, and a wrong one is told at its line."""
    own = planted.kernel(tmp_path)
    few, any_ = (
        replace(own, name=name, variant_of="planted", when=when) for name, when in (("few", "seq_q < 64"), ("any", "head_dim > 8"))
    )
    kernel = with_variants(own, [few, any_, replace(any_, name="backward", pass_="backward"), own])
    assert kernel.variants == (few, any_, own)
    assert [planner.variant(kernel, Problem.of(1, 1, seq, dim)).name for seq, dim in ((63, 16), (64, 16), (64, 8))] == [
        "few",
        "any",
        "planted",
    ]
    with pytest.raises(UsageFault, match="unknown name 'sequence'"):
        planner.variant(with_variants(own, [replace(few, when="sequence < 64")]), Problem.of())


def test_the_one_that_costs_least(tmp_path: Path) -> None:
    """Of those whose `when` holds and this file; of equal ones, and where one has no row with a cost for the problem, the first."""

    def costs(cost: str, when: str = "1") -> dict[str, Any]:
        return {"tile": {"N": 1}, "choices": (Choice(when, (("N", (1, 2)),), "made up", cost),)}

    own = replace(planted.kernel(tmp_path), **costs("1000 * N * seq_q"))
    other = replace(own, name="other", variant_of="planted", when="head_dim > 8", **costs("N * (90000 + 10 * seq_q)", "seq_q < 900"))
    kernel = with_variants(own, [other, own])

    def weighed(seq: int, dim: int = 16) -> list[tuple[str, int | None]]:
        return [(each.name, cost) for each, cost in planner.compared(kernel, Problem.of(1, 1, seq, dim))]

    assert weighed(64) == [("planted", 64000), ("other", 90640)]
    assert weighed(128) == [("other", 91280), ("planted", 128000)]
    assert weighed(128, 8) == [("planted", None)], "the other one may not"
    assert weighed(1000) == [("other", None), ("planted", 1000000)], "the other one has no row for it"
    assert planner.variant(kernel, Problem.of(1, 1, 64, 16)).name == "planted"
    assert planner.variant(kernel, Problem.of(1, 1, 128, 16)).name == "other"
    both = ", ".join(f"{own.path.name} {us} us" for us in (91.3, 128.0))
    assert choose.files_weighed(kernel, Problem.of(1, 1, 128, 16)) == both
    assert choose.files_weighed(kernel, Problem.of(1, 1, 128, 8)) == ""


@pytest.mark.parametrize(("dim", "file"), [(65, "23_hopper_atomic_backward.cu"), (136, "25_hopper_keys_backward.cu")])
def test_what_has_run_is_told(dim: int, file: str) -> None:
    """The result has the kernel's name, and the file that ran, with its source's hash."""
    problem, backend = Problem.of(1, 1, 33, dim, dtype="bfloat16"), Host()
    oracle = Oracle(problem, generate.inputs(problem, 1, generate.INPUTS), None)
    found = run_kernel(backend, HOPPER, oracle, oracle.inputs_of("backward"))
    assert found.passed and found.name == "hopper"
    assert found.kernel and found.kernel.path.name == file and found.kernel.source_hash != HOPPER.source_hash


def test_a_debugger_stops_in_any_of_its_files() -> None:
    words = debugger.command(["cli.py"], [HOPPER], gpu=False)
    assert all(f"tbreak {path.name}:gradients" in words for path in HOPPER.files)


@pytest.mark.parametrize(
    ("heads", "mask", "more", "name"),
    [
        (8, "0 <= q - k <= 127", {}, "wide_window"),
        (16, "0 <= q - k <= 176", {"sinks": "1.0 - h"}, "wide_window"),
        (8, "0 <= q - k <= 177", {}, "wide_heads"),  # 178 keys and 15 more are over 192
        (4, "0 <= q - k <= 127", {}, "wide_heads"),
        (8, "-1 <= q - k <= 127", {}, "wide_heads"),
        (8, "0 <= q - k <= 127", {"score": "s + 1"}, "wide_heads"),  # the window is a mask then
        (8, None, {"causal": True}, "wide_heads"),
    ],
)
def test_a_short_window_at_wide_heads_has_a_file(heads: int, mask: str | None, more: dict[str, Any], name: str) -> None:
    """Forward, of eight query heads a key head or a multiple. By its path that file refuses what it does not run in wide_heads' place."""
    problem = Problem.of(1, heads, 300, 512, 1, dtype="bfloat16", mask=mask, **more)
    assert planner.variant(find("wide_heads", "forward"), problem).name == name
    assert planner.variant(find("wide_heads", "backward"), problem).name == "wide_heads"
    alone = find("wide_window", "forward")
    if name == "wide_window":
        macros = dict(planner.plan(alone, problem, DEVICE).macros)
        assert int(macros["KEYS"]) >= int(macros["FA_WINDOW"]) + 16 and int(macros["STAGES"]) >= 4
    else:
        with pytest.raises(UsageFault, match="does not (?:take this problem|support)|takes windows only"):
            planner.plan(alone, problem, DEVICE)


@pytest.mark.parametrize(
    ("score", "listed"),
    [("30.0 * tanh(s / 30.0)", False), ("s if s > 0 else 0.5 * s", False), ("s - 0.1 * h", True), ("s + (k - q)", True)],
)
def test_a_score_that_knows_no_place_has_no_lists(score: str, listed: bool) -> None:
    """hopper's forward pass makes no list of tiles for it. The last round of many works is in two parts where it is at most half of one."""
    problem = Problem.of(2, 16, 8192, 64, dtype="bfloat16", score=score)
    plan = planner.plan(find("hopper", "forward"), problem, Device("cuda", "", "sm_90a"))
    assert [launch.entry for launch in plan.launches] == ["prepare"] * listed + ["forward"]
    assert ("FA_SCORE_OF_PLACE" in dict(plan.macros)) == listed
    bound = float(dict(plan.macros).get("FA_SCORE_SOFTCAP", "0f").rstrip("f"))
    assert bound == pytest.approx(30 / math.log(2) if "tanh" in score else 0)
    assert dict(plan.macros)["SPLITS"] == str(1 if listed else 2)  # 1376 works on 132 multiprocessors
