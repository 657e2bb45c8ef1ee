"""Write the reference pages, the JSON Schema of the configuration file, and the lists of files and pages.

`make reference` runs it; a test fails when the files are not what it would write.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from accelerate.base import SageMakerDistributedType
from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.settings import SCHEMA_FILE, SECTIONS, OneSpellingFormatter, Option, Section, env, subcommands
from accelerate.settings.migrations import RETIRED, TOP_LEVEL_DYNAMO
from accelerate.settings.option import WANTED
from accelerate.settings.sections import PARADIGM_OF_TYPE

DOCS = Path(__file__).parent
FOLDER = DOCS / "reference"
SOURCE = Path(__file__).parents[1] / "src" / "accelerate"

POD_VARIABLES = (
    (
        "`WORLD_SIZE`",
        "`--num_machines`, where `RANK` and `MASTER_ADDR` are set too, `LOCAL_RANK` is not, and several "
        "processes run on this machine",
    ),
    ("`RANK`", "`--machine_rank`, where `WORLD_SIZE` is the number of machines"),
    ("`JOB_COMPLETION_INDEX`", "`--machine_rank` in all other cases, with several machines"),
    ("`MASTER_ADDR`", "`--main_process_ip`, with several machines"),
    ("`MASTER_PORT`", "`--main_process_port`, with several machines and `MASTER_ADDR`"),
)
RANK_VARIABLES = (
    ("RANK", "Index of this process among all, from 0."),
    ("WORLD_SIZE", "Number of processes on all machines."),
    (
        "LOCAL_RANK",
        "Index of this process on its machine, which chooses its device. Where LOCAL_WORLD_SIZE is absent "
        "too, as with one process for each pod, the processes exchange host names and count.",
    ),
    ("LOCAL_WORLD_SIZE", "Number of processes on this machine."),
    ("MASTER_ADDR", "Address of the machine of rank 0; absent, all processes are on this machine."),
    ("MASTER_PORT", "Port of that machine where the processes meet (29500)."),
)
"""Variables of `torch.distributed` that say which process this is, and what they mean."""

HEAD = "---\ndescription: {}\nsearch: {{boost: 0.3}}\n---\n\n"
"""Front matter of generated pages, which a search shows after guides."""
DESCRIPTIONS = {
    "cli": "Every command of accelerate with its flags.",
    "config": "Every key of the configuration file.",
    "environment": "Every environment variable between launcher and script.",
    "files": "Every source file with its purpose.",
}
INTRO = (
    "It is an independent implementation of the interface that Hugging Face's documentation calls "
    "Accelerate: the same imports, signatures, flags and files, with other code. Addresses of pages are "
    "relative to this file. In a checkout, `guides/launching/` is the file `docs/guides/launching.md`."
)
"""Begin of the list of pages."""
WRITTEN = "<!-- Written from the declarations by `make reference`; do not edit. -->"


DIALECT = "https://json-schema.org/draft/2020-12/schema"
YES_OR_NO = ["yes", "no", "true", "false", "y", "n", "on", "off", "1", "0"]
NUMBER = r"^\s*[-+]?[0-9_]+\s*$"
FRACTION = r"^\s*[-+]?[0-9_]*\.?[0-9]+([eE][-+]?[0-9]+)?\s*$"

SCHEMA_OF_KIND: dict[type, list[dict[str, Any]]] = {
    bool: [{"type": "boolean"}, {"enum": YES_OR_NO}],
    int: [{"type": "integer"}, {"type": "string", "pattern": NUMBER}],
    float: [{"type": "number"}, {"type": "string", "pattern": FRACTION}],
    str: [{"type": ["string", "number", "boolean"]}],
    tuple: [{"type": "array"}, {"type": "string"}],
    dict: [{"type": "object"}],
}
"""What a file may say for an option of each type: the type itself, or the text that is read as one."""


def make_files() -> dict[Path, str]:
    """Give the content of each file that is written."""
    bodies = {
        "cli": commands_page(make_cli_parser([])),
        "config": config_page(),
        "environment": variables_page(),
        "files": files_page(),
    }
    pages = {FOLDER / f"{name}.md": HEAD.format(DESCRIPTIONS[name]) + text for name, text in bodies.items()}
    return {**pages, SCHEMA_FILE: schema_text(), DOCS / "llms.txt": pages_list(pages)}


def pages_list(written: dict[Path, str]) -> str:
    """List the pages of the site in the order of the navigation, for programs that read documentation.

    Args:
        written: pages that are not on disk yet.
    """
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = ["# accelerate"]
    for heading, title, name in _entries(site["nav"]):
        path = DOCS / name
        text = written.get(path) or path.read_text(encoding="utf-8")
        description = yaml.safe_load(text.split("---\n")[1])["description"]
        if name == "index.md":
            lines += ["", f"> {description}", "", INTRO]
            continue
        if f"## {heading}" not in lines:
            lines += ["", f"## {heading}", ""]
        address = name.removesuffix(".md").removesuffix("/index")
        lines.append(f"- [{title}]({address}/): {description}")
    return "\n".join(lines) + "\n"


def _entries(navigation: Any, heading: str = "Start", title: str = "") -> Iterator[tuple[str, str, str]]:
    """Iterate over the first heading above each page, its title and its path."""
    if isinstance(navigation, str):
        yield heading, title or heading, navigation
        return
    for entry in navigation:
        (name, below), *_ = entry.items() if isinstance(entry, dict) else [("", entry)]
        nested = isinstance(below, list)
        yield from _entries(below, name if nested and heading == "Start" else heading, "" if nested else name)


def files_page() -> str:
    """Give a table of all source files with the first paragraphs of their docstrings, as Markdown."""
    intro = (
        "Every source file with the first sentence of its docstring. "
        "[Architecture](../architecture.md) describes the packages and their order."
    )
    names = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    names.sort(key=lambda name: (name.parent, name))
    rows = [(f"`{name.as_posix()}`", purpose_of(SOURCE / name)) for name in names]
    return "\n\n".join(["# Files", WRITTEN, intro, _table(("file", "purpose"), rows)]) + "\n"


def purpose_of(path: Path) -> str:
    """Give the first paragraph of a file's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(".")


