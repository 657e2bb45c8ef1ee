"""The order of the packages: a file imports only from entries before its own, or from its own package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

PACKAGE = "accelerate"
LAYERS = Path(__file__).parents[2] / "docs" / "layers.yaml"
GROUPS: dict[str, list[str]] = yaml.safe_load(LAYERS.read_text(encoding="utf-8"))
LINE = [entry for group in GROUPS.values() for entry in group]
OLD_PATHS = GROUPS["old import paths"]
PLACE = {entry: place for place, entry in enumerate(LINE)}


def resolve_module(target: str, modules: frozenset[str]) -> str:
    """The module that an import reaches: itself, or the one that holds the imported name."""
    while target not in modules and "." in target:
        target = target.rpartition(".")[0]
    return target


def entry_of(target: str) -> str:
    """The entry of the line that a dotted name belongs to; the package's own names belong to the last."""
    part = target.split(".")[1] if "." in target else "__init__"
    return part if part in PLACE else "__init__"


def own_imports(source: Any) -> Iterator[tuple[str, int]]:
    """What a file imports from the package, by statement or by `import_module("...")`, and on which line."""
    for each in source.imports:
        if each.target.split(".")[0] == "accelerate":
            yield each.target, each.line
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and str(name.value).startswith("accelerate"):
                yield str(name.value), node.lineno


def reach(source: Any, modules: frozenset[str]) -> set[str]:
    """The modules of the package that a file imports, itself left out."""
    return {resolve_module(target, modules) for target, _ in own_imports(source)} - {source.module}


def test_every_file_is_in_the_order_of_packages(sources: list[Any]) -> None:
    homeless = [source for source in sources if source.parts[1] not in PLACE]
    assert not homeless, f"not on the layer line of this test: {homeless}"


def test_packages_import_only_earlier_ones(sources: list[Any]) -> None:
    wrong = []
    for source in sources:
        here = source.parts[1]
        for target, line in own_imports(source):
            there = entry_of(target)
            if PLACE[there] > PLACE[here]:
                wrong.append(f"{source}:{line} ({here}) imports {target} ({there}), which is to its right")
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_import_cycle(sources: list[Any], modules: frozenset[str]) -> None:
    """Imports in functions count, within a package too; imports for annotations do not."""
    graph: dict[str, set[str]] = {}
    for source in sources:
        targets = {
            resolve_module(each.target, modules)
            for each in source.imports
            if each.target.startswith("accelerate.") and not each.for_types
        }
        graph[source.module] = targets - {source.module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]), pytrace=False)


def test_a_package_is_imported_through_its_table(sources: list[Any], modules: frozenset[str]) -> None:
    """Only the files of a package name each other; all others take names from its `__init__.pyi`."""
    packages = {source.module for source in sources if source.path.name == "__init__.py"}
    wrong = []
    for source in (source for source in sources if source.parts[1] not in OLD_PATHS):
        for each in source.imports:
            module = each.asked.rpartition(".")[0]
            package = module.rpartition(".")[0]
            own = f"{source.module}.".startswith(f"{package}.")
            if module in modules - packages and package != PACKAGE and not own:
                wrong.append(f"{source}:{each.line} imports {each.asked} from a file of {package}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_an_interface_does_not_import_its_implementations(
    sources: list[Any], modules: frozenset[str]
) -> None:
    """`base.py` may import the words it is written in, never a sibling that builds on it."""
    reached = {source.module: reach(source, modules) for source in sources}
    wrong = []
    for interface in (source.module for source in sources if source.path.name == "base.py"):
        package = interface.rpartition(".")[0]
        siblings = {module for module in reached[interface] if module.startswith(package + ".")} - {interface}
        wrong += [f"{interface} imports {sibling}" for sibling in siblings if interface in reached[sibling]]
        wrong += [f"{interface} imports {package}" for module in reached[interface] if module == package]
    assert not wrong, "\n" + "\n".join(wrong)


def test_only_users_of_a_package_import_its_resolver(sources: list[Any], modules: frozenset[str]) -> None:
    resolvers = {source.module for source in sources if source.path.name == "resolve.py"}
    wrong = []
    for source in (source for source in sources if source.path.name != "__init__.py"):
        for resolver in reach(source, modules) & resolvers:
            if source.module.startswith(resolver.rpartition(".")[0] + "."):
                wrong.append(f"{source} imports {resolver}, the resolver of its own package")
    assert resolvers
    assert not wrong, "\n" + "\n".join(wrong)


STRATEGIES = (
    *("batches", "documents", "module_state", "tolerances", "object_state", "views", "fixed_draws"),
    "gradient_scales",
    *(
        "gradient_scales",
        "trial_steps",
        "matrix_plan",
        "dtensors",
        "session",
        "request",
        "state",
        "dtensor_state",
        "layer",
    ),
    *("axes", "pipeline", "sharded_models", "activation_offload", "recomputed_values", "recomputed_blocks"),
    *("base", "compilation", "recomputation", "isolation", "replicas", "matrix_owners", "composition"),
    *("fsdp", "ddp", "deepspeed", "megatron", "xla"),
    "resolve",
)
"""Files and packages of `accelerate.strategies` in their order."""


def test_no_import_in_strategies_runs_upward(sources: list[Any], modules: frozenset[str]) -> None:
    """Imports in functions and for annotations count, too."""
    place = {name: index for index, name in enumerate(STRATEGIES)}
    inside = [
        source for source in sources if source.parts[1] == "strategies" and source.parts[2] != "__init__"
    ]
    assert {source.parts[2] for source in inside} == set(place)
    wrong = []
    for source in inside:
        for each in source.imports:
            target = resolve_module(each.target, modules).split(".")
            if target[1:2] == ["strategies"] and place[target[2]] > place[source.parts[2]]:
                wrong.append(f"{source}:{each.line} imports {each.target}")
    assert not wrong, "\n" + "\n".join(wrong)
