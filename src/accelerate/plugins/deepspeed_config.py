"""Functions that build a DeepSpeed configuration from the fields of the plugin and replace its "auto" values.

`DeepSpeedPlugin` and `strategies/deepspeed` call them. Values are addressed by dotted names. Source:
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from accelerate.base import packages, shown, wrong_value
from accelerate.settings import (
    AUTO,
    KEYS,
    STAGE,
    USUAL,
    find_node,
    likely_typos,
    look_up,
    read_config,
    read_fields,
    refuse_config,
)
from accelerate.settings.sections import DeepSpeedSection, Fp8Section


class HfDeepSpeedConfig:
    """DeepSpeed configuration whose values have dotted names, such as "zero_optimization.stage".

    Args:
        config_file_or_dict: A dictionary, which is copied, the path of a JSON file, or JSON in base64.

    Attributes:
        config: The configuration, which can be changed in place.

    Raises:
        ConfigurationError: The argument is none of these, or is not valid JSON.
    """

    def __init__(self, config_file_or_dict: object) -> None:
        self.config: dict[str, Any] = read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Records the ZeRO stage (-1 without one), and whether parameters or states are offloaded."""
        self._stage = self.get_value(STAGE, -1)
        devices = (self.get_value(KEYS[f"offload_{name}_device"]) for name in ("optimizer", "param"))
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Returns the dictionary that holds a value and the last part of its name.

        Args:
            ds_key_long: Dotted name of the value.

        Returns:
            The dictionary, None if it does not exist, and the key.
        """
        return find_node(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Returns a value by its dotted name, or `default` if there is none."""
        return look_up(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Removes a value or a section.

        Args:
            ds_key_long: Dotted name of the value or section.
            must_exist: Whether a missing value is an error.

        Raises:
            ConfigurationError: The value is missing, and `must_exist` is True.
        """
        config, key = self.find_config_node(ds_key_long)
        if config is not None and key in config:
            del config[key]
        elif must_exist:
            fix = f"name one of {', '.join(name for name, _ in leaves(self.config))}"
            reason = "the DeepSpeed configuration has no such value"
            raise wrong_value("ds_key_long", ds_key_long, reason, fix)

    def is_true(self, ds_key_long: str) -> bool:
        """Returns whether a value exists and is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Returns whether a value exists and is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Returns whether gradients and optimizer states are sharded, and parameters are not."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Returns whether parameters are sharded."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Returns whether parameters or optimizer states are offloaded to the CPU or to NVMe."""
        return self._offload


@dataclass
class AutoValues:
    """Values by dotted name that replace "auto" in a configuration, with a record of mismatches."""

    values: Mapping[str, Any]  # None selects DeepSpeed's default
    sources: Mapping[str, str] = field(default_factory=dict)  # the argument or variable that gives a value
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for names not in `values`, never compared
    hints: Mapping[str, str] = field(default_factory=dict)  # prefix of a name -> how to give its value
    overridable: Collection[str] = ()  # names for which the value of the configuration takes precedence
    filled: dict[str, Any] = field(default_factory=dict)  # new values of names that were "auto"
    missing: list[str] = field(default_factory=list)  # names that are "auto" and have no value
    mismatches: list[str] = field(default_factory=list)  # one line for each value that differs
    overridden: list[str] = field(default_factory=list)  # one line for each `overridable` value that differs

    def fill(self, config: dict[str, Any], must_match: bool = True, prefix: str = "") -> None:
        """Replaces "auto" in a configuration or its section `prefix`, and records mismatches."""
        for key in list(config):
            if isinstance(config[key], dict):
                self.fill(config[key], must_match, f"{prefix}{key}.")
            else:
                self.fill_one(config, key, f"{prefix}{key}", must_match)

    def fill_one(self, config: dict[str, Any], key: str, name: str, must_match: bool = True) -> None:
        """Replaces or compares the value of one key, with dotted name `name` in the whole configuration."""
        value = config[key]
        if value != AUTO:
            if must_match and not same_value(value, self.values.get(name)):
                lines = self.overridden if name in self.overridable else self.mismatches
                source = self.sources.get(name, "an argument")
                expected = shown(self.values[name])
                lines.append(
                    f"{name} is {shown(value)} in the DeepSpeed configuration, and {expected} by {source}"
                )
        elif name not in self.values and name not in self.defaults:
            self.missing.append(name)
        elif (new_value := self.values.get(name, self.defaults.get(name))) is None:
            del config[key]
        else:
            config[key] = self.filled[name] = new_value

    def check_filled(self, mismatches: list[str] | None = None) -> None:
        """Raises a `ConfigurationError` with missing values and mismatches.

        Args:
            mismatches: List to which mismatches are appended, instead of the error.
        """
        lines = [] if mismatches is not None else list(self.mismatches)
        if mismatches is not None:
            mismatches += self.mismatches
        for name in self.missing:
            hint = next((f": {hint}" for start, hint in self.hints.items() if name.startswith(start)), "")
            lines.append(f"{name} is 'auto', and its value is not given{hint}")
        refuse_config(lines, "Correct the configuration; 'auto' takes the value of the plugin")


def restore_auto(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Replaces filled values of a configuration by "auto" again, unless they have been changed since."""
    for name, value in values.items():
        node, key = find_node(config, name)
        if node is not None and node.get(key) == value:
            node[key] = AUTO
    values.clear()


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all values of a configuration that are not dictionaries, with their dotted names."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def same_value(first: Any, second: Any) -> bool:
    """Returns whether two values are equal, as numbers or as text.

    8 and "8" are equal, and any value is equal to `second=None`, which is a value that is not given.
    """
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
    """Returns a copy of a configuration without its "auto" values, for which DeepSpeed has defaults."""
    return {
        key: without_auto(value) if isinstance(value, dict) else deepcopy(value)
        for key, value in config.items()
        if value != AUTO
    }


_VARIABLES = {row.field: row.variables[0] for row in DeepSpeedSection.options() if row.variables}
FIELDS_OF_FILE = "ACCELERATE_CONFIG_DS_FIELDS"
"""Variable with the names of the plugin fields that the user's configuration file sets."""

PRECISION_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""Mixed precision -> the section of DeepSpeed's configuration that enables it."""


def read_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of environment variables by field, without those that are "auto"."""
    variables = {name: text for name, text in variables.items() if text.lower() != AUTO}
    values = read_fields(variables, DeepSpeedSection, Fp8Section)
    if "opt_level" in values:
        values["msamp_opt_level"] = values["opt_level"]
    if "backend" in values:
        values["enable_msamp"] = values["backend"] == "msamp"
    return {**values, FIELDS_OF_FILE: set(split_names(variables.get(FIELDS_OF_FILE)))}


def config_of(fields: object) -> dict[str, Any]:
    """Returns the configuration for the fields of a plugin, with "auto" for values that are known later."""
    config = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
    for name, key in KEYS.items():
        value = getattr(fields, name)
        if name.endswith("_device"):
            value = str(value).lower()
        elif name.endswith("_nvme_path"):
            device = getattr(fields, name.replace("nvme_path", "device"))
            value = value if str(device).lower() == "nvme" else None
        _add(config, key, value)
    return config


def _add(config: dict[str, Any], key: str, value: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config.setdefault(last, value)


def auto_values_of(arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> AutoValues:
    """Returns the values for "auto" from the arguments and variables of fields.

    A configuration takes precedence over variables, except over those for fields that the user's
    configuration file sets.
    """
    arguments = {name: value for name, value in arguments.items() if value != AUTO}
    fields = {name: variables[name] for name in KEYS if name in variables and name not in arguments}
    sources = {KEYS[name]: f"the argument {name}" for name in arguments}
    sources.update({KEYS[name]: f"the variable {_VARIABLES[name]}" for name in fields})
    return AutoValues(
        {KEYS[name]: value for name, value in {**fields, **arguments}.items()},
        sources,
        defaults={KEYS[name]: value for name, value in USUAL.items()},
        overridable={KEYS[name] for name in fields if name not in variables[FIELDS_OF_FILE]},
    )


def add_missing(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Adds values to a configuration that it lacks and that differ from the defaults."""
    for name, key in KEYS.items():
        if values.get(key, USUAL[name]) != USUAL[name]:
            _add(config, key, values[key])


def warn_of_typos(config: Mapping[str, Any]) -> None:
    """Warns about keys that are probably misspelled, because DeepSpeed ignores unknown keys."""
    if likely := likely_typos(config):
        typos = "; ".join(f"{key!r}, which may mean {name!r}" for key, name in likely.items())
        warnings.warn(f"DeepSpeed's configuration has {typos}.", stacklevel=5)


def set_precision(config: dict[str, Any], mixed_precision: str) -> None:
    """Enables a mixed precision in a configuration."""
    if mixed_precision != "no" and mixed_precision not in PRECISION_SECTIONS:
        known = ", ".join(("no", *PRECISION_SECTIONS))
        raise wrong_value("mixed_precision", mixed_precision, "it is not supported", f"Use one of {known}")
    enabled_name = PRECISION_SECTIONS.get(mixed_precision)
    for name in ("fp16", "bf16"):
        section = config.setdefault(name, {})
        enabled = section.get("enabled", AUTO)
        if enabled == AUTO:
            section["enabled"] = name == enabled_name
            if name == enabled_name == "fp16":
                section.setdefault("auto_cast", True)
        elif enabled is True and enabled_name not in (None, name):
            reason = f"DeepSpeed's configuration has {name}.enabled=True"
            fix = f"Set {name}.enabled to 'auto' there, or mixed_precision to {name!r}"
            raise wrong_value("mixed_precision", mixed_precision, reason, fix)


def split_names(names: str | Iterable[str] | None) -> list[str]:
    """Returns the class names in a text that separates them by commas, or in a list."""
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return [part.strip() for part in parts if part.strip()]


def config_to_build(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without "auto" for building a sharded model, with a valid batch size."""
    complete = without_auto(config)
    batch = complete.pop("train_micro_batch_size_per_gpu", None)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        complete.pop(name, None)
    return {**complete, "train_micro_batch_size_per_gpu": 1 if batch is None else batch}


def register_with_transformers(config: Mapping[str, Any], sharded: bool, current: object) -> Any:
    """Informs transformers whether models are sharded while they are built.

    Returns:
        The object that transformers reads by a weak reference. None if models are not sharded, or
        transformers or DeepSpeed is not installed.
    """
    has_packages = packages.is_transformers_available() and packages.is_deepspeed_available()
    if not has_packages or (not sharded and current is None):
        return None
    from transformers.integrations import deepspeed as integration

    if sharded:
        return integration.HfDeepSpeedConfig(config_to_build(config))
    integration.unset_hf_deepspeed_config()
    return None
