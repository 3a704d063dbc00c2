"""Header expressions: the values they have, and that nothing else is an expression."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fault import UsageFault
from harness.kernel import Device, Kernel, planner
from harness.kernel import expression as language
from harness.kernel.expression import ExpressionError, evaluate
from harness.kernel.new import new as new_kernel
from harness.problem import Problem

NAMES = {"seq_q": 100, "BLOCK_Q": 64, "HEAD_DIM": 128, "causal": 0, "batch": 3}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("7", 7),
        ("ceil_div(seq_q, BLOCK_Q) * batch", 6),
        ("round_up(seq_q, 16)", 112),
        ("floor_pow2(seq_q)", 64),
        ("176 if HEAD_DIM == 128 and not causal else 128", 176),
        ("176 if HEAD_DIM == 128 and causal else 128", 128),
        ("1 < 2 < 3", 1),
        ("1 < 3 < 2", 0),
        ("HEAD_DIM > 64 or batch", 1),
        ("min(seq_q, BLOCK_Q, 3) + max(1, 2)", 5),
        ("-seq_q // 7 % 4", -100 // 7 % 4),
    ],
)
def test_values(expression: int | str, value: int) -> None:
    """Arithmetic, comparisons, and the functions, as Python has them; always an integer."""
    found = evaluate(expression, NAMES)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("seq", "unknown name 'seq'"),
        ("1 +", "not an expression"),
        ("1 // (batch - 3)", "divides by zero"),
        ("seq_q % 0", "divides by zero"),
        ("__import__('os')", "not allowed"),
        ("seq_q.real", "not allowed"),
        ("2 ** 99999999", "not allowed"),
        ("1 / 2", "not allowed"),
        ("1.5", "not allowed"),
        ("'a'", "not allowed"),
        ("[1][0]", "not allowed"),
        ("(lambda: 1)()", "not allowed"),
        ("min(a=1)", "not allowed"),
        ("(x := 1)", "not allowed"),
        ("ceil_div(1)", "ceil_div"),
        ("min(1)", "min"),
        ("floor_pow2(0)", "floor_pow2"),
        ("floor_pow2(-8)", "floor_pow2"),
        ("", "not an expression"),
        ("1\0", "not an expression"),
        pytest.param("(" * 5000 + "1" + ")" * 5000, "nested too deeply|not an expression", id="brackets"),
        pytest.param("1" + " + 1" * 20000, "nested too deeply", id="a long sum"),
        pytest.param("not " * 3000 + "1", "nested too deeply", id="many nots"),
        ("4611686018427387904 * 2", "beyond 64 bits"),
    ],
)
def test_everything_else_is_refused(expression: str, word: str) -> None:
    """Nothing but the small language is evaluated, and what is wrong is named."""
    with pytest.raises(ExpressionError, match=word):
        evaluate(expression, NAMES)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("seq_q, 4", "seq_q, rows", 13),
        ("ceil_div(seq_q, 4)", "ceildiv(seq_q, 4)", 13),
        ("block = 128", 'block = "1 / 2"', 14),
        ("block = 128", "block = -128", 14),
        ("block = 128", "block = 128\n// shared = '1 / 2'", 1 + 1),
    ],
    ids=["a name", "a function", "an operator", "a number", "a text in other quotes"],
)
def test_a_wrong_expression_has_its_line(old: str, new: str, line: int, tmp_path: Path) -> None:
    """And the message says what an expression may hold. In other quotes it is not found: the header's first line."""
    path = new_kernel("mine", folder=tmp_path, plain=True)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageFault) as caught:
        planner.plan(Kernel.read(path), Problem.of(1, 1, 8, 64), Device("cpu", "a CPU"))
    assert caught.value.what.startswith(f"{path}:{line}: "), caught.value.what
    assert "ceil_div, round_up, floor_pow2, min, max" in caught.value.why


def test_an_expression_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And evaluated again with other names; what is wrong with it is told every time."""
    text = "ceil_div(seq_q, BLOCK_Q) + 17 * batch"
    assert evaluate(text, NAMES) == 53
    monkeypatch.setattr(language.ast, "parse", lambda *given, **more: pytest.fail("parsed again"))
    assert evaluate(text, NAMES | {"batch": 4}) == 70
    for _ in range(2):
        with pytest.raises(ExpressionError, match="unknown name 'batch'"):
            evaluate(text, {"seq_q": 1, "BLOCK_Q": 1})
    assert 0 < (language._parsed.cache_info().maxsize or 0) <= 4096
