"""The operator through the cases of PyTorch's tests of its fused attention and of flash-attention's: their shapes and tolerances.

PyTorch: test/test_transformers.py, test_flash_attention_vs_math_ref_grads. flash-attention: tests/test_flash_attn.py at 0251105,
test_flash_attn_output (lines 864 to 939) and test_flash_attn_varlen_output (1135 to 1216): windows, ALiBi, softcap and packed documents
too. Left out are dropout and a bias. Both allow a multiple of the error that plain attention of the same type makes. All cases run on a
GPU, on the CPU engine the small ones.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import pytest
from torch_devices import found

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402

from harness.torch_op import attention, sdpa  # noqa: E402

HALF = (torch.float16, torch.bfloat16)
#: The most query-key pairs times head dims that the CPU engine is asked for, and the head dims of it (each is compiled).
SMALL, DIMS = 13 << 20, (8, 59, 64)


@dataclass(frozen=True)
class Case:
    """One of their cases, on a device."""

    device: str
    queries: int
    keys: int
    dim: int
    causal: bool
    heads: tuple[int, int]
    dtype: Any
    scale: float | None = None

    def __str__(self) -> str:
        return "-".join(str(value) for value in astuple(self))

    def possible(self) -> bool:
        """Whether the device can be asked for it: the CPU engine only for small ones."""
        return self.device != "cpu" or (self.heads[0] * self.queries * self.keys * self.dim <= SMALL and self.dim in DIMS)


def params(cases: Iterable[Case]) -> list[Any]:
    """The cases a device can be asked for."""
    return [pytest.param(case, id=str(case)) for case in cases if case.possible()]


def gradients(o: Any, inputs: Any, do: Any) -> list[Any]:
    """The output and the gradients of its inputs."""
    return [o, *torch.autograd.grad(o, inputs, do.to(o.dtype))]


def within(exact: list[Any], plain: list[Any], ours: list[Any], times: tuple[float, ...], least: float) -> None:
    """Each tensor's largest error at most so many times that of plain attention in the same type, or `least`."""
    for name, x, p, o, factor in zip(("O", "dQ", "dK", "dV"), exact, plain, ours, times, strict=True):
        error, allowed = float((o - x).detach().abs().max()), max(least, factor * float((p - x).detach().abs().max()))
        assert error <= allowed, f"{name}: {error} > {allowed}"


PYTORCH = [
    Case(device, queries, keys, dim, causal, heads, dtype, scale and 1 / dim)
    for device in found()
    for queries in (4, 143, 2048)
    for keys in (4, 127, 579, 2048)
    for dim in (8, 64, 203, 256)
    for causal in (False, True)
    for heads in ((4, 4), (16, 8), (10, 2))
    for dtype in HALF
    for scale in (None, 1.0)
]


@pytest.mark.days(28)
@pytest.mark.parametrize("case", params(PYTORCH))
def test_as_pytorch(case: Case) -> None:
    """sdpa against the math backend in a wider type: its error at most 4, 180, 16, 4 times that of the math backend in this type."""
    torch.manual_seed(0)
    shapes = [(1, case.heads[0], case.queries, case.dim), *[(1, case.heads[1], case.keys, case.dim)] * 2]
    ours = [torch.rand(shape, device=case.device).to(case.dtype).requires_grad_() for shape in shapes]
    wide = [t.detach().double().requires_grad_() for t in ours]
    options = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": case.heads[0] != case.heads[1]}
    do = torch.rand_like(ours[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention is computed by naive")
        ours_out = gradients(sdpa(*ours, **options), ours, do)
    with sdpa_kernel(SDPBackend.MATH):
        exact = gradients(torch_sdpa(*wide, **options), wide, do)
        plain = gradients(torch_sdpa(*ours, **options), ours, do)
    within(exact, plain, ours_out, (4, 180, 16, 4), 1e-5)


def as_written(q: Any, k: Any, v: Any, visible: Any, upcast: bool, bias: Any = 0.0, softcap: float = 0.0) -> Any:
    """flash-attention's attention_ref: in float32, or in the inputs' type with the scale on K. visible: of each query and key.

    bias: what is added behind the softcap, 0 for none.
    """
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    root = math.sqrt(q.shape[-1])
    scores = (q / root) @ k.mT if upcast else q @ (k / root).mT
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    p = (scores + bias).masked_fill(~visible, -math.inf).softmax(-1).to(v.dtype)
    return (p.masked_fill(~visible.any(-1, keepdim=True), 0.0) @ v).to(dtype)


def behind(queries: int, keys: int, device: str) -> Any:
    """How far each key is behind each query, (queries, keys), bottom-right aligned; below 0 it comes after it."""
    return torch.arange(queries, device=device)[:, None] + keys - queries - torch.arange(keys, device=device)


SEQUENCES = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)]


