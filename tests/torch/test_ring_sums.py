"""What a ring adds up (harness/torch_op/sums.py), against float64: by the kernels where they take it, by torch elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch_devices import found

torch = pytest.importorskip("torch")
if not found():
    pytest.skip("no device that the operator runs on", allow_module_level=True)
from harness.torch_op import sums  # noqa: E402
from harness.torch_op.sums import Sum  # noqa: E402

#: A type, a head dim, and whether the kernels take them: rows of 40 and 1040 bytes, and float64, are torch's.
TAKEN = [("bfloat16", 64, True), ("float16", 24, True), ("float32", 128, True), ("bfloat16", 20, False), ("bfloat16", 520, False)]
TAKEN += [("float64", 32, False)]
#: Rows of the parts that come, of 12; rows 0 and 1 have none in the last. A logsumexp of rows from 3 on is at no multiple of 16 bytes.
PARTS = [
    [(0, 12), (0, 12)],
    [(0, 12), (4, 12), (3, 12)],
    [(0, 4), (0, 12), (4, 12), (0, 12)],
    [(0, 12)],
    [(3, 12), (0, 3)],
    [(2, 7), (7, 12), (2, 12), (2, 12)],
]


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The kernels that were asked, and whether they took their tensors."""
    made: list[tuple[str, bool]] = []
    launched = sums._launched

    def seen(path: Path, *given: Any) -> bool:
        taken = launched(path, *given)
        made.append((path.stem, taken))
        return taken

    monkeypatch.setattr(sums, "_launched", seen)
    return made


class Values:
    """Normal random tensors of a type on a device, of values that the type has."""

    def __init__(self, dtype: str, device: str) -> None:
        self._generator, self.stored, self._device = torch.Generator().manual_seed(3), getattr(torch, dtype), device
        self.wide = torch.float64 if dtype == "float64" else torch.float32

    def __call__(self, *shape: int, of: Any = None) -> Any:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(of or self.stored).to(self._device)


