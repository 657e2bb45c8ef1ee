"""A DeepSpeed configuration: looked up by dotted names, made of the plugin's fields, "auto" filled in.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
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
    read,
    read_config,
    refuse_config,
)
from accelerate.settings.sections import DeepSpeedSection, Fp8Section


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
        devices = (self.get_value(KEYS[f"offload_{name}_device"]) for name in ("optimizer", "param"))
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the dictionary that holds a value, None where there is none, and the last part of its name.

        Args:
            ds_key_long: Dotted name of the value.
        """
        return find_node(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value by its dotted name, or `default` where there is none."""
        return look_up(self.config, ds_key_long, default)

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
            fix = f"name one of {', '.join(name for name, _ in leaves(self.config))}"
            reason = "the DeepSpeed configuration has no such value"
            raise wrong_value("ds_key_long", ds_key_long, reason, fix)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a value is there and true."""
        return bool(self.get_value(ds_key_long))

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
    """Values, by dotted name, for the "auto" of a configuration, and all that does not fit them in it."""

    values: Mapping[str, Any]  # None lets DeepSpeed choose
    sources: Mapping[str, str] = field(default_factory=dict)  # the argument or variable that gives a value
    usual: Mapping[str, Any] = field(default_factory=dict)  # where `values` has none; never compared
    hints: Mapping[str, str] = field(default_factory=dict)  # beginning of a name -> what would give the value
    yielding: Collection[str] = ()  # names whose values in a configuration win
    filled: dict[str, Any] = field(default_factory=dict)  # what was "auto" and has a value now
    missing: list[str] = field(default_factory=list)  # names that are "auto" and have no value
    mismatches: list[str] = field(default_factory=list)  # one line for each value that is another one
    overruled: list[str] = field(default_factory=list)  # likewise, for values that yield

    def fill(self, config: dict[str, Any], must_match: bool = True, prefix: str = "") -> None:
        """Fill a configuration, or the dictionary below `prefix` in it, and record what does not fit."""
        for key in list(config):
            if isinstance(config[key], dict):
                self.fill(config[key], must_match, f"{prefix}{key}.")
            else:
                self.fill_one(config, key, f"{prefix}{key}", must_match)

    def fill_one(self, config: dict[str, Any], key: str, name: str, must_match: bool = True) -> None:
        """Fill, or compare, the value of one key, whose dotted name in the whole configuration is `name`."""
        value = config[key]
        if value != AUTO:
            if must_match and not same_value(value, self.values.get(name)):
                (self.overruled if name in self.yielding else self.mismatches).append(self._line(name, value))
        elif name not in self.values and name not in self.usual:
            self.missing.append(name)
        elif (chosen := self.values.get(name, self.usual.get(name))) is None:
            del config[key]
        else:
            config[key] = self.filled[name] = chosen

    def _line(self, name: str, value: Any) -> str:
        source = self.sources.get(name, "an argument")
        wanted = shown(self.values[name])
        return f"{name} is {shown(value)} in the DeepSpeed configuration, and {wanted} by {source}"

    def check_filled(self, mismatches: list[str] | None = None) -> None:
        """Raise a `ConfigurationError` with what is missing, and with mismatches unless a list gets them."""
        lines = [] if mismatches is not None else list(self.mismatches)
        if mismatches is not None:
            mismatches += self.mismatches
        for name in self.missing:
            hint = next((f": {hint}" for start, hint in self.hints.items() if name.startswith(start)), "")
            lines.append(f"{name} is 'auto', and nothing says its value{hint}")
        refuse_config(lines, "Correct the configuration; 'auto' takes the value of the plugin")


def undo_filling(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Make "auto" again what was filled into a configuration and has not been changed since."""
    for name, value in values.items():
        node, key = find_node(config, name)
        if node is not None and node.get(key) == value:
            node[key] = AUTO
    values.clear()


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over all values of a configuration that are no dictionaries, with their dotted names."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def same_value(first: Any, second: Any) -> bool:
    """Whether two values mean the same: 8 and "8" do, and so does anything and a value that is not given."""
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


_OTHER_OPTIONS = {
    "deepspeed_config_file": "deepspeed_config_file",
    "zero3_init_flag": "zero3_init_flag",
    "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names",
}
_VARIABLES = {row.name: row.variables[0] for row in DeepSpeedSection.options() if row.variables}
FIELDS_OF_FILE = "ACCELERATE_CONFIG_DS_FIELDS"
"""The variable that names the fields which the user's configuration file sets beside DeepSpeed's own."""

FORMATS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""Number formats -> the section of DeepSpeed's configuration that trains in them."""


def read_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of variables by field; "auto" counts as not set."""
    variables = {name: text for name, text in variables.items() if text.lower() != AUTO}
    options = read(variables, (DeepSpeedSection, Fp8Section))
    names = {**{field: field for field in KEYS}, **_OTHER_OPTIONS, "msamp_opt_level": "fp8_opt_level"}
    values = {field: options[option] for field, option in names.items() if option in options}
    if "fp8_backend" in options:
        values["enable_msamp"] = str(options["fp8_backend"]).lower() == "msamp"
    return {**values, FIELDS_OF_FILE: set(split_names(variables.get(FIELDS_OF_FILE)))}


def config_of(fields: Any) -> dict[str, Any]:
    """Return the configuration that the fields stand for; what is known later is "auto"."""
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


def _add(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config.setdefault(last, value)


def filling_of(arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> Filling:
    """Return what the arguments and the variables of fields give; a configuration wins over variables."""
    arguments = {name: value for name, value in arguments.items() if value != AUTO}
    fields = {name: variables[name] for name in KEYS if name in variables and name not in arguments}
    sources = {KEYS[name]: f"the argument {name}" for name in arguments}
    sources.update({KEYS[name]: f"the variable {_VARIABLES[name]}" for name in fields})
    return Filling(
        {KEYS[name]: value for name, value in {**fields, **arguments}.items()},
        sources,
        usual={KEYS[name]: value for name, value in USUAL.items()},
        yielding={KEYS[name] for name in fields if name not in variables[FIELDS_OF_FILE]},
    )


def add_missing(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add to a configuration what is not in it and is not as usual."""
    for name, key in KEYS.items():
        if values.get(key, USUAL[name]) != USUAL[name]:
            _add(config, key, values[key])


def warn_of_typos(config: Mapping[str, Any]) -> None:
    """Warn of keys that look like others, misspelt: DeepSpeed ignores those that it does not know."""
    if likely := likely_typos(config):
        typos = "; ".join(f"{key!r}, which may mean {name!r}" for key, name in likely.items())
        warnings.warn(f"DeepSpeed's configuration has {typos}.", stacklevel=5)


def set_format(config: dict[str, Any], mixed_precision: str) -> None:
    """Let a configuration train in a number format."""
    if mixed_precision != "no" and mixed_precision not in FORMATS:
        known = ", ".join(("no", *FORMATS))
        raise wrong_value("mixed_precision", mixed_precision, "no such number format", f"Use one of {known}")
    wanted = FORMATS.get(mixed_precision)
    for name in ("fp16", "bf16"):
        section = config.setdefault(name, {})
        enabled = section.get("enabled", AUTO)
        if enabled == AUTO:
            section["enabled"] = name == wanted
            if name == wanted == "fp16":
                section.setdefault("auto_cast", True)
        elif enabled is True and wanted not in (None, name):
            reason = f"DeepSpeed's configuration has {name}.enabled=True"
            fix = f"Set {name}.enabled to 'auto' there, or mixed_precision to {name!r}"
            raise wrong_value("mixed_precision", mixed_precision, reason, fix)


def split_names(names: Any) -> list[str]:
    """Return the class names in a text that separates them by commas, or in a list."""
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return [part.strip() for part in parts if part.strip()]


def config_to_build(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without "auto" with which a model can be built in shards, for any batch size."""
    complete = without_auto(config)
    batch = complete.pop("train_micro_batch_size_per_gpu", None)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        complete.pop(name, None)
    return {**complete, "train_micro_batch_size_per_gpu": 1 if batch is None else batch}


def show_to_transformers(config: Mapping[str, Any], sharded: bool, current: Any) -> Any:
    """Let transformers know whether models are built in shards; return the object that it reads by a weak
    reference, None where models are whole or transformers is not installed."""
    has_packages = packages.is_transformers_available() and packages.is_deepspeed_available()
    if not has_packages or (not sharded and current is None):
        return None
    from transformers.integrations import deepspeed as glue

    if sharded:
        return glue.HfDeepSpeedConfig(config_to_build(config))
    glue.unset_hf_deepspeed_config()
    return None
