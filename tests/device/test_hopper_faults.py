"""Faults planted in a small warp-specialised kernel of TMA and wgmma, and what the CPU engine says of each.

O = (Q K^T) V over five tiles of 64 keys, in whole numbers: a producer thread copies K and V through two stages, a warpgroup
multiplies. P goes from registers to the second product, O through shared memory and TMA.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from hopper_kernel import TYPES, bound, with_fields

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.fault import KernelFault
from harness.verbs.selftest.mutant import edited

MAPS: dict[str, tuple[str, list[int], int]] = {name: (name.upper(), [64, 64, 1, 1], 128) for name in "qkvo"}
PIPELINE = """\
constexpr int TILE = 8192, TILES = 5;
extern "C" __global__ void __launch_bounds__(384, 1)
    forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map, const __grid_constant__ fa::TensorMap k_map,
            const __grid_constant__ fa::TensorMap v_map, const __grid_constant__ fa::TensorMap o_map) {
    unsigned char* q_smem = fa::dynamic_shared_1024();  // [64][64]
    unsigned char* k_smem = q_smem + TILE;              // [2][64][64]
    unsigned char* v_smem = k_smem + 2 * TILE;          // [2][64][64]
    unsigned char* o_smem = v_smem + 2 * TILE;          // [64][64]
    uint64_t* full = reinterpret_cast<uint64_t*>(o_smem + TILE);  // [2]
    uint64_t *empty = full + 2, *q_full = full + 4;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) fa::mbarrier_init(full + i, 1), fa::mbarrier_init(empty + i, 4);
        fa::mbarrier_init(q_full, 1);
        fa::mbarrier_init_fence();
    }
    __syncthreads();
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<24>();
        if (threadIdx.x == 0) {
            fa::mbarrier_arrive_expect_tx(q_full, TILE);
            fa::tma_load_4d(q_smem, &q_map, q_full, 0, 0, 0, 0);
            for (int n = 0; n < TILES; ++n) {
                const int stage = n % 2;
                fa::mbarrier_wait_parity(empty + stage, (n / 2 & 1) ^ 1);  // free
                fa::mbarrier_arrive_expect_tx(full + stage, 2 * TILE);
                fa::tma_load_4d(k_smem + stage * TILE, &k_map, full + stage, 0, 64 * n, 0, 0);  // load K
                fa::tma_load_4d(v_smem + stage * TILE, &v_map, full + stage, 0, 64 * n, 0, 0);  // load V
            }
        }
        return;
    }
    fa::setmaxnreg_inc<240>();
    const int t = threadIdx.x % 128, warp = t / 32, lane = t % 32;
    float s_reg[32], o_reg[32];
    uint32_t p_reg[4][4];
    fa::mbarrier_wait_parity(q_full, 0);
    const uint64_t q_desc = fa::smem_descriptor_k_major(q_smem);
    for (int n = 0; n < TILES; ++n) {
        const int stage = n % 2;
        const uint64_t k_desc = fa::smem_descriptor_k_major(k_smem + stage * TILE);
        const uint64_t v_desc = fa::smem_descriptor_mn_major(v_smem + stage * TILE, TILE);
        fa::mbarrier_wait_parity(full + stage, n / 2 & 1);  // there
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            fa::wgmma_ss<scalar>(s_reg, q_desc + 2 * step, k_desc + 2 * step, step > 0);  // Q K
        fa::wgmma_commit();
        fa::wgmma_wait<0>(s_reg);  // S
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (i % 2) p_reg[i / 8][i / 2 % 4] = fa::pack<scalar>(s_reg[i - 1], s_reg[i]);  // P
        fa::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) fa::wgmma_rs<scalar, true>(o_reg, p_reg[step], v_desc + 128 * step, n + step > 0);  // P V
        fa::wgmma_commit();
        fa::wgmma_wait<0>(o_reg, p_reg);  // O
        if (lane == 0) fa::mbarrier_arrive(empty + stage);
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, chunk = i / 4 ^ row % 8;
        reinterpret_cast<uint32_t*>(o_smem)[row * 32 + chunk * 4 + lane % 4] = fa::pack<scalar>(o_reg[i], o_reg[i + 1]);  // write O
    }
    fa::fence_proxy_async_shared();
    fa::bar_sync(1, 128);
    if (t == 0) {
        fa::tma_store_4d(&o_map, o_smem, 0, 0, 0, 0);  // store O
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
    }
}
"""
DRAW = np.random.RandomState(8)
Q, K, V = (DRAW.randint(-1, 2, (rows, 64)).astype(float) for rows in (64, 320, 320))


def outputs(backend: Backend, folder: Path, *edits: tuple[str, str]) -> Any:
    """O of PIPELINE with some edits."""
    code = edited(PIPELINE, *edits) if edits else PIPELINE
    kernel = bound(backend, folder, code, MAPS, {"Q": Q, "K": K, "V": V}, block=256, shared=6 * 8192 + 64)
    return with_fields(kernel)[:8192].view(TYPES["bfloat16"]).reshape(64, 64).astype(float)


def right() -> Any:
    """What PIPELINE gives: P is exact in bfloat16, O is rounded."""
    return (Q @ K.T @ V).astype(TYPES["bfloat16"]).astype(float)


def test_the_pipeline_is_right(backend: Backend, tmp_path: Path) -> None:
    """On every backend."""
    assert np.array_equal(outputs(backend, tmp_path), right())


@pytest.mark.parametrize("check", [None, "race"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_right_pipeline_passes_in_silence(seed: int, check: str | None, tmp_path: Path) -> None:
    """Whenever its copies arrive, in whatever order its threads run, and without a race."""
    assert np.array_equal(outputs(Host(seed, check), tmp_path), right())


THERE, FREE = "full + stage, n / 2 & 1);  // there", "empty + stage, (n / 2 & 1) ^ 1);  // free"
RELEASE = "        if (lane == 0) fa::mbarrier_arrive(empty + stage);\n"
WAIT_O = "        fa::wgmma_wait<0>(o_reg, p_reg);  // O\n"
#: name: edits of PIPELINE, whether the race check is needed, what the report says.
FAULTS: dict[str, tuple[list[tuple[str, str]], bool, str]] = {
    "early stage release": (
        [(WAIT_O + RELEASE, RELEASE + WAIT_O)],
        False,
        r"shared memory was written while a wgmma that reads it .*:{P V}, retired at \S+:{// O}; the TMA load of thread 0 at \S+:{load V}",
    ),
    "no release": (
        [(RELEASE, "")],
        False,
        "deadlock.*thread.* 0 wait in mbarrier_wait_parity at .* for phase 0 .parity 0. .* 0 of 4 arrivals, 0 bytes",
    ),
    "missing phase flip": (
        [(THERE, "full + stage, 0);")],
        False,
        r"what a TMA load in flight is to write.*operand B of wgmma_ss at \S+:{Q K}.*:{load K}",
    ),
    "a producer that does not wait": ([(FREE, "empty + stage, 1);")], False, "more arrivals in a phase than it expects|in flight"),
    "wrong parity of the producer": ([("^ 1);  // free", ");")], False, "deadlock.*mbarrier_wait_parity.*mbarrier_wait_parity"),
    "too many bytes expected": (
        [("full + stage, 2 * TILE)", "full + stage, 3 * TILE)")],
        False,
        "deadlock.* 1 of 1 arrivals, 8192 bytes to come",
    ),
    "too few bytes expected": (
        [("full + stage, 2 * TILE)", "full + stage, TILE)")],
        False,
        "too few bytes were expected.*:({load V}|{load K})",
    ),
    "bytes never expected": ([("_expect_tx(full + stage, 2 * TILE)", "(full + stage)")], False, "what a TMA load in flight is to write"),
    "missing proxy fence": (
        [("    fa::fence_proxy_async_shared();\n", "")],
        True,
        r"{write O}, thread 128 reads at \S+:{store O}, no fence_proxy_async",
    ),
    "missing barrier before the store": (
        [("    fa::bar_sync(1, 128);\n", "")],
        True,
        r"{write O}, thread 128 reads at \S+:{store O}, no barrier",
    ),
    "accumulator read in flight": (
        [("wgmma_wait<0>(s_reg);  // S", "wgmma_wait<1>(s_reg);")],
        True,
        r"an accumulator of a wgmma in flight is read.* at \S+:{// P}, issued at \S+:{Q K}",
    ),
    "accumulator written in flight": (
        [(WAIT_O, "        o_reg[3] *= 2;\n" + WAIT_O)],
        False,
        r"an accumulator of a wgmma in flight was written.* register 3 .*issued at \S+:{P V}",
    ),
    "A registers overwritten in flight": (
        [(WAIT_O, "        p_reg[2][1] = n;\n" + WAIT_O)],
        False,
        r"an A register of a wgmma in flight was.*:{P V}",
    ),
    "descriptor of the wrong tile": (
        [("k_major(k_smem + stage * TILE)", "k_major(k_smem + (stage ^ 1) * TILE)")],
        False,
        r"what a TMA load in flight is to write|nothing has written",
    ),
    "descriptors that differ": (
        [("q_desc + 2 * step", "q_desc + 2 * step + 64 * (warp == 2)")],
        False,
        "descriptors of A differ between threads",
    ),
    "a descriptor inside an atom": (
        [("k_major(k_smem + stage * TILE)", "k_major(k_smem + stage * TILE + 128)")],
        False,
        "inside an atom of 8 rows",
    ),
    "two producers": (
        [("if (threadIdx.x == 0) {\n            fa::mb", "if (threadIdx.x < 2) {\n            fa::mb")],
        False,
        "more arrivals in a phase",
    ),
    "no wgmma_fence": (
        [
            (
                "        fa::wgmma_fence();\n#pragma unroll\n        for (int step = 0; step < 4; ++step)\n",
                "        for (int step = 0; step < 4; ++step)\n",
            )
        ],
        False,
        "without a wgmma_fence",
    ),
    "no wgmma_fence behind P": (
        [
            (
                "        fa::wgmma_fence();\n#pragma unroll\n        for (int step = 0; step < 4; ++step) fa::wgmma_rs",
                "        for (int step = 0; step < 4; ++step) fa::wgmma_rs",
            )
        ],
        False,
        r"registers of a wgmma were written since the last wgmma_fence.*wgmma_rs at \S+:{P V}",
    ),
    "no mbarrier_init_fence": ([("        fa::mbarrier_init_fence();\n", "")], False, "without mbarrier_init_fence"),
    "no barrier behind the initialisation": (
        [("    __syncthreads();\n", "")],
        True,
        r"thread 0 writes at .*, thread 128 reads at .* no barrier",
    ),
    "no wait for the store": ([("        fa::bulk_wait_read<0>();\n", "")], False, r"ended with a TMA store in flight.*:{store O}"),
    "no wait for the last product": (
        [(WAIT_O, "        if (n < 4) fa::wgmma_wait<0>(o_reg, p_reg);\n")],
        False,
        "ended with a wgmma in flight|nothing",
    ),
    "a tile that is not aligned": (
        [("o_smem, 0, 0, 0, 0)", "o_smem - 512, 0, 0, 0, 0)")],
        False,
        "not aligned in shared memory.*no multiple of 1024",
    ),
    "a named barrier of two counts": ([("fa::bar_sync(1, 128)", "fa::bar_sync(1, 128 - 32 * (t == 5))")], False, "different counts"),
    "a named barrier of too many": (
        [("fa::bar_sync(1, 128)", "fa::bar_sync(1, 160)")],
        False,
        "deadlock.*bar_sync .* at barrier 1: 128 of 160 threads",
    ),
    "warps of one group apart": (
        [
            (
                "        fa::wgmma_commit();\n        fa::wgmma_wait<0>(s_reg);  // S",
                "        if (warp) fa::wgmma_commit();\n        fa::wgmma_wait<0>(s_reg);",
            )
        ],
        False,
        "committed or waited for different",
    ),
    "a warp that stays away": (
        [("    const uint64_t q_desc", "    if (warp == 3) return;\n    const uint64_t q_desc")],
        False,
        "deadlock.*wgmma_ss .*: 96 of the 128 threads of warpgroup 1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    """With file and line of what takes part, in index order."""
    edits, race, told = FAULTS[name]
    with pytest.raises(KernelFault) as caught:
        outputs(Host(check="race" if race else None), tmp_path, *edits)
    told = re.sub(r"\{([^\d{}][^{}]*)\}", lambda m: str(planted.line_of(tmp_path / "word_forward.cu", m[1])), told)
    assert re.search(told, caught.value.why, re.DOTALL), f"no {told!r} in {caught.value.why}"
    assert "pc:" not in caught.value.why
    assert isinstance(caught.value, CheckFault) == ("race on" in caught.value.why)


#: Waits for a phase of a stage that others fill and empty: nothing keeps the next phase, of the other parity, from ending before.
BYSTANDER = (
    "        }\n        return;\n",
    "        }\n        if (threadIdx.x == 32) fa::mbarrier_wait_parity(empty, 0), fa::mbarrier_wait_parity(empty, 1);  // late\n        return;\n",
)


def test_a_warp_that_comes_late_misses_a_phase(tmp_path: Path) -> None:
    """In index order it comes in time, as on most days on a GPU. In some random schedules it is the late one, and waits for ever."""
    assert np.array_equal(outputs(Host(), tmp_path, BYSTANDER), right())
    ends = []
    for seed in range(24, 44):
        try:
            assert np.array_equal(outputs(Host(seed), tmp_path, BYSTANDER), right())
        except KernelFault as fault:
            ends.append(fault.why)
    line = planted.line_of(tmp_path / "word_forward.cu", "// late")
    assert 0 < len(ends) < 15
    assert all(re.search(rf"deadlock.*threads 32 wait in mbarrier_wait_parity at \S+:{line}", why, re.DOTALL) for why in ends)
