"""FullyShardedDataParallelPlugin: how a model is sharded by FSDP 1 or 2, and which modules become units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from accelerate import torch_private
from accelerate.base import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_STATE_DICT_TYPE,
    ConfigurationError,
    environ,
    plain_value,
    wrong_value,
)
from accelerate.plugins.checks import at_least, fill, one_of, plain_fields
from accelerate.plugins.fsdp_versions import (
    VERSIONS,
    PrefetchName,
    StateDictName,
    StrategyName,
    Takes,
    WrapPolicyName,
    flag_of,
    read_dtype,
    read_member,
    refuse,
    state_dict_configs,
    version_of,
)
from accelerate.settings import read
from accelerate.settings.sections import FsdpSection

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

Policy = Any
"""A callable as torch takes it, or one of torch's policy objects."""

EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""The variable by which libraries that load weights learn that only rank 0 shall."""

_OTHER_NAMES = {
    "fsdp_version": "fsdp_version",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
}
_OPTIONS = {
    _OTHER_NAMES.get(row.name, row.name.removeprefix("fsdp_")): row.name for row in FsdpSection.options()
}
"""Fields that the environment fills -> the option whose variable holds the value."""

_FLAGS = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")


@dataclass
class FullyShardedDataParallelPlugin:
    """How parameters, gradients and optimizer states are sharded between processes.

    What is not given is read from the environment when the object is built (FSDP_ and the option's name in
    capitals, as the launcher sets them). Text is accepted everywhere; afterwards the fields hold torch's
    objects. They are read when a model is prepared, so they may be changed until then.

    Args:
        fsdp_version: 1 (`FullyShardedDataParallel`) or 2 (`fully_shard`); otherwise 1.
        sharding_strategy: FSDP 1: what is sharded, by name or number; otherwise FULL_SHARD.
        reshard_after_forward: FSDP 2: whether parameters are freed between forward and backward, otherwise
            yes. FSDP 1: another name for `sharding_strategy`.
        backward_prefetch: FSDP 1: when the next unit is fetched in backward; otherwise never.
        mixed_precision_policy: number formats of sharded parameters: a format by name, the fields of the
            policy as a dictionary, or torch's object. Without one, that of the run is taken.
        auto_wrap_policy: how a model is cut into units: "transformer_based_wrap", "size_based_wrap",
            "no_wrap", or a torch policy; otherwise the whole model is one unit.
        cpu_offload: whether parameters and gradients stay on the CPU, or torch's object; otherwise no.
        ignored_modules: modules that are not sharded, or a regular expression for their names.
        state_dict_type: how states are saved; otherwise FULL_STATE_DICT with FSDP 1 and SHARDED_STATE_DICT
            with FSDP 2.
        state_dict_config: details of saving models; otherwise what suits the type.
        optim_state_dict_config: details of saving optimizers; otherwise what suits the type.
        limit_all_gathers: FSDP 1: whether fetching waits for memory.
        use_orig_params: FSDP 1: whether the model keeps its own parameters, so that some can be frozen;
            otherwise no.
        param_init_fn: FSDP 1: gives values to the parameters of a module on the meta device.
        sync_module_states: FSDP 1: whether all ranks start from the weights of rank 0; otherwise only with
            `cpu_ram_efficient_loading`.
        forward_prefetch: FSDP 1: whether the next unit is fetched during forward; otherwise no.
        activation_checkpointing: whether units recompute their activations in backward; otherwise no.
        activation_checkpointing_offload: FSDP 2: whether kept activations wait on the CPU; otherwise no.
        cpu_ram_efficient_loading: whether only rank 0 reads weights and sends them to the others; otherwise
            no.
        transformer_cls_names_to_wrap: class names of the layers that become units; otherwise what the model
            says in `_no_split_modules`.
        min_num_params: modules with at least this many parameters become units.

    Raises:
        ConfigurationError: a value that cannot be, or values that do not go together.
    """

    fsdp_version: Takes[Literal[1, 2] | None] = None  # type: ignore[assignment]
    sharding_strategy: Takes[StrategyName | ShardingStrategy | int | None] = None  # type: ignore[assignment]
    reshard_after_forward: Takes[bool | StrategyName | ShardingStrategy | None] = None  # type: ignore[assignment]
    backward_prefetch: Takes[PrefetchName | BackwardPrefetch | None] = None  # type: ignore[assignment]
    mixed_precision_policy: Any = None
    auto_wrap_policy: Takes[WrapPolicyName | Callable[..., Any] | None] = None  # type: ignore[assignment]
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Takes[StateDictName | StateDictType | None] = None  # type: ignore[assignment]
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        options = read(environ.current(), (FsdpSection,))
        variables = {field: options[option] for field, option in _OPTIONS.items() if option in options}
        names = ("fsdp_version", "auto_wrap_policy", "ignored_modules", "cpu_offload")
        fill(self, {"fsdp_version": 1, "cpu_offload": False, **variables}, names)
        number = one_of("fsdp_version", str(self.fsdp_version), ("1", "2"), self.fsdp_version)
        version = VERSIONS[int(number)]
        self.fsdp_version = version.number
        self.auto_wrap_policy = read_policy(self.auto_wrap_policy)
        self._read_units(variables)
        for name in _FLAGS:
            setattr(self, name, flag_of(self, name, variables))
        version.read_fields(self, variables)
        self._check_activation_offload()
        self.set_cpu_offload()
        self.set_state_dict_type(self.state_dict_type)
        if isinstance(self.mixed_precision_policy, dict):
            self.mixed_precision_policy = version.policy_of_mapping(self.mixed_precision_policy)
        elif isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.validate_mixed_precision_policy()
        if self.cpu_ram_efficient_loading:
            environ.assign({EFFICIENT_LOADING: "True"})

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Choose the form in which states are saved, with the details that suit it.

        Args:
            state_dict_type: the form; None takes FSDP_STATE_DICT_TYPE, or that of the version.

        Raises:
            ConfigurationError: there is no such form, or not in this version.
        """
        if state_dict_type is None:
            options = read(environ.current(), (FsdpSection,))
            state_dict_type = options.get("fsdp_state_dict_type", version_of(self).state_dict_type)
        kind = read_member("state_dict_type", state_dict_type, "StateDictType", FSDP_STATE_DICT_TYPE)
        if kind.name == "LOCAL_STATE_DICT" and not version_of(self).has_local_states:
            raise refuse("FSDP 2 has no LOCAL_STATE_DICT", "Choose SHARDED_STATE_DICT or FULL_STATE_DICT")
        self.state_dict_type = kind
        models, optimizers = state_dict_configs(kind.name)
        if not isinstance(self.state_dict_config, type(models)):
            self.state_dict_config = models
        if not isinstance(self.optim_state_dict_config, type(optimizers)):
            self.optim_state_dict_config = optimizers

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind the policy to the model that it cuts into units.

        Args:
            model: the model.

        Raises:
            ConfigurationError: it has no layer of a name in `transformer_cls_names_to_wrap`.
        """
        self.auto_wrap_policy = bind_policy(
            read_policy(self.auto_wrap_policy), model, self.transformer_cls_names_to_wrap, self.min_num_params
        )

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute in a number format; what was chosen before stays unless `override` says otherwise.

        Args:
            mixed_precision: "fp16", "bf16", "fp8" (what FP8 layers leave over is bfloat16), "fp32" or a
                dtype.
            buffer_autocast: whether autocast takes care of buffers, so that they stay float32.
            override: whether a policy that is set already is replaced.

        Raises:
            ConfigurationError: there is no such format.
        """
        import torch

        dtype = read_dtype(mixed_precision)
        buffers = torch.float32 if buffer_autocast else dtype
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = version_of(self).policy_of_dtype(dtype, buffers)

    def validate_mixed_precision_policy(self) -> None:
        """Refuse a policy of the other version.

        Raises:
            ConfigurationError: the policy is not of the class that this version takes.
        """
        version_of(self).check_policy(self.mixed_precision_policy)

    def set_cpu_offload(self) -> None:
        """Turn a yes or no into torch's object for this version.

        Raises:
            ConfigurationError: it is neither, or the object of the other version.
        """
        self.cpu_offload = version_of(self).offload_of(self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Refuse an object of the other version.

        Raises:
            ConfigurationError: the object is not of the class that this version takes.
        """
        version_of(self).offload_of(self.cpu_offload)

    def to_fsdp2(self) -> FullyShardedDataParallelPlugin:
        """Return the plugin with which FSDP 2 trains in the same way; one for FSDP 2 is returned as it is.

        Units, offload, number formats, ignored modules, recomputation and loading are kept. Where FSDP 2 has
        something else in place of the sharding strategy (copies, no shards), a warning says what.
        """
        return version_of(self).to_fsdp2(self, _OPTIONS)

    def _read_units(self, variables: Mapping[str, Any]) -> None:
        name = getattr(self.auto_wrap_policy, "__name__", "")
        layers = self.transformer_cls_names_to_wrap
        if layers is None and name == "transformer_auto_wrap_policy":
            layers = variables.get("transformer_cls_names_to_wrap")
        if isinstance(layers, str):
            layers = [layer.strip() for layer in layers.split(",") if layer.strip()]
        self.transformer_cls_names_to_wrap = layers
        if self.min_num_params is None and name == "size_based_auto_wrap_policy":
            self.min_num_params = variables.get("min_num_params", 0)
        if self.min_num_params is not None:
            at_least("min_num_params", self.min_num_params, 0)

    def _check_activation_offload(self) -> None:
        if not self.activation_checkpointing_offload:
            return
        if not self.activation_checkpointing:
            raise refuse(
                "activation_checkpointing_offload=True says where checkpointed activations wait, and "
                "activation_checkpointing is off",
                "Set activation_checkpointing=True",
            )
        if not version_of(self).offloads_activations:
            raise refuse("activation_checkpointing_offload=True works with FSDP 2 only", "Set fsdp_version=2")


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and the modules inside it; None when there is none.

    Args:
        module: where to look.
        name: of the class, without its module.
    """
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def read_policy(value: Any) -> Policy | None:
    """Return torch's policy for a name in any case; a policy is returned as it is, None for no units."""
    if value is None or callable(value):
        return value
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policies = (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None)
    table = dict(zip(FSDP_AUTO_WRAP_POLICY, policies, strict=True))
    name = str(plain_value(value)).upper()
    if name not in table:
        fix = f"Choose one of {', '.join(table)}, or give a callable"
        raise wrong_value("auto_wrap_policy", value, "it is neither a policy nor the name of one", fix)
    return table[name]


def bind_policy(
    policy: Policy | None, model: nn.Module, layers: Iterable[str] | None, min_params: int | None
) -> Policy | None:
    """Return a policy that is bound to its model; one that is bound already, or the user's own, as it is.

    Without `layers` the model's `_no_split_modules` become units, and without `min_params` there are none.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if policy is transformer_auto_wrap_policy:
        names = layers or getattr(model, "_no_split_modules", None) or ()
        argument = "transformer_cls_names_to_wrap" if layers else ""
        return partial(policy, transformer_layer_cls=set(find_classes(model, names, argument)))
    if policy is size_based_auto_wrap_policy:
        return partial(policy, min_num_params=min_params) if min_params else None
    return policy


def find_classes(model: nn.Module, names: Iterable[str], argument: str = "") -> list[type[nn.Module]]:
    """Return the classes of these names among the modules of a model; where `argument` gives the names, the
    model must have all of them."""
    classes = {name: get_module_class_from_name(model, name) for name in names}
    missing = [name for name, kind in classes.items() if kind is None]
    if argument and missing:
        known = sorted({type(inner).__name__ for inner in model.modules() if any(inner.children())})
        raise ConfigurationError(
            f"{argument} names {', '.join(missing)}, and {type(model).__name__} has no module of that class. "
            f"Name some of {', '.join(known)}."
        )
    return [kind for kind in classes.values() if kind is not None]


def find_units(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """Return the modules inside a model that become units by a policy bound to it, inner ones first.

    The model itself is none of them. The policy is called as torch does: with `module`, `recurse` and
    `nonwrapped_numel`.
    """
    if policy is None:
        return []
    if isinstance(policy, torch_private.Policy):
        chosen = torch_private.run_policy(policy, model)
        return [
            module for module in reversed(list(model.modules())) if module in chosen and module is not model
        ]
    units: list[nn.Module] = []
    _collect_units(model, policy, units, root=True)
    return units


def _collect_units(module: nn.Module, policy: Policy, units: list[nn.Module], root: bool = False) -> int:
    """Add the units inside a module, and then itself; return how many parameters are in units."""
    if module in units:
        return 0
    size = sum(p.numel() for p in module.parameters())
    inside = 0
    if policy(module=module, recurse=True, nonwrapped_numel=size):
        inside = sum(_collect_units(child, policy, units) for child in module.children())
    if root or not policy(module=module, recurse=False, nonwrapped_numel=size - inside):
        return inside
    units.append(module)
    return size
