"""`accelerate estimate-memory`: what a model needs, for inference and for training, and its device map."""

from __future__ import annotations

import argparse
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.base import (
    CustomDtype,
    convert_bytes,
    is_timm_available as is_timm_available,
    is_transformers_available as is_transformers_available,
    wrong_value,
)
from accelerate.commands import estimate_training
from accelerate.commands.model_tensors import (
    Tensors,
    Weight,
    add_timm_hub_prefix as add_timm_hub_prefix,
    check_has_model as check_has_model,
    create_empty_model as create_empty_model,
    read_tensors,
    verify_on_hub as verify_on_hub,
)
from accelerate.commands.utils import entry_point, parser_of
from accelerate.planning import SHARDINGS
from accelerate.settings import CustomArgumentParser as CustomArgumentParser

if TYPE_CHECKING:
    from torch import nn

DESCRIPTION = (
    "Say how much memory a model needs to be held and to be trained, without activations. Where the model has"
    " safetensors files only their headers are read; else transformers or timm builds an empty model."
)
USUAL_DTYPES = ["float32", "float16", "int8", "int4"]
TABLE_WIDTH = 80
BITS_OF = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
DTYPES = tuple(BITS_OF)
TRAINED_IN = ("float32", "float16", "bfloat16")
"""Number formats that models are trained in; the others are for inference."""

FULL = 4  # bytes of a weight, a gradient or an optimizer state in float32


def size_of(weights: Iterable[Weight], dtype: str) -> int:
    """Bytes that tensors take in a number format; indices and packed weights stay as they are."""
    bits = BITS_OF[dtype]
    return sum(math.ceil(w.numel * bits / 8) if w.is_float else w.stored_bytes for w in weights)


def layer_of(name: str) -> str:
    """The part of a model that a tensor belongs to: its block where blocks are numbered, else its module."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: numbered + 1]) if numbered is not None else ".".join(parts[:-1]) or name


def largest_layer(weights: Iterable[Weight], dtype: str) -> tuple[str, int]:
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[layer_of(weight.name)] += size_of([weight], dtype)
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def _per_weight(count: float) -> Callable[[Sequence[Weight]], int]:
    return lambda weights: math.ceil(count * FULL * sum(weight.numel for weight in weights))


def _factored(weights: Sequence[Weight]) -> int:
    """Adafactor: a number for each row and column of a matrix, and for each entry of what is no matrix."""
    matrices = [weight.shape for weight in weights if len(weight.shape) > 1]
    states = sum(math.prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in matrices)
    return FULL * (states + sum(weight.numel for weight in weights if len(weight.shape) < 2))


OPTIMIZERS: dict[str, Callable[[Sequence[Weight]], int]] = {
    "adamw": _per_weight(2),
    "adam": _per_weight(2),
    "adamw8bit": _per_weight(0.5),
    "adafactor": _factored,
    "adagrad": _per_weight(1),
    "lion": _per_weight(1),
    "rmsprop": _per_weight(1),
    "sgd": _per_weight(0),
    "sgd_momentum": _per_weight(1),
}
"""Optimizer -> bytes of its states for these trained tensors."""


def training_bytes(
    weights: Sequence[Weight], dtype: str, optimizer: str, sharding: str, processes: int
) -> dict[str, int] | None:
    """Bytes on each process while a model is trained, by part and in total, without activations.

    ``None`` for a number format that models are not trained in.
    """
    if dtype not in TRAINED_IN:
        return None
    plan = SHARDINGS[sharding]
    trained = [weight for weight in weights if weight.is_float]
    kept_in = dtype if plan.masters else "float32"
    masters = size_of(trained, "float32") if kept_in != "float32" else 0
    states = OPTIMIZERS[optimizer](trained) + masters
    parts = {
        "weights": size_of(weights, kept_in) / (processes if plan.weights else 1),
        "gradients": size_of(trained, kept_in) / (processes if plan.gradients else 1),
        "optimizer": states / (processes if plan.optimizer else 1),
    }
    sizes = {name: math.ceil(size) for name, size in parts.items()}
    # What the forward pass computes with beside the weights that are kept.
    if plan.gathered == "layer":
        sizes["weights"] += largest_layer(weights, dtype)[1]
    elif plan.gathered == "all" or dtype != kept_in:
        sizes["weights"] += size_of(weights, dtype)
    return {**sizes, "total": sum(sizes.values())}


BYTES_OF_MSAMP = {"O1": (4, 1, 8), "O2": (2, 1, 3)}
"""Level of MS-AMP -> bytes of a weight, a gradient and the two moments of Adam."""


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Memory for training with Adam on one process, from the size of the model alone.

    Args:
        bytes: size of the model in float32.
        mixed_precision: "float32", or "float16" or "bfloat16" for mixed precision.
        msamp_config: "O1" or "O2" with MS-AMP.

    Returns:
        Bytes of the "model", the "gradients", the "optimizer", and at the "step" all together; without
        activations. All are -1 for a number format that models are not trained in.

    Raises:
        ConfigurationError: no such level of MS-AMP.
    """
    if mixed_precision not in TRAINED_IN:
        return dict.fromkeys(("model", "gradients", "optimizer", "step"), -1)
    if msamp_config is not None and msamp_config not in BYTES_OF_MSAMP:
        raise wrong_value("msamp_config", msamp_config, "there is no such level", "Use O1 or O2")
    plain = (4 if mixed_precision == "float32" else 6, 4, 8)
    parts = BYTES_OF_MSAMP[msamp_config] if msamp_config else plain
    model, gradients, optimizer = (math.ceil(bytes * part / FULL) for part in parts)
    sizes = {"model": model, "gradients": gradients, "optimizer": optimizer}
    return {**sizes, "step": sum(sizes.values())}


