"""The budgets of 20 small cases, of every arithmetic class and tensor: python experiments/trust/budgets.py [--write]

Nothing is compiled: a case is its reference, its baselines and their limits. The record, budgets.csv, is the same on every machine, and
tests/pure/test_budgets_record.py computes it again and compares every digit. Where budgets are meant to change, --write writes it anew;
`git diff` then says of which cases, and by how much. Without --write the lines that differ are printed; exit code 1 where one does.
"""

from __future__ import annotations

import csv
import difflib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.check import budget
from harness.check.baselines import baselines
from harness.check.reference import reference
from harness.dataset import generate
from harness.dataset.storage import round_to
from harness.problem import WRITES, Problem
from harness.verbs.results import errors_of
from harness.verbs.verify.cases import Case
from harness.verbs.verify.inputs import inputs

RECORD = Path(__file__).resolve().with_suffix(".csv")
#: Shapes, masks, groups, scales and inputs as `fa-cli verify --case` has them.
CASES = (
    "B1_H2_S64_D32",
    "B2_H3_S33_D16,causal",
    "B1_H4_S40_D64_Hkv2_Skv100,causal",
    "B1_H2_S48_D48_Hkv1,times=10.0,seed=7",
    "B2_H2_S1_D64_Skv65",
    "B1_H2_S40_D24_Skv1",
    "B1_H2_S64_D32,inputs=constant_rows",
    "B1_H2_S50_D40_Skv70,inputs=equal_keys",
    "B1_H2_S64_D32_float16",
    "B1_H4_S63_D40_Hkv1_Skv130_float16,causal,shift=62",
    "B1_H2_S64_D32_float16,scale=-0.5,seed=3",
    "B1_H2_S96_D64_float16,inputs=large_v",
    "B1_H2_S40_D128_float16,causal,inputs=one_key",
    "B1_H2_S64_D32_bfloat16",
    "B1_H6_S65_D80_Hkv3_bfloat16,causal",
    "B2_H2_S40_D64_Skv200_bfloat16,times=3.0",
    "B1_H2_S128_D16_bfloat16,scale=0.0",
    "B1_H2_S64_D64_bfloat16,inputs=one_hot,seed=5",
    "B1_H2_S64_D32_float64",
    "B1_H4_S40_D48_Hkv2_Skv72_float64,causal",
)
#: The arithmetic classes of kernels for a storage type.
CLASSES = {"float32": ("f32", "tf32"), "float16": ("f32", "p16"), "bfloat16": ("f32", "p16"), "float64": ("f64",)}
COLUMNS = ("case", "arithmetic", "tensor", "budget", "baseline", "rms_budget", "bias_budget", "slope_budget")


def lines(text: str) -> Iterator[tuple[object, ...]]:
    """A line of the record for each class and tensor of a case.

    baseline is the largest error of the baselines, of float64 that of the rounded reference. The limits of the moments are those of the
    baseline with the keys in order, judged as a kernel's outputs are; empty where there is none.
    """
    case = Case.parse(text)
    problem, tensors = case.problem, inputs(case.problem, case.seed, generate.INPUTS, case.inputs, case.input_scale)
    exact = reference(np, problem, tensors)
    for arithmetic in CLASSES[problem.dtype]:
        ways = baselines(np, problem, tensors, arithmetic)
        outputs = _stored(problem, ways or [dict(exact.values)])
        judged = [budget.compare(exact, each, ways, None, arithmetic=arithmetic) for each in outputs]
        for tensor in (name for names in WRITES.values() for name in names):
            found = [errors_of(verdicts[tensor]) for verdicts in judged if tensor in verdicts]
            limits = [found[0][name] for name in COLUMNS[5:]]
            largest = max(each["max_abs"] for each in found)
            yield text, arithmetic, tensor, found[0]["budget"], largest, *("" if np.isnan(limit) else limit for limit in limits)


def _stored(problem: Problem, ways: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Outputs in their storage types, which those of a baseline have been rounded to."""
    return [{name: round_to(np, array, problem.tensor_dtype(name)) for name, array in way.items()} for way in ways]


def table() -> str:
    """The record as it is computed now."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(line for text in CASES for line in lines(text))
    return out.getvalue()


@click.command()
@click.option("--write", is_flag=True, help="Write the record instead of comparing with it.")
def main(write: bool) -> None:
    """Write the record, or say where it differs."""
    now = table()
    if write:
        RECORD.write_text(now)
        return
    before = RECORD.read_text() if RECORD.exists() else ""
    wrong = list(difflib.unified_diff(before.splitlines(), now.splitlines(), RECORD.name, "now", n=0, lineterm=""))
    print("\n".join(wrong) or f"{len(now.splitlines()) - 1} budgets are as recorded")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
