"""The command `accelerate estimate-memory --batch_size`, which plans the memory of a training step.

`estimate.py` adds the flags of this file to its parser and calls `plan_training` if --batch_size is given.
The step is traced on the meta device, so that activations are included.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.base import ConfigurationError, convert_bytes, expanded, shortened, wrong_value
from accelerate.commands.estimate_sizes import OPTIMIZERS
from accelerate.commands.model_tensors import CONFIG_NAME, create_empty_model, verify_on_hub

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accelerate.planning import FittingLayout, Layout, Loss, MemoryPlan, Planner

FACTORY = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
MIXED_PRECISIONS = ("no", "fp16", "bf16")
PARAMETER_DTYPES = ("float32", "bfloat16", "float16")
COMPUTED_OPTIMIZERS = ("adamw8bit", "lion")
"""Optimizers that torch lacks, whose states are computed while the step is traced with SGD."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a training step to the parser of `estimate-memory`."""
    group = parser.add_argument_group(
        "Training step", "With --batch_size a training step is traced, activations included."
    )
    add = group.add_argument
    add("--batch_size", type=int, metavar="N", help="Samples on each device in one forward pass.")
    add("--sequence_length", type=int, metavar="N", help="Tokens of each sample; default: at most 512.")
    add(
        "--mixed_precision",
        default="no",
        choices=MIXED_PRECISIONS,
        metavar="NAME",
        help=f"Mixed precision of the computation: {', '.join(MIXED_PRECISIONS)}.",
    )
    add(
        "--parameter_dtype",
        default="float32",
        choices=PARAMETER_DTYPES,
        metavar="NAME",
        help=f"Dtype of the trained parameters: {', '.join(PARAMETER_DTYPES)}.",
    )
    add("--gradient_checkpointing", action="store_true", help="Recompute activations of blocks in backward.")
    add("--offload_activations", action="store_true", help="Offload the inputs of blocks that recompute.")
    add("--gradient_accumulation_steps", type=int, default=1, metavar="N", help="Passes for each step.")
    add("--tp_size", type=int, default=1, metavar="N", help="Tensor-parallel size.")
    add("--ep_size", type=int, default=1, metavar="N", help="Expert-parallel size.")
    add("--pp_size", type=int, default=1, metavar="N", help="Stages of a pipeline with 8 micro-batches.")
    add("--sp_size", type=int, default=1, metavar="N", help="Ranks that divide each sequence, with Ulysses.")
    add(
        "--offload",
        default="none",
        choices=("none", "optimizer", "all"),
        metavar="NAME",
        help="What is offloaded to the memory of the host: none, optimizer or all.",
    )
    add(
        "--devices",
        metavar="NxSIZE",
        help="Number of devices and memory of each, such as 8x80GB: also print the largest batch that fits, "
        "and layouts that fit.",
    )


