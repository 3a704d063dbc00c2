# What gdb is told before it runs a kernel on the CPU: `fa-cli run --debug` and .vscode/launch.json read this file.
# A breakpoint in a .cu file waits until the kernel is compiled and loaded, which a pending one does.
set breakpoint pending on
# Python's own scripts for gdb are of no use here, and a refusal to load them takes ten lines.
set auto-load python-scripts off
# The built-in variables of the thread that stopped (Self in engine.hpp).
macro define threadIdx (fa_host_self->thread_idx)
macro define blockIdx (fa_host_self->block_idx)
macro define blockDim (fa_host_self->block_dim)
macro define gridDim (fa_host_self->grid_dim)
