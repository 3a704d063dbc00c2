"""What the operator says to a caller in Python: what, why and a hint, without an option of the command line."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from harness.fault import UsageFault  # noqa: E402
from harness.kernel import new  # noqa: E402
from harness.torch_op import attention, call, explain, sdpa  # noqa: E402
from harness.torch_op.sdpa import TORCH_SDPA  # noqa: E402
from harness.torch_op.words import in_python, told  # noqa: E402

Q = torch.randn(1, 2, 9, 8)
WANTS = Q.clone().requires_grad_()
HALF = Q.bfloat16()

WRONG = [
    ((Q.numpy(), Q, Q), {}, TypeError, "q is a ndarray", "torch.from_numpy"),
    ((Q, None, Q), {}, TypeError, "k is a NoneType", "torch.as_tensor"),
    ((Q.to_sparse(),) * 3, {}, ValueError, "q is a tensor of torch.sparse_coo", "to_dense"),
    ((Q[0],) * 3, {}, ValueError, "q, k and v have the shapes", "unsqueeze"),
    ((Q, Q, Q[:, :, :5]), {}, ValueError, "k and v must have one shape", "sdpa"),
    ((Q[:, :, :4], *(Q.transpose(1, 2)[:, :4],) * 2), {}, ValueError, "heads_kv must divide heads_q", r"transpose\(1, 2\)"),
    ((Q, HALF, HALF), {}, ValueError, "one dtype", r"k.to\(q\)"),
    ((Q.int(),) * 3, {}, ValueError, "torch.int32", "bfloat16"),
    ((Q,) * 3, {"kernel": "hopper"}, ValueError, "does not take float32", r"q.to\(torch.float16\)"),
    ((Q,) * 3, {"kernel": "hoper"}, ValueError, "unknown kernel 'hoper'", r"did you mean hopper\?"),
    ((Q,) * 3, {"kernel": "fa3"}, ValueError, "fa3 is no kernel of ours", "fa-cli list"),
    ((Q,) * 3, {"kernel": ("fa2", "split")}, TypeError, "kernel is a tuple", r"fa2"),
    ((Q,) * 3, {"scale": "x"}, ValueError, "a number, not a str", "leave it out"),
    ((Q,) * 3, {"scale": True}, ValueError, "a number, not a bool", "leave it out"),
    ((Q,) * 3, {"scale": torch.ones(3)}, ValueError, r"the shape \(3,\)", "leave it out"),
    ((Q,) * 3, {"scale": torch.tensor(0.1, requires_grad=True)}, ValueError, "wants a gradient", r"q \* scale"),
    ((Q,) * 3, {"scale": float("inf")}, ValueError, "must be finite", "leave scale out"),
    ((Q,) * 3, {"causal": "yes"}, ValueError, "causal is 'yes'", "use True or False"),
    ((Q,) * 3, {"causal_shift": 1}, ValueError, "without causal=True", "causal=True"),
    ((torch.randn(1, 1, 4, 512),) * 3, {}, ValueError, "the widest is 256", "sdpa"),
    ((torch.randn(1, 1, 4, 512),) * 3, {"kernel": "fa2"}, ValueError, "widest compiled head dim is 128", "a smaller dim"),
    ((Q,) * 3, {"is_causal": True}, TypeError, "attention calls it causal.*bottom-right", "sdpa"),
    ((Q,) * 3, {"attn_mask": None}, TypeError, "has masks as texts and functions", "mask=.*sdpa"),
    ((Q,) * 3, {"block_mask": None}, TypeError, "is enough", "mask=mask_mod"),
    ((Q,) * 3, {"softmax_scale": 0.1}, TypeError, "it is called scale here", "scale=0.125"),
    ((Q,) * 3, {"window_size": (-1, -1)}, TypeError, "it is called window here", r"leave it out where flash-attn has \(-1, -1\)"),
    ((Q,) * 3, {"cu_seqlens_q": [0, 9]}, TypeError, "it is called documents here", "documents=cu_seqlens"),
    ((Q, Q, Q, True), {}, TypeError, r"attention\(\) got True after q, k and v", "name it: causal, scale, kernel"),
    ((Q,) * 3, {"deterministic": "no"}, ValueError, "deterministic is 'no'", "use True or False"),
    ((Q,) * 3, {"return_lse": "no"}, ValueError, "return_lse is 'no'", "use True or False"),
    ((Q,) * 3, {"causal": True, "causal_shift": [1]}, ValueError, r"causal_shift is \[1\]", "use an integer"),
    *(((Q,) * 3, {"window": window}, ValueError, "it is L or", "window=128") for window in (2.5, (1, 2, 3), (5, None), torch.tensor(5), True, "5")),
    *(((Q,) * 3, {"softcap": softcap}, ValueError, "softcap is .*it is a number", "softcap=50.0") for softcap in ("5", True, [1.0])),
    ((Q,) * 3, {"softcap": -1.0}, ValueError, "above 0", "softcap 50"),
    *(((Q,) * 3, {"sinks": sinks}, TypeError, "a torch tensor, a logit of each query head", r"torch.zeros\(2\)") for sinks in (1.0, [1.0, 1.0])),
    ((torch.randn(2, 3, 4),) * 3, {"sinks": torch.ones(2)}, ValueError, r"have the shapes \(2, 3, 4\)", r"unsqueeze\(0\)"),
    ((Q,) * 3, {"sinks": torch.ones(2).int()}, ValueError, "a tensor of torch.int32", "real numbers"),
    ((Q,) * 3, {"sinks": torch.ones(3)}, ValueError, r"the shape \(3,\)", r"the shape \(2,\)"),
    ((Q,) * 3, {"window": 5, "tensors": [1]}, ValueError, r"tensors is \[1\]", "tensors={"),
    ((Q,) * 3, {"score": "s + b2[h]", "tensors": {"b2": 3.0}}, TypeError, "b2 of tensors is 3.0", "torch.as_tensor"),
    ((Q,) * 3, {"mask": torch.ones(9, 9).bool()}, ValueError, r"mask is a tensor of torch.bool with the shape \(9, 9\)", "sdpa.*tensors="),
    ((Q,) * 3, {"score": Q}, ValueError, "a score is a text or a function", "tensors="),
    ((Q,) * 3, {"mask": 3}, ValueError, "a mask is a text or a function", "leave mask out"),
    ((Q,) * 3, {"score": "s", "softcap": 3.0}, ValueError, "score and softcap are 2 scores", "write one score of them"),
    ((WANTS.half(), HALF.half(), HALF.half()), {"window": 5, "kernel": "mma"}, ValueError, "mma_forward does not support a mask", "use naive or fa2 or .*hopper"),
    ((Q,) * 3, {"kernel": "fa2+fa2+fa2"}, ValueError, "unknown kernel", "a pair as FORWARD"),
    ((Q,) * 3, {"kernel": "./mine_forward.cu+"}, ValueError, "no kernel file", "a pair as FORWARD"),
    ((Q,) * 3, {"kernel": "./"}, ValueError, "./ cannot name a kernel", "a path ending in .cu"),
    ((Q,) * 3, {"dropout_p": 0.1}, TypeError, "no kernel has it", "sdpa takes it"),
    ((Q,) * 3, {"cusal": True}, TypeError, "unexpected keyword argument 'cusal'", "did you mean causal"),
    ((Q,) * 3, {"kernel": "./nowhere_forward.cu"}, ValueError, "it is not in /", "^hint: fa-cli new nowhere --from fa2 --pass forward writes one$"),
    ((WANTS, Q, Q), {"kernel": "nowhere.cu"}, ValueError, "it is not in /", "^hint: fa-cli new NAME"),
    ((WANTS, Q, Q), {"kernel": "fa1"}, ValueError, "fa1 has no backward pass", r"fa1\+split; without one torch.no_grad"),
    ((WANTS, Q, Q), {"kernel": "fa2+./nowhere_backward.cu"}, ValueError, "it is not in /", "fa-cli new nowhere --from fa2 --pass backward"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "kind", "says", "hint"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_says_what_to_do(given: Any, options: dict[str, Any], kind: type[Exception], says: str, hint: str) -> None:
    """What and why, and after a hint what a caller in Python can do."""
    with pytest.raises(kind) as raised:
        attention(*given, **options)
    text = str(raised.value)
    assert re.search(f"(?s){says}", text) and re.search(hint, text.splitlines()[-1]) and text.splitlines()[-1].startswith("hint: "), text
    assert "--" not in re.sub("fa-cli [^;,\n]*", "", text), text


def test_the_other_functions_too() -> None:
    """sdpa and explain."""
    for function, options, says in (
        (sdpa, {"causal": True}, "sdpa has torch's names\nhint: is_causal=True, which is aligned top-left"),
        (sdpa, {"return_lse": True}, "hint: .*attention"),
        (explain, {"attn_bias": True}, "hint: it takes q, k, v, causal"),
    ):
        with pytest.raises(TypeError, match=says):
            function(Q, Q, Q, **options)
    with pytest.raises(ValueError, match="(?s)a number, not a str.*hint"):
        explain(Q, Q, Q, scale="x")
    call._said.clear()
    with pytest.warns(UserWarning, match="ndarray"), pytest.raises(TypeError, match="must be Tensor, not numpy.ndarray"):
        sdpa(Q.numpy(), Q, Q)  # torch's own error


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors() -> None:
    """One error, in place of torch's table of dispatch keys."""
    nested = torch.nested.nested_tensor([Q[0, 0], Q[0, 1, :5]])
    attention(Q, Q.clone(), Q.clone())  # a call that is kept: torch's guard, which later ones ask, takes no nested tensors
    with pytest.raises(ValueError, match="q is a nested tensor\n.*\nhint: q.to_padded_tensor"):
        attention(nested, nested, nested)


