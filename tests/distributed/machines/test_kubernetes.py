"""The manifests of `accelerate launch --manifest`, run in two pods as Kubernetes and operators run them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import yaml

from .conftest import LAUNCH, Ended, Hosts

pytestmark = pytest.mark.slow
TRAIN = """
import os, socket, sys, torch
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward((model(batch) - 1).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
rank = (accelerator.process_index, accelerator.num_processes, accelerator.local_process_index)
words = ("trained", *rank, accelerator.mixed_precision, *sys.argv[1:], *weights, socket.gethostname())
print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # one write: two processes share the output
accelerator.end_training()
"""
SECRETS = {("train-run-key", "key"): "0123456789abcdef" * 4}
IN_EACH_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


class Pod(NamedTuple):
    name: str
    words: list[str]
    variables: dict[str, str]


def pods_of(manifest: str) -> tuple[list[Pod], str]:
    """Both pods of a manifest as Kubernetes starts them, and the domain of their names."""
    *_, job = yaml.safe_load_all(manifest)
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "PyTorchJob":
        return [_pod_of_operator(name, spec, rank) for rank in (0, 1)], "unused"
    prefix, domain = name, name
    if job["kind"] == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        prefix, spec = f"{name}-{replicated['name']}-0", replicated["template"]["spec"]
    else:
        domain = spec["template"]["spec"]["subdomain"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    template = spec["template"]
    indices = ({"JOB_COMPLETION_INDEX": str(index)} for index in (0, 1))
    return [_pod(f"{prefix}-{index}", template, added) for index, added in enumerate(indices)], domain


def _pod_of_operator(job: str, spec: dict[str, Any], rank: int) -> Pod:
    """What the operator of Kubeflow makes of a replica: RANK counts pods, and WORLD_SIZE processes."""
    replicas = spec["pytorchReplicaSpecs"]
    pods = sum(replica["replicas"] for replica in replicas.values())
    template = replicas["Worker" if rank else "Master"]["template"]
    (container,) = template["spec"]["containers"]
    (port,) = (str(each["containerPort"]) for each in container["ports"] if each["name"] == "pytorchjob-port")
    assert container["name"] == "pytorch"
    added = {
        **{f"{prefix}MASTER_ADDR": f"{job}-master-0" for prefix in ("", "PET_")},
        **{f"{prefix}MASTER_PORT": port for prefix in ("", "PET_")},
        "WORLD_SIZE": str(pods * int(spec["nprocPerNode"])),
        "RANK": str(rank),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": str(pods),
        "PYTHONUNBUFFERED": "0",
    }
    return _pod(f"{job}-{'worker-0' if rank else 'master-0'}", template, added)


def _pod(name: str, template: dict[str, Any], added: dict[str, str]) -> Pod:
    (container,) = template["spec"]["containers"]
    variables = {entry["name"]: _value_of(entry) for entry in container["env"]}
    words = [word.replace("$$", "$") for word in container["command"]]
    assert words[:2] == ["accelerate", "launch"]
    return Pod(name, [*LAUNCH, *words[2:]], {**IN_EACH_POD, **variables, **added})


def _value_of(entry: dict[str, Any]) -> str:
    if "value" in entry:
        return str(entry["value"]).replace("$$", "$")
    reference = entry["valueFrom"]["secretKeyRef"]
    return SECRETS[reference["name"], reference["key"]]


def write_manifest(hosts: Hosts, kind: str) -> str:
    config = {"num_machines": 2, "num_processes": 4, "use_cpu": True, "main_process_port": 29613}
    text = yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", **config})
    path = hosts.write("config.yaml", text)
    words = ("--manifest", kind, "--config_file", path, "--mixed_precision", "bf16", "train.py", "$(HOME)")
    ended = hosts.run(0, *LAUNCH, *words)
    assert ended.code == 0, ended
    assert path not in ended.out
    return ended.out


def trained(*ended: Ended) -> list[list[str]]:
    """The output of each rank, by rank, after "trained"."""
    assert [each.code for each in ended] == [0] * len(ended), ended
    lines = [line.split() for each in ended for line in each.out.splitlines()]
    return sorted(line[1:] for line in lines if line[0] == "trained")


def train_on_one_machine(hosts: Hosts) -> list[list[str]]:
    words = ("--cpu", "--num_processes", "4", "--mixed_precision", "bf16", "train.py", "$(HOME)")
    return trained(hosts.run(0, *LAUNCH, "-q", *words))


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "job"])
def test_two_pods_train_as_one_machine_does(hosts: Hosts, kind: str) -> None:
    hosts.write("train.py", TRAIN)
    expected = train_on_one_machine(hosts)
    pods, domain = pods_of(write_manifest(hosts, kind))
    hosts.rename(pods[0].name, pods[1].name, domain)
    hosts.publish()
    (hosts.folder / "config.yaml").unlink()  # pods have no such file
    started = [hosts.start(host, *pods[host].words, **pods[host].variables) for host in (1, 0)]
    found = trained(*(hosts.end(process) for process in started))
    assert [words[:2] for words in found] == [[str(rank), "4"] for rank in range(4)]
    assert [words[2] for words in found] == ["0", "1", "0", "1"]
    assert [words[-1] for words in found] == [pods[0].name] * 2 + [pods[1].name] * 2
    assert [words[3:-1] for words in found] == [words[3:-1] for words in expected]


def test_a_pod_waits_for_the_address_of_pod_0(hosts: Hosts) -> None:
    hosts.write("train.py", TRAIN)
    pods, domain = pods_of(write_manifest(hosts, "job"))
    hosts.rename(pods[0].name, pods[1].name, domain)
    second = hosts.start(1, *pods[1].words, **pods[1].variables)
    assert second.stderr is not None
    said = ""
    while "waits for machine 0" not in said:
        said = second.stderr.readline()
        assert said, "the launcher has ended"
    assert f"{pods[0].name}.{domain}:29613: this name has no address" in said
    hosts.publish()
    first = hosts.start(0, *pods[0].words, **pods[0].variables)
    assert len(trained(hosts.end(second), hosts.end(first))) == 4


def test_variables_of_an_operator_without_those_of_torchrun_are_enough(hosts: Hosts) -> None:
    script = hosts.write("train.py", TRAIN)
    operator = {"WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": "29613"}
    words = (*LAUNCH, "--cpu", "--num_processes", "4", script)
    started = [hosts.start(host, *words, RANK=str(host), **operator) for host in (1, 0)]
    found = trained(*(hosts.end(process) for process in started))
    assert [words[:3] for words in found] == [[str(rank), "4", str(rank % 2)] for rank in range(4)]
    assert [words[-1] for words in found] == ["nodea"] * 2 + ["nodeb"] * 2
