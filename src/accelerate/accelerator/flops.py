"""Model FLOPs of one optimizer step, counted from the operators that it executes.

`Accelerator.count_flops` delegates to `StepFlops`. The formulas are those of `torch.utils.flop_counter`. Its
`FlopCounterMode` also counts recomputation, counts DTensors with their global shapes on each rank, and
registers hooks on all modules; the mode here does none of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from accelerate import torch_private
from accelerate.accelerator.runtime import Runtime
from accelerate.base import environ
from accelerate.devices import DeviceBackend, find_peak_flops
from accelerate.monitoring import BACKWARD, OPTIMIZER
from accelerate.settings import decode
from accelerate.settings.sections import DiagnosticsSection
from accelerate.state import step_clock
from accelerate.wrappers import has_compiled_regions

Formula = Callable[..., float]

_NOTHING: AbstractContextManager[None] = nullcontext()
"""Context manager of micro-batches that are not counted. It has no state."""
_HIDING_PACKAGES = ("transformer_engine",)
"""Packages whose modules call kernels that are not operators of torch."""
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Returns twice the FLOPs of the forward, without the scores that the kernel computes again."""
    return 2 * _attention(query, key, value)


def _packed_attention_backward(packet: Any) -> Formula:
    """Returns the formula of torch without the scores that the kernel computes again."""

    def count(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
        width, value_width = query.shape[-1], value.shape[-1]
        executed: float = flop_registry[packet](grad, query, key, value, *args, **kwargs)
        return executed * (2 * width + 2 * value_width) / (3 * width + 2 * value_width)

    return count


def _grouped(a: Tensor, b: Tensor, *args: Any, offs: Tensor | None = None, **_: Any) -> float:
    """Returns the FLOPs of the rows of all groups, which may be less than all rows."""
    offs = next((arg for arg in args if isinstance(arg, Tensor) and arg.dtype == torch.int32), offs)
    flops = 2 * a.numel() * b.shape[-1] // (a.shape[0] if a.dim() > b.dim() else 1)
    if offs is None:
        return flops
    length = a.shape[0] if b.dim() == 3 else b.shape[-1] if a.dim() == 3 else a.shape[-1]
    return flops * int(offs[-1]) / length


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> float:
    return 2 * x.numel() * weight.shape[0]


def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, mask: Sequence[bool], **_: Any) -> float:
    return _linear(x, weight) * sum(mask[:2])


def _find_formulas() -> Mapping[Any, Formula]:
    """Returns the formula of each operator of torch that multiplies matrices."""
    own: dict[str, Formula] = {
        "_grouped_mm": _grouped,
        "_scaled_grouped_mm": _grouped,
        "linear": _linear,
        "linear_backward": _linear_backward,
    }
    for name in (*_ATTENTION, "fused_attention_overrideable"):
        own[f"_scaled_dot_product_{name}"] = _attention
        own[f"_scaled_dot_product_{name}_backward"] = _attention_backward
    for name in ("_flash_attention_backward", "_efficient_attention_backward"):
        own[name] = _packed_attention_backward(getattr(torch.ops.aten, name))
    packets = {getattr(torch.ops.aten, name, None): formula for name, formula in own.items()}
    return {**flop_registry, **packets}


class FlopMode(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that counts the FLOPs of the operators of this rank.

    Args:
        is_left_out: Returns whether the current operator is not part of a forward or backward pass.
    """

    supports_higher_order_operators = True

    def __init__(self, is_left_out: Callable[[], bool]) -> None:
        super().__init__()
        self._is_left_out, self._formulas = is_left_out, _find_formulas()
        self.flops: Counter[torch.dtype] = Counter()
        """FLOPs by the dtype of the first factor."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass such as DTensor calls operators of its local tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(torch_private.packet_of(func))
        if formula is not None and not self._is_left_out():
            dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
            self.flops[dtype] += formula(*args, **kwargs, out_val=out)  # type: ignore[assignment]
        return out


class StepFlops:
    """Count of the model FLOPs of one optimizer step, which is written to the step clock.

    It counts the first step of its blocks after another step, when models are compiled and wrappers have
    started.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mode: FlopMode | None = None  # between the first and the last micro-batch of the step
        self._begin = 0  # number of steps before it
        self._is_done = self._is_inside = self._creates_graph = False

    def micro_batch(self) -> AbstractContextManager[None]:
        """Returns the context manager of one or several micro-batches of a step."""
        if self._is_done or self._is_inside or not step_clock.steps:
            return _NOTHING
        return self._counted()

    @contextmanager
    def _counted(self) -> Generator[None, None, None]:
        self._end_step()
        if self._mode is None and not self._is_done:
            self._begin_step()
        if self._mode is None:
            yield
            return
        self._is_inside = True
        try:
            with self._mode:
                yield
        except BaseException:
            self._mode = None  # the step is not complete
            raise
        finally:
            self._is_inside = False
        self._end_step()

    def _begin_step(self) -> None:
        self._is_done = not _is_countable(self._runtime)
        if not self._is_done:
            self._begin = _num_attempts()
            self._runtime.observers.put(self)
            self._mode = FlopMode(self._is_left_out)

    def _end_step(self) -> None:
        """Ends the count if the optimizer has stepped since its begin."""
        if self._mode is None or not (steps := _num_attempts() - self._begin):
            return
        flops, self._mode, self._is_done = self._mode.flops, None, True
        self._runtime.observers.remove(self)
        if flops:
            step_clock.step_flops = sum(flops.values()) / steps
            ((dtype, _),) = flops.most_common(1)
            step_clock.peak_flops = _find_peak(self._runtime.state.device_backend, dtype) or 0.0

    def before_backward(self, loss: Tensor, arguments: Mapping[str, Any]) -> None:
        """Keeps whether the gradients of a backward pass can be differentiated again."""
        self._creates_graph = arguments.get("create_graph", False)

    def _is_left_out(self) -> bool:
        """Returns whether an optimizer runs, or a forward inside of a backward pass.

        Gradients are recorded in a backward pass only while a forward is repeated.
        """
        if step_clock.current == OPTIMIZER:
            return True
        in_backward = step_clock.current == BACKWARD and not self._creates_graph
        return in_backward and torch.is_grad_enabled()


def _num_attempts() -> int:
    """Returns the number of steps, including those that were skipped."""
    return step_clock.steps + step_clock.num_skipped


def _is_countable(runtime: Runtime) -> bool:
    """Returns whether all kernels of a step are operators that a dispatch mode intercepts."""
    strategy, models = runtime.strategy, runtime.prepared.models
    if not strategy.holds_gradients or any(layer.divides_models for layer in strategy.layers):
        return False
    if torch_private.count_compilations() > runtime.num_compilations or any(
        map(has_compiled_regions, models)
    ):
        return False
    packages = {type(module).__module__.partition(".")[0] for model in models for module in model.modules()}
    return packages.isdisjoint(_HIDING_PACKAGES)


def _find_peak(backend: DeviceBackend, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOPs per second of the current device, as set by the user or from the data sheet."""
    chosen = decode(DiagnosticsSection, environ.current()).peak_tflops
    if chosen is not None:
        return chosen * 1e12
    name = getattr(backend.torch_module(), "get_device_name", str)()
    is_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return find_peak_flops(str(name), "tf32" if is_tf32 else str(dtype).removeprefix("torch."))
