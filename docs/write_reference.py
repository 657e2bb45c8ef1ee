"""Write the reference pages, the JSON Schema of the configuration file and the list of files from the source.

`make reference` runs it; a test fails when the files are not what it would write.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.settings import reference, schema

FOLDER = Path(__file__).parent / "reference"
ARCHITECTURE = Path(__file__).parent / "architecture.md"
SOURCE = Path(__file__).parents[1] / "src" / "accelerate"
BEGIN, END = "<!-- files: begin -->", "<!-- files: end -->"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def make_files() -> dict[Path, str]:
    """Give the content of each file that is written."""
    return {
        FOLDER / "cli.md": reference.commands_page(make_cli_parser([])),
        FOLDER / "config.md": reference.config_page(),
        FOLDER / "environment.md": reference.variables_page(),
        schema.SCHEMA_FILE: schema.as_text(),
        ARCHITECTURE: with_files(ARCHITECTURE.read_text(encoding="utf-8")),
    }


def with_files(page: str) -> str:
    """Give the page with a table of all source files and the first sentences of their docstrings.

    Packages stay in the order that the page has; files are sorted in each.
    """
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    order = list(dict.fromkeys(str(Path(name).parent) for name in ROW.findall(table)))
    names = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    packages = [*order, *sorted({str(name.parent) for name in names} - set(order))]
    names.sort(key=lambda name: (packages.index(str(name.parent)), name))
    rows = [f"| `{name.as_posix()}` | {purpose_of(SOURCE / name)} |" for name in names]
    return "\n".join([f"{before}{BEGIN}\n", "| file | purpose |", "|---|---|", *rows, f"\n{END}{after}"])


def purpose_of(path: Path) -> str:
    """Give the first paragraph of a file's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(".").replace("|", "\\|")


def main() -> None:
    """Write the files."""
    for path, text in make_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
