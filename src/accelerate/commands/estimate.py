"""The command `accelerate estimate-memory`, which prints the memory of a model and its device map.

The estimate is for inference and for training without activations. With --batch_size, `estimate_training`
plans a training step with activations instead.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.base import (
    CustomDtype,
    convert_bytes,
    is_timm_available as is_timm_available,
    is_transformers_available as is_transformers_available,
    wrong_value,
)
from accelerate.commands import estimate_training
from accelerate.commands.estimate_sizes import (
    DTYPES,
    OPTIMIZERS,
    estimate_training_usage as estimate_training_usage,
    largest_layer,
    size_of,
    training_bytes,
)
from accelerate.commands.model_tensors import (
    ModelTensors,
    Weight,
    add_timm_hub_prefix as add_timm_hub_prefix,
    check_has_model as check_has_model,
    create_empty_model as create_empty_model,
    read_tensors,
    verify_on_hub as verify_on_hub,
)
from accelerate.commands.utils import Subparsers, entry_point, make_parser
from accelerate.planning import SHARDINGS
from accelerate.settings import CustomArgumentParser as CustomArgumentParser

if TYPE_CHECKING:
    from torch import nn

DESCRIPTION = (
    "Estimate how much memory a model needs for inference and for training, without activations. If the model"
    " has safetensors files only their headers are read; else transformers or timm builds an empty model."
)
USUAL_DTYPES = ["float32", "float16", "int8", "int4"]
TABLE_WIDTH = 80


NO_SPLIT_CLASS = "_Block"
MAX_DEVICE_DIGITS = 6
DEVICES = ("mps", "cpu", "disk")


def parse_memory(words: Sequence[str]) -> dict[Any, int] | None:
    """Returns memory limits such as "0=24GB" or "cpu=64GB" in bytes by device.

    Returns None without limits, for the free memory of this machine.
    """
    if not words:
        return None
    from accelerate.big_modeling import get_max_memory

    limits: dict[Any, str] = {}
    for word in words:
        device, equals, size = word.partition("=")
        is_number = device.isdecimal() and len(device) <= MAX_DEVICE_DIGITS
        if not equals or not (is_number or device in DEVICES):
            fix = "write 0=24GB, or cpu=64GB"
            raise wrong_value("--device_map", word, "this is not a device with its memory", fix)
        limits[int(device) if is_number else device] = size
    return get_max_memory(limits)


def plan_device_map(
    weights: Iterable[Weight], dtype: str, memory: Mapping[Any, int] | None
) -> tuple[dict[str, Any], str]:
    """Returns a device map and its table.

    Args:
        memory: Limits in bytes by device. None for the free memory of this machine.
    """
    from accelerate.big_modeling import explain_device_map, infer_auto_device_map, plan_memory

    model = _build_model(weights)
    target_dtype = CustomDtype.INT4 if dtype == "int4" else dtype
    limits = plan_memory(memory)
    device_map = infer_auto_device_map(model, limits, [NO_SPLIT_CLASS], target_dtype)
    return dict(device_map), explain_device_map(model, device_map, limits, target_dtype)


def _build_model(weights: Iterable[Weight]) -> nn.Module:
    """Returns a model on the meta device with these tensors, in which numbered modules are not split."""
    import torch
    from torch import nn

    class _Module(nn.Module):
        def forward(self) -> None:
            """Marks the module as callable, unlike a `ModuleList`."""

    class _Block(_Module):
        pass

    root = _Module()
    for weight in weights:
        *path, name = weight.name.split(".")
        module: nn.Module = root
        for part, child in zip(path, [*path[1:], ""], strict=True):
            if part not in module._modules:
                kind = nn.ModuleList if child.isdecimal() else _Block if part.isdecimal() else _Module
                module.add_module(part, kind())
            module = module.get_submodule(part)
        shape = weight.shape if weight.is_float else (weight.stored_bytes,)
        tensor_dtype = torch.float32 if weight.is_float else torch.uint8
        tensor = torch.empty(shape, dtype=tensor_dtype, device="meta")
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return root


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Returns the sizes of a model in each dtype.

    Args:
        args: Arguments parsed by `estimate_command_parser`.

    Returns:
        For each dtype a list of its name, bytes of the largest layer, bytes of the whole model, and bytes by
        part on each rank during training (``None`` for dtypes in which models are not trained).

    Raises:
        ConfigurationError: The model does not exist, or cannot be read.
    """
    model = read_tensors(args.model_name, args.library_name, args.trust_remote_code)
    return [[dtype, *sizes.values()] for dtype, sizes in _facts(args, model)["dtypes"].items()]


def estimate_command(args: argparse.Namespace) -> None:
    """Prints the estimate as a table or as JSON.

    Args:
        args: Arguments parsed by `estimate_command_parser`.

    Raises:
        ConfigurationError: The model does not exist, or cannot be read.
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
        plans = {dtype: plan_device_map(model.weights, dtype, memory) for dtype in args.dtypes}
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
        f"{facts['parameters']:,} parameters, {convert_bytes(facts['stored_bytes'])} as stored; read from "
        f"{model.source}.",
        f"The largest layer is {facts['largest_layer']}. Activations are not included.",
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
        print(json.dumps(estimate_training.as_json(args, *planned), indent=2))
    else:
        print(estimate_training.format_plan(args, *planned))


def _facts(args: argparse.Namespace, model: ModelTensors) -> dict[str, Any]:
    """Returns the facts about a model that are printed.

    A namespace that was not parsed by `estimate_command_parser` may lack the options of training.
    """
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
    """Returns a table with ASCII characters.

    Args:
        headers: Headers of the columns.
        rows: Cells of each row, which are formatted with `str`.
        title: Title above the table.

    Returns:
        The lines of the table.
    """
    from rich import box
    from rich.console import Console

    target = io.StringIO()
    console = Console(file=target, width=TABLE_WIDTH, color_system=None)
    console.print(_table(headers, rows, title=title, box=box.ASCII))
    return "\n".join(line.rstrip() for line in target.getvalue().rstrip().splitlines())


def estimate_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate estimate-memory``, added to `subparsers` if given."""
    parser = make_parser("estimate-memory", DESCRIPTION, estimate_command, subparsers)
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
        help=f"Dtypes: {', '.join(DTYPES)}.",
    )
    add("--trust_remote_code", action="store_true", help="Allow code that comes with the model to run.")
    add(
        "--device_map",
        nargs="*",
        metavar="DEVICE=SIZE",
        help="Also plan a device map, for devices such as 0=24GB 1=24GB cpu=64GB, which need not exist on "
        "this machine; without any: for this machine.",
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
        help=f"What is sharded across the processes (DeepSpeed's ZeRO stages, FSDP's strategies): "
        f"{', '.join(SHARDINGS)}; default: full_shard with several processes.",
    )
    estimate_training.add_flags(parser)
    return parser


main = entry_point(estimate_command_parser, __name__)
