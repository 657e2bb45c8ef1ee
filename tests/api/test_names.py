"""Every public name can be imported from its documented module and keeps its signature."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import accelerate

from .conftest import describe, load_golden

NAMES = load_golden("names")
UTILS = Path(accelerate.__file__).parent / "utils"


@pytest.mark.parametrize("module", NAMES)
def test_every_name_exists_and_keeps_its_signature(module):
    found = import_module(module)
    missing = [name for name in NAMES[module] if not hasattr(found, name)]
    assert not missing
    changed = {
        name: (describe(getattr(found, name)), signature)
        for name, signature in NAMES[module].items()
        if signature and describe(getattr(found, name)) != signature
    }
    assert not changed, "name: (now, golden list)"


def test_a_new_name_in_utils_needs_its_line():
    """A stub lists no name that the golden list lacks; `import *` adds those of `accelerate.utils`."""
    for stub in UTILS.glob("*.pyi"):
        module = "accelerate.utils" if stub.stem == "__init__" else f"accelerate.utils.{stub.stem}"
        imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
        sources = [node for node in imports if node.module != "accelerate.utils"]
        names = {alias.asname for node in sources for alias in node.names}
        assert names - set(NAMES[module]) == set(), module


def test_a_new_name_at_the_top_needs_its_line():
    assert set(accelerate.__all__) == set(NAMES["accelerate"])


def test_a_name_is_one_object_in_all_its_modules():
    homes = {}
    for module in ("accelerate", "accelerate.utils", "accelerate.state", "accelerate.data_loader"):
        for name in NAMES[module]:
            homes.setdefault(name, set()).add(id(getattr(import_module(module), name)))
    del homes["tqdm"]  # a function in one place and a module in another
    assert [name for name, objects in homes.items() if len(objects) > 1] == []


def run(code):
    """Run code in a fresh interpreter and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_importing_the_package_imports_no_torch_and_little_else():
    heavy = ("torch", "numpy", "importlib.metadata")
    assert run(f"import accelerate, sys; print(*(m for m in {heavy} if m in sys.modules))") == []


def test_an_old_path_loads_its_names_on_first_use():
    code = "import sys, accelerate.utils.bnb as path, accelerate.utils.fsdp_utils\n"
    code += "name = 'accelerate.quantization.load'\nprint(name in sys.modules)\n"
    code += "path.load_and_quantize_model\nprint(name in sys.modules, 'save_fsdp_model' in dir(path))"
    assert run(code) == ["False", "True", "True"]


def test_submodules_are_attributes_of_the_package():
    names = ("state", "utils", "data_loader", "accelerator", "optimizer", "scheduler", "logging", "tracking")
    code = f"import accelerate\nfor name in {names}:\n    print(getattr(accelerate, name).__name__)"
    assert run(code) == [f"accelerate.{name}" for name in names]


def test_tqdm_is_the_function_however_it_is_imported():
    code = "import accelerate.utils.tqdm, accelerate.utils as u; print(callable(u.tqdm), callable(u.random))"
    assert run(code) == ["True", "False"]


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    from packaging.version import Version

    assert accelerate.__version__ == version("accelerate")
    assert Version(accelerate.__version__) >= Version("1.15.0")


def test_the_deprecated_path_warns():
    with pytest.warns(FutureWarning, match=r"accelerate\.utils\.memory"):
        memory_utils = import_module("accelerate.memory_utils")
    assert memory_utils.release_memory is import_module("accelerate.utils.memory").release_memory
    del sys.modules["accelerate.memory_utils"]
    del accelerate.memory_utils
