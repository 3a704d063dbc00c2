"""attention() with masks and scores of its own, against float64 and its autograd: texts, named forms, tensors, documents."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.torch_op import attention, explain, masked  # noqa: E402

BATCH, HEADS, HEADS_KV, SEQ_Q, SEQ_KV, DIM = 2, 4, 2, 70, 90, 32
Q = torch.arange(SEQ_Q)[:, None] + SEQ_KV - SEQ_Q
K = torch.arange(SEQ_KV)[None, :]
SLOPE = torch.linspace(0.5, 0.01, HEADS)
BIAS = torch.randn(SEQ_Q, SEQ_KV, generator=torch.Generator().manual_seed(5))

#: The words of a call, which keys a query sees, and the score of s.
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "window": ({"window": 9}, (Q - K >= 0) & (Q - K <= 9), lambda s: s),
    "window of two sides, softcap": ({"window": (20, 5), "softcap": 3.0}, (Q - K >= -5) & (Q - K <= 20), lambda s: 3 * torch.tanh(s / 3)),
    "mask, causal": ({"mask": "k % 7 != 3 or q < 30", "causal": True}, ((K % 7 != 3) | (Q < 30)) & (K <= Q), lambda s: s),
    "slopes": (
        {"score": "s + slope[h] * (k - q)", "tensors": {"slope": SLOPE}, "causal": True},
        K <= Q,
        lambda s: s + SLOPE[:, None, None].double() * (K - Q),
    ),
    "bias": ({"score": "s + bias[q, k]", "tensors": {"bias": BIAS}}, K >= 0, lambda s: s + BIAS.double()),
    "boolean mask": (
        {"mask": "seen[q, k] == 1", "tensors": {"seen": BIAS > 0}},
        BIAS > 0,
        lambda s: s,
    ),
}


def inputs(dtype: Any = torch.float32) -> list[Any]:
    make = torch.Generator().manual_seed(3)
    shapes = [(HEADS, SEQ_Q), (HEADS_KV, SEQ_KV), (HEADS_KV, SEQ_KV), (HEADS, SEQ_Q)]
    return [torch.randn(BATCH, heads, rows, DIM, generator=make).to(dtype) for heads, rows in shapes]


def exact(q: Any, k: Any, v: Any, visible: Any, score: Any) -> tuple[Any, Any]:
    """O and logsumexp in float64. A row that sees nothing gives 0 and -inf."""
    k, v = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v))
    s = score(q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return p @ v, lse


@pytest.mark.parametrize("kernel", ["fa2", "naive"])
@pytest.mark.parametrize("case", CASES)
def test_against_float64(case: str, kernel: str) -> None:
    """O, logsumexp and the gradients by both outputs."""
    words, visible, score = CASES[case]
    q, k, v, do = inputs()
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    theirs = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = attention(*ours, kernel=kernel, return_lse=True, **words)
    o64, lse64 = exact(*theirs, visible, score)
    weights = torch.linspace(-1, 1, SEQ_Q)
    (o * do).sum().add((lse * weights).sum()).backward()
    (o64 * do).sum().add((lse64 * weights).sum()).backward()
    for one, other in ((o, o64), (lse, lse64), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("words", [{"window": 9}, {"causal": True}, {"mask": "q > 40"}], ids=str)
def test_sinks(words: dict[str, Any]) -> None:
    """A logit of each head in the row sum, and its gradient; of rows that see nothing logsumexp is the sink."""
    q, k, v, do = inputs()
    visible = {"window": (Q - K >= 0) & (Q - K <= 9), "causal": K <= Q, "mask": (Q > 40) & (K >= 0)}[next(iter(words))]
    ours = [t.clone().requires_grad_() for t in (q, k, v, SLOPE)]
    theirs = [t.double().requires_grad_() for t in (q, k, v, SLOPE)]
    o, lse = attention(*ours[:3], kernel="fa2", sinks=ours[3], return_lse=True, **words)
    keys, values = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in theirs[1:3])
    s = (theirs[0] @ keys.transpose(-1, -2) * DIM**-0.5).masked_fill(~visible, -torch.inf)
    whole = torch.cat([s, theirs[3][:, None, None].expand(BATCH, HEADS, SEQ_Q, 1)], -1)
    o64, lse64 = whole.softmax(-1)[..., :-1] @ values, whole.logsumexp(-1)
    (o * do).sum().add(lse.sum()).backward()
    (o64 * do).sum().add(lse64.sum()).backward()
    for one, other in ((o, o64), (lse, lse64), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("kernel", ["hopper", "hopper+hopper_keys", "mma_qreg_async"])
@pytest.mark.parametrize(
    "words", [{}, {"window": 9, "tensors": None}, {"score": "s + slope[h] * (k - q)", "tensors": {"slope": SLOPE}}], ids=str
)
def test_sinks_that_the_kernel_adds(monkeypatch: pytest.MonkeyPatch, kernel: str, words: dict[str, Any]) -> None:
    """O, logsumexp and all gradients, that of logsumexp too, are those of sinks that are added behind it; nothing is added behind it here."""
    given, do = inputs(torch.bfloat16)[:3], inputs(torch.bfloat16)[3]
    found = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if fused:
                patch.delattr(masked, "with_sinks")
            else:
                patch.setattr(masked, "_takes_sinks", lambda *_: False)
            leaves = [t.clone().requires_grad_() for t in (*given, SLOPE)]
            o, lse = attention(*leaves[:3], kernel=kernel, sinks=leaves[3], return_lse=True, **words)
            found.append((o, lse, *torch.autograd.grad((o.float() * do).sum() + (lse * torch.linspace(-1, 1, SEQ_Q)).sum(), leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.detach().abs().max()))
    off = attention(*given, kernel=kernel, return_lse=True, **words)[1]
    assert float((found[0][1] - off).detach().abs().max()) > 0.01


def test_documents() -> None:
    """cu_seqlens, in a tensor or a list: the same as one call for each document."""
    q, k, v, _ = (t[:, :, :SEQ_Q] for t in inputs(torch.bfloat16))
    whole = attention(q, k, v, kernel="fa2", causal=True, documents=torch.tensor([0, 11, 40, SEQ_Q], dtype=torch.int32))
    assert torch.equal(whole, attention(q, k, v, kernel="fa2", causal=True, documents=[0, 11, 40, SEQ_Q]))
    for first, last in ((0, 11), (11, 40), (40, SEQ_Q)):
        part = attention(*(t[:, :, first:last] for t in (q, k, v)), kernel="fa2", causal=True)
        torch.testing.assert_close(whole[:, :, first:last], part, rtol=1e-2, atol=1e-2)


SAME = torch.randn(3, 1, 2, 60, 16, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("borders", "said", "hint"),
    [
        ([0, 30, 50], r"documents are \[0, 30, 50\], for 60 rows", "documents="),
        ([0, 50, 30, 60], "they rise from 0", "documents="),
        ([5, 60], "they rise from 0", "documents="),
        ([0, 30, 70], "the number of rows, 60", "documents="),
        (torch.zeros(60).int(), r"\[0, 0, 0, …, 0, 0\]", "look like the document of each position"),
        (torch.arange(60) // 20, r"\[0, 0, 0, …, 2, 2\]", "look like the document of each position"),
        ((torch.arange(60) // 20).expand(1, 60), "cu_seqlens", 'mask="doc'),
        ([0.0, 60.0], "cu_seqlens", "documents="),
        (torch.tensor([False, True]), "cu_seqlens", "documents="),
        ("0 20 60", "documents is '0 20 60'", "documents="),
        ([[0], [1, 2]], "cu_seqlens", "documents="),
        ([], "cu_seqlens", "documents="),
    ],
)
def test_wrong_borders(borders: Any, said: str, hint: str) -> None:
    """Borders that do not cover the rows would give wrong documents without an error; explain says the same."""
    for function in (attention, explain):
        with pytest.raises(ValueError, match=said) as raised:
            function(*SAME, kernel="fa2", documents=borders)
        assert hint in str(raised.value).splitlines()[-1]


def test_borders_of_a_compiled_call() -> None:
    """They are looked at where the call runs. An empty document is one; the bits are those of a plain call."""
    torch.compiler.reset()
    compiled = torch.compile(lambda borders: attention(*SAME, kernel="fa2", documents=borders), backend="aot_eager", fullgraph=True)
    borders = torch.tensor([0, 30, 30, 60])
    assert torch.equal(compiled(borders), attention(*SAME, kernel="fa2", documents=[0, 30, 60]))
    with pytest.raises(ValueError, match="they rise from 0"):
        compiled(borders.flip(0))


@pytest.mark.parametrize("of", [1, -1])
def test_borders_of_a_gpu_are_looked_at_once(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that nobody wrote to is known; a version of it, another length, and every inference tensor are not."""

    class Cuda(torch.Tensor):
        is_cuda = property(lambda self: True)  # type: ignore[assignment]

    seen: list[int] = []
    monkeypatch.setattr(masked, "is_capturing", lambda: False)
    monkeypatch.setattr(masked, "packed", lambda borders, length: seen.append(length))
    borders = torch.tensor([0, 60]).as_subclass(Cuda)
    with torch.inference_mode(of < 0):
        borders = borders.clone() if of < 0 else borders
    for length in (60, 60, 70, 60):
        masked._documents(borders, 1, length)
    borders.add_(0) if of > 0 else None
    masked._documents(borders, 1, 60)
    assert seen == ([60, 70, 60, 60] if of > 0 else [60, 60, 70, 60, 60])
    monkeypatch.setattr(masked, "is_capturing", lambda: True)
    masked._documents(torch.tensor([0, 60]).as_subclass(Cuda), 1, 60)
    assert len(seen) == (4 if of > 0 else 5)


