"""Settings and machine give a plan, or one error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError, LaunchError
from accelerate.devices import CPU, CUDA
from accelerate.launch import LaunchPlan, Machine, Target, as_json, as_text, resolve_plan
from accelerate.launch.resolve import check_engine
from accelerate.settings import FLAG, Layer, config_file, merge_layers

SAMPLES = Path(__file__).parents[2] / "samples" / "configs"
FILES = {"hosts": "first\nsecond slots=2\n", "one": "localhost\n"}
TARGET = Target("script", "train.py", ("--lr", "1"))


def machine(
    gpus: int = 0, *, cores: int = 8, busy: tuple[int, ...] = (), environ: Mapping[str, str] = {}
) -> Machine:
    return Machine(
        hardware=CUDA if gpus else CPU,
        devices=max(gpus, 1),
        cores=cores,
        port_in_use=lambda port: port in busy,
        free_port=lambda: 31000,
        environ=environ,
        mpi_version=lambda: "mpirun (Open MPI) 4.1.4",
        read_file=lambda path: FILES[path],
    )


def plan(here: Machine, *, layers: tuple[Layer, ...] = (), **flags: Any) -> LaunchPlan:
    return resolve_plan(merge_layers(*layers, Layer(FLAG, flags)), here, TARGET)[0]


def test_a_machine_without_devices_runs_one_process_with_a_note() -> None:
    made = plan(machine())
    assert (made.launcher, made.processes) == ("local", 1)
    assert made.notes == (
        "assumed 1 process on CPU, mixed_precision=no; flags or `accelerate config` choose otherwise",
    )
    assert "OMP_NUM_THREADS" not in made.environment
    (note,) = plan(machine(environ={"RANK": "1", "WORLD_SIZE": "4"})).notes
    assert note.startswith("assumed 1 process on CPU (rank 1 of WORLD_SIZE=4), ")
    for environ in ({"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}):
        assert "WORLD_SIZE" not in plan(machine(environ=environ)).notes[0]
    (note,) = plan(machine(gpus=2, environ={"RANK": "1", "WORLD_SIZE": "4"})).notes
    assert "WORLD_SIZE" not in note


def test_one_process_with_restarts_runs_under_the_agent() -> None:
    assert plan(machine(), num_processes=1, max_restarts=2).launcher == "elastic"
    assert plan(machine(), num_processes=1, max_restarts=0).launcher == "local"


def test_all_devices_are_used_by_default() -> None:
    made = plan(machine(4))
    assert (made.launcher, made.processes) == ("elastic", 4)
    assert "4 processes on GPU" in made.notes[0]
    assert made.environment["OMP_NUM_THREADS"] == "2"


def test_flags_without_effect_are_named() -> None:
    made = plan(
        machine(4), num_processes=2, fsdp_version=2, fsdp_offload_params=True, gradient_accumulation_steps=4
    )
    assert made.notes == (
        "--gradient_accumulation_steps has no effect without --use_deepspeed",
        "--fsdp_version, --fsdp_offload_params have no effect without --use_fsdp",
    )
    assert plan(machine(4), num_processes=2, use_fsdp=True, fsdp_version=2).notes == ()
    assert plan(machine(4), num_processes=2, fsdp_version=1).notes == ()
    stored = Layer("c.yaml", {"fsdp_version": 2})
    assert plan(machine(4), layers=(stored,), num_processes=2).notes == ()


def test_the_environment_is_the_documented_one() -> None:
    made = plan(machine(), cpu=True, mixed_precision="bf16", num_cpu_threads_per_process=1, debug=True)
    assert made.environment == {
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "True",
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "KMP_BLOCKTIME": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_variables_of_the_user_for_openmp_are_kept() -> None:
    made = plan(machine(environ={"KMP_AFFINITY": "none"}), cpu=True)
    assert "KMP_AFFINITY" not in made.environment
    assert made.environment["KMP_BLOCKTIME"] == "1"


def test_cpu_leaves_devices_alone() -> None:
    made = plan(machine(4), cpu=True, num_processes=2)
    assert (made.launcher, made.processes) == ("elastic", 2)
    assert made.environment["ACCELERATE_USE_CPU"] == "True"


def test_chosen_devices_are_the_visible_ones() -> None:
    made = plan(machine(4), gpu_ids="1,3")
    assert made.processes == 2
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in plan(machine(4), gpu_ids="all").environment


@pytest.mark.parametrize("name", ["use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config"])
def test_methods_that_need_a_group_get_one_with_one_process(name: str) -> None:
    assert plan(machine(1), num_processes=1, **{name: True}).launcher == "elastic"


def test_the_size_of_a_mesh_dimension_enables_the_mesh() -> None:
    name = "ACCELERATE_USE_PARALLELISM_CONFIG"
    made = plan(machine(2), parallelism_config_pp_size=2)
    assert made.environment[name] == "true"
    assert not any("no effect" in note for note in made.notes)
    assert name not in plan(machine(2), parallelism_config_pp_size=1).environment


@pytest.mark.parametrize(("name", "launcher"), [("pdsh", "deepspeed"), ("standard", "elastic")])
def test_the_launcher_of_deepspeed_starts_several_machines(name: str, launcher: str) -> None:
    flags = {"use_deepspeed": True, "num_machines": 2, "num_processes": 2, "main_process_ip": "a"}
    assert plan(machine(), deepspeed_multinode_launcher=name, **flags).launcher == launcher


def test_on_several_machines_the_total_is_assumed_from_this_one() -> None:
    made = plan(machine(4), num_machines=2, main_process_ip="10.0.0.1")
    assert made.processes == 8


def test_a_total_is_never_taken_for_the_count_of_one_machine() -> None:
    made = plan(machine(2), num_processes=4, num_machines=2, machine_rank=1, main_process_ip="10.0.0.1")
    assert made.notes == ("4 processes in total: 2 on each of 2 machines; machine 1 has ranks 2 to 3",)
    with pytest.raises(
        ConfigurationError, match="It is the total: use a multiple of 2, or --processes_per_machine"
    ):
        plan(machine(2), num_processes=3, num_machines=2, main_process_ip="10.0.0.1")


def test_machines_may_differ() -> None:
    made = plan(
        machine(4, cores=8), processes_per_machine=("8", "4"), machine_rank=1, main_process_ip="10.0.0.1"
    )
    assert (made.processes, made.machines, made.local_processes) == (12, 2, 4)
    assert made.notes == ("12 processes in total: 8, 4 on the 2 machines; machine 1 has ranks 8 to 11",)
    assert made.environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"processes_per_machine": ("8", "x")},
            "--processes_per_machine='8,x': these are not numbers of at least 1",
        ),
        ({"processes_per_machine": ("8", "0")}, "these are not numbers of at least 1"),
        (
            {"processes_per_machine": ("2", "1"), "num_processes": 4},
            "that makes 3, and --num_processes says 4",
        ),
        ({"processes_per_machine": ("2", "1"), "num_machines": 3}, "that makes 2, and --num_machines says 3"),
        (
            {"processes_per_machine": ("2", "1"), "mpirun_hostfile": "hosts"},
            "the mpi launcher starts the same",
        ),
        ({"processes_per_machine": ("2", "1"), "machine_rank": 2}, "--machine_rank=2: there are 2 machines"),
    ],
)
def test_shares_that_contradict_the_rest_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(machine(), main_process_ip="10.0.0.1", **flags)
    assert problem in str(caught.value)


def test_a_launcher_that_is_called_once_may_choose_the_port() -> None:
    made = plan(machine(1, busy=(29500,)), mpirun_hostfile="hosts")
    assert made.port == 31000


def test_launchers_that_start_all_machines_run_on_the_first() -> None:
    with pytest.raises(ConfigurationError, match="the mpi launcher starts all machines"):
        plan(machine(), mpirun_hostfile="hosts", machine_rank=1)


def test_slurm_of_a_file_has_no_effect_outside_of_an_allocation() -> None:
    made = plan(machine(), layers=(Layer("c.yaml", {"slurm": True}),), num_processes=1)
    assert made.launcher == "local"
    assert made.notes == ("c.yaml: slurm has no effect outside of an allocation",)


def test_a_busy_port_is_replaced_on_one_machine() -> None:
    made = plan(machine(2, busy=(29500,)), num_processes=2)
    assert made.port == 31000
    assert made.notes == ("port 29500 is in use, 31000 is used instead",)
    assert plan(machine(2), num_processes=2, main_process_port=0).port == 31000


def test_a_busy_port_is_an_error_on_several_machines() -> None:
    flags = {"num_processes": 2, "num_machines": 2, "main_process_ip": "10.0.0.1"}
    with pytest.raises(LaunchError, match="Port 29500 is in use on this machine"):
        plan(machine(1, busy=(29500,)), **flags)
    assert plan(machine(1, busy=(29500,)), machine_rank=1, **flags).port == 29500


@pytest.mark.parametrize(
    ("flags", "gpus", "problem"),
    [
        ({"num_processes": 0}, 0, "--num_processes=0: at least one process is needed"),
        ({"num_processes": 3, "num_machines": 2}, 0, "it cannot be divided over 2 machines"),
        ({"num_processes": 8}, 4, "that is 8 on this machine, which shows 4 devices"),
        ({"num_machines": 0}, 0, "--num_machines=0: at least one is needed"),
        ({"machine_rank": 1, "num_processes": 1}, 0, "--machine_rank=1: there are 1 machines"),
        ({"num_processes": 2, "num_machines": 2}, 0, "several machines need an address for the rendezvous"),
        (
            {"num_processes": 2, "num_machines": 2, "main_process_ip": "a", "main_process_port": 0},
            0,
            "several machines must agree on a port",
        ),
        ({"num_processes": 2, "main_process_port": 70000}, 0, "ports go from 0 to 65535"),
        ({"multi_gpu": True}, 0, "--multi_gpu=True: this machine shows no accelerator. Pass --cpu"),
        ({"gpu_ids": "0"}, 0, "--gpu_ids='0': this machine shows no accelerator"),
        ({"gpu_ids": "0,0"}, 2, "an entry is empty or repeated"),
        ({"gpu_ids": "0,"}, 2, "an entry is empty or repeated"),
        ({"use_fsdp": True, "use_deepspeed": True}, 2, "--use_deepspeed and --use_fsdp exclude each other"),
        ({"num_cpu_threads_per_process": 0}, 0, "at least one thread is needed"),
    ],
)
def test_contradicting_flags_are_refused_with_the_fix(flags: dict[str, Any], gpus: int, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(machine(gpus), **flags)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_distributed_type_no_runs_one_process_unless_a_flag_sets_more() -> None:
    layer = config_file.read_layer(SAMPLES / "single_gpu.yaml", "file")
    assert plan(machine(4), layers=(layer,)).processes == 1
    assert plan(machine(4), layers=(layer,), num_processes=2).processes == 2


def test_an_error_about_a_value_of_a_file_names_the_file() -> None:
    layer = Layer("/home/me/config.yaml", {"num_processes": 8})
    with pytest.raises(ConfigurationError, match="^/home/me/config.yaml: num_processes=8"):
        plan(machine(4), layers=(layer,))


def test_threads_that_the_user_chose_are_kept() -> None:
    made = plan(machine(2, environ={"OMP_NUM_THREADS": "4,2"}), num_processes=2)
    assert "OMP_NUM_THREADS" not in made.environment


def check(hardware: Any = CPU, **flags: Any) -> None:
    check_engine(merge_layers(Layer(FLAG, {"use_deepspeed": True, **flags})), Machine(hardware=hardware))


def written(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_consistent_settings_are_accepted(tmp_path: Path) -> None:
    check()
    check(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/disk")
    check(CUDA, mixed_precision="fp16")
    config = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}}
    check(deepspeed_config_file=written(tmp_path, config), mixed_precision="bf16")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mixed_precision": "fp16"}, "--mixed_precision='fp16': DeepSpeed does not compute in float16"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "stage 3 only"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "needs offload_param_nvme_path"),
        ({"deepspeed_config_file": "missing.json"}, "--deepspeed_config_file='missing.json': there is no"),
    ],
)
def test_flags_that_each_process_would_refuse(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(**flags)


def test_all_problems_of_a_deepspeed_file_are_in_the_error(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "offload_param": "cpu"}, "train_batch_size": "many"}
    with pytest.raises(ConfigurationError, match="offload_param is 'cpu'") as caught:
        check(deepspeed_config_file=written(tmp_path, config))
    assert "train_batch_size is 'many'" in str(caught.value)
    stage = {"zero_optimization": {"stage": 7}}
    with pytest.raises(ConfigurationError, match="zero_stage=7"):
        check(deepspeed_config_file=written(tmp_path, stage))


def test_without_deepspeed_its_file_is_not_read() -> None:
    check_engine(merge_layers(Layer(FLAG, {"deepspeed_config_file": "missing.json"})), Machine())


def test_the_live_view_is_for_processes_that_the_launcher_starts_itself() -> None:
    assert not plan(machine(), monitor=True, num_processes=2).environment.keys() & {"ACCELERATE_MONITOR"}
    made = plan(machine(), monitor=True, mpirun_hostfile="one", num_processes=2)
    assert "--monitor has no effect with the mpi launcher" in made.notes
    assert plan(machine(), monitor=True, num_processes=2).notes == ()


LAYERS = (
    Layer("/home/me/config.yaml", {"mixed_precision": "bf16", "use_fsdp": True}),
    Layer(FLAG, {"num_processes": 2, "aws_secret_access_key": "hush"}),
)


def explained() -> tuple[str, str]:
    plan, settings = resolve_plan(
        merge_layers(*LAYERS),
        Machine(cores=4, port_in_use=lambda port: False),
        Target("script", "my train.py", ("--lr", "1")),
    )
    return as_text(plan, settings), as_json(plan, settings)


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}


def test_every_value_is_shown_with_its_source() -> None:
    text, _ = explained()
    seen = rows(text)
    assert seen["mixed_precision"] == ["bf16", "/home/me/config.yaml"]
    assert seen["num_processes"] == ["2", "flag"]
    assert seen["fsdp_version"] == ["1", "built-in"]
    assert seen["num_cpu_threads_per_process"] == ["2", "chosen", "for", "this", "machine"]
    assert seen["FSDP_VERSION"] == ["1"]


def test_unused_training_methods_are_omitted() -> None:
    text, _ = explained()
    assert "megatron_lm_tp_degree" not in text
    titles = [part.splitlines()[0] for part in text.split("\n\n")]
    assert titles[:2] == ["Notes", "Processes"]
    assert titles[-2:] == ["Environment added", "Command"]
    assert all(titles)


def test_the_mesh_is_shown_with_the_position_of_each_rank() -> None:
    sizes = {"parallelism_config_pp_size": 2, "parallelism_config_tp_size": 2}
    flags = Layer(FLAG, {"num_processes": 4, "use_parallelism_config": True, **sizes})
    machine = Machine(cores=4, port_in_use=lambda port: False)
    text = as_text(*resolve_plan(merge_layers(flags), machine, Target("script", "train.py", ())))
    mesh = next(part for part in text.split("\n\n") if part.startswith("Mesh"))
    assert mesh.splitlines()[1:3] == ["  pp 2 x tp 2", "  rank 0 = pp 0, tp 0"]
    assert mesh.splitlines()[-1] == "  rank 3 = pp 1, tp 1"


def test_values_are_aligned_in_a_column() -> None:
    text, _ = explained()
    section = next(part for part in text.split("\n\n") if "\n  mixed_precision" in part)
    columns = {line.index(line.split()[1]) for line in section.splitlines()[1:] if line.startswith("  ")}
    assert len(columns) == 1
    assert all(line.startswith("  ") and line[2] != " " for line in section.splitlines()[1:])


def test_the_command_can_be_copied() -> None:
    text, _ = explained()
    assert text.splitlines()[-1].startswith("  torchrun --nnodes 1 --nproc_per_node 2")
    assert text.endswith("'my train.py' --lr 1")


def test_json_holds_the_whole_plan() -> None:
    plan = json.loads(explained()[1])
    assert (plan["launcher"], plan["processes"], plan["machines"]) == ("elastic", 2, 1)
    assert plan["environment"]["ACCELERATE_USE_FSDP"] == "true"
    assert plan["command"][0] == "torchrun"
    assert plan["meeting"] == {"backend": "static", "address": "127.0.0.1", "port": 29500}
    assert plan["files"] == {}
    assert set(plan) == {
        *("launcher", "processes", "machines", "machine", "meeting", "command", "files", "environment"),
        *("notes", "settings"),
    }
    assert plan["settings"]["zero_stage"] == {"value": None, "source": "built-in"}
    assert plan["settings"]["aws_secret_access_key"]["value"] == "(hidden)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"parallelism_config_tp_size": 3},
            "--parallelism_config_tp_size=3: the mesh (tp_size=3) has 3 proc",
        ),
        ({"parallelism_config_tp_size": 2, "parallelism_config_pp_size": 2}, "has 4 processes, and --num_pr"),
        ({"use_parallelism_config": True}, "(all sizes are 1) has 1 processes"),
    ],
)
def test_a_mesh_of_another_number_of_processes_is_refused_before_the_launch(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        plan(machine(), num_processes=2, **flags)
    assert message in str(raised.value)


def test_a_mesh_of_all_processes_or_of_a_changing_number_is_planned() -> None:
    sizes = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 2}
    assert plan(machine(), num_processes=4, **sizes).processes == 4
    assert plan(machine(), num_processes=8, replicas=2, **sizes).processes == 8
