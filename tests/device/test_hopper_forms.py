"""Forms of hopper that few problems choose: heads of a group that share a tile of queries, and a last round whose works are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import kernel
from harness.backends import CompileError
from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.dataset.storage import round_to, widen
from harness.fault import KernelFault, UsageFault
from harness.kernel import Kernel, find
from harness.problem import Problem
from harness.verbs import verify
from harness.verbs.selftest.mutant import Mutant, edited
from harness.verbs.verify.cases import Case

BACKWARD = kernel.KERNELS / "22_hopper_backward.cu"


def outputs(backend: Host, kernel: Kernel, problem: Problem, **tiles: int) -> dict[str, Any]:
    """What a kernel writes."""
    given = generate.inputs(problem, 42, ("Q", "K", "V", "dO"))
    given["O"], given["logsumexp"] = given["dO"], np.full(problem.shape("logsumexp"), 6, np.float32)
    return Bound(backend, backend.load(kernel, problem, tiles), problem, given).run()


@pytest.mark.parametrize(
    ("dim", "dtype", "tiles"),
    [
        (64, "bfloat16", {"BLOCKS": 3}),
        (80, "float16", {"CONSUMERS": 3}),
        (128, "bfloat16", {"SPLITS": 2}),
        (256, "float16", {}),
    ],
)
def test_heads_that_share_a_tile(dim: int, dtype: str, tiles: dict[str, int]) -> None:
    """O and logsumexp of tiles of one head, but for the references of the softmax, which a warp's rows raise together. Ragged tiles, and
    queries that see no key."""
    problem, forward = Problem.of(1, 16, 75, dim, 2, 140, dtype, True, causal_shift=-5), find("hopper", "forward")
    wanted = outputs(Host(), forward, problem, PACK=1, **tiles)
    for pack, sms in ((2, 132), (4, 2), (8, 3)):
        found = outputs(Host(7, "race" if sms == 2 else None, sms=sms), forward, problem, PACK=pack, **tiles)
        one, several = (widen(np, each["O"], dtype) for each in (wanted, found))
        assert np.abs(several - one).max() < 0.01 * np.abs(one).max(), pack
        np.testing.assert_allclose(found["logsumexp"], wanted["logsumexp"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("cap", "early", "late", "mask", "fault"),
    [
        (28, -6.0, (-9.9, -8.75), None, ("fa/accumulator.cuh", "sum[half] >= least && ", "")),
        (28, 0, (9.3, 10.5), None, ("fa/accumulator.cuh", " && sum[half] <= most", "")),
        (73, 15.5, (220, 235), "k < 500 or q % 3 == 0", ("", "if (reach != fa::reach_quick) refer();", "")),
        (73, -15.5, (-250, -235), "k < 500 or q % 3 == 0", ("", "if (SOFTCAP && !middle) fa::forget_unseen(reference, row_sum);", "")),
        (30, 5.5, (0.5, 1), None, ("", "if (SOFTCAP) refer();", "")),
        (73, -250, (-250, -235), None, ("", "if (!SOFTCAP || middle) fa::first_reference", "if (!SOFTCAP) fa::first_reference")),
    ],
    ids=["below", "above", "masked", "no key before", "large sums", "first tile"],
)
def test_a_softcap_beyond_the_quick_range(
    cap: float, early: float, late: tuple[float, float], mask: str | None, fault: tuple[str, str, str], tmp_path: Path
) -> None:
    """Of scores that begin in the quick range and leave it, or their sums do, of rows whose first key is beyond it, or of all keys. V is 2^80 and 2^-40. A
    kernel with a fault is wrong."""
    forward, text = find("hopper", "forward"), f"{cap}.0 * tanh(s / {cap}.0)"
    problem = Problem.of(1, 1, 100, 64, 1, 1000, "bfloat16", scale=1.0, score=text, mask=mask)
    random = np.random.default_rng(7)
    q, k, v = np.zeros(problem.shape("Q")), np.zeros(problem.shape("K")), random.standard_normal(problem.shape("V"))
    first, then = (slice(500), slice(500, 1000))[:: 1 if mask is None else -1]  # with a mask the last tile comes first
    q[..., 0], k[:, :, first, 0], k[:, :, then, 0] = 1, early, random.uniform(*late, 500)
    v[..., :32] *= 2.0**80
    v[..., 32:] *= 2.0**-40
    given = {name: round_to(np, array, "bfloat16") for name, array in (("Q", q), ("K", k), ("V", v))}
    k, v = (widen(np, given[name], "bfloat16")[0, 0] for name in ("K", "V"))
    seen = np.ones((100, 1000), bool) if mask is None else (np.arange(1000) < 500) | (np.arange(100)[:, None] % 3 == 0)
    score = np.where(seen, cap * np.tanh(k[:, 0] / cap), -np.inf)
    p = np.exp(score - score.max(1, keepdims=True))
    wanted, logsumexp = p @ v / p.sum(1, keepdims=True), np.log(p.sum(1)) + score.max(1)

    def errors(kernel: Kernel) -> tuple[float, float]:
        backend = Host()
        found = Bound(backend, backend.load(kernel, problem, {}), problem, given).run()
        o = widen(np, found["O"], "bfloat16")[0, 0]
        apart = np.abs(o - wanted).reshape(100, 2, 32).max((0, 2)) / np.abs(wanted).reshape(100, 2, 32).max((0, 2))
        return apart.max(), np.abs(found["logsumexp"][0, 0] - logsumexp).max()

    of_o, of_logsumexp = errors(forward)
    assert of_o < 0.01 and of_logsumexp < (4e-6 if cap < 30 else 2e-5)
    file, *edit = fault
    of_o, of_logsumexp = errors(Mutant("", "numeric", forward.label, (tuple(edit),), {}, file).plant(tmp_path))
    assert not (of_o < 0.02 and of_logsumexp < (8e-6 if cap < 30 else 4e-5))


def test_heads_of_several_key_heads_do_not_share_a_tile() -> None:
    """A tile is multiplied with one key head's keys."""
    problem = Problem.of(1, 6, 75, 64, 2, dtype="bfloat16")
    for pack in (0, 2, 4, 3):
        with pytest.raises((UsageFault, CompileError)):
            outputs(Host(), find("hopper", "forward"), problem, PACK=pack)


