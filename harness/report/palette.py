"""The look of a kernel: one colour, marker and line wherever it is drawn. Ours are solid, the peers' dashed.

Every two colours differ by 13 or more in CIELAB, to normal sight and, times 1.25, to deuteranopes and protanopes (Machado's matrices):
Okabe and Ito's seven for those most often drawn together, then each as far as can be from all before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from .. import peers
from ..kernel import catalogue

BLUE, VERMILION, SKY, ORANGE, BLACK = "#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#000000"
#: By a kernel's number in the ladder.
OURS = (
    *("#557744", "#DDBBBB", "#6699FF", "#663344", "#EE9944", "#993377", "#FF6688"),
    *(BLUE, "#113388", "#BBCC99", "#DD7744", "#551111", "#0055FF", "#4411CC"),
    *(
        "#A46CD4",
        VERMILION,
        "#66EEDD",
        "#FFCC55",
        "#220022",
        "#004E8F",
        "#341A27",
        "#B69C68",
        "#009E73",
        "#000033",
        "#F8D000",
        "#EEDD77",
        "#000066",
        "#8833CC",
        "#0077FF",
        "#773333",
        "#229900",
        "#4433AA",
        "#66AABB",
        "#78FC9C",
        "#904824",
    ),
)
PEERS = {
    "torch-cudnn": BLACK,
    "torch-flash": SKY,
    "fa3": ORANGE,
    "fa4": "#CC79A7",
    "fa3-source": "#CC6666",
    "torch-efficient": "#AACC77",
    "torch-math": "#663311",
    "flashinfer": "#33FFBB",
    "flex": "#55BB99",
    "flex-flash": "#996699",
    "triton": "#221199",
    "flash-attn2": "#DD2244",
    "xformers": "#44CCDD",
    "torch-cpu": "#550055",
    "numpy": "#994400",
}
#: For kernels of a user's own, which have no number.
OTHERS = ("#DD00BB", "#994466", "#662255", "#0000FF")
MARKERS = "os^DvPX<>dph"
DASHES = ((0, (4, 1.2)), (0, (1, 1)), (0, (4, 1, 1, 1)))

Look = dict[str, Any]


def look_of(kernel: str) -> Look:
    """Colour, marker and line of a kernel: by its number in the ladder, by a peer's name, by checksum for any other name."""
    return looks((kernel,))[kernel]


@cache
def looks(kernels: Sequence[str]) -> dict[str, Look]:
    """The looks of the kernels of one figure, by name: no two have one colour, as long as those without a number are few."""
    numbers = {k.name: k.number for k in catalogue()}
    names = peers.names()
    chosen: dict[str, Look] = {}
    for kernel in kernels:
        number = numbers.get(kernel)
        if kernel in names:
            place = names.index(kernel)
            marker, dash = MARKERS[(place + 5) % len(MARKERS)], DASHES[place % len(DASHES)]
            chosen[kernel] = {"color": PEERS[kernel], "marker": marker, "linestyle": dash}
        elif number is not None and number < len(OURS):
            chosen[kernel] = {"color": OURS[number], "marker": MARKERS[number % len(MARKERS)], "linestyle": "-"}
        else:
            start = zlib.crc32(kernel.encode()) % len(OTHERS)
            used = {look["color"] for look in chosen.values()}
            free = [colour for colour in (*OTHERS[start:], *OTHERS[:start]) if colour not in used]
            marker = MARKERS[zlib.crc32(kernel.encode()) % len(MARKERS)]
            chosen[kernel] = {"color": free[0] if free else BLACK, "marker": marker, "linestyle": "-"}
    return chosen
