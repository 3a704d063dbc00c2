"""Masks and scores: their values, C++ and derivatives, and that nothing else is a text of theirs."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import formula
from harness.formula import Mistake, parsed
from harness.kernel.tree import INCLUDE

SEQ_Q, SEQ_KV, HEADS, GROUP, BATCH = 5, 7, 4, 2, 2

#: As the oracle has them: arrays that broadcast to (batch, heads, queries, keys); q is bottom-right.
NAMES: dict[str, Any] = {
    "b": np.arange(BATCH).reshape(-1, 1, 1, 1),
    "h": np.arange(HEADS).reshape(-1, 1, 1),
    "h_kv": (np.arange(HEADS) // GROUP).reshape(-1, 1, 1),
    "q": (np.arange(SEQ_Q) + SEQ_KV - SEQ_Q).reshape(-1, 1),
    "k": np.arange(SEQ_KV),
    "seq_q": SEQ_Q,
    "seq_kv": SEQ_KV,
}
SHAPE = (BATCH, HEADS, SEQ_Q, SEQ_KV)
S = np.random.RandomState(0).randn(*SHAPE) * 3


def value(kind: str, text: str, real: str = "float64") -> Any:
    return np.broadcast_to(parsed(kind, text).value(np, NAMES | {"s": S}, real), SHAPE)


B, H, Q, K = (np.broadcast_to(NAMES[name], SHAPE) for name in "bhqk")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("q - k < 3", Q - K < 3),
        ("-2 <= q - k < 3", (Q - K >= -2) & (Q - K < 3)),
        ("k <= q and not k // 2 == 1 or h_kv == 1", ((K <= Q) & (K // 2 != 1)) | (H // 2 == 1)),
        ("(k - 5) // 3 % 2 == -7 % 4", (K - 5) // 3 % 2 == 1),
        ("abs(q - k) < min(2, seq_q, h + 1)", np.abs(Q - K) < np.minimum(2, H + 1)),
        ("(q if b == 0 else k) > seq_kv - 3", np.where(B == 0, Q, K) > SEQ_KV - 3),
        ("k % -3 == -1", K % -3 == -1),
    ],
)
def test_masks(text: str, wanted: Any) -> None:
    found = value("mask", text)
    assert found.dtype == bool
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s + exp2(-h - 1) * (k - q)", S + 2.0 ** (-H - 1.0) * (K - Q)),
        ("50.0 * tanh(s / 50)", 50 * np.tanh(S / 50)),
        ("max(s, 0.5, k) - min(exp(s), 2)", np.maximum(np.maximum(S, 0.5), K) - np.minimum(np.exp(S), 2)),
        ("s if s > 0 else 0.1 * abs(s) / (1 + q)", np.where(S > 0, S, 0.1 * np.abs(S) / (1.0 + Q))),
        ("k", K.astype(float)),
        ("s - (seq_q - k // 2) / seq_kv", S - (SEQ_Q - K // 2) / SEQ_KV),
    ],
)
def test_scores(text: str, wanted: Any) -> None:
    found = value("score", text)
    assert found.dtype == np.float64
    assert np.allclose(found, wanted, rtol=1e-15, atol=0)
    assert value("score", text, "float32").dtype == np.float32
    assert np.allclose(value("score", text, "float32"), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "text", "column", "word"),
    [
        ("mask", "q - x < 3", 5, "unknown name x"),
        ("mask", "  q - x < 3", 7, "unknown name x"),
        ("mask", "q - s < 3", 5, "does not depend on the score"),
        ("mask", "q - k", 1, "a truth value stands here"),
        ("mask", "q < 0.5 * k", 5, "made of integers"),
        ("mask", "q / 2 < k", 1, "made of integers"),
        ("mask", "q // k == 0", 6, "anything else may be 0"),
        ("mask", "q % 0 == 0", 5, "anything else may be 0"),
        ("mask", "q * q * k < 1", 1, "exceed 64 bits"),
        ("mask", "not q", 5, "a truth value stands here"),
        ("mask", "doc[b, s] == 1", 8, "indexed by one to four"),
        ("mask", "doc[b, h, h_kv, q, k] == 1", 5, "indexed by one to four"),
        ("mask", "doc[k + 1] == 1", 5, "indexed by one to four"),
        ("score", "s[q]", 1, "has a meaning already"),
        ("score", "s + (q < k)", 6, "a number stands here"),
        ("score", "s < 1.0", 1, "a number stands here"),
        ("score", "s // 2", 1, "is of two integers"),
        ("score", "s / 0", 5, "divides by zero"),
        ("score", "s + 1e39", 5, "finite"),
        ("score", "s / 1e-38", 5, "take it as 0"),
        ("score", "sin(s)", 1, "unknown function sin"),
        ("score", "exp(s, 1)", 1, "takes 1 values"),
        ("score", "min(s)", 1, "two or more"),
        ("score", "s ** 2", 1, "not allowed"),
        ("score", "s + 'a'", 5, "not allowed"),
        ("score", "s + True", 5, "not allowed"),
        ("score", "(lambda: s)()", 1, "not allowed"),
        ("score", "s.real", 1, "not allowed"),
        ("score", "s +", None, "not an expression"),
        ("score", "s + é", 5, "ASCII"),
        ("score", "s\n", 2, "ASCII"),
        ("score", "s if s > 0 else (q < k)", 1, "one of its two values"),
        ("score", "s" + " + s" * 300, 1001, "characters"),
        ("score", "(" * 400 + "s" + ")" * 400, None, ""),
    ],
)
def test_faults(kind: str, text: str, column: int | None, word: str) -> None:
    with pytest.raises(Mistake) as fault:
        parsed(kind, text)
    assert word in fault.value.why
    assert column is None or fault.value.what.endswith(f", column {column}")


@pytest.mark.parametrize("empty", ["", "  ", None, 3])
def test_no_text(empty: object) -> None:
    with pytest.raises(Mistake, match="is a text of"):
        parsed("mask", empty)


def test_one_text() -> None:
    """Spaces and brackets that change nothing make no other formula."""
    assert parsed("mask", " (q-k)<3") == parsed("mask", "q - k < 3")
    assert parsed("mask", "q - k < 3").text == "q - k < 3"
    assert [(each.name, each.indices) for each in parsed("score", "s+doc[h]*slope[b,q]").tensors] == [
        ("doc", ("h",)),
        ("slope", ("b", "q")),
    ]
    assert parsed("score", "s+doc[h]*k").names == {"s", "h", "k"}


def _tree(random_: random.Random, type_: str, depth: int) -> str:
    """A random text of a type, with s in it only where real numbers are."""
    pick, sub = random_.random(), lambda kind: _tree(random_, kind, depth - 1)
    if type_ == "bool":
        if depth <= 1 or pick < 0.5:
            return (
                f"({_tree(random_, random_.choice(['integer', 'real']), depth - 1)} {random_.choice(['<', '>=', '!='])} {sub('integer')})"
            )
        return f"(not {sub('bool')})" if pick < 0.6 else f"({sub('bool')} {random_.choice(['and', 'or'])} {sub('bool')})"
    if depth <= 0:
        leaves = {"integer": [*"bhqk", "h_kv", "seq_q", "7", "2"], "real": ["s", "s", "0.37", "2.5"]}
        return random_.choice(leaves[type_])
    if pick < 0.15:
        return f"({sub(type_)} if {sub('bool')} else {sub(type_)})"
    if pick < 0.3:
        return f"{random_.choice(['min', 'max'])}({sub(type_)}, {sub(type_)})"
    if pick < 0.4:
        return f"abs({sub(type_)})"
    if pick < 0.45:
        return f"(-{sub(type_)})"
    if type_ == "integer":
        other = random_.choice(["3", "seq_kv"])
        return (
            f"({sub('integer')} {random_.choice(['//', '%'])} {other})"
            if pick < 0.6
            else f"({sub('integer')} {random_.choice('+-')} {sub('integer')})"
        )
    if pick < 0.6:
        return f"tanh({sub('real')})"
    if pick < 0.7:
        return f"{random_.choice(['exp', 'exp2'])}(tanh({sub('real')}))"
    if pick < 0.8:
        return f"({sub('real')} / (1.5 + abs({sub('real')})))"
    return f"({sub(random_.choice(['real', 'integer']))} {random_.choice('+-*')} {sub('real')})"


def _texts(kind: str, count: int, seed: int) -> list[str]:
    random_, found = random.Random(seed), list[str]()
    while len(found) < count:
        text = _tree(random_, {"mask": "bool", "score": "real"}[kind], random_.choice([2, 3, 4]))
        try:
            parsed(kind, text)
        except Mistake:  # a mask with a real number in it, a text that is too long
            continue
        found.append(text)
    return found


CHOSEN = ["50.0 * tanh(s / 50)", "s + exp2(-h - 1) * (k - q)", "s if s > 0 else 0.1 * s", "s * exp(-s / 9)", "abs(s) + min(s, 1)", "k / 2"]


def test_derivatives() -> None:
    """Against central differences, away from kinks: there the two one-sided ones differ."""
    step = 1e-6
    for text in CHOSEN + _texts("score", 60, 1):
        tree = parsed("score", text)
        found = np.broadcast_to(tree.derivative().value(np, NAMES | {"s": S}), SHAPE)
        low, here, high = (np.broadcast_to(tree.value(np, NAMES | {"s": S + d}), SHAPE) for d in (-step, 0, step))
        left, right = (here - low) / step, (high - here) / step
        size = 1 + np.abs(left) + np.abs(right)
        smooth = np.abs(left - right) < 1e-3 * size
        assert smooth.mean() > 0.9, text
        assert np.all((np.abs(found - (high - low) / (2 * step)) < 1e-3 * size)[smooth]), text


#: fa/score.cuh stands alone but for these words of CUDA.
_PROGRAM = """
#include <cmath>
#include <cstdio>
#define __device__
#define __forceinline__ inline
#define CAUSAL 0
float __uint_as_float(unsigned);
unsigned __float_as_uint(float);
using std::min; using std::max;
#include <fa/score.cuh>
namespace fa { namespace formula {
%s
}}
using fa::Visible;
using namespace fa::formula;
int main() {
%s
}
"""


def _printed(folder: Path, trees: list[formula.Formula], calls: list[str], words: str = "") -> list[str]:
    """The words that a program prints, whose of_i are the trees, after `words` of C++. It has the include folder's own types."""
    fields = ", ".join(f"I {name}" for name in ("b", "h", "q", "k", "h_kv", "seq_q", "seq_kv"))
    made = (f"template <class R, class I> auto of_{i}(R s, {fields}) {{ return {tree.cpp()}; }}" for i, tree in enumerate(trees))
    (folder / "it.cpp").write_text(_PROGRAM % ("\n".join((words, *made)), "\n".join(calls)))
    subprocess.run(["g++", "-std=c++17", "-O0", f"-I{INCLUDE}", "it.cpp", "-o", "it"], cwd=folder, check=True)
    return subprocess.run([folder / "it"], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_ranges(tmp_path: Path) -> None:
    """Of a tile, a mask's C++ says `may` where it is true for some pair and `must` only where it is for all; exactly for bands of keys."""
    bands = ("-2 <= q - k < 3", "k <= q", "abs(q - k) < 2", "q // 3 == k // 3 or k < 1", "k % 4 == 1", "not q < k")
    trees = [parsed("mask", text) for text in (*bands, *_texts("mask", 60, 5))]
    random_, boxes, calls = random.Random(7), list[tuple[int, int, slice, slice]](), list[str]()
    for i in range(len(trees)):
        for _ in range(6):
            b, h = random_.randrange(BATCH), random_.randrange(HEADS)
            (q, q_end), (k, k_end) = (sorted(random_.sample(range(n + 1), 2)) for n in (SEQ_Q, SEQ_KV))
            boxes.append((b, h, slice(q, q_end), slice(k, k_end)))
            points = ", ".join(f"Range({each})" for each in (h // GROUP, SEQ_Q, SEQ_KV))
            ranges = f"Range({b}), Range({h}), Range({q + 2}, {q_end + 1}), Range({k}, {k_end - 1}), {points}"
            calls.append(f'{{ Visible v = of_{i}<double>(0.0, {ranges}); std::printf("%d %d\\n", v.may, v.must); }}')
    found = np.array(_printed(tmp_path, trees, calls), int).reshape(-1, 2).astype(bool)
    sharp = 0
    for i, ((b, h, q, k), (may, must)) in enumerate(zip(boxes, found, strict=True)):
        tree = trees[i // 6]
        tile = np.broadcast_to(tree.value(np, NAMES), SHAPE)[b, h, q, k]
        assert may >= tile.any() and must <= tile.all(), tree.text
        exact = may == tile.any() and must == tile.all()
        assert exact or i // 6 >= 4, tree.text
        sharp += exact
    assert sharp > 0.7 * len(boxes)


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_cpp(tmp_path: Path) -> None:
    """What a C++ compiler makes of masks, scores and derivatives, in float64, is what numpy makes of them."""
    trees = [parsed("mask", text) for text in ("k % -3 == -1", "(k - 5) // 3 % 2 == 1", "1 < 3 > 2", *_texts("mask", 30, 2))]
    scores = [parsed("score", text) for text in CHOSEN + _texts("score", 40, 3)]
    trees += scores + [tree.derivative() for tree in scores]
    places = [(1, 3, 2, 4), (0, 0, 6, 0), (1, 2, 4, 5)]
    calls = []
    for i in range(len(trees)):
        for b, h, q, k in places:
            s = float(S[b, h, q - 2, k])
            calls.append(
                f'std::printf("%.17g\\n", double(of_{i}<double, long long>({s!r}, {b}, {h}, {q}, {k}, {h // GROUP}, {SEQ_Q}, {SEQ_KV})));'
            )
    got = np.array([float(text) for text in _printed(tmp_path, trees, calls)]).reshape(len(trees), -1)
    for tree, row in zip(trees, got, strict=True):
        whole = np.broadcast_to(tree.value(np, NAMES | {"s": S}), SHAPE)
        wanted = [float(whole[b, h, q - 2, k]) for b, h, q, k in places]
        assert np.allclose(row, wanted, rtol=1e-13, atol=1e-13), tree.text


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_folded(tmp_path: Path) -> None:
    """A folded score of s / scale is log2(e) times the score; what is the same for all pairs stands in one factor."""
    scores = [parsed("score", text) for text in (*CHOSEN, "2.0 * (s - 3.0 * tanh(s / 2 - 1)) / (h + 1)", *_texts("score", 40, 4))]
    places, scale = [(1, 3, 2, 4), (0, 0, 6, 0), (1, 2, 4, 5)], 0.125
    calls = [
        f'std::printf("%.17g\\n", of_{i}<double, long long>('
        f"{float(S[b, h, q - 2, k]) / scale!r}, {b}, {h}, {q}, {k}, {h // GROUP}, {SEQ_Q}, {SEQ_KV}));"
        for i in range(len(scores))
        for b, h, q, k in places
    ]
    words = "constexpr double scale = 0.125; double tanh(double slope, double x, double factor) { return factor * std::tanh(slope * x); }"
    got = np.array([float(text) for text in _printed(tmp_path, [tree.folded() for tree in scores], calls, words)]).reshape(len(scores), -1)
    for tree, row in zip(scores, got, strict=True):
        whole = np.broadcast_to(tree.value(np, NAMES | {"s": S}), SHAPE)
        wanted = [float(whole[b, h, q - 2, k]) * math.log2(math.e) for b, h, q, k in places]
        assert np.allclose(row, wanted, rtol=1e-12, atol=1e-12), tree.text
    capped, alibi = (parsed("score", text).folded(True).cpp() for text in ("50.0 * tanh(s / 50)", "s - exp2(-h) * abs(k - q)"))
    assert capped == "tanh((R(0.02)*scale),s,R(72.13475204444816))"
    caps = {
        text: parsed("score", text).softcap_log2() * math.log(2)
        for text in ("tanh(2 * s)", "50.0 * tanh(s / 50)", "tanh(s) + s", "tanh(s + 1)", "tanh(q * s)", "s")
    }
    assert {text: cap for text, cap in caps.items() if cap} == pytest.approx({"50.0 * tanh(s / 50)": 50, "tanh(2 * s)": 1})
    assert alibi == "(((R(1.4426950408889634)*scale)*s)-((R(1.4426950408889634)*exp2(real_of<R>((-h))))*real_of<R>((q-k))))"


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 40])
def test_alibi(heads: int) -> None:
    """The slopes are those of the paper's code, for a number of heads that is no power of two also."""

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return [2 ** (-8 * (i + 1) / n) for i in range(n)]
        whole = 2 ** math.floor(math.log2(n))
        return slopes(whole) + slopes(2 * whole)[0::2][: n - whole]

    score = parsed("score", formula.stated(heads, alibi=True)["score"])
    found = score.value(np, {"s": np.zeros(1), "h": np.arange(heads), "q": 0, "k": 1})
    np.testing.assert_allclose(-found, slopes(heads), rtol=1e-12)


def test_stated() -> None:
    """Masks hold together, each in brackets."""
    assert formula.stated(4, mask="k < 3 or b == 0", window=(5, 1), prefix=2) == {
        "mask": "(k < 3 or b == 0) and (-1 <= q - k <= 5) and (k <= q or k < 2)"
    }
    with pytest.raises(Mistake, match="score and softcap are 2 scores\nwhich comes first"):
        formula.stated(4, score="s", softcap=1.0)
    for cap in (0.0, -1.0, 1e-300, 1e-38, 3e38, 1e300, math.inf, math.nan):  # at 3e38 s / cap is flushed to 0, and so is every score
        with pytest.raises(Mistake, match=r"softcap is .*\nthe largest score is a number above 0, from 1e-30 to 1e\+30"):
            formula.stated(4, softcap=cap)
    assert formula.stated(4, softcap=1e-30) and formula.stated(4, softcap=1e30)
    for window in ((-1, -1), (5, -1), (-3, 5)):
        with pytest.raises(Mistake, match="-1, no limit in flash-attn"):
            formula.stated(4, window=window)


def test_language_is_told() -> None:
    """What a fault says that a text may hold has every word of it."""
    assert all(word in formula.LANGUAGES["score"] for word in ("s", *formula.INTEGERS, *formula.FUNCTIONS))
    assert all(word in formula.LANGUAGES["mask"] for word in formula.INTEGERS)
    assert math.isclose(parsed("score", "exp2(s)").derivative().value(np, {"s": np.asarray(1.0)}), 2 * math.log(2))


def test_named_forms_are_known_again() -> None:
    """A window and a border by what they say, a softcap by its one spelling; nothing else is taken for one."""
    for text, window, border, of_causal in (
        (formula.windowed(9), (9, 0), 9, 9),
        (formula.windowed(9, 3), (9, 3), None, 9),
        ("0 <= q - k < 9", (8, 0), 8, 8),
        ("q >= k and q - k <= 9", (9, 0), 9, 9),
        ("k <= q and q < 10 + k and 30 > -(k - q)", (9, 0), 9, 9),
        ("q - k <= 9", None, None, 9),
        ("q-k < 9", None, None, 8),
        ("0 <= q - k <= 2 and k < 3", None, None, None),
        ("q - k < 8 or h == 0", None, None, None),
        ("not q - k > 8", None, None, None),
        ("k - q < 8", None, None, None),
        ("q - k < 0", None, None, None),
        ("1 <= q - k <= 5", None, None, None),
        ("-q <= k", None, None, None),
        ("q - k - k <= 5", None, None, None),
        ("q - k <= seq_q", None, None, None),
        ("q * 1 - k <= 5", None, None, None),
        ("abs(q - k) <= 5", None, None, None),
    ):
        spelt = parsed("mask", text).text
        assert (formula.as_window(spelt), formula.as_border(spelt, False), formula.as_border(spelt, True)) == (window, border, of_causal), (
            text
        )
    spelt = {text: parsed("score", text).text for text in (formula.capped(30), "3.0 * tanh(s / 2.0)", "s", "2.0 * s")}
    assert [formula.as_softcap(text) for text in spelt.values()] == [30.0, None, None, None]
