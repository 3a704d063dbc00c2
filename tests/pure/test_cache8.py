"""Problems with K and V of 8 bits beside Q of 16: what they are, where they are refused, and what they are judged by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness import peers
from harness.check.contender import check_logits
from harness.check.oracle import Oracle, arithmetic_of
from harness.dataset import folder, generate
from harness.dataset.change import Change
from harness.fault import UsageFault
from harness.kernel import Device, catalogue, find, planner
from harness.partition import Partition
from harness.problem import DESCALES, UNKNOWN_DESCALES_KV, Problem
from harness.verbs.results import repro
from harness.verbs.verify.cases import Case
from harness.verbs.verify.fuzz import draw, formed

CACHED = Problem.of(2, 8, 3, 64, 2, 300, "bf16", True, dtype_kv="fp8")
WORTH = {"descale_k": [[1.0, 2.0], [0.5, 4.0]], "descale_v": [[3.0, 1.0], [1.0, 0.25]]}


def test_a_problem_with_a_cache_of_8_bits() -> None:
    """One byte an element of K and V, in every name and count; descales of these two alone; a plain problem is as it was."""
    assert [CACHED.tensor_dtype(name) for name in ("Q", "K", "V", "O")] == ["bfloat16", "float8_e4m3", "float8_e4m3", "bfloat16"]
    plain = CACHED.with_(dtype_kv=None)
    assert CACHED.bytes("forward") == plain.bytes("forward") - 2 * 2 * 2 * 300 * 64 and CACHED.flops("forward") == plain.flops("forward")
    assert [each.name for each in CACHED.tensors] == ["descale_k", "descale_v"] and not plain.tensors
    assert CACHED.folder == f"{plain.folder}_KVfloat8_e4m3" and Problem.from_folder(CACHED.folder) == CACHED.with_(causal=False)
    assert CACHED.with_(head_dim=128).dtype_kv == "float8_e4m3" and plain.with_(dtype="float16").dtype_kv == "float16"
    assert CACHED.record["dtype_kv"] == "float8_e4m3" and "dtype_kv" not in plain.record
    assert "--dtype bfloat16 --causal --kv-dtype float8_e4m3" in str(repro("decode", "forward", CACHED, False))
    paged = CACHED.with_(page_size=16, seq_kv=[100, 7])
    assert paged.bytes("forward") == 2 * 2 * 8 * 3 * 64 * 2 + 4 * 2 * 8 * 3 + 107 * 2 * 2 * 64


@pytest.mark.parametrize("given, words", [
    ({"dtype": "float32", "dtype_kv": "e4m3"}, "K and V in float8_e4m3 beside Q in float32"),
    ({"dtype": "float16", "dtype_kv": "bf16"}, "K and V in bfloat16 beside Q in float16"),
    ({"dtype": "float16", "dtype_kv": "int8"}, "unknown kv-dtype 'int8'"),
    ({"dtype": "float16", "dtype_kv": "e4m3", "tensors": {"descale_q": 1.0}}, "no text names descale_q"),
    ({"dtype": "float16", "dtype_kv": "e4m3", "tensors": {"descale_k": [1.0, 2.0]}}, "descale_k has the shape"),
])  # fmt: skip
def test_what_is_none(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageFault, match=words):
        Problem.of(**given)  # type: ignore[arg-type]


def test_who_takes_it() -> None:
    """decode, which --compute auto then takes at any length, and no other kernel or peer: they say what, and who does."""
    problem = CACHED.with_(causal=False, seq_q=100)
    for kernel in catalogue():
        if problem.dtype not in kernel.dtypes or kernel.name == "decode":
            continue
        with pytest.raises(UsageFault, match="does not support K and V in float8_e4m3 beside Q in bfloat16") as caught:
            planner.refuse(kernel, problem)
        assert kernel.pass_ == "backward" or "use decode" in caught.value.hint
    device = Device("cuda", "", "sm_90a", sms=132)
    assert planner.for_auto(find("decode", "forward"), problem, device)
    peer = peers.find("torch-flash") or peers.find("numpy")
    assert peer
    with pytest.raises(UsageFault, match="it is given K and V in bfloat16"):
        peer.refuse(problem, "forward")
    with pytest.raises(UsageFault, match="a cache of 8 bits over several ranks"):
        Partition.of(problem, 2)


def test_the_plan_has_the_descales_behind_the_workspaces() -> None:
    """fa::descale_of counts from Q's, of which there is none; tensors of texts and pages follow; tiles are of single bytes."""
    device, decode = Device("cuda", "", "sm_90a", sms=132), find("decode", "forward")
    problem = CACHED.with_(page_size=16, score="s + bias[h]", tensors=dict(WORTH) | {"bias": None})
    found = planner.plan(decode, problem, device)
    macros = dict(found.macros)
    assert macros["DTYPE_KV"] == "float8_e4m3" and macros["FA_DESCALES"] == "1" and macros["FA_TENSOR_bias"].startswith("Table<4,")
    assert (macros["FA_BLOCK_TABLE"], macros["FA_CACHE_SEQLENS"]) == ("5", "6")
    assert [each.name for each in found.tensors] == ["descale_k", "descale_v", "bias", "block_table", "cache_seqlens"]
    wide = {
        dtype: planner.plan(decode, Problem.of(16, 32, 1, 128, 8, 8192, "float16", dtype_kv=dtype), device) for dtype in ("f16", "e4m3")
    }
    assert dict(wide["f16"].macros)["BLOCK_K"] == "64" and dict(wide["e4m3"].macros)["BLOCK_K"] == "128"
    assert wide["f16"].launches[0].shared + 64 == wide["e4m3"].launches[0].shared  # the factors of 16 rows of Q


