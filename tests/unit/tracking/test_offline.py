"""Each tracker with its real library and without a network; what was logged is read back.

Needs the packages of the trackers, each test its own: wandb, trackio, comet_ml, aim, mlflow, clearml,
dvclive, swanlab and tensorboard.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

# What these libraries warn of, when a test reads their files, is theirs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

# A process of its own: most of these libraries leave threads, servers and variables behind.
SCRIPT = """
    import sys
    import numpy as np
    import torch
    from accelerate import Accelerator

    def main():
        accelerator = Accelerator(cpu=True, log_with="{name}", project_dir="{folder}")
        accelerator.init_trackers("project", config={{"lr": 0.1}}, init_kwargs={{"{name}": {arguments}}})
        for step in range(3):
            accelerator.log({{"loss": torch.tensor(1.0 / (step + 1)), "both": {{"a": 0.5}}}}, step=step)
        tracker = accelerator.get_tracker("{name}")
        # more
        accelerator.end_training()
        print("ended", flush=True)

    if __name__ == "__main__":
        main()
"""
LOSSES = [1.0, 0.5, pytest.approx(1 / 3)]


def log_for_real(
    name: str, folder: Path, arguments: str = "{}", more: str = "pass", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Train three steps that log, in a process of their own."""
    import os

    script = textwrap.dedent(SCRIPT).format(name=name, folder=folder, arguments=arguments)
    script = script.replace("    # more", textwrap.indent(textwrap.dedent(more), " " * 4))
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stdout
    return done


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_for_real(
        "tensorboard",
        tmp_path,
        more='tracker.log_images({"i": np.zeros((1, 3, 4, 4), dtype=np.uint8)}, step=1)',
    )
    events = accumulator.EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == LOSSES
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]
    assert events.Images("i")[0].step == 1


def read_wandb(path: Path) -> list[Any]:
    """Read the records of a run: after a header of 7 bytes, blocks of 32 KiB as LevelDB writes its log."""
    import struct

    from wandb.proto import wandb_internal_pb2

    data, position, content, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            records.append(record)
            content = b""
    return records


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    more = """
        tracker.log_table("table", columns=["x"], data=[[1]], step=2)
        tracker.log_images({"digits": [np.zeros((4, 4), dtype=np.uint8)]}, step=2)
    """
    log_for_real("wandb", tmp_path, more=more, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = read_wandb(path)
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["loss"] for row in rows] == LOSSES
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["table"]["nrows"] == 1 if "table" in rows[-1] else any("table" in key for key in rows[-1])
    assert any("digits" in key for key in rows[-1])
    assert '"lr"' in str(records) or 'key: "lr"' in str(records)


