"""The command `accelerate merge-weights`, which merges a sharded checkpoint of FSDP into full weights."""

from __future__ import annotations

import argparse

from accelerate.base import attach
from accelerate.commands.utils import Subparsers, entry_point, make_parser
from accelerate.settings import CustomArgumentParser as CustomArgumentParser

__getattr__, __dir__, _ = attach(__name__, {"accelerate.strategies.fsdp": ("merge_fsdp_weights",)})

description = (
    "Merge the shards that FSDP writes with SHARDED_STATE_DICT into whole weights, as safetensors. Reads and "
    "writes a few gigabytes at a time, on the CPU: the model need not fit into memory."
)


def merge_command(args: argparse.Namespace) -> None:
    """Merges a checkpoint and prints the path of the result.

    Args:
        args: Arguments parsed by `merge_command_parser`.

    Raises:
        ConfigurationError: There is no sharded checkpoint, or its removal would remove the result, too.
    """
    from accelerate.strategies.fsdp import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
    print(f"The weights were written to {args.output_path}.")


def merge_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate merge-weights``, added to `subparsers` if given."""
    parser = make_parser("merge-weights", description, merge_command, subparsers)
    add = parser.add_argument
    add("checkpoint_directory", help="Folder with the model's shards.")
    add("output_path", help="Folder for the whole weights; it is created.")
    add("--unsafe_serialization", action="store_true", help="Write with torch.save, not as safetensors.")
    add("--remove_checkpoint_dir", action="store_true", help="Remove the folder with the shards afterwards.")
    return parser


main = entry_point(merge_command_parser, __name__)
