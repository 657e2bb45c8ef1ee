"""What users say of DeepSpeed -> values of its configuration, checked together; models built in shards.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from accelerate.base import packages, wrong_value
from accelerate.plugins.checks import read_flag
from accelerate.plugins.deepspeed_config import Filling, without_auto
from accelerate.plugins.fsdp_wrapping import find_classes
from accelerate.settings import AUTO, KEYS, USUAL, likely_typos, read
from accelerate.settings.sections import DeepSpeedSection, Fp8Section

if TYPE_CHECKING:
    from torch import nn


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
    """Return what the environment says, by field.

    Args:
        variables: of this process; "auto" counts as not set.

    Raises:
        ConfigurationError: variables hold values that cannot be.
    """
    said = {name: text for name, text in variables.items() if text.lower() != AUTO}
    options = read(said, (DeepSpeedSection,))
    names = {**{field: field for field in KEYS}, **_OTHER_OPTIONS}
    found = {field: options[option] for field, option in names.items() if option in options}
    fp8 = read(said, (Fp8Section,))
    if "fp8_backend" in fp8:
        found["enable_msamp"] = str(fp8["fp8_backend"]).lower() == "msamp"
    if "fp8_opt_level" in fp8:
        found["msamp_opt_level"] = fp8["fp8_opt_level"]
    fields = said.get(FIELDS_OF_FILE, "")
    found[FIELDS_OF_FILE] = {name.strip() for name in fields.split(",") if name.strip()}
    return found


def config_of(fields: Any) -> dict[str, Any]:
    """Return the configuration that the fields stand for; what is known later is "auto"."""

    def place(name: str) -> dict[str, Any]:
        path = getattr(fields, f"offload_{name}_nvme_path")
        device = str(getattr(fields, f"offload_{name}_device")).lower()
        return {"device": device, "nvme_path": path if device == "nvme" else None}

    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": fields.gradient_accumulation_steps,
        "zero_optimization": {
            "stage": fields.zero_stage,
            "offload_optimizer": place("optimizer"),
            "offload_param": place("param"),
            "stage3_gather_16bit_weights_on_model_save": fields.zero3_save_16bit_model,
        },
        "gradient_clipping": fields.gradient_clipping,
    }


def filling_of(given: Mapping[str, Any], found: Mapping[str, Any]) -> Filling:
    """Return what arguments and variables say, by dotted name; a configuration wins over variables."""
    arguments = {name: value for name, value in given.items() if value != AUTO}
    variables = {name: found[name] for name in KEYS if name in found and name not in arguments}
    sources = {KEYS[name]: f"the argument {name}" for name in arguments}
    sources.update({KEYS[name]: f"the variable {_VARIABLES[name]}" for name in variables})
    return Filling(
        {KEYS[name]: value for name, value in {**variables, **arguments}.items()},
        sources,
        usual={KEYS[name]: value for name, value in USUAL.items()},
        yielding={KEYS[name] for name in variables if name not in found[FIELDS_OF_FILE]},
    )


def warn_of_overruled(lines: Sequence[str]) -> None:
    """Warn of variables that say something else than the configuration, which counts."""
    if lines:
        warnings.warn(f"DeepSpeed's configuration counts: {'; '.join(lines)}.", stacklevel=5)


def add_missing(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add to a configuration what is not in it and is not as usual."""
    for name, key in KEYS.items():
        if values.get(key, USUAL[name]) == USUAL[name]:
            continue
        *nodes, last = key.split(".")
        place: Any = config
        for node in nodes:
            place = place.setdefault(node, {})
        place.setdefault(last, values[key])


def warn_of_typos(config: Mapping[str, Any]) -> None:
    """Warn of keys that look like others, misspelt: DeepSpeed passes over those that it does not know."""
    if found := likely_typos(config):
        typos = "; ".join(f"{key!r}, which may mean {name!r}" for key, name in found.items())
        warnings.warn(f"DeepSpeed's configuration has {typos}.", stacklevel=5)


def read_init_flag(asked: Any, stage: Any) -> bool:
    """Return whether models are built in shards; only stage 3 can.

    Raises:
        ConfigurationError: it is neither a yes nor a no.
    """
    wanted = read_flag("zero3_init_flag", asked)
    if wanted and str(stage) != "3":
        warnings.warn(
            f"zero3_init_flag=True has no effect: ZeRO stage {stage} does not shard models.", stacklevel=5
        )
        return False
    return wanted


def set_format(config: dict[str, Any], mixed_precision: str) -> None:
    """Let a configuration train in a number format.

    Raises:
        ConfigurationError: it asks for the other format, or there is no such format.
    """
    if mixed_precision != "no" and mixed_precision not in FORMATS:
        known = ", ".join(("no", *FORMATS))
        raise wrong_value("mixed_precision", mixed_precision, "no such number format", f"Use one of {known}")
    wanted = FORMATS.get(mixed_precision)
    for name in ("fp16", "bf16"):
        section = config.setdefault(name, {})
        said = section.get("enabled", AUTO)
        if said == AUTO:
            section["enabled"] = name == wanted
            if name == wanted == "fp16":
                section.setdefault("auto_cast", True)
        elif said is True and wanted not in (None, name):
            raise wrong_value(
                "mixed_precision",
                mixed_precision,
                f"DeepSpeed's configuration has {name}.enabled=True",
                f"Set {name}.enabled to 'auto' there, or mixed_precision to {name!r}",
            )


def split_names(names: Any) -> list[str]:
    """Return the class names in a text that separates them by commas, or in a list."""
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return [part.strip() for part in parts if part.strip()]


def mark_leaves(model: nn.Module, names: Sequence[str]) -> None:
    """Let ZeRO-3 fetch the modules of some classes as a whole.

    Raises:
        ConfigurationError: it has none of one of the classes.
    """
    classes = find_classes(model, names, "transformer_moe_cls_names")
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, list(classes))


def config_to_build(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that is complete enough to build a model in shards.

    Args:
        config: may hold "auto"; batch sizes have no effect on how a model is built.
    """
    complete = without_auto(config)
    batch = complete.pop("train_micro_batch_size_per_gpu", None)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        complete.pop(name, None)
    return {**complete, "train_micro_batch_size_per_gpu": 1 if batch in (None, AUTO) else batch}


def build_sharded(config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context in which modules are built in shards; entered on all ranks."""
    packages.require("deepspeed", "Building models in shards")
    import deepspeed

    sharded: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config_to_build(config))
    return sharded


def leave_whole() -> AbstractContextManager[None]:
    """Return a context that leaves models as they are built."""
    return nullcontext()


def show_to_transformers(config: Mapping[str, Any], sharded: bool, shown: Any) -> Any:
    """Let transformers know whether models are built in shards.

    Returns:
        What transformers looks at for as long as it lives; None where models are whole, or without
        transformers.
    """
    if not sharded and shown is None:
        return None
    if not packages.is_transformers_available() or not packages.is_deepspeed_available():
        return None
    from transformers.integrations import deepspeed as glue

    if sharded:
        return glue.HfDeepSpeedConfig(config_to_build(config))
    glue.unset_hf_deepspeed_config()
    return None
