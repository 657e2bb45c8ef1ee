"""Record of the samples, losses, gradients, learning rates and weights of a script on one rank."""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from accelerate import ops, rng, torch_private
from accelerate.base import environ
from accelerate.data_loader import data_groups
from accelerate.nested import ignorant_find_batch_size
from accelerate.recovery import Recovery
from accelerate.state import services
from accelerate.strategies.dtensors import fsdp2_canonicalize_names
from accelerate.verification.batch_norms import find_batch_norms, normalize_in_groups
from accelerate.verification.options import BUFFER, INPUT, RANK_FILE, WEIGHTS_FILE, Options
from accelerate.verification.values import digests, module_of, norm_of_engine, seed_of, settings_of

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer


class Finished(SystemExit):
    """End of the script after the last step that is compared."""


class Recorder:
    """Record of one rank, which ends the script after some optimizer steps.

    Attributes:
        accelerator: The newest `Accelerator` of the script, or None before it.
        rows: Number of rows of the current training batch on this rank, or None.
        num_groups: Number of data-parallel groups of ranks.
        group: The data-parallel group of this rank.
        redirected: Folder in which the script saves, in place of its own.
        micro_batch: Pass, batch and replica group of the current micro-batch, in a run with replica groups.
        is_in_pipeline: Whether the passes of a pipeline run, whose losses are parts of one.
        has_enlarged: Whether batch sizes were multiplied before there was an `Accelerator`.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.accelerator: Any = None
        self._accelerators: list[Any] = []
        self._num_models = 0
        self._known_models: WeakSet[nn.Module] = WeakSet()
        self._models: dict[int, tuple[Any, nn.Module]] = {}  # and their accelerators, until they are freed
        self.rows: int | None = None
        self.num_groups, self.group = 1, 0
        self.num_joined = options.factor
        self._own_groups, self._own_group = 1, 0
        self.redirected = Path(tempfile.mkdtemp(prefix="saved-", dir=options.folder))
        self._file: Any = None
        self._has_begun = self._is_finished = self._has_trained = False
        self._loaders: list[Any] = []
        self._passes: dict[int, int] = {}
        self._indices: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._unused: list[list[Any]] = []  # samples of batches that no backward pass has used yet
        self._samples: list[list[Any]] = []
        self._losses: list[list[float]] = []
        self.scaled: float | None = None  # last result of `Accumulation.scale`, but for pipelines
        self._observed: list[Any] = []
        self._outputs: dict[str, list[list[float]]] = {}
        self._gradients: dict[str, float] = {}
        self._sizes: dict[str, float] = {}  # of gradients, relative to the largest one
        self._norm: float | None = None
        self._rates: list[float] = []
        self._forced_rates: dict[tuple[int, int], list[float]] = {}
        self._replaced: Any = None  # optimizer with the learning rates of the other run
        self.micro_batch: tuple[int, int, int] | None = None
        self._has_stepped = False
        self.is_in_pipeline = self.has_enlarged = False
        torch_private.watch_indices(self._note_indices)
        torch_private.replace_fetch(self._fetch)

    def use(self, accelerator: object) -> None:
        """Records the training with a new `Accelerator`, in addition to others or after them."""
        self.accelerator = accelerator
        if any(optimizer.num_updates for optimizer in self._optimizers()):
            self._accelerators = []  # their training has ended
            self._forget_micro_batches()
        self._accelerators.append(accelerator)

    def write(self, kind: str, **values: Any) -> None:
        """Writes a line to the record of this rank."""
        if self._file is None:
            rank = self.accelerator.process_index
            group = environ.current().get(environ.REPLICA, "0")
            name = RANK_FILE.format(f"{group}-{rank}-{os.getpid()}")
            self._file = open(Path(self.options.folder) / name, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _optimizers(self) -> list[Any]:
        """Returns the prepared optimizers of the current training."""
        return [optimizer for each in self._accelerators for optimizer in each._optimizers]

    def _current_models(self) -> list[Any]:
        """Returns the prepared models of the current training."""
        return [model for each in self._accelerators for model in each._models]

    def _modules(self) -> list[tuple[int, nn.Module]]:
        """Returns the modules of the script in its prepared models, with their numbers."""
        return [(number, module_of(*pair)) for number, pair in self._models.items()]

    # Batches

    def _note_indices(self, iterator: Iterator[Any], indices: Sequence[int]) -> None:
        self._indices.setdefault(iterator, deque()).append(indices)

    def read(self, loader: Iterable[Any], batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of a pass over a prepared loader."""
        self._find_groups()
        number = self._number_of(loader)
        pass_number = self._passes[number] = self._passes.get(number, -1) + 1
        self._requested_by(loader).clear()  # of a persistent iterator, whose pass was left early
        self._seed(number, pass_number, -1)
        for position, batch in enumerate(batches):
            self._begin_batch(loader, number, (pass_number, position), batch)
            yield batch
            self.rows = None

    def _requested_by(self, loader: Any) -> deque[Any]:
        """Returns the indices of the batches that are not yielded yet, or none if they are not known."""
        if self.micro_batch is not None:
            loader = loader.shards[self.micro_batch[2]]
        iterator = getattr(loader, "iterator", None)  # None where another rank reads
        return self._indices.get(iterator, deque()) if iterator is not None else deque()

    def _number_of(self, loader: Iterable[Any]) -> int:
        if not any(loader is known for known in self._loaders):
            self._loaders.append(loader)
        return next(number for number, known in enumerate(self._loaders) if loader is known)

    def _begin_batch(
        self, loader: Iterable[Any], number: int, position: tuple[int, int], batch: object
    ) -> None:
        if self.has_enough_steps:
            self.finish()
            raise Finished(0)
        queue = self._requested_by(loader)
        indices = queue.popleft() if queue else None
        self._has_trained = self._has_trained or self._is_in_training_mode()
        if not self.is_training or not self._current_models():
            return
        self._begin_run()
        self._begin_models()
        self.observe_optimizers()
        if self.micro_batch is not None:
            pass_number, batch_number, replica = self.micro_batch
            position = pass_number, batch_number
            self.group = replica * self._own_groups + self._own_group
        self.rows = ignorant_find_batch_size(batch)
        contents = digests(batch, self.rows)
        names = indices if isinstance(indices, (list, tuple)) else [indices]
        has_indices = None not in names  # those of streams are None
        rows = list(map(str, names)) if has_indices else contents
        self._unused.append([number, *position, has_indices, rows, contents])
        self._seed(number, *position)

    @property
    def is_training(self) -> bool:
        """True if gradients are computed, and a model is in training mode, or none has been in it."""
        return torch.is_grad_enabled() and (self._is_in_training_mode() or not self._has_trained)

    def _is_in_training_mode(self) -> bool:
        return any(model.training for model in self._current_models())

    def _seed(self, *numbers: int) -> None:
        """Sets the random numbers of a batch, which are the same on all ranks and in both runs."""
        rng.set_seed(seed_of(*numbers))

    def _fetch(self, fetcher: Any, indices: Sequence[int], number: int) -> Any:
        """Reads a batch of which each sample has its own random numbers, on any rank and in any worker.

        Those of `collate_fn` are drawn for the batch of all ranks.
        """
        samples = []
        for index in indices:
            with torch_private.seeded(seed_of("sample", index)):
                samples.append(torch_private.read_sample(fetcher, index))
        rows, self.rows = self.rows, len(samples)
        try:
            with torch_private.seeded(seed_of("batch", number)):
                return fetcher.collate_fn(samples)
        finally:
            self.rows = rows

    # Steps

    def _begin_run(self) -> None:
        """Writes a description of the run, before the first step."""
        if self._has_begun:
            return
        self._has_begun = True
        accelerator = self.accelerator
        size, rank = accelerator.num_processes, accelerator.process_index
        replicas, replica = self._find_groups()
        self.write(
            "run",
            rank=replica * size + rank,
            size=replicas * size,
            replicas=replicas,
            group=self.group,
            num_groups=self.num_groups,
            divides_sequences=any(layer.splits_buffers for layer in accelerator._runtime.strategy.layers),
            precision=str(accelerator.mixed_precision),
            label=str(accelerator.distributed_type.value),
        )
        if self.options.initial:
            # Other learning rates are reported, and must not lead to further differences.
            for path in sorted(Path(self.options.initial).glob(RANK_FILE.format("0-0-*"))):
                for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                    if line["kind"] == "step":
                        self._forced_rates[line["optimizer"], line["step"]] = line["rates"]

    def _find_groups(self) -> tuple[int, int]:
        """Sets the data-parallel group of this rank, and returns the number of replica groups and its own."""
        accelerator, recovery = self.accelerator, services.find(Recovery)
        size, rank = accelerator.num_processes, accelerator.process_index
        mesh = accelerator._runtime.strategy.loader_mesh
        self._own_groups, self._own_group = data_groups(mesh, size, rank)
        replicas, replica = (1, 0) if recovery is None else (recovery.num_replicas, recovery.replica)
        self.num_groups = replicas * self._own_groups
        self.group = replica * self._own_groups + self._own_group
        return replicas, replica

    def _begin_models(self) -> None:
        """Writes the weights of models before their first step."""
        for accelerator in self._accelerators:
            for model in accelerator._models:
                if model not in self._known_models:
                    number = self._num_models
                    self._num_models += 1
                    self._known_models.add(model)
                    self._models[number] = accelerator, model
                    self._begin_model(number)

    def _begin_model(self, number: int) -> None:
        module = module_of(*self._models[number])
        self.write("model", batch_norms=list(find_batch_norms(module)))
        self._write_weights("before", number)
        if self.options.initial:
            self._load_initial(number, module)
        if self.options.is_reference:
            normalize_in_groups(module, self.options.factor)
        if self.options.traced_step:
            self._trace(number, module)

    def _load_initial(self, number: int, module: nn.Module) -> None:
        """Takes the initial weights of the other run, in a run on one process."""
        from safetensors.torch import load_file

        path = Path(self.options.initial) / WEIGHTS_FILE.format("before", number)
        if path.exists():
            module.load_state_dict(load_file(path), strict=False)

    def observe_optimizers(self) -> None:
        """Observes the steps of all prepared optimizers."""
        for optimizer in self._optimizers():
            if not any(optimizer is known for known in self._observed):
                self._observed.append(optimizer)
                optimizer.observers = (*optimizer.observers, self)

    def use_batches(self) -> None:
        """Counts the batches that were read since the last backward pass for the current step."""
        self._samples += self._unused
        self._unused = []

    def begin_backward(self) -> None:
        """Begins a backward pass, or the forward and backward passes of a pipeline.

        It ends a script that reads no batch of a prepared loader.
        """
        if not self._loaders and self._observed and all(map(self._is_done, self._observed)):
            self.finish()
            raise Finished(0)
        self.observe_optimizers()
        # The step was skipped or is repeated by replica groups, or the script has cleared the gradients.
        if self._has_stepped or (self._losses and self._were_cleared()):
            self._losses, self._samples, self._has_stepped = [], [], False
        self.use_batches()
        self.scaled = None

    def _were_cleared(self) -> bool:
        """Returns whether no gradient of earlier backward passes is left."""
        optimizers, strategy = self._optimizers(), self.accelerator._runtime.strategy
        is_unknown = not strategy.holds_gradients or any(
            optimizer.steps_in_backward or optimizer.held is not None for optimizer in optimizers
        )
        if is_unknown or any(map(torch_private.unreduced_gradients, self._current_models())):
            return False
        gradients = (p.grad for optimizer in optimizers for p in optimizer.parameters())
        return not any(g is not None and bool(ops.local_tensor(g).any()) for g in gradients)

    def end_backward(self, loss: float, items: float | None, factor: float) -> None:
        """Records the loss of a backward pass.

        Args:
            loss: The loss that the script passed.
            items: Number of items over which it is a sum, or None.
            factor: Its weight, where `Accumulation.scale` was not called for it.
        """
        scaled = loss * factor if self.scaled is None else self.scaled
        self._losses.append([scaled, -1.0] if items is None else [loss, items])

    def before_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Measures the gradients of a step."""
        self._begin_run()
        self._begin_models()
        self.use_batches()
        self._has_stepped = True
        self._note_sizes(optimizer)
        accelerator = self._owner_of(optimizer)
        norm = None
        if accelerator._runtime.strategy.holds_gradients and not optimizer.steps_in_backward:
            norm = float(accelerator.clip_grad_norm_(list(optimizer.parameters()), float("inf")))
        self._norm = norm
        if (
            self._is_traced()
            and optimizer is self._observed[self.options.traced_optimizer]
            and norm is not None
        ):
            self._trace_gradients(optimizer)
        self._restore_rates()
        self._rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if forced := self._forced_rates.get((self._observed.index(optimizer), optimizer.num_updates + 1)):
            self._replaced = optimizer
            for group, rate in zip(optimizer.param_groups, forced, strict=False):
                group["lr"] = rate

    def _note_sizes(self, optimizer: AcceleratedOptimizer) -> None:
        """Keeps how large the gradient of each parameter is, relative to the largest one of the step."""
        own, sizes = set(map(id, optimizer.parameters())), dict[str, float]()
        for number, model in self._modules():
            for name, parameter in model.named_parameters():
                if id(parameter) in own and parameter.grad is not None and not parameter.grad.is_sparse:
                    gradient = ops.local_tensor(parameter.grad)
                    if gradient.numel():
                        sizes[f"{number}:{name}"] = float(gradient.double().square().mean().sqrt())
        largest = max(sizes.values(), default=0.0)
        for name, size in sizes.items() if largest else ():
            self._sizes[name] = max(self._sizes.get(name, 0.0), size / largest)

    def _restore_rates(self) -> None:
        """Restores the learning rates that the step before has replaced, from which schedulers continue."""
        if self._replaced is not None:
            for group, rate in zip(self._replaced.param_groups, self._rates, strict=False):
                group["lr"] = rate
            self._replaced = None

    def after_update(self, optimizer: AcceleratedOptimizer) -> None:
        """Writes the record of a step."""
        self._restore_rates()
        strategy = self._owner_of(optimizer)._runtime.strategy
        if not strategy.holds_gradients:
            self._norm = norm_of_engine(strategy, optimizer)
        recovery = services.find(Recovery)
        self.write(
            "step",
            optimizer=self._observed.index(optimizer),
            step=optimizer.num_updates,
            losses=self._losses,
            norm=self._norm,
            rates=self._rates,
            settings=[settings_of(group) for group in optimizer.param_groups],
            positions=self._positions(optimizer),
            members=1 if recovery is None or recovery.members is None else recovery.members.size,
            samples=self._samples,
        )
        self._losses, self._samples, self._has_stepped = [], [], False

    @property
    def has_enough_steps(self) -> bool:
        """True if the steps that are compared have been taken."""
        if self.options.traced_step:
            return any(map(self._is_done, self._observed[self.options.traced_optimizer :][:1]))
        return any(map(self._is_done, self._observed))

    def _is_done(self, optimizer: AcceleratedOptimizer) -> bool:
        return bool(optimizer.num_updates >= self.options.steps)

    def _is_traced(self) -> bool:
        """Returns whether the outputs of the current step are recorded."""
        traced = self._observed[self.options.traced_optimizer :][:1]
        return any(optimizer.num_updates == self.options.traced_step - 1 for optimizer in traced)

    def finish(self) -> None:
        """Writes the weights after the last step, once."""
        if self._is_finished or not self._has_begun:
            return
        self._is_finished = True
        self._end_models(self._models)
        self.write("end", outputs=self._outputs, gradients=self._gradients, sizes=self._sizes)

    def free(self, accelerator: object) -> None:
        """Writes the weights of the models of an `Accelerator`, which it releases."""
        self._end_models([number for number, (owner, _) in self._models.items() if owner is accelerator])
        self._forget_micro_batches()

    def _end_models(self, numbers: Iterable[int]) -> None:
        """Writes the weights of models after their last step, once."""
        for number in list(numbers):
            self._write_weights("after", number)
            del self._models[number]

    def _forget_micro_batches(self) -> None:
        """Forgets micro-batches of which no step was taken."""
        self._losses, self._samples, self._unused = [], [], []

    def _owner_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """Returns the `Accelerator` that has prepared an optimizer."""
        owners = (
            each for each in self._accelerators if any(known is optimizer for known in each._optimizers)
        )
        return next(owners, self.accelerator)

    def _positions(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Returns the numbers of steps that prepared schedulers have taken."""
        schedulers = (scheduler.scheduler for scheduler in self._owner_of(optimizer)._schedulers)
        return [getattr(scheduler, "last_epoch", 0) for scheduler in schedulers]

    def _write_weights(self, moment: str, number: int) -> None:
        """Writes the whole weights and the buffers of a model."""
        from safetensors.torch import save_file

        accelerator, model = self._models[number]
        weights = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in accelerator.stream_weights(model)
        }
        buffers = dict(module_of(accelerator, model).named_buffers())
        for name, buffer in fsdp2_canonicalize_names(buffers).items():
            if not buffer.is_meta and name not in weights:
                whole = ops.to_full_tensors(buffer.detach())
                weights[f"{BUFFER}{name}"] = whole.to("cpu", copy=True).contiguous()
        path = Path(self.options.folder) / WEIGHTS_FILE.format(moment, number)
        if accelerator.is_main_process and not (moment == "before" and path.exists()):
            save_file(weights, path)

    # Outputs of modules

    def _trace(self, number: int, model: nn.Module) -> None:
        """Records the outputs of the modules of a model in the first micro-batch of a step."""
        model.register_forward_pre_hook(
            lambda module, args, kwargs: self._note_inputs(number, (args, kwargs)), with_kwargs=True
        )
        for name, module in model.named_modules():
            key = f"{number}:{name}"
            module.register_forward_hook(lambda module, _, output, key=key: self._note_output(key, output))

    def _trace_gradients(self, optimizer: AcceleratedOptimizer) -> None:
        """Keeps the norm of the gradient of each parameter of an optimizer."""
        own = set(map(id, optimizer.parameters()))
        for number, model in self._modules():
            for name, parameter in model.named_parameters():
                if id(parameter) in own and parameter.grad is not None:
                    gradient = ops.to_full_tensors(parameter.grad)
                    self._gradients[f"{number}:{name}"] = float(gradient.double().norm())

    def _note_inputs(self, number: int, inputs: object) -> None:
        leaves = [leaf for leaf in torch_private.pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        for index, leaf in enumerate(leaves):
            if leaf.ndim and (index == 0 or leaf.shape[0] == self.rows):
                self._note_rows(f"{INPUT}{number}:{index}", leaf)

    def _note_output(self, key: str, output: object) -> None:
        for leaf in torch_private.pytree.tree_leaves(output)[:1]:
            if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.is_floating_point():
                self._note_rows(key, leaf)

    @torch.no_grad()
    def _note_rows(self, key: str, tensor: torch.Tensor) -> None:
        """Records the size and a projection of each row of a tensor in the step that is traced."""
        if self.rows is None or self._losses or not self._is_traced():
            return
        rows = ops.to_full_tensors(tensor).reshape(tensor.shape[0], -1).double()
        # A projection differs for permuted entries, too, which have the same norm.
        direction = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype).cos()
        self._outputs.setdefault(key, []).append([rows.shape[1], *(rows @ direction).tolist()])