def test_a_scale_may_be_a_tensor() -> None:
    """Of no dimensions, as torch's own takes it; also an integer and numpy's numbers; in a compiled call a Python number of each kind."""
    expected = attention(Q, Q, Q, scale=0.5)
    for scale in (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), np.float32(0.5)):
        assert torch.equal(attention(Q, Q, Q, scale=scale), expected) and torch.equal(sdpa(Q, Q, Q, scale=scale), expected)
    for scale in (2, 0.5):
        torch.compiler.reset()
        compiled = torch.compile(lambda q, scale=scale: attention(q, q, q, scale=scale), fullgraph=True, backend="eager")
        assert torch.equal(compiled(Q), attention(Q, Q, Q, scale=float(scale)))


def test_a_warning_points_to_the_caller() -> None:
    """Through torch's own files, to the line that called a layer of torch's."""
    call._said.clear()
    attend = torch.nn.MultiheadAttention(16, 2, 0.1)
    x = torch.randn(5, 2, 16)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
        attend(x, x, x, need_weights=False)
    (warning,) = (each for each in caught if "fa_cli.sdpa" in str(each.message))
    assert warning.filename == __file__ and "dropout_p=0.0" in str(warning.message)


def test_commands_stay_as_they_are() -> None:
    """Of the command line's words only those outside of a command change, and of another program's text none."""
    assert (
        in_python("use --dtype float16, or fa-cli run --check asan") == "use q.to(torch.float16), k and v too, or fa-cli run --check asan"
    )
    assert in_python("does not support grouped heads (--kv-heads)") == "does not support grouped heads"
    assert in_python("use a smaller --batch, --heads or --seq") == "use a smaller batch, heads or seq"
    assert told(UsageFault("a", "b --scale", "use --device cpu")) == "a\nb scale\nhint: use CPU tensors"


