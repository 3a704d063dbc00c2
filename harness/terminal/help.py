"""What the help of several verbs says at its end."""

from __future__ import annotations

EXIT_CODES = """\
\b
Exit codes: 0 ok; 1 a check failed; 2 usage (unknown kernel, unsupported
shape); 3 bad data; 4 environment (no GPU, package or compiler); 5 a kernel
did not compile or launch; 6 disk; 130 Ctrl-C."""

VERDICTS = """\
\b
How a verdict is reached. The ratio is time of B / time of A, with a 95%
interval: from samples.jsonl by order statistics of each median (7 samples or
more; of 3 to 6 the whole range, its width tripled), without samples from p20,
p80 and the sample count, twice as wide as for normal noise.
  SAME     the interval lies within 1 +- 3%
  FASTER, SLOWER  else, where it lies wholly beyond 1 +- 1%
  UNSURE   everything else, and fewer than 3 samples"""

CAUSAL = """\
\b
The causal mask is bottom-right aligned, as in FlashAttention: the last query
sees every key. torch's is_causal is top-left; they differ where --seq-kv
differs from --seq."""


def examples(*lines: str) -> str:
    """The end of a verb's help: commands that work as they stand."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
