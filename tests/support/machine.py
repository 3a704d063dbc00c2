"""One story in a process of its own, with every digit of every error: `python machine.py FOLDER` prints what commands said and wrote.

Whoever starts it sets the environment (tests/cli/test_machines.py): a BLAS, numpy and the C library read it once, when they are loaded.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import frozen  # noqa: E402  # it is found there only
from click.testing import CliRunner  # noqa: E402
from planted import WRONG  # noqa: E402

#: Both passes in float32; products large enough for two threads of a BLAS, under a mask, with GQA; rounded P; tf32; a wrong kernel, with
#: the places of its largest errors; a case that shrinks; hashes of generated data.
COMMANDS = """\
run --compute naive --batch 1 --heads 2 --seq 64 --dim 32 --mode both --json
run --compute naive --batch 1 --heads 2 --seq 160 --dim 64 --kv-heads 1 --seq-kv 192 --causal --scale 0.3
run --compute mma --batch 1 --heads 2 --seq 64 --dim 32 --dtype float16 --json
run --compute mma --batch 1 --heads 2 --seq 64 --dim 32 --json
verify ./wrong_forward.cu --mode forward --case 0 --json
verify ./wrong_forward.cu --mode forward --fuzz 8 --seed 1 --case 7 --json
gen-data --batch 1 --heads 2 --seq 64 --dim 32 --dtype bfloat16"""


def main(folder: Path) -> None:
    """Run the commands in an empty folder and print what each did, and the records of data and outputs."""
    import cli

    frozen.KEYS = [mask for mask in frozen.KEYS if mask not in frozen.ERROR_KEYS]
    frozen.COLUMNS = [mask for mask in frozen.COLUMNS if mask not in frozen.ERROR_COLUMNS]
    os.chdir(folder)
    Path("wrong_forward.cu").write_text(WRONG)
    for command in COMMANDS.splitlines():
        result = CliRunner().invoke(cli.main, shlex.split(command))
        told = [line for line in result.stderr.splitlines() if not line.startswith("note: fuzz with seed")]  # it has seconds
        print(f"$ fa-cli {command}\nexit code {result.exit_code}")
        print(frozen.printed(result.stdout, folder), *told, sep="\n")
    for path in sorted(folder.rglob("*.json")):
        print(f"file {path.relative_to(folder)}\n{frozen.contents(path, folder)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
