"""Kubernetes manifests that run a launch in pods, one for each node, for `accelerate launch --manifest`.

There are three kinds of manifests, PyTorchJob, JobSet and indexed Job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from accelerate.base import ConfigurationError, wrong_value
from accelerate.devices import CPU, CUDA
from accelerate.launch import (
    DEFAULT_PORT,
    GRACE_VARIABLE,
    KEY_VARIABLE,
    Machine,
    Target,
    choose_launcher,
    device_ids,
    grace,
    resolve_plan,
    wrong_option,
)
from accelerate.settings import ENVIRONMENT, FLAG, SECTIONS, Settings, flags
from accelerate.settings.sections import DeepSpeedSection, LaunchSection, RendezvousSection, SlurmSection

REPLACED_OPTIONS = (
    *("num_machines", "num_processes", "processes_per_machine", "machine_rank", "main_process_ip"),
    *("main_process_port", "same_network", "max_restarts", "gpu_ids"),
    *(row.name for row in SlurmSection.options()),  # in a file they have no effect outside of an allocation
)
"""Options that variables of the pods and fields of the manifest replace, or that have no effect in pods."""

IMAGE_PLACEHOLDER = "IMAGE"
"""Name of the image if none is given, which is not a valid name because it has capital letters."""

REPLICAS = "pods"
KILL_TIMEOUT = 15
"""Timeout for a launcher to end after it has killed its processes, in seconds."""
MAX_NAME_LENGTH = 40


@dataclass(frozen=True)
class PodJob:
    """Values that all kinds of manifests use."""

    name: str
    image: str
    command: list[str]
    variables: Mapping[str, str]  # settings without a flag, or from the environment of this machine
    pods: int
    processes: int  # in each pod
    gpus: int  # in each pod
    port: int
    max_restarts: int
    notes: tuple[str, ...]  # notes of the launch plan

    def container(self, host: str | None) -> dict[str, Any]:
        """Returns the container of each pod.

        Args:
            host: Host name of pod 0. None if the operator sets it.
        """
        variables: dict[str, Any] = {**self.variables, GRACE_VARIABLE: grace()}
        if host is not None:
            variables |= {"PET_NNODES": self.pods, "PET_NPROC_PER_NODE": self.processes}
            if self.pods > 1:
                variables |= {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": self.port}
        env: list[Any] = [{"name": name, "value": _escape(str(text))} for name, text in variables.items()]
        if self.pods > 1:
            reference = {"name": f"{self.name}-run-key", "key": "key"}
            env.append({"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
        limits = {"resources": {"limits": {"nvidia.com/gpu": self.gpus}}} if self.gpus else {}
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        # PyTorchJob requires this name of the container.
        base = {"name": "pytorch", "image": self.image, "command": [*map(_escape, self.command)], "env": env}
        return {**base, **limits, "volumeMounts": mounts}

    def pod(self, container: dict[str, Any], **fields: Any) -> dict[str, Any]:
        spec = {
            **fields,
            "terminationGracePeriodSeconds": grace() + KILL_TIMEOUT,
            "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }
        return {"spec": spec}

    def indexed_job(self, host: str, retries: int, **fields: Any) -> dict[str, Any]:
        """Returns the spec of a Job whose pods get their index in `JOB_COMPLETION_INDEX`."""
        return {
            "completionMode": "Indexed",
            "completions": self.pods,
            "parallelism": self.pods,
            "backoffLimit": retries,
            "template": self.pod(self.container(host), restartPolicy="Never", **fields),
        }


def _escape(text: str) -> str:
    """Escapes a text for Kubernetes, which replaces `$(NAME)` by a variable and `$$` by `$`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = "YAML holds Unicode text only"
        raise wrong_value("--manifest", text, reason, "Remove the other bytes") from None
    return text.replace("$", "$$")


def pytorchjob(job: PodJob) -> list[dict[str, Any]]:
    """Returns a PyTorchJob, whose operator sets the `PET_*` variables in each pod."""

    def replica(count: int) -> dict[str, Any]:
        ports = [{"name": "pytorchjob-port", "containerPort": job.port}]
        template = job.pod({**job.container(None), "ports": ports})
        policy = "OnFailure" if job.max_restarts else "Never"
        return {"replicas": count, "restartPolicy": policy, "template": template}

    replicas = {"Master": replica(1), **({"Worker": replica(job.pods - 1)} if job.pods > 1 else {})}
    # The job fails when the total number of restarts of all pods reaches the limit.
    limit = {"backoffLimit": job.max_restarts * job.pods + 1} if job.max_restarts else {}
    run = {"cleanPodPolicy": "Running", **limit}
    spec = {"nprocPerNode": str(job.processes), "runPolicy": run, "pytorchReplicaSpecs": replicas}
    return [_object("kubeflow.org/v1", "PyTorchJob", job.name, spec)]


def jobset(job: PodJob) -> list[dict[str, Any]]:
    """Returns a JobSet of one indexed Job, which replaces all pods if one fails."""
    spec = job.indexed_job(f"{job.name}-{REPLICAS}-0-0.{job.name}", 0)
    replicated = [{"name": REPLICAS, "replicas": 1, "template": {"spec": spec}}]
    rules = {"failurePolicy": {"maxRestarts": job.max_restarts}, "replicatedJobs": replicated}
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job.name, rules)]


