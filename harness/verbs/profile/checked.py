"""A profile is of a kernel that is right."""

from __future__ import annotations

from collections.abc import Mapping

from ...backends import Backend
from ...check import budget
from ...check.contender import PassResult, run_kernel
from ...check.oracle import Oracle
from ...fault import Fault
from ...kernel import Kernel


def checked(kernel: Kernel, oracle: Oracle, backend: Backend, tiles: Mapping[str, int]) -> PassResult:
    """A kernel's run on an oracle's problem, ready to be run again. Raises Fault (exit code 1) where it is wrong, and as run_kernel does."""
    found = run_kernel(backend, kernel, oracle, oracle.inputs_of(kernel.pass_), tiles)
    if not found.passed:
        why = "; ".join(budget.message(v) for v in found.verdicts.values() if not v.passed)
        raise Fault(f"{kernel.label} is wrong, and is not profiled", why, f"fa-cli run --compute {kernel.spec} shows where")
    return found