FLASH = [
    Case(device, queries, keys, dim, causal, heads, dtype)
    for device in found()
    for queries, keys in SEQUENCES
    for dim in (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
    for causal in (False, True)
    for heads in ((9, 9), (9, 1), (9, 3))
    for dtype in HALF
]


@pytest.mark.days(28)
@pytest.mark.parametrize("case", params(FLASH))
def test_as_flash_attention(case: Case) -> None:
    """attention against float32: its error at most twice, of gradients three times, that of plain attention in this type."""
    batch = 1 if case.device == "cpu" else 4
    torch.manual_seed(0)
    shapes = [(batch, case.queries, case.heads[0], case.dim), *[(batch, case.keys, case.heads[1], case.dim)] * 2]
    q, k, v = ours = [torch.randn(shape, device=case.device).to(case.dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    do = torch.randn_like(ours[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention is computed by naive")
        ours_out = gradients(attention(q, k, v, causal=case.causal), ours, do)
    visible = behind(case.queries, case.keys, case.device) >= (0 if case.causal else -case.keys)
    exact, plain = (gradients(as_written(q, k, v, visible, upcast), ours, do) for upcast in (True, False))
    within(exact, plain, ours_out, (2, 3, 3, 3), 1e-5)


@dataclass(frozen=True)
class Form:
    """One of their cases with a window, ALiBi, a softcap or packed documents, by a kernel that takes it."""

    device: str
    kernel: str
    queries: int
    keys: int
    dim: int
    causal: bool
    local: bool
    alibi: bool
    softcap: float
    packed: bool
    heads: tuple[int, int]
    dtype: Any

    def __str__(self) -> str:
        return "-".join(str(value) for value in astuple(self))

    @property
    def batch(self) -> int:
        return 2 if self.device == "cpu" else 4

    def possible(self) -> bool:
        """Whether the device can be asked for it: the CPU engine only for small ones of one width."""
        named = self.local or self.alibi or self.softcap or self.packed
        small = self.batch**2 * self.heads[0] * self.queries * self.keys * self.dim <= 4 * SMALL and self.dim == 64
        return bool(named) and (self.kernel == "hopper" or self.dim <= 128) and (self.device != "cpu" or small)


FORMS = [
    Form(device, kernel, queries, keys, dim, causal, local, alibi, softcap, packed, heads, dtype)
    for device in found()
    for kernel in ("hopper", "mma_qreg_async", "fa2")
    for queries, keys in ((1, 147), *SEQUENCES)
    for dim in (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
    for causal, local, alibi in itertools.product((False, True), repeat=3)
    for softcap in (0.0, 50.0)
    for packed in (False, True)
    for count in (4 if softcap else 6,)
    for heads in ((count, count), (count, 1), (count, 2))
    for dtype in HALF
]


def forms() -> list[Any]:
    """Every 53rd of those that a device can be asked for: each is compiled, for seconds."""
    possible = ([form for form in FORMS if form.device == device and form.possible()] for device in found())
    return [pytest.param(form, id=str(form)) for here in possible for form in here[::53]]


@pytest.mark.days(28)
@pytest.mark.parametrize("form", forms())
def test_as_flash_attention_with_a_form(form: Form) -> None:
    """attention against float32 by the same rule; of packed documents each by itself, of up to 20 rows fewer, as theirs are."""
    if form.kernel == "hopper" and form.device != "cpu" and torch.cuda.get_device_capability(form.device) != (9, 0):
        pytest.skip("hopper needs sm_90")
    make = torch.Generator().manual_seed(0)

    def integers(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (form.batch,), generator=make).tolist()

    window = tuple(integers(0, form.keys)[:2]) if form.local else None
    slopes = torch.rand(form.batch, form.heads[0], generator=make).mul(0.3).to(form.device)
    lengths = list(
        zip(*(integers(max(1, n - 20), n + 1) if form.packed else [n] * form.batch for n in (form.queries, form.keys)), strict=True)
    )

    def drawn(heads: int, rows: int, factor: float = 1.0) -> Any:
        return (torch.randn(1, heads, rows, form.dim, generator=make) * factor).to(form.device, form.dtype)

    parts = []  # of each sequence, alone: q, k, v and dO
    for queries, keys in lengths:
        of = ((form.heads[0], queries, form.softcap or 1.0), (form.heads[1], keys), (form.heads[1], keys), (form.heads[0], queries))
        parts.append([drawn(*each) for each in of])
    want: dict[bool, list[Any]] = {True: [], False: []}
    for (q, k, v, do), slope in zip(parts, slopes, strict=True):
        distance, given = behind(q.shape[2], k.shape[2], form.device), [t.detach().requires_grad_() for t in (q, k, v)]
        left, right = window or (form.keys, form.keys)
        visible = (distance <= left) & (distance >= (0 if form.causal else -right))
        bias = -slope[:, None, None] * distance.abs() if form.alibi else 0.0
        for upcast, each in want.items():
            each.append(gradients(as_written(*given, visible, upcast, bias, form.softcap), given, do))
    along = 2 if form.packed else 0
    q, k, v, do = (torch.cat(tensors, along) for tensors in zip(*parts, strict=True))
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    ours = gradients(attention(*given, kernel=form.kernel, **words_of(form, lengths, window, slopes)), given, do)
    exact, plain = ([torch.cat(tensors, along) for tensors in zip(*want[upcast], strict=True)] for upcast in (True, False))
    within(exact, plain, ours, (2, 3, 3, 3), 1e-5)


def words_of(form: Form, lengths: list[tuple[int, int]], window: Any, slopes: Any) -> dict[str, Any]:
    """The words of a call for a form: named forms, but for documents with other keys than queries, whose borders are tensors of a mask."""
    capped = f"{form.softcap} * tanh(s / {form.softcap})" if form.softcap else "s"
    if not form.packed:
        words: dict[str, Any] = {"causal": form.causal, "window": window}
        biased = {"score": f"{capped} - slope[b, h] * abs(q - k)", "tensors": {"slope": slopes}}
        return words | (biased if form.alibi else {"softcap": form.softcap or None})
    rows = torch.tensor([queries for queries, _ in lengths], device=form.device)
    begins = torch.tensor([0, *itertools.accumulate(keys for _, keys in lengths)], device=form.device)
    own = torch.cat([torch.arange(keys - queries, keys, device=form.device) for queries, keys in lengths])  # among its document's keys
    begin, end = (each.repeat_interleave(rows) for each in (begins[:-1], begins[1:]))
    left, right = window or (form.keys, form.keys)
    seen = {"first": begin + (own - left).clamp(min=0), "last": torch.minimum(begin + own + (0 if form.causal else right), end - 1)}
    words = {"mask": "first[q] <= k and k <= last[q]", "softcap": form.softcap or None, "tensors": seen}
    if form.alibi:  # as one tensor, for hopper has room for three
        away = (begin + own)[:, None] - torch.arange(int(begins[-1]), device=form.device)
        bias = -slopes.repeat_interleave(rows, 0).T[..., None] * away.abs()
        words |= {"softcap": None, "score": f"{capped} + bias[h, q, k]", "tensors": seen | {"bias": bias}}
    return words
