"""Private names of torch are used in `torch_private` alone, and nothing else assigns to torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

HOME = "torch_private"

PUBLIC_IN_EFFECT = {
    "_parameters": "the dictionaries of nn.Module, which have not changed and which subclasses share",
    "_buffers": "as above",
    "_modules": "as above",
    "_index_sampler": "what gives a DataLoader its indices: read, never set, also in subclasses of it",
    "_iterator": "what a DataLoader keeps between passes; a copy of a loader must not have it",
    "_get_iterator": "the method of DataLoader that its subclasses override to make another iterator",
    "_foreach_copy_": "documented among torch's foreach functions",
    "_foreach_lerp_": "as above",
    "_foreach_mul_": "as above",
    "_foreach_sub_": "as above",
}
"""Private names of torch that may be used in any file, and why."""

OF_OTHERS = {
    "_server": "torchft",
    "_actions": "argparse",
    "_action_groups": "argparse",
    "_choices_actions": "argparse",
    "_option_string_actions": "argparse",
    "_parser_class": "argparse",
    "_fill_text": "argparse",
    "_format_action_invocation": "argparse",
    "_format_usage": "argparse",
    "_current_section": "argparse",
    "_format_args": "argparse",
    "_get_value": "argparse",
    "_get_values": "argparse",
    "_check_value": "argparse",
    "_ActionsContainer": "argparse",
    "_AppendAction": "argparse",
    "_ArgumentGroup": "argparse",
    "_ChoicesPseudoAction": "argparse",
    "_prog": "argparse",
    "_SubParsersAction": "argparse",
    "_value_": "Enum",
    "_asdict": "namedtuple",
    "_fields": "namedtuple",
    "_replace": "namedtuple",
    "_current_frames": "sys",
    "_getframe": "sys",
    "_exit": "os",
    "_core": "numpy",
    "_reconstruct": "numpy",
    "_attn_implementation": "transformers",
    "_no_split_modules": "transformers",
    "_tp_plan": "transformers",
    "_config": "deepspeed",
    "_consolidated_16bit_state_dict": "deepspeed",
    "_zero3_consolidated_16bit_state_dict": "deepspeed",
    "_remove_module_hooks": "deepspeed",
    "_distributed": "datasets",
    "_ex_iterable": "datasets",
    "_orig_name": "torch_xla",
    "_hf_hook": "hooks of the interface, on modules",
    "_old_forward": "hooks of the interface, on modules",
}
"""Private names of other packages and of the interface, and whose they are."""


def outside(sources: list[Any]) -> list[Any]:
    """All files but those of the package for private names."""
    return [source for source in sources if source.parts[1] != HOME]


def own_names(sources: list[Any]) -> set[str]:
    """The names that the package itself defines: functions, classes, variables and attributes."""
    names: set[str] = set()
    for source in outside(sources):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names - {"_get_iterator"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The private attributes that a file uses, as `x._name` or `getattr(x, "_name")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield str(getattr(node.args[1], "value", "")), node.lineno


def test_no_other_file_imports_private_names_of_torch(sources: list[Any]) -> None:
    wrong = [
        f"{source}:{imported.line} imports {imported.target}"
        for source in outside(sources)
        for imported in source.imports
        if imported.target.split(".")[0] == "torch" and any(map(is_private, imported.target.split(".")))
    ]
    assert not wrong, f"add a row to NAMES in {HOME}:\n" + "\n".join(wrong)


def test_no_other_file_uses_private_attributes_of_torch(sources: list[Any]) -> None:
    known = own_names(sources) | set(PUBLIC_IN_EFFECT) | set(OF_OTHERS)
    wrong = [
        f"{source}:{line} uses {name}"
        for source in outside(sources)
        for name, line in attributes(source.tree)
        if is_private(name) and name not in known
    ]
    assert not wrong, f"read it by a function of {HOME}:\n" + "\n".join(wrong)


def test_the_lists_of_names_hold_what_is_used(sources: list[Any]) -> None:
    used = {name for source in sources for name, _ in attributes(source.tree)}
    assert not {*PUBLIC_IN_EFFECT, *OF_OTHERS} - used - {"_get_iterator"}


def torch_names(source: Any) -> set[str]:
    """The names that a file uses for torch, its modules, and the classes and functions in them."""
    names = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {alias.asname or "torch" for alias in aliases}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def assigned(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a file assigns an attribute to, or an entry of whose `__dict__` it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            yield f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1])}", node.lineno


SETTINGS = ("torch.backends.",)
"""Attributes of torch that are meant to be set."""


def test_no_other_file_assigns_to_torch(sources: list[Any]) -> None:
    wrong = [
        f"{source}:{line} sets {target}"
        for source in outside(sources)
        for names in [torch_names(source)]
        for target, line in assigned(source.tree)
        if target.split(".")[0] in names and not target.startswith(SETTINGS)
    ]
    assert not wrong, f"torch is changed in {HOME} alone:\n" + "\n".join(wrong)
