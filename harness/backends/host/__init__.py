"""The CPU engine: the same .cu files through a C++ compiler, each CUDA thread a fiber (kernels_cu/host/engine.cpp)."""

from .backend import Host as Host
from .backend import run_under_asan as run_under_asan
from .build import compiler as compiler
