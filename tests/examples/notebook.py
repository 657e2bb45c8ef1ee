"""Run the cells of a notebook, whose path is the argument, one after another in the main program."""

from __future__ import annotations

import ast
import json
import sys
from functools import partial
from pathlib import Path

import accelerate


def run_cells(path: str) -> None:
    """Run all cells, and print the value of a last line that is an expression, as notebooks show it."""
    import __main__

    for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), path)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path, "exec"), vars(__main__))
        if last is not None:
            value = eval(compile(ast.Expression(last.value), path, "eval"), vars(__main__))
            print("" if value is None else repr(value))


if __name__ == "__main__":
    # Suites launch at once, and the default port may be taken between its check and its use.
    accelerate.notebook_launcher = partial(accelerate.notebook_launcher, use_port=0)
    run_cells(sys.argv[1])
