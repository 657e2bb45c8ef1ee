"""`accelerate estimate-memory`: what a model needs, for inference and for training, without loading it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from accelerate.base import (
    convert_bytes,
    is_timm_available as is_timm_available,
    is_transformers_available as is_transformers_available,
    wrong_value,
)
from accelerate.commands.model_memory import (
    OPTIMIZERS,
    SHARDINGS,
    estimate_training_usage as estimate_training_usage,
    largest_layer,
    parse_memory,
    plan_of,
    size_of,
    training_bytes,
)
from accelerate.commands.model_tensors import (
    Tensors,
    add_timm_hub_prefix as add_timm_hub_prefix,
    check_has_model as check_has_model,
    create_empty_model as create_empty_model,
    read_tensors,
    verify_on_hub as verify_on_hub,
)
from accelerate.commands.utils import entry_point, parser_of
from accelerate.settings import CustomArgumentParser as CustomArgumentParser

DESCRIPTION = (
    "Say how much memory a model needs to be held and to be trained, without activations. Where the model has"
    " safetensors files only their headers are read; else transformers or timm builds an empty model."
)
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
USUAL_DTYPES = ["float32", "float16", "int8", "int4"]
TABLE_WIDTH = 80


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
    return _rows(args, _read(args))


def _read(args: argparse.Namespace) -> Tensors:
    return read_tensors(args.model_name, args.library_name, args.trust_remote_code)


def _rows(args: argparse.Namespace, model: Tensors) -> list[list[Any]]:
    optimizer, sharding, processes = _training(args)
    return [
        [
            dtype,
            largest_layer(model.weights, dtype)[1],
            size_of(model.weights, dtype),
            training_bytes(model.weights, dtype, optimizer, sharding, processes),
        ]
        for dtype in args.dtypes
    ]


def _training(args: argparse.Namespace) -> tuple[str, str, int]:
    """Optimizer, sharding and processes; a namespace that a program builds may lack them."""
    processes = getattr(args, "num_processes", 1)
    if processes < 1:
        raise wrong_value("--num_processes", processes, "there is at least one process", "Give 1 or more")
    sharding = getattr(args, "sharding", None) or ("full_shard" if processes > 1 else "none")
    return getattr(args, "optimizer", "adamw"), sharding, processes


def estimate_command(args: argparse.Namespace) -> None:
    """Print the estimate as a table, or as JSON.

    Args:
        args: parsed by `estimate_command_parser`.

    Raises:
        ConfigurationError: there is no such model, or it cannot be read.
    """
    model = _read(args)
    rows = _rows(args, model)
    facts = _facts(args, model, rows)
    plans = _plans(args, model)
    if getattr(args, "json", False):
        maps = {dtype: device_map for dtype, (device_map, _) in plans.items()}
        print(json.dumps({**facts, "device_maps": maps} if plans else facts, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    headers = ["dtype", "largest layer", "total size", f"training with {facts['optimizer']}"]
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


def _plans(args: argparse.Namespace, model: Tensors) -> dict[str, tuple[dict[str, Any], str]]:
    """Plan a device map for each number format, where one is wanted."""
    if getattr(args, "device_map", None) is None:
        return {}
    memory = parse_memory(args.device_map)
    return {dtype: plan_of(model.weights, dtype, memory) for dtype in args.dtypes}


def _facts(args: argparse.Namespace, model: Tensors, rows: list[list[Any]]) -> dict[str, Any]:
    optimizer, sharding, processes = _training(args)
    return {
        "model": args.model_name,
        "source": model.source,
        "parameters": sum(weight.numel for weight in model.weights if weight.is_float),
        "stored_bytes": sum(weight.stored_bytes for weight in model.weights),
        "largest_layer": largest_layer(model.weights, "float32")[0],
        "optimizer": optimizer,
        "sharding": sharding,
        "num_processes": processes,
        "dtypes": {
            dtype: {"largest_layer_bytes": largest, "total_bytes": total, "training_bytes": training}
            for dtype, largest, total, training in rows
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
    import io

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


main = entry_point(estimate_command_parser)

if __name__ == "__main__":
    main()