WHOLE = "_Block"
MOST_DIGITS = 6  # of the number of a device
DEVICES = ("mps", "cpu", "disk")


def parse_memory(words: Sequence[str]) -> dict[Any, int] | None:
    """Read limits such as "0=24GB" or "cpu=64GB"; without any, what is free on this machine counts."""
    if not words:
        return None
    from accelerate.big_modeling import get_max_memory

    limits: dict[Any, str] = {}
    for word in words:
        device, equals, size = word.partition("=")
        is_number = device.isdecimal() and len(device) <= MOST_DIGITS
        if not equals or not (is_number or device in DEVICES):
            fix = "write 0=24GB, or cpu=64GB"
            raise wrong_value("--device_map", word, "this is no device with its memory", fix)
        limits[int(device) if is_number else device] = size
    return get_max_memory(limits)


def plan_of(
    weights: Iterable[Weight], dtype: str, memory: Mapping[Any, int] | None
) -> tuple[dict[str, Any], str]:
    """Plan a device map for limits in bytes, None for what is free; return devices by module, and a table."""
    from accelerate.big_modeling import explain_device_map, infer_auto_device_map, plan_memory

    model = _build(weights)
    number_format = CustomDtype.INT4 if dtype == "int4" else dtype
    limits = plan_memory(memory)
    device_map = infer_auto_device_map(model, limits, [WHOLE], number_format)
    return dict(device_map), explain_device_map(model, device_map, limits, number_format)


