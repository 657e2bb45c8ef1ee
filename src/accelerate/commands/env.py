"""The command `accelerate env`, which prints versions, devices and configuration as text or JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from accelerate.base import attach, environ, installed_version
from accelerate.commands.utils import (
    DEVICE_PROBES,
    CustomArgumentParser,
    Subparsers,
    entry_point,
    make_parser,
)
from accelerate.settings import (
    SECTIONS,
    default_config_file as default_config_file,
    find_config_file,
    load_config_from_file as load_config_from_file,
)

__getattr__, __dir__, _ = attach(__name__, {"accelerate.devices": DEVICE_PROBES})

DESCRIPTION = "Show versions, devices and configuration, as needed in a bug report."
IMPLEMENTATION = "an independent implementation of the Accelerate interface"
WITH_VALUES = ("ACCELERATE_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "NCCL_")
"""Variables that no option declares, and whose values are no secrets."""
SHOWN_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", *WITH_VALUES)
LIBRARIES = (
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "diffusers",
    "flash-attn",
    "huggingface_hub",
    "lightning",
    "megatron-core",
    "peft",
    "ray",
    "safetensors",
    "sentence-transformers",
    "torchao",
    "torchdata",
    "torchft",
    "torchvision",
    "transformer-engine",
    "transformers",
    "triton",
    "trl",
    "xformers",
)
"""Distributions whose versions are shown where they are installed."""

version = str(installed_version("accelerate"))


def gather_facts(config_file: str | None) -> dict[str, Any]:
    """Returns the facts that `accelerate env` prints, by name.

    Args:
        config_file: Configuration file. ``None`` for the default file, if it exists.
    """
    import numpy
    import psutil
    import torch

    from accelerate.devices import detect

    backend = detect()
    path = find_config_file(config_file)
    module: Any = getattr(torch, backend.name, None)
    has_names = hasattr(module, "get_device_name") and not backend.is_host
    names = [module.get_device_name(index) for index in range(module.device_count())] if has_names else []
    return {
        "accelerate": f"{version} ({IMPLEMENTATION})",
        "accelerate command": shutil.which("accelerate") or "not on PATH",
        "platform": platform.platform(),
        "python": platform.python_version(),
        "python executable": sys.executable,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "libraries": _library_versions(),
        "device": backend.label,
        "devices": backend.count(),
        "device names": names,
        "communication": backend.comm,
        "cpu cores": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "variables": _variables(environ.current()),
        "configuration file": str(path) if path else None,
        "configuration": load_config_from_file(str(path)).to_dict() if path else None,
    }


def _library_versions() -> dict[str, str]:
    """Returns the versions of the installed libraries, without importing them."""
    from importlib import metadata  # slow to import, and needed only here

    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _variables(present: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the run, with the values of those that cannot be secrets."""
    rows = [row for section in SECTIONS for row in section.options() if not row.secret]
    declared = {name for row in rows for name in (*row.variables, *row.aliases)}
    return {
        name: text if name in declared or name.startswith(WITH_VALUES) else "(set)"
        for name, text in sorted(present.items())
        if name.startswith(SHOWN_PREFIXES)
    }


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the facts and returns them.

    Args:
        args: Arguments with ``config_file`` and ``json``.

    Raises:
        ConfigurationError: The configuration file is missing or wrong.
    """
    facts = gather_facts(args.config_file)
    print(json.dumps(facts, indent=2, default=str) if getattr(args, "json", False) else _format(facts))
    return facts


def _format(facts: dict[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines.append(f"- {name}:")
            lines += [f"    {key}: {entry}" for key, entry in value.items()]
        elif isinstance(value, list):
            lines.append(f"- {name}: {', '.join(value) or 'none'}")
        else:
            lines.append(f"- {name}: {'none' if value is None else value}")
    return "\n".join(lines)


def env_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate env``, added to `subparsers` if given."""
    parser = make_parser("env", DESCRIPTION, env_command, subparsers)
    parser.add_argument("--config_file", help="The configuration file to show.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


main = entry_point(env_command_parser, __name__)
