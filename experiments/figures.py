"""Draws every figure of the committed rows: python experiments/figures.py [FOLDER]   (make figures: into build/figures)

plots/ keeps only the pictures that documents show. Each other one is drawn here, from results.csv and env.json of every sweep, and from the
rows of the ring, the training, the float32 figure and the climb. Nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import report

HERE = Path(__file__).resolve().parent
#: Scripts that draw a figure of their own, with their arguments; FOLDER stands for where it goes.
SCRIPTS = (
    ("ladder/climb.py", "FOLDER/climb.png"),
    ("fp32/draw.py", "FOLDER/fp32_accuracy.png"),
    ("decode/draw.py", "FOLDER/decode_speed.png"),
    ("fp8/draw.py", "FOLDER/fp8_error.png"),
    ("ring/draw.py", "FOLDER/ring_scaling.png"),
    ("ring/timeline.py", "", "FOLDER/ring_timeline.png"),
)


def main(folder: Path) -> None:
    """Draw all of them; prints what was drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in sorted(HERE.glob("*/results.csv")):
        made = report.redraw(table.parent, folder, table.parent.name)
        sys.stdout.write("".join(f"{path}\n" for path in made))
    for name, *arguments in SCRIPTS:
        words = [word.replace("FOLDER", str(folder)) or str((HERE / name).parent) for word in arguments]
        subprocess.run([sys.executable, str(HERE / name), *words], check=True, stdout=subprocess.DEVNULL)
        sys.stdout.write(f"{words[-1]}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "build/figures"))