# -- what goes to torch's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_says_too_what_goes_to_torch(device: Any, backend: str) -> None:
    """Once, when it is traced, and at the line of the caller; with fullgraph."""
    q, k, v = torch.randn(3, 1, 2, 9, 8, device=device)
    mask = torch.ones(9, 9, device=device, requires_grad=True)
    torch.compiler.reset()
    call._said.clear()
    compiled = torch.compile(lambda q: sdpa(q, k, v, attn_mask=mask), fullgraph=True, backend=backend)
    with pytest.warns(
        UserWarning, match="fa_cli.sdpa leaves a call to torch's own: a gradient of attn_mask .*is_causal=True.*explain"
    ) as told:
        found = compiled(q)
    assert [Path(each.filename).name for each in told if "fa_cli" in str(each.message)] == [Path(__file__).name]
    assert torch.allclose(found, TORCH_SDPA(q, k, v, attn_mask=mask), atol=1e-6)
    compiled(q)  # said once: another warning would be an error
    call._said.clear()
    with pytest.warns(UserWarning, match="dropout is not covered"):
        torch.compile(lambda q: sdpa(q, k, v, dropout_p=0.5), fullgraph=True, backend=backend)(q)


@pytest.mark.filterwarnings("ignore:.*leaves a call to torch's own:UserWarning")
def test_what_the_patch_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/pytorch.md has it: MultiheadAttention without its weights, and in evaluation only without torch's fast path."""
    x, seen = torch.randn(2, 5, 16), []
    attend, layer = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *q, **options: seen.append(1) or sdpa(*q, **options))

    def calls(gradients: bool) -> list[int]:
        """Of both with their defaults, and of MultiheadAttention without weights."""
        found = []
        with torch.set_grad_enabled(gradients):
            for call_ in (lambda: attend(x, x, x), lambda: layer(x), lambda: attend(x, x, x, need_weights=False)):
                seen.clear()
                call_()
                found.append(len(seen))
        return found

    assert calls(True) == [0, 1, 1]
    for module in (attend, layer):
        module.eval()
    assert calls(True) == [0, 1, 1] and calls(False) == [0, 0, 0]
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert calls(False) == [0, 1, 1]
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_explain_says_what_torch_refuses_too(device: Any) -> None:
    """A call that neither takes has no backend, but torch's error, as the call has."""
    q, k, v = torch.randn(3, 1, 2, 9, 8, device=device)
    wider = torch.cat((q, q), 1)
    told = explain(wider, k, v, is_causal=False)
    call._said.clear()
    with pytest.warns(UserWarning, match="enable_gqa=True"), pytest.raises(RuntimeError) as raised:
        sdpa(wider, k, v)
    assert (told.by, told.backend, told.passes, told.error) == ("torch", "", {}, str(raised.value).partition("\n")[0])
    assert str(told).startswith("nothing: ") and f"torch's own refuses it: {told.error}" in str(told)
    assert explain(q, k, v, attn_mask=torch.ones(9, 5, device=device)).error  # other words on each device


