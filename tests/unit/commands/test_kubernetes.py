"""The manifests of `accelerate launch --manifest`: valid by the published schemas, and complete."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from accelerate.base import ConfigurationError, patch_environment
from accelerate.commands.kubernetes import MANIFESTS
from accelerate.commands.launch import launch_command, launch_command_parser, read_settings
from accelerate.devices import CUDA
from accelerate.launch import LaunchPlan, Machine, Target, resolve_plan

SAMPLES = Path(__file__).parents[2] / "samples" / "kubernetes"
CONFIGS = SAMPLES.parent / "configs"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "kubernetes.md"
KUBERNETES = "1.34"
KINDS = tuple(MANIFESTS)
TWO_PODS = ("--num_machines", "2", "--num_processes", "8")
Find = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def manifest(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Print the manifest for flags and variables."""

    def write(kind: str, *words: str, **variables: str) -> str:
        with patch_environment(**variables):
            launch_command(launch_command_parser().parse_args(["--manifest", kind, *words, "train.py"]))
        return capsys.readouterr().out

    return write


def strictly(schema: Any) -> Any:
    """The same schema, which allows no properties beside those that it lists."""
    if isinstance(schema, list):
        return [strictly(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: strictly(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


@cache
def schema_of(kind: str) -> Draft202012Validator:
    if kind == "JobSet":
        schema = strictly(JobsetV1alpha2JobSet.model_json_schema())
        schema["$defs"]["IoK8sApiBatchV1JobTemplateSpec"] = {"type": "object"}  # checked as a Job
    else:
        schema = strictly(yaml.safe_load((SAMPLES / "pytorchjobs.yaml").read_text()))
    return Draft202012Validator(schema)


def check(written: dict[str, Any]) -> None:
    """Compare one object with the schema of its kind."""
    if written["kind"] not in ("JobSet", "PyTorchJob"):
        kubernetes_validate.validate(written, KUBERNETES, strict=True)
        return
    schema_of(written["kind"]).validate(written)
    if written["kind"] == "JobSet":
        for replicated in written["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "any"}}
            kubernetes_validate.validate({**job, **replicated["template"]}, KUBERNETES, strict=True)
    for template in templates_of(written):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def templates_of(written: dict[str, Any]) -> list[dict[str, Any]]:
    spec = written["spec"]
    if written["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    if written["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    return [spec["template"]]


def container_of(text: str) -> dict[str, Any]:
    """The container of a pod; all pods of a manifest have the same."""
    *_, job = yaml.safe_load_all(text)
    first, *others = (template["spec"]["containers"] for template in templates_of(job))
    assert all(containers == first for containers in others)
    (container,) = first
    return container


def variables_of(text: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container_of(text)["env"] if "value" in entry}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words",
    [
        [*TWO_PODS, "--max_restarts", "3", "--main_process_port", "29511", "--image", "registry/train:1"],
        [*TWO_PODS, "--use_fsdp", "--fsdp_version", "2", "--mixed_precision", "bf16"],
        ["--cpu", "--num_machines", "3"],
        ["--cpu"],
    ],
)
def test_manifests_are_valid(manifest: Callable[..., str], kind: str, words: list[str]) -> None:
    objects = list(yaml.safe_load_all(manifest(kind, *words)))
    assert objects
    for written in objects:
        check(written)


@pytest.mark.parametrize(
    ("kind", "find"),
    [
        ("pytorchjob", lambda job: job),
        ("pytorchjob", lambda job: job["spec"]["runPolicy"]),
        ("pytorchjob", lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"]),
        ("pytorchjob", lambda job: templates_of(job)[0]["spec"]["containers"][0]),
        ("jobset", lambda job: job),
        ("jobset", lambda job: job["spec"]["failurePolicy"]),
        ("jobset", lambda job: job["spec"]["replicatedJobs"][0]),
        ("jobset", lambda job: job["spec"]["replicatedJobs"][0]["template"]["spec"]),
        ("jobset", lambda job: templates_of(job)[0]["spec"]["containers"][0]["volumeMounts"][0]),
        ("job", lambda job: job["spec"]),
        ("job", lambda job: templates_of(job)[0]["spec"]["volumes"][0]["emptyDir"]),
    ],
)
def test_the_schemas_refuse_other_fields(manifest: Callable[..., str], kind: str, find: Find) -> None:
    *_, job = yaml.safe_load_all(manifest(kind, *TWO_PODS))
    check(job)
    wrong = copy.deepcopy(job)
    find(wrong)["unknownField"] = 1
    with pytest.raises(ValidationError):
        check(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_run_the_command_without_the_flags_that_their_variables_replace(
    manifest: Callable[..., str], kind: str
) -> None:
    words = ("--main_process_ip", "10.0.0.1", "--machine_rank", "1", "--max_restarts", "2", "--debug")
    container = container_of(manifest(kind, *TWO_PODS, *words, "--mixed_precision", "bf16"))
    command = ["accelerate", "launch", "--debug", "--mixed_precision=bf16", "train.py"]
    assert sorted(container["command"]) == sorted(command)
    assert container["command"][-1] == "train.py"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert container["image"] == "IMAGE"


def test_a_job_set_sets_what_torchrun_reads(manifest: Callable[..., str]) -> None:
    text = manifest("jobset", *TWO_PODS, "--max_restarts", "2", "--main_process_port", "29511")
    assert variables_of(text) == {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "15",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "train-pods-0-0.train",
        "PET_MASTER_PORT": "29511",
    }
    job = yaml.safe_load(text)
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 2}
    (replicated,) = job["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("pods", 1)
    spec = replicated["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)


def test_the_service_of_a_job_names_its_pods(manifest: Callable[..., str]) -> None:
    text = manifest("job", *TWO_PODS, "--max_restarts", "2")
    service, job = yaml.safe_load_all(text)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "train"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert variables_of(text)["PET_MASTER_ADDR"] == "train-0.train"
    assert job["spec"]["backoffLimit"] == 4
    assert yaml.safe_load(manifest("job", "--cpu"))["kind"] == "Job"


def test_the_operator_of_a_pytorch_job_sets_the_variables(manifest: Callable[..., str]) -> None:
    text = manifest("pytorchjob", *TWO_PODS, "--max_restarts", "2", "--main_process_port", "29511")
    assert variables_of(text) == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "15"}
    assert container_of(text)["name"] == "pytorch"
    assert container_of(text)["ports"] == [{"name": "pytorchjob-port", "containerPort": 29511}]
    spec = yaml.safe_load(text)["spec"]
    assert spec["nprocPerNode"] == "4"
    assert spec["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 5}
    replicas = spec["pytorchReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert {each["restartPolicy"] for each in replicas.values()} == {"OnFailure"}
    alone = yaml.safe_load(manifest("pytorchjob", "--cpu"))["spec"]["pytorchReplicaSpecs"]
    assert {kind: each["restartPolicy"] for kind, each in alone.items()} == {"Master": "Never"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_end_after_their_launcher_and_share_a_key(manifest: Callable[..., str], kind: str) -> None:
    text = manifest(kind, *TWO_PODS, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="100")
    *_, job = yaml.safe_load_all(text)
    assert {each["spec"]["terminationGracePeriodSeconds"] for each in templates_of(job)} == {115}
    assert variables_of(text)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    assert templates_of(job)[0]["spec"]["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    container = container_of(text)
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    keys = [entry for entry in container["env"] if entry["name"] == "ACCELERATE_RUN_KEY"]
    secret = {"secretKeyRef": {"name": "train-run-key", "key": "key"}}
    assert keys == [{"name": "ACCELERATE_RUN_KEY", "valueFrom": secret}]
    assert "kubectl create secret generic train-run-key --from-literal=key=" in text


def test_a_file_becomes_flags_and_variables(manifest: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 4,
        "machine_rank": 0,
        "main_process_ip": "10.0.0.1",
        "gpu_ids": "all",
        "tpu_use_cluster": False,
        "slurm_config": {"slurm": True},
        "fsdp_config": {"fsdp_version": 2, "fsdp_ignored_modules": "head.*"},
    }
    path.write_text(yaml.safe_dump(settings))
    environ = {"OMP_NUM_THREADS": "3", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    text = manifest("jobset", "--config_file", str(path), **environ)
    command = ["accelerate", "launch", "--use_fsdp", "--mixed_precision=bf16", "--fsdp_version=2", "train.py"]
    assert container_of(text)["command"] == command
    found = variables_of(text)
    assert found["FSDP_IGNORED_MODULES"] == "head.*"
    assert found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert "OMP_NUM_THREADS" not in found
    assert "config_file" not in text


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_workers_of_a_pod_have_the_variables_of_a_launch_here(
    manifest: Callable[..., str], config: Path
) -> None:
    words = ("--config_file", str(config), "--num_machines", "2", "--num_processes", "4")
    here = ("--main_process_ip", "any", "--machine_rank", "1", "train.py")
    environ = {"ACCELERATE_HANG_TIMEOUT": "7", "PARALLELISM_CONFIG_CP_SIZE": "4"}
    container = container_of(text := manifest("jobset", *words, **environ))
    started = {**variables_of(text), "JOB_COMPLETION_INDEX": "1"}
    expected = plan_of([*words, *here], environ)
    found = plan_of(container["command"][2:], started)
    assert found.environment == expected.environment
    assert (found.processes, found.machines, found.machine) == (4, 2, 1)
    assert found.rendezvous.max_restarts == 0


def plan_of(words: list[str], environ: dict[str, str]) -> LaunchPlan:
    """The plan of a command line on a machine with two GPUs."""
    with patch_environment(**environ):
        settings = read_settings(launch_command_parser().parse_args(words))
    machine = Machine(CUDA, 2, port_in_use=lambda port: False, environ=environ)
    return resolve_plan(settings, machine, Target("script", "train.py"))[0]


def test_notes_and_needs_are_comments(manifest: Callable[..., str], tmp_path: Path) -> None:
    notes = manifest("job", "--cpu", "--fsdp_version", "2").splitlines()
    assert notes[0] == "# --fsdp_version has no effect without --use_fsdp."
    assert "# The image needs accelerate, train.py." in notes
    assert any("pass --image" in note for note in notes)
    assert "IMAGE" not in manifest("job", "--cpu", "--image", "train:1")
    path = tmp_path / "engine.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    text = manifest("job", "--num_processes", "2", "--use_deepspeed", "--deepspeed_config_file", str(path))
    assert f"# The image needs accelerate, train.py, {path}." in text.splitlines()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("folder/Train_GPT.2.py", "train-gpt-2"),
        ("7b.py", "train-7b"),
        ("_.py", "train"),
        ("x" * 80 + ".py", "x" * 40),
    ],
)
def test_names_are_names_of_services(capsys: pytest.CaptureFixture[str], script: str, name: str) -> None:
    launch_command(launch_command_parser().parse_args(["--manifest", "jobset", "--cpu", script]))
    assert yaml.safe_load(capsys.readouterr().out)["metadata"]["name"] == name


def test_arguments_are_escaped_for_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["$(HOME)", "$$", "ä", "a: b"]
    launch_command(launch_command_parser().parse_args(["--manifest", "job", "--cpu", "train.py", *words]))
    command = container_of(capsys.readouterr().out)["command"]
    assert [word.replace("$$", "$") for word in command[-4:]] == words
    assert command[-4] == "$$(HOME)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"^--num_processes=None: each pod requests one GPU per process"),
        ((*TWO_PODS, "--gpu_ids", "0,1"), r"^--gpu_ids='0,1': these are devices of this machine"),
        (("--processes_per_machine", "4,2"), r"^--processes_per_machine=.*: all pods run the same number"),
        (("--num_machines", "2", "--num_processes", "7"), r"^--num_processes=7: it cannot be divided over 2"),
        (("--num_machines", "0", "--cpu"), r"^--num_machines=0: at least one is needed"),
        ((*TWO_PODS, "--main_process_port", "0"), r"^--main_process_port=0: several machines must agree"),
        (("--mpirun_hostfile", "hosts"), r"^--manifest: pods cannot use the mpi launcher"),
        (("--tpu",), r"^--manifest: pods cannot use the tpu launcher"),
        (("--cpu", "--explain"), r"^--manifest, --explain and --dry_run exclude each other"),
        (("--cpu", "--dry_run"), r"^--manifest, --explain and --dry_run exclude each other"),
        (("--cpu", "--log_dir", "\udce9"), r"YAML holds Unicode text only"),
    ],
)
def test_launchers_that_pods_cannot_run_are_refused(
    manifest: Callable[..., str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        manifest("job", *words)


def test_the_guide_shows_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    command = re.findall(r"^\$ accelerate launch (--manifest .*?) > ", text, re.MULTILINE | re.DOTALL)
    assert len(command) == 1
    launch_command(launch_command_parser().parse_args(shlex.split(command[0].replace("\\\n", ""))))
    assert f"```yaml\n{capsys.readouterr().out}```" in text


def test_an_image_needs_a_manifest() -> None:
    with pytest.raises(ConfigurationError, match="--image requires --manifest"):
        launch_command(launch_command_parser().parse_args(["--image", "a", "--cpu", "train.py"]))


def test_a_manifest_needs_neither_torch_nor_the_script() -> None:
    code = "import sys; from accelerate.commands.launch import main; main(); sys.exit('torch' in sys.modules)"
    words = ["--manifest", "job", "--num_processes", "2", "absent.py"]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "absent.py" in ended.stdout
