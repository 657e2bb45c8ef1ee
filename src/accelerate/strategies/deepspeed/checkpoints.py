"""Save and load engines: as parts of a checkpoint in DeepSpeed's own files, or as whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.base import MODEL_NAME, CheckpointError, ConfigurationError
from accelerate.checkpointing import Change, Load, Payload, Stage, files_under, number
from accelerate.logging import get_logger
from accelerate.state import Topology
from accelerate.strategies.base import payloads_of_engine

logger = get_logger(__name__)


SHARDS = "*zero_pp_rank_*_optim_states.pt"
"""Files of optimizer states: one for each process that shares them."""

UNIVERSAL = "_universal"
"""What follows the name of an engine's folder for the same in DeepSpeed's universal layout."""


@dataclass(frozen=True)
class EnginePart:
    """Model, optimizer and scheduler of one engine, in a folder of their own, as DeepSpeed lays it out."""

    index: int
    engine: Any
    topology: Topology
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The folder, which DeepSpeed calls a tag."""
        return number(MODEL_NAME, self.index, "")

    def collect(self, leads: bool = True) -> list[Payload]:
        """Let DeepSpeed write its files, on all ranks together; return those that this rank seals."""
        assert self.folder is not None
        if self.engine.zero_nvme_offload_optimizer():
            logger.warning_once(
                "DeepSpeed saves optimizer states on NVMe and does not bring them back: this checkpoint will "
                "not load. Keep them on the CPU (offload_optimizer_device='cpu') in runs that are to go on."
            )
        first = self.index == 0
        before = set(files_under(self.folder))
        self.engine.save_checkpoint(str(self.folder), tag=self.name, save_latest=first)
        own = f"{self.name}/"
        written = [name for name in files_under(self.folder) if name not in before or name.startswith(own)]
        return payloads_of_engine(written, self.topology)

    def read(self, options: Load) -> Change:
        """Return what lets DeepSpeed load its files, on all ranks together."""
        if self.engine.zero_nvme_offload_optimizer():
            raise CheckpointError(
                f"{options.folder / self.name} cannot go on with optimizer states on NVMe, which DeepSpeed "
                "does not bring back: it would step with new ones. Keep them on the CPU "
                "(offload_optimizer_device='cpu') in runs that are to go on; parameters may stay on NVMe."
            )
        if self.engine.load_universal_checkpoint():
            return self._change(options, self._universal(options.folder))
        if not (options.folder / self.name).is_dir():
            raise CheckpointError(
                f"{options.folder} holds no {self.name}, in which DeepSpeed keeps an engine. It was saved "
                "by a run without DeepSpeed, or with fewer models: choose another checkpoint, or load its "
                "weights into the model before `prepare`."
            )
        self._check_shards(options.folder)
        return self._change(options, self.name)

    def _change(self, options: Load, tag: str) -> Change:
        return Change(partial(self._apply, options, tag), f"DeepSpeed's engine ({tag})", stage=Stage.LAST)

    def _universal(self, folder: Path) -> str:
        """Return the tag of the universal checkpoint: beside DeepSpeed's own one, or in its place."""
        tags = (f"{self.name}{UNIVERSAL}", self.name)
        existing = next((tag for tag in tags if (folder / tag / "zero").is_dir()), None)
        if existing is None:
            raise CheckpointError(
                f"{folder} holds no universal checkpoint, which checkpoint.load_universal in DeepSpeed's "
                f"configuration asks for. Make one: {self._conversion(folder)}"
            )
        return existing

    def _conversion(self, folder: Path) -> str:
        path = folder / self.name
        return (
            f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {path} "
            f"--output_folder {path}{UNIVERSAL}"
        )

    def _check_shards(self, folder: Path) -> None:
        """Refuse shards of optimizer states of another number of processes, before anything is loaded."""
        shards = len(list((folder / self.name).glob(SHARDS)))
        if shards in (0, self.topology.size) or self.engine.zero_elastic_checkpoint():
            return
        raise CheckpointError(
            f"{folder / self.name} was saved by {shards} processes, between which ZeRO shares optimizer "
            f"states, and this run has {self.topology.size}. Start {shards}; or turn it into a universal "
            f"checkpoint by `{self._conversion(folder)}`, and set checkpoint.load_universal to true in "
            "DeepSpeed's configuration."
        )

    def _apply(self, options: Load, tag: str) -> None:
        strict = options.model.get("strict", True)
        with options.fitting(tag, "engine"):
            path, _ = self.engine.load_checkpoint(str(options.folder), tag=tag, load_module_strict=strict)
            if path is None:
                raise CheckpointError(f"DeepSpeed found nothing to load in {options.folder / tag}")
        options.confirm()


GATHERS = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def whole_state(engine: Any) -> dict[str, Any]:
    """Return the whole state of an engine's model on the CPU; called on all ranks.

    Args:
        engine: its shards come together on the main process; other processes get nothing then.
    """
    if engine.zero_optimization_partition_weights():
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "The model is sharded (ZeRO stage 3), and DeepSpeed's configuration does not let it "
                f"be gathered. Set zero3_save_16bit_model=True, or {GATHERS} to true there; or save "
                "shards by `save_state`, and join them by the zero_to_fp32.py in the checkpoint."
            )
        return dict(engine._zero3_consolidated_16bit_state_dict() or {})
    if getattr(engine, "autotp_size", int)() > 1:
        return dict(engine._consolidated_16bit_state_dict() or {})
    return copy_tied(engine.module.state_dict())


def copy_tied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with each tensor copied to the CPU; names of one tensor keep sharing one.

    An engine lays parameters side by side in one buffer, of which each would otherwise take the whole.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy_of(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.detach().to("cpu", copy=True)
        return copies[memory]

    return {name: copy_of(tensor) for name, tensor in state.items()}


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """Have whole parameters on each rank inside the block, where forwards need no other rank."""
    shards = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not shards:
        yield
        return
    import deepspeed

    offload: Any = getattr(model.optimizer, "parameter_offload", model.optimizer)
    with deepspeed.zero.GatheredParameters(shards):
        for shard in shards:
            shard.ds_active_sub_modules.clear()  # type: ignore[attr-defined]  # DeepSpeed's
        offload._remove_module_hooks()
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()