def commands_page(parser: argparse.ArgumentParser) -> str:
    """Every command with its flags, as Markdown.

    Args:
        parser: of `accelerate`, with all subcommands.
    """
    intro = (
        "Flags can be written with dashes or underscores: `--num-processes` is `--num_processes`. "
        "`accelerate COMMAND --help` shows the same on the terminal."
    )
    parts = ["# Command line", WRITTEN, intro]
    parts += [part for child in _children(parser) for part in _command(child)]
    return "\n\n".join(parts) + "\n"


def _children(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """All commands below a parser, each before its subcommands."""
    return [command for child in subcommands(parser).values() for command in (child, *_children(child))]


def _command(parser: argparse.ArgumentParser) -> list[str]:
    parts = [f"## {parser.prog.removesuffix(' <command> [<args>]')}", str(parser.description)]
    for group in parser._action_groups:
        rows = [_flag(action) for action in group._group_actions if _is_shown(action)]
        if rows:
            parts += [f"**{group.title}**", _table(("option", "meaning"), rows)]
    return parts


def _is_shown(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    return not hidden and action.help is not argparse.SUPPRESS


def _flag(action: argparse.Action) -> tuple[str, str]:
    formatter = OneSpellingFormatter("")
    spelled = formatter._format_action_invocation(action) if action.option_strings else action.dest
    return f"`{spelled}`", formatter._expand_help(action)


def config_page(sections: Iterable[type[Section]] = SECTIONS) -> str:
    """Every key of the configuration file, as Markdown."""
    intro = (
        "The file is YAML or JSON. Keys that are absent have their default. `accelerate config` writes it; "
        "`accelerate config schema` prints the path of the JSON Schema that editors complete it with."
    )
    parts = ["# Configuration file", WRITTEN, intro]
    for group, members in _by_group(sections).items():
        rows = [_key(row) for section in members for row in section.options() if row.key]
        if rows:
            parts += [f"## `{group}`" if group else "## Top level", _described(members)]
            parts += [_table(("key", "value", "default", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def _by_group(sections: Iterable[type[Section]]) -> dict[str, list[type[Section]]]:
    groups: dict[str, list[type[Section]]] = {}
    for section in sections:
        groups.setdefault(section.file_key or "", []).append(section)
    return groups


def _described(members: Sequence[type[Section]]) -> str:
    return "\n".join(f"- {str(section.__doc__).splitlines()[0]}" for section in members)


def _key(row: Option) -> tuple[str, str, str, str]:
    values = ", ".join(f"`{choice}`" for choice in row.choices) or WANTED[row.kind]
    return f"`{row.key}`", values, _default(row.default), row.help


def _default(value: Any) -> str:
    if value is None or value == "":
        return ""
    spelled = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{spelled}`"


def variables_page(sections: Iterable[type[Section]] = SECTIONS) -> str:
    """Every environment variable between launcher and script, as Markdown."""
    intro = (
        "The launcher writes these variables, and a script that runs without the launcher can be given them. "
        "On the launcher's own command line, a flag wins over a variable, and a variable over the file."
    )
    parts = ["# Environment variables", WRITTEN, intro]
    for section in sections:
        rows = [_variable(name, row) for row in section.options() for name in (*row.variables, *row.aliases)]
        if rows:
            heading = str(section.__doc__).splitlines()[0].removesuffix(".")
            parts += [f"## {heading}", _table(("variable", "flag", "meaning"), rows)]
    ranks = [(f"`{name}`", meaning) for name, meaning in RANK_VARIABLES]
    launchers = (
        "A launcher sets these for each process: `accelerate launch`, torchrun, Kubernetes operators. The "
        "variables of Open MPI, Intel MPI, MPICH, MVAPICH, SLURM and SageMaker are understood too."
    )
    parts += ["## Which process this is", launchers, _table(("variable", "meaning"), ranks)]
    torchrun = (
        "`accelerate launch` reads these variables of torchrun. They are weaker than flags, and stronger "
        "than other variables and files. `--num_machines 1` leaves out what says where machines meet."
    )
    parts += ["## Variables of torchrun", torchrun, _table(("variable", "flag"), _torchrun())]
    pods = (
        "`accelerate launch` also reads these variables, which operators of Kubernetes set in each pod. They "
        "are weaker than flags and than the variables of torchrun, and stronger than files. An address of "
        "the loopback interface is ignored."
    )
    parts += ["## Variables of pods", pods, _table(("variable", "flag"), POD_VARIABLES)]
    return "\n\n".join(parts) + "\n"


def _torchrun() -> list[tuple[str, str]]:
    rows = [(f"`{variable}`", f"`--{name}`") for variable, name in env.PET_VARIABLES.items()]
    rows.append((f"`{env.PET_ENDPOINT}`", "`--main_process_ip` and `--main_process_port`"))
    rows.append((f"`{env.PET_PROCESSES}`", "`--num_processes`, divided by the number of machines"))
    return rows


def _variable(name: str, row: Option) -> tuple[str, str, str]:
    return f"`{name}`", f"`{row.flags[0]}`" if row.flags else "", row.help


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def make_schema() -> dict[str, Any]:
    """Describe every key that a configuration file may have."""
    return {
        "$schema": DIALECT,
        "title": "Configuration file of accelerate",
        "description": "Where and how `accelerate launch` runs scripts; absent keys have their default.",
        "type": "object",
        "additionalProperties": False,
        "properties": {**_top_level(), **_groups(), **_old_keys()},
    }


def schema_text() -> str:
    """Give the JSON Schema of the configuration file, with which editors complete and check it."""
    return json.dumps(make_schema(), indent=1, sort_keys=True) + "\n"


def _top_level() -> dict[str, Any]:
    own = (section for section in SECTIONS if section.file_key is None)
    properties = {row.key: _property(row) for row in _rows(own) if row.key}
    ways = [*PARADIGM_OF_TYPE, "TPU", *(kind.value for kind in SageMakerDistributedType)]
    properties["distributed_type"]["anyOf"] = [_words(ways), {"const": False}, {"type": "null"}]
    return properties


def _groups() -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for section in SECTIONS:
        if section.file_key is None:
            continue
        group = {
            "description": str(section.__doc__).splitlines()[0],
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {},
        }
        properties = groups.setdefault(section.file_key, group)["properties"]
        for row in (row for row in section.options() if row.key):
            properties.update(_nested(row, section.file_key))
    return groups


def _nested(row: Option, group: str) -> dict[str, Any]:
    """The key of an option in its group, and the other spellings under which it is read."""
    described = _property(row)
    others = {row.name} - {row.key}
    if group == "dynamo_config":
        others.add(row.name.removeprefix("dynamo_"))
    if row.key == "fsdp_backward_prefetch":
        others.add("fsdp_backward_prefetch_policy")
    old = {**described, "deprecated": True}
    return {str(row.key): described, **dict.fromkeys(sorted(others), old)}


def _old_keys() -> dict[str, Any]:
    retired = {key: {"deprecated": True, "description": f"No effect: {why}."} for key, why in RETIRED.items()}
    flat = {row.name: row for row in _rows(SECTIONS) if row.name in TOP_LEVEL_DYNAMO}
    moved = {name: {**_property(row), "deprecated": True} for name, row in flat.items()}
    fp16 = {
        "fp16": {
            "anyOf": SCHEMA_OF_KIND[bool],
            "deprecated": True,
            "description": "Now mixed_precision: fp16.",
        }
    }
    return {**retired, **moved, **fp16}


def _rows(sections: Iterable[type[Section]]) -> list[Option]:
    return [row for section in sections for row in section.options()]


def _property(row: Option) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": row.help, "anyOf": [*_shapes(row), {"type": "null"}]}
    if isinstance(row.default, (bool, int, float, str)):
        schema["default"] = row.default
    return schema


def _shapes(row: Option) -> list[dict[str, Any]]:
    if not row.choices:
        known = [{"enum": list(row.offers)}] if row.offers and row.kind is str else []
        return [*known, *(_limited(shape, row) for shape in SCHEMA_OF_KIND[row.kind])]
    numbers = [{"enum": [int(choice) for choice in row.choices]}] if row.kind is int else []
    return [*numbers, _words(row.choices)]


def _limited(shape: dict[str, Any], row: Option) -> dict[str, Any]:
    if row.limits is None or shape.get("type") == "string":
        return shape
    return {**shape, "minimum": row.limits[0], "maximum": row.limits[1]}


def _words(choices: Iterable[str]) -> dict[str, Any]:
    """One of these words, in the usual spellings: letters may be of either case."""
    spelled = [spell for choice in choices for spell in (choice, choice.lower(), choice.upper())]
    return {"enum": list(dict.fromkeys(spelled))}


def main() -> None:
    """Write the files."""
    for path, text in make_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