def test_the_reference_is_of_what_the_bytes_are_worth() -> None:
    """In float64, and in the class of 16 bits; numbers are those of a plain problem, rounded further."""
    problem = CACHED.with_(tensors=WORTH)
    inputs = generate.inputs(problem, 3, ("Q", "K", "V"))
    plain = generate.inputs(CACHED.with_(dtype="float64", dtype_kv=None), 3, ("Q", "K", "V"))
    assert np.array_equal(inputs["K"], plain["K"].astype(inputs["K"].dtype)) and np.array_equal(
        inputs["Q"], plain["Q"].astype(inputs["Q"].dtype)
    )
    wide = {name: inputs[name].astype(np.float64) for name in "QKV"}
    for name in "KV":
        wide[name] *= np.array(WORTH[DESCALES[name]])[..., None, None]
    exact = Oracle(CACHED.with_(dtype="float64", dtype_kv=None), wide).reference
    mine = Oracle(problem, inputs)
    assert arithmetic_of(problem) == "p16"
    for name in ("O", "logsumexp"):
        assert np.abs(mine.reference[name] - exact[name]).max() < 1e-12
    assert all(verdict.passed for verdict in mine.judge(mine.forward_outputs, "p16").values())
    swapped = problem.with_(tensors={name: np.array(value)[::-1] for name, value in WORTH.items()})
    wrong = mine.judge(Oracle(swapped, inputs).forward_outputs, "p16")
    assert not wrong["O"].passed and not wrong["logsumexp"].passed


def test_a_data_folder_of_it(tmp_path: Path) -> None:
    """K.bin and V.bin have a byte an element, and meta.json says so."""
    made = folder.write(CACHED, 5, tmp_path)
    assert made.meta is not None and made.meta["dtype_kv"] == "float8_e4m3" and made.problem == CACHED.with_(causal=False)
    assert (made.folder / "K.bin").stat().st_size == 2 * 2 * 300 * 64 and (made.folder / "Q.bin").stat().st_size == 2 * 2 * 8 * 3 * 64
    again = folder.open_(made.folder).read_inputs(("Q", "K", "V"))
    drawn = generate.generate(CACHED, 5)
    assert all(np.array_equal(again[name], drawn[name]) for name in ("Q", "K", "V"))


def test_a_fuzz_draws_it() -> None:
    """For the kernel that takes it, with unknown descales, also in pages; written as a case that is read back."""
    decode = find("decode", "forward")
    cases = [formed(decode, draw(7, number)) for number in range(200)]
    found = [case for case in cases if case.problem.has_own_dtype_kv]
    assert 10 < len(found) < 100 and any(case.problem.page_size for case in found)
    assert all(dict.fromkeys(each.name for each in case.problem.tensors[:2]) == dict(UNKNOWN_DESCALES_KV) for case in found)
    case = next(case for case in found if not case.problem.formulas and not case.problem.keys_text)
    assert Case.parse(case.text()).problem == case.problem


def test_the_largest_score_is_one_of_what_the_bytes_are_worth() -> None:
    """Beyond what a header promises it is refused, also where a descale alone makes it so large."""
    decode, inputs = find("decode", "forward"), generate.inputs(CACHED, 3, ("Q", "K", "V"))
    check_logits(decode, CACHED.with_(tensors=WORTH), inputs)
    with pytest.raises(UsageFault, match="decode_forward does not take scores as large as"):
        check_logits(decode, CACHED.with_(tensors={"descale_k": [[1.0, 1.0], [1.0, 5e3]]}), inputs)


def test_what_the_bytes_are_worth_stays_in_its_place() -> None:
    """New inputs by the symmetries of attention: batches and heads change places only where all are worth the same."""
    problem = CACHED.with_(heads_q=16, heads_kv=8)
    moved = {}
    for worth in (1.0, np.arange(1, 17).reshape(2, 8)):
        drawn = [Change.drawn(problem.with_(tensors={"descale_k": worth})) for _ in range(9)]
        moved[np.size(worth)] = any((*each.batches, *each.heads) != (0, 1, *range(8)) for each in drawn)
    assert moved == {1: True, 16: False}