def _build(weights: Iterable[Weight]) -> nn.Module:
    """Build modules that have the names and sizes of a model's; numbered ones are blocks that stay whole."""
    import torch
    from torch import nn

    class _Plain(nn.Module):
        def forward(self) -> None:
            """Say that it can be called, as modules that are no lists can."""

    class _Block(_Plain):
        pass

    root = _Plain()
    for weight in weights:
        *path, name = weight.name.split(".")
        module: nn.Module = root
        for part, following in zip(path, [*path[1:], ""], strict=True):
            if part not in module._modules:
                kind = nn.ModuleList if following.isdecimal() else _Block if part.isdecimal() else _Plain
                module.add_module(part, kind())
            module = module.get_submodule(part)
        shape = weight.shape if weight.is_float else (weight.stored_bytes,)
        number_format = torch.float32 if weight.is_float else torch.uint8
        tensor = torch.empty(shape, dtype=number_format, device="meta")
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return root


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Estimate a model's sizes.

    Args:
        args: parsed by `estimate_command_parser`.

    Returns:
        For each number format: its name, bytes of the largest layer, bytes of the whole model, and bytes by
        part on each process while it is trained (``None`` for formats that models are not trained in).

    Raises:
        ConfigurationError: there is no such model, or it cannot be read.
    """
    model = read_tensors(args.model_name, args.library_name, args.trust_remote_code)
    return [[dtype, *sizes.values()] for dtype, sizes in _facts(args, model)["dtypes"].items()]


def estimate_command(args: argparse.Namespace) -> None:
    """Print the estimate as a table, or as JSON.

    Args:
        args: parsed by `estimate_command_parser`.

    Raises:
        ConfigurationError: there is no such model, or it cannot be read.
    """
    if getattr(args, "batch_size", None) is not None:
        _print_training(args)
        return
    estimate_training.refuse_without_batch_size(args)
    model = read_tensors(args.model_name, args.library_name, args.trust_remote_code)
    facts = _facts(args, model)
    plans = {}
    if getattr(args, "device_map", None) is not None:
        memory = parse_memory(args.device_map)
        plans = {dtype: plan_of(model.weights, dtype, memory) for dtype in args.dtypes}
    if getattr(args, "json", False):
        maps = {dtype: device_map for dtype, (device_map, _) in plans.items()}
        print(json.dumps({**facts, "device_maps": maps} if plans else facts, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    headers = ["dtype", "largest layer", "total size", f"training with {facts['optimizer']}"]
    rows = [(dtype, *sizes.values()) for dtype, sizes in facts["dtypes"].items()]
    cells = [
        [dtype, convert_bytes(largest), convert_bytes(total), convert_bytes(parts["total"]) if parts else "-"]
        for dtype, largest, total, parts in rows
    ]
    lines = [
        f"Memory for {args.model_name}",
        _table(headers, cells),
        f"{facts['parameters']:,} parameters, {convert_bytes(facts['stored_bytes'])} as stored; known from "
        f"{model.source}.",
        f"The largest layer is {facts['largest_layer']}. Activations come on top.",
    ]
    if facts["num_processes"] > 1:
        processes, sharding = facts["num_processes"], facts["sharding"]
        lines.append(f"Training: on each of {processes} processes, with sharding {sharding}.")
    lines += [f"\nDevice map in {dtype}\n{table}" for dtype, (_, table) in plans.items()]
    for line in lines:
        is_text = isinstance(line, str)
        console.print(line, soft_wrap=is_text, markup=not is_text)


def _print_training(args: argparse.Namespace) -> None:
    planned = estimate_training.plan_training(args)
    if args.json:
        print(json.dumps(estimate_training.json_of(args, *planned), indent=2))
    else:
        print(estimate_training.text_of(args, *planned))


def _facts(args: argparse.Namespace, model: Tensors) -> dict[str, Any]:
    """What is said of a model; a namespace that a program builds may lack the options of training."""
    processes = getattr(args, "num_processes", 1)
    if processes < 1:
        raise wrong_value("--num_processes", processes, "there is at least one process", "Give 1 or more")
    sharding = getattr(args, "sharding", None) or ("full_shard" if processes > 1 else "none")
    optimizer, weights = getattr(args, "optimizer", "adamw"), model.weights
    return {
        "model": args.model_name,
        "source": model.source,
        "parameters": sum(weight.numel for weight in weights if weight.is_float),
        "stored_bytes": sum(weight.stored_bytes for weight in weights),
        "largest_layer": largest_layer(weights, "float32")[0],
        "optimizer": optimizer,
        "sharding": sharding,
        "num_processes": processes,
        "dtypes": {
            dtype: {
                "largest_layer_bytes": largest_layer(weights, dtype)[1],
                "total_bytes": size_of(weights, dtype),
                "training_bytes": training_bytes(weights, dtype, optimizer, sharding, processes),
            }
            for dtype in args.dtypes
        },
    }


def _table(headers: list[str], rows: list[list[str]], **kwargs: Any) -> Any:
    from rich.table import Table

    table = Table(**kwargs)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def create_ascii_table(headers: list[str], rows: list[list[Any]], title: str) -> str:
    """Draw a table with plain characters.

    Args:
        headers: of the columns.
        rows: cells of each row; written with `str`.
        title: above the table.

    Returns:
        The table's lines.
    """
    from rich import box
    from rich.console import Console

    target = io.StringIO()
    console = Console(file=target, width=TABLE_WIDTH, color_system=None)
    console.print(_table(headers, rows, title=title, box=box.ASCII))
    return "\n".join(line.rstrip() for line in target.getvalue().rstrip().splitlines())


@parser_of("estimate-memory", DESCRIPTION, estimate_command)
def estimate_command_parser(parser: CustomArgumentParser) -> None:
    add = parser.add_argument
    add("model_name", help="A name on the Hub, a folder, a .safetensors file or a config.json.")
    add(
        "--library_name",
        choices=["timm", "transformers"],
        metavar="NAME",
        help="Library that builds the empty model: timm or transformers; default: what the Hub says.",
    )
    add(
        "--dtypes",
        nargs="+",
        default=USUAL_DTYPES,
        choices=DTYPES,
        metavar="NAME",
        help=f"Number formats: {', '.join(DTYPES)}.",
    )
    add("--trust_remote_code", action="store_true", help="Allow code that comes with the model to run.")
    add(
        "--device_map",
        nargs="*",
        metavar="DEVICE=SIZE",
        help="Also plan which modules go where, for devices such as 0=24GB 1=24GB cpu=64GB, which need not "
        "be here; without any: for this machine.",
    )
    add("--json", action="store_true", help="Print JSON with exact bytes.")
    training = parser.add_argument_group("Training", "How the model would be trained.")
    training.add_argument(
        "--optimizer",
        default="adamw",
        choices=tuple(OPTIMIZERS),
        metavar="NAME",
        help=f"Optimizer: {', '.join(OPTIMIZERS)}.",
    )
    training.add_argument("--num_processes", type=int, default=1, metavar="N", help="Number of processes.")
    training.add_argument(
        "--sharding",
        choices=tuple(SHARDINGS),
        metavar="NAME",
        help=f"What is split between the processes (DeepSpeed's ZeRO stages, FSDP's strategies): "
        f"{', '.join(SHARDINGS)}; default: full_shard with several processes.",
    )
    estimate_training.add_flags(parser)


main = entry_point(estimate_command_parser, __name__)
