"""decode: which keys its blocks read, and how the parts divide them."""

from __future__ import annotations

import numpy as np

from harness.array import to_host
from harness.backends import Backend
from harness.check.reference import reference
from harness.check.tensors import Bound, Paged, put
from harness.dataset import generate
from harness.kernel import find, planner
from harness.kernel.plan import Device
from harness.problem import Problem

DECODE = find("decode", "forward")


def test_a_window_reads_its_tiles_only_and_all_parts_have_some(backend: Backend) -> None:
    """K and V are NaN outside the tiles that some row sees: a score of a hidden key may be NaN, but 0 times NaN of V would be in O."""
    problem = Problem.of(2, 4, 3, 64, 2, 4000, "bfloat16", True, mask="0 <= q - k and q - k <= 900")
    given = generate.inputs(problem, 42, ("Q", "K", "V"))
    tiles = {"PARTS": 4}
    loaded = backend.load(DECODE, problem, tiles)
    size = int(loaded.plan.values["BLOCK_K"])
    first = (problem.seq_kv - problem.seq_q - 900) // size * size
    for name in ("K", "V"):
        given[name].view(np.uint16)[:, :, :first] = 0xFFFF
    bound = Bound(backend, loaded, problem, given)
    outputs = bound.run()
    assert first > 2900 and np.isfinite(outputs["O"].astype(np.float32)).all()
    sums = next(tensor for space, tensor in bound.workspaces if space.name == "sums")
    found = to_host(backend.get(sums.buffer)).view(np.float32)
    assert found.size == 2 * 4 * 3 * 4 and np.isfinite(found).all(), "a part had no key, though there are 15 tiles for 4"


def test_the_columns_of_v_are_counted_apart() -> None:
    """Head dims 192 and 128: a stage holds tiles of both widths, a part's O that of V."""
    problem = Problem.of(1, 8, 1, 192, 1, 8192, "bfloat16", dim_v=128)
    plan = planner.plan(DECODE, problem, Device("cuda", "", arch="sm_90", sms=132, shared_optin=232448))
    assert dict(plan.macros)["HEAD_DIM"] == "256" and dict(plan.macros)["HEAD_DIM_V"] == "128"
    parts, stages = int(plan.values["PARTS"]), int(plan.values["STAGES"])
    assert plan.launches[0].shared == 2 * 16 * 256 + stages * 64 * 2 * (256 + 128)
    assert next(space.elements for space in plan.workspaces if space.name == "partial") == 8 * parts * 128


PAGED = Problem.of(3, 4, 2, 64, 2, [700, 33, 1300], "bfloat16", True, page_size=16, mask="0 <= q - k and q - k <= 600", sinks="1.0 - h")


def test_the_reference_of_pages_is_that_of_each_sequence_alone(backend: Backend) -> None:
    """O and logsumexp in float64, of a causal mask, a window and sinks, and of what each sequence has of the same K and V."""
    given = {name: put(backend.xp, array) for name, array in generate.inputs(PAGED, 42, ("Q", "K", "V")).items()}
    whole = reference(backend.xp, PAGED, given)
    for b, keys in enumerate(PAGED.lengths):
        alone = PAGED.with_(page_size=None, batch=1, seq_kv=keys)
        own = {name: given[name][b : b + 1, :, : keys if name != "Q" else None] for name in given}
        wanted = reference(backend.xp, alone, own)
        for name in ("O", "logsumexp"):
            np.testing.assert_allclose(to_host(whole[name])[b], to_host(wanted[name])[0], rtol=1e-13, atol=1e-13)


def test_a_pool_is_poison_but_for_the_keys_that_sequences_have(backend: Backend) -> None:
    """What is uploaded is read back, 0 behind a last key; each key lies where the table says."""
    given = generate.inputs(PAGED, 42, ("K",))["K"]
    for wide in (0, 2):
        pool = Paged(backend, PAGED, "K", 72, wide)
        pool.upload(given)
        bits, there = to_host(pool.bits()), np.arange(1300)[None, :] < np.array(PAGED.lengths)[:, None]
        assert np.array_equal(np.moveaxis(bits, 1, 2)[there], np.moveaxis(given.view(np.uint16), 1, 2)[there])
        assert not np.moveaxis(bits, 1, 2)[~there].any() and pool.holds(put(backend.xp, given).view(np.uint16))
        held = to_host(pool.rows()).view(np.uint16)[..., :64]
        assert (held != 0xFFFF).all(-1).sum() == 2 * sum(PAGED.lengths) and (held == 0xFFFF).all(-1).sum() == held[..., 0].size - 2 * 2033
        page = PAGED.paging[0].values[2, 40]
        assert np.array_equal(held[page, 1, 7], given.view(np.uint16)[2, 1, 40 * 16 + 7])


def test_lengths_may_change_between_launches(backend: Backend) -> None:
    """The same launches, as a graph replays them, on shorter lengths in the same memory: what is right for these."""
    tiles = {"PARTS": 5}
    given = generate.inputs(PAGED, 42, ("Q", "K", "V"))
    bound = Bound(backend, backend.load(DECODE, PAGED, tiles), PAGED, given)
    bound.run()
    for lengths in ([5, 33, 700], [700, 1, 1299], list(PAGED.lengths)):
        bound.named["cache_seqlens"].upload(np.array([lengths], np.int32))
        bound.poison()
        bound.launch()
        shorter = PAGED.with_(seq_kv=lengths)
        wide = shorter.seq_kv
        own = {name: array[:, :, : wide if name != "Q" else None] for name, array in given.items()}
        exact = reference(backend.xp, shorter, {name: put(backend.xp, array) for name, array in own.items()})
        outputs = bound.outputs()
        np.testing.assert_allclose(outputs["logsumexp"], to_host(exact["logsumexp"]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(outputs["O"].astype(np.float64), to_host(exact["O"]), rtol=2e-2, atol=2e-2)
