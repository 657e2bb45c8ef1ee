"""DeepSpeedPlugin: how DeepSpeed trains, from arguments, the environment and DeepSpeed's configuration."""

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
from accelerate.plugins.deepspeed_config import Filling, HfDeepSpeedConfig, show_to_transformers
from accelerate.plugins.fsdp import find_classes
from accelerate.settings import AUTO, KEYS, USUAL, deepspeed_checks as checks, refuse_config
from accelerate.settings.sections import OffloadDevice

if TYPE_CHECKING:
    from torch import nn


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains.

    What is not given is read from the environment when the object is built, as the launcher sets it. Where a
    DeepSpeed configuration is given, its values count; an argument that says something else is an error, and
    "auto" takes over arguments and variables now, and what `prepare` is given later.

    Args:
        hf_ds_config: DeepSpeed's own configuration: a dictionary, the path of a JSON file, JSON in base64, or
            an `HfDeepSpeedConfig`, which is kept. From ACCELERATE_DEEPSPEED_CONFIG_FILE; otherwise it is made
            from the fields below.
        gradient_accumulation_steps: Batches for each step of the optimizer; otherwise as the `Accelerator`.
        gradient_clipping: Largest norm of the gradients; otherwise as `clip_grad_norm_` is called.
        zero_stage: What processes share: nothing (0), optimizer states (1), gradients too (2), parameters too
            (3); otherwise 2.
        is_train_batch_min: Whether the smallest batch size of several loaders counts, and not the largest.
        offload_optimizer_device: Where optimizer states are kept: "none", "cpu" or "nvme".
        offload_param_device: Where parameters are kept: "none", "cpu" or "nvme"; for stage 3.
        offload_optimizer_nvme_path: Folder for optimizer states on NVMe.
        offload_param_nvme_path: Folder for parameters on NVMe.
        zero3_init_flag: Whether models are built in shards; otherwise with stage 3.
        zero3_save_16bit_model: Whether shards are brought together when a model is saved; otherwise no.
        transformer_moe_cls_names: Class names of mixture-of-experts layers, separated by commas, that stage 3
            fetches as a whole. From ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES.
        enable_msamp: Whether DeepSpeed computes in FP8 by MS-AMP; otherwise as ACCELERATE_FP8_BACKEND says.
        msamp_opt_level: "O1" or "O2". From ACCELERATE_FP8_OPT_LEVEL; otherwise "O1".

    Attributes:
        deepspeed_config: The configuration, the very dictionary of `hf_ds_config`.
        filled: What `prepare` has filled in, by dotted name.
        dschf: The object from which transformers reads that models are built in shards; None otherwise.

    Raises:
        ConfigurationError: Values that cannot be, or do not go together; all of them are named.
    """

    hf_ds_config: Any = None
    # Any: numbers, or "auto" where they are not known yet
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
            problems = self._take_config(source, arguments, variables)
        else:
            for name, usual in USUAL.items():
                setattr(self, name, arguments.get(name, variables.get(name, usual)))
            self.hf_ds_config = HfDeepSpeedConfig(configs.config_of(self))
        problems += checks.problems_of_fields(self)
        refuse_config(problems, "Correct them; 'auto' in the configuration takes the value of the plugin")
        self.zero_stage = int(self.zero_stage)
        self.hf_ds_config.set_stage_and_offload()
        self.deepspeed_config: Any = self.hf_ds_config.config
        self.deepspeed_config.setdefault("steps_per_print", math.inf)  # its own reports would go to each log
        self._read_others(variables)

    def _take_config(
        self, source: Any, arguments: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> list[str]:
        """Write arguments and variables into a configuration where it is "auto", and take fields from it."""
        self.hf_ds_config = source if isinstance(source, HfDeepSpeedConfig) else HfDeepSpeedConfig(source)
        config = self.hf_ds_config.config
        checks.straighten(config)
        refuse_config(checks.problems_of_config(config), "Correct the configuration")
        configs.warn_of_typos(config)
        filling = configs.filling_of(arguments, variables)
        configs.add_missing(config, filling.values)
        filling.fill(config)
        if filling.overruled:
            lines = "; ".join(filling.overruled)
            warnings.warn(f"DeepSpeed's configuration counts: {lines}.", stacklevel=4)
        config.setdefault("gradient_accumulation_steps", AUTO)
        for name, key in KEYS.items():
            usual = USUAL[name] if name != "zero_stage" else 0
            setattr(self, name, self.hf_ds_config.get_value(key, usual))
        return filling.mismatches

    def _read_others(self, variables: Mapping[str, Any]) -> None:
        flag = self.zero3_init_flag
        if flag is None:
            flag = variables.get("zero3_init_flag", self.zero_stage == 3)
        self.zero3_init_flag = read_flag("zero3_init_flag", flag)
        if self.zero3_init_flag and self.zero_stage != 3:
            reason = f"ZeRO stage {self.zero_stage} does not shard models"
            warnings.warn(f"zero3_init_flag=True has no effect: {reason}.", stacklevel=4)
            self.zero3_init_flag = False
        names = ("transformer_moe_cls_names", "enable_msamp", "msamp_opt_level")
        fill(self, {"enable_msamp": False, "msamp_opt_level": "O1", **variables}, names)
        if self.enable_msamp:
            self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a value of the configuration is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the configuration by its dotted name, or `default` where there is none."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill a value of the configuration that is "auto", or compare it.

        Args:
            ds_key_long: Its dotted name; nothing happens where there is none.
            mismatches: Gets a line if the value is another one.
            must_match: Whether it must be the same.
            **kwargs: Values by dotted name.

        Raises:
            ConfigurationError: It is "auto", and `kwargs` has no value for it.
        """
        config, key = self.hf_ds_config.find_config_node(ds_key_long)
        if config is None or key not in config:
            return
        filling = Filling(kwargs)
        filling.fill_one(config, key, ds_key_long, must_match)
        filling.check_filled(mismatches)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill all values of the configuration that are "auto", and compare the others.

        Args:
            prefix: Dotted name of the part that is looked at, with a dot at its end; empty for all.
            mismatches: Gets a line for each value that is another one, instead of an error.
            config: That part; None for the whole configuration.
            must_match: Whether values must be the same.
            **kwargs: Values by dotted name; None lets DeepSpeed choose.

        Raises:
            ConfigurationError: Values differ, or are "auto" and given nowhere; with all of them.
        """
        filling = Filling(kwargs)
        filling.fill(self.deepspeed_config if config is None else config, must_match, prefix)
        filling.check_filled(mismatches)
        self.hf_ds_config.set_stage_and_offload()

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let DeepSpeed train in a number format; "no" leaves what the configuration says.

        Args:
            mixed_precision: "no", "fp16", "bf16", or "fp8" (what FP8 layers leave over is bfloat16).

        Raises:
            ConfigurationError: The configuration asks for the other format.
        """
        configs.set_format(self.deepspeed_config, str(plain_value(mixed_precision)).lower())

    def set_deepspeed_weakref(self) -> None:
        """Let transformers know whether models are built in shards."""
        self.dschf = show_to_transformers(self.deepspeed_config, self.is_zero3_init_enabled(), self.dschf)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are built in shards."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Build models in shards inside the block, or whole ones.

        Args:
            enable: Whether they are built in shards; that needs stage 3.
        """
        before = self.is_zero3_init_enabled()
        if enable and not self.hf_ds_config.is_zero3():
            reason = f"models are not sharded by ZeRO stage {self.zero_stage}"
            raise wrong_value("enable", enable, reason, "Use stage 3")
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            with self._sharded_build() if enable else nullcontext():
                yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def _sharded_build(self) -> AbstractContextManager[Any]:
        require("deepspeed", "Building models in shards")
        import deepspeed

        config = configs.config_to_build(self.deepspeed_config)
        return deepspeed.zero.Init(config_dict_or_path=config)  # type: ignore[no-any-return]

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let stage 3 fetch mixture-of-experts layers of a model as a whole, whichever experts are used.

        Args:
            model: Has modules of the classes named by `transformer_moe_cls_names`; nothing without names.

        Raises:
            ConfigurationError: It has no module of one of the classes.
        """
        names = configs.split_names(self.transformer_moe_cls_names)
        if not names:
            return
        classes = find_classes(model, names, "transformer_moe_cls_names")
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, classes)

    @property
    def selected(self) -> bool:
        """Whether this is the plugin in use; chosen by `AcceleratorState().select_deepspeed_plugin(name)`."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        text = "`selected` cannot be assigned. Call `AcceleratorState().select_deepspeed_plugin(name)`"
        raise as_builtin(StateError(f"{text}, which lets the other plugins know."), NotImplementedError)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Use this plugin; called by `AcceleratorState().select_deepspeed_plugin(name)`.

        Args:
            _from_accelerator_state: Whether it was.

        Raises:
            ConfigurationError: It was not, so that another plugin would still be selected.
        """
        if not _from_accelerator_state:
            raise ConfigurationError(
                "A DeepSpeedPlugin cannot select itself. Call "
                "`AcceleratorState().select_deepspeed_plugin(name)`, which lets the other plugins know."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the DeepSpeed plugin in use.

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
