"""The mesh over real processes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from accelerate import Accelerator
from accelerate.accelerator.recording import RunSources
from accelerate.base import ConfigurationError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.report.reading import RankTotals


def find_neighbours() -> tuple[dict[str, list[int]], bool]:
    """Return the ranks that share each group with this one, and whether other devices were refused."""
    dist.init_process_group("gloo")
    try:
        config = ParallelismConfig(dp_replicate_size=2, cp_size=2)
        mesh = config.get_device_mesh("cpu")
        assert mesh is not None
        assert config.get_device_mesh() is mesh
        names = ("dp_replicate", "cp", "dp", "dp_shard_cp", "dp_cp")
        # torch wants the meshes of unions kept by their users; scripts of the interface ask for them by name.
        warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
        neighbours = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in names}
        refused = False
        try:
            config.get_device_mesh("cuda")
        except ConfigurationError:
            refused = True
        return neighbours, refused
    finally:
        gc.collect()
        dist.destroy_process_group()


def test_groups_follow_the_axes(run: Callable[..., Any]) -> None:
    results = run(find_neighbours, processes=4)
    assert all(refused for _, refused in results)
    groups = [neighbours for neighbours, _ in results]
    assert [group["cp"] for group in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [group["dp_replicate"] for group in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [group["dp"] for group in groups] == [group["dp_replicate"] for group in groups]
    assert [group["dp_shard_cp"] for group in groups] == [group["cp"] for group in groups]
    assert all(group["dp_cp"] == [0, 1, 2, 3] for group in groups)


def recorded_mesh(sizes: dict[str, int]) -> tuple[dict[str, int], str]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    start = RunSources(accelerator._runtime, {}).start()
    return start.mesh, RankTotals(start.rank, start=start).position


def test_the_record_of_a_run_has_its_mesh(run: Any) -> None:
    sizes = {"dp_replicate": 2, "ep": 2}
    results = run(recorded_mesh, {f"{name}_size": size for name, size in sizes.items()}, processes=4)
    assert [mesh for mesh, _ in results] == [sizes] * 4
    assert [position for _, position in results] == [
        f"ep {rank // 2}, dp_replicate {rank % 2}" for rank in range(4)
    ]
    assert list(results[0][0]) == ["ep", "dp_replicate"]  # the outermost first
    assert run(recorded_mesh, {}, processes=2) == [({}, "")] * 2
