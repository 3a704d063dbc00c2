"""The colours of kernels and peers in figures: no two alike, for any eyes, and the same in the file."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rows import lengths

from harness import peers
from harness.kernel import catalogue
from harness.report import compose as report
from harness.report import figures, palette


def lab(colour: str, sight: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
    """CIELAB of a colour in hex digits, seen as a matrix in linear RGB says."""
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    linear = linear if sight is None else np.clip(sight @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear / (0.9505, 1, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


#: Machado, Oliveira, Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency (2009), severity 1.
SIGHTS = {
    "normal": None,
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}


@pytest.mark.parametrize("sight", SIGHTS)
def test_no_two_kernels_have_one_colour(sight: str) -> None:
    """Of all there are, and of a user's own in one figure; told apart by those who see red or green less too."""
    own = tuple(f"mine{i}" for i in range(len(palette.OTHERS)))
    names = (*dict.fromkeys(k.name for k in catalogue()), *peers.names(), *own)
    colours = {name: lab(look["color"], SIGHTS[sight]) for name, look in palette.looks(names).items()}
    near = {(a, b): float(np.linalg.norm(colours[a] - colours[b])) for a, b in itertools.combinations(names, 2)}
    assert min(near.values()) > (13 if sight == "normal" else 10.4), min(near, key=lambda pair: near[pair])
    assert {palette.look_of(name)["linestyle"] == "-" for name in peers.names()} == {False}


def test_colours_survive_the_file(tmp_path: Path) -> None:
    """Each kernel's own, to the bit, also that of a line which lies under others."""
    kernels = ("fa2", "naive", "torch-cpu", "numpy", "mine")
    errors = {f"MaxError_{tensor}": 1e-6 * 2**i for i, tensor in enumerate(figures.TENSORS)}
    rows = [replace(r, Type="BOT", **errors) for r in lengths(*kernels)]
    (path,) = (path for path in report.draw(rows, tmp_path) if path.name == "BOTH_error_vs_S.png")
    with Image.open(path) as image:
        found = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}  # type: ignore[union-attr]
        assert image.mode == "P" and image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    for kernel, look in palette.looks(kernels).items():
        assert tuple(int(look["color"][i : i + 2], 16) for i in (1, 3, 5)) in found, kernel
