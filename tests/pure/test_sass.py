"""The main loop in nvdisasm's listing: a short one in its form, by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.backends import sass
from harness.fault import EnvironmentFault

#: A persistent loop around the main loop, which starts at .L_x_26: a poll, both products, a cold block behind a vote, and a masked one.
LISTING = """
//--------------------- .text.forward             --------------------------
	.section	.text.forward,"ax",@progbits
        .global         forward
forward:
.text.forward:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_9:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR36], RZ, !UPT, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   MUFU.EX2 R88, R88 ;
        /*0040*/              @!P0 BRA `(.L_x_16) ;
.L_x_26:
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING R9, 0x100 ;
.L_x_18:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R10+URZ+0x30040], R9 ;
        /*0070*/              @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*0080*/              @!P0 SYNCS.PHASECHK.TRANS64 P0, [R10+URZ+0x30040], R9 ;
        /*0090*/               @P0 BRA `(.L_x_17) ;
        /*00a0*/              @!P0 BRA `(.L_x_18) ;
.L_x_17:
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR36], RZ, !UPT ;
        /*00c0*/                   UMOV UR15, 0x40000040 ;
        /*00d0*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR40], R88, gsb0 ;
        /*00e0*/                   HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR12].tnspB, R24, UP0 ;
        /*00f0*/                   HGMMA.64x128x16.F32.BF16 R24, R156, gdesc[UR16].tnspB, R24 ;
        /*0100*/                   HGMMA.64x128x16.F32.BF16 R24, R160, gdesc[UR16].tnspB, R24, gsb0 ;
        /*0110*/                   BAR.ARV R9, 0x100 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0130*/               @P0 BRA `(.L_x_21) ;
        /*0140*/                   FSEL R88, R88, -INF , !P1 ;
.L_x_21:
        /*0150*/                   FFMA.FTZ R88, R88, UR5, -R7 ;
        /*0160*/                   MUFU.EX2 R88, R88 ;
        /*0170*/                   MUFU.EX2 R89, R89 ;
        /*0180*/                   MUFU.EX2 R90, R90 ;
        /*0190*/                   FADD.FTZ R4, R88, R89 ;
        /*01a0*/                   MUFU.EX2 R91, R91 ;
        /*01b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*01c0*/                   MUFU.EX2 R92, R92 ;
        /*01d0*/                   MUFU.RCP R93, R93 ;
        /*01e0*/              @!P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR20+0x30070], RZ ;
        /*01f0*/                   VOTE.ANY P0, P0 ;
        /*0200*/              @!P0 BRA `(.L_x_22) ;
.L_x_23:
        /*0210*/                   HMMA.16816.F32.BF16 R88, R144.reuse, R148, R88 ;
        /*0220*/                   HMMA.16816.F32.BF16 R92, R144, R150, R92 ;
        /*0230*/               @P1 BRA `(.L_x_23) ;
        /*0240*/                   MUFU.EX2 R88, R88 ;
        /*0250*/                   MUFU.EX2 R89, R89 ;
.L_x_22:
        /*0260*/                   STL [R1+0x8], R5 ;
        /*0270*/                   LDL.64 R6, [R1+0x8] ;
        /*0280*/              @!P0 BRA `(.L_x_26) ;
.L_x_16:
        /*0290*/                   HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR12].tnspB, R24, gsb0 ;
        /*02a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*02b0*/                   STL [R1+0x10], R5 ;
        /*02c0*/              @!P6 BRA `(.L_x_9) ;
        /*02d0*/                   EXIT ;
.L_x_30:
        /*02e0*/                   BRA `(.L_x_30);
        .section	.text.other,"ax",@progbits
.text.other:
.L_x_40:
        /*0000*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0010*/                   DEPBAR.LE SB0, 0x1 ;
.L_x_41:
        /*0020*/                   HMMA.16816.F32 R88, R144, R148, R88 ;
        /*0030*/               @P1 BRA `(.L_x_41) ;
        /*0040*/                   MUFU.EX2 R88, R88 ;
        /*0050*/                   HMMA.16816.F32 R24, R144, R148, R24 ;
        /*0060*/              @!P0 BRA `(.L_x_40) ;
.text.plain:
.L_x_50:
        /*0000*/                   FFMA R1, R1, R1, R1 ;
        /*0010*/                   MUFU.EX2 R88, R88 ;
        /*0020*/              @!P0 BRA `(.L_x_50) ;
"""


def loop(listing: str = LISTING) -> sass.Loop:
    found = sass.main_loops(listing)["forward"]
    assert found
    return found


def test_the_main_loop_is_the_innermost_with_both_products() -> None:
    """Not the poll, not the cold block's loop, not the persistent loop around it; each product is a run, each poll one wait."""
    assert loop().describe() == (
        "BAR.SYNC · SYNCS.wait · HGMMA 64x128x16 x2 · HGMMA 64x128x16 x3 · BAR.ARV · DEPBAR 1 · MUFU.EX2 x4 · DEPBAR 0 · MUFU.EX2 · "
        "SYNCS.arrive · [ HMMA 16816 x2 · MUFU.EX2 x2 ] · 2 LDL/STL"
    )


