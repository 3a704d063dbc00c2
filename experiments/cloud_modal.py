"""fa-cli on a rented GPU at Modal (modal.com), where there is none at hand. Not run by us: we have no account there.

    pip install modal && modal setup
    modal run experiments/cloud_modal.py --command "run --compute fa2,./mine_forward.cu --mode both"
    FA_CLI_GPU=L4 modal run experiments/cloud_modal.py --command "experiment --seqlen"

Kernel files (.cu, .cuh) of the current folder go along; small files that the command writes come back into ./cloud_results.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import modal

GPU = os.environ.get("FA_CLI_GPU", "H100")
LARGEST = 8 << 20  # bytes of a file that comes back: tables, figures and reports, not tensors
CHECKOUT = Path(__file__).resolve().parent.parent
LEAVE = [".git", ".venv", "**/__pycache__", "data/B*", "experiment_results", "profiles", "cloud_results"]

app = modal.App("fa-cli")
image = modal.Image.debian_slim(python_version="3.12")
if modal.is_local():  # inside the container this file stands alone, and the image is there
    image = image.add_local_dir(CHECKOUT, "/fa-cli", copy=True, ignore=LEAVE).run_commands("pip install '/fa-cli[cuda12]'")


@app.function(gpu=GPU, image=image, timeout=3600)
def on_gpu(command: str, sources: dict[str, bytes]) -> tuple[int, dict[str, bytes]]:
    """Run a fa-cli command there; its exit code and what it wrote. Its output is shown as it comes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in sources.items():
            (folder / file).write_bytes(text)
        code = subprocess.run(["fa-cli", *shlex.split(command)], cwd=folder).returncode
        made = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size <= LARGEST]
        return code, {str(p.relative_to(folder)): p.read_bytes() for p in made if p.name not in sources and p.suffix != ".bin"}


@app.local_entrypoint()
def main(command: str = "run --compute fa2 --mode both") -> None:
    """Send the kernels of this folder and a command, and write what comes back."""
    sources = {path.name: path.read_bytes() for path in Path.cwd().iterdir() if path.suffix in (".cu", ".cuh")}
    code, files = on_gpu.remote(command, sources)
    for name, content in files.items():
        path = Path("cloud_results") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sys.exit(code)