@pytest.mark.parametrize("words", [{"window": (-1, -1)}, {"window": -1}, {"window": (-3, 5)}, {"window": [5, -1]}], ids=str)
def test_no_window_is_no_argument(words: dict[str, Any]) -> None:
    """-1, flash-attn's side without a limit, hid every key without an error."""
    for function in (attention, explain):
        with pytest.raises(ValueError, match="(?s)window is .*-1, no limit in flash-attn.*hint: leave it out"):
            function(*SAME, kernel="fa2", **words)


def test_explain_takes_what_attention_takes() -> None:
    """Every argument, and the kernel that runs is the one it names."""
    of = {function: inspect.signature(function).parameters for function in (attention, explain)}
    assert of[explain].keys() >= of[attention].keys() - {"others"}
    q, k, v, _ = inputs()
    sinks = torch.zeros(HEADS)
    for words, *_ in CASES.values():
        told = explain(q, k.requires_grad_(), v, sinks=sinks, return_lse=True, **words)
        assert {chosen.kernel for chosen in told.passes.values()} == {"fa2"} and len(told.passes) == 2
        assert "split" in told.passes["forward"].above and "--" not in str(replace(told, verbose=True))
        assert told.planned.startswith("an H200's sms = 132") or q.is_cuda
    assert explain(*SAME, documents=[0, 20, 60], mask=lambda b, h, q, k: q - k < 5).passes["forward"].kernel == "fa2"
    assert explain(*SAME).passes["forward"].kernel != "naive" == explain(*SAME, window=5, kernel="naive").passes["forward"].kernel
    for words, said in (
        ({"window": 5, "kernel": "mma"}, "does not"),
        ({"score": "s + slope[h]"}, "no values for slope"),
        ({"softcap": 0}, "above 0"),
    ):
        with pytest.raises(ValueError, match=said):
            explain(*SAME, **words)
    with pytest.raises(TypeError, match="explain\\(\\) takes no window beside is_causal"):
        explain(*SAME, window=5, is_causal=True)


