"""Write the reference pages and the JSON Schema of the configuration file from the declarations.

`make reference` runs it; a test fails when the files are not what it would write.
"""

from __future__ import annotations

from pathlib import Path

from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.settings import reference, schema

FOLDER = Path(__file__).parent / "reference"


def make_files() -> dict[Path, str]:
    """Give the content of each file that is written."""
    return {
        FOLDER / "cli.md": reference.commands_page(make_cli_parser([])),
        FOLDER / "config.md": reference.config_page(),
        FOLDER / "environment.md": reference.variables_page(),
        schema.SCHEMA_FILE: schema.as_text(),
    }


def main() -> None:
    """Write the files."""
    for path, text in make_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
