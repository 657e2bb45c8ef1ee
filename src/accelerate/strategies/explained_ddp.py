"""DistributedDataParallel whose errors name the fix.

`DataParallel` wraps models in it. It has the name of torch's class, which users see in printed models.
"""

from __future__ import annotations

from typing import Any

from torch.nn import parallel

from accelerate.base import StateError


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Replica of a model, as torch's DistributedDataParallel, with errors that name the fix."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the forward of the model.

        Raises:
            StateError: Parameters had no gradient in the backward pass before.
        """
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise StateError(
                "Parameters had no gradient in the backward pass before, and gradients were not averaged: "
                f"parameters of {type(self.module).__name__} took no part in the loss, or were frozen after "
                "`prepare`. Pass kwargs_handlers=[DistributedDataParallelKwargs("
                "find_unused_parameters=True)] to Accelerator, or freeze parameters before `prepare`."
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if not hasattr(model, name):
                raise
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, which the prepared "
                f"{type(model).__name__} has. Use accelerator.unwrap_model(model).{name}. To train with a "
                "method, call it in `forward`: only gradients of `forward` are averaged over the ranks.",
                name=name,
                obj=self,
            ) from None
