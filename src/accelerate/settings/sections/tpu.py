"""TPU hosts and pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.settings.option import Section, option
from accelerate.settings.sections.launch import HARDWARE


@dataclass(frozen=True, kw_only=True)
class TpuSection(Section):
    """A TPU host, or the hosts of a pod."""

    title = "TPU"

    tpu: bool = option(False, "Run on TPU.", group=HARDWARE, key=None)
    tpu_use_cluster: bool = option(
        False,
        "Start the script on all hosts of a TPU pod.",
        flags=("--tpu_cluster",),
        negations=("--no_tpu_cluster",),
    )
    tpu_use_sudo: bool = option(False, "Run as root on the hosts of the pod.")
    vm: tuple[str, ...] | None = option(
        None, "Hosts of the pod; once for each.", action="append", key="tpu_vm"
    )
    env: tuple[str, ...] | None = option(
        None,
        "Variables (NAME=value) for the hosts of the pod; once for each.",
        action="append",
        key="tpu_env",
    )
    downcast_bf16: bool = option(
        False, "Compute float32 and float64 in bfloat16 on TPU; without it only float32."
    )
    tpu_name: str | None = option(None, "Name of the TPU.", flags=())
    tpu_zone: str | None = option(None, "Zone of the TPU.", flags=())
    command_file: str | None = option(None, "File of commands that set up each host.", flags=())
    commands: tuple[str, ...] | None = option(None, "Commands that set up each host.", flags=())

    @staticmethod
    def active(values: Mapping[str, Any]) -> bool:
        """Only on TPU."""
        return bool(values["tpu"])
