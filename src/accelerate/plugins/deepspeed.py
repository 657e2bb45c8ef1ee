"""Plugin that builds the configuration of DeepSpeed from arguments, the environment and a file.

Users pass it to `Accelerator`. `strategies/deepspeed` reads it when objects are prepared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accelerate.base import (
    ConfigurationError,
    StateError,
    as_builtin,
    environ,
    plain_value,
    require,
    wrong_value,
)
from accelerate.plugins import deepspeed_config as configs
from accelerate.plugins.checks import fill, plain_fields, read_flag
from accelerate.plugins.deepspeed_config import AutoValues, HfDeepSpeedConfig, register_with_transformers
from accelerate.plugins.fsdp import find_classes
from accelerate.settings import AUTO, KEYS, USUAL, deepspeed_checks as checks, refuse_config
from accelerate.settings.sections import OffloadDevice

if TYPE_CHECKING:
    from torch import nn


@dataclass
class DeepSpeedPlugin:
    """Options of training with DeepSpeed.

    Fields that are None are read from the environment, which the launcher sets, when the object is built. The
    values of a given DeepSpeed configuration take precedence, and an argument that differs is an error. An
    "auto" in it is replaced by arguments and variables at once, and by values of the prepared objects later.

    Args:
        hf_ds_config: DeepSpeed configuration as a dictionary, the path of a JSON file, JSON in base64, or an
            `HfDeepSpeedConfig`, which is not copied. From ACCELERATE_DEEPSPEED_CONFIG_FILE, otherwise built
            from the fields below.
        gradient_accumulation_steps: Number of batches for each optimizer step. Default: that of the
            `Accelerator`.
        gradient_clipping: Maximum norm of the gradients. Default: the one that `clip_grad_norm_` gets.
        zero_stage: ZeRO stage: nothing is sharded (0), optimizer states (1), gradients, too (2), or
            parameters, too (3). Default: 2.
        is_train_batch_min: Whether to use the smallest batch size of several loaders instead of the largest.
        offload_optimizer_device: Device of optimizer states, "none", "cpu" or "nvme".
        offload_param_device: Device of parameters with stage 3, "none", "cpu" or "nvme".
        offload_optimizer_nvme_path: Folder of optimizer states on NVMe.
        offload_param_nvme_path: Folder of parameters on NVMe.
        zero3_init_flag: Whether models are sharded while they are built. Default: True with stage 3.
        zero3_save_16bit_model: Whether shards are gathered when a model is saved. Default: False.
        transformer_moe_cls_names: Class names of mixture-of-experts layers, separated by commas, that stage 3
            all-gathers as a whole. From ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES.
        enable_msamp: Whether DeepSpeed computes in FP8 with MS-AMP. From ACCELERATE_FP8_BACKEND.
        msamp_opt_level: "O1" or "O2". From ACCELERATE_FP8_OPT_LEVEL, otherwise "O1".

    Attributes:
        deepspeed_config: Dictionary of `hf_ds_config`, not a copy.
        filled: Values that `prepare` has filled in, by dotted name.
        dschf: Object from which transformers reads that models are sharded while they are built, or None.

    Raises:
        ConfigurationError: Values are not valid or conflict. The message has all of them.
    """

    hf_ds_config: Any = None
    # Any, because these are numbers or "auto"
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: OffloadDevice | None = None
    offload_param_device: OffloadDevice | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        self._selected = False
        self.dschf: Any = None
        self.filled: dict[str, Any] = {}
        variables = configs.read_variables(environ.current())
        source = self.hf_ds_config
        if source is None:
            source = variables.get("deepspeed_config_file")
        arguments = {name: getattr(self, name) for name in KEYS if getattr(self, name) is not None}
        problems = []
        if source is not None:
            problems = self._load_config(source, arguments, variables)
        else:
            for name, default in USUAL.items():
                setattr(self, name, arguments.get(name, variables.get(name, default)))
            self.hf_ds_config = HfDeepSpeedConfig(configs.config_of(self))
        problems += checks.problems_of_fields(self)
        refuse_config(problems, "Correct them; 'auto' in the configuration takes the value of the plugin")
        self.zero_stage = int(self.zero_stage)
        self.hf_ds_config.set_stage_and_offload()
        self.deepspeed_config: Any = self.hf_ds_config.config
        self.deepspeed_config.setdefault("steps_per_print", math.inf)  # no progress reports
        self._read_flags(variables)

    def _load_config(
        self, source: object, arguments: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> list[str]:
        """Replaces "auto" in a configuration by arguments and variables, and sets the fields from it."""
        self.hf_ds_config = source if isinstance(source, HfDeepSpeedConfig) else HfDeepSpeedConfig(source)
        config = self.hf_ds_config.config
        checks.straighten(config)
        refuse_config(checks.problems_of_config(config), "Correct the configuration")
        configs.warn_of_typos(config)
        auto_values = configs.auto_values_of(arguments, variables)
        configs.add_missing(config, auto_values.values)
        auto_values.fill(config)
        if auto_values.overridden:
            lines = "; ".join(auto_values.overridden)
            warnings.warn(f"DeepSpeed's configuration takes precedence: {lines}.", stacklevel=4)
        config.setdefault("gradient_accumulation_steps", AUTO)
        for name, key in KEYS.items():
            default = USUAL[name] if name != "zero_stage" else 0
            setattr(self, name, self.hf_ds_config.get_value(key, default))
        return auto_values.mismatches

    def _read_flags(self, variables: Mapping[str, Any]) -> None:
        flag = self.zero3_init_flag
        if flag is None:
            flag = variables.get("zero3_init_flag", self.hf_ds_config.is_zero3())
        self.zero3_init_flag = read_flag("zero3_init_flag", flag)
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            reason = f"ZeRO stage {self.zero_stage} does not shard models"
            warnings.warn(f"zero3_init_flag=True has no effect: {reason}.", stacklevel=4)
            self.zero3_init_flag = False
        names = ("transformer_moe_cls_names", "enable_msamp", "msamp_opt_level")
        fill(self, {"enable_msamp": False, "msamp_opt_level": "O1", **variables}, names)
        if self.enable_msamp:
            self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    def is_auto(self, ds_key_long: str) -> bool:
        """Returns whether a value of the configuration is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Returns a value of the configuration by its dotted name, or `default` if it has none."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replaces a value of the configuration that is "auto", and compares another value.

        Args:
            ds_key_long: Dotted name of the value. A missing value is ignored.
            mismatches: List to which a line is appended if the value differs.
            must_match: Whether the value must be equal.
            **kwargs: Values by dotted name.

        Raises:
            ConfigurationError: The value is "auto", and `kwargs` has no value for it.
        """
        config, key = self.hf_ds_config.find_config_node(ds_key_long)
        if config is None or key not in config:
            return
        auto_values = AutoValues(kwargs)
        auto_values.fill_one(config, key, ds_key_long, must_match)
        auto_values.check_filled(mismatches)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replaces all values of the configuration that are "auto", and compares the others.

        Args:
            prefix: Dotted name of a section, with a dot at its end. Empty for the whole configuration.
            mismatches: List to which a line is appended for each value that differs, instead of an error.
            config: The section. None for the whole configuration.
            must_match: Whether values must be equal.
            **kwargs: Values by dotted name. None selects DeepSpeed's default.

        Raises:
            ConfigurationError: Values differ, or are "auto" without a value in `kwargs`. The message has all
                of them.
        """
        auto_values = AutoValues(kwargs)
        auto_values.fill(self.deepspeed_config if config is None else config, must_match, prefix)
        auto_values.check_filled(mismatches)
        self.hf_ds_config.set_stage_and_offload()

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Sets the mixed precision of DeepSpeed, where "no" keeps that of the configuration.

        Args:
            mixed_precision: "no", "fp16", "bf16", or "fp8" (bfloat16 outside of FP8 layers).

        Raises:
            ConfigurationError: The configuration selects another precision.
        """
        configs.set_precision(self.deepspeed_config, str(plain_value(mixed_precision)).lower())

    def set_deepspeed_weakref(self) -> None:
        """Informs transformers whether models are sharded while they are built."""
        self.dschf = register_with_transformers(
            self.deepspeed_config, self.is_zero3_init_enabled(), self.dschf
        )

    def is_zero3_init_enabled(self) -> bool:
        """Returns whether models are sharded while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Enables or disables the sharding of models that are built in the block.

        Args:
            enable: Whether models are sharded while they are built, which requires stage 3.
        """
        previous = self.is_zero3_init_enabled()
        if enable and not self.hf_ds_config.is_zero3():
            reason = f"models are not sharded by ZeRO stage {self.zero_stage}"
            raise wrong_value("enable", enable, reason, "Use stage 3")
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            with self._sharded_build() if enable else nullcontext():
                yield
        finally:
            self.zero3_init_flag = previous
            self.set_deepspeed_weakref()

    def _sharded_build(self) -> AbstractContextManager[Any]:
        require("deepspeed", "Building models in shards")
        import deepspeed

        config = configs.config_to_build(self.deepspeed_config)
        return deepspeed.zero.Init(config_dict_or_path=config)  # type: ignore[no-any-return]

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Makes stage 3 all-gather mixture-of-experts layers as a whole, for any experts that are used.

        Args:
            model: Model with modules of the classes in `transformer_moe_cls_names`. Unchanged without names.

        Raises:
            ConfigurationError: The model has no module of one of the classes.
        """
        names = configs.split_names(self.transformer_moe_cls_names)
        if not names:
            return
        classes = find_classes(model, names, "transformer_moe_cls_names")
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, classes)

    @property
    def selected(self) -> bool:
        """Selection of this plugin, as set by `AcceleratorState().select_deepspeed_plugin(name)`."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        text = "`selected` cannot be assigned. Call `AcceleratorState().select_deepspeed_plugin(name)`"
        raise as_builtin(StateError(f"{text}, which deselects the other plugins."), NotImplementedError)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Selects this plugin, when `AcceleratorState().select_deepspeed_plugin(name)` calls it.

        Args:
            _from_accelerator_state: Whether the caller is `AcceleratorState`.

        Raises:
            ConfigurationError: It is not, so that another plugin would still be selected.
        """
        if not _from_accelerator_state:
            raise ConfigurationError(
                "A DeepSpeedPlugin cannot select itself. Call "
                "`AcceleratorState().select_deepspeed_plugin(name)`, which deselects the other plugins."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Returns the DeepSpeed plugin in use.

    Args:
        state: An `AcceleratorState`.

    Raises:
        ConfigurationError: The run does not use DeepSpeed.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise ConfigurationError(
            f"This run does not use DeepSpeed (distributed_type is {state.distributed_type}). Pass "
            "`deepspeed_plugin=DeepSpeedPlugin(...)` to `Accelerator`."
        )
    return plugin