@pytest.mark.parametrize("device", found())
@pytest.mark.parametrize(("dtype", "dim", "kernels"), TAKEN)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_sums(parts: list[tuple[int, int]], dtype: str, dim: int, kernels: bool, device: str, calls: list[tuple[str, bool]]) -> None:
    """Of partial O, with rows that see no key in one part or in all; and of gradients, rounded once: the bits of the float32 sum."""
    values, slices = Values(dtype, device), [slice(*part) for part in parts]
    total = Sum(values(2, 3, 1, dim), 12, slices)
    every, scores = [], []
    for number, rows in enumerate(slices):
        o, of = values(2, 3, rows.stop - rows.start, dim), values(2, 3, rows.stop - rows.start, of=values.wide) * 4
        for empty in {5, 6 + number} - set(range(rows.start)):
            o[:, :, empty - rows.start : empty - rows.start + 1] = 0
            of[:, :, empty - rows.start : empty - rows.start + 1] = -math.inf
        every.append(torch.zeros(2, 3, 12, dim, dtype=torch.float64, device=device).index_copy_(2, _places(rows, device), o.double()))
        all_of = torch.full((2, 3, 12), -math.inf, dtype=torch.float64, device=device)
        scores.append(all_of.index_copy_(2, _places(rows, device), of.double()))
        total.add(o.clone(), rows, of.clone())
    of, o = torch.stack(scores), torch.stack(every)
    weight = torch.exp(of - of.max(0).values.nan_to_num(neginf=0))
    wanted = (weight.unsqueeze(-1) * o).sum(0) / weight.sum(0).clamp_min(1e-300).unsqueeze(-1)
    once = {"float64": 1e-14, "float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype] * 1.001
    torch.testing.assert_close(total.whole().double(), wanted, rtol=once, atol=1e-6 if dtype != "float64" else 1e-14)
    torch.testing.assert_close(total.logsumexp().double(), torch.logsumexp(of, 0), rtol=1e-6, atol=1e-6)
    assert total.whole().dtype == values.stored and total.whole().is_contiguous()

    total = Sum(values(2, 3, 1, dim), 12, slices)
    wanted = torch.zeros(2, 3, 12, dim, dtype=values.wide, device=device)
    for rows in slices:
        part = values(2, 3, rows.stop - rows.start, dim)
        total.add(part.clone(), rows)
        wanted[:, :, rows] += part.to(values.wide)
    assert torch.equal(total.whole(), wanted.to(values.stored))
    assert all(taken == kernels for _, taken in calls)
    assert bool(calls) == any(piece[2] > 1 for piece in sums._pieces(12, tuple(parts)))


def _places(rows: slice, device: str) -> Any:
    return torch.arange(rows.start, rows.stop, device=device)


@pytest.mark.parametrize("device", found())
def test_sums_in_float32(device: str, calls: list[tuple[str, bool]]) -> None:
    """What travels in float32: a sum that arrives and two parts of it, and a sum without one; then a sum in the type of the inputs of a part
    that is float32. The parts are written nowhere else."""
    values = Values("bfloat16", device)
    arrived, parts = values(2, 3, 8, 16, of=torch.float32), [values(2, 3, 8, 16), values(2, 3, 4, 16)]
    wanted = arrived.clone()
    wanted += parts[0]
    wanted[:, :, 4:] += parts[1]
    total = Sum(parts[0], 8, [slice(0, 8), slice(0, 8), slice(4, 8)], torch.float32)
    for part, rows in ((arrived, slice(0, 8)), (parts[0], slice(0, 8)), (parts[1], slice(4, 8))):
        total.add(part, rows)
    assert torch.equal(total.whole(), wanted) and total.whole() is arrived
    lone = Sum(parts[0], 8, [slice(4, 8)], torch.float32)
    lone.add(parts[1], slice(4, 8))
    assert torch.equal(lone.whole(), torch.cat((torch.zeros_like(arrived[:, :, :4]), parts[1].float()), 2))
    home = Sum(parts[0], 8, [slice(0, 4), slice(0, 8), slice(0, 8)])
    for part, rows in ((parts[1], slice(0, 4)), (parts[0].clone(), slice(0, 8)), (wanted, slice(0, 8))):
        home.add(part, rows)
    right = parts[0].float()
    right[:, :, :4] += parts[1]
    assert torch.equal(home.whole(), (right + wanted).bfloat16())
    assert calls == [("add", True)] * (3 + 3)


@pytest.mark.parametrize("device", found())
def test_sums_of_nothing(device: str) -> None:
    """Without rows, without parts, and of rows that begin at no multiple of 16 bytes."""
    like = torch.zeros(1, 2, 0, 64, device=device)
    total = Sum(like, 0, [slice(0, 0)])
    total.add(like, slice(0, 0), torch.zeros(1, 2, 0, device=device))
    assert total.whole().shape == like.shape and total.logsumexp().shape == (1, 2, 0)
    for dtype, lse in (("float64", torch.float64), ("bfloat16", torch.float32)):
        none = Sum(like.to(getattr(torch, dtype)), 3, [])
        assert torch.equal(none.whole(), torch.zeros(1, 2, 3, 64, dtype=getattr(torch, dtype), device=device))
        assert torch.equal(none.logsumexp(), torch.full((1, 2, 3), -math.inf, dtype=lse, device=device))
    aside, part = torch.ones(1, 1, 3, 65, device=device)[..., 1:], torch.ones(1, 1, 3, 64, dtype=torch.bfloat16, device=device)
    sums.combine(torch.bfloat16, part, aside, aside)
    assert (aside == 2).all()


@pytest.mark.parametrize("device", found())
def test_sums_of_many_batches(device: str) -> None:
    """More than a grid has blocks."""
    total, part = torch.ones(65536, 1, 1, 8, device=device), torch.ones(65536, 1, 1, 8, dtype=torch.bfloat16, device=device)
    sums.combine(torch.bfloat16, part, total, total)
    assert (total == 2).all()