def refuse_without_batch_size(args: argparse.Namespace) -> None:
    """Raises an error for flags of a training step without --batch_size."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    defaults = vars(parser.parse_args([]))
    given = [f"--{name}" for name, default in defaults.items() if getattr(args, name, default) != default]
    if given or FACTORY.fullmatch(args.model_name):
        what = ", ".join(given) or "module:function as the model"
        raise ConfigurationError(f"{what} needs a training step: add --batch_size, such as --batch_size 8.")


SIZES = ("tp_size", "ep_size", "pp_size", "sp_size")
"""Flags of the sizes of axes, whose product divides the number of processes."""


def plan_training(
    args: argparse.Namespace,
) -> tuple[tuple[str, str], MemoryPlan, dict[str, Any], list[FittingLayout]]:
    """Returns the memory plan of a training step.

    Returns:
        The class of the model and why it was assumed, the plan of the layout that the flags describe,
        facts about devices, and layouts that fit.
    """
    from accelerate import planning

    for name in ("batch_size", "gradient_accumulation_steps", *SIZES, "num_processes"):
        if getattr(args, name) < 1:
            raise wrong_value(f"--{name}", getattr(args, name), "it is less than 1", "Give 1 or more")
    count, capacity = planning.parse_devices(args.devices) if args.devices else (args.num_processes, 0)
    if args.devices and args.num_processes not in (1, count):
        reason = f"--devices {args.devices} has {count} devices"
        raise wrong_value("--num_processes", args.num_processes, reason, "Leave one of them out")
    model, batch, loss = read_model(args)
    kind, planner = _model_class(model), _planner(args, model, batch, loss)
    layout = _layout(args, count)
    fits = planner.fitting_layouts(layout, count, capacity, args.batch_size) if capacity else []
    chosen = (args.sharding, _axes_size(args) > 1, args.offload != "none", args.gradient_checkpointing)
    if fits and not any(chosen):
        layout = fits[0].layout
    plan = planning.build_plan(planner, layout, args.batch_size * layout.num_microbatches)
    if not capacity:
        return kind, plan, {}, fits
    largest = planner.largest_batch(layout, capacity, plan.batch_size)
    return kind, plan, {"number": count, "bytes": capacity, "largest_batch_size": largest}, fits


def _axes_size(args: argparse.Namespace) -> int:
    """Returns the product of the sizes of all axes that flags set."""
    return prod(getattr(args, name) for name in SIZES)


def _layout(args: argparse.Namespace, count: int) -> Layout:
    from accelerate.planning import Layout

    shards, rest = divmod(count, _axes_size(args))
    if rest:
        flags = " x ".join(f"--{name}" for name in SIZES if getattr(args, name) > 1)
        reason = f"{count} processes cannot be divided by it"
        raise wrong_value(flags, _axes_size(args), reason, "Give a divisor of their number")
    shards *= args.sp_size  # ranks that divide sequences shard the model, too
    return Layout(
        args.sharding or ("full_shard" if shards * args.ep_size > 1 else "none"),
        shards,
        args.tp_size,
        args.offload,
        args.gradient_checkpointing,
        args.gradient_accumulation_steps,
        stages=args.pp_size,
        expert_parallel=args.ep_size,
        sequence_parallel=args.sp_size,
        offload_activations=args.offload_activations,
    )


def _planner(args: argparse.Namespace, model: nn.Module, batch: Any, loss: Loss) -> Planner:
    """Returns the planner of a model.

    Its optimizer updates all parameters at once (`foreach`), as on a device.
    """
    import torch

    from accelerate import planning, strategies
    from accelerate.commands.model_tensors import Weight
    from accelerate.precision import MixedPrecision, Precision

    planning.check_step(model, (), batch)
    model.to(getattr(torch, args.parameter_dtype)).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [Weight("", tuple(parameter.shape), "F32") for parameter in parameters]
    state = OPTIMIZERS[args.optimizer](weights) if args.optimizer in COMPUTED_OPTIMIZERS else 0
    step = planning.Step(
        model,
        [_optimizer(args.optimizer, parameters)],
        batch,
        loss,
        torch.device("cpu"),
        keeps_output=loss in (planning.loss_of, planning.loss_or_mean),
        find_experts=strategies.list_experts,
    )
    autocast = MixedPrecision(args.mixed_precision, "cpu") if args.mixed_precision != "no" else None
    trace = planning.tracer_of(
        step,
        autocast or Precision(),
        autocast,
        strategies.recompute_in_trace,
        share_experts=strategies.trace_share,
    )

    def trace_with_state(variant: planning.Variant) -> planning.Trace:
        return trace(variant).with_state(state)

    return planning.Planner(trace_with_state)


def _optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torch import optim

    builders: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": optim.AdamW,
        "adam": optim.Adam,
        "adafactor": optim.Adafactor,
        "adagrad": optim.Adagrad,
        "rmsprop": optim.RMSprop,
    }
    if name in builders:
        return builders[name](parameters, foreach=True)
    return optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "sgd_momentum" else 0, foreach=True)


def read_model(args: argparse.Namespace) -> tuple[nn.Module, Any, Loss]:
    """Returns a model on the meta device, with a batch and a loss.

    Raises:
        ConfigurationError: The model or the function does not exist, or the model cannot be built.
    """
    from accelerate import planning

    if match := FACTORY.fullmatch(args.model_name):
        return _from_factory(args, match[1], match[2])
    path, library = expanded(args.model_name), args.library_name
    if path.is_dir() and not (path / CONFIG_NAME).is_file():
        reason = f"this folder has no {CONFIG_NAME}, and a training step needs the model"
        raise wrong_value("MODEL", str(path), reason, "Name a folder with one, or module:function")
    if path.is_file() and path.suffix != ".json":
        reason = "a training step needs the model, and this file has weights only"
        raise wrong_value("MODEL", str(path), reason, f"Name its {CONFIG_NAME}, or module:function")
    if not path.exists() and library is None:
        library = verify_on_hub(args.model_name).library_name
    model = create_empty_model(
        str(path) if path.exists() else args.model_name, library or "transformers", args.trust_remote_code
    )
    if library == "timm":
        return model, planning.timm_batch(model, args.batch_size), planning.classification_loss
    batch = planning.batch_for(model, args.batch_size, args.sequence_length)
    return model, batch, planning.loss_or_mean


def _from_factory(args: argparse.Namespace, module: str, name: str) -> tuple[nn.Module, Any, Loss]:
    """Returns the model, the batch and the loss from a function of the user.

    The batch and the loss are optional in the result of the function.
    """
    import torch
    from torch import nn

    from accelerate import planning

    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module), name)
        with torch.device("meta"):
            result = factory()
    except Exception as error:
        reason = f"it cannot be imported and called: {type(error).__name__}: {shortened(str(error))}"
        fix = "Name a function without arguments that returns a model and a batch, as module:function"
        raise wrong_value("MODEL", args.model_name, reason, fix) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    parts = result if isinstance(result, tuple) else (result,)
    if not isinstance(parts[0], nn.Module) or len(parts) > 3:
        reason = f"it returned {type(result).__name__}"
        raise wrong_value("MODEL", args.model_name, reason, "Return model, batch or model, batch, loss")
    if len(parts) == 1 and not hasattr(parts[0], "config"):
        reason = "it returned no batch, and no model of transformers to make one for"
        raise wrong_value("MODEL", args.model_name, reason, "Return model, batch or model, batch, loss")
    model = parts[0]
    batch = parts[1] if len(parts) > 1 else planning.batch_for(model, args.batch_size, args.sequence_length)
    loss = parts[2] if len(parts) > 2 else planning.loss_of if len(parts) > 1 else planning.loss_or_mean
    return model, batch, loss


def _model_class(model: nn.Module) -> tuple[str, str]:
    """Returns the class of a model, and why it is not one that its configuration names, or an empty text."""
    config: Any = getattr(model, "config", None)
    kind, names = type(model).__name__, getattr(config, "architectures", None) or ()
    if not hasattr(config, "architectures") or kind in names:
        return kind, ""
    if not names:
        return kind, "its configuration names no class in architectures"
    return kind, f"the class {' or '.join(names)} in its architectures is not one of transformers"


def format_plan(
    args: argparse.Namespace,
    kind: tuple[str, str],
    plan: MemoryPlan,
    devices: Mapping[str, Any],
    fits: list[FittingLayout],
) -> str:
    """Returns the plan as text, with tables, a bar for the devices, and layouts that fit."""
    from accelerate import planning

    layout, accumulation = plan.layout, plan.layout.accumulation
    count = layout.num_devices
    lines = [
        f"A training step of {args.model_name} with {args.optimizer}, mixed precision "
        f"{args.mixed_precision}, batch size {plan.batch_size}"
        + (f" x {accumulation} passes" if accumulation > 1 else "")
        + (f" in {layout.microbatches} micro-batches" if layout.stages > 1 else ""),
        *([f"Model: {kind[0]}, since {kind[1]}."] if kind[1] else ()),
        f"Layout: {layout.name}, {count} device{'s' * (count > 1)}. Peak of each device:",
        "",
        planning.format_parts(plan.parts),
        "",
    ]
    capacity = devices.get("bytes", plan.peak)
    bar = planning.format_bar(plan.parts, capacity)
    lines.append(f"device 0{f' to {count - 1}, each' if count > 1 else ''}: {bar}")
    host = plan.as_dict()["host_bytes"]
    if host:
        lines.append(f"host, for each process: {convert_bytes(host)}")
    if devices:
        largest = devices["largest_batch_size"]
        fit = f"{largest:,}" if largest else "none"
        more = " or more" if largest >= planning.LARGEST_BATCH else ""
        lines += ["", f"Largest batch on each device that fits in this layout: {fit}{more}."]
        head = f"Layouts that fit {args.devices}, without offload and with the least communication first:"
        none = f"No layout fits {args.devices}. Use a smaller batch, or more or larger devices."
        lines += ["", head, planning.format_layouts(fits)] if fits else ["", none]
    return "\n".join(lines)


def as_json(
    args: argparse.Namespace,
    kind: tuple[str, str],
    plan: MemoryPlan,
    devices: Mapping[str, Any],
    fits: list[FittingLayout],
) -> dict[str, Any]:
    facts = {
        "model": args.model_name,
        "model_class": kind[0],
        "optimizer": args.optimizer,
        "mixed_precision": args.mixed_precision,
        **plan.as_dict(),
    }
    if devices:
        facts["devices"] = dict(devices)
        facts["fitting_layouts"] = [
            {
                "name": fit.layout.name,
                "device_bytes": fit.parts.as_dict()["total"],
                "host_bytes": round(fit.host),
                "sent_bytes_per_sample": round(fit.communication),
            }
            for fit in fits
        ]
    return facts
