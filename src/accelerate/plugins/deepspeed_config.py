"""A DeepSpeed configuration as an object: looked up by dotted names, "auto" filled, disagreements listed.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from accelerate.base import shown, wrong_value
from accelerate.settings import AUTO, STAGE, read_config, refuse_config

OFFLOADING = ("cpu", "nvme")
OFFLOAD_DEVICES = (
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
)


class HfDeepSpeedConfig:
    """A DeepSpeed configuration that is looked up by dotted names, such as "zero_optimization.stage".

    Args:
        config_file_or_dict: A dictionary, which is copied, the path of a JSON file, or JSON in base64.

    Attributes:
        config: The configuration; may be changed in place.

    Raises:
        ConfigurationError: It is neither, or not JSON.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Record the ZeRO stage (-1 without one), and whether anything is kept outside of the devices."""
        self._stage = self.get_value(STAGE, -1)
        self._offload = any(self.get_value(name) in OFFLOADING for name in OFFLOAD_DEVICES)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the dictionary that holds a value, None where there is none, and the last part of its name.

        Args:
            ds_key_long: Dotted name of the value.
        """
        return find_node(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value.

        Args:
            ds_key_long: Its dotted name.
            default: What is returned where there is none.
        """
        config, key = self.find_config_node(ds_key_long)
        return default if config is None else config.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value, with all values below it.

        Args:
            ds_key_long: Its dotted name.
            must_exist: Whether it is an error that there is none.

        Raises:
            ConfigurationError: There is none, and `must_exist`.
        """
        config, key = self.find_config_node(ds_key_long)
        if config is not None and key in config:
            del config[key]
        elif must_exist:
            raise wrong_value(
                "ds_key_long",
                ds_key_long,
                "the DeepSpeed configuration has no such value",
                f"name one of {', '.join(name for name, _ in leaves(self.config))}",
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a value is there and true."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a value is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer states are shared between processes, and parameters are whole."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are shared between processes."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether parameters or optimizer states are kept on the CPU or on NVMe."""
        return self._offload


@dataclass
class Filling:
    """Values for the "auto" of a configuration, and what does not fit, gathered so that it is said at once.

    Attributes:
        values: Dotted name -> value; `None` lets DeepSpeed choose.
        sources: Dotted name -> where the value comes from, as the user knows it.
        usual: Values for "auto" where `values` has none; nothing is compared with them.
        hints: Dotted name, or the beginning of one -> who would say a value that is missing.
        yielding: Names of values that a configuration which says something else wins over.
        missing: Names that are "auto" and have no value.
        mismatches: One line for each value that is another one.
        overruled: Likewise, for values that yield.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    yielding: Collection[str] = ()
    missing: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    overruled: list[str] = field(default_factory=list)

    def fill(self, config: dict[str, Any], must_match: bool = True, prefix: str = "") -> None:
        """Fill a configuration in place, and note what does not fit.

        Args:
            config: The configuration, or a dictionary inside it.
            must_match: Whether values that are given must be those of `values`.
            prefix: Dotted name of the dictionary, with a dot at its end; empty for the whole.
        """
        for key in list(config):
            name = f"{prefix}{key}"
            if isinstance(config[key], dict):
                self.fill(config[key], must_match, f"{name}.")
            else:
                self.fill_one(config, key, name, must_match)

    def fill_one(self, config: dict[str, Any], key: str, name: str, must_match: bool = True) -> None:
        """Fill, or compare, one value of a dictionary.

        Args:
            config: The dictionary.
            key: Its key.
            name: Its dotted name in the whole configuration.
            must_match: Whether a value that is given must be that of `values`.
        """
        found = config[key]
        if found == AUTO:
            self._choose(config, key, name)
        elif must_match and not same_value(found, self.values.get(name)):
            (self.overruled if name in self.yielding else self.mismatches).append(self._line_of(name, found))

    def _choose(self, config: dict[str, Any], key: str, name: str) -> None:
        if name not in self.values and name not in self.usual:
            self.missing.append(name)
            return
        chosen = self.values.get(name, self.usual.get(name))
        if chosen is None:
            del config[key]
        else:
            config[key] = chosen

    def _line_of(self, name: str, found: Any) -> str:
        source = self.sources.get(name, "an argument")
        wanted = shown(self.values[name])
        return f"{name} is {shown(found)} in the DeepSpeed configuration, and {wanted} by {source}"

    def _hint(self, name: str) -> str:
        return next((f": {hint}" for start, hint in self.hints.items() if name.startswith(start)), "")

    def check_filled(self) -> None:
        """Raise if anything is missing or does not fit.

        Raises:
            ConfigurationError: With all of it.
        """
        lines = [
            *self.mismatches,
            *(f"{name} is 'auto', and nothing says its value{self._hint(name)}" for name in self.missing),
        ]
        refuse_config(lines, "Correct the configuration; 'auto' takes the value of the plugin")


class Filled:
    """What was filled into a configuration, so that it can be filled again: other batches, another model."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def note(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Record what was "auto" and has a value now."""
        now = dict(leaves(after))
        self._values = {name: now[name] for name, value in leaves(before) if value == AUTO and name in now}

    def undo(self, config: dict[str, Any]) -> None:
        """Make "auto" again what was filled and has not been changed since."""
        for name, value in self._values.items():
            node, key = find_node(config, name)
            if node is not None and key in node and node[key] == value:
                node[key] = AUTO
        self._values = {}


def find_node(config: Any, name: str) -> tuple[dict[str, Any] | None, str]:
    """Return the dictionary that holds a value, None where there is none, and the last part of its name."""
    *nodes, key = name.split(".")
    for node in nodes:
        config = config.get(node) if isinstance(config, dict) else None
    return (config if isinstance(config, dict) else None), key


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over all values of a configuration that are no dictionaries, with their dotted names."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def same_value(first: Any, second: Any) -> bool:
    """Whether two values mean the same: 8 and "8" do, and so does anything and a value nobody gave (None)."""
    if second is None or first == second:
        return True
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return str(first).lower() == str(second).lower()
    try:
        return float(first) == float(second)
    except (TypeError, ValueError):
        return str(first) == str(second)


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration in which DeepSpeed chooses whatever is "auto"."""
    return {
        key: without_auto(value) if isinstance(value, dict) else deepcopy(value)
        for key, value in config.items()
        if value != AUTO
    }