def test_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    import sqlite3

    log_for_real("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "t"))
    (path,) = (tmp_path / "t").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by step")]
        tables = {name for (name,) in database.execute("select name from sqlite_master where type='table'")}
        configurations = (
            [str(row) for row in database.execute("select * from configs")] if "configs" in tables else []
        )
    database.close()
    assert [row["loss"] for row in rows] == LOSSES
    assert any("0.1" in row for row in configurations), tables


def test_comet(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    log_for_real(
        "comet_ml",
        tmp_path,
        arguments='{"online": False}',
        COMET_OFFLINE_DIRECTORY=str(tmp_path),
        COMET_AUTO_LOG_CODE="0",
    )
    (path,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = [metric for metric in metrics if metric["metricName"] == "loss"]
    assert [float(metric["metricValue"]) for metric in losses] == LOSSES
    assert [metric["step"] for metric in losses] == [0, 1, 2]
    assert '"lr"' in json.dumps(messages)


def test_aim(tmp_path: Path) -> None:
    """Read in the process that writes: other ones may see nothing of a run that was just closed."""
    pytest.importorskip("aim")
    more = """
        tracker.log_images({"digits": [np.zeros((4, 4), dtype=np.uint8)]}, step=2)
        tracker.log_images({"one": (np.zeros((4, 4), dtype=np.uint8), "a digit")}, step=2)
        accelerator.log({"note": "warm"}, step=3)
        import json
        from aim.storage.context import Context
        run, none = accelerator.get_tracker("aim", unwrap=True), Context({})
        print("READ", json.dumps({
            "metrics": {metric.name: metric.values.sparse_list()[1] for metric in run.metrics()},
            "hparams": run["hparams"], "name": run.name,
            "images": [run.get_image_sequence(name, none) is not None for name in ("digits", "one", "no")],
            "texts": [run.get_text_sequence(name, none) is not None for name in ("note", "no")],
        }))
    """
    done = log_for_real("aim", tmp_path, more=more)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("READ"))
    found = json.loads(line.removeprefix("READ"))
    assert found["metrics"]["loss"] == LOSSES
    assert found["metrics"]["both/a"] == [0.5] * 3
    assert (found["hparams"], found["name"]) == ({"lr": 0.1}, "project")
    assert found["images"] == [True, True, False]
    assert found["texts"] == [True, False]


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path}/store.db"
    (tmp_path / "file.txt").write_text("x")
    log_for_real(
        "mlflow",
        tmp_path,
        arguments='{"run_name": "r", "tags": {"a": "b"}}',
        more='tracker.log_artifact("file.txt")',
        MLFLOW_TRACKING_URI=store,
    )
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == LOSSES
    assert [metric.step for metric in history] == [0, 1, 2]
    assert run.data.metrics["both/a"] == 0.5
    assert run.data.params == {"lr": "0.1"}
    assert (run.info.run_name, run.data.tags["a"], run.info.status) == ("r", "b", "FINISHED")
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["file.txt"]


def test_clearml(tmp_path: Path) -> None:
    pytest.importorskip("clearml")
    more = """
        tracker.log_table("table", columns=["x"], data=[[1]], step=2)
        tracker.log_images({"digits": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)
    """
    log_for_real(
        "clearml",
        tmp_path,
        arguments='{"auto_connect_frameworks": False, "auto_resource_monitoring": False}',
        more=more,
        CLEARML_OFFLINE_MODE="1",
        CLEARML_CACHE_DIR=str(tmp_path),
    )
    (path,) = tmp_path.rglob("offline*.zip")
    with zipfile.ZipFile(path) as archive:
        events = [
            event
            for line in archive.read("metrics.jsonl").splitlines()
            for event in (json.loads(line) if line.startswith(b"[") else [json.loads(line)])
        ]
        task = archive.read("task.json").decode()
    losses = [event for event in events if event.get("metric") == "loss"]
    assert [event["value"] for event in losses] == LOSSES
    assert [event["iter"] for event in losses] == [0, 1, 2]
    assert {(event["metric"], event["variant"]) for event in events} >= {("both", "a"), ("table", "train")}
    assert "lr" in task


def test_dvclive(tmp_path: Path) -> None:
    pytest.importorskip("dvclive")
    log_for_real("dvclive", tmp_path, arguments='{"save_dvc_exp": False, "dvcyaml": None}')
    folder = tmp_path / "dvclive"
    rows = [line.split("\t") for line in (folder / "plots/metrics/loss.tsv").read_text().splitlines()[1:]]
    assert [(int(step), float(value)) for step, value in rows] == list(enumerate(LOSSES))
    assert "lr: 0.1" in (folder / "params.yaml").read_text()
    assert json.loads((folder / "metrics.json").read_text())["both"] == {"a": 0.5}


def test_swanlab(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    log_for_real(
        "swanlab",
        tmp_path,
        arguments='{"mode": "offline", "logdir": "logs"}',
        more='tracker.log_images({"digits": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)',
    )
    files = {path.name: path for path in (tmp_path / "logs").rglob("*") if path.is_file()}
    # The values are in a format of its own, which nothing but its service reads: only names are looked for.
    (backup,) = (path for name, path in files.items() if name.endswith(".swanlab"))
    assert b"loss" in backup.read_bytes()
    assert "lr" in files["config.yaml"].read_text()
