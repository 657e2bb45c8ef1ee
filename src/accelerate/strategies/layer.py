"""Interface of a layer, one of the independent choices of which the strategy of a run is composed.

Mesh axes and models that are sharded before they are prepared are layers. `composition.py` has the table of
all layers, and a strategy calls their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.planning import Layout
from accelerate.strategies.session import Bundle
from accelerate.strategies.state import StrategyState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Ranks = tuple[int, ...]
Norm = Callable[[Sequence[Tensor], float], Tensor]
"""Function that returns the norm of the gradients of parameters, for a type of the norm."""


class Layer:
    """Base class of layers, whose hooks change nothing.

    A subclass overrides the hooks in which it takes part. They are called on all ranks, in the order of the
    layers:

    1. In each call of `prepare`: `check` and `check_model` before anything is changed, `preparing` around the
       replacement of all objects, and for each model `transform_model` before it is wrapped, `keep_model`
       in place of the wrapper, and `finish_model` at the end. `wrap_optimizer` is called for each optimizer,
       `transform_loader` for each loader after its model, and `follow_parameters` at the end.
    2. In each step: `split_batch` around the forward and backward pass of a batch, with `joined` for whole
       sequences in it, or `train_batch` in place of them, `no_sync` for micro-batches before the last one,
       `backward_done` after the last one, and `gradient_norm`.
    3. For the state of the run: `state_of`, `memory_layout`, `ranks_of_parameters` and `unsharded`.
    4. At the end: `release`.
    """

    row: str = ""  # name of its row in the table of layers
    divides_models: bool = False  # whether ranks have the gradients of different parameters of a model
    divided_by: str = ""  # argument by which a rank computes a part of a model, or of sequences of a loader
    splits_buffers: bool = False  # whether `split_batch` splits tensors of the training loop
    masks_documents: bool = True  # whether attention can isolate the documents of packed sequences
    groups: Any = None  # process groups in the form that an engine takes, or None

    # Prepare

    def check(self, bundle: Bundle) -> None:
        """Checks the objects of a call before anything is changed."""

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a model that the layer cannot transform."""

    def preparing(self, bundle: Bundle) -> AbstractContextManager[None]:
        """Returns a context manager for the replacement of all objects of a `prepare` call.

        A layer that decides which ranks work on the same batch changes models here, before loaders are
        prepared.
        """
        return nullcontext()

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        """Returns the model that runs this rank's part of each batch, which is `model` itself by default.

        A second call for a model changes nothing.

        Args:
            model: A model to train that is not wrapped yet. It may be changed in place.
            micro_batch_size: Samples of a rank in one forward.
        """
        return model

    def keep_model(
        self,
        model: nn.Module,
        convert: Callable[[nn.Module], nn.Module],
        *,
        to_device: bool,
        evaluation: bool,
    ) -> nn.Module | None:
        """Returns a model that the strategy does not wrap, in the mixed precision of the run, or None.

        Args:
            evaluation: Whether the model is not trained.
        """
        return None

    def parts_of(self, model: nn.Module) -> list[nn.Module] | None:
        """Returns the modules of this rank that are computed in place of a model, or None."""
        return None

    def parts_to_shard(self, model: nn.Module) -> list[nn.Module] | None:
        """Returns the modules of this rank that a strategy is to shard in place of a model, or None."""
        return None

    def model_sharded(self, model: nn.Module) -> None:
        """Follows a strategy that has sharded the parameters of a model."""

    def compile(self, model: nn.Module) -> nn.Module:
        """Returns a compiled model, or the model itself."""
        return model

    def finish_model(self, model: nn.Module, wrapped: nn.Module) -> None:
        """Follows a strategy that has wrapped and compiled a model to train."""

    def wrap_optimizer(self, optimizer: AcceleratedOptimizer, whole_matrices: bool | None) -> None:
        """Changes how a prepared optimizer steps.

        Args:
            whole_matrices: Whether the program requests that ranks step whole matrices, or None.
        """

    def follow_parameters(self) -> None:
        """Follows changes of parameters, after objects are prepared and before states are saved or loaded."""

    def transform_loader(self, loader: Iterable[Any], model: nn.Module) -> Any:
        """Returns a loader of this rank's part of each batch, which is `loader` itself by default."""
        return loader

    def loader_mesh(self, mesh: DeviceMesh | None) -> Any:
        """Returns the mesh over which loaders shard batches, which is that of the run by default."""
        return mesh

    # Steps

    def split_batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Returns a context manager for the forward and backward pass of one batch.

        Args:
            buffers: Tensors that are equal on all ranks of the axis, and are split in place.
            buffer_seq_dims: Dimension of each buffer to split.
            no_restore_buffers: Buffers that are not restored at the end.
        """
        return nullcontext()

    def joined(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns inputs of a model with whole sequences, of which a loop has split tensors.

        Called on all ranks, in the context of `split_batch` or outside of it.

        Args:
            inputs: Arguments by name.
        """
        return inputs

    def train_batch(
        self,
        model: nn.Module,
        batch: object,
        loss_fn: object,
        scale: Callable[[Tensor], Tensor],
        *,
        is_sum: bool,
    ) -> Tensor | None:
        """Computes the gradients of a batch and returns its loss, or None for a model that is called.

        Args:
            batch: The batch, as for `Accelerator.forward_backward`.
            loss_fn: Returns the loss of outputs and target, or None if the model computes it.
            scale: Returns a loss times its weight in the window.
            is_sum: Whether losses are sums over items.
        """
        return None

    def drop_gradients(self, model: nn.Module) -> None:
        """Removes the gradients of a model that are not in its parameters yet."""

    def backward_done(self) -> None:
        """Completes the gradients after the last backward pass before a step."""

    def no_sync(self, model: nn.Module, *, early: bool) -> AbstractContextManager[Any]:
        """Returns a context manager in which the backward pass of a model exchanges no gradients.

        Args:
            early: Whether gradients are reduced to shards, and only replicas of shards exchange none.
        """
        return nullcontext()

    def gradient_norm(self, norm: Norm, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Returns the norm of all gradients, each counted once, from a function for those of a rank."""
        return norm(parameters, norm_type)

    # State

    def state_of(self, state: StrategyState) -> StrategyState:
        """Returns the state of prepared models and optimizers, which is that of the strategy by default."""
        return state

    def ranks_of_parameters(self) -> Mapping[int, Ranks | None]:
        """Returns the ranks that have the same elements of parameters, by the ids of parameters.

        The value is None if gradients are not averaged over ranks with the same elements.
        """
        return {}

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context manager in which each rank has whole parameters, also in forwards."""
        return nullcontext()

    def memory_layout(self, layout: Layout) -> Layout:
        """Returns how the memory of a training step is sharded, from the layout without this layer."""
        return layout

    def release(self) -> None:
        """Releases the objects that the layer holds in addition to the prepared ones."""


class WeakStrategy:
    """Weak reference of a layer to the strategy that has the layer, which can be pickled with both."""

    def __init__(self, strategy: object) -> None:
        self._reference = ref(strategy)

    def __call__(self) -> Any:
        strategy = self._reference()
        assert strategy is not None
        return strategy

    def __reduce__(self) -> tuple[type[WeakStrategy], tuple[Any]]:
        return WeakStrategy, (self(),)


def divided(layout: Layout, layers: Iterable[Layer]) -> Layout:
    """Returns a layout of the memory of a training step with the layers of a run."""
    for layer in layers:
        layout = layer.memory_layout(layout)
    return layout


def entered(contexts: Iterable[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Returns a context manager that enters others in their order."""
    several = list(contexts)
    return _enter_all(several) if len(several) > 1 else next(iter(several), nullcontext())


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