def indexed_job(job: PodJob) -> list[dict[str, Any]]:
    """Returns an indexed Job, which replaces a failed pod, and the headless Service for names of its pods."""
    retries = job.max_restarts * job.pods  # each failed pod counts, and one failure makes all pods fail
    if job.pods == 1:
        return [_object("batch/v1", "Job", job.name, job.indexed_job("", retries))]
    # The pods connect to each other before they are ready.
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}}
    spec = job.indexed_job(f"{job.name}-0.{job.name}", retries, subdomain=job.name)
    return [_object("v1", "Service", job.name, names), _object("batch/v1", "Job", job.name, spec)]


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


MANIFESTS = {"pytorchjob": pytorchjob, "jobset": jobset, "job": indexed_job}


def as_manifest(
    kind: str, image: str | None, settings: Settings, target: Target, present: Mapping[str, str]
) -> str:
    """Returns the manifest as YAML, after comments on the requirements of the cluster and the image.

    Args:
        present: Environment of this machine. Its variables for workers are set in the pods.
    """
    import yaml

    job = describe_job(image, settings, target, present)

    files = [target.name] if target.kind == "script" else []
    config_file = settings[DeepSpeedSection].deepspeed_config_file
    files += [config_file] if config_file and settings[LaunchSection].use_deepspeed else []
    notes = [*(f"{note}." for note in job.notes), f"The image needs {', '.join(['accelerate', *files])}."]
    if image is None:
        notes.append(f"Replace {IMAGE_PLACEHOLDER} with the name of the image, or pass --image.")
    if job.pods > 1:
        secret = f"kubectl create secret generic {job.name}-run-key"
        notes.append("Create the key of the run, with which ranks sign what they write to the store:")
        notes.append(f"  {secret} --from-literal=key=$(openssl rand -hex 32)")
    style: Any = {"sort_keys": False, "default_flow_style": None, "allow_unicode": True, "width": 110}
    text: str = yaml.safe_dump_all(MANIFESTS[kind](job), **style)
    return "".join(f"# {line}\n" for note in notes for line in note.splitlines()) + text


def describe_job(image: str | None, settings: Settings, target: Target, present: Mapping[str, str]) -> PodJob:
    """Returns the job of the pods, after the checks of a launch in pod 0.

    All values are passed as flags or variables, so that the pods need no configuration file.
    """
    launch, rendezvous = settings[LaunchSection], settings[RendezvousSection]
    if launcher := choose_launcher(settings, Machine(environ={})):
        raise ConfigurationError(
            f"--manifest: pods cannot use the {launcher} launcher. Leave out what selects it."
        )
    pods, total = launch.num_machines, launch.num_processes
    if launch.processes_per_machine:
        reason = "all pods run the same number of processes"
        raise wrong_option(settings, "processes_per_machine", reason, "Use --num_processes")
    if total is None or total == -1:
        if not launch.cpu:
            fix = "Pass the total over all pods, or --cpu"
            raise wrong_value("--num_processes", total, "each pod requests one GPU per process", fix)
        settings = settings.replaced("manifest", num_processes=(total := pods))
    if device_ids(launch.gpu_ids):
        fix = "Leave it out: each pod gets the GPUs that it requests"
        raise wrong_option(settings, "gpu_ids", "these are devices of this machine", fix)
    name = _job_name(target)
    in_pod = settings.replaced("manifest", machine_rank=0, main_process_ip=name)
    hardware = CPU if launch.cpu else CUDA
    pod = Machine(hardware, max(1, total // max(1, pods)), port_in_use=lambda port: False, environ={})
    plan, _ = resolve_plan(in_pod, pod, target)
    words, variables = _format_settings(settings, present)
    return PodJob(
        name=name,
        image=image or IMAGE_PLACEHOLDER,
        command=["accelerate", "launch", *words, *target.words],
        variables=variables,
        pods=plan.machines,
        processes=plan.local_processes,
        gpus=0 if launch.cpu else plan.local_processes,
        port=rendezvous.main_process_port or DEFAULT_PORT,
        max_restarts=rendezvous.max_restarts,
        notes=plan.notes,
    )


def _format_settings(settings: Settings, present: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns settings as flags and variables.

    Variables are those without a flag, and those from the environment of this machine.
    """
    left_out = {*REPLACED_OPTIONS}
    variables: dict[str, str] = {}
    for section in SECTIONS:
        is_active = section.active(settings.values)
        for row in section.options():
            is_present = settings.source(row.name) == ENVIRONMENT
            if is_present or not is_active or (row.foreign and settings.source(row.name) != FLAG):
                left_out.add(row.name)
            if is_present and not row.foreign:
                names = (*row.variables, *row.aliases)
                variables |= {name: present[name] for name in names if present.get(name)}
            elif is_active and not row.flags and settings.given(row.name):
                text = row.encode(settings.values[row.name])
                variables |= {name: text for name in row.variables if text is not None}
    return flags.words(settings, *left_out), variables


def _job_name(target: Target) -> str:
    """Returns the name of the objects, which is that of the script in the characters valid for a Service."""
    stem = PurePath(target.name).name.removesuffix(".py").lower()
    name = re.sub("[^a-z0-9]+", "-", stem)[:MAX_NAME_LENGTH].strip("-")
    return name if name[:1].isalpha() else f"train-{name}".strip("-")