def far(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest difference, as a part of the largest value of its tensor."""
    several = {name: (widen(np, found[name], "bfloat16"), widen(np, one, "bfloat16")) for name, one in wanted.items()}
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in several.values())


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_last_round_that_is_divided(dim: int, tmp_path: Path) -> None:
    """Nine tiles of keys on two, four and more multiprocessors: dK and dV of the last one, or of all, are sums of parts. One that is left
    out shows."""
    problem, backward = Problem.of(1, 6, 130, dim, 3, 300, "bfloat16"), Kernel.read(BACKWARD)
    wanted = outputs(Host(), backward, problem, SPLITS=1)
    for sms, splits, check in ((2, 3, None), (4, 4, "race"), (5, 2, None), (132, 2, None)):
        assert far(outputs(Host(3, check, sms=sms), backward, problem, SPLITS=splits), wanted) < 0.01, sms
    path = tmp_path / "less_backward.cu"
    less = (
        "TRANSPOSED>(args, args.runtime[RUNTIME_SECTION], splits_of(args),\n",
        "TRANSPOSED>(args, args.runtime[RUNTIME_SECTION], splits_of(args) - 1,\n",
    )
    path.write_text(edited(BACKWARD.read_text(), less))
    assert far(outputs(Host(sms=4), Kernel.read(path), problem, SPLITS=3), wanted) > 0.1


@pytest.mark.parametrize("dim", [64, pytest.param(80, marks=pytest.mark.days(14)), pytest.param(128, marks=pytest.mark.days(14))])
def test_works_under_the_mask_whose_last_round_is_divided(dim: int, tmp_path: Path) -> None:
    """On five and seven multiprocessors and on more than works: O and logsumexp of works that are whole. Ragged tiles, queries that see no key
    and works of fewer tiles than parts. A part that is left out shows."""
    problem, forward = Problem.of(1, 3, 500, dim, 1, 520, "bfloat16", True, causal_shift=-20), find("hopper", "forward")
    path, form = tmp_path / "less_forward.cu", {"BLOCKS": 1, "PACK": 1, "MERGE": 0}
    path.write_text(edited(forward.path.read_text(), ("return index < parts;", "return index < parts - 1;")))
    wanted = outputs(Host(), forward, problem, SPLITS=1, **form)
    for sms, splits, check in ((5, 2, None), (7, 4, "race"), (5, 4, None), (132, 2, None)):
        found = outputs(Host(5, check, sms=sms), forward, problem, SPLITS=splits, **form)
        one, several = (widen(np, each["O"], "bfloat16") for each in (wanted, found))
        assert np.abs(several - one).max() < 0.01 * np.abs(one).max(), sms
        np.testing.assert_allclose(found["logsumexp"], wanted["logsumexp"], rtol=1e-3, atol=1e-3)
    lost = widen(np, outputs(Host(sms=5), Kernel.read(path), problem, SPLITS=2, **form)["O"], "bfloat16")
    assert not np.abs(lost - widen(np, wanted["O"], "bfloat16")).max() < 0.1  # NaN, where a row was never written


@pytest.mark.parametrize(
    ("dim", "dtype", "tiles"), [(64, "bfloat16", {"BLOCKS": 3}), (80, "float16", {"BLOCKS": 2}), (256, "bfloat16", {})]
)
def test_parts_that_a_launch_of_its_own_merges(dim: int, dtype: str, tiles: dict[str, int]) -> None:
    """O and logsumexp of keys that are not divided, of any number of parts: causal queries of which some see no key, more parts than tiles."""
    problem, forward = Problem.of(2, 8, 20, dim, 1, 700, dtype, True, causal_shift=-5), find("hopper", "forward")
    wanted = outputs(Host(), forward, problem, PACK=8, MERGE=0, PARTS=1, SPLITS=1, **tiles)
    for parts, check in ((2, None), (9, "race"), (40, None)):
        found = outputs(Host(7, check), forward, problem, PACK=8, MERGE=1, PARTS=parts, SPLITS=1, **tiles)
        one, several = (widen(np, each["O"], dtype) for each in (wanted, found))
        assert np.abs(several - one).max() < 0.01 * np.abs(one).max(), parts
        np.testing.assert_allclose(found["logsumexp"], wanted["logsumexp"], rtol=1e-3, atol=1e-3)


#: Of queries and keys, under the mask with a shift: grouped heads, ragged tiles, queries that see no key, whole tiles of them.
STORED = {"full": (200, 300, None), "causal": (200, 330, -140), "square": (330, 330, 0)}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("causal", "bfloat16"),
        pytest.param("full", "float16", marks=pytest.mark.days(14)),
        pytest.param("square", "float16", marks=pytest.mark.days(14)),
    ],
)
def test_a_transposed_dq(shape: str, dtype: str) -> None:
    """dQ, dK and dV as of the form with dQ by rows; also behind a head dim that is no multiple of 8, with splits."""
    seq_q, seq_kv, shift = STORED[shape]
    problem = Problem.of(1, 4, seq_q, 123, 2, seq_kv, dtype, shift is not None, causal_shift=shift)
    wanted = outputs(Host(), Kernel.read(BACKWARD), problem)
    for seed, check, tiles in ((0, None, {"SPLITS": 2}), (3, "race", {"BACKWARDS": 1}), (7, None, {})):
        found = outputs(Host(seed, check), Kernel.read(BACKWARD), problem, TWIN=3, **tiles)
        for name, one in wanted.items():
            a, b = widen(np, found[name], dtype), widen(np, one, dtype)
            assert np.abs(a - b).max() <= 0.01 * np.abs(b).max(), (name, seed)


QUERIES_80 = {"BLOCK_Q": 80, "TWIN": 0, "APART": 0}
CLOSER: list[Any] = [
    ("causal", 123, "bfloat16", {"TWIN": 5}),
    ("full", 128, "bfloat16", {**QUERIES_80, "EAGER": 1}),
    pytest.param("square", 123, "float16", {**QUERIES_80, "EAGER": 1, "SPLITS": 2}, marks=pytest.mark.days(14)),
    pytest.param("causal", 128, "bfloat16", QUERIES_80, marks=pytest.mark.days(14)),
    pytest.param("square", 128, "bfloat16", {"TWIN": 3, "EAGER": 1, "APART": 1}, marks=pytest.mark.days(14)),
]


@pytest.mark.parametrize(("shape", "dim", "dtype", "tiles"), CLOSER)
def test_products_that_wait_less(shape: str, dim: int, dtype: str, tiles: dict[str, int]) -> None:
    """dQ, dK and dV as of the first form: with tiles of 80 queries, with the next S behind dK, with most of K in registers."""
    seq_q, seq_kv, shift = STORED[shape]
    problem = Problem.of(1, 4, seq_q, dim, 2, seq_kv, dtype, shift is not None, causal_shift=shift)
    wanted = outputs(Host(), Kernel.read(BACKWARD), problem)
    for seed, check, sms in ((0, None, 132), (3, "race", 2)):
        found = outputs(Host(seed, check, sms=sms), Kernel.read(BACKWARD), problem, **tiles)
        for name, one in wanted.items():
            a, b = widen(np, found[name], dtype), widen(np, one, dtype)
            assert np.abs(a - b).max() <= 0.01 * np.abs(b).max(), (name, seed)


#: Groups of three heads: one range, ranges of one and two heads, and more ranges than heads.
HEADS_INNER: list[Any] = [
    ("causal", 128, "bfloat16", {"TWIN": 5, "BACKWARDS": 1, "SPLITS": 2}),
    pytest.param("causal", 128, "bfloat16", {"TWIN": 5, "BACKWARDS": 1}, marks=pytest.mark.days(14)),
    pytest.param("square", 64, "bfloat16", {"SPLITS": 2}, marks=pytest.mark.days(14)),
    pytest.param("square", 128, "float16", {"SPLITS": 5}, marks=pytest.mark.days(14)),
    pytest.param("full", 128, "bfloat16", QUERIES_80 | {"EAGER": 1}, marks=pytest.mark.days(14)),
    pytest.param("causal", 123, "float16", {"TWIN": 5, "BACKWARDS": 1, "SPLITS": 2}, marks=pytest.mark.days(14)),
    pytest.param("square", 96, "bfloat16", {"BACKWARDS": 1, "SPLITS": 5}, marks=pytest.mark.days(14)),
    pytest.param("full", 128, "bfloat16", QUERIES_80 | {"EAGER": 1, "SPLITS": 2}, marks=pytest.mark.days(14)),
]


@pytest.mark.parametrize(("shape", "dim", "dtype", "tiles"), HEADS_INNER)
def test_heads_inside_a_tile_of_queries(shape: str, dim: int, dtype: str, tiles: dict[str, int]) -> None:
    """dQ, dK and dV as where a walk goes head after head; with several schedules, and blocks that take several tiles of keys."""
    seq_q, seq_kv, shift = STORED[shape]
    problem = Problem.of(1, 6, seq_q, dim, 2, seq_kv, dtype, shift is not None, causal_shift=shift)
    wanted = outputs(Host(), Kernel.read(BACKWARD), problem)
    for seed, check, sms in ((0, None, 132), (3, "race", 2)):
        found = outputs(Host(seed, check, sms=sms), Kernel.read(BACKWARD), problem, **{"HEADS_INNER": 1} | tiles)
        for name, one in wanted.items():
            a, b = widen(np, found[name], dtype), widen(np, one, dtype)
            assert np.abs(a - b).max() <= 0.01 * np.abs(b).max(), (name, seed)


def test_turns_keep_the_order_of_the_heads() -> None:
    """Blocks that take turns would wait for each other."""
    with pytest.raises(CompileError, match="turns have the order of the heads"):
        outputs(Host(), Kernel.read(BACKWARD).made_deterministic(), Problem.of(1, 4, 200, 128, 2, dtype="bfloat16"), HEADS_INNER=1)


def test_a_stage_that_is_left_too_early(tmp_path: Path) -> None:
    """The next S is in flight, but dK, which reads the stage, must have ended."""
    path = tmp_path / "early_backward.cu"
    path.write_text(edited(BACKWARD.read_text(), ("issue_scores(), end_tile<1>()", "issue_scores(), end_tile<2>()")))
    with pytest.raises(KernelFault, match="race|in flight"):
        outputs(Host(3, "race", sms=1), Kernel.read(path), Problem.of(1, 2, 330, 128, 2, 130, "bfloat16"), TWIN=3, EAGER=1)


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [("causal", {"BACKWARDS": 1}), pytest.param("full", {"TWIN": 3}), pytest.param("square", {"SPLITS": 2, "TWIN": 2})],
)
def test_one_place_for_v(shape: str, tiles: dict[str, int]) -> None:
    """dQ, dK and dV as with a place for each stage; several tiles of keys a block, also such that no query sees."""
    seq_q, seq_kv, shift = STORED[shape]
    problem = Problem.of(1, 4, seq_q, 128, 2, seq_kv, "bfloat16", shift is not None, causal_shift=shift)
    wanted = outputs(Host(), Kernel.read(BACKWARD), problem)
    for seed, check, sms in ((0, None, 132), (3, "race", 2), (7, None, 1)):
        found = outputs(Host(seed, check, sms=sms), Kernel.read(BACKWARD), problem, APART=1, **tiles)
        for name, one in wanted.items():
            a, b = widen(np, found[name], "bfloat16"), widen(np, one, "bfloat16")
            assert np.abs(a - b).max() <= 0.01 * np.abs(b).max(), (name, seed)


@pytest.mark.parametrize(
    "fault",
    [
        ("if (APART && is_first) fa::mbarrier_wait_parity(smem.ds_empty, kv.position % 2 ^ 1);", ""),
        (
            "        fa::wgmma_wait<0>(ds_reg);\n        release_v();\n        if constexpr",
            "        release_v();\n        fa::wgmma_wait<0>(ds_reg);\n        if constexpr",
        ),
    ],
)
def test_a_place_that_is_taken_too_early(fault: tuple[str, str], tmp_path: Path) -> None:
    """dS over dV that has not left; the next V over one that a product reads."""
    path = tmp_path / "early_backward.cu"
    path.write_text(edited(BACKWARD.read_text(), fault))
    with pytest.raises(KernelFault, match="race|in flight"):
        outputs(Host(3, "race", sms=1), Kernel.read(path), Problem.of(1, 2, 130, 128, 2, 300, "bfloat16"), APART=1)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    "text",
    [
        "B1_H3_S130_D40_Hkv3_Skv290_bfloat16,mask=0 <= q - k <= 70",
        "B1_H4_S257_D40_Hkv2_float16,mask=0 <= q - k <= 63",
        "B1_H3_S200_D40_Hkv3_Skv70_bfloat16,mask=0 <= q - k <= 20",
        "B2_H4_S200_D40_Hkv1_Skv70_float16,mask=0 <= q - k <= 0,sinks=1.0 - h",
    ],
)
def test_windows_of_wide_heads(pass_: str, text: str) -> None:
    """Clusters with a tile of queries of two heads, and with two of one head; one of them takes all works."""
    assert verify.run_case(Host(sms=2), find("wide_heads", pass_), Case.parse(text), repeat=None).passed
