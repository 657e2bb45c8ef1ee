from __future__ import annotations

import json

from accelerate.launch import Machine, Target, as_json, as_text, resolve_plan
from accelerate.settings import FLAG, Layer, merge_layers

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


def test_secrets_are_never_printed() -> None:
    text, machine = explained()
    assert "hush" not in text + machine
    assert json.loads(machine)["settings"]["aws_secret_access_key"]["value"] == "(hidden)"


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
