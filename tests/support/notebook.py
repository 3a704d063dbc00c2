"""Run a notebook's code cells in order, in one process: `python notebook.py FILE`. What a cell ends with is displayed.

A runner of these lines in place of nbclient: that brings ipykernel and thirty packages more, to start a process and exec cells in it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def run(path: Path) -> None:
    """Raise what a cell raises, with the cell's number in the traceback."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        source, place = "".join(cell["source"]), f"cell {number}"
        *before, last = ast.parse(source, place).body
        expression = isinstance(last, ast.Expr)
        exec(compile(ast.Module(before if expression else [*before, last], []), place, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
            print(f"{place}: {value._repr_html_() if hasattr(value, '_repr_html_') else value!r}")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
