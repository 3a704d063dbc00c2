"""Run every pass of every kernel once at 65 tokens on the GPU: what compute-sanitizer is to watch (record.sh starts it).

With the word `planted`, run a kernel that reads beyond its tensors and lacks a barrier instead: the tools must find it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from harness import contender, kernel
from harness.backends import pick
from harness.problem import READS, Problem


def planted(folder: Path) -> kernel.Kernel:
    """fa2_naive without its first barrier, reading K far beyond the tensor."""
    path = folder / "planted_forward.cu"
    text = kernel.find("fa2_naive", "forward").path.read_text()
    for old, new in (
        ("        __syncthreads();  // no warp reads the tile before any more\n", ""),
        ("kv_head, k_first);  // [BLOCK_K], K.row apart", "kv_head, k_first + 64 * args.seq_kv);"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return kernel.Kernel.read(path)


def main() -> int:
    """Exit code 1 where a kernel is wrong."""
    backend = pick("cuda")
    wrong = 0
    kernels = [planted(Path(tempfile.mkdtemp()))] if "planted" in sys.argv else kernel.catalogue()
    for chosen in kernels:
        dtypes = dict.fromkeys("float32" if d == "tf32" else d for d in chosen.dtypes)  # tf32 is arithmetic on float32 files
        forms = [chosen.made_deterministic() if deterministic else chosen for deterministic in chosen.forms]
        for form, dtype in ((form, d) for form in forms for d in dtypes if d in ("float32", "bfloat16")):
            problem = Problem.of(1, 3, 65, 64, heads_kv=1, dtype=dtype, causal=True)
            yardstick = contender.Yardstick(problem, contender.data.generate(problem, 42), None, np)
            inputs = dict(yardstick.inputs) | (yardstick.forward_outputs() if chosen.pass_ == "backward" else {})
            done = contender.run_kernel(backend, form, yardstick, {name: inputs[name] for name in READS[chosen.pass_]})
            sys.stdout.write(f"{'PASS' if done.passed else 'FAIL'} {form.label} deterministic={form.deterministic} {problem.describe()}\n")
            wrong += not done.passed
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
