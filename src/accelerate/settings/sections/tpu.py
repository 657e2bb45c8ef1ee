"""TPU hosts and pods."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import Section, option
from accelerate.settings.sections.launch import HARDWARE


@dataclass(frozen=True, kw_only=True)
class TpuSection(Section):
    """A TPU host, or the hosts of a pod."""

    title = "TPU"
    switch = "--tpu"

    tpu: bool = option(False, "Run on TPU.", group=HARDWARE, key=None)
    tpu_use_cluster: bool = option(
        False,
        "Start the script on all hosts of a TPU pod.",
        flags=("--tpu_cluster",),
        negations=("--no_tpu_cluster",),
        ask="Start the script on all hosts of a TPU pod?",
    )
    tpu_use_sudo: bool = option(
        False,
        "Run as root on the hosts of the pod.",
        ask=True,
        when=lambda answers: answers["tpu_use_cluster"],
    )
    vm: tuple[str, ...] | None = option(
        None,
        "Hosts of the pod; once for each.",
        action="append",
        key="tpu_vm",
        ask="Which hosts of the pod (separated by commas, empty for all)?",
        when=lambda answers: answers["tpu_use_cluster"],
    )
    env: tuple[str, ...] | None = option(
        None,
        "Variables (NAME=value) for the hosts of the pod; once for each.",
        action="append",
        key="tpu_env",
        ask="Which variables for the hosts (NAME=value, separated by commas)?",
        when=lambda answers: answers["tpu_use_cluster"],
    )
    downcast_bf16: bool = option(
        False,
        "Compute float32 and float64 in bfloat16 on TPU; without it only float32.",
        ask="Compute float32 and float64 in bfloat16?",
        when=lambda answers: answers["mixed_precision"] == "bf16",
    )
    tpu_name: str | None = option(
        None,
        "Name of the TPU.",
        flags=(),
        ask="What is the name of the TPU?",
        when=lambda answers: answers["tpu_use_cluster"],
    )
    tpu_zone: str | None = option(
        None,
        "Zone of the TPU.",
        flags=(),
        ask="In which zone is the TPU?",
        when=lambda answers: answers["tpu_use_cluster"],
    )
    command_file: str | None = option(
        None,
        "File of commands that set up each host.",
        flags=(),
        ask="File of commands that set up each host (empty for none)?",
        when=lambda answers: answers["tpu_use_cluster"],
    )
    commands: tuple[str, ...] | None = option(
        None,
        "Commands that set up each host.",
        flags=(),
        ask="Commands that set up each host (separated by commas, empty for none)?",
        when=lambda answers: answers["tpu_use_cluster"],
    )