def test_a_function_inside_fullgraph_says_what_to_do() -> None:
    """torch.compile cannot trace symbols through a function: a text it takes."""
    torch.compiler.reset()
    function, text = ({"kernel": "fa2", "mask": mask} for mask in (lambda b, h, q, k: q - k < 5, "q - k < 5"))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="write it as a text"):
        torch.compile(lambda q: attention(q, q, q, **function), backend="eager", fullgraph=True)(SAME[0])
    compiled = torch.compile(lambda q: attention(q, q, q, **text), backend="eager", fullgraph=True)
    assert torch.equal(compiled(SAME[0]), attention(SAME[0], SAME[0], SAME[0], **function))


def test_values_are_those_of_the_call() -> None:
    """The same text with other values is another answer, and compiles nothing; auto finds a kernel, torch.compile takes the operator."""
    q, k, v, _ = inputs()
    words = {"score": "s + slope[h] * (k - q)", "causal": True}
    one, two = (attention(q, k, v, kernel="fa2", tensors={"slope": SLOPE * factor}, **words) for factor in (1, 2))
    assert not torch.allclose(one, two)
    assert torch.equal(attention(q, k, v, tensors={"slope": SLOPE}, **words), one)
    compiled = torch.compile(lambda q, slope: attention(q, k, v, kernel="fa2", tensors={"slope": slope}, **words), backend="aot_eager")
    assert torch.equal(compiled(q, SLOPE), one)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"mask": "q - x < 3"}, "column 5"),
        ({"mask": "q < 3", "causal": True, "causal_shift": 0}, "causal_shift beside"),
        ({"score": "s + slope[h]"}, "no values for slope"),
        ({"score": "s + slope[h]", "tensors": {"slope": SLOPE[:2]}}, "has the shape"),
        ({"score": "s + slope[h]", "tensors": {"slope": SLOPE, "bias": SLOPE}}, "names bias"),
        ({"score": "s + slope[h]", "tensors": {"slope": SLOPE.clone().requires_grad_()}}, "no gradient flows to slope"),
        ({"mask": "slope[h] > 0", "tensors": {"slope": SLOPE}}, "takes integers"),
        ({"window": 3, "kernel": "mma"}, "does not support a mask"),
        ({"tensors": {"slope": SLOPE}}, "without a mask or score"),
        ({"window": 3, "tensors": {"slope": SLOPE}}, "names slope.*\n.*no tensor"),
        ({"documents": [0, SEQ_KV]}, "documents with 70 queries and 90 keys"),
        ({"sinks": SLOPE[:2]}, "a logit of each query head"),
        ({"sinks": SLOPE.to("meta")}, "sinks are on meta, q on cpu"),
        ({"softcap": 0.0}, "above 0"),
        ({"softcap": 1.0, "score": "s"}, "which comes first"),
    ],
)
def test_refusals(words: dict[str, Any], said: str) -> None:
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=said):
        attention(q, k, v, **{"kernel": "fa2", **words})


