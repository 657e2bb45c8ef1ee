"""Loading public names on first use."""

import importlib
import sys

import pytest


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one lazy name, one lazy submodule and one name whose home lacks it."""
    folder = tmp_path / "lazy_example"
    folder.mkdir()
    (folder / "home.py").write_text("thing = object()\n")
    (folder / "__init__.py").write_text(
        "from accelerate.base.lazy import attach\n"
        "__getattr__, __dir__, __all__ = attach(__name__, "
        "{'lazy_example.home': ('thing', 'home', 'lost')})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("lazy_example")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_example"]:
        del sys.modules[name]


def test_nothing_is_loaded_before_it_is_used(package):
    assert "lazy_example.home" not in sys.modules
    assert {"thing", "home", "lost"} <= set(dir(package))
    assert package.__all__ == ["home", "lost", "thing"]
    assert "lazy_example.home" not in sys.modules


def test_names_and_submodules_are_loaded_once(package):
    assert package.thing is package.home.thing
    assert package.home is sys.modules["lazy_example.home"]
    assert vars(package)["thing"] is package.home.thing


def test_unknown_and_lost_names_are_attribute_errors(package):
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="lost"):
        package.lost  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("lazy_example.absent")


def test_an_attribute_error_inside_of_a_module_is_shown(package, tmp_path):
    (tmp_path / "lazy_example" / "home.py").write_text("import os\nos.no_such_call()\n")
    with pytest.raises(
        ImportError, match=r"lazy_example.home cannot be imported: .*'no_such_call'"
    ) as caught:
        from lazy_example import thing  # noqa: F401
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(ImportError, match="no_such_call"):
        package.home  # noqa: B018