# -- a file of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with mine_forward.cu, as `fa-cli new mine --from naive --pass forward` writes it."""
    monkeypatch.chdir(tmp_path)
    new.new("mine", "naive")
    return tmp_path


def test_a_forward_file_with_the_ladders_backward_pass(mine: Path) -> None:
    """ "./mine_forward.cu+fa2": each of the two a path or a name, and the file is read again when it has changed."""
    expected = [attention(WANTS, Q, Q, kernel="naive")]
    expected += torch.autograd.grad(expected[0].sum(), WANTS)
    for kernel in ("./mine_forward.cu+fa2", "mine_forward.cu+07", f"{mine}/mine_forward.cu+naive", "naive+mine_backward.cu"):
        if kernel.startswith("naive"):
            new.new("mine", "naive", "backward")
        o = attention(WANTS, Q, Q, kernel=kernel)
        for one, other in zip([o, *torch.autograd.grad(o.sum(), WANTS)], expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6), kernel
    file = mine / "mine_forward.cu"
    text = file.read_text()
    assert "args.scale" in text
    file.write_text(text.replace("args.scale", "0.0f") + "\n")
    assert torch.allclose(attention(WANTS, Q, Q, kernel="./mine_forward.cu+fa2"), Q.mean(2, keepdim=True).expand_as(Q), atol=1e-6)


def test_a_file_without_a_backward_pass(mine: Path) -> None:
    """For a gradient: the command that writes one, and the pair; for a forward call nothing is missing."""
    assert attention(Q, Q, Q, kernel="./mine_forward.cu").shape == Q.shape
    with pytest.raises(ValueError, match="no kernel file mine_backward.cu") as raised:
        attention(WANTS, Q, Q, kernel="./mine_forward.cu")
    hint = str(raised.value).splitlines()[-1]
    assert (
        "fa-cli new mine" in hint and "--pass backward" in hint and 'kernel="./mine_forward.cu+fa2"' in hint and "torch.no_grad()" in hint
    )
    with pytest.raises(ValueError, match=r'hint: use kernel="./mine_forward.cu"'):
        attention(Q, Q, Q, kernel="mine")
    with pytest.raises(ValueError, match=r"no kernel file mine_forward\n.*\nhint: use ./mine_forward.cu$"):
        attention(Q, Q, Q, kernel="./mine_forward")


def test_a_path_with_a_plus_in_it(mine: Path) -> None:
    """A folder such as c++ makes no pair."""
    (mine / "c++").mkdir()
    (mine / "mine_forward.cu").rename(mine / "c++" / "mine_forward.cu")
    for kernel in (mine / "c++" / "mine_forward.cu", "c++/mine_forward.cu", "c++/mine_forward.cu+fa2"):
        assert torch.allclose(attention(Q, Q, Q, kernel=kernel), attention(Q, Q, Q, kernel="naive"), atol=1e-6)
