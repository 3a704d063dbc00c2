"""What the hardware does while a kernel runs: Nsight Compute, Nsight Systems, and the counters they give."""

from .nsight import is_child as is_child
from .nsight import launch as launch
from .nsight import profile as profile
