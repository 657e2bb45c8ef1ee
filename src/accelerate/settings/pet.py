"""The PET_* variables, which torchrun reads and operators of Kubernetes set, as launch settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.base import wrong_value
from accelerate.settings.layers import FLAG, Settings, all_options

VARIABLES = {
    "PET_NNODES": "num_machines",
    "PET_NODE_RANK": "machine_rank",
    "PET_MASTER_ADDR": "main_process_ip",
    "PET_MASTER_PORT": "main_process_port",
    "PET_RDZV_BACKEND": "rdzv_backend",
    "PET_RDZV_CONF": "rdzv_conf",
    "PET_MAX_RESTARTS": "max_restarts",
    "PET_MONITOR_INTERVAL": "monitor_interval",
    "PET_ROLE": "role",
    "PET_LOG_DIR": "log_dir",
    "PET_TEE": "tee",
}
"""Variable -> the option of the same meaning. Other PET_* variables reach torch as they are."""

MEETING = ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf")
"""What says nothing about a run that a flag keeps on one machine."""

ENDPOINT = "PET_RDZV_ENDPOINT"
PROCESSES = "PET_NPROC_PER_NODE"
ON_EACH_DEVICE = ("auto", "gpu", "xpu", "hpu", "npu", "mps")
"""Values of `PET_NPROC_PER_NODE` that mean one process on each device of the machine."""


def apply(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Take what torchrun would read, but for what flags say.

    Args:
        settings: merged.
        environ: variables of this process.

    Returns:
        The settings, with the variable as the source of what it gave.

    Raises:
        ConfigurationError: a value has the wrong type, or the number of machines is a range.
    """
    given = [(variable, name, environ.get(variable, "")) for variable, name in VARIABLES.items()]
    alone = settings.source("num_machines") == FLAG and settings.values["num_machines"] == 1
    # The endpoint first: the variables for its two parts are more exact.
    for variable, name, text in (*_endpoint(environ.get(ENDPOINT, "")), *given):
        if text and settings.source(name) != FLAG and not (alone and name in MEETING):
            settings = settings.replaced(variable, **{name: _read(variable, name, text)})
    return _with_processes(settings, environ)


def _endpoint(text: str) -> tuple[tuple[str, str, str], ...]:
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", "")
    return (ENDPOINT, "main_process_ip", host.strip("[]")), (ENDPOINT, "main_process_port", port)


def _read(variable: str, name: str, text: str) -> Any:
    least, _, most = text.partition(":") if variable == "PET_NNODES" else (text, "", "")
    if most and least != most:
        reason = "a number of machines that changes while the run goes on is not supported"
        raise wrong_value(variable, text, reason, f"Set {variable}={most}, or pass --num_machines")
    return all_options()[name].read(least, variable)


def _with_processes(settings: Settings, environ: Mapping[str, str]) -> Settings:
    text = environ.get(PROCESSES)
    if not text or FLAG in (settings.source("num_processes"), settings.source("processes_per_machine")):
        return settings
    if text in ON_EACH_DEVICE:
        return settings.replaced(PROCESSES, num_processes=None)
    count = os.cpu_count() or 1 if text == "cpu" else all_options()["num_processes"].read(text, PROCESSES)
    if count < 1:
        raise wrong_value(PROCESSES, text, "at least one process is needed", "Use 1 or more")
    return settings.replaced(PROCESSES, num_processes=count * settings.values["num_machines"])
