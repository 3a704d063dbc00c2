"""The operator as a contender of a sweep: prepared, judged and called as PyTorch's own attention is."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from harness.backends import pick
from harness.problem import Problem
from harness.row import OPERATOR
from harness.verbs import experiment, operator, results, run
from harness.verbs.sweep import load


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "problem",
    [
        Problem.of(1, 4, 40, 32, heads_kv=2, seq_kv=50, causal=True),
        Problem.of(1, 4, 40, 32, seq_kv=50, causal=True, causal_shift=3),
        Problem.of(1, 2, 33, 16, dtype="bfloat16"),
    ],
    ids=repr,
)
def test_it_is_right_in_both_passes(problem: Problem, deterministic: bool) -> None:
    """O, logsumexp and gradients within the budget, a run between events, and the host time of a plain call; no command runs it alone."""
    backend = pick("cpu")
    found = run.check_in_memory(operator.contender("cpu", deterministic), "both", problem, backend)
    assert found.passed and set(found.verdicts) == {"O", "logsumexp", "dQ", "dK", "dV"}
    (timed,) = run.time_together([found], backend, "warm")
    assert all(each.timings["warm"].call_ms > 0 and str(each.ran).startswith("fa_cli.attention, torch ") for each in timed.passes.values())
    rows = results.rows_of(timed, "test", "run")
    assert [(row.Kernel, row.Type, row.repro, row.Status) for row in rows] == [(OPERATOR, t, None, "PASS") for t in ("FOR", "BAC", "BOT")]


def test_a_sweep_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """mixed does, on a GPU: beside the kernels and peers of every shape. No sweep has it on the CPU, whose call times say nothing."""
    sweep, cpu = load("mixed", 1, 4), pick("cpu")
    assert sweep.operator and not load("seqlen").operator

    def names(kind: str) -> set[str]:
        monkeypatch.setattr(type(cpu), "name", kind)
        found, _ = experiment._contenders(experiment.Options("mixed", peers=()), sweep, "forward", sweep.cpu_shapes, cpu)
        return {some[-1].name for some in found}

    assert names("cuda") == {OPERATOR} and OPERATOR not in names("cpu")
