"""What the hardware does while a kernel runs: Nsight Compute, Nsight Systems, and the counters they give."""

from .nsight import profile as profile