def test_exponentials_under_a_product_are_counted() -> None:
    """Four of five: one is behind the wait, the cold ones do not count. Where the wait stands before them all it is none."""
    assert loop().hidden == pytest.approx(0.8)
    early = LISTING.replace("WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;")
    assert loop(early).hidden == 0.0
    rotated = loop(LISTING.replace("BAR.SYNC.DEFER_BLOCKING R9, 0x100", "MUFU.EX2 R9, R9"))
    assert rotated.hidden == pytest.approx(4 / 6), "before the first wait the last one of the round before holds"


def test_a_branch_without_a_vote_hides_nothing() -> None:
    """What another predicate jumps over is in the order, as masked tiles are."""
    assert "[" not in loop(LISTING.replace("VOTE.ANY P0, P0", "VOTE.ANY P5, P0")).describe()
    assert loop(LISTING.replace("VOTE.ANY", "VOTEU.ANY")).hidden == pytest.approx(4 / 7)


def test_kernels_of_mma_sync_and_of_cuda_cores() -> None:
    """With HMMA alone the products need not be wgmma's; without tensor cores there is no such loop."""
    found = sass.main_loops(LISTING)
    assert list(found) == ["forward", "other", "plain"] and found["plain"] is None
    other = found["other"]
    assert other and other.describe() == "BAR.SYNC · DEPBAR 1 · HMMA 16816 · MUFU.EX2 · HMMA 16816 · 0 LDL/STL"


def test_nvdisasm_is_found_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of NVIDIA's packages, else on PATH; absent, or unable to read: what to install."""
    binary = tmp_path / "cu13" / "bin" / "nvdisasm"
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(sass.shutil, "which", lambda name, path=None: None)
    with pytest.raises(EnvironmentFault) as caught:
        sass.program()
    assert "pip install" in caught.value.hint and caught.value.exit_code == 4
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\necho told\n")
    binary.chmod(0o755)
    assert sass.program() == str(binary) and sass.disassembled(b"") == "told\n"
    binary.write_text("#!/bin/sh\necho no such architecture >&2\nexit 1\n")
    with pytest.raises(EnvironmentFault, match="nvdisasm cannot read") as caught:
        sass.disassembled(b"")
    assert "no such architecture" in caught.value.why


def test_loads_and_stores_are_counted_by_kind_and_width() -> None:
    """Of a whole function; what only looks like one is none."""
    more = LISTING.replace(
        "LDC R1, c[0x0][0x28] ;", "LDC R1, c[0x0][0x28] ;\n        /*0005*/ LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;\n"
        "        /*0006*/ @!P0 LDGSTS.E.BYPASS.128.ZFILL [R4], desc[UR4][R2.64] ;\n        /*0007*/ LDSM.16.MT88.4 R4, [R8] ;\n"
        "        /*0008*/ LDS.U.64 R4, [R8] ;\n        /*0009*/ LDGDEPBAR ;", 1,
    )  # fmt: skip
    assert sass.memory(more)["forward"] == "1 LDG.128 · 1 LDGSTS.128 · 1 LDL.64 · 1 LDS.64 · 1 LDSM · 2 STL"


def test_the_innermost_loop_of_cuda_cores_is_counted() -> None:
    """Of the loops without another in them, that with the most multiply-adds: its length, these, its loads; nothing of other kernels."""
    inner = [
        ".L_x_1:",
        " /*0010*/ LDS.128 R4, [R2] ;",
        *(f" /*00{i}0*/ FFMA R8, R4, R5, R8 ;" for i in range(2, 8)),
        " /*0080*/ @P0 BRA `(.L_x_1) ;",
    ]
    copy = [".L_x_2:", " /*0090*/ LDG.E R4, [R2.64] ;", " /*00a0*/ FFMA R4, R4, R4, R4 ;", " /*00b0*/ @P1 BRA `(.L_x_2) ;"]
    outer = [
        ".L_x_0:",
        " /*0000*/ FFMA R1, R1, R1, R1 ;",
        *inner,
        *copy,
        " /*00c0*/ @P2 BRA `(.L_x_0) ;",
        ".L_x_9:",
        " /*00d0*/ BRA `(.L_x_9) ;",
    ]
    listing = "\n".join(
        [".text.forward:", *outer, ".text.idle:", ".L_x_3:", " /*0000*/ IADD3 R1, R1, R1, R1 ;", " /*0010*/ @P0 BRA `(.L_x_3) ;"]
    )
    assert sass.inner_loops(listing) == {"forward": "innermost loop, 8 instructions: 6 FFMA · 1 LDS.128"}
