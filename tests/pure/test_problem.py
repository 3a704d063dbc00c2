"""Problem: checked sizes, folder names and back, cost counted pair by pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness.fault import DataFault, DiskFault, EnvironmentFault, Fault, KernelFault, UsageFault
from harness.problem import MODES, Problem


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({}, "B2_H8_S512_D64"),
        ({"heads_kv": 2}, "B2_H8_S512_D64_Hkv2"),
        ({"seq_kv": 77, "dtype": "bfloat16"}, "B2_H8_S512_D64_Skv77_bfloat16"),
        ({"heads_kv": 1, "seq_kv": 3, "dtype": "float64"}, "B2_H8_S512_D64_Hkv1_Skv3_float64"),
        ({"heads_kv": 8, "seq_kv": 512, "causal": True, "scale": 0.5}, "B2_H8_S512_D64"),
        ({"dim_v": 64}, "B2_H8_S512_D64"),
        ({"dim_v": 128, "heads_kv": 2, "seq_kv": 7, "dtype": "float16"}, "B2_H8_S512_D64_Dv128_Hkv2_Skv7_float16"),
    ],
)
def test_folder_name_and_back(sizes: dict[str, object], name: str) -> None:
    """Suffixes appear only where they differ; the name gives shape and dtype back."""
    made = Problem.of(**sizes)  # type: ignore[arg-type]
    assert made.folder == name
    again = Problem.from_folder(name)
    assert again == made.with_(causal=False, scale=64**-0.5)


@pytest.mark.parametrize(
    "name",
    ["B2_H8_S512", "B2_H8_S512_D64_", "xB2_H8_S512_D64", "B2_H8_S512_D64_int8", "B-1_H8_S512_D64", "B2_H8_S512_D64\n", "B9999999_H1_S1_D1"],
)
def test_other_names_are_no_problem(name: str) -> None:
    """A name of another form, also one that only nearly fits, says nothing."""
    assert Problem.from_folder(name) is None


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"seq": 0}, "seq is 0"),
        ({"batch": -1}, "batch is -1"),
        ({"heads_kv": 0}, "heads-kv is 0"),
        ({"dim_v": 0}, "dim-v is 0"),
        ({"heads": 8, "heads_kv": 3}, "cannot share"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"scale": 10**400}, "scale is 1000"),
        ({"scale": "1"}, "scale is '1'"),
        ({"scale": np.float16("inf")}, "scale is"),
        ({"causal": True, "causal_shift": 1.9}, "causal_shift is 1.9"),
        ({"causal": True, "causal_shift": float("nan")}, "causal_shift is nan"),
        ({"causal_shift": "abc"}, "causal_shift is 'abc'"),
    ],
)
def test_bad_sizes_are_usage(sizes: dict[str, object], word: str) -> None:
    """Each is exit 2 with a hint."""
    with pytest.raises(UsageFault, match=word) as caught:
        Problem.of(**sizes)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize(("seq_q", "seq_kv"), list(itertools.product([1, 2, 5, 8], repeat=2)))
def test_visible_pairs_by_counting(seq_q: int, seq_kv: int) -> None:
    """The closed form agrees with counting every pair, causal bottom-right or not."""
    made = Problem.of(1, 1, seq_q, 4, seq_kv=seq_kv, causal=True)
    assert made.visible_pairs == sum(k <= q + seq_kv - seq_q for q in range(seq_q) for k in range(seq_kv))
    assert made.with_(causal=False).visible_pairs == seq_q * seq_kv


@pytest.mark.parametrize(("seq_q", "seq_kv"), list(itertools.product([1, 2, 5, 8], repeat=2)))
def test_visible_pairs_of_any_shift(seq_q: int, seq_kv: int) -> None:
    """Counted pair by pair for every shift up to 10 beyond the lengths, and far outside; the operations follow."""
    for shift in (*range(-seq_q - 10, seq_kv + 11), -(10**12), 10**12):
        made = Problem.of(1, 1, seq_q, 4, seq_kv=seq_kv, causal=True, causal_shift=shift)
        assert made.visible_pairs == sum(k <= q + shift for q in range(seq_q) for k in range(seq_kv)), shift
        assert made.flops("forward") == 16 * made.visible_pairs
        assert -seq_q <= made.causal_shift < seq_kv
        assert made.causal_shift == shift or made.visible_pairs in (0, seq_q * seq_kv)


def test_equal_masks_are_equal_problems() -> None:
    """The default given in words, a shift without a mask, and two shifts that show everything or nothing."""
    made = Problem.of(seq=6, seq_kv=10, causal=True)
    assert made.causal_shift == made.default_shift == 4
    for same in (Problem.of(seq=6, seq_kv=10, causal=True, causal_shift=4), made.with_(causal_shift=0).with_(causal_shift=None)):
        assert same == made and hash(same) == hash(made)
    full = made.with_(causal=False)
    assert full == Problem.of(seq=6, seq_kv=10, causal_shift=-3) == full.with_(causal_shift=7) and full.causal_shift == 4
    assert made.with_(causal_shift=9) == made.with_(causal_shift=1000) != made
    assert made.with_(causal_shift=-6) == made.with_(causal_shift=-7) != made.with_(causal_shift=-5)


def test_a_default_shift_is_never_stale() -> None:
    """It follows the lengths; a shift that was chosen is kept, within the new bounds; other changes leave either as it is."""
    made = Problem.of(seq=6, seq_kv=10, causal=True)
    assert [made.with_(**change).causal_shift for change in ({"seq_q": 8}, {"seq_kv": 4}, {"scale": 1.0})] == [2, -2, 4]
    assert made.with_(causal=False).with_(seq_kv=6).with_(causal=True).causal_shift == 0
    top_left = made.with_(causal_shift=0)
    assert [top_left.with_(**change).causal_shift for change in ({"seq_q": 8}, {"seq_kv": 4}, {"scale": 1.0})] == [0, 0, 0]
    assert made.with_(seq_q=8, causal_shift=3).causal_shift == 3
    assert made.with_(causal_shift=8).with_(seq_kv=5).causal_shift == 4  # everything is visible, as k <= q + 8 says


def test_a_shift_is_described_where_it_was_chosen() -> None:
    """The folder holds inputs, which have no mask."""
    made = Problem.of(seq_kv=500, causal=True)
    assert made.describe() == "B2_H8_S512_D64_Skv500 causal"
    assert made.with_(causal_shift=0, scale=1.0).describe() == "B2_H8_S512_D64_Skv500 causal causal_shift=0 scale=1"
    assert made.with_(causal_shift=0).folder == made.folder


def test_cost() -> None:
    """4 B H D pairs forward, 2.5 times that backward, 3.5 for both; every input and output once."""
    made = Problem.of(2, 4, 16, 8, heads_kv=2, dtype="float16")
    assert made.flops("forward") == 4 * 2 * 4 * 8 * 16 * 16
    assert made.flops("backward") * 2 == made.flops("forward") * 5
    assert made.flops("both") == made.flops("forward") + made.flops("backward")
    q, kv, lse = 2 * 4 * 16 * 8 * 2, 2 * 2 * 16 * 8 * 2, 2 * 4 * 16 * 4
    assert made.bytes("forward") == 2 * q + 2 * kv + lse
    assert made.bytes("backward") == (3 * q + 2 * kv + lse) + (q + 2 * kv)
    assert made.bytes("both") == made.bytes("forward") + made.bytes("backward")


def test_shapes_and_types() -> None:
    """Shapes by name; logsumexp is float32 whatever the dtype, but float64 for float64; bytes do not overflow."""
    made = Problem.of(1, 6, 5, 3, heads_kv=2, seq_kv=7, dtype="bfloat16")
    assert made.shape("dQ") == (1, 6, 5, 3)
    assert made.shape("dV") == (1, 2, 7, 3)
    assert made.shape("logsumexp") == (1, 6, 5)
    assert made.tensor_dtype("logsumexp") == "float32"
    assert made.with_(dtype="float64").tensor_dtype("logsumexp") == "float64"
    assert Problem.of(2**20, 2**20, 2**20, 64).tensor_bytes("Q") == 2**68


def test_a_head_dim_of_v() -> None:
    """V, O, dO and dV have it, the scale is that of Q and K; S, dQ and dK count as head_dim, P V, dP and dV as head_dim_v."""
    made = Problem.of(2, 4, 16, 12, heads_kv=2, seq_kv=5, dim_v=7, dtype="float16")
    assert made.scale == 12**-0.5 and (made.head_dim_v, made.widest, made.has_own_dim_v) == (7, 12, True)
    for tensor, shape in (("Q", (2, 4, 16, 12)), ("dK", (2, 2, 5, 12)), ("V", (2, 2, 5, 7)), ("dV", (2, 2, 5, 7)), ("dO", (2, 4, 16, 7))):
        assert made.shape(tensor) == shape and made.row_pitch(tensor) == {12: 16, 7: 8}[shape[3]]
    pairs = 2 * 4 * 16 * 5
    assert made.flops("forward") == 2 * pairs * (12 + 7)
    assert made.flops("backward") == 2 * pairs * (3 * 12 + 2 * 7)
    assert made.flops("both") == made.flops("forward") + made.flops("backward")
    q, k, v, o, lse = 2 * 4 * 16 * 12 * 2, 2 * 2 * 5 * 12 * 2, 2 * 2 * 5 * 7 * 2, 2 * 4 * 16 * 7 * 2, 2 * 4 * 16 * 4
    assert made.bytes("forward") == q + k + v + o + lse
    assert made.bytes("backward") == (q + k + v + 2 * o + lse) + (q + k + v)
    assert made.with_(head_dim=24).head_dim_v == 7 and Problem.of(dim=12).with_(head_dim=24).head_dim_v == 24
    assert made.with_(head_dim_v=None) == Problem.of(2, 4, 16, 12, heads_kv=2, seq_kv=5, dtype="float16")
    assert made.record["head_dim_v"] == 7


def test_masks_and_scores() -> None:
    """Texts in one spelling, checked; beside them the causal mask is bottom-right; FLOPs count the pairs that all masks leave."""
    made = Problem.of(2, 4, 5, 8, 2, 7, mask="(q-k)<3", score="s*2")
    assert (made.mask, made.score) == ("q - k < 3", "s * 2") and made == made.with_(mask="q-k < 3") and made.with_(mask=None).mask is None
    assert made.describe().endswith(' mask="q - k < 3" score="s * 2"')
    q, k, h = np.arange(5)[:, None] + 2, np.arange(7), np.arange(4)[:, None, None]
    assert made.pairs == 8 * np.count_nonzero(q - k < 3) and made.flops("forward") == 32 * made.pairs
    assert made.with_(causal=True).pairs == 8 * np.count_nonzero((q - k < 3) & (k <= q))
    assert not made.depends_on("h") and made.with_(score="s + h").depends_on("b", "h")
    of_head = made.with_(mask="k < h or h_kv == 1 and q == 4")
    assert of_head.pairs == 2 * np.count_nonzero((k < h) | ((h // 2 == 1) & (q == 4)))
    assert made.with_(mask=None).pairs == 2 * 4 * 5 * 7
    for wrong, word in (
        ({"mask": "q - k"}, "column 1"),
        ({"score": "s + slope[h]", "tensors": {"slope": [1.0, 2.0]}}, "shape"),
        ({"mask": "doc[b, q] == 1", "tensors": {"doc": np.ones((2, 5))}}, "float64"),
        ({"score": "s + slope[h]", "tensors": {"bias": [1.0]}}, "no text names bias"),
        ({"mask": "doc[b, q] == doc[b, k]"}, "two tensors"),
        ({"mask": "q < 3", "causal": True, "causal_shift": 0}, "causal_shift"),
    ):
        with pytest.raises(UsageFault, match=word):
            made.with_(**wrong)


def test_faults_say_what_why_and_hint() -> None:
    """A fault prints its three parts; each kind has its own exit code."""
    assert str(Fault("what", "why", "do this")) == "what\nwhy\nhint: do this"
    assert str(Fault("what")) == "what"
    kinds = [UsageFault, DataFault, EnvironmentFault, KernelFault, DiskFault]
    assert [kind.exit_code for kind in kinds] == [2, 3, 4, 5, 6]


def test_a_scale_that_float32_has_only_as_a_subnormal_is_zero() -> None:
    """Kernels multiply by it in float32, on a GPU without subnormals, and 0 times the -inf of a masked score is NaN."""
    for scale in (2.0**-127, -1e-46, 5e-324):
        assert Problem.of(scale=scale, dtype="float16").scale == 0
        assert Problem.of(scale=scale, dtype="float64").scale == scale
    assert Problem.of(scale=-(2.0**-126)).scale == -(2.0**-126)


def test_numbers_of_numpy_are_numbers() -> None:
    """A scale and a causal_shift become Python's."""
    problem = Problem.of(scale=np.float32(0.5), causal=True, causal_shift=np.int32(3))  # type: ignore[arg-type]
    assert (problem.scale, problem.causal_shift) == (0.5, 3) and type(problem.scale) is float and type(problem.causal_shift) is int


def test_a_mode_that_there_is_not_is_usage() -> None:
    """The modes are listed; what asks whether there is one is told that there is not."""
    with pytest.raises(UsageFault, match="unknown mode 'xx'") as caught:
        MODES["xx"]
    assert "forward, backward, both" in caught.value.why and "xx" not in MODES


def test_a_mask_that_says_causal_is_causal() -> None:
    """However it is written; beside a score too. Where it says more it stays a mask."""
    plain = Problem.of(1, 2, 20, 16, seq_kv=33, causal=True)
    for text in ("k <= q", "q >= k", "0 <= q - k", "k - 1 < q"):
        assert Problem.of(1, 2, 20, 16, seq_kv=33, mask=text) == plain
        scored = Problem.of(1, 2, 20, 16, seq_kv=33, mask=text, score="2.0 * s")
        assert scored.causal and scored.mask is None and scored.score is not None
    for text in ("k < q", "k <= q or h == 0", "q - k <= 30", "0 <= q - k <= 4"):
        assert Problem.of(1, 2, 20, 16, seq_kv=33, mask=text).mask == text
