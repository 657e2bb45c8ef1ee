"""No value of the store of the process group is unpickled."""

from __future__ import annotations

import ast
from typing import Any

LOADERS = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle")
UNPICKLING = {
    "checkpointing/shard_index.py": "metadata of a folder of shards, of allowed classes or trusted",
    "checkpointing/shard_files.py": "names the exception class alone",
    "data_loader/dispatch_transport.py": "what rank 0 sends through a collective or shared memory",
    "diagnostics/observation.py": "what torch's flight recorder returns inside this process",
    "ops/packed.py": "objects in collectives",
    "recovery/transport.py": "objects in collectives between replica groups",
    "weights/files.py": "names the exception class alone",
}
"""Each file that may import such a module, and what for."""

STORE = ("state/agreement.py", "state/process_group.py", "diagnostics/memory.py")
"""The files that hold a store of torch."""

REQUESTS = {"get", "multi_get", "compare_set", "wait"}


def loads_objects(source: Any) -> bool:
    """Whether a file imports a module that can turn bytes into objects of any class."""
    return any(each.target.split(".")[0] in LOADERS for each in source.imports)


def holds_a_store(source: Any) -> bool:
    """Whether a file names a class of stores, or the default store."""
    names = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    names |= {each.target.rpartition(".")[2] for each in source.imports}
    return any(name.endswith("Store") or name == "default_store" for name in names)


def test_only_known_files_unpickle(sources: list[Any]) -> None:
    assert {str(source) for source in sources if loads_objects(source)} == set(UNPICKLING)


def test_only_known_files_hold_a_store(sources: list[Any]) -> None:
    # These open one for torch, and read nothing.
    opening = {"launch/machine.py", "launch/script.py", "strategies/megatron/library.py"}
    opening |= {"torch_private/processes.py", "recovery/membership.py"}
    opening |= {
        "launch/backends/replicas.py",
        "launch/plan.py",
        "recovery/run.py",
    }  # these read addresses and numbers
    assert {str(source) for source in sources if holds_a_store(source)} == {*STORE, *opening}


def test_only_the_channel_reads_from_a_store(sources: list[Any]) -> None:
    found = [
        f"{source}:{node.lineno}"
        for source in sources
        if str(source) in STORE and str(source) != "state/agreement.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in REQUESTS
        and "store" in ast.unparse(node.func.value).lower()
    ]
    assert not found, f"read through StoreChannel, which verifies signatures: {found}"


def test_no_file_that_holds_a_store_unpickles(sources: list[Any]) -> None:
    assert not set(STORE) & set(UNPICKLING)
    channel = next(source for source in sources if str(source) == "state/agreement.py")
    assert "json" in {each.target for each in channel.imports}
