"""The operator through the cases of PyTorch's tests of its fused attention and of flash-attention's: their shapes and tolerances.

PyTorch: test/test_transformers.py, test_flash_attention_vs_math_ref_grads. flash-attention: tests/test_flash_attn.py,
test_flash_attn_output. Left out is what our contract leaves out: dropout, bias, ALiBi, windows. Both allow a multiple of the error that
plain attention of the same type makes. All cases run on a GPU, on the CPU engine the small ones.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import sample
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
    """The cases a device can be asked for, a sample of them not marked slow: each value of each dimension, on each device."""
    every = [case for case in cases if case.possible()]
    made = []
    for device in found():
        here = [case for case in every if case.device == device]
        drawn = sample.sample(f"theirs {device}", here, lambda case: set(enumerate(astuple(case))), lambda case: 1, 40)
        made += sample.parameters(here, drawn, str)
    return made


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


def as_written(q: Any, k: Any, v: Any, causal: bool, upcast: bool) -> Any:
    """flash-attention's attention_ref: in float32, or in the inputs' type with the scale on K, mask bottom-right."""
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    root = math.sqrt(q.shape[-1])
    scores = (q / root) @ k.mT if upcast else q @ (k / root).mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1)
    if causal:
        scores = scores.masked_fill(hidden, -math.inf)
    p = scores.softmax(-1).to(v.dtype)
    if causal:
        p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (p @ v).to(dtype)


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
    exact = gradients(as_written(q, k, v, case.causal, True), ours, do)
    plain = gradients(as_written(q, k, v, case.causal, False), ours, do)
    # rows that see no key have a NaN gradient in what is written out: a softmax of -inf
    exact, plain = ([t.nan_to_num(0.0) for t in each] for each in (exact, plain))
    within(exact, plain, ours_out, (2, 3, 3, 3), 1e-5)
