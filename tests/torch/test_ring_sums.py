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

#: A type, a head dim, and whether the kernels take them: rows of 40 and 1040 bytes, and float64, are torch's.
TAKEN = [("bfloat16", 64, True), ("float16", 24, True), ("float32", 128, True), ("bfloat16", 20, False), ("bfloat16", 520, False)]
TAKEN += [("float64", 32, False)]


@pytest.mark.parametrize("device", found())
@pytest.mark.parametrize(("dtype", "dim", "kernels"), TAKEN)
@pytest.mark.parametrize("first", [4, 2])
def test_sums(dtype: str, dim: int, kernels: bool, first: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two partial O, two gradients and what is rounded, of some rows of a sum, the first of which has a
    logsumexp at a multiple of 16 bytes, or not. Rows that see no key in one part, or in both."""
    calls: list[tuple[str, bool]] = []
    launched = sums._launched

    def seen(path: Path, *tensors: Any) -> bool:
        taken = launched(path, *tensors)
        calls.append((path.stem, taken))
        return taken

    monkeypatch.setattr(sums, "_launched", seen)
    generator, stored = torch.Generator().manual_seed(3), getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32

    def random(*shape: int, of: Any = stored) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(of).to(device)

    total, lse = random(2, 3, 12, dim, of=wide) * math.nan, torch.full((2, 3, 12), -math.inf, dtype=wide, device=device)
    total[:, :, :first] = 7
    if not kernels:  # torch's way reads what was not summed
        total[:, :, first:] = 0
    parts = [(random(2, 3, 12 - first, dim), random(2, 3, 12 - first, of=wide) * 4) for _ in range(2)]
    for (o, of), rows in zip(parts, ((0, 3), (2, 3)), strict=True):
        o[:, :, rows] = 0
        of[:, :, rows] = -math.inf
        sums.merge(total[:, :, first:], lse[:, :, first:], o, of)
    o, of = (torch.stack([each[i] for each in parts]).double() for i in (0, 1))
    weight = torch.exp(of - of.max(0).values.nan_to_num(neginf=0))
    wanted = (weight.unsqueeze(-1) * o).sum(0) / weight.sum(0).clamp_min(1e-300).unsqueeze(-1)
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype != "float64" else {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(total[:, :, first:].double(), wanted, **near)
    torch.testing.assert_close(lse[:, :, first:].double(), torch.logsumexp(of, 0), rtol=1e-6, atol=1e-6)
    assert (total[:, :, :first] == 7).all() and (lse[:, :, :first] == -math.inf).all()

    before, part = total.clone(), random(2, 3, 4, dim)
    sums.add(total[:, :, 3:7], part)
    before[:, :, 3:7] += part.to(wide)
    assert torch.equal(total, before)
    made = sums.rounded(total, stored)
    assert torch.equal(made, total.to(stored)) and made.is_contiguous()
    assert calls == [(name, kernels) for name in ("merge", "merge", "add", *(["round"] if stored != wide else []))]


@pytest.mark.parametrize("device", found())
def test_sums_of_nothing(device: str) -> None:
    """Without rows, and of rows that begin at no multiple of 16 bytes."""
    total, lse = torch.zeros(1, 2, 0, 64, device=device), torch.zeros(1, 2, 0, device=device)
    sums.merge(total, lse, total.bfloat16(), lse)
    sums.add(total, total.half())
    assert sums.rounded(total, torch.float16).shape == total.shape
    aside, part = torch.ones(1, 1, 3, 65, device=device)[..., 1:], torch.ones(1, 1, 3, 64, dtype=torch.bfloat16, device=device)
    sums.add(aside, part)
    assert (aside == 2).all()
    assert torch.equal(sums.rounded(aside, torch.bfloat16), part * 2)


@pytest.mark.parametrize("device", found())
def test_sums_of_many_batches(device: str) -> None:
    """More than a grid has blocks."""
    total, part = torch.ones(65536, 1, 1, 8, device=device), torch.ones(65536, 1, 1, 8, dtype=torch.bfloat16, device=device)
    sums.add(total, part)
    assert (total == 2).all() and torch.equal(sums.rounded(total, torch.bfloat16), part * 2)
