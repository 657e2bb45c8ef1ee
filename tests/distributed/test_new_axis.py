"""The recipe of CONTRIBUTING.md for a mesh axis changes four files, and no other file knows the axis."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "accelerate"
CONFIG, SECTION = "parallelism_config.py", "settings/sections/strategies.py"
LAYER, TABLE = "strategies/axes/doubling.py", "strategies/composition.py"
ADDED_LINES = {
    CONFIG: {
        '    TP = "tp", Data.COPIES\n': '    XP = "xp", Data.COPIES\n',
        "    ep_handler: ExpertParallelConfig | None = None\n": "    xp_size: int | None = None\n",
    },
    SECTION: {
        '    """Sizes of the dimensions of the device mesh."""\n': (
            '\n    parallelism_config_xp_size: int | None = optional("Processes that double outputs.")\n'
        )
    },
    TABLE: {"LAYERS = (\n": '    Row("axes.doubling.DoublingAxis", "doubles outputs", _has(MeshAxis.XP)),\n'},
}
"""Lines that the recipe adds to files, each after an existing one."""
AXIS = '''"""Axis whose ranks read the same batch, and double outputs."""

from accelerate.strategies.layer import Layer


class DoublingAxis(Layer):
    """Axis that multiplies outputs by its size."""

    def __init__(self, strategy):
        self.size = strategy.context.mesh["xp"].size()

    def transform_model(self, model, micro_batch_size=1):
        model.register_forward_hook(lambda model, inputs, output: output * self.size)
        return model
'''
SCRIPT = """
import json, sys
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.arange(4.0).unsqueeze(1), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = [batch.flatten().tolist() for batch in loader]
outputs = [model(batch).flatten().tolist() for batch in loader]
weights = []
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    weights.append(round(accelerator.unwrap_model(model).weight.item(), 4))
names = list(accelerator.torch_device_mesh.mesh_dim_names)
path = f"{sys.argv[1]}/{accelerator.process_index}.json"
with open(path, "w") as file:
    json.dump({"names": names, "batches": batches, "outputs": outputs, "weights": weights}, file)
accelerator.end_training()
"""


def add_axis(package: Path) -> None:
    """Changes the files of a copy of the package as the recipe says."""
    for name, added in ADDED_LINES.items():
        text = (package / name).read_text(encoding="utf-8")
        for line, following in added.items():
            assert text.count(line) == 1, f"{name} has {line!r} {text.count(line)} times"
            text = text.replace(line, line + following)
        (package / name).write_text(text, encoding="utf-8")
    (package / LAYER).write_text(AXIS, encoding="utf-8")


def test_an_axis_of_the_recipe_trains_on_two_ranks(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "accelerate", ignore=shutil.ignore_patterns("__pycache__"))
    add_axis(tmp_path / "accelerate")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0", "--use_parallelism_config", "--parallelism_config_xp_size", "2"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [*launch, str(script), str(tmp_path)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    batches = [[0.0, 1.0], [2.0, 3.0]]
    outputs, weights = [[0.0, 2.0], [4.0, 6.0]], [0.9, 0.4]
    expected = {"names": ["xp"], "batches": batches, "outputs": outputs, "weights": weights}
    assert ranks == [expected, expected]