@pytest.mark.parametrize("words", [{"window": 8}, {"sinks": SLOPE}, {"mask": "k <= q", "sinks": SLOPE}], ids=str)
def test_derivatives_that_are_not_there_are_errors(words: dict[str, Any]) -> None:
    """As without words: of the second derivative, forward mode and torch.func.grad, never zero or torch's own words. Sinks have forward mode."""
    q, k, v, _ = inputs()
    x = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(attention(x, k, v, kernel="fa2", **words).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: attention(q, k, v, kernel="fa2", **words), (q,), (q,))
    with pytest.raises(RuntimeError, match="no derivative for torch.func"):
        torch.func.grad(lambda q: attention(q, k, v, kernel="fa2", **words).sum())(q)
    if "sinks" in words:
        x, one = SLOPE.clone().requires_grad_(), torch.ones_like(SLOPE)
        (dsinks,) = torch.autograd.grad(attention(q, k, v, kernel="fa2", **{**words, "sinks": x}).sum(), x)
        with torch.autograd.forward_ad.dual_level():
            words = {**words, "sinks": torch.autograd.forward_ad.make_dual(SLOPE, one)}
            tangent = torch.autograd.forward_ad.unpack_dual(attention(q, k, v, kernel="fa2", **words)).tangent
        torch.testing.assert_close(tangent.sum(), dsinks.sum(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["naive", "fa2", "split", "hopper"])  # split has no sinks: they are added from O and logsumexp
def test_a_sink_of_minus_infinity_is_none(kernel: str) -> None:
    """Also in rows that see no key: all is as without sinks, and dsinks is 0."""
    q, k, v = (t.to(torch.bfloat16 if kernel == "hopper" else torch.float32) for t in inputs()[:3])
    k, v, sinks = k[:, :, :40], v[:, :, :40], torch.full((HEADS,), -torch.inf)
    found = {}
    for name, words in {"": {}, "sinks": {"sinks": sinks.requires_grad_()}}.items():
        given = [t.detach().requires_grad_() for t in (q, k, v)]
        o, lse = attention(*given, causal=True, kernel=kernel, return_lse=True, **words)
        found[name] = [o, lse, *torch.autograd.grad(o.float().square().sum(), [*given, *words.values()])]
    assert (
        all(torch.equal(one, other) for one, other in zip(found[""], found["sinks"], strict=False)) and (found[""][1] == -torch.inf).any()
    )
    assert not found["sinks"][-1].any()
