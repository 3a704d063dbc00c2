"""Faults planted in a ring of two blocks of a cluster, and in an exchange between products, and what the CPU engine says of each.

Block 0 sends tiles to block 1 by bulk copies through two stages; block 1 gives each stage back by a remote arrival.
"""

from __future__ import annotations

import re
from pathlib import Path

import planted
import pytest
from test_cluster_words import products, ring

from harness.backends.host.backend import Host
from harness.fault import KernelFault


def named(told: str, report: str, folder: Path) -> None:
    """Asserts that a report holds a pattern, in which {words} stand for the line of the kernel with these words."""
    told = re.sub(r"\{([^\d{}][^{}]*)\}", lambda m: str(planted.line_of(folder / "word_forward.cu", m[1])), told)
    assert re.search(told, report, re.DOTALL), f"no {told!r} in {report}"
    assert "pc:" not in report


FIRST, LAST = "    fa::cluster_sync();  // initialised\n", "    fa::cluster_sync();  // the end\n"
GIVE = "            if (t % 32 == 0) fa::mbarrier_arrive_remote(fa::map_shared(empty + stage, 0));  // give back\n"
SEND = "fa::bulk_copy_to_cluster(fa::map_shared(tile, 1), tile, BYTES, fa::map_shared(full + stage, 1));"
TOUCH = "    if (rank == {} && t == 5) fa::mbarrier_arrive_remote(fa::map_shared(empty, {}));  // late\n"
#: name: edits of RING, whether the race check is needed, what the report says.
FAULTS: dict[str, tuple[list[tuple[str, str]], bool, str]] = {
    "no barrier behind the initialisation": (
        [(FIRST, "    __syncthreads();\n")],
        False,
        r"no mbarrier: never initialised.*:{// send}.* of block 1",
    ),
    "no barrier behind the initialisation, seen by the race check": (
        [
            (FIRST, "    __syncthreads();\n"),
            ("rank == 0", "rank == 1"),
            ("map_shared(tile, 1)", "map_shared(tile, 0)"),
            ("full + stage, 1));  // send", "full + stage, 0));  // send"),
            ("empty + stage, 0)", "empty + stage, 1)"),
        ],
        True,
        r"thread 0 of block 0 writes at .*, thread 0 of block 1 reads at \S+:{// send}, no barrier orders them",
    ),
    "an access behind the last barrier": (
        [(LAST, LAST + TOUCH.format(0, 1))],
        False,
        "a block of the cluster that has ended.*:{// late}, to block 1",
    ),
    "an access behind the last barrier, seen by the race check": (
        [(LAST, LAST + TOUCH.format(1, 0))],
        True,
        r"the shared memory of block .[02], 0, 0., which may have ended: thread 5 of block 1 at \S+:{// late}, no cluster barrier",
    ),
    "no barrier at the end": (
        [(LAST, "")],
        False,
        r"a block ended while a copy from its shared memory .*thread 0 of block 0 of the cluster at \S+:{// send}",
    ),
    "the receiver ends": (
        [
            ("if (rank == 0) {", "if (rank == 1 && t >= 0) return;\n    if (rank == 0) {"),
            (FIRST, FIRST + "    if (rank == 0) fa::mbarrier_test_parity(full, 0);\n"),
        ],
        False,
        "a block of the cluster that has ended.*:{// send}, to block 1",
    ),
    "a stage given back too early": (
        [(GIVE, ""), ("            sum += tile_smem", GIVE + "            sum += tile_smem")],
        True,
        r"thread \d+ of block 1 reads at \S+:{// read the tile}, thread 0 of block 0 starts to copy at \S+:{// send}, no barrier",
    ),
    "a stage given back while loads of it are in flight": (
        [("            fa::fence_proxy_async_shared();  // of the loads\n", "")],
        True,
        r"thread \d+ of block 1 reads at \S+:{// read the tile}, thread 0 of block 0 starts to copy at \S+:{// send}, the read may be in flight",
    ),
    "a tile written while it is sent": (
        [("(n / STAGES & 1) ^ 1);  // free", "1);  // free")],
        False,
        r"shared memory was written while a copy from it to another block was in flight.*:{// send}|more arrivals|in another phase",
    ),
    "a tile written while it is sent, seen by the race check": (
        [("(n / STAGES & 1) ^ 1);  // free", "1);  // free")],
        True,
        r"TMA reads at \S+:{// send}, thread \d+ of block 0 writes at \S+:{// write the tile}, no barrier",
    ),
    "no wait for the copy": (
        [("            fa::mbarrier_wait_parity(full + stage, n / STAGES & 1);  // there\n", "")],
        True,
        r"TMA has a copy in flight, begun at \S+:{// send}, thread \d+ of block 1 reads at \S+:{// read|more arrivals",
    ),
    "no proxy fence": (
        [("            fa::fence_proxy_async_shared();  // of the tile\n", "")],
        True,
        r"of block 0 writes at \S+:{// write the tile}, thread 0 of block 0 reads at \S+:{// send}, no fence_proxy_async",
    ),
    "no bytes expected": ([("full + stage, BYTES);", "full + stage, 0);")], False, "in another phase of its mbarrier.*:{// send}|deadlock"),
    "too many bytes expected": (
        [("full + stage, BYTES);", "full + stage, 2 * BYTES);")],
        False,
        "deadlock.*block 0 of the cluster.*block 1 of the cluster.*2048 bytes to come",
    ),
    "no arrival": (
        [(GIVE, "")],
        False,
        r"deadlock.*block 0 of the cluster.*:{// free} for phase 0 .*0 of 4 arrivals.*block 1 .*:{// there}",
    ),
    "a block that stays away from the barrier": (
        [(LAST, "    if (rank == 0) fa::cluster_sync();\n    else fa::mbarrier_wait_parity(full, tiles / STAGES & 1);  // for ever\n")],
        False,
        r"deadlock.*cluster_wait at \S+: 128 of the 256 threads of the cluster have arrived.*:{// for ever}",
    ),
    "threads that peek for ever": (
        [(LAST, "    while (!fa::mbarrier_test_parity(full, tiles / STAGES & rank)) {}\n")],
        False,
        "deadlock.*block 0 of the cluster.*threads 0-127 wait in mbarrier_test_parity.*block 1",
    ),
    "two arrivals": ([(FIRST, "    fa::cluster_arrive();\n" + FIRST)], False, "a second cluster_arrive without a cluster_wait"),
    "a wait alone": ([(FIRST, "    fa::cluster_wait();\n" + FIRST)], False, "a cluster_wait without a cluster_arrive"),
    "a mapped address used as a local one": (
        [(FIRST, FIRST + "    fa::cp_async_16(fa::map_shared(smem, 0), args.Q.data);  // here\n")],
        False,
        "an address of map_shared in a word that takes one of the own shared memory.*:{// here}",
    ),
    "a local address used as a mapped one": (
        [(SEND, SEND.replace("fa::map_shared(tile, 1)", "fa::smem_u32(tile)"))],
        False,
        "an address of the own shared memory in a word that takes one of map_shared.*:{// send}",
    ),
    "an mbarrier of another block": (
        [("map_shared(full + stage, 1));", "map_shared(full + stage, 0));")],
        False,
        "that an mbarrier of another is to count.*:{// send}",
    ),
    "a rank outside the cluster": (
        [("map_shared(full + stage, 1));", "map_shared(full + stage, 2));")],
        False,
        "map_shared to a block outside the cluster.*:{// send}",
    ),
    "beyond shared memory": (
        [("map_shared(tile, 1),", "map_shared(tile, 1) + 15000,")],
        False,
        "address not aligned|outside shared memory",
    ),
    "a multicast outside the cluster": (
        [(FIRST, FIRST + "    if (t == 0) fa::tma_load_4d_multicast(smem, &k_map, full, 4, 0, 0, 0, 0);  // here\n")],
        False,
        "a multicast to a block outside the cluster.*:{// here}",
    ),
    "a source that is not aligned": (
        [("1), tile, BYTES", "1), tile + 1, BYTES")],
        False,
        "from no 16-byte aligned place.*:{// send}",
    ),
    "no mbarrier_init_fence": ([("        fa::mbarrier_init_fence();\n", "")], False, "without mbarrier_init_fence.*:{// send}"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    """With file and line of what takes part, in index order."""
    edits, race, told = FAULTS[name]
    with pytest.raises(KernelFault) as caught:
        ring(Host(check="race" if race else None), tmp_path, *edits)
    named(told, caught.value.why, tmp_path)


@pytest.mark.parametrize(
    ("form", "edit", "told"),
    [
        (
            0,
            ("    fa::fence_proxy_async_shared();  // of S\n", ""),
            r"{// write S}, thread 0 of block 0 reads at \S+:{// send S}, no fence_proxy",
        ),
        (
            1,
            ("if (args.heads_kv == 1) fa::fence_proxy_async_shared();", ""),
            r"TMA writes at \S+:{// store S}, .* reads at \S+:{// S V}, no fence_pr",
        ),
        (
            0,
            ("    fa::mbarrier_wait_parity(received, 0);\n", ""),
            r"nothing has written, or only a copy still in flight.*operand A of wgmma_ss at \S+:{// S V}",
        ),
    ],
)
def test_a_fault_between_products_is_named(form: int, edit: tuple[str, str], told: str, tmp_path: Path) -> None:
    """Under the race check: a missing proxy fence of the sender, and of the reader of stores; a missing wait."""
    with pytest.raises(KernelFault) as caught:
        products(Host(check="race"), tmp_path, form, edit)
    named(told, caught.value.why, tmp_path)
